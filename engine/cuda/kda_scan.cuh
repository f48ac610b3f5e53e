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
    static constexpr int LD = image<E, D>::LD;
    static constexpr int stage = image<E, D>::bytes + C * LV * (int)sizeof(E);
    static constexpr int most = sizeof(E) == 2 ? 3 : 1; /* stages */
    static constexpr int bytes(int stages)
    {
        return 64 + stages * stage + (D + C) * LV * (int)sizeof(E);
    }
    uint64_t *bar; /* a stage has arrived */
    E *S, *X;
    unsigned char *base;
    DEV explicit scan_memory(unsigned char *p)
    {
        bar = (uint64_t *)p;
        S = (E *)(p + 64);
        X = S + D * LV;
        base = (unsigned char *)(X + C * LV);
    }
};
template <class E, int D> struct scan_stage {
    E *W, *Kr, *Qg, *Aqk, *V; /* V: columns of U, or of dO */
    float *decay;
    uint64_t *bar;
    DEV scan_stage(const scan_memory<E, D> &m, int i)
    {
        typedef image<E, D> I;
        unsigned char *at = m.base + i * scan_memory<E, D>::stage;
        bar = m.bar + i;
        W = (E *)at;
        Kr = (E *)(at + I::Kr);
        decay = (float *)(at + I::decay);
        Qg = (E *)(at + I::Qg);
        Aqk = (E *)(at + I::Aqk);
        V = (E *)(at + I::bytes);
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

/* Step i of a scan is in stage i % stages; fetches run stages - 1 steps ahead, or with one stage none. */
template <class E, int D> DEV void scan_begin(const args &p, const scan_memory<E, D> &m)
{
    if (threadIdx.x == 0)
        for (int i = 0; i < p.stages; i++)
            bar_init(m.bar + i);
    sync_block();
}
DEV void scan_wait(const args &p, uint64_t *bar, int step)
{
    if (p.stages == 3)
        copy_wait<1>();
    else
        copy_wait<0>();
    bar_wait(bar, step / p.stages & 1);
    sync_block();
}

template <class E, int D, bool KEEP>
DEV void scan_fetch(const args &p, const scan_at &s, const scan_memory<E, D> &m, int step)
{
    typedef image<E, D> I;
    constexpr int n = KEEP ? I::first : I::bytes, columns_bytes = C * LV * (int)sizeof(E);
    if (s.c0 + step < s.c1) {
        const scan_stage<E, D> x(m, step % p.stages);
        const int64_t tile = (int64_t)(s.c0 + step) * p.H + s.h;
        bar_expect(x.bar, n + columns_bytes);
        bulk_copy<SCAN_THREADS>(x.W, p.image + tile * I::bytes, n, x.bar);
        bulk_copy<SCAN_THREADS>(x.V, (const E *)p.U + tile * columns<E, D> + s.v0 * (C * LV / VS),
                                columns_bytes, x.bar);
    }
    copy_commit();
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
    scan_begin(p, m);
    for (int i = 0; i < (p.stages > 1 ? p.stages - 1 : 1); i++)
        scan_fetch<E, D, KEEP>(p, s, m, i);
    state_load<D>(S, t, p.state0 ? p.state0 + s.state : nullptr);
    state_share<E, D>(m.S, t, S);
    for (int c = s.c0; c < s.c1; c++) {
        const scan_stage<E, D> x(m, (c - s.c0) % p.stages);
        const int64_t tile = (int64_t)c * p.H + s.h;
        scan_wait(p, x.bar, c - s.c0);
        if (p.stages > 1)
            scan_fetch<E, D, KEEP>(p, s, m, c - s.c0 + p.stages - 1);
        float d[1][2][4], o[1][2][4];
        clear(d);
        clear(o);
        const Row<E> W = {x.W, M::LD}, Q = {x.Qg, M::LD};
        const Col<E> state = {m.S, LV};
        if (KEEP)
            product<E>::run(d, W, r0, state, n0, 0, D);
        else
            product<E>::run2(d, o, W, Q, r0, state, n0, 0, D);
        E *keep = (E *)p.U + tile * columns<E, D> + s.v0 * (C * LV / VS);
        each(d, r0, n0, [&](int r, int v, float a, float b) {
            const pair u = load2(x.V + r * LV + v);
            store2(m.X + r * LV + v, u.x - a, u.y - b);
            if (KEEP)
                store2(keep + r * LV + v, u.x - a, u.y - b);
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
        if (p.stages == 1) {
            sync_block();
            scan_fetch<E, D, KEEP>(p, s, m, c - s.c0 + 1);
        }
    }
    if (p.state)
        state_store<D>(p.state + s.state, t, S);
}

/* dV_new and dS' of every chunk, last to first, and the gradient of the first state. */
template <class E, int D>
DEV void back_fetch(const args &p, const scan_at &s, const scan_memory<E, D> &m, int step)
{
    typedef image<E, D> I;
    const int c = s.c1 - 1 - step;
    if (c >= s.c0) {
        const scan_stage<E, D> x(m, step % p.stages);
        const chunk_at at = find_chunk(p, c);
        bar_expect(x.bar, I::bytes);
        bulk_copy<SCAN_THREADS>(x.W, p.image + ((int64_t)c * p.H + s.h) * I::bytes, I::bytes,
                                x.bar);
        fetch<E, SCAN_THREADS>(x.V, LV, (const E *)p.d_o + (at.start * p.H + s.h) * D + s.v0,
                               (int64_t)p.H * D, C, VS, at.len);
    }
    copy_commit();
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
    scan_begin(p, m);
    for (int i = 0; i < (p.stages > 1 ? p.stages - 1 : 1); i++)
        back_fetch<E, D>(p, s, m, i);
    state_load<D>(S, t, p.d_state ? p.d_state + s.state : nullptr);
    state_share<E, D>(m.S, t, S);
    for (int c = s.c1 - 1; c >= s.c0; c--) {
        const int step = s.c1 - 1 - c;
        const scan_stage<E, D> x(m, step % p.stages);
        const int64_t tile = (int64_t)c * p.H + s.h;
        scan_wait(p, x.bar, step);
        if (p.stages > 1)
            back_fetch<E, D>(p, s, m, step + p.stages - 1);
        float d[1][2][4];
        clear(d);
        const Col<E> d_o = {x.V, LV};
        product<E>::run(d, Row<E>{x.Kr, M::LD}, r0, Col<E>{m.S, LV}, n0, 0, D);
        product<E>::run(d, Col<E>{x.Aqk, LC}, r0, d_o, n0, r0, C);
        const chunk_at at = find_chunk(p, c);
        constexpr bool own = sizeof(E) == 4; /* dV has memory of its own, else it lies in dv */
        E *to =
            own ? (E *)p.dV + tile * (C * D) + s.v0 : (E *)p.dv + (at.start * p.H + s.h) * D + s.v0;
        const int64_t row = own ? D : (int64_t)p.H * D;
        each(d, r0, n0, [&](int r, int v, float a, float b) {
            store2(m.X + r * LV + v, -a, -b);
            if (own || r < at.len)
                store2(to + r * row + v, a, b);
        });
        flush<E, SCAN_THREADS>((E *)p.dS + tile * (D * D) + s.v0, D, m.S, LV, D, VS);
        state_decay(S, t.r0, x.decay);
        product<E>::run(S, Col<E>{x.Qg, M::LD}, t.r0, d_o, t.c0, 0, C);
        sync_block();
        product<E>::run(S, Col<E>{x.W, M::LD}, t.r0, Col<E>{m.X, LV}, t.c0, 0, C);
        state_share<E, D>(m.S, t, S);
        if (p.stages == 1) {
            sync_block();
            back_fetch<E, D>(p, s, m, step + 1);
        }
    }
    if (p.d_state0)
        state_store<D>(p.d_state0 + s.state, t, S);
}

} // namespace kda

#endif
