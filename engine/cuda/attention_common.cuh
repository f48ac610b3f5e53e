/* What the attention kernels share: their arguments, which tile a block works on, loads of tiles, and the
 * product whose left side is an accumulator. */
#ifndef CKPT_CUDA_ATTENTION_COMMON_CUH
#define CKPT_CUDA_ATTENTION_COMMON_CUH

#include "attention.h"
#include "ops_common.cuh"

namespace kda
{

struct att_args {
    int64_t N, G, DK, DV, n_seq, n_parts;
    const int64_t *cu;
    const ckpt_cuda_part *parts; /* NULL: part i is sequence i */
    const void *q, *k, *v, *o, *d_o;
    const float *lse, *D; /* backward */
    void *out, *dq, *dk, *dv;
    float *out_lse;
    float scale, scale2; /* of scores, and times log2 e */
    bool wide_k, wide_v; /* rows of q and k, of v and o, are whole 16-byte pieces */
    bool even_k, even_v;
};

/* Tiles of one type and pair of padded head dims. FW warps of FM x 16 query rows and FB keys: forward.
 * BW warps of 16 rows, DB keys: dq. BW warps of 16 keys, KB queries: dk and dv, in two passes if `split`,
 * where the accumulators of both do not fit the registers. */
template <class E, int DK, int DV> struct att_shape;
template <> struct att_shape<bf16, 64, 64> {
    static constexpr int FW = 4, FM = 2, FB = 64, FO = 2, BW = 8, DB = 64, KB = 64;
    static constexpr bool split = false;
};
template <> struct att_shape<bf16, 128, 128> {
    static constexpr int FW = 4, FM = 2, FB = 64, FO = 2, BW = 8, DB = 64, KB = 64;
    static constexpr bool split = false;
};
template <> struct att_shape<bf16, 192, 128> {
    static constexpr int FW = 4, FM = 2, FB = 64, FO = 2, BW = 8, DB = 64, KB = 32;
    static constexpr bool split = false;
};
template <> struct att_shape<bf16, 256, 256> {
    static constexpr int FW = 8, FM = 1, FB = 64, FO = 1, BW = 8, DB = 32, KB = 32;
    static constexpr bool split = true;
};
template <> struct att_shape<float, 64, 64> {
    static constexpr int FW = 4, FM = 1, FB = 32, FO = 1, BW = 4, DB = 32, KB = 32;
    static constexpr bool split = false;
};
template <> struct att_shape<float, 192, 128> {
    static constexpr int FW = 4, FM = 1, FB = 32, FO = 1, BW = 4, DB = 32, KB = 32;
    static constexpr bool split = false;
};
template <> struct att_shape<float, 256, 256> {
    static constexpr int FW = 4, FM = 1, FB = 32, FO = 1, BW = 4, DB = 16, KB = 16;
    static constexpr bool split = true;
};

/* Elements between rows of a tile in shared memory: eight rows of a matrix meet 32 different banks. */
template <class E> DEV constexpr int pitch(int d)
{
    return d + 16 / (int)sizeof(E);
}
/* f32 keeps the left side of a second product here, by warp; bf16 has it in registers. */
template <class E> DEV constexpr int left_elements(int rows, int cols)
{
    return sizeof(E) == 4 ? rows * (cols + 4) : 0;
}

/* ---- which tile ----------------------------------------------------------------------------- */

DEV ckpt_cuda_part part_of(const att_args &p, int64_t i)
{
    if (p.parts)
        return p.parts[i];
    return ckpt_cuda_part{i, 0, p.cu[i + 1] - p.cu[i], p.cu[i]};
}
template <bool KEYS> struct att_items {
    static DEV int64_t rows(const att_args &p, int64_t i)
    {
        return KEYS || !p.parts ? p.cu[i + 1] - p.cu[i] : p.parts[i].n;
    }
    static DEV int64_t place(const att_args &, int64_t, int64_t n, int)
    {
        return n;
    }
};
/* The item and the tile in it that is number `at`; -1 beyond the last. By T threads; s: 2 T + 2 numbers.
 * Items: sequences (KEYS) or parts. */
template <bool KEYS, int T>
DEV int64_t find_tile(const att_args &p, int64_t at, int size, int64_t *s, int64_t *tile)
{
    typedef att_items<KEYS> I;
    const int64_t items = KEYS ? p.n_seq : p.n_parts;
    if (items == 1) {
        *tile = at;
        return at < ceil_div(I::rows(p, 0), size) ? 0 : -1;
    }
    return find_piece<T, I>(p, items, at, size, s, tile);
}

/* Query rows of a block: n rows from `row` of q, tokens i0 .. of the sequence that begins at base. */
struct query_tile {
    int64_t base, i0, row;
    int n, head, g;
};
/* Longest first: the last tile of a part has the most keys. */
template <int T, int ROWS> DEV bool find_queries(const att_args &p, int64_t *s, query_tile *t)
{
    int64_t tile;
    const int64_t i = find_tile<false, T>(p, blockIdx.x / p.N, ROWS, s, &tile);
    if (i < 0)
        return false;
    const ckpt_cuda_part part = part_of(p, i);
    const int64_t at = (ceil_div(part.n, ROWS) - 1 - tile) * ROWS;
    t->base = p.cu[part.seq];
    t->i0 = part.lo + at;
    t->row = part.row + at;
    t->n = (int)(part.n - at < ROWS ? part.n - at : ROWS);
    t->head = (int)(blockIdx.x % p.N);
    t->g = t->head / (int)(p.N / p.G);
    return true;
}

/* ---- loads ---------------------------------------------------------------------------------- */

/* s [R, pitch(DP)] = the first n of R rows of D elements, ld apart, zeros elsewhere; by T threads. */
template <int R, int DP, int T, class E>
DEV void load_tile(E *s, const E *x, int64_t ld, int64_t n, int64_t D, bool wide)
{
    constexpr int V = 16 / (int)sizeof(E), per = DP / V;
    static_assert(R * per % T == 0, "every thread loads as much");
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < R * per; i += T) {
        const int r = i / per, c = i % per * V;
        E *to = s + r * pitch<E>(DP) + c;
        if (wide) {
            const bool in = r < n && c < D;
            copy_async(to, in ? x + r * ld + c : x, in);
        } else {
            for (int j = 0; j < V; j++)
                to[j] = r < n && c + j < D ? x[r * ld + c + j] : cast<E>(0.f);
        }
    }
}

/* ---- products ------------------------------------------------------------------------------- */

/* Two neighbouring tiles of an accumulator as the left side of a product. */
DEV void pack_left(uint32_t (&w)[4], const float (&x)[4], const float (&y)[4])
{
    w[0] = pack_bf16(x[0], x[1]);
    w[1] = pack_bf16(x[2], x[3]);
    w[2] = pack_bf16(y[0], y[1]);
    w[3] = pack_bf16(y[2], y[3]);
}
/* acc [rows, 8 NT] += s [rows, 8 KT] B, both accumulators of this warp from row m0. t: its rows of the left
 * side, f32 only. */
template <int MT, int NT, int KT, class B>
DEV void add_weighted(float (&acc)[MT][NT][4], float (&s)[MT][KT][4], const B &b, int, bf16 *)
{
#pragma unroll
    for (int k = 0; k < KT / 2; k++) {
        uint32_t fa[MT][4], fb[4];
#pragma unroll
        for (int i = 0; i < MT; i++)
            pack_left(fa[i], s[i][2 * k], s[i][2 * k + 1]);
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            frag_b(fb, b, 16 * j, 16 * k);
#pragma unroll
            for (int i = 0; i < MT; i++) {
                mma_bf16(acc[i][2 * j], fa[i], fb[0], fb[1]);
                mma_bf16(acc[i][2 * j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}
template <int MT, int NT, int KT, class B>
DEV void add_weighted(float (&acc)[MT][NT][4], float (&s)[MT][KT][4], const B &b, int m0, float *t)
{
    constexpr int ld = 8 * KT + 4;
    each(s, m0, 0, [&](int r, int c, float x, float y) { store_pair(t + r * ld + c, x, y); });
    sync_warp();
    product<float>::run(acc, Row<float>{t, ld}, m0, b, 0, 0, 8 * KT);
    sync_warp();
}

/* Two neighbours of a row of D elements. */
template <class E> DEV void store_two(E *row, int c, int64_t D, bool even, float x, float y)
{
    if (even && c < D) {
        store2(row + c, x, y);
        return;
    }
    if (c < D)
        row[c] = cast<E>(x);
    if (c + 1 < D)
        row[c + 1] = cast<E>(y);
}

constexpr float LN2 = 0.6931471805599453f;

} // namespace kda

#endif
