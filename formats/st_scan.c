/* JSON scanner for safetensors headers; see st_scan.h. Loops need no bounds checks because the
 * text ends in NUL bytes, which are legal nowhere in JSON. */
#include "st_scan.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "le.h"

#define ONES UINT64_C(0x0101010101010101)
#define HIGH UINT64_C(0x8080808080808080)

ckpt_status ckpt_st_utf8(const char *text, size_t n, ckpt_err *err)
{
    size_t i = 0;
    while (i < n) {
        if (n - i >= 8 && (ckpt_get_u64(text + i) & HIGH) == 0) {
            i += 8;
            continue;
        }
        size_t len = ckpt_utf8_len(text + i, n - i);
        if (len == 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "header byte %zu: invalid UTF-8 (byte 0x%02x)", i,
                             (unsigned)(unsigned char)text[i]);
        i += len;
    }
    return CKPT_OK;
}

/* Name the token at the cursor for a message. */
static void describe(const ckpt_st_scan *s, char *out, size_t cap)
{
    const char *p = s->p;
    if (p >= s->end) {
        snprintf(out, cap, "the end of the header");
    } else if (*p == '"') {
        snprintf(out, cap, "a string");
    } else if (*p == '{') {
        snprintf(out, cap, "an object");
    } else if (*p == '[') {
        snprintf(out, cap, "an array");
    } else if (*p == '-' || (*p >= '0' && *p <= '9') || (*p >= 'A' && *p <= 'Z') ||
               (*p >= 'a' && *p <= 'z')) {
        size_t n = 1;
        while (n < 40 && p[n] != '\0' && strchr("+-.0123456789", p[n]) != NULL)
            n++;
        while (n < 40 && ((p[n] >= 'a' && p[n] <= 'z') || (p[n] >= 'A' && p[n] <= 'Z') ||
                          (p[n] != '\0' && strchr("+-.0123456789", p[n]) != NULL)))
            n++;
        snprintf(out, cap, "%.*s", (int)n, p);
    } else {
        unsigned char c = (unsigned char)*p;
        snprintf(out, cap, c > 0x20 && c < 0x7f ? "'%c'" : "byte 0x%02x", c);
    }
}

ckpt_status ckpt_st_unexpected(ckpt_st_scan *s, const char *expected)
{
    char found[64];
    describe(s, found, sizeof found);
    return ckpt_fail(s->err, CKPT_E_FORMAT, "header byte %zu: expected %s, found %s",
                     (size_t)(s->p - s->text), expected, found);
}

/* First byte at or after p that is a quote, a backslash or a control character. The subtraction
 * trick flags such bytes exactly up to the first one, which is the only one used. */
static char *plain_run(char *p)
{
    for (;;) {
        uint64_t x = ckpt_get_u64(p);
        uint64_t quote = x ^ (ONES * '"'), slash = x ^ (ONES * '\\');
        uint64_t hit =
            ((x - ONES * 0x20) & ~x) | ((quote - ONES) & ~quote) | ((slash - ONES) & ~slash);
        hit &= HIGH;
        if (hit != 0)
            return p + (__builtin_ctzll(hit) >> 3);
        p += 8;
    }
}

static int hex4(const char *p)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return -1;
        v = v << 4 | d;
    }
    return v;
}

static char *put_utf8(char *w, unsigned cp)
{
    if (cp < 0x80) {
        *w++ = (char)cp;
    } else if (cp < 0x800) {
        *w++ = (char)(0xc0 | cp >> 6);
        *w++ = (char)(0x80 | (cp & 0x3f));
    } else if (cp < 0x10000) {
        *w++ = (char)(0xe0 | cp >> 12);
        *w++ = (char)(0x80 | (cp >> 6 & 0x3f));
        *w++ = (char)(0x80 | (cp & 0x3f));
    } else {
        *w++ = (char)(0xf0 | cp >> 18);
        *w++ = (char)(0x80 | (cp >> 12 & 0x3f));
        *w++ = (char)(0x80 | (cp >> 6 & 0x3f));
        *w++ = (char)(0x80 | (cp & 0x3f));
    }
    return w;
}

static ckpt_status bad_escape(const ckpt_st_scan *s, const char *at, const char *what)
{
    return ckpt_fail(s->err, CKPT_E_FORMAT, "header byte %zu: %s", (size_t)(at - s->text), what);
}

/* Decode the escape whose backslash is at q. Its text is never shorter than its UTF-8, so writing
 * at w <= q stays behind the cursor. */
static ckpt_status unescape(const ckpt_st_scan *s, char **q, char **w)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char *at = *q, c = at[1];
    const char *simple = c != '\0' ? strchr(from, c) : NULL;
    if (simple != NULL) {
        *(*w)++ = to[simple - from];
        *q = at + 2;
        return CKPT_OK;
    }
    if (c != 'u')
        return bad_escape(s, at, "invalid escape in a string");
    int v = hex4(at + 2);
    if (v < 0)
        return bad_escape(s, at, "invalid \\u escape in a string");
    at += 6;
    if (v >= 0xd800 && v < 0xe000) {
        int low = v < 0xdc00 && at[0] == '\\' && at[1] == 'u' ? hex4(at + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return bad_escape(s, *q, "\\u escape is a lone surrogate");
        v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
        at += 6;
    }
    *w = put_utf8(*w, (unsigned)v);
    *q = at;
    return CKPT_OK;
}

ckpt_status ckpt_st_string(ckpt_st_scan *s, char **out, size_t *len)
{
    ckpt_st_space(s);
    if (*s->p != '"')
        return ckpt_st_unexpected(s, "a string");
    char *start = s->p + 1, *q = plain_run(start), *w = q;
    while (*q != '"') {
        if (*q != '\\') {
            s->p = q;
            return q >= s->end ? bad_escape(s, q, "string is not closed")
                               : bad_escape(s, q, "control character in a string");
        }
        ckpt_status status = unescape(s, &q, &w);
        if (status != CKPT_OK)
            return status;
        char *stop = plain_run(q);
        memmove(w, q, (size_t)(stop - q));
        w += stop - q;
        q = stop;
    }
    *w = '\0';
    *out = start;
    *len = (size_t)(w - start);
    s->p = q + 1;
    return CKPT_OK;
}

ckpt_status ckpt_st_key(ckpt_st_scan *s, char **out, size_t *len)
{
    ckpt_status status = ckpt_st_string(s, out, len);
    if (status == CKPT_OK && !ckpt_st_accept(s, ':'))
        return ckpt_st_unexpected(s, "':'");
    return status;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

ckpt_status ckpt_st_uint(ckpt_st_scan *s, int64_t *out)
{
    static const char what[] = "an unsigned integer";
    ckpt_st_space(s);
    const char *p = s->p;
    if (!is_digit(*p) || (p[0] == '0' && is_digit(p[1])))
        return ckpt_st_unexpected(s, what);
    int64_t v = 0;
    for (; is_digit(*p); p++)
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, *p - '0', &v)) {
            char found[64];
            describe(s, found, sizeof found);
            return ckpt_fail(s->err, CKPT_E_FORMAT,
                             "header byte %zu: integer %s is above the limit %" PRId64,
                             (size_t)(s->p - s->text), found, INT64_MAX);
        }
    if (*p == '.' || *p == 'e' || *p == 'E')
        return ckpt_st_unexpected(s, what);
    s->p += p - s->p;
    *out = v;
    return CKPT_OK;
}

bool ckpt_st_null(ckpt_st_scan *s)
{
    ckpt_st_space(s);
    if (strncmp(s->p, "null", 4) != 0)
        return false;
    s->p += 4;
    return true;
}

static ckpt_status skip_number(ckpt_st_scan *s)
{
    char *p = s->p;
    bool exponent = false;
    if (*p == '-')
        p++;
    if (!is_digit(*p) || (p[0] == '0' && is_digit(p[1])))
        return ckpt_st_unexpected(s, "a value");
    while (is_digit(*p))
        p++;
    if (*p == '.') {
        if (!is_digit(*++p))
            return ckpt_st_unexpected(s, "a number");
        while (is_digit(*p))
            p++;
    }
    if (*p == 'e' || *p == 'E') {
        exponent = true;
        p += p[1] == '+' || p[1] == '-' ? 2 : 1;
        if (!is_digit(*p))
            return ckpt_st_unexpected(s, "a number");
        while (is_digit(*p))
            p++;
    }
    if ((exponent || p - s->p > 300) && isinf(strtod(s->p, NULL)))
        return ckpt_st_unexpected(s, "a number within the range of f64");
    s->p = p;
    return CKPT_OK;
}

static ckpt_status skip_scalar(ckpt_st_scan *s)
{
    static const char *const words[] = {"null", "true", "false"};
    char *text;
    size_t len;
    if (*s->p == '"')
        return ckpt_st_string(s, &text, &len);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strncmp(s->p, words[i], strlen(words[i])) == 0) {
            s->p += strlen(words[i]);
            return CKPT_OK;
        }
    return skip_number(s);
}

ckpt_status ckpt_st_skip(ckpt_st_scan *s, int depth)
{
    char close[CKPT_ST_MAX_DEPTH + 1];
    int n = 0;
    char *key;
    size_t len;
    ckpt_status status;
    do {
        bool empty = false;
        ckpt_st_space(s);
        if (*s->p == '{' || *s->p == '[') {
            if (depth + n >= CKPT_ST_MAX_DEPTH)
                return ckpt_fail(s->err, CKPT_E_FORMAT,
                                 "header byte %zu: JSON nested deeper than %d",
                                 (size_t)(s->p - s->text), CKPT_ST_MAX_DEPTH);
            close[n++] = *s->p++ == '{' ? '}' : ']';
            empty = ckpt_st_accept(s, close[n - 1]);
            if (!empty && close[n - 1] == '}' && (status = ckpt_st_key(s, &key, &len)) != CKPT_OK)
                return status;
            if (!empty)
                continue;
            n--;
        } else if ((status = skip_scalar(s)) != CKPT_OK) {
            return status;
        }
        while (n > 0 && ckpt_st_accept(s, close[n - 1]))
            n--;
        if (n > 0 && !ckpt_st_accept(s, ','))
            return ckpt_st_unexpected(s, close[n - 1] == '}' ? "',' or '}'" : "',' or ']'");
        if (n > 0 && close[n - 1] == '}' && (status = ckpt_st_key(s, &key, &len)) != CKPT_OK)
            return status;
    } while (n > 0);
    return CKPT_OK;
}
