/* Tensors that are computed: the fold of a low-rank pair into a full matrix and block-quantised weights
 * times their scales, while they are read, and the factors of a full matrix (factor.h). */
#ifndef CKPT_DERIVE_H
#define CKPT_DERIVE_H

#include "plan.h"

#define CKPT_DERIVED_FILE ((uint32_t)0x80000000) /* file number of copies from a derived tensor */

typedef enum ckpt_derive_kind {
    /* out [rows, cols] = b [rows, inner] . a [inner, cols]; products and sums in double over
     * ascending inner index, rounded once to dtype. Source: conversion-maps.md section 2, "fold". */
    CKPT_DERIVE_FOLD,
    /* out [rows, cols] = b [rows, cols] F8_E4M3 times a [ceil(rows/128), ceil(cols/128)] F32, the
     * scale of each 128 x 128 block (partial at the edges): product in single precision, rounded
     * once to BF16. Source: conversion-maps.md section 9. */
    CKPT_DERIVE_BLOCKS,
    CKPT_DERIVE_FACTOR /* one of the two factors of a matrix, computed before */
} ckpt_derive_kind;

#define CKPT_FP8_BLOCK 128

typedef struct ckpt_derived {
    ckpt_derive_kind kind;
    ckpt_tensor tensor; /* as a stored tensor: one row-major chunk of CKPT_DERIVED_FILE at 0 */
    ckpt_chunk chunk;
    ckpt_gather a, b;
    int64_t rows, inner, cols;
    const struct ckpt_factor *factor; /* FACTOR: of this matrix */
} ckpt_derived;

/* Make the fold of canonical tensors b and a (2-D, same castable dtype) in the arena. */
ckpt_status ckpt_derive_fold(const ckpt_model *model, const ckpt_canon *a, const ckpt_canon *b,
                             const char *name, ckpt_arena *arena, ckpt_derived **out,
                             ckpt_err *err) CKPT_MUST_USE;
/* Make the dequantised form of a stored weight (2-D, F8_E4M3) in the arena. Errors: CKPT_E_FORMAT
 * type, rank or shape of weight or scale. */
ckpt_status ckpt_derive_blocks(const ckpt_source *src, uint32_t weight, uint32_t scale,
                               ckpt_arena *arena, ckpt_derived **out, ckpt_err *err) CKPT_MUST_USE;
/* Bytes [offset, offset+n) of the result. Thread-safe; allocates a's matrix and one row (fold), or a few
 * hundred KiB and the scales of the rows touched (blocks). */
ckpt_status ckpt_derived_read(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err) CKPT_MUST_USE;

#endif
