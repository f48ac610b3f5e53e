/* Models at their published sizes, for files whose data is a hole: what a conversion costs beside
 * moving bytes, and whether its memory depends on them.
 *
 * Kimi-Linear-48B: 27 layers, three KDA to one MLA, the first dense, 256 routed experts.
 * DeepSeek-V3: 61 layers and one of multi-token prediction, the first three dense, 256 routed experts
 * in 8 groups; FP8 with a scale for every 128 x 128 block as it is published, or BF16.
 * Source: the config.json of moonshotai/Kimi-Linear-48B-A3B-Base and deepseek-ai/DeepSeek-V3-Base. */
#include "synth_internal.h"

#include <stdio.h>
#include <string.h>

enum { KIMI_LAYERS = 27, DS_LAYERS = 61, DS_DENSE = 3, DS_EXPERTS = 256, DS_BLOCK = 128 };

static void kimi_of_width(synth_model *m, int64_t expert_ffn)
{
    synth_sizes s = synth_kimi_sizes();
    s.layers = KIMI_LAYERS;
    s.experts = 256;
    s.expert_ffn = s.shared_ffn = expert_ffn;
    synth_kimi_sized(m, &s, 1);
}

bool synth_kimi48(synth_model *m, uint64_t size)
{
    enum { STEP = 64, FULL = 1024 };
    for (int64_t width = FULL; width >= STEP; width -= STEP) {
        kimi_of_width(m, width);
        if (size == 0 || m->bytes <= size)
            return true;
        synth_release(m);
    }
    return false;
}

/* A linear layer: under FP8 its blocks' scales lie beside it. */
static void linear(synth_model *m, bool fp8, int64_t rows, int64_t cols, int layer,
                   const char *name)
{
    synth_add(m, fp8 ? "F8_E4M3" : "BF16", D2(rows, cols), "model.layers.%d.%s.weight", layer,
              name);
    if (fp8)
        synth_add(m, "F32", D2((rows + DS_BLOCK - 1) / DS_BLOCK, (cols + DS_BLOCK - 1) / DS_BLOCK),
                  "model.layers.%d.%s.weight_scale_inv", layer, name);
}

static void vector(synth_model *m, int64_t n, int layer, const char *name)
{
    synth_add(m, "BF16", D1(n), "model.layers.%d.%s.weight", layer, name);
}

static void swiglu(synth_model *m, bool fp8, int64_t hidden, int64_t ffn, int layer,
                   const char *where)
{
    char name[96];
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%.60s.%s", where, parts[i]);
        linear(m, fp8, i == 2 ? hidden : ffn, i == 2 ? ffn : hidden, layer, name);
    }
}

static void deepseek_layer(synth_model *m, bool fp8, int l)
{
    enum { HIDDEN = 7168, HEADS = 128, Q_RANK = 1536, KV_RANK = 512, NOPE = 128, ROPE = 64 };
    char name[96];
    vector(m, HIDDEN, l, "input_layernorm");
    linear(m, fp8, Q_RANK, HIDDEN, l, "self_attn.q_a_proj");
    vector(m, Q_RANK, l, "self_attn.q_a_layernorm");
    linear(m, fp8, HEADS * (NOPE + ROPE), Q_RANK, l, "self_attn.q_b_proj");
    linear(m, fp8, KV_RANK + ROPE, HIDDEN, l, "self_attn.kv_a_proj_with_mqa");
    vector(m, KV_RANK, l, "self_attn.kv_a_layernorm");
    linear(m, fp8, HEADS * 2 * NOPE, KV_RANK, l, "self_attn.kv_b_proj");
    linear(m, fp8, HIDDEN, HEADS * NOPE, l, "self_attn.o_proj");
    vector(m, HIDDEN, l, "post_attention_layernorm");
    if (l < DS_DENSE) {
        swiglu(m, fp8, HIDDEN, 18432, l, "mlp");
        return;
    }
    synth_add(m, "BF16", D2(DS_EXPERTS, HIDDEN), "model.layers.%d.mlp.gate.weight", l);
    synth_add(m, "F32", D1(DS_EXPERTS), "model.layers.%d.mlp.gate.e_score_correction_bias", l);
    for (int e = 0; e < DS_EXPERTS; e++) {
        snprintf(name, sizeof name, "mlp.experts.%d", e);
        swiglu(m, fp8, HIDDEN, 2048, l, name);
    }
    swiglu(m, fp8, HIDDEN, 2048, l, "mlp.shared_experts");
}

static void deepseek_config(synth_model *m, bool fp8)
{
    text t = {0};
    synth_put(&t,
              "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"attention_bias\":false,"
              "\"first_k_dense_replace\":%d,\"hidden_act\":\"silu\",\"hidden_size\":7168,"
              "\"intermediate_size\":18432,\"kv_lora_rank\":512,\"model_type\":\"deepseek_v3\","
              "\"moe_intermediate_size\":2048,\"moe_layer_freq\":1,\"n_group\":8,"
              "\"n_routed_experts\":%d,\"n_shared_experts\":1,\"norm_topk_prob\":true,",
              DS_DENSE, DS_EXPERTS);
    synth_put(&t,
              "\"max_position_embeddings\":163840,\"num_attention_heads\":128,"
              "\"num_experts_per_tok\":8,\"num_hidden_layers\":%d,\"num_key_value_heads\":128,"
              "\"num_nextn_predict_layers\":1,\"q_lora_rank\":1536,\"qk_nope_head_dim\":128,"
              "\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-06,\"rope_theta\":10000,"
              "\"rope_scaling\":{\"beta_fast\":32,\"beta_slow\":1,\"factor\":40,\"mscale\":1.0,"
              "\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096,"
              "\"type\":\"yarn\"},",
              DS_LAYERS);
    if (fp8)
        synth_put(&t, "\"quantization_config\":{\"activation_scheme\":\"dynamic\",\"fmt\":\"e4m3\","
                      "\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]},");
    synth_put(&t, "\"routed_scaling_factor\":2.5,\"scoring_func\":\"sigmoid\","
                  "\"tie_word_embeddings\":false,\"topk_group\":4,\"topk_method\":\"noaux_tc\","
                  "\"torch_dtype\":\"bfloat16\",\"v_head_dim\":128,\"vocab_size\":129280}\n");
    m->config = t.s;
}

void synth_deepseek671(synth_model *m, bool fp8)
{
    enum { HIDDEN = 7168, VOCAB = 129280 };
    memset(m, 0, sizeof *m);
    m->kind = SYNTH_HF;
    m->seed = 1;
    synth_add(m, "BF16", D2(VOCAB, HIDDEN), "model.embed_tokens.weight");
    for (int l = 0; l < DS_LAYERS; l++)
        deepseek_layer(m, fp8, l);
    synth_add(m, "BF16", D2(VOCAB, HIDDEN), "model.layers.%d.embed_tokens.weight", DS_LAYERS);
    vector(m, HIDDEN, DS_LAYERS, "enorm");
    vector(m, HIDDEN, DS_LAYERS, "hnorm");
    synth_add(m, "BF16", D2(HIDDEN, 2 * HIDDEN), "model.layers.%d.eh_proj.weight", DS_LAYERS);
    deepseek_layer(m, fp8, DS_LAYERS);
    vector(m, HIDDEN, DS_LAYERS, "shared_head.norm");
    synth_add(m, "BF16", D2(VOCAB, HIDDEN), "model.layers.%d.shared_head.head.weight", DS_LAYERS);
    synth_add(m, "BF16", D1(HIDDEN), "model.norm.weight");
    synth_add(m, "BF16", D2(VOCAB, HIDDEN), "lm_head.weight");
    deepseek_config(m, fp8);
}

void synth_byte(synth_model *m, uint64_t i)
{
    synth_add(m, "U8", D1(1), "layers.%llu.weight", (unsigned long long)i);
}
