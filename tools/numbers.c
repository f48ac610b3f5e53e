#include "numbers.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 1024 }; /* elements decoded at a time */

ckpt_dtype ckpt_component(ckpt_dtype dtype, int *parts)
{
    *parts = ckpt_dtype_get(dtype)->kind == CKPT_KIND_COMPLEX ? 2 : 1;
    if (*parts == 1)
        return dtype;
    int bits = ckpt_dtype_get(dtype)->bits;
    return bits == 128 ? CKPT_F64 : bits == 64 ? CKPT_F32 : CKPT_F16;
}

void ckpt_decode(ckpt_dtype dtype, const uint8_t *data, size_t n, double *out)
{
    if (ckpt_dtype_castable(dtype, CKPT_F64)) {
        ckpt_dtype_cast(CKPT_F64, out, dtype, data, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        out[i] = ckpt_dtype_load(dtype, data, (int64_t)i);
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

/* 64-bit integers differ by amounts that doubles of them may hide. */
static double difference(const ckpt_dtype_info *info, const uint8_t *a, const uint8_t *b, size_t i,
                         double va, double vb)
{
    if (info->bits != 64 || (info->kind != CKPT_KIND_INT && info->kind != CKPT_KIND_UINT))
        return fabs(va - vb);
    uint64_t ua = bits_of(64, a, i), ub = bits_of(64, b, i);
    bool a_less = info->kind == CKPT_KIND_INT ? (int64_t)ua < (int64_t)ub : ua < ub;
    return (double)(a_less ? ub - ua : ua - ub);
}

static void changed(ckpt_delta *d, const ckpt_dtype_info *info, const uint8_t *a, const uint8_t *b,
                    size_t i, double va, double vb)
{
    double diff = difference(info, a, b, i, va, vb);
    bool both_nan = isnan(va) && isnan(vb);
    if (d->first < 0)
        d->first = d->n + (int64_t)i;
    d->changed++;
    if (va == vb && diff == 0)
        return; /* -0 against 0 */
    if (both_nan)
        return;
    if (isnan(diff))
        diff = INFINITY;
    double scale = fmax(fabs(va), fabs(vb));
    double rel = isfinite(scale) && scale > 0 ? diff / scale : INFINITY;
    d->max_abs = diff > d->max_abs ? diff : d->max_abs;
    d->max_rel = rel > d->max_rel ? rel : d->max_rel;
    if (isfinite(diff))
        d->sum_sq += diff * diff;
    if (!(diff <= d->atol + d->rtol * fabs(vb)) || isinf(diff))
        d->beyond++;
    if (info->kind == CKPT_KIND_FLOAT && !isnan(va) && !isnan(vb)) {
        uint64_t ulp =
            ulp_distance(info->bits, bits_of(info->bits, a, i), bits_of(info->bits, b, i));
        d->max_ulp = ulp > d->max_ulp ? ulp : d->max_ulp;
    }
}

void ckpt_delta_feed(ckpt_delta *d, ckpt_dtype dtype, const uint8_t *a, const uint8_t *b,
                     size_t bytes)
{
    int parts;
    dtype = ckpt_component(dtype, &parts);
    const ckpt_dtype_info *info = ckpt_dtype_get(dtype);
    double va[BLOCK], vb[BLOCK];
    size_t n = elements(dtype, bytes);
    bool fresh = d->first < 0;
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t k = n - i < BLOCK ? n - i : BLOCK;
        const uint8_t *pa = a + bytes_of(dtype, i), *pb = b + bytes_of(dtype, i);
        ckpt_decode(dtype, pa, k, va);
        ckpt_decode(dtype, pb, k, vb);
        for (size_t j = 0; j < k; j++) {
            d->dot += va[j] * vb[j];
            d->aa += va[j] * va[j];
            d->bb += vb[j] * vb[j];
            if (bits_of(info->bits, pa, j) != bits_of(info->bits, pb, j))
                changed(d, info, pa, pb, j, va[j], vb[j]);
        }
        d->n += (int64_t)k;
    }
    if (fresh && d->first >= 0)
        d->first /= parts;
}

double ckpt_delta_rms(const ckpt_delta *d)
{
    return d->n > 0 ? sqrt(d->sum_sq / (double)d->n) : 0;
}

double ckpt_delta_cosine(const ckpt_delta *d)
{
    if (d->aa == 0 && d->bb == 0)
        return 1;
    double c = d->dot / (sqrt(d->aa) * sqrt(d->bb));
    if (isnan(c))
        return NAN;
    return c > 1 ? 1 : c < -1 ? -1 : c;
}
