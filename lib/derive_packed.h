/* Between derive.c and derive_packed.c. */
#ifndef CKPT_DERIVE_PACKED_H
#define CKPT_DERIVE_PACKED_H

#include "derive.h"

/* ckpt_derived_read of CKPT_DERIVE_NVFP4 and CKPT_DERIVE_MXFP8. Allocates 100 KiB. */
ckpt_status ckpt_packed_read(ckpt_source *src, const ckpt_derived *d, uint8_t *out, size_t n,
                             uint64_t offset, ckpt_err *err) CKPT_MUST_USE;

#endif
