/* What a checkpoint's canonical configuration means to the engine: one description a block. Free of
 * the element type. */
#ifndef CKPT_ENGINE_SPEC_H
#define CKPT_ENGINE_SPEC_H

#include "attn.h"
#include "blocks.h"
#include "model.h"
#include "moe.h"
#include "policy.h"

typedef enum ckpt_eng_kind {
    CKPT_ENG_LINATTN, /* KDA, GDN, GDN2 */
    CKPT_ENG_MLA,
    CKPT_ENG_GQA,
    CKPT_ENG_MLP,
    CKPT_ENG_MOE
} ckpt_eng_kind;

typedef struct ckpt_eng_block {
    ckpt_eng_kind kind;
    char letter; /* of the pattern */
    union {
        ckpt_eng_linattn linattn;
        ckpt_eng_mla mla;
        ckpt_eng_gqa gqa;
        ckpt_eng_mlp mlp;
        ckpt_eng_moe moe;
    } u;
} ckpt_eng_block;

typedef struct ckpt_eng_spec {
    int64_t H, V;
    int64_t n_blocks, main_blocks; /* all, and those before multi-token prediction */
    int64_t mtp_layers;            /* depths */
    ckpt_eng_block *blocks;        /* in the arena */
    ckpt_eng_rope rope_mla, rope_gqa;
    bool tied, centered;
    double eps;
    ckpt_arena arena;
} ckpt_eng_spec;

typedef struct ckpt_eng_spec_opts {
    double latent_eps;         /* 0 = the model's; transformers uses 1e-6 whatever the model says */
    double aux_coef, z_coef;   /* router losses */
    const ckpt_policy *policy; /* of quantisation, borrowed, or NULL; disabled modules take the
                                        ordinary path */
    ckpt_quant_report *quant_report; /* of all blocks, or NULL */
} ckpt_eng_spec_opts;

/* From the model's configuration and tensors. opts or NULL. Errors: CKPT_E_UNSUPPORTED (a block the
 * engine does not run, no configuration), CKPT_E_FORMAT (a missing or contradictory field, named). */
ckpt_status ckpt_eng_spec_open(ckpt_eng_spec *s, const ckpt_model *model,
                               const ckpt_eng_spec_opts *opts, ckpt_err *err) CKPT_MUST_USE;
void ckpt_eng_spec_close(ckpt_eng_spec *s);

/* Floating-point operations of one forward over T tokens of sequences whose squared lengths sum to Q2:
 * megatron-dist-ckpt.md section 7. A training step is three of them. */
double ckpt_eng_spec_flops(const ckpt_eng_spec *s, int64_t T, double Q2);

#endif
