/* What a pass over ranks keeps for its backward, of operations that are cut over them: arrays alone, so this is
 * compiled for devices too. What moves between ranks is in moe_ep.c, linattn_cut.c and their twins in device/. */
#include "checked.h"
#include "linattn_cut.h"
#include "moe_internal.h"

ckpt_status ENG(moe_ep_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * s,
                             ckpt_err *err)
{
    int64_t ep = e->par->ep;
    /* Tokens differ by one at most between the ranks of a batch. */
    if (!ckpt_mul_i64(T + 1, m->top_k, &s->rows) || !ckpt_mul_i64(s->rows, ep, &s->rows) ||
        s->rows > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "moe: %lld tokens on each of %lld ranks",
                         (long long)T, (long long)ep);
    s->weight_in = ckpt_eng_take(e, s->rows, sizeof(wreal));
    s->first_in = ckpt_eng_take(e, m->E + 1, sizeof *s->first_in);
    s->row_in = ckpt_eng_take(e, s->rows, sizeof *s->row_in);
    s->slot_in = ckpt_eng_take(e, s->rows, sizeof *s->slot_in);
    s->sent = ckpt_eng_take(e, 2 * ep, sizeof *s->sent);
    s->received = s->sent != NULL ? s->sent + ep : NULL; /* NULL: measuring */
    return ckpt_eng_check(e, err);
}

ckpt_status ENG(linattn_cut_save)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  ENG(linattn_saved) * s, ckpt_err *err)
{
    int64_t rows = seq->n * (b->W - 1);
    s->hist_q = s->hist_k = s->hist_v = NULL;
    s->state0 = NULL;
    if (ckpt_eng_cut_in(e) != NULL) {
        s->hist_q = ckpt_eng_take(e, rows * b->delta.H * b->delta.K, sizeof(real));
        s->hist_k = ckpt_eng_take(e, rows * b->delta.H * b->delta.K, sizeof(real));
        s->hist_v = ckpt_eng_take(e, rows * b->delta.HV * b->delta.V, sizeof(real));
        s->state0 = ckpt_eng_take(e, seq->n * b->delta.HV * b->delta.K * b->delta.V, sizeof(wreal));
    }
    return ckpt_eng_check(e, err);
}
