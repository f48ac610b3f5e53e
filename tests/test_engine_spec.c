/* The operation count against values worked out by hand from megatron-dist-ckpt.md section 7, with
 * H 64, T 10, one sequence (Q2 100). */
#include "spec.h"

#include <check.h>

static double count(ckpt_eng_block b)
{
    ckpt_eng_spec s = {.H = 64, .n_blocks = 1, .blocks = &b};
    return ckpt_eng_spec_flops(&s, 10, 100);
}

static ckpt_eng_block kda(int64_t rf, int64_t rg)
{
    ckpt_eng_block b = {.kind = CKPT_ENG_LINATTN};
    b.u.linattn = (ckpt_eng_linattn){
        .delta = {.rule = CKPT_ENG_KDA, .H = 4, .HV = 4, .K = 32, .V = 32},
        .D = 64,
        .W = 4,
        .f_rank = rf,
        .z_rank = rg
    };
    return b;
}

/* QK = V = 128: 20 [64 (3 128 + 2 128 + 4) + 4 384 + 64 128] + 80 (1024 + 3072). A rank r replaces
 * 64 128 by r (64 + 128). */
START_TEST(flops_of_kda_in_its_four_layouts)
{
    ck_assert_double_eq(count(kda(0, 0)), 20 * (41216 + 1536 + 8192) + 327680);
    ck_assert_double_eq(count(kda(16, 0)), 20 * (36096 + 1536 + 8192) + 327680);
    ck_assert_double_eq(count(kda(0, 24)), 20 * (37632 + 1536 + 8192) + 327680);
    ck_assert_double_eq(count(kda(16, 24)), 20 * (32512 + 1536 + 8192) + 327680);
}
END_TEST

START_TEST(flops_of_every_other_block)
{
    ckpt_eng_block b = {.kind = CKPT_ENG_LINATTN};
    b.u.linattn = (ckpt_eng_linattn){
        .delta = {.rule = CKPT_ENG_GDN, .H = 2, .HV = 4, .K = 16, .V = 16},
          .D = 64, .W = 4
    };
    /* QK 32, V 64: 64 (64 + 128 + 8) + 4 128 + 4 4 256 + 64 64 */
    ck_assert_double_eq(count(b), 20 * (12800 + 512 + 4096 + 4096));
    b.u.linattn.delta.rule = CKPT_ENG_GDN2;
    ck_assert_double_eq(count(b), 20 * (64 * (128 + 192) + 512 + 4096 + 4096));

    b = (ckpt_eng_block){.kind = CKPT_ENG_MLA};
    b.u.mla = (ckpt_eng_mla){.H = 64, .N = 4, .RQ = 48, .RK = 32, .DN = 32, .DR = 16, .DV = 24};
    /* q 48 (64 + 192 + 1); 32 (64 + 224 + 1); 64 16; 96 64; scores 100 4 72 */
    ck_assert_double_eq(count(b), 20 * (12336 + 9248 + 1024 + 6144) + 28800);
    b.u.mla.RQ = 0;
    b.u.mla.gate = CKPT_ENG_GATE_HEAD;
    ck_assert_double_eq(count(b), 20 * (12288 + 9248 + 1024 + 6144 + 256) + 28800);

    b = (ckpt_eng_block){.kind = CKPT_ENG_GQA};
    b.u.gqa = (ckpt_eng_gqa){
        .H = 64, .attn = {.N = 4, .G = 2, .DK = 16, .DV = 16}
    };
    ck_assert_double_eq(count(b), 40 * 64 * (64 + 32) + 200 * 64);

    b = (ckpt_eng_block){.kind = CKPT_ENG_MLP};
    b.u.mlp = (ckpt_eng_mlp){.H = 64, .F = 96, .gated = true};
    ck_assert_double_eq(count(b), 6 * 10 * 64 * 96);
    b.u.mlp.gated = false;
    ck_assert_double_eq(count(b), 4 * 10 * 64 * 96);

    b = (ckpt_eng_block){.kind = CKPT_ENG_MOE};
    b.u.moe = (ckpt_eng_moe){.H = 64, .E = 8, .FE = 32, .FS = 32, .top_k = 2, .gated = true};
    ck_assert_double_eq(count(b), 6 * 10 * 64 * (64 + 32));
}
END_TEST

START_TEST(flops_of_head_and_prediction)
{
    ckpt_eng_spec s = {.H = 64, .V = 320, .mtp_layers = 1};
    ck_assert_double_eq(ckpt_eng_spec_flops(&s, 10, 100),
                        20 * 64 * 320 * 2 + 2 * (192 + 8192) * 10);
}
END_TEST

Suite *suite_engine_spec(void);
Suite *suite_engine_spec(void)
{
    Suite *s = suite_create("engine_spec");
    TCase *t = tcase_create("flops");
    tcase_add_test(t, flops_of_kda_in_its_four_layouts);
    tcase_add_test(t, flops_of_every_other_block);
    tcase_add_test(t, flops_of_head_and_prediction);
    suite_add_tcase(s, t);
    return s;
}
