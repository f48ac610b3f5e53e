/* Putting the pieces that ranks hold together to whole tensors, for containers with one file a rank.
 *
 * A piece is a box of a global tensor somewhere in a rank's file. Pieces of one name must agree in
 * everything but the box; boxes that several ranks hold are one chunk (the first added) and replicas
 * of it, which are listed so that they can be compared. */
#ifndef CKPT_RANK_JOIN_H
#define CKPT_RANK_JOIN_H

#include "source.h"

typedef struct ckpt_piece {
    const char *name; /* stored name; in the source's arena */
    int64_t dims[CKPT_MAX_RANK], lo[CKPT_MAX_RANK], len[CKPT_MAX_RANK], stride[CKPT_MAX_RANK];
    uint64_t offset;
    size_t seq;
    uint32_t file;
    ckpt_dtype dtype;
    int rank;
    bool strided, big_endian;
} ckpt_piece;

/* Zero-initialise; release frees. */
typedef struct ckpt_join {
    ckpt_piece *pieces;
    size_t n, cap;
} ckpt_join;

/* A piece that is a part of the file's tensor `t` (rows [row, row + rows) of axis 0). */
ckpt_status ckpt_join_add(ckpt_join *join, const ckpt_piece *piece, ckpt_err *err) CKPT_MUST_USE;
/* Fill src->tensors and src->replicas. Errors: CKPT_E_FORMAT naming tensor and rank file whose shape
 * or dtype differs from another rank's. */
ckpt_status ckpt_join_finish(ckpt_join *join, ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;
void ckpt_join_release(ckpt_join *join);

#endif
