/* Mixture of experts, embedding and cross entropy. Conventions: engine.h, calling sequence of blocks:
 * blocks.h. Source: mla-moe-math.md sections 4 and 5. */
#ifndef CKPT_ENGINE_MOE_H
#define CKPT_ENGINE_MOE_H

#include "blocks.h"
#include "comm.h"

typedef struct ckpt_eng_moe {
    int64_t H, E, FE, FS; /* FS 0 = no shared expert */
    int64_t top_k, groups, group_top_k;
    int64_t group_best; /* scores of a group that are summed up to its own; > 0 with groups */
    bool softmax;       /* scores; else sigmoid */
    bool normalize;     /* weights divided by their sum */
    bool gated;         /* SwiGLU experts; else squared ReLU */
    bool shared_gate;
    double scale;
    double aux_coef, z_coef;
} ckpt_eng_moe;

typedef struct ENG(moe_params) {
    wreal *router, *router_bias; /* [E, H], [E] or NULL */
    ENG(mlp_params) * experts;   /* E of them */
    ENG(mlp_params) shared;
    real *shared_gate; /* [1, H] or NULL */
    void **table; /* on a device: its [3, E] gate, up, down of the experts that this rank holds;
                          else NULL */
} ENG(moe_params);

typedef struct ENG(moe_saved) {
    wreal *logit, *score; /* [T, E]; score is the sigmoid or softmax */
    wreal *lse;           /* [T]: of the logits */
    int32_t *chosen;      /* [T, top_k] experts, best first */
    wreal *weight;        /* [T, top_k], scaled */
    wreal *total;         /* [T]: sum of the chosen scores */
    int64_t *first;       /* [E + 1]: rows of every expert */
    int32_t
        *row_of; /* [T, top_k]: row of a token's slot; rows are expert-major, tokens ascending */
    int32_t *slot_of; /* [T * top_k]: token * top_k + slot of a row */
    real *x;          /* [T * top_k, H]: inputs by row */
    real *gate, *up;  /* [T * top_k, FE]: pre-activations by row; gate NULL when not gated */
    ENG(mlp_saved) shared;
    real *shared_y; /* [T, H]: shared expert before its gate, when there is one */
    real *shared_g; /* [T]: that gate before the sigmoid */
    /* Experts on several ranks (moe_ep.c): x, gate and up are rows of this rank's experts, and the order
     * of the rows received. */
    wreal *weight_in;               /* as received */
    int64_t *first_in;              /* [own experts + 1] */
    int32_t *row_in, *slot_in;      /* received index to row and back */
    int64_t *sent, *received, rows; /* rows to and from every rank; room for */
} ENG(moe_saved);

ckpt_status ENG(moe_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * saved,
                          ckpt_err *err) CKPT_MUST_USE;
/* y [T, H] written, or added to when `add`. aux [2] or NULL: the auxiliary balance loss and the z loss,
 * coefficients applied. counts [E] or NULL: tokens of every expert. */
ckpt_status ENG(moe)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                     const real *x, bool add, real *y, const ENG(moe_saved) * saved, double *aux,
                     int64_t *counts, ckpt_err *err) CKPT_MUST_USE;
/* dx written, or added to when `add`. aux_scale multiplies the gradients of both side losses. */
ckpt_status ENG(moe_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                         const ENG(moe_saved) * saved, const real *x, const real *dy,
                         double aux_scale, bool add, real *dx, const ENG(moe_params) * grads,
                         ckpt_err *err) CKPT_MUST_USE;

/* ---- embedding and loss (embed.c, xent.c) --------------------------------------------------- */

/* y [T, H] = table[ids]. Errors: CKPT_E_FORMAT for an id outside [0, V), naming its position. */
ckpt_status ENG(embed)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                       const real *table, real *y, ckpt_err *err) CKPT_MUST_USE;
/* dtable += */
ckpt_status ENG(embed_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                           const real *dy, real *dtable, ckpt_err *err) CKPT_MUST_USE;
/* The same with rows lo .. lo + n - 1 of the table alone: other ids give zeros and no gradient. */
ckpt_status ENG(embed_part)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                            const int32_t *ids, const real *table, real *y,
                            ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(embed_part_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                                const int32_t *ids, const real *dy, real *dtable,
                                ckpt_err *err) CKPT_MUST_USE;
/* loss [T] of logits [T, V] against labels [T], label < 0 = no loss (0); dlogits = (softmax - onehot)
 * * weight[t], may alias logits, or NULL. */
ckpt_status ENG(xent)(ckpt_eng *e, int64_t T, int64_t V, const real *logits, const int32_t *labels,
                      const wreal *weight, wreal *loss, real *dlogits, ckpt_err *err) CKPT_MUST_USE;
/* The same with columns lo .. lo + n - 1 of the logits on this rank of c, [T, n]. */
ckpt_status ENG(xent_part)(ckpt_eng *e, ckpt_comm *c, int64_t T, int64_t V, int64_t lo, int64_t n,
                           const real *logits, const int32_t *labels, const wreal *weight,
                           wreal *loss, real *dlogits, ckpt_err *err) CKPT_MUST_USE;

#endif
