/* Dtype table, exact conversions against an independent slow reference, torch goldens. */
#include "codec.h"
#include "dtype.h"

#include <check.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_dtype(void);

/* ck_assert_msg records every pass too, which costs more than the conversions in hot loops. */
#define EXPECT(test, ...)                                                                          \
    do {                                                                                           \
        if (!(test))                                                                               \
            ck_abort_msg(__VA_ARGS__);                                                             \
    } while (0)

static uint64_t double_bits(double d)
{
    uint64_t x;
    memcpy(&x, &d, sizeof x);
    return x;
}

static double bits_double(uint64_t x)
{
    double d;
    memcpy(&d, &x, sizeof d);
    return d;
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

/* ---- table ---- */

static const struct {
    const char *name, *torch, *storage;
    int bits;
} spellings[] = {
    {"C128",        "complex128",       "ComplexDoubleStorage", 128},
    {"U64",         "uint64",           NULL,                   64 },
    {"I64",         "int64",            "LongStorage",          64 },
    {"F64",         "float64",          "DoubleStorage",        64 },
    {"C64",         "complex64",        "ComplexFloatStorage",  64 },
    {"F32",         "float32",          "FloatStorage",         32 },
    {"U32",         "uint32",           NULL,                   32 },
    {"I32",         "int32",            "IntStorage",           32 },
    {"C32",         "complex32",        NULL,                   32 },
    {"BF16",        "bfloat16",         "BFloat16Storage",      16 },
    {"F16",         "float16",          "HalfStorage",          16 },
    {"U16",         "uint16",           NULL,                   16 },
    {"I16",         "int16",            "ShortStorage",         16 },
    {"F8_E5M2FNUZ", "float8_e5m2fnuz",  NULL,                   8  },
    {"F8_E4M3FNUZ", "float8_e4m3fnuz",  NULL,                   8  },
    {"F8_E8M0",     "float8_e8m0fnu",   NULL,                   8  },
    {"F8_E4M3",     "float8_e4m3fn",    NULL,                   8  },
    {"F8_E5M2",     "float8_e5m2",      NULL,                   8  },
    {"I8",          "int8",             "CharStorage",          8  },
    {"U8",          "uint8",            "ByteStorage",          8  },
    {"F6_E3M2",     NULL,               NULL,                   6  },
    {"F6_E2M3",     NULL,               NULL,                   6  },
    {"F4",          "float4_e2m1fn_x2", NULL,                   4  },
    {"BOOL",        "bool",             "BoolStorage",          8  },
};

START_TEST(dtype_names_round_trip_in_enum_order)
{
    ckpt_dtype found;
    const ckpt_dtype_info *f = ckpt_dtype_get((ckpt_dtype)_i);
    ck_assert_str_eq(f->name, spellings[_i].name);
    ck_assert_int_eq(f->bits, spellings[_i].bits);
    ck_assert(ckpt_dtype_from_name(f->name, strlen(f->name), &found) && found == (ckpt_dtype)_i);
    ck_assert(!ckpt_dtype_from_name(f->name, strlen(f->name) - 1, &found) ||
              found != (ckpt_dtype)_i);
    ck_assert_pstr_eq(f->torch, spellings[_i].torch);
    if (f->torch)
        ck_assert(ckpt_dtype_from_torch(f->torch, &found) && found == (ckpt_dtype)_i);
    ck_assert_pstr_eq(f->storage, spellings[_i].storage);
    if (f->storage)
        ck_assert(ckpt_dtype_from_storage(f->storage, &found) && found == (ckpt_dtype)_i);
    if (f->kind == CKPT_KIND_FLOAT)
        ck_assert_int_eq(f->exp_bits + f->man_bits + (_i != CKPT_F8_E8M0), f->bits);
    ck_assert_int_eq(f->safetensors, _i != CKPT_C128 && _i != CKPT_C32);
}
END_TEST

START_TEST(dtype_unknown_names_are_refused)
{
    ckpt_dtype d;
    ck_assert(!ckpt_dtype_from_name("f32", 3, &d));
    ck_assert(!ckpt_dtype_from_name("", 0, &d));
    ck_assert(!ckpt_dtype_from_name("F32\0", 4, &d));
    ck_assert(!ckpt_dtype_from_torch("half", &d));
    ck_assert(!ckpt_dtype_from_torch("torch.float32", &d));
    ck_assert(!ckpt_dtype_from_torch("", &d));
    ck_assert(!ckpt_dtype_from_storage("UntypedStorage", &d));
    ck_assert_ptr_null(ckpt_dtype_get(CKPT_DTYPE_COUNT));
}
END_TEST

static const struct {
    ckpt_dtype dtype;
    int64_t n;
    bool ok;
    uint64_t bytes;
} sizes[] = {
    {CKPT_F32,     3,         true,  12               },
    {CKPT_F32,     0,         true,  0                },
    {CKPT_F32,     -1,        false, 0                },
    {CKPT_F4,      2,         true,  1                },
    {CKPT_F4,      3,         false, 0                },
    {CKPT_F6_E2M3, 4,         true,  3                },
    {CKPT_F6_E3M2, 2,         false, 0                },
    {CKPT_U8,      INT64_MAX, false, 0                }, /* bits overflow, as the reference */
    {CKPT_U8,      1l << 60,  true,  UINT64_C(1) << 60},
    {CKPT_C128,    1l << 56,  true,  UINT64_C(1) << 60},
    {CKPT_C128,    1l << 57,  false, 0                },
};

START_TEST(dtype_bytes_checks_overflow_and_whole_bytes)
{
    uint64_t bytes = 0;
    ck_assert_int_eq(ckpt_dtype_bytes(sizes[_i].dtype, sizes[_i].n, &bytes), sizes[_i].ok);
    if (sizes[_i].ok)
        ck_assert_uint_eq(bytes, sizes[_i].bytes);
}
END_TEST

START_TEST(dtype_castable_is_floats_of_whole_bytes)
{
    for (int a = 0; a < CKPT_DTYPE_COUNT; a++)
        for (int b = 0; b < CKPT_DTYPE_COUNT; b++) {
            const char *p = spellings[a].name, *q = spellings[b].name;
            bool want = strspn(p, "BF") && strspn(q, "BF") && spellings[a].bits >= 8 &&
                        spellings[b].bits >= 8 && a != CKPT_BOOL && b != CKPT_BOOL;
            ck_assert_int_eq(ckpt_dtype_castable((ckpt_dtype)a, (ckpt_dtype)b), want);
        }
}
END_TEST

/* ---- independent reference: all finite values of a format in ascending order ---- */

typedef struct format {
    ckpt_dtype dtype;
    int exp_bits, man_bits, bias;
    uint32_t largest;  /* code of the largest finite magnitude */
    uint32_t overflow; /* code of +overflow */
    bool fnuz, infinity;
} format;

static const format formats[] = {
    {CKPT_BF16,        8, 7,  127, 0x7f7f, 0x7f80, false, true },
    {CKPT_F16,         5, 10, 15,  0x7bff, 0x7c00, false, true },
    {CKPT_F8_E5M2,     5, 2,  15,  0x7b,   0x7c,   false, true },
    {CKPT_F8_E4M3,     4, 3,  7,   0x7e,   0x7f,   false, false},
    {CKPT_F8_E5M2FNUZ, 5, 2,  16,  0x7f,   0x80,   true,  false},
    {CKPT_F8_E4M3FNUZ, 4, 3,  8,   0x7f,   0x80,   true,  false},
};
#define FORMATS (int)(sizeof formats / sizeof formats[0])

/* Value of a magnitude code; largest + 1 gives the value that would follow. */
static double code_value(const format *f, uint32_t code)
{
    int e = (int)(code >> f->man_bits), m = (int)(code & ((1u << f->man_bits) - 1));
    if (e == 0)
        return ldexp(m, 1 - f->bias - f->man_bits);
    return ldexp(1.0 + ldexp(m, -f->man_bits), e - f->bias);
}

/* Nearest code of a non-NaN double by search; all comparisons are exact. */
static uint32_t slow_encode(const format *f, double x)
{
    uint32_t sign = signbit(x) ? 1u << (f->exp_bits + f->man_bits) : 0;
    double a = fabs(x);
    uint32_t lo = 0, hi = f->largest + 1;
    if (a >= code_value(f, hi)) {
        lo = hi;
    } else {
        while (hi - lo > 1) {
            uint32_t mid = lo + (hi - lo) / 2;
            if (code_value(f, mid) <= a)
                lo = mid;
            else
                hi = mid;
        }
        double middle = (code_value(f, lo) + code_value(f, hi)) / 2;
        if (a > middle || (a == middle && (lo & 1)))
            lo = hi;
    }
    if (lo > f->largest)
        return f->fnuz ? f->overflow : f->overflow | sign;
    return f->fnuz && lo == 0 ? 0 : lo | sign;
}

/* One conversion by both paths: element by element, and as a run long enough for the block kernels
 * (all equal, with one more for the tail). */
static uint32_t cast_one(ckpt_dtype to, ckpt_dtype from, const void *x)
{
    enum { RUN = 257 };
    uint32_t code = 0;
    uint8_t in[RUN * 4], out[RUN * 8], want[8];
    ckpt_dtype_cast(to, want, from, x, 1);
    size_t a = (size_t)ckpt_dtype_get(from)->bits / 8, b = (size_t)ckpt_dtype_get(to)->bits / 8;
    if (from != CKPT_F64) {
        for (size_t i = 0; i < RUN; i++)
            memcpy(in + i * a, x, a);
        ckpt_dtype_cast(to, out, from, in, RUN);
        /* All equal: the first is right and each equals its successor. */
        if (memcmp(out, want, b) != 0 || memcmp(out, out + b, (RUN - 1) * b) != 0)
            ck_abort_msg("%s to %s: block and element differ", ckpt_dtype_get(from)->name,
                         ckpt_dtype_get(to)->name);
    }
    memcpy(&code, want, b < sizeof code ? b : sizeof code);
    return code;
}

static bool code_is_nan(const format *f, uint32_t code)
{
    uint32_t a = code & ((1u << (f->exp_bits + f->man_bits)) - 1);
    if (f->fnuz)
        return code == 0x80;
    return f->infinity ? a > f->overflow : a == f->overflow;
}

static void check_float(const format *f, float x)
{
    uint32_t got = cast_one(f->dtype, CKPT_F32, &x), want = slow_encode(f, x);
    EXPECT(got == want, "%s of f32 %08x: %x, expected %x", ckpt_dtype_get(f->dtype)->name,
           ckpt_f32_bits(x), got, want);
}

static void check_double(const format *f, double x)
{
    uint32_t got = cast_one(f->dtype, CKPT_F64, &x), want = slow_encode(f, x);
    EXPECT(got == want, "%s of f64 %016llx: %x, expected %x", ckpt_dtype_get(f->dtype)->name,
           (unsigned long long)double_bits(x), got, want);
}

START_TEST(cast_random_bits_match_slow_reference)
{
    const format *f = &formats[_i];
    for (int k = 0; k < 100000; k++) {
        uint64_t r = rng();
        float x = ckpt_f32_of((uint32_t)r);
        if (!isnan(x))
            check_float(f, x);
        double d = bits_double(rng());
        if (!isnan(d))
            check_double(f, d);
        /* Exponents around the format's own range, the last bits often zero. */
        int e = (int)(r >> 40) % (1 << f->exp_bits) - f->bias - f->man_bits;
        double m = ldexp(1.0 + ldexp((double)(rng() >> (12 + r % 50)), -52), e);
        check_double(f, r & 1 ? -m : m);
    }
}
END_TEST

START_TEST(cast_boundaries_match_slow_reference)
{
    const format *f = &formats[_i];
    for (uint32_t c = 0; c <= f->largest; c++) {
        double v = code_value(f, c), middle = (v + code_value(f, c + 1)) / 2;
        double points[] = {v, middle};
        for (int k = 0; k < 2; k++) {
            double p = points[k];
            check_double(f, p);
            check_double(f, -p);
            check_double(f, nextafter(p, INFINITY));
            check_double(f, -nextafter(p, INFINITY));
            check_double(f, nextafter(p, -INFINITY));
            check_float(f, (float)p);
            check_float(f, -(float)p);
            check_float(f, nextafterf((float)p, INFINITY));
            check_float(f, -nextafterf((float)p, INFINITY));
            check_float(f, nextafterf((float)p, -INFINITY));
        }
    }
    const double extremes[] = {INFINITY, DBL_MAX, 5e-324, 1e-310, 3.4028234663852886e38, 1.4e-45};
    for (size_t k = 0; k < sizeof extremes / sizeof extremes[0]; k++) {
        check_double(f, extremes[k]);
        check_double(f, -extremes[k]);
        check_float(f, (float)extremes[k]);
        check_float(f, -(float)extremes[k]);
    }
}
END_TEST

START_TEST(cast_f64_to_bf16_rounds_once)
{
    /* Just above a bf16 halfway case by less than f32 can see: through f32 this would tie. */
    double x = 1.0 + 0x1p-8 + 0x1p-40;
    ck_assert_uint_eq(cast_one(CKPT_BF16, CKPT_F64, &x), 0x3f81);
    x = 1.0 + 0x1p-8;
    ck_assert_uint_eq(cast_one(CKPT_BF16, CKPT_F64, &x), 0x3f80);
    x = -(1.0 + 0x1p-11 + 0x1p-40);
    ck_assert_uint_eq(cast_one(CKPT_F16, CKPT_F64, &x), 0xbc01);
    /* and in subnormals of the target */
    x = 0x1p-134 + 0x1p-180;
    ck_assert_uint_eq(cast_one(CKPT_BF16, CKPT_F64, &x), 1);
}
END_TEST

START_TEST(cast_f64_f32_matches_the_processor)
{
    for (int k = 0; k < 300000; k++) {
        uint64_t r = rng();
        double d = bits_double(
            k & 1 ? r : (r & ~(UINT64_C(0x7ff) << 52)) | (1023 - 152 + rng() % 282) << 52);
        if (isnan(d))
            continue;
        float want = (float)d;
        EXPECT(cast_one(CKPT_F32, CKPT_F64, &d) == ckpt_f32_bits(want), "f32 of %a", d);
        float x = ckpt_f32_of((uint32_t)r);
        if (isnan(x))
            continue;
        double back = 0;
        ckpt_dtype_cast(CKPT_F64, &back, CKPT_F32, &x, 1);
        EXPECT(double_bits(back) == double_bits(x), "f64 of %a", (double)x);
    }
    /* F32 subnormals and the halfway case below the smallest. */
    double tiny[] = {0x1p-150, 0x1.8p-149, 0x1.0000000000001p-150, 0x1.fffffffffffffp-127};
    for (int k = 0; k < 4; k++)
        ck_assert_uint_eq(cast_one(CKPT_F32, CKPT_F64, &tiny[k]), ckpt_f32_bits((float)tiny[k]));
}
END_TEST

/* ---- round trips over every code ---- */

START_TEST(cast_every_code_survives_widening)
{
    const format *f = &formats[_i];
    size_t size = f->exp_bits + f->man_bits > 7 ? 2 : 1, n = size == 2 ? 65536 : 256;
    uint8_t *codes = malloc(n * size), *back = malloc(n * size);
    float *wide = malloc(n * sizeof *wide);
    double *wider = malloc(n * sizeof *wider);
    for (size_t c = 0; c < n; c++)
        memcpy(codes + c * size, &c, size);
    ckpt_dtype_cast(CKPT_F32, wide, f->dtype, codes, n);
    ckpt_dtype_cast(CKPT_F64, wider, f->dtype, codes, n);
    uint32_t magnitude = (uint32_t)n / 2 - 1;
    for (uint32_t c = 0; c < n; c++) {
        if (code_is_nan(f, c)) {
            ck_assert(isnan(wide[c]) && isnan(wider[c]));
            if (!f->fnuz)
                ck_assert_int_eq(signbit(wide[c]) != 0, c > magnitude);
            continue;
        }
        double v =
            f->infinity && (c & magnitude) == f->overflow ? INFINITY : code_value(f, c & magnitude);
        v = c > magnitude ? -v : v;
        EXPECT(double_bits(v) == double_bits(wider[c]), "code %x", c);
        EXPECT(ckpt_f32_bits((float)v) == ckpt_f32_bits(wide[c]), "code %x", c);
        EXPECT(double_bits(v) == double_bits(ckpt_dtype_load(f->dtype, codes, c)), "load code %x",
               c);
    }
    /* NaN payloads included. */
    ckpt_dtype_cast(f->dtype, back, CKPT_F32, wide, n);
    ck_assert_mem_eq(back, codes, n * size);
    ckpt_dtype_cast(f->dtype, back, CKPT_F64, wider, n);
    ck_assert_mem_eq(back, codes, n * size);
    free(codes), free(back), free(wide), free(wider);
}
END_TEST

START_TEST(cast_pairs_of_narrow_types_round_once)
{
    for (int k = 0; k < FORMATS; k++) {
        const format *f = &formats[_i], *g = &formats[k];
        if (f == g)
            continue;
        uint32_t n = f->exp_bits + f->man_bits > 7 ? 65536 : 256;
        for (uint32_t c = 0; c < n; c++) {
            uint32_t got = cast_one(g->dtype, f->dtype, &c);
            if (code_is_nan(f, c))
                EXPECT(code_is_nan(g, got), "code %x", c);
            else
                EXPECT(got == slow_encode(g, ckpt_dtype_load(f->dtype, &c, 0)), "code %x", c);
        }
    }
}
END_TEST

/* Lengths around the block size and an odd address on both sides. */
START_TEST(cast_any_length_and_alignment_equals_elementwise)
{
    static const ckpt_dtype types[] = {CKPT_F64, CKPT_F32,     CKPT_BF16,
                                       CKPT_F16, CKPT_F8_E4M3, CKPT_F8_E8M0};
    static const size_t lengths[] = {0, 1, 2, 7, 31, 255, 256, 257, 511, 512, 1000};
    uint8_t in[8 * 1000 + 1], out[8 * 1000 + 9], want[8];
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (uint8_t)(rng() >> 56);
    for (int p = 0; p < 36; p++) {
        ckpt_dtype from = types[p / 6], to = types[p % 6];
        size_t a = (size_t)ckpt_dtype_get(from)->bits / 8, b = (size_t)ckpt_dtype_get(to)->bits / 8;
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            size_t n = lengths[l];
            memset(out, 0xa5, sizeof out);
            ckpt_dtype_cast(to, out + 1, from, in + 1, n);
            for (size_t i = 0; i < n; i++) {
                ckpt_dtype_cast(to, want, from, in + 1 + i * a, 1);
                EXPECT(memcmp(out + 1 + i * b, want, b) == 0, "element %zu of %zu", i, n);
            }
            ck_assert_uint_eq(out[0], 0xa5);
            ck_assert_uint_eq(out[1 + n * b], 0xa5);
        }
    }
}
END_TEST

/* ---- NaN ---- */

static const struct {
    uint32_t f32;
    uint32_t bf16, f16, e5m2, e4m3, fnuz;
} nans[] = {
    {0x7fc00000, 0x7fc0, 0x7e00, 0x7e, 0x7f, 0x80},
    {0xffc00000, 0xffc0, 0xfe00, 0xfe, 0xff, 0x80},
    {0x7f800001, 0x7fc0, 0x7e00, 0x7e, 0x7f, 0x80}, /* payload vanishes: quiet bit */
    {0xff800001, 0xffc0, 0xfe00, 0xfe, 0xff, 0x80},
    {0x7fffffff, 0x7fff, 0x7fff, 0x7f, 0x7f, 0x80}, /* would carry into the sign if rounded */
    {0xffffffff, 0xffff, 0xffff, 0xff, 0xff, 0x80},
    {0x7fa00000, 0x7fa0, 0x7d00, 0x7d, 0x7f, 0x80}, /* signalling, payload kept */
    {0x7f802000, 0x7fc0, 0x7c01, 0x7e, 0x7f, 0x80},
};

START_TEST(cast_nan_keeps_sign_and_leading_payload)
{
    uint32_t x = nans[_i].f32;
    ck_assert_uint_eq(cast_one(CKPT_BF16, CKPT_F32, &x), nans[_i].bf16);
    ck_assert_uint_eq(cast_one(CKPT_F16, CKPT_F32, &x), nans[_i].f16);
    ck_assert_uint_eq(cast_one(CKPT_F8_E5M2, CKPT_F32, &x), nans[_i].e5m2);
    ck_assert_uint_eq(cast_one(CKPT_F8_E4M3, CKPT_F32, &x), nans[_i].e4m3);
    ck_assert_uint_eq(cast_one(CKPT_F8_E4M3FNUZ, CKPT_F32, &x), nans[_i].fnuz);
    ck_assert_uint_eq(cast_one(CKPT_F8_E5M2FNUZ, CKPT_F32, &x), nans[_i].fnuz);
    ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F32, &x), 0xff);
    uint64_t wide;
    ckpt_dtype_cast(CKPT_F64, &wide, CKPT_F32, &x, 1);
    ck_assert_uint_eq(cast_one(CKPT_F32, CKPT_F64, &wide), x);
    ck_assert_uint_eq(cast_one(CKPT_BF16, CKPT_F64, &wide), nans[_i].bf16);
    ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F64, &wide), 0xff);
    wide = UINT64_C(0xfff0000000000001); /* lost even in f32 */
    ck_assert_uint_eq(cast_one(CKPT_F32, CKPT_F64, &wide), 0xffc00000);
}
END_TEST

/* ---- F8_E8M0 ---- */

START_TEST(cast_e8m0_every_code_is_a_power_of_two)
{
    for (uint32_t c = 0; c < 255; c++) {
        float v;
        double d;
        ckpt_dtype_cast(CKPT_F32, &v, CKPT_F8_E8M0, &c, 1);
        ckpt_dtype_cast(CKPT_F64, &d, CKPT_F8_E8M0, &c, 1);
        ck_assert(v == ldexpf(1, (int)c - 127) && d == ldexp(1, (int)c - 127));
        ck_assert(ckpt_dtype_load(CKPT_F8_E8M0, &c, 0) == d);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F32, &v), c);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F64, &d), c);
        /* The tie goes up; beside it, the nearer. */
        double tie = 1.5 * d;
        float tief = (float)tie, below = nextafterf(tief, 0);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F64, &tie), c + 1);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F32, &tief), c + 1);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F32, &below), c);
        tie = nextafter(tie, 0);
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F64, &tie), c);
    }
    const uint8_t nan = 255;
    ck_assert(isnan(ckpt_dtype_load(CKPT_F8_E8M0, &nan, 0)));
}
END_TEST

START_TEST(cast_e8m0_out_of_range_is_nan_or_smallest)
{
    static const struct {
        double x;
        uint32_t code;
    } rows[] = {
        {0.0,      255},
        {-0.0,     255},
        {-1.0,     255},
        {INFINITY, 255},
        {1e300,    255},
        {0x1p128,  255},
        {1e-300,   0  },
        {5e-324,   0  },
        {0x1p-149, 0  },
        {0x1p-128, 0  },
    };
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
        ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F64, &rows[k].x), rows[k].code);
        float f = (float)rows[k].x;
        if (f != 0 || rows[k].x == 0)
            ck_assert_uint_eq(cast_one(CKPT_F8_E8M0, CKPT_F32, &f), rows[k].code);
    }
}
END_TEST

/* ---- torch 2.11: tensor.to(dtype).view(uint8), CPU ---- */

/* Columns: float8_e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e8m0fnu. torch never saturates; all of it is
 * our rule too, except F8_E8M0, where it drops signs and maps zero to 2^-127. */
static const struct {
    uint32_t f32;
    uint8_t code[5];
} torch_rows[] = {
  /* clang-format off */
    {0x00000000, {0x00, 0x00, 0x00, 0x00, 0x00}}, {0x3f800000, {0x38, 0x3c, 0x40, 0x40, 0x7f}},
    {0x3fc00000, {0x3c, 0x3e, 0x44, 0x42, 0x80}}, {0x3fbfffff, {0x3c, 0x3e, 0x44, 0x42, 0x7f}},
    {0x3f880000, {0x38, 0x3c, 0x40, 0x40, 0x7f}}, {0x3f980000, {0x3a, 0x3d, 0x42, 0x41, 0x7f}},
    {0x3f900000, {0x39, 0x3c, 0x41, 0x40, 0x7f}}, {0x3f880001, {0x39, 0x3c, 0x41, 0x40, 0x7f}},
    {0x40200000, {0x42, 0x41, 0x4a, 0x45, 0x80}}, {0x40400000, {0x44, 0x42, 0x4c, 0x46, 0x81}},
    {0x40b80000, {0x4c, 0x46, 0x54, 0x4a, 0x81}}, {0x41880000, {0x58, 0x4c, 0x60, 0x50, 0x83}},
    {0x41980000, {0x5a, 0x4d, 0x62, 0x51, 0x83}}, {0x42c80000, {0x6c, 0x56, 0x74, 0x5a, 0x86}},
    {0x43700000, {0x77, 0x5c, 0x7f, 0x60, 0x87}}, {0x4377ffff, {0x77, 0x5c, 0x7f, 0x60, 0x87}},
    {0x43780000, {0x78, 0x5c, 0x80, 0x60, 0x87}}, {0x43780001, {0x78, 0x5c, 0x80, 0x60, 0x87}},
    {0x43e00000, {0x7e, 0x5f, 0x80, 0x63, 0x88}}, {0x43e7ffff, {0x7e, 0x5f, 0x80, 0x63, 0x88}},
    {0x43e80000, {0x7e, 0x5f, 0x80, 0x63, 0x88}}, {0x43e80001, {0x7f, 0x5f, 0x80, 0x63, 0x88}},
    {0x43f00000, {0x7f, 0x60, 0x80, 0x64, 0x88}}, {0x44000000, {0x7f, 0x60, 0x80, 0x64, 0x88}},
    {0x47600000, {0x7f, 0x7b, 0x80, 0x7f, 0x8f}}, {0x476fffff, {0x7f, 0x7b, 0x80, 0x7f, 0x8f}},
    {0x47700000, {0x7f, 0x7c, 0x80, 0x80, 0x8f}}, {0x47700001, {0x7f, 0x7c, 0x80, 0x80, 0x8f}},
    {0x47800000, {0x7f, 0x7c, 0x80, 0x80, 0x8f}}, {0x4e6e6b28, {0x7f, 0x7c, 0x80, 0x80, 0x9d}},
    {0x7f7fffff, {0x7f, 0x7c, 0x80, 0x80, 0xff}}, {0x7f400000, {0x7f, 0x7c, 0x80, 0x80, 0xff}},
    {0x7f3ffffc, {0x7f, 0x7c, 0x80, 0x80, 0xfe}}, {0x7f800000, {0x7f, 0x7c, 0x80, 0x80, 0xff}},
    {0x3c800000, {0x08, 0x24, 0x10, 0x28, 0x79}}, {0x3c000000, {0x04, 0x20, 0x08, 0x24, 0x78}},
    {0x3b800000, {0x02, 0x1c, 0x04, 0x20, 0x77}}, {0x3b000000, {0x01, 0x18, 0x02, 0x1c, 0x76}},
    {0x3a800000, {0x00, 0x14, 0x01, 0x18, 0x75}}, {0x3a800001, {0x01, 0x14, 0x01, 0x18, 0x75}},
    {0x3a000000, {0x00, 0x10, 0x00, 0x14, 0x74}}, {0x3a000001, {0x00, 0x10, 0x01, 0x14, 0x74}},
    {0x3b400000, {0x02, 0x1a, 0x03, 0x1e, 0x77}}, {0x3ba00000, {0x02, 0x1d, 0x05, 0x21, 0x77}},
    {0x3c700000, {0x08, 0x24, 0x0f, 0x28, 0x79}}, {0x3ac00000, {0x01, 0x16, 0x02, 0x1a, 0x76}},
    {0x3b200000, {0x01, 0x19, 0x02, 0x1d, 0x76}}, {0x3bf00000, {0x04, 0x20, 0x08, 0x24, 0x78}},
    {0x38800000, {0x00, 0x04, 0x00, 0x08, 0x71}}, {0x38000000, {0x00, 0x02, 0x00, 0x04, 0x70}},
    {0x37800000, {0x00, 0x01, 0x00, 0x02, 0x6f}}, {0x37000000, {0x00, 0x00, 0x00, 0x01, 0x6e}},
    {0x37000001, {0x00, 0x01, 0x00, 0x01, 0x6e}}, {0x36800000, {0x00, 0x00, 0x00, 0x00, 0x6d}},
    {0x36800001, {0x00, 0x00, 0x00, 0x01, 0x6d}}, {0x37c00000, {0x00, 0x02, 0x00, 0x03, 0x70}},
    {0x38200000, {0x00, 0x02, 0x00, 0x05, 0x70}}, {0x38600000, {0x00, 0x04, 0x00, 0x07, 0x71}},
    {0x37400000, {0x00, 0x01, 0x00, 0x02, 0x6f}}, {0x37a00000, {0x00, 0x01, 0x00, 0x02, 0x6f}},
    {0x37e00000, {0x00, 0x02, 0x00, 0x04, 0x70}}, {0x00800000, {0x00, 0x00, 0x00, 0x00, 0x01}},
    {0x00400000, {0x00, 0x00, 0x00, 0x00, 0x00}}, {0x00000001, {0x00, 0x00, 0x00, 0x00, 0x00}},
    {0x41453ea1, {0x54, 0x4a, 0x5c, 0x4e, 0x83}}, {0x43bcf924, {0x7c, 0x5e, 0x80, 0x62, 0x87}},
    {0x3ed1ccfc, {0x2d, 0x37, 0x35, 0x3b, 0x7e}}, {0x369daf9e, {0x00, 0x00, 0x00, 0x01, 0x6d}},
    {0x4613685c, {0x7f, 0x71, 0x80, 0x75, 0x8c}}, {0x42b1e972, {0x6b, 0x56, 0x73, 0x5a, 0x85}},
    {0x3255f0cf, {0x00, 0x00, 0x00, 0x00, 0x65}}, {0x34146737, {0x00, 0x00, 0x00, 0x00, 0x68}},
    {0x44857a1c, {0x7f, 0x64, 0x80, 0x68, 0x89}}, {0x3be3d98b, {0x04, 0x1f, 0x07, 0x23, 0x78}},
    {0x32e96ac2, {0x00, 0x00, 0x00, 0x00, 0x66}}, {0x3abc830a, {0x01, 0x16, 0x01, 0x1a, 0x75}},
    {0x455c026c, {0x7f, 0x6b, 0x80, 0x6f, 0x8b}}, {0x3e5b6898, {0x26, 0x33, 0x2e, 0x37, 0x7d}},
    {0x3fb28e29, {0x3b, 0x3e, 0x43, 0x42, 0x7f}}, {0x4438e957, {0x7f, 0x62, 0x80, 0x66, 0x88}},
    {0x80000000, {0x80, 0x80, 0x00, 0x00, 0x00}}, {0xbf800000, {0xb8, 0xbc, 0xc0, 0xc0, 0x7f}},
    {0xbfc00000, {0xbc, 0xbe, 0xc4, 0xc2, 0x80}}, {0xbfbfffff, {0xbc, 0xbe, 0xc4, 0xc2, 0x7f}},
    {0xbf880000, {0xb8, 0xbc, 0xc0, 0xc0, 0x7f}}, {0xbf980000, {0xba, 0xbd, 0xc2, 0xc1, 0x7f}},
    {0xbf900000, {0xb9, 0xbc, 0xc1, 0xc0, 0x7f}}, {0xbf880001, {0xb9, 0xbc, 0xc1, 0xc0, 0x7f}},
    {0xc0200000, {0xc2, 0xc1, 0xca, 0xc5, 0x80}}, {0xc0400000, {0xc4, 0xc2, 0xcc, 0xc6, 0x81}},
    {0xc0b80000, {0xcc, 0xc6, 0xd4, 0xca, 0x81}}, {0xc1880000, {0xd8, 0xcc, 0xe0, 0xd0, 0x83}},
    {0xc1980000, {0xda, 0xcd, 0xe2, 0xd1, 0x83}}, {0xc2c80000, {0xec, 0xd6, 0xf4, 0xda, 0x86}},
    {0xc3700000, {0xf7, 0xdc, 0xff, 0xe0, 0x87}}, {0xc377ffff, {0xf7, 0xdc, 0xff, 0xe0, 0x87}},
    {0xc3780000, {0xf8, 0xdc, 0x80, 0xe0, 0x87}}, {0xc3780001, {0xf8, 0xdc, 0x80, 0xe0, 0x87}},
    {0xc3e00000, {0xfe, 0xdf, 0x80, 0xe3, 0x88}}, {0xc3e7ffff, {0xfe, 0xdf, 0x80, 0xe3, 0x88}},
    {0xc3e80000, {0xfe, 0xdf, 0x80, 0xe3, 0x88}}, {0xc3e80001, {0xff, 0xdf, 0x80, 0xe3, 0x88}},
    {0xc3f00000, {0xff, 0xe0, 0x80, 0xe4, 0x88}}, {0xc4000000, {0xff, 0xe0, 0x80, 0xe4, 0x88}},
    {0xc7600000, {0xff, 0xfb, 0x80, 0xff, 0x8f}}, {0xc76fffff, {0xff, 0xfb, 0x80, 0xff, 0x8f}},
    {0xc7700000, {0xff, 0xfc, 0x80, 0x80, 0x8f}}, {0xc7700001, {0xff, 0xfc, 0x80, 0x80, 0x8f}},
    {0xc7800000, {0xff, 0xfc, 0x80, 0x80, 0x8f}}, {0xce6e6b28, {0xff, 0xfc, 0x80, 0x80, 0x9d}},
    {0xff7fffff, {0xff, 0xfc, 0x80, 0x80, 0xff}}, {0xff400000, {0xff, 0xfc, 0x80, 0x80, 0xff}},
    {0xff3ffffc, {0xff, 0xfc, 0x80, 0x80, 0xfe}}, {0xff800000, {0xff, 0xfc, 0x80, 0x80, 0xff}},
    {0xbc800000, {0x88, 0xa4, 0x90, 0xa8, 0x79}}, {0xbc000000, {0x84, 0xa0, 0x88, 0xa4, 0x78}},
    {0xbb800000, {0x82, 0x9c, 0x84, 0xa0, 0x77}}, {0xbb000000, {0x81, 0x98, 0x82, 0x9c, 0x76}},
    {0xba800000, {0x80, 0x94, 0x81, 0x98, 0x75}}, {0xba800001, {0x81, 0x94, 0x81, 0x98, 0x75}},
    {0xba000000, {0x80, 0x90, 0x00, 0x94, 0x74}}, {0xba000001, {0x80, 0x90, 0x81, 0x94, 0x74}},
    {0xbb400000, {0x82, 0x9a, 0x83, 0x9e, 0x77}}, {0xbba00000, {0x82, 0x9d, 0x85, 0xa1, 0x77}},
    {0xbc700000, {0x88, 0xa4, 0x8f, 0xa8, 0x79}}, {0xbac00000, {0x81, 0x96, 0x82, 0x9a, 0x76}},
    {0xbb200000, {0x81, 0x99, 0x82, 0x9d, 0x76}}, {0xbbf00000, {0x84, 0xa0, 0x88, 0xa4, 0x78}},
    {0xb8800000, {0x80, 0x84, 0x00, 0x88, 0x71}}, {0xb8000000, {0x80, 0x82, 0x00, 0x84, 0x70}},
    {0xb7800000, {0x80, 0x81, 0x00, 0x82, 0x6f}}, {0xb7000000, {0x80, 0x80, 0x00, 0x81, 0x6e}},
    {0xb7000001, {0x80, 0x81, 0x00, 0x81, 0x6e}}, {0xb6800000, {0x80, 0x80, 0x00, 0x00, 0x6d}},
    {0xb6800001, {0x80, 0x80, 0x00, 0x81, 0x6d}}, {0xb7c00000, {0x80, 0x82, 0x00, 0x83, 0x70}},
    {0xb8200000, {0x80, 0x82, 0x00, 0x85, 0x70}}, {0xb8600000, {0x80, 0x84, 0x00, 0x87, 0x71}},
    {0xb7400000, {0x80, 0x81, 0x00, 0x82, 0x6f}}, {0xb7a00000, {0x80, 0x81, 0x00, 0x82, 0x6f}},
    {0xb7e00000, {0x80, 0x82, 0x00, 0x84, 0x70}}, {0x80800000, {0x80, 0x80, 0x00, 0x00, 0x01}},
    {0x80400000, {0x80, 0x80, 0x00, 0x00, 0x00}}, {0x80000001, {0x80, 0x80, 0x00, 0x00, 0x00}},
    {0xc1453ea1, {0xd4, 0xca, 0xdc, 0xce, 0x83}}, {0xc3bcf924, {0xfc, 0xde, 0x80, 0xe2, 0x87}},
    {0xbed1ccfc, {0xad, 0xb7, 0xb5, 0xbb, 0x7e}}, {0xb69daf9e, {0x80, 0x80, 0x00, 0x81, 0x6d}},
    {0xc613685c, {0xff, 0xf1, 0x80, 0xf5, 0x8c}}, {0xc2b1e972, {0xeb, 0xd6, 0xf3, 0xda, 0x85}},
    {0xb255f0cf, {0x80, 0x80, 0x00, 0x00, 0x65}}, {0xb4146737, {0x80, 0x80, 0x00, 0x00, 0x68}},
    {0xc4857a1c, {0xff, 0xe4, 0x80, 0xe8, 0x89}}, {0xbbe3d98b, {0x84, 0x9f, 0x87, 0xa3, 0x78}},
    {0xb2e96ac2, {0x80, 0x80, 0x00, 0x00, 0x66}}, {0xbabc830a, {0x81, 0x96, 0x81, 0x9a, 0x75}},
    {0xc55c026c, {0xff, 0xeb, 0x80, 0xef, 0x8b}}, {0xbe5b6898, {0xa6, 0xb3, 0xae, 0xb7, 0x7d}},
    {0xbfb28e29, {0xbb, 0xbe, 0xc3, 0xc2, 0x7f}}, {0xc438e957, {0xff, 0xe2, 0x80, 0xe6, 0x88}},
  /* clang-format on */
};

START_TEST(cast_f8_matches_torch)
{
    static const ckpt_dtype types[] = {CKPT_F8_E4M3, CKPT_F8_E5M2, CKPT_F8_E4M3FNUZ,
                                       CKPT_F8_E5M2FNUZ, CKPT_F8_E8M0};
    for (size_t k = 0; k < sizeof torch_rows / sizeof torch_rows[0]; k++) {
        uint32_t x = torch_rows[k].f32;
        for (int t = 0; t < 5; t++) {
            uint32_t want = torch_rows[k].code[t];
            if (types[t] == CKPT_F8_E8M0 && (x == 0 || x >> 31))
                want = 0xff;
            uint32_t got = cast_one(types[t], CKPT_F32, &x);
            ck_assert_msg(got == want, "%s of %08x: %02x, expected %02x",
                          ckpt_dtype_get(types[t])->name, x, got, want);
        }
    }
}
END_TEST

/* ---- load ---- */

START_TEST(load_integers_and_complex_read_their_element)
{
    static const int8_t i8[] = {-128, 127, -1};
    static const int16_t i16[] = {-32768, 5};
    static const int32_t i32[] = {INT32_MIN, 7};
    static const int64_t i64[] = {INT64_MIN, -3};
    static const uint64_t u64[] = {UINT64_MAX, 1};
    static const uint32_t u32[] = {UINT32_MAX, 9};
    static const uint16_t u16[] = {65535, 2};
    static const uint8_t u8[] = {255, 0, 2};
    static const float c64[] = {1, 2, -3.5f, 4};
    static const double c128[] = {1, 2, 0x1p-1074, 4};
    static const uint16_t c32[] = {0x3c00, 0, 0xc000, 0x7c00};
    ck_assert(ckpt_dtype_load(CKPT_I8, i8, 0) == -128 && ckpt_dtype_load(CKPT_I8, i8, 1) == 127);
    ck_assert(ckpt_dtype_load(CKPT_I16, i16, 0) == -32768);
    ck_assert(ckpt_dtype_load(CKPT_I32, i32, 0) == -2147483648.0);
    ck_assert(ckpt_dtype_load(CKPT_I64, i64, 0) == -0x1p63 &&
              ckpt_dtype_load(CKPT_I64, i64, 1) == -3);
    ck_assert(ckpt_dtype_load(CKPT_U64, u64, 0) == 0x1p64);
    ck_assert(ckpt_dtype_load(CKPT_U32, u32, 0) == 4294967295.0);
    ck_assert(ckpt_dtype_load(CKPT_U16, u16, 0) == 65535 && ckpt_dtype_load(CKPT_U8, u8, 0) == 255);
    ck_assert(ckpt_dtype_load(CKPT_BOOL, u8, 2) == 1 && ckpt_dtype_load(CKPT_BOOL, u8, 1) == 0);
    ck_assert(ckpt_dtype_load(CKPT_C64, c64, 1) == -3.5);
    ck_assert(ckpt_dtype_load(CKPT_C128, c128, 1) == 0x1p-1074);
    ck_assert(ckpt_dtype_load(CKPT_C32, c32, 1) == -2);
    /* unaligned */
    uint8_t odd[9] = {0};
    double pi = 3.141592653589793;
    memcpy(odd + 1, &pi, 8);
    ck_assert(ckpt_dtype_load(CKPT_F64, odd + 1, 0) == pi);
}
END_TEST

START_TEST(load_f4_is_low_nibble_first)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    uint8_t packed[8];
    for (unsigned i = 0; i < 8; i++)
        packed[i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
    for (int i = 0; i < 16; i++) {
        double want = i < 8 ? values[i] : -values[i - 8];
        ck_assert(double_bits(ckpt_dtype_load(CKPT_F4, packed, i)) == double_bits(want));
    }
}
END_TEST

START_TEST(load_f6_is_dense_low_bits_first)
{
    static const struct {
        ckpt_dtype dtype;
        int man_bits, bias;
        double largest;
    } kinds[] = {
        {CKPT_F6_E3M2, 2, 3, 28.0},
        {CKPT_F6_E2M3, 3, 1, 7.5 },
    };
    uint8_t packed[48] = {0}; /* exact size: the last element must not read past it */
    for (unsigned i = 0; i < 64; i++)
        for (unsigned b = 0; b < 6; b++)
            packed[(6 * i + b) / 8] |= (uint8_t)((i >> b & 1) << (6 * i + b) % 8);
    for (int k = 0; k < 2; k++) {
        format f = {.man_bits = kinds[k].man_bits, .bias = kinds[k].bias};
        for (int i = 0; i < 64; i++) {
            double v = code_value(&f, (uint32_t)i & 31);
            v = i < 32 ? v : -v;
            ck_assert(double_bits(ckpt_dtype_load(kinds[k].dtype, packed, i)) == double_bits(v));
        }
        ck_assert(ckpt_dtype_load(kinds[k].dtype, packed, 31) == kinds[k].largest);
    }
}
END_TEST

Suite *suite_dtype(void)
{
    Suite *suite = suite_create("dtype");
    TCase *tc = tcase_create("dtype");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, dtype_names_round_trip_in_enum_order, 0, CKPT_DTYPE_COUNT);
    tcase_add_test(tc, dtype_unknown_names_are_refused);
    tcase_add_loop_test(tc, dtype_bytes_checks_overflow_and_whole_bytes, 0,
                        sizeof sizes / sizeof sizes[0]);
    tcase_add_test(tc, dtype_castable_is_floats_of_whole_bytes);
    tcase_add_loop_test(tc, cast_random_bits_match_slow_reference, 0, FORMATS);
    tcase_add_loop_test(tc, cast_boundaries_match_slow_reference, 0, FORMATS);
    tcase_add_test(tc, cast_f64_to_bf16_rounds_once);
    tcase_add_test(tc, cast_f64_f32_matches_the_processor);
    tcase_add_loop_test(tc, cast_every_code_survives_widening, 0, FORMATS);
    tcase_add_loop_test(tc, cast_pairs_of_narrow_types_round_once, 0, FORMATS);
    tcase_add_test(tc, cast_any_length_and_alignment_equals_elementwise);
    tcase_add_loop_test(tc, cast_nan_keeps_sign_and_leading_payload, 0,
                        sizeof nans / sizeof nans[0]);
    tcase_add_test(tc, cast_e8m0_every_code_is_a_power_of_two);
    tcase_add_test(tc, cast_e8m0_out_of_range_is_nan_or_smallest);
    tcase_add_test(tc, cast_f8_matches_torch);
    tcase_add_test(tc, load_integers_and_complex_read_their_element);
    tcase_add_test(tc, load_f4_is_low_nibble_first);
    tcase_add_test(tc, load_f6_is_dense_low_bits_first);
    suite_add_tcase(suite, tc);
    return suite;
}
