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

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define CKPT_CUDA_PARTS 512     /* pieces of a sum over rows, at most */
#define CKPT_CUDA_ROW_MAX 16384 /* longest row of a norm */

typedef struct ckpt_cuda {
    ckpt_cuda_type type;
    void *stream; /* a cudaStream_t */
    void *work;   /* device memory for backward: see `work` of each */
    size_t bytes; /* of it */
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

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
