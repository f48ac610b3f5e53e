/* Context, arena and projections of the engine: planning is exact, threads do not change bits. */
#define CKPT_REAL 64
#include "ops.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seed = 1;

static real uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (real)((int64_t)(seed >> 11)) / (real)(1ull << 52) - 1;
}

static real *random_array(int64_t n)
{
    real *x = malloc(sizeof(real) * (size_t)(n > 0 ? n : 1));
    for (int64_t i = 0; i < n; i++)
        x[i] = uniform();
    return x;
}

START_TEST(arena_dry_run_gives_the_exact_size)
{
    ckpt_eng e;
    ckpt_err err;
    ckpt_eng_init(&e, 1);
    for (int pass = 0; pass < 2; pass++) {
        size_t mark = ckpt_eng_mark(&e);
        char *a = ckpt_eng_take(&e, 100, 1), *b = ckpt_eng_take(&e, 0, 8),
             *c = ckpt_eng_take(&e, 3, 64);
        ck_assert_int_eq(ckpt_eng_check(&e, &err), CKPT_OK);
        ck_assert_int_eq((uintptr_t)a % 64, 0);
        ck_assert_int_eq((uintptr_t)c % 64, 0);
        ck_assert_ptr_nonnull(b);
        if (!e.dry)
            memset(c, 1, 192);
        ckpt_eng_drop(&e, mark);
        ck_assert_uint_eq(e.used, 0);
        if (pass == 0)
            ck_assert_int_eq(ckpt_eng_reserve(&e, e.peak, &err), CKPT_OK);
    }
    ckpt_eng_take(&e, (int64_t)e.cap + 1, 1);
    ck_assert_int_eq(ckpt_eng_check(&e, &err), CKPT_E_NOMEM);
    ckpt_eng_release(&e);
}
END_TEST

START_TEST(arena_refuses_overflowing_sizes)
{
    ckpt_eng e;
    ckpt_err err;
    ckpt_eng_init(&e, 1);
    ckpt_eng_take(&e, INT64_MAX, 8);
    ck_assert_int_eq(ckpt_eng_check(&e, &err), CKPT_E_NOMEM);
    ckpt_eng_init(&e, 1);
    ckpt_eng_take(&e, -1, 8);
    ck_assert_int_eq(ckpt_eng_check(&e, &err), CKPT_E_NOMEM);
}
END_TEST

START_TEST(seq_check_names_the_bad_offset)
{
    ckpt_err err;
    ck_assert_int_eq(ckpt_eng_seq_check(
                         &(ckpt_eng_seq){
                             2, (int64_t[]){0, 3, 3}
    },
                         &err),
                     CKPT_OK);
    ck_assert_int_eq(ckpt_eng_seq_check(&(ckpt_eng_seq){0, NULL}, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_eng_seq_check(
                         &(ckpt_eng_seq){
                             1, (int64_t[]){1, 3}
    },
                         &err),
                     CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_eng_seq_check(
                         &(ckpt_eng_seq){
                             2, (int64_t[]){0, 3, 2}
    },
                         &err),
                     CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "sequence 1"));
}
END_TEST

/* Naive products against linear and its two adjoints, with strides, tiles cut at the edge, k = 0. */
static const int64_t linear_shapes[][3] = {
    {0,   3,  4  },
    {1,   1,  1  },
    {5,   7,  3  },
    {257, 33, 513},
    {3,   0,  4  },
    {300, 20, 600}
};

#define N_SHAPES ((int)(sizeof linear_shapes / sizeof *linear_shapes))

START_TEST(linear_matches_plain_sums)
{
    const int64_t *shape = linear_shapes[_i % N_SHAPES];
    int64_t T = shape[0], I = shape[1], O = shape[2];
    int64_t lx = I + 2, ly = O + 1;
    real *x = random_array(T * lx), *w = random_array(O * I), *b = random_array(O),
         *y = random_array(T * ly), *dx = random_array(T * lx), *dw = random_array(O * I),
         *db = random_array(O);
    real *y0 = malloc(sizeof(real) * (size_t)(T * ly + 1)),
         *dx0 = malloc(sizeof(real) * (size_t)(T * lx + 1)),
         *dw0 = malloc(sizeof(real) * (size_t)(O * I + 1)),
         *db0 = malloc(sizeof(real) * (size_t)(O + 1));
    memcpy(y0, y, sizeof(real) * (size_t)(T * ly));
    memcpy(dx0, dx, sizeof(real) * (size_t)(T * lx));
    memcpy(dw0, dw, sizeof(real) * (size_t)(O * I));
    memcpy(db0, db, sizeof(real) * (size_t)O);
    ckpt_eng e;
    ckpt_err err;
    ckpt_eng_init(&e, 2);
    ck_assert_int_eq(ckpt_eng_reserve(&e, (size_t)16 << 20, &err), CKPT_OK);
    if (_i / N_SHAPES < (int)e.isa)
        e.isa = (ckpt_eng_isa)(_i / N_SHAPES);
    ck_assert_int_eq(ENG(linear)(&e, T, I, O, x, lx, w, b, true, y, ly, &err), CKPT_OK);
    ck_assert_int_eq(ENG(linear_dx)(&e, T, I, O, y0, ly, w, true, dx, lx, &err), CKPT_OK);
    ck_assert_int_eq(ENG(linear_dw)(&e, T, I, O, y0, ly, x, lx, dw, db, &err), CKPT_OK);
    double worst = 0;
    for (int64_t t = 0; t < T; t++)
        for (int64_t o = 0; o < O; o++) {
            double s = y0[t * ly + o] + b[o];
            for (int64_t i = 0; i < I; i++)
                s += x[t * lx + i] * w[o * I + i];
            worst = fmax(worst, fabs(s - y[t * ly + o]));
        }
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < I; i++) {
            double s = dx0[t * lx + i];
            for (int64_t o = 0; o < O; o++)
                s += y0[t * ly + o] * w[o * I + i];
            worst = fmax(worst, fabs(s - dx[t * lx + i]));
        }
    for (int64_t o = 0; o < O; o++) {
        double s = db0[o];
        for (int64_t t = 0; t < T; t++)
            s += y0[t * ly + o];
        worst = fmax(worst, fabs(s - db[o]));
        for (int64_t i = 0; i < I; i++) {
            s = dw0[o * I + i];
            for (int64_t t = 0; t < T; t++)
                s += y0[t * ly + o] * x[t * lx + i];
            worst = fmax(worst, fabs(s - dw[o * I + i]));
        }
    }
    ck_assert_double_le(worst, 600 * 2.3e-16 * 4); /* reduction length * epsilon */
    for (int64_t t = 0; t < T; t++)                /* what lies between rows is left alone */
        ck_assert(y[t * ly + O] == y0[t * ly + O] && dx[t * lx + I] == dx0[t * lx + I]);
    real *again = malloc(sizeof(real) * (size_t)(T * ly + 1));
    memcpy(again, y0, sizeof(real) * (size_t)(T * ly));
    e.threads = 1;
    ck_assert_int_eq(ENG(linear)(&e, T, I, O, x, lx, w, b, true, again, ly, &err), CKPT_OK);
    ck_assert_int_eq(memcmp(again, y, sizeof(real) * (size_t)(T * ly)), 0);
    ckpt_eng_release(&e);
    real *all[] = {x, w, b, y, dx, dw, db, y0, dx0, dw0, db0, again};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
END_TEST

START_TEST(linear_refuses_strides_below_the_width)
{
    ckpt_eng e;
    ckpt_err err;
    real a[8] = {0};
    ckpt_eng_init(&e, 1);
    ck_assert_int_eq(ENG(linear)(&e, 1, 4, 2, a, 3, a, NULL, false, a, 2, &err), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "stride 3"));
    ck_assert_int_eq(ENG(linear)(&e, (int64_t)1 << 33, 4, 2, a, 4, a, NULL, false, a, 2, &err),
                     CKPT_E_UNSUPPORTED);
}
END_TEST

Suite *suite_engine_base(void);
Suite *suite_engine_base(void)
{
    Suite *s = suite_create("engine_base");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, arena_dry_run_gives_the_exact_size);
    tcase_add_test(tc, arena_refuses_overflowing_sizes);
    tcase_add_test(tc, seq_check_names_the_bad_offset);
    tcase_add_loop_test(tc, linear_matches_plain_sums, 0, CKPT_ENG_ISA_COUNT * N_SHAPES);
    tcase_add_test(tc, linear_refuses_strides_below_the_width);
    suite_add_tcase(s, tc);
    return s;
}
