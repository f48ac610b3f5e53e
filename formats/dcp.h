/* PyTorch Distributed Checkpoint directories, plain and as Megatron-Core `torch_dist`.
 *
 * Byte layout: .metadata is one pickle of torch.distributed.checkpoint.metadata.Metadata; every
 * __R_N.distcp file is a plain concatenation of torch.save items. Source: torch-formats.md sections
 * 1, 2, 4; megatron-dist-ckpt.md section 1. */
#ifndef CKPT_DCP_H
#define CKPT_DCP_H

#include "source.h"

/* Name of the object that holds the common state, and of its older file form. */
#define CKPT_DCP_COMMON_OBJECT "common_state/shard_0_1"
#define CKPT_DCP_COMMON_FILE "common.pt"
#define CKPT_DCP_TRACKER "latest_checkpointed_iteration.txt"

extern const ckpt_container ckpt_torch_dist; /* dcp.c; name "torch_dist" */

/* Read the source's common state, replace or insert the members of `args` (NULL: change nothing)
 * and write it as the payload of the common-state object (torch.save of a one-element list).
 * Members that keep their JSON value keep their pickled form, so enums and dtypes survive. Use the
 * result as an in-memory out object named CKPT_DCP_COMMON_OBJECT: ckpt_torch_dist.layout() needs
 * the bytes to derive common.pt, and refuses a common-state object given as a file range.
 * Errors: CKPT_E_FORMAT no or damaged common state; CKPT_E_UNSUPPORTED a common state that is not
 * a zip item. */
ckpt_status ckpt_dcp_common_with_args(ckpt_source *src, const ckpt_json *args,
                                      ckpt_buf *object_payload, ckpt_err *err) CKPT_MUST_USE;

/* One more member of the common state: PATH (dotted; where the dicts on the way exist) is the text,
 * what the payload of an object holds, or a JSON value as plain Python data. */
typedef struct ckpt_dcp_edit {
    const char *path;
    const char *text;
    const ckpt_object *object;
    const ckpt_json *json;
} ckpt_dcp_edit;
typedef struct ckpt_dcp_changes {
    const ckpt_json *args; /* as above, or NULL */
    const ckpt_dcp_edit *edits;
    size_t n_edits;
} ckpt_dcp_changes;
ckpt_status ckpt_dcp_common_changed(ckpt_source *src, const ckpt_dcp_changes *c,
                                    ckpt_buf *object_payload, ckpt_err *err) CKPT_MUST_USE;

/* The same for a common state in memory (its object payload, or a common.pt). */
ckpt_status ckpt_dcp_common_edit(const uint8_t *data, uint64_t length, const ckpt_dcp_changes *c,
                                 ckpt_buf *object_payload, ckpt_err *err) CKPT_MUST_USE;

/* ---- shared by dcp*.c --------------------------------------------------------------------- */

/* Rewrite a torch.save item holding a common state (a dict, or a list of one dict): as_list chooses
 * the form written; args as above. */
ckpt_status ckpt_dcp_repack(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                            bool as_list, const ckpt_json *args, ckpt_buf *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* The same for an item in memory. */
ckpt_status ckpt_dcp_repack_bytes(const uint8_t *data, uint64_t length, bool as_list,
                                  const ckpt_json *args, ckpt_buf *out,
                                  ckpt_err *err) CKPT_MUST_USE;
/* Append the members of a common state in memory as pickled key, value, key, value ...: those that
 * keep() wants and that hold no tensors. */
ckpt_status ckpt_dcp_common_members(const uint8_t *data, uint64_t length,
                                    bool (*keep)(const char *key), ckpt_buf *out,
                                    ckpt_err *err) CKPT_MUST_USE;
/* The torch.save item that is a whole file, its value in a list of one (what torch_dist holds of a
 * sharded object). */
ckpt_status ckpt_dcp_wrap_object(ckpt_source *src, uint32_t file, uint64_t length, ckpt_buf *out,
                                 ckpt_err *err) CKPT_MUST_USE;
/* A new common state from args alone; sharding_type of the optimizer may be NULL. */
ckpt_status ckpt_dcp_new_common(const ckpt_json *args, int64_t iteration, const char *sharding_type,
                                bool as_list, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;

/* What a new common state says of the optimizer states among out's tensors, or NULL. */
const char *ckpt_dcp_sharding_type(const ckpt_out *out);

/* Where a checkpoint lies. */
typedef struct ckpt_dcp_place {
    const char *dir;      /* directory holding .metadata */
    int64_t from_tracker; /* iteration named by the tracker; -1 release, -2 no tracker used */
    int64_t from_dir;     /* iteration of an iter_N directory; -1 release, -2 neither */
    bool in_root;         /* found through a save root */
} ckpt_dcp_place;

/* Iteration of a directory name: N of iter_N, -1 for release, -2 for anything else. */
int64_t ckpt_dcp_iteration_of(const char *name);
/* The iteration that a tracker file names, -1 for release. Errors: CKPT_E_FORMAT other contents. */
ckpt_status ckpt_dcp_read_tracker(const char *path, int64_t *iteration,
                                  ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_probe(const ckpt_probe *probe, int *score, ckpt_err *err) CKPT_MUST_USE;
/* Resolve a directory, iteration directory or save root. iteration -1: the newest complete. */
ckpt_status ckpt_dcp_locate(ckpt_arena *arena, const char *path, int64_t iteration,
                            ckpt_dcp_place *place, ckpt_err *err) CKPT_MUST_USE;
/* Does DIR/metadata.json name the zarr backend? Errors: CKPT_E_IO, CKPT_E_NOMEM. */
ckpt_status ckpt_dcp_is_zarr(ckpt_arena *arena, const char *dir, bool *zarr,
                             ckpt_err *err) CKPT_MUST_USE;
/* The same of what ckpt_dcp_locate finds; false if it finds nothing. */
ckpt_status ckpt_dcp_probe_zarr(ckpt_arena *arena, const char *path, bool *zarr,
                                ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_open(ckpt_source *src, const ckpt_open_opts *opts,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_dcp_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

/* Names, types, owners and cuts that DCP can hold. */
ckpt_status ckpt_dcp_check_out(const ckpt_out *out, ckpt_err *err) CKPT_MUST_USE;
/* Files of one rank, at most. */
#define CKPT_DCP_BUCKETS 4
/* Spread n items over the files of `world` ranks. slot: the item's rank on entry, rank * *buckets +
 * bucket on return; objects (0 bytes) stay in bucket 0. */
ckpt_status ckpt_dcp_buckets(int world, const uint64_t *bytes, int *slot, size_t n, int *buckets,
                             ckpt_err *err) CKPT_MUST_USE;

#endif
