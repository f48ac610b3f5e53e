/* The inverse of I + L of a chunk and head, L [64][64] below the diagonal: by substitution, or approximated by
 * factors of a product, as engine/quant/rounding.c does both.
 *
 * The approximation is a kernel of its own, so that the exact path keeps its registers: a block an item; L lies
 * where its inverse will. Powers of L and the product are f32 numbers kept as double in shared memory (85 KiB,
 * two blocks a multiprocessor), a thread has two rows and four columns. A product of two f32 is exact in double,
 * so that sums in the order of the CPU have its bits; rows and columns of a power that are zero by their place
 * are left out, which changes no finite sum. Traffic: 16 KiB in and out. */
#ifndef CKPT_CUDA_QUANT_INVERSE_CUH
#define CKPT_CUDA_QUANT_INVERSE_CUH

#include "quant_common.cuh"

namespace kda
{
namespace quant
{

constexpr int LX = C + 4; /* doubles from row to row */
struct series_memory {
    static constexpr int power = 0, product = C * LX * 8, lower = 2 * product,
                         bytes = lower + C * LT * 4;
};

/* x = elements l + 8 r of column c of (I + lower)^-1, by substitution in double, eight threads a column, c their
 * number and l one's own: row by row of the result is taken away from those below, in the order of the CPU. */
DEV void substitute(const float *lower, double (&x)[8])
{
    const int c = (int)threadIdx.x / 8, l = (int)threadIdx.x % 8, first = lane() & ~7;
#pragma unroll
    for (int r = 0; r < 8; r++)
        x[r] = l + 8 * r == c ? 1.0 : 0.0;
#pragma unroll
    for (int r = 0; r < 8; r++)
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = 8 * r + m;
            const double xj = shuffle_from(x[r], first + m);
#pragma unroll
            for (int b = r; b < 8; b++)
                if (l + 8 * b > j)
                    x[b] -= (double)lower[(l + 8 * b) * LT + j] * xj;
        }
}

/* out [64][64] = (I + lower)^-1. Returns the largest magnitude of this thread. */
DEV uint32_t invert(const float *lower, float *out)
{
    const int c = (int)threadIdx.x / 8, l = (int)threadIdx.x % 8;
    uint32_t most = 0;
    double x[8];
    substitute(lower, x);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        out[(l + 8 * r) * C + c] = (float)x[r];
        most = larger(most, number((float)x[r]));
    }
    return most;
}

/* Two rows and four columns of a product: f(i, j, row, column). */
template <class F> DEV void each_of_product(const F &f)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            f(i, j, (int)threadIdx.x / 16 * 2 + i, (int)threadIdx.x % 16 * 4 + j);
}
/* c = a b. Element (r, k) of a is zero where k > r - a_band, of b where its column is above k - b_band. */
DEV void multiply(const double *a, int a_band, const double *b, int b_band, double (&c)[2][4])
{
    const int row = (int)threadIdx.x / 16 * 2;
    const double *left = a + row * LX, *right = b + (int)threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            c[i][j] = 0;
    for (int k = b_band; k <= row + 1 - a_band; k++) {
        const double x = left[k], y = left[LX + k];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const double z = right[k * LX + j];
            c[0][j] = fused(x, z, c[0][j]);
            c[1][j] = fused(y, z, c[1][j]);
        }
    }
}

/* product = (I - L)(I + L^2)(I + L^4)... of `factors`, each power and sum rounded to f32; synchronised. */
DEV void series(int factors, const float *lower, double *power, double *product)
{
    each_of_product([&](int, int, int r, int c) {
        const double l = (double)lower[r * LT + c];
        power[r * LX + c] = l;
        product[r * LX + c] = (r == c ? 1.0 : 0.0) - l;
    });
    sync_block();
    for (int f = 1; f < factors && f < 7; f++) {
        const int band = 1 << (f - 1);
        double x[2][4];
        multiply(power, band, power, band, x);
        sync_block();
        each_of_product(
            [&](int i, int j, int r, int c) { power[r * LX + c] = (double)(float)x[i][j]; });
        sync_block();
        multiply(product, 0, power, 2 * band, x);
        sync_block();
        each_of_product([&](int i, int j, int r, int c) {
            double *at = product + r * LX + c;
            *at = (double)(float)(*at + x[i][j]);
        });
        sync_block();
    }
}

/* Bits of a magnitude, ordered as it is; NaN is above all. */
DEV unsigned long long bits_of_magnitude(double x)
{
    unsigned long long u;
    memcpy(&u, &x, sizeof u);
    return u & ~(1ull << 63);
}
DEV unsigned long long further(unsigned long long far, double x)
{
    const unsigned long long d = bits_of_magnitude(x);
    return d > far ? d : far;
}
/* Raise p.errors by how far the product is from the inverse, and the product times I + L from I. `power` is free. */
DEV void measure_series(const qargs &p, const float *lower, double *power, const double *product)
{
    const int c = (int)threadIdx.x / 8, l = (int)threadIdx.x % 8;
    unsigned long long far[2] = {0, 0}, *all = (unsigned long long *)power;
    double x[8], y[2][4];
    substitute(lower, x);
#pragma unroll
    for (int r = 0; r < 8; r++)
        far[0] = further(far[0], product[(l + 8 * r) * LX + c] - x[r]);
    each_of_product([&](int, int, int row, int col) {
        power[row * LX + col] = row == col ? 1.0 : (double)lower[row * LT + col];
    });
    sync_block();
    multiply(product, 0, power, 0, y);
    each_of_product([&](int i, int j, int row, int col) {
        far[1] = further(far[1], y[i][j] - (row == col ? 1.0 : 0.0));
    });
    sync_block();
    all[threadIdx.x] = far[0];
    all[PAIR_TH + threadIdx.x] = far[1];
    sync_block();
    if (threadIdx.x >= 64)
        return;
    const int which = (int)threadIdx.x / 32;
    unsigned long long most = 0;
    for (int i = lane(); i < PAIR_TH; i += 32)
        most = all[which * PAIR_TH + i] > most ? all[which * PAIR_TH + i] : most;
    raise_to(p.errors + which, most);
}

/* p.inverse, which holds L, becomes its approximate inverse. */
template <int T> KERNEL(T, 2) approximate(qargs p)
{
    static_assert(T == PAIR_TH, "a thread has two rows and four columns");
    SHARED_MEMORY(memory);
    double *power = (double *)(memory + series_memory::power);
    double *product = (double *)(memory + series_memory::product);
    float *lower = (float *)(memory + series_memory::lower);
    float *at = p.inverse + (int64_t)blockIdx.x * C * C;
    uint32_t most = 0;
    each_place<T>(C, C, [&](int r, int c) { lower[r * LT + c] = at[r * C + c]; });
    sync_block();
    series(p.how.solve_factors, lower, power, product);
    each_place<T>(C, C, [&](int r, int c) {
        const float x = (float)product[r * LX + c];
        at[r * C + c] = x;
        most = larger(most, number(x));
    });
    if (p.fp4)
        publish(p, PEAK_INVERSE, most);
    if (p.errors)
        measure_series(p, lower, power, product);
}

} // namespace quant
} // namespace kda

#endif
