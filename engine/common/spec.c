/* Canonical configuration to block descriptions, and the operation count. */
#include "spec.h"

#include <stdio.h>
#include <string.h>

#include "checked.h"

typedef struct reader {
    const ckpt_model *model;
    const ckpt_json *c;
    ckpt_err *err;
    ckpt_status status; /* of the first failure */
} reader;

static int64_t size_of(reader *r, const char *key)
{
    int64_t v = 0;
    if (ckpt_json_int(ckpt_json_get(r->c, key), &v) && v > 0)
        return v;
    if (r->status == CKPT_OK)
        r->status =
            ckpt_fail(r->err, CKPT_E_FORMAT, "field '%s' is missing: the engine needs it", key);
    return 1;
}

static int64_t size_or(const reader *r, const char *key, int64_t absent)
{
    int64_t v = 0;
    return ckpt_json_int(ckpt_json_get(r->c, key), &v) ? v : absent;
}

static double number_or(const reader *r, const char *key, double absent)
{
    double v = 0;
    return ckpt_json_double(ckpt_json_get(r->c, key), &v) ? v : absent;
}

static bool flag(const reader *r, const char *key)
{
    bool v = false;
    return ckpt_json_bool(ckpt_json_get(r->c, key), &v) && v;
}

static bool says(const reader *r, const char *key, const char *value)
{
    const char *s = ckpt_json_string(ckpt_json_get(r->c, key));
    return s != NULL && strcmp(s, value) == 0;
}

static bool has(const reader *r, int64_t block, const char *rest)
{
    char name[160];
    snprintf(name, sizeof name, "blocks.%lld.%s", (long long)block, rest);
    return ckpt_model_find(r->model, name) >= 0;
}

/* ---- rotary embedding ------------------------------------------------------------------------ */

static double scaling(reader *r, const char *key, double absent)
{
    double v = 0;
    const ckpt_json *j = ckpt_json_get(ckpt_json_get(r->c, "rope_scaling"), key);
    if (ckpt_json_double(j, &v))
        return v;
    if (absent < 0 && r->status == CKPT_OK)
        r->status = ckpt_fail(r->err, CKPT_E_FORMAT, "field 'rope_scaling.%s' is missing", key);
    return absent;
}

static ckpt_eng_rope read_rope(reader *r, int64_t dim, bool interleaved)
{
    ckpt_eng_rope p = {.kind = CKPT_ENG_ROPE_PLAIN, .interleaved = interleaved, .dim = dim};
    p.base = number_or(r, "rope_theta", 0);
    if (p.base <= 1 && r->status == CKPT_OK)
        r->status = ckpt_fail(r->err, CKPT_E_FORMAT, "field 'rope_theta' is missing");
    if (says(r, "rope_type", "yarn")) {
        p.kind = CKPT_ENG_ROPE_YARN;
        p.factor = scaling(r, "factor", -1);
        p.original_max = scaling(r, "original_max_position_embeddings", -1);
        p.beta_fast = scaling(r, "beta_fast", 32);
        p.beta_slow = scaling(r, "beta_slow", 1);
        p.mscale = scaling(r, "mscale", 1);
        p.mscale_all_dim = scaling(r, "mscale_all_dim", 0);
    } else if (says(r, "rope_type", "llama3")) {
        p.kind = CKPT_ENG_ROPE_LLAMA3;
        p.factor = scaling(r, "factor", -1);
        p.original_max = scaling(r, "original_max_position_embeddings", -1);
        p.low_freq_factor = scaling(r, "low_freq_factor", -1);
        p.high_freq_factor = scaling(r, "high_freq_factor", -1);
    }
    return p;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void read_kda(reader *r, ckpt_eng_spec *s, const ckpt_eng_spec_opts *o, int64_t i,
                     ckpt_eng_linattn *b)
{
    const ckpt_quant *quant = o != NULL ? ckpt_policy_of(o->policy, (int)i) : NULL;
    b->delta.rule = CKPT_ENG_KDA;
    b->delta.H = b->delta.HV = size_of(r, "kda_heads");
    b->delta.K = size_of(r, "kda_key_dim");
    b->delta.V = size_of(r, "kda_value_dim");
    b->W = size_of(r, "kda_conv");
    b->f_rank = has(r, i, "kda.f_a.weight") ? size_of(r, "kda_f_rank") : 0;
    b->z_rank = has(r, i, "kda.g_a.weight") ? size_of(r, "kda_gate_rank") : 0;
    b->bound = flag(r, "kda_safe_gate") ? number_or(r, "kda_lower_bound", 0) : 0;
    b->delta.safe = b->bound < 0 && b->bound >= -5;
    b->act = CKPT_ENG_SIGMOID;
    b->eps = s->eps;
    b->quant = quant != NULL && quant->enabled ? quant : NULL;
    b->quant_report = o != NULL ? o->quant_report : NULL;
}

static void read_gdn(reader *r, ckpt_eng_spec *s, bool second, ckpt_eng_linattn *b)
{
    b->delta.rule = second ? CKPT_ENG_GDN2 : CKPT_ENG_GDN;
    b->delta.H = size_of(r, "gdn_key_heads");
    b->delta.HV = size_of(r, "gdn_value_heads");
    b->delta.K = size_of(r, "gdn_key_dim");
    b->delta.V = size_of(r, "gdn_value_dim");
    b->W = size_of(r, "gdn_conv");
    b->key_gates = second;
    b->act = CKPT_ENG_SILU;
    b->eps = s->eps;
}

static void read_mla(reader *r, ckpt_eng_spec *s, const ckpt_eng_spec_opts *o, int64_t i,
                     ckpt_eng_mla *b)
{
    b->N = size_of(r, "heads");
    b->RQ = has(r, i, "mla.q_a.weight") ? size_of(r, "q_lora_rank") : 0;
    b->RK = size_of(r, "kv_lora_rank");
    b->DN = size_of(r, "qk_nope_dim");
    b->DR = size_of(r, "qk_rope_dim");
    b->DV = size_of(r, "v_head_dim");
    if (!flag(r, "mla_nope"))
        b->rope = read_rope(r, b->DR, true);
    b->gate = !has(r, i, "mla.gate.weight")     ? CKPT_ENG_GATE_NONE
              : says(r, "mla_gate", "headwise") ? CKPT_ENG_GATE_HEAD
                                                : CKPT_ENG_GATE_ELEMENT;
    b->latent_norm = has(r, i, "mla.kv_a_norm.weight");
    b->centered = s->centered;
    b->eps = s->eps;
    b->latent_eps = o != NULL && o->latent_eps > 0 ? o->latent_eps : s->eps;
    s->rope_mla = b->rope;
    if (b->latent_norm != flag(r, "latent_norm") && r->status == CKPT_OK)
        r->status =
            ckpt_fail(r->err, CKPT_E_FORMAT,
                      "block %lld: latent norms are %s, but 'latent_norm' is %s", (long long)i,
                      b->latent_norm ? "stored" : "not stored", b->latent_norm ? "false" : "true");
}

static void read_gqa(reader *r, ckpt_eng_spec *s, int64_t i, ckpt_eng_gqa *b)
{
    int64_t d = size_of(r, "head_dim");
    b->attn = (ckpt_eng_attention){
        .N = size_of(r, "heads"), .G = size_of(r, "kv_heads"), .DK = d, .DV = d};
    if (!flag(r, "attn_nope")) {
        double part = (double)d * number_or(r, "rope_percent", 1);
        b->rope = read_rope(r, (int64_t)part, false);
    }
    b->gated = has(r, i, "attn.gate.weight");
    b->qk_norm = has(r, i, "attn.q_norm.weight");
    b->centered = s->centered;
    b->eps = s->eps;
    s->rope_gqa = b->rope;
}

static void read_moe(reader *r, const ckpt_eng_spec_opts *o, int64_t i, ckpt_eng_moe *b)
{
    b->E = size_of(r, "experts");
    b->FE = size_of(r, "expert_ffn_size");
    b->FS = has(r, i, "moe.shared.up.weight") ? size_of(r, "shared_ffn_size") : 0;
    b->top_k = size_of(r, "experts_per_token");
    b->groups = size_or(r, "router_groups", 1);
    b->group_top_k = size_or(r, "router_group_topk", 1);
    b->group_best = size_or(r, "router_group_best", 2);
    b->softmax = says(r, "router_score", "softmax");
    b->normalize = flag(r, "router_normalize");
    b->gated = !says(r, "activation", "relu2");
    b->shared_gate = has(r, i, "moe.shared_gate.weight");
    b->scale = number_or(r, "router_scale", 1);
    b->aux_coef = o != NULL ? o->aux_coef : 0;
    b->z_coef = o != NULL ? o->z_coef : 0;
}

static ckpt_status read_block(reader *r, ckpt_eng_spec *s, const ckpt_eng_spec_opts *o, int64_t i,
                              ckpt_eng_block *b)
{
    switch (b->letter) {
    case 'K':
        b->kind = CKPT_ENG_LINATTN;
        b->u.linattn.D = s->H;
        read_kda(r, s, o, i, &b->u.linattn);
        break;
    case 'G':
    case 'g':
        b->kind = CKPT_ENG_LINATTN;
        b->u.linattn.D = s->H;
        read_gdn(r, s, b->letter == 'g', &b->u.linattn);
        break;
    case '+':
        b->kind = CKPT_ENG_MLA;
        b->u.mla.H = s->H;
        read_mla(r, s, o, i, &b->u.mla);
        break;
    case '*':
        b->kind = CKPT_ENG_GQA;
        b->u.gqa.H = s->H;
        read_gqa(r, s, i, &b->u.gqa);
        break;
    case '-':
        b->kind = CKPT_ENG_MLP;
        b->u.mlp = (ckpt_eng_mlp){
            .H = s->H, .F = size_of(r, "ffn_size"), .gated = has(r, i, "mlp.gate.weight")};
        break;
    case 'E':
        b->kind = CKPT_ENG_MOE;
        b->u.moe.H = s->H;
        read_moe(r, o, i, &b->u.moe);
        break;
    default:
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED,
                         "block %lld is '%c': the engine does not run it", (long long)i, b->letter);
    }
    return r->status;
}

ckpt_status ckpt_eng_spec_open(ckpt_eng_spec *s, const ckpt_model *model,
                               const ckpt_eng_spec_opts *opts, ckpt_err *err)
{
    *s = (ckpt_eng_spec){0};
    if (model->layout == NULL || model->config == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "no known layout: the engine runs models of known layouts alone");
    reader r = {.model = model, .c = model->config, .err = err};
    const char *pattern = ckpt_json_string(ckpt_json_get(model->config, "pattern"));
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'pattern' is missing");
    s->H = size_of(&r, "hidden_size");
    s->V = size_of(&r, "vocab_size");
    s->eps = number_or(&r, "norm_eps", 0);
    s->centered = flag(&r, "norm_zero_centered");
    s->tied = ckpt_model_find(model, "head.weight") < 0;
    s->n_blocks = (int64_t)strlen(pattern);
    s->mtp_layers = size_or(&r, "mtp_layers", 0);
    s->main_blocks = s->n_blocks - size_or(&r, "mtp_blocks", 0);
    if (s->eps <= 0 && r.status == CKPT_OK)
        r.status = ckpt_fail(err, CKPT_E_FORMAT, "field 'norm_eps' is missing");
    s->blocks = ckpt_arena_array(&s->arena, (size_t)s->n_blocks, sizeof *s->blocks);
    if (s->blocks == NULL)
        r.status =
            ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld blocks", (long long)s->n_blocks);
    for (int64_t i = 0; r.status == CKPT_OK && i < s->n_blocks; i++) {
        s->blocks[i] = (ckpt_eng_block){.letter = pattern[i]};
        r.status = read_block(&r, s, opts, i, &s->blocks[i]);
    }
    if (r.status != CKPT_OK)
        ckpt_eng_spec_close(s);
    return r.status;
}

void ckpt_eng_spec_close(ckpt_eng_spec *s)
{
    ckpt_arena_free(&s->arena);
    *s = (ckpt_eng_spec){0};
}

/* ---- operations ------------------------------------------------------------------------------ */

/* The decay's and gate's share of a hidden token: a full matrix, or its two factors. */
static double low_rank(double H, double width, double rank)
{
    return rank > 0 ? rank * (H + width) : H * width;
}

static double linattn_flops(const ckpt_eng_linattn *b, double T)
{
    const ckpt_eng_delta *d = &b->delta;
    double H = (double)b->D, K = (double)d->K, V = (double)d->V, nv = (double)d->HV;
    double qk = (double)d->H * K, v = nv * V, conv = (double)b->W * (2 * qk + v);
    if (d->rule == CKPT_ENG_KDA) {
        double in = H * (2 * qk + v + (double)d->H) + low_rank(H, qk, (double)b->f_rank) +
                    low_rank(H, v, (double)b->z_rank);
        return 2 * T * (in + conv + H * v) + 2 * T * nv * (K * K + 3 * K * V);
    }
    double in = d->rule == CKPT_ENG_GDN ? H * (2 * qk + 2 * v + 2 * nv) : H * (4 * qk + 3 * v);
    return 2 * T * (in + conv + 4 * nv * V * V + H * v);
}

static double mla_flops(const ckpt_eng_mla *b, double T, double Q2)
{
    double H = (double)b->H, n = (double)b->N, dn = (double)b->DN, dr = (double)b->DR;
    double dv = (double)b->DV, rk = (double)b->RK, rq = (double)b->RQ;
    double q = rq > 0 ? rq * (H + n * (dn + dr) + 1) : H * n * (dn + dr);
    double gate = b->gate == CKPT_ENG_GATE_NONE ? 0 : b->gate == CKPT_ENG_GATE_HEAD ? n : n * dv;
    return 2 * T * (q + rk * (H + n * (dn + dv) + 1) + H * dr + n * dv * H + H * gate) +
           Q2 * n * (dn + dr + dv);
}

static double gqa_flops(const ckpt_eng_gqa *b, double T, double Q2)
{
    double H = (double)b->H, wide = (double)(b->attn.N * b->attn.DK);
    double groups = (double)b->attn.G / (double)b->attn.N;
    return 4 * T * wide * (H + H * groups) + 2 * Q2 * wide + (b->gated ? 2 * T * H * wide : 0);
}

double ckpt_eng_spec_flops(const ckpt_eng_spec *s, int64_t tokens, double Q2)
{
    double T = (double)tokens, H = (double)s->H, sum = 0, mtp = (double)s->mtp_layers;
    for (int64_t i = 0; i < s->n_blocks; i++) {
        const ckpt_eng_block *b = &s->blocks[i];
        const ckpt_eng_moe *e = &b->u.moe;
        if (b->kind == CKPT_ENG_LINATTN)
            sum += linattn_flops(&b->u.linattn, T);
        else if (b->kind == CKPT_ENG_MLA)
            sum += mla_flops(&b->u.mla, T, Q2);
        else if (b->kind == CKPT_ENG_GQA)
            sum += gqa_flops(&b->u.gqa, T, Q2);
        else if (b->kind == CKPT_ENG_MLP)
            sum += (b->u.mlp.gated ? 6 : 4) * T * H * (double)b->u.mlp.F;
        else
            sum += (e->gated ? 6 : 4) * T * H * (double)(e->FE * e->top_k + e->FS);
    }
    return sum + 2 * T * H * (double)s->V * (1 + mtp) + 2 * mtp * (3 * H + 2 * H * H) * T;
}
