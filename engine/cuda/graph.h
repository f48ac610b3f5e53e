/* Work that is captured once and launched as a whole: a CUDA graph of the work stream.
 *
 * Between `capture_begin` and `capture_end` what is asked of the stream is recorded with its arguments -
 * addresses, sizes, scalars - and does not run; a launch runs all of it again, in order, on whatever lies
 * at those addresses then. So numbers that change from launch to launch have to be in the device's memory,
 * put there before the launch: while work is captured, copies between this process and the device, and
 * waits, are refused. Captured kernels are the ones that run otherwise, so results have the same bits.
 *
 * What a kernel needs for its first launch (its module, an algorithm of cuBLASLt) should be there already:
 * capture what has run once. A capture is for the thread that began it.
 *
 * Errors: CKPT_E_IO the runtime refuses or a launch fails, CKPT_E_INTERNAL what is refused above,
 * CKPT_E_NOMEM. */
#ifndef CKPT_CUDA_GRAPH_H
#define CKPT_CUDA_GRAPH_H

#include "memory.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef struct ckpt_cuda_graph ckpt_cuda_graph;

ckpt_status ckpt_cuda_capture_begin(const ckpt_cuda_card *card, ckpt_err *err) CKPT_MUST_USE;
/* Always ends it. *out is NULL after an error; `out` NULL: nothing is kept. */
ckpt_status ckpt_cuda_capture_end(const ckpt_cuda_card *card, ckpt_cuda_graph **out,
                                  ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_graph_launch(const ckpt_cuda_card *card, ckpt_cuda_graph *g,
                                   ckpt_err *err) CKPT_MUST_USE;
/* Kernels, copies and fills that it consists of. */
int64_t ckpt_cuda_graph_size(const ckpt_cuda_graph *g);
/* After its launches have ended; NULL is allowed. */
void ckpt_cuda_graph_free(ckpt_cuda_graph *g);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
