/* The optimizer against torch.optim.AdamW, torch.optim.Muon, emerging_optimizers' Muon and
 * clip_grad_norm_ (tests/data/train.safetensors, written by tests/peers/gen_train.py), and against its own
 * promises: equal bits at any thread count, instruction set and cut. */
#define CKPT_REAL 32
#include "engine_test.h"

#include "layout.h"
#include "train/optim.h"

Suite *suite_train_optim(void);

static void open_golden(void)
{
    golden_set_up("tests/data/train.safetensors");
}

static const double rates[] = {1e-3, 7e-4, 2e-3, 0.0, 5e-4, 1e-3};

/* ---- AdamW ------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    double beta1, beta2, eps, wd;
} adamw_cases[] = {
    {"default", 0.9, 0.999, 1e-8, 0.1},
    {"fast",    0.9, 0.95,  1e-5, 0.0},
    {"plain",   0.0, 0.5,   1e-3, 0.5},
};
#define ADAMW_N 301

/* How many units of 2^-24 of an element's size apart at most; the size includes that of `term`, what
 * was added last, as the sum may cancel. */
static double units(const float *x, const float *ref, const float *term, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        const double added = term ? fabs((double)term[i]) : 0;
        const double size = fmax(fmax(fabs((double)ref[i]), added), 1e-30);
        worst = fmax(worst, fabs((double)x[i] - (double)ref[i]) / size * 0x1p24);
    }
    return worst;
}

/* A step adds three terms, each rounded once, so 4 units a step; v sums products that the peer may or
 * may not fuse. */
START_TEST(adamw_six_steps_follow_torch)
{
    const char *name = adamw_cases[_i].name;
    float *w = golden_of("adamw", name, "w0", ADAMW_N), *m = zeros(ADAMW_N), *v = zeros(ADAMW_N);
    const float *g = golden_of("adamw", name, "g", 6 * ADAMW_N);
    const float *want_w = golden_of("adamw", name, "w", 6 * ADAMW_N);
    const float *want_m = golden_of("adamw", name, "m", 6 * ADAMW_N);
    const float *want_v = golden_of("adamw", name, "v", 6 * ADAMW_N);
    ckpt_optim_slot slot;
    ckpt_optim o = {.config = ckpt_optim_defaults(CKPT_OPTIM_ADAMW), .slots = &slot, .n_slots = 1};
    o.config.beta1 = adamw_cases[_i].beta1;
    o.config.beta2 = adamw_cases[_i].beta2;
    o.config.eps = adamw_cases[_i].eps;
    const int64_t dims[] = {7, ADAMW_N / 7};
    ckpt_optim_slot_set(&slot, &o.config, "head.weight", 2, dims, 0, false, 0);
    ck_assert(slot.decay && !slot.muon && slot.n == ADAMW_N);
    for (int t = 0; t < 6; t++) {
        const ckpt_optim_step s = {
            .lr = rates[t], .wd = adamw_cases[_i].wd, .grad_scale = 1, .t = t + 1};
        ckpt_optim_adamw(&engine, &o, &s, 0, ADAMW_N, w, m, v, g + t * ADAMW_N);
        const double dw = units(w, want_w + t * ADAMW_N, NULL, ADAMW_N);
        const double dm = units(m, want_m + t * ADAMW_N, g + t * ADAMW_N, ADAMW_N);
        const double dv = units(v, want_v + t * ADAMW_N, NULL, ADAMW_N);
        ck_assert_msg(dw <= 4 * (t + 1) && dm <= 4 * (t + 1) && dv <= 4 * (t + 1),
                      "step %d: w %.1f, m %.1f, v %.1f units", t, dw, dm, dv);
    }
}
END_TEST

/* Three parameters, 200001 elements: pieces, borders and slots do not coincide. */
#define CUT_N 200001
typedef struct cut_state {
    float *w, *m, *v;
} cut_state;

static ckpt_optim_slot cut_slots[4];

static ckpt_optim cut_optim(void)
{
    ckpt_optim o = {
        .config = ckpt_optim_defaults(CKPT_OPTIM_ADAMW), .slots = cut_slots, .n_slots = 4};
    const int64_t a[] = {300, 333}, b[] = {101}, c[] = {100000},
                  d[] = {CUT_N - 99900 - 101 - 100000};
    ckpt_optim_slot_set(&cut_slots[0], &o.config, "a.weight", 2, a, 0, false, 0);
    ckpt_optim_slot_set(&cut_slots[1], &o.config, "b.bias", 1, b, 0, true, 99900);
    ckpt_optim_slot_set(&cut_slots[2], &o.config, "c.norm.weight", 1, c, 0, false, 100001);
    ckpt_optim_slot_set(&cut_slots[3], &o.config, "d.weight", 1, d, 0, false, 200001);
    return o;
}

static void run_cut(const ckpt_optim *o, int64_t step, const float *w0, const float *g,
                    cut_state *x)
{
    *x = (cut_state){copy_of(w0, CUT_N), zeros(CUT_N), zeros(CUT_N)};
    for (int t = 1; t <= 2; t++) {
        const ckpt_optim_step s = {.lr = 1e-2, .wd = 0.1, .grad_scale = 0.37, .t = t};
        for (int64_t lo = 0; lo < CUT_N; lo += step) {
            const int64_t hi = lo + step < CUT_N ? lo + step : CUT_N;
            ckpt_optim_adamw(&engine, o, &s, lo, hi, x->w + lo, x->m + lo, x->v + lo, g + lo);
        }
    }
}

START_TEST(adamw_any_cut_threads_and_instructions_give_the_same_bits)
{
    const ckpt_optim o = cut_optim();
    const float *w0 = numbers(CUT_N, -1, 1), *g = numbers(CUT_N, -1, 1);
    static const int64_t steps[] = {CUT_N, 12345, 70000, 65536};
    cut_state a, b;
    engine.threads = 1;
    run_cut(&o, CUT_N, w0, g, &a);
    const ckpt_eng_isa best = ckpt_eng_detect();
    for (int i = 0; i < 4; i++)
        for (int isa = CKPT_ENG_BASE; isa <= (int)best; isa++) {
            engine.threads = 1 + i;
            engine.isa = (ckpt_eng_isa)isa;
            run_cut(&o, steps[i], w0, g, &b);
            ck_assert(same_bits(a.w, b.w, CUT_N) && same_bits(a.m, b.m, CUT_N) &&
                      same_bits(a.v, b.v, CUT_N));
        }
    /* The frozen slot stayed, the others moved. */
    ck_assert(same_bits(a.w + 99900, w0 + 99900, 101));
    ck_assert(a.w[99899] != w0[99899] && a.w[100001] != w0[100001]);
}
END_TEST

START_TEST(adamw_decay_follows_schema_rank_and_name)
{
    static const struct {
        const char *name;
        int rank;
        unsigned flags;
        bool all, decay;
    } cases[] = {
        {"embed.weight",               2, 0,                    false, true },
        {"blocks.0.kda.conv_q.weight", 3, 0,                    false, true },
        {"blocks.0.kda.A_log",         1, CKPT_SCHEMA_NO_DECAY, false, false},
        {"blocks.0.kda.norm.weight",   1, 0,                    false, false},
        {"blocks.0.attn.q.bias",       2, 0,                    false, false},
        {"blocks.0.kda.dt_bias",       2, CKPT_SCHEMA_NO_DECAY, false, false},
        {"blocks.0.kda.A_log",         1, CKPT_SCHEMA_NO_DECAY, true,  true },
    };
    const int64_t dims[] = {3, 1, 2};
    ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_ADAMW);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ckpt_optim_slot s;
        c.decay_all = cases[i].all;
        ckpt_optim_slot_set(&s, &c, cases[i].name, cases[i].rank, dims, cases[i].flags, false, 0);
        ck_assert_msg(s.decay == cases[i].decay, "%s", cases[i].name);
    }
}
END_TEST

/* ---- clipping --------------------------------------------------------------------------------- */

START_TEST(clip_norm_and_scaled_gradients_follow_torch)
{
    static const int64_t sizes[] = {5, 2000, 1, 33};
    ckpt_optim_slot slots[4];
    ckpt_optim o = {.config = ckpt_optim_defaults(CKPT_OPTIM_ADAMW), .slots = slots, .n_slots = 4};
    int64_t n = 0;
    for (int i = 0; i < 4; i++) {
        ckpt_optim_slot_set(&slots[i], &o.config, "x.weight", 1, &sizes[i], 0, false, n);
        n += sizes[i];
    }
    const float *g = golden_array("clip/g", n), *want = golden_array("clip/scaled", n);
    const double peer = (double)*golden_array("clip/norm", 1);
    double norm = 0;
    OK(ckpt_optim_norm(&engine, &o, g, &norm, &error));
    ck_assert_double_eq_tol(norm / peer, 1, 3e-7);
    const float scale = (float)ckpt_optim_clip(norm, 1.5);
    float *scaled = zeros(n);
    for (int64_t i = 0; i < n; i++)
        scaled[i] = g[i] * scale;
    ck_assert_msg(units(scaled, want, NULL, n) <= 8, "%.1f units", units(scaled, want, NULL, n));
    slots[1].frozen = true;
    double less;
    OK(ckpt_optim_norm(&engine, &o, g, &less, &error));
    ck_assert(less < 10 && norm > 40);
}
END_TEST

START_TEST(clip_limits)
{
    ck_assert(ckpt_optim_clip(5, 0) == 1);
    ck_assert(ckpt_optim_clip(0.5, 1) == 1);
    ck_assert(ckpt_optim_clip(0, 1) == 1);
    ck_assert_double_eq_tol(ckpt_optim_clip(4, 1), 0.25, 1e-6);
    ck_assert(isnan(ckpt_optim_clip(NAN, 1)));
    ck_assert(ckpt_optim_clip(INFINITY, 1) == 0);
}
END_TEST

START_TEST(norm_any_threads_instructions_and_cut_give_the_same_bits)
{
    const ckpt_optim o = cut_optim();
    const float *g = numbers(CUT_N, -1, 1);
    double a, b, sums[16];
    engine.threads = 1;
    OK(ckpt_optim_norm(&engine, &o, g, &a, &error));
    for (int isa = CKPT_ENG_BASE; isa <= (int)ckpt_eng_detect(); isa++) {
        engine.threads = 3;
        engine.isa = (ckpt_eng_isa)isa;
        OK(ckpt_optim_norm(&engine, &o, g, &b, &error));
        ck_assert(memcmp(&a, &b, sizeof a) == 0);
    }
    /* Chunks of a parameter in two parts, cut at a chunk's border, added in order. */
    const int64_t at = 100001, border = at + 3 * CKPT_OPTIM_CHUNK, end = at + 100000;
    double whole[16];
    const int64_t n = ckpt_optim_chunks(at, at, end), n1 = ckpt_optim_chunks(at, at, border);
    ck_assert_int_eq(n, 7);
    ck_assert_int_eq(n1, 3);
    ckpt_optim_sumsq(&engine, at, at, end, g + at, whole);
    ckpt_optim_sumsq(&engine, at, at, border, g + at, sums);
    ckpt_optim_sumsq(&engine, at, border, end, g + border, sums + n1);
    ck_assert(memcmp(whole, sums, (size_t)n * sizeof *whole) == 0);
    double exact = 0;
    for (int64_t i = at; i < end; i++)
        exact += (double)g[i] * (double)g[i];
    ck_assert_double_eq_tol(ckpt_optim_sum(whole, n) / exact, 1, 1e-12);
}
END_TEST

START_TEST(norm_bad_gradients_are_found)
{
    const ckpt_optim o = cut_optim();
    float *g = numbers(CUT_N, -1, 1);
    ck_assert_int_eq(ckpt_optim_find_bad(&engine, &o, g), -1);
    g[99950] = NAN; /* frozen */
    g[5] = 3e38F;   /* finite */
    ck_assert_int_eq(ckpt_optim_find_bad(&engine, &o, g), -1);
    g[100500] = -INFINITY;
    ck_assert_int_eq(ckpt_optim_find_bad(&engine, &o, g), 2);
    g[17] = NAN;
    ck_assert_int_eq(ckpt_optim_find_bad(&engine, &o, g), 0);
    double norm;
    OK(ckpt_optim_norm(&engine, &o, g, &norm, &error));
    ck_assert(isnan(norm));
}
END_TEST

/* ---- bf16 and routers ------------------------------------------------------------------------- */

START_TEST(round_bf16_is_the_library_cast)
{
    enum { N = 70001 };
    float *x = zeros(N), *y = zeros(N), *back = zeros(N);
    uint16_t *bits = ckpt_arena_array(&memory, N, sizeof *bits), want[N];
    for (int64_t i = 0; i < N; i++) { /* every pattern of the upper bits, with ties and above */
        const uint32_t u = (uint32_t)i * 0x9E3779B1U;
        memcpy(&x[i], &u, sizeof u);
    }
    static const float special[] = {0.0F, -0.0F,   INFINITY,    -INFINITY,
                                    NAN,  3.4e38F, 1.00390625F, 1.01171875F};
    memcpy(x, special, sizeof special);
    ckpt_dtype_cast(CKPT_BF16, want, CKPT_F32, x, N);
    ckpt_dtype_cast(CKPT_F32, back, CKPT_BF16, want, N);
    for (int isa = CKPT_ENG_BASE; isa <= (int)ckpt_eng_detect(); isa++) {
        engine.isa = (ckpt_eng_isa)isa;
        ckpt_optim_round_bf16(&engine, N, x, y, bits);
        for (int64_t i = 0; i < N; i++)
            ck_assert_msg(isnan(x[i]) ? isnan(y[i]) != 0 : bits[i] == want[i], "%a: %04x, not %04x",
                          (double)x[i], bits[i], want[i]);
        for (int64_t i = 0; i < N; i++)
            ck_assert(isnan(x[i]) || memcmp(&y[i], &back[i], 4) == 0);
    }
    ckpt_optim_round_bf16(&engine, N, x, x, NULL);
    ck_assert(same_bits(x, y, N));
}
END_TEST

START_TEST(router_bias_moves_by_the_sign_of_the_load)
{
    float bias[4] = {0, 1, -1, 0.5F};
    const int64_t counts[4] = {1, 2, 3, 3}; /* mean 2.25 */
    ckpt_optim_router_bias(4, counts, 0.25, bias);
    ck_assert(bias[0] == 0.25F && bias[1] == 1.25F && bias[2] == -1.25F && bias[3] == 0.25F);
    const int64_t even[4] = {7, 7, 7, 7};
    ckpt_optim_router_bias(4, even, 0.25, bias);
    ck_assert(bias[0] == 0.25F && bias[3] == 0.25F);
    const int64_t exact[2] = {2, 4};
    ckpt_optim_router_bias(2, exact, 1, bias);
    ck_assert(bias[0] == 1.25F && bias[1] == 0.25F);
}
END_TEST

/* ---- configuration ---------------------------------------------------------------------------- */

START_TEST(config_bad_fields_are_named)
{
    ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    OK(ckpt_optim_config_check(&c, &error));
    c.beta2 = 1;
    ck_assert_int_eq(ckpt_optim_config_check(&c, &error), CKPT_E_USAGE);
    ck_assert_str_eq(error.text, "optimizer: beta2 is 1, expected 0 to less than 1");
    c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    c.momentum = NAN;
    ck_assert_int_eq(ckpt_optim_config_check(&c, &error), CKPT_E_USAGE);
    c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    c.steps = 0;
    ck_assert_int_eq(ckpt_optim_config_check(&c, &error), CKPT_E_USAGE);
    ck_assert_str_eq(error.text, "optimizer: 0 iterations of Newton-Schulz, expected 1 to 99");
    ckpt_muon_set set;
    ckpt_muon_scale scale;
    ck_assert(ckpt_muon_set_parse("aol", &set) && set == CKPT_MUON_AOL);
    ck_assert(!ckpt_muon_set_parse("Aol", &set));
    ck_assert(ckpt_muon_scale_parse("spectral", &scale) && scale == CKPT_MUON_SPECTRAL);
    ck_assert(!ckpt_muon_scale_parse("", &scale));
    ck_assert_str_eq(ckpt_muon_set_name(CKPT_MUON_DEEPSEEK_V4), "deepseekv4");
    ck_assert_str_eq(ckpt_muon_scale_name(CKPT_MUON_UNIT_RMS_NORM), "unit_rms_norm");
}
END_TEST

Suite *suite_train_optim(void)
{
    Suite *s = suite_create("train_optim");
    TCase *t = tcase_create("train_optim");
    tcase_add_checked_fixture(t, open_golden, golden_tear_down);
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, adamw_six_steps_follow_torch, 0,
                        (int)(sizeof adamw_cases / sizeof *adamw_cases));
    tcase_add_test(t, adamw_any_cut_threads_and_instructions_give_the_same_bits);
    tcase_add_test(t, adamw_decay_follows_schema_rank_and_name);
    tcase_add_test(t, clip_norm_and_scaled_gradients_follow_torch);
    tcase_add_test(t, clip_limits);
    tcase_add_test(t, norm_any_threads_instructions_and_cut_give_the_same_bits);
    tcase_add_test(t, norm_bad_gradients_are_found);
    tcase_add_test(t, round_bf16_is_the_library_cast);
    tcase_add_test(t, router_bias_moves_by_the_sign_of_the_load);
    tcase_add_test(t, config_bad_fields_are_named);
    suite_add_tcase(s, t);
    return s;
}
