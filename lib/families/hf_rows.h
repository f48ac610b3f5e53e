/* Rows that several Hugging Face dialects have. Names of the modules: conversion-maps.md sections 3,
 * 4 and 6. M is the prefix of a layer's channel mixer as a string literal.
 *
 * Experts are one tensor each in checkpoints (transformers 5 splits and joins them when it saves and
 * loads); a state dict written without that keeps the three-dimensional parameters. */
#ifndef CKPT_FAMILIES_HF_ROWS_H
#define CKPT_FAMILIES_HF_ROWS_H

/* clang-format off */
#define HF_LAYER "model.layers.{l}."

#define HF_TOP_ROWS \
    {"embed.weight",                              "model.embed_tokens.weight",                          "V | H", NULL}, \
    {"head.weight",                               "lm_head.weight",                                     "V | H", NULL}, \
    {"final_norm.weight",                         "model.norm.weight",                                  "H", NULL}

#define HF_ATTN_ROWS \
    {"blocks.{2l}.attn.norm.weight",              HF_LAYER "input_layernorm.weight",                    "H", NULL}, \
    {"blocks.{2l}.attn.q.weight",                 HF_LAYER "self_attn.q_proj.weight",                   "N D | H", NULL}, \
    {"blocks.{2l}.attn.k.weight",                 HF_LAYER "self_attn.k_proj.weight",                   "G D | H", NULL}, \
    {"blocks.{2l}.attn.v.weight",                 HF_LAYER "self_attn.v_proj.weight",                   "G D | H", NULL}, \
    {"blocks.{2l}.attn.o.weight",                 HF_LAYER "self_attn.o_proj.weight",                   "H | N D", NULL}

#define HF_ATTN_BIAS_ROWS \
    {"blocks.{2l}.attn.q.bias",                   HF_LAYER "self_attn.q_proj.bias",                     "N D", NULL}, \
    {"blocks.{2l}.attn.k.bias",                   HF_LAYER "self_attn.k_proj.bias",                     "G D", NULL}, \
    {"blocks.{2l}.attn.v.bias",                   HF_LAYER "self_attn.v_proj.bias",                     "G D", NULL}

#define HF_QK_NORM_ROWS \
    {"blocks.{2l}.attn.q_norm.weight",            HF_LAYER "self_attn.q_norm.weight",                   "D", NULL}, \
    {"blocks.{2l}.attn.k_norm.weight",            HF_LAYER "self_attn.k_norm.weight",                   "D", NULL}

#define HF_MLA_ROWS(A, O) \
    {"blocks.{2l}.mla.norm.weight",               HF_LAYER "input_layernorm.weight",                    "H", NULL}, \
    {"blocks.{2l}.mla.q.weight",                  HF_LAYER A ".q_proj.weight",                          "N DN+DR | H", NULL}, \
    {"blocks.{2l}.mla.q_a.weight",                HF_LAYER A ".q_a_proj.weight",                        "RQ | H", NULL}, \
    {"blocks.{2l}.mla.q_a_norm.weight",           HF_LAYER A ".q_a_layernorm.weight",                   "RQ", NULL}, \
    {"blocks.{2l}.mla.q_b.weight",                HF_LAYER A ".q_b_proj.weight",                        "N DN+DR | RQ", NULL}, \
    {"blocks.{2l}.mla.kv_a.weight",               HF_LAYER A ".kv_a_proj_with_mqa.weight",              "RK+DR | H", NULL}, \
    {"blocks.{2l}.mla.kv_a_norm.weight",          HF_LAYER A ".kv_a_layernorm.weight",                  "RK", NULL}, \
    {"blocks.{2l}.mla.kv_b.weight",               HF_LAYER A ".kv_b_proj.weight",                       "N DN+DV | RK", NULL}, \
    {"blocks.{2l}.mla.o.weight",                  HF_LAYER A "." O ".weight",                           "H | N DV", NULL}

#define HF_MLP_ROWS \
    {"blocks.{2l+1}.mlp.norm.weight",             HF_LAYER "post_attention_layernorm.weight",           "H", NULL}, \
    {"blocks.{2l+1}.mlp.gate.weight",             HF_LAYER "mlp.gate_proj.weight",                      "F | H", NULL}, \
    {"blocks.{2l+1}.mlp.up.weight",               HF_LAYER "mlp.up_proj.weight",                        "F | H", NULL}, \
    {"blocks.{2l+1}.mlp.down.weight",             HF_LAYER "mlp.down_proj.weight",                      "H | F", NULL}

#define HF_MOE_ROWS \
    {"blocks.{2l+1}.moe.norm.weight",             HF_LAYER "post_attention_layernorm.weight",           "H", NULL}, \
    {"blocks.{2l+1}.moe.router.weight",           HF_LAYER "mlp.gate.weight",                           "E | H", NULL}, \
    {"blocks.{2l+1}.moe.experts.{e}.gate.weight", HF_LAYER "mlp.experts.{e}.gate_proj.weight",          "FE | H", "experts=each"}, \
    {"blocks.{2l+1}.moe.experts.{e}.up.weight",   HF_LAYER "mlp.experts.{e}.up_proj.weight",            "FE | H", "experts=each"}, \
    {"blocks.{2l+1}.moe.experts.{e}.down.weight", HF_LAYER "mlp.experts.{e}.down_proj.weight",          "H | FE", "experts=each"}, \
    {"blocks.{2l+1}.moe.experts.{e}.gate.weight", HF_LAYER "mlp.experts.gate_up_proj",                  "E=e | 2=0 FE | H", "experts=joint"}, \
    {"blocks.{2l+1}.moe.experts.{e}.up.weight",   HF_LAYER "mlp.experts.gate_up_proj",                  "E=e | 2=1 FE | H", "experts=joint"}, \
    {"blocks.{2l+1}.moe.experts.{e}.down.weight", HF_LAYER "mlp.experts.down_proj",                     "E=e | H | FE", "experts=joint"}

#define HF_SHARED_ROWS(S) \
    {"blocks.{2l+1}.moe.shared.gate.weight",      HF_LAYER "mlp." S ".gate_proj.weight",                "FS | H", NULL}, \
    {"blocks.{2l+1}.moe.shared.up.weight",        HF_LAYER "mlp." S ".up_proj.weight",                  "FS | H", NULL}, \
    {"blocks.{2l+1}.moe.shared.down.weight",      HF_LAYER "mlp." S ".down_proj.weight",                "H | FS", NULL}
/* clang-format on */

#define HF_NEED_TOP "top: embed.weight final_norm.weight; "
#define HF_NEED_ATTN "attn: norm.weight q.weight k.weight v.weight o.weight"
#define HF_NEED_MLA                                                                                \
    "mla: norm.weight q.weight/q_a.weight+q_a_norm.weight+q_b.weight kv_a.weight "                 \
    "kv_a_norm.weight "                                                                            \
    "kv_b.weight o.weight"
#define HF_NEED_MLP "mlp: norm.weight gate.weight up.weight down.weight; "
#define HF_NEED_MOE                                                                                \
    "moe: norm.weight router.weight experts.{e}.gate.weight experts.{e}.up.weight "                \
    "experts.{e}.down.weight"

#endif
