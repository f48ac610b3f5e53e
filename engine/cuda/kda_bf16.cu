/* KDA kernels of bf16: every product of bf16 operands on tensor cores. */
#include "kda_launch.cuh"

ckpt_status kda::run_bf16(const plan &how, args p, ckpt_err *err)
{
    return run_type<bf16>(how, p, err);
}
