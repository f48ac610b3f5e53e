/* Building gathers: composing a destination view with a source view and the source's chunks. */
#ifndef CKPT_GATHER_H
#define CKPT_GATHER_H

#include "plan.h"

#define CKPT_MAX_LOOPS 48 /* nested loops of a copy */

/* A destination box: the part [lo, lo+len) (stored coordinates) of a tensor seen through map. */
typedef struct ckpt_dst {
    const ckpt_map *map; /* where the canonical tensor sits in the destination tensor */
    int rank;
    const int64_t *dims, *lo, *len;
} ckpt_dst;

/* Copies being collected for one gather. Zero-initialise; release frees. */
typedef struct ckpt_copies {
    ckpt_copy *copies;
    size_t n, cap;
} ckpt_copies;

/* The stored (or derived) tensor that holds a canonical one. */
const ckpt_tensor *ckpt_canon_tensor(const ckpt_source *src, const ckpt_canon *c);
/* Row-major gather of one canonical tensor. */
ckpt_status ckpt_gather_canon(const ckpt_source *src, const ckpt_canon *c, ckpt_arena *arena,
                              ckpt_gather *out, ckpt_err *err) CKPT_MUST_USE;

/* Append the copies that bring canonical tensor `c` into the part of it that lies in dst.
 * *bytes receives the destination bytes (source dtype) they cover. Loops live in the arena. */
ckpt_status ckpt_gather_add(const ckpt_source *src, const ckpt_canon *c, const ckpt_dst *dst,
                            ckpt_arena *arena, ckpt_copies *out, uint64_t *bytes,
                            ckpt_err *err) CKPT_MUST_USE;
/* Elements of dst's box that lie in the box of `map` (no source involved). */
ckpt_status ckpt_box_volume(const ckpt_map *map, const ckpt_dst *dst, int64_t *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* Sort the copies into out; frees the collection. */
ckpt_status ckpt_gather_seal(ckpt_copies *copies, ckpt_arena *arena, ckpt_gather *out,
                             ckpt_err *err) CKPT_MUST_USE;

/* Contiguous source byte runs of a copy, merged where they touch, in no fixed order. */
typedef ckpt_status (*ckpt_run_fn)(void *self, uint64_t offset, uint64_t len, ckpt_err *err);
ckpt_status ckpt_copy_src_runs(const ckpt_copy *copy, int elem, ckpt_run_fn fn, void *self,
                               ckpt_err *err) CKPT_MUST_USE;
/* Contiguous destination byte runs of a gather that are padding, inside [lo, lo+n), ascending.
 * Offsets and lengths are in the source dtype. */
ckpt_status ckpt_gather_holes(const ckpt_gather *g, uint64_t lo, uint64_t n, ckpt_run_fn fn,
                              void *self, ckpt_err *err) CKPT_MUST_USE;

#endif
