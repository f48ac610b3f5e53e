/* Causal depthwise convolution + SiLU: a piece is a block of channels over all tokens. */
#include "kernels/kernels.h"
#include "ops.h"

#include "checked.h"

#include <string.h>

#define BLOCK CKPT_ENG_CONV_BLOCK

typedef struct job {
    void (*kernel)(const ENG(conv_task) *);
    ENG(conv_task) task;
} job;

static void run(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    ENG(conv_task) t = j->task;
    (void)worker;
    t.lo = item * BLOCK;
    t.n = ckpt_min_i64(BLOCK, t.C - t.lo);
    j->kernel(&t);
}

static void run_all(const ckpt_eng *e, job *j)
{
    ckpt_eng_parallel(e, (j->task.C + BLOCK - 1) / BLOCK, run, j);
}

static ckpt_status check(const ckpt_eng_seq *seq, int64_t C, int64_t W, ckpt_err *err)
{
    if (C < 0 || W < 1)
        return ckpt_fail(err, CKPT_E_USAGE, "conv: %lld channels, width %lld", (long long)C,
                         (long long)W);
    if (W > CKPT_ENG_CONV_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "conv: width %lld above %d", (long long)W,
                         CKPT_ENG_CONV_MAX);
    return ckpt_eng_seq_check(seq, err);
}

/* The last W-1 rows of a sequence, older ones from its history. Rows move to lower places only, so
 * `last` may be `history`. */
static void next_history(const ENG(conv_task) * t, real *last)
{
    const int64_t keep = t->W - 1;
    const size_t bytes = sizeof(real) * (size_t)t->C;
    for (int64_t s = 0; s < t->seq->n; s++) {
        int64_t start = t->seq->cu[s], length = t->seq->cu[s + 1] - start;
        for (int64_t i = 0; i < keep; i++) {
            int64_t at = length - keep + i; /* token of the sequence; below 0 in the history */
            real *to = last + (s * keep + i) * t->C;
            if (at >= 0)
                memcpy(to, t->x + (start + at) * t->C, bytes);
            else if (t->history)
                memmove(to, t->history + (s * keep + keep + at) * t->C, bytes);
            else
                memset(to, 0, bytes);
        }
    }
}

ckpt_status ENG(conv)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                      const real *w, const real *bias, const real *history, real *y, real *last,
                      ckpt_err *err)
{
    ckpt_status status = check(seq, C, W, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {
        .kernel = ENG(kernels_for)(e->isa)->conv,
        .task = {
                 .C = C, .W = W, .seq = seq, .x = x, .w = w, .bias = bias, .history = history, .y = y}
    };
    run_all(e, &j);
    if (last)
        next_history(&j.task, last);
    return CKPT_OK;
}

ckpt_status ENG(conv_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, const real *x,
                          const real *w, const real *bias, const real *history, const real *dy,
                          real *dx, real *dw, real *dbias, real *dhistory, ckpt_err *err)
{
    ckpt_status status = check(seq, C, W, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {
        .kernel = ENG(kernels_for)(e->isa)->conv_bwd,
        .task = {.C = C,
                 .W = W,
                 .seq = seq,
                 .x = x,
                 .w = w,
                 .bias = bias,
                 .history = history,
                 .dy = dy,
                 .dx = dx,
                 .dw = dw,
                 .dbias = dbias,
                 .dhistory = dhistory}
    };
    run_all(e, &j);
    return CKPT_OK;
}

static ckpt_status check_heads(int64_t C, int64_t K, ckpt_err *err)
{
    if (K < 1 || C % K != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "conv: %lld channels in heads of %lld", (long long)C,
                         (long long)K);
    return CKPT_OK;
}

ckpt_status ENG(conv_norm)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W, int64_t K,
                           double eps, const real *x, const real *w, const real *history, real *y,
                           real *r, real *last, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_heads(C, K, err));
    CKPT_CHECK(ENG(conv)(e, seq, C, W, x, w, NULL, history, y, last, err));
    CKPT_CHECK(ENG(l2norm)(e, ckpt_eng_tokens(seq) * (C / K), K, y, eps, y, r, err));
done:
    return status;
}

ckpt_status ENG(conv_norm_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t C, int64_t W,
                               int64_t K, const real *x, const real *w, const real *history,
                               const real *y, const real *r, real *dy, real *dx, real *dw,
                               real *dhistory, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_heads(C, K, err));
    CKPT_CHECK(ENG(l2norm_bwd)(e, ckpt_eng_tokens(seq) * (C / K), K, y, r, dy, dy, err));
    CKPT_CHECK(ENG(conv_bwd)(e, seq, C, W, x, w, NULL, history, dy, dx, dw, NULL, dhistory, err));
done:
    return status;
}
