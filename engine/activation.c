/* SwiGLU and squared-ReLU activations (mla-moe-math.md section 3). */
#include "blocks.h"

#include "checked.h"
#include "kernels/kernels.h"

#define ROWS 16 /* tokens in a piece */
#define BLOCK 16384

typedef struct job {
    const ENG(kernels) * k;
    int64_t T, F, ldg, ldy;
    const real *gate, *up, *dy;
    real clamp, *y, *dgate, *dup;
} job;

static void swiglu_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    (void)worker;
    for (int64_t t = item * ROWS; t < ckpt_min_i64(item * ROWS + ROWS, j->T); t++) {
        const int64_t at = t * j->ldg;
        if (j->dy)
            j->k->swiglu_bwd(j->F, j->gate + at, j->up + at, j->clamp, j->dy + t * j->ldy,
                             j->dgate + at, j->dup + at);
        else
            j->k->swiglu(j->F, j->gate + at, j->up + at, j->clamp, j->y + t * j->ldy);
    }
}

static ckpt_status run_swiglu(const ckpt_eng *e, job *j, ckpt_err *err)
{
    if (j->T < 0 || j->F < 0 || j->ldg < j->F || j->ldy < j->F)
        return ckpt_fail(err, CKPT_E_USAGE, "swiglu: %lld tokens of %lld, strides %lld and %lld",
                         (long long)j->T, (long long)j->F, (long long)j->ldg, (long long)j->ldy);
    j->k = ENG(kernels_for)(e->isa);
    if (!e->dry)
        ckpt_eng_parallel(e, (j->T + ROWS - 1) / ROWS, swiglu_piece, j);
    return CKPT_OK;
}

ckpt_status ENG(swiglu)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                        int64_t ldg, double clamp, real *y, int64_t ldy, ckpt_err *err)
{
    return run_swiglu(e,
                      &(job){.T = T,
                             .F = F,
                             .ldg = ldg,
                             .ldy = ldy,
                             .gate = gate,
                             .up = up,
                             .clamp = (real)clamp,
                             .y = y},
                      err);
}

ckpt_status ENG(swiglu_bwd)(ckpt_eng *e, int64_t T, int64_t F, const real *gate, const real *up,
                            int64_t ldg, double clamp, const real *dy, int64_t lddy, real *dgate,
                            real *dup, ckpt_err *err)
{
    return run_swiglu(e,
                      &(job){.T = T,
                             .F = F,
                             .ldg = ldg,
                             .ldy = lddy,
                             .gate = gate,
                             .up = up,
                             .clamp = (real)clamp,
                             .dy = dy,
                             .dgate = dgate,
                             .dup = dup},
                      err);
}

static void relu2_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const int64_t at = item * BLOCK, n = ckpt_min_i64(BLOCK, j->T - at);
    (void)worker;
    if (j->dy)
        j->k->relu2_bwd(n, j->up + at, j->dy + at, j->dup + at);
    else
        j->k->relu2(n, j->up + at, j->y + at);
}

ckpt_status ENG(relu2)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (n + BLOCK - 1) / BLOCK, relu2_piece,
                          &(job){.k = ENG(kernels_for)(e->isa), .T = n, .up = x, .y = y});
    return CKPT_OK;
}

ckpt_status ENG(relu2_bwd)(ckpt_eng *e, int64_t n, const real *x, const real *dy, real *dx,
                           ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(
            e, (n + BLOCK - 1) / BLOCK, relu2_piece,
            &(job){.k = ENG(kernels_for)(e->isa), .T = n, .up = x, .dy = dy, .dup = dx});
    return CKPT_OK;
}
