/* Whole models of the fixtures in f64: gradients against what others computed in float64
 * (tests/peers/gen_engine_f64.py). This file is the f64 suite, and is included by that of f32. */
#ifndef CKPT_REAL
#define CKPT_REAL 64
#define LIMIT(f32)                                                                                 \
    1e-10 /* tens of thousands of roundings of 1e-16, where sums cancel a thousandfold */
#define SUITE_NAME "engine_model"
#define SUITE suite_engine_model
#endif
#include "engine_model.h"

typedef struct fixture {
    const char *path, *reference, *name;
    double latent_eps; /* transformers' own of MLA's latent norms, 0 = the model's */
    double f32;        /* limit of a gradient's distance in f32, on every instruction set */
} fixture;

/* f32, measured: gradients 1e-6 to 7e-6; of kda_trained A_log 2.8e-5 and the final norm 3.7e-5, whose
 * sums over 256 well-predicted tokens cancel. */

/* clang-format off */
static const fixture fixtures[] = {
    {"hf/kimi_linear_tiny",     "hf/kimi_linear_tiny",     "kimi_linear_tiny",     1e-6, 2e-5},
    {"hf/deepseek_v3_tiny",     "hf/deepseek_v3_tiny",     "deepseek_v3_tiny",     1e-6, 2e-5},
    {"hf/deepseek_v3_tiny_noq", "hf/deepseek_v3_tiny_noq", "deepseek_v3_tiny_noq", 1e-6, 2e-5},
    {"hf/qwen3_next_tiny",      "hf/qwen3_next_tiny",      "qwen3_next_tiny",      0,    2e-5},
    {"hf/llama_tiny_tied",      "hf/llama_tiny_tied",      "llama_tiny_tied",      0,    2e-5},
    {"fla/kda_trained",         "fla/kda_trained",         "kda_trained",          0,    8e-5},
    {"mcore/legacy_tp2",        "mcore/legacy",            "legacy",               0,    2e-5},
};
/* clang-format on */
#define N_FIXTURES ((int)(sizeof fixtures / sizeof *fixtures))

/* The stored tensor that is this parameter and nothing else, or NULL. */
static const char *stored_name(const model_run *m, const ENG(param) * p)
{
    const ckpt_canon *c = &m->model.tensors[p->tensor];
    const ckpt_tensor *t = &m->src.tensors[c->stored];
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++)
        n *= t->dims[i];
    return n == p->n && c->derived == NULL ? t->name : NULL;
}

/* Loop index: fixture, instruction set (f64: the best one). */
START_TEST(gradients_match_the_float64_of_others)
{
    const fixture *f = &fixtures[_i % N_FIXTURES];
    const ckpt_eng_isa isa = CKPT_REAL == 64 ? ckpt_eng_detect() : (ckpt_eng_isa)(_i / N_FIXTURES);
    model_run m;
    int compared = 0;
    if (isa > ckpt_eng_detect())
        return;
    golden_open("tests/data/engine_f64.safetensors");
    model_tokens t = model_reference_tokens(
        ckpt_arena_printf(&memory, "%s/%s.reference.safetensors", CKPT_FIXTURES, f->reference));
    model_open(&m, ckpt_arena_printf(&memory, "%s/%s", CKPT_FIXTURES, f->path), f->latent_eps);
    m.e.isa = isa;
    m.run.backward = true;
    model_pass(&m, &(ENG(batch)){&t.seq, t.ids, t.labels});
    real loss = (real)m.run.loss;
    CLOSE("loss", &loss, golden_array(ckpt_arena_printf(&memory, "%s/loss", f->name), 1), 1,
          LIMIT(f->f32));
    for (size_t i = 0; i < m.net.n_params; i++) {
        const ENG(param) *p = &m.net.params[i];
        const char *stored = stored_name(&m, p);
        char *name = ckpt_arena_printf(&memory, "%s/grad/%s", f->name, stored ? stored : "");
        if (stored == NULL || ckpt_source_find(&golden, name) < 0)
            continue;
        CLOSE(name, p->grad, golden_array(name, p->n), p->n, LIMIT(f->f32));
        compared++;
    }
    ck_assert_int_gt(compared, 4);
    model_close(&m);
    ckpt_source_close(&golden);
}
END_TEST

#define MTP_COEF 0.3

static bool any_nonzero(const real *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0)
            return true;
    return false;
}

#if CKPT_REAL == 32
/* ---- every parameter learns ------------------------------------------------------------------- */

/* Every family and container form that the engine runs. */
static const char *const models[] = {
    "fla/kda_trained",
    "hf/arcee_kda_tiny",
    "hf/bailing_hybrid_tiny",
    "hf/bailing_moe_tiny",
    "hf/deepseek_fp8_tiny",
    "hf/deepseek_mtp_tiny",
    "hf/deepseek_v3_tiny",
    "hf/deepseek_v3_tiny_noq",
    "hf/kimi_linear_tiny",
    "hf/llama3_tiny",
    "hf/llama_tiny_tied",
    "hf/moonlight_tiny",
    "hf/qwen2_tiny",
    "hf/qwen3_5_tiny",
    "hf/qwen3_moe_joint_tiny",
    "hf/qwen3_moe_tiny",
    "hf/qwen3_next_mtp_tiny",
    "hf/qwen3_next_tiny",
    "hf/qwen3_tiny",
    "mcore/gpt_dense",
    "mcore/gpt_mla_mtp",
    "mcore/gpt_gdn_tp2",
    "mcore/gpt_moe",
    "mcore/gpt_moe_all",
    "mcore/gpt_relu2",
    "mcore/legacy_tp2",
    "mcore/lowrank_f_tp2",
    "mcore/lowrank_fg_tp2",
    "mcore/mp_mla_moe_tp2_ep2",
};
#define N_MODELS ((int)(sizeof models / sizeof *models))

/* An expert learns where a token chooses it: says so for parameter `p` of block `b`. */
static bool expert_is_idle(const model_run *m, const ENG(param) * p, const int64_t *counts)
{
    long long block, expert;
    if (sscanf(p->name, "blocks.%lld.moe.experts.%lld.", &block, &expert) != 2)
        return false;
    const ckpt_eng_block *b = &m->net.spec.blocks[block];
    return b->kind == CKPT_ENG_MOE && counts[block * b->u.moe.E + expert] == 0;
}

START_TEST(every_trainable_parameter_has_a_gradient_recomputed_or_not)
{
    model_run m;
    model_open(&m, ckpt_arena_printf(&memory, "%s/%s", CKPT_FIXTURES, models[_i]), 0);
    model_tokens t = model_random_tokens(2, 20, m.net.spec.V);
    const ENG(batch) batch = {&t.seq, t.ids, t.labels};
    int64_t experts = 1;
    for (int64_t i = 0; i < m.net.spec.n_blocks; i++)
        if (m.net.spec.blocks[i].kind == CKPT_ENG_MOE)
            experts = m.net.spec.blocks[i].u.moe.E;
    int64_t *counts = ckpt_arena_array(&memory, (size_t)(m.net.spec.n_blocks * experts), 8);
    m.run = (ENG(run)){.backward = true, .mtp_coef = MTP_COEF, .expert_counts = counts};
    model_pass(&m, &batch);
    const real *first = copy_of(m.net.grads, m.net.n_elements);
    int idle = 0;
    for (size_t i = 0; i < m.net.n_params; i++) {
        const ENG(param) *p = &m.net.params[i];
        const bool bias = strstr(p->name, ".router.bias") != NULL;
        ck_assert_msg((p->grad == NULL) == bias, "%s: %s", p->name, p->grad ? "trains" : "frozen");
        if (bias)
            continue;
        const bool none = expert_is_idle(&m, p, counts);
        idle += none;
        ck_assert_msg(none || any_nonzero(p->grad, p->n), "%s: no gradient", p->name);
    }
    ck_assert_int_lt(4 * idle, (int)m.net.n_params); /* most experts were chosen */
    m.run.recompute = true;
    model_pass(&m, &batch);
    for (size_t i = 0; i < m.net.n_params; i++) {
        const ENG(param) *p = &m.net.params[i];
        ck_assert_msg(!p->grad || same_bits(p->grad, first + (p->grad - m.net.grads), p->n),
                      "%s: recomputed gradient differs", p->name);
    }
    model_close(&m);
}
END_TEST

#else
/* ---- multi-token prediction ------------------------------------------------------------------- */

static const char *const predictors[] = {"mcore/gpt_mla_mtp", "hf/deepseek_mtp_tiny",
                                         "hf/qwen3_next_mtp_tiny"};

typedef struct whole {
    model_run m;
    ENG(batch) batch;
} whole;

static double total_loss(whole *w)
{
    w->m.run.backward = false;
    OK(ENG(network_run)(&w->m.e, &w->m.net, &w->batch, &w->m.run, &error));
    return w->m.run.loss + w->m.run.mtp_loss;
}

/* The gradient along a random direction of parameter i against central differences
 * of fourth order: error STEP^4 times a fifth derivative, and rounding / STEP. */
static void check_along(whole *w, int64_t i)
{
    static const double at[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
    const double step = 1e-4;
    ENG(network) *net = &w->m.net;
    const int64_t lo = net->params[i].x - net->data, n = net->params[i].n;
    real *x = net->data + lo, *keep = copy_of(x, n), *dir = numbers(n, -1, 1);
    double fd = 0, an = 0, norm = 0, len = 0;
    for (int64_t k = 0; k < n; k++) {
        an += net->grads[lo + k] * dir[k];
        norm += net->grads[lo + k] * net->grads[lo + k];
        len += dir[k] * dir[k];
    }
    for (int p = 0; p < 4; p++) {
        for (int64_t k = 0; k < n; k++)
            x[k] = keep[k] + at[p] * step * dir[k];
        fd += weight[p] * total_loss(w) / (12 * step);
    }
    memcpy(x, keep, sizeof(real) * (size_t)n);
    const double size = fmax(fmax(fabs(fd), fabs(an)), sqrt(norm / (double)n) * sqrt(len));
    ck_assert_msg(norm > 0 && fabs(fd - an) <= 1e-7 * size, "%s: difference %.12g, backward %.12g",
                  net->params[i].name, fd, an);
}

START_TEST(gradients_of_prediction_are_the_differences_of_its_loss)
{
    whole w;
    model_open(&w.m, ckpt_arena_printf(&memory, "%s/%s", CKPT_FIXTURES, predictors[_i]), 0);
    model_tokens t = model_random_tokens(2, 6, w.m.net.spec.V);
    w.batch = (ENG(batch)){&t.seq, t.ids, t.labels};
    w.m.run = (ENG(run)){.backward = true, .mtp_coef = MTP_COEF};
    model_pass(&w.m, &w.batch);
    ck_assert_double_gt(w.m.run.mtp_loss, 0.1);
    for (size_t i = 0; i < w.m.net.n_params; i++) {
        const ENG(param) *p = &w.m.net.params[i];
        long long block = -1;
        (void)sscanf(p->name, "blocks.%lld.", &block);
        const bool first = i == 0 || strncmp(p->name, w.m.net.params[i - 1].name, 9) != 0;
        if (p->grad && (strncmp(p->name, "mtp.", 4) == 0 || (block < 0) || first) &&
            any_nonzero(p->grad, p->n))
            check_along(&w, (int64_t)i);
    }
    model_close(&w.m);
}
END_TEST
#endif

Suite *SUITE(void);
Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *tc = tcase_create("float64");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, gradients_match_the_float64_of_others, 0,
                        (CKPT_REAL == 64 ? 1 : CKPT_ENG_ISA_COUNT) * N_FIXTURES);
    suite_add_tcase(s, tc);
    tc = tcase_create("gradients");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, set_up, tear_down);
#if CKPT_REAL == 32
    tcase_add_loop_test(tc, every_trainable_parameter_has_a_gradient_recomputed_or_not, 0,
                        N_MODELS);
#else
    tcase_add_loop_test(tc, gradients_of_prediction_are_the_differences_of_its_loss, 0, 3);
#endif
    suite_add_tcase(s, tc);
    return s;
}
