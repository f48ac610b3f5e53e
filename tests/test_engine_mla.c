/* MLA, MoE, MLP, norms, head and loss, and the input of multi-token prediction against the float64
 * oracle (tests/peers/mla_oracle.py, arrays written by gen_engine_mla.py): every array it has. This
 * file is the f64 suite, and is included by that of f32. */
#ifndef CKPT_REAL
#define CKPT_REAL 64
#define LIMIT 1e-12 /* sums of up to 70 terms; measured below 2e-15 */
#define SUITE_NAME "engine_mla"
#define SUITE suite_engine_mla
#endif
#include "attn.h"
#include "move.h"
#include "engine_test.h"
#include "moe.h"

static void open_data(void)
{
    golden_set_up("tests/data/engine_mla.safetensors");
}

static const char *scene; /* the case that runs */

static char *name_of(const char *name)
{
    return ckpt_arena_printf(&memory, "%s/%s", scene, name);
}

static real *get(const char *name, int64_t n)
{
    return golden_array(name_of(name), n);
}

static bool has(const char *name)
{
    return ckpt_source_find(&golden, name_of(name)) >= 0;
}

static void same(const char *name, const real *x, int64_t n)
{
    CLOSE(name_of(name), x, get(name, n), n, LIMIT);
}

static int32_t *get_ids(const char *name, int64_t n)
{
    const real *x = get(name, n);
    int32_t *ids = ckpt_arena_array(&memory, (size_t)n, sizeof *ids);
    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)x[i];
    return ids;
}

static void same_counts(const char *name, const int64_t *x, int64_t n)
{
    const real *want = get(name, n);
    for (int64_t i = 0; i < n; i++)
        ck_assert_int_eq(x[i], (int64_t)want[i]);
}

/* A parameter of the case into *x with a zeroed gradient in *grad; later its gradient is checked. */
typedef struct params {
    struct {
        const char *name;
        real *grad;
        int64_t n;
    } a[20];
    int n;
} params;

static void take(params *p, const char *name, int64_t n, real **x, real **grad)
{
    ck_assert_int_lt(p->n, 20);
    *x = get(ckpt_arena_printf(&memory, "param.%s", name), n);
    *grad = zeros(n);
    p->a[p->n].name = name;
    p->a[p->n].grad = *grad;
    p->a[p->n++].n = n;
}

static void same_grads(const params *p)
{
    for (int i = 0; i < p->n; i++)
        same(ckpt_arena_printf(&memory, "grad.%s", p->a[i].name), p->a[i].grad, p->a[i].n);
}

/* ---- MLA ------------------------------------------------------------------------------------ */

#define PLAIN                                                                                      \
    {                                                                                              \
        .kind = CKPT_ENG_ROPE_PLAIN, .interleaved = true, .dim = 4, .base = 10000                  \
    }

typedef struct mla_case {
    const char *name;
    ckpt_eng_mla m;
    int64_t cu[3], n, offset;
} mla_case;

/* clang-format off */
#define DIMS(h, rq, dr, ...) {.H = h, .N = 2, .RQ = rq, .RK = 6, .DN = 4, .DR = dr, .DV = 3, .eps = 1e-6, .latent_eps = 1e-6, __VA_ARGS__}
static const mla_case mla_cases[] = {
    {"mla_plain",        DIMS(12, 0, 4, .rope = PLAIN, .latent_norm = true),                             {0, 6, 12}, 2, 0},
    {"mla_q",            DIMS(12, 5, 4, .rope = PLAIN, .latent_norm = true),                             {0, 6, 12}, 2, 0},
    {"mla_no_norm",      DIMS(12, 5, 4, .rope = PLAIN),                                                  {0, 6, 12}, 2, 0},
    {"mla_nope",         DIMS(12, 0, 4, .latent_norm = true),                                            {0, 6, 12}, 2, 0},
    {"mla_nope_element", DIMS(12, 5, 4, .latent_norm = true, .gate = CKPT_ENG_GATE_ELEMENT),             {0, 6, 12}, 2, 0},
    {"mla_head",         DIMS(12, 5, 4, .rope = PLAIN, .latent_norm = true, .gate = CKPT_ENG_GATE_HEAD), {0, 6, 12}, 2, 0},
    {"mla_yarn",         DIMS(12, 0, 8, .latent_norm = true,
                              .rope = {.kind = CKPT_ENG_ROPE_YARN, .interleaved = true, .dim = 8, .base = 10000, .factor = 40,
                                       .original_max = 64, .beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 0.7}),
                                                                                                         {0, 6, 12}, 2, 0},
    {"mla_partial",      DIMS(12, 0, 8, .rope = PLAIN, .latent_norm = true, .centered = true),           {0, 6, 12}, 2, 0},
    {"mla_packed",       DIMS(12, 0, 4, .rope = PLAIN, .latent_norm = true, .gate = CKPT_ENG_GATE_HEAD), {0, 4, 9},  2, 0},
    {"mla_offset",       DIMS(12, 0, 4, .rope = PLAIN, .latent_norm = true),                             {0, 6},     1, 5},
    {"mla_long",         DIMS(6,  3, 4, .rope = PLAIN, .latent_norm = true),                             {0, 70},    1, 0},
};
/* clang-format on */
#define N_MLA ((int)(sizeof mla_cases / sizeof *mla_cases))

typedef struct mla_run {
    const mla_case *c;
    ckpt_eng_seq seq;
    ENG(mla_params) p, g;
    params list;
    ENG(rope_tables) rope;
    int64_t T;
    const real *x;
} mla_run;

static mla_run mla_start(const mla_case *c)
{
    const ckpt_eng_mla *m = &c->m;
    mla_run r = {
        .c = c, .seq = {c->n, c->cu},
             .T = c->cu[c->n]
    };
    const int64_t dq = m->N * (m->DN + m->DR), offset[] = {c->offset, c->offset},
                  per = m->gate == CKPT_ENG_GATE_HEAD ? 1 : m->DV;
    scene = c->name;
    r.x = get("in.hidden_states", r.T * m->H);
    if (m->RQ == 0) {
        take(&r.list, "linear_q_proj.weight", dq * m->H, &r.p.q, &r.g.q);
    } else {
        take(&r.list, "linear_q_down_proj.weight", m->RQ * m->H, &r.p.q_a, &r.g.q_a);
        take(&r.list, "linear_q_up_proj.weight", dq * m->RQ, &r.p.q_b, &r.g.q_b);
        if (m->latent_norm)
            take(&r.list, "q_layernorm.weight", m->RQ, &r.p.q_a_norm, &r.g.q_a_norm);
    }
    take(&r.list, "linear_kv_down_proj.weight", (m->RK + m->DR) * m->H, &r.p.kv_a, &r.g.kv_a);
    if (m->latent_norm)
        take(&r.list, "kv_layernorm.weight", m->RK, &r.p.kv_a_norm, &r.g.kv_a_norm);
    take(&r.list, "linear_kv_up_proj.weight", m->N * (m->DN + m->DV) * m->RK, &r.p.kv_b, &r.g.kv_b);
    if (m->gate != CKPT_ENG_GATE_NONE)
        take(&r.list, "linear_gate.weight", m->N * per * m->H, &r.p.gate, &r.g.gate);
    take(&r.list, "linear_proj.weight", m->H * m->N * m->DV, &r.p.o, &r.g.o);
    real *cos = zeros(r.T * m->DR), *sin = zeros(r.T * m->DR);
    r.rope = (ENG(rope_tables)){cos, sin};
    if (m->rope.kind != CKPT_ENG_ROPE_NONE)
        OK(ENG(rope_table)(&engine, &m->rope, &r.seq, offset, cos, sin, &error));
    return r;
}

static void mla_middles(const mla_run *r, const ENG(mla_saved) * s)
{
    const ckpt_eng_mla *m = &r->c->m;
    const int64_t dq = m->DN + m->DR, n = r->T * m->N;
    const real *a = s->o;
    if (m->RQ > 0)
        same("mid.q_compressed", s->q_an, r->T * m->RQ);
    same("mid.kv_latent", s->cn, r->T * m->RK);
    same("mid.query", s->q, n * dq);
    same("mid.key", s->k, n * dq);
    same("mid.value", s->v, n * m->DV);
    same("mid.core_attention", s->o, n * m->DV);
    same("mid.absorbed", s->o, n * m->DV);
    if (m->gate != CKPT_ENG_GATE_NONE) {
        real *gated = zeros(n * m->DV);
        OK(ENG(gate_heads)(&engine, r->T, m->N, m->DV, m->gate == CKPT_ENG_GATE_HEAD ? 1 : m->DV,
                           s->o, s->gate, gated, &error));
        a = gated;
    }
    same("mid.gated_attention", a, n * m->DV);
}

START_TEST(mla_matches_the_oracle)
{
    mla_run r = mla_start(&mla_cases[_i]);
    const ckpt_eng_mla *m = &r.c->m;
    ENG(mla_saved) s;
    real *y = zeros(r.T * m->H), *dx = numbers(r.T * m->H, -1, 1);
    OK(ENG(mla_save)(&engine, m, r.T, &s, &error));
    OK(ENG(mla)(&engine, m, &r.seq, &r.p, &r.rope, r.x, false, y, &s, &error));
    same("out.output", y, r.T * m->H);
    mla_middles(&r, &s);
    OK(ENG(mla_bwd)(&engine, m, &r.seq, &r.p, &r.rope, &s, r.x, get("dout.output", r.T * m->H),
                    false, dx, &r.g, &error));
    same("grad.hidden_states", dx, r.T * m->H);
    same_grads(&r.list);
}
END_TEST

/* Token by token from cached latents: the oracle's absorbed form is the expanded one's output. */
START_TEST(mla_decode_matches_the_oracle)
{
    mla_run r = mla_start(&mla_cases[_i]);
    const ckpt_eng_mla *m = &r.c->m;
    const int64_t half = m->rope.dim / 2, wide = m->RK + m->DR;
    real *y = zeros(r.T * m->H), *cache = zeros(r.T * wide);
    for (int64_t n = 0; n < r.seq.n; n++)
        for (int64_t t = r.c->cu[n]; t < r.c->cu[n + 1]; t++) {
            const int64_t len = t - r.c->cu[n];
            const ENG(rope_tables) at = {r.rope.cos + t * half, r.rope.sin + t * half};
            OK(ENG(mla_decode)(&engine, m, 1, r.T, &len, &r.p, &at, r.x + t * m->H, cache,
                               y + t * m->H, &error));
        }
    same("out.output", y, r.T * m->H);
}
END_TEST

/* Pairs (i, i + dim/2) of permuted channels are pairs (2i, 2i+1): the other form of the rotation. */
START_TEST(half_split_rotation_of_permuted_channels_is_the_interleaved_one)
{
    const mla_run r = mla_start(&mla_cases[_i]);
    const ckpt_eng_rope *p = &r.c->m.rope;
    ckpt_eng_rope half = *p;
    const int64_t D = p->dim, heads = 3;
    real *x = numbers(r.T * heads * D, -1, 1), *z = zeros(r.T * heads * D);
    for (int64_t i = 0; i < r.T * heads; i++)
        for (int64_t c = 0; c < D; c++)
            z[i * D + c / 2 + c % 2 * (D / 2)] = x[i * D + c];
    half.interleaved = false;
    OK(ENG(rope)(&engine, p, r.T, heads, x, heads * D, D, r.rope.cos, r.rope.sin, false, &error));
    OK(ENG(rope)(&engine, &half, r.T, heads, z, heads * D, D, r.rope.cos, r.rope.sin, false,
                 &error));
    CLOSE("rotated", z, x, r.T * heads * D, LIMIT);
}
END_TEST

/* ---- norm, MLP ------------------------------------------------------------------------------ */

START_TEST(rmsnorm_matches_the_oracle)
{
    enum { T = 10, N = 16 };
    const bool centered = _i == 1;
    params list = {0};
    real *w, *dw, *y = zeros(T * N), *rstd = zeros(T), *dx = zeros(T * N);
    scene = centered ? "norm_centered" : "norm";
    take(&list, "weight", N, &w, &dw);
    const real *x = get("in.x", T * N);
    OK(ENG(rmsnorm)(&engine, T, N, x, w, centered, centered ? 1e-5 : 1e-6, y, rstd, &error));
    same("out.y", y, T * N);
    OK(ENG(rmsnorm_bwd)(&engine, T, N, x, w, centered, rstd, get("dout.y", T * N), false, dx, dw,
                        &error));
    same("grad.x", dx, T * N);
    same_grads(&list);
}
END_TEST

/* fc1 [2F, H] of the case as gate and up, which lie one after the other. */
static void take_mlp(params *list, const char *prefix, int64_t F, int64_t H, ENG(mlp_params) * p,
                     ENG(mlp_params) * g)
{
    take(list, ckpt_arena_printf(&memory, "%slinear_fc1.weight", prefix), 2 * F * H, &p->gate,
         &g->gate);
    take(list, ckpt_arena_printf(&memory, "%slinear_fc2.weight", prefix), H * F, &p->down,
         &g->down);
    p->up = p->gate + F * H;
    g->up = g->gate + F * H;
}

START_TEST(mlp_matches_the_oracle)
{
    enum { T = 10, H = 8, F = 6 };
    const ckpt_eng_mlp m = {.H = H, .F = F, .gated = true, .clamp = _i == 1 ? 0.8 : 0};
    params list = {0};
    ENG(mlp_params) p, g;
    ENG(mlp_saved) s;
    real *w, *dw, *h = zeros(T * H), *rstd = zeros(T), *y = zeros(T * H), *a = zeros(T * F),
                  *d = zeros(T * H);
    scene = _i == 1 ? "mlp_clamp" : "mlp";
    take(&list, "linear_fc1.layer_norm_weight", H, &w, &dw);
    take_mlp(&list, "", F, H, &p, &g);
    const real *x = get("in.x", T * H);
    OK(ENG(rmsnorm)(&engine, T, H, x, w, false, 1e-6, h, rstd, &error));
    OK(ENG(mlp_save)(&engine, &m, T, &s, &error));
    OK(ENG(mlp)(&engine, &m, T, &p, h, false, y, &s, &error));
    same("out.y", y, T * H);
    OK(ENG(swiglu)(&engine, T, F, s.gate, s.up, F, m.clamp, a, F, &error));
    same("mid.activation", a, T * F);
    OK(ENG(mlp_bwd)(&engine, &m, T, &p, &s, h, get("dout.y", T * H), false, d, &g, &error));
    OK(ENG(rmsnorm_bwd)(&engine, T, H, x, w, false, rstd, d, false, d, dw, &error));
    same("grad.x", d, T * H);
    same_grads(&list);
}
END_TEST

/* ---- MoE ------------------------------------------------------------------------------------ */

enum { MT = 12, MH = 8, ME = 8, MF = 5, MS = 6 };

static const struct {
    const char *name;
    ckpt_eng_moe m;
} moe_cases[] = {
    {"moe",              {.FS = MS, .top_k = 3, .normalize = true, .scale = 2.5}             },
    {"moe_groups",
     {.FS = MS,
      .top_k = 4,
      .groups = 4,
      .group_top_k = 2,
      .group_best = 2,
      .normalize = true,
      .scale = 2.5,
      .z_coef = 0.05,
      .aux_coef = 0.3}                                                                       },
    {"moe_softmax_pre",  {.FS = MS, .top_k = 3, .softmax = true, .scale = 1, .aux_coef = 0.3}},
    {"moe_softmax_post",
     {.FS = MS,
      .top_k = 3,
      .softmax = true,
      .normalize = true,
      .shared_gate = true,
      .scale = 1,
      .z_coef = 0.05}                                                                        },
    {"moe_one",          {.top_k = 1, .scale = 2.5}                                          },
};
#define N_MOE ((int)(sizeof moe_cases / sizeof *moe_cases))

typedef struct moe_run {
    ckpt_eng_moe m;
    ENG(moe_params) p, g;
    ENG(mlp_params) experts[ME], dexperts[ME];
    params list;
    const real *x;
} moe_run;

static void moe_start(moe_run *r, int i)
{
    real *fc1, *d1, *fc2, *d2, *ignored;
    *r = (moe_run){.m = moe_cases[i].m};
    scene = moe_cases[i].name;
    r->m.H = MH;
    r->m.E = ME;
    r->m.FE = MF;
    r->m.gated = true;
    r->p.experts = r->experts;
    r->g.experts = r->dexperts;
    r->x = get("in.x", MT * MH);
    take(&r->list, "router.weight", ME * MH, &r->p.router, &r->g.router);
    take(&r->list, "experts.linear_fc1.weight", ME * 2 * MF * MH, &fc1, &d1);
    take(&r->list, "experts.linear_fc2.weight", ME * MH * MF, &fc2, &d2);
    for (int64_t e = 0; e < ME; e++) {
        const int64_t a = e * 2 * MF * MH, b = a + MF * MH, c = e * MH * MF;
        r->experts[e] = (ENG(mlp_params)){fc1 + a, fc1 + b, fc2 + c};
        r->dexperts[e] = (ENG(mlp_params)){d1 + a, d1 + b, d2 + c};
    }
    if (r->m.FS > 0)
        take_mlp(&r->list, "shared_experts.", MS, MH, &r->p.shared, &r->g.shared);
    if (r->m.shared_gate)
        take(&r->list, "shared_experts.gate_weight", MH, &r->p.shared_gate, &r->g.shared_gate);
    if (has("param.router.expert_bias")) { /* a buffer: the oracle has no gradient of it */
        params other = {0};
        take(&other, "router.expert_bias", ME, &r->p.router_bias, &ignored);
    }
}

static void moe_middles(const moe_run *r, const ENG(moe_saved) * s, const int64_t *counts,
                        const double aux[2])
{
    const int64_t n = MT * r->m.top_k;
    const int32_t *want = get_ids("mid.indices", n);
    const real losses[] = {(real)aux[0], (real)aux[1]};
    for (int64_t i = 0; i < n; i++)
        ck_assert_int_eq(s->chosen[i], want[i]);
    same("mid.logits", s->logit, MT * ME);
    same("mid.weights", s->weight, n);
    same_counts("mid.tokens_per_expert", counts, ME);
    ck_assert(has("out.loss.aux_loss") == (r->m.aux_coef != 0));
    ck_assert(has("out.loss.z_loss") == (r->m.z_coef != 0));
    if (r->m.aux_coef != 0)
        same("out.loss.aux_loss", &losses[0], 1);
    if (r->m.z_coef != 0)
        same("out.loss.z_loss", &losses[1], 1);
}

START_TEST(moe_matches_the_oracle)
{
    moe_run r;
    moe_start(&r, _i);
    ENG(moe_saved) s;
    real *y = zeros(MT * MH), *dx = numbers(MT * MH, -1, 1);
    double aux[2];
    int64_t counts[ME];
    OK(ENG(moe_save)(&engine, &r.m, MT, &s, &error));
    OK(ENG(moe)(&engine, &r.m, MT, &r.p, r.x, false, y, &s, aux, counts, &error));
    same("out.y", y, MT * MH);
    moe_middles(&r, &s, counts, aux);
    OK(ENG(moe_bwd)(&engine, &r.m, MT, &r.p, &s, r.x, get("dout.y", MT * MH), 1, false, dx, &r.g,
                    &error));
    same("grad.x", dx, MT * MH);
    same_grads(&r.list);
    /* The routed experts alone. */
    r.m.FS = 0;
    r.m.shared_gate = false;
    r.p.shared = (ENG(mlp_params)){0};
    r.p.shared_gate = NULL;
    OK(ENG(moe_save)(&engine, &r.m, MT, &s, &error));
    OK(ENG(moe)(&engine, &r.m, MT, &r.p, r.x, false, y, &s, NULL, NULL, &error));
    same("mid.routed", y, MT * MH);
}
END_TEST

/* ---- head, loss, multi-token prediction ----------------------------------------------------- */

START_TEST(head_and_loss_match_the_oracle)
{
    enum { T = 12, V = 12, H = 8 };
    const bool tied = _i == 1;
    params list = {0};
    real *embed, *dembed, *norm, *dnorm, *head, *dhead,
        *h0 = zeros(T * H), *h = zeros(T * H), *rstd = zeros(T), *z = zeros(T * V),
        *loss = zeros(T), *weight = zeros(T), *dh = zeros(T * H);
    double total = 0, n = 0;
    scene = tied ? "lm_tied" : "lm";
    take(&list, "embedding.word_embeddings.weight", V * H, &embed, &dembed);
    take(&list, "decoder.final_layernorm.weight", H, &norm, &dnorm);
    head = embed;
    dhead = dembed;
    if (!tied)
        take(&list, "output_layer.weight", V * H, &head, &dhead);
    const int32_t *ids = get_ids("in.input_ids", T), *labels = get_ids("in.labels", T),
                  *mask = get_ids("in.loss_mask", T);
    const real *share = get("dout.token_loss", T);
    for (int t = 0; t < T; t++)
        n += mask[t];
    for (int t = 0; t < T; t++) /* of the objective: the cotangent, and the masked mean */
        weight[t] = share[t] + (real)(mask[t] / n);
    OK(ENG(embed)(&engine, T, V, H, ids, embed, h0, &error));
    OK(ENG(rmsnorm)(&engine, T, H, h0, norm, false, 1e-6, h, rstd, &error));
    OK(ENG(linear)(&engine, T, H, V, h, H, head, NULL, false, z, V, &error));
    same("mid.logits", z, T * V);
    OK(ENG(xent)(&engine, T, V, z, labels, weight, loss, z, &error));
    same("out.token_loss", loss, T);
    for (int t = 0; t < T; t++)
        total += (double)loss[t] * mask[t] / n;
    const real mean = (real)total;
    same("out.loss.mean_loss", &mean, 1);
    OK(ENG(linear_bwd)(&engine, T, H, V, z, h, head, false, dh, dhead, NULL, &error));
    OK(ENG(rmsnorm_bwd)(&engine, T, H, h0, norm, false, rstd, dh, false, dh, dnorm, &error));
    OK(ENG(embed_bwd)(&engine, T, V, H, ids, dh, dembed, &error));
    same_grads(&list);
}
END_TEST

START_TEST(prediction_input_matches_the_oracle)
{
    enum { B = 2, S = 5, T = B * S, V = 11, H = 8 };
    params list = {0};
    real *embed, *dembed, *enorm, *denorm, *hnorm, *dhnorm, *w, *dw;
    real *e = zeros(T * H), *cat = zeros(T * 2 * H), *re = zeros(T), *rh = zeros(T),
         *en = zeros(T * H), *hn = zeros(T * H), *y = zeros(T * H), *dcat = zeros(T * 2 * H),
         *d = zeros(T * H);
    scene = "mtp";
    take(&list, "embedding.word_embeddings.weight", V * H, &embed, &dembed);
    take(&list, "enorm.weight", H, &enorm, &denorm);
    take(&list, "hnorm.weight", H, &hnorm, &dhnorm);
    take(&list, "eh_proj.weight", H * 2 * H, &w, &dw);
    const int32_t *ids = get_ids("in.input_ids", T), *want = get_ids("mid.rolled_ids", T);
    const real *h = get("in.hidden_states", T * H);
    for (int t = 0; t < T; t++) /* rolled inside a sequence, its last slot 0 */
        ck_assert_int_eq(want[t], t % S == S - 1 ? 0 : ids[t + 1]);
    OK(ENG(embed)(&engine, T, V, H, want, embed, e, &error));
    OK(ENG(rmsnorm)(&engine, T, H, e, enorm, false, 1e-6, en, re, &error));
    OK(ENG(rmsnorm)(&engine, T, H, h, hnorm, false, 1e-6, hn, rh, &error));
    OK(ENG(copy_columns)(&engine, T, H, en, H, cat, 2 * H, &error));
    OK(ENG(copy_columns)(&engine, T, H, hn, H, cat + H, 2 * H, &error));
    OK(ENG(linear)(&engine, T, 2 * H, H, cat, 2 * H, w, NULL, false, y, H, &error));
    same("out.y", y, T * H);
    OK(ENG(linear_bwd)(&engine, T, 2 * H, H, get("dout.y", T * H), cat, w, false, dcat, dw, NULL,
                       &error));
    OK(ENG(copy_columns)(&engine, T, H, dcat, 2 * H, d, H, &error));
    OK(ENG(rmsnorm_bwd)(&engine, T, H, e, enorm, false, re, d, false, d, denorm, &error));
    OK(ENG(embed_bwd)(&engine, T, V, H, want, d, dembed, &error));
    OK(ENG(copy_columns)(&engine, T, H, dcat + H, 2 * H, d, H, &error));
    OK(ENG(rmsnorm_bwd)(&engine, T, H, h, hnorm, false, rh, d, false, d, dhnorm, &error));
    same("grad.hidden_states", d, T * H);
    same_grads(&list);
}
END_TEST

Suite *SUITE(void);
Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, open_data, golden_tear_down);
    tcase_add_loop_test(tc, mla_matches_the_oracle, 0, N_MLA);
    tcase_add_loop_test(tc, mla_decode_matches_the_oracle, 0, N_MLA);
    tcase_add_loop_test(tc, half_split_rotation_of_permuted_channels_is_the_interleaved_one, 0, 2);
    tcase_add_loop_test(tc, rmsnorm_matches_the_oracle, 0, 2);
    tcase_add_loop_test(tc, mlp_matches_the_oracle, 0, 2);
    tcase_add_loop_test(tc, moe_matches_the_oracle, 0, N_MOE);
    tcase_add_loop_test(tc, head_and_loss_match_the_oracle, 0, 2);
    tcase_add_test(tc, prediction_input_matches_the_oracle);
    suite_add_tcase(s, tc);
    return s;
}
