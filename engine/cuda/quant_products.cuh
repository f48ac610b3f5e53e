/* The products that chunks do not wait for one another for, 64 x 64 of a result a block:
 *   solve         u = A beta v, W = A (beta k e^G)
 *   bake          operands in place: W, kappa q e^G, P, k e^(G_last - G)
 *   output        o = (kappa q e^G) S + P U
 *   back_products gradients of k e^(G_last - G), kappa q e^G, W, P and of the last prefix sum
 *   solve_back    gradients of beta v, beta k e^G and L
 *   fold          value heads that share a query and key
 * A block reads two or three tiles and multiplies them out of shared memory, two or more blocks a
 * multiprocessor. */
#ifndef CKPT_CUDA_QUANT_PRODUCTS_CUH
#define CKPT_CUDA_QUANT_PRODUCTS_CUH

#include "quant_common.cuh"

namespace kda
{
namespace quant
{

template <int D> constexpr int SLICES = D / C;

template <int T> KERNEL(T, 1) clear_peaks(qargs p, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * TH + threadIdx.x;
    if (i < n)
        p.peaks[i] = 0;
}

/* ---- solve ---------------------------------------------------------------------------------- */

struct solve_memory {
    static constexpr int tile = C * LT, bytes = (2 * tile + TH) * 4,
                         back_bytes = (3 * tile + TH) * 4;
};

/* to [64][LT] = 64 columns of beta v, or of beta k e^G. */
template <int D> DEV void load_right(const qargs &p, const place &a, bool keys, int c0, float *to)
{
    if (keys)
        each_input<TH, C>(p, p.k, key_of(p, a), (int64_t)p.HQ * p.K, a.c.len, p.K, c0,
                          [&](int r, int c, float x) {
                              const float g = p.prefix[a.item * C * D + r * D + c0 + c];
                              to[r * LT + c] = gate(p, g) * (beta_at(p, a.c, a.h, r) * x);
                          });
    else
        each_input<TH, C>(
            p, p.v, value_of(p, a, p.V), (int64_t)p.H * p.V, a.c.len, p.V, c0,
            [&](int r, int c, float x) { to[r * LT + c] = beta_at(p, a.c, a.h, r) * x; });
}
DEV void round_inverse(const qargs &p, bool keys, float *x)
{
    round_rows<TH, C>(p.how.kind[keys ? CKPT_HANDLE_WY_KEY_LHS : CKPT_HANDLE_WY_VALUE_LHS], x, LT,
                      [&](int) { return global_of(p, PEAK_INVERSE); });
}
DEV void round_right(const qargs &p, bool keys, float *x, uint32_t *s)
{
    round_columns<C, C>(p.how.kind[keys ? CKPT_HANDLE_WY_KEY_RHS : CKPT_HANDLE_WY_VALUE_RHS], x, LT,
                        global_of(p, keys ? PEAK_BKG : PEAK_BV), s, nullptr);
}

template <int D> KERNEL(TH, 4) solve(qargs p)
{
    SHARED_MEMORY(memory);
    float *left = (float *)memory, *right = left + solve_memory::tile;
    uint32_t *s = (uint32_t *)(right + solve_memory::tile);
    const int task = (int)(blockIdx.x % (2 * SLICES<D>)), c0 = task % SLICES<D> * C;
    const bool keys = task >= SLICES<D>;
    const place a = find_place(p, blockIdx.x / (2 * SLICES<D>));
    bring(left, LT, p.inverse + a.item * C * C, C, C, C);
    load_right<D>(p, a, keys, c0, right);
    brought();
    round_inverse(p, keys, left);
    round_right(p, keys, right, s);
    sync_block();
    square<false, true> m;
    m.of_site(p, keys ? CKPT_SITE_WY_KEY : CKPT_SITE_WY_VALUE, Along{left, LT}, Across{right, LT},
              C);
    float *out = (keys ? p.w : p.u) + a.item * C * D + c0;
    uint32_t most = 0;
    m.each([&](int r, int c, float &x) {
        out[r * D + c] = x;
        most = larger(most, number(x));
    });
    if (p.fp4 && keys)
        publish(p, step_peak(a.step, STEP_W), most);
}

/* ---- bake ----------------------------------------------------------------------------------- */

constexpr int BAKED = 4;
template <int D> struct bake_memory {
    static constexpr int bytes = (C * LD<D> + TH) * 4;
};

template <int D> KERNEL(TH, 4) bake(qargs p)
{
    SHARED_MEMORY(memory);
    float *x = (float *)memory;
    uint32_t *s = (uint32_t *)(x + C * LD<D>);
    const int task = (int)(blockIdx.x % BAKED); /* in the order of step_peak */
    const ckpt_quant_kind kind = p.how.kind[task == STEP_W    ? CKPT_HANDLE_W
                                            : task == STEP_QG ? CKPT_HANDLE_OUTPUT_STATE_LHS
                                            : task == STEP_WK ? CKPT_HANDLE_STATE_UPDATE_LHS
                                                              : CKPT_HANDLE_OUTPUT_VALUE_LHS];
    if (kind == CKPT_QUANT_OFF)
        return;
    const place a = find_place(p, blockIdx.x / BAKED);
    const float global = global_of(p, step_peak(a.step, task));
    if (task == STEP_SCORES) {
        float *at = p.scores + a.item * C * C;
        bring(x, LT, at, C, C, C);
        brought();
        round_rows<TH, C>(kind, x, LT, [&](int) { return global; });
        sync_block();
        flush<float, TH>(at, C, x, LT, C, C);
        return;
    }
    float *at = (task == STEP_W ? p.w : task == STEP_QG ? p.qg : p.wk) + a.item * C * D;
    bring(x, LD<D>, at, D, C, D);
    brought();
    if (task == STEP_WK)
        round_columns<C, D>(kind, x, LD<D>, global, s, nullptr);
    else
        round_rows<TH, D>(kind, x, LD<D>, [&](int) { return global; });
    sync_block();
    flush<float, TH>(at, D, x, LD<D>, C, D);
}

/* ---- output --------------------------------------------------------------------------------- */

template <int D> struct output_memory {
    static constexpr int bytes = (C * LD<D> + D * LT + 2 * C * LT + TH) * 4;
};

template <int D> KERNEL(TH, 2) output(qargs p)
{
    SHARED_MEMORY(memory);
    float *qg = (float *)memory, *state = qg + C * LD<D>, *scores = state + D * LT;
    float *u = scores + C * LT;
    uint32_t *s = (uint32_t *)(u + C * LT);
    const int c0 = (int)(blockIdx.x % SLICES<D>)*C;
    const place a = find_place(p, blockIdx.x / SLICES<D>);
    bring(qg, LD<D>, p.qg + a.item * C * D, D, C, D);
    bring(state, LT, p.states + a.item * D * D + c0, D, D, C);
    bring(scores, LT, p.scores + a.item * C * C, C, C, C);
    bring(u, LT, p.u + a.item * C * D + c0, D, C, C);
    brought();
    round_columns<D, C>(p.how.kind[CKPT_HANDLE_OUTPUT_STATE_RHS], state, LT,
                        global_of(p, step_peak(a.step, STEP_STATE)), s,
                        p.s_scale + a.item * D + c0);
    sync_block();
    round_columns<C, C>(p.how.kind[CKPT_HANDLE_OUTPUT_VALUE_RHS], u, LT,
                        global_of(p, step_peak(a.step, STEP_U)), s, nullptr);
    sync_block();
    square<false, true> m, local;
    m.of_site(p, CKPT_SITE_OUTPUT_STATE, Along{qg, LD<D>}, Across{state, LT}, D);
    local.of_site(p, CKPT_SITE_OUTPUT_VALUE, Along{scores, LT}, Across{u, LT}, C);
#pragma unroll
    for (int i = 0; i < m.MT; i++)
#pragma unroll
        for (int j = 0; j < m.NT; j++)
            m.c[i][j] =
                round_to(p.how.rounding[CKPT_BOUNDARY_OUTPUT_ADD], m.c[i][j] + local.c[i][j]);
    const int64_t at = value_of(p, a, p.V) + c0;
    m.each([&](int r, int c, float &x) {
        if (r < a.c.len && c0 + c < p.V)
            write(p, p.o, at + (int64_t)r * p.H * p.V + c, x);
    });
}

/* ---- backward of what the walks read and write ---------------------------------------------- */

template <int D> constexpr int BACK_TASKS = 3 * SLICES<D> + 1;
template <int D> struct back_memory {
    static constexpr int bytes = (2 * C * LD<D> + TH) * 4;
};

template <int D> DEV void load_output_gradient(const qargs &p, const place &a, float *to)
{
    each_input<TH, D>(p, p.d_o, value_of(p, a, p.V), (int64_t)p.H * p.V, a.c.len, p.V, 0,
                      [&](int r, int c, float x) { to[r * LD<D> + c] = x; });
}
/* The state's 64 rows k0 .. times their gradients: that of the decay of each. ds [64][LD]. */
template <int D> DEV void decay_gradient(const qargs &p, const place &a, int k0, const float *ds)
{
    const float *state = p.states + a.item * D * D + (int64_t)k0 * D;
    for (int r = (int)threadIdx.x / 32; r < C; r += TH / 32) {
        float sum = 0;
        for (int c = lane(); c < D; c += 32)
            sum = fused(ds[r * LD<D> + c], state[r * D + c], sum);
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
            sum += shuffle_xor(sum, mask);
        if (lane() == 0)
            p.dlast[a.item * D + k0 + r] = sum;
    }
}

template <int D> KERNEL(TH, 3) back_products(qargs p)
{
    SHARED_MEMORY(memory);
    float *left = (float *)memory, *right = left + C * LD<D>;
    uint32_t *s = (uint32_t *)(right + C * LD<D>);
    const int task = (int)(blockIdx.x % BACK_TASKS<D>), what = task / SLICES<D>;
    const int k0 = task % SLICES<D> * C;
    const place a = find_place(p, blockIdx.x / BACK_TASKS<D>);
    const int64_t wide = a.item * C * D;
    const float global = global_of(p, step_peak(a.step, STEP_U));
    /* what: 0 of k e^(G_last - G), 1 of kappa q e^G, 2 of W, 3 of P */
    if (what == 0)
        bring(left, LD<D>, p.u + wide, D, C, D);
    else if (what == 2)
        bring(left, LD<D>, p.du + wide, D, C, D);
    else
        load_output_gradient<D>(p, a, left);
    if (what == 3)
        bring(right, LD<D>, p.u + wide, D, C, D);
    else
        bring(right, LD<D>, (what == 0 ? p.ds : p.states) + a.item * D * D + (int64_t)k0 * D, D, C,
              D);
    brought();
    if (what == 0) {
        decay_gradient<D>(p, a, k0, right);
        round_columns<C, D>(p.how.kind[CKPT_HANDLE_STATE_UPDATE_RHS], left, LD<D>, global, s,
                            nullptr);
    } else if (what == 3) {
        round_columns<C, D>(p.how.kind[CKPT_HANDLE_OUTPUT_VALUE_RHS], right, LD<D>, global, s,
                            nullptr);
    } else {
        round_state_rows<D>(
            p, p.how.kind[what == 1 ? CKPT_HANDLE_OUTPUT_STATE_RHS : CKPT_HANDLE_STATE_READ_RHS], a,
            right, LD<D>);
    }
    sync_block();
    square<false, false> m;
    m.clear();
    m.add(Along{left, LD<D>}, Along{right, LD<D>}, D);
    if (what == 3) {
        m.each([&](int r, int c, float &x) { p.dscores[a.item * C * C + r * C + c] = x; });
    } else {
        float *out = (what == 0 ? p.dwk : what == 1 ? p.dqg : p.dw) + wide + k0;
        m.each([&](int r, int c, float &x) { out[r * D + c] = what == 2 ? -x : x; });
    }
}

/* ---- backward of the solve ------------------------------------------------------------------ */

template <int D> constexpr int SOLVE_BACK_TASKS = 2 * SLICES<D> + 1;

/* dL = -tril_-1(A^T dA A^T), dA = du (beta v)^T + dw (beta k e^G)^T. */
template <int D>
DEV void inverse_back(const qargs &p, const place &a, float *inverse, float *x, float *y,
                      uint32_t *s)
{
    square<false, false> m;
    m.clear();
    for (int task = 0; task < 2 * SLICES<D>; task++) {
        const bool keys = task >= SLICES<D>;
        const int c0 = task % SLICES<D> * C;
        sync_block();
        bring(x, LT, (keys ? p.dw : p.du) + a.item * C * D + c0, D, C, C);
        load_right<D>(p, a, keys, c0, y);
        brought();
        round_right(p, keys, y, s);
        sync_block();
        m.add(Along{x, LT}, Along{y, LT}, C);
    }
    sync_block();
    m.each([&](int r, int c, float &v) { x[r * LT + c] = c <= r ? v : 0.f; });
    sync_block();
    square<true, true> n;
    n.clear();
    n.add(Across{inverse, LT}, Across{x, LT}, C);
    n.each([&](int r, int c, float &v) { y[r * LT + c] = v; });
    sync_block();
    m.clear();
    m.add(Along{y, LT}, Along{inverse, LT}, C);
    m.each([&](int r, int c, float &v) { p.dlower[a.item * C * C + r * C + c] = -v; });
}

template <int D> KERNEL(TH, 3) solve_back(qargs p)
{
    SHARED_MEMORY(memory);
    float *inverse = (float *)memory, *x = inverse + solve_memory::tile;
    float *y = x + solve_memory::tile;
    uint32_t *s = (uint32_t *)(y + solve_memory::tile);
    const int task = (int)(blockIdx.x % SOLVE_BACK_TASKS<D>), c0 = task % SLICES<D> * C;
    const bool keys = task >= SLICES<D>;
    const place a = find_place(p, blockIdx.x / SOLVE_BACK_TASKS<D>);
    bring(inverse, LT, p.inverse + a.item * C * C, C, C, C);
    if (task == 2 * SLICES<D>) {
        inverse_back<D>(p, a, inverse, x, y, s);
        return;
    }
    bring(x, LT, (keys ? p.dw : p.du) + a.item * C * D + c0, D, C, C);
    brought();
    round_inverse(p, keys, inverse);
    sync_block();
    square<true, true> m;
    m.clear();
    m.add(Across{inverse, LT}, Across{x, LT}, C);
    float *out = (keys ? p.dbkg : p.dbv) + a.item * C * D + c0;
    m.each([&](int r, int c, float &v) { out[r * D + c] = v; });
}

/* ---- shared heads --------------------------------------------------------------------------- */

/* dq, dk [T, HQ, K] = sums over the heads of v that share one, in order. */
template <int T> KERNEL(T, 1) fold(qargs p, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * TH + threadIdx.x;
    if (i >= n)
        return;
    const int64_t row = i / p.K, d = i % p.K;
    float q = 0, k = 0;
    for (int g = 0; g < p.G; g++) {
        q += p.dq_heads[(row * p.G + g) * p.K + d];
        k += p.dk_heads[(row * p.G + g) * p.K + d];
    }
    write(p, p.dq, i, q);
    write(p, p.dk, i, k);
}

} // namespace quant
} // namespace kda

#endif
