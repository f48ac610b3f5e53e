/* Pickle writer, protocol 2: the opcodes that torch.load(weights_only=True) accepts, apart from
 * sets and keyword construction, which that loader refuses in any form. Plain values are written
 * without a memo; re-emitted graphs use it for nodes with more than one reference. */
#include "pickle.h"

#include <stdlib.h>
#include <string.h>

#include "le.h"

/* JSON built by the library can nest deeper than what its parser accepts. */
#define JSON_DEPTH 256

void ckpt_pkl_begin(ckpt_buf *b)
{
    ckpt_buf_append(b, "\x80\x02", 2);
}

void ckpt_pkl_end(ckpt_buf *b)
{
    ckpt_buf_putc(b, '.');
}

void ckpt_pkl_put_none(ckpt_buf *b)
{
    ckpt_buf_putc(b, 'N');
}

void ckpt_pkl_put_bool(ckpt_buf *b, bool v)
{
    ckpt_buf_putc(b, v ? 0x88 : 0x89);
}

static void put_u32(ckpt_buf *b, int op, uint32_t v)
{
    uint8_t text[5] = {(uint8_t)op};
    ckpt_put_u32(text + 1, v);
    ckpt_buf_append(b, text, sizeof text);
}

void ckpt_pkl_put_int(ckpt_buf *b, int64_t v)
{
    uint8_t text[10] = {'K', (uint8_t)v};
    if (v >= 0 && v < 0x100) {
        ckpt_buf_append(b, text, 2);
    } else if (v >= 0 && v < 0x10000) {
        text[0] = 'M';
        ckpt_put_u16(text + 1, (uint16_t)v);
        ckpt_buf_append(b, text, 3);
    } else if (v >= INT32_MIN && v <= INT32_MAX) {
        put_u32(b, 'J', (uint32_t)v);
    } else {
        size_t n = 8;
        ckpt_put_u64(text + 2, (uint64_t)v);
        while ((text[n + 1] == 0 && text[n] < 0x80) || (text[n + 1] == 0xff && text[n] >= 0x80))
            n--;
        text[0] = 0x8a;
        text[1] = (uint8_t)n;
        ckpt_buf_append(b, text, n + 2);
    }
}

void ckpt_pkl_put_float(ckpt_buf *b, double v)
{
    uint8_t text[9] = {'G'};
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    for (int i = 8; i > 0; i--, bits >>= 8)
        text[i] = (uint8_t)bits;
    ckpt_buf_append(b, text, sizeof text);
}

static void put_text(ckpt_buf *b, const char *s, size_t n)
{
    if (n > UINT32_MAX) {
        b->failed = true;
        return;
    }
    put_u32(b, 'X', (uint32_t)n);
    ckpt_buf_append(b, s, n);
}

void ckpt_pkl_put_str(ckpt_buf *b, const char *s)
{
    put_text(b, s, strlen(s));
}

void ckpt_pkl_put_global(ckpt_buf *b, const char *module, const char *name)
{
    ckpt_buf_putc(b, 'c');
    ckpt_buf_puts(b, module);
    ckpt_buf_putc(b, '\n');
    ckpt_buf_puts(b, name);
    ckpt_buf_putc(b, '\n');
}

void ckpt_pkl_put_size(ckpt_buf *b, int rank, const int64_t *dims)
{
    ckpt_pkl_put_global(b, "torch", "Size");
    ckpt_buf_puts(b, "((");
    for (int i = 0; i < rank; i++)
        ckpt_pkl_put_int(b, dims[i]);
    ckpt_buf_puts(b, "ttR");
}

/* ---- JSON ------------------------------------------------------------------------------------- */

static void put_json(ckpt_buf *b, const ckpt_json *j, int depth);

static void put_members(ckpt_buf *b, const ckpt_json *object, int depth)
{
    ckpt_buf_putc(b, '}');
    const ckpt_json *c = ckpt_json_child(object);
    if (!c)
        return;
    ckpt_buf_putc(b, '(');
    for (; c; c = ckpt_json_next(c)) {
        ckpt_pkl_put_str(b, ckpt_json_key(c));
        put_json(b, c, depth + 1);
    }
    ckpt_buf_putc(b, 'u');
}

static void put_number(ckpt_buf *b, const ckpt_json *j)
{
    int64_t i;
    double d;
    if (!ckpt_json_is_float(j) && ckpt_json_int(j, &i))
        ckpt_pkl_put_int(b, i);
    else if (ckpt_json_double(j, &d))
        ckpt_pkl_put_float(b, d);
}

static void put_json(ckpt_buf *b, const ckpt_json *j, int depth)
{
    bool flag;
    if (depth > JSON_DEPTH) {
        b->failed = true;
    } else if (ckpt_json_bool(j, &flag)) {
        ckpt_pkl_put_bool(b, flag);
    } else if (ckpt_json_is_number(j)) {
        put_number(b, j);
    } else if (ckpt_json_is_string(j)) {
        ckpt_pkl_put_str(b, ckpt_json_string(j));
    } else if (ckpt_json_is_array(j)) {
        const ckpt_json *c = ckpt_json_child(j);
        ckpt_buf_puts(b, c ? "](" : "]");
        for (const ckpt_json *e = c; e; e = ckpt_json_next(e))
            put_json(b, e, depth + 1);
        if (c)
            ckpt_buf_putc(b, 'e');
    } else if (ckpt_json_is_object(j)) {
        const char *torch = ckpt_json_string(ckpt_json_get(j, "$torch"));
        if (torch)
            ckpt_pkl_put_global(b, "torch", torch);
        else
            put_members(b, j, depth);
    } else {
        ckpt_pkl_put_none(b);
    }
}

void ckpt_pkl_put_json(ckpt_buf *b, const ckpt_json *j)
{
    put_json(b, j, 0);
}

void ckpt_pkl_put_namespace(ckpt_buf *b, const ckpt_json *object)
{
    ckpt_pkl_put_global(b, "argparse", "Namespace");
    ckpt_buf_puts(b, ")\x81");
    put_members(b, object, 0);
    ckpt_buf_putc(b, 'b');
}

/* ---- graphs ----------------------------------------------------------------------------------- */

typedef struct frame {
    const ckpt_pkl *node;
    size_t step; /* children written */
} frame;

typedef struct emitter {
    ckpt_buf *b;
    frame *stack;
    size_t n, cap;
    uint32_t *refs, *memo; /* by node id; memo holds index + 1 */
    uint32_t n_nodes, n_memo;
    uint64_t work, edges;
    ckpt_err *err;
} emitter;

/* Children in emission order: for an OBJECT callable, args, kwargs, items, pairs, state. */
static size_t object_head(const ckpt_pkl *p)
{
    return p->kwargs ? 3 : 2;
}

static size_t n_children(const ckpt_pkl *p)
{
    if (p->kind != CKPT_PKL_OBJECT)
        return p->n_items;
    return object_head(p) + p->n_items + p->n_pairs + (p->state != NULL);
}

static const ckpt_pkl *child_at(const ckpt_pkl *p, size_t i)
{
    if (p->kind != CKPT_PKL_OBJECT)
        return p->items[i];
    size_t head = object_head(p);
    if (i < head)
        return i == 0 ? p->callable : i == 1 ? p->args : p->kwargs;
    i -= head;
    if (i < p->n_items)
        return p->items[i];
    i -= p->n_items;
    return i < p->n_pairs ? p->pairs[i] : p->state;
}

static ckpt_status push_frame(emitter *e, const ckpt_pkl *p)
{
    ckpt_status status = ckpt_grow((void **)&e->stack, &e->cap, e->n + 1, sizeof *e->stack, e->err);
    if (status == CKPT_OK)
        e->stack[e->n++] = (frame){p, 0};
    return status;
}

/* Count the references of every node reachable from the root. */
static ckpt_status count_refs(emitter *e, const ckpt_pkl *root)
{
    ckpt_status status = push_frame(e, root);
    e->refs[root->id] = 1;
    while (status == CKPT_OK && e->n) {
        frame *top = &e->stack[e->n - 1];
        if (top->step == n_children(top->node)) {
            e->n--;
            continue;
        }
        const ckpt_pkl *c = child_at(top->node, top->step++);
        e->edges++;
        if (c->kind == CKPT_PKL_TAKEN || c->id >= e->n_nodes)
            return ckpt_fail(e->err, CKPT_E_INTERNAL, "pickle node %u of %u", c->id, e->n_nodes);
        if (e->refs[c->id] < 2 && e->refs[c->id]++ == 0)
            status = push_frame(e, c);
    }
    return status;
}

static void memoize(emitter *e, const ckpt_pkl *p)
{
    if (e->refs[p->id] < 2 || e->memo[p->id])
        return;
    uint32_t index = e->n_memo++;
    e->memo[p->id] = index + 1;
    if (index < 256) {
        ckpt_buf_putc(e->b, 'q');
        ckpt_buf_putc(e->b, (int)index);
    } else {
        put_u32(e->b, 'r', index);
    }
}

static bool put_get(emitter *e, const ckpt_pkl *p)
{
    if (!e->memo[p->id])
        return false;
    uint32_t index = e->memo[p->id] - 1;
    if (index < 256) {
        ckpt_buf_putc(e->b, 'h');
        ckpt_buf_putc(e->b, (int)index);
    } else {
        put_u32(e->b, 'j', index);
    }
    return true;
}

/* Protocol 2 has no bytes: Latin-1 text through _codecs.encode, as CPython writes them. */
static void put_bytes(ckpt_buf *b, const ckpt_pkl *p)
{
    ckpt_buf text = {0};
    if (p->b)
        ckpt_pkl_put_global(b, "__builtin__", "bytearray");
    if (p->len == 0) {
        ckpt_pkl_put_global(b, "__builtin__", "bytes");
        ckpt_buf_puts(b, ")R");
    } else {
        for (size_t i = 0; i < p->len; i++) {
            uint8_t c = (uint8_t)p->str[i];
            if (c >= 0x80)
                ckpt_buf_putc(&text, 0xc0 | c >> 6);
            ckpt_buf_putc(&text, c < 0x80 ? c : 0x80 | (c & 0x3f));
        }
        ckpt_pkl_put_global(b, "_codecs", "encode");
        put_text(b, (const char *)text.data, text.len);
        ckpt_pkl_put_str(b, "latin1");
        ckpt_buf_puts(b, "\x86R");
    }
    if (p->b)
        ckpt_buf_puts(b, "\x85R");
    b->failed |= text.failed;
    ckpt_buf_release(&text);
}

static void put_big(ckpt_buf *b, const ckpt_pkl *p)
{
    if (p->len < 256) {
        ckpt_buf_putc(b, 0x8a);
        ckpt_buf_putc(b, (int)p->len);
    } else if (p->len <= INT32_MAX) {
        put_u32(b, 0x8b, (uint32_t)p->len);
    } else {
        b->failed = true;
    }
    ckpt_buf_append(b, p->str, p->len);
}

/* Values without children. */
static bool put_leaf(emitter *e, const ckpt_pkl *p)
{
    switch (p->kind) {
    case CKPT_PKL_NONE:
        ckpt_pkl_put_none(e->b);
        return true;
    case CKPT_PKL_BOOL:
        ckpt_pkl_put_bool(e->b, p->b);
        return true;
    case CKPT_PKL_INT:
        ckpt_pkl_put_int(e->b, p->i);
        return true;
    case CKPT_PKL_FLOAT:
        ckpt_pkl_put_float(e->b, p->f);
        return true;
    case CKPT_PKL_BIGINT:
        put_big(e->b, p);
        break;
    case CKPT_PKL_STR:
        put_text(e->b, p->str, p->len);
        break;
    case CKPT_PKL_BYTES:
        put_bytes(e->b, p);
        break;
    case CKPT_PKL_GLOBAL:
        ckpt_pkl_put_global(e->b, p->str, p->name);
        break;
    case CKPT_PKL_LIST:
    case CKPT_PKL_TUPLE:
    case CKPT_PKL_DICT:
    case CKPT_PKL_SET:
    case CKPT_PKL_OBJECT:
    case CKPT_PKL_PERSID:
    case CKPT_PKL_TAKEN:
        return false;
    }
    memoize(e, p);
    return true;
}

/* What precedes the first child. Mutable containers enter the memo before their children. */
static void open_node(emitter *e, const ckpt_pkl *p)
{
    bool frozen = p->kind == CKPT_PKL_SET && p->b;
    bool mutable = p->kind == CKPT_PKL_LIST || p->kind == CKPT_PKL_DICT ||
                   (p->kind == CKPT_PKL_SET && !frozen);
    if (mutable) {
        ckpt_buf_putc(e->b, p->kind == CKPT_PKL_LIST ? ']' : p->kind == CKPT_PKL_DICT ? '}' : 0x8f);
        memoize(e, p);
    }
    if (frozen || (mutable && p->n_items) || (p->kind == CKPT_PKL_TUPLE && p->n_items > 3))
        ckpt_buf_putc(e->b, '(');
}

/* An immutable node just completed. A cycle may have completed it further in already. */
static bool created(emitter *e, const ckpt_pkl *p)
{
    if (e->memo[p->id]) {
        ckpt_buf_putc(e->b, '0');
        (void)put_get(e, p);
        return false;
    }
    memoize(e, p);
    return true;
}

static void close_node(emitter *e, const ckpt_pkl *p)
{
    static const char tuples[] = ")\x85\x86\x87";
    if (p->kind == CKPT_PKL_TUPLE) {
        ckpt_buf_putc(e->b, p->n_items > 3 ? 't' : (uint8_t)tuples[p->n_items]);
        created(e, p);
    } else if (p->kind == CKPT_PKL_PERSID) {
        ckpt_buf_putc(e->b, 'Q');
        created(e, p);
    } else if (p->kind == CKPT_PKL_SET && p->b) {
        ckpt_buf_putc(e->b, 0x91);
        created(e, p);
    } else if (p->kind != CKPT_PKL_OBJECT && p->n_items) {
        ckpt_buf_putc(e->b, p->kind == CKPT_PKL_LIST ? 'e' : p->kind == CKPT_PKL_DICT ? 'u' : 0x90);
    }
}

/* Opcodes of an OBJECT that fall between its children; called before child `step` and at the end.
 * False: the object was already complete, drop the frame. */
static bool object_step(emitter *e, const ckpt_pkl *p, size_t step)
{
    size_t head = object_head(p), items = head + p->n_items, pairs = items + p->n_pairs;
    if (step == head) {
        ckpt_buf_putc(e->b, p->kwargs ? 0x92 : p->b ? 0x81 : 'R');
        if (!created(e, p))
            return false;
    }
    if (step == items && p->n_items)
        ckpt_buf_putc(e->b, p->len ? 0x90 : 'e');
    if (step == pairs && p->n_pairs)
        ckpt_buf_putc(e->b, 'u');
    if ((step == head && p->n_items) || (step == items && p->n_pairs))
        ckpt_buf_putc(e->b, '(');
    if (step == pairs + 1)
        ckpt_buf_putc(e->b, 'b');
    return true;
}

static ckpt_status enter(emitter *e, const ckpt_pkl *p)
{
    /* Re-emission inside cycles at most doubles the work. */
    if (++e->work > 4 * e->edges + 1024)
        return ckpt_fail(e->err, CKPT_E_FORMAT, "pickle graph too entangled to write again");
    if (p->kind == CKPT_PKL_GLOBAL && (strchr(p->str, '\n') || strchr(p->name, '\n')))
        return ckpt_fail(e->err, CKPT_E_FORMAT, "pickle global with a newline in its name");
    if (put_get(e, p) || put_leaf(e, p))
        return CKPT_OK;
    open_node(e, p);
    return push_frame(e, p);
}

static ckpt_status emit(emitter *e, const ckpt_pkl *root)
{
    ckpt_status status = enter(e, root);
    while (status == CKPT_OK && e->n) {
        frame *top = &e->stack[e->n - 1];
        const ckpt_pkl *p = top->node;
        if (p->kind == CKPT_PKL_OBJECT && !object_step(e, p, top->step)) {
            e->n--;
        } else if (top->step == n_children(p)) {
            close_node(e, p);
            e->n--;
        } else {
            status = enter(e, child_at(p, top->step++));
        }
    }
    return status;
}

ckpt_status ckpt_pkl_put_node(ckpt_buf *b, const ckpt_pkl *p, uint32_t n_nodes, ckpt_err *err)
{
    emitter e = {.b = b, .n_nodes = n_nodes, .err = err};
    e.refs = calloc(n_nodes ? n_nodes : 1, sizeof *e.refs);
    e.memo = calloc(n_nodes ? n_nodes : 1, sizeof *e.memo);
    ckpt_status status;
    if (!e.refs || !e.memo)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %u pickle nodes", n_nodes);
    else if (p->kind == CKPT_PKL_TAKEN || p->id >= n_nodes)
        status = ckpt_fail(err, CKPT_E_INTERNAL, "pickle node %u of %u", p->id, n_nodes);
    else
        status = count_refs(&e, p);
    if (status == CKPT_OK)
        status = emit(&e, p);
    free(e.stack);
    free(e.refs);
    free(e.memo);
    return status;
}
