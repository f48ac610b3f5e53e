/* Operations: projections, norms, convolution, gates, the delta-rule recurrences, activations.
 * Conventions (shapes, gradients, memory, determinism, NaN) are those of engine.h. Every function
 * returns CKPT_OK without touching an array while the context is dry.
 * Sources: kda-math.md sections 1-4, mla-moe-math.md sections 1 and 3. */
#ifndef CKPT_ENGINE_OPS_H
#define CKPT_ENGINE_OPS_H

#include "engine.h"
#include "real.h"

/* ---- linear (linear.c) ---------------------------------------------------------------------- */

/* y [T, n_out] = x [T, n_in] w^T + bias, added to y when `add`. w [n_out, n_in]; bias or NULL. */
ckpt_status ENG(linear)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *x,
                        int64_t ldx, const real *w, const wreal *bias, bool add, real *y,
                        int64_t ldy, ckpt_err *err) CKPT_MUST_USE;
/* dx [T, n_in] = dy w, added to dx when `add`. */
ckpt_status ENG(linear_dx)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *w, bool add, real *dx, int64_t lddx,
                           ckpt_err *err) CKPT_MUST_USE;
/* dw [n_out, n_in] or NULL += dy^T x; dbias [n_out] or NULL += sum of dy over tokens. */
ckpt_status ENG(linear_dw)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *x, int64_t ldx, real *dw, wreal *dbias,
                           ckpt_err *err) CKPT_MUST_USE;
/* Both for contiguous rows: dw, dbias, then dx. */
ckpt_status ENG(linear_bwd)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                            const real *x, const real *w, bool add, real *dx, real *dw,
                            wreal *dbias, ckpt_err *err) CKPT_MUST_USE;
/* C [m, n] = alpha op(A) op(B) + beta C on one thread, for use inside ckpt_eng_parallel. beta 0 does
 * not read C. Takes its blocks from the stack (up to 400 KiB) and the best instruction set. */
void ENG(gemm)(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real alpha, const real *a,
               int64_t lda, const real *b, int64_t ldb, real beta, real *c, int64_t ldc);

/* ---- norms (norm.c) ------------------------------------------------------------------------- */

/* y [rows, n] = x * rstd * w, rstd [rows] = 1 / sqrt(mean x^2 + eps). w [n], meaning 1 + w when
 * `centered`; NULL = all ones. y may alias x; rstd or NULL. Any number of rows is one call: heads
 * that are normed by themselves are rows. */
ckpt_status ENG(rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const wreal *w,
                         bool centered, double eps, real *y, wreal *rstd,
                         ckpt_err *err) CKPT_MUST_USE;
/* dx [rows, n], added to dx when `add` (may alias dy when not); dw [n] or NULL +=. */
ckpt_status ENG(rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const wreal *w,
                             bool centered, const wreal *rstd, const real *dy, bool add, real *dx,
                             wreal *dw, ckpt_err *err) CKPT_MUST_USE;

typedef enum ckpt_eng_act { CKPT_ENG_SIGMOID, CKPT_ENG_SILU } ckpt_eng_act;

/* y = x * rstd * w * act(z); x, z, y [rows, n]; w [n] (plain). */
ckpt_status ENG(gated_rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const real *z,
                               const wreal *w, ckpt_eng_act act, double eps, real *y, wreal *rstd,
                               ckpt_err *err) CKPT_MUST_USE;
/* dx, dz written (dx may alias dy, dz may alias z); dw or NULL +=. */
ckpt_status ENG(gated_rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x,
                                   const real *z, const wreal *w, ckpt_eng_act act,
                                   const wreal *rstd, const real *dy, real *dx, real *dz, wreal *dw,
                                   ckpt_err *err) CKPT_MUST_USE;

/* y = x * r, r [rows] = 1 / sqrt(sum x^2 + eps). y may alias x. */
ckpt_status ENG(l2norm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, double eps, real *y,
                        wreal *r, ckpt_err *err) CKPT_MUST_USE;
/* From the normed y and r. dx may alias dy. */
ckpt_status ENG(l2norm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *y, const wreal *r,
                            const real *dy, real *dx, ckpt_err *err) CKPT_MUST_USE;

/* ---- causal depthwise convolution + SiLU (conv.c) ------------------------------------------- */

#define CKPT_ENG_CONV_MAX 8 /* widest filter */

/* p[t,c] = bias[c] + sum_j w[c,j] x[t-W+1+j, c] inside the sequence; y = silu(p).
 * x, y [T, C]; w [C, W], W in 1 .. CKPT_ENG_CONV_MAX; bias [C] or NULL; history [N, W-1, C] or NULL:
 * the tokens just before each sequence (NULL = zeros); last [N, W-1, C] or NULL: the history that
 * follows it, which may be the same array as history. y must not alias x. */
ckpt_status ENG(conv)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                      const wreal *w, const wreal *bias, const real *history, real *y, real *last,
                      ckpt_err *err) CKPT_MUST_USE;
/* p is recomputed from x. dx written; dw, dbias (each or NULL) +=; dhistory or NULL written. */
ckpt_status ENG(conv_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                          const wreal *w, const wreal *bias, const real *history, const real *dy,
                          real *dx, wreal *dw, wreal *dbias, real *dhistory,
                          ckpt_err *err) CKPT_MUST_USE;
/* conv without bias, then l2norm of every K channels in place, r [T, C / K]. K divides C. */
ckpt_status ENG(conv_norm)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, int64_t K,
                           double eps, const real *x, const wreal *w, const real *history, real *y,
                           wreal *r, real *last, ckpt_err *err) CKPT_MUST_USE;
/* From the normed y and r. dy may be overwritten; the rest is conv_bwd's. */
ckpt_status ENG(conv_norm_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W,
                               int64_t K, const real *x, const wreal *w, const real *history,
                               const real *y, const wreal *r, real *dy, real *dx, wreal *dw,
                               real *dhistory, ckpt_err *err) CKPT_MUST_USE;

/* ---- gates (gate.c) ------------------------------------------------------------------------- */

/* Natural-log decay g [T, HV, K] of raw [T, HV, K], a = raw + dt_bias [HV, K], A_log [HV]:
 *   bound == 0: g = -exp(A_log) softplus(a);   bound < 0: g = bound * sigmoid(exp(A_log) a).
 * K = 1 for GDN. g may alias raw. */
ckpt_status ENG(gate)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                      const wreal *A_log, const wreal *dt_bias, double bound, wreal *g,
                      ckpt_err *err) CKPT_MUST_USE;
/* draw written (may alias dg); dA_log [HV] or NULL, ddt_bias [HV, K] or NULL +=. */
ckpt_status ENG(gate_bwd)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                          const wreal *A_log, const wreal *dt_bias, double bound, const wreal *dg,
                          real *draw, wreal *dA_log, wreal *ddt_bias, ckpt_err *err) CKPT_MUST_USE;

/* y = c sigmoid(x) over n numbers; y may alias x. c = 2 allows negative eigenvalues. */
ckpt_status ENG(sigmoid)(ckpt_eng *e, int64_t n, double c, const real *x, wreal *y,
                         ckpt_err *err) CKPT_MUST_USE;
/* dx = dy y (1 - y / c); dx may alias dy. */
ckpt_status ENG(sigmoid_bwd)(ckpt_eng *e, int64_t n, double c, const wreal *y, const wreal *dy,
                             real *dx, ckpt_err *err) CKPT_MUST_USE;

/* ---- delta-rule recurrences (delta.c) ------------------------------------------------------- */

typedef enum ckpt_eng_rule {
    CKPT_ENG_KDA, /* g [T, HV, K], erase = write = beta [T, HV] */
    CKPT_ENG_GDN, /* g [T, HV],    erase = write = beta [T, HV] */
    CKPT_ENG_GDN2 /* g [T, HV, K], erase b [T, HV, K], write w [T, HV, V] */
} ckpt_eng_rule;

typedef enum ckpt_eng_form {
    CKPT_ENG_CHUNK, /* WY form, chunks of CKPT_ENG_CHUNK_LEN tokens: the fast one (delta.c: when) */
    CKPT_ENG_STEP   /* token by token, the definition */
} ckpt_eng_form;

#define CKPT_ENG_CHUNK_LEN 16
#define CKPT_ENG_SEGMENT_LEN 64 /* tokens between saved states */

/* St = exp(g_t) S_{t-1};  d_t = vw_t - St^T kb_t;  S_t = St + k_t d_t^T;  o_t = scale S_t^T q_t
 * with kb = erase * k, vw = write * v. HV is a multiple of H; value head h reads query/key head
 * h / (HV / H). q, k are used as given (normed by the caller). */
typedef struct ckpt_eng_delta {
    ckpt_eng_rule rule;
    ckpt_eng_form form;
    int64_t H, HV, K, V;
    double scale; /* 0 = K^-0.5 */
    bool safe;    /* g >= -5 is known: kernels of a device may take a shorter way */
} ckpt_eng_delta;

typedef struct ENG(delta_in) {
    const real *q, *k;   /* [T, H, K] */
    const real *v;       /* [T, HV, V] */
    const wreal *g;      /* per rule, natural log, usually <= 0 */
    const wreal *erase;  /* beta, or b */
    const wreal *write;  /* GDN2: w; NULL otherwise */
    const wreal *state0; /* [N, HV, K, V] or NULL = zeros */
} ENG(delta_in);

typedef struct ENG(delta_grad) {
    real *q, *k, *v; /* written, shapes of the inputs */
    wreal *g, *erase;
    wreal *write;  /* GDN2 only */
    wreal *state0; /* or NULL */
} ENG(delta_grad);

/* Elements of `saved`: the state at the start of every segment of every sequence. */
int64_t ENG(delta_saved_len)(const ckpt_eng_delta *d, const ckpt_eng_seq *seq);
/* o [T, HV, V]; state [N, HV, K, V] or NULL: the state after each sequence, may be the array of
 * in->state0; saved (delta_saved_len) or NULL when there will be no backward. */
ckpt_status ENG(delta)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                       const ENG(delta_in) * in, real *o, wreal *state, wreal *saved,
                       ckpt_err *err) CKPT_MUST_USE;
/* d_o [T, HV, V]; d_state [N, HV, K, V] or NULL: gradient of the final state. */
ckpt_status ENG(delta_bwd)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                           const ENG(delta_in) * in, const wreal *saved, const real *d_o,
                           const wreal *d_state, const ENG(delta_grad) * grad,
                           ckpt_err *err) CKPT_MUST_USE;

/* ---- activations (activation.c) -------------------------------------------------------------------- */

/* y = silu(gate) * up over T rows of F; gate and up have row stride ldg, so that they may be halves
 * of one array. clamp > 0: gate <- min(gate, clamp), up <- clip(up, +-clamp) first; 0 = none.
 * y may alias gate or up when strides agree. */
ckpt_status ENG(swiglu)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                        int64_t ldg, double clamp, real *y, int64_t ldy,
                        ckpt_err *err) CKPT_MUST_USE;
/* dgate, dup (stride ldg) may alias gate, up. */
ckpt_status ENG(swiglu_bwd)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                            int64_t ldg, double clamp, const real *dy, int64_t lddy, real *dgate,
                            real *dup, ckpt_err *err) CKPT_MUST_USE;
/* y = max(x, 0)^2 over n numbers; aliasing allowed. */
ckpt_status ENG(relu2)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(relu2_bwd)(ckpt_eng *e, int64_t n, const real *x, const real *dy, real *dx,
                           ckpt_err *err) CKPT_MUST_USE;

#endif
