/* Work divided between the processes of one run: each takes a contiguous share of a list, by bytes,
 * and all then get each other's results. The transport is the caller's (MPI under tools/), so that
 * this library needs none. */
#ifndef CKPT_SHARE_H
#define CKPT_SHARE_H

#include "arena.h"
#include "err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ckpt_share {
    int rank, size;
    /* counts[rank] bytes of every rank, one after the other, into all; mine: this rank's. All ranks
     * call it in the same order with the same counts. */
    ckpt_status (*allgather)(void *self, const void *mine, const int64_t *counts, void *all,
                             ckpt_err *err);
    void *self;
} ckpt_share;

static inline bool ckpt_share_alone(const ckpt_share *s)
{
    return s == NULL || s->size <= 1;
}

/* Which rank has the thing whose bytes are [at, at + bytes) of `total`: the one in whose part of the
 * total its middle lies. Grows with `at`, so shares are contiguous. */
int ckpt_share_of(const ckpt_share *s, uint64_t at, uint64_t bytes, uint64_t total);

/* Every rank says how it fared; if one failed, all fail with the status of the first that did: the ranks
 * that did not, with "rank N of M: " and its words. */
ckpt_status ckpt_share_agree(const ckpt_share *s, ckpt_status mine, ckpt_err *err) CKPT_MUST_USE;

/* Rank 0's text to all, in `arena`. NULL stays NULL; alone nothing happens. Errors also: CKPT_E_NOMEM. */
ckpt_status ckpt_share_tell(const ckpt_share *s, ckpt_arena *arena, const char **text,
                            ckpt_err *err) CKPT_MUST_USE;

/* table: n elements of `elem` bytes. owner[i] has computed element i; afterwards all ranks have all. */
ckpt_status ckpt_share_table(const ckpt_share *s, void *table, size_t n, size_t elem,
                             const int *owner, ckpt_err *err) CKPT_MUST_USE;

#endif
