/* The JSON grammar (RFC 8259) with byte offsets, iterative, and the limits of json.h. */
#include "json_scan.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NUMBER 63 /* cJSON's number buffer, less the NUL */

typedef struct scanner {
    const uint8_t *p;
    size_t n, at;
    ckpt_buf *floats;
    ckpt_err *err;
} scanner;

static ckpt_status fail_at(const scanner *s, size_t at, const char *expected)
{
    if (at >= s->n)
        return ckpt_fail(s->err, CKPT_E_FORMAT, "JSON offset %zu: expected %s, found end of text",
                         at, expected);
    uint8_t c = s->p[at];
    if (c > 0x20 && c < 0x7f)
        return ckpt_fail(s->err, CKPT_E_FORMAT, "JSON offset %zu: expected %s, found '%c'", at,
                         expected, c);
    return ckpt_fail(s->err, CKPT_E_FORMAT, "JSON offset %zu: expected %s, found byte 0x%02x", at,
                     expected, c);
}

static ckpt_status refuse_at(const scanner *s, size_t at, const char *what)
{
    return ckpt_fail(s->err, CKPT_E_FORMAT, "JSON offset %zu: %s", at, what);
}

static void skip_space(scanner *s)
{
    while (s->at < s->n && (s->p[s->at] == ' ' || s->p[s->at] == '\t' || s->p[s->at] == '\n' ||
                            s->p[s->at] == '\r'))
        s->at++;
}

/* Four hex digits at s->at, or -1. */
static int hex4(const scanner *s)
{
    if (s->n - s->at < 4)
        return -1;
    int v = 0;
    for (size_t i = 0; i < 4; i++) {
        int c = s->p[s->at + i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* After the backslash. */
static ckpt_status scan_escape(scanner *s)
{
    size_t start = s->at - 1;
    if (s->at >= s->n)
        return fail_at(s, s->at, "an escape");
    uint8_t c = s->p[s->at];
    if (c != 0 && strchr("\"\\/bfnrt", c) != NULL) {
        s->at++;
        return CKPT_OK;
    }
    if (c != 'u')
        return fail_at(s, s->at, "an escape");
    s->at++;
    int v = hex4(s);
    if (v < 0)
        return refuse_at(s, start, "\\u needs four hexadecimal digits");
    s->at += 4;
    if (v == 0)
        return refuse_at(s, start, "\\u0000 in a string");
    if (v < 0xd800 || v > 0xdfff)
        return CKPT_OK;
    if (v <= 0xdbff && s->n - s->at >= 6 && s->p[s->at] == '\\' && s->p[s->at + 1] == 'u') {
        s->at += 2;
        int low = hex4(s);
        s->at += 4;
        if (low >= 0xdc00 && low <= 0xdfff)
            return CKPT_OK;
    }
    return refuse_at(s, start, "lone surrogate");
}

static ckpt_status scan_string(scanner *s)
{
    size_t start = s->at++;
    while (s->at < s->n) {
        uint8_t c = s->p[s->at];
        if (c == '"') {
            s->at++;
            return CKPT_OK;
        }
        if (c == '\\') {
            s->at++;
            ckpt_status status = scan_escape(s);
            if (status != CKPT_OK)
                return status;
            continue;
        }
        if (c < 0x20)
            return refuse_at(s, s->at, "control character in a string");
        size_t len = ckpt_utf8_len(s->p + s->at, s->n - s->at);
        if (len == 0)
            return refuse_at(s, s->at, "invalid UTF-8");
        s->at += len;
    }
    return refuse_at(s, start, "string without end");
}

static bool scan_digits(scanner *s)
{
    size_t start = s->at;
    while (s->at < s->n && s->p[s->at] >= '0' && s->p[s->at] <= '9')
        s->at++;
    return s->at > start;
}

/* Whether a float literal overflows. The point is moved to the end of the digits and the exponent
 * adjusted, so that a locale with another decimal separator cannot disturb strtod. */
static bool float_is_finite(const char *literal, size_t len)
{
    char text[MAX_NUMBER + 24];
    size_t used = 0, i = 0;
    long exponent = 0;
    bool fraction = false;
    for (; i < len && literal[i] != 'e' && literal[i] != 'E'; i++) {
        if (literal[i] == '.') {
            fraction = true;
            continue;
        }
        text[used++] = literal[i];
        exponent -= fraction;
    }
    if (i < len) {
        char digits[MAX_NUMBER + 1];
        memcpy(digits, literal + i + 1, len - i - 1);
        digits[len - i - 1] = '\0';
        long e = strtol(digits, NULL, 10);
        exponent += e > 10000 ? 10000 : e < -10000 ? -10000 : e;
    }
    (void)snprintf(text + used, sizeof text - used, "e%ld", exponent);
    return isfinite(strtod(text, NULL));
}

/* The value of a well-formed literal: finite, and exact if it is an integer. */
static ckpt_status check_value(const scanner *s, size_t start, bool is_float)
{
    char text[MAX_NUMBER + 1], back[DBL_MAX_10_EXP + 8];
    size_t len = s->at - start;
    if (len > MAX_NUMBER)
        return refuse_at(s, start, "number longer than 63 characters");
    memcpy(text, s->p + start, len);
    text[len] = '\0';
    if (is_float)
        return float_is_finite(text, len) ? CKPT_OK : refuse_at(s, start, "number out of range");
    if (len <= 15)
        return CKPT_OK;
    (void)snprintf(back, sizeof back, "%.0f", strtod(text, NULL));
    if (strcmp(text, back) != 0)
        return ckpt_fail(s->err, CKPT_E_FORMAT,
                         "JSON offset %zu: integer %s is not exact in double precision", start,
                         text);
    return CKPT_OK;
}

static ckpt_status scan_number(scanner *s)
{
    size_t start = s->at;
    bool is_float = false;
    if (s->p[s->at] == '-')
        s->at++;
    size_t digits = s->at;
    if (!scan_digits(s))
        return fail_at(s, s->at, "a digit");
    if (s->p[digits] == '0' && s->at - digits > 1)
        return refuse_at(s, start, "number with a leading zero");
    if (s->at < s->n && s->p[s->at] == '.') {
        is_float = true;
        s->at++;
        if (!scan_digits(s))
            return fail_at(s, s->at, "a digit");
    }
    if (s->at < s->n && (s->p[s->at] == 'e' || s->p[s->at] == 'E')) {
        is_float = true;
        s->at++;
        if (s->at < s->n && (s->p[s->at] == '+' || s->p[s->at] == '-'))
            s->at++;
        if (!scan_digits(s))
            return fail_at(s, s->at, "a digit");
    }
    ckpt_status status = check_value(s, start, is_float);
    if (status == CKPT_OK)
        ckpt_buf_putc(s->floats, is_float);
    return status;
}

static ckpt_status scan_word(scanner *s)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        size_t len = strlen(words[i]);
        if (s->n - s->at >= len && memcmp(s->p + s->at, words[i], len) == 0) {
            s->at += len;
            return CKPT_OK;
        }
    }
    uint8_t c = s->p[s->at];
    if (c == 'N' || c == 'I')
        return refuse_at(s, s->at, "NaN and Infinity are not JSON");
    if (c == 0xef)
        return refuse_at(s, s->at, "byte order mark");
    return fail_at(s, s->at, "a value");
}

static ckpt_status scan_scalar(scanner *s)
{
    if (s->at >= s->n)
        return fail_at(s, s->at, "a value");
    uint8_t c = s->p[s->at];
    if (c == '"')
        return scan_string(s);
    if (c == '-' || (c >= '0' && c <= '9'))
        return scan_number(s);
    return scan_word(s);
}

/* A member's name and colon. */
static ckpt_status scan_key(scanner *s)
{
    skip_space(s);
    if (s->at >= s->n || s->p[s->at] != '"')
        return fail_at(s, s->at, "a string key");
    ckpt_status status = scan_string(s);
    if (status != CKPT_OK)
        return status;
    skip_space(s);
    if (s->at >= s->n || s->p[s->at] != ':')
        return fail_at(s, s->at, "':'");
    s->at++;
    return CKPT_OK;
}

/* After a value: close containers until one continues with a comma. *more false at the end. */
static ckpt_status scan_after(scanner *s, const char *open, int *depth, bool *more)
{
    while (*depth > 0) {
        skip_space(s);
        char close = open[*depth - 1];
        if (s->at < s->n && s->p[s->at] == ',') {
            s->at++;
            *more = true;
            return close == '}' ? scan_key(s) : CKPT_OK;
        }
        if (s->at >= s->n || s->p[s->at] != (uint8_t)close)
            return fail_at(s, s->at, close == '}' ? "',' or '}'" : "',' or ']'");
        s->at++;
        (*depth)--;
    }
    *more = false;
    return CKPT_OK;
}

static ckpt_status scan_document(scanner *s)
{
    char open[CKPT_JSON_DEPTH]; /* the closing character of each open container */
    int depth = 0;
    bool more = true;
    ckpt_status status = CKPT_OK;
    while (more && status == CKPT_OK) {
        skip_space(s);
        uint8_t c = s->at < s->n ? s->p[s->at] : 0;
        if (c == '{' || c == '[') {
            if (depth == CKPT_JSON_DEPTH)
                return refuse_at(s, s->at, "nested deeper than 128 levels");
            char close = c == '{' ? '}' : ']';
            s->at++;
            skip_space(s);
            if (s->at < s->n && s->p[s->at] == (uint8_t)close) {
                s->at++;
            } else {
                open[depth++] = close;
                if (close == '}')
                    status = scan_key(s);
                continue;
            }
        } else {
            status = scan_scalar(s);
        }
        if (status == CKPT_OK)
            status = scan_after(s, open, &depth, &more);
    }
    if (status != CKPT_OK)
        return status;
    skip_space(s);
    return s->at == s->n ? CKPT_OK : fail_at(s, s->at, "end of text");
}

ckpt_status ckpt_json_scan(const char *text, size_t n, ckpt_buf *floats, ckpt_err *err)
{
    scanner s = {.p = (const uint8_t *)text, .n = n, .floats = floats, .err = err};
    ckpt_status status = scan_document(&s);
    if (status == CKPT_OK && floats->failed)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu bytes of JSON", n);
    return status;
}
