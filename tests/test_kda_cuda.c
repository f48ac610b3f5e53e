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
    tcase_add_test(t, kda_cuda_nothing_is_nothing);
    tcase_add_test(t, kda_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, t);
    return s;
}
