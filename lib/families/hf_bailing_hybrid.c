/* Ling 3.0 as Hugging Face stores it (BailingMoeV3ForCausalLM; BailingHybridForCausalLM in
 * transformers 5): full-rank KDA, MLA with an output gate, MoE. Names: conversion-maps.md section 7
 * and transformers' own conversion table of bailing_hybrid.
 *
 * Ling 2.5 and 2.6 carry the same model_type, but their linear attention has fixed decays and no
 * delta rule; only `architectures` tells them apart, so they are recognised and refused. In a
 * configuration saved by transformers head_dim is the rotary width of MLA and linear_head_dim the
 * width of a KDA head; published ones have the latter under head_dim. MLA rotates all of its rotary
 * channels, whatever partial_rotary_factor says. transformers writes the output projection of KDA
 * under the name of MLA's, dense, and reads both. */
#include "hf_common.h"
#include "hf_rows.h"

#include <string.h>

#define NAME "hf:bailing_hybrid"
#define ATTN HF_LAYER "attention."
#define MTP "num_nextn_predict_layers|num_mtp_layers"
#define SHARED "num_shared_experts|n_shared_experts"
#define GATE "gated_attention_proj_granularity_type"

/* clang-format off */
static const ckpt_row rows[] = {
    {"embed.weight",                  "model.word_embeddings.weight",              "V | H", NULL},
    {"head.weight",                   "lm_head.weight",                            "V | H", NULL},
    {"final_norm.weight",             "model.norm.weight",                         "H", NULL},

    {"blocks.{2l}.kda.norm.weight",   HF_LAYER "input_layernorm.weight",           "H", NULL},
    {"blocks.{2l}.kda.q.weight",      ATTN "q_proj.weight",                        "NK A | H", NULL},
    {"blocks.{2l}.kda.k.weight",      ATTN "k_proj.weight",                        "NK A | H", NULL},
    {"blocks.{2l}.kda.v.weight",      ATTN "v_proj.weight",                        "NK B | H", NULL},
    {"blocks.{2l}.kda.conv_q.weight", ATTN "q_conv1d.weight",                      "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_k.weight", ATTN "k_conv1d.weight",                      "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_v.weight", ATTN "v_conv1d.weight",                      "NK B | 1 | W", NULL},
    {"blocks.{2l}.kda.f.weight",      ATTN "f_proj.weight",                        "NK A | H", NULL},
    {"blocks.{2l}.kda.g.weight",      ATTN "g_proj.weight",                        "NK B | H", NULL},
    {"blocks.{2l}.kda.beta.weight",   ATTN "b_proj.weight",                        "NK | H", NULL},
    {"blocks.{2l}.kda.A_log",         ATTN "A_log",                                "NK", "a_log=1d"},
    {"blocks.{2l}.kda.A_log",         ATTN "A_log",                                "1 | 1 | NK | 1", "a_log=4d"},
    {"blocks.{2l}.kda.dt_bias",       ATTN "dt_bias",                              "NK A", NULL},
    {"blocks.{2l}.kda.o_norm.weight", ATTN "o_norm.weight",                        "B", NULL},
    {"blocks.{2l}.kda.o.weight",      ATTN "o_proj.weight",                        "H | NK B", "kda_out=o_proj"},
    {"blocks.{2l}.kda.o.weight",      ATTN "dense.weight",                         "H | NK B", "kda_out=dense"},

    HF_MLA_ROWS(HF_LAYER, "blocks.{2l}.", "attention", "dense"),
    {"blocks.{2l}.mla.gate.weight",   ATTN "g_proj.weight",                        "GM | H", NULL},

    HF_MLP_ROWS(HF_LAYER, "blocks.{2l+1}."),
    HF_MOE_ROWS(HF_LAYER, "blocks.{2l+1}."),
    {"blocks.{2l+1}.moe.router.bias", HF_LAYER "mlp.gate.expert_bias",             "E", NULL},
    HF_SHARED_ROWS(HF_LAYER, "blocks.{2l+1}.", "shared_experts"),

    {"mtp.{2l}.enorm.weight",         HF_LAYER "enorm.weight",                     "H", NULL},
    {"mtp.{2l}.hnorm.weight",         HF_LAYER "hnorm.weight",                     "H", NULL},
    {"mtp.{2l}.eh_proj.weight",       HF_LAYER "eh_proj.weight",                   "H | 2*H", NULL},
    {"mtp.{2l}.norm.weight",          HF_LAYER "final_layernorm.weight",           "H", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] = HF_NEED_TOP HF_NEED_MLP HF_NEED_MOE
    " router.bias; " HF_NEED_MLA " gate.weight; "
    "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight conv_v.weight "
    "f.weight g.weight beta.weight A_log dt_bias o_norm.weight o.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",       "hidden_size",                               CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                                CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "rms_norm_eps",                              CKPT_FIELD_REAL,   "1e-06",       NULL, 0},
    {"activation",        NULL,                                        CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
    {"tied",              "tie_word_embeddings",                       CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"init_std",          "initializer_range",                         CKPT_FIELD_REAL,   "0.02",        NULL, 0},

    {"kda_heads",         "num_attention_heads|linear_num_heads",      CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_conv",          "short_conv_kernel_size|linear_conv_kernel_dim", CKPT_FIELD_SIZE, "4",         "K",  0},
    {"kda_safe_gate",     "kda_safe_gate",                             CKPT_FIELD_BOOL,   "true",        "K",  0},
    {"kda_lower_bound",   "kda_lower_bound",                           CKPT_FIELD_REAL,   "-5",          "K",  CKPT_FIELD_OPTIONAL},

    {"heads",             "num_attention_heads",                       CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"q_lora_rank",       "q_lora_rank",                               CKPT_FIELD_SIZE,   NULL,          "+",  CKPT_FIELD_NULLABLE},
    {"kv_lora_rank",      "kv_lora_rank",                              CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_nope_dim",       "qk_nope_head_dim",                          CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_rope_dim",       "qk_rope_head_dim",                          CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"v_head_dim",        "v_head_dim",                                CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"mla_nope",          NULL,                                        CKPT_FIELD_BOOL,   "false",       "+",  0},
    {"latent_norm",       NULL,                                        CKPT_FIELD_BOOL,   "true",        "+",  0},

    {"ffn_size",          "intermediate_size",                         CKPT_FIELD_SIZE,   NULL,          "-",  0},

    {"experts",           "num_experts|num_local_experts",             CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",   "moe_intermediate_size",                     CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"experts_per_token", "num_experts_per_tok|num_experts_per_token", CKPT_FIELD_SIZE,   "8",           "E",  0},
    {"router_score",      NULL,                                        CKPT_FIELD_STRING, "\"sigmoid\"", "E",  0},
    {"router_bias",       NULL,                                        CKPT_FIELD_BOOL,   "true",        "E",  0},
    {"router_scale",      "routed_scaling_factor",                     CKPT_FIELD_REAL,   "2.5",         "E",  0},
    {"router_normalize",  "norm_topk_prob|moe_renormalize",            CKPT_FIELD_BOOL,   "true",        "E",  0},
};

static const ckpt_constant constants[] = {
    CKPT_HF_CONSTANTS,
    {"model_type",                    "[\"bailing_hybrid\"]", NULL, true,  "another model"},
    {"no_kda_lora",                   "[true]",               "K",  true,  "this model has full-rank projections"},
    {"use_kda_lora",                  "[false]",              "K",  false, "this model has full-rank projections"},
    {"use_mla_nope|mla_use_nope",     "[false]",              "+",  false, "the reference rotates"},
    {"attention_bias|use_qkv_bias",   "[false]",              NULL, true,  "there are no bias tensors"},
    {"use_bias",                      "[false]",              NULL, false, "there are no bias tensors"},
    {"rope_interleave",               "[true]",               "+",  false, "rotated halves would have to be interleaved"},
    {"score_function|scoring_func|moe_router_activation_func", "[\"sigmoid\"]", "E", false, "softmax would ignore the correction bias"},
    {"moe_router_enable_expert_bias", "[true]",               "E",  false, "the router has a bias"},
    {"moe_layer_freq",                "[1]",                  "E",  false, "sources disagree on other values"},
};
/* clang-format on */

static const char *const classes[] = {"BailingMoeV3ForCausalLM", "BailingHybridForCausalLM", NULL};

/* Everything of the name, so that what cannot be read is refused with a reason. */
static int claims(const ckpt_json *config)
{
    static const char *const types[] = {"bailing_hybrid", NULL};
    const char *type = ckpt_json_string(ckpt_json_get(config, "model_type"));
    int claim = ckpt_hf_claims(config, classes, types);
    return type != NULL && strcmp(type, types[0]) == 0 ? 1 : claim;
}

static const ckpt_hf_rope rope = {.theta = 6000000, .ignores_percent = true};
static const ckpt_hf_stack stack = {NAME, "K+", "-E", MTP};
static const ckpt_hf_groups groups = {"n_group|num_expert_group", "topk_group", 8, 4};
static const ckpt_hf_types mixer_types = {
    "layer_types", {"linear_attention", "full_attention"},
     {'K',                '+'             }
};
static const ckpt_hf_types mlp_types = {
    "mlp_layer_types", {"dense", "sparse"},
     {'-',     'E'     }
};

static ckpt_status check_class(const ckpt_json *stored, ckpt_err *err)
{
    char text[64];
    const ckpt_json *list = ckpt_json_get(stored, "architectures");
    if (ckpt_json_child(list) == NULL) {
        if (ckpt_json_get(stored, "kda_safe_gate") != NULL)
            return CKPT_OK;
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'architectures' is missing: 'model_type' bailing_hybrid names "
                         "models with KDA and others");
    }
    if (ckpt_hf_claims(stored, classes, classes) > 0)
        return CKPT_OK;
    ckpt_field_text(ckpt_json_child(list), text, sizeof text);
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "field 'architectures': found %s, supported is \"BailingMoeV3ForCausalLM\": "
                     "linear attention with fixed decays has no block here",
                     text);
}

/* The last layer of every group is MLA. Implementations disagree on a tail that fills no group. */
static ckpt_status read_groups_of_layers(const ckpt_json *stored, ckpt_hf_layers *x, ckpt_err *err)
{
    int64_t group = 0;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "layer_group_size", false, &group, err));
    if (group == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'layer_group_size' is missing");
    if (x->n % group != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'layer_group_size': %lld layers are no whole groups of %lld, and "
                         "'layer_types' is missing",
                         (long long)x->n, (long long)group);
    for (int64_t i = 0; i < x->n; i++)
        x->mixers[i] = (i + 1) % group == 0 ? '+' : 'K';
done:
    return status;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x = {.n = 0};
    ckpt_status status;
    bool mixers = false, mlps = false;
    CKPT_CHECK(check_class(stored, err));
    CKPT_CHECK(ckpt_hf_layers_open(&x, stored, MTP, err));
    CKPT_CHECK(ckpt_hf_types_read(stored, &mixer_types, x.mixers, x.n, &mixers, err));
    if (!mixers)
        CKPT_CHECK(read_groups_of_layers(stored, &x, err));
    CKPT_CHECK(ckpt_hf_types_read(stored, &mlp_types, x.mlps, x.n, &mlps, err));
    CKPT_CHECK(ckpt_hf_dense_first_read(stored, 2, &x, err));
    for (int64_t i = x.n; i < x.n + x.mtp; i++) {
        x.mixers[i] = '+';
        x.mlps[i] = 'E';
    }
done:
    return ckpt_hf_layers_close(&x, status, canon, err);
}

static ckpt_status read_kda(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t width = 0;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "linear_head_dim", false, &width, err));
    if (width == 0)
        CKPT_CHECK(ckpt_field_size(stored, "head_dim", false, &width, err));
    if (width > 0) {
        CKPT_CHECK(ckpt_field_put(canon, "kda_key_dim", ckpt_json_new_int(width), err));
        CKPT_CHECK(ckpt_field_put(canon, "kda_value_dim", ckpt_json_new_int(width), err));
    }
    /* The bound only takes effect with the safe gate. */
    if (!ckpt_canon_bool(canon, "kda_safe_gate"))
        ckpt_json_delete(canon, "kda_lower_bound");
done:
    return status;
}

static ckpt_status read_gate(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(stored, GATE);
    const char *kind = j == NULL || ckpt_json_is_null(j) ? "head_wise" : ckpt_json_string(j);
    bool heads = kind != NULL && strcmp(kind, "head_wise") == 0;
    if (!heads && (kind == NULL || strcmp(kind, "element_wise") != 0))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field '" GATE "': expected head_wise or element_wise");
    return ckpt_field_put(canon, "mla_gate",
                          ckpt_json_new_string(heads ? "headwise" : "elementwise"), err);
}

/* Per-layer limits of the experts' activation: implementations disagree where they apply. */
static ckpt_status check_limits(const ckpt_json *stored, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(stored, "expert_swiglu_limit_list");
    int64_t i = 0;
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c), i++) {
        double v = 0;
        if (!ckpt_json_is_null(c) && (!ckpt_json_double(c, &v) || v > 0))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "field 'expert_swiglu_limit_list': layer %lld has a limit, on which "
                             "implementations disagree",
                             (long long)i);
    }
    return CKPT_OK;
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(canon, "K"))
        CKPT_CHECK(read_kda(stored, canon, err));
    if (ckpt_field_applies(canon, "+")) {
        CKPT_CHECK(ckpt_hf_mla_read(stored, canon, err));
        CKPT_CHECK(read_gate(stored, canon, err));
        CKPT_CHECK(ckpt_hf_rope_read(stored, &rope, canon, err));
    }
    if (ckpt_field_applies(canon, "E")) {
        CKPT_CHECK(check_limits(stored, err));
        CKPT_CHECK(ckpt_hf_shared_read(stored, SHARED, 1, canon, err));
        CKPT_CHECK(ckpt_hf_groups_read(stored, &groups, canon, err));
    }
done:
    return status;
}

static ckpt_status write_kda(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t width = ckpt_canon_int(w->canon, "kda_key_dim");
    ckpt_status status = CKPT_OK;
    if (!ckpt_field_changed(w, "kda_key_dim"))
        return CKPT_OK;
    bool separate = ckpt_json_get(w->out, "linear_head_dim") != NULL;
    CKPT_CHECK(ckpt_field_put(w->out, separate ? "linear_head_dim" : "head_dim",
                              ckpt_json_new_int(width), err));
done:
    return status;
}

static ckpt_status write_gate(const ckpt_field_write *w, ckpt_err *err)
{
    const char *gate = ckpt_json_string(ckpt_json_get(w->canon, "mla_gate"));
    if (gate == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, NAME " always has an MLA output gate (mla_gate)");
    if (!ckpt_field_changed(w, "mla_gate"))
        return CKPT_OK;
    return ckpt_field_put(
        w->out, GATE,
        ckpt_json_new_string(strcmp(gate, "headwise") == 0 ? "head_wise" : "element_wise"), err);
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t layers;
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_write(w, &stack, &layers, err));
    if (ckpt_field_changed(w, "pattern")) {
        if (ckpt_json_get(w->out, "layer_types") == NULL)
            CKPT_CHECK(ckpt_field_put(w->out, "layer_types", ckpt_json_new_array(), err));
        CKPT_CHECK(ckpt_hf_types_write(w, &mixer_types, 0, layers, err));
        CKPT_CHECK(ckpt_hf_types_write(w, &mlp_types, 1, layers, err));
        CKPT_CHECK(ckpt_hf_dense_first_write(w, err));
    }
    if (ckpt_field_applies(w->canon, "K"))
        CKPT_CHECK(write_kda(w, err));
    if (ckpt_field_applies(w->canon, "+")) {
        CKPT_CHECK(ckpt_hf_mla_write(w, err));
        CKPT_CHECK(write_gate(w, err));
        CKPT_CHECK(ckpt_hf_rope_write(w, &rope, err));
    }
    if (ckpt_field_applies(w->canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_write(w, NAME, SHARED, err));
        CKPT_CHECK(ckpt_hf_groups_write(w, &groups, err));
    }
    CKPT_CHECK(ckpt_hf_finish_write(w, "BailingMoeV3ForCausalLM", err));
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

const ckpt_layout ckpt_layout_hf_bailing_hybrid = {
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
    .default_tags = "a_log=1d,kda_out=o_proj,experts=each",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
