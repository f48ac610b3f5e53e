/* The container "torch": one file written by torch.save, presented as named tensors.
 *
 * Names are the path to a tensor from the root object: dictionary keys, list indices and attribute
 * names joined by '.'. A tensor reachable by several paths is listed under each. A file that is one
 * bare tensor has the name "tensor". The rest of the object is kept as JSON for display. */
#include "torch_save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "pickle_internal.h"

#define DEPTH_MAX 256
#define NAME_MAX_LEN ((size_t)4000)   /* below the cut of ckpt_pkl_key_text */
#define NAMES_MAX ((uint64_t)1 << 28) /* bytes of all names together */
#define VISITS_FREE ((uint64_t)1 << 20)

/* A node whose children are being visited. */
typedef struct level {
    const ckpt_pkl *node;
    size_t next, prefix; /* next child; bytes of the name that lead here */
} level;

typedef struct opening {
    ckpt_source *src;
    ckpt_pt pt;
    level path[DEPTH_MAX];
    size_t depth;
    uint8_t *on_path; /* by node id */
    ckpt_buf name;
    ckpt_tensor *tensors;
    size_t n_tensors, cap_tensors;
    uint64_t visits, name_bytes;
    ckpt_err *err;
} opening;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static const char *name_text(const opening *o)
{
    return o->name.len ? (const char *)o->name.data : "tensor";
}

/* ---- children --------------------------------------------------------------------------------- */

/* Positional children of an OBJECT: args, kwargs, state, then items, then pairs. */
enum { PART_ARGS, PART_KWARGS, PART_STATE, PARTS };

static size_t n_children(const ckpt_pkl *p)
{
    if (p->kind == CKPT_PKL_DICT)
        return p->n_items / 2;
    if (p->kind == CKPT_PKL_OBJECT)
        return PARTS + p->n_items + p->n_pairs / 2;
    return p->n_items;
}

static void append_key(opening *o, const ckpt_pkl *key)
{
    if (o->name.len)
        ckpt_buf_putc(&o->name, '.');
    ckpt_pkl_key_text(key, &o->name);
}

static void append_index(opening *o, size_t i)
{
    ckpt_buf_printf(&o->name, "%s%zu", o->name.len ? "." : "", i);
}

/* Child i with its part of the name appended. State is the object's attributes, so it adds none. */
static const ckpt_pkl *object_child(opening *o, const ckpt_pkl *p, size_t i)
{
    ckpt_pkl *const parts[PARTS] = {p->args, p->kwargs, p->state};
    static const char *const names[PARTS] = {"args", "kwargs", ""};
    if (i < PARTS) {
        if (names[i][0] && parts[i] && parts[i]->n_items)
            ckpt_buf_printf(&o->name, "%s%s", o->name.len ? "." : "", names[i]);
        return parts[i];
    }
    i -= PARTS;
    if (i < p->n_items) {
        append_index(o, i);
        return p->items[i];
    }
    i -= p->n_items;
    append_key(o, p->pairs[2 * i]);
    return p->pairs[2 * i + 1];
}

static const ckpt_pkl *child_at(opening *o, const ckpt_pkl *p, size_t i)
{
    if (p->kind == CKPT_PKL_OBJECT)
        return object_child(o, p, i);
    if (p->kind == CKPT_PKL_DICT) {
        append_key(o, p->items[2 * i]);
        return p->items[2 * i + 1];
    }
    append_index(o, i);
    return p->items[i];
}

static bool has_children(const ckpt_pkl *p)
{
    return p->kind == CKPT_PKL_LIST || p->kind == CKPT_PKL_TUPLE || p->kind == CKPT_PKL_DICT ||
           p->kind == CKPT_PKL_SET || p->kind == CKPT_PKL_OBJECT;
}

/* Objects whose arguments are repeated in their pairs (pickle_parse.c, adopt_pairs). */
static bool args_are_pairs(const ckpt_pkl *p)
{
    return p->n_pairs && (ckpt_pkl_is_object(p, "collections", "OrderedDict") ||
                          ckpt_pkl_is_object(p, "collections", "Counter"));
}

/* ---- tensors ---------------------------------------------------------------------------------- */

static ckpt_status check_name(opening *o)
{
    const char *name = name_text(o);
    size_t n = strlen(name);
    if (o->name.failed)
        return no_memory(o->err);
    if (n > NAME_MAX_LEN)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "tensor name of %zu bytes, at most %zu", n,
                         NAME_MAX_LEN);
    if (o->name.len && n != o->name.len)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "tensor name '%s' goes on after a NUL", name);
    o->name_bytes += n;
    if (o->name_bytes > NAMES_MAX)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "tensor names of more than %llu bytes in all",
                         (unsigned long long)NAMES_MAX);
    return CKPT_OK;
}

static ckpt_status add_tensor(opening *o, const ckpt_pt_tensor *t)
{
    ckpt_arena *arena = &o->src->arena;
    ckpt_status status = check_name(o);
    if (status == CKPT_OK)
        status = ckpt_grow((void **)&o->tensors, &o->cap_tensors, o->n_tensors + 1,
                           sizeof *o->tensors, o->err);
    if (status != CKPT_OK)
        return status;
    ckpt_chunk *chunk = ckpt_arena_alloc(arena, sizeof *chunk);
    const char *name = ckpt_arena_strdup(arena, name_text(o));
    int64_t *lo = ckpt_arena_array(arena, (size_t)t->rank + 1, sizeof *lo);
    if (!chunk || !name || !lo)
        return no_memory(o->err);
    *chunk =
        (ckpt_chunk){.lo = lo, .len = t->dims, .stride = t->stride, .offset = t->offset, .file = 0};
    o->tensors[o->n_tensors++] = (ckpt_tensor){.name = name,
                                               .dims = t->dims,
                                               .chunks = chunk,
                                               .n_chunks = 1,
                                               .dtype = t->dtype,
                                               .rank = t->rank,
                                               .big_endian = t->big_endian};
    return CKPT_OK;
}

/* ---- walk ------------------------------------------------------------------------------------- */

static ckpt_status visit(opening *o, const ckpt_pkl *p)
{
    ckpt_pt_tensor t;
    bool is_tensor;
    const char *what;
    /* Shared containers are walked once per path; honest files share few. */
    if (++o->visits > VISITS_FREE + 8 * (uint64_t)o->pt.n_nodes)
        return ckpt_fail(o->err, CKPT_E_FORMAT,
                         "%u objects refer to each other in more than %llu ways", o->pt.n_nodes,
                         (unsigned long long)o->visits);
    if (!has_children(p) || o->on_path[p->id])
        return CKPT_OK;
    ckpt_status status =
        ckpt_pt_tensor_of(&o->pt, p, &o->src->arena, &t, &is_tensor, &what, o->err);
    if (status != CKPT_OK) {
        ckpt_err_frame(o->err, "tensor '%s'", name_text(o));
        return status;
    }
    if (what)
        return ckpt_source_warn(o->src, o->err, "'%s': %s tensor is not decoded", name_text(o),
                                what);
    if (is_tensor)
        return add_tensor(o, &t);
    if (o->depth == DEPTH_MAX)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "objects nested deeper than %d at '%.200s'",
                         DEPTH_MAX, name_text(o));
    o->on_path[p->id] = 1;
    o->path[o->depth++] =
        (level){p, p->kind == CKPT_PKL_OBJECT && args_are_pairs(p) ? PART_KWARGS : 0, o->name.len};
    return CKPT_OK;
}

static void cut_name(opening *o, size_t n)
{
    o->name.len = n;
    if (o->name.data)
        o->name.data[n] = 0;
}

static ckpt_status walk(opening *o)
{
    ckpt_status status = visit(o, o->pt.root);
    while (status == CKPT_OK && o->depth) {
        level *top = &o->path[o->depth - 1];
        cut_name(o, top->prefix);
        if (top->next == n_children(top->node)) {
            o->on_path[top->node->id] = 0;
            o->depth--;
            continue;
        }
        const ckpt_pkl *child = child_at(o, top->node, top->next++);
        if (child)
            status = visit(o, child);
    }
    return status;
}

/* ---- source ----------------------------------------------------------------------------------- */

static const char *directory_of(ckpt_arena *arena, const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return ckpt_arena_strdup(arena, ".");
    return ckpt_arena_strndup(arena, path, slash == path ? 1 : (size_t)(slash - path));
}

static ckpt_status keep_tensors(opening *o)
{
    if (o->n_tensors == 0)
        return CKPT_OK;
    o->src->tensors =
        ckpt_arena_memdup(&o->src->arena, o->tensors, o->n_tensors * sizeof *o->tensors);
    o->src->n_tensors = o->src->tensors ? o->n_tensors : 0;
    return o->src->tensors ? CKPT_OK : no_memory(o->err);
}

/* An unknown global does not stop inspection; as an object it lets others refuse the file. */
static ckpt_status flag_unknown(opening *o)
{
    ckpt_arena *arena = &o->src->arena;
    const char *global = ckpt_pkl_unknown_global(o->pt.root, o->pt.n_nodes, arena, o->err);
    if (!global)
        return CKPT_OK;
    ckpt_object *object = ckpt_arena_alloc(arena, sizeof *object);
    if (!object)
        return no_memory(o->err);
    *object = (ckpt_object){.name = "data.pkl",
                            .offset = o->pt.pickle_offset,
                            .length = o->pt.pickle_length,
                            .unknown_global = global};
    o->src->objects = object;
    o->src->n_objects = 1;
    return CKPT_OK;
}

/* Megatron's mp_rank files hold the training arguments and the iteration beside the weights. */
static ckpt_status read_training_state(opening *o)
{
    const ckpt_pkl *args = ckpt_pkl_get(o->pt.root, "args");
    int64_t iteration;
    if (ckpt_pkl_int(ckpt_pkl_get(o->pt.root, "iteration"), &iteration) && iteration >= 0)
        o->src->iteration = iteration;
    if (ckpt_pkl_is_object(args, "argparse", "Namespace")) {
        o->src->config = ckpt_pkl_to_json(args);
        o->src->config_kind = CKPT_CONFIG_MEGATRON;
        if (!o->src->config)
            return no_memory(o->err);
    }
    o->src->common = ckpt_pkl_to_json(o->pt.root);
    return o->src->common ? CKPT_OK : no_memory(o->err);
}

static ckpt_status open_torch(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    (void)opts;
    uint32_t file;
    ckpt_status status;
    opening *o = calloc(1, sizeof *o);
    if (!o)
        return no_memory(err);
    o->src = src;
    o->err = err;
    src->root = directory_of(&src->arena, src->path);
    if (!src->root) {
        status = no_memory(err);
        goto done;
    }
    CKPT_CHECK(ckpt_source_add_file(src, ckpt_basename(src->path), src->path, true, &file, err));
    src->files[file].is_data = true;
    CKPT_CHECK(ckpt_pt_open(src, file, 0, src->files[file].size, &src->arena, &o->pt, err));
    o->on_path = calloc((size_t)o->pt.n_nodes + 1, 1);
    if (!o->on_path) {
        status = no_memory(err);
        goto done;
    }
    CKPT_CHECK(walk(o));
    CKPT_CHECK(keep_tensors(o));
    CKPT_CHECK(flag_unknown(o));
    CKPT_CHECK(read_training_state(o));
done:
    ckpt_buf_release(&o->name);
    free(o->on_path);
    free(o->tensors);
    free(o);
    return status;
}

/* The first local header's name: a zip of another kind is only possibly ours. */
static bool first_name_is_pickle(const ckpt_probe *probe)
{
    static const char want[] = "/data.pkl";
    size_t len = sizeof want - 1;
    for (size_t i = 30; i + len <= probe->head_len; i++)
        if (memcmp(probe->head + i, want, len) == 0)
            return true;
    return false;
}

static int probe_torch(const ckpt_probe *probe)
{
    static const char *const tar_members[] = {"sys_info", "pickle", "storages", "tensors"};
    if (probe->is_dir || probe->head_len < 16)
        return 0;
    if (memcmp(probe->head, "PK\3\4", 4) == 0)
        return first_name_is_pickle(probe) ? 2 : 1;
    if (memcmp(probe->head, "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e", 15) ==
        0)
        return 2;
    for (size_t i = 0; i < sizeof tar_members / sizeof *tar_members; i++)
        if (memcmp(probe->head, tar_members[i], strlen(tar_members[i]) + 1) == 0)
            return 1;
    return 0;
}

const ckpt_container ckpt_torch_save = {
    .name = "torch",
    .what = "torch.save file (.pt, .pth, .bin), zip or legacy",
    .probe = probe_torch,
    .open = open_torch,
};
