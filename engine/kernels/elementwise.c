/* Norms, gates and activations. Sums over a row run in vector lanes, then across lanes, in an order
 * fixed by the instruction set; sums over rows are in row order. */
#include "kernels.h"
#include "math.h"

#define SUM _Pragma("omp simd reduction(+ : sum)")
#define SIMD _Pragma("omp simd")

void ENGK(rmsnorm)(int64_t rows, int64_t n, const real *x, const real *w, bool centered, real eps,
                   real *y, real *rstd)
{
    const real one = centered ? 1 : 0;
    for (int64_t i = 0; i < rows; i++, x += n, y += n) {
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++) sum += x[j] * x[j];
        const real r = k_rsqrt(sum / (real)n + eps);
        if (rstd)
            rstd[i] = r;
        if (w) {
            SIMD for (int64_t j = 0; j < n; j++) y[j] = x[j] * r * (w[j] + one);
        } else {
            SIMD for (int64_t j = 0; j < n; j++) y[j] = x[j] * r;
        }
    }
}

/* t = dy * w;  dx = r (t - xhat mean(t xhat));  dw += dy xhat. */
void ENGK(rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *w, bool centered,
                       const real *rstd, const real *dy, bool add, real *dx, real *dw)
{
    const real one = centered ? 1 : 0;
    for (int64_t i = 0; i < rows; i++, x += n, dy += n, dx += n) {
        const real r = rstd[i];
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++) sum += (w ? dy[j] * (w[j] + one) : dy[j]) * x[j];
        if (dw) {
            SIMD for (int64_t j = 0; j < n; j++) dw[j] += dy[j] * (x[j] * r);
        }
        const real mean = sum * r * r / (real)n; /* xhat mean(t xhat) = x mean */
        SIMD for (int64_t j = 0; j < n; j++)
        {
            real d = r * ((w ? dy[j] * (w[j] + one) : dy[j]) - x[j] * mean);
            dx[j] = add ? dx[j] + d : d;
        }
    }
}

void ENGK(gated_rmsnorm)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                         bool silu, real eps, real *y, real *rstd)
{
    for (int64_t i = 0; i < rows; i++, x += n, z += n, y += n) {
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++) sum += x[j] * x[j];
        const real r = k_rsqrt(sum / (real)n + eps);
        if (rstd)
            rstd[i] = r;
        if (silu) {
            SIMD for (int64_t j = 0; j < n; j++) y[j] = x[j] * r * w[j] * (z[j] * k_sigmoid(z[j]));
        } else {
            SIMD for (int64_t j = 0; j < n; j++) y[j] = x[j] * r * w[j] * k_sigmoid(z[j]);
        }
    }
}

/* t = dy act(z);  dz = dy xhat w act'(z);  dw += t xhat;  dx = r (w t - xhat mean(w t xhat)). */
void ENGK(gated_rmsnorm_bwd)(int64_t rows, int64_t n, const real *x, const real *z, const real *w,
                             bool silu, const real *rstd, const real *dy, real *dx, real *dz,
                             real *dw)
{
    for (int64_t i = 0; i < rows; i++, x += n, z += n, dy += n, dx += n, dz += n) {
        const real r = rstd[i];
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++)
        {
            real s = k_sigmoid(z[j]), xhat = x[j] * r;
            real act = silu ? z[j] * s : s;
            real slope = silu ? k_silu_slope(z[j], s) : s * (1 - s);
            real t = dy[j] * act;
            dz[j] = dy[j] * xhat * w[j] * slope;
            if (dw)
                dw[j] += t * xhat;
            dx[j] = t * w[j];
            sum += t * w[j] * xhat;
        }
        const real mean = sum * r / (real)n;
        SIMD for (int64_t j = 0; j < n; j++) dx[j] = r * (dx[j] - x[j] * mean);
    }
}

void ENGK(l2norm)(int64_t rows, int64_t n, const real *x, real eps, real *y, real *r)
{
    for (int64_t i = 0; i < rows; i++, x += n, y += n) {
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++) sum += x[j] * x[j];
        r[i] = k_rsqrt(sum + eps);
        SIMD for (int64_t j = 0; j < n; j++) y[j] = x[j] * r[i];
    }
}

/* dx = r (dy - y (dy . y)). */
void ENGK(l2norm_bwd)(int64_t rows, int64_t n, const real *y, const real *r, const real *dy,
                      real *dx)
{
    for (int64_t i = 0; i < rows; i++, y += n, dy += n, dx += n) {
        real sum = 0;
        SUM for (int64_t j = 0; j < n; j++) sum += dy[j] * y[j];
        SIMD for (int64_t j = 0; j < n; j++) dx[j] = r[i] * (dy[j] - y[j] * sum);
    }
}

void ENGK(gate)(int64_t n, const real *raw, const real *dt_bias, real rate, real bound, real *g)
{
    if (bound == 0) {
        SIMD for (int64_t j = 0; j < n; j++) g[j] = -rate * k_softplus(raw[j] + dt_bias[j]);
    } else {
        SIMD for (int64_t j = 0; j < n; j++) g[j] = bound * k_sigmoid(rate * (raw[j] + dt_bias[j]));
    }
}

/* Softplus form: da = -rate sigmoid(a) dg, dA_log = dg g.
 * Bounded form: da = dg bound s (1 - s) rate, dA_log = da a. */
void ENGK(gate_bwd)(int64_t T, int64_t K, int64_t ld, const real *raw, const real *dt_bias,
                    real rate, real bound, const real *dg, real *draw, real *dA_log, real *ddt_bias)
{
    real total = 0;
    for (int64_t t = 0; t < T; t++, raw += ld, dg += ld, draw += ld) {
        real sum = 0;
        if (bound == 0) {
            SUM for (int64_t j = 0; j < K; j++)
            {
                real a = raw[j] + dt_bias[j], d = dg[j];
                sum += d * (-rate * k_softplus(a));
                draw[j] = -rate * k_sigmoid(a) * d;
            }
        } else {
            SUM for (int64_t j = 0; j < K; j++)
            {
                real a = raw[j] + dt_bias[j], s = k_sigmoid(rate * a);
                real d = dg[j] * bound * s * (1 - s) * rate;
                sum += d * a;
                draw[j] = d;
            }
        }
        total += sum;
        if (ddt_bias) {
            SIMD for (int64_t j = 0; j < K; j++) ddt_bias[j] += draw[j];
        }
    }
    if (dA_log)
        *dA_log += total;
}

void ENGK(sigmoid)(int64_t n, real c, const real *x, real *y)
{
    SIMD for (int64_t i = 0; i < n; i++) y[i] = c * k_sigmoid(x[i]);
}

void ENGK(sigmoid_bwd)(int64_t n, real c, const real *y, const real *dy, real *dx)
{
    const real inv = 1 / c;
    SIMD for (int64_t i = 0; i < n; i++) dx[i] = dy[i] * y[i] * (1 - y[i] * inv);
}

void ENGK(swiglu)(int64_t n, const real *gate, const real *up, real clamp, real *y)
{
    if (clamp <= 0) {
        SIMD for (int64_t i = 0; i < n; i++) y[i] = gate[i] * k_sigmoid(gate[i]) * up[i];
        return;
    }
    SIMD for (int64_t i = 0; i < n; i++)
    {
        real g = gate[i] > clamp ? clamp : gate[i], u = up[i];
        u = u > clamp ? clamp : u < -clamp ? -clamp : u;
        y[i] = g * k_sigmoid(g) * u;
    }
}

void ENGK(swiglu_bwd)(int64_t n, const real *gate, const real *up, real clamp, const real *dy,
                      real *dgate, real *dup)
{
    if (clamp <= 0) {
        SIMD for (int64_t i = 0; i < n; i++)
        {
            real g = gate[i], u = up[i], d = dy[i], s = k_sigmoid(g);
            dgate[i] = d * u * k_silu_slope(g, s);
            dup[i] = d * g * s;
        }
        return;
    }
    SIMD for (int64_t i = 0; i < n; i++)
    {
        real g0 = gate[i], u0 = up[i], d = dy[i];
        real g = g0 > clamp ? clamp : g0;
        real u = u0 > clamp ? clamp : u0 < -clamp ? -clamp : u0;
        real s = k_sigmoid(g);
        real dg = d * u * k_silu_slope(g, s), du = d * g * s;
        dgate[i] = g0 > clamp ? 0 : dg;
        dup[i] = u0 > clamp || u0 < -clamp ? 0 : du;
    }
}

void ENGK(relu2)(int64_t n, const real *x, real *y)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        real p = x[i] < 0 ? 0 : x[i]; /* so that NaN stays */
        y[i] = p * p;
    }
}

void ENGK(relu2_bwd)(int64_t n, const real *x, const real *dy, real *dx)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        real p = x[i] < 0 ? 0 : x[i];
        dx[i] = 2 * p * dy[i];
    }
}

/* The larger; NaN if one of them is. */
static inline real larger(real a, real b)
{
    return b > a || b != b ? b : a;
}

#define LANES 32

real ENGK(maximum)(int64_t n, real top, const real *x)
{
    real lane[LANES];
    int64_t i = 0;
    for (int64_t l = 0; l < LANES; l++)
        lane[l] = top;
    for (; i + LANES <= n; i += LANES)
        for (int64_t l = 0; l < LANES; l++)
            lane[l] = larger(lane[l], x[i + l]);
    for (; i < n; i++)
        top = larger(top, x[i]);
    for (int64_t l = 0; l < LANES; l++)
        top = larger(top, lane[l]);
    return top;
}

real ENGK(exp_sum)(int64_t n, real top, const real *x, real *y)
{
    real sum = 0;
    SUM for (int64_t i = 0; i < n; i++)
    {
        const real p = k_exp(x[i] - top);
        y[i] = p;
        sum += p;
    }
    return sum;
}

void ENGK(softmax_bwd)(int64_t n, real lse, real d, real scale, real *p, real *dp)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        const real q = k_exp(p[i] - lse);
        p[i] = q;
        dp[i] = q * (dp[i] - d) * scale;
    }
}

real ENGK(dot)(int64_t n, const real *x, const real *y)
{
    real sum = 0;
    SUM for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}
