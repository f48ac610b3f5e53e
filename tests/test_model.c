/* Binding: what is recognised, what is refused and with which words. Sources are lists of names and
 * shapes in memory; tensor bytes are never read. */
#include "model.h"
#include "plan.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TENSORS 128

typedef struct fake {
    ckpt_source src;
    ckpt_tensor tensors[MAX_TENSORS];
    ckpt_chunk chunks[MAX_TENSORS];
    int64_t dims[MAX_TENSORS][4];
    char names[MAX_TENSORS][96];
    ckpt_file file;
} fake;

static const int64_t zeros[4];

static void add(fake *f, const char *name, int rank, int64_t a, int64_t b, int64_t c)
{
    size_t i = f->src.n_tensors++;
    ck_assert_uint_lt(i, MAX_TENSORS);
    snprintf(f->names[i], sizeof f->names[i], "%s", name);
    f->dims[i][0] = a;
    f->dims[i][1] = b;
    f->dims[i][2] = c;
    f->chunks[i] = (ckpt_chunk){.lo = zeros, .len = f->dims[i]};
    f->tensors[i] = (ckpt_tensor){.name = f->names[i],
                                  .dims = f->dims[i],
                                  .rank = rank,
                                  .dtype = CKPT_F32,
                                  .chunks = &f->chunks[i],
                                  .n_chunks = 1};
}

static void add_layer(fake *f, int l, const char *name, int rank, int64_t a, int64_t b, int64_t c)
{
    char full[96];
    snprintf(full, sizeof full, "decoder.layers.%d.%s", l, name);
    add(f, full, rank, a, b, c);
}

/* One KDA block (4 heads x 8), one MLP, one MLA, one MoE of two experts; H 16, F 24. */
static void add_model(fake *f)
{
    f->src.files = &f->file;
    f->src.n_files = 1;
    f->file = (ckpt_file){.name = "x", .path = "x", .size = INT64_MAX, .fd = -1};
    f->src.tensors = f->tensors;
    add(f, "embedding.word_embeddings.weight", 2, 40, 16, 0);
    add(f, "output_layer.weight", 2, 40, 16, 0);
    add(f, "decoder.final_norm.weight", 1, 16, 0, 0);
    add_layer(f, 0, "input_layernorm.weight", 1, 16, 0, 0);
    static const char *const sections[] = {"query", "key", "value", "g", "gate"};
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "self_attention.in_proj.weight.%s", sections[i]);
        add_layer(f, 0, name, 2, 32, 16, 0);
        snprintf(name, sizeof name, "self_attention.conv1d.weight.%s", sections[i]);
        if (i < 3)
            add_layer(f, 0, name, 3, 32, 1, 4);
    }
    add_layer(f, 0, "self_attention.beta_proj.weight", 2, 4, 16, 0);
    add_layer(f, 0, "self_attention.A_log", 1, 4, 0, 0);
    add_layer(f, 0, "self_attention.dt_bias", 1, 32, 0, 0);
    add_layer(f, 0, "self_attention.out_norm.weight", 1, 8, 0, 0);
    add_layer(f, 0, "self_attention.out_proj.weight", 2, 16, 32, 0);
    add_layer(f, 1, "pre_mlp_layernorm.weight", 1, 16, 0, 0);
    add_layer(f, 1, "mlp.linear_fc1.weight", 2, 48, 16, 0);
    add_layer(f, 1, "mlp.linear_fc2.weight", 2, 16, 24, 0);
    add_layer(f, 2, "input_layernorm.weight", 1, 16, 0, 0);
    add_layer(f, 2, "self_attention.linear_q_proj.weight", 2, 24, 16, 0);
    add_layer(f, 2, "self_attention.linear_kv_down_proj.weight", 2, 12, 16, 0);
    add_layer(f, 2, "self_attention.linear_kv_up_proj.weight", 2, 28, 8, 0);
    add_layer(f, 2, "self_attention.kv_layernorm.weight", 1, 8, 0, 0);
    add_layer(f, 2, "self_attention.linear_proj.weight", 2, 16, 12, 0);
    add_layer(f, 3, "pre_mlp_layernorm.weight", 1, 16, 0, 0);
    add_layer(f, 3, "mlp.router.weight", 2, 2, 16, 0);
    add_layer(f, 3, "mlp.experts.experts.linear_fc1.weight", 3, 2, 20, 16);
    add_layer(f, 3, "mlp.experts.experts.linear_fc2.weight", 3, 2, 16, 10);
}

static int name_order(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static ckpt_status bind(fake *f, ckpt_model *m, const ckpt_model_opts *opts, ckpt_err *err)
{
    qsort(f->tensors, f->src.n_tensors, sizeof f->tensors[0], name_order);
    return ckpt_model_bind(m, &f->src, opts, err);
}

static int find(fake *f, const char *name)
{
    for (size_t i = 0; i < f->src.n_tensors; i++)
        if (strcmp(f->names[i], name) == 0)
            return (int)i;
    ck_abort_msg("no %s", name);
    return -1;
}

START_TEST(bind_whole_model_recognises_every_tensor)
{
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    add_model(f);
    ckpt_status status = bind(f, &m, NULL, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(m.layout->name, "megatron:hybrid");
    ck_assert_int_eq(m.n_blocks, 4);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(m.config, "pattern")), "K-+E");
    int64_t up = ckpt_model_find(&m, "blocks.3.moe.experts.1.up.weight");
    ck_assert_int_ge(up, 0);
    ck_assert_int_eq(m.tensors[up].rank, 2);
    ck_assert_int_eq(m.tensors[up].dims[0], 10);
    ck_assert_int_eq(m.tensors[up].dims[1], 16);
    ck_assert_int_ge(ckpt_model_find(&m, "blocks.1.mlp.gate.weight"), 0);
    ck_assert_int_ge(ckpt_model_find(&m, "blocks.0.kda.g.weight"), 0);
    ck_assert_int_eq(ckpt_model_find(&m, "blocks.0.kda.nothing"), -1);
    ckpt_model_release(&m);
    free(f);
}
END_TEST

typedef struct defect {
    const char *name;   /* tensor to touch */
    const char *change; /* "drop", "rename:NEW", "add:NEW", "dim0:N" */
    ckpt_status status;
    const char *text; /* part of the message */
} defect;

static const defect defects[] = {
    {"decoder.layers.1.mlp.linear_fc2.weight",                 "drop",                                        CKPT_E_FORMAT,
     "missing tensor blocks.1.mlp.down.weight"                                                                                                                      },
    {"decoder.layers.0.self_attention.A_log",                  "drop",                                        CKPT_E_FORMAT,
     "missing tensor blocks.0.kda.A_log"                                                                                                                            },
    {"decoder.layers.0.self_attention.in_proj.weight.g",       "drop",                                        CKPT_E_FORMAT,
     "missing tensor blocks.0.kda.f.weight"                                                                                                                         },
    {"decoder.final_norm.weight",                              "drop",                                        CKPT_E_FORMAT,      "missing tensor final_norm.weight"},
    {"decoder.layers.2.self_attention.linear_proj.weight",
     "rename:decoder.layers.2.mlp.linear_fc2.weight",                                                         CKPT_E_FORMAT,
     "does not belong with the other tensors of its layer"                                                                                                          },
    {"decoder.final_norm.weight",                              "add:decoder.layers.0.self_attention.bogus",   CKPT_E_UNSUPPORTED,
     "1 tensor not in this model (layout megatron:hybrid): 'decoder.layers.0.self_attention.bogus' "
     "(nearest known: decoder.layers.{l}.self_attention."                                                                                                           },
    {"decoder.final_norm.weight",
     "add:decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight",                               CKPT_E_FORMAT,
     "blocks.2.mla.kv_a_norm.weight"                                                                                                                                },
    {"decoder.final_norm.weight",                              "add:decoder.layers.7.input_layernorm.weight", CKPT_E_FORMAT,
     "block"                                                                                                                                                        },
    {"decoder.layers.1.mlp.linear_fc1.weight",                 "dim0:47",                                     CKPT_E_FORMAT,      "linear_fc1.weight"               },
    {"decoder.layers.0.self_attention.in_proj.weight.key",     "dim0:30",                                     CKPT_E_FORMAT,
     "in_proj.weight.key"                                                                                                                                           },
    {"decoder.layers.3.mlp.experts.experts.linear_fc2.weight", "dim0:3",                                      CKPT_E_FORMAT,
     "linear_fc2.weight"                                                                                                                                            },
};

START_TEST(bind_defect_is_refused_by_name)
{
    const defect *d = &defects[_i];
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    add_model(f);
    int i = find(f, d->name);
    if (strcmp(d->change, "drop") == 0)
        f->tensors[i] = f->tensors[--f->src.n_tensors];
    else if (strncmp(d->change, "rename:", 7) == 0)
        snprintf(f->names[i], sizeof f->names[i], "%s", d->change + 7);
    else if (strncmp(d->change, "add:", 4) == 0)
        add(f, d->change + 4, 1, strstr(d->change, "kv_up") != NULL ? 8 : 16, 0, 0);
    else
        f->dims[i][0] = atoi(d->change + 5);
    ckpt_status status = bind(f, &m, NULL, &err);
    ck_assert_msg(status == d->status, "%s %s: status %d, %s", d->name, d->change, status,
                  err.text);
    ck_assert_msg(strstr(err.text, d->text) != NULL, "%s", err.text);
    free(f);
}
END_TEST

START_TEST(bind_wrong_rank_and_expert_are_named)
{
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    add_model(f);
    f->tensors[find(f, "decoder.final_norm.weight")].rank = 2;
    f->dims[find(f, "decoder.final_norm.weight")][1] = 1;
    ck_assert_int_eq(bind(f, &m, NULL, &err), CKPT_E_FORMAT);
    ck_assert_str_eq(err.text, "tensor 'decoder.final_norm.weight': 2 dimensions, expected 1");
    memset(f, 0, sizeof *f);
    add_model(f);
    add_layer(f, 3, "mlp.experts.experts.2.linear_fc2.weight", 2, 16, 10, 0);
    ck_assert_int_eq(bind(f, &m, NULL, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "expert 2, the model has 2"));
    free(f);
}
END_TEST

START_TEST(bind_unknown_tensor_is_carried_when_allowed)
{
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    ckpt_model_opts opts = {.allow_unknown = true};
    add_model(f);
    add(f, "something.else", 1, 3, 0, 0);
    /* FLA's bias has no Megatron name, but the family knows it: it keeps its canonical name */
    add(f, "model.layers.0.attn.g_proj.1.bias", 1, 32, 0, 0);
    ck_assert_msg(bind(f, &m, &opts, &err) == CKPT_OK, "%s", err.text);
    int64_t other = ckpt_model_find(&m, "something.else");
    int64_t bias = ckpt_model_find(&m, "blocks.0.kda.g_b.bias");
    ck_assert_int_ge(other, 0);
    ck_assert_int_ge(bias, 0);
    ck_assert(m.tensors[other].extra);
    ck_assert(m.tensors[bias].extra);
    ck_assert_uint_eq(m.n_extras, 2);
    ckpt_model_release(&m);
    free(f);
}
END_TEST

START_TEST(bind_lenient_turns_defects_into_notes)
{
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    ckpt_model_opts opts = {.lenient = true};
    add_model(f);
    add(f, "something.else", 1, 3, 0, 0);
    f->tensors[find(f, "decoder.layers.0.self_attention.A_log")] = f->tensors[--f->src.n_tensors];
    ck_assert_msg(bind(f, &m, &opts, &err) == CKPT_OK, "%s", err.text);
    bool found = false;
    for (size_t i = 0; i < m.n_notes; i++)
        found = found || strstr(m.notes[i], "missing tensor blocks.0.kda.A_log") != NULL;
    ck_assert(found);
    ckpt_model_release(&m);
    free(f);
}
END_TEST

START_TEST(bind_names_of_no_family_pass_through)
{
    fake *f = calloc(1, sizeof *f);
    ckpt_model m;
    ckpt_err err = {0};
    f->src.tensors = f->tensors;
    add(f, "b", 1, 3, 0, 0);
    add(f, "a", 0, 0, 0, 0);
    ck_assert_msg(bind(f, &m, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_ptr_null(m.layout);
    ck_assert_uint_eq(m.n_tensors, 2);
    ck_assert_str_eq(m.tensors[0].name, "a");
    ck_assert_uint_eq(m.tensors[0].bytes, 4);
    ckpt_model_release(&m);
    free(f);
}
END_TEST

Suite *suite_model(void)
{
    Suite *s = suite_create("model");
    TCase *c = tcase_create("bind");
    tcase_set_timeout(c, 30);
    tcase_add_test(c, bind_whole_model_recognises_every_tensor);
    tcase_add_loop_test(c, bind_defect_is_refused_by_name, 0,
                        (int)(sizeof defects / sizeof defects[0]));
    tcase_add_test(c, bind_wrong_rank_and_expert_are_named);
    tcase_add_test(c, bind_unknown_tensor_is_carried_when_allowed);
    tcase_add_test(c, bind_lenient_turns_defects_into_notes);
    tcase_add_test(c, bind_names_of_no_family_pass_through);
    suite_add_tcase(s, c);
    return s;
}
