/* Parallel meshes and how they cut tensors: the only file that divides by a world size.
 *
 * Rank order is Megatron's default "tp-cp-ep-dp-pp" (tp fastest, pp slowest). Dense weights of a
 * pipeline stage live on data-parallel replica 0: rank = stage * per_stage + tp. Experts live on
 * rank stage * per_stage + ep * etp_size + etp. CP and DP only replicate; they widen the stage. */
#ifndef CKPT_SHARD_H
#define CKPT_SHARD_H

#include "arena.h"
#include "source.h"

/* How an axis of a view is cut. */
typedef enum ckpt_cut {
    CKPT_CUT_NONE,
    CKPT_CUT_TP,     /* equal contiguous parts, one per TP rank */
    CKPT_CUT_ETP,    /* the same over the expert-TP group */
    CKPT_CUT_EP,     /* every index is a chunk of its own; owner by equal blocks over EP */
    CKPT_CUT_UNIT,   /* every index is a chunk of its own, same owner */
    CKPT_CUT_TP_DIM, /* on the first axis of a dimension: the whole dimension in equal parts */
    CKPT_CUT_HEAD,   /* as TP; where TP is a multiple of the heads, cut inside them: the whole
                      dimension in equal parts if it divides, else not at all */
    CKPT_CUT_GROUP,  /* the same, where the model does run with a group of heads on several ranks
                       (key and value heads): *inside is not set */
    CKPT_CUT_PP      /* every index is a chunk of its own; owner by equal blocks over PP */
} ckpt_cut;

/* One factor of a stored dimension: the dimension is the row-major product of its axes. A tensor
 * occupies indices [lo, lo + len) of each axis. */
typedef struct ckpt_axis {
    const char *symbol; /* for messages: "F", "KDA heads" */
    int64_t size, lo, len;
    int dim; /* stored dimension */
    ckpt_cut cut;
} ckpt_axis;

typedef struct ckpt_map {
    const ckpt_axis *axis; /* ordered by dim, outermost factor first */
    int n;
} ckpt_map;

/* Axes as they are named in files and options; those that cut what is stored come before dp. */
enum { CKPT_MESH_STORED = 5, CKPT_MESH_AXES };
extern const char *const ckpt_mesh_axes[CKPT_MESH_AXES];
int *ckpt_mesh_size(ckpt_mesh *mesh, int axis);
/* Fill defaults (etp = tp), check positivity and that the product fits (USAGE errors). */
ckpt_status ckpt_mesh_resolve(ckpt_mesh *mesh, ckpt_err *err) CKPT_MUST_USE;
/* Number of ranks: pp * max(tp * cp * dp, etp * ep), made a multiple of both. */
int ckpt_mesh_world(const ckpt_mesh *mesh);
/* Ranks of one pipeline stage, and what one of them (0-based in its stage) is. */
typedef struct ckpt_coord {
    int tp, etp, ep;
} ckpt_coord;
int ckpt_mesh_stage_ranks(const ckpt_mesh *mesh);
ckpt_coord ckpt_mesh_coord(const ckpt_mesh *mesh, int rank);
/* Pipeline stage of block b of n: equal contiguous blocks; n must divide by pp (USAGE). Blocks from
 * n on are those of multi-token prediction and belong to the last stage. In check_blocks n may count
 * layers instead; `what` ("blocks", "layers") says so. */
ckpt_status ckpt_mesh_check_blocks(const ckpt_mesh *mesh, int n_blocks, const char *what,
                                   ckpt_err *err) CKPT_MUST_USE;
int ckpt_mesh_stage(const ckpt_mesh *mesh, int block, int n_blocks);

/* Cut a stored tensor (rank dims, viewed as map) over the mesh: chunks in row-major grid order with
 * lo/len in stored coordinates, and owners. mesh NULL or a view without cuts: one chunk, owner of
 * rank 0 of the stage. *inside (may be NULL) is set true when heads were cut inside or kept whole
 * because TP exceeds them: storage only, Megatron-Core itself wants whole heads. Errors: CKPT_E_USAGE "SYMBOL 3 is not divisible by TP 2". */
ckpt_status ckpt_shard_cut(const ckpt_mesh *mesh, int stage, int rank, const int64_t *dims,
                           const ckpt_map *map, ckpt_arena *arena, ckpt_out_chunk **chunks,
                           size_t *n_chunks, bool *inside, ckpt_err *err) CKPT_MUST_USE;

/* Context parallelism cuts sequences, not weights. Token ranges of rank r of n over t tokens:
 * contiguous for recurrent layers, zigzag (chunks r and 2n-1-r of 2n) for softmax attention. */
typedef struct ckpt_span {
    int64_t lo, len;
} ckpt_span;
ckpt_status ckpt_shard_sequence(int64_t tokens, int rank, int n, bool zigzag, ckpt_span out[2],
                                int *n_spans, ckpt_err *err) CKPT_MUST_USE;

#endif
