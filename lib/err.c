/* Error chains. Text from input ends up on terminals and in CI logs, so every message passes
 * through one filter before it is stored. UTF-8 per RFC 3629, section 4. */
#include "err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

size_t ckpt_utf8_len(const void *s, size_t n)
{
    const uint8_t *p = s;
    if (n == 0)
        return 0;
    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return 0;
    size_t len = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (n < len)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return len;
}

/* Copy a NUL-terminated string as one printable line of at most cap-1 bytes, never cutting inside
 * a character or an escape. C1 controls (U+0080-U+009F) drive terminals too, so they are escaped
 * like C0. Returns the length. */
static size_t sanitise(char *out, size_t cap, const char *in)
{
    static const char hex[] = "0123456789abcdef";
    size_t n = strlen(in), used = 0;
    for (size_t i = 0; i < n;) {
        size_t len = ckpt_utf8_len(in + i, n - i);
        uint8_t c = (uint8_t)in[i];
        bool control =
            len == 1 ? c < 0x20 || c == 0x7f : len == 2 && c == 0xc2 && (uint8_t)in[i + 1] < 0xa0;
        if (len != 0 && !control) {
            if (used + len >= cap)
                break;
            memcpy(out + used, in + i, len);
            used += len;
            i += len;
            continue;
        }
        if (used + 4 >= cap)
            break;
        memcpy(out + used, "\\x", 2);
        out[used + 2] = hex[c >> 4];
        out[used + 3] = hex[c & 15];
        used += 4;
        i++;
    }
    out[used] = '\0';
    return used;
}

/* vsnprintf that marks a cut and leaves no half character at it. */
static void format(char *out, size_t cap, const char *fmt, va_list ap) CKPT_PRINTF(3, 0);
static void format(char *out, size_t cap, const char *fmt, va_list ap)
{
    int n = vsnprintf(out, cap, fmt, ap);
    if (n < 0) {
        out[0] = '\0';
        return;
    }
    if ((size_t)n < cap)
        return;
    size_t end = cap - 4;
    while (end > 0 && ((uint8_t)out[end] & 0xc0) == 0x80)
        end--;
    memcpy(out + end, "...", 4);
}

/* Text is formatted into scratch before it is stored because arguments may point into err->text. */
ckpt_status ckpt_fail(ckpt_err *err, ckpt_status code, const char *fmt, ...)
{
    if (err == NULL)
        return code;
    char raw[CKPT_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    format(raw, sizeof raw, fmt, ap);
    va_end(ap);
    err->code = code;
    (void)sanitise(err->text, sizeof err->text, raw);
    return code;
}

ckpt_status ckpt_fail_errno(ckpt_err *err, int errnum, const char *fmt, ...)
{
    if (err == NULL)
        return CKPT_E_IO;
    char raw[CKPT_ERR_MAX], reason[128];
    if (strerror_r(errnum, reason, sizeof reason) != 0)
        (void)snprintf(reason, sizeof reason, "error %d", errnum);
    va_list ap;
    va_start(ap, fmt);
    format(raw, sizeof raw - sizeof reason - 2, fmt, ap);
    va_end(ap);
    size_t n = strlen(raw);
    (void)snprintf(raw + n, sizeof raw - n, ": %s", reason);
    err->code = CKPT_E_IO;
    (void)sanitise(err->text, sizeof err->text, raw);
    errno = errnum;
    return CKPT_E_IO;
}

void ckpt_err_frame(ckpt_err *err, const char *fmt, ...)
{
    if (err == NULL)
        return;
    char raw[CKPT_ERR_MAX], text[CKPT_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    format(raw, sizeof raw, fmt, ap);
    va_end(ap);
    size_t n = sanitise(text, sizeof text, raw);
    if (err->text[0] != '\0' && n + 2 < sizeof text) {
        memcpy(text + n, ": ", 3);
        n += 2;
        (void)sanitise(text + n, sizeof text - n, err->text);
    }
    memcpy(err->text, text, strlen(text) + 1);
}

int ckpt_exit_code(ckpt_status status)
{
    static const int codes[] = {
#define CKPT_EXIT_ROW(name, exit_code, text) exit_code,
        CKPT_STATUS_LIST(CKPT_EXIT_ROW)
#undef CKPT_EXIT_ROW
    };
    size_t i = (size_t)status;
    return i < sizeof codes / sizeof codes[0] ? codes[i] : codes[CKPT_E_INTERNAL];
}

const char *ckpt_status_text(ckpt_status status)
{
    static const char *const texts[] = {
#define CKPT_TEXT_ROW(name, exit_code, text) text,
        CKPT_STATUS_LIST(CKPT_TEXT_ROW)
#undef CKPT_TEXT_ROW
    };
    size_t i = (size_t)status;
    return i < sizeof texts / sizeof texts[0] ? texts[i] : texts[CKPT_E_INTERNAL];
}
