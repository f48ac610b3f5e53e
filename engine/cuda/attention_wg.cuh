/* Attention by warpgroup products (wgmma.cuh), for sm_90a: the formulas and sums of attention_fwd.cuh and
 * attention_bwd.cuh. Of a block's three warpgroups two have 64 rows each and the third brings the tiles
 * (ring.cuh), so that the two need not wait for each other and one's products run beside the other's weights.
 * A warpgroup's own products, too, run while its registers are worked on:
 *   forward   scores of the next tile and this tile's output are under way together, and the weights of the
 *             next are computed while the output is;
 *   backward  dP is under way while weights are computed, and the last products of a tile while the next
 *             begins. */
#ifndef CKPT_CUDA_ATTENTION_WG_CUH
#define CKPT_CUDA_ATTENTION_WG_CUH

#include "attention_bwd.cuh"
#include "attention_fwd.cuh"
#include "ring.cuh"

namespace kda
{

/* FB keys a tile forward; DB keys: dq; KB queries: dk and dv. */
template <int DK, int DV> struct wg_shape {
    static constexpr int FB = DK > 192 ? 64 : 128, DB = DK > 192 ? 32 : 64,
                         KB = DK > 128  ? 32
                              : DK > 64 ? 48
                                        : 64;
    static constexpr bool split = DK > 192;
    static constexpr int threads = READERS + WRITERS, rows = 128, stages = 3;
    static constexpr int row = 2 * KB + 4; /* numbers of a tile of queries */
    static constexpr int fwd_tiles = 2 * (rows * DK + 2 * FB * (DK + DV)),
                         dq_tiles = 2 * (rows + stages * DB) * (DK + DV),
                         kv_tiles = 2 * (rows + stages * KB) * (DK + DV) +
                                    stages * row * (int)sizeof(float);
    static constexpr int fwd_bytes = 1024 + fwd_tiles + RING_BYTES,
                         dq_bytes = 1024 + dq_tiles + RING_BYTES,
                         kv_bytes = 1024 + kv_tiles + RING_BYTES;
    /* Registers of a thread that multiplies. */
    static constexpr int reads = 224, kv_reads = DK > 64 && !split ? 240 : reads;
};

#ifdef CKPT_CUDA_HAS_WGMMA

/* d [64, N] = A B^T over D channels: A's rows from `first` of a tile of RA rows, B a tile of N. */
template <int D, int RA, int N>
DEV void scores(float (&d)[N / 8][4], const bf16 *a, int first, const bf16 *b)
{
    const matrix ma = matrix_at(a + first * 64, 0), mb = matrix_at(b, 0);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma<N>::template shared<false>(d, matrix_plus(ma, k / 4 * RA * 128 + k % 4 * 32),
                                         matrix_plus(mb, k / 4 * N * 128 + k % 4 * 32), k > 0);
    products_commit();
}
/* d [64, N] += W B: weights [64, R] in registers, B a tile of R rows and N channels. */
template <int N, int R>
DEV void add_rows(float (&d)[N / 8][4], uint32_t (&w)[R / 16][4], const bf16 *b)
{
    const matrix mb = matrix_at(b, R * 128);
#pragma unroll
    for (int k = 0; k < R / 16; k++)
        wgmma<N>::template registers<true>(d, w[k], matrix_plus(mb, k * 2048), true);
    products_commit();
}
template <int NT> DEV void pack(uint32_t (&w)[NT / 2][4], const float (&s)[NT][4])
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++)
        pack_left(w[k], s[2 * k], s[2 * k + 1]);
}

/* ---- forward -------------------------------------------------------------------------------- */

template <int DK, int DV> struct fwd_tiles {
    typedef wg_shape<DK, DV> F;
    static constexpr int B = F::FB;
    bf16 *q, *k, *v;
    ring<2> ks, vs;
    int64_t keys;
    DEV fwd_tiles(bf16 *s, const query_tile &t)
        : q(s), k(q + F::rows * DK),
          v(k + 2 * B * DK), ks{(uint64_t *)((unsigned char *)s + F::fwd_tiles)}, vs{ks.full + 4},
          keys(t.i0 + t.n)
    {
    }
};
template <int DK, int DV>
DEV void attend_wg_write(const att_args &p, const fwd_tiles<DK, DV> &s, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::FB, T = WRITERS;
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV;
    const bf16 *k = (const bf16 *)p.k + (t.base * p.G + t.g) * p.DK;
    const bf16 *v = (const bf16 *)p.v + (t.base * p.G + t.g) * p.DV;
    writer w;
    load_panels<F::rows, DK, T>(s.q, (const bf16 *)p.q + (t.row * p.N + t.head) * p.DK, p.N * p.DK,
                                t.n, p.DK, p.wide_k);
    int n = 0;
    for (int64_t j0 = 0; j0 < s.keys; j0 += B, n++) {
        s.ks.wait_empty(n);
        load_panels<B, DK, T>(s.k + n % 2 * B * DK, k + j0 * ldk, ldk, s.keys - j0, p.DK, p.wide_k);
        w.wrote(s.ks, n);
        s.vs.wait_empty(n);
        load_panels<B, DV, T>(s.v + n % 2 * B * DV, v + j0 * ldv, ldv, s.keys - j0, p.DV, p.wide_v);
        w.wrote(s.vs, n);
    }
    w.end();
}
template <int DK, int DV>
DEV void attend_wg_read(const att_args &p, const fwd_tiles<DK, DV> &x, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::FB;
    const int m0 = (int)threadIdx.x / 32 * 16, first = (int)threadIdx.x / 128 * 64;
    float o[1][DV / 8][4], s[1][B / 8][4], m[1][2], l[1][2], keep[1][2];
    uint32_t w[B / 16][4];
    clear(o);
    m[0][0] = m[0][1] = -INFINITY;
    l[0][0] = l[0][1] = 0;
    x.ks.wait_full(0);
    products_begin();
    scores<DK, F::rows, B>(s[0], x.q, first, x.k);
    products_wait<0>();
    hold(s[0]);
    x.ks.read(0);
    weigh(s, m, l, keep, p.scale2, t.i0 + m0, 0);
    pack(w, s[0]);
    int n = 0;
    for (int64_t j0 = B; j0 < x.keys; j0 += B, n++) {
        x.ks.wait_full(n + 1);
        hold(o[0]);
        hold(w);
        products_begin();
        scores<DK, F::rows, B>(s[0], x.q, first, x.k + (n + 1) % 2 * B * DK);
        x.vs.wait_full(n);
        products_begin();
        add_rows<DV, B>(o[0], w, x.v + n % 2 * B * DV);
        products_wait<1>();
        hold(s[0]);
        x.ks.read(n + 1);
        weigh(s, m, l, keep, p.scale2, t.i0 + m0, j0);
        products_wait<0>();
        hold(o[0]);
        hold(w);
        x.vs.read(n);
        rescale(o, keep);
        pack(w, s[0]);
    }
    x.vs.wait_full(n);
    hold(o[0]);
    hold(w);
    products_begin();
    add_rows<DV, B>(o[0], w, x.v + n % 2 * B * DV);
    products_wait<0>();
    hold(o[0]);
    finish_rows<bf16>(p, t, m0, o, m, l);
}

/* ---- dq ------------------------------------------------------------------------------------- */

template <int DK, int DV> struct dq_tiles {
    typedef wg_shape<DK, DV> F;
    bf16 *q, *d, *k, *v;
    ring<F::stages> at;
    int64_t keys;
    DEV dq_tiles(bf16 *s, const query_tile &t)
        : q(s), d(q + F::rows * DK), k(d + F::rows * DV),
          v(k + F::stages * F::DB * DK), at{(uint64_t *)((unsigned char *)s + F::dq_tiles)},
          keys(t.i0 + t.n)
    {
    }
};
template <int DK, int DV>
DEV void dq_wg_write(const att_args &p, const dq_tiles<DK, DV> &s, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::DB, T = WRITERS;
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV, row = t.row * p.N + t.head;
    const bf16 *k = (const bf16 *)p.k + (t.base * p.G + t.g) * p.DK;
    const bf16 *v = (const bf16 *)p.v + (t.base * p.G + t.g) * p.DV;
    writer w;
    load_panels<F::rows, DK, T>(s.q, (const bf16 *)p.q + row * p.DK, p.N * p.DK, t.n, p.DK,
                                p.wide_k);
    load_panels<F::rows, DV, T>(s.d, (const bf16 *)p.d_o + row * p.DV, p.N * p.DV, t.n, p.DV,
                                p.wide_v);
    int n = 0;
    for (int64_t j0 = 0; j0 < s.keys; j0 += B, n++) {
        const int at = n % F::stages * B;
        s.at.wait_empty(n);
        load_panels<B, DK, T>(s.k + at * DK, k + j0 * ldk, ldk, s.keys - j0, p.DK, p.wide_k);
        load_panels<B, DV, T>(s.v + at * DV, v + j0 * ldv, ldv, s.keys - j0, p.DV, p.wide_v);
        w.wrote(s.at, n);
    }
    w.end();
}
template <int DK, int DV>
DEV void dq_wg_read(const att_args &p, const dq_tiles<DK, DV> &x, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::DB, NT = B / 8;
    const int m0 = (int)threadIdx.x / 32 * 16, first = (int)threadIdx.x / 128 * 64;
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
    float dq[1][DK / 8][4], lse[2], D[2];
    uint32_t w[B / 16][4];
    clear(dq);
    load_rows(p, t, m0, lse, D);
    int n = 0;
    for (int64_t j0 = 0; j0 < x.keys; j0 += B, n++) {
        float s[NT][4], dp[NT][4];
        const bf16 *k = x.k + n % F::stages * B * DK, *v = x.v + n % F::stages * B * DV;
        x.at.wait_full(n);
        products_begin();
        scores<DK, F::rows, B>(s, x.q, first, k);
        scores<DV, F::rows, B>(dp, x.d, first, v);
        products_wait<1>(); /* and the last tile's dq */
        hold(s);
        hold(w);
        if (n > 0)
            x.at.read(n - 1);
        const bool edge = j0 + B - 1 > t.i0 + m0;
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool out = edge && j0 + 8 * i + c0 + e % 2 > t.i0 + m0 + g + 8 * (e / 2);
                s[i][e] = out ? 0.f : ex2(s[i][e] * p.scale2 - lse[e / 2]);
            }
        products_wait<0>();
        hold(dp);
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[i][e] *= dp[i][e] - D[e / 2];
        pack(w, s);
        hold(dq[0]);
        hold(w);
        products_begin();
        add_rows<DK, B>(dq[0], w, k);
    }
    products_wait<0>();
    hold(dq[0]);
    store_queries<bf16>(p, t, m0, dq[0]);
}

/* ---- dk, dv --------------------------------------------------------------------------------- */

template <int DK, int DV> struct kv_tiles {
    typedef wg_shape<DK, DV> F;
    bf16 *k, *v, *q, *d;
    float *rows; /* [stages]: lse and D of KB queries, the first one's token, -1: no more */
    ring<F::stages, true>
        at; /* racecheck follows lanes that read rows themselves only so; as fast */
    int group;
    int64_t seq, base, j0,
        here; /* the sequence, its first token, this tile's first key, keys from it on */
    DEV kv_tiles(const att_args &p, bf16 *s, int64_t n, int64_t tile)
        : k(s), v(k + F::rows * DK), q(v + F::rows * DV), d(q + F::stages * F::KB * DK),
          rows((float *)(d + F::stages * F::KB * DV)), at{(uint64_t *)((unsigned char *)s +
                                                                       F::kv_tiles)},
          group((int)(blockIdx.x % p.G)), seq(n), base(p.cu[n]), j0(tile * F::rows),
          here(p.cu[n + 1] - base - j0)
    {
    }
};
template <int DK, int DV> DEV void dkv_wg_write(const att_args &p, const kv_tiles<DK, DV> &s)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::KB, T = WRITERS;
    const int tid = (int)threadIdx.x % T;
    const int64_t key = (s.base + s.j0) * p.G + s.group;
    query_walk w = first_queries<B>(p, s.seq, s.j0, s.group);
    writer to;
    load_panels<F::rows, DK, T>(s.k, (const bf16 *)p.k + key * p.DK, p.G * p.DK, s.here, p.DK,
                                p.wide_k);
    load_panels<F::rows, DV, T>(s.v, (const bf16 *)p.v + key * p.DV, p.G * p.DV, s.here, p.DV,
                                p.wide_v);
    for (int n = 0;; n++) {
        const int64_t q = w.row * p.N + w.head;
        const int at = n % F::stages * B;
        float *row = s.rows + n % F::stages * F::row;
        s.at.wait_empty(n);
        if (tid == 0)
            ((int *)row)[2 * B] = w.n > 0 ? (int)w.i0 : -1;
        if (w.n == 0) {
            to.wrote(s.at, n);
            break;
        }
        load_panels<B, DK, T>(s.q + at * DK, (const bf16 *)p.q + q * p.DK, p.N * p.DK, w.n, p.DK,
                              p.wide_k);
        load_panels<B, DV, T>(s.d + at * DV, (const bf16 *)p.d_o + q * p.DV, p.N * p.DV, w.n, p.DV,
                              p.wide_v);
        if (tid < B) { /* of rows that do not exist 0 as well: their q and dO are 0 */
            copy_async4(row + tid, p.lse + q + tid * p.N, tid < w.n);
            copy_async4(row + B + tid, p.D + q + tid * p.N, tid < w.n);
        }
        to.wrote(s.at, n);
        w.at += B;
        walk_to_tile<B>(&w);
    }
    to.end();
}
template <int DK, int DV, bool WITH_K, bool WITH_V>
DEV void dkv_wg_read(const att_args &p, const kv_tiles<DK, DV> &x)
{
    typedef wg_shape<DK, DV> F;
    constexpr int B = F::KB, NT = B / 8;
    constexpr int NK = WITH_K ? DK / 8 : 2, NV = WITH_V ? DV / 8 : 2;
    const int m0 = (int)threadIdx.x / 32 * 16, first = (int)threadIdx.x / 128 * 64;
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
    const int key = (int)x.j0 + m0; /* of this warp's first row */
    float dk[1][NK][4], dv[1][NV][4];
    uint32_t wk[B / 16][4], wv[B / 16][4];
    clear(dk);
    clear(dv);
    for (int n = 0;; n++) {
        float s[NT][4], dp[NT][4];
        const int at = n % F::stages * B;
        const bf16 *q = x.q + at * DK, *d = x.d + at * DV;
        const float *row = x.rows + n % F::stages * F::row;
        x.at.wait_full(n);
        const int i0 = ((const int *)row)[2 * B];
        if (i0 < 0)
            break;
        products_begin();
        scores<DK, F::rows, B>(s, x.k, first, q);
        if constexpr (WITH_K) {
            scores<DV, F::rows, B>(dp, x.v, first, d);
            products_wait<1>(); /* and the last tile's */
        } else {
            products_wait<0>();
        }
        hold(s);
        hold(wk);
        hold(wv);
        if (n > 0)
            x.at.read(n - 1);
        const bool edge = key + 15 > i0;
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = 8 * i + c0 + e % 2;
                const float y = ex2(s[i][e] * p.scale2 - row[c] * LOG2E);
                s[i][e] = edge && key + g + 8 * (e / 2) > i0 + c ? 0.f : y;
            }
        if constexpr (WITH_V) {
            pack(wv, s);
            hold(dv[0]);
            hold(wv);
            products_begin();
            add_rows<DV, B>(dv[0], wv, d);
        }
        if constexpr (WITH_K) {
            if constexpr (WITH_V)
                products_wait<1>();
            else
                products_wait<0>();
            hold(dp);
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[i][e] *= dp[i][e] - row[B + 8 * i + c0 + e % 2];
            pack(wk, s);
            hold(dk[0]);
            hold(wk);
            products_begin();
            add_rows<DK, B>(dk[0], wk, q);
        }
    }
    products_wait<0>();
    hold(dk[0]);
    hold(dv[0]);
    store_keys<bf16, WITH_K, WITH_V>(p, x.base + x.j0, x.group, x.here, m0, dk[0], dv[0]);
}

#endif

/* ---- kernels -------------------------------------------------------------------------------- */

template <int DK, int DV> KERNEL((wg_shape<DK, DV>::threads), 1) attend_wg(att_args p)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    typedef wg_shape<DK, DV> F;
    query_tile t;
    if (!find_queries<F::threads, F::rows>(p, (int64_t *)memory, &t))
        return;
    const fwd_tiles<DK, DV> s((bf16 *)align_panels(memory), t);
    if (threadIdx.x == 0)
        s.ks.init(), s.vs.init();
    divide_block<F::reads>([&] { attend_wg_read<DK, DV>(p, s, t); },
                           [&] { attend_wg_write<DK, DV>(p, s, t); });
#endif
}
template <int DK, int DV> KERNEL((wg_shape<DK, DV>::threads), 1) attend_dq_wg(att_args p)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    typedef wg_shape<DK, DV> F;
    query_tile t;
    if (!find_queries<F::threads, F::rows>(p, (int64_t *)memory, &t))
        return;
    const dq_tiles<DK, DV> s((bf16 *)align_panels(memory), t);
    if (threadIdx.x == 0)
        s.at.init();
    divide_block<F::reads>([&] { dq_wg_read<DK, DV>(p, s, t); },
                           [&] { dq_wg_write<DK, DV>(p, s, t); });
#endif
}
template <int DK, int DV, bool WITH_K, bool WITH_V>
KERNEL((wg_shape<DK, DV>::threads), 1)
attend_dkv_wg(att_args p)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    typedef wg_shape<DK, DV> F;
    int64_t tile;
    const int64_t seq =
        find_tile<true, F::threads>(p, blockIdx.x / p.G, F::rows, (int64_t *)memory, &tile);
    if (seq < 0)
        return;
    const kv_tiles<DK, DV> s(p, (bf16 *)align_panels(memory), seq, tile);
    if (threadIdx.x == 0)
        s.at.init();
    divide_block<F::kv_reads>([&] { dkv_wg_read<DK, DV, WITH_K, WITH_V>(p, s); },
                              [&] { dkv_wg_write<DK, DV>(p, s); });
#endif
}

} // namespace kda

#endif
