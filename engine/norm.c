/* Norms over rows. Rows are cut into at most 64 blocks; sums over rows (weight gradients) are taken
 * within a block in row order and then over blocks in order. */
#include "kernels/kernels.h"

#include "checked.h"

#include <string.h>

#define MIN_ROWS 16
#define MAX_BLOCKS 64

typedef struct job {
    const ENG(kernels) * k;
    int64_t rows, n, block, blocks;
    const real *x, *z, *w, *rstd, *dy;
    real *y, *r, *dx, *dz, *partial; /* partial [blocks, n] or NULL */
    real eps;
    bool centered, add, silu;
} job;

static void cut(job *j)
{
    j->block = ckpt_max_i64(MIN_ROWS, (j->rows + MAX_BLOCKS - 1) / MAX_BLOCKS);
    j->blocks = (j->rows + j->block - 1) / j->block;
}

/* First element of the item's rows; *rows of them. */
static int64_t piece(const job *j, int64_t item, int64_t *rows)
{
    *rows = ckpt_min_i64(j->block, j->rows - item * j->block);
    return item * j->block * j->n;
}

static real *rows_of(real *p, int64_t at)
{
    return p ? p + at : NULL;
}

static real *partial_of(const job *j, int64_t item)
{
    if (!j->partial)
        return NULL;
    real *p = j->partial + item * j->n;
    memset(p, 0, sizeof(real) * (size_t)j->n);
    return p;
}

static void add_partials(const job *j, real *dw)
{
    for (int64_t b = 0; j->partial && b < j->blocks; b++)
        for (int64_t i = 0; i < j->n; i++)
            dw[i] += j->partial[b * j->n + i];
}

static ckpt_status check(int64_t rows, int64_t n, ckpt_err *err)
{
    if (rows < 0 || n <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "norm: %lld rows of %lld", (long long)rows,
                         (long long)n);
    return CKPT_OK;
}

/* Run a backward piece function with room for the partial sums of dw. */
static ckpt_status with_partials(ckpt_eng *e, job *j, ckpt_eng_fn fn, real *dw, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    cut(j);
    if (dw)
        j->partial = ckpt_eng_take(e, j->blocks * j->n, sizeof(real));
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        ckpt_eng_parallel(e, j->blocks, fn, j);
        add_partials(j, dw);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

static void rms_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->rmsnorm(rows, j->n, j->x + at, j->w, j->centered, j->eps, j->y + at,
                  rows_of(j->r, item * j->block));
}

ckpt_status ENG(rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const real *w,
                         bool centered, double eps, real *y, real *rstd, ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .rows = rows,
             .n = n,
             .x = x,
             .w = w,
             .centered = centered,
             .eps = (real)eps,
             .y = y,
             .r = rstd};
    cut(&j);
    ckpt_eng_parallel(e, j.blocks, rms_piece, &j);
    return CKPT_OK;
}

static void rms_back(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->rmsnorm_bwd(rows, j->n, j->x + at, j->w, j->centered, j->rstd + item * j->block,
                      j->dy + at, j->add, j->dx + at, partial_of(j, item));
}

ckpt_status ENG(rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const real *w,
                             bool centered, const real *rstd, const real *dy, bool add, real *dx,
                             real *dw, ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .rows = rows,
             .n = n,
             .x = x,
             .w = w,
             .centered = centered,
             .rstd = rstd,
             .dy = dy,
             .add = add,
             .dx = dx};
    return with_partials(e, &j, rms_back, dw, err);
}

static void gated_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->gated_rmsnorm(rows, j->n, j->x + at, j->z + at, j->w, j->silu, j->eps, j->y + at,
                        rows_of(j->r, item * j->block));
}

ckpt_status ENG(gated_rmsnorm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, const real *z,
                               const real *w, ckpt_eng_act act, double eps, real *y, real *rstd,
                               ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .rows = rows,
             .n = n,
             .x = x,
             .z = z,
             .w = w,
             .silu = act == CKPT_ENG_SILU,
             .eps = (real)eps,
             .y = y,
             .r = rstd};
    cut(&j);
    ckpt_eng_parallel(e, j.blocks, gated_piece, &j);
    return CKPT_OK;
}

static void gated_back(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->gated_rmsnorm_bwd(rows, j->n, j->x + at, j->z + at, j->w, j->silu,
                            j->rstd + item * j->block, j->dy + at, j->dx + at, j->dz + at,
                            partial_of(j, item));
}

ckpt_status ENG(gated_rmsnorm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *x,
                                   const real *z, const real *w, ckpt_eng_act act, const real *rstd,
                                   const real *dy, real *dx, real *dz, real *dw, ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .rows = rows,
             .n = n,
             .x = x,
             .z = z,
             .w = w,
             .silu = act == CKPT_ENG_SILU,
             .rstd = rstd,
             .dy = dy,
             .dx = dx,
             .dz = dz};
    return with_partials(e, &j, gated_back, dw, err);
}

static void l2_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->l2norm(rows, j->n, j->x + at, j->eps, j->y + at, j->r + item * j->block);
}

ckpt_status ENG(l2norm)(ckpt_eng *e, int64_t rows, int64_t n, const real *x, double eps, real *y,
                        real *r, ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {.k = ENG(kernels_for)(e->isa),
             .rows = rows,
             .n = n,
             .x = x,
             .eps = (real)eps,
             .y = y,
             .r = r};
    cut(&j);
    ckpt_eng_parallel(e, j.blocks, l2_piece, &j);
    return CKPT_OK;
}

static void l2_back(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t rows, at = piece(j, item, &rows);
    (void)worker;
    j->k->l2norm_bwd(rows, j->n, j->x + at, j->rstd + item * j->block, j->dy + at, j->dx + at);
}

ckpt_status ENG(l2norm_bwd)(ckpt_eng *e, int64_t rows, int64_t n, const real *y, const real *r,
                            const real *dy, real *dx, ckpt_err *err)
{
    ckpt_status status = check(rows, n, err);
    if (status != CKPT_OK || e->dry)
        return status;
    job j = {
        .k = ENG(kernels_for)(e->isa), .rows = rows, .n = n, .x = y, .rstd = r, .dy = dy, .dx = dx};
    cut(&j);
    ckpt_eng_parallel(e, j.blocks, l2_back, &j);
    return CKPT_OK;
}
