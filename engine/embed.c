/* Embedding lookup and its gradient, of a whole table or of consecutive rows of it. */
#include "moe.h"

#include "checked.h"

typedef struct job {
    int64_t T, lo, n, H; /* rows lo .. lo + n - 1 of the vocabulary */
    const int32_t *ids;
    const real *from;
    real *to;
} job;

#define TOKENS 64
#define COLUMNS 64

static void lookup(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    (void)worker;
    for (int64_t t = item * TOKENS; t < hi; t++) {
        int64_t row = j->ids[t] - j->lo;
        bool here = row >= 0 && row < j->n;
        for (int64_t c = 0; c < j->H; c++)
            j->to[t * j->H + c] = here ? j->from[row * j->H + c] : 0;
    }
}

static ckpt_status check(int64_t T, int64_t V, const int32_t *ids, ckpt_err *err)
{
    for (int64_t t = 0; t < T; t++)
        if (ids[t] < 0 || ids[t] >= V)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: id %d, expected 0 to %lld",
                             (long long)t, ids[t], (long long)(V - 1));
    return CKPT_OK;
}

ckpt_status ENG(embed_part)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                            const int32_t *ids, const real *table, real *y, ckpt_err *err)
{
    ckpt_status status = e->dry ? CKPT_OK : check(T, V, ids, err);
    if (status == CKPT_OK && !e->dry)
        ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, lookup, &(job){T, lo, n, H, ids, table, y});
    return status;
}

ckpt_status ENG(embed)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                       const real *table, real *y, ckpt_err *err)
{
    return ENG(embed_part)(e, T, V, 0, V, H, ids, table, y, err);
}

/* A band of columns: a row that occurs several times is added to in token order. */
static void scatter(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t lo = item * COLUMNS, hi = ckpt_min_i64(lo + COLUMNS, j->H);
    (void)worker;
    for (int64_t t = 0; t < j->T; t++) {
        int64_t row = j->ids[t] - j->lo;
        for (int64_t c = lo; c < hi && row >= 0 && row < j->n; c++)
            j->to[row * j->H + c] += j->from[t * j->H + c];
    }
}

ckpt_status ENG(embed_part_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H,
                                const int32_t *ids, const real *dy, real *dtable, ckpt_err *err)
{
    ckpt_status status = e->dry ? CKPT_OK : check(T, V, ids, err);
    if (status == CKPT_OK && !e->dry)
        ckpt_eng_parallel(e, (H + COLUMNS - 1) / COLUMNS, scatter,
                          &(job){T, lo, n, H, ids, dy, dtable});
    return status;
}

ckpt_status ENG(embed_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                           const real *dy, real *dtable, ckpt_err *err)
{
    return ENG(embed_part_bwd)(e, T, V, 0, V, H, ids, dy, dtable, err);
}
