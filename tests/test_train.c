/* The trainer and its snapshots: what a step changes and what a failed one does not, what is saved, and
 * what reading it back gives. The command line's tests have the resume law. */
#include "engine_test.h"
#include "manifest.h"
#include "train/train.h"

#include <sys/mman.h>
#include <unistd.h>

enum { SEQ = 12, TOKENS = 4096 };

typedef struct scene {
    ckpt_source src;
    ckpt_model model;
    ckpt_data *data;
    ckpt_trainer t;
    char path[64];
} scene;

static void open_data(scene *s, int mod)
{
    ckpt_data_opts opts = {
        .kind = CKPT_DATA_BYTES, .seq_len = SEQ, .seed = 5, .shuffle = true, .eod = -1};
    const char *path = s->path;
    snprintf(s->path, sizeof s->path, "/tmp/ckpt-train-XXXXXX");
    int fd = mkstemp(s->path);
    ck_assert_int_ge(fd, 0);
    uint8_t bytes[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        bytes[i] = (uint8_t)((i * 7 + i / 13) % mod);
    ck_assert_int_eq(write(fd, bytes, sizeof bytes), TOKENS);
    close(fd);
    OK(ckpt_data_open(&s->data, &path, 1, &opts, &error));
}

static ckpt_schedule constant(double lr)
{
    return (ckpt_schedule){.max_lr = lr,
                           .decay = 1000,
                           .style = CKPT_LR_CONSTANT,
                           .start_wd = 0.1,
                           .end_wd = 0.1,
                           .wd_style = CKPT_WD_CONSTANT};
}

static void open_scene(scene *s, const char *model, ckpt_optim_kind kind, int dtype, double lr)
{
    char path[256];
    ckpt_train_config config = {
        .batch = 4, .micro = 2, .seq_len = SEQ, .mtp_coef = 0.1, .dtype = dtype, .threads = 2};
    ckpt_optim_config optim = ckpt_optim_defaults(kind);
    ckpt_schedule schedule = constant(lr);
    snprintf(path, sizeof path, CKPT_FIXTURES "/%s", model);
    memset(s, 0, sizeof *s);
    OK(ckpt_source_open(&s->src, path, NULL, &error));
    OK(ckpt_model_bind(&s->model, &s->src, NULL, &error));
    open_data(s, 97);
    OK(ckpt_trainer_open(&s->t, &s->model, &config, &optim, &schedule, s->data, &error));
}

static void close_scene(scene *s)
{
    ckpt_trainer_close(&s->t);
    ckpt_data_close(s->data);
    ckpt_model_release(&s->model);
    ckpt_source_close(&s->src);
    unlink(s->path);
}

static const struct {
    const char *model;
    ckpt_optim_kind kind;
    int dtype;
} cases[] = {
    {"fla/kda_trained",        CKPT_OPTIM_ADAMW, CKPT_TRAIN_KEEP},
    {"hf/kimi_linear_tiny",    CKPT_OPTIM_MUON,  CKPT_TRAIN_F32 },
    {"hf/kimi_linear_tiny",    CKPT_OPTIM_ADAMW, CKPT_TRAIN_BF16},
    {"hf/qwen3_next_mtp_tiny", CKPT_OPTIM_MUON,  CKPT_TRAIN_BF16},
};

/* Every parameter with a gradient moves; the loss falls; bf16 weights are bf16 numbers. */
START_TEST(step_moves_every_parameter)
{
    scene s;
    ckpt_train_report first, last;
    open_scene(&s, cases[_i].model, cases[_i].kind, cases[_i].dtype, 3e-3);
    size_t n = (size_t)s.t.net.n_elements;
    float *before = ckpt_arena_memdup(&memory, s.t.net.data, n * sizeof *before);
    OK(ckpt_trainer_step(&s.t, &first, &error));
    for (int i = 0; i < 7; i++)
        OK(ckpt_trainer_step(&s.t, &last, &error));
    ck_assert_double_lt(last.loss, first.loss);
    ck_assert_int_eq(s.t.state.step, 8);
    ck_assert_int_eq(s.t.state.samples, 32);
    ck_assert_int_eq(s.t.state.tokens, 32 * SEQ);
    for (size_t i = 0; i < s.t.net.n_params; i++) {
        const ckpt_optim_slot *slot = &s.t.slots[i];
        bool moved = memcmp(before + slot->at, s.t.net.data + slot->at, (size_t)slot->n * 4) != 0;
        ck_assert_msg(moved, "%s stands still", slot->name);
        for (int64_t k = 0; s.t.is_bf16[i] && k < slot->n; k++) {
            uint32_t bits;
            memcpy(&bits, s.t.net.data + slot->at + k, sizeof bits);
            ck_assert_msg((bits & 0xffff) == 0, "%s is no bf16", slot->name);
        }
    }
    close_scene(&s);
}
END_TEST

/* What is not finite changes nothing, and is named. */
START_TEST(step_not_finite_changes_nothing)
{
    scene s;
    ckpt_train_report r;
    open_scene(&s, "hf/kimi_linear_tiny", CKPT_OPTIM_ADAMW, CKPT_TRAIN_KEEP, 1e-3);
    OK(ckpt_trainer_step(&s.t, &r, &error));
    const ENG(param) *p = ENG(network_param)(&s.t.net, "head.weight");
    p->x[3] = NAN;
    size_t bytes = (size_t)s.t.net.n_elements * 4;
    float *w = ckpt_arena_memdup(&memory, s.t.net.data, bytes);
    float *m = ckpt_arena_memdup(&memory, s.t.m, bytes);
    ck_assert_int_eq(ckpt_trainer_step(&s.t, &r, &error), CKPT_E_MISMATCH);
    ck_assert_msg(strstr(error.text, "step 2: tensor head.weight: element 3 is nan") != NULL, "%s",
                  error.text);
    ck_assert_int_eq(s.t.state.step, 1);
    ck_assert_int_eq(memcmp(w, s.t.net.data, bytes), 0);
    ck_assert_int_eq(memcmp(m, s.t.m, bytes), 0);
    close_scene(&s);
}
END_TEST

/* A snapshot reads back, through the model it makes, as the values that were copied. */
START_TEST(snapshot_reads_back_what_was_copied)
{
    scene s;
    ckpt_train_report r;
    ckpt_snapshot snap;
    ckpt_snapshot_tensor *list;
    size_t n, states = 0;
    open_scene(&s, cases[_i].model, cases[_i].kind, cases[_i].dtype, 1e-3);
    OK(ckpt_trainer_step(&s.t, &r, &error));
    OK(ckpt_trainer_tensors(&s.t, &list, &n, &error));
    OK(ckpt_snapshot_open(&snap, &s.model, list, n, &error));
    OK(ckpt_trainer_copy(&s.t, snap.tensors, n, snap.data, &error));
    for (size_t i = 0; i < s.t.net.n_params; i++) {
        const ENG(param) *p = &s.t.net.params[i];
        int64_t at = ckpt_model_find(&snap.model, p->name);
        ck_assert_int_ge(at, 0);
        const ckpt_canon *c = &snap.model.tensors[at];
        uint8_t *raw = ckpt_arena_alloc(&memory, (size_t)c->bytes + 1);
        OK(ckpt_model_read(&snap.model, (size_t)at, 0, (size_t)c->bytes, raw, &error));
        ck_assert_int_eq(c->dtype, s.t.is_bf16[i] ? CKPT_BF16 : CKPT_F32);
        for (int64_t k = 0; k < p->n; k++)
            ck_assert_float_eq((float)ckpt_dtype_load(c->dtype, raw, k), p->x[k]);
    }
    for (size_t i = 0; i < snap.model.n_tensors; i++)
        states += snap.model.tensors[i].state != NULL;
    ck_assert_uint_eq(states, n - s.t.net.n_params);
    for (size_t i = 1; i < n; i++)
        ck_assert_int_lt(strcmp(snap.model.tensors[i - 1].name, snap.model.tensors[i].name), 0);
    uint8_t byte;
    ck_assert_int_eq(ckpt_source_read(&snap.src, 0, &byte, 1, snap.bytes, &error), CKPT_E_FORMAT);
    ckpt_snapshot_close(&snap);
    free(list);
    close_scene(&s);
}
END_TEST

#ifdef MADV_POPULATE_WRITE
START_TEST(snapshot_has_its_pages_before_the_first_copy)
{
    scene s;
    ckpt_snapshot snap;
    ckpt_snapshot_tensor *list;
    unsigned char here[4096];
    size_t n, missing = 0, before = 0;
    uint64_t at = 0;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *own = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const bool can = madvise(own, page, MADV_POPULATE_WRITE) == 0;
    munmap(own, page);
    if (!can) /* a kernel before 5.14 */
        return;
    open_scene(&s, "hf/kimi_linear_tiny", CKPT_OPTIM_ADAMW, CKPT_TRAIN_F32, 1e-3);
    OK(ckpt_trainer_tensors(&s.t, &list, &n, &error));
    OK(ckpt_snapshot_open(&snap, &s.model, list, n, &error));
    const uintptr_t first = ((uintptr_t)snap.data + page - 1) / page * page,
                    last = ((uintptr_t)snap.data + snap.bytes) / page * page;
    const size_t pages = (last - first) / page;
    ck_assert_uint_gt(pages, 32); /* more than malloc has at hand */
    ck_assert_uint_le(pages, sizeof here);
    ck_assert_int_eq(mincore((void *)first, last - first, here), 0);
    for (size_t i = 0; i < pages; i++)
        before += (here[i] & 1) == 0;
#if !defined(__SANITIZE_THREAD__) /* whose allocator touches what it clears */
    ck_assert_uint_gt(before, pages / 2);
#endif
    while (ckpt_snapshot_populate(&snap, &at))
        ck_assert_uint_le(at, last - first);
    ck_assert_uint_eq(at, last - first);
    ck_assert_int_eq(mincore((void *)first, last - first, here), 0);
    for (size_t i = 0; i < pages; i++)
        missing += (here[i] & 1) == 0;
    ck_assert_uint_eq(missing, 0);
    ckpt_snapshot_close(&snap);
    free(list);
    close_scene(&s);
}
END_TEST
#endif

START_TEST(open_refuses_what_does_not_fit)
{
    scene s;
    open_scene(&s, "hf/llama_tiny_tied", CKPT_OPTIM_ADAMW, CKPT_TRAIN_KEEP, 1e-3);
    ckpt_trainer t;
    ckpt_train_config config = s.t.config;
    ckpt_schedule schedule = constant(1e-3);
    config.micro = 3;
    ck_assert_int_eq(
        ckpt_trainer_open(&t, &s.model, &config, &s.t.optim.config, &schedule, s.data, &error),
        CKPT_E_USAGE);
    ck_assert_str_eq(error.text, "a batch of 4 is not divisible by micro-batch 3");
    config.micro = 2;
    schedule.max_lr = -1;
    ck_assert_int_eq(
        ckpt_trainer_open(&t, &s.model, &config, &s.t.optim.config, &schedule, s.data, &error),
        CKPT_E_USAGE);
    schedule.max_lr = 1;
    config.seq_len = 0;
    ck_assert_int_eq(
        ckpt_trainer_open(&t, &s.model, &config, &s.t.optim.config, &schedule, s.data, &error),
        CKPT_E_USAGE);
    close_scene(&s);
}
END_TEST

/* The manifest carries the training state unchanged, and refuses one that is no object. */
START_TEST(manifest_carries_training)
{
    static const char head[] = "{\"manifest_version\":1,\"files\":{},\"tensors\":{},\"training\":";
    static const char root[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    char text[512];
    ckpt_manifest m;
    ckpt_buf out = {0};
    int64_t step = 0;
    int len =
        snprintf(text, sizeof text, "%s{\"step\":17,\"flops\":1.5},\"root\":\"%s\"}", head, root);
    OK(ckpt_manifest_parse(text, (size_t)len, &m, &error));
    OK(ckpt_manifest_print(&m, &out, &error));
    ckpt_manifest_release(&m);
    OK(ckpt_manifest_parse((const char *)out.data, out.len, &m, &error));
    ck_assert(ckpt_json_int(ckpt_json_get(m.training, "step"), &step));
    ck_assert_int_eq(step, 17);
    ckpt_manifest_release(&m);
    ckpt_buf_release(&out);
    len = snprintf(text, sizeof text, "%s[],\"root\":\"%s\"}", head, root);
    ck_assert_int_eq(ckpt_manifest_parse(text, (size_t)len, &m, &error), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(error.text, "'training' is not an object"));
}
END_TEST

Suite *suite_train(void);
Suite *suite_train(void)
{
    Suite *s = suite_create("train");
    TCase *tc = tcase_create("train");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, step_moves_every_parameter, 0, sizeof cases / sizeof cases[0]);
    tcase_add_test(tc, step_not_finite_changes_nothing);
    tcase_add_loop_test(tc, snapshot_reads_back_what_was_copied, 0, sizeof cases / sizeof cases[0]);
#ifdef MADV_POPULATE_WRITE
    tcase_add_test(tc, snapshot_has_its_pages_before_the_first_copy);
#endif
    tcase_add_test(tc, open_refuses_what_does_not_fit);
    tcase_add_test(tc, manifest_carries_training);
    suite_add_tcase(s, tc);
    return s;
}
