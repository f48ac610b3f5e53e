/* Cross entropy over a vocabulary: loss = log sum exp(z) - z[label]. Source: mla-moe-math.md section 5. */
#include "moe.h"

#include <math.h>

#include "checked.h"
#include "real_math.h"

#define TOKENS 16

typedef struct job {
    int64_t T, V;
    const real *logits, *weight;
    const int32_t *labels;
    real *loss, *dlogits;
} job;

static void token_loss(const job *j, int64_t t)
{
    const real *z = j->logits + t * j->V;
    int32_t label = j->labels[t];
    real top = z[0], sum = 0, at = label < 0 ? 0 : z[label];
    for (int64_t i = 1; i < j->V; i++)
        top = z[i] > top || z[i] != z[i] ? z[i] : top;
    for (int64_t i = 0; i < j->V; i++)
        sum += EXP(z[i] - top);
    j->loss[t] = label < 0 ? 0 : LOG(sum) - (at - top);
    if (!j->dlogits)
        return;
    real w = label < 0 ? 0 : j->weight[t], scale = w / sum;
    real *d = j->dlogits + t * j->V;
    for (int64_t i = 0; i < j->V; i++)
        d[i] = label < 0 ? 0 : EXP(z[i] - top) * scale;
    if (label >= 0)
        d[label] -= w;
}

static void tokens(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    (void)worker;
    for (int64_t t = item * TOKENS; t < hi; t++)
        token_loss(j, t);
}

ckpt_status ENG(xent)(ckpt_eng *e, int64_t T, int64_t V, const real *logits, const int32_t *labels,
                      const real *weight, real *loss, real *dlogits, ckpt_err *err)
{
    if (e->dry)
        return CKPT_OK;
    for (int64_t t = 0; t < T; t++)
        if (labels[t] >= V)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: label %d, expected below %lld",
                             (long long)t, labels[t], (long long)V);
    ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, tokens,
                      &(job){T, V, logits, weight, labels, loss, dlogits});
    return CKPT_OK;
}
