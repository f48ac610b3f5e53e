/* Megatron zarr directories. The fixture is written by megatron-core 0.15 and zarr 2.18
 * (tests/peers/gen_dcp.py); each hostile case is one edit of a copy of it. */
#include "dcp_test.h"

#include <sys/resource.h>

#include "torch_save.h"
#include "zarr.h"

Suite *suite_zarr(void);

#define ZARR CKPT_FIXTURES "/torch/mcore_zarr"

static void copy_tree(const char *from, const char *to)
{
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    char **names, a[512], b[512];
    size_t n;
    copy_dir(from, to);
    ck_assert(ckpt_list_dir(from, &arena, &names, &n, &err) == CKPT_OK);
    for (size_t i = 0; i < n; i++) {
        snprintf(a, sizeof a, "%s/%s", from, names[i]);
        snprintf(b, sizeof b, "%s/%s", to, names[i]);
        if (ckpt_is_dir(a))
            copy_dir(a, b);
    }
    ckpt_arena_free(&arena);
}

START_TEST(open_fixture_equals_what_was_saved)
{
    ckpt_source src, want;
    open_plain(&src, ZARR);
    open_plain(&want, ZARR ".expected.safetensors");
    ck_assert_str_eq(src.container->name, "zarr");
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.iteration, 30);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    expect_same_tensors(&src, &want);
    ckpt_source_close(&src);
    ckpt_source_close(&want);
}
END_TEST

/* The object is there as torch_dist holds it: its value in a list of one. */
START_TEST(open_gives_objects_in_a_list)
{
    ckpt_source src;
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    ckpt_pt pt;
    int64_t v;
    open_plain(&src, ZARR);
    ck_assert_uint_eq(src.n_objects, 2);
    const ckpt_object *o = object(&src, "rng_state/shard_0.1_1.2");
    ck_assert_str_eq(o->text, "[{\"rank\":1}]");
    ck_assert_ptr_null(o->unknown_global);
    ck_assert_msg(ckpt_pt_open(&src, o->file, o->offset, o->length, &arena, &pt, &err) == CKPT_OK,
                  "%s", err.text);
    ck_assert_int_eq(pt.root->kind, CKPT_PKL_LIST);
    ck_assert(ckpt_pkl_int(ckpt_pkl_get(pt.root->items[0], "rank"), &v) && v == 1);
    ckpt_arena_free(&arena);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_object_with_a_cut_name_completes_it)
{
    ckpt_source src;
    copy_tree(ZARR, in_scratch("x"));
    ck_assert_int_eq(rename(in_scratch("x/rng_state/shard_0.0_1.2.pt"),
                            in_scratch("x/rng_state/shard_0.0_1.pt")),
                     0);
    ck_assert_int_eq(rename(in_scratch("x/rng_state/shard_0.1_1.2.pt"),
                            in_scratch("x/rng_state/shard_0.1_1.pt")),
                     0);
    open_plain(&src, in_scratch("x"));
    ck_assert_str_eq(object(&src, "rng_state/shard_0.0_1.2")->text, "[{\"rank\":0}]");
    ck_assert_str_eq(object(&src, "rng_state/shard_0.1_1.2")->text, "[{\"rank\":1}]");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_root_finds_the_iteration)
{
    ckpt_source src;
    make_dir(in_scratch("r"));
    copy_tree(ZARR, in_scratch("r/iter_0000030"));
    open_plain(&src, in_scratch("r")); /* without a tracker */
    ck_assert_str_eq(src.container->name, "zarr");
    ck_assert_int_eq(src.iteration, 30);
    ckpt_source_close(&src);
    put_text(in_scratch("r/" CKPT_DCP_TRACKER), "30");
    open_plain(&src, in_scratch("r"));
    ck_assert_str_eq(src.container->name, "zarr");
    ckpt_source_close(&src);
    /* A newer iteration in the newer form is what the root then is. */
    copy_dir(MCORE "lowrank_fg_tp2/" ITER, in_scratch("r/" ITER));
    put_text(in_scratch("r/" CKPT_DCP_TRACKER), "100");
    open_plain(&src, in_scratch("r"));
    ck_assert_str_eq(src.container->name, "torch_dist");
    ckpt_source_close(&src);
}
END_TEST

/* More chunk files than descriptors. */
START_TEST(open_holds_no_descriptor_of_a_chunk)
{
    ckpt_source src;
    struct rlimit limit;
    size_t n;
    char path[512];
    copy_tree(ZARR, in_scratch("x"));
    make_dir(in_scratch("x/many"));
    put_text(in_scratch("x/many/.zarray"),
             "{\"chunks\":[1],\"compressor\":null,\"dtype\":\"|u1\",\"fill_value\":null,"
             "\"filters\":null,\"order\":\"C\",\"shape\":[300],\"zarr_format\":2}");
    for (int i = 0; i < 300; i++) {
        uint8_t byte = (uint8_t)(i % 251);
        snprintf(path, sizeof path, "%s/x/many/%d", scratch, i);
        put_file(path, &byte, 1);
    }
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max = 64;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    open_plain(&src, in_scratch("x"));
    int64_t at = ckpt_source_find(&src, "many");
    ck_assert_int_ge(at, 0);
    uint8_t *bytes = read_tensor(&src, &src.tensors[at], &n);
    ck_assert_uint_eq(n, 300);
    for (size_t i = 0; i < n; i++)
        ck_assert_uint_eq(bytes[i], i % 251);
    free(bytes);
    ckpt_source_close(&src);
}
END_TEST

/* ---- hostile --------------------------------------------------------------------------------- */

#define DESCRIPTION(shape, chunks, dtype, more)                                                    \
    "{\"shape\":" shape ",\"chunks\":" chunks ",\"dtype\":" dtype more ",\"zarr_format\":2}"
#define PLAIN ",\"order\":\"C\",\"compressor\":null,\"filters\":null,\"fill_value\":null"

/* clang-format off */
static const struct {
    const char *text, *message; /* of decoder.weight/.zarray: [4,4] in chunks of [2,4], f4 */
    ckpt_status status;
} descriptions[] = {
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f4\"", PLAIN), NULL, CKPT_OK},
    {"", ".zarray: ", CKPT_E_FORMAT},
    {"[1,2]", "no list 'shape'", CKPT_E_FORMAT},
    {DESCRIPTION("[4,4]", "[2]", "\"<f4\"", PLAIN), "1 chunk extents for 2 dimensions", CKPT_E_FORMAT},
    {DESCRIPTION("[4,4]", "[0,4]", "\"<f4\"", PLAIN), "chunks: element 0 is not an integer of 1 or more", CKPT_E_FORMAT},
    {DESCRIPTION("[-4,4]", "[2,4]", "\"<f4\"", PLAIN), "shape: element 0 is not an integer of 0 or more", CKPT_E_FORMAT},
    {DESCRIPTION("[4,4.5]", "[2,4]", "\"<f4\"", PLAIN), "shape: element 1 is not an integer", CKPT_E_FORMAT},
    {DESCRIPTION("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[1]", "\"<f4\"", PLAIN), "17 dimensions, at most 16", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<V2\"", PLAIN), "dtype '<V2'", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"\"", PLAIN), "dtype ''", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "[[\"a\",\"<f4\"]]", PLAIN), "dtype is not a plain one", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f4\"", ",\"order\":\"C\",\"compressor\":{\"id\":\"blosc\"}"), "compressor blosc, expected null", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f4\"", ",\"order\":\"C\",\"filters\":[{\"id\":\"delta\"}]"), "filters, expected null", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f4\"", PLAIN ",\"dimension_separator\":\"/\""), "dimension_separator '/'", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f4\"", ",\"order\":\"A\""), "order is neither 'C' nor 'F'", CKPT_E_FORMAT},
    {"{\"shape\":[4],\"chunks\":[4],\"dtype\":\"<f4\",\"order\":\"C\",\"zarr_format\":3}", "zarr_format is not 2", CKPT_E_UNSUPPORTED},
    {DESCRIPTION("[4,4]", "[2,4]", "\"<f8\"", PLAIN), "chunk '0.0' has 32 bytes, expected 64", CKPT_E_FORMAT},
    {DESCRIPTION("[4,8]", "[2,4]", "\"<f4\"", PLAIN), "4 chunks, the directory has 3 files", CKPT_E_FORMAT},
    {DESCRIPTION("[6,4]", "[2,4]", "\"<f4\"", PLAIN), "chunk '2.0' is missing", CKPT_E_FORMAT},
    {DESCRIPTION("[9007199254740992,9007199254740992]", "[1,1]", "\"<f4\"", PLAIN), "number of chunks overflows", CKPT_E_FORMAT},
    {DESCRIPTION("[4,4]", "[9007199254740992,9007199254740992]", "\"<f4\"", PLAIN), "elements of a chunk overflow", CKPT_E_FORMAT},
    {DESCRIPTION("[4,4]", "[4611686018427387,1000]", "\"<f4\"", PLAIN), "bytes of a chunk overflow", CKPT_E_FORMAT},
};
/* clang-format on */

START_TEST(open_description_is_checked)
{
    ckpt_source src;
    ckpt_err err = {0};
    copy_tree(ZARR, in_scratch("x"));
    put_text(in_scratch("x/decoder.weight/.zarray"), descriptions[_i].text);
    ckpt_status status = ckpt_source_open(&src, in_scratch("x"), NULL, &err);
    ck_assert_msg(status == descriptions[_i].status, "status %d: %s", (int)status, err.text);
    if (status == CKPT_OK) {
        ckpt_source_close(&src);
        return;
    }
    ck_assert_msg(strstr(err.text, "tensor 'decoder.weight'") != NULL, "%s", err.text);
    ck_assert_msg(strstr(err.text, descriptions[_i].message) != NULL, "%s", err.text);
}
END_TEST

static void expect_zarr_error(const char *dir, ckpt_status want, const char *message)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_open_opts opts = {.iteration = -1, .container = "zarr"};
    ckpt_status status = ckpt_source_open(&src, dir, &opts, &err);
    ck_assert_msg(status == want, "status %d: %s", (int)status, err.text);
    ck_assert_msg(strstr(err.text, message) != NULL, "'%s' lacks '%s'", err.text, message);
}

START_TEST(open_damaged_directory_names_the_file)
{
    copy_tree(ZARR, in_scratch("x"));
    put_text(in_scratch("x/ints/1"), "short");
    expect_zarr_error(in_scratch("x"), CKPT_E_FORMAT,
                      "tensor 'ints': chunk '1' has 5 bytes, expected 16");
    copy_tree(ZARR, in_scratch("y"));
    put_text(in_scratch("y/rng_state/shard_0.0_1.2.pt"), "no archive");
    expect_zarr_error(in_scratch("y"), CKPT_E_UNSUPPORTED,
                      "rng_state/shard_0.0_1.2.pt: object is not a torch.save zip");
    ck_assert_int_eq(unlink(in_scratch("y/common.pt")), 0);
    expect_zarr_error(in_scratch("y"), CKPT_E_FORMAT, "no common.pt");
    put_text(in_scratch("y/metadata.json"), "{\"sharded_backend\":\"torch_dist\"}");
    expect_zarr_error(in_scratch("y"), CKPT_E_UNSUPPORTED,
                      "sharded_backend 'torch_dist', expected 'zarr'");
    copy_tree(ZARR, in_scratch("z"));
    make_dir(in_scratch("z/empty"));
    make_dir(in_scratch("z/decoder.weight.sync")); /* left by concurrent writers */
    ckpt_source src;
    open_plain(&src, in_scratch("z"));
    ck_assert_uint_eq(src.n_warnings, 1);
    expect_warning(&src, "directory 'empty' holds neither an array nor objects");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(mutated_files_never_misbehave)
{
    copy_tree(ZARR, in_scratch("x"));
    mutate_and_open(in_scratch("x"), "decoder.weight/.zarray", 400, 21);
    mutate_and_open(in_scratch("x"), "rng_state/shard_0.0_1.2.pt", 400, 22);
    mutate_and_open(in_scratch("x"), "common.pt", 200, 23);
}
END_TEST

Suite *suite_zarr(void)
{
    Suite *s = suite_create("zarr");
    TCase *t = make_case(s, "open", 60);
    tcase_add_test(t, open_fixture_equals_what_was_saved);
    tcase_add_test(t, open_gives_objects_in_a_list);
    tcase_add_test(t, open_object_with_a_cut_name_completes_it);
    tcase_add_test(t, open_root_finds_the_iteration);
    tcase_add_test(t, open_holds_no_descriptor_of_a_chunk);

    t = make_case(s, "hostile", 300);
    tcase_add_loop_test(t, open_description_is_checked, 0, COUNT(descriptions));
    tcase_add_test(t, open_damaged_directory_names_the_file);
    tcase_add_test(t, mutated_files_never_misbehave);
    return s;
}
