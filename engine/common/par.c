/* Groups of a run, parts of parameters. The table of cuts is kda-math.md section 5.1 and
 * mla-moe-math.md section 2.9; experts are never cut inside. */
#include "par.h"

#include <stdlib.h>
#include <string.h>

#include "checked.h"

ckpt_status ckpt_eng_par_open(ckpt_eng_par *p, ckpt_comm *world, int tp, int cp, int dp, int ep,
                              ckpt_eng_cp_mode mode, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *p = (ckpt_eng_par){.tp = tp, .cp = cp, .dp = dp, .ep = ep, .cp_mode = mode, .world = world};
    int64_t want = (int64_t)tp * cp;
    if (tp < 1 || cp < 1 || dp < 1 || ep < 1 || tp > CKPT_COMM_MAX || cp > CKPT_COMM_MAX ||
        dp > CKPT_COMM_MAX || want > CKPT_COMM_MAX || want * dp != world->size)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "tp %d x cp %d x dp %d do not make the %d ranks of this run", tp, cp, dp,
                         world->size);
    if (world->size % ep != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "ep %d does not divide the %d ranks of this run", ep,
                         world->size);
    p->t = world->rank % tp;
    p->c = world->rank / tp % cp;
    p->d = world->rank / tp / cp;
    p->x = world->rank % ep;
    p->counts = calloc((size_t)tp + (size_t)want, sizeof *p->counts);
    if (p->counts == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", world->size);
    CKPT_CHECK(ckpt_comm_split(world, world->rank / tp, &p->tensor, err));
    CKPT_CHECK(ckpt_comm_split(world, p->d * tp + p->t, &p->context, err));
    CKPT_CHECK(ckpt_comm_split(world, world->rank % (tp * cp), &p->data, err));
    CKPT_CHECK(ckpt_comm_split(world, p->d, &p->model, err));
    CKPT_CHECK(ckpt_comm_split(world, p->t, &p->replicas, err));
    CKPT_CHECK(ckpt_comm_split(world, world->rank / ep, &p->experts, err));
    CKPT_CHECK(ckpt_comm_split(world, p->x, &p->expert_dup, err));
done:
    if (status != CKPT_OK)
        ckpt_eng_par_close(p);
    return status;
}

void ckpt_eng_par_close(ckpt_eng_par *p)
{
    ckpt_comm *all[] = {&p->tensor,   &p->context, &p->data,      &p->model,
                        &p->replicas, &p->experts, &p->expert_dup};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ckpt_comm_release(all[i]);
    free(p->counts);
    p->counts = NULL;
    p->world = NULL;
}

/* ---- heads ----------------------------------------------------------------------------------- */

static ckpt_eng_range range_of(int64_t n, int64_t parts, int64_t i)
{
    int64_t lo = ckpt_part_at(n, parts, i);
    return (ckpt_eng_range){lo, ckpt_part_at(n, parts, i + 1) - lo};
}

static ckpt_status too_few(const char *what, int64_t n, int64_t parts, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_USAGE,
                     "%lld %s cannot be cut into %lld parts (tensor and context "
                     "parallel size)",
                     (long long)n, what, (long long)parts);
}

static ckpt_status gqa_heads(const ckpt_eng_attention *a, int64_t parts, int64_t i,
                             ckpt_eng_heads *out, ckpt_err *err)
{
    int64_t group = a->N / a->G;
    if (a->G >= parts) {
        out->keys = range_of(a->G, parts, i);
        out->queries = (ckpt_eng_range){out->keys.lo * group, out->keys.n * group};
        return CKPT_OK;
    }
    if (parts % a->G != 0 || group % (parts / a->G) != 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%lld query heads with %lld key heads cannot be cut into %lld parts "
                         "(tensor and context parallel size)",
                         (long long)a->N, (long long)a->G, (long long)parts);
    out->shared = true;
    out->keys = (ckpt_eng_range){i / (parts / a->G), 1};
    out->queries = (ckpt_eng_range){a->N / parts * i, a->N / parts};
    return CKPT_OK;
}

ckpt_status ckpt_eng_heads_of(const ckpt_eng_block *b, int64_t parts, int64_t i,
                              ckpt_eng_heads *out, ckpt_err *err)
{
    const ckpt_eng_delta *d = &b->u.linattn.delta;
    *out = (ckpt_eng_heads){0};
    switch (b->kind) {
    case CKPT_ENG_LINATTN:
        if (d->H < parts)
            return too_few("heads of linear attention", d->H, parts, err);
        out->keys = range_of(d->H, parts, i);
        out->queries =
            (ckpt_eng_range){out->keys.lo * (d->HV / d->H), out->keys.n * (d->HV / d->H)};
        return CKPT_OK;
    case CKPT_ENG_MLA:
        if (b->u.mla.N < parts)
            return too_few("heads of MLA", b->u.mla.N, parts, err);
        out->keys = out->queries = range_of(b->u.mla.N, parts, i);
        return CKPT_OK;
    case CKPT_ENG_GQA:
        return gqa_heads(&b->u.gqa.attn, parts, i, out, err);
    case CKPT_ENG_MLP:
        if (b->u.mlp.F < parts)
            return too_few("inner channels", b->u.mlp.F, parts, err);
        out->keys = out->queries = range_of(b->u.mlp.F, parts, i);
        return CKPT_OK;
    case CKPT_ENG_MOE:
        break;
    }
    return CKPT_OK;
}

ckpt_eng_block ckpt_eng_with_heads(const ckpt_eng_block *b, const ckpt_eng_heads *h)
{
    ckpt_eng_block r = *b;
    switch (b->kind) {
    case CKPT_ENG_LINATTN:
        r.u.linattn.delta.H = h->keys.n;
        r.u.linattn.delta.HV = h->queries.n;
        break;
    case CKPT_ENG_MLA:
        r.u.mla.N = h->queries.n;
        break;
    case CKPT_ENG_GQA:
        r.u.gqa.attn.N = h->queries.n;
        r.u.gqa.attn.G = h->keys.n;
        break;
    case CKPT_ENG_MLP:
        r.u.mlp.F = h->queries.n;
        break;
    case CKPT_ENG_MOE:
        break;
    }
    return r;
}

/* ---- parameters ------------------------------------------------------------------------------ */

typedef enum cut_by { BY_QUERIES, BY_KEYS } cut_by;

/* A parameter of these kinds of block that is cut: by which heads, along which axis. */
typedef struct cut_row {
    const char *letters, *rest;
    int axis;
    cut_by by;
} cut_row;

/* clang-format off */
static const cut_row cuts[] = {
    {"KGg", "q.weight",      0, BY_KEYS},
    {"KGg", "k.weight",      0, BY_KEYS},
    {"KGg", "conv_q.weight", 0, BY_KEYS},
    {"KGg", "conv_k.weight", 0, BY_KEYS},
    {"KGg", "v.weight",      0, BY_QUERIES},
    {"KGg", "conv_v.weight", 0, BY_QUERIES},
    {"KG",  "f.weight",      0, BY_QUERIES},
    {"g",   "f.weight",      0, BY_KEYS},
    {"KGg", "f_b.weight",    0, BY_QUERIES},
    {"KGg", "g.weight",      0, BY_QUERIES},
    {"KGg", "g_b.weight",    0, BY_QUERIES},
    {"KGg", "g_b.bias",      0, BY_QUERIES},
    {"KGg", "z.weight",      0, BY_QUERIES},
    {"KGg", "alpha.weight",  0, BY_QUERIES},
    {"KGg", "beta.weight",   0, BY_QUERIES},
    {"KG",  "b.weight",      0, BY_QUERIES},
    {"g",   "b.weight",      0, BY_KEYS},
    {"KGg", "w.weight",      0, BY_QUERIES},
    {"KG",  "A_log",         0, BY_QUERIES},
    {"g",   "A_log",         0, BY_KEYS},
    {"KG",  "dt_bias",       0, BY_QUERIES},
    {"g",   "dt_bias",       0, BY_KEYS},
    {"KGg", "o.weight",      1, BY_QUERIES},
    {"+",   "q.weight",      0, BY_QUERIES},
    {"+",   "q_b.weight",    0, BY_QUERIES},
    {"+",   "kv_b.weight",   0, BY_QUERIES},
    {"+",   "gate.weight",   0, BY_QUERIES},
    {"+",   "o.weight",      1, BY_QUERIES},
    {"*",   "q.weight",      0, BY_QUERIES},
    {"*",   "q.bias",        0, BY_QUERIES},
    {"*",   "k.weight",      0, BY_KEYS},
    {"*",   "k.bias",        0, BY_KEYS},
    {"*",   "v.weight",      0, BY_KEYS},
    {"*",   "v.bias",        0, BY_KEYS},
    {"*",   "gate.weight",   0, BY_QUERIES},
    {"*",   "o.weight",      1, BY_QUERIES},
    {"-",   "gate.weight",   0, BY_QUERIES},
    {"-",   "up.weight",     0, BY_QUERIES},
    {"-",   "down.weight",   1, BY_QUERIES},
};
/* clang-format on */

/* All heads of a block, by the two ways. */
static int64_t all_heads(const ckpt_eng_block *b, cut_by by)
{
    switch (b->kind) {
    case CKPT_ENG_LINATTN:
        return by == BY_KEYS ? b->u.linattn.delta.H : b->u.linattn.delta.HV;
    case CKPT_ENG_MLA:
        return b->u.mla.N;
    case CKPT_ENG_GQA:
        return by == BY_KEYS ? b->u.gqa.attn.G : b->u.gqa.attn.N;
    case CKPT_ENG_MLP:
        return b->u.mlp.F;
    case CKPT_ENG_MOE:
        break;
    }
    return 1;
}

static ckpt_status cut_axis(const ckpt_canon *c, int axis, int64_t units, ckpt_eng_range r,
                            ckpt_eng_box *out, ckpt_err *err)
{
    if (axis >= c->rank || units < 1 || c->dims[axis] % units != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor %s: axis %d does not hold %lld heads", c->name,
                         axis, (long long)units);
    int64_t per = c->dims[axis] / units;
    out->lo[axis] = r.lo * per;
    out->len[axis] = r.n * per;
    out->held = CKPT_ENG_HELD_TENSOR;
    return CKPT_OK;
}

static ckpt_status box_of_block(const ckpt_eng_spec *s, const ckpt_canon *c, const char *rest,
                                const ckpt_eng_par *p, int t, int x, ckpt_eng_box *out,
                                ckpt_err *err)
{
    const ckpt_eng_block *b = &s->blocks[c->block];
    ckpt_eng_heads h;
    ckpt_status status = CKPT_OK;
    if (b->kind == CKPT_ENG_MOE) {
        static const char experts[] = "experts.";
        if (strncmp(rest, experts, sizeof experts - 1) != 0 || p->ep == 1)
            return CKPT_OK;
        int64_t e = strtoll(rest + sizeof experts - 1, NULL, 10);
        ckpt_eng_range mine = range_of(b->u.moe.E, p->ep, x);
        out->held = CKPT_ENG_HELD_EXPERT;
        if (e < mine.lo || e >= mine.lo + mine.n)
            out->len[0] = 0;
        return CKPT_OK;
    }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const cut_row *r = &cuts[i];
        if (strchr(r->letters, b->letter) == NULL || strcmp(r->rest, rest) != 0)
            continue;
        CKPT_TRY(ckpt_eng_heads_of(b, p->tp, t, &h, err), "block %d", c->block);
        CKPT_CHECK(cut_axis(c, r->axis, all_heads(b, r->by), r->by == BY_KEYS ? h.keys : h.queries,
                            out, err));
        if (r->by == BY_KEYS && h.shared)
            out->held = CKPT_ENG_HELD_KEYS;
        break;
    }
done:
    return status;
}

/* What follows "blocks.N.KIND." */
static const char *rest_of(const char *name)
{
    for (int dots = 0; dots < 3; dots++) {
        name = strchr(name, '.');
        if (name == NULL)
            return "";
        name++;
    }
    return name;
}

ckpt_status ckpt_eng_box_of(const ckpt_eng_spec *s, const ckpt_canon *c, const ckpt_eng_par *p,
                            int t, int x, ckpt_eng_box *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *out = (ckpt_eng_box){.rank = c->rank};
    for (int i = 0; i < c->rank; i++)
        out->dims[i] = out->len[i] = c->dims[i];
    if (p != NULL && p->tp > 1 &&
        (strcmp(c->name, "embed.weight") == 0 || strcmp(c->name, "head.weight") == 0))
        CKPT_CHECK(cut_axis(c, 0, s->V, range_of(s->V, p->tp, t), out, err));
    else if (p != NULL && strncmp(c->name, "blocks.", 7) == 0 && c->block >= 0 &&
             c->block < s->n_blocks)
        CKPT_CHECK(box_of_block(s, c, rest_of(c->name), p, t, x, out, err));
    if (!ckpt_numel(out->rank, out->len, &out->n))
        status = ckpt_fail(err, CKPT_E_FORMAT, "tensor %s: size overflows", c->name);
done:
    return status;
}

ckpt_eng_range ckpt_eng_tokens_of(const ckpt_eng_par *p, int64_t T, int c, int t)
{
    ckpt_eng_range mine = range_of(T, p->cp, c), part = range_of(mine.n, p->tp, t);
    return (ckpt_eng_range){mine.lo + part.lo, part.n};
}
