/* Qwen3-Next as Hugging Face stores it (Qwen3NextForCausalLM): gated DeltaNet, every fourth layer
 * gated attention, MoE with a gated shared expert. Names: conversion-maps.md section 6,
 * hf-layouts-linear.md section 3.
 *
 * in_proj_qkvz is packed by key head: GA rows of query, GA of key, U*GB of value, U*GB of z;
 * in_proj_ba likewise U of beta, U of alpha. conv1d is flat. Qwen3.5 stores the same sections flat
 * (in_proj_qkv, z, b, a): tag gdn. A head of q_proj is D rows of query, then D of gate. All norms but
 * the gated one of GDN are stored minus one (norm_zero_centered). mrope_section of Qwen3.5 has no
 * effect on text.
 *
 * Multi-token prediction is under mtp.*, its blocks follow those of the stack. Published Qwen3-Next
 * configurations have no field for it; num_nextn_predict_layers is what serving code looks for. */
#include "hf_common.h"
#include "hf_rows.h"

#define NAME "hf:qwen3_next"
#define MTP "num_nextn_predict_layers|mtp_num_hidden_layers"
#define GDN "linear_attn."
#define QKV "2*GK*GA+GV*GB" /* rows of conv1d and of the flat projection */
#define QKVZ "GK 2*GA+2*U*GB"

/* clang-format off */
#define MAIN "blocks.{2l<P}."
#define MAIN_MLP "blocks.{2l+1<P}."
#define DEPTH "mtp.layers.{l}."

#define GATED_ATTN_ROWS(P, B) \
    {B "attn.norm.weight", P "input_layernorm.weight",  "H", NULL}, \
    {B "attn.q.weight",    P "self_attn.q_proj.weight", "N 2=0 D | H", NULL}, \
    {B "attn.gate.weight", P "self_attn.q_proj.weight", "N 2=1 D | H", NULL}, \
    {B "attn.k.weight",    P "self_attn.k_proj.weight", "G D | H", NULL}, \
    {B "attn.v.weight",    P "self_attn.v_proj.weight", "G D | H", NULL}, \
    {B "attn.o.weight",    P "self_attn.o_proj.weight", "H | N D", NULL}, \
    HF_QK_NORM_ROWS(P, B)

#define CHANNEL_ROWS(P, B) \
    HF_MLP_ROWS(P, B), \
    HF_MOE_ROWS(P, B), \
    HF_SHARED_ROWS(P, B, "shared_expert"), \
    {B "moe.shared_gate.weight", P "mlp.shared_expert_gate.weight", "1 | H", NULL}

static const ckpt_row rows[] = {
    HF_TOP_ROWS,
    GATED_ATTN_ROWS(HF_LAYER, MAIN),
    CHANNEL_ROWS(HF_LAYER, MAIN_MLP),
    {MAIN "gdn.norm.weight",          HF_LAYER "input_layernorm.weight",              "H", NULL},
    {MAIN "gdn.q.weight",             HF_LAYER GDN "in_proj_qkvz.weight",             QKVZ "[0:GA] | H", "gdn=packed"},
    {MAIN "gdn.k.weight",             HF_LAYER GDN "in_proj_qkvz.weight",             QKVZ "[GA:2*GA] | H", "gdn=packed"},
    {MAIN "gdn.v.weight",             HF_LAYER GDN "in_proj_qkvz.weight",             QKVZ "[2*GA:2*GA+U*GB] | H", "gdn=packed"},
    {MAIN "gdn.z.weight",             HF_LAYER GDN "in_proj_qkvz.weight",             QKVZ "[2*GA+U*GB:2*GA+2*U*GB] | H", "gdn=packed"},
    {MAIN "gdn.beta.weight",          HF_LAYER GDN "in_proj_ba.weight",               "GK 2*U[0:U] | H", "gdn=packed"},
    {MAIN "gdn.alpha.weight",         HF_LAYER GDN "in_proj_ba.weight",               "GK 2*U[U:2*U] | H", "gdn=packed"},
    {MAIN "gdn.q.weight",             HF_LAYER GDN "in_proj_qkv.weight",              QKV "[0:GK*GA] | H", "gdn=flat"},
    {MAIN "gdn.k.weight",             HF_LAYER GDN "in_proj_qkv.weight",              QKV "[GK*GA:2*GK*GA] | H", "gdn=flat"},
    {MAIN "gdn.v.weight",             HF_LAYER GDN "in_proj_qkv.weight",              QKV "[2*GK*GA:" QKV "] | H", "gdn=flat"},
    {MAIN "gdn.z.weight",             HF_LAYER GDN "in_proj_z.weight",                "GV GB | H", "gdn=flat"},
    {MAIN "gdn.beta.weight",          HF_LAYER GDN "in_proj_b.weight",                "GV | H", "gdn=flat"},
    {MAIN "gdn.alpha.weight",         HF_LAYER GDN "in_proj_a.weight",                "GV | H", "gdn=flat"},
    {MAIN "gdn.conv_q.weight",        HF_LAYER GDN "conv1d.weight",                   QKV "[0:GK*GA] | 1 | GW", NULL},
    {MAIN "gdn.conv_k.weight",        HF_LAYER GDN "conv1d.weight",                   QKV "[GK*GA:2*GK*GA] | 1 | GW", NULL},
    {MAIN "gdn.conv_v.weight",        HF_LAYER GDN "conv1d.weight",                   QKV "[2*GK*GA:" QKV "] | 1 | GW", NULL},
    {MAIN "gdn.A_log",                HF_LAYER GDN "A_log",                           "GV", NULL},
    {MAIN "gdn.dt_bias",              HF_LAYER GDN "dt_bias",                         "GV", NULL},
    {MAIN "gdn.o_norm.weight",        HF_LAYER GDN "norm.weight",                     "GB", NULL},
    {MAIN "gdn.o.weight",             HF_LAYER GDN "out_proj.weight",                 "H | GV GB", NULL},

    GATED_ATTN_ROWS(DEPTH, "blocks.{2l+P}."),
    CHANNEL_ROWS(DEPTH, "blocks.{2l+P+1}."),
    {"mtp.{P}.eh_proj.weight",               "mtp.fc.weight",                                "H | 2*H", NULL},
    {"mtp.{P}.enorm.weight",                 "mtp.pre_fc_norm_embedding.weight",             "H", NULL},
    {"mtp.{P}.hnorm.weight",                 "mtp.pre_fc_norm_hidden.weight",                "H", NULL},
    {"mtp.{P}.norm.weight",                  "mtp.norm.weight",                              "H", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] = HF_NEED_TOP HF_NEED_MLP HF_NEED_MOE
    " shared.gate.weight shared.up.weight shared.down.weight shared_gate.weight; " HF_NEED_ATTN
    " gate.weight q_norm.weight k_norm.weight; "
    "gdn: norm.weight q.weight k.weight v.weight z.weight beta.weight alpha.weight conv_q.weight "
    "conv_k.weight conv_v.weight A_log dt_bias o_norm.weight o.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",        "hidden_size",                     CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",         "vocab_size",                      CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",           "rms_norm_eps",                    CKPT_FIELD_REAL,   "1e-06",       NULL, 0},
    {"norm_zero_centered", NULL,                              CKPT_FIELD_BOOL,   "true",        NULL, 0},
    {"activation",         NULL,                              CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
    {"tied",               "tie_word_embeddings",             CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"init_std",           "initializer_range",               CKPT_FIELD_REAL,   "0.02",        NULL, 0},
    {"heads",              "num_attention_heads",             CKPT_FIELD_SIZE,   NULL,          "*",  0},
    {"kv_heads",           "num_key_value_heads",             CKPT_FIELD_SIZE,   NULL,          "*",  0},
    {"head_dim",           "head_dim",                        CKPT_FIELD_SIZE,   "256",         "*",  0},
    {"qk_norm",            NULL,                              CKPT_FIELD_BOOL,   "true",        "*",  0},
    {"attn_gate",          NULL,                              CKPT_FIELD_BOOL,   "true",        "*",  0},
    {"gdn_key_heads",      "linear_num_key_heads",            CKPT_FIELD_SIZE,   NULL,          "G",  0},
    {"gdn_value_heads",    "linear_num_value_heads",          CKPT_FIELD_SIZE,   NULL,          "G",  0},
    {"gdn_key_dim",        "linear_key_head_dim",             CKPT_FIELD_SIZE,   NULL,          "G",  0},
    {"gdn_value_dim",      "linear_value_head_dim",           CKPT_FIELD_SIZE,   NULL,          "G",  0},
    {"gdn_conv",           "linear_conv_kernel_dim",          CKPT_FIELD_SIZE,   "4",           "G",  0},
    {"ffn_size",           "intermediate_size",               CKPT_FIELD_SIZE,   NULL,          "-",  0},
    {"experts",            "num_experts|num_local_experts",   CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",    "moe_intermediate_size",           CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"shared_ffn_size",    "shared_expert_intermediate_size", CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"shared_gate",        NULL,                              CKPT_FIELD_BOOL,   "true",        "E",  0},
    {"experts_per_token",  "num_experts_per_tok",             CKPT_FIELD_SIZE,   "10",          "E",  0},
    {"router_score",       NULL,                              CKPT_FIELD_STRING, "\"softmax\"", "E",  0},
    {"router_bias",        NULL,                              CKPT_FIELD_BOOL,   "false",       "E",  0},
    {"router_scale",       NULL,                              CKPT_FIELD_REAL,   "1",           "E",  0},
    {"router_normalize",   "norm_topk_prob",                  CKPT_FIELD_BOOL,   "true",        "E",  0},
};

static const ckpt_constant constants[] = {
    CKPT_HF_CONSTANTS,
    {"model_type",       "[\"qwen3_next\", \"qwen3_5_text\", \"qwen3_5_moe_text\"]", NULL, true, "another model"},
    {"attention_bias",   "[false]",    "*", true,  "the output projection would have a bias, which has no slot"},
    {"attn_output_gate", "[true]",     "*", false, "attention of this model has a gate"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    static const char *const classes[] = {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
                                          "Qwen3_5MoeForCausalLM", NULL};
    static const char *const types[] = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", NULL};
    return ckpt_hf_claims(config, classes, types);
}

static const ckpt_hf_rope rope = {.theta = 10000, .percent = 0.25};
static const ckpt_hf_stack stack = {NAME, "*G", "-E", MTP};
static const ckpt_hf_types mixer_types = {
    "layer_types", {"linear_attention", "full_attention"},
     {'G',                '*'             }
};

/* layer_types, else full attention at every full_attention_interval-th layer. */
static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x;
    ckpt_status status;
    int64_t interval = 0;
    bool seen = false;
    CKPT_CHECK(ckpt_hf_layers_open(&x, stored, MTP, err));
    CKPT_CHECK(ckpt_hf_sparse_step_read(stored, &x, err));
    CKPT_CHECK(ckpt_hf_types_read(stored, &mixer_types, x.mixers, x.n, &seen, err));
    CKPT_CHECK(ckpt_field_size(stored, "full_attention_interval", false, &interval, err));
    interval = interval == 0 ? 4 : interval;
    for (int64_t i = 0; !seen && i < x.n; i++)
        x.mixers[i] = (i + 1) % interval == 0 ? '*' : 'G';
    for (int64_t i = x.n; i < x.n + x.mtp; i++)
        x.mixers[i] = '*';
done:
    return ckpt_hf_layers_close(&x, status, canon, err);
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(canon, "*")) {
        CKPT_CHECK(ckpt_hf_attention_read(canon, err));
        CKPT_CHECK(ckpt_hf_rope_read(stored, &rope, canon, err));
    }
done:
    return status;
}

/* The intervals are lists in new configurations, which say every pattern. */
static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t layers;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_write(w, &stack, &layers, err));
    if (ckpt_json_get(w->out, "layer_types") == NULL && ckpt_field_changed(w, "pattern"))
        CKPT_CHECK(ckpt_field_put(w->out, "layer_types", ckpt_json_new_array(), err));
    CKPT_CHECK(ckpt_hf_types_write(w, &mixer_types, 0, layers, err));
    CKPT_CHECK(ckpt_hf_sparse_step_write(w, layers, err));
    if (!ckpt_field_applies(w->canon, "E") && ckpt_field_changed(w, "pattern"))
        CKPT_CHECK(
            ckpt_hf_put_first(w, "num_experts|num_local_experts", ckpt_json_new_int(0), err));
    if (ckpt_field_applies(w->canon, "*"))
        CKPT_CHECK(ckpt_hf_rope_write(w, &rope, err));
    CKPT_CHECK(ckpt_hf_finish_write(w, "Qwen3NextForCausalLM", err));
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

const ckpt_layout ckpt_layout_hf_qwen3_next = {
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
    .default_tags = "gdn=packed,experts=each",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
