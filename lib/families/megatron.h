/* What Megatron-Core's models share: keys, shapes and cuts of megatron-dist-ckpt.md section 3, and
 * the arguments of its section 6 and of conversion-maps.md section 8.
 *
 * Rows are macros over X(canonical name below the block, key below the layer, view, tag), token
 * mixers and channel mixers apart: a hybrid model has one of them a layer, a GPT model one of each.
 *
 * Choices: kda fused (decay and output gate inside in_proj, where neither is low rank) or split; TE
 * models fuse norms into the linear that follows, local ones keep modules, whose keys Megatron-Core
 * 0.16 maps to the fused spelling in GPT models (before MoE, too): attn_norms, gdn_norms, mamba_norms,
 * mlp_norms, moe_norms, latent_norms; shards=single is how checkpoints written with
 * singleton_local_shards name the parts of gated layers and experts. From the configuration follow
 * mlp (gated or plain), attn (gated or plain) and norms: where norm weights are stored minus one,
 * the gated output norms of GDN and KDA are, too, although their canonical values are plain. */
#ifndef CKPT_FAMILIES_MEGATRON_H
#define CKPT_FAMILIES_MEGATRON_H

#include "hybrid.h"

/* clang-format off */
#define MEGATRON_MIXER_ROWS(X) \
    X("kda.norm.weight",      "input_layernorm.weight",                          "H", "") \
    X("kda.q.weight",         "self_attention.in_proj.weight.query",             "NK@head A | H", "") \
    X("kda.k.weight",         "self_attention.in_proj.weight.key",               "NK@head A | H", "") \
    X("kda.v.weight",         "self_attention.in_proj.weight.value",             "NK@head B | H", "") \
    X("kda.f.weight",         "self_attention.in_proj.weight.g",                 "NK@head A | H", "kda=fused") \
    X("kda.f.weight",         "self_attention.f_proj.weight",                    "NK@head A | H", "kda=split") \
    X("kda.f_a.weight",       "self_attention.f_a_proj.weight",                  "RF | H", "kda=split") \
    X("kda.f_b.weight",       "self_attention.f_b_proj.weight",                  "NK@head A | RF", "kda=split") \
    X("kda.g.weight",         "self_attention.in_proj.weight.gate",              "NK@head B | H", "kda=fused") \
    X("kda.g.weight",         "self_attention.g_proj.weight",                    "NK@head B | H", "kda=split") \
    X("kda.g_a.weight",       "self_attention.g_a_proj.weight",                  "RG | H", "kda=split") \
    X("kda.g_b.weight",       "self_attention.g_b_proj.weight",                  "NK@head B | RG", "kda=split") \
    X("kda.beta.weight",      "self_attention.beta_proj.weight",                 "NK@head | H", "") \
    X("kda.conv_q.weight",    "self_attention.conv1d.weight.query",              "NK@head A | 1 | W", "") \
    X("kda.conv_k.weight",    "self_attention.conv1d.weight.key",                "NK@head A | 1 | W", "") \
    X("kda.conv_v.weight",    "self_attention.conv1d.weight.value",              "NK@head B | 1 | W", "") \
    X("kda.A_log",            "self_attention.A_log",                            "NK@head", "") \
    X("kda.dt_bias",          "self_attention.dt_bias",                          "NK@head A", "") \
    X("kda.o_norm.weight",    "self_attention.out_norm.weight",                  "B", "norms=plain") \
    X("kda.o_norm.weight",    "self_attention.out_norm.weight",                  "B ; -1", "norms=centered") \
    X("kda.o.weight",         "self_attention.out_proj.weight",                  "H | NK@head B", "") \
    \
    X("gdn.norm.weight",      "self_attention.in_proj.layer_norm_weight",        "H", "gdn_norms=fused") \
    X("gdn.norm.weight",      "input_layernorm.weight",                          "H", "gdn_norms=separate") \
    X("gdn.q.weight",         "self_attention.in_proj.weight.query",             "GK@head GA | H", "") \
    X("gdn.k.weight",         "self_attention.in_proj.weight.key",               "GK@head GA | H", "") \
    X("gdn.v.weight",         "self_attention.in_proj.weight.value",             "GV@head GB | H", "") \
    X("gdn.z.weight",         "self_attention.in_proj.weight.z",                 "GV@head GB | H", "") \
    X("gdn.beta.weight",      "self_attention.in_proj.weight.beta",              "GV@head | H", "") \
    X("gdn.alpha.weight",     "self_attention.in_proj.weight.alpha",             "GV@head | H", "") \
    X("gdn.conv_q.weight",    "self_attention.conv1d.weight.query",              "GK@head GA | 1 | GW", "") \
    X("gdn.conv_k.weight",    "self_attention.conv1d.weight.key",                "GK@head GA | 1 | GW", "") \
    X("gdn.conv_v.weight",    "self_attention.conv1d.weight.value",              "GV@head GB | 1 | GW", "") \
    X("gdn.A_log",            "self_attention.A_log",                            "GV@head", "") \
    X("gdn.dt_bias",          "self_attention.dt_bias",                          "GV@head", "") \
    X("gdn.o_norm.weight",    "self_attention.out_norm.weight",                  "GB", "norms=plain") \
    X("gdn.o_norm.weight",    "self_attention.out_norm.weight",                  "GB ; -1", "norms=centered") \
    X("gdn.o.weight",         "self_attention.out_proj.weight",                  "H | GV@head GB", "") \
    \
    X("gdn2.norm.weight",     "self_attention.in_proj.layer_norm_weight",        "H", "gdn_norms=fused") \
    X("gdn2.norm.weight",     "input_layernorm.weight",                          "H", "gdn_norms=separate") \
    X("gdn2.q.weight",        "self_attention.in_proj.weight.query",             "GK@head GA | H", "") \
    X("gdn2.k.weight",        "self_attention.in_proj.weight.key",               "GK@head GA | H", "") \
    X("gdn2.v.weight",        "self_attention.in_proj.weight.value",             "GV@head GB | H", "") \
    X("gdn2.z.weight",        "self_attention.in_proj.weight.z",                 "GV@head GB | H", "") \
    X("gdn2.f.weight",        "self_attention.in_proj.weight.f",                 "GK@head GA | H", "") \
    X("gdn2.b.weight",        "self_attention.in_proj.weight.b",                 "GK@head GA | H", "") \
    X("gdn2.w.weight",        "self_attention.in_proj.weight.w",                 "GV@head GB | H", "") \
    X("gdn2.conv_q.weight",   "self_attention.conv1d.weight.query",              "GK@head GA | 1 | GW", "") \
    X("gdn2.conv_k.weight",   "self_attention.conv1d.weight.key",                "GK@head GA | 1 | GW", "") \
    X("gdn2.conv_v.weight",   "self_attention.conv1d.weight.value",              "GV@head GB | 1 | GW", "") \
    X("gdn2.A_log",           "self_attention.A_log",                            "GK@head", "") \
    X("gdn2.dt_bias",         "self_attention.dt_bias",                          "GK@head GA", "") \
    X("gdn2.o_norm.weight",   "self_attention.out_norm.weight",                  "GB", "norms=plain") \
    X("gdn2.o_norm.weight",   "self_attention.out_norm.weight",                  "GB ; -1", "norms=centered") \
    X("gdn2.o.weight",        "self_attention.out_proj.weight",                  "H | GV@head GB", "") \
    \
    X("attn.norm.weight",     "self_attention.linear_qkv.layer_norm_weight",     "H", "attn_norms=fused") \
    X("attn.norm.weight",     "input_layernorm.weight",                          "H", "attn_norms=separate") \
    X("attn.q.weight",        "self_attention.linear_qkv.weight",                "G@group R+2[0:R] D | H", "attn=plain") \
    X("attn.k.weight",        "self_attention.linear_qkv.weight",                "G@group R+2[R:R+1] D | H", "attn=plain") \
    X("attn.v.weight",        "self_attention.linear_qkv.weight",                "G@group R+2[R+1:R+2] D | H", "attn=plain") \
    X("attn.q.bias",          "self_attention.linear_qkv.bias",                  "G@group R+2[0:R] D", "attn=plain") \
    X("attn.k.bias",          "self_attention.linear_qkv.bias",                  "G@group R+2[R:R+1] D", "attn=plain") \
    X("attn.v.bias",          "self_attention.linear_qkv.bias",                  "G@group R+2[R+1:R+2] D", "attn=plain") \
    X("attn.q.weight",        "self_attention.linear_qkv.weight",                "G@group 2*R+2[0:R] D | H", "attn=gated") \
    X("attn.gate.weight",     "self_attention.linear_qkv.weight",                "G@group 2*R+2[R:2*R] D | H", "attn=gated") \
    X("attn.k.weight",        "self_attention.linear_qkv.weight",                "G@group 2*R+2[2*R:2*R+1] D | H", "attn=gated") \
    X("attn.v.weight",        "self_attention.linear_qkv.weight",                "G@group 2*R+2[2*R+1:2*R+2] D | H", "attn=gated") \
    X("attn.q_norm.weight",   "self_attention.q_layernorm.weight",               "D", "") \
    X("attn.k_norm.weight",   "self_attention.k_layernorm.weight",               "D", "") \
    X("attn.o.weight",        "self_attention.linear_proj.weight",               "H | N@head D", "") \
    \
    X("mla.norm.weight",      "input_layernorm.weight",                          "H", "") \
    X("mla.q.weight",         "self_attention.linear_q_proj.weight",             "N@head DN+DR | H", "") \
    X("mla.q_a.weight",       "self_attention.linear_q_down_proj.weight",        "RQ | H", "") \
    X("mla.q_a_norm.weight",  "self_attention.linear_q_up_proj.layer_norm_weight", "RQ", "latent_norms=fused") \
    X("mla.q_a_norm.weight",  "self_attention.q_layernorm.weight",               "RQ", "latent_norms=separate") \
    X("mla.q_b.weight",       "self_attention.linear_q_up_proj.weight",          "N@head DN+DR | RQ", "") \
    X("mla.kv_a.weight",      "self_attention.linear_kv_down_proj.weight",       "RK+DR | H", "") \
    X("mla.kv_a_norm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight", "RK", "latent_norms=fused") \
    X("mla.kv_a_norm.weight", "self_attention.kv_layernorm.weight",              "RK", "latent_norms=separate") \
    X("mla.kv_b.weight",      "self_attention.linear_kv_up_proj.weight",         "N@head DN+DV | RK", "") \
    X("mla.gate.weight",      "self_attention.linear_gate.weight",               "GM@head | H", "") \
    X("mla.o.weight",         "self_attention.linear_proj.weight",               "H | N@head DV", "")

#define MEGATRON_MAMBA_ROWS(X) \
    X("mamba.norm.weight",    "mixer.in_proj.layer_norm_weight",                 "H", "mamba_norms=fused") \
    X("mamba.norm.weight",    "norm.weight",                                     "H", "mamba_norms=separate") \
    X("mamba.z.weight",       "mixer.in_proj.weight.z",                          "MN@head MD | H", "") \
    X("mamba.x.weight",       "mixer.in_proj.weight.x",                          "MN@head MD | H", "") \
    X("mamba.B.weight",       "mixer.in_proj.weight.B",                          "MG@head MT | H", "") \
    X("mamba.C.weight",       "mixer.in_proj.weight.C",                          "MG@head MT | H", "") \
    X("mamba.dt.weight",      "mixer.in_proj.weight.dt",                         "MN@head | H", "") \
    X("mamba.conv_x.weight",  "mixer.conv1d.weight.x",                           "MN@head MD | 1 | MW", "") \
    X("mamba.conv_B.weight",  "mixer.conv1d.weight.B",                           "MG@head MT | 1 | MW", "") \
    X("mamba.conv_C.weight",  "mixer.conv1d.weight.C",                           "MG@head MT | 1 | MW", "") \
    X("mamba.conv_x.bias",    "mixer.conv1d.bias.x",                             "MN@head MD", "") \
    X("mamba.conv_B.bias",    "mixer.conv1d.bias.B",                             "MG@head MT", "") \
    X("mamba.conv_C.bias",    "mixer.conv1d.bias.C",                             "MG@head MT", "") \
    X("mamba.A_log",          "mixer.A_log",                                     "MN@head", "") \
    X("mamba.dt_bias",        "mixer.dt_bias",                                   "MN@head", "") \
    X("mamba.D",              "mixer.D",                                         "MN@head", "") \
    X("mamba.o_norm.weight",  "mixer.norm.weight",                               "MN@head MD", "") \
    X("mamba.o.weight",       "mixer.out_proj.weight",                           "H | MN@head MD", "")

#define MEGATRON_CHANNEL_ROWS(X) \
    X("mlp.norm.weight",              "mlp.linear_fc1.layer_norm_weight",                "H", "mlp_norms=fused") \
    X("mlp.norm.weight",              "pre_mlp_layernorm.weight",                        "H", "mlp_norms=separate") \
    X("mlp.up.weight",                "mlp.linear_fc1.weight",                           "F@tp | H", "mlp=plain") \
    X("mlp.gate.weight",              "mlp.linear_fc1.weight",                           "2=0@unit F@tp | H", "mlp=gated shards=joint") \
    X("mlp.up.weight",                "mlp.linear_fc1.weight",                           "2=1@unit F@tp | H", "mlp=gated shards=joint") \
    X("mlp.gate.weight",              "mlp.linear_fc1.weight_w",                         "F@tp | H", "mlp=gated shards=single") \
    X("mlp.up.weight",                "mlp.linear_fc1.weight_v",                         "F@tp | H", "mlp=gated shards=single") \
    X("mlp.down.weight",              "mlp.linear_fc2.weight",                           "H | F@tp", "") \
    \
    X("moe.norm.weight",              "pre_mlp_layernorm.weight",                        "H", "moe_norms=separate") \
    X("moe.norm.weight",              "mlp.linear_fc1.layer_norm_weight",                "H", "moe_norms=fused") \
    X("moe.router.weight",            "mlp.router.weight",                               "E | H", "") \
    X("moe.router.bias",              "mlp.router.expert_bias",                          "E", "") \
    X("moe.experts.{e}.up.weight",    "mlp.experts.experts.linear_fc1.weight",           "E=e@ep | FE@etp | H", "mlp=plain shards=joint") \
    X("moe.experts.{e}.gate.weight",  "mlp.experts.experts.linear_fc1.weight",           "E=e@ep | 2=0@unit FE@etp | H", "mlp=gated shards=joint") \
    X("moe.experts.{e}.up.weight",    "mlp.experts.experts.linear_fc1.weight",           "E=e@ep | 2=1@unit FE@etp | H", "mlp=gated shards=joint") \
    X("moe.experts.{e}.down.weight",  "mlp.experts.experts.linear_fc2.weight",           "E=e@ep | H | FE@etp", "shards=joint") \
    X("moe.experts.{e}.up.weight",    "mlp.experts.experts.{e}.linear_fc1.weight",       "FE@etp | H", "mlp=plain shards=single") \
    X("moe.experts.{e}.gate.weight",  "mlp.experts.experts.{e}.linear_fc1.weight_w",     "FE@etp | H", "mlp=gated shards=single") \
    X("moe.experts.{e}.up.weight",    "mlp.experts.experts.{e}.linear_fc1.weight_v",     "FE@etp | H", "mlp=gated shards=single") \
    X("moe.experts.{e}.down.weight",  "mlp.experts.experts.{e}.linear_fc2.weight",       "H | FE@etp", "shards=single") \
    X("moe.shared.up.weight",         "mlp.shared_experts.linear_fc1.weight",            "FS@tp | H", "mlp=plain") \
    X("moe.shared.gate.weight",       "mlp.shared_experts.linear_fc1.weight",            "2=0@unit FS@tp | H", "mlp=gated shards=joint") \
    X("moe.shared.up.weight",         "mlp.shared_experts.linear_fc1.weight",            "2=1@unit FS@tp | H", "mlp=gated shards=joint") \
    X("moe.shared.gate.weight",       "mlp.shared_experts.linear_fc1.weight_w",          "FS@tp | H", "mlp=gated shards=single") \
    X("moe.shared.up.weight",         "mlp.shared_experts.linear_fc1.weight_v",          "FS@tp | H", "mlp=gated shards=single") \
    X("moe.shared.down.weight",       "mlp.shared_experts.linear_fc2.weight",            "H | FS@tp", "") \
    X("moe.shared_gate.weight",       "mlp.shared_experts.gate_weight",                  "1 | H", "")

/* B: canonical index of the depth's first block, as text. */
#define MEGATRON_DEPTH_ROWS(B) \
    {"mtp." B ".enorm.weight",   "mtp.layers.{l}.enorm.weight",           "H", NULL}, \
    {"mtp." B ".hnorm.weight",   "mtp.layers.{l}.hnorm.weight",           "H", NULL}, \
    {"mtp." B ".eh_proj.weight", "mtp.layers.{l}.eh_proj.weight",         "H@tp | 2*H", NULL}, \
    {"mtp." B ".norm.weight",    "mtp.layers.{l}.final_layernorm.weight", "H", NULL}
/* clang-format on */

#define MEGATRON_REQUIRED                                                                          \
    "top: embed.weight final_norm.weight; "                                                        \
    "kda: norm.weight q.weight k.weight v.weight conv_q.weight conv_k.weight conv_v.weight "       \
    "f.weight/f_a.weight+f_b.weight g.weight/g_a.weight+g_b.weight beta.weight A_log dt_bias "     \
    "o_norm.weight o.weight; "                                                                     \
    "gdn: norm.weight q.weight k.weight v.weight z.weight beta.weight alpha.weight conv_q.weight " \
    "conv_k.weight conv_v.weight A_log dt_bias o_norm.weight o.weight; "                           \
    "gdn2: norm.weight q.weight k.weight v.weight z.weight f.weight b.weight w.weight "            \
    "conv_q.weight conv_k.weight conv_v.weight A_log dt_bias o_norm.weight o.weight; "             \
    "attn: norm.weight q.weight k.weight v.weight o.weight attn_gate:gate.weight "                 \
    "attn_bias:q.bias attn_bias:k.bias attn_bias:v.bias qk_norm:q_norm.weight "                    \
    "qk_norm:k_norm.weight; "                                                                      \
    "mla: norm.weight q.weight/q_a.weight+q_b.weight kv_a.weight kv_b.weight o.weight; "           \
    "mamba: norm.weight z.weight x.weight B.weight C.weight dt.weight conv_x.weight "              \
    "conv_B.weight conv_C.weight A_log dt_bias D o.weight; "                                       \
    "mlp: norm.weight gated:gate.weight up.weight down.weight; "                                   \
    "moe: norm.weight router.weight gated:experts.{e}.gate.weight experts.{e}.up.weight "          \
    "experts.{e}.down.weight; "                                                                    \
    "mtp: enorm.weight hnorm.weight eh_proj.weight norm.weight"

#define MEGATRON_DEFAULT_TAGS                                                                      \
    "kda=fused,latent_norms=fused,mlp_norms=fused,attn_norms=fused,gdn_norms=fused,"               \
    "mamba_norms=fused,moe_norms=separate,shards=joint"

extern const char *const ckpt_megatron_ignored[];
/* mlp, attn and norms of a canonical configuration. */
void ckpt_megatron_choices(const ckpt_json *canon, ckpt_buf *out);

/* ---- arguments ------------------------------------------------------------------------------- */

#define MEGATRON_PATTERNS "hybrid_layer_pattern|hybrid_override_pattern"

extern const ckpt_field ckpt_megatron_fields[];
extern const size_t ckpt_megatron_n_fields;
extern const ckpt_constant ckpt_megatron_constants[];
extern const size_t ckpt_megatron_n_constants;

/* Everything but the layers. a_layer: blocks of one Megatron layer (GPT 2, hybrid 1). */
ckpt_status ckpt_megatron_read(const ckpt_json *stored, ckpt_json *canon, int a_layer,
                               ckpt_err *err) CKPT_MUST_USE;
/* Rules over several arguments (megatron_rules.c), after the canonical configuration is read from
 * them. Errors: CKPT_E_FORMAT naming the field. */
ckpt_status ckpt_megatron_rules(const ckpt_json *stored, const ckpt_json *canon,
                                ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_megatron_write(const ckpt_field_write *w, int a_layer,
                                ckpt_err *err) CKPT_MUST_USE;
/* Rotary embedding of attention and MLA (megatron_rope.c). */
ckpt_status ckpt_megatron_rope_read(const ckpt_json *stored, ckpt_json *canon, int a_layer,
                                    ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_megatron_rope_write(const ckpt_field_write *w, int a_layer,
                                     ckpt_err *err) CKPT_MUST_USE;
/* A size of the earlier arguments; 0 when missing or nonsense, which is then written anew. */
int64_t ckpt_megatron_earlier(const ckpt_field_write *w, const char *path);
/* Set an argument only if what it says now, or means when missing, is something else. */
ckpt_status ckpt_megatron_settle(const ckpt_field_write *w, const char *arg, int64_t absent,
                                 int64_t want, ckpt_err *err) CKPT_MUST_USE;

#endif
