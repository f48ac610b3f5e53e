/* Reading a DCP directory. .metadata (dcp_meta.c) says which bytes of which .distcp file belong to
 * which chunk; each item is a torch.save archive whose pickle says where in it the elements lie and
 * with which strides (a transposed view is stored as such). No element is read here.
 *
 * Items are visited in file order through a small read window, so that the many small items of a
 * checkpoint cost few system calls and large ones only their two ends. Source: torch-formats.md
 * sections 1 and 2, megatron-dist-ckpt.md sections 1 and 2. */
#include "dcp.h"

#include "checked.h"
#include "dcp_meta.h"
#include "io.h"
#include "le.h"
#include "torch_save.h"

#include <stdio.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define METADATA_LIMIT ((uint64_t)1 << 33) /* bytes of .metadata */
#define JSON_LIMIT ((uint64_t)64 << 20)
#define SMALL_ITEM 16384 /* bytes: read whole, with what follows */
#define TEXT_MAX 200     /* bytes of an object's one-line rendering */

/* ---- read window --------------------------------------------------------------------------- */

typedef struct span {
    uint64_t start;
    uint32_t file;
    size_t len;
    uint8_t bytes[65536];
} span;

/* Stands behind src->read_at while items are opened. */
typedef struct window {
    span front, tail;
    uint64_t base, length; /* of the item being opened */
} window;

static bool from_span(const span *s, uint32_t file, void *buf, size_t n, uint64_t offset)
{
    if (s->len == 0 || s->file != file || offset < s->start || offset - s->start > s->len ||
        n > s->len - (size_t)(offset - s->start))
        return false;
    memcpy(buf, s->bytes + (offset - s->start), n);
    return true;
}

static ckpt_status fill_span(ckpt_source *src, span *s, uint32_t file, uint64_t start, uint64_t len,
                             ckpt_err *err)
{
    s->len = 0;
    size_t n =
        (size_t)ckpt_min_u64(ckpt_min_u64(len, sizeof s->bytes), src->files[file].size - start);
    ckpt_status status = ckpt_pread_full(src->files[file].fd, s->bytes, n, start, err);
    if (status != CKPT_OK)
        return status;
    s->file = file;
    s->start = start;
    s->len = n;
    return CKPT_OK;
}

static ckpt_status window_read(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    window *w = src->self;
    if (from_span(&w->front, file, buf, n, offset) || from_span(&w->tail, file, buf, n, offset))
        return CKPT_OK;
    ckpt_status status = CKPT_OK;
    uint64_t end = w->base + w->length;
    if (offset < w->base || offset > end || n > 4096)
        return ckpt_pread_full(src->files[file].fd, buf, n, offset, err);
    if (w->length <= SMALL_ITEM)
        status = fill_span(src, &w->front, file, w->base, sizeof w->front.bytes, err);
    else if (end - offset <= 4096)
        status = fill_span(src, &w->tail, file, end - 4096, 4096, err);
    else if (offset - w->base < 4096)
        status = fill_span(src, &w->front, file, w->base, 4096, err);
    if (status != CKPT_OK)
        return status;
    if (from_span(&w->front, file, buf, n, offset) || from_span(&w->tail, file, buf, n, offset))
        return CKPT_OK;
    return ckpt_pread_full(src->files[file].fd, buf, n, offset, err);
}

/* ---- items --------------------------------------------------------------------------------- */

/* One item to open: a chunk of a tensor, or an object (piece = OBJECT). */
#define OBJECT UINT32_MAX
typedef struct job {
    uint64_t at;
    uint32_t file, entry, owner, piece;
} job;

typedef struct opener {
    ckpt_source *src;
    ckpt_dcp_meta meta;
    uint32_t *file_of_path;
    job *jobs;
    size_t n_jobs;
    bool *endian_known; /* by tensor */
    ckpt_err *err;
} opener;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static int compare_jobs(const void *a, const void *b)
{
    const job *x = a, *y = b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (x->at != y->at)
        return x->at < y->at ? -1 : 1;
    return (x->entry > y->entry) - (x->entry < y->entry);
}

/* What the first bytes of an item are. A safetensors blob is recognised beyond the item's own
 * length, because there `length` is the tensor's and `offset` the blob's. */
typedef enum item_kind { ITEM_ZIP, ITEM_LEGACY, ITEM_SAFETENSORS, ITEM_OTHER } item_kind;

static ckpt_status item_kind_of(ckpt_source *src, const job *j, uint64_t length, item_kind *kind,
                                ckpt_err *err)
{
    static const uint8_t legacy[4] = {0x80, 0x02, 0x8a, 0x0a};
    uint8_t head[9] = {0};
    size_t n = (size_t)ckpt_min_u64(sizeof head, src->files[j->file].size - j->at);
    ckpt_status status = n ? ckpt_source_read(src, j->file, head, n, j->at, err) : CKPT_OK;
    uint64_t header = ckpt_get_u64(head);
    *kind = ITEM_OTHER;
    if (length >= 4 && memcmp(head, "PK\3\4", 4) == 0)
        *kind = ITEM_ZIP;
    else if (length >= 4 && memcmp(head, legacy, 4) == 0)
        *kind = ITEM_LEGACY;
    else if (n == sizeof head && header >= 2 && header <= 100000000 && head[8] == '{')
        *kind = ITEM_SAFETENSORS;
    return status;
}

static void format_dims(char *text, size_t size, int rank, const int64_t *dims)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < rank && used + 24 < size; i++) {
        int n = snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)dims[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

/* The item's tensor must be the chunk that .metadata describes. */
static ckpt_status check_item(opener *o, const job *j, const ckpt_pt_tensor *item)
{
    ckpt_dcp_tensor *meta = &o->meta.tensors[j->owner];
    const ckpt_dcp_piece *piece = &meta->pieces[j->piece];
    ckpt_tensor *t = &o->src->tensors[j->owner];
    char have[160], want[160];
    if (!meta->has_dtype) {
        if (item->dtype == CKPT_F4)
            return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "float4 without a dtype in .metadata");
        meta->has_dtype = true;
        t->dtype = meta->dtype = item->dtype;
    }
    if (item->dtype != meta->dtype)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "item holds %s, .metadata says %s",
                         ckpt_dtype_get(item->dtype)->name, ckpt_dtype_get(meta->dtype)->name);
    bool same = item->rank == meta->rank;
    for (int i = 0; same && i < meta->rank; i++)
        same = item->dims[i] == piece->len[i];
    if (!same) {
        format_dims(have, sizeof have, item->rank, item->dims);
        format_dims(want, sizeof want, meta->rank, piece->len);
        return ckpt_fail(o->err, CKPT_E_FORMAT, "item has shape [%s], .metadata says [%s]", have,
                         want);
    }
    if (o->endian_known[j->owner] && t->big_endian != item->big_endian)
        return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "chunks of both byte orders");
    o->endian_known[j->owner] = true;
    t->big_endian = item->big_endian;
    return CKPT_OK;
}

static ckpt_status open_chunk(opener *o, const job *j, ckpt_arena *scratch)
{
    const ckpt_dcp_entry *e = &o->meta.entries[j->entry];
    const ckpt_dcp_tensor *meta = &o->meta.tensors[j->owner];
    const ckpt_dcp_piece *piece = &meta->pieces[j->piece];
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    ckpt_pt pt;
    ckpt_pt_tensor item;
    bool is_tensor;
    const char *what = NULL;
    item_kind kind;
    ckpt_status status = item_kind_of(src, j, e->length, &kind, err);
    if (status != CKPT_OK)
        return status;
    if (kind == ITEM_SAFETENSORS)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "safetensors-serialised DCP items");
    CKPT_CHECK(ckpt_pt_open(src, j->file, e->at, e->length, scratch, &pt, err));
    CKPT_CHECK(ckpt_pt_tensor_of(&pt, pt.root, scratch, &item, &is_tensor, &what, err));
    if (!is_tensor)
        return ckpt_fail(err, what ? CKPT_E_UNSUPPORTED : CKPT_E_FORMAT,
                         "item holds %s, expected a plain tensor", what ? what : "no tensor");
    CKPT_CHECK(check_item(o, j, &item));
    ckpt_tensor *t = &src->tensors[j->owner];
    ckpt_chunk *c = &t->chunks[t->n_chunks++];
    *c = (ckpt_chunk){.lo = piece->lo, .len = piece->len, .offset = item.offset, .file = j->file};
    if (item.stride && item.rank > 0) {
        c->stride =
            ckpt_arena_memdup(&src->arena, item.stride, (size_t)item.rank * sizeof *item.stride);
        if (!c->stride)
            return no_memory(err);
    }
done:
    return status;
}

/* At most TEXT_MAX bytes of compact JSON, cut between characters. */
static const char *render(ckpt_arena *arena, const ckpt_pkl *root)
{
    ckpt_json *json = ckpt_pkl_to_json(root);
    ckpt_buf text = {0};
    const char *out = NULL;
    if (json && ckpt_json_print(json, 0, false, &text) && !text.failed && text.data) {
        size_t n = text.len;
        if (n > TEXT_MAX) {
            n = TEXT_MAX;
            while (n > 0 && (text.data[n] & 0xc0) == 0x80)
                n--;
        }
        out = ckpt_arena_printf(arena, "%.*s%s", (int)n, (const char *)text.data,
                                n < text.len ? "..." : "");
    }
    ckpt_buf_release(&text);
    ckpt_json_free(json);
    return out;
}

static ckpt_status open_object(opener *o, const job *j, ckpt_arena *scratch)
{
    const ckpt_dcp_entry *e = &o->meta.entries[j->entry];
    ckpt_source *src = o->src;
    ckpt_object *object = &src->objects[j->owner];
    ckpt_pt pt;
    item_kind kind;
    ckpt_status status = item_kind_of(src, j, e->length, &kind, o->err);
    if (status != CKPT_OK)
        return status;
    if (kind == ITEM_ZIP || kind == ITEM_LEGACY)
        status = ckpt_pt_open(src, j->file, e->at, e->length, scratch, &pt, o->err);
    if (status != CKPT_OK && status != CKPT_E_UNSUPPORTED)
        return status;
    if (status == CKPT_E_UNSUPPORTED || kind == ITEM_SAFETENSORS || kind == ITEM_OTHER) {
        /* A loader would still unpickle it, so it counts as unknown. */
        object->unknown_global = "(payload not decoded)";
        object->text = ckpt_arena_printf(&src->arena, "(%llu bytes, not decoded)",
                                         (unsigned long long)e->length);
        return object->text ? CKPT_OK : no_memory(o->err);
    }
    ckpt_err inner = {0};
    const char *unknown = ckpt_pkl_unknown_global(pt.root, pt.n_nodes, scratch, &inner);
    if (!unknown && inner.code != CKPT_OK)
        return ckpt_fail(o->err, inner.code, "%s", inner.text);
    object->unknown_global = unknown ? ckpt_arena_strdup(&src->arena, unknown) : NULL;
    object->text = render(&src->arena, pt.root);
    return object->text && (object->unknown_global || !unknown) ? CKPT_OK : no_memory(o->err);
}

#define AHEAD 256 /* items whose directories are asked for before they are read */

/* Start reading the zip directory of an item, and the head of the item behind it: on a cold disk the
 * latencies of many items then overlap. Advice only. */
static void prefetch(const opener *o, size_t i)
{
    if (i >= o->n_jobs)
        return;
    const ckpt_dcp_entry *e = &o->meta.entries[o->jobs[i].entry];
    uint64_t end = e->at + e->length;
    (void)posix_fadvise(o->src->files[o->jobs[i].file].fd, (off_t)(end - ckpt_min_u64(end, 1024)),
                        2048, POSIX_FADV_WILLNEED);
}

static ckpt_status open_items(opener *o)
{
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    window *w = calloc(1, sizeof *w);
    if (!w)
        return no_memory(err);
    if (o->n_jobs)
        qsort(o->jobs, o->n_jobs, sizeof *o->jobs, compare_jobs);
    src->self = w;
    src->read_at = window_read;
    for (size_t i = 0; i < AHEAD; i++)
        prefetch(o, i);
    for (size_t i = 0; i < o->n_jobs; i++) {
        const job *j = &o->jobs[i];
        const ckpt_dcp_entry *e = &o->meta.entries[j->entry];
        prefetch(o, i + AHEAD);
        w->base = e->at;
        w->length = e->length;
        CKPT_CHECK(ckpt_check_interrupted(err));
        if (j->piece == OBJECT)
            CKPT_TRY(open_object(o, j, &scratch), "%s: object '%.300s'", src->files[j->file].name,
                     e->fqn);
        else
            CKPT_TRY(open_chunk(o, j, &scratch), "%s: tensor '%.300s'", src->files[j->file].name,
                     e->fqn);
        ckpt_arena_free(&scratch);
    }
done:
    ckpt_arena_free(&scratch);
    src->self = NULL;
    src->read_at = NULL;
    free(w);
    return status;
}

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
    o->jobs[o->n_jobs++] = (job){.at = e->at,
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
        add_job(o, m->objects[i].entry, (uint32_t)i, OBJECT);
    }
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

static bool is_path(const opener *o, const char *name)
{
    for (size_t i = 0; i < o->src->n_files; i++)
        if (strcmp(o->src->files[i].name, name) == 0)
            return true;
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
    size_t n, stale = 0;
    const char *first = NULL;
    ckpt_status status = ckpt_list_dir(src->root, &src->arena, &names, &n, o->err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        if (!has_suffix(names[i], ".distcp") || is_path(o, names[i]))
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
static ckpt_status add_if_present(ckpt_source *src, const char *name, bool open_it, bool *present,
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

/* metadata.json must say torch_dist; version 1 is the only one there is. */
static ckpt_status check_backend(ckpt_source *src, ckpt_err *err)
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
    else if (strcmp(backend, "torch_dist") != 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "metadata.json: sharded_backend '%s', expected 'torch_dist'", backend);
    else if (version && (!ckpt_json_int(version, &v) || v != 1))
        status =
            ckpt_fail(err, CKPT_E_UNSUPPORTED, "metadata.json: sharded_backend_version is not 1");
    ckpt_json_free(json);
    return status;
}

/* ---- common state -------------------------------------------------------------------------- */

/* Decode the common state in files[file] and keep its JSON form. */
static ckpt_status read_common(ckpt_source *src, uint32_t file, uint64_t at, uint64_t length,
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
    return -2;
}

static void iteration_text(char *text, size_t size, int64_t v)
{
    if (v >= 0)
        snprintf(text, size, "%lld", (long long)v);
    else
        snprintf(text, size, "%s", v == -1 ? "release" : "none");
}

/* A release is iteration 0 by definition, whatever its common state says. */
static ckpt_status settle_iteration(ckpt_source *src, const ckpt_dcp_place *place,
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
        CKPT_TRY(read_common(src, file, 0, src->files[file].size, err), CKPT_DCP_COMMON_FILE);
        goto done;
    }
    for (size_t i = 0; i < src->n_objects && !*found; i++) {
        const ckpt_object *o = &src->objects[i];
        if (strcmp(o->name, CKPT_DCP_COMMON_OBJECT) != 0)
            continue;
        *found = true;
        CKPT_TRY(read_common(src, o->file, o->offset, o->length, err), "object '%s'", o->name);
    }
done:
    return status;
}

/* config.json beside a plain DCP, as this program writes it. */
static ckpt_status open_plain_config(ckpt_source *src, ckpt_err *err)
{
    bool present;
    uint32_t index;
    ckpt_status status = add_if_present(src, "config.json", false, &present, &index, err);
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
    CKPT_CHECK(add_if_present(src, ".metadata", false, &present, &index, err));
    if (!present) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no .metadata: the save did not complete");
        goto done;
    }
    CKPT_TRY(ckpt_read_file(src->files[index].path, METADATA_LIMIT, &bytes, err), ".metadata");
    CKPT_TRY(ckpt_dcp_meta_parse(bytes.data, bytes.len, &src->arena, &o->meta, err), ".metadata");
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
    CKPT_CHECK(add_if_present(src, "metadata.json", false, &is_megatron, &index, err));
    if (is_megatron)
        CKPT_CHECK(check_backend(src, err));
    CKPT_CHECK(open_metadata(o));
    CKPT_CHECK(
        add_if_present(src, CKPT_DCP_COMMON_FILE, true, &has_common_file, &common_file, err));
    CKPT_CHECK(add_if_present(src, "integrity.json", false, &present, &index, err));
    CKPT_CHECK(add_data_files(o));
    CKPT_CHECK(add_stale_files(o));
    CKPT_CHECK(fill_tables(o));
    CKPT_CHECK(open_items(o));
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
        CKPT_CHECK(open_plain_config(src, err));
    CKPT_CHECK(settle_iteration(src, place, iteration, err));
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
    return status;
}
