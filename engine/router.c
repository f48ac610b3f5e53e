/* Router: scores, group-limited choice, weights, side losses, and their gradients.
 *
 * The correction bias takes part in the choice alone. Groups score by the sum of their best group_best
 * selection scores: 2, but in Megatron top_k / group_top_k. Ties go to the lower index. Counts and the
 * choice are constants in the backward. Source: mla-moe-math.md section 4.1. */
#include "moe_internal.h"

#include <math.h>
#include <string.h>

#include "checked.h"
#include "par.h"
#include "real_math.h"

#define TOKENS 16 /* an item */
#define TINY ((real)1e-20)

typedef struct job {
    const ckpt_eng_moe *m;
    const ENG(moe_saved) * s;
    const real *bias, *dweight;
    const int64_t *balance; /* how often each expert is among the best without bias and groups */
    real *scratch, *dlogit;
    int64_t T, per_worker;
    int64_t
        all; /* tokens that the balance is counted over: T, or a micro-batch's on all its ranks */
    double aux_scale;
} job;

/* Logits to scores; returns log sum exp. */
static real scores(const ckpt_eng_moe *m, const real *z, real *score)
{
    real top = z[0], sum = 0;
    for (int64_t i = 1; i < m->E; i++)
        top = z[i] > top || z[i] != z[i] ? z[i] : top;
    for (int64_t i = 0; i < m->E; i++) {
        score[i] = EXP(z[i] - top);
        sum += score[i];
    }
    for (int64_t i = 0; i < m->E; i++)
        score[i] = m->softmax ? score[i] / sum : 1 / (1 + EXP(-z[i]));
    return top + LOG(sum);
}

/* Index of the largest of n, the first of equals; it is then taken out. */
static int64_t take_best(real *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    x[best] = (real)-INFINITY;
    return best;
}

/* Leave only the best groups' selection scores. copy: E numbers of scratch. */
static void limit_groups(const ckpt_eng_moe *m, real *select, real *copy, real *group)
{
    int64_t size = m->E / m->groups, best = m->group_best;
    memcpy(copy, select, (size_t)m->E * sizeof *copy);
    for (int64_t g = 0; g < m->groups; g++) {
        group[g] = 0;
        for (int64_t i = 0; i < best && i < size; i++) {
            real top = copy[g * size];
            for (int64_t c = 1; c < size; c++)
                top = copy[g * size + c] > top ? copy[g * size + c] : top;
            group[g] += top;
            (void)take_best(copy + g * size, size);
        }
    }
    for (int64_t g = 0; g < m->groups; g++)
        copy[g] = 0;
    for (int64_t g = 0; g < m->group_top_k; g++)
        copy[take_best(group, m->groups)] = 1; /* marks of the kept groups */
    for (int64_t g = 0; g < m->groups; g++)
        if (copy[g] != 1)
            for (int64_t c = 0; c < size; c++)
                select[g * size + c] = (real)-INFINITY;
}

static void route_token(const job *j, int64_t t, real *scratch)
{
    const ckpt_eng_moe *m = j->m;
    const ENG(moe_saved) *s = j->s;
    real *score = s->score + t * m->E, *weight = s->weight + t * m->top_k, total = 0;
    int32_t *chosen = s->chosen + t * m->top_k;
    real *select = scratch, *copy = select + m->E, *group = copy + m->E;
    s->lse[t] = scores(m, s->logit + t * m->E, score);
    for (int64_t i = 0; i < m->E; i++)
        select[i] = score[i] + (j->bias ? j->bias[i] : 0);
    if (m->groups > 1)
        limit_groups(m, select, copy, group);
    for (int64_t k = 0; k < m->top_k; k++) {
        chosen[k] = (int32_t)take_best(select, m->E);
        total += score[chosen[k]];
    }
    s->total[t] = total + (m->softmax ? 0 : TINY);
    for (int64_t k = 0; k < m->top_k; k++)
        weight[k] = score[chosen[k]] / (m->normalize ? s->total[t] : 1) * (real)m->scale;
}

static void route_tokens(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    for (int64_t t = item * TOKENS; t < hi; t++)
        route_token(j, t, j->scratch + worker * j->per_worker);
}

/* Rows in expert order, tokens ascending inside an expert. */
static void order_rows(const ckpt_eng_moe *m, int64_t T, const ENG(moe_saved) * s)
{
    int64_t n = T * m->top_k;
    for (int64_t i = 0; i <= m->E; i++)
        s->first[i] = 0;
    for (int64_t i = 0; i < n; i++)
        s->first[s->chosen[i] + 1]++;
    for (int64_t i = 0; i < m->E; i++)
        s->first[i + 1] += s->first[i];
    for (int64_t i = 0; i < n; i++) {
        int64_t row = s->first[s->chosen[i]]++;
        s->row_of[i] = (int32_t)row;
        s->slot_of[row] = (int32_t)i;
    }
    for (int64_t i = m->E; i > 0; i--)
        s->first[i] = s->first[i - 1];
    s->first[0] = 0;
}

/* What a score's share of its token is: the probability the balance loss sees. */
static real share(const ckpt_eng_moe *m, const real *score, int64_t i, real sum)
{
    return m->softmax ? score[i] : score[i] / sum;
}

static real score_sum(const ckpt_eng_moe *m, const real *score)
{
    real sum = TINY;
    for (int64_t i = 0; i < m->E; i++)
        sum += score[i];
    return sum;
}

static void count_balance(const ckpt_eng_moe *m, int64_t T, const ENG(moe_saved) * s, real *scratch,
                          int64_t *balance)
{
    for (int64_t i = 0; i < m->E; i++)
        balance[i] = 0;
    for (int64_t t = 0; t < T; t++) {
        memcpy(scratch, s->score + t * m->E, (size_t)m->E * sizeof *scratch);
        for (int64_t k = 0; k < m->top_k; k++)
            balance[take_best(scratch, m->E)]++;
    }
}

/* With several ranks: counts and tokens of the whole micro-batch. */
static ckpt_status sum_balance(ckpt_eng *e, const ckpt_eng_moe *m, int64_t *balance, int64_t *all,
                               ckpt_err *err)
{
    if (e->par == NULL || (m->aux_coef == 0 && m->z_coef == 0))
        return CKPT_OK;
    ckpt_status status =
        ckpt_comm_allreduce(&e->par->model, CKPT_COMM_I64, CKPT_COMM_SUM, all, 1, err);
    if (status == CKPT_OK)
        status =
            ckpt_comm_allreduce(&e->par->model, CKPT_COMM_I64, CKPT_COMM_SUM, balance, m->E, err);
    return status;
}

static double balance_coef(const ckpt_eng_moe *m, int64_t T)
{
    return m->aux_coef * (double)m->E / ((double)m->top_k * (double)T * (double)T);
}

static void side_losses(const ckpt_eng_moe *m, int64_t T, int64_t all, const ENG(moe_saved) * s,
                        const int64_t *balance, double aux[2])
{
    aux[0] = aux[1] = 0;
    for (int64_t t = 0; t < T; t++) {
        const real *score = s->score + t * m->E;
        real sum = score_sum(m, score);
        double part = 0, lse = (double)s->lse[t];
        for (int64_t i = 0; i < m->E && m->aux_coef != 0; i++)
            part += (double)balance[i] * (double)share(m, score, i, sum);
        aux[0] += balance_coef(m, all) * part;
        aux[1] += m->z_coef * lse * lse / (double)all;
    }
}

static ckpt_status check(const ckpt_eng_moe *m, int64_t T, ckpt_err *err)
{
    bool ok = m->E > 0 && m->top_k > 0 && m->top_k <= m->E;
    if (m->groups > 1)
        ok = ok && m->E % m->groups == 0 && m->group_top_k > 0 && m->group_top_k <= m->groups &&
             m->group_best > 0 && m->top_k <= m->E / m->groups * m->group_top_k;
    if (!ok)
        return ckpt_fail(err, CKPT_E_USAGE, "moe: %lld of %lld experts, %lld of %lld groups",
                         (long long)m->top_k, (long long)m->E, (long long)m->group_top_k,
                         (long long)m->groups);
    if (T > INT32_MAX / m->top_k)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "moe: %lld tokens", (long long)T);
    return CKPT_OK;
}

ckpt_status ENG(route)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                       const real *x, const ENG(moe_saved) * s, double *aux, int64_t *counts,
                       ckpt_err *err)
{
    job j = {.m = m, .s = s, .bias = p->router_bias, .T = T, .all = T};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    CKPT_CHECK(check(m, T, err));
    j.per_worker = 2 * m->E + m->groups + 1;
    j.scratch = ckpt_eng_take(e, e->threads * j.per_worker, sizeof(real));
    int64_t *balance = ckpt_eng_take(e, m->E, sizeof *balance);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(linear)(e, T, m->H, m->E, x, m->H, p->router, NULL, false, s->logit, m->E, err));
    if (e->dry)
        goto done;
    ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, route_tokens, &j);
    order_rows(m, T, s);
    if (aux) {
        count_balance(m, T, s, j.scratch, balance);
        CKPT_CHECK(sum_balance(e, m, balance, &j.all, err));
        side_losses(m, T, j.all, s, balance, aux);
    }
    for (int64_t i = 0; counts && i < m->E; i++)
        counts[i] = s->first[i + 1] - s->first[i];
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Gradient of the scores in ds, to that of the logits. */
static void scores_bwd(const ckpt_eng_moe *m, const real *score, const real *ds, real *dz)
{
    real dot = 0;
    for (int64_t i = 0; i < m->E && m->softmax; i++)
        dot += ds[i] * score[i];
    for (int64_t i = 0; i < m->E; i++)
        dz[i] = m->softmax ? score[i] * (ds[i] - dot) : ds[i] * score[i] * (1 - score[i]);
}

static void balance_bwd(const job *j, const real *score, real *ds)
{
    const ckpt_eng_moe *m = j->m;
    real sum = score_sum(m, score), coef = (real)(j->aux_scale * balance_coef(m, j->all)), dot = 0;
    for (int64_t i = 0; i < m->E && !m->softmax; i++)
        dot += coef * (real)j->balance[i] * share(m, score, i, sum);
    for (int64_t i = 0; i < m->E; i++)
        ds[i] += m->softmax ? coef * (real)j->balance[i] : (coef * (real)j->balance[i] - dot) / sum;
}

static void route_token_bwd(const job *j, int64_t t, real *ds)
{
    const ckpt_eng_moe *m = j->m;
    const ENG(moe_saved) *s = j->s;
    const real *score = s->score + t * m->E, *d = j->dweight + t * m->top_k;
    const int32_t *chosen = s->chosen + t * m->top_k;
    real *dz = j->dlogit + t * m->E, total = s->total[t], dot = 0, a = (real)m->scale;
    for (int64_t i = 0; i < m->E; i++)
        ds[i] = 0;
    for (int64_t k = 0; k < m->top_k && m->normalize; k++)
        dot += a * d[k] * score[chosen[k]];
    for (int64_t k = 0; k < m->top_k; k++)
        ds[chosen[k]] = m->normalize ? a * d[k] / total - dot / (total * total) : a * d[k];
    if (m->aux_coef != 0)
        balance_bwd(j, score, ds);
    scores_bwd(m, score, ds, dz);
    real zc = (real)(j->aux_scale * 2 * m->z_coef / (double)j->all) * s->lse[t];
    for (int64_t i = 0; i < m->E && m->z_coef != 0; i++)
        dz[i] += zc * EXP(s->logit[t * m->E + i] - s->lse[t]);
}

static void route_tokens_bwd(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    for (int64_t t = item * TOKENS; t < hi; t++)
        route_token_bwd(j, t, j->scratch + worker * j->per_worker);
}

ckpt_status ENG(route_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                           const ENG(moe_saved) * s, const real *x, const real *dweight,
                           double aux_scale, real *dx, const ENG(moe_params) * g, ckpt_err *err)
{
    job j = {.m = m, .s = s, .T = T, .all = T, .dweight = dweight, .aux_scale = aux_scale};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    j.per_worker = m->E;
    j.scratch = ckpt_eng_take(e, e->threads * j.per_worker, sizeof(real));
    j.dlogit = ckpt_eng_take(e, T * m->E, sizeof(real));
    int64_t *balance = ckpt_eng_take(e, m->E, sizeof *balance);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        for (int64_t i = 0; i < m->E; i++)
            balance[i] = 0;
        if (m->aux_coef != 0)
            count_balance(m, T, s, j.scratch, balance);
        CKPT_CHECK(sum_balance(e, m, balance, &j.all, err));
        j.balance = balance;
        ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, route_tokens_bwd, &j);
    }
    CKPT_CHECK(ENG(linear_dw)(e, T, m->H, m->E, j.dlogit, m->E, x, m->H, g->router, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, m->H, m->E, j.dlogit, m->E, p->router, true, dx, m->H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
