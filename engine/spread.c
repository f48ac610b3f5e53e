/* What a pass over ranks keeps for its backward, and the keys and values that all of them need: arrays and one
 * exchange, so this is compiled for devices too. What else moves between ranks is in moe_ep.c, linattn_cut.c,
 * cut.c and their twins in device/. */
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

ckpt_status ENG(gather_keys)(ckpt_eng *e, const ckpt_eng_attention *a, const real *k, const real *v,
                             real **all_k, real **all_v, ckpt_err *err)
{
    int64_t T = ckpt_eng_tokens(e->par->cut->whole), dk = a->G * a->DK, dv = a->G * a->DV;
    ckpt_status status;
    *all_k = ckpt_eng_take(e, T * dk, sizeof(real));
    *all_v = ckpt_eng_take(e, T * dv, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(ckpt_comm_allgather(&e->par->context, sizeof(real), k, ckpt_cut_counts(e, dk),
                                   *all_k, err));
    CKPT_CHECK(ckpt_comm_allgather(&e->par->context, sizeof(real), v, ckpt_cut_counts(e, dv),
                                   *all_v, err));
done:
    return status;
}
