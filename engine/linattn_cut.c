/* Linear attention whose sequences run over several ranks: rows for the convolutions, then states, go
 * from rank to rank, gradients the other way (kda-math.md section 5.3). Of a rank's sequences only the
 * first continues another rank's and only the last goes on; all others start from zeros.
 *
 * The state is passed as it is, so ranks run the recurrence one after the other; everything around it, most
 * of the work, runs side by side. */
#include "linattn_cut.h"

#include <string.h>

#include "checked.h"

static int64_t state_len(const ckpt_eng_linattn *b)
{
    return b->delta.HV * b->delta.K * b->delta.V;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* The last W-1 rows of the last sequence, older ones from its history. */
typedef struct tail {
    const ckpt_eng_seq *seq;
    int64_t keep, n;
    const real *pre;
} tail;

static void next_rows(void *self, const real *x, real *next)
{
    const tail *t = self;
    int64_t last = t->seq->n - 1, start = t->seq->cu[last], len = t->seq->cu[last + 1] - start;
    size_t bytes = (size_t)t->n * sizeof *next;
    for (int64_t i = 0; i < t->keep; i++) {
        int64_t at = len - t->keep + i;
        if (at >= 0)
            memcpy(next + i * t->n, t->pre + (start + at) * t->n, bytes);
        else if (last == 0) /* the sequence that came in */
            memcpy(next + i * t->n, x + (t->keep + at) * t->n, bytes);
        else
            memset(next + i * t->n, 0, bytes);
    }
}

static ckpt_status pass_rows(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t keep, int64_t n,
                             const real *pre, real *hist, ckpt_err *err)
{
    tail t = {seq, keep, n, pre};
    size_t mark = ckpt_eng_mark(e);
    real *next = ckpt_eng_take(e, keep * n, sizeof *next);
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry && keep > 0) {
        memset(hist, 0, (size_t)(seq->n * keep * n) * sizeof *hist);
        status = ENG(cut_pass)(e, keep * n, false, hist, next, next_rows, &t, err);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(linattn_cut_rows)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  const ENG(linattn_saved) * s, ckpt_err *err)
{
    int64_t qk = b->delta.H * b->delta.K, v = b->delta.HV * b->delta.V;
    ckpt_status status;
    CKPT_CHECK(pass_rows(e, seq, b->W - 1, qk, s->pre_q, s->hist_q, err));
    CKPT_CHECK(pass_rows(e, seq, b->W - 1, qk, s->pre_k, s->hist_k, err));
    CKPT_CHECK(pass_rows(e, seq, b->W - 1, v, s->pre_v, s->hist_v, err));
done:
    return status;
}

typedef struct tail_bwd {
    const ckpt_eng_seq *seq;
    int64_t keep, n;
    real *dpre, *dhistory;
} tail_bwd;

static void add_rows(void *self, const real *x, real *next)
{
    const tail_bwd *t = self;
    int64_t last = t->seq->n - 1, start = t->seq->cu[last], len = t->seq->cu[last + 1] - start;
    for (int64_t i = 0; i < t->keep; i++) {
        int64_t at = len - t->keep + i;
        real *to = at >= 0     ? t->dpre + (start + at) * t->n
                   : last == 0 ? t->dhistory + (t->keep + at) * t->n
                               : NULL;
        for (int64_t c = 0; to && c < t->n; c++)
            to[c] += x[i * t->n + c];
    }
    memcpy(next, t->dhistory, (size_t)(t->keep * t->n) * sizeof *next);
}

ckpt_status ENG(linattn_cut_rows_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t n, int64_t W,
                                      real *dpre, real *dhistory, ckpt_err *err)
{
    tail_bwd t = {seq, W - 1, n, dpre, dhistory};
    size_t mark = ckpt_eng_mark(e);
    real *x = ckpt_eng_take(e, 2 * t.keep * n, sizeof *x);
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry && t.keep > 0)
        status = ENG(cut_pass)(e, t.keep * n, true, x, x + t.keep * n, add_rows, &t, err);
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- states ---------------------------------------------------------------------------------- */

ckpt_status ENG(linattn_cut_delta)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                   const ENG(delta_in) * in, const ENG(linattn_saved) * s,
                                   ckpt_err *err)
{
    int64_t n = state_len(b);
    ENG(delta_in) from = *in;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *state = ckpt_eng_take(e, seq->n * n, sizeof *state);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        memset(s->state0, 0, (size_t)(seq->n * n) * sizeof(real));
        CKPT_CHECK(ENG(cut_receive)(e, n, false, s->state0, err));
    }
    from.state0 = s->state0;
    CKPT_CHECK(ENG(delta)(e, &b->delta, seq, &from, s->o, state, s->states, err));
    if (!e->dry)
        CKPT_CHECK(ENG(cut_send)(e, n, false, state + (seq->n - 1) * n, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(linattn_cut_delta_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b,
                                       const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                                       const ENG(linattn_saved) * s, const real *d_o,
                                       const ENG(delta_grad) * grad, ckpt_err *err)
{
    int64_t n = state_len(b);
    ENG(delta_grad) to = *grad;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *d_state = ckpt_eng_take(e, seq->n * n, sizeof *d_state);
    to.state0 = ckpt_eng_take(e, seq->n * n, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        memset(d_state, 0, (size_t)(seq->n * n) * sizeof(real));
        CKPT_CHECK(ENG(cut_receive)(e, n, true, d_state + (seq->n - 1) * n, err));
    }
    CKPT_CHECK(ENG(delta_bwd)(e, &b->delta, seq, in, s->states, d_o, d_state, &to, err));
    if (!e->dry)
        CKPT_CHECK(ENG(cut_send)(e, n, true, to.state0, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
