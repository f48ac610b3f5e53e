/* Tiles of wgmma.cuh, copied from global memory by groups of T threads. */
#ifndef CKPT_CUDA_PANELS_CUH
#define CKPT_CUDA_PANELS_CUH

#include "wgmma.cuh"

namespace kda
{

/* The tile of wgmma.cuh from the first n of R rows of D elements, ld apart, zeros elsewhere. Eight threads a
 * row, whose 16-byte piece of each panel lies at the same place of every T / 8th row. */
template <int R, int DP, int T>
DEV void load_panels(bf16 *s, const bf16 *x, int64_t ld, int64_t n, int64_t D, bool wide)
{
    constexpr int step = T / 8;
    static_assert(R % step == 0 && step % 8 == 0 && DP % 64 == 0, "rows keep their swizzle");
    const int first = (int)threadIdx.x % T / 8, c = (int)threadIdx.x % 8 * 8;
    const int rows = n < R ? (int)n : R, width = D < DP ? (int)D : DP;
    bf16 *to = s + first * 64 + (c ^ first % 8 * 8);
    const bf16 *from = x + first * ld + c;
    if (!wide) { /* element by element, in as few registers as it takes */
#pragma unroll 1
        for (int i = 0; i < R / step * DP / 8; i++) {
            const int row = i / (DP / 8), j = i % 8, d = i % (DP / 8) / 8 * 64;
            const bool in = first + row * step < rows && c + d + j < width;
            to[row * step * 64 + d * R + j] = in ? from[row * step * ld + d + j] : cast<bf16>(0.f);
        }
        return;
    }
#pragma unroll 1
    for (int r = first; r < R; r += step, to += step * 64, from += step * ld)
#pragma unroll
        for (int d = 0; d < DP; d += 64) /* of what is not wanted nothing is read */
            copy_async(to + d * R, from + d, r < rows && c + d < width);
}

} // namespace kda

#endif
