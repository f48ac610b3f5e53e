/* Workers and Merkle leaves: what the parts of the executor (stream.h) share. */
#ifndef CKPT_JOB_H
#define CKPT_JOB_H

#include "stream.h"
#include "written.h"

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
    /* Buffers that are not one worker's (window.h): set before opening the bytes of one (at most
     * wanted, 0: none) and how many are wanted beside one a worker. */
    uint64_t slot;
    size_t keep;
    uint8_t *slots; /* n_workers + keep of them */
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
/* Processors that its workers can keep busy. */
int ckpt_job_cores(const ckpt_stream_opts *opts);
/* Run all items; returns the first failure, whose message is then in the err of ckpt_job_open. */
ckpt_status ckpt_job_run(ckpt_job *j) CKPT_MUST_USE;
void ckpt_job_close(ckpt_job *j);
void ckpt_job_advance(ckpt_worker *w, uint64_t bytes); /* progress */

/* One Merkle leaf of a tensor to be hashed. */
typedef struct ckpt_leaf {
    const ckpt_gather *gather;
    ckpt_written *written; /* what it is gathered from; NULL: the source */
    uint64_t index;
    uint8_t *out; /* its hash */
    uint32_t bytes;
    uint32_t first, due; /* items that fill what it is made of, and all between */
} ckpt_leaf;
#define CKPT_NO_ITEM UINT32_MAX /* `first` of a leaf whose bytes are there from the beginning */

/* Growable list of leaves. A work item is a group of up to CKPT_LEAF_GROUP consecutive ones, of any
 * tensors, that are hashed side by side. */
#define CKPT_LEAF_GROUP CKPT_SHA256_LANES
typedef struct ckpt_leaf_list {
    ckpt_leaf *leaves;
    size_t n, cap;
} ckpt_leaf_list;

/* Room for the tensor's leaf hashes in the arena, and its leaves appended to the list. */
ckpt_status ckpt_add_leaves(ckpt_leaf_list *list, const ckpt_gather *g, ckpt_written *written,
                            ckpt_arena *arena, ckpt_tensor_hash *out, ckpt_err *err) CKPT_MUST_USE;
size_t ckpt_leaf_groups(const ckpt_leaf_list *list);
uint64_t ckpt_leaf_group_bytes(const ckpt_leaf_list *list, size_t group);
/* Gather and hash `count` of them, at most CKPT_LEAF_GROUP; src: of those that are not `written`, whose
 * items must be filled. */
ckpt_status ckpt_hash_leaves(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             ckpt_err *err) CKPT_MUST_USE;
/* The same for one group of a list. */
ckpt_status ckpt_hash_leaf_group(ckpt_worker *w, ckpt_source *src, const ckpt_leaf_list *list,
                                 size_t group, ckpt_err *err) CKPT_MUST_USE;
/* A job of its own for leaves whose bytes are all there. */
ckpt_status ckpt_hash_all(ckpt_source *src, const ckpt_leaf_list *list,
                          const ckpt_stream_opts *opts, ckpt_err *err) CKPT_MUST_USE;
/* Up to n bytes of a leaf from `done` on, at most those of `room`: in place (then *pin is to be
 * unpinned) or gathered into buf. */
ckpt_status ckpt_leaf_bytes(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, uint64_t done,
                            size_t n, uint8_t *buf, const uint8_t **at, ckpt_slot **pin,
                            ckpt_err *err) CKPT_MUST_USE;
/* Order by `due`, equal ones as they are; every due is below n_items. */
ckpt_status ckpt_leaves_by_due(ckpt_leaf_list *list, uint32_t n_items, ckpt_err *err) CKPT_MUST_USE;

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
/* Leaves of all results of a plan as they are written and, where a cast changes them, of their
 * originals in the source, in the order in which the target is written; then those of twins. hashes and
 * originals: n_results each; twins: 2 for each of written->twins. */
ckpt_status ckpt_list_results(ckpt_plan *plan, ckpt_written *written, ckpt_leaf_list *leaves,
                              ckpt_arena *arena, ckpt_tensor_hash *hashes,
                              ckpt_tensor_hash *originals, ckpt_tensor_hash *twins,
                              ckpt_err *err) CKPT_MUST_USE;
/* Originals are read when their results are: `due` of those that are not written. */
void ckpt_pace_originals(ckpt_leaf_list *leaves);
/* Twins that differ are read from a source that changed: CKPT_E_IO naming the tensor. */
ckpt_status ckpt_compare_twins(const ckpt_written *written, const ckpt_tensor_hash *hashes,
                               const ckpt_tensor_hash *twins, ckpt_err *err) CKPT_MUST_USE;
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
