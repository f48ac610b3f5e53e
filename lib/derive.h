/* Tensors that are computed: the fold of a low-rank pair into a full matrix, while it is read, and the
 * factors of a full matrix (factor.h). */
#ifndef CKPT_DERIVE_H
#define CKPT_DERIVE_H

#include "plan.h"

#define CKPT_DERIVED_FILE ((uint32_t)0x80000000) /* file number of copies from a derived tensor */

/* out [rows, cols] = b [rows, inner] . a [inner, cols]; products and sums in double over ascending
 * inner index, rounded once to dtype. Source: conversion-maps.md section 2, "fold". */
typedef struct ckpt_derived {
    ckpt_tensor tensor; /* as a stored tensor: one row-major chunk of CKPT_DERIVED_FILE at 0 */
    ckpt_chunk chunk;
    ckpt_gather a, b;
    int64_t rows, inner, cols;
    const struct ckpt_factor *factor; /* one of two factors of that matrix; NULL: a fold */
} ckpt_derived;

/* Make the fold of canonical tensors b and a (2-D, same castable dtype) in the arena. */
ckpt_status ckpt_derive_fold(const ckpt_model *model, const ckpt_canon *a, const ckpt_canon *b,
                             const char *name, ckpt_arena *arena, ckpt_derived **out,
                             ckpt_err *err) CKPT_MUST_USE;
/* Bytes [offset, offset+n) of the result. Thread-safe; allocates a's matrix and one row. */
ckpt_status ckpt_derived_read(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err) CKPT_MUST_USE;

#endif
