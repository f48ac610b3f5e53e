/* Pointwise and row operations of the engine on a CUDA device: twins of ops.h, moe.h, attn.h and
 * train/optim.h, whose formulas and argument meanings hold here where nothing else is said.
 *
 * Arrays are on the device, row-major, 16-byte aligned. `E` below is the type of the context, f32 or
 * bf16: activations and their gradients. Everything else is f32: parameters of operations, their
 * gradients (added to), statistics, decays g and beta, as kda.h takes them. Arithmetic is f32; a bf16
 * result is rounded once. Aliasing is what the twin allows, between arrays of equal type.
 *
 * Determinism: no atomics; sums over rows are taken in at most CKPT_CUDA_PARTS pieces that sizes alone
 * determine, then over pieces in order. Equal calls on equal cards give equal bits.
 *
 * Nothing is allocated or waited for; work runs in the context's stream and can be captured into a
 * graph. Values on the device are not checked: sequence offsets, ids and labels are the caller's.
 * A NaN reaches what depends on it. T, rows or n of 0 does nothing.
 *
 * Errors: CKPT_E_USAGE for sizes that do not fit together or too little workspace, CKPT_E_UNSUPPORTED
 * for sizes above what is built, CKPT_E_IO when a launch fails. */
#ifndef CKPT_CUDA_OPS_H
#define CKPT_CUDA_OPS_H

#include "kda.h"
#include "train/elementwise.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define CKPT_CUDA_PARTS 512     /* pieces of a sum over rows, at most */
#define CKPT_CUDA_ROW_MAX 16384 /* longest row of a norm */

typedef struct ckpt_cuda_gemm ckpt_cuda_gemm; /* gemm.h */

typedef struct ckpt_cuda {
    ckpt_cuda_type type;
    void *stream;         /* a cudaStream_t */
    void *work;           /* device memory for backward: see `work` of each */
    size_t bytes;         /* of it */
    ckpt_cuda_gemm *gemm; /* of matrix products (gemm.h); NULL: their own kernels */
} ckpt_cuda;

/* Bytes of workspace for `columns` column sums. */
size_t ckpt_cuda_work(int64_t columns);

/* Packed sequences: offsets on the device, [n + 1]; tokens = cu[n]. */
typedef struct ckpt_cuda_seq {
    int64_t n, tokens;
    const int64_t *cu;
} ckpt_cuda_seq;

/* ---- norms (ops_norm.cu) -------------------------------------------------------------------- */

/* x, y [rows, n] E; w [n] or NULL; rstd [rows] or NULL. n up to CKPT_CUDA_ROW_MAX. */
ckpt_status ckpt_cuda_rmsnorm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                              const float *w, bool centered, double eps, void *y, float *rstd,
                              ckpt_err *err) CKPT_MUST_USE;
/* dy, dx E; dw [n] or NULL. work: n columns when dw. */
ckpt_status ckpt_cuda_rmsnorm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                  const float *w, bool centered, const float *rstd, const void *dy,
                                  bool add, void *dx, float *dw, ckpt_err *err) CKPT_MUST_USE;
/* silu: y = x rstd w silu(z), else sigmoid(z). */
ckpt_status ckpt_cuda_gated_rmsnorm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                    const void *z, const float *w, bool silu, double eps, void *y,
                                    float *rstd, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_gated_rmsnorm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                        const void *z, const float *w, bool silu, const float *rstd,
                                        const void *dy, void *dx, void *dz, float *dw,
                                        ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_l2norm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x, double eps,
                             void *y, float *r, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_l2norm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *y,
                                 const float *r, const void *dy, void *dx,
                                 ckpt_err *err) CKPT_MUST_USE;

/* ---- causal depthwise convolution + SiLU (ops_conv.cu) -------------------------------------- */

/* x, y [T, C] E; w [C, W], W in 1 .. 8; bias [C] or NULL; history, last [N, W-1, C] E or NULL, may be
 * one array. */
ckpt_status ckpt_cuda_conv(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                           const void *x, const float *w, const float *bias, const void *history,
                           void *y, void *last, ckpt_err *err) CKPT_MUST_USE;
/* dhistory E or NULL; dw, dbias each or NULL. work: C (W + 1) columns with either. */
ckpt_status ckpt_cuda_conv_bwd(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                               const void *x, const float *w, const float *bias,
                               const void *history, const void *dy, void *dx, float *dw,
                               float *dbias, void *dhistory, ckpt_err *err) CKPT_MUST_USE;
/* conv without bias, then l2norm of heads of K channels, r [T, C / K]: the bits of the two, in one kernel
 * when K is 64 or 128, C a multiple of 128 and W at most 4. */
ckpt_status ckpt_cuda_conv_norm(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                                int64_t K, double eps, const void *x, const float *w,
                                const void *history, void *y, float *r, void *last,
                                ckpt_err *err) CKPT_MUST_USE;
/* y, r as conv_norm left them; dy is overwritten unless it is one kernel. dw or NULL. work: C (W + 1)
 * columns with dw. */
ckpt_status ckpt_cuda_conv_norm_bwd(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C,
                                    int64_t W, int64_t K, const void *x, const float *w,
                                    const void *history, const void *y, const float *r, void *dy,
                                    void *dx, float *dw, void *dhistory,
                                    ckpt_err *err) CKPT_MUST_USE;

/* ---- gates (ops_gate.cu) -------------------------------------------------------------------- */

/* raw [T, HV, K] E; A_log [HV], dt_bias [HV, K]; g [T, HV, K] f32. bound 0: softplus form; < 0: safe
 * form. */
ckpt_status ckpt_cuda_gate(const ckpt_cuda *c, int64_t T, int64_t HV, int64_t K, const void *raw,
                           const float *A_log, const float *dt_bias, double bound, float *g,
                           ckpt_err *err) CKPT_MUST_USE;
/* dg f32, draw E. work: 3 HV K columns with dA_log or ddt_bias, each of which may be NULL. */
ckpt_status ckpt_cuda_gate_bwd(const ckpt_cuda *c, int64_t T, int64_t HV, int64_t K,
                               const void *raw, const float *A_log, const float *dt_bias,
                               double bound, const float *dg, void *draw, float *dA_log,
                               float *ddt_bias, ckpt_err *err) CKPT_MUST_USE;
/* y f32 = scale sigmoid(x), x E: beta. */
ckpt_status ckpt_cuda_sigmoid(const ckpt_cuda *c, int64_t n, double scale, const void *x, float *y,
                              ckpt_err *err) CKPT_MUST_USE;
/* dx E from y and dy f32. */
ckpt_status ckpt_cuda_sigmoid_bwd(const ckpt_cuda *c, int64_t n, double scale, const float *y,
                                  const float *dy, void *dx, ckpt_err *err) CKPT_MUST_USE;

/* ---- activations (ops_gate.cu) -------------------------------------------------------------- */

/* All arrays E. clamp 0 = none. */
ckpt_status ckpt_cuda_swiglu(const ckpt_cuda *c, int64_t T, int64_t F, const void *gate,
                             const void *up, int64_t ldg, double clamp, void *y, int64_t ldy,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_swiglu_bwd(const ckpt_cuda *c, int64_t T, int64_t F, const void *gate,
                                 const void *up, int64_t ldg, double clamp, const void *dy,
                                 int64_t lddy, void *dgate, void *dup, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_relu2(const ckpt_cuda *c, int64_t n, const void *x, void *y,
                            ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_relu2_bwd(const ckpt_cuda *c, int64_t n, const void *x, const void *dy,
                                void *dx, ckpt_err *err) CKPT_MUST_USE;

/* ---- vocabulary (ops_vocab.cu) -------------------------------------------------------------- */

/* y [T, H] E = rows lo .. lo + n - 1 of the vocabulary, table [n, H] E; other ids give zeros (and no
 * gradient), so a whole table with checked ids is lo = 0. ids [T]. */
ckpt_status ckpt_cuda_embed(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n, int64_t H,
                            const int32_t *ids, const void *table, void *y,
                            ckpt_err *err) CKPT_MUST_USE;
/* dtable [n, H] f32 += dy E, tokens of an id in order: the engine's sum. */
ckpt_status ckpt_cuda_embed_bwd(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n, int64_t H,
                                const int32_t *ids, const void *dy, float *dtable,
                                ckpt_err *err) CKPT_MUST_USE;
/* logits, dlogits [T, V] E; loss, weight [T]; label < 0 = no loss. dlogits may be logits, or NULL, and
 * weight is then not read. */
ckpt_status ckpt_cuda_xent(const ckpt_cuda *c, int64_t T, int64_t V, const void *logits,
                           const int32_t *labels, const float *weight, float *loss, void *dlogits,
                           ckpt_err *err) CKPT_MUST_USE;

/* ---- optimizer (ops_optim.cu): the CPU's bits ----------------------------------------------- */

/* n elements of f32 w, m, v, g; bits [n] or NULL: w as bf16. */
ckpt_status ckpt_cuda_adamw(const ckpt_cuda *c, int64_t n, const ckpt_adamw_scalars *k, float *w,
                            float *m, float *v, const float *g, uint16_t *bits,
                            ckpt_err *err) CKPT_MUST_USE;
/* The same with *k on the device: what changes from step to step, of work that is captured (graph.h). */
ckpt_status ckpt_cuda_adamw_kept(const ckpt_cuda *c, int64_t n, const ckpt_adamw_scalars *k,
                                 float *w, float *m, float *v, const float *g, uint16_t *bits,
                                 ckpt_err *err) CKPT_MUST_USE;
/* sums: a double for each CKPT_OPTIM_CHUNK elements of one whole parameter (ckpt_optim_sumsq). */
ckpt_status ckpt_cuda_sumsq(const ckpt_cuda *c, int64_t n, const float *g, double *sums,
                            ckpt_err *err) CKPT_MUST_USE;
/* *norm, on the device: the root of the sum of n sums, in order. */
ckpt_status ckpt_cuda_norm(const ckpt_cuda *c, int64_t n, const double *sums, double *norm,
                           ckpt_err *err) CKPT_MUST_USE;

/* ---- rotary embedding (ops_optim.cu) -------------------------------------------------------- */

/* Rotate the first dim (at most 512) channels of x [T, heads, ..] E in place; cos, sin [T, dim / 2]. */
ckpt_status ckpt_cuda_rope(const ckpt_cuda *c, int64_t dim, bool interleaved, int64_t T,
                           int64_t heads, void *x, int64_t ldx, int64_t ldh, const float *cos,
                           const float *sin, bool inverse, ckpt_err *err) CKPT_MUST_USE;

/* cos, sin [T, half] of angles p freq[i], rounded to f32, times scale: p counts a sequence's tokens from
 * first[n] (device, [seq->n]; NULL = 0). freq [half] on the device; half at least 1. */
ckpt_status ckpt_cuda_rope_table(const ckpt_cuda *c, const ckpt_cuda_seq *seq, const int64_t *first,
                                 int64_t half, const float *freq, float scale, float *cos,
                                 float *sin, ckpt_err *err) CKPT_MUST_USE;

/* ---- mixture of experts (ops_moe.cu) -------------------------------------------------------- */

/* ckpt_eng_moe's router; E at most 1024. */
typedef struct ckpt_cuda_route {
    int64_t E, top_k, groups, group_top_k, group_best;
    bool softmax, normalize;
    float scale;
} ckpt_cuda_route;

/* From logits [T, E] f32: score [T, E], lse [T], chosen [T, top_k], weight [T, top_k], total [T]. bias
 * [E] or NULL. */
ckpt_status ckpt_cuda_router(const ckpt_cuda *c, const ckpt_cuda_route *r, int64_t T,
                             const float *logit, const float *bias, float *score, float *lse,
                             int32_t *chosen, float *weight, float *total,
                             ckpt_err *err) CKPT_MUST_USE;
/* dlogit [T, E] written. balance [E + 1] or NULL: `first` of the order of a choice without bias and
 * groups; aux = aux_scale aux_coef E / (top_k T^2), z = aux_scale 2 z_coef / T. */
ckpt_status ckpt_cuda_router_bwd(const ckpt_cuda *c, const ckpt_cuda_route *r, int64_t T,
                                 const float *logit, const float *score, const float *lse,
                                 const int32_t *chosen, const float *total, const float *dweight,
                                 const int64_t *balance, double aux, double z, float *dlogit,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Rows of n = T top_k slots in expert order, tokens ascending: first [E + 1], row_of, slot_of [n].
 * work: E columns. */
ckpt_status ckpt_cuda_order(const ckpt_cuda *c, int64_t E, int64_t n, const int32_t *chosen,
                            int64_t *first, int32_t *row_of, int32_t *slot_of,
                            ckpt_err *err) CKPT_MUST_USE;
/* bias [E] += rate sign(mean(counts) - counts[i]): ckpt_optim_router_bias, its bits. */
ckpt_status ckpt_cuda_router_bias(const ckpt_cuda *c, int64_t E, const int64_t *counts, double rate,
                                  float *bias, ckpt_err *err) CKPT_MUST_USE;
/* y [n, H] E: row r is token slot_of[r] / k of x. Inputs of the experts; backward, combine's. */
ckpt_status ckpt_cuda_dispatch(const ckpt_cuda *c, int64_t n, int64_t H, int64_t k,
                               const int32_t *slot_of, const void *x, void *y,
                               ckpt_err *err) CKPT_MUST_USE;
/* y [T, H] E = or += the sum of a token's k rows of x. Outputs; backward, dispatch's. */
ckpt_status ckpt_cuda_combine(const ckpt_cuda *c, int64_t T, int64_t H, int64_t k,
                              const int32_t *row_of, const void *x, bool add, void *y,
                              ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
