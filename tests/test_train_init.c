/* Initial values: the rule of every tensor of the schema, the distributions, and that any part is the
 * part of the whole. */
#define CKPT_REAL 32
#include "engine_test.h"

#include "families/hybrid.h"
#include "train/init.h"

Suite *suite_train_init(void);

static const struct {
    const char *name;
    int rank;
    const char *rule;
} rules[] = {
    {"embed.weight",                       2, "normal(0, std)"                             },
    {"head.weight",                        2, "normal(0, std)"                             },
    {"final_norm.weight",                  1, "1"                                          },
    {"blocks.0.kda.q.weight",              2, "normal(0, std)"                             },
    {"blocks.0.kda.o.weight",              2, "normal(0, std / sqrt(blocks))"              },
    {"blocks.0.kda.o_norm.weight",         1, "1"                                          },
    {"blocks.0.kda.A_log",                 1, "ln U(1, 16)"                                },
    {"blocks.0.kda.dt_bias",               1, "inverse softplus of exp U(ln 0.001, ln 0.1)"},
    {"blocks.0.kda.conv_k.weight",         3, "U(-1/sqrt(width), 1/sqrt(width))"           },
    {"blocks.0.kda.g_b.bias",              1, "0"                                          },
    {"blocks.2.gdn.dt_bias",               1, "1"                                          },
    {"blocks.2.gdn2.dt_bias",              1, "1"                                          },
    {"blocks.2.gdn.A_log",                 1, "ln U(1, 16)"                                },
    {"blocks.3.moe.router.weight",         2, "normal(0, std)"                             },
    {"blocks.3.moe.router.bias",           1, "0"                                          },
    {"blocks.3.moe.experts.7.down.weight", 2, "normal(0, std / sqrt(blocks))"              },
    {"blocks.3.moe.experts.7.up.weight",   2, "normal(0, std)"                             },
    {"blocks.4.mamba.D",                   1, "1"                                          },
    {"blocks.4.mamba.conv_x.bias",         1, "0"                                          },
    {"mtp.8.eh_proj.weight",               2, "normal(0, std)"                             },
    {"mtp.8.enorm.weight",                 1, "1"                                          },
};

static const ckpt_init_config config = {.seed = 11, .std = 0.02, .blocks = 16, .scaled = true};

START_TEST(init_rule_of_every_kind)
{
    const char *rule = ckpt_init_rule(&config, rules[_i].name, rules[_i].rank);
    ck_assert_msg(rule != NULL && strcmp(rule, rules[_i].rule) == 0, "%s: %s", rules[_i].name,
                  rule ? rule : "none");
}
END_TEST

START_TEST(init_schema_is_covered)
{
    for (size_t i = 0; i < CKPT_HYBRID_SCHEMA_LEN; i++) {
        int rank = 1;
        for (const char *p = ckpt_hybrid_schema[i].dims; *p != '\0'; p++)
            rank += *p == ',';
        ck_assert_msg(ckpt_init_rule(&config, ckpt_hybrid_schema[i].canon, rank) != NULL, "%s",
                      ckpt_hybrid_schema[i].canon);
    }
    ck_assert_ptr_null(ckpt_init_rule(&config, "blocks.0.kda.unheard_of", 1));
    const int64_t dims[] = {4};
    float x[4];
    ck_assert_int_eq(
        ckpt_init_range(&engine, &config, "blocks.0.kda.unheard_of", 1, dims, 0, 4, x, &error),
        CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(error.text,
                     "no initial values are known for tensor 'blocks.0.kda.unheard_of'");
    ck_assert_int_eq(
        ckpt_init_range(&engine, &config, "final_norm.weight", 1, dims, 2, 5, x, &error),
        CKPT_E_USAGE);
}
END_TEST

START_TEST(init_options)
{
    ckpt_init_config c = config;
    c.scaled = false;
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.kda.o.weight", 2), "normal(0, std)");
    c.conv_normal = true;
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.kda.conv_q.weight", 3), "normal(0, std)");
    c.zero_A_log = true;
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.kda.A_log", 1), "0");
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.gdn.A_log", 1), "ln U(1, 16)");
    c.centered = true;
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.attn.q_norm.weight", 1), "0");
    ck_assert_str_eq(ckpt_init_rule(&c, "blocks.0.gdn.o_norm.weight", 1), "1");
}
END_TEST

#define N 40000

static float *whole(const ckpt_init_config *c, const char *name, int rank, const int64_t *dims)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        n *= dims[i];
    float *x = zeros(n);
    OK(ckpt_init_range(&engine, c, name, rank, dims, 0, n, x, &error));
    return x;
}

static void moments(const float *x, double *mean, double *sd)
{
    double m = 0, q = 0;
    for (int i = 0; i < N; i++)
        m += (double)x[i] / N;
    for (int i = 0; i < N; i++)
        q += ((double)x[i] - m) * ((double)x[i] - m) / N;
    *mean = m;
    *sd = sqrt(q);
}

/* Six standard errors: of a mean sd / 200, of a standard deviation at most sd / 200 again. */
START_TEST(init_distributions)
{
    const int64_t matrix[] = {200, 200}, vector[] = {N}, conv[] = {N / 4, 1, 4};
    double m, s;
    moments(whole(&config, "embed.weight", 2, matrix), &m, &s);
    ck_assert_double_eq_tol(m, 0, 0.02 * 0.03);
    ck_assert_double_eq_tol(s, 0.02, 0.02 * 0.03);
    moments(whole(&config, "blocks.1.mlp.down.weight", 2, matrix), &m, &s);
    ck_assert_double_eq_tol(s, 0.005, 0.005 * 0.03);
    moments(whole(&config, "blocks.0.kda.conv_q.weight", 3, conv), &m, &s);
    ck_assert_double_eq_tol(m, 0, 0.289 * 0.03);
    ck_assert_double_eq_tol(s, 0.5 / sqrt(3), 0.289 * 0.03);
    float *a = whole(&config, "blocks.0.kda.A_log", 1, vector);
    float *dt = whole(&config, "blocks.0.kda.dt_bias", 1, vector);
    for (int i = 0; i < N; i++) {
        a[i] = expf(a[i]);
        ck_assert(a[i] >= 0.99999F && a[i] < 16.0001F);
        dt[i] = (float)log(log1p(exp((double)dt[i]))); /* ln softplus: uniform again */
        ck_assert(dt[i] > -6.9079F && dt[i] < -2.3025F);
    }
    moments(a, &m, &s);
    ck_assert_double_eq_tol(m, 8.5, 4.33 * 0.03);
    ck_assert_double_eq_tol(s, 4.330, 4.33 * 0.03);
    moments(dt, &m, &s);
    ck_assert_double_eq_tol(m, -4.6052, 1.33 * 0.03);
    ck_assert_double_eq_tol(s, 1.3294, 1.33 * 0.03);
}
END_TEST

START_TEST(init_any_part_and_thread_count_is_the_whole)
{
    const int64_t dims[] = {200, 200};
    static const int64_t cuts[] = {0, 1, 2, 16383, 16385, 20001, N};
    engine.threads = 1;
    const float *x = whole(&config, "embed.weight", 2, dims);
    float *y = zeros(N);
    engine.threads = 3;
    for (int i = 0; i < 6; i++)
        OK(ckpt_init_range(&engine, &config, "embed.weight", 2, dims, cuts[i], cuts[i + 1],
                           y + cuts[i], &error));
    ck_assert(same_bits(x, y, N));
    ckpt_init_config other = config;
    other.seed++;
    ck_assert(!same_bits(x, whole(&other, "embed.weight", 2, dims), 4));
    ck_assert(!same_bits(x, whole(&config, "head.weight", 2, dims), 4));
}
END_TEST

Suite *suite_train_init(void)
{
    Suite *s = suite_create("train_init");
    TCase *t = tcase_create("train_init");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, init_rule_of_every_kind, 0, (int)(sizeof rules / sizeof *rules));
    tcase_add_test(t, init_schema_is_covered);
    tcase_add_test(t, init_options);
    tcase_add_test(t, init_distributions);
    tcase_add_test(t, init_any_part_and_thread_count_is_the_whole);
    suite_add_tcase(s, t);
    return s;
}
