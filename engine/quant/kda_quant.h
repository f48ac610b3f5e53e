/* KDA prefill with every operand materialised, so that a policy can round it: the chunked algorithm of
 * quant-emulation.md section 4, differentiable, as the CPU's specification of what a GPU computes.
 *
 * Shapes of ops.h's delta rule. Chunks of 64 tokens; a sequence is padded with zeros to whole chunks.
 * N chunks of all sequences, H value heads, G inclusive sum of g within a chunk, kappa = scale:
 *   key_interaction  L = tril_-1 (beta_i k_i) . (k_j exp(G_i - G_j))        one call a tile of 8 rows i
 *   output_score     P = tril_0 (kappa q_i) . (k_j exp(G_i - G_j))         likewise
 *   A = (I + L)^-1;  wy_value u = A . beta v;  wy_key W = A . beta k e^G    one call
 *   per chunk: state_read, U = u - W S;  output_state + output_value, o = kappa q e^G S + P U;
 *              state_update, S' = exp(G_last) S + (k exp(G_last - G))^T U
 * Operands are quantised as lhs . rhs^T with the reduction last; FP8 has one scale a row of it, NVFP4 one
 * per call over all chunks (or sequences) and heads, padding included; the state one per tile.
 *
 * Arithmetic of a rounding is f32 in both element types, each operation rounded once, subnormals kept.
 * Products sum in the element type; with an accumulator schedule in blocks of the reduction, each partial
 * sum rounded. Gradients: every rounding has derivative 1, products use the quantised operands (straight
 * through), exp its unrounded value. Source: quant-emulation.md, quant_oracle.py.
 *
 * The inverse is found by substitution in double. With solve_factors n > 0 it is
 * (I-L)(I+L^2)(I+L^4)... of n factors instead, exact from n = 6 on but for rounding; the report says how
 * far it is off. Its backward is that of an inverse.
 *
 * Results are equal bit by bit at any number of threads. */
#ifndef CKPT_ENGINE_KDA_QUANT_H
#define CKPT_ENGINE_KDA_QUANT_H

#include "ops.h"
#include "policy.h"

#define CKPT_QUANT_CHUNK 64
#define CKPT_QUANT_TILE 8 /* query rows of one call of an interaction */

/* What happened, added to by every forward; zero-initialise. */
typedef struct ckpt_quant_report {
    int64_t calls[CKPT_HANDLE_COUNT]; /* of each enabled handle's quantiser */
    /* Of the approximate inverse X: largest |X - A| and |X (I + L) - I| over all chunks and heads. */
    double inverse_error, inverse_residual;
} ckpt_quant_report;

/* Where a handle's operand is quantised: in the calls of a tile, in the solve, in every step of the walk over
 * chunks; or the state itself. */
typedef enum ckpt_quant_stage {
    CKPT_QUANT_IN_TILES,
    CKPT_QUANT_IN_SOLVE,
    CKPT_QUANT_IN_WALK,
    CKPT_QUANT_IN_STATE
} ckpt_quant_stage;
ckpt_quant_stage ckpt_quant_stage_of(int handle);
/* Add the calls of one forward over these sequences. */
void ckpt_quant_count(const ckpt_quant *q, const ckpt_eng_seq *seq, ckpt_quant_report *r);
/* Raise the errors of the inverse; NaN is above all. */
void ckpt_quant_worst(const double errors[2], ckpt_quant_report *r);

/* Operands as they were multiplied, [chunk * HV + head, ...]. Where two sites quantise one operand the
 * same way they share it. */
typedef struct ENG(quant_saved) {
    real *prefix;              /* [64, K] */
    real *inverse;             /* [64, 64] */
    real *u_l, *u_r;           /* [64, 64], [V, 64] */
    real *w_l, *w_r;           /* [64, 64], [K, 64] */
    real *read_l, *read_r;     /* [64, K], [V, K] */
    real *memory_l, *memory_r; /* [64, K], [V, K] */
    real *local_l, *local_r;   /* [64, 64], [V, 64] */
    real *write_l, *write_r;   /* [K, 64], [V, 64] */
    real *state;               /* [K, V], as it came into the chunk */
    float *tiles;              /* [4, 8] global scales of the interactions' operands */
    void *block;               /* on a device all of it instead (cuda/quant.h) */
} ENG(quant_saved);

/* Errors: CKPT_E_USAGE sizes, CKPT_E_UNSUPPORTED an empty sequence, another rule than KDA, a head size
 * above 1024. */
ckpt_status ENG(kda_quant_save)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                                const ckpt_eng_seq *seq, ENG(quant_saved) * saved,
                                ckpt_err *err) CKPT_MUST_USE;
/* o [T, HV, V]; state [N, HV, K, V] or NULL: after each sequence, may be in->state0. report or NULL. */
ckpt_status ENG(kda_quant)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                           const ckpt_eng_seq *seq, const ENG(delta_in) * in, real *o, wreal *state,
                           const ENG(quant_saved) * saved, ckpt_quant_report *report,
                           ckpt_err *err) CKPT_MUST_USE;
/* d_o [T, HV, V]; d_state [N, HV, K, V] or NULL: gradient of the final state. */
ckpt_status ENG(kda_quant_bwd)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                               const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                               const ENG(quant_saved) * saved, const real *d_o,
                               const wreal *d_state, const ENG(delta_grad) * grad,
                               ckpt_err *err) CKPT_MUST_USE;

#endif
