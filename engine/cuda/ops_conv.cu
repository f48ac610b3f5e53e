/* Causal depthwise convolution + SiLU, forward and backward, packed sequences and history.
 *
 * A thread is 4 channels of a strip of tokens: the last inputs and, backward, the unfinished rows of dx
 * slide through registers, so x and dy are read once but for the rows that strips share. The next rows
 * are loaded, without a branch between them, before the rows at hand are used. Backward sums dw and dbias over a strip; sum_columns adds strips.
 *
 * With the l2norm of heads of 64 or 128 channels (L = 16 or 32 lanes): the sums over a head are shuffles,
 * in the order of ops_norm.cu, and u = SiLU, y = u r and du = r (dy - y (y . dy)) are rounded to E where the
 * two kernels store them, so the bits are theirs. All channels are whole warps then, and what a warp's
 * threads branch on is the same for all of them.
 * Formulas: engine/kernels/conv.c, l2norm in elementwise.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int VC = 4, AHEAD_BACK = 4; /* rows on their way, backward */

/* VC channels of a row, as loaded. WIDE: all of them exist and rows are aligned to them. */
template <class E, bool WIDE> struct four {
    float x[VC];
    DEV void load(const E *row, int64_t c, int64_t C)
    {
        get(row, c, C, false, x);
    }
    DEV static void store(E *row, int64_t c, int64_t C, const float (&from)[VC])
    {
        put(row, c, C, false, from);
    }
    DEV void load_none()
    {
        for (int i = 0; i < VC; i++)
            x[i] = 0;
    }
    DEV void keep(const float (&from)[VC]) /* rounded to E */
    {
        for (int i = 0; i < VC; i++)
            x[i] = to_f(cast<E>(from[i]));
    }
    DEV float operator[](int i) const
    {
        return x[i];
    }
};
static_assert(vec<float>::n == VC, "a row's part is one load");
template <> struct four<float, true> {
    vec<float> v;
    DEV void load(const float *row, int64_t c, int64_t)
    {
        v = load16(row + c);
    }
    DEV static void store(float *row, int64_t c, int64_t, const float (&from)[VC])
    {
        four t;
        t.keep(from);
        store16(row + c, t.v);
    }
    DEV void load_none()
    {
        v = vec<float>{};
    }
    DEV void keep(const float (&from)[VC])
    {
#pragma unroll
        for (int i = 0; i < VC; i++)
            v.e[i] = from[i];
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
    DEV static void store(bf16 *row, int64_t c, int64_t, const float (&from)[VC])
    {
        four t;
        t.keep(from);
        *(uint64_t *)(row + c) = t.v;
    }
    DEV void load_none()
    {
        v = 0;
    }
    DEV void keep(const float (&from)[VC])
    {
        v = pack_bf16(from[0], from[1]) | (uint64_t)pack_bf16(from[2], from[3]) << 32;
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
    float *r; /* [T, C / K] of the norm over K channels, written or, backward, read */
    int64_t K;
    float eps;
};

/* x . y over the L lanes of a head, in all of them. As in ops_norm.cu, 8 neighbours are one chain of
 * additions, here of two lanes, and then halves are added. */
template <int L, class X> DEV float head_dot(const X &x, const X &y)
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < VC; k++)
        sum += x[k] * y[k];
    sum = shuffle_xor(sum, 1);
#pragma unroll
    for (int k = 0; k < VC; k++)
        sum += x[k] * y[k];
    const float other = shuffle_xor(sum, 1);
    sum = threadIdx.x % 2 ? sum : other;
#pragma unroll
    for (int mask = L / 2; mask > 1; mask /= 2)
        sum += shuffle_xor(sum, mask);
    return sum;
}

/* d, the gradient of a row of sums, from dy, that of the result. r: the norm's factor of the row. */
template <class E, bool WIDE, int L>
DEV void slope(const four<E, WIDE> &dy, const float (&sum)[VC], float r, float (&d)[VC])
{
    float s[VC];
#pragma unroll
    for (int k = 0; k < VC; k++) {
        const float sigma = logistic(sum[k]);
        s[k] = silu_slope(sum[k], sigma);
        d[k] = sum[k] * sigma;
    }
    if constexpr (L > 0) {
        four<E, WIDE> t;
        t.keep(d);
#pragma unroll
        for (int k = 0; k < VC; k++)
            d[k] = t[k] * r;
        t.keep(d);
        const float dot = head_dot<L>(dy, t);
#pragma unroll
        for (int k = 0; k < VC; k++)
            d[k] = r * (dy[k] - t[k] * dot);
        t.keep(d);
#pragma unroll
        for (int k = 0; k < VC; k++)
            d[k] = t[k] * s[k];
    } else {
#pragma unroll
        for (int k = 0; k < VC; k++)
            d[k] = dy[k] * s[k];
    }
}

/* WT taps, the first WT - W of them without meaning. BIAS: there may be one. */
template <class E, int WT, bool WIDE, bool BIAS> struct strip {
    typedef four<E, WIDE> value;
    const conv_args &p;
    int64_t c, seq;                       /* first channel; the sequence */
    int start, next;                      /* its borders */
    float w[WT][VC], bias[VC], x[WT][VC]; /* x: the window, newest last */

    DEV explicit strip(const conv_args &a, int64_t channel) : p(a), c(channel)
    {
#pragma unroll
        for (int i = 0; i < VC; i++) {
            const bool here = c + i < p.C;
            bias[i] = BIAS && here && p.bias ? p.bias[c + i] : 0.f;
#pragma unroll
            for (int j = 0; j < WT; j++) {
                const int tap = j - (WT - p.W);
                w[j][i] = here && tap >= 0 ? p.w[(c + i) * p.W + tap] : 0.f;
            }
        }
    }
    /* The sequence of token t, which exists. */
    DEV void find(int t)
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
        start = (int)p.cu[s];
        next = (int)p.cu[s + 1];
    }
    DEV void enter_after(int t)
    {
        int64_t s = seq + 1;
        while (p.cu[s + 1] <= t)
            s++;
        enter(s);
    }
    /* Row t of x, which may lie before the sequence. */
    DEV value row(int t) const
    {
        const int back = start - t; /* > 0 in the history */
        const E *from = (const E *)p.x + (int64_t)t * p.C;
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
    template <int N> DEV void ahead(value (&r)[N], const void *from, int t, int end) const
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            r[i].load((const E *)from + (int64_t)(t + i < end ? t + i : end - 1) * p.C, c, p.C);
    }
    /* The norm's factor of token t. */
    template <int L> DEV float factor(int t) const
    {
        return p.r[(int64_t)t * (p.C / (L * VC)) + c / (L * VC)];
    }
    /* Of the AHEAD_BACK tokens from t on, one a lane in turn. */
    template <int L> DEV float factor(int t, int end) const
    {
        t += lane() % AHEAD_BACK;
        return factor<L>(t < end ? t : end - 1);
    }
    /* The window before token t. */
    DEV void fill(int t)
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
            sum[i] = BIAS ? bias[i] : 0.f;
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

/* The norms of N rows of tokens from t on, of which those from `end` on do not exist. */
template <class E, int L, int N>
DEV void normed(const conv_args &p, const four<E, true> (&u)[N], int t, int end, int64_t c)
{
    float r[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        r[i] = head_dot<L>(u[i], u[i]);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y[VC];
        r[i] = 1.f / sqrtf(r[i] + p.eps);
#pragma unroll
        for (int k = 0; k < VC; k++)
            y[k] = u[i][k] * r[i];
        if (t + i < end) {
            four<E, true>::store((E *)p.y + (int64_t)(t + i) * p.C, c, p.C, y);
            if (threadIdx.x % L == 0)
                p.r[(int64_t)(t + i) * (p.C / (L * VC)) + c / (L * VC)] = r[i];
        }
    }
}

/* L: lanes of a head that is normed, 0 = no norm. */
template <class E, int WT, bool WIDE, int L>
KERNEL(THREADS, sizeof(E) == 2 && WT == 4 && WIDE ? 3 : 1)
conv(conv_args p)
{
    constexpr int AHEAD = L > 0 ? 4 : 8; /* rows on their way: as many as registers hold */
    const int64_t c = channel_of(p);
    const int a = (int)(blockIdx.x / p.bands * p.strip);
    const int b = (int)(a + p.strip < p.T ? a + p.strip : p.T);
    if (c >= p.C)
        return;
    strip<E, WT, WIDE, L == 0> s(p, c);
    four<E, WIDE> x[AHEAD], next[AHEAD];
    E *y = (E *)p.y + a * p.C;
    s.ahead(next, p.x, a, b);
    s.find(a);
    s.fill(a);
    for (int t0 = a; t0 < b; t0 += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            x[i] = next[i];
        if (t0 + AHEAD < b)
            s.ahead(next, p.x, t0 + AHEAD, b);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int t = t0 + i;
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
            if constexpr (L > 0)
                x[i].keep(sum);
            else
                four<E, WIDE>::store(y + i * p.C, c, p.C, sum);
        }
        if constexpr (L > 0)
            normed<E, L>(p, x, t0, b, c);
        y += AHEAD * p.C;
    }
}

/* A token's gradient of the sum goes to the WT newest rows of g; the oldest is then finished. Tokens
 * beyond the strip are walked for the rows that they finish. */
template <class E, int WT, bool WIDE, int L>
KERNEL(THREADS, sizeof(E) == 2 && WT == 4 && WIDE ? 2 : 1)
conv_back(conv_args p)
{
    const int64_t c = channel_of(p);
    const int a = (int)(blockIdx.x / p.bands * p.strip);
    const int b = (int)(a + p.strip < p.T ? a + p.strip : p.T);
    const int end = (int)(b + WT - 1 < p.T ? b + WT - 1 : p.T);
    if (c >= p.C)
        return;
    float g[WT][VC] = {}, dw[WT][VC] = {};
    [[maybe_unused]] float db[VC] = {}, r = 0, next_r = 0;
    strip<E, WT, WIDE, L == 0> s(p, c);
    four<E, WIDE> x[AHEAD_BACK], dy[AHEAD_BACK], next_x[AHEAD_BACK], next_dy[AHEAD_BACK];
    s.ahead(next_x, p.x, a, end);
    s.ahead(next_dy, p.dy, a, end);
    if constexpr (L > 0)
        next_r = s.template factor<L>(a, end);
    s.find(a);
    s.fill(a);
    int t = a;
    bool done = false;
    while (t < end && !done) {
#pragma unroll
        for (int i = 0; i < AHEAD_BACK; i++) {
            x[i] = next_x[i];
            dy[i] = next_dy[i];
        }
        r = next_r;
        if (t + AHEAD_BACK < end) {
            s.ahead(next_x, p.x, t + AHEAD_BACK, end);
            s.ahead(next_dy, p.dy, t + AHEAD_BACK, end);
            if constexpr (L > 0)
                next_r = s.template factor<L>(t + AHEAD_BACK, end);
        }
#pragma unroll
        for (int i = 0; i < AHEAD_BACK; i++) {
            float sum[VC], slopes[VC];
            if (t >= end)
                break;
            if (t == s.next) {
#pragma unroll
                for (int j = 1; j < WT; j++) {
                    const int to = t - WT + j;
                    if (to >= s.start && to >= a && to < b)
                        four<E, WIDE>::store((E *)p.y + (int64_t)to * p.C, c, p.C, g[j]);
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
            float factor = 0;
            if constexpr (L > 0)
                factor = shuffle_xor(r, lane() % AHEAD_BACK ^ i);
            slope<E, WIDE, L>(dy[i], sum, factor, slopes);
#pragma unroll
            for (int k = 0; k < VC; k++) {
                const float d = slopes[k];
                if constexpr (L == 0)
                    db[k] += t < b ? d : 0.f;
#pragma unroll
                for (int j = 0; j < WT; j++) {
                    g[j][k] = j + 1 < WT ? g[j + 1 < WT ? j + 1 : j][k] : 0.f;
                    g[j][k] += s.w[j][k] * d;
                    dw[j][k] += t < b ? s.x[j][k] * d : 0.f;
                }
            }
            const int to = t - WT + 1;
            if (to >= s.start && to >= a && to < b)
                four<E, WIDE>::store((E *)p.y + (int64_t)to * p.C, c, p.C, g[0]);
            t++;
        }
    }
    if (t == p.T) {
#pragma unroll
        for (int j = 1; j < WT; j++) {
            const int to = t - WT + j;
            if (to >= s.start && to >= a && to < b)
                four<E, WIDE>::store((E *)p.y + (int64_t)to * p.C, c, p.C, g[j]);
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
            if constexpr (L == 0)
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
template <class E, int WT, int L> KERNEL(THREADS, 1) conv_history(conv_args p)
{
    const int64_t per = ceil_div(p.C, VC), i = index_of();
    const int64_t n = i / per, c = i % per * VC, keep = p.W - 1;
    if (n >= p.N)
        return;
    strip<E, WT, false, L == 0> s(p, c);
    s.enter(n);
    s.fill(s.start);
    float g[WT][VC] = {};
#pragma unroll
    for (int r = 0; r < WT - 1; r++) {
        const int t = s.start + r;
        float sum[VC], d[VC], factor = 0;
        four<E, (L > 0)> dy;
        if (t >= s.next)
            break;
        s.step(s.row(t), sum);
        dy.load((const E *)p.dy + (int64_t)t * p.C, c, p.C);
        if constexpr (L > 0)
            factor = s.template factor<L>(t);
        slope<E, (L > 0), L>(dy, sum, factor, d);
#pragma unroll
        for (int k = 0; k < VC; k++) {
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
        status = grid_fits(what, p->bands * (p->T + 64), err);
    if (status == CKPT_OK)
        status = grid_fits(what, ceil_div(p->N * C, THREADS), err);
    return status;
}

/* Whether one kernel does convolution and norm; else two do. */
bool together(int64_t C, int64_t W, int64_t K)
{
    return W <= 4 && (K == 16 * VC || K == 32 * VC) && C % (32 * VC) == 0;
}

template <class E, int WT, bool WIDE, int L>
void launch(bool back, const conv_args &p, device_stream stream)
{
    const int64_t blocks = p.bands * ceil_div(p.T, p.strip);
    if (p.T > 0 && back)
        LAUNCH((conv_back<E, WT, WIDE, L>), blocks, THREADS, 0, stream, p);
    else if (p.T > 0)
        LAUNCH((conv<E, WT, WIDE, L>), blocks, THREADS, 0, stream, p);
    if (!p.out || p.W == 1)
        return;
    if (back)
        LAUNCH((conv_history<E, WT, L>), ceil_div(p.N * ceil_div(p.C, VC), THREADS), THREADS, 0,
               stream, p);
    else
        LAUNCH((conv_last<E>), ceil_div(p.N * p.C, THREADS), THREADS, 0, stream, p);
}
template <class E> void launch_type(bool back, const conv_args &p, device_stream stream)
{
    if (p.K == 16 * VC)
        launch<E, 4, true, 16>(back, p, stream);
    else if (p.K == 32 * VC)
        launch<E, 4, true, 32>(back, p, stream);
    else if (p.W <= 4)
        p.wide ? launch<E, 4, true, 0>(back, p, stream) : launch<E, 4, false, 0>(back, p, stream);
    else
        p.wide ? launch<E, 8, true, 0>(back, p, stream) : launch<E, 8, false, 0>(back, p, stream);
}

/* what: its sizes are measured, and its arrays and K set. */
ckpt_status forward(const char *what, const ckpt_cuda *c, conv_args p, ckpt_err *err)
{
    if (p.C == 0 || p.N == 0)
        return CKPT_OK;
    p.strip = 32;
    if (c->type == CKPT_CUDA_BF16)
        launch_type<bf16>(false, p, stream_of(c->stream));
    else
        launch_type<float>(false, p, stream_of(c->stream));
    return launched(what, err);
}
ckpt_status backward(const char *what, const ckpt_cuda *c, conv_args p, float *dw, float *dbias,
                     ckpt_err *err)
{
    const device_stream stream = stream_of(c->stream);
    const bool sums = dw || dbias;
    if (p.C == 0 || p.N == 0)
        return CKPT_OK;
    p.strip = ceil_div(p.T, CKPT_CUDA_PARTS / 4);
    p.strip = p.strip < 64 ? 64 : p.strip;
    p.partial = sums ? (float *)c->work : NULL;
    if (c->type == CKPT_CUDA_BF16)
        launch_type<bf16>(true, p, stream);
    else
        launch_type<float>(true, p, stream);
    ckpt_status status = launched(what, err);
    if (!sums || p.T == 0)
        return status;
    const int64_t parts = ceil_div(p.T, p.strip), columns = p.C * (p.W + 1);
    if (status == CKPT_OK && dw)
        status = sum_columns(stream, p.partial, parts, p.C * p.W, columns, true, dw, err);
    if (status == CKPT_OK && dbias)
        status = sum_columns(stream, p.partial + p.C * p.W, parts, p.C, columns, true, dbias, err);
    return status;
}
ckpt_status heads(const char *what, int64_t C, int64_t K, ckpt_err *err)
{
    if (K < 1 || C % K != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld channels in heads of %lld", what,
                         (long long)C, (long long)K);
    return CKPT_OK;
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
    if (status != CKPT_OK)
        return status;
    p.x = x, p.w = w, p.bias = bias, p.history = history, p.y = y, p.out = last;
    return forward("conv", c, p, err);
}

ckpt_status ckpt_cuda_conv_bwd(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                               const void *x, const float *w, const float *bias,
                               const void *history, const void *dy, void *dx, float *dw,
                               float *dbias, void *dhistory, ckpt_err *err)
{
    conv_args p;
    const ckpt_status status =
        measure("conv backward", c, seq, C, W, dw || dbias ? C * (W + 1) : 0, &p, err);
    if (status != CKPT_OK)
        return status;
    p.x = x, p.w = w, p.bias = bias, p.history = history, p.dy = dy, p.y = dx, p.out = dhistory;
    return backward("conv backward", c, p, dw, dbias, err);
}

ckpt_status ckpt_cuda_conv_norm(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C, int64_t W,
                                int64_t K, double eps, const void *x, const float *w,
                                const void *history, void *y, float *r, void *last, ckpt_err *err)
{
    conv_args p;
    ckpt_status status = measure("conv with norm", c, seq, C, W, 0, &p, err);
    if (status == CKPT_OK)
        status = heads("conv with norm", C, K, err);
    if (status != CKPT_OK)
        return status;
    p.x = x, p.w = w, p.history = history, p.y = y, p.out = last;
    if (together(C, W, K))
        p.r = r, p.K = K, p.eps = (float)eps;
    status = forward("conv with norm", c, p, err);
    if (status == CKPT_OK && p.K == 0)
        status = ckpt_cuda_l2norm(c, p.T * (C / K), K, y, eps, y, r, err);
    return status;
}

ckpt_status ckpt_cuda_conv_norm_bwd(const ckpt_cuda *c, const ckpt_cuda_seq *seq, int64_t C,
                                    int64_t W, int64_t K, const void *x, const float *w,
                                    const void *history, const void *y, const float *r, void *dy,
                                    void *dx, float *dw, void *dhistory, ckpt_err *err)
{
    conv_args p;
    ckpt_status status =
        measure("conv with norm backward", c, seq, C, W, dw ? C * (W + 1) : 0, &p, err);
    if (status == CKPT_OK)
        status = heads("conv with norm backward", C, K, err);
    if (status != CKPT_OK)
        return status;
    p.x = x, p.w = w, p.history = history, p.dy = dy, p.y = dx, p.out = dhistory;
    if (together(C, W, K))
        p.r = (float *)r, p.K = K;
    else
        status = ckpt_cuda_l2norm_bwd(c, p.T * (C / K), K, y, r, dy, dy, err);
    if (status == CKPT_OK)
        status = backward("conv with norm backward", c, p, dw, NULL, err);
    return status;
}
