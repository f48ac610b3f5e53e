/* torch_dist container, reading: real checkpoints, save roots, hostile .metadata, mutated bytes. */
#include "dcp_test.h"

#include "dcp_meta.h"

Suite *suite_dcp(void);

/* ---- golden ---------------------------------------------------------------------------------- */

static const struct {
    const char *path, *expected;
    int objects;
} golden[] = {
    {MCORE "legacy_tp1",               MCORE "legacy.plain.safetensors",         40},
    {MCORE "legacy_tp2",               MCORE "legacy.plain.safetensors",         40},
    {MCORE "lowrank_f_tp2",            MCORE "lowrank_f_tp2.plain.safetensors",  -1},
    {MCORE "lowrank_fg_tp2/" ITER,     MCORE "lowrank_fg_tp2.plain.safetensors", 16},
    {CKPT_FIXTURES "/torch/dcp_2rank", "tests/data/dcp_2rank.safetensors",       9 },
};

START_TEST(open_real_checkpoint_equals_what_its_writer_reads)
{
    ckpt_source src, want;
    open_plain(&src, golden[_i].path);
    open_plain(&want, golden[_i].expected);
    ck_assert_str_eq(src.container->name, "torch_dist");
    ck_assert_uint_eq(src.n_warnings, 0);
    if (golden[_i].objects >= 0)
        ck_assert_int_eq((int)src.n_objects, golden[_i].objects);
    expect_same_tensors(&src, &want);
    ckpt_source_close(&src);
    ckpt_source_close(&want);
}
END_TEST

START_TEST(open_megatron_root_gives_args_and_iteration)
{
    ckpt_source src;
    int64_t v;
    open_plain(&src, MCORE "legacy_tp2");
    ck_assert_int_eq(src.iteration, 100);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    ck_assert_str_eq(src.root, MCORE "legacy_tp2/" ITER);
    ck_assert(ckpt_json_int(ckpt_json_get(src.config, "hidden_size"), &v) && v == 64);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.config, "params_dtype")), "torch.float32");
    ck_assert(ckpt_json_int(ckpt_json_path(src.common, "opt_param_scheduler.num_steps"), &v));
    ck_assert_int_eq(v, 800);
    const ckpt_object *o = object(&src, CKPT_DCP_COMMON_OBJECT);
    ck_assert_ptr_null(o->unknown_global);
    ck_assert_ptr_nonnull(strstr(o->text, "\"hidden_size\":64"));
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_plain_dcp_shows_objects)
{
    ckpt_source src;
    open_plain(&src, CKPT_FIXTURES "/torch/dcp_2rank");
    ck_assert_int_eq(src.iteration, -1);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_NONE);
    ck_assert_ptr_null(src.common);
    ck_assert_str_eq(object(&src, "meta.str")->text, "\"hello\"");
    ck_assert_str_eq(object(&src, "opt.param_groups.0.betas")->text, "[0.9,0.95]");
    ckpt_source_close(&src);
}
END_TEST

/* ---- save roots ------------------------------------------------------------------------------ */

static void make_iteration(const char *name)
{
    copy_dir(MCORE "lowrank_fg_tp2/" ITER, in_scratch(name));
}

START_TEST(open_root_without_tracker_takes_newest_complete)
{
    ckpt_source src;
    make_iteration(ITER);
    make_dir(in_scratch("iter_0000200"));
    put_text(in_scratch("iter_0000200/metadata.json"), "{}");
    make_dir(in_scratch("iter_0000300"));
    copy_file(MCORE "lowrank_fg_tp2/" ITER "/.metadata", in_scratch("iter_0000300/.metadata"));
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, 100);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_root_with_tracker_takes_what_it_names)
{
    ckpt_source src;
    make_iteration(ITER);
    make_iteration("release");
    put_text(in_scratch(CKPT_DCP_TRACKER), " 100\n");
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, 100);
    ckpt_source_close(&src);
    put_text(in_scratch(CKPT_DCP_TRACKER), "release");
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, -1);
    ckpt_source_close(&src);
    expect_open_at(&src, scratch, 100, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, 100);
    ckpt_source_close(&src);
    expect_open_at(&src, scratch, 7, CKPT_E_USAGE,
                   "neither directory 'iter_0000007' nor file 'iter_0000007.h5' is there");
    expect_open_at(&src, in_scratch(ITER), 7, CKPT_E_USAGE,
                   "is iteration 100, not the requested 7");
}
END_TEST

START_TEST(open_root_with_bad_tracker_names_it)
{
    ckpt_source src;
    make_iteration(ITER);
    put_text(in_scratch(CKPT_DCP_TRACKER), "12x");
    expect_open(&src, scratch, CKPT_E_FORMAT, "holds '12x', expected a number or 'release'");
    put_text(in_scratch(CKPT_DCP_TRACKER), "200");
    expect_open(&src, scratch, CKPT_E_FORMAT, "iteration 200 named by " CKPT_DCP_TRACKER);
    make_dir(in_scratch("iter_0000200"));
    expect_open(&src, scratch, CKPT_E_FORMAT, "'iter_0000200' is incomplete: no .metadata");
    copy_dir(MCORE "lowrank_fg_tp2/" ITER, in_scratch("iter_0000200"));
    expect_open(&src, scratch, CKPT_E_FORMAT,
                "iteration disagrees: " CKPT_DCP_TRACKER
                " says 200, directory name says 200, common state "
                "says 100");
    put_text(in_scratch(CKPT_DCP_TRACKER), "100");
    ck_assert_int_eq(unlink(in_scratch(ITER "/metadata.json")), 0);
    expect_open(&src, scratch, CKPT_E_FORMAT, "incomplete: no metadata.json");
    make_dir(in_scratch("legacy/" ITER "/mp_rank_00"));
    put_text(in_scratch("legacy/" CKPT_DCP_TRACKER), "100");
    expect_open(&src, in_scratch("legacy"), CKPT_E_UNSUPPORTED, "mp_rank_XX");
}
END_TEST

START_TEST(open_directory_without_metadata_json_warns)
{
    ckpt_source src;
    make_iteration("x");
    ck_assert_int_eq(unlink(in_scratch("x/metadata.json")), 0);
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    expect_warning(&src, "no metadata.json");
    ck_assert_int_eq(src.iteration, 100);
    ckpt_source_close(&src);
    expect_open_at(&src, in_scratch("x"), 99, CKPT_E_USAGE, "not the requested 99");
}
END_TEST

START_TEST(open_foreign_backend_names_it)
{
    static const struct {
        const char *json, *message;
        ckpt_status status;
    } rows[] = {
        {"{\"sharded_backend\":\"zarr\"}",                                     "sharded_backend 'zarr'", CKPT_E_UNSUPPORTED},
        {"{\"sharded_backend\":\"torch_dist\",\"sharded_backend_version\":2}", "version is not 1",
         CKPT_E_UNSUPPORTED                                                                                                },
        {"{}",                                                                 "no sharded_backend",     CKPT_E_FORMAT     },
        {"{",                                                                  "metadata.json",          CKPT_E_FORMAT     },
    };
    ckpt_source src;
    make_iteration("x");
    put_text(in_scratch("x/metadata.json"), rows[_i].json);
    expect_open(&src, in_scratch("x"), rows[_i].status, rows[_i].message);
}
END_TEST

START_TEST(open_damaged_directory_names_the_file)
{
    ckpt_source src;
    make_iteration("x");
    put_text(in_scratch("x/__7_0.distcp"), "left over");
    put_text(in_scratch("x/__8_0.distcp"), "");
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    expect_warning(&src, "1 stale data file not named by .metadata, first '__7_0.distcp'");
    ckpt_source_close(&src);

    ckpt_buf data = {0};
    get_file(in_scratch("x/__1_0.distcp"), &data);
    put_file(in_scratch("x/__1_0.distcp"), data.data, data.len - 1);
    expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, "__1_0.distcp: '");
    expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, " past end ");
    ckpt_buf_release(&data);
    ck_assert_int_eq(unlink(in_scratch("x/__1_0.distcp")), 0);
    expect_open(&src, in_scratch("x"), CKPT_E_FORMAT,
                "data file '__1_0.distcp' is missing: .metadata names 2 data files, 1 are here");
    ck_assert_int_eq(unlink(in_scratch("x/.metadata")), 0);
    expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, "no .metadata");
    put_text(in_scratch("x/__0.metadata"), "");
    ck_assert_int_eq(unlink(in_scratch("x/metadata.json")), 0);
    expect_open(&src, in_scratch("x"), CKPT_E_UNSUPPORTED, "rank-local metadata");
}
END_TEST

/* ---- crafted metadata ------------------------------------------------------------------------ */

static const int64_t d4[] = {4, 2}, d2[] = {2, 2}, o0[] = {0, 0}, o1[] = {1, 0}, o2[] = {2, 0},
                     o4[] = {4, 0}, d0[] = {0, 2};

/* Tensor "t" [4,2] f32 in two chunks with items; `second` is the second chunk's place. */
static void craft_pair(crafted *c, const char *dtype, const int64_t *second)
{
    int64_t length, at;
    craft_tensor(c, "t", dtype, 2, d4);
    craft_chunk(c, 2, o0, d2);
    craft_chunk(c, 2, second, d2);
    craft_tensor_end(c);
    at = craft_item(c, CKPT_F32, 2, d2, &length);
    craft_entry(c, "t", 2, o0, "__0_0.distcp", at, length, NULL);
    at = craft_item(c, CKPT_F32, 2, d2, &length);
    craft_entry(c, "t", 2, second, "__0_0.distcp", at, length, NULL);
}

START_TEST(open_crafted_pair_ignores_index_hint)
{
    ckpt_source src;
    crafted c = {0};
    craft_pair(&c, "float32", o2);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    ck_assert_uint_eq(src.tensors[0].n_chunks, 2);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_tensor_without_properties_takes_dtype_of_items)
{
    ckpt_source src;
    crafted c = {0};
    craft_pair(&c, NULL, o2);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    ck_assert_int_eq(src.tensors[0].dtype, CKPT_F32);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_empty_chunks_are_legal)
{
    ckpt_source src;
    crafted c = {0};
    int64_t length, at;
    craft_tensor(&c, "t", "float32", 2, d2);
    craft_chunk(&c, 2, o0, d2);
    craft_chunk(&c, 2, o2, d0); /* beside the end, with an item */
    craft_chunk(&c, 2, o4, d0); /* no item, and past the end */
    craft_tensor_end(&c);
    at = craft_item(&c, CKPT_F32, 2, d2, &length);
    craft_entry(&c, "t", 2, o0, "__0_0.distcp", at, length, NULL);
    at = craft_item(&c, CKPT_F32, 2, d0, &length);
    craft_entry(&c, "t", 2, o2, "__0_0.distcp", at, length, NULL);
    craft_tensor(&c, "none", "int64", 2, d0);
    craft_tensor_end(&c);
    craft_tensor(&c, "scalar", "float32", 0, d0);
    craft_chunk(&c, 0, o0, d0);
    craft_tensor_end(&c);
    at = craft_item(&c, CKPT_F32, 0, d0, &length);
    craft_entry(&c, "scalar", 0, o0, "__0_0.distcp", at, length, NULL);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 3);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_ghost_entry_warns)
{
    ckpt_source src;
    crafted c = {0};
    craft_pair(&c, "float32", o2);
    craft_entry(&c, "ghost", 2, o0, "__0_0.distcp", 1 << 30, 5, NULL);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    expect_warning(&src, "1 storage entries belong to nothing in .metadata, first 'ghost'");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_undecodable_object_is_flagged)
{
    ckpt_source src;
    crafted c = {0};
    ckpt_buf_puts(&c.data, "arbitrary");
    craft_bytes(&c, "o");
    craft_entry(&c, "o", -1, NULL, "__0_0.distcp", 0, 9, NULL);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    ck_assert_ptr_nonnull(src.objects[0].unknown_global);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_object_with_unknown_global_is_flagged)
{
    ckpt_source src;
    crafted c = {0};
    ckpt_buf p = {0};
    ckpt_pkl_begin(&p);
    ckpt_pkl_put_global(&p, "os", "system");
    ckpt_buf_puts(&p, "(");
    ckpt_pkl_put_str(&p, "true");
    ckpt_buf_puts(&p, "tR");
    ckpt_pkl_end(&p);
    ckpt_zip_object(&c.data, p.data, p.len);
    ckpt_buf_release(&p);
    craft_bytes(&c, "o");
    craft_entry(&c, "o", -1, NULL, "__0_0.distcp", 0, (int64_t)c.data.len, NULL);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), CKPT_OK, NULL);
    ck_assert_str_eq(src.objects[0].unknown_global, "os.system");
    ckpt_source_close(&src);
}
END_TEST

/* planner_data is of no interest to us, but a loader would unpickle it. */
START_TEST(metadata_with_foreign_global_is_flagged)
{
    ckpt_buf p = {0};
    ckpt_arena arena = {0};
    ckpt_dcp_meta meta = {0};
    ckpt_err err = {0};
    ckpt_pkl_begin(&p);
    ckpt_pkl_put_global(&p, "torch.distributed.checkpoint.metadata", "Metadata");
    ckpt_buf_puts(&p, ")\x81}(");
    ckpt_pkl_put_str(&p, "state_dict_metadata");
    ckpt_buf_puts(&p, "}");
    ckpt_pkl_put_str(&p, "storage_data");
    ckpt_buf_puts(&p, "}");
    ckpt_pkl_put_str(&p, "planner_data");
    ckpt_pkl_put_global(&p, "posix", "system");
    ckpt_buf_puts(&p, "(");
    ckpt_pkl_put_str(&p, "true");
    ckpt_buf_puts(&p, "tRub");
    ckpt_pkl_end(&p);
    ck_assert_msg(ckpt_dcp_meta_parse(p.data, p.len, &arena, &meta, &err) == CKPT_OK, "%s",
                  err.text);
    ck_assert_str_eq(meta.unknown_global, "posix.system");
    ckpt_json_free(meta.policy);
    ckpt_buf_release(&p);
    ckpt_arena_free(&arena);
}
END_TEST

/* One defect each, in a checkpoint of the crafted pair. */
enum {
    OVERLAP,
    HOLE,
    OUTSIDE,
    DTYPE,
    SHAPE,
    RANK,
    GHOST_CHUNK,
    TWICE,
    NAME_TWICE,
    TRAVERSAL,
    ABSOLUTE,
    TRANSFORM,
    SAFETENSORS,
    PAST_END,
    HUGE_AT,
    NO_TENSOR,
    BAD_DTYPE,
    BAD_CLASS,
    OBJECT_ENTRY,
    NEGATIVE,
    OVERFLOW_DIMS,
    DEFECTS
};

static const struct {
    const char *message;
    ckpt_status status;
} defects[DEFECTS] = {
    [OVERLAP] = {"tensor 't': chunks [0:2,0:2] and [1:3,0:2] overlap",                CKPT_E_FORMAT     },
    [HOLE] = {"tensor 't': elements [2:4,0:2] missing",                            CKPT_E_FORMAT     },
    [OUTSIDE] = {"tensor 't': chunk of 2 at 4 on axis 0 outside extent 4",            CKPT_E_FORMAT     },
    [DTYPE] = {"tensor 't': item holds F32, .metadata says BF16",                   CKPT_E_FORMAT     },
    [SHAPE] = {"tensor 't': item has shape [4,2], .metadata says [2,2]",            CKPT_E_FORMAT     },
    [RANK] = {"tensor 't': chunk 0: has 1 offsets and 1 sizes, tensor has 2 dims", CKPT_E_FORMAT     },
    [GHOST_CHUNK] = {"tensor 't': chunk 0: at [0,0] has no storage entry",                CKPT_E_FORMAT     },
    [TWICE] = {"storage_data: 't' appears twice at one offset",                     CKPT_E_FORMAT     },
    [NAME_TWICE] = {"'t' appears twice",                                                 CKPT_E_FORMAT     },
    [TRAVERSAL] = {"relative_path '../x' is not a plain path",                          CKPT_E_FORMAT     },
    [ABSOLUTE] = {"relative_path '/etc/passwd' is not a plain path",                   CKPT_E_FORMAT     },
    [TRANSFORM] = {"stored with transforms: stream.zstd/1",                             CKPT_E_UNSUPPORTED},
    [SAFETENSORS] = {"tensor 't': not in the safetensors blob at byte 0",                 CKPT_E_FORMAT     },
    [PAST_END] = {"offset 5 + length 100000 past end ",                                CKPT_E_FORMAT     },
    [HUGE_AT] = {"past end ",                                                         CKPT_E_FORMAT     },
    [NO_TENSOR] = {"item holds no tensor, expected a plain tensor",                     CKPT_E_FORMAT     },
    [BAD_DTYPE] = {"tensor 't': dtype torch.float9",                                    CKPT_E_UNSUPPORTED},
    [BAD_CLASS] = {"'t' is neither TensorStorageMetadata nor BytesStorageMetadata",     CKPT_E_FORMAT     },
    [OBJECT_ENTRY] = {"object 'o' has no storage entry",                                   CKPT_E_FORMAT     },
    [NEGATIVE] = {"element 0 is not a non-negative integer",                           CKPT_E_FORMAT     },
    [OVERFLOW_DIMS] = {"number of elements overflows",                                      CKPT_E_FORMAT     },
};

/* Tensor "t" [2,2] in one chunk whose item is whatever c->data holds from 0. */
static void craft_one(crafted *c, const char *dtype, const char *path, int64_t at, int64_t length,
                      const char *transform)
{
    craft_tensor(c, "t", dtype, 2, d2);
    craft_chunk(c, 2, o0, d2);
    craft_tensor_end(c);
    craft_entry(c, "t", 2, o0, path, at, length, transform);
}

static void craft_defect(crafted *c, int which)
{
    static const int64_t huge[] = {INT64_MAX / 2, 4}, minus[] = {-1, 4}, flat[] = {4};
    const char *file = "__0_0.distcp";
    int64_t length = 0;
    if (which == SHAPE)
        craft_item(c, CKPT_F32, 2, d4, &length);
    else if (which == NO_TENSOR)
        ckpt_zip_object(&c->data, (const uint8_t *)"\x80\x02N.", 4);
    else if (which == SAFETENSORS)
        ckpt_buf_append(&c->data, "\x08\0\0\0\0\0\0\0{}      ", 16);
    else if (which >= DTYPE)
        craft_item(c, CKPT_F32, 2, d2, &length);
    int64_t n = (int64_t)c->data.len;
    switch (which) {
    case OVERLAP:
        craft_pair(c, "float32", o1);
        break;
    case OUTSIDE:
        craft_pair(c, "float32", o4);
        break;
    case HOLE:
        craft_tensor(c, "t", "float32", 2, d4);
        craft_chunk(c, 2, o0, d2);
        craft_tensor_end(c);
        craft_item(c, CKPT_F32, 2, d2, &length);
        craft_entry(c, "t", 2, o0, file, 0, length, NULL);
        break;
    case DTYPE:
        craft_one(c, "bfloat16", file, 0, n, NULL);
        break;
    case RANK:
        craft_tensor(c, "t", "float32", 2, d2);
        craft_chunk(c, 1, flat, flat);
        craft_tensor_end(c);
        break;
    case GHOST_CHUNK:
        craft_tensor(c, "t", "float32", 2, d2);
        craft_chunk(c, 2, o0, d2);
        craft_tensor_end(c);
        craft_entry(c, "t", -1, NULL, file, 0, n, NULL);
        break;
    case TWICE:
        craft_one(c, "float32", file, 0, n, NULL);
        craft_entry(c, "t", 2, o0, file, 0, n, NULL);
        break;
    case NAME_TWICE:
        craft_one(c, "float32", file, 0, n, NULL);
        craft_bytes(c, "t");
        break;
    case TRAVERSAL:
        craft_one(c, "float32", "../x", 0, n, NULL);
        break;
    case ABSOLUTE:
        craft_one(c, "float32", "/etc/passwd", 0, n, NULL);
        break;
    case TRANSFORM:
        craft_one(c, "float32", file, 0, n, "stream.zstd/1");
        break;
    case SAFETENSORS:
        craft_one(c, "float32", file, 0, 16, NULL); /* a blob without the tensor */
        break;
    case PAST_END:
        craft_one(c, "float32", file, 5, 100000, NULL);
        break;
    case HUGE_AT:
        craft_one(c, "float32", file, INT64_MAX, INT64_MAX, NULL);
        break;
    case BAD_DTYPE:
        craft_one(c, "float9", file, 0, n, NULL);
        break;
    case BAD_CLASS:
        ckpt_pkl_put_str(&c->state, "t");
        craft_object(&c->state, META, "StorageMeta");
        break;
    case OBJECT_ENTRY:
        craft_bytes(c, "o");
        break;
    case NEGATIVE:
    case OVERFLOW_DIMS:
        craft_tensor(c, "t", "float32", 2, which == NEGATIVE ? minus : huge);
        craft_tensor_end(c);
        break;
    default:
        craft_one(c, "float32", file, 0, n, NULL);
        break;
    }
}

START_TEST(open_defective_metadata_names_the_defect)
{
    ckpt_source src;
    crafted c = {0};
    craft_defect(&c, _i);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), defects[_i].status, defects[_i].message);
}
END_TEST

START_TEST(open_truncated_metadata_fails_at_every_length)
{
    ckpt_buf data = {0};
    copy_dir(CKPT_FIXTURES "/torch/dcp_2rank", in_scratch("x"));
    get_file(in_scratch("x/.metadata"), &data);
    for (size_t n = 0; n < data.len; n += n < 64 || n + 64 > data.len ? 1 : 37) {
        ckpt_source src;
        put_file(in_scratch("x/.metadata"), data.data, n);
        expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, "");
    }
    ckpt_buf_release(&data);
}
END_TEST

START_TEST(open_mutated_bytes_never_misbehaves)
{
    copy_dir(CKPT_FIXTURES "/torch/dcp_2rank", in_scratch("x"));
    mutate_and_open(in_scratch("x"), ".metadata", 1500, 1);
    mutate_and_open(in_scratch("x"), "__0_0.distcp", 1000, 2);
    mutate_and_open(in_scratch("x"), "__1_0.distcp", 500, 3);
    make_iteration("y");
    mutate_and_open(in_scratch("y"), ".metadata", 500, 4);
    mutate_and_open(in_scratch("y"), "metadata.json", 100, 5);
}
END_TEST

/* ---- suite ----------------------------------------------------------------------------------- */

Suite *suite_dcp(void)
{
    Suite *s = suite_create("dcp");
    TCase *t = make_case(s, "golden", 30);
    tcase_add_loop_test(t, open_real_checkpoint_equals_what_its_writer_reads, 0, COUNT(golden));
    tcase_add_test(t, open_megatron_root_gives_args_and_iteration);
    tcase_add_test(t, open_plain_dcp_shows_objects);

    t = make_case(s, "roots", 30);
    tcase_add_test(t, open_root_without_tracker_takes_newest_complete);
    tcase_add_test(t, open_root_with_tracker_takes_what_it_names);
    tcase_add_test(t, open_root_with_bad_tracker_names_it);
    tcase_add_test(t, open_directory_without_metadata_json_warns);
    tcase_add_loop_test(t, open_foreign_backend_names_it, 0, 4);
    tcase_add_test(t, open_damaged_directory_names_the_file);

    t = make_case(s, "hostile", 300);
    tcase_add_test(t, open_crafted_pair_ignores_index_hint);
    tcase_add_test(t, open_tensor_without_properties_takes_dtype_of_items);
    tcase_add_test(t, open_empty_chunks_are_legal);
    tcase_add_test(t, open_ghost_entry_warns);
    tcase_add_test(t, open_undecodable_object_is_flagged);
    tcase_add_test(t, open_object_with_unknown_global_is_flagged);
    tcase_add_test(t, metadata_with_foreign_global_is_flagged);
    tcase_add_loop_test(t, open_defective_metadata_names_the_defect, 0, DEFECTS);
    tcase_add_test(t, open_truncated_metadata_fails_at_every_length);
    tcase_add_test(t, open_mutated_bytes_never_misbehaves);
    return s;
}
