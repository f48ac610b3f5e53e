/* Grouped-query attention block: biases, norms of q and k, rotation, attention, elementwise gate. */
#include "move.h"

#include "checked.h"
#include "cut.h"

static ckpt_status check(const ckpt_eng_gqa *b, const ENG(gqa_params) * p, ckpt_err *err)
{
    const ckpt_eng_attention *a = &b->attn;
    if (b->rope.kind != CKPT_ENG_ROPE_NONE && b->rope.dim > a->DK)
        return ckpt_fail(err, CKPT_E_USAGE, "attention: %lld rotated channels of %lld",
                         (long long)b->rope.dim, (long long)a->DK);
    if (p && (b->gated != (p->gate != NULL) || b->qk_norm != (p->q_norm && p->k_norm)))
        return ckpt_fail(err, CKPT_E_USAGE, "attention: gate or norm weights do not fit the block");
    return CKPT_OK;
}

ckpt_status ENG(gqa_save)(ckpt_eng *e, const ckpt_eng_gqa *b, int64_t T, ENG(gqa_saved) * s,
                          ckpt_err *err)
{
    const ckpt_eng_attention *a = &b->attn;
    ckpt_status status = check(b, NULL, err);
    if (status != CKPT_OK)
        return status;
    *s = (ENG(gqa_saved)){0};
    s->q_raw = ckpt_eng_take(e, T * a->N * a->DK, sizeof(real));
    s->k_raw = ckpt_eng_take(e, T * a->G * a->DK, sizeof(real));
    s->q = b->qk_norm ? ckpt_eng_take(e, T * a->N * a->DK, sizeof(real)) : s->q_raw;
    s->k = b->qk_norm ? ckpt_eng_take(e, T * a->G * a->DK, sizeof(real)) : s->k_raw;
    s->v = ckpt_eng_take(e, T * a->G * a->DV, sizeof(real));
    s->rq = ckpt_eng_take(e, T * a->N, sizeof(wreal));
    s->rk = ckpt_eng_take(e, T * a->G, sizeof(wreal));
    if (b->gated)
        s->gate = ckpt_eng_take(e, T * a->N * a->DV, sizeof(real));
    s->o = ckpt_eng_take(e, T * a->N * a->DV, sizeof(real));
    s->lse = ckpt_eng_take(e, T * a->N, sizeof(wreal));
    return ckpt_eng_check(e, err);
}

static ckpt_status norm_and_rotate(ckpt_eng *e, const ckpt_eng_gqa *b, int64_t T, int64_t heads,
                                   const wreal *w, const ENG(rope_tables) * rope, const real *raw,
                                   wreal *r, real *to, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t d = b->attn.DK;
    if (b->qk_norm)
        CKPT_CHECK(ENG(rmsnorm)(e, T * heads, d, raw, w, b->centered, b->eps, to, r, err));
    if (b->rope.kind != CKPT_ENG_ROPE_NONE)
        CKPT_CHECK(
            ENG(rope)(e, &b->rope, T, heads, to, heads * d, d, rope->cos, rope->sin, false, err));
done:
    return status;
}

ckpt_status ENG(gqa)(ckpt_eng *e, const ckpt_eng_gqa *b, const ckpt_eng_seq *seq,
                     const ENG(gqa_params) * p, const ENG(rope_tables) * rope, const real *x,
                     bool add, real *y, const ENG(gqa_saved) * s, ckpt_err *err)
{
    const ckpt_eng_attention *a = &b->attn;
    int64_t T = ckpt_eng_tokens(seq), q = a->N * a->DK, k = a->G * a->DK, v = a->G * a->DV;
    int64_t out = a->N * a->DV;
    size_t mark = ckpt_eng_mark(e);
    const real *o = s->o;
    ckpt_status status;
    CKPT_CHECK(check(b, p, err));
    CKPT_CHECK(ENG(linear)(e, T, b->H, q, x, b->H, p->q, p->q_bias, false, s->q_raw, q, err));
    CKPT_CHECK(ENG(linear)(e, T, b->H, k, x, b->H, p->k, p->k_bias, false, s->k_raw, k, err));
    CKPT_CHECK(ENG(linear)(e, T, b->H, v, x, b->H, p->v, p->v_bias, false, s->v, v, err));
    CKPT_CHECK(norm_and_rotate(e, b, T, a->N, p->q_norm, rope, s->q_raw, s->rq, s->q, err));
    CKPT_CHECK(norm_and_rotate(e, b, T, a->G, p->k_norm, rope, s->k_raw, s->rk, s->k, err));
    CKPT_CHECK(ENG(attention_cut)(e, a, seq, s->q, s->k, s->v, s->o, s->lse, err));
    if (b->gated) {
        real *gated = ckpt_eng_take(e, T * out, sizeof *gated);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(linear)(e, T, b->H, out, x, b->H, p->gate, NULL, false, s->gate, out, err));
        CKPT_CHECK(ENG(gate_heads)(e, T, a->N, a->DV, a->DV, s->o, s->gate, gated, err));
        o = gated;
    }
    CKPT_CHECK(ENG(linear)(e, T, out, b->H, o, out, p->o, NULL, add, y, b->H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status undo_rotation(ckpt_eng *e, const ckpt_eng_gqa *b, int64_t T, int64_t heads,
                                 const wreal *w, const ENG(rope_tables) * rope, const real *raw,
                                 const wreal *r, real *d, wreal *dw, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t n = b->attn.DK;
    if (b->rope.kind != CKPT_ENG_ROPE_NONE)
        CKPT_CHECK(
            ENG(rope)(e, &b->rope, T, heads, d, heads * n, n, rope->cos, rope->sin, true, err));
    if (b->qk_norm)
        CKPT_CHECK(ENG(rmsnorm_bwd)(e, T * heads, n, raw, w, b->centered, r, d, false, d, dw, err));
done:
    return status;
}

/* Gradient of the attention output; the gate's share of dx. */
static ckpt_status output_bwd(ckpt_eng *e, const ckpt_eng_gqa *b, int64_t T,
                              const ENG(gqa_params) * p, const ENG(gqa_saved) * s, const real *x,
                              const real *dy, bool *add, real *dx, real *d_o,
                              const ENG(gqa_params) * g, ckpt_err *err)
{
    const ckpt_eng_attention *a = &b->attn;
    int64_t out = a->N * a->DV;
    size_t mark = ckpt_eng_mark(e);
    const real *o = s->o;
    real *gated = NULL, *dg = NULL;
    ckpt_status status;
    if (b->gated) {
        gated = ckpt_eng_take(e, T * out, sizeof *gated);
        dg = ckpt_eng_take(e, T * out, sizeof *dg);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(gate_heads)(e, T, a->N, a->DV, a->DV, s->o, s->gate, gated, err));
        o = gated;
    }
    CKPT_CHECK(ENG(linear_dw)(e, T, out, b->H, dy, b->H, o, out, g->o, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, out, b->H, dy, b->H, p->o, false, d_o, out, err));
    if (b->gated) {
        CKPT_CHECK(ENG(gate_heads_bwd)(e, T, a->N, a->DV, a->DV, s->o, s->gate, d_o, d_o, dg, err));
        CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, out, dg, x, p->gate, *add, dx, g->gate, NULL, err));
        *add = true;
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(gqa_bwd)(ckpt_eng *e, const ckpt_eng_gqa *b, const ckpt_eng_seq *seq,
                         const ENG(gqa_params) * p, const ENG(rope_tables) * rope,
                         const ENG(gqa_saved) * s, const real *x, const real *dy, bool add,
                         real *dx, const ENG(gqa_params) * g, ckpt_err *err)
{
    const ckpt_eng_attention *a = &b->attn;
    int64_t T = ckpt_eng_tokens(seq), q = a->N * a->DK, k = a->G * a->DK, v = a->G * a->DV;
    size_t mark = ckpt_eng_mark(e);
    real *d_o = ckpt_eng_take(e, T * a->N * a->DV, sizeof *d_o);
    real *dq = ckpt_eng_take(e, T * q, sizeof *dq);
    real *dk = ckpt_eng_take(e, T * k, sizeof *dk);
    real *dv = ckpt_eng_take(e, T * v, sizeof *dv);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(check(b, p, err));
    CKPT_CHECK(output_bwd(e, b, T, p, s, x, dy, &add, dx, d_o, g, err));
    CKPT_CHECK(
        ENG(attention_cut_bwd)(e, a, seq, s->q, s->k, s->v, s->o, s->lse, d_o, dq, dk, dv, err));
    CKPT_CHECK(undo_rotation(e, b, T, a->N, p->q_norm, rope, s->q_raw, s->rq, dq, g->q_norm, err));
    CKPT_CHECK(undo_rotation(e, b, T, a->G, p->k_norm, rope, s->k_raw, s->rk, dk, g->k_norm, err));
    CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, q, dq, x, p->q, add, dx, g->q, g->q_bias, err));
    CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, k, dk, x, p->k, true, dx, g->k, g->k_bias, err));
    CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, v, dv, x, p->v, true, dx, g->v, g->v_bias, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
