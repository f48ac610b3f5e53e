/* libckpt: open checkpoints, enumerate their tensors, read parts of them at any mesh, digest, convert
 * and verify. The one installed header; C and C++.
 *
 *   ckpt_checkpoint *c;
 *   ckpt_err err;
 *   if (ckpt_open("run/iter_0001000", NULL, &c, &err) != CKPT_OK)
 *       complain(err.text);                     // one line naming file, tensor, found and expected
 *   for (size_t i = 0; i < ckpt_tensor_count(c); i++) { ckpt_tensor_info t; ckpt_tensor_at(c, i, &t); ... }
 *   ckpt_close(c);
 *
 * Conventions. Every fallible function returns a ckpt_status and fills *err, which may be NULL; what
 * it was to deliver is then NULL or unchanged. Tensors have their canonical names where a model family
 * is known, else their stored ones, and are sorted by name. Shapes, offsets and lengths count
 * elements, sizes count bytes. Bytes are little-endian and row-major. Strings and arrays that are
 * handed out belong to the object they came from and live as long as it. A checkpoint may be used by
 * several threads at once, but for ckpt_open, ckpt_close and ckpt_view_open. Nothing is printed, no
 * signal is caught, the process never ends. HDF5 files are looked at in a child process (fork).
 *
 * ABI: within one value of CKPT_ABI functions and enumerators are only added. Structures that a caller
 * allocates have a fixed size; `reserved` members must be 0. */
#ifndef CKPT_H
#define CKPT_H

#include <stddef.h>
#include <stdint.h>

#define CKPT_VERSION "0.1.0"

/* Status codes: every fallible function returns one. The second column is the
 * exit code of the command-line program (product contract: 0 success, 1 differs,
 * 2 usage, 3 malformed input, 4 unsupported or refused, 5 I/O, 130 interrupted). */
#define CKPT_STATUS_LIST(X)                                                                        \
    X(OK, 0, "ok")                                                                                 \
    X(E_MISMATCH, 1, "differs")                                                                    \
    X(E_USAGE, 2, "usage")                                                                         \
    X(E_FORMAT, 3, "malformed input")                                                              \
    X(E_UNSUPPORTED, 4, "unsupported or refused")                                                  \
    X(E_IO, 5, "input/output")                                                                     \
    X(E_NOMEM, 5, "out of memory")                                                                 \
    X(E_INTERRUPTED, 130, "interrupted")                                                           \
    X(E_INTERNAL, 70, "internal error")

typedef enum ckpt_status {
#define CKPT_STATUS_ENUM(name, exit_code, text) CKPT_##name,
    CKPT_STATUS_LIST(CKPT_STATUS_ENUM)
#undef CKPT_STATUS_ENUM
} ckpt_status;

#define CKPT_ABI 0
#define CKPT_ERR_MAX 2048

#if defined(__GNUC__)
#define CKPT_API __attribute__((visibility("default")))
#else
#define CKPT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong: the status and one printable line of context, outermost frame first. */
typedef struct ckpt_err {
    ckpt_status code;
    char text[CKPT_ERR_MAX]; /* NUL-terminated; long chains lose their innermost tail */
} ckpt_err;

/* Parallel sizes, >= 1; etp 0 means "as tp". */
typedef struct ckpt_mesh {
    int tp, pp, ep, etp, cp, dp;
} ckpt_mesh;

/* CKPT_VERSION and CKPT_ABI of the library that runs. */
CKPT_API const char *ckpt_version(void);
CKPT_API int ckpt_abi(void);
/* One word or a few for people: "malformed input". */
CKPT_API const char *ckpt_status_text(ckpt_status status);

/* ---- checkpoints --------------------------------------------------------------------------- */

typedef struct ckpt_checkpoint ckpt_checkpoint;

typedef struct ckpt_open_options {
    int64_t iteration;     /* of a save root; -1: the newest complete one */
    int32_t allow_unknown; /* tensors that the model does not have are no error */
    int32_t threads;       /* of digests; 0: all cores */
    uint64_t memory;       /* bytes for buffers; 0: 1 GiB */
    uint64_t reserved[4];
} ckpt_open_options;

/* Open a file, a directory of shards, an iteration directory or a save root; headers are validated,
 * no tensor is read. options NULL: the newest iteration, unknown tensors refused.
 * Errors: CKPT_E_FORMAT, CKPT_E_UNSUPPORTED (unknown tensors), CKPT_E_IO, CKPT_E_NOMEM. */
CKPT_API ckpt_status ckpt_open(const char *path, const ckpt_open_options *options,
                               ckpt_checkpoint **out, ckpt_err *err);
/* Also ends what ckpt_map_part handed out, and views. NULL is fine. */
CKPT_API void ckpt_close(ckpt_checkpoint *c);

/* "torch_dist"; "megatron:hybrid", or NULL if no model family is known. */
CKPT_API const char *ckpt_container_name(const ckpt_checkpoint *c);
CKPT_API const char *ckpt_layout_name(const ckpt_checkpoint *c);
/* The canonical model configuration as JSON with sorted keys, or NULL. */
CKPT_API const char *ckpt_config(const ckpt_checkpoint *c);
/* Parallel sizes it was written with, as far as it tells. */
CKPT_API ckpt_mesh ckpt_stored_mesh(const ckpt_checkpoint *c);
/* -1: it does not tell. */
CKPT_API int64_t ckpt_iteration(const ckpt_checkpoint *c);

typedef struct ckpt_tensor_info {
    const char *name;
    const char *stored; /* name of the stored tensor it lies in */
    const char *dtype;  /* safetensors' spelling: "BF16" */
    const int64_t *shape;
    uint64_t bytes;
    int32_t rank;
    int32_t optimizer; /* 1: state of an optimizer */
} ckpt_tensor_info;

CKPT_API size_t ckpt_tensor_count(const ckpt_checkpoint *c);
/* index < ckpt_tensor_count; else *out is zeroed. */
CKPT_API void ckpt_tensor_at(const ckpt_checkpoint *c, size_t index, ckpt_tensor_info *out);
/* By name; -1 if there is none. */
CKPT_API int64_t ckpt_tensor_find(const ckpt_checkpoint *c, const char *name);

/* Read the part [lo, lo + len) of every axis into out, which has room for n bytes, exactly the size of
 * the part. lo, len: rank numbers each; both NULL: the whole tensor. However the tensor is stored -
 * fused, cut over ranks, big-endian, compressed - it comes in its own row-major form.
 * Errors: CKPT_E_USAGE (bounds, n), CKPT_E_IO, CKPT_E_FORMAT, CKPT_E_NOMEM. */
CKPT_API ckpt_status ckpt_read_part(const ckpt_checkpoint *c, size_t index, const int64_t *lo,
                                    const int64_t *len, void *out, size_t n, ckpt_err *err);
/* The same part without a copy, where it lies in one piece in a file: *out points into a mapping that
 * lives until ckpt_close. Its alignment is that of the file. A file that is cut short meanwhile makes
 * reading fault (SIGBUS), as with any mapping. CKPT_E_UNSUPPORTED: not in one piece; use ckpt_read_part. */
CKPT_API ckpt_status ckpt_map_part(ckpt_checkpoint *c, size_t index, const int64_t *lo,
                                   const int64_t *len, const void **out, size_t *n, ckpt_err *err);

/* Compute all digests (once; later calls answer at once). root, 32 bytes: equal for equal models at
 * any container, layout and mesh. */
CKPT_API ckpt_status ckpt_digest(ckpt_checkpoint *c, uint8_t root[32], ckpt_err *err);
/* Of one tensor, after ckpt_digest. Errors: CKPT_E_USAGE. */
CKPT_API ckpt_status ckpt_digest_of(const ckpt_checkpoint *c, size_t index, uint8_t out[32],
                                    ckpt_err *err);

/* ---- views: a checkpoint as it would lie in another layout and mesh -------------------------- */

typedef struct ckpt_view ckpt_view;

/* layout: "keep", "hf", "megatron" or "fla". Nothing is written. The view ends with the checkpoint, or
 * at ckpt_view_close. Errors: CKPT_E_UNSUPPORTED (no such layout for this model; a lossy step),
 * CKPT_E_USAGE (sizes that do not divide). */
CKPT_API ckpt_status ckpt_view_open(ckpt_checkpoint *c, const char *layout, const ckpt_mesh *mesh,
                                    ckpt_view **out, ckpt_err *err);
CKPT_API void ckpt_view_close(ckpt_view *v);
/* Ranks of the mesh: pp * max(tp * cp * dp, etp * ep), tp fastest. */
CKPT_API int ckpt_view_ranks(const ckpt_view *v);
CKPT_API size_t ckpt_view_count(const ckpt_view *v);
/* Names are stored names of the layout; stored is the same. */
CKPT_API void ckpt_view_tensor(const ckpt_view *v, size_t index, ckpt_tensor_info *out);

typedef struct ckpt_shard_info {
    const int64_t *lo, *len; /* part of the tensor; rank numbers each */
    uint64_t bytes;
    int32_t owner; /* rank that has it (of those that have the same: the first) */
    int32_t reserved;
} ckpt_shard_info;

CKPT_API size_t ckpt_shard_count(const ckpt_view *v, size_t index);
CKPT_API void ckpt_shard(const ckpt_view *v, size_t index, size_t shard, ckpt_shard_info *out);
/* Read one shard into n bytes. Errors: as ckpt_read_part. */
CKPT_API ckpt_status ckpt_shard_read(const ckpt_view *v, size_t index, size_t shard, void *out,
                                     size_t n, ckpt_err *err);

/* ---- commands ------------------------------------------------------------------------------ */

/* What the program of the same name does, in this process, with its options (`ckpt COMMAND --help`) in
 * a NULL-terminated array or NULL: {"--to", "torch_dist", "--tp", "2", NULL}. json (may be NULL)
 * receives the document of --json, also after a failure: release it with ckpt_free. CKPT_E_MISMATCH:
 * it differs, or did not verify. One at a time. */
CKPT_API ckpt_status ckpt_convert(const char *source, const char *destination,
                                  const char *const *options, char **json, ckpt_err *err);
CKPT_API ckpt_status ckpt_verify(const char *path, const char *const *options, char **json,
                                 ckpt_err *err);
CKPT_API ckpt_status ckpt_diff(const char *a, const char *b, const char *const *options,
                               char **json, ckpt_err *err);
CKPT_API void ckpt_free(void *p);

#ifdef __cplusplus
}
#endif

#endif
