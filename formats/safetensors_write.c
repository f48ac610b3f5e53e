/* safetensors writer: plans one file, or a Hugging Face directory.
 *
 * Header bytes are those of the reference serializer (torch-formats.md section 5, "Serializer"):
 * tensors sorted by dtype, then name bytewise; compact JSON with `__metadata__` first; spaces until
 * the length is a multiple of 8. Shards are filled greedily in the order of out->tensors, names and
 * index as transformers writes them. Optimizer state goes into files of its own, optimizer-*, with an
 * index of its own that readers of weights do not look at. Only the bytes of headers, indexes and
 * config are made here. */
#include "st_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "hf_files.h"
#include "le.h"
#include "st_header.h"

/* More than `,"name":{"dtype":"F8_E5M2FNUZ","shape":[],"data_offsets":[,]}` without name and
 * numbers; a number has at most 20 digits and a comma. */
#define ENTRY_TEXT 72
#define NUMBER_TEXT 21

typedef struct literal {
    uint8_t *data;
    size_t len;
} literal;

/* Place of one output tensor. */
typedef struct item {
    const char *name;
    uint64_t bytes, numel;
    uint32_t tensor;
    uint32_t shard; /* 0-based, in file name order */
    ckpt_dtype dtype;
} item;

typedef struct literals {
    literal *items;
    uint32_t n;
} literals;

/* The writer of one set of files: the weights, or the optimizer state. */
typedef struct writer {
    ckpt_out *out;
    ckpt_sink *sink;
    const char *stem; /* of file names: "model" or "optimizer" */
    bool optimizer;
    item *items; /* by shard, then header order */
    size_t n;
    uint32_t base; /* file of the first shard */
    uint32_t n_shards;
    const char **shard_names;
    literals *literals;      /* of the whole sink */
    const ckpt_json *extras; /* user metadata, or NULL */
} writer;

static bool copy_literal(const ckpt_sink *sink, uint32_t file, const ckpt_seg *seg, uint32_t crc,
                         uint8_t *out)
{
    (void)file;
    (void)crc;
    memcpy(out, ((const literals *)sink->self)->items[seg->a].data, (size_t)seg->len);
    return true;
}

static const uint8_t *stored_literal(const ckpt_sink *sink, const ckpt_seg *seg)
{
    return (const uint8_t *)((const literals *)sink->self)->items[seg->a].data;
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory planning safetensors files");
}

/* ---- admission ------------------------------------------------------------------------------ */

static bool is_utf8(const char *s)
{
    for (size_t i = 0, n = strlen(s), len; i < n; i += len)
        if ((len = ckpt_utf8_len(s + i, n - i)) == 0)
            return false;
    return true;
}

static ckpt_status admit_tensor(const ckpt_out_tensor *t, item *it, ckpt_err *err)
{
    const ckpt_dtype_info *info = ckpt_dtype_get(t->dtype);
    int64_t numel;
    if (!info->safetensors)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "dtype %s has no safetensors form: cast it or choose another container",
                         info->name);
    if (!is_utf8(t->name) || strcmp(t->name, "__metadata__") == 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "safetensors cannot store this name");
    if (t->n_chunks != 1)
        return ckpt_fail(err, CKPT_E_INTERNAL, "expected one chunk for safetensors, found %zu",
                         t->n_chunks);
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &it->bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s elements do not fill a whole number of bytes, or too many",
                         info->name);
    it->name = t->name;
    it->dtype = t->dtype;
    it->numel = (uint64_t)numel;
    return CKPT_OK;
}

static ckpt_status admit(writer *w, ckpt_err *err)
{
    const ckpt_out *out = w->out;
    ckpt_status status = CKPT_OK;
    if (out->n_objects > 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "object '%.160s': safetensors holds only tensors",
                         out->objects[0].name);
    if (out->n_tensors >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "more than 2^32 tensors");
    for (const ckpt_json *m = ckpt_json_child(w->extras); m != NULL; m = ckpt_json_next(m))
        if (ckpt_json_string(m) == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "metadata '%.160s': safetensors holds only strings", ckpt_json_key(m));
    w->items = ckpt_arena_array(&w->sink->arena, out->n_tensors, sizeof *w->items);
    if (w->items == NULL)
        return no_memory(err);
    for (size_t i = 0; i < out->n_tensors; i++) {
        if ((out->tensors[i].optimizer && !out->single_file) != w->optimizer)
            continue;
        w->items[w->n].tensor = (uint32_t)i;
        CKPT_TRY(admit_tensor(&out->tensors[i], &w->items[w->n++], err), "tensor '%.160s'",
                 out->tensors[i].name);
    }
done:
    return status;
}

/* ---- shards --------------------------------------------------------------------------------- */

static uint64_t quoted_length(const char *s)
{
    uint64_t n = 2;
    for (; *s != '\0'; s++)
        n += (unsigned char)*s < 0x20 ? 6 : *s == '"' || *s == '\\' ? 2 : 1;
    return n;
}

static uint64_t entry_bound(const writer *w, const item *it)
{
    return ENTRY_TEXT + quoted_length(it->name) +
           NUMBER_TEXT * ((uint64_t)w->out->tensors[it->tensor].rank + 2);
}

static uint64_t metadata_bound(const writer *w)
{
    uint64_t n = 64;
    for (const ckpt_json *m = ckpt_json_child(w->extras); m != NULL; m = ckpt_json_next(m))
        n += quoted_length(ckpt_json_key(m)) + quoted_length(ckpt_json_string(m)) + 2;
    return n;
}

static ckpt_status assign_shards(writer *w, ckpt_err *err)
{
    ckpt_arena *arena = &w->sink->arena;
    uint64_t *bytes = ckpt_arena_array(arena, w->n, sizeof *bytes);
    uint64_t *entries = ckpt_arena_array(arena, w->n, sizeof *entries);
    uint32_t *shard = ckpt_arena_array(arena, w->n, sizeof *shard);
    if (bytes == NULL || entries == NULL || shard == NULL)
        return no_memory(err);
    for (size_t i = 0; i < w->n; i++) {
        bytes[i] = w->items[i].bytes;
        entries[i] = entry_bound(w, &w->items[i]);
    }
    ckpt_hf_shards s = {.limit =
                            w->out->max_shard_bytes == 0 ? UINT64_MAX : w->out->max_shard_bytes,
                        .header = metadata_bound(w),
                        .header_max = CKPT_ST_HEADER_MAX,
                        .bytes = bytes,
                        .entries = entries,
                        .n = w->n,
                        .shard = shard};
    ckpt_status status = ckpt_hf_assign(&s, err);
    for (size_t i = 0; status == CKPT_OK && i < w->n; i++)
        w->items[i].shard = shard[i];
    w->n_shards = s.n_shards;
    return status;
}

static ckpt_status name_shards(writer *w, ckpt_err *err)
{
    ckpt_arena *arena = &w->sink->arena;
    w->shard_names = ckpt_arena_array(arena, w->n_shards, sizeof *w->shard_names);
    if (w->shard_names == NULL)
        return no_memory(err);
    for (uint32_t i = 0; i < w->n_shards; i++) {
        w->shard_names[i] =
            ckpt_hf_shard_name(arena, w->stem, ".safetensors", i, w->n_shards, w->optimizer);
        if (w->shard_names[i] == NULL)
            return no_memory(err);
    }
    return CKPT_OK;
}

static int compare_items(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    if (x->dtype != y->dtype)
        return x->dtype < y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* ---- literals ------------------------------------------------------------------------------- */

/* Keep a copy of the text as a literal and release the buffer. */
static ckpt_status keep(writer *w, ckpt_buf *text, uint32_t *id, ckpt_err *err)
{
    literal *l = &w->literals->items[w->literals->n];
    l->data = text->failed ? NULL : ckpt_arena_memdup(&w->sink->arena, text->data, text->len);
    l->len = text->len;
    ckpt_buf_release(text);
    if (l->data == NULL)
        return no_memory(err);
    *id = w->literals->n++;
    return CKPT_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(ckpt_json_key(*(const ckpt_json *const *)a),
                  ckpt_json_key(*(const ckpt_json *const *)b));
}

/* Extras in key order; count in *n. */
static ckpt_status sorted_extras(const writer *w, const ckpt_json ***out, size_t *n, ckpt_err *err)
{
    size_t count = w->extras == NULL ? 0 : (size_t)ckpt_json_size(w->extras);
    *out = ckpt_arena_array(&w->sink->arena, count, sizeof **out);
    *n = 0;
    if (*out == NULL)
        return no_memory(err);
    for (const ckpt_json *m = ckpt_json_child(w->extras); m != NULL; m = ckpt_json_next(m))
        (*out)[(*n)++] = m;
    if (count > 1)
        qsort(*out, count, sizeof **out, compare_keys);
    return CKPT_OK;
}

/* {"format":"pt"} and, in a model of one file, the extras; a "format" among them wins. */
static ckpt_status put_metadata(const writer *w, ckpt_buf *b, ckpt_err *err)
{
    const ckpt_json **extras;
    size_t n;
    const char *format = ckpt_json_string(ckpt_json_get(w->extras, "format"));
    bool done = false;
    ckpt_status status = sorted_extras(w, &extras, &n, err);
    if (status != CKPT_OK)
        return status;
    ckpt_buf_puts(b, "\"__metadata__\":{");
    size_t start = b->len;
    for (size_t i = 0; i <= n; i++) {
        const char *key = i < n ? ckpt_json_key(extras[i]) : NULL;
        if (!done && (key == NULL || strcmp(key, "format") >= 0)) {
            ckpt_buf_puts(b, b->len > start ? ",\"format\":" : "\"format\":");
            ckpt_st_quote(b, format == NULL ? "pt" : format, false);
            done = true;
        }
        if (key == NULL || w->n_shards > 1 || strcmp(key, "format") == 0)
            continue;
        if (b->len > start)
            ckpt_buf_putc(b, ',');
        ckpt_st_quote(b, key, false);
        ckpt_buf_putc(b, ':');
        ckpt_st_quote(b, ckpt_json_string(extras[i]), false);
    }
    ckpt_buf_putc(b, '}');
    return CKPT_OK;
}

static void put_entry(ckpt_buf *b, const item *it, const ckpt_out_tensor *t, uint64_t begin)
{
    ckpt_buf_putc(b, ',');
    ckpt_st_quote(b, it->name, false);
    ckpt_buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", ckpt_dtype_get(it->dtype)->name);
    for (int i = 0; i < t->rank; i++)
        ckpt_buf_printf(b, i == 0 ? "%" PRId64 : ",%" PRId64, t->dims[i]);
    ckpt_buf_printf(b, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", begin, begin + it->bytes);
}

/* Length, JSON and padding of the shard that consists of items [first, last). */
static ckpt_status put_header(const writer *w, size_t first, size_t last, ckpt_buf *b,
                              uint64_t *data_size, ckpt_err *err)
{
    uint64_t at = 0, end;
    ckpt_buf_append(b, "\0\0\0\0\0\0\0\0{", 9);
    ckpt_status status = put_metadata(w, b, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = first; i < last; i++) {
        const item *it = &w->items[i];
        if (!ckpt_add_u64(at, it->bytes, &end) || end > INT64_MAX - 2 * CKPT_ST_HEADER_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.160s': file exceeds 2^63 bytes",
                             it->name);
        put_entry(b, it, &w->out->tensors[it->tensor], at);
        at = end;
    }
    ckpt_buf_putc(b, '}');
    while (!b->failed && b->len % 8 != 0)
        ckpt_buf_putc(b, ' ');
    if (b->failed)
        return no_memory(err);
    if (b->len - 8 > CKPT_ST_HEADER_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "header would have %zu bytes, above the limit of %" PRIu64
                         ": write a directory of shards",
                         b->len - 8, CKPT_ST_HEADER_MAX);
    ckpt_put_u64(b->data, b->len - 8);
    *data_size = at;
    return CKPT_OK;
}

static ckpt_status plan_shard(writer *w, uint32_t shard, size_t first, size_t last, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_out_file *file = &w->sink->files[w->base + shard];
    uint64_t data_size = 0;
    uint32_t id;
    ckpt_status status;
    CKPT_CHECK(put_header(w, first, last, &text, &data_size, err));
    uint64_t at = text.len;
    file->segs = ckpt_arena_array(&w->sink->arena, last - first + 1, sizeof *file->segs);
    if (file->segs == NULL) {
        status = no_memory(err);
        goto done;
    }
    CKPT_CHECK(keep(w, &text, &id, err));
    *file = (ckpt_out_file){.name = w->shard_names[shard],
                            .size = at + data_size,
                            .segs = file->segs,
                            .n_segs = last - first + 1,
                            .is_data = true};
    file->segs[0] = (ckpt_seg){.len = at, .a = id, .kind = CKPT_SEG_LITERAL};
    for (size_t i = first; i < last; i++) {
        const item *it = &w->items[i];
        ckpt_out_chunk *chunk = &w->out->tensors[it->tensor].chunks[0];
        chunk->file = w->base + shard;
        chunk->offset = at;
        file->segs[i - first + 1] =
            (ckpt_seg){.offset = at, .len = it->bytes, .a = it->tensor, .kind = CKPT_SEG_CHUNK};
        at += it->bytes;
    }
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status plan_text(writer *w, const char *name, ckpt_buf *text, ckpt_err *err)
{
    ckpt_out_file *file = &w->sink->files[w->sink->n_files];
    uint32_t id;
    *file = (ckpt_out_file){.name = name, .size = text->len, .n_segs = 1};
    file->segs = ckpt_arena_array(&w->sink->arena, 1, sizeof *file->segs);
    ckpt_status status = keep(w, text, &id, err);
    if (status != CKPT_OK || file->segs == NULL)
        return no_memory(err);
    file->segs[0] = (ckpt_seg){.len = file->size, .a = id, .kind = CKPT_SEG_LITERAL};
    w->sink->n_files++;
    return CKPT_OK;
}

static ckpt_status plan_config(writer *w, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_hf_config_text(&text, w->out->config);
    bool megatron = w->out->config_kind == CKPT_CONFIG_MEGATRON;
    return plan_text(w, megatron ? CKPT_HF_MEGATRON_ARGS : "config.json", &text, err);
}

/* Beside a configuration that quantises as ModelOpt does: the file of its export that some servers read in place
 * of that, {"producer", "quantization": {"quant_algo", "kv_cache_quant_algo", "group_size",
 * "exclude_modules"}}. */
static ckpt_status plan_modelopt(writer *w, ckpt_err *err)
{
    const ckpt_json *from = ckpt_json_get(w->out->config, "quantization_config");
    const char *method = ckpt_json_string(ckpt_json_get(from, "quant_method"));
    ckpt_json *file, *q;
    ckpt_buf text = {0};
    if (w->out->config_kind == CKPT_CONFIG_MEGATRON || method == NULL ||
        strcmp(method, "modelopt") != 0)
        return CKPT_OK;
    const struct {
        const char *key;
        const ckpt_json *value;
    } parts[] = {
        {"quant_algo",      ckpt_json_get(from,  "quant_algo")                              },
        {"group_size",      ckpt_json_path(from, "config_groups.group_0.weights.group_size")},
        {"exclude_modules", ckpt_json_get(from,  "ignore")                                  },
    };
    file = ckpt_json_new_object();
    q = file != NULL ? ckpt_json_new_object() : NULL;
    bool made = q != NULL && ckpt_json_set(file, "quantization", q);
    made = made && ckpt_json_set(q, "kv_cache_quant_algo", ckpt_json_new_null());
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (made && parts[i].value != NULL)
            made = ckpt_json_set(q, parts[i].key, ckpt_json_dup(parts[i].value));
    const ckpt_json *producer = ckpt_json_get(from, "producer");
    if (made && producer != NULL)
        made = ckpt_json_set(file, "producer", ckpt_json_dup(producer));
    if (made)
        ckpt_hf_config_text(&text, file);
    ckpt_json_free(file);
    if (!made) {
        ckpt_buf_release(&text);
        return no_memory(err);
    }
    return plan_text(w, "hf_quant_config.json", &text, err);
}

/* ---- index ---------------------------------------------------------------------------------- */

/* total_parameters counts the elements of every tensor. */
static ckpt_status plan_index(writer *w, ckpt_err *err)
{
    ckpt_buf b = {0};
    const ckpt_json **extras;
    size_t n_extras;
    uint64_t parameters = 0, bytes = 0;
    ckpt_hf_weight *weights = ckpt_arena_array(&w->sink->arena, w->n, sizeof *weights);
    if (weights == NULL)
        return no_memory(err);
    ckpt_status status = sorted_extras(w, &extras, &n_extras, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < w->n; i++) {
        weights[i] = (ckpt_hf_weight){w->items[i].name, w->shard_names[w->items[i].shard]};
        if (!ckpt_add_u64(bytes, w->items[i].bytes, &bytes) ||
            !ckpt_add_u64(parameters, w->items[i].numel, &parameters))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "total size exceeds 2^64 bytes");
    }
    ckpt_hf_index_text(&b, weights, w->n, extras, n_extras, parameters, bytes);
    const char *name = w->optimizer ? CKPT_ST_OPTIMIZER_INDEX : "model.safetensors.index.json";
    return plan_text(w, name, &b, err);
}

/* ---- layout --------------------------------------------------------------------------------- */

static ckpt_status plan_files(writer *w, ckpt_err *err)
{
    ckpt_sink *sink = w->sink;
    size_t first = 0;
    w->base = (uint32_t)sink->n_files;
    if (w->n > 1)
        qsort(w->items, w->n, sizeof *w->items, compare_items);
    for (uint32_t shard = 0; shard < w->n_shards; shard++) {
        size_t last = first;
        while (last < w->n && w->items[last].shard == shard)
            last++;
        ckpt_status status = plan_shard(w, shard, first, last, err);
        if (status != CKPT_OK)
            return status;
        first = last;
    }
    sink->n_files += w->n_shards;
    return CKPT_OK;
}

static ckpt_status prepare(writer *w, ckpt_err *err)
{
    ckpt_status status;
    w->n_shards = 1;
    CKPT_CHECK(admit(w, err));
    if (!w->out->single_file)
        CKPT_CHECK(assign_shards(w, err));
    if (w->optimizer && w->n == 0)
        w->n_shards = 0;
    CKPT_CHECK(name_shards(w, err));
done:
    return status;
}

ckpt_status ckpt_safetensors_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    literals *kept = ckpt_arena_alloc(&sink->arena, sizeof *kept);
    writer w = {
        .out = out, .sink = sink, .stem = "model", .extras = out->metadata, .literals = kept};
    writer states = {
        .out = out, .sink = sink, .stem = "optimizer", .optimizer = true, .literals = kept};
    ckpt_status status;
    if (kept == NULL)
        return no_memory(err);
    sink->n_files = 0;
    CKPT_CHECK(prepare(&w, err));
    CKPT_CHECK(prepare(&states, err));
    size_t n_files = (size_t)w.n_shards + states.n_shards + 4;
    sink->files = ckpt_arena_array(&sink->arena, n_files, sizeof *sink->files);
    kept->items = ckpt_arena_array(&sink->arena, n_files, sizeof *kept->items);
    if (sink->files == NULL || kept->items == NULL)
        return no_memory(err);
    CKPT_CHECK(plan_files(&w, err));
    CKPT_CHECK(plan_files(&states, err));
    if (w.n_shards > 1)
        CKPT_CHECK(plan_index(&w, err));
    if (states.n_shards > 0)
        CKPT_CHECK(plan_index(&states, err));
    if (out->config != NULL && !out->single_file)
        CKPT_CHECK(plan_config(&w, err));
    if (out->config != NULL && !out->single_file)
        CKPT_CHECK(plan_modelopt(&w, err));
    sink->self = kept;
    sink->literal = copy_literal;
    sink->stored = stored_literal;
    sink->manifest_dir = "";
done:
    return status;
}
