/* What a conversion writes, as a source: where the bytes of every result lie in the output, read from
 * the window of pieces in memory or, when they have left it, from the file. Digests thus speak of the
 * bytes that went out, whatever becomes of the source meanwhile. */
#ifndef CKPT_WRITTEN_H
#define CKPT_WRITTEN_H

#include "plan.h"
#include "window.h"

/* Two places of the output that must hold the same, because a reader will take either. */
typedef struct ckpt_twin {
    const char *name; /* of the tensor */
    ckpt_gather a, b;
    int64_t result; /* a is that of this result, whose digest is there anyway; -1: of none */
    const ckpt_result_tensor *repeat; /* with a result: b */
} ckpt_twin;

typedef struct ckpt_written {
    const ckpt_plan *plan;
    ckpt_arena arena;
    /* Files are those of the sink; or, when the plan has an image or is in place, those of its source;
     * or, of a sink with calls, one for each tensor. */
    ckpt_source src;
    ckpt_gather *results; /* per plan->results, row-major in the written dtype */
    ckpt_twin *twins;
    size_t n_twins;
    ckpt_window window;
    /* Set by the executor: bytes of a sink's file that one item covers, 0 if none does; and reading
     * from a file what is not in the window. */
    uint64_t (*step)(const void *self, uint32_t file);
    ckpt_status (*fetch)(void *self, uint32_t file, void *buf, size_t n, uint64_t offset,
                         ckpt_err *err);
    void *self;
} ckpt_written;

/* Where everything lies. The window stays closed. */
ckpt_status ckpt_written_open(ckpt_written *w, const ckpt_plan *plan, ckpt_err *err) CKPT_MUST_USE;
void ckpt_written_close(ckpt_written *w); /* also a zeroed one */

/* A result as a tensor of a source that has the output's tensors; `stored`: its index there. */
ckpt_status ckpt_written_canon(const ckpt_result_tensor *r, uint32_t stored, ckpt_canon *out,
                               ckpt_err *err) CKPT_MUST_USE;

/* need(self, leaf, file, lo, hi) for the bytes of a sink's file that each Merkle leaf of a gather is
 * made of, or a little more than those. file is a tensor if the sink has calls. */
typedef void (*ckpt_need_fn)(void *self, uint64_t leaf, uint32_t file, uint64_t lo, uint64_t hi);
void ckpt_written_needs(const ckpt_written *w, const ckpt_gather *g, ckpt_need_fn need, void *self);

/* Bytes [lo, lo + n) of a gather where they lie, if they lie in one piece in the window; else NULL. */
const uint8_t *ckpt_written_pin(ckpt_written *w, const ckpt_gather *g, uint64_t lo, size_t n,
                                ckpt_slot **pin);

#endif
