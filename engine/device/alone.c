/* A device runs a model alone: what the sources ask of other ranks (par.h) is refused here. Tables of
 * rotary embeddings are made by this process, once for a run. */
#include "linattn_cut.h"
#include "moe_internal.h"
#include "network_internal.h"

#include <stdlib.h>

#include "context.h"

static ckpt_status refuse(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "a model on a device runs on one alone as yet");
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

/* ---- quantisation ---------------------------------------------------------------------------- */

static ckpt_status refuse_quant(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "a quantisation policy on a device: the CPU has it");
}

ckpt_status ENG(kda_quant_save)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                                const ckpt_eng_seq *seq, ENG(quant_saved) * saved, ckpt_err *err)
{
    (void)e, (void)q, (void)d, (void)seq, (void)saved;
    return refuse_quant(err);
}

ckpt_status ENG(kda_quant)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                           const ckpt_eng_seq *seq, const ENG(delta_in) * in, real *o, real *state,
                           const ENG(quant_saved) * saved, ckpt_quant_report *report, ckpt_err *err)
{
    (void)e, (void)q, (void)d, (void)seq, (void)in, (void)o, (void)state, (void)saved;
    (void)report;
    return refuse_quant(err);
}

ckpt_status ENG(kda_quant_bwd)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                               const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                               const ENG(quant_saved) * saved, const real *d_o, const real *d_state,
                               const ENG(delta_grad) * grad, ckpt_err *err)
{
    (void)e, (void)q, (void)d, (void)seq, (void)in, (void)saved, (void)d_o, (void)d_state;
    (void)grad;
    return refuse_quant(err);
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

/* ---- network --------------------------------------------------------------------------------- */

ckpt_status ENG(network_join)(ENG(network) * m, const ckpt_eng *e, ckpt_err *err)
{
    (void)m, (void)e;
    return refuse(err);
}

ckpt_status ENG(tokens_of)(ckpt_eng *e, int64_t T, int64_t H, ENG(tokens) * out, ckpt_err *err)
{
    (void)H;
    *out = (ENG(tokens)){.T = T, .n = T, .cp_n = T};
    return e->par != NULL ? refuse(err) : CKPT_OK;
}

ckpt_status ENG(share_spec)(const ckpt_eng *e, const ENG(block) * k, ckpt_eng_block *out,
                            ckpt_err *err)
{
    (void)e, (void)k, (void)out;
    return refuse(err);
}

ckpt_status ENG(share_of)(ckpt_eng *e, const ENG(block) * k, bool gradients, ENG(share) * s,
                          ckpt_err *err)
{
    (void)e, (void)k, (void)gradients, (void)s;
    return refuse(err);
}

void ENG(share_add)(const ckpt_eng *e, const ENG(share) * s)
{
    (void)e, (void)s;
}

ckpt_status ENG(tokens_gather)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *x,
                               real *all, ckpt_err *err)
{
    (void)e, (void)c, (void)counts, (void)x, (void)all;
    return refuse(err);
}

ckpt_status ENG(tokens_scatter)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *all,
                                real *x, ckpt_err *err)
{
    (void)e, (void)c, (void)counts, (void)all, (void)x;
    return refuse(err);
}

ckpt_status ENG(vocab_embed)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                             const int32_t *ids, real *x, ckpt_err *err)
{
    (void)e, (void)m, (void)where, (void)ids, (void)x;
    return refuse(err);
}

ckpt_status ENG(vocab_embed_bwd)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                                 const int32_t *ids, const real *dx, ckpt_err *err)
{
    (void)e, (void)m, (void)where, (void)ids, (void)dx;
    return refuse(err);
}

ckpt_status ENG(vocab_loss)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                            const real *h, const int32_t *labels, double share, wreal *logits,
                            real *dh, double *loss, ckpt_err *err)
{
    (void)e, (void)m, (void)where, (void)h, (void)labels, (void)share, (void)logits, (void)dh;
    (void)loss;
    return refuse(err);
}

ckpt_status ENG(sum_side_losses)(ckpt_eng *e, const ENG(network) * m, ENG(run) * run, ckpt_err *err)
{
    (void)e, (void)m, (void)run;
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
