/* What a model cut over several ranks needs on a CUDA device beside the operations of one: sums of
 * columns, weights of labels that other ranks count too, the loss over a vocabulary whose columns lie on
 * several ranks (engine/xent.c: three passes, between which ranks take maximum and sums). Conventions
 * (types, stream, determinism, errors): ops.h. */
#ifndef CKPT_CUDA_PARTS_H
#define CKPT_CUDA_PARTS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* to[r, 0..n) += from[r, 0..n), f32, rows `ld` apart. */
ckpt_status ckpt_cuda_add_columns(const ckpt_cuda *c, int64_t rows, int64_t n, const float *from,
                                  int64_t ld_from, float *to, int64_t ld_to,
                                  ckpt_err *err) CKPT_MUST_USE;
/* weight [T] = share / *n; 0 when *n is. */
ckpt_status ckpt_cuda_share_weights(const ckpt_cuda *c, int64_t T, double share, const int64_t *n,
                                    float *weight, ckpt_err *err) CKPT_MUST_USE;
/* logits [T, n] E, columns lo .. lo + n - 1 of the vocabulary. top [T]: their maximum (NaN if one is). */
ckpt_status ckpt_cuda_xent_top(const ckpt_cuda *c, int64_t T, int64_t n, const void *logits,
                               float *top, ckpt_err *err) CKPT_MUST_USE;
/* sum [T]: of e^(logit - top); at [T]: the label's logit less top where this rank has it, else 0. */
ckpt_status ckpt_cuda_xent_sums(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n,
                                const void *logits, const int32_t *labels, const float *top,
                                float *sum, float *at, ckpt_err *err) CKPT_MUST_USE;
/* With top, sum, at of all ranks: loss [T] and dlogits [T, n] E, which may be logits, or NULL. */
ckpt_status ckpt_cuda_xent_end(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n,
                               const void *logits, const int32_t *labels, const float *weight,
                               const float *top, const float *sum, const float *at, float *loss,
                               void *dlogits, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
