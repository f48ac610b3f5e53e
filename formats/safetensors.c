/* safetensors container: one file, or a Hugging Face directory of shards.
 *
 * File:      u64 N || N bytes of JSON || data           (little-endian; torch-formats.md section 5)
 * Directory: with X.safetensors.index.json {"metadata":{"total_size":n},"weight_map":{name:file}}
 *            exactly the files it names; else model.safetensors; else every *.safetensors; else
 *            every sharded/\*.safetensors. Several files may hold pieces of one tensor only if
 *            their `__metadata__` carries DCP_SHARDING_INFO, as PyTorch's HuggingFaceStorageWriter
 *            writes it (section 2).
 *            Beside them optimizer.safetensors.index.json and the files it names hold optimizer
 *            state, which readers of weights do not see; only an opened directory includes it.
 * The grammar and the checks of one header are in st_header.c. */
#include "source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "hf_files.h"
#include "io.h"
#include "le.h"
#include "st_header.h"
#include "st_internal.h"
#include "st_scan.h"

#define SUFFIX ".safetensors"
#define INDEX_SUFFIX ".safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define SHARDED_DIR "sharded"
#define SHARDING_INFO CKPT_ST_SHARDING_INFO
#define INDEX_MAX ((uint64_t)1 << 30)
#define CONFIG_MAX ((uint64_t)64 << 20)
/* Metadata objects larger than this are kept only from the first file. */
#define MERGE_MAX 1024

/* State of one open. */
typedef struct opening {
    ckpt_source *src;
    ckpt_st_table table;
    char **names; /* directory listing, sorted */
    size_t n_names;
    const char *dir;    /* of the files, as opened */
    const char *prefix; /* of file names relative to src->root: "" or "sharded" */
    const char *index;  /* basename of the index, or NULL */
    ckpt_json *index_json;
    const char **shards; /* basenames to read, sorted */
    size_t n_shards;
    size_t first;   /* first table entry of the set of files being read */
    bool states;    /* a set with optimizer state follows the weights */
    bool in_states; /* it is being read */
} opening;

static bool has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n > m && strcmp(s + n - m, suffix) == 0;
}

static bool is_shard_name(const char *name)
{
    return name[0] != '.' && has_suffix(name, SUFFIX);
}

/* Shards of the set of files at hand: those of the optimizer's are told by their names. */
static bool is_set_name(const opening *o, const char *name)
{
    bool state = strncmp(name, CKPT_ST_OPTIMIZER_STEM, sizeof CKPT_ST_OPTIMIZER_STEM - 1) == 0;
    return is_shard_name(name) && (o->in_states ? state : !(o->states && state));
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory opening safetensors");
}

/* ---- probe ---------------------------------------------------------------------------------- */

static bool head_looks_right(const ckpt_probe *probe)
{
    if (probe->head_len < 10 || probe->size < 10)
        return false;
    uint64_t n = ckpt_get_u64(probe->head);
    size_t i = 8;
    while (i < probe->head_len && probe->head[i] != 0 && strchr(" \t\r\n", probe->head[i]) != NULL)
        i++;
    return n >= 2 && n <= CKPT_ST_HEADER_MAX && n <= probe->size - 8 && i < probe->head_len &&
           probe->head[i] == '{';
}

static ckpt_status dir_has_shards(const char *dir, bool *found, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_status status;
    ckpt_entry what;
    char **names;
    size_t n;
    *found = false;
    const char *path = ckpt_path_join(&arena, dir, SHARDED_DIR);
    if (path == NULL) {
        status = no_memory(err);
        goto done;
    }
    CKPT_CHECK(ckpt_look(path, &what, err));
    if (what != CKPT_ENTRY_DIR)
        goto done;
    CKPT_CHECK(ckpt_list_dir(path, &arena, &names, &n, err));
    for (size_t i = 0; i < n && !*found; i++)
        *found = is_shard_name(names[i]);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status probe_safetensors(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    if (!probe->is_dir) {
        bool certain = has_suffix(probe->path, INDEX_SUFFIX) || head_looks_right(probe);
        *score = certain ? 2 : has_suffix(probe->path, SUFFIX) ? 1 : 0;
        return CKPT_OK;
    }
    bool sharded = false;
    for (size_t i = 0; i < probe->n_names; i++) {
        const char *name = probe->names[i];
        if (has_suffix(name, INDEX_SUFFIX) || strcmp(name, SINGLE_NAME) == 0) {
            *score = 2;
            return CKPT_OK;
        }
        if (is_shard_name(name))
            *score = 1;
        sharded |= strcmp(name, SHARDED_DIR) == 0;
    }
    if (*score > 0 || !sharded)
        return CKPT_OK;
    ckpt_status status = dir_has_shards(probe->path, &sharded, err);
    *score = sharded;
    return status;
}

/* ---- one file ------------------------------------------------------------------------------- */

/* Keep keys that the source does not have yet. Takes `metadata`. */
static ckpt_status merge_metadata(ckpt_source *src, ckpt_json *metadata, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (src->metadata == NULL) {
        src->metadata = metadata;
        return CKPT_OK;
    }
    bool small = ckpt_json_size(metadata) + ckpt_json_size(src->metadata) <= MERGE_MAX;
    const ckpt_json *item = small ? ckpt_json_child(metadata) : NULL;
    for (; item != NULL; item = ckpt_json_next(item)) {
        const char *key = ckpt_json_key(item), *value = ckpt_json_string(item);
        if (value == NULL || ckpt_json_get(src->metadata, key) != NULL)
            continue;
        ckpt_json *copy = ckpt_json_new_string(value);
        if (copy == NULL || !ckpt_json_set(src->metadata, key, copy)) {
            status = no_memory(err);
            break;
        }
    }
    ckpt_json_free(metadata);
    return status;
}

static ckpt_status read_file(opening *o, const char *name, ckpt_err *err)
{
    ckpt_source *src = o->src;
    uint32_t file;
    ckpt_json *metadata = NULL;
    ckpt_status status = CKPT_OK;
    const char *shown = ckpt_path_join(&src->arena, o->prefix, name);
    const char *path = ckpt_path_join(&src->arena, o->dir, name);
    if (shown == NULL || path == NULL)
        return no_memory(err);
    CKPT_CHECK(ckpt_source_add_file(src, shown, path, true, &file, err));
    src->files[file].is_data = true;
    CKPT_TRY(ckpt_st_blob_read(src, file, 0, &o->table, &metadata, err), "%s", path);
    if (metadata != NULL) {
        ckpt_json *taken = metadata;
        metadata = NULL;
        CKPT_CHECK(merge_metadata(src, taken, err));
    }
done:
    ckpt_json_free(metadata);
    return status;
}

/* ---- which files ---------------------------------------------------------------------------- */

static ckpt_status add_listed(opening *o, const char *name, ckpt_err *err)
{
    uint32_t file;
    const char *path = ckpt_path_join(&o->src->arena, o->dir, name);
    return path == NULL ? no_memory(err)
                        : ckpt_source_add_file(o->src, name, path, false, &file, err);
}

static ckpt_status read_json(opening *o, const char *name, uint64_t limit, ckpt_json **out,
                             ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status;
    const char *path = ckpt_path_join(&o->src->arena, o->dir, name);
    if (path == NULL)
        return no_memory(err);
    CKPT_CHECK(ckpt_read_file(path, limit, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, out, err), "%s", name);
    if (!ckpt_json_is_object(*out))
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: expected a JSON object", name);
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status read_config(opening *o, ckpt_err *err)
{
    ckpt_source *src = o->src;
    bool hf = ckpt_hf_listed(o->names, o->n_names, "config.json");
    const char *name = hf ? "config.json" : CKPT_HF_MEGATRON_ARGS;
    if (!ckpt_hf_listed(o->names, o->n_names, name))
        return CKPT_OK;
    ckpt_status status = read_json(o, name, CONFIG_MAX, &src->config, err);
    if (status != CKPT_OK)
        return status;
    src->config_kind = hf ? CKPT_CONFIG_HF : CKPT_CONFIG_MEGATRON;
    return add_listed(o, name, err);
}

/* The index and the shard headers must name the same tensors in the same files. */
static ckpt_status check_index(opening *o, const ckpt_json *map, ckpt_err *err)
{
    ckpt_st_table *table = &o->table;
    for (const ckpt_json *item = ckpt_json_child(map); item != NULL; item = ckpt_json_next(item)) {
        const char *name = ckpt_json_key(item), *file = ckpt_json_string(item);
        uint32_t at = ckpt_st_table_find(table, name);
        if (at == CKPT_ST_NONE)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "ghost index entry: tensor '%.160s' is not in '%.160s' nor in any "
                             "other shard",
                             name, file);
        ckpt_st_entry *e = &table->entries[at];
        const char *found = ckpt_basename(o->src->files[e->file].name);
        if (strcmp(found, file) != 0)
            return ckpt_fail(
                err, CKPT_E_FORMAT,
                "ghost index entry: tensor '%.160s' is not in '%.160s' but in '%.160s'", name, file,
                found);
        e->indexed = true;
    }
    for (size_t i = o->first; i < table->n; i++)
        if (!table->entries[i].indexed)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%.160s' of '%.160s' is not in the index",
                             table->entries[i].name, o->src->files[table->entries[i].file].name);
    return CKPT_OK;
}

/* total_size is advisory: writers disagree about tied and duplicated storage. */
static ckpt_status check_total(opening *o, ckpt_err *err)
{
    const ckpt_json *stated = ckpt_json_path(o->index_json, "metadata.total_size");
    double want;
    uint64_t sum = 0;
    if (!ckpt_json_double(stated, &want))
        return CKPT_OK;
    for (size_t i = o->first; i < o->table.n; i++)
        sum += o->table.entries[i].end - o->table.entries[i].begin;
    if (want == (double)sum)
        return CKPT_OK;
    return ckpt_source_warn(o->src, err,
                            "%s: total_size %.0f differs from the %" PRIu64 " bytes of its tensors",
                            o->index, want, sum);
}

static ckpt_status merge_index_metadata(opening *o, ckpt_err *err)
{
    const ckpt_json *from = ckpt_json_get(o->index_json, "metadata");
    ckpt_json *copy = ckpt_json_is_object(from) && ckpt_json_size(from) <= MERGE_MAX
                          ? ckpt_json_new_object()
                          : NULL;
    if (copy == NULL)
        return CKPT_OK;
    for (const ckpt_json *c = ckpt_json_child(from); c != NULL; c = ckpt_json_next(c)) {
        const char *value = ckpt_json_string(c);
        ckpt_json *item = value == NULL ? NULL : ckpt_json_new_string(value);
        if (value != NULL && (item == NULL || !ckpt_json_set(copy, ckpt_json_key(c), item))) {
            ckpt_json_free(copy);
            return no_memory(err);
        }
    }
    if (ckpt_json_size(copy) == 0) {
        ckpt_json_free(copy);
        return CKPT_OK;
    }
    return merge_metadata(o->src, copy, err);
}

static ckpt_status warn_strays(opening *o, const char *why, ckpt_err *err)
{
    size_t at = 0;
    for (size_t i = 0; i < o->n_names; i++) {
        if (!is_set_name(o, o->names[i]))
            continue;
        while (at < o->n_shards && strcmp(o->shards[at], o->names[i]) < 0)
            at++;
        if (at < o->n_shards && strcmp(o->shards[at], o->names[i]) == 0)
            continue;
        ckpt_status status =
            ckpt_source_warn(o->src, err, "stray file '%.160s' was not read: %s", o->names[i], why);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status read_shards(opening *o, ckpt_err *err)
{
    for (size_t i = 0; i < o->n_shards; i++) {
        ckpt_status status = read_file(o, o->shards[i], err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status open_indexed(opening *o, ckpt_err *err)
{
    ckpt_status status = read_json(o, o->index, INDEX_MAX, &o->index_json, err);
    if (status != CKPT_OK)
        return status;
    const ckpt_json *map = ckpt_json_get(o->index_json, "weight_map");
    if (!ckpt_json_is_object(map))
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: expected an object 'weight_map'", o->index);
    CKPT_TRY(ckpt_hf_index_shards(map, o->index, o->names, o->n_names, &o->src->arena, &o->shards,
                                  &o->n_shards, err),
             "%s", o->index);
    CKPT_CHECK(read_shards(o, err));
    for (size_t i = 0; i < o->table.n; i++) {
        const ckpt_st_entry *e = &o->table.entries[i];
        if (e->next != CKPT_ST_NONE)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%.160s' is in both '%.160s' and '%.160s'",
                             e->name, o->src->files[o->table.entries[e->next].file].name,
                             o->src->files[e->file].name);
    }
    CKPT_TRY(check_index(o, map, err), "%s", o->index);
    CKPT_CHECK(check_total(o, err));
    CKPT_CHECK(merge_index_metadata(o, err));
    CKPT_CHECK(add_listed(o, o->index, err));
    CKPT_CHECK(warn_strays(o, "the index does not name it", err));
done:
    return status;
}

/* Every safetensors file of the listing. */
static ckpt_status list_shards(opening *o, ckpt_err *err)
{
    o->shards = ckpt_arena_array(&o->src->arena, o->n_names, sizeof *o->shards);
    o->n_shards = 0;
    if (o->shards == NULL)
        return no_memory(err);
    for (size_t i = 0; i < o->n_names; i++)
        if (is_set_name(o, o->names[i]))
            o->shards[o->n_shards++] = o->names[i];
    return CKPT_OK;
}

static ckpt_status choose_index(opening *o, ckpt_err *err)
{
    const char *standard = SINGLE_NAME ".index.json";
    if (o->index != NULL)
        return CKPT_OK;
    if (ckpt_hf_listed(o->names, o->n_names, standard)) {
        o->index = standard;
        return CKPT_OK;
    }
    for (size_t i = 0; i < o->n_names; i++) {
        if (o->names[i][0] == '.' || !has_suffix(o->names[i], INDEX_SUFFIX) ||
            (o->states && strcmp(o->names[i], CKPT_ST_OPTIMIZER_INDEX) == 0))
            continue;
        if (o->index != NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "several indexes, '%.160s' and '%.160s': name the one to open",
                             o->index, o->names[i]);
        o->index = o->names[i];
    }
    return CKPT_OK;
}

static ckpt_status check_numbering(opening *o, const char *stem, ckpt_err *err)
{
    bool numbered;
    ckpt_status status = ckpt_hf_numbering(o->shards, o->n_shards, stem, SUFFIX, o->names,
                                           o->n_names, &numbered, err);
    return status == CKPT_OK && numbered
               ? ckpt_source_warn(o->src, err, "no index beside %s-*-of-*" SUFFIX, stem)
               : status;
}

static ckpt_status open_states(opening *o, ckpt_err *err)
{
    ckpt_json_free(o->index_json);
    o->index_json = NULL;
    o->index = CKPT_ST_OPTIMIZER_INDEX;
    o->first = o->table.n;
    o->in_states = true;
    return open_indexed(o, err);
}

static ckpt_status open_weights(opening *o, ckpt_err *err)
{
    ckpt_arena *arena = &o->src->arena;
    const char *single = SINGLE_NAME;
    ckpt_status status;
    if (o->index != NULL)
        return open_indexed(o, err);
    if (ckpt_hf_listed(o->names, o->n_names, single)) {
        o->shards = &single;
        o->n_shards = 1;
        CKPT_CHECK(read_shards(o, err));
        status = warn_strays(o, "the directory has " SINGLE_NAME " and no index", err);
        goto done;
    }
    CKPT_CHECK(list_shards(o, err));
    if (o->n_shards == 0 && ckpt_hf_listed(o->names, o->n_names, SHARDED_DIR)) {
        o->prefix = SHARDED_DIR;
        if ((o->dir = ckpt_path_join(arena, o->dir, SHARDED_DIR)) == NULL)
            return no_memory(err);
        CKPT_CHECK(ckpt_list_dir(o->dir, arena, &o->names, &o->n_names, err));
        CKPT_CHECK(list_shards(o, err));
    }
    if (o->n_shards == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no *" SUFFIX " file in the directory");
    CKPT_CHECK(check_numbering(o, "model", err));
    CKPT_CHECK(check_numbering(o, "optimizer", err));
    status = read_shards(o, err);
done:
    o->shards = NULL;
    return status;
}

static bool has_weights(const opening *o)
{
    const size_t n = sizeof CKPT_ST_OPTIMIZER_STEM - 1;
    for (size_t i = 0; i < o->n_names; i++)
        if (is_shard_name(o->names[i]) && strncmp(o->names[i], CKPT_ST_OPTIMIZER_STEM, n) != 0)
            return true;
    return false;
}

/* named: the user chose one index, and gets what it lists. */
static ckpt_status open_dir(opening *o, ckpt_err *err)
{
    bool named = o->index != NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_list_dir(o->dir, &o->src->arena, &o->names, &o->n_names, err));
    o->states = ckpt_hf_listed(o->names, o->n_names, CKPT_ST_OPTIMIZER_INDEX) && has_weights(o) &&
                (!named || strcmp(o->index, CKPT_ST_OPTIMIZER_INDEX) != 0);
    CKPT_CHECK(choose_index(o, err));
    CKPT_CHECK(read_config(o, err));
    CKPT_CHECK(open_weights(o, err));
    if (o->states && !named)
        CKPT_CHECK(open_states(o, err));
done:
    return status;
}

static const char *directory_of(ckpt_arena *arena, const char *path)
{
    const char *base = ckpt_basename(path);
    size_t n = (size_t)(base - path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    return n == 0 ? "." : ckpt_arena_strndup(arena, path, n);
}

/* A lone file. Its neighbours are looked at only if it has the name of a whole model. */
static ckpt_status open_file(opening *o, ckpt_err *err)
{
    const char *name = ckpt_basename(o->src->path);
    ckpt_status status = CKPT_OK;
    if (strcmp(name, SINGLE_NAME) == 0) {
        CKPT_CHECK(ckpt_list_dir(o->dir, &o->src->arena, &o->names, &o->n_names, err));
        CKPT_CHECK(read_config(o, err));
    }
    status = read_file(o, name, err);
done:
    return status;
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Pieces of one tensor agree, and their union is the tensor. */
static ckpt_status join_pieces(const opening *o, const ckpt_st_entry *head, ckpt_tensor *t,
                               ckpt_err *err)
{
    const ckpt_st_entry *entries = o->table.entries;
    int64_t *dims = ckpt_arena_array(&o->src->arena, head->rank, sizeof *dims);
    size_t n = 0;
    if (dims == NULL)
        return no_memory(err);
    for (const ckpt_st_entry *e = head;; e = &entries[e->next], n++) {
        const char *file = o->src->files[e->file].name;
        if (e->lo == NULL)
            return ckpt_fail(
                err, CKPT_E_FORMAT,
                "duplicate name: '%.160s' and '%.160s' both hold it, without " SHARDING_INFO,
                o->src->files[head->file].name,
                o->src->files[e == head ? entries[e->next].file : e->file].name);
        if (e->dtype != head->dtype || e->rank != head->rank)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "%.160s: piece has dtype %s rank %d, another has dtype %s rank %d",
                             file, ckpt_dtype_get((ckpt_dtype)e->dtype)->name, e->rank,
                             ckpt_dtype_get((ckpt_dtype)head->dtype)->name, head->rank);
        for (int i = 0; i < e->rank; i++) {
            int64_t end;
            if (!ckpt_add_i64(e->lo[i], e->dims[i], &end))
                return ckpt_fail(err, CKPT_E_FORMAT, "%.160s: saved_offsets overflow", file);
            dims[i] = ckpt_max_i64(dims[i], end);
        }
        if (e->next == CKPT_ST_NONE)
            break;
    }
    t->dims = dims;
    return CKPT_OK;
}

static ckpt_status build_tensor(const opening *o, const ckpt_st_entry *head, ckpt_tensor *t,
                                ckpt_chunk **next, ckpt_err *err)
{
    static const int64_t zeros[CKPT_MAX_RANK];
    ckpt_status status = CKPT_OK;
    t->name = head->name;
    t->dims = head->dims;
    t->rank = head->rank;
    t->dtype = (ckpt_dtype)head->dtype;
    t->chunks = *next;
    if (head->lo != NULL || head->next != CKPT_ST_NONE)
        CKPT_TRY(join_pieces(o, head, t, err), "tensor '%.160s'", t->name);
    for (const ckpt_st_entry *e = head;; e = &o->table.entries[e->next]) {
        *(*next)++ = (ckpt_chunk){.lo = e->lo == NULL ? zeros : e->lo,
                                  .len = e->dims,
                                  .offset = e->begin,
                                  .file = e->file};
        t->n_chunks++;
        if (e->next == CKPT_ST_NONE)
            break;
    }
done:
    return status;
}

static ckpt_status build_tensors(opening *o, ckpt_err *err)
{
    ckpt_source *src = o->src;
    const ckpt_st_table *table = &o->table;
    ckpt_chunk *chunks = ckpt_arena_array(&src->arena, table->n, sizeof *chunks);
    src->tensors = ckpt_arena_array(&src->arena, table->n_names, sizeof *src->tensors);
    if (chunks == NULL || src->tensors == NULL)
        return no_memory(err);
    for (size_t i = 0; i < table->n; i++) {
        if (table->entries[i].older)
            continue;
        ckpt_status status =
            build_tensor(o, &table->entries[i], &src->tensors[src->n_tensors], &chunks, err);
        if (status != CKPT_OK)
            return status;
        src->n_tensors++;
    }
    return CKPT_OK;
}

static ckpt_status open_safetensors(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    (void)opts;
    opening o = {.src = src, .prefix = ""};
    ckpt_status status;
    src->iteration = -1;
    if (src->is_dir) {
        src->root = o.dir = src->path;
        CKPT_CHECK(open_dir(&o, err));
    } else {
        src->root = o.dir = directory_of(&src->arena, src->path);
        if (src->root == NULL) {
            status = no_memory(err);
            goto done;
        }
        if (has_suffix(src->path, INDEX_SUFFIX)) {
            o.index = ckpt_basename(src->path);
            CKPT_CHECK(open_dir(&o, err));
        } else {
            CKPT_CHECK(open_file(&o, err));
        }
    }
    CKPT_CHECK(build_tensors(&o, err));
done:
    ckpt_json_free(o.index_json);
    ckpt_st_table_release(&o.table);
    return status;
}

const ckpt_container ckpt_safetensors = {
    .name = "safetensors",
    .what = "safetensors file, or Hugging Face directory of shards with an index",
    .probe = probe_safetensors,
    .open = open_safetensors,
    .layout = ckpt_safetensors_layout,
};
