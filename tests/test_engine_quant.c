/* The materialised KDA prefill against the oracle (tests/peers/quant_oracle.py, arrays written by
 * gen_quant.py): outputs and straight-through gradients of every policy; against the token-by-token
 * recurrence; counts; what every handle changes. This file is the f64 suite, and is included by that of
 * f32, which holds the tolerances of quant-emulation.md section 6 against the same arrays. */
#ifndef CKPT_REAL
#define CKPT_REAL 64
#define SUITE_NAME "engine_quant"
#define SUITE suite_engine_quant
#endif
#include "engine_test.h"

#include "quant/internal.h"
#include "quant_policies.h"

#define DATA "tests/data/quant.safetensors"
#define F64 (CKPT_REAL == 64)

Suite *SUITE(void);

static void open_data(void)
{
    golden_set_up(DATA);
}

/* ---- one run ---------------------------------------------------------------------------------- */

typedef struct scene {
    ckpt_eng_delta d;
    ckpt_eng_seq seq;
    ENG(delta_in) in;
    ENG(delta_grad) grad;
    ENG(quant_saved) saved;
    real *o, *state, *d_o, *d_state;
    int64_t T, nq, nv, ng, ns;
} scene;

static void scene_sizes(scene *s)
{
    s->T = ckpt_eng_tokens(&s->seq);
    s->nq = s->T * s->d.H * s->d.K;
    s->nv = s->T * s->d.HV * s->d.V;
    s->ng = s->T * s->d.HV * s->d.K;
    s->ns = s->seq.n * s->d.HV * s->d.K * s->d.V;
    s->o = zeros(s->nv);
    s->state = zeros(s->ns);
    s->grad = (ENG(delta_grad)){.q = zeros(s->nq),
                                .k = zeros(s->nq),
                                .v = zeros(s->nv),
                                .g = zeros(s->ng),
                                .erase = zeros(s->T * s->d.HV),
                                .state0 = zeros(s->ns)};
}

/* The inputs of the golden arrays. */
static scene golden_scene(void)
{
    static const int64_t cu[] = {0, 5, 72};
    scene s = {
        .d = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = 18, .V = 10},
          .seq = {2,             cu           }
    };
    scene_sizes(&s);
#define IN(name, n) golden_array("prefill/in/" name, n)
    s.in = (ENG(delta_in)){.q = IN("q", s.nq),
                           .k = IN("k", s.nq),
                           .v = IN("v", s.nv),
                           .g = IN("g", s.ng),
                           .erase = IN("beta", s.T * s.d.HV),
                           .state0 = IN("s0", s.ns)};
    s.d_o = IN("do", s.nv);
    s.d_state = IN("ds_final", s.ns);
#undef IN
    return s;
}

/* Unit rows, as q and k are. */
static real *units(int64_t rows, int64_t n)
{
    real *x = numbers(rows * n, -1, 1);
    for (int64_t r = 0; r < rows; r++) {
        real sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += x[r * n + i] * x[r * n + i];
        for (int64_t i = 0; i < n; i++)
            x[r * n + i] /= (real)sqrt((double)sum);
    }
    return x;
}

static scene random_scene(ckpt_eng_delta d, int64_t n, const int64_t *cu, double decay)
{
    scene s = {
        .d = d, .seq = {n, cu}
    };
    s.d.rule = CKPT_ENG_KDA;
    scene_sizes(&s);
    s.in = (ENG(delta_in)){.q = units(s.T * d.H, d.K),
                           .k = units(s.T * d.H, d.K),
                           .v = numbers(s.nv, -1, 1),
                           .g = numbers(s.ng, -decay, 0),
                           .erase = numbers(s.T * d.HV, 0, 1),
                           .state0 = numbers(s.ns, -0.2, 0.2)};
    s.d_o = numbers(s.nv, -1, 1);
    s.d_state = numbers(s.ns, -1, 1);
    return s;
}

static void run(scene *s, const ckpt_quant *q, ckpt_quant_report *report, bool backward)
{
    const size_t mark = ckpt_eng_mark(&engine);
    OK(ENG(kda_quant_save)(&engine, q, &s->d, &s->seq, &s->saved, &error));
    OK(ENG(kda_quant)(&engine, q, &s->d, &s->seq, &s->in, s->o, s->state, &s->saved, report,
                      &error));
    if (backward)
        OK(ENG(kda_quant_bwd)(&engine, q, &s->d, &s->seq, &s->in, &s->saved, s->d_o, s->d_state,
                              &s->grad, &error));
    ckpt_eng_drop(&engine, mark);
}

/* ---- against the oracle ----------------------------------------------------------------------- */

static void near(const char *policy, const char *name, const real *x, int64_t n, double limit)
{
    const real *want = golden_array(ckpt_arena_printf(&memory, "prefill/%s/%s", policy, name), n);
    CLOSE(ckpt_arena_printf(&memory, "%s %s", policy, name), x, want, n, F64 ? 1e-12 : limit);
}

START_TEST(every_policy_matches_the_oracle)
{
    const quant_tolerance *p = &quant_policies[_i];
    const ckpt_quant q = quant_policy(p->name);
    scene s = golden_scene();
    run(&s, &q, NULL, true);
    near(p->name, "o", s.o, s.nv, p->output);
    near(p->name, "s_final", s.state, s.ns, p->output);
    near(p->name, "dq", s.grad.q, s.nq, p->gradient);
    near(p->name, "dk", s.grad.k, s.nq, p->gradient);
    near(p->name, "dv", s.grad.v, s.nv, p->gradient);
    near(p->name, "dg", s.grad.g, s.ng, p->gradient);
    near(p->name, "dbeta", s.grad.erase, s.T * s.d.HV, p->gradient);
    near(p->name, "ds0", s.grad.state0, s.ns, p->gradient);
}
END_TEST

/* ---- without the oracle ----------------------------------------------------------------------- */

static const int64_t one_70[] = {0, 70}, packed_70[] = {0, 5, 70}, batch_64[] = {0, 64, 128},
                     one_130[] = {0, 130};

/* The exact path is the recurrence, token by token: plain, packed, strong decay, batch. */
START_TEST(exact_path_is_the_recurrence)
{
    static const struct {
        int64_t n;
        const int64_t *cu;
        double decay;
    } cases[] = {
        {1, one_70,    0.03},
        {2, packed_70, 0.03},
        {1, one_70,    60  },
        {2, batch_64,  0.03}
    };
    const ckpt_quant q = quant_policy("off");
    scene s = random_scene((ckpt_eng_delta){.H = 1, .HV = 2, .K = 16, .V = 24}, cases[_i].n,
                           cases[_i].cu, cases[_i].decay);
    ckpt_eng_delta step = s.d;
    real *o = zeros(s.nv), *state = zeros(s.ns);
    ENG(delta_grad)
    g = {.q = zeros(s.nq),
         .k = zeros(s.nq),
         .v = zeros(s.nv),
         .g = zeros(s.ng),
         .erase = zeros(s.T * s.d.HV),
         .state0 = zeros(s.ns)};
    step.form = CKPT_ENG_STEP;
    real *saved = zeros(ENG(delta_saved_len)(&step, &s.seq));
    OK(ENG(delta)(&engine, &step, &s.seq, &s.in, o, state, saved, &error));
    OK(ENG(delta_bwd)(&engine, &step, &s.seq, &s.in, saved, s.d_o, s.d_state, &g, &error));
    run(&s, &q, NULL, true);
    const double limit = F64 ? 1e-12 : 2e-6, grad = F64 ? 1e-10 : 1e-5;
    CLOSE("o", s.o, o, s.nv, limit);
    CLOSE("state", s.state, state, s.ns, limit);
    CLOSE("dq", s.grad.q, g.q, s.nq, grad);
    CLOSE("dk", s.grad.k, g.k, s.nq, grad);
    CLOSE("dv", s.grad.v, g.v, s.nv, grad);
    /* With strong decay dg is a small difference of sums that are a hundred times larger. */
    CLOSE("dg", s.grad.g, g.g, s.ng, cases[_i].decay > 1 ? 100 * limit : grad);
    CLOSE("dbeta", s.grad.erase, g.erase, s.T * s.d.HV, grad);
    CLOSE("ds0", s.grad.state0, g.state0, s.ns, grad);
}
END_TEST

/* Calls as the source counts them: 8 tiles, the solve once, the walk a chunk, the state once more. */
START_TEST(handles_are_called_as_often_as_the_source_calls_them)
{
    const ckpt_quant off = quant_policy("off"), q = quant_policy("rounded");
    ckpt_quant_report none = {.calls = {0}}, r = {.calls = {0}};
    scene s = random_scene((ckpt_eng_delta){.H = 1, .HV = 2, .K = 16, .V = 24}, 1, one_130, 0.03);
    int64_t sum = 0;
    run(&s, &off, &none, false);
    run(&s, &q, &r, false);
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++) {
        ck_assert_int_eq(none.calls[h], 0);
        sum += r.calls[h];
    }
    ck_assert_int_eq(r.calls[CKPT_HANDLE_KEY_INTERACTION_RHS], 8);
    ck_assert_int_eq(r.calls[CKPT_HANDLE_WY_KEY_LHS], 1);
    ck_assert_int_eq(r.calls[CKPT_HANDLE_W], 3);
    ck_assert_int_eq(r.calls[CKPT_HANDLE_STATE], 4);
    ck_assert_int_eq(sum, 2 * 2 * 8 + 4 + 4 * 2 * 3 + 3 + 1);
}
END_TEST

/* No handle is decoration: each alone changes the result, and not by much. */
START_TEST(every_handle_changes_the_result)
{
    const ckpt_quant off = quant_policy("off");
    scene s = random_scene((ckpt_eng_delta){.H = 1, .HV = 2, .K = 16, .V = 24}, 1, one_130, 0.03);
    run(&s, &off, NULL, false);
    const real *base = copy_of(s.o, s.nv);
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++) {
        ckpt_quant q = off;
        q.kind[h] = h == CKPT_HANDLE_STATE ? CKPT_QUANT_STATE_E4M3 : CKPT_QUANT_FP8;
        run(&s, &q, NULL, false);
        double far = distance(s.o, base, s.nv);
        ck_assert_msg(far > 1e-5 && far < 0.2, "%s: the output moves by %.3g", ckpt_handle_names[h],
                      far);
    }
}
END_TEST

/* NVFP4 has one scale over everything: with it the threads share the most. */
START_TEST(results_do_not_depend_on_threads)
{
    const ckpt_quant q = quant_policy("mixed");
    scene s = golden_scene();
    run(&s, &q, NULL, true);
    const real *o = copy_of(s.o, s.nv), *dk = copy_of(s.grad.k, s.nq),
               *dg = copy_of(s.grad.g, s.ng);
    for (int threads = 1; threads <= 5; threads += 2) {
        engine.threads = threads;
        run(&s, &q, NULL, true);
        ck_assert(same_bits(s.o, o, s.nv));
        ck_assert(same_bits(s.grad.k, dk, s.nq));
        ck_assert(same_bits(s.grad.g, dg, s.ng));
    }
}
END_TEST

/* The series is an inverse from 6 factors on, and says how far it is from one before. */
START_TEST(approximate_inverse_reports_its_error)
{
    ckpt_quant q = quant_policy("off");
    double errors[7];
    scene s = random_scene((ckpt_eng_delta){.H = 1, .HV = 1, .K = 16, .V = 8}, 1, one_70, 0.03);
    run(&s, &q, NULL, false);
    const real *exact = copy_of(s.o, s.nv);
    for (q.solve_factors = 1; q.solve_factors <= 6; q.solve_factors++) {
        ckpt_quant_report r = {.calls = {0}};
        run(&s, &q, &r, false);
        errors[q.solve_factors] = r.inverse_error;
        if (q.solve_factors < 4) {
            ck_assert_msg(r.inverse_error > 1e-3 && r.inverse_residual > 1e-3,
                          "%d factors: errors %.3g, %.3g", q.solve_factors, r.inverse_error,
                          r.inverse_residual);
            ck_assert(distance(s.o, exact, s.nv) > 1e-4);
        }
    }
    ck_assert_msg(errors[6] < (F64 ? 1e-11 : 1e-4), "6 factors: error %.3g", errors[6]);
    CLOSE("o of 6 factors", s.o, exact, s.nv, F64 ? 1e-11 : 1e-4);
}
END_TEST

/* A sum of a site, both as one element and as a product; they must be one number. */
static double scheduled(ckpt_quant_dtype dtype, int64_t block, int64_t k, const real *a,
                        const real *b)
{
    ckpt_quant q = quant_policy("off");
    q.accumulator[CKPT_SITE_WY_KEY] = dtype;
    q.block[CKPT_SITE_WY_KEY] = block;
    const real one = ENG(quant_dot)(&q, CKPT_SITE_WY_KEY, k, a, b);
    real all, room;
    ENG(quant_product)(&q, CKPT_SITE_WY_KEY, 1, 1, k, a, b, &all, &room);
    ck_assert_double_eq((double)one, (double)all);
    return (double)one;
}

/* The oracle's, one by one: a block's sum is added, then the sum rounded. */
START_TEST(accumulators_round_after_every_block)
{
    real one[64], unit[64] = {1}, x[64] = {0};
    for (int i = 0; i < 64; i++) {
        one[i] = 1;
        x[i] = 2048;
    }
    ck_assert_double_eq(scheduled(CKPT_QUANT_F16, 16, 64, x, unit), 2048);
    memset(x, 0, sizeof x);
    x[0] = 2048;
    x[16] = x[32] = x[48] = 1;
    ck_assert_double_eq(scheduled(CKPT_QUANT_F16, 16, 64, x, one),
                        2048); /* 2049 falls back, thrice */
    ck_assert_double_eq(scheduled(CKPT_QUANT_F16, 64, 64, x, one), 2052); /* 2051 rounds once */
    ck_assert_double_eq(scheduled(CKPT_QUANT_NO_ROUNDING, 0, 64, x, one), 2051);
    ck_assert_double_eq(scheduled(CKPT_QUANT_F32, 16, 64, x, one), 2051);
    x[0] = 70000;
    ck_assert(isinf(scheduled(CKPT_QUANT_F16, 16, 64, x, one)));
}
END_TEST

/* Products of multiples of 1/8, whose sums of 16 are exact in any order; 70 leaves a short block of 6. */
START_TEST(accumulators_end_with_a_short_block)
{
    enum { M = 5, N = 6, LEN = 70 };
    real a[M * LEN], b[N * LEN], c[M * N], tmp[M * N];
    uint32_t state = 1;
    ckpt_quant q = quant_policy("off");
    q.accumulator[CKPT_SITE_OUTPUT_VALUE] = CKPT_QUANT_F16;
    q.block[CKPT_SITE_OUTPUT_VALUE] = 16;
    for (int i = 0; i < (M + N) * LEN; i++) {
        state = state * 1664525u + 1013904223u;
        *(i < M * LEN ? &a[i] : &b[i - M * LEN]) = (real)((int)(state >> 26) - 32) / 8;
    }
    ENG(quant_product)(&q, CKPT_SITE_OUTPUT_VALUE, M, N, LEN, a, b, c, tmp);
    int rounded = 0;
    for (int i = 0; i < M * N; i++) {
        float sum = 0;
        double plain = 0;
        for (int lo = 0; lo < LEN; lo += 16) {
            double part = 0;
            for (int k = lo; k < LEN && k < lo + 16; k++)
                part += (double)a[i / N * LEN + k] * (double)b[i % N * LEN + k];
            sum = ckpt_f16_round(sum + (float)part);
            plain += part;
        }
        ck_assert_msg((double)c[i] == (double)sum, "element %d: %.9g, not %.9g", i, (double)c[i],
                      (double)sum);
        rounded += (double)sum != plain;
    }
    ck_assert_int_gt(rounded, M * N / 4); /* the roundings were felt */
}
END_TEST

/* What cannot be run is named. */
START_TEST(unsupported_sequences_and_sizes_are_refused)
{
    static const int64_t empty[] = {0, 4, 4, 9}, back[] = {0, 4, 3};
    const ckpt_quant q = quant_policy("off");
    ENG(quant_saved) saved;
    ckpt_eng_delta d = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = 8, .V = 8};
    const ckpt_eng_seq one = {1, one_70}, hole = {3, empty}, wrong = {2, back};
    ck_assert_int_eq(ENG(kda_quant_save)(&engine, &q, &d, &hole, &saved, &error),
                     CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "sequence 1 of the packed ones is empty"));
    ck_assert_int_eq(ENG(kda_quant_save)(&engine, &q, &d, &wrong, &saved, &error), CKPT_E_USAGE);
    d.rule = CKPT_ENG_GDN;
    ck_assert_int_eq(ENG(kda_quant_save)(&engine, &q, &d, &one, &saved, &error),
                     CKPT_E_UNSUPPORTED);
    d.rule = CKPT_ENG_KDA;
    d.H = 2;
    d.HV = 3;
    ck_assert_int_eq(ENG(kda_quant_save)(&engine, &q, &d, &one, &saved, &error), CKPT_E_USAGE);
    d.HV = 2;
    d.K = 1025;
    ck_assert_int_eq(ENG(kda_quant_save)(&engine, &q, &d, &one, &saved, &error),
                     CKPT_E_UNSUPPORTED);
}
END_TEST

Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *golden_case = tcase_create("oracle"), *own = tcase_create("own");
    tcase_set_timeout(golden_case, 60);
    tcase_add_checked_fixture(golden_case, open_data, golden_tear_down);
    tcase_add_loop_test(golden_case, every_policy_matches_the_oracle, 0, N_QUANT_POLICIES);
    tcase_add_test(golden_case, results_do_not_depend_on_threads);
    suite_add_tcase(s, golden_case);
    tcase_set_timeout(own, 60);
    tcase_add_checked_fixture(own, set_up, tear_down);
    tcase_add_loop_test(own, exact_path_is_the_recurrence, 0, 4);
    tcase_add_test(own, handles_are_called_as_often_as_the_source_calls_them);
    tcase_add_test(own, every_handle_changes_the_result);
    tcase_add_test(own, approximate_inverse_reports_its_error);
    tcase_add_test(own, accumulators_round_after_every_block);
    tcase_add_test(own, accumulators_end_with_a_short_block);
    tcase_add_test(own, unsupported_sequences_and_sizes_are_refused);
    suite_add_tcase(s, own);
    return s;
}
