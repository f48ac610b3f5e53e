/* Flash Linear Attention's KDA models (model_type kda). Names and shapes: hf-layouts-linear.md
 * section 2. The width of the value head is also the rank of both factored projections. g_b.bias has
 * a slot here only: no other dialect can hold it. */
#include "hybrid.h"

#include <math.h>
#include <string.h>

#define NAME "fla:kda"

/* clang-format off */
static const ckpt_row rows[] = {
    {"embed.weight",                   "model.embeddings.weight",                   "V | H", NULL},
    {"head.weight",                    "lm_head.weight",                            "V | H", NULL},
    {"final_norm.weight",              "model.norm.weight",                         "H", NULL},

    {"blocks.{2l}.kda.norm.weight",    "model.layers.{l}.attn_norm.weight",         "H", NULL},
    {"blocks.{2l}.kda.q.weight",       "model.layers.{l}.attn.q_proj.weight",       "NK A | H", NULL},
    {"blocks.{2l}.kda.k.weight",       "model.layers.{l}.attn.k_proj.weight",       "NK A | H", NULL},
    {"blocks.{2l}.kda.v.weight",       "model.layers.{l}.attn.v_proj.weight",       "NK B | H", NULL},
    {"blocks.{2l}.kda.conv_q.weight",  "model.layers.{l}.attn.q_conv1d.weight",     "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_k.weight",  "model.layers.{l}.attn.k_conv1d.weight",     "NK A | 1 | W", NULL},
    {"blocks.{2l}.kda.conv_v.weight",  "model.layers.{l}.attn.v_conv1d.weight",     "NK B | 1 | W", NULL},
    {"blocks.{2l}.kda.f_a.weight",     "model.layers.{l}.attn.f_proj.0.weight",     "RF | H", NULL},
    {"blocks.{2l}.kda.f_b.weight",     "model.layers.{l}.attn.f_proj.1.weight",     "NK A | RF", NULL},
    {"blocks.{2l}.kda.g_a.weight",     "model.layers.{l}.attn.g_proj.0.weight",     "RG | H", NULL},
    {"blocks.{2l}.kda.g_b.weight",     "model.layers.{l}.attn.g_proj.1.weight",     "NK B | RG", NULL},
    {"blocks.{2l}.kda.g_b.bias",       "model.layers.{l}.attn.g_proj.1.bias",       "NK B", NULL},
    {"blocks.{2l}.kda.beta.weight",    "model.layers.{l}.attn.b_proj.weight",       "NK | H", NULL},
    {"blocks.{2l}.kda.A_log",          "model.layers.{l}.attn.A_log",               "NK", NULL},
    {"blocks.{2l}.kda.dt_bias",        "model.layers.{l}.attn.dt_bias",             "NK A", NULL},
    {"blocks.{2l}.kda.o_norm.weight",  "model.layers.{l}.attn.o_norm.weight",       "B", NULL},
    {"blocks.{2l}.kda.o.weight",       "model.layers.{l}.attn.o_proj.weight",       "H | NK B", NULL},

    {"blocks.{2l+1}.mlp.norm.weight",  "model.layers.{l}.mlp_norm.weight",          "H", NULL},
    {"blocks.{2l+1}.mlp.gate.weight",  "model.layers.{l}.mlp.gate_proj.weight",     "F | H", NULL},
    {"blocks.{2l+1}.mlp.up.weight",    "model.layers.{l}.mlp.up_proj.weight",       "F | H", NULL},
    {"blocks.{2l+1}.mlp.down.weight",  "model.layers.{l}.mlp.down_proj.weight",     "H | F", NULL},
};
/* clang-format on */

static const char *const ignored[] = {"*.rotary_emb.inv_freq", "*.rotary.inv_freq", NULL};

static const char required[] =
    "top: embed.weight final_norm.weight; "
    "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight conv_v.weight "
    "f_a.weight f_b.weight g_a.weight g_b.weight beta.weight A_log dt_bias o_norm.weight o.weight; "
    "mlp: norm.weight gate.weight up.weight down.weight";

/* clang-format off */
static const ckpt_field fields[] = {
    {"hidden_size",     "hidden_size",         CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"vocab_size",      "vocab_size",          CKPT_FIELD_SIZE,   NULL,       NULL, 0},
    {"norm_eps",        "norm_eps",            CKPT_FIELD_REAL,   "1e-06",    NULL, 0},
    {"activation",      NULL,                  CKPT_FIELD_STRING, "\"silu\"", NULL, 0},
    {"tied",            "tie_word_embeddings", CKPT_FIELD_BOOL,   "false",    NULL, 0},
    {"init_std",        "initializer_range",   CKPT_FIELD_REAL,   "0.02",     NULL, 0},
    {"kda_heads",       "num_heads",           CKPT_FIELD_SIZE,   NULL,       "K",  0},
    {"kda_key_dim",     "head_dim",            CKPT_FIELD_SIZE,   NULL,       "K",  0},
    {"kda_conv",        "conv_size",           CKPT_FIELD_SIZE,   "4",        "K",  0},
    {"kda_safe_gate",   "safe_gate",           CKPT_FIELD_BOOL,   "false",    "K",  0},
    {"kda_lower_bound", "lower_bound",         CKPT_FIELD_REAL,   NULL,       "K",  CKPT_FIELD_NULLABLE},
    {"ffn_size",        "intermediate_size",   CKPT_FIELD_SIZE,   NULL,       "-",  0},
};

static const ckpt_constant constants[] = {
    {"model_type",         "[\"kda\"]",               NULL, true,  "another model"},
    {"hidden_act",         "[\"swish\", \"silu\"]",   NULL, true,  "no other activation is known"},
    {"use_short_conv",     "[true]",                  NULL, true,  "the layer has convolution weights"},
    {"conv_bias",          "[false]",                 NULL, false, "the convolution has no bias tensors"},
    {"allow_neg_eigval",   "[false]",                 NULL, true,  "beta would be doubled"},
    {"attnres_block_size", "[0]",                     NULL, false, "residual attention has no block here"},
    {"attn",               "[{}]",                    NULL, false, "softmax layers have no block here"},
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    const char *type = ckpt_json_string(ckpt_json_get(config, "model_type"));
    if (type != NULL)
        return strcmp(type, "kda") == 0 ? 1 : -1;
    const ckpt_json *first = ckpt_json_child(ckpt_json_get(config, "architectures"));
    const char *name = ckpt_json_string(first);
    if (name == NULL)
        return first == NULL ? 0 : -1;
    return strcmp(name, "KDAForCausalLM") == 0 || strcmp(name, "KDAModel") == 0 ? 1 : -1;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_buf pattern = {0};
    int64_t layers = 0;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "num_hidden_layers", false, &layers, err));
    if (layers == 0 || layers > CKPT_HYBRID_MAX_LAYERS)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'num_hidden_layers': found %lld, expected 1 to %d",
                         (long long)layers, CKPT_HYBRID_MAX_LAYERS);
    for (int64_t i = 0; i < layers; i++)
        ckpt_buf_puts(&pattern, "K-");
    if (pattern.failed)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer count");
    else
        status =
            ckpt_field_put(canon, "pattern", ckpt_json_new_string((const char *)pattern.data), err);
done:
    ckpt_buf_release(&pattern);
    return status;
}

/* Python's int(head_dim * expand_v), which must be exact: the tensors have whole heads. */
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
    if (!(width >= 1 && width < 4294967296.0) || fabs(width - nearbyint(width)) > 1e-5 * width)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'expand_v': found %g, but head_dim %lld times it is not a width",
                         expand, (long long)key_dim);
    for (size_t i = 0; i < 3; i++)
        CKPT_CHECK(
            ckpt_field_put(canon, keys[i], ckpt_json_new_int((int64_t)nearbyint(width)), err));
done:
    return status;
}

/* FLA's GatedMLP without intermediate_size: int(hidden * ratio * 2 / 3) rounded up to 256. */
static ckpt_status read_ffn(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    const ckpt_json *j;
    double ratio = 4;
    int64_t hidden = ckpt_canon_int(canon, "hidden_size");
    ckpt_status status;
    if (ckpt_json_get(canon, "ffn_size") != NULL || hidden == 0)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_find(stored, "hidden_ratio", &j, err));
    if (j != NULL && (!ckpt_json_double(j, &ratio) || !(ratio > 0 && ratio < 1e6)))
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'hidden_ratio': expected a number > 0");
    double width = (double)hidden * ratio * 2 / 3;
    if (width >= 1e15)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'hidden_ratio' is too large");
    int64_t blocks = ((int64_t)width + 255) / 256;
    if (blocks > 0)
        status = ckpt_field_put(canon, "ffn_size", ckpt_json_new_int(blocks * 256), err);
done:
    return status;
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status;
    int64_t value_heads, heads = ckpt_canon_int(canon, "kda_heads");
    CKPT_CHECK(ckpt_field_size(stored, "num_v_heads", false, &value_heads, err));
    if (value_heads != 0 && value_heads != heads)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'num_v_heads': found %lld, supported is num_heads %lld only (key "
                         "and value heads are one to one)",
                         (long long)value_heads, (long long)heads);
    /* The bound only takes effect with the safe gate. */
    if (!ckpt_canon_bool(canon, "kda_safe_gate"))
        ckpt_json_delete(canon, "kda_lower_bound");
    CKPT_CHECK(read_value_dim(stored, canon, err));
    CKPT_CHECK(read_ffn(stored, canon, err));
done:
    return status;
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    int64_t key_dim = ckpt_canon_int(w->canon, "kda_key_dim");
    int64_t value_dim = ckpt_canon_int(w->canon, "kda_value_dim"), layers;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    CKPT_CHECK(ckpt_hybrid_layers(NAME, pattern, "K", "-", &layers, err));
    if (ckpt_field_changed(w, "pattern"))
        CKPT_CHECK(ckpt_field_put(w->out, "num_hidden_layers", ckpt_json_new_int(layers), err));
    if (ckpt_field_changed(w, "kda_key_dim,kda_value_dim") && key_dim > 0)
        CKPT_CHECK(ckpt_field_put(w->out, "expand_v",
                                  ckpt_json_new_double((double)value_dim / (double)key_dim), err));
    if (ckpt_field_changed(w, "kda_heads") && ckpt_json_get(w->out, "num_v_heads") != NULL)
        CKPT_CHECK(ckpt_field_put_text(w->out, "num_v_heads", "null", err));
    if (w->foreign != NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put_text(w->out, "architectures", "[\"KDAForCausalLM\"]", err));
    CKPT_CHECK(ckpt_field_put_text(w->out, "num_v_heads", "null", err));
    CKPT_CHECK(ckpt_field_put_text(w->out, "attn", "null", err));
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

const ckpt_layout ckpt_layout_fla_kda = {
    .name = NAME,
    .group = "fla",
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
