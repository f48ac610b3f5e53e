/* Rendering of parsed nodes as JSON, for display and for reading configurations.
 *
 * Plain data keeps its meaning; what JSON cannot say becomes an object with one '$' key:
 * $tensor, $enum, $object, $global, $set, $bytes, $int, $float, $ndarray, $datetime, $date,
 * $timedelta, $persid, $elided. Shared nodes are rendered at every use, so depth, members and
 * total size are capped: an exponential graph stays small. */
#include "pickle_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "le.h"

#define DEPTH_MAX 60 /* two levels of JSON for one of pickle; JSON readers stop at 128 */
#define UNITS_MAX ((size_t)1 << 19) /* nodes, plus one per TEXT_UNIT bytes of text */
#define TEXT_UNIT 64
#define KEY_MAX ((size_t)4096)
#define BIG_DIGITS_MAX 160 /* bytes of an integer still written out */

typedef struct render {
    const ckpt_pkl *path[DEPTH_MAX];
    int depth;
    size_t units;
    bool no_memory; /* what was made lacks something */
} render;

static ckpt_json *node_json(render *r, const ckpt_pkl *p);

/* {key: value}; takes ownership, NULL on exhausted memory. */
static ckpt_json *tagged(const char *key, ckpt_json *value)
{
    ckpt_json *object = ckpt_json_new_object();
    if (object && ckpt_json_set(object, key, value))
        return object;
    if (!object)
        ckpt_json_free(value);
    ckpt_json_free(object);
    return NULL;
}

static ckpt_json *tagged_text(const char *key, const char *text)
{
    return tagged(key, ckpt_json_new_string(text));
}

/* A malloc'd copy in which NUL, which JSON strings of this library cannot hold, shows as U+2400. */
static char *visible(const char *s, size_t n)
{
    ckpt_buf b = {0};
    for (size_t i = 0; i < n;) {
        size_t run = i + strnlen(s + i, n - i);
        ckpt_buf_append(&b, s + i, run - i);
        if (run < n)
            ckpt_buf_puts(&b, "\xe2\x90\x80");
        i = run + (run < n);
    }
    ckpt_buf_append(&b, "", 0);
    if (!b.failed && !b.data)
        return calloc(1, 1);
    if (b.failed) {
        ckpt_buf_release(&b);
        return NULL;
    }
    return (char *)b.data;
}

static ckpt_json *text_json(render *r, const ckpt_pkl *p)
{
    r->units += p->len / TEXT_UNIT;
    if (!memchr(p->str, 0, p->len))
        return ckpt_json_new_string(p->str);
    char *text = visible(p->str, p->len);
    ckpt_json *j = text ? ckpt_json_new_string(text) : NULL;
    free(text);
    return j;
}

/* Decimal text of a two's complement integer, malloc'd. Quadratic, hence the cap on its length. */
static char *big_text(const ckpt_pkl *p)
{
    uint8_t mag[BIG_DIGITS_MAX];
    size_t n = p->len, at = 3 * BIG_DIGITS_MAX;
    char digits[3 * BIG_DIGITS_MAX + 1] = {0};
    if (n > sizeof mag)
        return NULL;
    memcpy(mag, p->str, n);
    bool negative = mag[n - 1] >= 0x80;
    unsigned carry = 1;
    for (size_t i = 0; negative && i < n; i++) {
        carry += (uint8_t)~mag[i];
        mag[i] = (uint8_t)carry;
        carry >>= 8;
    }
    while (n) {
        unsigned rest = 0;
        for (size_t i = n; i-- > 0;) {
            rest = rest << 8 | mag[i];
            mag[i] = (uint8_t)(rest / 10);
            rest %= 10;
        }
        digits[--at] = (char)('0' + rest);
        while (n && mag[n - 1] == 0)
            n--;
    }
    if (negative)
        digits[--at] = '-';
    return strdup(digits + at);
}

static ckpt_json *big_json(const ckpt_pkl *p)
{
    char text[48], *digits = big_text(p);
    snprintf(text, sizeof text, "%zu-byte integer", p->len);
    ckpt_json *j = tagged_text("$int", digits ? digits : text);
    free(digits);
    return j;
}

static ckpt_json *float_json(double f)
{
    if (isfinite(f))
        return ckpt_json_new_double(f);
    return tagged_text("$float", isnan(f) ? "nan" : f > 0 ? "inf" : "-inf");
}

static ckpt_json *array_json(render *r, ckpt_pkl *const *items, size_t n)
{
    ckpt_json *array = ckpt_json_new_array();
    bool ok = array != NULL;
    for (size_t i = 0; ok && i < n; i++) {
        if (r->units > UNITS_MAX) {
            ok = ckpt_json_push(array, tagged("$elided", ckpt_json_new_int((int64_t)(n - i))));
            break;
        }
        ok = ckpt_json_push(array, node_json(r, items[i]));
    }
    if (ok)
        return array;
    ckpt_json_free(array);
    return NULL;
}

/* ---- dictionaries ----------------------------------------------------------------------------- */

static void joined(const ckpt_pkl *p, int depth, ckpt_buf *out);

/* Text of a key that is not a string: (1, 'a') becomes "(1, a)". */
static void key_text(const ckpt_pkl *p, int depth, ckpt_buf *out)
{
    if (depth > 4 || out->len > KEY_MAX) {
        ckpt_buf_puts(out, "...");
        return;
    }
    if (p->kind == CKPT_PKL_STR)
        ckpt_buf_append(out, p->str, p->len < KEY_MAX ? p->len : KEY_MAX);
    else if (p->kind == CKPT_PKL_INT)
        ckpt_buf_printf(out, "%" PRId64, p->i);
    else if (p->kind == CKPT_PKL_FLOAT)
        ckpt_buf_printf(out, "%.17g", p->f);
    else if (p->kind == CKPT_PKL_BOOL)
        ckpt_buf_puts(out, p->b ? "True" : "False");
    else if (p->kind == CKPT_PKL_NONE)
        ckpt_buf_puts(out, "None");
    else if (p->kind == CKPT_PKL_GLOBAL)
        ckpt_buf_printf(out, "%s.%s", p->str, p->name);
    else if (p->kind == CKPT_PKL_TUPLE)
        joined(p, depth + 1, out);
    else if (p->kind == CKPT_PKL_OBJECT && p->callable->kind == CKPT_PKL_GLOBAL) {
        ckpt_buf_printf(out, "%s.%s", p->callable->str, p->callable->name);
        if (p->args->n_items)
            joined(p->args, depth + 1, out);
    } else {
        ckpt_buf_puts(out, "?");
    }
}

static void joined(const ckpt_pkl *p, int depth, ckpt_buf *out)
{
    for (size_t i = 0; i < p->n_items && out->len <= KEY_MAX; i++) {
        ckpt_buf_puts(out, i ? ", " : "(");
        key_text(p->items[i], depth, out);
    }
    ckpt_buf_puts(out, p->n_items ? ")" : "()");
}

void ckpt_pkl_key_text(const ckpt_pkl *p, ckpt_buf *out)
{
    key_text(p, 0, out);
}

typedef struct member {
    char *key; /* malloc'd; NULL when a later duplicate replaces it */
    size_t index;
} member;

static int by_key(const void *a, const void *b)
{
    const member *x = *(member *const *)a, *y = *(member *const *)b;
    int c = strcmp(x->key, y->key);
    return c != 0 ? c : x->index < y->index ? -1 : x->index > y->index;
}

/* Of equal keys only the last stays, as in Python. */
static bool drop_duplicates(member *members, size_t n)
{
    member **sorted = malloc((n + 1) * sizeof *sorted);
    if (!sorted)
        return false;
    for (size_t i = 0; i < n; i++)
        sorted[i] = &members[i];
    qsort(sorted, n, sizeof *sorted, by_key);
    for (size_t i = 1; i < n; i++)
        if (strcmp(sorted[i - 1]->key, sorted[i]->key) == 0) {
            char *dead = sorted[i - 1]->key;
            sorted[i - 1]->key = NULL;
            free(dead);
        }
    free(sorted);
    return true;
}

static bool read_keys(member *members, ckpt_pkl *const *pairs, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ckpt_buf text = {0};
        key_text(pairs[2 * i], 0, &text);
        members[i] = (member){text.failed ? NULL : visible((char *)text.data, text.len), i};
        ckpt_buf_release(&text);
        if (!members[i].key)
            return false;
    }
    return drop_duplicates(members, n);
}

static ckpt_json *dict_json(render *r, ckpt_pkl *const *pairs, size_t n_pairs)
{
    size_t n = n_pairs / 2, left = r->units < UNITS_MAX ? UNITS_MAX - r->units : 0;
    size_t shown = n < left ? n : left;
    r->units += shown;
    ckpt_json *object = ckpt_json_new_object();
    member *members = calloc(shown + 1, sizeof *members);
    bool ok = object && members && read_keys(members, pairs, shown);
    for (size_t i = 0; ok && i < shown; i++)
        if (members[i].key)
            ok = ckpt_json_add(object, members[i].key, node_json(r, pairs[2 * i + 1]));
    if (ok && shown < n)
        ok = ckpt_json_set(object, "$elided", ckpt_json_new_int((int64_t)(n - shown)));
    for (size_t i = 0; members && i < shown; i++)
        free(members[i].key);
    free(members);
    if (ok)
        return object;
    r->no_memory = true; /* NULL alone would have the object rendered in another way */
    ckpt_json_free(object);
    return NULL;
}

/* ---- objects that read as values -------------------------------------------------------------- */

static ckpt_json *namespace_json(render *r, const ckpt_pkl *p)
{
    if (!ckpt_pkl_is_object(p, "argparse", "Namespace") &&
        !ckpt_pkl_is_object(p, "types", "SimpleNamespace"))
        return NULL;
    if (p->state && p->state->kind == CKPT_PKL_DICT)
        return dict_json(r, p->state->items, p->state->n_items);
    return p->state ? NULL : ckpt_json_new_object();
}

static ckpt_json *sequence_json(render *r, const ckpt_pkl *p)
{
    static const char *const names[] = {"set", "frozenset", "list", "tuple"};
    const ckpt_pkl *arg = ckpt_pkl_arg(p, 0);
    bool sequence = arg && (arg->kind == CKPT_PKL_LIST || arg->kind == CKPT_PKL_TUPLE);
    if (ckpt_pkl_is_object(p, "torch", "Size") && sequence)
        return array_json(r, arg->items, arg->n_items);
    for (size_t i = 0; i < 4; i++) {
        if (!ckpt_pkl_is_object(p, "builtins", names[i]) &&
            !ckpt_pkl_is_object(p, "__builtin__", names[i]))
            continue;
        if (p->args->n_items && !sequence)
            return NULL;
        ckpt_json *list = arg ? array_json(r, arg->items, arg->n_items) : ckpt_json_new_array();
        return i < 2 ? tagged("$set", list) : list;
    }
    return NULL;
}

static ckpt_json *path_json(const ckpt_pkl *p)
{
    static const char *const names[] = {"PosixPath", "Path",        "PurePosixPath",
                                        "PurePath",  "WindowsPath", "PureWindowsPath"};
    bool path = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        path = path || ckpt_pkl_is_object(p, "pathlib", names[i]) ||
               ckpt_pkl_is_object(p, "pathlib._local", names[i]);
    if (!path)
        return NULL;
    ckpt_buf text = {0};
    for (size_t i = 0; i < p->args->n_items && text.len < 65536; i++) {
        const char *part = ckpt_pkl_str(p->args->items[i]);
        if (text.len && text.data[text.len - 1] != '/')
            ckpt_buf_putc(&text, '/');
        ckpt_buf_puts(&text, part ? part : "?");
    }
    ckpt_json *j = text.failed ? NULL : ckpt_json_new_string(text.len ? (char *)text.data : ".");
    ckpt_buf_release(&text);
    return j;
}

static ckpt_json *torch_value_json(const ckpt_pkl *p)
{
    char text[160];
    int64_t index;
    const char *arg = ckpt_pkl_str(ckpt_pkl_arg(p, 0));
    if (ckpt_pkl_is_object(p, "torch.serialization", "_get_layout") && arg)
        return ckpt_json_new_string(arg);
    if (ckpt_pkl_is_object(p, "torch", "device") && arg) {
        if (!ckpt_pkl_int(ckpt_pkl_arg(p, 1), &index))
            return ckpt_json_new_string(arg);
        snprintf(text, sizeof text, "%.100s:%" PRId64, arg, index);
        return ckpt_json_new_string(text);
    }
    const char *name = ckpt_pkl_str(ckpt_pkl_arg(p, 1));
    if (ckpt_pkl_is_object(p, NULL, "getattr") && name &&
        ckpt_pkl_is_global(ckpt_pkl_arg(p, 0), "torch._utils", "torch")) {
        snprintf(text, sizeof text, "torch.%.100s", name);
        return ckpt_json_new_string(text);
    }
    return NULL;
}

static ckpt_json *time_json(const ckpt_pkl *p)
{
    char text[64];
    uint8_t b[10];
    size_t n;
    int64_t days, seconds, micros;
    if (ckpt_pkl_is_object(p, "datetime", "timedelta") && ckpt_pkl_int(ckpt_pkl_arg(p, 0), &days) &&
        ckpt_pkl_int(ckpt_pkl_arg(p, 1), &seconds) && ckpt_pkl_int(ckpt_pkl_arg(p, 2), &micros)) {
        snprintf(text, sizeof text, "%" PRId64 "d %" PRId64 "s %" PRId64 "us", days, seconds,
                 micros);
        return tagged_text("$timedelta", text);
    }
    bool date = ckpt_pkl_is_object(p, "datetime", "date");
    if ((!date && !ckpt_pkl_is_object(p, "datetime", "datetime")) ||
        !ckpt_pkl_bytes(ckpt_pkl_arg(p, 0), b, sizeof b, &n) || n != (date ? 4 : 10))
        return NULL;
    int used = snprintf(text, sizeof text, "%04u-%02u-%02u", b[0] * 256U + b[1], b[2] & 0x7fU,
                        (unsigned)b[3]);
    if (!date)
        snprintf(text + used, sizeof text - (size_t)used, "T%02u:%02u:%02u.%06u", (unsigned)b[4],
                 (unsigned)b[5], (unsigned)b[6], b[7] * 65536U + b[8] * 256U + b[9]);
    return tagged_text(date ? "$date" : "$datetime", text);
}

/* ---- numpy ------------------------------------------------------------------------------------ */

/* "f8" of dtype('f8', False, True) with state (3, '<', ...); NULL if not a little-endian dtype. */
static const char *numpy_dtype(const ckpt_pkl *p)
{
    const char *order =
        p && p->kind == CKPT_PKL_OBJECT ? ckpt_pkl_str(ckpt_pkl_arg(p->state, 1)) : NULL;
    if (!ckpt_pkl_is_object(p, "numpy", "dtype") || (order && order[0] == '>'))
        return NULL;
    return ckpt_pkl_str(ckpt_pkl_arg(p, 0));
}

static ckpt_json *numpy_scalar_json(const ckpt_pkl *p)
{
    uint8_t b[8] = {0};
    size_t n;
    const char *dtype = numpy_dtype(ckpt_pkl_arg(p, 0));
    if (!ckpt_pkl_is_object(p, NULL, "scalar") || !dtype ||
        !ckpt_pkl_bytes(ckpt_pkl_arg(p, 1), b, sizeof b, &n) || n == 0 || n > 8)
        return NULL;
    uint64_t bits = ckpt_get_u64(b);
    float f32;
    double f64;
    memcpy(&f32, b, sizeof f32);
    memcpy(&f64, b, sizeof f64);
    if (dtype[0] == 'f' && (n == 4 || n == 8))
        return float_json(n == 4 ? (double)f32 : f64);
    if (dtype[0] == 'b' && n == 1)
        return ckpt_json_new_bool(b[0] != 0);
    if (dtype[0] == 'i' && b[n - 1] >= 0x80 && n < 8)
        bits |= UINT64_MAX << (8 * n);
    if (dtype[0] == 'i' || (dtype[0] == 'u' && bits <= INT64_MAX))
        return ckpt_json_new_int((int64_t)bits);
    return NULL;
}

static ckpt_json *numpy_json(const ckpt_pkl *p)
{
    ckpt_json *scalar = numpy_scalar_json(p);
    const ckpt_pkl *shape = p->state ? ckpt_pkl_arg(p->state, 1) : NULL;
    if (scalar || !ckpt_pkl_is_object(p, NULL, "_reconstruct") || !shape ||
        shape->kind != CKPT_PKL_TUPLE)
        return scalar;
    const char *dtype = numpy_dtype(ckpt_pkl_arg(p->state, 2));
    ckpt_buf text = {0};
    ckpt_buf_printf(&text, "%.32s [", dtype ? dtype : "?");
    for (size_t i = 0; i < shape->n_items && i < 32; i++) {
        int64_t d = -1;
        (void)ckpt_pkl_int(shape->items[i], &d);
        ckpt_buf_printf(&text, "%s%" PRId64, i ? "," : "", d);
    }
    ckpt_buf_puts(&text, "]");
    ckpt_json *j = text.failed ? NULL : tagged_text("$ndarray", (char *)text.data);
    ckpt_buf_release(&text);
    return j;
}

/* ---- tensors and everything else -------------------------------------------------------------- */

static ckpt_json *tensor_json(const ckpt_pkl *p)
{
    ckpt_pkl_tensor t;
    if (!ckpt_pkl_tensor_like(p, &t))
        return NULL;
    if (t.what)
        return tagged_text("$tensor", t.what);
    ckpt_buf text = {0};
    ckpt_buf_printf(&text, "%s [", ckpt_dtype_get(t.dtype)->name);
    for (size_t i = 0; i < 64; i++) {
        const ckpt_pkl *d = ckpt_pkl_arg(t.size, i);
        int64_t extent = -1;
        if (!d)
            break;
        (void)ckpt_pkl_int(d, &extent);
        /* torch counts pairs of 4-bit elements along the last axis. */
        if (t.dtype == CKPT_F4 && extent < INT64_MAX / 2 && !ckpt_pkl_arg(t.size, i + 1))
            extent *= 2;
        ckpt_buf_printf(&text, "%s%" PRId64, i ? "," : "", extent);
    }
    ckpt_buf_puts(&text, "]");
    ckpt_json *j = text.failed ? NULL : tagged_text("$tensor", (char *)text.data);
    ckpt_buf_release(&text);
    return j;
}

/* module.name of a callable, malloc'd. */
static char *callable_text(const ckpt_pkl *p)
{
    ckpt_buf text = {0};
    if (p->kind == CKPT_PKL_GLOBAL)
        ckpt_buf_printf(&text, "%s.%s", p->str, p->name);
    else
        ckpt_buf_puts(&text, "(computed)");
    if (!text.failed)
        return (char *)text.data;
    ckpt_buf_release(&text);
    return NULL;
}

/* An enum member is its class called with one plain value. */
static ckpt_json *enum_json(render *r, const ckpt_pkl *p, const char *name)
{
    const ckpt_pkl *value = ckpt_pkl_arg(p, 0);
    if (p->b || p->callable->kind != CKPT_PKL_GLOBAL || p->state || p->n_items || p->n_pairs ||
        p->args->n_items != 1 || (value->kind != CKPT_PKL_INT && value->kind != CKPT_PKL_STR))
        return NULL;
    ckpt_json *j = tagged_text("$enum", name);
    if (j && ckpt_json_set(j, "value", node_json(r, value)))
        return j;
    ckpt_json_free(j);
    return NULL;
}

static ckpt_json *generic_json(render *r, const ckpt_pkl *p, const char *name)
{
    ckpt_json *j = tagged_text("$object", name);
    bool ok = j != NULL;
    if (ok && p->args->n_items)
        ok = ckpt_json_add(j, "args", node_json(r, p->args));
    if (ok && p->kwargs && p->kwargs->n_items)
        ok = ckpt_json_add(j, "kwargs", node_json(r, p->kwargs));
    if (ok && p->n_items)
        ok = ckpt_json_add(j, "items", array_json(r, p->items, p->n_items));
    if (ok && p->n_pairs)
        ok = ckpt_json_add(j, "pairs", dict_json(r, p->pairs, p->n_pairs));
    if (ok && p->state)
        ok = ckpt_json_add(j, "state", node_json(r, p->state));
    if (ok)
        return j;
    ckpt_json_free(j);
    return NULL;
}

static ckpt_json *object_json(render *r, const ckpt_pkl *p)
{
    ckpt_pkl *const *pairs;
    size_t n;
    ckpt_json *j = tensor_json(p);
    if (!j)
        j = namespace_json(r, p);
    if (!j && p->n_items == 0 && !p->state && ckpt_pkl_pairs(p, &pairs, &n) &&
        (p->args->n_items == 0 || ckpt_pkl_is_object(p, "collections", p->callable->name)))
        j = dict_json(r, pairs, n);
    if (!j && ckpt_pkl_bytes(p, NULL, 0, &n))
        j = tagged("$bytes", ckpt_json_new_int((int64_t)n));
    if (!j)
        j = sequence_json(r, p);
    if (!j)
        j = path_json(p);
    if (!j)
        j = torch_value_json(p);
    if (!j)
        j = time_json(p);
    if (!j)
        j = numpy_json(p);
    if (j)
        return j;
    char *name = callable_text(p->callable);
    if (name) {
        j = enum_json(r, p, name);
        if (!j)
            j = generic_json(r, p, name);
    }
    free(name);
    return j;
}

static ckpt_json *global_json(const ckpt_pkl *p)
{
    char *name = callable_text(p);
    ckpt_json *j = !name                          ? NULL
                   : strcmp(p->str, "torch") == 0 ? ckpt_json_new_string(name)
                                                  : tagged_text("$global", name);
    free(name);
    return j;
}

static ckpt_json *compound_json(render *r, const ckpt_pkl *p)
{
    switch (p->kind) {
    case CKPT_PKL_LIST:
    case CKPT_PKL_TUPLE:
        return array_json(r, p->items, p->n_items);
    case CKPT_PKL_DICT:
        return dict_json(r, p->items, p->n_items);
    case CKPT_PKL_SET:
        return tagged("$set", array_json(r, p->items, p->n_items));
    case CKPT_PKL_PERSID:
        return tagged("$persid", node_json(r, p->items[0]));
    case CKPT_PKL_OBJECT:
        return object_json(r, p);
    case CKPT_PKL_NONE:
    case CKPT_PKL_BOOL:
    case CKPT_PKL_INT:
    case CKPT_PKL_BIGINT:
    case CKPT_PKL_FLOAT:
    case CKPT_PKL_STR:
    case CKPT_PKL_BYTES:
    case CKPT_PKL_GLOBAL:
    case CKPT_PKL_TAKEN:
        break;
    }
    return NULL;
}

static ckpt_json *nested_json(render *r, const ckpt_pkl *p)
{
    if (r->depth == DEPTH_MAX)
        return tagged_text("$elided", "depth");
    for (int i = 0; i < r->depth; i++)
        if (r->path[i] == p)
            return tagged_text("$elided", "cycle");
    r->path[r->depth++] = p;
    ckpt_json *j = compound_json(r, p);
    r->depth--;
    return j;
}

static ckpt_json *node_json(render *r, const ckpt_pkl *p)
{
    if (r->units++ > UNITS_MAX)
        return tagged_text("$elided", "size");
    switch (p->kind) {
    case CKPT_PKL_NONE:
        return ckpt_json_new_null();
    case CKPT_PKL_BOOL:
        return ckpt_json_new_bool(p->b);
    case CKPT_PKL_INT:
        return ckpt_json_new_int(p->i);
    case CKPT_PKL_BIGINT:
        return big_json(p);
    case CKPT_PKL_FLOAT:
        return float_json(p->f);
    case CKPT_PKL_STR:
        return text_json(r, p);
    case CKPT_PKL_BYTES:
        return tagged("$bytes", ckpt_json_new_int((int64_t)p->len));
    case CKPT_PKL_GLOBAL:
        return global_json(p);
    case CKPT_PKL_LIST:
    case CKPT_PKL_TUPLE:
    case CKPT_PKL_DICT:
    case CKPT_PKL_SET:
    case CKPT_PKL_OBJECT:
    case CKPT_PKL_PERSID:
        break;
    case CKPT_PKL_TAKEN:
        return tagged("$taken", ckpt_json_new_int(p->i));
    }
    return nested_json(r, p);
}

ckpt_json *ckpt_pkl_to_json(const ckpt_pkl *p)
{
    render r = {.depth = 0};
    ckpt_json *j = p ? node_json(&r, p) : ckpt_json_new_null();
    if (r.no_memory) {
        ckpt_json_free(j);
        j = NULL;
    }
    return j;
}
