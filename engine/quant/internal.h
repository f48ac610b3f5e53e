/* Between forward.c, backward.c and rounding.c of this directory. */
#ifndef CKPT_ENGINE_QUANT_INTERNAL_H
#define CKPT_ENGINE_QUANT_INTERNAL_H

#include "codec.h"
#include "kda_quant.h"
#include "real_math.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define CH CKPT_QUANT_CHUNK
#define TILE CKPT_QUANT_TILE
#define N_TILES (CH / TILE)

/* The engine flushes subnormals; a quantiser may not. */
static inline unsigned quant_keep_subnormals(void)
{
#if defined(__x86_64__)
    unsigned csr = _mm_getcsr();
    _mm_setcsr(csr & ~0x8040u); /* FTZ, DAZ */
    return csr;
#else
    return 0;
#endif
}

static inline void quant_restore(unsigned csr)
{
#if defined(__x86_64__)
    _mm_setcsr(csr);
#else
    (void)csr;
#endif
}

/* One chunk of a sequence. */
typedef struct quant_chunk {
    int64_t n, c, t0, len; /* sequence, chunk of it, first token, tokens */
} quant_chunk;

/* Sizes and operands common to all tasks. */
typedef struct ENG(quant_job) {
    const ckpt_quant *q;
    const ckpt_eng_delta *d;
    const ckpt_eng_seq *seq;
    const ENG(delta_in) * in;
    const ENG(quant_saved) * s;
    int64_t K, V, HV, chunks;
    const quant_chunk *table; /* [chunks], sequence by sequence */
    const int64_t *first;     /* [N + 1] first chunk of each sequence */
    real scale;
    real *scratch; /* of the workers */
    int64_t scratch_len;
} ENG(quant_job);

ckpt_status ENG(quant_begin)(ckpt_eng *e, ENG(quant_job) * j, int64_t scratch_len,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(quant_check)(const ckpt_quant *q, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                             ckpt_err *err) CKPT_MUST_USE;

/* A chunk's operands before they are rounded, [64, ...]; rows beyond its tokens are 0. */
typedef struct ENG(quant_rows) {
    real *k, *bk, *qs; /* k, beta k, kappa q */
    real *v, *bv;      /* v, beta v */
    real beta[CH];
} ENG(quant_rows);
#define QUANT_ROWS_LEN(K, V) (CH * (3 * (K) + 2 * (V)))
/* Fill r, whose arrays lie in `at`. */
void ENG(quant_load)(const ENG(quant_job) * j, const quant_chunk *c, int64_t hv, real *at,
                     ENG(quant_rows) * r);

/* ---- rounding.c ------------------------------------------------------------------------------- */

real ENG(quant_round)(ckpt_quant_dtype dtype, real x);
void ENG(quant_boundary)(ckpt_quant_dtype dtype, int64_t n, real *x);
/* Largest magnitude, as f32. */
float ENG(quant_peak)(const real *x, int64_t n);
/* n rows of `width`. global: NVFP4's scale of the call. y may be x. */
void ENG(quant_qdq)(ckpt_quant_kind kind, float global, int64_t rows, int64_t width, const real *x,
                    real *y);
void ENG(quant_state)(const ckpt_quant *q, int64_t K, int64_t V, real *x);
/* c [m, n] = a [m, k] . b [n, k]^T by the site's schedule; tmp [m, n]. */
void ENG(quant_product)(const ckpt_quant *q, ckpt_quant_site site, int64_t m, int64_t n, int64_t k,
                        const real *a, const real *b, real *c, real *tmp);
/* One element of it. */
real ENG(quant_dot)(const ckpt_quant *q, ckpt_quant_site site, int64_t k, const real *a,
                    const real *b);
/* exp(x) into y, rounded as gate_exp is unless exact. */
void ENG(quant_exp)(const ckpt_quant *q, bool exact, int64_t n, const real *x, real *y);
/* out [64, 64] = (I + lower)^-1, of which the part below the diagonal of its first len rows is read.
 * work: 5 * 64 * 64 doubles. factors > 0: the approximation, with its errors. */
void ENG(quant_inverse)(int factors, int64_t len, const real *lower, real *out, double *work,
                        double errors[2]);
void ENG(quant_transpose)(int64_t rows, int64_t cols, const real *x, real *y);

#endif
