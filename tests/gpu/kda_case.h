/* One KDA problem run by the CUDA kernels and by the engine's f64 recurrence, compared array by array.
 * The includer says where the kernels' memory is: dev_alloc, dev_free, dev_put, dev_get, dev_wait. */
#ifndef CKPT_TEST_KDA_CASE_H
#define CKPT_TEST_KDA_CASE_H

#define CKPT_REAL 64
#include "cuda/delta.h"
#include "dtype.h"
#include "ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static inline void *dev_alloc(size_t bytes);
static inline void dev_free(void *p);
static inline void dev_put(void *to, const void *from, size_t bytes);
static inline void dev_get(void *to, const void *from, size_t bytes);
static inline bool dev_wait(void); /* false after an error */

typedef struct kda_case {
    ckpt_cuda_type type;
    bool safe, states; /* states: initial state and gradient of the final one */
    int H, D;
    double g_low, g_high; /* decay, uniform between */
    double share;         /* of a common direction in every key */
    int64_t cu[12];
    int N;
    bool delta; /* through delta.h, with what follows */
    ckpt_cuda_rule rule;
    ckpt_cuda_type gates;
    int HV, K, V; /* 0 = H, D, D */
    int segments;
} kda_case;

enum {
    KDA_O,
    KDA_STATE,
    KDA_DQ,
    KDA_DK,
    KDA_DV,
    KDA_DG,
    KDA_DBETA,
    KDA_DSTATE,
    KDA_DWRITE,
    KDA_ARRAYS
};
static const char *const kda_names[KDA_ARRAYS] = {"o",  "state",  "dq",      "dk",    "dv",
                                                  "dg", "derase", "dstate0", "dwrite"};

/* Limits on the relative RMS error. f32: sums of a few thousand terms. bf16: what FLA's tests allow its
 * own kernels (kda-math.md section 4.7) on decays that forget; where nothing is forgotten values are
 * differences of larger ones, FLA itself exceeds those limits (NOTES.md), and twice them is allowed. */
static inline double kda_limit(const kda_case *c, int array)
{
    static const double bf16[KDA_ARRAYS] = {5e-3, 5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3, 8e-3};
    return c->type == CKPT_CUDA_F32 ? 1e-5 : (c->g_low > -0.1 ? 2 : 1) * bf16[array];
}

static uint64_t kda_random = 1;
static inline double kda_number(double lo, double hi)
{
    kda_random = kda_random * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * ((double)(kda_random >> 11) / (double)(1ull << 53));
}

typedef struct kda_array {
    double *x, *got; /* the reference's values, the kernels' values */
    void *dev;
    int64_t n;
    ckpt_dtype dtype;
} kda_array;

static inline void kda_new(kda_array *a, int64_t n, ckpt_dtype dtype)
{
    *a = (kda_array){.n = n, .dtype = dtype};
    a->x = calloc((size_t)n + 1, sizeof(double));
    a->got = calloc((size_t)n + 1, sizeof(double));
    a->dev = dev_alloc((size_t)(n + 8) * 4);
}
/* To the device, and what it was rounded to back into x. */
static inline void kda_put(kda_array *a)
{
    void *raw = malloc((size_t)(a->n + 1) * 4);
    ckpt_dtype_cast(a->dtype, raw, CKPT_F64, a->x, (size_t)a->n);
    ckpt_dtype_cast(CKPT_F64, a->x, a->dtype, raw, (size_t)a->n);
    dev_put(a->dev, raw, (size_t)a->n * (a->dtype == CKPT_BF16 ? 2 : 4));
    free(raw);
}
/* An output: poisoned, so that an element nobody wrote is NaN. */
static inline void kda_poison(kda_array *a)
{
    void *raw = malloc((size_t)(a->n + 8) * 4);
    memset(raw, 0xff, (size_t)(a->n + 8) * 4);
    dev_put(a->dev, raw, (size_t)(a->n + 8) * 4);
    free(raw);
}
static inline void kda_get(kda_array *a)
{
    void *raw = malloc((size_t)(a->n + 1) * 4);
    dev_get(raw, a->dev, (size_t)a->n * (a->dtype == CKPT_BF16 ? 2 : 4));
    ckpt_dtype_cast(CKPT_F64, a->got, a->dtype, raw, (size_t)a->n);
    free(raw);
}
static inline void kda_drop(kda_array *a)
{
    free(a->x);
    free(a->got);
    dev_free(a->dev);
}
static inline double kda_distance(const kda_array *a)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < a->n; i++) {
        const double d = a->got[i] - a->x[i];
        if (!isfinite(d))
            return INFINITY;
        diff += d * d;
        size += a->x[i] * a->x[i];
    }
    /* a gradient that is exactly nothing is the difference of terms of this size */
    return diff == 0 ? 0 : sqrt(diff) / fmax(sqrt(size), 1e-2 * sqrt((double)a->n));
}

typedef struct kda_run {
    ckpt_cuda_kda d;
    ckpt_cuda_delta delta;
    int64_t T;
    kda_array q, k, v, g, beta, write, state0, d_o, d_state;
    kda_array out[KDA_ARRAYS];
    void *work;
    size_t forward, backward;
} kda_run;

/* Keys and queries of norm one, as the layer makes them. */
static inline void kda_unit_rows(double *x, int64_t rows, int D, double share)
{
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int d = 0; d < D; d++) {
            double common = d % 3 - 1 + 0.1 * (d % 7);
            x[r * D + d] = share * common + (1 - share) * kda_number(-1, 1);
            sum += x[r * D + d] * x[r * D + d];
        }
        for (int d = 0; d < D; d++)
            x[r * D + d] /= sqrt(sum);
    }
}

static inline void kda_fill(kda_array *a, double lo, double hi)
{
    for (int64_t i = 0; i < a->n; i++)
        a->x[i] = kda_number(lo, hi);
    kda_put(a);
}

static inline ckpt_status kda_work(const kda_case *c, kda_run *r, ckpt_err *err)
{
    const ckpt_cuda context = {.type = c->type};
    ckpt_status status;
    if (c->delta)
        status = ckpt_cuda_delta_bytes(&context, &r->delta, &r->forward, &r->backward, err);
    else
        status = ckpt_cuda_kda_bytes(&r->d, &r->forward, &r->backward, err);
    if (status == CKPT_OK)
        r->work = dev_alloc((r->forward > r->backward ? r->forward : r->backward) + 256);
    return status;
}

static inline ckpt_status kda_make(const kda_case *c, kda_run *r, ckpt_err *err)
{
    const bool gdn = c->rule == CKPT_CUDA_RULE_GDN, gdn2 = c->rule == CKPT_CUDA_RULE_GDN2;
    const ckpt_dtype e = c->type == CKPT_CUDA_BF16 ? CKPT_BF16 : CKPT_F32,
                     f = c->gates == CKPT_CUDA_BF16 ? CKPT_BF16 : CKPT_F32;
    const int K = c->K ? c->K : c->D, V = c->V ? c->V : c->D, HV = c->HV ? c->HV : c->H;
    const int64_t T = c->N > 0 ? c->cu[c->N] : 0, nk = T * c->H * K, nv = T * HV * V,
                  ng = T * HV * (gdn ? 1 : K), ne = T * HV * (gdn2 ? K : 1), nw = gdn2 ? nv : 0,
                  s = (int64_t)c->N * HV * K * V;
    *r = (kda_run){.T = T};
    r->d = (ckpt_cuda_kda){.type = c->type,
                           .N = c->N,
                           .H = c->H,
                           .D = c->D,
                           .cu = c->cu,
                           .safe = c->safe,
                           .segments = c->segments};
    r->delta = (ckpt_cuda_delta){.rule = c->rule,
                                 .gates = c->gates,
                                 .safe = c->safe,
                                 .H = c->H,
                                 .HV = HV,
                                 .K = K,
                                 .V = V,
                                 .N = c->N,
                                 .cu = c->cu};
    kda_new(&r->q, nk, e);
    kda_new(&r->k, nk, e);
    kda_new(&r->v, nv, e);
    kda_new(&r->g, ng, f);
    kda_new(&r->beta, ne, f);
    kda_new(&r->write, nw, f);
    kda_new(&r->state0, s, CKPT_F32);
    kda_new(&r->d_o, nv, e);
    kda_new(&r->d_state, s, CKPT_F32);
    kda_unit_rows(r->q.x, T * c->H, K, 0);
    kda_unit_rows(r->k.x, T * c->H, K, c->share);
    kda_put(&r->q);
    kda_put(&r->k);
    kda_fill(&r->v, -1, 1);
    kda_fill(&r->g, c->g_low, c->g_high);
    kda_fill(&r->beta, 0, 1);
    kda_fill(&r->write, 0, 1);
    kda_fill(&r->state0, -1, 1);
    kda_fill(&r->d_o, -1, 1);
    kda_fill(&r->d_state, -1, 1);
    const int64_t sizes[KDA_ARRAYS] = {nv, s, nk, nk, nv, ng, ne, s, nw};
    const ckpt_dtype types[KDA_ARRAYS] = {e, CKPT_F32, e, e, e, f, f, CKPT_F32, f};
    for (int i = 0; i < KDA_ARRAYS; i++) {
        kda_new(&r->out[i], sizes[i], types[i]);
        kda_poison(&r->out[i]);
    }
    return kda_work(c, r, err);
}

static inline void kda_free(kda_run *r)
{
    kda_array *in[] = {&r->q,     &r->k,      &r->v,   &r->g,      &r->beta,
                       &r->write, &r->state0, &r->d_o, &r->d_state};
    for (size_t i = 0; i < sizeof in / sizeof *in; i++)
        kda_drop(in[i]);
    for (int i = 0; i < KDA_ARRAYS; i++)
        kda_drop(&r->out[i]);
    dev_free(r->work);
}

static inline ckpt_cuda kda_context(const kda_case *c, const kda_run *r, size_t bytes, void *stream)
{
    return (ckpt_cuda){.type = c->type, .stream = stream, .work = r->work, .bytes = bytes};
}
static inline ckpt_cuda_delta_in kda_delta_in(const kda_case *c, const kda_run *r)
{
    return (ckpt_cuda_delta_in){.q = r->q.dev,
                                .k = r->k.dev,
                                .v = r->v.dev,
                                .g = r->g.dev,
                                .erase = r->beta.dev,
                                .write = r->write.dev,
                                .state0 = c->states ? r->state0.dev : NULL};
}
static inline ckpt_cuda_kda_in kda_in(const kda_case *c, const kda_run *r)
{
    return (ckpt_cuda_kda_in){.q = r->q.dev,
                              .k = r->k.dev,
                              .v = r->v.dev,
                              .g = r->g.dev,
                              .beta = r->beta.dev,
                              .state0 = c->states ? r->state0.dev : NULL};
}
static inline ckpt_status kda_forward(const kda_case *c, kda_run *r, void *stream, ckpt_err *err)
{
    const ckpt_cuda_kda_in in = kda_in(c, r);
    if (c->delta) {
        const ckpt_cuda context = kda_context(c, r, r->forward, stream);
        const ckpt_cuda_delta_in x = kda_delta_in(c, r);
        return ckpt_cuda_delta_fwd(&context, &r->delta, &x, r->out[KDA_O].dev,
                                   r->out[KDA_STATE].dev, err);
    }
    return ckpt_cuda_kda_fwd(&r->d, &in, r->out[KDA_O].dev, r->out[KDA_STATE].dev, r->work, stream,
                             err);
}
static inline ckpt_status kda_backward(const kda_case *c, kda_run *r, void *stream, ckpt_err *err)
{
    if (c->delta) {
        const ckpt_cuda context = kda_context(c, r, r->backward, stream);
        const ckpt_cuda_delta_in x = kda_delta_in(c, r);
        const ckpt_cuda_delta_grad y = {.q = r->out[KDA_DQ].dev,
                                        .k = r->out[KDA_DK].dev,
                                        .v = r->out[KDA_DV].dev,
                                        .g = r->out[KDA_DG].dev,
                                        .erase = r->out[KDA_DBETA].dev,
                                        .write = r->out[KDA_DWRITE].dev,
                                        .state0 = r->out[KDA_DSTATE].dev};
        return ckpt_cuda_delta_bwd(&context, &r->delta, &x, r->d_o.dev,
                                   c->states ? r->d_state.dev : NULL, &y, err);
    }
    const ckpt_cuda_kda_in in = kda_in(c, r);
    const ckpt_cuda_kda_grad g = {.q = r->out[KDA_DQ].dev,
                                  .k = r->out[KDA_DK].dev,
                                  .v = r->out[KDA_DV].dev,
                                  .g = r->out[KDA_DG].dev,
                                  .beta = r->out[KDA_DBETA].dev,
                                  .state0 = r->out[KDA_DSTATE].dev};
    return ckpt_cuda_kda_bwd(&r->d, &in, r->d_o.dev, c->states ? r->d_state.dev : NULL, &g, r->work,
                             stream, err);
}

static inline ckpt_status kda_reference_once(ckpt_eng *e, const kda_case *c, kda_run *r,
                                             ckpt_err *err)
{
    const ckpt_eng_delta d = {.rule = (ckpt_eng_rule)c->rule,
                              .form = CKPT_ENG_STEP,
                              .H = c->H,
                              .HV = r->delta.HV,
                              .K = r->delta.K,
                              .V = r->delta.V};
    const ckpt_eng_seq seq = {.n = c->N, .cu = c->cu};
    const ENG(delta_in) in = {.q = r->q.x,
                              .k = r->k.x,
                              .v = r->v.x,
                              .g = r->g.x,
                              .erase = r->beta.x,
                              .write = r->write.x,
                              .state0 = c->states ? r->state0.x : NULL};
    const ENG(delta_grad) g = {.q = r->out[KDA_DQ].x,
                               .k = r->out[KDA_DK].x,
                               .v = r->out[KDA_DV].x,
                               .g = r->out[KDA_DG].x,
                               .erase = r->out[KDA_DBETA].x,
                               .write = r->out[KDA_DWRITE].x,
                               .state0 = r->out[KDA_DSTATE].x};
    double *saved = ckpt_eng_take(e, ENG(delta_saved_len)(&d, &seq), sizeof(double));
    ckpt_status status =
        ENG(delta)(e, &d, &seq, &in, r->out[KDA_O].x, r->out[KDA_STATE].x, saved, err);
    if (status == CKPT_OK)
        status = ENG(delta_bwd)(e, &d, &seq, &in, saved, r->d_o.x, c->states ? r->d_state.x : NULL,
                                &g, err);
    return status;
}
static inline ckpt_status kda_reference(const kda_case *c, kda_run *r, int threads, ckpt_err *err)
{
    ckpt_eng e;
    ckpt_eng_init(&e, threads);
    ckpt_status status = kda_reference_once(&e, c, r, err);
    if (status == CKPT_OK)
        status = ckpt_eng_reserve(&e, e.peak, err);
    if (status == CKPT_OK)
        status = kda_reference_once(&e, c, r, err);
    ckpt_eng_release(&e);
    return status;
}

#endif
