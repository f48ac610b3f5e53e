/* What libckpt_cuda.so exports: one table of functions, `ckpt_cuda_plugin_v1`. The program loads it when
 * --device cuda asks (engine/common/device.c), so that nothing else needs CUDA; its emulated twin is
 * linked into tests. Every function is described where it is declared. */
#ifndef CKPT_CUDA_PLUGIN_H
#define CKPT_CUDA_PLUGIN_H

#include "attention.h"
#include "delta.h"
#include "device_comm.h"
#include "gemm.h"
#include "graph.h"
#include "memory.h"
#include "move.h"
#include "ops.h"
#include "parts.h"
#include "tap.h"
#include "quant.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CKPT_CUDA_PLUGIN_VERSION 5

/* clang-format off */
#define CKPT_CUDA_FUNCTIONS(X)                                                                     \
    X(cards) X(open) X(close) X(alloc) X(free) X(put) X(get) X(copy) X(zero) X(wait)                        \
    X(pipe_open) X(pipe_close) X(pipe_next) X(pipe_send) X(pipe_widen) X(pipe_wait)                             \
    X(capture_begin) X(capture_end) X(graph_launch) X(graph_size) X(graph_free)                    \
    X(tap_open) X(tap_close) X(tap_mark) X(tap_start) X(tap_take)                                  \
    X(work) X(rmsnorm) X(rmsnorm_bwd) X(gated_rmsnorm) X(gated_rmsnorm_bwd) X(l2norm) X(l2norm_bwd)\
    X(conv) X(conv_bwd) X(conv_norm) X(conv_norm_bwd)                                              \
    X(gate) X(gate_bwd) X(sigmoid) X(sigmoid_bwd)                                                  \
    X(swiglu) X(swiglu_bwd) X(relu2) X(relu2_bwd) X(embed) X(embed_bwd) X(xent)                    \
    X(adamw) X(adamw_kept) X(sumsq) X(norm) X(rope) X(rope_table)                                                              \
    X(router) X(router_bwd) X(order) X(dispatch) X(combine)                                        \
    X(gemm_name) X(matmul) X(linear) X(linear_dx) X(linear_dw)                                     \
    X(experts) X(experts_dx) X(experts_dw)                                                         \
    X(delta_bytes) X(delta_fwd) X(delta_bwd)                                                       \
    X(quant_bytes) X(quant_fwd) X(quant_bwd)                                                       \
    X(attention_work) X(attend) X(attend_bwd)                                                      \
    X(add) X(scale) X(widen) X(narrow) X(round_bf16) X(copy_columns)                               \
    X(repeat_heads) X(sum_heads) X(first_heads) X(split_heads) X(fold_heads)                       \
    X(gate_heads) X(gate_heads_bwd)                                                                \
    X(shift_tokens) X(loss_weights) X(mean_loss) X(watch)                                          \
    X(experts_act) X(experts_act_bwd) X(side_losses) X(counts)                                     \
    X(muon_direction) X(muon_direction_kept) X(muon_apply) X(muon_apply_kept) X(muon_load)         \
    X(muon_mix) X(router_bias)                                                                     \
    X(comm_open) X(comm_way)                                                                       \
    X(add_columns) X(share_weights) X(xent_top) X(xent_sums) X(xent_end)
/* clang-format on */

typedef struct ckpt_cuda_plugin {
    int version;
#define X(name) __typeof__(&ckpt_cuda_##name) name;
    CKPT_CUDA_FUNCTIONS(X)
#undef X
} ckpt_cuda_plugin;

#pragma GCC visibility push(default)
extern const ckpt_cuda_plugin ckpt_cuda_plugin_v1;
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
