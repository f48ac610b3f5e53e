/* Base64 of RFC 4648 section 4: the standard alphabet, with padding, without line breaks. */
#ifndef CKPT_BASE64_H
#define CKPT_BASE64_H

#include "arena.h"

/* Append the text of n bytes; no NUL. out->failed on exhausted memory. */
void ckpt_base64_put(ckpt_buf *out, const uint8_t *p, size_t n);
/* Append the bytes of a text of n characters; false if it is not what ckpt_base64_put writes. */
bool ckpt_base64_get(ckpt_buf *out, const char *text, size_t n);

#endif
