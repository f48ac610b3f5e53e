/* Mixture of experts: dispatch by row, experts, combine.
 *
 * Rows are expert-major. The weight of a token's expert is applied between activation and down
 * projection, and combining is a plain sum over a token's slots in the order they were chosen. Every
 * product is one call on fixed rows, so results do not depend on threads.
 * Source: mla-moe-math.md sections 4.2 and 4.3. */
#include "moe_internal.h"

#include <math.h>

#include "checked.h"
#include "kernels/kernels.h"

#define ROWS 128 /* an item */

typedef struct job {
    const ckpt_eng_moe *m;
    const ENG(moe_params) * p, *g;
    const ENG(moe_saved) * s;
    const int64_t *first; /* first item of every expert */
    const real *x, *dy;
    real *act;         /* [rows, FE] weighted activation */
    real *out;         /* [rows, H] */
    real *dgate, *dup; /* backward */
    wreal *dweight;
    int64_t T;
    bool add;
    real *y;
    const ENG(kernels) * kernels;
} job;

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
        if (m->gated)
            j->kernels->swiglu(F, s->gate + (lo + r) * F, up + r * F, 0, act + r * F);
        else
            j->kernels->relu2(F, up + r * F, act + r * F);
        for (int64_t c = 0; c < F; c++)
            act[r * F + c] *= weight;
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

ckpt_status ENG(moe_rows)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                          const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    job j = {.m = m,
             .p = p,
             .s = s,
             .x = x,
             .T = T,
             .add = add,
             .y = y,
             .kernels = ENG(kernels_for)(e->isa)};
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
        const real weight = s->weight[s->slot_of[lo + r]], *u = s->up + (lo + r) * F;
        const real *gate = m->gated ? s->gate + (lo + r) * F : NULL;
        real *a = act + r * F, *da = dup + r * F;
        if (gate)
            j->kernels->swiglu(F, gate, u, 0, a);
        else
            j->kernels->relu2(F, u, a);
        j->dweight[s->slot_of[lo + r]] = j->kernels->dot(F, da, a);
        for (int64_t c = 0; c < F; c++) {
            a[c] *= weight;
            da[c] *= weight;
        }
        if (gate)
            j->kernels->swiglu_bwd(F, gate, u, 0, da, j->dgate + (lo + r) * F, da);
        else
            j->kernels->relu2_bwd(F, u, da, da);
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

ckpt_status ENG(moe_rows_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                              const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                              bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                              ckpt_err *err)
{
    job j = {.m = m,
             .p = p,
             .g = g,
             .s = s,
             .dy = dy,
             .T = T,
             .add = add,
             .y = dx,
             .dweight = dweight,
             .kernels = ENG(kernels_for)(e->isa)};
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
