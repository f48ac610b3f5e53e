/* Matrix products to the bit: an element is one sum whatever surrounds it. A plain loop that sums the
 * same blocks of k in order, fused where the instruction set has it, gives every bit of what the kernels
 * give, at any shape, transposition, stride, tile and number of threads (kernels/gemm.c). */
#ifndef CKPT_REAL
#define CKPT_REAL 64
#define SUITE_NAME "gemm"
#define SUITE suite_gemm
#endif
#include "kernels/kernels.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Suite *SUITE(void);

#if CKPT_REAL == 32
#define FUSED fmaf
#else
#define FUSED fma
#endif
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
#define BASE_IS_FUSED true
#else
#define BASE_IS_FUSED false
#endif

static uint64_t state;

static uint64_t draw(uint64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* Exactly n numbers, so that a sanitizer sees a read beyond them. */
static real *numbers(int64_t n)
{
    real *x = malloc(sizeof(real) * (size_t)(n > 0 ? n : 1));
    ck_assert_ptr_nonnull(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (real)((double)draw(1u << 30) / (1 << 29) - 1);
    return x;
}

static real step(bool fused, real a, real b, real sum)
{
    if (fused)
        return FUSED(a, b, sum);
    volatile real product = a * b; /* rounded, whatever the compiler would like */
    return product + sum;
}

/* What the kernels are to give. */
static void plain(const ENG(gemm_task) * t, bool fused, real *c)
{
    for (int64_t i = 0; i < t->m; i++)
        for (int64_t j = 0; j < t->n; j++) {
            real *to = c + i * t->ldc + j, beta = t->beta;
            for (int64_t lo = 0; lo < t->k; lo += t->kc, beta = 1) {
                real sum = 0;
                for (int64_t p = lo; p < t->k && p < lo + t->kc; p++)
                    sum = step(fused, t->tb ? t->b[j * t->ldb + p] : t->b[p * t->ldb + j],
                               t->ta ? t->a[p * t->lda + i] : t->a[i * t->lda + p], sum);
                *to = beta == 0 ? sum * t->alpha : step(fused, beta, *to, sum * t->alpha);
            }
        }
}

static void expect_bits(const real *got, const real *want, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        ck_assert_msg(memcmp(&got[i], &want[i], sizeof(real)) == 0,
                      "%s: element %lld: %.17g, not %.17g", what, (long long)i, (double)got[i],
                      (double)want[i]);
}

/* C of m rows at stride ldc: no element follows the last of its last row. */
static int64_t length(int64_t rows, int64_t cols, int64_t ld)
{
    return rows > 0 ? (rows - 1) * ld + cols : 0;
}

static void check_kernel(const ENG(gemm_task) * shape, ckpt_eng_isa isa)
{
    ENG(gemm_task) t = *shape;
    const int64_t n_c = length(t.m, t.n, t.ldc);
    real *a = numbers(t.ta ? length(t.k, t.m, t.lda) : length(t.m, t.k, t.lda));
    real *b = numbers(t.tb ? length(t.n, t.k, t.ldb) : length(t.k, t.n, t.ldb));
    real *c = numbers(n_c), *want = malloc(sizeof(real) * (size_t)n_c);
    real *scratch = NULL;
    char what[200];
    ck_assert_int_eq(posix_memalign((void **)&scratch, 64,
                                    sizeof(real) * (size_t)CKPT_ENG_GEMM_SCRATCH(t.mc, t.nc, t.kc)),
                     0);
    memcpy(want, c, sizeof(real) * (size_t)n_c);
    for (int64_t i = 0; t.beta == 0 && i < t.m; i++)
        for (int64_t j = 0; j < t.n; j++)
            c[i * t.ldc + j] = (real)NAN; /* not read */
    t.a = a;
    t.b = b;
    plain(&t, isa > CKPT_ENG_BASE || BASE_IS_FUSED, want);
    t.c = c;
    ENG(kernels_for)(isa)->gemm(&t, scratch);
    snprintf(what, sizeof what, "isa %d, %lld x %lld x %lld%s%s, blocks %lld %lld %lld, %g, %g",
             (int)isa, (long long)t.m, (long long)t.n, (long long)t.k, t.ta ? ", A^T" : "",
             t.tb ? ", B^T" : "", (long long)t.mc, (long long)t.nc, (long long)t.kc,
             (double)t.alpha, (double)t.beta);
    expect_bits(c, want, n_c, what); /* and what lies between the rows of C is as it was */
    free(scratch);
    free(a);
    free(b);
    free(c);
    free(want);
}

/* Sizes around those of the register tiles, and now and then larger ones. */
static int64_t size_near(const int64_t *around, int n)
{
    if (draw(4) == 0)
        return 1 + (int64_t)draw(150);
    int64_t size = around[draw((uint64_t)n)] + (int64_t)draw(3) - 1;
    return size > 0 ? size : 1;
}

START_TEST(products_have_the_bits_of_plain_sums)
{
    static const int64_t rows[] = {1, 4, 6, 8, 12, 13, 24, 25, 36, 48, 64};
    static const int64_t cols[] = {1, 4, 8, 16, 24, 32, 33, 64, 65, 128};
    static const int64_t depth[] = {1, 2, 3, 4, 5, 8, 16, 17, 32, 48, 64, 97, 128};
    static const real alphas[] = {1, 1, -1, (real)0.3}, betas[] = {0, 1, 1, (real)-0.7};
    const ckpt_eng_isa isa = (ckpt_eng_isa)(_i % CKPT_ENG_ISA_COUNT);
    if (isa > ckpt_eng_detect())
        return;
    state = (uint64_t)_i + 1;
    for (int i = 0; i < 30; i++) {
        ENG(gemm_task)
        t = {.ta = draw(2) == 1,
             .tb = draw(2) == 1,
             .m = size_near(rows, sizeof rows / sizeof *rows),
             .n = size_near(cols, sizeof cols / sizeof *cols),
             .k = size_near(depth, sizeof depth / sizeof *depth),
             .mc = draw(2) ? 12 : 96,
             .nc = draw(2) ? 32 : 128,
             .kc = draw(2) ? 16 : 64,
             .alpha = alphas[draw(4)],
             .beta = betas[draw(4)]};
        t.lda = (t.ta ? t.m : t.k) + (int64_t)draw(2) * 5;
        t.ldb = (t.tb ? t.k : t.n) + (int64_t)draw(2) * 3;
        t.ldc = t.n + (int64_t)draw(2) * 7;
        check_kernel(&t, isa);
    }
}
END_TEST

/* Larger than the largest tile in every direction, one after the other; k spans blocks of 256. */
static const int64_t shapes[][3] = {
    {1100, 9,    20 },
    {10,   1100, 21 },
    {30,   40,   600},
    {200,  130,  20 },
    {130,  200,  21 },
    {1,    300,  257}
};
#define N_SHAPES ((int)(sizeof shapes / sizeof *shapes))

START_TEST(projections_have_the_bits_of_plain_sums_on_any_number_of_threads)
{
    const int64_t T = shapes[_i][0], O = shapes[_i][1], I = shapes[_i][2];
    const bool fused = ckpt_eng_detect() > CKPT_ENG_BASE || BASE_IS_FUSED;
    state = 77;
    real *x = numbers(T * I), *w = numbers(O * I), *dy = numbers(T * O), *dw = numbers(O * I);
    real *got = malloc(sizeof(real) * (size_t)(T * O + T * I + O * I));
    real *want = malloc(sizeof(real) * (size_t)(T * O + T * I + O * I));
    real *dx_at = want + T * O, *dw_at = dx_at + T * I;
    ckpt_err err;
    memcpy(dw_at, dw, sizeof(real) * (size_t)(O * I));
    ENG(gemm_task) y = {.tb = true, .m = T, .n = O, .k = I, .a = x, .lda = I, .b = w, .ldb = I};
    ENG(gemm_task) dx = {.m = T, .n = I, .k = O, .a = dy, .lda = O, .b = w, .ldb = I};
    ENG(gemm_task) g = {.ta = true, .m = O, .n = I, .k = T, .a = dy, .lda = O, .b = x, .ldb = I};
    y.ldc = O;
    dx.ldc = g.ldc = I;
    y.kc = dx.kc = g.kc = 256;
    y.alpha = dx.alpha = g.alpha = g.beta = 1;
    plain(&y, fused, want);
    plain(&dx, fused, dx_at);
    plain(&g, fused, dw_at);
    for (int threads = 1; threads <= 7; threads += threads < 3 ? 1 : 2) {
        ckpt_eng e;
        char what[100];
        ckpt_eng_init(&e, threads);
        for (int pass = 0; pass < 2; pass++) {
            real *dw_got = got + T * O + T * I;
            memcpy(dw_got, dw, sizeof(real) * (size_t)(O * I));
            ck_assert_int_eq(ENG(linear)(&e, T, I, O, x, I, w, NULL, false, got, O, &err), CKPT_OK);
            ck_assert_int_eq(ENG(linear_dx)(&e, T, I, O, dy, O, w, false, got + T * O, I, &err),
                             CKPT_OK);
            ck_assert_int_eq(ENG(linear_dw)(&e, T, I, O, dy, O, x, I, dw_got, NULL, &err), CKPT_OK);
            if (pass == 0)
                ck_assert_int_eq(ckpt_eng_reserve(&e, e.peak, &err), CKPT_OK);
        }
        snprintf(what, sizeof what, "%lld tokens, %lld to %lld, %d threads", (long long)T,
                 (long long)I, (long long)O, threads);
        expect_bits(got, want, T * O + T * I + O * I, what);
        ckpt_eng_release(&e);
    }
    free(x);
    free(w);
    free(dy);
    free(dw);
    free(got);
    free(want);
}
END_TEST

Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *tc = tcase_create("bits");
    tcase_set_timeout(tc, 240);
    tcase_add_loop_test(tc, products_have_the_bits_of_plain_sums, 0, 6 * CKPT_ENG_ISA_COUNT);
    tcase_add_loop_test(tc, projections_have_the_bits_of_plain_sums_on_any_number_of_threads, 0,
                        N_SHAPES);
    suite_add_tcase(s, tc);
    return s;
}
