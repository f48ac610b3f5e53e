/* The pointwise and row kernels, compiled for the CPU and run on the emulator of gpu/emulate.h, against
 * the engine's f64 operations: both types, shapes 0, 1, odd, block +- 1. Races and speed are
 * tests/gpu/run.sh's. */
#include "gpu/ops_more.h"

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

START_TEST(ops_cuda_conv_with_norm_is_two_kernels)
{
    static const int64_t packed[] = {0, 0, 1, 3, 35, 35, 99, 100, 133}, none[] = {0, 0};
    static const int64_t one[] = {0, 1}, odd[] = {0, 65}, border[] = {0, 62, 64, 66, 97};
    ops_run o = start(_i);
    ops_conv_norm(&o, packed, 8, 2, 128, 4, true);
    ops_conv_norm(&o, packed, 8, 4, 64, 4, false);
    ops_conv_norm(&o, border, 4, 9, 128, 3, false); /* the second block has one warp */
    ops_conv_norm(&o, border, 4, 2, 64, 1, true);
    ops_conv_norm(&o, odd, 1, 1, 128, 2, true);
    ops_conv_norm(&o, odd, 1, 2, 64, 4, true);
    for (int64_t K = 64; K <= 128; K *= 2) {
        ops_conv_norm(&o, one, 1, 2, K, 4, true);
        ops_conv_norm(&o, none, 1, 2, K, 4, true);
        ops_conv_norm(&o, none, 0, 2, K, 4, false);
    }
    /* two kernels: half a warp, a wide filter, other heads */
    ops_conv_norm(&o, packed, 8, 3, 64, 4, true);
    ops_conv_norm(&o, odd, 1, 1, 128, 5, true);
    ops_conv_norm(&o, border, 4, 3, 32, 4, true);
    ops_conv_norm(&o, border, 4, 2, 256, 4, false);
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

START_TEST(ops_cuda_vocabulary_matches_engine)
{
    ops_run o = start(_i);
    ops_embed(&o, 0, 5, 0, 5, 8);
    ops_embed(&o, 1, 1, 0, 1, 1);
    ops_embed(&o, 40, 7, 0, 7, 24);
    ops_embed(&o, 33, 50, 11, 20, 13);
    ops_embed(&o, 64, 9, 0, 9, 2056);
    ops_embed(&o, 8200, 2, 1, 1, 8); /* tokens of one id in more than one round */
    ops_xent(&o, 0, 4, false);
    ops_xent(&o, 1, 1, false);
    ops_xent(&o, 7, 13, true);
    ops_xent(&o, 3, 8191, true);
    ops_xent(&o, 3, 8192, false);
    ops_xent(&o, 3, 8193, false);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_xent_nan_stays)
{
    ops_run o = start(_i);
    const int32_t labels[3] = {1, 2, 0};
    void *dev = ops_ints(labels, 3);
    kda_array *z = ops_in(&o, 30, OPS_E(&o), -1, 1), *d = ops_out(&o, 30, OPS_E(&o));
    kda_array *w = ops_in(&o, 3, CKPT_F32, 0.5, 1), *loss = ops_out(&o, 3, CKPT_F32);
    z->x[4] = NAN;
    for (int i = 20; i < 30; i++)
        z->x[i] = -INFINITY;
    kda_put(z);
    ops_did(&o, "xent", ckpt_cuda_xent(&o.c, 3, 10, z->dev, dev, w->dev, loss->dev, d->dev, &err),
            &err);
    kda_get(d);
    kda_get(loss);
    for (int i = 0; i < 30; i++)
        ck_assert_int_eq(isnan(d->got[i]) != 0, i / 10 != 1);
    for (int t = 0; t < 3; t++)
        ck_assert_int_eq(isnan(loss->got[t]) != 0, t != 1);
    dev_free(dev);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_optimizer_has_the_bits_of_the_cpu)
{
    static const int64_t sizes[] = {0, 1, 3, 1023, 1025, 16383, 16384, 16385, 150001};
    ops_run o = start(0);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        ops_optim(&o, sizes[s]);
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_rope_matches_engine)
{
    static const int64_t packed[] = {0, 0, 1, 4, 4, 69}, one[] = {0, 65}, none[] = {0, 0};
    ops_run o = start(_i);
    for (int late = 0; late < 2; late++) {
        ops_rope_table(&o, packed, 5, 8, late);
        ops_rope_table(&o, one, 1, 2, late);
        ops_rope_table(&o, none, 1, 64, late);
        ops_rope_table(&o, none, 0, 64, late);
    }
    for (int inter = 0; inter < 2; inter++) {
        ops_rope(&o, 0, 2, 8, inter);
        ops_rope(&o, 1, 1, 2, inter);
        ops_rope(&o, 9, 3, 64, inter);
        ops_rope(&o, 5, 2, 66, inter);
        ops_rope(&o, 2, 1, 512, inter);
    }
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_router_matches_engine)
{
    static const ckpt_cuda_route routes[] = {
  /* experts, chosen; groups, kept, scores summed; softmax, normalise; scale */
        {1,   1, 0, 0, 0,   false, false, 1   },
        {7,   3, 0, 0, 0,   true,  false, 1   },
        {64,  8, 0, 0, 0,   false, true,  2.5F},
        {33,  4, 0, 0, 0,   true,  true,  1.5F},
        {256, 8, 8, 4, 2,   false, true,  2.5F},
        {300, 6, 3, 2, 200, true,  false, 1   }
    };
    ops_run o = start(0);
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const bool even = i % 2 == 0;
        ops_route(&o, &routes[i], 0, even, 0, 0, false);
        ops_route(&o, &routes[i], 1, !even, 0.1, 0, false);
        ops_route(&o, &routes[i], 41, even, 0, 0.3, false);
        ops_route(&o, &routes[i], 30, false, 0.2, 0.1, routes[i].groups == 0);
    }
    ops_route(&o, &routes[2], 300, true, 0, 0, false); /* rows in several pieces */
    finish(&o);
}
END_TEST

START_TEST(ops_cuda_rows_match_engine)
{
    ops_run o = start(_i);
    ops_rows(&o, 0, 8, 2);
    ops_rows(&o, 1, 1, 1);
    ops_rows(&o, 13, 9, 3);
    ops_rows(&o, 6, 2056, 4);
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
    ck_assert_int_eq(ckpt_cuda_conv_norm(&c, &seq, 4, 4, 3, 1e-6, x, x, NULL, x, x, NULL, &err),
                     CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "conv with norm on CUDA: 4 channels in heads of 3");
    ck_assert_int_eq(
        ckpt_cuda_conv_norm_bwd(&c, &seq, 4, 4, 0, x, x, NULL, x, x, x, x, NULL, NULL, &err),
        CKPT_E_USAGE);
    ck_assert_int_eq(
        ckpt_cuda_conv_norm_bwd(&c, &seq, 4, 4, 2, x, x, NULL, x, x, x, x, x, NULL, &err),
        CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "conv with norm backward on CUDA: workspace of 0 bytes, needs 40960 "
                               "for 20 columns");
    ck_assert_int_eq(ckpt_cuda_gate(&c, 1, 1, 1, x, x, x, 1, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "decay gate on CUDA: lower bound 1 is not below 0");
    ck_assert_int_eq(ckpt_cuda_swiglu(&c, 1, 4, x, x, 3, 0, x, 4, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_xent(&c, 1, 0, x, NULL, x, x, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "cross entropy on CUDA: 1 tokens, vocabulary 0");
    ck_assert_int_eq(ckpt_cuda_rope(&c, 7, false, 1, 1, x, 8, 8, x, x, false, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_rope(&c, 514, false, 1, 1, x, 514, 514, x, x, false, &err),
                     CKPT_E_UNSUPPORTED);
    ckpt_cuda_route r = {.E = 8, .top_k = 9};
    ck_assert_int_eq(ckpt_cuda_router(&c, &r, 1, x, NULL, x, x, NULL, x, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "router on CUDA: 1 tokens, 9 of 8 experts, 0 of 0 groups");
    r.E = 1025;
    ck_assert_int_eq(ckpt_cuda_router(&c, &r, 1, x, NULL, x, x, NULL, x, x, &err),
                     CKPT_E_UNSUPPORTED);
    ck_assert_int_eq(ckpt_cuda_order(&c, 4, 1, NULL, NULL, NULL, NULL, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_dispatch(&c, 1, 4, 0, NULL, x, x, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_embed(&c, -1, 0, 1, 1, NULL, x, x, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_cuda_adamw(&c, -1, NULL, x, x, x, x, NULL, &err), CKPT_E_USAGE);
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
    tcase_add_loop_test(t, ops_cuda_conv_with_norm_is_two_kernels, 0, 2);
    tcase_add_loop_test(t, ops_cuda_gate_matches_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_activations_match_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_vocabulary_matches_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_xent_nan_stays, 0, 2);
    tcase_add_test(t, ops_cuda_optimizer_has_the_bits_of_the_cpu);
    tcase_add_loop_test(t, ops_cuda_rope_matches_engine, 0, 2);
    tcase_add_test(t, ops_cuda_router_matches_engine);
    tcase_add_loop_test(t, ops_cuda_rows_match_engine, 0, 2);
    tcase_add_loop_test(t, ops_cuda_nan_stays, 0, 2);
    tcase_add_test(t, ops_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, t);
    return s;
}
