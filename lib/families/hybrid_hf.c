/* Kimi-Linear as Hugging Face stores it (model_type kimi_linear), transformers 5.x and the published
 * form with remote code. Names: conversion-maps.md section 5, hf-layouts-linear.md section 1.
 *
 * Transformers stores the dense MLP of the first layers under block_sparse_moe, the published
 * checkpoints under mlp; transformers loads both. A_log is [1,1,heads,1], some exporters drop the
 * unit axes. KDA ranks have no field of their own: both factors have the width
 * linear_attn_config.head_dim, so any other rank cannot be said. MLA never rotates, whatever
 * mla_use_nope says: the model code has no rotary path. */
#include "hf_common.h"

#include <string.h>

#define NAME "hf:kimi_linear"
#define LISTS "linear_attn_config"

/* clang-format off */
static const ckpt_row rows[] = {
    {"embed.weight",                              "model.embed_tokens.weight",                                       "V | H", NULL},
    {"head.weight",                               "lm_head.weight",                                                  "V | H", NULL},
    {"final_norm.weight",                         "model.norm.weight",                                               "H", NULL},

    {"blocks.{2l}.kda.norm.weight",               "model.layers.{l}.input_layernorm.weight",                         "H", NULL},
    {"blocks.{2l}.kda.q.weight",                  "model.layers.{l}.self_attn.q_proj.weight",                        "NK A | H", NULL},
    {"blocks.{2l}.kda.k.weight",                  "model.layers.{l}.self_attn.k_proj.weight",                        "NK A | H", NULL},
    {"blocks.{2l}.kda.v.weight",                  "model.layers.{l}.self_attn.v_proj.weight",                        "NK B | H", NULL},
    {"blocks.{2l}.kda.conv_q.weight",             "model.layers.{l}.self_attn.q_conv1d.weight",                      "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_k.weight",             "model.layers.{l}.self_attn.k_conv1d.weight",                      "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_v.weight",             "model.layers.{l}.self_attn.v_conv1d.weight",                      "NK B | 1 | W", NULL},
    {"blocks.{2l}.kda.f_a.weight",                "model.layers.{l}.self_attn.f_a_proj.weight",                      "RF | H", NULL},
    {"blocks.{2l}.kda.f_b.weight",                "model.layers.{l}.self_attn.f_b_proj.weight",                      "NK A | RF", NULL},
    {"blocks.{2l}.kda.g_a.weight",                "model.layers.{l}.self_attn.g_a_proj.weight",                      "RG | H", NULL},
    {"blocks.{2l}.kda.g_b.weight",                "model.layers.{l}.self_attn.g_b_proj.weight",                      "NK B | RG", NULL},
    {"blocks.{2l}.kda.beta.weight",               "model.layers.{l}.self_attn.b_proj.weight",                        "NK | H", NULL},
    {"blocks.{2l}.kda.A_log",                     "model.layers.{l}.self_attn.A_log",                                "1 | 1 | NK | 1", "a_log=4d"},
    {"blocks.{2l}.kda.A_log",                     "model.layers.{l}.self_attn.A_log",                                "NK", "a_log=1d"},
    {"blocks.{2l}.kda.dt_bias",                   "model.layers.{l}.self_attn.dt_bias",                              "NK A", NULL},
    {"blocks.{2l}.kda.o_norm.weight",             "model.layers.{l}.self_attn.o_norm.weight",                        "B", NULL},
    {"blocks.{2l}.kda.o.weight",                  "model.layers.{l}.self_attn.o_proj.weight",                        "H | NK B", NULL},

    {"blocks.{2l}.mla.norm.weight",               "model.layers.{l}.input_layernorm.weight",                         "H", NULL},
    {"blocks.{2l}.mla.q.weight",                  "model.layers.{l}.self_attn.q_proj.weight",                        "N DN+DR | H", NULL},
    {"blocks.{2l}.mla.q_a.weight",                "model.layers.{l}.self_attn.q_a_proj.weight",                      "RQ | H", NULL},
    {"blocks.{2l}.mla.q_a_norm.weight",           "model.layers.{l}.self_attn.q_a_layernorm.weight",                 "RQ", NULL},
    {"blocks.{2l}.mla.q_b.weight",                "model.layers.{l}.self_attn.q_b_proj.weight",                      "N DN+DR | RQ", NULL},
    {"blocks.{2l}.mla.kv_a.weight",               "model.layers.{l}.self_attn.kv_a_proj_with_mqa.weight",            "RK+DR | H", NULL},
    {"blocks.{2l}.mla.kv_a_norm.weight",          "model.layers.{l}.self_attn.kv_a_layernorm.weight",                "RK", NULL},
    {"blocks.{2l}.mla.kv_b.weight",               "model.layers.{l}.self_attn.kv_b_proj.weight",                     "N DN+DV | RK", NULL},
    {"blocks.{2l}.mla.o.weight",                  "model.layers.{l}.self_attn.o_proj.weight",                        "H | N DV", NULL},

    {"blocks.{2l+1}.mlp.norm.weight",             "model.layers.{l}.post_attention_layernorm.weight",                "H", NULL},
    {"blocks.{2l+1}.mlp.gate.weight",             "model.layers.{l}.mlp.gate_proj.weight",                           "F | H", "dense_mlp=mlp"},
    {"blocks.{2l+1}.mlp.up.weight",               "model.layers.{l}.mlp.up_proj.weight",                             "F | H", "dense_mlp=mlp"},
    {"blocks.{2l+1}.mlp.down.weight",             "model.layers.{l}.mlp.down_proj.weight",                           "H | F", "dense_mlp=mlp"},
    {"blocks.{2l+1}.mlp.gate.weight",             "model.layers.{l}.block_sparse_moe.gate_proj.weight",              "F | H", "dense_mlp=block_sparse_moe"},
    {"blocks.{2l+1}.mlp.up.weight",               "model.layers.{l}.block_sparse_moe.up_proj.weight",                "F | H", "dense_mlp=block_sparse_moe"},
    {"blocks.{2l+1}.mlp.down.weight",             "model.layers.{l}.block_sparse_moe.down_proj.weight",              "H | F", "dense_mlp=block_sparse_moe"},

    {"blocks.{2l+1}.moe.norm.weight",             "model.layers.{l}.post_attention_layernorm.weight",                "H", NULL},
    {"blocks.{2l+1}.moe.router.weight",           "model.layers.{l}.block_sparse_moe.gate.weight",                   "E | H", NULL},
    {"blocks.{2l+1}.moe.router.bias",             "model.layers.{l}.block_sparse_moe.gate.e_score_correction_bias",  "E", NULL},
    {"blocks.{2l+1}.moe.experts.{e}.gate.weight", "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight",         "FE | H", NULL},
    {"blocks.{2l+1}.moe.experts.{e}.up.weight",   "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight",         "FE | H", NULL},
    {"blocks.{2l+1}.moe.experts.{e}.down.weight", "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",         "H | FE", NULL},
    {"blocks.{2l+1}.moe.shared.gate.weight",      "model.layers.{l}.block_sparse_moe.shared_experts.gate_proj.weight", "FS | H", NULL},
    {"blocks.{2l+1}.moe.shared.up.weight",        "model.layers.{l}.block_sparse_moe.shared_experts.up_proj.weight", "FS | H", NULL},
    {"blocks.{2l+1}.moe.shared.down.weight",      "model.layers.{l}.block_sparse_moe.shared_experts.down_proj.weight", "H | FS", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] =
    "top: embed.weight final_norm.weight; "
    "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight conv_v.weight "
    "f_a.weight f_b.weight g_a.weight g_b.weight beta.weight A_log dt_bias o_norm.weight o.weight; "
    "mla: norm.weight q.weight/q_a.weight+q_a_norm.weight+q_b.weight kv_a.weight kv_a_norm.weight "
    "kv_b.weight o.weight; "
    "mlp: norm.weight gate.weight up.weight down.weight; "
    "moe: norm.weight router.weight router.bias experts.{e}.gate.weight experts.{e}.up.weight "
    "experts.{e}.down.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",       "hidden_size",                                               CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                                                CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "rms_norm_eps",                                              CKPT_FIELD_REAL,   "1e-05",       NULL, 0},
    {"activation",        NULL,                                                        CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
    {"tied",              "tie_word_embeddings",                                       CKPT_FIELD_BOOL,   "false",       NULL, 0},
    {"init_std",          "initializer_range",                                         CKPT_FIELD_REAL,   "0.02",        NULL, 0},

    {"kda_heads",         "linear_attn_config.num_heads|linear_num_heads",             CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_key_dim",       "linear_attn_config.head_dim|linear_head_dim",               CKPT_FIELD_SIZE,   NULL,          "K",  0},
    {"kda_value_dim",     "linear_attn_config.head_dim|linear_head_dim",               CKPT_FIELD_SIZE,   NULL,          "K",  CKPT_FIELD_READ},
    {"kda_f_rank",        "linear_attn_config.head_dim|linear_head_dim",               CKPT_FIELD_SIZE,   NULL,          "K",  CKPT_FIELD_READ | CKPT_FIELD_NULLABLE},
    {"kda_gate_rank",     "linear_attn_config.head_dim|linear_head_dim",               CKPT_FIELD_SIZE,   NULL,          "K",  CKPT_FIELD_READ | CKPT_FIELD_NULLABLE},
    {"kda_conv",          "linear_attn_config.short_conv_kernel_size|linear_conv_kernel_dim", CKPT_FIELD_SIZE, NULL,     "K",  0},
    {"kda_safe_gate",     NULL,                                                        CKPT_FIELD_BOOL,   "false",       "K",  0},

    {"heads",             "num_attention_heads",                                       CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"q_lora_rank",       "q_lora_rank",                                               CKPT_FIELD_SIZE,   NULL,          "+",  CKPT_FIELD_NULLABLE},
    {"kv_lora_rank",      "kv_lora_rank",                                              CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_nope_dim",       "qk_nope_head_dim",                                          CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"qk_rope_dim",       "qk_rope_head_dim",                                          CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"v_head_dim",        "v_head_dim",                                                CKPT_FIELD_SIZE,   NULL,          "+",  0},
    {"mla_nope",          NULL,                                                        CKPT_FIELD_BOOL,   "true",        "+",  0},
    {"latent_norm",       NULL,                                                        CKPT_FIELD_BOOL,   "true",        "+",  0},

    {"ffn_size",          "intermediate_size",                                         CKPT_FIELD_SIZE,   NULL,          "-",  0},

    {"experts",           "num_experts|num_local_experts",                             CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"expert_ffn_size",   "moe_intermediate_size",                                     CKPT_FIELD_SIZE,   NULL,          "E",  0},
    {"experts_per_token", "num_experts_per_token|num_experts_per_tok",                 CKPT_FIELD_SIZE,   "8",           "E",  0},
    {"router_score",      "moe_router_activation_func",                                CKPT_FIELD_STRING, "\"sigmoid\"", "E",  0},
    {"router_bias",       NULL,                                                        CKPT_FIELD_BOOL,   "true",        "E",  0},
    {"router_scale",      "routed_scaling_factor",                                     CKPT_FIELD_REAL,   "2.446",       "E",  0},
    {"router_normalize",  "moe_renormalize|norm_topk_prob",                            CKPT_FIELD_BOOL,   "true",        "E",  0},
};

static const ckpt_constant constants[] = {
    {"model_type",                 "[\"kimi_linear\"]",       NULL, true,  "another model"},
    {"hidden_act",                 "[\"silu\", \"swish\"]",   NULL, true,  "no other activation is known"},
    {"attention_bias",             "[false]",                 "+",  true,  "MLA has no bias tensors"},
    {"mla_use_nope",               "[true, false]",           "+",  true,  "a boolean"},
    {"moe_router_activation_func", "[\"sigmoid\"]",           "E",  false, "softmax would ignore the correction bias"},
    {"num_nextn_predict_layers",   "[0]",                     NULL, false, "multi-token prediction has no block here"},
    {"moe_layer_freq",             "[1]",                     "E",  true,  "sources disagree on other values"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    const char *type = ckpt_json_string(ckpt_json_get(config, "model_type"));
    if (type != NULL)
        return strcmp(type, "kimi_linear") == 0 ? 1 : -1;
    const ckpt_json *list = ckpt_json_get(config, "architectures");
    if (ckpt_json_child(list) == NULL)
        return 0;
    for (const ckpt_json *a = ckpt_json_child(list); a != NULL; a = ckpt_json_next(a)) {
        const char *name = ckpt_json_string(a);
        if (name != NULL && strncmp(name, "KimiLinear", 10) == 0)
            return 1;
    }
    return -1;
}

/* ---- pattern --------------------------------------------------------------------------------- */

/* Enter a 1-based layer list into mixers[layers], '\0' where no list has spoken yet. */
static ckpt_status read_list(const ckpt_json *stored, const char *path, char letter, char *mixers,
                             int64_t layers, bool *seen, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_path(stored, path);
    if (list == NULL || ckpt_json_is_null(list))
        return CKPT_OK;
    if (!ckpt_json_is_array(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': expected a list of 1-based layers", path);
    *seen = true;
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        int64_t layer = 0;
        if (!ckpt_json_int(c, &layer) || layer < 1 || layer > layers) {
            char text[64];
            ckpt_field_text(c, text, sizeof text);
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "field '%s': found layer %s, expected 1 to %lld (layers count from 1)",
                             path, text, (long long)layers);
        }
        char *m = &mixers[layer - 1];
        if (*m != '\0')
            return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': layer %lld is listed %s", path,
                             (long long)layer,
                             *m == letter ? "twice" : "in kda_layers and in full_attn_layers");
        *m = letter;
    }
    return CKPT_OK;
}

static const ckpt_hf_types mixer_types = {
    "layer_types", {"linear_attention", "full_attention"},
     {'K',                '+'             }
};
static const ckpt_hf_types mlp_types = {
    "mlp_layer_types", {"dense", "sparse"},
     {'-',     'E'     }
};

static ckpt_status read_mixers(const ckpt_json *stored, char *mixers, int64_t layers, ckpt_err *err)
{
    ckpt_status status;
    bool lists = false, types = false;
    CKPT_CHECK(read_list(stored, LISTS ".kda_layers", 'K', mixers, layers, &lists, err));
    CKPT_CHECK(read_list(stored, LISTS ".full_attn_layers", '+', mixers, layers, &lists, err));
    for (int64_t i = 0; lists && i < layers; i++)
        if (mixers[i] == '\0')
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "field '" LISTS "': layer %lld is in neither kda_layers nor "
                             "full_attn_layers",
                             (long long)i + 1);
    CKPT_CHECK(ckpt_hf_types_read(stored, &mixer_types, mixers, layers, &types, err));
    if (!lists && !types)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '" LISTS ".kda_layers' is missing");
done:
    return status;
}

static ckpt_status read_mlps(const ckpt_json *stored, char *mlps, int64_t layers, ckpt_err *err)
{
    ckpt_status status;
    int64_t dense = 1, experts = 0;
    bool types = false;
    const ckpt_json *first = ckpt_json_get(stored, "first_k_dense_replace");
    CKPT_CHECK(ckpt_field_size(stored, "num_experts|num_local_experts", false, &experts, err));
    if (first != NULL && !ckpt_json_is_null(first))
        CKPT_CHECK(ckpt_field_size(stored, "first_k_dense_replace", true, &dense, err));
    else
        first = NULL;
    /* The published configuration class: no experts, no MoE. */
    for (int64_t i = 0; experts == 0 && i < layers; i++)
        mlps[i] = '-';
    for (int64_t i = 0; experts != 0 && first != NULL && i < layers; i++)
        mlps[i] = i < dense ? '-' : 'E';
    CKPT_CHECK(ckpt_hf_types_read(stored, &mlp_types, mlps, layers, &types, err));
    for (int64_t i = 0; i < layers; i++)
        if (mlps[i] == '\0')
            mlps[i] = i < dense ? '-' : 'E';
done:
    return status;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_status status;
    int64_t layers = 0;
    CKPT_CHECK(ckpt_field_size(stored, "num_hidden_layers", false, &layers, err));
    if (layers == 0 || layers > CKPT_HYBRID_MAX_LAYERS)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'num_hidden_layers': found %lld, expected 1 to %d",
                         (long long)layers, CKPT_HYBRID_MAX_LAYERS);
    char *mixers = ckpt_arena_array(&arena, (size_t)layers, 1);
    char *mlps = ckpt_arena_array(&arena, (size_t)layers, 1);
    char *pattern = ckpt_arena_array(&arena, (size_t)layers + 1, 2);
    if (mixers == NULL || mlps == NULL || pattern == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer list");
        goto done;
    }
    CKPT_CHECK(read_mixers(stored, mixers, layers, err));
    CKPT_CHECK(read_mlps(stored, mlps, layers, err));
    for (int64_t i = 0; i < layers; i++) {
        pattern[2 * i] = mixers[i];
        pattern[2 * i + 1] = mlps[i];
    }
    status = ckpt_field_put(canon, "pattern", ckpt_json_new_string(pattern), err);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_json *layer_list(const char *pattern, int64_t layers, char letter)
{
    ckpt_json *list = ckpt_json_new_array();
    for (int64_t i = 0; list != NULL && i < layers; i++)
        if (pattern[2 * i] == letter && !ckpt_json_push(list, ckpt_json_new_int(i + 1))) {
            ckpt_json_free(list);
            list = NULL;
        }
    return list;
}

static ckpt_status write_pattern(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    int64_t layers;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    CKPT_CHECK(ckpt_hybrid_layers(NAME, pattern, "K+", "-E", &layers, err));
    if (!ckpt_field_changed(w, "pattern"))
        return CKPT_OK;
    CKPT_CHECK(ckpt_hf_dense_first_write(w, err));
    CKPT_CHECK(ckpt_field_put(w->out, "num_hidden_layers", ckpt_json_new_int(layers), err));
    CKPT_CHECK(ckpt_field_put(w->out, LISTS ".kda_layers", layer_list(pattern, layers, 'K'), err));
    CKPT_CHECK(
        ckpt_field_put(w->out, LISTS ".full_attn_layers", layer_list(pattern, layers, '+'), err));
    CKPT_CHECK(ckpt_hf_types_write(w, &mixer_types, 0, layers, err));
    CKPT_CHECK(ckpt_hf_types_write(w, &mlp_types, 1, layers, err));
done:
    return status;
}

/* ---- derived fields -------------------------------------------------------------------------- */

#define SHARED "num_shared_experts|n_shared_experts"

static ckpt_status read_groups(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t groups, limit;
    bool grouped;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "num_expert_group|n_group", false, &groups, err));
    CKPT_CHECK(ckpt_field_size(stored, "topk_group", false, &limit, err));
    CKPT_CHECK(ckpt_field_bool(stored, "use_grouped_topk", true, &grouped, err));
    if (limit == 0)
        limit = 1;
    if (limit > (groups == 0 ? 1 : groups))
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'topk_group': found %lld of %lld groups",
                         (long long)limit, (long long)groups);
    if (groups <= 1)
        return CKPT_OK;
    if (!grouped)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'use_grouped_topk': found false with %lld groups, on which "
                         "implementations disagree",
                         (long long)groups);
    CKPT_CHECK(ckpt_field_put(canon, "router_groups", ckpt_json_new_int(groups), err));
    CKPT_CHECK(ckpt_field_put(canon, "router_group_topk", ckpt_json_new_int(limit), err));
done:
    return status;
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(canon, "+"))
        CKPT_CHECK(ckpt_hf_mla_read(stored, canon, err));
    if (ckpt_field_applies(canon, "E")) {
        CKPT_CHECK(ckpt_hf_shared_read(stored, SHARED, 0, canon, err));
        CKPT_CHECK(read_groups(stored, canon, err));
    }
done:
    return status;
}

static ckpt_status write_moe(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t groups = ckpt_canon_int(w->canon, "router_groups");
    int64_t limit = ckpt_canon_int(w->canon, "router_group_topk");
    CKPT_CHECK(ckpt_hf_shared_write(w, NAME, SHARED, err));
    CKPT_CHECK(ckpt_hf_group_best_write(w, "topk_group", err));
    if (ckpt_field_changed(w, "router_groups,router_group_topk")) {
        CKPT_CHECK(ckpt_field_put(w->out, "num_expert_group",
                                  ckpt_json_new_int(groups > 1 ? groups : 1), err));
        CKPT_CHECK(
            ckpt_field_put(w->out, "topk_group", ckpt_json_new_int(limit > 1 ? limit : 1), err));
        CKPT_CHECK(ckpt_field_put(w->out, "use_grouped_topk", ckpt_json_new_bool(true), err));
    }
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(write_pattern(w, err));
    if (ckpt_json_get(w->canon, "mla_gate") != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, NAME " has no MLA output gate (mla_gate)");
    if (ckpt_field_applies(w->canon, "+"))
        CKPT_CHECK(ckpt_hf_mla_write(w, err));
    if (ckpt_field_applies(w->canon, "E"))
        CKPT_CHECK(write_moe(w, err));
    CKPT_CHECK(ckpt_hf_finish_write(w, "KimiLinearForCausalLM", err));
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

const ckpt_layout ckpt_layout_hf_kimi_linear = {
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
    .default_tags = "dense_mlp=mlp,a_log=4d",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
