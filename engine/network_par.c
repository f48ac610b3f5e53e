/* A network on several ranks: which part of what a rank has (par.h), gradients, whole tensors. */
#include "network_internal.h"

#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "device.h"

ckpt_status ENG(network_join)(ENG(network) * m, const ckpt_eng *e, ckpt_err *err)
{
    ckpt_eng_par *par = e->par;
    int64_t lo = ckpt_part_at(m->spec.V, par->tp, par->t);
    m->vocab = (ckpt_eng_range){lo, ckpt_part_at(m->spec.V, par->tp, par->t + 1) - lo};
    if (m->spec.V < par->tp)
        return ckpt_fail(err, CKPT_E_USAGE, "%lld tokens of vocabulary cannot be cut into %d parts",
                         (long long)m->spec.V, par->tp);
    for (int64_t i = 0; i < m->spec.n_blocks; i++) {
        const ckpt_eng_block *b = &m->spec.blocks[i];
        ckpt_eng_heads h;
        ckpt_status status = ckpt_eng_heads_of(b, par->tp, par->t, &h, err);
        if (status != CKPT_OK || h.shared) /* every such block has the same key heads */
            return status != CKPT_OK ? status
                                     : ckpt_comm_split(par->world, (int)h.keys.lo, &m->keys, err);
    }
    return CKPT_OK;
}

ckpt_comm *ENG(network_holders)(const ckpt_eng *e, ENG(network) * m, const ENG(param) * p)
{
    if (e->par == NULL)
        return NULL;
    switch (p->box.held) {
    case CKPT_ENG_HELD_TENSOR:
        return &e->par->replicas;
    case CKPT_ENG_HELD_KEYS:
        return &m->keys;
    case CKPT_ENG_HELD_EXPERT:
        return &e->par->expert_dup;
    case CKPT_ENG_HELD_ALL:
        break;
    }
    return e->par->world;
}

bool ENG(network_first)(const ckpt_eng *e, ENG(network) * m, const ENG(param) * p)
{
    const ckpt_comm *c = ENG(network_holders)(e, m, p);
    return p->n > 0 && (c == NULL || c->rank == 0);
}

ckpt_status ENG(network_sum_grads)(ckpt_eng *e, ENG(network) * m, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (e->par == NULL || m->grads == NULL)
        return CKPT_OK;
    for (size_t i = 0; i < m->n_params;) { /* neighbours that the same ranks hold go together */
        const ENG(param) *p = &m->params[i];
        ckpt_eng_held held = p->box.held;
        int64_t n = 0;
        const ENG(param) *first = NULL;
        for (; i < m->n_params && m->params[i].box.held == held; i++) {
            first = first == NULL && m->params[i].n > 0 ? &m->params[i] : first;
            if (m->params[i].n > 0) /* gaps that align parameters (a device's) hold zeros */
                n = m->params[i].at + m->params[i].n - first->at;
        }
        if (first != NULL)
            CKPT_CHECK(ckpt_comm_allreduce(ENG(network_holders)(e, m, first), COMM_WREAL,
                                           CKPT_COMM_SUM, m->grads + first->at, n, err));
    }
done:
    return status;
}

/* ---- whole tensors --------------------------------------------------------------------------- */

/* Rank of the run that is the first to hold what (t, x) = (r % tp, r % ep) holds? */
static bool first_holder(const ckpt_eng_par *par, const ckpt_eng_box *box, int rank,
                         const ckpt_eng_box *before)
{
    if (box->n == 0)
        return false;
    switch (box->held) {
    case CKPT_ENG_HELD_TENSOR:
        return rank < par->tp;
    case CKPT_ENG_HELD_KEYS: /* neighbours share */
        return rank < par->tp && (rank == 0 || memcmp(before->lo, box->lo, sizeof box->lo) != 0);
    case CKPT_ENG_HELD_EXPERT:
        return rank < par->ep;
    case CKPT_ENG_HELD_ALL:
        break;
    }
    return rank == 0;
}

/* Copy a row-major box into the whole, or out of it. */
static void copy_box(const ckpt_eng_box *b, const wreal *part, wreal *whole)
{
    int64_t at[CKPT_MAX_RANK] = {0}, inner = b->rank > 0 ? b->len[b->rank - 1] : 1;
    for (int64_t done = 0; done < b->n; done += inner) {
        int64_t to = 0;
        for (int i = 0; i < b->rank; i++)
            to = to * b->dims[i] + b->lo[i] + at[i];
        memcpy(whole + to, part + done, (size_t)inner * sizeof *whole);
        for (int i = b->rank - 2; i >= 0; i--) {
            if (++at[i] < b->len[i])
                break;
            at[i] = 0;
        }
    }
}

static ckpt_status place(const ckpt_eng_par *par, const ckpt_eng_box *boxes, const int64_t *counts,
                         const wreal *parts, wreal *out)
{
    for (int r = 0; r < par->world->size; r++) {
        if (counts[r] == 0)
            continue;
        copy_box(&boxes[r], parts, out);
        parts += counts[r];
    }
    return CKPT_OK;
}

ckpt_status ENG(network_gather)(ckpt_eng *e, ENG(network) * m, const ckpt_model *src,
                                const ENG(param) * p, const wreal *from, wreal *out, ckpt_err *err)
{
    ckpt_eng_par *par = e->par;
    ckpt_status status = CKPT_OK;
    if (par == NULL)
        return ckpt_eng_get(e, out, from, (size_t)p->n * sizeof *out, err);
    int size = par->world->size;
    ckpt_eng_box *boxes = calloc((size_t)size, sizeof *boxes);
    int64_t *counts = calloc((size_t)size * 2, sizeof *counts), total = 0;
    wreal *parts = NULL, *here = NULL; /* here: in this process's memory */
    if (boxes == NULL || counts == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", size);
        goto done;
    }
    int64_t *send = counts + size;
    for (int r = 0; r < size; r++) {
        CKPT_CHECK(ckpt_eng_box_of(&m->spec, &src->tensors[p->tensor], par, r % par->tp,
                                   r % par->ep, &boxes[r], err));
        bool sends = first_holder(par, &boxes[r], r, r > 0 ? &boxes[r - 1] : NULL);
        if (sends && par->world->rank == r)
            send[0] = boxes[r].n;
        if (sends && par->world->rank == 0)
            counts[r] = boxes[r].n;
        total += counts[r];
    }
    if (total > 0)
        CKPT_TRY(ckpt_eng_memory_new(e, total, sizeof *parts, (void **)(void *)&parts, err),
                 "tensor %s", p->name);
    CKPT_CHECK(ckpt_comm_alltoall(par->world, sizeof(wreal), from, send, parts, counts, err));
    if (par->world->rank != 0 || total == 0)
        goto done;
    here = e->device != NULL ? malloc((size_t)total * sizeof *here) : parts;
    if (here == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for tensor %s", p->name);
        goto done;
    }
    if (e->device != NULL)
        CKPT_CHECK(ckpt_eng_get(e, here, parts, (size_t)total * sizeof *here, err));
    status = place(par, boxes, counts, here, out);
done:
    if (here != parts)
        free(here);
    ckpt_eng_memory_free(e, parts);
    free(boxes);
    free(counts);
    return status;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

ENG(tokens) ENG(tokens_of)(const ckpt_eng *e, int64_t T, int64_t H)
{
    const ckpt_eng_par *par = e->par;
    ENG(tokens) out = {.T = T, .n = T, .cp_n = T};
    if (par == NULL)
        return out;
    out.over_tp = par->counts;
    out.over_model = par->counts + par->tp;
    ckpt_eng_range mine = ckpt_eng_tokens_of(par, T, par->c, par->t);
    out.lo = mine.lo;
    out.n = mine.n;
    out.cp_lo = ckpt_part_at(T, par->cp, par->c);
    out.cp_n = ckpt_part_at(T, par->cp, par->c + 1) - out.cp_lo;
    for (int c = 0; c < par->cp && !e->dry; c++)
        for (int t = 0; t < par->tp; t++) {
            int64_t n = ckpt_eng_tokens_of(par, T, c, t).n * H;
            out.over_model[c * par->tp + t] = n;
            if (c == par->c)
                out.over_tp[t] = n;
        }
    return out;
}

ckpt_status ENG(tokens_gather)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *x,
                               real *all, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_comm_allgather(c, sizeof(real), x, counts, all, err);
}

ckpt_status ENG(tokens_scatter)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *all,
                                real *x, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_comm_reduce_scatter(c, COMM_REAL, all, counts, x, err);
}

/* ---- shares ---------------------------------------------------------------------------------- */

/* Of matrices; their gradients are wreal in the fields of real (real.h). */
static void shift(real **p, bool gradient, int64_t by)
{
    if (*p != NULL)
        *p += by * (gradient ? (int64_t)(sizeof(wreal) / sizeof(real)) : 1);
}

static void shift_wide(wreal **p, int64_t by)
{
    if (*p != NULL)
        *p += by;
}

static void slice_linattn(const ckpt_eng_linattn *b, const ckpt_eng_heads *h, bool gradient,
                          ENG(linattn_params) * p)
{
    const ckpt_eng_delta *d = &b->delta;
    int64_t k = h->keys.lo * d->K, hv = h->queries.lo, v = hv * d->V;
    int64_t gates = b->key_gates ? h->keys.lo : hv;
    int64_t f = d->rule == CKPT_ENG_GDN ? gates : gates * d->K;
    int64_t erase = d->rule == CKPT_ENG_GDN2 ? gates * d->K : gates;
    shift(&p->q, gradient, k * b->D);
    shift(&p->k, gradient, k * b->D);
    shift(&p->v, gradient, v * b->D);
    shift_wide(&p->conv_q, k * b->W);
    shift_wide(&p->conv_k, k * b->W);
    shift_wide(&p->conv_v, v * b->W);
    shift(&p->f, gradient, f * b->D);
    shift(&p->f_b, gradient, f * b->f_rank);
    shift(&p->z, gradient, v * b->D);
    shift(&p->z_b, gradient, v * b->z_rank);
    shift_wide(&p->z_bias, v);
    shift(&p->erase, gradient, erase * b->D);
    shift(&p->write, gradient, v * b->D);
    shift_wide(&p->A_log, gates);
    shift_wide(&p->dt_bias, f);
}

static void slice_mla(const ckpt_eng_mla *b, const ckpt_eng_heads *h, bool gradient,
                      ENG(mla_params) * p)
{
    int64_t n = h->queries.lo;
    shift(&p->q, gradient, n * (b->DN + b->DR) * b->H);
    shift(&p->q_b, gradient, n * (b->DN + b->DR) * b->RQ);
    shift(&p->kv_b, gradient, n * (b->DN + b->DV) * b->RK);
    shift(&p->gate, gradient, n * (b->gate == CKPT_ENG_GATE_HEAD ? 1 : b->DV) * b->H);
}

static void slice_gqa(const ckpt_eng_gqa *b, const ckpt_eng_heads *h, bool gradient,
                      ENG(gqa_params) * p)
{
    const ckpt_eng_attention *a = &b->attn;
    shift(&p->q, gradient, h->queries.lo * a->DK * b->H);
    shift_wide(&p->q_bias, h->queries.lo * a->DK);
    shift(&p->k, gradient, h->keys.lo * a->DK * b->H);
    shift_wide(&p->k_bias, h->keys.lo * a->DK);
    shift(&p->v, gradient, h->keys.lo * a->DV * b->H);
    shift_wide(&p->v_bias, h->keys.lo * a->DV);
    shift(&p->gate, gradient, h->queries.lo * a->DV * b->H);
}

/* The output projection's place and the width of a head in it. */
static real **output_of(const ckpt_eng_block *b, ENG(block_params) * p, int64_t *width)
{
    if (b->kind == CKPT_ENG_LINATTN) {
        *width = b->u.linattn.delta.V;
        return &p->linattn.out;
    }
    *width = b->kind == CKPT_ENG_MLA ? b->u.mla.DV : b->u.gqa.attn.DV;
    return b->kind == CKPT_ENG_MLA ? &p->mla.o : &p->gqa.o;
}

static void slice(const ckpt_eng_block *b, const ckpt_eng_heads *h, bool gradient,
                  ENG(block_params) * p)
{
    if (b->kind == CKPT_ENG_LINATTN)
        slice_linattn(&b->u.linattn, h, gradient, &p->linattn);
    else if (b->kind == CKPT_ENG_MLA)
        slice_mla(&b->u.mla, h, gradient, &p->mla);
    else
        slice_gqa(&b->u.gqa, h, gradient, &p->gqa);
}

/* Do several context-parallel ranks share the heads of this block? */
static bool shares(const ckpt_eng_par *par, const ckpt_eng_block *b)
{
    return b->kind != CKPT_ENG_MLP && b->kind != CKPT_ENG_MOE && par->cp > 1 &&
           par->cp_mode == CKPT_ENG_CP_HEADS;
}

ckpt_status ENG(share_spec)(const ckpt_eng *e, const ENG(block) * k, ckpt_eng_block *out,
                            ckpt_err *err)
{
    ckpt_eng_heads h;
    *out = k->spec;
    if (!shares(e->par, out))
        return CKPT_OK;
    ckpt_status status = ckpt_eng_heads_of(&k->spec, e->par->cp, e->par->c, &h, err);
    if (status == CKPT_OK)
        *out = ckpt_eng_with_heads(&k->spec, &h);
    return status;
}

ckpt_status ENG(share_of)(ckpt_eng *e, const ENG(block) * k, bool gradients, ENG(share) * s,
                          ckpt_err *err)
{
    const ckpt_eng_par *par = e->par;
    const ckpt_eng_block *b = &k->spec;
    ckpt_eng_heads h;
    int64_t width, heads;
    *s = (ENG(share)){.spec = *b, .p = k->p, .g = k->g};
    if (!shares(par, b))
        return CKPT_OK;
    ckpt_status status = ckpt_eng_heads_of(b, par->cp, par->c, &h, err);
    if (status != CKPT_OK)
        return status;
    s->spec = ckpt_eng_with_heads(b, &h);
    slice(b, &h, false, &s->p);
    slice(b, &h, true, &s->g);
    real **out = output_of(b, &s->p, &width), **dout = output_of(b, &s->g, &width);
    heads = b->kind == CKPT_ENG_LINATTN ? b->u.linattn.delta.HV
            : b->kind == CKPT_ENG_MLA   ? b->u.mla.N
                                        : b->u.gqa.attn.N;
    s->rows = b->kind == CKPT_ENG_LINATTN ? b->u.linattn.D
              : b->kind == CKPT_ENG_MLA   ? b->u.mla.H
                                          : b->u.gqa.H;
    s->columns = heads * width;
    s->lo = h.queries.lo * width;
    s->len = h.queries.n * width;
    s->whole = *out;
    s->dwhole = (wreal *)(void *)*dout;
    s->part = ckpt_eng_take(e, s->rows * s->len, sizeof(real));
    s->dpart = gradients ? ckpt_eng_take(e, s->rows * s->len, sizeof(wreal)) : NULL;
    status = ckpt_eng_check(e, err);
    if (status != CKPT_OK || e->dry)
        return status;
    status =
        ENG(copy_columns)(e, s->rows, s->len, s->whole + s->lo, s->columns, s->part, s->len, err);
    if (status != CKPT_OK)
        return status;
    *out = s->part;
    *dout = (real *)(void *)s->dpart;
    return gradients ? ENG(zero_wide)(e, s->rows * s->len, s->dpart, err) : CKPT_OK;
}

ckpt_status ENG(share_add)(ckpt_eng *e, const ENG(share) * s, ckpt_err *err)
{
    if (s->dpart == NULL || s->dwhole == NULL)
        return CKPT_OK;
    return ENG(add_columns)(e, s->rows, s->len, s->dpart, s->len, s->dwhole + s->lo, s->columns,
                            err);
}
