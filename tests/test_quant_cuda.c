/* The CUDA kernels of the quantised KDA prefill, compiled for the CPU and run on the emulator of
 * gpu/emulate.h: against the oracle's f64 arrays and against the engine's f32 build, outputs and gradients.
 * What this cannot see, races and speed, is tests/gpu/quant.sh's. */
#define CKPT_REAL 32
#include "engine_test.h"

#include "gpu/host_memory.h"
#include "gpu/quant_case.h"

Suite *suite_quant_cuda(void);

static void open_data(void)
{
    golden_set_up("tests/data/quant.safetensors");
}

static void both_ways(const quant_case *c, quant_run *r)
{
    quant_put(r);
    OK(quant_forward(c, r, &error));
    OK(quant_backward(c, r, &error));
    for (int i = 0; i < QC_OUT; i++)
        quant_array_get(&r->out[i]);
}

/* ---- against the oracle ----------------------------------------------------------------------- */

START_TEST(quant_cuda_policy_matches_the_oracle)
{
    static const char *const in[QC_IN] = {"q", "k", "v", "g", "beta", "s0", "do", "ds_final"};
    const quant_tolerance *t = &quant_policies[_i];
    const quant_case c = {
        .policy = t->name,
        .states = true,
        .H = 1,
        .HV = 2,
        .K = 18,
        .V = 10,
        .N = 2,
        .cu = {0, 5, 72}
    };
    quant_run r;
    OK(quant_open(&c, &r, &error));
    for (int i = 0; i < QC_IN; i++)
        memcpy(r.in[i].x,
               golden_array(ckpt_arena_printf(&memory, "prefill/in/%s", in[i]), r.in[i].n),
               (size_t)r.in[i].n * sizeof(float));
    both_ways(&c, &r);
    for (int i = 0; i < QC_OUT; i++) {
        const char *name = ckpt_arena_printf(&memory, "prefill/%s/%s", t->name, quant_names[i]);
        CLOSE(name, r.out[i].got, golden_array(name, r.out[i].n), r.out[i].n,
              i < QC_DQ ? t->output : t->gradient);
    }
    quant_close(&r);
}
END_TEST

/* ---- against the CPU -------------------------------------------------------------------------- */

static const quant_case cases[] = {
    {"off",               false, true, 2, 2, 64,  64,  2, {0, 64, 128},   0.03, 0  },
    {"off",               false, true, 1, 1, 128, 96,  2, {0, 70, 99},    5,    0  },
    {"fp8_operands",      true,  true, 1, 2, 64,  64,  1, {0, 130},       0.03, 0  },
    {"fp8_with_state",    false, true, 1, 1, 100, 128, 1, {0, 130},       0.03, 128},
    {"fp8_with_state",    false, true, 1, 1, 64,  64,  1, {0, 66},        0.03, 64 },
    {"nvfp4_operands",    false, true, 1, 2, 64,  40,  3, {0, 3, 70, 80}, 0.03, 0  },
    {"fp16_accumulation", false, true, 1, 1, 48,  128, 1, {0, 65},        0.03, 0  },
    {"mixed",             false, true, 1, 1, 128, 128, 2, {0, 65, 66},    0.03, 64 },
    {"approximate",       false, true, 1, 2, 64,  64,  2, {0, 66, 131},   0.03, 0  },
    {"approximate_2",     false, true, 1, 1, 72,  128, 1, {0, 70},        0.03, 0  },
    {"fp8_approximate",   true,  true, 1, 1, 64,  40,  1, {0, 130},       0.03, 0  },
};

START_TEST(quant_cuda_case_matches_the_cpu)
{
    const quant_case *c = &cases[_i];
    quant_run r;
    OK(quant_open(c, &r, &error));
    quant_inputs(c, &r);
    both_ways(c, &r);
    OK(quant_reference(c, &r, 2, &error));
    for (int i = 0; i < QC_OUT; i++) {
        const double far = quant_distance(r.out[i].got, r.out[i].x, r.out[i].n);
        double limit = quant_tolerance_of(c->policy).output * (i < QC_DQ ? 1 : 2);
        if (r.out[i].half)
            limit += 4e-3; /* rounded once */
        if (c->decay > 1 && i == QC_DG)
            limit = 1e-4; /* a small difference of large sums: test_engine_quant.c */
        ck_assert_msg(far <= limit, "%s: %s: relative RMS %.3g above %.3g", c->policy,
                      quant_names[i], far, limit);
    }
    quant_close(&r);
}
END_TEST

/* ---- decisions -------------------------------------------------------------------------------- */

/* Of two dequantised E4M3 numbers, whose scales differ by what exp does: 0 the same code, 1 neighbours. */
static int steps_apart(float x, float y, float row)
{
    const float far = fabsf(x - y), big = fmaxf(fabsf(x), fabsf(y));
    if (far <= 4 * 1.2e-7f * big)
        return 0;
    return far <= fmaxf(big / 8, row / 448 / 256) * 1.001f ? 1 : 2;
}

/* What FP8 decided about W, kappa q e^G and k e^(G_last - G): as on the CPU but for numbers next to a border of
 * rounding, of which there are few, and those fall to the border's other side. Prefix sums: the same bits. */
START_TEST(quant_cuda_decides_as_the_cpu_does)
{
    const quant_case c = {
        .policy = "fp8_operands",
        .states = true,
        .H = 1,
        .HV = 2,
        .K = 64,
        .V = 64,
        .N = 1,
        .cu = {0, 130},
        .decay = 0.03,
    };
    const ckpt_eng_delta d = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = 64, .V = 64};
    const ckpt_eng_seq seq = {.n = 1, .cu = c.cu};
    const int64_t n = 3 * 2 * 64 * 64;
    ENG(quant_saved) saved;
    quant_run r;
    OK(quant_open(&c, &r, &error));
    quant_inputs(&c, &r);
    both_ways(&c, &r);
    const ENG(delta_in) in = {.q = r.in[QC_Q].x,
                              .k = r.in[QC_K].x,
                              .v = r.in[QC_V].x,
                              .g = r.in[QC_G].x,
                              .erase = r.in[QC_BETA].x,
                              .state0 = r.in[QC_STATE0].x};
    OK(ENG(kda_quant_save)(&engine, &r.policy, &d, &seq, &saved, &error));
    OK(ENG(kda_quant)(&engine, &r.policy, &d, &seq, &in, r.out[QC_O].x, NULL, &saved, NULL,
                      &error));
    const float *at = r.saved; /* the emulator's memory is this process's */
    ck_assert(same_bits(at, saved.prefix, n));
    for (int which = 0; which < 3; which++) {
        const float *got = at + (which == 0 ? 1 : which == 1 ? 2 : 4) * n;
        int64_t flips = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t item = i / 4096, row = i / 64 % 64, col = i % 64;
            const float want = which == 0   ? saved.memory_l[i]
                               : which == 1 ? saved.write_l[item * 4096 + col * 64 + row]
                                            : saved.read_l[i];
            const int apart = steps_apart(got[i], want, 1);
            ck_assert_msg(apart < 2, "operand %d, element %lld: %.9g, the CPU has %.9g", which,
                          (long long)i, (double)got[i], (double)want);
            flips += apart;
        }
        ck_assert_msg(flips <= n / 1000, "operand %d: %lld of %lld fell otherwise", which,
                      (long long)flips, (long long)n);
    }
    quant_close(&r);
}
END_TEST

/* Keys of one column and no decay, so that L is the same bits on both sides: then the inverse and its errors are,
 * whatever the number of factors; 0 is the substitution. */
START_TEST(quant_cuda_approximates_the_inverse_as_the_cpu_does)
{
    const quant_case c = {
        .policy = "off", .states = true, .H = 1, .HV = 2, .K = 1, .V = 3, .N = 1, .cu = {0, 130}
    };
    const ckpt_eng_delta d = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = 1, .V = 3};
    const ckpt_eng_seq seq = {.n = 1, .cu = c.cu};
    const int64_t n = 3 * 2 * 64 * 64;
    ENG(quant_saved) saved;
    quant_run r;
    OK(quant_open(&c, &r, &error));
    quant_inputs(&c, &r);
    quant_fill(&r.in[QC_K], -0.7, 0.7);
    r.policy.solve_factors = _i;
    double errors[2];
    quant_put(&r);
    quant_measure(&r);
    OK(quant_forward(&c, &r, &error));
    quant_measured(&r, errors);
    const ENG(delta_in) in = {.q = r.in[QC_Q].x,
                              .k = r.in[QC_K].x,
                              .v = r.in[QC_V].x,
                              .g = r.in[QC_G].x,
                              .erase = r.in[QC_BETA].x,
                              .state0 = r.in[QC_STATE0].x};
    ckpt_quant_report report = {.calls = {0}};
    OK(ENG(kda_quant_save)(&engine, &r.policy, &d, &seq, &saved, &error));
    OK(ENG(kda_quant)(&engine, &r.policy, &d, &seq, &in, r.out[QC_O].x, NULL, &saved, &report,
                      &error));
    ck_assert(same_bits((const float *)r.saved + 5 * n, saved.inverse, n));
    ck_assert_msg(errors[0] == report.inverse_error && errors[1] == report.inverse_residual,
                  "%d factors: errors %.17g, %.17g; the CPU has %.17g, %.17g", _i, errors[0],
                  errors[1], report.inverse_error, report.inverse_residual);
    ck_assert_msg(_i == 0  ? errors[0] == 0
                  : _i < 4 ? errors[0] > 1e-3
                           : errors[0] > 0,
                  "%d factors: error %.3g", _i, errors[0]);
    quant_close(&r);
}
END_TEST

START_TEST(quant_cuda_gives_the_same_bits_again)
{
    const quant_case *c = &cases[7];
    quant_run r;
    float *before[QC_OUT];
    OK(quant_open(c, &r, &error));
    quant_inputs(c, &r);
    both_ways(c, &r);
    for (int i = 0; i < QC_OUT; i++)
        before[i] = copy_of(r.out[i].got, r.out[i].n);
    both_ways(c, &r);
    for (int i = 0; i < QC_OUT; i++)
        ck_assert_msg(same_bits(before[i], r.out[i].got, r.out[i].n), "%s", quant_names[i]);
    quant_close(&r);
}
END_TEST

START_TEST(quant_cuda_refuses_what_it_has_not)
{
    int64_t cu[3] = {0, 8, 8};
    size_t saved, work;
    ckpt_cuda c = {.type = CKPT_CUDA_F32};
    ckpt_quant q = quant_policy("fp8_with_state");
    ckpt_cuda_quant d = {.policy = &q, .H = 2, .HV = 3, .K = 64, .V = 64, .N = 1, .cu = cu};
#define REFUSED(code, what)                                                                        \
    ck_assert_int_eq(ckpt_cuda_quant_bytes(&c, &d, &saved, &work, &error), code);                  \
    ck_assert_str_eq(error.text, "quantised KDA: " what)
    REFUSED(CKPT_E_USAGE, "3 value heads of 64 for 2 key heads of 64");
    d.HV = 4;
    d.V = 129;
    REFUSED(CKPT_E_UNSUPPORTED, "head size 129 on CUDA, which has up to 128");
    d.V = 128;
    d.N = 2;
    REFUSED(CKPT_E_UNSUPPORTED, "sequence 1 of the packed ones is empty");
    cu[2] = 3;
    REFUSED(CKPT_E_USAGE, "offset 3 of sequence 1 is before its start 8");
    d.N = 1;
    cu[0] = 1;
    REFUSED(CKPT_E_USAGE, "sequence offsets do not start at 0");
    cu[0] = 0;
    q.block_v = 48;
    REFUSED(CKPT_E_USAGE, "block_v is 48, expected 16, 32, 64 or 128");
    q.block_v = 32;
    OK(ckpt_cuda_quant_bytes(&c, &d, &saved, &work, &error));
    ck_assert_uint_gt(saved, 0);
    const ckpt_cuda_delta_in in = {.q = NULL};
    const ckpt_cuda_delta_grad grad = {.q = NULL};
    ck_assert_int_eq(ckpt_cuda_quant_bwd(&c, &d, &in, NULL, NULL, NULL, &grad, &error),
                     CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(error.text, "workspace of 0 bytes, needs "));
    c.type = (ckpt_cuda_type)7;
    REFUSED(CKPT_E_UNSUPPORTED, "type 7 on CUDA, which has f32 and bf16");
#undef REFUSED
}
END_TEST

Suite *suite_quant_cuda(void)
{
    Suite *s = suite_create("quant_cuda");
    TCase *golden_case = tcase_create("oracle"), *own = tcase_create("cpu");
    tcase_set_timeout(golden_case, 120);
    tcase_add_checked_fixture(golden_case, open_data, golden_tear_down);
    tcase_add_loop_test(golden_case, quant_cuda_policy_matches_the_oracle, 0, N_QUANT_POLICIES);
    suite_add_tcase(s, golden_case);
    tcase_set_timeout(own, 120);
    tcase_add_checked_fixture(own, set_up, tear_down);
    tcase_add_loop_test(own, quant_cuda_case_matches_the_cpu, 0,
                        (int)(sizeof cases / sizeof *cases));
    tcase_add_test(own, quant_cuda_decides_as_the_cpu_does);
    tcase_add_loop_test(own, quant_cuda_approximates_the_inverse_as_the_cpu_does, 0, 8);
    tcase_add_test(own, quant_cuda_gives_the_same_bits_again);
    tcase_add_test(own, quant_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, own);
    return s;
}
