/* The materialised KDA prefill of a quantisation policy on a CUDA device: the twin of engine/quant
 * (kda_quant.h there has the algorithm and its sources), in f32 on CUDA cores, every rounding by codec.h.
 *
 * Arrays are on the device, row-major, 16-byte aligned, sequences packed one after the other, as delta.h
 * says for its KDA: q, k [T, H, K], v, o [T, HV, V] of the context's type (bf16 is widened when read and
 * rounded once when written), g [T, HV, K], erase [T, HV], states [N, HV, K, V] f32. K and V up to 128.
 *
 * Against the CPU's f32 build: what is rounded has the same bits wherever its operand has, which is where
 * the operand is made of inputs by single operations (beta k, kappa q, beta v, prefix sums, decays of a
 * state). exp is within one unit in the last place and sums have another order, so a number that lies
 * within some units of a rounding border may fall to its other side: one step of the format, never more.
 * NVFP4's one scale a call is the largest magnitude over all blocks of the grid, taken by atomic maxima of
 * the bits, which no order changes. Equal calls on equal cards give equal bits. The approximate inverse has the
 * CPU's bits where L has.
 *
 * Nothing is allocated or waited for; work runs in the context's stream. With sequences of unequal lengths a
 * table is copied from host memory. With NVFP4 at the state or at what is written to it every chunk is two
 * launches: its scales span all heads. Otherwise a call is a few launches in all. */
#ifndef CKPT_CUDA_QUANT_H
#define CKPT_CUDA_QUANT_H

#include "delta.h"
#include "policy.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef struct ckpt_cuda_quant {
    const ckpt_quant *policy;
    int64_t H, HV, K, V;
    double scale;      /* on q; 0 = K^-0.5 */
    int64_t N;         /* sequences, none of them empty */
    const int64_t *cu; /* host, [N + 1]: sequence n is tokens cu[n] .. cu[n+1]-1; cu[0] = 0 */
    /* Device, [2], or NULL: what forward raises to the errors of an approximate inverse that are larger, as
     * ckpt_quant_report defines them (bits of doubles, zero before the first). They cost a substitution more. */
    unsigned long long *errors;
} ckpt_cuda_quant;

/* Bytes of what forward leaves for backward, and of backward's workspace. What is left begins with five arrays
 * f32 [chunk][HV][64][D], D = 64 or 128 columns of which K or V are used and the others 0: prefix sums of g,
 * kappa q e^G, k e^(G_last - G) and W as they were multiplied, U before it is rounded, in the order prefix,
 * q, k, U, W, and the inverse [chunk][HV][64][64].
 * Errors: CKPT_E_USAGE for sizes that do not fit together, CKPT_E_UNSUPPORTED for K or V above 128, an
 * empty sequence. */
ckpt_status ckpt_cuda_quant_bytes(const ckpt_cuda *c, const ckpt_cuda_quant *d, size_t *saved,
                                  size_t *backward, ckpt_err *err) CKPT_MUST_USE;

/* o and, unless NULL, state: after each sequence; may be in->state0. saved: device memory.
 * Errors: as above; CKPT_E_IO when a launch fails. */
ckpt_status ckpt_cuda_quant_fwd(const ckpt_cuda *c, const ckpt_cuda_quant *d,
                                const ckpt_cuda_delta_in *in, void *o, float *state, void *saved,
                                ckpt_err *err) CKPT_MUST_USE;

/* d_o [T, HV, V] of the context's type; d_state [N, HV, K, V] or NULL: gradient of the final state. c->work
 * must have what `backward` says. All of grad but `write` is written. */
ckpt_status ckpt_cuda_quant_bwd(const ckpt_cuda *c, const ckpt_cuda_quant *d,
                                const ckpt_cuda_delta_in *in, const void *saved, const void *d_o,
                                const float *d_state, const ckpt_cuda_delta_grad *grad,
                                ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
