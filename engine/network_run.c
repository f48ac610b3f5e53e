/* Forward and backward of a whole network.
 *
 * x_{b+1} = x_b + block_b(norm_b(x_b)). A block keeps what its backward needs on the arena's stack;
 * with recomputation it keeps its input alone and makes the rest again just before its backward, which
 * gives the same bits because every operation does. Multi-token prediction follows the trunk's final
 * norm: h_k = blocks([enorm(embed(ids shifted by k)) | hnorm(h_{k-1})] W^T), normed, the same head.
 * Source: mla-moe-math.md sections 5 and 6. */
#include "network_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "cut.h"
#include "graph.h"
#include "io.h"
#include "move.h"

typedef union saved {
    ENG(linattn_saved) linattn;
    ENG(mla_saved) mla;
    ENG(gqa_saved) gqa;
    ENG(mlp_saved) mlp;
    ENG(moe_saved) moe;
} saved;

typedef struct record {
    real *x;     /* input [T, H] */
    real *n;     /* normed input */
    wreal *rstd; /* statistics */
    real *all;   /* normed inputs of a group of ranks, where the block runs on those */
    saved s;
} record;

/* What a run finds out, one array in the arena. */
typedef struct results {
    ckpt_eng_result *all;
    int64_t n;
    ckpt_eng_result *bad;    /* a block: where its output is not finite (watch) */
    ckpt_eng_result *aux;    /* a block two: its side losses */
    ckpt_eng_result *loss;   /* of the trunk and of every depth: the mean, labelled tokens */
    ckpt_eng_result *counts; /* a block `experts`: tokens of every expert; or NULL */
    int64_t experts;
} results;

typedef struct pass {
    ckpt_eng *e;
    const ENG(network) * m;
    const ENG(batch) * batch;
    ENG(run) * run;
    ckpt_err *err;
    int64_t T;               /* tokens that this rank holds between blocks: where.n */
    ENG(tokens) where;       /* one process: all of them */
    const ckpt_eng_seq *seq; /* that blocks run on: the batch's, or this rank's parts of them */
    ENG(rope_tables) mla, gqa;
    record *records; /* one a block */
    wreal *weight;   /* of every token's loss */
    wreal *loss;
    const int32_t *ids, *labels; /* of the batch, then of the current depth of multi-token
                                    prediction; of all tokens */
    results out;
    ckpt_eng_result *host; /* out.all, in the memory of this process */
} pass;

static ckpt_status take_results(pass *p)
{
    const ckpt_eng_spec *spec = &p->m->spec;
    int64_t blocks = spec->n_blocks, depths = 1 + spec->mtp_layers;
    results *r = &p->out;
    *r = (results){.n = 3 * blocks + 2 * depths};
    for (int64_t i = 0; i < blocks && p->run->expert_counts != NULL; i++)
        if (spec->blocks[i].kind == CKPT_ENG_MOE)
            r->experts = ckpt_max_i64(r->experts, spec->blocks[i].u.moe.E);
    r->n += blocks * r->experts;
    r->all = ckpt_eng_take(p->e, r->n, sizeof *r->all);
    r->bad = r->all;
    r->aux = r->bad + blocks;
    r->loss = r->aux + 2 * blocks;
    r->counts = r->experts > 0 ? r->loss + 2 * depths : NULL;
    ckpt_status status = ckpt_eng_check(p->e, p->err);
    return status != CKPT_OK ? status : ENG(clear_results)(p->e, r->n, r->all, p->err);
}

/* ---- one block ------------------------------------------------------------------------------- */

/* The ranks whose tokens a block runs on together; comm NULL: this rank's alone. */
typedef struct group {
    ckpt_comm *comm;
    const int64_t *counts;
    int64_t T;
} group;

static group group_of(const pass *p, ckpt_eng_kind kind)
{
    ckpt_eng_par *par = p->e->par;
    bool mixer = kind != CKPT_ENG_MLP;
    if (par == NULL || kind == CKPT_ENG_MOE)
        return (group){.T = p->T};
    if (mixer && par->cp > 1 && par->cp_mode == CKPT_ENG_CP_HEADS)
        return (group){&par->model, p->where.over_model, p->where.T};
    return (group){par->tp > 1 ? &par->tensor : NULL, p->where.over_tp, p->where.cp_n};
}

static ckpt_status take_record(pass *p, int64_t i)
{
    const ENG(block) *k = &p->m->blocks[i];
    group g = group_of(p, k->spec.kind);
    ckpt_eng_block b = k->spec;
    record *r = &p->records[i];
    r->n = ckpt_eng_take(p->e, p->T * p->m->spec.H, sizeof(real));
    r->rstd = ckpt_eng_take(p->e, p->T, sizeof(wreal));
    r->all = r->n;
    if (g.comm != NULL)
        r->all = ckpt_eng_take(p->e, g.T * p->m->spec.H, sizeof(real));
    if (p->e->par != NULL) {
        ckpt_status status = ENG(share_spec)(p->e, k, &b, p->err);
        if (status != CKPT_OK)
            return status;
    }
    switch (b.kind) {
    case CKPT_ENG_LINATTN:
        return ENG(linattn_save)(p->e, &b.u.linattn, p->seq, &r->s.linattn, p->err);
    case CKPT_ENG_MLA:
        return ENG(mla_save)(p->e, &b.u.mla, g.T, &r->s.mla, p->err);
    case CKPT_ENG_GQA:
        return ENG(gqa_save)(p->e, &b.u.gqa, g.T, &r->s.gqa, p->err);
    case CKPT_ENG_MLP:
        return ENG(mlp_save)(p->e, &b.u.mlp, g.T, &r->s.mlp, p->err);
    case CKPT_ENG_MOE:
        return ENG(moe_save)(p->e, &b.u.moe, g.T, &r->s.moe, p->err);
    }
    return ckpt_fail(p->err, CKPT_E_INTERNAL, "block %lld has no kind", (long long)i);
}

/* y (+)= block(x) over T tokens. */
static ckpt_status forward_op(pass *p, int64_t i, const ckpt_eng_block *b,
                              const ENG(block_params) * w, int64_t T, const real *x, bool add,
                              real *y)
{
    const ckpt_eng_seq *seq = p->seq;
    saved *s = &p->records[i].s;
    switch (b->kind) {
    case CKPT_ENG_LINATTN:
        return ENG(linattn)(p->e, &b->u.linattn, seq, &w->linattn, x, add, y, NULL, &s->linattn,
                            p->err);
    case CKPT_ENG_MLA:
        return ENG(mla)(p->e, &b->u.mla, seq, &w->mla, &p->mla, x, add, y, &s->mla, p->err);
    case CKPT_ENG_GQA:
        return ENG(gqa)(p->e, &b->u.gqa, seq, &w->gqa, &p->gqa, x, add, y, &s->gqa, p->err);
    case CKPT_ENG_MLP:
        return ENG(mlp)(p->e, &b->u.mlp, T, &w->mlp, x, add, y, &s->mlp, p->err);
    case CKPT_ENG_MOE:
        return ENG(moe)(p->e, &b->u.moe, T, &w->moe, x, add, y, &s->moe, &p->out.aux[2 * i].d,
                        p->out.counts ? &p->out.counts[i * p->out.experts].i : NULL, p->err);
    }
    return CKPT_OK;
}

/* The same on several ranks: y [own tokens] += the sum of all ranks' heads. */
static ckpt_status forward_spread(pass *p, int64_t i, real *y)
{
    const ENG(block) *k = &p->m->blocks[i];
    record *r = &p->records[i];
    group g = group_of(p, k->spec.kind);
    int64_t H = p->m->spec.H;
    size_t mark = ckpt_eng_mark(p->e);
    ENG(share) share;
    ckpt_status status;
    CKPT_CHECK(ENG(share_of)(p->e, k, false, &share, p->err));
    if (g.comm == NULL) {
        status = forward_op(p, i, &share.spec, &share.p, g.T, r->n, true, y);
        goto done;
    }
    real *part = ckpt_eng_take(p->e, g.T * H, sizeof *part);
    real *own = ckpt_eng_take(p->e, p->T * H, sizeof *own);
    CKPT_CHECK(ckpt_eng_check(p->e, p->err));
    CKPT_CHECK(ENG(tokens_gather)(p->e, g.comm, g.counts, r->n, r->all, p->err));
    CKPT_CHECK(forward_op(p, i, &share.spec, &share.p, g.T, r->all, false, part));
    CKPT_CHECK(ENG(tokens_scatter)(p->e, g.comm, g.counts, part, own, p->err));
    CKPT_CHECK(ENG(add)(p->e, p->T * H, own, y, p->err));
done:
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* y += block(norm(x)). */
static ckpt_status block_forward(pass *p, int64_t i, real *y)
{
    const ENG(block) *k = &p->m->blocks[i];
    record *r = &p->records[i];
    ckpt_status status = ENG(rmsnorm)(p->e, p->T, p->m->spec.H, r->x, k->norm, p->m->spec.centered,
                                      p->m->spec.eps, r->n, r->rstd, p->err);
    if (status != CKPT_OK)
        return status;
    if (p->e->par != NULL)
        return forward_spread(p, i, y);
    return forward_op(p, i, &k->spec, &k->p, p->T, r->n, true, y);
}

/* dx, written, of dy; gradients are added to. */
static ckpt_status backward_op(pass *p, int64_t i, const ckpt_eng_block *b,
                               const ENG(block_params) * w, int64_t T, const real *x,
                               const real *dy, real *dx, const ENG(block_params) * grads)
{
    const ckpt_eng_seq *seq = p->seq;
    const saved *s = &p->records[i].s;
    /* Side losses are means over data-parallel ranks. */
    double side = p->e->par != NULL ? 1.0 / p->e->par->dp : 1;
    switch (b->kind) {
    case CKPT_ENG_LINATTN:
        return ENG(linattn_bwd)(p->e, &b->u.linattn, seq, &w->linattn, &s->linattn, x, dy, false,
                                dx, &grads->linattn, p->err);
    case CKPT_ENG_MLA:
        return ENG(mla_bwd)(p->e, &b->u.mla, seq, &w->mla, &p->mla, &s->mla, x, dy, false, dx,
                            &grads->mla, p->err);
    case CKPT_ENG_GQA:
        return ENG(gqa_bwd)(p->e, &b->u.gqa, seq, &w->gqa, &p->gqa, &s->gqa, x, dy, false, dx,
                            &grads->gqa, p->err);
    case CKPT_ENG_MLP:
        return ENG(mlp_bwd)(p->e, &b->u.mlp, T, &w->mlp, &s->mlp, x, dy, false, dx, &grads->mlp,
                            p->err);
    case CKPT_ENG_MOE:
        return ENG(moe_bwd)(p->e, &b->u.moe, T, &w->moe, &s->moe, x, dy, side, false, dx,
                            &grads->moe, p->err);
    }
    return CKPT_OK;
}

static ckpt_status backward_spread(pass *p, int64_t i, const real *dx, real *dn)
{
    const ENG(block) *k = &p->m->blocks[i];
    const record *r = &p->records[i];
    group g = group_of(p, k->spec.kind);
    int64_t H = p->m->spec.H;
    size_t mark = ckpt_eng_mark(p->e);
    ENG(share) share;
    ckpt_status status;
    CKPT_CHECK(ENG(share_of)(p->e, k, true, &share, p->err));
    if (g.comm == NULL) {
        CKPT_CHECK(backward_op(p, i, &share.spec, &share.p, g.T, r->n, dx, dn, &share.g));
    } else {
        real *dall = ckpt_eng_take(p->e, g.T * H, sizeof *dall);
        real *part = ckpt_eng_take(p->e, g.T * H, sizeof *part);
        CKPT_CHECK(ckpt_eng_check(p->e, p->err));
        CKPT_CHECK(ENG(tokens_gather)(p->e, g.comm, g.counts, dx, dall, p->err));
        CKPT_CHECK(backward_op(p, i, &share.spec, &share.p, g.T, r->all, dall, part, &share.g));
        CKPT_CHECK(ENG(tokens_scatter)(p->e, g.comm, g.counts, part, dn, p->err));
    }
    CKPT_CHECK(ENG(share_add)(p->e, &share, p->err));
done:
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* dx [T, H], the gradient of the block's output, becomes that of its input. */
static ckpt_status block_backward(pass *p, int64_t i, real *dx)
{
    const ENG(block) *k = &p->m->blocks[i];
    const record *r = &p->records[i];
    int64_t H = p->m->spec.H;
    size_t mark = ckpt_eng_mark(p->e);
    real *dn = ckpt_eng_take(p->e, p->T * H, sizeof *dn);
    ckpt_status status = ckpt_eng_check(p->e, p->err);
    if (status == CKPT_OK && p->e->par != NULL)
        status = backward_spread(p, i, dx, dn);
    else if (status == CKPT_OK)
        status = backward_op(p, i, &k->spec, &k->p, p->T, r->n, dx, dn, &k->g);
    if (status == CKPT_OK)
        status = ENG(rmsnorm_bwd)(p->e, p->T, H, r->x, k->norm, p->m->spec.centered, r->rstd, dn,
                                  true, dx, k->dnorm, p->err);
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* Ranks stop together, between steps: the caller's to agree on. */
static ckpt_status interrupted(const pass *p)
{
    if (p->e->par != NULL)
        return CKPT_OK;
    if (p->e->stop != NULL && __atomic_load_n(p->e->stop, __ATOMIC_RELAXED) != 0)
        return ckpt_fail(p->err, CKPT_E_INTERRUPTED, "interrupted");
    return ckpt_check_interrupted(p->err);
}

/* Which token it is in the batch is known where one process has all of them. */
static ckpt_status refuse_output(const pass *p, int64_t i, ckpt_eng_result bad)
{
    char where[96] = "";
    int64_t H = p->m->spec.H, at = (bad.i - 1) / 2;
    if (p->e->par == NULL)
        snprintf(where, sizeof where, ", first of token %lld, channel %lld (%s)",
                 (long long)(at / H), (long long)(at % H), bad.i % 2 == 0 ? "nan" : "infinite");
    return ckpt_fail(p->err, CKPT_E_MISMATCH, "block %lld (%c): output is not finite%s",
                     (long long)i, p->m->blocks[i].spec.letter, where);
}

/* Blocks lo..hi-1 from x to *out. What backward needs stays on the stack. */
static ckpt_status blocks_forward(pass *p, int64_t lo, int64_t hi, real *x, real **out)
{
    int64_t H = p->m->spec.H;
    ckpt_status status = CKPT_OK;
    real *before = NULL; /* without a backward two arrays take turns */
    for (int64_t i = lo; i < hi; i++) {
        bool reuse = !p->run->backward && before != NULL;
        p->records[i].x = x;
        CKPT_CHECK(interrupted(p));
        real *y = reuse ? before : ckpt_eng_take(p->e, p->T * H, sizeof *y);
        before = i > lo ? x : NULL; /* the first is the caller's */
        size_t mark = ckpt_eng_mark(p->e);
        CKPT_CHECK(take_record(p, i));
        CKPT_CHECK(ENG(copy)(p->e, p->T * H, x, y, p->err));
        CKPT_CHECK(block_forward(p, i, y));
        if (p->run->recompute || !p->run->backward)
            ckpt_eng_drop(p->e, mark);
        CKPT_CHECK(ENG(watch)(p->e, p->T * H, y, &p->out.bad[i], p->err));
        if (!CKPT_ON_DEVICE && !p->e->dry && p->out.bad[i].i != 0) {
            status = refuse_output(p, i, p->out.bad[i]); /* a device's are seen at the end */
            goto done;
        }
        x = y;
    }
    *out = x;
done:
    return status;
}

static ckpt_status blocks_backward(pass *p, int64_t lo, int64_t hi, real *dx)
{
    ckpt_status status = CKPT_OK;
    for (int64_t i = hi; i-- > lo;) {
        size_t mark = ckpt_eng_mark(p->e);
        CKPT_CHECK(interrupted(p));
        if (p->run->recompute) {
            CKPT_CHECK(take_record(p, i));
            real *again = ckpt_eng_take(p->e, p->T * p->m->spec.H, sizeof *again);
            CKPT_CHECK(ckpt_eng_check(p->e, p->err));
            CKPT_CHECK(ENG(copy)(p->e, p->T * p->m->spec.H, p->records[i].x, again, p->err));
            CKPT_CHECK(block_forward(p, i, again)); /* the same results once more */
        }
        CKPT_CHECK(block_backward(p, i, dx));
        ckpt_eng_drop(p->e, mark);
    }
done:
    return status;
}

/* ---- head and loss --------------------------------------------------------------------------- */

/* Mean loss of h [T, H] (normed) through the head, into loss[0], labelled tokens into loss[1]; dh written
 * when there is a backward. `share` multiplies its gradients. */
static ckpt_status head_loss(pass *p, const real *h, const int32_t *labels, double share,
                             wreal *logits, real *dh, ckpt_eng_result *loss)
{
    int64_t H = p->m->spec.H, V = p->m->spec.V;
    bool backward = p->run->backward && labels != NULL;
    size_t mark = ckpt_eng_mark(p->e);
    ckpt_status status;
    if (p->e->par != NULL)
        return ENG(vocab_loss)(p->e, p->m, &p->where, h, labels, share, logits,
                               backward ? dh : NULL, loss, p->err);
    real *z = ckpt_eng_take(p->e, p->T * V, sizeof *z);
    CKPT_CHECK(ckpt_eng_check(p->e, p->err));
    CKPT_CHECK(ENG(linear)(p->e, p->T, H, V, h, H, p->m->head, NULL, false, z, V, p->err));
    if (logits != NULL)
        CKPT_CHECK(ENG(fetch)(p->e, p->T * V, z, logits, p->err));
    if (labels == NULL)
        goto done;
    CKPT_CHECK(ENG(loss_weights)(p->e, p->T, labels, share, p->weight, &loss[1], p->err));
    CKPT_CHECK(
        ENG(xent)(p->e, p->T, V, z, labels, p->weight, p->loss, backward ? z : NULL, p->err));
    CKPT_CHECK(ENG(mean_loss)(p->e, p->T, p->loss, &loss[1], &loss[0], p->err));
    if (backward) {
        CKPT_CHECK(ENG(linear_dw)(p->e, p->T, H, V, z, V, h, H, p->m->dhead, NULL, p->err));
        CKPT_CHECK(ENG(linear_dx)(p->e, p->T, H, V, z, V, p->m->head, false, dh, H, p->err));
    }
done:
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* ---- embedding ------------------------------------------------------------------------------- */

/* x [own tokens, H] of ids [all tokens]. */
static ckpt_status embed(pass *p, const int32_t *ids, real *x)
{
    const ENG(network) *m = p->m;
    if (p->e->par != NULL)
        return ENG(vocab_embed)(p->e, m, &p->where, ids, x, p->err);
    return ENG(embed)(p->e, p->T, m->spec.V, m->spec.H, ids, m->embed, x, p->err);
}

static ckpt_status embed_bwd(pass *p, const int32_t *ids, const real *dx)
{
    const ENG(network) *m = p->m;
    if (p->e->par != NULL)
        return ENG(vocab_embed_bwd)(p->e, m, &p->where, ids, dx, p->err);
    return ENG(embed_bwd)(p->e, p->T, m->spec.V, m->spec.H, ids, dx, m->dembed, p->err);
}

/* ---- multi-token prediction ------------------------------------------------------------------ */

typedef struct depth {
    real *e, *en, *hn, *cat, *x, *y, *out; /* forward, kept */
    wreal *re, *rh, *rout;
} depth;

static ckpt_status depth_forward(pass *p, int64_t d, int64_t lo, int64_t hi, const real *h,
                                 depth *k)
{
    const ENG(network) *m = p->m;
    const ENG(mtp_depth) *w = &m->mtp[d];
    int64_t H = m->spec.H, T = p->T;
    ckpt_status status;
    real **takes[] = {&k->e, &k->en, &k->hn, &k->x, &k->out};
    for (int i = 0; i < 5; i++)
        *takes[i] = ckpt_eng_take(p->e, T * H, sizeof(real));
    k->re = ckpt_eng_take(p->e, T, sizeof(wreal));
    k->rh = ckpt_eng_take(p->e, T, sizeof(wreal));
    k->rout = ckpt_eng_take(p->e, T, sizeof(wreal));
    k->cat = ckpt_eng_take(p->e, T * 2 * H, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(p->e, p->err));
    CKPT_CHECK(embed(p, p->ids, k->e));
    CKPT_CHECK(ENG(rmsnorm)(p->e, T, H, k->e, w->enorm, m->spec.centered, m->spec.eps, k->en, k->re,
                            p->err));
    CKPT_CHECK(
        ENG(rmsnorm)(p->e, T, H, h, w->hnorm, m->spec.centered, m->spec.eps, k->hn, k->rh, p->err));
    CKPT_CHECK(ENG(copy_columns)(p->e, T, H, k->en, H, k->cat, 2 * H, p->err));
    CKPT_CHECK(ENG(copy_columns)(p->e, T, H, k->hn, H, k->cat + H, 2 * H, p->err));
    CKPT_CHECK(
        ENG(linear)(p->e, T, 2 * H, H, k->cat, 2 * H, w->eh_proj, NULL, false, k->x, H, p->err));
    CKPT_CHECK(blocks_forward(p, lo, hi, k->x, &k->y));
    CKPT_CHECK(ENG(rmsnorm)(p->e, T, H, k->y, w->norm, m->spec.centered, m->spec.eps, k->out,
                            k->rout, p->err));
done:
    return status;
}

/* dout, the gradient of the depth's output (written over), to that of h, which is added to dh. */
static ckpt_status depth_backward(pass *p, int64_t d, int64_t lo, int64_t hi, const real *h,
                                  const depth *k, real *dout, real *dh)
{
    const ENG(network) *m = p->m;
    const ENG(mtp_depth) *w = &m->mtp[d];
    int64_t H = m->spec.H, T = p->T;
    size_t mark = ckpt_eng_mark(p->e);
    real *dcat = ckpt_eng_take(p->e, T * 2 * H, sizeof *dcat);
    real *half = ckpt_eng_take(p->e, T * H, sizeof *half);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(p->e, p->err));
    CKPT_CHECK(ENG(rmsnorm_bwd)(p->e, T, H, k->y, w->norm, m->spec.centered, k->rout, dout, false,
                                dout, w->dnorm, p->err));
    CKPT_CHECK(blocks_backward(p, lo, hi, dout));
    CKPT_CHECK(
        ENG(linear_dw)(p->e, T, 2 * H, H, dout, H, k->cat, 2 * H, w->deh_proj, NULL, p->err));
    CKPT_CHECK(ENG(linear_dx)(p->e, T, 2 * H, H, dout, H, w->eh_proj, false, dcat, 2 * H, p->err));
    CKPT_CHECK(ENG(copy_columns)(p->e, T, H, dcat, 2 * H, half, H, p->err));
    CKPT_CHECK(ENG(rmsnorm_bwd)(p->e, T, H, k->e, w->enorm, m->spec.centered, k->re, half, false,
                                half, w->denorm, p->err));
    CKPT_CHECK(embed_bwd(p, p->ids, half));
    CKPT_CHECK(ENG(copy_columns)(p->e, T, H, dcat + H, 2 * H, half, H, p->err));
    CKPT_CHECK(ENG(rmsnorm_bwd)(p->e, T, H, h, w->hnorm, m->spec.centered, k->rh, half, true, dh,
                                w->dhnorm, p->err));
done:
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* Depths d.. on h: their losses, and their gradient of h added to dh. */
static ckpt_status depths(pass *p, int64_t d, const real *h, real *dh)
{
    const ckpt_eng_spec *s = &p->m->spec;
    int64_t per = (s->n_blocks - s->main_blocks) / s->mtp_layers, lo = s->main_blocks + d * per;
    double share = p->run->mtp_coef / (double)s->mtp_layers;
    size_t mark = ckpt_eng_mark(p->e);
    depth k;
    ckpt_status status;
    real *dout = ckpt_eng_take(p->e, p->T * s->H, sizeof *dout);
    int32_t *ids = ckpt_eng_take(p->e, p->where.T, sizeof *ids);
    int32_t *labels = ckpt_eng_take(p->e, p->where.T, sizeof *labels);
    CKPT_CHECK(ckpt_eng_check(p->e, p->err));
    CKPT_CHECK(ENG(shift_tokens)(p->e, p->batch->seq, 0, p->ids, ids, p->err));
    CKPT_CHECK(ENG(shift_tokens)(p->e, p->batch->seq, -1, p->labels, labels, p->err));
    p->ids = ids;
    p->labels = labels;
    CKPT_CHECK(depth_forward(p, d, lo, lo + per, h, &k));
    CKPT_CHECK(head_loss(p, k.out, labels, share, NULL, dout, &p->out.loss[2 * (d + 1)]));
    if (d + 1 < s->mtp_layers)
        CKPT_CHECK(depths(p, d + 1, k.out, dout));
    p->ids = ids;
    p->labels = labels;
    if (p->run->backward)
        CKPT_CHECK(depth_backward(p, d, lo, lo + per, h, &k, dout, dh));
done:
    ckpt_eng_drop(p->e, mark);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static ckpt_status make_tables(pass *p)
{
    const ckpt_eng_spec *s = &p->m->spec;
    const ckpt_eng_rope *ropes[] = {&s->rope_mla, &s->rope_gqa};
    ENG(rope_tables) * out[] = {&p->mla, &p->gqa};
    for (int i = 0; i < 2; i++) {
        if (ropes[i]->kind == CKPT_ENG_ROPE_NONE)
            continue;
        wreal *cos = ckpt_eng_take(p->e, p->where.T * ropes[i]->dim / 2, sizeof *cos);
        wreal *sin = ckpt_eng_take(p->e, p->where.T * ropes[i]->dim / 2, sizeof *sin);
        ckpt_status status = ckpt_eng_check(p->e, p->err);
        if (status == CKPT_OK)
            status = ENG(rope_table)(p->e, ropes[i], p->batch->seq, NULL, cos, sin, p->err);
        if (status != CKPT_OK)
            return status;
        /* rows of the tokens that blocks run on */
        int64_t skip = p->e->dry || p->seq == p->batch->seq ? 0 : p->where.cp_lo;
        skip *= ropes[i]->dim / 2;
        *out[i] = (ENG(rope_tables)){cos + skip, sin + skip};
    }
    return CKPT_OK;
}

/* Results to the caller, once all of it has run. */
static ckpt_status report(pass *p)
{
    const results *r = &p->out;
    const ckpt_eng_spec *spec = &p->m->spec;
    ENG(run) *run = p->run;
    ckpt_status status = ENG(fetch_results)(p->e, r->n, r->all, p->host, p->err);
    if (status != CKPT_OK || p->e->dry)
        return status;
    const ckpt_eng_result *aux = p->host + (r->aux - r->all), *loss = p->host + (r->loss - r->all);
    for (int64_t i = 0; i < spec->n_blocks; i++) {
        if (CKPT_ON_DEVICE && p->host[i].i != 0)
            return refuse_output(p, i, p->host[i]);
        run->aux_loss += aux[2 * i].d;
        run->z_loss += aux[2 * i + 1].d;
    }
    run->loss = loss[0].d;
    for (int64_t d = 0; d < spec->mtp_layers; d++)
        run->mtp_loss += run->mtp_coef / (double)spec->mtp_layers * loss[2 * (d + 1)].d;
    for (int64_t i = 0; i < spec->n_blocks && r->counts != NULL; i++)
        for (int64_t k = 0; spec->blocks[i].kind == CKPT_ENG_MOE && k < spec->blocks[i].u.moe.E;
             k++)
            run->expert_counts[i * spec->blocks[i].u.moe.E + k] =
                p->host[r->counts - r->all + i * r->experts + k].i;
    return CKPT_OK;
}

static ckpt_status bring_batch(pass *p)
{
    int64_t V = p->m->spec.V;
    ckpt_status status =
        ENG(bring_tokens)(p->e, p->where.T, V, true, p->batch->ids, &p->ids, p->err);
    if (status == CKPT_OK)
        status =
            ENG(bring_tokens)(p->e, p->where.T, V, false, p->batch->labels, &p->labels, p->err);
    return status;
}

/* What every later part of a run reads and writes, taken before its sizes alone decide the rest. */
typedef struct trunk {
    pass *p;
    real *x, *h, *dh; /* [T, H] */
    wreal *rstd;
} trunk;

/* From tokens to gradients: on a device nothing here waits, or reads this process's numbers. */
static ckpt_status run_trunk(void *self, ckpt_err *err)
{
    const trunk *k = self;
    pass *p = k->p;
    const ENG(network) *m = p->m;
    int64_t H = m->spec.H, T = p->T;
    const int32_t *ids = p->ids, *labels = p->labels;
    real *out = NULL, *h = k->h, *dh = k->dh;
    ckpt_err *outer = p->err;
    ckpt_status status;
    p->err = err;
    CKPT_CHECK(embed(p, ids, k->x));
    CKPT_CHECK(blocks_forward(p, 0, m->spec.main_blocks, k->x, &out));
    CKPT_CHECK(ENG(rmsnorm)(p->e, T, H, out, m->final_norm, m->spec.centered, m->spec.eps, h,
                            k->rstd, p->err));
    CKPT_CHECK(head_loss(p, h, labels, 1, p->run->logits, dh, p->out.loss));
    if (m->spec.mtp_layers > 0 && p->run->mtp_coef != 0 && labels != NULL)
        CKPT_CHECK(depths(p, 0, h, dh));
    if (!p->run->backward)
        goto done;
    CKPT_CHECK(ENG(rmsnorm_bwd)(p->e, T, H, out, m->final_norm, m->spec.centered, k->rstd, dh,
                                false, dh, m->dfinal_norm, p->err));
    CKPT_CHECK(blocks_backward(p, 0, m->spec.main_blocks, dh));
    CKPT_CHECK(embed_bwd(p, ids, dh));
done:
    p->err = outer;
    p->ids = ids; /* depths of multi-token prediction moved on */
    p->labels = labels;
    return status;
}

/* Runs that queue the same work: of one network at one level of the arena, sequences of one length - of
 * others the recurrence's division into chunks is a table of this process's. A run that brings logits waits
 * for them. */
static bool repeats(const pass *p, ckpt_eng_graph_key *key)
{
    static const char name[] = "forward and backward";
    const ckpt_eng_seq *seq = p->batch->seq;
    const ENG(run) *run = p->run;
    const int64_t len = seq->n > 0 ? seq->cu[1] : 0;
    double coef = run->mtp_coef;
    if (!CKPT_ON_DEVICE || p->e->graphs == NULL || p->e->par != NULL || run->logits != NULL)
        return false;
    for (int64_t i = 0; i < seq->n; i++)
        if (seq->cu[i + 1] - seq->cu[i] != len)
            return false;
    *key = (ckpt_eng_graph_key){.piece = name};
    int64_t n[] = {(int64_t)(intptr_t)p->m,   seq->n,        len,
                   p->batch->labels != NULL,  run->backward, run->recompute,
                   run->expert_counts != NULL};
    memcpy(key->n, n, sizeof n);
    memcpy(&key->n[sizeof n / sizeof n[0]], &coef, sizeof coef);
    return true;
}

static ckpt_status run_all(pass *p)
{
    int64_t H = p->m->spec.H, T = p->T;
    ckpt_eng_graph_key key;
    ckpt_status status;
    trunk k = {.p = p};
    k.x = ckpt_eng_take(p->e, T * H, sizeof *k.x);
    k.h = ckpt_eng_take(p->e, T * H, sizeof *k.h);
    k.dh = p->run->backward ? ckpt_eng_take(p->e, T * H, sizeof *k.dh) : NULL;
    k.rstd = ckpt_eng_take(p->e, T, sizeof *k.rstd);
    p->weight = ckpt_eng_take(p->e, T, sizeof(wreal));
    p->loss = ckpt_eng_take(p->e, T, sizeof(wreal));
    CKPT_CHECK(take_results(p));
    CKPT_CHECK(ENG(bring_seq)(p->e, p->seq, p->err));
    if (p->seq != p->batch->seq)
        CKPT_CHECK(ENG(bring_cut)(p->e, p->e->par->cut, p->err));
    CKPT_CHECK(bring_batch(p));
    CKPT_CHECK(make_tables(p));
    status = repeats(p, &key) ? ckpt_eng_graph_run(p->e, &key, run_trunk, &k, p->err)
                              : run_trunk(&k, p->err);
done:
    return status;
}

ckpt_status ENG(network_run)(ckpt_eng *e, const ENG(network) * m, const ENG(batch) * batch,
                             ENG(run) * run, ckpt_err *err)
{
    pass p = {.e = e, .m = m, .batch = batch, .run = run, .err = err};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status = ckpt_eng_seq_check(batch->seq, err);
    if (status != CKPT_OK)
        return status;
    if (run->backward && (batch->labels == NULL || m->grads == NULL))
        return ckpt_fail(err, CKPT_E_USAGE, "a backward needs labels and room for gradients");
    p.where = ENG(tokens_of)(e, ckpt_eng_tokens(batch->seq), m->spec.H);
    p.T = p.where.n;
    p.seq = batch->seq;
    ckpt_eng_cut cut = {0};
    if (e->par != NULL && e->par->cp > 1 && e->par->cp_mode == CKPT_ENG_CP_CHUNKS) {
        status = ckpt_eng_cut_of(e, batch->seq, &cut, err);
        if (status != CKPT_OK)
            return status;
        p.seq = &cut.own;
        e->par->cut = &cut;
    }
    run->loss = run->mtp_loss = run->aux_loss = run->z_loss = 0;
    p.records = calloc((size_t)m->spec.n_blocks + 1, sizeof *p.records);
    if (p.records == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for blocks");
    else
        status = run_all(&p);
    if (status == CKPT_OK && (p.host = calloc((size_t)p.out.n + 1, sizeof *p.host)) == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for results");
    if (status == CKPT_OK)
        status = report(&p);
    if (status == CKPT_OK && e->par != NULL && !e->dry)
        status = ENG(sum_side_losses)(e, m, run, err);
    free(p.records);
    free(p.host);
    if (e->par != NULL)
        e->par->cut = NULL;
    ckpt_eng_cut_free(&cut);
    ckpt_eng_drop(e, mark);
    return status;
}
