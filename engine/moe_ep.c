/* Experts spread over ranks: every rank routes its own tokens, sends each row to the rank that has its
 * expert, and gets the result back.
 *
 * Rows are sent in expert order, so that those for one rank are together. What arrives comes by rank and
 * then by expert, and is put in expert order, ranks ascending inside an expert: with consecutive tokens
 * on consecutive ranks, the order one process has. A rank then has an ordinary problem: its experts, one
 * row a token, which moe_rows solves. How many rows arrive depends on the routing; room is taken for all
 * rows of all ranks, of which only what arrives is touched. Source: mla-moe-math.md section 4.2. */
#include "moe_internal.h"

#include <stdlib.h>

#include "checked.h"

/* Tell every rank how many rows of each of its experts come, and order what arrives. *n: how many. */
static ckpt_status meet(ckpt_eng *e, const ckpt_eng_moe *m, const ENG(moe_saved) * s, int64_t *n,
                        ckpt_err *err)
{
    int ep = e->par->ep;
    ckpt_eng_range own = ckpt_moe_own(e, m);
    int64_t *out = malloc((size_t)(m->E + own.n * ep + 2 * ep + 1) * sizeof *out);
    ckpt_status status;
    if (out == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld experts", (long long)m->E);
    int64_t *in = out + m->E, *out_n = in + own.n * ep, *in_n = out_n + ep;
    for (int64_t i = 0; i < m->E; i++)
        out[i] = s->first[i + 1] - s->first[i];
    for (int r = 0; r < ep; r++) {
        int64_t lo = ckpt_part_at(m->E, ep, r), hi = ckpt_part_at(m->E, ep, r + 1);
        out_n[r] = hi - lo;
        in_n[r] = own.n;
        s->sent[r] = s->first[hi] - s->first[lo];
    }
    CKPT_CHECK(ckpt_comm_alltoall(&e->par->experts, sizeof *out, out, out_n, in, in_n, err));
    *n = 0;
    for (int r = 0; r < ep; r++) {
        s->received[r] = 0;
        for (int64_t i = 0; i < own.n; i++)
            s->received[r] += in[r * own.n + i];
        *n += s->received[r];
    }
    if (*n > s->rows) {
        status =
            ckpt_fail(err, CKPT_E_UNSUPPORTED,
                      "moe: %lld rows arrive, at most %lld: data-parallel ranks of one group of "
                      "experts need batches of one size",
                      (long long)*n, (long long)s->rows);
        goto done;
    }
    int64_t row = 0;
    for (int64_t i = 0; i < own.n; i++) {
        int64_t before = 0; /* received rows of lower ranks */
        s->first_in[i] = row;
        for (int r = 0; r < ep; r++) {
            int64_t at = before;
            for (int64_t k = 0; k < i; k++)
                at += in[r * own.n + k];
            for (int64_t k = 0; k < in[r * own.n + i]; k++, row++) {
                s->slot_in[row] = (int32_t)(at + k);
                s->row_in[at + k] = (int32_t)row;
            }
            before += s->received[r];
        }
    }
    s->first_in[own.n] = row;
done:
    free(out);
    return status;
}

typedef struct rows_job {
    const ENG(moe_saved) * s;
    int64_t T, k, H;
    const real *from;
    real *to;
    bool add;
} rows_job;

#define ROWS 64

/* Rows of tokens in expert order. */
static void spread_rows(void *arg, int64_t item, int worker)
{
    const rows_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->T * j->k);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        for (int64_t c = 0; c < j->H; c++)
            j->to[r * j->H + c] = j->from[j->s->slot_of[r] / j->k * j->H + c];
}

/* to (+)= the sum of a token's rows, in the order they were chosen. */
static void sum_rows(void *arg, int64_t item, int worker)
{
    const rows_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++)
        for (int64_t c = 0; c < j->H; c++) {
            real sum = j->add ? j->to[t * j->H + c] : 0;
            for (int64_t i = 0; i < j->k; i++)
                sum += j->from[j->s->row_of[t * j->k + i] * j->H + c];
            j->to[t * j->H + c] = sum;
        }
}

static ckpt_status move(ckpt_eng *e, const ENG(moe_saved) * s, int64_t width, bool there,
                        const real *from, real *to, ckpt_err *err)
{
    return ckpt_comm_alltoall(&e->par->experts, (size_t)width * sizeof(real), from,
                              there ? s->sent : s->received, to, there ? s->received : s->sent,
                              err);
}

static int64_t arrived(const ckpt_eng *e, const ENG(moe_saved) * s)
{
    int64_t n = 0;
    for (int r = 0; r < e->par->ep && !e->dry; r++)
        n += s->received[r];
    return e->dry ? s->rows : n;
}

ckpt_status ENG(moe_ep)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                        const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    int64_t rows = T * m->top_k, n = s->rows;
    ckpt_eng_moe part = ckpt_moe_own_part(e, m);
    ENG(moe_saved) in = ENG(moe_received)(s);
    ENG(moe_params) own = {.experts = p->experts + ckpt_moe_own(e, m).lo};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *send = ckpt_eng_take(e, rows * m->H, sizeof *send);
    real *weight = ckpt_eng_take(e, rows, sizeof *weight);
    real *x_in = ckpt_eng_take(e, s->rows * m->H, sizeof *x_in);
    real *y_in = ckpt_eng_take(e, s->rows * m->H, sizeof *y_in);
    rows_job j = {s, T, m->top_k, m->H, x, send, add};
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        CKPT_CHECK(meet(e, m, s, &n, err));
        ckpt_eng_parallel(e, (rows + ROWS - 1) / ROWS, spread_rows, &j);
        for (int64_t r = 0; r < rows; r++)
            weight[r] = s->weight[s->slot_of[r]];
        CKPT_CHECK(move(e, s, m->H, true, send, x_in, err));
        CKPT_CHECK(move(e, s, 1, true, weight, s->weight_in, err));
    }
    if (part.E > 0)
        CKPT_CHECK(ENG(moe_rows)(e, &part, n, &own, x_in, false, y_in, &in, err));
    if (!e->dry) {
        CKPT_CHECK(move(e, s, m->H, false, y_in, send, err));
        j.from = send;
        j.to = y;
        ckpt_eng_parallel(e, (T + ROWS - 1) / ROWS, sum_rows, &j);
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe_ep_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                            const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                            bool add, real *dx, real *dweight, const ENG(moe_params) * g,
                            ckpt_err *err)
{
    int64_t rows = T * m->top_k, n = arrived(e, s), lo = ckpt_moe_own(e, m).lo;
    ckpt_eng_moe part = ckpt_moe_own_part(e, m);
    ENG(moe_saved) in = ENG(moe_received)(s);
    ENG(moe_params) own = {.experts = p->experts + lo}, grads = {.experts = g->experts + lo};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *send = ckpt_eng_take(e, rows * m->H, sizeof *send);
    real *weight = ckpt_eng_take(e, rows, sizeof *weight);
    real *dy_in = ckpt_eng_take(e, s->rows * m->H, sizeof *dy_in);
    real *dx_in = ckpt_eng_take(e, s->rows * m->H, sizeof *dx_in);
    real *dweight_in = ckpt_eng_take(e, s->rows, sizeof *dweight_in);
    rows_job j = {s, T, m->top_k, m->H, dy, send, add};
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        ckpt_eng_parallel(e, (rows + ROWS - 1) / ROWS, spread_rows, &j);
        CKPT_CHECK(move(e, s, m->H, true, send, dy_in, err));
    }
    if (part.E > 0)
        CKPT_CHECK(ENG(moe_rows_bwd)(e, &part, n, &own, &in, dy_in, false, dx_in, dweight_in,
                                     &grads, err));
    if (!e->dry) {
        CKPT_CHECK(move(e, s, m->H, false, dx_in, send, err));
        CKPT_CHECK(move(e, s, 1, false, dweight_in, weight, err));
        for (int64_t r = 0; r < rows; r++)
            dweight[s->slot_of[r]] = weight[r];
        j.from = send;
        j.to = dx;
        ckpt_eng_parallel(e, (T + ROWS - 1) / ROWS, sum_rows, &j);
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}
