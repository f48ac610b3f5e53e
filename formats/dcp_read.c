/* Reading a DCP directory: files, tables, common state and iteration. .metadata (dcp_meta.c) says
 * which bytes of which .distcp file belong to which chunk; dcp_items.c opens them.
 *
 * Source: torch-formats.md sections 1 and 2, megatron-dist-ckpt.md sections 1 and 2. */
#include "dcp.h"

#include "checked.h"
#include "dcp_internal.h"
#include "io.h"
#include "torch_save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define METADATA_LIMIT ((uint64_t)1 << 33) /* bytes of .metadata */
#define JSON_LIMIT ((uint64_t)64 << 20)

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

typedef ckpt_dcp_opener opener;

/* ---- tables -------------------------------------------------------------------------------- */

static ckpt_status check_entry(opener *o, const ckpt_dcp_entry *e)
{
    const ckpt_file *f = &o->src->files[o->file_of_path[e->path]];
    if (e->transforms)
        return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "%s: '%.300s' is stored with transforms: %s",
                         f->name, e->fqn, e->transforms);
    if (e->at > f->size || e->length > f->size - e->at)
        return ckpt_fail(o->err, CKPT_E_FORMAT,
                         "%s: '%.300s': offset %llu + length %llu past end %llu", f->name, e->fqn,
                         (unsigned long long)e->at, (unsigned long long)e->length,
                         (unsigned long long)f->size);
    return CKPT_OK;
}

static void add_job(opener *o, uint32_t entry, uint32_t owner, uint32_t piece)
{
    const ckpt_dcp_entry *e = &o->meta.entries[entry];
    o->jobs[o->n_jobs++] = (ckpt_dcp_job){.at = e->at,
                                          .file = o->file_of_path[e->path],
                                          .entry = entry,
                                          .owner = owner,
                                          .piece = piece};
}

static bool has_elements(int rank, const int64_t *len)
{
    for (int i = 0; i < rank; i++)
        if (len[i] == 0)
            return false;
    return true;
}

/* Chunks without elements are opened only where the tensor has nothing else, to learn its dtype. */
static bool piece_matters(const ckpt_dcp_tensor *t, const ckpt_dcp_piece *piece)
{
    return piece->entry != CKPT_DCP_NO_ENTRY &&
           (has_elements(t->rank, piece->len) || !has_elements(t->rank, t->dims));
}

static ckpt_status fill_tensor(opener *o, size_t i)
{
    ckpt_dcp_tensor *meta = &o->meta.tensors[i];
    ckpt_tensor *t = &o->src->tensors[i];
    *t = (ckpt_tensor){
        .name = meta->name, .dims = meta->dims, .dtype = meta->dtype, .rank = meta->rank};
    if (!meta->has_dtype)
        t->dtype = CKPT_F32; /* torch's default for an absent field; an item overrides it */
    size_t n = 0;
    for (size_t k = 0; k < meta->n_pieces; k++)
        n += piece_matters(meta, &meta->pieces[k]);
    if (meta->flat) {
        t->dims = meta->flat;
        t->rank = meta->flat_rank;
        if (!ckpt_mul_size(n, CKPT_FLAT_BOXES(t->rank), &n))
            return no_memory(o->err);
    }
    t->chunks = ckpt_arena_array(&o->src->arena, n + 1, sizeof *t->chunks);
    if (!t->chunks)
        return no_memory(o->err);
    for (size_t k = 0; k < meta->n_pieces; k++)
        if (piece_matters(meta, &meta->pieces[k]))
            add_job(o, meta->pieces[k].entry, (uint32_t)i, (uint32_t)k);
    return CKPT_OK;
}

static ckpt_status fill_tables(opener *o)
{
    ckpt_source *src = o->src;
    ckpt_dcp_meta *m = &o->meta;
    ckpt_status status = CKPT_OK;
    size_t unused = 0, n_jobs = m->n_objects;
    const char *first = NULL;
    for (size_t i = 0; i < m->n_entries; i++) {
        if (m->entries[i].used)
            CKPT_CHECK(check_entry(o, &m->entries[i]));
        else if (unused++ == 0)
            first = m->entries[i].fqn;
    }
    if (unused)
        CKPT_CHECK(ckpt_source_warn(src, o->err,
                                    "%zu storage entries belong to nothing in .metadata, "
                                    "first '%.300s'",
                                    unused, first));
    if (m->n_shapes_found)
        CKPT_CHECK(ckpt_source_warn(src, o->err,
                                    "%zu flattened optimizer tensors without mcore_data: their "
                                    "shapes are taken from their parameters",
                                    m->n_shapes_found));
    for (size_t i = 0; i < m->n_tensors; i++)
        n_jobs += m->tensors[i].n_pieces;
    o->jobs = calloc(n_jobs + 1, sizeof *o->jobs);
    o->endian_known = calloc(m->n_tensors + 1, sizeof *o->endian_known);
    src->tensors = ckpt_arena_array(&src->arena, m->n_tensors + 1, sizeof *src->tensors);
    src->objects = ckpt_arena_array(&src->arena, m->n_objects + 2, sizeof *src->objects);
    if (!o->jobs || !o->endian_known || !src->tensors || !src->objects)
        return no_memory(o->err);
    for (size_t i = 0; i < m->n_tensors; i++)
        CKPT_CHECK(fill_tensor(o, i));
    for (size_t i = 0; i < m->n_objects; i++) {
        const ckpt_dcp_entry *e = &m->entries[m->objects[i].entry];
        src->objects[i] = (ckpt_object){.name = m->objects[i].name,
                                        .offset = e->at,
                                        .length = e->length,
                                        .file = o->file_of_path[e->path]};
        add_job(o, m->objects[i].entry, (uint32_t)i, CKPT_DCP_OBJECT);
    }
    src->prefix = m->prefix;
    src->n_tensors = m->n_tensors;
    src->n_objects = m->n_objects;
done:
    return status;
}

/* ---- files --------------------------------------------------------------------------------- */

static int compare_text(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

typedef struct path_order {
    const char *path;
    uint32_t index;
} path_order;

static ckpt_status missing_data(opener *o, const char *name)
{
    size_t present = 0;
    for (size_t i = 0; i < o->meta.n_paths; i++) {
        const char *path = ckpt_path_join(&o->src->arena, o->src->root, o->meta.paths[i]);
        present += path && ckpt_exists(path);
    }
    return ckpt_fail(o->err, CKPT_E_FORMAT,
                     "data file '%s' is missing: .metadata names %zu data files, %zu are here "
                     "(were all ranks' files copied?)",
                     name, o->meta.n_paths, present);
}

static ckpt_status add_data_files(opener *o)
{
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    ckpt_status status = CKPT_OK;
    size_t n = o->meta.n_paths;
    path_order *order = calloc(n + 1, sizeof *order);
    o->file_of_path = calloc(n + 1, sizeof *o->file_of_path);
    if (!order || !o->file_of_path) {
        status = no_memory(err);
        goto done;
    }
    for (size_t i = 0; i < n; i++)
        order[i] = (path_order){o->meta.paths[i], (uint32_t)i};
    if (n)
        qsort(order, n, sizeof *order, compare_text);
    for (size_t i = 0; i < n; i++) {
        const char *path = ckpt_path_join(&src->arena, src->root, order[i].path);
        if (!path) {
            status = no_memory(err);
            goto done;
        }
        if (!ckpt_exists(path)) {
            status = missing_data(o, order[i].path);
            goto done;
        }
        CKPT_CHECK(ckpt_source_add_file(src, order[i].path, path, true,
                                        &o->file_of_path[order[i].index], err));
    }
done:
    free(order);
    return status;
}

/* Both lists are sorted, so the search mostly ends where it starts: behind the last one found. */
static bool is_path(const opener *o, const char *name, size_t *next)
{
    size_t n = o->src->n_files;
    for (size_t i = 0; i < n; i++) {
        size_t at = (*next + i) % n;
        if (strcmp(o->src->files[at].name, name) == 0) {
            *next = at + 1;
            return true;
        }
    }
    return false;
}

static bool has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), k = strlen(suffix);
    return n >= k && strcmp(s + n - k, suffix) == 0;
}

/* Data files that .metadata does not name: left over from an earlier save into the same place.
 * Empty ones are ordinary (a writer bucket that got nothing). */
static ckpt_status add_stale_files(opener *o)
{
    ckpt_source *src = o->src;
    char **names;
    size_t n, stale = 0, next = 0;
    const char *first = NULL;
    ckpt_status status = ckpt_list_dir(src->root, &src->arena, &names, &n, o->err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        if (!has_suffix(names[i], ".distcp") || is_path(o, names[i], &next))
            continue;
        const char *path = ckpt_path_join(&src->arena, src->root, names[i]);
        uint32_t index;
        if (!path)
            return no_memory(o->err);
        status = ckpt_source_add_file(src, names[i], path, false, &index, o->err);
        if (status == CKPT_OK && src->files[index].size > 0 && stale++ == 0)
            first = names[i];
    }
    if (status == CKPT_OK && stale)
        status = ckpt_source_warn(src, o->err,
                                  "%zu stale data file%s not named by .metadata, first '%s'", stale,
                                  stale == 1 ? "" : "s", first);
    return status;
}

/* List a file of the directory if it is there. */
ckpt_status ckpt_dcp_add_if_present(ckpt_source *src, const char *name, bool open_it, bool *present,
                                    uint32_t *index, ckpt_err *err)
{
    const char *path = ckpt_path_join(&src->arena, src->root, name);
    if (!path)
        return no_memory(err);
    *present = ckpt_exists(path);
    if (!*present)
        return CKPT_OK;
    ckpt_status status = ckpt_source_add_file(src, name, path, open_it, index, err);
    if (status == CKPT_OK)
        src->files[*index].is_data = false;
    return status;
}

static ckpt_status read_json(ckpt_source *src, const char *name, ckpt_json **out, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status;
    const char *path = ckpt_path_join(&src->arena, src->root, name);
    if (!path)
        return no_memory(err);
    CKPT_TRY(ckpt_read_file(path, JSON_LIMIT, &text, err), "%s", name);
    CKPT_TRY(ckpt_json_parse(text.data ? (const char *)text.data : "", text.len, out, err), "%s",
             name);
done:
    ckpt_buf_release(&text);
    return status;
}

/* Version 1 is the only one there is. */
ckpt_status ckpt_dcp_check_backend(ckpt_source *src, const char *want, ckpt_err *err)
{
    ckpt_json *json = NULL;
    ckpt_status status = read_json(src, "metadata.json", &json, err);
    if (status != CKPT_OK)
        return status;
    const char *backend = ckpt_json_string(ckpt_json_get(json, "sharded_backend"));
    const ckpt_json *version = ckpt_json_get(json, "sharded_backend_version");
    int64_t v = 1;
    if (!backend)
        status = ckpt_fail(err, CKPT_E_FORMAT, "metadata.json: no sharded_backend");
    else if (strcmp(backend, want) != 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "metadata.json: sharded_backend '%s', expected '%s'", backend, want);
    else if (version && (!ckpt_json_int(version, &v) || v != 1))
        status =
            ckpt_fail(err, CKPT_E_UNSUPPORTED, "metadata.json: sharded_backend_version is not 1");
    ckpt_json_free(json);
    return status;
}

/* ---- common state -------------------------------------------------------------------------- */

/* Decode the common state in files[file] and keep its JSON form. */
ckpt_status ckpt_dcp_read_common(ckpt_source *src, uint32_t file, uint64_t at, uint64_t length,
                                 ckpt_err *err)
{
    ckpt_arena scratch = {0};
    ckpt_pt pt;
    ckpt_status status;
    ckpt_pkl *const *pairs;
    size_t n;
    CKPT_CHECK(ckpt_pt_open(src, file, at, length, &scratch, &pt, err));
    const ckpt_pkl *root = pt.root;
    if (root->kind == CKPT_PKL_LIST && root->n_items == 1)
        root = root->items[0];
    if (!ckpt_pkl_pairs(root, &pairs, &n)) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "common state is not a dict");
        goto done;
    }
    src->common = ckpt_pkl_to_json(root);
    if (!src->common) {
        status = no_memory(err);
        goto done;
    }
    const ckpt_json *args = ckpt_json_get(src->common, "args");
    if (ckpt_json_is_object(args)) {
        src->config = ckpt_json_dup(args);
        if (!src->config)
            status = no_memory(err);
    }
done:
    ckpt_arena_free(&scratch);
    return status;
}

/* Iteration recorded in the common state, or -2. */
static int64_t common_iteration(const ckpt_source *src)
{
    int64_t v;
    if (ckpt_json_int(ckpt_json_get(src->common, "iteration"), &v) && v >= 0)
        return v;
    if (ckpt_json_int(ckpt_json_get(src->common, "total_iters"), &v) && v >= 0)
        return v;
    return src->iteration >= 0 ? src->iteration : -2;
}

static void iteration_text(char *text, size_t size, int64_t v)
{
    if (v >= 0)
        snprintf(text, size, "%lld", (long long)v);
    else
        snprintf(text, size, "%s", v == -1 ? "release" : "none");
}

/* A release is iteration 0 by definition, whatever its common state says. */
ckpt_status ckpt_dcp_settle_iteration(ckpt_source *src, const ckpt_dcp_place *place,
                                      int64_t requested, ckpt_err *err)
{
    int64_t known[3] = {place->from_tracker, place->from_dir, common_iteration(src)};
    char text[3][32];
    bool same = true;
    for (int i = 0; i < 3; i++) {
        iteration_text(text[i], sizeof text[i], known[i]);
        for (int k = 0; k < i; k++)
            same = same && (known[i] < 0 || known[k] < 0 || known[i] == known[k]);
    }
    if (!same && place->from_dir != -1)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "iteration disagrees: %s says %s, directory name says %s, common state "
                         "says %s",
                         CKPT_DCP_TRACKER, text[0], text[1], text[2]);
    src->iteration = place->from_dir == -1 ? -1 : place->from_dir >= 0 ? place->from_dir : known[2];
    if (src->iteration < -1)
        src->iteration = -1;
    if (requested >= 0 && src->iteration != requested)
        return ckpt_fail(err, CKPT_E_USAGE, "is iteration %s, not the requested %lld", text[2],
                         (long long)requested);
    return CKPT_OK;
}

static ckpt_status open_common(ckpt_source *src, bool has_file, uint32_t file, bool *found,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *found = has_file;
    if (has_file) {
        CKPT_TRY(ckpt_dcp_read_common(src, file, 0, src->files[file].size, err),
                 CKPT_DCP_COMMON_FILE);
        goto done;
    }
    for (size_t i = 0; i < src->n_objects && !*found; i++) {
        const ckpt_object *o = &src->objects[i];
        if (strcmp(o->name, CKPT_DCP_COMMON_OBJECT) != 0)
            continue;
        *found = true;
        CKPT_TRY(ckpt_dcp_read_common(src, o->file, o->offset, o->length, err), "object '%s'",
                 o->name);
    }
done:
    return status;
}

/* Megatron's torch_dcp and fsdp_dtensor have no common state: its members are objects of their own.
 * The value of one, or NULL if there is none that can be decoded. */
static ckpt_json *member(ckpt_source *src, const char *name)
{
    ckpt_arena scratch = {0};
    ckpt_json *json = NULL;
    ckpt_err err;
    ckpt_pt pt;
    for (size_t i = 0; i < src->n_objects && !json; i++) {
        const ckpt_object *o = &src->objects[i];
        if (strcmp(o->name, name) == 0 && !o->unknown_global &&
            ckpt_pt_open(src, o->file, o->offset, o->length, &scratch, &pt, &err) == CKPT_OK)
            json = ckpt_pkl_to_json(pt.root);
    }
    ckpt_arena_free(&scratch);
    return json;
}

static void open_members(ckpt_source *src)
{
    ckpt_json *args = member(src, "args"), *iteration = member(src, "iteration");
    int64_t v;
    if (ckpt_json_is_object(args) && ckpt_json_get(args, "num_layers")) {
        src->config = args;
        src->config_kind = CKPT_CONFIG_MEGATRON;
        args = NULL;
        if (ckpt_json_int(iteration, &v) && v >= 0)
            src->iteration = v;
    }
    ckpt_json_free(args);
    ckpt_json_free(iteration);
}

/* config.json beside a plain DCP, as this program writes it. */
static ckpt_status open_plain_config(ckpt_source *src, ckpt_err *err)
{
    bool present;
    uint32_t index;
    ckpt_status status = ckpt_dcp_add_if_present(src, "config.json", false, &present, &index, err);
    if (status != CKPT_OK || !present)
        return status;
    status = read_json(src, "config.json", &src->config, err);
    if (status == CKPT_OK)
        src->config_kind = CKPT_CONFIG_HF;
    return status;
}

/* ---- open ---------------------------------------------------------------------------------- */

static ckpt_status open_metadata(opener *o)
{
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    ckpt_buf bytes = {0};
    bool present;
    uint32_t index;
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(ckpt_dcp_add_if_present(src, ".metadata", false, &present, &index, err));
    if (!present) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no .metadata: the save did not complete");
        goto done;
    }
    CKPT_TRY(ckpt_read_file(src->files[index].path, METADATA_LIMIT, &bytes, err), ".metadata");
    CKPT_TRY(ckpt_dcp_meta_parse(bytes.data, bytes.len, &src->arena, &o->meta, err), ".metadata");
    src->metadata = o->meta.policy;
done:
    ckpt_buf_release(&bytes);
    return status;
}

/* A loader would unpickle .metadata as a whole: a foreign class in it counts like one in an object. */
static ckpt_status flag_metadata(opener *o)
{
    ckpt_source *src = o->src;
    if (!o->meta.unknown_global)
        return CKPT_OK;
    for (uint32_t f = 0; f < src->n_files; f++)
        if (strcmp(src->files[f].name, ".metadata") == 0)
            src->objects[src->n_objects++] = (ckpt_object){.name = ".metadata",
                                                           .file = f,
                                                           .length = src->files[f].size,
                                                           .unknown_global = o->meta.unknown_global,
                                                           .text = "(not shown)"};
    return CKPT_OK;
}

static ckpt_status open_place(opener *o, const ckpt_dcp_place *place, int64_t iteration)
{
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    bool is_megatron, has_common_file, has_common, present;
    uint32_t index, common_file = 0;
    ckpt_status status;
    CKPT_CHECK(ckpt_dcp_add_if_present(src, "metadata.json", false, &is_megatron, &index, err));
    if (is_megatron)
        CKPT_CHECK(ckpt_dcp_check_backend(src, "torch_dist", err));
    CKPT_CHECK(open_metadata(o));
    CKPT_CHECK(ckpt_dcp_add_if_present(src, CKPT_DCP_COMMON_FILE, true, &has_common_file,
                                       &common_file, err));
    CKPT_CHECK(ckpt_dcp_add_if_present(src, "integrity.json", false, &present, &index, err));
    CKPT_CHECK(add_data_files(o));
    CKPT_CHECK(add_stale_files(o));
    CKPT_CHECK(fill_tables(o));
    CKPT_CHECK(ckpt_dcp_open_items(o));
    CKPT_CHECK(flag_metadata(o));
    CKPT_CHECK(open_common(src, has_common_file, common_file, &has_common, err));
    if (has_common && !is_megatron && place->in_root) {
        status =
            ckpt_fail(err, CKPT_E_FORMAT, "incomplete: no metadata.json, which is written last");
        goto done;
    }
    if (has_common && !is_megatron)
        CKPT_CHECK(ckpt_source_warn(src, err, "no metadata.json: Megatron will not load this"));
    if (has_common || is_megatron)
        src->config_kind = CKPT_CONFIG_MEGATRON;
    else
        open_members(src);
    if (src->config_kind == CKPT_CONFIG_NONE)
        CKPT_CHECK(open_plain_config(src, err));
    CKPT_CHECK(ckpt_dcp_settle_iteration(src, place, iteration, err));
done:
    return status;
}

ckpt_status ckpt_dcp_open(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    int64_t iteration = opts ? opts->iteration : -1;
    opener o = {.src = src, .err = err};
    ckpt_dcp_place place;
    ckpt_status status = ckpt_dcp_locate(&src->arena, src->path, iteration, &place, err);
    if (status != CKPT_OK)
        return status;
    src->root = place.dir;
    status = open_place(&o, &place, iteration);
    if (status != CKPT_OK && place.in_root)
        ckpt_err_frame(err, "%s", ckpt_basename(place.dir));
    free(o.file_of_path);
    free(o.jobs);
    free(o.endian_known);
    ckpt_st_table_release(&o.blob);
    return status;
}
