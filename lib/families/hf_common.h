/* What the Hugging Face dialects share: per-layer lists, rotary embedding, attention and router
 * fields. Rows that several dialects have are macros in hf_rows.h.
 *
 * A layer i is blocks 2i (token mixer) and 2i+1 (channel mixer); layers of multi-token prediction
 * follow the stack. Field names: conversion-maps.md section 8 and the configuration classes of
 * transformers 5. */
#ifndef CKPT_FAMILIES_HF_COMMON_H
#define CKPT_FAMILIES_HF_COMMON_H

#include "hybrid.h"

/* The two functions of a layout whose file has a `dialect`. */
#define CKPT_DIALECT_FUNCTIONS                                                                     \
    static ckpt_status config_read(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)       \
    {                                                                                              \
        return ckpt_dialect_read(&dialect, stored, canon, err);                                    \
    }                                                                                              \
    static ckpt_status config_write(const ckpt_json *canon, const ckpt_json *foreign,              \
                                    const ckpt_mesh *mesh, ckpt_json **out, ckpt_err *err)         \
    {                                                                                              \
        return ckpt_dialect_write(&dialect, canon, foreign, mesh, out, err);                       \
    }

/* Constants of every dialect: no other activation, and no quantisation but 128 x 128 blocks. */
#define CKPT_HF_CONSTANTS                                                                          \
    {"hidden_act", "[\"silu\", \"swish\"]", NULL, true, "no other activation is known"},           \
        {"quantization_config.quant_method", "[\"fp8\", \"modelopt\"]", NULL, false,               \
         "no other quantisation is known"},                                                        \
        {"quantization_config.quant_algo", "[\"NVFP4\", \"W4A16_NVFP4\", \"MXFP8\"]", NULL, false, \
         "no other quantisation is known"},                                                        \
        {"quantization_config.fmt", "[\"e4m3\"]", NULL, false, "no other quantisation is known"},  \
    {                                                                                              \
        "quantization_config.weight_block_size", "[[128, 128]]", NULL, false,                      \
            "no other block is known"                                                              \
    }

/* Claim by `architectures` where it is given (several model types share a name), else by
 * model_type. Both lists end with NULL. */
int ckpt_hf_claims(const ckpt_json *config, const char *const *classes, const char *const *types);

/* ---- layers ----------------------------------------------------------------------------------- */

/* One letter a layer for each of its two blocks, '\0' while undecided. Release frees. */
typedef struct ckpt_hf_layers {
    int64_t n, mtp; /* layers of the stack, and of multi-token prediction after them */
    char *mixers, *mlps;
    ckpt_arena arena;
} ckpt_hf_layers;

/* num_hidden_layers, and the depths under mtp_path (NULL: the dialect has none). */
ckpt_status ckpt_hf_layers_open(ckpt_hf_layers *x, const ckpt_json *stored, const char *mtp_path,
                                ckpt_err *err) CKPT_MUST_USE;
/* Letters into "pattern", with mtp_layers and mtp_blocks; frees x in any case. */
ckpt_status ckpt_hf_layers_close(ckpt_hf_layers *x, ckpt_status status, ckpt_json *canon,
                                 ckpt_err *err) CKPT_MUST_USE;
void ckpt_hf_layers_release(ckpt_hf_layers *x);

/* A list with one of two names a layer (layer_types, mlp_layer_types). Fills undecided entries and
 * must agree with decided ones. *seen is set if the list is there. */
typedef struct ckpt_hf_types {
    const char *path, *names[2];
    char letters[2];
} ckpt_hf_types;
ckpt_status ckpt_hf_types_read(const ckpt_json *stored, const ckpt_hf_types *types, char *kinds,
                               int64_t layers, bool *seen, ckpt_err *err) CKPT_MUST_USE;
/* Write such a list anew, block `offset` of every layer; only if there is one already. */
ckpt_status ckpt_hf_types_write(const ckpt_field_write *w, const ckpt_hf_types *types, int offset,
                                int64_t layers, ckpt_err *err) CKPT_MUST_USE;
/* first_k_dense_replace: dense layers first (`absent` of them if the field is missing). */
ckpt_status ckpt_hf_dense_first_read(const ckpt_json *stored, int64_t absent, ckpt_hf_layers *x,
                                     ckpt_err *err) CKPT_MUST_USE;
/* Layers of multi-token prediction count on, so they follow the same rule. */
ckpt_status ckpt_hf_dense_first_write(const ckpt_field_write *w, ckpt_err *err) CKPT_MUST_USE;
/* mlp_only_layers (0-based) and decoder_sparse_step, as the Qwen models have them. */
ckpt_status ckpt_hf_sparse_step_read(const ckpt_json *stored, ckpt_hf_layers *x,
                                     ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_hf_sparse_step_write(const ckpt_field_write *w, int64_t layers,
                                      ckpt_err *err) CKPT_MUST_USE;
/* Stacks of ordinary attention with full attention everywhere and dense MLPs. */
ckpt_status ckpt_hf_dense_pattern(const ckpt_json *stored, ckpt_json *canon,
                                  ckpt_err *err) CKPT_MUST_USE;
/* Refuse layers that attend within a window: layer_types and use_sliding_window. */
ckpt_status ckpt_hf_no_window(const ckpt_json *stored, int64_t layers, ckpt_err *err) CKPT_MUST_USE;
/* Check the alternation of the canonical pattern, split off multi-token prediction, and write
 * num_hidden_layers and, where mtp_path is not NULL, the depths. */
typedef struct ckpt_hf_stack {
    const char *dialect, *mixers, *mlps; /* letters it can say */
    const char *mtp_path;
} ckpt_hf_stack;
ckpt_status ckpt_hf_layers_write(const ckpt_field_write *w, const ckpt_hf_stack *stack,
                                 int64_t *layers, ckpt_err *err) CKPT_MUST_USE;

/* ---- attention, rotary embedding -------------------------------------------------------------- */

/* Where they are missing: as many key as query heads, and hidden_size / heads for head_dim. */
ckpt_status ckpt_hf_attention_read(ckpt_json *canon, ckpt_err *err) CKPT_MUST_USE;
/* MLA has as many key as query heads. */
ckpt_status ckpt_hf_mla_read(const ckpt_json *stored, const ckpt_json *canon,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_hf_mla_write(const ckpt_field_write *w, ckpt_err *err) CKPT_MUST_USE;

typedef struct ckpt_hf_rope {
    double theta;   /* where nothing is said */
    double percent; /* part of a head that rotates where nothing is said; 0: the dialect always
                       rotates whole heads */
    bool llama3;    /* knows the llama3 frequencies */
    bool ignores_percent; /* a stored part has no effect */
} ckpt_hf_rope;
/* rope_theta beside rope_scaling (transformers 4) or everything in rope_parameters (5). */
ckpt_status ckpt_hf_rope_read(const ckpt_json *stored, const ckpt_hf_rope *how, ckpt_json *canon,
                              ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_hf_rope_write(const ckpt_field_write *w, const ckpt_hf_rope *how,
                               ckpt_err *err) CKPT_MUST_USE;

/* ---- mixture of experts ----------------------------------------------------------------------- */

/* Groups of experts; `groups` and `limit` where a field is missing. */
typedef struct ckpt_hf_groups {
    const char *groups_path, *limit_path;
    int64_t groups, limit;
} ckpt_hf_groups;
ckpt_status ckpt_hf_groups_read(const ckpt_json *stored, const ckpt_hf_groups *paths,
                                ckpt_json *canon, ckpt_err *err) CKPT_MUST_USE;
/* Refuses a model whose groups are not scored by their best two experts; path: what to name. */
ckpt_status ckpt_hf_group_best_write(const ckpt_field_write *w, const char *path,
                                     ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_hf_groups_write(const ckpt_field_write *w, const ckpt_hf_groups *paths,
                                 ckpt_err *err) CKPT_MUST_USE;
/* A count of shared experts of the width of a routed one. */
ckpt_status ckpt_hf_shared_read(const ckpt_json *stored, const char *path, int64_t absent,
                                ckpt_json *canon, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_hf_shared_write(const ckpt_field_write *w, const char *dialect, const char *path,
                                 ckpt_err *err) CKPT_MUST_USE;

/* ---- writing ---------------------------------------------------------------------------------- */

/* What every dialect ends with: a new configuration names its class (`architecture`); weights that
 * were quantised are not any more. */
ckpt_status ckpt_hf_finish_write(const ckpt_field_write *w, const char *architecture,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Update a list with one entry in every spelling the configuration has, else the first one. */
ckpt_status ckpt_hf_put_first(const ckpt_field_write *w, const char *path, ckpt_json *value,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
