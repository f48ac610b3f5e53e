/* Rows that several Hugging Face dialects have. Names of the modules: conversion-maps.md sections 3,
 * 4 and 6. P is the stored prefix of a layer and B the canonical one of the block, as literals.
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

#define HF_ATTN_ROWS(P, B) \
    {B "attn.norm.weight",              P "input_layernorm.weight",                    "H", NULL}, \
    {B "attn.q.weight",                 P "self_attn.q_proj.weight",                   "N D | H", NULL}, \
    {B "attn.k.weight",                 P "self_attn.k_proj.weight",                   "G D | H", NULL}, \
    {B "attn.v.weight",                 P "self_attn.v_proj.weight",                   "G D | H", NULL}, \
    {B "attn.o.weight",                 P "self_attn.o_proj.weight",                   "H | N D", NULL}

#define HF_ATTN_BIAS_ROWS(P, B) \
    {B "attn.q.bias",                   P "self_attn.q_proj.bias",                     "N D", NULL}, \
    {B "attn.k.bias",                   P "self_attn.k_proj.bias",                     "G D", NULL}, \
    {B "attn.v.bias",                   P "self_attn.v_proj.bias",                     "G D", NULL}

#define HF_QK_NORM_ROWS(P, B) \
    {B "attn.q_norm.weight",            P "self_attn.q_norm.weight",                   "D", NULL}, \
    {B "attn.k_norm.weight",            P "self_attn.k_norm.weight",                   "D", NULL}

#define HF_MLA_ROWS(P, B, A, O) \
    {B "mla.norm.weight",               P "input_layernorm.weight",                    "H", NULL}, \
    {B "mla.q.weight",                  P A ".q_proj.weight",                          "N DN+DR | H", NULL}, \
    {B "mla.q_a.weight",                P A ".q_a_proj.weight",                        "RQ | H", NULL}, \
    {B "mla.q_a_norm.weight",           P A ".q_a_layernorm.weight",                   "RQ", NULL}, \
    {B "mla.q_b.weight",                P A ".q_b_proj.weight",                        "N DN+DR | RQ", NULL}, \
    {B "mla.kv_a.weight",               P A ".kv_a_proj_with_mqa.weight",              "RK+DR | H", NULL}, \
    {B "mla.kv_a_norm.weight",          P A ".kv_a_layernorm.weight",                  "RK", NULL}, \
    {B "mla.kv_b.weight",               P A ".kv_b_proj.weight",                       "N DN+DV | RK", NULL}, \
    {B "mla.o.weight",                  P A "." O ".weight",                           "H | N DV", NULL}

#define HF_MLP_ROWS(P, B) \
    {B "mlp.norm.weight",             P "post_attention_layernorm.weight",           "H", NULL}, \
    {B "mlp.gate.weight",             P "mlp.gate_proj.weight",                      "F | H", NULL}, \
    {B "mlp.up.weight",               P "mlp.up_proj.weight",                        "F | H", NULL}, \
    {B "mlp.down.weight",             P "mlp.down_proj.weight",                      "H | F", NULL}

#define HF_MOE_ROWS(P, B) \
    {B "moe.norm.weight",             P "post_attention_layernorm.weight",           "H", NULL}, \
    {B "moe.router.weight",           P "mlp.gate.weight",                           "E | H", NULL}, \
    {B "moe.experts.{e}.gate.weight", P "mlp.experts.{e}.gate_proj.weight",          "FE | H", "experts=each"}, \
    {B "moe.experts.{e}.up.weight",   P "mlp.experts.{e}.up_proj.weight",            "FE | H", "experts=each"}, \
    {B "moe.experts.{e}.down.weight", P "mlp.experts.{e}.down_proj.weight",          "H | FE", "experts=each"}, \
    {B "moe.experts.{e}.gate.weight", P "mlp.experts.gate_up_proj",                  "E=e | 2=0 FE | H", "experts=joint"}, \
    {B "moe.experts.{e}.up.weight",   P "mlp.experts.gate_up_proj",                  "E=e | 2=1 FE | H", "experts=joint"}, \
    {B "moe.experts.{e}.down.weight", P "mlp.experts.down_proj",                     "E=e | H | FE", "experts=joint"}

#define HF_SHARED_ROWS(P, B, S) \
    {B "moe.shared.gate.weight",      P "mlp." S ".gate_proj.weight",                "FS | H", NULL}, \
    {B "moe.shared.up.weight",        P "mlp." S ".up_proj.weight",                  "FS | H", NULL}, \
    {B "moe.shared.down.weight",      P "mlp." S ".down_proj.weight",                "H | FS", NULL}
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
