/* Warpgroup products (engine/cuda/wgmma.cuh) on the emulator: operands are read from shared memory through
 * the descriptor's layout as the PTX manual gives it, 128-byte swizzle by address. A product is done when it
 * is issued, so a missing wait does not show; a wrong layout does. */
#ifndef CKPT_TEST_EMULATE_WGMMA_H
#define CKPT_TEST_EMULATE_WGMMA_H

#include "emulate.h"

#define CKPT_CUDA_HAS_WGMMA 1

namespace kda
{

inline bool has_warpgroups()
{
    return true;
}

struct matrix {
    uintptr_t at;
    int next; /* LBO; SBO is 1024 */
};
inline unsigned char *align_panels(unsigned char *p)
{
    return (unsigned char *)(((uintptr_t)p + 1023) & ~(uintptr_t)1023);
}
inline matrix matrix_at(const void *p, int next)
{
    if ((uintptr_t)p % 16 || next % 16)
        std::abort();
    return matrix{(uintptr_t)p, next};
}
inline matrix matrix_plus(matrix m, int bytes)
{
    if (bytes % 16)
        std::abort();
    m.at += (uintptr_t)bytes;
    return m;
}
template <int N> inline void give_registers()
{
}
template <int N> inline void take_registers()
{
}
inline void products_see_writes()
{
}
inline void products_begin()
{
}
inline void products_commit()
{
}
template <int N> inline void products_wait()
{
}
template <class A> inline void hold(A &)
{
}

/* Element of a row r (of A, or a column of B) at k: k contiguous, or the rows contiguous (ROWS, KEYS). */
inline float element_of(matrix m, int r, int k, bool keys)
{
    uintptr_t at = m.at;
    if (keys) /* in 16-byte pieces: ((8, n), (8, k)) : ((1, LBO), (8, SBO)) */
        at +=
            (uintptr_t)(r % 8 * 2 + r / 8 % 8 * 16 + r / 64 * m.next + k % 8 * 128 + k / 8 * 1024);
    else /* ((8, n), 2) : ((8, SBO), 1) */
        at += (uintptr_t)(r % 8 * 128 + r / 8 * 1024 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    return emu::f_of((uint32_t) * (const uint16_t *)at << 16);
}

template <int N> struct wgmma {
    /* Row g or g + 8 of this warp's 16, at k. */
    template <bool KEYS, class A>
    static void add_up(float (&d)[N / 8][4], const A &a, matrix b, bool add)
    {
        const int g = lane() / 4, t = lane() % 4;
        float rows[2][16];
        for (int i = 0; i < 32; i++)
            rows[i / 16][i % 16] = a(g + 8 * (i / 16), i % 16);
        for (int n = 0; n < N / 8; n++)
            for (int c = 0; c < 2; c++) {
                float sum[2] = {0, 0};
                for (int k = 0; k < 16; k++) {
                    const float y = element_of(b, 8 * n + 2 * t + c, k, KEYS);
                    sum[0] += rows[0][k] * y;
                    sum[1] += rows[1][k] * y;
                }
                for (int h = 0; h < 2; h++)
                    d[n][2 * h + c] = sum[h] + (add ? d[n][2 * h + c] : 0.f);
            }
    }
    template <bool KEYS, bool ROWS = false>
    static void shared(float (&d)[N / 8][4], matrix a, matrix b, bool add)
    {
        const int first = (int)(threadIdx.x / 32 % 4) * 16;
        add_up<KEYS>(
            d, [&](int r, int k) { return element_of(a, first + r, k, ROWS); }, b, add);
    }
    template <bool KEYS>
    static void registers(float (&d)[N / 8][4], const uint32_t (&a)[4], matrix b, bool add)
    {
        emu::slot *s = warp_slots();
        std::memcpy(s[lane()].w, a, 16);
        emu::warp_barrier();
        add_up<KEYS>(
            d,
            [&](int r, int k) {
                return emu::half_of(s[r % 8 * 4 + k % 8 / 2].w[r / 8 + 2 * (k / 8)], k & 1);
            },
            b, add);
        emu::warp_barrier();
    }
};

} // namespace kda

#endif
