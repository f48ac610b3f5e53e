/* The network on several ranks, which are threads, against one process: loss, logits, every gradient,
 * side losses and expert counts, in double. */
#define CKPT_REAL 64
#include "engine_test.h"
#include "network.h"
#include "par_test.h"

/* Sums are taken in another order: rounding of double through a few blocks. */
#define LIMIT 1e-12

typedef struct mesh {
    const char *model;
    int tp, cp, dp, ep;
    ckpt_eng_cp_mode mode;
} mesh;

/* clang-format off */
static const mesh meshes[] = {
    {"hf/kimi_linear_tiny",    1, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 1, 2, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 1, 2, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 2, 4, CKPT_ENG_CP_HEADS},
    {"hf/bailing_hybrid_tiny", 2, 2, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   1, 3, 1, 3, CKPT_ENG_CP_HEADS},
    {"hf/qwen3_next_mtp_tiny", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/qwen3_next_mtp_tiny", 1, 2, 2, 2, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   2, 2, 1, 4, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   3, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/llama_tiny_tied",     4, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/llama_tiny_tied",     2, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/bailing_hybrid_tiny", 2, 1, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    2, 2, 1, 4, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    1, 2, 2, 2, CKPT_ENG_CP_CHUNKS},
    {"hf/qwen3_next_mtp_tiny", 1, 3, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/qwen3_next_mtp_tiny", 2, 4, 1, 2, CKPT_ENG_CP_CHUNKS},
    {"hf/deepseek_mtp_tiny",   1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/llama_tiny_tied",     4, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    /* gates of key heads, two value heads to each */
    {"mcore/gpt_gdn2_grouped_tp2", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"mcore/gpt_gdn2_grouped_tp2", 1, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"mcore/gpt_gdn2_grouped_tp2", 2, 2, 1, 2, CKPT_ENG_CP_CHUNKS},
};
/* clang-format on */

typedef struct scene {
    const mesh *m;
    ckpt_source src;
    ckpt_model model;
    ckpt_eng e;
    ENG(network) one;
    ENG(run) run;
    int32_t *ids, *labels;
    real *logits;
    int64_t cu[8], n_seq, T;
    int64_t *counts;
} scene;

/* Sequences of a data-parallel rank, all of them for one process. */
static ENG(batch) batch_of(const scene *s, int dp, int d, ckpt_eng_seq *seq, int64_t cu[8])
{
    int64_t lo = ckpt_part_at(s->n_seq, dp, d), hi = ckpt_part_at(s->n_seq, dp, d + 1);
    for (int64_t i = lo; i <= hi; i++)
        cu[i - lo] = s->cu[i] - s->cu[lo];
    *seq = (ckpt_eng_seq){hi - lo, cu};
    return (ENG(batch)){seq, s->ids + s->cu[lo], s->labels + s->cu[lo]};
}

static ckpt_eng_spec_opts options(const mesh *m)
{
    /* Side losses are means over micro-batches: one process with all sequences has another value. */
    return (ckpt_eng_spec_opts){.aux_coef = m->dp == 1 ? 0.02 : 0, .z_coef = m->dp == 1 ? 0.01 : 0};
}

static bool run_once(ckpt_eng *e, const ENG(network) * m, const ENG(batch) * b, ENG(run) * r,
                     ckpt_err *err)
{
    return ENG(network_run)(e, m, b, r, err) == CKPT_OK &&
           ckpt_eng_reserve(e, e->peak, err) == CKPT_OK &&
           ENG(network_run)(e, m, b, r, err) == CKPT_OK;
}

static bool near(double a, double b)
{
    return fabs(a - b) <= LIMIT * fmax(1, fabs(b));
}

static bool check_grads(par_rank *r, scene *s, ckpt_eng *e, ENG(network) * net)
{
    for (size_t i = 0; i < net->n_params; i++) {
        const ENG(param) *p = &net->params[i], *q = &s->one.params[i];
        real *whole = e->par->world->rank == 0 ? malloc(sizeof(real) * (size_t)(q->n + 1)) : NULL;
        double far = 0;
        for (int64_t k = 0; whole && k < q->n; k++)
            whole[k] = NAN;
        bool ok = q->grad == NULL ||
                  ENG(network_gather)(e, net, &s->model, p, net->grads + (p->x - net->data), whole,
                                      &r->err) == CKPT_OK;
        if (ok && whole && q->grad)
            far = distance(whole, q->grad, q->n);
        free(whole);
        if (!ok)
            return false;
        if (far > LIMIT)
            return PAR_FAIL(r, "gradient of %s: relative RMS %.3g", p->name, far);
    }
    return true;
}

static bool check_run(par_rank *r, const scene *s, const ENG(run) * run, const ENG(batch) * b,
                      int64_t experts)
{
    int64_t T = ckpt_eng_tokens(b->seq), V = s->one.spec.V;
    if (!near(run->loss, s->run.loss) || !near(run->mtp_loss, s->run.mtp_loss) ||
        !near(run->aux_loss, s->run.aux_loss) || !near(run->z_loss, s->run.z_loss))
        return PAR_FAIL(
            r, "loss %.16g, %.16g, side losses %.16g, %.16g, not %.16g, %.16g, %.16g, %.16g",
            run->loss, run->mtp_loss, run->aux_loss, run->z_loss, s->run.loss, s->run.mtp_loss,
            s->run.aux_loss, s->run.z_loss);
    double far = distance(run->logits, s->logits + (b->ids - s->ids) * V, T * V);
    if (far > LIMIT)
        return PAR_FAIL(r, "logits: relative RMS %.3g", far);
    if (memcmp(run->expert_counts, s->counts, sizeof *s->counts * (size_t)experts) != 0)
        return PAR_FAIL(r, "expert counts differ");
    return true;
}

static bool one_rank(par_rank *r)
{
    scene *s = r->arg;
    ckpt_eng_par par = {0};
    ckpt_eng e;
    ENG(network) net = {0};
    ckpt_eng_seq seq;
    int64_t cu[8];
    ckpt_eng_spec_opts opts = options(s->m);
    ckpt_eng_init(&e, 1);
    e.par = &par;
    if (ckpt_eng_par_open(&par, &r->comm, s->m->tp, s->m->cp, s->m->dp, s->m->ep, s->m->mode,
                          &r->err) != CKPT_OK)
        return false;
    ENG(batch) b = batch_of(s, s->m->dp, par.d, &seq, cu);
    bool ok = ENG(network_open)(&net, &e, &s->model, &opts, true, &r->err) == CKPT_OK;
    int64_t experts = 0;
    for (int64_t i = 0; ok && i < net.spec.n_blocks; i++)
        if (net.spec.blocks[i].kind == CKPT_ENG_MOE)
            experts = net.spec.n_blocks * net.spec.blocks[i].u.moe.E;
    int64_t *counts = calloc((size_t)experts + 1, sizeof *counts);
    real *logits = malloc(sizeof(real) * (size_t)(s->T * s->one.spec.V));
    ENG(run)
    run = {.backward = true,
           .recompute = r->comm.size % 2 == 0,
           .mtp_coef = 0.3,
           .logits = logits,
           .expert_counts = counts};
    ok = ok && run_once(&e, &net, &b, &run, &r->err) &&
         ENG(network_sum_grads)(&e, &net, &r->err) == CKPT_OK && check_grads(r, s, &e, &net) &&
         check_run(r, s, &run, &b, experts);
    if (!ok)
        ckpt_comm_abort(&r->comm, 1);
    free(counts);
    free(logits);
    ENG(network_close)(&net);
    ckpt_eng_release(&e);
    ckpt_eng_par_close(&par);
    return ok;
}

static const int64_t long_ones[] = {21, 1, 34, 17}, short_ones[] = {1, 2, 9, 1};

static void scene_open(scene *s, const mesh *m, const int64_t *lengths)
{
    ckpt_model_opts bind = {0};
    ckpt_eng_spec_opts opts = options(m);
    *s = (scene){.m = m, .n_seq = 4};
    OK(ckpt_source_open(&s->src, ckpt_arena_printf(&memory, "%s/%s", CKPT_FIXTURES, m->model), NULL,
                        &error));
    OK(ckpt_model_bind(&s->model, &s->src, &bind, &error));
    ckpt_eng_init(&s->e, 1);
    OK(ENG(network_open)(&s->one, &s->e, &s->model, &opts, true, &error));
    for (int i = 0; i < 4; i++)
        s->cu[i + 1] = s->cu[i] + lengths[i];
    s->T = s->cu[4];
    s->ids = malloc(sizeof *s->ids * (size_t)s->T);
    s->labels = malloc(sizeof *s->labels * (size_t)s->T);
    for (int64_t t = 0; t < s->T; t++) {
        s->ids[t] = (int32_t)number(0, (double)s->one.spec.V);
        s->labels[t] = t % 7 == 3 ? -1 : (int32_t)number(0, (double)s->one.spec.V);
    }
    s->logits = malloc(sizeof(real) * (size_t)(s->T * s->one.spec.V));
    s->counts = calloc(1 << 16, sizeof *s->counts);
    ckpt_eng_seq seq;
    int64_t cu[8];
    ENG(batch) b = batch_of(s, 1, 0, &seq, cu);
    s->run = (ENG(run)){
        .backward = true, .mtp_coef = 0.3, .logits = s->logits, .expert_counts = s->counts};
    ck_assert_msg(run_once(&s->e, &s->one, &b, &s->run, &error), "%s", error.text);
}

static void scene_close(scene *s)
{
    ENG(network_close)(&s->one);
    ckpt_eng_release(&s->e);
    ckpt_model_release(&s->model);
    ckpt_source_close(&s->src);
    free(s->ids);
    free(s->labels);
    free(s->logits);
    free(s->counts);
}

START_TEST(ranks_compute_what_one_process_does)
{
    scene s;
    const mesh *m = &meshes[_i];
    scene_open(&s, m, long_ones);
    par_run(m->tp * m->cp * m->dp, one_rank, &s);
    scene_close(&s);
}
END_TEST

/* Fewer tokens a rank than a convolution is wide, sequences over three and more ranks, ranks of a tensor-
 * parallel group without tokens. */
START_TEST(short_sequences_run_over_many_ranks)
{
    static const mesh many[] = {
        {"hf/kimi_linear_tiny", 1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
        {"hf/kimi_linear_tiny", 1, 8, 1, 2, CKPT_ENG_CP_CHUNKS},
        {"hf/kimi_linear_tiny", 2, 4, 1, 4, CKPT_ENG_CP_CHUNKS},
        {"hf/llama_tiny_tied",  4, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    };
    scene s;
    const mesh *m = &many[_i];
    scene_open(&s, m, short_ones);
    par_run(m->tp * m->cp * m->dp, one_rank, &s);
    scene_close(&s);
}
END_TEST

static bool refused(par_rank *r)
{
    scene *s = r->arg;
    ckpt_eng_par par = {0};
    ckpt_eng e;
    ENG(network) net;
    ckpt_eng_init(&e, 1);
    e.par = &par;
    bool ok = ckpt_eng_par_open(&par, &r->comm, s->m->tp, s->m->cp, s->m->dp, s->m->ep, s->m->mode,
                                &r->err) == CKPT_OK &&
              ENG(network_open)(&net, &e, &s->model, NULL, true, &r->err) == CKPT_OK;
    ckpt_eng_par_close(&par);
    return ok;
}

START_TEST(meshes_that_do_not_fit_are_usage_errors)
{
    static const struct {
        mesh m;
        int ranks;
        const char *says;
    } bad[] = {
        {{"hf/kimi_linear_tiny", 3, 1, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "block 0: 2 heads of linear attention cannot be cut into 3 parts"},
        {{"hf/llama_tiny_tied", 3, 1, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "4 query heads with 2 key heads cannot be cut into 3 parts"      },
        {{"hf/kimi_linear_tiny", 2, 2, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "tp 2 x cp 2 x dp 1 do not make the 3 ranks"                     },
        {{"hf/kimi_linear_tiny", 1, 1, 3, 2, CKPT_ENG_CP_HEADS}, 3, "ep 2 does not divide the 3"                                     },
    };
    scene s;
    par_rank ranks[PAR_RANKS];
    scene_open(&s, &bad[_i].m, long_ones);
    ck_assert(!par_try(ranks, bad[_i].ranks, refused, &s));
    for (int i = 0; i < bad[_i].ranks; i++) {
        ck_assert_int_eq(ranks[i].err.code, CKPT_E_USAGE);
        ck_assert_msg(strstr(ranks[i].err.text, bad[_i].says) != NULL, "%s", ranks[i].err.text);
    }
    scene_close(&s);
}
END_TEST

Suite *suite_par(void);
Suite *suite_par(void)
{
    Suite *s = suite_create("par");
    TCase *t = tcase_create("network");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_loop_test(t, ranks_compute_what_one_process_does, 0,
                        (int)(sizeof meshes / sizeof *meshes));
    tcase_add_loop_test(t, short_sequences_run_over_many_ranks, 0, 4);
    tcase_add_loop_test(t, meshes_that_do_not_fit_are_usage_errors, 0, 4);
    suite_add_tcase(s, t);
    return s;
}
