/* torch.save files as they are written, and directories of pytorch_model*.bin as they are read. With
 * CKPT_TEST_KEEP=DIR the written file and its tensors stay in DIR for tests/peers/torch_equal.py. */
#include "dcp_test.h"

#include "torch_save.h"
#include "torch_write.h"

Suite *suite_torch_write(void);

#define MAX_TENSORS 64

typedef struct target {
    ckpt_out out;
    ckpt_sink sink;
    ckpt_out_tensor tensors[MAX_TENSORS];
    ckpt_out_chunk chunks[MAX_TENSORS];
    uint8_t *whole[MAX_TENSORS];
    ckpt_arena arena;
} target;

static const int64_t zeros[CKPT_MAX_RANK];

static void add(target *t, const char *name, ckpt_dtype dtype, int rank, const int64_t *dims)
{
    size_t i = t->out.n_tensors++;
    t->chunks[i] = (ckpt_out_chunk){.lo = zeros, .len = dims, .file = 999};
    t->tensors[i] = (ckpt_out_tensor){.name = name,
                                      .dims = dims,
                                      .chunks = &t->chunks[i],
                                      .n_chunks = 1,
                                      .dtype = dtype,
                                      .rank = rank};
    t->out.tensors = t->tensors;
    t->out.world = 1;
}

/* Random payloads. */
static void fill(target *t)
{
    for (size_t i = 0; i < t->out.n_tensors; i++) {
        const ckpt_out_tensor *o = &t->tensors[i];
        size_t bytes = tensor_bytes(o->dtype, o->rank, o->dims);
        uint64_t seed = 77 + i;
        t->whole[i] = ckpt_arena_alloc(&t->arena, bytes + 1);
        for (size_t k = 0; k < bytes; k++)
            t->whole[i][k] =
                (uint8_t)(o->dtype == CKPT_BOOL ? rng(&seed) >> 40 & 1 : rng(&seed) >> 40);
    }
}

/* All dtypes torch has, and shapes 0-d, empty, 1, odd. */
static void add_all(target *t)
{
    static const int64_t shapes[][3] = {
        {3, 4, 2},
        {1, 1, 2},
        {0, 7, 2}
    };
    for (int d = 0; d < CKPT_DTYPE_COUNT; d++) {
        const ckpt_dtype_info *info = ckpt_dtype_get((ckpt_dtype)d);
        if (info->torch == NULL)
            continue;
        for (int s = 0; s < (d % 3 == 0 ? 3 : 1); s++)
            add(t, ckpt_arena_printf(&t->arena, "%s.%d", info->name, s), (ckpt_dtype)d, 3,
                shapes[s]);
    }
    add(t, "scalar", CKPT_F32, 0, zeros);
    add(t, "'quoted \xc3\xa9' name", CKPT_I64, 1, shapes[0]);
}

static void lay_out(target *t, ckpt_status want, const char *message)
{
    ckpt_err err = {0};
    ckpt_status status = ckpt_torch_save.layout(&t->out, &t->sink, &err);
    ck_assert_msg(status == want, "%d: %s", status, err.text);
    if (message != NULL)
        ck_assert_msg(strstr(err.text, message) != NULL, "%s", err.text);
}

static void release(target *t)
{
    ckpt_arena_free(&t->sink.arena);
    ckpt_arena_free(&t->arena);
}

static void expect_tensors(const target *t, const char *path)
{
    ckpt_source src;
    ckpt_err err = {0};
    ck_assert_msg(ckpt_source_open(&src, path, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(src.container->name, "torch");
    ck_assert_uint_eq(src.n_tensors, t->out.n_tensors);
    for (size_t i = 0; i < t->out.n_tensors; i++) {
        const ckpt_out_tensor *o = &t->tensors[i];
        int64_t at = ckpt_source_find(&src, o->name);
        ck_assert_msg(at >= 0, "%s", o->name);
        const ckpt_tensor *x = &src.tensors[at];
        size_t n;
        ck_assert_int_eq(x->dtype, o->dtype);
        ck_assert_int_eq(x->rank, o->rank);
        for (int k = 0; k < o->rank; k++)
            ck_assert_int_eq(x->dims[k], o->dims[k]);
        uint8_t *p = read_tensor(&src, x, &n);
        ck_assert_msg(memcmp(p, t->whole[i], n) == 0, "%s", o->name);
        free(p);
    }
    ckpt_source_close(&src);
}

START_TEST(torch_file_of_every_dtype_reads_back)
{
    target t = {.out = {.single_file = true}};
    const char *keep = getenv("CKPT_TEST_KEEP");
    scratch_make();
    add_all(&t);
    fill(&t);
    lay_out(&t, CKPT_OK, NULL);
    ck_assert_uint_eq(t.sink.n_files, 1);
    const char *dir = keep != NULL ? keep : scratch;
    execute(&t.out, &t.sink, dir, t.whole, NULL);
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, t.sink.files[0].name);
    expect_tensors(&t, path);
    release(&t);
    scratch_remove();
}
END_TEST

/* Every payload begins at a multiple of 64 and its CRC in the directory is that of its bytes. */
START_TEST(torch_file_has_aligned_payloads_and_true_crcs)
{
    target t = {.out = {.single_file = true}};
    ckpt_source src = {0};
    ckpt_err err = {0};
    ckpt_zip zip;
    uint32_t file;
    size_t payloads = 0;
    scratch_make();
    add_all(&t);
    fill(&t);
    lay_out(&t, CKPT_OK, NULL);
    execute(&t.out, &t.sink, scratch, t.whole, NULL);
    const char *path = in_scratch(t.sink.files[0].name);
    ck_assert_int_eq(ckpt_source_add_file(&src, "f", path, true, &file, &err), CKPT_OK);
    ck_assert_msg(ckpt_zip_open(&src, file, 0, src.files[0].size, &src.arena, &zip, &err) ==
                      CKPT_OK,
                  "%s", err.text);
    ck_assert_uint_eq(zip.n_entries, t.out.n_tensors + 3);
    for (size_t i = 0; i < zip.n_entries; i++) {
        const ckpt_zip_entry *e = &zip.entries[i];
        uint8_t *p = malloc((size_t)e->size + 1);
        ck_assert_int_eq(ckpt_source_read(&src, file, p, (size_t)e->size, e->offset, &err),
                         CKPT_OK);
        ck_assert_msg(ckpt_crc32(0, p, (size_t)e->size) == e->crc, "%s", e->name);
        ck_assert_uint_eq(e->offset % 64, 0);
        payloads += e->size > 0 && strstr(e->name, "/data/") != NULL;
        free(p);
    }
    ck_assert_uint_gt(payloads, 20);
    ckpt_source_close(&src);
    release(&t);
    scratch_remove();
}
END_TEST

/* ---- more than 4 GiB ------------------------------------------------------------------------- */

/* The bytes of a planned file with payloads of zeros, whose CRC is made up. */
static ckpt_status read_planned(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                uint64_t offset, ckpt_err *err)
{
    const target *t = src->self;
    const ckpt_out_file *f = &t->sink.files[0];
    (void)file, (void)err;
    memset(buf, 0, n);
    for (size_t i = 0; i < f->n_segs; i++) {
        const ckpt_seg *s = &f->segs[i];
        uint64_t lo = ckpt_max_u64(s->offset, offset);
        uint64_t hi = ckpt_min_u64(s->offset + s->len, offset + n);
        if (s->kind != CKPT_SEG_LITERAL)
            continue;
        uint8_t *whole = malloc((size_t)s->len);
        ck_assert(t->sink.literal(&t->sink, 0, s, (uint32_t)(1000 + i), whole));
        if (lo < hi)
            memcpy((uint8_t *)buf + (lo - offset), whole + (lo - s->offset), (size_t)(hi - lo));
        free(whole);
    }
    return CKPT_OK;
}

START_TEST(torch_file_above_4_gib_uses_zip64)
{
    static const int64_t small[] = {3}, large[] = {5, INT64_C(1) << 28}, edge[] = {UINT32_MAX};
    target t = {.out = {.single_file = true}};
    add(&t, "a", CKPT_F32, 1, small);
    add(&t, "b", CKPT_F32, 2, large);
    add(&t, "c", CKPT_U8, 1, edge);
    add(&t, "d", CKPT_F32, 1, small);
    lay_out(&t, CKPT_OK, NULL);
    ck_assert_uint_gt(t.sink.files[0].size, UINT64_C(9) << 30);
    ckpt_file file = {.name = "f", .path = "f", .size = t.sink.files[0].size, .fd = -1};
    ckpt_source src = {.files = &file, .n_files = 1, .read_at = read_planned, .self = &t};
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    ckpt_zip zip;
    ckpt_pt pt;
    ck_assert_msg(ckpt_zip_open(&src, 0, 0, file.size, &arena, &zip, &err) == CKPT_OK, "%s",
                  err.text);
    for (size_t i = 0; i < 4; i++) {
        const ckpt_zip_entry *e = &zip.entries[i + 2];
        ck_assert_uint_eq(e->size,
                          tensor_bytes(t.tensors[i].dtype, t.tensors[i].rank, t.tensors[i].dims));
        ck_assert_uint_eq(e->offset, t.chunks[i].offset);
        ck_assert_uint_eq(e->offset % 64, 0);
        ck_assert_uint_ge(e->crc, 1000);
    }
    ck_assert_msg(ckpt_pt_open(&src, 0, 0, file.size, &arena, &pt, &err) == CKPT_OK, "%s",
                  err.text);
    ckpt_arena_free(&arena);
    release(&t);
}
END_TEST

/* ---- directories ----------------------------------------------------------------------------- */

static const int64_t twelve[] = {3, 4};

static void write_dir(target *t, uint64_t max_shard)
{
    *t = (target){.out = {.max_shard_bytes = max_shard}};
    add(t, "a", CKPT_F32, 2, twelve);
    add(t, "b", CKPT_U16, 2, twelve);
    add(t, "c", CKPT_F8_E4M3, 2, twelve);
    add(t, "d", CKPT_F32, 2, twelve);
    fill(t);
    lay_out(t, CKPT_OK, NULL);
    execute(&t->out, &t->sink, scratch, t->whole, NULL);
}

START_TEST(torch_directory_of_one_file_has_no_index)
{
    target t;
    scratch_make();
    write_dir(&t, 1000);
    ck_assert_uint_eq(t.sink.n_files, 1);
    ck_assert_str_eq(t.sink.files[0].name, "pytorch_model.bin");
    expect_tensors(&t, scratch);
    expect_tensors(&t, in_scratch("pytorch_model.bin"));
    release(&t);
    scratch_remove();
}
END_TEST

/* 48 + 24, 12 + 48 bytes. */
START_TEST(torch_directory_is_cut_into_shards_with_an_index)
{
    target t;
    ckpt_buf index = {0};
    scratch_make();
    write_dir(&t, 72);
    ck_assert_uint_eq(t.sink.n_files, 3);
    ck_assert_str_eq(t.sink.files[1].name, "pytorch_model-00002-of-00002.bin");
    get_file(in_scratch("pytorch_model.bin.index.json"), &index);
    ck_assert_str_eq((const char *)index.data,
                     "{\n  \"metadata\": {\n    \"total_parameters\": 48,\n"
                     "    \"total_size\": 132\n  },\n  \"weight_map\": {\n"
                     "    \"a\": \"pytorch_model-00001-of-00002.bin\",\n"
                     "    \"b\": \"pytorch_model-00001-of-00002.bin\",\n"
                     "    \"c\": \"pytorch_model-00002-of-00002.bin\",\n"
                     "    \"d\": \"pytorch_model-00002-of-00002.bin\"\n  }\n}\n");
    ckpt_buf_release(&index);
    expect_tensors(&t, scratch);
    expect_tensors(&t, in_scratch("pytorch_model.bin.index.json"));
    /* without the index the names of the files say as much */
    ck_assert_int_eq(unlink(in_scratch("pytorch_model.bin.index.json")), 0);
    expect_tensors(&t, scratch);
    release(&t);
    scratch_remove();
}
END_TEST

/* Optimizer state does not count for the shards, and the index does not name it. */
START_TEST(torch_directory_keeps_optimizer_state_apart)
{
    target t = {.out = {.max_shard_bytes = 72}};
    ckpt_buf index = {0};
    scratch_make();
    add(&t, "a", CKPT_F32, 2, twelve);
    add(&t, "a.exp_avg", CKPT_F32, 2, twelve);
    add(&t, "b", CKPT_U16, 2, twelve);
    add(&t, "b.exp_avg", CKPT_F32, 2, twelve);
    add(&t, "c", CKPT_F32, 2, twelve);
    t.tensors[1].optimizer = t.tensors[3].optimizer = true;
    fill(&t);
    lay_out(&t, CKPT_OK, NULL);
    execute(&t.out, &t.sink, scratch, t.whole, NULL);
    ck_assert_uint_eq(t.sink.n_files, 4);
    ck_assert_str_eq(t.sink.files[2].name, "optimizer.bin");
    get_file(in_scratch("pytorch_model.bin.index.json"), &index);
    ck_assert_ptr_null(strstr((const char *)index.data, "exp_avg"));
    ck_assert_ptr_nonnull(strstr((const char *)index.data, "\"total_size\": 120"));
    ckpt_buf_release(&index);
    expect_tensors(&t, scratch);
    release(&t);
    scratch_remove();
}
END_TEST

#define INDEX(map) "{\"metadata\":{},\"weight_map\":{" map "}}"
#define ONE "\"pytorch_model-00001-of-00002.bin\""
#define TWO "\"pytorch_model-00002-of-00002.bin\""

static const struct {
    const char *index; /* NULL: none; "": as written */
    const char *remove;
    const char *message;
} broken[] = {
    {"",                                                                          "pytorch_model-00002-of-00002.bin",
     "shard 'pytorch_model-00002-of-00002.bin' that pytorch_model.bin.index.json lists is absent"                                                                     },
    {NULL,                                                                        "pytorch_model-00002-of-00002.bin", "pytorch_model-00002-of-00002.bin is missing"   },
    {INDEX("\"a\":" ONE ",\"b\":" ONE ",\"c\":" TWO ",\"d\":" TWO ",\"e\":" TWO), NULL,
     "ghost index entry: tensor 'e' is not in 'pytorch_model-00002-of-00002.bin' nor in any other"                                                                    },
    {INDEX("\"a\":" ONE ",\"b\":" TWO ",\"c\":" TWO ",\"d\":" TWO),               NULL,
     "ghost index entry: tensor 'b' is not in 'pytorch_model-00002-of-00002.bin' but in"                                                                              },
    {INDEX("\"a\":" ONE ",\"b\":" ONE ",\"c\":" TWO),                             NULL,
     "tensor 'd' of 'pytorch_model-00002-of-00002.bin' is not in the index"                                                                                           },
    {INDEX("\"a\":\"../x.bin\""),                                                 NULL,                               "expected a plain file name, found '../x.bin'"  },
    {INDEX("\"a\":7"),                                                            NULL,                               "expected a plain file name, found another type"},
    {"{\"metadata\":{}}",                                                         NULL,                               "expected an object 'weight_map'"               },
    {"[]",                                                                        NULL,                               "expected a JSON object"                        },
    {"{",                                                                         NULL,                               "pytorch_model.bin.index.json"                  },
};

START_TEST(torch_directory_that_is_incomplete_is_refused)
{
    target t;
    ckpt_source src;
    ckpt_err err = {0};
    const char *index = broken[_i].index;
    scratch_make();
    write_dir(&t, 72);
    if (index == NULL)
        ck_assert_int_eq(unlink(in_scratch("pytorch_model.bin.index.json")), 0);
    else if (index[0] != '\0')
        put_text(in_scratch("pytorch_model.bin.index.json"), index);
    if (broken[_i].remove != NULL)
        ck_assert_int_eq(unlink(in_scratch(broken[_i].remove)), 0);
    ck_assert_int_eq(ckpt_source_open(&src, scratch, NULL, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, broken[_i].message) != NULL, "%s", err.text);
    ck_assert_msg(strncmp(err.text, scratch, strlen(scratch)) == 0, "%s", err.text);
    release(&t);
    scratch_remove();
}
END_TEST

START_TEST(torch_directory_with_a_tensor_in_two_files_is_refused)
{
    target t;
    ckpt_source src;
    ckpt_err err = {0};
    scratch_make();
    write_dir(&t, 72);
    ck_assert_int_eq(unlink(in_scratch("pytorch_model.bin.index.json")), 0);
    copy_file(in_scratch("pytorch_model-00001-of-00002.bin"),
              in_scratch("pytorch_model-00002-of-00002.bin"));
    ck_assert_int_eq(ckpt_source_open(&src, scratch, NULL, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "tensor 'a' is stored twice, in 'pytorch_model-00001") != NULL,
                  "%s", err.text);
    release(&t);
    scratch_remove();
}
END_TEST

START_TEST(torch_directory_beside_safetensors_reads_safetensors)
{
    target t;
    ckpt_source src;
    ckpt_err err = {0};
    scratch_make();
    write_dir(&t, 1000);
    copy_file(CKPT_FIXTURES "/torch/dcp_full_expected.safetensors",
              in_scratch("model.safetensors"));
    ck_assert_msg(ckpt_source_open(&src, scratch, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(src.container->name, "safetensors");
    ckpt_source_close(&src);
    release(&t);
    scratch_remove();
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    int64_t dims[2];
    const char *message;
} impossible[] = {
    {"x", CKPT_F6_E3M2, 1, {4},    "tensor 'x': torch has no dtype for F6_E3M2"          },
    {"x", CKPT_F4,      2, {2, 3}, "tensor 'x': float4 elements that are not whole pairs"},
    {"",  CKPT_F32,     1, {4},    "without name"                                        },
};

START_TEST(torch_file_refuses_what_torch_cannot_hold)
{
    target t = {.out = {.single_file = true}};
    add(&t, impossible[_i].name, impossible[_i].dtype, impossible[_i].rank, impossible[_i].dims);
    lay_out(&t, CKPT_E_UNSUPPORTED, impossible[_i].message);
    release(&t);
}
END_TEST

#define LOOP(t, test, table) tcase_add_loop_test(t, test, 0, (int)(sizeof table / sizeof *table))

Suite *suite_torch_write(void)
{
    Suite *s = suite_create("torch_write");
    TCase *t = tcase_create("torch_write");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, torch_file_of_every_dtype_reads_back);
    tcase_add_test(t, torch_file_has_aligned_payloads_and_true_crcs);
    tcase_add_test(t, torch_file_above_4_gib_uses_zip64);
    tcase_add_test(t, torch_directory_of_one_file_has_no_index);
    tcase_add_test(t, torch_directory_is_cut_into_shards_with_an_index);
    tcase_add_test(t, torch_directory_keeps_optimizer_state_apart);
    LOOP(t, torch_directory_that_is_incomplete_is_refused, broken);
    tcase_add_test(t, torch_directory_with_a_tensor_in_two_files_is_refused);
    tcase_add_test(t, torch_directory_beside_safetensors_reads_safetensors);
    LOOP(t, torch_file_refuses_what_torch_cannot_hold, impossible);
    suite_add_tcase(s, t);
    return s;
}
