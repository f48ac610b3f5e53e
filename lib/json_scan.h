/* Internal to json.c: decides whether text is JSON before cJSON sees it. */
#ifndef CKPT_JSON_SCAN_H
#define CKPT_JSON_SCAN_H

#include "arena.h"

#define CKPT_JSON_DEPTH 128

/* Check the whole text except for duplicate keys. `floats` receives one byte per number in document
 * order: 1 if it is written with a fraction or exponent. Errors: CKPT_E_FORMAT with the offset. */
ckpt_status ckpt_json_scan(const char *text, size_t n, ckpt_buf *floats,
                           ckpt_err *err) CKPT_MUST_USE;

#endif
