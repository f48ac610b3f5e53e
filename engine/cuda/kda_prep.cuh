/* Everything of a chunk that does not know the state (kda-math.md section 3, rows 1-6 and 9): one
 * block a chunk and head. Reads q, k, v, g, beta once, writes
 *   Qg = scale q e^G, Kr = k e^(G_C - G), Aqk, W = T (beta k e^G), U = T (beta v), e^G_C, and T.
 *
 * Aqk and L are made in row groups of 16 tokens. Exponents are differences to a reference row of the
 * group (section 3.1): the middle row when the gate is safe, with the diagonal tile on tensor cores
 * (at most 8 x 5 nats either way); otherwise the first row, and exact pairs on the diagonal tile.
 * T: substitution in the 16 x 16 diagonal tiles, then T[p,c] = -T[p,p] sum L[p,m] T[m,c] row of tiles
 * by row of tiles, in place of L.
 *
 * Three blocks share a multiprocessor in bf16: L lies where q was, v and T where G was. */
#ifndef CKPT_CUDA_KDA_PREP_CUH
#define CKPT_CUDA_KDA_PREP_CUH

#include "kda_common.cuh"

namespace kda
{

constexpr int PREP_THREADS = 256;

template <class E, int D> struct prep_memory {
    static constexpr int LD = D + 16 / (int)sizeof(E), LG = D + 8;
    static constexpr int tile = C * LD * (int)sizeof(E);
    static constexpr int late = tile + C * LC * (int)sizeof(E), early = C * LG * 4;
    static constexpr int shared = early > late ? early : late;
    static constexpr int first = tile > C *LF * 4 ? tile : C *LF * 4;
    static constexpr int bytes = first + tile + shared + (C + PREP_THREADS) * 4;
    static constexpr int bytes_kb = bytes + tile; /* with a tile for kb */
    float *G, *L, *beta, *part;
    E *q, *k, *v, *T, *kb; /* kb: rows that beta scales, k itself unless there is another */
    DEV prep_memory(unsigned char *p, bool own_kb)
    {
        q = (E *)p;
        L = (float *)p;
        k = (E *)(p + first);
        G = (float *)(p + first + tile);
        v = (E *)G;
        T = v + C * LD;
        beta = (float *)(p + first + tile + shared);
        part = beta + C;
        kb = own_kb ? (E *)(part + PREP_THREADS) : k;
    }
};

/* x[r][k] e^(G[r] - G[ref]) times f(r). */
template <class E> struct later {
    const E *x;
    const float *G, *ref, *factor; /* factor [C] or NULL */
    int ld, lg;
    DEV float at(int r, int k) const
    {
        const float f = factor ? factor[r] : 1.f;
        return f * to_f(x[r * ld + k]) * ex2(G[r * lg + k] - ref[k]);
    }
};
/* x[r][k] e^(G[ref] - G[r]). */
template <class E> struct earlier {
    const E *x;
    const float *G, *ref;
    int ld, lg;
    DEV float at(int r, int k) const
    {
        return to_f(x[r * ld + k]) * ex2(ref[k] - G[r * lg + k]);
    }
};

/* Warp w makes `count` tiles of 16 x 8 of row group `group` from column 8 `first` on. */
struct share {
    int group, first, count;
};
DEV share share_of(int w)
{
    /* 20 tiles at and below the diagonal for 8 warps, a diagonal's two together: bits 6, 2 and 0 of a
     * byte a warp */
    const uint64_t code = 0x024a428f83dacfc3u;
    const int x = (int)(code >> 8 * w) & 255;
    return share{x >> 6, x >> 2 & 15, x & 3};
}

/* Both products of one warp's tiles on tensor cores, q and beta k rows against k columns. */
template <class E, int D>
DEV void scores(const prep_memory<E, D> &m, const share &s, int ref, float (&aqk)[1][3][4],
                float (&low)[1][3][4])
{
    constexpr int LD = prep_memory<E, D>::LD, LG = prep_memory<E, D>::LG;
    const float *r = m.G + ref * LG;
    const later<E> a1 = {m.q, m.G, r, nullptr, LD, LG}, a2 = {m.kb, m.G, r, m.beta, LD, LG};
    const earlier<E> b = {m.k, m.G, r, LD, LG};
    for (int j = 0; j < 3; j++)
        if (j < s.count)
            product<float>::run2(reinterpret_cast<float(&)[1][1][4]>(aqk[0][j]),
                                 reinterpret_cast<float(&)[1][1][4]>(low[0][j]), a1, a2,
                                 16 * s.group, b, 8 * (s.first + j), 0, D);
}
template <int D>
DEV void scores(const prep_memory<bf16, D> &m, const share &s, int ref, float (&aqk)[1][3][4],
                float (&low)[1][3][4])
{
    constexpr int LD = prep_memory<bf16, D>::LD, LG = prep_memory<bf16, D>::LG;
    const int g = lane() >> 2, t = 2 * (lane() & 3);
    const int r0 = 16 * s.group + g;
#pragma unroll 2
    for (int k = 0; k < D; k += 16) {
        uint32_t fq[4], fk[4];
        pair ref_at[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int d = k + 8 * half + t;
            ref_at[half] = load2(m.G + ref * LG + d);
#pragma unroll
            for (int low_row = 0; low_row < 2; low_row++) {
                const int r = r0 + 8 * low_row;
                const pair G = load2(m.G + r * LG + d), q = load2(m.q + r * LD + d),
                           x = load2(m.kb + r * LD + d);
                const float e0 = ex2(G.x - ref_at[half].x), e1 = ex2(G.y - ref_at[half].y);
                fq[2 * half + low_row] = pack_bf16(q.x * e0, q.y * e1);
                fk[2 * half + low_row] = pack_bf16(x.x * e0, x.y * e1);
            }
        }
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (j >= s.count)
                continue;
            uint32_t b[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int d = k + 8 * half + t, r = 8 * (s.first + j) + g;
                const pair G = load2(m.G + r * LG + d), x = load2(m.k + r * LD + d);
                b[half] =
                    pack_bf16(x.x * ex2(ref_at[half].x - G.x), x.y * ex2(ref_at[half].y - G.y));
            }
            mma_bf16(aqk[0][j], fq, b[0], b[1]);
            mma_bf16(low[0][j], fk, b[0], b[1]);
        }
    }
    const float beta[2] = {m.beta[r0], m.beta[r0 + 8]};
#pragma unroll
    for (int j = 0; j < 3; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            low[0][j][e] *= beta[e / 2];
}

/* One element of both, exact. */
template <class E, int D>
DEV void score(const prep_memory<E, D> &m, int i, int j, float &aqk, float &low)
{
    constexpr int LD = prep_memory<E, D>::LD, LG = prep_memory<E, D>::LG;
    float a = 0, l = 0;
    for (int d = 0; d < D; d += 2) {
        const pair Gi = load2(m.G + i * LG + d), Gj = load2(m.G + j * LG + d),
                   q = load2(m.q + i * LD + d), x = load2(m.kb + i * LD + d),
                   y = load2(m.k + j * LD + d);
        const float e0 = y.x * ex2(Gi.x - Gj.x), e1 = y.y * ex2(Gi.y - Gj.y);
        a += q.x * e0 + q.y * e1;
        l += x.x * e0 + x.y * e1;
    }
    aqk = a;
    low = m.beta[i] * l;
}

/* Aqk to global memory, its tiles above the diagonal zeros; L of this warp's tiles to low. */
template <class E, int D, bool SAFE>
DEV void make_scores(const prep_memory<E, D> &m, const share &s, float scale, E *out,
                     float (&low)[1][3][4])
{
    float aqk[1][3][4];
    clear(aqk);
    clear(low);
    scores(m, s, 16 * s.group + (SAFE ? 8 : 0), aqk, low);
    const int r0 = 16 * s.group + (lane() >> 2), c0 = 8 * s.first + 2 * (lane() & 3);
#pragma unroll
    for (int j = 0; j < 3; j++) {
        if (j >= s.count)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = r0 + 8 * half, c = c0 + 8 * j;
            float *a = aqk[0][j] + 2 * half, *l = low[0][j] + 2 * half;
            if (!SAFE && c >= 16 * s.group)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (c + e <= r)
                        score(m, r, c + e, a[e], l[e]);
            store2(out + r * LC + c, c <= r ? scale * a[0] : 0.f, c + 1 <= r ? scale * a[1] : 0.f);
        }
    }
    const vec<E> zeros = {};
    constexpr int n = vec<E>::n, per = LC / n;
    for (int i = (int)threadIdx.x; i < C * per; i += PREP_THREADS) {
        const int r = i / per, c = i % per * n;
        if (c / 16 >
            r / 16) /* with the padding, so that a copy reads nothing that was not written */
            store16(out + r * LC + c, zeros);
    }
}

/* m.L = what make_scores left in registers; tiles above the diagonal are not written. */
template <class E, int D>
DEV void put_scores(const prep_memory<E, D> &m, const share &s, const float (&low)[1][3][4])
{
    const int r0 = 16 * s.group + (lane() >> 2), c0 = 8 * s.first + 2 * (lane() & 3);
#pragma unroll
    for (int j = 0; j < 3; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = r0 + 8 * half, c = c0 + 8 * j;
            const float *l = low[0][j] + 2 * half;
            if (j < s.count)
                store2(m.L + r * LF + c, c < r ? l[0] : 0.f, c + 1 < r ? l[1] : 0.f);
        }
}

/* m.L = (I + L)^-1 in place, m.T the same as E with zeros above the diagonal. */
template <class E, int D> DEV void invert(const prep_memory<E, D> &m)
{
    typedef product<typename fine<E>::type> mul;
    const int w = (int)threadIdx.x / 32;
    if (w < 4) {
        float x[16];
        float *tile = m.L + 16 * w * (LF + 1);
        const int j = lane() & 15;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float a = i == j ? 1.f : 0.f, b = 0;
#pragma unroll
            for (int n = 0; n < i; n++)
                (n & 1 ? b : a) -= tile[i * LF + n] * x[n];
            x[i] = a + b;
        }
        sync_warp();
        if (lane() < 16)
#pragma unroll
            for (int i = 0; i < 16; i++)
                tile[i * LF + j] = x[i];
    }
    sync_block();
    const Row<float> rows = {m.L, LF};
    const Col<float> columns = {m.L, LF};
    for (int p = 1; p < C / 16; p++) {
        float x[1][2][4];
        if (w < p) {
            clear(x);
            mul::run(x, rows, 16 * p, columns, 16 * w, 16 * w, 16 * p);
        }
        sync_block();
        if (w < p) {
            each(x, 16 * p, 16 * w,
                 [&](int r, int c, float a, float b) { store2(m.L + r * LF + c, a, b); });
            sync_warp();
            clear(x);
            mul::run(x, Row<float>{m.L + 16 * p * (LF + 1), LF}, 0,
                     Col<float>{m.L + 16 * p * LF + 16 * w, LF}, 0, 0, 16);
            sync_warp();
            each(x, 16 * p, 16 * w,
                 [&](int r, int c, float a, float b) { store2(m.L + r * LF + c, -a, -b); });
        }
        sync_block();
    }
    for (int i = (int)threadIdx.x; i < C * C / 4; i += PREP_THREADS) {
        const int r = i / (C / 4), c = i % (C / 4) * 4;
        vec<float> x = {};
        if (c / 16 <= r / 16)
            x = load16(m.L + r * LF + c);
        store4(m.T + r * LC + c, x);
    }
}

/* Qg and Kr to global memory; k becomes beta k e^G. */
template <class E, int D>
DEV void scale_rows(const args &p, const prep_memory<E, D> &m, E *Qg, E *Kr)
{
    constexpr int LD = prep_memory<E, D>::LD, LG = prep_memory<E, D>::LG, n = vec<E>::n;
    for (int i = (int)threadIdx.x; i < C * D / n; i += PREP_THREADS) {
        const int r = i / (D / n), d = i % (D / n) * n;
        const float beta = m.beta[r];
        pairs<E> q(m.q + r * LD + d), k(m.k + r * LD + d), kb(m.kb + r * LD + d), kr;
#pragma unroll
        for (int half = 0; half < n; half += 4) {
            const vec<float> G = load16(m.G + r * LG + d + half),
                             last = load16(m.G + (C - 1) * LG + d + half);
#pragma unroll
            for (int l = 0; l < 4; l += 2) {
                const int j = (half + l) / 2;
                const float e0 = ex2(G.e[l]), e1 = ex2(G.e[l + 1]);
                const pair x = k.get(j), y = q.get(j), z = kb.get(j);
                q.put(j, p.scale * e0 * y.x, p.scale * e1 * y.y);
                kr.put(j, x.x * ex2(last.e[l] - G.e[l]), x.y * ex2(last.e[l + 1] - G.e[l + 1]));
                k.put(j, beta * e0 * z.x, beta * e1 * z.y);
            }
        }
        q.store(Qg + r * LD + d);
        kr.store(Kr + r * LD + d);
        if (d == 0) { /* the padding, as above */
            q.store(Qg + r * LD + D);
            kr.store(Kr + r * LD + D);
        }
        k.store(m.k + r * LD + d);
    }
}
/* v becomes beta v, each thread what it fetched. */
template <class E, int D> DEV void scale_values(const prep_memory<E, D> &m)
{
    constexpr int LD = prep_memory<E, D>::LD;
    each16<E, PREP_THREADS>(C, D, [&](int r, int c) {
        pairs<E> v(m.v + r * LD + c);
        const float beta = m.beta[r];
#pragma unroll
        for (int j = 0; j < vec<E>::n / 2; j++)
            v.put(j, beta * v.get(j).x, beta * v.get(j).y);
        v.store(m.v + r * LD + c);
    });
}

/* W and U = T times k and v, in place of those, each warp all rows of some columns. T has nothing above its
 * diagonal, so the upper half of the rows is not needed for the lower half once that is made. */
template <class E, int D> DEV void multiply(const prep_memory<E, D> &m, E *W, E *U)
{
    constexpr int LD = prep_memory<E, D>::LD, NT = D / 32; /* 8 warps, 2 D columns */
    const int w = (int)threadIdx.x / 32, n0 = w % 4 * NT * 8;
    const Row<E> a = {m.T, LC};
    const Col<E> b = {w < 4 ? m.k : m.v, LD};
    E *to = w < 4 ? m.k : m.v;
    for (int half = 1; half >= 0; half--) {
        float acc[2][NT][4];
        clear(acc);
#pragma unroll
        for (int i = 0; i < 2; i++)
            product<E>::run(reinterpret_cast<float(&)[1][NT][4]>(acc[i]), a, 32 * half + 16 * i, b,
                            n0, 0, 32 * half + 16 * i + 16);
        sync_block(); /* these rows of k and v are read */
        each(acc, 32 * half, n0,
             [&](int r, int c, float x, float y) { store2(to + r * LD + c, x, y); });
    }
    sync_block();
    flush<E, PREP_THREADS>(W, LD, m.k, LD, C, LD);
    constexpr int n = vec<E>::n, per = LV / n;
    for (int i = (int)threadIdx.x; i < D / VS * C * per; i += PREP_THREADS) {
        const int r = i / per % C, v = i / per / C * VS + i % per * n;
        store16(U + i * n, load16(m.v + r * LD + (v < D ? v : 0)));
    }
}

template <class E, int D, bool SAFE> KERNEL(PREP_THREADS, sizeof(E) == 2 ? 3 : 1) prep(const args p)
{
    SHARED_MEMORY(memory);
    const prep_memory<E, D> m(memory, p.kb != nullptr);
    constexpr int LD = prep_memory<E, D>::LD, LG = prep_memory<E, D>::LG;
    const int ci = (int)blockIdx.x / p.H, h = (int)blockIdx.x % p.H, tid = (int)threadIdx.x;
    const int64_t tile = blockIdx.x;
    const chunk_at c = find_chunk(p, ci);
    const int64_t at = (c.start * p.H + h) * D;
    const int64_t key = key_at<D>(p, c, h);
    const int row = p.H * D, key_row = p.HQ * D;
    fetch<E, PREP_THREADS>(m.q, LD, (const E *)p.q + key, key_row, C, D, c.len);
    fetch<E, PREP_THREADS>(m.k, LD, (const E *)p.k + key, key_row, C, D, c.len);
    if (p.kb)
        fetch<E, PREP_THREADS>(m.kb, LD, (const E *)p.kb + at, row, C, D, c.len);
    copy_commit();
    if (tid < C)
        m.beta[tid] = beta_at(p, c, h, tid);
    cumulate<D, PREP_THREADS>(p, c, h, m.G, LG, m.part);
    copy_wait<0>();
    sync_block();
    typedef image<E, D> I;
    unsigned char *out = p.image + tile * I::bytes;
    if (tid < D)
        ((float *)(out + I::decay))[tid] = ex2(m.G[(C - 1) * LG + tid]);
    const share s = share_of(tid / 32);
    float low[1][3][4];
    make_scores<E, D, SAFE>(m, s, p.scale, (E *)(out + I::Aqk), low);
    sync_block();
    scale_rows<E, D>(p, m, (E *)(out + I::Qg), (E *)(out + I::Kr));
    sync_block(); /* q and G are read */
    fetch<E, PREP_THREADS>(m.v, LD, (const E *)p.v + at, row, C, D, c.len);
    copy_commit();
    put_scores(m, s, low);
    sync_block();
    invert(m);
    copy_wait<0>();
    scale_values(m);
    sync_block();
    multiply<E, D>(m, (E *)out, (E *)p.U + tile * columns<E, D>);
    if (p.T)
        flush<E, PREP_THREADS>((E *)p.T + tile * (C * C), C, m.T, LC, C, C);
}

} // namespace kda

#endif
