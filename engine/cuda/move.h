/* Copies, cuts and sums of arrays on a CUDA device, tokens and results of a run, the experts' activation:
 * twins of engine/move.h and of the loops of engine/moe_rows.c. Conventions (types, stream, determinism,
 * errors): ops.h. */
#ifndef CKPT_CUDA_MOVE_H
#define CKPT_CUDA_MOVE_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* y [n] E += x */
ckpt_status ckpt_cuda_add(const ckpt_cuda *c, int64_t n, const void *x, void *y,
                          ckpt_err *err) CKPT_MUST_USE;
/* x [n] f32 *= scale */
ckpt_status ckpt_cuda_scale(const ckpt_cuda *c, int64_t n, float scale, float *x,
                            ckpt_err *err) CKPT_MUST_USE;
/* to [n] f32 = x E, and to E = x f32. */
ckpt_status ckpt_cuda_widen(const ckpt_cuda *c, int64_t n, const void *x, float *to,
                            ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_narrow(const ckpt_cuda *c, int64_t n, const float *x, void *to,
                             ckpt_err *err) CKPT_MUST_USE;
/* y = bf16(x) as f32; x may be y. NaN keeps its sign (train/elementwise.h). */
ckpt_status ckpt_cuda_round_bf16(const ckpt_cuda *c, int64_t n, const float *x, float *y,
                                 ckpt_err *err) CKPT_MUST_USE;
/* E; strides in elements. */
ckpt_status ckpt_cuda_copy_columns(const ckpt_cuda *c, int64_t rows, int64_t n, const void *from,
                                   int64_t ld_from, void *to, int64_t ld_to,
                                   ckpt_err *err) CKPT_MUST_USE;

/* f32: from [rows, n] -> to [rows, G, n]; sums of G; the first of G. */
ckpt_status ckpt_cuda_repeat_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                   const float *from, float *to, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_sum_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                const float *from, float *to, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_first_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                  const float *from, float *to, ckpt_err *err) CKPT_MUST_USE;

/* Sizes of MLA's heads. */
typedef struct ckpt_cuda_mla {
    int64_t N, DN, DR, DV, RK;
} ckpt_cuda_mla;
/* kv [T, N, DN + DV], kv_a [T, RK + DR] -> k [T, N, DN + DR], v [T, N, DV]; E. */
ckpt_status ckpt_cuda_split_heads(const ckpt_cuda *c, const ckpt_cuda_mla *b, int64_t T,
                                  const void *kv, const void *kv_a, void *k, void *v,
                                  ckpt_err *err) CKPT_MUST_USE;
/* Its adjoint; of dkv_a the last DR are written: sums over heads in order, in f32. */
ckpt_status ckpt_cuda_fold_heads(const ckpt_cuda *c, const ckpt_cuda_mla *b, int64_t T,
                                 const void *dk, const void *dv, void *dkv, void *dkv_a,
                                 ckpt_err *err) CKPT_MUST_USE;
/* y [T, N, D] = o sigmoid(g), g [T, N, per], per 1 or D; E. */
ckpt_status ckpt_cuda_gate_heads(const ckpt_cuda *c, int64_t T, int64_t N, int64_t D, int64_t per,
                                 const void *o, const void *g, void *y,
                                 ckpt_err *err) CKPT_MUST_USE;
/* d_o may be dy. */
ckpt_status ckpt_cuda_gate_heads_bwd(const ckpt_cuda *c, int64_t T, int64_t N, int64_t D,
                                     int64_t per, const void *o, const void *g, const void *dy,
                                     void *d_o, void *dg, ckpt_err *err) CKPT_MUST_USE;

/* Every sequence one to the left, `last` in its last place; no overlap. */
ckpt_status ckpt_cuda_shift_tokens(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int32_t last,
                                   const int32_t *from, int32_t *to, ckpt_err *err) CKPT_MUST_USE;
/* *n = labels that are not negative; weight [T] = share / *n, 0 without any. */
ckpt_status ckpt_cuda_loss_weights(const ckpt_cuda *c, int64_t T, const int32_t *labels,
                                   double share, float *weight, int64_t *n,
                                   ckpt_err *err) CKPT_MUST_USE;
/* *out = the sum of loss [T] in double, 256 interleaved sums, over *n; 0 without any. */
ckpt_status ckpt_cuda_mean_loss(const ckpt_cuda *c, int64_t T, const float *loss, const int64_t *n,
                                double *out, ckpt_err *err) CKPT_MUST_USE;
/* *at as engine/move.h says of `watch`; x E. work: CKPT_CUDA_WATCH bytes. */
#define CKPT_CUDA_WATCH 4096
ckpt_status ckpt_cuda_watch(const ckpt_cuda *c, int64_t n, const void *x, int64_t *at,
                            ckpt_err *err) CKPT_MUST_USE;

/* The experts' activation times the row's weight: act [n, F] = (silu(gate) up or, gate NULL,
 * max(up, 0)^2) weight[slot_of[row]]; gate, up, act E, weight f32. */
ckpt_status ckpt_cuda_experts_act(const ckpt_cuda *c, int64_t n, int64_t F, const void *gate,
                                  const void *up, const float *weight, const int32_t *slot_of,
                                  void *act, ckpt_err *err) CKPT_MUST_USE;
/* From the gradient of act in dup: act again, dgate (or NULL), dup written over, and
 * dweight[slot_of[row]]. */
ckpt_status ckpt_cuda_experts_act_bwd(const ckpt_cuda *c, int64_t n, int64_t F, const void *gate,
                                      const void *up, const float *weight, const int32_t *slot_of,
                                      void *act, void *dgate, void *dup, float *dweight,
                                      ckpt_err *err) CKPT_MUST_USE;
/* out[0] = coef sum over tokens and experts of balance[i + 1] - balance[i] times the token's share of
 * its scores (balance NULL: 0); out[1] = z_coef sum lse^2 / T. In double, 256 interleaved sums. */
ckpt_status ckpt_cuda_side_losses(const ckpt_cuda *c, int64_t T, int64_t E, bool softmax,
                                  const float *score, const float *lse, const int64_t *balance,
                                  double coef, double z_coef, double *out,
                                  ckpt_err *err) CKPT_MUST_USE;
/* counts [E] = first[i + 1] - first[i] */
ckpt_status ckpt_cuda_counts(const ckpt_cuda *c, int64_t E, const int64_t *first, int64_t *counts,
                             ckpt_err *err) CKPT_MUST_USE;

/* ---- Muon ------------------------------------------------------------------------------------ */

/* train/elementwise.h's direction and apply, its bits. */
ckpt_status ckpt_cuda_muon_direction(const ckpt_cuda *c, int64_t n, float scale, float rise,
                                     bool nesterov, const float *g, float *m, float *d,
                                     ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_muon_apply(const ckpt_cuda *c, int64_t n, float decay, float negative,
                                 float factor, const float *x, float *w,
                                 ckpt_err *err) CKPT_MUST_USE;
/* The same with scale, decay and negative on the device (graph.h). */
ckpt_status ckpt_cuda_muon_direction_kept(const ckpt_cuda *c, int64_t n, const float *scale,
                                          float rise, bool nesterov, const float *g, float *m,
                                          float *d, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_muon_apply_kept(const ckpt_cuda *c, int64_t n, const float *decay,
                                      const float *negative, float factor, const float *x, float *w,
                                      ckpt_err *err) CKPT_MUST_USE;
/* y [rows, cols] or, `turn`, [cols, rows] = x / max(*norm, 1e-7) (norm NULL: x), rounded to bf16 when
 * `round`. */
ckpt_status ckpt_cuda_muon_load(const ckpt_cuda *c, int64_t rows, int64_t cols, bool turn,
                                bool round, const float *x, const double *norm, float *y,
                                ckpt_err *err) CKPT_MUST_USE;
/* y = a x + b y, rounded to bf16 when `round`. */
ckpt_status ckpt_cuda_muon_mix(const ckpt_cuda *c, int64_t n, float a, const float *x, float b,
                               bool round, float *y, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
