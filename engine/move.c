/* Copies, sums and cuts of arrays; tokens in, results out (move.h), in the memory of this process. */
#include "move.h"

#include <math.h>
#include <string.h>

#include "checked.h"

#define PIECE ((int64_t)1 << 16) /* elements of an item */
#define ROWS 64                  /* rows of an item */

/* ---- arrays ---------------------------------------------------------------------------------- */

typedef struct vector_job {
    const real *from;
    real *to;
    int64_t n;
} vector_job;

static int64_t piece(const vector_job *j, int64_t item)
{
    return ckpt_min_i64(PIECE, j->n - item * PIECE);
}

static void copy_item(void *arg, int64_t item, int worker)
{
    const vector_job *j = arg;
    (void)worker;
    memcpy(j->to + item * PIECE, j->from + item * PIECE, (size_t)piece(j, item) * sizeof(real));
}

static void zero_item(void *arg, int64_t item, int worker)
{
    const vector_job *j = arg;
    (void)worker;
    memset(j->to + item * PIECE, 0, (size_t)piece(j, item) * sizeof(real));
}

static void add_item(void *arg, int64_t item, int worker)
{
    const vector_job *j = arg;
    int64_t lo = item * PIECE, n = piece(j, item);
    (void)worker;
    for (int64_t i = lo; i < lo + n; i++)
        j->to[i] += j->from[i];
}

static ckpt_status run_vector(const ckpt_eng *e, int64_t n, ckpt_eng_fn fn, const real *from,
                              real *to)
{
    if (!e->dry)
        ckpt_eng_parallel(e, (n + PIECE - 1) / PIECE, fn, &(vector_job){from, to, n});
    return CKPT_OK;
}

ckpt_status ENG(copy)(ckpt_eng *e, int64_t n, const real *from, real *to, ckpt_err *err)
{
    (void)err;
    return run_vector(e, n, copy_item, from, to);
}

ckpt_status ENG(zero)(ckpt_eng *e, int64_t n, real *x, ckpt_err *err)
{
    (void)err;
    return run_vector(e, n, zero_item, NULL, x);
}

ckpt_status ENG(add)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err)
{
    (void)err;
    return run_vector(e, n, add_item, x, y);
}

typedef struct copy_job {
    int64_t rows, n, ld_from, ld_to;
    const real *from;
    real *to;
} copy_job;

static void columns_item(void *arg, int64_t item, int worker)
{
    const copy_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        for (int64_t c = 0; c < j->n; c++)
            j->to[r * j->ld_to + c] = j->from[r * j->ld_from + c];
}

ckpt_status ENG(copy_columns)(ckpt_eng *e, int64_t rows, int64_t n, const real *from,
                              int64_t ld_from, real *to, int64_t ld_to, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (rows + ROWS - 1) / ROWS, columns_item,
                          &(copy_job){rows, n, ld_from, ld_to, from, to});
    return CKPT_OK;
}

ckpt_status ENG(zero_wide)(ckpt_eng *e, int64_t n, wreal *x, ckpt_err *err)
{
    return ENG(zero)(e, n, x, err);
}

ckpt_status ENG(add_columns)(ckpt_eng *e, int64_t rows, int64_t n, const wreal *from,
                             int64_t ld_from, wreal *to, int64_t ld_to, ckpt_err *err)
{
    (void)err;
    for (int64_t r = 0; r < rows && !e->dry; r++)
        for (int64_t c = 0; c < n; c++)
            to[r * ld_to + c] += from[r * ld_from + c];
    return CKPT_OK;
}

/* ---- heads ----------------------------------------------------------------------------------- */

typedef struct heads_job {
    int64_t rows, G, n;
    const wreal *from;
    wreal *to;
} heads_job;

static void repeat_item(void *arg, int64_t item, int worker)
{
    const heads_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        for (int64_t g = 0; g < j->G; g++)
            memcpy(j->to + (r * j->G + g) * j->n, j->from + r * j->n, (size_t)j->n * sizeof(wreal));
}

static void sum_item(void *arg, int64_t item, int worker)
{
    const heads_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        for (int64_t c = 0; c < j->n; c++) {
            wreal sum = 0;
            for (int64_t g = 0; g < j->G; g++)
                sum += j->from[(r * j->G + g) * j->n + c];
            j->to[r * j->n + c] = sum;
        }
}

static void first_item(void *arg, int64_t item, int worker)
{
    const heads_job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * ROWS, j->rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        memcpy(j->to + r * j->n, j->from + r * j->G * j->n, (size_t)j->n * sizeof(wreal));
}

static ckpt_status run_heads(const ckpt_eng *e, ckpt_eng_fn fn, const heads_job *j)
{
    if (!e->dry)
        ckpt_eng_parallel(e, (j->rows + ROWS - 1) / ROWS, fn, (void *)(uintptr_t)j);
    return CKPT_OK;
}

ckpt_status ENG(repeat_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                              wreal *to, ckpt_err *err)
{
    (void)err;
    return run_heads(e, repeat_item, &(heads_job){rows, G, n, from, to});
}

ckpt_status ENG(sum_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                           wreal *to, ckpt_err *err)
{
    (void)err;
    return run_heads(e, sum_item, &(heads_job){rows, G, n, from, to});
}

ckpt_status ENG(first_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                             wreal *to, ckpt_err *err)
{
    (void)err;
    return run_heads(e, first_item, &(heads_job){rows, G, n, from, to});
}

typedef struct split_job {
    const ckpt_eng_mla *b;
    const real *kv, *kv_a;
    real *k, *v;
    int64_t T;
} split_job;

static void split_tokens(void *arg, int64_t item, int worker)
{
    const split_job *j = arg;
    const ckpt_eng_mla *b = j->b;
    int64_t d = b->DN + b->DR, per = b->DN + b->DV, hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++)
        for (int64_t h = 0; h < b->N; h++) {
            const real *kv = j->kv + (t * b->N + h) * per;
            const real *pe = j->kv_a + t * (b->RK + b->DR) + b->RK;
            real *k = j->k + (t * b->N + h) * d, *v = j->v + (t * b->N + h) * b->DV;
            for (int64_t c = 0; c < b->DN; c++)
                k[c] = kv[c];
            for (int64_t c = 0; c < b->DR; c++)
                k[b->DN + c] = pe[c];
            for (int64_t c = 0; c < b->DV; c++)
                v[c] = kv[b->DN + c];
        }
}

ckpt_status ENG(split_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *kv,
                             const real *kv_a, real *k, real *v, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (T + ROWS - 1) / ROWS, split_tokens,
                          &(split_job){b, kv, kv_a, k, v, T});
    return CKPT_OK;
}

typedef struct fold_job {
    const ckpt_eng_mla *b;
    const real *dk, *dv;
    real *dkv, *dkv_a;
    int64_t T;
} fold_job;

static void fold_tokens(void *arg, int64_t item, int worker)
{
    const fold_job *j = arg;
    const ckpt_eng_mla *b = j->b;
    int64_t d = b->DN + b->DR, per = b->DN + b->DV, hi = ckpt_min_i64((item + 1) * ROWS, j->T);
    (void)worker;
    for (int64_t t = item * ROWS; t < hi; t++) {
        real *pe = j->dkv_a + t * (b->RK + b->DR) + b->RK;
        for (int64_t c = 0; c < b->DR; c++)
            pe[c] = 0;
        for (int64_t h = 0; h < b->N; h++) {
            const real *dk = j->dk + (t * b->N + h) * d, *dv = j->dv + (t * b->N + h) * b->DV;
            real *dkv = j->dkv + (t * b->N + h) * per;
            for (int64_t c = 0; c < b->DN; c++)
                dkv[c] = dk[c];
            for (int64_t c = 0; c < b->DV; c++)
                dkv[b->DN + c] = dv[c];
            for (int64_t c = 0; c < b->DR; c++)
                pe[c] += dk[b->DN + c];
        }
    }
}

ckpt_status ENG(fold_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *dk,
                            const real *dv, real *dkv, real *dkv_a, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (T + ROWS - 1) / ROWS, fold_tokens,
                          &(fold_job){b, dk, dv, dkv, dkv_a, T});
    return CKPT_OK;
}

/* ---- tokens and results ---------------------------------------------------------------------- */

ckpt_status ENG(bring_seq)(ckpt_eng *e, const ckpt_eng_seq *seq, ckpt_err *err)
{
    (void)e;
    (void)seq;
    (void)err;
    return CKPT_OK;
}

ckpt_status ENG(bring_tokens)(ckpt_eng *e, int64_t T, int64_t V, bool ids, const int32_t *from,
                              const int32_t **to, ckpt_err *err)
{
    (void)e;
    (void)T;
    (void)V;
    (void)ids;
    (void)err;
    *to = from;
    return CKPT_OK;
}

ckpt_status ENG(shift_tokens)(ckpt_eng *e, const ckpt_eng_seq *seq, int32_t last,
                              const int32_t *from, int32_t *to, ckpt_err *err)
{
    (void)err;
    for (int64_t n = 0; n < seq->n && !e->dry; n++)
        for (int64_t t = seq->cu[n]; t < seq->cu[n + 1]; t++)
            to[t] = t + 1 < seq->cu[n + 1] ? from[t + 1] : last;
    return CKPT_OK;
}

ckpt_status ENG(loss_weights)(ckpt_eng *e, int64_t T, const int32_t *labels, double share,
                              wreal *weight, ckpt_eng_result *n, ckpt_err *err)
{
    if (e->dry)
        return CKPT_OK;
    n->i = 0;
    for (int64_t t = 0; t < T; t++)
        n->i += labels[t] >= 0;
    return ENG(share_weights)(e, T, share, n, weight, err);
}

ckpt_status ENG(share_weights)(ckpt_eng *e, int64_t T, double share, const ckpt_eng_result *n,
                               wreal *weight, ckpt_err *err)
{
    (void)err;
    for (int64_t t = 0; t < T && !e->dry; t++)
        weight[t] = n->i > 0 ? (wreal)(share / (double)n->i) : 0;
    return CKPT_OK;
}

ckpt_status ENG(mean_loss)(ckpt_eng *e, int64_t T, const wreal *loss, const ckpt_eng_result *n,
                           ckpt_eng_result *out, ckpt_err *err)
{
    double sum = 0;
    (void)err;
    if (e->dry)
        return CKPT_OK;
    for (int64_t t = 0; t < T; t++)
        sum += (double)loss[t];
    out->d = n->i > 0 ? sum / (double)n->i : 0;
    return CKPT_OK;
}

ckpt_status ENG(watch)(ckpt_eng *e, int64_t n, const real *x, ckpt_eng_result *at, ckpt_err *err)
{
    real sum = 0;
    (void)err;
    if (e->dry)
        return CKPT_OK;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * 0;
    at->i = 0;
    for (int64_t i = 0; i < n && sum != 0; i++)
        if (!isfinite(x[i])) {
            at->i = 2 * i + (isnan(x[i]) ? 2 : 1);
            break;
        }
    return CKPT_OK;
}

ckpt_status ENG(clear_results)(ckpt_eng *e, int64_t n, ckpt_eng_result *x, ckpt_err *err)
{
    (void)err;
    if (!e->dry && n > 0)
        memset(x, 0, (size_t)n * sizeof *x);
    return CKPT_OK;
}

ckpt_status ENG(fetch_results)(ckpt_eng *e, int64_t n, const ckpt_eng_result *x,
                               ckpt_eng_result *to, ckpt_err *err)
{
    (void)err;
    if (!e->dry && n > 0)
        memcpy(to, x, (size_t)n * sizeof *x);
    return CKPT_OK;
}

ckpt_status ENG(fetch)(ckpt_eng *e, int64_t n, const real *x, wreal *to, ckpt_err *err)
{
    return ENG(copy)(e, n, x, to, err);
}
