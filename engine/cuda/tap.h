/* Copies from the device to this process beside the device's work, on a stream of their own, through two
 * buffers of pinned memory of which one is read while the other fills.
 *
 *   tap_mark    by the thread of the work: what is copied from now on is what the work asked for before leaves
 *   tap_start   begin a copy of `bytes` (at most the buffers') into the next buffer
 *   tap_take    the oldest copy that was begun, once it is here; it stays until the next but one tap_start
 *
 * At most two copies are begun and not taken. Start and take are for one thread, which need not be the one
 * of the work. Nothing keeps later work from writing what is being copied: that is the caller's.
 *
 * Errors: CKPT_E_NOMEM; CKPT_E_IO a copy, or work before it, failed. */
#ifndef CKPT_CUDA_TAP_H
#define CKPT_CUDA_TAP_H

#include "memory.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef struct ckpt_cuda_tap ckpt_cuda_tap;

ckpt_status ckpt_cuda_tap_open(const ckpt_cuda_card *card, size_t bytes, ckpt_cuda_tap **out,
                               ckpt_err *err) CKPT_MUST_USE;
void ckpt_cuda_tap_close(ckpt_cuda_tap *t); /* waits; NULL is allowed */
ckpt_status ckpt_cuda_tap_mark(ckpt_cuda_tap *t, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_tap_start(ckpt_cuda_tap *t, const void *from, size_t bytes,
                                ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_tap_take(ckpt_cuda_tap *t, const void **buffer, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
