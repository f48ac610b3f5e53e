/* The executor: workers that each read, gather, convert, hash and write their own piece.
 *
 * Work items are (a) pieces of output files, some MiB, aligned in the file, in file order, files
 * interleaved; (b) groups of sixteen 1 MiB Merkle leaves of canonical tensors. Buffers come from one
 * arena allocated before the first item; its size is bounded by `memory`. File digests need file
 * order: a piece is offered at its file's turnstile when its data is in memory, and is digested there
 * by whoever serves it. Results do not depend on the number of threads or on `memory`. */
#ifndef CKPT_STREAM_H
#define CKPT_STREAM_H

#include "hash.h"
#include "io.h"
#include "plan.h"
#include "share.h"

typedef struct ckpt_progress {
    /* Bytes; `now` is the tensor that the calling worker works on, or NULL. From one thread. */
    void (*tick)(void *self, uint64_t done, uint64_t total, const char *now);
    void *self;
} ckpt_progress;

typedef struct ckpt_stream_opts {
    int threads;                   /* 0 = all cores */
    uint64_t memory;               /* bytes for buffers; at least 1 MiB is used */
    const ckpt_progress *progress; /* NULL = none */
    struct ckpt_journal *journal;  /* of a directory being written (journal.h); NULL = none */
    /* Leaves beside the file digest: above 0 yes, below no, 0 whatever is faster here. No result
     * depends on it. */
    int beside;
    /* Processes that do one job together; NULL: this one. Every one of them has the results in the
     * end. A journal is theirs together (ckpt_journal_join); ckpt_stream_visit does everything in each. */
    const ckpt_share *share;
} ckpt_stream_opts;

/* Digests of one canonical tensor. */
typedef struct ckpt_tensor_hash {
    uint8_t digest[CKPT_SHA256_LEN];
    uint8_t *leaves; /* n_leaves * 32, in the caller's arena */
    uint64_t n_leaves;
} ckpt_tensor_hash;

typedef struct ckpt_file_hash {
    uint8_t sha256[CKPT_SHA256_LEN]; /* of all bytes */
    uint8_t rest[CKPT_SHA256_LEN];   /* of the bytes that belong to no canonical tensor, in order */
    uint64_t size;
} ckpt_file_hash;

typedef struct ckpt_convert_result {
    ckpt_tensor_hash *tensors; /* per plan->results */
    ckpt_file_hash *files;     /* per plan->sink.files */
    uint8_t root[CKPT_SHA256_LEN];
    /* Of the whole source model as it was, whatever the plan casts; known only when every tensor of
     * the model takes part as itself (none left out, none folded), else false and zeros. */
    bool has_source_root;
    uint8_t source_root[CKPT_SHA256_LEN];
    uint64_t bytes;        /* written */
    uint64_t buffer_bytes; /* arena actually allocated */
} ckpt_convert_result;

/* Write every file of the plan below dir (which exists; commit protocol is the caller's), fsync
 * them, and compute all digests. Arrays are allocated in `arena`. */
ckpt_status ckpt_stream_convert(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                                ckpt_arena *arena, ckpt_convert_result *out,
                                ckpt_err *err) CKPT_MUST_USE;

/* Put the manifest into the file at `path` that ckpt_stream_convert made for a sink with calls
 * (source.h, ckpt_serial), fsync it, and compute its digests; does nothing for other sinks. */
ckpt_status ckpt_stream_seal(ckpt_plan *plan, const char *path, const char *manifest, size_t n,
                             ckpt_convert_result *out, ckpt_err *err) CKPT_MUST_USE;

/* Digest every canonical tensor of a model; out has model->n_tensors entries. root may be NULL. */
ckpt_status ckpt_stream_digest(const ckpt_model *model, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_tensor_hash *out,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err) CKPT_MUST_USE;

/* Digest what belongs to no canonical tensor: `size` and `rest` of every real file of the source. out
 * has room for all of them. */
ckpt_status ckpt_stream_rest(const ckpt_model *model, const ckpt_stream_opts *opts,
                             ckpt_file_hash *out, ckpt_err *err) CKPT_MUST_USE;

/* Both kinds of digests in one pass over the source: of canonical tensors [lo, hi), and of the whole and
 * the rest of every real file. tensors: hi - lo entries, with leaves in `arena`; files: as many as the
 * source has real ones; root: over these tensors, or NULL. opts must be given. */
ckpt_status ckpt_stream_verify(const ckpt_model *model, size_t lo, size_t hi,
                               const ckpt_stream_opts *opts, ckpt_arena *arena,
                               ckpt_tensor_hash *tensors, ckpt_file_hash *files,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err) CKPT_MUST_USE;

/* Visit canonical tensors in parallel, in blocks: fn(self, tensor, lo, data, n) sees every byte of
 * every tensor once; calls for one tensor come in order from one thread at a time. For statistics,
 * NaN scans and diff. `other` non-NULL: pairs tensors (other_index[i] in the other model, or -1 to
 * skip) and passes both buffers, which have equal n. fn may clear select[tensor] when it has seen enough
 * of that tensor. */
typedef ckpt_status (*ckpt_visit_fn)(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                                     const uint8_t *b, size_t n, ckpt_err *err);
ckpt_status ckpt_stream_visit(const ckpt_model *model, const ckpt_model *other,
                              const int64_t *other_index, const bool *select,
                              const ckpt_stream_opts *opts, ckpt_visit_fn fn, void *self,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
