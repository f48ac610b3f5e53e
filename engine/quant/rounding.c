/* Rounding of arrays of the element type by the codecs of codec.h, and products and inverses whose sums a
 * policy may round. */
#include "internal.h"

#include "checked.h"
#include "kernels/math.h"

#include <string.h>

real ENG(quant_round)(ckpt_quant_dtype dtype, real x)
{
    switch (dtype) {
    case CKPT_QUANT_F32:
        return (real)(float)x;
    case CKPT_QUANT_F16:
        return (real)ckpt_f16_round((float)x);
    case CKPT_QUANT_BF16:
        return (real)ckpt_bf16_round((float)x);
    case CKPT_QUANT_NO_ROUNDING:
        break;
    }
    return x;
}

void ENG(quant_boundary)(ckpt_quant_dtype dtype, int64_t n, real *x)
{
    if (dtype == CKPT_QUANT_NO_ROUNDING)
        return;
    for (int64_t i = 0; i < n; i++)
        x[i] = ENG(quant_round)(dtype, x[i]);
}

/* Magnitudes are ordered as their bits are, which compilers vectorise. */
static int32_t magnitude(real x)
{
    return (int32_t)(ckpt_f32_bits((float)x) & 0x7fffffffu);
}

float ENG(quant_peak)(const real *x, int64_t n)
{
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t m = magnitude(x[i]);
        m = m > 0x7f800000 ? 0 : m; /* NaN is left out */
        most = m > most ? m : most;
    }
    return ckpt_f32_of((uint32_t)most);
}

/* NaN, whose bits are above those of infinity, reaches its whole row. */
static float peak_or_nan(const real *x, int64_t n)
{
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t m = magnitude(x[i]);
        most = m > most ? m : most;
    }
    return ckpt_f32_of((uint32_t)most);
}

static void fp8_row(int64_t n, const real *x, real *y)
{
    float scale = ckpt_fp8_scale(peak_or_nan(x, n), true), inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i++)
        y[i] = (real)ckpt_fp8_qdq((float)x[i], scale, inverse);
}

static void nvfp4_row(float global, int64_t n, const real *x, real *y)
{
    for (int64_t at = 0; at < n; at += 16) {
        const int64_t end = ckpt_min_i64(at + 16, n);
        float step = ckpt_nvfp4_step(ENG(quant_peak)(x + at, end - at), global);
        for (int64_t i = at; i < end; i++)
            y[i] = (real)ckpt_nvfp4_qdq((float)x[i], step);
    }
}

void ENG(quant_qdq)(ckpt_quant_kind kind, float global, int64_t rows, int64_t width, const real *x,
                    real *y)
{
    if (kind == CKPT_QUANT_FP8)
        for (int64_t r = 0; r < rows; r++)
            fp8_row(width, x + r * width, y + r * width);
    else if (kind == CKPT_QUANT_NVFP4)
        for (int64_t r = 0; r < rows; r++)
            nvfp4_row(global, width, x + r * width, y + r * width);
    else if (x != y)
        memcpy(y, x, (size_t)(rows * width) * sizeof *y);
}

void ENG(quant_state)(const ckpt_quant *q, int64_t K, int64_t V, real *x)
{
    const ckpt_quant_kind kind = q->kind[CKPT_HANDLE_STATE];
    const bool int8 = kind == CKPT_QUANT_STATE_INT8;
    for (int64_t lo = 0; kind != CKPT_QUANT_OFF && lo < V; lo += q->block_v) {
        const int64_t len = ckpt_min_i64(q->block_v, V - lo);
        float a = 0;
        for (int64_t k = 0; k < K; k++) {
            float m = ENG(quant_peak)(x + k * V + lo, len);
            a = m > a ? m : a;
        }
        float s = ckpt_state_scale(a, int8 ? 127.0f : 448.0f, true);
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = k * V + lo; v < k * V + lo + len; v++)
                x[v] = (real)ckpt_state_qdq((float)x[v], s, int8);
    }
}

/* ---- products --------------------------------------------------------------------------------- */

/* Eight sums side by side, so that they are one vector. */
static real dot(int64_t n, const real *a, const real *b)
{
    real s[8] = {0}, rest = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            s[l] += a[i + l] * b[i + l];
    for (; i < n; i++)
        rest += a[i] * b[i];
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])) + rest;
}

real ENG(quant_dot)(const ckpt_quant *q, ckpt_quant_site site, int64_t k, const real *a,
                    const real *b)
{
    const ckpt_quant_dtype dtype = q->accumulator[site];
    real acc = 0;
    if (dtype == CKPT_QUANT_NO_ROUNDING)
        return dot(k, a, b);
    const int64_t block = ckpt_min_i64(q->block[site], k);
    for (int64_t lo = 0; lo < k; lo += block) {
        real part = dot(ckpt_min_i64(block, k - lo), a + lo, b + lo);
        acc = ENG(quant_round)(dtype, acc + part);
    }
    return acc;
}

void ENG(quant_product)(const ckpt_quant *q, ckpt_quant_site site, int64_t m, int64_t n, int64_t k,
                        const real *a, const real *b, real *c, real *tmp)
{
    const ckpt_quant_dtype dtype = q->accumulator[site];
    if (dtype == CKPT_QUANT_NO_ROUNDING) {
        ENG(gemm)(false, true, m, n, k, 1, a, k, b, k, 0, c, n);
        return;
    }
    const int64_t block = ckpt_min_i64(q->block[site], k);
    memset(c, 0, (size_t)(m * n) * sizeof *c);
    for (int64_t lo = 0; lo < k; lo += block) {
        ENG(gemm)
        (false, true, m, n, ckpt_min_i64(block, k - lo), 1, a + lo, k, b + lo, k, 0, tmp, n);
        for (int64_t i = 0; i < m * n; i++)
            c[i] = ENG(quant_round)(dtype, c[i] + tmp[i]);
    }
}

void ENG(quant_exp)(const ckpt_quant *q, bool exact, int64_t n, const real *x, real *y)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = k_exp(x[i]);
    if (!exact)
        ENG(quant_boundary)(q->rounding[CKPT_BOUNDARY_GATE_EXP], n, y);
}

void ENG(quant_transpose)(int64_t rows, int64_t cols, const real *x, real *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            y[c * rows + r] = x[r * cols + c];
}

/* ---- inverse ---------------------------------------------------------------------------------- */

/* x [64, 64] = (I + l)^-1 row by row: row i of it is e_i - sum of l_ij times row j. */
static void substitute(int64_t len, const double *l, double *x)
{
    memset(x, 0, CH * CH * sizeof *x);
    for (int64_t i = 0; i < CH; i++) {
        x[i * CH + i] = 1;
        for (int64_t j = 0; i < len && j < i; j++) {
            const double f = l[i * CH + j];
            for (int64_t c = 0; c <= j; c++)
                x[i * CH + c] -= f * x[j * CH + c];
        }
    }
}

/* c = a b of lower triangles; c is neither. */
static void multiply(const double *a, const double *b, double *c)
{
    memset(c, 0, CH * CH * sizeof *c);
    for (int64_t i = 0; i < CH; i++)
        for (int64_t k = 0; k <= i; k++)
            for (int64_t j = 0; j <= k; j++)
                c[i * CH + j] += a[i * CH + k] * b[k * CH + j];
}

/* x = (I - l)(I + l^2)(I + l^4)..., computed in f32 steps as a fast kernel would: rounded after every
 * product. p, t: room. */
static void series(int factors, const double *l, double *x, double *p, double *t)
{
    for (int64_t i = 0; i < CH * CH; i++)
        x[i] = (i % (CH + 1) == 0) - l[i];
    memcpy(p, l, CH * CH * sizeof *p);
    for (int f = 1; f < factors && f < 7; f++) {
        multiply(p, p, t);
        for (int64_t i = 0; i < CH * CH; i++)
            p[i] = (real)t[i];
        multiply(x, p, t);
        for (int64_t i = 0; i < CH * CH; i++)
            x[i] = (real)(x[i] + t[i]);
    }
}

static double largest(const double *a, const double *b)
{
    double most = 0;
    for (int64_t i = 0; i < CH * CH; i++) {
        double d = fabs(a[i] - (b != NULL ? b[i] : (double)(i % (CH + 1) == 0)));
        most = d > most || isnan(d) ? d : most;
    }
    return most;
}

void ENG(quant_inverse)(int factors, int64_t len, const real *lower, real *out, double *work,
                        double errors[2])
{
    double *l = work, *x = work + CH * CH, *a = work + 2 * CH * CH;
    errors[0] = errors[1] = 0;
    memset(l, 0, CH * CH * sizeof *l);
    for (int64_t i = 0; i < len; i++)
        for (int64_t j = 0; j < i; j++)
            l[i * CH + j] = (double)lower[i * CH + j];
    substitute(len, l, x);
    if (factors > 0) {
        double *p = work + 3 * CH * CH, *t = work + 4 * CH * CH;
        series(factors, l, a, p, t);
        errors[0] = largest(a, x);
        for (int64_t i = 0; i < CH; i++)
            l[i * CH + i] = 1;
        multiply(a, l, t);
        errors[1] = largest(t, NULL);
        x = a;
    }
    for (int64_t i = 0; i < CH * CH; i++)
        out[i] = (real)x[i];
}
