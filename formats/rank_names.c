/* The table of Megatron's parallel modules. Sources: megatron-dist-ckpt.md sections 2.4 and 3, and
 * the sharded_state_dict methods of Megatron-Core (transformer/attention.py, mlp.py, moe/experts.py,
 * multi_latent_attention.py, multi_token_prediction.py, ssm). Section order is module order. */
#include "rank_names.h"

#include "layout.h"

#include <string.h>

#define MAX_LAYER INT64_C(1000000)
#define ARG_MAX_SIZE (INT64_C(1) << 24) /* so that products of two do not overflow */

/* clang-format off */
#define W CKPT_RANK_WHOLE
#define R CKPT_RANK_ROWS
#define C CKPT_RANK_COLS
static const ckpt_rank_rule rules[] = {
    /* attention and MLA */
    {"self_attention.linear_qkv.weight",                   NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_qkv.bias",                     NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_qkv.layer_norm_weight",        NULL, W, {NULL, NULL}, false, false},
    {"self_attention.linear_qkv.layer_norm_bias",          NULL, W, {NULL, NULL}, false, false},
    {"self_attention.linear_proj.weight",                  NULL, C, {NULL, NULL}, false, false},
    {"self_attention.linear_proj.bias",                    NULL, W, {NULL, NULL}, false, false},
    {"self_attention.q_layernorm.weight",                  NULL, W, {NULL, NULL}, false, false},
    {"self_attention.k_layernorm.weight",                  NULL, W, {NULL, NULL}, false, false},
    {"self_attention.kv_layernorm.weight",                 NULL, W, {NULL, NULL}, false, false},
    {"self_attention.q_layernorm.bias",                    NULL, W, {NULL, NULL}, false, false},
    {"self_attention.k_layernorm.bias",                    NULL, W, {NULL, NULL}, false, false},
    {"self_attention.kv_layernorm.bias",                   NULL, W, {NULL, NULL}, false, false},
    {"self_attention.core_attention.softmax_offset",       NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_q_proj.weight",                NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_q_down_proj.weight",           NULL, CKPT_RANK_SIZED, {"q_lora_rank", NULL}, false, false},
    {"self_attention.linear_q_up_proj.weight",             NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_q_up_proj.layer_norm_weight",  NULL, W, {NULL, NULL}, false, false},
    {"self_attention.linear_kv_down_proj.weight",          NULL, CKPT_RANK_SIZED, {"kv_lora_rank", "qk_pos_emb_head_dim"}, false, false},
    {"self_attention.linear_kv_up_proj.weight",            NULL, R, {NULL, NULL}, false, false},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", NULL, W, {NULL, NULL}, false, false},
    {"self_attention.linear_gate.weight",                  NULL, R, {NULL, NULL}, false, false},
    /* KDA, GDN, GDN2 */
    {"self_attention.in_proj.weight",                      NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"self_attention.in_proj.layer_norm_weight",           NULL, W, {NULL, NULL}, false, false},
    {"self_attention.conv1d.weight",                       NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"self_attention.conv1d.bias",                         NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"self_attention.A_log",                               NULL, R, {NULL, NULL}, false, false},
    {"self_attention.dt_bias",                             NULL, R, {NULL, NULL}, false, false},
    {"self_attention.out_norm.weight",                     NULL, W, {NULL, NULL}, false, false},
    {"self_attention.out_proj.weight",                     NULL, C, {NULL, NULL}, false, false},
    {"self_attention.beta_proj.weight",                    NULL, CKPT_RANK_SIZED, {"linear_num_key_heads", NULL}, false, false},
    {"self_attention.f_proj.weight",                       NULL, R, {NULL, NULL}, false, false},
    {"self_attention.f_a_proj.weight",                     NULL, W, {NULL, NULL}, false, false},
    {"self_attention.f_b_proj.weight",                     NULL, R, {NULL, NULL}, false, false},
    {"self_attention.g_proj.weight",                       NULL, R, {NULL, NULL}, false, false},
    {"self_attention.g_a_proj.weight",                     NULL, W, {NULL, NULL}, false, false},
    {"self_attention.g_b_proj.weight",                     NULL, R, {NULL, NULL}, false, false},
    /* Mamba */
    {"mixer.in_proj.weight",                               NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"mixer.in_proj.layer_norm_weight",                    NULL, W, {NULL, NULL}, false, false},
    {"mixer.conv1d.weight",                                NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"mixer.conv1d.bias",                                  NULL, CKPT_RANK_PARTS, {NULL, NULL}, false, false},
    {"mixer.conv1d_weight",               "mixer.conv1d.weight", CKPT_RANK_PARTS, {NULL, NULL}, false, true},
    {"mixer.conv1d_bias",                   "mixer.conv1d.bias", CKPT_RANK_PARTS, {NULL, NULL}, false, true},
    {"mixer.A_log",                                        NULL, R, {NULL, NULL}, false, false},
    {"mixer.dt_bias",                                      NULL, R, {NULL, NULL}, false, false},
    {"mixer.D",                                            NULL, R, {NULL, NULL}, false, false},
    {"mixer.norm.weight",                                  NULL, R, {NULL, NULL}, false, false},
    {"mixer.out_proj.weight",                              NULL, C, {NULL, NULL}, false, false},
    {"norm.weight",                                        NULL, W, {NULL, NULL}, false, false},
    /* MLP and MoE */
    {"input_layernorm.weight",                             NULL, W, {NULL, NULL}, false, false},
    {"input_layernorm.bias",                               NULL, W, {NULL, NULL}, false, false},
    {"pre_mlp_layernorm.weight",                           NULL, W, {NULL, NULL}, false, false},
    {"pre_mlp_layernorm.bias",                             NULL, W, {NULL, NULL}, false, false},
    {"mlp.linear_fc1.weight",                              NULL, CKPT_RANK_GATED, {NULL, NULL}, false, false},
    {"mlp.linear_fc1.bias",                                NULL, CKPT_RANK_GATED, {NULL, NULL}, false, false},
    {"mlp.linear_fc1.layer_norm_weight",                   NULL, W, {NULL, NULL}, false, false},
    {"mlp.linear_fc1.layer_norm_bias",                     NULL, W, {NULL, NULL}, false, false},
    {"mlp.linear_fc2.weight",                              NULL, C, {NULL, NULL}, false, false},
    {"mlp.linear_fc2.bias",                                NULL, W, {NULL, NULL}, false, false},
    {"mlp.router.weight",                                  NULL, W, {NULL, NULL}, false, false},
    {"mlp.router.bias",                                    NULL, W, {NULL, NULL}, false, false},
    {"mlp.router.expert_bias",                             NULL, W, {NULL, NULL}, false, false},
    {"mlp.router.qb_beta",                                 NULL, W, {NULL, NULL}, false, false},
    {"mlp.shared_experts.linear_fc1.weight",               NULL, CKPT_RANK_GATED, {NULL, NULL}, false, false},
    {"mlp.shared_experts.linear_fc1.bias",                 NULL, CKPT_RANK_GATED, {NULL, NULL}, false, false},
    {"mlp.shared_experts.linear_fc2.weight",               NULL, C, {NULL, NULL}, false, false},
    {"mlp.shared_experts.linear_fc2.bias",                 NULL, W, {NULL, NULL}, false, false},
    {"mlp.shared_experts.gate_weight",                     NULL, W, {NULL, NULL}, false, false},
    {"mlp.fc1_latent_proj.weight",                         NULL, W, {NULL, NULL}, false, false},
    {"mlp.fc2_latent_proj.weight",                         NULL, W, {NULL, NULL}, false, false},
    {"mlp.experts.linear_fc1.weight{e}",                   "mlp.experts.experts.linear_fc1.weight", CKPT_RANK_GATED, {NULL, NULL}, true, false},
    {"mlp.experts.linear_fc1.bias{e}",                     "mlp.experts.experts.linear_fc1.bias",   CKPT_RANK_GATED, {NULL, NULL}, true, false},
    {"mlp.experts.linear_fc2.weight{e}",                   "mlp.experts.experts.linear_fc2.weight", C, {NULL, NULL}, true, false},
    {"mlp.experts.linear_fc2.bias{e}",                     "mlp.experts.experts.linear_fc2.bias",   W, {NULL, NULL}, true, false},
    {"mlp.experts.local_experts.{e}.linear_fc1.weight",    "mlp.experts.experts.linear_fc1.weight", CKPT_RANK_GATED, {NULL, NULL}, true, false},
    {"mlp.experts.local_experts.{e}.linear_fc1.bias",      "mlp.experts.experts.linear_fc1.bias",   CKPT_RANK_GATED, {NULL, NULL}, true, false},
    {"mlp.experts.local_experts.{e}.linear_fc2.weight",    "mlp.experts.experts.linear_fc2.weight", C, {NULL, NULL}, true, false},
    {"mlp.experts.local_experts.{e}.linear_fc2.bias",      "mlp.experts.experts.linear_fc2.bias",   W, {NULL, NULL}, true, false},
    {"mlp.experts.weight1",                                "mlp.experts.experts.linear_fc1.weight", CKPT_RANK_GEMM1, {NULL, NULL}, true, true},
    {"mlp.experts.weight2",                                "mlp.experts.experts.linear_fc2.weight", CKPT_RANK_GEMM2, {NULL, NULL}, true, true},
    /* multi-token prediction, after "mtp.layers.K." */
    {"enorm.weight",                                       NULL, W, {NULL, NULL}, false, false},
    {"hnorm.weight",                                       NULL, W, {NULL, NULL}, false, false},
    {"final_layernorm.weight",                             NULL, W, {NULL, NULL}, false, false},
    {"eh_proj.weight",                                     NULL, R, {NULL, NULL}, false, false},
    /* outside layers */
    {"embedding.word_embeddings.weight",                   NULL, R, {NULL, NULL}, false, false},
    {"embedding.position_embeddings.weight",               NULL, W, {NULL, NULL}, false, false},
    {"output_layer.weight",                                NULL, R, {NULL, NULL}, false, false},
    {"output_layer.bias",                                  NULL, R, {NULL, NULL}, false, false},
    {"decoder.final_layernorm.weight",                     NULL, W, {NULL, NULL}, false, false},
    {"decoder.final_layernorm.bias",                       NULL, W, {NULL, NULL}, false, false},
    {"decoder.final_norm.weight",                          NULL, W, {NULL, NULL}, false, false},
};
#undef W
#undef R
#undef C
/* clang-format on */

#define N_RULES (sizeof rules / sizeof rules[0])

static bool take_index(const char **p, int64_t *out)
{
    const char *s = *p;
    int64_t v = 0;
    if (*s < '0' || *s > '9' || (*s == '0' && s[1] >= '0' && s[1] <= '9'))
        return false;
    for (; *s >= '0' && *s <= '9'; s++) {
        v = v * 10 + (*s - '0');
        if (v > MAX_LAYER)
            return false;
    }
    *p = s;
    *out = v;
    return *s == '.';
}

static bool skip_text(const char **p, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*p, text, n) != 0)
        return false;
    *p += n;
    return true;
}

bool ckpt_rank_split(const char *name, ckpt_rank_place *place)
{
    const char *p = name;
    int64_t depth;
    *place = (ckpt_rank_place){.head = name, .layer = -1, .rest = name};
    if (skip_text(&p, "decoder.layers.")) {
        place->head_len = (size_t)(p - name);
        if (!take_index(&p, &place->layer)) {
            place->layer = -1; /* stacked: no index */
            place->rest = name + place->head_len;
            return place->rest[0] < '0' || place->rest[0] > '9';
        }
        place->rest = p + 1;
        return true;
    }
    if (!skip_text(&p, "mtp.layers."))
        return true;
    if (!take_index(&p, &depth))
        return false;
    p++;
    const char *inner = p;
    if (skip_text(&inner, "mtp_model_layer.layers.") && take_index(&inner, &depth))
        p = inner + 1;
    else if (!skip_text(&p, "mtp_model_layer."))
        (void)skip_text(&p, "transformer_layer.");
    place->head_len = (size_t)(p - name);
    place->rest = p;
    return true;
}

const ckpt_rank_rule *ckpt_rank_by_memory(const char *rest, int64_t *e)
{
    ckpt_index at;
    for (size_t i = 0; i < N_RULES; i++)
        if (ckpt_pattern_match(rules[i].memory, rest, NULL, &at)) {
            *e = at.e;
            return &rules[i];
        }
    *e = -1;
    return NULL;
}

const ckpt_rank_rule *ckpt_rank_by_stored(const char *rest, bool sequential, const char **part)
{
    *part = NULL;
    for (size_t i = 0; i < N_RULES; i++) {
        const ckpt_rank_rule *r = &rules[i];
        const char *stored = r->stored != NULL ? r->stored : r->memory;
        size_t n = strlen(stored);
        bool local = strstr(r->memory, ".local_experts.") != NULL;
        if (r->read_only || (r->expert && local != sequential) || strncmp(rest, stored, n) != 0)
            continue;
        if (r->cut == CKPT_RANK_PARTS ? rest[n] != '.' : rest[n] != '\0')
            continue;
        if (r->cut == CKPT_RANK_PARTS)
            *part = rest + n + 1;
        return r;
    }
    return NULL;
}

/* ---- arguments -------------------------------------------------------------------------------- */

bool ckpt_rank_arg(const ckpt_json *args, const char *name, int64_t *out)
{
    return ckpt_json_int(ckpt_json_get(args, name), out);
}

bool ckpt_rank_flag(const ckpt_json *args, const char *name)
{
    bool flag = false;
    return ckpt_json_bool(ckpt_json_get(args, name), &flag) && flag;
}

/* ---- sections --------------------------------------------------------------------------------- */

static ckpt_status need(const ckpt_json *args, const char *name, int64_t *out, ckpt_err *err)
{
    if (ckpt_rank_arg(args, name, out) && *out > 0 && *out <= ARG_MAX_SIZE)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_FORMAT, "args do not give %s, needed to cut it", name);
}

static void add(ckpt_rank_parts *p, const char *name, int64_t size)
{
    p->name[p->n] = name;
    p->size[p->n++] = size;
}

static ckpt_status mamba_sections(bool conv, const ckpt_json *args, ckpt_rank_parts *out,
                                  ckpt_err *err)
{
    ckpt_status status;
    int64_t heads, dim, groups, state;
    CKPT_CHECK(need(args, "mamba_num_heads", &heads, err));
    CKPT_CHECK(need(args, "mamba_head_dim", &dim, err));
    CKPT_CHECK(need(args, "mamba_num_groups", &groups, err));
    CKPT_CHECK(need(args, "mamba_state_dim", &state, err));
    if (!conv)
        add(out, "z", heads * dim);
    add(out, "x", heads * dim);
    add(out, "B", groups * state);
    add(out, "C", groups * state);
    if (!conv)
        add(out, "dt", heads);
done:
    return status;
}

ckpt_status ckpt_rank_sections(const char *rest, const ckpt_json *args, ckpt_rank_has has,
                               const void *self, ckpt_rank_parts *out, ckpt_err *err)
{
    ckpt_status status;
    int64_t nk, nv, a, b;
    bool conv = strstr(rest, "conv1d") != NULL;
    *out = (ckpt_rank_parts){.n = 0};
    if (strncmp(rest, "mixer.", 6) == 0)
        return mamba_sections(conv, args, out, err);
    CKPT_CHECK(need(args, "linear_num_key_heads", &nk, err));
    CKPT_CHECK(need(args, "linear_num_value_heads", &nv, err));
    CKPT_CHECK(need(args, "linear_key_head_dim", &a, err));
    CKPT_CHECK(need(args, "linear_value_head_dim", &b, err));
    add(out, "query", nk * a);
    add(out, "key", nk * a);
    add(out, "value", nv * b);
    if (conv)
        return CKPT_OK;
    const char *variant = ckpt_json_string(ckpt_json_get(args, "experimental_attention_variant"));
    if (has(self, "self_attention.beta_proj.weight")) { /* KDA */
        bool split = has(self, "self_attention.f_proj.weight") ||
                     has(self, "self_attention.f_a_proj.weight");
        if (!split) {
            add(out, "g", nk * a);
            add(out, "gate", nv * b);
        }
    } else if (variant != NULL && strcmp(variant, "gdn2") == 0) {
        add(out, "z", nv * b);
        add(out, "f", nk * a);
        add(out, "b", nk * a);
        add(out, "w", nv * b);
    } else {
        add(out, "z", nv * b);
        add(out, "beta", nv);
        add(out, "alpha", nv);
    }
done:
    return status;
}
