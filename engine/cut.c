/* What context-parallel ranks tell each other inside a block (cut.h). A message goes in a round of its own
 * which all ranks of the group take part in, so a rank is free for the rounds before and after its own. */
#include "cut.h"

#include <string.h>

#include "checked.h"

static const ckpt_comm_type type = sizeof(real) == 4 ? CKPT_COMM_F32 : CKPT_COMM_F64;

/* Round i crosses the border between ranks i - 1 and i. */
static ckpt_status cross(ckpt_eng *e, int i, int64_t n, bool back, const real *send, real *recv,
                         ckpt_err *err)
{
    if (!e->par->cut->link[i])
        return CKPT_OK;
    return ckpt_comm_pass(&e->par->context, back ? i : i - 1, back ? i - 1 : i, send, recv,
                          (size_t)n * sizeof *recv, err);
}

ckpt_status ENG(cut_receive)(ckpt_eng *e, int64_t n, bool back, real *x, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int cp = e->par->cp, c = e->par->c;
    memset(x, 0, (size_t)n * sizeof *x);
    for (int i = 1; !back && i <= c && status == CKPT_OK; i++)
        status = cross(e, i, n, false, NULL, x, err);
    for (int i = cp - 1; back && i > c && status == CKPT_OK; i--)
        status = cross(e, i, n, true, NULL, x, err);
    return status;
}

ckpt_status ENG(cut_send)(ckpt_eng *e, int64_t n, bool back, const real *next, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int cp = e->par->cp, c = e->par->c;
    for (int i = c + 1; !back && i < cp && status == CKPT_OK; i++)
        status = cross(e, i, n, false, next, NULL, err);
    for (int i = c; back && i > 0 && status == CKPT_OK; i--)
        status = cross(e, i, n, true, next, NULL, err);
    return status;
}

ckpt_status ENG(cut_pass)(ckpt_eng *e, int64_t n, bool back, real *x, real *next, ENG(cut_fn) make,
                          void *self, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ENG(cut_receive)(e, n, back, x, err));
    make(self, x, next);
    CKPT_CHECK(ENG(cut_send)(e, n, back, next, err));
done:
    return status;
}

ckpt_status ENG(bring_cut)(ckpt_eng *e, const ckpt_eng_cut *c, ckpt_err *err)
{
    (void)c;
    return ckpt_eng_check(e, err);
}

/* ---- softmax attention ----------------------------------------------------------------------- */

/* Rows of this rank's tokens to the ranks that work on them. x [n, width], rows [rows, width]; what comes
 * from one rank after the other is in the order of tokens already. */
static ckpt_status deal_rows(ckpt_eng *e, int64_t width, const real *x, real *rows, ckpt_err *err)
{
    const ckpt_eng_cut *c = e->par->cut;
    size_t mark = ckpt_eng_mark(e);
    real *send = ckpt_eng_take(e, c->n * width, sizeof *send);
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        for (int64_t i = 0; i < c->n; i++)
            memcpy(send + i * width, x + c->order[i] * width, (size_t)width * sizeof *x);
        const int64_t *out = ckpt_cut_scaled(e, c->out, width, 0),
                      *in = ckpt_cut_scaled(e, c->in, width, 1);
        status = ckpt_comm_alltoall(&e->par->context, sizeof *send, send, out, rows, in, err);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

/* The way back. */
static ckpt_status return_rows(ckpt_eng *e, int64_t width, const real *rows, real *x, ckpt_err *err)
{
    const ckpt_eng_cut *c = e->par->cut;
    size_t mark = ckpt_eng_mark(e);
    real *recv = ckpt_eng_take(e, c->n * width, sizeof *recv);
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        const int64_t *out = ckpt_cut_scaled(e, c->out, width, 0),
                      *in = ckpt_cut_scaled(e, c->in, width, 1);
        status = ckpt_comm_alltoall(&e->par->context, sizeof *recv, rows, in, recv, out, err);
        for (int64_t i = 0; status == CKPT_OK && i < c->n; i++)
            memcpy(x + c->order[i] * width, recv + i * width, (size_t)width * sizeof *x);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

/* A rank's part of attention. */
static ckpt_eng_attention share_of(const ckpt_eng_cut *c, const ckpt_eng_attention *a)
{
    ckpt_eng_attention part = *a;
    part.parts = c->parts;
    part.n_parts = c->n_parts;
    return part;
}

ckpt_status ENG(attention_cut)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, real *o, real *lse,
                               ckpt_err *err)
{
    const ckpt_eng_cut *c = ckpt_eng_cut_in(e);
    size_t mark = ckpt_eng_mark(e);
    real *all_k, *all_v;
    ckpt_status status;
    if (c == NULL)
        return ENG(attention)(e, a, seq, q, k, v, o, lse, err);
    ckpt_eng_attention part = share_of(c, a);
    int64_t nq = a->N * a->DK, no = a->N * a->DV;
    real *dealt_q = ckpt_eng_take(e, c->rows * nq, sizeof *dealt_q);
    real *dealt_o = ckpt_eng_take(e, c->rows * no, sizeof *dealt_o);
    real *dealt_lse = ckpt_eng_take(e, c->rows * a->N, sizeof *dealt_lse);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(gather_keys)(e, a, k, v, &all_k, &all_v, err));
    CKPT_CHECK(deal_rows(e, nq, q, dealt_q, err));
    CKPT_CHECK(ENG(attention)(e, &part, c->whole, dealt_q, all_k, all_v, dealt_o, dealt_lse, err));
    CKPT_CHECK(return_rows(e, no, dealt_o, o, err));
    CKPT_CHECK(return_rows(e, a->N, dealt_lse, lse, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* Queries, outputs, their gradients and statistics of a rank's part, for the backward. */
typedef struct dealt {
    real *q, *o, *d_o, *lse, *dq;
} dealt;

static ckpt_status deal_saved(ckpt_eng *e, const ckpt_eng_attention *a, const real *q,
                              const real *o, const real *lse, const real *d_o, dealt *d,
                              ckpt_err *err)
{
    int64_t rows = e->par->cut->rows, nq = a->N * a->DK, no = a->N * a->DV;
    ckpt_status status;
    d->q = ckpt_eng_take(e, rows * nq, sizeof(real));
    d->dq = ckpt_eng_take(e, rows * nq, sizeof(real));
    d->o = ckpt_eng_take(e, rows * no, sizeof(real));
    d->d_o = ckpt_eng_take(e, rows * no, sizeof(real));
    d->lse = ckpt_eng_take(e, rows * a->N, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(deal_rows(e, nq, q, d->q, err));
    CKPT_CHECK(deal_rows(e, no, o, d->o, err));
    CKPT_CHECK(deal_rows(e, no, d_o, d->d_o, err));
    CKPT_CHECK(deal_rows(e, a->N, lse, d->lse, err));
done:
    return status;
}

ckpt_status ENG(attention_cut_bwd)(ckpt_eng *e, const ckpt_eng_attention *a,
                                   const ckpt_eng_seq *seq, const real *q, const real *k,
                                   const real *v, const real *o, const real *lse, const real *d_o,
                                   real *dq, real *dk, real *dv, ckpt_err *err)
{
    const ckpt_eng_cut *c = ckpt_eng_cut_in(e);
    size_t mark = ckpt_eng_mark(e);
    real *all_k, *all_v;
    dealt d;
    ckpt_status status;
    if (c == NULL)
        return ENG(attention_bwd)(e, a, seq, q, k, v, o, lse, d_o, dq, dk, dv, err);
    ckpt_eng_attention part = share_of(c, a);
    int64_t T = ckpt_eng_tokens(c->whole), nk = a->G * a->DK, nv = a->G * a->DV;
    CKPT_CHECK(ENG(gather_keys)(e, a, k, v, &all_k, &all_v, err));
    real *all_dk = ckpt_eng_take(e, T * nk, sizeof(real));
    real *all_dv = ckpt_eng_take(e, T * nv, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(deal_saved(e, a, q, o, lse, d_o, &d, err));
    CKPT_CHECK(ENG(attention_bwd)(e, &part, c->whole, d.q, all_k, all_v, d.o, d.lse, d.d_o, d.dq,
                                  all_dk, all_dv, err));
    CKPT_CHECK(return_rows(e, a->N * a->DK, d.dq, dq, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(
        ckpt_comm_reduce_scatter(&e->par->context, type, all_dk, ckpt_cut_counts(e, nk), dk, err));
    CKPT_CHECK(
        ckpt_comm_reduce_scatter(&e->par->context, type, all_dv, ckpt_cut_counts(e, nv), dv, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
