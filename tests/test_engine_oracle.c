/* The engine against the float64 oracle (tests/peers/kda_oracle.py, arrays written by
 * gen_engine_golden.py): recurrences in both forms on every instruction set, whole blocks. This file is
 * the f64 suite, and is included by that of f32. */
#ifndef CKPT_REAL
#define CKPT_REAL 64
#define LIMIT 1e-12 /* sums of up to 70 steps; measured below 2e-15 */
#define SUITE_NAME "engine_oracle"
#define SUITE suite_engine_oracle
#endif
#include "engine_test.h"

#define DATA "tests/data/engine_kda.safetensors"

static void open_data(void)
{
    golden_set_up(DATA);
}

typedef struct op_case {
    const char *name;
    ckpt_eng_rule rule;
    int64_t B, T, H, HV, K, V;
    double bound;
    bool raw; /* g comes from raw_g, A_log, dt_bias */
    int64_t cu[6];
    int64_t n; /* packed sequences, 0 = batch */
} op_case;

/* clang-format off */
static const op_case op_cases[] = {
    {"softplus",    CKPT_ENG_KDA,  2, 19, 2, 2, 8, 6, 0,  true,  {0}, 0},
    {"grouped",     CKPT_ENG_KDA,  1, 37, 1, 2, 8, 8, 0,  true,  {0}, 0},
    {"bounded",     CKPT_ENG_KDA,  1, 70, 1, 1, 8, 8, -5, true,  {0}, 0},
    {"negative",    CKPT_ENG_KDA,  1, 33, 1, 1, 8, 8, 0,  true,  {0}, 0},
    {"varlen",      CKPT_ENG_KDA,  1, 41, 1, 1, 8, 8, 0,  true,  {0, 1, 17, 18, 41}, 4},
    {"gdn_grouped", CKPT_ENG_GDN,  2, 21, 1, 2, 8, 8, 0,  true,  {0}, 0},
    {"gdn_varlen",  CKPT_ENG_GDN,  1, 70, 1, 1, 6, 8, 0,  true,  {0, 5, 70}, 2},
    {"gdn2",        CKPT_ENG_GDN2, 1, 40, 1, 1, 8, 6, 0,  true,  {0}, 0},
    {"extreme",     CKPT_ENG_KDA,  1, 48, 1, 1, 8, 8, 0,  false, {0}, 0},
};
/* clang-format on */
#define N_OPS ((int)(sizeof op_cases / sizeof *op_cases))

static ckpt_eng_seq sequences(const op_case *c)
{
    if (c->n)
        return (ckpt_eng_seq){c->n, c->cu};
    int64_t *cu = ckpt_arena_array(&memory, (size_t)c->B + 1, sizeof *cu);
    for (int64_t i = 0; i <= c->B; i++)
        cu[i] = i * c->T;
    return (ckpt_eng_seq){c->B, cu};
}

static void check_gate(const op_case *c, int64_t T, int64_t gk, const real *dg)
{
    const real *raw = golden_of(c->name, "in", "raw_g", T * c->HV * gk),
               *A = golden_of(c->name, "in", "A_log", c->HV),
               *dt = golden_of(c->name, "in", "dt_bias", c->HV * gk);
    real *g = zeros(T * c->HV * gk), *draw = zeros(T * c->HV * gk), *dA = zeros(c->HV),
         *ddt = zeros(c->HV * gk);
    OK(ENG(gate)(&engine, T, c->HV, gk, raw, A, dt, c->bound, g, &error));
    CLOSE("g", g, golden_of(c->name, "in", "g", T * c->HV * gk), T * c->HV * gk, LIMIT);
    OK(ENG(gate_bwd)(&engine, T, c->HV, gk, raw, A, dt, c->bound, dg, draw, dA, ddt, &error));
    CLOSE("draw_g", draw, golden_of(c->name, "grad", "draw_g", T * c->HV * gk), T * c->HV * gk,
          LIMIT);
    CLOSE("dA_log", dA, golden_of(c->name, "grad", "dA_log", c->HV), c->HV, LIMIT);
    CLOSE("ddt_bias", ddt, golden_of(c->name, "grad", "ddt_bias", c->HV * gk), c->HV * gk, LIMIT);
}

static void run_op(const op_case *c, ckpt_eng_form form)
{
    const ckpt_eng_delta d = {
        .rule = c->rule, .form = form, .H = c->H, .HV = c->HV, .K = c->K, .V = c->V};
    const ckpt_eng_seq seq = sequences(c);
    const bool gdn2 = c->rule == CKPT_ENG_GDN2;
    const int64_t T = c->B * c->T, gk = c->rule == CKPT_ENG_GDN ? 1 : c->K;
    const int64_t nk = T * c->H * c->K, nv = T * c->HV * c->V, ng = T * c->HV * gk,
                  ne = gdn2 ? T * c->HV * c->K : T * c->HV, ns = seq.n * c->HV * c->K * c->V;
    const ENG(delta_in) in = {.q = golden_of(c->name, "in", "q", nk),
                              .k = golden_of(c->name, "in", "k", nk),
                              .v = golden_of(c->name, "in", "v", nv),
                              .g = golden_of(c->name, "in", "g", ng),
                              .erase = golden_of(c->name, "in", gdn2 ? "b" : "beta", ne),
                              .write = gdn2 ? golden_of(c->name, "in", "w", nv) : NULL,
                              .state0 = golden_of(c->name, "in", "s0", ns)};
    const ENG(delta_grad) g = {.q = zeros(nk),
                               .k = zeros(nk),
                               .v = zeros(nv),
                               .g = zeros(ng),
                               .erase = zeros(ne),
                               .write = gdn2 ? zeros(nv) : NULL,
                               .state0 = zeros(ns)};
    real *o = zeros(nv), *state = zeros(ns), *saved = zeros(ENG(delta_saved_len)(&d, &seq));
    OK(ENG(delta)(&engine, &d, &seq, &in, o, state, saved, &error));
    CLOSE("o", o, golden_of(c->name, "out", "o", nv), nv, LIMIT);
    CLOSE("final state", state, golden_of(c->name, "out", "s_final", ns), ns, LIMIT);
    OK(ENG(delta_bwd)(&engine, &d, &seq, &in, saved, golden_of(c->name, "in", "do", nv),
                      golden_of(c->name, "in", "ds_final", ns), &g, &error));
    CLOSE("dq", g.q, golden_of(c->name, "grad", "dq", nk), nk, LIMIT);
    CLOSE("dk", g.k, golden_of(c->name, "grad", "dk", nk), nk, LIMIT);
    CLOSE("dv", g.v, golden_of(c->name, "grad", "dv", nv), nv, LIMIT);
    CLOSE("dg", g.g, golden_of(c->name, "grad", "dg", ng), ng, LIMIT);
    CLOSE("erase", g.erase, golden_of(c->name, "grad", gdn2 ? "db" : "dbeta", ne), ne, LIMIT);
    if (gdn2)
        CLOSE("write", g.write, golden_of(c->name, "grad", "dw", nv), nv, LIMIT);
    CLOSE("ds0", g.state0, golden_of(c->name, "grad", "ds0", ns), ns, LIMIT);
    if (c->raw)
        check_gate(c, T, gk, golden_of(c->name, "grad", "dg", ng));
}

/* Loop index: case, instruction set. */
START_TEST(delta_step_and_chunk_match_the_oracle)
{
    const ckpt_eng_isa isa = (ckpt_eng_isa)(_i / N_OPS);
    if (isa > ckpt_eng_detect())
        return;
    engine.isa = isa;
    run_op(&op_cases[_i % N_OPS], CKPT_ENG_STEP);
    run_op(&op_cases[_i % N_OPS], CKPT_ENG_CHUNK);
}
END_TEST

/* ---- blocks --------------------------------------------------------------------------------- */

typedef struct layer_case {
    op_case op;
    int64_t f_rank, z_rank;
} layer_case;

/* clang-format off */
static const layer_case layer_cases[] = {
    {{"layer_full",           CKPT_ENG_KDA, 1, 19, 2, 2, 6, 6, 0,  true, {0}, 0}, 0, 0},
    {{"layer_f_rank",         CKPT_ENG_KDA, 1, 19, 2, 2, 6, 6, 0,  true, {0}, 0}, 4, 0},
    {{"layer_z_rank",         CKPT_ENG_KDA, 1, 19, 2, 2, 6, 6, 0,  true, {0}, 0}, 0, 5},
    {{"layer_both_ranks",     CKPT_ENG_KDA, 1, 19, 2, 2, 6, 6, 0,  true, {0}, 0}, 4, 5},
    {{"layer_bounded_varlen", CKPT_ENG_KDA, 1, 19, 2, 2, 6, 6, -5, true, {0, 2, 11, 19}, 3}, 0, 0},
    {{"layer_gdn_grouped",    CKPT_ENG_GDN, 2, 15, 2, 4, 6, 6, 0,  true, {0}, 0}, 0, 0},
};
/* clang-format on */
#define N_LAYERS ((int)(sizeof layer_cases / sizeof *layer_cases))
#define HIDDEN 10
#define WIDTH 4

typedef struct param {
    const char *name;
    real **weight, **grad;
    int64_t n;
} param;

/* Every parameter of the layer; returns their number. Absent ones are left out. */
static size_t params_of(const layer_case *l, ENG(linattn_params) * p, ENG(linattn_params) * g,
                        param *out)
{
    const op_case *c = &l->op;
    const int64_t D = HIDDEN, QK = c->H * c->K, VD = c->HV * c->V,
                  DF = c->rule == CKPT_ENG_GDN ? c->HV : c->HV * c->K;
    const param all[] = {
        {"query",      &p->q,       &g->q,       QK * D                },
        {"key",        &p->k,       &g->k,       QK * D                },
        {"value",      &p->v,       &g->v,       VD * D                },
        {"conv_query", &p->conv_q,  &g->conv_q,  QK * WIDTH            },
        {"conv_key",   &p->conv_k,  &g->conv_k,  QK * WIDTH            },
        {"conv_value", &p->conv_v,  &g->conv_v,  VD * WIDTH            },
        {"f",          &p->f,       &g->f,       l->f_rank ? 0 : DF * D},
        {"f_a",        &p->f_a,     &g->f_a,     l->f_rank * D         },
        {"f_b",        &p->f_b,     &g->f_b,     l->f_rank * DF        },
        {"gate",       &p->z,       &g->z,       l->z_rank ? 0 : VD * D},
        {"gate_a",     &p->z_a,     &g->z_a,     l->z_rank * D         },
        {"gate_b",     &p->z_b,     &g->z_b,     l->z_rank * VD        },
        {"beta",       &p->erase,   &g->erase,   c->HV * D             },
        {"A_log",      &p->A_log,   &g->A_log,   c->HV                 },
        {"dt_bias",    &p->dt_bias, &g->dt_bias, DF                    },
        {"out_norm",   &p->norm,    &g->norm,    c->V                  },
        {"out_proj",   &p->out,     &g->out,     D * VD                },
    };
    size_t n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].n > 0)
            out[n++] = all[i];
    return n;
}

/* In chunks, token by token, and (KDA) by the materialised prefill with nothing rounded. */
START_TEST(linattn_matches_the_oracle)
{
    static const ckpt_quant exact = {.enabled = true, .matmul = true, .block_v = 64};
    const layer_case *l = &layer_cases[_i % N_LAYERS];
    const op_case *c = &l->op;
    if (_i >= 2 * N_LAYERS && c->rule != CKPT_ENG_KDA)
        return;
    const ckpt_eng_seq seq = sequences(c);
    const int64_t n = c->B * c->T * HIDDEN;
    const ckpt_eng_linattn b = {
        .quant = _i >= 2 * N_LAYERS ? &exact : NULL,
        .delta = {.rule = c->rule,
                  .form = _i < N_LAYERS ? CKPT_ENG_CHUNK : CKPT_ENG_STEP,
                  .H = c->H,
                  .HV = c->HV,
                  .K = c->K,
                  .V = c->V},
        .D = HIDDEN,
        .W = WIDTH,
        .f_rank = l->f_rank,
        .z_rank = l->z_rank,
        .bound = c->bound,
        .act = c->rule == CKPT_ENG_KDA ? CKPT_ENG_SIGMOID : CKPT_ENG_SILU,
        .eps = 1e-5
    };
    ENG(linattn_params) p = {0}, g = {0};
    ENG(linattn_saved) saved;
    param list[17];
    size_t count = params_of(l, &p, &g, list);
    for (size_t i = 0; i < count; i++) {
        *list[i].weight = golden_of(c->name, "param", list[i].name, list[i].n);
        *list[i].grad = zeros(list[i].n);
    }
    const real *x = golden_of(c->name, "in", "x", n), *dy = golden_of(c->name, "in", "dy", n);
    real *y = zeros(n), *dx = numbers(n, -1, 1);
    /* The same calls dry, then in an arena of exactly the size that they asked for. */
    ckpt_eng_release(&engine);
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1)
            OK(ckpt_eng_reserve(&engine, engine.peak, &error));
        OK(ENG(linattn_save)(&engine, &b, &seq, &saved, &error));
        OK(ENG(linattn)(&engine, &b, &seq, &p, x, false, y, NULL, &saved, &error));
        OK(ENG(linattn_bwd)(&engine, &b, &seq, &p, &saved, x, dy, false, dx, &g, &error));
    }
    CLOSE("y", y, golden_of(c->name, "out", "y", n), n, LIMIT);
    CLOSE("dx", dx, golden_of(c->name, "grad", "x", n), n, LIMIT);
    for (size_t i = 0; i < count; i++)
        CLOSE(list[i].name, *list[i].grad, golden_of(c->name, "grad", list[i].name, list[i].n),
              list[i].n, LIMIT);
}
END_TEST

/* Recurrent inference has no chunks whose state could be rounded. */
START_TEST(linattn_with_a_policy_takes_no_state)
{
    static const ckpt_quant exact = {.enabled = true, .matmul = true, .block_v = 64};
    static const int64_t cu[] = {0, 3};
    const ckpt_eng_seq seq = {1, cu};
    ckpt_eng_linattn b = {
        .delta = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 1, .K = 4, .V = 4},
        .D = 8,
        .W = 2,
        .quant = &exact,
        .eps = 1e-5
    };
    const ENG(linattn_params) p = {0};
    ENG(linattn_state) state = {0};
    ENG(linattn_saved) saved;
    OK(ENG(linattn_save)(&engine, &b, &seq, &saved, &error));
    ck_assert_int_eq(ENG(linattn)(&engine, &b, &seq, &p, NULL, false, NULL, &state, &saved, &error),
                     CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "recurrent inference"));
    b.bound = -6;
    ck_assert_int_eq(ENG(linattn_save)(&engine, &b, &seq, &saved, &error), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "bounded at -6"));
    b.bound = 0;
    b.delta.rule = CKPT_ENG_GDN;
    ck_assert_int_eq(ENG(linattn_save)(&engine, &b, &seq, &saved, &error), CKPT_E_UNSUPPORTED);
}
END_TEST

Suite *SUITE(void);
Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, open_data, golden_tear_down);
    tcase_add_loop_test(tc, delta_step_and_chunk_match_the_oracle, 0, CKPT_ENG_ISA_COUNT * N_OPS);
    tcase_add_loop_test(tc, linattn_matches_the_oracle, 0, 3 * N_LAYERS);
    tcase_add_test(tc, linattn_with_a_policy_takes_no_state);
    suite_add_tcase(s, tc);
    return s;
}
