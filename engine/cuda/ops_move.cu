/* Copies, cuts and sums of arrays; tokens and results of a run; the experts' activation (move.h).
 *
 * Pointwise kernels: a thread an element, or a warp a row where a row has a sum. Sums over a whole array
 * are one block's, 256 interleaved ones and then a tree, in double. What is not finite is looked for
 * by up to 512 blocks, and the lowest of their finds taken by one: no atomics. */
#include "move.h"

#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int WARPS = THREADS / 32, MOST_BLOCKS = CKPT_CUDA_WATCH / 8;

/* ---- arrays ---------------------------------------------------------------------------------- */

template <class E> KERNEL(THREADS, 1) add(int64_t n, const E *x, E *y)
{
    const int64_t i = index_of();
    if (i < n)
        y[i] = cast<E>(to_f(y[i]) + to_f(x[i]));
}
template <int N> KERNEL(THREADS, 1) scale(int64_t n, float by, float *x)
{
    const int64_t i = index_of();
    if (i < n)
        x[i] *= by;
}
template <class E> KERNEL(THREADS, 1) widen(int64_t n, const E *x, float *to)
{
    const int64_t i = index_of();
    if (i < n)
        to[i] = to_f(x[i]);
}
template <class E> KERNEL(THREADS, 1) narrow(int64_t n, const float *x, E *to)
{
    const int64_t i = index_of();
    if (i < n)
        to[i] = cast<E>(x[i]);
}

struct columns_args {
    int64_t rows, n, ld_from, ld_to;
    const void *from;
    void *to;
};
template <class E> KERNEL(THREADS, 1) copy_columns(columns_args p)
{
    const int64_t i = index_of(), r = i / p.n, at = i % p.n;
    if (r < p.rows)
        ((E *)p.to)[r * p.ld_to + at] = ((const E *)p.from)[r * p.ld_from + at];
}

/* ---- heads ----------------------------------------------------------------------------------- */

enum heads_kind { REPEAT, SUM, FIRST };
template <int KIND>
KERNEL(THREADS, 1)
heads(int64_t rows, int64_t G, int64_t n, const float *from, float *to)
{
    const int64_t i = index_of(), r = i / n, at = i % n;
    if (KIND == REPEAT) {
        if (r < rows * G)
            to[i] = from[r / G * n + at];
    } else if (r < rows) {
        float sum = from[r * G * n + at];
        for (int64_t g = 1; KIND == SUM && g < G; g++)
            sum += from[(r * G + g) * n + at];
        to[i] = sum;
    }
}

struct mla_args {
    ckpt_cuda_mla b;
    int64_t T;
    const void *in, *in2; /* kv, kv_a; or dk, dv */
    void *out, *out2;     /* k, v; or dkv, dkv_a */
};
/* An element of k or of v. */
template <class E> KERNEL(THREADS, 1) split_heads(mla_args p)
{
    const int64_t d = p.b.DN + p.b.DR, width = d + p.b.DV, i = index_of();
    const int64_t row = i / width, at = i % width, t = row / p.b.N;
    const E *kv = (const E *)p.in + row * (p.b.DN + p.b.DV);
    if (t >= p.T)
        return;
    if (at < p.b.DN)
        ((E *)p.out)[row * d + at] = kv[at];
    else if (at < d)
        ((E *)p.out)[row * d + at] =
            ((const E *)p.in2)[t * (p.b.RK + p.b.DR) + p.b.RK + at - p.b.DN];
    else
        ((E *)p.out2)[row * p.b.DV + at - d] = kv[p.b.DN + at - d];
}
/* An element of dkv, or, behind those of a token, of the shared key. */
template <class E> KERNEL(THREADS, 1) fold_heads(mla_args p)
{
    const int64_t d = p.b.DN + p.b.DR, per = p.b.DN + p.b.DV, wide = p.b.N * per + p.b.DR;
    const int64_t i = index_of(), t = i / wide, at = i % wide;
    if (t >= p.T)
        return;
    if (at < p.b.N * per) {
        const int64_t h = t * p.b.N + at / per, c = at % per;
        ((E *)p.out)[t * p.b.N * per + at] =
            c < p.b.DN ? ((const E *)p.in)[h * d + c] : ((const E *)p.in2)[h * p.b.DV + c - p.b.DN];
        return;
    }
    const int64_t c = at - p.b.N * per;
    float sum = 0;
    for (int64_t h = 0; h < p.b.N; h++)
        sum += to_f(((const E *)p.in)[(t * p.b.N + h) * d + p.b.DN + c]);
    ((E *)p.out2)[t * (p.b.RK + p.b.DR) + p.b.RK + c] = cast<E>(sum);
}

struct gate_args {
    int64_t rows, D, per;
    const void *o, *g, *dy;
    void *y, *dg;
};
/* A warp a row. */
template <class E> KERNEL(THREADS, 1) gate_heads(gate_args p)
{
    const int64_t r = warp_of();
    if (r >= p.rows)
        return;
    const E *o = (const E *)p.o + r * p.D, *g = (const E *)p.g + r * p.per;
    for (int64_t c = lane(); c < p.D; c += 32)
        ((E *)p.y)[r * p.D + c] = cast<E>(to_f(o[c]) * logistic(to_f(g[p.per == 1 ? 0 : c])));
}
template <class E> KERNEL(THREADS, 1) gate_heads_back(gate_args p)
{
    const int64_t r = warp_of();
    if (r >= p.rows)
        return;
    const E *o = (const E *)p.o + r * p.D, *g = (const E *)p.g + r * p.per;
    const E *from = (const E *)p.dy + r * p.D;
    float sum = 0;
    for (int64_t c = lane(); c < p.D; c += 32) {
        const float s = logistic(to_f(g[p.per == 1 ? 0 : c])), dy = to_f(from[c]);
        const float ds = dy * to_f(o[c]);
        ((E *)p.y)[r * p.D + c] = cast<E>(dy * s);
        if (p.per != 1)
            ((E *)p.dg)[r * p.per + c] = cast<E>(ds * s * (1.f - s));
        sum += ds;
    }
    sum = group_sum<32>(sum, NULL);
    if (p.per == 1 && lane() == 0) {
        const float s = logistic(to_f(g[0]));
        ((E *)p.dg)[r] = cast<E>(sum * s * (1.f - s));
    }
}

/* ---- tokens and results ---------------------------------------------------------------------- */

/* Which sequence a token is the last of is found by halving. */
template <int N>
KERNEL(THREADS, 1)
shift_tokens(int64_t T, int64_t n, const int64_t *cu, int32_t last, const int32_t *from,
             int32_t *to)
{
    const int64_t t = index_of();
    if (t >= T)
        return;
    int64_t lo = 0, hi = n; /* the first offset above t */
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (cu[mid] > t)
            hi = mid;
        else
            lo = mid + 1;
    }
    to[t] = t + 1 < cu[lo] ? from[t + 1] : last;
}

/* x of all threads of a block in thread 0: take(x, another) two by two; s [THREADS]. */
template <class X, class F> DEV X block_fold(X x, X *s, const F &take)
{
    s[threadIdx.x] = x;
    sync_block();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half)
            take(s[threadIdx.x], s[threadIdx.x + half]);
        sync_block();
    }
    return s[0];
}
template <class X> DEV X block_sum(X x, X *s)
{
    return block_fold(x, s, [](X &sum, X y) { sum += y; });
}

template <int N>
KERNEL(THREADS, 1)
loss_weights(int64_t T, const int32_t *labels, double share, float *weight, int64_t *n)
{
    SHARED_MEMORY(memory);
    int64_t mine = 0;
    for (int64_t t = threadIdx.x; t < T; t += THREADS)
        mine += labels[t] >= 0;
    const int64_t all = block_sum(mine, (int64_t *)memory);
    const float each = all > 0 ? (float)(share / (double)all) : 0.f;
    for (int64_t t = threadIdx.x; t < T; t += THREADS)
        weight[t] = each;
    if (threadIdx.x == 0)
        *n = all;
}
template <int N>
KERNEL(THREADS, 1)
mean_loss(int64_t T, const float *loss, const int64_t *n, double *out)
{
    SHARED_MEMORY(memory);
    double mine = 0;
    for (int64_t t = threadIdx.x; t < T; t += THREADS)
        mine += (double)loss[t];
    const double all = block_sum(mine, (double *)memory);
    if (threadIdx.x == 0)
        *out = *n > 0 ? all / (double)*n : 0;
}

DEV int64_t lower(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
DEV int64_t block_lowest(int64_t x, int64_t *s)
{
    return block_fold(x, s, [](int64_t &low, int64_t y) { low = lower(low, y); });
}
template <class E> KERNEL(THREADS, 1) watch(int64_t n, int64_t piece, const E *x, int64_t *found)
{
    SHARED_MEMORY(memory);
    const int64_t lo = blockIdx.x * piece, hi = lower(n, lo + piece);
    int64_t at = INT64_MAX;
    for (int64_t i = lo + threadIdx.x; i < hi; i += THREADS) {
        const float v = to_f(x[i]);
        if (v - v != 0.f) /* NaN for both */
            at = lower(at, 2 * i + (v != v ? 2 : 1));
    }
    at = block_lowest(at, (int64_t *)memory);
    if (threadIdx.x == 0)
        found[blockIdx.x] = at;
}
template <int N> KERNEL(THREADS, 1) watch_end(int64_t blocks, const int64_t *found, int64_t *at)
{
    SHARED_MEMORY(memory);
    int64_t low = INT64_MAX;
    for (int64_t i = threadIdx.x; i < blocks; i += THREADS)
        low = lower(low, found[i]);
    low = block_lowest(low, (int64_t *)memory);
    if (threadIdx.x == 0)
        *at = low == INT64_MAX ? 0 : low;
}

/* ---- experts --------------------------------------------------------------------------------- */

struct act_args {
    int64_t n, F;
    const void *gate, *up;
    const float *weight;
    const int32_t *slot_of;
    void *act, *dgate, *dup;
    float *dweight;
};
template <class E> KERNEL(THREADS, 1) experts_act(act_args p)
{
    const int64_t i = index_of(), r = i / p.F;
    if (r >= p.n)
        return;
    const float u = to_f(((const E *)p.up)[i]), weight = p.weight[p.slot_of[r]];
    const float g = p.gate ? to_f(((const E *)p.gate)[i]) : 0.f;
    const float a = p.gate ? g * logistic(g) * u : u > 0 ? u * u : 0.f * u;
    ((E *)p.act)[i] = cast<E>(a * weight);
}
/* A warp a row. */
template <class E> KERNEL(THREADS, 1) experts_act_back(act_args p)
{
    const int64_t r = warp_of();
    if (r >= p.n)
        return;
    const float weight = p.weight[p.slot_of[r]];
    float sum = 0;
    for (int64_t i = r * p.F + lane(); i < (r + 1) * p.F; i += 32) {
        const float u = to_f(((const E *)p.up)[i]), da = to_f(((const E *)p.dup)[i]);
        float a, du;
        if (p.gate) {
            const float g = to_f(((const E *)p.gate)[i]), s = logistic(g);
            a = g * s * u;
            ((E *)p.dgate)[i] = cast<E>(weight * da * u * silu_slope(g, s));
            du = weight * da * g * s;
        } else {
            a = u > 0 ? u * u : 0.f * u;
            du = u > 0 ? weight * da * 2.f * u : 0.f * (da + u);
        }
        ((E *)p.dup)[i] = cast<E>(du);
        ((E *)p.act)[i] = cast<E>(a * weight);
        sum += da * a;
    }
    sum = group_sum<32>(sum, NULL);
    if (lane() == 0)
        p.dweight[p.slot_of[r]] = sum;
}

struct side_args {
    int64_t T, E;
    bool softmax;
    const float *score, *lse;
    const int64_t *balance;
    double coef, z_coef;
    double *out;
};
template <int N> KERNEL(THREADS, 1) side_losses(side_args p)
{
    SHARED_MEMORY(memory);
    double aux = 0, z = 0;
    for (int64_t t = threadIdx.x; t < p.T; t += THREADS) {
        const float *score = p.score + t * p.E;
        float sum = 1e-20f;
        double part = 0;
        for (int64_t i = 0; i < p.E && p.balance; i++)
            sum += score[i];
        for (int64_t i = 0; i < p.E && p.balance; i++)
            part += (double)(p.balance[i + 1] - p.balance[i]) *
                    (double)(p.softmax ? score[i] : score[i] / sum);
        aux += p.coef * part;
        z += p.z_coef * (double)p.lse[t] * (double)p.lse[t] / (double)p.T;
    }
    const double all_aux = block_sum(aux, (double *)memory);
    sync_block();
    const double all_z = block_sum(z, (double *)memory);
    if (threadIdx.x == 0) {
        p.out[0] = all_aux;
        p.out[1] = all_z;
    }
}
template <int N> KERNEL(THREADS, 1) counts(int64_t E, const int64_t *first, int64_t *out)
{
    const int64_t i = index_of();
    if (i < E)
        out[i] = first[i + 1] - first[i];
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_add(const ckpt_cuda *c, int64_t n, const void *x, void *y, ckpt_err *err)
{
    const ckpt_status status = ready_for("add", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH_OF(c, add, ceil_div(n, THREADS), THREADS, 0, n, (const T_ *)x, (T_ *)y);
    return launched("add", err);
}

ckpt_status ckpt_cuda_scale(const ckpt_cuda *c, int64_t n, float by, float *x, ckpt_err *err)
{
    const ckpt_status status = ready_for("scale", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(scale<1>, ceil_div(n, THREADS), THREADS, 0, stream_of(c->stream), n, by, x);
    return launched("scale", err);
}

ckpt_status ckpt_cuda_widen(const ckpt_cuda *c, int64_t n, const void *x, float *to, ckpt_err *err)
{
    const ckpt_status status = ready_for("widen", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH_OF(c, widen, ceil_div(n, THREADS), THREADS, 0, n, (const T_ *)x, to);
    return launched("widen", err);
}

ckpt_status ckpt_cuda_narrow(const ckpt_cuda *c, int64_t n, const float *x, void *to, ckpt_err *err)
{
    const ckpt_status status = ready_for("narrow", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH_OF(c, narrow, ceil_div(n, THREADS), THREADS, 0, n, x, (T_ *)to);
    return launched("narrow", err);
}

ckpt_status ckpt_cuda_copy_columns(const ckpt_cuda *c, int64_t rows, int64_t n, const void *from,
                                   int64_t ld_from, void *to, int64_t ld_to, ckpt_err *err)
{
    if (rows < 0 || n < 0 || rows > INT64_MAX / (n + 1) || (rows > 1 && (ld_from < 0 || ld_to < n)))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "copy on CUDA: %lld rows of %lld, strides %lld and %lld", (long long)rows,
                         (long long)n, (long long)ld_from, (long long)ld_to);
    const ckpt_status status = ready_for("copy", c, rows * n, THREADS, err);
    if (status != CKPT_OK || rows == 0 || n == 0)
        return status;
    const columns_args p = {rows, n, ld_from, ld_to, from, to};
    LAUNCH_OF(c, copy_columns, ceil_div(rows * n, THREADS), THREADS, 0, p);
    return launched("copy", err);
}

template <int KIND>
static ckpt_status run_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                             const float *from, float *to, ckpt_err *err)
{
    if (rows < 0 || G < 1 || n < 0 || rows > INT64_MAX / G / (n + 1))
        return ckpt_fail(err, CKPT_E_USAGE, "heads on CUDA: %lld rows of %lld, %lld together",
                         (long long)rows, (long long)n, (long long)G);
    const int64_t all = rows * n * (KIND == REPEAT ? G : 1);
    const ckpt_status status = ready_for("heads", c, all, THREADS, err);
    if (status != CKPT_OK || all == 0)
        return status;
    LAUNCH(heads<KIND>, ceil_div(all, THREADS), THREADS, 0, stream_of(c->stream), rows, G, n, from,
           to);
    return launched("heads", err);
}
ckpt_status ckpt_cuda_repeat_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                   const float *from, float *to, ckpt_err *err)
{
    return run_heads<REPEAT>(c, rows, G, n, from, to, err);
}
ckpt_status ckpt_cuda_sum_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                const float *from, float *to, ckpt_err *err)
{
    return run_heads<SUM>(c, rows, G, n, from, to, err);
}
ckpt_status ckpt_cuda_first_heads(const ckpt_cuda *c, int64_t rows, int64_t G, int64_t n,
                                  const float *from, float *to, ckpt_err *err)
{
    return run_heads<FIRST>(c, rows, G, n, from, to, err);
}

ckpt_status ckpt_cuda_split_heads(const ckpt_cuda *c, const ckpt_cuda_mla *b, int64_t T,
                                  const void *kv, const void *kv_a, void *k, void *v, ckpt_err *err)
{
    const int64_t n = T * b->N * (b->DN + b->DR + b->DV);
    const ckpt_status status = ready_for("mla", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    const mla_args p = {*b, T, kv, kv_a, k, v};
    LAUNCH_OF(c, split_heads, ceil_div(n, THREADS), THREADS, 0, p);
    return launched("mla", err);
}
ckpt_status ckpt_cuda_fold_heads(const ckpt_cuda *c, const ckpt_cuda_mla *b, int64_t T,
                                 const void *dk, const void *dv, void *dkv, void *dkv_a,
                                 ckpt_err *err)
{
    const int64_t n = T * (b->N * (b->DN + b->DV) + b->DR);
    const ckpt_status status = ready_for("mla backward", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    const mla_args p = {*b, T, dk, dv, dkv, dkv_a};
    LAUNCH_OF(c, fold_heads, ceil_div(n, THREADS), THREADS, 0, p);
    return launched("mla backward", err);
}

ckpt_status ckpt_cuda_gate_heads(const ckpt_cuda *c, int64_t T, int64_t N, int64_t D, int64_t per,
                                 const void *o, const void *g, void *y, ckpt_err *err)
{
    const ckpt_status status = ready_for("output gate", c, T * N, WARPS, err);
    if (status != CKPT_OK || T * N == 0)
        return status;
    const gate_args p = {T * N, D, per, o, g, NULL, y, NULL};
    LAUNCH_OF(c, gate_heads, ceil_div(T * N, WARPS), THREADS, 0, p);
    return launched("output gate", err);
}
ckpt_status ckpt_cuda_gate_heads_bwd(const ckpt_cuda *c, int64_t T, int64_t N, int64_t D,
                                     int64_t per, const void *o, const void *g, const void *dy,
                                     void *d_o, void *dg, ckpt_err *err)
{
    const ckpt_status status = ready_for("output gate backward", c, T * N, WARPS, err);
    if (status != CKPT_OK || T * N == 0)
        return status;
    const gate_args p = {T * N, D, per, o, g, dy, d_o, dg};
    LAUNCH_OF(c, gate_heads_back, ceil_div(T * N, WARPS), THREADS, 0, p);
    return launched("output gate backward", err);
}

ckpt_status ckpt_cuda_shift_tokens(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int32_t last,
                                   const int32_t *from, int32_t *to, ckpt_err *err)
{
    const ckpt_status status = ready_for("shift", c, seq->tokens, THREADS, err);
    if (status != CKPT_OK || seq->tokens == 0)
        return status;
    LAUNCH(shift_tokens<0>, ceil_div(seq->tokens, THREADS), THREADS, 0, stream_of(c->stream),
           seq->tokens, seq->n, seq->cu, last, from, to);
    return launched("shift", err);
}

ckpt_status ckpt_cuda_loss_weights(const ckpt_cuda *c, int64_t T, const int32_t *labels,
                                   double share, float *weight, int64_t *n, ckpt_err *err)
{
    const ckpt_status status = ready_for("loss weights", c, T, THREADS, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH(loss_weights<0>, 1, THREADS, THREADS * 8, stream_of(c->stream), T, labels, share, weight,
           n);
    return launched("loss weights", err);
}
ckpt_status ckpt_cuda_mean_loss(const ckpt_cuda *c, int64_t T, const float *loss, const int64_t *n,
                                double *out, ckpt_err *err)
{
    const ckpt_status status = ready_for("loss", c, T, THREADS, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH(mean_loss<0>, 1, THREADS, THREADS * 8, stream_of(c->stream), T, loss, n, out);
    return launched("loss", err);
}

ckpt_status ckpt_cuda_watch(const ckpt_cuda *c, int64_t n, const void *x, int64_t *at,
                            ckpt_err *err)
{
    ckpt_status status = ready_for("watch", c, n, THREADS, err);
    if (status == CKPT_OK && c->bytes < CKPT_CUDA_WATCH)
        status = ckpt_fail(err, CKPT_E_USAGE, "watch on CUDA: workspace of %zu bytes", c->bytes);
    if (status != CKPT_OK)
        return status;
    int64_t piece = ceil_div(ceil_div(n, MOST_BLOCKS), THREADS) * THREADS;
    const int64_t blocks = n > 0 ? ceil_div(n, piece) : 0;
    if (blocks > 0)
        LAUNCH_OF(c, watch, blocks, THREADS, THREADS * 8, n, piece, (const T_ *)x,
                  (int64_t *)c->work);
    LAUNCH(watch_end<0>, 1, THREADS, THREADS * 8, stream_of(c->stream), blocks,
           (const int64_t *)c->work, at);
    return launched("watch", err);
}

ckpt_status ckpt_cuda_experts_act(const ckpt_cuda *c, int64_t n, int64_t F, const void *gate,
                                  const void *up, const float *weight, const int32_t *slot_of,
                                  void *act, ckpt_err *err)
{
    const ckpt_status status = ready_for("experts", c, n * F, THREADS, err);
    if (status != CKPT_OK || n * F == 0)
        return status;
    const act_args p = {n, F, gate, up, weight, slot_of, act, NULL, NULL, NULL};
    LAUNCH_OF(c, experts_act, ceil_div(n * F, THREADS), THREADS, 0, p);
    return launched("experts", err);
}
ckpt_status ckpt_cuda_experts_act_bwd(const ckpt_cuda *c, int64_t n, int64_t F, const void *gate,
                                      const void *up, const float *weight, const int32_t *slot_of,
                                      void *act, void *dgate, void *dup, float *dweight,
                                      ckpt_err *err)
{
    const ckpt_status status = ready_for("experts backward", c, n, WARPS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    const act_args p = {n, F, gate, up, weight, slot_of, act, dgate, dup, dweight};
    LAUNCH_OF(c, experts_act_back, ceil_div(n, WARPS), THREADS, 0, p);
    return launched("experts backward", err);
}

ckpt_status ckpt_cuda_side_losses(const ckpt_cuda *c, int64_t T, int64_t E, bool softmax,
                                  const float *score, const float *lse, const int64_t *balance,
                                  double coef, double z_coef, double *out, ckpt_err *err)
{
    const ckpt_status status = ready_for("side losses", c, T, THREADS, err);
    if (status != CKPT_OK)
        return status;
    const side_args p = {T, E, softmax, score, lse, balance, coef, z_coef, out};
    LAUNCH(side_losses<0>, 1, THREADS, THREADS * 8, stream_of(c->stream), p);
    return launched("side losses", err);
}
ckpt_status ckpt_cuda_counts(const ckpt_cuda *c, int64_t E, const int64_t *first, int64_t *out,
                             ckpt_err *err)
{
    const ckpt_status status = ready_for("counts", c, E, THREADS, err);
    if (status != CKPT_OK || E == 0)
        return status;
    LAUNCH(counts<0>, ceil_div(E, THREADS), THREADS, 0, stream_of(c->stream), E, first, out);
    return launched("counts", err);
}
