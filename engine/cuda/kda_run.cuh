/* Order of the kernels and their launches, for one element type. Included by the file of each type, so
 * that types compile side by side; kda.cu calls run_f32 and run_bf16. */
#ifndef CKPT_CUDA_KDA_RUN_CUH
#define CKPT_CUDA_KDA_RUN_CUH

#include "kda.h"

#include "kda_common.cuh"
#include "runtime.cuh"

namespace kda
{

struct plan {
    int64_t tiles, N; /* tiles: chunks x heads */
    int D;
    bool back, safe;
    device_stream stream;
};
ckpt_status run_f32(const plan &how, args p, ckpt_err *err);
ckpt_status run_bf16(const plan &how, args p, ckpt_err *err);

} // namespace kda

#endif
