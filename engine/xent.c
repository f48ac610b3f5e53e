/* Cross entropy over a vocabulary: loss = log sum exp(z) - z[label]. Source: mla-moe-math.md section 5. */
#include "moe.h"

#include <math.h>

#include "checked.h"
#include "kernels/kernels.h"
#include "real_math.h"

#define TOKENS 16

typedef struct job {
    int64_t T, V;
    const real *logits, *weight;
    const int32_t *labels;
    real *loss, *dlogits;
    const ENG(kernels) * kernels;
} job;

/* Exponents are kept beside their sum where the gradient will take their place. */
#define PIECE 512

static real sum_exponents(const ENG(kernels) * k, const real *z, int64_t n, real top, real *keep)
{
    real piece[PIECE], sum = 0;
    for (int64_t lo = 0; lo < n; lo += PIECE)
        sum += k->exp_sum(ckpt_min_i64(PIECE, n - lo), top, z + lo, keep ? keep + lo : piece);
    return sum;
}

static void token_loss(const job *j, int64_t t)
{
    const real *z = j->logits + t * j->V;
    int32_t label = j->labels[t];
    real *d = j->dlogits ? j->dlogits + t * j->V : NULL; /* may be z */
    real top = j->kernels->maximum(j->V, z[0], z), at = label < 0 ? 0 : z[label];
    real sum = sum_exponents(j->kernels, z, j->V, top, d);
    j->loss[t] = label < 0 ? 0 : LOG(sum) - (at - top);
    if (d == NULL)
        return;
    real w = label < 0 ? 0 : j->weight[t], scale = w / sum;
    for (int64_t i = 0; i < j->V; i++)
        d[i] = label < 0 ? 0 : d[i] * scale;
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
                      &(job){.T = T,
                             .V = V,
                             .logits = logits,
                             .weight = weight,
                             .labels = labels,
                             .loss = loss,
                             .dlogits = dlogits,
                             .kernels = ENG(kernels_for)(e->isa)});
    return CKPT_OK;
}

/* ---- a vocabulary cut over ranks ------------------------------------------------------------- */

typedef struct part {
    int64_t T, lo, n;
    const real *logits, *weight;
    const int32_t *labels;
    real *top, *sum, *at; /* [T]: maximum, sum of exponents, the label's logit less the maximum */
    real *loss, *dlogits;
    int pass;
    const ENG(kernels) * kernels;
} part;

static void part_token(const part *j, int64_t t)
{
    const real *z = j->logits + t * j->n;
    int64_t label = j->labels[t] - j->lo;
    bool here = j->labels[t] >= 0 && label >= 0 && label < j->n;
    if (j->pass == 0) {
        j->top[t] = j->kernels->maximum(j->n, z[0], z);
    } else if (j->pass == 1) {
        j->at[t] = here ? z[label] - j->top[t] : 0;
        j->sum[t] = sum_exponents(j->kernels, z, j->n, j->top[t],
                                  j->dlogits ? j->dlogits + t * j->n : NULL);
    } else {
        real w = j->labels[t] < 0 ? 0 : j->weight[t], scale = w / j->sum[t];
        real *d = j->dlogits ? j->dlogits + t * j->n : NULL;
        j->loss[t] = j->labels[t] < 0 ? 0 : LOG(j->sum[t]) - j->at[t];
        for (int64_t i = 0; d && i < j->n; i++)
            d[i] = j->labels[t] < 0 ? 0 : d[i] * scale;
        if (d && here)
            d[label] -= w;
    }
}

static void part_tokens(void *arg, int64_t item, int worker)
{
    const part *j = arg;
    int64_t hi = ckpt_min_i64((item + 1) * TOKENS, j->T);
    (void)worker;
    for (int64_t t = item * TOKENS; t < hi; t++)
        part_token(j, t);
}

ckpt_status ENG(xent_part)(ckpt_eng *e, ckpt_comm *c, int64_t T, int64_t V, int64_t lo, int64_t n,
                           const real *logits, const int32_t *labels, const real *weight,
                           real *loss, real *dlogits, ckpt_err *err)
{
    const ckpt_comm_type type = sizeof(real) == 4 ? CKPT_COMM_F32 : CKPT_COMM_F64;
    part j = {.T = T, .lo = lo, .n = n, .logits = logits, .weight = weight, .labels = labels};
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    j.top = ckpt_eng_take(e, T, sizeof(real));
    j.sum = ckpt_eng_take(e, 2 * T, sizeof(real));
    j.at = j.sum + T;
    j.kernels = ENG(kernels_for)(e->isa);
    j.loss = loss;
    j.dlogits = dlogits;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    for (int64_t t = 0; t < T; t++)
        if (labels[t] >= V) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "token %lld: label %d, expected below %lld",
                               (long long)t, labels[t], (long long)V);
            goto done;
        }
    for (j.pass = 0; j.pass < 3; j.pass++) {
        ckpt_eng_parallel(e, (T + TOKENS - 1) / TOKENS, part_tokens, &j);
        if (j.pass == 0)
            CKPT_CHECK(ckpt_comm_allreduce(c, type, CKPT_COMM_MAX_OF, j.top, T, err));
        if (j.pass == 1)
            CKPT_CHECK(ckpt_comm_allreduce(c, type, CKPT_COMM_SUM, j.sum, 2 * T, err));
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}
