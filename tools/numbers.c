/* Statistics and differences (numbers.h). What differs in many places is measured four values at a time, in
 * lanes that keep their own sums: a value's lane is its index in the tensor modulo 4, so that the sums do
 * not depend on how the tensor was cut into blocks, nor on the width of the processor's vectors. */
#include "numbers.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 1024 }; /* elements decoded at a time */

typedef double vreal __attribute__((vector_size(CKPT_LANES * 8), aligned(8)));
typedef int64_t vint __attribute__((vector_size(CKPT_LANES * 8), aligned(8)));
typedef uint64_t vbits __attribute__((vector_size(CKPT_LANES * 8), aligned(8)));

/* n numbers of one type as another, in vectors: compilers leave such loops as they are at -O2. */
#define WIDEN(from, vector, to, n, data)                                                           \
    do {                                                                                           \
        size_t i_ = 0;                                                                             \
        for (; i_ + CKPT_LANES <= (n); i_ += CKPT_LANES) {                                         \
            from in_ __attribute__((vector_size(CKPT_LANES * sizeof(from))));                      \
            memcpy(&in_, (const uint8_t *)(data) + i_ * sizeof(from), sizeof in_);                 \
            const vector out_ = __builtin_convertvector(in_, vector);                              \
            memcpy((to) + i_, &out_, sizeof out_);                                                 \
        }                                                                                          \
        for (; i_ < (n); i_++) {                                                                   \
            from in_;                                                                              \
            memcpy(&in_, (const uint8_t *)(data) + i_ * sizeof(from), sizeof in_);                 \
            (to)[i_] = in_;                                                                        \
        }                                                                                          \
    } while (0)

ckpt_dtype ckpt_component(ckpt_dtype dtype, int *parts)
{
    *parts = ckpt_dtype_get(dtype)->kind == CKPT_KIND_COMPLEX ? 2 : 1;
    if (*parts == 1)
        return dtype;
    int bits = ckpt_dtype_get(dtype)->bits;
    return bits == 128 ? CKPT_F64 : bits == 64 ? CKPT_F32 : CKPT_F16;
}

/* Blocks start on whole bytes: with several elements a byte, BLOCK elements fill whole bytes. */
static size_t elements(ckpt_dtype dtype, size_t bytes)
{
    return bytes * 8 / (size_t)ckpt_dtype_get(dtype)->bits;
}

static size_t bytes_of(ckpt_dtype dtype, size_t n)
{
    return n * (size_t)ckpt_dtype_get(dtype)->bits / 8;
}

void ckpt_decode(ckpt_dtype dtype, const uint8_t *data, size_t n, double *out)
{
    if (ckpt_dtype_castable(dtype, CKPT_F32) && ckpt_dtype_get(dtype)->bits <= 32) {
        float narrow[BLOCK]; /* all of them are floats; a NaN's payload does not matter here */
        for (size_t done = 0; done < n; done += BLOCK) {
            size_t k = n - done < BLOCK ? n - done : BLOCK;
            ckpt_dtype_cast(CKPT_F32, narrow, dtype, data + bytes_of(dtype, done), k);
            WIDEN(float, vreal, out + done, k, narrow);
        }
        return;
    }
    if (ckpt_dtype_castable(dtype, CKPT_F64)) {
        ckpt_dtype_cast(CKPT_F64, out, dtype, data, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        out[i] = ckpt_dtype_load(dtype, data, (int64_t)i);
}

/* ---- statistics ------------------------------------------------------------------------------ */

void ckpt_stats_init(ckpt_stats *s)
{
    memset(s, 0, sizeof *s);
    s->min = INFINITY;
    s->max = -INFINITY;
    s->first_bad = -1;
}

/* Chan, Golub, LeVeque 1983: merge the moments of two groups. */
static void merge(ckpt_stats *s, int64_t n, double mean, double m2)
{
    double total = (double)(s->finite + n);
    double delta = mean - s->mean;
    s->mean += delta * (double)n / total;
    s->m2 += m2 + delta * delta * (double)s->finite * (double)n / total;
    s->finite += n;
}

static void feed_block(ckpt_stats *s, const double *v, size_t n, int parts)
{
    double sum = 0, m2 = 0;
    int64_t finite = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(v[i])) {
            s->nan += isnan(v[i]) != 0;
            s->inf += isinf(v[i]) != 0;
            if (s->first_bad < 0)
                s->first_bad = (s->n + (int64_t)i) / parts;
            continue;
        }
        s->zero += v[i] == 0;
        s->min = v[i] < s->min ? v[i] : s->min;
        s->max = v[i] > s->max ? v[i] : s->max;
        sum += v[i];
        finite++;
    }
    s->n += (int64_t)n;
    if (finite == 0)
        return;
    double mean = sum / (double)finite;
    for (size_t i = 0; i < n; i++)
        if (isfinite(v[i]))
            m2 += (v[i] - mean) * (v[i] - mean);
    merge(s, finite, mean, m2);
}

void ckpt_stats_feed(ckpt_stats *s, ckpt_dtype dtype, const uint8_t *data, size_t bytes)
{
    double v[BLOCK];
    int parts;
    dtype = ckpt_component(dtype, &parts);
    size_t n = elements(dtype, bytes);
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t k = n - i < BLOCK ? n - i : BLOCK;
        ckpt_decode(dtype, data + bytes_of(dtype, i), k, v);
        feed_block(s, v, k, parts);
    }
}

double ckpt_stats_std(const ckpt_stats *s)
{
    return s->finite > 0 ? sqrt(s->m2 / (double)s->finite) : NAN;
}

/* ---- differences ----------------------------------------------------------------------------- */

void ckpt_delta_init(ckpt_delta *d, double atol, double rtol)
{
    memset(d, 0, sizeof *d);
    d->atol = atol;
    d->rtol = rtol;
    d->first = -1;
}

/* Bits of element i in the low end of a word. */
static uint64_t bits_of(int bits, const uint8_t *data, size_t i)
{
    uint64_t word = 0;
    if (bits < 8) {
        size_t at = i * (size_t)bits;
        unsigned pair = data[at / 8];
        if (at % 8 + (size_t)bits > 8)
            pair |= (unsigned)data[at / 8 + 1] << 8;
        return (pair >> (at % 8)) & ((1U << bits) - 1);
    }
    size_t size = (size_t)bits / 8;
    memcpy(&word, data + i * size, size);
    return word;
}

/* Steps between two floats in their own format: sign-magnitude patterns on one line. */
static uint64_t ulp_distance(int bits, uint64_t a, uint64_t b)
{
    uint64_t sign = (uint64_t)1 << (bits - 1);
    uint64_t ma = a & (sign - 1), mb = b & (sign - 1);
    if ((a & sign) != (b & sign))
        return ma + mb;
    return ma > mb ? ma - mb : mb - ma;
}

/* Values of a block of both tensors: as numbers and as bits. */
typedef struct pairs {
    const ckpt_dtype_info *info;
    size_t n;
    double va[BLOCK], vb[BLOCK];
    uint64_t xa[BLOCK], xb[BLOCK];
} pairs;

/* 64-bit integers differ by amounts that doubles of them may hide. */
static bool hides(const ckpt_dtype_info *info)
{
    return info->bits == 64 && (info->kind == CKPT_KIND_INT || info->kind == CKPT_KIND_UINT);
}

static double difference(const pairs *p, size_t i)
{
    if (!hides(p->info))
        return fabs(p->va[i] - p->vb[i]);
    uint64_t a = p->xa[i], b = p->xb[i];
    bool a_less = p->info->kind == CKPT_KIND_INT ? (int64_t)a < (int64_t)b : a < b;
    return (double)(a_less ? b - a : a - b);
}

/* Of a value whose bits changed. */
static void changed(ckpt_delta *d, const pairs *p, size_t i)
{
    const double va = p->va[i], vb = p->vb[i];
    double diff = difference(p, i);
    d->changed++;
    if (va == vb && diff == 0)
        return; /* -0 against 0 */
    if (isnan(va) && isnan(vb))
        return;
    if (isnan(diff))
        diff = INFINITY;
    double scale = fmax(fabs(va), fabs(vb));
    double rel = isfinite(scale) && scale > 0 ? diff / scale : INFINITY;
    d->max_abs = diff > d->max_abs ? diff : d->max_abs;
    d->max_rel = rel > d->max_rel ? rel : d->max_rel;
    if (isfinite(diff))
        d->sum_sq[i % CKPT_LANES] += diff * diff;
    if (!(diff <= d->atol + d->rtol * fabs(vb)) || isinf(diff))
        d->beyond++;
    if (p->info->kind == CKPT_KIND_FLOAT && !isnan(va) && !isnan(vb)) {
        uint64_t ulp = ulp_distance(p->info->bits, p->xa[i], p->xb[i]);
        d->max_ulp = ulp > d->max_ulp ? ulp : d->max_ulp;
    }
}

static void measure_each(ckpt_delta *d, const pairs *p, size_t from)
{
    for (size_t i = from; i < p->n; i++) {
        d->dot[i % CKPT_LANES] += p->va[i] * p->vb[i];
        d->aa[i % CKPT_LANES] += p->va[i] * p->va[i];
        d->bb[i % CKPT_LANES] += p->vb[i] * p->vb[i];
        if (p->xa[i] != p->xb[i])
            changed(d, p, i);
    }
}

#define TOP64 (UINT64_C(1) << 63)
#define INLINE __attribute__((always_inline)) static inline

/* No functions: a vector wider than the processor's is no argument. */
#define PICK(mask, a, b) (((vbits)(a) & (mask)) | ((vbits)(b) & ~(mask)))
#define LARGER(a, b) ((vreal)PICK((vbits)((a) > (b)), a, b))
#define LARGER_BITS(a, b) PICK((vbits)((vint)((a) ^ TOP64) > (vint)((b) ^ TOP64)), a, b)
#define MAGNITUDE(a) ((vreal)((vbits)(a) & ~TOP64))

/* What `changed` and the sums say of n finite values, a multiple of the lanes. A pair of equal bits
 * differs by 0, and neither that nor -0 against 0 changes any of it but the count. */
INLINE void measure_lanes(ckpt_delta *d, const pairs *p, size_t n)
{
    const uint64_t sign = p->info->kind == CKPT_KIND_FLOAT ? UINT64_C(1) << (p->info->bits - 1) : 0;
    const uint64_t rest = sign != 0 ? sign - 1 : 0; /* of integers no steps are counted */
    vreal dot, aa, bb, sum, most = {0}, most_rel = {0};
    vint count = {0}, beyond = {0};
    vbits ulp = {0};
    memcpy(&dot, d->dot, sizeof dot);
    memcpy(&aa, d->aa, sizeof aa);
    memcpy(&bb, d->bb, sizeof bb);
    memcpy(&sum, d->sum_sq, sizeof sum);
    for (size_t i = 0; i < n; i += CKPT_LANES) {
        vreal a, b;
        vbits x, y;
        memcpy(&a, p->va + i, sizeof a);
        memcpy(&b, p->vb + i, sizeof b);
        memcpy(&x, p->xa + i, sizeof x);
        memcpy(&y, p->xb + i, sizeof y);
        dot += a * b;
        aa += a * a;
        bb += b * b;
        const vreal apart_by = a - b, diff = MAGNITUDE(apart_by), mag = MAGNITUDE(b),
                    scale = LARGER(MAGNITUDE(a), mag);
        const vreal rel = diff / scale; /* 0 / 0 is no maximum */
        sum += diff * diff;
        most = LARGER(diff, most);
        most_rel = LARGER(rel, most_rel);
        count -= (vint)(x != y);
        beyond -= (vint)(diff > d->atol + d->rtol * mag);
        const vbits ma = x & rest, mb = y & rest, less = (vbits)((vint)ma < (vint)mb);
        const vbits apart = PICK(less, mb - ma, ma - mb);
        const vbits other = (vbits)(((x ^ y) & sign) != 0);
        const vbits steps = PICK(other, ma + mb, apart);
        ulp = LARGER_BITS(steps, ulp);
    }
    memcpy(d->dot, &dot, sizeof dot);
    memcpy(d->aa, &aa, sizeof aa);
    memcpy(d->bb, &bb, sizeof bb);
    memcpy(d->sum_sq, &sum, sizeof sum);
    for (int k = 0; k < CKPT_LANES; k++) {
        d->max_abs = most[k] > d->max_abs ? most[k] : d->max_abs;
        d->max_rel = most_rel[k] > d->max_rel ? most_rel[k] : d->max_rel;
        d->max_ulp = ulp[k] > d->max_ulp ? ulp[k] : d->max_ulp;
        d->changed += count[k];
        d->beyond += beyond[k];
    }
}

INLINE bool all_finite(const pairs *p, size_t n)
{
    vreal zero = {0};
    for (size_t i = 0; i < n; i += CKPT_LANES) {
        vreal a, b;
        memcpy(&a, p->va + i, sizeof a);
        memcpy(&b, p->vb + i, sizeof b);
        const vreal apart = a - b; /* overflows where the sums would */
        zero += apart - apart;
    }
    bool finite = true;
    for (int k = 0; k < CKPT_LANES; k++)
        finite = finite && zero[k] == 0;
    return finite;
}

/* Bits of n elements. */
INLINE void load_bits(int bits, const uint8_t *data, size_t n, uint64_t *out)
{
    switch (bits) {
    case 8:
        WIDEN(uint8_t, vbits, out, n, data);
        break;
    case 16:
        WIDEN(uint16_t, vbits, out, n, data);
        break;
    case 32:
        WIDEN(uint32_t, vbits, out, n, data);
        break;
    case 64:
        memcpy(out, data, n * sizeof *out);
        break;
    default:
        for (size_t i = 0; i < n; i++)
            out[i] = bits_of(bits, data, i);
    }
}

INLINE size_t measure_some(ckpt_delta *d, pairs *p, const uint8_t *a, const uint8_t *b)
{
    load_bits(p->info->bits, a, p->n, p->xa);
    load_bits(p->info->bits, b, p->n, p->xb);
    const size_t n = p->n / CKPT_LANES * CKPT_LANES;
    if (hides(p->info) || !all_finite(p, n))
        return 0;
    measure_lanes(d, p, n);
    return n;
}

static size_t measure_base(ckpt_delta *d, pairs *p, const uint8_t *a, const uint8_t *b)
{
    return measure_some(d, p, a, b);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) static size_t measure_avx2(ckpt_delta *d, pairs *p,
                                                           const uint8_t *a, const uint8_t *b)
{
    return measure_some(d, p, a, b);
}
#endif

/* parts: values of an element. */
static void measure(ckpt_delta *d, pairs *p, const uint8_t *a, const uint8_t *b, int parts)
{
#if defined(__x86_64__)
    const size_t done =
        __builtin_cpu_supports("avx2") ? measure_avx2(d, p, a, b) : measure_base(d, p, a, b);
#else
    const size_t done = measure_base(d, p, a, b);
#endif
    measure_each(d, p, done);
    for (size_t k = 0; k < p->n && d->first < 0; k++)
        if (p->xa[k] != p->xb[k])
            d->first = (d->n + (int64_t)k) / parts;
}

/* Equal bits: sums of squares alone. */
static void measure_equal(ckpt_delta *d, const pairs *p)
{
    for (size_t i = 0; i < p->n; i++) {
        const double square = p->va[i] * p->va[i];
        d->dot[i % CKPT_LANES] += square;
        d->aa[i % CKPT_LANES] += square;
        d->bb[i % CKPT_LANES] += square;
    }
}

void ckpt_delta_feed(ckpt_delta *d, ckpt_dtype dtype, const uint8_t *a, const uint8_t *b,
                     size_t bytes)
{
    int parts;
    dtype = ckpt_component(dtype, &parts);
    pairs p = {.info = ckpt_dtype_get(dtype)};
    size_t n = elements(dtype, bytes);
    for (size_t i = 0; i < n; i += BLOCK) {
        const uint8_t *pa = a + bytes_of(dtype, i), *pb = b + bytes_of(dtype, i);
        p.n = n - i < BLOCK ? n - i : BLOCK;
        ckpt_decode(dtype, pa, p.n, p.va);
        if (memcmp(pa, pb, bytes_of(dtype, p.n)) == 0) {
            measure_equal(d, &p);
            d->n += (int64_t)p.n;
            continue;
        }
        ckpt_decode(dtype, pb, p.n, p.vb);
        measure(d, &p, pa, pb, parts);
        d->n += (int64_t)p.n;
    }
}

static double sum_of(const double *lanes)
{
    double sum = 0;
    for (int k = 0; k < CKPT_LANES; k++)
        sum += lanes[k];
    return sum;
}

double ckpt_delta_rms(const ckpt_delta *d)
{
    return d->n > 0 ? sqrt(sum_of(d->sum_sq) / (double)d->n) : 0;
}

double ckpt_delta_cosine(const ckpt_delta *d)
{
    const double aa = sum_of(d->aa), bb = sum_of(d->bb);
    if (aa == 0 && bb == 0)
        return 1;
    double c = sum_of(d->dot) / (sqrt(aa) * sqrt(bb));
    if (isnan(c))
        return NAN;
    return c > 1 ? 1 : c < -1 ? -1 : c;
}
