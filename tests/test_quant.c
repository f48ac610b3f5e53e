/* Codecs and quantisers, bit by bit: every code, every value of bf16 and fp16, midpoints; arrays of the
 * oracle (tests/peers/gen_quant.py); and the oracle's own checks, one by one. */
#include "dtype.h"
#include "io.h"
#include "qdq.h"
#include "source.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_quant(void);

/* ck_assert_msg records every pass too, which costs more than a codec. */
#define EXPECT(test, ...)                                                                          \
    do {                                                                                           \
        if (!(test))                                                                               \
            ck_abort_msg(__VA_ARGS__);                                                             \
    } while (0)

static bool same(float a, float b)
{
    return ckpt_f32_bits(a) == ckpt_f32_bits(b) || (isnan(a) && isnan(b));
}

/* xorshift64*, so that failures repeat. */
static uint64_t rng_state = 88172645463325252u;

static uint64_t rng(void)
{
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return rng_state * 2685821657736338717u;
}

/* About normal, times a power of two from a wide range. */
static float random_float(int lo, int hi)
{
    double u = 0;
    for (int i = 0; i < 4; i++)
        u += (double)(rng() >> 11) / (double)(1ull << 53) - 0.5;
    return (float)ldexp(u, lo + (int)(rng() % (uint64_t)(hi - lo + 1)));
}

/* ---- formats ---------------------------------------------------------------------------------- */

typedef struct format {
    const char *name;
    ckpt_codec codec;
    int ebits, codes; /* codes: finite ones with a positive sign */
    double max;
    bool nan, inf;
} format;

static const format formats[] = {
    {"e4m3", {3, 7, 0x80, 0x7e, 0x7e, 0x7f},  4, 127, 448,   true,  false},
    {"e5m2", {2, 15, 0x80, 0x7b, 0x7b, 0x7f}, 5, 124, 57344, true,  true },
    {"e2m1", {1, 1, 0x8, 0x7, 0x7, 0x7},      2, 8,   6,     false, false},
};
#define N_FORMATS ((int)(sizeof formats / sizeof *formats))

/* From the fields alone. */
static double literal(const format *f, uint32_t code)
{
    const int m = f->codec.mbits, e = (int)(code >> m) & ((1 << f->ebits) - 1);
    const double sign = code & f->codec.sign ? -1 : 1;
    const int man = (int)(code & ((1u << m) - 1));
    return sign * (e == 0 ? ldexp(man, 1 - f->codec.bias - m)
                          : ldexp((1 << m) + man, e - f->codec.bias - m));
}

/* Nearest code by comparing with every midpoint, both exact in double; ties take the even code. */
static uint32_t brute(const format *f, double x)
{
    double a = fabs(x);
    uint32_t code = 0;
    for (int i = 1; i < f->codes; i++) {
        double mid = (literal(f, (uint32_t)i) + literal(f, (uint32_t)i - 1)) / 2;
        if (a > mid || (a == mid && i % 2 == 0))
            code = (uint32_t)i;
    }
    return code | (signbit(x) ? f->codec.sign : 0);
}

static void check_value(const format *f, float x)
{
    if (!isfinite(x))
        return;
    uint32_t want = brute(f, (double)x), got = ckpt_codec_encode(f->codec, x);
    EXPECT(got == want, "%s: %.9g encodes as %#x, not %#x", f->name, (double)x, got, want);
    float y = ckpt_codec_decode(f->codec, got);
    float snap = f->codec.mbits == 3   ? ckpt_e4m3_snap(x)
                 : f->codec.mbits == 2 ? y
                                       : ckpt_e2m1_snap(fabsf(x));
    EXPECT(same(f->codec.mbits == 1 ? fabsf(y) : y, snap), "%s: %.9g snaps to %.9g, not %.9g",
           f->name, (double)x, (double)snap, (double)y);
}

START_TEST(codes_decode_as_their_fields_say)
{
    const format *f = &formats[_i];
    int finite = 0;
    for (uint32_t code = 0; code < 2 * f->codec.sign; code++) {
        uint32_t a = code & (f->codec.sign - 1);
        float y = ckpt_codec_decode(f->codec, code);
        if (a >= (uint32_t)f->codes) {
            EXPECT(f->inf && a == 0x7c ? isinf(y) && (y < 0) == (code != a) : isnan(y),
                   "%s: code %#x is %g", f->name, code, (double)y);
            continue;
        }
        finite++;
        EXPECT((double)y == literal(f, code) && !signbit(y) == !(code & f->codec.sign),
               "%s: code %#x is %g", f->name, code, (double)y);
        EXPECT(ckpt_codec_encode(f->codec, y) == code, "%s: %#x comes back as %#x", f->name, code,
               ckpt_codec_encode(f->codec, y));
    }
    ck_assert_int_eq(finite, 2 * f->codes);
    ck_assert_double_eq(literal(f, (uint32_t)f->codes - 1), f->max);
}
END_TEST

/* Every fp16 and bf16 number, every code and midpoint with its neighbours, random numbers; both signs. */
START_TEST(values_round_to_the_nearest_even_code)
{
    const format *f = &formats[_i];
    for (uint32_t b = 0; b < 65536; b++) {
        float half;
        const uint16_t h = (uint16_t)b;
        ckpt_dtype_cast(CKPT_F32, &half, CKPT_F16, &h, 1);
        check_value(f, half);
        check_value(f, ckpt_f32_of(b << 16));
    }
    for (int i = 0; i < f->codes; i++) {
        float at = (float)literal(f, (uint32_t)i);
        float mid = i + 1 < f->codes ? (at + (float)literal(f, (uint32_t)i + 1)) / 2 : at * 1.01f;
        const float edges[] = {at, mid};
        for (int k = 0; k < 2; k++)
            for (int sign = -1; sign <= 1; sign += 2) {
                check_value(f, (float)sign * edges[k]);
                check_value(f, (float)sign * nextafterf(edges[k], 0));
                check_value(f, (float)sign * nextafterf(edges[k], 1e30f));
            }
    }
    for (int i = 0; i < 50000; i++)
        check_value(f, random_float(-30, 18));
}
END_TEST

START_TEST(special_values_encode_as_documented)
{
    const format *f = &formats[_i];
    const uint32_t top = (uint32_t)f->codes - 1;
    ck_assert_uint_eq(ckpt_codec_encode(f->codec, INFINITY), top);
    ck_assert_uint_eq(ckpt_codec_encode(f->codec, -INFINITY), top + f->codec.sign);
    ck_assert_uint_eq(ckpt_codec_encode(f->codec, NAN), f->nan ? 0x7f : top);
    ck_assert_uint_eq(ckpt_codec_encode(f->codec, -0.0f), f->codec.sign);
    ck_assert_uint_eq(ckpt_codec_encode(f->codec, 1e30f), top);
}
END_TEST

START_TEST(overflow_without_saturation_and_ties)
{
    static const float ties[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    static const uint32_t even[] = {0, 2, 2, 4, 4, 6, 6};
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E4M3_OVER, 464.0f), 0x7e);
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E4M3_OVER, 464.01f), 0x7f);
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E4M3_OVER, 479.0f), 0x7f);
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E4M3_OVER, 1e9f), 0x7f);
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E5M2_OVER, 61439.0f), 0x7b);
    ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E5M2_OVER, 61440.0f), 0x7c);
    for (size_t i = 0; i < 7; i++)
        ck_assert_uint_eq(ckpt_codec_encode(CKPT_CODEC_E2M1, ties[i]), even[i]);
}
END_TEST

/* fp16, bf16 and E8M0; the first two against the table's conversions, which torch has confirmed. */
START_TEST(halves_and_powers_of_two_round_as_their_formats_do)
{
    static const float halves[][2] = {
        {2049,   2048     },
        {2051,   2052     },
        {65519,  65504    },
        {65520,  INFINITY },
        {-65520, -INFINITY}
    };
    for (size_t i = 0; i < 5; i++)
        ck_assert(same(ckpt_f16_round(halves[i][0]), halves[i][1]));
    ck_assert(same(ckpt_bf16_round(257), 256) && same(ckpt_bf16_round(259), 260));
    for (int i = 0; i < 400000; i++) {
        float x = i % 2 ? random_float(-40, 20) : ckpt_f32_of((uint32_t)(rng() >> 32)), y, z;
        uint16_t h, b;
        ckpt_dtype_cast(CKPT_F16, &h, CKPT_F32, &x, 1);
        ckpt_dtype_cast(CKPT_BF16, &b, CKPT_F32, &x, 1);
        ckpt_dtype_cast(CKPT_F32, &y, CKPT_F16, &h, 1);
        ckpt_dtype_cast(CKPT_F32, &z, CKPT_BF16, &b, 1);
        EXPECT(same(ckpt_f16_round(x), y), "fp16 of %.9g", (double)x);
        EXPECT(same(ckpt_bf16_round(x), z), "bf16 of %.9g", (double)x);
    }
    for (uint32_t code = 0; code < 255; code++) {
        EXPECT(ckpt_e8m0_decode(code) == ldexp(1, (int)code - 127), "E8M0 code %u", code);
        EXPECT(ckpt_e8m0_up((float)ckpt_e8m0_decode(code)) == code, "E8M0 code %u back", code);
    }
    ck_assert(isnan(ckpt_e8m0_decode(255)));
    ck_assert_uint_eq(ckpt_e8m0_up(NAN), 255);
    ck_assert_uint_eq(ckpt_e8m0_up(INFINITY), 254);
    ck_assert_uint_eq(ckpt_e8m0_up(nextafterf(4, 8)), 130);
    ck_assert_uint_eq(ckpt_e8m0_up(0), 0);
}
END_TEST

/* ---- quantisers against the oracle's arrays ---------------------------------------------------- */

#define ROWS 9
#define WIDTH 40
#define MANY (2 * ROWS * WIDTH)

static ckpt_source golden;
static ckpt_err error;

static void open_golden(void)
{
    ck_assert_msg(ckpt_source_open(&golden, "tests/data/quant.safetensors", NULL, &error) ==
                      CKPT_OK,
                  "%s", error.text);
}

static void close_golden(void)
{
    ckpt_source_close(&golden);
}

/* Bytes of qdq/CASE/NAME; -1: there is none. */
static int64_t array(const char *name, const char *what, void *out, size_t room)
{
    char full[96];
    snprintf(full, sizeof full, "qdq/%s/%s", name, what);
    int64_t at = ckpt_source_find(&golden, full), count = 1;
    uint64_t bytes;
    if (at < 0)
        return -1;
    const ckpt_tensor *t = &golden.tensors[at];
    for (int i = 0; i < t->rank; i++)
        count *= t->dims[i];
    ck_assert(ckpt_dtype_bytes(t->dtype, count, &bytes) && bytes <= room);
    ck_assert(ckpt_source_read(&golden, t->chunks[0].file, out, bytes, t->chunks[0].offset,
                               &error) == CKPT_OK);
    return (int64_t)bytes;
}

typedef struct outcome {
    float x[MANY], y[MANY], scales[MANY];
    uint8_t codes[MANY], scale_codes[MANY];
} outcome;

static void quantise(const char *name, outcome *o)
{
    const bool gpu = strstr(name, "ieee") == NULL;
    if (strncmp(name, "fp8_rows", 8) == 0)
        ckpt_qdq_fp8_rows(ROWS, WIDTH, gpu, o->x, o->y, o->codes, o->scales);
    else if (strncmp(name, "fp8_tensor", 10) == 0)
        ckpt_qdq_fp8_tensor(ROWS * WIDTH, strstr(name, "static") ? 0.7f : -1, o->x, o->y, o->codes,
                            NULL);
    else if (strncmp(name, "nvfp4", 5) == 0)
        ckpt_qdq_nvfp4(ROWS, WIDTH,
                       strstr(name, "ext")     ? CKPT_NVFP4_EXT
                       : strstr(name, "store") ? CKPT_NVFP4_STORE
                                               : CKPT_NVFP4_TRITON,
                       -1, true, o->x, o->y, o->codes, o->scale_codes);
    else if (strncmp(name, "mxfp8", 5) == 0)
        ckpt_qdq_mxfp8(ROWS, WIDTH,
                       strstr(name, "floor")      ? CKPT_MX_FLOOR
                       : strstr(name, "ceil_mul") ? CKPT_MX_CEIL_MUL
                                                  : CKPT_MX_CEIL_DIV,
                       strstr(name, "e5m2") != NULL, o->x, o->y, o->codes, o->scale_codes);
    else if (strncmp(name, "block", 5) == 0)
        ckpt_qdq_fp8_block(ROWS, WIDTH, 4, 16,
                           strstr(name, "pow2")       ? CKPT_FP8_TE_POW2
                           : strstr(name, "deepseek") ? CKPT_FP8_DEEPSEEK
                                                      : CKPT_FP8_TE,
                           o->x, o->y, o->codes, NULL);
    else
        ckpt_qdq_state(2, ROWS, WIDTH, 16, strstr(name, "int8") != NULL, true, o->x, o->y,
                       o->scales);
}

static const char *const cases[] = {
    "fp8_rows_gpu",      "fp8_rows_ieee",       "fp8_tensor_dynamic",
    "fp8_tensor_static", "nvfp4_triton",        "nvfp4_ext",
    "nvfp4_store",       "mxfp8_ceil_div_e4m3", "mxfp8_ceil_mul_e4m3",
    "mxfp8_floor_e4m3",  "mxfp8_ceil_div_e5m2", "mxfp8_ceil_mul_e5m2",
    "mxfp8_floor_e5m2",  "block_deepseek",      "block_te",
    "block_te_pow2",     "state_e4m3",          "state_int8",
};
#define N_CASES ((int)(sizeof cases / sizeof *cases))

START_TEST(quantisers_match_the_oracle_bit_for_bit)
{
    static outcome o, want;
    const char *name = cases[_i];
    int64_t bytes = array(name, "x", o.x, sizeof o.x);
    ck_assert_int_gt(bytes, 0);
    quantise(name, &o);
    ck_assert_int_eq(array(name, "y", want.y, sizeof want.y), bytes);
    for (int64_t i = 0; i < bytes / 4; i++)
        EXPECT(same(o.y[i], want.y[i]), "%s: element %lld, %.9g, is %.9g, not %.9g", name,
               (long long)i, (double)o.x[i], (double)o.y[i], (double)want.y[i]);
    int64_t n = array(name, "code", want.codes, sizeof want.codes);
    if (n > 0)
        ck_assert_mem_eq(o.codes, want.codes, (size_t)n);
    n = array(name, "scale_code", want.scale_codes, sizeof want.scale_codes);
    if (n > 0)
        ck_assert_mem_eq(o.scale_codes, want.scale_codes, (size_t)n);
    n = array(name, "scale", want.scales, sizeof want.scales);
    if (n > 0)
        ck_assert_mem_eq(o.scales, want.scales, (size_t)n);
}
END_TEST

/* ---- the oracle's checks of quantisers ---------------------------------------------------------- */

static double relative(const float *y, const float *x, int n)
{
    double diff = 0, size = 0;
    for (int i = 0; i < n; i++) {
        diff += ((double)y[i] - (double)x[i]) * ((double)y[i] - (double)x[i]);
        size += (double)x[i] * (double)x[i];
    }
    return sqrt(diff / size);
}

static void fill(float *x, int n, int lo, int hi)
{
    for (int i = 0; i < n; i++)
        x[i] = random_float(lo, hi);
}

START_TEST(fp8_edges)
{
    float x[2] = {5.9604644775390625e-8f, -2.98023223876953125e-8f}, y[40], z[2];
    ckpt_qdq_fp8_rows(1, 2, true, x, y, NULL, NULL);
    ck_assert(same(y[0], 0.0f) && same(y[1], -0.0f)); /* amax <= 2^-24 */
    x[0] = 1.1920928955078125e-7f;                    /* 2^-23: above it */
    ckpt_qdq_fp8_rows(1, 1, true, x, y, NULL, NULL);
    ck_assert(same(y[0], x[0]));
    x[0] = 3.0f;
    x[1] = 0.1f;
    ckpt_qdq_fp8_tensor(2, 1.0f, x, y, NULL, NULL); /* a static amax clips */
    x[0] = 1.0f;
    ckpt_qdq_fp8_tensor(2, 1.0f, x, z, NULL, NULL);
    ck_assert(same(y[0], z[0]) && same(y[1], z[1]));
    x[1] = NAN;
    ckpt_qdq_fp8_rows(1, 2, true, x, y, NULL, NULL);
    ck_assert(isnan(y[0]) && isnan(y[1])); /* a NaN reaches its row */
    int under = 0, over = 0, n = 100000;
    for (int i = 0; i < n; i++) { /* the two rules of division are two */
        float a = (float)exp(6 * (double)random_float(1, 1));
        under += !same(ckpt_under(448.0f, a, true), ckpt_under(448.0f, a, false));
        over += !same(ckpt_over(a, 448.0f, true), ckpt_over(a, 448.0f, false));
    }
    ck_assert(under > n / 5 && under < n * 35 / 100 && over > n * 2 / 5 && over < n * 7 / 10);
    float row[40];
    fill(row, 40, 0, 0);
    ckpt_qdq_fp8_rows(1, 40, true, row, y, NULL, NULL);
    ck_assert_double_lt(relative(y, row, 40), 0.04);
}
END_TEST

/* By the formula alone, with the code found by comparing midpoints: one scale a row of [3, 2, 5, 40]. */
START_TEST(fp8_rows_recomputed_element_by_element)
{
    enum { R = 3 * 2 * 5, W = 40 };
    const format *f = &formats[0];
    static float x[R * W], y[R * W], scales[R];
    for (int r = 0; r < R; r++) {
        const float size = (float)exp(2 * (double)random_float(1, 1));
        for (int i = 0; i < W; i++)
            x[r * W + i] = size * random_float(1, 1);
    }
    ckpt_qdq_fp8_rows(R, W, true, x, y, NULL, scales);
    for (int r = 0; r < R; r++) {
        float amax = 0;
        for (int i = 0; i < W; i++)
            amax = fmaxf(amax, fabsf(x[r * W + i]));
        const volatile float unit = 1.0f / amax; /* rounded before it is multiplied */
        const float scale = unit * 448.0f, inverse = 1.0f / scale;
        EXPECT(same(scales[r], scale), "row %d: scale %.9g, not %.9g", r, (double)scales[r],
               (double)scale);
        for (int i = 0; i < W; i++) {
            const float t = fminf(fmaxf(x[r * W + i] * scale, -448.0f), 448.0f);
            const float want = (float)literal(f, brute(f, (double)t)) * inverse;
            EXPECT(same(y[r * W + i], want), "row %d, element %d: %.9g, not %.9g", r, i,
                   (double)y[r * W + i], (double)want);
        }
    }
}
END_TEST

START_TEST(state_edges)
{
    enum { K = 16, V = 40, N = K * V };
    static float x[2 * N], y[2 * N], s[6];
    fill(x + N, N, 0, 0);
    memset(x, 0, N * sizeof *x);
    ckpt_qdq_state(2, K, V, 16, false, true, x, y, s);
    ck_assert(same(s[0], 1) && same(s[1], 1) && same(s[2], 1)); /* zero tiles */
    for (int i = 0; i < N; i++)
        ck_assert(y[i] == 0);
    ck_assert_double_lt(relative(y + N, x + N, N), 0.05);
    ckpt_qdq_state(2, K, V, 16, true, true, x, y, s);
    ck_assert_double_lt(relative(y + N, x + N, N), 0.02);
    for (int i = 0; i < 4; i++)
        x[i] = 1e-45f;
    ckpt_qdq_state(1, 2, 2, 16, false, true, x, y, NULL);
    for (int i = 0; i < 4; i++)
        ck_assert(isfinite(y[i])); /* a scale that underflows */
}
END_TEST

static bool any(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] != 0)
            return true;
    return false;
}

START_TEST(nvfp4_edges)
{
    float x[32] = {0}, y[32], z[32];
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_TRITON, -1, true, x, y, NULL, NULL);
    ck_assert(!any(y, 32)); /* zero tensor */
    for (int i = 0; i < 16; i++) {
        x[i] = 5e-5f;
        x[16 + i] = 1;
    }
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_TRITON, -1, true, x, y, NULL, NULL);
    ck_assert(!any(y, 16)); /* a step below 1e-5 acts as one */
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_EXT, -1, true, x, y, NULL, NULL);
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_STORE, -1, true, x, z, NULL, NULL);
    ck_assert(any(y, 16) == any(z, 16));
    for (int i = 0; i < 16; i++) {
        x[i] = 2;
        x[16 + i] = 1e6f;
    }
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_TRITON, -1, true, x, y, NULL, NULL);
    for (int i = 0; i < 16; i++)
        ck_assert(same(y[i], 2)); /* rounded on the unit grid */
    ckpt_qdq_nvfp4(2, 16, CKPT_NVFP4_EXT, -1, true, x, y, NULL, NULL);
    ck_assert(!any(y, 16));
    const float mixed[4] = {-0.0f, -1e-3f, NAN, 1};
    ckpt_qdq_nvfp4(1, 4, CKPT_NVFP4_TRITON, -1, true, mixed, y, NULL, NULL);
    ck_assert(same(y[0], 0.0f) && same(y[1], -0.0f) && isnan(y[2]) && same(y[3], 1));
}
END_TEST

/* Rows of 40 are three blocks, the last as if zeros followed; every value is a code times its block's step. */
START_TEST(nvfp4_pads_rows_and_stays_on_its_grid)
{
    enum { R = 30, W = 40, PADDED = 48, BLOCKS = PADDED / 16 };
    static float x[R * W], y[R * W], wide[R * PADDED], z[R * PADDED];
    static uint8_t codes[R * W], scales[R * BLOCKS], again[R * BLOCKS];
    fill(x, R * W, -2, 2);
    for (int r = 0; r < R; r++)
        memcpy(wide + r * PADDED, x + r * W, W * sizeof *x);
    memset(scales, 0xff, sizeof scales);
    ckpt_qdq_nvfp4(R, W, CKPT_NVFP4_TRITON, -1, true, x, y, codes, scales);
    ckpt_qdq_nvfp4(R, PADDED, CKPT_NVFP4_TRITON, -1, true, wide, z, NULL, again);
    ck_assert_mem_eq(scales, again, sizeof scales);
    const float global = ckpt_nvfp4_global(ckpt_amax(x, R * W), true);
    for (int i = 0; i < R * W; i++) {
        const int r = i / W, c = i % W;
        const float step = ckpt_nvfp4_step(ckpt_amax(wide + r * PADDED + c / 16 * 16, 16), global);
        const double on_grid = (double)y[i] / (double)step;
        bool found = false;
        for (uint32_t code = 0; code < 16; code++)
            found = found || fabs(on_grid - literal(&formats[2], code)) < 1e-5;
        EXPECT(found, "element %d: %.9g of its step", i, on_grid);
        EXPECT(same(y[i], z[r * PADDED + c]), "element %d: %.9g, padded %.9g", i, (double)y[i],
               (double)z[r * PADDED + c]);
    }
}
END_TEST

/* The profiles differ in last bits everywhere and in codes hardly ever; codes decode to values. */
START_TEST(nvfp4_profiles_agree_but_for_boundaries)
{
    enum { R = 400, W = 256, N = R * W };
    static float x[N], y[N], z[N];
    static uint8_t codes[N], scales[N / 16];
    int differ = 0;
    fill(x, N, 0, 0);
    ckpt_qdq_nvfp4(R, W, CKPT_NVFP4_TRITON, -1, true, x, y, codes, scales);
    ckpt_qdq_nvfp4(R, W, CKPT_NVFP4_EXT, -1, true, x, z, NULL, NULL);
    const float global = ckpt_nvfp4_global(ckpt_amax(x, N), true);
    for (int i = 0; i < N; i++) {
        differ += fabs((double)y[i] - (double)z[i]) > 1e-5 * fabs((double)y[i]);
        float step = ckpt_codec_decode(CKPT_CODEC_E4M3, scales[i / 16]) * global;
        EXPECT(y[i] == ckpt_codec_decode(CKPT_CODEC_E2M1, codes[i]) * step, "element %d", i);
    }
    ck_assert_int_lt(differ, N / 1000);
    ck_assert_double_lt(relative(y, x, N), 0.12);
}
END_TEST

START_TEST(mxfp8_and_block_edges)
{
    static float x[200 * 300], y[200 * 300], s[6 * 200], tile[128 * 128], t[128 * 128];
    uint8_t codes[3];
    memset(x, 0, 96 * sizeof *x);
    x[0] = 448;
    x[32] = 449;
    ckpt_qdq_mxfp8(3, 32, CKPT_MX_CEIL_DIV, false, x, y, NULL, codes);
    ck_assert(codes[0] == 127 && codes[1] == 128 && codes[2] == 0);
    ckpt_qdq_mxfp8(1, 32, CKPT_MX_FLOOR, false, x + 32, y, NULL, codes);
    ck_assert(codes[0] == 127 && same(y[0], 448)); /* floor clips */
    fill(x, 200 * 300, 0, 0);
    for (int mode = 0; mode < 3; mode++) {
        ckpt_qdq_mxfp8(200, 300, (ckpt_mx_mode)mode, false, x, y, NULL, NULL);
        ck_assert_double_lt(relative(y, x, 200 * 300), 0.06);
    }
    ckpt_qdq_fp8_block(200, 300, 128, 128, CKPT_FP8_DEEPSEEK, x, y, NULL, s);
    ck_assert_double_lt(relative(y, x, 200 * 300), 0.04);
    for (int i = 0; i < 128; i++)
        memcpy(tile + i * 128, x + i * 300, 128 * sizeof *tile);
    ckpt_qdq_state(1, 128, 128, 128, false, false, tile, t, NULL);
    for (int i = 0; i < 128; i++) /* a DeepSeek block is a state tile */
        ck_assert_mem_eq(t + i * 128, y + i * 300, 128 * sizeof *t);
    ckpt_qdq_fp8_block(200, 300, 1, 128, CKPT_FP8_TE_POW2, x, y, NULL, s);
    for (int i = 0; i < 600; i++) {
        int e;
        ck_assert(frexp((double)s[i], &e) == 0.5);
    }
    memset(x, 0, 16 * sizeof *x);
    ckpt_qdq_fp8_block(4, 4, 128, 128, CKPT_FP8_TE, x, y, NULL, NULL);
    ck_assert(!any(y, 16));
}
END_TEST

/* ---- the map of the oracle's checks ------------------------------------------------------------- */

static bool defines_test(const char *file, const char *test)
{
    char path[160], want[160];
    ckpt_buf text = {0};
    snprintf(path, sizeof path, "tests/%s", file);
    snprintf(want, sizeof want, "START_TEST(%s)", test);
    ck_assert_msg(ckpt_read_file(path, 1 << 20, &text, &error) == CKPT_OK, "%s", error.text);
    ckpt_buf_putc(&text, '\0');
    const bool found = strstr((const char *)text.data, want) != NULL;
    ckpt_buf_release(&text);
    return found;
}

START_TEST(oracle_checks_name_tests_that_exist)
{
    FILE *f = fopen("tests/quant/ORACLE.md", "r");
    char line[512], what[256], file[64], test[128];
    int next = 1, first, last;
    ck_assert_ptr_nonnull(f);
    while (fgets(line, sizeof line, f) != NULL) {
        const bool range = sscanf(line, "| %d-%d | %255[^|] | %63s | %127s |", &first, &last, what,
                                  file, test) == 5;
        if (!range) {
            if (sscanf(line, "| %d | %255[^|] | %63s | %127s |", &first, what, file, test) != 4)
                continue;
            last = first;
        }
        ck_assert_msg(first == next && last >= first, "%d-%d after %d", first, last, next - 1);
        ck_assert_msg(defines_test(file, test), "%d: no test %s in %s", first, test, file);
        next = last + 1;
    }
    fclose(f);
    ck_assert_int_eq(next, 131);
}
END_TEST

Suite *suite_quant(void)
{
    Suite *s = suite_create("quant");
    TCase *codec = tcase_create("codec"), *oracle = tcase_create("oracle"),
          *edges = tcase_create("edges");
    tcase_set_timeout(codec, 120);
    tcase_add_loop_test(codec, codes_decode_as_their_fields_say, 0, N_FORMATS);
    tcase_add_loop_test(codec, values_round_to_the_nearest_even_code, 0, N_FORMATS);
    tcase_add_loop_test(codec, special_values_encode_as_documented, 0, N_FORMATS);
    tcase_add_test(codec, overflow_without_saturation_and_ties);
    tcase_add_test(codec, halves_and_powers_of_two_round_as_their_formats_do);
    suite_add_tcase(s, codec);
    tcase_add_checked_fixture(oracle, open_golden, close_golden);
    tcase_add_loop_test(oracle, quantisers_match_the_oracle_bit_for_bit, 0, N_CASES);
    suite_add_tcase(s, oracle);
    tcase_set_timeout(edges, 60);
    tcase_add_test(edges, fp8_edges);
    tcase_add_test(edges, fp8_rows_recomputed_element_by_element);
    tcase_add_test(edges, state_edges);
    tcase_add_test(edges, nvfp4_edges);
    tcase_add_test(edges, nvfp4_pads_rows_and_stays_on_its_grid);
    tcase_add_test(edges, nvfp4_profiles_agree_but_for_boundaries);
    tcase_add_test(edges, mxfp8_and_block_edges);
    tcase_add_test(edges, oracle_checks_name_tests_that_exist);
    suite_add_tcase(s, edges);
    return s;
}
