/* The table of parallel modules of Hugging Face models, as vLLM cuts them (column-parallel, row-parallel
 * and merged linear layers, vocabulary-parallel embedding): the last module of a parameter's name
 * decides. Fused modules are those of vLLM's own state dict. */
#include "rank_hf.h"

#include <string.h>

typedef struct row {
    const char *module;
    ckpt_hf_cut cut;
} row;

/* clang-format off */
static const row rows[] = {
    {"q_proj", CKPT_HF_ROWS},       {"k_proj", CKPT_HF_KV},          {"v_proj", CKPT_HF_KV},
    {"o_proj", CKPT_HF_COLS},       {"gate_proj", CKPT_HF_ROWS},     {"up_proj", CKPT_HF_ROWS},
    {"down_proj", CKPT_HF_COLS},    {"w1", CKPT_HF_ROWS},            {"w3", CKPT_HF_ROWS},
    {"w2", CKPT_HF_COLS},           {"embed_tokens", CKPT_HF_VOCAB}, {"lm_head", CKPT_HF_VOCAB},
    {"q_a_proj", CKPT_HF_WHOLE},    {"q_b_proj", CKPT_HF_ROWS},      {"kv_b_proj", CKPT_HF_ROWS},
    {"kv_a_proj_with_mqa", CKPT_HF_WHOLE}, {"gate", CKPT_HF_WHOLE},  {"shared_expert_gate", CKPT_HF_WHOLE},
    {"e_score_correction_bias", CKPT_HF_WHOLE},
    /* KDA */
    {"q_conv1d", CKPT_HF_ROWS},     {"k_conv1d", CKPT_HF_ROWS},      {"v_conv1d", CKPT_HF_ROWS},
    {"f_a_proj", CKPT_HF_WHOLE},    {"f_b_proj", CKPT_HF_ROWS},      {"g_a_proj", CKPT_HF_WHOLE},
    {"g_b_proj", CKPT_HF_ROWS},     {"b_proj", CKPT_HF_ROWS},        {"A_log", CKPT_HF_HEADS},
    {"dt_bias", CKPT_HF_ROWS},      {"o_norm", CKPT_HF_WHOLE},
    /* fused, read only */
    {"qkv_proj", CKPT_HF_QKV},      {"gate_up_proj", CKPT_HF_GATE_UP},
    {"w13_weight", CKPT_HF_W13},    {"w2_weight", CKPT_HF_W2},
};
/* clang-format on */

static bool ends_with(const char *s, size_t n, const char *tail)
{
    size_t m = strlen(tail);
    return n >= m && memcmp(s + n - m, tail, m) == 0;
}

ckpt_hf_cut ckpt_hf_cut_of(const char *name, size_t *part, size_t *part_len)
{
    size_t n = strlen(name);
    bool bias = ends_with(name, n, ".bias");
    if (bias)
        n -= 5;
    else if (ends_with(name, n, ".weight"))
        n -= 7;
    size_t at = n;
    while (at > 0 && name[at - 1] != '.')
        at--;
    *part = at;
    *part_len = n - at;
    if (ends_with(name, n, "norm") && n - at >= 4)
        return CKPT_HF_WHOLE;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (strlen(rows[i].module) != n - at || memcmp(rows[i].module, name + at, n - at) != 0)
            continue;
        /* the bias of a row-parallel layer is added once, after the sum over ranks */
        return bias && rows[i].cut == CKPT_HF_COLS ? CKPT_HF_WHOLE : rows[i].cut;
    }
    return CKPT_HF_UNKNOWN;
}

static int64_t size_of(const ckpt_json *config, const char *name)
{
    int64_t v;
    return ckpt_json_int(ckpt_json_get(config, name), &v) && v > 0 && v < INT32_MAX ? v : 0;
}

void ckpt_hf_sizes_of(const ckpt_json *config, ckpt_hf_sizes *out)
{
    *out = (ckpt_hf_sizes){.heads = size_of(config, "num_attention_heads"),
                           .kv_heads = size_of(config, "num_key_value_heads"),
                           .head_dim = size_of(config, "head_dim"),
                           .vocab = size_of(config, "vocab_size")};
    if (out->kv_heads == 0)
        out->kv_heads = out->heads;
    int64_t hidden = size_of(config, "hidden_size");
    if (out->head_dim == 0 && out->heads > 0)
        out->head_dim = hidden / out->heads;
}

int64_t ckpt_hf_kv_ways(const ckpt_hf_sizes *s, int64_t tp)
{
    return s->kv_heads > 0 && s->kv_heads < tp && tp % s->kv_heads == 0 ? s->kv_heads : tp;
}
