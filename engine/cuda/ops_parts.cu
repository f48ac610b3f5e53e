/* See parts.h. A warp a token in the loss: each lane reads every 32nd column, so traffic is the logits
 * three times and their gradient; sums of a lane in order, then over lanes by halves. */
#include "parts.h"

#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int WARPS = THREADS / 32;

KERNEL(THREADS, 1)
add_columns(int64_t rows, int64_t n, const float *from, int64_t ld_from, float *to, int64_t ld_to)
{
    const int64_t i = index_of();
    if (i < rows * n)
        to[i / n * ld_to + i % n] += from[i / n * ld_from + i % n];
}

KERNEL(THREADS, 1) share_weights(int64_t T, double share, const int64_t *n, float *weight)
{
    const int64_t t = index_of();
    if (t < T)
        weight[t] = *n > 0 ? (float)(share / (double)*n) : 0.f;
}

DEV float higher(float a, float b)
{
    return a != a ? a : b != b ? b : a > b ? a : b;
}

struct part_args {
    int64_t T, lo, n;
    const void *logits;
    const int32_t *labels;
    const float *weight, *top, *sum, *at;
    float *out, *more;
    void *dlogits;
};

/* pass 0: top; 1: sums; 2: loss and gradient. */
template <class E> KERNEL(THREADS, 1) part_token(part_args p, int pass)
{
    const int64_t t = warp_of();
    if (t >= p.T)
        return;
    const E *z = (const E *)p.logits + t * p.n;
    const int me = lane();
    if (pass == 0) {
        float top = -INFINITY;
        for (int64_t i = me; i < p.n; i += 32)
            top = higher(top, to_f(z[i]));
        for (int mask = 16; mask > 0; mask /= 2)
            top = higher(top, shuffle_xor(top, mask));
        if (me == 0)
            p.out[t] = top;
        return;
    }
    const int64_t label = p.labels[t] - p.lo;
    const float top = p.top[t];
    if (pass == 1) {
        float sum = 0;
        for (int64_t i = me; i < p.n; i += 32)
            sum += exp_of(to_f(z[i]) - top);
        sum = group_sum<32>(sum, NULL);
        if (me == 0) {
            p.out[t] = sum;
            p.more[t] = p.labels[t] >= 0 && label >= 0 && label < p.n ? to_f(z[label]) - top : 0.f;
        }
        return;
    }
    const bool counts = p.labels[t] >= 0;
    const float scale = counts && p.dlogits ? p.weight[t] / p.sum[t] : 0.f;
    E *d = p.dlogits ? (E *)p.dlogits + t * p.n : NULL;
    for (int64_t i = me; d && i < p.n; i += 32) {
        float x = counts ? exp_of(to_f(z[i]) - top) * scale : 0.f;
        if (counts && i == label)
            x -= p.weight[t];
        d[i] = cast<E>(x);
    }
    if (me == 0)
        p.out[t] = counts ? logf(p.sum[t]) - p.at[t] : 0.f;
}

ckpt_status run_part(const ckpt_cuda *c, const part_args &p, int pass, ckpt_err *err)
{
    const int64_t blocks = ceil_div(p.T, WARPS);
    ckpt_status status = ready("loss over ranks", c, 0, err);
    if (status == CKPT_OK && (p.T < 0 || p.n < 1))
        status =
            ckpt_fail(err, CKPT_E_USAGE, "loss over ranks on CUDA: %lld tokens of %lld columns",
                      (long long)p.T, (long long)p.n);
    if (status == CKPT_OK)
        status = grid_fits("loss over ranks", blocks, err);
    if (status != CKPT_OK || p.T == 0)
        return status;
    LAUNCH_OF(c, part_token, blocks, THREADS, 0, p, pass);
    return launched("loss over ranks", err);
}

} // namespace
} // namespace kda

using namespace kda;

extern "C" ckpt_status ckpt_cuda_add_columns(const ckpt_cuda *c, int64_t rows, int64_t n,
                                             const float *from, int64_t ld_from, float *to,
                                             int64_t ld_to, ckpt_err *err)
{
    const int64_t blocks = ceil_div(rows * n, THREADS);
    const ckpt_status status = grid_fits("sum of columns", blocks, err);
    if (status != CKPT_OK || blocks == 0)
        return status;
    LAUNCH(add_columns, blocks, THREADS, 0, stream_of(c->stream), rows, n, from, ld_from, to,
           ld_to);
    return launched("sum of columns", err);
}

extern "C" ckpt_status ckpt_cuda_share_weights(const ckpt_cuda *c, int64_t T, double share,
                                               const int64_t *n, float *weight, ckpt_err *err)
{
    const int64_t blocks = ceil_div(T, THREADS);
    const ckpt_status status = grid_fits("weights of labels", blocks, err);
    if (status != CKPT_OK || blocks == 0)
        return status;
    LAUNCH(share_weights, blocks, THREADS, 0, stream_of(c->stream), T, share, n, weight);
    return launched("weights of labels", err);
}

extern "C" ckpt_status ckpt_cuda_xent_top(const ckpt_cuda *c, int64_t T, int64_t n,
                                          const void *logits, float *top, ckpt_err *err)
{
    part_args p = {};
    p.T = T;
    p.n = n;
    p.logits = logits;
    p.out = top;
    return run_part(c, p, 0, err);
}

extern "C" ckpt_status ckpt_cuda_xent_sums(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n,
                                           const void *logits, const int32_t *labels,
                                           const float *top, float *sum, float *at, ckpt_err *err)
{
    part_args p = {};
    p.T = T;
    p.lo = lo;
    p.n = n;
    p.logits = logits;
    p.labels = labels;
    p.top = top;
    p.out = sum;
    p.more = at;
    return run_part(c, p, 1, err);
}

extern "C" ckpt_status ckpt_cuda_xent_end(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n,
                                          const void *logits, const int32_t *labels,
                                          const float *weight, const float *top, const float *sum,
                                          const float *at, float *loss, void *dlogits,
                                          ckpt_err *err)
{
    part_args p = {};
    p.T = T;
    p.lo = lo;
    p.n = n;
    p.logits = logits;
    p.labels = labels;
    p.weight = weight;
    p.top = top;
    p.sum = sum;
    p.at = at;
    p.out = loss;
    p.dlogits = dlogits;
    return run_part(c, p, 2, err);
}
