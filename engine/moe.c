/* Mixture of experts: router, experts (moe_rows.c), shared expert. Source: mla-moe-math.md sections 4.2
 * and 4.3. */
#include "moe_internal.h"

#include "checked.h"
#include "move.h"

static ckpt_eng_mlp shared_of(const ckpt_eng_moe *m)
{
    return (ckpt_eng_mlp){.H = m->H, .F = m->FS, .gated = m->gated};
}

ckpt_status ENG(moe_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * s,
                          ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t rows = T * m->top_k;
    *s = (ENG(moe_saved)){0};
    s->logit = ckpt_eng_take(e, T * m->E, sizeof(wreal));
    s->score = ckpt_eng_take(e, T * m->E, sizeof(wreal));
    s->lse = ckpt_eng_take(e, T, sizeof(wreal));
    s->chosen = ckpt_eng_take(e, rows, sizeof *s->chosen);
    s->weight = ckpt_eng_take(e, rows, sizeof(wreal));
    s->total = ckpt_eng_take(e, T, sizeof(wreal));
    s->first = ckpt_eng_take(e, m->E + 1, sizeof *s->first);
    s->row_of = ckpt_eng_take(e, rows, sizeof *s->row_of);
    s->slot_of = ckpt_eng_take(e, rows, sizeof *s->slot_of);
    if (ENG(moe_spread)(e)) {
        CKPT_CHECK(ENG(moe_ep_save)(e, m, T, s, err));
        rows = s->rows;
    }
    s->x = ckpt_eng_take(e, rows * m->H, sizeof(real));
    if (m->gated)
        s->gate = ckpt_eng_take(e, rows * m->FE, sizeof(real));
    s->up = ckpt_eng_take(e, rows * m->FE, sizeof(real));
    if (m->FS > 0) {
        ckpt_eng_mlp shared = shared_of(m);
        CKPT_CHECK(ENG(mlp_save)(e, &shared, T, &s->shared, err));
    }
    if (m->FS > 0 && m->shared_gate) {
        s->shared_y = ckpt_eng_take(e, T * m->H, sizeof(real));
        s->shared_g = ckpt_eng_take(e, T, sizeof(real));
    }
    status = ckpt_eng_check(e, err);
done:
    return status;
}

/* ---- shared expert --------------------------------------------------------------------------- */

/* y += the shared expert, through its gate where there is one. */
static ckpt_status shared_forward(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                                  const ENG(moe_params) * p, const real *x, real *y,
                                  const ENG(moe_saved) * s, ckpt_err *err)
{
    ckpt_eng_mlp shared = shared_of(m);
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *to = m->shared_gate ? s->shared_y : y;
    CKPT_CHECK(ENG(mlp)(e, &shared, T, &p->shared, x, !m->shared_gate, to, &s->shared, err));
    if (!m->shared_gate)
        goto done;
    real *gated = ckpt_eng_take(e, T * m->H, sizeof *gated);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(
        ENG(linear)(e, T, m->H, 1, x, m->H, p->shared_gate, NULL, false, s->shared_g, 1, err));
    CKPT_CHECK(ENG(gate_heads)(e, T, 1, m->H, 1, s->shared_y, s->shared_g, gated, err));
    CKPT_CHECK(ENG(add)(e, T * m->H, gated, y, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                     const real *x, bool add, real *y, const ENG(moe_saved) * s, double *aux,
                     int64_t *counts, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ENG(route)(e, m, T, p, x, s, aux, counts, err));
    if (ENG(moe_spread)(e))
        CKPT_CHECK(ENG(moe_ep)(e, m, T, p, x, add, y, s, err));
    else
        CKPT_CHECK(ENG(moe_rows)(e, m, T, p, x, add, y, s, err));
    if (m->FS > 0)
        CKPT_CHECK(shared_forward(e, m, T, p, x, y, s, err));
done:
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dx += */
static ckpt_status shared_backward(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                                   const ENG(moe_params) * p, const ENG(moe_saved) * s,
                                   const real *x, const real *dy, real *dx,
                                   const ENG(moe_params) * g, ckpt_err *err)
{
    ckpt_eng_mlp shared = shared_of(m);
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    if (m->shared_gate) {
        real *dgated = ckpt_eng_take(e, T * m->H, sizeof(real));
        real *dg = ckpt_eng_take(e, T, sizeof(real));
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(
            ENG(gate_heads_bwd)(e, T, 1, m->H, 1, s->shared_y, s->shared_g, dy, dgated, dg, err));
        CKPT_CHECK(ENG(linear_dw)(e, T, m->H, 1, dg, 1, x, m->H, g->shared_gate, NULL, err));
        CKPT_CHECK(ENG(linear_dx)(e, T, m->H, 1, dg, 1, p->shared_gate, true, dx, m->H, err));
        dy = dgated;
    }
    CKPT_CHECK(
        ENG(mlp_bwd)(e, &shared, T, &p->shared, &s->shared, x, dy, true, dx, &g->shared, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                         const ENG(moe_saved) * s, const real *x, const real *dy, double aux_scale,
                         bool add, real *dx, const ENG(moe_params) * grads, ckpt_err *err)
{
    size_t mark = ckpt_eng_mark(e);
    wreal *dweight = ckpt_eng_take(e, T * m->top_k, sizeof *dweight);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (ENG(moe_spread)(e))
        CKPT_CHECK(ENG(moe_ep_bwd)(e, m, T, p, s, dy, add, dx, dweight, grads, err));
    else
        CKPT_CHECK(ENG(moe_rows_bwd)(e, m, T, p, s, dy, add, dx, dweight, grads, err));
    CKPT_CHECK(ENG(route_bwd)(e, m, T, p, s, x, dweight, aux_scale, dx, grads, err));
    if (m->FS > 0)
        CKPT_CHECK(shared_backward(e, m, T, p, s, x, dy, dx, grads, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
