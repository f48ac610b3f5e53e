/* Delta-rule recurrences on a CUDA device: the twin of ENG(delta), ENG(delta_bwd) of ops.h, all three
 * rules, grouped value heads, head sizes up to 128, on the chunked kernels of kda.h.
 *
 * Arrays are on the device, row-major, 16-byte aligned, sequences packed one after the other. E is the
 * type of the context (ops.h), F that of the gates:
 *   q, k       [T, H, K]   E     used as given (normed by the caller)
 *   v, o       [T, HV, V]  E     value head h reads key head h / (HV / H)
 *   g          [T, HV, K]  F     natural log, at most 0; GDN: [T, HV]
 *   erase      [T, HV]     F     beta; GDN2: b [T, HV, K]
 *   write      [T, HV, V]  F     GDN2 only: w
 *   states     [N, HV, K, V] f32
 * Gradients have the types of their arrays.
 *
 * KDA with H = HV and K = V of 64 or 128 and f32 gates goes straight to kda.h. Anything else is copied
 * into that form in the workspace: heads are padded with zeros, one decay or beta a head is spread,
 * b k and w v are rounded to E once. Gradients of the copies are summed in f32, in one order.
 *
 * Determinism, streams and rounding: as in kda.h. */
#ifndef CKPT_CUDA_DELTA_H
#define CKPT_CUDA_DELTA_H

#include "kda.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef enum ckpt_cuda_rule {
    CKPT_CUDA_RULE_KDA, /* in the order of ckpt_eng_rule */
    CKPT_CUDA_RULE_GDN,
    CKPT_CUDA_RULE_GDN2
} ckpt_cuda_rule;

typedef struct ckpt_cuda_delta {
    ckpt_cuda_rule rule;
    ckpt_cuda_type gates; /* F; bf16 only in a bf16 context */
    bool safe;            /* g >= -5 everywhere (kda.h); false is always right */
    int64_t H, HV, K, V;
    double scale;      /* on q; 0 = K^-0.5 */
    int64_t N;         /* sequences */
    const int64_t *cu; /* host, [N + 1]: sequence n is tokens cu[n] .. cu[n+1]-1; cu[0] = 0 */
} ckpt_cuda_delta;

typedef struct ckpt_cuda_delta_in {
    const void *q, *k, *v, *g, *erase, *write;
    const float *state0; /* or NULL = zeros */
} ckpt_cuda_delta_in;

typedef struct ckpt_cuda_delta_grad {
    void *q, *k, *v, *g, *erase, *write; /* all written; write: GDN2 only */
    float *state0;                       /* or NULL */
} ckpt_cuda_delta_grad;

/* Bytes that c->work must have for either direction.
 * Errors: CKPT_E_USAGE for sizes that do not fit together, CKPT_E_UNSUPPORTED for K or V above 128. */
ckpt_status ckpt_cuda_delta_bytes(const ckpt_cuda *c, const ckpt_cuda_delta *d, size_t *forward,
                                  size_t *backward, ckpt_err *err) CKPT_MUST_USE;

/* o and, unless NULL, state: after each sequence; may be in->state0.
 * Errors: as above; CKPT_E_USAGE for too little workspace; CKPT_E_IO when a launch fails. */
ckpt_status ckpt_cuda_delta_fwd(const ckpt_cuda *c, const ckpt_cuda_delta *d,
                                const ckpt_cuda_delta_in *in, void *o, float *state,
                                ckpt_err *err) CKPT_MUST_USE;

/* d_o [T, HV, V] E; d_state [N, HV, K, V] or NULL: gradient of the final state. Keeps nothing from
 * forward but its inputs. */
ckpt_status ckpt_cuda_delta_bwd(const ckpt_cuda *c, const ckpt_cuda_delta *d,
                                const ckpt_cuda_delta_in *in, const void *d_o, const float *d_state,
                                const ckpt_cuda_delta_grad *grad, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
