/* How Megatron's modules are cut over the ranks of a model-parallel group, by parameter name.
 *
 * A parameter of one rank's state dict ("decoder.layers.0.self_attention.linear_qkv.weight", layers
 * and experts numbered locally) belongs to one or more tensors of the global checkpoint, named as
 * torch_dist names them. The table is read in both directions: from a rank's parameter to global
 * boxes, and from a global tensor to the parameters that hold it. */
#ifndef CKPT_RANK_NAMES_H
#define CKPT_RANK_NAMES_H

#include "source.h"

typedef enum ckpt_rank_cut {
    CKPT_RANK_WHOLE, /* every tensor-parallel rank holds all of it */
    CKPT_RANK_ROWS,  /* axis 0 in equal parts */
    CKPT_RANK_COLS,  /* axis 1 in equal parts */
    CKPT_RANK_GATED, /* [gate; up] of the rank on axis 0, each half cut; ROWS without a gate */
    CKPT_RANK_PARTS, /* named sections on axis 0, each cut; stored one by one */
    CKPT_RANK_SIZED, /* WHOLE or ROWS, depending on the module class: the extent tells */
    CKPT_RANK_GEMM1, /* experts of a grouped GEMM: [H, experts * gate/up], really [experts, H, -1] */
    CKPT_RANK_GEMM2  /* [experts * ffn, H], really [experts, ffn, H] */
} ckpt_rank_cut;

typedef struct ckpt_rank_rule {
    const char *memory; /* inside a layer; {e} = local expert */
    const char *stored; /* NULL: the same */
    ckpt_rank_cut cut;
    const char *size[2]; /* SIZED: arguments whose sum is the global extent of axis 0 */
    bool expert;         /* a leading axis of experts is stored, cut over EP; TP is expert TP */
    bool read_only;      /* an older spelling */
} ckpt_rank_rule;

#define CKPT_RANK_MAX_PARTS 8
typedef struct ckpt_rank_parts {
    const char *name[CKPT_RANK_MAX_PARTS];
    int64_t size[CKPT_RANK_MAX_PARTS]; /* global rows */
    int n;
} ckpt_rank_parts;

/* A name taken apart: head ++ index ++ "." ++ rest for a decoder layer, head ++ rest otherwise.
 * The pieces point into the name. */
typedef struct ckpt_rank_place {
    const char *head;
    size_t head_len; /* "decoder.layers." | "mtp.layers.0.transformer_layer." | "" */
    int64_t layer;   /* of the decoder, -1 outside */
    const char *rest;
} ckpt_rank_place;

/* false: not a name with a usable index. */
bool ckpt_rank_split(const char *name, ckpt_rank_place *place);
/* Rule of a rank's parameter (rest of a place); *e its local expert or -1. NULL: unknown. */
const ckpt_rank_rule *ckpt_rank_by_memory(const char *rest, int64_t *e);
/* Rule of a stored tensor, choosing the sequential spelling of experts on request. *part receives
 * the section name of PARTS (pointing into rest), else NULL. */
const ckpt_rank_rule *ckpt_rank_by_stored(const char *rest, bool sequential, const char **part);
/* Sections of in_proj or conv1d. has(self, sibling): whether the same layer holds a parameter. args:
 * the training arguments. Errors: CKPT_E_FORMAT an argument is missing. */
typedef bool (*ckpt_rank_has)(const void *self, const char *rest);
ckpt_status ckpt_rank_sections(const char *rest, const ckpt_json *args, ckpt_rank_has has,
                               const void *self, ckpt_rank_parts *out, ckpt_err *err) CKPT_MUST_USE;

/* Integer argument; false if absent, null or no integer. */
bool ckpt_rank_arg(const ckpt_json *args, const char *name, int64_t *out);
bool ckpt_rank_flag(const ckpt_json *args, const char *name);

#endif
