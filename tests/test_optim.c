/* Optimizer state: what names mean, what is bound to which parameter, and what is refused. Sources
 * are names and shapes in memory; only scalars are read. */
#include "json.h"
#include "model.h"
#include "model_space.h"
#include "plan.h"
#include "rescue.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TENSORS 32

typedef struct fake {
    ckpt_source src;
    ckpt_tensor tensors[MAX_TENSORS];
    ckpt_chunk chunks[MAX_TENSORS];
    int64_t dims[MAX_TENSORS][4];
    char names[MAX_TENSORS][128];
    ckpt_file file;
} fake;

static const int64_t zeros[4];

static void add(fake *f, const char *name, int rank, int64_t a, int64_t b)
{
    size_t i = f->src.n_tensors++;
    ck_assert_uint_lt(i, MAX_TENSORS);
    snprintf(f->names[i], sizeof f->names[i], "%s", name);
    f->dims[i][0] = a;
    f->dims[i][1] = b;
    f->chunks[i] = (ckpt_chunk){.lo = zeros, .len = f->dims[i]};
    f->tensors[i] = (ckpt_tensor){.name = f->names[i],
                                  .dims = f->dims[i],
                                  .rank = rank,
                                  .dtype = CKPT_F32,
                                  .chunks = &f->chunks[i],
                                  .n_chunks = 1};
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

/* One MLP block of a Megatron hybrid: fc1 holds gate and up. */
static void begin(fake *f)
{
    memset(f, 0, sizeof *f);
    f->file = (ckpt_file){.name = "x", .path = "x", .size = INT64_MAX, .fd = -1};
    f->src.files = &f->file;
    f->src.n_files = 1;
    f->src.tensors = f->tensors;
    add(f, "embedding.word_embeddings.weight", 2, 40, 16);
    add(f, "output_layer.weight", 2, 40, 16);
    add(f, "decoder.final_norm.weight", 1, 16, 0);
    add(f, "decoder.layers.0.pre_mlp_layernorm.weight", 1, 16, 0);
    add(f, "decoder.layers.0.mlp.linear_fc1.weight", 2, 48, 16);
    add(f, "decoder.layers.0.mlp.linear_fc2.weight", 2, 16, 24);
}

static ckpt_status bind(fake *f, ckpt_model *m, bool lenient, ckpt_err *err)
{
    ckpt_model_opts opts = {.lenient = lenient};
    qsort(f->tensors, f->src.n_tensors, sizeof *f->tensors, by_name);
    return ckpt_model_bind(m, &f->src, &opts, err);
}

/* ---- names ------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *word, *tag; /* word NULL: not a state of a stored parameter */
    ckpt_state_kind kind;
} spelled[] = {
    {"optimizer.state.exp_avg.w.x",                   "exp_avg",    "optim=reshardable", CKPT_STATE_OF      },
    {"optimizer.state.param.w.x",                     "master",     "optim=reshardable", CKPT_STATE_OF      },
    {"optimizer.state.fp32_param.w.x",                "master",     "optim=model_space", CKPT_STATE_OF      },
    {"optimizer.state.momentum_buffer.w.x",           "momentum",   "optim=model_space", CKPT_STATE_OF      },
    {"optimizer.state.my_state.w.x",                  "my_state",   "optim=reshardable", CKPT_STATE_OF      },
    {"chained_1.optimizer.state.exp_avg_sq.w.x",      "exp_avg_sq", "optim=chained",     CKPT_STATE_OF      },
    {"optim.state.w.x.exp_avg",                       "exp_avg",    "optim=optim",       CKPT_STATE_OF      },
    {"optim.state.v.exp_avg",                         "exp_avg",    "optim=optim",       CKPT_STATE_OF      },
    {"optimizer.state.w.x.step",                      "step",       "optim=optimizer",   CKPT_STATE_OF      },
    {"state.w.x.step",                                "step",       "optim=state",       CKPT_STATE_OF      },
    {"optimizer.state.exp_avg.w.y",                   NULL,         NULL,                CKPT_STATE_ORPHAN  },
    {"optim.state.w.y.exp_avg",                       NULL,         NULL,                CKPT_STATE_ORPHAN  },
    {"optimizer.state.0.exp_avg",                     NULL,         NULL,                CKPT_STATE_NUMBERED},
    {"optimizer.state.17.step",                       NULL,         NULL,                CKPT_STATE_NUMBERED},
    {"optimizer.distributed.dp_group_idx_0.x",        NULL,         NULL,                CKPT_STATE_BUCKET  },
    {"chained_0.optimizer.distributed.dp_group_idx_", NULL,         NULL,                CKPT_STATE_BUCKET  },
    {"optimizer.lr",                                  NULL,         NULL,                CKPT_STATE_OTHER   },
    {"optimizer.state.",                              NULL,         NULL,                CKPT_STATE_OTHER   },
    {"optimizer.state.exp_avg.",                      NULL,         NULL,                CKPT_STATE_ORPHAN  },
    {"chained_.optimizer.state.exp_avg.w.x",          NULL,         NULL,                CKPT_STATE_ORPHAN  },
    {"opt.state.w.x.exp_avg",                         "exp_avg",    "optim=opt",         CKPT_STATE_OF      },
    {"optimizer_state_dict.state.w.x.step",           "step",       "optim=state_dict",  CKPT_STATE_OF      },
    {"opt.state.exp_avg",                             NULL,         NULL,                CKPT_STATE_ORPHAN  },
    {"osd.state.buf",                                 NULL,         NULL,                CKPT_STATE_OTHER   },
    {"optimizer_states.0.state.3.exp_avg",            NULL,         NULL,                CKPT_STATE_NUMBERED},
    {"train.opt.param_groups.0.lr",                   NULL,         NULL,                CKPT_STATE_OTHER   },
    {"optimizer_state_dict.param_groups.w.x.lr",      NULL,         NULL,                CKPT_STATE_OTHER   },
    {"adopt.state.w.y.exp_avg",                       NULL,         NULL,                CKPT_STATE_NONE    },
    {"opt.param_groups_of.x",                         NULL,         NULL,                CKPT_STATE_NONE    },
    {"state.w.y.step",                                NULL,         NULL,                CKPT_STATE_NONE    },
    {"optim",                                         NULL,         NULL,                CKPT_STATE_NONE    },
    {"w.x",                                           NULL,         NULL,                CKPT_STATE_NONE    },
};

START_TEST(names_say_state_and_parameter)
{
    fake f = {.src.tensors = f.tensors};
    ckpt_arena arena = {0};
    ckpt_state_ref ref;
    ckpt_state state = {0};
    add(&f, "model.v", 1, 2, 0);
    add(&f, "w.x", 1, 2, 0);
    ckpt_state_parse(&f.src, spelled[_i].name, &ref);
    ck_assert_int_eq(ref.kind, spelled[_i].kind);
    ck_assert_int_eq(ckpt_is_optimizer(&f.src, spelled[_i].name), ref.kind != CKPT_STATE_NONE);
    if (spelled[_i].word != NULL) {
        ck_assert(ckpt_state_make(&arena, spelled[_i].name, &ref, &state));
        ck_assert_str_eq(state.name, spelled[_i].word);
        ck_assert_str_eq(state.tag, spelled[_i].tag);
        const char *key = ref.param == 0 ? "v" : "w.x";
        char whole[128];
        snprintf(whole, sizeof whole, "%s%s%s", state.before, key, state.after);
        ck_assert_str_eq(whole, spelled[_i].name);
        if (strcmp(state.tag, "optim=chained") != 0 || strncmp(whole, "chained_1", 9) == 0)
            ck_assert_str_eq(ckpt_state_spell(&arena, state.tag, state.name, key, true), whole);
    } else {
        ck_assert_int_eq(ref.param, -1);
    }
    ckpt_arena_free(&arena);
}
END_TEST

/* ---- binding ----------------------------------------------------------------------------------- */

START_TEST(states_are_bound_as_their_parameter)
{
    fake f;
    ckpt_model m;
    ckpt_err err = {0};
    begin(&f);
    add(&f, "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight", 2, 48, 16);
    add(&f, "optimizer.state.exp_avg_sq.decoder.layers.0.mlp.linear_fc1.weight", 2, 48, 16);
    add(&f, "optimizer.state.fp32_param.decoder.layers.0.mlp.linear_fc1.weight", 2, 48, 16);
    add(&f, "optimizer.state.step.decoder.layers.0.mlp.linear_fc1.weight", 0, 0, 0);
    ck_assert_msg(bind(&f, &m, false, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(m.n_tensors, 7 + 8);
    int64_t at = ckpt_model_find(&m, "optimizer.master.blocks.0.mlp.up.weight");
    int64_t param = ckpt_model_find(&m, "blocks.0.mlp.up.weight");
    ck_assert_int_ge(at, 0);
    ck_assert_int_ge(param, 0);
    const ckpt_canon *c = &m.tensors[at], *w = &m.tensors[param];
    ck_assert_str_eq(c->param, w->name);
    ck_assert_int_eq(c->dims[0], 24);
    ck_assert_int_eq(c->map.n, w->map.n);
    for (int i = 0; i < c->map.n; i++)
        ck_assert_int_eq(c->map.axis[i].lo, w->map.axis[i].lo);
    ck_assert_ptr_eq(c->row, w->row);
    at = ckpt_model_find(&m, "optimizer.step.blocks.0.mlp.gate.weight");
    ck_assert_int_ge(at, 0);
    ck_assert(m.tensors[at].state->scalar);
    ck_assert_uint_eq(m.tensors[at].bytes, 4);
    ck_assert_ptr_nonnull(strstr(m.tags, "optim=model_space"));
    ck_assert_uint_ge(m.n_notes, 1);
    ck_assert_str_eq(m.notes[0], "5 of 6 tensors have no optimizer state "
                                 "(decoder.final_norm.weight, …)");
    ckpt_model_release(&m);
}
END_TEST

/* Megatron-FSDP: "optimizer.state.NAME.STATE" with NAME as named_parameters() of the wrapped model gives
 * it, "module." for every wrapper, beside the model's own names. Source: Megatron-Core 0.16.1,
 * DistributedOptimizer._param_name and sharded_param_state_fsdp_dtensor. */
START_TEST(states_under_wrappers_are_bound_as_their_parameter)
{
    static const char *const wrappers[] = {"", "module.", "module.module."};
    char name[128];
    fake f;
    ckpt_model m;
    ckpt_err err = {0};
    begin(&f);
    for (int k = 0; k < 2; k++) {
        snprintf(name, sizeof name, "optimizer.state.%sdecoder.layers.0.mlp.linear_fc1.weight.%s",
                 wrappers[_i], k == 0 ? "exp_avg" : "exp_avg_sq");
        add(&f, name, 2, 48, 16);
    }
    ck_assert_msg(bind(&f, &m, false, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(m.n_tensors, 7 + 4);
    int64_t at = ckpt_model_find(&m, "optimizer.exp_avg_sq.blocks.0.mlp.up.weight");
    ck_assert_int_ge(at, 0);
    ck_assert_str_eq(m.tensors[at].param, "blocks.0.mlp.up.weight");
    ck_assert_str_eq(f.src.tensors[m.tensors[at].stored].name, name);
    ckpt_model_release(&m);
}
END_TEST

/* ---- fully_sharded_model_space ----------------------------------------------------------------- */

#define SHARDING "\"param_state_sharding_type\":"
#define MODEL_SPACE SHARDING "\"fully_sharded_model_space\""
/* clang-format off */
static const struct {
    const char *common;
    bool found;
} said[] = {
    {"{\"optimizer\":{" MODEL_SPACE "}}", true},
    {"{\"optimizer\":{\"0\":{},\"1\":{" MODEL_SPACE "}}}", true},
    {"{\"optimizer\":{" SHARDING "\"fully_reshardable\"}}", false},
    {"{\"optimizer\":{" SHARDING "7}}", false},
    {"{\"optimizer\":3}", false},
    {"{}", false},
};
/* clang-format on */

START_TEST(model_space_is_what_the_common_state_says)
{
    ckpt_err err = {0};
    ckpt_source src = {0};
    ck_assert(!ckpt_model_space_found(&src));
    ck_assert_msg(ckpt_json_parse(said[_i].common, strlen(said[_i].common), &src.common, &err) ==
                      CKPT_OK,
                  "%s", err.text);
    ck_assert_int_eq(ckpt_model_space_found(&src), said[_i].found);
    ckpt_json_free(src.common);
}
END_TEST

START_TEST(model_space_names_become_those_of_fully_reshardable)
{
    fake f = {.src.tensors = f.tensors};
    ckpt_err err = {0};
    add(&f, "chained_2.optimizer.state.fp32_param.w", 1, 2, 0);
    add(&f, "chained_x.optimizer.state.fp32_param.w", 1, 2, 0); /* none of Megatron's */
    add(&f, "optimizer.state.fp32_param.w", 1, 2, 0);
    add(&f, "optimizer.state.momentum_buffer.w", 1, 2, 0);
    ck_assert_msg(ckpt_model_space_rename(&f.src, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(f.tensors[0].name, "chained_2.optimizer.state.param.w");
    ck_assert_str_eq(f.tensors[1].name, "chained_x.optimizer.state.fp32_param.w");
    ck_assert_str_eq(f.tensors[2].name, "optimizer.state.momentum_buffer.w");
    ck_assert_str_eq(f.tensors[3].name, "optimizer.state.param.w");
    add(&f, "optimizer.state.fp32_param.w", 1, 2, 0);
    ck_assert_int_eq(ckpt_model_space_rename(&f.src, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "'optimizer.state.param.w': stored under"));
    ckpt_arena_free(&f.src.arena);
}
END_TEST

#define FC2 "decoder.layers.0.mlp.linear_fc2.weight"
static const struct {
    const char *name;
    int64_t a, b;
    ckpt_status status;
    const char *text;
} refused[] = {
    {"optimizer.state.exp_avg." FC2,              16, 24, CKPT_E_FORMAT,
     "exp_avg is stored, exp_avg_sq is missing"                                                                 },
    {"optimizer.state.exp_avg_sq." FC2,           16, 24, CKPT_E_FORMAT,
     "exp_avg_sq is stored, exp_avg is missing"                                                                 },
    {"optimizer.state.param." FC2,                16, 23, CKPT_E_FORMAT,      "another shape than its parameter"},
    {"optimizer.state.exp_avg.decoder.nothing",   16, 24, CKPT_E_FORMAT,
     "a parameter that is not stored"                                                                           },
    {"optimizer.state.3.exp_avg",                 16, 24, CKPT_E_UNSUPPORTED, "by parameter number"             },
    {"optimizer.distributed.dp_group_idx_0.bits", 16, 24, CKPT_E_UNSUPPORTED, "dp_reshardable"                  },
    {"optimizer.lr",                              16, 24, CKPT_E_UNSUPPORTED, "1 tensor not in this model"      },
};

START_TEST(states_that_fit_nothing_are_refused)
{
    fake f;
    ckpt_model m;
    ckpt_err err = {0};
    begin(&f);
    add(&f, refused[_i].name, 2, refused[_i].a, refused[_i].b);
    ck_assert_int_eq(bind(&f, &m, false, &err), refused[_i].status);
    ck_assert_msg(strstr(err.text, refused[_i].text) != NULL, "%s", err.text);
    ck_assert_int_eq(bind(&f, &m, true, &err),
                     refused[_i].a == 16 && refused[_i].b == 23 ? CKPT_E_FORMAT : CKPT_OK);
    ckpt_model_release(&m);
}
END_TEST

/* Momentum without a second moment, and another second moment, are whole states. */
START_TEST(other_optimizers_have_other_pairs)
{
    fake f;
    ckpt_model m;
    ckpt_err err = {0};
    begin(&f);
    add(&f, "optimizer.state.momentum_buffer." FC2, 2, 16, 24);
    add(&f, "optimizer.state.exp_avg.decoder.final_norm.weight", 1, 16, 0);
    add(&f, "optimizer.state.exp_inf.decoder.final_norm.weight", 1, 16, 0);
    ck_assert_msg(bind(&f, &m, false, &err) == CKPT_OK, "%s", err.text);
    ck_assert_int_ge(ckpt_model_find(&m, "optimizer.momentum.blocks.0.mlp.down.weight"), 0);
    ck_assert_int_ge(ckpt_model_find(&m, "optimizer.exp_inf.final_norm.weight"), 0);
    ckpt_model_release(&m);
}
END_TEST

/* ---- rescue ------------------------------------------------------------------------------------ */

/* Weights "layers.1.w" and "layers.0.w" [2, 40] and "norm" [8], and one bucket with its states. All
 * values are f32 and lie in `memory`. */
static float memory[4096];

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    (void)src;
    (void)file;
    if (offset > sizeof memory || n > sizeof memory - offset)
        return ckpt_fail(err, CKPT_E_FORMAT, "past the end");
    memcpy(buf, (const uint8_t *)memory + offset, n);
    return CKPT_OK;
}

static void place(fake *f, const char *name, size_t at)
{
    for (size_t i = 0; i < f->src.n_tensors; i++)
        if (strcmp(f->names[i], name) == 0)
            f->chunks[i].offset = 4 * at;
}

#define GROUP "optimizer.distributed.dp_group_idx_0.gbuf_idx_0."
#define TYPE "dtype_(torch.float32, torch.float32).bucket_idx_0."

/* 64-aligned: norm at 0, layers.1.w at 64, layers.0.w at 192 (80 + 64 rounded up), end 272. */
static void rescue_begin(fake *f)
{
    memset(f, 0, sizeof *f);
    f->file = (ckpt_file){.name = "x", .path = "x", .size = sizeof memory, .fd = -1};
    f->src.files = &f->file;
    f->src.n_files = 1;
    f->src.tensors = f->tensors;
    f->src.read_at = read_memory;
    add(f, "layers.0.w", 2, 2, 40);
    add(f, "layers.1.w", 2, 2, 40);
    add(f, "norm", 1, 8, 0);
    place(f, "layers.0.w", 0);
    place(f, "layers.1.w", 80);
    place(f, "norm", 160);
    static const char *const states[] = {"exp_avg", "exp_avg_sq", "param"};
    for (int s = 0; s < 3; s++) {
        char name[128];
        snprintf(name, sizeof name, GROUP TYPE "%s", states[s]);
        add(f, name, 1, 272, 0);
        place(f, name, (size_t)(512 * (s + 1)));
    }
    for (int i = 0; i < 168; i++)
        memory[i] = (float)i + 0.5F;
    for (int s = 0; s < 3; s++) {
        float *b = memory + 512 * (s + 1), add_to = s == 2 ? 0.0F : 1000.0F * (float)(s + 1);
        for (int i = 0; i < 272; i++)
            b[i] = -1;
        for (int i = 0; i < 8; i++)
            b[i] = memory[160 + i] + add_to;
        for (int i = 0; i < 80; i++) {
            b[64 + i] = memory[80 + i] + add_to;
            b[192 + i] = memory[i] + add_to;
        }
    }
}

static void rescue_sort(fake *f)
{
    qsort(f->tensors, f->src.n_tensors, sizeof *f->tensors, by_name);
}

START_TEST(buckets_are_given_back_by_value)
{
    fake f;
    ckpt_err err = {0};
    static int64_t lo[2] = {0, 100}, len[2] = {100, 172};
    ckpt_chunk cut[3][2];
    rescue_begin(&f);
    for (int s = 0; s < 3; s++) { /* element 100 lies inside layers.1.w */
        ckpt_tensor *t = &f.tensors[3 + s];
        cut[s][0] = cut[s][1] = t->chunks[0];
        for (int k = 0; k < 2; k++) {
            cut[s][k].lo = &lo[k];
            cut[s][k].len = &len[k];
        }
        cut[s][1].offset += 400;
        t->chunks = cut[s];
        t->n_chunks = 2;
    }
    rescue_sort(&f);
    ck_assert(ckpt_rescue_needed(&f.src));
    ck_assert_msg(ckpt_rescue(&f.src, &err) == CKPT_OK, "%s", err.text);
    ck_assert(!ckpt_rescue_needed(&f.src));
    ck_assert_uint_eq(f.src.n_tensors, 3 + 9);
    int64_t at = ckpt_source_find(&f.src, "optimizer.state.exp_avg_sq.layers.1.w");
    ck_assert_int_ge(at, 0);
    const ckpt_tensor *t = &f.src.tensors[at];
    ck_assert_int_eq(t->rank, 2);
    ck_assert_int_eq(t->dims[1], 40);
    ck_assert_uint_eq(t->n_chunks, 3); /* up to the cut, the rest of that row, the next row */
    int64_t seen = 0;
    for (size_t c = 0; c < t->n_chunks; c++) {
        const ckpt_chunk *k = &t->chunks[c];
        for (int64_t i = 0; i < k->len[0] * k->len[1]; i++, seen++) {
            int64_t flat = (k->lo[0] + i / k->len[1]) * 40 + k->lo[1] + i % k->len[1];
            ck_assert(memory[k->offset / 4 + (uint64_t)i] == memory[80 + flat] + 2000.0F);
        }
    }
    ck_assert_int_eq(seen, 80);
    ckpt_arena_free(&f.src.arena);
}
END_TEST

/* Equal values: layers are told apart by the module order, other things are not. */
START_TEST(buckets_with_equal_values_need_an_order)
{
    fake f;
    ckpt_err err = {0};
    rescue_begin(&f);
    for (int i = 0; i < 160; i++)
        memory[i] = 1;
    for (int i = 0; i < 80; i++)
        memory[512 * 3 + 64 + i] = memory[512 * 3 + 192 + i] = 1;
    rescue_sort(&f);
    ck_assert_msg(ckpt_rescue(&f.src, &err) == CKPT_OK, "%s", err.text);
    int64_t at = ckpt_source_find(&f.src, "optimizer.state.exp_avg.layers.1.w");
    ck_assert_int_ge(at, 0);
    ck_assert_uint_eq(f.src.tensors[at].chunks[0].offset,
                      4 * (512 + 64)); /* the later layer first */
    ckpt_arena_free(&f.src.arena);
    rescue_begin(&f);
    add(&f, "other", 1, 8, 0);
    place(&f, "other", 160);
    rescue_sort(&f);
    ck_assert_int_eq(ckpt_rescue(&f.src, &err), CKPT_E_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, "'norm' and 'other' have equal values") != NULL, "%s", err.text);
    ck_assert(ckpt_rescue_needed(&f.src));
    ckpt_arena_free(&f.src.arena);
}
END_TEST

static const struct {
    const char *what, *text;
} unproved[] = {
    {"value",  "no stored weight equals the rounded master copy from element 192 of 272"},
    {"master", "no f32 master copy"                                                     },
    {"fp8",    "are not their rounded master copy"                                      },
    {"size",   "not a state of the bucket"                                              },
    {"name",   "no dp_reshardable bucket"                                               },
    {"part",   "only 1 of 2 parts of 'layers.0.w'"                                      },
};

START_TEST(buckets_that_are_not_proved_are_refused)
{
    fake f;
    ckpt_err err = {0};
    static const int64_t lo[2][2] =
        {
            {0, 0},
            {1, 0}
    },
                         half[2] = {1, 40};
    ckpt_chunk cut[2];
    rescue_begin(&f);
    const char *what = unproved[_i].what;
    if (strcmp(what, "value") == 0)
        memory[512 * 3 + 192 + 79] = 0;
    if (strcmp(what, "master") == 0)
        f.src.n_tensors--;
    for (int s = 3; s < 6; s++) {
        const char *type = strcmp(what, "fp8") == 0    ? "torch.uint8"
                           : strcmp(what, "name") == 0 ? "numpy.float"
                                                       : NULL;
        if (type != NULL)
            snprintf(f.names[s], sizeof f.names[s],
                     GROUP "dtype_(%s, torch.float32).bucket_idx_0.%s", type,
                     s == 3   ? "exp_avg"
                     : s == 4 ? "exp_avg_sq"
                              : "param");
    }
    if (strcmp(what, "size") == 0)
        f.dims[4][0] = 271;
    if (strcmp(what, "part") == 0) {
        for (int k = 0; k < 2; k++)
            cut[k] = (ckpt_chunk){.lo = lo[k], .len = half, .offset = (uint64_t)k * 160};
        f.tensors[0].chunks = cut;
        f.tensors[0].n_chunks = 2;
        for (int s = 3; s < 6; s++)
            f.dims[s][0] = 232; /* the second row of layers.0.w is not there */
    }
    rescue_sort(&f);
    ckpt_status status = ckpt_rescue(&f.src, &err);
    ck_assert(status == CKPT_E_UNSUPPORTED || (_i == 3 && status == CKPT_E_FORMAT));
    ck_assert_msg(strstr(err.text, unproved[_i].text) != NULL, "%s", err.text);
    ckpt_arena_free(&f.src.arena);
}
END_TEST

Suite *suite_optim(void);
Suite *suite_optim(void)
{
    Suite *s = suite_create("optim");
    TCase *t = tcase_create("names");
    tcase_add_loop_test(t, names_say_state_and_parameter, 0,
                        (int)(sizeof spelled / sizeof *spelled));
    suite_add_tcase(s, t);
    t = tcase_create("binding");
    tcase_add_test(t, states_are_bound_as_their_parameter);
    tcase_add_loop_test(t, states_under_wrappers_are_bound_as_their_parameter, 0, 3);
    tcase_add_loop_test(t, model_space_is_what_the_common_state_says, 0,
                        (int)(sizeof said / sizeof *said));
    tcase_add_test(t, model_space_names_become_those_of_fully_reshardable);
    tcase_add_loop_test(t, states_that_fit_nothing_are_refused, 0,
                        (int)(sizeof refused / sizeof *refused));
    tcase_add_test(t, other_optimizers_have_other_pairs);
    suite_add_tcase(s, t);
    t = tcase_create("rescue");
    tcase_add_test(t, buckets_are_given_back_by_value);
    tcase_add_test(t, buckets_with_equal_values_need_an_order);
    tcase_add_loop_test(t, buckets_that_are_not_proved_are_refused, 0,
                        (int)(sizeof unproved / sizeof *unproved));
    suite_add_tcase(s, t);
    return s;
}
