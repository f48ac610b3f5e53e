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
    /* out [rows, cols] = b, E2M1 codes two a byte in U8 [rows, cols/2], the even column in the low
     * nibble, times a F8_E4M3 [rows, cols/16] times g F32 []: single precision, the two scales first,
     * rounded once to BF16. Source: quant-emulation.md section 2, NVFP4 `store`. */
    CKPT_DERIVE_NVFP4,
    /* out [rows, cols] = b F8_E4M3 [rows, cols] times 2^(a - 127), a U8 or F8_E8M0 [rows, cols/32];
     * rounded once to BF16. */
    CKPT_DERIVE_MXFP8,
    CKPT_DERIVE_FACTOR /* one of the two factors of a matrix, computed before */
} ckpt_derive_kind;

#define CKPT_FP8_BLOCK 128
#define CKPT_NVFP4_BLOCK 16
#define CKPT_MXFP8_BLOCK 32

typedef struct ckpt_derived {
    ckpt_derive_kind kind;
    ckpt_tensor tensor; /* as a stored tensor: one row-major chunk of CKPT_DERIVED_FILE at 0 */
    ckpt_chunk chunk;
    ckpt_gather a, b;
    ckpt_gather g;              /* NVFP4: the scale of the whole tensor; else without copies */
    const char *scale, *scale2; /* NVFP4, MXFP8: stored names of a and g */
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
/* NVFP4 and MXFP8 weights of a source (X.weight with X.weight_scale, for NVFP4 X.weight_scale_2): from
 * here on they are BF16 [rows, cols] in src->tensors, and src->packed says what they are computed from.
 * Once a source; later calls do nothing. Errors: CKPT_E_FORMAT shapes that do not fit each other. */
ckpt_status ckpt_derive_packed(ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;
/* What a packed weight is computed from, by stored name; NULL: it is not packed. */
const ckpt_derived *ckpt_packed_find(const ckpt_source *src, const char *name);
/* A stored tensor as it is, row-major. */
ckpt_status ckpt_gather_stored(const ckpt_source *src, const ckpt_tensor *t, ckpt_arena *arena,
                               ckpt_gather *out, ckpt_err *err) CKPT_MUST_USE;
/* Bytes [offset, offset+n) of the result. Thread-safe; allocates a's matrix and one row (fold), or a few
 * hundred KiB and the scales of the rows touched (blocks). */
ckpt_status ckpt_derived_read(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err) CKPT_MUST_USE;

#endif
