/* The table of parallel modules, meshes and stages of per-rank files, joining of pieces. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mp_rank.h"
#include "rank_join.h"
#include "rank_names.h"
#include "shard.h"

static ckpt_err err;

static ckpt_json *json(const char *text)
{
    ckpt_json *j = NULL;
    ck_assert_int_eq(ckpt_json_parse(text, strlen(text), &j, &err), CKPT_OK);
    return j;
}

/* ---- names ------------------------------------------------------------------------------------ */

START_TEST(split_takes_names_apart)
{
    static const struct {
        const char *name, *rest;
        int64_t layer;
        bool ok;
    } cases[] = {
        {"decoder.layers.12.mlp.linear_fc1.weight",               "mlp.linear_fc1.weight",     12, true },
        {"decoder.layers.mlp.linear_fc1.weight",                  "mlp.linear_fc1.weight",     -1, true },
        {"decoder.final_norm.weight",                             "decoder.final_norm.weight", -1, true },
        {"mtp.layers.0.enorm.weight",                             "enorm.weight",              -1, true },
        {"mtp.layers.0.transformer_layer.input_layernorm.weight", "input_layernorm.weight",    -1,
         true                                                                                           },
        {"mtp.layers.1.mtp_model_layer.layers.2.mixer.D",         "mixer.D",                   -1, true },
        {"mtp.layers.1.mtp_model_layer.mlp.router.weight",        "mlp.router.weight",         -1, true },
        {"decoder.layers.01.x",                                   NULL,                        0,  false},
        {"decoder.layers.7",                                      NULL,                        0,  false},
        {"decoder.layers.99999999999999999999.x",                 NULL,                        0,  false},
        {"mtp.layers.x.y",                                        NULL,                        0,  false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ckpt_rank_place p;
        ck_assert_msg(ckpt_rank_split(cases[i].name, &p) == cases[i].ok, "%s", cases[i].name);
        if (!cases[i].ok)
            continue;
        ck_assert_str_eq(p.rest, cases[i].rest);
        ck_assert_int_eq(p.layer, cases[i].layer);
    }
}
END_TEST

START_TEST(every_spelling_of_experts_is_one_stored_name)
{
    static const char *const memory[] = {"mlp.experts.linear_fc1.weight3",
                                         "mlp.experts.local_experts.3.linear_fc1.weight",
                                         "mlp.experts.weight1"};
    for (size_t i = 0; i < 3; i++) {
        int64_t e;
        const ckpt_rank_rule *r = ckpt_rank_by_memory(memory[i], &e);
        ck_assert_ptr_nonnull(r);
        ck_assert(r->expert);
        ck_assert_str_eq(r->stored, "mlp.experts.experts.linear_fc1.weight");
        ck_assert_int_eq(e, i < 2 ? 3 : -1);
    }
    const char *part;
    const char *stored = "mlp.experts.experts.linear_fc1.weight";
    ck_assert_str_eq(ckpt_rank_by_stored(stored, true, &part)->memory,
                     "mlp.experts.local_experts.{e}.linear_fc1.weight");
    ck_assert_str_eq(ckpt_rank_by_stored(stored, false, &part)->memory,
                     "mlp.experts.linear_fc1.weight{e}");
    ck_assert_ptr_nonnull(ckpt_rank_by_stored("self_attention.in_proj.weight.gate", false, &part));
    ck_assert_str_eq(part, "gate");
    ck_assert_ptr_null(ckpt_rank_by_stored("self_attention.in_proj.weight", false, &part));
    ck_assert_ptr_null(ckpt_rank_by_stored("self_attention.invented.weight", false, &part));
}
END_TEST

static bool has_none(const void *self, const char *rest)
{
    (void)self;
    (void)rest;
    return false;
}

static bool has_named(const void *self, const char *rest)
{
    return strstr(self, rest) != NULL;
}

static void check_sections(const char *rest, const char *args, const char *siblings,
                           const char *expected)
{
    ckpt_rank_parts parts;
    char text[256] = "";
    ckpt_json *j = json(args);
    ck_assert_int_eq(
        ckpt_rank_sections(rest, j, siblings ? has_named : has_none, siblings, &parts, &err),
        CKPT_OK);
    for (int i = 0; i < parts.n; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s %d", i ? ", " : "",
                 parts.name[i], (int)parts.size[i]);
    ck_assert_str_eq(text, expected);
    ckpt_json_free(j);
}

START_TEST(sections_follow_the_kind_of_layer)
{
    static const char gdn[] = "{\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
                              "\"linear_key_head_dim\":3,\"linear_value_head_dim\":5}";
    static const char gdn2[] = "{\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
                               "\"linear_key_head_dim\":3,\"linear_value_head_dim\":5,"
                               "\"experimental_attention_variant\":\"gdn2\"}";
    static const char mamba[] = "{\"mamba_num_heads\":4,\"mamba_head_dim\":8,"
                                "\"mamba_num_groups\":2,\"mamba_state_dim\":16}";
    const char *in = "self_attention.in_proj.weight";
    check_sections(in, gdn, NULL, "query 6, key 6, value 20, z 20, beta 4, alpha 4");
    check_sections(in, gdn2, NULL, "query 6, key 6, value 20, z 20, f 6, b 6, w 20");
    check_sections(in, gdn, "self_attention.beta_proj.weight",
                   "query 6, key 6, value 20, g 6, gate 20");
    check_sections(in, gdn, "self_attention.beta_proj.weight self_attention.f_a_proj.weight",
                   "query 6, key 6, value 20");
    check_sections("self_attention.conv1d.weight", gdn, NULL, "query 6, key 6, value 20");
    check_sections("mixer.in_proj.weight", mamba, NULL, "z 32, x 32, B 32, C 32, dt 4");
    check_sections("mixer.conv1d.bias", mamba, NULL, "x 32, B 32, C 32");
    ckpt_rank_parts parts;
    ckpt_json *j = json("{\"linear_num_key_heads\":2}");
    ck_assert_int_eq(ckpt_rank_sections(in, j, has_none, NULL, &parts, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "linear_num_value_heads"));
    ckpt_json_free(j);
}
END_TEST

/* ---- meshes ----------------------------------------------------------------------------------- */

static void check_dirs(ckpt_mesh mesh, size_t n, size_t at, const char *name, int tp, int ep,
                       int etp)
{
    ckpt_arena arena = {0};
    ckpt_mp_dir *dirs;
    size_t count;
    ck_assert_int_eq(ckpt_mesh_resolve(&mesh, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_mp_dirs(&mesh, &arena, &dirs, &count, &err), CKPT_OK);
    ck_assert_uint_eq(count, n);
    ck_assert_str_eq(dirs[at].name, name);
    ck_assert_int_eq(dirs[at].tp, tp);
    ck_assert_int_eq(dirs[at].ep, ep);
    ck_assert_int_eq(dirs[at].etp, etp);
    ckpt_arena_free(&arena);
}

START_TEST(directories_are_those_that_ranks_of_the_mesh_write)
{
    check_dirs((ckpt_mesh){1, 1, 1, 0, 1, 1}, 1, 0, "mp_rank_00", 0, 0, 0);
    check_dirs((ckpt_mesh){2, 1, 2, 0, 1, 1}, 4, 3, "mp_rank_01_001", 1, 1, 1);
    check_dirs((ckpt_mesh){1, 2, 1, 0, 1, 1}, 2, 1, "mp_rank_00_001", 0, 0, 0);
    check_dirs((ckpt_mesh){2, 3, 2, 0, 1, 1}, 12, 11, "mp_rank_01_002_001", 1, 1, 1);
    /* expert TP 1: rank 0 is (tp 0, ep 0), rank 1 (tp 1, ep 1), and no others exist */
    check_dirs((ckpt_mesh){2, 1, 2, 1, 1, 1}, 2, 1, "mp_rank_01_001", 1, 1, 0);
    ckpt_mesh wide = {1, 1, 1, 2, 1, 1};
    ckpt_arena arena = {0};
    ckpt_mp_dir *dirs;
    size_t n;
    ck_assert_int_eq(ckpt_mp_dirs(&wide, &arena, &dirs, &n, &err), CKPT_E_UNSUPPORTED);
    ckpt_arena_free(&arena);
}
END_TEST

static ckpt_status stages(const char *args, int pp, int64_t layers, int64_t *first)
{
    ckpt_arena arena = {0};
    ckpt_mp_stages s;
    ckpt_mesh mesh = {1, pp, 1, 1, 1, 1};
    ckpt_json *j = json(args);
    ckpt_status status = ckpt_mp_stages_of(j, &mesh, layers, &arena, &s, &err);
    if (status == CKPT_OK)
        memcpy(first, s.first, ((size_t)s.pp * (size_t)s.vpp + 1) * sizeof *first);
    ckpt_json_free(j);
    ckpt_arena_free(&arena);
    return status;
}

START_TEST(stages_hold_equal_parts_or_what_the_pattern_says)
{
    int64_t first[8] = {0};
    ck_assert_int_eq(stages("{\"virtual_pipeline_model_parallel_size\":2}", 2, 8, first), CKPT_OK);
    ck_assert(first[1] == 2 && first[2] == 4 && first[3] == 6 && first[4] == 8);
    ck_assert_int_eq(stages("{\"hybrid_layer_pattern\":\"K-K|E+E-/K-\"}", 2, 7, first), CKPT_OK);
    ck_assert(first[0] == 0 && first[1] == 3 && first[2] == 7);
    ck_assert_int_eq(stages("{\"hybrid_layer_pattern\":\"K-K|E+E-\"}", 1, 7, first), CKPT_OK);
    ck_assert(first[1] == 7);
    ck_assert_int_eq(stages("{\"hybrid_layer_pattern\":\"K-K|E+E-\"}", 3, 7, first), CKPT_E_USAGE);
    ck_assert_int_eq(stages("{}", 2, 7, first), CKPT_E_USAGE);
}
END_TEST

/* ---- joining ---------------------------------------------------------------------------------- */

static ckpt_piece piece(const char *name, uint32_t file, int64_t dim, int64_t lo, int64_t len)
{
    return (ckpt_piece){.name = name,
                        .dims = {dim},
                        .lo = {lo},
                        .len = {len},
                        .stride = {1},
                        .file = file,
                        .dtype = CKPT_F32,
                        .rank = 1};
}

START_TEST(equal_boxes_become_replicas_and_different_wholes_an_error)
{
    ckpt_file files[] = {
        {.name = "r0", .size = 100},
        {.name = "r1", .size = 100}
    };
    ckpt_source src = {.files = files, .n_files = 2};
    ckpt_join join = {0};
    ckpt_piece all[] = {piece("b", 1, 4, 2, 2), piece("a", 0, 3, 0, 3), piece("b", 0, 4, 0, 2),
                        piece("a", 1, 3, 0, 3)};
    for (size_t i = 0; i < 4; i++)
        ck_assert_int_eq(ckpt_join_add(&join, &all[i], &err), CKPT_OK);
    ck_assert_int_eq(ckpt_join_finish(&join, &src, &err), CKPT_OK);
    ck_assert_uint_eq(src.n_tensors, 2);
    ck_assert_uint_eq(src.tensors[0].n_chunks, 1);
    ck_assert_uint_eq(src.tensors[0].chunks[0].file, 0);
    ck_assert_uint_eq(src.tensors[1].n_chunks, 2);
    ck_assert_uint_eq(src.n_replicas, 1);
    ck_assert_uint_eq(src.replicas[0].other.file, 1);
    ck_assert_int_eq(ckpt_tensor_check(&src, &src.tensors[1], &err), CKPT_OK);
    ckpt_arena_free(&src.arena);

    ckpt_source other = {.files = files, .n_files = 2};
    ckpt_piece odd = piece("b", 1, 6, 3, 3);
    ck_assert_int_eq(ckpt_join_add(&join, &odd, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_join_finish(&join, &other, &err), CKPT_E_FORMAT);
    ck_assert_str_eq(err.text, "r1: tensor 'b' makes F32 [6] in all, but F32 [4] in r1");
    ckpt_arena_free(&other.arena);
    ckpt_join_release(&join);
}
END_TEST

Suite *suite_ranks(void);
Suite *suite_ranks(void)
{
    Suite *s = suite_create("ranks");
    TCase *t = tcase_create("ranks");
    tcase_add_test(t, split_takes_names_apart);
    tcase_add_test(t, every_spelling_of_experts_is_one_stored_name);
    tcase_add_test(t, sections_follow_the_kind_of_layer);
    tcase_add_test(t, directories_are_those_that_ranks_of_the_mesh_write);
    tcase_add_test(t, stages_hold_equal_parts_or_what_the_pattern_says);
    tcase_add_test(t, equal_boxes_become_replicas_and_different_wholes_an_error);
    suite_add_tcase(s, t);
    return s;
}
