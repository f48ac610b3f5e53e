/* The serial part: the state, or its gradient, from chunk to chunk (kda-math.md section 3, rows 7, 8
 * and 10; section 4.2, first three lines). Columns of the state do not meet: eight warps carry VS of
 * them for one head of one sequence, their f32 accumulator in registers, the copy that tensor cores
 * multiply in shared memory. A block is W such groups, which share what a chunk says to all columns.
 * Operands of the next chunks arrive while this one is computed.
 *
 * Of a group, products with C rows: warp w has rows 16 (w % 4) and half of the columns. The state:
 * D / 16 row tiles, over w % (D / 16), and the columns split among what is left. Two barriers a chunk.
 *
 * When sequences and heads do not fill the card, a sequence is cut into segments (section 5.3). Over a
 * segment the state is affine, S_out = M S_in + S_ext: COMPOSE runs every segment from nothing for
 * S_ext and from the identity, without values, for M; merge makes each segment's first state in order;
 * then all segments run at once. Backward likewise, with M^T. */
#ifndef CKPT_CUDA_KDA_SCAN_CUH
#define CKPT_CUDA_KDA_SCAN_CUH

#include "kda_common.cuh"

namespace kda
{

constexpr int GROUP = 256; /* threads of a group of columns */

/* What a scan is for: o; the state before each chunk, and V_new in U's place; the affine map. */
enum scan_mode { OUT, KEEP, COMPOSE };

/* whole: with the part of an image that only OUT and the way back need. */
template <class E, int D, int W, bool WHOLE> struct scan_memory {
    static constexpr int LD = image<E, D>::LD, TH = GROUP * W;
    static constexpr int shared = WHOLE ? image<E, D>::bytes : image<E, D>::first;
    static constexpr int stage = shared + W * C * LV * (int)sizeof(E);
    static constexpr int most = sizeof(E) == 2 ? 3 : 1; /* stages */
    static constexpr int bytes(int stages)
    {
        return 64 + stages * stage + W * (D + C) * LV * (int)sizeof(E);
    }
    static constexpr int stages(int limit)
    {
        return most > 1 && bytes(most) > limit ? most - 1 : most;
    }
    uint64_t *bar; /* a stage has arrived */
    E *S, *X;      /* of this thread's group */
    unsigned char *base;
    int group;
    DEV explicit scan_memory(unsigned char *p)
    {
        bar = (uint64_t *)p;
        group = (int)threadIdx.x / GROUP;
        S = (E *)(p + 64) + group * (D * LV);
        X = (E *)(p + 64) + W * D * LV + group * (C * LV);
        base = p + 64 + W * (D + C) * LV * (int)sizeof(E);
    }
};
template <class E, int D> struct scan_stage {
    E *W, *Kr, *Qg, *Aqk, *V, *allV; /* V: this group's columns of U, or of dO */
    float *decay;
    uint64_t *bar;
    template <class M> DEV scan_stage(const M &m, int i)
    {
        typedef image<E, D> I;
        unsigned char *at = m.base + i * M::stage;
        bar = m.bar + i;
        W = (E *)at;
        Kr = (E *)(at + I::Kr);
        decay = (float *)(at + I::decay);
        Qg = (E *)(at + I::Qg);
        Aqk = (E *)(at + I::Aqk);
        allV = (E *)(at + M::shared);
        V = allV + m.group * (C * LV);
    }
};

/* Which of the state's rows and columns this warp accumulates. */
template <int D> struct state_tile {
    static constexpr int parts = 8 / (D / 16), NT = VS / 8 / parts;
    int r0, c0;
    DEV state_tile()
    {
        const int w = (int)threadIdx.x % GROUP / 32;
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
DEV void state_store(float *to, int ld, const state_tile<D> &t, float (&S)[1][NT][4])
{
    each(S, t.r0, t.c0, [&](int r, int c, float x, float y) {
        to[r * ld + c] = x;
        to[r * ld + c + 1] = y;
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

/* Block = (sequence, head, segment, columns). */
struct scan_at {
    int seq, h, v0, seg, c0, c1;
    int64_t head, piece; /* of all heads, of all segments */
};
template <int D, int W> DEV scan_at scan_of(const args &p, int block, int all_columns)
{
    scan_at s;
    const int parts = all_columns / (VS * W);
    s.v0 = (block % parts * W + (int)threadIdx.x / GROUP) * VS;
    s.piece = block / parts;
    s.seg = (int)(s.piece % p.segs);
    s.head = s.piece / p.segs;
    s.seq = (int)(s.head / p.H);
    s.h = (int)(s.head % p.H);
    const int first = p.table ? p.first[s.seq] : s.seq * p.per_seq;
    const int64_t n = p.table ? p.first[s.seq + 1] - first : p.per_seq;
    s.c0 = first + (int)(n * s.seg / p.segs);
    s.c1 = first + (int)(n * (s.seg + 1) / p.segs);
    return s;
}

/* Step i of a scan is in stage i % stages; fetches run stages - 1 steps ahead, or with one stage none. */
template <class M> DEV void scan_begin(const M &m, int stages)
{
    if (threadIdx.x == 0)
        for (int i = 0; i < stages; i++)
            bar_init(m.bar + i);
    sync_block();
}
DEV void scan_wait(int stages, uint64_t *bar, int step)
{
    if (stages == 3)
        copy_wait<1>();
    else
        copy_wait<0>();
    bar_wait(bar, step / stages & 1);
    sync_block();
}

template <class E, int D, int W, class M>
DEV void scan_fetch(const args &p, const scan_at &s, const M &m, int stages, int step)
{
    typedef image<E, D> I;
    constexpr int values = W * C * LV * (int)sizeof(E);
    if (s.c0 + step < s.c1) {
        const scan_stage<E, D> x(m, step % stages);
        const int64_t tile = (int64_t)(s.c0 + step) * p.H + s.h;
        const int v0 = s.v0 - m.group * VS; /* columns of M have no values and need none */
        const bool wanted = v0 < D;
        bar_expect(x.bar, M::shared + (wanted ? values : 0));
        bulk_copy<M::TH>(x.W, p.image + tile * I::bytes, M::shared, x.bar);
        if (wanted)
            bulk_copy<M::TH>(x.allV, (const E *)p.U + tile * columns<E, D> + v0 * (C * LV / VS),
                             values, x.bar);
    }
    copy_commit();
}

template <class E, int D, int W, scan_mode MODE>
DEV void scan_forward(const args &p, int block, int stages, unsigned char *memory)
{
    typedef scan_memory<E, D, W, MODE == OUT> M;
    const M m(memory);
    const scan_at s = scan_of<D, W>(p, block, MODE == COMPOSE ? 2 * D : D);
    const state_tile<D> t;
    const int w = (int)threadIdx.x % GROUP / 32, r0 = w % 4 * 16, n0 = w / 4 * (VS / 2);
    const bool valued = MODE != COMPOSE || s.v0 < D;
    float S[1][state_tile<D>::NT][4];
    scan_begin(m, stages);
    for (int i = 0; i < (stages > 1 ? stages - 1 : 1); i++)
        scan_fetch<E, D, W>(p, s, m, stages, i);
    const float *start = p.segs > 1 ? p.begin + s.piece * D * D : nullptr;
    if (p.segs == 1 && p.state0)
        start = p.state0 + s.head * D * D;
    state_load<D>(S, t, MODE == COMPOSE || !start ? nullptr : start + s.v0);
    if (!valued)
        each(S, t.r0, t.c0, [&](int r, int c, float &x, float &y) {
            x = r == s.v0 - D + c ? 1.f : 0.f;
            y = r == s.v0 - D + c + 1 ? 1.f : 0.f;
        });
    state_share<E, D>(m.S, t, S);
    for (int c = s.c0; c < s.c1; c++) {
        const scan_stage<E, D> x(m, (c - s.c0) % stages);
        const int64_t tile = (int64_t)c * p.H + s.h;
        scan_wait(stages, x.bar, c - s.c0);
        if (stages > 1)
            scan_fetch<E, D, W>(p, s, m, stages, c - s.c0 + stages - 1);
        float d[1][2][4], o[1][2][4];
        clear(d);
        clear(o);
        const Row<E> Wk = {x.W, M::LD}, Q = {x.Qg, M::LD};
        const Col<E> state = {m.S, LV};
        if (MODE == OUT)
            product<E>::run2(d, o, Wk, Q, r0, state, n0, 0, D);
        else
            product<E>::run(d, Wk, r0, state, n0, 0, D);
        E *keep = (E *)p.U + tile * columns<E, D> + s.v0 * (C * LV / VS);
        each(d, r0, n0, [&](int r, int v, float a, float b) {
            const pair u = valued ? load2(x.V + r * LV + v) : pair{0.f, 0.f};
            store2(m.X + r * LV + v, u.x - a, u.y - b);
            if (MODE == KEEP)
                store2(keep + r * LV + v, u.x - a, u.y - b);
        });
        if (MODE == KEEP)
            flush<E, GROUP>((E *)p.S + tile * (D * D) + s.v0, D, m.S, LV, D, VS);
        state_decay(S, t.r0, x.decay);
        sync_block();
        const Col<E> fresh = {m.X, LV};
        product<E>::run(S, Col<E>{x.Kr, M::LD}, t.r0, fresh, t.c0, 0, C);
        state_share<E, D>(m.S, t, S);
        if (MODE == OUT) {
            product<E>::run(o, Row<E>{x.Aqk, LC}, r0, fresh, n0, 0, r0 + 16);
            const chunk_at at = find_chunk(p, c);
            E *to = (E *)p.o + (at.start * p.H + s.h) * D + s.v0;
            each(o, r0, n0, [&](int r, int v, float a, float b) {
                if (r < at.len)
                    store2(to + (int64_t)r * p.H * D + v, a, b);
            });
        }
        if (stages == 1) {
            sync_block();
            scan_fetch<E, D, W>(p, s, m, stages, c - s.c0 + 1);
        }
    }
    if (MODE == COMPOSE)
        state_store<D>(p.compose + s.piece * 2 * D * D + s.v0, 2 * D, t, S);
    else if (p.state && s.seg == p.segs - 1)
        state_store<D>(p.state + s.head * D * D + s.v0, D, t, S);
}

/* dV_new and dS' of every chunk, last to first, and the gradient of the first state; COMPOSE: only what
 * a segment adds to that. */
template <class E, int D, int W, class M>
DEV void back_fetch(const args &p, const scan_at &s, const M &m, int stages, int step)
{
    typedef image<E, D> I;
    const int c = s.c1 - 1 - step;
    if (c >= s.c0) {
        const scan_stage<E, D> x(m, step % stages);
        const chunk_at at = find_chunk(p, c);
        bar_expect(x.bar, I::bytes);
        bulk_copy<M::TH>(x.W, p.image + ((int64_t)c * p.H + s.h) * I::bytes, I::bytes, x.bar);
        fetch<E, GROUP>(x.V, LV, (const E *)p.d_o + (at.start * p.H + s.h) * D + s.v0, p.H * D, C,
                        VS, at.len);
    }
    copy_commit();
}

template <class E, int D, int W, scan_mode MODE>
DEV void scan_backward(const args &p, int block, int stages, unsigned char *memory)
{
    typedef scan_memory<E, D, W, true> M;
    const M m(memory);
    const scan_at s = scan_of<D, W>(p, block, D);
    const state_tile<D> t;
    const int w = (int)threadIdx.x % GROUP / 32, r0 = w % 4 * 16, n0 = w / 4 * (VS / 2);
    float S[1][state_tile<D>::NT][4];
    scan_begin(m, stages);
    for (int i = 0; i < (stages > 1 ? stages - 1 : 1); i++)
        back_fetch<E, D, W>(p, s, m, stages, i);
    const float *start = p.segs > 1 ? p.d_end + s.piece * D * D : nullptr;
    if (p.segs == 1 && p.d_state)
        start = p.d_state + s.head * D * D;
    state_load<D>(S, t, MODE == COMPOSE || !start ? nullptr : start + s.v0);
    state_share<E, D>(m.S, t, S);
    for (int c = s.c1 - 1; c >= s.c0; c--) {
        const int step = s.c1 - 1 - c;
        const scan_stage<E, D> x(m, step % stages);
        const int64_t tile = (int64_t)c * p.H + s.h;
        scan_wait(stages, x.bar, step);
        if (stages > 1)
            back_fetch<E, D, W>(p, s, m, stages, step + stages - 1);
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
            if (MODE == KEEP && (own || r < at.len))
                store2(to + r * row + v, a, b);
        });
        if (MODE == KEEP)
            flush<E, GROUP>((E *)p.dS + tile * (D * D) + s.v0, D, m.S, LV, D, VS);
        state_decay(S, t.r0, x.decay);
        product<E>::run(S, Col<E>{x.Qg, M::LD}, t.r0, d_o, t.c0, 0, C);
        sync_block();
        product<E>::run(S, Col<E>{x.W, M::LD}, t.r0, Col<E>{m.X, LV}, t.c0, 0, C);
        state_share<E, D>(m.S, t, S);
        if (stages == 1) {
            sync_block();
            back_fetch<E, D, W>(p, s, m, stages, step + 1);
        }
    }
    if (MODE == COMPOSE)
        state_store<D>(p.d_compose + s.piece * D * D + s.v0, D, t, S);
    else if (p.d_state0 && s.seg == 0)
        state_store<D>(p.d_state0 + s.head * D * D + s.v0, D, t, S);
}

/* One direction, or both at once: blocks from p.forward on go back. They do not depend on each other. */
template <class E, int D, int W, scan_mode MODE> KERNEL(GROUP *W, 1) scan(const args p)
{
    SHARED_MEMORY(memory);
    const int block = (int)blockIdx.x;
    if (MODE == OUT || block < p.forward)
        scan_forward<E, D, W, MODE>(p, block, p.stages, memory);
    else if constexpr (MODE != OUT)
        scan_backward<E, D, W, MODE>(p, block - p.forward, p.back_stages, memory);
}

/* The first state of each segment, and the gradient of its last: block = (direction, head, columns). */
constexpr int MERGE_COLUMNS = 8;
template <int D> KERNEL(GROUP, 1) merge(const args p)
{
    SHARED_MEMORY(memory);
    constexpr int N = MERGE_COLUMNS, parts = D / N, R = D * N / GROUP;
    float *x = (float *)memory; /* [D][N] */
    const int heads = (int)blockIdx.x / parts, v0 = (int)blockIdx.x % parts * N,
              tid = (int)threadIdx.x;
    const bool back = heads >= p.heads;
    const int64_t head = back ? heads - p.heads : heads;
    /* forward: R rows of one column; back: one row of R columns, so that M^T is read in lines */
    const int d = back ? tid % D : tid / N, v = back ? tid / D * R : tid % N;
    const int d_step = back ? 0 : GROUP / N, v_step = back ? 1 : 0;
    const float *first = back ? p.d_state : p.state0;
    float y[R];
#pragma unroll
    for (int i = 0; i < R; i++)
        y[i] = first ? first[(head * D + d + i * d_step) * D + v0 + v + i * v_step] : 0.f;
    for (int n = 0; n < p.segs; n++) {
        const int64_t piece = head * p.segs + (back ? p.segs - 1 - n : n);
        float *to = (back ? p.d_end : p.begin) + piece * D * D;
        sync_block();
#pragma unroll
        for (int i = 0; i < R; i++) {
            const int r = d + i * d_step, c = v + i * v_step;
            to[r * D + v0 + c] = y[i];
            x[r * N + c] = y[i];
        }
        sync_block();
        const float *M = p.compose + piece * 2 * D * D + D;
        const float *ext = back ? p.d_compose + piece * D * D : p.compose + piece * 2 * D * D;
        const int ld = back ? D : 2 * D;
#pragma unroll
        for (int i = 0; i < R; i++)
            y[i] = ext[(d + i * d_step) * ld + v0 + v + i * v_step];
        if (back) {
#pragma unroll 8
            for (int e = 0; e < D; e++) {
                const float a = M[e * 2 * D + d];
#pragma unroll
                for (int i = 0; i < R; i++)
                    y[i] += a * x[e * N + v + i];
            }
        } else {
#pragma unroll 4
            for (int e = 0; e < D; e += 4)
#pragma unroll
                for (int i = 0; i < R; i++) {
                    const vec<float> a = load16(M + (d + i * d_step) * 2 * D + e);
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        y[i] += a.e[k] * x[(e + k) * N + v];
                }
        }
    }
}

} // namespace kda

#endif
