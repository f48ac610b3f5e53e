/* The pointwise and row kernels, compiled for the CPU and run on the emulator of gpu/emulate.h, against
 * the engine's f64 operations: both types, shapes 0, 1, odd, block +- 1. Races and speed are
 * tests/gpu/run.sh's. */
#include "gpu/ops_case.h"

#include "gpu/host_memory.h"

#include <check.h>

static ckpt_err err;

static ops_run start(int i)
{
    ops_run o;
    ops_open(&o, i & 1 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32, 1);
    return o;
}
static void finish(ops_run *o)
{
    ops_close(o);
    ck_assert_msg(!o->said[0], "%s", o->said);
}

START_TEST(ops_cuda_norm_matches_engine)
{
    static const int64_t sizes[][2] = {
        {0,   8   },
        {1,   1   },
        {3,   7   },
        {16,  128 },
        {17,  127 },
        {33,  129 },
        {9,   256 },
        {2,   257 },
        {3,   2048},
        {2,   2304},
        {1,   2303},
        {2,   4104},
        {530, 16  }
    };
    ops_run o = start(_i);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        ops_norm(&o, sizes[s][0], sizes[s][1], (int)((s + (size_t)_i / 2) % OPS_NORMS));
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_conv_matches_engine)
{
    static const int64_t packed[] = {0, 0, 1, 3, 35, 35, 99, 100, 168}, none[] = {0, 0};
    static const int64_t one[] = {0, 65}, sixtyfour[] = {0, 64}, border[] = {0, 62, 64, 66, 130};
    ops_run o = start(_i);
    ops_conv(&o, packed, 8, 13, 4, true);
    ops_conv(&o, packed, 8, 8, 2, false);
    ops_conv(&o, packed, 8, 5, 8, true);
    ops_conv(&o, packed, 8, 4, 3, true);
    ops_conv(&o, packed, 8, 3, 1, true);
    ops_conv(&o, one, 1, 1, 4, false);
    ops_conv(&o, sixtyfour, 1, 7, 4, true);
    ops_conv(&o, border, 4, 12, 5, true);
    ops_conv(&o, border, 4, 1028, 4, true);
    ops_conv(&o, none, 1, 4, 4, true);
    ops_conv(&o, none, 0, 4, 4, false);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_gate_matches_engine)
{
    ops_run o = start(_i);
    for (int b = 0; b < 2; b++) {
        const double bound = b ? -5 : 0;
        ops_gate(&o, 0, 2, 8, bound);
        ops_gate(&o, 1, 1, 1, bound);
        ops_gate(&o, 9, 3, 5, bound);
        ops_gate(&o, 17, 2, 64, bound);
        ops_gate(&o, 5, 32, 1, bound);
        ops_gate(&o, 520, 1, 3, bound);
        ops_gate(&o, 2, 17, 128, bound);
    }
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_activations_match_engine)
{
    static const int64_t sizes[] = {0, 1, 7, 8, 9, 2047, 2048, 2049};
    ops_run o = start(_i);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        ops_beta_relu(&o, sizes[s], 1 + (double)(s % 2));
    ops_swiglu(&o, 0, 8, 8, 8, 0);
    ops_swiglu(&o, 5, 13, 13, 13, 0);
    ops_swiglu(&o, 3, 16, 32, 16, 2);
    ops_swiglu(&o, 2, 2056, 4112, 2056, 0);
    ops_swiglu(&o, 3, 5, 11, 6, 1.5);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_nan_stays)
{
    ops_run o = start(_i);
    kda_array *x = ops_in(&o, 64, OPS_E(&o), -1, 1), *y = ops_out(&o, 64, OPS_E(&o));
    x->x[37] = NAN;
    kda_put(x);
    ops_did(&o, "relu2", ckpt_cuda_relu2(&o.c, 64, x->dev, y->dev, &err), &err);
    kda_get(y);
    for (int i = 0; i < 64; i++)
        ck_assert_int_eq(isnan(y->got[i]) != 0, i == 37);
    ops_did(&o, "rmsnorm",
            ckpt_cuda_rmsnorm(&o.c, 2, 32, x->dev, NULL, false, 1e-6, y->dev, NULL, &err), &err);
    kda_get(y);
    for (int i = 0; i < 64; i++)
        ck_assert_int_eq(isnan(y->got[i]) != 0, i >= 32);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_refuses_what_it_has_not)
{
    ckpt_cuda c = {.type = CKPT_CUDA_F32};
    float x[4] = {0};
    ck_assert_int_eq(ckpt_cuda_rmsnorm(&c, 1, 0, x, NULL, false, 1e-6, x, NULL, &err),
                     CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "rmsnorm on CUDA: 1 rows of 0");
    ck_assert_int_eq(ckpt_cuda_rmsnorm(&c, 1, 16385, x, NULL, false, 1e-6, x, NULL, &err),
                     CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "rmsnorm on CUDA: rows of 16385, expected at most 16384");
    ck_assert_int_eq(ckpt_cuda_rmsnorm_bwd(&c, 1, 4, x, NULL, false, x, x, false, x, x, &err),
                     CKPT_E_USAGE);
    ck_assert_str_eq(err.text,
                     "rmsnorm backward on CUDA: workspace of 0 bytes, needs 8192 for 4 columns");
    const ckpt_cuda_seq seq = {.n = 1};
    ck_assert_int_eq(ckpt_cuda_conv(&c, &seq, 4, 9, x, x, NULL, NULL, x, NULL, &err),
                     CKPT_E_UNSUPPORTED);
    ck_assert_int_eq(ckpt_cuda_conv(&c, &seq, 4, 0, x, x, NULL, NULL, x, NULL, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_gate(&c, 1, 1, 1, x, x, x, 1, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "decay gate on CUDA: lower bound 1 is not below 0");
    ck_assert_int_eq(ckpt_cuda_swiglu(&c, 1, 4, x, x, 3, 0, x, 4, &err), CKPT_E_USAGE);
    c.type = (ckpt_cuda_type)7;
    ck_assert_int_eq(ckpt_cuda_relu2(&c, 1, x, x, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "squared relu on CUDA: type 7, which has f32 and bf16");
}
END_TEST

Suite *suite_ops_cuda(void);
Suite *suite_ops_cuda(void)
{
    Suite *s = suite_create("ops_cuda");
    TCase *t = tcase_create("emulated");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, ops_cuda_norm_matches_engine, 0, 2 * OPS_NORMS);
    tcase_add_loop_test(t, ops_cuda_conv_matches_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_gate_matches_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_activations_match_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_nan_stays, 0, 2);
    tcase_add_test(t, ops_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, t);
    return s;
}
