/* Base64: see base64.h. Four characters hold three bytes, most significant bits first; the last group
 * of one or two bytes is filled with zero bits and '='. Only that canonical form is read. */
#include "base64.h"

#include <string.h>

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void ckpt_base64_put(ckpt_buf *out, const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i += 3) {
        size_t have = n - i < 3 ? n - i : 3;
        uint32_t v = (uint32_t)p[i] << 16 | (have > 1 ? (uint32_t)p[i + 1] << 8 : 0) |
                     (have > 2 ? (uint32_t)p[i + 2] : 0);
        char group[4] = {alphabet[v >> 18], alphabet[v >> 12 & 63], alphabet[v >> 6 & 63],
                         alphabet[v & 63]};
        memset(group + have + 1, '=', 3 - have);
        ckpt_buf_append(out, group, sizeof group);
    }
}

static bool value_of(char c, uint32_t *v)
{
    const char *at = c != '\0' ? strchr(alphabet, c) : NULL;
    *v = at != NULL ? (uint32_t)(at - alphabet) : 0;
    return at != NULL;
}

bool ckpt_base64_get(ckpt_buf *out, const char *text, size_t n)
{
    if (n % 4 != 0)
        return false;
    for (size_t i = 0; i < n; i += 4) {
        const char *g = text + i;
        uint32_t v = 0, digit;
        int have = i + 4 < n || g[3] != '=' ? 3 : g[2] != '=' ? 2 : 1;
        for (int k = 0; k < 4; k++) {
            if (k > have && g[k] != '=')
                return false;
            if (k <= have && !value_of(g[k], &digit))
                return false;
            v = v << 6 | (k <= have ? digit : 0);
        }
        if ((v & (have == 1 ? 0xffffU : have == 2 ? 0xffU : 0U)) != 0)
            return false;
        const uint8_t bytes[3] = {(uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v};
        ckpt_buf_append(out, bytes, (size_t)have);
    }
    return !out->failed;
}
