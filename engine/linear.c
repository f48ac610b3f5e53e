/* Projections: y = x W^T, dx = dy W, dW += dy^T x, through OpenBLAS.
 *
 * The result is cut into tiles of fixed size and every tile is one single-threaded call, so the sum in
 * an element never depends on the number of threads. A tile of dW sums over all tokens in one call. */
#include "ops.h"

#include <cblas.h>

#include "checked.h"

#define TILE_M 256
#define TILE_N 512

void ENG(gemm)(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real alpha, const real *a,
               int64_t lda, const real *b, int64_t ldb, real beta, real *c, int64_t ldc)
{
    enum CBLAS_TRANSPOSE opa = ta ? CblasTrans : CblasNoTrans, opb = tb ? CblasTrans : CblasNoTrans;
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) { /* BLAS refuses a leading dimension of 0; the product is zero */
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
        return;
    }
#if CKPT_REAL == 32
    cblas_sgemm(CblasRowMajor, opa, opb, (blasint)m, (blasint)n, (blasint)k, alpha, a, (blasint)lda,
                b, (blasint)ldb, beta, c, (blasint)ldc);
#else
    cblas_dgemm(CblasRowMajor, opa, opb, (blasint)m, (blasint)n, (blasint)k, alpha, a, (blasint)lda,
                b, (blasint)ldb, beta, c, (blasint)ldc);
#endif
}

/* C [m, n] (+)= op(A) op(B), cut into tiles of C. */
typedef struct tiles {
    bool ta, tb, add;
    int64_t m, n, k, lda, ldb, ldc, across;
    const real *a, *b, *bias;
    real *c;
} tiles;

static void run_tile(void *arg, int64_t item, int worker)
{
    const tiles *t = arg;
    (void)worker;
    int64_t i = item / t->across * TILE_M, j = item % t->across * TILE_N;
    int64_t m = ckpt_min_i64(TILE_M, t->m - i), n = ckpt_min_i64(TILE_N, t->n - j);
    real *c = t->c + i * t->ldc + j;
    bool add = t->add;
    if (t->bias) {
        for (int64_t r = 0; r < m; r++)
            for (int64_t s = 0; s < n; s++)
                c[r * t->ldc + s] = (add ? c[r * t->ldc + s] : 0) + t->bias[j + s];
        add = true;
    }
    ENG(gemm)
    (t->ta, t->tb, m, n, t->k, 1, t->a + (t->ta ? i : i * t->lda), t->lda,
     t->b + (t->tb ? j * t->ldb : j), t->ldb, add ? 1 : 0, c, t->ldc);
}

static void run_tiles(const ckpt_eng *e, tiles *t)
{
    t->across = (t->n + TILE_N - 1) / TILE_N;
    ckpt_eng_parallel(e, (t->m + TILE_M - 1) / TILE_M * t->across, run_tile, t);
}

/* BLAS takes 32-bit sizes. */
static ckpt_status check(const char *what, int64_t T, int64_t n_in, int64_t n_out, int64_t ldx,
                         int64_t ldy, ckpt_err *err)
{
    if (T < 0 || n_in < 0 || n_out < 0 || ldx < n_in || ldy < n_out)
        return ckpt_fail(
            err, CKPT_E_USAGE, "%s: %lld tokens, %lld in (stride %lld), %lld out (stride %lld)",
            what, (long long)T, (long long)n_in, (long long)ldx, (long long)n_out, (long long)ldy);
    if (T > INT32_MAX || ldx > INT32_MAX || ldy > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: sizes above 2^31", what);
    return CKPT_OK;
}

ckpt_status ENG(linear)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *x,
                        int64_t ldx, const real *w, const real *bias, bool add, real *y,
                        int64_t ldy, ckpt_err *err)
{
    ckpt_status status = check("linear", T, n_in, n_out, ldx, ldy, err);
    if (status != CKPT_OK || e->dry)
        return status;
    run_tiles(e, &(tiles){.tb = true,
                          .add = add,
                          .m = T,
                          .n = n_out,
                          .k = n_in,
                          .a = x,
                          .lda = ldx,
                          .b = w,
                          .ldb = n_in,
                          .bias = bias,
                          .c = y,
                          .ldc = ldy});
    return CKPT_OK;
}

ckpt_status ENG(linear_dx)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *w, bool add, real *dx, int64_t lddx,
                           ckpt_err *err)
{
    ckpt_status status = check("linear_dx", T, n_in, n_out, lddx, lddy, err);
    if (status != CKPT_OK || e->dry)
        return status;
    run_tiles(e, &(tiles){.add = add,
                          .m = T,
                          .n = n_in,
                          .k = n_out,
                          .a = dy,
                          .lda = lddy,
                          .b = w,
                          .ldb = n_in,
                          .c = dx,
                          .ldc = lddx});
    return CKPT_OK;
}

typedef struct columns {
    int64_t T, n, ld;
    const real *x;
    real *sum;
} columns;

#define COLUMN_BLOCK 256

static void sum_columns(void *arg, int64_t item, int worker)
{
    const columns *c = arg;
    (void)worker;
    int64_t lo = item * COLUMN_BLOCK, hi = ckpt_min_i64(lo + COLUMN_BLOCK, c->n);
    for (int64_t t = 0; t < c->T; t++)
        for (int64_t j = lo; j < hi; j++)
            c->sum[j] += c->x[t * c->ld + j];
}

ckpt_status ENG(linear_dw)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *x, int64_t ldx, real *dw, real *dbias,
                           ckpt_err *err)
{
    ckpt_status status = check("linear_dw", T, n_in, n_out, ldx, lddy, err);
    if (status != CKPT_OK || e->dry)
        return status;
    if (dw)
        run_tiles(e, &(tiles){.ta = true,
                              .add = true,
                              .m = n_out,
                              .n = n_in,
                              .k = T,
                              .a = dy,
                              .lda = lddy,
                              .b = x,
                              .ldb = ldx,
                              .c = dw,
                              .ldc = n_in});
    if (dbias)
        ckpt_eng_parallel(e, (n_out + COLUMN_BLOCK - 1) / COLUMN_BLOCK, sum_columns,
                          &(columns){.T = T, .n = n_out, .ld = lddy, .x = dy, .sum = dbias});
    return CKPT_OK;
}
