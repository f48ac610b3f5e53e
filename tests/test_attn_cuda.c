/* The attention kernels on the emulator of gpu/emulate.h against the engine's f64 operation: both types,
 * head dims with and without padding, packed sequences, grouped heads, parts of a sequence, lengths 0, 1,
 * odd and about a tile's. */
#include "gpu/attn_case.h"

#include "gpu/host_memory.h"

#include <check.h>

static ckpt_err err;

START_TEST(attn_cuda_matches_engine)
{
    ops_run o;
    ops_open(&o, _i % 3 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32, 1);
    attn_run(&o, &attn_cases[_i / 3], _i % 3 == 2 ? CKPT_CUDA_ATTEND_GROUP : CKPT_CUDA_ATTEND_WARP,
             false);
    ops_close(&o);
    ck_assert_msg(!o.said[0], "%s", o.said);
}
END_TEST

/* More sequences than threads of a block: every thread counts the tiles of several. */
START_TEST(attn_cuda_many_sequences)
{
    enum { SEQS = 300, D = 16 };
    int64_t cu[SEQS + 1] = {0};
    ops_run o;
    ops_open(&o, CKPT_CUDA_BF16, 1);
    for (int i = 0; i < SEQS; i++)
        cu[i + 1] = cu[i] + (i % 60 == 7 ? 3 : 0);
    const int64_t T = cu[SEQS];
    const ckpt_eng_attention ref = {.N = 1, .G = 1, .DK = D, .DV = D};
    const ckpt_eng_seq eng = {SEQS, cu};
    const ckpt_cuda_seq seq = {.n = SEQS, .tokens = T, .cu = cu};
    const ckpt_cuda_attention a = {.N = 1, .G = 1, .DK = D, .DV = D};
    kda_array *q = ops_in(&o, T * D, CKPT_BF16, -1, 1), *v = ops_in(&o, T * D, CKPT_BF16, -1, 1);
    kda_array *out = ops_out(&o, T * D, CKPT_BF16), *lse = ops_out(&o, T, CKPT_F32);
    ops_did(&o, "reference",
            ENG(attention)(&o.e, &ref, &eng, q->x, q->x, v->x, out->x, lse->x, &err), &err);
    ops_did(&o, "attention",
            ckpt_cuda_attend(&o.c, &a, &seq, q->dev, q->dev, v->dev, out->dev, lse->dev, &err),
            &err);
    ops_same(&o, "o", out);
    ops_same(&o, "lse", lse);
    ops_close(&o);
    ck_assert_msg(!o.said[0], "%s", o.said);
}
END_TEST

START_TEST(attn_cuda_refuses_what_it_has_not)
{
    ckpt_cuda c = {.type = CKPT_CUDA_F32};
    const int64_t cu[2] = {0, 1};
    const ckpt_cuda_seq seq = {.n = 1, .tokens = 1, .cu = cu};
    ckpt_cuda_attention a = {.N = 3, .G = 2, .DK = 8, .DV = 8};
    float x[24] = {0};
    ck_assert_int_eq(ckpt_cuda_attend(&c, &a, &seq, x, x, x, x, x, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "attention on CUDA: 3 query heads, 2 key heads, head dims 8 and 8");
    a.G = 3;
    a.DV = 257;
    ck_assert_int_eq(ckpt_cuda_attend(&c, &a, &seq, x, x, x, x, x, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text,
                     "attention on CUDA: 3 heads of dims 8 and 257, expected at most 256");
    a.DV = 8;
    ck_assert_int_eq(ckpt_cuda_attend_bwd(&c, &a, &seq, x, x, x, x, x, x, x, x, x, &err),
                     CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "attention backward on CUDA: workspace of 0 bytes, needs 12 for 1 "
                               "rows of 3 heads");
    a.kind = CKPT_CUDA_ATTEND_GROUP;
    ck_assert_int_eq(ckpt_cuda_attend(&c, &a, &seq, x, x, x, x, x, &err), CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(err.text, "attention on CUDA: kernels of sm_90 for bf16, on another card or "
                               "type");
    a.kind = CKPT_CUDA_ATTEND_BEST;
    c.type = (ckpt_cuda_type)5;
    ck_assert_int_eq(ckpt_cuda_attend(&c, &a, &seq, x, x, x, x, x, &err), CKPT_E_UNSUPPORTED);
}
END_TEST

Suite *suite_attn_cuda(void);
Suite *suite_attn_cuda(void)
{
    Suite *s = suite_create("attn_cuda");
    TCase *t = tcase_create("emulated");
    tcase_set_timeout(t, 240);
    tcase_add_loop_test(t, attn_cuda_matches_engine, 0,
                        3 * (int)(sizeof attn_cases / sizeof *attn_cases));
    tcase_add_test(t, attn_cuda_many_sequences);
    tcase_add_test(t, attn_cuda_refuses_what_it_has_not);
    suite_add_tcase(s, t);
    return s;
}
