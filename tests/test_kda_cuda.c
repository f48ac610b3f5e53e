/* The CUDA kernels of KDA, compiled for the CPU and run on the emulator of gpu/emulate.h: every kernel,
 * both types, both gates, packed sequences, short chunks, states, against the f64 recurrence. What this
 * cannot see, races and speed, is tests/gpu/run.sh's. */
#include "gpu/kda_case.h"

#include "gpu/host_memory.h"

#include <check.h>

static ckpt_err err;

#define OK(call) ck_assert_msg((call) == CKPT_OK, "%s", err.text)

static void run_case(const kda_case *c)
{
    kda_run r;
    OK(kda_make(c, &r, &err));
    OK(kda_reference(c, &r, 1, &err));
    OK(kda_forward(c, &r, NULL, &err));
    OK(kda_backward(c, &r, NULL, &err));
    for (int i = 0; i < KDA_ARRAYS; i++) {
        kda_get(&r.out[i]);
        const double far = kda_distance(&r.out[i]);
        ck_assert_msg(far <= kda_limit(c, i), "%s: relative RMS %.3g above %.3g", kda_names[i], far,
                      kda_limit(c, i));
    }
    kda_free(&r);
}

START_TEST(kda_cuda_packed_matches_recurrence)
{
    kda_case c = {
        .type = _i & 1 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32,
        .D = _i & 2 ? 128 : 64,
        .safe = _i & 4,
        .states = true,
        .H = 1,
        .g_low = _i & 4 ? -5 : -12,
        .N = 3,
        .cu = {0, 65, 65, 80}
    };
    run_case(&c);
}
END_TEST

static const int64_t lengths[] = {0, 1, 17, 63, 64};

START_TEST(kda_cuda_length_matches_recurrence)
{
    const int64_t T = lengths[_i];
    kda_case c = {
        .type = CKPT_CUDA_BF16,
        .D = 64,
        .safe = true,
        .states = _i % 2,
        .H = 2,
        .g_low = -5,
        .N = 2,
        .cu = {0, T, 2 * T}
    };
    run_case(&c);
}
END_TEST

/* What delta.h copies: other rules, grouped heads, other sizes, gates of either type. */
static const kda_case rules[] = {
    {.rule = CKPT_CUDA_RULE_GDN, .H = 1,  .HV = 2,                  .D = 64,        .g_low = -1},
    {            .rule = CKPT_CUDA_RULE_GDN2,                    .H = 1, .HV = 1,                  .D = 64,   .safe = true, .g_low = -5},
    {            .rule = CKPT_CUDA_RULE_GDN2,                    .H = 1, .HV = 2,                   .D = 0,        .K = 24,     .V = 16, .g_low = -2},
    { .rule = CKPT_CUDA_RULE_KDA, .H = 1,  .HV = 2,                  .D = 0,         .K = 16,     .V = 80, .g_low = -4},
    {    .rule = CKPT_CUDA_RULE_KDA,                          .H = 1,        .HV = 3, .D = 64, .safe = true,     .g_low = -5},
    {.rule = CKPT_CUDA_RULE_KDA,                          .H = 2,        .HV = 2, .D = 64, .safe = true,     .g_low = -5},
};

START_TEST(delta_cuda_rule_matches_recurrence)
{
    kda_case c = rules[_i / 3];
    c.type = _i % 3 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
    c.gates = _i % 3 == 2 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
    c.delta = c.states = true;
    c.N = 2;
    c.cu[1] = 66;
    c.cu[2] = 83;
    run_case(&c);
}
END_TEST

START_TEST(delta_cuda_refuses_what_it_has_not)
{
    static const int64_t cu[2] = {0, 8};
    size_t f, b;
    const ckpt_cuda c = {.type = CKPT_CUDA_F32};
    ckpt_cuda_delta d = {.H = 2, .HV = 3, .K = 64, .V = 64, .N = 1, .cu = cu};
    ck_assert_int_eq(ckpt_cuda_delta_bytes(&c, &d, &f, &b, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "delta rule on CUDA: 3 value heads of 64 for 2 key heads of 64");
    d.HV = 4;
    d.V = 130;
    ck_assert_int_eq(ckpt_cuda_delta_bytes(&c, &d, &f, &b, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "delta rule on CUDA: head size 130 above 128");
    d.V = 128;
    d.gates = CKPT_CUDA_BF16;
    ck_assert_int_eq(ckpt_cuda_delta_bytes(&c, &d, &f, &b, &err), CKPT_E_USAGE);
    d.gates = CKPT_CUDA_F32;
    d.rule = (ckpt_cuda_rule)3;
    ck_assert_int_eq(ckpt_cuda_delta_bytes(&c, &d, &f, &b, &err), CKPT_E_UNSUPPORTED);
    d.rule = CKPT_CUDA_RULE_GDN;
    const ckpt_cuda_delta_in in = {.q = NULL};
    ck_assert_int_eq(ckpt_cuda_delta_fwd(&c, &d, &in, NULL, NULL, &err), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "workspace of 0 bytes, needs "));
}
END_TEST

/* Sequences cut into segments, some of them without a chunk. */
START_TEST(kda_cuda_segments_match_recurrence)
{
    kda_case c = {
        .type = _i & 1 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32,
        .D = _i & 2 ? 128 : 64,
        .safe = true,
        .states = true,
        .H = 1,
        .g_low = -0.05,
        .N = 2,
        .cu = {0, 210, 250},
        .segments = 3,
    };
    run_case(&c);
}
END_TEST

START_TEST(kda_cuda_nothing_is_nothing)
{
    kda_case c = {.type = CKPT_CUDA_BF16, .D = 64, .H = 1};
    run_case(&c);
}
END_TEST

START_TEST(kda_cuda_refuses_what_it_has_not)
{
    int64_t cu[3] = {0, 8, 4};
    size_t f, b;
    ckpt_cuda_kda d = {.type = CKPT_CUDA_F32, .N = 1, .H = 1, .D = 96, .cu = cu};
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "kda: head dimension 96 on CUDA, which has 64 and 128");
    d.D = 64;
    d.N = 2;
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "kda: offset 4 of sequence 1 is before its start 8");
    d.N = 1;
    d.g_bf16 = true;
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "kda: decays in bf16 beside values in f32");
    d.g_bf16 = false;
    d.H = 0;
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_USAGE);
    d.H = 1;
    d.type = (ckpt_cuda_type)7;
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_UNSUPPORTED);
    d.type = CKPT_CUDA_F32;
    cu[0] = 1;
    ck_assert_int_eq(ckpt_cuda_kda_bytes(&d, &f, &b, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "kda: sequence offsets do not start at 0");
}
END_TEST

Suite *suite_kda_cuda(void);
Suite *suite_kda_cuda(void)
{
    Suite *s = suite_create("kda_cuda");
    TCase *t = tcase_create("emulated");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, kda_cuda_packed_matches_recurrence, 0, 8);
    tcase_add_loop_test(t, kda_cuda_length_matches_recurrence, 0,
                        (int)(sizeof lengths / sizeof *lengths));
    tcase_add_loop_test(t, delta_cuda_rule_matches_recurrence, 0,
                        3 * (int)(sizeof rules / sizeof *rules));
    tcase_add_loop_test(t, kda_cuda_segments_match_recurrence, 0, 4);
    tcase_add_test(t, delta_cuda_refuses_what_it_has_not);
    tcase_add_test(t, kda_cuda_nothing_is_nothing);
    tcase_add_test(t, kda_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, t);
    return s;
}
