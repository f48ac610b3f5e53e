/* The quantised KDA prefill on a device (cuda/quant.h). What forward keeps is one block. */
#include "context.h"
#include "quant/kda_quant.h"

static ckpt_cuda_quant prefill(const ckpt_quant *q, const ckpt_eng_delta *d,
                               const ckpt_eng_seq *seq)
{
    return (ckpt_cuda_quant){.policy = q,
                             .H = d->H,
                             .HV = d->HV,
                             .K = d->K,
                             .V = d->V,
                             .scale = d->scale,
                             .N = seq->n,
                             .cu = seq->cu};
}

static ckpt_cuda_delta_in inputs(const ENG(delta_in) * in)
{
    return (ckpt_cuda_delta_in){
        .q = in->q, .k = in->k, .v = in->v, .g = in->g, .erase = in->erase, .state0 = in->state0};
}

ckpt_status ENG(kda_quant_save)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                                const ckpt_eng_seq *seq, ENG(quant_saved) * saved, ckpt_err *err)
{
    const ckpt_cuda_quant x = prefill(q, d, seq);
    const ckpt_cuda c = plain(e);
    size_t bytes = 0, backward = 0;
    if (d->rule != CKPT_ENG_KDA)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "quantised KDA: the rule is not KDA's");
    ckpt_status status = api_of(e)->quant_bytes(&c, &x, &bytes, &backward, err);
    if (status != CKPT_OK)
        return status;
    *saved = (ENG(quant_saved)){.block = ckpt_eng_take(e, (int64_t)bytes, 1)};
    return ckpt_eng_check(e, err);
}

ckpt_status ENG(kda_quant)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                           const ckpt_eng_seq *seq, const ENG(delta_in) * in, real *o, wreal *state,
                           const ENG(quant_saved) * saved, ckpt_quant_report *report, ckpt_err *err)
{
    ckpt_cuda_quant x = prefill(q, d, seq);
    const ckpt_cuda_delta_in from = inputs(in);
    const ckpt_cuda c = plain(e);
    const size_t mark = ckpt_eng_mark(e);
    const bool measured = report != NULL && q->solve_factors > 0;
    ckpt_status status = CKPT_OK;
    double errors[2] = {0, 0};
    if (measured)
        x.errors = ckpt_eng_take(e, 2, sizeof *x.errors);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    if (measured)
        CKPT_CHECK(ckpt_eng_put(e, x.errors, errors, sizeof errors, err));
    CKPT_CHECK(api_of(e)->quant_fwd(&c, &x, &from, o, state, saved->block, err));
    if (measured)
        CKPT_CHECK(ckpt_eng_get(e, errors, x.errors, sizeof errors, err));
    if (report != NULL) {
        ckpt_quant_count(q, seq, report);
        ckpt_quant_worst(errors, report);
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(kda_quant_bwd)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                               const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                               const ENG(quant_saved) * saved, const real *d_o,
                               const wreal *d_state, const ENG(delta_grad) * grad, ckpt_err *err)
{
    const ckpt_cuda_quant x = prefill(q, d, seq);
    const ckpt_cuda_delta_in from = inputs(in);
    const ckpt_cuda_delta_grad to = {.q = grad->q,
                                     .k = grad->k,
                                     .v = grad->v,
                                     .g = grad->g,
                                     .erase = grad->erase,
                                     .state0 = grad->state0};
    const size_t mark = ckpt_eng_mark(e);
    size_t bytes = 0, backward = 0;
    ckpt_cuda c = plain(e);
    ckpt_status status = api_of(e)->quant_bytes(&c, &x, &bytes, &backward, err);
    if (status == CKPT_OK)
        status = with_work(e, backward, &c, err);
    if (status == CKPT_OK && !e->dry)
        status = api_of(e)->quant_bwd(&c, &x, &from, saved->block, d_o, d_state, &to, err);
    ckpt_eng_drop(e, mark);
    return status;
}
