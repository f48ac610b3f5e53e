/* The gradient kernel of kda_grad.cuh for bf16 and a safe gate: the same sums, other hands.
 *
 * A warp owns 16 columns (channels) of all 64 rows, so that
 *   - it reads its 16 rows of S and of dS' from global memory straight into fragments, once a block,
 *   - decayed keys are made once for a pair of row groups: k e^(ref_j - G) stays in registers and a
 *     column factor e^(ref_i - ref_j) moves it to row group i (ref: the middle row of a group),
 *   - the reverse cumulative sum of dG over rows is a scan inside the warp.
 * Three tiles of shared memory serve twice: dO, dR and V_new, then q and k. Two blocks share a
 * multiprocessor at D = 128, so that one loads while the other computes.
 *
 * With x = beta k, dk is kept whole: dk = z + beta dkb, and dG = q dq + 2 x dkb - k dk. */
#ifndef CKPT_CUDA_KDA_GRAD16_CUH
#define CKPT_CUDA_KDA_GRAD16_CUH

#include "kda_common.cuh"
#include "kda_prep.cuh"

namespace kda
{

template <int D> struct grad16_memory {
    static constexpr int WARPS = D / 16, THREADS = 32 * WARPS, BLOCKS = D == 128 ? 2 : 3;
    static constexpr int LD = D + 8, LG = D + 4;
    static constexpr int kb_tile = C * LD * 2;
    static constexpr int bytes =
        (C * LG + C + THREADS + C * WARPS) * 4 + (2 * C * LC + 3 * C * LD) * 2;
    float *G, *beta, *part, *red;
    bf16 *A, *L, *d_o, *dR, *V, *q, *k, *kb;
    DEV grad16_memory(unsigned char *p, bool own_kb)
    {
        G = (float *)p;
        beta = G + C * LG;
        part = beta + C;
        red = part + THREADS;
        A = (bf16 *)(red + C * WARPS);
        L = A + C * LC;
        q = d_o = L + C * LC;
        k = dR = d_o + C * LD;
        V = dR + C * LD;
        kb = own_kb ? V + C * LD : k;
    }
};

/* f(row group, eight columns, low or high rows, row, column, x0, x1) over a warp's 64 x 16. */
template <class F> DEV void each64(float (&x)[4][2][4], int n0, const F &f)
{
    const int g = lane() >> 2, c = n0 + 2 * (lane() & 3);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                f(i, j, half, 16 * i + g + 8 * half, c + 8 * j, x[i][j][2 * half],
                  x[i][j][2 * half + 1]);
}

DEV float low_of(uint32_t x)
{
    return bits_to_float(x << 16);
}
DEV float high_of(uint32_t x)
{
    return bits_to_float(x & 0xffff0000u);
}
DEV uint32_t word_at(const bf16 *p)
{
    return *(const uint32_t *)p;
}

/* Fragment of B, 16 columns n and 16 k, from rows n of global memory: p is element (lane's n, k). */
template <int D> DEV void frag_global(uint32_t (&b)[4], const bf16 *p)
{
    b[0] = word_at(p);
    b[1] = word_at(p + 8);
    b[2] = word_at(p + 8 * D);
    b[3] = word_at(p + 8 * D + 8);
}

/* Sixteen tokens of x in the layout of a B fragment, as floats: [column half][token]. */
struct tokens16 {
    float x[2][4];
};
template <int LD> DEV tokens16 tokens_of(const bf16 *x, int n0, int t0)
{
    uint32_t raw[4];
    tokens16 r;
    frag_b(raw, Col<bf16>{x, LD}, n0, t0);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            r.x[i][2 * j] = low_of(raw[2 * i + j]);
            r.x[i][2 * j + 1] = high_of(raw[2 * i + j]);
        }
    return r;
}
/* Each times its column's factor, packed. */
DEV void pack_tokens(uint32_t (&b)[4], const tokens16 &x, const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            b[2 * i + j] = pack_bf16(x.x[i][2 * j] * factor[i], x.x[i][2 * j + 1] * factor[i]);
}

template <int D> struct grad16 {
    typedef grad16_memory<D> M;
    static constexpr int LD = M::LD, LG = M::LG, TH = M::THREADS;
    const args &p;
    const M &m;
    chunk_at c;
    int h, w, n0, g, t;
    int64_t tile, at, key;
    int row, key_row;
    const bf16 *S, *dS; /* this lane's first element of a fragment */
    float ref[4][2];    /* G of each group's middle row, in this lane's columns g and g + 8 */

    DEV grad16(const args &a, const M &memory) : p(a), m(memory)
    {
        c = find_chunk(p, (int)blockIdx.x / p.H);
        h = (int)blockIdx.x % p.H;
        w = (int)threadIdx.x / 32;
        n0 = 16 * w;
        g = lane() >> 2;
        t = lane() & 3;
        tile = blockIdx.x;
        at = (c.start * p.H + h) * D;
        row = p.H * D;
        key = key_at<D>(p, c, h);
        key_row = p.HQ * D;
        S = (const bf16 *)p.S + tile * (D * D) + (n0 + g) * D + 2 * t;
        dS = (const bf16 *)p.dS + tile * (D * D) + (n0 + g) * D + 2 * t;
    }
    DEV void load_first() const
    {
        const bf16 *V = (const bf16 *)p.U + tile * columns<bf16, D>;
        fetch<bf16, TH>(m.A, LC, (const bf16 *)p.T + tile * (C * C), C, C, C, C);
        fetch<bf16, TH>(m.dR, LD, (const bf16 *)p.dv + at, row, C, D, c.len);
        copy_commit();
        fetch<bf16, TH>(m.d_o, LD, (const bf16 *)p.d_o + at, row, C, D, c.len);
        for (int v = 0; v < D / VS; v++)
            fetch<bf16, TH>(m.V + v * VS, LD, V + v * C * LV, LV, C, VS, C);
        copy_commit();
    }
    DEV void load_second() const
    {
        fetch<bf16, TH>(m.q, LD, (const bf16 *)p.q + key, key_row, C, D, c.len);
        fetch<bf16, TH>(m.k, LD, (const bf16 *)p.k + key, key_row, C, D, c.len);
        if (p.kb)
            fetch<bf16, TH>(m.kb, LD, (const bf16 *)p.kb + at, row, C, D, c.len);
        copy_commit();
    }
    /* red[row][warp] = or += the warp's sum over its columns of a row's x, low rows and high rows. */
    DEV void reduce_rows(float (&x)[4][2], bool add) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float s = x[i][half];
                s += shuffle_xor(s, 1);
                s += shuffle_xor(s, 2);
                float *to = m.red + (16 * i + g + 8 * half) * M::WARPS + w;
                if (t == 0)
                    *to = add ? *to + s : s;
            }
    }

    /* dR = T^T dV_new in dV_new's place, dv = beta dR, and its part of dbeta. */
    DEV void through_inverse() const
    {
        float x[4][2][4], sum[4][2] = {};
        uint32_t v[4][2][2] = {};
        clear(x);
        each64(x, n0, [&](int i, int j, int half, int r, int d, float &, float &) {
            if (r < c.len)
                v[i][j][half] = word_at((const bf16 *)p.v + at + (int64_t)r * row + d);
        });
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            uint32_t a[4], b[4];
            frag_b(b, Col<bf16>{m.dR, LD}, n0, 16 * kk);
#pragma unroll
            for (int i = 0; i <= kk; i++) {
                frag_a(a, Col<bf16>{m.A, LC}, 16 * i, 16 * kk);
                mma_bf16(x[i][0], a, b[0], b[1]);
                mma_bf16(x[i][1], a, b[2], b[3]);
            }
        }
        sync_warp(); /* the warp has read its columns of dV_new */
        each64(x, n0, [&](int i, int j, int half, int r, int d, float &a, float &b) {
            const float beta = m.beta[r];
            store2(m.dR + r * LD + d, a, b);
            if (r < c.len)
                store2((bf16 *)p.dv + at + (int64_t)r * row + d, beta * a, beta * b);
            sum[i][half] += a * low_of(v[i][j][half]) + b * high_of(v[i][j][half]);
        });
        reduce_rows(sum, false);
    }
    /* dAqk and dL, tiles at and below the diagonal. */
    DEV void pair_gradients() const
    {
        for (int part = w; part < 8; part += M::WARPS) {
            const share s = share_of(part);
            float x[4][4] = {}, y[4][4] = {};
#pragma unroll 2
            for (int k = 0; k < D; k += 16) {
                uint32_t a[4], r[4], b[4];
                frag_a(a, Row<bf16>{m.d_o, LD}, 16 * s.group, k);
                frag_a(r, Row<bf16>{m.dR, LD}, 16 * s.group, k);
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    if (j >= s.count)
                        continue;
                    frag_b(b, Row<bf16>{m.V, LD}, 8 * (s.first + j), k);
                    mma_bf16(x[j], a, b[0], b[1]);
                    mma_bf16(x[j + 1], a, b[2], b[3]);
                    mma_bf16(y[j], r, b[0], b[1]);
                    mma_bf16(y[j + 1], r, b[2], b[3]);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = 16 * s.group + g + 8 * half, k = 8 * (s.first + j) + 2 * t;
                    const float *a = x[j] + 2 * half, *l = y[j] + 2 * half;
                    if (j >= s.count)
                        continue;
                    store2(m.A + r * LC + k, k <= r ? p.scale * a[0] : 0.f,
                           k + 1 <= r ? p.scale * a[1] : 0.f);
                    store2(m.L + r * LC + k, k < r ? -l[0] : 0.f, k + 1 < r ? -l[1] : 0.f);
                }
        }
    }
    /* dq and dkb through the state: dO S^T and dR S^T. */
    DEV void through_state(const uint32_t (&s)[D / 16][4], float (&dq)[4][2][4],
                           float (&db)[4][2][4]) const
    {
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t a[4];
                frag_a(a, Row<bf16>{m.d_o, LD}, 16 * i, 16 * k);
                mma_bf16(dq[i][0], a, s[k][0], s[k][1]);
                mma_bf16(dq[i][1], a, s[k][2], s[k][3]);
                frag_a(a, Row<bf16>{m.dR, LD}, 16 * i, 16 * k);
                mma_bf16(db[i][0], a, s[k][0], s[k][1]);
                mma_bf16(db[i][1], a, s[k][2], s[k][3]);
            }
    }
    /* x *= e^(sign (G - ref)) of each row. */
    DEV void decay_rows(float (&x)[4][2][4], float sign) const
    {
        each64(x, n0, [&](int i, int, int, int r, int d, float &a, float &b) {
            const pair G = load2(m.G + r * LG + d), R = load2(m.G + (16 * i + 8) * LG + d);
            a *= ex2(sign * (G.x - R.x));
            b *= ex2(sign * (G.y - R.y));
        });
    }
    DEV void load_refs()
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                ref[i][j] = m.G[(16 * i + 8) * LG + n0 + g + 8 * j];
    }
    DEV void factor_of(float (&f)[2], int i, int j) const
    {
        f[0] = i == j ? 1.f : ex2(ref[i][0] - ref[j][0]);
        f[1] = i == j ? 1.f : ex2(ref[i][1] - ref[j][1]);
    }
    /* e^(sign (ref - G)) of sixteen tokens. */
    DEV tokens16 decays(int group, float sign) const
    {
        tokens16 e;
        const float *G = m.G + (16 * group + 2 * t) * LG + n0 + g;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                e.x[i][j] = ex2(sign * (ref[group][i] - G[(j / 2 * 8 + j % 2) * LG + 8 * i]));
        return e;
    }
    DEV void through_earlier(float (&dq)[4][2][4], float (&db)[4][2][4]) const
    {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            tokens16 k = tokens_of<LD>(m.k, n0, 16 * j);
            const tokens16 e = decays(j, 1.f);
#pragma unroll
            for (int n = 0; n < 8; n++)
                k.x[n / 4][n % 4] *= e.x[n / 4][n % 4];
#pragma unroll
            for (int i = j; i < 4; i++) {
                uint32_t a[4], b[4];
                float f[2];
                factor_of(f, i, j);
                pack_tokens(b, k, f);
                frag_a(a, Row<bf16>{m.A, LC}, 16 * i, 16 * j);
                mma_bf16(dq[i][0], a, b[0], b[1]);
                mma_bf16(dq[i][1], a, b[2], b[3]);
                frag_a(a, Row<bf16>{m.L, LC}, 16 * i, 16 * j);
                mma_bf16(db[i][0], a, b[0], b[1]);
                mma_bf16(db[i][1], a, b[2], b[3]);
            }
        }
    }
    DEV void through_later(float (&dk)[4][2][4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const tokens16 e = decays(i, -1.f);
            tokens16 q = tokens_of<LD>(m.q, n0, 16 * i), x = tokens_of<LD>(m.kb, n0, 16 * i);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float beta = m.beta[16 * i + 2 * t + n % 4 / 2 * 8 + n % 2];
                q.x[n / 4][n % 4] *= e.x[n / 4][n % 4];
                x.x[n / 4][n % 4] *= e.x[n / 4][n % 4] * beta;
            }
#pragma unroll
            for (int j = 0; j <= i; j++) {
                uint32_t a[4], b[4];
                float f[2];
                factor_of(f, i, j);
                pack_tokens(b, q, f);
                frag_a(a, Col<bf16>{m.A, LC}, 16 * j, 16 * i);
                mma_bf16(dk[j][0], a, b[0], b[1]);
                mma_bf16(dk[j][1], a, b[2], b[3]);
                pack_tokens(b, x, f);
                frag_a(a, Col<bf16>{m.L, LC}, 16 * j, 16 * i);
                mma_bf16(dk[j][0], a, b[0], b[1]);
                mma_bf16(dk[j][1], a, b[2], b[3]);
            }
        }
    }
    /* dq out; dq becomes dG without dk's term, db the start of dk, relative to ref. */
    DEV void finish_queries(float (&dq)[4][2][4], float (&db)[4][2][4]) const
    {
        float sum[4][2] = {};
        const float keep = p.kb ? 0.f : 1.f;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = 16 * i + g + 8 * half, d = n0 + 8 * j + 2 * t;
                    const pair q = load2(m.q + r * LD + d), x = load2(m.kb + r * LD + d),
                               G = load2(m.G + r * LG + d), R = load2(m.G + (16 * i + 8) * LG + d);
                    float *a = dq[i][j] + 2 * half, *b = db[i][j] + 2 * half;
                    const float beta = m.beta[r];
                    if (r < c.len) {
                        store2((bf16 *)p.dq + at + (int64_t)r * row + d, a[0], a[1]);
                        if (p.kb)
                            store2((bf16 *)p.dkb + at + (int64_t)r * row + d, b[0], b[1]);
                    }
                    sum[i][half] += x.x * b[0] + x.y * b[1];
                    a[0] = q.x * a[0] + (1 + keep) * beta * x.x * b[0];
                    a[1] = q.y * a[1] + (1 + keep) * beta * x.y * b[1];
                    b[0] *= keep * beta * ex2(G.x - R.x);
                    b[1] *= keep * beta * ex2(G.y - R.y);
                }
        reduce_rows(sum, true);
    }
    /* dk gets V_new dS'^T e^(G_C - G); dk out; dG complete; after: of each column, what reached G_C. */
    DEV void finish_keys(float (&dk)[4][2][4], float (&dG)[4][2][4], float (&after)[2][2]) const
    {
        float x[4][2][4], dot[2] = {};
        clear(x);
#pragma unroll 2
        for (int k = 0; k < D / 16; k++) {
            uint32_t s[4], b[4], a[4];
            frag_global<D>(b, dS + 16 * k);
            frag_global<D>(s, S + 16 * k);
#pragma unroll
            for (int n = 0; n < 4; n++)
                dot[n / 2] += low_of(s[n]) * low_of(b[n]) + high_of(s[n]) * high_of(b[n]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                frag_a(a, Row<bf16>{m.V, LD}, 16 * i, 16 * k);
                mma_bf16(x[i][0], a, b[0], b[1]);
                mma_bf16(x[i][1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            dot[j] += shuffle_xor(dot[j], 1);
            dot[j] += shuffle_xor(dot[j], 2);
            dot[j] *= ex2(m.G[(C - 1) * LG + n0 + g + 8 * j]);
        }
        float col[2][2] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = 16 * i + g + 8 * half, d = n0 + 8 * j + 2 * t;
                    const pair k = load2(m.k + r * LD + d), G = load2(m.G + r * LG + d),
                               last = load2(m.G + (C - 1) * LG + d);
                    const float *a = x[i][j] + 2 * half, *b = dk[i][j] + 2 * half;
                    const float z0 = a[0] * ex2(last.x - G.x), z1 = a[1] * ex2(last.y - G.y);
                    const float y0 = b[0] + z0, y1 = b[1] + z1;
                    if (r < c.len)
                        store2((bf16 *)p.dk + at + (int64_t)r * row + d, y0, y1);
                    col[j][0] += k.x * z0;
                    col[j][1] += k.y * z1;
                    dG[i][j][2 * half] -= k.x * y0;
                    dG[i][j][2 * half + 1] -= k.y * y1;
                }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float s = col[j][e];
                s += shuffle_xor(s, 4);
                s += shuffle_xor(s, 8);
                s += shuffle_xor(s, 16);
                after[j][e] = s + shuffle(dot[j], 4 * (2 * t + e));
            }
    }
    /* dg: the reverse cumulative sum of dG over rows, from the last row's `after` on. */
    DEV void finish_decay(float (&dG)[4][2][4], float (&after)[2][2]) const
    {
#pragma unroll
        for (int i = 3; i >= 0; i--)
#pragma unroll
            for (int half = 1; half >= 0; half--)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int r = 16 * i + g + 8 * half, d = n0 + 8 * j + 2 * t;
                    float out[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float x = dG[i][j][2 * half + e];
#pragma unroll
                        for (int step = 4; step < 32; step *= 2) {
                            const float y = shuffle(x, (lane() + step) & 31);
                            x += lane() + step < 32 ? y : 0.f;
                        }
                        out[e] = x + after[j][e];
                        after[j][e] += shuffle(x, t);
                    }
                    if (r < c.len)
                        store2(p.dg + at + (int64_t)r * row + d, out[0], out[1]);
                }
    }
};

template <int D>
KERNEL(grad16_memory<D>::THREADS, grad16_memory<D>::BLOCKS)
grads_by_columns(const args p)
{
    SHARED_MEMORY(memory);
    typedef grad16_memory<D> M;
    const M m(memory, p.kb != nullptr);
    grad16<D> b(p, m);
    const int tid = (int)threadIdx.x;
    b.load_first();
    if (tid < C)
        m.beta[tid] = beta_at(p, b.c, b.h, tid);
    cumulate<D, M::THREADS>(p, b.c, b.h, m.G, M::LG, m.part);
    uint32_t s[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        frag_global<D>(s[k], b.S + 16 * k);
    copy_wait<1>();
    sync_block();
    b.through_inverse();
    copy_wait<0>();
    sync_block(); /* dR, dO, V_new are there; T is read */
    b.pair_gradients();
    float dq[4][2][4], dk[4][2][4], after[2][2];
    clear(dq);
    clear(dk);
    b.through_state(s, dq, dk);
    sync_block(); /* dO and dR are read, dAqk and dL there */
    b.load_second();
    b.load_refs();
    each64(dq, b.n0, [&](int i, int, int, int, int d, float &x, float &y) {
        const pair R = load2(m.G + (16 * i + 8) * M::LG + d);
        x *= p.scale * ex2(R.x);
        y *= p.scale * ex2(R.y);
    });
    each64(dk, b.n0, [&](int i, int, int, int, int d, float &x, float &y) {
        const pair R = load2(m.G + (16 * i + 8) * M::LG + d);
        x *= -ex2(R.x);
        y *= -ex2(R.y);
    });
    copy_wait<0>();
    sync_block();
    b.through_earlier(dq, dk);
    b.decay_rows(dq, 1.f);
    b.decay_rows(dk, 1.f);
    b.finish_queries(dq, dk);
    b.through_later(dk);
    b.decay_rows(dk, -1.f);
    b.finish_keys(dk, dq, after);
    b.finish_decay(dq, after);
    sync_block();
    if (!p.kb && tid < b.c.len) {
        float x = 0;
#pragma unroll
        for (int i = 0; i < M::WARPS; i++)
            x += m.red[tid * M::WARPS + i];
        p.dbeta[(b.c.start + tid) * p.H + b.h] = x;
    }
}

} // namespace kda

#endif
