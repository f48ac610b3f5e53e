/* Opening what .metadata points at. An item is a torch.save archive whose pickle says where in it
 * the elements lie and with which strides (a transposed view is stored as such), or with
 * SerializationFormat.SAFETENSORS the file's one safetensors blob, at whose start the offsets of
 * all its tensors point. No element is read here.
 *
 * Items are visited in file order through a small read window, so that the many small items of a
 * checkpoint cost few system calls and large ones only their two ends. Source: torch-formats.md
 * section 2. */
#include "checked.h"
#include "dcp_internal.h"
#include "io.h"
#include "le.h"
#include "st_internal.h"
#include "torch_save.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALL_ITEM 16384 /* bytes: read whole, with what follows */
#define TEXT_MAX 200     /* bytes of an object's one-line rendering */

typedef ckpt_dcp_job job;
typedef ckpt_dcp_opener opener;

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
    ckpt_status status = ckpt_file_read(&src->files[file], s->bytes, n, start, err);
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
        return ckpt_file_read(&src->files[file], buf, n, offset, err);
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
    return ckpt_file_read(&src->files[file], buf, n, offset, err);
}

/* ---- items --------------------------------------------------------------------------------- */

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

static ckpt_status item_kind_of(ckpt_source *src, uint32_t file, uint64_t at, uint64_t length,
                                item_kind *kind, ckpt_err *err)
{
    static const uint8_t legacy[4] = {0x80, 0x02, 0x8a, 0x0a};
    uint8_t head[9] = {0};
    size_t n = (size_t)ckpt_min_u64(sizeof head, src->files[file].size - at);
    ckpt_status status = n ? ckpt_source_read(src, file, head, n, at, err) : CKPT_OK;
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

/* The tensor in the safetensors blob that starts at the job's offset. */
static ckpt_status find_in_blob(opener *o, const job *j, ckpt_pt_tensor *item)
{
    const ckpt_dcp_tensor *meta = &o->meta.tensors[j->owner];
    const ckpt_dcp_piece *piece = &meta->pieces[j->piece];
    ckpt_json *metadata = NULL;
    ckpt_status status = CKPT_OK;
    if (!o->has_blob || o->blob_file != j->file || o->blob_at != j->at) {
        ckpt_st_table_release(&o->blob);
        o->has_blob = false;
        status = ckpt_st_blob_read(o->src, j->file, j->at, &o->blob, &metadata, o->err);
        ckpt_json_free(metadata);
        if (status != CKPT_OK)
            return status;
        o->blob_file = j->file;
        o->blob_at = j->at;
        o->has_blob = true;
    }
    uint32_t at = ckpt_st_table_find(&o->blob, o->meta.entries[j->entry].fqn);
    if (at == CKPT_ST_NONE)
        return ckpt_fail(o->err, CKPT_E_FORMAT, "not in the safetensors blob at byte %llu",
                         (unsigned long long)j->at);
    const ckpt_st_entry *e = &o->blob.entries[at];
    *item = (ckpt_pt_tensor){
        .dtype = (ckpt_dtype)e->dtype, .rank = e->rank, .dims = e->dims, .offset = e->begin};
    /* A writer that put two chunks of one tensor into one blob kept only the last. */
    for (int i = 0; e->lo && i < e->rank && i < meta->rank; i++) {
        int64_t unit = e->dtype == CKPT_F4 && i == e->rank - 1 ? 2 : 1; /* torch counts pairs */
        if (e->lo[i] != piece->lo[i] / unit)
            return ckpt_fail(o->err, CKPT_E_FORMAT,
                             "the blob holds the chunk at %lld on axis %d, .metadata says %lld",
                             (long long)e->lo[i], i, (long long)(piece->lo[i] / unit));
    }
    return CKPT_OK;
}

/* The tensor in the torch.save archive at the job's offset. */
static ckpt_status find_in_archive(opener *o, const job *j, ckpt_arena *scratch,
                                   ckpt_pt_tensor *item)
{
    const ckpt_dcp_entry *e = &o->meta.entries[j->entry];
    ckpt_pt pt;
    bool is_tensor;
    const char *what = NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_pt_open(o->src, j->file, e->at, e->length, scratch, &pt, o->err));
    CKPT_CHECK(ckpt_pt_tensor_of(&pt, pt.root, scratch, item, &is_tensor, &what, o->err));
    if (!is_tensor)
        status = ckpt_fail(o->err, what ? CKPT_E_UNSUPPORTED : CKPT_E_FORMAT,
                           "item holds %s, expected a plain tensor", what ? what : "no tensor");
done:
    return status;
}

static ckpt_status open_chunk(opener *o, const job *j, ckpt_arena *scratch)
{
    const ckpt_dcp_piece *piece = &o->meta.tensors[j->owner].pieces[j->piece];
    ckpt_source *src = o->src;
    ckpt_pt_tensor item;
    item_kind kind;
    ckpt_status status;
    CKPT_CHECK(item_kind_of(src, j->file, j->at, o->meta.entries[j->entry].length, &kind, o->err));
    CKPT_CHECK(kind == ITEM_SAFETENSORS ? find_in_blob(o, j, &item)
                                        : find_in_archive(o, j, scratch, &item));
    CKPT_CHECK(check_item(o, j, &item));
    if (o->meta.tensors[j->owner].flat)
        return ckpt_dcp_flat_chunks(o, j, &item);
    ckpt_tensor *t = &src->tensors[j->owner];
    ckpt_chunk *c = &t->chunks[t->n_chunks++];
    *c = (ckpt_chunk){.lo = piece->lo, .len = piece->len, .offset = item.offset, .file = j->file};
    if (item.stride && item.rank > 0) {
        c->stride =
            ckpt_arena_memdup(&src->arena, item.stride, (size_t)item.rank * sizeof *item.stride);
        if (!c->stride)
            return no_memory(o->err);
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

ckpt_status ckpt_dcp_describe_object(ckpt_source *src, ckpt_object *object, ckpt_err *err)
{
    ckpt_arena scratch = {0};
    ckpt_pt pt;
    item_kind kind;
    ckpt_err inner = {0};
    const char *unknown;
    ckpt_status status;
    CKPT_CHECK(item_kind_of(src, object->file, object->offset, object->length, &kind, err));
    if (kind == ITEM_ZIP || kind == ITEM_LEGACY)
        status =
            ckpt_pt_open(src, object->file, object->offset, object->length, &scratch, &pt, err);
    if (status != CKPT_OK && status != CKPT_E_UNSUPPORTED)
        goto done;
    if (status == CKPT_E_UNSUPPORTED || kind == ITEM_SAFETENSORS || kind == ITEM_OTHER) {
        /* A loader would still unpickle it, so it counts as unknown. */
        object->unknown_global = "(payload not decoded)";
        object->text = ckpt_arena_printf(&src->arena, "(%llu bytes, not decoded)",
                                         (unsigned long long)object->length);
        status = object->text ? CKPT_OK : no_memory(err);
        goto done;
    }
    unknown = ckpt_pkl_unknown_global(pt.root, pt.n_nodes, &scratch, &inner);
    if (!unknown && inner.code != CKPT_OK) {
        status = ckpt_fail(err, inner.code, "%s", inner.text);
        goto done;
    }
    object->unknown_global = unknown ? ckpt_arena_strdup(&src->arena, unknown) : NULL;
    object->text = render(&src->arena, pt.root);
    if (!object->text || (unknown && !object->unknown_global))
        status = no_memory(err);
done:
    ckpt_arena_free(&scratch);
    return status;
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

ckpt_status ckpt_dcp_open_items(opener *o)
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
        if (j->piece == CKPT_DCP_OBJECT)
            CKPT_TRY(ckpt_dcp_describe_object(src, &src->objects[j->owner], err),
                     "%s: object '%.300s'", src->files[j->file].name, e->fqn);
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
