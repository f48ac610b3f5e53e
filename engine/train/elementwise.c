/* Inner loops of the optimizer (elementwise.h): one body a loop, inlined into a function for every
 * instruction set. */
#include "elementwise.h"

#include <math.h>
#include <string.h>

#define BODY static inline __attribute__((always_inline)) void
#define SIMD _Pragma("omp simd")
#define LANES 32

/* torch.lerp: of the two forms the one that is exact at the nearer end. */
static inline __attribute__((always_inline)) float lerp(float from, float to, float weight)
{
    return weight < 0.5F ? from + weight * (to - from) : to - (to - from) * (1 - weight);
}

/* torch.optim.AdamW, single tensor: lerp, mul + addcmul, sqrt / root + eps, addcdiv. */
BODY adamw_body(int64_t n, const ckpt_adamw_scalars *k, float *restrict w, float *restrict m,
                float *restrict v, const float *restrict g)
{
    const ckpt_adamw_scalars s = *k;
    SIMD for (int64_t i = 0; i < n; i++)
    {
        const float gi = g[i] * s.scale;
        const float mi = lerp(m[i], gi, s.rise1);
        const float vi = v[i] * s.keep2 + s.rise2 * gi * gi;
        const float size = sqrtf(vi) / s.root + s.eps;
        m[i] = mi;
        v[i] = vi;
        w[i] = w[i] * s.decay + s.negative * mi / size;
    }
}

BODY direction_body(int64_t n, float scale, float rise, bool nesterov, const float *g, float *m,
                    float *d)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        const float gi = g[i] * scale;
        const float mi = lerp(m[i], gi, rise);
        m[i] = mi;
        d[i] = nesterov ? lerp(gi, mi, 1 - rise) : mi;
    }
}

BODY apply_body(int64_t n, float decay, float negative, float factor, const float *x, float *w)
{
    SIMD for (int64_t i = 0; i < n; i++) w[i] = w[i] * decay + negative * (factor * x[i]);
}

/* Eight lanes as one value: the compiler keeps them in registers, and splits them where registers are
 * narrower, which changes no sum. */
typedef float lanes_f32 __attribute__((vector_size(32)));
typedef double lanes __attribute__((vector_size(64)));

BODY sumsq_body(int64_t n, const float *x, double *out)
{
    lanes part[LANES / 8] = {{0}};
    double lane[LANES];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int p = 0; p < LANES / 8; p++) {
            lanes_f32 narrow;
            memcpy(&narrow, x + i + (ptrdiff_t)p * 8, sizeof narrow);
            const lanes v = __builtin_convertvector(narrow, lanes);
            part[p] += v * v;
        }
    memcpy(lane, part, sizeof lane);
    for (int j = 0; i + j < n; j++) {
        const double v = (double)x[i + j];
        lane[j] += v * v;
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    *out = lane[0];
}

/* To nearest even on the upper half of the bits; a NaN keeps its sign and becomes quiet. */
static inline __attribute__((always_inline)) uint32_t bf16_of(uint32_t u)
{
    const uint32_t rounded = (u + 0x7FFFU + (u >> 16 & 1U)) >> 16;
    return (u & 0x7FFFFFFFU) > 0x7F800000U ? (u >> 16 | 0x40U) : rounded;
}

BODY round_body(int64_t n, const float *x, float *y)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        u = bf16_of(u) << 16;
        memcpy(&y[i], &u, sizeof u);
    }
}

BODY bits_body(int64_t n, const float *x, uint16_t *bits)
{
    SIMD for (int64_t i = 0; i < n; i++)
    {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        bits[i] = (uint16_t)bf16_of(u);
    }
}

#define SET(name, target)                                                                          \
    target static void adamw_##name(int64_t n, const ckpt_adamw_scalars *k, float *w, float *m,    \
                                    float *v, const float *g)                                      \
    {                                                                                              \
        adamw_body(n, k, w, m, v, g);                                                              \
    }                                                                                              \
    target static void direction_##name(int64_t n, float scale, float rise, bool nesterov,         \
                                        const float *g, float *m, float *d)                        \
    {                                                                                              \
        if (nesterov)                                                                              \
            direction_body(n, scale, rise, true, g, m, d);                                         \
        else                                                                                       \
            direction_body(n, scale, rise, false, g, m, d);                                        \
    }                                                                                              \
    target static void apply_##name(int64_t n, float decay, float negative, float factor,          \
                                    const float *x, float *w)                                      \
    {                                                                                              \
        apply_body(n, decay, negative, factor, x, w);                                              \
    }                                                                                              \
    target static double sumsq_##name(int64_t n, const float *x)                                   \
    {                                                                                              \
        double out;                                                                                \
        sumsq_body(n, x, &out);                                                                    \
        return out;                                                                                \
    }                                                                                              \
    target static void round_##name(int64_t n, const float *x, float *y, uint16_t *bits)           \
    {                                                                                              \
        if (bits)                                                                                  \
            bits_body(n, x, bits);                                                                 \
        if (y)                                                                                     \
            round_body(n, x, y);                                                                   \
    }                                                                                              \
    static const ckpt_elementwise set_##name = {adamw_##name, direction_##name, apply_##name,      \
                                                sumsq_##name, round_##name};

SET(base, )
#if defined(__x86_64__)
SET(v3, __attribute__((target("avx2"))))
SET(v4, __attribute__((target("avx2,avx512f,avx512dq,avx512bw,avx512vl"))))
#endif

const ckpt_elementwise *ckpt_elementwise_for(ckpt_eng_isa isa)
{
#if defined(__x86_64__)
    if (isa == CKPT_ENG_V4)
        return &set_v4;
    if (isa == CKPT_ENG_V3)
        return &set_v3;
#endif
    (void)isa;
    return &set_base;
}
