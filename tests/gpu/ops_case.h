/* Pointwise and row operations on CUDA against the engine's f64 twins, array by array. The includer says
 * where the kernels' memory is (kda_case.h).
 *
 * Inputs are random and rounded to their type first. Outputs are poisoned, sums that are added to begin
 * with random numbers. Limits on the relative RMS error: 1e-5 for an f32 array (f32 arithmetic, sums of
 * up to 16384 terms), 3.92e-3 for a bf16 array (one rounding, 2^-8 at most, on top). Values are of
 * order one; of a gradient that cancels out the error is taken relative to 1e-2. */
#ifndef CKPT_TEST_OPS_CASE_H
#define CKPT_TEST_OPS_CASE_H

#include "cuda/ops.h"
#include "kda_case.h"

#include <stdio.h>

typedef struct ops_run {
    ckpt_eng e;
    ckpt_cuda c;
    kda_array a[32];
    int n;
    char said[2200]; /* the first thing that is wrong, or "" */
    double worst[2]; /* of f32 and of bf16 arrays */
    bool skip_reference;
} ops_run;

#define OPS_E(o) ((o)->c.type == CKPT_CUDA_BF16 ? CKPT_BF16 : CKPT_F32)

static inline void ops_open(ops_run *o, ckpt_cuda_type type, int threads)
{
    ckpt_err err;
    memset(o, 0, sizeof *o);
    o->c.type = type;
    ckpt_eng_init(&o->e, threads);
    if (ckpt_eng_reserve(&o->e, 256 << 20, &err) != CKPT_OK)
        (void)snprintf(o->said, sizeof o->said, "%s", err.text);
}
static inline void ops_clear(ops_run *o)
{
    for (int i = 0; i < o->n; i++)
        kda_drop(&o->a[i]);
    o->n = 0;
    dev_free(o->c.work);
    o->c.work = NULL;
    o->c.bytes = 0;
}
static inline void ops_close(ops_run *o)
{
    ops_clear(o);
    ckpt_eng_release(&o->e);
}
static inline void ops_work(ops_run *o, int64_t columns)
{
    o->c.bytes = ckpt_cuda_work(columns);
    o->c.work = dev_alloc(o->c.bytes + 256);
}
static inline kda_array *ops_in(ops_run *o, int64_t n, ckpt_dtype t, double lo, double hi)
{
    kda_array *a = &o->a[o->n++];
    kda_new(a, n, t);
    kda_fill(a, lo, hi);
    return a;
}
static inline kda_array *ops_out(ops_run *o, int64_t n, ckpt_dtype t)
{
    kda_array *a = &o->a[o->n++];
    kda_new(a, n, t);
    kda_poison(a);
    return a;
}
static inline void ops_did(ops_run *o, const char *what, ckpt_status status, const ckpt_err *err)
{
    if (status != CKPT_OK && !o->said[0])
        (void)snprintf(o->said, sizeof o->said, "%s: %s", what, err->text);
}
static inline void ops_near(ops_run *o, const char *what, kda_array *a, bool bf16)
{
    double diff = 0, size = 0, limit = bf16 ? 3.92e-3 : 1e-5;
    kda_get(a);
    for (int64_t i = 0; i < a->n; i++) {
        diff += (a->got[i] - a->x[i]) * (a->got[i] - a->x[i]);
        size += a->x[i] * a->x[i];
    }
    const double far = diff == 0 ? 0 : sqrt(diff / fmax(size, 1e-4 * (double)a->n));
    o->worst[bf16] = fmax(o->worst[bf16], far);
    if (!(far <= limit) && !o->said[0])
        (void)snprintf(o->said, sizeof o->said, "%s of %lld: relative RMS %.3g above %.3g", what,
                       (long long)a->n, far, limit);
}

static inline void ops_same(ops_run *o, const char *what, kda_array *a)
{
    ops_near(o, what, a, a->dtype == CKPT_BF16);
}

/* ---- norms ------------------------------------------------------------------------------------ */

enum { OPS_PLAIN, OPS_CENTRED, OPS_NO_WEIGHT, OPS_GATED, OPS_GATED_SILU, OPS_L2, OPS_NORMS };

static inline void ops_norm(ops_run *o, int64_t rows, int64_t n, int mode)
{
    const ckpt_dtype E = OPS_E(o);
    const bool gated = mode == OPS_GATED || mode == OPS_GATED_SILU, silu = mode == OPS_GATED_SILU;
    const bool centred = mode == OPS_CENTRED, add = centred;
    const double eps = 1e-6;
    ckpt_err err;
    kda_array *x = ops_in(o, rows * n, E, -2, 2), *z = ops_in(o, rows * n, E, -3, 3);
    kda_array *w = ops_in(o, n, CKPT_F32, -1, 1), *dy = ops_in(o, rows * n, E, -1, 1);
    kda_array *y = ops_out(o, rows * n, E), *r = ops_out(o, rows, CKPT_F32);
    kda_array *dx = add ? ops_in(o, rows * n, E, -1, 1) : ops_out(o, rows * n, E);
    kda_array *dz = ops_out(o, rows * n, E), *dw = ops_in(o, n, CKPT_F32, -1, 1);
    const double *wx = mode == OPS_NO_WEIGHT ? NULL : w->x;
    const float *wd = mode == OPS_NO_WEIGHT ? NULL : w->dev;
    const ckpt_eng_act act = silu ? CKPT_ENG_SILU : CKPT_ENG_SIGMOID;
    ops_work(o, n);
    if (gated) {
        ops_did(o, "reference",
                ENG(gated_rmsnorm)(&o->e, rows, n, x->x, z->x, w->x, act, eps, y->x, r->x, &err),
                &err);
        ops_did(o, "gated",
                ckpt_cuda_gated_rmsnorm(&o->c, rows, n, x->dev, z->dev, w->dev, silu, eps, y->dev,
                                        r->dev, &err),
                &err);
    } else if (mode == OPS_L2) {
        ops_did(o, "reference", ENG(l2norm)(&o->e, rows, n, x->x, eps, y->x, r->x, &err), &err);
        ops_did(o, "l2norm", ckpt_cuda_l2norm(&o->c, rows, n, x->dev, eps, y->dev, r->dev, &err),
                &err);
    } else {
        ops_did(o, "reference",
                ENG(rmsnorm)(&o->e, rows, n, x->x, wx, centred, eps, y->x, r->x, &err), &err);
        ops_did(o, "rmsnorm",
                ckpt_cuda_rmsnorm(&o->c, rows, n, x->dev, wd, centred, eps, y->dev, r->dev, &err),
                &err);
    }
    (void)dev_wait();
    ops_same(o, "norm y", y);
    ops_same(o, "norm r", r);
    kda_put(r);
    kda_put(y);
    if (gated) {
        ops_did(o, "reference",
                ENG(gated_rmsnorm_bwd)(&o->e, rows, n, x->x, z->x, w->x, act, r->x, dy->x, dx->x,
                                       dz->x, dw->x, &err),
                &err);
        ops_did(o, "gated",
                ckpt_cuda_gated_rmsnorm_bwd(&o->c, rows, n, x->dev, z->dev, w->dev, silu, r->dev,
                                            dy->dev, dx->dev, dz->dev, dw->dev, &err),
                &err);
    } else if (mode == OPS_L2) {
        ops_did(o, "reference", ENG(l2norm_bwd)(&o->e, rows, n, y->x, r->x, dy->x, dx->x, &err),
                &err);
        ops_did(o, "l2norm",
                ckpt_cuda_l2norm_bwd(&o->c, rows, n, y->dev, r->dev, dy->dev, dx->dev, &err), &err);
    } else {
        ops_did(o, "reference",
                ENG(rmsnorm_bwd)(&o->e, rows, n, x->x, wx, centred, r->x, dy->x, add, dx->x, dw->x,
                                 &err),
                &err);
        ops_did(o, "rmsnorm",
                ckpt_cuda_rmsnorm_bwd(&o->c, rows, n, x->dev, wd, centred, r->dev, dy->dev, add,
                                      dx->dev, dw->dev, &err),
                &err);
    }
    (void)dev_wait();
    if (n > 1) /* of a row of one all terms cancel but for eps */
        ops_same(o, "norm dx", dx);
    if (gated)
        ops_same(o, "norm dz", dz);
    ops_same(o, "norm dw", dw);
    ops_clear(o);
}

/* ---- convolution ------------------------------------------------------------------------------ */

static inline void ops_conv(ops_run *o, const int64_t *cu, int64_t N, int64_t C, int64_t W,
                            bool extras)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t T = cu[N], H = N * (W - 1) * C;
    const ckpt_eng_seq seq = {.n = N, .cu = cu};
    ckpt_err err;
    kda_array *x = ops_in(o, T * C, E, -1, 1), *dy = ops_in(o, T * C, E, -1, 1);
    kda_array *w = ops_in(o, C * W, CKPT_F32, -1, 1), *b = ops_in(o, C, CKPT_F32, -1, 1);
    kda_array *old = ops_in(o, H, E, -1, 1), *y = ops_out(o, T * C, E), *last = ops_out(o, H, E);
    kda_array *dx = ops_out(o, T * C, E), *dw = ops_in(o, C * W, CKPT_F32, -1, 1);
    kda_array *db = ops_in(o, C, CKPT_F32, -1, 1), *dold = ops_out(o, H, E);
    void *dev_cu = dev_alloc((size_t)(N + 1) * 8 + 256);
    dev_put(dev_cu, cu, (size_t)(N + 1) * 8);
    const ckpt_cuda_seq dseq = {.n = N, .tokens = T, .cu = dev_cu};
    const double *bx = extras ? b->x : NULL, *hx = extras ? old->x : NULL;
    const void *bd = extras ? b->dev : NULL, *hd = extras ? old->dev : NULL;
    ops_work(o, C * (W + 1));
    ops_did(o, "reference", ENG(conv)(&o->e, &seq, C, W, x->x, w->x, bx, hx, y->x, last->x, &err),
            &err);
    ops_did(o, "conv",
            ckpt_cuda_conv(&o->c, &dseq, C, W, x->dev, w->dev, bd, hd, y->dev, last->dev, &err),
            &err);
    ops_did(o, "reference",
            ENG(conv_bwd)(&o->e, &seq, C, W, x->x, w->x, bx, hx, dy->x, dx->x, dw->x, db->x,
                          dold->x, &err),
            &err);
    ops_did(o, "conv",
            ckpt_cuda_conv_bwd(&o->c, &dseq, C, W, x->dev, w->dev, bd, hd, dy->dev, dx->dev,
                               dw->dev, db->dev, dold->dev, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "conv y", y);
    ops_same(o, "conv last", last);
    ops_same(o, "conv dx", dx);
    ops_same(o, "conv dw", dw);
    ops_same(o, "conv dbias", db);
    ops_same(o, "conv dhistory", dold);
    if (extras) { /* the new history in the old one's place */
        ops_did(o, "conv",
                ckpt_cuda_conv(&o->c, &dseq, C, W, x->dev, w->dev, bd, hd, y->dev, old->dev, &err),
                &err);
        (void)dev_wait();
        memcpy(old->x, last->x, (size_t)H * sizeof(double));
        ops_same(o, "conv last in place", old);
    }
    dev_free(dev_cu);
    ops_clear(o);
}

/* ---- convolution, then the norm of heads of K -------------------------------------------------- */

typedef struct ops_two {
    ckpt_cuda_seq seq;
    int64_t C, W, K;
    kda_array *x, *w, *old; /* old or NULL */
    kda_array *dy, *y, *r, *last, *dx, *dw, *dold;
} ops_two;

static inline void ops_bits(ops_run *o, const char *what, const kda_array *a, const kda_array *b)
{
    const size_t bytes = (size_t)a->n * (a->dtype == CKPT_BF16 ? 2 : 4);
    char *one = malloc(bytes + 1), *two = malloc(bytes + 1);
    dev_get(one, a->dev, bytes);
    dev_get(two, b->dev, bytes);
    if (memcmp(one, two, bytes) != 0 && !o->said[0])
        (void)snprintf(o->said, sizeof o->said, "%s of %lld: not the bits of two calls", what,
                       (long long)a->n);
    free(one);
    free(two);
}

static inline void ops_two_calls(ops_run *o, const ops_two *a)
{
    const int64_t rows = a->seq.tokens * (a->C / a->K);
    const void *old = a->old ? a->old->dev : NULL;
    ckpt_err err;
    ops_did(o, "conv",
            ckpt_cuda_conv(&o->c, &a->seq, a->C, a->W, a->x->dev, a->w->dev, NULL, old, a->y->dev,
                           a->last->dev, &err),
            &err);
    ops_did(o, "l2norm",
            ckpt_cuda_l2norm(&o->c, rows, a->K, a->y->dev, 1e-6, a->y->dev, a->r->dev, &err), &err);
    ops_did(
        o, "l2norm",
        ckpt_cuda_l2norm_bwd(&o->c, rows, a->K, a->y->dev, a->r->dev, a->dy->dev, a->dy->dev, &err),
        &err);
    ops_did(o, "conv",
            ckpt_cuda_conv_bwd(&o->c, &a->seq, a->C, a->W, a->x->dev, a->w->dev, NULL, old,
                               a->dy->dev, a->dx->dev, a->dw->dev, NULL, a->dold->dev, &err),
            &err);
}
static inline void ops_one_call(ops_run *o, const ops_two *a)
{
    const void *old = a->old ? a->old->dev : NULL;
    ckpt_err err;
    ops_did(o, "conv with norm",
            ckpt_cuda_conv_norm(&o->c, &a->seq, a->C, a->W, a->K, 1e-6, a->x->dev, a->w->dev, old,
                                a->y->dev, a->r->dev, a->last->dev, &err),
            &err);
    ops_did(o, "conv with norm",
            ckpt_cuda_conv_norm_bwd(&o->c, &a->seq, a->C, a->W, a->K, a->x->dev, a->w->dev, old,
                                    a->y->dev, a->r->dev, a->dy->dev, a->dx->dev, a->dw->dev,
                                    a->dold->dev, &err),
            &err);
}
static inline void ops_two_reference(ops_run *o, const ckpt_eng_seq *seq, const ops_two *a)
{
    const double *old = a->old ? a->old->x : NULL;
    ckpt_err err;
    ops_did(o, "reference",
            ENG(conv_norm)(&o->e, seq, a->C, a->W, a->K, 1e-6, a->x->x, a->w->x, old, a->y->x,
                           a->r->x, a->last->x, &err),
            &err);
    ops_did(o, "reference",
            ENG(conv_norm_bwd)(&o->e, seq, a->C, a->W, a->K, a->x->x, a->w->x, old, a->y->x,
                               a->r->x, a->dy->x, a->dx->x, a->dw->x, a->dold->x, &err),
            &err);
}

/* The bits of the two operations on the device, and near their f64 twins. With bf16, r and dw are sums of
 * what was rounded on the way: theirs is the limit of a bf16 array. */
static inline void ops_conv_norm(ops_run *o, const int64_t *cu, int64_t N, int64_t heads, int64_t K,
                                 int64_t W, bool history)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t C = heads * K, T = cu[N], H = N * (W - 1) * C;
    const ckpt_eng_seq seq = {.n = N, .cu = cu};
    void *dev_cu = dev_alloc((size_t)(N + 1) * 8 + 256);
    dev_put(dev_cu, cu, (size_t)(N + 1) * 8);
    ops_two one = {
        .seq = {.n = N, .tokens = T, .cu = dev_cu},
          .C = C, .W = W, .K = K
    };
    one.x = ops_in(o, T * C, E, -1, 1);
    one.w = ops_in(o, C * W, CKPT_F32, -1, 1);
    one.old = history ? ops_in(o, H, E, -1, 1) : NULL;
    one.dy = ops_in(o, T * C, E, -1, 1);
    one.dw = ops_in(o, C * W, CKPT_F32, -1, 1);
    ops_two two = one;
    two.dy = ops_out(o, T * C, E), two.dw = ops_out(o, C * W, CKPT_F32);
    memcpy(two.dy->x, one.dy->x, (size_t)(T * C) * sizeof(double));
    memcpy(two.dw->x, one.dw->x, (size_t)(C * W) * sizeof(double));
    kda_put(two.dy);
    kda_put(two.dw);
    for (ops_two *a = &one; a; a = a == &one ? &two : NULL) {
        a->y = ops_out(o, T * C, E), a->r = ops_out(o, T * heads, CKPT_F32);
        a->last = ops_out(o, H, E), a->dx = ops_out(o, T * C, E), a->dold = ops_out(o, H, E);
    }
    ops_work(o, C * (W + 1));
    ops_two_reference(o, &seq, &one);
    ops_one_call(o, &one);
    ops_two_calls(o, &two);
    (void)dev_wait();
    ops_bits(o, "conv with norm y", one.y, two.y);
    ops_bits(o, "conv with norm r", one.r, two.r);
    ops_bits(o, "conv with norm last", one.last, two.last);
    ops_bits(o, "conv with norm dx", one.dx, two.dx);
    ops_bits(o, "conv with norm dw", one.dw, two.dw);
    ops_bits(o, "conv with norm dhistory", one.dold, two.dold);
    ops_same(o, "conv with norm y", one.y);
    ops_near(o, "conv with norm r", one.r, E == CKPT_BF16);
    ops_same(o, "conv with norm last", one.last);
    ops_same(o, "conv with norm dx", one.dx);
    ops_near(o, "conv with norm dw", one.dw, E == CKPT_BF16);
    ops_same(o, "conv with norm dhistory", one.dold);
    dev_free(dev_cu);
    ops_clear(o);
}

/* ---- gates and activations -------------------------------------------------------------------- */

static inline void ops_gate(ops_run *o, int64_t T, int64_t HV, int64_t K, double bound)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t D = HV * K;
    ckpt_err err;
    kda_array *raw = ops_in(o, T * D, E, -6, 6), *A = ops_in(o, HV, CKPT_F32, -1, 1);
    kda_array *b = ops_in(o, D, CKPT_F32, -1, 1), *dg = ops_in(o, T * D, CKPT_F32, -1, 1);
    kda_array *g = ops_out(o, T * D, CKPT_F32), *draw = ops_out(o, T * D, E);
    kda_array *dA = ops_in(o, HV, CKPT_F32, -1, 1), *db = ops_in(o, D, CKPT_F32, -1, 1);
    ops_work(o, 3 * D);
    ops_did(o, "reference", ENG(gate)(&o->e, T, HV, K, raw->x, A->x, b->x, bound, g->x, &err),
            &err);
    ops_did(o, "gate",
            ckpt_cuda_gate(&o->c, T, HV, K, raw->dev, A->dev, b->dev, bound, g->dev, &err), &err);
    ops_did(o, "reference",
            ENG(gate_bwd)(&o->e, T, HV, K, raw->x, A->x, b->x, bound, dg->x, draw->x, dA->x, db->x,
                          &err),
            &err);
    ops_did(o, "gate",
            ckpt_cuda_gate_bwd(&o->c, T, HV, K, raw->dev, A->dev, b->dev, bound, dg->dev, draw->dev,
                               dA->dev, db->dev, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "gate g", g);
    ops_same(o, "gate draw", draw);
    ops_same(o, "gate dA_log", dA);
    ops_same(o, "gate ddt_bias", db);
    ops_clear(o);
}

static inline void ops_beta_relu(ops_run *o, int64_t n, double scale)
{
    const ckpt_dtype E = OPS_E(o);
    ckpt_err err;
    kda_array *x = ops_in(o, n, E, -6, 6), *dyf = ops_in(o, n, CKPT_F32, -1, 1);
    kda_array *dy = ops_in(o, n, E, -1, 1), *s = ops_out(o, n, CKPT_F32), *ds = ops_out(o, n, E);
    kda_array *r = ops_out(o, n, E), *dr = ops_out(o, n, E);
    ops_did(o, "reference", ENG(sigmoid)(&o->e, n, scale, x->x, s->x, &err), &err);
    ops_did(o, "sigmoid", ckpt_cuda_sigmoid(&o->c, n, scale, x->dev, s->dev, &err), &err);
    (void)dev_wait();
    ops_same(o, "sigmoid", s);
    kda_put(s);
    ops_did(o, "reference", ENG(sigmoid_bwd)(&o->e, n, scale, s->x, dyf->x, ds->x, &err), &err);
    ops_did(o, "sigmoid", ckpt_cuda_sigmoid_bwd(&o->c, n, scale, s->dev, dyf->dev, ds->dev, &err),
            &err);
    ops_did(o, "reference", ENG(relu2)(&o->e, n, x->x, r->x, &err), &err);
    ops_did(o, "relu2", ckpt_cuda_relu2(&o->c, n, x->dev, r->dev, &err), &err);
    ops_did(o, "reference", ENG(relu2_bwd)(&o->e, n, x->x, dy->x, dr->x, &err), &err);
    ops_did(o, "relu2", ckpt_cuda_relu2_bwd(&o->c, n, x->dev, dy->dev, dr->dev, &err), &err);
    (void)dev_wait();
    ops_same(o, "sigmoid dx", ds);
    ops_same(o, "relu2", r);
    ops_same(o, "relu2 dx", dr);
    ops_clear(o);
}

/* gate and up are the halves of one array when ldg is at least 2 F. */
static inline void ops_swiglu(ops_run *o, int64_t T, int64_t F, int64_t ldg, int64_t ldy,
                              double clamp)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t size = E == CKPT_BF16 ? 2 : 4;
    ckpt_err err;
    const bool halves = ldg >= 2 * F;
    kda_array *g = ops_in(o, T * ldg, E, -4, 4), *u = ops_in(o, T * ldg, E, -4, 4);
    kda_array *y = ops_in(o, T * ldy, E, -1, 1), *dy = ops_in(o, T * ldy, E, -1, 1);
    kda_array *dg = ops_in(o, T * ldg, E, -1, 1), *du = ops_in(o, T * ldg, E, -1, 1);
    double *ux = halves ? g->x + F : u->x, *dux = halves ? dg->x + F : du->x;
    void *ud = halves ? (char *)g->dev + F * size : u->dev;
    void *dud = halves ? (char *)dg->dev + F * size : du->dev;
    ops_did(o, "reference", ENG(swiglu)(&o->e, T, F, g->x, ux, ldg, clamp, y->x, ldy, &err), &err);
    ops_did(o, "swiglu", ckpt_cuda_swiglu(&o->c, T, F, g->dev, ud, ldg, clamp, y->dev, ldy, &err),
            &err);
    ops_did(o, "reference",
            ENG(swiglu_bwd)(&o->e, T, F, g->x, ux, ldg, clamp, dy->x, ldy, dg->x, dux, &err), &err);
    ops_did(
        o, "swiglu",
        ckpt_cuda_swiglu_bwd(&o->c, T, F, g->dev, ud, ldg, clamp, dy->dev, ldy, dg->dev, dud, &err),
        &err);
    (void)dev_wait();
    ops_same(o, "swiglu y", y);
    ops_same(o, "swiglu dgate", dg);
    ops_same(o, "swiglu dup", du);
    ops_clear(o);
}

#endif
