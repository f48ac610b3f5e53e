/* Mixture of experts, embedding and cross entropy. Conventions: engine.h, calling sequence of blocks:
 * blocks.h. Source: mla-moe-math.md sections 4 and 5. */
#ifndef CKPT_ENGINE_MOE_H
#define CKPT_ENGINE_MOE_H

#include "blocks.h"

typedef struct ckpt_eng_moe {
    int64_t H, E, FE, FS; /* FS 0 = no shared expert */
    int64_t top_k, groups, group_top_k;
    bool softmax;   /* scores; else sigmoid */
    bool normalize; /* weights divided by their sum */
    bool gated;     /* SwiGLU experts; else squared ReLU */
    bool shared_gate;
    double scale;
    double aux_coef, z_coef;
} ckpt_eng_moe;

typedef struct ENG(moe_params) {
    real *router, *router_bias; /* [E, H], [E] or NULL */
    ENG(mlp_params) * experts;  /* E of them */
    ENG(mlp_params) shared;
    real *shared_gate; /* [1, H] or NULL */
} ENG(moe_params);

/* ---- embedding and loss (embed.c, xent.c) --------------------------------------------------- */

/* y [T, H] = table[ids]. Errors: CKPT_E_FORMAT for an id outside [0, V), naming its position. */
ckpt_status ENG(embed)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                       const real *table, real *y, ckpt_err *err) CKPT_MUST_USE;
/* dtable += */
ckpt_status ENG(embed_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                           const real *dy, real *dtable, ckpt_err *err) CKPT_MUST_USE;
/* loss [T] of logits [T, V] against labels [T], label < 0 = no loss (0); dlogits = (softmax - onehot)
 * * weight[t], may alias logits, or NULL. */
ckpt_status ENG(xent)(ckpt_eng *e, int64_t T, int64_t V, const real *logits, const int32_t *labels,
                      const real *weight, real *loss, real *dlogits, ckpt_err *err) CKPT_MUST_USE;

#endif
