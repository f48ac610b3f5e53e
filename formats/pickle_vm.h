/* The state of one pickle parse, shared by pickle_parse.c (stack, objects, dispatch), pickle_memo.c,
 * pickle_scalar.c (values that have no children) and pickle_take.c. */
#ifndef CKPT_PICKLE_VM_H
#define CKPT_PICKLE_VM_H

#include "pickle_internal.h"

#include <string.h>

/* Bytes of a node that is neither GLOBAL nor OBJECT. */
#define CKPT_VM_BASE_SIZE offsetof(ckpt_pkl, name)
/* Bytes of a TAKEN node, which has nothing but its number. */
#define CKPT_VM_TAKEN_SIZE offsetof(ckpt_pkl, str)

typedef struct ckpt_vm_sparse {
    uint64_t index;
    ckpt_pkl *node;
} ckpt_vm_sparse;

/* Equal immutable values of a large pickle, direct-mapped by what they are made of. A .metadata says
 * the few sizes and offsets of its chunks again and again, each as a new torch.Size. */
#define CKPT_VM_CACHE_MIN                                                                          \
    ((size_t)1 << 20) /* bytes of pickle: a small one is not worth the tables */
typedef struct ckpt_vm_cache {
    ckpt_pkl *ints[4096], *tuples[8192], *sizes[8192], *by_dims[8192];
} ckpt_vm_cache;

typedef struct ckpt_vm {
    const uint8_t *p;
    size_t n, pos, op_pos;
    ckpt_arena *arena;
    ckpt_err *err;
    ckpt_pkl **stack;
    size_t sp, stack_cap;
    size_t *marks; /* stack heights */
    size_t n_marks, marks_cap;
    ckpt_pkl **dense;
    size_t dense_n, dense_cap; /* as far as anything was stored; room */
    ckpt_vm_sparse *sparse;
    size_t n_sparse, sparse_cap;
    uint64_t memo_count;
    size_t max_nodes, max_depth;
    uint32_t n_nodes;
    /* Immutable values without identity are shared; this halves the nodes of a .metadata. */
    ckpt_pkl *none, *truth[2], *empty_tuple, *small[256];
    /* Likewise short strings and globals, in direct-mapped caches: a pickle written without a memo
     * repeats the same few field and class names for every entry. */
    ckpt_pkl *strings[1024], *globals[256];
    ckpt_vm_cache *cache;        /* or NULL */
    ckpt_pkl *size;              /* the global torch.Size whose objects are shared, or NULL */
    const ckpt_pkl_taker *taker; /* or NULL */
    ckpt_pkl gone;               /* what the memo holds of the parts of objects that were taken */
    const char *unknown;
    ckpt_pkl *result;
} ckpt_vm;

#define VM_FAIL(v, ...) ckpt_vm_fail(v, CKPT_E_FORMAT, __VA_ARGS__)

/* Prefixes opcode and offset; returns code. */
ckpt_status ckpt_vm_fail(ckpt_vm *v, ckpt_status code, const char *fmt, ...) CKPT_PRINTF(3, 4);
ckpt_status ckpt_vm_no_memory(ckpt_vm *v);
ckpt_status ckpt_vm_node(ckpt_vm *v, ckpt_pkl_kind kind, ckpt_pkl **out);
/* A STR, BYTES or BIGINT with its n bytes. */
ckpt_status ckpt_vm_text_node(ckpt_vm *v, ckpt_pkl_kind kind, const void *p, size_t n,
                              ckpt_pkl **out);
/* Keep the top of the stack under an index; push what is kept under it. */
ckpt_status ckpt_vm_memo_put(ckpt_vm *v, uint64_t index);
ckpt_status ckpt_vm_memo_get(ckpt_vm *v, uint64_t index);
/* torch.Size of these dims, and the two tuples within: shared nodes. */
ckpt_status ckpt_vm_size(ckpt_vm *v, int rank, const int64_t *dims, ckpt_pkl *out[3]);
/* Behind a NEWOBJ of a class that the taker wants: take the object, if it is of the usual form, and
 * make the node left in its place. *out NULL: it is not, and nothing was read. */
ckpt_status ckpt_vm_take_object(ckpt_vm *v, int64_t class_number, ckpt_pkl **out);

/* Arguments in the stream; *out points into it. */
ckpt_status ckpt_vm_take(ckpt_vm *v, uint64_t n, const uint8_t **out);
ckpt_status ckpt_vm_take_uint(ckpt_vm *v, size_t width, uint64_t *out);
ckpt_status ckpt_vm_take_line(ckpt_vm *v, const char **line, size_t *n);

/* Push a value; push_single makes it at its first use and keeps it in *slot. */
ckpt_status ckpt_vm_push_text(ckpt_vm *v, ckpt_pkl_kind kind, const void *p, size_t n,
                              ckpt_pkl **out);
ckpt_status ckpt_vm_push_single(ckpt_vm *v, ckpt_pkl **slot, ckpt_pkl_kind kind, int64_t value);
ckpt_status ckpt_vm_push_int(ckpt_vm *v, int64_t value);
ckpt_status ckpt_vm_push_py2_str(ckpt_vm *v, const void *p, size_t n);
/* Hash of n bytes, for the caches only. */
uint32_t ckpt_vm_hash(uint32_t seed, const void *p, size_t n);
/* UTF-8 in which encoded surrogates pass: Python pickles them. */
bool ckpt_vm_utf8(const uint8_t *s, size_t n);

static inline ckpt_status ckpt_vm_push(ckpt_vm *v, ckpt_pkl *node)
{
    if (v->sp >= v->max_depth)
        return VM_FAIL(v, "stack deeper than %zu", v->max_depth);
    if (v->sp == v->stack_cap) {
        ckpt_status status =
            ckpt_grow((void **)&v->stack, &v->stack_cap, v->sp + 1, sizeof *v->stack, v->err);
        if (status != CKPT_OK)
            return status;
    }
    v->stack[v->sp++] = node;
    return CKPT_OK;
}

static inline ckpt_status ckpt_vm_push_new(ckpt_vm *v, ckpt_pkl_kind kind, ckpt_pkl **out)
{
    ckpt_status status = ckpt_vm_node(v, kind, out);
    return status == CKPT_OK ? ckpt_vm_push(v, *out) : status;
}

static inline size_t ckpt_vm_floor(const ckpt_vm *v)
{
    return v->n_marks ? v->marks[v->n_marks - 1] : 0;
}

/* Values below the innermost mark are out of reach, as in CPython. */
static inline ckpt_status ckpt_vm_need(ckpt_vm *v, size_t n)
{
    if (v->sp - ckpt_vm_floor(v) < n)
        return VM_FAIL(v, "needs %zu values, stack has %zu above the mark", n,
                       v->sp - ckpt_vm_floor(v));
    return CKPT_OK;
}

/* Opcodes of pickle_scalar.c. */
ckpt_status ckpt_vm_op_none(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_bool(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_binint(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_long_n(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_binfloat(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_float_text(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_int_text(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_unicode(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_bytes(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_binstring(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_string_text(ckpt_vm *v, uint8_t op);
ckpt_status ckpt_vm_op_unicode_text(ckpt_vm *v, uint8_t op);

#endif
