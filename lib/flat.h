/* Ranges of a flattened box: as boxes again. Distributed optimizers cut flattened parameters. */
#ifndef CKPT_FLAT_H
#define CKPT_FLAT_H

#include <stddef.h>
#include <stdint.h>

/* Boxes that a range of a row-major block of that rank can be made of. */
#define CKPT_FLAT_BOXES(rank) ((rank) > 0 ? 2 * (size_t)(rank)-1 : 1)

/* The boxes of elements [lo, lo + n) of a row-major block, in order; each is contiguous in the range.
 * rank values each, from the block's corner. n > 0 lies inside the block, whose extents are positive.
 * lo_out and len_out have room for CKPT_FLAT_BOXES(rank) boxes. Returns their number. */
size_t ckpt_flat_split(int rank, const int64_t *block, int64_t lo, int64_t n, int64_t *lo_out,
                       int64_t *len_out);

#endif
