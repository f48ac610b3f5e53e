/* Order of the kernels of quant.h and their launches for one padded head size, which is a file of its own:
 * they compile side by side. */
#ifndef CKPT_CUDA_QUANT_RUN_CUH
#define CKPT_CUDA_QUANT_RUN_CUH

#include "quant_common.cuh"
#include "runtime.cuh"

namespace kda
{
namespace quant
{

struct plan {
    int64_t items, rows, key_elements; /* chunks x heads; sequences x heads; of q */
    device_stream stream;
};

ckpt_status forward_64(const plan &how, const qargs &p, ckpt_err *err);
ckpt_status forward_128(const plan &how, const qargs &p, ckpt_err *err);
ckpt_status backward_64(const plan &how, const qargs &p, ckpt_err *err);
ckpt_status backward_128(const plan &how, const qargs &p, ckpt_err *err);

} // namespace quant
} // namespace kda

#endif
