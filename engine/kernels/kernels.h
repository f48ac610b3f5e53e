/* Inner loops of the engine, compiled for every element type and instruction set; a table of each
 * combination is chosen by the context's isa. Kernels work on one piece on the calling thread, take
 * scratch from their caller and check nothing. Array shapes are those of ops.h. */
#ifndef CKPT_ENGINE_KERNELS_H
#define CKPT_ENGINE_KERNELS_H

#include "ops.h"

/* One value head of one sequence. Pointers are at the first token of the head, ld* steps a token. */
typedef struct ENG(delta_task) {
    int64_t T, K, V;
    int64_t ldk, ldv, ldg, lde; /* q k | v o write | g | erase */
    bool g_scalar, e_scalar;    /* one decay, one erase gate a token; then write is NULL */
    bool first;                 /* dq and dk are set, else added to: heads that share q and k */
    real scale;
    const real *q, *k, *v, *g, *erase, *write;
    const real *state0; /* [K, V] or NULL */
    real *o, *state;    /* state [K, V] or NULL */
    real *saved;        /* [segments, K, V] or NULL; read by backward */
    const real *d_o, *d_state;
    real *dq, *dk, *dv, *dg, *derase, *dwrite, *dstate0;
} ENG(delta_task);

/* `heads` tasks of equal T, K and V, in order; those that share q and k follow each other. */
typedef void ENG(delta_kernel)(const ENG(delta_task) * t, int64_t heads, real *scratch);

typedef struct ENG(conv_task) {
    int64_t C, W, lo, n; /* channels lo .. lo+n-1, n <= CKPT_ENG_CONV_BLOCK */
    const ckpt_eng_seq *seq;
    const real *x, *w, *bias, *history, *dy;
    real *y, *dx, *dw, *dbias, *dhistory;
} ENG(conv_task);

#define CKPT_ENG_CONV_BLOCK 64

/* C [m, n] = alpha op(A) op(B) + beta C, in blocks of mc x nc x kc. */
typedef struct ENG(gemm_task) {
    bool ta, tb;
    int64_t m, n, k, lda, ldb, ldc, mc, nc, kc;
    real alpha, beta;
    const real *a, *b;
    real *c;
} ENG(gemm_task);

/* Scratch of a product, in elements: packed A and B with room for padding to the widest tiles. */
#define CKPT_ENG_GEMM_SCRATCH(mc, nc, kc) (((mc) + 12) * (kc) + 16 + ((nc) + 32) * (kc))

typedef struct ENG(kernels) {
    void (*gemm)(const ENG(gemm_task) * t, real *scratch);
    void (*rmsnorm)(int64_t rows, int64_t n, const real *x, const real *w, bool centered, real eps,
                    real *y, real *rstd);
    /* dw, n partial sums, is added to; NULL = not wanted. */
    void (*rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *w, bool centered,
                        const real *rstd, const real *dy, bool add, real *dx, real *dw);
    void (*gated_rmsnorm)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                          bool silu, real eps, real *y, real *rstd);
    void (*gated_rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                              bool silu, const real *rstd, const real *dy, real *dx, real *dz,
                              real *dw);
    void (*l2norm)(int64_t rows, int64_t n, const real *x, real eps, real *y, real *r);
    void (*l2norm_bwd)(int64_t rows, int64_t n, const real *y, const real *r, const real *dy,
                       real *dx);
    void (*conv)(const ENG(conv_task) * t);
    void (*conv_bwd)(const ENG(conv_task) * t);
    /* n numbers of one row of K channels of heads. */
    void (*gate)(int64_t n, const real *raw, const real *dt_bias, real rate, real bound, real *g);
    /* One head, T tokens with row stride ld. */
    void (*gate_bwd)(int64_t T, int64_t K, int64_t ld, const real *raw, const real *dt_bias,
                     real rate, real bound, const real *dg, real *draw, real *dA_log,
                     real *ddt_bias);
    void (*sigmoid)(int64_t n, real c, const real *x, real *y);
    void (*sigmoid_bwd)(int64_t n, real c, const real *y, const real *dy, real *dx);
    void (*swiglu)(int64_t n, const real *gate, const real *up, real clamp, real *y);
    void (*swiglu_bwd)(int64_t n, const real *gate, const real *up, real clamp, const real *dy,
                       real *dgate, real *dup);
    void (*relu2)(int64_t n, const real *x, real *y);
    void (*relu2_bwd)(int64_t n, const real *x, const real *dy, real *dx);
    /* Largest of x[0 .. n-1] and `top`; NaN if one of them is. */
    real (*maximum)(int64_t n, real top, const real *x);
    /* y = exp(x - top), which may be x; the sum of y. */
    real (*exp_sum)(int64_t n, real top, const real *x, real *y);
    /* p = exp(p - lse), dp = p (dp - d) scale. */
    void (*softmax_bwd)(int64_t n, real lse, real d, real scale, real *p, real *dp);
    real (*dot)(int64_t n, const real *x, const real *y);
    ENG(delta_kernel) * delta_chunk, *delta_chunk_bwd, *delta_step, *delta_step_bwd;
    /* Scratch of any of these four, in elements. */
    int64_t (*delta_scratch)(int64_t K, int64_t V, int64_t heads);
} ENG(kernels);

const ENG(kernels) * ENG(kernels_for)(ckpt_eng_isa isa);

/* ---- for the kernel sources ----------------------------------------------------------------- */

#ifdef CKPT_ISA
#define CKPT_ENG_PASTE2(a, b) a##_##b
#define CKPT_ENG_PASTE(a, b) CKPT_ENG_PASTE2(a, b)
#define ENGK(name) CKPT_ENG_PASTE(ENG(k_##name), CKPT_ISA)

extern const ENG(kernels) ENGK(table);

void ENGK(gemm)(const ENG(gemm_task) * t, real *scratch);
void ENGK(rmsnorm)(int64_t rows, int64_t n, const real *x, const real *w, bool centered, real eps,
                   real *y, real *rstd);
void ENGK(rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *w, bool centered,
                       const real *rstd, const real *dy, bool add, real *dx, real *dw);
void ENGK(gated_rmsnorm)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                         bool silu, real eps, real *y, real *rstd);
void ENGK(gated_rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                             bool silu, const real *rstd, const real *dy, real *dx, real *dz,
                             real *dw);
void ENGK(l2norm)(int64_t rows, int64_t n, const real *x, real eps, real *y, real *r);
void ENGK(l2norm_bwd)(int64_t rows, int64_t n, const real *y, const real *r, const real *dy,
                      real *dx);
void ENGK(conv)(const ENG(conv_task) * t);
void ENGK(conv_bwd)(const ENG(conv_task) * t);
void ENGK(gate)(int64_t n, const real *raw, const real *dt_bias, real rate, real bound, real *g);
void ENGK(gate_bwd)(int64_t T, int64_t K, int64_t ld, const real *raw, const real *dt_bias,
                    real rate, real bound, const real *dg, real *draw, real *dA_log,
                    real *ddt_bias);
void ENGK(sigmoid)(int64_t n, real c, const real *x, real *y);
void ENGK(sigmoid_bwd)(int64_t n, real c, const real *y, const real *dy, real *dx);
void ENGK(swiglu)(int64_t n, const real *gate, const real *up, real clamp, real *y);
void ENGK(swiglu_bwd)(int64_t n, const real *gate, const real *up, real clamp, const real *dy,
                      real *dgate, real *dup);
void ENGK(relu2)(int64_t n, const real *x, real *y);
void ENGK(relu2_bwd)(int64_t n, const real *x, const real *dy, real *dx);
real ENGK(maximum)(int64_t n, real top, const real *x);
real ENGK(exp_sum)(int64_t n, real top, const real *x, real *y);
void ENGK(softmax_bwd)(int64_t n, real lse, real d, real scale, real *p, real *dp);
real ENGK(dot)(int64_t n, const real *x, const real *y);
ENG(delta_kernel) ENGK(delta_chunk), ENGK(delta_chunk_bwd), ENGK(delta_step), ENGK(delta_step_bwd);
int64_t ENGK(delta_scratch)(int64_t K, int64_t V, int64_t heads);
int64_t ENGK(delta_step_scratch)(int64_t K, int64_t V);
int64_t ENGK(delta_chunk_scratch)(int64_t K, int64_t V, int64_t heads);
#endif

#endif
