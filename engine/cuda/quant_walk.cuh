/* The walks over the chunks of a sequence, forward and back, a block a sequence, head and VS columns of the
 * state, which stays in shared memory.
 *
 *   forward   U = u - W S;  S' = e^G_last S + (k e^(G_last - G))^T U, rounded by tiles
 *   back      dU = (k e^(G_last - G)) dS + P^T dO;  dS' = e^G_last dS + (kappa q e^G)^T dO - W^T dU
 *
 * Everything else of a chunk is in quant_products.cuh, from the states and gradients of states that are
 * stored here. The next chunk's operands come while this one's are multiplied. Where a scale spans the heads
 * a launch does one half of one step and the state is read again: `what`. */
#ifndef CKPT_CUDA_QUANT_WALK_CUH
#define CKPT_CUDA_QUANT_WALK_CUH

#include "quant_common.cuh"

namespace kda
{
namespace quant
{

enum { START = 1, READ = 2, REST = 4 };

template <int D, int VS> struct walk_memory {
    static constexpr int LS = VS + 4;
    static constexpr int bytes = (2 * C * LD<D> + 2 * D * LS + D + TH) * 4;
};

/* Where a block is: its row (sequence, head) and columns. */
struct walk_place {
    int64_t row, first;
    int h, seq, count, c0;
    DEV int64_t item(const qargs &p, int step) const
    {
        return (first + step) * p.H + h;
    }
};
template <int D, int VS> DEV walk_place find_walk(const qargs &p)
{
    walk_place a;
    a.row = blockIdx.x / (D / VS);
    a.c0 = (int)(blockIdx.x % (D / VS)) * VS;
    a.h = (int)(a.row % p.H);
    a.seq = (int)(a.row / p.H);
    a.first = p.table ? p.first[a.seq] : (int64_t)a.seq * p.per_seq;
    a.count = p.table ? p.first[a.seq + 1] - p.first[a.seq] : p.per_seq;
    return a;
}

/* The state by tiles [K, block_v], of which these columns hold whole ones. */
template <int D, int VS> DEV void round_state(const qargs &p, int c0, float *x, uint32_t *s)
{
    constexpr int P = TH / VS, R = D / P, LS = VS + 4;
    const ckpt_quant_kind kind = p.how.kind[CKPT_HANDLE_STATE];
    const bool int8 = kind == CKPT_QUANT_STATE_INT8;
    if (kind == CKPT_QUANT_OFF)
        return;
    const int c = (int)threadIdx.x % VS, part = (int)threadIdx.x / VS;
    const int block = (int)p.how.block_v, lo = (c0 + c) / block * block - c0;
    uint32_t most = 0;
    for (int r = 0; r < R; r++)
        most = larger(most, number(x[(part * R + r) * LS + c]));
    most = largest_of_16(most);
    if (lane() % 16 == 0)
        s[part * (VS / 16) + c / 16] = most;
    sync_block();
    for (int q = 0; q < P; q++)
        for (int e = lo / 16; e < VS / 16 && e < (lo + block) / 16; e++)
            most = larger(most, s[q * (VS / 16) + e]);
    const float scale = ckpt_state_scale(ckpt_f32_of(most), int8 ? 127.0f : 448.0f, true);
    for (int r = 0; r < R; r++) {
        float *at = x + (part * R + r) * LS + c;
        *at = ckpt_state_qdq(*at, scale, int8);
    }
    sync_block();
}

/* The state after `step` chunks: to where the next one or the caller finds it, and its largest magnitude,
 * also for the steps of longer sequences. */
template <int D, int VS>
DEV void keep(const qargs &p, const walk_place &a, int step, const float *S)
{
    constexpr int LS = VS + 4;
    uint32_t most = 0;
    float *next = p.states + a.item(p, step) * D * D + a.c0;
    each_place<TH>(D, VS, [&](int k, int c) {
        const float x = S[k * LS + c];
        most = larger(most, number(x));
        if (step < a.count)
            next[k * D + c] = x;
        else if (p.state && k < p.K && a.c0 + c < p.V)
            p.state[(a.row * p.K + k) * p.V + a.c0 + c] = x;
    });
    if (p.fp4)
        for (int t = step; t == step || (step == a.count && t < p.steps); t++)
            publish(p, step_peak(t, STEP_STATE), most);
}

/* [K, V] columns of a state of the caller, or zeros. */
template <int D, int VS>
DEV void load_state(const qargs &p, const walk_place &a, const float *from, float *S)
{
    each_place<TH>(D, VS, [&](int k, int c) {
        S[k * (VS + 4) + c] =
            from && k < p.K && a.c0 + c < p.V ? from[(a.row * p.K + k) * p.V + a.c0 + c] : 0.f;
    });
}
/* What remains of each row of the state after the chunk. */
template <int D> DEV void load_last(const qargs &p, int64_t item, float *last)
{
    if (threadIdx.x < D)
        last[threadIdx.x] = gate(p, p.prefix[item * C * D + (C - 1) * D + threadIdx.x]);
}

/* U of a chunk, in shared memory and outside; q: room, in which U lies afterwards. */
template <int D, int VS>
DEV void read_state(const qargs &p, const walk_place &a, int step, const float *w, const float *S,
                    float *q, uint32_t *s, sums<C, VS, VS / 4, false, true> &m)
{
    constexpr int LS = VS + 4;
    const ckpt_quant_kind kind = p.how.kind[CKPT_HANDLE_STATE_READ_RHS];
    const float *operand = S;
    if (kind != CKPT_QUANT_OFF) {
        each_place<TH>(D, VS, [&](int k, int c) { q[k * LS + c] = S[k * LS + c]; });
        sync_block();
        round_columns<D, VS>(kind, q, LS, global_of(p, step_peak(step, STEP_STATE)), s,
                             p.s_scale + a.item(p, step) * D + a.c0);
        sync_block();
        operand = q;
    }
    m.of_site(p, CKPT_SITE_STATE_READ, Along{w, LD<D>}, Across{operand, LS}, D);
    sync_block();
}
template <int D, int VS>
DEV void store_u(const qargs &p, const walk_place &a, int step, float *u,
                 sums<C, VS, VS / 4, false, true> &m)
{
    float *at = p.u + a.item(p, step) * C * D + a.c0;
    uint32_t most = 0;
    m.each([&](int r, int c, float &x) {
        x = round_to(p.how.rounding[CKPT_BOUNDARY_VALUE_RESIDUAL], at[r * D + c] - x);
        at[r * D + c] = x;
        u[r * (VS + 4) + c] = x;
        most = larger(most, number(x));
    });
    if (p.fp4)
        publish(p, step_peak(step, STEP_U), most);
}

template <int D, int VS>
DEV void write_state(const qargs &p, const walk_place &a, int step, const float *wk, float *S,
                     float *u, const float *last, uint32_t *s)
{
    constexpr int LS = VS + 4;
    round_columns<C, VS>(p.how.kind[CKPT_HANDLE_STATE_UPDATE_RHS], u, LS,
                         global_of(p, step_peak(step, STEP_U)), s, nullptr);
    sync_block();
    sums<D, VS, VS / 4, true, true> m;
    m.of_site(p, CKPT_SITE_STATE_UPDATE, Across{wk, LD<D>}, Across{u, LS}, C);
    m.each([&](int k, int c, float &x) {
        float *at = S + k * LS + c;
        const float kept = round_to(p.how.rounding[CKPT_BOUNDARY_STATE_DECAY], *at * last[k]);
        *at = round_to(p.how.rounding[CKPT_BOUNDARY_STATE_ADD], kept + x);
    });
    sync_block();
    round_state<D, VS>(p, a.c0, S, s);
}

/* Steps from .. to - 1, or what `what` says of them. */
template <int D, int VS> KERNEL(TH, 1) walk(qargs p, int from, int to, int what)
{
    SHARED_MEMORY(memory);
    constexpr int LS = VS + 4;
    float *w = (float *)memory, *wk = w + C * LD<D>, *S = wk + C * LD<D>, *q = S + D * LS;
    float *last = q + D * LS;
    uint32_t *s = (uint32_t *)(last + D);
    const walk_place a = find_walk<D, VS>(p);
    to = to < a.count ? to : a.count;
    auto next = [&](float *tile, const float *of, int step, int kind) {
        if ((what & kind) && step < to)
            bring(tile, LD<D>, of + a.item(p, step) * C * D, D, C, D);
        copy_commit();
    };
    if (what & START) {
        load_state<D, VS>(p, a, p.state0, S);
        sync_block();
        round_state<D, VS>(p, a.c0, S, s);
        keep<D, VS>(p, a, 0, S);
    }
    next(w, p.w, from, READ);
    next(wk, p.wk, from, REST);
    for (int step = from; step < to; step++) {
        if (!(what & START))
            each_place<TH>(D, VS, [&](int k, int c) {
                S[k * LS + c] = p.states[a.item(p, step) * D * D + k * D + a.c0 + c];
            });
        if (what & READ) {
            sums<C, VS, VS / 4, false, true> m;
            copy_wait<1>();
            sync_block();
            read_state<D, VS>(p, a, step, w, S, q, s, m);
            next(w, p.w, step + 1, READ);
            store_u<D, VS>(p, a, step, q, m);
        }
        if (!(what & REST))
            continue;
        load_last<D>(p, a.item(p, step), last);
        if (what & READ) {
            copy_wait<1>();
        } else {
            const float *u = p.u + a.item(p, step) * C * D + a.c0;
            each_place<TH>(C, VS, [&](int r, int c) { q[r * LS + c] = u[r * D + c]; });
            copy_wait<0>();
        }
        sync_block();
        write_state<D, VS>(p, a, step, wk, S, q, last, s);
        next(wk, p.wk, step + 1, REST);
        keep<D, VS>(p, a, step + 1, S);
    }
}

/* ---- backward ------------------------------------------------------------------------------- */

constexpr int BACK_VS = 32;
template <int D> struct back_walk_memory {
    static constexpr int LS = BACK_VS + 4;
    static constexpr int bytes = (3 * C * LD<D> + C * LT + D * LS + 2 * C * LS + D) * 4;
};

template <int D> KERNEL(TH, 1) back_walk(qargs p)
{
    SHARED_MEMORY(memory);
    constexpr int VS = BACK_VS, LS = VS + 4;
    float *wk = (float *)memory, *qg = wk + C * LD<D>, *w = qg + C * LD<D>, *scores = w + C * LD<D>;
    float *ds = scores + C * LT, *d_o = ds + D * LS, *du = d_o + C * LS, *last = du + C * LS;
    const walk_place a = find_walk<D, VS>(p);
    auto first_half = [&](int step) {
        if (step >= 0) {
            bring(wk, LD<D>, p.wk + a.item(p, step) * C * D, D, C, D);
            bring(scores, LT, p.scores + a.item(p, step) * C * C, C, C, C);
        }
        copy_commit();
    };
    auto second_half = [&](int step) {
        if (step >= 0) {
            bring(qg, LD<D>, p.qg + a.item(p, step) * C * D, D, C, D);
            bring(w, LD<D>, p.w + a.item(p, step) * C * D, D, C, D);
        }
        copy_commit();
    };
    load_state<D, VS>(p, a, p.d_state, ds);
    first_half(a.count - 1);
    second_half(a.count - 1);
    for (int step = a.count - 1; step >= 0; step--) {
        const place at = find_place(p, a.item(p, step));
        const int64_t wide = at.item * C * D + a.c0;
        each_input<TH, VS>(p, p.d_o, value_of(p, at, p.V), (int64_t)p.H * p.V, at.c.len, p.V, a.c0,
                           [&](int r, int c, float x) { d_o[r * LS + c] = x; });
        load_last<D>(p, at.item, last);
        copy_wait<1>();
        sync_block();
        each_place<TH>(D, VS, [&](int k, int c) {
            p.ds[at.item * D * D + k * D + a.c0 + c] = ds[k * LS + c];
        });
        sums<C, VS, VS / 4, false, true> m;
        m.clear();
        m.add(Along{wk, LD<D>}, Across{ds, LS}, D);
        m.add(Across{scores, LT}, Across{d_o, LS}, C);
        m.each([&](int r, int c, float &x) {
            p.du[wide + r * D + c] = x;
            du[r * LS + c] = -x; /* it is taken away below */
        });
        copy_wait<0>();
        sync_block();
        first_half(step - 1);
        sums<D, VS, VS / 4, true, true> n;
        n.clear();
        n.add(Across{qg, LD<D>}, Across{d_o, LS}, C);
        n.add(Across{w, LD<D>}, Across{du, LS}, C);
        n.each([&](int k, int c, float &x) {
            float *s = ds + k * LS + c;
            *s = *s * last[k] + x;
        });
        sync_block();
        second_half(step - 1);
    }
    each_place<TH>(D, VS, [&](int k, int c) {
        if (p.d_state0 && k < p.K && a.c0 + c < p.V)
            p.d_state0[(a.row * p.K + k) * p.V + a.c0 + c] = ds[k * LS + c];
    });
}

} // namespace quant
} // namespace kda

#endif
