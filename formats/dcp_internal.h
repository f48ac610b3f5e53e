/* Between dcp_read.c (tables), dcp_items.c (what lies behind an entry), dcp_flat.c, and zarr.c, which
 * reads Megatron's other directory. */
#ifndef CKPT_DCP_INTERNAL_H
#define CKPT_DCP_INTERNAL_H

#include "dcp.h"
#include "dcp_meta.h"
#include "flat.h"
#include "source.h"
#include "st_header.h"
#include "torch_save.h"

/* One item to open: a chunk of a tensor, or an object (piece = CKPT_DCP_OBJECT). */
#define CKPT_DCP_OBJECT UINT32_MAX
typedef struct ckpt_dcp_job {
    uint64_t at;
    uint32_t file, entry, owner, piece;
} ckpt_dcp_job;

typedef struct ckpt_dcp_opener {
    ckpt_source *src;
    ckpt_dcp_meta meta;
    uint32_t *file_of_path;
    ckpt_dcp_job *jobs;
    size_t n_jobs;
    bool *endian_known; /* by tensor */
    /* The safetensors blob read last: the jobs of one blob come one after the other. */
    ckpt_st_table blob;
    uint64_t blob_at;
    uint32_t blob_file;
    bool has_blob;
    ckpt_err *err;
} ckpt_dcp_opener;

/* Add the chunks of a flattened tensor's item. */
ckpt_status ckpt_dcp_flat_chunks(ckpt_dcp_opener *o, const ckpt_dcp_job *j,
                                 const ckpt_pt_tensor *item) CKPT_MUST_USE;

/* Open every job's item and add the chunks and object texts. Sorts the jobs. */
ckpt_status ckpt_dcp_open_items(ckpt_dcp_opener *o) CKPT_MUST_USE;
/* Fill text and unknown_global of an object whose place is known. */
ckpt_status ckpt_dcp_describe_object(ckpt_source *src, ckpt_object *object,
                                     ckpt_err *err) CKPT_MUST_USE;

/* ---- what every Megatron directory has ------------------------------------------------------ */

/* List a file of the directory if it is there; not as data. */
ckpt_status ckpt_dcp_add_if_present(ckpt_source *src, const char *name, bool open_it, bool *present,
                                    uint32_t *index, ckpt_err *err) CKPT_MUST_USE;
/* metadata.json must name that sharded_backend. */
ckpt_status ckpt_dcp_check_backend(ckpt_source *src, const char *want, ckpt_err *err) CKPT_MUST_USE;
/* Decode the common state in files[file] and keep its JSON form and its args. */
ckpt_status ckpt_dcp_read_common(ckpt_source *src, uint32_t file, uint64_t at, uint64_t length,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Tracker, directory name, common state and request must agree on the iteration. */
ckpt_status ckpt_dcp_settle_iteration(ckpt_source *src, const ckpt_dcp_place *place,
                                      int64_t requested, ckpt_err *err) CKPT_MUST_USE;

#endif
