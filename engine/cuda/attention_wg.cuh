/* Attention by warpgroup products (wgmma.cuh), for sm_90a: the formulas and sums of attention_fwd.cuh and
 * attention_bwd.cuh, two warpgroups of 64 rows a block. What they change is when: a warpgroup's products
 * run while its registers are worked on, so
 *   forward   scores of the next tile and this tile's output are under way together, and the weights of the
 *             next are computed while the output is;
 *   backward  dP is under way while weights are computed, and the last products of a tile while the next
 *             begins; three stages, as a tile may still be read when the one after it is waited for.
 * One barrier a tile. */
#ifndef CKPT_CUDA_ATTENTION_WG_CUH
#define CKPT_CUDA_ATTENTION_WG_CUH

#include "attention_bwd.cuh"
#include "attention_fwd.cuh"
#include "panels.cuh"

namespace kda
{

/* FB keys a tile forward; DB keys: dq; KB queries: dk and dv. */
template <int DK, int DV> struct wg_shape {
    static constexpr int FB = DK > 192 ? 64 : 128, DB = DK > 192 ? 32 : 64, KB = DK > 128 ? 32 : 64;
    static constexpr bool split = DK > 192;
    static constexpr int threads = 256, rows = 128, stages = 3;
    static constexpr int fwd_bytes = 1024 + 2 * (rows * DK + 2 * FB * (DK + DV));
    static constexpr int dq_bytes = 1024 + 2 * (rows + stages * DB) * (DK + DV);
    static constexpr int kv_bytes =
        1024 + 2 * (rows + stages * KB) * (DK + DV) + stages * 2 * KB * (int)sizeof(float);
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

template <int DK, int DV> DEV void attend_wg_block(const att_args &p, bf16 *sq, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int T = F::threads, B = F::FB;
    bf16 *sk = sq + F::rows * DK, *sv = sk + 2 * B * DK;
    const int m0 = (int)threadIdx.x / 32 * 16, first = (int)threadIdx.x / 128 * 64;
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV, keys = t.i0 + t.n;
    const bf16 *k = (const bf16 *)p.k + (t.base * p.G + t.g) * p.DK;
    const bf16 *v = (const bf16 *)p.v + (t.base * p.G + t.g) * p.DV;
    float o[1][DV / 8][4], s[1][B / 8][4], m[1][2], l[1][2], keep[1][2];
    uint32_t w[B / 16][4];
    clear(o);
    m[0][0] = m[0][1] = -INFINITY;
    l[0][0] = l[0][1] = 0;
    auto load_k = [&](int at, int64_t j0) {
        if (j0 < keys)
            load_panels<B, DK, T>(sk + at * B * DK, k + j0 * ldk, ldk, keys - j0, p.DK, p.wide_k);
    };
    auto load_v = [&](int at, int64_t j0) {
        if (j0 < keys)
            load_panels<B, DV, T>(sv + at * B * DV, v + j0 * ldv, ldv, keys - j0, p.DV, p.wide_v);
    };
    load_panels<F::rows, DK, T>(sq, (const bf16 *)p.q + (t.row * p.N + t.head) * p.DK, p.N * p.DK,
                                t.n, p.DK, p.wide_k);
    load_k(0, 0);
    copy_commit();
    load_k(1, B);
    load_v(0, 0);
    copy_commit();
    copy_wait<1>();
    products_see_writes();
    sync_block();
    products_begin();
    scores<DK, F::rows, B>(s[0], sq, first, sk);
    products_wait<0>();
    hold(s[0]);
    weigh(s, m, l, keep, p.scale2, t.i0 + m0, 0);
    pack(w, s[0]);
    int at = 0;
    int64_t j0 = 0;
    for (; j0 + B < keys; j0 += B, at ^= 1) {
        copy_wait<0>();
        products_see_writes();
        sync_block(); /* the next K and this V are there, this K and the last V no longer needed */
        load_k(at, j0 + 2 * B);
        load_v(at ^ 1, j0 + B);
        copy_commit();
        hold(o[0]);
        hold(w);
        products_begin();
        scores<DK, F::rows, B>(s[0], sq, first, sk + (at ^ 1) * B * DK);
        add_rows<DV, B>(o[0], w, sv + at * B * DV);
        products_wait<1>();
        hold(s[0]);
        weigh(s, m, l, keep, p.scale2, t.i0 + m0, j0 + B);
        products_wait<0>();
        hold(o[0]);
        hold(w);
        rescale(o, keep);
        pack(w, s[0]);
    }
    copy_wait<0>();
    products_see_writes();
    sync_block();
    hold(o[0]);
    hold(w);
    products_begin();
    add_rows<DV, B>(o[0], w, sv + at * B * DV);
    products_wait<0>();
    hold(o[0]);
    finish_rows<bf16>(p, t, m0, o, m, l);
}

/* ---- dq ------------------------------------------------------------------------------------- */

template <int DK, int DV> DEV void dq_wg_block(const att_args &p, bf16 *sq, const query_tile &t)
{
    typedef wg_shape<DK, DV> F;
    constexpr int T = F::threads, B = F::DB, NT = B / 8;
    bf16 *sd = sq + F::rows * DK, *sk = sd + F::rows * DV, *sv = sk + F::stages * B * DK;
    const int m0 = (int)threadIdx.x / 32 * 16, first = (int)threadIdx.x / 128 * 64;
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV, keys = t.i0 + t.n;
    const bf16 *k = (const bf16 *)p.k + (t.base * p.G + t.g) * p.DK;
    const bf16 *v = (const bf16 *)p.v + (t.base * p.G + t.g) * p.DV;
    float dq[1][DK / 8][4], lse[2], D[2];
    uint32_t w[B / 16][4];
    clear(dq);
    load_rows(p, t, m0, lse, D);
    auto load = [&](int at, int64_t j0) {
        if (j0 < keys) {
            load_panels<B, DK, T>(sk + at * B * DK, k + j0 * ldk, ldk, keys - j0, p.DK, p.wide_k);
            load_panels<B, DV, T>(sv + at * B * DV, v + j0 * ldv, ldv, keys - j0, p.DV, p.wide_v);
        }
        copy_commit();
    };
    load_panels<F::rows, DK, T>(sq, (const bf16 *)p.q + (t.row * p.N + t.head) * p.DK, p.N * p.DK,
                                t.n, p.DK, p.wide_k);
    load_panels<F::rows, DV, T>(sd, (const bf16 *)p.d_o + (t.row * p.N + t.head) * p.DV, p.N * p.DV,
                                t.n, p.DV, p.wide_v);
    load(0, 0);
    int at = 0;
    for (int64_t j0 = 0; j0 < keys; j0 += B) {
        float s[NT][4], dp[NT][4];
        const int next = at + 1 < F::stages ? at + 1 : 0;
        copy_wait<0>();
        products_see_writes();
        sync_block();
        load(next, j0 + B);
        products_begin();
        scores<DK, F::rows, B>(s, sq, first, sk + at * B * DK);
        scores<DV, F::rows, B>(dp, sd, first, sv + at * B * DV);
        products_wait<1>(); /* and the last tile's dq */
        hold(s);
        hold(w);
        const bool edge = j0 + B - 1 > t.i0 + m0;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const bool out = edge && j0 + 8 * n + c0 + e % 2 > t.i0 + m0 + g + 8 * (e / 2);
                s[n][e] = out ? 0.f : ex2(s[n][e] * p.scale2 - lse[e / 2]);
            }
        products_wait<0>();
        hold(dp);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] *= dp[n][e] - D[e / 2];
        pack(w, s);
        hold(dq[0]);
        hold(w);
        products_begin();
        add_rows<DK, B>(dq[0], w, sk + at * B * DK);
        at = next;
    }
    products_wait<0>();
    hold(dq[0]);
    store_queries<bf16>(p, t, m0, dq[0]);
}

/* ---- dk, dv --------------------------------------------------------------------------------- */

template <int DK, int DV, bool WITH_K, bool WITH_V>
DEV void dkv_wg_block(const att_args &p, bf16 *sk, int64_t seq, int64_t tile)
{
    typedef wg_shape<DK, DV> F;
    constexpr int T = F::threads, B = F::KB, NT = B / 8;
    constexpr int NK = WITH_K ? DK / 8 : 2, NV = WITH_V ? DV / 8 : 2;
    bf16 *sv = sk + F::rows * DK, *sq = sv + F::rows * DV, *sd = sq + F::stages * B * DK;
    float *rows = (float *)(sd + F::stages * B * DV); /* [stages][lse, D][B] */
    const int group = (int)(blockIdx.x % p.G), share = (int)(p.N / p.G), tid = (int)threadIdx.x;
    const int m0 = tid / 32 * 16, first = tid / 128 * 64, g = lane() >> 2, c0 = 2 * (lane() & 3);
    const int64_t base = p.cu[seq], len = p.cu[seq + 1] - base, j0 = tile * F::rows;
    const int64_t here = len - j0;
    float dk[1][NK][4], dv[1][NV][4];
    uint32_t wk[B / 16][4], wv[B / 16][4];
    clear(dk);
    clear(dv);
    query_walk w = {
        &p, first_part(p, seq), seq, j0, 0, -1, group * share, (group + 1) * share, 0, 0, 0};
    w.part = w.first;
    walk_to_tile<B>(&w);
    float row_lse = INFINITY, row_D = 0; /* of query tid of the next tile */
    auto fetch = [&](int to) {
        if (w.n > 0) {
            const int64_t q = w.row * p.N + w.head;
            load_panels<B, DK, T>(sq + to * B * DK, (const bf16 *)p.q + q * p.DK, p.N * p.DK, w.n,
                                  p.DK, p.wide_k);
            load_panels<B, DV, T>(sd + to * B * DV, (const bf16 *)p.d_o + q * p.DV, p.N * p.DV, w.n,
                                  p.DV, p.wide_v);
            row_lse = tid < w.n ? p.lse[q + tid * p.N] * LOG2E : INFINITY;
            row_D = tid < w.n ? p.D[q + tid * p.N] : 0.f;
        }
        copy_commit();
    };
    load_panels<F::rows, DK, T>(sk, (const bf16 *)p.k + ((base + j0) * p.G + group) * p.DK,
                                p.G * p.DK, here, p.DK, p.wide_k);
    load_panels<F::rows, DV, T>(sv, (const bf16 *)p.v + ((base + j0) * p.G + group) * p.DV,
                                p.G * p.DV, here, p.DV, p.wide_v);
    fetch(0);
    for (int at = 0; w.n > 0;) {
        float s[NT][4], dp[NT][4], *row = rows + at * 2 * B;
        const int64_t i0 = w.i0;
        const int next = at + 1 < F::stages ? at + 1 : 0;
        const bf16 *q = sq + at * B * DK, *d = sd + at * B * DV;
        if (tid < B) {
            row[tid] = row_lse;
            row[B + tid] = row_D;
        }
        copy_wait<0>();
        products_see_writes();
        sync_block();
        w.at += B;
        walk_to_tile<B>(&w);
        fetch(next);
        products_begin();
        scores<DK, F::rows, B>(s, sk, first, q);
        if constexpr (WITH_K) {
            scores<DV, F::rows, B>(dp, sv, first, d);
            products_wait<1>(); /* and the last tile's */
        } else {
            products_wait<0>();
        }
        hold(s);
        hold(wk);
        hold(wv);
        const bool edge = j0 + m0 + 15 > i0;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = 8 * n + c0 + e % 2;
                const float x = ex2(s[n][e] * p.scale2 - row[c]);
                s[n][e] = edge && j0 + m0 + g + 8 * (e / 2) > i0 + c ? 0.f : x;
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
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[n][e] *= dp[n][e] - row[B + 8 * n + c0 + e % 2];
            pack(wk, s);
            hold(dk[0]);
            hold(wk);
            products_begin();
            add_rows<DK, B>(dk[0], wk, q);
        }
        at = next;
    }
    copy_wait<0>();
    products_wait<0>();
    hold(dk[0]);
    hold(dv[0]);
    store_keys<bf16, WITH_K, WITH_V>(p, base + j0, group, here, m0, dk[0], dv[0]);
}

#endif

/* ---- kernels -------------------------------------------------------------------------------- */

template <int DK, int DV> KERNEL((wg_shape<DK, DV>::threads), 1) attend_wg(att_args p)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    typedef wg_shape<DK, DV> F;
    query_tile t;
    if (find_queries<F::threads, F::rows>(p, (int64_t *)memory, &t))
        attend_wg_block<DK, DV>(p, (bf16 *)align_panels(memory), t);
#endif
}
template <int DK, int DV> KERNEL((wg_shape<DK, DV>::threads), 1) attend_dq_wg(att_args p)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    typedef wg_shape<DK, DV> F;
    query_tile t;
    if (find_queries<F::threads, F::rows>(p, (int64_t *)memory, &t))
        dq_wg_block<DK, DV>(p, (bf16 *)align_panels(memory), t);
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
    if (seq >= 0)
        dkv_wg_block<DK, DV, WITH_K, WITH_V>(p, (bf16 *)align_panels(memory), seq, tile);
#endif
}

} // namespace kda

#endif
