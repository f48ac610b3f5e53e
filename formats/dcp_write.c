/* Writing a DCP directory.
 *
 * Each rank that owns anything gets files __RANK_BUCKET.distcp: its objects, then its chunks in out
 * order, each a torch.save item (head, payload, tail). One bucket, or up to four of a large rank, as
 * many as let sixteen file digests advance side by side: which, depends on sizes alone. .metadata is a protocol-2 pickle, so that
 * any Python reads it, with a memo for classes, keys and names. A Megatron checkpoint
 * is a save root and carries its common state twice, as common.pt (Megatron-Core up to 0.18) and as
 * object common_state/shard_0_1 (from 0.19). Nothing written depends on time or chance.
 * Source: torch-formats.md sections 1 to 4, megatron-dist-ckpt.md section 1. */
#include "dcp.h"
#include "dcp_meta.h"

#include "checked.h"
#include "pickle.h"
#include "pickle_policy.h"
#include "zip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Literal ids: seg.b is the chunk and seg.a = tensor << 1 | tail, except for: */
#define LIT_BLOB UINT32_MAX        /* seg.a is a blob of memory */
#define LIT_WHOLE (UINT32_MAX - 1) /* the one item of a tensor without chunks */

#define BATCH 1000 /* items per SETITEMS or APPENDS, as Python does */

typedef struct blob {
    const uint8_t *data;
    size_t len;
} blob;

typedef struct literals {
    const ckpt_out *out;
    blob blobs[8];
    uint32_t n_blobs;
} literals;

/* One item of a data file. tensor < 0: object `object`, or the generated common state when that is
 * negative too. */
typedef struct item {
    int64_t tensor, object;
    uint32_t chunk; /* or LIT_WHOLE */
    int owner;      /* rank, then rank * buckets + bucket */
    uint32_t file;
    uint64_t at, length; /* in the file */
} item;

typedef struct layout {
    ckpt_out *out;
    ckpt_sink *sink;
    literals *lit;
    const char *dir;                 /* "", "release/" or "iter_N/" */
    blob common_object, common_file; /* Megatron; the object only if it is not carried */
    item *items;                     /* file order */
    size_t n_items;
    int buckets; /* files a rank */
    ckpt_err *err;
} layout;

static ckpt_status no_memory(const layout *l)
{
    return ckpt_fail(l->err, CKPT_E_NOMEM, "out of memory");
}

/* Move a buffer's bytes to the sink's arena. */
static ckpt_status keep(layout *l, ckpt_buf *buf, blob *out)
{
    out->len = buf->len;
    out->data = buf->failed ? NULL : ckpt_arena_memdup(&l->sink->arena, buf->data, buf->len);
    bool ok = out->data != NULL || (buf->len == 0 && !buf->failed);
    ckpt_buf_release(buf);
    return ok ? CKPT_OK : no_memory(l);
}

static bool has_elements(int rank, const int64_t *len)
{
    for (int i = 0; i < rank; i++)
        if (len[i] == 0)
            return false;
    return true;
}

static const int64_t *item_dims(const ckpt_out *out, uint32_t tensor, uint32_t chunk)
{
    const ckpt_out_tensor *t = &out->tensors[tensor];
    return chunk == LIT_WHOLE ? t->dims : t->chunks[chunk].len;
}

/* ---- literals ------------------------------------------------------------------------------ */

static bool write_literal(const ckpt_sink *sink, uint32_t file, const ckpt_seg *seg, uint32_t crc,
                          uint8_t *out)
{
    const literals *lit = sink->self;
    (void)file;
    if (seg->b == LIT_BLOB) {
        if (seg->len)
            memcpy(out, lit->blobs[seg->a].data, (size_t)seg->len);
        return true;
    }
    const ckpt_out_tensor *t = &lit->out->tensors[seg->a >> 1];
    const int64_t *dims = item_dims(lit->out, seg->a >> 1, seg->b);
    ckpt_buf b = {0};
    if ((seg->a & 1) == 0)
        ckpt_zip_tensor_head(&b, t->dtype, t->rank, dims);
    else /* an empty payload has no segment, so crc would be that of the item before */
        ckpt_zip_tensor_tail(&b, t->dtype, t->rank, dims, has_elements(t->rank, dims) ? crc : 0);
    bool ok = !b.failed && b.len == seg->len;
    if (ok)
        memcpy(out, b.data, b.len);
    ckpt_buf_release(&b);
    return ok;
}

static const uint8_t *stored_literal(const ckpt_sink *sink, const ckpt_seg *seg)
{
    const literals *lit = sink->self;
    return seg->b == LIT_BLOB ? lit->blobs[seg->a].data : NULL;
}

/* ---- item list ----------------------------------------------------------------------------- */

/* Unsorted items: objects, then tensors. Chunks without elements are written only for an empty
 * tensor, and once: their (name, offset) key may repeat. */
static void list_items(layout *l, item *items, size_t *count)
{
    ckpt_out *out = l->out;
    size_t n = 0;
    if (l->common_object.data)
        items[n++] = (item){.tensor = -1, .object = -1, .chunk = LIT_BLOB};
    for (size_t i = 0; i < out->n_objects; i++)
        items[n++] = (item){.tensor = -1, .object = (int64_t)i, .owner = out->objects[i].owner};
    for (size_t i = 0; i < out->n_tensors; i++) {
        const ckpt_out_tensor *t = &out->tensors[i];
        if (!has_elements(t->rank, t->dims)) {
            items[n++] = (item){.tensor = (int64_t)i,
                                .object = -1,
                                .chunk = LIT_WHOLE,
                                .owner = t->n_chunks ? t->chunks[0].owner : 0};
            continue;
        }
        for (size_t k = 0; k < t->n_chunks; k++)
            if (has_elements(t->rank, t->chunks[k].len))
                items[n++] = (item){.tensor = (int64_t)i,
                                    .object = -1,
                                    .chunk = (uint32_t)k,
                                    .owner = t->chunks[k].owner};
    }
    *count = n;
}

/* Turn owners into files. */
static ckpt_status spread_items(layout *l, item *items, size_t n)
{
    uint64_t *bytes = calloc(n + 1, sizeof *bytes);
    int *slot = calloc(n + 1, sizeof *slot);
    ckpt_status status = bytes && slot ? CKPT_OK : no_memory(l);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        int64_t numel;
        const item *it = &items[i];
        slot[i] = it->owner;
        if (it->tensor < 0)
            continue;
        const ckpt_out_tensor *t = &l->out->tensors[it->tensor];
        if (ckpt_numel(t->rank, item_dims(l->out, (uint32_t)it->tensor, it->chunk), &numel))
            (void)ckpt_dtype_bytes(t->dtype, numel, &bytes[i]); /* put_tensor_item checks it */
    }
    if (status == CKPT_OK)
        status = ckpt_dcp_buckets(l->out->world, bytes, slot, n, &l->buckets, l->err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++)
        items[i].owner = slot[i];
    free(bytes);
    free(slot);
    return status;
}

/* Stable counting sort by file into l->items. first[s] .. first[s+1] are those of slot s. */
static ckpt_status group_items(layout *l, size_t **first)
{
    const ckpt_out *out = l->out;
    size_t slots = (size_t)out->world * CKPT_DCP_BUCKETS;
    size_t max = 1 + out->n_objects + out->n_tensors;
    for (size_t i = 0; i < out->n_tensors; i++)
        max += out->tensors[i].n_chunks;
    item *unsorted = calloc(max, sizeof *unsorted);
    size_t *next = calloc(slots + 2, sizeof *next);
    l->items = calloc(max, sizeof *l->items);
    *first = calloc(slots + 2, sizeof **first);
    ckpt_status status = unsorted && next && l->items && *first ? CKPT_OK : no_memory(l);
    if (status == CKPT_OK) {
        list_items(l, unsorted, &l->n_items);
        status = spread_items(l, unsorted, l->n_items);
    }
    for (size_t i = 0; status == CKPT_OK && i < l->n_items; i++)
        next[unsorted[i].owner + 1]++;
    for (size_t s = 0; status == CKPT_OK && s < slots; s++)
        next[s + 1] += next[s];
    if (status == CKPT_OK)
        memcpy(*first, next, (slots + 1) * sizeof *next);
    for (size_t i = 0; status == CKPT_OK && i < l->n_items; i++)
        l->items[next[unsorted[i].owner]++] = unsorted[i];
    free(unsorted);
    free(next);
    return status;
}

/* ---- data files ---------------------------------------------------------------------------- */

typedef struct file_writer {
    ckpt_out_file *file;
    uint32_t index;
} file_writer;

/* Lengths of the head and tail around a payload of some dtype and shape. */
typedef struct frame {
    const int64_t *dims;
    ckpt_dtype dtype;
    int rank;
    size_t head, tail; /* bytes */
    ckpt_buf scratch;
} frame;

static ckpt_status add_seg(layout *l, file_writer *w, ckpt_seg_kind kind, uint32_t a, uint32_t b,
                           uint64_t len)
{
    if (len == 0)
        return CKPT_OK;
    w->file->segs[w->file->n_segs++] = (ckpt_seg){.offset = w->file->size,
                                                  .len = len,
                                                  .a = a,
                                                  .b = b,
                                                  .kind = (uint8_t)kind,
                                                  .crc = kind == CKPT_SEG_CHUNK};
    return ckpt_add_u64(w->file->size, len, &w->file->size)
               ? CKPT_OK
               : ckpt_fail(l->err, CKPT_E_UNSUPPORTED, "%s: file too large", w->file->name);
}

static ckpt_status add_blob_seg(layout *l, file_writer *w, blob data)
{
    uint32_t id = l->lit->n_blobs++;
    l->lit->blobs[id] = data;
    return add_seg(l, w, CKPT_SEG_LITERAL, id, LIT_BLOB, data.len);
}

/* Bytes before and after the payload. Neighbours mostly have one shape, so f keeps the
 * last answer. */
static ckpt_status frame_lengths(layout *l, const item *it, frame *f)
{
    const ckpt_out_tensor *t = &l->out->tensors[it->tensor];
    const int64_t *dims = item_dims(l->out, (uint32_t)it->tensor, it->chunk);
    if (f->dims && f->dtype == t->dtype && f->rank == t->rank &&
        (t->rank == 0 || memcmp(f->dims, dims, (size_t)t->rank * sizeof *dims) == 0))
        return CKPT_OK;
    ckpt_buf_clear(&f->scratch);
    ckpt_zip_tensor_head(&f->scratch, t->dtype, t->rank, dims);
    f->head = f->scratch.len;
    ckpt_zip_tensor_tail(&f->scratch, t->dtype, t->rank, dims, 0);
    f->tail = f->scratch.len - f->head;
    f->dtype = t->dtype;
    f->rank = t->rank;
    f->dims = dims;
    return f->scratch.failed ? no_memory(l) : CKPT_OK;
}

static ckpt_status put_tensor_item(layout *l, file_writer *w, item *it, frame *f)
{
    ckpt_out_tensor *t = &l->out->tensors[it->tensor];
    uint32_t id = (uint32_t)it->tensor << 1;
    const int64_t *dims = item_dims(l->out, (uint32_t)it->tensor, it->chunk);
    int64_t numel;
    uint64_t bytes;
    ckpt_status status;
    if (!ckpt_numel(t->rank, dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &bytes))
        return ckpt_fail(l->err, CKPT_E_UNSUPPORTED, "tensor '%.300s': size overflows", t->name);
    CKPT_CHECK(frame_lengths(l, it, f));
    CKPT_CHECK(add_seg(l, w, CKPT_SEG_LITERAL, id, it->chunk, f->head));
    if (it->chunk != LIT_WHOLE) {
        t->chunks[it->chunk].file = w->index;
        t->chunks[it->chunk].offset = w->file->size;
    }
    CKPT_CHECK(add_seg(l, w, CKPT_SEG_CHUNK, (uint32_t)it->tensor, it->chunk, bytes));
    CKPT_CHECK(add_seg(l, w, CKPT_SEG_LITERAL, id | 1, it->chunk, f->tail));
done:
    return status;
}

static ckpt_status put_item(layout *l, file_writer *w, item *it, frame *f)
{
    ckpt_status status;
    it->file = w->index;
    it->at = w->file->size;
    if (it->tensor >= 0) {
        status = put_tensor_item(l, w, it, f);
    } else if (it->object >= 0) {
        ckpt_out_object *o = &l->out->objects[it->object];
        o->file = w->index;
        o->offset = w->file->size;
        status = add_seg(l, w, CKPT_SEG_OBJECT, (uint32_t)it->object, 0, o->length);
    } else {
        status = add_blob_seg(l, w, l->common_object);
    }
    it->length = w->file->size - it->at;
    return status;
}

/* Open the next file of the sink with room for n segments. */
static ckpt_status begin_file(layout *l, const char *name, size_t n, bool is_data, file_writer *w)
{
    ckpt_sink *sink = l->sink;
    w->index = (uint32_t)sink->n_files;
    w->file = &sink->files[sink->n_files++];
    w->file->name = name;
    w->file->is_data = is_data;
    w->file->segs = ckpt_arena_array(&sink->arena, n + 1, sizeof *w->file->segs);
    return name && w->file->segs ? CKPT_OK : no_memory(l);
}

static ckpt_status put_data_files(layout *l, const size_t *first)
{
    frame f = {0};
    ckpt_status status = CKPT_OK;
    for (int s = 0; s < l->out->world * l->buckets; s++) {
        if (first[s] == first[s + 1])
            continue;
        file_writer w;
        const char *name = ckpt_arena_printf(&l->sink->arena, "%s__%d_%d.distcp", l->dir,
                                             s / l->buckets, s % l->buckets);
        CKPT_CHECK(begin_file(l, name, 3 * (first[s + 1] - first[s]), true, &w));
        for (size_t i = first[s]; i < first[s + 1]; i++)
            CKPT_CHECK(put_item(l, &w, &l->items[i], &f));
    }
done:
    ckpt_buf_release(&f.scratch);
    return status;
}

static ckpt_status put_small_file(layout *l, const char *name, blob data)
{
    file_writer w;
    ckpt_status status;
    CKPT_CHECK(begin_file(l, name, 1, false, &w));
    CKPT_CHECK(add_blob_seg(l, &w, data));
done:
    return status;
}

/* ---- .metadata ----------------------------------------------------------------------------- */

#define MODULE_META "torch.distributed.checkpoint.metadata"
#define MODULE_FS "torch.distributed.checkpoint.filesystem"

enum { OP_NEWOBJ = 0x81, OP_BINPUT = 'q', OP_LONG_BINPUT = 'r', OP_BINGET = 'h' };
enum { OP_LONG_BINGET = 'j' };

/* Memo slot + 1 of what repeats; 0: not written yet. */
typedef struct pickler {
    ckpt_buf b;
    uint32_t n_memo;
    uint32_t tensor_meta, bytes_meta, chunk_meta, index, info, properties, size, strided,
        contiguous;
    uint32_t k_properties, k_size, k_chunks, k_offsets, k_sizes, k_fqn, k_index, k_offset, k_path,
        k_length;
    uint32_t dtype[CKPT_DTYPE_COUNT];
    uint32_t *tensors, *objects, common; /* names */
} pickler;

static void op(pickler *p, int code)
{
    ckpt_buf_putc(&p->b, code);
}

static void memo_op(pickler *p, int small, int large, uint32_t slot)
{
    op(p, slot < 256 ? small : large);
    for (int i = 0; i < (slot < 256 ? 1 : 4); i++)
        op(p, (int)(slot >> (8 * i) & 0xff));
}

/* True after fetching what is memoised; else the caller writes the value and calls remember. */
static bool recall(pickler *p, uint32_t slot)
{
    if (slot)
        memo_op(p, OP_BINGET, OP_LONG_BINGET, slot - 1);
    return slot != 0;
}

static void remember(pickler *p, uint32_t *slot)
{
    memo_op(p, OP_BINPUT, OP_LONG_BINPUT, p->n_memo);
    *slot = ++p->n_memo;
}

static void put_global(pickler *p, uint32_t *slot, const char *module, const char *name)
{
    if (recall(p, *slot))
        return;
    ckpt_pkl_put_global(&p->b, module, name);
    remember(p, slot);
}

static void put_text(pickler *p, uint32_t *slot, const char *s)
{
    if (recall(p, *slot))
        return;
    ckpt_pkl_put_str(&p->b, s);
    remember(p, slot);
}

/* class() without calling __init__, its state dict opened: '}' '('. */
static void open_object(pickler *p, uint32_t *slot, const char *module, const char *name)
{
    put_global(p, slot, module, name);
    op(p, ')');
    op(p, OP_NEWOBJ);
    op(p, '}');
    op(p, '(');
}

static void close_object(pickler *p)
{
    op(p, 'u');
    op(p, 'b');
}

/* torch.Size as torch counts: pairs along the last axis of float4. */
static void put_size(pickler *p, ckpt_dtype dtype, int rank, const int64_t *dims)
{
    put_global(p, &p->size, "torch", "Size");
    op(p, '(');
    op(p, '(');
    for (int i = 0; i < rank; i++)
        ckpt_pkl_put_int(&p->b, dtype == CKPT_F4 && i == rank - 1 ? dims[i] / 2 : dims[i]);
    op(p, 't');
    op(p, 't');
    op(p, 'R');
}

/* (dtype, torch.strided, False, contiguous_format, False) as state of a TensorProperties. */
static void put_properties(pickler *p, ckpt_dtype dtype)
{
    put_global(p, &p->properties, MODULE_META, "TensorProperties");
    op(p, ')');
    op(p, OP_NEWOBJ);
    op(p, '(');
    put_global(p, &p->dtype[dtype], "torch", ckpt_dtype_get(dtype)->torch);
    if (!recall(p, p->strided)) {
        ckpt_pkl_put_global(&p->b, "torch.serialization", "_get_layout");
        op(p, '(');
        ckpt_pkl_put_str(&p->b, "torch.strided");
        op(p, 't');
        op(p, 'R');
        remember(p, &p->strided);
    }
    ckpt_pkl_put_bool(&p->b, false);
    if (!recall(p, p->contiguous)) {
        ckpt_pkl_put_global(&p->b, MODULE_META, "_MEM_FORMAT_ENCODING");
        op(p, '(');
        ckpt_pkl_put_int(&p->b, 0);
        op(p, 't');
        op(p, 'R');
        remember(p, &p->contiguous);
    }
    ckpt_pkl_put_bool(&p->b, false);
    op(p, 't');
    op(p, 'b');
}

static void put_chunk(pickler *p, const ckpt_out_tensor *t, const int64_t *lo, const int64_t *len)
{
    open_object(p, &p->chunk_meta, MODULE_META, "ChunkStorageMetadata");
    put_text(p, &p->k_offsets, "offsets");
    put_size(p, t->dtype, t->rank, lo);
    put_text(p, &p->k_sizes, "sizes");
    put_size(p, t->dtype, t->rank, len);
    close_object(p);
}

static const int64_t zeros[CKPT_MAX_RANK];

static void put_tensor(pickler *p, const ckpt_out_tensor *t)
{
    open_object(p, &p->tensor_meta, MODULE_META, "TensorStorageMetadata");
    put_text(p, &p->k_properties, "properties");
    put_properties(p, t->dtype);
    put_text(p, &p->k_size, "size");
    put_size(p, t->dtype, t->rank, t->dims);
    put_text(p, &p->k_chunks, "chunks");
    op(p, ']');
    op(p, '(');
    if (!has_elements(t->rank, t->dims))
        put_chunk(p, t, zeros, t->dims);
    size_t n = 0;
    for (size_t i = 0; i < t->n_chunks && has_elements(t->rank, t->dims); i++) {
        if (!has_elements(t->rank, t->chunks[i].len))
            continue;
        if (n && n % BATCH == 0) {
            op(p, 'e');
            op(p, '(');
        }
        put_chunk(p, t, t->chunks[i].lo, t->chunks[i].len);
        n++;
    }
    op(p, 'e');
    close_object(p);
}

/* Between the items of a dict under construction. */
static void next_batch(pickler *p, size_t *n)
{
    if (++*n % BATCH == 0) {
        op(p, 'u');
        op(p, '(');
    }
}

static void put_state(pickler *p, const layout *l)
{
    const ckpt_out *out = l->out;
    size_t n = 0;
    op(p, '}');
    op(p, '(');
    for (size_t i = 0; i < out->n_tensors; i++) {
        put_text(p, &p->tensors[i], out->tensors[i].name);
        put_tensor(p, &out->tensors[i]);
        next_batch(p, &n);
    }
    for (size_t i = 0; i < out->n_objects + (l->common_object.data ? 1 : 0); i++) {
        if (i < out->n_objects)
            put_text(p, &p->objects[i], out->objects[i].name);
        else
            put_text(p, &p->common, CKPT_DCP_COMMON_OBJECT);
        put_global(p, &p->bytes_meta, MODULE_META, "BytesStorageMetadata");
        op(p, ')');
        op(p, OP_NEWOBJ);
        next_batch(p, &n);
    }
    op(p, 'u');
}

/* Position of a chunk among those written: MetadataIndex.index is a hint into `chunks`. */
static void put_index(pickler *p, const layout *l, const item *it, uint32_t position)
{
    open_object(p, &p->index, MODULE_META, "MetadataIndex");
    put_text(p, &p->k_fqn, "fqn");
    recall(p, it->tensor >= 0   ? p->tensors[it->tensor]
              : it->object >= 0 ? p->objects[it->object]
                                : p->common);
    put_text(p, &p->k_index, "index");
    if (it->tensor >= 0) {
        const ckpt_out_tensor *t = &l->out->tensors[it->tensor];
        ckpt_pkl_put_int(&p->b, position);
        put_text(p, &p->k_offset, "offset");
        put_size(p, t->dtype, t->rank, it->chunk == LIT_WHOLE ? zeros : t->chunks[it->chunk].lo);
    } else {
        ckpt_pkl_put_none(&p->b);
    }
    close_object(p);
}

static void put_storage(pickler *p, const layout *l, const uint32_t *positions)
{
    size_t n = 0, dir = strlen(l->dir);
    uint32_t name = 0, file = UINT32_MAX;
    op(p, '}');
    op(p, '(');
    for (size_t i = 0; i < l->n_items; i++) {
        const item *it = &l->items[i];
        put_index(p, l, it, positions[i]);
        open_object(p, &p->info, MODULE_FS, "_StorageInfo");
        put_text(p, &p->k_path, "relative_path");
        if (it->file != file)
            name = 0;
        file = it->file;
        put_text(p, &name, l->sink->files[file].name + dir);
        put_text(p, &p->k_offset, "offset");
        ckpt_pkl_put_int(&p->b, (int64_t)it->at);
        put_text(p, &p->k_length, "length");
        ckpt_pkl_put_int(&p->b, (int64_t)it->length);
        close_object(p);
        next_batch(p, &n);
    }
    op(p, 'u');
}

/* Index of every item's chunk among its tensor's written chunks. */
static uint32_t *chunk_positions(const layout *l)
{
    const ckpt_out *out = l->out;
    size_t total = 0, at = 0;
    for (size_t i = 0; i < out->n_tensors; i++)
        total += out->tensors[i].n_chunks;
    uint32_t *by_chunk = calloc(total + 1, sizeof *by_chunk);
    size_t *start = calloc(out->n_tensors + 1, sizeof *start);
    uint32_t *positions = calloc(l->n_items + 1, sizeof *positions);
    if (by_chunk && start && positions) {
        for (size_t i = 0; i < out->n_tensors; i++) {
            const ckpt_out_tensor *t = &out->tensors[i];
            uint32_t n = 0;
            start[i] = at;
            for (size_t k = 0; k < t->n_chunks; k++)
                by_chunk[at++] = has_elements(t->rank, t->chunks[k].len) ? n++ : 0;
        }
        for (size_t i = 0; i < l->n_items; i++) {
            const item *it = &l->items[i];
            if (it->tensor >= 0 && it->chunk != LIT_WHOLE)
                positions[i] = by_chunk[start[it->tensor] + it->chunk];
        }
    } else {
        free(positions);
        positions = NULL;
    }
    free(by_chunk);
    free(start);
    return positions;
}

static ckpt_status make_metadata(layout *l, blob *out)
{
    pickler p = {0};
    uint32_t root = 0, *positions = chunk_positions(l);
    p.tensors = calloc(l->out->n_tensors + 1, sizeof *p.tensors);
    p.objects = calloc(l->out->n_objects + 1, sizeof *p.objects);
    ckpt_status status = CKPT_OK;
    if (!positions || !p.tensors || !p.objects) {
        status = no_memory(l);
        goto done;
    }
    ckpt_pkl_begin(&p.b);
    open_object(&p, &root, MODULE_META, "Metadata");
    ckpt_pkl_put_str(&p.b, "state_dict_metadata");
    put_state(&p, l);
    ckpt_pkl_put_str(&p.b, "planner_data");
    op(&p, '}');
    ckpt_pkl_put_str(&p.b, "storage_data");
    put_storage(&p, l, positions);
    ckpt_pkl_put_str(&p.b, "storage_meta"); /* None: readers fill it in */
    ckpt_pkl_put_none(&p.b);
    ckpt_pkl_put_str(&p.b, "version");
    ckpt_pkl_put_str(&p.b, "1.0.0");
    if (l->out->config_kind != CKPT_CONFIG_MEGATRON) /* that has a common state */
        ckpt_pkl_put_policy(&p.b, l->out->metadata);
    close_object(&p);
    ckpt_pkl_end(&p.b);
    status = keep(l, &p.b, out);
done:
    free(positions);
    free(p.tensors);
    free(p.objects);
    return status;
}

/* ---- common state -------------------------------------------------------------------------- */

/* How Megatron-Core is to read the optimizer state: as it stores it with model-shaped tensors. */
const char *ckpt_dcp_sharding_type(const ckpt_out *out)
{
    static const char fp32[] = "optimizer.state.fp32_param.";
    const char *type = NULL;
    for (size_t i = 0; i < out->n_tensors; i++) {
        if (strncmp(out->tensors[i].name, fp32, sizeof fp32 - 1) == 0)
            return NULL; /* not the distributed optimizer's */
        type = out->tensors[i].optimizer ? "fully_reshardable" : type;
    }
    return type;
}

static ckpt_status make_common(layout *l)
{
    const ckpt_out *out = l->out;
    const ckpt_out_object *carried = NULL;
    ckpt_buf object = {0}, file = {0};
    ckpt_status status;
    for (size_t i = 0; i < out->n_objects && !carried; i++)
        if (strcmp(out->objects[i].name, CKPT_DCP_COMMON_OBJECT) == 0)
            carried = &out->objects[i];
    if (carried && !carried->data) {
        status =
            ckpt_fail(l->err, CKPT_E_INTERNAL, "object '%s' must be in memory to derive %s from it",
                      carried->name, CKPT_DCP_COMMON_FILE);
    } else if (carried) {
        status = ckpt_dcp_repack_bytes(carried->data, carried->length, false, NULL, &file, l->err);
        if (status != CKPT_OK)
            ckpt_err_frame(l->err, "object '%s'", carried->name);
    } else {
        CKPT_CHECK(ckpt_dcp_new_common(out->config, out->iteration, ckpt_dcp_sharding_type(out),
                                       true, &object, l->err));
        CKPT_CHECK(keep(l, &object, &l->common_object));
        status = ckpt_dcp_new_common(out->config, out->iteration, ckpt_dcp_sharding_type(out),
                                     false, &file, l->err);
    }
    if (status == CKPT_OK)
        status = keep(l, &file, &l->common_file);
done:
    ckpt_buf_release(&object);
    ckpt_buf_release(&file);
    return status;
}

static blob text_blob(const char *s)
{
    return (blob){(const uint8_t *)s, strlen(s)};
}

static ckpt_status put_megatron_files(layout *l)
{
    static const char json[] =
        "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
        "\"common_backend\": \"torch\", \"common_backend_version\": 1}";
    ckpt_arena *arena = &l->sink->arena;
    const char *tracker = l->out->iteration < 0
                              ? "release"
                              : ckpt_arena_printf(arena, "%lld", (long long)l->out->iteration);
    const char *common = ckpt_arena_printf(arena, "%s%s", l->dir, CKPT_DCP_COMMON_FILE);
    const char *metadata = ckpt_arena_printf(arena, "%smetadata.json", l->dir);
    ckpt_status status;
    if (!tracker)
        return no_memory(l);
    CKPT_CHECK(put_small_file(l, common, l->common_file));
    CKPT_CHECK(put_small_file(l, metadata, text_blob(json)));
    if (!l->out->bare)
        CKPT_CHECK(put_small_file(l, CKPT_DCP_TRACKER, text_blob(tracker)));
done:
    return status;
}

static ckpt_status put_plain_config(layout *l)
{
    ckpt_buf text = {0};
    blob data;
    if (!l->out->config)
        return CKPT_OK;
    if (!ckpt_json_print(l->out->config, 2, false, &text))
        text.failed = true;
    ckpt_buf_putc(&text, '\n');
    ckpt_status status = keep(l, &text, &data);
    return status == CKPT_OK ? put_small_file(l, "config.json", data) : status;
}

/* ---- layout -------------------------------------------------------------------------------- */

static ckpt_status begin(layout *l)
{
    ckpt_sink *sink = l->sink;
    bool megatron = l->out->config_kind == CKPT_CONFIG_MEGATRON;
    l->lit = ckpt_arena_alloc(&sink->arena, sizeof *l->lit);
    size_t files = (size_t)l->out->world * CKPT_DCP_BUCKETS + 8;
    sink->files = ckpt_arena_array(&sink->arena, files, sizeof *sink->files);
    if (!l->lit || !sink->files)
        return no_memory(l);
    l->lit->out = l->out;
    sink->self = l->lit;
    sink->literal = write_literal;
    sink->stored = stored_literal;
    sink->n_files = 0;
    l->dir = "";
    sink->manifest_dir = "";
    sink->together = l->out->mesh.pp <= 1;
    if (!megatron)
        return CKPT_OK;
    l->dir = l->out->bare ? ""
             : l->out->iteration < 0
                 ? "release/"
                 : ckpt_arena_printf(&sink->arena, "iter_%07lld/", (long long)l->out->iteration);
    sink->manifest_dir = l->dir == NULL ? NULL
                         : l->out->bare
                             ? ""
                             : ckpt_arena_strndup(&sink->arena, l->dir, strlen(l->dir) - 1);
    return sink->manifest_dir ? make_common(l) : no_memory(l);
}

ckpt_status ckpt_dcp_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    layout l = {.out = out, .sink = sink, .err = err};
    size_t *first = NULL;
    blob metadata;
    ckpt_status status = ckpt_dcp_check_out(out, err);
    if (status != CKPT_OK)
        return status;
    CKPT_CHECK(begin(&l));
    CKPT_CHECK(group_items(&l, &first));
    CKPT_CHECK(put_data_files(&l, first));
    CKPT_CHECK(make_metadata(&l, &metadata));
    const char *name = ckpt_arena_printf(&sink->arena, "%s.metadata", l.dir);
    CKPT_CHECK(put_small_file(&l, name, metadata));
    if (out->config_kind == CKPT_CONFIG_MEGATRON)
        CKPT_CHECK(put_megatron_files(&l));
    else
        CKPT_CHECK(put_plain_config(&l));
done:
    free(first);
    free(l.items);
    return status;
}
