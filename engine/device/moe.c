/* Router and experts on a device: moe_internal.h (moe_ep.c: on several ranks). Routing is f32 whatever activations
 * are; sizes that the routing decides stay on the device, so nothing waits for them.
 * Formulas: engine/router.c, engine/moe_rows.c. */
#include "moe_internal.h"

#include "context.h"

static ckpt_cuda_route route_of(const ckpt_eng_moe *m)
{
    return (ckpt_cuda_route){.E = m->E,
                             .top_k = m->top_k,
                             .groups = m->groups,
                             .group_top_k = m->group_top_k,
                             .group_best = m->group_best,
                             .softmax = m->softmax,
                             .normalize = m->normalize,
                             .scale = (float)m->scale};
}

/* logit [T, E] f32 = x w^T, w f32. */
static ckpt_status logits(const ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const real *x,
                          const wreal *w, wreal *logit, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    const ckpt_cuda_product p = {.tb = true,
                                 .m = T,
                                 .n = m->E,
                                 .k = m->H,
                                 .lda = m->H,
                                 .ldb = m->H,
                                 .ldc = m->E,
                                 .a_type = c.type,
                                 .b_type = CKPT_CUDA_F32,
                                 .c_type = CKPT_CUDA_F32,
                                 .a = x,
                                 .b = w,
                                 .c = logit};
    return api_of(e)->matmul(&c, &p, err);
}

/* How often each expert is among the best of a token without bias and groups, as first rows. */
static ckpt_status balance_of(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                              const ENG(moe_saved) * s, int64_t **out, ckpt_err *err)
{
    const int64_t n = T * m->top_k;
    ckpt_cuda_route r = route_of(m);
    ckpt_cuda c;
    ckpt_status status;
    *out = ckpt_eng_take(e, m->E + 1, sizeof **out);
    size_t mark = ckpt_eng_mark(e);
    wreal *score = ckpt_eng_take(e, T * m->E, sizeof *score);
    wreal *one = ckpt_eng_take(e, 2 * T, sizeof *one),
          *weight = ckpt_eng_take(e, n, sizeof *weight);
    int32_t *chosen = ckpt_eng_take(e, 3 * n, sizeof *chosen);
    CKPT_CHECK(with_work(e, api_of(e)->work(m->E), &c, err));
    if (e->dry)
        goto done;
    r.groups = 1;
    CKPT_CHECK(
        api_of(e)->router(&c, &r, T, s->logit, NULL, score, one, chosen, weight, one + T, err));
    CKPT_CHECK(api_of(e)->order(&c, m->E, n, chosen, *out, chosen + n, chosen + 2 * n, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static double balance_coef(const ckpt_eng_moe *m, int64_t T)
{
    return m->aux_coef * (double)m->E / ((double)m->top_k * (double)T * (double)T);
}

ckpt_status ENG(route)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                       const real *x, const ENG(moe_saved) * s, double *aux, int64_t *counts,
                       ckpt_err *err)
{
    const ckpt_cuda_route r = route_of(m);
    size_t mark = ckpt_eng_mark(e);
    int64_t *balance = NULL;
    ckpt_cuda c;
    ckpt_status status;
    CKPT_CHECK(with_work(e, api_of(e)->work(m->E), &c, err));
    if (!e->dry) {
        CKPT_CHECK(logits(e, m, T, x, p->router, s->logit, err));
        CKPT_CHECK(api_of(e)->router(&c, &r, T, s->logit, p->router_bias, s->score, s->lse,
                                     s->chosen, s->weight, s->total, err));
        CKPT_CHECK(api_of(e)->order(&c, m->E, T * m->top_k, s->chosen, s->first, s->row_of,
                                    s->slot_of, err));
    }
    if (aux != NULL && m->aux_coef != 0)
        CKPT_CHECK(balance_of(e, m, T, s, &balance, err));
    if (aux != NULL && (m->aux_coef != 0 || m->z_coef != 0) && !e->dry)
        CKPT_CHECK(api_of(e)->side_losses(&c, T, m->E, m->softmax, s->score, s->lse, balance,
                                          balance_coef(m, T), m->z_coef, aux, err));
    if (counts != NULL && !e->dry)
        CKPT_CHECK(api_of(e)->counts(&c, m->E, s->first, counts, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(route_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                           const ENG(moe_saved) * s, const real *x, const wreal *dweight,
                           double aux_scale, real *dx, const ENG(moe_params) * g, ckpt_err *err)
{
    const ckpt_cuda_route r = route_of(m);
    const ckpt_cuda c = plain(e);
    size_t mark = ckpt_eng_mark(e);
    int64_t *balance = NULL;
    ckpt_status status = CKPT_OK;
    wreal *dlogit = ckpt_eng_take(e, T * m->E, sizeof *dlogit);
    if (m->aux_coef != 0)
        CKPT_CHECK(balance_of(e, m, T, s, &balance, err));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(api_of(e)->router_bwd(&c, &r, T, s->logit, s->score, s->lse, s->chosen, s->total,
                                     dweight, balance, aux_scale * balance_coef(m, T),
                                     aux_scale * 2 * m->z_coef / (double)T, dlogit, err));
    const ckpt_cuda_product to_router = {.ta = true,
                                         .add = true,
                                         .m = m->E,
                                         .n = m->H,
                                         .k = T,
                                         .lda = m->E,
                                         .ldb = m->H,
                                         .ldc = m->H,
                                         .a_type = CKPT_CUDA_F32,
                                         .b_type = c.type,
                                         .c_type = CKPT_CUDA_F32,
                                         .a = dlogit,
                                         .b = x,
                                         .c = g->router};
    const ckpt_cuda_product to_x = {.add = true,
                                    .m = T,
                                    .n = m->H,
                                    .k = m->E,
                                    .lda = m->E,
                                    .ldb = m->H,
                                    .ldc = m->H,
                                    .a_type = CKPT_CUDA_F32,
                                    .b_type = CKPT_CUDA_F32,
                                    .c_type = c.type,
                                    .a = dlogit,
                                    .b = p->router,
                                    .c = dx};
    if (g->router != NULL)
        CKPT_CHECK(api_of(e)->matmul(&c, &to_router, err));
    CKPT_CHECK(api_of(e)->matmul(&c, &to_x, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Rows of the experts: arguments that every product has. */
typedef struct rows_of {
    const ckpt_cuda_plugin *api;
    ckpt_cuda c;
    int64_t E, n, H, F;
    const int64_t *first;
    const void *const *gate, *const *up, *const *down; /* on the device */
} rows_of;

static rows_of rows_start(const ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                          const ENG(moe_params) * p, const ENG(moe_saved) * s)
{
    const void *const *table = (const void *const *)p->table;
    return (rows_of){.api = api_of(e),
                     .c = plain(e),
                     .E = m->E,
                     .n = T * m->top_k,
                     .H = m->H,
                     .F = m->FE,
                     .first = s->first,
                     .gate = table,
                     .up = table + m->E,
                     .down = table + 2 * m->E};
}

ckpt_status ENG(moe_rows)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                          const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    const rows_of r = rows_start(e, m, T, p, s);
    const ckpt_cuda_plugin *api = r.api;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *act = ckpt_eng_take(e, r.n * r.F, sizeof *act);
    real *out = ckpt_eng_take(e, r.n * r.H, sizeof *out);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(api->dispatch(&r.c, r.n, r.H, m->top_k, s->slot_of, x, s->x, err));
    CKPT_CHECK(api->experts(&r.c, r.E, r.n, r.first, r.H, r.F, s->x, r.up, false, s->up, err));
    if (m->gated)
        CKPT_CHECK(
            api->experts(&r.c, r.E, r.n, r.first, r.H, r.F, s->x, r.gate, false, s->gate, err));
    CKPT_CHECK(api->experts_act(&r.c, r.n, r.F, m->gated ? s->gate : NULL, s->up, s->weight,
                                s->slot_of, act, err));
    CKPT_CHECK(api->experts(&r.c, r.E, r.n, r.first, r.F, r.H, act, r.down, false, out, err));
    CKPT_CHECK(api->combine(&r.c, T, r.H, m->top_k, s->row_of, out, add, y, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* Gradients of the experts' matrices: down of the weighted activation, up and gate of the rows. */
static ckpt_status rows_dw(const rows_of *r, const ENG(moe_params) * g, const ENG(moe_saved) * s,
                           const real *dy, const real *act, const real *dup, const real *dgate,
                           ckpt_err *err)
{
    float *const *gate = (float *const *)g->table, *const *up = gate + r->E,
                 *const *down = up + r->E;
    ckpt_status status;
    CKPT_CHECK(r->api->experts_dw(&r->c, r->E, r->n, r->first, r->F, r->H, dy, act, down, err));
    CKPT_CHECK(r->api->experts_dw(&r->c, r->E, r->n, r->first, r->H, r->F, dup, s->x, up, err));
    if (dgate != NULL)
        CKPT_CHECK(
            r->api->experts_dw(&r->c, r->E, r->n, r->first, r->H, r->F, dgate, s->x, gate, err));
done:
    return status;
}

ckpt_status ENG(moe_rows_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                              const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                              bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                              ckpt_err *err)
{
    const rows_of r = rows_start(e, m, T, p, s);
    const ckpt_cuda_plugin *api = r.api;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *act = ckpt_eng_take(e, r.n * r.F, sizeof *act);
    real *dup = ckpt_eng_take(e, r.n * r.F, sizeof *dup);
    real *dgate = m->gated ? ckpt_eng_take(e, r.n * r.F, sizeof *dgate) : NULL;
    real *rows = ckpt_eng_take(e, r.n * r.H, sizeof *rows);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(api->dispatch(&r.c, r.n, r.H, m->top_k, s->slot_of, dy, rows, err));
    CKPT_CHECK(api->experts_dx(&r.c, r.E, r.n, r.first, r.F, r.H, rows, r.down, false, dup, err));
    CKPT_CHECK(api->experts_act_bwd(&r.c, r.n, r.F, m->gated ? s->gate : NULL, s->up, s->weight,
                                    s->slot_of, act, dgate, dup, dweight, err));
    CKPT_CHECK(rows_dw(&r, g, s, rows, act, dup, dgate, err));
    CKPT_CHECK(api->experts_dx(&r.c, r.E, r.n, r.first, r.H, r.F, dup, r.up, false, rows, err));
    if (m->gated)
        CKPT_CHECK(
            api->experts_dx(&r.c, r.E, r.n, r.first, r.H, r.F, dgate, r.gate, true, rows, err));
    CKPT_CHECK(api->combine(&r.c, T, r.H, m->top_k, s->row_of, rows, add, dx, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
