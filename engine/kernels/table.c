/* The table of one element type and instruction set. */
#include "kernels.h"

const ENG(kernels) ENGK(table) = {
    .gemm = ENGK(gemm),
    .rmsnorm = ENGK(rmsnorm),
    .rmsnorm_bwd = ENGK(rmsnorm_bwd),
    .gated_rmsnorm = ENGK(gated_rmsnorm),
    .gated_rmsnorm_bwd = ENGK(gated_rmsnorm_bwd),
    .l2norm = ENGK(l2norm),
    .l2norm_bwd = ENGK(l2norm_bwd),
    .conv = ENGK(conv),
    .conv_bwd = ENGK(conv_bwd),
    .gate = ENGK(gate),
    .gate_bwd = ENGK(gate_bwd),
    .sigmoid = ENGK(sigmoid),
    .sigmoid_bwd = ENGK(sigmoid_bwd),
    .swiglu = ENGK(swiglu),
    .swiglu_bwd = ENGK(swiglu_bwd),
    .relu2 = ENGK(relu2),
    .relu2_bwd = ENGK(relu2_bwd),
    .maximum = ENGK(maximum),
    .exp_sum = ENGK(exp_sum),
    .softmax_bwd = ENGK(softmax_bwd),
    .dot = ENGK(dot),
    .delta_chunk = ENGK(delta_chunk),
    .delta_chunk_bwd = ENGK(delta_chunk_bwd),
    .delta_step = ENGK(delta_step),
    .delta_step_bwd = ENGK(delta_step_bwd),
    .delta_scratch = ENGK(delta_scratch),
};

int64_t ENGK(delta_scratch)(int64_t K, int64_t V, int64_t heads)
{
    int64_t step = ENGK(delta_step_scratch)(K, V), chunk = ENGK(delta_chunk_scratch)(K, V, heads);
    return step > chunk ? step : chunk;
}
