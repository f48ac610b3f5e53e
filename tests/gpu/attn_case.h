/* Attention on CUDA against the engine's f64 operation, forward and backward. Used by the emulated suite and
 * by the program for a card.
 *
 * Limits on the relative RMS error. f32: 1e-5. bf16: 3.92e-3 for o, one rounding of the result and one of
 * the weights, which average out; 8e-3 for gradients, whose factors P and dS are rounded once more and
 * whose D comes from a rounded o (what FLA allows its bf16 gradients, kda_case.h); lse is f32 from f32
 * scores. */
#ifndef CKPT_TEST_ATTN_CASE_H
#define CKPT_TEST_ATTN_CASE_H

#define CKPT_REAL 64
#include "attn.h"
#include "cuda/attention.h"
#include "ops_case.h"

#include <assert.h>
#include <stddef.h>

static_assert(sizeof(ckpt_cuda_part) == sizeof(ckpt_eng_part) &&
                  offsetof(ckpt_cuda_part, row) == offsetof(ckpt_eng_part, row),
              "a part has one layout");

typedef struct attn_case {
    int64_t N, G, DK, DV;
    double scale;
    int64_t n, cu[12];
    int64_t n_parts; /* 0: all queries */
    ckpt_eng_part parts[12];
} attn_case;

static inline void attn_same(ops_run *o, const attn_case *c, const char *what, kda_array *a,
                             double bf16)
{
    const bool half = o->c.type == CKPT_CUDA_BF16;
    const double limit = half && a->dtype == CKPT_BF16 ? bf16 : 1e-5;
    kda_get(a);
    const double far = kda_distance(a);
    o->worst[half] = fmax(o->worst[half], far);
    if (!(far <= limit) && !o->said[0])
        (void)snprintf(o->said, sizeof o->said,
                       "attention %lld/%lld heads of %lld and %lld, %lld tokens: %s: relative RMS "
                       "%.3g above %.3g",
                       (long long)c->N, (long long)c->G, (long long)c->DK, (long long)c->DV,
                       (long long)c->cu[c->n], what, far, limit);
}

static inline void attn_again(ops_run *o, const char *what, kda_array *a)
{
    double *before = malloc((size_t)(a->n + 1) * sizeof *before);
    memcpy(before, a->got, (size_t)a->n * sizeof *before);
    kda_get(a);
    if (memcmp(before, a->got, (size_t)a->n * sizeof *before) != 0 && !o->said[0])
        (void)snprintf(o->said, sizeof o->said, "attention: %s: other bits the second time", what);
    free(before);
}

/* twice: once more, for equal bits. */
static inline void attn_run(ops_run *o, const attn_case *c, ckpt_cuda_attend_kind kind, bool twice)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t T = c->cu[c->n];
    int64_t rows = T;
    ckpt_err err;
    if (c->n_parts > 0)
        rows = c->parts[c->n_parts - 1].row + c->parts[c->n_parts - 1].n;
    const ckpt_eng_attention ref = {.N = c->N,
                                    .G = c->G,
                                    .DK = c->DK,
                                    .DV = c->DV,
                                    .scale = c->scale,
                                    .parts = c->n_parts > 0 ? c->parts : NULL,
                                    .n_parts = c->n_parts};
    const ckpt_eng_seq cu = {c->n, c->cu};
    kda_array *q = ops_in(o, rows * c->N * c->DK, E, -2, 2);
    kda_array *k = ops_in(o, T * c->G * c->DK, E, -2, 2);
    kda_array *v = ops_in(o, T * c->G * c->DV, E, -1, 1);
    kda_array *d_o = ops_in(o, rows * c->N * c->DV, E, -1, 1);
    kda_array *out = ops_out(o, rows * c->N * c->DV, E), *lse = ops_out(o, rows * c->N, CKPT_F32);
    kda_array *dq = ops_out(o, rows * c->N * c->DK, E), *dk = ops_out(o, T * c->G * c->DK, E);
    kda_array *dv = ops_out(o, T * c->G * c->DV, E);
    void *dcu = dev_alloc(sizeof c->cu + 256), *dparts = dev_alloc(sizeof c->parts + 256);
    dev_put(dcu, c->cu, sizeof c->cu);
    dev_put(dparts, c->parts, sizeof c->parts);
    const ckpt_cuda_seq seq = {.n = c->n, .tokens = T, .cu = dcu};
    const ckpt_cuda_attention a = {.N = c->N,
                                   .G = c->G,
                                   .DK = c->DK,
                                   .DV = c->DV,
                                   .scale = c->scale,
                                   .parts = c->n_parts > 0 ? dparts : NULL,
                                   .n_parts = c->n_parts,
                                   .rows = rows,
                                   .kind = kind};
    o->c.bytes = ckpt_cuda_attention_work(rows, c->N);
    o->c.work = dev_alloc(o->c.bytes + 256);
    ops_did(o, "reference",
            ENG(attention)(&o->e, &ref, &cu, q->x, k->x, v->x, out->x, lse->x, &err), &err);
    ops_did(o, "reference",
            ENG(attention_bwd)(&o->e, &ref, &cu, q->x, k->x, v->x, out->x, lse->x, d_o->x, dq->x,
                               dk->x, dv->x, &err),
            &err);
    static const char *const names[] = {"o", "lse", "dq", "dk", "dv"};
    static const double limits[] = {3.92e-3, 0, 8e-3, 8e-3, 8e-3};
    kda_array *results[] = {out, lse, dq, dk, dv};
    for (int turn = 0; turn < (twice ? 2 : 1); turn++) {
        for (size_t i = 0; i < sizeof results / sizeof *results; i++)
            kda_poison(results[i]);
        ops_did(o, "attention",
                ckpt_cuda_attend(&o->c, &a, &seq, q->dev, k->dev, v->dev, out->dev, lse->dev, &err),
                &err);
        ops_did(o, "attention",
                ckpt_cuda_attend_bwd(&o->c, &a, &seq, q->dev, k->dev, v->dev, out->dev, lse->dev,
                                     d_o->dev, dq->dev, dk->dev, dv->dev, &err),
                &err);
        (void)dev_wait();
        for (size_t i = 0; i < sizeof results / sizeof *results; i++)
            if (turn == 0)
                attn_same(o, c, names[i], results[i], limits[i]);
            else
                attn_again(o, names[i], results[i]);
    }
    dev_free(dcu);
    dev_free(dparts);
    ops_clear(o);
}

/* clang-format off */
static const attn_case attn_cases[] = {
    {.N = 2, .G = 1, .DK = 64, .DV = 64, .n = 0},
    {.N = 1, .G = 1, .DK = 64, .DV = 64, .n = 1, .cu = {0, 1}},
    {.N = 2, .G = 1, .DK = 24, .DV = 16, .n = 1, .cu = {0, 127}},
    {.N = 1, .G = 1, .DK = 64, .DV = 64, .n = 1, .cu = {0, 129}},
    {.N = 2, .G = 2, .DK = 64, .DV = 64, .n = 3, .cu = {0, 63, 63, 128}},
    {.N = 2, .G = 1, .DK = 40, .DV = 72, .n = 2, .cu = {0, 65, 98}},
    {.N = 1, .G = 1, .DK = 128, .DV = 128, .n = 1, .cu = {0, 66}},
    {.N = 1, .G = 1, .DK = 192, .DV = 128, .scale = 0.11, .n = 2, .cu = {0, 33, 98}},
    {.N = 1, .G = 1, .DK = 256, .DV = 256, .n = 1, .cu = {0, 34}},
    {.N = 1, .G = 1, .DK = 13, .DV = 7, .n = 1, .cu = {0, 21}}, /* rows of odd length */
    /* zigzag shares: two pieces of one sequence, none of the next, an empty part */
    {.N = 2, .G = 1, .DK = 64, .DV = 64, .n = 4, .cu = {0, 90, 120, 120, 251}, .n_parts = 5,
     .parts = {{0, 3, 20, 0}, {0, 70, 17, 20}, {1, 30, 0, 37}, {3, 0, 1, 37}, {3, 64, 67, 38}}},
    {.N = 1, .G = 1, .DK = 192, .DV = 128, .n = 1, .cu = {0, 70}, .n_parts = 2,
     .parts = {{0, 0, 9, 0}, {0, 61, 9, 9}}},
};
/* clang-format on */

#endif
