/* Included by the file of each head size. */
#ifndef CKPT_CUDA_QUANT_LAUNCH_CUH
#define CKPT_CUDA_QUANT_LAUNCH_CUH

#include "quant_pairs.cuh"
#include "quant_products.cuh"
#include "quant_run.cuh"
#include "quant_walk.cuh"

namespace kda
{
namespace quant
{
namespace
{

template <class K, class... A>
ckpt_status start(const char *name, K *kernel, int64_t grid, int threads, int bytes,
                  const plan &how, ckpt_err *err, A... a)
{
    int limit = 0;
    ckpt_status status = room(kernel, bytes, &limit, err);
    if (status != CKPT_OK)
        return status;
    if (bytes > limit)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "quantised KDA: %s needs %d bytes of shared memory in a block, the card "
                         "has %d",
                         name, bytes, limit);
    LAUNCH(kernel, grid, threads, (size_t)bytes, how.stream, a...);
    return checked(name, err);
}

template <int D> struct runner {
    const plan &how;
    const qargs &p;
    ckpt_err *err;

    bool is(ckpt_quant_handle h, ckpt_quant_kind kind) const
    {
        return p.how.kind[h] == kind;
    }
    template <int VS> ckpt_status walk_with(int from, int to, int what) const
    {
        return start("walk", walk<D, VS>, how.rows * (D / VS), TH, walk_memory<D, VS>::bytes, how,
                     err, p, from, to, what);
    }
    /* Blocks hold whole tiles of the state. */
    ckpt_status walk_some(int from, int to, int what) const
    {
        const int64_t tile = is(CKPT_HANDLE_STATE, CKPT_QUANT_OFF) ? 0 : p.how.block_v;
        if constexpr (D == 128)
            if (tile > 64)
                return walk_with<128>(from, to, what);
        return tile > 32 ? walk_with<64>(from, to, what) : walk_with<32>(from, to, what);
    }
    ckpt_status walk_all() const
    {
        if (!is(CKPT_HANDLE_STATE_READ_RHS, CKPT_QUANT_NVFP4) &&
            !is(CKPT_HANDLE_STATE_UPDATE_RHS, CKPT_QUANT_NVFP4))
            return walk_some(0, p.steps, START | READ | REST);
        ckpt_status status = walk_some(0, 0, START);
        for (int step = 0; status == CKPT_OK && step < p.steps; step++) {
            status = walk_some(step, step + 1, READ);
            if (status == CKPT_OK)
                status = walk_some(step, step + 1, REST);
        }
        return status;
    }
    ckpt_status forward() const
    {
        const bool tiles = is(CKPT_HANDLE_KEY_INTERACTION_LHS, CKPT_QUANT_NVFP4) ||
                           is(CKPT_HANDLE_KEY_INTERACTION_RHS, CKPT_QUANT_NVFP4) ||
                           is(CKPT_HANDLE_OUTPUT_SCORE_LHS, CKPT_QUANT_NVFP4) ||
                           is(CKPT_HANDLE_OUTPUT_SCORE_RHS, CKPT_QUANT_NVFP4);
        const bool baked = !is(CKPT_HANDLE_W, CKPT_QUANT_OFF) ||
                           !is(CKPT_HANDLE_OUTPUT_STATE_LHS, CKPT_QUANT_OFF) ||
                           !is(CKPT_HANDLE_OUTPUT_VALUE_LHS, CKPT_QUANT_OFF) ||
                           !is(CKPT_HANDLE_STATE_UPDATE_LHS, CKPT_QUANT_OFF);
        const int64_t n = PEAK_STEPS + (int64_t)(p.steps + 1) * STEP_PEAKS;
        ckpt_status status = CKPT_OK;
        if (p.fp4)
            status = start("clear", clear_peaks<TH>, (n + TH - 1) / TH, TH, 0, how, err, p, n);
        if (status == CKPT_OK && tiles)
            status = start("find_peaks", find_peaks<D>, how.items, PAIR_TH, pair_tiles<D>::forward,
                           how, err, p);
        if (status == CKPT_OK)
            status = start("interact", interact<D>, how.items, PAIR_TH, pair_tiles<D>::forward, how,
                           err, p);
        if (status == CKPT_OK && p.how.solve_factors > 0)
            status = start("approximate", approximate<PAIR_TH>, how.items, PAIR_TH,
                           series_memory::bytes, how, err, p);
        if (status == CKPT_OK)
            status = start("solve", solve<D>, how.items * 2 * SLICES<D>, TH, solve_memory::bytes,
                           how, err, p);
        if (status == CKPT_OK && baked)
            status =
                start("bake", bake<D>, how.items * BAKED, TH, bake_memory<D>::bytes, how, err, p);
        if (status == CKPT_OK)
            status = walk_all();
        if (status == CKPT_OK)
            status = start("output", output<D>, how.items * SLICES<D>, TH, output_memory<D>::bytes,
                           how, err, p);
        return status;
    }
    ckpt_status backward() const
    {
        ckpt_status status = start("back_walk", back_walk<D>, how.rows * (D / BACK_VS), TH,
                                   back_walk_memory<D>::bytes, how, err, p);
        if (status == CKPT_OK)
            status = start("back_products", back_products<D>, how.items * BACK_TASKS<D>, TH,
                           back_memory<D>::bytes, how, err, p);
        if (status == CKPT_OK)
            status = start("solve_back", solve_back<D>, how.items * SOLVE_BACK_TASKS<D>, TH,
                           solve_memory::back_bytes, how, err, p);
        if (status == CKPT_OK)
            status = start("interact_back", interact_back<D>, how.items, PAIR_TH,
                           pair_tiles<D>::backward, how, err, p);
        if (status == CKPT_OK && p.shared)
            status = start("fold", fold<TH>, (how.key_elements + TH - 1) / TH, TH, 0, how, err, p,
                           how.key_elements);
        return status;
    }
};

} // namespace
} // namespace quant
} // namespace kda

#endif
