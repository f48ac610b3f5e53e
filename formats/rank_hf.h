/* How Hugging Face modules are cut over tensor-parallel ranks, by parameter name. */
#ifndef CKPT_RANK_HF_H
#define CKPT_RANK_HF_H

#include "source.h"

typedef enum ckpt_hf_cut {
    CKPT_HF_UNKNOWN,
    CKPT_HF_WHOLE,
    CKPT_HF_ROWS,    /* axis 0 in equal parts */
    CKPT_HF_COLS,    /* axis 1 in equal parts */
    CKPT_HF_HEADS,   /* as ROWS; on axis 2 of the [1, 1, heads, 1] that some models have */
    CKPT_HF_KV,      /* as ROWS over key/value heads; fewer heads than ranks are repeated */
    CKPT_HF_VOCAB,   /* as ROWS; a rank file may pad the vocabulary */
    CKPT_HF_QKV,     /* [q; k; v] of the rank */
    CKPT_HF_GATE_UP, /* [gate; up] of the rank */
    CKPT_HF_W13,     /* [experts, gate + up of the rank, H] */
    CKPT_HF_W2       /* [experts, H, ffn of the rank] */
} ckpt_hf_cut;

/* *part: start and length in the name of what a fused module's parts replace. */
ckpt_hf_cut ckpt_hf_cut_of(const char *name, size_t *part, size_t *part_len);

/* Sizes out of config.json; 0 = not stated. */
typedef struct ckpt_hf_sizes {
    int64_t heads, kv_heads, head_dim, vocab;
} ckpt_hf_sizes;
void ckpt_hf_sizes_of(const ckpt_json *config, ckpt_hf_sizes *out);

/* Parts that `tp` ranks make of key/value rows: tp, or kv_heads when these are fewer and divide tp. */
int64_t ckpt_hf_kv_ways(const ckpt_hf_sizes *s, int64_t tp);

#endif
