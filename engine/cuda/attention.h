/* Causal softmax attention on a CUDA device, forward and backward: twin of attn.h's attention, without a
 * T x T array. Conventions (types, alignment, stream, errors) are those of ops.h.
 *
 * Head dims up to CKPT_CUDA_HEAD_MAX run in kernels for (q and k, v and o) of (64, 64), (128, 128),
 * (192, 128) and (256, 256); others are padded with zeros in shared memory to the next of these.
 * Multiples of 8 (bf16) or 4 (f32) load fastest.
 *
 * Rounding, bf16: scores, weights' sums, accumulators, lse and D are f32; weights and the gradients of
 * scores are rounded to bf16 where a tensor core multiplies them. f32: products on CUDA cores.
 *
 * Determinism: no atomics. dq is summed by one block over keys in order, dk and dv by one over the heads
 * of their group and queries in order, at the price of computing scores twice in backward. */
#ifndef CKPT_CUDA_ATTENTION_H
#define CKPT_CUDA_ATTENTION_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define CKPT_CUDA_HEAD_MAX 256 /* channels of a head */

/* ckpt_eng_part: n queries of sequence seq from its token lo, rows `row` and on of q. */
typedef struct ckpt_cuda_part {
    int64_t seq, lo, n, row;
} ckpt_cuda_part;

/* Kernels to use: WARP, mma.sync, sm_80 and later, and all f32; GROUP, wgmma, bf16 on sm_90. BEST is
 * GROUP where the card has it: faster at every size measured (tests/gpu/ATTN_NOTES.md). */
typedef enum ckpt_cuda_attend_kind {
    CKPT_CUDA_ATTEND_BEST,
    CKPT_CUDA_ATTEND_WARP,
    CKPT_CUDA_ATTEND_GROUP
} ckpt_cuda_attend_kind;

typedef struct ckpt_cuda_attention {
    int64_t N, G;   /* query heads, key/value heads */
    int64_t DK, DV; /* head dims of q and k, of v and o */
    double scale;   /* 0 = DK^-0.5 */
    /* On the device, or NULL: queries of all tokens. Else those of n_parts parts, `rows` rows in all, in
     * the order of tokens (attn.h); keys and values are those of all tokens. */
    const ckpt_cuda_part *parts;
    int64_t n_parts, rows;
    ckpt_cuda_attend_kind kind;
} ckpt_cuda_attention;

/* Bytes of c->work that a backward over `rows` query rows of N heads uses; forward uses none. */
size_t ckpt_cuda_attention_work(int64_t rows, int64_t N);

/* q [rows, N, DK], k [T, G, DK], v [T, G, DV], o [rows, N, DV] E; lse [rows, N] f32. rows = T without
 * parts. */
ckpt_status ckpt_cuda_attend(const ckpt_cuda *c, const ckpt_cuda_attention *a,
                             const ckpt_cuda_seq *seq, const void *q, const void *k, const void *v,
                             void *o, float *lse, ckpt_err *err) CKPT_MUST_USE;
/* dq, dk, dv written. */
ckpt_status ckpt_cuda_attend_bwd(const ckpt_cuda *c, const ckpt_cuda_attention *a,
                                 const ckpt_cuda_seq *seq, const void *q, const void *k,
                                 const void *v, const void *o, const float *lse, const void *d_o,
                                 void *dq, void *dk, void *dv, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
