/* Synthetic Megatron-Core GPT models: stacked and layer by layer, attention and GDN, dense and MoE,
 * with and without multi-token prediction. Keys as in tests/peers/gen_mcore_gpt.py and
 * megatron-dist-ckpt.md section 3. */
#include "synth_internal.h"

#include <stdio.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* Where a layer's tensors go: one by one below prefix, or stacked over `stack` layers. */
typedef struct gpt_place {
    char prefix[64];
    int64_t stack; /* 0: not stacked */
} gpt_place;

static void gpt_add(synth_model *m, const char *dtype, const gpt_place *p, dims4 dims,
                    const char *key)
{
    if (p->stack > 0) {
        for (int k = dims.rank; k > 0; k--)
            dims.d[k] = dims.d[k - 1];
        dims.d[0] = p->stack;
        dims.rank++;
    }
    synth_add(m, dtype, dims, "%s%s", p->prefix, key);
}

static void gpt_mixer(synth_model *m, const synth_sizes *s, const gpt_place *p, char kind)
{
    int64_t h = s->hidden, qk = s->gk * s->ga, v = s->gv * s->gb;
#define ADD(dims, key) gpt_add(m, s->dtype, p, dims, "self_attention." key)
    if (kind == 'G') {
        ADD(D1(h), "in_proj.layer_norm_weight");
        ADD(D2(qk, h), "in_proj.weight.query");
        ADD(D2(qk, h), "in_proj.weight.key");
        ADD(D2(v, h), "in_proj.weight.value");
        ADD(D2(v, h), "in_proj.weight.z");
        ADD(D2(s->gv, h), "in_proj.weight.beta");
        ADD(D2(s->gv, h), "in_proj.weight.alpha");
        ADD(D3(qk, 1, s->conv), "conv1d.weight.query");
        ADD(D3(qk, 1, s->conv), "conv1d.weight.key");
        ADD(D3(v, 1, s->conv), "conv1d.weight.value");
        ADD(D1(s->gv), "A_log");
        ADD(D1(s->gv), "dt_bias");
        ADD(D1(s->gb), "out_norm.weight");
        ADD(D2(h, v), "out_proj.weight");
        return;
    }
    int64_t rows = ((s->gate ? 2 : 1) * s->n + 2 * s->groups) * s->head_dim;
    if (s->latent_fused)
        ADD(D1(h), "linear_qkv.layer_norm_weight");
    else
        gpt_add(m, s->dtype, p, D1(h), "input_layernorm.weight");
    ADD(D2(rows, h), "linear_qkv.weight");
    if (s->qkv_bias)
        ADD(D1(rows), "linear_qkv.bias");
    if (s->qk_norm) {
        ADD(D1(s->head_dim), "q_layernorm.weight");
        ADD(D1(s->head_dim), "k_layernorm.weight");
    }
    ADD(D2(h, s->n * s->head_dim), "linear_proj.weight");
#undef ADD
}

static void gpt_channel(synth_model *m, const synth_sizes *s, const gpt_place *p, bool moe)
{
    int64_t h = s->hidden, parts = s->plain_mlp ? 1 : 2;
#define ADD(dims, key) gpt_add(m, s->dtype, p, dims, key)
    if (!moe) {
        ADD(D1(h), "mlp.linear_fc1.layer_norm_weight");
        ADD(D2(parts * s->ffn, h), "mlp.linear_fc1.weight");
        ADD(D2(h, s->ffn), "mlp.linear_fc2.weight");
        return;
    }
    ADD(D1(h), "pre_mlp_layernorm.weight");
    ADD(D2(s->experts, h), "mlp.router.weight");
    ADD(D3(s->experts, parts * s->expert_ffn, h), "mlp.experts.experts.linear_fc1.weight");
    ADD(D3(s->experts, h, s->expert_ffn), "mlp.experts.experts.linear_fc2.weight");
    ADD(D2(parts * s->shared_ffn, h), "mlp.shared_experts.linear_fc1.weight");
    ADD(D2(h, s->shared_ffn), "mlp.shared_experts.linear_fc2.weight");
#undef ADD
}

static void gpt_freq(text *t, const synth_model *m, const synth_sizes *s, int offset, char yes)
{
    for (int l = 0; l < s->layers; l++)
        synth_put(t, "%s%d", l ? "," : "[", m->pattern[2 * l + offset] == yes);
    synth_put(t, "],");
}

static void gpt_config(synth_model *m, const synth_sizes *s, bool stacked)
{
    text t = {0};
    bool moe = strchr(m->pattern, 'E') != NULL, gdn = strchr(m->pattern, 'G') != NULL;
    synth_put(&t, "{");
    synth_put_int(&t, "num_layers", s->layers);
    synth_put_int(&t, "mtp_num_layers", s->depths);
    synth_put_int(&t, "hidden_size", s->hidden);
    synth_put_int(&t, "num_attention_heads", s->n);
    synth_put_int(&t, "num_query_groups", s->groups);
    synth_put_int(&t, "kv_channels", s->head_dim);
    synth_put_int(&t, "ffn_hidden_size", s->ffn);
    synth_put_int(&t, "vocab_size", s->vocab);
    synth_put_int(&t, "padded_vocab_size", s->vocab);
    synth_put(&t,
              "\"group_query_attention\":true,\"rotary_base\":10000,\"norm_epsilon\":1e-06,"
              "\"position_embedding_type\":\"rope\",\"normalization\":\"RMSNorm\","
              "\"init_method_std\":0.02,\"qk_layernorm\":%s,\"add_qkv_bias\":%s,",
              s->qk_norm ? "true" : "false", s->qkv_bias ? "true" : "false");
    synth_put(&t,
              "\"attention_output_gate\":%s,\"apply_layernorm_1p\":%s,\"swiglu\":%s,"
              "\"squared_relu\":%s,",
              s->gate ? "true" : "false", s->centered ? "true" : "false",
              s->plain_mlp ? "false" : "true", s->plain_mlp ? "true" : "false");
    if (moe) {
        synth_put_int(&t, "num_experts", s->experts);
        synth_put_int(&t, "moe_ffn_hidden_size", s->expert_ffn);
        synth_put_int(&t, "moe_router_topk", s->topk);
        synth_put_int(&t, "moe_shared_expert_intermediate_size", s->shared_ffn);
        synth_put(&t, "\"moe_layer_freq\":");
        if (stacked)
            synth_put(&t, "1,");
        else
            gpt_freq(&t, m, s, 1, 'E');
    }
    if (gdn) {
        synth_put_int(&t, "linear_num_key_heads", s->gk);
        synth_put_int(&t, "linear_num_value_heads", s->gv);
        synth_put_int(&t, "linear_key_head_dim", s->ga);
        synth_put_int(&t, "linear_value_head_dim", s->gb);
        synth_put_int(&t, "linear_conv_kernel_dim", s->conv);
        synth_put(&t, "\"experimental_attention_variant\":\"gated_delta_net\",");
        synth_put(&t, "\"linear_attention_freq\":");
        gpt_freq(&t, m, s, 0, 'G');
    }
    synth_put(&t, "\"untie_embeddings_and_output_weights\":%s}", s->tied ? "false" : "true");
    m->config = t.s;
}

/* m->pattern: two letters a layer, those of the depths last. */
static void gpt_model(synth_model *m, const synth_sizes *s, bool stacked)
{
    synth_add(m, s->dtype, D2(s->vocab, s->hidden), "embedding.word_embeddings.weight");
    for (int l = 0; l < (stacked ? 1 : s->layers); l++) {
        gpt_place p = {.stack = stacked ? s->layers : 0};
        if (stacked)
            snprintf(p.prefix, sizeof p.prefix, "decoder.layers.");
        else
            snprintf(p.prefix, sizeof p.prefix, "decoder.layers.%d.", l);
        gpt_mixer(m, s, &p, m->pattern[2 * l]);
        gpt_channel(m, s, &p, m->pattern[2 * l + 1] == 'E');
    }
    for (int d = 0; d < s->depths; d++) {
        gpt_place p = {.stack = 0};
        int64_t h = s->hidden;
        snprintf(p.prefix, sizeof p.prefix, "mtp.layers.%d.", d);
        gpt_add(m, s->dtype, &p, D1(h), "enorm.weight");
        gpt_add(m, s->dtype, &p, D1(h), "hnorm.weight");
        gpt_add(m, s->dtype, &p, D2(h, 2 * h), "eh_proj.weight");
        gpt_add(m, s->dtype, &p, D1(h), "final_layernorm.weight");
        snprintf(p.prefix, sizeof p.prefix, "mtp.layers.%d.transformer_layer.", d);
        gpt_mixer(m, s, &p, m->pattern[2 * (s->layers + d)]);
        gpt_channel(m, s, &p, m->pattern[2 * (s->layers + d) + 1] == 'E');
    }
    synth_add(m, s->dtype, D1(s->hidden), "decoder.final_layernorm.weight");
    if (!s->tied)
        synth_add(m, s->dtype, D2(s->vocab, s->hidden), "output_layer.weight");
    gpt_config(m, s, stacked);
}

void synth_random_gpt(synth_model *m, synth_rng *rng)
{
    static const int64_t dim[] = {2, 4, 6, 8};
    synth_sizes s = synth_draw_sizes(rng);
    uint64_t mixers = synth_below(rng, 3), mlps = synth_below(rng, 3); /* 2: mixed */
    s.layers = 1 + (int)synth_below(rng, 4);
    s.depths = synth_coin(rng) ? 0 : 1 + (int)synth_below(rng, 2);
    s.groups = s.n / (1 + (int64_t)synth_below(rng, 2));
    s.head_dim = synth_pick(rng, dim, COUNT(dim));
    s.ga = synth_pick(rng, dim, COUNT(dim));
    s.gb = synth_pick(rng, dim, COUNT(dim));
    s.gk = 2;
    s.gv = 2 * (1 + (int64_t)synth_below(rng, 2));
    s.latent_fused = synth_coin(rng);
    s.qk_norm = synth_coin(rng);
    s.gate = synth_coin(rng);
    s.qkv_bias = !s.gate && synth_coin(rng);
    s.centered = synth_coin(rng);
    s.plain_mlp = synth_coin(rng);
    for (int l = 0; l < s.layers + s.depths; l++) {
        bool gdn = mixers == 1 ? false : mixers == 2 ? synth_coin(rng) : false;
        bool moe = mlps == 1 ? true : mlps == 2 ? synth_coin(rng) : false;
        m->pattern[2 * l] = l < s.layers ? (gdn ? 'G' : '*') : m->pattern[2 * s.layers - 2];
        m->pattern[2 * l + 1] = l < s.layers ? (moe ? 'E' : '-') : m->pattern[2 * s.layers - 1];
    }
    bool stacked = mlps < 2 && strchr(m->pattern, 'G') == NULL;
    synth_set_units(m, &s);
    m->tp_unit =
        synth_gcd(m->tp_unit, synth_gcd(s.groups, strchr(m->pattern, 'G') != NULL ? s.gk : 8));
    m->tp_unit = synth_gcd(m->tp_unit, synth_gcd(s.hidden, s.n));
    m->blocks = s.layers;
    gpt_model(m, &s, stacked);
}
