/* Building a network: parameters from the checkpoint, and pointers of every block to its own. */
#include "network_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "device.h"
#include "plan.h"

/* ---- binding --------------------------------------------------------------------------------- */

/* Field of a block's parameters by the rest of its canonical name. */
typedef struct slot {
    const char *rest;
    size_t offset;
    bool needed;
    bool wide; /* wreal: f32 whatever the products read */
} slot;

/* Of fields of either type: on a CPU they are one, and nothing asks. */
#define SLOT(params, rest, field, needed)                                                          \
    {                                                                                              \
        rest, offsetof(ENG(params), field), needed,                                                \
            _Generic(((ENG(params) *)NULL)->field, wreal *                                         \
                     : true, default                                                               \
                     : false)                                                                      \
    }
#define LIN(rest, field, needed) SLOT(linattn_params, rest, field, needed)
#define MLA(rest, field, needed) SLOT(mla_params, rest, field, needed)
#define GQA(rest, field, needed) SLOT(gqa_params, rest, field, needed)

static const slot kda_slots[] = {
    LIN("q.weight", q, true),
    LIN("k.weight", k, true),
    LIN("v.weight", v, true),
    LIN("conv_q.weight", conv_q, true),
    LIN("conv_k.weight", conv_k, true),
    LIN("conv_v.weight", conv_v, true),
    LIN("f.weight", f, false),
    LIN("f_a.weight", f_a, false),
    LIN("f_b.weight", f_b, false),
    LIN("g.weight", z, false),
    LIN("g_a.weight", z_a, false),
    LIN("g_b.weight", z_b, false),
    LIN("g_b.bias", z_bias, false),
    LIN("beta.weight", erase, true),
    LIN("A_log", A_log, true),
    LIN("dt_bias", dt_bias, true),
    LIN("o_norm.weight", norm, true),
    LIN("o.weight", out, true),
    {NULL, 0, false, false},
};

static const slot gdn_slots[] = {
    LIN("q.weight", q, true),
    LIN("k.weight", k, true),
    LIN("v.weight", v, true),
    LIN("conv_q.weight", conv_q, true),
    LIN("conv_k.weight", conv_k, true),
    LIN("conv_v.weight", conv_v, true),
    LIN("z.weight", z, true),
    LIN("alpha.weight", f, false), /* GDN */
    LIN("beta.weight", erase, false),
    LIN("f.weight", f, false), /* GDN2 */
    LIN("b.weight", erase, false),
    LIN("w.weight", write, false),
    LIN("A_log", A_log, true),
    LIN("dt_bias", dt_bias, true),
    LIN("o_norm.weight", norm, true),
    LIN("o.weight", out, true),
    {NULL, 0, false, false},
};

static const slot mla_slots[] = {
    MLA("q.weight", q, false),
    MLA("q_a.weight", q_a, false),
    MLA("q_a_norm.weight", q_a_norm, false),
    MLA("q_b.weight", q_b, false),
    MLA("kv_a.weight", kv_a, true),
    MLA("kv_a_norm.weight", kv_a_norm, false),
    MLA("kv_b.weight", kv_b, true),
    MLA("gate.weight", gate, false),
    MLA("o.weight", o, true),
    {NULL, 0, false, false},
};

static const slot gqa_slots[] = {
    GQA("q.weight", q, true),
    GQA("k.weight", k, true),
    GQA("v.weight", v, true),
    GQA("q.bias", q_bias, false),
    GQA("k.bias", k_bias, false),
    GQA("v.bias", v_bias, false),
    GQA("gate.weight", gate, false),
    GQA("q_norm.weight", q_norm, false),
    GQA("k_norm.weight", k_norm, false),
    GQA("o.weight", o, true),
    {NULL, 0, false, false},
};

typedef struct binder {
    ENG(network) * m;
    bool *used; /* per parameter */
    const ckpt_eng_par *par;
    ckpt_err *err;
} binder;

static int64_t find_param(const ENG(network) * m, const char *name)
{
    size_t lo = 0, hi = m->n_params;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(m->params[mid].name, name);
        if (order == 0)
            return (int64_t)mid;
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return -1;
}

const ENG(param) * ENG(network_param)(const ENG(network) * m, const char *name)
{
    int64_t i = find_param(m, name);
    return i >= 0 ? &m->params[i] : NULL;
}

/* Point *x and *grad (or NULL), pointers to real or, when `wide`, to wreal, at the parameter. */
static ckpt_status bind_any(binder *b, const char *name, bool needed, bool wide, void *x,
                            void *grad)
{
    int64_t i = find_param(b->m, name);
    if (i < 0)
        return needed ? ckpt_fail(b->err, CKPT_E_FORMAT, "missing tensor %s", name) : CKPT_OK;
    const ENG(param) *p = &b->m->params[i];
    if (sizeof(real) != sizeof(wreal) && p->wide != wide)
        return ckpt_fail(b->err, CKPT_E_INTERNAL, "tensor %s has another type than its use", name);
    memcpy(x, &p->x, sizeof p->x);
    if (grad != NULL)
        memcpy(grad, &p->grad, sizeof p->grad);
    b->used[i] = true;
    return CKPT_OK;
}

static ckpt_status bind_one(binder *b, const char *name, bool needed, real **x, real **grad)
{
    return bind_any(b, name, needed, false, x, grad);
}

static ckpt_status bind_wide(binder *b, const char *name, bool needed, wreal **x, wreal **grad)
{
    return bind_any(b, name, needed, true, x, grad);
}

static ckpt_status bind_slots(binder *b, const slot *slots, const char *prefix, void *p, void *g)
{
    char name[200];
    for (const slot *s = slots; s->rest != NULL; s++) {
        snprintf(name, sizeof name, "%s.%s", prefix, s->rest);
        ckpt_status status =
            bind_any(b, name, s->needed, s->wide, (char *)p + s->offset, (char *)g + s->offset);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status bind_mlp(binder *b, const char *prefix, bool gated, ENG(mlp_params) * p,
                            ENG(mlp_params) * g)
{
    static const char *const rest[] = {"gate.weight", "up.weight", "down.weight"};
    real **x[] = {&p->gate, &p->up, &p->down}, **grad[] = {&g->gate, &g->up, &g->down};
    char name[240];
    for (int i = gated ? 0 : 1; i < 3; i++) {
        snprintf(name, sizeof name, "%s.%s", prefix, rest[i]);
        ckpt_status status = bind_one(b, name, true, x[i], grad[i]);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status bind_moe(binder *b, const char *prefix, const ckpt_eng_moe *m, ENG(block) * k)
{
    char name[200];
    ckpt_status status;
    ENG(moe_params) *p = &k->p.moe, *g = &k->g.moe;
    p->experts = ckpt_arena_array(&b->m->spec.arena, (size_t)m->E, sizeof *p->experts);
    g->experts = ckpt_arena_array(&b->m->spec.arena, (size_t)m->E, sizeof *g->experts);
    if (p->experts == NULL || g->experts == NULL)
        return ckpt_fail(b->err, CKPT_E_NOMEM, "out of memory for %lld experts", (long long)m->E);
    memset(p->experts, 0, (size_t)m->E * sizeof *p->experts);
    memset(g->experts, 0, (size_t)m->E * sizeof *g->experts);
    snprintf(name, sizeof name, "%s.router.weight", prefix);
    CKPT_CHECK(bind_wide(b, name, true, &p->router, &g->router));
    snprintf(name, sizeof name, "%s.router.bias", prefix);
    CKPT_CHECK(bind_wide(b, name, false, &p->router_bias, NULL));
    for (int64_t e = 0; e < m->E; e++) {
        snprintf(name, sizeof name, "%s.experts.%lld", prefix, (long long)e);
        CKPT_CHECK(bind_mlp(b, name, m->gated, &p->experts[e], &g->experts[e]));
    }
    snprintf(name, sizeof name, "%s.shared", prefix);
    if (m->FS > 0)
        CKPT_CHECK(bind_mlp(b, name, m->gated, &p->shared, &g->shared));
    snprintf(name, sizeof name, "%s.shared_gate.weight", prefix);
    CKPT_CHECK(bind_one(b, name, false, &p->shared_gate, &g->shared_gate));
done:
    return status;
}

static ckpt_status bind_block(binder *b, int64_t i)
{
    ENG(block) *k = &b->m->blocks[i];
    const ckpt_eng_block *s = &b->m->spec.blocks[i];
    const char *kind = NULL;
    char prefix[100], name[120];
    ckpt_err *err = b->err; /* for CKPT_TRY */
    ckpt_status status;
    for (int c = 0; c < CKPT_N_KINDS; c++)
        if (ckpt_kinds[c].letter == s->letter)
            kind = ckpt_kinds[c].name;
    if (kind == NULL)
        return ckpt_fail(b->err, CKPT_E_INTERNAL, "block letter '%c' has no kind", s->letter);
    *k = (ENG(block)){.spec = *s};
    if (b->par != NULL) {
        ckpt_eng_heads h;
        CKPT_TRY(ckpt_eng_heads_of(s, b->par->tp, b->par->t, &h, b->err), "block %lld",
                 (long long)i);
        k->spec = ckpt_eng_with_heads(s, &h);
    }
    snprintf(prefix, sizeof prefix, "blocks.%lld.%s", (long long)i, kind);
    snprintf(name, sizeof name, "%s.norm.weight", prefix);
    CKPT_CHECK(bind_wide(b, name, true, &k->norm, &k->dnorm));
    if (s->kind == CKPT_ENG_LINATTN)
        status = bind_slots(b, s->letter == 'K' ? kda_slots : gdn_slots, prefix, &k->p, &k->g);
    else if (s->kind == CKPT_ENG_MLA)
        status = bind_slots(b, mla_slots, prefix, &k->p, &k->g);
    else if (s->kind == CKPT_ENG_GQA)
        status = bind_slots(b, gqa_slots, prefix, &k->p, &k->g);
    else if (s->kind == CKPT_ENG_MLP)
        status = bind_mlp(b, prefix, s->u.mlp.gated, &k->p.mlp, &k->g.mlp);
    else
        status = bind_moe(b, prefix, &s->u.moe, k);
done:
    return status;
}

static ckpt_status bind_mtp(binder *b, int64_t d)
{
    ENG(mtp_depth) *m = &b->m->mtp[d];
    const ckpt_eng_spec *s = &b->m->spec;
    int64_t first = s->main_blocks + d * ((s->n_blocks - s->main_blocks) / s->mtp_layers);
    static const char *const rest[] = {"enorm", "hnorm", "norm"};
    wreal **x[] = {&m->enorm, &m->hnorm, &m->norm}, **g[] = {&m->denorm, &m->dhnorm, &m->dnorm};
    char name[100];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "mtp.%lld.%s.weight", (long long)first, rest[i]);
        ckpt_status status = bind_wide(b, name, true, x[i], g[i]);
        if (status != CKPT_OK)
            return status;
    }
    snprintf(name, sizeof name, "mtp.%lld.eh_proj.weight", (long long)first);
    return bind_one(b, name, true, &m->eh_proj, &m->deh_proj);
}

static ckpt_status bind_all(binder *b)
{
    ENG(network) *m = b->m;
    ckpt_status status;
    CKPT_CHECK(bind_one(b, "embed.weight", true, &m->embed, &m->dembed));
    CKPT_CHECK(bind_wide(b, "final_norm.weight", true, &m->final_norm, &m->dfinal_norm));
    CKPT_CHECK(
        bind_one(b, m->spec.tied ? "embed.weight" : "head.weight", true, &m->head, &m->dhead));
    for (int64_t i = 0; i < m->spec.n_blocks; i++)
        CKPT_CHECK(bind_block(b, i));
    for (int64_t d = 0; d < m->spec.mtp_layers; d++)
        CKPT_CHECK(bind_mtp(b, d));
    for (size_t i = 0; i < m->n_params; i++)
        if (!b->used[i])
            return ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "tensor %s: the engine has no use for it",
                             m->params[i].name);
done:
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool is_param(const ckpt_canon *c)
{
    return c->state == NULL && !c->extra;
}

/* A parameter that no product reads as a matrix of activations' type: norms, convolutions, decays,
 * biases, routers. Binding compares it with the field. */
static bool is_wide(const char *name)
{
    static const char *const ends[] = {"norm.weight",   "conv_q.weight", "conv_k.weight",
                                       "conv_v.weight", "router.weight", "A_log",
                                       "dt_bias",       ".bias"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t k = strlen(ends[i]);
        if (n >= k && strcmp(name + n - k, ends[i]) == 0)
            return true;
    }
    return false;
}

static ckpt_status list_params(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                               ckpt_err *err)
{
    const ckpt_eng_par *par = e->par;
    m->params = ckpt_arena_array(&m->spec.arena, src->n_tensors + 1, sizeof *m->params);
    if (m->params == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu parameters", src->n_tensors);
    for (size_t i = 0; i < src->n_tensors; i++) {
        const ckpt_canon *c = &src->tensors[i];
        ENG(param) *p = &m->params[m->n_params];
        if (c->extra)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor %s: the engine has no use for it",
                             c->name);
        if (!is_param(c))
            continue;
        *p =
            (ENG(param)){.name = c->name, .tensor = i, .flags = c->flags, .wide = is_wide(c->name)};
        ckpt_status status = ckpt_eng_box_of(&m->spec, c, par, par != NULL ? par->t : 0,
                                             par != NULL ? par->x : 0, &p->box, err);
        if (status != CKPT_OK)
            return status;
        p->n = p->box.n;
        int64_t gap = CKPT_ON_DEVICE ? -m->n_elements & (CKPT_ENG_ALIGN - 1) : 0;
        if (!ckpt_add_i64(m->n_elements, gap, &p->at) || !ckpt_add_i64(p->at, p->n, &m->n_elements))
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor %s: size overflows", c->name);
        m->n_params++;
    }
    return CKPT_OK;
}

ckpt_status ENG(network_plan)(const ENG(network) * m, const ckpt_model *src, ckpt_arena *arena,
                              ckpt_gather *gathers, ckpt_err *err)
{
    const ckpt_dtype to = sizeof(wreal) == 4 ? CKPT_F32 : CKPT_F64;
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < m->n_params && status == CKPT_OK; i++) {
        const ENG(param) *p = &m->params[i];
        const ckpt_canon *c = &src->tensors[p->tensor];
        if (!ckpt_dtype_castable(c->dtype, to))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor %s: %s is no type to compute with",
                             c->name, ckpt_dtype_get(c->dtype)->name);
        status = ckpt_plan_box(src, p->tensor, p->box.lo, p->box.len, arena, &gathers[i], err);
        gathers[i].to = to;
    }
    return status;
}

ckpt_status ENG(network_open)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              const ckpt_eng_spec_opts *opts, bool gradients, ckpt_err *err)
{
    *m = (ENG(network)){0};
    binder b = {.m = m, .par = e->par, .err = err};
    ckpt_status status;
    m->keys = ckpt_comm_alone();
    CKPT_CHECK(ckpt_eng_spec_open(&m->spec, src, opts, err));
    m->vocab = (ckpt_eng_range){0, m->spec.V};
    CKPT_CHECK(list_params(m, e, src, err));
    if (e->par != NULL)
        CKPT_CHECK(ENG(network_join)(m, e, err));
    CKPT_CHECK(ENG(network_place)(m, e, gradients, err));
    m->blocks = ckpt_arena_array(&m->spec.arena, (size_t)m->spec.n_blocks, sizeof *m->blocks);
    m->mtp = ckpt_arena_array(&m->spec.arena, (size_t)m->spec.mtp_layers + 1, sizeof *m->mtp);
    b.used = calloc(m->n_params + 1, sizeof *b.used);
    if (m->blocks == NULL || m->mtp == NULL || b.used == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for blocks");
        goto done;
    }
    CKPT_CHECK(bind_all(&b));
    CKPT_CHECK(ENG(network_load)(m, e, src, err));
done:
    free(b.used);
    if (status != CKPT_OK)
        ENG(network_close)(m);
    return status;
}

ckpt_status ENG(network_zero_grads)(ENG(network) * m, ckpt_err *err)
{
    const ckpt_eng e = {.device = m->device};
    return m->grads == NULL
               ? CKPT_OK
               : ckpt_eng_clear(&e, m->grads, (size_t)m->n_elements * sizeof *m->grads, err);
}
