/* Kernels of quant.h for heads of 65 to 128. */
#include "quant_launch.cuh"

ckpt_status kda::quant::forward_128(const plan &how, const qargs &p, ckpt_err *err)
{
    return runner<128>{how, p, err}.forward();
}

ckpt_status kda::quant::backward_128(const plan &how, const qargs &p, ckpt_err *err)
{
    return runner<128>{how, p, err}.backward();
}
