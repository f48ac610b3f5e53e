/* Codecs of the small float formats that quantisation uses, one number at a time, bit-exact and the same
 * on a CPU and in a CUDA kernel: plain C without calls, branches on data or wider types. dtype.h holds
 * the general conversions (any pair, payloads of NaN); these round f32 alone, and saturate.
 *
 *            s/e/m    bias  largest      NaN          other
 *   E4M3     1/4/3    7     448   0x7e   0x7f, 0xff   no infinity
 *   E5M2     1/5/2    15    57344 0x7b   0x7d..0x7f   infinity 0x7c
 *   E2M1     1/2/1    1     6     7      none         encodes NaN as 7
 *   E8M0     0/8/0    127   2^127 254    255          no sign, no zero
 *   F16      1/5/10   15    65504        IEEE         overflows at 65520 to infinity
 *   BF16     1/8/7    127   upper half of f32
 *
 * Rounding: nearest, ties to the even code; zero keeps its sign; NaN encodes as the positive NaN.
 * Arithmetic on integers wherever the flush-to-zero mode of a processor could matter.
 * Compile users with contraction off (-ffp-contract=off; nvcc --fmad=false): every operation is rounded
 * once. Source: quant-emulation.md sections 1 and 2; OCP OFP8 1.0, OCP MX 1.0. */
#ifndef CKPT_CODEC_H
#define CKPT_CODEC_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define CKPT_CODEC static __host__ __device__ __forceinline__
#else
#define CKPT_CODEC static inline
#endif

CKPT_CODEC uint32_t ckpt_f32_bits(float x)
{
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

CKPT_CODEC float ckpt_f32_of(uint32_t b)
{
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* A sign-magnitude format with subnormals; max, over and nan are positive codes, over what a magnitude
 * beyond the largest becomes. */
typedef struct ckpt_codec {
    int mbits, bias;
    uint32_t sign, max, over, nan;
} ckpt_codec;

#define CKPT_CODEC_E4M3 ((ckpt_codec){3, 7, 0x80, 0x7e, 0x7e, 0x7f})
#define CKPT_CODEC_E5M2 ((ckpt_codec){2, 15, 0x80, 0x7b, 0x7b, 0x7f})
#define CKPT_CODEC_E2M1 ((ckpt_codec){1, 1, 0x8, 0x7, 0x7, 0x7})
#define CKPT_CODEC_F16 ((ckpt_codec){10, 15, 0x8000, 0x7bff, 0x7c00, 0x7e00})
/* The OCP non-saturating rules: to NaN, or to infinity. */
#define CKPT_CODEC_E4M3_OVER ((ckpt_codec){3, 7, 0x80, 0x7e, 0x7f, 0x7f})
#define CKPT_CODEC_E5M2_OVER ((ckpt_codec){2, 15, 0x80, 0x7b, 0x7c, 0x7f})

CKPT_CODEC uint32_t ckpt_codec_encode(ckpt_codec f, float x)
{
    uint32_t bits = ckpt_f32_bits(x), a = bits & 0x7fffffffu;
    uint32_t sign = bits >> 31 ? f.sign : 0;
    if (a > 0x7f800000u)
        return f.nan;
    int e = (int)(a >> 23) - 127, emin = 1 - f.bias;
    int shift = 23 - f.mbits + (e < emin ? emin - e : 0);
    if (a < 0x00800000u || shift > 24) /* below half the smallest subnormal of any of these */
        return sign;
    uint32_t m = (a & 0x7fffffu) | 0x800000u;
    uint32_t kept = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    /* a carry out of the mantissa lands in the exponent, also from subnormal to normal */
    uint32_t code = kept + (e > emin ? (uint32_t)(e - emin) << f.mbits : 0);
    return sign | (code > f.max ? f.over : code);
}

CKPT_CODEC float ckpt_codec_decode(ckpt_codec f, uint32_t code)
{
    uint32_t a = code & (f.sign - 1), sign = code & f.sign ? 0x80000000u : 0;
    int e = (int)(a >> f.mbits);
    uint32_t m = a & ((1u << f.mbits) - 1);
    if (a > f.max) /* E5M2's and F16's infinity, else NaN */
        return ckpt_f32_of(sign | (f.mbits != 3 && m == 0 ? 0x7f800000u : 0x7fc00000u));
    if (e > 0)
        return ckpt_f32_of(sign | (uint32_t)(e - f.bias + 127) << 23 | m << (23 - f.mbits));
    /* m units of the smallest subnormal, a power of two that f32 has as a normal number */
    float unit = ckpt_f32_of((uint32_t)(1 - f.bias - f.mbits + 127) << 23);
    float value = (float)m * unit;
    return ckpt_f32_of(sign | ckpt_f32_bits(value));
}

CKPT_CODEC float ckpt_codec_round(ckpt_codec f, float x)
{
    return ckpt_codec_decode(f, ckpt_codec_encode(f, x));
}

/* The value of encode at once, for magnitudes up to the largest: adding 1.5 * 2^23 units in the last
 * place leaves a sum whose rounding, nearest even, is the format's. No branches. NaN stays NaN. */
CKPT_CODEC float ckpt_codec_snap(int mbits, int bias, float x)
{
    uint32_t bits = ckpt_f32_bits(x);
    int32_t e = (int32_t)(bits & 0x7f800000u), least = (int32_t)((uint32_t)(1 - bias + 127) << 23);
    e = e > least ? e : least;
    float magic = ckpt_f32_of(((uint32_t)e + ((uint32_t)(23 - mbits) << 23)) | 0x400000u);
    float y = (x + magic) - magic;
    return ckpt_f32_of((ckpt_f32_bits(y) & 0x7fffffffu) | (bits & 0x80000000u));
}

/* 448 saturates before the snap: nothing beyond it is left that could round up. */
CKPT_CODEC float ckpt_e4m3_snap(float x)
{
    float y = x < -448.0f ? -448.0f : x > 448.0f ? 448.0f : x;
    return ckpt_codec_snap(3, 7, y);
}

/* x >= 0 or NaN. */
CKPT_CODEC float ckpt_e2m1_snap(float x)
{
    return ckpt_codec_snap(1, 1, x < 6.0f ? x : 6.0f);
}

/* From 65520 on: infinity. */
CKPT_CODEC float ckpt_f16_round(float x)
{
    uint32_t bits = ckpt_f32_bits(x), a = bits & 0x7fffffffu;
    if (a >= 0x477ff000u)
        return a > 0x7f800000u ? x : ckpt_f32_of((bits & 0x80000000u) | 0x7f800000u);
    return ckpt_codec_snap(10, 15, x);
}

CKPT_CODEC float ckpt_bf16_round(float x)
{
    uint32_t b = ckpt_f32_bits(x);
    if ((b & 0x7fffffffu) > 0x7f800000u)
        return x;
    return ckpt_f32_of((b + 0x7fffu + (b >> 16 & 1)) & 0xffff0000u);
}

/* Smallest power of two >= x >= 0. */
CKPT_CODEC uint32_t ckpt_e8m0_up(float x)
{
    uint32_t b = ckpt_f32_bits(x) & 0x7fffffffu, e = b >> 23, m = b & 0x7fffffu;
    if (b > 0x7f800000u)
        return 255;
    if (e == 255)
        return 254;
    return e + (m > 0 && e != 254 && !(e == 0 && m <= 0x400000u));
}

/* 2^(code - 127); 255: NaN. In double, which has 2^-127 as a normal number. */
CKPT_CODEC double ckpt_e8m0_decode(uint32_t code)
{
    uint64_t b = code == 255 ? UINT64_C(0x7ff8) << 48 : (uint64_t)(code + 1023 - 127) << 52;
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Division by and of a constant. GPU: as PyTorch computes it there, tensor * (1/c) and (1/tensor) * c;
 * else one rounded division. Conformance is the GPU's. */
CKPT_CODEC float ckpt_over(float x, float c, bool gpu)
{
    return gpu ? x * (1.0f / c) : x / c;
}

CKPT_CODEC float ckpt_under(float c, float x, bool gpu)
{
    return gpu ? (1.0f / x) * c : c / x;
}

/* What an FP8 row or tensor of largest magnitude a is multiplied by. */
CKPT_CODEC float ckpt_fp8_scale(float a, bool gpu)
{
    return ckpt_under(448.0f, a <= 5.9604644775390625e-8f ? 1.0f : a, gpu); /* 2^-24 */
}

CKPT_CODEC float ckpt_fp8_qdq(float x, float scale, float inverse)
{
    return ckpt_e4m3_snap(x * scale) * inverse;
}

/* What the elements of a state tile are divided by; limit 448 or 127. A zero tile, and one so small
 * that the quotient is zero: 1. */
CKPT_CODEC float ckpt_state_scale(float a, float limit, bool gpu)
{
    float s = ckpt_over(a, limit, gpu);
    return s > 0 ? s : 1.0f;
}

CKPT_CODEC float ckpt_state_qdq(float x, float scale, bool int8)
{
    float limit = int8 ? 127.0f : 448.0f, r = x / scale;
    r = r < -limit ? -limit : r > limit ? limit : r;
    if (!int8)
        return ckpt_e4m3_snap(r) * scale;
    const float magic = 12582912.0f; /* 1.5 * 2^23: rint, ties to even */
    float n = (r + magic) - magic;
    return ckpt_f32_of((ckpt_f32_bits(n) & 0x7fffffffu) | (ckpt_f32_bits(r) & 0x80000000u)) * scale;
}

/* NVFP4 as a GPU with Triton computes it. A: largest magnitude of the tensor of the call, b: of the
 * block of 16. The block's step, of which its elements are E2M1 multiples. */
CKPT_CODEC float ckpt_nvfp4_global(float A, bool gpu)
{
    float g = ckpt_over(A, 2688.0f, gpu);
    return g > 0 ? g : 1e-12f;
}

CKPT_CODEC float ckpt_nvfp4_step(float b, float global)
{
    float ratio = b / (6.0f * global);
    float s = ckpt_e4m3_snap(ratio < 448.0f ? ratio : 448.0f) * global;
    return s >= 1e-5f ? s : 1.0f;
}

/* NaN, which no block's b knows of, stays NaN. */
CKPT_CODEC float ckpt_nvfp4_qdq(float x, float step)
{
    float a = ckpt_f32_of(ckpt_f32_bits(x) & 0x7fffffffu);
    float y = ckpt_e2m1_snap(a / step) * step;
    return x != x ? x : x < 0 ? -y : y;
}

#endif
