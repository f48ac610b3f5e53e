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
#pragma unroll 1
    for (int r = first; r < R; r += step, to += step * 64, from += step * ld)
#pragma unroll
        for (int d = 0; d < DP; d += 64) {
            bf16 *const piece = to + d * R;
            if (wide) {
                const bool in = r < rows && c + d < width;
                copy_async(piece, from + d, in); /* of what is not wanted nothing is read */
            } else {
                for (int j = 0; j < 8; j++)
                    piece[j] = r < rows && c + d + j < width ? from[d + j] : cast<bf16>(0.f);
            }
        }
}

} // namespace kda

#endif
