/* Norms over rows: RMSNorm, gated RMSNorm, l2norm, forward and backward.
 *
 * A row is G threads with R vectors of 8 elements each in registers: 16 threads up to 128 elements, a
 * warp up to 256, a block above. Every array is read and written once. Backward: a block takes a piece
 * of the rows and keeps its part of dw in registers; sum_columns adds the pieces.
 * Formulas: engine/kernels/elementwise.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

struct norm_args {
    int64_t rows, n, piece;
    const void *x, *z, *dy;
    const float *w, *rstd;
    void *y, *dz; /* y: result, or dx */
    float *r, *partial;
    float eps, one, inv_n; /* one: added to w; inv_n: of the mean, 0 = sum */
    bool wide, silu, add;
};

template <int G> struct shape_of {
    static constexpr int threads = G < THREADS ? THREADS : G, per = threads / G;
};

DEV void weights(const norm_args &p, int64_t at, float (&w)[8])
{
    if (p.w)
        get(p.w, at, p.n, p.wide, w);
#pragma unroll
    for (int i = 0; i < 8; i++)
        w[i] = p.w ? w[i] + p.one : 1.f;
}

template <class E, int G, int R> KERNEL(shape_of<G>::threads, 1) norm(norm_args p)
{
    SHARED_MEMORY(memory);
    const int64_t row = (int64_t)blockIdx.x * shape_of<G>::per + threadIdx.x / G;
    const int64_t n = row < p.rows ? p.n : 0, at0 = (int64_t)(threadIdx.x % G) * 8;
    const E *in = (const E *)p.x + row * p.n, *z = (const E *)p.z + row * p.n;
    float x[R][8], sum = 0;
#pragma unroll
    for (int r = 0; r < R; r++) {
        get(in, at0 + r * G * 8, n, p.wide, x[r]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += x[r][i] * x[r][i];
    }
    sum = group_sum<G>(sum, (float *)memory);
    const float rstd = 1.f / sqrtf((p.inv_n != 0.f ? sum * p.inv_n : sum) + p.eps);
    if (p.r && n && threadIdx.x % G == 0)
        p.r[row] = rstd;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t at = at0 + r * G * 8;
        float w[8], act[8];
        weights(p, at, w);
        if (p.z)
            get(z, at, n, p.wide, act);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float y = x[r][i] * rstd * w[i];
            if (p.z)
                y *= logistic(act[i]) * (p.silu ? act[i] : 1.f);
            x[r][i] = y;
        }
        put((E *)p.y + row * p.n, at, n, p.wide, x[r]);
    }
}

/* With t = dy w act(z): dx = r (t - x mean), mean = sum(t x) r^2 / n; of l2norm, whose x is the result:
 * sum(t x). dw += dy act(z) x r;  dz = dy x r w act'(z). */
template <class E, int G, int R> KERNEL(shape_of<G>::threads, 1) norm_back(norm_args p)
{
    SHARED_MEMORY(memory);
    constexpr int per = shape_of<G>::per;
    const int group = (int)threadIdx.x / G;
    const int64_t at0 = (int64_t)(threadIdx.x % G) * 8, lo = (int64_t)blockIdx.x * p.piece;
    const int64_t hi = lo + p.piece < p.rows ? lo + p.piece : p.rows;
    float dw[R][8], w[R][8];
#pragma unroll
    for (int r = 0; r < R; r++) {
        weights(p, at0 + r * G * 8, w[r]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            dw[r][i] = 0;
    }
    for (int64_t first = lo; first < hi; first += per) {
        const int64_t row = first + group, n = row < hi ? p.n : 0, base = row * p.n;
        const float rstd = n ? p.rstd[row] : 0.f;
        float x[R][8], t[R][8], sum = 0;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t at = at0 + r * G * 8;
            get((const E *)p.x + base, at, n, p.wide, x[r]);
            get((const E *)p.dy + base, at, n, p.wide, t[r]);
            if (p.z) {
                float z[8];
                get((const E *)p.z + base, at, n, p.wide, z);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float s = logistic(z[i]), dy = t[r][i];
                    t[r][i] = dy * (p.silu ? z[i] * s : s);
                    z[i] = dy * (x[r][i] * rstd) * w[r][i] *
                           (p.silu ? silu_slope(z[i], s) : s * (1.f - s));
                }
                put((E *)p.dz + base, at, n, p.wide, z);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                dw[r][i] += t[r][i] * (x[r][i] * rstd);
                t[r][i] *= w[r][i];
                sum += t[r][i] * x[r][i];
            }
        }
        sum = group_sum<G>(sum, (float *)memory);
        const float mean = p.inv_n != 0.f ? sum * rstd * rstd * p.inv_n : sum;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t at = at0 + r * G * 8;
            float old[8];
            if (p.add)
                get((const E *)p.y + base, at, n, p.wide, old);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float d = rstd * (t[r][i] - x[r][i] * mean);
                t[r][i] = p.add ? old[i] + d : d;
            }
            put((E *)p.y + base, at, n, p.wide, t[r]);
        }
    }
    if (!p.partial)
        return;
    float *to = p.partial + (int64_t)blockIdx.x * p.n;
    if constexpr (per == 1) {
#pragma unroll
        for (int r = 0; r < R; r++)
            put(to, at0 + r * G * 8, p.n, p.wide, dw[r]);
    } else {
        float *s = (float *)memory;
#pragma unroll
        for (int i = 0; i < 8; i++)
            s[group * G * 8 + (int)at0 + i] = dw[0][i];
        sync_block();
        for (int64_t i = threadIdx.x; i < p.n; i += shape_of<G>::threads) {
            float sum = 0;
            for (int g = 0; g < per; g++)
                sum += s[g * G * 8 + i];
            to[i] = sum;
        }
    }
}

/* 32 columns by 8 threads each. */
KERNEL(THREADS, 1)
column_sums(const float *partial, int64_t parts, int64_t n, int64_t ld, bool add, float *out)
{
    SHARED_MEMORY(memory);
    float *s = (float *)memory;
    const int c = (int)threadIdx.x % 32, part = (int)threadIdx.x / 32;
    const int64_t at = (int64_t)blockIdx.x * 32 + c;
    float sum = 0;
    if (at < n) {
#pragma unroll 8
        for (int64_t i = part; i < parts; i += 8)
            sum += partial[i * ld + at];
    }
    s[part * 32 + c] = sum;
    sync_block();
    if (part != 0 || at >= n)
        return;
    for (int i = 1; i < 8; i++)
        sum += s[i * 32 + c];
    out[at] = add ? out[at] + sum : sum;
}

template <class E, int G, int R>
void start(bool back, int64_t blocks, device_stream stream, const norm_args &p)
{
    if (back)
        LAUNCH((norm_back<E, G, R>), blocks, shape_of<G>::threads, shape_of<G>::threads * 32,
               stream, p);
    else
        LAUNCH((norm<E, G, R>), blocks, shape_of<G>::threads, 128, stream, p);
}
template <class E> void start_size(bool back, device_stream stream, norm_args &p, int64_t *parts)
{
    const int64_t per = p.n <= 128 ? 16 : p.n <= 256 ? 8 : 1;
    p.piece = piece_of(p.rows, per);
    *parts = ceil_div(p.rows, p.piece);
    const int64_t blocks = back ? *parts : ceil_div(p.rows, per);
    if (p.n <= 128)
        start<E, 16, 1>(back, blocks, stream, p);
    else if (p.n <= 256)
        start<E, 32, 1>(back, blocks, stream, p);
    else if (p.n <= 2048)
        start<E, 256, 1>(back, blocks, stream, p);
    else if (p.n <= 4096)
        start<E, 256, 2>(back, blocks, stream, p);
    else
        start<E, 512, 4>(back, blocks, stream, p);
}

ckpt_status run(const char *what, const ckpt_cuda *c, bool back, norm_args p, float *dw,
                ckpt_err *err)
{
    ckpt_status status;
    int64_t parts = 0;
    if (p.rows < 0 || p.n <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld rows of %lld", what,
                         (long long)p.rows, (long long)p.n);
    if (p.n > CKPT_CUDA_ROW_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s on CUDA: rows of %lld, expected at most %d",
                         what, (long long)p.n, CKPT_CUDA_ROW_MAX);
    status = ready(what, c, dw ? p.n : 0, err);
    if (status == CKPT_OK)
        status = grid_fits(what, p.rows, err);
    if (status != CKPT_OK || p.rows == 0)
        return status;
    const device_stream stream = stream_of(c->stream);
    p.wide = p.n % 8 == 0;
    p.partial = dw ? (float *)c->work : NULL;
    if (c->type == CKPT_CUDA_BF16)
        start_size<bf16>(back, stream, p, &parts);
    else
        start_size<float>(back, stream, p, &parts);
    status = launched(what, err);
    if (status == CKPT_OK && dw)
        status = sum_columns(stream, p.partial, parts, p.n, p.n, true, dw, err);
    return status;
}

} // namespace
} // namespace kda

using namespace kda;

size_t ckpt_cuda_work(int64_t columns)
{
    return columns > 0 ? (size_t)columns * CKPT_CUDA_PARTS * sizeof(float) : 0;
}

ckpt_status kda::sum_columns(device_stream stream, const float *partial, int64_t parts, int64_t n,
                             int64_t ld, bool add, float *out, ckpt_err *err)
{
    if (n > 0)
        LAUNCH(column_sums, ceil_div(n, 32), THREADS, THREADS * sizeof(float), stream, partial,
               parts, n, ld, add, out);
    return launched("column sums", err);
}

ckpt_status ckpt_cuda_rmsnorm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                              const float *w, bool centered, double eps, void *y, float *rstd,
                              ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = x, p.w = w, p.y = y, p.r = rstd;
    p.one = centered, p.eps = (float)eps, p.inv_n = 1.f / (float)n;
    return run("rmsnorm", c, false, p, NULL, err);
}
ckpt_status ckpt_cuda_rmsnorm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                  const float *w, bool centered, const float *rstd, const void *dy,
                                  bool add, void *dx, float *dw, ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = x, p.w = w, p.rstd = rstd, p.dy = dy, p.y = dx;
    p.one = centered, p.inv_n = 1.f / (float)n, p.add = add;
    return run("rmsnorm backward", c, true, p, dw, err);
}
ckpt_status ckpt_cuda_gated_rmsnorm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                    const void *z, const float *w, bool silu, double eps, void *y,
                                    float *rstd, ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = x, p.z = z, p.w = w, p.y = y, p.r = rstd;
    p.eps = (float)eps, p.inv_n = 1.f / (float)n, p.silu = silu;
    return run("gated rmsnorm", c, false, p, NULL, err);
}
ckpt_status ckpt_cuda_gated_rmsnorm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x,
                                        const void *z, const float *w, bool silu, const float *rstd,
                                        const void *dy, void *dx, void *dz, float *dw,
                                        ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = x, p.z = z, p.w = w, p.rstd = rstd, p.dy = dy, p.y = dx,
    p.dz = dz;
    p.inv_n = 1.f / (float)n, p.silu = silu;
    return run("gated rmsnorm backward", c, true, p, dw, err);
}
ckpt_status ckpt_cuda_l2norm(const ckpt_cuda *c, int64_t rows, int64_t n, const void *x, double eps,
                             void *y, float *r, ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = x, p.y = y, p.r = r, p.eps = (float)eps;
    return run("l2norm", c, false, p, NULL, err);
}
ckpt_status ckpt_cuda_l2norm_bwd(const ckpt_cuda *c, int64_t rows, int64_t n, const void *y,
                                 const float *r, const void *dy, void *dx, ckpt_err *err)
{
    norm_args p = {};
    p.rows = rows, p.n = n, p.x = y, p.rstd = r, p.dy = dy, p.y = dx;
    return run("l2norm backward", c, true, p, NULL, err);
}
