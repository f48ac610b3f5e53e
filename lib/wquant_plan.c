/* See wquant.h. Which tensors are quantised, what the configuration says of it, and the second plan. */
#include "checked.h"
#include "gather.h"
#include "plan_internal.h"
#include "wquant_internal.h"

#include <stdlib.h>
#include <string.h>

#define UNIT_MAX ((int64_t)64 << 20) /* elements that are quantised at once */

/* Everything that depends on the kind. `block`: columns must be a multiple. */
static const struct {
    const char *name, *what, *algo;
    int64_t block;
    ckpt_dtype codes, scales;
    const char *suffix; /* of the name of the scales */
} kinds[] = {
    {"keep",         "",                               NULL,          1,  CKPT_F32,     CKPT_F32,     ""      },
    {"fp8-block128", "F8_E4M3 in blocks of 128 x 128", NULL,          1,  CKPT_F8_E4M3, CKPT_F32,
     "_scale_inv"                                                                                             },
    {"nvfp4",        "NVFP4",                          "W4A16_NVFP4", 16, CKPT_U8,      CKPT_F8_E4M3, "_scale"},
    {"mxfp8",        "MXFP8",                          "MXFP8",       32, CKPT_F8_E4M3, CKPT_U8,      "_scale"},
};

/* Modules whose weight is a projection, by the last word of their name. Everything else stays: embeddings
 * and head, norms, the router (gate), convolutions, decay and gates of linear attention (A_log, dt_bias,
 * b_proj, in_proj_ba, the low-rank f_* and g_* pairs), eh_proj of multi-token prediction. */
static const char *const projections[] = {
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "query_key_value",
    "dense",
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
    "in_proj_qkvz",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_up_proj",
};

const char *ckpt_wquant_name(ckpt_wquant_kind kind)
{
    return kinds[kind].name;
}

void ckpt_wquant_scales(ckpt_wquant_kind kind, int64_t rows, int64_t cols, int64_t dims[2])
{
    const bool fp8 = kind == CKPT_WQUANT_FP8_BLOCK;
    dims[0] = fp8 ? (rows + CKPT_FP8_BLOCK - 1) / CKPT_FP8_BLOCK : rows;
    dims[1] = fp8 ? (cols + CKPT_FP8_BLOCK - 1) / CKPT_FP8_BLOCK : cols / kinds[kind].block;
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory planning quantised weights");
}

/* ---- which ------------------------------------------------------------------------------------- */

/* Length of the module's name if `name` is NAME.weight, else 0. */
static size_t module_len(const char *name)
{
    size_t n = strlen(name), m = sizeof ".weight" - 1;
    return n > m && strcmp(name + n - m, ".weight") == 0 ? n - m : 0;
}

static bool is_projection(const char *name, size_t n)
{
    size_t at = n;
    while (at > 0 && name[at - 1] != '.')
        at--;
    for (size_t i = 0; i < sizeof projections / sizeof projections[0]; i++)
        if (strlen(projections[i]) == n - at && strncmp(projections[i], name + at, n - at) == 0)
            return true;
    return false;
}

static ckpt_status skip(ckpt_wquant *q, const char *name, size_t n, ckpt_err *err)
{
    const char *module = ckpt_arena_strndup(&q->arena, name, n);
    if (module == NULL)
        return no_memory(err);
    q->skipped[q->n_skipped++] = module;
    return CKPT_OK;
}

/* One tensor of the base plan. */
static ckpt_status select_one(ckpt_wquant *q, uint32_t i, ckpt_plan *out, size_t *cap,
                              ckpt_err *err)
{
    const ckpt_out_tensor *t = &q->base->out.tensors[i];
    size_t n = module_len(t->name);
    if (t->optimizer || !ckpt_dtype_castable(t->dtype, CKPT_F32))
        return CKPT_OK;
    if (t->rank == 3 && strstr(t->name, ".experts.") != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor '%s': experts stacked in three dimensions are not quantised",
                         t->name);
    if (t->rank != 2 || n == 0)
        return CKPT_OK;
    if (!is_projection(t->name, n))
        return skip(q, t->name, n, err);
    if (t->dims[1] % kinds[q->kind].block != 0 || t->dims[0] == 0 || t->dims[1] == 0) {
        ckpt_status status = ckpt_plan_line(
            out, &out->not_cast, &out->n_not_cast, cap, err,
            "%s: not quantised (%lld columns, %s needs a multiple of %lld)", t->name,
            (long long)t->dims[1], kinds[q->kind].name, (long long)kinds[q->kind].block);
        return status == CKPT_OK ? skip(q, t->name, n, err) : status;
    }
    if (t->dims[1] > UNIT_MAX / CKPT_FP8_BLOCK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor '%s': %lld columns, at most %lld are quantised", t->name,
                         (long long)t->dims[1], (long long)(UNIT_MAX / CKPT_FP8_BLOCK));
    q->tensors[q->n++] = (ckpt_wquant_tensor){
        .name = t->name, .rows = t->dims[0], .cols = t->dims[1], .base = i, .global = 1};
    return CKPT_OK;
}

static ckpt_status check_target(const ckpt_wquant *q, const ckpt_convert_opts *opts, ckpt_err *err)
{
    const ckpt_plan *base = q->base;
    const ckpt_layout *layout = opts->layout != NULL ? opts->layout : base->model->layout;
    const char *name = kinds[q->kind].name;
    if (layout == NULL || strcmp(layout->group, "hf") != 0 || base->out.config == NULL)
        return ckpt_fail(
            err, CKPT_E_UNSUPPORTED,
            "--dtype %s: %s%s has no quantised form: the target must be of a Hugging Face "
            "layout (--layout hf) with its configuration",
            name, layout != NULL ? "layout " : "a model of no known family",
            layout != NULL ? layout->name : "");
    if (strcmp(opts->container->name, "safetensors") != 0 || opts->single_file)
        return ckpt_fail(
            err, CKPT_E_UNSUPPORTED,
            "--dtype %s: quantised weights are written as a safetensors directory, not as "
            "%s%s",
            name, opts->single_file ? "one file of " : "", opts->container->name);
    if (opts->n_rename + opts->n_include + opts->n_exclude > 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "--dtype %s: not together with --include, --exclude or --rename", name);
    if (!opts->approximate)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "--dtype %s loses precision; --approximate permits and reports it", name);
    return CKPT_OK;
}

static ckpt_status copy_lines(const char *const *from, size_t n, ckpt_plan *plan,
                              const char ***list, size_t *count, size_t *cap, ckpt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        ckpt_status status = ckpt_plan_line(plan, list, count, cap, err, "%s", from[i]);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status select_tensors(ckpt_wquant *q, ckpt_plan *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t cap = 0, n = q->base->out.n_tensors;
    q->tensors = ckpt_arena_array(&q->arena, n, sizeof *q->tensors);
    q->skipped = ckpt_arena_array(&q->arena, n, sizeof *q->skipped);
    if (q->tensors == NULL || q->skipped == NULL)
        return no_memory(err);
    CKPT_CHECK(copy_lines(q->base->not_cast, q->base->n_not_cast, out, &out->not_cast,
                          &out->n_not_cast, &cap, err));
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(select_one(q, (uint32_t)i, out, &cap, err));
    if (q->n == 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "--dtype %s: no tensor is a projection",
                           kinds[q->kind].name);
done:
    return status;
}

/* ---- configuration ----------------------------------------------------------------------------- */

static const char common[] =
    "\"dynamic\": false, \"num_bits\": %d, \"type\": \"float\", \"group_size\": %d";

/* As the readers of each convention expect it; ModelOpt's is the form it has inside config.json. */
static ckpt_status describe(const ckpt_wquant *q, ckpt_json *config, ckpt_err *err)
{
    ckpt_buf b = {0};
    ckpt_json *j = NULL;
    ckpt_status status = CKPT_OK;
    bool four = q->kind == CKPT_WQUANT_NVFP4, fp8 = q->kind == CKPT_WQUANT_FP8_BLOCK;
    if (fp8) {
        ckpt_buf_puts(&b,
                      "{\"activation_scheme\": \"dynamic\", \"fmt\": \"e4m3\", \"quant_method\": "
                      "\"fp8\", \"weight_block_size\": [128, 128], \"modules_to_not_convert\": [");
    } else {
        ckpt_buf_puts(
            &b, "{\"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], \"weights\": {");
        ckpt_buf_printf(&b, common, four ? 4 : 8, four ? 16 : 32);
        if (!four) { /* activations by blocks as well; NVFP4 needs a calibrated scale for them */
            ckpt_buf_puts(&b, "}, \"input_activations\": {");
            ckpt_buf_printf(&b, common, 8, 32);
        }
        ckpt_buf_printf(&b,
                        "}}}, \"quant_method\": \"modelopt\", \"quant_algo\": \"%s\", "
                        "\"producer\": {\"name\": \"ckpt\"}, \"ignore\": [",
                        kinds[q->kind].algo);
    }
    for (size_t i = 0; i < q->n_skipped; i++) {
        ckpt_buf_puts(&b, i > 0 ? ", " : "");
        ckpt_json_quote(&b, q->skipped[i], strlen(q->skipped[i]));
    }
    ckpt_buf_puts(&b, "]}");
    if (b.failed) {
        status = no_memory(err);
        goto done;
    }
    CKPT_CHECK(ckpt_json_parse((const char *)b.data, b.len, &j, err));
    if (!ckpt_json_set(config, "quantization_config", j))
        status = no_memory(err);
done:
    ckpt_buf_release(&b);
    return status;
}

/* ---- the source in memory ---------------------------------------------------------------------- */

typedef struct builder {
    ckpt_wquant *q;
    size_t n, cap;        /* tensors made */
    ckpt_tensor *tensors; /* in the order of writing */
    bool *optimizer;
} builder;

static ckpt_status add(builder *b, const char *name, ckpt_dtype dtype, int rank,
                       const int64_t *dims, ckpt_wquant_stored stored, ckpt_err *err)
{
    ckpt_wquant *q = b->q;
    size_t k = b->n, n_base = q->base->model->src->n_files;
    int64_t numel;
    uint64_t bytes = 0;
    ckpt_tensor *t = &b->tensors[k];
    int64_t *own = ckpt_arena_array(&q->arena, 2 * (size_t)rank + 1, sizeof *own); /* dims, zeros */
    t->chunks = ckpt_arena_array(&q->arena, 1, sizeof *t->chunks);
    if (own == NULL || t->chunks == NULL || name == NULL)
        return no_memory(err);
    for (int d = 0; d < rank; d++)
        own[d] = dims[d];
    if (k >= b->cap || !ckpt_numel(rank, dims, &numel) || !ckpt_dtype_bytes(dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%s': size overflows", name);
    t->name = name;
    t->dtype = dtype;
    t->rank = rank;
    t->dims = own;
    t->n_chunks = 1;
    t->chunks[0] = (ckpt_chunk){.lo = own + rank, .len = own, .file = (uint32_t)(n_base + k)};
    q->stored[k] = stored;
    q->src.files[n_base + k] = (ckpt_file){.name = name, .path = name, .size = bytes, .fd = -1};
    b->n++;
    return CKPT_OK;
}

/* Codes, scales, and NVFP4's scale of scales, in place of one matrix. */
static ckpt_status add_quantised(builder *b, uint32_t index, ckpt_err *err)
{
    ckpt_wquant *q = b->q;
    const ckpt_wquant_tensor *t = &q->tensors[index];
    bool four = q->kind == CKPT_WQUANT_NVFP4;
    const int64_t codes[2] = {t->rows, four ? t->cols / 2 : t->cols};
    int64_t scales[2];
    ckpt_wquant_stored s = {.part = CKPT_WQUANT_CODES, .tensor = index};
    ckpt_status status;
    ckpt_wquant_scales(q->kind, t->rows, t->cols, scales);
    CKPT_CHECK(add(b, t->name, kinds[q->kind].codes, 2, codes, s, err));
    s.part = CKPT_WQUANT_SCALES;
    CKPT_CHECK(add(b, ckpt_arena_printf(&q->arena, "%s%s", t->name, kinds[q->kind].suffix),
                   kinds[q->kind].scales, 2, scales, s, err));
    s.part = CKPT_WQUANT_GLOBAL;
    if (four)
        CKPT_CHECK(
            add(b, ckpt_arena_printf(&q->arena, "%s_scale_2", t->name), CKPT_F32, 0, NULL, s, err));
done:
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static ckpt_status build_source(builder *b, ckpt_err *err)
{
    ckpt_wquant *q = b->q;
    ckpt_status status = CKPT_OK;
    const ckpt_source *from = q->base->model->src;
    const ckpt_out *out = &q->base->out;
    b->cap = out->n_tensors + 2 * q->n;
    b->tensors = ckpt_arena_array(&q->arena, b->cap, sizeof *b->tensors);
    b->optimizer = ckpt_arena_array(&q->arena, b->cap, sizeof *b->optimizer);
    q->stored = ckpt_arena_array(&q->arena, b->cap, sizeof *q->stored);
    q->src.tensors = ckpt_arena_array(&q->arena, b->cap, sizeof *q->src.tensors);
    q->src.files = ckpt_arena_array(&q->arena, from->n_files + b->cap, sizeof *q->src.files);
    if (b->tensors == NULL || b->optimizer == NULL || q->stored == NULL || q->src.tensors == NULL ||
        q->src.files == NULL)
        return no_memory(err);
    if (from->n_files > 0)
        memcpy(q->src.files, from->files, from->n_files * sizeof *from->files);
    for (size_t i = 0, next = 0; i < out->n_tensors; i++) {
        const ckpt_out_tensor *t = &out->tensors[i];
        if (next < q->n && q->tensors[next].base == i) {
            CKPT_CHECK(add_quantised(b, (uint32_t)next++, err));
            continue;
        }
        b->optimizer[b->n] = t->optimizer;
        CKPT_CHECK(add(b, t->name, t->dtype, t->rank, t->dims,
                       (ckpt_wquant_stored){.part = CKPT_WQUANT_PLAIN, .base = (uint32_t)i}, err));
    }
    q->src.n_tensors = b->n;
    q->src.n_files = from->n_files + b->n;
    q->src.n_virtual = from->n_virtual + b->n;
    memcpy(q->src.tensors, b->tensors, b->n * sizeof *b->tensors);
    qsort(q->src.tensors, b->n, sizeof *q->src.tensors, by_name);
    q->src.self = q;
    q->src.read_at = ckpt_wquant_read;
    q->src.container = from->container;
    q->src.path = from->path;
    q->src.root = from->root;
    q->src.iteration = from->iteration;
    q->src.config_kind = CKPT_CONFIG_HF;
    q->src.config = ckpt_json_dup(q->base->out.config);
    if (q->src.config == NULL)
        return no_memory(err);
    CKPT_CHECK(describe(q, q->src.config, err));
done:
    return status;
}

/* ---- the second plan --------------------------------------------------------------------------- */

/* Everything is written as it lies in the source in memory. */
static ckpt_status build_outs(builder *b, ckpt_plan *plan, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    plan->out.tensors = ckpt_arena_array(&plan->arena, b->n, sizeof *plan->out.tensors);
    plan->chunks = ckpt_arena_array(&plan->arena, b->n, sizeof *plan->chunks);
    if (plan->out.tensors == NULL || plan->chunks == NULL)
        return no_memory(err);
    for (size_t i = 0; i < b->n; i++) {
        const ckpt_tensor *t = &b->tensors[i];
        ckpt_out_chunk *chunk = ckpt_arena_alloc(&plan->arena, sizeof *chunk);
        ckpt_gather *g = ckpt_arena_alloc(&plan->arena, sizeof *g);
        const ckpt_tensor *of = &b->q->src.tensors[ckpt_source_find(&b->q->src, t->name)];
        if (chunk == NULL || g == NULL)
            return no_memory(err);
        *chunk = (ckpt_out_chunk){.lo = t->chunks[0].lo, .len = t->dims};
        CKPT_CHECK(ckpt_gather_stored(&b->q->src, of, &plan->arena, g, err));
        plan->chunks[i] = g;
        plan->payload_bytes += g->bytes;
        plan->out.tensors[i] = (ckpt_out_tensor){.name = t->name,
                                                 .dims = t->dims,
                                                 .chunks = chunk,
                                                 .n_chunks = 1,
                                                 .dtype = t->dtype,
                                                 .rank = t->rank,
                                                 .optimizer = b->optimizer[i]};
    }
    plan->out.n_tensors = b->n;
done:
    return status;
}

/* Which file of the source in memory is which tensor. */
static ckpt_status build_image(builder *b, ckpt_plan *plan, ckpt_err *err)
{
    size_t n = b->q->src.n_files, n_base = n - b->n;
    int64_t *image = ckpt_arena_array(&plan->arena, n, sizeof *image);
    if (image == NULL)
        return no_memory(err);
    for (size_t f = 0; f < n; f++)
        image[f] = f < n_base ? -1 : (int64_t)(f - n_base);
    plan->image = image;
    return CKPT_OK;
}

static int by_canon(const void *key, const void *entry)
{
    return strcmp(key, ((const ckpt_result_tensor *)entry)->name);
}

/* What reading the output back will give, beside what the source held. */
static ckpt_status build_results(ckpt_wquant *q, ckpt_plan *plan, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_plan *base = q->base;
    const ckpt_model *m = &q->model;
    plan->results = ckpt_arena_array(&plan->arena, m->n_tensors, sizeof *plan->results);
    /* stored tensor of q->src -> out tensor */
    int64_t *of = ckpt_arena_array(&plan->arena, q->src.n_tensors, sizeof *of);
    if (plan->results == NULL || of == NULL)
        return no_memory(err);
    for (size_t i = 0; i < plan->out.n_tensors; i++)
        of[ckpt_source_find(&q->src, plan->out.tensors[i].name)] = (int64_t)i;
    for (size_t i = 0; i < m->n_tensors; i++) {
        const ckpt_canon *c = &m->tensors[i];
        const ckpt_result_tensor *was =
            bsearch(c->name, base->results, base->n_results, sizeof *base->results, by_canon);
        if (was == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "tensor '%s': the quantised model has it, the plan has not", c->name);
        ckpt_result_tensor *r = &plan->results[plan->n_results++];
        *r = *was;
        r->dtype = c->dtype;
        r->rank = c->rank;
        r->dims = c->dims;
        r->out_tensor = (uint32_t)of[c->stored];
        CKPT_CHECK(ckpt_plan_canon(m, i, &plan->arena, &r->gather, err));
        if (!was->changed && c->derived != NULL) { /* else what is written is what was */
            r->changed = true;
            r->original = was->gather;
        }
    }
    if (plan->n_results != base->n_results)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "%zu tensors, %zu after quantising",
                           base->n_results, plan->n_results);
    plan->repeats = ckpt_arena_array(&plan->arena, m->n_copies, sizeof *plan->repeats);
    if (plan->repeats == NULL)
        return no_memory(err);
    for (size_t i = 0; i < m->n_copies && status == CKPT_OK; i++) {
        const ckpt_canon *c = &m->copies[i];
        ckpt_result_tensor *r = &plan->repeats[plan->n_repeats++];
        *r = (ckpt_result_tensor){
            .name = c->name, .stored = q->src.tensors[c->stored].name, .dtype = c->dtype};
        status = ckpt_gather_canon(&q->src, c, &plan->arena, &r->gather, err);
    }
done:
    return status;
}

/* What the first plan found out stays true. */
static ckpt_status carry(ckpt_wquant *q, ckpt_plan *plan, ckpt_err *err)
{
    const ckpt_plan *base = q->base;
    ckpt_status status;
    ckpt_out out = base->out;
    size_t caps[3] = {0};
    out.tensors = plan->out.tensors;
    out.n_tensors = plan->out.n_tensors;
    plan->out = out;
    plan->n_left_out = base->n_left_out;
    plan->n_reset = base->n_reset;
    plan->n_states = base->n_states;
    plan->config = ckpt_json_dup(q->src.config);
    plan->canon_config = ckpt_json_dup(base->canon_config);
    if (plan->config == NULL || (base->canon_config != NULL && plan->canon_config == NULL))
        return no_memory(err);
    plan->out.config = plan->config;
    CKPT_CHECK(copy_lines(base->dropped, base->n_dropped, plan, &plan->dropped, &plan->n_dropped,
                          &caps[0], err));
    CKPT_CHECK(copy_lines(base->warnings, base->n_warnings, plan, &plan->warnings,
                          &plan->n_warnings, &caps[1], err));
    CKPT_CHECK(
        copy_lines(base->lossy, base->n_lossy, plan, &plan->lossy, &plan->n_lossy, &caps[2], err));
    CKPT_CHECK(ckpt_plan_line(plan, &plan->lossy, &plan->n_lossy, &caps[2], err,
                              "%zu projection%s become%s %s: rounded to its codes", q->n,
                              q->n == 1 ? "" : "s", q->n == 1 ? "s" : "", kinds[q->kind].what));
done:
    return status;
}

ckpt_status ckpt_wquant_open(ckpt_wquant *q, ckpt_wquant_kind kind, ckpt_plan *base,
                             const ckpt_convert_opts *opts, ckpt_plan *out, ckpt_err *err)
{
    ckpt_status status;
    *q = (ckpt_wquant){.kind = kind, .base = base};
    *out = (ckpt_plan){.model = &q->model};
    builder b = {.q = q};
    ckpt_model_opts bind = {.layout = opts->layout != NULL ? opts->layout : base->model->layout,
                            .allow_unknown = opts->allow_unknown};
    CKPT_CHECK(check_target(q, opts, err));
    CKPT_CHECK(select_tensors(q, out, err));
    CKPT_CHECK(build_source(&b, err));
    CKPT_CHECK(build_outs(&b, out, err)); /* before binding, which sees packed weights unpacked */
    CKPT_CHECK(build_image(&b, out, err));
    CKPT_TRY(ckpt_model_bind(&q->model, &q->src, &bind, err), "quantised model");
    CKPT_CHECK(build_results(q, out, err));
    CKPT_CHECK(carry(q, out, err));
    CKPT_CHECK(opts->container->layout(&out->out, &out->sink, err));
    for (size_t f = 0; f < out->sink.n_files; f++)
        out->total_bytes += out->sink.files[f].size;
done:
    if (status != CKPT_OK)
        ckpt_plan_release(out);
    return status;
}

void ckpt_wquant_release(ckpt_wquant *q)
{
    if (q->kind == CKPT_WQUANT_NONE)
        return;
    ckpt_model_release(&q->model);
    ckpt_json_free(q->src.config);
    ckpt_arena_free(&q->src.arena);
    ckpt_arena_free(&q->arena);
    *q = (ckpt_wquant){.kind = CKPT_WQUANT_NONE};
}
