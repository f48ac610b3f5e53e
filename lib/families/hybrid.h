/* The hybrid family: stacks of KDA, GDN, GDN2, MLA, attention,
 * Mamba-2, MLP and MoE blocks. One schema, one file per dialect;
 * a new dialect is a file with its rows and its configuration table, and a line in families.c. */
#ifndef CKPT_FAMILIES_HYBRID_H
#define CKPT_FAMILIES_HYBRID_H

#include "fields.h"

#define CKPT_HYBRID_SCHEMA_LEN 107
extern const ckpt_schema_row ckpt_hybrid_schema[CKPT_HYBRID_SCHEMA_LEN];

extern const ckpt_layout ckpt_layout_hf_kimi_linear;
extern const ckpt_layout ckpt_layout_hf_deepseek_v3;
extern const ckpt_layout ckpt_layout_hf_qwen3_next;
extern const ckpt_layout ckpt_layout_hf_llama;
extern const ckpt_layout ckpt_layout_hf_qwen2;
extern const ckpt_layout ckpt_layout_hf_qwen3;
extern const ckpt_layout ckpt_layout_hf_qwen3_moe;
extern const ckpt_layout ckpt_layout_hf_bailing_hybrid;
extern const ckpt_layout ckpt_layout_hf_bailing_moe;
extern const ckpt_layout ckpt_layout_hf_arcee_kda;
extern const ckpt_layout ckpt_layout_fla_kda;
extern const ckpt_layout ckpt_layout_megatron_gpt;
extern const ckpt_layout ckpt_layout_megatron_hybrid;

/* Hugging Face style: layer i is blocks 2i (mixer) and 2i+1 (channel mixer). Checks that the
 * pattern alternates so, with no other letters than these, and returns the number of layers.
 * `dialect` names who asks. */
ckpt_status ckpt_hybrid_layers(const char *dialect, const char *pattern, const char *mixers,
                               const char *mlps, int64_t *layers, ckpt_err *err) CKPT_MUST_USE;
/* Longest accepted stack; a letter a block. */
#define CKPT_HYBRID_MAX_LAYERS 32768

#endif
