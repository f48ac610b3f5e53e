/* Decay gate, beta, SwiGLU, squared ReLU. A thread takes 8 elements; the decay gate's backward walks a
 * piece of the tokens and keeps the column sums of d dt_bias and d A_log in registers.
 * Formulas: engine/kernels/elementwise.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int VG = 8;

/* log(1 + u) for u in [0, 1], as 2 atanh(u / (2 + u)); within 2 ulp. */
DEV float log1p01(float u)
{
    const float s = u / (2.f + u), s2 = s * s;
    float p = 1.f / 17;
    p = p * s2 + 1.f / 15;
    p = p * s2 + 1.f / 13;
    p = p * s2 + 1.f / 11;
    p = p * s2 + 1.f / 9;
    p = p * s2 + 1.f / 7;
    p = p * s2 + 1.f / 5;
    p = p * s2 + 1.f / 3;
    return 2.f * s + 2.f * s * (s2 * p);
}
/* softplus(x) and sigmoid(x) from one exponential. */
DEV float softplus(float x, float *sigmoid)
{
    const float u = exp_of(x < 0 ? x : -x), r = 1.f / (1.f + u);
    *sigmoid = x < 0 ? u * r : r;
    return (x > 0 ? x : x < 0 ? 0.f : x * 0.f) + log1p01(u);
}

struct gate_args {
    int64_t T, D, K, piece, bands;
    const void *raw;
    const float *A_log, *dt_bias, *dg;
    float *g, *partial;
    void *draw;
    float bound;
    bool wide;
};

DEV void columns_of(const gate_args &p, int64_t at, float (&rate)[VG], float (&bias)[VG])
{
#pragma unroll
    for (int i = 0; i < VG; i++) {
        const bool here = at + i < p.D;
        rate[i] = here ? expf(p.A_log[(at + i) / p.K]) : 0.f;
        bias[i] = here ? p.dt_bias[at + i] : 0.f;
    }
}

template <class E> KERNEL(THREADS, 1) gate(gate_args p)
{
    const int64_t at = ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VG;
    const int64_t lo = blockIdx.x / p.bands * p.piece;
    const int64_t hi = lo + p.piece < p.T ? lo + p.piece : p.T;
    float rate[VG], bias[VG];
    if (at >= p.D)
        return;
    columns_of(p, at, rate, bias);
#pragma unroll 4
    for (int64_t t = lo; t < hi; t++) {
        float x[VG], s;
        get((const E *)p.raw + t * p.D, at, p.D, p.wide, x);
#pragma unroll
        for (int i = 0; i < VG; i++) {
            const float a = x[i] + bias[i];
            x[i] = p.bound == 0.f ? -rate[i] * softplus(a, &s) : p.bound * logistic(rate[i] * a);
        }
        put(p.g + t * p.D, at, p.D, p.wide, x);
    }
}

/* partial [pieces, 2 D]: sums for dt_bias, then for A_log by column. */
template <class E> KERNEL(THREADS, 1) gate_back(gate_args p)
{
    const int64_t at = ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VG;
    const int64_t lo = blockIdx.x / p.bands * p.piece;
    const int64_t hi = lo + p.piece < p.T ? lo + p.piece : p.T;
    float rate[VG], bias[VG], dbias[VG] = {}, drate[VG] = {};
    if (at >= p.D)
        return;
    columns_of(p, at, rate, bias);
#pragma unroll 2
    for (int64_t t = lo; t < hi; t++) {
        float x[VG], d[VG];
        get((const E *)p.raw + t * p.D, at, p.D, p.wide, x);
        get(p.dg + t * p.D, at, p.D, p.wide, d);
#pragma unroll
        for (int i = 0; i < VG; i++) {
            const float a = x[i] + bias[i];
            if (p.bound == 0.f) {
                float s;
                drate[i] += d[i] * (-rate[i] * softplus(a, &s));
                d[i] *= -rate[i] * s;
            } else {
                const float s = logistic(rate[i] * a);
                d[i] *= p.bound * s * (1.f - s) * rate[i];
                drate[i] += d[i] * a;
            }
            dbias[i] += d[i];
        }
        put((E *)p.draw + t * p.D, at, p.D, p.wide, d);
    }
    if (!p.partial)
        return;
    float *to = p.partial + blockIdx.x / p.bands * 2 * p.D;
    put(to, at, p.D, p.wide, dbias);
    put(to + p.D, at, p.D, p.wide, drate);
}

/* out [heads] += the K columns of each head, in order. */
KERNEL(THREADS, 1) head_sums(const float *columns, int64_t heads, int64_t K, float *out)
{
    const int64_t h = index_of();
    if (h >= heads)
        return;
    float sum = 0;
    for (int64_t k = 0; k < K; k++)
        sum += columns[h * K + k];
    out[h] += sum;
}

/* ---- elementwise ---------------------------------------------------------------------------- */

enum kind { SIGMOID, SIGMOID_BACK, RELU2, RELU2_BACK, SWIGLU, SWIGLU_BACK };

struct map_args {
    int64_t n, bands, ldx, ldy; /* columns of a row, blocks of a row */
    const void *x, *u, *dy;
    void *y, *dx, *du;
    float c;
    bool wide;
};

/* X, Y: types of what is read and of what is written. */
template <int KIND, class X, class Y> KERNEL(THREADS, 1) map(map_args p)
{
    const int64_t row = blockIdx.x / p.bands;
    const int64_t at = ((int64_t)blockIdx.x % p.bands * THREADS + threadIdx.x) * VG;
    float x[VG], u[VG], d[VG];
    if (at >= p.n)
        return;
    get((const X *)p.x + row * p.ldx, at, p.n, p.wide, x);
    if constexpr (KIND == SWIGLU || KIND == SWIGLU_BACK)
        get((const X *)p.u + row * p.ldx, at, p.n, p.wide, u);
    if constexpr (KIND == SIGMOID_BACK || KIND == RELU2_BACK || KIND == SWIGLU_BACK)
        get((const X *)p.dy + row * p.ldy, at, p.n, p.wide, d);
#pragma unroll
    for (int i = 0; i < VG; i++) {
        if constexpr (KIND == SIGMOID) {
            x[i] = p.c * logistic(x[i]);
        } else if constexpr (KIND == SIGMOID_BACK) {
            x[i] = d[i] * x[i] * (1.f - x[i] / p.c);
        } else if constexpr (KIND == RELU2 || KIND == RELU2_BACK) {
            const float r = x[i] < 0 ? 0.f : x[i]; /* so that NaN stays */
            x[i] = KIND == RELU2 ? r * r : 2.f * r * d[i];
        } else {
            const bool limit = p.c > 0, over = limit && x[i] > p.c;
            const bool out = limit && (u[i] > p.c || u[i] < -p.c);
            const float g = over ? p.c : x[i], v = !out ? u[i] : u[i] > 0 ? p.c : -p.c;
            const float s = logistic(g);
            if constexpr (KIND == SWIGLU) {
                x[i] = g * s * v;
            } else {
                x[i] = over ? 0.f : d[i] * v * silu_slope(g, s);
                u[i] = out ? 0.f : d[i] * g * s;
            }
        }
    }
    if constexpr (KIND == SWIGLU_BACK) {
        put((Y *)p.dx + row * p.ldx, at, p.n, p.wide, x);
        put((Y *)p.du + row * p.ldx, at, p.n, p.wide, u);
    } else {
        put((Y *)p.y + row * p.ldy, at, p.n, p.wide, x);
    }
}

template <int KIND>
ckpt_status run_map(const char *what, const ckpt_cuda *c, int64_t rows, map_args p, ckpt_err *err)
{
    ckpt_status status = ready(what, c, 0, err);
    if (status != CKPT_OK || rows == 0 || p.n == 0)
        return status;
    if (p.ldx == p.n && p.ldy == p.n) { /* one long row */
        p.n = p.ldx = p.ldy = rows * p.n;
        rows = 1;
    }
    p.wide = rows == 1 || (p.ldx % VG == 0 && p.ldy % VG == 0);
    p.bands = ceil_div(p.n, THREADS * VG);
    status = grid_fits(what, rows > INT32_MAX ? rows : rows * p.bands, err);
    if (status != CKPT_OK)
        return status;
    const device_stream stream = stream_of(c->stream);
    const int64_t blocks = rows * p.bands;
    constexpr bool wide_x = KIND == SIGMOID_BACK, wide_y = KIND == SIGMOID;
    if (c->type == CKPT_CUDA_F32)
        LAUNCH((map<KIND, float, float>), blocks, THREADS, 0, stream, p);
    else if constexpr (wide_x)
        LAUNCH((map<KIND, float, bf16>), blocks, THREADS, 0, stream, p);
    else if constexpr (wide_y)
        LAUNCH((map<KIND, bf16, float>), blocks, THREADS, 0, stream, p);
    else
        LAUNCH((map<KIND, bf16, bf16>), blocks, THREADS, 0, stream, p);
    return launched(what, err);
}

map_args flat(int64_t n)
{
    map_args p = {};
    p.n = p.ldx = p.ldy = n;
    return p;
}

ckpt_status check_gate(const char *what, const ckpt_cuda *c, int64_t T, int64_t HV, int64_t K,
                       double bound, int64_t columns, ckpt_err *err)
{
    if (T < 0 || HV <= 0 || K <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld tokens, %lld heads of %lld", what,
                         (long long)T, (long long)HV, (long long)K);
    if (!(bound <= 0))
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: lower bound %g is not below 0", what,
                         bound);
    const ckpt_status status = ready(what, c, columns, err);
    return status != CKPT_OK ? status : grid_fits(what, T, err);
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_gate(const ckpt_cuda *c, int64_t T, int64_t HV, int64_t K, const void *raw,
                           const float *A_log, const float *dt_bias, double bound, float *g,
                           ckpt_err *err)
{
    const ckpt_status status = check_gate("decay gate", c, T, HV, K, bound, 0, err);
    if (status != CKPT_OK || T == 0)
        return status;
    gate_args p = {};
    p.T = T, p.D = HV * K, p.K = K, p.raw = raw, p.A_log = A_log, p.dt_bias = dt_bias;
    p.bound = (float)bound, p.g = g, p.wide = p.D % VG == 0;
    p.bands = ceil_div(p.D, THREADS * VG);
    p.piece = 8;
    const int64_t blocks = p.bands * ceil_div(T, p.piece);
    LAUNCH_OF(c, gate, blocks, THREADS, 0, p);
    return launched("decay gate", err);
}

ckpt_status ckpt_cuda_gate_bwd(const ckpt_cuda *c, int64_t T, int64_t HV, int64_t K,
                               const void *raw, const float *A_log, const float *dt_bias,
                               double bound, const float *dg, void *draw, float *dA_log,
                               float *ddt_bias, ckpt_err *err)
{
    const char *what = "decay gate backward";
    const bool sums = dA_log || ddt_bias;
    ckpt_status status = check_gate(what, c, T, HV, K, bound, sums ? 3 * HV * K : 0, err);
    if (status != CKPT_OK || T == 0)
        return status;
    gate_args p = {};
    p.T = T, p.D = HV * K, p.K = K, p.raw = raw, p.A_log = A_log, p.dt_bias = dt_bias;
    p.bound = (float)bound, p.dg = dg, p.draw = draw, p.wide = p.D % VG == 0;
    p.bands = ceil_div(p.D, THREADS * VG);
    p.piece = piece_of(T, 8);
    p.partial = sums ? (float *)c->work : NULL;
    const device_stream stream = stream_of(c->stream);
    const int64_t parts = ceil_div(T, p.piece), blocks = p.bands * parts;
    LAUNCH_OF(c, gate_back, blocks, THREADS, 0, p);
    status = launched(what, err);
    if (status == CKPT_OK && ddt_bias)
        status = sum_columns(stream, p.partial, parts, p.D, 2 * p.D, true, ddt_bias, err);
    if (status != CKPT_OK || !dA_log)
        return status;
    float *by_column = p.partial + parts * 2 * p.D;
    status = sum_columns(stream, p.partial + p.D, parts, p.D, 2 * p.D, false, by_column, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH(head_sums, ceil_div(HV, THREADS), THREADS, 0, stream, by_column, HV, K, dA_log);
    return launched(what, err);
}

ckpt_status ckpt_cuda_sigmoid(const ckpt_cuda *c, int64_t n, double scale, const void *x, float *y,
                              ckpt_err *err)
{
    map_args p = flat(n);
    p.x = x, p.y = y, p.c = (float)scale;
    return run_map<SIGMOID>("sigmoid", c, 1, p, err);
}
ckpt_status ckpt_cuda_sigmoid_bwd(const ckpt_cuda *c, int64_t n, double scale, const float *y,
                                  const float *dy, void *dx, ckpt_err *err)
{
    map_args p = flat(n);
    p.x = y, p.dy = dy, p.y = dx, p.c = (float)scale;
    return run_map<SIGMOID_BACK>("sigmoid backward", c, 1, p, err);
}
ckpt_status ckpt_cuda_relu2(const ckpt_cuda *c, int64_t n, const void *x, void *y, ckpt_err *err)
{
    map_args p = flat(n);
    p.x = x, p.y = y;
    return run_map<RELU2>("squared relu", c, 1, p, err);
}
ckpt_status ckpt_cuda_relu2_bwd(const ckpt_cuda *c, int64_t n, const void *x, const void *dy,
                                void *dx, ckpt_err *err)
{
    map_args p = flat(n);
    p.x = x, p.dy = dy, p.y = dx;
    return run_map<RELU2_BACK>("squared relu backward", c, 1, p, err);
}

static ckpt_status check_swiglu(int64_t T, int64_t F, int64_t ldg, int64_t ldy, ckpt_err *err)
{
    if (T < 0 || F < 0 || ldg < F || ldy < F)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "swiglu on CUDA: %lld tokens of %lld, strides %lld and %lld", (long long)T,
                         (long long)F, (long long)ldg, (long long)ldy);
    return CKPT_OK;
}
ckpt_status ckpt_cuda_swiglu(const ckpt_cuda *c, int64_t T, int64_t F, const void *gate,
                             const void *up, int64_t ldg, double clamp, void *y, int64_t ldy,
                             ckpt_err *err)
{
    map_args p = {};
    const ckpt_status status = check_swiglu(T, F, ldg, ldy, err);
    if (status != CKPT_OK)
        return status;
    p.n = F, p.ldx = ldg, p.ldy = ldy, p.x = gate, p.u = up, p.c = (float)clamp, p.y = y;
    return run_map<SWIGLU>("swiglu", c, T, p, err);
}
ckpt_status ckpt_cuda_swiglu_bwd(const ckpt_cuda *c, int64_t T, int64_t F, const void *gate,
                                 const void *up, int64_t ldg, double clamp, const void *dy,
                                 int64_t lddy, void *dgate, void *dup, ckpt_err *err)
{
    map_args p = {};
    const ckpt_status status = check_swiglu(T, F, ldg, lddy, err);
    if (status != CKPT_OK)
        return status;
    p.n = F, p.ldx = ldg, p.ldy = lddy, p.x = gate, p.u = up, p.c = (float)clamp;
    p.dy = dy, p.dx = dgate, p.du = dup;
    return run_map<SWIGLU_BACK>("swiglu backward", c, T, p, err);
}
