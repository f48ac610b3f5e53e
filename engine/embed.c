/* Embedding lookup and its gradient. */
#include "moe.h"

#include "checked.h"

typedef struct job {
    int64_t T, V, H;
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
    for (int64_t t = item * TOKENS; t < hi; t++)
        for (int64_t c = 0; c < j->H; c++)
            j->to[t * j->H + c] = j->from[j->ids[t] * j->H + c];
}

ckpt_status ENG(embed)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                       const real *table, real *y, ckpt_err *err)
{
    if (e->dry)
        return CKPT_OK;
    for (int64_t t = 0; t < T; t++)
        if (ids[t] < 0 || ids[t] >= V)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: id %d, expected 0 to %lld",
                             (long long)t, ids[t], (long long)(V - 1));
    ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, lookup, &(job){T, V, H, ids, table, y});
    return CKPT_OK;
}

/* A band of columns: a row that occurs several times is added to in token order. */
static void scatter(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t lo = item * COLUMNS, hi = ckpt_min_i64(lo + COLUMNS, j->H);
    (void)worker;
    for (int64_t t = 0; t < j->T; t++)
        for (int64_t c = lo; c < hi; c++)
            j->to[j->ids[t] * j->H + c] += j->from[t * j->H + c];
}

ckpt_status ENG(embed_bwd)(ckpt_eng *e, int64_t T, int64_t V, int64_t H, const int32_t *ids,
                           const real *dy, real *dtable, ckpt_err *err)
{
    if (e->dry)
        return CKPT_OK;
    for (int64_t t = 0; t < T; t++)
        if (ids[t] < 0 || ids[t] >= V)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: id %d, expected 0 to %lld",
                             (long long)t, ids[t], (long long)(V - 1));
    ckpt_eng_parallel(e, (H + COLUMNS - 1) / COLUMNS, scatter, &(job){T, V, H, ids, dy, dtable});
    return CKPT_OK;
}
