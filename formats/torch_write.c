/* Writing torch.save zip files.
 *
 * ROOT/data.pkl   protocol-2 pickle, first
 * ROOT/byteorder  "little"
 * ROOT/data/KEY   the bytes of tensor KEY, row-major; every tensor has a storage of its own
 * ROOT/version    "3\n"
 * central directory, end records
 *
 * The container writes the flat dict {name: tensor} in the order of out->tensors: one file, or a
 * directory as transformers had it, pytorch_model.bin or pytorch_model-0000i-of-0000N.bin with
 * pytorch_model.bin.index.json, and config.json; optimizer state goes to a file of its own,
 * optimizer.bin, so that whoever loads the model finds its weights and nothing else. A quantisation policy
 * makes each dict an OrderedDict with attributes (pickle_policy.h).
 * Source: torch-formats.md sections 3 and 5, caffe2/serialize/inline_container.cc. */
#include "torch_write.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "checked.h"
#include "hf_files.h"
#include "pickle.h"
#include "pickle_policy.h"

#define STEM "pytorch_model"
#define SUFFIX ".bin"
#define BATCH 1000 /* items per SETITEMS, as Python does */

/* Literal ids: seg.a is the file, seg.b what lies before record b (n_records: the end), or: */
#define LIT_TEXT UINT32_MAX

typedef struct archive {
    const uint8_t *text; /* data.pkl and byteorder as records, or the whole of a text file */
    size_t len;
    ckpt_zip_record first[2]; /* those two */
    uint64_t *header, *size;  /* of the records data/i: local header, payload bytes */
    /* Filled by the literal after each payload: the directory at the end needs all of them, and the
     * literals of a file are made in file order. */
    uint32_t *crc;
    size_t n;
} archive;

typedef struct ckpt_pt_files {
    archive *file;
} ckpt_pt_files;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory planning torch files");
}

/* ---- literals ------------------------------------------------------------------------------- */

typedef struct record_name {
    char text[48];
} record_name;

static ckpt_zip_record record_at(const archive *a, size_t i, record_name *name)
{
    snprintf(name->text, sizeof name->text, CKPT_ZIP_ROOT "/data/%zu", i);
    return (ckpt_zip_record){
        .name = name->text, .size = a->size[i], .header = a->header[i], .crc = a->crc[i]};
}

/* version and the directory; byte 0 of b is byte `at` of the archive. */
static void put_last(ckpt_buf *b, const archive *a, uint64_t at)
{
    ckpt_zip_record version = {.name = CKPT_ZIP_ROOT "/version"};
    record_name name = {.text = ""};
    ckpt_zip_put_record(b, at + b->len, &version, "3\n", 2);
    uint64_t from = at + b->len;
    ckpt_zip_put_central(b, &a->first[0]);
    ckpt_zip_put_central(b, &a->first[1]);
    for (size_t i = 0; i < a->n; i++) {
        ckpt_zip_record r = record_at(a, i, &name);
        ckpt_zip_put_central(b, &r);
    }
    ckpt_zip_put_central(b, &version);
    ckpt_zip_put_end(b, a->n + 3, at + b->len - from, from);
}

/* What lies before the payload of record i, or after the last one; it starts at offset `at`. */
static void put_between(ckpt_buf *b, const archive *a, size_t i, uint64_t at)
{
    record_name name = {.text = ""};
    if (i == 0) {
        ckpt_buf_append(b, a->text, a->len);
    } else {
        ckpt_zip_record r = record_at(a, i - 1, &name);
        ckpt_zip_put_descriptor(b, &r);
    }
    if (i == a->n) {
        put_last(b, a, at);
    } else {
        ckpt_zip_record r = record_at(a, i, &name);
        ckpt_zip_put_local(b, &r);
    }
}

static bool write_literal(const ckpt_sink *sink, uint32_t file, const ckpt_seg *seg, uint32_t crc,
                          uint8_t *out)
{
    const ckpt_pt_files *files = sink->self;
    archive *a = &files->file[seg->a];
    ckpt_buf b = {0};
    (void)file;
    if (seg->b == LIT_TEXT) {
        memcpy(out, a->text, (size_t)seg->len);
        return true;
    }
    if (seg->b > 0 && a->size[seg->b - 1] > 0) /* an empty payload has no segment and no CRC */
        a->crc[seg->b - 1] = crc;
    put_between(&b, a, seg->b, seg->offset);
    bool ok = !b.failed && b.len == seg->len;
    if (ok)
        memcpy(out, b.data, b.len);
    ckpt_buf_release(&b);
    return ok;
}

/* ---- planning a file ------------------------------------------------------------------------ */

ckpt_status ckpt_pt_begin(ckpt_pt_writer *w, ckpt_out *out, ckpt_sink *sink, size_t max_files,
                          ckpt_err *err)
{
    *w = (ckpt_pt_writer){.out = out, .sink = sink, .max_files = max_files};
    w->files = ckpt_arena_alloc(&sink->arena, sizeof *w->files);
    sink->files = ckpt_arena_array(&sink->arena, max_files, sizeof *sink->files);
    if (w->files == NULL || sink->files == NULL)
        return no_memory(err);
    w->files->file = ckpt_arena_array(&sink->arena, max_files, sizeof *w->files->file);
    if (w->files->file == NULL)
        return no_memory(err);
    sink->n_files = 0;
    sink->self = w->files;
    sink->literal = write_literal;
    sink->manifest_dir = "";
    return CKPT_OK;
}

/* Take the next file of the sink, with room for n segments. Releases the text after copying. */
static ckpt_status next_file(ckpt_pt_writer *w, const char *name, ckpt_buf *text, size_t n,
                             ckpt_out_file **file, archive **a, ckpt_err *err)
{
    ckpt_sink *sink = w->sink;
    if (sink->n_files == w->max_files) {
        ckpt_buf_release(text);
        return ckpt_fail(err, CKPT_E_INTERNAL, "more than %zu torch files", w->max_files);
    }
    *a = &w->files->file[sink->n_files];
    *file = &sink->files[sink->n_files++];
    (*a)->len = text->len;
    (*a)->text = text->failed ? NULL : ckpt_arena_memdup(&sink->arena, text->data, text->len);
    ckpt_buf_release(text);
    (*file)->name = name;
    (*file)->segs = ckpt_arena_array(&sink->arena, n, sizeof *(*file)->segs);
    return name != NULL && (*a)->text != NULL && (*file)->segs != NULL ? CKPT_OK : no_memory(err);
}

static void add_seg(ckpt_out_file *f, ckpt_seg_kind kind, uint32_t a, uint32_t b, uint64_t len)
{
    f->segs[f->n_segs++] = (ckpt_seg){.offset = f->size,
                                      .len = len,
                                      .a = a,
                                      .b = b,
                                      .kind = (uint8_t)kind,
                                      .crc = kind == CKPT_SEG_CHUNK};
    f->size += len;
}

ckpt_status ckpt_pt_text(ckpt_pt_writer *w, const char *name, ckpt_buf *text, ckpt_err *err)
{
    ckpt_out_file *f;
    archive *a;
    uint32_t index = (uint32_t)w->sink->n_files;
    ckpt_status status = next_file(w, name, text, 1, &f, &a, err);
    if (status == CKPT_OK && a->len > 0)
        add_seg(f, CKPT_SEG_LITERAL, index, LIT_TEXT, a->len);
    return status;
}

static ckpt_status payload_bytes(const ckpt_pt_writer *w, const ckpt_pt_payload *p, uint64_t *bytes,
                                 ckpt_err *err)
{
    const ckpt_out_tensor *t = &w->out->tensors[p->tensor];
    int64_t numel;
    if (!ckpt_numel(t->rank, t->chunks[p->chunk].len, &numel) ||
        !ckpt_dtype_bytes(t->dtype, numel, bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.300s': size overflows", t->name);
    return CKPT_OK;
}

/* The payloads [first, *next) of record i. */
static ckpt_status size_record(const ckpt_pt_writer *w, archive *a, size_t i,
                               const ckpt_pt_payload *payloads, size_t n, size_t first,
                               size_t *next, ckpt_err *err)
{
    a->size[i] = 0;
    for (*next = first; *next < n && (*next == first || payloads[*next].more); ++*next) {
        uint64_t bytes;
        ckpt_status status = payload_bytes(w, &payloads[*next], &bytes, err);
        if (status != CKPT_OK)
            return status;
        if (!ckpt_add_u64(a->size[i], bytes, &a->size[i]) || a->size[i] > INT64_MAX / 2)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.300s': size overflows",
                             w->out->tensors[payloads[*next].tensor].name);
    }
    return CKPT_OK;
}

static ckpt_status place_payloads(ckpt_pt_writer *w, ckpt_out_file *f, uint32_t index,
                                  const ckpt_pt_payload *payloads, size_t n, ckpt_err *err)
{
    bool begun = false;
    for (size_t k = 0; k < n; k++) {
        const ckpt_pt_payload *p = &payloads[k];
        uint64_t bytes;
        ckpt_status status = payload_bytes(w, p, &bytes, err);
        if (status != CKPT_OK)
            return status;
        ckpt_out_chunk *chunk = &w->out->tensors[p->tensor].chunks[p->chunk];
        if (!p->copy) {
            chunk->file = index;
            chunk->offset = f->size;
        }
        if (bytes == 0)
            continue;
        add_seg(f, CKPT_SEG_CHUNK, p->tensor, p->chunk, bytes);
        f->segs[f->n_segs - 1].more = begun;
        f->segs[f->n_segs - 1].copy = p->copy;
        begun = true;
    }
    return CKPT_OK;
}

/* Literals and payloads in file order; the lengths of literals do not depend on the CRCs. */
static ckpt_status place_records(ckpt_pt_writer *w, ckpt_out_file *f, archive *a, uint32_t index,
                                 const ckpt_pt_payload *payloads, size_t n, ckpt_err *err)
{
    ckpt_buf b = {0};
    ckpt_status status = CKPT_OK;
    for (size_t i = 0, at = 0, next = 0; i <= a->n; i++, at = next) {
        ckpt_buf_clear(&b);
        if (i < a->n) {
            CKPT_CHECK(size_record(w, a, i, payloads, n, at, &next, err));
            /* The local header follows the descriptor of the record before. */
            record_name name = {.text = ""};
            ckpt_zip_record before = i > 0 ? record_at(a, i - 1, &name) : a->first[0];
            if (i > 0)
                ckpt_zip_put_descriptor(&b, &before);
            a->header[i] = f->size + (i > 0 ? b.len : a->len);
            ckpt_buf_clear(&b);
        }
        put_between(&b, a, i, f->size);
        if (b.failed) {
            status = no_memory(err);
            goto done;
        }
        add_seg(f, CKPT_SEG_LITERAL, index, (uint32_t)i, b.len);
        if (i == a->n)
            break;
        if (a->size[i] > INT64_MAX / 2 - f->size) {
            status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: file too large", f->name);
            goto done;
        }
        CKPT_CHECK(place_payloads(w, f, index, payloads + at, next - at, err));
    }
done:
    ckpt_buf_release(&b);
    return status;
}

ckpt_status ckpt_pt_archive(ckpt_pt_writer *w, const char *name, ckpt_buf *pickle,
                            const ckpt_pt_payload *payloads, size_t n_payloads, ckpt_err *err)
{
    ckpt_arena *arena = &w->sink->arena;
    ckpt_zip_record first[2] = {{.name = CKPT_ZIP_ROOT "/data.pkl"},
                                {.name = CKPT_ZIP_ROOT "/byteorder"}};
    ckpt_buf head = {0};
    ckpt_out_file *f;
    archive *a;
    uint32_t index = (uint32_t)w->sink->n_files;
    bool big = pickle->len >= UINT32_MAX || n_payloads >= LIT_TEXT;
    ckpt_zip_put_record(&head, 0, &first[0], big ? NULL : pickle->data, big ? 0 : pickle->len);
    ckpt_zip_put_record(&head, head.len, &first[1], "little", 6);
    head.failed |= pickle->failed;
    ckpt_buf_release(pickle);
    if (big) {
        ckpt_buf_release(&head);
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: too many tensors for one file", name);
    }
    ckpt_status status = next_file(w, name, &head, 2 * n_payloads + 1, &f, &a, err);
    if (status != CKPT_OK)
        return status;
    f->is_data = true;
    memcpy(a->first, first, sizeof first);
    for (size_t k = 0; k < n_payloads; k++)
        a->n += k == 0 || !payloads[k].more;
    a->header = ckpt_arena_array(arena, a->n, sizeof *a->header);
    a->size = ckpt_arena_array(arena, a->n, sizeof *a->size);
    a->crc = ckpt_arena_array(arena, a->n, sizeof *a->crc);
    if (a->header == NULL || a->size == NULL || a->crc == NULL)
        return no_memory(err);
    return place_records(w, f, a, index, payloads, n_payloads, err);
}

/* ---- the container -------------------------------------------------------------------------- */

ckpt_status ckpt_pt_check(const ckpt_out_tensor *t, const ckpt_out_chunk *c, ckpt_err *err)
{
    const ckpt_dtype_info *info = ckpt_dtype_get(t->dtype);
    ckpt_buf scratch = {0};
    if (info->torch == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.300s': torch has no dtype for %s",
                         t->name, info->name);
    bool ok = ckpt_zip_put_tensor(&scratch, t->dtype, t->rank, c->len, 0);
    ckpt_buf_release(&scratch);
    if (ok)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     info->bits == 4 ? "tensor '%.300s': float4 elements that are not whole pairs "
                                       "along the last axis"
                                     : "tensor '%.300s': size overflows",
                     t->name);
}

typedef struct writer {
    ckpt_pt_writer pt;
    ckpt_out *out;
    uint32_t *shard;            /* of every tensor; n_shards: the optimizer's file */
    uint32_t n_shards;          /* of the weights */
    uint32_t n_files;           /* with the optimizer's */
    const char **names;         /* of the files */
    uint64_t bytes, parameters; /* of the weights */
    ckpt_err *err;
} writer;

/* Kept apart from the weights. */
static bool apart(const writer *w, size_t i)
{
    return w->out->tensors[i].optimizer && !w->out->single_file;
}

static ckpt_status admit_tensor(writer *w, size_t i, uint64_t *bytes)
{
    const ckpt_out_tensor *t = &w->out->tensors[i];
    int64_t numel;
    if (t->n_chunks != 1)
        return ckpt_fail(w->err, CKPT_E_INTERNAL,
                         "tensor '%.160s': expected one chunk for torch, found %zu", t->name,
                         t->n_chunks);
    if (t->name[0] == '\0')
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "torch cannot store a tensor without name");
    ckpt_status status = ckpt_pt_check(t, &t->chunks[0], w->err);
    if (status != CKPT_OK)
        return status;
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, bytes))
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "tensor '%.160s': size overflows", t->name);
    if (!apart(w, i) && (!ckpt_add_u64(w->bytes, *bytes, &w->bytes) ||
                         !ckpt_add_u64(w->parameters, (uint64_t)numel, &w->parameters)))
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "total size exceeds 2^64 bytes");
    return CKPT_OK;
}

static ckpt_status name_files(writer *w)
{
    static const char single[] = "data.pt"; /* the caller knows the real name */
    ckpt_arena *arena = &w->pt.sink->arena;
    w->names = ckpt_arena_array(arena, w->n_files, sizeof *w->names);
    if (w->names == NULL)
        return no_memory(w->err);
    for (uint32_t i = 0; i < w->n_files; i++) {
        w->names[i] = w->out->single_file ? single
                      : i == w->n_shards
                          ? CKPT_PT_OPTIMIZER
                          : ckpt_hf_shard_name(arena, STEM, SUFFIX, i, w->n_shards, false);
        if (w->names[i] == NULL)
            return no_memory(w->err);
    }
    return CKPT_OK;
}

/* The file of every tensor. */
static ckpt_status assign(writer *w)
{
    ckpt_out *out = w->out;
    ckpt_arena *arena = &w->pt.sink->arena;
    ckpt_status status = CKPT_OK;
    size_t n = 0;
    if (out->n_objects > 0)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "object '%.160s': a state dict holds tensors",
                         out->objects[0].name);
    if (out->n_tensors >= UINT32_MAX)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "more than 2^32 tensors");
    uint64_t *bytes = ckpt_arena_array(arena, out->n_tensors, sizeof *bytes);
    uint32_t *shard = ckpt_arena_array(arena, out->n_tensors, sizeof *shard);
    w->shard = ckpt_arena_array(arena, out->n_tensors, sizeof *w->shard);
    if (bytes == NULL || shard == NULL || w->shard == NULL)
        return no_memory(w->err);
    for (size_t i = 0; i < out->n_tensors; i++) {
        CKPT_CHECK(admit_tensor(w, i, &bytes[n]));
        n += !apart(w, i);
    }
    bool whole = out->max_shard_bytes == 0 || out->single_file;
    ckpt_hf_shards s = {.limit = whole ? UINT64_MAX : out->max_shard_bytes,
                        .header_max = UINT64_MAX,
                        .bytes = bytes,
                        .n = n,
                        .shard = shard};
    CKPT_CHECK(ckpt_hf_assign(&s, w->err));
    w->n_shards = s.n_shards;
    w->n_files = s.n_shards + (n < out->n_tensors);
    n = 0;
    for (size_t i = 0; i < out->n_tensors; i++)
        w->shard[i] = apart(w, i) ? w->n_shards : shard[n++];
    status = name_files(w);
done:
    return status;
}

/* One shard: {name: tensor, ...}, an OrderedDict where it has the attributes of a policy. first: tensors by shard,
 * `n` of them. */
static ckpt_status put_shard(writer *w, uint32_t shard, const ckpt_pt_payload *first, size_t n)
{
    const bool policy = ckpt_pkl_has_policy(w->out->metadata);
    ckpt_buf b = {0};
    ckpt_pkl_begin(&b);
    if (policy)
        ckpt_pkl_put_global(&b, "collections", "OrderedDict");
    ckpt_buf_puts(&b, policy ? ")R" : "}"); /* EMPTY_TUPLE REDUCE, EMPTY_DICT */
    for (size_t i = 0; i < n; i++) {
        const ckpt_out_tensor *t = &w->out->tensors[first[i].tensor];
        if (i % BATCH == 0)
            ckpt_buf_puts(&b, i > 0 ? "u(" : "(");
        ckpt_pkl_put_str(&b, t->name);
        if (!ckpt_zip_put_tensor(&b, t->dtype, t->rank, t->dims, i))
            b.failed = true; /* refused by admit() already */
    }
    if (n > 0)
        ckpt_buf_putc(&b, 'u');
    if (policy) { /* EMPTY_DICT MARK ... SETITEMS BUILD */
        ckpt_buf_puts(&b, "}(");
        ckpt_pkl_put_policy(&b, w->out->metadata);
        ckpt_buf_puts(&b, "ub");
    }
    ckpt_pkl_end(&b);
    return ckpt_pt_archive(&w->pt, w->names[shard], &b, first, n, w->err);
}

static ckpt_status put_shards(writer *w)
{
    ckpt_status status = CKPT_OK;
    size_t n = w->out->n_tensors, at = 0;
    ckpt_pt_payload *list = ckpt_arena_array(&w->pt.sink->arena, n, sizeof *list);
    size_t *start = ckpt_arena_array(&w->pt.sink->arena, (size_t)w->n_files + 1, sizeof *start);
    if (list == NULL || start == NULL)
        return no_memory(w->err);
    for (size_t i = 0; i < n; i++)
        start[w->shard[i] + 1]++;
    for (uint32_t s = 0; s < w->n_files; s++)
        start[s + 1] += start[s];
    for (size_t i = 0; i < n; i++)
        list[start[w->shard[i]]++] = (ckpt_pt_payload){.tensor = (uint32_t)i};
    /* Filling moved every start to the next shard's. */
    for (uint32_t s = 0; status == CKPT_OK && s < w->n_files; at = start[s++])
        status = put_shard(w, s, list + at, start[s] - at);
    return status;
}

static ckpt_status put_index(writer *w)
{
    size_t n = 0;
    ckpt_buf text = {0};
    ckpt_hf_weight *weights =
        ckpt_arena_array(&w->pt.sink->arena, w->out->n_tensors, sizeof *weights);
    if (weights == NULL)
        return no_memory(w->err);
    for (size_t i = 0; i < w->out->n_tensors; i++)
        if (!apart(w, i))
            weights[n++] = (ckpt_hf_weight){w->out->tensors[i].name, w->names[w->shard[i]]};
    ckpt_hf_index_text(&text, weights, n, NULL, 0, w->parameters, w->bytes);
    return ckpt_pt_text(&w->pt, STEM SUFFIX ".index.json", &text, w->err);
}

ckpt_status ckpt_torch_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    writer w = {.out = out, .err = err, .pt = {.sink = sink}};
    ckpt_buf config = {0};
    ckpt_status status;
    CKPT_CHECK(assign(&w));
    CKPT_CHECK(ckpt_pt_begin(&w.pt, out, sink, (size_t)w.n_files + 2, err));
    CKPT_CHECK(put_shards(&w));
    if (out->single_file)
        goto done;
    if (w.n_shards > 1)
        CKPT_CHECK(put_index(&w));
    if (out->config != NULL) {
        ckpt_hf_config_text(&config, out->config);
        bool megatron = out->config_kind == CKPT_CONFIG_MEGATRON;
        status =
            ckpt_pt_text(&w.pt, megatron ? CKPT_HF_MEGATRON_ARGS : "config.json", &config, err);
    }
done:
    return status;
}
