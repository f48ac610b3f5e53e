/* Decay gates and sigmoid gates. The decay gate's backward sums over tokens, so its pieces are heads;
 * everything else is cut into blocks of tokens or numbers. */
#include "kernels/kernels.h"

#include "checked.h"

#include <math.h>

#define BLOCK 16384 /* numbers in a piece, about */

typedef struct job {
    const ENG(kernels) * k;
    int64_t T, HV, K, block;
    const real *raw, *A_log, *dt_bias, *dg;
    real bound, *g, *draw, *dA_log, *ddt_bias;
} job;

static real rate_of(const job *j, int64_t head)
{
    return (real)exp((double)j->A_log[head]);
}

static void gate_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const int64_t D = j->HV * j->K, lo = item * j->block, hi = ckpt_min_i64(lo + j->block, j->T);
    (void)worker;
    for (int64_t h = 0; h < j->HV; h++) {
        const real rate = rate_of(j, h);
        for (int64_t t = lo; t < hi; t++)
            j->k->gate(j->K, j->raw + t * D + h * j->K, j->dt_bias + h * j->K, rate, j->bound,
                       j->g + t * D + h * j->K);
    }
}

static ckpt_status check(int64_t T, int64_t HV, int64_t K, double bound, ckpt_err *err)
{
    if (T < 0 || HV <= 0 || K <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "decay gate: %lld tokens, %lld heads of %lld",
                         (long long)T, (long long)HV, (long long)K);
    if (!(bound <= 0))
        return ckpt_fail(err, CKPT_E_USAGE, "decay gate: lower bound %g is not below 0", bound);
    return CKPT_OK;
}

ckpt_status ENG(gate)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                      const real *A_log, const real *dt_bias, double bound, real *g, ckpt_err *err)
{
    ckpt_status status = check(T, HV, K, bound, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .T = T,
             .HV = HV,
             .K = K,
             .raw = raw,
             .A_log = A_log,
             .dt_bias = dt_bias,
             .bound = (real)bound,
             .g = g};
    j.block = ckpt_max_i64(1, BLOCK / (HV * K));
    ckpt_eng_parallel(e, (T + j.block - 1) / j.block, gate_piece, &j);
    return CKPT_OK;
}

static void gate_back(void *arg, int64_t h, int worker)
{
    const job *j = arg;
    const int64_t at = h * j->K;
    (void)worker;
    j->k->gate_bwd(j->T, j->K, j->HV * j->K, j->raw + at, j->dt_bias + at, rate_of(j, h), j->bound,
                   j->dg + at, j->draw + at, j->dA_log ? j->dA_log + h : NULL,
                   j->ddt_bias ? j->ddt_bias + at : NULL);
}

ckpt_status ENG(gate_bwd)(ckpt_eng *e, int64_t T, int64_t HV, int64_t K, const real *raw,
                          const real *A_log, const real *dt_bias, double bound, const real *dg,
                          real *draw, real *dA_log, real *ddt_bias, ckpt_err *err)
{
    ckpt_status status = check(T, HV, K, bound, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .T = T,
             .HV = HV,
             .K = K,
             .raw = raw,
             .A_log = A_log,
             .dt_bias = dt_bias,
             .bound = (real)bound,
             .dg = dg,
             .draw = draw,
             .dA_log = dA_log,
             .ddt_bias = ddt_bias};
    ckpt_eng_parallel(e, HV, gate_back, &j);
    return CKPT_OK;
}

typedef struct numbers {
    const ENG(kernels) * k;
    int64_t n;
    real c, *out;
    const real *x, *dy;
} numbers;

static void sigmoid_piece(void *arg, int64_t item, int worker)
{
    const numbers *s = arg;
    const int64_t at = item * BLOCK, n = ckpt_min_i64(BLOCK, s->n - at);
    (void)worker;
    if (s->dy)
        s->k->sigmoid_bwd(n, s->c, s->x + at, s->dy + at, s->out + at);
    else
        s->k->sigmoid(n, s->c, s->x + at, s->out + at);
}

ckpt_status ENG(sigmoid)(ckpt_eng *e, int64_t n, double c, const real *x, real *y, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(
            e, (n + BLOCK - 1) / BLOCK, sigmoid_piece,
            &(numbers){.k = ENG(kernels_for)(e->isa), .n = n, .c = (real)c, .x = x, .out = y});
    return CKPT_OK;
}

ckpt_status ENG(sigmoid_bwd)(ckpt_eng *e, int64_t n, double c, const real *y, const real *dy,
                             real *dx, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(
            e, (n + BLOCK - 1) / BLOCK, sigmoid_piece,
            &(numbers){
                .k = ENG(kernels_for)(e->isa), .n = n, .c = (real)c, .x = y, .dy = dy, .out = dx});
    return CKPT_OK;
}
