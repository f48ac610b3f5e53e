/* safetensors writer: against files that the reference implementation and transformers wrote, and
 * what it must refuse. */
#include "st_test.h"

#include "checked.h"

Suite *suite_safetensors_write(void);

#define INDEX_NAME "model.safetensors.index.json"

/* ---- writing -------------------------------------------------------------------------------- */

/* An output that copies the tensors of a source, in its order. */
typedef struct copy {
    ckpt_source src;
    ckpt_out out;
    ckpt_sink sink;
    ckpt_arena arena;
} copy;

static void copy_open(copy *c, const char *path)
{
    memset(c, 0, sizeof *c);
    expect_open(&c->src, path, CKPT_OK, NULL);
    ckpt_out *out = &c->out;
    out->n_tensors = c->src.n_tensors;
    out->tensors = ckpt_arena_array(&c->arena, out->n_tensors, sizeof *out->tensors);
    out->iteration = -1;
    out->world = 1;
    for (size_t i = 0; i < out->n_tensors; i++) {
        const ckpt_tensor *t = &c->src.tensors[i];
        ckpt_out_chunk *chunk = ckpt_arena_alloc(&c->arena, sizeof *chunk);
        int64_t *zeros = ckpt_arena_array(&c->arena, (size_t)t->rank, sizeof *zeros);
        *chunk = (ckpt_out_chunk){.lo = zeros, .len = t->dims};
        out->tensors[i] = (ckpt_out_tensor){.name = t->name,
                                            .dims = t->dims,
                                            .chunks = chunk,
                                            .n_chunks = 1,
                                            .dtype = t->dtype,
                                            .rank = t->rank};
    }
}

static void copy_close(copy *c)
{
    ckpt_arena_free(&c->sink.arena);
    ckpt_arena_free(&c->arena);
    ckpt_source_close(&c->src);
}

static void copy_layout(copy *c)
{
    ckpt_err err = {0};
    ckpt_status status = ckpt_safetensors.layout(&c->out, &c->sink, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
}

/* Bytes of one planned file; segments must touch and cover it. */
static uint8_t *render(copy *c, uint32_t file)
{
    const ckpt_out_file *f = &c->sink.files[file];
    uint8_t *bytes = malloc(f->size + 1);
    uint64_t at = 0;
    ckpt_err err = {0};
    for (size_t i = 0; i < f->n_segs; i++) {
        const ckpt_seg *seg = &f->segs[i];
        ck_assert_uint_eq(seg->offset, at);
        if (seg->kind == CKPT_SEG_LITERAL) {
            ck_assert(c->sink.literal(&c->sink, file, seg, 0, bytes + at));
        } else {
            const ckpt_out_tensor *t = &c->out.tensors[seg->a];
            const ckpt_tensor *from = tensor(&c->src, t->name);
            ck_assert_int_eq(seg->kind, CKPT_SEG_CHUNK);
            ck_assert_uint_eq(t->chunks[0].file, file);
            ck_assert_uint_eq(t->chunks[0].offset, at);
            if (seg->len > 0)
                ck_assert_int_eq(ckpt_source_read(&c->src, from->chunks[0].file, bytes + at,
                                                  seg->len, from->chunks[0].offset, &err),
                                 CKPT_OK);
        }
        at += seg->len;
    }
    ck_assert_uint_eq(at, f->size);
    return bytes;
}

static void expect_file(copy *c, uint32_t file, const char *path)
{
    ckpt_buf want = {0};
    ckpt_err err = {0};
    ck_assert_msg(ckpt_read_file(path, 1 << 24, &want, &err) == CKPT_OK, "%s", err.text);
    uint8_t *got = render(c, file);
    ck_assert_msg(want.len == c->sink.files[file].size, "%s: %zu bytes, wrote %llu", path, want.len,
                  (unsigned long long)c->sink.files[file].size);
    size_t same = 0;
    while (same < want.len && want.data[same] == got[same])
        same++;
    ck_assert_msg(same == want.len, "%s: first difference at byte %zu", path, same);
    free(got);
    ckpt_buf_release(&want);
}

/* tests/data/st_golden.safetensors: safetensors 0.8.0, see make_st_golden.py beside it. */
START_TEST(golden_file_is_reproduced_byte_for_byte)
{
    copy c;
    copy_open(&c, "tests/data/st_golden.safetensors");
    ck_assert_uint_eq(c.out.n_tensors, 47);
    for (int single = 0; single < 2; single++) {
        c.out.single_file = single;
        copy_layout(&c);
        ck_assert_uint_eq(c.sink.n_files, 1);
        ck_assert_str_eq(c.sink.files[0].name, "model.safetensors");
        expect_file(&c, 0, "tests/data/st_golden.safetensors");
    }
    copy_close(&c);
}
END_TEST

static const copy *sorting;

static int by_shard_then_size(const void *a, const void *b)
{
    const ckpt_out_tensor *x = a, *y = b;
    const ckpt_tensor *p = tensor(&sorting->src, x->name), *q = tensor(&sorting->src, y->name);
    int order = strcmp(sorting->src.files[p->chunks[0].file].name,
                       sorting->src.files[q->chunks[0].file].name);
    int64_t m, n;
    if (order != 0)
        return order;
    ck_assert(ckpt_numel(p->rank, p->dims, &m) && ckpt_numel(q->rank, q->dims, &n));
    return m != n ? (m > n ? -1 : 1) : strcmp(x->name, y->name);
}

/* What transformers wrote, shard files, index and config. It sharded in its own key order; the
 * largest tensor of each shard first makes the greedy rule cut at the same places. total_parameters
 * of models with buffers leaves those out, so only the model without any has an equal index. */
START_TEST(transformers_directory_is_reproduced_byte_for_byte)
{
    static const struct {
        const char *dir;
        uint64_t max;
        bool same_index;
    } real[] = {
        {"hf/kimi_linear_tiny", 598856, false},
        {"hf/deepseek_v3_tiny", 353344, false},
        {"fla/kda_trained",     999688, true }
    };
    copy c;
    char path[300];
    snprintf(path, sizeof path, CKPT_FIXTURES "/%s", real[_i].dir);
    copy_open(&c, path);
    sorting = &c;
    qsort(c.out.tensors, c.out.n_tensors, sizeof *c.out.tensors, by_shard_then_size);
    c.out.max_shard_bytes = real[_i].max;
    c.out.config = c.src.config;
    c.out.metadata = c.src.metadata;
    copy_layout(&c);
    ck_assert_uint_eq(c.sink.n_files, 5);
    for (uint32_t i = 0; i < 5; i++) {
        snprintf(path, sizeof path, CKPT_FIXTURES "/%s/%s", real[_i].dir, c.sink.files[i].name);
        ck_assert_int_eq(c.sink.files[i].is_data, i < 3);
        if (i != 3 || real[_i].same_index)
            expect_file(&c, i, path);
    }
    ck_assert_str_eq(c.sink.files[3].name, INDEX_NAME);
    ck_assert_str_eq(c.sink.files[4].name, "config.json");
    copy_close(&c);
}
END_TEST

/* An output of synthetic tensors, sizes in bytes (U8). */
typedef struct synthetic {
    ckpt_out out;
    ckpt_sink sink;
    ckpt_out_tensor tensors[16];
    ckpt_out_chunk chunks[16];
    int64_t dims[16];
    char names[16][24];
} synthetic;

static void synthetic_init(synthetic *s, const int64_t *sizes, size_t n)
{
    static const int64_t zero[1];
    memset(s, 0, sizeof *s);
    s->out.tensors = s->tensors;
    s->out.n_tensors = n;
    for (size_t i = 0; i < n; i++) {
        s->dims[i] = sizes[i];
        snprintf(s->names[i], sizeof s->names[i], "t%zu", i);
        s->chunks[i] = (ckpt_out_chunk){.lo = zero, .len = &s->dims[i]};
        s->tensors[i] = (ckpt_out_tensor){.name = s->names[i],
                                          .dims = &s->dims[i],
                                          .rank = 1,
                                          .chunks = &s->chunks[i],
                                          .n_chunks = 1,
                                          .dtype = CKPT_U8};
    }
}

static void expect_layout(synthetic *s, ckpt_status want, const char *message)
{
    ckpt_err err = {0};
    ckpt_status status = ckpt_safetensors.layout(&s->out, &s->sink, &err);
    ck_assert_msg(status == want, "status %d: %s", (int)status, err.text);
    if (want != CKPT_OK)
        ck_assert_msg(strstr(err.text, message) != NULL, "expected '%s' in '%s'", message,
                      err.text);
}

/* The whole of a file that consists of one literal, or the literal it starts with. */
static char *literal_text(const synthetic *s, uint32_t file)
{
    const ckpt_seg *seg = &s->sink.files[file].segs[0];
    char *text = calloc(1, seg->len + 1);
    ck_assert_int_eq(seg->kind, CKPT_SEG_LITERAL);
    ck_assert(s->sink.literal(&s->sink, file, seg, 0, (uint8_t *)text));
    return text;
}

/* Sizes, limit, and the 1-based shard of each tensor as huggingface_hub splits them. */
static const struct {
    int64_t sizes[8];
    size_t n;
    uint64_t max;
    uint32_t shard[8];
    size_t shards;
} splits[] = {
    {{6, 6, 2, 6, 2, 2},   6, 10, {1, 2, 2, 3, 3, 3}, 3},
    {{3, 11, 3, 12, 3, 9}, 6, 10, {3, 1, 3, 2, 3, 4}, 4},
    {{11},                 1, 10, {1},                1},
    {{11, 12},             2, 10, {1, 2},             2},
    {{5, 5, 0, 1},         4, 10, {1, 1, 1, 2},       2},
    {{0, 0},               2, 10, {1, 1},             1},
    {{5, 50, 5},           3, 0,  {1, 1, 1},          1},
};

START_TEST(shards_fill_greedily)
{
    synthetic s;
    synthetic_init(&s, splits[_i].sizes, splits[_i].n);
    s.out.max_shard_bytes = splits[_i].max;
    expect_layout(&s, CKPT_OK, NULL);
    ck_assert_uint_eq(s.sink.n_files, splits[_i].shards + (splits[_i].shards > 1));
    for (size_t i = 0; i < splits[_i].n; i++)
        ck_assert_msg(s.chunks[i].file + 1 == splits[_i].shard[i], "tensor %zu in shard %u", i,
                      s.chunks[i].file + 1);
    if (splits[_i].shards == 3)
        ck_assert_str_eq(s.sink.files[1].name, "model-00002-of-00003.safetensors");
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(index_is_sorted_ascii_json)
{
    static const int64_t sizes[] = {4, 4};
    synthetic s;
    synthetic_init(&s, sizes, 2);
    s.tensors[0].name = "\xc3\xa9\xf0\x9f\x98\x80\x7f\"";
    s.out.max_shard_bytes = 4;
    ckpt_json *extras = ckpt_json_new_object();
    ck_assert(ckpt_json_set(extras, "zeta", ckpt_json_new_string("z\xc3\xa9")));
    ck_assert(ckpt_json_set(extras, "format", ckpt_json_new_string("pt")));
    ck_assert(ckpt_json_set(extras, "alpha", ckpt_json_new_string("a")));
    ck_assert(ckpt_json_set(extras, "total_size", ckpt_json_new_string("lie")));
    s.out.metadata = extras;
    expect_layout(&s, CKPT_OK, NULL);
    char *text = literal_text(&s, 2), *header = literal_text(&s, 0);
    ck_assert_str_eq(text,
                     "{\n  \"metadata\": {\n    \"alpha\": \"a\",\n    \"total_parameters\": 8,"
                     "\n    \"total_size\": 8,\n    \"zeta\": \"z\\u00e9\"\n  },\n"
                     "  \"weight_map\": {\n"
                     "    \"t1\": \"model-00002-of-00002.safetensors\",\n"
                     "    \"\\u00e9\\ud83d\\ude00\\u007f\\\"\": "
                     "\"model-00001-of-00002.safetensors\"\n  }\n}\n");
    ck_assert_str_eq(header + 8, "{\"__metadata__\":{\"format\":\"pt\"},"
                                 "\"\xc3\xa9\xf0\x9f\x98\x80\x7f\\\"\":{\"dtype\":\"U8\",\"shape\":"
                                 "[4],\"data_offsets\":[0,4]}}    ");
    free(text);
    free(header);
    ckpt_json_free(extras);
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(metadata_of_one_file_goes_into_the_header_sorted)
{
    synthetic s;
    synthetic_init(&s, NULL, 0);
    ckpt_json *extras = ckpt_json_new_object();
    expect_layout(&s, CKPT_OK, NULL);
    char *text = literal_text(&s, 0);
    ck_assert_str_eq(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}}");
    ck_assert_uint_eq(ckpt_get_u64(text), 32);
    free(text);
    ck_assert(ckpt_json_set(extras, "g", ckpt_json_new_string("\x01\x1f")));
    ck_assert(ckpt_json_set(extras, "a", ckpt_json_new_string("\b\f\n\r\t")));
    s.out.metadata = extras;
    expect_layout(&s, CKPT_OK, NULL);
    text = literal_text(&s, 0);
    ck_assert_ptr_nonnull(strstr(text + 8, "{\"__metadata__\":{\"a\":\"\\b\\f\\n\\r\\t\","
                                           "\"format\":\"pt\",\"g\":\"\\u0001\\u001f\"}}"));
    free(text);
    ck_assert(ckpt_json_set(extras, "format", ckpt_json_new_string("mlx")));
    expect_layout(&s, CKPT_OK, NULL);
    text = literal_text(&s, 0);
    ck_assert_ptr_nonnull(strstr(text + 8, "\"format\":\"mlx\",\"g\""));
    ck_assert_ptr_null(strstr(text + 8, "\"pt\""));
    free(text);
    ck_assert(ckpt_json_set(extras, "n", ckpt_json_new_int(1)));
    expect_layout(&s, CKPT_E_UNSUPPORTED, "metadata 'n'");
    ckpt_json_free(extras);
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(config_is_written_as_transformers_does)
{
    static const int64_t sizes[] = {4};
    synthetic s;
    ckpt_err err = {0};
    ckpt_json *config = NULL;
    const char *source =
        "{\"b\":[1,{}],\"a\":{\"x\":1e-05,\"y\":\"\xc3\xa9\"},\"c\":[],\"d\":null}";
    synthetic_init(&s, sizes, 1);
    ck_assert_int_eq(ckpt_json_parse(source, strlen(source), &config, &err), CKPT_OK);
    s.out.config = config;
    expect_layout(&s, CKPT_OK, NULL);
    ck_assert_uint_eq(s.sink.n_files, 2);
    char *text = literal_text(&s, 1);
    ck_assert_str_eq(text, "{\n  \"a\": {\n    \"x\": 1e-05,\n    \"y\": \"\\u00e9\"\n  },\n"
                           "  \"b\": [\n    1,\n    {}\n  ],\n  \"c\": [],\n  \"d\": null\n}\n");
    free(text);
    s.out.single_file = true;
    expect_layout(&s, CKPT_OK, NULL);
    ck_assert_uint_eq(s.sink.n_files, 1);
    ckpt_json_free(config);
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(unwritable_output_is_refused)
{
    static const int64_t sizes[] = {4, 5};
    synthetic s;
    ckpt_out_object object = {.name = "common_state/shard_0_1"};
    synthetic_init(&s, sizes, 2);
    s.out.objects = &object;
    s.out.n_objects = 1;
    expect_layout(&s, CKPT_E_UNSUPPORTED, "object 'common_state/shard_0_1'");
    s.out.n_objects = 0;
    s.tensors[1].dtype = CKPT_C128;
    expect_layout(&s, CKPT_E_UNSUPPORTED, "tensor 't1': dtype C128 has no safetensors form");
    s.tensors[1].dtype = CKPT_C32;
    expect_layout(&s, CKPT_E_UNSUPPORTED, "tensor 't1': dtype C32");
    s.tensors[1].dtype = CKPT_F4;
    expect_layout(&s, CKPT_E_UNSUPPORTED, "tensor 't1': F4");
    s.tensors[1].dtype = CKPT_U8;
    s.tensors[1].n_chunks = 2;
    expect_layout(&s, CKPT_E_INTERNAL, "tensor 't1': expected one chunk");
    s.tensors[1].n_chunks = 1;
    s.tensors[1].name = "__metadata__";
    expect_layout(&s, CKPT_E_UNSUPPORTED, "tensor '__metadata__'");
    s.tensors[1].name = "\xff";
    expect_layout(&s, CKPT_E_UNSUPPORTED, "cannot store this name");
    s.tensors[1].name = "t1";
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(file_of_2_to_the_63_bytes_is_refused)
{
    enum { N = 8 };
    int64_t sizes[N];
    synthetic s;
    for (int i = 0; i < N; i++)
        sizes[i] = (int64_t)1 << 60;
    synthetic_init(&s, sizes, N);
    expect_layout(&s, CKPT_E_UNSUPPORTED, "tensor 't7': file exceeds 2^63 bytes");
    ckpt_arena_free(&s.sink.arena);
}
END_TEST

START_TEST(header_above_the_limit_is_refused_or_split)
{
    enum { NAME = 26000000 };
    static const int64_t sizes[] = {1, 2, 3, 4};
    synthetic s;
    char *names[4];
    synthetic_init(&s, sizes, 4);
    for (int i = 0; i < 4; i++) {
        names[i] = malloc(NAME + 1);
        memset(names[i], 'a' + i, NAME);
        names[i][NAME] = '\0';
        s.tensors[i].name = names[i];
    }
    s.out.single_file = true;
    expect_layout(&s, CKPT_E_UNSUPPORTED, "above the limit of 100000000");
    ckpt_arena_free(&s.sink.arena);
    s.sink = (ckpt_sink){0};
    s.out.single_file = false;
    expect_layout(&s, CKPT_OK, NULL);
    ck_assert_uint_eq(s.sink.n_files, 3);
    ck_assert_uint_eq(s.chunks[2].file, 0);
    ck_assert_uint_eq(s.chunks[3].file, 1);
    ckpt_arena_free(&s.sink.arena);
    for (int i = 0; i < 4; i++)
        free(names[i]);
}
END_TEST

#define LOOP(tc, test, table)                                                                      \
    tcase_add_loop_test(tc, test, 0, (int)(sizeof(table) / sizeof *(table)))

Suite *suite_safetensors_write(void)
{
    Suite *s = suite_create("safetensors_write");
    TCase *tc = tcase_create("write");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, golden_file_is_reproduced_byte_for_byte);
    tcase_add_loop_test(tc, transformers_directory_is_reproduced_byte_for_byte, 0, 3);
    LOOP(tc, shards_fill_greedily, splits);
    tcase_add_test(tc, index_is_sorted_ascii_json);
    tcase_add_test(tc, metadata_of_one_file_goes_into_the_header_sorted);
    tcase_add_test(tc, config_is_written_as_transformers_does);
    tcase_add_test(tc, unwritable_output_is_refused);
    tcase_add_test(tc, file_of_2_to_the_63_bytes_is_refused);
    tcase_add_test(tc, header_above_the_limit_is_refused_or_split);
    suite_add_tcase(s, tc);
    return s;
}
