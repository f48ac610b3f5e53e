/* ckpt study: what a quantisation policy costs, by the protocol of quant-emulation.md section 6. Every
 * variant starts from the same weights, sees the same tokens with the same seed, is evaluated on the same
 * blocks before and after the same steps; what would make records incomparable is part of the record.
 *
 * Tokens: the first ids of the data in contiguous blocks of L + 1, states reset between blocks: first
 * --blocks of them to evaluate on, then one a sample and step to train on. Digests: tokens are SHA-256
 * of their int64 bytes, weights of every parameter's name and f32 values, sorted by name.
 * Everything is f32, and every parameter trains (AdamW without decay, clipped at 1). */
#include "quant_policy.h"
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checked.h"
#include "le.h"

#define DRAWS 5000  /* of the paired bootstrap */
#define MARGIN 0.02 /* nats: what is still called equal */
#define MAX_VARIANTS 32

typedef struct study_opts {
    ckpt_strings data, policy, only;
    int data_type, device; /* ckpt_tool_device */
    int64_t steps, batch, seq_len, blocks, seed, iteration;
    double lr;
} study_opts;

#define AT(field) offsetof(study_opts, field)
/* clang-format off */
static const ckpt_opt rows[] = {
    {"data",      CKPT_OPT_LIST,   AT(data),      "FILE", "tokens; several files follow each other; repeatable", 0, 0},
    {"data-type", CKPT_OPT_CHOICE, AT(data_type), "auto|bytes|u16|u32|indexed", "what the files are (default auto)", 0, 0},
    {"policy",    CKPT_OPT_LIST,   AT(policy),    "FILE", "one more variant, by these rules; repeatable", 0, 0},
    {"only",      CKPT_OPT_LIST,   AT(only),      "NAME", "of the usual variants only these; repeatable (plain is always run)", 0, 0},
    {"steps",     CKPT_OPT_INT,    AT(steps),     "N", "training steps between the two evaluations (default 1)", 0, 1 << 20},
    {"batch",     CKPT_OPT_INT,    AT(batch),     "N", "blocks a step (default 1)", 1, 1 << 16},
    {"seq-len",   CKPT_OPT_INT,    AT(seq_len),   "N", "predicted tokens a block (default 128)", 1, 1 << 20},
    {"blocks",    CKPT_OPT_INT,    AT(blocks),    "N", "blocks to evaluate on (default 4)", 1, 1 << 16},
    {"seed",      CKPT_OPT_INT,    AT(seed),      "N", "of the bootstrap (default 2026)", 0, INT64_MAX},
    {"lr",        CKPT_OPT_REAL,   AT(lr),        "X", "learning rate (default 1e-5)", 0, 0},
    {"device",    CKPT_OPT_CHOICE, AT(device),    "cpu|cuda", "where it is computed (default cpu)", 0, 0},
    {"iteration", CKPT_OPT_INT,    AT(iteration), "N", "iteration of a save root (default: newest)", 0, INT64_MAX},
    {NULL,        CKPT_OPT_FLAG,   0,             NULL, NULL, 0, 0},
};
/* clang-format on */
#undef AT

static void defaults(void *opts)
{
    study_opts *o = opts;
    o->device = -1;
    o->steps = o->batch = 1;
    o->seq_len = 128;
    o->blocks = 4;
    o->seed = 2026;
    o->lr = 1e-5;
    o->iteration = -1;
}

/* What one variant did. */
typedef struct variant {
    const char *name, *file; /* file: rules; NULL: a preset, or nothing for "plain" */
    char digest[65];         /* of the policy */
    bool enabled;
    double *before, *after; /* NLL of every block */
    double mean[2];         /* of both */
    double evaluate, step;  /* seconds: medians of a block's forward, of a step */
    double grad_norm, loss; /* of the last step */
    uint64_t memory;        /* bytes of activations at most, of a step */
    char weights[2][65];
    double delta[2], low[2], high[2]; /* NLL above plain, before and after: mean, 95 % of draws */
} variant;

typedef struct study {
    ckpt_tool *tool;
    const study_opts *o;
    ckpt_source src;
    ckpt_model model;
    ckpt_data *data;
    int64_t *starts; /* of the training blocks */
    int32_t *ids;    /* of the evaluated ones, [blocks, L + 1] */
    char evaluated[65], trained[65];
    uint8_t root[CKPT_SHA256_LEN]; /* of the checkpoint */
    variant variants[MAX_VARIANTS];
    size_t n;
} study;

/* ---- what is compared ------------------------------------------------------------------------- */

static const char *const presets[] = {"exact_matmul", "fp8_operands", "fp8_with_state",
                                      "nvfp4_operands", "fp16_accumulation"};

static bool wanted(const study *s, const char *name)
{
    for (size_t i = 0; i < s->o->only.n; i++)
        if (strcmp(s->o->only.items[i], name) == 0)
            return true;
    return s->o->only.n == 0;
}

static ckpt_status add_variant(study *s, const char *name, const char *file, ckpt_err *err)
{
    if (s->n == MAX_VARIANTS)
        return ckpt_fail(err, CKPT_E_USAGE, "more than %d variants", MAX_VARIANTS);
    variant *v = &s->variants[s->n++];
    *v = (variant){.name = name, .file = file};
    v->before = ckpt_arena_array(&s->tool->arena, (size_t)s->o->blocks, sizeof *v->before);
    v->after = ckpt_arena_array(&s->tool->arena, (size_t)s->o->blocks, sizeof *v->after);
    return v->before != NULL && v->after != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

static ckpt_status list_variants(study *s, ckpt_err *err)
{
    const size_t n = sizeof presets / sizeof *presets;
    ckpt_status status;
    for (size_t i = 0; i < s->o->only.n; i++) {
        bool known = strcmp(s->o->only.items[i], "plain") == 0;
        for (size_t k = 0; k < n; k++)
            known = known || strcmp(s->o->only.items[i], presets[k]) == 0;
        if (!known)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "--only '%s': expected plain, exact_matmul, fp8_operands, "
                             "fp8_with_state, nvfp4_operands or fp16_accumulation",
                             s->o->only.items[i]);
    }
    CKPT_CHECK(add_variant(s, "plain", NULL, err));
    for (size_t k = 0; k < n; k++)
        if (wanted(s, presets[k]))
            CKPT_CHECK(add_variant(s, presets[k], NULL, err));
    for (size_t i = 0; i < s->o->policy.n; i++)
        CKPT_CHECK(
            add_variant(s, ckpt_basename(s->o->policy.items[i]), s->o->policy.items[i], err));
done:
    return status;
}

static ckpt_status open_policy(const study *s, variant *v, ckpt_policy *p, ckpt_err *err)
{
    const bool plain = strcmp(v->name, "plain") == 0 && v->file == NULL;
    ckpt_json *rules = NULL;
    ckpt_status status = ckpt_policy_open(p, &s->model, err);
    if (status == CKPT_OK && v->file != NULL) {
        status = ckpt_policy_load(p, v->file, err);
    } else if (status == CKPT_OK && !plain) {
        rules = ckpt_policy_preset(v->name);
        status = rules != NULL ? ckpt_policy_resolve(p, rules, err) : ckpt_tool_no_memory(err);
    }
    ckpt_json_free(rules);
    if (status != CKPT_OK)
        return status;
    if (v->digest[0] == '\0') /* the first time */
        ckpt_policy_hint(s->tool, p, v->file);
    memcpy(v->digest, p->digest, sizeof v->digest);
    v->enabled = p->enabled;
    return CKPT_OK;
}

/* ---- tokens ----------------------------------------------------------------------------------- */

static void hash_ids(ckpt_sha256_stream *h, const int32_t *ids, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint8_t wide[8];
        ckpt_put_u64(wide, (uint32_t)ids[i]);
        ckpt_sha256_stream_update2(h, wide, sizeof wide, NULL, NULL, 0);
    }
}

static void finish_hash(ckpt_sha256_stream *h, char hex[65])
{
    uint8_t digest[CKPT_SHA256_LEN];
    ckpt_sha256_stream_final(h, digest);
    ckpt_hex(digest, hex);
}

static ckpt_status open_tokens(study *s, ckpt_err *err)
{
    const study_opts *o = s->o;
    const int64_t width = o->seq_len + 1, train = o->steps * o->batch;
    ckpt_sha256_stream h;
    int64_t vocab = 0, need;
    ckpt_status status;
    (void)ckpt_json_int(ckpt_json_get(s->model.config, "vocab_size"), &vocab);
    s->starts = calloc((size_t)train + 1, sizeof *s->starts);
    s->ids = calloc((size_t)(ckpt_max_i64(o->blocks, 1) * width), sizeof *s->ids);
    int32_t *ids = calloc((size_t)width, sizeof *ids);
    if (s->starts == NULL || s->ids == NULL || ids == NULL) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    for (int64_t i = 0; i < train; i++)
        s->starts[i] = (o->blocks + i) * width;
    ckpt_data_opts opts = {.kind = (ckpt_data_kind)(o->data_type > 0 ? o->data_type : 0),
                           .seq_len = o->seq_len,
                           .vocab = vocab,
                           .eod = -1};
    CKPT_CHECK(ckpt_data_open(&s->data, o->data.items, o->data.n, &opts, err));
    if (!ckpt_mul_i64(o->blocks + train, width, &need) || need > ckpt_data_tokens(s->data)) {
        status = ckpt_fail(
            err, CKPT_E_USAGE,
            "%lld tokens of data, expected %lld blocks of %lld for --blocks, --steps "
            "and --batch",
            (long long)ckpt_data_tokens(s->data), (long long)(o->blocks + train), (long long)width);
        goto done;
    }
    ckpt_data_close(s->data); /* it was opened to count; now for samples where they begin */
    s->data = NULL;
    opts.starts = s->starts;
    opts.n_starts = ckpt_max_i64(train, 1);
    CKPT_CHECK(ckpt_data_open(&s->data, o->data.items, o->data.n, &opts, err));
    CKPT_CHECK(ckpt_data_read(s->data, 0, o->blocks * width, s->ids, err));
    ckpt_sha256_stream_init(&h);
    hash_ids(&h, s->ids, o->blocks * width);
    finish_hash(&h, s->evaluated);
    ckpt_sha256_stream_init(&h);
    for (int64_t i = 0; i < train; i++) {
        CKPT_CHECK(ckpt_data_read(s->data, s->starts[i], width, ids, err));
        hash_ids(&h, ids, width);
    }
    finish_hash(&h, s->trained);
done:
    free(ids);
    return status;
}

/* ---- one variant ------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int64_t n)
{
    if (n == 0)
        return 0;
    qsort(x, (size_t)n, sizeof *x, by_value);
    return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

static ckpt_status hash_weights(const ckpt_trainer *t, char hex[65], ckpt_err *err)
{
    const ENG(network) *net = &t->net;
    ckpt_sha256_stream h;
    ckpt_status status = CKPT_OK;
    int64_t most = 0;
    for (size_t i = 0; i < net->n_params; i++)
        most = ckpt_max_i64(most, net->params[i].n);
    real *x = calloc((size_t)most + 1, sizeof *x);
    if (x == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_sha256_stream_init(&h);
    for (size_t i = 0; status == CKPT_OK && i < net->n_params; i++) {
        const ENG(param) *p = &net->params[i];
        const size_t bytes = (size_t)p->n * sizeof *x;
        status = ckpt_eng_get(&t->e, x, p->x, bytes, err);
        ckpt_sha256_stream_update2(&h, p->name, strlen(p->name) + 1, NULL, NULL, 0);
        ckpt_sha256_stream_update2(&h, x, bytes, NULL, NULL, 0);
    }
    finish_hash(&h, hex);
    free(x);
    return status;
}

/* Every block by itself: its states begin at 0. The first is run once before, which is not timed. */
static ckpt_status evaluate(study *s, const ckpt_trainer *t, double *nll, double *seconds,
                            ckpt_err *err)
{
    const int64_t L = s->o->seq_len, cu[] = {0, L};
    const ckpt_eng_seq seq = {1, cu};
    ckpt_eng e;
    double *times = calloc((size_t)s->o->blocks, sizeof *times);
    ckpt_status status = times != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
    ckpt_eng_init(&e, (int)s->tool->g.threads);
    e.device = s->tool->device;
    for (int64_t b = -2; status == CKPT_OK && b < s->o->blocks; b++) {
        struct timespec start;
        const int32_t *ids = s->ids + ckpt_max_i64(b, 0) * (L + 1);
        const ENG(batch) batch = {&seq, ids, ids + 1};
        ENG(run) run = {.backward = false};
        CKPT_CHECK(ckpt_check_interrupted(err));
        clock_gettime(CLOCK_MONOTONIC, &start);
        CKPT_CHECK(t->networks->run(&e, &t->net, &batch, &run, err)); /* b = -2: the sizes */
        if (b == -2)
            CKPT_CHECK(ckpt_eng_reserve(&e, e.peak, err));
        if (b < 0)
            continue;
        times[b] = ckpt_seconds_since(&start);
        nll[b] = run.loss;
    }
    *seconds = median(times, s->o->blocks);
done:
    ckpt_eng_release(&e);
    free(times);
    return status;
}

static double mean(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum / (double)n;
}

static ckpt_status train_steps(study *s, variant *v, ckpt_trainer *t, ckpt_err *err)
{
    double *times = calloc((size_t)s->o->steps + 1, sizeof *times);
    ckpt_status status = times != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
    for (int64_t i = 0; status == CKPT_OK && i < s->o->steps; i++) {
        struct timespec start;
        ckpt_train_report report = {0};
        clock_gettime(CLOCK_MONOTONIC, &start);
        status = ckpt_trainer_step(t, &report, err);
        times[i] = ckpt_seconds_since(&start);
        v->grad_norm = report.grad_norm;
        v->loss = report.loss;
    }
    v->step = median(times, s->o->steps);
    v->memory = t->e.peak;
    free(times);
    return status;
}

static ckpt_status run_variant(study *s, variant *v, ckpt_err *err)
{
    const study_opts *o = s->o;
    ckpt_policy policy = {.n = 0};
    ckpt_trainer t = {.fresh = true};
    double seconds;
    ckpt_status status;
    CKPT_CHECK(open_policy(s, v, &policy, err));
    const ckpt_train_config config = {.batch = o->batch,
                                      .micro = o->batch,
                                      .seq_len = o->seq_len,
                                      .dtype = CKPT_TRAIN_F32,
                                      .threads = (int)s->tool->g.threads,
                                      .device = s->tool->device,
                                      .spec = {.policy = &policy}};
    const ckpt_optim_config optim = ckpt_optim_defaults(CKPT_OPTIM_ADAMW);
    const ckpt_schedule schedule = {
        .max_lr = o->lr, .min_lr = o->lr, .init_lr = o->lr, .decay = INT32_MAX};
    CKPT_CHECK(ckpt_trainer_open(&t, &s->model, &config, &optim, &schedule, s->data, err));
    CKPT_CHECK(hash_weights(&t, v->weights[0], err));
    CKPT_CHECK(evaluate(s, &t, v->before, &v->evaluate, err));
    CKPT_CHECK(train_steps(s, v, &t, err));
    CKPT_CHECK(hash_weights(&t, v->weights[1], err));
    CKPT_CHECK(evaluate(s, &t, v->after, &seconds, err));
    v->mean[0] = mean(v->before, o->blocks);
    v->mean[1] = mean(v->after, o->blocks);
    if (!isfinite(v->mean[0]) || !isfinite(v->mean[1]))
        status = ckpt_fail(err, CKPT_E_MISMATCH, "the loss of an evaluated block is not finite");
    else if (o->steps > 0 && o->lr > 0 && strcmp(v->weights[0], v->weights[1]) == 0)
        status =
            ckpt_fail(err, CKPT_E_MISMATCH, "%lld steps changed no weight", (long long)o->steps);
done:
    ckpt_trainer_close(&t);
    ckpt_policy_release(&policy);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, v->name);
    return status;
}

/* ---- comparison -------------------------------------------------------------------------------- */

/* Mean of the paired differences, and the middle 95 % of the means of blocks drawn again. */
static ckpt_status compare(const study *s, variant *v, int when, ckpt_err *err)
{
    const variant *plain = &s->variants[0];
    const double *x = when == 0 ? v->before : v->after;
    const double *y = when == 0 ? plain->before : plain->after;
    const int64_t n = s->o->blocks;
    uint64_t state = (uint64_t)s->o->seed;
    double *draws = calloc(DRAWS, sizeof *draws);
    if (draws == NULL)
        return ckpt_tool_no_memory(err);
    for (int64_t i = 0; i < n; i++)
        v->delta[when] += (x[i] - y[i]) / (double)n;
    for (int d = 0; d < DRAWS; d++)
        for (int64_t i = 0; i < n; i++) {
            const uint64_t at = ckpt_tool_draw(&state) % (uint64_t)n;
            draws[d] += (x[at] - y[at]) / (double)n;
        }
    qsort(draws, DRAWS, sizeof *draws, by_value);
    v->low[when] = draws[DRAWS * 25 / 1000];
    v->high[when] = draws[DRAWS * 975 / 1000 - 1];
    free(draws);
    return CKPT_OK;
}

/* ---- output ------------------------------------------------------------------------------------ */

static bool within(const variant *v)
{
    return v->high[0] <= MARGIN && v->high[1] <= MARGIN;
}

static void print_text(const study *s)
{
    char root[2 * CKPT_SHA256_LEN + 1];
    const study_opts *o = s->o;
    ckpt_arena *a = &s->tool->arena;
    printf("%lld evaluated blocks of %lld tokens, %lld step%s of %lld, lr %g, seed %lld\n",
           (long long)o->blocks, (long long)o->seq_len, (long long)o->steps,
           ckpt_tool_plural((uint64_t)o->steps), (long long)o->batch, o->lr, (long long)o->seed);
    printf("tokens: evaluated sha256 %s, trained sha256 %s\n", s->evaluated, s->trained);
    ckpt_hex(s->root, root);
    printf("weights: root %s, in f32 sha256 %s\n\n", root, s->variants[0].weights[0]);
    printf("%-18s %-12s %10s %10s %21s %10s %10s %9s\n", "policy", "digest", "PPL before",
           "PPL after", "NLL above plain", "forward ms", "step ms", "memory");
    for (size_t i = 0; i < s->n; i++) {
        const variant *v = &s->variants[i];
        printf("%-18.18s %-12.12s %10.4f %10.4f %+9.5f %+11.5f %10.2f %10.2f %9s\n",
               ckpt_tool_clean(s->tool, v->name), v->enabled ? v->digest : "-", exp(v->mean[0]),
               exp(v->mean[1]), v->delta[0], v->delta[1], v->evaluate * 1e3, v->step * 1e3,
               ckpt_human(a, v->memory));
    }
    putchar('\n');
    if (o->blocks < 2) {
        printf("one block: no interval; --blocks 2 or more give one\n");
        return;
    }
    for (size_t i = 1; i < s->n; i++) {
        const variant *v = &s->variants[i];
        printf("%s: 95 %% of %d draws %+.5f to %+.5f before, %+.5f to %+.5f after: %s %g\n",
               ckpt_tool_clean(s->tool, v->name), DRAWS, v->low[0], v->high[0], v->low[1],
               v->high[1], within(v) ? "within" : "not within", MARGIN);
    }
}

static void json_reals(ckpt_jw *w, const char *key, const double *x, int64_t n)
{
    ckpt_jw_open(w, key, '[');
    for (int64_t i = 0; i < n; i++)
        ckpt_jw_real(w, NULL, x[i]);
    ckpt_jw_close(w, ']');
}

static void print_variant(const study *s, const variant *v)
{
    ckpt_jw *w = &s->tool->json;
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "name", v->name);
    ckpt_jw_string(w, "policy_digest", v->digest);
    ckpt_jw_bool(w, "enabled", v->enabled);
    json_reals(w, "nll_before", v->before, s->o->blocks);
    json_reals(w, "nll_after", v->after, s->o->blocks);
    ckpt_jw_real(w, "ppl_before", exp(v->mean[0]));
    ckpt_jw_real(w, "ppl_after", exp(v->mean[1]));
    json_reals(w, "nll_above_plain", v->delta, 2);
    if (s->o->blocks > 1) { /* one block has no spread */
        json_reals(w, "low", v->low, 2);
        json_reals(w, "high", v->high, 2);
        ckpt_jw_bool(w, "within_margin", within(v));
    }
    ckpt_jw_real(w, "loss", v->loss);
    ckpt_jw_real(w, "grad_norm", v->grad_norm);
    ckpt_jw_real(w, "forward_seconds", v->evaluate);
    ckpt_jw_real(w, "step_seconds", v->step);
    ckpt_jw_u64(w, "memory", v->memory);
    ckpt_jw_string(w, "weights_before", v->weights[0]);
    ckpt_jw_string(w, "weights_after", v->weights[1]);
    ckpt_jw_close(w, '}');
}

static void print_json(const study *s)
{
    const study_opts *o = s->o;
    ckpt_jw *w = &s->tool->json;
    ckpt_jw_int(w, "seed", o->seed);
    ckpt_jw_int(w, "blocks", o->blocks);
    ckpt_jw_int(w, "seq_len", o->seq_len);
    ckpt_jw_int(w, "steps", o->steps);
    ckpt_jw_int(w, "batch", o->batch);
    ckpt_jw_real(w, "lr", o->lr);
    ckpt_jw_real(w, "margin", MARGIN);
    ckpt_jw_string(w, "dtype", "F32"); /* of everything that is computed */
    ckpt_jw_string(w, "device", s->tool->device != NULL ? "cuda" : "cpu");
    ckpt_jw_hex(w, "root", s->root);
    ckpt_jw_string(w, "tokens_evaluated", s->evaluated);
    ckpt_jw_string(w, "tokens_trained", s->trained);
    ckpt_jw_open(w, "data", '{');
    for (size_t i = 0; i < o->data.n; i++) {
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size;
        const char *file = o->data.items[i];
        if (ckpt_tool_file_digest(file, digest, &size, NULL) == CKPT_OK) /* a prefix is no file */
            ckpt_jw_hex(w, ckpt_basename(file), digest);
    }
    ckpt_jw_close(w, '}');
    ckpt_jw_open(w, "variants", '[');
    for (size_t i = 0; i < s->n; i++)
        print_variant(s, &s->variants[i]);
    ckpt_jw_close(w, ']');
}

static ckpt_status hash_checkpoint(study *s, ckpt_err *err)
{
    const ckpt_stream_opts opts = ckpt_tool_stream(s->tool, NULL);
    ckpt_tensor_hash *hashes =
        ckpt_arena_array(&s->tool->arena, s->model.n_tensors + 1, sizeof *hashes);
    return hashes == NULL
               ? ckpt_tool_no_memory(err)
               : ckpt_stream_digest(&s->model, &opts, &s->tool->arena, hashes, s->root, err);
}

static ckpt_status run_all(study *s, ckpt_err *err)
{
    const ckpt_model_opts bind = {.allow_unknown = false};
    ckpt_status status;
    if (s->o->data.n == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--data FILE is missing");
    CKPT_CHECK(list_variants(s, err));
    CKPT_CHECK(ckpt_tool_device(s->tool, s->o->device, err));
    CKPT_CHECK(ckpt_tool_open(s->tool, &s->src, s->tool->operands.items[0], s->o->iteration, err));
    CKPT_CHECK(ckpt_tool_bind(s->tool, &s->model, &s->src, &bind, err));
    CKPT_CHECK(hash_checkpoint(s, err));
    CKPT_CHECK(open_tokens(s, err));
    for (size_t i = 0; i < s->n; i++) {
        CKPT_CHECK(run_variant(s, &s->variants[i], err));
        if (strcmp(s->variants[i].weights[0], s->variants[0].weights[0]) != 0)
            return ckpt_fail(err, CKPT_E_INTERNAL, "%s began from other weights than plain",
                             s->variants[i].name);
        CKPT_CHECK(compare(s, &s->variants[i], 0, err));
        CKPT_CHECK(compare(s, &s->variants[i], 1, err));
    }
    if (s->tool->g.json)
        print_json(s);
    else if (ckpt_tool_text(s->tool))
        print_text(s);
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    study s = {.tool = tool, .o = opts};
    tool->tells_manifest = true;
    ckpt_status status = run_all(&s, err);
    ckpt_data_close(s.data);
    free(s.starts);
    free(s.ids);
    ckpt_model_release(&s.model);
    ckpt_source_close(&s.src);
    return status;
}

/* A card's driver opens its devices for writing. */
static bool only_reads(const void *opts)
{
    return ((const study_opts *)opts)->device < 1;
}

const ckpt_command ckpt_cmd_study = {
    .name = "study",
    .synopsis = "PATH --data FILE",
    .what = "perplexity, time and memory of a model under quantisation policies",
    .opts = rows,
    .opts_size = sizeof(study_opts),
    .min_operands = 1,
    .max_operands = 1,
    .only_reads = only_reads,
    .defaults = defaults,
    .run = run,
    .examples =
        "  ckpt study kimi/ --data tokens.bin --json > study.json; ckpt report study.json\n",
    .notes =
        "Variants: plain, exact_matmul, fp8_operands, fp8_with_state, nvfp4_operands,\n"
        "fp16_accumulation, and every --policy FILE. All start from the same weights and see the\n"
        "same tokens; digests of both are part of the output. NLL above plain: a token, before\n"
        "and after the steps. The policy that PATH itself carries is not applied.\n",
};
