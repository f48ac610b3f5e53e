/* Pickle virtual machine, protocols 0-5, that builds inert nodes.
 *
 * Opcodes follow CPython Lib/pickle.py; the table at the end of this file is the specification in
 * force. Integers are little-endian except BINFLOAT, which is big-endian. Text arguments of
 * protocol 0 end at a newline. Deviations, all deliberate: a GLOBAL is only recorded; EXT and
 * out-of-band buffers are refused; text after STOP is ignored; SETITEM, APPEND and BUILD attach to
 * the kinds of node that can carry them and are an error on any other. */
#include "pickle_vm.h"

#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "le.h"
#include "source.h"

#define DEFAULT_NODES ((size_t)1 << 20)
#define DEFAULT_DEPTH ((size_t)1 << 20)

typedef ckpt_status (*op_fn)(ckpt_vm *v, uint8_t op);

ckpt_status ckpt_vm_fail(ckpt_vm *v, ckpt_status code, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return ckpt_fail(v->err, code, "pickle opcode 0x%02x at byte %zu: %s",
                     v->op_pos < v->n ? v->p[v->op_pos] : 0U, v->op_pos, text);
}

ckpt_status ckpt_vm_no_memory(ckpt_vm *v)
{
    return ckpt_fail(v->err, CKPT_E_NOMEM, "pickle: out of memory after %u nodes", v->n_nodes);
}

/* extra: bytes behind the node, for its text. */
static ckpt_status new_node(ckpt_vm *v, ckpt_pkl_kind kind, size_t extra, ckpt_pkl **out)
{
    *out = NULL;
    if (v->n_nodes >= v->max_nodes)
        return VM_FAIL(v, "more than %zu nodes", v->max_nodes);
    bool full = kind == CKPT_PKL_GLOBAL || kind == CKPT_PKL_OBJECT;
    ckpt_pkl *node =
        ckpt_arena_alloc(v->arena, (full ? sizeof(ckpt_pkl) : CKPT_VM_BASE_SIZE) + extra);
    if (!node)
        return ckpt_vm_no_memory(v);
    node->kind = kind;
    node->id = v->n_nodes++;
    *out = node;
    return CKPT_OK;
}

ckpt_status ckpt_vm_node(ckpt_vm *v, ckpt_pkl_kind kind, ckpt_pkl **out)
{
    return new_node(v, kind, 0, out);
}

ckpt_status ckpt_vm_text_node(ckpt_vm *v, ckpt_pkl_kind kind, const void *p, size_t n,
                              ckpt_pkl **out)
{
    ckpt_status status = new_node(v, kind, n + 1, out);
    if (status != CKPT_OK)
        return status;
    char *text = (char *)*out + CKPT_VM_BASE_SIZE;
    if (n)
        memcpy(text, p, n);
    (*out)->str = text;
    (*out)->len = n;
    return CKPT_OK;
}

static ckpt_status pop_mark(ckpt_vm *v, ckpt_pkl ***items, size_t *n)
{
    if (v->n_marks == 0)
        return VM_FAIL(v, "no mark");
    size_t at = v->marks[--v->n_marks];
    *items = v->stack ? v->stack + at : NULL;
    *n = v->sp - at;
    v->sp = at;
    return CKPT_OK;
}

static ckpt_status copy_items(ckpt_vm *v, ckpt_pkl *node, ckpt_pkl **items, size_t n)
{
    if (n == 0)
        return CKPT_OK;
    node->items = ckpt_arena_array(v->arena, n, sizeof *items);
    if (!node->items)
        return ckpt_vm_no_memory(v);
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

static ckpt_status extend(ckpt_vm *v, ckpt_pkl ***array, size_t *len, ckpt_pkl **items, size_t n)
{
    size_t old = vec_cap(*len), cap = vec_cap(*len + n);
    if (cap != old) {
        ckpt_pkl **grown = ckpt_arena_array(v->arena, cap, sizeof *grown);
        if (!grown)
            return ckpt_vm_no_memory(v);
        if (*len)
            memcpy(grown, *array, *len * sizeof *grown);
        *array = grown;
    }
    if (n)
        memcpy(*array + *len, items, n * sizeof *items);
    *len += n;
    return CKPT_OK;
}

/* ---- containers ------------------------------------------------------------------------------- */

static ckpt_status op_mark(ckpt_vm *v, uint8_t op)
{
    (void)op;
    if (v->n_marks >= v->max_depth)
        return VM_FAIL(v, "more than %zu marks", v->max_depth);
    if (v->n_marks == v->marks_cap) {
        ckpt_status status =
            ckpt_grow((void **)&v->marks, &v->marks_cap, v->n_marks + 1, sizeof *v->marks, v->err);
        if (status != CKPT_OK)
            return status;
    }
    v->marks[v->n_marks++] = v->sp;
    return CKPT_OK;
}

static ckpt_status op_pop(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    /* CPython: POP right after MARK removes the mark. */
    if (op == '1' || (v->n_marks && v->sp == ckpt_vm_floor(v)))
        return pop_mark(v, &items, &n);
    ckpt_status status = ckpt_vm_need(v, 1);
    if (status == CKPT_OK)
        v->sp--;
    return status;
}

static ckpt_status op_dup(ckpt_vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = ckpt_vm_need(v, 1);
    return status == CKPT_OK ? ckpt_vm_push(v, v->stack[v->sp - 1]) : status;
}

static ckpt_status op_empty(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl *node;
    if (op == ')')
        return ckpt_vm_push_single(v, &v->empty_tuple, CKPT_PKL_TUPLE, 0);
    return ckpt_vm_push_new(v,
                            op == ']'   ? CKPT_PKL_LIST
                            : op == '}' ? CKPT_PKL_DICT
                                        : CKPT_PKL_SET,
                            &node);
}

static uint64_t pointer_hash(uint64_t h, const void *p)
{
    return (h ^ (uint64_t)(uintptr_t)p) * UINT64_C(0x9e3779b97f4a7c15);
}

/* A tuple of these items: an earlier one if it is of numbers or of tuples, whose identity nobody
 * asks for. Two nodes are one value exactly when they hold the same items. */
static ckpt_status make_tuple(ckpt_vm *v, ckpt_pkl **items, size_t n, ckpt_pkl **out)
{
    ckpt_pkl **slot = NULL;
    if (v->cache && n > 0 && n <= 8 &&
        (items[0]->kind == CKPT_PKL_INT || items[0]->kind == CKPT_PKL_TUPLE)) {
        uint64_t h = n;
        for (size_t i = 0; i < n; i++)
            h = pointer_hash(h ^ (h >> 31), items[i]);
        slot = &v->cache->tuples[h >> 51];
        if (*slot && (*slot)->n_items == n &&
            memcmp((*slot)->items, items, n * sizeof *items) == 0) {
            *out = *slot;
            return CKPT_OK;
        }
    }
    ckpt_status status = ckpt_vm_node(v, CKPT_PKL_TUPLE, out);
    if (status == CKPT_OK)
        status = copy_items(v, *out, items, n);
    if (status == CKPT_OK && slot)
        *slot = *out;
    return status;
}

static ckpt_status op_tuple_n(ckpt_vm *v, uint8_t op)
{
    size_t n = (size_t)op - 0x84;
    ckpt_pkl *node;
    ckpt_status status = ckpt_vm_need(v, n);
    if (status == CKPT_OK)
        status = make_tuple(v, v->stack + v->sp - n, n, &node);
    if (status != CKPT_OK)
        return status;
    v->sp -= n;
    return ckpt_vm_push(v, node);
}

/* TUPLE, LIST, DICT and FROZENSET from the values above the mark. */
static ckpt_status op_collect(ckpt_vm *v, uint8_t op)
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
        return VM_FAIL(v, "odd number of items (%zu) for a dict", n);
    if (op == 't' && n == 0)
        return op_empty(v, ')');
    if (kind == CKPT_PKL_TUPLE) {
        status = make_tuple(v, items, n, &node);
        return status == CKPT_OK ? ckpt_vm_push(v, node) : status;
    }
    status = ckpt_vm_node(v, kind, &node);
    if (status == CKPT_OK)
        status = extend(v, &node->items, &node->n_items, items, n);
    if (status != CKPT_OK)
        return status;
    node->b = op == 0x91;
    return ckpt_vm_push(v, node);
}

static const char *kind_name(const ckpt_pkl *p)
{
    static const char *const names[] = {"None", "bool",   "int",    "int",    "float",
                                        "str",  "bytes",  "list",   "tuple",  "dict",
                                        "set",  "global", "object", "persid", "taken"};
    return names[p->kind];
}

/* Objects that several places share take nothing: what one gave them the others would have. */
static bool is_shared(const ckpt_vm *v, const ckpt_pkl *p)
{
    return v->size && p->kind == CKPT_PKL_OBJECT && p->callable == v->size;
}

static ckpt_status add_items(ckpt_vm *v, uint8_t op, ckpt_pkl **items, size_t n)
{
    ckpt_status status = ckpt_vm_need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *target = v->stack[v->sp - 1];
    bool set = op == 0x90;
    if (target->kind != CKPT_PKL_OBJECT && target->kind != (set ? CKPT_PKL_SET : CKPT_PKL_LIST))
        return VM_FAIL(v, "cannot add items to a %s", kind_name(target));
    if (is_shared(v, target))
        return VM_FAIL(v, "cannot add items to a torch.Size");
    if (set && target->kind == CKPT_PKL_SET && target->b)
        return VM_FAIL(v, "cannot add items to a frozenset");
    if (target->kind == CKPT_PKL_OBJECT)
        target->len = set;
    return extend(v, &target->items, &target->n_items, items, n);
}

static ckpt_status add_pairs(ckpt_vm *v, ckpt_pkl **items, size_t n)
{
    ckpt_status status = ckpt_vm_need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *target = v->stack[v->sp - 1];
    if (n % 2)
        return VM_FAIL(v, "odd number of items (%zu) for a dict", n);
    if (target->kind == CKPT_PKL_DICT)
        return extend(v, &target->items, &target->n_items, items, n);
    if (is_shared(v, target))
        return VM_FAIL(v, "cannot set items of a torch.Size");
    if (target->kind == CKPT_PKL_OBJECT)
        return extend(v, &target->pairs, &target->n_pairs, items, n);
    return VM_FAIL(v, "cannot set items of a %s", kind_name(target));
}

static ckpt_status op_append(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    if (op != 'a') {
        ckpt_status status = pop_mark(v, &items, &n);
        return status == CKPT_OK ? add_items(v, op, items, n) : status;
    }
    ckpt_status status = ckpt_vm_need(v, 2);
    if (status != CKPT_OK)
        return status;
    v->sp--;
    return add_items(v, op, v->stack + v->sp, 1);
}

static ckpt_status op_setitem(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl **items;
    size_t n;
    if (op != 's') {
        ckpt_status status = pop_mark(v, &items, &n);
        return status == CKPT_OK ? add_pairs(v, items, n) : status;
    }
    ckpt_status status = ckpt_vm_need(v, 3);
    if (status != CKPT_OK)
        return status;
    v->sp -= 2;
    return add_pairs(v, v->stack + v->sp, 2);
}

/* ---- memo ------------------------------------------------------------------------------------- */

static ckpt_status take_index_text(ckpt_vm *v, uint64_t *out)
{
    const char *line;
    size_t n;
    ckpt_status status = ckpt_vm_take_line(v, &line, &n);
    if (status != CKPT_OK)
        return status;
    *out = 0;
    for (size_t i = 0; i < n; i++)
        if (line[i] < '0' || line[i] > '9' || !ckpt_mul_u64(*out, 10, out) ||
            !ckpt_add_u64(*out, (uint64_t)(line[i] - '0'), out))
            return VM_FAIL(v, "bad memo index text");
    return n ? CKPT_OK : VM_FAIL(v, "empty memo index");
}

static ckpt_status op_put(ckpt_vm *v, uint8_t op)
{
    uint64_t index = v->memo_count;
    ckpt_status status = op == 0x94  ? CKPT_OK
                         : op == 'p' ? take_index_text(v, &index)
                                     : ckpt_vm_take_uint(v, op == 'q' ? 1 : 4, &index);
    return status == CKPT_OK ? ckpt_vm_memo_put(v, index) : status;
}

static ckpt_status op_get(ckpt_vm *v, uint8_t op)
{
    uint64_t index;
    ckpt_status status =
        op == 'g' ? take_index_text(v, &index) : ckpt_vm_take_uint(v, op == 'h' ? 1 : 4, &index);
    return status == CKPT_OK ? ckpt_vm_memo_get(v, index) : status;
}

/* ---- globals and objects ---------------------------------------------------------------------- */

static ckpt_status new_global(ckpt_vm *v, const char *mod, size_t n_mod, const char *name,
                              size_t n_name, ckpt_pkl **out)
{
    /* A NUL would make two different names compare equal. */
    if (n_mod == 0 || n_name == 0 || memchr(mod, 0, n_mod) || memchr(name, 0, n_name) ||
        !ckpt_vm_utf8((const uint8_t *)mod, n_mod) || !ckpt_vm_utf8((const uint8_t *)name, n_name))
        return VM_FAIL(v, "empty or ill-formed global name");
    ckpt_status status = ckpt_vm_node(v, CKPT_PKL_GLOBAL, out);
    if (status != CKPT_OK)
        return status;
    (*out)->str = ckpt_arena_strndup(v->arena, mod, n_mod);
    (*out)->len = n_mod;
    (*out)->name = ckpt_arena_strndup(v->arena, name, n_name);
    if (!(*out)->str || !(*out)->name)
        return ckpt_vm_no_memory(v);
    if (v->taker)
        (*out)->i = v->taker->wants((*out)->name);
    if (!v->unknown && !ckpt_pkl_global_known((*out)->str, (*out)->name)) {
        v->unknown = ckpt_arena_printf(v->arena, "%s.%s", (*out)->str, (*out)->name);
        if (!v->unknown)
            return ckpt_vm_no_memory(v);
    }
    return CKPT_OK;
}

static ckpt_status make_global(ckpt_vm *v, const char *mod, size_t n_mod, const char *name,
                               size_t n_name, ckpt_pkl **out)
{
    uint32_t hash = ckpt_vm_hash(ckpt_vm_hash(0, mod, n_mod), name, n_name);
    ckpt_pkl **slot = &v->globals[hash % (sizeof v->globals / sizeof *v->globals)], *hit = *slot;
    if (hit && hit->len == n_mod && memcmp(hit->str, mod, n_mod) == 0 &&
        strlen(hit->name) == n_name && memcmp(hit->name, name, n_name) == 0) {
        *out = hit;
        return CKPT_OK;
    }
    ckpt_status status = new_global(v, mod, n_mod, name, n_name, out);
    if (status == CKPT_OK)
        *slot = *out;
    return status;
}

static ckpt_status take_global(ckpt_vm *v, ckpt_pkl **out)
{
    const char *mod, *name;
    size_t n_mod, n_name;
    ckpt_status status = ckpt_vm_take_line(v, &mod, &n_mod);
    if (status == CKPT_OK)
        status = ckpt_vm_take_line(v, &name, &n_name);
    return status == CKPT_OK ? make_global(v, mod, n_mod, name, n_name, out) : status;
}

static ckpt_status op_global(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl *node;
    ckpt_status status;
    if (op == 'c') {
        status = take_global(v, &node);
        return status == CKPT_OK ? ckpt_vm_push(v, node) : status;
    }
    status = ckpt_vm_need(v, 2);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *mod = v->stack[v->sp - 2], *name = v->stack[v->sp - 1];
    if (mod->kind != CKPT_PKL_STR || name->kind != CKPT_PKL_STR)
        return VM_FAIL(v, "global named by a %s and a %s", kind_name(mod), kind_name(name));
    status = make_global(v, mod->str, mod->len, name->str, name->len, &node);
    v->sp -= 2;
    return status == CKPT_OK ? ckpt_vm_push(v, node) : status;
}

static ckpt_status push_object(ckpt_vm *v, ckpt_pkl *callable, ckpt_pkl *args, ckpt_pkl *kwargs,
                               bool newobj)
{
    ckpt_pkl *node;
    ckpt_status status = ckpt_vm_push_new(v, CKPT_PKL_OBJECT, &node);
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
static ckpt_status adopt_pairs(ckpt_vm *v, ckpt_pkl *object)
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
        return VM_FAIL(v, "two dictionaries made from one argument");
    arg->b = true;
    if (counter)
        return extend(v, &object->pairs, &object->n_pairs, arg->items, arg->n_items);
    for (size_t i = 0; i < arg->n_items; i++) {
        ckpt_pkl *pair = arg->items[i];
        if ((pair->kind != CKPT_PKL_LIST && pair->kind != CKPT_PKL_TUPLE) || pair->n_items != 2)
            return VM_FAIL(v, "OrderedDict from items that are not pairs");
        ckpt_status status = extend(v, &object->pairs, &object->n_pairs, pair->items, 2);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Is it the global whose objects are shared? The first torch.Size of the stream is. */
static bool is_size(ckpt_vm *v, ckpt_pkl *callable)
{
    if (!v->size && ckpt_pkl_is_global(callable, "torch", "Size"))
        v->size = callable;
    return v->size == callable;
}

static ckpt_status push_size(ckpt_vm *v, ckpt_pkl *callable, ckpt_pkl *args)
{
    ckpt_pkl **slot = &v->cache->sizes[pointer_hash(0, args) >> 51];
    if (*slot && (*slot)->args == args)
        return ckpt_vm_push(v, *slot);
    ckpt_status status = push_object(v, callable, args, NULL, false);
    if (status == CKPT_OK)
        *slot = v->stack[v->sp - 1];
    return status;
}

ckpt_status ckpt_vm_size(ckpt_vm *v, int rank, const int64_t *dims, ckpt_pkl *out[3])
{
    uint64_t h = (uint64_t)rank;
    for (int i = 0; i < rank; i++)
        h = (h ^ (h >> 31) ^ (uint64_t)dims[i]) * UINT64_C(0x9e3779b97f4a7c15);
    ckpt_pkl **slot = &v->cache->by_dims[h >> 51], *size = *slot;
    bool hit = size && size->args->items[0]->n_items == (size_t)rank;
    for (int i = 0; hit && i < rank; i++)
        hit = size->args->items[0]->items[i]->i == dims[i];
    if (!hit) {
        size_t sp = v->sp;
        ckpt_status status = CKPT_OK;
        for (int i = 0; status == CKPT_OK && i < rank; i++)
            status = ckpt_vm_push_int(v, dims[i]);
        if (status == CKPT_OK)
            status = rank ? make_tuple(v, v->stack + sp, (size_t)rank, &out[0]) : op_empty(v, ')');
        if (status == CKPT_OK && rank == 0)
            out[0] = v->empty_tuple;
        v->sp = sp;
        if (status == CKPT_OK)
            status = make_tuple(v, out, 1, &out[1]);
        if (status == CKPT_OK)
            status = push_size(v, v->size, out[1]);
        if (status != CKPT_OK)
            return status;
        size = *slot = v->stack[v->sp - 1];
        v->sp = sp;
    }
    out[0] = size->args->items[0];
    out[1] = size->args;
    out[2] = size;
    return CKPT_OK;
}

static ckpt_status op_reduce(ckpt_vm *v, uint8_t op)
{
    size_t n = op == 0x92 ? 3 : 2;
    ckpt_status status = ckpt_vm_need(v, n);
    if (status != CKPT_OK)
        return status;
    v->sp -= n;
    ckpt_pkl *at[3];
    memcpy(at, v->stack + v->sp, n * sizeof *at);
    if (at[1]->kind != CKPT_PKL_TUPLE)
        return VM_FAIL(v, "arguments are a %s, not a tuple", kind_name(at[1]));
    if (n == 3 && at[2]->kind != CKPT_PKL_DICT)
        return VM_FAIL(v, "keyword arguments are a %s, not a dict", kind_name(at[2]));
    if (op == 'R' && v->cache && is_size(v, at[0]))
        return push_size(v, at[0], at[1]);
    if (op == 0x81 && v->taker && at[0]->kind == CKPT_PKL_GLOBAL && at[0]->i) {
        ckpt_pkl *taken;
        status = ckpt_vm_take_object(v, at[0]->i, &taken);
        if (status != CKPT_OK || taken)
            return status == CKPT_OK ? ckpt_vm_push(v, taken) : status;
    }
    status = push_object(v, at[0], at[1], n == 3 ? at[2] : NULL, op != 'R');
    return status == CKPT_OK && op == 'R' ? adopt_pairs(v, v->stack[v->sp - 1]) : status;
}

/* INST module name, OBJ class on the stack; the arguments lie above the mark. */
static ckpt_status op_inst(ckpt_vm *v, uint8_t op)
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
            return VM_FAIL(v, "no class above the mark");
        cls = items[0];
        items++;
        n--;
    }
    status = ckpt_vm_node(v, CKPT_PKL_TUPLE, &args);
    if (status == CKPT_OK)
        status = copy_items(v, args, items, n);
    return status == CKPT_OK ? push_object(v, cls, args, NULL, false) : status;
}

static ckpt_status op_build(ckpt_vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = ckpt_vm_need(v, 2);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *state = v->stack[--v->sp], *target = v->stack[v->sp - 1];
    if (target->kind != CKPT_PKL_OBJECT)
        return VM_FAIL(v, "state given to a %s", kind_name(target));
    if (is_shared(v, target))
        return VM_FAIL(v, "state given to a torch.Size");
    /* Keeping only one of two states would hide the other from every later check. */
    if (target->state)
        return VM_FAIL(v, "object built twice");
    target->state = state;
    return CKPT_OK;
}

static ckpt_status op_persid(ckpt_vm *v, uint8_t op)
{
    ckpt_pkl *id, *node;
    const char *line;
    size_t n;
    ckpt_status status;
    if (op == 'P') {
        status = ckpt_vm_take_line(v, &line, &n);
        if (status == CKPT_OK)
            status = ckpt_vm_push_py2_str(v, line, n);
    } else {
        status = ckpt_vm_need(v, 1);
    }
    if (status != CKPT_OK)
        return status;
    id = v->stack[--v->sp];
    status = ckpt_vm_node(v, CKPT_PKL_PERSID, &node);
    if (status == CKPT_OK)
        status = copy_items(v, node, &id, 1);
    return status == CKPT_OK ? ckpt_vm_push(v, node) : status;
}

/* ---- framing and dispatch --------------------------------------------------------------------- */

static ckpt_status op_proto(ckpt_vm *v, uint8_t op)
{
    (void)op;
    uint64_t version;
    ckpt_status status = ckpt_vm_take_uint(v, 1, &version);
    if (status == CKPT_OK && version > 5)
        return VM_FAIL(v, "protocol %u, expected at most 5", (unsigned)version);
    return status;
}

static ckpt_status op_frame(ckpt_vm *v, uint8_t op)
{
    (void)op;
    uint64_t n;
    ckpt_status status = ckpt_vm_take_uint(v, 8, &n);
    if (status == CKPT_OK && n > v->n - v->pos)
        return VM_FAIL(v, "frame of %llu bytes, %zu left", (unsigned long long)n, v->n - v->pos);
    return status;
}

static ckpt_status op_stop(ckpt_vm *v, uint8_t op)
{
    (void)op;
    ckpt_status status = ckpt_vm_need(v, 1);
    if (status == CKPT_OK && v->stack[v->sp - 1]->kind == CKPT_PKL_TAKEN)
        return VM_FAIL(v, "the whole is an object that was taken");
    if (status == CKPT_OK)
        v->result = v->stack[v->sp - 1];
    return status;
}

static ckpt_status op_refused(ckpt_vm *v, uint8_t op)
{
    return ckpt_vm_fail(v, CKPT_E_UNSUPPORTED, "%s is refused",
                        op >= 0x97 ? "an out-of-band buffer" : "an extension code");
}

/* clang-format off */
static const op_fn ops[256] = {
    ['('] = op_mark, ['0'] = op_pop, ['1'] = op_pop, ['2'] = op_dup, ['.'] = op_stop,
    [0x80] = op_proto, [0x95] = op_frame,
    ['N'] = ckpt_vm_op_none, [0x88] = ckpt_vm_op_bool, [0x89] = ckpt_vm_op_bool,
    ['K'] = ckpt_vm_op_binint, ['M'] = ckpt_vm_op_binint, ['J'] = ckpt_vm_op_binint, [0x8a] = ckpt_vm_op_long_n, [0x8b] = ckpt_vm_op_long_n,
    ['I'] = ckpt_vm_op_int_text, ['L'] = ckpt_vm_op_int_text, ['F'] = ckpt_vm_op_float_text, ['G'] = ckpt_vm_op_binfloat,
    ['X'] = ckpt_vm_op_unicode, [0x8c] = ckpt_vm_op_unicode, [0x8d] = ckpt_vm_op_unicode, ['V'] = ckpt_vm_op_unicode_text,
    ['B'] = ckpt_vm_op_bytes, ['C'] = ckpt_vm_op_bytes, [0x8e] = ckpt_vm_op_bytes, [0x96] = ckpt_vm_op_bytes,
    ['T'] = ckpt_vm_op_binstring, ['U'] = ckpt_vm_op_binstring, ['S'] = ckpt_vm_op_string_text,
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

/* MEMOIZE, BINGET and LONG_BINGET, which are two of three opcodes of what Python's pickler writes,
 * where nothing can be wrong with them. False: the ordinary way. */
static bool run_memo(ckpt_vm *v, uint8_t op)
{
    if (op == 0x94) {
        if (v->sp <= ckpt_vm_floor(v) || v->dense_n != v->memo_count ||
            v->dense_n == v->dense_cap || v->n_sparse)
            return false;
        v->dense[v->dense_n++] = v->stack[v->sp - 1];
        v->memo_count++;
        return true;
    }
    size_t width = op == 'h' ? 1 : 4;
    if (v->n - v->pos < width || v->sp >= v->stack_cap || v->sp >= v->max_depth)
        return false;
    size_t index = op == 'h' ? v->p[v->pos] : ckpt_get_u32(v->p + v->pos);
    ckpt_pkl *node = index < v->dense_n ? v->dense[index] : NULL;
    if (!node || node == &v->gone)
        return false;
    v->pos += width;
    v->stack[v->sp++] = node;
    return true;
}

static ckpt_status run(ckpt_vm *v)
{
    while (!v->result) {
        v->op_pos = v->pos;
        if (v->pos == v->n)
            return ckpt_fail(v->err, CKPT_E_FORMAT, "pickle: no STOP in %zu bytes", v->n);
        uint8_t op = v->p[v->pos++];
        if ((op == 0x94 || op == 'h' || op == 'j') && run_memo(v, op))
            continue;
        ckpt_status status = ops[op] ? ops[op](v, op) : VM_FAIL(v, "unknown opcode");
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Hand the first unknown global to the root, see pickle_internal.h. */
static ckpt_status flag_unknown(ckpt_vm *v)
{
    if (!ckpt_pkl_is_text(v->result))
        v->result->str = v->unknown ? v->unknown : "";
    else if (v->unknown && (v->result->kind != CKPT_PKL_GLOBAL ||
                            ckpt_pkl_global_known(v->result->str, v->result->name)))
        return ckpt_fail(v->err, CKPT_E_UNSUPPORTED, "pickle of a bare %s that uses %s",
                         kind_name(v->result), v->unknown);
    return CKPT_OK;
}

static ckpt_status parse(const ckpt_pkl_taker *taker, const uint8_t *p, size_t n, ckpt_arena *arena,
                         const ckpt_pkl_limits *limits, ckpt_pkl **out, size_t *used,
                         uint32_t *n_nodes, ckpt_err *err)
{
    ckpt_vm v = {.p = p, .n = n, .arena = arena, .taker = taker, .err = err};
    v.max_nodes = limits && limits->max_nodes ? limits->max_nodes
                  : n > DEFAULT_NODES         ? n
                                              : DEFAULT_NODES;
    v.max_nodes = (size_t)ckpt_min_u64(v.max_nodes, UINT32_MAX - 1);
    v.max_depth = limits && limits->max_depth ? limits->max_depth : DEFAULT_DEPTH;
    *out = NULL;
    if (n >= CKPT_VM_CACHE_MIN || taker)
        v.cache = calloc(1, sizeof *v.cache); /* without it everything works, but slower */
    ckpt_status status = run(&v);
    if (status == CKPT_E_FORMAT && n > 0 && v.op_pos == 0 && /* no pickle at all: what is it? */
        ckpt_refuse_stand_in(p, n, n, err) != CKPT_OK)
        status = CKPT_E_FORMAT;
    if (status == CKPT_OK)
        status = flag_unknown(&v);
    if (status == CKPT_OK) {
        *out = v.result;
        if (used)
            *used = v.pos;
        if (n_nodes)
            *n_nodes = v.n_nodes;
    }
    free(v.stack);
    free(v.marks);
    free(v.dense);
    free(v.sparse);
    free(v.cache);
    return status;
}

ckpt_status ckpt_pkl_parse(const uint8_t *p, size_t n, ckpt_arena *arena,
                           const ckpt_pkl_limits *limits, ckpt_pkl **out, size_t *used,
                           uint32_t *n_nodes, ckpt_err *err)
{
    return parse(NULL, p, n, arena, limits, out, used, n_nodes, err);
}

ckpt_status ckpt_pkl_parse_taking(const uint8_t *p, size_t n, ckpt_arena *arena,
                                  const ckpt_pkl_taker *taker, ckpt_pkl **out, uint32_t *n_nodes,
                                  ckpt_err *err)
{
    return parse(taker, p, n, arena, NULL, out, NULL, n_nodes, err);
}
