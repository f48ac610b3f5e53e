/* Recognisers over parsed nodes: names, dictionaries, bytes, and torch's tensor spellings
 * (torch/_utils.py, torch/_tensor.py; torch-formats.md section 3). */
#include "pickle_internal.h"

#include <string.h>

#define UNWRAP_MAX 8 /* Parameter around an attributed tensor around ...; real files need two */

static bool is_kind(const ckpt_pkl *p, ckpt_pkl_kind kind)
{
    return p && p->kind == kind;
}

bool ckpt_pkl_is_global(const ckpt_pkl *p, const char *module, const char *name)
{
    return is_kind(p, CKPT_PKL_GLOBAL) && strcmp(p->name, name) == 0 &&
           (!module || strcmp(p->str, module) == 0);
}

bool ckpt_pkl_is_object(const ckpt_pkl *p, const char *module, const char *name)
{
    return is_kind(p, CKPT_PKL_OBJECT) && ckpt_pkl_is_global(p->callable, module, name);
}

const char *ckpt_pkl_str(const ckpt_pkl *p)
{
    return is_kind(p, CKPT_PKL_STR) ? p->str : NULL;
}

bool ckpt_pkl_int(const ckpt_pkl *p, int64_t *out)
{
    if (!is_kind(p, CKPT_PKL_INT))
        return false;
    *out = p->i;
    return true;
}

static ckpt_pkl *find_pair(ckpt_pkl *const *pairs, size_t n, const char *key)
{
    size_t len = strlen(key);
    for (size_t i = n; i >= 2; i -= 2)
        if (pairs[i - 2]->kind == CKPT_PKL_STR && pairs[i - 2]->len == len &&
            memcmp(pairs[i - 2]->str, key, len) == 0)
            return pairs[i - 1];
    return NULL;
}

static ckpt_pkl *find_in_dict(const ckpt_pkl *p, const char *key)
{
    return is_kind(p, CKPT_PKL_DICT) ? find_pair(p->items, p->n_items, key) : NULL;
}

ckpt_pkl *ckpt_pkl_get(const ckpt_pkl *p, const char *key)
{
    if (!is_kind(p, CKPT_PKL_OBJECT))
        return find_in_dict(p, key);
    ckpt_pkl *hit = find_pair(p->pairs, p->n_pairs, key);
    if (!hit)
        hit = find_in_dict(p->state, key);
    /* A class with __slots__ has a pair (dict or None, slots dict) as its state. */
    if (!hit && is_kind(p->state, CKPT_PKL_TUPLE) && p->state->n_items == 2) {
        hit = find_in_dict(p->state->items[1], key);
        if (!hit)
            hit = find_in_dict(p->state->items[0], key);
    }
    return hit;
}

bool ckpt_pkl_pairs(const ckpt_pkl *p, ckpt_pkl *const **pairs, size_t *n_pairs)
{
    static const char *const dicts[] = {"OrderedDict", "defaultdict", "Counter"};
    if (is_kind(p, CKPT_PKL_DICT)) {
        *pairs = p->items;
        *n_pairs = p->n_items;
        return true;
    }
    bool like = is_kind(p, CKPT_PKL_OBJECT) && p->n_pairs > 0;
    for (size_t i = 0; i < sizeof dicts / sizeof *dicts; i++)
        like = like || ckpt_pkl_is_object(p, "collections", dicts[i]);
    like = like || ckpt_pkl_is_object(p, "builtins", "dict") ||
           ckpt_pkl_is_object(p, "__builtin__", "dict");
    if (!like)
        return false;
    *pairs = p->pairs;
    *n_pairs = p->n_pairs;
    return true;
}

const ckpt_pkl *ckpt_pkl_arg(const ckpt_pkl *p, size_t i)
{
    if (is_kind(p, CKPT_PKL_OBJECT))
        p = p->args;
    if (!is_kind(p, CKPT_PKL_TUPLE) && !is_kind(p, CKPT_PKL_LIST))
        return NULL;
    return i < p->n_items ? p->items[i] : NULL;
}

bool ckpt_pkl_bytes(const ckpt_pkl *p, uint8_t *out, size_t cap, size_t *n)
{
    *n = 0;
    if ((ckpt_pkl_is_object(p, "__builtin__", "bytearray") ||
         ckpt_pkl_is_object(p, "builtins", "bytearray")) &&
        p->args->n_items == 1)
        p = p->args->items[0];
    if (is_kind(p, CKPT_PKL_BYTES)) {
        *n = p->len;
        if (*n && cap)
            memcpy(out, p->str, *n < cap ? *n : cap);
        return true;
    }
    if (ckpt_pkl_is_object(p, "__builtin__", "bytes") || ckpt_pkl_is_object(p, "builtins", "bytes"))
        return p->args->n_items == 0;
    const ckpt_pkl *text = ckpt_pkl_arg(p, 0);
    const char *codec = ckpt_pkl_str(ckpt_pkl_arg(p, 1));
    if (!ckpt_pkl_is_object(p, "_codecs", "encode") || !ckpt_pkl_str(text) || !codec ||
        (strcmp(codec, "latin1") != 0 && strcmp(codec, "latin-1") != 0))
        return false;
    for (size_t i = 0; i < text->len; i++) {
        uint8_t c = (uint8_t)text->str[i];
        if (c >= 0xc4) /* beyond U+00FF */
            return false;
        if (c >= 0xc2)
            c = (uint8_t)((c & 3) << 6 | ((uint8_t)text->str[++i] & 0x3f));
        if (*n < cap)
            out[*n] = c;
        ++*n;
    }
    return true;
}

/* ---- tensors ---------------------------------------------------------------------------------- */

/* A call, wherever its parts are stored. */
typedef struct call {
    const ckpt_pkl *fn, *args;
} call;

static bool call_is(const call *c, const char *module, const char *name)
{
    return ckpt_pkl_is_global(c->fn, module, name);
}

/* clang-format off */
static const struct {
    const char *name, *what;
} opaque[] = {
    {"_rebuild_sparse_tensor", "sparse"},
    {"_rebuild_sparse_csr_tensor", "sparse"},
    {"_rebuild_qtensor", "quantised"},
    {"_rebuild_meta_tensor_no_storage", "meta"},
    {"_rebuild_nested_tensor", "nested"},
    {"_rebuild_wrapper_subclass", "wrapper subclass"},
    {"_rebuild_device_tensor_from_numpy", "device (numpy)"},
    {"_rebuild_device_tensor_from_cpu_tensor", "device"},
    {"_rebuild_xla_tensor", "device (xla)"},
};
/* clang-format on */

static bool plain_type(const ckpt_pkl *type)
{
    return ckpt_pkl_is_global(type, "torch", "Tensor") ||
           ckpt_pkl_is_global(type, "torch._tensor", "Tensor") ||
           ckpt_pkl_is_global(type, "torch.tensor", "Tensor") ||
           ckpt_pkl_is_global(type, "torch.nn.parameter", "Parameter") ||
           ckpt_pkl_is_global(type, "torch.nn.parameter", "Buffer");
}

/* Step from a wrapper to what it wraps. False: c is not a wrapper. */
static bool unwrap(call *c, const char **what)
{
    if (call_is(c, "torch._utils", "_rebuild_parameter") ||
        call_is(c, "torch._utils", "_rebuild_parameter_with_state")) {
        const ckpt_pkl *inner = ckpt_pkl_arg(c->args, 0);
        *c = is_kind(inner, CKPT_PKL_OBJECT) ? (call){inner->callable, inner->args} : (call){0};
        return true;
    }
    if (!call_is(c, "torch._tensor", "_rebuild_from_type_v2") &&
        !call_is(c, "torch._tensor", "_rebuild_from_type") &&
        !call_is(c, "torch.tensor", "_rebuild_from_type"))
        return false;
    const ckpt_pkl *type = ckpt_pkl_arg(c->args, 1);
    if (!plain_type(type))
        *what = is_kind(type, CKPT_PKL_GLOBAL) ? type->name : "subclass";
    *c = (call){ckpt_pkl_arg(c->args, 0), ckpt_pkl_arg(c->args, 2)};
    return true;
}

static bool is_true(const ckpt_pkl *p)
{
    return is_kind(p, CKPT_PKL_BOOL) && p->b;
}

static void set_dtype(const call *c, bool v3, ckpt_pkl_tensor *out)
{
    const ckpt_pkl *id = is_kind(out->storage, CKPT_PKL_PERSID) ? out->storage->items[0] : NULL;
    const ckpt_pkl *cls = ckpt_pkl_arg(id, 1);
    const ckpt_pkl *dtype = v3 ? ckpt_pkl_arg(c->args, 6) : NULL;
    if (v3 &&
        (!is_kind(dtype, CKPT_PKL_GLOBAL) || !ckpt_dtype_from_torch(dtype->name, &out->dtype)))
        out->what = is_kind(dtype, CKPT_PKL_GLOBAL) ? dtype->name : "untyped";
    if (!v3 && (!is_kind(cls, CKPT_PKL_GLOBAL) || !ckpt_dtype_from_storage(cls->name, &out->dtype)))
        out->what = is_kind(cls, CKPT_PKL_GLOBAL) ? cls->name : "storage-less";
    /* Lazily conjugated or negated views: the stored bytes are not the values. */
    const ckpt_pkl *metadata = ckpt_pkl_arg(c->args, v3 ? 7 : 6);
    if (is_true(ckpt_pkl_get(metadata, "conj")))
        out->what = "conjugate view";
    if (is_true(ckpt_pkl_get(metadata, "neg")))
        out->what = "negative view";
}

bool ckpt_pkl_tensor_like(const ckpt_pkl *p, ckpt_pkl_tensor *out)
{
    *out = (ckpt_pkl_tensor){0};
    if (!is_kind(p, CKPT_PKL_OBJECT))
        return false;
    call c = {p->callable, p->args};
    bool wrapped = false;
    for (int i = 0; i < UNWRAP_MAX && unwrap(&c, &out->what); i++)
        wrapped = true;
    bool v3 = call_is(&c, "torch._utils", "_rebuild_tensor_v3");
    bool v2 = call_is(&c, "torch._utils", "_rebuild_tensor_v2") ||
              call_is(&c, "torch._utils", "_rebuild_tensor");
    if (out->what)
        return true;
    if (v2 || v3) {
        out->storage = ckpt_pkl_arg(c.args, 0);
        out->offset = ckpt_pkl_arg(c.args, 1);
        out->size = ckpt_pkl_arg(c.args, 2);
        out->stride = ckpt_pkl_arg(c.args, 3);
        set_dtype(&c, v3, out);
        return true;
    }
    for (size_t i = 0; i < sizeof opaque / sizeof *opaque; i++)
        if (call_is(&c, "torch._utils", opaque[i].name)) {
            out->what = opaque[i].what;
            return true;
        }
    if (wrapped)
        out->what = "wrapped object of unknown kind";
    return wrapped;
}
