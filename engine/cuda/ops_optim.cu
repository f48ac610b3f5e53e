/* AdamW, the gradient's norm, rotary embedding and its tables.
 *
 * AdamW and the norm give the CPU's bits (train/elementwise.c): the same operations in the same order,
 * compiled without contraction and with subnormals flushed (tools/make/cuda.mk). A warp takes a chunk of
 * the norm, a lane each of its 32 interleaved sums. Rotation: a warp a token and head. */
#include "ops_common.cuh"

#include <string.h>

namespace kda
{
namespace
{

constexpr int CHUNK = 16384, PAIRS = 8; /* CKPT_OPTIM_CHUNK; pairs of a lane */

DEV float lerp_of(float from, float to, float weight)
{
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.f - weight);
}
/* NaN keeps its sign and becomes quiet. */
DEV uint16_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

template <int N>
KERNEL(THREADS, 1)
adamw(int64_t n, ckpt_adamw_scalars own, const ckpt_adamw_scalars *kept, float *w, float *m,
      float *v, const float *g, uint16_t *bits)
{
    const ckpt_adamw_scalars k = kept ? *kept : own;
    const int64_t at = index_of() * N;
    float wi[N], mi[N], vi[N], gi[N];
    if (at >= n)
        return;
    get((const float *)w, at, n, true, wi);
    get((const float *)m, at, n, true, mi);
    get((const float *)v, at, n, true, vi);
    get(g, at, n, true, gi);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float x = gi[i] * k.scale;
        mi[i] = lerp_of(mi[i], x, k.rise1);
        vi[i] = vi[i] * k.keep2 + k.rise2 * x * x;
        const float size = sqrtf(vi[i]) / k.root + k.eps;
        wi[i] = wi[i] * k.decay + k.negative * mi[i] / size;
    }
    put(w, at, n, true, wi);
    put(m, at, n, true, mi);
    put(v, at, n, true, vi);
    if (bits && at + N <= n) {
        uint64_t u = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            u |= (uint64_t)bits_of(wi[i]) << 16 * i;
        *(uint64_t *)(bits + at) = u;
    } else if (bits) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (at + i < n)
                bits[at + i] = bits_of(wi[i]);
    }
}

template <int U> KERNEL(THREADS, 1) square_sums(int64_t n, const float *g, double *out)
{
    SHARED_MEMORY(memory);
    double *s = (double *)memory + threadIdx.x / 32 * 32;
    const int64_t chunk = warp_of();
    const int64_t lo = chunk * CHUNK, hi = lo + CHUNK < n ? lo + CHUNK : n;
    double sum = 0;
    if (lo >= n)
        return;
    int64_t i = lo + lane();
    for (; i + 32 * (U - 1) < hi; i += 32 * U) {
        float x[U];
#pragma unroll
        for (int j = 0; j < U; j++)
            x[j] = g[i + 32 * j];
#pragma unroll
        for (int j = 0; j < U; j++)
            sum += (double)x[j] * (double)x[j]; /* the product is exact */
    }
    for (; i < hi; i += 32)
        sum += (double)g[i] * (double)g[i];
    s[lane()] = sum;
    for (int half = 16; half > 0; half /= 2) {
        sync_warp();
        if (lane() < half)
            s[lane()] += s[lane() + half];
    }
    if (lane() == 0)
        out[chunk] = s[0];
}

/* In order, by one thread; the block brings the numbers. */
template <int N> KERNEL(THREADS, 1) root_of_sum(int64_t n, const double *sums, double *norm)
{
    SHARED_MEMORY(memory);
    double *s = (double *)memory, sum = 0;
    for (int64_t base = 0; base < n; base += N) {
        const int here = (int)(n - base < N ? n - base : N);
        for (int i = (int)threadIdx.x; i < here; i += THREADS)
            s[i] = sums[base + i];
        sync_block();
        for (int i = 0; threadIdx.x == 0 && i < here; i++)
            sum += s[i];
        sync_block();
    }
    if (threadIdx.x == 0)
        *norm = sqrt(sum);
}

struct rope_args {
    int64_t T, heads, ldx, ldh;
    void *x;
    const float *cos, *sin;
    int half;
    bool interleaved, inverse;
};

template <class E> KERNEL(THREADS, 1) rotate(rope_args p)
{
    const int64_t at = warp_of();
    const int64_t t = at / p.heads, h = at % p.heads;
    if (t >= p.T)
        return;
    E *x = (E *)p.x + t * p.ldx + h * p.ldh;
    const float *c = p.cos + t * p.half, *s = p.sin + t * p.half;
    const bool gather = p.interleaved && !p.inverse, scatter = p.interleaved && p.inverse;
    float a[PAIRS], b[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane() + 32 * j;
        if (i < p.half) {
            a[j] = to_f(x[gather ? 2 * i : i]);
            b[j] = to_f(x[gather ? 2 * i + 1 : p.half + i]);
        }
    }
    sync_warp(); /* pairs are written where others were read */
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane() + 32 * j;
        if (i < p.half) {
            const float cs = c[i], sn = p.inverse ? -s[i] : s[i];
            x[scatter ? 2 * i : i] = cast<E>(a[j] * cs - b[j] * sn);
            x[scatter ? 2 * i + 1 : p.half + i] = cast<E>(b[j] * cs + a[j] * sn);
        }
    }
}

/* A thread an angle, a search of its sequence each: both tables are written once, nothing else moves. */
struct table_args {
    ckpt_cuda_seq seq;
    const int64_t *first;
    const float *freq;
    int64_t half;
    float scale;
    float *cos, *sin;
};
KERNEL(THREADS, 1) angles(table_args p)
{
    const int64_t at = index_of(), t = at / p.half;
    if (t >= p.seq.tokens)
        return;
    int64_t n = 0, end = p.seq.n; /* cu[n] <= t < cu[end] */
    while (end - n > 1) {
        const int64_t mid = n + (end - n) / 2;
        if (p.seq.cu[mid] <= t)
            n = mid;
        else
            end = mid;
    }
    const int64_t position = t - p.seq.cu[n] + (p.first ? p.first[n] : 0);
    const float angle = (float)position * p.freq[at % p.half];
    p.cos[at] = cosf(angle) * p.scale;
    p.sin[at] = sinf(angle) * p.scale;
}

} // namespace
} // namespace kda

using namespace kda;

static ckpt_status step(const ckpt_cuda *c, int64_t n, const ckpt_adamw_scalars &own,
                        const ckpt_adamw_scalars *kept, float *w, float *m, float *v,
                        const float *g, uint16_t *bits, ckpt_err *err)
{
    constexpr int N = 4;
    if (n < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "adamw on CUDA: %lld elements", (long long)n);
    const ckpt_status status = grid_fits("adamw", ceil_div(n, THREADS * N), err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(adamw<N>, ceil_div(n, THREADS * N), THREADS, 0, stream_of(c->stream), n, own, kept, w, m,
           v, g, bits);
    return launched("adamw", err);
}
ckpt_status ckpt_cuda_adamw(const ckpt_cuda *c, int64_t n, const ckpt_adamw_scalars *k, float *w,
                            float *m, float *v, const float *g, uint16_t *bits, ckpt_err *err)
{
    return step(c, n, *k, NULL, w, m, v, g, bits, err);
}
ckpt_status ckpt_cuda_adamw_kept(const ckpt_cuda *c, int64_t n, const ckpt_adamw_scalars *k,
                                 float *w, float *m, float *v, const float *g, uint16_t *bits,
                                 ckpt_err *err)
{
    return step(c, n, ckpt_adamw_scalars(), k, w, m, v, g, bits, err);
}

ckpt_status ckpt_cuda_sumsq(const ckpt_cuda *c, int64_t n, const float *g, double *sums,
                            ckpt_err *err)
{
    const int64_t blocks = ceil_div(ceil_div(n, CHUNK), THREADS / 32);
    if (n < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "gradient norm on CUDA: %lld elements", (long long)n);
    const ckpt_status status = grid_fits("gradient norm", blocks, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(square_sums<16>, blocks, THREADS, THREADS * sizeof(double), stream_of(c->stream), n, g,
           sums);
    return launched("gradient norm", err);
}

ckpt_status ckpt_cuda_norm(const ckpt_cuda *c, int64_t n, const double *sums, double *norm,
                           ckpt_err *err)
{
    constexpr int N = 2048;
    if (n < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "gradient norm on CUDA: %lld sums", (long long)n);
    LAUNCH(root_of_sum<N>, 1, THREADS, N * sizeof(double), stream_of(c->stream), n, sums, norm);
    return launched("gradient norm", err);
}

ckpt_status ckpt_cuda_rope(const ckpt_cuda *c, int64_t dim, bool interleaved, int64_t T,
                           int64_t heads, void *x, int64_t ldx, int64_t ldh, const float *cos,
                           const float *sin, bool inverse, ckpt_err *err)
{
    if (dim <= 0 || dim % 2 || T < 0 || heads < 0 || ldh < dim || ldx < 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "rope on CUDA: %lld channels, %lld tokens of %lld heads, strides %lld, "
                         "%lld",
                         (long long)dim, (long long)T, (long long)heads, (long long)ldx,
                         (long long)ldh);
    if (dim > 64 * PAIRS)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rope on CUDA: %lld channels, at most %d",
                         (long long)dim, 64 * PAIRS);
    ckpt_status status = ready("rope", c, 0, err);
    if (status == CKPT_OK && heads > 0 && T > INT32_MAX / heads)
        status = grid_fits("rope", INT64_MAX, err);
    if (status != CKPT_OK || T == 0 || heads == 0)
        return status;
    const rope_args p = {T, heads, ldx, ldh, x, cos, sin, (int)(dim / 2), interleaved, inverse};
    const int64_t blocks = ceil_div(T * heads, THREADS / 32);
    LAUNCH_OF(c, rotate, blocks, THREADS, 0, p);
    return launched("rope", err);
}

ckpt_status ckpt_cuda_rope_table(const ckpt_cuda *c, const ckpt_cuda_seq *seq, const int64_t *first,
                                 int64_t half, const float *freq, float scale, float *cos,
                                 float *sin, ckpt_err *err)
{
    if (half < 1 || seq->tokens < 0 || seq->n < 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "rotary tables on CUDA: %lld angles of %lld tokens in %lld sequences",
                         (long long)half, (long long)seq->tokens, (long long)seq->n);
    ckpt_status status = ready("rotary tables", c, 0, err);
    if (status == CKPT_OK && seq->tokens > INT32_MAX / half)
        status = grid_fits("rotary tables", INT64_MAX, err);
    if (status != CKPT_OK || seq->tokens == 0)
        return status;
    const table_args p = {*seq, first, freq, half, scale, cos, sin};
    LAUNCH(angles, ceil_div(seq->tokens * half, THREADS), THREADS, 0, stream_of(c->stream), p);
    return launched("rotary tables", err);
}
