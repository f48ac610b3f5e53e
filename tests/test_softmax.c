/* The kernels of a softmax, at every instruction set, against the C library in double: lengths around
 * those of vectors, infinities, NaN wherever it stands. */
#define CKPT_REAL 32
#include "kernels/kernels.h"

#include <check.h>
#include <math.h>

Suite *suite_softmax(void);

#define MOST 70
/* exp of a difference that is rounded to 24 bits: 1.5 ulp of its own, and half an ulp of up to 64. */
#define EXP_LIMIT (3 * 0x1p-24 + 0x1p-19)
#define SUM_LIMIT (EXP_LIMIT + MOST * 0x1p-24)

static uint64_t state = 1;

static float draw(float lo, float hi)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * (float)((double)(state >> 11) / (double)(1ull << 53));
}

static bool near(double x, double want, double limit)
{
    return fabs(x - want) <= limit * fabs(want) + 1e-37;
}

START_TEST(maximum_is_the_largest_or_nan_at_any_place)
{
    const ENG(kernels) *k = ENG(kernels_for)((ckpt_eng_isa)_i);
    float x[MOST];
    if (_i > (int)ckpt_eng_detect())
        return;
    for (int64_t n = 0; n <= MOST; n++) {
        float want = -3;
        for (int64_t i = 0; i < n; i++) {
            x[i] = draw(-50, 50);
            want = x[i] > want ? x[i] : want;
        }
        ck_assert(k->maximum(n, -3, x) == want);
        ck_assert(isnan(k->maximum(n, NAN, x)));
        for (int64_t i = 0; i < n; i++) {
            const float was = x[i];
            x[i] = NAN;
            ck_assert(isnan(k->maximum(n, -3, x)));
            x[i] = INFINITY;
            ck_assert(k->maximum(n, -3, x) == INFINITY);
            x[i] = was;
        }
    }
}
END_TEST

START_TEST(exponents_and_their_sum_match_the_library)
{
    const ENG(kernels) *k = ENG(kernels_for)((ckpt_eng_isa)_i);
    float x[MOST], y[MOST + 1];
    if (_i > (int)ckpt_eng_detect())
        return;
    for (int64_t n = 0; n <= MOST; n++) {
        double want = 0;
        for (int64_t i = 0; i < n; i++)
            x[i] = draw(-60, 1);
        y[n] = 7;
        const float sum = k->exp_sum(n, 1, x, y);
        for (int64_t i = 0; i < n; i++) {
            ck_assert(near((double)y[i], exp((double)x[i] - 1), EXP_LIMIT));
            want += exp((double)x[i] - 1);
        }
        ck_assert(near((double)sum, want, SUM_LIMIT));
        ck_assert(y[n] == 7);
    }
    x[0] = -INFINITY;
    x[1] = 0;
    ck_assert(k->exp_sum(2, 0, x, x) == 1 && x[0] == 0 && x[1] == 1);
    x[0] = NAN;
    ck_assert(isnan(k->exp_sum(2, 0, x, x)) && isnan(x[0]));
}
END_TEST

START_TEST(gradient_of_a_softmax_matches_plain_sums)
{
    const ENG(kernels) *k = ENG(kernels_for)((ckpt_eng_isa)_i);
    float s[MOST], p[MOST], g[MOST], ds[MOST];
    if (_i > (int)ckpt_eng_detect())
        return;
    for (int64_t n = 0; n <= MOST; n++) {
        double want = 0, size = 0;
        for (int64_t i = 0; i < n; i++) {
            p[i] = s[i] = draw(-20, 0);
            ds[i] = g[i] = draw(-1, 1);
            want += (double)s[i] * (double)g[i];
            size += fabs((double)s[i] * (double)g[i]);
        }
        ck_assert(fabs((double)k->dot(n, s, g) - want) <= MOST * 0x1p-24 * size);
        k->softmax_bwd(n, 0.5f, 0.25f, 2, p, ds);
        for (int64_t i = 0; i < n; i++) {
            const double q = exp((double)s[i] - 0.5);
            ck_assert(near((double)p[i], q, EXP_LIMIT));
            ck_assert(fabs((double)ds[i] - q * ((double)g[i] - 0.25) * 2) <= 4 * EXP_LIMIT * q);
        }
    }
}
END_TEST

Suite *suite_softmax(void)
{
    Suite *s = suite_create("softmax");
    TCase *tc = tcase_create("kernels");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, maximum_is_the_largest_or_nan_at_any_place, 0, CKPT_ENG_ISA_COUNT);
    tcase_add_loop_test(tc, exponents_and_their_sum_match_the_library, 0, CKPT_ENG_ISA_COUNT);
    tcase_add_loop_test(tc, gradient_of_a_softmax_matches_plain_sums, 0, CKPT_ENG_ISA_COUNT);
    suite_add_tcase(s, tc);
    return s;
}
