/* The tables of a DCP .metadata pickle. Shared by dcp*.c only. */
#ifndef CKPT_DCP_META_H
#define CKPT_DCP_META_H

#include "source.h"

/* One storage_data item: where the bytes of (fqn, offset) lie. */
typedef struct ckpt_dcp_entry {
    const char *fqn;
    const char *transforms; /* "name, name" that must be undone to read the item, or NULL */
    uint64_t at, length;    /* bytes */
    uint32_t path;          /* index of the relative path */
    bool used;
} ckpt_dcp_entry;

#define CKPT_DCP_NO_ENTRY UINT32_MAX /* a chunk without elements needs no item */

typedef struct ckpt_dcp_piece {
    int64_t *lo, *len; /* logical elements */
    uint32_t entry;
} ckpt_dcp_piece;

typedef struct ckpt_dcp_tensor {
    const char *name;
    int64_t *dims; /* logical elements */
    ckpt_dcp_piece *pieces;
    size_t n_pieces;
    ckpt_dtype dtype;
    bool has_dtype; /* false: properties were not stored, the items decide */
    int rank;
    /* Flattened by old Megatron-Core: the true shape. dims and pieces stay as stored (dcp_flat.c). */
    const int64_t *flat; /* NULL: not flattened */
    int flat_rank;
} ckpt_dcp_tensor;

typedef struct ckpt_dcp_bytes {
    const char *name;
    uint32_t entry;
} ckpt_dcp_bytes;

typedef struct ckpt_dcp_meta {
    ckpt_dcp_entry *entries;
    size_t n_entries;
    ckpt_dcp_tensor *tensors;
    size_t n_tensors;
    ckpt_dcp_bytes *objects;
    size_t n_objects;
    /* The tensors of the state dict's member "model" lie under "model.", says planner_data: their
     * names are given without it. */
    const char *prefix;    /* or NULL */
    size_t n_shapes_found; /* flattened tensors whose shape is that of their parameter */
    const char **paths;    /* distinct relative paths, checked to stay below the directory */
    size_t n_paths;
    const char
        *unknown_global; /* first global outside the allow-list anywhere in the pickle, or NULL */
    ckpt_json
        *policy; /* attributes of a quantisation policy (pickle_policy.h), to be freed, or NULL */
} ckpt_dcp_meta;

/* Longest tensor or object name, bytes. */
#define CKPT_DCP_NAME_LIMIT 65535

/* Decode n bytes. Everything kept lives in the arena; linear in the number of items. Errors:
 * CKPT_E_FORMAT naming the tensor, object or path; CKPT_E_UNSUPPORTED an unknown dtype. */
ckpt_status ckpt_dcp_meta_parse(const uint8_t *bytes, size_t n, ckpt_arena *arena,
                                ckpt_dcp_meta *meta, ckpt_err *err) CKPT_MUST_USE;

/* The same with every object made of nodes first: slower, and what the other is compared with. */
ckpt_status ckpt_dcp_meta_parse_nodes(const uint8_t *bytes, size_t n, ckpt_arena *arena,
                                      ckpt_dcp_meta *meta, ckpt_err *err) CKPT_MUST_USE;

/* That a flattened tensor's original shape and chunks fit the stored shape. */
ckpt_status ckpt_dcp_flat_check(const ckpt_dcp_tensor *t, ckpt_err *err) CKPT_MUST_USE;

#endif
