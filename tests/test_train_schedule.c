/* Schedules against megatron.core's OptimizerParamScheduler (tests/data/train.safetensors, written by
 * tests/peers/gen_train.py), and what they refuse. */
#define CKPT_REAL 64
#include "engine_test.h"

#include "train/schedule.h"

Suite *suite_train_schedule(void);

static void open_golden(void)
{
    golden_set_up("tests/data/train.safetensors");
}

#define BASE                                                                                       \
    .max_lr = 1e-3, .min_lr = 1e-5, .decay = 1000, .start_wd = 0.1, .end_wd = 0.1, .wd_steps = 1000
#define POINTS 18

static const struct {
    const char *name;
    ckpt_schedule s;
} cases[] = {
    {"constant", {BASE, .style = CKPT_LR_CONSTANT, .warmup = 100}                          },
    {"linear",   {BASE, .style = CKPT_LR_LINEAR, .warmup = 96, .init_lr = 1e-4}            },
    {"cosine",
     {.max_lr = 1e-3,
      .min_lr = 1e-5,
      .decay = 1000,
      .style = CKPT_LR_COSINE,
      .start_wd = 0.01,
      .end_wd = 0.3,
      .wd_steps = 1000,
      .wd_style = CKPT_WD_LINEAR}                                                          },
    {"inverse",
     {.max_lr = 1e-3,
      .min_lr = 3e-4,
      .decay = 1000,
      .warmup = 50,
      .style = CKPT_LR_INVERSE_SQRT,
      .start_wd = 0.1,
      .end_wd = 0.1,
      .wd_steps = 1000}                                                                    },
    {"inverse0", {BASE, .style = CKPT_LR_INVERSE_SQRT}                                     },
    {"wsd_exp",
     {.max_lr = 1e-3,
      .min_lr = 1e-5,
      .decay = 1000,
      .style = CKPT_LR_WSD,
      .wsd = 300,
      .wsd_style = CKPT_WSD_EXPONENTIAL,
      .end_wd = 0.1,
      .wd_steps = 500,
      .wd_style = CKPT_WD_COSINE}                                                          },
    {"wsd_lin",
     {BASE, .style = CKPT_LR_WSD, .wsd = 300, .wsd_style = CKPT_WSD_LINEAR, .warmup = 10}  },
    {"wsd_cos",
     {BASE, .style = CKPT_LR_WSD, .wsd = 1000, .wsd_style = CKPT_WSD_COSINE, .warmup = 100}},
    {"wsd_sqrt", {BASE, .style = CKPT_LR_WSD, .wsd = 1, .wsd_style = CKPT_WSD_MINUS_SQRT}  },
};

/* The same double operations: one unit for the C library's cosine and power. */
START_TEST(schedule_follows_megatron)
{
    const double *n = golden_of("schedule", cases[_i].name, "n", POINTS);
    const double *lr = golden_of("schedule", cases[_i].name, "lr", POINTS);
    const double *wd = golden_of("schedule", cases[_i].name, "wd", POINTS);
    OK(ckpt_schedule_check(&cases[_i].s, &error));
    for (int i = 0; i < POINTS; i++) {
        const int64_t at = (int64_t)n[i];
        ck_assert_double_eq_tol(ckpt_schedule_lr(&cases[_i].s, at), lr[i], 4e-19);
        ck_assert_double_eq_tol(ckpt_schedule_wd(&cases[_i].s, at), wd[i], 6e-17);
    }
}
END_TEST

static const ckpt_schedule good = {BASE, .style = CKPT_LR_WSD, .wsd = 10};

static void refuse(const ckpt_schedule *s, const char *message)
{
    ck_assert_int_eq(ckpt_schedule_check(s, &error), CKPT_E_USAGE);
    ck_assert_str_eq(error.text, message);
}

START_TEST(schedule_bad_fields_are_named)
{
    ckpt_schedule s = good;
    OK(ckpt_schedule_check(&s, &error));
    s.min_lr = 1;
    refuse(&s, "schedule: min_lr 1, expected 0 to the learning rate 0.001");
    s = good;
    s.init_lr = -1;
    refuse(&s, "schedule: init_lr -1, expected 0 to the learning rate 0.001");
    s = good;
    s.max_lr = NAN;
    refuse(&s, "schedule: a learning rate is not a finite number");
    s = good;
    s.warmup = 1000;
    refuse(&s, "schedule: warm-up of 1000 samples, expected 0 to less than the decay's 1000");
    s = good;
    s.decay = 0;
    refuse(&s, "schedule: decay over 0 samples, expected at least 1");
    s = good;
    s.wsd = 0;
    refuse(&s, "schedule: WSD decay over 0 samples, expected 1 to the decay's 1000");
    s = good;
    s.start_wd = 0.2;
    refuse(&s, "schedule: weight decay from 0.2 to 0.1, expected 0 <= start <= end");
    s = good;
    s.start_wd = 0;
    refuse(&s, "schedule: constant weight decay, but it starts at 0 and ends at 0.1");
    s = good;
    s.wd_style = CKPT_WD_LINEAR;
    s.wd_steps = 0;
    refuse(&s, "schedule: weight decay grows over 0 samples");
}
END_TEST

START_TEST(schedule_steps_become_samples)
{
    ckpt_schedule s = good;
    s.warmup = 7;
    OK(ckpt_schedule_from_steps(&s, 32, &error));
    ck_assert(s.warmup == 224 && s.decay == 32000 && s.wsd == 320 && s.wd_steps == 32000);
    s.decay = INT64_MAX / 2;
    ck_assert_int_eq(ckpt_schedule_from_steps(&s, 32, &error), CKPT_E_USAGE);
}
END_TEST

START_TEST(schedule_names_are_megatrons)
{
    ckpt_lr_style lr;
    ckpt_wsd_style wsd;
    ckpt_wd_style wd;
    for (int i = 0; i < CKPT_LR_STYLE_COUNT; i++)
        ck_assert(ckpt_lr_style_parse(ckpt_lr_style_name((ckpt_lr_style)i), &lr) && (int)lr == i);
    for (int i = 0; i < CKPT_WSD_STYLE_COUNT; i++)
        ck_assert(ckpt_wsd_style_parse(ckpt_wsd_style_name((ckpt_wsd_style)i), &wsd) &&
                  (int)wsd == i);
    for (int i = 0; i < CKPT_WD_STYLE_COUNT; i++)
        ck_assert(ckpt_wd_style_parse(ckpt_wd_style_name((ckpt_wd_style)i), &wd) && (int)wd == i);
    ck_assert(ckpt_lr_style_parse("inverse-square-root", &lr) && lr == CKPT_LR_INVERSE_SQRT);
    ck_assert(!ckpt_lr_style_parse("wsd", &lr) && !ckpt_wsd_style_parse("sqrt", &wsd));
    ck_assert_ptr_null(ckpt_lr_style_name((ckpt_lr_style)99));
}
END_TEST

Suite *suite_train_schedule(void)
{
    Suite *s = suite_create("train_schedule");
    TCase *t = tcase_create("train_schedule");
    tcase_add_checked_fixture(t, open_golden, golden_tear_down);
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, schedule_follows_megatron, 0, (int)(sizeof cases / sizeof *cases));
    tcase_add_test(t, schedule_bad_fields_are_named);
    tcase_add_test(t, schedule_steps_become_samples);
    tcase_add_test(t, schedule_names_are_megatrons);
    suite_add_tcase(s, t);
    return s;
}
