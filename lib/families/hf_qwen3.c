/* Qwen3 dense as Hugging Face stores it (Qwen3ForCausalLM): Llama with norms on the heads of query
 * and key. Names: conversion-maps.md section 3. */
#include "hf_common.h"
#include "hf_rows.h"

#define NAME "hf:qwen3"

/* clang-format off */
static const ckpt_row rows[] = {
    HF_TOP_ROWS,
    HF_ATTN_ROWS(HF_LAYER, "blocks.{2l}."),
    HF_QK_NORM_ROWS(HF_LAYER, "blocks.{2l}."),
    HF_MLP_ROWS(HF_LAYER, "blocks.{2l+1}."),
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] = HF_NEED_TOP HF_NEED_MLP HF_NEED_ATTN " q_norm.weight k_norm.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size", "hidden_size",         CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"vocab_size",  "vocab_size",          CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"norm_eps",    "rms_norm_eps",        CKPT_FIELD_REAL,   "1e-06",    NULL, 0},
    {"activation",  NULL,                  CKPT_FIELD_STRING, "\"silu\"", NULL, 0},
    {"tied",        "tie_word_embeddings", CKPT_FIELD_BOOL,   "false",    NULL, 0},
    {"init_std",    "initializer_range",   CKPT_FIELD_REAL,   "0.02",     NULL, 0},
    {"heads",       "num_attention_heads", CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"kv_heads",    "num_key_value_heads", CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"head_dim",    "head_dim",            CKPT_FIELD_SIZE,   "128",      NULL, 0},
    {"qk_norm",     NULL,                  CKPT_FIELD_BOOL,   "true",     NULL, 0},
    {"ffn_size",    "intermediate_size",   CKPT_FIELD_SIZE,   NULL,       NULL, 0},
};

static const ckpt_constant constants[] = {
    CKPT_HF_CONSTANTS,
    {"model_type",     "[\"qwen3\"]", NULL, true, "another model"},
    {"attention_bias", "[false]",     NULL, true, "the output projection would have a bias, which has no slot"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    static const char *const classes[] = {"Qwen3ForCausalLM", NULL}, *const types[] = {"qwen3",
                                                                                       NULL};
    return ckpt_hf_claims(config, classes, types);
}

static const ckpt_hf_rope rope = {.theta = 10000};
static const ckpt_hf_stack stack = {NAME, "*", "-", NULL};
static const ckpt_hf_types mixer_types = {
    "layer_types", {"full_attention", "sliding_attention"},
     "*"
};

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_attention_read(canon, err));
    CKPT_CHECK(ckpt_hf_rope_read(stored, &rope, canon, err));
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t layers;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_write(w, &stack, &layers, err));
    CKPT_CHECK(ckpt_hf_types_write(w, &mixer_types, 0, layers, err));
    CKPT_CHECK(ckpt_hf_rope_write(w, &rope, err));
    CKPT_CHECK(ckpt_hf_finish_write(w, "Qwen3ForCausalLM", err));
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
    .read_pattern = ckpt_hf_dense_pattern,
    .read_rest = read_rest,
    .write_rest = write_rest,
};

CKPT_DIALECT_FUNCTIONS

const ckpt_layout ckpt_layout_hf_qwen3 = {
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
    .default_tags = "",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
