/* Synthetic checkpoints; see synth.h. Names follow the published Kimi-Linear checkpoint and
 * Megatron-Core's hybrid model with KDA and MLA (sharded keys, per layer). */
#include "synth_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* ---- random numbers and contents -------------------------------------------------------------- */

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t synth_next(synth_rng *rng)
{
    return mix(rng->state += UINT64_C(0x9e3779b97f4a7c15));
}

uint64_t synth_below(synth_rng *rng, uint64_t n)
{
    return (synth_next(rng) >> 11) % n;
}

bool synth_coin(synth_rng *rng)
{
    return synth_below(rng, 2) == 1;
}

int64_t synth_pick(synth_rng *rng, const int64_t *values, size_t n)
{
    return values[synth_below(rng, n)];
}

typedef struct dtype_row {
    const char *name;
    size_t size;
    uint64_t mask; /* of eight bytes: clears the top exponent bit, so values stay finite */
} dtype_row;

static const dtype_row dtypes[] = {
    {"F32",     4, UINT64_C(0xbfffffffbfffffff)},
    {"BF16",    2, UINT64_C(0xbfffbfffbfffbfff)},
    {"F16",     2, UINT64_C(0xbfffbfffbfffbfff)},
    {"F64",     8, UINT64_C(0xbfffffffffffffff)},
    {"C64",     8, UINT64_C(0xbfffffffbfffffff)},
    {"I64",     8, UINT64_MAX                  },
    {"I32",     4, UINT64_MAX                  },
    {"I16",     2, UINT64_MAX                  },
    {"I8",      1, UINT64_MAX                  },
    {"U8",      1, UINT64_MAX                  },
    {"U16",     2, UINT64_MAX                  },
    {"U32",     4, UINT64_MAX                  },
    {"U64",     8, UINT64_MAX                  },
    {"BOOL",    1, UINT64_C(0x0101010101010101)},
    {"F8_E4M3", 1, UINT64_C(0xbfbfbfbfbfbfbfbf)},
    {"F8_E5M2", 1, UINT64_C(0xbfbfbfbfbfbfbfbf)},
};

static const dtype_row *dtype_find(const char *name)
{
    for (size_t i = 0; i < COUNT(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

size_t synth_itemsize(const char *dtype)
{
    const dtype_row *row = dtype_find(dtype);
    return row ? row->size : 0;
}

void synth_fill(const synth_tensor *t, uint64_t offset, void *out, size_t n)
{
    uint64_t mask = dtype_find(t->dtype)->mask;
    unsigned char *p = out;
    uint64_t word = offset / 8;
    size_t skip = (size_t)(offset % 8);
    while (n > 0) {
        uint64_t v = mix(t->seed + word * UINT64_C(0x9e3779b97f4a7c15)) & mask;
        size_t take = 8 - skip < n ? 8 - skip : n;
        memcpy(p, (const unsigned char *)&v + skip, take);
        p += take;
        n -= take;
        skip = 0;
        word++;
    }
}

/* ---- building --------------------------------------------------------------------------------- */

static void *grow(void *p, size_t bytes)
{
    p = realloc(p, bytes);
    if (!p) {
        fputs("synth: out of memory\n", stderr);
        abort();
    }
    return p;
}

static uint64_t hash_name(const char *s)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    return h;
}

void synth_add(synth_model *m, const char *dtype, dims4 dims, const char *fmt, ...)
{
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 64;
        m->tensors = grow(m->tensors, m->cap * sizeof *m->tensors);
    }
    synth_tensor *t = &m->tensors[m->n++];
    memset(t, 0, sizeof *t);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t->name, sizeof t->name, fmt, ap);
    va_end(ap);
    t->dtype = dtype;
    t->rank = dims.rank;
    t->bytes = synth_itemsize(dtype);
    for (int i = 0; i < dims.rank; i++) {
        t->dims[i] = dims.d[i];
        t->bytes *= (uint64_t)dims.d[i];
    }
    t->seed = mix(m->seed ^ hash_name(t->name));
    m->bytes += t->bytes;
}

void synth_put(text *t, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int need = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (t->n + (size_t)need + 1 > t->cap) {
        t->cap = 2 * t->cap + (size_t)need + 256;
        t->s = grow(t->s, t->cap);
    }
    vsnprintf(t->s + t->n, t->cap - t->n, fmt, again);
    va_end(again);
    t->n += (size_t)need;
}

void synth_release(synth_model *m)
{
    free(m->tensors);
    free(m->config);
    memset(m, 0, sizeof *m);
}

/* ---- Hugging Face Kimi-Linear ----------------------------------------------------------------- */

static void hf_kda(synth_model *m, const synth_sizes *s, int l)
{
    int64_t qk = s->nk * s->a, h = s->hidden;
    static const char *const qkv[] = {"q", "k", "v"};
    for (int i = 0; i < 3; i++) {
        synth_add(m, s->dtype, D2(qk, h), "model.layers.%d.self_attn.%s_proj.weight", l, qkv[i]);
        synth_add(m, s->dtype, D3(qk, 1, s->conv), "model.layers.%d.self_attn.%s_conv1d.weight", l,
                  qkv[i]);
    }
    synth_add(m, "F32", D4(1, 1, s->nk, 1), "model.layers.%d.self_attn.A_log", l);
    synth_add(m, "F32", D1(qk), "model.layers.%d.self_attn.dt_bias", l);
    synth_add(m, s->dtype, D2(s->rf, h), "model.layers.%d.self_attn.f_a_proj.weight", l);
    synth_add(m, s->dtype, D2(qk, s->rf), "model.layers.%d.self_attn.f_b_proj.weight", l);
    synth_add(m, s->dtype, D2(s->rg, h), "model.layers.%d.self_attn.g_a_proj.weight", l);
    synth_add(m, s->dtype, D2(qk, s->rg), "model.layers.%d.self_attn.g_b_proj.weight", l);
    synth_add(m, s->dtype, D2(s->nk, h), "model.layers.%d.self_attn.b_proj.weight", l);
    synth_add(m, s->dtype, D1(s->a), "model.layers.%d.self_attn.o_norm.weight", l);
    synth_add(m, s->dtype, D2(h, qk), "model.layers.%d.self_attn.o_proj.weight", l);
}

static void hf_mla(synth_model *m, const synth_sizes *s, int l)
{
    int64_t h = s->hidden;
    synth_add(m, s->dtype, D2(s->n * (s->dn + s->dr), h), "model.layers.%d.self_attn.q_proj.weight",
              l);
    synth_add(m, s->dtype, D2(s->rk + s->dr, h),
              "model.layers.%d.self_attn.kv_a_proj_with_mqa.weight", l);
    synth_add(m, s->dtype, D1(s->rk), "model.layers.%d.self_attn.kv_a_layernorm.weight", l);
    synth_add(m, s->dtype, D2(s->n * (s->dn + s->dv), s->rk),
              "model.layers.%d.self_attn.kv_b_proj.weight", l);
    synth_add(m, s->dtype, D2(h, s->n * s->dv), "model.layers.%d.self_attn.o_proj.weight", l);
}

static void hf_swiglu(synth_model *m, const synth_sizes *s, const char *prefix, int64_t width)
{
    synth_add(m, s->dtype, D2(width, s->hidden), "%s.gate_proj.weight", prefix);
    synth_add(m, s->dtype, D2(width, s->hidden), "%s.up_proj.weight", prefix);
    synth_add(m, s->dtype, D2(s->hidden, width), "%s.down_proj.weight", prefix);
}

static void hf_channel_mixer(synth_model *m, const synth_sizes *s, int l)
{
    char prefix[96];
    if (l < s->dense) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp", l);
        hf_swiglu(m, s, prefix, s->ffn);
        return;
    }
    snprintf(prefix, sizeof prefix, "model.layers.%d.block_sparse_moe", l);
    synth_add(m, s->dtype, D2(s->experts, s->hidden), "%s.gate.weight", prefix);
    synth_add(m, "F32", D1(s->experts), "%s.gate.e_score_correction_bias", prefix);
    for (int64_t e = 0; e < s->experts; e++) {
        synth_add(m, s->dtype, D2(s->expert_ffn, s->hidden), "%s.experts.%lld.w1.weight", prefix,
                  (long long)e);
        synth_add(m, s->dtype, D2(s->hidden, s->expert_ffn), "%s.experts.%lld.w2.weight", prefix,
                  (long long)e);
        synth_add(m, s->dtype, D2(s->expert_ffn, s->hidden), "%s.experts.%lld.w3.weight", prefix,
                  (long long)e);
    }
    snprintf(prefix, sizeof prefix, "model.layers.%d.block_sparse_moe.shared_experts", l);
    hf_swiglu(m, s, prefix, s->shared_ffn);
}

static const char *torch_dtype(const char *name)
{
    return strcmp(name, "BF16") == 0  ? "bfloat16"
           : strcmp(name, "F16") == 0 ? "float16"
                                      : "float32";
}

static void hf_layer_list(text *t, const char *mixers, char letter)
{
    const char *comma = "";
    synth_put(t, "[");
    for (int i = 0; mixers[i]; i++)
        if (mixers[i] == letter) {
            synth_put(t, "%s%d", comma, i + 1);
            comma = ",";
        }
    synth_put(t, "]");
}

static void hf_config(synth_model *m, const synth_sizes *s, const char *mixers)
{
    text t = {0};
#define INT(key, value) synth_put(&t, "\"%s\":%lld,", key, (long long)(value))
    synth_put(&t, "{\"architectures\":[\"KimiLinearForCausalLM\"],\"model_type\":\"kimi_linear\",");
    INT("hidden_size", s->hidden);
    INT("num_hidden_layers", s->layers);
    INT("vocab_size", s->vocab);
    INT("num_attention_heads", s->n);
    INT("num_key_value_heads", s->n);
    INT("head_dim", s->a);
    synth_put(&t, "\"linear_attn_config\":{\"full_attn_layers\":");
    hf_layer_list(&t, mixers, '+');
    synth_put(&t, ",\"head_dim\":%lld,\"kda_layers\":", (long long)s->a);
    hf_layer_list(&t, mixers, 'K');
    synth_put(&t, ",\"num_heads\":%lld,\"short_conv_kernel_size\":%lld},", (long long)s->nk,
              (long long)s->conv);
    synth_put(&t, "\"mla_use_nope\":true,\"q_lora_rank\":null,");
    INT("kv_lora_rank", s->rk);
    INT("qk_nope_head_dim", s->dn);
    INT("qk_rope_head_dim", s->dr);
    INT("v_head_dim", s->dv);
    INT("intermediate_size", s->ffn);
    INT("moe_intermediate_size", s->expert_ffn);
    INT("first_k_dense_replace", s->dense);
    INT("moe_layer_freq", 1);
    INT("num_experts", s->experts);
    INT("num_experts_per_token", s->topk);
    INT("num_shared_experts", s->shared_ffn / s->expert_ffn);
    INT("num_expert_group", 1);
    INT("topk_group", 1);
    synth_put(&t,
              "\"moe_router_activation_func\":\"sigmoid\",\"moe_renormalize\":true,"
              "\"use_grouped_topk\":true,\"routed_scaling_factor\":2.446,\"rms_norm_eps\":1e-05,"
              "\"rope_theta\":10000.0,\"hidden_act\":\"silu\",\"initializer_range\":0.02,"
              "\"bos_token_id\":1,\"eos_token_id\":2,\"pad_token_id\":0,"
              "\"model_max_length\":4096,\"use_cache\":true,");
    synth_put(&t, "\"tie_word_embeddings\":%s,\"torch_dtype\":\"%s\"}\n",
              s->tied ? "true" : "false", torch_dtype(s->dtype));
#undef INT
    m->config = t.s;
}

/* mixers: one letter K or + per layer. */
static void hf_model(synth_model *m, const synth_sizes *s, const char *mixers)
{
    synth_add(m, s->dtype, D2(s->vocab, s->hidden), "model.embed_tokens.weight");
    for (int l = 0; l < s->layers; l++) {
        synth_add(m, s->dtype, D1(s->hidden), "model.layers.%d.input_layernorm.weight", l);
        if (mixers[l] == 'K')
            hf_kda(m, s, l);
        else
            hf_mla(m, s, l);
        synth_add(m, s->dtype, D1(s->hidden), "model.layers.%d.post_attention_layernorm.weight", l);
        hf_channel_mixer(m, s, l);
    }
    synth_add(m, s->dtype, D1(s->hidden), "model.norm.weight");
    if (!s->tied)
        synth_add(m, s->dtype, D2(s->vocab, s->hidden), "lm_head.weight");
    hf_config(m, s, mixers);
}

/* ---- Megatron hybrid -------------------------------------------------------------------------- */

#define MG(...) "decoder.layers.%d." __VA_ARGS__

static void mg_kda(synth_model *m, const synth_sizes *s, int l)
{
    int64_t qk = s->nk * s->a, h = s->hidden;
    static const char *const qkv[] = {"query", "key", "value"};
    bool fused = s->rf == 0 && s->rg == 0;
    for (int i = 0; i < 3; i++) {
        synth_add(m, s->dtype, D2(qk, h), MG("self_attention.in_proj.weight.%s"), l, qkv[i]);
        synth_add(m, s->dtype, D3(qk, 1, s->conv), MG("self_attention.conv1d.weight.%s"), l,
                  qkv[i]);
    }
    if (s->rf > 0) {
        synth_add(m, s->dtype, D2(s->rf, h), MG("self_attention.f_a_proj.weight"), l);
        synth_add(m, s->dtype, D2(qk, s->rf), MG("self_attention.f_b_proj.weight"), l);
    } else if (fused) {
        synth_add(m, s->dtype, D2(qk, h), MG("self_attention.in_proj.weight.g"), l);
    } else {
        synth_add(m, s->dtype, D2(qk, h), MG("self_attention.f_proj.weight"), l);
    }
    if (s->rg > 0) {
        synth_add(m, s->dtype, D2(s->rg, h), MG("self_attention.g_a_proj.weight"), l);
        synth_add(m, s->dtype, D2(qk, s->rg), MG("self_attention.g_b_proj.weight"), l);
    } else if (fused) {
        synth_add(m, s->dtype, D2(qk, h), MG("self_attention.in_proj.weight.gate"), l);
    } else {
        synth_add(m, s->dtype, D2(qk, h), MG("self_attention.g_proj.weight"), l);
    }
    synth_add(m, s->dtype, D2(s->nk, h), MG("self_attention.beta_proj.weight"), l);
    synth_add(m, "F32", D1(s->nk), MG("self_attention.A_log"), l);
    synth_add(m, "F32", D1(qk), MG("self_attention.dt_bias"), l);
    synth_add(m, s->dtype, D1(s->a), MG("self_attention.out_norm.weight"), l);
    synth_add(m, s->dtype, D2(h, qk), MG("self_attention.out_proj.weight"), l);
}

static void mg_mla(synth_model *m, const synth_sizes *s, int l)
{
    int64_t h = s->hidden, q = s->n * (s->dn + s->dr);
    if (s->rq > 0) {
        synth_add(m, s->dtype, D2(s->rq, h), MG("self_attention.linear_q_down_proj.weight"), l);
        synth_add(m, s->dtype, D2(q, s->rq), MG("self_attention.linear_q_up_proj.weight"), l);
    } else {
        synth_add(m, s->dtype, D2(q, h), MG("self_attention.linear_q_proj.weight"), l);
    }
    synth_add(m, s->dtype, D2(s->rk + s->dr, h), MG("self_attention.linear_kv_down_proj.weight"),
              l);
    synth_add(m, s->dtype, D2(s->n * (s->dn + s->dv), s->rk),
              MG("self_attention.linear_kv_up_proj.weight"), l);
    synth_add(m, s->dtype, D2(h, s->n * s->dv), MG("self_attention.linear_proj.weight"), l);
    if (!s->latent_norm)
        return;
    if (s->latent_fused) {
        synth_add(m, s->dtype, D1(s->rk), MG("self_attention.linear_kv_up_proj.layer_norm_weight"),
                  l);
        if (s->rq > 0)
            synth_add(m, s->dtype, D1(s->rq),
                      MG("self_attention.linear_q_up_proj.layer_norm_weight"), l);
    } else {
        synth_add(m, s->dtype, D1(s->rk), MG("self_attention.kv_layernorm.weight"), l);
        if (s->rq > 0)
            synth_add(m, s->dtype, D1(s->rq), MG("self_attention.q_layernorm.weight"), l);
    }
}

static void mg_moe(synth_model *m, const synth_sizes *s, int l)
{
    int64_t h = s->hidden, e = s->experts, f = s->expert_ffn;
    synth_add(m, s->dtype, D1(h), MG("pre_mlp_layernorm.weight"), l);
    synth_add(m, s->dtype, D2(e, h), MG("mlp.router.weight"), l);
    if (s->router_bias)
        synth_add(m, "F32", D1(e), MG("mlp.router.expert_bias"), l);
    synth_add(m, s->dtype, D3(e, 2 * f, h), MG("mlp.experts.experts.linear_fc1.weight"), l);
    synth_add(m, s->dtype, D3(e, h, f), MG("mlp.experts.experts.linear_fc2.weight"), l);
    if (s->shared_ffn > 0) {
        synth_add(m, s->dtype, D2(2 * s->shared_ffn, h), MG("mlp.shared_experts.linear_fc1.weight"),
                  l);
        synth_add(m, s->dtype, D2(h, s->shared_ffn), MG("mlp.shared_experts.linear_fc2.weight"), l);
    }
}

void synth_put_int(text *t, const char *key, int64_t value)
{
    if (value > 0)
        synth_put(t, "\"%s\":%lld,", key, (long long)value);
    else
        synth_put(t, "\"%s\":null,", key);
}

static void mg_config(synth_model *m, const synth_sizes *s)
{
    text t = {0};
    synth_put(&t, "{\"hybrid_layer_pattern\":\"%s\",", m->pattern);
    synth_put_int(&t, "num_layers", (int64_t)strlen(m->pattern));
    synth_put_int(&t, "hidden_size", s->hidden);
    synth_put_int(&t, "num_attention_heads", s->n);
    synth_put_int(&t, "kv_channels", s->a);
    synth_put_int(&t, "ffn_hidden_size", s->ffn);
    synth_put_int(&t, "vocab_size", s->vocab);
    synth_put_int(&t, "padded_vocab_size", s->vocab);
    synth_put_int(&t, "make_vocab_size_divisible_by", 128);
    synth_put_int(&t, "q_lora_rank", s->rq);
    synth_put_int(&t, "kv_lora_rank", s->rk);
    synth_put_int(&t, "qk_head_dim", s->dn);
    synth_put_int(&t, "qk_pos_emb_head_dim", s->dr);
    synth_put_int(&t, "v_head_dim", s->dv);
    synth_put_int(&t, "linear_conv_kernel_dim", s->conv);
    synth_put_int(&t, "linear_key_head_dim", s->a);
    synth_put_int(&t, "linear_value_head_dim", s->a);
    synth_put_int(&t, "linear_num_key_heads", s->nk);
    synth_put_int(&t, "linear_num_value_heads", s->nk);
    synth_put_int(&t, "kda_f_lora_rank", s->rf);
    synth_put_int(&t, "kda_gate_lora_rank", s->rg);
    synth_put_int(&t, "num_experts", s->experts);
    synth_put_int(&t, "moe_ffn_hidden_size", s->expert_ffn);
    synth_put_int(&t, "moe_router_topk", s->topk);
    synth_put_int(&t, "moe_shared_expert_intermediate_size", s->shared_ffn);
    synth_put(&t, "\"multi_latent_attention\":true,\"rotary_base\":10000,\"rope_type\":\"rope\",");
    synth_put(&t, "\"position_embedding_type\":\"%s\",", s->rope ? "rope" : "none");
    synth_put(&t, "\"qk_layernorm\":%s,", s->latent_norm ? "true" : "false");
    synth_put(&t, "\"kda_safe_gate\":%s,", s->safe_gate ? "true" : "false");
    synth_put(&t, "\"kda_lower_bound\":%s,", s->safe_gate ? "-5.0" : "null");
    synth_put(&t,
              "\"moe_router_score_function\":\"sigmoid\",\"moe_router_topk_scaling_factor\":2.5,");
    synth_put(&t, "\"moe_router_enable_expert_bias\":%s,", s->router_bias ? "true" : "false");
    synth_put(&t, "\"normalization\":\"RMSNorm\",\"norm_epsilon\":1e-06,\"swiglu\":true,"
                  "\"add_bias_linear\":false,");
    synth_put(&t, "\"untie_embeddings_and_output_weights\":%s}", s->tied ? "false" : "true");
    m->config = t.s;
}

/* m->pattern: one letter per block. */
static void mg_model(synth_model *m, const synth_sizes *s)
{
    synth_add(m, s->dtype, D2(s->vocab, s->hidden), "embedding.word_embeddings.weight");
    for (int l = 0; m->pattern[l]; l++) {
        char kind = m->pattern[l];
        if (kind == 'K' || kind == '+')
            synth_add(m, s->dtype, D1(s->hidden), MG("input_layernorm.weight"), l);
        if (kind == 'K') {
            mg_kda(m, s, l);
        } else if (kind == '+') {
            mg_mla(m, s, l);
        } else if (kind == 'E') {
            mg_moe(m, s, l);
        } else {
            /* Transformer Engine fuses norms into the linears that follow, everywhere or nowhere. */
            synth_add(m, s->dtype, D1(s->hidden),
                      s->latent_fused ? MG("mlp.linear_fc1.layer_norm_weight")
                                      : MG("pre_mlp_layernorm.weight"),
                      l);
            synth_add(m, s->dtype, D2(2 * s->ffn, s->hidden), MG("mlp.linear_fc1.weight"), l);
            synth_add(m, s->dtype, D2(s->hidden, s->ffn), MG("mlp.linear_fc2.weight"), l);
        }
    }
    synth_add(m, s->dtype, D1(s->hidden), "decoder.final_norm.weight");
    if (!s->tied)
        synth_add(m, s->dtype, D2(s->vocab, s->hidden), "output_layer.weight");
    mg_config(m, s);
}

/* ---- drawing ---------------------------------------------------------------------------------- */

static const char *const weight_dtypes[] = {"BF16", "F16", "F32"};

synth_sizes synth_draw_sizes(synth_rng *rng)
{
    static const int64_t hidden[] = {8, 16, 24, 40}, heads[] = {2, 4, 8}, dim[] = {2, 4, 6, 8},
                         vocab[] = {17, 40, 131, 1024, 1024}, ranks[] = {4, 8, 12},
                         widths[] = {8, 16, 24}, experts[] = {2, 4, 6, 8}, conv[] = {2, 4};
#define PICK(set) synth_pick(rng, set, COUNT(set))
    synth_sizes s = {0};
    s.hidden = PICK(hidden);
    s.vocab = PICK(vocab);
    s.nk = PICK(heads);
    s.a = PICK(dim);
    s.conv = PICK(conv);
    s.n = PICK(heads);
    s.rk = PICK(ranks);
    s.dn = PICK(dim);
    s.dr = PICK(dim);
    s.dv = PICK(dim);
    s.ffn = PICK(widths);
    s.experts = PICK(experts);
    s.expert_ffn = PICK(widths);
    s.shared_ffn = s.expert_ffn * (1 + (int64_t)synth_below(rng, 2));
    s.topk = 1 + (int64_t)synth_below(rng, 2);
    s.tied = synth_below(rng, 4) == 0;
    s.router_bias = true;
    s.latent_norm = true;
    s.dtype = weight_dtypes[synth_below(rng, COUNT(weight_dtypes))];
    s.rf = s.rg = s.a;
    if (synth_coin(rng))
        s.rq = PICK(ranks);
#undef PICK
    return s;
}

int64_t synth_gcd(int64_t a, int64_t b)
{
    return b == 0 ? a : synth_gcd(b, a % b);
}

void synth_set_units(synth_model *m, const synth_sizes *s)
{
    m->tp_unit = 8;
    if (strchr(m->pattern, 'K'))
        m->tp_unit = synth_gcd(m->tp_unit, s->nk);
    if (strchr(m->pattern, '+'))
        m->tp_unit = synth_gcd(m->tp_unit, s->n);
    m->tp_unit = synth_gcd(m->tp_unit, synth_gcd(s->ffn, s->shared_ffn ? s->shared_ffn : 8));
    m->etp_unit = synth_gcd(8, s->expert_ffn);
    m->experts = strchr(m->pattern, 'E') ? s->experts : 1;
    m->blocks = (int64_t)strlen(m->pattern);
    m->vocab_fits = s->vocab % (8 * 128) == 0; /* Megatron pads to 128 rows per TP rank */
}

static void random_hf(synth_model *m, synth_rng *rng)
{
    synth_sizes s = synth_draw_sizes(rng);
    char mixers[8] = "";
    s.layers = 1 + (int)synth_below(rng, 4);
    s.dense = (int)synth_below(rng, (uint64_t)s.layers + 1);
    s.rq = 0;
    s.topk = 2; /* Megatron does not normalise the weight of a single expert, as this model does */
    for (int l = 0; l < s.layers; l++) {
        mixers[l] = synth_below(rng, 3) == 0 ? '+' : 'K';
        m->pattern[2 * l] = mixers[l];
        m->pattern[2 * l + 1] = l < s.dense ? '-' : 'E';
    }
    synth_set_units(m, &s);
    m->blocks = s.layers; /* a pipeline stage may not cut a layer */
    hf_model(m, &s, mixers);
}

static void random_megatron(synth_model *m, synth_rng *rng)
{
    static const char letters[] = "KKK++-E";
    static const int64_t ranks[] = {0, 0, 1, 3, 4, 8};
    synth_sizes s = synth_draw_sizes(rng);
    int blocks = 1 + (int)synth_below(rng, 7);
    for (int i = 0; i < blocks; i++)
        m->pattern[i] = letters[synth_below(rng, sizeof letters - 1)];
    s.rf = synth_pick(rng, ranks, COUNT(ranks));
    s.rg = synth_pick(rng, ranks, COUNT(ranks));
    s.latent_fused = synth_coin(rng);
    s.latent_norm = synth_below(rng, 4) != 0;
    s.router_bias = synth_below(rng, 4) != 0;
    s.safe_gate = synth_coin(rng);
    s.rope = synth_coin(rng);
    if (synth_below(rng, 4) == 0)
        s.shared_ffn = 0;
    synth_set_units(m, &s);
    mg_model(m, &s);
}

static void random_plain(synth_model *m, synth_rng *rng)
{
    static const int64_t extents[] = {0, 1, 1, 2, 3, 5, 7, 8, 16, 33};
    size_t n = 1 + (size_t)synth_below(rng, 12);
    for (size_t i = 0; i < n; i++) {
        dims4 d = {
            (int)synth_below(rng, 5), {0, 0, 0, 0}
        };
        for (int k = 0; k < d.rank; k++)
            d.d[k] = synth_pick(rng, extents, COUNT(extents));
        synth_add(m, dtypes[synth_below(rng, COUNT(dtypes))].name, d, "t%zu.%s", i,
                  synth_coin(rng) ? "weight" : "x/y z");
    }
    m->tp_unit = m->etp_unit = m->experts = m->blocks = 1;
}

/* ---- optimizer state -------------------------------------------------------------------------- */

/* Half of the models have one: Adam's moments, perhaps a master copy, perhaps steps, in one of the
 * spellings that are written somewhere. Buffers and, sometimes, one frozen layer have none. */
static void draw_states(synth_model *m, synth_rng *rng)
{
    static const char *const first[][3] = {
        {"exp_avg",         "exp_avg_sq", "param"       },
        {"exp_avg",         "exp_avg_sq", "fp32_param"  },
        {"momentum_buffer", "fp32_param", "exp_avg_norm"},
        {"exp_avg",         "exp_avg_sq", "step"        }
    };
    size_t n = m->n, which = (size_t)synth_below(rng, m->kind == SYNTH_HF ? 6 : 4);
    bool frozen = synth_coin(rng), last = which >= 4;
    static const char *const suffix[] = {"exp_avg", "exp_avg_sq", "step"};
    if (synth_coin(rng))
        return;
    m->frozen = frozen;
    for (size_t i = 0; i < n; i++) {
        const synth_tensor t = m->tensors[i];
        if (strstr(t.name, "bias") != NULL || (frozen && strstr(t.name, "layers.0.") != NULL))
            continue;
        for (int k = 0; k < 3; k++) {
            const char *state = last ? suffix[k] : first[which][k];
            bool step = strcmp(state, "step") == 0;
            dims4 dims = {
                step ? 0 : t.rank, {t.dims[0], t.dims[1], t.dims[2], t.dims[3]}
            };
            if (last)
                synth_add(m, "F32", dims, "%s.state.%s.%s", which == 4 ? "optim" : "optimizer",
                          t.name, state);
            else
                synth_add(m, "F32", dims, "optimizer.state.%s.%s", state, t.name);
            if (step) /* fused parameters share theirs */
                m->tensors[m->n - 1].seed = mix(m->seed);
        }
    }
}

void synth_random(synth_model *m, synth_kind kind, uint64_t seed)
{
    memset(m, 0, sizeof *m);
    m->kind = kind;
    m->seed = seed;
    synth_rng rng = {mix(seed + 1)};
    switch (kind) {
    case SYNTH_HF:
        random_hf(m, &rng);
        break;
    case SYNTH_MEGATRON:
        if (synth_coin(&rng))
            synth_random_gpt(m, &rng);
        else
            random_megatron(m, &rng);
        break;
    case SYNTH_PLAIN:
        random_plain(m, &rng);
        break;
    }
    if (kind != SYNTH_PLAIN)
        draw_states(m, &rng);
}

/* ---- a sized model ---------------------------------------------------------------------------- */

void synth_kimi_sized(synth_model *m, const synth_sizes *s, uint64_t seed)
{
    char mixers[512] = "";
    memset(m, 0, sizeof *m);
    m->kind = SYNTH_HF;
    m->seed = seed;
    for (int l = 0; l < s->layers; l++)
        mixers[l] = l % 4 == 3 ? '+' : 'K'; /* the published ratio 3:1 */
    hf_model(m, s, mixers);
}

synth_sizes synth_kimi_sizes(void)
{
    return (synth_sizes){.hidden = 2304,
                         .vocab = 163840,
                         .nk = 32,
                         .a = 128,
                         .conv = 4,
                         .rf = 128,
                         .rg = 128,
                         .n = 32,
                         .rk = 512,
                         .dn = 128,
                         .dr = 64,
                         .dv = 128,
                         .ffn = 9216,
                         .expert_ffn = 1024,
                         .shared_ffn = 1024,
                         .topk = 8,
                         .router_bias = true,
                         .latent_norm = true,
                         .dtype = "BF16",
                         .dense = 1};
}

bool synth_kimi(synth_model *m, uint64_t size, int64_t experts, uint64_t seed)
{
    synth_sizes s = synth_kimi_sizes();
    s.vocab = 8192;
    if (size < UINT64_C(1) << 30) { /* leave room for experts in small models */
        s.vocab = 1024;
        s.ffn = 1024;
        s.nk = s.n = 8;
    }
    /* Grow experts (four layers) or layers (experts given) while the model still fits. */
    bool fits = false;
    for (int step = 0; step < 500; step++) {
        synth_sizes next = s;
        next.layers = experts > 0 ? 4 + step : 4;
        next.experts = experts > 0 ? experts : 4 * (step + 1);
        next.topk = next.experts < 8 ? next.experts : 8;
        synth_model trial;
        synth_kimi_sized(&trial, &next, seed);
        bool ok = trial.bytes <= size;
        if (ok) {
            if (fits)
                synth_release(m);
            *m = trial;
            fits = true;
        } else {
            synth_release(&trial);
            break;
        }
    }
    return fits;
}
