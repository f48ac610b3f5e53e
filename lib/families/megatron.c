/* Megatron-Core arguments that do not say which layers there are; see megatron.h.
 *
 * Sizes of linear attention serve KDA, GDN and GDN2 alike. Query groups count only with
 * group_query_attention. num_query_groups, kv_channels: as TransformerConfig completes them. */
#include "megatron.h"

#include <string.h>

#include "checked.h"

#define VOCAB_MULTIPLE 128 /* make_vocab_size_divisible_by where nothing else is said */

const char *const ckpt_megatron_ignored[] = {"*._extra_state", "*.rotary_pos_emb.inv_freq", NULL};

void ckpt_megatron_choices(const ckpt_json *canon, ckpt_buf *out)
{
    const char *activation = ckpt_json_string(ckpt_json_get(canon, "activation"));
    bool plain = activation != NULL && strcmp(activation, "relu2") == 0;
    ckpt_buf_printf(out, "mlp=%s,attn=%s,norms=%s", plain ? "plain" : "gated",
                    ckpt_canon_bool(canon, "attn_gate") ? "gated" : "plain",
                    ckpt_canon_bool(canon, "norm_zero_centered") ? "centered" : "plain");
}

/* clang-format off */
const ckpt_field ckpt_megatron_fields[] = {
    {"hidden_size",       "hidden_size",                          CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                           CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "norm_epsilon|layernorm_epsilon",       CKPT_FIELD_REAL,   "1e-05",       NULL, 0},
    {"tied",              "untie_embeddings_and_output_weights",  CKPT_FIELD_BOOL,   NULL,          NULL, CKPT_FIELD_NOT},
    {"init_std",          "init_method_std",                      CKPT_FIELD_REAL,   "0.02",        NULL, 0},

    {"kda_heads",         "linear_num_key_heads",                 CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_key_dim",       "linear_key_head_dim",                  CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_value_dim",     "linear_value_head_dim",                CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_conv",          "linear_conv_kernel_dim",               CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_f_rank",        "kda_f_lora_rank",                      CKPT_FIELD_SIZE,   NULL,          "K",  CKPT_FIELD_NULLABLE},
    {"kda_gate_rank",     "kda_gate_lora_rank",                   CKPT_FIELD_SIZE,   NULL,          "K",  CKPT_FIELD_NULLABLE},
    {"kda_safe_gate",     "kda_safe_gate",                        CKPT_FIELD_BOOL,   "false",       "K",  0},
    {"kda_lower_bound",   "kda_lower_bound",                      CKPT_FIELD_REAL,   NULL,          "K",  CKPT_FIELD_NULLABLE},

    {"gdn_key_heads",     "linear_num_key_heads",                 CKPT_FIELD_SIZE,   NULL,          "Gg", 0},
    {"gdn_value_heads",   "linear_num_value_heads",               CKPT_FIELD_SIZE,   NULL,          "Gg", 0},
    {"gdn_key_dim",       "linear_key_head_dim",                  CKPT_FIELD_SIZE,   NULL,          "Gg", 0},
    {"gdn_value_dim",     "linear_value_head_dim",                CKPT_FIELD_SIZE,   NULL,          "Gg", 0},
    {"gdn_conv",          "linear_conv_kernel_dim",               CKPT_FIELD_SIZE,   "4",           "Gg", 0},

    {"mamba_heads",       "mamba_num_heads",                      CKPT_FIELD_SIZE,   NULL,          "M",  0},
    {"mamba_head_dim",    "mamba_head_dim",                       CKPT_FIELD_SIZE,   "64",          "M",  0},
    {"mamba_groups",      "mamba_num_groups",                     CKPT_FIELD_SIZE,   "8",           "M",  0},
    {"mamba_state",       "mamba_state_dim",                      CKPT_FIELD_SIZE,   "128",         "M",  0},
    {"mamba_conv",        NULL,                                   CKPT_FIELD_SIZE,   "4",           "M",  0},

    {"heads",             "num_attention_heads",                  CKPT_FIELD_SIZE,   NULL,          "+*", 0},
    {"head_dim",          "kv_channels",                          CKPT_FIELD_SIZE,   NULL,          "*",  0},
    {"qk_norm",           "qk_layernorm",                         CKPT_FIELD_BOOL,   "false",       "*",  0},
    {"q_lora_rank",       "q_lora_rank",                          CKPT_FIELD_SIZE,   NULL,          "+",  CKPT_FIELD_NULLABLE},
    {"kv_lora_rank",      "kv_lora_rank",                         CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_nope_dim",       "qk_head_dim",                          CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_rope_dim",       "qk_pos_emb_head_dim",                  CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"v_head_dim",        "v_head_dim",                           CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"latent_norm",       "qk_layernorm",                         CKPT_FIELD_BOOL,   "false",       "+",  0},

    {"ffn_size",          "ffn_hidden_size",                      CKPT_FIELD_SIZE,   NULL,          "-",  0},

    {"experts",           "num_experts",                          CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",   "moe_ffn_hidden_size",                  CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"shared_ffn_size",   "moe_shared_expert_intermediate_size",  CKPT_FIELD_SIZE,   NULL,          "E",  CKPT_FIELD_NULLABLE},
    {"experts_per_token", "moe_router_topk",                      CKPT_FIELD_SIZE,   "2",           "E",  0},
    {"router_score",      "moe_router_score_function",            CKPT_FIELD_STRING, "\"softmax\"", "E",  0},
    {"router_bias",       "moe_router_enable_expert_bias",        CKPT_FIELD_BOOL,   "false",       "E",  0},
    {"router_scale",      "moe_router_topk_scaling_factor",       CKPT_FIELD_REAL,   "1",           "E",  0},
};

const ckpt_constant ckpt_megatron_constants[] = {
    {"multi_latent_attention",       "[true]",                      "+",  true,  "the model has MLA layers"},
    {"multi_latent_attention",       "[false]",                     "*",  false, "the model has ordinary attention"},
    {"normalization",                "[\"RMSNorm\"]",               NULL, true,  "no other norm is known"},
    {"add_bias_linear",              "[false]",                     NULL, true,  "linear biases have no slot"},
    {"add_qkv_bias",                 "[false]",                     "+",  false, "MLA has no bias tensors"},
    {"qk_l2_norm",                   "[false]",                     "*",  false, "norms without weights are not known"},
    {"softmax_type",                 "[\"vanilla\"]",               "*",  false, "a learnt offset has no slot"},
    {"window_size",                  "[]",                          "*",  false, "attention within a window is not known"},
    {"rotary_interleaved",           "[false]",                     "*",  false, "rotated halves would have to be reordered"},
    {"gated_attention_proj_granularity", "[\"elementwise\"]",       "*",  false, "only MLA has a gate a head"},
    {"heterogeneous_layers_config_path", "[]",                      NULL, false, "layers of different sizes are not known"},
    {"mtp_use_repeated_layer",       "[false]",                     NULL, false, "all depths would share one layer"},
    {"activation_func_clamp_value",  "[]",                          "-E", false, "implementations disagree on clamping"},
    {"glu_linear_offset",            "[0]",                         "-E", false, "plain SwiGLU only"},
    {"moe_latent_size",              "[0]",                         "E",  false, "latent MoE has no block here"},
    {"moe_router_score_function",    "[\"sigmoid\", \"softmax\"]",  "E",  false, "no other score is known"},
    {"moe_grouped_gemm",             "[true, false]",               "E",  true,  "a boolean"},
    {"experimental_attention_variant", "[\"kda\"]",                 "K",  false, "the model has KDA layers"},
    {"experimental_attention_variant", "[\"gated_delta_net\", \"gdn\"]", "G", false, "the model has GDN layers"},
    {"experimental_attention_variant", "[\"gdn2\"]",                "g",  true,  "the model has GDN2 layers"},
    {"position_embedding_type",      "[\"rope\", \"none\"]",        NULL, false, "no other position embedding is known"},
    {"rotary_percent",               "[1]",                         "+",  false, "MLA rotates all of its rotary dimensions"},
    {"use_rope_scaling",             "[false]",                     "+",  false, "llama3 frequencies on MLA"},
};
/* clang-format on */

const size_t ckpt_megatron_n_fields = sizeof ckpt_megatron_fields / sizeof ckpt_megatron_fields[0];
const size_t ckpt_megatron_n_constants =
    sizeof ckpt_megatron_constants / sizeof ckpt_megatron_constants[0];

int64_t ckpt_megatron_earlier(const ckpt_field_write *w, const char *path)
{
    int64_t v = 0;
    return ckpt_field_size(w->foreign, path, false, &v, NULL) == CKPT_OK ? v : 0;
}

/* ---- attention, KDA, Mamba, MoE --------------------------------------------------------------------------- */

static ckpt_status read_kda(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t heads = ckpt_canon_int(canon, "kda_heads"), value_heads;
    int64_t a = ckpt_canon_int(canon, "kda_key_dim"), b = ckpt_canon_int(canon, "kda_value_dim");
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "linear_num_value_heads", false, &value_heads, err));
    if (heads != 0 && value_heads != 0 && heads != value_heads)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'linear_num_value_heads': found %lld, KDA needs as many as "
                         "linear_num_key_heads %lld",
                         (long long)value_heads, (long long)heads);
    if (a != 0 && b != 0 && a != b)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'linear_value_head_dim': found %lld, KDA needs it equal to "
                         "linear_key_head_dim %lld",
                         (long long)b, (long long)a);
    /* Without the safe gate Megatron ignores the bound. */
    if (!ckpt_canon_bool(canon, "kda_safe_gate"))
        ckpt_json_delete(canon, "kda_lower_bound");
done:
    return status;
}

/* Query groups of ordinary attention, and head sizes where they follow from others. */
static ckpt_status read_attention(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    bool grouped, bias, gate;
    int64_t groups, heads = ckpt_canon_int(canon, "heads");
    int64_t hidden = ckpt_canon_int(canon, "hidden_size");
    CKPT_CHECK(ckpt_field_bool(stored, "group_query_attention", true, &grouped, err));
    CKPT_CHECK(ckpt_field_size(stored, "num_query_groups", false, &groups, err));
    groups = !grouped || groups == 0 ? heads : groups;
    if (groups > 0)
        CKPT_CHECK(ckpt_field_put(canon, "kv_heads", ckpt_json_new_int(groups), err));
    if (ckpt_json_get(canon, "head_dim") == NULL && heads > 0 && hidden >= heads)
        CKPT_CHECK(ckpt_field_put(canon, "head_dim", ckpt_json_new_int(hidden / heads), err));
    CKPT_CHECK(ckpt_field_bool(stored, "add_qkv_bias", false, &bias, err));
    CKPT_CHECK(ckpt_field_bool(stored, "attention_output_gate", false, &gate, err));
    if (bias && gate)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'add_qkv_bias': the bias of an output gate has no slot");
    if (bias)
        CKPT_CHECK(ckpt_field_put(canon, "attn_bias", ckpt_json_new_bool(true), err));
    if (gate)
        CKPT_CHECK(ckpt_field_put(canon, "attn_gate", ckpt_json_new_bool(true), err));
done:
    return status;
}

static ckpt_status write_attention(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t groups = ckpt_canon_int(w->canon, "kv_heads"),
            heads = ckpt_canon_int(w->canon, "heads");
    if (groups == 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "kv_heads is not known");
    if (ckpt_field_changed(w, "kv_heads,heads")) {
        CKPT_CHECK(ckpt_field_put(w->out, "group_query_attention",
                                  ckpt_json_new_bool(groups != heads), err));
        CKPT_CHECK(ckpt_field_put(w->out, "num_query_groups", ckpt_json_new_int(groups), err));
    }
    if (ckpt_field_changed(w, "attn_bias"))
        CKPT_CHECK(ckpt_field_put(w->out, "add_qkv_bias",
                                  ckpt_json_new_bool(ckpt_canon_bool(w->canon, "attn_bias")), err));
    if (ckpt_field_changed(w, "attn_gate"))
        CKPT_CHECK(ckpt_field_put(w->out, "attention_output_gate",
                                  ckpt_json_new_bool(ckpt_canon_bool(w->canon, "attn_gate")), err));
done:
    return status;
}

/* Without a number of heads Mamba-2 expands the hidden size by two. */
static ckpt_status read_mamba(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t hidden = ckpt_canon_int(canon, "hidden_size");
    int64_t width = ckpt_canon_int(canon, "mamba_head_dim");
    (void)stored;
    if (ckpt_json_get(canon, "mamba_heads") != NULL || hidden == 0 || width == 0 ||
        2 * hidden % width != 0)
        return CKPT_OK;
    return ckpt_field_put(canon, "mamba_heads", ckpt_json_new_int(2 * hidden / width), err);
}

/* swiglu, or squared_relu without a gate. Neither where nothing is said means swiglu: every model
 * that says nothing was written so. */
static ckpt_status read_activation(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    bool swiglu, squared;
    CKPT_CHECK(ckpt_field_bool(stored, "squared_relu", false, &squared, err));
    CKPT_CHECK(ckpt_field_bool(stored, "swiglu", !squared, &swiglu, err));
    if (ckpt_field_applies(canon, "-E") && swiglu == squared)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'swiglu': found %s with squared_relu %s, supported is one of them",
                         swiglu ? "true" : "false", squared ? "true" : "false");
    const char *name = ckpt_field_applies(canon, "-E") && squared ? "relu2" : "silu";
    status = ckpt_field_put(canon, "activation", ckpt_json_new_string(name), err);
done:
    return status;
}

static ckpt_status write_activation(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *activation = ckpt_json_string(ckpt_json_get(w->canon, "activation"));
    bool squared = activation != NULL && strcmp(activation, "relu2") == 0;
    if (!ckpt_field_applies(w->canon, "-E") || !ckpt_field_changed(w, "activation,pattern"))
        return CKPT_OK;
    if (w->foreign == NULL || ckpt_json_get(w->out, "swiglu") != NULL || squared)
        CKPT_CHECK(ckpt_field_put(w->out, "swiglu", ckpt_json_new_bool(!squared), err));
    if (squared || ckpt_json_get(w->out, "squared_relu") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "squared_relu", ckpt_json_new_bool(squared), err));
done:
    return status;
}

#define CENTERED "apply_layernorm_1p|layernorm_zero_centered_gamma"

static ckpt_status write_norms(const ckpt_field_write *w, ckpt_err *err)
{
    static const char *const names[] = {"apply_layernorm_1p", "layernorm_zero_centered_gamma"};
    ckpt_status status = CKPT_OK;
    bool centered = ckpt_canon_bool(w->canon, "norm_zero_centered");
    if (!ckpt_field_changed(w, "norm_zero_centered") || (w->foreign == NULL && !centered))
        return CKPT_OK;
    for (int i = 0; i < 2; i++)
        if (i == 0 || ckpt_json_get(w->out, names[i]) != NULL)
            CKPT_CHECK(ckpt_field_put(w->out, names[i], ckpt_json_new_bool(centered), err));
done:
    return status;
}

static ckpt_status read_gate(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    bool gated;
    const ckpt_json *j;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_bool(stored, "attention_output_gate", false, &gated, err));
    CKPT_CHECK(ckpt_field_find(stored, "gated_attention_proj_granularity", &j, err));
    if (!gated)
        return CKPT_OK;
    const char *kind = j == NULL ? "elementwise" : ckpt_json_string(j);
    if (kind == NULL || (strcmp(kind, "elementwise") != 0 && strcmp(kind, "headwise") != 0))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'gated_attention_proj_granularity': expected elementwise or "
                         "headwise");
    status = ckpt_field_put(canon, "mla_gate", ckpt_json_new_string(kind), err);
done:
    return status;
}

/* Of fewer experts a token than groups, all groups would score 0 and the choice be arbitrary. */
static ckpt_status no_group_score(const ckpt_json *canon, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "field 'moe_router_group_topk': a group is scored by its best %lld / %lld = 0 "
                     "experts (moe_router_topk / moe_router_group_topk)",
                     (long long)ckpt_canon_int(canon, "experts_per_token"),
                     (long long)ckpt_canon_int(canon, "router_group_topk"));
}

/* Groups are scored by as many experts as the quotient says (moe_utils.group_limited_topk). */
static ckpt_status check_group_score(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t says = ckpt_config_group_best(w->canon, CKPT_CONFIG_MEGATRON);
    int64_t best = ckpt_canon_int(w->canon, "router_group_best");
    best = best == 0 ? 2 : best;
    if (ckpt_canon_int(w->canon, "router_groups") <= 1 || says == best)
        return CKPT_OK;
    if (says == 0)
        return no_group_score(w->canon, err);
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "field 'moe_router_group_topk': %s would score a group by its best %lld "
                     "experts (moe_router_topk / moe_router_group_topk), this model scores it by "
                     "its best %lld: other experts would be chosen; --approximate permits it",
                     w->name, (long long)says, (long long)best);
}

static ckpt_status read_groups(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t groups, limit, best;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "moe_router_num_groups", false, &groups, err));
    CKPT_CHECK(ckpt_field_size(stored, "moe_router_group_topk", false, &limit, err));
    if (groups <= 1)
        return CKPT_OK;
    if (limit == 0 || limit > groups)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'moe_router_group_topk': found %lld, expected 1 to %lld",
                         (long long)limit, (long long)groups);
    CKPT_CHECK(ckpt_field_put(canon, "router_groups", ckpt_json_new_int(groups), err));
    CKPT_CHECK(ckpt_field_put(canon, "router_group_topk", ckpt_json_new_int(limit), err));
    best = ckpt_config_group_best(canon, CKPT_CONFIG_MEGATRON);
    if (best == 0)
        return no_group_score(canon, err);
    if (best != 2)
        CKPT_CHECK(ckpt_field_put(canon, "router_group_best", ckpt_json_new_int(best), err));
done:
    return status;
}

/* Sigmoid scores of more than one expert are always normalised; softmax ones unless taken before
 * the choice. */
static bool normalizes(const ckpt_json *canon, bool pre_softmax)
{
    const char *score = ckpt_json_string(ckpt_json_get(canon, "router_score"));
    if (score != NULL && strcmp(score, "softmax") == 0)
        return !pre_softmax;
    return ckpt_canon_int(canon, "experts_per_token") > 1;
}

static ckpt_status read_moe(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    const char *score = ckpt_json_string(ckpt_json_get(canon, "router_score"));
    bool pre_softmax, gate;
    int64_t width;
    ckpt_status status;
    if (score != NULL && strcmp(score, "softmax") == 0 && ckpt_canon_bool(canon, "router_bias"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'moe_router_enable_expert_bias': softmax scores ignore the bias");
    if (ckpt_json_get(canon, "expert_ffn_size") == NULL) {
        CKPT_CHECK(ckpt_field_size(stored, "ffn_hidden_size", false, &width, err));
        if (width != 0)
            CKPT_CHECK(ckpt_field_put(canon, "expert_ffn_size", ckpt_json_new_int(width), err));
    }
    CKPT_CHECK(ckpt_field_bool(stored, "moe_shared_expert_gate", false, &gate, err));
    if (gate && ckpt_json_get(canon, "shared_ffn_size") != NULL)
        CKPT_CHECK(ckpt_field_put(canon, "shared_gate", ckpt_json_new_bool(true), err));
    CKPT_CHECK(ckpt_field_bool(stored, "moe_router_pre_softmax", false, &pre_softmax, err));
    CKPT_CHECK(ckpt_field_put(canon, "router_normalize",
                              ckpt_json_new_bool(normalizes(canon, pre_softmax)), err));
    CKPT_CHECK(read_groups(stored, canon, err));
done:
    return status;
}

ckpt_status ckpt_megatron_read(const ckpt_json *stored, ckpt_json *canon, int a_layer,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool centered;
    if (ckpt_field_applies(canon, "*") && ckpt_field_applies(canon, "+"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "ordinary attention beside MLA in one model");
    CKPT_CHECK(read_activation(stored, canon, err));
    CKPT_CHECK(ckpt_field_bool(stored, CENTERED, false, &centered, err));
    if (centered)
        CKPT_CHECK(ckpt_field_put(canon, "norm_zero_centered", ckpt_json_new_bool(true), err));
    if (ckpt_field_applies(canon, "K"))
        CKPT_CHECK(read_kda(stored, canon, err));
    if (ckpt_field_applies(canon, "M"))
        CKPT_CHECK(read_mamba(stored, canon, err));
    if (ckpt_field_applies(canon, "*"))
        CKPT_CHECK(read_attention(stored, canon, err));
    if (ckpt_field_applies(canon, "+*"))
        CKPT_CHECK(ckpt_megatron_rope_read(stored, canon, a_layer, err));
    if (ckpt_field_applies(canon, "+"))
        CKPT_CHECK(read_gate(stored, canon, err));
    if (ckpt_field_applies(canon, "E"))
        CKPT_CHECK(read_moe(stored, canon, err));
    status = ckpt_megatron_rules(stored, canon, err);
done:
    return status;
}

static ckpt_status write_moe(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t groups = ckpt_canon_int(w->canon, "router_groups");
    int64_t limit = ckpt_canon_int(w->canon, "router_group_topk");
    int64_t topk = ckpt_canon_int(w->canon, "experts_per_token");
    bool normalize = ckpt_canon_bool(w->canon, "router_normalize");
    const char *score = ckpt_json_string(ckpt_json_get(w->canon, "router_score"));
    bool softmax = score != NULL && strcmp(score, "softmax") == 0;
    if (ckpt_json_get(w->canon, "router_normalize") == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "router_normalize is not known");
    if (!softmax && normalize != normalizes(w->canon, false))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s cannot say router_normalize %s with sigmoid scores and "
                         "moe_router_topk %lld: it %s",
                         w->name, normalize ? "true" : "false", (long long)topk,
                         normalize ? "does not normalise one expert" : "always normalises");
    CKPT_CHECK(check_group_score(w, err));
    if (softmax && ckpt_field_changed(w, "router_score,router_normalize"))
        CKPT_CHECK(
            ckpt_field_put(w->out, "moe_router_pre_softmax", ckpt_json_new_bool(!normalize), err));
    if (ckpt_field_changed(w, "router_groups,router_group_topk")) {
        CKPT_CHECK(ckpt_field_put(w->out, "moe_router_num_groups",
                                  groups > 1 ? ckpt_json_new_int(groups) : ckpt_json_new_null(),
                                  err));
        CKPT_CHECK(ckpt_field_put(w->out, "moe_router_group_topk",
                                  groups > 1 ? ckpt_json_new_int(limit) : ckpt_json_new_null(),
                                  err));
    }
    if (ckpt_field_changed(w, "shared_gate"))
        CKPT_CHECK(ckpt_field_put(w->out, "moe_shared_expert_gate",
                                  ckpt_json_new_bool(ckpt_canon_bool(w->canon, "shared_gate")),
                                  err));
done:
    return status;
}

static ckpt_status write_gate(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    const ckpt_json *gate = ckpt_json_get(w->canon, "mla_gate");
    if (!ckpt_field_changed(w, "mla_gate"))
        return CKPT_OK;
    CKPT_CHECK(
        ckpt_field_put(w->out, "attention_output_gate", ckpt_json_new_bool(gate != NULL), err));
    if (gate != NULL)
        CKPT_CHECK(
            ckpt_field_put(w->out, "gated_attention_proj_granularity", ckpt_json_dup(gate), err));
done:
    return status;
}

/* ---- mesh and vocabulary --------------------------------------------------------------------- */

ckpt_status ckpt_megatron_settle(const ckpt_field_write *w, const char *arg, int64_t absent,
                                 int64_t want, ckpt_err *err)
{
    int64_t now = 0;
    if (w->foreign != NULL) {
        const ckpt_json *j = ckpt_json_get(w->out, arg);
        if (j == NULL || ckpt_json_is_null(j))
            now = absent;
        else if (!ckpt_json_int(j, &now))
            now = 0;
    }
    return now == want ? CKPT_OK : ckpt_field_put(w->out, arg, ckpt_json_new_int(want), err);
}

static ckpt_status write_mesh(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t stages = 0;
    if (w->foreign != NULL && !w->has_mesh)
        return CKPT_OK;
    (void)ckpt_json_int(ckpt_json_get(w->out, "pipeline_model_parallel_size"), &stages);
    CKPT_CHECK(ckpt_megatron_settle(w, "tensor_model_parallel_size", 1, w->mesh.tp, err));
    CKPT_CHECK(ckpt_megatron_settle(w, "pipeline_model_parallel_size", 1, w->mesh.pp, err));
    CKPT_CHECK(ckpt_megatron_settle(w, "context_parallel_size", 1, w->mesh.cp, err));
    CKPT_CHECK(ckpt_megatron_settle(w, "expert_model_parallel_size", 1, w->mesh.ep, err));
    CKPT_CHECK(
        ckpt_megatron_settle(w, "expert_tensor_parallel_size", w->mesh.tp, w->mesh.etp, err));
    static const char *const stale[] = {"virtual_pipeline_model_parallel_size",
                                        "num_layers_per_virtual_pipeline_stage"};
    for (size_t i = 0; i < 2 && stages != w->mesh.pp; i++)
        if (ckpt_json_get(w->out, stale[i]) != NULL)
            CKPT_CHECK(ckpt_field_put(w->out, stale[i], ckpt_json_new_null(), err));
done:
    return status;
}

/* padded_vocab_size = ceil(V / (m TP)) m TP. An earlier value that the new TP divides stays: some
 * runs pad otherwise, and resharding need not change the size of stored tensors. */
static ckpt_status write_vocab(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    int64_t v = ckpt_canon_int(w->canon, "vocab_size"), tp = w->mesh.tp, multiple = 0;
    int64_t padded, old_v, unit, count;
    if (w->foreign != NULL) {
        padded = ckpt_megatron_earlier(w, "padded_vocab_size");
        multiple = ckpt_megatron_earlier(w, "make_vocab_size_divisible_by");
        old_v = ckpt_megatron_earlier(w, "vocab_size");
        if (!w->has_mesh)
            tp = ckpt_megatron_earlier(w, "tensor_model_parallel_size");
        tp = tp == 0 ? 1 : tp;
        if (padded >= v && (old_v == 0 || old_v == v) && padded % tp == 0)
            return CKPT_OK;
    }
    if (multiple == 0)
        multiple = VOCAB_MULTIPLE;
    if (!ckpt_mul_i64(multiple, tp, &unit) || !ckpt_add_i64(v, unit - 1, &count) ||
        !ckpt_mul_i64(count / unit, unit, &padded))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "padded_vocab_size overflows");
    CKPT_CHECK(
        ckpt_megatron_settle(w, "make_vocab_size_divisible_by", VOCAB_MULTIPLE, multiple, err));
    status = ckpt_field_put(w->out, "padded_vocab_size", ckpt_json_new_int(padded), err);
done:
    return status;
}

/* Megatron wants attention sizes of every model, also where no layer uses them. */
static ckpt_status write_unused(const ckpt_field_write *w, ckpt_err *err)
{
    bool mla = ckpt_field_applies(w->canon, "+");
    int64_t heads = ckpt_canon_int(w->canon, mla ? "heads" : "kda_heads");
    int64_t width = ckpt_canon_int(w->canon, mla ? "v_head_dim" : "kda_value_dim");
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(w->canon, "*"))
        return CKPT_OK;
    if (ckpt_json_get(w->out, "num_attention_heads") == NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "num_attention_heads",
                                  ckpt_json_new_int(heads > 0 ? heads : 1), err));
    if (w->foreign == NULL && width > 0)
        CKPT_CHECK(ckpt_field_put(w->out, "kv_channels", ckpt_json_new_int(width), err));
done:
    return status;
}

ckpt_status ckpt_megatron_write(const ckpt_field_write *w, int a_layer, ckpt_err *err)
{
    ckpt_status status;
    if (ckpt_field_applies(w->canon, "*") && ckpt_field_applies(w->canon, "+"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s has no ordinary attention beside MLA",
                         w->name);
    CKPT_CHECK(write_activation(w, err));
    CKPT_CHECK(write_norms(w, err));
    CKPT_CHECK(ckpt_megatron_rope_write(w, a_layer, err));
    if (ckpt_field_applies(w->canon, "K") && ckpt_field_changed(w, "kda_heads"))
        CKPT_CHECK(ckpt_field_put(w->out, "linear_num_value_heads",
                                  ckpt_json_new_int(ckpt_canon_int(w->canon, "kda_heads")), err));
    if (ckpt_field_applies(w->canon, "*"))
        CKPT_CHECK(write_attention(w, err));
    if (ckpt_field_applies(w->canon, "+"))
        CKPT_CHECK(write_gate(w, err));
    if (ckpt_field_applies(w->canon, "E"))
        CKPT_CHECK(write_moe(w, err));
    CKPT_CHECK(write_vocab(w, err));
    CKPT_CHECK(write_unused(w, err));
    CKPT_CHECK(write_mesh(w, err));
done:
    return status;
}
