/* Own products, one tile of C a block of 256 threads:
 *   mma_tile    bf16 operands whose rows are 16-byte aligned: 128 x 128, mma.sync, three stages of
 *               cp.async, f32 accumulators
 *   plain_tile  any types, strides and sizes: 64 x 64, f32 on CUDA cores
 * Both add up a tile's k in order, in one accumulator. */
#ifndef CKPT_CUDA_GEMM_TILES_CUH
#define CKPT_CUDA_GEMM_TILES_CUH

#include "gemm_internal.cuh"

namespace kda
{

/* ---- any type ------------------------------------------------------------------------------- */

constexpr int PT = 64, PK = 16; /* a tile of C, its step in k */
constexpr int PLAIN_BYTES = 2 * PK * (PT + 4) * (int)sizeof(float);

DEV float element(const void *p, ckpt_cuda_type t, int64_t at)
{
    return t == CKPT_CUDA_BF16 ? to_f(((const bf16 *)p)[at]) : ((const float *)p)[at];
}
DEV void put_element(void *p, ckpt_cuda_type t, int64_t at, float x)
{
    if (t == CKPT_CUDA_BF16)
        ((bf16 *)p)[at] = cast<bf16>(x);
    else
        ((float *)p)[at] = x;
}
/* s [PK, PT + 4] = the k's k0 .. of rows r0 .. of an operand, zeros beyond its ends. `along`: k is the
 * contiguous index of what is stored. */
DEV void plain_load(float *s, const void *x, ckpt_cuda_type type, int64_t ld, bool along,
                    int64_t r0, int64_t rows, int64_t k0, int64_t k)
{
    for (int i = (int)threadIdx.x; i < PT * PK; i += THREADS) {
        const int64_t r = along ? i / PK : i % PT, j = along ? i % PK : i / PT;
        const bool in = r0 + r < rows && k0 + j < k;
        const int64_t at = along ? (r0 + r) * ld + k0 + j : (k0 + j) * ld + r0 + r;
        s[j * (PT + 4) + r] = in ? element(x, type, at) : 0.f;
    }
}
DEV void plain_tile(const ckpt_cuda_product &p, int64_t m0, int64_t n0, float *s)
{
    float acc[4][4], *b = s + PK * (PT + 4);
    const int i0 = (int)threadIdx.x / 16 * 4, j0 = (int)threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        acc[i / 4][i % 4] = 0;
    for (int64_t k0 = 0; k0 < p.k; k0 += PK) {
        sync_block();
        plain_load(s, p.a, p.a_type, p.lda, !p.ta, m0, p.m, k0, p.k);
        plain_load(b, p.b, p.b_type, p.ldb, p.tb, n0, p.n, k0, p.k);
        sync_block();
#pragma unroll
        for (int j = 0; j < PK; j++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                acc[i / 4][i % 4] += s[j * (PT + 4) + i0 + i / 4] * b[j * (PT + 4) + j0 + i % 4];
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int64_t row = m0 + i0 + i / 4, col = n0 + j0 + i % 4, at = row * p.ldc + col;
        if (row >= p.m || col >= p.n)
            continue;
        const float y = acc[i / 4][i % 4] + (p.bias ? p.bias[col] : 0.f);
        put_element(p.c, p.c_type, at, y + (p.add ? element(p.c, p.c_type, at) : 0.f));
    }
}

/* ---- bf16 ----------------------------------------------------------------------------------- */

constexpr int MM = 128, MK = 32, STAGES = 3;
/* A stage of an operand: [128, MK + 8] with k contiguous, or [MK, 128 + 8]. */
constexpr int STAGE = 128 * (MK + 8);
static_assert(MK * (128 + 8) <= STAGE, "both forms of a stage fit");
constexpr int MMA_BYTES = 2 * STAGES * STAGE * 2;

template <bool T> struct stage_of;
template <> struct stage_of<false> { /* k contiguous */
    typedef Row<bf16> operand;
    static constexpr int rows = 128, cols = MK;
};
template <> struct stage_of<true> {
    typedef Col<bf16> operand;
    static constexpr int rows = MK, cols = 128;
};
/* One stage from rows r0 .., columns c0 .. of a stored array [rows, cols], zeros beyond its ends. */
template <bool T>
DEV void mma_load(bf16 *s, const bf16 *x, int64_t ld, int64_t r0, int64_t rows, int64_t c0,
                  int64_t cols)
{
    constexpr int chunks = stage_of<T>::cols / 8, pitch = stage_of<T>::cols + 8;
#pragma unroll
    for (int i = (int)threadIdx.x; i < stage_of<T>::rows * chunks; i += THREADS) {
        const int r = i / chunks, c = i % chunks * 8;
        const bool in = r0 + r < rows && c0 + c < cols;
        copy_async(s + r * pitch + c, in ? x + (r0 + r) * ld + c0 + c : x, in);
    }
}
template <bool TA, bool TB>
DEV void mma_step(const ckpt_cuda_product &p, int64_t m0, int64_t n0, int64_t k0, bf16 *a, bf16 *b)
{
    mma_load<TA>(a, (const bf16 *)p.a, p.lda, TA ? k0 : m0, TA ? p.k : p.m, TA ? m0 : k0,
                 TA ? p.m : p.k);
    mma_load<!TB>(b, (const bf16 *)p.b, p.ldb, TB ? n0 : k0, TB ? p.n : p.k, TB ? k0 : n0,
                  TB ? p.k : p.n);
}
/* C = or += a warp's accumulator from row m, column n. What is there is read eight tiles of columns at a
 * time, before any of them is written: a thread that waited for each would wait for memory 64 times. */
template <class EC, int MT, int NT>
DEV void store_tile(const ckpt_cuda_product &p, int64_t m, int64_t n, float (&acc)[MT][NT][4])
{
    constexpr int B = NT < 8 ? NT : 8;
    const int64_t row = m + (lane() >> 2), col = n + 2 * (lane() & 3);
    EC *const c = (EC *)p.c + row * p.ldc + col;
    const auto at = [&](int i, int j, int h) { return (16 * i + 8 * h) * p.ldc + 8 * j; };
    const auto in = [&](int i, int j, int h) {
        return row + 16 * i + 8 * h < p.m && col + 8 * j < p.n;
    };
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j0 = 0; j0 < NT; j0 += B) {
            pair old[B][2];
#pragma unroll
            for (int e = 0; e < 2 * B; e++) {
                const int j = j0 + e / 2, h = e % 2;
                old[e / 2][h] = p.add && in(i, j, h) ? load2(c + at(i, j, h)) : pair{0.f, 0.f};
            }
#pragma unroll
            for (int e = 0; e < 2 * B; e++) {
                const int j = j0 + e / 2, h = e % 2;
                float x = acc[i][j][2 * h], y = acc[i][j][2 * h + 1];
                if (!in(i, j, h))
                    continue;
                if (p.bias)
                    x += p.bias[col + 8 * j], y += p.bias[col + 8 * j + 1];
                if (p.add)
                    x += old[e / 2][h].x, y += old[e / 2][h].y;
                store2(c + at(i, j, h), x, y);
            }
        }
}
/* 8 warps, two by four: 64 rows by 32 columns each. */
template <bool TA, bool TB, class EC>
DEV void mma_tile(const ckpt_cuda_product &p, int64_t m0, int64_t n0, bf16 *s)
{
    const int warp = (int)threadIdx.x / 32, m = warp / 4 * 64, n = warp % 4 * 32;
    const int steps = (int)ceil_div(p.k, MK);
    bf16 *b = s + STAGES * STAGE;
    float acc[4][4][4];
    clear(acc);
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps)
            mma_step<TA, TB>(p, m0, n0, (int64_t)i * MK, s + i * STAGE, b + i * STAGE);
        copy_commit();
    }
    for (int i = 0; i < steps; i++) {
        copy_wait<STAGES - 2>();
        sync_block();
        const int at = i % STAGES, next = i + STAGES - 1;
        if (next < steps)
            mma_step<TA, TB>(p, m0, n0, (int64_t)next * MK, s + next % STAGES * STAGE,
                             b + next % STAGES * STAGE);
        copy_commit();
        typedef typename stage_of<TA>::operand opa;
        typedef typename stage_of<!TB>::operand opb;
        product<bf16>::run(acc, opa{s + at * STAGE, stage_of<TA>::cols + 8}, m,
                           opb{b + at * STAGE, stage_of<!TB>::cols + 8}, n, 0, MK);
    }
    copy_wait<0>();
    store_tile<EC>(p, m0 + m, n0 + n, acc);
}

} // namespace kda

#endif
