/* The kinds of DCP directory beside the ordinary one: safetensors items and HF storage, flattened
 * tensors of old Megatron-Core, FSDP. Fixtures: tests/peers/gen_dcp.py. */
#include "dcp_test.h"

#include "dcp_internal.h"
#include "pickle_vm.h"

Suite *suite_dcp_kinds(void);

#define TORCH CKPT_FIXTURES "/torch/"

/* ---- golden ---------------------------------------------------------------------------------- */

/* clang-format off */
static const struct {
    const char *path, *expected, *container, *warning;
    int objects;
} golden[] = {
    {TORCH "dcp_safetensors_items",       TORCH "dcp_safetensors_items", "torch_dist",  NULL, 2 },
    {TORCH "dcp_hf_consolidated",         TORCH "dcp_hf_consolidated",   "safetensors", NULL, 0 },
    {TORCH "dcp_hf_consolidated/sharded", TORCH "dcp_hf_consolidated",   "safetensors", NULL, 0 },
    {TORCH "mcore_flat_0_13_0",           TORCH "mcore_flat_0_13_0",     "torch_dist",  NULL, 2 },
    {TORCH "mcore_flat_0_15_0",           TORCH "mcore_flat_0_15_0",     "torch_dist",  NULL, 2 },
    {TORCH "mcore_flat_lost",             TORCH "mcore_flat_lost",       "torch_dist",
     "6 flattened optimizer tensors without mcore_data",                                      2 },
    {TORCH "dcp_fsdp2",                   TORCH "dcp_fsdp2",             "torch_dist",  NULL, -1},
    {TORCH "dcp_megatron_fsdp",           TORCH "dcp_megatron_fsdp",     "torch_dist",  NULL, -1},
    {TORCH "megatron_fsdp",               TORCH "megatron_fsdp",         "torch_dist",  NULL, -1},
};
/* clang-format on */

START_TEST(open_kind_equals_the_whole_tensors)
{
    ckpt_source src, want;
    char expected[512];
    snprintf(expected, sizeof expected, "%s.expected.safetensors", golden[_i].expected);
    open_plain(&src, golden[_i].path);
    open_plain(&want, expected);
    ck_assert_str_eq(src.container->name, golden[_i].container);
    ck_assert_uint_eq(src.n_warnings, golden[_i].warning ? 1 : 0);
    if (golden[_i].warning)
        expect_warning(&src, golden[_i].warning);
    if (golden[_i].objects >= 0)
        ck_assert_int_eq((int)src.n_objects, golden[_i].objects);
    expect_same_tensors(&src, &want);
    ckpt_source_close(&src);
    ckpt_source_close(&want);
}
END_TEST

/* "model." is left out where planner_data says that it is the state dict's. */
START_TEST(open_leaves_out_the_outer_model)
{
    static const char *const paths[] = {TORCH "dcp_fsdp2", TORCH "dcp_megatron_fsdp",
                                        TORCH "dcp_2rank", TORCH "megatron_fsdp"};
    static const char *const prefixes[] = {"model.", "model.", NULL, "model.module."};
    ckpt_source src;
    open_plain(&src, paths[_i]);
    if (prefixes[_i])
        ck_assert_str_eq(src.prefix, prefixes[_i]);
    else
        ck_assert_ptr_null(src.prefix);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_megatron_fsdp_takes_args_from_the_members)
{
    ckpt_source src;
    int64_t v;
    open_plain(&src, TORCH "dcp_megatron_fsdp");
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    ck_assert_int_eq(src.iteration, 12);
    ck_assert(ckpt_json_int(ckpt_json_get(src.config, "hidden_size"), &v) && v == 4);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(open_rank_local_metadata_says_so)
{
    ckpt_source src;
    expect_open(&src, TORCH "dcp_rank_local", CKPT_E_UNSUPPORTED,
                "rank-local metadata (__0.metadata), expected one .metadata");
}
END_TEST

/* ---- flattened ranges ------------------------------------------------------------------------ */

/* Every range of a small block: the boxes, walked in order, are its elements in order. */
static void check_ranges(int rank, const int64_t *block)
{
    int64_t lo[CKPT_FLAT_BOXES(4) * 4], len[CKPT_FLAT_BOXES(4) * 4], total = 1;
    for (int a = 0; a < rank; a++)
        total *= block[a];
    for (int64_t from = 0; from < total; from++)
        for (int64_t n = 1; n <= total - from; n++) {
            size_t boxes = ckpt_flat_split(rank, block, from, n, lo, len);
            int64_t next = from;
            ck_assert_uint_le(boxes, CKPT_FLAT_BOXES(rank));
            for (size_t i = 0; i < boxes; i++) {
                int64_t at[4] = {0};
                do {
                    int64_t flat = 0;
                    for (int a = 0; a < rank; a++)
                        flat = flat * block[a] + lo[i * (size_t)rank + (size_t)a] + at[a];
                    ck_assert_int_eq(flat, next++);
                } while (step(rank, len + i * (size_t)rank, at));
            }
            ck_assert_int_eq(next, from + n);
        }
}

START_TEST(flat_split_walks_every_range_in_order)
{
    /* clang-format off */
    static const int64_t blocks[][4] = {
        {1},       {7},       {3, 5},       {5, 1},       {1, 4},       {2, 3, 4},
        {4, 1, 3}, {1, 1, 5}, {2, 3, 2, 3}, {3, 1, 2, 2}, {1, 2, 1, 4},
    };
    /* clang-format on */
    static const int ranks[] = {1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4};
    for (int i = 0; i < COUNT(blocks); i++)
        check_ranges(ranks[i], blocks[i]);
    ck_assert_uint_eq(ckpt_flat_split(0, NULL, 0, 1, NULL, NULL), 1);
}
END_TEST

/* Tensor "x" stored [2,1,6] for [4,3]: two blocks of [2,3], the first cut at 4. */
enum {
    FLAT_GOOD,
    FLAT_RANK,
    FLAT_PARTS,
    FLAT_COUNT,
    FLAT_SPAN,
    FLAT_HOLE,
    FLAT_OUTSIDE,
    FLAT_CASES
};

/* clang-format off */
static const struct {
    const char *message;
    ckpt_status status;
} flat_cases[FLAT_CASES] = {
    [FLAT_GOOD] = {NULL,                                                                  CKPT_OK      },
    [FLAT_RANK] = {"tensor 'x': original shape has 1 dims, stored shape 3",               CKPT_E_FORMAT},
    [FLAT_PARTS] = {"original extent 5 on axis 0 is not a multiple of its 2 parts",       CKPT_E_FORMAT},
    [FLAT_COUNT] = {"a block has 8 elements, stored are 6",                               CKPT_E_FORMAT},
    [FLAT_SPAN] = {"chunk 0 spans 2 blocks on axis 0, expected 1",                        CKPT_E_FORMAT},
    [FLAT_HOLE] = {"tensor 'x': elements [1:2,1:2] missing",                              CKPT_E_FORMAT},
    [FLAT_OUTSIDE] = {"mcore_data: tensor 'x': chunk of 2 at 5 on axis 2 outside extent 6", CKPT_E_FORMAT},
};
/* clang-format on */

static void craft_flat(crafted *c, int which)
{
    int64_t dims[] = {2, 1, 6}, length;
    int64_t chunks[3][6] = {
        {0, 0, 0, 1, 1, 4},
        {0, 0, 4, 1, 1, 2},
        {1, 0, 0, 1, 1, 6},
    };
    int64_t shape[] = {4, 3};
    if (which == FLAT_PARTS)
        shape[0] = 5;
    if (which == FLAT_COUNT)
        shape[1] = 4;
    if (which == FLAT_SPAN)
        chunks[0][3] = 2;
    if (which == FLAT_OUTSIDE)
        chunks[1][2] = 5;
    if (which == FLAT_HOLE)
        chunks[1][2] = 5, chunks[1][5] = 1;
    craft_tensor(c, "x", "float32", 3, dims);
    for (int i = 0; i < 3; i++)
        craft_chunk(c, 3, chunks[i], chunks[i] + 3);
    craft_tensor_end(c);
    for (int i = 0; i < 3; i++) {
        int64_t at = craft_item(c, CKPT_F32, 3, chunks[i] + 3, &length);
        craft_entry(c, "x", 3, chunks[i], "__0_0.distcp", at, length, NULL);
    }
    ckpt_buf *b = &c->extra;
    ckpt_pkl_put_str(b, "mcore_data");
    ckpt_buf_puts(b, "}(");
    ckpt_pkl_put_str(b, "not stored"); /* what is not stored needs no shape */
    ckpt_buf_puts(b, "}");
    ckpt_pkl_put_str(b, "x");
    ckpt_buf_puts(b, "}(");
    ckpt_pkl_put_str(b, "nd_reformulated_orig_global_shape");
    ckpt_pkl_put_size(b, which == FLAT_RANK ? 1 : 2, shape);
    ckpt_buf_puts(b, "uu");
}

START_TEST(open_flattened_checks_the_shape)
{
    ckpt_source src;
    crafted c = {0};
    craft_flat(&c, _i);
    craft_write(&c, in_scratch("x"));
    expect_open(&src, in_scratch("x"), flat_cases[_i].status, flat_cases[_i].message);
    if (flat_cases[_i].status != CKPT_OK)
        return;
    ck_assert_int_eq(src.tensors[0].rank, 2);
    ck_assert_int_eq(src.tensors[0].dims[0], 4);
    ck_assert_uint_eq(src.tensors[0].n_chunks, 4);
    ckpt_source_close(&src);
}
END_TEST

/* ---- safetensors items ----------------------------------------------------------------------- */

/* Replace text of equal length in a file of the scratch copy. */
static void replace_in(const char *path, const char *from, const char *to)
{
    ckpt_buf data = {0};
    get_file(path, &data);
    size_t n = strlen(from);
    ck_assert_uint_eq(n, strlen(to));
    bool found = false;
    for (size_t i = 0; i + n <= data.len; i++)
        if (memcmp(data.data + i, from, n) == 0) {
            memcpy(data.data + i, to, n);
            found = true;
        }
    ck_assert_msg(found, "no %s in %s", from, path);
    put_file(path, data.data, data.len);
    ckpt_buf_release(&data);
}

/* clang-format off */
static const struct {
    const char *from, *to, *message;
} blob_edits[] = {
    {"\"rows\":{\"dtype",          "\"rowz\":{\"dtype",        "no tensor 'rows' in this file"                     },
    {"rows\\\": {\\\"saved_offsets\\\": [0, 0]", "rows\\\": {\\\"saved_offsets\\\": [1, 0]",
     "the blob holds the chunk at 1 on axis 0, .metadata says 0"                                                },
    {"\"rows\":{\"dtype\":\"F32\"", "\"rows\":{\"dtype\":\"I32\"", "tensor 'rows': item holds I32, .metadata says F32" },
    {"\"shape\":[3,4]",           "\"shape\":[4,3]",         "item has shape [4,3], .metadata says [3,4]"        },
    {"\"shape\":[3,4]",           "\"shape\":[3,5]",         "tensor 'rows'"                                     },
};
/* clang-format on */

START_TEST(open_damaged_blob_names_the_tensor)
{
    ckpt_source src;
    copy_dir(TORCH "dcp_safetensors_items", in_scratch("x"));
    replace_in(in_scratch("x/__0_0.distcp"), blob_edits[_i].from, blob_edits[_i].to);
    expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, blob_edits[_i].message);
}
END_TEST

START_TEST(open_truncated_blob_fails)
{
    ckpt_source src;
    ckpt_buf data = {0};
    copy_dir(TORCH "dcp_safetensors_items", in_scratch("x"));
    get_file(in_scratch("x/__0_0.distcp"), &data);
    for (size_t n = 0; n < data.len; n += 7) {
        put_file(in_scratch("x/__0_0.distcp"), data.data, n);
        expect_open(&src, in_scratch("x"), CKPT_E_FORMAT, "");
    }
    ckpt_buf_release(&data);
}
END_TEST

START_TEST(mutated_kinds_never_misbehave)
{
    copy_dir(TORCH "dcp_safetensors_items", in_scratch("x"));
    mutate_and_open(in_scratch("x"), "__0_0.distcp", 500, 11);
    mutate_and_open(in_scratch("x"), ".metadata", 300, 12);
    copy_dir(TORCH "mcore_flat_0_15_0", in_scratch("y"));
    mutate_and_open(in_scratch("y"), ".metadata", 1000, 13);
}
END_TEST

/* ---- sharing in large pickles ---------------------------------------------------------------- */

/* (padding, Size, Size) of a megabyte; `after` follows the second Size. */
static ckpt_status parse_sizes(const char *after, ckpt_arena *arena, ckpt_pkl **root, ckpt_err *err)
{
    static const int64_t dims[] = {3, 70000};
    ckpt_buf b = {0};
    char *padding = calloc(1, CKPT_VM_CACHE_MIN + 1);
    memset(padding, 'x', CKPT_VM_CACHE_MIN);
    ckpt_pkl_begin(&b);
    ckpt_buf_puts(&b, "(");
    ckpt_pkl_put_str(&b, padding);
    ckpt_pkl_put_size(&b, 2, dims);
    ckpt_pkl_put_size(&b, 2, dims);
    ckpt_buf_puts(&b, after);
    ckpt_buf_puts(&b, "t");
    ckpt_pkl_end(&b);
    ckpt_status status = ckpt_pkl_parse(b.data, b.len, arena, NULL, root, NULL, NULL, err);
    ckpt_buf_release(&b);
    free(padding);
    return status;
}

START_TEST(large_pickle_shares_equal_sizes)
{
    static const char *const changes[] = {"}b", "NK\x01s", "Na"};
    static const char *const messages[] = {"state given to a torch.Size",
                                           "cannot set items of a torch.Size",
                                           "cannot add items to a torch.Size"};
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    ckpt_pkl *root;
    int64_t v;
    ck_assert_msg(parse_sizes("", &arena, &root, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(root->n_items, 3);
    ck_assert_ptr_eq(root->items[1], root->items[2]);
    ck_assert(ckpt_pkl_is_object(root->items[2], "torch", "Size"));
    const ckpt_pkl *dims = root->items[2]->args->items[0];
    ck_assert_uint_eq(dims->n_items, 2);
    ck_assert(ckpt_pkl_int(dims->items[0], &v) && v == 3);
    ck_assert(ckpt_pkl_int(dims->items[1], &v) && v == 70000);
    for (int i = 0; i < COUNT(changes); i++) {
        ck_assert_int_eq(parse_sizes(changes[i], &arena, &root, &err), CKPT_E_FORMAT);
        ck_assert_msg(strstr(err.text, messages[i]) != NULL, "%s", err.text);
    }
    ckpt_arena_free(&arena);
}
END_TEST

Suite *suite_dcp_kinds(void)
{
    Suite *s = suite_create("dcp_kinds");
    TCase *t = make_case(s, "golden", 30);
    tcase_add_loop_test(t, open_kind_equals_the_whole_tensors, 0, COUNT(golden));
    tcase_add_loop_test(t, open_leaves_out_the_outer_model, 0, 4);
    tcase_add_test(t, open_megatron_fsdp_takes_args_from_the_members);
    tcase_add_test(t, open_rank_local_metadata_says_so);

    t = make_case(s, "flattened", 60);
    tcase_add_test(t, flat_split_walks_every_range_in_order);
    tcase_add_loop_test(t, open_flattened_checks_the_shape, 0, FLAT_CASES);

    t = make_case(s, "sharing", 60);
    tcase_add_test(t, large_pickle_shares_equal_sizes);

    t = make_case(s, "hostile", 300);
    tcase_add_loop_test(t, open_damaged_blob_names_the_tensor, 0, COUNT(blob_edits));
    tcase_add_test(t, open_truncated_blob_fails);
    tcase_add_test(t, mutated_kinds_never_misbehave);
    return s;
}
