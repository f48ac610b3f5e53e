/* Quantisers of arrays; the formulas are codec.h's and quant-emulation.md section 2's. */
#include "qdq.h"

#include "checked.h"

#include <float.h>
#include <math.h>

float ckpt_amax(const float *x, int64_t n)
{
    float a = 0;
    bool nan = false;
    for (int64_t i = 0; i < n; i++) {
        float m = ckpt_f32_of(ckpt_f32_bits(x[i]) & 0x7fffffffu);
        a = m > a ? m : a;
        nan = nan || m != m;
    }
    return nan ? NAN : a;
}

/* Without NaN. */
static float amax_of_numbers(const float *x, int64_t n)
{
    float a = 0;
    for (int64_t i = 0; i < n; i++) {
        float m = ckpt_f32_of(ckpt_f32_bits(x[i]) & 0x7fffffffu);
        a = m > a ? m : a;
    }
    return a;
}

/* Of n elements in each of some rows; NaN if there is one. */
static float amax_of_box(const float *x, int64_t rows, int64_t stride, int64_t n)
{
    float a = 0;
    for (int64_t r = 0; r < rows; r++) {
        float m = ckpt_amax(x + r * stride, n);
        a = m > a || m != m ? m : a;
    }
    return a;
}

static float clamp(float x, float limit)
{
    return x < -limit ? -limit : x > limit ? limit : x;
}

static void fp8_run(int64_t n, float scale, const float *x, float *y, uint8_t *codes)
{
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i++) {
        float v = x[i];
        if (codes != NULL)
            codes[i] = (uint8_t)ckpt_codec_encode(CKPT_CODEC_E4M3, clamp(v * scale, 448.0f));
        y[i] = ckpt_fp8_qdq(v, scale, inverse);
    }
}

void ckpt_qdq_fp8_rows(int64_t rows, int64_t width, bool gpu, const float *x, float *y,
                       uint8_t *codes, float *scales)
{
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * width;
        float scale = ckpt_fp8_scale(ckpt_amax(x + at, width), gpu);
        fp8_run(width, scale, x + at, y + at, codes != NULL ? codes + at : NULL);
        if (scales != NULL)
            scales[r] = scale;
    }
}

void ckpt_qdq_fp8_tensor(int64_t n, float amax, const float *x, float *y, uint8_t *codes,
                         float *scale)
{
    float s = ckpt_fp8_scale(amax < 0 ? ckpt_amax(x, n) : amax, false);
    fp8_run(n, s, x, y, codes);
    if (scale != NULL)
        *scale = s;
}

void ckpt_qdq_state(int64_t n, int64_t K, int64_t V, int64_t block_v, bool int8, bool gpu,
                    const float *x, float *y, float *scales)
{
    const int64_t tiles = (V + block_v - 1) / block_v;
    for (int64_t i = 0; i < n * tiles; i++) {
        const int64_t lo = i % tiles * block_v, len = ckpt_min_i64(block_v, V - lo);
        const int64_t at = i / tiles * K * V + lo;
        float s = ckpt_state_scale(amax_of_box(x + at, K, V, len), int8 ? 127.0f : 448.0f, gpu);
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = at + k * V; v < at + k * V + len; v++)
                y[v] = ckpt_state_qdq(x[v], s, int8);
        if (scales != NULL)
            scales[i] = s;
    }
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */

typedef struct nvfp4 {
    ckpt_nvfp4_profile profile;
    float amax, global; /* of the tensor */
    double two;         /* EXT: 448 * (6 / amax) */
} nvfp4;

/* What a block's elements are divided by, or for EXT also what they are multiplied by. */
typedef struct nvfp4_block {
    uint8_t code;
    float step, mul;
} nvfp4_block;

static nvfp4_block nvfp4_scale(const nvfp4 *t, float b)
{
    nvfp4_block k = {.step = 1, .mul = 1};
    if (t->profile == CKPT_NVFP4_EXT) {
        bool ok = b > 0 && isfinite(b) && t->amax > 0 && isfinite(t->amax);
        k.code = (uint8_t)ckpt_codec_encode(CKPT_CODEC_E4M3, (float)((double)(b / 6.0f) * t->two));
        double unscale = (double)ckpt_codec_decode(CKPT_CODEC_E4M3, k.code) / t->two;
        if (ok) {
            k.mul = (float)(1 / unscale);
            k.step = (float)unscale;
        }
        return k;
    }
    float ratio = b / (6.0f * t->global);
    if (t->profile == CKPT_NVFP4_TRITON) {
        k.code = (uint8_t)ckpt_codec_encode(CKPT_CODEC_E4M3, ratio < 448.0f ? ratio : 448.0f);
        k.step = ckpt_nvfp4_step(b, t->global);
        return k;
    }
    ratio = b == 0 ? 1.0f : ratio;
    ratio = ratio < 0.001953125f ? 0.001953125f : ratio > 448.0f ? 448.0f : ratio;
    k.code = (uint8_t)ckpt_codec_encode(CKPT_CODEC_E4M3, ratio);
    k.step = ckpt_codec_decode(CKPT_CODEC_E4M3, k.code) * (t->global > 0 ? t->global : 1.0f);
    return k;
}

void ckpt_qdq_nvfp4(int64_t rows, int64_t width, ckpt_nvfp4_profile profile, float amax, bool gpu,
                    const float *x, float *y, uint8_t *codes, uint8_t *scale_codes)
{
    const int64_t blocks = (width + 15) / 16;
    nvfp4 t = {.profile = profile, .amax = amax < 0 ? amax_of_numbers(x, rows * width) : amax};
    t.global = profile == CKPT_NVFP4_STORE ? ckpt_over(t.amax, 2688.0f, gpu)
                                           : ckpt_nvfp4_global(t.amax, gpu);
    t.two = t.amax > 0 ? 448.0 * (double)(6.0f / t.amax) : 1.0;
    for (int64_t i = 0; i < rows * blocks; i++) {
        const int64_t lo = i % blocks * 16, at = i / blocks * width + lo;
        const int64_t end = at + ckpt_min_i64(16, width - lo);
        nvfp4_block k = nvfp4_scale(&t, amax_of_numbers(x + at, end - at));
        if (scale_codes != NULL)
            scale_codes[i] = k.code;
        for (int64_t j = at; j < end; j++) {
            float v = x[j], a = v != v ? 0 : fabsf(v);
            float mag = profile == CKPT_NVFP4_EXT ? a * k.mul : a / k.step;
            mag = profile == CKPT_NVFP4_EXT && !isfinite(mag) ? 6.0f : mag;
            uint32_t code = ckpt_codec_encode(CKPT_CODEC_E2M1, mag);
            float q = ckpt_codec_decode(CKPT_CODEC_E2M1, code) * k.step;
            y[j] = v != v ? v : v < 0 ? -q : q;
            if (codes != NULL)
                codes[j] = (uint8_t)(code + (v < 0 ? 8 : 0));
        }
    }
}

/* ---- MXFP8, blocks --------------------------------------------------------------------------- */

static uint8_t mx_scale(float a, ckpt_mx_mode mode, float max, int emax)
{
    if (mode == CKPT_MX_CEIL_DIV)
        return (uint8_t)ckpt_e8m0_up(a / max);
    if (mode == CKPT_MX_CEIL_MUL)
        return (uint8_t)ckpt_e8m0_up(a * (float)(1.0 / (double)max));
    if (!(a > 0))
        return 0;
    int e;
    (void)frexp((double)a, &e);
    e -= 1 + emax;
    return (uint8_t)((e < -127 ? -127 : e > 127 ? 127 : e) + 127);
}

void ckpt_qdq_mxfp8(int64_t rows, int64_t width, ckpt_mx_mode mode, bool e5m2, const float *x,
                    float *y, uint8_t *codes, uint8_t *scale_codes)
{
    const ckpt_codec f = e5m2 ? CKPT_CODEC_E5M2 : CKPT_CODEC_E4M3;
    const float max = e5m2 ? 57344.0f : 448.0f;
    const int64_t blocks = (width + 31) / 32;
    for (int64_t i = 0; i < rows * blocks; i++) {
        const int64_t lo = i % blocks * 32, at = i / blocks * width + lo;
        const int64_t end = at + ckpt_min_i64(32, width - lo);
        uint8_t code = mx_scale(ckpt_amax(x + at, end - at), mode, max, e5m2 ? 15 : 8);
        double step = ckpt_e8m0_decode(code);
        if (scale_codes != NULL)
            scale_codes[i] = code;
        for (int64_t j = at; j < end; j++) {
            /* The quotient is a power of two away: exact in double, and f32 loses only what is far
             * below half of the smallest code, or above the largest. */
            uint32_t c = ckpt_codec_encode(f, (float)((double)x[j] / step));
            y[j] = (float)((double)ckpt_codec_decode(f, c) * step);
            if (codes != NULL)
                codes[j] = (uint8_t)c;
        }
    }
}

/* What elements are multiplied by (TE) or divided by (DeepSeek). */
static float block_scale(float a, ckpt_fp8_style style)
{
    if (style == CKPT_FP8_DEEPSEEK) {
        float s = a / 448.0f;
        return s > 0 ? s : 1.0f;
    }
    float m = a > 0 && isfinite(a) ? 448.0f / a : 1.0f;
    m = isinf(m) ? FLT_MAX : m;
    return style == CKPT_FP8_TE_POW2 ? ckpt_f32_of(ckpt_f32_bits(m) & 0xff800000u) : m;
}

void ckpt_qdq_fp8_block(int64_t rows, int64_t cols, int64_t br, int64_t bc, ckpt_fp8_style style,
                        const float *x, float *y, uint8_t *codes, float *scales)
{
    const int64_t across = (cols + bc - 1) / bc, down = (rows + br - 1) / br;
    for (int64_t i = 0; i < across * down; i++) {
        const int64_t r0 = i / across * br, c0 = i % across * bc;
        const int64_t r1 = ckpt_min_i64(rows, r0 + br), n = ckpt_min_i64(bc, cols - c0);
        float m = block_scale(amax_of_box(x + r0 * cols + c0, r1 - r0, cols, n), style);
        float s = style == CKPT_FP8_DEEPSEEK ? m : 1.0f / m;
        for (int64_t r = r0; r < r1; r++) {
            for (int64_t j = r * cols + c0; j < r * cols + c0 + n; j++) {
                float v = style == CKPT_FP8_DEEPSEEK ? x[j] / m : x[j] * m;
                uint32_t code = ckpt_codec_encode(CKPT_CODEC_E4M3, v);
                y[j] = ckpt_codec_decode(CKPT_CODEC_E4M3, code) * s;
                if (codes != NULL)
                    codes[j] = (uint8_t)code;
            }
        }
        if (scales != NULL)
            scales[i] = s;
    }
}
