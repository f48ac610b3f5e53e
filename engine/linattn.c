/* KDA, GDN and GDN2 mixers: projections, convolution, norms, gates, recurrence, gated norm, output
 * projection, and their backward (kda-math.md sections 1 and 4). Only order and shapes live here; every
 * formula is an operation of ops.h. */
#include "blocks.h"

#include "checked.h"
#include "linattn_cut.h"
#include "move.h"
#include "par.h"

typedef struct sizes {
    int64_t T, D, QK, VD, HV;
    int64_t DF, DE; /* columns of the decay and of the erase gate, as they are projected */
    int64_t HG;     /* heads that they are of; G value heads share one */
    int64_t G;
} sizes;

static sizes sizes_of(const ckpt_eng_linattn *b, const ckpt_eng_seq *seq)
{
    const ckpt_eng_delta *d = &b->delta;
    const int64_t HG = b->key_gates ? d->H : d->HV;
    return (sizes){.T = ckpt_eng_tokens(seq),
                   .D = b->D,
                   .QK = d->H * d->K,
                   .VD = d->HV * d->V,
                   .HV = d->HV,
                   .DF = d->rule == CKPT_ENG_GDN ? HG : HG * d->K,
                   .DE = d->rule == CKPT_ENG_GDN2 ? HG * d->K : HG,
                   .HG = HG,
                   .G = d->HV / HG};
}

static double l2_eps(const ckpt_eng_linattn *b)
{
    return b->l2_eps != 0 ? b->l2_eps : 1e-6;
}

static double erase_scale(const ckpt_eng_linattn *b)
{
    return b->erase_scale != 0 ? b->erase_scale : 1;
}

static ckpt_status check(const ckpt_eng_linattn *b, const ckpt_eng_seq *seq, ckpt_err *err)
{
    const ckpt_eng_delta *d = &b->delta;
    const int64_t limit = (int64_t)1 << 24; /* products of two sizes stay far below 2^63 */
    if (b->D <= 0 || b->D > limit || d->H <= 0 || d->HV <= 0 || d->K <= 0 || d->V <= 0 ||
        d->H > limit || d->HV > limit || d->K > limit || d->V > limit || b->f_rank < 0 ||
        b->z_rank < 0 || b->f_rank > limit || b->z_rank > limit || d->HV % d->H != 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "linear attention: hidden %lld, heads %lld of %lld and %lld of %lld, "
                         "ranks %lld and %lld",
                         (long long)b->D, (long long)d->H, (long long)d->K, (long long)d->HV,
                         (long long)d->V, (long long)b->f_rank, (long long)b->z_rank);
    ckpt_status status = ckpt_eng_seq_check(seq, err);
    if (status == CKPT_OK && ckpt_eng_tokens(seq) > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "linear attention: more than 2^31 tokens");
    return status;
}

/* What the emulation of a quantised prefill cannot be combined with: quant-emulation.md section 5. */
static ckpt_status check_quant(const ckpt_eng *e, const ckpt_eng_linattn *b, bool with_state,
                               ckpt_err *err)
{
    const struct ckpt_eng_par *par = e->par;
    bool nvfp4 = false;
    if (b->quant == NULL)
        return CKPT_OK;
    if (with_state)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "a quantisation policy with recurrent inference: states are rounded a "
                         "chunk, not a token");
    if (par != NULL && par->cp > 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "a quantisation policy with context parallelism (cp %d)", par->cp);
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        nvfp4 = nvfp4 || b->quant->kind[h] == CKPT_QUANT_NVFP4;
    if (nvfp4 && par != NULL && par->tp > 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "a quantisation policy with NVFP4 and tensor parallelism (tp %d): its one "
                         "scale a call spans all heads",
                         par->tp);
    if (b->bound > 0 || b->bound < -5)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "a quantisation policy with a decay bounded at %g, expected -5 to 0",
                         b->bound);
    return CKPT_OK;
}

static real *rows(ckpt_eng *e, int64_t T, int64_t n)
{
    return n > 0 ? ckpt_eng_take(e, T * n, sizeof(real)) : NULL;
}

static wreal *wide_rows(ckpt_eng *e, int64_t T, int64_t n)
{
    return n > 0 ? ckpt_eng_take(e, T * n, sizeof(wreal)) : NULL;
}

ckpt_status ENG(linattn_save)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                              ENG(linattn_saved) * s, ckpt_err *err)
{
    ckpt_status status = check(b, seq, err);
    if (status == CKPT_OK)
        status = check_quant(e, b, false, err);
    if (status != CKPT_OK)
        return status;
    const sizes z = sizes_of(b, seq);
    const bool gdn2 = b->delta.rule == CKPT_ENG_GDN2;
    s->pre_q = rows(e, z.T, z.QK);
    s->pre_k = rows(e, z.T, z.QK);
    s->pre_v = rows(e, z.T, z.VD);
    s->q = rows(e, z.T, z.QK);
    s->k = rows(e, z.T, z.QK);
    s->v = rows(e, z.T, z.VD);
    s->rq = wide_rows(e, z.T, b->delta.H);
    s->rk = wide_rows(e, z.T, b->delta.H);
    s->f_mid = rows(e, z.T, b->f_rank);
    s->z_mid = rows(e, z.T, b->z_rank);
    s->f = rows(e, z.T, z.DF);
    s->g = wide_rows(e, z.T, z.DF * z.G);
    s->z = rows(e, z.T, z.VD);
    s->erase = wide_rows(e, z.T, z.DE * z.G);
    s->write = gdn2 ? wide_rows(e, z.T, z.VD) : NULL;
    s->o = rows(e, z.T, z.VD);
    s->rstd = wide_rows(e, z.T, z.HV);
    s->states = NULL;
    if (b->quant != NULL)
        status = ENG(kda_quant_save)(e, b->quant, &b->delta, seq, &s->quant, err);
    else
        s->states = ckpt_eng_take(e, ENG(delta_saved_len)(&b->delta, seq), sizeof(wreal));
    if (status != CKPT_OK)
        return status;
    return ENG(linattn_cut_save)(e, b, seq, s, err);
}

/* A projection that may be low-rank: y = x w^T, or y = (x a^T) b^T with the middle kept. */
typedef struct branch {
    int64_t T, D, rank, n;
    const real *w, *a, *b;
    const wreal *bias;
    real *mid;
} branch;

static ckpt_status branch_forward(ckpt_eng *e, const branch *r, const real *x, real *y,
                                  ckpt_err *err)
{
    if (r->rank == 0)
        return ENG(linear)(e, r->T, r->D, r->n, x, r->D, r->w, r->bias, false, y, r->n, err);
    ckpt_status status =
        ENG(linear)(e, r->T, r->D, r->rank, x, r->D, r->a, NULL, false, r->mid, r->rank, err);
    if (status != CKPT_OK)
        return status;
    return ENG(linear)(e, r->T, r->rank, r->n, r->mid, r->rank, r->b, r->bias, false, y, r->n, err);
}

typedef struct branch_grads {
    real *w, *a, *b;
    wreal *bias;
} branch_grads;

/* dx += */
static ckpt_status branch_backward(ckpt_eng *e, const branch *r, const real *x, const real *dy,
                                   const branch_grads *g, real *dx, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    if (r->rank == 0) {
        CKPT_CHECK(ENG(linear_dw)(e, r->T, r->D, r->n, dy, r->n, x, r->D, g->w, g->bias, err));
        CKPT_CHECK(ENG(linear_dx)(e, r->T, r->D, r->n, dy, r->n, r->w, true, dx, r->D, err));
    } else {
        real *dmid = rows(e, r->T, r->rank);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(
            ENG(linear_dw)(e, r->T, r->rank, r->n, dy, r->n, r->mid, r->rank, g->b, g->bias, err));
        CKPT_CHECK(
            ENG(linear_dx)(e, r->T, r->rank, r->n, dy, r->n, r->b, false, dmid, r->rank, err));
        CKPT_CHECK(ENG(linear_dw)(e, r->T, r->D, r->rank, dmid, r->rank, x, r->D, g->a, NULL, err));
        CKPT_CHECK(
            ENG(linear_dx)(e, r->T, r->D, r->rank, dmid, r->rank, r->a, true, dx, r->D, err));
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static branch f_branch(const ckpt_eng_linattn *b, const sizes *z, const ENG(linattn_params) * p,
                       const ENG(linattn_saved) * s)
{
    return (branch){.T = z->T,
                    .D = z->D,
                    .rank = b->f_rank,
                    .n = z->DF,
                    .w = p->f,
                    .a = p->f_a,
                    .b = p->f_b,
                    .mid = s->f_mid};
}

static branch z_branch(const ckpt_eng_linattn *b, const sizes *z, const ENG(linattn_params) * p,
                       const ENG(linattn_saved) * s)
{
    return (branch){.T = z->T,
                    .D = z->D,
                    .rank = b->z_rank,
                    .n = z->VD,
                    .w = p->z,
                    .a = p->z_a,
                    .b = p->z_b,
                    .bias = p->z_bias,
                    .mid = s->z_mid};
}

static ckpt_status project(ckpt_eng *e, const sizes *z, const real *x, const real *w, int64_t n,
                           real *y, ckpt_err *err)
{
    return ENG(linear)(e, z->T, z->D, n, x, z->D, w, NULL, false, y, n, err);
}

/* q, k, v: projection, convolution, norm of q and k. */
static ckpt_status forward_qkv(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                               const sizes *z, const ENG(linattn_params) * p, const real *x,
                               const ENG(linattn_state) * st, const ENG(linattn_saved) * s,
                               ckpt_err *err)
{
    const int64_t K = b->delta.K;
    const double eps = l2_eps(b);
    real *hq = st ? st->conv_q : NULL, *hk = st ? st->conv_k : NULL, *hv = st ? st->conv_v : NULL;
    ckpt_status status;
    CKPT_CHECK(project(e, z, x, p->q, z->QK, s->pre_q, err));
    CKPT_CHECK(project(e, z, x, p->k, z->QK, s->pre_k, err));
    CKPT_CHECK(project(e, z, x, p->v, z->VD, s->pre_v, err));
    if (ckpt_eng_cut_in(e) != NULL)
        CKPT_CHECK(ENG(linattn_cut_rows)(e, b, seq, s, err));
    const real *fq = st ? hq : s->hist_q, *fk = st ? hk : s->hist_k, *fv = st ? hv : s->hist_v;
    CKPT_CHECK(
        ENG(conv_norm)(e, seq, z->QK, b->W, K, eps, s->pre_q, p->conv_q, fq, s->q, s->rq, hq, err));
    CKPT_CHECK(
        ENG(conv_norm)(e, seq, z->QK, b->W, K, eps, s->pre_k, p->conv_k, fk, s->k, s->rk, hk, err));
    CKPT_CHECK(ENG(conv)(e, seq, z->VD, b->W, s->pre_v, p->conv_v, NULL, fv, s->v, hv, err));
done:
    return status;
}

/* An erase or write gate of all value heads: the sigmoid of what is projected, of groups of value heads
 * that share one the same. */
static ckpt_status forward_sigmoid(ckpt_eng *e, const sizes *z, int64_t n, int64_t G, double scale,
                                   const real *x, const real *w, wreal *y, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *raw = rows(e, z->T, n);
    wreal *one = G > 1 ? wide_rows(e, z->T, n) : y;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(project(e, z, x, w, n, raw, err));
    CKPT_CHECK(ENG(sigmoid)(e, z->T * n, scale, raw, one, err));
    if (G > 1)
        CKPT_CHECK(ENG(repeat_heads)(e, z->T * z->HG, G, n / z->HG, one, y, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status forward_decay(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                 const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                                 ckpt_err *err)
{
    const int64_t n = z->DF / z->HG;
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    wreal *one = z->G > 1 ? wide_rows(e, z->T, z->DF) : s->g;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(gate)(e, z->T, z->HG, n, s->f, p->A_log, p->dt_bias, b->bound, one, err));
    if (z->G > 1)
        CKPT_CHECK(ENG(repeat_heads)(e, z->T * z->HG, z->G, n, one, s->g, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status forward_gates(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                 const ENG(linattn_params) * p, const real *x,
                                 const ENG(linattn_saved) * s, ckpt_err *err)
{
    const branch f = f_branch(b, z, p, s), gate = z_branch(b, z, p, s);
    ckpt_status status;
    CKPT_CHECK(branch_forward(e, &f, x, s->f, err));
    CKPT_CHECK(forward_decay(e, b, z, p, s, err));
    CKPT_CHECK(branch_forward(e, &gate, x, s->z, err));
    CKPT_CHECK(forward_sigmoid(e, z, z->DE, z->G, erase_scale(b), x, p->erase, s->erase, err));
    if (s->write)
        CKPT_CHECK(forward_sigmoid(e, z, z->VD, 1, 1, x, p->write, s->write, err));
done:
    return status;
}

static ENG(delta_in) delta_inputs(const ENG(linattn_saved) * s, const wreal *state0)
{
    return (ENG(delta_in)){.q = s->q,
                           .k = s->k,
                           .v = s->v,
                           .g = s->g,
                           .erase = s->erase,
                           .write = s->write,
                           .state0 = state0};
}

ckpt_status ENG(linattn)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                         const ENG(linattn_params) * p, const real *x, bool add, real *y,
                         const ENG(linattn_state) * st, const ENG(linattn_saved) * s, ckpt_err *err)
{
    const sizes z = sizes_of(b, seq);
    const size_t mark = ckpt_eng_mark(e);
    wreal *state = st ? st->delta : NULL;
    ckpt_status status = check(b, seq, err);
    if (status == CKPT_OK)
        status = check_quant(e, b, st != NULL, err);
    if (status != CKPT_OK)
        return status;
    real *normed = rows(e, z.T, z.VD);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(forward_qkv(e, b, seq, &z, p, x, st, s, err));
    CKPT_CHECK(forward_gates(e, b, &z, p, x, s, err));
    const ENG(delta_in) in = delta_inputs(s, state);
    if (b->quant != NULL)
        CKPT_CHECK(ENG(kda_quant)(e, b->quant, &b->delta, seq, &in, s->o, NULL, &s->quant,
                                  b->quant_report, err));
    else if (ckpt_eng_cut_in(e) != NULL)
        CKPT_CHECK(ENG(linattn_cut_delta)(e, b, seq, &in, s, err));
    else
        CKPT_CHECK(ENG(delta)(e, &b->delta, seq, &in, s->o, state, s->states, err));
    CKPT_CHECK(ENG(gated_rmsnorm)(e, z.T * z.HV, b->delta.V, s->o, s->z, p->norm, b->act, b->eps,
                                  normed, s->rstd, err));
    CKPT_CHECK(ENG(linear)(e, z.T, z.VD, z.D, normed, z.VD, p->out, NULL, add, y, z.D, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- backward ------------------------------------------------------------------------------- */

typedef struct work {
    real *normed, *d_o, *dz;
    ENG(delta_grad) in;
    real *dpre; /* gradient before a convolution or of a gate's projection, [T, what is widest] */
} work;

/* dy -> d_o of the recurrence and dz of the gate; out, norm. */
static ckpt_status backward_output(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                   const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                                   const real *dy, const ENG(linattn_params) * g, work *w,
                                   ckpt_err *err)
{
    const int64_t n = z->T * z->HV, V = b->delta.V;
    ckpt_status status;
    /* The normed output is recomputed: it is as large as o and needed once. */
    CKPT_CHECK(
        ENG(gated_rmsnorm)(e, n, V, s->o, s->z, p->norm, b->act, b->eps, w->normed, NULL, err));
    CKPT_CHECK(ENG(linear_dw)(e, z->T, z->VD, z->D, dy, z->D, w->normed, z->VD, g->out, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, z->T, z->VD, z->D, dy, z->D, p->out, false, w->d_o, z->VD, err));
    CKPT_CHECK(ENG(gated_rmsnorm_bwd)(e, n, V, s->o, s->z, p->norm, b->act, s->rstd, w->d_o, w->d_o,
                                      w->dz, g->norm, err));
done:
    return status;
}

/* One of q, k, v back to x. d is the gradient after the convolution, or after the norm of q and k, which
 * may be overwritten. */
typedef struct conv_back {
    int64_t n;
    const real *pre, *w;
    real *d;
    const real *history; /* or NULL */
    const wreal *w_conv;
    wreal *dw_conv;
    real *dw;
    const real *y; /* with r: what was normed, NULL of v */
    const wreal *r;
} conv_back;

static ckpt_status backward_conv(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                 const sizes *z, const conv_back *c, const real *x, real *dpre,
                                 real *dx, ckpt_err *err)
{
    ckpt_status status;
    const size_t mark = ckpt_eng_mark(e);
    real *dhistory = c->history ? rows(e, seq->n * (b->W - 1), c->n) : NULL;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (c->r != NULL)
        CKPT_CHECK(ENG(conv_norm_bwd)(e, seq, c->n, b->W, b->delta.K, c->pre, c->w_conv, c->history,
                                      c->y, c->r, c->d, dpre, c->dw_conv, dhistory, err));
    else
        CKPT_CHECK(ENG(conv_bwd)(e, seq, c->n, b->W, c->pre, c->w_conv, NULL, c->history, c->d,
                                 dpre, c->dw_conv, NULL, dhistory, err));
    if (dhistory)
        CKPT_CHECK(ENG(linattn_cut_rows_bwd)(e, seq, c->n, b->W, dpre, dhistory, err));
    CKPT_CHECK(ENG(linear_dw)(e, z->T, z->D, c->n, dpre, c->n, x, z->D, c->dw, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, z->T, z->D, c->n, dpre, c->n, c->w, true, dx, z->D, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status backward_qkv(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                const sizes *z, const ENG(linattn_params) * p,
                                const ENG(linattn_saved) * s, const real *x,
                                const ENG(linattn_params) * g, work *w, real *dx, ckpt_err *err)
{
    const conv_back three[] = {
        {z->QK, s->pre_q, p->q, w->in.q, s->hist_q, p->conv_q, g->conv_q, g->q, s->q, s->rq},
        {z->QK, s->pre_k, p->k, w->in.k, s->hist_k, p->conv_k, g->conv_k, g->k, s->k, s->rk},
        {z->VD, s->pre_v, p->v, w->in.v, s->hist_v, p->conv_v, g->conv_v, g->v, NULL, NULL },
    };
    ckpt_status status;
    for (size_t i = 0; i < sizeof three / sizeof *three; i++)
        CKPT_CHECK(backward_conv(e, b, seq, z, &three[i], x, w->dpre, dx, err));
done:
    return status;
}

/* Sigmoid gate back to x: d is the gradient of the gate, raw room for that of what is projected. */
static ckpt_status backward_sigmoid(ckpt_eng *e, const sizes *z, int64_t n, double scale,
                                    const wreal *y, const real *wt, const real *x, const wreal *d,
                                    real *raw, real *dw, real *dx, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ENG(sigmoid_bwd)(e, z->T * n, scale, y, d, raw, err));
    CKPT_CHECK(ENG(linear_dw)(e, z->T, z->D, n, raw, n, x, z->D, dw, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, z->T, z->D, n, raw, n, wt, true, dx, z->D, err));
done:
    return status;
}

/* The erase gate back to x: the gradient of every value head's is summed into that of its gate. */
static ckpt_status backward_erase(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                  const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                                  const real *x, const ENG(linattn_params) * g, work *w, real *dx,
                                  ckpt_err *err)
{
    const int64_t n = z->DE / z->HG;
    const size_t mark = ckpt_eng_mark(e);
    const wreal *erase = s->erase, *d = w->in.erase;
    ckpt_status status = CKPT_OK;
    if (z->G > 1) {
        wreal *one = wide_rows(e, z->T, z->DE), *sum = wide_rows(e, z->T, z->DE);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(first_heads)(e, z->T * z->HG, z->G, n, s->erase, one, err));
        CKPT_CHECK(ENG(sum_heads)(e, z->T * z->HG, z->G, n, w->in.erase, sum, err));
        erase = one;
        d = sum;
    }
    CKPT_CHECK(backward_sigmoid(e, z, z->DE, erase_scale(b), erase, p->erase, x, d, w->dpre,
                                g->erase, dx, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* The decay back to its projection, in w->dpre. */
static ckpt_status backward_decay(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                  const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                                  const ENG(linattn_params) * g, const work *w, ckpt_err *err)
{
    const int64_t n = z->DF / z->HG;
    const size_t mark = ckpt_eng_mark(e);
    const wreal *d = w->in.g;
    ckpt_status status;
    if (z->G > 1) {
        wreal *sum = wide_rows(e, z->T, z->DF);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(sum_heads)(e, z->T * z->HG, z->G, n, w->in.g, sum, err));
        d = sum;
    }
    CKPT_CHECK(ENG(gate_bwd)(e, z->T, z->HG, n, s->f, p->A_log, p->dt_bias, b->bound, d, w->dpre,
                             g->A_log, g->dt_bias, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status backward_gates(ckpt_eng *e, const ckpt_eng_linattn *b, const sizes *z,
                                  const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                                  const real *x, const ENG(linattn_params) * g, work *w, real *dx,
                                  ckpt_err *err)
{
    const branch f = f_branch(b, z, p, s), gate = z_branch(b, z, p, s);
    const branch_grads df = {g->f, g->f_a, g->f_b, NULL},
                       dgate = {g->z, g->z_a, g->z_b, p->z_bias ? g->z_bias : NULL};
    ckpt_status status;
    CKPT_CHECK(backward_decay(e, b, z, p, s, g, w, err));
    CKPT_CHECK(branch_backward(e, &f, x, w->dpre, &df, dx, err));
    CKPT_CHECK(branch_backward(e, &gate, x, w->dz, &dgate, dx, err));
    CKPT_CHECK(backward_erase(e, b, z, p, s, x, g, w, dx, err));
    if (s->write)
        CKPT_CHECK(backward_sigmoid(e, z, z->VD, 1, s->write, p->write, x, w->in.write, w->dpre,
                                    g->write, dx, err));
done:
    return status;
}

static ckpt_status take_work(ckpt_eng *e, const sizes *z, bool gdn2, work *w, ckpt_err *err)
{
    w->normed = rows(e, z->T, z->VD);
    w->d_o = rows(e, z->T, z->VD);
    w->dz = rows(e, z->T, z->VD);
    w->in = (ENG(delta_grad)){.q = rows(e, z->T, z->QK),
                              .k = rows(e, z->T, z->QK),
                              .v = w->normed, /* done with when the recurrence starts */
                              .g = wide_rows(e, z->T, z->DF * z->G),
                              .erase = wide_rows(e, z->T, z->DE * z->G),
                              .write = gdn2 ? wide_rows(e, z->T, z->VD) : NULL};
    w->dpre = rows(e, z->T, ckpt_max_i64(ckpt_max_i64(z->QK, z->VD), ckpt_max_i64(z->DF, z->DE)));
    return ckpt_eng_check(e, err);
}

ckpt_status ENG(linattn_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                             const ENG(linattn_params) * p, const ENG(linattn_saved) * s,
                             const real *x, const real *dy, bool add, real *dx,
                             const ENG(linattn_params) * grads, ckpt_err *err)
{
    const sizes z = sizes_of(b, seq);
    const size_t mark = ckpt_eng_mark(e);
    work w;
    ckpt_status status = check(b, seq, err);
    if (status != CKPT_OK)
        return status;
    const ENG(delta_in) in = delta_inputs(s, s->state0);
    CKPT_CHECK(take_work(e, &z, s->write != NULL, &w, err));
    CKPT_CHECK(backward_output(e, b, &z, p, s, dy, grads, &w, err));
    if (!add)
        CKPT_CHECK(ENG(zero)(e, z.T * z.D, dx, err));
    if (b->quant != NULL)
        CKPT_CHECK(ENG(kda_quant_bwd)(e, b->quant, &b->delta, seq, &in, &s->quant, w.d_o, NULL,
                                      &w.in, err));
    else if (ckpt_eng_cut_in(e) != NULL)
        CKPT_CHECK(ENG(linattn_cut_delta_bwd)(e, b, seq, &in, s, w.d_o, &w.in, err));
    else
        CKPT_CHECK(ENG(delta_bwd)(e, &b->delta, seq, &in, s->states, w.d_o, NULL, &w.in, err));
    CKPT_CHECK(backward_gates(e, b, &z, p, s, x, grads, &w, dx, err));
    CKPT_CHECK(backward_qkv(e, b, seq, &z, p, s, x, grads, &w, dx, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
