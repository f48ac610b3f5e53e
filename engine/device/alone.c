/* What is not built of a model on several devices: sequences cut over ranks and experts cut over ranks are
 * refused here. Tables of rotary embeddings are made by this process, once for a run. */
#include "linattn_cut.h"
#include "moe_internal.h"
#include "network_internal.h"

#include <stdlib.h>

#include "context.h"

static ckpt_status refuse(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "on a device sequences and experts are not cut over ranks as yet (--cp-mode "
                     "heads, --ep 1)");
}

/* ---- linear attention ------------------------------------------------------------------------ */

ckpt_status ENG(linattn_cut_save)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  ENG(linattn_saved) * s, ckpt_err *err)
{
    (void)b;
    (void)seq;
    s->hist_q = s->hist_k = s->hist_v = NULL;
    s->state0 = NULL;
    return ckpt_eng_check(e, err);
}

ckpt_status ENG(linattn_cut_rows)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  const ENG(linattn_saved) * s, ckpt_err *err)
{
    (void)e, (void)b, (void)seq, (void)s;
    return refuse(err);
}

ckpt_status ENG(linattn_cut_rows_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t n, int64_t W,
                                      real *dpre, real *dhistory, ckpt_err *err)
{
    (void)e, (void)seq, (void)n, (void)W, (void)dpre, (void)dhistory;
    return refuse(err);
}

ckpt_status ENG(linattn_cut_delta)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                   const ENG(delta_in) * in, const ENG(linattn_saved) * s,
                                   ckpt_err *err)
{
    (void)e, (void)b, (void)seq, (void)in, (void)s;
    return refuse(err);
}

ckpt_status ENG(linattn_cut_delta_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b,
                                       const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                                       const ENG(linattn_saved) * s, const real *d_o,
                                       const ENG(delta_grad) * grad, ckpt_err *err)
{
    (void)e, (void)b, (void)seq, (void)in, (void)s, (void)d_o, (void)grad;
    return refuse(err);
}

/* ---- attention, experts ---------------------------------------------------------------------- */

ckpt_status ENG(attention_cut)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, real *o, wreal *lse,
                               ckpt_err *err)
{
    return ckpt_eng_cut_in(e) != NULL ? refuse(err)
                                      : ENG(attention)(e, a, seq, q, k, v, o, lse, err);
}

ckpt_status ENG(attention_cut_bwd)(ckpt_eng *e, const ckpt_eng_attention *a,
                                   const ckpt_eng_seq *seq, const real *q, const real *k,
                                   const real *v, const real *o, const wreal *lse, const real *d_o,
                                   real *dq, real *dk, real *dv, ckpt_err *err)
{
    return ckpt_eng_cut_in(e) != NULL
               ? refuse(err)
               : ENG(attention_bwd)(e, a, seq, q, k, v, o, lse, d_o, dq, dk, dv, err);
}

ckpt_status ENG(moe_ep_save)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, ENG(moe_saved) * s,
                             ckpt_err *err)
{
    (void)e, (void)m, (void)T, (void)s;
    return refuse(err);
}

ckpt_status ENG(moe_ep)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                        const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    (void)e, (void)m, (void)T, (void)p, (void)x, (void)add, (void)y, (void)s;
    return refuse(err);
}

ckpt_status ENG(moe_ep_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                            const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                            bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                            ckpt_err *err)
{
    (void)e, (void)m, (void)T, (void)p, (void)s, (void)dy, (void)add, (void)dx, (void)dweight;
    (void)g;
    return refuse(err);
}

/* ---- rotary tables --------------------------------------------------------------------------- */

/* The f32 build's function, which is linked too. */
ckpt_status ckpt_eng_rope_table_f32(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                                    const int64_t *offset, float *cos, float *sin, ckpt_err *err);

ckpt_status ENG(rope_table)(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                            const int64_t *offset, wreal *cos, wreal *sin, ckpt_err *err)
{
    int64_t n = ckpt_eng_tokens(seq) * (r->dim / 2);
    ckpt_eng here = {.threads = e->threads, .isa = e->isa};
    ckpt_status status;
    float *x = NULL;
    if (e->dry)
        return CKPT_OK;
    x = malloc(2 * (size_t)n * sizeof *x + 1);
    if (x == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for rotary tables");
    CKPT_CHECK(ckpt_eng_rope_table_f32(&here, r, seq, offset, x, x + n, err));
    CKPT_CHECK(ckpt_eng_put(e, cos, x, (size_t)n * sizeof *x, err));
    CKPT_CHECK(ckpt_eng_put(e, sin, x + n, (size_t)n * sizeof *x, err));
done:
    free(x);
    return status;
}
