/* Rotary embedding: tables and rotation in place.
 *
 * Plain: f_i = base^(-2i/dim). YaRN blends f_i with f_i / factor along a ramp between two numbers of
 * turns and scales cos and sin; llama3 divides the slow ones by factor and blends between. Angles are
 * computed in the engine's type from frequencies rounded to it, as the frameworks do in f32.
 * Source: mla-moe-math.md section 2.4. */
#include "attn.h"

#include <math.h>

#include "checked.h"

#define PI 3.14159265358979323846

static double yarn_mscale(double factor, double m)
{
    return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1;
}

/* Channel pair at which a frequency makes `turns` turns over the original context. */
static double yarn_corr(const ckpt_eng_rope *r, double turns)
{
    return (double)r->dim * log(r->original_max / (turns * 2 * PI)) / (2 * log(r->base));
}

static void yarn_freqs(const ckpt_eng_rope *r, double *f)
{
    double lo = fmax(floor(yarn_corr(r, r->beta_fast)), 0);
    double hi = fmin(ceil(yarn_corr(r, r->beta_slow)), (double)r->dim - 1);
    double span = hi == lo ? 0.001 : hi - lo;
    for (int64_t i = 0; i < r->dim / 2; i++) {
        double ramp = fmin(fmax(((double)i - lo) / span, 0), 1);
        f[i] = f[i] / r->factor * ramp + f[i] * (1 - ramp);
    }
}

static void llama3_freqs(const ckpt_eng_rope *r, double *f)
{
    double slow = r->original_max / r->low_freq_factor,
           fast = r->original_max / r->high_freq_factor;
    for (int64_t i = 0; i < r->dim / 2; i++) {
        double wave = 2 * PI / f[i];
        double smooth = (r->original_max / wave - r->low_freq_factor) /
                        (r->high_freq_factor - r->low_freq_factor);
        if (wave > slow)
            f[i] /= r->factor;
        else if (wave >= fast)
            f[i] = (1 - smooth) * f[i] / r->factor + smooth * f[i];
    }
}

static ckpt_status check_rope(const ckpt_eng_rope *r, ckpt_err *err)
{
    bool ok = r->dim > 0 && r->dim % 2 == 0 && r->dim <= CKPT_ENG_ROPE_MAX && r->base > 1;
    if (r->kind == CKPT_ENG_ROPE_YARN)
        ok = ok && r->factor >= 1 && r->original_max > 0 && r->beta_fast > 0 && r->beta_slow > 0;
    if (r->kind == CKPT_ENG_ROPE_LLAMA3)
        ok = ok && r->factor >= 1 && r->original_max > 0 && r->low_freq_factor > 0 &&
             r->high_freq_factor > r->low_freq_factor;
    if (!ok || r->kind == CKPT_ENG_ROPE_NONE)
        return ckpt_fail(err, CKPT_E_USAGE, "rope: %lld channels, base %g, factor %g do not fit",
                         (long long)r->dim, r->base, r->factor);
    return CKPT_OK;
}

typedef struct table_job {
    const ckpt_eng_seq *seq;
    const int64_t *offset;
    const real *freq;
    real scale;
    int64_t half;
    real *cos, *sin;
} table_job;

static void fill_sequence(void *arg, int64_t item, int worker)
{
    const table_job *j = arg;
    (void)worker;
    int64_t first = j->offset ? j->offset[item] : 0;
    for (int64_t t = j->seq->cu[item]; t < j->seq->cu[item + 1]; t++) {
        real position = (real)(first + t - j->seq->cu[item]);
        for (int64_t i = 0; i < j->half; i++) {
            real angle = position * j->freq[i];
#if CKPT_REAL == 32
            j->cos[t * j->half + i] = cosf(angle) * j->scale;
            j->sin[t * j->half + i] = sinf(angle) * j->scale;
#else
            j->cos[t * j->half + i] = cos(angle) * j->scale;
            j->sin[t * j->half + i] = sin(angle) * j->scale;
#endif
        }
    }
}

ckpt_status ENG(rope_freqs)(const ckpt_eng_rope *r, real *freq, real *scale, ckpt_err *err)
{
    double f[CKPT_ENG_ROPE_MAX / 2], by = 1;
    ckpt_status status = check_rope(r, err);
    if (status != CKPT_OK)
        return status;
    int64_t half = r->dim / 2;
    for (int64_t i = 0; i < half; i++)
        f[i] = pow(r->base, -2 * (double)i / (double)r->dim);
    if (r->kind == CKPT_ENG_ROPE_YARN) {
        yarn_freqs(r, f);
        by = yarn_mscale(r->factor, r->mscale) / yarn_mscale(r->factor, r->mscale_all_dim);
    } else if (r->kind == CKPT_ENG_ROPE_LLAMA3) {
        llama3_freqs(r, f);
    }
    for (int64_t i = 0; i < half; i++)
        freq[i] = (real)f[i];
    *scale = (real)by;
    return CKPT_OK;
}

ckpt_status ENG(rope_table)(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                            const int64_t *offset, real *cos, real *sin, ckpt_err *err)
{
    real freq[CKPT_ENG_ROPE_MAX / 2], scale;
    ckpt_status status = ENG(rope_freqs)(r, freq, &scale, err);
    if (status != CKPT_OK || e->dry)
        return status;
    ckpt_eng_parallel(e, seq->n, fill_sequence,
                      &(table_job){.seq = seq,
                                   .offset = offset,
                                   .freq = freq,
                                   .scale = scale,
                                   .half = r->dim / 2,
                                   .cos = cos,
                                   .sin = sin});
    return CKPT_OK;
}

typedef struct rotate_job {
    const ckpt_eng_rope *r;
    int64_t T, heads, ldx, ldh;
    real *x;
    const real *cos, *sin;
    bool inverse;
} rotate_job;

#define TOKENS 32 /* an item */

/* a' = a cos - b sin, b' = b cos + a sin; the inverse is the transpose. Pairs (2i, 2i+1) are written
 * half-split, which both sides of a score share. */
static void rotate_interleaved(const real *c, const real *s, int64_t half, bool inverse, real *x)
{
    real tmp[CKPT_ENG_ROPE_MAX];
    for (int64_t i = 0; i < half; i++) {
        real a = inverse ? x[i] : x[2 * i], b = inverse ? x[half + i] : x[2 * i + 1];
        real p = inverse ? a * c[i] + b * s[i] : a * c[i] - b * s[i];
        real q = inverse ? b * c[i] - a * s[i] : b * c[i] + a * s[i];
        tmp[inverse ? 2 * i : i] = p;
        tmp[inverse ? 2 * i + 1 : half + i] = q;
    }
    for (int64_t i = 0; i < 2 * half; i++)
        x[i] = tmp[i];
}

static void rotate_halves(const real *c, const real *s, int64_t half, bool inverse, real *x)
{
    real sign = inverse ? -1 : 1;
    for (int64_t i = 0; i < half; i++) {
        real a = x[i], b = x[half + i], t = sign * s[i];
        x[i] = a * c[i] - b * t;
        x[half + i] = b * c[i] + a * t;
    }
}

static void rotate_tokens(void *arg, int64_t item, int worker)
{
    const rotate_job *j = arg;
    int64_t half = j->r->dim / 2, hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    (void)worker;
    for (int64_t t = item * TOKENS; t < hi; t++)
        for (int64_t h = 0; h < j->heads; h++) {
            real *x = j->x + t * j->ldx + h * j->ldh;
            if (j->r->interleaved)
                rotate_interleaved(j->cos + t * half, j->sin + t * half, half, j->inverse, x);
            else
                rotate_halves(j->cos + t * half, j->sin + t * half, half, j->inverse, x);
        }
}

ckpt_status ENG(rope)(ckpt_eng *e, const ckpt_eng_rope *r, int64_t T, int64_t heads, real *x,
                      int64_t ldx, int64_t ldh, const real *cos, const real *sin, bool inverse,
                      ckpt_err *err)
{
    ckpt_status status = check_rope(r, err);
    if (status != CKPT_OK || e->dry)
        return status;
    ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, rotate_tokens,
                      &(rotate_job){r, T, heads, ldx, ldh, x, cos, sin, inverse});
    return CKPT_OK;
}
