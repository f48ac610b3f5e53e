/* What the pointwise and row kernels share: wide loads, sums over a group of threads, column sums. */
#ifndef CKPT_CUDA_OPS_COMMON_CUH
#define CKPT_CUDA_OPS_COMMON_CUH

#include "ops.h"

#include "runtime.cuh"
#include "tile.cuh"

#include <math.h>

namespace kda
{

constexpr int THREADS = 256;
#ifdef CKPT_CUDA_EMULATE
#define HOST_DEV inline
#else
#define HOST_DEV __host__ __device__ __forceinline__
#endif

/* Of this thread, and of its warp. */
DEV int64_t index_of()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}
DEV int64_t warp_of()
{
    return (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
}

/* ---- loads and stores ----------------------------------------------------------------------- */

/* Elements at .. at+N-1 of a row of `end`, zeros beyond it. wide: rows begin at multiples of N. */
template <class E, int N>
DEV void get(const E *p, int64_t at, int64_t end, bool wide, float (&x)[N])
{
    if (!wide || at + N > end) {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = at + i < end ? to_f(p[at + i]) : 0.f;
    } else if constexpr (N * sizeof(E) == 8) {
        const uint64_t u = *(const uint64_t *)(p + at);
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = bits_to_float((uint32_t)(u >> 16 * i) << 16);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += vec<E>::n) {
            const vec<E> v = load16(p + at + j);
#pragma unroll
            for (int i = 0; i < vec<E>::n; i++)
                x[j + i] = to_f(v.e[i]);
        }
    }
}
template <class E, int N>
DEV void put(E *p, int64_t at, int64_t end, bool wide, const float (&x)[N])
{
    if (!wide || at + N > end) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (at + i < end)
                p[at + i] = cast<E>(x[i]);
    } else if constexpr (N * sizeof(E) == 8) {
        *(uint64_t *)(p + at) = pack_bf16(x[0], x[1]) | (uint64_t)pack_bf16(x[2], x[3]) << 32;
    } else {
#pragma unroll
        for (int j = 0; j < N; j += vec<E>::n) {
            vec<E> v;
#pragma unroll
            for (int i = 0; i < vec<E>::n; i++)
                v.e[i] = cast<E>(x[j + i]);
            store16(p + at + j, v);
        }
    }
}

/* ---- mathematics ---------------------------------------------------------------------------- */

/* e^x within about |x| 2^-24 + 2^-22 of its value; 0 below the normal range. */
DEV float exp_of(float x)
{
    return ex2(x * LOG2E);
}
DEV float logistic(float x)
{
    return reciprocal(1.f + exp_of(-x));
}
/* Derivative of x sigmoid(x), s = sigmoid(x). */
DEV float silu_slope(float x, float s)
{
    return s * (1.f + x * (1.f - s));
}

/* ---- sums ----------------------------------------------------------------------------------- */

/* Sum of x over G consecutive threads, in all of them. G > 32: the whole block, s [G / 32] shared. */
template <int G> DEV float group_sum(float x, float *s)
{
#pragma unroll
    for (int mask = (G < 32 ? G : 32) / 2; mask > 0; mask /= 2)
        x += shuffle_xor(x, mask);
    if constexpr (G > 32) {
        if (lane() == 0)
            s[threadIdx.x / 32] = x;
        sync_block();
        x = 0;
#pragma unroll
        for (int i = 0; i < G / 32; i++)
            x += s[i];
        sync_block();
    }
    return x;
}

/* ---- tiles ---------------------------------------------------------------------------------- */

HOST_DEV int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
/* Tiles of `size` that n rows in `items` pieces have at most. */
inline int64_t tiles_of(int64_t n, int64_t items, int64_t size)
{
    return n / size + (n < items ? n : items);
}
/* Of items cut into tiles of `size`, the item that tile number `at` is of, -1 beyond the last, and where in it
 * the tile is. By T threads, all of which get both; s: 2 T + 2 numbers. I::rows(p, item): of an item;
 * I::place(p, item, n, size): of its n-th tile. */
template <int T, class I, class P>
DEV int64_t find_piece(const P &p, int64_t items, int64_t at, int size, int64_t *s, int64_t *place)
{
    const int64_t per = ceil_div(items, T), lo = threadIdx.x * per;
    const int64_t hi = lo + per < items ? lo + per : items;
    int64_t own = 0;
    for (int64_t i = lo; i < hi; i++)
        own += ceil_div(I::rows(p, i), size);
    s[threadIdx.x] = own;
    if (threadIdx.x == 0)
        s[2 * T] = -1;
    sync_block();
    int64_t *from = s, *to = s + T;
    for (int step = 1; step < T; step *= 2) {
        const int i = (int)threadIdx.x;
        to[i] = from[i] + (i >= step ? from[i - step] : 0);
        sync_block();
        int64_t *swap = from;
        from = to, to = swap;
    }
    int64_t before = from[threadIdx.x] - own;
    for (int64_t i = lo; i < hi; i++) {
        const int64_t here = ceil_div(I::rows(p, i), size);
        if (at >= before && at < before + here) {
            s[2 * T] = i;
            s[2 * T + 1] = I::place(p, i, at - before, size);
        }
        before += here;
    }
    sync_block();
    const int64_t found = s[2 * T];
    *place = s[2 * T + 1];
    sync_block(); /* s is memory of tiles from here on */
    return found;
}

/* ---- launchers ------------------------------------------------------------------------------ */

/* The kernel of the context's element type, on its stream. Arguments may name that type T_. */
#define LAUNCH_OF(c, kernel, grid, block, smem, ...)                                               \
    do {                                                                                           \
        if ((c)->type == CKPT_CUDA_BF16) {                                                         \
            [[maybe_unused]] typedef bf16 T_;                                                      \
            LAUNCH(kernel<bf16>, grid, block, smem, stream_of((c)->stream), __VA_ARGS__);          \
        } else {                                                                                   \
            [[maybe_unused]] typedef float T_;                                                     \
            LAUNCH(kernel<float>, grid, block, smem, stream_of((c)->stream), __VA_ARGS__);         \
        }                                                                                          \
    } while (0)

inline ckpt_status launched(const char *what, ckpt_err *err)
{
#ifdef CKPT_CUDA_EMULATE
    (void)what;
    (void)err;
#else
    const cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess)
        return ckpt_fail(err, CKPT_E_IO, "%s on CUDA: %s", what, cudaGetErrorString(e));
#endif
    return CKPT_OK;
}
/* columns: of the workspace that the call uses, 0 = none. */
inline ckpt_status ready(const char *what, const ckpt_cuda *c, int64_t columns, ckpt_err *err)
{
    if (c->type != CKPT_CUDA_F32 && c->type != CKPT_CUDA_BF16)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s on CUDA: type %d, which has f32 and bf16",
                         what, (int)c->type);
    const size_t need = ckpt_cuda_work(columns);
    if (c->bytes < need)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%s on CUDA: workspace of %zu bytes, needs %zu for %lld columns", what,
                         c->bytes, need, (long long)columns);
    return CKPT_OK;
}
inline ckpt_status grid_fits(const char *what, int64_t blocks, ckpt_err *err)
{
    if (blocks > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s on CUDA: %lld blocks", what,
                         (long long)blocks);
    return CKPT_OK;
}
/* ready and grid_fits of n elements, per_block of them a block. */
inline ckpt_status ready_for(const char *what, const ckpt_cuda *c, int64_t n, int64_t per_block,
                             ckpt_err *err)
{
    if (n < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld elements", what, (long long)n);
    const ckpt_status status = ready(what, c, 0, err);
    return status != CKPT_OK ? status : grid_fits(what, ceil_div(n, per_block), err);
}
/* Let a kernel use `bytes` of dynamic shared memory. */
template <class K> ckpt_status shared_fits(const char *what, K *kernel, int bytes, ckpt_err *err)
{
    int limit;
    const ckpt_status status = room(kernel, bytes, &limit, err);
    if (status == CKPT_OK && limit < bytes)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s on CUDA: %d bytes of shared memory, the card has %d", what, bytes,
                         limit);
    return status;
}
/* Rows a piece of a sum takes: at most CKPT_CUDA_PARTS pieces, whole multiples of `per`. */
inline int64_t piece_of(int64_t rows, int64_t per)
{
    return ceil_div(ceil_div(rows, CKPT_CUDA_PARTS), per) * per;
}

/* out [n] = or += the sum over parts of partial [parts, n], row stride ld (ops_norm.cu). */
ckpt_status sum_columns(device_stream stream, const float *partial, int64_t parts, int64_t n,
                        int64_t ld, bool add, float *out, ckpt_err *err);

} // namespace kda

#endif
