/* The counter-based generator: the known answers of Random123 1.14 (kat_vectors), moments, and the
 * permutation. */
#include <check.h>
#include <math.h>
#include <stdlib.h>

#include "train/philox.h"

Suite *suite_philox(void);

static const struct {
    uint32_t counter[4], key[2], out[4];
} answers[] = {
    {{0, 0, 0, 0},                                     {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}                                                          },
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}                                                          },
};

START_TEST(philox_known_counters_give_known_words)
{
    uint32_t out[4];
    ckpt_philox(answers[_i].counter, answers[_i].key, out);
    for (int k = 0; k < 4; k++)
        ck_assert_msg(out[k] == answers[_i].out[k], "word %d: %08x", k, out[k]);
}
END_TEST

#define DRAWS 200000

/* Standard errors: mean of a uniform 0.289 / sqrt(n), its variance 0.0745 / sqrt(n); of a normal 1 and
 * sqrt(2) over sqrt(n), fourth moment sqrt(96) / sqrt(n). Six of them are allowed. */
START_TEST(philox_moments_of_uniform_and_normal)
{
    const ckpt_philox_stream s = {.seed = 7 + (uint64_t)_i, .stream = 3, .use = 1};
    double m1 = 0, m2 = 0, n1 = 0, n2 = 0, n4 = 0, pair = 0, last = 0;
    const double six = 6 / sqrt(DRAWS);
    for (uint64_t i = 0; i < DRAWS; i++) {
        const double u = ckpt_philox_uniform(&s, i), z = ckpt_philox_normal(&s, i);
        ck_assert(u >= 0 && u < 1 && fabs(z) < 9);
        m1 += u / DRAWS;
        m2 += (u - 0.5) * (u - 0.5) / DRAWS;
        n1 += z / DRAWS;
        n2 += z * z / DRAWS;
        n4 += z * z * z * z / DRAWS;
        pair += z * last / DRAWS;
        last = z;
    }
    ck_assert_double_eq_tol(m1, 0.5, 0.289 * six);
    ck_assert_double_eq_tol(m2, 1.0 / 12, 0.0745 * six);
    ck_assert_double_eq_tol(n1, 0, six);
    ck_assert_double_eq_tol(n2, 1, 1.42 * six);
    ck_assert_double_eq_tol(n4, 3, 9.8 * six);
    ck_assert_double_eq_tol(pair, 0, six);
}
END_TEST

START_TEST(philox_streams_and_uses_differ)
{
    const ckpt_philox_stream a = {1, 2, 3}, b = {1, 3, 3}, c = {1, 2, 4}, d = {2, 2, 3};
    uint32_t w[4][4];
    ckpt_philox_block(&a, 5, w[0]);
    ckpt_philox_block(&b, 5, w[1]);
    ckpt_philox_block(&c, 5, w[2]);
    ckpt_philox_block(&d, 5, w[3]);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++)
            ck_assert(w[i][0] != w[j][0] || w[i][1] != w[j][1]);
}
END_TEST

static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000, 65537};

START_TEST(philox_permute_is_a_bijection)
{
    const uint64_t n = sizes[_i];
    char *seen = calloc(n, 1);
    uint64_t fixed = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t p = ckpt_philox_permute(42, CKPT_PHILOX_ORDER, 1, n, i);
        ck_assert(p < n && !seen[p]);
        seen[p] = 1;
        fixed += p == i;
    }
    free(seen);
    /* Fixed points of a random permutation are Poisson with mean 1. */
    if (n >= 255)
        ck_assert_msg(fixed < 12, "%llu fixed points", (unsigned long long)fixed);
}
END_TEST

START_TEST(philox_permute_epochs_and_seeds_differ)
{
    int same_epoch = 0, same_seed = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        const uint64_t p = ckpt_philox_permute(1, 2, 0, 1000, i);
        same_epoch += p == ckpt_philox_permute(1, 2, 1, 1000, i);
        same_seed += p == ckpt_philox_permute(2, 2, 0, 1000, i);
    }
    ck_assert_int_lt(same_epoch, 12);
    ck_assert_int_lt(same_seed, 12);
}
END_TEST

START_TEST(philox_permute_of_a_huge_range_stays_in_it)
{
    const uint64_t n = (uint64_t)1 << 62;
    for (uint64_t i = 0; i < 100; i++)
        ck_assert(ckpt_philox_permute(9, 2, 0, n - 1, n / 101 * i) < n - 1);
    ck_assert(ckpt_philox_permute(9, 2, 0, 10, 10) == 10);
}
END_TEST

Suite *suite_philox(void)
{
    Suite *s = suite_create("philox");
    TCase *t = tcase_create("philox");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, philox_known_counters_give_known_words, 0,
                        (int)(sizeof answers / sizeof *answers));
    tcase_add_loop_test(t, philox_moments_of_uniform_and_normal, 0, 2);
    tcase_add_test(t, philox_streams_and_uses_differ);
    tcase_add_loop_test(t, philox_permute_is_a_bijection, 0, (int)(sizeof sizes / sizeof *sizes));
    tcase_add_test(t, philox_permute_epochs_and_seeds_differ);
    tcase_add_test(t, philox_permute_of_a_huge_range_stays_in_it);
    suite_add_tcase(s, t);
    return s;
}
