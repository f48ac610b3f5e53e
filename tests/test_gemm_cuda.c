/* Products of engine/cuda/gemm.cu on the emulator of gpu/emulate.h against f64: its own kernels, the loops
 * that stand for cuBLASLt there, and the choice between both by what that library takes: all of a product, all
 * but its bias, nothing, or nothing as it turns out late. */
#include "gpu/gemm_case.h"

#include "gpu/host_memory.h"

#include <check.h>

static ckpt_err err;

START_TEST(gemm_cuda_matches_engine)
{
    static const struct {
        ckpt_cuda_products kind;
        const char *name;
    } ways[] = {
        {CKPT_CUDA_PRODUCTS_BEST,  "plain loops"               },
        {CKPT_CUDA_PRODUCTS_OWN,   "own kernels, by warpgroups"},
        {CKPT_CUDA_PRODUCTS_WARP,  "own kernels"               },
        {CKPT_CUDA_PRODUCTS_RULES, "rules of cuBLASLt"         }
    };
    ops_run o;
    ops_open(&o, _i & 1 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32, 1);
    ck_assert_int_eq(ckpt_cuda_gemm_open(&o.c.gemm, ways[_i / 2].kind, &err), CKPT_OK);
    ck_assert_str_eq(ckpt_cuda_gemm_name(o.c.gemm), ways[_i / 2].name);
    gemm_all(&o);
    gemm_linear(&o, 33, 40, 24, false); /* with bias: a multiple of 8 the library refuses late, */
    gemm_linear(&o, 20, 16, 20, true);  /* widths it takes without bias, */
    gemm_linear(&o, 20, 16, 32, true);  /* and with it */
    ckpt_cuda_gemm_close(o.c.gemm);
    ops_close(&o);
    ck_assert_msg(!o.said[0], "%s", o.said);
}
END_TEST

/* More experts than threads of a block, most of them empty. */
START_TEST(gemm_cuda_many_experts)
{
    enum { E = 600 };
    int64_t first[E + 1];
    ops_run o;
    ops_open(&o, CKPT_CUDA_BF16, 1);
    ck_assert_int_eq(ckpt_cuda_gemm_open(&o.c.gemm, CKPT_CUDA_PRODUCTS_OWN, &err), CKPT_OK);
    first[0] = 0;
    for (int i = 0; i < E; i++)
        first[i + 1] = first[i] + (i % 200 == 3 ? 2 : 0);
    gemm_experts(&o, E, first, 8, 8, false, false);
    ckpt_cuda_gemm_close(o.c.gemm);
    ops_close(&o);
    ck_assert_msg(!o.said[0], "%s", o.said);
}
END_TEST

START_TEST(gemm_cuda_refuses_what_does_not_fit)
{
    ckpt_cuda c = {.type = CKPT_CUDA_F32};
    float x[4] = {0};
    ckpt_cuda_product p = {.m = 1, .n = 2, .k = 3, .lda = 2, .ldb = 2, .ldc = 2};
    ck_assert_int_eq(ckpt_cuda_matmul(&c, &p, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "a product on CUDA: 1 x 2 x 3 with strides 2, 2 and 2");
    p.lda = 3;
    p.b_type = (ckpt_cuda_type)9;
    ck_assert_int_eq(ckpt_cuda_matmul(&c, &p, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "a product on CUDA: type 9, which has f32 and bf16");
    ck_assert_int_eq(ckpt_cuda_linear_dw(&c, 1, 1, 4, x, 4, x, 1, NULL, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text,
                     "linear backward on CUDA: workspace of 0 bytes, needs 8192 for 4 columns");
    ck_assert_int_eq(ckpt_cuda_experts(&c, 0, 1, NULL, 1, 1, x, NULL, false, x, &err),
                     CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "experts on CUDA: 1 rows of 0 experts");
    ckpt_cuda_gemm *g;
    ck_assert_int_eq(ckpt_cuda_gemm_open(&g, (ckpt_cuda_products)9, &err), CKPT_E_USAGE);
    ck_assert_ptr_null(g);
}
END_TEST

Suite *suite_gemm_cuda(void);
Suite *suite_gemm_cuda(void)
{
    Suite *s = suite_create("gemm_cuda");
    TCase *t = tcase_create("emulated");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, gemm_cuda_matches_engine, 0, 8);
    tcase_add_test(t, gemm_cuda_many_experts);
    tcase_add_test(t, gemm_cuda_refuses_what_does_not_fit);
    suite_add_tcase(s, t);
    return s;
}
