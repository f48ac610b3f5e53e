/* Attention, MLA, grouped queries, MoE, embedding and loss in double: against plain definitions and
 * against finite differences. */
#define CKPT_REAL 64
#include "attn.h"
#include "engine_fd.h"
#include "moe.h"

static int64_t cu_packed[] = {0, 1, 1, 71, 84};
static const ckpt_eng_seq packed = {4, cu_packed};
#define T_PACKED 84

/* ---- attention against its definition ---------------------------------------------------------- */

static void plain_attention(const ckpt_eng_attention *a, const ckpt_eng_seq *seq, const real *q,
                            const real *k, const real *v, real *o)
{
    double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)a->DK);
    for (int64_t n = 0; n < seq->n; n++)
        for (int64_t i = seq->cu[n]; i < seq->cu[n + 1]; i++)
            for (int64_t h = 0; h < a->N; h++) {
                int64_t g = h / (a->N / a->G);
                double sum = 0, acc[64] = {0};
                for (int64_t j = seq->cu[n]; j <= i; j++) {
                    double s = 0;
                    for (int64_t c = 0; c < a->DK; c++)
                        s += q[(i * a->N + h) * a->DK + c] * k[(j * a->G + g) * a->DK + c];
                    double p = exp(s * scale);
                    sum += p;
                    for (int64_t c = 0; c < a->DV; c++)
                        acc[c] += p * v[(j * a->G + g) * a->DV + c];
                }
                for (int64_t c = 0; c < a->DV; c++)
                    o[(i * a->N + h) * a->DV + c] = acc[c] / sum;
            }
}

static const ckpt_eng_attention shapes[] = {
    {4, 4, 12, 12, 0,   NULL, 0},
    {4, 2, 24, 16, 0,   NULL, 0},
    {6, 1, 8,  20, 0.7, NULL, 0},
    {1, 1, 1,  1,  0,   NULL, 0},
};

typedef struct attn_case {
    ckpt_eng e;
    const ckpt_eng_attention *a;
    const ckpt_eng_seq *seq;
    real *q, *k, *v, *o, *lse, *w;
} attn_case;

static double attn_loss(void *self)
{
    attn_case *c = self;
    double sum = 0;
    ckpt_err err = {0};
    ck_assert_int_eq(ENG(attention)(&c->e, c->a, c->seq, c->q, c->k, c->v, c->o, c->lse, &err),
                     CKPT_OK);
    for (int64_t i = 0; i < T_PACKED * c->a->N * c->a->DV; i++)
        sum += c->o[i] * c->w[i];
    return sum;
}

START_TEST(attention_equals_its_definition_and_its_differences)
{
    const ckpt_eng_attention *a = &shapes[_i];
    fd f = {.seed = 7}, w = {.seed = 9};
    attn_case c = {.a = a, .seq = &packed};
    ckpt_err err = {0};
    c.q = fd_add(&f, "q", T_PACKED * a->N * a->DK, 1);
    c.k = fd_add(&f, "k", T_PACKED * a->G * a->DK, 1);
    c.v = fd_add(&f, "v", T_PACKED * a->G * a->DV, 1);
    c.w = fd_add(&w, "w", T_PACKED * a->N * a->DV, 1);
    c.o = fd_add(&w, "o", T_PACKED * a->N * a->DV, 1);
    c.lse = fd_add(&w, "lse", T_PACKED * a->N, 1);
    real *plain = fd_add(&w, "plain", T_PACKED * a->N * a->DV, 1);
    ckpt_eng_init(&c.e, 2);
    ck_assert_int_eq(ENG(attention)(&c.e, a, &packed, c.q, c.k, c.v, c.o, c.lse, &err), CKPT_OK);
    ck_assert_int_eq(ENG(attention_bwd)(&c.e, a, &packed, c.q, c.k, c.v, c.o, c.lse, c.w,
                                        fd_grad(&f, c.q), fd_grad(&f, c.k), fd_grad(&f, c.v), &err),
                     CKPT_OK);
    ck_assert_int_eq(ckpt_eng_reserve(&c.e, c.e.peak, &err), CKPT_OK);
    (void)attn_loss(&c);
    plain_attention(a, &packed, c.q, c.k, c.v, plain);
    for (int64_t i = 0; i < T_PACKED * a->N * a->DV; i++)
        ck_assert_double_eq_tol(c.o[i], plain[i], 1e-13);
    ck_assert_int_eq(ENG(attention_bwd)(&c.e, a, &packed, c.q, c.k, c.v, c.o, c.lse, c.w,
                                        fd_grad(&f, c.q), fd_grad(&f, c.k), fd_grad(&f, c.v), &err),
                     CKPT_OK);
    if (a->DK == 1 && a->DV == 1)
        fd_check(&f, attn_loss, &c, 20, 1e-8);
    else
        fd_check(&f, attn_loss, &c, 40, 1e-8);
    ckpt_eng_release(&c.e);
    fd_free(&f);
    fd_free(&w);
}
END_TEST

START_TEST(attention_refuses_heads_that_do_not_divide)
{
    ckpt_eng e;
    ckpt_err err = {0};
    ckpt_eng_attention a = {.N = 3, .G = 2, .DK = 4, .DV = 4};
    ckpt_eng_init(&e, 1);
    ck_assert_int_eq(ENG(attention)(&e, &a, &packed, NULL, NULL, NULL, NULL, NULL, &err),
                     CKPT_E_USAGE);
}
END_TEST

START_TEST(attention_refuses_parts_that_do_not_fit)
{
    static const ckpt_eng_part bad[][2] = {
        {{0, 0, 2, 0},         {0, 1, 1, 2} }, /* overlap */
        {{1, 0, 1, 0},         {0, 0, 1, 1} }, /* against the order */
        {{0, 0, 2, 0},         {1, 0, 1, 3} }, /* a hole in the rows */
        {{0, 0, 1, 0},         {1, 1, 5, 1} }, /* past the end */
        {{0, -1, 1, 0},        {1, 0, 1, 1} },
        {{0, 0, -1, 0},        {1, 0, 1, -1}},
        {{0, 0, 1, 0},         {2, 0, 1, 1} }, /* no such sequence */
        {{0, INT64_MAX, 1, 0}, {1, 0, 1, 1} },
    };
    static const int64_t cu[] = {0, 4, 9};
    ckpt_eng_seq seq = {2, cu};
    ckpt_eng e;
    ckpt_err err = {0};
    ckpt_eng_attention a = {.N = 1, .G = 1, .DK = 1, .DV = 1, .parts = bad[_i], .n_parts = 2};
    ckpt_eng_init(&e, 1);
    ck_assert_int_eq(ENG(attention)(&e, &a, &seq, NULL, NULL, NULL, NULL, NULL, &err),
                     CKPT_E_USAGE);
    ck_assert_msg(strstr(err.text, "attention: part ") != NULL, "%s", err.text);
}
END_TEST

/* ---- rotary embedding -------------------------------------------------------------------------- */

static const ckpt_eng_rope ropes[] = {
    {.kind = CKPT_ENG_ROPE_PLAIN, .interleaved = true, .dim = 8, .base = 10000},
    { .kind = CKPT_ENG_ROPE_PLAIN, .dim = 6, .base = 500                                       },
    {                                                               .kind = CKPT_ENG_ROPE_YARN,
     .interleaved = true,
     .dim = 8,
     .base = 10000,
     .factor = 40,
     .original_max = 64,
     .beta_fast = 32,
     .beta_slow = 1,
     .mscale = 1,
     .mscale_all_dim = 0.5},
    {                        .kind = CKPT_ENG_ROPE_LLAMA3,
     .dim = 8,
     .base = 500000,
     .factor = 8,
     .original_max = 8192,
     .low_freq_factor = 1,
     .high_freq_factor = 4},
};

/* The rotation is orthogonal up to YaRN's factor: inverse after forward gives factor^2 times the
 * input, and scores depend on the distance of positions alone. */
START_TEST(rope_inverse_undoes_it_and_scores_depend_on_distance)
{
    const ckpt_eng_rope *r = &ropes[_i];
    enum { T = 9, D = 10, HEADS = 2 };
    int64_t cu[] = {0, T}, half = r->dim / 2;
    ckpt_eng_seq seq = {1, cu};
    real cos[T * 4], sin[T * 4], x[T * HEADS * D], keep[T * HEADS * D];
    ckpt_eng e;
    ckpt_err err = {0};
    fd f = {.seed = 3};
    ckpt_eng_init(&e, 1);
    ck_assert_int_eq(ckpt_eng_reserve(&e, 64, &err), CKPT_OK);
    ck_assert_int_eq(ENG(rope_table)(&e, r, &seq, NULL, cos, sin, &err), CKPT_OK);
    double scale2 = cos[0] * cos[0];
    for (int i = 0; i < T * HEADS * D; i++)
        keep[i] = x[i] = i < HEADS * D ? fd_uniform(&f) : x[i - HEADS * D]; /* one vector a head */
    ck_assert_int_eq(ENG(rope)(&e, r, T, HEADS, x, HEADS * D, D, cos, sin, false, &err), CKPT_OK);
    for (int d = 1; d < 4; d++) { /* q at t, k at t + d */
        double first = 0, last = 0;
        for (int c = 0; c < D; c++) {
            first += x[c] * x[d * HEADS * D + D + c];
            last += x[(T - 1 - d) * HEADS * D + c] * x[(T - 1) * HEADS * D + D + c];
        }
        ck_assert_double_eq_tol(first, last, 1e-12);
    }
    ck_assert_double_gt(fabs(x[HEADS * D] - keep[HEADS * D]), 1e-3);
    ck_assert_int_eq(ENG(rope)(&e, r, T, HEADS, x, HEADS * D, D, cos, sin, true, &err), CKPT_OK);
    for (int i = 0; i < T * HEADS * D; i++)
        ck_assert_double_eq_tol(x[i], keep[i] * (i % D < 2 * half ? scale2 : 1), 1e-12);
    ckpt_eng_release(&e);
}
END_TEST

/* ---- blocks ------------------------------------------------------------------------------------ */

typedef struct block_case {
    ckpt_eng e;
    ckpt_eng_mla mla;
    ckpt_eng_gqa gqa;
    ckpt_eng_moe moe;
    ENG(mla_params) pm, gm;
    ENG(gqa_params) pg, gg;
    ENG(moe_params) pe, ge;
    ENG(mlp_params) experts[8], grads[8];
    ENG(rope_tables) rope;
    const ckpt_eng_rope *table;
    real *cos, *sin, *x, *y, *w, *dx;
    double aux[2];
    int what; /* 0 MLA, 1 grouped queries, 2 MoE */
    int64_t H;
} block_case;

static void block_run(block_case *c, bool backward)
{
    ckpt_err err = {0};
    size_t mark = ckpt_eng_mark(&c->e);
    ENG(mla_saved) sm;
    ENG(gqa_saved) sg;
    ENG(moe_saved) se;
    ckpt_status status = CKPT_OK;
    if (c->table->kind != CKPT_ENG_ROPE_NONE)
        status = ENG(rope_table)(&c->e, c->table, &packed, NULL, c->cos, c->sin, &err);
    ck_assert_int_eq(status, CKPT_OK);
    if (c->what == 0)
        status = ENG(mla_save)(&c->e, &c->mla, T_PACKED, &sm, &err);
    else if (c->what == 1)
        status = ENG(gqa_save)(&c->e, &c->gqa, T_PACKED, &sg, &err);
    else
        status = ENG(moe_save)(&c->e, &c->moe, T_PACKED, &se, &err);
    ck_assert_int_eq(status, CKPT_OK);
    if (c->what == 0)
        status = ENG(mla)(&c->e, &c->mla, &packed, &c->pm, &c->rope, c->x, false, c->y, &sm, &err);
    else if (c->what == 1)
        status = ENG(gqa)(&c->e, &c->gqa, &packed, &c->pg, &c->rope, c->x, false, c->y, &sg, &err);
    else
        status =
            ENG(moe)(&c->e, &c->moe, T_PACKED, &c->pe, c->x, false, c->y, &se, c->aux, NULL, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
    if (backward && c->what == 0)
        status = ENG(mla_bwd)(&c->e, &c->mla, &packed, &c->pm, &c->rope, &sm, c->x, c->w, false,
                              c->dx, &c->gm, &err);
    else if (backward && c->what == 1)
        status = ENG(gqa_bwd)(&c->e, &c->gqa, &packed, &c->pg, &c->rope, &sg, c->x, c->w, false,
                              c->dx, &c->gg, &err);
    else if (backward)
        status = ENG(moe_bwd)(&c->e, &c->moe, T_PACKED, &c->pe, &se, c->x, c->w, 1, false, c->dx,
                              &c->ge, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
    ckpt_eng_drop(&c->e, mark);
}

static double block_loss(void *self)
{
    block_case *c = self;
    double sum = 0;
    block_run(c, false);
    for (int64_t i = 0; i < T_PACKED * c->H; i++)
        sum += c->y[i] * c->w[i];
    return c->what == 2 ? sum + c->aux[0] + c->aux[1] : sum;
}

static void block_check(block_case *c, fd *f, int samples, double tol)
{
    fd w = {.seed = 11};
    ckpt_err err = {0};
    c->x = fd_add(f, "x", T_PACKED * c->H, 1);
    c->dx = fd_grad(f, c->x);
    c->w = fd_add(&w, "w", T_PACKED * c->H, 1);
    c->y = fd_add(&w, "y", T_PACKED * c->H, 1);
    c->cos = fd_add(&w, "cos", T_PACKED * 32, 1);
    c->sin = fd_add(&w, "sin", T_PACKED * 32, 1);
    c->rope = (ENG(rope_tables)){c->cos, c->sin};
    ckpt_eng_init(&c->e, 2);
    block_run(c, true);
    size_t need = c->e.peak;
    ck_assert_int_eq(ckpt_eng_reserve(&c->e, need, &err), CKPT_OK);
    block_run(c, true);
    ck_assert_uint_eq(c->e.peak, need);
    fd_check(f, block_loss, c, samples, tol);
    ckpt_eng_release(&c->e);
    fd_free(f);
    fd_free(&w);
}

#define PARAM(p, g, name, n, scale)                                                                \
    do {                                                                                           \
        (p).name = fd_add(&f, #name, n, scale);                                                    \
        (g).name = fd_grad(&f, (p).name);                                                          \
    } while (0)

static const struct {
    int64_t RQ;
    ckpt_eng_gate gate;
    bool norm, centered;
    int rope; /* index into ropes, -1 NoPE */
} mlas[] = {
    {0, CKPT_ENG_GATE_NONE,    true,  false, 0 },
    {7, CKPT_ENG_GATE_NONE,    true,  true,  2 },
    {7, CKPT_ENG_GATE_HEAD,    true,  false, -1},
    {0, CKPT_ENG_GATE_ELEMENT, false, false, -1},
};

static void make_mla(block_case *c, fd *out, int i)
{
    static const ckpt_eng_rope none = {.kind = CKPT_ENG_ROPE_NONE};
    fd f = *out;
    ckpt_eng_mla *m = &c->mla;
    c->H = 14;
    *m = (ckpt_eng_mla){.H = 14,
                        .N = 3,
                        .RQ = mlas[i].RQ,
                        .RK = 9,
                        .DN = 6,
                        .DR = 8,
                        .DV = 5,
                        .gate = mlas[i].gate,
                        .latent_norm = mlas[i].norm,
                        .centered = mlas[i].centered,
                        .eps = 1e-6};
    c->table = mlas[i].rope < 0 ? &none : &ropes[mlas[i].rope];
    m->rope = *c->table;
    int64_t dq = m->DN + m->DR, per = m->gate == CKPT_ENG_GATE_HEAD ? 1 : m->DV;
    if (m->RQ > 0) {
        PARAM(c->pm, c->gm, q_a, m->RQ * m->H, 0.5);
        PARAM(c->pm, c->gm, q_b, m->N * dq * m->RQ, 0.5);
        if (m->latent_norm)
            PARAM(c->pm, c->gm, q_a_norm, m->RQ, 1);
    } else {
        PARAM(c->pm, c->gm, q, m->N * dq * m->H, 0.5);
    }
    PARAM(c->pm, c->gm, kv_a, (m->RK + m->DR) * m->H, 0.5);
    if (m->latent_norm)
        PARAM(c->pm, c->gm, kv_a_norm, m->RK, 1);
    PARAM(c->pm, c->gm, kv_b, m->N * (m->DN + m->DV) * m->RK, 0.5);
    if (m->gate != CKPT_ENG_GATE_NONE)
        PARAM(c->pm, c->gm, gate, m->N * per * m->H, 0.5);
    PARAM(c->pm, c->gm, o, m->H * m->N * m->DV, 0.5);
    *out = f;
}

START_TEST(mla_gradients_are_its_differences)
{
    block_case c = {.what = 0};
    fd f = {.seed = 5};
    make_mla(&c, &f, _i);
    block_check(&c, &f, 12, 1e-8);
}
END_TEST

/* A rotation that should not be there, or is missing, shows in the output. */
START_TEST(mla_without_rotation_differs_from_with)
{
    block_case c = {.what = 0};
    fd f = {.seed = 5}, w = {.seed = 6};
    ckpt_err err = {0};
    make_mla(&c, &f, 0);
    c.x = fd_add(&w, "x", T_PACKED * c.H, 1);
    c.w = fd_add(&w, "w", T_PACKED * c.H, 1);
    c.y = fd_add(&w, "y", T_PACKED * c.H, 1);
    real *other = fd_add(&w, "other", T_PACKED * c.H, 1);
    c.cos = fd_add(&w, "cos", T_PACKED * 32, 1);
    c.sin = fd_add(&w, "sin", T_PACKED * 32, 1);
    c.rope = (ENG(rope_tables)){c.cos, c.sin};
    ckpt_eng_init(&c.e, 1);
    block_run(&c, false);
    ck_assert_int_eq(ckpt_eng_reserve(&c.e, c.e.peak, &err), CKPT_OK);
    block_run(&c, false);
    memcpy(other, c.y, sizeof(real) * (size_t)(T_PACKED * c.H));
    c.mla.rope.kind = CKPT_ENG_ROPE_NONE;
    block_run(&c, false);
    double most = 0;
    for (int64_t i = 0; i < T_PACKED * c.H; i++)
        most = fmax(most, fabs(c.y[i] - other[i]));
    ck_assert_double_gt(most, 1e-2);
    ckpt_eng_release(&c.e);
    fd_free(&f);
    fd_free(&w);
}
END_TEST

/* Token by token through the cache of latents gives what the expanded form gives. */
START_TEST(mla_decode_equals_the_expanded_form)
{
    enum { ROOM = 90 };
    block_case c = {.what = 0};
    fd f = {.seed = 5}, w = {.seed = 6};
    ckpt_err err = {0};
    make_mla(&c, &f, _i);
    int64_t wide = c.mla.RK + c.mla.DR, start = 1, len = 70; /* the third sequence */
    c.x = fd_add(&w, "x", T_PACKED * c.H, 1);
    c.w = fd_add(&w, "w", T_PACKED * c.H, 1);
    c.y = fd_add(&w, "y", T_PACKED * c.H, 1);
    real *y = fd_add(&w, "decoded", c.H, 1), *cache = fd_add(&w, "cache", ROOM * wide, 1);
    c.cos = fd_add(&w, "cos", T_PACKED * 32, 1);
    c.sin = fd_add(&w, "sin", T_PACKED * 32, 1);
    c.rope = (ENG(rope_tables)){c.cos, c.sin};
    ckpt_eng_init(&c.e, 1);
    ck_assert_int_eq(ckpt_eng_reserve(&c.e, 8 << 20, &err), CKPT_OK);
    block_run(&c, false);
    for (int64_t t = 0; t < len; t++) {
        int64_t half = c.mla.rope.dim / 2;
        ENG(rope_tables) at = {c.cos + (start + t) * half, c.sin + (start + t) * half};
        ckpt_status status = ENG(mla_decode)(&c.e, &c.mla, 1, ROOM, &t, &c.pm, &at,
                                             c.x + (start + t) * c.H, cache, y, &err);
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
        for (int64_t i = 0; i < c.H; i++)
            ck_assert_double_eq_tol(y[i], c.y[(start + t) * c.H + i], 1e-12);
    }
    len = ROOM;
    ck_assert_int_eq(
        ENG(mla_decode)(&c.e, &c.mla, 1, ROOM, &len, &c.pm, &c.rope, c.x, cache, y, &err),
        CKPT_E_USAGE);
    ckpt_eng_release(&c.e);
    fd_free(&f);
    fd_free(&w);
}
END_TEST

START_TEST(mla_refuses_a_norm_weight_that_does_not_fit)
{
    block_case c = {.what = 0};
    fd f = {.seed = 5};
    ckpt_err err = {0};
    ENG(mla_saved) s = {0};
    make_mla(&c, &f, 0);
    ckpt_eng_init(&c.e, 1);
    c.pm.kv_a_norm = NULL;
    ck_assert_int_eq(ENG(mla)(&c.e, &c.mla, &packed, &c.pm, &c.rope, c.x, false, c.y, &s, &err),
                     CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "norm"));
    fd_free(&f);
}
END_TEST

START_TEST(gqa_gradients_are_its_differences)
{
    block_case c = {.what = 1, .H = 11};
    fd f = {.seed = 5};
    bool rich = _i == 1;
    c.gqa = (ckpt_eng_gqa){
        .H = 11,
        .attn = {.N = 4, .G = 2, .DK = 8, .DV = 8},
        .gated = rich,
        .qk_norm = rich,
        .centered = rich,
        .eps = 1e-6
    };
    c.table = &ropes[rich ? 1 : 3];
    c.gqa.rope = *c.table;
    PARAM(c.pg, c.gg, q, 32 * 11, 0.5);
    PARAM(c.pg, c.gg, k, 16 * 11, 0.5);
    PARAM(c.pg, c.gg, v, 16 * 11, 0.5);
    PARAM(c.pg, c.gg, o, 32 * 11, 0.5);
    if (rich) {
        PARAM(c.pg, c.gg, gate, 32 * 11, 0.5);
        PARAM(c.pg, c.gg, q_norm, 8, 1);
        PARAM(c.pg, c.gg, k_norm, 8, 1);
    } else {
        PARAM(c.pg, c.gg, q_bias, 32, 1);
        PARAM(c.pg, c.gg, k_bias, 16, 1);
        PARAM(c.pg, c.gg, v_bias, 16, 1);
    }
    block_check(&c, &f, 12, 1e-8);
}
END_TEST

static const ckpt_eng_moe moes[] = {
    {.H = 10,
     .E = 8,
     .FE = 6,
     .FS = 5,
     .top_k = 2,
     .normalize = true,
     .gated = true,
     .scale = 2.446},
    {.H = 10,
     .E = 8,
     .FE = 6,
     .FS = 5,
     .top_k = 4,
     .groups = 4,
     .group_top_k = 2,
     .group_best = 2,
     .normalize = true,
     .gated = true,
     .scale = 2.5,
     .aux_coef = 0.3,
     .z_coef = 0.1},
    {.H = 10,
     .E = 8,
     .FE = 6,
     .FS = 4,
     .top_k = 3,
     .softmax = true,
     .normalize = true,
     .gated = true,
     .shared_gate = true,
     .scale = 1,
     .aux_coef = 0.3},
    {.H = 10,          .E = 8,           .FE = 6,       .top_k = 1,   .softmax = true, .scale = 1, .z_coef = 0.2  },
};

/* Router weights are spread so that no step of a difference changes the choice. */
START_TEST(moe_gradients_are_its_differences)
{
    block_case c = {.what = 2, .H = 10};
    static const ckpt_eng_rope none = {.kind = CKPT_ENG_ROPE_NONE};
    fd f = {.seed = 21};
    const ckpt_eng_moe *m = &moes[_i];
    c.moe = *m;
    c.table = &none;
    PARAM(c.pe, c.ge, router, m->E * m->H, 1);
    c.pe.experts = c.experts;
    c.ge.experts = c.grads;
    for (int e = 0; e < 8; e++) {
        if (m->gated)
            PARAM(c.experts[e], c.grads[e], gate, m->FE * m->H, 1);
        PARAM(c.experts[e], c.grads[e], up, m->FE * m->H, 1);
        PARAM(c.experts[e], c.grads[e], down, m->H * m->FE, 1);
    }
    if (m->FS > 0) {
        PARAM(c.pe.shared, c.ge.shared, gate, m->FS * m->H, 1);
        PARAM(c.pe.shared, c.ge.shared, up, m->FS * m->H, 1);
        PARAM(c.pe.shared, c.ge.shared, down, m->H * m->FS, 1);
    }
    if (m->shared_gate)
        PARAM(c.pe, c.ge, shared_gate, m->H, 1);
    real bias[8] = {0.1, -0.2, 0.3, 0, 0.05, -0.1, 0.2, 0};
    c.pe.router_bias = m->softmax ? NULL : bias;
    block_check(&c, &f, 6, 2e-7);
}
END_TEST

/* Eight experts, two chosen, in words: the biased choice takes unbiased weights. */
START_TEST(moe_bias_chooses_and_does_not_weigh)
{
    ckpt_eng e;
    ckpt_err err = {0};
    ckpt_eng_moe m = {.H = 1, .E = 4, .FE = 1, .top_k = 2, .normalize = true, .scale = 1};
    real router[4] = {3, 2, 1, 0}, bias[4] = {0, 0, 0, 5}, x[1] = {1}, y[1];
    real up[4] = {1, 1, 1, 1}, down[4] = {1, 10, 100, 1000};
    ENG(mlp_params) experts[4];
    ENG(moe_params) p = {.router = router, .router_bias = bias, .experts = experts};
    ENG(moe_saved) s;
    int64_t counts[4];
    for (int i = 0; i < 4; i++)
        experts[i] = (ENG(mlp_params)){.up = &up[i], .down = &down[i]};
    ckpt_eng_init(&e, 1);
    ck_assert_int_eq(ckpt_eng_reserve(&e, 1 << 22, &err), CKPT_OK);
    ck_assert_int_eq(ENG(moe_save)(&e, &m, 1, &s, &err), CKPT_OK);
    ck_assert_int_eq(ENG(moe)(&e, &m, 1, &p, x, false, y, &s, NULL, counts, &err), CKPT_OK);
    double s0 = 1 / (1 + exp(-3.0)), s3 = 0.5;
    ck_assert_double_eq_tol(y[0], (s0 * 1 + s3 * 1000) / (s0 + s3), 1e-9);
    ck_assert_int_eq(counts[0] + counts[3], 2);
    ckpt_eng_release(&e);
}
END_TEST

/* Groups as Megatron-Core 0.16.1 chooses them (moe_utils.group_limited_topk) for the same sigmoid
 * scores: logit i of a token is its number / 16 + i / 1024. A choice is a mask of experts. */
enum { GROUP_TOKENS = 8, GROUP_EXPERTS = 12 };
static const int8_t group_logits[GROUP_TOKENS][GROUP_EXPERTS] = {
    {18,  11,  26,  -16, 26,  -20, 12,  7,   29,  -22, -28, 14 },
    {-15, 11,  21,  18,  -22, -18, -23, 12,  -17, -28, -22, 24 },
    {1,   -13, 15,  20,  3,   -9,  -22, -29, -23, 24,  20,  15 },
    {-9,  -6,  -19, 29,  22,  12,  -14, -3,  17,  27,  12,  -14},
    {19,  10,  -25, -23, -19, 20,  16,  8,   -14, -18, 3,   -18},
    {24,  -24, 17,  -8,  17,  22,  -27, -24, 24,  30,  15,  14 },
    {-27, 20,  -8,  -25, 30,  24,  -15, 8,   -16, -22, -29, -3 },
    {-26, -15, -25, -16, -9,  -12, 13,  20,  21,  -1,  1,   15 },
};
static const struct {
    int64_t top_k, groups, limit;
    int chosen[GROUP_TOKENS];
} group_choices[] = {
    {3, 4, 2, {336, 2054, 1544, 536, 35, 1792, 50, 2432}    },
    {6, 4, 2, {455, 63, 3640, 3640, 455, 3640, 63, 4032}    },
    {4, 4, 2, {325, 2055, 3592, 1560, 195, 1541, 54, 2496}  },
    {5, 3, 2, {2311, 2063, 3596, 1840, 227, 1797, 182, 3520}},
    {3, 3, 1, {7, 14, 3584, 1792, 224, 1792, 176, 3328}     },
};

START_TEST(moe_groups_choose_as_megatron_does)
{
    ckpt_eng e;
    ckpt_err err = {0};
    int64_t top_k = group_choices[_i].top_k, limit = group_choices[_i].limit;
    ckpt_eng_moe m = {.H = GROUP_EXPERTS,
                      .E = GROUP_EXPERTS,
                      .FE = 1,
                      .top_k = top_k,
                      .scale = 1,
                      .groups = group_choices[_i].groups,
                      .group_top_k = limit,
                      .group_best = top_k / limit};
    real router[GROUP_EXPERTS * GROUP_EXPERTS] = {0}, zero[GROUP_EXPERTS] = {0};
    real x[GROUP_TOKENS * GROUP_EXPERTS], y[GROUP_TOKENS * GROUP_EXPERTS];
    ENG(mlp_params) experts[GROUP_EXPERTS];
    ENG(moe_params) p = {.router = router, .experts = experts};
    ENG(moe_saved) s;
    int64_t counts[GROUP_EXPERTS];
    for (int i = 0; i < GROUP_EXPERTS; i++) {
        router[i * GROUP_EXPERTS + i] = 1;
        experts[i] = (ENG(mlp_params)){.up = zero, .down = zero};
    }
    for (int i = 0; i < GROUP_TOKENS * GROUP_EXPERTS; i++)
        x[i] =
            group_logits[i / GROUP_EXPERTS][i % GROUP_EXPERTS] / 16.0 + i % GROUP_EXPERTS / 1024.0;
    ckpt_eng_init(&e, 2);
    ck_assert_int_eq(ckpt_eng_reserve(&e, 1 << 22, &err), CKPT_OK);
    ck_assert_int_eq(ENG(moe_save)(&e, &m, GROUP_TOKENS, &s, &err), CKPT_OK);
    ck_assert_int_eq(ENG(moe)(&e, &m, GROUP_TOKENS, &p, x, false, y, &s, NULL, counts, &err),
                     CKPT_OK);
    for (int t = 0; t < GROUP_TOKENS; t++) {
        int mask = 0;
        for (int64_t k = 0; k < top_k; k++)
            mask |= 1 << s.chosen[t * top_k + k];
        ck_assert_int_eq(mask, group_choices[_i].chosen[t]);
    }
    ckpt_eng_release(&e);
}
END_TEST

/* ---- embedding and loss ------------------------------------------------------------------------ */

START_TEST(xent_and_embed_have_their_values)
{
    ckpt_eng e;
    ckpt_err err = {0};
    real logits[6] = {1, 2, 3, 0, 0, 0}, weight[2] = {1, 0.5}, loss[2], d[6];
    int32_t labels[2] = {2, -1}, ids[3] = {1, 0, 1}, bad[1] = {2};
    real table[4] = {1, 2, 3, 4}, y[6], dtable[4] = {0};
    ckpt_eng_init(&e, 2);
    ck_assert_int_eq(ckpt_eng_reserve(&e, 64, &err), CKPT_OK);
    ck_assert_int_eq(ENG(xent)(&e, 2, 3, logits, labels, weight, loss, d, &err), CKPT_OK);
    double sum = exp(1) + exp(2) + exp(3);
    ck_assert_double_eq_tol(loss[0], log(sum) - 3, 1e-14);
    ck_assert_double_eq(loss[1], 0);
    ck_assert_double_eq_tol(d[0], exp(1) / sum, 1e-14);
    ck_assert_double_eq_tol(d[2], exp(3) / sum - 1, 1e-14);
    ck_assert_double_eq(d[4], 0);
    labels[0] = 3;
    ck_assert_int_eq(ENG(xent)(&e, 2, 3, logits, labels, weight, loss, d, &err), CKPT_E_FORMAT);
    ck_assert_int_eq(ENG(embed)(&e, 3, 2, 2, ids, table, y, &err), CKPT_OK);
    ck_assert_double_eq(y[0], 3);
    ck_assert_double_eq(y[3], 2);
    ck_assert_int_eq(ENG(embed_bwd)(&e, 3, 2, 2, ids, y, dtable, &err), CKPT_OK);
    ck_assert_double_eq(dtable[2], 6);
    ck_assert_double_eq(dtable[1], 2);
    ck_assert_int_eq(ENG(embed)(&e, 1, 2, 2, bad, table, y, &err), CKPT_E_FORMAT);
    ckpt_eng_release(&e);
}
END_TEST

Suite *suite_engine_attn(void);
Suite *suite_engine_attn(void)
{
    Suite *s = suite_create("engine_attn");
    TCase *t = tcase_create("attention");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, attention_equals_its_definition_and_its_differences, 0, 4);
    tcase_add_test(t, attention_refuses_heads_that_do_not_divide);
    tcase_add_loop_test(t, attention_refuses_parts_that_do_not_fit, 0, 8);
    tcase_add_loop_test(t, rope_inverse_undoes_it_and_scores_depend_on_distance, 0, 4);
    suite_add_tcase(s, t);
    t = tcase_create("blocks");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, mla_gradients_are_its_differences, 0, 4);
    tcase_add_test(t, mla_without_rotation_differs_from_with);
    tcase_add_loop_test(t, mla_decode_equals_the_expanded_form, 0, 4);
    tcase_add_test(t, mla_refuses_a_norm_weight_that_does_not_fit);
    tcase_add_loop_test(t, gqa_gradients_are_its_differences, 0, 2);
    tcase_add_loop_test(t, moe_gradients_are_its_differences, 0, 4);
    tcase_add_test(t, moe_bias_chooses_and_does_not_weigh);
    tcase_add_loop_test(t, moe_groups_choose_as_megatron_does, 0,
                        (int)(sizeof group_choices / sizeof group_choices[0]));
    tcase_add_test(t, xent_and_embed_have_their_values);
    suite_add_tcase(s, t);
    return s;
}
