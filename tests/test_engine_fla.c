/* The f32 engine against what flash-linear-attention computed: chunk_kda with l2norm, gate and beta
 * inside (fixtures/fla/chunk_kda_fp32.safetensors). Its products are TF32: the float64 oracle itself is
 * 1.1e-3 to 2.0e-3 away from every array, so that distance, not ours, sets the limit. Also the accuracy
 * of the f32 elementary functions. */
#define CKPT_REAL 32
#include "engine_test.h"

#define LIMIT 3e-3
enum { NT = 192, NH = 2, NK = 64, HK = NH * NK, NS = NH * NK * NK };

static const ckpt_eng_seq whole = {
    1, (const int64_t[]){0, NT}
};

static void near(const char *name, const real *x, int64_t n)
{
    CLOSE(name, x, golden_array(name, n), n, LIMIT);
}

START_TEST(kda_matches_chunk_kda_of_fla)
{
    const ckpt_eng_delta d = {.rule = CKPT_ENG_KDA,
                              .form = (ckpt_eng_form)_i,
                              .H = NH,
                              .HV = NH,
                              .K = NK,
                              .V = NK,
                              .scale = 0.125};
    const int64_t n = NT * HK;
    real *q = zeros(n), *k = zeros(n), *rq = zeros(NT * NH), *rk = zeros(NT * NH), *g = zeros(n),
         *beta = zeros(NT * NH), *o = zeros(n), *state = zeros(NS), *dA = zeros(NH),
         *ddt = zeros(HK);
    golden_open(CKPT_FIXTURES "/fla/chunk_kda_fp32.safetensors");
    const real *raw = golden_array("raw_g", n), *A = golden_array("A_log", NH),
               *dt = golden_array("dt_bias", HK);
    OK(ENG(l2norm)(&engine, NT * NH, NK, golden_array("q", n), 1e-6, q, rq, &error));
    OK(ENG(l2norm)(&engine, NT * NH, NK, golden_array("k", n), 1e-6, k, rk, &error));
    OK(ENG(gate)(&engine, NT, NH, NK, raw, A, dt, 0, g, &error));
    OK(ENG(sigmoid)(&engine, NT * NH, 1, golden_array("raw_beta", NT * NH), beta, &error));
    const ENG(delta_in) in = {.q = q,
                              .k = k,
                              .v = golden_array("v", n),
                              .g = g,
                              .erase = beta,
                              .state0 = golden_array("initial_state", NS)};
    const ENG(delta_grad) grad = {.q = zeros(n),
                                  .k = zeros(n),
                                  .v = zeros(n),
                                  .g = zeros(n),
                                  .erase = zeros(NT * NH),
                                  .state0 = zeros(NS)};
    real *saved = zeros(ENG(delta_saved_len)(&d, &whole));
    OK(ENG(delta)(&engine, &d, &whole, &in, o, state, saved, &error));
    OK(ENG(delta_bwd)(&engine, &d, &whole, &in, saved, golden_array("do", n),
                      golden_array("dfinal_state", NS), &grad, &error));
    OK(ENG(l2norm_bwd)(&engine, NT * NH, NK, q, rq, grad.q, grad.q, &error));
    OK(ENG(l2norm_bwd)(&engine, NT * NH, NK, k, rk, grad.k, grad.k, &error));
    OK(ENG(gate_bwd)(&engine, NT, NH, NK, raw, A, dt, 0, grad.g, grad.g, dA, ddt, &error));
    OK(ENG(sigmoid_bwd)(&engine, NT * NH, 1, beta, grad.erase, grad.erase, &error));
    near("o", o, n);
    near("final_state", state, NS);
    near("dq", grad.q, n);
    near("dk", grad.k, n);
    near("dv", grad.v, n);
    near("draw_g", grad.g, n);
    near("draw_beta", grad.erase, NT * NH);
    near("dinitial_state", grad.state0, NS);
    near("dA_log", dA, NH);
    near("ddt_bias", ddt, HK);
    ckpt_source_close(&golden);
}
END_TEST

/* sigmoid and softplus against the C library in double, on every instruction set. */
#define POINTS 40001

START_TEST(elementary_functions_are_within_a_few_ulp)
{
    engine.isa = (ckpt_eng_isa)_i;
    if (engine.isa > ckpt_eng_detect())
        return;
    real *x = zeros(POINTS), *s = zeros(POINTS), *g = zeros(POINTS), *dt = zeros(POINTS),
         A[1] = {0};
    for (int i = 0; i < POINTS; i++)
        x[i] = (real)(i - POINTS / 2) * 0.004f; /* -80 .. 80 */
    OK(ENG(sigmoid)(&engine, POINTS, 1, x, s, &error));
    OK(ENG(gate)(&engine, 1, 1, POINTS, x, A, dt, 0, g, &error));
    for (int i = 0; i < POINTS; i++) {
        double v = x[i], sig = 1 / (1 + exp(-v)), soft = v > 0 ? v + log1p(exp(-v)) : log1p(exp(v));
        ck_assert_msg(fabs(s[i] - sig) <= 4 * 6e-8 * sig, "sigmoid(%g) = %.9g", v, s[i]);
        ck_assert_msg(fabs(-g[i] - soft) <= 4 * 6e-8 * soft, "softplus(%g) = %.9g", v, -g[i]);
    }
}
END_TEST

START_TEST(elementary_functions_keep_limits_and_nan)
{
    engine.isa = (ckpt_eng_isa)_i;
    if (engine.isa > ckpt_eng_detect())
        return;
    enum { N = 17 };
    real x[N], s[N], g[N], zero[N] = {0}, A[1] = {0};
    const real special[] = {NAN, INFINITY, -INFINITY, 200, -200};
    for (int i = 0; i < N; i++)
        x[i] = special[i % 5];
    OK(ENG(sigmoid)(&engine, N, 1, x, s, &error));
    OK(ENG(gate)(&engine, 1, 1, N, x, A, zero, 0, g, &error));
    for (int i = 0; i < N; i++) {
        ck_assert(isnan(x[i]) ? isnan(s[i]) : s[i] == (x[i] > 0 ? 1 : 0));
        ck_assert(isnan(x[i]) ? isnan(g[i]) : -g[i] == (x[i] > 0 ? x[i] : 0));
    }
}
END_TEST

Suite *suite_engine_fla(void);
Suite *suite_engine_fla(void)
{
    Suite *s = suite_create("engine_fla");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, kda_matches_chunk_kda_of_fla, 0, 2);
    tcase_add_loop_test(tc, elementary_functions_are_within_a_few_ulp, 0, CKPT_ENG_ISA_COUNT);
    tcase_add_loop_test(tc, elementary_functions_keep_limits_and_nan, 0, CKPT_ENG_ISA_COUNT);
    suite_add_tcase(s, tc);
    return s;
}
