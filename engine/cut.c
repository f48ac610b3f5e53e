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

/* ---- softmax attention ----------------------------------------------------------------------- */

static const int64_t *counts_of(const ckpt_eng *e, int64_t width)
{
    ckpt_eng_cut *c = e->par->cut;
    for (int i = 0; i < e->par->cp; i++)
        c->counts[i] = (c->at[i + 1] - c->at[i]) * width;
    return c->counts;
}

/* Keys and values of the whole batch, from the arena. */
static ckpt_status gather_keys(ckpt_eng *e, const ckpt_eng_attention *a, const real *k,
                               const real *v, real **all_k, real **all_v, ckpt_err *err)
{
    int64_t T = ckpt_eng_tokens(e->par->cut->whole), dk = a->G * a->DK, dv = a->G * a->DV;
    ckpt_status status;
    *all_k = ckpt_eng_take(e, T * dk, sizeof(real));
    *all_v = ckpt_eng_take(e, T * dv, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(
        ckpt_comm_allgather(&e->par->context, sizeof(real), k, counts_of(e, dk), *all_k, err));
    CKPT_CHECK(
        ckpt_comm_allgather(&e->par->context, sizeof(real), v, counts_of(e, dv), *all_v, err));
done:
    return status;
}

ckpt_status ENG(attention_cut)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, real *o, real *lse,
                               ckpt_err *err)
{
    const ckpt_eng_cut *c = ckpt_eng_cut_in(e);
    size_t mark = ckpt_eng_mark(e);
    ckpt_eng_attention part = *a;
    real *all_k, *all_v;
    ckpt_status status;
    if (c == NULL)
        return ENG(attention)(e, a, seq, q, k, v, o, lse, err);
    CKPT_CHECK(gather_keys(e, a, k, v, &all_k, &all_v, err));
    part.skip = c->lo - c->key_lo;
    if (!e->dry) {
        all_k += c->key_lo * a->G * a->DK;
        all_v += c->key_lo * a->G * a->DV;
    }
    CKPT_CHECK(ENG(attention)(e, &part, &c->keys, q, all_k, all_v, o, lse, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(attention_cut_bwd)(ckpt_eng *e, const ckpt_eng_attention *a,
                                   const ckpt_eng_seq *seq, const real *q, const real *k,
                                   const real *v, const real *o, const real *lse, const real *d_o,
                                   real *dq, real *dk, real *dv, ckpt_err *err)
{
    const ckpt_eng_cut *c = ckpt_eng_cut_in(e);
    size_t mark = ckpt_eng_mark(e);
    ckpt_eng_attention part = *a;
    real *all_k, *all_v;
    ckpt_status status;
    if (c == NULL)
        return ENG(attention_bwd)(e, a, seq, q, k, v, o, lse, d_o, dq, dk, dv, err);
    int64_t T = ckpt_eng_tokens(c->whole), nk = a->G * a->DK, nv = a->G * a->DV;
    CKPT_CHECK(gather_keys(e, a, k, v, &all_k, &all_v, err));
    real *all_dk = ckpt_eng_take(e, T * nk, sizeof(real));
    real *all_dv = ckpt_eng_take(e, T * nv, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    part.skip = c->lo - c->key_lo;
    if (e->dry) {
        status = ENG(attention_bwd)(e, &part, &c->keys, q, all_k, all_v, o, lse, d_o, dq, all_dk,
                                    all_dv, err);
        goto done;
    }
    memset(all_dk, 0, (size_t)(T * nk) * sizeof(real));
    memset(all_dv, 0, (size_t)(T * nv) * sizeof(real));
    CKPT_CHECK(ENG(attention_bwd)(e, &part, &c->keys, q, all_k + c->key_lo * nk,
                                  all_v + c->key_lo * nv, o, lse, d_o, dq, all_dk + c->key_lo * nk,
                                  all_dv + c->key_lo * nv, err));
    CKPT_CHECK(ckpt_comm_reduce_scatter(&e->par->context, type, all_dk, counts_of(e, nk), dk, err));
    CKPT_CHECK(ckpt_comm_reduce_scatter(&e->par->context, type, all_dv, counts_of(e, nv), dv, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
