/* Whole blocks, from the (already normed) input to the output projection: MLP and the linear-attention
 * mixers. Input norm and residual belong to the model. Conventions: engine.h.
 *
 * Calling sequence of a block X: describe it (a dims struct), point at its weights (ENG(X_params)),
 *   ENG(X_save)(e, dims, seq, &saved)                  takes what backward needs from the arena,
 *   ENG(X)(e, dims, seq, &params, x, y, ..., &saved)   forward,
 *   ENG(X_bwd)(e, dims, seq, &params, &saved, x, dy, dx, ..., &grads)   backward.
 * With activation recomputation the model keeps x alone and calls the first two again just before the
 * third. params and grads have the same form; grads point at arrays that are added to, or are NULL
 * where no gradient is wanted. */
#ifndef CKPT_ENGINE_BLOCKS_H
#define CKPT_ENGINE_BLOCKS_H

#include "ops.h"
#include "quant/kda_quant.h"

/* ---- dense MLP (mlp.c) ---------------------------------------------------------------------- */

typedef struct ckpt_eng_mlp {
    int64_t H, F;
    bool gated;   /* silu(gate) * up; else max(up, 0)^2 */
    double clamp; /* 0 = none; gated only */
} ckpt_eng_mlp;

typedef struct ENG(mlp_params) {
    real *gate, *up, *down; /* [F, H] (NULL when not gated), [F, H], [H, F] */
} ENG(mlp_params);

typedef struct ENG(mlp_saved) {
    real *gate, *up; /* pre-activations [T, F]; gate NULL when not gated */
} ENG(mlp_saved);

ckpt_status ENG(mlp_save)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, ENG(mlp_saved) * saved,
                          ckpt_err *err) CKPT_MUST_USE;
/* y [T, H] written, or added to when `add`. */
ckpt_status ENG(mlp)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, const ENG(mlp_params) * p,
                     const real *x, bool add, real *y, const ENG(mlp_saved) * saved,
                     ckpt_err *err) CKPT_MUST_USE;
/* dx written, or added to when `add`. */
ckpt_status ENG(mlp_bwd)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, const ENG(mlp_params) * p,
                         const ENG(mlp_saved) * saved, const real *x, const real *dy, bool add,
                         real *dx, const ENG(mlp_params) * grads, ckpt_err *err) CKPT_MUST_USE;

/* ---- KDA, GDN, GDN2 mixers (linattn.c) ------------------------------------------------------ */

/* x -> q, k, v (conv + SiLU), l2norm(q, k), decay from f, erase/write gates -> recurrence ->
 * gated norm with z -> out projection. Source: kda-math.md section 1. */
typedef struct ckpt_eng_linattn {
    ckpt_eng_delta delta;
    int64_t D;              /* hidden size */
    int64_t W;              /* conv width */
    int64_t f_rank, z_rank; /* 0 = full rank */
    bool key_gates; /* decay and erase gate are of key heads; a group's value heads share them */
    double bound;   /* decay gate: 0 = softplus form, < 0 = bounded form */
    double erase_scale; /* 0 or 1, or 2 to allow negative eigenvalues; GDN2's w is never scaled */
    ckpt_eng_act act;   /* of the output gate: sigmoid for KDA, SiLU for GDN and GDN2 */
    double eps;         /* output norm */
    double l2_eps;      /* 0 = 1e-6 */
    /* Emulated quantisation of KDA, or NULL: the ordinary path. Refused (CKPT_E_UNSUPPORTED) together
     * with a state, with context parallelism, and NVFP4 with tensor parallelism. */
    const ckpt_quant *quant;
    ckpt_quant_report *quant_report; /* or NULL */
} ckpt_eng_linattn;

/* DF, the columns of the decay: HV*K, or HV for GDN. With key_gates H stands for HV in f, erase, A_log
 * and dt_bias (Megatron's GDN2). */
typedef struct ENG(linattn_params) {
    real *q, *k, *v;                 /* [H*K, D], [H*K, D], [HV*V, D] */
    wreal *conv_q, *conv_k, *conv_v; /* [channels, W] */
    real *f;                         /* [DF, D], when f_rank is 0 */
    real *f_a, *f_b;                 /* [f_rank, D], [DF, f_rank] */
    real *z;                         /* [HV*V, D], when z_rank is 0 */
    real *z_a, *z_b;                 /* [z_rank, D], [HV*V, z_rank] */
    wreal *z_bias;                   /* [HV*V] or NULL */
    real *erase;                     /* beta [HV, D], or GDN2 b [HV*K, D] */
    real *write;                     /* GDN2 w [HV*V, D] */
    wreal *A_log, *dt_bias;          /* [HV], [DF] */
    wreal *norm;                     /* [V] */
    real *out;                       /* [D, HV*V] */
} ENG(linattn_params);

typedef struct ENG(linattn_saved) {
    real *pre_q, *pre_k, *pre_v; /* projections before the convolution */
    real *q, *k, *v;             /* after it; q and k normed */
    wreal *rq, *rk;              /* reciprocal norms [T, H] */
    real *f_mid, *z_mid;         /* low-rank middles */
    real *f;                     /* raw decay input [T, DF] */
    wreal *g;                    /* decay of value heads */
    real *z;                     /* output gate input */
    wreal *erase, *write;        /* after the sigmoid, of value heads */
    real *o;                     /* recurrence output [T, HV, V] */
    wreal *rstd;                 /* norm statistics [T, HV] */
    wreal *states;               /* of the recurrence; NULL with `quant` */
    ENG(quant_saved) quant;
    /* A sequence over several ranks (cut.h): what comes before this rank's tokens. NULL without */
    real *hist_q, *hist_k, *hist_v; /* [N, W-1, channels] rows before the convolution */
    wreal *state0;                  /* [N, HV, K, V] */
} ENG(linattn_saved);

/* What a sequence carries into its next tokens (inference, chunked prefill). */
typedef struct ENG(linattn_state) {
    wreal *delta;                   /* [N, HV, K, V] */
    real *conv_q, *conv_k, *conv_v; /* [N, W-1, channels] */
} ENG(linattn_state);

ckpt_status ENG(linattn_save)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                              ENG(linattn_saved) * saved, ckpt_err *err) CKPT_MUST_USE;
/* y [T, D] written, or added to when `add`. state or NULL: read at the start and updated at the end;
 * backward is only for blocks that ran without one. */
ckpt_status ENG(linattn)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                         const ENG(linattn_params) * p, const real *x, bool add, real *y,
                         const ENG(linattn_state) * state, const ENG(linattn_saved) * saved,
                         ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(linattn_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                             const ENG(linattn_params) * p, const ENG(linattn_saved) * saved,
                             const real *x, const real *dy, bool add, real *dx,
                             const ENG(linattn_params) * grads, ckpt_err *err) CKPT_MUST_USE;

#endif
