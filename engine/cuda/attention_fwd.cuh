/* Attention forward. A block is one head's tile of query rows and walks the keys up to its diagonal with a
 * running maximum m and sum l of every row (mla-moe-math.md section 2.7). A warp has FM x 16 rows; scores
 * and weights stay in its registers. K of the next tile loads while V is multiplied, V while scores are.
 * Traffic: q, o, lse once; k and v once a tile of queries, from L2 where heads run side by side. */
#ifndef CKPT_CUDA_ATTENTION_FWD_CUH
#define CKPT_CUDA_ATTENTION_FWD_CUH

#include "attention_common.cuh"

namespace kda
{

template <class E, int DK, int DV> struct fwd_of : att_shape<E, DK, DV> {
    typedef att_shape<E, DK, DV> S;
    static constexpr int threads = S::FW * 32, rows = S::FW * S::FM * 16;
    static constexpr int q = rows * pitch<E>(DK), k = S::FB * pitch<E>(DK),
                         v = S::FB * pitch<E>(DV);
    static constexpr int bytes = (q + k + v + left_elements<E>(rows, S::FB)) * (int)sizeof(E);
};

/* Scores of a tile to weights; keys from j0, this warp's first row is token i of the sequence. What was
 * summed before has to be multiplied by keep. */
template <int MT, int NT>
DEV void weigh(float (&s)[MT][NT][4], float (&m)[MT][2], float (&l)[MT][2], float (&keep)[MT][2],
               float scale2, int64_t i, int64_t j0)
{
    const int g = lane() >> 2, t = 2 * (lane() & 3);
    if (j0 + 8 * NT - 1 > i)
#pragma unroll
        for (int a = 0; a < MT; a++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j0 + 8 * n + t + e % 2 > i + 16 * a + g + 8 * (e / 2))
                        s[a][n][e] = -INFINITY;
#pragma unroll
    for (int a = 0; a < MT; a++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = m[a][h];
#pragma unroll
            for (int n = 0; n < NT; n++)
                top = fmaxf(top, fmaxf(s[a][n][2 * h], s[a][n][2 * h + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            keep[a][h] = ex2((m[a][h] - top) * scale2);
            const float shift = top * scale2;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    s[a][n][e] = ex2(s[a][n][e] * scale2 - shift);
                    sum += s[a][n][e];
                }
            m[a][h] = top;
            l[a][h] = l[a][h] * keep[a][h] + sum;
        }
}
template <int MT, int OT> DEV void rescale(float (&o)[MT][OT][4], const float (&keep)[MT][2])
{
#pragma unroll
    for (int a = 0; a < MT; a++)
#pragma unroll
        for (int n = 0; n < OT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[a][n][e] *= keep[a][e / 2];
}

/* m, l of a row are in the four lanes of its group; l is still each lane's own part. */
template <class E, int MT, int OT>
DEV void finish_rows(const att_args &p, const query_tile &t, int m0, float (&o)[MT][OT][4],
                     float (&m)[MT][2], float (&l)[MT][2])
{
    const int g = lane() >> 2, c0 = 2 * (lane() & 3);
#pragma unroll
    for (int a = 0; a < MT; a++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = m0 + 16 * a + g + 8 * h;
            float sum = l[a][h];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            const float inv = 1.f / sum;
            if (r >= t.n)
                continue;
            const int64_t at = (t.row + r) * p.N + t.head;
            E *to = (E *)p.out + at * p.DV;
#pragma unroll
            for (int n = 0; n < OT; n++)
                store_two(to, 8 * n + c0, p.DV, p.even_v, o[a][n][2 * h] * inv,
                          o[a][n][2 * h + 1] * inv);
            if (c0 == 0)
                p.out_lse[at] = m[a][h] * p.scale2 * LN2 + logf(sum);
        }
}

template <class E, int DK, int DV>
KERNEL((fwd_of<E, DK, DV>::threads), (fwd_of<E, DK, DV>::FO))
attend(att_args p)
{
    SHARED_MEMORY(memory);
    typedef fwd_of<E, DK, DV> F;
    constexpr int T = F::threads, MT = F::FM, B = F::FB;
    query_tile t;
    if (!find_queries<T, F::rows>(p, (int64_t *)memory, &t))
        return;
    E *sq = (E *)memory, *sk = sq + F::q, *sv = sk + F::k, *left = sv + F::v;
    const int m0 = (int)threadIdx.x / 32 * MT * 16;
    const int64_t ldk = p.G * p.DK, ldv = p.G * p.DV, keys = t.i0 + t.n;
    const E *k = (const E *)p.k + (t.base * p.G + t.g) * p.DK;
    const E *v = (const E *)p.v + (t.base * p.G + t.g) * p.DV;
    float o[MT][DV / 8][4], m[MT][2], l[MT][2];
    clear(o);
#pragma unroll
    for (int a = 0; a < 2 * MT; a++) {
        m[a / 2][a % 2] = -INFINITY;
        l[a / 2][a % 2] = 0;
    }
    load_tile<F::rows, DK, T>(sq, (const E *)p.q + (t.row * p.N + t.head) * p.DK, p.N * p.DK, t.n,
                              p.DK, p.wide_k);
    load_tile<B, DK, T>(sk, k, ldk, keys, p.DK, p.wide_k);
    copy_commit();
    for (int64_t j0 = 0; j0 < keys; j0 += B) {
        float s[MT][B / 8][4], keep[MT][2];
        copy_wait<0>();
        sync_block(); /* K is there, and the last V is not needed any more */
        load_tile<B, DV, T>(sv, v + j0 * ldv, ldv, keys - j0, p.DV, p.wide_v);
        copy_commit();
        clear(s);
        product<E>::run(s, Row<E>{sq, pitch<E>(DK)}, m0, Row<E>{sk, pitch<E>(DK)}, 0, 0, DK);
        weigh(s, m, l, keep, p.scale2, t.i0 + m0, j0);
        rescale(o, keep);
        copy_wait<0>();
        sync_block(); /* V is there, and K is not needed any more */
        if (j0 + B < keys)
            load_tile<B, DK, T>(sk, k + (j0 + B) * ldk, ldk, keys - j0 - B, p.DK, p.wide_k);
        copy_commit();
        add_weighted(o, s, Col<E>{sv, pitch<E>(DV)}, m0, left);
    }
    finish_rows<E>(p, t, m0, o, m, l);
}

} // namespace kda

#endif
