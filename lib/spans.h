/* Sets of bytes [0] to [1] of a file or a tensor, and what lies between them. */
#ifndef CKPT_SPANS_H
#define CKPT_SPANS_H

#include "gather.h"

/* Zero-initialise; free(span) ends it. */
typedef struct ckpt_spans {
    uint64_t (*span)[2];
    size_t n, cap;
} ckpt_spans;

/* A ckpt_run_fn; self: the spans. Errors: CKPT_E_NOMEM. */
ckpt_status ckpt_spans_add(void *self, uint64_t offset, uint64_t len, ckpt_err *err) CKPT_MUST_USE;
/* In order, none touching another: runs of tensors that take turns in a file become one span. */
void ckpt_spans_settle(ckpt_spans *s);
/* fn for what of [lo, hi) is in none, in order; s is settled. Errors: those of fn. */
ckpt_status ckpt_spans_gaps(const ckpt_spans *s, uint64_t lo, uint64_t hi, ckpt_run_fn fn,
                            void *self, ckpt_err *err) CKPT_MUST_USE;

#endif
