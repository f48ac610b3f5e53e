/* Ling 2.0 as Hugging Face stores it (BailingMoeV2ForCausalLM, remote code): ordinary attention with
 * query, key and value rows one after another in query_key_value, sigmoid MoE. Names:
 * conversion-maps.md section 7. */
#include "hf_common.h"
#include "hf_rows.h"

#define NAME "hf:bailing_moe"
#define ATTN HF_LAYER "attention."
#define MTP "num_nextn_predict_layers"
#define SHARED "num_shared_experts"
#define QKV "N*D+2*G*D"

/* clang-format off */
static const ckpt_row rows[] = {
    {"embed.weight",                    "model.word_embeddings.weight",       "V | H", NULL},
    {"head.weight",                     "lm_head.weight",                     "V | H", NULL},
    {"final_norm.weight",               "model.norm.weight",                  "H", NULL},
    {"blocks.{2l}.attn.norm.weight",    HF_LAYER "input_layernorm.weight",    "H", NULL},
    {"blocks.{2l}.attn.q.weight",       ATTN "query_key_value.weight",        QKV "[0:N*D] | H", NULL},
    {"blocks.{2l}.attn.k.weight",       ATTN "query_key_value.weight",        QKV "[N*D:N*D+G*D] | H", NULL},
    {"blocks.{2l}.attn.v.weight",       ATTN "query_key_value.weight",        QKV "[N*D+G*D:" QKV "] | H", NULL},
    {"blocks.{2l}.attn.q_norm.weight",  ATTN "query_layernorm.weight",        "D", NULL},
    {"blocks.{2l}.attn.k_norm.weight",  ATTN "key_layernorm.weight",          "D", NULL},
    {"blocks.{2l}.attn.o.weight",       ATTN "dense.weight",                  "H | N D", NULL},
    HF_MLP_ROWS(HF_LAYER, "blocks.{2l+1}."),
    HF_MOE_ROWS(HF_LAYER, "blocks.{2l+1}."),
    {"blocks.{2l+1}.moe.router.bias",   HF_LAYER "mlp.gate.expert_bias",      "E", NULL},
    HF_SHARED_ROWS(HF_LAYER, "blocks.{2l+1}.", "shared_experts"),
    {"mtp.{2l}.enorm.weight",           HF_LAYER "enorm.weight",              "H", NULL},
    {"mtp.{2l}.hnorm.weight",           HF_LAYER "hnorm.weight",              "H", NULL},
    {"mtp.{2l}.eh_proj.weight",         HF_LAYER "eh_proj.weight",            "H | 2*H", NULL},
    {"mtp.{2l}.norm.weight",            HF_LAYER "final_layernorm.weight",    "H", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] = HF_NEED_TOP HF_NEED_MLP HF_NEED_MOE "; " HF_NEED_ATTN;

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",       "hidden_size",                   CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                    CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "rms_norm_eps",                  CKPT_FIELD_REAL,   "1e-06",       NULL, 0},
    {"activation",        NULL,                            CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
    {"tied",              "tie_word_embeddings",           CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"init_std",          "initializer_range",             CKPT_FIELD_REAL,   "0.02",        NULL, 0},
    {"heads",             "num_attention_heads",           CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"kv_heads",          "num_key_value_heads",           CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"head_dim",          "head_dim",                      CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"qk_norm",           "use_qk_norm",                   CKPT_FIELD_BOOL,   "true",        NULL, 0},
    {"ffn_size",          "intermediate_size",             CKPT_FIELD_SIZE,   NULL,          "-",  0},
    {"experts",           "num_experts",                   CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",   "moe_intermediate_size",         CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"experts_per_token", "num_experts_per_tok",           CKPT_FIELD_SIZE,   "8",           "E",  0},
    {"router_score",      NULL,                            CKPT_FIELD_STRING, "\"sigmoid\"", "E",  0},
    {"router_bias",       "moe_router_enable_expert_bias", CKPT_FIELD_BOOL,   "true",        "E",  0},
    {"router_scale",      "routed_scaling_factor",         CKPT_FIELD_REAL,   "2.5",         "E",  0},
    {"router_normalize",  "norm_topk_prob",                CKPT_FIELD_BOOL,   "true",        "E",  0},
};

static const ckpt_constant constants[] = {
    CKPT_HF_CONSTANTS,
    {"model_type",                  "[\"bailing_moe\", \"bailing_moe_v2\"]", NULL, true,  "another model"},
    {"use_qkv_bias|attention_bias", "[false]",                               NULL, true,  "there are no bias tensors"},
    {"use_bias",                    "[false]",                               NULL, true,  "there are no bias tensors"},
    {"score_function",              "[\"sigmoid\"]",                         "E",  true,  "softmax would ignore the correction bias"},
    {"moe_layer_freq",              "[1]",                                   "E",  false, "sources disagree on other values"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    static const char *const classes[] = {"BailingMoeV2ForCausalLM", NULL};
    static const char *const types[] = {"bailing_moe", "bailing_moe_v2", NULL};
    return ckpt_hf_claims(config, classes, types);
}

static const ckpt_hf_rope rope = {.theta = 10000, .percent = 1};
static const ckpt_hf_stack stack = {NAME, "*", "-E", MTP};
static const ckpt_hf_groups groups = {"n_group", "topk_group", 1, 1};

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_open(&x, stored, MTP, err));
    CKPT_CHECK(ckpt_hf_dense_first_read(stored, 0, &x, err));
    for (int64_t i = 0; i < x.n + x.mtp; i++)
        x.mixers[i] = '*';
done:
    return ckpt_hf_layers_close(&x, status, canon, err);
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_attention_read(canon, err));
    CKPT_CHECK(ckpt_hf_rope_read(stored, &rope, canon, err));
    if (ckpt_field_applies(canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_read(stored, SHARED, 0, canon, err));
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
    CKPT_CHECK(ckpt_hf_rope_write(w, &rope, err));
    if (ckpt_field_applies(w->canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_write(w, NAME, SHARED, err));
        CKPT_CHECK(ckpt_hf_groups_write(w, &groups, err));
    }
    CKPT_CHECK(ckpt_hf_finish_write(w, "BailingMoeV2ForCausalLM", err));
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

const ckpt_layout ckpt_layout_hf_bailing_moe = {
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
