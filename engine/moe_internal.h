/* Between router.c, moe.c and moe_ep.c. */
#ifndef CKPT_ENGINE_MOE_INTERNAL_H
#define CKPT_ENGINE_MOE_INTERNAL_H

#include "moe.h"
#include "par.h"

/* Scores, choice, weights and the expert-major row order of all tokens. */
ckpt_status ENG(route)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                       const real *x, const ENG(moe_saved) * s, double *aux, int64_t *counts,
                       ckpt_err *err) CKPT_MUST_USE;
/* dweight [T, top_k] to the router's gradients; dx is added to. */
ckpt_status ENG(route_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                           const ENG(moe_saved) * s, const real *x, const wreal *dweight,
                           double aux_scale, real *dx, const ENG(moe_params) * g,
                           ckpt_err *err) CKPT_MUST_USE;

/* moe.c: the experts alone, rows ordered in s. y [T, H] (+)= the sum of a token's rows; backward: dx
 * (+)=, dweight [T, top_k], gradients of the experts. */
ckpt_status ENG(moe_rows)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                          const real *x, bool add, real *y, const ENG(moe_saved) * s,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(moe_rows_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                              const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                              bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                              ckpt_err *err) CKPT_MUST_USE;
/* moe_ep.c: the same where e->par spreads the experts over ranks. */
static inline bool ENG(moe_spread)(const ckpt_eng *e)
{
    return e->par != NULL && e->par->ep > 1;
}
/* This rank's experts. */
static inline ckpt_eng_range ckpt_moe_own(const ckpt_eng *e, const ckpt_eng_moe *m)
{
    int64_t lo = ckpt_part_at(m->E, e->par->ep, e->par->x);
    return (ckpt_eng_range){lo, ckpt_part_at(m->E, e->par->ep, e->par->x + 1) - lo};
}
/* The problem that this rank has: one row a token. */
static inline ENG(moe_saved) ENG(moe_received)(const ENG(moe_saved) * s)
{
    return (ENG(moe_saved)){.first = s->first_in,
                            .row_of = s->row_in,
                            .slot_of = s->slot_in,
                            .weight = s->weight_in,
                            .x = s->x,
                            .gate = s->gate,
                            .up = s->up};
}
static inline ckpt_eng_moe ckpt_moe_own_part(const ckpt_eng *e, const ckpt_eng_moe *m)
{
    ckpt_eng_moe r = *m;
    r.E = ckpt_moe_own(e, m).n;
    r.top_k = 1;
    return r;
}
ckpt_status ENG(moe_ep_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * s,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(moe_ep)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                        const real *x, bool add, real *y, const ENG(moe_saved) * s,
                        ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(moe_ep_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                            const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                            bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                            ckpt_err *err) CKPT_MUST_USE;

#endif
