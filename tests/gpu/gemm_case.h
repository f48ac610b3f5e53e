/* Products on CUDA against sums in f64, with the limits of ops_case.h: f32 1e-5, bf16 results 3.92e-3 on top
 * of one rounding. Used by the emulated suite and by the program for a card. */
#ifndef CKPT_TEST_GEMM_CASE_H
#define CKPT_TEST_GEMM_CASE_H

#include "cuda/gemm.h"
#include "ops_case.h"

static inline ckpt_dtype gemm_dtype(ckpt_cuda_type t)
{
    return t == CKPT_CUDA_BF16 ? CKPT_BF16 : CKPT_F32;
}
/* c (+)= op(a) op(b) + bias in f64. */
static inline void gemm_reference(const ckpt_cuda_product *p, const double *a, const double *b,
                                  const double *bias, double *c)
{
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double sum = p->add ? c[i * p->ldc + j] : 0;
            for (int64_t k = 0; k < p->k; k++)
                sum += a[p->ta ? k * p->lda + i : i * p->lda + k] *
                       b[p->tb ? j * p->ldb + k : k * p->ldb + j];
            c[i * p->ldc + j] = sum + (bias ? bias[j] : 0);
        }
}
/* One product of the form p says; strides are the extents plus pad, whose columns stay as they are. */
static inline void gemm_one(ops_run *o, ckpt_cuda_product p, bool bias, int64_t pad)
{
    ckpt_err err;
    const int64_t am = p.ta ? p.k : p.m, bm = p.tb ? p.n : p.k;
    p.lda = (p.ta ? p.m : p.k) + pad;
    p.ldb = (p.tb ? p.k : p.n) + pad;
    p.ldc = p.n + pad;
    kda_array *a = ops_in(o, am * p.lda, gemm_dtype(p.a_type), -1, 1);
    kda_array *b = ops_in(o, bm * p.ldb, gemm_dtype(p.b_type), -1, 1);
    kda_array *v = ops_in(o, p.n, CKPT_F32, -1, 1);
    kda_array *c = ops_in(o, p.m * p.ldc, gemm_dtype(p.c_type), -1, 1);
    gemm_reference(&p, a->x, b->x, bias ? v->x : NULL, c->x);
    p.a = a->dev;
    p.b = b->dev;
    p.c = c->dev;
    p.bias = bias ? v->dev : NULL;
    ops_did(o, "matmul", ckpt_cuda_matmul(&o->c, &p, &err), &err);
    (void)dev_wait();
    char name[96];
    (void)snprintf(name, sizeof name, "product%s%s %lld x %lld x %lld", p.ta ? " ta" : "",
                   p.tb ? " tb" : "", (long long)p.m, (long long)p.n, (long long)p.k);
    ops_same(o, name, c);
    ops_clear(o);
}

/* A projection and its gradients, with bias; rows wider than they are long. */
static inline void gemm_linear(ops_run *o, int64_t T, int64_t n_in, int64_t n_out, bool add)
{
    const ckpt_dtype E = OPS_E(o);
    ckpt_err err;
    kda_array *x = ops_in(o, T * n_in, E, -1, 1), *w = ops_in(o, n_out * n_in, E, -1, 1);
    kda_array *b = ops_in(o, n_out, CKPT_F32, -1, 1), *dy = ops_in(o, T * n_out, E, -1, 1);
    kda_array *y = add ? ops_in(o, T * n_out, E, -1, 1) : ops_out(o, T * n_out, E);
    kda_array *dx = add ? ops_in(o, T * n_in, E, -1, 1) : ops_out(o, T * n_in, E);
    kda_array *dw = ops_in(o, n_out * n_in, CKPT_F32, -1, 1),
              *db = ops_in(o, n_out, CKPT_F32, -1, 1);
    ops_work(o, n_out);
    ops_did(o, "reference",
            ENG(linear)(&o->e, T, n_in, n_out, x->x, n_in, w->x, b->x, add, y->x, n_out, &err),
            &err);
    ops_did(
        o, "reference",
        ENG(linear_bwd)(&o->e, T, n_in, n_out, dy->x, x->x, w->x, add, dx->x, dw->x, db->x, &err),
        &err);
    ops_did(o, "linear",
            ckpt_cuda_linear(&o->c, T, n_in, n_out, x->dev, n_in, w->dev, b->dev, add, y->dev,
                             n_out, &err),
            &err);
    ops_did(o, "linear",
            ckpt_cuda_linear_dw(&o->c, T, n_in, n_out, dy->dev, n_out, x->dev, n_in, dw->dev,
                                db->dev, &err),
            &err);
    ops_did(o, "linear",
            ckpt_cuda_linear_dx(&o->c, T, n_in, n_out, dy->dev, n_out, w->dev, add, dx->dev, n_in,
                                &err),
            &err);
    (void)dev_wait();
    ops_same(o, "linear y", y);
    ops_same(o, "linear dx", dx);
    ops_same(o, "linear dw", dw);
    ops_same(o, "linear dbias", db);
    ops_clear(o);
}

/* n rows of E experts, cut at first; expert 0's gradient is left out when `hole`. */
static inline void gemm_experts(ops_run *o, int64_t E, const int64_t *first, int64_t n_in,
                                int64_t n_out, bool add, bool hole)
{
    const ckpt_dtype type = OPS_E(o);
    const size_t size = type == CKPT_BF16 ? 2 : 4;
    const int64_t n = first[E];
    ckpt_err err;
    kda_array *x = ops_in(o, n * n_in, type, -1, 1), *dy = ops_in(o, n * n_out, type, -1, 1);
    kda_array *w = ops_in(o, E * n_out * n_in, type, -1, 1);
    kda_array *y = add ? ops_in(o, n * n_out, type, -1, 1) : ops_out(o, n * n_out, type);
    kda_array *dx = add ? ops_in(o, n * n_in, type, -1, 1) : ops_out(o, n * n_in, type);
    kda_array *dw = ops_in(o, E * n_out * n_in, CKPT_F32, -1, 1);
    const void **pw = malloc((size_t)E * sizeof *pw);
    float **pd = malloc((size_t)E * sizeof *pd);
    for (int64_t i = 0; i < E; i++) {
        const int64_t lo = first[i], r = first[i + 1] - lo, at = i * n_out * n_in;
        ckpt_cuda_product p = {.tb = true, .add = add, .m = r, .n = n_out, .k = n_in};
        p.lda = n_in, p.ldb = n_in, p.ldc = n_out;
        gemm_reference(&p, x->x + lo * n_in, w->x + at, NULL, y->x + lo * n_out);
        p.tb = false, p.n = n_in, p.k = n_out, p.lda = n_out, p.ldc = n_in;
        gemm_reference(&p, dy->x + lo * n_out, w->x + at, NULL, dx->x + lo * n_in);
        p.ta = p.add = true, p.m = n_out, p.k = r;
        if (i > 0 || !hole)
            gemm_reference(&p, dy->x + lo * n_out, x->x + lo * n_in, NULL, dw->x + at);
        pw[i] = (const char *)w->dev + (size_t)at * size;
        pd[i] = i > 0 || !hole ? (float *)dw->dev + at : NULL;
    }
    void *dfirst = dev_alloc((size_t)(E + 1) * 8 + 256), *dpw = dev_alloc((size_t)E * 8 + 256);
    void *dpd = dev_alloc((size_t)E * 8 + 256);
    dev_put(dfirst, first, (size_t)(E + 1) * 8);
    dev_put(dpw, pw, (size_t)E * 8);
    dev_put(dpd, pd, (size_t)E * 8);
    ops_did(o, "experts",
            ckpt_cuda_experts(&o->c, E, n, dfirst, n_in, n_out, x->dev, dpw, add, y->dev, &err),
            &err);
    ops_did(
        o, "experts",
        ckpt_cuda_experts_dx(&o->c, E, n, dfirst, n_in, n_out, dy->dev, dpw, add, dx->dev, &err),
        &err);
    ops_did(o, "experts",
            ckpt_cuda_experts_dw(&o->c, E, n, dfirst, n_in, n_out, dy->dev, x->dev, dpd, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "experts y", y);
    ops_same(o, "experts dx", dx);
    ops_same(o, "experts dw", dw);
    dev_free(dfirst);
    dev_free(dpw);
    dev_free(dpd);
    free(pw);
    free(pd);
    ops_clear(o);
}

/* Every form at sizes 0, 1, odd and about a tile's. */
static inline void gemm_all(ops_run *o)
{
    static const int64_t sizes[][3] = {
        {0,   5,   3  },
        {4,   0,   3  },
        {3,   5,   0  },
        {1,   1,   1  },
        {7,   9,   13 },
        {64,  64,  16 },
        {65,  63,  17 },
        {128, 128, 32 },
        {129, 136, 40 },
        {127, 120, 104},
        {8,   264, 72 },
        {72,  256, 200},
        {136, 312, 328}
    };
    const ckpt_cuda_type t = o->c.type, f32 = CKPT_CUDA_F32;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int form = 0; form < 4; form++) {
            ckpt_cuda_product p = {.ta = form & 1, .tb = form / 2, .add = s % 2};
            p.m = sizes[s][0], p.n = sizes[s][1], p.k = sizes[s][2];
            p.a_type = p.b_type = t;
            p.c_type = form == 1 ? f32 : t;
            gemm_one(o, p, s % 3 == 0, form == 3 ? 3 : 0);
            if (form == 2 && p.m * p.n < 4000) { /* the router's */
                p.c_type = f32;
                gemm_one(o, p, false, 8);
                p.a_type = f32;
                gemm_one(o, p, true, 0);
                p.a_type = t, p.b_type = f32, p.c_type = t;
                gemm_one(o, p, true, 1);
            }
        }
    gemm_linear(o, 0, 4, 3, false);
    gemm_linear(o, 1, 3, 5, false);
    gemm_linear(o, 33, 40, 24, true);
    gemm_linear(o, 530, 8, 9, false);
    gemm_experts(o, 1, (const int64_t[]){0, 5}, 7, 9, false, false);
    gemm_experts(o, 3, (const int64_t[]){0, 0, 0, 0}, 8, 8, false, false);
    gemm_experts(o, 4, (const int64_t[]){0, 3, 3, 132, 140}, 16, 24, true, true);
    gemm_experts(o, 5, (const int64_t[]){0, 128, 129, 129, 131, 135}, 40, 136, false, false);
    gemm_experts(o, 6, (const int64_t[]){0, 1, 65, 129, 130, 131, 131}, 5, 3, false, true);
}

#endif
