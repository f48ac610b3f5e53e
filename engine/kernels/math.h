/* Elementwise mathematics without branches, so that loops over it become vector code.
 *
 * f32: exp with the reduction x = n ln 2 + r and a degree-5 polynomial (Cephes), within 1.5 ulp, exact
 * limits (0 below -104, infinity above 88.8); log1p on [0, 1] as 2 atanh(u / (2 + u)) by its series,
 * within 2 ulp. f64: the C library. NaN stays NaN everywhere. */
#ifndef CKPT_ENGINE_KERNEL_MATH_H
#define CKPT_ENGINE_KERNEL_MATH_H

#include "real.h"

#include <math.h>
#include <stdint.h>

#if CKPT_REAL == 32
typedef union k_bits {
    float f;
    uint32_t u;
} k_bits;

static inline float k_exp(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, kept in the low bits */
    k_bits t = {.f = x * 1.44269504088896341f + magic};
    float n = t.f - magic;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* 2^n as two factors: n reaches -150 and 128, outside one float's exponent. */
    int32_t i = (int32_t)(t.u - 0x4b400000u);
    int32_t half = i >> 1;
    k_bits a = {.u = (uint32_t)(half + 127) << 23}, b = {.u = (uint32_t)(i - half + 127) << 23};
    return p * a.f * b.f;
}

/* log(1 + u) for u in [0, 1]. */
static inline float k_log1p01(float u)
{
    float s = u / (2.0f + u), s2 = s * s;
    float p = 1.0f / 17;
    p = p * s2 + 1.0f / 15;
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    return 2 * s + 2 * s * (s2 * p);
}
#else
static inline double k_exp(double x)
{
    return exp(x);
}

static inline double k_log1p01(double u)
{
    return log1p(u);
}
#endif

static inline real k_sigmoid(real x)
{
    return 1 / (1 + k_exp(-x));
}

static inline real k_softplus(real x)
{
    real low = x < 0 ? x : -x;
    return (x > 0 ? x : 0) + k_log1p01(k_exp(low));
}

/* Derivative of x sigmoid(x), s = sigmoid(x). */
static inline real k_silu_slope(real x, real s)
{
    return s * (1 + x * (1 - s));
}

static inline real k_rsqrt(real x)
{
#if CKPT_REAL == 32
    return 1 / sqrtf(x);
#else
    return 1 / sqrt(x);
#endif
}

#endif
