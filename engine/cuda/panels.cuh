/* Tiles of wgmma.cuh, copied from global memory. */
#ifndef CKPT_CUDA_PANELS_CUH
#define CKPT_CUDA_PANELS_CUH

#include "wgmma.cuh"

namespace kda
{

/* The tile of wgmma.cuh from the first n of R rows of D elements, ld apart, zeros elsewhere. */
template <int R, int DP, int T>
DEV void load_panels(bf16 *s, const bf16 *x, int64_t ld, int64_t n, int64_t D, bool wide)
{
    constexpr int per = DP / 8;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < R * per; i += T) {
        const int r = i / per, piece = i % per, c = piece * 8;
        bf16 *to = s + piece / 8 * R * 64 + r * 64 + (piece % 8 ^ r % 8) * 8;
        if (wide) {
            const bool in = r < n && c < D;
            copy_async(to, in ? x + r * ld + c : x, in);
        } else {
            for (int j = 0; j < 8; j++)
                to[j] = r < n && c + j < D ? x[r * ld + c + j] : cast<bf16>(0.f);
        }
    }
}

} // namespace kda

#endif
