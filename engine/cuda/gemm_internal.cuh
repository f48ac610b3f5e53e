/* Between gemm.cu and gemm_lt.cu. */
#ifndef CKPT_CUDA_GEMM_INTERNAL_CUH
#define CKPT_CUDA_GEMM_INTERNAL_CUH

#include "gemm.h"
#include "ops_common.cuh"

struct ckpt_cuda_lt; /* the library and what it keeps */

struct ckpt_cuda_gemm {
    ckpt_cuda_products kind; /* OWN or PLAIN; BEST: lt */
    ckpt_cuda_lt *lt;
    bool groups; /* own tiles by warpgroups */
    char name[48];
};

namespace kda
{

/* *lt is NULL when the library is not there; name is then not written. */
ckpt_status lt_open(ckpt_cuda_lt **lt, char *name, size_t size, ckpt_err *err);
void lt_close(ckpt_cuda_lt *lt);
/* Whether the library has an algorithm for p, its bias included. */
ckpt_status lt_plan(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, bool *able, ckpt_err *err);
/* After a plan of the same sizes, types and alignment that said so. *done is false when the library
 * refused, before it wrote anything. */
ckpt_status lt_run(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, device_stream stream, bool *done,
                   ckpt_err *err);
#ifdef CKPT_CUDA_EMULATE
/* A product by three loops on the CPU, sums in f32. */
void plain_loops(const ckpt_cuda_product *p);
#endif

} // namespace kda

#endif
