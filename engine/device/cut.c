/* Sequences cut over context-parallel ranks, on a device: the twin of engine/cut.c and engine/linattn_cut.c,
 * which say what moves and why. Arrays stay on the device; a message is one ckpt_comm_pass of its memory in
 * the order of the stream, so a rank queues the work around a state that is still on its way. States are
 * f32 whatever activations are. Rows of queries are picked and put back by the kernel that picks rows of
 * experts (ops.h: dispatch). */
#include "linattn_cut.h"
#include "network_internal.h"

#include <assert.h>
#include <stdlib.h>

#include "context.h"

/* ---- what a run brings ----------------------------------------------------------------------- */

ckpt_status ENG(bring_cut)(ckpt_eng *e, const ckpt_eng_cut *c, ckpt_err *err)
{
    static_assert(sizeof(ckpt_eng_part) == sizeof(ckpt_cuda_part), "one layout of parts");
    ckpt_eng_device *d = e->device;
    const int64_t most = ckpt_min_i64(c->whole->n * 2 * e->par->cp, ckpt_eng_tokens(c->whole));
    ckpt_status status;
    d->whole_cu = c->whole->cu;
    d->whole = ckpt_eng_take(e, c->whole->n + 1, sizeof *d->whole);
    d->order = ckpt_eng_take(e, c->n, sizeof *d->order);
    d->place = ckpt_eng_take(e, c->n, sizeof *d->place);
    d->parts = ckpt_eng_take(e, most, sizeof *d->parts);
    int32_t *order = malloc((size_t)c->n * 2 * sizeof *order + 1), *place = order + c->n;
    if (order == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld tokens", (long long)c->n);
        goto done;
    }
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    for (int64_t i = 0; i < c->n; i++) {
        order[i] = (int32_t)c->order[i];
        place[c->order[i]] = (int32_t)i;
    }
    CKPT_CHECK(
        ckpt_eng_put(e, d->whole, c->whole->cu, (size_t)(c->whole->n + 1) * sizeof *d->whole, err));
    CKPT_CHECK(ckpt_eng_put(e, d->order, order, (size_t)c->n * sizeof *order, err));
    CKPT_CHECK(ckpt_eng_put(e, d->place, place, (size_t)c->n * sizeof *place, err));
    CKPT_CHECK(ckpt_eng_put(e, d->parts, c->parts, (size_t)c->n_parts * sizeof *c->parts, err));
done:
    free(order);
    return status;
}

/* ---- from rank to rank ----------------------------------------------------------------------- */

/* Round i crosses the border between ranks i - 1 and i. */
static ckpt_status cross(ckpt_eng *e, int i, size_t bytes, bool back, const void *send, void *recv,
                         ckpt_err *err)
{
    if (!e->par->cut->link[i])
        return CKPT_OK;
    return ckpt_comm_pass(&e->par->context, back ? i : i - 1, back ? i - 1 : i, send, recv, bytes,
                          err);
}

/* x is zeros already where no sequence goes on. */
static ckpt_status receive(ckpt_eng *e, size_t bytes, bool back, void *x, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int cp = e->par->cp, c = e->par->c;
    for (int i = 1; !back && i <= c && status == CKPT_OK; i++)
        status = cross(e, i, bytes, false, NULL, x, err);
    for (int i = cp - 1; back && i > c && status == CKPT_OK; i--)
        status = cross(e, i, bytes, true, NULL, x, err);
    return status;
}

static ckpt_status hand_on(ckpt_eng *e, size_t bytes, bool back, const void *next, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int cp = e->par->cp, c = e->par->c;
    for (int i = c + 1; !back && i < cp && status == CKPT_OK; i++)
        status = cross(e, i, bytes, false, next, NULL, err);
    for (int i = c; back && i > 0 && status == CKPT_OK; i--)
        status = cross(e, i, bytes, true, next, NULL, err);
    return status;
}

/* ---- rows of convolutions -------------------------------------------------------------------- */

static int64_t state_len(const ckpt_eng_linattn *b)
{
    return b->delta.HV * b->delta.K * b->delta.V;
}

/* The last `keep` rows of the last sequence: `own` of them are this rank's, from token `at`; the others, of a
 * sequence that came in, are older rows. */
typedef struct tail {
    int64_t keep, own, at;
    bool only; /* the last sequence is the first */
} tail;

static tail tail_of(const ckpt_eng_seq *seq, int64_t keep)
{
    const int64_t last = seq->n - 1, len = seq->cu[last + 1] - seq->cu[last];
    const int64_t own = ckpt_min_i64(keep, len);
    return (tail){keep, own, seq->cu[last + 1] - own, last == 0};
}

/* next [keep, n] from this rank's rows pre [T, n] and those before them, hist [keep, n]. */
static ckpt_status next_rows(ckpt_eng *e, const tail *t, int64_t n, const real *pre,
                             const real *hist, real *next, ckpt_err *err)
{
    const int64_t old = t->keep - t->own;
    ckpt_status status;
    if (t->only)
        CKPT_CHECK(ENG(copy)(e, old * n, hist + t->own * n, next, err));
    else
        CKPT_CHECK(ENG(zero)(e, old * n, next, err));
    CKPT_CHECK(ENG(copy)(e, t->own * n, pre + t->at * n, next + old * n, err));
done:
    return status;
}

ckpt_status ENG(linattn_cut_rows)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  const ENG(linattn_saved) * s, ckpt_err *err)
{
    const int64_t keep = b->W - 1, qk = b->delta.H * b->delta.K, v = b->delta.HV * b->delta.V;
    const int64_t widths[] = {qk, qk, v};
    const real *pre[] = {s->pre_q, s->pre_k, s->pre_v};
    real *hist[] = {s->hist_q, s->hist_k, s->hist_v}, *at;
    const size_t mark = ckpt_eng_mark(e), bytes = (size_t)(keep * (2 * qk + v)) * sizeof(real);
    ckpt_status status;
    real *rows =
        ckpt_eng_take(e, keep * (2 * qk + v), sizeof *rows); /* of all three: one message */
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry || keep == 0)
        goto done;
    const tail t = tail_of(seq, keep);
    CKPT_CHECK(ckpt_eng_clear(e, rows, bytes, err));
    CKPT_CHECK(receive(e, bytes, false, rows, err));
    at = rows;
    for (int i = 0; i < 3; i++) {
        CKPT_CHECK(ENG(zero)(e, seq->n * keep * widths[i], hist[i], err));
        CKPT_CHECK(ENG(copy)(e, keep * widths[i], at, hist[i], err));
        at += keep * widths[i];
    }
    at = rows;
    for (int i = 0; i < 3; i++) {
        CKPT_CHECK(next_rows(e, &t, widths[i], pre[i], hist[i], at, err));
        at += keep * widths[i];
    }
    CKPT_CHECK(hand_on(e, bytes, false, rows, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(linattn_cut_rows_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t n, int64_t W,
                                      real *dpre, real *dhistory, ckpt_err *err)
{
    const int64_t keep = W - 1;
    const size_t mark = ckpt_eng_mark(e), bytes = (size_t)(keep * n) * sizeof(real);
    ckpt_status status;
    real *x = ckpt_eng_take(e, keep * n, sizeof *x);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry || keep == 0)
        goto done;
    const tail t = tail_of(seq, keep);
    const int64_t old = keep - t.own;
    CKPT_CHECK(ENG(zero)(e, keep * n, x, err));
    CKPT_CHECK(receive(e, bytes, true, x, err));
    if (t.only)
        CKPT_CHECK(ENG(add)(e, old * n, x, dhistory + t.own * n, err));
    CKPT_CHECK(ENG(add)(e, t.own * n, x + old * n, dpre + t.at * n, err));
    CKPT_CHECK(hand_on(e, bytes, true, dhistory, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- states ---------------------------------------------------------------------------------- */

ckpt_status ENG(linattn_cut_delta)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                   const ENG(delta_in) * in, const ENG(linattn_saved) * s,
                                   ckpt_err *err)
{
    const int64_t n = state_len(b);
    const size_t mark = ckpt_eng_mark(e), bytes = (size_t)n * sizeof(wreal);
    ENG(delta_in) from = *in;
    ckpt_status status;
    wreal *state = ckpt_eng_take(e, seq->n * n, sizeof *state);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(zero_wide)(e, seq->n * n, s->state0, err));
    if (!e->dry)
        CKPT_CHECK(receive(e, bytes, false, s->state0, err));
    from.state0 = s->state0;
    CKPT_CHECK(ENG(delta)(e, &b->delta, seq, &from, s->o, state, s->states, err));
    if (!e->dry)
        CKPT_CHECK(hand_on(e, bytes, false, state + (seq->n - 1) * n, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(linattn_cut_delta_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b,
                                       const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                                       const ENG(linattn_saved) * s, const real *d_o,
                                       const ENG(delta_grad) * grad, ckpt_err *err)
{
    const int64_t n = state_len(b);
    const size_t mark = ckpt_eng_mark(e), bytes = (size_t)n * sizeof(wreal);
    ENG(delta_grad) to = *grad;
    ckpt_status status;
    wreal *d_state = ckpt_eng_take(e, seq->n * n, sizeof *d_state);
    to.state0 = ckpt_eng_take(e, seq->n * n, sizeof(wreal));
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(zero_wide)(e, seq->n * n, d_state, err));
    if (!e->dry)
        CKPT_CHECK(receive(e, bytes, true, d_state + (seq->n - 1) * n, err));
    CKPT_CHECK(ENG(delta_bwd)(e, &b->delta, seq, in, s->states, d_o, d_state, &to, err));
    if (!e->dry)
        CKPT_CHECK(hand_on(e, bytes, true, to.state0, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- softmax attention ----------------------------------------------------------------------- */

/* An array of rows of `width` elements, of E or, `wide`, f32. */
typedef struct rows {
    int64_t width;
    bool wide;
    void *own, *dealt; /* [n] of this rank's tokens, [rows] that it works on */
} rows;

static size_t bytes_of(const rows *r)
{
    return (size_t)r->width * (r->wide ? sizeof(wreal) : sizeof(real));
}

static ckpt_status pick(const ckpt_eng *e, const rows *r, const int32_t *index, const void *from,
                        void *to, ckpt_err *err)
{
    ckpt_cuda c = plain(e);
    c.type = r->wide ? CKPT_CUDA_F32 : c.type;
    return api_of(e)->dispatch(&c, e->par->cut->n, r->width, 1, index, from, to, err);
}

/* Rows of this rank's tokens to the ranks that work on them; with `back` the way back. What comes from one
 * rank after the other is in the order of tokens already. */
static ckpt_status deal(ckpt_eng *e, const rows *r, bool back, ckpt_err *err)
{
    const ckpt_eng_cut *c = e->par->cut;
    const int64_t width = (int64_t)bytes_of(r);
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    char *sorted = ckpt_eng_take(e, c->n * width, 1); /* by the rank that works on them */
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    const int64_t *out = ckpt_cut_scaled(e, c->out, width, 0),
                  *in = ckpt_cut_scaled(e, c->in, width, 1);
    if (!back) {
        CKPT_CHECK(pick(e, r, e->device->order, r->own, sorted, err));
        CKPT_CHECK(ckpt_comm_alltoall(&e->par->context, 1, sorted, out, r->dealt, in, err));
    } else {
        CKPT_CHECK(ckpt_comm_alltoall(&e->par->context, 1, r->dealt, in, sorted, out, err));
        CKPT_CHECK(pick(e, r, e->device->place, sorted, r->own, err));
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* This rank's queries against the whole batch. */
static ckpt_cuda_attention share_of(const ckpt_eng *e, const ckpt_eng_attention *a)
{
    const ckpt_eng_cut *c = e->par->cut;
    return (ckpt_cuda_attention){.N = a->N,
                                 .G = a->G,
                                 .DK = a->DK,
                                 .DV = a->DV,
                                 .scale = a->scale,
                                 .parts = e->device->parts,
                                 .n_parts = c->n_parts,
                                 .rows = c->rows};
}

static rows rows_of(ckpt_eng *e, int64_t width, bool wide, const void *own)
{
    rows r = {width, wide, (void *)(uintptr_t)own, NULL};
    r.dealt = ckpt_eng_take(e, e->par->cut->rows, bytes_of(&r));
    return r;
}

ckpt_status ENG(attention_cut)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, real *o, wreal *lse,
                               ckpt_err *err)
{
    const ckpt_eng_cut *cut = ckpt_eng_cut_in(e);
    const size_t mark = ckpt_eng_mark(e);
    const ckpt_cuda c = plain(e);
    real *all_k, *all_v;
    ckpt_cuda_seq whole;
    ckpt_status status;
    if (cut == NULL)
        return ENG(attention)(e, a, seq, q, k, v, o, lse, err);
    const rows rq = rows_of(e, a->N * a->DK, false, q), ro = rows_of(e, a->N * a->DV, false, o);
    const rows rl = rows_of(e, a->N, true, lse);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(gather_keys)(e, a, k, v, &all_k, &all_v, err));
    CKPT_CHECK(deal(e, &rq, false, err));
    if (!e->dry) {
        const ckpt_cuda_attention heads = share_of(e, a);
        CKPT_CHECK(seq_of(e, cut->whole, &whole, err));
        CKPT_CHECK(
            api_of(e)->attend(&c, &heads, &whole, rq.dealt, all_k, all_v, ro.dealt, rl.dealt, err));
    }
    CKPT_CHECK(deal(e, &ro, true, err));
    CKPT_CHECK(deal(e, &rl, true, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* Gradients of all keys and values, each rank's sum of its queries' shares. */
static ckpt_status attend_back(ckpt_eng *e, const ckpt_eng_attention *a, const rows *r,
                               const real *all_k, const real *all_v, real *all_dk, real *all_dv,
                               ckpt_err *err)
{
    const ckpt_eng_cut *cut = e->par->cut;
    const size_t mark = ckpt_eng_mark(e);
    ckpt_cuda_seq whole;
    ckpt_cuda c;
    ckpt_status status;
    CKPT_CHECK(with_work(e, api_of(e)->attention_work(cut->rows, a->N), &c, err));
    if (e->dry)
        goto done;
    const ckpt_cuda_attention heads = share_of(e, a);
    CKPT_CHECK(seq_of(e, cut->whole, &whole, err));
    CKPT_CHECK(api_of(e)->attend_bwd(&c, &heads, &whole, r[0].dealt, all_k, all_v, r[1].dealt,
                                     r[2].dealt, r[3].dealt, r[4].dealt, all_dk, all_dv, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(attention_cut_bwd)(ckpt_eng *e, const ckpt_eng_attention *a,
                                   const ckpt_eng_seq *seq, const real *q, const real *k,
                                   const real *v, const real *o, const wreal *lse, const real *d_o,
                                   real *dq, real *dk, real *dv, ckpt_err *err)
{
    const ckpt_eng_cut *cut = ckpt_eng_cut_in(e);
    const size_t mark = ckpt_eng_mark(e);
    real *all_k, *all_v;
    ckpt_status status;
    if (cut == NULL)
        return ENG(attention_bwd)(e, a, seq, q, k, v, o, lse, d_o, dq, dk, dv, err);
    const int64_t T = ckpt_eng_tokens(cut->whole), nk = a->G * a->DK, nv = a->G * a->DV;
    const int64_t nq = a->N * a->DK, no = a->N * a->DV;
    const rows r[] = {rows_of(e, nq, false, q), rows_of(e, no, false, o),
                      rows_of(e, a->N, true, lse), rows_of(e, no, false, d_o),
                      rows_of(e, nq, false, dq)};
    real *all_dk = ckpt_eng_take(e, T * nk, sizeof(real));
    real *all_dv = ckpt_eng_take(e, T * nv, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(gather_keys)(e, a, k, v, &all_k, &all_v, err));
    for (int i = 0; i < 4; i++)
        CKPT_CHECK(deal(e, &r[i], false, err));
    CKPT_CHECK(attend_back(e, a, r, all_k, all_v, all_dk, all_dv, err));
    CKPT_CHECK(deal(e, &r[4], true, err));
    CKPT_CHECK(ENG(tokens_scatter)(e, &e->par->context, ckpt_cut_counts(e, nk), all_dk, dk, err));
    CKPT_CHECK(ENG(tokens_scatter)(e, &e->par->context, ckpt_cut_counts(e, nv), all_dv, dv, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
