/* y = x Phi(x), Phi the normal distribution. Source: Hendrycks & Gimpel 2016, the exact form. */
#include "ops.h"

#include "checked.h"
#include "real_math.h"

#define BLOCK 4096

typedef struct job {
    const real *x, *dy;
    real *out;
    int64_t n;
} job;

static void piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t end = ckpt_min_i64((item + 1) * BLOCK, j->n);
    (void)worker;
    for (int64_t i = item * BLOCK; i < end; i++) {
        double x = (double)j->x[i], phi = 0.5 * erfc(-x * 0.70710678118654752440);
        double slope = phi + x * 0.39894228040143267794 * exp(-0.5 * x * x);
        j->out[i] = (real)(j->dy != NULL ? (double)j->dy[i] * slope : x * phi);
    }
}

ckpt_status ENG(gelu)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (n + BLOCK - 1) / BLOCK, piece, &(job){.x = x, .out = y, .n = n});
    return CKPT_OK;
}

ckpt_status ENG(gelu_bwd)(ckpt_eng *e, int64_t n, const real *x, const real *dy, real *dx,
                          ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (n + BLOCK - 1) / BLOCK, piece,
                          &(job){.x = x, .dy = dy, .out = dx, .n = n});
    return CKPT_OK;
}
