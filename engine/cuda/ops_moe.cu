/* Mixture of experts: the router's choice, the order of rows, dispatch and combine.
 *
 * Router: a warp a token, scores in shared memory; groups are scored by a lane each, exactly in the
 * engine's order. Rows are ordered by counting: a block a piece of the slots, a thread an expert, so
 * every expert's rows are in token order without atomics. Dispatch and combine: a block a row.
 * Formulas and the rules for ties and NaN: engine/router.c, engine/moe.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int WARPS = 4, VM = 8, MOST = 1024; /* tokens of a block; experts at most */

struct route_args {
    ckpt_cuda_route r;
    int64_t T;
    const float *logit, *bias, *dweight, *in_score, *in_lse, *in_total;
    const int32_t *in_chosen;
    const int64_t *balance;
    float *score, *lse, *weight, *total, *dlogit, aux, z;
    int32_t *chosen;
};

DEV float warp_sum(float x)
{
    return group_sum<32>(x, NULL);
}
/* A NaN in the first place is chosen first, elsewhere never: what a scan with > does. */
DEV float key(const float *x, int i)
{
    return x[i] == x[i] ? x[i] : i == 0 ? INFINITY : -INFINITY;
}
/* Index of the largest of n, the first of equals; it is then taken out. By one lane. */
DEV int take_best_alone(float *x, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    x[best] = -INFINITY;
    return best;
}
/* The same by a warp. */
DEV int take_best(float *x, int n)
{
    float top = -INFINITY, best = 0;
    for (int i = lane(); i < n; i += 32) {
        const float k = key(x, i);
        if (k > top || i == lane()) {
            top = k;
            best = (float)i;
        }
    }
    if (lane() >= n)
        best = (float)n;
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = shuffle_xor(top, mask), at = shuffle_xor(best, mask);
        if (other > top || (other == top && at < best)) {
            top = other;
            best = at;
        }
    }
    if (lane() == 0)
        x[(int)best] = -INFINITY;
    sync_warp();
    return (int)best;
}

/* Leave only the best groups' scores. */
DEV void limit_groups(const ckpt_cuda_route &r, float *select, float *copy, float *group)
{
    const int E = (int)r.E, groups = (int)r.groups, size = E / groups;
    for (int i = lane(); i < E; i += 32)
        copy[i] = select[i];
    sync_warp();
    for (int g = lane(); g < groups; g += 32) {
        float sum = 0, *x = copy + g * size;
        for (int i = 0; i < r.group_best && i < size; i++) {
            float top = x[0];
            for (int c = 1; c < size; c++)
                top = x[c] > top ? x[c] : top;
            sum += top;
            (void)take_best_alone(x, size);
        }
        group[g] = sum;
    }
    sync_warp();
    if (lane() == 0) {
        for (int g = 0; g < groups; g++)
            copy[g] = 0;
        for (int g = 0; g < r.group_top_k; g++)
            copy[take_best_alone(group, groups)] = 1;
    }
    sync_warp();
    for (int i = lane(); i < E; i += 32)
        if (copy[i / size] != 1.f)
            select[i] = -INFINITY;
    sync_warp();
}

template <int W> KERNEL(W * 32, 1) route(route_args p)
{
    SHARED_MEMORY(memory);
    const ckpt_cuda_route &r = p.r;
    const int E = (int)r.E;
    const int64_t t = (int64_t)blockIdx.x * W + threadIdx.x / 32;
    float *select = (float *)memory + threadIdx.x / 32 * 3 * E, *copy = select + E;
    float top = -INFINITY, sum = 0, total = 0;
    if (t >= p.T)
        return;
    const float *z = p.logit + t * E;
    float *score = p.score + t * E;
    for (int i = lane(); i < E; i += 32)
        top = z[i] > top ? z[i] : top;
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = shuffle_xor(top, mask);
        top = other > top ? other : top;
    }
    for (int i = lane(); i < E; i += 32)
        sum += exp_of(z[i] - top);
    sum = warp_sum(sum);
    if (lane() == 0)
        p.lse[t] = top + logf(sum);
    for (int i = lane(); i < E; i += 32) {
        const float s = r.softmax ? exp_of(z[i] - top) / sum : logistic(z[i]);
        score[i] = s;
        select[i] = s + (p.bias ? p.bias[i] : 0.f);
    }
    sync_warp();
    if (r.groups > 1)
        limit_groups(r, select, copy, copy + E);
    float *weight = p.weight + t * r.top_k;
    for (int k = 0; k < r.top_k; k++) {
        const int best = take_best(select, E);
        const float s = r.softmax ? exp_of(z[best] - top) / sum : logistic(z[best]);
        total += s;
        copy[k] = s; /* each lane the same number */
        if (lane() == 0)
            p.chosen[t * r.top_k + k] = best;
    }
    total += r.softmax ? 0.f : 1e-20f;
    sync_warp();
    if (lane() == 0)
        p.total[t] = total;
    for (int k = lane(); k < r.top_k; k += 32)
        weight[k] = copy[k] / (r.normalize ? total : 1.f) * r.scale;
}

/* dlogit from dweight and the side losses: aux, z their coefficients. */
template <int W> KERNEL(W * 32, 1) route_back(route_args p)
{
    SHARED_MEMORY(memory);
    const ckpt_cuda_route &r = p.r;
    const int E = (int)r.E, K = (int)r.top_k;
    const int64_t t = (int64_t)blockIdx.x * W + threadIdx.x / 32;
    float *ds = (float *)memory + threadIdx.x / 32 * E, dot = 0;
    if (t >= p.T)
        return;
    const float *score = p.in_score + t * E, *d = p.dweight + t * K, total = p.in_total[t];
    const int32_t *chosen = p.in_chosen + t * K;
    for (int i = lane(); i < E; i += 32)
        ds[i] = 0;
    sync_warp();
    for (int k = 0; k < K && r.normalize; k++)
        dot += r.scale * d[k] * score[chosen[k]];
    for (int k = lane(); k < K; k += 32)
        ds[chosen[k]] =
            r.normalize ? r.scale * d[k] / total - dot / (total * total) : r.scale * d[k];
    sync_warp();
    if (p.balance) {
        float sum = 0, mean = 0;
        for (int i = lane(); i < E; i += 32)
            sum += score[i];
        sum = warp_sum(sum) + 1e-20f;
        for (int i = lane(); i < E; i += 32)
            mean += p.aux * (float)(p.balance[i + 1] - p.balance[i]) * (score[i] / sum);
        mean = warp_sum(mean);
        for (int i = lane(); i < E; i += 32) {
            const float b = p.aux * (float)(p.balance[i + 1] - p.balance[i]);
            ds[i] += r.softmax ? b : (b - mean) / sum;
        }
    }
    dot = 0;
    for (int i = lane(); i < E; i += 32)
        dot += ds[i] * score[i];
    dot = warp_sum(dot);
    for (int i = lane(); i < E; i += 32) {
        const float s = score[i];
        float dz = r.softmax ? s * (ds[i] - dot) : ds[i] * s * (1.f - s);
        if (p.z != 0.f)
            dz += p.z * p.in_lse[t] * exp_of(p.logit[t * E + i] - p.in_lse[t]);
        p.dlogit[t * E + i] = dz;
    }
}

/* ---- order of rows -------------------------------------------------------------------------- */

struct order_args {
    int64_t n, piece, E, pieces;
    const int32_t *chosen;
    int64_t *first;
    int32_t *row_of, *slot_of, *count; /* count [pieces, E], then each piece's first row */
};

/* fill: give the rows out, else count them. */
template <bool FILL> KERNEL(THREADS, 1) order(order_args p)
{
    SHARED_MEMORY(memory);
    int32_t *s = (int32_t *)memory;
    const int64_t lo = blockIdx.x * p.piece, hi = lo + p.piece < p.n ? lo + p.piece : p.n;
    for (int64_t e0 = 0; e0 < p.E; e0 += THREADS) {
        const int64_t e = e0 + threadIdx.x;
        int32_t *count = p.count + blockIdx.x * p.E + e;
        int32_t at = FILL && e < p.E ? *count : 0;
        for (int64_t base = lo; base < hi; base += THREADS) {
            const int here = (int)(hi - base < THREADS ? hi - base : THREADS);
            sync_block();
            if ((int)threadIdx.x < here)
                s[threadIdx.x] = p.chosen[base + threadIdx.x];
            sync_block();
            for (int i = 0; i < here; i++)
                if (s[i] == e) {
                    if (FILL) {
                        p.row_of[base + i] = at;
                        p.slot_of[at] = (int32_t)(base + i);
                    }
                    at++;
                }
        }
        if (!FILL && e < p.E)
            *count = at;
    }
}
/* Counts to first rows: over pieces by a thread an expert, then over experts. One block. */
template <int N> KERNEL(N, 1) order_starts(order_args p)
{
    SHARED_MEMORY(memory);
    int64_t *s = (int64_t *)memory;
    const int64_t e = threadIdx.x;
    int64_t sum = 0;
    for (int64_t i = 0; e < p.E && i < p.pieces; i++)
        sum += p.count[i * p.E + e];
    s[e] = sum;
    sync_block();
    if (e == 0) {
        int64_t at = 0;
        for (int64_t i = 0; i < p.E; i++) {
            const int64_t here = s[i];
            p.first[i] = s[i] = at;
            at += here;
        }
        p.first[p.E] = at;
    }
    sync_block();
    int64_t at = s[e];
    for (int64_t i = 0; e < p.E && i < p.pieces; i++) {
        const int32_t here = p.count[i * p.E + e];
        p.count[i * p.E + e] = (int32_t)at;
        at += here;
    }
}

struct row_args {
    int64_t H, k, bands;
    const int32_t *index;
    const void *x;
    void *y;
    bool add, wide;
};
template <class E> KERNEL(THREADS, 1) dispatch(row_args p)
{
    const int64_t row = blockIdx.x / p.bands, from = p.index[row] / p.k;
    const int64_t at = ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VM;
    float x[VM];
    if (at >= p.H)
        return;
    get((const E *)p.x + from * p.H, at, p.H, p.wide, x);
    put((E *)p.y + row * p.H, at, p.H, p.wide, x);
}
template <class E> KERNEL(THREADS, 1) combine(row_args p)
{
    const int64_t t = blockIdx.x / p.bands;
    const int64_t at = ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VM;
    float sum[VM], x[VM];
    if (at >= p.H)
        return;
    get((const E *)p.y + t * p.H, at, p.add ? p.H : 0, p.wide, sum);
#pragma unroll 4
    for (int64_t i = 0; i < p.k; i++) {
        get((const E *)p.x + p.index[t * p.k + i] * p.H, at, p.H, p.wide, x);
#pragma unroll
        for (int j = 0; j < VM; j++)
            sum[j] += x[j];
    }
    put((E *)p.y + t * p.H, at, p.H, p.wide, sum);
}

/* Whole numbers are compared, so the order of the sum is of no consequence. A thread an expert. */
template <int N>
KERNEL(N, 1)
balance_bias(int64_t E, const int64_t *counts, float rate, float *bias)
{
    const int64_t i = index_of();
    int64_t sum = 0;
    if (i >= E)
        return;
    for (int64_t j = 0; j < E; j++)
        sum += counts[j];
    const int64_t mean = sum / E, own = counts[i];
    if (own < mean || (own == mean && sum % E > 0))
        bias[i] += rate;
    else if (own > mean)
        bias[i] -= rate;
}

ckpt_status check_route(const ckpt_cuda_route *r, int64_t T, ckpt_err *err)
{
    bool ok = r->E > 0 && r->top_k > 0 && r->top_k <= r->E && T >= 0;
    if (r->groups > 1)
        ok = ok && r->E % r->groups == 0 && r->group_top_k > 0 && r->group_top_k <= r->groups &&
             r->group_best > 0 && r->top_k <= r->E / r->groups * r->group_top_k;
    if (!ok)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "router on CUDA: %lld tokens, %lld of %lld experts, %lld of %lld groups",
                         (long long)T, (long long)r->top_k, (long long)r->E,
                         (long long)r->group_top_k, (long long)r->groups);
    if (r->E > MOST || T > INT32_MAX / r->top_k)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "router on CUDA: %lld experts, at most %d, or %lld tokens",
                         (long long)r->E, MOST, (long long)T);
    return CKPT_OK;
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_router(const ckpt_cuda *c, const ckpt_cuda_route *r, int64_t T,
                             const float *logit, const float *bias, float *score, float *lse,
                             int32_t *chosen, float *weight, float *total, ckpt_err *err)
{
    route_args p = {};
    const ckpt_status status = check_route(r, T, err);
    if (status != CKPT_OK || T == 0)
        return status;
    p.r = *r, p.T = T, p.logit = logit, p.bias = bias, p.score = score, p.lse = lse;
    p.chosen = chosen, p.weight = weight, p.total = total;
    LAUNCH(route<WARPS>, ceil_div(T, WARPS), WARPS * 32, (size_t)r->E * 3 * WARPS * sizeof(float),
           stream_of(c->stream), p);
    return launched("router", err);
}

ckpt_status ckpt_cuda_router_bwd(const ckpt_cuda *c, const ckpt_cuda_route *r, int64_t T,
                                 const float *logit, const float *score, const float *lse,
                                 const int32_t *chosen, const float *total, const float *dweight,
                                 const int64_t *balance, double aux, double z, float *dlogit,
                                 ckpt_err *err)
{
    route_args p = {};
    const ckpt_status status = check_route(r, T, err);
    if (status != CKPT_OK || T == 0)
        return status;
    p.r = *r, p.T = T, p.logit = logit, p.in_score = score, p.in_lse = lse, p.in_chosen = chosen;
    p.in_total = total, p.dweight = dweight, p.balance = balance, p.dlogit = dlogit;
    p.aux = (float)aux, p.z = (float)z;
    LAUNCH(route_back<WARPS>, ceil_div(T, WARPS), WARPS * 32, (size_t)r->E * WARPS * sizeof(float),
           stream_of(c->stream), p);
    return launched("router backward", err);
}

ckpt_status ckpt_cuda_order(const ckpt_cuda *c, int64_t E, int64_t n, const int32_t *chosen,
                            int64_t *first, int32_t *row_of, int32_t *slot_of, ckpt_err *err)
{
    if (E <= 0 || E > MOST || n < 0 || n > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "row order on CUDA: %lld rows of %lld experts",
                         (long long)n, (long long)E);
    const ckpt_status status = ready("row order", c, E, err);
    if (status != CKPT_OK)
        return status;
    const device_stream stream = stream_of(c->stream);
    const int64_t piece = piece_of(n, 1024), pieces = n > 0 ? ceil_div(n, piece) : 0;
    const order_args p = {n, piece, E, pieces, chosen, first, row_of, slot_of, (int32_t *)c->work};
    const size_t bytes = THREADS * sizeof(int32_t);
    if (pieces > 0)
        LAUNCH(order<false>, pieces, THREADS, bytes, stream, p);
    LAUNCH(order_starts<MOST>, 1, MOST, MOST * sizeof(int64_t), stream, p);
    if (pieces > 0)
        LAUNCH(order<true>, pieces, THREADS, bytes, stream, p);
    return launched("row order", err);
}

static ckpt_status rows(const char *what, const ckpt_cuda *c, int64_t n, row_args p, bool sum,
                        ckpt_err *err)
{
    if (n < 0 || p.H < 0 || p.k <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld rows of %lld, %lld a token", what,
                         (long long)n, (long long)p.H, (long long)p.k);
    p.bands = ceil_div(p.H, THREADS * VM);
    p.wide = p.H % VM == 0;
    ckpt_status status = ready(what, c, 0, err);
    if (status == CKPT_OK)
        status = grid_fits(what, n > INT32_MAX ? n : n * p.bands, err);
    if (status != CKPT_OK || n == 0 || p.H == 0)
        return status;
    const int64_t blocks = n * p.bands;
    if (sum)
        LAUNCH_OF(c, combine, blocks, THREADS, 0, p);
    else
        LAUNCH_OF(c, dispatch, blocks, THREADS, 0, p);
    return launched(what, err);
}
ckpt_status ckpt_cuda_dispatch(const ckpt_cuda *c, int64_t n, int64_t H, int64_t k,
                               const int32_t *slot_of, const void *x, void *y, ckpt_err *err)
{
    row_args p = {};
    p.H = H, p.k = k, p.index = slot_of, p.x = x, p.y = y;
    return rows("dispatch", c, n, p, false, err);
}
ckpt_status ckpt_cuda_combine(const ckpt_cuda *c, int64_t T, int64_t H, int64_t k,
                              const int32_t *row_of, const void *x, bool add, void *y,
                              ckpt_err *err)
{
    row_args p = {};
    p.H = H, p.k = k, p.index = row_of, p.x = x, p.y = y, p.add = add;
    return rows("combine", c, T, p, true, err);
}

ckpt_status ckpt_cuda_router_bias(const ckpt_cuda *c, int64_t E, const int64_t *counts, double rate,
                                  float *bias, ckpt_err *err)
{
    const ckpt_status status = ready_for("routers' bias", c, E, THREADS, err);
    if (status != CKPT_OK || E == 0)
        return status;
    LAUNCH(balance_bias<THREADS>, ceil_div(E, THREADS), THREADS, 0, stream_of(c->stream), E, counts,
           (float)rate, bias);
    return launched("routers' bias", err);
}
