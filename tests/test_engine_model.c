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

/* Loop index: fixture, instruction set. */
START_TEST(gradients_match_the_float64_of_others)
{
    const fixture *f = &fixtures[_i % N_FIXTURES];
    const ckpt_eng_isa isa = (ckpt_eng_isa)(_i / N_FIXTURES);
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

Suite *SUITE(void);
Suite *SUITE(void)
{
    Suite *s = suite_create(SUITE_NAME);
    TCase *tc = tcase_create("float64");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, gradients_match_the_float64_of_others, 0,
                        CKPT_ENG_ISA_COUNT * N_FIXTURES);
    suite_add_tcase(s, tc);
    return s;
}
