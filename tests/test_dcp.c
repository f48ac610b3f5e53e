/* torch_dist container: real checkpoints, save roots, hostile .metadata, mutated bytes, and writing
 * read back. With CKPT_TEST_KEEP=DIR the written checkpoints and their expected tensors stay in DIR
 * for tests/peers/dcp_load.py. */
#include "dcp_test.h"

Suite *suite_dcp(void);

#define ITER "iter_0000100"
#define MCORE CKPT_FIXTURES "/mcore/"

static const ckpt_object *object(const ckpt_source *src, const char *name)
{
    for (size_t i = 0; i < src->n_objects; i++)
        if (strcmp(src->objects[i].name, name) == 0)
            return &src->objects[i];
    ck_abort_msg("no object %s", name);
    return NULL;
}

static void open_plain(ckpt_source *src, const char *path)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_source_open(src, path, NULL, &err) == CKPT_OK, "%s", err.text);
}

/* ---- golden ---------------------------------------------------------------------------------- */

static const struct {
    const char *path, *expected;
    int objects;
} golden[] = {
    {MCORE "legacy_tp1", MCORE "legacy.plain.safetensors", 40},
    {MCORE "legacy_tp2", MCORE "legacy.plain.safetensors", 40},
    {MCORE "lowrank_f_tp2", MCORE "lowrank_f_tp2.plain.safetensors", -1},
    {MCORE "lowrank_fg_tp2/" ITER, MCORE "lowrank_fg_tp2.plain.safetensors", 16},
    {CKPT_FIXTURES "/torch/dcp_2rank", "tests/data/dcp_2rank.safetensors", 9},
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
    expect_open_at(&src, scratch, 7, CKPT_E_USAGE, "'iter_0000007' does not exist");
    expect_open_at(&src, in_scratch(ITER), 7, CKPT_E_USAGE, "is iteration 100, not the requested 7");
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
    expect_open(&src, scratch, CKPT_E_FORMAT, "iteration disagrees: " CKPT_DCP_TRACKER
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
        {"{\"sharded_backend\":\"zarr\"}", "sharded_backend 'zarr'", CKPT_E_UNSUPPORTED},
        {"{\"sharded_backend\":\"torch_dist\",\"sharded_backend_version\":2}", "version is not 1",
         CKPT_E_UNSUPPORTED},
        {"{}", "no sharded_backend", CKPT_E_FORMAT},
        {"{", "metadata.json", CKPT_E_FORMAT},
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

/* One defect each, in a checkpoint of the crafted pair. */
enum {
    OVERLAP, HOLE, OUTSIDE, DTYPE, SHAPE, RANK, GHOST_CHUNK, TWICE, NAME_TWICE, TRAVERSAL, ABSOLUTE,
    TRANSFORM, SAFETENSORS, PAST_END, HUGE_AT, NO_TENSOR, BAD_DTYPE, BAD_CLASS, OBJECT_ENTRY,
    NEGATIVE, OVERFLOW_DIMS, DEFECTS
};

static const struct {
    const char *message;
    ckpt_status status;
} defects[DEFECTS] = {
    [OVERLAP] = {"tensor 't': chunks [0:2,0:2] and [1:3,0:2] overlap", CKPT_E_FORMAT},
    [HOLE] = {"tensor 't': elements [2:4,0:2] missing", CKPT_E_FORMAT},
    [OUTSIDE] = {"tensor 't': chunk of 2 at 4 on axis 0 outside extent 4", CKPT_E_FORMAT},
    [DTYPE] = {"tensor 't': item holds F32, .metadata says BF16", CKPT_E_FORMAT},
    [SHAPE] = {"tensor 't': item has shape [4,2], .metadata says [2,2]", CKPT_E_FORMAT},
    [RANK] = {"tensor 't': chunk 0: has 1 offsets and 1 sizes, tensor has 2 dims", CKPT_E_FORMAT},
    [GHOST_CHUNK] = {"tensor 't': chunk 0: at [0,0] has no storage entry", CKPT_E_FORMAT},
    [TWICE] = {"storage_data: 't' appears twice at one offset", CKPT_E_FORMAT},
    [NAME_TWICE] = {"'t' appears twice", CKPT_E_FORMAT},
    [TRAVERSAL] = {"relative_path '../x' is not a plain path", CKPT_E_FORMAT},
    [ABSOLUTE] = {"relative_path '/etc/passwd' is not a plain path", CKPT_E_FORMAT},
    [TRANSFORM] = {"stored with transforms: stream.zstd/1", CKPT_E_UNSUPPORTED},
    [SAFETENSORS] = {"safetensors-serialised DCP items", CKPT_E_UNSUPPORTED},
    [PAST_END] = {"offset 5 + length 100000 past end ", CKPT_E_FORMAT},
    [HUGE_AT] = {"past end ", CKPT_E_FORMAT},
    [NO_TENSOR] = {"item holds no tensor, expected a plain tensor", CKPT_E_FORMAT},
    [BAD_DTYPE] = {"tensor 't': dtype torch.float9", CKPT_E_UNSUPPORTED},
    [BAD_CLASS] = {"'t' is neither TensorStorageMetadata nor BytesStorageMetadata", CKPT_E_FORMAT},
    [OBJECT_ENTRY] = {"object 'o' has no storage entry", CKPT_E_FORMAT},
    [NEGATIVE] = {"element 0 is not a non-negative integer", CKPT_E_FORMAT},
    [OVERFLOW_DIMS] = {"number of elements overflows", CKPT_E_FORMAT},
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
        ckpt_buf_append(&c->data, "\x08\0\0\0\0\0\0\0{}      ................", 32);
    else if (which >= DTYPE)
        craft_item(c, CKPT_F32, 2, d2, &length);
    int64_t n = (int64_t)c->data.len;
    switch (which) {
    case OVERLAP: craft_pair(c, "float32", o1); break;
    case OUTSIDE: craft_pair(c, "float32", o4); break;
    case HOLE:
        craft_tensor(c, "t", "float32", 2, d4);
        craft_chunk(c, 2, o0, d2);
        craft_tensor_end(c);
        craft_item(c, CKPT_F32, 2, d2, &length);
        craft_entry(c, "t", 2, o0, file, 0, length, NULL);
        break;
    case DTYPE: craft_one(c, "bfloat16", file, 0, n, NULL); break;
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
    case TRAVERSAL: craft_one(c, "float32", "../x", 0, n, NULL); break;
    case ABSOLUTE: craft_one(c, "float32", "/etc/passwd", 0, n, NULL); break;
    case TRANSFORM: craft_one(c, "float32", file, 0, n, "stream.zstd/1"); break;
    case SAFETENSORS: craft_one(c, "float32", file, 0, 16, NULL); break;
    case PAST_END: craft_one(c, "float32", file, 5, 100000, NULL); break;
    case HUGE_AT: craft_one(c, "float32", file, INT64_MAX, INT64_MAX, NULL); break;
    case BAD_DTYPE: craft_one(c, "float9", file, 0, n, NULL); break;
    case BAD_CLASS:
        ckpt_pkl_put_str(&c->state, "t");
        craft_object(&c->state, META, "StorageMeta");
        break;
    case OBJECT_ENTRY: craft_bytes(c, "o"); break;
    case NEGATIVE:
    case OVERFLOW_DIMS:
        craft_tensor(c, "t", "float32", 2, which == NEGATIVE ? minus : huge);
        craft_tensor_end(c);
        break;
    default: craft_one(c, "float32", file, 0, n, NULL); break;
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

/* xorshift64*: repeatable mutations. */
static uint64_t rng(uint64_t *s)
{
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * UINT64_C(2685821657736338717);
}

static void mutate_and_open(const char *dir, const char *name, int rounds, uint64_t seed)
{
    ckpt_buf data = {0};
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    get_file(path, &data);
    uint8_t *copy = malloc(data.len);
    for (int i = 0; i < rounds; i++) {
        ckpt_source src;
        ckpt_err err = {0};
        memcpy(copy, data.data, data.len);
        for (uint64_t k = rng(&seed) % 4 + 1; k > 0; k--) {
            uint8_t *p = &copy[rng(&seed) % data.len];
            uint64_t how = rng(&seed);
            *p = how % 3 == 0 ? (uint8_t)(how >> 8) : (uint8_t)(*p ^ (1u << (how >> 8) % 8));
        }
        put_file(path, copy, data.len);
        if (ckpt_source_open(&src, dir, NULL, &err) == CKPT_OK) {
            for (size_t t = 0; t < src.n_tensors; t++) {
                size_t n;
                free(read_tensor(&src, &src.tensors[t], &n));
            }
            ckpt_source_close(&src);
        } else {
            ck_assert_msg(err.code != CKPT_E_INTERNAL, "%s", err.text);
            ck_assert_uint_gt(strlen(err.text), 0);
        }
    }
    put_file(path, data.data, data.len);
    free(copy);
    ckpt_buf_release(&data);
}

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

/* ---- writing --------------------------------------------------------------------------------- */

#define MAX_TENSORS 64

/* A destination under construction. */
typedef struct target {
    ckpt_out out;
    ckpt_out_tensor tensors[MAX_TENSORS];
    ckpt_out_object objects[8];
    uint8_t *whole[MAX_TENSORS];
    ckpt_arena arena;
} target;

/* Add a tensor cut into parts[a] pieces along axis a (uneven where it does not divide; pieces past
 * the end are empty), owners dealt round robin from `owner`. */
static void add_tensor(target *t, const char *name, ckpt_dtype dtype, int rank, const int64_t *dims,
                       const int64_t *parts, int owner)
{
    ckpt_out_tensor *o = &t->tensors[t->out.n_tensors];
    int64_t at[CKPT_MAX_RANK] = {0}, n = 1;
    int unit = dtype == CKPT_F4 ? 2 : 1;
    for (int a = 0; a < rank; a++)
        n *= parts[a];
    *o = (ckpt_out_tensor){.name = name, .dims = dims, .dtype = dtype, .rank = rank};
    o->chunks = ckpt_arena_array(&t->arena, (size_t)n, sizeof *o->chunks);
    for (o->n_chunks = 0; o->n_chunks < (size_t)n; o->n_chunks++) {
        int64_t *lo = ckpt_arena_array(&t->arena, CKPT_MAX_RANK, sizeof *lo);
        int64_t *len = ckpt_arena_array(&t->arena, CKPT_MAX_RANK, sizeof *len);
        for (int a = 0; a < rank; a++) {
            int64_t k = a == rank - 1 ? unit : 1, size = dims[a] / k;
            int64_t each = (size + parts[a] - 1) / parts[a];
            lo[a] = k * ckpt_min_i64(at[a] * each, size);
            len[a] = k * ckpt_min_i64(each, size - lo[a] / k);
        }
        o->chunks[o->n_chunks] =
            (ckpt_out_chunk){.lo = lo,
                             .len = len,
                             .owner = (int)((owner + (int)o->n_chunks) % t->out.world),
                             .file = 999};
        step(rank, parts, at);
    }
    size_t bytes = tensor_bytes(dtype, rank, dims);
    uint8_t *p = ckpt_arena_alloc(&t->arena, bytes + 1);
    uint64_t seed = 1000 + t->out.n_tensors;
    for (size_t i = 0; i < bytes; i++)
        p[i] = dtype == CKPT_BOOL ? (uint8_t)(rng(&seed) >> 40 & 1) : (uint8_t)(rng(&seed) >> 40);
    t->whole[t->out.n_tensors++] = p;
}

static void add_object(target *t, const char *name, int owner, const char *json)
{
    ckpt_json *j = NULL;
    ckpt_err err = {0};
    ckpt_buf p = {0}, zip = {0};
    ck_assert(ckpt_json_parse(json, strlen(json), &j, &err) == CKPT_OK);
    ckpt_pkl_begin(&p);
    ckpt_buf_puts(&p, "](");
    ckpt_pkl_put_json(&p, j);
    ckpt_buf_puts(&p, "e");
    ckpt_pkl_end(&p);
    ckpt_zip_object(&zip, p.data, p.len);
    t->objects[t->out.n_objects++] =
        (ckpt_out_object){.name = name,
                          .owner = owner,
                          .data = ckpt_arena_memdup(&t->arena, zip.data, zip.len),
                          .length = zip.len};
    ckpt_buf_release(&p);
    ckpt_buf_release(&zip);
    ckpt_json_free(j);
}

static const struct {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    int64_t dims[4], parts[4];
} shapes[] = {
    {"a.f32", CKPT_F32, 2, {8, 6}, {2, 3}},
    {"a.bf16", CKPT_BF16, 3, {3, 5, 7}, {3, 1, 2}},
    {"a.f16", CKPT_F16, 1, {1000}, {4}},
    {"a.f64", CKPT_F64, 2, {1, 65}, {1, 1}},
    {"a.i64", CKPT_I64, 0, {0}, {0}},
    {"a.scalar", CKPT_F32, 0, {0}, {0}},
    {"a.empty", CKPT_F32, 2, {0, 4}, {2, 1}},
    {"a.uneven", CKPT_F32, 2, {5, 3}, {4, 1}},
    {"a.few", CKPT_F32, 1, {2}, {4}}, /* more ranks than rows: two empty chunks */
    {"a.u8", CKPT_U8, 1, {7}, {1}},
    {"a.i8", CKPT_I8, 4, {2, 1, 2, 3}, {1, 1, 2, 1}},
    {"a.bool", CKPT_BOOL, 1, {9}, {2}},
    {"a.c64", CKPT_C64, 1, {3}, {1}},
    {"a.f8e4m3", CKPT_F8_E4M3, 2, {4, 4}, {1, 2}},
    {"a.f8e5m2", CKPT_F8_E5M2, 1, {8}, {1}},
    {"a.e8m0", CKPT_F8_E8M0, 1, {8}, {1}},
    {"a.f4", CKPT_F4, 2, {4, 12}, {2, 3}},
    {"a.u16", CKPT_U16, 1, {5}, {1}},
    {"a.u32", CKPT_U32, 1, {5}, {1}},
    {"a.u64", CKPT_U64, 1, {5}, {1}},
    {"a.big", CKPT_F32, 2, {300, 500}, {2, 1}},
    {"n\xc3\xa4me with spaces, (and) dots", CKPT_I32, 2, {2, 2}, {1, 1}},
};

static void fill_target(target *t, int world)
{
    *t = (target){.out = {.world = world, .iteration = -1}};
    t->out.tensors = t->tensors;
    t->out.objects = t->objects;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        add_tensor(t, shapes[i].name, shapes[i].dtype, shapes[i].rank, shapes[i].dims,
                   shapes[i].parts, (int)i % world);
    add_object(t, "rng_state/shard_0.0_1.1", 0, "{\"seed\":1}");
    add_object(t, "other/shard_0_1", world - 1, "[1,2.5,\"x\",null,true]");
}

static void lay_out(target *t, ckpt_sink *sink)
{
    ckpt_err err = {0};
    *sink = (ckpt_sink){0};
    ckpt_status status = ckpt_torch_dist.layout(&t->out, sink, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
}

static void expect_tensors(ckpt_source *src, const target *t)
{
    ck_assert_uint_eq(src->n_tensors, t->out.n_tensors);
    for (size_t i = 0; i < t->out.n_tensors; i++) {
        const ckpt_out_tensor *o = &t->tensors[i];
        int64_t k = ckpt_source_find(src, o->name);
        ck_assert_msg(k >= 0, "%s", o->name);
        const ckpt_tensor *have = &src->tensors[k];
        size_t n;
        ck_assert_int_eq(have->dtype, o->dtype);
        ck_assert_int_eq(have->rank, o->rank);
        for (int a = 0; a < o->rank; a++)
            ck_assert_int_eq(have->dims[a], o->dims[a]);
        uint8_t *p = read_tensor(src, have, &n);
        ck_assert_msg(memcmp(p, t->whole[i], n) == 0, "%s differs", o->name);
        free(p);
    }
}

/* Where written checkpoints go: the scratch directory, or what CKPT_TEST_KEEP names. */
static const char *kept(const char *name)
{
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    const char *keep = getenv("CKPT_TEST_KEEP");
    snprintf(path, sizeof paths[0], "%s/%s", keep ? keep : scratch, name);
    ckpt_remove_tree(path);
    return path;
}

/* The same tensors, each in one piece, as one safetensors file. */
static void keep_expected(const target *t)
{
    static const int64_t zeros[CKPT_MAX_RANK];
    static ckpt_out_tensor tensors[MAX_TENSORS];
    static ckpt_out_chunk chunks[MAX_TENSORS];
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    ckpt_out out = {.tensors = tensors, .n_tensors = t->out.n_tensors, .world = 1};
    if (!getenv("CKPT_TEST_KEEP"))
        return;
    for (size_t i = 0; i < out.n_tensors; i++) {
        tensors[i] = t->tensors[i];
        tensors[i].chunks = &chunks[i];
        tensors[i].n_chunks = 1;
        chunks[i] = (ckpt_out_chunk){.lo = zeros, .len = tensors[i].dims};
    }
    ck_assert_msg(ckpt_safetensors.layout(&out, &sink, &err) == CKPT_OK, "%s", err.text);
    execute(&out, &sink, kept("expected"), t->whole, NULL);
    ckpt_arena_free(&sink.arena);
}

static ckpt_json *parse_json(const char *text)
{
    ckpt_json *j = NULL;
    ckpt_err err = {0};
    ck_assert_msg(ckpt_json_parse(text, strlen(text), &j, &err) == CKPT_OK, "%s", err.text);
    return j;
}

START_TEST(write_plain_dcp_reads_back)
{
    target t;
    ckpt_sink sink;
    ckpt_source src;
    static const int worlds[] = {1, 3, 40};
    fill_target(&t, worlds[_i]);
    ckpt_json *config = parse_json("{\"model_type\":\"x\"}");
    t.out.config = config;
    t.out.config_kind = CKPT_CONFIG_HF;
    lay_out(&t, &sink);
    ck_assert_str_eq(sink.manifest_dir, "");
    const char *dir = kept(_i == 1 ? "plain" : "plain_other");
    execute(&t.out, &sink, dir, t.whole, NULL);
    expect_open(&src, dir, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_HF);
    ck_assert(ckpt_json_equal(src.config, config));
    ck_assert_str_eq(object(&src, "other/shard_0_1")->text, "[[1,2.5,\"x\",null,true]]");
    expect_tensors(&src, &t);
    ckpt_source_close(&src);
    ckpt_json_free(config);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(write_megatron_reads_back)
{
    target t;
    ckpt_sink sink;
    ckpt_source src;
    int64_t v;
    fill_target(&t, 3);
    ckpt_json *args = parse_json("{\"hidden_size\":64,\"params_dtype\":\"torch.bfloat16\","
                                 "\"attention_backend\":{\"$enum\":\"os.system\",\"value\":5},"
                                 "\"eps\":1e-6,\"pattern\":\"K-+\",\"none\":null,\"list\":[1,2]}");
    t.out.config = args;
    t.out.config_kind = CKPT_CONFIG_MEGATRON;
    t.out.iteration = _i == 0 ? 1234 : -1;
    lay_out(&t, &sink);
    ck_assert_str_eq(sink.manifest_dir, _i == 0 ? "iter_0001234" : "release");
    ck_assert_str_eq(sink.files[sink.n_files - 1].name, CKPT_DCP_TRACKER);
    const char *dir = kept(_i == 0 ? "mcore" : "mcore_release");
    execute(&t.out, &sink, dir, t.whole, NULL);
    keep_expected(&t);
    open_plain(&src, dir);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.iteration, t.out.iteration);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.config, "params_dtype")), "torch.bfloat16");
    ck_assert(ckpt_json_int(ckpt_json_get(src.config, "attention_backend"), &v) && v == 5);
    ck_assert(ckpt_json_int(ckpt_json_get(src.common, "iteration"), &v));
    ck_assert_int_eq(v, _i == 0 ? 1234 : 0);
    ck_assert_uint_eq(src.n_objects, 3);
    ck_assert_ptr_null(object(&src, CKPT_DCP_COMMON_OBJECT)->unknown_global);
    expect_tensors(&src, &t);
    ckpt_source_close(&src);
    ckpt_json_free(args);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(write_twice_is_byte_identical)
{
    target t;
    ckpt_sink sink;
    for (int i = 0; i < 2; i++) {
        fill_target(&t, 3);
        t.out.config_kind = CKPT_CONFIG_MEGATRON;
        t.out.iteration = 5;
        lay_out(&t, &sink);
        execute(&t.out, &sink, in_scratch(i ? "b" : "a"), t.whole, NULL);
        for (uint32_t f = 0; i && f < sink.n_files; f++) {
            char a[600], b[600];
            ckpt_buf x = {0}, y = {0};
            snprintf(a, sizeof a, "%s/a/%s", scratch, sink.files[f].name);
            snprintf(b, sizeof b, "%s/b/%s", scratch, sink.files[f].name);
            get_file(a, &x);
            get_file(b, &y);
            ck_assert_uint_eq(x.len, y.len);
            ck_assert_mem_eq(x.data, y.data, x.len);
            ckpt_buf_release(&x);
            ckpt_buf_release(&y);
        }
        ckpt_arena_free(&sink.arena);
        ckpt_arena_free(&t.arena);
    }
}
END_TEST

START_TEST(write_refuses_what_torch_cannot_hold)
{
    static const int64_t four[] = {4}, one[] = {1};
    target t = {.out = {.world = 1}};
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    t.out.tensors = t.tensors;
    add_tensor(&t, "x", CKPT_F6_E2M3, 1, four, one, 0);
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "tensor 'x': torch has no dtype for F6_E2M3"));
    ckpt_arena_free(&sink.arena);
    sink = (ckpt_sink){0};
    t.out.single_file = true;
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_USAGE);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

/* ---- common state ---------------------------------------------------------------------------- */

START_TEST(common_with_args_keeps_the_rest)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf payload = {0};
    target t;
    ckpt_sink sink;
    open_plain(&src, MCORE "lowrank_fg_tp2");
    ckpt_json *args = ckpt_json_dup(src.config);
    ck_assert(ckpt_json_set(args, "hidden_size", ckpt_json_new_int(128)));
    ck_assert(ckpt_json_set(args, "brand_new", ckpt_json_new_string("torch.float16")));
    ckpt_status status = ckpt_dcp_common_with_args(&src, args, &payload, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);

    fill_target(&t, 2);
    t.objects[t.out.n_objects++] = (ckpt_out_object){
        .name = CKPT_DCP_COMMON_OBJECT, .data = payload.data, .length = payload.len};
    t.out.config = args;
    t.out.config_kind = CKPT_CONFIG_MEGATRON;
    t.out.iteration = 100;
    lay_out(&t, &sink);
    const char *dir = kept("mcore_carried");
    execute(&t.out, &sink, dir, t.whole, &src);

    ckpt_source back;
    open_plain(&back, dir); /* common.pt wins */
    ckpt_json *want = ckpt_json_dup(src.common), *have = ckpt_json_dup(back.common);
    ck_assert(ckpt_json_equal(back.config, args));
    ckpt_json_delete(want, "args");
    ckpt_json_delete(have, "args");
    ck_assert(ckpt_json_equal(want, have));
    ckpt_json_free(want);
    ckpt_json_free(have);
    const ckpt_object *o = object(&back, CKPT_DCP_COMMON_OBJECT);
    ck_assert_uint_eq(o->length, payload.len);
    ckpt_source_close(&back);

    char path[1200]; /* and the object alone says the same */
    snprintf(path, sizeof path, "%s/" ITER "/" CKPT_DCP_COMMON_FILE, dir);
    ck_assert_int_eq(unlink(path), 0);
    open_plain(&back, dir);
    ck_assert(ckpt_json_equal(back.config, args));
    ckpt_source_close(&back);
    if (getenv("CKPT_TEST_KEEP"))
        execute(&t.out, &sink, dir, t.whole, &src);

    ckpt_json_free(args);
    ckpt_source_close(&src);
    ckpt_buf_release(&payload);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(common_without_change_is_stable)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf once = {0}, twice = {0};
    open_plain(&src, MCORE "legacy_tp2");
    ck_assert(ckpt_dcp_common_with_args(&src, NULL, &once, &err) == CKPT_OK);
    ck_assert(ckpt_dcp_repack_bytes(once.data, once.len, true, &twice, &err) == CKPT_OK);
    ck_assert_uint_eq(once.len, twice.len);
    ck_assert_mem_eq(once.data, twice.data, once.len);
    ckpt_source_close(&src);
    ckpt_buf_release(&once);
    ckpt_buf_release(&twice);
}
END_TEST

START_TEST(common_with_tensor_keeps_its_storage)
{
    /* [{"args": Namespace, "scale": tensor}] as a zip with one storage: the item of a one-element
     * tensor, its pickle wrapped by hand. */
    static const int64_t one[] = {1};
    ckpt_buf item = {0}, out = {0};
    ckpt_err err = {0};
    float scale = 65536.0F;
    ckpt_zip_tensor_head(&item, CKPT_F32, 1, one);
    ckpt_buf_append(&item, &scale, sizeof scale);
    ckpt_zip_tensor_tail(&item, CKPT_F32, 1, one,
                         (uint32_t)crc32_z(0, (const uint8_t *)&scale, sizeof scale));
    /* A bare tensor is no common state. */
    ck_assert_int_eq(ckpt_dcp_repack_bytes(item.data, item.len, true, &out, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "common state is not a dict"));
    ckpt_buf_release(&item);
    ckpt_buf_release(&out);

    ckpt_buf real = {0};
    get_file("tests/data/common_tensor.pt", &real);
    ck_assert_msg(ckpt_dcp_repack_bytes(real.data, real.len, true, &out, &err) == CKPT_OK, "%s",
                  err.text);
    ckpt_buf_release(&real);
    crafted c = {0};
    ckpt_buf_append(&c.data, out.data, out.len);
    craft_bytes(&c, CKPT_DCP_COMMON_OBJECT);
    craft_entry(&c, CKPT_DCP_COMMON_OBJECT, -1, NULL, "__0_0.distcp", 0, (int64_t)out.len, NULL);
    const char *dir = kept("common_tensor");
    craft_write(&c, dir);
    ckpt_source src;
    expect_open(&src, dir, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, 3);
    ck_assert_ptr_nonnull(ckpt_json_path(src.common, "optimizer.grad_scaler.scale"));
    ckpt_source_close(&src);
    ckpt_buf_release(&out);
}
END_TEST

START_TEST(layout_refuses_common_state_by_range)
{
    target t = {.out = {.world = 1, .config_kind = CKPT_CONFIG_MEGATRON}};
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    t.out.objects = t.objects;
    t.out.n_objects = 1;
    t.objects[0] = (ckpt_out_object){.name = CKPT_DCP_COMMON_OBJECT, .length = 10};
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_INTERNAL);
    ckpt_arena_free(&sink.arena);
}
END_TEST

/* ---- suite ----------------------------------------------------------------------------------- */

#define COUNT(a) ((int)(sizeof(a) / sizeof(a)[0]))

static TCase *make_case(Suite *s, const char *name, double timeout)
{
    TCase *t = tcase_create(name);
    tcase_set_timeout(t, timeout);
    tcase_add_checked_fixture(t, scratch_make, scratch_remove);
    suite_add_tcase(s, t);
    return t;
}

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
    tcase_add_loop_test(t, open_defective_metadata_names_the_defect, 0, DEFECTS);
    tcase_add_test(t, open_truncated_metadata_fails_at_every_length);
    tcase_add_test(t, open_mutated_bytes_never_misbehaves);

    t = make_case(s, "write", 30);
    tcase_add_loop_test(t, write_plain_dcp_reads_back, 0, 3);
    tcase_add_loop_test(t, write_megatron_reads_back, 0, 2);
    tcase_add_test(t, write_twice_is_byte_identical);
    tcase_add_test(t, write_refuses_what_torch_cannot_hold);

    t = make_case(s, "common", 30);
    tcase_add_test(t, common_with_args_keeps_the_rest);
    tcase_add_test(t, common_without_change_is_stable);
    tcase_add_test(t, common_with_tensor_keeps_its_storage);
    tcase_add_test(t, layout_refuses_common_state_by_range);
    return s;
}
