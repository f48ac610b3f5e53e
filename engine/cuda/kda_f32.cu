/* KDA kernels of f32: every product in f32 on CUDA cores. */
#include "kda_launch.cuh"

ckpt_status kda::run_f32(const plan &how, args p, ckpt_err *err)
{
    return run_type<float>(how, p, err);
}
