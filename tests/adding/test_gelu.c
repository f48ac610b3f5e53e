/* The added operation: known values, and its gradient against differences in double. */
#define CKPT_REAL 64
#include "engine_test.h"

START_TEST(gelu_known_values)
{
    const real x[] = {0, 1, -1, 20, -40};
    const double want[] = {0, 0.8413447460685429, -0.15865525393145707, 20, 0};
    real y[5];
    OK(ENG(gelu)(&engine, 5, x, y, &error));
    for (int i = 0; i < 5; i++)
        ck_assert_double_eq_tol((double)y[i], want[i], 1e-15);
}
END_TEST

START_TEST(gelu_gradient_is_the_slope)
{
    const int64_t n = 5000;
    const double h = 1e-6;
    real *x = numbers(n, -4, 4), *dy = numbers(n, -1, 1), *dx = zeros(n), *hi = zeros(n),
         *lo = zeros(n);
    OK(ENG(gelu_bwd)(&engine, n, x, dy, dx, &error));
    for (int64_t i = 0; i < n; i++)
        x[i] += (real)h;
    OK(ENG(gelu)(&engine, n, x, hi, &error));
    for (int64_t i = 0; i < n; i++)
        x[i] -= (real)(2 * h);
    OK(ENG(gelu)(&engine, n, x, lo, &error));
    for (int64_t i = 0; i < n; i++)
        hi[i] = (real)((double)(hi[i] - lo[i]) / (2 * h) * (double)dy[i]);
    CLOSE("dx", dx, hi, n, 1e-8);
}
END_TEST

Suite *suite_gelu(void)
{
    Suite *s = suite_create("gelu");
    TCase *t = tcase_create("gelu");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, gelu_known_values);
    tcase_add_test(t, gelu_gradient_is_the_slope);
    suite_add_tcase(s, t);
    return s;
}
