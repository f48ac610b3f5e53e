/* Between wquant.c and wquant_plan.c. */
#ifndef CKPT_WQUANT_INTERNAL_H
#define CKPT_WQUANT_INTERNAL_H

#include "derive.h"
#include "wquant.h"

/* What a tensor of the source in memory is made of. */
typedef enum ckpt_wquant_part {
    CKPT_WQUANT_PLAIN, /* a tensor of the base plan as it is */
    CKPT_WQUANT_CODES,
    CKPT_WQUANT_SCALES,
    CKPT_WQUANT_GLOBAL
} ckpt_wquant_part;

typedef struct ckpt_wquant_stored {
    ckpt_wquant_part part;
    uint32_t base;   /* PLAIN: in the base plan's out.tensors */
    uint32_t tensor; /* else: in q->tensors */
} ckpt_wquant_stored;

/* Shape of the scales of a matrix [rows, cols]. */
void ckpt_wquant_scales(ckpt_wquant_kind kind, int64_t rows, int64_t cols, int64_t dims[2]);

/* read_at of q->src. Files: those of the base plan's source, then one for every tensor. */
ckpt_status ckpt_wquant_read(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;

#endif
