/* Operations of `ckpt bench` on the engine, f32; THREADS is a number or "all":
 *
 *   @fma FLOPS THREADS      multiplications and additions in registers: the peak of the processor
 *   @sgemm N THREADS        the engine's product of N x N matrices, 2 N^3 FLOP
 *   @openblas N THREADS     OpenBLAS's, where it can be opened; OPENBLAS_CORETYPE is set to the best core
 *                           that this processor can be, for an older library takes a newer one for a Prescott
 *   @kda T H D THREADS      KDA forward of [1, T, H, D], times the number of threads: seconds of a core
 *   @step DIR TOKENS THREADS  training steps of a dense model that is made here (Llama, 24 million
 *                           parameters, AdamW, clipping), scaled to 10^12 FLOP
 *
 * Each is checked against a slower form before it is timed, or refuses; the best of several passes is
 * told, of one thread the processor's seconds, so that others on the machine do not count. Instruction sets beyond AVX-512, AVX2 with FMA are not looked for: elsewhere @fma is
 * CKPT_E_UNSUPPORTED. */
#define CKPT_REAL 32
#include "bench.h"
#include "ops.h"
#include "train/train.h"
#include "train_init.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_PASSES = 32, MIN_PASSES = 3, CHECKED = 16 };
#define ENOUGH 0.2 /* seconds of passes */

static ckpt_status read_number(const char *word, int64_t least, int64_t most, int64_t *out,
                               ckpt_err *err)
{
    char *end;
    *out = strtoll(word, &end, 10);
    if (*word == '\0' || *end != '\0' || *out < least || *out > most)
        return ckpt_fail(err, CKPT_E_USAGE, "'%s': expected %lld to %lld", word, (long long)least,
                         (long long)most);
    return CKPT_OK;
}

/* A context of as many threads as the word says. */
static ckpt_status start_engine(ckpt_eng *e, const char *word, ckpt_err *err)
{
    int64_t threads = 0;
    ckpt_status status =
        strcmp(word, "all") == 0 ? CKPT_OK : read_number(word, 1, 4096, &threads, err);
    if (status == CKPT_OK)
        ckpt_eng_init(e, (int)threads);
    return status;
}

typedef ckpt_status pass_fn(void *self, ckpt_err *err);

/* The best pass; the first one touches memory. */
static ckpt_status time_passes(pass_fn *pass, void *self, int threads, double *seconds,
                               ckpt_err *err)
{
    bench_run runs[MAX_PASSES];
    size_t n = 0;
    double all = 0;
    ckpt_status status = pass(self, err);
    while (status == CKPT_OK && n < MAX_PASSES && (n < MIN_PASSES || all < ENOUGH)) {
        const double start = bench_clock(threads);
        status = pass(self, err);
        runs[n] = (bench_run){.seconds = bench_clock(threads) - start};
        all += runs[n++].seconds;
    }
    if (status == CKPT_OK)
        *seconds = bench_median(runs, n).min;
    return status;
}

/* n numbers from lo to hi; NULL: no memory. */
static float *numbers(int64_t n, double lo, double hi)
{
    uint64_t state = 7;
    float *p = malloc(sizeof *p * (size_t)n);
    for (int64_t i = 0; p != NULL && i < n; i++)
        p[i] = (float)(lo + (hi - lo) * (double)(ckpt_tool_draw(&state) >> 11) * 0x1p-53);
    return p;
}

/* ---- the peak ---------------------------------------------------------------------------------- */

/* Twelve sums, more than latency times units of any processor; x < 1 keeps them finite and normal. */
#define SUMS(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
enum { N_SUMS = 12 };

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float fma_avx512(int64_t n)
{
    const __m512 x = _mm512_set1_ps(0.99f), y = _mm512_set1_ps(0.01f);
#define BEGIN(k) __m512 s##k = _mm512_set1_ps((float)k);
#define STEP(k) s##k = _mm512_fmadd_ps(s##k, x, y);
#define ADD(k) sum = _mm512_add_ps(sum, s##k);
    SUMS(BEGIN)
    for (int64_t i = 0; i < n; i++) {
        SUMS(STEP)
    }
    __m512 sum = _mm512_setzero_ps();
    SUMS(ADD)
    return _mm512_cvtss_f32(sum);
#undef BEGIN
#undef STEP
#undef ADD
}

__attribute__((target("avx2,fma"))) static float fma_avx2(int64_t n)
{
    const __m256 x = _mm256_set1_ps(0.99f), y = _mm256_set1_ps(0.01f);
#define BEGIN(k) __m256 s##k = _mm256_set1_ps((float)k);
#define STEP(k) s##k = _mm256_fmadd_ps(s##k, x, y);
#define ADD(k) sum = _mm256_add_ps(sum, s##k);
    SUMS(BEGIN)
    for (int64_t i = 0; i < n; i++) {
        SUMS(STEP)
    }
    __m256 sum = _mm256_setzero_ps();
    SUMS(ADD)
    return _mm256_cvtss_f32(sum);
#undef BEGIN
#undef STEP
#undef ADD
}
#endif

typedef float fma_fn(int64_t n);

static fma_fn *choose_fma(int *lanes, const char **name)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        *lanes = 16;
        *name = "AVX-512";
        return fma_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        *lanes = 8;
        *name = "AVX2";
        return fma_avx2;
    }
#endif
    *lanes = 0;
    *name = "";
    return NULL;
}

typedef struct peak {
    ckpt_eng e;
    fma_fn *fma;
    int64_t n;
    float sums[4096]; /* one a thread, so that nothing is optimised away */
} peak;

static void peak_item(void *arg, int64_t item, int worker)
{
    peak *p = arg;
    (void)worker;
    p->sums[item] = p->fma(p->n);
}

static ckpt_status pass_peak(void *self, ckpt_err *err)
{
    peak *p = self;
    ckpt_eng_parallel(&p->e, p->e.threads, peak_item, p);
    for (int i = 0; i < p->e.threads; i++)
        if (!(fabsf(p->sums[i] - (float)N_SUMS) < 0.1f)) /* the fixed point of s = 0.99 s + 0.01 */
            return ckpt_fail(err, CKPT_E_MISMATCH, "a sum is %g", (double)p->sums[i]);
    return CKPT_OK;
}

static ckpt_status op_fma(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    static peak p;
    int lanes;
    const char *name;
    int64_t flops;
    double seconds;
    ckpt_status status;
    (void)n;
    CKPT_CHECK(read_number(words[1], 1, INT64_MAX, &flops, err));
    CKPT_CHECK(start_engine(&p.e, words[2], err));
    p.fma = choose_fma(&lanes, &name);
    p.n = 2000000;
    if (p.fma == NULL || p.e.threads > (int)(sizeof p.sums / sizeof *p.sums)) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "no kernel for this processor");
        goto done;
    }
    CKPT_CHECK(time_passes(pass_peak, &p, p.e.threads, &seconds, err));
    const double rate = 2.0 * lanes * N_SUMS * (double)p.n * p.e.threads / seconds;
    out->seconds = (double)flops / rate;
    (void)snprintf(out->note, sizeof out->note, "%.0f GFLOP/s, %s, %d threads", rate / 1e9, name,
                   p.e.threads);
done:
    return status;
}

/* ---- products ---------------------------------------------------------------------------------- */

/* cblas_sgemm, whose enumerations are ints: the library is opened at run time, if it is there. */
typedef void sgemm_fn(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                      int lda, const float *b, int ldb, float beta, float *c, int ldc);
enum { ROW_MAJOR = 101, AS_IS = 111, TRANSPOSED = 112 };

typedef struct product {
    ckpt_eng e;
    int64_t n;
    float *x, *w, *y;
    sgemm_fn *blas; /* NULL: the engine */
    char core[64];
} product;

static ckpt_status pass_product(void *self, ckpt_err *err)
{
    product *p = self;
    const int n = (int)p->n;
    if (p->blas == NULL)
        return ENG(linear)(&p->e, p->n, p->n, p->n, p->x, p->n, p->w, NULL, false, p->y, p->n, err);
    p->blas(ROW_MAJOR, AS_IS, TRANSPOSED, n, n, n, 1, p->x, n, p->w, n, 0, p->y, n);
    return CKPT_OK;
}

/* Some entries against sums in double. */
static ckpt_status check_product(const product *p, ckpt_err *err)
{
    uint64_t state = 3;
    for (int i = 0; i < CHECKED; i++) {
        const int64_t r = (int64_t)(ckpt_tool_draw(&state) % (uint64_t)p->n);
        const int64_t c = (int64_t)(ckpt_tool_draw(&state) % (uint64_t)p->n);
        double sum = 0, size = 0;
        for (int64_t k = 0; k < p->n; k++) {
            const double t = (double)p->x[r * p->n + k] * (double)p->w[c * p->n + k];
            sum += t;
            size += fabs(t);
        }
        if (!(fabs((double)p->y[r * p->n + c] - sum) <= 1e-5 * size))
            return ckpt_fail(err, CKPT_E_MISMATCH, "entry [%lld, %lld] is %g, expected %g",
                             (long long)r, (long long)c, (double)p->y[r * p->n + c], sum);
    }
    return CKPT_OK;
}

static ckpt_status time_product(product *p, const char *size, const char *threads, bench_run *out,
                                ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(read_number(size, 1, 16384, &p->n, err));
    CKPT_CHECK(start_engine(&p->e, threads, err));
    p->x = numbers(p->n * p->n, -1, 1);
    p->w = numbers(p->n * p->n, -1, 1);
    p->y = numbers(p->n * p->n, 0, 0);
    if (p->x == NULL || p->w == NULL || p->y == NULL) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    if (p->blas == NULL) {
        CKPT_CHECK(pass_product(p, err)); /* dry */
        CKPT_CHECK(ckpt_eng_reserve(&p->e, p->e.peak, err));
    }
    CKPT_CHECK(time_passes(pass_product, p, p->e.threads, &out->seconds, err));
    CKPT_CHECK(check_product(p, err));
    const double n = (double)p->n;
    (void)snprintf(out->note, sizeof out->note, "%.0f GFLOP/s%s%s",
                   2 * n * n * n / out->seconds / 1e9, p->core[0] != '\0' ? ", " : "", p->core);
done:
    free(p->x);
    free(p->w);
    free(p->y);
    ckpt_eng_release(&p->e);
    return status;
}

static ckpt_status op_sgemm(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    product p = {.blas = NULL};
    (void)n;
    return time_product(&p, words[1], words[2], out, err);
}

/* ISO C has no cast from an object's address to a function's. */
static bool find(void *library, const char *name, void *function)
{
    void *at = dlsym(library, name);
    memcpy(function, &at, sizeof at);
    return at != NULL;
}

/* What is set for other programs, or nothing, may be a core of half the rate. */
static void best_core(void)
{
    const char *core = NULL;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        core = "SkylakeX";
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        core = "Haswell";
#endif
    if (core != NULL)
        (void)setenv("OPENBLAS_CORETYPE", core, 1);
    else
        (void)unsetenv("OPENBLAS_CORETYPE");
}

static ckpt_status op_openblas(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    product p = {.n = 0};
    void (*set_threads)(int);
    char *(*core)(void);
    (void)n;
    best_core();
    ckpt_status status = start_engine(&p.e, words[2], err);
    if (status != CKPT_OK)
        return status;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL || !find(library, "cblas_sgemm", &p.blas) ||
        !find(library, "openblas_set_num_threads", &set_threads) ||
        !find(library, "openblas_get_corename", &core))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "OpenBLAS cannot be opened");
    set_threads(p.e.threads);
    (void)snprintf(p.core, sizeof p.core, "core %s", core());
    return time_product(&p, words[1], words[2], out, err);
}

/* ---- KDA --------------------------------------------------------------------------------------- */

typedef struct kda {
    ckpt_eng e;
    ckpt_eng_delta d;
    ckpt_eng_seq seq;
    int64_t cu[2];
    float *arrays[6], *o;
} kda;

static ckpt_status pass_kda(void *self, ckpt_err *err)
{
    kda *k = self;
    const ENG(delta_in) in = {.q = k->arrays[0],
                              .k = k->arrays[1],
                              .v = k->arrays[2],
                              .g = k->arrays[3],
                              .erase = k->arrays[4]};
    return ENG(delta)(&k->e, &k->d, &k->seq, &in, k->o, NULL, NULL, err);
}

/* The chunk form against the definition, token by token, on the first tokens. */
static ckpt_status check_kda(kda *k, ckpt_err *err)
{
    const int64_t all = k->cu[1], some = all < 64 ? all : 64, n = some * k->d.H * k->d.K;
    double worst = 0, size = 0;
    ckpt_status status;
    float *fast = malloc((size_t)n * sizeof *fast);
    if (fast == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(pass_kda(k, err));
    memcpy(fast, k->o, (size_t)n * sizeof *fast);
    k->cu[1] = some;
    k->d.form = CKPT_ENG_STEP;
    CKPT_CHECK(pass_kda(k, err));
    k->cu[1] = all;
    k->d.form = CKPT_ENG_CHUNK;
    for (int64_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)fast[i] - (double)k->o[i]));
        size = fmax(size, fabs((double)k->o[i]));
    }
    if (!(worst <= 1e-4 * size))
        status =
            ckpt_fail(err, CKPT_E_MISMATCH, "chunks differ from steps by %g of %g", worst, size);
done:
    free(fast);
    return status;
}

/* Room for both forms: the arena's size is that of the larger. */
static ckpt_status plan_kda(kda *k, ckpt_err *err)
{
    ckpt_status status;
    k->d.form = CKPT_ENG_STEP;
    CKPT_CHECK(pass_kda(k, err));
    k->d.form = CKPT_ENG_CHUNK;
    CKPT_CHECK(pass_kda(k, err));
    CKPT_CHECK(ckpt_eng_reserve(&k->e, k->e.peak, err));
done:
    return status;
}

static ckpt_status op_kda(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    kda k = {.d = {.rule = CKPT_ENG_KDA}};
    int64_t T, H, D;
    ckpt_status status;
    double seconds;
    (void)n;
    CKPT_CHECK(read_number(words[1], 1, 1 << 20, &T, err));
    CKPT_CHECK(read_number(words[2], 1, 1024, &H, err));
    CKPT_CHECK(read_number(words[3], 16, 256, &D, err));
    CKPT_CHECK(start_engine(&k.e, words[4], err));
    k.d.H = k.d.HV = H;
    k.d.K = k.d.V = D;
    k.cu[1] = T;
    k.seq = (ckpt_eng_seq){1, k.cu};
    const double unit = 1.7 / (double)D, lo[] = {-unit, -unit, -1, -1, 0},
                 hi[] = {unit, unit, 1, 0, 1};
    for (int i = 0; i < 5; i++)
        k.arrays[i] = numbers(i < 4 ? T * H * D : T * H, lo[i], hi[i]);
    k.o = numbers(T * H * D, 0, 0);
    for (int i = 0; i < 5; i++)
        if (k.arrays[i] == NULL || k.o == NULL) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
    CKPT_CHECK(plan_kda(&k, err));
    CKPT_CHECK(check_kda(&k, err));
    CKPT_CHECK(time_passes(pass_kda, &k, k.e.threads, &seconds, err));
    out->seconds = seconds * k.e.threads;
    (void)snprintf(out->note, sizeof out->note, "%.3f us a token-head and core, %d threads",
                   1e6 * out->seconds / (double)(T * H), k.e.threads);
done:
    for (int i = 0; i < 5; i++)
        free(k.arrays[i]);
    free(k.o);
    ckpt_eng_release(&k.e);
    return status;
}

/* ---- a training step --------------------------------------------------------------------------- */

static const char dense[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"attention_bias\":false,"
    "\"head_dim\":64,\"hidden_act\":\"silu\",\"hidden_size\":768,\"initializer_range\":0.02,"
    "\"intermediate_size\":2048,\"max_position_embeddings\":4096,\"mlp_bias\":false,"
    "\"num_attention_heads\":12,\"num_hidden_layers\":3,\"num_key_value_heads\":12,"
    "\"rms_norm_eps\":1e-06,\"rope_theta\":10000.0,\"tie_word_embeddings\":true,"
    "\"torch_dtype\":\"float32\",\"vocab_size\":4096}\n";

typedef struct stepping {
    ckpt_source src;
    ckpt_model model;
    ckpt_data *data;
    ckpt_trainer t;
    ckpt_train_report report;
    double first; /* loss */
} stepping;

static ckpt_status pass_step(void *self, ckpt_err *err)
{
    stepping *s = self;
    ckpt_status status = ckpt_trainer_step(&s->t, &s->report, err);
    if (s->t.state.step == 1)
        s->first = s->report.loss;
    return status;
}

static ckpt_status open_step(stepping *s, const char *dir, int64_t tokens, int threads,
                             ckpt_err *err)
{
    ckpt_status status;
    char config[4096], data[4096];
    uint8_t bytes[65536];
    const char *paths[] = {data};
    uint64_t state = 5;
    if (snprintf(config, sizeof config, "%s/dense.json", dir) >= (int)sizeof config ||
        snprintf(data, sizeof data, "%s/tokens", dir) >= (int)sizeof data)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: too long", dir);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(ckpt_tool_draw(&state) % 96); /* there is something to learn */
    CKPT_CHECK(ckpt_tool_write_file(config, dense, sizeof dense - 1, err));
    CKPT_CHECK(ckpt_tool_write_file(data, bytes, sizeof bytes, err));
    CKPT_CHECK(ckpt_train_init(&s->src, &s->model, config, 1234, threads, err));
    const ckpt_data_opts opts = {.kind = CKPT_DATA_BYTES, .seq_len = tokens, .seed = 1, .eod = -1};
    CKPT_CHECK(ckpt_data_open(&s->data, paths, 1, &opts, err));
    const ckpt_train_config train = {
        .batch = 1, .micro = 1, .seq_len = tokens, .dtype = CKPT_TRAIN_F32, .threads = threads};
    const ckpt_optim_config optim = ckpt_optim_defaults(CKPT_OPTIM_ADAMW);
    const ckpt_schedule schedule = {.max_lr = 1e-4,
                                    .decay = 1000,
                                    .style = CKPT_LR_CONSTANT,
                                    .start_wd = 0.1,
                                    .end_wd = 0.1,
                                    .wd_style = CKPT_WD_CONSTANT};
    CKPT_CHECK(ckpt_trainer_open(&s->t, &s->model, &train, &optim, &schedule, s->data, err));
done:
    return status;
}

static ckpt_status op_step(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    stepping *s = calloc(1, sizeof *s);
    ckpt_eng threads;
    int64_t tokens;
    double seconds;
    ckpt_status status;
    (void)n;
    if (s == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(read_number(words[2], 16, 4096, &tokens, err));
    CKPT_CHECK(start_engine(&threads, words[3], err));
    CKPT_CHECK(open_step(s, words[1], tokens, threads.threads, err));
    CKPT_CHECK(time_passes(pass_step, s, threads.threads, &seconds, err));
    if (!(s->report.loss < s->first)) {
        status = ckpt_fail(err, CKPT_E_MISMATCH, "the loss went from %g to %g", s->first,
                           s->report.loss);
        goto done;
    }
    const double flops = ckpt_trainer_flops(&s->t);
    out->seconds = seconds * 1e12 / flops;
    (void)snprintf(out->note, sizeof out->note, "%.3f s a step, %.0f GFLOP/s, loss %.3f to %.3f",
                   seconds, flops / seconds / 1e9, s->first, s->report.loss);
done:
    ckpt_trainer_close(&s->t);
    ckpt_data_close(s->data);
    ckpt_model_release(&s->model);
    ckpt_source_close(&s->src);
    free(s);
    return status;
}

const bench_op bench_engine_ops[] = {
    {"@fma",      3, op_fma     },
    {"@sgemm",    3, op_sgemm   },
    {"@openblas", 3, op_openblas},
    {"@kda",      5, op_kda     },
    {"@step",     4, op_step    },
    {NULL,        0, NULL       },
};
