/* Pickle virtual machine, protocols 0-5, that builds inert nodes.
 *
 * Opcodes follow CPython Lib/pickle.py; the table at the end of this file is the specification in
 * force. Integers are little-endian except BINFLOAT, which is big-endian. Text arguments of
 * protocol 0 end at a newline. Deviations, all deliberate: a GLOBAL is only recorded; EXT and
 * out-of-band buffers are refused; text after STOP is ignored; SETITEM, APPEND and BUILD attach to
 * the kinds of node that can carry them and are an error on any other. */
#include "pickle_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "le.h"

#define DEFAULT_NODES ((size_t)1 << 20)
#define DEFAULT_DEPTH ((size_t)1 << 20)
/* Real picklers number the memo densely. Indexes far above the count go to a small sorted table. */
#define MEMO_SLACK ((uint64_t)4096)
#define MEMO_SPARSE_MAX ((size_t)16384)
#define TEXT_MAX ((size_t)4300) /* digits of a textual integer, as CPython limits them */

typedef struct sparse_slot {
    uint64_t index;
    ckpt_pkl *node;
} sparse_slot;

typedef struct vm {
    const uint8_t *p;
    size_t n, pos, op_pos;
    ckpt_arena *arena;
    ckpt_err *err;
    ckpt_pkl **stack;
    size_t sp, stack_cap;
    size_t *marks; /* stack heights */
    size_t n_marks, marks_cap;
    ckpt_pkl **dense;
    size_t dense_cap;
    sparse_slot *sparse;
    size_t n_sparse, sparse_cap;
    uint64_t memo_count;
    size_t max_nodes, max_depth;
    uint32_t n_nodes;
    /* Immutable values without identity are shared; this halves the nodes of a .metadata. */
    ckpt_pkl *none, *truth[2], *empty_tuple, *small[256];
    const char *unknown;
    ckpt_pkl *result;
} vm;

typedef ckpt_status (*op_fn)(vm *v, uint8_t op);

#define FAIL(v, ...) fail_at(v, CKPT_E_FORMAT, __VA_ARGS__)

static ckpt_status fail_at(vm *v, ckpt_status code, const char *fmt, ...) CKPT_PRINTF(3, 4);

static ckpt_status fail_at(vm *v, ckpt_status code, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return ckpt_fail(v->err, code, "pickle opcode 0x%02x at byte %zu: %s",
                     v->op_pos < v->n ? v->p[v->op_pos] : 0U, v->op_pos, text);
}

static ckpt_status no_memory(vm *v)
{
    return ckpt_fail(v->err, CKPT_E_NOMEM, "pickle: out of memory after %u nodes", v->n_nodes);
}

/* ---- nodes, stack, marks ---------------------------------------------------------------------- */

static ckpt_status new_node(vm *v, ckpt_pkl_kind kind, ckpt_pkl **out)
{
    *out = NULL;
    if (v->n_nodes >= v->max_nodes)
        return FAIL(v, "more than %zu nodes", v->max_nodes);
    bool full = kind == CKPT_PKL_GLOBAL || kind == CKPT_PKL_OBJECT;
    ckpt_pkl *node = ckpt_arena_alloc(v->arena, full ? sizeof(ckpt_pkl) : offsetof(ckpt_pkl, name));
    if (!node)
        return no_memory(v);
    node->kind = kind;
    node->id = v->n_nodes++;
    *out = node;
    return CKPT_OK;
}

static ckpt_status push(vm *v, ckpt_pkl *node)
{
    if (v->sp >= v->max_depth)
        return FAIL(v, "stack deeper than %zu", v->max_depth);
    if (v->sp == v->stack_cap) {
        ckpt_status status =
            ckpt_grow((void **)&v->stack, &v->stack_cap, v->sp + 1, sizeof *v->stack, v->err);
        if (status != CKPT_OK)
            return status;
    }
    v->stack[v->sp++] = node;
    return CKPT_OK;
}

static ckpt_status push_new(vm *v, ckpt_pkl_kind kind, ckpt_pkl **out)
{
    ckpt_status status = new_node(v, kind, out);
    return status == CKPT_OK ? push(v, *out) : status;
}

static size_t floor_of(const vm *v)
{
    return v->n_marks ? v->marks[v->n_marks - 1] : 0;
}

/* Values below the innermost mark are out of reach, as in CPython. */
static ckpt_status need(vm *v, size_t n)
{
    if (v->sp - floor_of(v) < n)
        return FAIL(v, "needs %zu values, stack has %zu above the mark", n, v->sp - floor_of(v));
    return CKPT_OK;
}

static ckpt_status pop_mark(vm *v, ckpt_pkl ***items, size_t *n)
{
    if (v->n_marks == 0)
        return FAIL(v, "no mark");
    size_t at = v->marks[--v->n_marks];
    *items = v->stack ? v->stack + at : NULL;
    *n = v->sp - at;
    v->sp = at;
    return CKPT_OK;
}

static ckpt_status copy_items(vm *v, ckpt_pkl *node, ckpt_pkl **items, size_t n)
{
    if (n == 0)
        return CKPT_OK;
    node->items = ckpt_arena_array(v->arena, n, sizeof *items);
    if (!node->items)
        return no_memory(v);
    memcpy(node->items, items, n * sizeof *items);
    node->n_items = n;
    return CKPT_OK;
}

/* Capacity is a function of the length: 0, then powers of two from 2. */
static size_t vec_cap(size_t n)
{
    size_t cap = 2;
    if (n == 0)
        return 0;
    while (cap < n)
        cap *= 2;
    return cap;
}

static ckpt_status extend(vm *v, ckpt_pkl ***array, size_t *len, ckpt_pkl **items, size_t n)
{
    size_t old = vec_cap(*len), cap = vec_cap(*len + n);
    if (cap != old) {
        ckpt_pkl **grown = ckpt_arena_array(v->arena, cap, sizeof *grown);
        if (!grown)
            return no_memory(v);
        if (*len)
            memcpy(grown, *array, *len * sizeof *grown);
        *array = grown;
    }
    if (n)
        memcpy(*array + *len, items, n * sizeof *items);
    *len += n;
    return CKPT_OK;
}

/* ---- arguments -------------------------------------------------------------------------------- */

static ckpt_status take(vm *v, uint64_t n, const uint8_t **out)
{
    *out = NULL;
    if (n > v->n - v->pos)
        return FAIL(v, "argument of %llu bytes, %zu left", (unsigned long long)n, v->n - v->pos);
    *out = v->p + v->pos;
    v->pos += (size_t)n;
    return CKPT_OK;
}

static ckpt_status take_uint(vm *v, size_t width, uint64_t *out)
{
    const uint8_t *p;
    ckpt_status status = take(v, width, &p);
    *out = 0;
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < width; i++)
        *out |= (uint64_t)p[i] << (8 * i);
    return CKPT_OK;
}

static ckpt_status take_line(vm *v, const char **line, size_t *n)
{
    *line = NULL;
    *n = 0;
    const uint8_t *start = v->p + v->pos;
    const uint8_t *end = v->pos < v->n ? memchr(start, '\n', v->n - v->pos) : NULL;
    if (!end)
        return FAIL(v, "text argument without newline");
    *line = (const char *)start;
    *n = (size_t)(end - start);
    v->pos += *n + 1;
    return CKPT_OK;
}

/* Length field of `width` bytes, then that many bytes. */
static ckpt_status take_counted(vm *v, size_t width, const uint8_t **p, size_t *n)
{
    uint64_t len;
    *p = NULL;
    ckpt_status status = take_uint(v, width, &len);
    if (status == CKPT_OK)
        status = take(v, len, p);
    *n = (size_t)len;
    return status;
}

static ckpt_status push_text(vm *v, ckpt_pkl_kind kind, const void *p, size_t n, ckpt_pkl **out)
{
    ckpt_status status = push_new(v, kind, out);
    if (status != CKPT_OK)
        return status;
    (*out)->str = ckpt_arena_strndup(v->arena, p, n);
    (*out)->len = n;
    return (*out)->str ? CKPT_OK : no_memory(v);
}

/* ---- scalars ---------------------------------------------------------------------------------- */

static ckpt_status push_int(vm *v, int64_t value)
{
    ckpt_pkl *node;
    bool cached = value >= 0 && value < 256;
    if (cached && v->small[value])
        return push(v, v->small[value]);
    ckpt_status status = push_new(v, CKPT_PKL_INT, &node);
    if (status != CKPT_OK)
        return status;
    node->i = value;
    if (cached)
        v->small[value] = node;
    return CKPT_OK;
}

/* n bytes of little-endian two's complement. */
static ckpt_status push_long(vm *v, const uint8_t *p, size_t n)
{
    while (n > 8 && ((p[n - 1] == 0 && p[n - 2] < 0x80) || (p[n - 1] == 0xff && p[n - 2] >= 0x80)))
        n--;
    if (n > 8) {
        ckpt_pkl *node;
        return push_text(v, CKPT_PKL_BIGINT, p, n, &node);
    }
    uint64_t value = n && p[n - 1] >= 0x80 ? UINT64_MAX : 0;
    for (size_t i = n; i-- > 0;)
        value = value << 8 | p[i];
    int64_t signed_value;
    memcpy(&signed_value, &value, sizeof signed_value);
    return push_int(v, signed_value);
}

static ckpt_status push_single(vm *v, ckpt_pkl **slot, ckpt_pkl_kind kind, int64_t value)
{
    if (!*slot) {
        ckpt_status status = new_node(v, kind, slot);
        if (status != CKPT_OK)
            return status;
        (*slot)->i = value;
    }
    return push(v, *slot);
}

static ckpt_status op_none(vm *v, uint8_t op)
{
    (void)op;
    return push_single(v, &v->none, CKPT_PKL_NONE, 0);
}

static ckpt_status op_bool(vm *v, uint8_t op)
{
    return push_single(v, &v->truth[op == 0x88], CKPT_PKL_BOOL, op == 0x88);
}

static ckpt_status op_binint(vm *v, uint8_t op)
{
    uint64_t value;
    ckpt_status status = take_uint(v, op == 'K' ? 1 : op == 'M' ? 2 : 4, &value);
    if (status != CKPT_OK)
        return status;
    if (op == 'J' && value > INT32_MAX)
        return push_int(v, (int64_t)value - ((int64_t)1 << 32));
    return push_int(v, (int64_t)value);
}

static ckpt_status op_long_n(vm *v, uint8_t op)
{
    const uint8_t *p;
    uint64_t n;
    ckpt_status status = take_uint(v, op == 0x8a ? 1 : 4, &n);
    if (status != CKPT_OK)
        return status;
    if (op == 0x8b && n > INT32_MAX)
        return FAIL(v, "negative integer length");
    status = take(v, n, &p);
    return status == CKPT_OK ? push_long(v, p, (size_t)n) : status;
}

static ckpt_status push_float(vm *v, double value)
{
    ckpt_pkl *node;
    ckpt_status status = push_new(v, CKPT_PKL_FLOAT, &node);
    if (status == CKPT_OK)
        node->f = value;
    return status;
}

static ckpt_status op_binfloat(vm *v, uint8_t op)
{
    (void)op;
    const uint8_t *p;
    ckpt_status status = take(v, 8, &p);
    if (status != CKPT_OK)
        return status;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | p[i];
    double value;
    memcpy(&value, &bits, sizeof value);
    return push_float(v, value);
}

static ckpt_status op_float_text(vm *v, uint8_t op)
{
    (void)op;
    const char *line;
    size_t n;
    char text[128], *end;
    ckpt_status status = take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    if (n == 0 || n >= sizeof text || memchr(line, 0, n))
        return FAIL(v, "bad float text of %zu bytes", n);
    memcpy(text, line, n);
    text[n] = 0;
    double value = strtod(text, &end);
    if (*end)
        return FAIL(v, "bad float text '%s'", text);
    return push_float(v, value);
}

/* Decimal text to two's complement bytes; quadratic, bounded by TEXT_MAX. */
static ckpt_status push_decimal(vm *v, const char *s, size_t n)
{
    uint8_t bytes[TEXT_MAX / 2];
    size_t len = 1;
    bool negative = n && s[0] == '-';
    size_t i = n && (s[0] == '-' || s[0] == '+');
    if (i == n || n > TEXT_MAX)
        return FAIL(v, "bad integer text of %zu bytes", n);
    bytes[0] = 0;
    for (; i < n; i++) {
        if (s[i] < '0' || s[i] > '9')
            return FAIL(v, "bad integer text");
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
static ckpt_status op_int_text(vm *v, uint8_t op)
{
    const char *line;
    size_t n;
    ckpt_status status = take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    if (op == 'I' && n == 2 && line[0] == '0' && (line[1] == '0' || line[1] == '1'))
        return op_bool(v, line[1] == '1' ? 0x88 : 0x89);
    if (op == 'L' && n && line[n - 1] == 'L')
        n--;
    return push_decimal(v, line, n);
}

/* ---- strings and bytes ------------------------------------------------------------------------ */

/* Length of the UTF-8 sequence at s, 0 if invalid. Encoded surrogates pass: Python pickles them. */
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

static bool utf8_valid(const uint8_t *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t len = s[i] < 0x80 ? 1 : utf8_len(s + i, n - i);
        if (len == 0)
            return false;
        i += len;
    }
    return true;
}

static ckpt_status op_unicode(vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_pkl *node;
    ckpt_status status = take_counted(v, op == 'X' ? 4 : op == 0x8c ? 1 : 8, &p, &n);
    if (status != CKPT_OK)
        return status;
    if (!utf8_valid(p, n))
        return FAIL(v, "string of %zu bytes is not UTF-8", n);
    return push_text(v, CKPT_PKL_STR, p, n, &node);
}

static ckpt_status op_bytes(vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_pkl *node;
    ckpt_status status = take_counted(v, op == 'B' ? 4 : op == 'C' ? 1 : 8, &p, &n);
    if (status == CKPT_OK)
        status = push_text(v, CKPT_PKL_BYTES, p, n, &node);
    if (status == CKPT_OK)
        node->b = op == 0x96;
    return status;
}

/* Python-2 str: text when it reads as UTF-8, else bytes. */
static ckpt_status push_py2_str(vm *v, const void *p, size_t n)
{
    ckpt_pkl *node;
    return push_text(v, utf8_valid(p, n) ? CKPT_PKL_STR : CKPT_PKL_BYTES, p, n, &node);
}

static ckpt_status op_binstring(vm *v, uint8_t op)
{
    const uint8_t *p;
    size_t n;
    ckpt_status status = take_counted(v, op == 'T' ? 4 : 1, &p, &n);
    return status == CKPT_OK ? push_py2_str(v, p, n) : status;
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

static ckpt_status op_string_text(vm *v, uint8_t op)
{
    (void)op;
    const char *s;
    size_t n, len = 0;
    ckpt_status status = take_line(v, &s, &n);
    if (status != CKPT_OK)
        return status;
    if (n < 2 || (s[0] != '\'' && s[0] != '"') || s[n - 1] != s[0])
        return FAIL(v, "string argument is not quoted");
    uint8_t *out = ckpt_arena_alloc(v->arena, n);
    if (!out)
        return no_memory(v);
    for (size_t i = 1; i < n - 1;) {
        if (s[i] != '\\') {
            out[len++] = (uint8_t)s[i++];
            continue;
        }
        size_t used = str_escape(s + i + 1, n - 2 - i, &out[len++]);
        if (used == 0)
            return FAIL(v, "bad escape in string argument");
        i += 1 + used;
    }
    return push_py2_str(v, out, len);
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
static ckpt_status op_unicode_text(vm *v, uint8_t op)
{
    (void)op;
    const char *s;
    size_t n, len = 0, size;
    ckpt_pkl *node;
    ckpt_status status = take_line(v, &s, &n);
    if (status != CKPT_OK)
        return status;
    uint8_t *out = ckpt_mul_size(n, 2, &size) ? ckpt_arena_alloc(v->arena, size + 1) : NULL;
    if (!out)
        return no_memory(v);
    for (size_t i = 0; i < n;) {
        size_t digits = s[i] == '\\' && i + 1 < n ? (s[i + 1] == 'u')   ? 4
                                                    : (s[i + 1] == 'U') ? 8
                                                                        : 0
                                                  : 0;
        int64_t c = digits ? hex_run(s + i + 2, n - i - 2, digits) : (uint8_t)s[i];
        if (c < 0 || c > 0x10ffff)
            return FAIL(v, "bad escape in unicode argument");
        len += put_utf8(out + len, (uint32_t)c);
        i += digits ? digits + 2 : 1;
    }
    return push_text(v, CKPT_PKL_STR, out, len, &node);
}

/* ---- containers ------------------------------------------------------------------------------- */

static ckpt_status op_mark(vm *v, uint8_t op)
{
    (void)op;
    if (v->n_marks >= v->max_depth)
        return FAIL(v, "more than %zu marks", v->max_depth);
    if (v->n_marks == v->marks_cap) {
        ckpt_status status =
            ckpt_grow((void **)&v->marks, &v->marks_cap, v->n_marks + 1, sizeof *v->marks, v->err);
        if (status != CKPT_OK)
            return status;
    }
    v->marks[v->n_marks++] = v->sp;
    return CKPT_OK;
}

static ckpt_status op_pop(vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    /* CPython: POP right after MARK removes the mark. */
    if (op == '1' || (v->n_marks && v->sp == floor_of(v)))
        return pop_mark(v, &items, &n);
    ckpt_status status = need(v, 1);
    if (status == CKPT_OK)
        v->sp--;
    return status;
}

static ckpt_status op_dup(vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = need(v, 1);
    return status == CKPT_OK ? push(v, v->stack[v->sp - 1]) : status;
}

static ckpt_status op_empty(vm *v, uint8_t op)
{
    ckpt_pkl *node;
    if (op == ')')
        return push_single(v, &v->empty_tuple, CKPT_PKL_TUPLE, 0);
    return push_new(v, op == ']' ? CKPT_PKL_LIST : op == '}' ? CKPT_PKL_DICT : CKPT_PKL_SET, &node);
}

static ckpt_status op_tuple_n(vm *v, uint8_t op)
{
    size_t n = (size_t)op - 0x84;
    ckpt_pkl *node;
    ckpt_status status = need(v, n);
    if (status == CKPT_OK)
        status = new_node(v, CKPT_PKL_TUPLE, &node);
    if (status == CKPT_OK)
        status = copy_items(v, node, v->stack + v->sp - n, n);
    if (status != CKPT_OK)
        return status;
    v->sp -= n;
    return push(v, node);
}

/* TUPLE, LIST, DICT and FROZENSET from the values above the mark. */
static ckpt_status op_collect(vm *v, uint8_t op)
{
    ckpt_pkl **items, *node;
    size_t n;
    ckpt_pkl_kind kind = op == 't'   ? CKPT_PKL_TUPLE
                         : op == 'l' ? CKPT_PKL_LIST
                         : op == 'd' ? CKPT_PKL_DICT
                                     : CKPT_PKL_SET;
    ckpt_status status = pop_mark(v, &items, &n);
    if (status != CKPT_OK)
        return status;
    if (op == 'd' && n % 2)
        return FAIL(v, "odd number of items (%zu) for a dict", n);
    if (op == 't' && n == 0)
        return op_empty(v, ')');
    status = new_node(v, kind, &node);
    if (status == CKPT_OK && kind == CKPT_PKL_TUPLE)
        status = copy_items(v, node, items, n);
    else if (status == CKPT_OK)
        status = extend(v, &node->items, &node->n_items, items, n);
    if (status != CKPT_OK)
        return status;
    node->b = op == 0x91;
    return push(v, node);
}

static const char *kind_name(const ckpt_pkl *p)
{
    static const char *const names[] = {"None", "bool",   "int",    "int",   "float",
                                        "str",  "bytes",  "list",   "tuple", "dict",
                                        "set",  "global", "object", "persid"};
    return names[p->kind];
}

static ckpt_status add_items(vm *v, uint8_t op, ckpt_pkl **items, size_t n)
{
    ckpt_status status = need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *target = v->stack[v->sp - 1];
    bool set = op == 0x90;
    if (target->kind != CKPT_PKL_OBJECT && target->kind != (set ? CKPT_PKL_SET : CKPT_PKL_LIST))
        return FAIL(v, "cannot add items to a %s", kind_name(target));
    if (set && target->kind == CKPT_PKL_SET && target->b)
        return FAIL(v, "cannot add items to a frozenset");
    if (target->kind == CKPT_PKL_OBJECT)
        target->len = set;
    return extend(v, &target->items, &target->n_items, items, n);
}

static ckpt_status add_pairs(vm *v, ckpt_pkl **items, size_t n)
{
    ckpt_status status = need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *target = v->stack[v->sp - 1];
    if (n % 2)
        return FAIL(v, "odd number of items (%zu) for a dict", n);
    if (target->kind == CKPT_PKL_DICT)
        return extend(v, &target->items, &target->n_items, items, n);
    if (target->kind == CKPT_PKL_OBJECT)
        return extend(v, &target->pairs, &target->n_pairs, items, n);
    return FAIL(v, "cannot set items of a %s", kind_name(target));
}

static ckpt_status op_append(vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    if (op != 'a') {
        ckpt_status status = pop_mark(v, &items, &n);
        return status == CKPT_OK ? add_items(v, op, items, n) : status;
    }
    ckpt_status status = need(v, 2);
    if (status != CKPT_OK)
        return status;
    v->sp--;
    return add_items(v, op, v->stack + v->sp, 1);
}

static ckpt_status op_setitem(vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    if (op != 's') {
        ckpt_status status = pop_mark(v, &items, &n);
        return status == CKPT_OK ? add_pairs(v, items, n) : status;
    }
    ckpt_status status = need(v, 3);
    if (status != CKPT_OK)
        return status;
    v->sp -= 2;
    return add_pairs(v, v->stack + v->sp, 2);
}

/* ---- memo ------------------------------------------------------------------------------------- */

/* Position of index in the sparse table, or where it belongs. */
static size_t sparse_find(const vm *v, uint64_t index)
{
    size_t lo = 0, hi = v->n_sparse;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (v->sparse[mid].index < index)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static ckpt_pkl **memo_slot(vm *v, uint64_t index)
{
    if (index < v->dense_cap && v->dense[index])
        return &v->dense[index];
    size_t at = sparse_find(v, index);
    return at < v->n_sparse && v->sparse[at].index == index ? &v->sparse[at].node : NULL;
}

static ckpt_status memo_put_dense(vm *v, uint64_t index, ckpt_pkl *node)
{
    size_t old = v->dense_cap;
    ckpt_status status =
        ckpt_grow((void **)&v->dense, &v->dense_cap, (size_t)index + 1, sizeof *v->dense, v->err);
    if (status != CKPT_OK)
        return status;
    if (v->dense_cap > old)
        memset(v->dense + old, 0, (v->dense_cap - old) * sizeof *v->dense);
    v->dense[index] = node;
    return CKPT_OK;
}

static ckpt_status memo_put_sparse(vm *v, uint64_t index, ckpt_pkl *node)
{
    if (v->n_sparse >= MEMO_SPARSE_MAX)
        return FAIL(v, "memo index %llu and %zu others far above the memo size",
                    (unsigned long long)index, v->n_sparse);
    ckpt_status status =
        ckpt_grow((void **)&v->sparse, &v->sparse_cap, v->n_sparse + 1, sizeof *v->sparse, v->err);
    if (status != CKPT_OK)
        return status;
    size_t at = sparse_find(v, index);
    memmove(v->sparse + at + 1, v->sparse + at, (v->n_sparse - at) * sizeof *v->sparse);
    v->sparse[at] = (sparse_slot){index, node};
    v->n_sparse++;
    return CKPT_OK;
}

static ckpt_status memo_put(vm *v, uint64_t index)
{
    ckpt_status status = need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *node = v->stack[v->sp - 1];
    ckpt_pkl **slot = memo_slot(v, index);
    if (slot) {
        *slot = node;
        return CKPT_OK;
    }
    v->memo_count++;
    if (index < v->dense_cap || index < 2 * v->memo_count + MEMO_SLACK)
        return memo_put_dense(v, index, node);
    return memo_put_sparse(v, index, node);
}

static ckpt_status memo_get(vm *v, uint64_t index)
{
    ckpt_pkl **slot = memo_slot(v, index);
    if (!slot)
        return FAIL(v, "memo index %llu was never stored", (unsigned long long)index);
    return push(v, *slot);
}

static ckpt_status take_index_text(vm *v, uint64_t *out)
{
    const char *line;
    size_t n;
    ckpt_status status = take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    *out = 0;
    for (size_t i = 0; i < n; i++)
        if (line[i] < '0' || line[i] > '9' || !ckpt_mul_u64(*out, 10, out) ||
            !ckpt_add_u64(*out, (uint64_t)(line[i] - '0'), out))
            return FAIL(v, "bad memo index text");
    return n ? CKPT_OK : FAIL(v, "empty memo index");
}

static ckpt_status op_put(vm *v, uint8_t op)
{
    uint64_t index = v->memo_count;
    ckpt_status status = op == 0x94  ? CKPT_OK
                         : op == 'p' ? take_index_text(v, &index)
                                     : take_uint(v, op == 'q' ? 1 : 4, &index);
    return status == CKPT_OK ? memo_put(v, index) : status;
}

static ckpt_status op_get(vm *v, uint8_t op)
{
    uint64_t index;
    ckpt_status status =
        op == 'g' ? take_index_text(v, &index) : take_uint(v, op == 'h' ? 1 : 4, &index);
    return status == CKPT_OK ? memo_get(v, index) : status;
}

/* ---- globals and objects ---------------------------------------------------------------------- */

static ckpt_status make_global(vm *v, const char *mod, size_t n_mod, const char *name,
                               size_t n_name, ckpt_pkl **out)
{
    /* A NUL would make two different names compare equal. */
    if (n_mod == 0 || n_name == 0 || memchr(mod, 0, n_mod) || memchr(name, 0, n_name) ||
        !utf8_valid((const uint8_t *)mod, n_mod) || !utf8_valid((const uint8_t *)name, n_name))
        return FAIL(v, "empty or ill-formed global name");
    ckpt_status status = new_node(v, CKPT_PKL_GLOBAL, out);
    if (status != CKPT_OK)
        return status;
    (*out)->str = ckpt_arena_strndup(v->arena, mod, n_mod);
    (*out)->len = n_mod;
    (*out)->name = ckpt_arena_strndup(v->arena, name, n_name);
    if (!(*out)->str || !(*out)->name)
        return no_memory(v);
    if (!v->unknown && !ckpt_pkl_global_known((*out)->str, (*out)->name)) {
        v->unknown = ckpt_arena_printf(v->arena, "%s.%s", (*out)->str, (*out)->name);
        if (!v->unknown)
            return no_memory(v);
    }
    return CKPT_OK;
}

static ckpt_status take_global(vm *v, ckpt_pkl **out)
{
    const char *mod, *name;
    size_t n_mod, n_name;
    ckpt_status status = take_line(v, &mod, &n_mod);
    if (status == CKPT_OK)
        status = take_line(v, &name, &n_name);
    return status == CKPT_OK ? make_global(v, mod, n_mod, name, n_name, out) : status;
}

static ckpt_status op_global(vm *v, uint8_t op)
{
    ckpt_pkl *node;
    ckpt_status status;
    if (op == 'c') {
        status = take_global(v, &node);
        return status == CKPT_OK ? push(v, node) : status;
    }
    status = need(v, 2);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *mod = v->stack[v->sp - 2], *name = v->stack[v->sp - 1];
    if (mod->kind != CKPT_PKL_STR || name->kind != CKPT_PKL_STR)
        return FAIL(v, "global named by a %s and a %s", kind_name(mod), kind_name(name));
    status = make_global(v, mod->str, mod->len, name->str, name->len, &node);
    v->sp -= 2;
    return status == CKPT_OK ? push(v, node) : status;
}

static ckpt_status push_object(vm *v, ckpt_pkl *callable, ckpt_pkl *args, ckpt_pkl *kwargs,
                               bool newobj)
{
    ckpt_pkl *node;
    ckpt_status status = push_new(v, CKPT_PKL_OBJECT, &node);
    if (status != CKPT_OK)
        return status;
    node->callable = callable;
    node->args = args;
    node->kwargs = kwargs;
    node->b = newobj;
    return CKPT_OK;
}

/* Python 2 wrote OrderedDict([[key, value], ...]) and Counter writes Counter({...}): give such
 * objects the pairs that SETITEMS would have given them. */
static ckpt_status adopt_pairs(vm *v, ckpt_pkl *object)
{
    ckpt_pkl *arg = object->args->n_items == 1 ? object->args->items[0] : NULL;
    if (!arg || !object->callable || object->callable->kind != CKPT_PKL_GLOBAL ||
        strcmp(object->callable->str, "collections") != 0)
        return CKPT_OK;
    bool counter = arg->kind == CKPT_PKL_DICT && strcmp(object->callable->name, "Counter") == 0;
    if (!counter &&
        (arg->kind != CKPT_PKL_LIST || strcmp(object->callable->name, "OrderedDict") != 0))
        return CKPT_OK;
    /* Copying one list again and again would let a small file cost any amount of memory. */
    if (arg->b)
        return FAIL(v, "two dictionaries made from one argument");
    arg->b = true;
    if (counter)
        return extend(v, &object->pairs, &object->n_pairs, arg->items, arg->n_items);
    for (size_t i = 0; i < arg->n_items; i++) {
        ckpt_pkl *pair = arg->items[i];
        if ((pair->kind != CKPT_PKL_LIST && pair->kind != CKPT_PKL_TUPLE) || pair->n_items != 2)
            return FAIL(v, "OrderedDict from items that are not pairs");
        ckpt_status status = extend(v, &object->pairs, &object->n_pairs, pair->items, 2);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status op_reduce(vm *v, uint8_t op)
{
    size_t n = op == 0x92 ? 3 : 2;
    ckpt_status status = need(v, n);
    if (status != CKPT_OK)
        return status;
    v->sp -= n;
    ckpt_pkl **at = v->stack + v->sp;
    if (at[1]->kind != CKPT_PKL_TUPLE)
        return FAIL(v, "arguments are a %s, not a tuple", kind_name(at[1]));
    if (n == 3 && at[2]->kind != CKPT_PKL_DICT)
        return FAIL(v, "keyword arguments are a %s, not a dict", kind_name(at[2]));
    status = push_object(v, at[0], at[1], n == 3 ? at[2] : NULL, op != 'R');
    return status == CKPT_OK && op == 'R' ? adopt_pairs(v, v->stack[v->sp - 1]) : status;
}

/* INST module name, OBJ class on the stack; the arguments lie above the mark. */
static ckpt_status op_inst(vm *v, uint8_t op)
{
    ckpt_pkl **items, *cls = NULL, *args;
    size_t n;
    ckpt_status status = op == 'i' ? take_global(v, &cls) : CKPT_OK;
    if (status == CKPT_OK)
        status = pop_mark(v, &items, &n);
    if (status != CKPT_OK)
        return status;
    if (!cls) {
        if (n == 0)
            return FAIL(v, "no class above the mark");
        cls = items[0];
        items++;
        n--;
    }
    status = new_node(v, CKPT_PKL_TUPLE, &args);
    if (status == CKPT_OK)
        status = copy_items(v, args, items, n);
    return status == CKPT_OK ? push_object(v, cls, args, NULL, false) : status;
}

static ckpt_status op_build(vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = need(v, 2);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *state = v->stack[--v->sp], *target = v->stack[v->sp - 1];
    if (target->kind != CKPT_PKL_OBJECT)
        return FAIL(v, "state given to a %s", kind_name(target));
    /* Keeping only one of two states would hide the other from every later check. */
    if (target->state)
        return FAIL(v, "object built twice");
    target->state = state;
    return CKPT_OK;
}

static ckpt_status op_persid(vm *v, uint8_t op)
{
    ckpt_pkl *id, *node;
    const char *line;
    size_t n;
    ckpt_status status;
    if (op == 'P') {
        status = take_line(v, &line, &n);
        if (status == CKPT_OK)
            status = push_py2_str(v, line, n);
    } else {
        status = need(v, 1);
    }
    if (status != CKPT_OK)
        return status;
    id = v->stack[--v->sp];
    status = new_node(v, CKPT_PKL_PERSID, &node);
    if (status == CKPT_OK)
        status = copy_items(v, node, &id, 1);
    return status == CKPT_OK ? push(v, node) : status;
}

/* ---- framing and dispatch --------------------------------------------------------------------- */

static ckpt_status op_proto(vm *v, uint8_t op)
{
    (void)op;
    uint64_t version;
    ckpt_status status = take_uint(v, 1, &version);
    if (status == CKPT_OK && version > 5)
        return FAIL(v, "protocol %u, expected at most 5", (unsigned)version);
    return status;
}

static ckpt_status op_frame(vm *v, uint8_t op)
{
    (void)op;
    uint64_t n;
    ckpt_status status = take_uint(v, 8, &n);
    if (status == CKPT_OK && n > v->n - v->pos)
        return FAIL(v, "frame of %llu bytes, %zu left", (unsigned long long)n, v->n - v->pos);
    return status;
}

static ckpt_status op_stop(vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = need(v, 1);
    if (status == CKPT_OK)
        v->result = v->stack[v->sp - 1];
    return status;
}

static ckpt_status op_refused(vm *v, uint8_t op)
{
    return fail_at(v, CKPT_E_UNSUPPORTED, "%s is refused",
                   op >= 0x97 ? "an out-of-band buffer" : "an extension code");
}

/* clang-format off */
static const op_fn ops[256] = {
    ['('] = op_mark, ['0'] = op_pop, ['1'] = op_pop, ['2'] = op_dup, ['.'] = op_stop,
    [0x80] = op_proto, [0x95] = op_frame,
    ['N'] = op_none, [0x88] = op_bool, [0x89] = op_bool,
    ['K'] = op_binint, ['M'] = op_binint, ['J'] = op_binint, [0x8a] = op_long_n, [0x8b] = op_long_n,
    ['I'] = op_int_text, ['L'] = op_int_text, ['F'] = op_float_text, ['G'] = op_binfloat,
    ['X'] = op_unicode, [0x8c] = op_unicode, [0x8d] = op_unicode, ['V'] = op_unicode_text,
    ['B'] = op_bytes, ['C'] = op_bytes, [0x8e] = op_bytes, [0x96] = op_bytes,
    ['T'] = op_binstring, ['U'] = op_binstring, ['S'] = op_string_text,
    [')'] = op_empty, [']'] = op_empty, ['}'] = op_empty, [0x8f] = op_empty,
    [0x85] = op_tuple_n, [0x86] = op_tuple_n, [0x87] = op_tuple_n,
    ['t'] = op_collect, ['l'] = op_collect, ['d'] = op_collect, [0x91] = op_collect,
    ['a'] = op_append, ['e'] = op_append, [0x90] = op_append, ['s'] = op_setitem, ['u'] = op_setitem,
    ['q'] = op_put, ['r'] = op_put, ['p'] = op_put, [0x94] = op_put,
    ['h'] = op_get, ['j'] = op_get, ['g'] = op_get,
    ['c'] = op_global, [0x93] = op_global,
    ['R'] = op_reduce, [0x81] = op_reduce, [0x92] = op_reduce, ['i'] = op_inst, ['o'] = op_inst,
    ['b'] = op_build, ['Q'] = op_persid, ['P'] = op_persid,
    [0x82] = op_refused, [0x83] = op_refused, [0x84] = op_refused, [0x97] = op_refused,
    [0x98] = op_refused,
};
/* clang-format on */

static ckpt_status run(vm *v)
{
    while (!v->result) {
        v->op_pos = v->pos;
        if (v->pos == v->n)
            return ckpt_fail(v->err, CKPT_E_FORMAT, "pickle: no STOP in %zu bytes", v->n);
        uint8_t op = v->p[v->pos++];
        ckpt_status status = ops[op] ? ops[op](v, op) : FAIL(v, "unknown opcode");
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

ckpt_status ckpt_pkl_parse(const uint8_t *p, size_t n, ckpt_arena *arena,
                           const ckpt_pkl_limits *limits, ckpt_pkl **out, size_t *used,
                           uint32_t *n_nodes, ckpt_err *err)
{
    vm v = {.p = p, .n = n, .arena = arena, .err = err};
    v.max_nodes = limits && limits->max_nodes ? limits->max_nodes
                  : n > DEFAULT_NODES         ? n
                                              : DEFAULT_NODES;
    v.max_nodes = (size_t)ckpt_min_u64(v.max_nodes, UINT32_MAX - 1);
    v.max_depth = limits && limits->max_depth ? limits->max_depth : DEFAULT_DEPTH;
    *out = NULL;
    ckpt_status status = run(&v);
    if (status == CKPT_OK) {
        *out = v.result;
        (*out)->unknown = v.unknown;
        if (used)
            *used = v.pos;
        if (n_nodes)
            *n_nodes = v.n_nodes;
    }
    free(v.stack);
    free(v.marks);
    free(v.dense);
    free(v.sparse);
    return status;
}
