/* The serial part: the state, or its gradient, from chunk to chunk (kda-math.md section 3, rows 7, 8
 * and 10; section 4.2, first three lines). Columns of the state do not meet, so a block carries VS of
 * them for one head of one sequence: its f32 accumulator stays in registers, the copy that tensor
 * cores multiply in shared memory. Operands of the next chunk arrive while this one is computed.
 *
 * Eight warps. Products with C rows: warp w has rows 16 (w % 4) and half of the columns. The state:
 * D / 16 row tiles, over w % (D / 16), and the columns split among what is left. Two barriers a chunk. */
#ifndef CKPT_CUDA_KDA_SCAN_CUH
#define CKPT_CUDA_KDA_SCAN_CUH

#include "kda_common.cuh"

namespace kda
{

constexpr int SCAN_THREADS = 256;

template <class E, int D> struct scan_memory {
    static constexpr int LD = D + 16 / (int)sizeof(E);
    static constexpr int stages = sizeof(E) == 2 ? 2 : 1;
    static constexpr int stage = (3 * C * LD + C * LC + C * LV) * (int)sizeof(E) + D * 4;
    static constexpr int bytes = stages * stage + (D + C) * LV * (int)sizeof(E);
    E *S, *X;
    unsigned char *base;
    DEV explicit scan_memory(unsigned char *p)
    {
        S = (E *)p;
        X = S + D * LV;
        base = (unsigned char *)(X + C * LV);
    }
};
template <class E, int D> struct scan_stage {
    static constexpr int LD = scan_memory<E, D>::LD;
    E *W, *Kr, *Qg, *Aqk, *V; /* V: columns of U, or of dO */
    float *decay;
    DEV scan_stage(const scan_memory<E, D> &m, int i)
    {
        W = (E *)(m.base + i % scan_memory<E, D>::stages * scan_memory<E, D>::stage);
        Kr = W + C * LD;
        Qg = Kr + C * LD;
        Aqk = Qg + C * LD;
        V = Aqk + C * LC;
        decay = (float *)(V + C * LV);
    }
};

/* Which of the state's rows and columns this warp accumulates. */
template <int D> struct state_tile {
    static constexpr int parts = 8 / (D / 16), NT = VS / 8 / parts;
    int r0, c0;
    DEV state_tile()
    {
        const int w = (int)threadIdx.x / 32;
        r0 = w % (D / 16) * 16;
        c0 = w / (D / 16) * NT * 8;
    }
};

template <int D, int NT>
DEV void state_load(float (&S)[1][NT][4], const state_tile<D> &t, const float *from)
{
    clear(S);
    if (from)
        each(S, t.r0, t.c0, [&](int r, int c, float &x, float &y) {
            x = from[r * D + c];
            y = from[r * D + c + 1];
        });
}
template <class E, int D, int NT>
DEV void state_share(E *to, const state_tile<D> &t, float (&S)[1][NT][4])
{
    each(S, t.r0, t.c0, [&](int r, int c, float x, float y) { store2(to + r * LV + c, x, y); });
}
template <int D, int NT>
DEV void state_store(float *to, const state_tile<D> &t, float (&S)[1][NT][4])
{
    each(S, t.r0, t.c0, [&](int r, int c, float x, float y) {
        to[r * D + c] = x;
        to[r * D + c + 1] = y;
    });
}
template <int NT> DEV void state_decay(float (&S)[1][NT][4], int r0, const float *decay)
{
    const float a = decay[r0 + (lane() >> 2)], b = decay[r0 + (lane() >> 2) + 8];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        S[0][j][0] *= a;
        S[0][j][1] *= a;
        S[0][j][2] *= b;
        S[0][j][3] *= b;
    }
}

/* Block = (sequence, head, columns). */
struct scan_at {
    int seq, h, v0, c0, c1;
    int64_t state; /* of this block's first column */
};
template <int D> DEV scan_at scan_of(const args &p)
{
    constexpr int parts = D / VS;
    scan_at s;
    const int i = (int)blockIdx.x / parts;
    s.v0 = (int)blockIdx.x % parts * VS;
    s.seq = i / p.H;
    s.h = i % p.H;
    s.c0 = p.table ? p.first[s.seq] : s.seq * p.per_seq;
    s.c1 = p.table ? p.first[s.seq + 1] : s.c0 + p.per_seq;
    s.state = (int64_t)i * D * D + s.v0;
    return s;
}

template <class E, int D, bool KEEP>
DEV void scan_fetch(const args &p, const scan_at &s, const scan_stage<E, D> &m, int c)
{
    const int64_t tile = (int64_t)c * p.H + s.h;
    fetch<E, SCAN_THREADS>(m.W, m.LD, (const E *)p.W + tile * (C * D), D, C, D, C);
    fetch<E, SCAN_THREADS>(m.Kr, m.LD, (const E *)p.Kr + tile * (C * D), D, C, D, C);
    fetch<E, SCAN_THREADS>(m.V, LV, (const E *)p.U + tile * (C * D) + s.v0, D, C, VS, C);
    fetch_f32<SCAN_THREADS>(m.decay, p.decay + tile * D, D);
    if (!KEEP) {
        fetch<E, SCAN_THREADS>(m.Qg, m.LD, (const E *)p.Qg + tile * (C * D), D, C, D, C);
        fetch<E, SCAN_THREADS>(m.Aqk, LC, (const E *)p.Aqk + tile * (C * C), C, C, C, C);
    }
}

/* o and the final state; with KEEP, for backward: the state before each chunk and V_new in U's place,
 * no o. */
template <class E, int D, bool KEEP> KERNEL(SCAN_THREADS, 1) scan(const args p)
{
    SHARED_MEMORY(memory);
    typedef scan_memory<E, D> M;
    const M m(memory);
    const scan_at s = scan_of<D>(p);
    const state_tile<D> t;
    const int w = (int)threadIdx.x / 32, r0 = w % 4 * 16, n0 = w / 4 * (VS / 2);
    float S[1][state_tile<D>::NT][4];
    if (s.c0 < s.c1) {
        scan_fetch<E, D, KEEP>(p, s, scan_stage<E, D>(m, 0), s.c0);
        copy_commit();
    }
    state_load<D>(S, t, p.state0 ? p.state0 + s.state : nullptr);
    state_share<E, D>(m.S, t, S);
    for (int c = s.c0; c < s.c1; c++) {
        const scan_stage<E, D> x(m, c - s.c0);
        const int64_t tile = (int64_t)c * p.H + s.h;
        copy_wait<0>();
        sync_block();
        if (M::stages == 2 && c + 1 < s.c1) {
            scan_fetch<E, D, KEEP>(p, s, scan_stage<E, D>(m, c + 1 - s.c0), c + 1);
            copy_commit();
        }
        float d[1][2][4], o[1][2][4];
        clear(d);
        clear(o);
        const Row<E> W = {x.W, M::LD}, Q = {x.Qg, M::LD};
        const Col<E> state = {m.S, LV};
        if (KEEP)
            product<E>::run(d, W, r0, state, n0, 0, D);
        else
            product<E>::run2(d, o, W, Q, r0, state, n0, 0, D);
        E *keep = (E *)p.U + tile * (C * D) + s.v0;
        each(d, r0, n0, [&](int r, int v, float a, float b) {
            const pair u = load2(x.V + r * LV + v);
            store2(m.X + r * LV + v, u.x - a, u.y - b);
            if (KEEP)
                store2(keep + r * D + v, u.x - a, u.y - b);
        });
        if (KEEP)
            flush<E, SCAN_THREADS>((E *)p.S + tile * (D * D) + s.v0, D, m.S, LV, D, VS);
        state_decay(S, t.r0, x.decay);
        sync_block();
        const Col<E> fresh = {m.X, LV};
        product<E>::run(S, Col<E>{x.Kr, M::LD}, t.r0, fresh, t.c0, 0, C);
        state_share<E, D>(m.S, t, S);
        if (!KEEP) {
            product<E>::run(o, Row<E>{x.Aqk, LC}, r0, fresh, n0, 0, r0 + 16);
            const chunk_at at = find_chunk(p, c);
            E *to = (E *)p.o + (at.start * p.H + s.h) * D + s.v0;
            each(o, r0, n0, [&](int r, int v, float a, float b) {
                if (r < at.len)
                    store2(to + (int64_t)r * p.H * D + v, a, b);
            });
        }
        if (M::stages == 1 && c + 1 < s.c1) {
            sync_block();
            scan_fetch<E, D, KEEP>(p, s, x, c + 1);
            copy_commit();
        }
    }
    if (p.state)
        state_store<D>(p.state + s.state, t, S);
}

/* dV_new and dS' of every chunk, last to first, and the gradient of the first state. */
template <class E, int D>
DEV void back_fetch(const args &p, const scan_at &s, const scan_stage<E, D> &m, int c)
{
    const int64_t tile = (int64_t)c * p.H + s.h;
    const chunk_at at = find_chunk(p, c);
    fetch<E, SCAN_THREADS>(m.W, m.LD, (const E *)p.W + tile * (C * D), D, C, D, C);
    fetch<E, SCAN_THREADS>(m.Kr, m.LD, (const E *)p.Kr + tile * (C * D), D, C, D, C);
    fetch<E, SCAN_THREADS>(m.Qg, m.LD, (const E *)p.Qg + tile * (C * D), D, C, D, C);
    fetch<E, SCAN_THREADS>(m.Aqk, LC, (const E *)p.Aqk + tile * (C * C), C, C, C, C);
    fetch<E, SCAN_THREADS>(m.V, LV, (const E *)p.d_o + (at.start * p.H + s.h) * D + s.v0,
                           (int64_t)p.H * D, C, VS, at.len);
    fetch_f32<SCAN_THREADS>(m.decay, p.decay + tile * D, D);
}

template <class E, int D> KERNEL(SCAN_THREADS, 1) scan_back(const args p)
{
    SHARED_MEMORY(memory);
    typedef scan_memory<E, D> M;
    const M m(memory);
    const scan_at s = scan_of<D>(p);
    const state_tile<D> t;
    const int w = (int)threadIdx.x / 32, r0 = w % 4 * 16, n0 = w / 4 * (VS / 2);
    float S[1][state_tile<D>::NT][4];
    if (s.c0 < s.c1) {
        back_fetch<E, D>(p, s, scan_stage<E, D>(m, 0), s.c1 - 1);
        copy_commit();
    }
    state_load<D>(S, t, p.d_state ? p.d_state + s.state : nullptr);
    state_share<E, D>(m.S, t, S);
    for (int c = s.c1 - 1; c >= s.c0; c--) {
        const scan_stage<E, D> x(m, s.c1 - 1 - c);
        const int64_t tile = (int64_t)c * p.H + s.h;
        copy_wait<0>();
        sync_block();
        if (M::stages == 2 && c > s.c0) {
            back_fetch<E, D>(p, s, scan_stage<E, D>(m, s.c1 - c), c - 1);
            copy_commit();
        }
        float d[1][2][4];
        clear(d);
        const Col<E> d_o = {x.V, LV};
        product<E>::run(d, Row<E>{x.Kr, M::LD}, r0, Col<E>{m.S, LV}, n0, 0, D);
        product<E>::run(d, Col<E>{x.Aqk, LC}, r0, d_o, n0, r0, C);
        E *to = (E *)p.dV + tile * (C * D) + s.v0;
        each(d, r0, n0, [&](int r, int v, float a, float b) {
            store2(m.X + r * LV + v, -a, -b);
            store2(to + r * D + v, a, b);
        });
        flush<E, SCAN_THREADS>((E *)p.dS + tile * (D * D) + s.v0, D, m.S, LV, D, VS);
        state_decay(S, t.r0, x.decay);
        product<E>::run(S, Col<E>{x.Qg, M::LD}, t.r0, d_o, t.c0, 0, C);
        sync_block();
        product<E>::run(S, Col<E>{x.W, M::LD}, t.r0, Col<E>{m.X, LV}, t.c0, 0, C);
        state_share<E, D>(m.S, t, S);
        if (M::stages == 1 && c > s.c0) {
            sync_block();
            back_fetch<E, D>(p, s, x, c - 1);
            copy_commit();
        }
    }
    if (p.d_state0)
        state_store<D>(p.d_state0 + s.state, t, S);
}

} // namespace kda

#endif
