/* The container "rank_safetensors": one set of safetensors files a tensor-parallel rank, as vLLM's
 * sharded-state loader reads and save_sharded_state writes them.
 *
 *   DIR/model-rank-{r}-part-{p}.safetensors    r, p from 0; parts of a rank split its tensors by size
 *   DIR/config.json
 *
 * Every rank has every parameter under its own name, of the shape that the rank holds: there is no
 * index, and the number of ranks is that of the files. Fused modules (qkv_proj, gate_up_proj, expert
 * stacks w13_weight and w2_weight) are taken apart when read; what is written is not fused. */
#include "source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "hf_files.h"
#include "io.h"
#include "le.h"
#include "policy.h"
#include "rank_hf.h"
#include "rank_join.h"
#include "st_header.h"
#include "st_internal.h"

#define STEM "model-rank-"
#define MAX_RANKS 65536
#define MAX_PARTS 1000000
#define MAX_EXPERTS 1000000
#define CONFIG_MAX ((uint64_t)64 << 20)

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static bool take_number(const char **p, int64_t limit, int64_t *out)
{
    const char *s = *p;
    *out = 0;
    if (*s < '0' || *s > '9' || (*s == '0' && s[1] >= '0' && s[1] <= '9'))
        return false;
    for (; *s >= '0' && *s <= '9'; s++) {
        *out = *out * 10 + (*s - '0');
        if (*out >= limit)
            return false;
    }
    *p = s;
    return true;
}

static bool parse_name(const char *name, int64_t *rank, int64_t *part)
{
    static const char middle[] = "-part-";
    if (strncmp(name, STEM, sizeof STEM - 1) != 0)
        return false;
    name += sizeof STEM - 1;
    if (!take_number(&name, MAX_RANKS, rank) || strncmp(name, middle, sizeof middle - 1) != 0)
        return false;
    name += sizeof middle - 1;
    return take_number(&name, MAX_PARTS, part) && strcmp(name, ".safetensors") == 0;
}

static ckpt_status probe(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    (void)err;
    int64_t rank, part;
    for (size_t i = 0; i < probe->n_names; i++)
        if (parse_name(probe->names[i], &rank, &part))
            *score = 2;
    return CKPT_OK;
}

/* ---- reading ---------------------------------------------------------------------------------- */

typedef struct reader {
    ckpt_source *src;
    ckpt_join join;
    ckpt_hf_sizes sizes;
    int64_t tp;
    ckpt_st_table table; /* of one rank */
    size_t n_padded;
} reader;

/* Rows [row, row + rows) of axis `axis` of an entry that is row-major; axis is its first but for
 * leading ones of extent 1. */
static ckpt_piece rows_of(const ckpt_st_entry *e, const char *name, int64_t row, int64_t rows)
{
    ckpt_piece p = {.name = name,
                    .rank = e->rank,
                    .dtype = (ckpt_dtype)e->dtype,
                    .offset = e->begin,
                    .file = e->file};
    uint64_t step = 1; /* an empty tensor may claim extents whose product wraps */
    for (int a = e->rank - 1; a >= 0; a--) {
        p.dims[a] = p.len[a] = e->dims[a];
        if (a > 0)
            step *= (uint64_t)e->dims[a];
    }
    if (e->rank > 0) {
        p.dims[0] = p.len[0] = rows;
        p.offset += (uint64_t)row * step * (uint64_t)ckpt_dtype_get(p.dtype)->bits / 8;
    }
    return p;
}

static ckpt_status put(reader *r, ckpt_piece *p, int axis, int64_t index, int64_t ways,
                       ckpt_err *err)
{
    if (p->name == NULL)
        return no_memory(err);
    if (axis >= 0) {
        if (axis >= p->rank || !ckpt_mul_i64(p->len[axis], ways, &p->dims[axis]))
            return ckpt_fail(err, CKPT_E_FORMAT, "rank %d, cut on axis %d", p->rank, axis);
        p->lo[axis] = p->len[axis] * index;
    }
    return ckpt_join_add(&r->join, p, err);
}

static ckpt_status put_vocab(reader *r, const ckpt_st_entry *e, int64_t rank, ckpt_err *err)
{
    int64_t total, rows = e->rank > 0 ? e->dims[0] : 0, v = r->sizes.vocab;
    if (!ckpt_mul_i64(rows, r->tp, &total))
        return ckpt_fail(err, CKPT_E_FORMAT, "%" PRId64 " rows", rows);
    int64_t lo = rows * rank, keep = rows;
    if (v > 0 && v < total)
        keep = lo >= v ? 0 : ckpt_min_i64(rows, v - lo);
    r->n_padded += keep < rows;
    if (keep == 0 && rows > 0)
        return CKPT_OK;
    ckpt_piece p = rows_of(e, e->name, 0, keep);
    p.lo[0] = lo;
    p.dims[0] = v > 0 && v < total ? v : total;
    return put(r, &p, -1, 0, 1, err);
}

/* Name with the fused module replaced by `module`. */
static const char *renamed(reader *r, const char *name, size_t part, size_t part_len,
                           const char *module)
{
    return ckpt_arena_printf(&r->src->arena, "%.*s%s%s", (int)part, name, module,
                             name + part + part_len);
}

static ckpt_status put_qkv(reader *r, const ckpt_st_entry *e, int64_t rank, size_t part,
                           size_t part_len, ckpt_err *err)
{
    static const char *const modules[] = {"q_proj", "k_proj", "v_proj"};
    ckpt_status status = CKPT_OK;
    const ckpt_hf_sizes *s = &r->sizes;
    int64_t kv_ways = ckpt_hf_kv_ways(s, r->tp), row = 0;
    int64_t rows = e->rank > 0 ? e->dims[0] : 0;
    if (s->heads == 0 || s->head_dim == 0 || s->heads % r->tp != 0 || s->kv_heads % kv_ways != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "config.json: %" PRId64 " heads, %" PRId64 " key/value heads of %" PRId64
                         " at TP %" PRId64,
                         s->heads, s->kv_heads, s->head_dim, r->tp);
    int64_t q = s->heads / r->tp * s->head_dim, kv = s->kv_heads / kv_ways * s->head_dim;
    if (q + 2 * kv != rows)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%" PRId64 " rows, expected %" PRId64 " by config.json", rows, q + 2 * kv);
    for (int i = 0; i < 3; i++) {
        int64_t n = i == 0 ? q : kv, ways = i == 0 ? r->tp : kv_ways;
        ckpt_piece p = rows_of(e, renamed(r, e->name, part, part_len, modules[i]), row, n);
        CKPT_CHECK(put(r, &p, 0, rank * ways / r->tp, ways, err));
        row += n;
    }
done:
    return status;
}

static ckpt_status put_gate_up(reader *r, const ckpt_st_entry *e, int64_t rank, size_t part,
                               size_t part_len, ckpt_err *err)
{
    static const char *const modules[] = {"gate_proj", "up_proj"};
    ckpt_status status = CKPT_OK;
    int64_t rows = e->rank > 0 ? e->dims[0] : 0;
    if (rows % 2 != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%" PRId64 " rows are no gate and up half", rows);
    for (int i = 0; i < 2; i++) {
        ckpt_piece p =
            rows_of(e, renamed(r, e->name, part, part_len, modules[i]), i * (rows / 2), rows / 2);
        CKPT_CHECK(put(r, &p, 0, rank, r->tp, err));
    }
done:
    return status;
}

/* Stacked experts [E, rows, cols]: gate and up halves of `rows`, or down. */
static ckpt_status put_experts(reader *r, const ckpt_st_entry *e, int64_t rank, size_t part,
                               bool down, ckpt_err *err)
{
    static const char *const modules[] = {"gate_proj", "up_proj", "down_proj"};
    ckpt_status status = CKPT_OK;
    int parts = down ? 1 : 2;
    if (e->rank != 3 || e->dims[0] > MAX_EXPERTS || e->dims[1] % parts != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "expected stacked experts, at most %d", MAX_EXPERTS);
    int64_t rows = e->dims[1] / parts, bits = ckpt_dtype_get((ckpt_dtype)e->dtype)->bits;
    for (int64_t x = 0; x < e->dims[0]; x++)
        for (int i = 0; i < parts; i++) {
            ckpt_piece p = {
                .rank = 2,
                .dims = {rows, e->dims[2]},
                .len = {rows, e->dims[2]},
                .dtype = (ckpt_dtype)e->dtype,
                .file = e->file
            };
            p.offset = e->begin + (uint64_t)(x * parts + i) * (uint64_t)rows *
                                      (uint64_t)e->dims[2] * (uint64_t)bits / 8;
            p.name = ckpt_arena_printf(&r->src->arena, "%.*s%" PRId64 ".%s.weight", (int)part,
                                       e->name, x, modules[down ? 2 : i]);
            CKPT_CHECK(put(r, &p, down ? 1 : 0, rank, r->tp, err));
        }
done:
    return status;
}

static ckpt_status put_entry(reader *r, const ckpt_st_entry *e, int64_t rank, ckpt_err *err)
{
    size_t part, len;
    int axis = -1;
    int64_t ways = r->tp;
    ckpt_hf_cut how = ckpt_hf_cut_of(e->name, &part, &len);
    if (ckpt_dtype_get((ckpt_dtype)e->dtype)->bits % 8 != 0 && r->tp > 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s elements cannot be cut by rows",
                         ckpt_dtype_get((ckpt_dtype)e->dtype)->name);
    switch (how) {
    case CKPT_HF_QKV:
        return put_qkv(r, e, rank, part, len, err);
    case CKPT_HF_GATE_UP:
        return put_gate_up(r, e, rank, part, len, err);
    case CKPT_HF_W13:
    case CKPT_HF_W2:
        return put_experts(r, e, rank, part, how == CKPT_HF_W2, err);
    case CKPT_HF_VOCAB:
        return put_vocab(r, e, rank, err);
    case CKPT_HF_ROWS:
        axis = 0;
        break;
    case CKPT_HF_KV:
        axis = 0;
        ways = ckpt_hf_kv_ways(&r->sizes, r->tp);
        break;
    case CKPT_HF_HEADS:
        axis = e->rank == 4 ? 2 : 0;
        break;
    case CKPT_HF_COLS:
        axis = 1;
        break;
    case CKPT_HF_WHOLE:
        break;
    case CKPT_HF_UNKNOWN:
        if (r->tp > 1)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "it is not known how parallel ranks share this parameter");
        break;
    }
    ckpt_piece p = rows_of(e, e->name, 0, e->rank > 0 ? e->dims[0] : 0);
    return put(r, &p, axis, rank * ways / r->tp, ways, err);
}

static ckpt_status read_config(reader *r, char *const *names, size_t n, ckpt_err *err)
{
    ckpt_source *src = r->src;
    ckpt_buf text = {0};
    uint32_t file;
    ckpt_status status;
    if (!ckpt_hf_listed(names, n, "config.json"))
        return CKPT_OK;
    const char *path = ckpt_path_join(&src->arena, src->path, "config.json");
    if (path == NULL)
        return no_memory(err);
    CKPT_CHECK(ckpt_source_add_file(src, "config.json", path, false, &file, err));
    CKPT_CHECK(ckpt_read_file(path, CONFIG_MAX, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &src->config, err), "config.json");
    src->config_kind = CKPT_CONFIG_HF;
    ckpt_hf_sizes_of(src->config, &r->sizes);
done:
    ckpt_buf_release(&text);
    return status;
}

/* What is kept of the parts' metadata: a quantisation policy. */
static const char *const policy_keys[] = {CKPT_POLICY_KEY, CKPT_POLICY_DIGEST_KEY};

/* All parts of one rank, and then its tensors. */
static ckpt_status read_rank(reader *r, int64_t rank, int64_t parts, ckpt_err *err)
{
    ckpt_source *src = r->src;
    ckpt_status status = CKPT_OK;
    for (int64_t p = 0; p < parts; p++) {
        uint32_t file;
        ckpt_json *metadata = NULL;
        const char *name = ckpt_arena_printf(
            &src->arena, STEM "%" PRId64 "-part-%" PRId64 ".safetensors", rank, p);
        const char *path = name != NULL ? ckpt_path_join(&src->arena, src->path, name) : NULL;
        if (path == NULL)
            return no_memory(err);
        CKPT_CHECK(ckpt_check_interrupted(err));
        CKPT_CHECK(ckpt_source_add_file(src, name, path, true, &file, err));
        status = ckpt_st_blob_read(src, file, 0, &r->table, &metadata, err);
        for (size_t i = 0; status == CKPT_OK && i < sizeof policy_keys / sizeof *policy_keys; i++) {
            const ckpt_json *value = ckpt_json_get(metadata, policy_keys[i]);
            if (value != NULL)
                status = ckpt_policy_note(&src->metadata, policy_keys[i], value, err);
        }
        ckpt_json_free(metadata);
        CKPT_TRY(status, "%s", name);
    }
    for (size_t i = 0; i < r->table.n; i++) {
        const ckpt_st_entry *e = &r->table.entries[i];
        const char *file = src->files[e->file].name;
        if (e->next != CKPT_ST_NONE) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "%s: tensor '%.160s' is in another part too",
                               file, e->name);
            goto done;
        }
        CKPT_TRY(put_entry(r, e, rank, err), "%s: tensor '%.160s'", file, e->name);
    }
done:
    ckpt_st_table_release(&r->table);
    r->table = (ckpt_st_table){0};
    return status;
}

/* Parts of every rank; both must be numbered without a hole. */
static ckpt_status count_files(reader *r, char *const *names, size_t n, int64_t **parts,
                               ckpt_err *err)
{
    int64_t rank, part, ranks = 0, files = 0;
    for (size_t i = 0; i < n; i++)
        if (parse_name(names[i], &rank, &part) && rank >= ranks)
            ranks = rank + 1;
    *parts = ckpt_arena_array(&r->src->arena, (size_t)ranks + 1, sizeof **parts);
    if (*parts == NULL)
        return no_memory(err);
    for (size_t i = 0; i < n; i++)
        if (parse_name(names[i], &rank, &part)) {
            (*parts)[rank] = part >= (*parts)[rank] ? part + 1 : (*parts)[rank];
            files++;
        }
    for (rank = 0; rank < ranks; rank++) {
        if ((*parts)[rank] == 0)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "no file of rank %" PRId64 ", but of rank %" PRId64
                             " (incomplete download?)",
                             rank, ranks - 1);
        files -= (*parts)[rank];
    }
    if (files != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "parts of a rank are missing (incomplete download?)");
    r->tp = ranks;
    return ranks > 0 ? CKPT_OK : ckpt_fail(err, CKPT_E_FORMAT, "no " STEM "*-part-*.safetensors");
}

static ckpt_status open_ranks(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    reader r = {.src = src};
    char **names;
    size_t n;
    int64_t *parts;
    (void)opts;
    CKPT_CHECK(ckpt_list_dir(src->path, &src->arena, &names, &n, err));
    CKPT_CHECK(count_files(&r, names, n, &parts, err));
    CKPT_CHECK(read_config(&r, names, n, err));
    for (int64_t rank = 0; rank < r.tp; rank++)
        CKPT_CHECK(read_rank(&r, rank, parts[rank], err));
    CKPT_CHECK(ckpt_join_finish(&r.join, src, err));
    if (r.n_padded > 0)
        CKPT_CHECK(ckpt_source_warn(src, err, "vocabulary padding of the ranks is left out"));
done:
    ckpt_st_table_release(&r.table);
    ckpt_join_release(&r.join);
    return status;
}

/* ---- writing ---------------------------------------------------------------------------------- */

static ckpt_status cut_tensor(const ckpt_json *config, const ckpt_mesh *mesh, const char *name,
                              int rank, const int64_t *dims, int *axis, int64_t *ways,
                              ckpt_err *err)
{
    size_t part, len;
    ckpt_hf_sizes s;
    (void)dims;
    ckpt_hf_sizes_of(config, &s);
    *axis = -1;
    *ways = mesh->tp;
    if (mesh->pp > 1 || mesh->ep > 1 || mesh->etp != mesh->tp)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "per-rank safetensors are cut over tensor parallelism only: the rank in "
                         "a file's name is the tensor-parallel one");
    if (mesh->tp == 1)
        return CKPT_OK;
    if (s.heads % mesh->tp != 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%" PRId64 " attention heads are not divisible by TP %d", s.heads,
                         mesh->tp);
    switch (ckpt_hf_cut_of(name, &part, &len)) {
    case CKPT_HF_ROWS:
    case CKPT_HF_VOCAB:
        *axis = 0;
        break;
    case CKPT_HF_KV:
        *axis = 0;
        *ways = ckpt_hf_kv_ways(&s, mesh->tp);
        if (s.kv_heads % *ways != 0)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "%" PRId64 " key/value heads are not divisible by TP %d", s.kv_heads,
                             mesh->tp);
        break;
    case CKPT_HF_HEADS:
        *axis = rank == 4 ? 2 : 0;
        break;
    case CKPT_HF_COLS:
        *axis = 1;
        break;
    case CKPT_HF_WHOLE:
        break;
    case CKPT_HF_QKV:
    case CKPT_HF_GATE_UP:
    case CKPT_HF_W13:
    case CKPT_HF_W2:
    case CKPT_HF_UNKNOWN:
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "it is not known how parallel ranks share this parameter");
    }
    if (*axis >= rank)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rank %d, to be cut on axis %d", rank, *axis);
    return CKPT_OK;
}

typedef struct text {
    const uint8_t *data;
} text;

typedef struct writer {
    ckpt_out *out;
    ckpt_sink *sink;
    text *texts;     /* headers, then config.json; number of the file */
    uint64_t *bytes; /* of every tensor's chunks, which are equal */
    size_t cap;      /* files */
    ckpt_err *err;
} writer;

static bool write_literal(const ckpt_sink *sink, uint32_t file, const ckpt_seg *seg, uint32_t crc,
                          uint8_t *out)
{
    const text *texts = sink->self;
    (void)crc;
    memcpy(out, texts[file].data, (size_t)seg->len);
    return true;
}

static size_t chunk_of(const ckpt_out_tensor *t, int64_t rank, int64_t tp)
{
    return (size_t)(rank * (int64_t)t->n_chunks / tp);
}

static ckpt_status begin_file(writer *w, const char *name, ckpt_buf *head, size_t n_segs,
                              ckpt_out_file **out)
{
    ckpt_sink *sink = w->sink;
    uint32_t index = (uint32_t)sink->n_files++;
    ckpt_out_file *f = &sink->files[index];
    *f = (ckpt_out_file){.name = name, .size = head->len, .n_segs = 1};
    f->segs = ckpt_arena_array(&sink->arena, n_segs, sizeof *f->segs);
    w->texts[index].data =
        head->failed ? NULL : ckpt_arena_memdup(&sink->arena, head->data, head->len);
    if (name == NULL || f->segs == NULL || w->texts[index].data == NULL)
        return no_memory(w->err);
    f->segs[0] = (ckpt_seg){.len = head->len, .kind = CKPT_SEG_LITERAL};
    *out = f;
    return CKPT_OK;
}

/* "__metadata__":{...}, of a quantisation policy alone; more: something follows. */
static void put_policy(const ckpt_json *metadata, bool more, ckpt_buf *b)
{
    const char *before = "\"__metadata__\":{";
    for (size_t i = 0; i < sizeof policy_keys / sizeof *policy_keys; i++) {
        const char *value = ckpt_json_string(ckpt_json_get(metadata, policy_keys[i]));
        if (value == NULL)
            continue;
        ckpt_buf_puts(b, before);
        before = ",";
        ckpt_st_quote(b, policy_keys[i], false);
        ckpt_buf_putc(b, ':');
        ckpt_st_quote(b, value, false);
    }
    if (*before == ',')
        ckpt_buf_puts(b, more ? "}," : "}");
}

/* Tensors [first, last) of a rank become one part. */
static ckpt_status put_part(writer *w, int64_t rank, int64_t part, size_t first, size_t last)
{
    ckpt_buf head = {0};
    uint64_t at = 0;
    ckpt_out_file *f;
    int64_t tp = w->out->mesh.tp;
    ckpt_buf_append(&head, "\0\0\0\0\0\0\0\0{", 9);
    put_policy(w->out->metadata, first < last, &head);
    for (size_t i = first; i < last; i++) {
        const ckpt_out_tensor *t = &w->out->tensors[i];
        const ckpt_out_chunk *c = &t->chunks[chunk_of(t, rank, tp)];
        if (i > first)
            ckpt_buf_putc(&head, ',');
        ckpt_st_quote(&head, t->name, false);
        ckpt_buf_printf(&head, ":{\"dtype\":\"%s\",\"shape\":[", ckpt_dtype_get(t->dtype)->name);
        for (int a = 0; a < t->rank; a++)
            ckpt_buf_printf(&head, "%s%" PRId64, a > 0 ? "," : "", c->len[a]);
        ckpt_buf_printf(&head, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", at,
                        at + w->bytes[i]);
        at += w->bytes[i];
    }
    ckpt_buf_putc(&head, '}');
    while (!head.failed && head.len % 8 != 0)
        ckpt_buf_putc(&head, ' ');
    if (!head.failed)
        ckpt_put_u64(head.data, head.len - 8);
    ckpt_status status =
        begin_file(w,
                   ckpt_arena_printf(&w->sink->arena,
                                     STEM "%" PRId64 "-part-%" PRId64 ".safetensors", rank, part),
                   &head, last - first + 1, &f);
    ckpt_buf_release(&head);
    if (status != CKPT_OK)
        return status;
    f->is_data = true;
    for (size_t i = first; i < last; i++) {
        ckpt_out_tensor *t = &w->out->tensors[i];
        size_t k = chunk_of(t, rank, tp);
        bool copy = rank > 0 && chunk_of(t, rank - 1, tp) == k;
        if (!copy) {
            t->chunks[k].file = (uint32_t)w->sink->n_files - 1;
            t->chunks[k].offset = f->size;
        }
        if (w->bytes[i] == 0)
            continue;
        f->segs[f->n_segs++] = (ckpt_seg){.offset = f->size,
                                          .len = w->bytes[i],
                                          .a = (uint32_t)i,
                                          .b = (uint32_t)k,
                                          .kind = CKPT_SEG_CHUNK,
                                          .copy = copy};
        f->size += w->bytes[i];
    }
    return CKPT_OK;
}

static bool part_full(const writer *w, size_t first, size_t i, uint64_t used)
{
    uint64_t limit = w->out->max_shard_bytes;
    return i > first && limit > 0 && (used >= limit || w->bytes[i] > limit - used);
}

/* With count != NULL only counts the parts. */
static ckpt_status put_rank(writer *w, int64_t rank, size_t *count)
{
    size_t first = 0, n = w->out->n_tensors;
    int64_t part = 0;
    for (size_t i = 0; first < n || part == 0; part++) {
        uint64_t used = 0;
        for (i = first; i < n && !part_full(w, first, i, used); i++)
            used += w->bytes[i];
        ckpt_status status = count != NULL ? CKPT_OK : put_part(w, rank, part, first, i);
        if (status != CKPT_OK)
            return status;
        first = i;
    }
    if (count != NULL)
        *count = (size_t)part;
    return CKPT_OK;
}

static ckpt_status size_tensors(writer *w)
{
    uint64_t total = 0;
    ckpt_out *out = w->out;
    w->bytes = ckpt_arena_array(&w->sink->arena, out->n_tensors + 1, sizeof *w->bytes);
    if (w->bytes == NULL)
        return no_memory(w->err);
    for (size_t i = 0; i < out->n_tensors; i++) {
        const ckpt_out_tensor *t = &out->tensors[i];
        int64_t numel;
        if (t->optimizer)
            return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                             "tensor '%.160s': what loads per-rank safetensors has no place for "
                             "optimizer state: torch_dist holds it, --optimizer drop leaves it out",
                             t->name);
        if (!ckpt_numel(t->rank, t->chunks[0].len, &numel) ||
            !ckpt_dtype_bytes(t->dtype, numel, &w->bytes[i]) ||
            !ckpt_add_u64(total, w->bytes[i], &total) || total > INT64_MAX / 2)
            return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "tensor '%.160s': size overflows",
                             t->name);
    }
    return CKPT_OK;
}

static ckpt_status layout_ranks(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    ckpt_status status;
    writer w = {.out = out, .sink = sink, .err = err};
    size_t parts;
    ckpt_buf config = {0};
    ckpt_out_file *f;
    if (out->config_kind != CKPT_CONFIG_HF)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "per-rank safetensors hold Hugging Face's modules: --layout hf");
    if (out->n_objects > 0 || out->n_tensors >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%zu objects, %zu tensors", out->n_objects,
                         out->n_tensors);
    CKPT_CHECK(size_tensors(&w));
    CKPT_CHECK(put_rank(&w, 0, &parts));
    if (!ckpt_mul_size(parts, (size_t)out->mesh.tp, &w.cap))
        return no_memory(err);
    sink->files = ckpt_arena_array(&sink->arena, w.cap + 1, sizeof *sink->files);
    w.texts = ckpt_arena_array(&sink->arena, w.cap + 1, sizeof *w.texts);
    if (sink->files == NULL || w.texts == NULL)
        return no_memory(err);
    sink->n_files = 0;
    sink->self = w.texts;
    sink->literal = write_literal;
    sink->manifest_dir = "";
    for (int64_t rank = 0; rank < out->mesh.tp; rank++)
        CKPT_CHECK(put_rank(&w, rank, NULL));
    if (out->config != NULL) {
        ckpt_hf_config_text(&config, out->config);
        CKPT_CHECK(begin_file(&w, "config.json", &config, 1, &f));
    }
done:
    ckpt_buf_release(&config);
    return status;
}

const ckpt_container ckpt_rank_safetensors = {
    .name = "rank_safetensors",
    .what = "per-rank safetensors (model-rank-R-part-P.safetensors)",
    .sharded = true,
    .probe = probe,
    .open = open_ranks,
    .own_cuts = true,
    .cut = cut_tensor,
    .layout = layout_ranks,
};
