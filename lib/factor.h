/* Low-rank factors of a full matrix: two derived tensors that are computed together, once, before
 * anything is written. Their values wait in an unnamed file beside the output, so that memory does
 * not grow with the number of layers. */
#ifndef CKPT_FACTOR_H
#define CKPT_FACTOR_H

#include "derive.h"
#include "stream.h"

typedef struct ckpt_factor {
    struct ckpt_factor *next;
    const char *name;            /* canonical, of the full matrix */
    ckpt_gather full;            /* its bytes as F64, unless: */
    const ckpt_derived *product; /* the full matrix is this one (of type F64) */
    int64_t rows, cols, rank;
    ckpt_dtype dtype; /* of the factors as stored */
    uint64_t at;      /* of A in the file; B follows */
    int fd;           /* -1 until computed */
    double tail;      /* of the truncation alone: what the singular values left out amount to */
    double error;     /* relative Frobenius norm of W - B . A, the factors rounded to dtype */
    size_t line;      /* of plan->lossy */
    ckpt_derived a, b;
} ckpt_factor;

/* Prepare the factors of `full` (2-D, castable) as derived tensors f->a [rank, cols] and f->b
 * [rows, rank]; product (with low, high) instead: full = high . low of another inner rank. */
ckpt_status ckpt_factor_prepare(const ckpt_model *model, const ckpt_canon *full, int64_t rank,
                                ckpt_arena *arena, ckpt_factor **out, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_factor_product(const ckpt_model *model, const ckpt_canon *low,
                                const ckpt_canon *high, const char *name, int64_t rank,
                                ckpt_arena *arena, ckpt_factor **out, ckpt_err *err) CKPT_MUST_USE;

/* Compute all factors of a plan, several at a time while their work space fits opts->memory (one
 * does in any case), and complete their lossy lines with the error. dir: where the unnamed file is
 * made. The result does not depend on opts. Nothing to do without factors. */
ckpt_status ckpt_factor_run(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                            ckpt_err *err) CKPT_MUST_USE;
/* Bytes of a factor; CKPT_E_INTERNAL before ckpt_factor_run. */
ckpt_status ckpt_factor_read(const ckpt_derived *d, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;

#endif
