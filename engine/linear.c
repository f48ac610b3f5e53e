/* Projections: y = x W^T, dx = dy W, dW += dy^T x, by the product kernel (kernels/gemm.c).
 *
 * The result is cut into tiles of fixed size, each computed by one thread, so the sum in an element
 * never depends on the number of threads. A tile of dW sums over all tokens. */
#include "kernels/kernels.h"

#include "checked.h"

/* The largest tiles, and blocks within them: a block of B and one of A stay in a core's second-level
 * cache. BLOCK_K alone has a part in results. */
#define TILE_M 1056
#define TILE_N (32768 / CKPT_REAL)
#define BLOCK_M 132
#define BLOCK_K 256
#define SCRATCH CKPT_ENG_GEMM_SCRATCH(BLOCK_M, TILE_N, BLOCK_K)

/* Tiles are cut at multiples of the widest register tile, and not below the smallest. */
#define UNIT_M 12
#define UNIT_N 32
#define LEAST_M 96
#define LEAST_N 128

/* Blocks of products without a caller's scratch: 200 (f64: 400) KiB, which a thread's stack has. */
#define SMALL_M 96
#define SMALL_N 256
#define SMALL_K 128

/* beta C, where there is nothing to sum. */
static void scale_only(int64_t m, int64_t n, real beta, real *c, int64_t ldc)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
}

void ENG(gemm)(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real alpha, const real *a,
               int64_t lda, const real *b, int64_t ldb, real beta, real *c, int64_t ldc)
{
    _Alignas(64) real scratch[CKPT_ENG_GEMM_SCRATCH(SMALL_M, SMALL_N, SMALL_K)];
    if (k <= 0) {
        scale_only(m, n, beta, c, ldc);
        return;
    }
    ENG(kernels_for)
    (ckpt_eng_detect())
        ->gemm(&(ENG(gemm_task)){.ta = ta,
                                 .tb = tb,
                                 .m = m,
                                 .n = n,
                                 .k = k,
                                 .lda = lda,
                                 .ldb = ldb,
                                 .ldc = ldc,
                                 .mc = SMALL_M,
                                 .nc = SMALL_N,
                                 .kc = SMALL_K,
                                 .alpha = alpha,
                                 .beta = beta,
                                 .a = a,
                                 .b = b,
                                 .c = c},
               scratch);
}

/* C [m, n] (+)= op(A) op(B) + bias, cut into tiles of C. */
typedef struct tiles {
    const ENG(kernels) * kernels;
    bool ta, tb, add;
    int64_t m, n, k, lda, ldb, ldc;
    int64_t tile_m, tile_n, down, across; /* sizes and numbers of tiles */
    const real *a, *b, *bias;
    real *c, *scratch;
} tiles;

static void run_tile(void *arg, int64_t item, int worker)
{
    const tiles *t = arg;
    int64_t i = item / t->across * t->tile_m, j = item % t->across * t->tile_n;
    int64_t m = ckpt_min_i64(t->tile_m, t->m - i), n = ckpt_min_i64(t->tile_n, t->n - j);
    real *c = t->c + i * t->ldc + j;
    bool add = t->add;
    if (t->bias) {
        for (int64_t r = 0; r < m; r++)
            for (int64_t s = 0; s < n; s++)
                c[r * t->ldc + s] = (add ? c[r * t->ldc + s] : 0) + t->bias[j + s];
        add = true;
    }
    if (t->k <= 0) {
        scale_only(m, n, add ? 1 : 0, c, t->ldc);
        return;
    }
    t->kernels->gemm(&(ENG(gemm_task)){.ta = t->ta,
                                       .tb = t->tb,
                                       .m = m,
                                       .n = n,
                                       .k = t->k,
                                       .lda = t->lda,
                                       .ldb = t->ldb,
                                       .ldc = t->ldc,
                                       .mc = BLOCK_M,
                                       .nc = TILE_N,
                                       .kc = BLOCK_K,
                                       .alpha = 1,
                                       .beta = add ? 1 : 0,
                                       .a = t->a + (t->ta ? i : i * t->lda),
                                       .b = t->b + (t->tb ? j * t->ldb : j),
                                       .c = c},
                     t->scratch + worker * (int64_t)SCRATCH);
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* `of` cut into about `parts`: the size of a part, a multiple of unit. */
static int64_t part_of(int64_t of, int64_t parts, int64_t unit)
{
    return ceil_div(ceil_div(of, parts), unit) * unit;
}

/* Columns per k that take as long as packing one line of A or B. */
#define PACK_COST 8
#define CUTS 16 /* numbers of parts that are tried in each direction */

/* Tiles that take the least time on so many threads: of the products, of packing what every tile packs
 * for itself, and of waiting for the last tile, of which an eighth is expected. */
static void cut_tiles(tiles *t, int threads)
{
    const int64_t most_down = ceil_div(t->m, LEAST_M), most_across = ceil_div(t->n, LEAST_N);
    const int64_t down = ceil_div(t->m, TILE_M), across = ceil_div(t->n, TILE_N);
    double least = -1;
    for (int64_t d = down; d <= most_down && d < down + CUTS; d++)
        for (int64_t a = across; a <= most_across && a < across + CUTS; a++) {
            const int64_t m = part_of(t->m, d, UNIT_M), n = part_of(t->n, a, UNIT_N);
            const int64_t number = ceil_div(t->m, m) * ceil_div(t->n, n);
            const double rounds = (double)ceil_div(number, threads) + (threads > 1 ? 0.125 : 0);
            const double cost = rounds * (double)(m * n + PACK_COST * (m + n));
            if (least < 0 || cost < least) {
                least = cost;
                t->tile_m = m;
                t->tile_n = n;
            }
        }
    t->down = ceil_div(t->m, t->tile_m);
    t->across = ceil_div(t->n, t->tile_n);
}

static ckpt_status run_tiles(ckpt_eng *e, tiles *t, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    t->scratch = ckpt_eng_take(e, (int64_t)SCRATCH * e->threads, sizeof(real));
    t->kernels = ENG(kernels_for)(e->isa);
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry && t->m > 0 && t->n > 0) {
        cut_tiles(t, e->threads);
        ckpt_eng_parallel(e, t->down * t->across, run_tile, t);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

static ckpt_status check(const char *what, int64_t T, int64_t n_in, int64_t n_out, int64_t ldx,
                         int64_t ldy, ckpt_err *err)
{
    if (T < 0 || n_in < 0 || n_out < 0 || ldx < n_in || ldy < n_out)
        return ckpt_fail(
            err, CKPT_E_USAGE, "%s: %lld tokens, %lld in (stride %lld), %lld out (stride %lld)",
            what, (long long)T, (long long)n_in, (long long)ldx, (long long)n_out, (long long)ldy);
    if (T > INT32_MAX || ldx > INT32_MAX || ldy > INT32_MAX) /* so that products fit 64 bits */
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: sizes above 2^31", what);
    return CKPT_OK;
}

ckpt_status ENG(linear)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *x,
                        int64_t ldx, const real *w, const real *bias, bool add, real *y,
                        int64_t ldy, ckpt_err *err)
{
    ckpt_status status = check("linear", T, n_in, n_out, ldx, ldy, err);
    if (status != CKPT_OK)
        return status;
    return run_tiles(e,
                     &(tiles){.tb = true,
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
                              .ldc = ldy},
                     err);
}

ckpt_status ENG(linear_dx)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                           int64_t lddy, const real *w, bool add, real *dx, int64_t lddx,
                           ckpt_err *err)
{
    ckpt_status status = check("linear_dx", T, n_in, n_out, lddx, lddy, err);
    if (status != CKPT_OK)
        return status;
    return run_tiles(e,
                     &(tiles){.add = add,
                              .m = T,
                              .n = n_in,
                              .k = n_out,
                              .a = dy,
                              .lda = lddy,
                              .b = w,
                              .ldb = n_in,
                              .c = dx,
                              .ldc = lddx},
                     err);
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
    if (status == CKPT_OK && dw)
        status = run_tiles(e,
                           &(tiles){.ta = true,
                                    .add = true,
                                    .m = n_out,
                                    .n = n_in,
                                    .k = T,
                                    .a = dy,
                                    .lda = lddy,
                                    .b = x,
                                    .ldb = ldx,
                                    .c = dw,
                                    .ldc = n_in},
                           err);
    if (status == CKPT_OK && dbias && !e->dry)
        ckpt_eng_parallel(e, (n_out + COLUMN_BLOCK - 1) / COLUMN_BLOCK, sum_columns,
                          &(columns){.T = T, .n = n_out, .ld = lddy, .x = dy, .sum = dbias});
    return status;
}

ckpt_status ENG(linear_bwd)(ckpt_eng *e, int64_t T, int64_t n_in, int64_t n_out, const real *dy,
                            const real *x, const real *w, bool add, real *dx, real *dw, real *dbias,
                            ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ENG(linear_dw)(e, T, n_in, n_out, dy, n_out, x, n_in, dw, dbias, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, n_in, n_out, dy, n_out, w, add, dx, n_in, err));
done:
    return status;
}
