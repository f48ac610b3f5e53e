/* Pickle values without children: integers, floats, strings, bytes, and the arguments they come
 * from. Integers are little-endian except BINFLOAT, which is big-endian; text arguments of protocol
 * 0 end at a newline. */
#include "pickle_vm.h"

#include <stdlib.h>

#include "checked.h"
#include "le.h"

#define SHORT_STRING ((size_t)32)
#define TEXT_MAX ((size_t)4300) /* digits of a textual integer, as CPython limits them */

/* ---- arguments -------------------------------------------------------------------------------- */

ckpt_status ckpt_vm_take(ckpt_vm *v, uint64_t n, const uint8_t **out)
{
    *out = NULL;
    if (n > v->n - v->pos)
        return VM_FAIL(v, "argument of %llu bytes, %zu left", (unsigned long long)n, v->n - v->pos);
    *out = v->p + v->pos;
    v->pos += (size_t)n;
    return CKPT_OK;
}

ckpt_status ckpt_vm_take_uint(ckpt_vm *v, size_t width, uint64_t *out)
{
    const uint8_t *p;
    ckpt_status status = ckpt_vm_take(v, width, &p);
    *out = 0;
    if (status != CKPT_OK)
        return status;
    switch (width) { /* the widths in use, as single loads */
    case 1:
        *out = p[0];
        break;
    case 2:
        *out = ckpt_get_u16(p);
        break;
    case 4:
        *out = ckpt_get_u32(p);
        break;
    default:
        for (size_t i = 0; i < width; i++)
            *out |= (uint64_t)p[i] << (8 * i);
    }
    return CKPT_OK;
}

ckpt_status ckpt_vm_take_line(ckpt_vm *v, const char **line, size_t *n)
{
    *line = NULL;
    *n = 0;
    const uint8_t *start = v->p + v->pos;
    const uint8_t *end = v->pos < v->n ? memchr(start, '\n', v->n - v->pos) : NULL;
    if (!end)
        return VM_FAIL(v, "text argument without newline");
    *line = (const char *)start;
    *n = (size_t)(end - start);
    v->pos += *n + 1;
    return CKPT_OK;
}

/* Length field of `width` bytes, then that many bytes. */
static ckpt_status take_counted(ckpt_vm *v, size_t width, const uint8_t **p, size_t *n)
{
    uint64_t len;
    *p = NULL;
    ckpt_status status = ckpt_vm_take_uint(v, width, &len);
    if (status == CKPT_OK)
        status = ckpt_vm_take(v, len, p);
    *n = (size_t)len;
    return status;
}

ckpt_status ckpt_vm_push_text(ckpt_vm *v, ckpt_pkl_kind kind, const void *p, size_t n,
                              ckpt_pkl **out)
{
    ckpt_status status = ckpt_vm_text_node(v, kind, p, n, out);
    return status == CKPT_OK ? ckpt_vm_push(v, *out) : status;
}

/* ---- scalars ---------------------------------------------------------------------------------- */

ckpt_status ckpt_vm_push_int(ckpt_vm *v, int64_t value)
{
    ckpt_pkl *node, **slot = NULL;
    if (value >= 0 && value < 256)
        slot = &v->small[value];
    else if (v->cache)
        slot = &v->cache->ints[((uint64_t)value * UINT64_C(0x9e3779b97f4a7c15)) >> 52];
    if (slot && *slot && (*slot)->i == value)
        return ckpt_vm_push(v, *slot);
    ckpt_status status = ckpt_vm_push_new(v, CKPT_PKL_INT, &node);
    if (status != CKPT_OK)
        return status;
    node->i = value;
    if (slot)
        *slot = node;
    return CKPT_OK;
}

/* n bytes of little-endian two's complement. */
static ckpt_status push_long(ckpt_vm *v, const uint8_t *p, size_t n)
{
    while (n > 8 && ((p[n - 1] == 0 && p[n - 2] < 0x80) || (p[n - 1] == 0xff && p[n - 2] >= 0x80)))
        n--;
    if (n > 8) {
        ckpt_pkl *node;
        return ckpt_vm_push_text(v, CKPT_PKL_BIGINT, p, n, &node);
    }
    uint64_t value = n && p[n - 1] >= 0x80 ? UINT64_MAX : 0;
    for (size_t i = n; i-- > 0;)
        value = value << 8 | p[i];
    int64_t signed_value;
    memcpy(&signed_value, &value, sizeof signed_value);
    return ckpt_vm_push_int(v, signed_value);
}

ckpt_status ckpt_vm_push_single(ckpt_vm *v, ckpt_pkl **slot, ckpt_pkl_kind kind, int64_t value)
{
    if (!*slot) {
        ckpt_status status = ckpt_vm_node(v, kind, slot);
        if (status != CKPT_OK)
            return status;
        (*slot)->i = value;
    }
    return ckpt_vm_push(v, *slot);
}

ckpt_status ckpt_vm_op_none(ckpt_vm *v, uint8_t op)
{
    (void)op;
    return ckpt_vm_push_single(v, &v->none, CKPT_PKL_NONE, 0);
}

ckpt_status ckpt_vm_op_bool(ckpt_vm *v, uint8_t op)
{
    return ckpt_vm_push_single(v, &v->truth[op == 0x88], CKPT_PKL_BOOL, op == 0x88);
}

ckpt_status ckpt_vm_op_binint(ckpt_vm *v, uint8_t op)
{
    uint64_t value;
    ckpt_status status = ckpt_vm_take_uint(v, op == 'K' ? 1 : op == 'M' ? 2 : 4, &value);
    if (status != CKPT_OK)
        return status;
    if (op == 'J' && value > INT32_MAX)
        return ckpt_vm_push_int(v, (int64_t)value - ((int64_t)1 << 32));
    return ckpt_vm_push_int(v, (int64_t)value);
}

ckpt_status ckpt_vm_op_long_n(ckpt_vm *v, uint8_t op)
{
    const uint8_t *p;
    uint64_t n;
    ckpt_status status = ckpt_vm_take_uint(v, op == 0x8a ? 1 : 4, &n);
    if (status != CKPT_OK)
        return status;
    if (op == 0x8b && n > INT32_MAX)
        return VM_FAIL(v, "negative integer length");
    status = ckpt_vm_take(v, n, &p);
    return status == CKPT_OK ? push_long(v, p, (size_t)n) : status;
}

static ckpt_status push_float(ckpt_vm *v, double value)
{
    ckpt_pkl *node;
    ckpt_status status = ckpt_vm_push_new(v, CKPT_PKL_FLOAT, &node);
    if (status == CKPT_OK)
        node->f = value;
    return status;
}

ckpt_status ckpt_vm_op_binfloat(ckpt_vm *v, uint8_t op)
{
    (void)op;
    const uint8_t *p;
    ckpt_status status = ckpt_vm_take(v, 8, &p);
    if (status != CKPT_OK)
        return status;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | p[i];
    double value;
    memcpy(&value, &bits, sizeof value);
    return push_float(v, value);
}

ckpt_status ckpt_vm_op_float_text(ckpt_vm *v, uint8_t op)
{
    (void)op;
    const char *line;
    size_t n;
    char text[128], *end;
    ckpt_status status = ckpt_vm_take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    if (n == 0 || n >= sizeof text || memchr(line, 0, n))
        return VM_FAIL(v, "bad float text of %zu bytes", n);
    memcpy(text, line, n);
    text[n] = 0;
    double value = strtod(text, &end);
    if (*end)
        return VM_FAIL(v, "bad float text '%s'", text);
    return push_float(v, value);
}

/* Decimal text to two's complement bytes; quadratic, bounded by TEXT_MAX. */
static ckpt_status push_decimal(ckpt_vm *v, const char *s, size_t n)
{
    uint8_t bytes[TEXT_MAX / 2];
    size_t len = 1;
    bool negative = n && s[0] == '-';
    size_t i = n && (s[0] == '-' || s[0] == '+');
    if (i == n || n > TEXT_MAX)
        return VM_FAIL(v, "bad integer text of %zu bytes", n);
    bytes[0] = 0;
    for (; i < n; i++) {
        if (s[i] < '0' || s[i] > '9')
            return VM_FAIL(v, "bad integer text");
        unsigned carry = (unsigned)(s[i] - '0');
        for (size_t k = 0; k < len; k++) {
            carry += bytes[k] * 10U;
            bytes[k] = (uint8_t)carry;
            carry >>= 8;
        }
        if (carry)
            bytes[len++] = (uint8_t)carry;
    }
    bytes[len++] = 0;
    unsigned borrow = 1;
    for (size_t k = 0; negative && k < len; k++) {
        borrow += (uint8_t)~bytes[k];
        bytes[k] = (uint8_t)borrow;
        borrow >>= 8;
    }
    return push_long(v, bytes, len);
}

/* INT and LONG text; INT 00 and 01 are how protocol 0 writes booleans. */
ckpt_status ckpt_vm_op_int_text(ckpt_vm *v, uint8_t op)
{
    const char *line;
    size_t n;
    ckpt_status status = ckpt_vm_take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    if (op == 'I' && n == 2 && line[0] == '0' && (line[1] == '0' || line[1] == '1'))
        return ckpt_vm_op_bool(v, line[1] == '1' ? 0x88 : 0x89);
    if (op == 'L' && n && line[n - 1] == 'L')
        n--;
    return push_decimal(v, line, n);
}

/* ---- strings and bytes ------------------------------------------------------------------------ */

/* Length of the UTF-8 sequence at s, 0 if invalid. */
static size_t utf8_len(const uint8_t *s, size_t n)
{
    uint8_t c = s[0];
    size_t len = c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (len == 0 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((c == 0xe0 && s[1] < 0xa0) || (c == 0xf0 && s[1] < 0x90) || (c == 0xf4 && s[1] > 0x8f))
        return 0;
    return len;
}

bool ckpt_vm_utf8(const uint8_t *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t len = s[i] < 0x80 ? 1 : utf8_len(s + i, n - i);
        if (len == 0)
            return false;
        i += len;
    }
    return true;
}

uint32_t ckpt_vm_hash(uint32_t seed, const void *p, size_t n)
{
    const uint8_t *s = p;
    uint32_t h = seed ^ 2166136261U; /* FNV-1a */
    for (size_t i = 0; i < n; i++)
        h = (h ^ s[i]) * 16777619U;
    return h ^ h >> 15;
}

static ckpt_status bad_utf8(ckpt_vm *v, size_t n)
{
    return VM_FAIL(v, "string of %zu bytes is not UTF-8", n);
}

ckpt_status ckpt_vm_op_unicode(ckpt_vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_pkl *node;
    ckpt_status status = take_counted(v, op == 'X' ? 4 : op == 0x8c ? 1 : 8, &p, &n);
    if (status != CKPT_OK)
        return status;
    if (n > SHORT_STRING)
        return ckpt_vm_utf8(p, n) ? ckpt_vm_push_text(v, CKPT_PKL_STR, p, n, &node)
                                  : bad_utf8(v, n);
    ckpt_pkl **slot = &v->strings[ckpt_vm_hash(0, p, n) % (sizeof v->strings / sizeof *v->strings)];
    if (*slot && (*slot)->len == n && memcmp((*slot)->str, p, n) == 0)
        return ckpt_vm_push(v, *slot);
    if (!ckpt_vm_utf8(p, n))
        return bad_utf8(v, n);
    return ckpt_vm_push_text(v, CKPT_PKL_STR, p, n, slot);
}

ckpt_status ckpt_vm_op_bytes(ckpt_vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_pkl *node;
    ckpt_status status = take_counted(v, op == 'B' ? 4 : op == 'C' ? 1 : 8, &p, &n);
    if (status == CKPT_OK)
        status = ckpt_vm_push_text(v, CKPT_PKL_BYTES, p, n, &node);
    if (status == CKPT_OK)
        node->b = op == 0x96;
    return status;
}

/* Python-2 str: text when it reads as UTF-8, else bytes. */
ckpt_status ckpt_vm_push_py2_str(ckpt_vm *v, const void *p, size_t n)
{
    ckpt_pkl *node;
    return ckpt_vm_push_text(v, ckpt_vm_utf8(p, n) ? CKPT_PKL_STR : CKPT_PKL_BYTES, p, n, &node);
}

ckpt_status ckpt_vm_op_binstring(ckpt_vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_status status = take_counted(v, op == 'T' ? 4 : 1, &p, &n);
    return status == CKPT_OK ? ckpt_vm_push_py2_str(v, p, n) : status;
}

static int hex_value(uint8_t c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* `digits` hexadecimal digits at s, or -1. */
static int64_t hex_run(const char *s, size_t n, size_t digits)
{
    int64_t value = 0;
    if (digits > n)
        return -1;
    for (size_t i = 0; i < digits; i++) {
        int d = hex_value((uint8_t)s[i]);
        if (d < 0)
            return -1;
        value = value * 16 + d;
    }
    return value;
}

/* One escape of a repr'd Python-2 str, after the backslash. Returns characters used, 0 if bad. */
static size_t str_escape(const char *s, size_t n, uint8_t *out)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *hit = n && s[0] ? strchr(from, s[0]) : NULL;
    if (hit) {
        *out = (uint8_t)to[hit - from];
        return 1;
    }
    if (n && s[0] == 'x') {
        int64_t value = hex_run(s + 1, n - 1, 2);
        *out = (uint8_t)value;
        return value < 0 ? 0 : 3;
    }
    size_t used = 0;
    unsigned value = 0;
    while (used < 3 && used < n && s[used] >= '0' && s[used] <= '7')
        value = value * 8 + (unsigned)(s[used++] - '0');
    *out = (uint8_t)value;
    return used;
}

ckpt_status ckpt_vm_op_string_text(ckpt_vm *v, uint8_t op)
{
    (void)op;
    const char *s;
    size_t n, len = 0;
    ckpt_status status = ckpt_vm_take_line(v, &s, &n);
    if (status != CKPT_OK)
        return status;
    if (n < 2 || (s[0] != '\'' && s[0] != '"') || s[n - 1] != s[0])
        return VM_FAIL(v, "string argument is not quoted");
    uint8_t *out = ckpt_arena_alloc(v->arena, n);
    if (!out)
        return ckpt_vm_no_memory(v);
    for (size_t i = 1; i < n - 1;) {
        if (s[i] != '\\') {
            out[len++] = (uint8_t)s[i++];
            continue;
        }
        size_t used = str_escape(s + i + 1, n - 2 - i, &out[len++]);
        if (used == 0)
            return VM_FAIL(v, "bad escape in string argument");
        i += 1 + used;
    }
    return ckpt_vm_push_py2_str(v, out, len);
}

static size_t put_utf8(uint8_t *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    size_t len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = len; i-- > 1; c >>= 6)
        out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)(lead[len] | c);
    return len;
}

/* raw-unicode-escape: Latin-1 bytes with \uXXXX and \UXXXXXXXX. */
ckpt_status ckpt_vm_op_unicode_text(ckpt_vm *v, uint8_t op)
{
    (void)op;
    const char *s;
    size_t n, len = 0, size;
    ckpt_pkl *node;
    ckpt_status status = ckpt_vm_take_line(v, &s, &n);
    if (status != CKPT_OK)
        return status;
    uint8_t *out = ckpt_mul_size(n, 2, &size) ? ckpt_arena_alloc(v->arena, size + 1) : NULL;
    if (!out)
        return ckpt_vm_no_memory(v);
    for (size_t i = 0; i < n;) {
        size_t digits = s[i] == '\\' && i + 1 < n ? (s[i + 1] == 'u')   ? 4
                                                    : (s[i + 1] == 'U') ? 8
                                                                        : 0
                                                  : 0;
        int64_t c = digits ? hex_run(s + i + 2, n - i - 2, digits) : (uint8_t)s[i];
        if (c < 0 || c > 0x10ffff)
            return VM_FAIL(v, "bad escape in unicode argument");
        len += put_utf8(out + len, (uint32_t)c);
        i += digits ? digits + 2 : 1;
    }
    return ckpt_vm_push_text(v, CKPT_PKL_STR, out, len, &node);
}
