/* Multi-head latent attention: projections, latent norms, rotation, attention, output gate.
 *
 * Training uses the expanded form: keys [k_nope | k_pe broadcast to the heads] and values are made from
 * the latent. Decoding keeps the latent and folds the up-projections into query and output.
 * Source: mla-moe-math.md sections 2.2 to 2.8. */
#include "move.h"

#include <math.h>
#include <string.h>

#include "checked.h"
#include "cut.h"

static double scale_of(const ckpt_eng_mla *b)
{
    double m = 1;
    if (b->scale != 0)
        return b->scale;
    if (b->rope.kind == CKPT_ENG_ROPE_YARN && b->rope.factor > 1)
        m = 0.1 * b->rope.mscale_all_dim * log(b->rope.factor) + 1;
    return m * m / sqrt((double)(b->DN + b->DR));
}

static ckpt_eng_attention core_of(const ckpt_eng_mla *b)
{
    return (ckpt_eng_attention){
        .N = b->N, .G = b->N, .DK = b->DN + b->DR, .DV = b->DV, .scale = scale_of(b)};
}

static int64_t gate_width(const ckpt_eng_mla *b)
{
    return b->gate == CKPT_ENG_GATE_NONE ? 0 : b->gate == CKPT_ENG_GATE_HEAD ? 1 : b->DV;
}

static double latent_eps(const ckpt_eng_mla *b)
{
    return b->latent_eps > 0 ? b->latent_eps : b->eps;
}

static bool rotates(const ckpt_eng_mla *b)
{
    return b->rope.kind != CKPT_ENG_ROPE_NONE;
}

static ckpt_status check(const ckpt_eng_mla *b, const ENG(mla_params) * p, ckpt_err *err)
{
    if (b->N < 1 || b->RK < 1 || b->DN < 0 || b->DR < 0 || b->DN + b->DR < 1 || b->DV < 1)
        return ckpt_fail(err, CKPT_E_USAGE, "mla: %lld heads of %lld + %lld and %lld, rank %lld",
                         (long long)b->N, (long long)b->DN, (long long)b->DR, (long long)b->DV,
                         (long long)b->RK);
    if (rotates(b) && b->rope.dim > b->DR)
        return ckpt_fail(err, CKPT_E_USAGE, "mla: %lld rotated channels of %lld",
                         (long long)b->rope.dim, (long long)b->DR);
    if (p == NULL)
        return CKPT_OK;
    if ((b->RQ > 0) != (p->q_b != NULL) || (b->RQ > 0) == (p->q != NULL))
        return ckpt_fail(err, CKPT_E_USAGE, "mla: query weights do not fit rank %lld",
                         (long long)b->RQ);
    if (b->latent_norm != (p->kv_a_norm != NULL) ||
        (b->RQ > 0 && b->latent_norm != (p->q_a_norm != NULL)))
        return ckpt_fail(err, CKPT_E_USAGE, "mla: latent norm weights %s",
                         b->latent_norm ? "are missing" : "without a norm");
    return CKPT_OK;
}

ckpt_status ENG(mla_save)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, ENG(mla_saved) * s,
                          ckpt_err *err)
{
    ckpt_status status = check(b, NULL, err);
    if (status != CKPT_OK)
        return status;
    int64_t dq = b->DN + b->DR;
    *s = (ENG(mla_saved)){0};
    if (b->RQ > 0) {
        s->q_a = ckpt_eng_take(e, T * b->RQ, sizeof(real));
        s->q_an = b->latent_norm ? ckpt_eng_take(e, T * b->RQ, sizeof(real)) : s->q_a;
        s->rq = ckpt_eng_take(e, T, sizeof(wreal));
    }
    s->kv_a = ckpt_eng_take(e, T * (b->RK + b->DR), sizeof(real));
    s->c = ckpt_eng_take(e, T * b->RK, sizeof(real));
    s->cn = b->latent_norm ? ckpt_eng_take(e, T * b->RK, sizeof(real)) : s->c;
    s->rc = ckpt_eng_take(e, T, sizeof(wreal));
    s->q = ckpt_eng_take(e, T * b->N * dq, sizeof(real));
    s->k = ckpt_eng_take(e, T * b->N * dq, sizeof(real));
    s->v = ckpt_eng_take(e, T * b->N * b->DV, sizeof(real));
    if (gate_width(b) > 0)
        s->gate = ckpt_eng_take(e, T * b->N * gate_width(b), sizeof(real));
    s->o = ckpt_eng_take(e, T * b->N * b->DV, sizeof(real));
    s->lse = ckpt_eng_take(e, T * b->N, sizeof(wreal));
    return ckpt_eng_check(e, err);
}

/* ---- forward --------------------------------------------------------------------------------- */

static ckpt_status make_query(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                              const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                              const real *x, const ENG(mla_saved) * s, ckpt_err *err)
{
    ckpt_status status;
    int64_t dq = b->DN + b->DR, wide = b->N * dq;
    if (b->RQ > 0) {
        CKPT_CHECK(
            ENG(linear)(e, T, b->H, b->RQ, x, b->H, p->q_a, NULL, false, s->q_a, b->RQ, err));
        if (b->latent_norm)
            CKPT_CHECK(ENG(rmsnorm)(e, T, b->RQ, s->q_a, p->q_a_norm, b->centered, latent_eps(b),
                                    s->q_an, s->rq, err));
        CKPT_CHECK(
            ENG(linear)(e, T, b->RQ, wide, s->q_an, b->RQ, p->q_b, NULL, false, s->q, wide, err));
    } else {
        CKPT_CHECK(ENG(linear)(e, T, b->H, wide, x, b->H, p->q, NULL, false, s->q, wide, err));
    }
    if (rotates(b))
        CKPT_CHECK(ENG(rope)(e, &b->rope, T, b->N, s->q + b->DN, wide, dq, rope->cos, rope->sin,
                             false, err));
done:
    return status;
}

/* Latent, normed, and the shared key, rotated in place behind it. */
static ckpt_status make_latent(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                               const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                               const real *x, const ENG(mla_saved) * s, ckpt_err *err)
{
    ckpt_status status;
    int64_t wide = b->RK + b->DR;
    CKPT_CHECK(ENG(linear)(e, T, b->H, wide, x, b->H, p->kv_a, NULL, false, s->kv_a, wide, err));
    CKPT_CHECK(ENG(copy_columns)(e, T, b->RK, s->kv_a, wide, s->c, b->RK, err));
    if (b->latent_norm)
        CKPT_CHECK(ENG(rmsnorm)(e, T, b->RK, s->c, p->kv_a_norm, b->centered, latent_eps(b), s->cn,
                                s->rc, err));
    if (rotates(b))
        CKPT_CHECK(ENG(rope)(e, &b->rope, T, 1, s->kv_a + b->RK, wide, wide, rope->cos, rope->sin,
                             false, err));
done:
    return status;
}

/* kv [T, N, DN + DV] and the shared key into keys and values. */
static ckpt_status expand(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const ENG(mla_params) * p,
                          const ENG(mla_saved) * s, ckpt_err *err)
{
    ckpt_status status;
    int64_t per = b->DN + b->DV;
    size_t mark = ckpt_eng_mark(e);
    real *kv = ckpt_eng_take(e, T * b->N * per, sizeof *kv);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(linear)(e, T, b->RK, b->N * per, s->cn, b->RK, p->kv_b, NULL, false, kv,
                           b->N * per, err));
    CKPT_CHECK(ENG(split_heads)(e, b, T, kv, s->kv_a, s->k, s->v, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* The gated attention output into `to`, or the output itself without a gate. */
static ckpt_status apply_gate(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                              const ENG(mla_saved) * s, real *to, ckpt_err *err)
{
    return ENG(gate_heads)(e, T, b->N, b->DV, gate_width(b), s->o, s->gate, to, err);
}

ckpt_status ENG(mla)(ckpt_eng *e, const ckpt_eng_mla *b, const ckpt_eng_seq *seq,
                     const ENG(mla_params) * p, const ENG(rope_tables) * rope, const real *x,
                     bool add, real *y, const ENG(mla_saved) * s, ckpt_err *err)
{
    int64_t T = ckpt_eng_tokens(seq), out = b->N * b->DV;
    ckpt_eng_attention core = core_of(b);
    size_t mark = ckpt_eng_mark(e);
    const real *o = s->o;
    ckpt_status status;
    CKPT_CHECK(check(b, p, err));
    CKPT_CHECK(make_query(e, b, T, p, rope, x, s, err));
    CKPT_CHECK(make_latent(e, b, T, p, rope, x, s, err));
    CKPT_CHECK(expand(e, b, T, p, s, err));
    CKPT_CHECK(ENG(attention_cut)(e, &core, seq, s->q, s->k, s->v, s->o, s->lse, err));
    if (gate_width(b) > 0) {
        real *gated = ckpt_eng_take(e, T * out, sizeof *gated);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(linear)(e, T, b->H, b->N * gate_width(b), x, b->H, p->gate, NULL, false,
                               s->gate, b->N * gate_width(b), err));
        CKPT_CHECK(apply_gate(e, b, T, s, gated, err));
        o = gated;
    }
    CKPT_CHECK(ENG(linear)(e, T, out, b->H, o, out, p->o, NULL, add, y, b->H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* From the gradient of the block's output to that of the attention output; the gate's share of dx. */
static ckpt_status output_bwd(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                              const ENG(mla_params) * p, const ENG(mla_saved) * s, const real *x,
                              const real *dy, bool *add, real *dx, real *d_o,
                              const ENG(mla_params) * g, ckpt_err *err)
{
    int64_t out = b->N * b->DV, width = gate_width(b);
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    const real *o = s->o;
    real *gated = NULL, *dg = NULL;
    if (width > 0) {
        gated = ckpt_eng_take(e, T * out, sizeof *gated);
        dg = ckpt_eng_take(e, T * b->N * width, sizeof *dg);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(apply_gate(e, b, T, s, gated, err));
        o = gated;
    }
    CKPT_CHECK(ENG(linear_bwd)(e, T, out, b->H, dy, o, p->o, false, d_o, g->o, NULL, err));
    if (width > 0) {
        CKPT_CHECK(ENG(gate_heads_bwd)(e, T, b->N, b->DV, width, s->o, s->gate, d_o, d_o, dg, err));
        CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, b->N * width, dg, x, p->gate, *add, dx, g->gate,
                                   NULL, err));
        *add = true;
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status query_bwd(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                             const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                             const ENG(mla_saved) * s, const real *x, real *dq, bool *add, real *dx,
                             const ENG(mla_params) * g, ckpt_err *err)
{
    int64_t d = b->DN + b->DR, wide = b->N * d;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status = CKPT_OK;
    if (rotates(b))
        CKPT_CHECK(
            ENG(rope)(e, &b->rope, T, b->N, dq + b->DN, wide, d, rope->cos, rope->sin, true, err));
    if (b->RQ > 0) {
        real *dl = ckpt_eng_take(e, T * b->RQ, sizeof *dl);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(
            ENG(linear_bwd)(e, T, b->RQ, wide, dq, s->q_an, p->q_b, false, dl, g->q_b, NULL, err));
        if (b->latent_norm)
            CKPT_CHECK(ENG(rmsnorm_bwd)(e, T, b->RQ, s->q_a, p->q_a_norm, b->centered, s->rq, dl,
                                        false, dl, g->q_a_norm, err));
        CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, b->RQ, dl, x, p->q_a, *add, dx, g->q_a, NULL, err));
    } else {
        CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, wide, dq, x, p->q, *add, dx, g->q, NULL, err));
    }
    *add = true;
done:
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status latent_bwd(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T,
                              const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                              const ENG(mla_saved) * s, const real *x, const real *dk,
                              const real *dv, bool add, real *dx, const ENG(mla_params) * g,
                              ckpt_err *err)
{
    int64_t per = b->DN + b->DV, wide = b->RK + b->DR;
    size_t mark = ckpt_eng_mark(e);
    real *dkv = ckpt_eng_take(e, T * b->N * per, sizeof *dkv);
    real *dkv_a = ckpt_eng_take(e, T * wide, sizeof *dkv_a);
    real *dc = ckpt_eng_take(e, T * b->RK, sizeof *dc);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(fold_heads)(e, b, T, dk, dv, dkv, dkv_a, err));
    if (rotates(b))
        CKPT_CHECK(ENG(rope)(e, &b->rope, T, 1, dkv_a + b->RK, wide, wide, rope->cos, rope->sin,
                             true, err));
    CKPT_CHECK(ENG(linear_bwd)(e, T, b->RK, b->N * per, dkv, s->cn, p->kv_b, false, dc, g->kv_b,
                               NULL, err));
    if (b->latent_norm)
        CKPT_CHECK(ENG(rmsnorm_bwd)(e, T, b->RK, s->c, p->kv_a_norm, b->centered, s->rc, dc, false,
                                    dc, g->kv_a_norm, err));
    CKPT_CHECK(ENG(copy_columns)(e, T, b->RK, dc, b->RK, dkv_a, wide, err));
    CKPT_CHECK(ENG(linear_bwd)(e, T, b->H, wide, dkv_a, x, p->kv_a, add, dx, g->kv_a, NULL, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(mla_bwd)(ckpt_eng *e, const ckpt_eng_mla *b, const ckpt_eng_seq *seq,
                         const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                         const ENG(mla_saved) * s, const real *x, const real *dy, bool add,
                         real *dx, const ENG(mla_params) * grads, ckpt_err *err)
{
    int64_t T = ckpt_eng_tokens(seq), d = b->DN + b->DR;
    ckpt_eng_attention core = core_of(b);
    size_t mark = ckpt_eng_mark(e);
    real *d_o = ckpt_eng_take(e, T * b->N * b->DV, sizeof *d_o);
    real *dq = ckpt_eng_take(e, T * b->N * d, sizeof *dq);
    real *dk = ckpt_eng_take(e, T * b->N * d, sizeof *dk);
    real *dv = ckpt_eng_take(e, T * b->N * b->DV, sizeof *dv);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(check(b, p, err));
    CKPT_CHECK(output_bwd(e, b, T, p, s, x, dy, &add, dx, d_o, grads, err));
    CKPT_CHECK(ENG(attention_cut_bwd)(e, &core, seq, s->q, s->k, s->v, s->o, s->lse, d_o, dq, dk,
                                      dv, err));
    CKPT_CHECK(query_bwd(e, b, T, p, rope, s, x, dq, &add, dx, grads, err));
    CKPT_CHECK(latent_bwd(e, b, T, p, rope, s, x, dk, dv, add, dx, grads, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- decoding in latent space ---------------------------------------------------------------- */

#if !CKPT_ON_DEVICE

typedef struct decode_job {
    const ckpt_eng_mla *b;
    const ENG(mla_params) * p;
    const int64_t *len;
    const real *q, *cache;
    real *o, *scratch;
    int64_t room, per_worker;
    real scale;
} decode_job;

/* One head of one sequence. kv_b rows of a head: DN of the key, then DV of the value. */
static void decode_head(void *arg, int64_t item, int worker)
{
    const decode_job *j = arg;
    const ckpt_eng_mla *b = j->b;
    int64_t n = item / b->N, h = item % b->N, len = j->len[n] + 1, wide = b->RK + b->DR;
    const real *q = j->q + item * (b->DN + b->DR), *cache = j->cache + n * j->room * wide;
    const real *uk = j->p->kv_b + h * (b->DN + b->DV) * b->RK, *uv = uk + b->DN * b->RK;
    real *latent = j->scratch + worker * j->per_worker, *ctx = latent + wide, *p = ctx + b->RK;
    real top = (real)-INFINITY, sum = 0;
    ENG(gemm)(false, false, 1, b->RK, b->DN, 1, q, b->DN, uk, b->RK, 0, latent, b->RK);
    for (int64_t c = 0; c < b->DR; c++)
        latent[b->RK + c] = q[b->DN + c];
    ENG(gemm)(false, true, 1, len, wide, j->scale, latent, wide, cache, wide, 0, p, len);
    for (int64_t t = 0; t < len; t++)
        top = p[t] > top || p[t] != p[t] ? p[t] : top;
    for (int64_t t = 0; t < len; t++) {
        p[t] = (real)exp((double)(p[t] - top));
        sum += p[t];
    }
    for (int64_t t = 0; t < len; t++)
        p[t] /= sum;
    ENG(gemm)(false, false, 1, b->RK, len, 1, p, len, cache, wide, 0, ctx, b->RK);
    ENG(gemm)
    (false, true, 1, b->DV, b->RK, 1, ctx, b->RK, uv, b->RK, 0, j->o + item * b->DV, b->DV);
}

ckpt_status ENG(mla_decode)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t n_seq, int64_t room,
                            const int64_t *len, const ENG(mla_params) * p,
                            const ENG(rope_tables) * rope, const real *x, real *cache, real *y,
                            ckpt_err *err)
{
    int64_t out = b->N * b->DV, wide = b->RK + b->DR;
    size_t mark = ckpt_eng_mark(e);
    ENG(mla_saved) s;
    decode_job j = {.b = b, .p = p, .len = len, .cache = cache, .room = room};
    ckpt_status status;
    CKPT_CHECK(check(b, p, err));
    for (int64_t n = 0; n < n_seq && !e->dry; n++)
        if (len[n] < 0 || len[n] >= room)
            return ckpt_fail(err, CKPT_E_USAGE, "mla: %lld cached tokens, room for %lld",
                             (long long)len[n], (long long)room);
    CKPT_CHECK(ENG(mla_save)(e, b, n_seq, &s, err));
    j.per_worker = wide + b->RK + room;
    j.scratch = ckpt_eng_take(e, e->threads * j.per_worker, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(make_query(e, b, n_seq, p, rope, x, &s, err));
    CKPT_CHECK(make_latent(e, b, n_seq, p, rope, x, &s, err));
    j.q = s.q;
    j.o = s.o;
    j.scale = (real)scale_of(b);
    for (int64_t n = 0; n < n_seq && !e->dry; n++) {
        real *to = cache + (n * room + len[n]) * wide;
        memcpy(to, s.cn + n * b->RK, (size_t)b->RK * sizeof *to);
        memcpy(to + b->RK, s.kv_a + n * wide + b->RK, (size_t)b->DR * sizeof *to);
    }
    if (!e->dry)
        ckpt_eng_parallel(e, n_seq * b->N, decode_head, &j);
    if (gate_width(b) > 0) {
        CKPT_CHECK(ENG(linear)(e, n_seq, b->H, b->N * gate_width(b), x, b->H, p->gate, NULL, false,
                               s.gate, b->N * gate_width(b), err));
        CKPT_CHECK(apply_gate(e, b, n_seq, &s, s.o, err));
    }
    CKPT_CHECK(ENG(linear)(e, n_seq, out, b->H, s.o, out, p->o, NULL, false, y, b->H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

#endif
