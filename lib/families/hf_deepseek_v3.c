/* DeepSeek-V3 and what is stored like it: DeepSeek-R1, Moonlight, Kimi-K2 (DeepseekV3ForCausalLM).
 * Names: conversion-maps.md section 4.
 *
 * Query projections are low rank or, with q_lora_rank null, direct. The rotated parts are stored in
 * interleaved pairs (rope_interleave), as Megatron has them. Multi-token prediction of depth d is
 * layer num_hidden_layers + d: its blocks simply continue the stack, and what joins it to the stack
 * is mtp.{2l}.*; published files repeat embedding and head there. The latent norms of transformers take an eps of 1e-6 whatever rms_norm_eps says. */
#include "hf_common.h"
#include "hf_rows.h"

#define NAME "hf:deepseek_v3"
#define MTP "num_nextn_predict_layers|num_mtp_layers"
#define SHARED "n_shared_experts|num_shared_experts"

/* clang-format off */
static const ckpt_row rows[] = {
    HF_TOP_ROWS,
    HF_MLA_ROWS(HF_LAYER, "blocks.{2l}.", "self_attn", "o_proj"),
    HF_MLP_ROWS(HF_LAYER, "blocks.{2l+1}."),
    HF_MOE_ROWS(HF_LAYER, "blocks.{2l+1}."),
    {"blocks.{2l+1}.moe.router.bias", HF_LAYER "mlp.gate.e_score_correction_bias", "E", NULL},
    HF_SHARED_ROWS(HF_LAYER, "blocks.{2l+1}.", "shared_experts"),
    {"mtp.{2l}.enorm.weight",         HF_LAYER "enorm.weight",                     "H", NULL},
    {"mtp.{2l}.hnorm.weight",         HF_LAYER "hnorm.weight",                     "H", NULL},
    {"mtp.{2l}.eh_proj.weight",       HF_LAYER "eh_proj.weight",                   "H | 2*H", NULL},
    {"mtp.{2l}.norm.weight",          HF_LAYER "shared_head.norm.weight",          "H", NULL},
    {"mtp.{2l}.embed=embed.weight",   HF_LAYER "embed_tokens.weight",              "V | H", "mtp_copies=stored"},
    {"mtp.{2l}.head=head.weight|embed.weight", HF_LAYER "shared_head.head.weight", "V | H", "mtp_copies=stored"},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] = HF_NEED_TOP HF_NEED_MLP HF_NEED_MOE " router.bias; " HF_NEED_MLA;

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",       "hidden_size",                                 CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                                  CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "rms_norm_eps",                                CKPT_FIELD_REAL,   "1e-06",       NULL, 0},
    {"activation",        NULL,                                          CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
    {"tied",              "tie_word_embeddings",                         CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"init_std",          "initializer_range",                           CKPT_FIELD_REAL,   "0.02",        NULL, 0},
    {"heads",             "num_attention_heads",                         CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"q_lora_rank",       "q_lora_rank",                                 CKPT_FIELD_SIZE,   NULL,          NULL, CKPT_FIELD_NULLABLE},
    {"kv_lora_rank",      "kv_lora_rank",                                CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"qk_nope_dim",       "qk_nope_head_dim",                            CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"qk_rope_dim",       "qk_rope_head_dim",                            CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"v_head_dim",        "v_head_dim",                                  CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"mla_nope",          NULL,                                          CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"latent_norm",       NULL,                                          CKPT_FIELD_BOOL,   "true",        NULL, 0},
    {"ffn_size",          "intermediate_size",                           CKPT_FIELD_SIZE,   NULL,          "-",  0},
    {"experts",           "n_routed_experts|num_local_experts",          CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",   "moe_intermediate_size",                       CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"experts_per_token", "num_experts_per_tok",                         CKPT_FIELD_SIZE,   "8",           "E",  0},
    {"router_score",      NULL,                                          CKPT_FIELD_STRING, "\"sigmoid\"", "E",  0},
    {"router_bias",       NULL,                                          CKPT_FIELD_BOOL,   "true",        "E",  0},
    {"router_scale",      "routed_scaling_factor",                       CKPT_FIELD_REAL,   "2.5",         "E",  0},
    {"router_normalize",  "norm_topk_prob",                              CKPT_FIELD_BOOL,   "true",        "E",  0},
};

static const ckpt_constant constants[] = {
    CKPT_HF_CONSTANTS,
    {"model_type",      "[\"deepseek_v3\", \"kimi_k2\"]", NULL, true,  "another model"},
    {"attention_bias",  "[false]",                        NULL, true,  "MLA has no bias tensors"},
    {"rope_interleave", "[true]",                         NULL, true,  "rotated halves would have to be interleaved"},
    {"scoring_func",    "[\"sigmoid\"]",                  "E",  true,  "softmax would ignore the correction bias"},
    {"topk_method",     "[\"noaux_tc\"]",                 "E",  true,  "no other choice has the correction bias"},
    {"moe_layer_freq",  "[1]",                            "E",  true,  "sources disagree on other values"},
    {"mla_use_nope",    "[false]",                        NULL, false, "MLA of this model rotates"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    static const char *const classes[] = {"DeepseekV3ForCausalLM", "KimiK2ForCausalLM", NULL};
    static const char *const types[] = {"deepseek_v3", "kimi_k2", NULL};
    return ckpt_hf_claims(config, classes, types);
}

static const ckpt_hf_rope rope = {.theta = 10000};
static const ckpt_hf_stack stack = {NAME, "+", "-E", MTP};
static const ckpt_hf_groups groups = {"n_group", "topk_group", 8, 4};

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_open(&x, stored, MTP, err));
    CKPT_CHECK(ckpt_hf_dense_first_read(stored, 3, &x, err));
    for (int64_t i = 0; i < x.n + x.mtp; i++)
        x.mixers[i] = '+';
done:
    return ckpt_hf_layers_close(&x, status, canon, err);
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_mla_read(stored, canon, err));
    CKPT_CHECK(ckpt_hf_rope_read(stored, &rope, canon, err));
    if (ckpt_field_applies(canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_read(stored, SHARED, 1, canon, err));
        CKPT_CHECK(ckpt_hf_groups_read(stored, &groups, canon, err));
    }
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t layers;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_write(w, &stack, &layers, err));
    CKPT_CHECK(ckpt_hf_dense_first_write(w, err));
    if (ckpt_json_get(w->canon, "mla_gate") != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, NAME " has no MLA output gate (mla_gate)");
    CKPT_CHECK(ckpt_hf_mla_write(w, err));
    CKPT_CHECK(ckpt_hf_rope_write(w, &rope, err));
    if (ckpt_field_applies(w->canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_write(w, NAME, SHARED, err));
        CKPT_CHECK(ckpt_hf_groups_write(w, &groups, err));
    }
    CKPT_CHECK(ckpt_hf_finish_write(w, "DeepseekV3ForCausalLM", err));
done:
    return status;
}

static const ckpt_dialect dialect = {
    .name = NAME,
    .fields = fields,
    .n_fields = sizeof fields / sizeof fields[0],
    .constants = constants,
    .n_constants = sizeof constants / sizeof constants[0],
    .claims = claims,
    .read_pattern = read_pattern,
    .read_rest = read_rest,
    .write_rest = write_rest,
};

CKPT_DIALECT_FUNCTIONS

const ckpt_layout ckpt_layout_hf_deepseek_v3 = {
    .name = NAME,
    .group = "hf",
    .family = "hybrid",
    .schema = ckpt_hybrid_schema,
    .n_schema = CKPT_HYBRID_SCHEMA_LEN,
    .rows = rows,
    .n_rows = sizeof rows / sizeof rows[0],
    .ignored = ignored,
    .required = required,
    .config_kind = CKPT_CONFIG_HF,
    .default_tags = "experts=each",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
