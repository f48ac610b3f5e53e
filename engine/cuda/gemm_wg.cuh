/* Own products by warpgroups (wgmma.cuh), bf16 on sm_90a: a tile of C of 128 x N a block of 256 threads,
 * 64 rows a warpgroup, f32 accumulators in registers. k in steps of 64 through four stages of cp.async:
 * while a step is multiplied the one before it may still be, so the stage that is refilled is the one before
 * that. One barrier a step, sums in the order of k.
 *
 * What is stored with k contiguous is a panel of rows, [128, 64] or [N, 64]; what is stored with k as its
 * rows is panels [64, 64] side by side, whose rows or columns of C are contiguous. */
#ifndef CKPT_CUDA_GEMM_WG_CUH
#define CKPT_CUDA_GEMM_WG_CUH

#include "gemm_tiles.cuh"
#include "panels.cuh"

namespace kda
{

template <int N> struct wg_product {
    static constexpr int rows = 128, step = 64, stages = 4, ahead = stages - 2;
    static constexpr int a = rows * step, b = N * step; /* elements of a stage */
    static constexpr int bytes = 1024 + stages * (a + b) * 2;
};

#ifdef CKPT_CUDA_HAS_WGMMA

/* A stage of an operand: k0 .. of its R rows (of C's rows or columns) from r0. K: k is its stored row. */
template <bool K, int R>
DEV void wg_load(bf16 *s, const void *x, int64_t ld, int64_t r0, int64_t rows, int64_t k0,
                 int64_t k)
{
    if constexpr (K)
        load_panels<64, R, THREADS>(s, (const bf16 *)x + k0 * ld + r0, ld, k - k0, rows - r0, true);
    else
        load_panels<R, 64, THREADS>(s, (const bf16 *)x + r0 * ld + k0, ld, rows - r0, k - k0, true);
}
template <bool TA, bool TB, class EC, int N>
DEV void wg_tile(const ckpt_cuda_product &p, int64_t m0, int64_t n0, bf16 *s)
{
    typedef wg_product<N> F;
    const int group = (int)threadIdx.x / 128, steps = (int)ceil_div(p.k, F::step);
    bf16 *const sb = s + F::stages * F::a;
    float acc[1][N / 8][4];
    clear(acc);
    auto load = [&](int i) {
        const int64_t k0 = (int64_t)i * F::step;
        if (i < steps) {
            wg_load<TA, F::rows>(s + i % F::stages * F::a, p.a, p.lda, m0, p.m, k0, p.k);
            wg_load<!TB, N>(sb + i % F::stages * F::b, p.b, p.ldb, n0, p.n, k0, p.k);
        }
        copy_commit();
    };
    for (int i = 0; i < F::ahead; i++)
        load(i);
    for (int i = 0; i < steps; i++) {
        copy_wait<F::ahead - 1>();
        products_see_writes();
        sync_block(); /* this step is there; the one before the last is multiplied */
        load(i + F::ahead);
        const bf16 *a = s + i % F::stages * F::a, *b = sb + i % F::stages * F::b;
        const matrix ma = matrix_at(a + group * 64 * F::step, 0), mb = matrix_at(b, 64 * 128);
        hold(acc[0]);
        products_begin();
#pragma unroll
        for (int k = 0; k < F::step / 16; k++)
            wgmma<N>::template shared<!TB, TA>(acc[0], matrix_plus(ma, k * (TA ? 2048 : 32)),
                                               matrix_plus(mb, k * (TB ? 32 : 2048)), true);
        products_commit();
        products_wait<1>();
    }
    copy_wait<0>();
    products_wait<0>();
    hold(acc[0]);
    store_tile<EC>(p, m0 + (int)threadIdx.x / 32 * 16, n0, acc);
}

#endif

} // namespace kda

#endif
