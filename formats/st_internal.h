/* Between safetensors.c (reading) and safetensors_write.c. */
#ifndef CKPT_ST_INTERNAL_H
#define CKPT_ST_INTERNAL_H

#include "source.h"

/* Index of the files with optimizer state, and how their names begin. */
#define CKPT_ST_OPTIMIZER_INDEX "optimizer.safetensors.index.json"
#define CKPT_ST_OPTIMIZER_STEM "optimizer-"

ckpt_status ckpt_safetensors_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

#endif
