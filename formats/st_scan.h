/* Strict single-pass JSON scanner for safetensors headers.
 *
 * Works on a private, writable copy of the text: strings are unescaped in place. The accepted
 * language is serde_json's as the safetensors reference uses it (RFC 8259; nesting at most 127
 * containers, surrogates paired, numbers finite in f64, no byte-order mark), which is stricter in
 * nothing and laxer in nothing. See torch-formats.md section 5. */
#ifndef CKPT_ST_SCAN_H
#define CKPT_ST_SCAN_H

#include "arena.h"

#define CKPT_ST_MAX_DEPTH 127
#define CKPT_ST_SCAN_PAD 8 /* zero bytes required behind the text */

typedef struct ckpt_st_scan {
    char *text, *p, *end; /* end[0 .. CKPT_ST_SCAN_PAD-1] are NUL and stop every loop */
    ckpt_err *err;
} ckpt_st_scan;

/* Whole text is UTF-8 (RFC 3629). Errors: CKPT_E_FORMAT with the byte. */
ckpt_status ckpt_st_utf8(const char *text, size_t n, ckpt_err *err) CKPT_MUST_USE;

/* Record "header byte N: expected EXPECTED, found TOKEN". Returns CKPT_E_FORMAT. */
ckpt_status ckpt_st_unexpected(ckpt_st_scan *s, const char *expected);

static inline void ckpt_st_space(ckpt_st_scan *s)
{
    while (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r')
        s->p++;
}

/* Skip white space, then consume `c` if it is next. */
static inline bool ckpt_st_accept(ckpt_st_scan *s, char c)
{
    ckpt_st_space(s);
    if (*s->p != c)
        return false;
    s->p++;
    return true;
}

/* String at the cursor (after white space), unescaped in place and NUL-terminated over its closing
 * quote. The text may contain NUL from \u0000. */
ckpt_status ckpt_st_string(ckpt_st_scan *s, char **out, size_t *len) CKPT_MUST_USE;
/* Object key and its colon. */
ckpt_status ckpt_st_key(ckpt_st_scan *s, char **out, size_t *len) CKPT_MUST_USE;
/* Integer literal 0 .. 2^63-1 without sign, fraction, exponent or leading zero. */
ckpt_status ckpt_st_uint(ckpt_st_scan *s, int64_t *out) CKPT_MUST_USE;
/* `null` */
bool ckpt_st_null(ckpt_st_scan *s);
/* Validate and skip any value; `depth` containers are open around it. Iterative. */
ckpt_status ckpt_st_skip(ckpt_st_scan *s, int depth) CKPT_MUST_USE;

#endif
