/* One quantised KDA prefill run by the CUDA kernels and by the engine's f32 build, array by array. The
 * includer says where the kernels' memory is: dev_alloc, dev_free, dev_put, dev_get, dev_wait. */
#ifndef CKPT_TEST_QUANT_CASE_H
#define CKPT_TEST_QUANT_CASE_H

#include "codec.h"
#include "cuda/quant.h"
#include "quant/kda_quant.h"
#include "quant_policies.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static inline void *dev_alloc(size_t bytes);
static inline void dev_free(void *p);
static inline void dev_put(void *to, const void *from, size_t bytes);
static inline void dev_get(void *to, const void *from, size_t bytes);
static inline bool dev_wait(void); /* false after an error */

typedef struct quant_case {
    const char *policy;
    bool half;   /* q, k, v, o and their gradients in bf16 */
    bool states; /* initial state and gradient of the final one */
    int H, HV, K, V, N;
    int64_t cu[8];
    double decay; /* g uniform in -decay .. 0 */
    int block_v;  /* 0: the policy's */
} quant_case;

enum { QC_Q, QC_K, QC_V, QC_G, QC_BETA, QC_STATE0, QC_DO, QC_DSTATE, QC_IN };
enum { QC_O, QC_STATE, QC_DQ, QC_DK, QC_DV, QC_DG, QC_DBETA, QC_DSTATE0, QC_OUT };
static const char *const quant_names[QC_OUT] = {"o",  "s_final", "dq",    "dk",
                                                "dv", "dg",      "dbeta", "ds0"};

typedef struct quant_array {
    float *x, *got; /* inputs and the reference's values; the kernels' */
    void *dev;
    int64_t n;
    bool half;
} quant_array;

typedef struct quant_run {
    ckpt_quant policy;
    ckpt_cuda_quant d;
    ckpt_cuda c;
    int64_t cu[8];
    quant_array in[QC_IN], out[QC_OUT];
    void *saved, *errors; /* errors: of an approximate inverse, two doubles */
    size_t saved_bytes;
    ckpt_quant_report report; /* the reference's */
} quant_run;

static inline void quant_array_new(quant_array *a, int64_t n, bool half)
{
    *a = (quant_array){.n = n, .half = half};
    a->x = calloc((size_t)n + 1, sizeof(float));
    a->got = calloc((size_t)n + 1, sizeof(float));
    a->dev = dev_alloc((size_t)(n + 8) * 4);
}
static inline void quant_array_free(quant_array *a)
{
    free(a->x);
    free(a->got);
    dev_free(a->dev);
}
/* To the device, and what it was rounded to back into x. */
static inline void quant_array_put(quant_array *a)
{
    uint16_t *raw = malloc((size_t)(a->n + 1) * sizeof *raw);
    for (int64_t i = 0; i < a->n && a->half; i++) {
        a->x[i] = ckpt_bf16_round(a->x[i]);
        raw[i] = (uint16_t)(ckpt_f32_bits(a->x[i]) >> 16);
    }
    dev_put(a->dev, a->half ? (void *)raw : a->x, (size_t)a->n * (a->half ? 2 : 4));
    free(raw);
}
/* An output: poisoned, so that an element nobody wrote is NaN. */
static inline void quant_array_poison(quant_array *a)
{
    void *raw = malloc((size_t)(a->n + 8) * 4);
    memset(raw, 0xff, (size_t)(a->n + 8) * 4);
    dev_put(a->dev, raw, (size_t)(a->n + 8) * 4);
    free(raw);
}
static inline void quant_array_get(quant_array *a)
{
    uint16_t *raw = malloc((size_t)(a->n + 1) * sizeof *raw);
    dev_get(a->half ? (void *)raw : a->got, a->dev, (size_t)a->n * (a->half ? 2 : 4));
    for (int64_t i = 0; i < a->n && a->half; i++)
        a->got[i] = ckpt_f32_of((uint32_t)raw[i] << 16);
    free(raw);
}
/* Relative RMS; infinite when a number is not finite. */
static inline double quant_distance(const float *x, const float *ref, int64_t n)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)x[i] - (double)ref[i];
        if (!isfinite(d))
            return INFINITY;
        diff += d * d;
        size += (double)ref[i] * (double)ref[i];
    }
    return diff == 0 ? 0 : sqrt(diff) / fmax(sqrt(size), 1e-30);
}

static uint64_t quant_random = 1;
static inline double quant_number(double lo, double hi)
{
    quant_random = quant_random * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * ((double)(quant_random >> 11) / (double)(1ull << 53));
}
static inline void quant_fill(quant_array *a, double lo, double hi)
{
    for (int64_t i = 0; i < a->n; i++)
        a->x[i] = (float)quant_number(lo, hi);
}
/* Rows of norm one. */
static inline void quant_units(quant_array *a, int width)
{
    quant_fill(a, -1, 1);
    for (int64_t r = 0; r < a->n; r += width) {
        double sum = 0;
        for (int i = 0; i < width; i++)
            sum += (double)a->x[r + i] * (double)a->x[r + i];
        for (int i = 0; i < width; i++)
            a->x[r + i] = (float)((double)a->x[r + i] / sqrt(sum));
    }
}

/* Arrays of a case, and its memory. The inputs are the caller's to fill, and to put. */
static inline ckpt_status quant_open(const quant_case *c, quant_run *r, ckpt_err *err)
{
    const int64_t T = c->cu[c->N], nq = T * c->H * c->K, nv = T * c->HV * c->V,
                  ng = T * c->HV * c->K, ns = (int64_t)c->N * c->HV * c->K * c->V, nb = T * c->HV;
    const int64_t in[QC_IN] = {nq, nq, nv, ng, nb, ns, nv, ns};
    const int64_t out[QC_OUT] = {nv, ns, nq, nq, nv, ng, nb, ns};
    memset(r, 0, sizeof *r);
    memcpy(r->cu, c->cu, sizeof r->cu);
    r->policy = quant_policy(c->policy);
    if (c->block_v > 0)
        r->policy.block_v = c->block_v;
    for (int i = 0; i < QC_IN; i++)
        quant_array_new(&r->in[i], in[i], c->half && (i < QC_G || i == QC_DO));
    for (int i = 0; i < QC_OUT; i++)
        quant_array_new(&r->out[i], out[i], c->half && (i == QC_O || (i >= QC_DQ && i <= QC_DV)));
    r->d = (ckpt_cuda_quant){
        .policy = &r->policy, .H = c->H, .HV = c->HV, .K = c->K, .V = c->V, .N = c->N, .cu = r->cu};
    r->c = (ckpt_cuda){.type = c->half ? CKPT_CUDA_BF16 : CKPT_CUDA_F32};
    ckpt_status status = ckpt_cuda_quant_bytes(&r->c, &r->d, &r->saved_bytes, &r->c.bytes, err);
    if (status != CKPT_OK)
        return status;
    r->saved = dev_alloc(r->saved_bytes + 1);
    r->c.work = dev_alloc(r->c.bytes + 1);
    r->errors = dev_alloc(2 * sizeof(double));
    return r->saved == NULL || r->c.work == NULL
               ? ckpt_fail(err, CKPT_E_NOMEM, "quantised KDA: no memory of %zu and %zu bytes",
                           r->saved_bytes, r->c.bytes)
               : CKPT_OK;
}
static inline void quant_close(quant_run *r)
{
    for (int i = 0; i < QC_IN; i++)
        quant_array_free(&r->in[i]);
    for (int i = 0; i < QC_OUT; i++)
        quant_array_free(&r->out[i]);
    dev_free(r->saved);
    dev_free(r->c.work);
    dev_free(r->errors);
}
static inline void quant_inputs(const quant_case *c, quant_run *r)
{
    quant_units(&r->in[QC_Q], c->K);
    quant_units(&r->in[QC_K], c->K);
    quant_fill(&r->in[QC_V], -1, 1);
    quant_fill(&r->in[QC_G], -c->decay, 0);
    quant_fill(&r->in[QC_BETA], 0, 1);
    quant_fill(&r->in[QC_STATE0], -0.2, 0.2);
    quant_fill(&r->in[QC_DO], -1, 1);
    quant_fill(&r->in[QC_DSTATE], -1, 1);
}
/* Have forward measure the approximate inverse, and what it found. */
static inline void quant_measure(quant_run *r)
{
    const double zero[2] = {0, 0};
    dev_put(r->errors, zero, sizeof zero);
    r->d.errors = r->policy.solve_factors > 0 ? r->errors : NULL;
}
static inline void quant_measured(const quant_run *r, double errors[2])
{
    dev_get(errors, r->errors, 2 * sizeof *errors);
}
static inline void quant_put(quant_run *r)
{
    for (int i = 0; i < QC_IN; i++)
        quant_array_put(&r->in[i]);
    for (int i = 0; i < QC_OUT; i++)
        quant_array_poison(&r->out[i]);
}
static inline ckpt_cuda_delta_in quant_in(const quant_case *c, const quant_run *r)
{
    return (ckpt_cuda_delta_in){.q = r->in[QC_Q].dev,
                                .k = r->in[QC_K].dev,
                                .v = r->in[QC_V].dev,
                                .g = r->in[QC_G].dev,
                                .erase = r->in[QC_BETA].dev,
                                .state0 = c->states ? r->in[QC_STATE0].dev : NULL};
}
static inline ckpt_status quant_forward(const quant_case *c, quant_run *r, ckpt_err *err)
{
    const ckpt_cuda_delta_in in = quant_in(c, r);
    return ckpt_cuda_quant_fwd(&r->c, &r->d, &in, r->out[QC_O].dev, r->out[QC_STATE].dev, r->saved,
                               err);
}
static inline ckpt_status quant_backward(const quant_case *c, quant_run *r, ckpt_err *err)
{
    const ckpt_cuda_delta_in in = quant_in(c, r);
    const ckpt_cuda_delta_grad g = {.q = r->out[QC_DQ].dev,
                                    .k = r->out[QC_DK].dev,
                                    .v = r->out[QC_DV].dev,
                                    .g = r->out[QC_DG].dev,
                                    .erase = r->out[QC_DBETA].dev,
                                    .state0 = r->out[QC_DSTATE0].dev};
    return ckpt_cuda_quant_bwd(&r->c, &r->d, &in, r->saved, r->in[QC_DO].dev,
                               c->states ? r->in[QC_DSTATE].dev : NULL, &g, err);
}

/* The CPU's f32 build on the same inputs, into x of the outputs. */
static inline ckpt_status quant_reference_once(ckpt_eng *e, const quant_case *c, quant_run *r,
                                               ckpt_err *err)
{
    const ckpt_eng_delta d = {.rule = CKPT_ENG_KDA, .H = c->H, .HV = c->HV, .K = c->K, .V = c->V};
    const ckpt_eng_seq seq = {.n = c->N, .cu = r->cu};
    const ENG(delta_in) in = {.q = r->in[QC_Q].x,
                              .k = r->in[QC_K].x,
                              .v = r->in[QC_V].x,
                              .g = r->in[QC_G].x,
                              .erase = r->in[QC_BETA].x,
                              .state0 = c->states ? r->in[QC_STATE0].x : NULL};
    const ENG(delta_grad) g = {.q = r->out[QC_DQ].x,
                               .k = r->out[QC_DK].x,
                               .v = r->out[QC_DV].x,
                               .g = r->out[QC_DG].x,
                               .erase = r->out[QC_DBETA].x,
                               .state0 = r->out[QC_DSTATE0].x};
    ENG(quant_saved) saved;
    ckpt_status status;
    CKPT_CHECK(ENG(kda_quant_save)(e, &r->policy, &d, &seq, &saved, err));
    CKPT_CHECK(ENG(kda_quant)(e, &r->policy, &d, &seq, &in, r->out[QC_O].x, r->out[QC_STATE].x,
                              &saved, &r->report, err));
    CKPT_CHECK(ENG(kda_quant_bwd)(e, &r->policy, &d, &seq, &in, &saved, r->in[QC_DO].x,
                                  c->states ? r->in[QC_DSTATE].x : NULL, &g, err));
done:
    return status;
}
static inline ckpt_status quant_reference(const quant_case *c, quant_run *r, int threads,
                                          ckpt_err *err)
{
    ckpt_eng e;
    ckpt_eng_init(&e, threads);
    r->report = (ckpt_quant_report){.calls = {0}};
    ckpt_status status = quant_reference_once(&e, c, r, err);
    if (status == CKPT_OK)
        status = ckpt_eng_reserve(&e, e.peak, err);
    if (status == CKPT_OK)
        status = quant_reference_once(&e, c, r, err);
    ckpt_eng_release(&e);
    return status;
}

#endif
