/* Causal depthwise convolution + SiLU, forward and backward, packed sequences and history.
 *
 * A thread is 4 channels of a strip of tokens: the last inputs and, backward, the unfinished rows of dx
 * slide through registers, so x and dy are read once but for the rows that strips share. The next rows
 * are loaded, without a branch between them, before the rows at hand are used. Backward sums dw and dbias over a strip; sum_columns adds strips.
 * Formulas: engine/kernels/conv.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int VC = 4, AHEAD = 8, AHEAD_BACK = 4; /* rows on their way */

/* VC channels of a row, as loaded. WIDE: all of them exist and rows are aligned to them. */
template <class E, bool WIDE> struct four {
    float x[VC];
    DEV void load(const E *row, int64_t c, int64_t C)
    {
        get(row, c, C, false, x);
    }
    DEV void load_none()
    {
        for (int i = 0; i < VC; i++)
            x[i] = 0;
    }
    DEV float operator[](int i) const
    {
        return x[i];
    }
};
template <> struct four<float, true> {
    vec<float> v;
    DEV void load(const float *row, int64_t c, int64_t)
    {
        v = load16(row + c);
    }
    DEV void load_none()
    {
        v = vec<float>{};
    }
    DEV float operator[](int i) const
    {
        return v.e[i];
    }
};
template <> struct four<bf16, true> {
    uint64_t v;
    DEV void load(const bf16 *row, int64_t c, int64_t)
    {
        v = *(const uint64_t *)(row + c);
    }
    DEV void load_none()
    {
        v = 0;
    }
    DEV float operator[](int i) const
    {
        return bits_to_float((uint32_t)(v >> 16 * i) << 16);
    }
};

struct conv_args {
    int64_t N, T, C, strip, bands; /* bands: blocks side by side over channels */
    const int64_t *cu;
    int W;
    bool wide;
    const void *x, *history, *dy;
    const float *w, *bias;
    void *y, *out; /* out: last, or dhistory */
    float *partial;
};

/* WT taps, the first WT - W of them without meaning. */
template <class E, int WT, bool WIDE> struct strip {
    typedef four<E, WIDE> value;
    const conv_args &p;
    int64_t c, seq, start, next;          /* first channel; the sequence and its borders */
    float w[WT][VC], bias[VC], x[WT][VC]; /* x: the window, newest last */

    DEV explicit strip(const conv_args &a, int64_t channel) : p(a), c(channel)
    {
#pragma unroll
        for (int i = 0; i < VC; i++) {
            const bool here = c + i < p.C;
            bias[i] = here && p.bias ? p.bias[c + i] : 0.f;
#pragma unroll
            for (int j = 0; j < WT; j++) {
                const int tap = j - (WT - p.W);
                w[j][i] = here && tap >= 0 ? p.w[(c + i) * p.W + tap] : 0.f;
            }
        }
    }
    /* The sequence of token t, which exists. */
    DEV void find(int64_t t)
    {
        int64_t lo = 0, hi = p.N - 1;
        while (lo < hi) {
            const int64_t mid = (lo + hi) / 2;
            if (p.cu[mid + 1] > t)
                hi = mid;
            else
                lo = mid + 1;
        }
        enter(lo);
    }
    DEV void enter(int64_t s)
    {
        seq = s;
        start = p.cu[s];
        next = p.cu[s + 1];
    }
    DEV void enter_after(int64_t t)
    {
        int64_t s = seq + 1;
        while (p.cu[s + 1] <= t)
            s++;
        enter(s);
    }
    /* Row t of x, which may lie before the sequence. */
    DEV value row(int64_t t) const
    {
        const int64_t back = start - t; /* > 0 in the history */
        const E *from = (const E *)p.x + t * p.C;
        value r;
        if (back > 0)
            from = (const E *)p.history + (seq * (p.W - 1) + p.W - 1 - back) * p.C;
        if (back <= 0 || (p.history && back < p.W))
            r.load(from, c, p.C);
        else
            r.load_none();
        return r;
    }
    /* N rows of an array from token t on, of which those from `end` on are not used. */
    template <int N> DEV void ahead(value (&r)[N], const void *from, int64_t t, int64_t end) const
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            r[i].load((const E *)from + (t + i < end ? t + i : end - 1) * p.C, c, p.C);
    }
    /* The window before token t. */
    DEV void fill(int64_t t)
    {
        value r[WT];
#pragma unroll
        for (int j = 1; j < WT; j++)
            r[j] = row(t - WT + j);
#pragma unroll
        for (int j = 1; j < WT; j++)
#pragma unroll
            for (int i = 0; i < VC; i++)
                x[j][i] = r[j][i];
    }
    /* Slide in a row and give the sum before the activation. */
    DEV void step(const value &fresh, float (&sum)[VC])
    {
#pragma unroll
        for (int j = 0; j < WT; j++) {
#pragma unroll
            for (int i = 0; i < VC; i++)
                x[j][i] = j + 1 < WT ? x[j + 1 < WT ? j + 1 : j][i] : fresh[i];
        }
#pragma unroll
        for (int i = 0; i < VC; i++)
            sum[i] = bias[i];
#pragma unroll
        for (int j = 0; j < WT; j++)
            if (j >= WT - p.W) {
#pragma unroll
                for (int i = 0; i < VC; i++)
                    sum[i] += w[j][i] * x[j][i];
            }
    }
};

DEV int64_t channel_of(const conv_args &p)
{
    return ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VC;
}

template <class E, int WT, bool WIDE>
KERNEL(THREADS, sizeof(E) == 2 && WT == 4 && WIDE ? 3 : 1)
conv(conv_args p)
{
    const int64_t c = channel_of(p), a = blockIdx.x / p.bands * p.strip;
    const int64_t b = a + p.strip < p.T ? a + p.strip : p.T;
    if (c >= p.C)
        return;
    strip<E, WT, WIDE> s(p, c);
    four<E, WIDE> x[AHEAD], next[AHEAD];
    s.ahead(next, p.x, a, b);
    s.find(a);
    s.fill(a);
    for (int64_t t0 = a; t0 < b; t0 += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            x[i] = next[i];
        if (t0 + AHEAD < b)
            s.ahead(next, p.x, t0 + AHEAD, b);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int64_t t = t0 + i;
            float sum[VC];
            if (t >= b)
                break;
            if (t == s.next) {
                s.enter_after(t);
                s.fill(t);
            }
            s.step(x[i], sum);
#pragma unroll
            for (int k = 0; k < VC; k++)
                sum[k] *= logistic(sum[k]);
            put((E *)p.y + t * p.C, c, p.C, WIDE, sum);
        }
    }
}

/* A token's gradient of the sum goes to the WT newest rows of g; the oldest is then finished. Tokens
 * beyond the strip are walked for the rows that they finish. */
template <class E, int WT, bool WIDE>
KERNEL(THREADS, sizeof(E) == 2 && WT == 4 && WIDE ? 2 : 1)
conv_back(conv_args p)
{
    const int64_t c = channel_of(p), a = blockIdx.x / p.bands * p.strip;
    const int64_t b = a + p.strip < p.T ? a + p.strip : p.T;
    const int64_t end = b + WT - 1 < p.T ? b + WT - 1 : p.T;
    if (c >= p.C)
        return;
    float g[WT][VC] = {}, dw[WT][VC] = {}, db[VC] = {};
    strip<E, WT, WIDE> s(p, c);
    four<E, WIDE> x[AHEAD_BACK], dy[AHEAD_BACK], next_x[AHEAD_BACK], next_dy[AHEAD_BACK];
    s.ahead(next_x, p.x, a, end);
    s.ahead(next_dy, p.dy, a, end);
    s.find(a);
    s.fill(a);
    int64_t t = a;
    bool done = false;
    while (t < end && !done) {
#pragma unroll
        for (int i = 0; i < AHEAD_BACK; i++) {
            x[i] = next_x[i];
            dy[i] = next_dy[i];
        }
        if (t + AHEAD_BACK < end) {
            s.ahead(next_x, p.x, t + AHEAD_BACK, end);
            s.ahead(next_dy, p.dy, t + AHEAD_BACK, end);
        }
#pragma unroll
        for (int i = 0; i < AHEAD_BACK; i++) {
            float sum[VC];
            if (t >= end)
                break;
            if (t == s.next) {
#pragma unroll
                for (int j = 1; j < WT; j++) {
                    const int64_t to = t - WT + j;
                    if (to >= s.start && to >= a && to < b)
                        put((E *)p.y + to * p.C, c, p.C, WIDE, g[j]);
#pragma unroll
                    for (int k = 0; k < VC; k++)
                        g[j][k] = 0;
                }
                done = t >= b;
                if (done)
                    break;
                s.enter_after(t);
                s.fill(t);
            }
            s.step(x[i], sum);
#pragma unroll
            for (int k = 0; k < VC; k++) {
                const float d = dy[i][k] * silu_slope(sum[k], logistic(sum[k]));
                db[k] += t < b ? d : 0.f;
#pragma unroll
                for (int j = 0; j < WT; j++) {
                    g[j][k] = j + 1 < WT ? g[j + 1 < WT ? j + 1 : j][k] : 0.f;
                    g[j][k] += s.w[j][k] * d;
                    dw[j][k] += t < b ? s.x[j][k] * d : 0.f;
                }
            }
            const int64_t to = t - WT + 1;
            if (to >= s.start && to >= a && to < b)
                put((E *)p.y + to * p.C, c, p.C, WIDE, g[0]);
            t++;
        }
    }
    if (t == p.T) {
#pragma unroll
        for (int j = 1; j < WT; j++) {
            const int64_t to = t - WT + j;
            if (to >= s.start && to >= a && to < b)
                put((E *)p.y + to * p.C, c, p.C, WIDE, g[j]);
        }
    }
    if (!p.partial)
        return;
    float *to = p.partial + blockIdx.x / p.bands * p.C * (p.W + 1);
#pragma unroll
    for (int k = 0; k < VC; k++)
        if (c + k < p.C) {
#pragma unroll
            for (int j = 0; j < WT; j++)
                if (j >= WT - p.W)
                    to[(c + k) * p.W + j - (WT - p.W)] = dw[j][k];
            to[p.C * p.W + c + k] = db[k];
        }
}

/* The history after each sequence; rows move to lower places only, so it may be the old array. */
template <class E> KERNEL(THREADS, 1) conv_last(conv_args p)
{
    const int64_t i = index_of(), n = i / p.C, c = i % p.C;
    const int64_t keep = p.W - 1;
    if (n >= p.N)
        return;
    const int64_t start = p.cu[n], length = p.cu[n + 1] - start;
    for (int64_t r = 0; r < keep; r++) {
        const int64_t at = length - keep + r;
        E value = cast<E>(0.f);
        if (at >= 0)
            value = ((const E *)p.x)[(start + at) * p.C + c];
        else if (p.history)
            value = ((const E *)p.history)[(n * keep + keep + at) * p.C + c];
        ((E *)p.out)[(n * keep + r) * p.C + c] = value;
    }
}

/* Gradient of the history: the first W - 1 tokens of a sequence look into it. */
template <class E, int WT> KERNEL(THREADS, 1) conv_history(conv_args p)
{
    const int64_t per = ceil_div(p.C, VC), i = index_of();
    const int64_t n = i / per, c = i % per * VC, keep = p.W - 1;
    if (n >= p.N)
        return;
    strip<E, WT, false> s(p, c);
    s.enter(n);
    s.fill(s.start);
    float g[WT][VC] = {};
#pragma unroll
    for (int r = 0; r < WT - 1; r++) {
        const int64_t t = s.start + r;
        float sum[VC], d[VC];
        if (t >= s.next)
            break;
        s.step(s.row(t), sum);
        get((const E *)p.dy + t * p.C, c, p.C, p.wide, d);
#pragma unroll
        for (int k = 0; k < VC; k++) {
            d[k] *= silu_slope(sum[k], logistic(sum[k]));
#pragma unroll
            for (int j = 0; j + r < WT - 1; j++) /* tap j of token r reads row r - (WT - 1) + j */
                g[j + r][k] += s.w[j][k] * d[k];
        }
    }
#pragma unroll
    for (int j = 0; j < WT - 1; j++) /* row j - (WT - 1); rows older than W - 1 do not exist */
        if (j >= WT - p.W)
            put((E *)p.out + (n * keep + j - (WT - p.W)) * p.C, c, p.C, p.wide, g[j]);
}

ckpt_status measure(const char *what, const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C,
                    int64_t W, int64_t columns, conv_args *p, ckpt_err *err)
{
    if (C < 0 || W < 1 || seq->n < 0 || seq->tokens < 0 || (seq->n == 0 && seq->tokens > 0))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%s on CUDA: %lld channels, width %lld, %lld tokens of %lld sequences",
                         what, (long long)C, (long long)W, (long long)seq->tokens,
                         (long long)seq->n);
    if (W > 8)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s on CUDA: width %lld above 8", what,
                         (long long)W);
    *p = conv_args{};
    p->N = seq->n, p->T = seq->tokens, p->cu = seq->cu, p->C = C, p->W = (int)W;
    p->wide = C % VC == 0;
    p->bands = ceil_div(C, THREADS * VC);
    ckpt_status status = ready(what, c, columns, err);
    if (status == CKPT_OK)
        status = grid_fits(what, p->bands * (p->T + 1), err);
    if (status == CKPT_OK)
        status = grid_fits(what, ceil_div(p->N * C, THREADS), err);
    return status;
}

template <class E, int WT> void forward(const conv_args &p, device_stream stream)
{
    const int64_t blocks = p.bands * ceil_div(p.T, p.strip);
    if (p.T > 0 && p.wide)
        LAUNCH((conv<E, WT, true>), blocks, THREADS, 0, stream, p);
    else if (p.T > 0)
        LAUNCH((conv<E, WT, false>), blocks, THREADS, 0, stream, p);
    if (p.out && p.W > 1)
        LAUNCH((conv_last<E>), ceil_div(p.N * p.C, THREADS), THREADS, 0, stream, p);
}
template <class E, int WT> void backward(const conv_args &p, device_stream stream)
{
    const int64_t blocks = p.bands * ceil_div(p.T, p.strip);
    if (p.T > 0 && p.wide)
        LAUNCH((conv_back<E, WT, true>), blocks, THREADS, 0, stream, p);
    else if (p.T > 0)
        LAUNCH((conv_back<E, WT, false>), blocks, THREADS, 0, stream, p);
    if (p.out && p.W > 1)
        LAUNCH((conv_history<E, WT>), ceil_div(p.N * ceil_div(p.C, VC), THREADS), THREADS, 0,
               stream, p);
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_conv(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                           const void *x, const float *w, const float *bias, const void *history,
                           void *y, void *last, ckpt_err *err)
{
    conv_args p;
    const ckpt_status status = measure("conv", c, seq, C, W, 0, &p, err);
    if (status != CKPT_OK || C == 0 || p.N == 0)
        return status;
    p.x = x, p.w = w, p.bias = bias, p.history = history, p.y = y, p.out = last;
    p.strip = 32;
    const device_stream stream = stream_of(c->stream);
    if (c->type == CKPT_CUDA_BF16)
        W <= 4 ? forward<bf16, 4>(p, stream) : forward<bf16, 8>(p, stream);
    else
        W <= 4 ? forward<float, 4>(p, stream) : forward<float, 8>(p, stream);
    return launched("conv", err);
}

ckpt_status ckpt_cuda_conv_bwd(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                               const void *x, const float *w, const float *bias,
                               const void *history, const void *dy, void *dx, float *dw,
                               float *dbias, void *dhistory, ckpt_err *err)
{
    conv_args p;
    const bool sums = dw || dbias;
    ckpt_status status = measure("conv backward", c, seq, C, W, sums ? C * (W + 1) : 0, &p, err);
    if (status != CKPT_OK || C == 0 || p.N == 0)
        return status;
    p.x = x, p.w = w, p.bias = bias, p.history = history, p.dy = dy, p.y = dx, p.out = dhistory;
    p.strip = ceil_div(p.T, CKPT_CUDA_PARTS / 4);
    p.strip = p.strip < 64 ? 64 : p.strip;
    p.partial = sums ? (float *)c->work : NULL;
    const device_stream stream = stream_of(c->stream);
    if (c->type == CKPT_CUDA_BF16)
        W <= 4 ? backward<bf16, 4>(p, stream) : backward<bf16, 8>(p, stream);
    else
        W <= 4 ? backward<float, 4>(p, stream) : backward<float, 8>(p, stream);
    status = launched("conv backward", err);
    if (!sums || p.T == 0)
        return status;
    const int64_t parts = ceil_div(p.T, p.strip), columns = C * (W + 1);
    if (status == CKPT_OK && dw)
        status = sum_columns(stream, p.partial, parts, C * W, columns, true, dw, err);
    if (status == CKPT_OK && dbias)
        status = sum_columns(stream, p.partial + C * W, parts, C, columns, true, dbias, err);
    return status;
}
