/* Operations of ops.h, attn.h and moe.h on a device: each takes its workspace from the arena, queues the
 * function of the plug-in, and gives the workspace back, which the order of the stream allows. */
#include "attn.h"
#include "context.h"
#include "moe.h"

/* Take workspace for `columns` column sums, call, drop. */
#define WITH_COLUMNS(e, columns, call)                                                             \
    do {                                                                                           \
        const size_t mark_ = ckpt_eng_mark(e);                                                     \
        ckpt_cuda c;                                                                               \
        ckpt_status status_ = with_work(e, api_of(e)->work(columns), &c, err);                     \
        if (status_ == CKPT_OK && !(e)->dry)                                                       \
            status_ = (call);                                                                      \
        ckpt_eng_drop(e, mark_);                                                                   \
        return status_;                                                                            \
    } while (0)

/* ---- linear ---------------------------------------------------------------------------------- */

ckpt_status ENG(linear)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *x,
                        int64_t ldx, const real *w, const wreal *bias, bool add, real *y,
                        int64_t ldy, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->linear(&c, T, n_in, n_out, x, ldx, w, bias, add, y, ldy, err));
}

ckpt_status ENG(linear_dx)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *w, bool add, real *dx, int64_t lddx,
                           ckpt_err *err)
{
    WITHOUT(e, api_of(e)->linear_dx(&c, T, n_in, n_out, dy, lddy, w, add, dx, lddx, err));
}

ckpt_status ENG(linear_dw)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *x, int64_t ldx, real *dw, wreal *dbias,
                           ckpt_err *err)
{
    wreal *sum = (wreal *)(void *)dw; /* gradients of parameters are f32 (real.h) */
    WITH_COLUMNS(e, dbias != NULL ? n_out : 0,
                 api_of(e)->linear_dw(&c, T, n_in, n_out, dy, lddy, x, ldx, sum, dbias, err));
}

ckpt_status ENG(linear_bwd)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                            const real *x, const real *w, bool add, real *dx, real *dw,
                            wreal *dbias, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ENG(linear_dw)(e, T, n_in, n_out, dy, n_out, x, n_in, dw, dbias, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, n_in, n_out, dy, n_out, w, add, dx, n_in, err));
done:
    return status;
}

/* ---- norms ----------------------------------------------------------------------------------- */

ckpt_status ENG(rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const wreal *w,
                         bool centered, double eps, real *y, wreal *rstd, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->rmsnorm(&c, rows, n, x, w, centered, eps, y, rstd, err));
}

ckpt_status ENG(rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const wreal *w,
                             bool centered, const wreal *rstd, const real *dy, bool add, real *dx,
                             wreal *dw, ckpt_err *err)
{
    WITH_COLUMNS(e, dw != NULL ? n : 0,
                 api_of(e)->rmsnorm_bwd(&c, rows, n, x, w, centered, rstd, dy, add, dx, dw, err));
}

ckpt_status ENG(gated_rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const real *z,
                               const wreal *w, ckpt_eng_act act, double eps, real *y, wreal *rstd,
                               ckpt_err *err)
{
    WITHOUT(
        e, api_of(e)->gated_rmsnorm(&c, rows, n, x, z, w, act == CKPT_ENG_SILU, eps, y, rstd, err));
}

ckpt_status ENG(gated_rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x,
                                   const real *z, const wreal *w, ckpt_eng_act act,
                                   const wreal *rstd, const real *dy, real *dx, real *dz, wreal *dw,
                                   ckpt_err *err)
{
    WITH_COLUMNS(e, dw != NULL ? n : 0,
                 api_of(e)->gated_rmsnorm_bwd(&c, rows, n, x, z, w, act == CKPT_ENG_SILU, rstd, dy,
                                              dx, dz, dw, err));
}

ckpt_status ENG(l2norm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, double eps, real *y,
                        wreal *r, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->l2norm(&c, rows, n, x, eps, y, r, err));
}

ckpt_status ENG(l2norm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *y, const wreal *r,
                            const real *dy, real *dx, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->l2norm_bwd(&c, rows, n, y, r, dy, dx, err));
}

/* ---- convolution, gates ---------------------------------------------------------------------- */

ckpt_status ENG(conv)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                      const wreal *w, const wreal *bias, const real *history, real *y, real *last,
                      ckpt_err *err)
{
    ckpt_cuda c = plain(e);
    ckpt_cuda_seq s;
    if (e->dry)
        return CKPT_OK;
    ckpt_status status = seq_of(e, seq, &s, err);
    if (status == CKPT_OK)
        status = api_of(e)->conv(&c, &s, C, W, x, w, bias, history, y, last, err);
    return status;
}

ckpt_status ENG(conv_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                          const wreal *w, const wreal *bias, const real *history, const real *dy,
                          real *dx, wreal *dw, wreal *dbias, real *dhistory, ckpt_err *err)
{
    ckpt_cuda_seq s = {0};
    if (!e->dry) {
        ckpt_status status = seq_of(e, seq, &s, err);
        if (status != CKPT_OK)
            return status;
    }
    WITH_COLUMNS(
        e, C * (W + 1),
        api_of(e)->conv_bwd(&c, &s, C, W, x, w, bias, history, dy, dx, dw, dbias, dhistory, err));
}

ckpt_status ENG(conv_norm)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, int64_t K,
                           double eps, const real *x, const wreal *w, const real *history, real *y,
                           wreal *r, real *last, ckpt_err *err)
{
    ckpt_cuda c = plain(e);
    ckpt_cuda_seq s;
    if (e->dry)
        return CKPT_OK;
    ckpt_status status = seq_of(e, seq, &s, err);
    if (status == CKPT_OK)
        status = api_of(e)->conv_norm(&c, &s, C, W, K, eps, x, w, history, y, r, last, err);
    return status;
}

ckpt_status ENG(conv_norm_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W,
                               int64_t K, const real *x, const wreal *w, const real *history,
                               const real *y, const wreal *r, real *dy, real *dx, wreal *dw,
                               real *dhistory, ckpt_err *err)
{
    ckpt_cuda_seq s = {0};
    if (!e->dry) {
        ckpt_status status = seq_of(e, seq, &s, err);
        if (status != CKPT_OK)
            return status;
    }
    WITH_COLUMNS(
        e, C * (W + 1),
        api_of(e)->conv_norm_bwd(&c, &s, C, W, K, x, w, history, y, r, dy, dx, dw, dhistory, err));
}

ckpt_status ENG(gate)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                      const wreal *A_log, const wreal *dt_bias, double bound, wreal *g,
                      ckpt_err *err)
{
    WITHOUT(e, api_of(e)->gate(&c, T, HV, K, raw, A_log, dt_bias, bound, g, err));
}

ckpt_status ENG(gate_bwd)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                          const wreal *A_log, const wreal *dt_bias, double bound, const wreal *dg,
                          real *draw, wreal *dA_log, wreal *ddt_bias, ckpt_err *err)
{
    WITH_COLUMNS(e, 3 * HV * K,
                 api_of(e)->gate_bwd(&c, T, HV, K, raw, A_log, dt_bias, bound, dg, draw, dA_log,
                                     ddt_bias, err));
}

ckpt_status ENG(sigmoid)(ckpt_eng *e, int64_t n, double scale, const real *x, wreal *y,
                         ckpt_err *err)
{
    WITHOUT(e, api_of(e)->sigmoid(&c, n, scale, x, y, err));
}

ckpt_status ENG(sigmoid_bwd)(ckpt_eng *e, int64_t n, double scale, const wreal *y, const wreal *dy,
                             real *dx, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->sigmoid_bwd(&c, n, scale, y, dy, dx, err));
}

/* ---- recurrence ------------------------------------------------------------------------------ */

/* The kernels make again what backward needs. */
int64_t ENG(delta_saved_len)(const ckpt_eng_delta *d, const ckpt_eng_seq *seq)
{
    (void)d;
    (void)seq;
    return 0;
}

static ckpt_cuda_delta recurrence(const ckpt_eng_delta *d, const ckpt_eng_seq *seq)
{
    return (ckpt_cuda_delta){.rule = (ckpt_cuda_rule)d->rule,
                             .gates = CKPT_CUDA_F32,
                             .safe = d->safe,
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
    return (ckpt_cuda_delta_in){in->q, in->k, in->v, in->g, in->erase, in->write, in->state0};
}

/* Workspace of one direction; a recurrence over no tokens is nothing. */
static ckpt_status delta_work(ckpt_eng *e, const ckpt_cuda_delta *d, bool backward, ckpt_cuda *c,
                              ckpt_err *err)
{
    size_t bytes[2] = {0, 0};
    *c = plain(e);
    ckpt_status status = api_of(e)->delta_bytes(c, d, &bytes[0], &bytes[1], err);
    return status != CKPT_OK ? status : with_work(e, bytes[backward ? 1 : 0], c, err);
}

ckpt_status ENG(delta)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                       const ENG(delta_in) * in, real *o, wreal *state, wreal *saved, ckpt_err *err)
{
    const ckpt_cuda_delta r = recurrence(d, seq);
    const ckpt_cuda_delta_in from = inputs(in);
    const size_t mark = ckpt_eng_mark(e);
    ckpt_cuda c;
    (void)saved;
    ckpt_status status = delta_work(e, &r, false, &c, err);
    if (status == CKPT_OK && !e->dry)
        status = api_of(e)->delta_fwd(&c, &r, &from, o, state, err);
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(delta_bwd)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                           const ENG(delta_in) * in, const wreal *saved, const real *d_o,
                           const wreal *d_state, const ENG(delta_grad) * grad, ckpt_err *err)
{
    const ckpt_cuda_delta r = recurrence(d, seq);
    const ckpt_cuda_delta_in from = inputs(in);
    const ckpt_cuda_delta_grad to = {grad->q,     grad->k,     grad->v,     grad->g,
                                     grad->erase, grad->write, grad->state0};
    const size_t mark = ckpt_eng_mark(e);
    ckpt_cuda c;
    (void)saved;
    ckpt_status status = delta_work(e, &r, true, &c, err);
    if (status == CKPT_OK && !e->dry)
        status = api_of(e)->delta_bwd(&c, &r, &from, d_o, d_state, &to, err);
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- activations ----------------------------------------------------------------------------- */

ckpt_status ENG(swiglu)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                        int64_t ldg, double clamp, real *y, int64_t ldy, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->swiglu(&c, T, F, gate, up, ldg, clamp, y, ldy, err));
}

ckpt_status ENG(swiglu_bwd)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                            int64_t ldg, double clamp, const real *dy, int64_t lddy, real *dgate,
                            real *dup, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->swiglu_bwd(&c, T, F, gate, up, ldg, clamp, dy, lddy, dgate, dup, err));
}

ckpt_status ENG(relu2)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->relu2(&c, n, x, y, err));
}

ckpt_status ENG(relu2_bwd)(ckpt_eng *e, int64_t n, const real *x, const real *dy, real *dx,
                           ckpt_err *err)
{
    WITHOUT(e, api_of(e)->relu2_bwd(&c, n, x, dy, dx, err));
}

/* ---- attention ------------------------------------------------------------------------------- */

ckpt_status ENG(rope)(ckpt_eng *e, const ckpt_eng_rope *r, int64_t T, int64_t heads, real *x,
                      int64_t ldx, int64_t ldh, const wreal *cos, const wreal *sin, bool inverse,
                      ckpt_err *err)
{
    WITHOUT(e, api_of(e)->rope(&c, r->dim, r->interleaved, T, heads, x, ldx, ldh, cos, sin, inverse,
                               err));
}

static ckpt_cuda_attention heads_of(const ckpt_eng_attention *a, const ckpt_eng_seq *seq)
{
    return (ckpt_cuda_attention){.N = a->N,
                                 .G = a->G,
                                 .DK = a->DK,
                                 .DV = a->DV,
                                 .scale = a->scale,
                                 .rows = ckpt_eng_tokens(seq)};
}

ckpt_status ENG(attention)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                           const real *q, const real *k, const real *v, real *o, wreal *lse,
                           ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    ckpt_cuda_seq s;
    if (a->parts != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "attention over parts of a batch on a device");
    if (e->dry)
        return CKPT_OK;
    const ckpt_cuda_attention heads = heads_of(a, seq);
    ckpt_status status = seq_of(e, seq, &s, err);
    if (status == CKPT_OK)
        status = api_of(e)->attend(&c, &heads, &s, q, k, v, o, lse, err);
    return status;
}

ckpt_status ENG(attention_bwd)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, const real *o,
                               const wreal *lse, const real *d_o, real *dq, real *dk, real *dv,
                               ckpt_err *err)
{
    const ckpt_cuda_attention heads = heads_of(a, seq);
    const size_t mark = ckpt_eng_mark(e);
    ckpt_cuda c;
    ckpt_cuda_seq s;
    if (a->parts != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "attention over parts of a batch on a device");
    ckpt_status status =
        with_work(e, api_of(e)->attention_work(ckpt_eng_tokens(seq), a->N), &c, err);
    if (status == CKPT_OK && !e->dry)
        status = seq_of(e, seq, &s, err);
    if (status == CKPT_OK && !e->dry)
        status = api_of(e)->attend_bwd(&c, &heads, &s, q, k, v, o, lse, d_o, dq, dk, dv, err);
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- vocabulary ------------------------------------------------------------------------------ */

ckpt_status ENG(embed)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                       const real *table, real *y, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->embed(&c, T, 0, V, H, ids, table, y, err));
}

ckpt_status ENG(embed_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                           const real *dy, real *dtable, ckpt_err *err)
{
    wreal *sum = (wreal *)(void *)dtable;
    WITHOUT(e, api_of(e)->embed_bwd(&c, T, 0, V, H, ids, dy, sum, err));
}

ckpt_status ENG(xent)(ckpt_eng *e, int64_t T, int64_t V, const real *logits, const int32_t *labels,
                      const wreal *weight, wreal *loss, real *dlogits, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->xent(&c, T, V, logits, labels, weight, loss, dlogits, err));
}

ckpt_status ENG(embed_part)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                            const int32_t *ids, const real *table, real *y, ckpt_err *err)
{
    (void)V; /* ids were looked at when they were brought */
    WITHOUT(e, api_of(e)->embed(&c, T, lo, n, H, ids, table, y, err));
}

ckpt_status ENG(embed_part_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                                const int32_t *ids, const real *dy, real *dtable, ckpt_err *err)
{
    wreal *sum = (wreal *)(void *)dtable;
    (void)V;
    WITHOUT(e, api_of(e)->embed_bwd(&c, T, lo, n, H, ids, dy, sum, err));
}

ckpt_status ENG(xent_part)(ckpt_eng *e, ckpt_comm *r, int64_t T, int64_t V, int64_t lo, int64_t n,
                           const real *logits, const int32_t *labels, const wreal *weight,
                           wreal *loss, real *dlogits, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    wreal *top = ckpt_eng_take(e, T, sizeof *top);
    wreal *sum = ckpt_eng_take(e, 2 * T, sizeof *sum), *at = sum + T;
    (void)V;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(api_of(e)->xent_top(&c, T, n, logits, top, err));
    CKPT_CHECK(ckpt_comm_allreduce(r, CKPT_COMM_F32, CKPT_COMM_MAX_OF, top, T, err));
    CKPT_CHECK(api_of(e)->xent_sums(&c, T, lo, n, logits, labels, top, sum, at, err));
    CKPT_CHECK(ckpt_comm_allreduce(r, CKPT_COMM_F32, CKPT_COMM_SUM, sum, 2 * T, err));
    CKPT_CHECK(api_of(e)->xent_end(&c, T, lo, n, logits, labels, weight, top, sum, at, loss,
                                   dlogits, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
