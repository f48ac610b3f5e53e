/* Steps of training as graphs (engine/graph.h), on the emulator, which keeps launches with the arguments they
 * were made with and runs them again: whatever a captured piece took from this process is then what it was.
 * With graphs and without, a run has to give the same bits at changing tokens, rates, counts and steps. */
#define CKPT_REAL 32
#include "engine_test.h"

#include "device.h"
#include "graph.h"
#include "train/train.h"

#include <pthread.h>
#include <unistd.h>

typedef struct scene {
    ckpt_source src;
    ckpt_model model;
    ckpt_data *data;
    ckpt_eng_device device;
    ckpt_trainer t;
} scene;

static void open_scene(scene *s, const char *model, ckpt_optim_kind kind, int dtype, bool graphs,
                       bool recompute)
{
    char path[256];
    const char *corpus = CKPT_FIXTURES "/fla/corpus.txt";
    const ckpt_data_opts opts = {.kind = CKPT_DATA_BYTES,
                                 .seq_len = 10,
                                 .seed = 7,
                                 .shuffle = true,
                                 .vocab = 256,
                                 .eod = -1};
    const ckpt_train_config config = {.batch = 2,
                                      .micro = 1,
                                      .seq_len = 10,
                                      .mtp_coef = 0.1,
                                      .dtype = dtype,
                                      .threads = 1,
                                      .recompute = recompute,
                                      .device = &s->device,
                                      .no_graphs = !graphs};
    ckpt_optim_config optim = ckpt_optim_defaults(kind);
    /* rate and decay change at every step, and gradients are clipped */
    const ckpt_schedule schedule = {.init_lr = 1e-3,
                                    .max_lr = 1e-2,
                                    .min_lr = 1e-3,
                                    .warmup = 8,
                                    .decay = 100,
                                    .style = CKPT_LR_COSINE,
                                    .start_wd = 0.1,
                                    .end_wd = 0.3,
                                    .wd_steps = 100,
                                    .wd_style = CKPT_WD_LINEAR};
    optim.max_norm = 0.5;
    snprintf(path, sizeof path, CKPT_FIXTURES "/%s", model);
    memset(s, 0, sizeof *s);
    OK(ckpt_eng_device_open(&s->device, &ckpt_cuda_plugin_v1, 0, &error));
    OK(ckpt_source_open(&s->src, path, NULL, &error));
    OK(ckpt_model_bind(&s->model, &s->src, NULL, &error));
    OK(ckpt_data_open(&s->data, &corpus, 1, &opts, &error));
    OK(ckpt_trainer_open(&s->t, &s->model, &config, &optim, &schedule, s->data, &error));
}

static void close_scene(scene *s)
{
    ckpt_trainer_close(&s->t);
    ckpt_eng_device_close(&s->device);
    ckpt_data_close(s->data);
    ckpt_model_release(&s->model);
    ckpt_source_close(&s->src);
}

static void same_array(const scene *a, const scene *b, const float *x, const float *y,
                       const char *what)
{
    const ckpt_trainer *t = &a->t;
    const size_t n = (size_t)t->net.n_elements;
    float *left = zeros(t->net.n_elements), *right = zeros(t->net.n_elements);
    OK(ckpt_eng_get(&t->e, left, x, n * sizeof *x, &error));
    OK(ckpt_eng_get(&b->t.e, right, y, n * sizeof *y, &error));
    for (size_t i = 0; i < t->net.n_params; i++)
        ck_assert_msg(memcmp(left + t->slots[i].at, right + t->slots[i].at,
                             (size_t)t->net.params[i].n * sizeof *left) == 0,
                      "%s of %s differs", what, t->slots[i].name);
}

static const struct {
    const char *model;
    ckpt_optim_kind kind;
    int dtype;
    bool recompute;
} runs[] = {
    {"hf/kimi_linear_tiny",    CKPT_OPTIM_MUON,  CKPT_TRAIN_BF16, true },
    {"hf/deepseek_v3_tiny",    CKPT_OPTIM_ADAMW, CKPT_TRAIN_BF16, false},
    {"hf/qwen3_next_mtp_tiny", CKPT_OPTIM_ADAMW, CKPT_TRAIN_F32,  false},
};

/* Three steps of two micro-batches: pieces run once plainly, and from the second time on as graphs. */
START_TEST(steps_with_graphs_give_the_bits_of_steps_without)
{
    enum { STEPS = 3, ROUNDS = 2, PIECES = 4 };
    scene a, b;
    ckpt_train_report last = {0};
    open_scene(&a, runs[_i].model, runs[_i].kind, runs[_i].dtype, true, runs[_i].recompute);
    open_scene(&b, runs[_i].model, runs[_i].kind, runs[_i].dtype, false, runs[_i].recompute);
    ck_assert_ptr_null(b.t.graphs);
    for (int i = 0; i < STEPS; i++) {
        ckpt_train_report x, y;
        OK(ckpt_trainer_step(&a.t, &x, &error));
        OK(ckpt_trainer_step(&b.t, &y, &error));
        ck_assert_double_eq(x.loss, y.loss);
        ck_assert_double_eq(x.mtp_loss, y.mtp_loss);
        ck_assert_double_eq(x.aux_loss, y.aux_loss);
        ck_assert_double_eq(x.grad_norm, y.grad_norm);
        ck_assert(x.clipped && x.lr != last.lr && x.wd != last.wd && x.loss != last.loss);
        for (int64_t k = 0; k < a.t.n_counts; k++)
            ck_assert_int_eq(a.t.counts[k], b.t.counts[k]);
        last = x;
    }
    ck_assert_msg(!a.t.graphs->off, "%s", a.t.graphs->why);
    ck_assert_int_eq(a.t.graphs->captures, PIECES);
    ck_assert_int_eq(a.t.graphs->plain, PIECES);
    ck_assert_int_eq(a.t.graphs->launches, STEPS * (ROUNDS + PIECES - 1) - PIECES);
    same_array(&a, &b, a.t.net.data, b.t.net.data, "value");
    same_array(&a, &b, a.t.m, b.t.m, "first moment");
    same_array(&a, &b, a.t.v, b.t.v, "second moment");
    if (a.t.master != NULL)
        same_array(&a, &b, a.t.master, b.t.master, "master");
    close_scene(&a);
    close_scene(&b);
}
END_TEST

/* ---- copies beside steps ---------------------------------------------------------------------- */

typedef struct step_job {
    ckpt_trainer *t;
    ckpt_status status;
    ckpt_err err;
} step_job;

static void *take_step(void *arg)
{
    step_job *j = arg;
    ckpt_train_report r;
    j->status = ckpt_trainer_step(j->t, &r, &j->err);
    return NULL;
}

/* A step that began while tensors are to be copied comes to its optimizer and waits there; the copy has the
 * values of before it, to the bit, and then the step goes on. */
START_TEST(copy_beside_a_step_has_the_values_before_it)
{
    scene s;
    ckpt_train_report r;
    ckpt_snapshot_tensor *list = NULL;
    ckpt_snapshot before = {0}, beside = {0}, after = {0};
    size_t n = 0;
    pthread_t thread;
    open_scene(&s, "hf/llama_tiny_tied", CKPT_OPTIM_ADAMW, CKPT_TRAIN_BF16, true, false);
    OK(ckpt_trainer_step(&s.t, &r, &error));
    OK(ckpt_trainer_tensors(&s.t, &list, &n, &error));
    OK(ckpt_snapshot_open(&before, &s.model, list, n, &error));
    OK(ckpt_snapshot_open(&beside, &s.model, list, n, &error));
    OK(ckpt_snapshot_open(&after, &s.model, list, n, &error));
    OK(ckpt_trainer_copy(&s.t, before.tensors, n, before.data, &error));
    OK(ckpt_trainer_copy_begin(&s.t, &error));
    step_job j = {.t = &s.t};
    ck_assert_int_eq(pthread_create(&thread, NULL, take_step, &j), 0);
    for (int i = 0; i < 60000 && !ckpt_trainer_waits(&s.t); i++)
        usleep(1000);
    ck_assert(ckpt_trainer_waits(&s.t));
    OK(ckpt_trainer_copy_beside(&s.t, beside.tensors, n, beside.data, &error));
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_msg(j.status == CKPT_OK, "%s", j.err.text);
    OK(ckpt_trainer_copy(&s.t, after.tensors, n, after.data, &error));
    ck_assert_mem_eq(before.data, beside.data, before.bytes);
    for (size_t i = 0; i < n; i++)
        ck_assert(memcmp(before.data + before.tensors[i].offset,
                         after.data + after.tensors[i].offset, before.tensors[i].bytes) != 0 ||
                  after.tensors[i].dtype == CKPT_BF16);
    ckpt_snapshot_close(&before);
    ckpt_snapshot_close(&beside);
    ckpt_snapshot_close(&after);
    free(list);
    close_scene(&s);
}
END_TEST

/* ---- one piece -------------------------------------------------------------------------------- */

typedef struct piece_job {
    const ckpt_cuda_plugin *api;
    const ckpt_eng *e;
    float *x; /* the device's */
    float by; /* this process's */
    int64_t n;
    bool brings; /* copies to the device in the midst of it */
    int called;
} piece_job;

static ckpt_status scale_piece(void *self, ckpt_err *err)
{
    piece_job *j = self;
    const ckpt_cuda c = {.type = CKPT_CUDA_F32, .stream = j->e->device->card.stream};
    const float own = 2;
    j->called++;
    ckpt_status status = j->api->scale(&c, j->n, j->by, j->x, err);
    if (status == CKPT_OK && j->brings)
        status = j->api->put(&j->e->device->card, j->x, &own, sizeof own, err);
    return status;
}

typedef struct bench {
    ckpt_eng_device device;
    ckpt_eng e;
    ckpt_eng_graphs graphs;
    piece_job j;
} bench;

static void open_bench(bench *b)
{
    void *x = NULL;
    memset(b, 0, sizeof *b);
    OK(ckpt_eng_device_open(&b->device, &ckpt_cuda_plugin_v1, 0, &error));
    ckpt_eng_init(&b->e, 1);
    b->e.device = &b->device;
    b->e.graphs = &b->graphs;
    OK(ckpt_eng_reserve(&b->e, 1 << 16, &error));
    OK(ckpt_eng_memory_new(&b->e, 8, sizeof(float), &x, &error));
    b->j = (piece_job){.api = b->device.api, .e = &b->e, .x = x, .by = 3, .n = 8};
}

static void close_bench(bench *b)
{
    ckpt_eng_memory_free(&b->e, b->j.x);
    ckpt_eng_graphs_close(&b->e, &b->graphs);
    ckpt_eng_release(&b->e);
    ckpt_eng_device_close(&b->device);
}

static float piece_on(bench *b, int64_t key, float from)
{
    static const char name[] = "scale";
    const ckpt_eng_graph_key k = {.piece = name, .n = {key}};
    float x[8] = {from};
    OK(ckpt_eng_put(&b->e, b->j.x, x, sizeof x, &error));
    OK(ckpt_eng_graph_run(&b->e, &k, scale_piece, &b->j, &error));
    OK(ckpt_eng_get(&b->e, x, b->j.x, sizeof x, &error));
    return x[0];
}

/* A graph reads the device's memory anew and keeps this process's numbers: the scale of the capture. */
START_TEST(graph_keeps_arguments_and_reads_memory)
{
    bench b;
    open_bench(&b);
    ck_assert_float_eq(piece_on(&b, 1, 1), 3); /* as it is */
    b.j.by = 5;
    ck_assert_float_eq(piece_on(&b, 1, 1), 5); /* captured */
    b.j.by = 7;
    ck_assert_float_eq(piece_on(&b, 1, 10), 50);
    ck_assert_int_eq(b.j.called, 2);
    ck_assert_float_eq(piece_on(&b, 2, 1), 7); /* another key */
    ck_assert_int_eq(b.j.called, 3);
    const size_t mark = ckpt_eng_mark(&b.e);
    ck_assert_ptr_nonnull(ckpt_eng_take(&b.e, 1, 64));
    b.j.by = 11;
    ck_assert_float_eq(piece_on(&b, 1, 1), 11); /* another level of the arena */
    ckpt_eng_drop(&b.e, mark);
    ck_assert_float_eq(piece_on(&b, 1, 1), 5);
    ck_assert_int_eq(b.graphs.captures, 1);
    ck_assert_int_eq(b.graphs.launches, 3);
    ck_assert_int_eq(b.graphs.nodes, 1);
    close_bench(&b);
}
END_TEST

/* What copies from this process cannot be captured: it goes on running as it is, and why is kept. */
START_TEST(piece_that_cannot_be_captured_runs_plainly)
{
    bench b;
    open_bench(&b);
    b.j.brings = true;
    for (int i = 0; i < 4; i++) {
        b.j.by = (float)i;
        ck_assert_float_eq(piece_on(&b, 1, 1), 2);
    }
    ck_assert(b.graphs.off);
    ck_assert_str_eq(b.graphs.why, "CUDA: a copy to the device while work is captured");
    ck_assert_int_eq(b.graphs.plain, 4);
    ck_assert_int_eq(b.graphs.launches, 0);
    b.j.brings = false;
    ck_assert_float_eq(piece_on(&b, 3, 2), 6);
    close_bench(&b);
}
END_TEST

/* Beyond the keys there is room for, pieces run as they are. */
START_TEST(keys_beyond_the_table_run_plainly)
{
    bench b;
    open_bench(&b);
    for (int round = 0; round < 3; round++)
        for (int64_t key = 0; key < CKPT_ENG_GRAPHS + 2; key++) {
            b.j.by = (float)(key + 1);
            ck_assert_float_eq(piece_on(&b, key, 2), (float)(2 * (key + 1)));
        }
    ck_assert_int_eq(b.graphs.captures, CKPT_ENG_GRAPHS);
    ck_assert_int_eq(b.graphs.launches, 2 * CKPT_ENG_GRAPHS);
    ck_assert_int_eq(b.graphs.plain, CKPT_ENG_GRAPHS + 6);
    close_bench(&b);
}
END_TEST

Suite *suite_graph_cuda(void);
Suite *suite_graph_cuda(void)
{
    Suite *s = suite_create("graph_cuda");
    TCase *t = tcase_create("graph");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, steps_with_graphs_give_the_bits_of_steps_without, 0,
                        (int)(sizeof runs / sizeof *runs));
    tcase_add_test(t, copy_beside_a_step_has_the_values_before_it);
    tcase_add_test(t, graph_keeps_arguments_and_reads_memory);
    tcase_add_test(t, piece_that_cannot_be_captured_runs_plainly);
    tcase_add_test(t, keys_beyond_the_table_run_plainly);
    suite_add_tcase(s, t);
    return s;
}
