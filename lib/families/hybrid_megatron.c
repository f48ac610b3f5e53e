/* Megatron-Core hybrid models: keys, shapes and cuts of megatron-dist-ckpt.md sections 3 and 4,
 * arguments of its section 6 and of conversion-maps.md section 8.
 *
 * A pattern letter is one layer; '|' only marks pipeline stages. KDA is fused (decay and output gate
 * inside in_proj) when neither gate is low rank, else split: tag kda. TE models fuse norms into the
 * linear that follows, local ones keep modules: tags latent_norms (MLA) and mlp_norms. shards=single is how checkpoints written
 * with singleton_local_shards name the parts of gated layers and experts.
 *
 * NoPE: mla_nope is no_rope_freq with a 1 for every layer, which pull 6877 honours in MLA (ordinary
 * Megatron MLA ignores it and would rotate), together with position_embedding_type "none", which
 * keeps the decoder from building rotary tables. Only no_rope_freq is read back. A list that skips
 * some MLA layers and not others has no canonical form and is refused. */
#include "hybrid.h"

#include <string.h>

#include "checked.h"

#define NAME "megatron:hybrid"
#define PATTERNS "hybrid_layer_pattern|hybrid_override_pattern"
#define VOCAB_MULTIPLE 128 /* make_vocab_size_divisible_by where nothing else is said */

/* clang-format off */
static const ckpt_row rows[] = {
    {"embed.weight",                           "embedding.word_embeddings.weight",                                   "V<VP@tp | H", NULL},
    {"head.weight",                            "output_layer.weight",                                                "V<VP@tp | H", NULL},
    {"final_norm.weight",                      "decoder.final_norm.weight",                                          "H", NULL},

    {"blocks.{l}.kda.norm.weight",             "decoder.layers.{l}.input_layernorm.weight",                          "H", NULL},
    {"blocks.{l}.kda.q.weight",                "decoder.layers.{l}.self_attention.in_proj.weight.query",             "NK@head A | H", NULL},
    {"blocks.{l}.kda.k.weight",                "decoder.layers.{l}.self_attention.in_proj.weight.key",               "NK@head A | H", NULL},
    {"blocks.{l}.kda.v.weight",                "decoder.layers.{l}.self_attention.in_proj.weight.value",             "NK@head B | H", NULL},
    {"blocks.{l}.kda.f.weight",                "decoder.layers.{l}.self_attention.in_proj.weight.g",                 "NK@head A | H", "kda=fused"},
    {"blocks.{l}.kda.f.weight",                "decoder.layers.{l}.self_attention.f_proj.weight",                    "NK@head A | H", "kda=split"},
    {"blocks.{l}.kda.f_a.weight",              "decoder.layers.{l}.self_attention.f_a_proj.weight",                  "RF | H", "kda=split"},
    {"blocks.{l}.kda.f_b.weight",              "decoder.layers.{l}.self_attention.f_b_proj.weight",                  "NK@head A | RF", "kda=split"},
    {"blocks.{l}.kda.g.weight",                "decoder.layers.{l}.self_attention.in_proj.weight.gate",              "NK@head B | H", "kda=fused"},
    {"blocks.{l}.kda.g.weight",                "decoder.layers.{l}.self_attention.g_proj.weight",                    "NK@head B | H", "kda=split"},
    {"blocks.{l}.kda.g_a.weight",              "decoder.layers.{l}.self_attention.g_a_proj.weight",                  "RG | H", "kda=split"},
    {"blocks.{l}.kda.g_b.weight",              "decoder.layers.{l}.self_attention.g_b_proj.weight",                  "NK@head B | RG", "kda=split"},
    {"blocks.{l}.kda.beta.weight",             "decoder.layers.{l}.self_attention.beta_proj.weight",                 "NK@head | H", NULL},
    {"blocks.{l}.kda.conv_q.weight",           "decoder.layers.{l}.self_attention.conv1d.weight.query",              "NK@head A | 1 | W", NULL},
    {"blocks.{l}.kda.conv_k.weight",           "decoder.layers.{l}.self_attention.conv1d.weight.key",                "NK@head A | 1 | W", NULL},
    {"blocks.{l}.kda.conv_v.weight",           "decoder.layers.{l}.self_attention.conv1d.weight.value",              "NK@head B | 1 | W", NULL},
    {"blocks.{l}.kda.A_log",                   "decoder.layers.{l}.self_attention.A_log",                            "NK@head", NULL},
    {"blocks.{l}.kda.dt_bias",                 "decoder.layers.{l}.self_attention.dt_bias",                          "NK@head A", NULL},
    {"blocks.{l}.kda.o_norm.weight",           "decoder.layers.{l}.self_attention.out_norm.weight",                  "B", NULL},
    {"blocks.{l}.kda.o.weight",                "decoder.layers.{l}.self_attention.out_proj.weight",                  "H | NK@head B", NULL},

    {"blocks.{l}.mla.norm.weight",             "decoder.layers.{l}.input_layernorm.weight",                          "H", NULL},
    {"blocks.{l}.mla.q.weight",                "decoder.layers.{l}.self_attention.linear_q_proj.weight",             "N@head DN+DR | H", NULL},
    {"blocks.{l}.mla.q_a.weight",              "decoder.layers.{l}.self_attention.linear_q_down_proj.weight",        "RQ | H", NULL},
    {"blocks.{l}.mla.q_a_norm.weight",         "decoder.layers.{l}.self_attention.linear_q_up_proj.layer_norm_weight", "RQ", "latent_norms=fused"},
    {"blocks.{l}.mla.q_a_norm.weight",         "decoder.layers.{l}.self_attention.q_layernorm.weight",               "RQ", "latent_norms=separate"},
    {"blocks.{l}.mla.q_b.weight",              "decoder.layers.{l}.self_attention.linear_q_up_proj.weight",          "N@head DN+DR | RQ", NULL},
    {"blocks.{l}.mla.kv_a.weight",             "decoder.layers.{l}.self_attention.linear_kv_down_proj.weight",       "RK+DR | H", NULL},
    {"blocks.{l}.mla.kv_a_norm.weight",        "decoder.layers.{l}.self_attention.linear_kv_up_proj.layer_norm_weight", "RK", "latent_norms=fused"},
    {"blocks.{l}.mla.kv_a_norm.weight",        "decoder.layers.{l}.self_attention.kv_layernorm.weight",              "RK", "latent_norms=separate"},
    {"blocks.{l}.mla.kv_b.weight",             "decoder.layers.{l}.self_attention.linear_kv_up_proj.weight",         "N@head DN+DV | RK", NULL},
    {"blocks.{l}.mla.gate.weight",             "decoder.layers.{l}.self_attention.linear_gate.weight",               "GM@head | H", NULL},
    {"blocks.{l}.mla.o.weight",                "decoder.layers.{l}.self_attention.linear_proj.weight",               "H | N@head DV", NULL},

    {"blocks.{l}.mlp.norm.weight",             "decoder.layers.{l}.mlp.linear_fc1.layer_norm_weight",                "H", "mlp_norms=fused"},
    {"blocks.{l}.mlp.norm.weight",             "decoder.layers.{l}.pre_mlp_layernorm.weight",                        "H", "mlp_norms=separate"},
    {"blocks.{l}.mlp.gate.weight",             "decoder.layers.{l}.mlp.linear_fc1.weight",                           "2=0@unit F@tp | H", "shards=joint"},
    {"blocks.{l}.mlp.up.weight",               "decoder.layers.{l}.mlp.linear_fc1.weight",                           "2=1@unit F@tp | H", "shards=joint"},
    {"blocks.{l}.mlp.gate.weight",             "decoder.layers.{l}.mlp.linear_fc1.weight_w",                         "F@tp | H", "shards=single"},
    {"blocks.{l}.mlp.up.weight",               "decoder.layers.{l}.mlp.linear_fc1.weight_v",                         "F@tp | H", "shards=single"},
    {"blocks.{l}.mlp.down.weight",             "decoder.layers.{l}.mlp.linear_fc2.weight",                           "H | F@tp", NULL},

    {"blocks.{l}.moe.norm.weight",             "decoder.layers.{l}.pre_mlp_layernorm.weight",                        "H", NULL},
    {"blocks.{l}.moe.router.weight",           "decoder.layers.{l}.mlp.router.weight",                               "E | H", NULL},
    {"blocks.{l}.moe.router.bias",             "decoder.layers.{l}.mlp.router.expert_bias",                          "E", NULL},
    {"blocks.{l}.moe.experts.{e}.gate.weight", "decoder.layers.{l}.mlp.experts.experts.linear_fc1.weight",           "E=e@ep | 2=0@unit FE@etp | H", "shards=joint"},
    {"blocks.{l}.moe.experts.{e}.up.weight",   "decoder.layers.{l}.mlp.experts.experts.linear_fc1.weight",           "E=e@ep | 2=1@unit FE@etp | H", "shards=joint"},
    {"blocks.{l}.moe.experts.{e}.down.weight", "decoder.layers.{l}.mlp.experts.experts.linear_fc2.weight",           "E=e@ep | H | FE@etp", "shards=joint"},
    {"blocks.{l}.moe.experts.{e}.gate.weight", "decoder.layers.{l}.mlp.experts.experts.{e}.linear_fc1.weight_w",     "FE@etp | H", "shards=single"},
    {"blocks.{l}.moe.experts.{e}.up.weight",   "decoder.layers.{l}.mlp.experts.experts.{e}.linear_fc1.weight_v",     "FE@etp | H", "shards=single"},
    {"blocks.{l}.moe.experts.{e}.down.weight", "decoder.layers.{l}.mlp.experts.experts.{e}.linear_fc2.weight",       "H | FE@etp", "shards=single"},
    {"blocks.{l}.moe.shared.gate.weight",      "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight",            "2=0@unit FS@tp | H", "shards=joint"},
    {"blocks.{l}.moe.shared.up.weight",        "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight",            "2=1@unit FS@tp | H", "shards=joint"},
    {"blocks.{l}.moe.shared.gate.weight",      "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight_w",          "FS@tp | H", "shards=single"},
    {"blocks.{l}.moe.shared.up.weight",        "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight_v",          "FS@tp | H", "shards=single"},
    {"blocks.{l}.moe.shared.down.weight",      "decoder.layers.{l}.mlp.shared_experts.linear_fc2.weight",            "H | FS@tp", NULL},
    {"blocks.{l}.moe.shared_gate.weight",      "decoder.layers.{l}.mlp.shared_experts.gate_weight",                  "1 | H", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*._extra_state", "*.rotary_pos_emb.inv_freq", NULL};

static const char required[] =
    "top: embed.weight final_norm.weight; "
    "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight conv_v.weight "
    "f.weight/f_a.weight+f_b.weight g.weight/g_a.weight+g_b.weight beta.weight A_log dt_bias "
    "o_norm.weight o.weight; "
    "mla: norm.weight q.weight/q_a.weight+q_b.weight kv_a.weight kv_b.weight o.weight; "
    "mlp: norm.weight gate.weight up.weight down.weight; "
    "moe: norm.weight router.weight experts.{e}.gate.weight experts.{e}.up.weight "
    "experts.{e}.down.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",       "hidden_size",                          CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"vocab_size",        "vocab_size",                           CKPT_FIELD_SIZE,   NULL,          NULL, 0},
    {"norm_eps",          "norm_epsilon|layernorm_epsilon",       CKPT_FIELD_REAL,   "1e-05",       NULL, 0},
    {"activation",        NULL,                                   CKPT_FIELD_STRING, "\"silu\"",    NULL, 0},
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

    {"heads",             "num_attention_heads",                  CKPT_FIELD_SIZE,   NULL,          "+",  0},
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

static const ckpt_constant constants[] = {
    {"multi_latent_attention",       "[true]",                      "+",  true,  "the pattern has MLA layers"},
    {"normalization",                "[\"RMSNorm\"]",               NULL, true,  "no other norm is known"},
    {"swiglu",                       "[true]",                      "-E", true,  "no other activation is known"},
    {"add_bias_linear",              "[false]",                     NULL, true,  "linear biases have no slot"},
    {"add_qkv_bias",                 "[false]",                     "+",  false, "MLA has no bias tensors"},
    {"squared_relu",                 "[false]",                     "-E", false, "no other activation is known"},
    {"apply_layernorm_1p|layernorm_zero_centered_gamma", "[false]", NULL, false, "norm weights would be stored minus one"},
    {"activation_func_clamp_value",  "[]",                          "-E", false, "implementations disagree on clamping"},
    {"glu_linear_offset",            "[0]",                         "-E", false, "plain SwiGLU only"},
    {"mtp_num_layers",               "[0]",                         NULL, false, "multi-token prediction has no block here"},
    {"moe_latent_size",              "[0]",                         "E",  false, "latent MoE has no block here"},
    {"moe_router_score_function",    "[\"sigmoid\", \"softmax\"]",  "E",  false, "no other score is known"},
    {"moe_grouped_gemm",             "[true, false]",               "E",  true,  "a boolean"},
    {"experimental_attention_variant", "[\"kda\"]",                 "K",  false, "the pattern has KDA layers"},
    {"position_embedding_type",      "[\"rope\", \"none\"]",        NULL, false, "no other position embedding is known"},
    {"rotary_percent",               "[1]",                         "+",  false, "MLA rotates all of its rotary dimensions"},
    {"use_rope_scaling",             "[false]",                     "+",  false, "llama3 frequencies on MLA"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    const ckpt_json *pattern = NULL;
    if (!ckpt_json_is_object(config) || ckpt_json_child(config) == NULL)
        return 0;
    if (ckpt_field_find(config, PATTERNS, &pattern, NULL) != CKPT_OK || pattern != NULL)
        return 1;
    return ckpt_json_get(config, "num_layers") != NULL ? -1 : 0;
}

/* ---- pattern --------------------------------------------------------------------------------- */

static ckpt_status check_letter(char letter, size_t block, ckpt_err *err)
{
    if (strchr("K+-E", letter) != NULL)
        return CKPT_OK;
    if (letter == '/')
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'hybrid_layer_pattern': '/' starts multi-token prediction, which "
                         "has no block here");
    if (strchr("MG*DCHW", letter) != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'hybrid_layer_pattern': layer %zu is '%c', supported are K + - E",
                         block, letter);
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "field 'hybrid_layer_pattern': layer %zu is '%c', expected one of K + - E",
                     block, letter);
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_buf buf = {0};
    const ckpt_json *j;
    ckpt_status status;
    int64_t layers;
    CKPT_CHECK(ckpt_field_find(stored, PATTERNS, &j, err));
    const char *pattern = ckpt_json_string(j);
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern' is %s",
                         j == NULL ? "missing" : "not a string");
    for (const char *p = pattern; *p != '\0'; p++) {
        if (*p == '|')
            continue;
        CKPT_CHECK(check_letter(*p, buf.len, err));
        if (buf.len >= 2 * CKPT_HYBRID_MAX_LAYERS) {
            status =
                ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern': more than %d layers",
                          2 * CKPT_HYBRID_MAX_LAYERS);
            goto done;
        }
        ckpt_buf_putc(&buf, *p);
    }
    CKPT_CHECK(ckpt_field_size(stored, "num_layers", false, &layers, err));
    if (buf.len == 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern' is empty");
    else if (layers != 0 && (uint64_t)layers != buf.len)
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "field 'num_layers': found %lld, but 'hybrid_layer_pattern' has %zu "
                           "layers",
                           (long long)layers, buf.len);
    else if (buf.failed)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer pattern");
    else
        status =
            ckpt_field_put(canon, "pattern", ckpt_json_new_string((const char *)buf.data), err);
done:
    ckpt_buf_release(&buf);
    return status;
}

/* A size of the earlier arguments; 0 when missing or nonsense, which is then written anew. */
static int64_t earlier_size(const ckpt_field_write *w, const char *path)
{
    int64_t v = 0;
    return ckpt_field_size(w->foreign, path, false, &v, NULL) == CKPT_OK ? v : 0;
}

/* Stage cuts in the old text only fit the old number of stages. */
static ckpt_status write_pattern(const ckpt_field_write *w, ckpt_err *err)
{
    static const char *const spellings[] = {"hybrid_layer_pattern", "hybrid_override_pattern"};
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    int64_t stages = 1;
    const ckpt_json *old;
    ckpt_status status;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    for (size_t i = 0; pattern[i] != '\0'; i++)
        CKPT_CHECK(check_letter(pattern[i], i, err));
    if (w->foreign != NULL)
        stages = earlier_size(w, "pipeline_model_parallel_size");
    const char *text =
        ckpt_field_find(w->out, PATTERNS, &old, NULL) == CKPT_OK ? ckpt_json_string(old) : NULL;
    bool recut = w->has_mesh && (stages == 0 ? 1 : stages) != w->mesh.pp && text != NULL &&
                 strchr(text, '|') != NULL;
    if (!ckpt_field_changed(w, "pattern") && !recut)
        return CKPT_OK;
    bool only_old = ckpt_json_is_string(ckpt_json_get(w->out, spellings[1])) &&
                    !ckpt_json_is_string(ckpt_json_get(w->out, spellings[0]));
    for (int i = 0; i < 2; i++)
        if (i == only_old || ckpt_json_is_string(ckpt_json_get(w->out, spellings[i])))
            CKPT_CHECK(ckpt_field_put(w->out, spellings[i], ckpt_json_new_string(pattern), err));
    status = ckpt_field_put(w->out, "num_layers", ckpt_json_new_int((int64_t)strlen(pattern)), err);
done:
    return status;
}

/* ---- position embedding ---------------------------------------------------------------------- */

/* Does no_rope_freq leave 0-based layer i unrotated? An integer N means every N-th layer, a list one
 * entry a layer. */
static ckpt_status unrotated(const ckpt_json *freq, const ckpt_json *entry, int64_t i, bool *out,
                             ckpt_err *err)
{
    int64_t n = 0;
    bool b = false;
    *out = false;
    if (freq == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_array(freq)) {
        *out = ckpt_json_int(freq, &n) && n > 0 && (i + 1) % n == 0;
        return CKPT_OK;
    }
    if (ckpt_json_bool(entry, &b)) {
        *out = b;
        return CKPT_OK;
    }
    if (!ckpt_json_int(entry, &n) || n < 0 || n > 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'no_rope_freq': entry %lld is neither 0 nor 1",
                         (long long)i);
    *out = n == 1;
    return CKPT_OK;
}

static ckpt_status read_nope(const ckpt_json *stored, ckpt_json *canon, bool *nope, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    int64_t layers = (int64_t)strlen(pattern), n = 0, first = -1;
    const ckpt_json *freq;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, "no_rope_freq", &freq, err));
    if (ckpt_json_is_array(freq) && ckpt_json_child(freq) == NULL)
        freq = NULL; /* as Megatron, which tests for an empty value */
    if (freq != NULL && ckpt_json_is_array(freq) && ckpt_json_size(freq) != layers)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'no_rope_freq': %d entries for %lld layers",
                         ckpt_json_size(freq), (long long)layers);
    if (freq != NULL && !ckpt_json_is_array(freq) &&
        (!ckpt_json_int(freq, &n) || n < 0 || (n > 0 && layers % n != 0)))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'no_rope_freq': expected a list or a divisor of %lld layers",
                         (long long)layers);
    const ckpt_json *entry = ckpt_json_child(freq);
    *nope = false;
    for (int64_t i = 0; i < layers; i++, entry = ckpt_json_next(entry)) {
        bool skip;
        CKPT_CHECK(unrotated(freq, entry, i, &skip, err));
        if (pattern[i] != '+')
            continue;
        if (first >= 0 && skip != *nope)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "field 'no_rope_freq': MLA layers %lld and %lld differ",
                             (long long)first, (long long)i);
        *nope = skip;
        first = i;
    }
    status = ckpt_field_put(canon, "mla_nope", ckpt_json_new_bool(*nope), err);
done:
    return status;
}

/* YaRN parameters: canonical name inside rope_scaling, argument, Megatron's default. */
static const struct {
    const char *key, *arg;
    double absent;
} yarn[] = {
    {"factor",                           "rotary_scaling_factor",            1   },
    {"original_max_position_embeddings", "original_max_position_embeddings", 4096},
    {"beta_fast",                        "beta_fast",                        32  },
    {"beta_slow",                        "beta_slow",                        1   },
    {"mscale",                           "mscale",                           1   },
    {"mscale_all_dim",                   "mscale_all_dim",                   0   },
};
#define N_YARN (sizeof yarn / sizeof yarn[0])

static ckpt_status read_number(const ckpt_json *stored, const char *path, double absent,
                               double *out, ckpt_err *err)
{
    const ckpt_json *j;
    ckpt_status status = ckpt_field_find(stored, path, &j, err);
    *out = absent;
    if (status == CKPT_OK && j != NULL && !ckpt_json_double(j, out))
        status = ckpt_fail(err, CKPT_E_FORMAT, "field '%s': expected a number", path);
    return status;
}

static ckpt_status read_rope(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    bool nope = false, scaled;
    double theta, factor, v;
    CKPT_CHECK(read_nope(stored, canon, &nope, err));
    if (nope)
        return CKPT_OK;
    const ckpt_json *j = ckpt_json_get(stored, "rope_type");
    const char *type = j == NULL || ckpt_json_is_null(j) ? "yarn" : ckpt_json_string(j);
    if (type == NULL || (strcmp(type, "rope") != 0 && strcmp(type, "yarn") != 0))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'rope_type': found %s, supported are rope "
                         "and yarn",
                         type != NULL ? type : "no string");
    CKPT_CHECK(read_number(stored, "rotary_base", 10000, &theta, err));
    CKPT_CHECK(read_number(stored, "rotary_scaling_factor", 1, &factor, err));
    /* With factor 1 YaRN is plain rotation: same frequencies, attention scale 1. */
    scaled = strcmp(type, "yarn") == 0 && factor != 1;
    CKPT_CHECK(ckpt_field_put(canon, "rope_theta", ckpt_field_number(theta), err));
    CKPT_CHECK(
        ckpt_field_put(canon, "rope_type", ckpt_json_new_string(scaled ? "yarn" : "rope"), err));
    if (!scaled)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(canon, "rope_scaling", ckpt_json_new_object(), err));
    ckpt_json *scaling = ckpt_json_get(canon, "rope_scaling");
    for (size_t i = 0; i < N_YARN; i++) {
        CKPT_CHECK(read_number(stored, yarn[i].arg, yarn[i].absent, &v, err));
        CKPT_CHECK(ckpt_field_put(scaling, yarn[i].key, ckpt_field_number(v), err));
    }
done:
    return status;
}

static ckpt_json *ones(size_t n)
{
    ckpt_json *list = ckpt_json_new_array();
    for (size_t i = 0; list != NULL && i < n; i++)
        if (!ckpt_json_push(list, ckpt_json_new_int(1))) {
            ckpt_json_free(list);
            list = NULL;
        }
    return list;
}

static ckpt_status write_yarn(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *scaling = ckpt_json_get(w->canon, "rope_scaling");
    for (const ckpt_json *c = ckpt_json_child(scaling); c != NULL; c = ckpt_json_next(c)) {
        size_t i = 0;
        while (i < N_YARN && strcmp(yarn[i].key, ckpt_json_key(c)) != 0)
            i++;
        if (i == N_YARN)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, NAME " cannot say rope_scaling.%s",
                             ckpt_json_key(c));
        CKPT_CHECK(ckpt_field_put(w->out, yarn[i].arg, ckpt_json_dup(c), err));
    }
done:
    return status;
}

static ckpt_status write_rope(const ckpt_field_write *w, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    bool mla = strchr(pattern, '+') != NULL;
    bool nope = !mla || ckpt_canon_bool(w->canon, "mla_nope");
    ckpt_status status = CKPT_OK;
    if (mla && ckpt_json_get(w->canon, "mla_nope") == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "mla_nope is not known");
    if (ckpt_field_changed(w, "mla_nope,pattern")) {
        CKPT_CHECK(ckpt_field_put(w->out, "position_embedding_type",
                                  ckpt_json_new_string(nope ? "none" : "rope"), err));
        if (mla)
            CKPT_CHECK(ckpt_field_put(w->out, "no_rope_freq",
                                      nope ? ones(strlen(pattern)) : ckpt_json_new_null(), err));
    }
    if (nope || !ckpt_field_changed(w, "mla_nope,rope_theta,rope_type,rope_scaling"))
        return CKPT_OK;
    const ckpt_json *theta = ckpt_json_get(w->canon, "rope_theta");
    const ckpt_json *type = ckpt_json_get(w->canon, "rope_type");
    if (theta == NULL || type == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rope_theta or rope_type is not known");
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_base", ckpt_json_dup(theta), err));
    CKPT_CHECK(ckpt_field_put(w->out, "rope_type", ckpt_json_dup(type), err));
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_percent", ckpt_json_new_double(1), err));
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_scaling_factor", ckpt_json_new_double(1), err));
    status = write_yarn(w, err);
done:
    return status;
}

/* ---- KDA, MLA, MoE --------------------------------------------------------------------------- */

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

static ckpt_status read_groups(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    int64_t groups, limit, topk = ckpt_canon_int(canon, "experts_per_token");
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "moe_router_num_groups", false, &groups, err));
    CKPT_CHECK(ckpt_field_size(stored, "moe_router_group_topk", false, &limit, err));
    if (groups <= 1)
        return CKPT_OK;
    if (limit == 0 || limit > groups)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'moe_router_group_topk': found %lld, expected 1 to %lld",
                         (long long)limit, (long long)groups);
    if (topk / limit != 2)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'moe_router_group_topk': a group is scored by its best %lld "
                         "experts (moe_router_topk / moe_router_group_topk), elsewhere always by 2",
                         (long long)(topk / limit));
    CKPT_CHECK(ckpt_field_put(canon, "router_groups", ckpt_json_new_int(groups), err));
    CKPT_CHECK(ckpt_field_put(canon, "router_group_topk", ckpt_json_new_int(limit), err));
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

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(canon, "K"))
        CKPT_CHECK(read_kda(stored, canon, err));
    if (ckpt_field_applies(canon, "+")) {
        CKPT_CHECK(read_rope(stored, canon, err));
        CKPT_CHECK(read_gate(stored, canon, err));
    }
    if (ckpt_field_applies(canon, "E"))
        CKPT_CHECK(read_moe(stored, canon, err));
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
                         NAME " cannot say router_normalize %s with sigmoid scores and "
                              "moe_router_topk %lld: it %s",
                         normalize ? "true" : "false", (long long)topk,
                         normalize ? "does not normalise one expert" : "always normalises");
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

/* Set an argument only if what it says now, or means when missing, is something else. */
static ckpt_status settle(const ckpt_field_write *w, const char *arg, int64_t absent, int64_t want,
                          ckpt_err *err)
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
    CKPT_CHECK(settle(w, "tensor_model_parallel_size", 1, w->mesh.tp, err));
    CKPT_CHECK(settle(w, "pipeline_model_parallel_size", 1, w->mesh.pp, err));
    CKPT_CHECK(settle(w, "context_parallel_size", 1, w->mesh.cp, err));
    CKPT_CHECK(settle(w, "expert_model_parallel_size", 1, w->mesh.ep, err));
    CKPT_CHECK(settle(w, "expert_tensor_parallel_size", w->mesh.tp, w->mesh.etp, err));
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
        padded = earlier_size(w, "padded_vocab_size");
        multiple = earlier_size(w, "make_vocab_size_divisible_by");
        old_v = earlier_size(w, "vocab_size");
        if (!w->has_mesh)
            tp = earlier_size(w, "tensor_model_parallel_size");
        tp = tp == 0 ? 1 : tp;
        if (padded >= v && (old_v == 0 || old_v == v) && padded % tp == 0)
            return CKPT_OK;
    }
    if (multiple == 0)
        multiple = VOCAB_MULTIPLE;
    if (!ckpt_mul_i64(multiple, tp, &unit) || !ckpt_add_i64(v, unit - 1, &count) ||
        !ckpt_mul_i64(count / unit, unit, &padded))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "padded_vocab_size overflows");
    CKPT_CHECK(settle(w, "make_vocab_size_divisible_by", VOCAB_MULTIPLE, multiple, err));
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
    if (ckpt_json_get(w->out, "num_attention_heads") == NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "num_attention_heads",
                                  ckpt_json_new_int(heads > 0 ? heads : 1), err));
    if (w->foreign == NULL && width > 0)
        CKPT_CHECK(ckpt_field_put(w->out, "kv_channels", ckpt_json_new_int(width), err));
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(write_pattern(w, err));
    CKPT_CHECK(write_rope(w, err));
    if (ckpt_field_applies(w->canon, "K") && ckpt_field_changed(w, "kda_heads"))
        CKPT_CHECK(ckpt_field_put(w->out, "linear_num_value_heads",
                                  ckpt_json_new_int(ckpt_canon_int(w->canon, "kda_heads")), err));
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

static ckpt_status config_read(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    return ckpt_dialect_read(&dialect, stored, canon, err);
}

static ckpt_status config_write(const ckpt_json *canon, const ckpt_json *foreign,
                                const ckpt_mesh *mesh, ckpt_json **out, ckpt_err *err)
{
    return ckpt_dialect_write(&dialect, canon, foreign, mesh, out, err);
}

const ckpt_layout ckpt_layout_megatron_hybrid = {
    .name = NAME,
    .group = "megatron",
    .family = "hybrid",
    .schema = ckpt_hybrid_schema,
    .n_schema = CKPT_HYBRID_SCHEMA_LEN,
    .rows = rows,
    .n_rows = sizeof rows / sizeof rows[0],
    .ignored = ignored,
    .required = required,
    .config_kind = CKPT_CONFIG_MEGATRON,
    .default_tags = "kda=fused,latent_norms=fused,mlp_norms=fused,shards=joint",
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
