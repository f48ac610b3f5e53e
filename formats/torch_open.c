/* The container "torch": files written by torch.save, presented as named tensors: one file, or a
 * directory of pytorch_model*.bin. With pytorch_model.bin.index.json exactly the files it names are
 * read; else pytorch_model.bin; else every pytorch_model-*-of-*.bin. optimizer.bin is read as well.
 *
 * Names are the path to a tensor from the root object: dictionary keys, list indices and attribute
 * names joined by '.'. A tensor reachable by several paths is listed under each. A file that is one
 * bare tensor has the name "tensor". The rest of the object is kept as JSON for display. */
#include "torch_save.h"
#include "torch_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hf_files.h"
#include "io.h"
#include "pickle_internal.h"
#include "pickle_policy.h"

#define STEM "pytorch_model"
#define SUFFIX ".bin"
#define SINGLE_NAME STEM SUFFIX
#define INDEX_NAME SINGLE_NAME ".index.json"
#define INDEX_MAX ((uint64_t)1 << 30)
#define CONFIG_MAX ((uint64_t)64 << 20)
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
    uint32_t file; /* being read */
    ckpt_pt pt;
    level path[DEPTH_MAX];
    size_t depth;
    uint8_t *on_path; /* by node id */
    ckpt_buf name;
    ckpt_tensor *tensors;
    size_t n_tensors, cap_tensors;
    uint64_t visits, name_bytes;
    ckpt_object *objects;
    size_t n_objects, cap_objects;
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
    *chunk = (ckpt_chunk){
        .lo = lo, .len = t->dims, .stride = t->stride, .offset = t->offset, .file = o->file};
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

static ckpt_status keep_tables(opening *o)
{
    ckpt_source *src = o->src;
    if (o->n_tensors > 0) {
        src->tensors =
            ckpt_arena_memdup(&src->arena, o->tensors, o->n_tensors * sizeof *o->tensors);
        if (!src->tensors)
            return no_memory(o->err);
    }
    if (o->n_objects > 0) {
        src->objects =
            ckpt_arena_memdup(&src->arena, o->objects, o->n_objects * sizeof *o->objects);
        if (!src->objects)
            return no_memory(o->err);
    }
    src->n_tensors = o->n_tensors;
    src->n_objects = o->n_objects;
    return CKPT_OK;
}

/* An unknown global does not stop inspection; as an object it lets others refuse the file. */
static ckpt_status flag_unknown(opening *o, bool alone)
{
    ckpt_arena *arena = &o->src->arena;
    const char *global = ckpt_pkl_unknown_global(o->pt.root, o->pt.n_nodes, arena, o->err);
    if (!global)
        return CKPT_OK;
    ckpt_status status = ckpt_grow((void **)&o->objects, &o->cap_objects, o->n_objects + 1,
                                   sizeof *o->objects, o->err);
    const char *name =
        alone ? "data.pkl" : ckpt_arena_printf(arena, "%s/data.pkl", o->src->files[o->file].name);
    global = ckpt_arena_strdup(arena, global); /* the pickle goes away */
    if (status == CKPT_OK && (!name || !global))
        status = no_memory(o->err);
    if (status == CKPT_OK)
        o->objects[o->n_objects++] = (ckpt_object){.name = name,
                                                   .file = o->file,
                                                   .offset = o->pt.pickle_offset,
                                                   .length = o->pt.pickle_length,
                                                   .unknown_global = global};
    return status;
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

/* The tensors of one file; its name is relative to the root. alone: there is no other, and what else
 * it holds is shown. */
static ckpt_status read_file(opening *o, const char *name, const char *path, bool alone)
{
    ckpt_source *src = o->src;
    ckpt_arena scratch = {0}; /* of the pickle */
    ckpt_status status;
    CKPT_CHECK(ckpt_source_add_file(src, name, path, true, &o->file, o->err));
    src->files[o->file].is_data = true;
    CKPT_CHECK(ckpt_pt_open(src, o->file, 0, src->files[o->file].size, &scratch, &o->pt, o->err));
    o->on_path = calloc((size_t)o->pt.n_nodes + 1, 1);
    if (!o->on_path) {
        status = no_memory(o->err);
        goto done;
    }
    o->visits = 0;
    cut_name(o, 0);
    CKPT_CHECK(walk(o));
    CKPT_CHECK(ckpt_pkl_take_policy(o->pt.root, &src->metadata, o->err));
    CKPT_CHECK(flag_unknown(o, alone));
    if (alone)
        CKPT_CHECK(read_training_state(o));
done:
    if (status != CKPT_OK && !alone)
        ckpt_err_frame(o->err, "%s", path);
    free(o->on_path);
    o->on_path = NULL;
    ckpt_arena_free(&scratch);
    return status;
}

/* ---- directory -------------------------------------------------------------------------------- */

typedef struct listing {
    const char *dir;
    char **names; /* sorted */
    size_t n_names;
    const char **shards; /* to read, sorted */
    size_t n_shards;
    bool indexed;
    ckpt_json *index;
} listing;

static ckpt_status read_json(opening *o, const listing *l, const char *name, uint64_t limit,
                             ckpt_json **out)
{
    ckpt_buf text = {0};
    uint32_t file;
    ckpt_err *err = o->err;
    ckpt_status status;
    const char *path = ckpt_path_join(&o->src->arena, l->dir, name);
    if (!path)
        return no_memory(err);
    CKPT_CHECK(ckpt_read_file(path, limit, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, out, err), "%s", name);
    if (!ckpt_json_is_object(*out))
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: expected a JSON object", name);
    else
        status = ckpt_source_add_file(o->src, name, path, false, &file, err);
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status read_config(opening *o, const listing *l)
{
    bool hf = ckpt_hf_listed(l->names, l->n_names, "config.json");
    const char *name = hf ? "config.json" : CKPT_HF_MEGATRON_ARGS;
    if (!ckpt_hf_listed(l->names, l->n_names, name))
        return CKPT_OK;
    ckpt_json_free(o->src->config);
    o->src->config = NULL;
    o->src->config_kind = hf ? CKPT_CONFIG_HF : CKPT_CONFIG_MEGATRON;
    return read_json(o, l, name, CONFIG_MAX, &o->src->config);
}

static bool is_shard_name(const char *name)
{
    size_t n = strlen(name), stem = strlen(STEM), suffix = strlen(SUFFIX);
    return n > stem + suffix && strncmp(name, STEM "-", stem + 1) == 0 &&
           strcmp(name + n - suffix, SUFFIX) == 0;
}

static ckpt_status shards_of_index(opening *o, listing *l)
{
    ckpt_err *err = o->err;
    ckpt_status status;
    CKPT_CHECK(read_json(o, l, INDEX_NAME, INDEX_MAX, &l->index));
    const ckpt_json *map = ckpt_json_get(l->index, "weight_map");
    if (!ckpt_json_is_object(map))
        return ckpt_fail(err, CKPT_E_FORMAT, INDEX_NAME ": expected an object 'weight_map'");
    CKPT_TRY(ckpt_hf_index_shards(map, INDEX_NAME, l->names, l->n_names, &o->src->arena, &l->shards,
                                  &l->n_shards, err),
             INDEX_NAME);
done:
    return status;
}

static ckpt_status shards_of_names(opening *o, listing *l)
{
    ckpt_err *err = o->err;
    ckpt_status status = CKPT_OK;
    bool numbered;
    l->shards = ckpt_arena_array(&o->src->arena, l->n_names + 1, sizeof *l->shards);
    if (!l->shards)
        return no_memory(err);
    if (ckpt_hf_listed(l->names, l->n_names, SINGLE_NAME)) {
        l->shards[l->n_shards++] = SINGLE_NAME;
        return CKPT_OK;
    }
    for (size_t i = 0; i < l->n_names; i++)
        if (is_shard_name(l->names[i]))
            l->shards[l->n_shards++] = l->names[i];
    if (l->n_shards == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no " STEM "*" SUFFIX " file in the directory");
    CKPT_CHECK(ckpt_hf_numbering(l->shards, l->n_shards, STEM, SUFFIX, l->names, l->n_names,
                                 &numbered, err));
    if (numbered)
        status = ckpt_source_warn(o->src, err, "no index beside " STEM "-*-of-*" SUFFIX);
done:
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static const char *file_of(const opening *o, const ckpt_tensor *t)
{
    return o->src->files[t->chunks->file].name;
}

/* No name in two files. */
static ckpt_status check_distinct(opening *o)
{
    if (o->n_tensors > 0)
        qsort(o->tensors, o->n_tensors, sizeof *o->tensors, by_name);
    for (size_t i = 1; i < o->n_tensors; i++) {
        const ckpt_tensor *a = &o->tensors[i - 1], *b = &o->tensors[i];
        if (strcmp(a->name, b->name) == 0)
            return ckpt_fail(o->err, CKPT_E_FORMAT,
                             "tensor '%.160s' is stored twice, in '%.160s' and '%.160s'", b->name,
                             file_of(o, a), file_of(o, b));
    }
    return CKPT_OK;
}

/* The index and the files name the same tensors in the same places. */
static ckpt_status check_index(opening *o, const ckpt_json *map)
{
    bool *seen = calloc(o->n_tensors + 1, sizeof *seen); /* or not for the index to name */
    ckpt_status status = CKPT_OK;
    if (!seen)
        return no_memory(o->err);
    for (size_t i = 0; i < o->n_tensors; i++)
        seen[i] = strcmp(file_of(o, &o->tensors[i]), CKPT_PT_OPTIMIZER) == 0;
    for (const ckpt_json *c = ckpt_json_child(map); status == CKPT_OK && c; c = ckpt_json_next(c)) {
        ckpt_tensor key = {.name = ckpt_json_key(c)};
        const char *want = ckpt_json_string(c);
        const ckpt_tensor *t =
            o->n_tensors > 0 ? bsearch(&key, o->tensors, o->n_tensors, sizeof *o->tensors, by_name)
                             : NULL;
        if (!t)
            status = ckpt_fail(o->err, CKPT_E_FORMAT,
                               "ghost index entry: tensor '%.160s' is not in '%.160s' nor in any "
                               "other shard",
                               key.name, want);
        else if (strcmp(file_of(o, t), want) != 0)
            status =
                ckpt_fail(o->err, CKPT_E_FORMAT,
                          "ghost index entry: tensor '%.160s' is not in '%.160s' but in '%.160s'",
                          key.name, want, file_of(o, t));
        else
            seen[t - o->tensors] = true;
    }
    for (size_t i = 0; status == CKPT_OK && i < o->n_tensors; i++)
        if (!seen[i])
            status =
                ckpt_fail(o->err, CKPT_E_FORMAT, "tensor '%.160s' of '%.160s' is not in the index",
                          o->tensors[i].name, file_of(o, &o->tensors[i]));
    free(seen);
    if (status != CKPT_OK)
        ckpt_err_frame(o->err, INDEX_NAME);
    return status;
}

static ckpt_status warn_strays(opening *o, const listing *l)
{
    for (size_t i = 0, at = 0; i < l->n_names; i++) {
        if (!is_shard_name(l->names[i]) && strcmp(l->names[i], SINGLE_NAME) != 0)
            continue;
        while (at < l->n_shards && strcmp(l->shards[at], l->names[i]) < 0)
            at++;
        if (at < l->n_shards && strcmp(l->shards[at], l->names[i]) == 0)
            continue;
        ckpt_status status =
            ckpt_source_warn(o->src, o->err, "stray file '%.160s' was not read: %s", l->names[i],
                             l->index ? "the index does not name it" : "there is " SINGLE_NAME);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status open_dir(opening *o)
{
    listing l = {.dir = o->src->root};
    ckpt_status status;
    CKPT_CHECK(ckpt_list_dir(l.dir, &o->src->arena, &l.names, &l.n_names, o->err));
    if (ckpt_hf_listed(l.names, l.n_names, INDEX_NAME))
        CKPT_CHECK(shards_of_index(o, &l));
    else
        CKPT_CHECK(shards_of_names(o, &l));
    for (size_t i = 0; i < l.n_shards; i++) {
        const char *path = ckpt_path_join(&o->src->arena, l.dir, l.shards[i]);
        if (!path) {
            status = no_memory(o->err);
            goto done;
        }
        CKPT_CHECK(read_file(o, l.shards[i], path, l.n_shards == 1));
    }
    if (ckpt_hf_listed(l.names, l.n_names, CKPT_PT_OPTIMIZER)) {
        const char *path = ckpt_path_join(&o->src->arena, l.dir, CKPT_PT_OPTIMIZER);
        status = path ? read_file(o, CKPT_PT_OPTIMIZER, path, false) : no_memory(o->err);
        if (status != CKPT_OK)
            goto done;
    }
    CKPT_CHECK(check_distinct(o));
    if (l.index)
        CKPT_CHECK(check_index(o, ckpt_json_get(l.index, "weight_map")));
    CKPT_CHECK(warn_strays(o, &l));
    CKPT_CHECK(read_config(o, &l));
done:
    ckpt_json_free(l.index);
    return status;
}

static bool is_index(const char *path)
{
    return strcmp(ckpt_basename(path), INDEX_NAME) == 0;
}

static ckpt_status open_torch(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    (void)opts;
    ckpt_status status;
    bool dir = src->is_dir;
    opening *o = calloc(1, sizeof *o);
    if (!o)
        return no_memory(err);
    o->src = src;
    o->err = err;
    src->root = dir ? src->path : directory_of(&src->arena, src->path);
    if (!src->root) {
        status = no_memory(err);
        goto done;
    }
    if (dir || is_index(src->path))
        CKPT_CHECK(open_dir(o));
    else
        CKPT_CHECK(read_file(o, ckpt_basename(src->path), src->path, true));
    CKPT_CHECK(keep_tables(o));
done:
    ckpt_buf_release(&o->name);
    free(o->tensors);
    free(o->objects);
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

/* Hugging Face repositories may hold the model in both forms: safetensors is the one to read. */
static int probe_dir(const ckpt_probe *probe)
{
    bool shards = false, whole = false, safe = false;
    for (size_t i = 0; i < probe->n_names; i++) {
        const char *name = probe->names[i];
        size_t n = strlen(name);
        shards |= is_shard_name(name);
        whole |= strcmp(name, INDEX_NAME) == 0 || strcmp(name, SINGLE_NAME) == 0;
        safe |= n > 12 && strcmp(name + n - 12, ".safetensors") == 0;
    }
    return safe ? 0 : whole ? 2 : shards;
}

static int score_of(const ckpt_probe *probe)
{
    static const char *const tar_members[] = {"sys_info", "pickle", "storages", "tensors"};
    if (probe->is_dir)
        return probe_dir(probe);
    if (is_index(probe->path))
        return 2;
    if (probe->head_len < 16)
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

static ckpt_status probe_torch(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    (void)err;
    *score = score_of(probe);
    return CKPT_OK;
}

const ckpt_container ckpt_torch_save = {
    .name = "torch",
    .what = "torch.save file (.pt, .pth, .bin), zip or legacy, or directory of pytorch_model*.bin",
    .probe = probe_torch,
    .open = open_torch,
    .layout = ckpt_torch_layout,
};
