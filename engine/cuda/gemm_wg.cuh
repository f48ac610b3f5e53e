/* Own products by warpgroups (wgmma.cuh), bf16 on sm_90a: a tile of C of 128 x N a block, 64 rows for each of
 * two warpgroups, f32 accumulators in registers; a third copies k in steps of 64 through four stages
 * (ring.cuh). Sums in the order of k.
 *
 * What is stored with k contiguous is a panel of rows, [128, 64] or [N, 64]; what is stored with k as its
 * rows is panels [64, 64] side by side, whose rows or columns of C are contiguous. */
#ifndef CKPT_CUDA_GEMM_WG_CUH
#define CKPT_CUDA_GEMM_WG_CUH

#include "gemm_tiles.cuh"
#include "ring.cuh"

namespace kda
{

constexpr int WG_THREADS = READERS + WRITERS;

template <int N> struct wg_product {
    static constexpr int rows = 128, step = 64, stages = 4;
    static constexpr int a = rows * step, b = N * step; /* elements of a stage */
    static constexpr int tiles = stages * (a + b) * 2, bytes = 1024 + tiles + RING_BYTES;
};

#ifdef CKPT_CUDA_HAS_WGMMA

/* A stage of an operand: k0 .. of its R rows (of C's rows or columns) from r0. K: k is its stored row. */
template <bool K, int R>
DEV void wg_load(bf16 *s, const void *x, int64_t ld, int64_t r0, int64_t rows, int64_t k0,
                 int64_t k)
{
    if constexpr (K)
        load_panels<64, R, WRITERS>(s, (const bf16 *)x + k0 * ld + r0, ld, k - k0, rows - r0, true);
    else
        load_panels<R, 64, WRITERS>(s, (const bf16 *)x + r0 * ld + k0, ld, rows - r0, k - k0, true);
}
template <bool TA, bool TB, class EC, int N>
DEV void wg_tile(const ckpt_cuda_product &p, int64_t m0, int64_t n0, bf16 *s)
{
    typedef wg_product<N> F;
    const int steps = (int)ceil_div(p.k, F::step);
    bf16 *const sb = s + F::stages * F::a;
    const ring<F::stages> r = {(uint64_t *)((unsigned char *)s + F::tiles)};
    const auto write = [&] {
        writer w;
        for (int i = 0; i < steps; i++) {
            const int64_t k0 = (int64_t)i * F::step;
            r.wait_empty(i);
            wg_load<TA, F::rows>(s + i % F::stages * F::a, p.a, p.lda, m0, p.m, k0, p.k);
            wg_load<!TB, N>(sb + i % F::stages * F::b, p.b, p.ldb, n0, p.n, k0, p.k);
            w.wrote(r, i);
        }
        w.end();
    };
    const auto read = [&] {
        const int group = (int)threadIdx.x / 128;
        float acc[1][N / 8][4];
        clear(acc);
        const auto multiply = [&](int i) {
            const bf16 *a = s + i % F::stages * F::a, *b = sb + i % F::stages * F::b;
            const matrix ma = matrix_at(a + group * 64 * F::step, 0), mb = matrix_at(b, 64 * 128);
            r.wait_full(i);
            products_begin();
#pragma unroll
            for (int k = 0; k < F::step / 16; k++)
                wgmma<N>::template shared<!TB, TA>(acc[0], matrix_plus(ma, k * (TA ? 2048 : 32)),
                                                   matrix_plus(mb, k * (TB ? 32 : 2048)), true);
            products_commit();
        };
        hold(acc[0]);
        if (steps > 0)
            multiply(0);
        for (int i = 1; i < steps; i++) {
            multiply(i);
            products_wait<1>();
            r.read(i - 1);
        }
        products_wait<0>();
        hold(acc[0]);
        store_tile<EC>(p, m0 + (int)threadIdx.x / 32 * 16, n0, acc);
    };
    if (threadIdx.x == 0)
        r.init();
    divide_block<224>(read, write);
}

#endif

} // namespace kda

#endif
