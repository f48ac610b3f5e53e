/* Megatron-Core's `zarr` checkpoints (up to 0.15), read only: between zarr.c (the directory) and
 * zarr_array.c (one array). */
#ifndef CKPT_ZARR_H
#define CKPT_ZARR_H

#include "source.h"

extern const ckpt_container ckpt_zarr; /* zarr.c; name "zarr" */

/* Read root/name/.zarray, check that every chunk file is there and of the right size, list them as
 * files of the source and fill *tensor. Errors: CKPT_E_FORMAT; CKPT_E_UNSUPPORTED a compressor,
 * filters, an unknown dtype or another dimension separator. */
ckpt_status ckpt_zarr_array(ckpt_source *src, const char *name, ckpt_tensor *tensor,
                            ckpt_err *err) CKPT_MUST_USE;

#endif
