/* Mixture of experts: dispatch by row, experts, combine, shared expert.
 *
 * Rows are expert-major. The weight of a token's expert is applied between activation and down
 * projection, and combining is a plain sum over a token's slots in the order they were chosen. Every
 * product is one call on fixed rows, so results do not depend on threads.
 * Source: mla-moe-math.md sections 4.2 and 4.3. */
#include "moe_internal.h"

#include <math.h>

#include "checked.h"
#include "real_math.h"

#define ROWS 128 /* an item */

typedef struct job {
    const ckpt_eng_moe *m;
    const ENG(moe_params) * p, *g;
    const ENG(moe_saved) * s;
    const int64_t *first; /* first item of every expert */
    const real *x, *dy;
    real *act;                   /* [rows, FE] weighted activation */
    real *out;                   /* [rows, H] */
    real *dgate, *dup, *dweight; /* backward */
    int64_t T;
    bool add;
    real *y;
} job;

ckpt_status ENG(moe_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * s,
                          ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t rows = T * m->top_k;
    *s = (ENG(moe_saved)){0};
    s->logit = ckpt_eng_take(e, T * m->E, sizeof(real));
    s->score = ckpt_eng_take(e, T * m->E, sizeof(real));
    s->lse = ckpt_eng_take(e, T, sizeof(real));
    s->chosen = ckpt_eng_take(e, rows, sizeof *s->chosen);
    s->weight = ckpt_eng_take(e, rows, sizeof(real));
    s->total = ckpt_eng_take(e, T, sizeof(real));
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
        ckpt_eng_mlp shared = {.H = m->H, .F = m->FS, .gated = m->gated};
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

/* ---- rows ------------------------------------------------------------------------------------ */

/* Items: blocks of up to ROWS rows of one expert. */
static int64_t cut_rows(const ckpt_eng_moe *m, const int64_t *rows, int64_t *first)
{
    first[0] = 0;
    for (int64_t i = 0; i < m->E; i++)
        first[i + 1] = first[i] + (rows[i + 1] - rows[i] + ROWS - 1) / ROWS;
    return first[m->E];
}

static int64_t expert_of(const job *j, int64_t item, int64_t *lo, int64_t *n)
{
    int64_t a = 0, b = j->m->E;
    while (b - a > 1) {
        int64_t mid = a + (b - a) / 2;
        if (j->first[mid] <= item)
            a = mid;
        else
            b = mid;
    }
    while (j->first[a + 1] <= item) /* experts without rows */
        a++;
    *lo = j->s->first[a] + (item - j->first[a]) * ROWS;
    *n = ckpt_min_i64(ROWS, j->s->first[a + 1] - *lo);
    return a;
}

static void forward_rows(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const ckpt_eng_moe *m = j->m;
    const ENG(moe_saved) *s = j->s;
    int64_t lo, n, H = m->H, F = m->FE, expert = expert_of(j, item, &lo, &n);
    const ENG(mlp_params) *w = &j->p->experts[expert];
    real *x = s->x + lo * H, *up = s->up + lo * F, *act = j->act + lo * F;
    (void)worker;
    for (int64_t r = 0; r < n; r++) {
        const real *from = j->x + s->slot_of[lo + r] / m->top_k * H;
        for (int64_t c = 0; c < H; c++)
            x[r * H + c] = from[c];
    }
    ENG(gemm)(false, true, n, F, H, 1, x, H, w->up, H, 0, up, F);
    if (m->gated)
        ENG(gemm)(false, true, n, F, H, 1, x, H, w->gate, H, 0, s->gate + lo * F, F);
    for (int64_t r = 0; r < n; r++) {
        real weight = s->weight[s->slot_of[lo + r]];
        const real *gate = m->gated ? s->gate + (lo + r) * F : NULL;
        for (int64_t c = 0; c < F; c++) {
            real u = up[r * F + c];
            real a = gate ? gate[c] * ENG(logistic)(gate[c]) * u : u > 0 ? u * u : 0 * u;
            act[r * F + c] = a * weight;
        }
    }
    ENG(gemm)(false, true, n, H, F, 1, act, F, w->down, F, 0, j->out + lo * H, H);
}

/* y (+)= the sum of a token's rows. */
static void combine(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t H = j->m->H, k = j->m->top_k, hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++)
        for (int64_t c = 0; c < H; c++) {
            real sum = j->add ? j->y[t * H + c] : 0;
            for (int64_t i = 0; i < k; i++)
                sum += j->out[j->s->row_of[t * k + i] * H + c];
            j->y[t * H + c] = sum;
        }
}

static void run_blocks(const ckpt_eng *e, const job *j, ckpt_eng_fn fn)
{
    ckpt_eng_parallel(e, (j->T + ROWS - 1) / ROWS, fn, (void *)(uintptr_t)j);
}

/* ---- shared expert's gate -------------------------------------------------------------------- */

static void add_gated(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t H = j->m->H, hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++) {
        real s = ENG(logistic)(j->s->shared_g[t]);
        for (int64_t c = 0; c < H; c++)
            j->y[t * H + c] += s * j->s->shared_y[t * H + c];
    }
}

static ckpt_status shared_forward(ckpt_eng *e, const job *j, const real *x, ckpt_err *err)
{
    const ckpt_eng_moe *m = j->m;
    ckpt_eng_mlp shared = {.H = m->H, .F = m->FS, .gated = m->gated};
    ckpt_status status;
    real *to = m->shared_gate ? j->s->shared_y : j->y;
    CKPT_CHECK(
        ENG(mlp)(e, &shared, j->T, &j->p->shared, x, !m->shared_gate, to, &j->s->shared, err));
    if (!m->shared_gate)
        goto done;
    CKPT_CHECK(ENG(linear)(e, j->T, m->H, 1, x, m->H, j->p->shared_gate, NULL, false,
                           j->s->shared_g, 1, err));
    if (!e->dry)
        run_blocks(e, j, add_gated);
done:
    return status;
}

ckpt_status ENG(moe_rows)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                          const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    job j = {.m = m, .p = p, .s = s, .x = x, .T = T, .add = add, .y = y};
    int64_t rows = T * m->top_k;
    size_t mark = ckpt_eng_mark(e);
    int64_t *first = ckpt_eng_take(e, m->E + 1, sizeof *first);
    j.act = ckpt_eng_take(e, rows * m->FE, sizeof(real));
    j.out = ckpt_eng_take(e, rows * m->H, sizeof(real));
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        int64_t items = cut_rows(m, s->first, first);
        j.first = first;
        ckpt_eng_parallel(e, items, forward_rows, &j);
        run_blocks(e, &j, combine);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                     const real *x, bool add, real *y, const ENG(moe_saved) * s, double *aux,
                     int64_t *counts, ckpt_err *err)
{
    job j = {.m = m, .p = p, .s = s, .x = x, .T = T, .add = add, .y = y};
    ckpt_status status;
    CKPT_CHECK(ENG(route)(e, m, T, p, x, s, aux, counts, err));
    if (ENG(moe_spread)(e))
        CKPT_CHECK(ENG(moe_ep)(e, m, T, p, x, add, y, s, err));
    else
        CKPT_CHECK(ENG(moe_rows)(e, m, T, p, x, add, y, s, err));
    if (m->FS > 0)
        CKPT_CHECK(shared_forward(e, &j, x, err));
done:
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Gradients up to the pre-activations, the weighted activation again, dweight, and dx by row. */
static void backward_rows(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const ckpt_eng_moe *m = j->m;
    const ENG(moe_saved) *s = j->s;
    int64_t lo, n, H = m->H, F = m->FE, expert = expert_of(j, item, &lo, &n);
    const ENG(mlp_params) *w = &j->p->experts[expert];
    real *dy = j->out + lo * H, *act = j->act + lo * F, *dup = j->dup + lo * F;
    (void)worker;
    for (int64_t r = 0; r < n; r++) {
        const real *from = j->dy + s->slot_of[lo + r] / m->top_k * H;
        for (int64_t c = 0; c < H; c++)
            dy[r * H + c] = from[c];
    }
    ENG(gemm)(false, false, n, F, H, 1, dy, H, w->down, F, 0, dup, F); /* of the weighted act */
    for (int64_t r = 0; r < n; r++) {
        real weight = s->weight[s->slot_of[lo + r]], dw = 0;
        for (int64_t c = 0; c < F; c++) {
            int64_t i = r * F + c;
            real u = s->up[lo * F + i], da = dup[i], a;
            if (m->gated) {
                real g = s->gate[lo * F + i], sg = ENG(logistic)(g);
                a = g * sg * u;
                j->dgate[lo * F + i] = weight * da * u * sg * (1 + g * (1 - sg));
                dup[i] = weight * da * g * sg;
            } else {
                a = u > 0 ? u * u : 0 * u;
                dup[i] = u > 0 ? weight * da * 2 * u : 0 * (da + u);
            }
            dw += da * a;
            act[i] = a * weight;
        }
        j->dweight[s->slot_of[lo + r]] = dw;
    }
}

/* Weight gradients: one product a matrix. Item: expert * 3 + matrix. */
static void weight_grads(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const ckpt_eng_moe *m = j->m;
    int64_t expert = item / 3, lo = j->s->first[expert], n = j->s->first[expert + 1] - lo;
    int64_t H = m->H, F = m->FE;
    const ENG(mlp_params) *g = &j->g->experts[expert];
    const real *x = j->s->x + lo * H;
    (void)worker;
    if (n == 0)
        return;
    if (item % 3 == 0 && g->down)
        ENG(gemm)(true, false, H, F, n, 1, j->out + lo * H, H, j->act + lo * F, F, 1, g->down, F);
    if (item % 3 == 1 && g->up)
        ENG(gemm)(true, false, F, H, n, 1, j->dup + lo * F, F, x, H, 1, g->up, H);
    if (item % 3 == 2 && m->gated && g->gate)
        ENG(gemm)(true, false, F, H, n, 1, j->dgate + lo * F, F, x, H, 1, g->gate, H);
}

static void input_grads(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const ckpt_eng_moe *m = j->m;
    int64_t lo, n, H = m->H, F = m->FE, expert = expert_of(j, item, &lo, &n);
    const ENG(mlp_params) *w = &j->p->experts[expert];
    real *dx = j->out + lo * H;
    (void)worker;
    ENG(gemm)(false, false, n, H, F, 1, j->dup + lo * F, F, w->up, H, 0, dx, H);
    if (m->gated)
        ENG(gemm)(false, false, n, H, F, 1, j->dgate + lo * F, F, w->gate, H, 1, dx, H);
}

/* Through the shared expert's gate: dgated (written) and the gate's own gradient dg [T]. */
typedef struct gate_job {
    const job *j;
    real *dgated, *dg;
} gate_job;

static void gate_bwd(void *arg, int64_t item, int worker)
{
    const gate_job *q = arg;
    const job *j = q->j;
    int64_t H = j->m->H, hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++) {
        real s = ENG(logistic)(j->s->shared_g[t]), dot = 0;
        for (int64_t c = 0; c < H; c++) {
            dot += j->dy[t * H + c] * j->s->shared_y[t * H + c];
            q->dgated[t * H + c] = s * j->dy[t * H + c];
        }
        q->dg[t] = dot * s * (1 - s);
    }
}

static ckpt_status shared_backward(ckpt_eng *e, const job *j, const real *x, real *dx,
                                   ckpt_err *err)
{
    const ckpt_eng_moe *m = j->m;
    ckpt_eng_mlp shared = {.H = m->H, .F = m->FS, .gated = m->gated};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    const real *dy = j->dy;
    if (m->shared_gate) {
        gate_job q = {.j = j};
        q.dgated = ckpt_eng_take(e, j->T * m->H, sizeof(real));
        q.dg = ckpt_eng_take(e, j->T, sizeof(real));
        CKPT_CHECK(ckpt_eng_check(e, err));
        if (!e->dry)
            ckpt_eng_parallel(e, (j->T + ROWS - 1) / ROWS, gate_bwd, &q);
        CKPT_CHECK(
            ENG(linear_dw)(e, j->T, m->H, 1, q.dg, 1, x, m->H, j->g->shared_gate, NULL, err));
        CKPT_CHECK(
            ENG(linear_dx)(e, j->T, m->H, 1, q.dg, 1, j->p->shared_gate, true, dx, m->H, err));
        dy = q.dgated;
    }
    CKPT_CHECK(ENG(mlp_bwd)(e, &shared, j->T, &j->p->shared, &j->s->shared, x, dy, true, dx,
                            &j->g->shared, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe_rows_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                              const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                              bool add, real *dx, real *dweight, const ENG(moe_params) * g,
                              ckpt_err *err)
{
    job j = {
        .m = m, .p = p, .g = g, .s = s, .dy = dy, .T = T, .add = add, .y = dx, .dweight = dweight};
    int64_t rows = T * m->top_k;
    size_t mark = ckpt_eng_mark(e);
    int64_t *first = ckpt_eng_take(e, m->E + 1, sizeof *first);
    j.act = ckpt_eng_take(e, rows * m->FE, sizeof(real));
    j.out = ckpt_eng_take(e, rows * m->H, sizeof(real));
    j.dgate = m->gated ? ckpt_eng_take(e, rows * m->FE, sizeof(real)) : NULL;
    j.dup = ckpt_eng_take(e, rows * m->FE, sizeof(real));
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        int64_t items = cut_rows(m, s->first, first);
        j.first = first;
        ckpt_eng_parallel(e, items, backward_rows, &j);
        ckpt_eng_parallel(e, m->E * 3, weight_grads, &j);
        ckpt_eng_parallel(e, items, input_grads, &j);
        run_blocks(e, &j, combine);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                         const ENG(moe_saved) * s, const real *x, const real *dy, double aux_scale,
                         bool add, real *dx, const ENG(moe_params) * grads, ckpt_err *err)
{
    job j = {.m = m, .p = p, .g = grads, .s = s, .dy = dy, .T = T, .add = add, .y = dx};
    size_t mark = ckpt_eng_mark(e);
    real *dweight = ckpt_eng_take(e, T * m->top_k, sizeof(real));
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (ENG(moe_spread)(e))
        CKPT_CHECK(ENG(moe_ep_bwd)(e, m, T, p, s, dy, add, dx, dweight, grads, err));
    else
        CKPT_CHECK(ENG(moe_rows_bwd)(e, m, T, p, s, dy, add, dx, dweight, grads, err));
    CKPT_CHECK(ENG(route_bwd)(e, m, T, p, s, x, dweight, aux_scale, dx, grads, err));
    if (m->FS > 0)
        CKPT_CHECK(shared_backward(e, &j, x, dx, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
