/* KDA on a CUDA device: chunked forward and backward of the recurrence of kda-math.md section 2,
 * chunk 64, written as the scan of section 3 and the adjoint of section 4.2.
 *
 * Arrays are on the device, row-major, 16-byte aligned, sequences packed one after the other:
 *   q, k [T, H, D], v, o [T, H, D]        dtype of the call (K = V = D, H = HV)
 *   g    [T, H, D]                        natural-log decay, at most 0; f32, or bf16 with g_bf16
 *   beta [T, H]                           f32
 *   states [N, H, D (K), D (V)]           f32
 * q and k are used as given (normed by the caller). Gradients have the types of their arrays; those
 * of g and beta are f32.
 *
 * Rounding, bf16: sums, decays, the inverse and the state accumulator are f32; what a tensor core
 * multiplies is bf16 (kda-math.md section 1.4), block merges of the inverse are TF32. f32: every
 * product is f32 on CUDA cores, for parity and not for speed.
 *
 * Determinism: no atomics, every sum has one order; equal calls on equal cards give equal bits.
 * Nothing is allocated; work runs in `stream` (a cudaStream_t) and the functions do not wait for it.
 * With sequences of unequal lengths a table is copied from host memory, so such a call cannot be
 * captured into a graph. */
#ifndef CKPT_CUDA_KDA_H
#define CKPT_CUDA_KDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "err.h"

#pragma GCC visibility push(default) /* what the plug-in libckpt_cuda.so exports */

typedef enum ckpt_cuda_type { CKPT_CUDA_F32, CKPT_CUDA_BF16 } ckpt_cuda_type;

typedef struct ckpt_cuda_kda {
    ckpt_cuda_type type;
    int64_t N;         /* sequences */
    int64_t H, D;      /* heads; D = K = V, 64 or 128 */
    const int64_t *cu; /* host, [N + 1]: sequence n is tokens cu[n] .. cu[n+1]-1; cu[0] = 0 */
    double scale;      /* on q; 0 = D^-0.5 */
    bool safe;         /* g >= -5 everywhere: diagonal tiles run on tensor cores. With a stronger
                          decay than that the result would overflow, so the caller must know */
    bool g_bf16;       /* only with type bf16 */
    int segments; /* pieces of a sequence that are scanned at once, 1 .. 64; 0 = what fits the card */
} ckpt_cuda_kda;

typedef struct ckpt_cuda_kda_in {
    const void *q, *k, *v, *g;
    const float *beta;
    const float *state0; /* or NULL = zeros */
} ckpt_cuda_kda_in;

typedef struct ckpt_cuda_kda_grad {
    void *q, *k, *v;
    float *g, *beta;
    float *state0; /* or NULL */
} ckpt_cuda_kda_grad;

/* Bytes of workspace of either direction; backward keeps nothing from forward but its inputs.
 * Errors: CKPT_E_USAGE for sizes that do not fit together, CKPT_E_UNSUPPORTED for another D. */
ckpt_status ckpt_cuda_kda_bytes(const ckpt_cuda_kda *d, size_t *forward, size_t *backward,
                                ckpt_err *err) CKPT_MUST_USE;

/* o and, unless NULL, state (after each sequence; may be in->state0). work: device memory of
 * `forward` bytes. Errors: as above; CKPT_E_UNSUPPORTED when the card's shared memory is too small;
 * CKPT_E_IO when a launch fails. */
ckpt_status ckpt_cuda_kda_fwd(const ckpt_cuda_kda *d, const ckpt_cuda_kda_in *in, void *o,
                              float *state, void *work, void *stream, ckpt_err *err) CKPT_MUST_USE;

/* d_o [T, H, D]; d_state: gradient of the final state, or NULL = zeros. All of grad is written. */
ckpt_status ckpt_cuda_kda_bwd(const ckpt_cuda_kda *d, const ckpt_cuda_kda_in *in, const void *d_o,
                              const float *d_state, const ckpt_cuda_kda_grad *grad, void *work,
                              void *stream, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
