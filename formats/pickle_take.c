/* Taking objects out of a pickle while it is read.
 *
 * A .metadata of a million entries is four million objects of four classes, all spelled alike. One of
 * them, behind its NEWOBJ (M: an optional MEMOIZE, BINPUT or LONG_BINPUT with the next index):
 *
 *   object  M '}' M '(' {key value} 'u' 'b'
 *   key     string
 *   value   'N' | integer | string | GET | size | state | list
 *   string  GET | 'X' | 0x8c                          GET: 'h' or 'j'
 *   size    GET of torch.Size, tuple of integers, 'R' M
 *   state   GET of another class, ')' 0x81 M '(' {GET | 'N' | 0x88 | 0x89} 't' M 'b'
 *   list    ']' M { '(' {element} 'e' | element 'a' } with element = GET of a wanted class, ')' 0x81, object
 *
 * is read here into fields, without nodes. Anything else is left to the interpreter, as if nothing had
 * been looked at; so is the first object of a kind, which still spells its classes out. Sizes are
 * nodes that the whole graph shares, as later entries refer to them; the memo's other entries of a
 * taken object lead to `gone`, to which no reference is allowed. */
#include "pickle_vm.h"

#include "checked.h"
#include "le.h"

#define FIELDS 8
#define STATE_ITEMS 64

/* ---- tokens --------------------------------------------------------------------------------- */

static int peek(const ckpt_vm *v)
{
    return v->pos < v->n ? v->p[v->pos] : -1;
}

static bool skip(ckpt_vm *v, int op)
{
    if (peek(v) != op)
        return false;
    v->pos++;
    return true;
}

/* M; what was memoised is node. */
static bool memo(ckpt_vm *v, ckpt_pkl *node)
{
    int op = peek(v);
    size_t width = op == 'q' ? 1 : op == 'r' ? 4 : 0;
    if (op != 0x94 && width == 0)
        return true;
    if (v->n - v->pos <= width || v->dense_n != v->memo_count || v->n_sparse)
        return false;
    uint64_t index = op == 'q'   ? v->p[v->pos + 1]
                     : op == 'r' ? ckpt_get_u32(v->p + v->pos + 1)
                                 : v->memo_count;
    if (index != v->memo_count ||
        (v->dense_n == v->dense_cap && ckpt_grow((void **)&v->dense, &v->dense_cap, v->dense_n + 1,
                                                 sizeof *v->dense, v->err) != CKPT_OK))
        return false;
    v->dense[v->dense_n++] = node;
    v->memo_count++;
    v->pos += 1 + width;
    return true;
}

/* GET, or NULL. */
static ckpt_pkl *get(ckpt_vm *v)
{
    int op = peek(v);
    size_t width = op == 'h' ? 1 : op == 'j' ? 4 : 0;
    if (width == 0 || v->n - v->pos <= width)
        return NULL;
    size_t index = op == 'h' ? v->p[v->pos + 1] : ckpt_get_u32(v->p + v->pos + 1);
    if (index >= v->dense_n || !v->dense[index] || v->dense[index] == &v->gone)
        return NULL;
    v->pos += 1 + width;
    return v->dense[index];
}

static bool integer(ckpt_vm *v, int64_t *out)
{
    int op = peek(v);
    size_t left = v->n - v->pos, n = op == 'K' ? 1 : op == 'M' ? 2 : op == 'J' ? 4 : 0;
    const uint8_t *p = v->p + v->pos + 1;
    if (op == 0x8a && left > 1) { /* two's complement of any length */
        n = 1 + (size_t)p[0];
        if (n < 2 || n > 9 || left <= n)
            return false;
        uint64_t value = p[n - 1] >= 0x80 ? UINT64_MAX : 0;
        for (size_t i = n - 1; i > 0; i--)
            value = value << 8 | p[i];
        memcpy(out, &value, sizeof *out);
    } else if (n == 0 || left <= n) {
        return false;
    } else {
        *out = n == 1 ? p[0] : n == 2 ? ckpt_get_u16(p) : (int32_t)ckpt_get_u32(p);
    }
    v->pos += 1 + n;
    return true;
}

static ckpt_pkl *string(ckpt_vm *v)
{
    int op = peek(v);
    if (op != 'X' && op != 0x8c) {
        ckpt_pkl *node = get(v);
        return node && node->kind == CKPT_PKL_STR ? node : NULL;
    }
    v->op_pos = v->pos++;
    if (ckpt_vm_op_unicode(v, (uint8_t)op) != CKPT_OK)
        return NULL;
    ckpt_pkl *node = v->stack[--v->sp];
    return memo(v, node) ? node : NULL;
}

/* ---- values --------------------------------------------------------------------------------- */

/* The integers of a tuple and what ends it: ')', up to three of them with 0x85 to 0x87, '(' ... 't'. */
static bool dims_of(ckpt_vm *v, int64_t *dims, int *rank)
{
    bool marked = skip(v, '(');
    int n = 0;
    if (!marked && skip(v, ')')) {
        *rank = 0;
        return true;
    }
    while (n < 8 && integer(v, &dims[n]))
        n++;
    *rank = n;
    if (marked)
        return n > 0 && skip(v, 't');
    return n >= 1 && n <= 3 && skip(v, 0x84 + n);
}

/* Behind GET of torch.Size. The inner tuple's memo index precedes the integers' end, so the nodes are
 * looked up first. */
static bool size_of(ckpt_vm *v, ckpt_pkl_field *f)
{
    ckpt_pkl *nodes[3];
    bool outer =
        peek(v) == '(' && v->n - v->pos > 1 && (v->p[v->pos + 1] == '(' || v->p[v->pos + 1] == ')');
    if (outer)
        v->pos++;
    if (!dims_of(v, f->dims, &f->rank) || ckpt_vm_size(v, f->rank, f->dims, nodes) != CKPT_OK ||
        !memo(v, nodes[0]) || !skip(v, outer ? 't' : 0x85) || !memo(v, nodes[1]) || !skip(v, 'R') ||
        !memo(v, nodes[2]))
        return false;
    f->kind = CKPT_PKL_FIELD_SIZE;
    f->node = nodes[2];
    return true;
}

/* Behind GET of a class: what its object has for a state. */
static bool state_of(ckpt_vm *v, ckpt_pkl_field *f)
{
    if (!skip(v, ')') || !skip(v, 0x81) || !memo(v, &v->gone) || !skip(v, '('))
        return false;
    f->node = NULL;
    for (int i = 0; i < STATE_ITEMS; i++) {
        ckpt_pkl *node = NULL;
        if (skip(v, 't')) {
            f->kind = CKPT_PKL_FIELD_STATE;
            return i > 0 && memo(v, &v->gone) && skip(v, 'b');
        }
        if (!skip(v, 'N') && !skip(v, 0x88) && !skip(v, 0x89) && !(node = get(v)))
            return false;
        if (i == 0 && !(f->node = node))
            return false;
    }
    return false;
}

static bool take(ckpt_vm *v, int64_t class_number, bool nested, int64_t *number);

/* GET of a wanted class, ')' NEWOBJ and the object; the same class as those before it. */
static bool element(ckpt_vm *v, ckpt_pkl_field *f, int64_t *class_number)
{
    const ckpt_pkl *cls = get(v);
    if (!cls || cls->kind != CKPT_PKL_GLOBAL || cls->i == 0 ||
        (f->n > 0 && cls->i != *class_number))
        return false;
    *class_number = cls->i;
    f->n++;
    return skip(v, ')') && skip(v, 0x81) && take(v, cls->i, true, &f->i);
}

/* Behind ']'. Python writes a thousand elements a batch. */
static bool list_of(ckpt_vm *v, ckpt_pkl_field *f)
{
    int64_t class_number = 0;
    f->kind = CKPT_PKL_FIELD_TAKEN;
    if (!memo(v, &v->gone))
        return false;
    for (;;) {
        size_t start = v->pos;
        if (skip(v, '(')) {
            while (!skip(v, 'e'))
                if (!element(v, f, &class_number))
                    return false;
            continue;
        }
        const ckpt_pkl *next = get(v);
        v->pos = start;
        if (!next || next->kind != CKPT_PKL_GLOBAL)
            return true;
        if (!element(v, f, &class_number) || !skip(v, 'a'))
            return false;
    }
}

static bool value_of(ckpt_vm *v, ckpt_pkl_field *f, bool nested)
{
    f->n = 0;
    if (skip(v, 'N')) {
        f->kind = CKPT_PKL_FIELD_NONE;
        return true;
    }
    if (skip(v, ']'))
        return !nested && list_of(v, f);
    if (integer(v, &f->i)) {
        f->kind = CKPT_PKL_FIELD_INT;
        return true;
    }
    f->kind = CKPT_PKL_FIELD_NODE;
    if (peek(v) == 'X' || peek(v) == 0x8c)
        return (f->node = string(v)) != NULL;
    if (!(f->node = get(v)))
        return false;
    if (f->node == v->size)
        return size_of(v, f);
    return f->node->kind != CKPT_PKL_GLOBAL || peek(v) != ')' || state_of(v, f);
}

static bool take(ckpt_vm *v, int64_t class_number, bool nested, int64_t *number)
{
    ckpt_pkl_field fields[FIELDS];
    size_t n = 0;
    if (!memo(v, &v->gone) || !skip(v, '}') || !memo(v, &v->gone) || !skip(v, '('))
        return false;
    while (!skip(v, 'u')) {
        if (n == FIELDS || !(fields[n].key = string(v)) || !value_of(v, &fields[n], nested))
            return false;
        n++;
    }
    return skip(v, 'b') && v->taker->take(v->taker->self, class_number, fields, n, number);
}

ckpt_status ckpt_vm_take_object(ckpt_vm *v, int64_t class_number, ckpt_pkl **out)
{
    size_t pos = v->pos, op_pos = v->op_pos, dense_n = v->dense_n, sp = v->sp;
    uint64_t memo_count = v->memo_count;
    int64_t number;
    *out = NULL;
    /* Sizes are shared through the cache, and only those below 2^32 nodes are numbered. */
    if (!v->cache || v->n_nodes >= v->max_nodes || !take(v, class_number, false, &number)) {
        v->pos = pos;
        v->op_pos = op_pos;
        v->sp = sp;
        v->dense_n = dense_n;
        v->memo_count = memo_count;
        return CKPT_OK;
    }
    ckpt_pkl *node = ckpt_arena_alloc(v->arena, CKPT_VM_TAKEN_SIZE);
    if (!node)
        return ckpt_vm_no_memory(v);
    node->kind = CKPT_PKL_TAKEN;
    node->id = v->n_nodes++;
    node->i = number;
    *out = node;
    return CKPT_OK;
}
