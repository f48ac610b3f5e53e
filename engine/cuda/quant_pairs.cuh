/* The kernels over pairs of tokens, a block a chunk and head: the interactions and the inverse, their
 * largest operands before that where NVFP4 needs them, and their backward.
 *
 * Forward: a thread makes k_j exp(G_i - G_j) of one pair, 16 columns at a time, rounds it and feeds both
 * products; rows i and 63 - i have 63 pairs below the diagonal together, two warps' work. FP8 goes over the
 * columns twice, since a row's scale comes first. Nothing of a pair is stored.
 * Backward: a warp owns rows; it makes and rounds the operands of row i again for the gradients of the left,
 * then goes down column i for those of k and G, which need exponentials alone.
 * Shared memory at D = 128: 166 KiB forward, 208 KiB backward. Traffic: inputs, and 64 x (4 D + 128) floats
 * out. */
#ifndef CKPT_CUDA_QUANT_PAIRS_CUH
#define CKPT_CUDA_QUANT_PAIRS_CUH

#include "quant_inverse.cuh"

namespace kda
{
namespace quant
{

constexpr int PAIR_WARPS = PAIR_TH / 32;

template <int D> struct pair_tiles {
    static constexpr int tile = C * LD<D>;
    float *G, *k, *lk, *lq; /* [64][LD]: prefix sums; k; beta k and kappa q, rounded */
    float *lower, *scores;  /* [64][LT] L and P, or their gradients */
    float *dprefix, *ends;  /* backward: [64][LD]; [PAIR_WARPS][D] */
    static constexpr int forward = (4 * tile + 2 * C * LT) * 4;
    static constexpr int backward = forward + (tile + PAIR_WARPS * D) * 4;
    DEV pair_tiles(unsigned char *memory)
    {
        G = (float *)memory;
        k = G + tile;
        lk = k + tile;
        lq = lk + tile;
        lower = lq + tile;
        scores = lower + C * LT;
        dprefix = scores + C * LT;
        ends = dprefix + tile;
    }
};

/* k, beta k, kappa q; not synchronised. */
template <int D> DEV void load_keys(const qargs &p, const place &a, pair_tiles<D> &t)
{
    const int64_t at = key_of(p, a), stride = (int64_t)p.HQ * p.K;
    each_input<PAIR_TH, D>(p, p.k, at, stride, a.c.len, p.K, 0, [&](int r, int c, float x) {
        t.k[r * LD<D> + c] = x;
        t.lk[r * LD<D> + c] = beta_at(p, a.c, a.h, r) * x;
    });
    each_input<PAIR_TH, D>(p, p.q, at, stride, a.c.len, p.K, 0,
                           [&](int r, int c, float x) { t.lq[r * LD<D> + c] = x * p.scale; });
}
/* Prefix sums of g, rounded as gate_prefix is; synchronised. */
template <int D> DEV void load_prefix(const qargs &p, const place &a, float *G)
{
    const int64_t at = (a.c.start * p.H + a.h) * p.K, stride = (int64_t)p.H * p.K;
    each_place<PAIR_TH>(C, D, [&](int r, int c) {
        G[r * LD<D> + c] = r < a.c.len && c < p.K ? ((const float *)p.g)[at + r * stride + c] : 0.f;
    });
    sync_block();
    if (threadIdx.x < D) {
        float sum = 0;
#pragma unroll 8
        for (int r = 0; r < C; r++) {
            float *x = G + r * LD<D> + threadIdx.x;
            sum += *x;
            *x = round_to(p.how.rounding[CKPT_BOUNDARY_GATE_PREFIX], sum);
        }
    }
    sync_block();
}
/* Rows that a warp owns: their pairs are as many for every warp. */
DEV int own_row(int i)
{
    const int w = (int)threadIdx.x / 32;
    return i == 0 ? w : i == 1 ? 31 - w : i == 2 ? 32 + w : 63 - w;
}

/* ---- NVFP4: largest operands of each tile of rows ------------------------------------------- */

template <int D> KERNEL(PAIR_TH, 1) find_peaks(qargs p)
{
    SHARED_MEMORY(memory);
    pair_tiles<D> t(memory);
    uint32_t *peaks = (uint32_t *)t.lower;
    const place a = find_place(p, blockIdx.x);
    if (threadIdx.x < PEAK_INVERSE)
        peaks[threadIdx.x] = 0;
    load_keys(p, a, t);
    load_prefix<D>(p, a, t.G);
    for (int n = 0; n < 4; n++) {
        const int i = own_row(n), tile = i / TILE_ROWS;
        uint32_t bk = 0, q = 0, pair = 0;
        for (int d = lane(); d < D; d += 32) {
            bk = larger(bk, number(t.lk[i * LD<D> + d]));
            q = larger(q, number(t.lq[i * LD<D> + d]));
            const float own = t.G[i * LD<D> + d];
            for (int j = 0; j <= i && j < a.c.len; j++)
                pair = larger(pair, number(gate(p, own - t.G[j * LD<D> + d]) * t.k[j * LD<D> + d]));
        }
        bk = largest_of_warp(bk);
        q = largest_of_warp(q);
        pair = largest_of_warp(pair);
        if (lane() == 0) {
            raise_to(peaks + PEAK_BK + tile, bk);
            raise_to(peaks + PEAK_Q + tile, q);
            raise_to(peaks + PEAK_PAIR + tile, pair);
        }
    }
    sync_block();
    if (threadIdx.x < PEAK_INVERSE)
        raise_to(p.peaks + threadIdx.x, peaks[threadIdx.x]);
}

/* ---- interactions --------------------------------------------------------------------------- */

/* A sum along the columns by the schedule of a site. */
struct running {
    ckpt_quant_dtype dtype;
    int block, n;
    float sum, part;

    DEV running(const qargs &p, ckpt_quant_site site)
        : dtype(p.how.accumulator[site]),
          block(dtype == CKPT_QUANT_NO_ROUNDING ? 1 << 20 : (int)p.how.block[site]), n(0), sum(0.f),
          part(0.f)
    {
    }
    DEV void close()
    {
        sum = round_to(dtype, sum + part);
        part = 0.f;
        n = 0;
    }
    DEV void add(const float *left, const float (&right)[16])
    {
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const vec<float> v = load16(left + i);
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[i + e] = v.e[e];
        }
        if (block % 16 == 0) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                part = fused(x[i], right[i], part);
            n += 16;
            if (n == block)
                close();
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                part = fused(x[i], right[i], part);
                if (++n == block)
                    close();
            }
        }
    }
};

/* The right operand of one pair. */
struct right_side {
    ckpt_quant_kind kind;
    float scale, inverse, global;

    DEV void round(const float (&x)[16], float (&y)[16]) const
    {
        if (kind == CKPT_QUANT_FP8) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                y[i] = ckpt_fp8_qdq(x[i], scale, inverse);
        } else if (kind == CKPT_QUANT_NVFP4) {
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < 16; i++)
                most = larger(most, number(x[i]));
            const float step = ckpt_nvfp4_step(ckpt_f32_of(most), global);
#pragma unroll
            for (int i = 0; i < 16; i++)
                y[i] = ckpt_nvfp4_qdq(x[i], step);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++)
                y[i] = x[i];
        }
    }
};

/* x = exp(x) as gate_exp rounds it; one question for all of them. */
template <int N> DEV void gates(const qargs &p, float (&x)[N])
{
    const ckpt_quant_dtype dtype = p.how.rounding[CKPT_BOUNDARY_GATE_EXP];
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = expf(x[i]);
    if (dtype == CKPT_QUANT_F16 || dtype == CKPT_QUANT_BF16) {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = round_to(dtype, x[i]);
    }
}

/* 16 columns of k_j exp(G_i - G_j). */
DEV void decayed(const qargs &p, const float *gi, const float *gj, const float *k, float (&x)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const vec<float> a = load16(gi + i), b = load16(gj + i);
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[i + e] = a.e[e] - b.e[e];
    }
    gates<16>(p, x);
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const vec<float> c = load16(k + i);
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[i + e] *= c.e[e];
    }
}

template <int D> DEV void one_pair(const qargs &p, const pair_tiles<D> &t, int i, int j)
{
    const float *gi = t.G + i * LD<D>, *gj = t.G + j * LD<D>, *k = t.k + j * LD<D>;
    right_side key = {p.how.kind[CKPT_HANDLE_KEY_INTERACTION_RHS], 0, 0, 0},
               score = {p.how.kind[CKPT_HANDLE_OUTPUT_SCORE_RHS], 0, 0, 0};
    if (key.kind == CKPT_QUANT_FP8 || score.kind == CKPT_QUANT_FP8) {
        uint32_t most = 0;
        for (int d = 0; d < D; d += 16) {
            float x[16];
            decayed(p, gi + d, gj + d, k + d, x);
#pragma unroll
            for (int e = 0; e < 16; e++)
                most = larger(most, magnitude(x[e]));
        }
        key.scale = score.scale = ckpt_fp8_scale(ckpt_f32_of(most), true);
        key.inverse = score.inverse = 1.0f / key.scale;
    }
    key.global = score.global = global_of(p, PEAK_PAIR + i / TILE_ROWS);
    running l(p, CKPT_SITE_KEY_INTERACTION), s(p, CKPT_SITE_OUTPUT_SCORE);
    for (int d = 0; d < D; d += 16) {
        float x[16], y[16];
        decayed(p, gi + d, gj + d, k + d, x);
        key.round(x, y);
        l.add(t.lk + i * LD<D> + d, y);
        if (key.kind != score.kind)
            score.round(x, y);
        s.add(t.lq + i * LD<D> + d, y);
    }
    l.close();
    s.close();
    t.lower[i * LT + j] = j < i ? l.sum : 0.f;
    t.scores[i * LT + j] = s.sum;
}

template <int D> KERNEL(PAIR_TH, 1) interact(qargs p)
{
    SHARED_MEMORY(memory);
    pair_tiles<D> t(memory);
    const place a = find_place(p, blockIdx.x);
    const int64_t wide = a.item * C * D, small = a.item * C * C;
    const float *last = t.G + (C - 1) * LD<D>;
    uint32_t qg = 0, wk = 0, bkg = 0, bv = 0, scores = 0;
    load_keys(p, a, t);
    load_prefix<D>(p, a, t.G);
    each_place<PAIR_TH>(C, C,
                        [&](int r, int c) { t.lower[r * LT + c] = t.scores[r * LT + c] = 0.f; });
    /* Operands of later kernels that are made of these, not rounded yet. */
    each_place<PAIR_TH>(C, D, [&](int r, int c) {
        const int i = r * LD<D> + c;
        const float g = t.G[i], e = gate(p, g);
        const float x = e * t.lq[i], y = gate(p, last[c] - g) * t.k[i];
        p.prefix[wide + r * D + c] = g;
        p.qg[wide + r * D + c] = x;
        p.wk[wide + r * D + c] = y;
        qg = larger(qg, number(x));
        wk = larger(wk, number(y));
        bkg = larger(bkg, number(e * t.lk[i]));
    });
    sync_block();
    round_rows<PAIR_TH, D>(p.how.kind[CKPT_HANDLE_KEY_INTERACTION_LHS], t.lk, LD<D>,
                           [&](int r) { return global_of(p, PEAK_BK + r / TILE_ROWS); });
    round_rows<PAIR_TH, D>(p.how.kind[CKPT_HANDLE_OUTPUT_SCORE_LHS], t.lq, LD<D>,
                           [&](int r) { return global_of(p, PEAK_Q + r / TILE_ROWS); });
    sync_block();
    for (int task = (int)threadIdx.x / 32; task < C + 1; task += PAIR_WARPS) {
        /* Of rows r and 63 - r, 63 pairs below the diagonal and one on it; the other diagonal ones last. */
        const int r = task / 2, x = task % 2 * 32 + lane();
        int i = x < r ? r : C - 1 - r, j = x < r ? x : x - r;
        if (task == C)
            i = j = C / 2 + lane();
        else if (x == C - 1)
            i = j = r;
        if (i < a.c.len)
            one_pair(p, t, i, j);
    }
    sync_block();
    each_place<PAIR_TH>(C, C, [&](int r, int c) {
        const float x = t.scores[r * LT + c];
        p.scores[small + r * C + c] = x;
        scores = larger(scores, number(x));
    });
    uint32_t inverse = 0;
    if (p.how.solve_factors > 0) /* L itself, for `approximate` */
        each_place<PAIR_TH>(
            C, C, [&](int r, int c) { p.inverse[small + r * C + c] = t.lower[r * LT + c]; });
    else
        inverse = invert(t.lower, p.inverse + small);
    if (!p.fp4)
        return;
    each_input<PAIR_TH, D>(
        p, p.v, value_of(p, a, p.V), (int64_t)p.H * p.V, a.c.len, p.V, 0,
        [&](int r, int, float x) { bv = larger(bv, number(beta_at(p, a.c, a.h, r) * x)); });
    publish(p, PEAK_INVERSE, inverse);
    publish(p, PEAK_BV, bv);
    publish(p, PEAK_BKG, bkg);
    publish(p, step_peak(a.step, STEP_QG), qg);
    publish(p, step_peak(a.step, STEP_WK), wk);
    publish(p, step_peak(a.step, STEP_SCORES), scores);
}

/* ---- backward ------------------------------------------------------------------------------- */

/* Neighbouring columns of a lane. */
template <int N> DEV void pick(const float *from, float (&x)[N])
{
    static_assert(N == 2 || N == 4, "64 or 128 columns over 32 lanes");
    if constexpr (N == 4) {
        const vec<float> v = load16(from);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = v.e[i];
    } else {
        load_pair(from, x[0], x[1]);
    }
}

/* A row that lies across a warp, N columns a lane, rounded. */
template <int N>
DEV void round_across(ckpt_quant_kind kind, float global, const float (&x)[N], float (&y)[N])
{
    uint32_t most = 0;
    if (kind == CKPT_QUANT_FP8) {
#pragma unroll
        for (int i = 0; i < N; i++)
            most = larger(most, magnitude(x[i]));
        const float scale = ckpt_fp8_scale(ckpt_f32_of(largest_of_warp(most)), true);
        const float inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = ckpt_fp8_qdq(x[i], scale, inverse);
    } else if (kind == CKPT_QUANT_NVFP4) {
#pragma unroll
        for (int i = 0; i < N; i++)
            most = larger(most, number(x[i]));
        float b = ckpt_f32_of(most);
#pragma unroll
        for (int mask = 8 / N; mask > 0; mask /= 2) {
            const float other = shuffle_xor(b, mask);
            b = b > other ? b : other;
        }
        const float step = ckpt_nvfp4_step(b, global);
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = ckpt_nvfp4_qdq(x[i], step);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = x[i];
    }
}

/* exp(a - b), and as gate_exp rounds it. */
template <int N>
DEV void both_gates(const qargs &p, const float (&a)[N], const float (&b)[N], float (&exact)[N],
                    float (&rounded)[N])
{
    const ckpt_quant_dtype dtype = p.how.rounding[CKPT_BOUNDARY_GATE_EXP];
#pragma unroll
    for (int i = 0; i < N; i++)
        rounded[i] = exact[i] = expf(a[i] - b[i]);
    if (dtype == CKPT_QUANT_F16 || dtype == CKPT_QUANT_BF16) {
#pragma unroll
        for (int i = 0; i < N; i++)
            rounded[i] = round_to(dtype, exact[i]);
    }
}

/* Gradients of one row, N columns a lane. */
template <int N> struct row_gradient {
    float bk[N], q[N], k[N], prefix[N];
};

/* Row i of both products: gradients of its left operands, and of G_i through the right ones. */
template <int D, int N>
DEV void along_row(const qargs &p, const pair_tiles<D> &t, int i, row_gradient<N> &g)
{
    const ckpt_quant_kind key = p.how.kind[CKPT_HANDLE_KEY_INTERACTION_RHS],
                          score = p.how.kind[CKPT_HANDLE_OUTPUT_SCORE_RHS];
    const float global = global_of(p, PEAK_PAIR + i / TILE_ROWS);
    const int d = lane() * N;
    float gi[N], left[N], through[2][N] = {};
    pick<N>(t.G + i * LD<D> + d, gi);
    for (int j = 0; j <= i; j++) {
        float gj[N], k[N], exact[N], x[N], y[N];
        const float dl = t.lower[i * LT + j], ds = t.scores[i * LT + j];
        pick<N>(t.G + j * LD<D> + d, gj);
        pick<N>(t.k + j * LD<D> + d, k);
        both_gates<N>(p, gi, gj, exact, x);
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] *= k[e];
        round_across<N>(key, global, x, y);
#pragma unroll
        for (int e = 0; e < N; e++)
            g.bk[e] = fused(dl, y[e], g.bk[e]);
        if (key != score)
            round_across<N>(score, global, x, y);
#pragma unroll
        for (int e = 0; e < N; e++) {
            g.q[e] = fused(ds, y[e], g.q[e]);
            if (j < i) { /* on the diagonal G_i - G_i */
                through[0][e] = fused(dl, exact[e] * k[e], through[0][e]);
                through[1][e] = fused(ds, exact[e] * k[e], through[1][e]);
            }
        }
    }
    pick<N>(t.lk + i * LD<D> + d, left);
#pragma unroll
    for (int e = 0; e < N; e++)
        g.prefix[e] = left[e] * through[0][e];
    pick<N>(t.lq + i * LD<D> + d, left);
#pragma unroll
    for (int e = 0; e < N; e++)
        g.prefix[e] = fused(left[e], through[1][e], g.prefix[e]);
}

/* Column j: gradients of k_j and G_j. */
template <int D, int N>
DEV void down_column(const qargs &p, const pair_tiles<D> &t, int j, int len, row_gradient<N> &g)
{
    const int d = lane() * N;
    float gj[N], k[N], through[N] = {};
    pick<N>(t.G + j * LD<D> + d, gj);
    pick<N>(t.k + j * LD<D> + d, k);
    for (int i = j; i < len; i++) {
        const float dl = t.lower[i * LT + j], ds = t.scores[i * LT + j];
        float gi[N], lk[N], lq[N], exact[N], rounded[N];
        pick<N>(t.G + i * LD<D> + d, gi);
        pick<N>(t.lk + i * LD<D> + d, lk);
        pick<N>(t.lq + i * LD<D> + d, lq);
        both_gates<N>(p, gi, gj, exact, rounded);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float right = fused(dl, lk[e], ds * lq[e]);
            g.k[e] = fused(right, rounded[e], g.k[e]);
            if (i > j)
                through[e] = fused(right, exact[e], through[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < N; e++)
        g.prefix[e] -= k[e] * through[e];
}

/* Products of row r with beta, kappa and gates; its gradients but that of g are stored. ends: what the row
 * adds to the gradient of the last prefix sum. */
template <int D, int N>
DEV void finish_row(const qargs &p, const place &a, const pair_tiles<D> &t, int r,
                    row_gradient<N> &g, float (&ends)[N])
{
    const int d = lane() * N, len = a.c.len;
    const int64_t at = a.item * C * D + r * D + d, token = a.c.start + r;
    const float beta = beta_at(p, a.c, a.h, r);
    float G[N], last[N], k[N], dqg[N], dwk[N], dbkg[N], dbeta = 0;
    pick<N>(t.G + r * LD<D> + d, G);
    pick<N>(t.G + (C - 1) * LD<D> + d, last);
    pick<N>(t.k + r * LD<D> + d, k);
    pick<N>(p.dqg + at, dqg);
    pick<N>(p.dwk + at, dwk);
    pick<N>(p.dbkg + at, dbkg);
#pragma unroll
    for (int e = 0; e < N; e++) {
        const ckpt_quant_dtype dtype = p.how.rounding[CKPT_BOUNDARY_GATE_EXP];
        const float exact = expf(G[e]), rounded = round_to(dtype, exact);
        const float end = expf(last[e] - G[e]), dend = dwk[e] * k[e] * end;
        const int64_t key = (token * p.HQ + a.h / p.G) * p.K + d + e;
        const float q = r < len && d + e < p.K ? read(p, p.q, key) * p.scale : 0.f;
        g.prefix[e] += (dqg[e] * q + dbkg[e] * (beta * k[e])) * exact - dend;
        ends[e] += dend;
        const float dk =
            g.k[e] + g.bk[e] * beta + dbkg[e] * beta * rounded + dwk[e] * round_to(dtype, end);
        const float dq = (g.q[e] + dqg[e] * rounded) * p.scale;
        dbeta += g.bk[e] * k[e] + dbkg[e] * k[e] * rounded;
        t.dprefix[r * LD<D> + d + e] = g.prefix[e];
        if (r < len && d + e < p.K) {
            if (p.shared) {
                p.dq_heads[(token * p.H + a.h) * p.K + d + e] = dq;
                p.dk_heads[(token * p.H + a.h) * p.K + d + e] = dk;
            } else {
                write(p, p.dq, key, dq);
                write(p, p.dk, key, dk);
            }
        }
    }
    for (int c = lane(); c < p.V && r < len; c += 32) {
        const int64_t value = (token * p.H + a.h) * p.V + c;
        const float dbv = p.dbv[a.item * C * D + r * D + c];
        dbeta += dbv * read(p, p.v, value);
        write(p, p.dv, value, dbv * beta);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
        dbeta += shuffle_xor(dbeta, mask);
    if (lane() == 0 && r < len)
        p.dbeta[token * p.H + a.h] = dbeta;
}

/* Sums of g reach every later prefix sum. */
template <int D> DEV void finish_decay(const qargs &p, const place &a, const pair_tiles<D> &t)
{
    const int d = (int)threadIdx.x;
    if (d >= p.K)
        return;
    float sum = 0;
    for (int w = 0; w < PAIR_WARPS; w++)
        sum += t.ends[w * D + d];
    sum += p.dlast[a.item * D + d] * expf(t.G[(C - 1) * LD<D> + d]);
    for (int r = C - 1; r >= 0; r--) {
        sum += t.dprefix[r * LD<D> + d];
        if (r < a.c.len)
            p.dg[((a.c.start + r) * p.H + a.h) * p.K + d] = sum;
    }
}

template <int D> KERNEL(PAIR_TH, 1) interact_back(qargs p)
{
    SHARED_MEMORY(memory);
    pair_tiles<D> t(memory);
    constexpr int N = D / 32;
    const place a = find_place(p, blockIdx.x);
    const int64_t small = a.item * C * C;
    float ends[N] = {};
    load_keys(p, a, t);
    fetch<float, PAIR_TH>(t.G, LD<D>, p.prefix + a.item * C * D, D, C, D, C);
    fetch<float, PAIR_TH>(t.scores, LT, p.dscores + small, C, C, C, C);
    fetch<float, PAIR_TH>(t.lower, LT, p.dlower + small, C, C, C, C);
    copy_commit();
    copy_wait<0>();
    sync_block();
    round_rows<PAIR_TH, D>(p.how.kind[CKPT_HANDLE_KEY_INTERACTION_LHS], t.lk, LD<D>,
                           [&](int r) { return global_of(p, PEAK_BK + r / TILE_ROWS); });
    round_rows<PAIR_TH, D>(p.how.kind[CKPT_HANDLE_OUTPUT_SCORE_LHS], t.lq, LD<D>,
                           [&](int r) { return global_of(p, PEAK_Q + r / TILE_ROWS); });
    if (threadIdx.x < C)
        t.lower[threadIdx.x * LT + threadIdx.x] = 0.f; /* L has no diagonal */
    sync_block();
    for (int n = 0; n < C / PAIR_WARPS; n++) {
        const int r = own_row(n);
        row_gradient<N> g = {};
        if (r < a.c.len) {
            along_row<D, N>(p, t, r, g);
            down_column<D, N>(p, t, r, a.c.len, g);
        }
        finish_row<D, N>(p, a, t, r, g, ends);
    }
    for (int e = 0; e < N; e++)
        t.ends[(int)threadIdx.x / 32 * D + lane() * N + e] = ends[e];
    sync_block();
    finish_decay<D>(p, a, t);
}

} // namespace quant
} // namespace kda

#endif
