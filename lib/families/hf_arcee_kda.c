/* Arcee's KDA models (model_type arcee_kda, remote code): layers of flash-linear-attention's KDA in a
 * dense model whose MLP is up and down with squared ReLU and no gate; a variant keeps some layers of
 * grouped-query attention without rotation. No published file was seen: the names are inferred
 * (hf-layouts-linear.md section 6), so the same table is also given as an example for --map.
 *
 * Fields are FLA's for KDA (num_heads, head_dim, expand_v, conv_size) and Llama's elsewhere. Which
 * layers are attention is in layer_types or, as FLA has it, attn.layers (0-based); without either
 * all are KDA. A configuration that counts other layers than the tensors is refused. */
#include "hf_common.h"
#include "hf_rows.h"

#include <math.h>
#include <string.h>

#define NAME "hf:arcee_kda"
#define ATTN HF_LAYER "self_attn."

/* clang-format off */
static const ckpt_row rows[] = {
    HF_TOP_ROWS,
    {"blocks.{2l}.kda.norm.weight",   HF_LAYER "input_layernorm.weight",          "H", NULL},
    {"blocks.{2l}.kda.q.weight",      ATTN "q_proj.weight",                       "NK A | H", NULL},
    {"blocks.{2l}.kda.k.weight",      ATTN "k_proj.weight",                       "NK A | H", NULL},
    {"blocks.{2l}.kda.v.weight",      ATTN "v_proj.weight",                       "NK B | H", NULL},
    {"blocks.{2l}.kda.conv_q.weight", ATTN "q_conv1d.weight",                     "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_k.weight", ATTN "k_conv1d.weight",                     "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_v.weight", ATTN "v_conv1d.weight",                     "NK B | 1 | W", NULL},
    {"blocks.{2l}.kda.f_a.weight",    ATTN "f_proj.0.weight",                     "RF | H", NULL},
    {"blocks.{2l}.kda.f_b.weight",    ATTN "f_proj.1.weight",                     "NK A | RF", NULL},
    {"blocks.{2l}.kda.g_a.weight",    ATTN "g_proj.0.weight",                     "RG | H", NULL},
    {"blocks.{2l}.kda.g_b.weight",    ATTN "g_proj.1.weight",                     "NK B | RG", NULL},
    {"blocks.{2l}.kda.g_b.bias",      ATTN "g_proj.1.bias",                       "NK B", NULL},
    {"blocks.{2l}.kda.beta.weight",   ATTN "b_proj.weight",                       "NK | H", NULL},
    {"blocks.{2l}.kda.A_log",         ATTN "A_log",                               "NK", NULL},
    {"blocks.{2l}.kda.dt_bias",       ATTN "dt_bias",                             "NK A", NULL},
    {"blocks.{2l}.kda.o_norm.weight", ATTN "o_norm.weight",                       "B", NULL},
    {"blocks.{2l}.kda.o.weight",      ATTN "o_proj.weight",                       "H | NK B", NULL},
    HF_ATTN_ROWS(HF_LAYER, "blocks.{2l}."),
    {"blocks.{2l+1}.mlp.norm.weight", HF_LAYER "post_attention_layernorm.weight", "H", NULL},
    {"blocks.{2l+1}.mlp.up.weight",   HF_LAYER "mlp.up_proj.weight",              "F | H", NULL},
    {"blocks.{2l+1}.mlp.down.weight", HF_LAYER "mlp.down_proj.weight",            "H | F", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", NULL};

static const char required[] =
    HF_NEED_TOP "mlp: norm.weight up.weight down.weight; " HF_NEED_ATTN "; "
                "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight "
                "conv_v.weight f_a.weight f_b.weight g_a.weight g_b.weight beta.weight A_log "
                "dt_bias o_norm.weight o.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",     "hidden_size",           CKPT_FIELD_SIZE,   NULL,        NULL, 0},
    {"vocab_size",      "vocab_size",            CKPT_FIELD_SIZE,   NULL,        NULL, 0},
    {"norm_eps",        "rms_norm_eps|norm_eps", CKPT_FIELD_REAL,   "1e-05",     NULL, 0},
    {"activation",      NULL,                    CKPT_FIELD_STRING, "\"relu2\"", NULL, 0},
    {"tied",            "tie_word_embeddings",   CKPT_FIELD_BOOL,   "false",     NULL, 0},
    {"init_std",        "initializer_range",     CKPT_FIELD_REAL,   "0.02",      NULL, 0},
    {"kda_heads",       "num_heads",             CKPT_FIELD_SIZE,   NULL,        "K",  CKPT_FIELD_OPTIONAL},
    {"kda_key_dim",     "head_dim",              CKPT_FIELD_SIZE,   NULL,        "K",  CKPT_FIELD_OPTIONAL},
    {"kda_conv",        "conv_size",             CKPT_FIELD_SIZE,   "4",         "K",  0},
    {"kda_safe_gate",   "safe_gate",             CKPT_FIELD_BOOL,   "false",     "K",  0},
    {"kda_lower_bound", "lower_bound",           CKPT_FIELD_REAL,   NULL,        "K",  CKPT_FIELD_NULLABLE},
    {"heads",           "num_attention_heads",   CKPT_FIELD_SIZE,   NULL,        "*",  0},
    {"kv_heads",        "num_key_value_heads",   CKPT_FIELD_SIZE,   NULL,        "*",  0},
    {"head_dim",        "attention_head_dim",    CKPT_FIELD_SIZE,   NULL,        "*",  CKPT_FIELD_OPTIONAL},
    {"qk_norm",         NULL,                    CKPT_FIELD_BOOL,   "false",     "*",  0},
    {"attn_nope",       NULL,                    CKPT_FIELD_BOOL,   "true",      "*",  0},
    {"ffn_size",        "intermediate_size",     CKPT_FIELD_SIZE,   NULL,        "-",  0},
};

static const ckpt_constant constants[] = {
    {"model_type",          "[\"arcee_kda\"]", NULL, true,  "another model"},
    {"hidden_act",          "[\"relu2\"]",     NULL, true,  "this model has squared ReLU without a gate"},
    {"quantization_config", "[]",              NULL, false, "no quantised form is known"},
    {"attention_bias",      "[false]",         "*",  false, "bias tensors have no slot"},
    {"mlp_bias",            "[false]",         NULL, false, "bias tensors have no slot"},
    {"use_short_conv",      "[true]",          "K",  false, "the layer has convolution weights"},
    {"conv_bias",           "[false]",         "K",  false, "the convolution has no bias tensors"},
    {"allow_neg_eigval",    "[false]",         "K",  false, "beta would be doubled"},
    {"num_v_heads",         "[]",              "K",  false, "key and value heads are one to one"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    static const char *const classes[] = {"ArceeKDAForCausalLM", "ArceeKdaForCausalLM", NULL};
    const char *type = ckpt_json_string(ckpt_json_get(config, "model_type"));
    if (type != NULL)
        return strcmp(type, "arcee_kda") == 0 ? 1 : -1;
    return ckpt_hf_claims(config, classes, classes);
}

static const ckpt_hf_stack stack = {NAME, "K*", "-", NULL};
static const ckpt_hf_types mixer_types = {
    "layer_types", {"linear_attention", "full_attention"},
     {'K',                '*'             }
};

/* attn.layers of FLA: 0-based softmax layers. */
static ckpt_status read_softmax_layers(const ckpt_json *stored, ckpt_hf_layers *x, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_path(stored, "attn.layers");
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        int64_t layer = 0;
        if (!ckpt_json_int(c, &layer) || layer < 0 || layer >= x->n) {
            char text[64];
            ckpt_field_text(c, text, sizeof text);
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "field 'attn.layers': found layer %s, expected 0 to %lld", text,
                             (long long)x->n - 1);
        }
        x->mixers[layer] = '*';
    }
    return CKPT_OK;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x;
    ckpt_status status;
    bool seen = false;
    CKPT_CHECK(ckpt_hf_layers_open(&x, stored, NULL, err));
    CKPT_CHECK(ckpt_hf_types_read(stored, &mixer_types, x.mixers, x.n, &seen, err));
    if (!seen)
        CKPT_CHECK(read_softmax_layers(stored, &x, err));
    for (int64_t i = 0; i < x.n; i++) {
        x.mixers[i] = x.mixers[i] == '\0' ? 'K' : x.mixers[i];
        x.mlps[i] = '-';
    }
done:
    return ckpt_hf_layers_close(&x, status, canon, err);
}

/* The width of a value head is also the rank of both factored projections, as in FLA. */
static ckpt_status read_value_dim(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    static const char *const keys[] = {"kda_value_dim", "kda_f_rank", "kda_gate_rank"};
    const ckpt_json *j;
    double expand = 1;
    int64_t key_dim = ckpt_canon_int(canon, "kda_key_dim");
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, "expand_v", &j, err));
    if (j != NULL && !ckpt_json_double(j, &expand))
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'expand_v': expected a number");
    double width = (double)key_dim * expand;
    if (key_dim == 0)
        return CKPT_OK;
    if (!(width >= 1 && width < 4294967296.0) || width != nearbyint(width))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'expand_v': found %g, but head_dim %lld times it is not a width",
                         expand, (long long)key_dim);
    for (size_t i = 0; i < 3; i++)
        CKPT_CHECK(ckpt_field_put(canon, keys[i], ckpt_json_new_int((int64_t)width), err));
done:
    return status;
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (!ckpt_canon_bool(canon, "kda_safe_gate"))
        ckpt_json_delete(canon, "kda_lower_bound");
    if (ckpt_field_applies(canon, "K"))
        CKPT_CHECK(read_value_dim(stored, canon, err));
    if (ckpt_field_applies(canon, "*"))
        CKPT_CHECK(ckpt_hf_attention_read(canon, err));
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    int64_t layers, key_dim = ckpt_canon_int(w->canon, "kda_key_dim");
    int64_t value_dim = ckpt_canon_int(w->canon, "kda_value_dim");
    ckpt_status status;
    CKPT_CHECK(ckpt_hf_layers_write(w, &stack, &layers, err));
    if (ckpt_field_applies(w->canon, "*") && ckpt_json_get(w->out, "layer_types") == NULL &&
        ckpt_field_changed(w, "pattern"))
        CKPT_CHECK(ckpt_field_put(w->out, "layer_types", ckpt_json_new_array(), err));
    CKPT_CHECK(ckpt_hf_types_write(w, &mixer_types, 0, layers, err));
    if (ckpt_field_changed(w, "kda_key_dim,kda_value_dim") && key_dim > 0)
        CKPT_CHECK(ckpt_field_put(w->out, "expand_v",
                                  ckpt_json_new_double((double)value_dim / (double)key_dim), err));
    CKPT_CHECK(ckpt_hf_finish_write(w, "ArceeKDAForCausalLM", err));
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

const ckpt_layout ckpt_layout_hf_arcee_kda = {
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
