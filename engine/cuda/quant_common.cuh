/* What the kernels of quant.h share: arguments, loads, quantisers of tiles in shared memory, products.
 *
 * Internal arrays are f32, [chunk][head][rows][D], D = 64 or 128 columns of which the first K or V are used
 * and the others are zero: zeros change no largest magnitude, no sum and no block of 16. Operands of the
 * specification that are transposed ([V, 64], [K, 64], [V, K]) lie as [64][V], [64][K], [K][V] here; what
 * quantises their rows quantises the columns of these. Compiled with contraction off: every operation of a
 * rounding is rounded once. Products use fused multiply-adds. */
#ifndef CKPT_CUDA_QUANT_COMMON_CUH
#define CKPT_CUDA_QUANT_COMMON_CUH

#include "quant.h"

#include "codec.h"
#include "kda_common.cuh"

#include <math.h>

namespace kda
{
namespace quant
{

constexpr int TH = 256;      /* threads of a block, except of */
constexpr int PAIR_TH = 512; /* those that go over pairs of tokens */
constexpr int TILE_ROWS = 8; /* query rows of one call of an interaction */
constexpr int LT = C + 4;    /* row stride of a tile 64 wide: rows start 4 banks apart */
template <int D> constexpr int LD = D + 4;

/* Largest magnitudes of whole calls, bits of f32, in one array: by tile of rows, of the solve, then those of
 * each step of the walk. */
enum {
    PEAK_BK = 0,
    PEAK_Q = 8,
    PEAK_PAIR = 16,
    PEAK_INVERSE = 24,
    PEAK_BV,
    PEAK_BKG,
    PEAK_STEPS = 32
};
enum { STEP_W, STEP_QG, STEP_SCORES, STEP_WK, STEP_U, STEP_STATE, STEP_PEAKS };

struct qargs : args {
    int K, V;
    int chunks, steps; /* of all sequences; of the longest */
    bool half, shared,
        fp4; /* arrays of E are bf16; heads of v share one of q; some handle is NVFP4 */
    ckpt_quant how;
    /* saved: [64][D], [64][64] of each chunk and head */
    float *prefix, *inverse, *scores, *qg, *wk, *u, *w;
    float *states;  /* [D][D] as it came into the chunk */
    float *s_scale; /* [D] of the state's columns as FP8 operands */
    uint32_t *peaks;
    unsigned long long *errors; /* [2] of the approximate inverse, bits of doubles; or NULL */
    /* backward */
    float *ds;                  /* [D][D] after the chunk */
    float *du, *dw, *dqg, *dwk; /* [64][D] */
    float *dbv, *dbkg;          /* [64][D] */
    float *dscores, *dlower;    /* [64][64] */
    float *dlast;               /* [D] */
    float *dq_heads, *dk_heads; /* [T, HV, K], with `shared` */
};

/* A chunk and head. */
struct place {
    chunk_at c;
    int64_t item;
    int h, step;
};
DEV place find_place(const qargs &p, int64_t item)
{
    place a;
    a.item = item;
    const int chunk = (int)(item / p.H);
    a.h = (int)(item % p.H);
    a.c = find_chunk(p, chunk);
    a.step = chunk - (p.table ? p.first[a.c.seq] : a.c.seq * p.per_seq);
    return a;
}

/* ---- elements ------------------------------------------------------------------------------- */

DEV float read(const qargs &p, const void *x, int64_t i)
{
    return p.half ? to_f(((const bf16 *)x)[i]) : ((const float *)x)[i];
}
DEV void write(const qargs &p, void *x, int64_t i, float v)
{
    if (p.half)
        ((bf16 *)x)[i] = cast<bf16>(v);
    else
        ((float *)x)[i] = v;
}
/* First element of token 0 of the chunk. */
DEV int64_t key_of(const qargs &p, const place &a)
{
    return (a.c.start * p.HQ + a.h / p.G) * p.K;
}
DEV int64_t value_of(const qargs &p, const place &a, int width)
{
    return (a.c.start * p.H + a.h) * width;
}
/* f(row, column, element) over [64][cols] from column c0 on of an array of E, of which len rows and `width`
 * columns exist; 0 elsewhere. */
template <int THREADS, int COLS, class F>
DEV void each_input(const qargs &p, const void *x, int64_t at, int64_t stride, int len, int width,
                    int c0, const F &f)
{
    for (int i = (int)threadIdx.x; i < C * COLS; i += THREADS) {
        const int r = i / COLS, c = i % COLS;
        f(r, c, r < len && c0 + c < width ? read(p, x, at + r * stride + c0 + c) : 0.f);
    }
}
template <int THREADS, class F> DEV void each_place(int rows, int cols, const F &f)
{
    for (int i = (int)threadIdx.x; i < rows * cols; i += THREADS)
        f(i / cols, i % cols);
}

DEV float round_to(ckpt_quant_dtype dtype, float x)
{
    return dtype == CKPT_QUANT_F16    ? ckpt_f16_round(x)
           : dtype == CKPT_QUANT_BF16 ? ckpt_bf16_round(x)
                                      : x;
}
DEV float gate(const qargs &p, float x)
{
    return round_to(p.how.rounding[CKPT_BOUNDARY_GATE_EXP], expf(x));
}

/* ---- largest magnitudes --------------------------------------------------------------------- */

/* Magnitudes are ordered as their bits are; NaN is above infinity. */
DEV uint32_t magnitude(float x)
{
    return ckpt_f32_bits(x) & 0x7fffffffu;
}
/* 0 of NaN. */
DEV uint32_t number(float x)
{
    const uint32_t m = magnitude(x);
    return m > 0x7f800000u ? 0 : m;
}
DEV uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}
DEV int step_peak(int step, int which)
{
    return PEAK_STEPS + step * STEP_PEAKS + which;
}
/* By whole warps. */
DEV void publish(const qargs &p, int slot, uint32_t most)
{
    most = largest_of_warp(most);
    if (lane() == 0 && most > 0)
        raise_to(p.peaks + slot, most);
}
DEV float global_of(const qargs &p, int slot)
{
    return p.fp4 ? ckpt_nvfp4_global(ckpt_f32_of(p.peaks[slot]), true) : 0.f;
}

/* ---- quantisers ----------------------------------------------------------------------------- */

/* Largest of 16 neighbouring lanes. */
DEV uint32_t largest_of_16(uint32_t m)
{
    float x = bits_to_float(m); /* never NaN: number() */
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
        const float y = shuffle_xor(x, mask);
        x = x > y ? x : y;
    }
    return ckpt_f32_bits(x);
}

/* Rows of x [rows][W] in place, a warp a row. global(row): NVFP4's. The caller synchronises around it. */
template <int THREADS, int W, class G>
DEV void round_rows(ckpt_quant_kind kind, float *x, int ld, const G &global)
{
    if (kind != CKPT_QUANT_FP8 && kind != CKPT_QUANT_NVFP4)
        return;
    for (int r = (int)threadIdx.x / 32; r < C; r += THREADS / 32) {
        float *row = x + r * ld + lane(), v[W / 32];
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < W / 32; i++) {
            v[i] = row[32 * i];
            most = larger(most, magnitude(v[i]));
        }
        if (kind == CKPT_QUANT_FP8) {
            const float scale = ckpt_fp8_scale(ckpt_f32_of(largest_of_warp(most)), true);
            const float inverse = 1.0f / scale;
#pragma unroll
            for (int i = 0; i < W / 32; i++)
                row[32 * i] = ckpt_fp8_qdq(v[i], scale, inverse);
        } else {
            const float g = global(r);
#pragma unroll
            for (int i = 0; i < W / 32; i++) {
                const float b = ckpt_f32_of(largest_of_16(number(v[i])));
                row[32 * i] = ckpt_nvfp4_qdq(v[i], ckpt_nvfp4_step(b, g));
            }
        }
    }
}

/* Largest of each column of x [ROWS][COLS], of which a thread looks at ROWS / (TH / COLS) rows of one. s: TH
 * numbers, read by all when it returns: the caller synchronises before they are written again. */
template <int ROWS, int COLS> DEV uint32_t column_peak(const float *x, int ld, uint32_t *s)
{
    constexpr int P = TH / COLS, R = ROWS / P;
    const int c = (int)threadIdx.x % COLS, part = (int)threadIdx.x / COLS;
    uint32_t most = 0;
#pragma unroll 8
    for (int r = 0; r < R; r++)
        most = larger(most, magnitude(x[(part * R + r) * ld + c]));
    s[threadIdx.x] = most;
    sync_block();
#pragma unroll
    for (int q = 0; q < P; q++)
        most = larger(most, s[q * COLS + c]);
    return most;
}

/* NVFP4 of x [ROWS][COLS] in place, a block 16 rows of a column; global: the scale of all. */
template <int ROWS, int COLS> DEV void nvfp4_columns(float *x, int ld, float global)
{
    for (int i = (int)threadIdx.x; i < ROWS / 16 * COLS; i += TH) {
        float *at = x + i / COLS * 16 * ld + i % COLS;
        uint32_t most = 0;
        for (int r = 0; r < 16; r++)
            most = larger(most, number(at[r * ld]));
        const float step = ckpt_nvfp4_step(ckpt_f32_of(most), global);
        for (int r = 0; r < 16; r++)
            at[r * ld] = ckpt_nvfp4_qdq(at[r * ld], step);
    }
}

/* Columns of x [ROWS][COLS] in place. scales [COLS] or NULL: what FP8 multiplied each by. The caller
 * synchronises around it. */
template <int ROWS, int COLS>
DEV void round_columns(ckpt_quant_kind kind, float *x, int ld, float global, uint32_t *s,
                       float *scales)
{
    constexpr int P = TH / COLS, R = ROWS / P;
    if (kind == CKPT_QUANT_FP8) {
        const float scale = ckpt_fp8_scale(ckpt_f32_of(column_peak<ROWS, COLS>(x, ld, s)), true);
        const float inverse = 1.0f / scale;
        const int c = (int)threadIdx.x % COLS, part = (int)threadIdx.x / COLS;
#pragma unroll 8
        for (int r = 0; r < R; r++) {
            float *at = x + (part * R + r) * ld + c;
            *at = ckpt_fp8_qdq(*at, scale, inverse);
        }
        if (scales && part == 0)
            scales[c] = scale;
    } else if (kind == CKPT_QUANT_NVFP4) {
        nvfp4_columns<ROWS, COLS>(x, ld, global);
    }
}

/* 64 rows of the state, whole along the other axis, as round_columns rounded all of it. */
template <int D>
DEV void round_state_rows(const qargs &p, ckpt_quant_kind kind, const place &a, float *x, int ld)
{
    if (kind == CKPT_QUANT_NVFP4) {
        const float global = global_of(p, step_peak(a.step, STEP_STATE));
        nvfp4_columns<C, D>(x, ld, global);
    } else if (kind == CKPT_QUANT_FP8) {
        const int c = (int)threadIdx.x % D;
        const float scale = p.s_scale[a.item * D + c], inverse = 1.0f / scale;
        for (int r = (int)threadIdx.x / D; r < C; r += TH / D)
            x[r * ld + c] = ckpt_fp8_qdq(x[r * ld + c], scale, inverse);
    }
}

/* ---- products ------------------------------------------------------------------------------- */

/* Operands in shared memory: element (r, k) of Along lies at r ld + k, of Across at k ld + r. */
struct Along {
    const float *p;
    int ld;
};
struct Across {
    const float *p;
    int ld;
};
/* Rows t + T i of a thread, or where `near`, runs of four (two) neighbours. */
template <int T, int N, bool near> DEV int place_of(int t, int i)
{
    constexpr int W = N < 4 ? N : 4;
    return near ? W * t + i % W + W * T * (i / W) : t + T * i;
}
/* x[i][j] = element (row i of this thread, k + j). */
template <int T, int N, bool near> DEV void four(float (&x)[N][4], const Along &a, int t, int k)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const vec<float> v = load16(a.p + place_of<T, N, near>(t, i) * a.ld + k);
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[i][j] = v.e[j];
    }
}
template <int T, int N, bool near> DEV void four(float (&x)[N][4], const Across &a, int t, int k)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float *row = a.p + (k + j) * a.ld;
        if constexpr (near && N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const vec<float> v = load16(row + place_of<T, N, near>(t, i));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[i + e][j] = v.e[e];
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i][j] = row[place_of<T, N, near>(t, i)];
        }
    }
}

/* c [M, N] = a [M, len] b [N, len]^T by TH threads, TX of them along N. near_m, near_n: which rows are a
 * thread's, the better for Across where true and for Along where false. len: a multiple of 4. */
template <int M, int N, int TX, bool near_m, bool near_n> struct sums {
    static constexpr int TY = TH / TX, MT = M / TY, NT = N / TX;
    float c[MT][NT];

    DEV void clear()
    {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++)
                c[i][j] = 0.f;
    }
    template <class A, class B> DEV void add(const A &a, const B &b, int len)
    {
        const int tx = (int)threadIdx.x % TX, ty = (int)threadIdx.x / TX;
        for (int k = 0; k < len; k += 4) {
            float x[MT][4], y[NT][4];
            four<TY, MT, near_m>(x, a, ty, k);
            four<TX, NT, near_n>(y, b, tx, k);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++)
                        c[i][j] = fused(x[i][e], y[j][e], c[i][j]);
        }
    }
    DEV void take_in(ckpt_quant_dtype dtype, sums &part)
    {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++)
                c[i][j] = round_to(dtype, c[i][j] + part.c[i][j]);
        part.clear();
    }
    /* In blocks of the reduction, the sum rounded after each. Zeros at the end change nothing. */
    template <class A, class B>
    DEV void add_in_blocks(ckpt_quant_dtype dtype, int block, const A &a, const B &b, int len)
    {
        const int tx = (int)threadIdx.x % TX, ty = (int)threadIdx.x / TX;
        sums part;
        int n = 0;
        part.clear();
        for (int k = 0; k < len; k += 4) {
            float x[MT][4], y[NT][4];
            four<TY, MT, near_m>(x, a, ty, k);
            four<TX, NT, near_n>(y, b, tx, k);
#pragma unroll
            for (int e = 0; e < 4; e++) {
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++)
                        part.c[i][j] = fused(x[i][e], y[j][e], part.c[i][j]);
                if (++n == block) {
                    take_in(dtype, part);
                    n = 0;
                }
            }
        }
        if (n > 0)
            take_in(dtype, part);
    }
    /* By the schedule of a site. */
    template <class A, class B>
    DEV void of_site(const qargs &p, ckpt_quant_site site, const A &a, const B &b, int len)
    {
        clear();
        if (p.how.accumulator[site] == CKPT_QUANT_NO_ROUNDING)
            add(a, b, len);
        else
            add_in_blocks(p.how.accumulator[site], (int)p.how.block[site], a, b, len);
    }
    /* f(row, column, &element) */
    template <class F> DEV void each(const F &f)
    {
        const int tx = (int)threadIdx.x % TX, ty = (int)threadIdx.x / TX;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j++)
                f(place_of<TY, MT, near_m>(ty, i), place_of<TX, NT, near_n>(tx, j), c[i][j]);
    }
};
/* 64 x 64 of A Along or Across. */
template <bool near_m, bool near_n> using square = sums<C, C, 16, near_m, near_n>;

/* [rows][w] of an internal array into shared memory, asynchronously. */
DEV void bring(float *to, int ld, const float *from, int stride, int rows, int w)
{
    fetch<float, TH>(to, ld, from, stride, rows, w, rows);
}
DEV void brought()
{
    copy_commit();
    copy_wait<0>();
    sync_block();
}

} // namespace quant
} // namespace kda

#endif
