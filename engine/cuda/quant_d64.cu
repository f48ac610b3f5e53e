/* Kernels of quant.h for heads of up to 64. */
#include "quant_launch.cuh"

ckpt_status kda::quant::forward_64(const plan &how, const qargs &p, ckpt_err *err)
{
    return runner<64>{how, p, err}.forward();
}

ckpt_status kda::quant::backward_64(const plan &how, const qargs &p, ckpt_err *err)
{
    return runner<64>{how, p, err}.backward();
}
