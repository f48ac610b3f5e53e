/* Policies of quantisation by name, as the engine takes them, without going through rules (test_policy.c
 * does): those of peers/gen_quant.py and of the published table. And what f32 may be off by. */
#ifndef CKPT_TEST_QUANT_POLICIES_H
#define CKPT_TEST_QUANT_POLICIES_H

#include "policy.h"

#include <string.h>

static inline void quant_all_handles(ckpt_quant *q, ckpt_quant_kind kind)
{
    for (int h = 0; h <= CKPT_HANDLE_W; h++)
        q->kind[h] = kind;
}

static inline void quant_mixed(ckpt_quant *q)
{
    static const ckpt_quant_handle nvfp4[] = {
        CKPT_HANDLE_KEY_INTERACTION_RHS, CKPT_HANDLE_OUTPUT_SCORE_LHS,
        CKPT_HANDLE_WY_VALUE_LHS,        CKPT_HANDLE_STATE_READ_RHS,
        CKPT_HANDLE_OUTPUT_VALUE_RHS,    CKPT_HANDLE_STATE_UPDATE_LHS};
    for (size_t i = 0; i < sizeof nvfp4 / sizeof *nvfp4; i++)
        q->kind[nvfp4[i]] = CKPT_QUANT_NVFP4;
    q->kind[CKPT_HANDLE_WY_KEY_RHS] = CKPT_QUANT_OFF;
    q->kind[CKPT_HANDLE_STATE] = CKPT_QUANT_STATE_INT8;
    q->block_v = 16;
    q->accumulator[CKPT_SITE_WY_KEY] = CKPT_QUANT_BF16;
    q->block[CKPT_SITE_WY_KEY] = 24;
    q->accumulator[CKPT_SITE_STATE_UPDATE] = CKPT_QUANT_F32;
    q->block[CKPT_SITE_STATE_UPDATE] = 16;
}

static inline void quant_rounded(ckpt_quant *q)
{
    q->kind[CKPT_HANDLE_STATE] = CKPT_QUANT_STATE_E4M3;
    q->block_v = 16;
    for (int b = 0; b < CKPT_BOUNDARY_COUNT; b++)
        q->rounding[b] = CKPT_QUANT_F16;
    q->rounding[CKPT_BOUNDARY_VALUE_RESIDUAL] = q->rounding[CKPT_BOUNDARY_STATE_ADD] =
        CKPT_QUANT_BF16;
}

/* "off": the exact materialised path. "approximate", "fp8_approximate": with the product of six factors for the
 * inverse, all there are but for rounding; "approximate_2": of two. */
static inline ckpt_quant quant_policy(const char *name)
{
    ckpt_quant q = {.enabled = true, .matmul = true, .block_v = 64};
    if (strcmp(name, "fp8_operands") == 0 || strcmp(name, "rounded") == 0 ||
        strcmp(name, "mixed") == 0 || strcmp(name, "fp8_with_state") == 0 ||
        strcmp(name, "fp8_approximate") == 0)
        quant_all_handles(&q, CKPT_QUANT_FP8);
    if (strcmp(name, "nvfp4_operands") == 0)
        quant_all_handles(&q, CKPT_QUANT_NVFP4);
    if (strcmp(name, "fp8_with_state") == 0)
        q.kind[CKPT_HANDLE_STATE] = CKPT_QUANT_STATE_E4M3;
    for (int s = 0; s < CKPT_SITE_COUNT && strcmp(name, "fp16_accumulation") == 0; s++) {
        q.accumulator[s] = CKPT_QUANT_F16;
        q.block[s] = 16;
    }
    if (strcmp(name, "rounded") == 0)
        quant_rounded(&q);
    if (strcmp(name, "mixed") == 0)
        quant_mixed(&q);
    if (strstr(name, "approximate") != NULL)
        q.solve_factors = strcmp(name, "approximate_2") == 0 ? 2 : 6;
    return q;
}

typedef struct quant_tolerance {
    const char *name;
    double output, gradient; /* relative L2 of f32: quant-emulation.md section 6 */
} quant_tolerance;

static const quant_tolerance quant_policies[] = {
    {"off",               1e-6, 1e-6},
    {"fp8_operands",      1e-2, 2e-2},
    {"nvfp4_operands",    2e-2, 2e-2},
    {"fp16_accumulation", 1e-3, 1e-3},
    {"rounded",           1e-2, 2e-2},
    {"mixed",             2e-2, 2e-2},
};
#define N_QUANT_POLICIES ((int)(sizeof quant_policies / sizeof *quant_policies))

/* That of a policy by name: where only the inverse is approximated that of "off"; of others FP8's outputs'. */
static inline quant_tolerance quant_tolerance_of(const char *name)
{
    for (int i = 0; i < N_QUANT_POLICIES; i++)
        if (strcmp(name, quant_policies[i].name) == 0)
            return quant_policies[i];
    if (strncmp(name, "approximate", 11) == 0)
        return quant_policies[0];
    return (quant_tolerance){name, 1e-2, 1e-2};
}

#endif
