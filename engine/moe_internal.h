/* Between router.c and moe.c. */
#ifndef CKPT_ENGINE_MOE_INTERNAL_H
#define CKPT_ENGINE_MOE_INTERNAL_H

#include "moe.h"

/* Scores, choice, weights and the expert-major row order of all tokens. */
ckpt_status ENG(route)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                       const real *x, const ENG(moe_saved) * s, double *aux, int64_t *counts,
                       ckpt_err *err) CKPT_MUST_USE;
/* dweight [T, top_k] to the router's gradients; dx is added to. */
ckpt_status ENG(route_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                           const ENG(moe_saved) * s, const real *x, const real *dweight,
                           double aux_scale, real *dx, const ENG(moe_params) * g,
                           ckpt_err *err) CKPT_MUST_USE;

#endif
