/* Gradients of one chunk and head, given the state before it, the gradient of the state after it,
 * V_new and its gradient (kda-math.md section 4.2). Since V_new = T R with R = beta v - (beta k e^G) S,
 * dR = T^T dV_new gives all that section states through dT, dW and W:
 *
 *   d(beta v) = dR         d(beta k e^G) = -dR S^T         dL = -stril(dR V_new^T)
 *   dq e^-G / s = dO S^T   dKr = V_new dS'^T               dAqk = tril(dO V_new^T)
 *
 * then dAqk and dL go through the decayed products they came from, with the references of kda_prep.cuh
 * (section 3.1). Sixteen warps: warp w has rows 16 (w % 4), one row group, and a quarter of the
 * columns, so a warp has five tiles of that last step whatever its group. f32 reads what does not fit
 * into shared memory from global memory. */
#ifndef CKPT_CUDA_KDA_GRAD_CUH
#define CKPT_CUDA_KDA_GRAD_CUH

#include "kda_common.cuh"

namespace kda
{

constexpr int GRAD_THREADS = 512;

/* f32 operand in global memory whose rows beyond len are zeros. */
struct Masked {
    const float *p;
    int64_t ld;
    int len;
    DEV float at(int r, int k) const
    {
        return r < len ? p[r * ld + k] : 0.f;
    }
};

template <class E, int D> struct grad_memory {
    static constexpr bool tiles = sizeof(E) == 2; /* operands of phase one are in shared memory */
    static constexpr int LD = D + 16 / (int)sizeof(E), LG = D + 4;
    static constexpr int slot = (D > 2 * C ? D : 2 * C) * LD; /* S; q and k */
    static constexpr int small =
        (C + GRAD_THREADS + 5 * D + 8 * C + C * LG) * 4 + 2 * C * LC * (int)sizeof(E);
    static constexpr int bytes =
        small + (tiles ? (3 * C * LD + 3 * slot) * 2 : 2 * C * LD * 4 + C * LG * 4);
    static constexpr int bytes_shared = tiles ? small + (3 * C * LD + slot) * 2 : bytes;
    float *G, *buf, *beta, *part, *last, *col, *red;
    static constexpr int kb_tile =
        C * LD * (int)sizeof(E); /* behind the rest, when there is a kb */
    E *A, *L, *d_o, *V, *dV, *S, *dS, *q, *k, *kb;
    DEV grad_memory(unsigned char *p, bool resident, bool own_kb)
    {
        G = (float *)p;
        beta = G + C * LG;
        part = beta + C;
        last = part + GRAD_THREADS;
        col = last + D;
        red = col + 4 * D;
        A = (E *)(red + 8 * C);
        L = A + C * LC;
        E *at = L + C * LC;
        if (tiles) {
            d_o = at;
            V = d_o + C * LD;
            dV = V + C * LD;
            S = dV + C * LD;
            dS = resident ? S + slot : S;
            q = resident ? S + 2 * slot : S;
            k = q + C * LD;
            buf = (float *)d_o; /* and V: free when buf is used */
        } else {
            d_o = V = dV = S = dS = nullptr;
            q = at;
            k = q + C * LD;
            buf = (float *)(k + C * LD);
        }
        kb = own_kb ? (E *)(p + (resident ? bytes : bytes_shared)) : k;
    }
};

/* Decayed rows as B operands: column d, k = token. */
template <class E> struct before_ref {
    const E *x;
    const float *G, *ref;
    int ld, lg;
    DEV float at(int d, int j) const
    {
        return to_f(x[j * ld + d]) * ex2(ref[d] - G[j * lg + d]);
    }
};
template <class E> struct after_ref {
    const E *q, *kb;
    const float *G, *ref, *beta;
    int ld, lg;
    DEV void at(int d, int i, float &x, float &y) const
    {
        const float e = ex2(G[i * lg + d] - ref[d]);
        x = to_f(q[i * ld + d]) * e;
        y = to_f(kb[i * ld + d]) * e * beta[i];
    }
};
template <class E> struct after_q {
    after_ref<E> o;
    DEV float at(int d, int i) const
    {
        return to_f(o.q[i * o.ld + d]) * ex2(o.G[i * o.lg + d] - o.ref[d]);
    }
};
template <class E> struct after_k {
    after_ref<E> o;
    DEV float at(int d, int i) const
    {
        return to_f(o.kb[i * o.ld + d]) * ex2(o.G[i * o.lg + d] - o.ref[d]) * o.beta[i];
    }
};

/* acc += A^T q' + L^T kb' over tokens k0 .. k1-1. */
template <int NT>
DEV void add_later(float (&acc)[1][NT][4], const Col<float> &A, const Col<float> &L, int m0,
                   const after_ref<float> &b, int n0, int k0, int k1)
{
    product<float>::run(acc, A, m0, after_q<float>{b}, n0, k0, k1);
    product<float>::run(acc, L, m0, after_k<float>{b}, n0, k0, k1);
}
template <int NT>
DEV void add_later(float (&acc)[1][NT][4], const Col<bf16> &A, const Col<bf16> &L, int m0,
                   const after_ref<bf16> &b, int n0, int k0, int k1)
{
    for (int k = k0; k < k1; k += 16) {
        uint32_t fa[4], fl[4];
        frag_a(fa, A, m0, k);
        frag_a(fl, L, m0, k);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const int n = n0 + 8 * j + (lane() >> 2), i = k + 2 * (lane() & 3);
            float x[4], y[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                b.at(n, i + (e & 1) + (e >> 1) * 8, x[e], y[e]);
            mma_bf16(acc[0][j], fa, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
            mma_bf16(acc[0][j], fl, pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
        }
    }
}

DEV float quad_sum(float x)
{
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

/* red[row][column quarter] = sum over the warp's columns of f(row, column, x0, x1). */
template <int NT, class F>
DEV void row_sums(float *red, float (&acc)[1][NT][4], int r0, int n0, int quarter, const F &f)
{
    float lo = 0, hi = 0;
    const int r = r0 + (lane() >> 2), c = n0 + 2 * (lane() & 3);
#pragma unroll
    for (int j = 0; j < NT; j++) {
        lo += f(r, c + 8 * j, acc[0][j][0], acc[0][j][1]);
        hi += f(r + 8, c + 8 * j, acc[0][j][2], acc[0][j][3]);
    }
    lo = quad_sum(lo);
    hi = quad_sum(hi);
    if ((lane() & 3) == 0) {
        red[r * 4 + quarter] = lo;
        red[(r + 8) * 4 + quarter] = hi;
    }
}

/* Exact pairs of the diagonal tiles, for a gate without bound: thread (row group, d) makes the group's
 * sixteen numbers of dq, dkb and dk in its column, x of each. */
template <class E, int D>
DEV void exact_tiles(const grad_memory<E, D> &m, float (&xq)[16], float (&xb)[16], float (&xk)[16])
{
    constexpr int LD = grad_memory<E, D>::LD, LG = grad_memory<E, D>::LG;
    const int r0 = (int)threadIdx.x / D * 16, d = (int)threadIdx.x % D;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        xq[i] = xb[i] = xk[i] = 0;
        if (r0 >= C)
            continue;
        const float G = m.G[(r0 + i) * LG + d], q = to_f(m.q[(r0 + i) * LD + d]),
                    kb = m.beta[r0 + i] * to_f(m.kb[(r0 + i) * LD + d]);
#pragma unroll
        for (int j = 0; j <= i; j++) {
            const float e = ex2(G - m.G[(r0 + j) * LG + d]), k = to_f(m.k[(r0 + j) * LD + d]);
            const float a = to_f(m.A[(r0 + i) * LC + r0 + j]) * e,
                        l = to_f(m.L[(r0 + i) * LC + r0 + j]) * e;
            xq[i] += a * k;
            xb[i] += l * k;
            xk[j] += a * q + l * kb;
        }
    }
}
template <class E, int D, int NT>
DEV void add_exact(const grad_memory<E, D> &m, const float (&x)[16], float (&acc)[1][NT][4], int r0,
                   int n0)
{
    constexpr int LG = grad_memory<E, D>::LG;
    const int first = (int)threadIdx.x / D * 16, d = (int)threadIdx.x % D;
    sync_block();
    if (first < C)
#pragma unroll
        for (int i = 0; i < 16; i++)
            m.buf[(first + i) * LG + d] = x[i];
    sync_block();
    each(acc, r0, n0, [&](int r, int c, float &a, float &b) {
        a += m.buf[r * LG + c];
        b += m.buf[r * LG + c + 1];
    });
}

/* dg = reverse cumulative sum of dG (m.buf) plus what reached the last row, and dbeta. */
template <class E, int D>
DEV void finish(const args &p, const grad_memory<E, D> &m, const chunk_at &c, int h)
{
    constexpr int LG = grad_memory<E, D>::LG, P = GRAD_THREADS / D, R = C / P;
    const int d = (int)threadIdx.x % D, part = (int)threadIdx.x / D;
    float x[R], sum = 0;
#pragma unroll
    for (int r = R - 1; r >= 0; r--) {
        sum += m.buf[(part * R + r) * LG + d];
        x[r] = sum;
    }
    m.part[threadIdx.x] = sum;
    sync_block();
    float after = m.last[d];
#pragma unroll
    for (int i = 0; i < 4; i++)
        after += m.col[i * D + d];
    for (int i = P - 1; i > part; i--)
        after += m.part[i * D + d];
#pragma unroll
    for (int r = 0; r < R; r++)
        if (part * R + r < c.len)
            p.dg[((c.start + part * R + r) * p.H + h) * D + d] = x[r] + after;
    if (!p.kb && (int)threadIdx.x < c.len) {
        float b = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            b += m.red[(i / 4) * 4 * C + threadIdx.x * 4 + i % 4];
        p.dbeta[(c.start + threadIdx.x) * p.H + h] = b;
    }
}

/* V_new in columns of VS, for f32. */
struct Split {
    const float *p;
    DEV float at(int r, int v) const
    {
        return p[(v / VS * C + r) * LV + v % VS];
    }
};
template <int D> DEV Row<bf16> v_operand(const grad_memory<bf16, D> &m, const bf16 *)
{
    return Row<bf16>{m.V, grad_memory<bf16, D>::LD};
}
template <int D> DEV Split v_operand(const grad_memory<float, D> &, const float *p)
{
    return Split{p};
}
template <int D> DEV Row<bf16> d_o_operand(const grad_memory<bf16, D> &m, const bf16 *, int, int)
{
    return Row<bf16>{m.d_o, grad_memory<bf16, D>::LD};
}
template <int D>
DEV Masked d_o_operand(const grad_memory<float, D> &, const float *p, int ld, int len)
{
    return Masked{p, ld, len};
}

template <class E, int D, bool SAFE> KERNEL(GRAD_THREADS, 1) grads(const args p)
{
    SHARED_MEMORY(memory);
    typedef grad_memory<E, D> M;
    constexpr int LD = M::LD, LG = M::LG, NT = D / 32, TH = GRAD_THREADS;
    constexpr bool tiles = M::tiles;
    const M m(memory, p.resident, p.kb != nullptr);
    const int ci = (int)blockIdx.x / p.H, h = (int)blockIdx.x % p.H, tid = (int)threadIdx.x;
    const int w = tid / 32, r0 = w % 4 * 16, quarter = w / 4, n0 = quarter * (D / 4);
    const int64_t tile = blockIdx.x;
    const chunk_at c = find_chunk(p, ci);
    const int64_t at = (c.start * p.H + h) * D, key = key_at<D>(p, c, h);
    const int row = p.H * D, key_row = p.HQ * D;
    const E *gV = (const E *)p.U + tile * columns<E, D>, *gS = (const E *)p.S + tile * (D * D),
            *gdS = (const E *)p.dS + tile * (D * D), *gT = (const E *)p.T + tile * (C * C),
            *gO = (const E *)p.d_o + at;
    E *gdV = tiles ? nullptr : (E *)p.dV + tile * (C * D);

    if (tiles) {
        fetch<E, TH>(m.A, LC, gT, C, C, C, C);
        fetch<E, TH>(m.dV, LD, (const E *)p.dv + at, row, C, D, c.len);
        copy_commit();
        fetch<E, TH>(m.d_o, LD, gO, row, C, D, c.len);
        for (int v = 0; v < D / VS; v++)
            fetch<E, TH>(m.V + v * VS, LD, gV + v * C * LV, LV, C, VS, C);
        fetch<E, TH>(m.S, LD, gS, D, D, D, D);
        copy_commit();
    }
    if (!tiles || p.resident) {
        if (tiles)
            fetch<E, TH>(m.dS, LD, gdS, D, D, D, D);
        fetch<E, TH>(m.q, LD, (const E *)p.q + key, key_row, C, D, c.len);
        fetch<E, TH>(m.k, LD, (const E *)p.k + key, key_row, C, D, c.len);
    }
    if (p.kb)
        fetch<E, TH>(m.kb, LD, (const E *)p.kb + at, row, C, D, c.len);
    copy_commit();
    if (tid < C)
        m.beta[tid] = beta_at(p, c, h, tid);
    cumulate<D, TH>(p, c, h, m.G, LG, m.part);
    copy_wait<2>();
    sync_block();

    /* ---- dR, dv --------------------------------------------------------------------------- */
    float dq[1][NT][4], db[1][NT][4], dk[1][NT][4];
    clear(dk);
    product<E>::run(dk, Col<E>{tiles ? m.A : gT, tiles ? LC : C}, r0,
                    Col<E>{tiles ? m.dV : gdV, tiles ? LD : D}, n0, r0, C);
    sync_block();
    E *dR = tiles ? m.dV : gdV;
    constexpr int ldR = tiles ? LD : D;
    each(dk, r0, n0, [&](int r, int d, float x, float y) {
        store2(dR + r * ldR + d, x, y);
        if (r < c.len)
            store2((E *)p.dv + at + (int64_t)r * row + d, m.beta[r] * x, m.beta[r] * y);
    });
    row_sums(m.red, dk, r0, n0, quarter, [&](int r, int d, float x, float y) {
        if (r >= c.len)
            return 0.f;
        const pair v = load2((const E *)p.v + at + (int64_t)r * row + d);
        return x * v.x + y * v.y;
    });
    copy_wait<1>();
    sync_block();

    /* ---- through the states --------------------------------------------------------------- */
    clear(dq);
    clear(db);
    clear(dk);
    const Row<E> rR = {dR, ldR};
    const auto rV = v_operand(m, gV);
    const Row<E> rS = {tiles ? m.S : gS, ldR}, rdS = {tiles ? m.dS : gdS, ldR};
    const auto rO = d_o_operand(m, gO, row, c.len);
    product<E>::run2(dq, db, rO, rR, r0, rS, n0, 0, D);
    if (quarter <= w % 4) { /* the tile (row group, quarter) of dAqk and dL */
        float x[1][2][4], y[1][2][4];
        clear(x);
        clear(y);
        product<E>::run2(x, y, rO, rR, r0, rV, 16 * quarter, 0, D);
        each(x, r0, 16 * quarter, [&](int r, int j, float a, float b) {
            store2(m.A + r * LC + j, j <= r ? p.scale * a : 0.f, j + 1 <= r ? p.scale * b : 0.f);
        });
        each(y, r0, 16 * quarter, [&](int r, int j, float a, float b) {
            store2(m.L + r * LC + j, j < r ? -a : 0.f, j + 1 < r ? -b : 0.f);
        });
    }
    if (tiles && !p.resident) {
        sync_block();
        fetch<E, TH>(m.dS, LD, gdS, D, D, D, D);
        copy_commit();
    }
    copy_wait<0>();
    sync_block();
    product<E>::run(dk, rV, r0, rdS, n0, 0, D);
    { /* e^G_C rowsum(dS' * S) */
        constexpr int P = TH / D, n = D / P;
        const int d = tid / P, v0 = tid % P * n;
        const E *a = (tiles && p.resident ? m.S + d * LD : gS + d * D) + v0;
        const E *b = rdS.p + d * ldR + v0;
        float sum = 0;
#pragma unroll
        for (int v = 0; v < n; v += 2) {
            const pair x = load2(a + v), y = load2(b + v);
            sum += x.x * y.x + x.y * y.y;
        }
#pragma unroll
        for (int i = 1; i < P; i *= 2)
            sum += shuffle_xor(sum, i);
        if (tid % P == 0)
            m.last[d] = sum * ex2(m.G[(C - 1) * LG + d]);
    }
    if (tiles && !p.resident) {
        sync_block();
        fetch<E, TH>(m.q, LD, (const E *)p.q + key, key_row, C, D, c.len);
        fetch<E, TH>(m.k, LD, (const E *)p.k + key, key_row, C, D, c.len);
        copy_commit();
        copy_wait<0>();
        sync_block();
    }

    /* ---- through the pairs ---------------------------------------------------------------- */
    const float *Gq = m.G + (r0 + (SAFE ? 8 : 0)) * LG, *Gk = m.G + (r0 + (SAFE ? 8 : 15)) * LG,
                *GC = m.G + (C - 1) * LG;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int d = n0 + 8 * j + 2 * (lane() & 3) + e, g = r0 + (lane() >> 2);
            const float in = ex2(Gq[d]), out = ex2(GC[d] - Gk[d]);
            /* sum over the group of k dKr e^(G_C - G), for the gradient of G_C */
            float sum =
                to_f(m.k[g * LD + d]) * dk[0][j][e] * ex2(GC[d] - m.G[g * LG + d]) +
                to_f(m.k[(g + 8) * LD + d]) * dk[0][j][2 + e] * ex2(GC[d] - m.G[(g + 8) * LG + d]);
            sum += shuffle_xor(sum, 4);
            sum += shuffle_xor(sum, 8);
            sum += shuffle_xor(sum, 16);
            if (lane() < 4)
                m.col[w % 4 * D + d] = sum;
            dq[0][j][e] *= p.scale * in;
            dq[0][j][2 + e] *= p.scale * in;
            db[0][j][e] *= -in;
            db[0][j][2 + e] *= -in;
            dk[0][j][e] *= out;
            dk[0][j][2 + e] *= out;
        }
    sync_block(); /* A and L are complete */
    product<E>::run2(dq, db, Row<E>{m.A, LC}, Row<E>{m.L, LC}, r0,
                     before_ref<E>{m.k, m.G, Gq, LD, LG}, n0, 0, SAFE ? r0 + 16 : r0);
    add_later(dk, Col<E>{m.A, LC}, Col<E>{m.L, LC}, r0,
              after_ref<E>{m.q, m.kb, m.G, Gk, m.beta, LD, LG}, n0, SAFE ? r0 : r0 + 16, C);
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int d = n0 + 8 * j + 2 * (lane() & 3) + (e & 1),
                      r = r0 + (lane() >> 2) + (e >> 1) * 8;
            const float G = m.G[r * LG + d], x = ex2(G - Gq[d]);
            dq[0][j][e] *= x;
            db[0][j][e] *= x;
            dk[0][j][e] *= ex2(Gk[d] - G);
        }
    if (!SAFE) {
        float xq[16], xb[16], xk[16];
        exact_tiles(m, xq, xb, xk);
        add_exact(m, xq, dq, r0, n0);
        add_exact(m, xb, db, r0, n0);
        add_exact(m, xk, dk, r0, n0);
        sync_block();
    }

    /* ---- out ------------------------------------------------------------------------------ */
    row_sums(m.red + 4 * C, db, r0, n0, quarter, [&](int r, int d, float x, float y) {
        const pair k = load2(m.k + r * LD + d);
        return x * k.x + y * k.y;
    });
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int d = n0 + 8 * j + 2 * (lane() & 3), r = r0 + (lane() >> 2) + 8 * half;
            const float *x = dq[0][j] + 2 * half, *y = db[0][j] + 2 * half,
                        *z = dk[0][j] + 2 * half;
            const pair q = load2(m.q + r * LD + d), k = load2(m.k + r * LD + d);
            const pair kb = load2(m.kb + r * LD + d);
            const float beta = m.beta[r];
            store2(m.buf + r * LG + d, q.x * x[0] + kb.x * beta * y[0] - k.x * z[0],
                   q.y * x[1] + kb.y * beta * y[1] - k.y * z[1]);
            if (r < c.len) {
                store2((E *)p.dq + at + (int64_t)r * row + d, x[0], x[1]);
                const float keep = p.kb ? 0.f : beta;
                store2((E *)p.dk + at + (int64_t)r * row + d, z[0] + keep * y[0],
                       z[1] + keep * y[1]);
                if (p.kb)
                    store2((E *)p.dkb + at + (int64_t)r * row + d, y[0], y[1]);
            }
        }
    sync_block();
    finish<E, D>(p, m, c, h);
}

} // namespace kda

#endif
