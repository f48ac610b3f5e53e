/* Element types: names, sizes and exact conversion.
 *
 * Layouts, most significant bit first, S sign, E exponent, M mantissa:
 *   F64 1-11-52, F32 1-8-23, F16 1-5-10, BF16 1-8-7, F8_E5M2 1-5-2: IEEE 754, infinities and NaN.
 *   F8_E4M3 1-4-3 ("fn"): no infinity, S.1111.111 is NaN, largest 448 (OCP OFP8 1.0).
 *   F8_E4M3FNUZ, F8_E5M2FNUZ: 0x80 is the only NaN, no infinity, no negative zero, bias one more
 *   (Noune et al. 2022, arXiv 2206.02915).
 *   F8_E8M0: the exponent alone, value 2^(code - 127), 255 is NaN (OCP MX 1.0).
 *   F6_E3M2, F6_E2M3, F4 (E2M1): finite only (OCP MX 1.0), packed densely, low bits first.
 *
 * Every conversion from a narrower type goes through f32 bits, exactly, and is then rounded once;
 * f64 is rounded straight to its target. Arithmetic is on integers, so neither the flush-to-zero
 * mode nor quiet-NaN rules of the processor matter; the one floating-point addition (the subnormal
 * path below) has operands and a result for which both are irrelevant.
 *
 * NaN keeps its sign and the leading bits of its payload, so that widening and narrowing again
 * returns the same bits; a payload that would vanish becomes the quiet bit. */
#include "dtype.h"

#include "checked.h"
#include "codec.h"
#include "le.h"

#include <assert.h>

#define ROW(nm, torch_name, storage_name, nbits, kd, st, e, m, b)                                  \
    {                                                                                              \
        .name = nm, .torch = torch_name, .storage = storage_name, .bits = nbits,                   \
        .kind = CKPT_KIND_##kd, .safetensors = st, .exp_bits = e, .man_bits = m, .bias = b         \
    }

/* clang-format off */
static const ckpt_dtype_info dtype_info[] = {
    [CKPT_C128]        = ROW("C128", "complex128", "ComplexDoubleStorage", 128, COMPLEX, false, 0, 0, 0),
    [CKPT_U64]         = ROW("U64", "uint64", NULL, 64, UINT, true, 0, 0, 0),
    [CKPT_I64]         = ROW("I64", "int64", "LongStorage", 64, INT, true, 0, 0, 0),
    [CKPT_F64]         = ROW("F64", "float64", "DoubleStorage", 64, FLOAT, true, 11, 52, 1023),
    [CKPT_C64]         = ROW("C64", "complex64", "ComplexFloatStorage", 64, COMPLEX, true, 0, 0, 0),
    [CKPT_F32]         = ROW("F32", "float32", "FloatStorage", 32, FLOAT, true, 8, 23, 127),
    [CKPT_U32]         = ROW("U32", "uint32", NULL, 32, UINT, true, 0, 0, 0),
    [CKPT_I32]         = ROW("I32", "int32", "IntStorage", 32, INT, true, 0, 0, 0),
    [CKPT_C32]         = ROW("C32", "complex32", NULL, 32, COMPLEX, false, 0, 0, 0),
    [CKPT_BF16]        = ROW("BF16", "bfloat16", "BFloat16Storage", 16, FLOAT, true, 8, 7, 127),
    [CKPT_F16]         = ROW("F16", "float16", "HalfStorage", 16, FLOAT, true, 5, 10, 15),
    [CKPT_U16]         = ROW("U16", "uint16", NULL, 16, UINT, true, 0, 0, 0),
    [CKPT_I16]         = ROW("I16", "int16", "ShortStorage", 16, INT, true, 0, 0, 0),
    [CKPT_F8_E5M2FNUZ] = ROW("F8_E5M2FNUZ", "float8_e5m2fnuz", NULL, 8, FLOAT, true, 5, 2, 16),
    [CKPT_F8_E4M3FNUZ] = ROW("F8_E4M3FNUZ", "float8_e4m3fnuz", NULL, 8, FLOAT, true, 4, 3, 8),
    [CKPT_F8_E8M0]     = ROW("F8_E8M0", "float8_e8m0fnu", NULL, 8, FLOAT, true, 8, 0, 127),
    [CKPT_F8_E4M3]     = ROW("F8_E4M3", "float8_e4m3fn", NULL, 8, FLOAT, true, 4, 3, 7),
    [CKPT_F8_E5M2]     = ROW("F8_E5M2", "float8_e5m2", NULL, 8, FLOAT, true, 5, 2, 15),
    [CKPT_I8]          = ROW("I8", "int8", "CharStorage", 8, INT, true, 0, 0, 0),
    [CKPT_U8]          = ROW("U8", "uint8", "ByteStorage", 8, UINT, true, 0, 0, 0),
    [CKPT_F6_E3M2]     = ROW("F6_E3M2", NULL, NULL, 6, FLOAT, true, 3, 2, 3),
    [CKPT_F6_E2M3]     = ROW("F6_E2M3", NULL, NULL, 6, FLOAT, true, 2, 3, 1),
    [CKPT_F4]          = ROW("F4", "float4_e2m1fn_x2", NULL, 4, FLOAT, true, 2, 1, 1),
    [CKPT_BOOL]        = ROW("BOOL", "bool", "BoolStorage", 8, BOOL, true, 0, 0, 0),
};
/* clang-format on */
static_assert(sizeof dtype_info / sizeof dtype_info[0] == CKPT_DTYPE_COUNT,
              "dtype_info has one row per ckpt_dtype");

/* How a float format spends the codes that are not finite numbers. */
enum {
    IEEE,   /* largest exponent: infinity and NaN */
    FN,     /* all ones after the sign: NaN */
    FNUZ,   /* sign bit alone: NaN */
    POW2,   /* no sign, no mantissa, all ones NaN */
    FINITE, /* none */
};

static const uint8_t special_codes[CKPT_DTYPE_COUNT] = {
    [CKPT_F8_E4M3] = FN,   [CKPT_F8_E5M2FNUZ] = FNUZ, [CKPT_F8_E4M3FNUZ] = FNUZ,
    [CKPT_F8_E8M0] = POW2, [CKPT_F6_E3M2] = FINITE,   [CKPT_F6_E2M3] = FINITE,
    [CKPT_F4] = FINITE,
};

const ckpt_dtype_info *ckpt_dtype_get(ckpt_dtype dtype)
{
    return (unsigned)dtype < CKPT_DTYPE_COUNT ? &dtype_info[dtype] : NULL;
}

bool ckpt_dtype_from_name(const char *name, size_t n, ckpt_dtype *out)
{
    for (unsigned i = 0; i < CKPT_DTYPE_COUNT; i++) {
        if (strlen(dtype_info[i].name) == n && memcmp(dtype_info[i].name, name, n) == 0) {
            *out = (ckpt_dtype)i;
            return true;
        }
    }
    return false;
}

bool ckpt_dtype_from_torch(const char *name, ckpt_dtype *out)
{
    for (unsigned i = 0; i < CKPT_DTYPE_COUNT; i++) {
        if (dtype_info[i].torch && strcmp(dtype_info[i].torch, name) == 0) {
            *out = (ckpt_dtype)i;
            return true;
        }
    }
    return false;
}

bool ckpt_dtype_from_storage(const char *name, ckpt_dtype *out)
{
    for (unsigned i = 0; i < CKPT_DTYPE_COUNT; i++) {
        if (dtype_info[i].storage && strcmp(dtype_info[i].storage, name) == 0) {
            *out = (ckpt_dtype)i;
            return true;
        }
    }
    return false;
}

bool ckpt_dtype_bytes(ckpt_dtype dtype, int64_t n, uint64_t *out)
{
    uint64_t bits;
    if (n < 0 || !ckpt_mul_u64((uint64_t)n, (uint64_t)dtype_info[dtype].bits, &bits) ||
        bits % 8 != 0)
        return false;
    *out = bits / 8;
    return true;
}

bool ckpt_dtype_castable(ckpt_dtype from, ckpt_dtype to)
{
    return dtype_info[from].kind == CKPT_KIND_FLOAT && dtype_info[from].bits >= 8 &&
           dtype_info[to].kind == CKPT_KIND_FLOAT && dtype_info[to].bits >= 8;
}

/* ---- one element, through the bits of a double: exact, and the reference of the fast paths ---- */

#define F64_FRAC ((UINT64_C(1) << 52) - 1)
#define F64_INF (UINT64_C(0x7ff) << 52)
#define F64_QUIET (UINT64_C(1) << 51)

static uint64_t decode(ckpt_dtype dtype, uint64_t code)
{
    const ckpt_dtype_info *f = &dtype_info[dtype];
    if (dtype == CKPT_F64)
        return code;
    if (dtype == CKPT_F8_E8M0)
        return code == 255 ? F64_INF | F64_QUIET : (code + 1023 - 127) << 52;

    int kind = special_codes[dtype];
    uint64_t top = (UINT64_C(1) << f->exp_bits) - 1;
    uint64_t sign = (code >> (f->bits - 1)) << 63;
    uint64_t exp = (code >> f->man_bits) & top;
    uint64_t man = code & ((UINT64_C(1) << f->man_bits) - 1);
    if (kind == FNUZ && code == 0x80)
        return F64_INF | F64_QUIET;
    if (kind == FN && (code & 0x7f) == 0x7f)
        return sign | F64_INF | F64_QUIET;
    if (kind == IEEE && exp == top)
        return sign | F64_INF | man << (52 - f->man_bits);
    if (exp == 0) {
        if (man == 0)
            return sign;
        /* Every subnormal of a narrower format is a normal double. */
        int high = 63 - __builtin_clzll(man);
        int e = high + 1 - f->bias - f->man_bits;
        return sign | (uint64_t)(e + 1023) << 52 | ((man << (52 - high)) & F64_FRAC);
    }
    return sign | (exp + 1023 - (uint64_t)f->bias) << 52 | man << (52 - f->man_bits);
}

static uint64_t encode_nan(ckpt_dtype dtype, uint64_t negative, uint64_t payload)
{
    const ckpt_dtype_info *f = &dtype_info[dtype];
    int kind = special_codes[dtype];
    if (kind == FNUZ)
        return 0x80;
    if (kind == POW2)
        return 0xff;
    uint64_t sign = negative << (f->bits - 1);
    if (kind == FN)
        return sign | 0x7f;
    uint64_t man = payload >> (52 - f->man_bits);
    if (man == 0)
        man = UINT64_C(1) << (f->man_bits - 1);
    return sign | ((UINT64_C(1) << f->exp_bits) - 1) << f->man_bits | man;
}

/* Largest finite magnitude as a code, for formats with a sign. */
static uint64_t max_finite(ckpt_dtype dtype)
{
    const ckpt_dtype_info *f = &dtype_info[dtype];
    uint64_t all = (UINT64_C(1) << (f->bits - 1)) - 1;
    if (special_codes[dtype] == IEEE)
        return all - (UINT64_C(1) << f->man_bits);
    return special_codes[dtype] == FN ? all - 1 : all;
}

static uint64_t encode_overflow(ckpt_dtype dtype, uint64_t negative)
{
    if (special_codes[dtype] == FNUZ)
        return 0x80;
    return negative << (dtype_info[dtype].bits - 1) | (max_finite(dtype) + 1);
}

/* sig is normalised (top bit set); the magnitude is sig * 2^(e - 63). */
static uint64_t encode_finite(ckpt_dtype dtype, uint64_t negative, int e, uint64_t sig)
{
    const ckpt_dtype_info *f = &dtype_info[dtype];
    const uint64_t half = UINT64_C(1) << 63;
    if (dtype == CKPT_F8_E8M0) {
        /* Nearest power of two; the tie at 1.5 goes up, as torch does. Below 2^-127 the nearest
         * code is 0; 255 is NaN. */
        int code = e + 127 + (int)((sig << 1) >> 63);
        return negative || code > 255 ? 255 : code < 0 ? 0 : (uint64_t)code;
    }
    int emin = 1 - f->bias;
    int keep = f->man_bits + 1 - (e < emin ? emin - e : 0);
    uint64_t kept = 0, rest = 0;
    if (keep > 0) {
        kept = sig >> (64 - keep);
        rest = sig << keep;
    } else if (keep == 0) {
        rest = sig;
    }
    if (rest > half || (rest == half && (kept & 1)))
        kept++;
    /* A carry out of the mantissa lands in the exponent, also from subnormal to normal. */
    uint64_t code = kept + (e > emin ? (uint64_t)(e - emin) << f->man_bits : 0);
    if (code > max_finite(dtype))
        return encode_overflow(dtype, negative);
    if (special_codes[dtype] == FNUZ && code == 0)
        return 0;
    return negative << (f->bits - 1) | code;
}

static uint64_t encode(ckpt_dtype dtype, uint64_t x)
{
    uint64_t negative = x >> 63, man = x & F64_FRAC;
    int exp = (int)((x >> 52) & 0x7ff);
    if (dtype == CKPT_F64)
        return x;
    if (exp == 0x7ff && man != 0)
        return encode_nan(dtype, negative, man);
    if (exp == 0x7ff)
        return dtype == CKPT_F8_E8M0 ? 0xff : encode_overflow(dtype, negative);
    if (exp == 0 && man == 0) {
        if (dtype == CKPT_F8_E8M0)
            return 0xff;
        return special_codes[dtype] == FNUZ ? 0 : negative << (dtype_info[dtype].bits - 1);
    }
    if (exp == 0) {
        int zeros = __builtin_clzll(man);
        return encode_finite(dtype, negative, -1011 - zeros, man << zeros);
    }
    return encode_finite(dtype, negative, exp - 1023, (man | (F64_FRAC + 1)) << 11);
}

/* ---- blocks of BLOCK elements in f32 bits; fixed trip counts, so that compilers vectorise ---- */

#define BLOCK 256
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* yes if test, else no, as masks: a ?: around floating-point arithmetic keeps GCC from vectorising,
 * since it may not then evaluate both sides (-ftrapping-math). */
ALWAYS_INLINE int32_t pick(bool test, int32_t yes, int32_t no)
{
    int32_t mask = -(int32_t)test;
    return (yes & mask) | (no & ~mask);
}

/* f32 bits to a code of a narrower format with bias < 127, without branches. Magnitudes are below
 * 2^31, so comparisons are signed (SSE2 has no others). Subnormal results come from adding the
 * power of two whose unit in the last place is the format's smallest subnormal: the sum is rounded
 * to nearest even there, and its low bits are the code. f32 subnormals round to zero either way,
 * so flushing them is harmless. */
ALWAYS_INLINE uint32_t narrow(uint32_t x, int kind, int exp_bits, int man_bits, int bias)
{
    const int drop = 23 - man_bits, width = exp_bits + man_bits;
    const int32_t all = (1 << width) - 1;
    const int32_t largest = kind == IEEE ? all - (1 << man_bits) : kind == FN ? all - 1 : all;
    const uint32_t magic = (uint32_t)(127 + 1 - bias - man_bits + 23) << 23;

    int32_t a = (int32_t)(x & 0x7fffffff);
    uint32_t sign = (x >> (31 - width)) & (1u << width);
    int32_t normal =
        (a - ((127 - bias) << 23) + ((1 << (drop - 1)) - 1) + ((a >> drop) & 1)) >> drop;
    int32_t tiny = (int32_t)(ckpt_f32_bits(ckpt_f32_of((uint32_t)a) + ckpt_f32_of(magic)) - magic);
    int32_t code = pick(a < (128 - bias) << 23, tiny, normal);
    bool over = code > largest; /* infinity and NaN too: their exponent is the largest */
    if (kind == FNUZ)
        return over ? 1u << width : code == 0 ? 0 : (uint32_t)code | sign;
    code = over ? largest + 1 : code;
    if (kind == IEEE) {
        int32_t payload = (a & 0x7fffff) >> drop;
        int32_t nan = (largest + 1) | pick(payload == 0, 1 << (man_bits - 1), payload);
        code = pick(a > 0x7f800000, nan, code);
    }
    return (uint32_t)code | sign;
}

ALWAYS_INLINE uint32_t narrow_bf16(uint32_t x)
{
    uint32_t code = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
    uint32_t nan = x >> 16 | ((x >> 16) & 0x7f ? 0 : 0x40);
    return (int32_t)(x & 0x7fffffff) > 0x7f800000 ? nan : code;
}

ALWAYS_INLINE uint32_t narrow_e8m0(uint32_t x)
{
    int32_t a = (int32_t)x;
    int32_t normal = (a >> 23) + ((a >> 22) & 1);
    int32_t code = a < 0x800000 ? a >= 0x600000 : normal;
    return (uint32_t)(a <= 0 || a > 0x7f400000 ? 255 : code);
}

/* The subtraction renormalises F16 subnormals exactly; its operands and result are normal. */
ALWAYS_INLINE uint32_t widen_f16(uint32_t h)
{
    const uint32_t magic = 113u << 23;
    uint32_t a = (h & 0x7fff) << 13;
    uint32_t tiny = ckpt_f32_bits(ckpt_f32_of(a + magic) - ckpt_f32_of(magic));
    uint32_t normal = a + (112u << 23) + ((int32_t)a >= 0x1f << 23 ? 112u << 23 : 0);
    uint32_t sign = (h & 0x8000) << 16;
    return (uint32_t)pick((int32_t)a < 1 << 23, (int32_t)tiny, (int32_t)normal) | sign;
}

/* Kernels over one block, at any alignment; each is compiled for several instruction sets. */
#define NARROW_LOOP(put, size, expr)                                                               \
    for (size_t i = 0; i < BLOCK; i++) {                                                           \
        uint32_t x = ckpt_get_u32(in + 4 * i);                                                     \
        put(out + (size)*i, expr);                                                                 \
    }
#define WIDEN_LOOP(expr)                                                                           \
    for (size_t i = 0; i < BLOCK; i++) {                                                           \
        uint32_t h = ckpt_get_u16(in + 2 * i);                                                     \
        ckpt_put_u32(out + 4 * i, expr);                                                           \
    }

ALWAYS_INLINE void put_half(uint8_t *p, uint32_t code)
{
    ckpt_put_u16(p, (uint16_t)code);
}

ALWAYS_INLINE void put_byte(uint8_t *p, uint32_t code)
{
    *p = (uint8_t)code;
}

/* f32 to a type of one or two bytes. */
ALWAYS_INLINE void narrow_block(ckpt_dtype to, uint8_t *restrict out, const uint8_t *restrict in)
{
    if (to == CKPT_BF16)
        NARROW_LOOP(put_half, 2, narrow_bf16(x))
    else if (to == CKPT_F16)
        NARROW_LOOP(put_half, 2, narrow(x, IEEE, 5, 10, 15))
    else if (to == CKPT_F8_E5M2)
        NARROW_LOOP(put_byte, 1, narrow(x, IEEE, 5, 2, 15))
    else if (to == CKPT_F8_E4M3)
        NARROW_LOOP(put_byte, 1, narrow(x, FN, 4, 3, 7))
    else if (to == CKPT_F8_E5M2FNUZ)
        NARROW_LOOP(put_byte, 1, narrow(x, FNUZ, 5, 2, 16))
    else if (to == CKPT_F8_E4M3FNUZ)
        NARROW_LOOP(put_byte, 1, narrow(x, FNUZ, 4, 3, 8))
    else
        NARROW_LOOP(put_byte, 1, narrow_e8m0(x))
}

/* BF16 or F16 to f32. */
ALWAYS_INLINE void widen_block(ckpt_dtype from, uint8_t *restrict out, const uint8_t *restrict in)
{
    if (from == CKPT_BF16)
        WIDEN_LOOP(h << 16)
    else
        WIDEN_LOOP(widen_f16(h))
}

typedef void block_fn(ckpt_dtype dtype, uint8_t *restrict out, const uint8_t *restrict in);

static void narrow_block_base(ckpt_dtype to, uint8_t *restrict out, const uint8_t *restrict in)
{
    narrow_block(to, out, in);
}

static void widen_block_base(ckpt_dtype from, uint8_t *restrict out, const uint8_t *restrict in)
{
    widen_block(from, out, in);
}

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2")))

TARGET_AVX2 static void narrow_block_avx2(ckpt_dtype to, uint8_t *restrict out,
                                          const uint8_t *restrict in)
{
    narrow_block(to, out, in);
}

TARGET_AVX2 static void widen_block_avx2(ckpt_dtype from, uint8_t *restrict out,
                                         const uint8_t *restrict in)
{
    widen_block(from, out, in);
}

/* Masks for its choices and one instruction that halves a vector's lanes: twice AVX2's rate. */
#if defined(__clang__)
#define TARGET_AVX512                                                                              \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define TARGET_AVX512                                                                              \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif

TARGET_AVX512 static void narrow_block_avx512(ckpt_dtype to, uint8_t *restrict out,
                                              const uint8_t *restrict in)
{
    narrow_block(to, out, in);
}

TARGET_AVX512 static void widen_block_avx512(ckpt_dtype from, uint8_t *restrict out,
                                             const uint8_t *restrict in)
{
    widen_block(from, out, in);
}
#endif

typedef struct cast_build {
    const char *name;
    block_fn *narrow, *widen;
} cast_build;

/* Each asks more of the processor than the one before it. */
static const cast_build cast_builds[] = {
    {"any processor", narrow_block_base,   widen_block_base  },
#if defined(__x86_64__)
    {"AVX2",          narrow_block_avx2,   widen_block_avx2  },
    {"AVX-512",       narrow_block_avx512, widen_block_avx512},
#endif
};
enum { CAST_BUILDS = sizeof cast_builds / sizeof *cast_builds };

/* How many of them run here. */
static int cast_builds_here(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2"))
        return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 3
               : 2;
#else
    return 1;
#endif
}

/* One cast in progress: the chosen kernels and, for a one-byte source, all its values as f32. */
typedef struct cast_plan {
    ckpt_dtype to, from;
    size_t to_size, from_size;
    block_fn *narrow, *widen;
    uint32_t table[256];
} cast_plan;

static void plan_init(cast_plan *plan, ckpt_dtype to, ckpt_dtype from)
{
    const cast_build *build = &cast_builds[cast_builds_here() - 1];
    plan->to = to;
    plan->from = from;
    plan->to_size = (size_t)dtype_info[to].bits / 8;
    plan->from_size = (size_t)dtype_info[from].bits / 8;
    plan->narrow = build->narrow;
    plan->widen = build->widen;
    if (plan->from_size == 1)
        for (unsigned i = 0; i < 256; i++)
            plan->table[i] = (uint32_t)encode(CKPT_F32, decode(from, i));
}

/* One whole block. Only pairs that need both steps stage f32 values between them. */
static void cast_block(const cast_plan *plan, uint8_t *dst, const uint8_t *src)
{
    uint8_t staging[4 * BLOCK];
    const uint8_t *wide = src;
    if (plan->from != CKPT_F32) {
        uint8_t *out = plan->to == CKPT_F32 ? dst : staging;
        wide = out;
        if (plan->from_size == 2)
            plan->widen(plan->from, out, src);
        else
            for (size_t i = 0; i < BLOCK; i++)
                ckpt_put_u32(out + 4 * i, plan->table[src[i]]);
    }
    if (plan->to == CKPT_F64)
        for (size_t i = 0; i < BLOCK; i++)
            ckpt_put_u64(dst + 8 * i, decode(CKPT_F32, ckpt_get_u32(wide + 4 * i)));
    else if (plan->to != CKPT_F32)
        plan->narrow(plan->to, dst, wide);
}

static uint64_t load_code(const uint8_t *p, size_t size)
{
    if (size == 1)
        return *p;
    return size == 2 ? ckpt_get_u16(p) : size == 4 ? ckpt_get_u32(p) : ckpt_get_u64(p);
}

/* Element by element: f64 sources and the tail of a block. */
static void cast_scalar(ckpt_dtype to, uint8_t *dst, ckpt_dtype from, const uint8_t *src, size_t n)
{
    size_t to_size = (size_t)dtype_info[to].bits / 8, from_size = (size_t)dtype_info[from].bits / 8;
    for (size_t i = 0; i < n; i++) {
        uint64_t code = encode(to, decode(from, load_code(src + i * from_size, from_size)));
        memcpy(dst + i * to_size, &code, to_size); /* little-endian hosts only: le.h */
    }
}

void ckpt_dtype_cast(ckpt_dtype to, void *dst, ckpt_dtype from, const void *src, size_t n)
{
    assert(ckpt_dtype_castable(from, to));
    uint8_t *out = dst;
    const uint8_t *in = src;
    if (from == to) {
        if (n > 0)
            memcpy(dst, src, n * (size_t)dtype_info[to].bits / 8);
        return;
    }
    if (from != CKPT_F64 && n >= BLOCK) {
        cast_plan plan;
        plan_init(&plan, to, from);
        for (; n >= BLOCK; n -= BLOCK) {
            cast_block(&plan, out, in);
            out += BLOCK * plan.to_size;
            in += BLOCK * plan.from_size;
        }
    }
    cast_scalar(to, out, from, in, n);
}

double ckpt_dtype_load(ckpt_dtype dtype, const void *data, int64_t index)
{
    const ckpt_dtype_info *f = &dtype_info[dtype];
    const uint8_t *base = data;
    size_t i = (size_t)index;
    uint64_t code;
    ckpt_dtype part = dtype;
    if (f->bits < 8) {
        /* Groups of 8 elements fill a whole number of bytes, so i * bits need not fit. */
        size_t bits = (size_t)f->bits, bit = i % 8 * bits;
        const uint8_t *p = base + i / 8 * bits + bit / 8;
        code = *p >> bit % 8;
        if (bit % 8 + bits > 8)
            code |= (uint64_t)p[1] << (8 - bit % 8);
        code &= (UINT64_C(1) << bits) - 1;
    } else {
        size_t size = (size_t)f->bits / 8, word = size;
        if (f->kind == CKPT_KIND_COMPLEX) {
            word /= 2;
            part = word == 8 ? CKPT_F64 : word == 4 ? CKPT_F32 : CKPT_F16;
        }
        code = load_code(base + i * size, word);
    }
    switch (f->kind) {
    case CKPT_KIND_BOOL:
        return code != 0;
    case CKPT_KIND_UINT:
        return (double)code;
    case CKPT_KIND_INT:
        /* Move the sign bit to the top and back: sign extension. */
        return (double)((int64_t)(code << (64 - f->bits)) >> (64 - f->bits));
    case CKPT_KIND_FLOAT:
    case CKPT_KIND_COMPLEX:
        break;
    }
    uint64_t x = decode(part, code);
    double value;
    memcpy(&value, &x, sizeof value);
    return value;
}
