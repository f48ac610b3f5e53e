/* Attention backward, in three kernels: D = sum_c dO O; dq; dk and dv.
 *
 *   P = exp(s - lse), dS = P (dP - D), dP = dO V^T;  dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K.
 *
 * dq: a block is one head's tile of query rows and walks the keys up to its diagonal.
 * dk, dv: a block is a tile of keys of one key head and walks, from its diagonal on, the queries of every
 * head that reads it. It computes the transposed scores K Q^T, so a warp's keys are rows of every
 * accumulator and weights stay in registers as the left side of the second products.
 * Tiles of the loop are loaded one ahead. Source: mla-moe-math.md section 2.7. */
#ifndef CKPT_CUDA_ATTENTION_BWD_CUH
#define CKPT_CUDA_ATTENTION_BWD_CUH

#include "attention_common.cuh"

namespace kda
{

/* D [rows, N]: a warp a row of a head. */
template <class E> KERNEL(THREADS, 1) attend_dots(att_args p, int64_t n, float *D)
{
    const int64_t i = warp_of();
    float sum = 0;
    if (i >= n)
        return;
    for (int64_t c = lane() * 4; c < p.DV; c += 128) {
        float x[4], y[4];
        const bool wide = p.DV % 4 == 0;
        get((const E *)p.o + i * p.DV, c, p.DV, wide, x);
        get((const E *)p.d_o + i * p.DV, c, p.DV, wide, y);
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum += x[j] * y[j];
    }
    sum = group_sum<32>(sum, NULL);
    if (lane() == 0)
        D[i] = sum;
}

template <class E, int DK, int DV> struct bwd_of : att_shape<E, DK, DV> {
    typedef att_shape<E, DK, DV> S;
    static constexpr int threads = S::BW * 32, rows = S::BW * 16;
    static constexpr int fixed_k = rows * pitch<E>(DK), fixed_v = rows * pitch<E>(DV);
    static constexpr int dq_k = S::DB * pitch<E>(DK), dq_v = S::DB * pitch<E>(DV);
    static constexpr int kv_k = S::KB * pitch<E>(DK), kv_v = S::KB * pitch<E>(DV);
    static constexpr int dq_bytes =
        (fixed_k + fixed_v + 2 * (dq_k + dq_v) + left_elements<E>(rows, S::DB)) * (int)sizeof(E);
    static constexpr int kv_bytes =
        (fixed_k + fixed_v + 2 * (kv_k + kv_v) + left_elements<E>(rows, S::KB)) * (int)sizeof(E) +
        2 * 2 * S::KB * (int)sizeof(float);
};

/* ---- dq ------------------------------------------------------------------------------------- */

/* lse, in log2 units, and D of this lane's two rows. */
DEV void load_rows(const att_args &p, const query_tile &t, int m0, float (&lse)[2], float (&D)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = m0 + (lane() >> 2) + 8 * h;
        const int64_t at = (t.row + r) * p.N + t.head;
        lse[h] = r < t.n ? p.lse[at] * LOG2E : INFINITY;
        D[h] = r < t.n ? p.D[at] : 0.f;
    }
}
/* This warp's 16 rows of dq. */
template <class E, int NK>
DEV void store_queries(const att_args &p, const query_tile &t, int m0, float (&dq)[NK][4])
{
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = m0 + g + 8 * h;
        E *to = (E *)p.dq + ((t.row + r) * p.N + t.head) * p.DK;
#pragma unroll
        for (int n = 0; n < NK; n++)
            if (r < t.n)
                store_two(to, 8 * n + c0, p.DK, p.even_k, dq[n][2 * h] * p.scale,
                          dq[n][2 * h + 1] * p.scale);
    }
}

template <class E, int DK, int DV> KERNEL((bwd_of<E, DK, DV>::threads), 1) attend_dq(att_args p)
{
    SHARED_MEMORY(memory);
    typedef bwd_of<E, DK, DV> F;
    constexpr int T = F::threads, B = F::DB, PK = pitch<E>(DK), PV = pitch<E>(DV);
    query_tile t;
    if (!find_queries<T, F::rows>(p, (int64_t *)memory, &t))
        return;
    E *sq = (E *)memory, *sd = sq + F::fixed_k, *sk = sd + F::fixed_v, *sv = sk + 2 * F::dq_k;
    E *left = sv + 2 * F::dq_v;
    const int m0 = (int)threadIdx.x / 32 * 16, g = lane() >> 2, c0 = 2 * (lane() & 3);
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV, keys = t.i0 + t.n;
    const E *k = (const E *)p.k + (t.base * p.G + t.g) * p.DK;
    const E *v = (const E *)p.v + (t.base * p.G + t.g) * p.DV;
    float dq[1][DK / 8][4], lse[2], D[2];
    clear(dq);
    load_rows(p, t, m0, lse, D);
    load_tile<F::rows, DK, T>(sq, (const E *)p.q + (t.row * p.N + t.head) * p.DK, p.N * p.DK, t.n,
                              p.DK, p.wide_k);
    load_tile<F::rows, DV, T>(sd, (const E *)p.d_o + (t.row * p.N + t.head) * p.DV, p.N * p.DV, t.n,
                              p.DV, p.wide_v);
    load_tile<B, DK, T>(sk, k, ldk, keys, p.DK, p.wide_k);
    load_tile<B, DV, T>(sv, v, ldv, keys, p.DV, p.wide_v);
    copy_commit();
    int at = 0;
    for (int64_t j0 = 0; j0 < keys; j0 += B, at ^= 1) {
        float s[1][B / 8][4], dp[1][B / 8][4];
        const int64_t next = j0 + B;
        copy_wait<0>();
        sync_block();
        if (next < keys) {
            load_tile<B, DK, T>(sk + (at ^ 1) * F::dq_k, k + next * ldk, ldk, keys - next, p.DK,
                                p.wide_k);
            load_tile<B, DV, T>(sv + (at ^ 1) * F::dq_v, v + next * ldv, ldv, keys - next, p.DV,
                                p.wide_v);
        }
        copy_commit();
        clear(s);
        clear(dp);
        product<E>::run(s, Row<E>{sq, PK}, m0, Row<E>{sk + at * F::dq_k, PK}, 0, 0, DK);
        product<E>::run(dp, Row<E>{sd, PV}, m0, Row<E>{sv + at * F::dq_v, PV}, 0, 0, DV);
        const bool edge = next - 1 > t.i0 + m0;
#pragma unroll
        for (int n = 0; n < B / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float w = ex2(s[0][n][e] * p.scale2 - lse[e / 2]);
                const bool out = edge && j0 + 8 * n + c0 + e % 2 > t.i0 + m0 + g + 8 * (e / 2);
                s[0][n][e] = out ? 0.f : w * (dp[0][n][e] - D[e / 2]);
            }
        add_weighted(dq, s, Col<E>{sk + at * F::dq_k, PK}, m0, left);
    }
    store_queries<E>(p, t, m0, dq[0]);
}

/* ---- dk, dv --------------------------------------------------------------------------------- */

/* Tiles of KB queries that see keys from j0 on: heads of the group, then parts of the sequence, then tokens.
 * n = 0: no more. */
struct query_walk {
    const att_args *p;
    int64_t first, seq, j0, part, at; /* part: from first on */
    int head, last_head;
    int64_t i0, row; /* of the tile */
    int n;
};
template <int KB> DEV void walk_to_tile(query_walk *w)
{
    while (w->head < w->last_head) {
        while (w->part < w->p->n_parts) {
            const ckpt_cuda_part x = part_of(*w->p, w->part);
            if (x.seq != w->seq)
                break;
            if (w->at < 0)
                w->at = w->j0 > x.lo ? (w->j0 - x.lo) / KB * KB : 0;
            if (w->at < x.n) {
                w->i0 = x.lo + w->at;
                w->row = x.row + w->at;
                w->n = (int)(x.n - w->at < KB ? x.n - w->at : KB);
                return;
            }
            w->part++;
            w->at = -1;
        }
        w->head++;
        w->part = w->first;
        w->at = -1;
    }
    w->n = 0;
}
/* The first part of a sequence, or where it would be. */
DEV int64_t first_part(const att_args &p, int64_t seq)
{
    if (!p.parts)
        return seq;
    int64_t lo = 0, hi = p.n_parts;
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (p.parts[mid].seq < seq)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}
/* The walk of a tile of keys from j0 on, for the heads of a group, at its first tile. */
template <int KB>
DEV query_walk first_queries(const att_args &p, int64_t seq, int64_t j0, int group)
{
    const int share = (int)(p.N / p.G);
    query_walk w = {
        &p, first_part(p, seq), seq, j0, 0, -1, group * share, (group + 1) * share, 0, 0, 0};
    w.part = w.first;
    walk_to_tile<KB>(&w);
    return w;
}

/* This warp's 16 rows of dk and dv, of `here` keys from token `from`. */
template <class E, bool WITH_K, bool WITH_V, int NK, int NV>
DEV void store_keys(const att_args &p, int64_t from, int group, int64_t here, int m0,
                    float (&dk)[NK][4], float (&dv)[NV][4])
{
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = m0 + g + 8 * h;
        const int64_t to = (from + r) * p.G + group;
        if (r >= here)
            continue;
        if constexpr (WITH_K)
#pragma unroll
            for (int n = 0; n < NK; n++)
                store_two((E *)p.dk + to * p.DK, 8 * n + c0, p.DK, p.even_k, dk[n][2 * h] * p.scale,
                          dk[n][2 * h + 1] * p.scale);
        if constexpr (WITH_V)
#pragma unroll
            for (int n = 0; n < NV; n++)
                store_two((E *)p.dv + to * p.DV, 8 * n + c0, p.DV, p.even_v, dv[n][2 * h],
                          dv[n][2 * h + 1]);
    }
}

template <class E, int DK, int DV, bool WITH_K, bool WITH_V>
KERNEL((bwd_of<E, DK, DV>::threads), 1)
attend_dkv(att_args p)
{
    SHARED_MEMORY(memory);
    typedef bwd_of<E, DK, DV> F;
    constexpr int T = F::threads, B = F::KB, PK = pitch<E>(DK), PV = pitch<E>(DV);
    constexpr int NK = WITH_K ? DK / 8 : 2, NV = WITH_V ? DV / 8 : 2;
    int64_t tile;
    const int64_t seq = find_tile<true, T>(p, blockIdx.x / p.G, F::rows, (int64_t *)memory, &tile);
    if (seq < 0)
        return;
    E *sk = (E *)memory, *sv = sk + F::fixed_k, *sq = sv + F::fixed_v, *sd = sq + 2 * F::kv_k;
    E *left = sd + 2 * F::kv_v;
    float *rows = (float *)(left + left_elements<E>(F::rows, B)); /* [2][lse, D][B] */
    const int group = (int)(blockIdx.x % p.G), tid = (int)threadIdx.x;
    const int m0 = tid / 32 * 16, g = lane() >> 2, c0 = 2 * (lane() & 3);
    const int64_t base = p.cu[seq], len = p.cu[seq + 1] - base, j0 = tile * F::rows;
    const int64_t ldq = p.N * p.DK, ldo = p.N * p.DV, here = len - j0;
    float dk[1][NK][4], dv[1][NV][4];
    clear(dk);
    clear(dv);
    query_walk w = first_queries<B>(p, seq, j0, group);
    load_tile<F::rows, DK, T>(sk, (const E *)p.k + ((base + j0) * p.G + group) * p.DK, p.G * p.DK,
                              here, p.DK, p.wide_k);
    load_tile<F::rows, DV, T>(sv, (const E *)p.v + ((base + j0) * p.G + group) * p.DV, p.G * p.DV,
                              here, p.DV, p.wide_v);
    float row_lse = INFINITY, row_D = 0; /* of query tid of the next tile */
    auto fetch = [&](int to) {
        if (w.n > 0) {
            const int64_t q = w.row * p.N + w.head;
            load_tile<B, DK, T>(sq + to * F::kv_k, (const E *)p.q + q * p.DK, ldq, w.n, p.DK,
                                p.wide_k);
            load_tile<B, DV, T>(sd + to * F::kv_v, (const E *)p.d_o + q * p.DV, ldo, w.n, p.DV,
                                p.wide_v);
            row_lse = INFINITY;
            row_D = 0;
            if (tid < w.n) {
                row_lse = p.lse[q + tid * p.N] * LOG2E;
                row_D = p.D[q + tid * p.N];
            }
        }
        copy_commit();
    };
    fetch(0);
    for (int at = 0; w.n > 0; at ^= 1) {
        float s[1][B / 8][4], dp[1][B / 8][4], *row = rows + at * 2 * B;
        const int64_t i0 = w.i0;
        if (tid < B) {
            row[tid] = row_lse;
            row[B + tid] = row_D;
        }
        copy_wait<0>();
        sync_block();
        w.at += B;
        walk_to_tile<B>(&w);
        fetch(at ^ 1);
        const E *q = sq + at * F::kv_k, *d = sd + at * F::kv_v;
        clear(s);
        product<E>::run(s, Row<E>{sk, PK}, m0, Row<E>{q, PK}, 0, 0, DK);
        const bool edge = j0 + m0 + 15 > i0;
#pragma unroll
        for (int n = 0; n < B / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = 8 * n + c0 + e % 2;
                const float x = ex2(s[0][n][e] * p.scale2 - row[c]);
                s[0][n][e] = edge && j0 + m0 + g + 8 * (e / 2) > i0 + c ? 0.f : x;
            }
        if constexpr (WITH_V)
            add_weighted(dv, s, Col<E>{d, PV}, m0, left);
        if constexpr (WITH_K) {
            clear(dp);
            product<E>::run(dp, Row<E>{sv, PV}, m0, Row<E>{d, PV}, 0, 0, DV);
#pragma unroll
            for (int n = 0; n < B / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[0][n][e] *= dp[0][n][e] - row[B + 8 * n + c0 + e % 2];
            add_weighted(dk, s, Col<E>{q, PK}, m0, left);
        }
    }
    copy_wait<0>();
    store_keys<E, WITH_K, WITH_V>(p, base + j0, group, here, m0, dk[0], dv[0]);
}

} // namespace kda

#endif
