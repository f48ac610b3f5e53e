/* Between safetensors.c (reading), st_blob.c and safetensors_write.c; dcp_items.c reads blobs. */
#ifndef CKPT_ST_INTERNAL_H
#define CKPT_ST_INTERNAL_H

#include "source.h"
#include "st_header.h"

#define CKPT_ST_SHARDING_INFO "DCP_SHARDING_INFO"

/* Index of the files with optimizer state, and how their names begin. */
#define CKPT_ST_OPTIMIZER_INDEX "optimizer.safetensors.index.json"
#define CKPT_ST_OPTIMIZER_STEM "optimizer-"

/* Read the header of the blob from byte `at` to the end of files[file], append its entries with
 * begin and end as bytes of the file, and attach saved offsets. *metadata (NULL before the call)
 * becomes its __metadata__ without the sharding, or stays NULL; free it also after an error. */
ckpt_status ckpt_st_blob_read(ckpt_source *src, uint32_t file, uint64_t at, ckpt_st_table *table,
                              ckpt_json **metadata, ckpt_err *err) CKPT_MUST_USE;

ckpt_status ckpt_safetensors_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

#endif
