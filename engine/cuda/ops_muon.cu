/* Muon's elementwise parts, and rounding to bf16 (move.h): the CPU's bits (train/elementwise.c, muon.c),
 * so compiled as the optimizer is (tools/make/cuda.mk). A thread an element. */
#include "move.h"

#include "ops_common.cuh"

#include <string.h>

namespace kda
{
namespace
{

DEV float lerp_of(float from, float to, float weight)
{
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.f - weight);
}
DEV float rounded(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u = (u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return bits_to_float(u << 16);
}

template <int N> KERNEL(THREADS, 1) round_all(int64_t n, const float *x, float *y)
{
    const int64_t i = index_of();
    if (i < n)
        y[i] = rounded(x[i]);
}
template <int N>
KERNEL(THREADS, 1)
direction(int64_t n, float own, const float *kept, float rise, bool nesterov, const float *g,
          float *m, float *d)
{
    const int64_t i = index_of();
    const float scale = kept ? *kept : own;
    if (i >= n)
        return;
    const float gi = g[i] * scale, mi = lerp_of(m[i], gi, rise);
    m[i] = mi;
    d[i] = nesterov ? lerp_of(gi, mi, 1.f - rise) : mi;
}
template <int N>
KERNEL(THREADS, 1)
apply(int64_t n, float own_decay, const float *kept_decay, float own_negative,
      const float *kept_negative, float factor, const float *x, float *w)
{
    const int64_t i = index_of();
    const float decay = kept_decay ? *kept_decay : own_decay;
    const float negative = kept_negative ? *kept_negative : own_negative;
    if (i < n)
        w[i] = w[i] * decay + negative * (factor * x[i]);
}

struct load_args {
    int64_t rows, cols;
    bool turn, round;
    const float *x;
    const double *norm;
    float *y;
};
template <int N> KERNEL(THREADS, 1) load(load_args p)
{
    const int64_t i = index_of(), r = i / p.cols, c = i % p.cols;
    if (r >= p.rows)
        return;
    float x = p.x[i];
    if (p.norm) {
        const float norm = (float)*p.norm;
        x /= norm < 1e-7f ? 1e-7f : norm; /* a NaN stays */
    }
    p.y[p.turn ? c * p.rows + r : i] = p.round ? rounded(x) : x;
}
template <int N>
KERNEL(THREADS, 1)
mix(int64_t n, float a, const float *x, float b, bool round, float *y)
{
    const int64_t i = index_of();
    if (i >= n)
        return;
    const float v = a * x[i] + b * y[i];
    y[i] = round ? rounded(v) : v;
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_round_bf16(const ckpt_cuda *c, int64_t n, const float *x, float *y,
                                 ckpt_err *err)
{
    const ckpt_status status = ready_for("rounding", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(round_all<0>, ceil_div(n, THREADS), THREADS, 0, stream_of(c->stream), n, x, y);
    return launched("rounding", err);
}

static ckpt_status direct(const ckpt_cuda *c, int64_t n, float own, const float *kept, float rise,
                          bool nesterov, const float *g, float *m, float *d, ckpt_err *err)
{
    const ckpt_status status = ready_for("muon", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(direction<0>, ceil_div(n, THREADS), THREADS, 0, stream_of(c->stream), n, own, kept, rise,
           nesterov, g, m, d);
    return launched("muon", err);
}
ckpt_status ckpt_cuda_muon_direction(const ckpt_cuda *c, int64_t n, float scale, float rise,
                                     bool nesterov, const float *g, float *m, float *d,
                                     ckpt_err *err)
{
    return direct(c, n, scale, NULL, rise, nesterov, g, m, d, err);
}
ckpt_status ckpt_cuda_muon_direction_kept(const ckpt_cuda *c, int64_t n, const float *scale,
                                          float rise, bool nesterov, const float *g, float *m,
                                          float *d, ckpt_err *err)
{
    return direct(c, n, 0, scale, rise, nesterov, g, m, d, err);
}

static ckpt_status applied(const ckpt_cuda *c, int64_t n, float own_decay, const float *decay,
                           float own_negative, const float *negative, float factor, const float *x,
                           float *w, ckpt_err *err)
{
    const ckpt_status status = ready_for("muon", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(apply<0>, ceil_div(n, THREADS), THREADS, 0, stream_of(c->stream), n, own_decay, decay,
           own_negative, negative, factor, x, w);
    return launched("muon", err);
}
ckpt_status ckpt_cuda_muon_apply(const ckpt_cuda *c, int64_t n, float decay, float negative,
                                 float factor, const float *x, float *w, ckpt_err *err)
{
    return applied(c, n, decay, NULL, negative, NULL, factor, x, w, err);
}
ckpt_status ckpt_cuda_muon_apply_kept(const ckpt_cuda *c, int64_t n, const float *decay,
                                      const float *negative, float factor, const float *x, float *w,
                                      ckpt_err *err)
{
    return applied(c, n, 0, decay, 0, negative, factor, x, w, err);
}

ckpt_status ckpt_cuda_muon_load(const ckpt_cuda *c, int64_t rows, int64_t cols, bool turn,
                                bool round, const float *x, const double *norm, float *y,
                                ckpt_err *err)
{
    if (rows < 0 || cols < 0 || rows > INT64_MAX / (cols + 1))
        return ckpt_fail(err, CKPT_E_USAGE, "muon on CUDA: a matrix of %lld x %lld",
                         (long long)rows, (long long)cols);
    const ckpt_status status = ready_for("muon", c, rows * cols, THREADS, err);
    if (status != CKPT_OK || rows * cols == 0)
        return status;
    const load_args p = {rows, cols, turn, round, x, norm, y};
    LAUNCH(load<0>, ceil_div(rows * cols, THREADS), THREADS, 0, stream_of(c->stream), p);
    return launched("muon", err);
}

ckpt_status ckpt_cuda_muon_mix(const ckpt_cuda *c, int64_t n, float a, const float *x, float b,
                               bool round, float *y, ckpt_err *err)
{
    const ckpt_status status = ready_for("muon", c, n, THREADS, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(mix<0>, ceil_div(n, THREADS), THREADS, 0, stream_of(c->stream), n, a, x, b, round, y);
    return launched("muon", err);
}
