/* Truncated SVD: against its own definition, on shapes from 1 x 1. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "svd.h"

Suite *suite_svd(void);

static double uniform(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005U + 1442695040888963407U;
    return (double)(*seed >> 11) / (double)(UINT64_C(1) << 53) - 0.5;
}

static double *random_matrix(int64_t rows, int64_t cols, uint64_t seed)
{
    double *w = malloc((size_t)(rows * cols) * sizeof *w);
    for (int64_t i = 0; i < rows * cols; i++)
        w[i] = uniform(&seed);
    return w;
}

static double *copy(const double *w, int64_t n)
{
    double *c = malloc((size_t)n * sizeof *c);
    memcpy(c, w, (size_t)n * sizeof *c);
    return c;
}

/* sum over k of x[i, k] * y[j, k], with row length n and element step. */
static double dot(const double *x, const double *y, int64_t n, int64_t step)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++)
        sum += x[k * step] * y[k * step];
    return sum;
}

typedef struct factors {
    double *a, *b, tail;
} factors;

static factors factor(const double *w, int64_t rows, int64_t cols, int64_t rank)
{
    ckpt_err err = {0};
    factors f;
    double *scratch = copy(w, rows * cols);
    f.a = malloc((size_t)(rank * cols) * sizeof *f.a);
    f.b = malloc((size_t)(rows * rank) * sizeof *f.b);
    ck_assert_msg(ckpt_svd_factor(scratch, rows, cols, rank, f.a, f.b, &f.tail, &err) == CKPT_OK,
                  "%s", err.text);
    free(scratch);
    return f;
}

static void release(factors *f)
{
    free(f->a);
    free(f->b);
}

static const int64_t shapes[][3] = {
    {1,  1,  1 },
    {1,  7,  1 },
    {7,  1,  1 },
    {5,  5,  5 },
    {9,  4,  4 },
    {4,  9,  3 },
    {64, 33, 1 },
    {33, 64, 20},
    {65, 65, 64},
    {40, 80, 40}
};
#define N_SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

/* Eckart-Young: nothing of that rank is closer, so the error is what the left-out singular values
 * say; tolerance: f64 rounding times the dimension, with room. */
START_TEST(svd_error_of_the_product_is_the_tail_of_the_singular_values)
{
    int64_t rows = shapes[_i][0], cols = shapes[_i][1], rank = shapes[_i][2];
    double *w = random_matrix(rows, cols, 5 + (uint64_t)_i), *left = copy(w, rows * cols);
    factors f = factor(w, rows, cols, rank);
    double error = ckpt_svd_error(left, rows, cols, rank, f.a, f.b);
    ck_assert_double_eq_tol(error, f.tail, 1e-13);
    if (rank == (rows < cols ? rows : cols))
        ck_assert_double_lt(error, 1e-13);
    else
        ck_assert_double_gt(error, 1e-5);
    release(&f);
    free(w);
    free(left);
}
END_TEST

/* A = sqrt(S) V^T and B = U sqrt(S): A A^T = B^T B = S, diagonal and descending. */
START_TEST(svd_factors_are_balanced_and_orthogonal)
{
    int64_t rows = shapes[_i][0], cols = shapes[_i][1], rank = shapes[_i][2];
    double *w = random_matrix(rows, cols, 50 + (uint64_t)_i), before = INFINITY;
    factors f = factor(w, rows, cols, rank);
    for (int64_t i = 0; i < rank; i++) {
        for (int64_t j = 0; j < i; j++)
            ck_assert_double_eq_tol(dot(f.a + i * cols, f.a + j * cols, cols, 1), 0, 1e-12);
        double s = dot(f.a + i * cols, f.a + i * cols, cols, 1);
        ck_assert_double_eq_tol(dot(f.b + i, f.b + i, rows, rank), s, 1e-12 * (1 + s));
        ck_assert_double_le(s, before + 1e-12);
        before = s;
    }
    release(&f);
    free(w);
}
END_TEST

START_TEST(svd_sign_makes_the_largest_entry_of_b_positive)
{
    int64_t rows = shapes[_i][0], cols = shapes[_i][1], rank = shapes[_i][2];
    double *w = random_matrix(rows, cols, 500 + (uint64_t)_i);
    for (int negate = 0; negate < 2; negate++) {
        factors f = factor(w, rows, cols, rank);
        for (int64_t k = 0; k < rank; k++) {
            double best = 0;
            for (int64_t r = 0; r < rows; r++)
                if (fabs(f.b[r * rank + k]) > fabs(best))
                    best = f.b[r * rank + k];
            ck_assert_double_gt(best, 0);
        }
        release(&f);
        for (int64_t i = 0; i < rows * cols; i++)
            w[i] = -w[i];
    }
    free(w);
}
END_TEST

START_TEST(svd_of_the_same_matrix_gives_the_same_bits)
{
    double *w = random_matrix(150, 130, 9);
    int before = ckpt_svd_begin();
    factors f = factor(w, 150, 130, 40), g = factor(w, 150, 130, 40);
    ckpt_svd_end(before);
    ck_assert_mem_eq(f.a, g.a, 40 * 130 * sizeof(double));
    ck_assert_mem_eq(f.b, g.b, 150 * 40 * sizeof(double));
    release(&f);
    release(&g);
    free(w);
}
END_TEST

START_TEST(svd_of_a_product_finds_its_rank)
{
    double *x = random_matrix(30, 6, 1), *y = random_matrix(6, 50, 2), w[30 * 50];
    for (int r = 0; r < 30; r++)
        for (int c = 0; c < 50; c++) {
            w[r * 50 + c] = 0;
            for (int k = 0; k < 6; k++)
                w[r * 50 + c] += x[r * 6 + k] * y[k * 50 + c];
        }
    factors exact = factor(w, 30, 50, 6), more = factor(w, 30, 50, 9), less = factor(w, 30, 50, 5);
    ck_assert_double_lt(exact.tail, 1e-13);
    ck_assert_double_lt(more.tail, 1e-13);
    ck_assert_double_gt(less.tail, 1e-3);
    release(&exact);
    release(&more);
    release(&less);
    free(x);
    free(y);
}
END_TEST

START_TEST(svd_of_zero_is_zero)
{
    double w[12] = {0}, a[8], b[6], tail = 1;
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_svd_factor(w, 3, 4, 2, a, b, &tail, &err), CKPT_OK);
    ck_assert_double_eq(tail, 0);
    for (int i = 0; i < 8; i++)
        ck_assert_double_eq(a[i], 0);
    ck_assert_double_eq(ckpt_svd_error(w, 3, 4, 2, a, b), 0);
}
END_TEST

START_TEST(svd_refuses_what_it_cannot_do)
{
    double w[12] = {0}, a[16], b[16], tail;
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_svd_factor(w, 3, 4, 4, a, b, &tail, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_svd_factor(w, 3, 4, 0, a, b, &tail, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_svd_factor(w, INT64_C(1) << 40, 1, 1, a, b, &tail, &err),
                     CKPT_E_UNSUPPORTED);
    ck_assert_uint_eq(ckpt_svd_bytes(INT64_C(1) << 40, 1), UINT64_MAX);
    w[7] = NAN;
    ck_assert_int_eq(ckpt_svd_factor(w, 3, 4, 2, a, b, &tail, &err), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "NaN"));
    w[7] = INFINITY;
    ck_assert_int_eq(ckpt_svd_factor(w, 3, 4, 2, a, b, &tail, &err), CKPT_E_UNSUPPORTED);
}
END_TEST

Suite *suite_svd(void)
{
    Suite *s = suite_create("svd");
    TCase *t = tcase_create("svd");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, svd_error_of_the_product_is_the_tail_of_the_singular_values, 0,
                        N_SHAPES);
    tcase_add_loop_test(t, svd_factors_are_balanced_and_orthogonal, 0, N_SHAPES);
    tcase_add_loop_test(t, svd_sign_makes_the_largest_entry_of_b_positive, 0, N_SHAPES);
    tcase_add_test(t, svd_of_the_same_matrix_gives_the_same_bits);
    tcase_add_test(t, svd_of_a_product_finds_its_rank);
    tcase_add_test(t, svd_of_zero_is_zero);
    tcase_add_test(t, svd_refuses_what_it_cannot_do);
    suite_add_tcase(s, t);
    return s;
}
