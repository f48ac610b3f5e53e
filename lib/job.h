/* Workers and Merkle leaves: what the parts of the executor (stream.h) share. */
#ifndef CKPT_JOB_H
#define CKPT_JOB_H

#include "stream.h"

#include <pthread.h>
#include <stdatomic.h>

#define CKPT_PIECE_MAX ((uint64_t)2 << 20) /* bytes of output or tensor handled at once */

typedef struct ckpt_job ckpt_job;

typedef struct ckpt_worker {
    ckpt_job *job;
    uint8_t *buf; /* piece_size bytes, page-aligned */
    ckpt_scratch scratch;
    ckpt_sha256 sha;
    int index;
    const char *now; /* tensor it works on, for progress; or NULL */
    ckpt_err err;
    pthread_t thread;
} ckpt_worker;

struct ckpt_job {
    ckpt_status (*run)(ckpt_worker *w, size_t item, ckpt_err *err);
    void (*give_up)(ckpt_job *j); /* wake everybody who may be waiting */
    void *self;
    size_t n_items;
    uint64_t piece; /* bytes; set before opening: the most that is wanted, 0 = CKPT_PIECE_MAX */
    int n_workers;
    ckpt_worker *workers;
    uint8_t *arena;
    uint64_t arena_bytes;
    atomic_size_t next;
    atomic_bool stop;
    atomic_ullong done_bytes;
    uint64_t total_bytes;
    const ckpt_progress *progress;
    pthread_mutex_t lock;
    ckpt_status status; /* first failure, under lock */
    ckpt_err *err;
};

/* Choose workers and piece size so that all buffers fit opts->memory, and allocate them at once. */
ckpt_status ckpt_job_open(ckpt_job *j, const ckpt_stream_opts *opts, ckpt_err *err) CKPT_MUST_USE;
/* Run all items; returns the first failure, whose message is then in the err of ckpt_job_open. */
ckpt_status ckpt_job_run(ckpt_job *j) CKPT_MUST_USE;
void ckpt_job_close(ckpt_job *j);
void ckpt_job_advance(ckpt_worker *w, uint64_t bytes); /* progress */

/* One Merkle leaf of a tensor to be hashed. */
typedef struct ckpt_leaf {
    const ckpt_gather *gather;
    uint64_t index;
    uint32_t bytes;
    uint8_t *out; /* its hash */
} ckpt_leaf;

/* Growable list of leaves. A work item is a group of up to CKPT_LEAF_GROUP consecutive ones, of any
 * tensors, that are hashed side by side. */
#define CKPT_LEAF_GROUP CKPT_SHA256_LANES
typedef struct ckpt_leaf_list {
    ckpt_leaf *leaves;
    size_t n, cap;
} ckpt_leaf_list;

/* Room for the tensor's leaf hashes in the arena, and its leaves appended to the list. */
ckpt_status ckpt_add_leaves(ckpt_leaf_list *list, const ckpt_gather *g, ckpt_arena *arena,
                            ckpt_tensor_hash *out, ckpt_err *err) CKPT_MUST_USE;
size_t ckpt_leaf_groups(const ckpt_leaf_list *list);
uint64_t ckpt_leaf_group_bytes(const ckpt_leaf_list *list, size_t group);
/* Gather and hash `count` of them, at most CKPT_LEAF_GROUP. */
ckpt_status ckpt_hash_leaves(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             ckpt_err *err) CKPT_MUST_USE;
/* The same for one group of a list. */
ckpt_status ckpt_hash_leaf_group(ckpt_worker *w, ckpt_source *src, const ckpt_leaf_list *list,
                                 size_t group, ckpt_err *err) CKPT_MUST_USE;

/* All leaves of a job that several processes share, and whose each is. */
typedef struct ckpt_leaf_shares {
    ckpt_leaf *all;
    int *owner;
    size_t n;
} ckpt_leaf_shares;

/* Leave in the list those of this process; nothing changes if it is alone. */
ckpt_status ckpt_leaves_divide(ckpt_leaf_list *list, const ckpt_share *share, ckpt_leaf_shares *out,
                               ckpt_err *err) CKPT_MUST_USE;
/* Exchange the hashes: afterwards every process has all of them where `out` points. */
ckpt_status ckpt_leaves_collect(const ckpt_leaf_shares *shares, const ckpt_share *share,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_leaf_shares_free(ckpt_leaf_shares *shares);
/* Leaves of all results of a plan and, where a cast changes them, of their originals, in the order
 * in which the target is written. hashes and originals: n_results each. */
ckpt_status ckpt_list_results(ckpt_plan *plan, ckpt_leaf_list *leaves, ckpt_arena *arena,
                              ckpt_tensor_hash *hashes, ckpt_tensor_hash *originals,
                              ckpt_err *err) CKPT_MUST_USE;
/* Tensor digests and both roots of out, once the leaves are hashed. Overwrites originals. */
ckpt_status ckpt_finish_results(const ckpt_plan *plan, ckpt_sha256 *sha,
                                ckpt_tensor_hash *originals, ckpt_convert_result *out,
                                ckpt_err *err) CKPT_MUST_USE;
/* ckpt_stream_convert for a sink that has calls instead of segments; path: the file to create. */
ckpt_status ckpt_stream_serial(ckpt_plan *plan, const char *path, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_convert_result *out,
                               ckpt_err *err) CKPT_MUST_USE;
/* Root over n tensors in name order. */
ckpt_status ckpt_finish_root(const ckpt_tensor_hash *hashes, const char *const *names, size_t n,
                             uint8_t root[CKPT_SHA256_LEN], ckpt_err *err) CKPT_MUST_USE;

#endif
