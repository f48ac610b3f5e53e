/* What is taken out of a .metadata pickle while it is parsed (ckpt_pkl_parse_taking), and the values
 * that its tables are made of. Between dcp_meta.c and dcp_taken.c. */
#ifndef CKPT_DCP_TAKEN_H
#define CKPT_DCP_TAKEN_H

#include "dcp_meta.h"
#include "pickle.h"

/* ChunkStorageMetadata */
typedef struct ckpt_dcp_taken_chunk {
    int64_t *lo, *len;
    int lo_rank, len_rank;
} ckpt_dcp_taken_chunk;

/* TensorStorageMetadata */
typedef struct ckpt_dcp_taken_tensor {
    int64_t *dims;
    const ckpt_pkl *chunks; /* list or tuple; NULL: they are first .. first + n of those taken */
    size_t first, n;
    int rank;
    ckpt_dtype dtype;
    bool has_dtype;
} ckpt_dcp_taken_tensor;

/* MetadataIndex */
typedef struct ckpt_dcp_taken_index {
    const ckpt_pkl *fqn;
    const int64_t *offset;
    int rank; /* -1: none */
} ckpt_dcp_taken_index;

/* _StorageInfo */
typedef struct ckpt_dcp_taken_info {
    ckpt_pkl *path;
    const char *transforms;
    uint64_t at, length; /* bytes */
} ckpt_dcp_taken_info;

typedef struct ckpt_dcp_taken {
    ckpt_arena *keep, *scratch; /* of what the tables of dcp_meta.h hold; of the rest */
    ckpt_dcp_taken_chunk *chunks;
    ckpt_dcp_taken_tensor *tensors;
    ckpt_dcp_taken_index *indexes;
    ckpt_dcp_taken_info *infos;
    size_t n_chunks, n_tensors, n_indexes, n_infos;
    size_t cap_chunks, cap_tensors, cap_indexes, cap_infos;
} ckpt_dcp_taken;

/* self: a ckpt_dcp_taken with both arenas set. */
ckpt_pkl_taker ckpt_dcp_taker(ckpt_dcp_taken *t);
void ckpt_dcp_taken_release(ckpt_dcp_taken *t);

/* What was taken of a node, or NULL if it is not of that class or was not taken. */
const ckpt_dcp_taken_chunk *ckpt_dcp_chunk_of(const ckpt_dcp_taken *t, const ckpt_pkl *p);
const ckpt_dcp_taken_tensor *ckpt_dcp_tensor_of(const ckpt_dcp_taken *t, const ckpt_pkl *p);
const ckpt_dcp_taken_index *ckpt_dcp_index_of(const ckpt_dcp_taken *t, const ckpt_pkl *p);
const ckpt_dcp_taken_info *ckpt_dcp_info_of(const ckpt_dcp_taken *t, const ckpt_pkl *p);

/* The same from a node. Errors: CKPT_E_FORMAT, CKPT_E_UNSUPPORTED. */
ckpt_status ckpt_dcp_chunk_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_chunk *out,
                                 ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_tensor_parse(const ckpt_pkl *node, ckpt_arena *arena,
                                  ckpt_dcp_taken_tensor *out, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_index_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_index *out,
                                 ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_info_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_info *out,
                                ckpt_err *err) CKPT_MUST_USE;

static inline bool ckpt_dcp_is_none(const ckpt_pkl *p)
{
    return !p || p->kind == CKPT_PKL_NONE;
}

/* torch.Size, tuple or list of at most CKPT_MAX_RANK non-negative ints. */
ckpt_status ckpt_dcp_size_in(ckpt_arena *arena, const ckpt_pkl *node, const char *what,
                             int64_t **out, int *rank, ckpt_err *err) CKPT_MUST_USE;

#endif
