/* safetensors reader: directories, indexes, DCP pieces, hostile headers. */
#include "st_test.h"

#include "st_header.h"
#include "st_scan.h"

Suite *suite_safetensors(void);

#define F4X(begin, end) T("F32", "[4]", begin, end)
#define INDEX_NAME "model.safetensors.index.json"

static void expect_warning(const ckpt_source *src, const char *text)
{
    for (size_t i = 0; i < src->n_warnings; i++)
        if (strstr(src->warnings[i], text) != NULL)
            return;
    ck_abort_msg("no warning '%s' among %zu", text, src->n_warnings);
}

/* Two shards a and b and an index, all consistent. */
static void put_pair(void)
{
    put_st("a.safetensors", "{\"x\":" F4X(0, 16) "}", 16);
    put_st("b.safetensors", "{\"y\":" F4X(0, 16) ",\"z\":" F4X(16, 32) "}", 32);
    put_text(INDEX_NAME,
             "{\"metadata\":{\"total_size\":48},\"weight_map\":{\"x\":\"a.safetensors\","
             "\"y\":\"b.safetensors\",\"z\":\"b.safetensors\"}}");
}

/* ---- reading -------------------------------------------------------------------------------- */

START_TEST(single_file_opens_with_offsets_and_metadata)
{
    ckpt_source src;
    put_st("m.safetensors",
           "{\"__metadata__\":{\"k\":\"a\",\"u\":\"\\u00e9\\n\",\"k\":\"b\"},\"y\":" F4X(
               0, 16) ",\"x\":" T("BF16", "[2,3]", 16, 28) "}",
           28);
    put_text("config.json", "{\"model_type\":\"no\"}");
    expect_open(&src, in_scratch("m.safetensors"), CKPT_OK, NULL);
    ck_assert_str_eq(src.root, scratch);
    ck_assert_uint_eq(src.n_files, 1);
    ck_assert_str_eq(src.files[0].name, "m.safetensors");
    ck_assert(src.files[0].is_data);
    ck_assert_int_eq(src.iteration, -1);
    ck_assert_ptr_null(src.config);
    const ckpt_tensor *x = tensor(&src, "x");
    ck_assert_int_eq(x->dtype, CKPT_BF16);
    ck_assert_int_eq(x->rank, 2);
    ck_assert_int_eq(x->dims[1], 3);
    ck_assert_uint_eq(x->n_chunks, 1);
    ck_assert_uint_eq(x->chunks[0].offset, src.files[0].size - 12);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.metadata, "k")), "b");
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.metadata, "u")), "\xc3\xa9\n");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(names_with_escapes_are_unescaped)
{
    ckpt_source src;
    put_st(
        "m.safetensors",
        "{\"a\\/\\\"\\\\\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20ac\\ud83d\\ude00 tail\":" F4X(0, 16) "}",
        16);
    expect_open(&src, in_scratch("m.safetensors"), CKPT_OK, NULL);
    ck_assert_str_eq(src.tensors[0].name,
                     "a/\"\\\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 tail");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(scalar_and_empty_shapes_keep_rank)
{
    ckpt_source src;
    put_st("m.safetensors",
           "{\"a\":" T("I64", "[]", 0, 8) ",\"b\":" T("F32", "[0]", 8,
                                                      8) ",\"c\":" T("F32", "[0,5]", 8, 8) "}",
           8);
    expect_open(&src, in_scratch("m.safetensors"), CKPT_OK, NULL);
    ck_assert_int_eq(tensor(&src, "a")->rank, 0);
    ck_assert_uint_eq(tensor(&src, "a")->n_chunks, 1);
    ck_assert_int_eq(tensor(&src, "b")->rank, 1);
    ck_assert_int_eq(tensor(&src, "c")->rank, 2);
    ck_assert_int_eq(tensor(&src, "c")->dims[1], 5);
    ckpt_source_close(&src);
}
END_TEST

/* Claims that other readers believed: sizes, rounding, rank. */
static const struct {
    const char *header;
    size_t data;
    ckpt_status want;
    const char *message;
} lies[] = {
    {"{\"t\":" T("F32",                                                                  "[1000,1000]",          0,                                                                                       4) "}",                                                                                                                                                                                         4,CKPT_E_FORMAT,
     "tensor 't': dtype F32 shape [1000,1000] needs 4000000 bytes, data_offsets give 4"},
    {"{\"t\":" T("U8", "[9007199254740993]",                       0,                                                                                               4) "}",                                                                                                                                                                                                                                                                         4,CKPT_E_FORMAT,
     "shape [9007199254740993] needs 9007199254740993 bytes"},
    {"{\"t\":" T("U8",                                                                                 "[9007199254740993]",                                                                                          0,                                                                                                                                             9007199254740993) "}",                                                                                                                                                                                                                                                                                                                                           4,CKPT_E_FORMAT,
     "offset 9007199254740993 past end 4 of the data: file is truncated"},
    {"{\"t\":" T("U8",                                                                                 "[1e19]",0,4) "}",4,CKPT_E_FORMAT, "found 1e19"},
    {"{\"t\":" T("U8",                                                                   "[1.5]", 0,                                                                                               4) "}",                                                                                                                                                                                                                                                                                                                                                     4, CKPT_E_FORMAT, "found 1.5"},
    {"{\"t\":" T("U8",                                                                      "[-1]",                                                                                            0,                                                                                                                                                                    4) "}",                                                                                                                                                                                                                                                                                         4,CKPT_E_FORMAT, "found -1"},
    {"{\"t\":" T("U8",                                                                                 "[1]",                                                                                          0,                                                                                                                                                                      18446744073709551617) "}",                1,CKPT_E_FORMAT,
     "integer 18446744073709551617 is above the limit"},
    {"{\"t\":" T("U8",                                                                                 "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",      0,1) "}",1,CKPT_E_UNSUPPORTED,
     "tensor 't': shape: rank is above the limit of 16"},
    {"{\"a\":" F4X(0,                                                                   16) ",\"b\":" F4X(17,    33) "}", 33, CKPT_E_FORMAT,
     "tensor 'b': hole at byte 16"},
    {"{\"__metadata__\":{\"k\":\"a\\u0000b\"}}",                                  0,                                                        CKPT_E_FORMAT,                                                                                                                                "contains a NUL"                                                                                                                                                                                                        },
    {"{\"a\":" F4X(0,                                                                                 16) ",\"a\\n\x1b[31m\":1}",                                                                                     16,                                                                                                                                                  CKPT_E_FORMAT,                                                                                                                                                                                                                                                                                                                                                "control character"},
};

START_TEST(lying_header_is_refused_with_numbers)
{
    put_st("m.safetensors", lies[_i].header, lies[_i].data);
    expect_refused(in_scratch("m.safetensors"), lies[_i].want, lies[_i].message);
}
END_TEST

START_TEST(message_with_terminal_escapes_is_one_printable_line)
{
    ckpt_source src;
    ckpt_err err = {0};
    put_st("m.safetensors", "{\"a\\u001b[31m\\n\":{}}", 0);
    ck_assert_int_eq(ckpt_source_open(&src, in_scratch("m.safetensors"), NULL, &err),
                     CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "\\x1b[31m\\x0a"));
    ck_assert_ptr_null(strchr(err.text, '\n'));
}
END_TEST

START_TEST(stand_in_file_is_named)
{
    static const char *const texts[][2] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
         "Git LFS pointer, not the file itself (oid sha256:4d7a2146, size 12345)"                      },
        {"<!DOCTYPE html><html><body>302 Found</body></html>",                            "HTML"       },
        {"PK\3\4 not a safetensors file",                                                 "zip archive"},
    };
    put_text("m.safetensors", texts[_i][0]);
    expect_refused(in_scratch("m.safetensors"), CKPT_E_FORMAT, texts[_i][1]);
}
END_TEST

START_TEST(indexed_directory_opens)
{
    ckpt_source src;
    put_pair();
    put_text("config.json", "{\"model_type\":\"t\"}");
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 3);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_HF);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.config, "model_type")), "t");
    ck_assert_uint_eq(src.n_files, 4);
    ck_assert_str_eq(src.files[tensor(&src, "z")->chunks[0].file].name, "b.safetensors");
    ckpt_source_close(&src);
    /* The index itself names the same checkpoint. */
    expect_open(&src, in_scratch(INDEX_NAME), CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 3);
    ckpt_source_close(&src);
}
END_TEST

#define MAP(entries) "{\"weight_map\":{" entries "}}"
#define GOOD "\"x\":\"a.safetensors\",\"y\":\"b.safetensors\",\"z\":\"b.safetensors\""
static const struct {
    const char *index, *message;
} bad_indexes[] = {
    {MAP(GOOD ",\"g\":\"c.safetensors\""),                                                 INDEX_NAME ": shard 'c.safetensors' that " INDEX_NAME
                                                      " lists is absent: incomplete download?"    },
    {MAP(GOOD ",\"g\":\"c.safetensors\",\"h\":\"d.safetensors\",\"i\":\"c.safetensors\""),
     "shard 'c.safetensors' and 1 others of 4"                                                                                              },
    {MAP(GOOD ",\"g\":\"a.safetensors\""),
     "ghost index entry: tensor 'g' is not in 'a.safetensors' nor in any other shard"                                                       },
    {MAP("\"x\":\"b.safetensors\",\"y\":\"b.safetensors\",\"z\":\"a.safetensors\""),
     "ghost index entry: tensor 'x' is not in 'b.safetensors' but in 'a.safetensors'"                                                       },
    {MAP("\"x\":\"a.safetensors\",\"y\":\"b.safetensors\""),
     "tensor 'z' of 'b.safetensors' is not in the index"                                                                                    },
    {MAP("\"x\":\"../a.safetensors\""),
     "tensor 'x': expected a plain file name, found '../a.safetensors'"                                                                     },
    {MAP("\"x\":\"/etc/passwd\""),                                                         "expected a plain file name, found '/etc/passwd'"},
    {MAP("\"x\":\"sub/a.safetensors\""),                                                   "expected a plain file name"                     },
    {MAP("\"x\":\"\""),                                                                    "expected a plain file name, found ''"           },
    {MAP("\"x\":1"),                                                                       "expected a plain file name, found another type" },
    {MAP("\"x\":\"a.safetensors\",\"x\":\"b.safetensors\""),                               "x"                                              },
    {"{\"weight_map\":[]}",                                                                "expected an object 'weight_map'"                },
    {"{}",                                                                                 "expected an object 'weight_map'"                },
    {"[]",                                                                                 "expected a JSON object"                         },
    {"{\"weight_map\":",                                                                   INDEX_NAME                                       },
};

START_TEST(bad_index_is_refused)
{
    put_pair();
    put_text(INDEX_NAME, bad_indexes[_i].index);
    expect_refused(scratch, CKPT_E_FORMAT, bad_indexes[_i].message);
}
END_TEST

START_TEST(missing_shard_is_refused_before_any_is_read)
{
    put_pair();
    ck_assert_int_eq(unlink(in_scratch("a.safetensors")), 0);
    put_text("b.safetensors", "broken");
    expect_refused(scratch, CKPT_E_FORMAT, "shard 'a.safetensors'");
}
END_TEST

START_TEST(stray_file_and_wrong_total_are_warnings)
{
    ckpt_source src;
    put_pair();
    put_text(INDEX_NAME,
             "{\"metadata\":{\"total_size\":47,\"note\":\"n\"},\"weight_map\":{" GOOD "}}");
    put_text("model.safetensors", "never read");
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 3);
    ck_assert_uint_eq(src.n_warnings, 2);
    expect_warning(&src, "stray file 'model.safetensors' was not read");
    expect_warning(&src, "total_size 47 differs from the 48 bytes");
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.metadata, "note")), "n");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(name_in_two_indexed_shards_is_refused)
{
    put_pair();
    put_st("a.safetensors", "{\"x\":" F4X(0, 16) ",\"y\":" F4X(16, 32) "}", 32);
    expect_refused(scratch, CKPT_E_FORMAT,
                   "tensor 'y' is in both 'a.safetensors' and 'b.safetensors'");
}
END_TEST

START_TEST(directory_without_index_prefers_the_single_model)
{
    ckpt_source src;
    put_st("model.safetensors", "{\"x\":" F4X(0, 16) "}", 16);
    put_text("other.safetensors", "never read");
    put_text(".hidden.safetensors", "never read");
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 1);
    ck_assert_uint_eq(src.n_warnings, 1);
    expect_warning(&src, "stray file 'other.safetensors'");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(directory_without_index_reads_every_file)
{
    ckpt_source src;
    put_pair();
    ck_assert_int_eq(unlink(in_scratch(INDEX_NAME)), 0);
    expect_open(&src, scratch, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 3);
    ckpt_source_close(&src);
    put_st("c.safetensors", "{\"x\":" F4X(0, 16) "}", 16);
    expect_refused(scratch, CKPT_E_FORMAT,
                   "tensor 'x': duplicate name: 'c.safetensors' and "
                   "'a.safetensors' both hold it");
}
END_TEST

START_TEST(index_of_another_name_is_used_and_two_are_refused)
{
    ckpt_source src;
    put_pair();
    ck_assert_int_eq(rename(in_scratch(INDEX_NAME), in_scratch("u.safetensors.index.json")), 0);
    expect_open(&src, scratch, CKPT_OK, NULL);
    ckpt_source_close(&src);
    put_text("v.safetensors.index.json", "{}");
    expect_refused(scratch, CKPT_E_UNSUPPORTED, "several indexes");
}
END_TEST

START_TEST(malformed_config_is_refused)
{
    put_pair();
    put_text("config.json", "{\"a\":1,}");
    expect_refused(scratch, CKPT_E_FORMAT, "config.json");
}
END_TEST

START_TEST(directory_without_tensors_is_refused)
{
    put_text("readme", "x");
    expect_refused(scratch, CKPT_E_FORMAT, "no *.safetensors file");
}
END_TEST

/* ---- DCP pieces ----------------------------------------------------------------------------- */

#define INFO(text) "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"" text "\"},\"w\":"
#define AT(r, c) "{\\\"w\\\":{\\\"saved_offsets\\\":[" #r "," #c "]}}"
static const struct {
    const char *a, *b, *message;
} pieces[] = {
    {INFO(AT(0,                0)) T("F32",        "[2,3]",                                  0,                                                                           24) "}",                                                                                                                                                      INFO(AT(2,0)) T("F32", "[1,3]", 0, 12) "}",
     NULL},
    {INFO(AT(0,                       0)) T("F32",                                  "[2,3]",                                                                                   0,                                                                                                                                                              24) "}",                                                                                                                                                                                                                                                                                                                  INFO(AT(1,0)) T("F32","[1,3]", 0, 12) "}",
     "tensor 'w'"},
    {INFO(AT(0,                 0)) T("F32",                          "[2,3]",                                                       0,24) "}",INFO(AT(3,0)) T("F32","[1,3]", 0, 12) "}",
     "tensor 'w'"},
    {INFO(AT(0,                0)) T("F32",       "[2,3]",               0,                                   24) "}",                                                                                                                                                                                                                           INFO(AT(2, 0)) T("I32",                                                                                                                                                                                                                                                                                                                                                                                                                                                                                 "[1,3]", 0, 12) "}",
     "dtype"},
    {INFO(AT(0,                       0)) T("F32",                                  "[2,3]",                                                                           0,                                                                                                                                                      24) "}",                                                                                                                                                                                                                                                                                                          "{\"w\":" T("F32","[1,3]",0, 12) "}",
     "both hold it, without DCP_SHARDING_INFO"},
    {INFO(AT(0,                 0)) T("F32",                          "[6]",                                                       0,                                                                                         24) "}",                          INFO(AT(2,0)) T("F32","[1,3]", 0, 12) "}",
     "expected saved_offsets with 1 numbers, found 2"},
    {INFO(AT(0,                0)) T("F32", "[2,3]", 0, 24) "}", INFO(AT(-1,0)) T("F32","[1,3]", 0, 12) "}",
     "not non-negative integers"},
    {INFO(AT(0,                 0)) T("F32",    "[2,3]",                                            0,                                                                                                               24) "}",
     INFO(AT(9007199254740991,0)) T("F32","[1,3]", 0, 12) "}", "tensor 'w'"},
    {INFO(AT(0,               0)) T("F32",                      "[2,3]",                                                       0,                                                                                                                                 24) "}",
     INFO("{\\\"v\\\":{}}") T("F32","[1,3]",0, 12) "}", "no tensor 'v' in this file"},
    {INFO(AT(0,0)) T("F32",         "[2,3]",                                                0,                                                                                                                    24) "}",                                                                                                                                                                                                                                                                      INFO("[1]") T("F32",                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                     "[1,3]",                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                                              0, 12) "}",
     "expected an object"},
    {INFO(AT(0,                 0)) T("F32",                  "[2,3]",                                                          0,                                                                                                                             24) "}",                                                                                                                                                                                                                                                              INFO("{") T("F32","[1,3]",0, 12) "}",
     "DCP_SHARDING_INFO"},
    {INFO(AT(0, 0)) T("F32",        "[2,3]",                                         0,                                                                                                                   24) "}",                                                                                                                                                                                                                                                                        "{}",                                           "both hold it"                                                                                                                                                                                                                                                                                          },
};

START_TEST(pieces_join_or_are_refused)
{
    ckpt_source src;
    bool lone = strcmp(pieces[_i].b, "{}") == 0;
    put_st("shard-00001-model-00001-of-00001.safetensors", pieces[_i].a, 24);
    put_st("shard-00002-model-00001-of-00001.safetensors", pieces[_i].b, lone ? 0 : 12);
    if (lone) /* one complete piece is a tensor */
        expect_open(&src, scratch, CKPT_OK, NULL);
    else
        expect_open(&src, scratch, pieces[_i].message ? CKPT_E_FORMAT : CKPT_OK,
                    pieces[_i].message);
    if (pieces[_i].message != NULL && !lone)
        return;
    const ckpt_tensor *w = tensor(&src, "w");
    ck_assert_uint_eq(w->n_chunks, lone ? 1 : 2);
    ck_assert_int_eq(w->dims[0], lone ? 2 : 3);
    ck_assert_int_eq(w->dims[1], 3);
    ck_assert_ptr_null(ckpt_json_get(src.metadata, "DCP_SHARDING_INFO"));
    ckpt_source_close(&src);
}
END_TEST

/* Row-major bytes of a rank-2 tensor of any chunks. */
static uint8_t *gather(ckpt_source *src, const ckpt_tensor *t, size_t *n)
{
    size_t elem = (size_t)ckpt_dtype_get(t->dtype)->bits / 8;
    ckpt_err err = {0};
    ck_assert_int_eq(t->rank, 2);
    *n = (size_t)(t->dims[0] * t->dims[1]) * elem;
    uint8_t *out = calloc(1, *n);
    for (size_t c = 0; c < t->n_chunks; c++) {
        const ckpt_chunk *k = &t->chunks[c];
        for (int64_t r = 0; r < k->len[0]; r++)
            ck_assert_int_eq(
                ckpt_source_read(
                    src, k->file, out + (size_t)((k->lo[0] + r) * t->dims[1] + k->lo[1]) * elem,
                    (size_t)k->len[1] * elem, k->offset + (uint64_t)(r * k->len[1]) * elem, &err),
                CKPT_OK);
    }
    return out;
}

START_TEST(torch_hf_writer_output_equals_whole_tensors)
{
    static const char *const names[] = {"w.row", "w.col", "w.uneven"};
    ckpt_source src, want;
    expect_open(&src, CKPT_FIXTURES "/torch/dcp_hf_sharded", CKPT_OK, NULL);
    expect_open(&want, CKPT_FIXTURES "/torch/dcp_full_expected.safetensors", CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_tensors, 6);
    ck_assert_uint_eq(src.n_files, 3);
    ck_assert_int_eq(strncmp(src.files[0].name, "sharded/shard-0", 15), 0);
    for (size_t i = 0; i < 3; i++) {
        size_t n, m;
        uint8_t *a = gather(&src, tensor(&src, names[i]), &n);
        uint8_t *b = gather(&want, tensor(&want, names[i]), &m);
        ck_assert_uint_eq(tensor(&src, names[i])->n_chunks, 2);
        ck_assert_uint_eq(n, m);
        ck_assert_mem_eq(a, b, n);
        free(a);
        free(b);
    }
    ckpt_source_close(&src);
    ckpt_source_close(&want);
}
END_TEST

START_TEST(probe_recognises_what_it_should)
{
    static const struct {
        const char *path;
        bool is_dir;
        const char *head;
        size_t head_len;
        uint64_t size;
        const char *names[3];
        int want;
    } cases[] = {
        {"m.safetensors",                       false, "junk",                 4,  4,  {NULL},                                    1},
        {"m.bin",                               false, "junk",                 4,  4,  {NULL},                                    0},
        {"m.bin",                               false, "\2\0\0\0\0\0\0\0{}",   10, 10, {NULL},                                    2},
        {"m.bin",                               false, "\3\0\0\0\0\0\0\0{}",   10, 10, {NULL},                                    0},
        {"m.bin",                               false, "\3\0\0\0\0\0\0\0\n{}", 11, 11, {NULL},                                    2},
        {"x.safetensors.index.json",            false, "{}",                   2,  2,  {NULL},                                    2},
        {"d",                                   true,  NULL,                   0,  0,  {"config.json", "model.safetensors"},      2},
        {"d",                                   true,  NULL,                   0,  0,  {"config.json", INDEX_NAME},               2},
        {"d",                                   true,  NULL,                   0,  0,  {"a.safetensors"},                         1},
        {"d",                                   true,  NULL,                   0,  0,  {"pytorch_model.bin.index.json", "x.bin"}, 0},
        {CKPT_FIXTURES "/torch/dcp_hf_sharded", true,  NULL,                   0,  0,  {"sharded"},                               1},
        {CKPT_FIXTURES "/torch",                true,  NULL,                   0,  0,  {"sharded"},                               0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ckpt_probe p = {.path = cases[i].path, .is_dir = cases[i].is_dir, .size = cases[i].size};
        char *names[3];
        p.head_len = cases[i].head_len;
        if (p.head_len > 0)
            memcpy(p.head, cases[i].head, p.head_len);
        for (; p.n_names < 3 && cases[i].names[p.n_names] != NULL; p.n_names++)
            names[p.n_names] = strdup(cases[i].names[p.n_names]);
        p.names = names;
        int score = 0;
        ck_assert_int_eq(ckpt_safetensors.probe(&p, &score, NULL), CKPT_OK);
        ck_assert_msg(score == cases[i].want, "case %zu", i);
        while (p.n_names > 0)
            free(names[--p.n_names]);
    }
}
END_TEST

START_TEST(real_checkpoint_opens)
{
    static const struct {
        const char *path;
        size_t tensors, files;
        bool config;
    } real[] = {
        {"hf/kimi_linear_tiny",            151, 5, true },
        {"hf/deepseek_v3_tiny",            91,  5, true },
        {"fla/kda_trained",                66,  5, true },
        {"mcore/legacy.plain.safetensors", 0,   1, false},
    };
    char path[256];
    ckpt_source src;
    snprintf(path, sizeof path, CKPT_FIXTURES "/%s", real[_i].path);
    expect_open(&src, path, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_uint_eq(src.n_files, real[_i].files);
    ck_assert_int_eq(src.config != NULL, real[_i].config);
    ck_assert_uint_gt(src.n_tensors, 10);
    if (real[_i].tensors != 0)
        ck_assert_uint_eq(src.n_tensors, real[_i].tensors);
    ckpt_source_close(&src);
}
END_TEST

/* ---- mutations ------------------------------------------------------------------------------ */

static uint64_t random_state = 88172645463325252u;

static size_t random_below(size_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)(random_state % n);
}

/* Change 1 to 4 places: a byte, an interesting token, a cut, or a repeated span. */
static size_t mutate(char *text, size_t n, size_t cap)
{
    static const char *const tokens[] = {"\"",
                                         "\\",
                                         "\\u0000",
                                         "\\ud800",
                                         "{",
                                         "}",
                                         "[",
                                         "]",
                                         ",",
                                         ":",
                                         "-1",
                                         "1e999",
                                         "null",
                                         "18446744073709551616",
                                         "\xff",
                                         "\xed\xa0\x80",
                                         "00",
                                         "0.5",
                                         "\"dtype\":\"F4\",",
                                         "\"__metadata__\":null,",
                                         "9223372036854775807"};
    for (size_t k = random_below(4) + 1; k > 0; k--) {
        size_t at = random_below(n + 1), len;
        const char *token = tokens[random_below(sizeof tokens / sizeof *tokens)];
        switch (random_below(5)) {
        case 0:
            if (at < n)
                text[at] = (char)random_below(256);
            break;
        case 1:
            len = strlen(token);
            if (n + len > cap)
                break;
            memmove(text + at + len, text + at, n - at);
            memcpy(text + at, token, len);
            n += len;
            break;
        case 2:
            len = random_below(8);
            if (at + len > n)
                break;
            memmove(text + at, text + at + len, n - at - len);
            n -= len;
            break;
        case 3:
            len = random_below(60);
            if (at + len > n || n + len > cap)
                break;
            memmove(text + at + len, text + at, n - at);
            n += len;
            break;
        default:
            if (random_below(4) == 0)
                n = at;
        }
    }
    return n;
}

static const char seed_header[] =
    "{\"__metadata__\":{\"format\":\"pt\",\"e\\u00e9\\n\":\"\\ud83d\\ude00\"},"
    "\"layers.0.weight\":" T("F32", "[2,2]", 0, 16) ",\"b\\\\\\\"\":" T(
        "BF16", "[3,1,2]", 16,
        28) ",\"c\":{\"x\":[{\"y\":[1.5e3,true,\"z\"]},null],\"shape\":[],\"dtype\":{\"I32\":null},"
            "\"data_offsets\":[28,32]},\"d\":[\"F4\",[2,2],[32,34]],\"e\":" T("U8", "[0,7]", 34,
                                                                              34) "}  ";

START_TEST(mutated_header_never_crashes)
{
    enum { ROUNDS = 3000, CAP = 4096 };
    size_t accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        /* Exactly sized, so that a sanitizer sees any step past the padding. */
        char work[CAP];
        size_t n = sizeof seed_header - 1;
        memcpy(work, seed_header, n);
        if (i > 0)
            n = mutate(work, n, CAP);
        char *text = calloc(1, n + CKPT_ST_SCAN_PAD);
        memcpy(text, work, n);
        ckpt_arena arena = {0};
        ckpt_st_table table = {0};
        ckpt_json *metadata;
        ckpt_err err = {0};
        ckpt_status status = ckpt_st_header_parse(text, n, 0, &arena, &table, &metadata, &err);
        free(text);
        if (status == CKPT_OK)
            status = ckpt_st_header_check(&table, 0, 34, &err);
        ck_assert(status == CKPT_OK || status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED);
        ck_assert_int_eq(status == CKPT_OK, err.text[0] == '\0');
        accepted += status == CKPT_OK;
        ckpt_json_free(metadata);
        ckpt_st_table_release(&table);
        ckpt_arena_free(&arena);
    }
    ck_assert_uint_gt(accepted, 1);
    ck_assert_uint_lt(accepted, ROUNDS / 2);
}
END_TEST

START_TEST(mutated_directory_never_crashes)
{
    static const char *const files[] = {INDEX_NAME, "a.safetensors", "b.safetensors"};
    for (int i = 0; i < 300; i++) {
        char work[1024];
        ckpt_source src;
        ckpt_err err = {0};
        put_pair();
        const char *name = files[i % 3];
        FILE *f = fopen(in_scratch(name), "rb");
        size_t n = fread(work, 1, 512, f);
        fclose(f);
        n = mutate(work, n, sizeof work);
        put_file(name, work, n);
        ckpt_status status = ckpt_source_open(&src, scratch, NULL, &err);
        if (status == CKPT_OK)
            ckpt_source_close(&src);
        else
            ck_assert_msg(status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED, "%d: %s",
                          (int)status, err.text);
    }
}
END_TEST

#define LOOP(tc, test, table)                                                                      \
    tcase_add_loop_test(tc, test, 0, (int)(sizeof(table) / sizeof *(table)))

static TCase *reading(void)
{
    TCase *tc = tcase_create("read");
    tcase_set_timeout(tc, 30);
    tcase_add_checked_fixture(tc, scratch_make, scratch_remove);
    tcase_add_test(tc, single_file_opens_with_offsets_and_metadata);
    tcase_add_test(tc, names_with_escapes_are_unescaped);
    tcase_add_test(tc, scalar_and_empty_shapes_keep_rank);
    LOOP(tc, lying_header_is_refused_with_numbers, lies);
    tcase_add_test(tc, message_with_terminal_escapes_is_one_printable_line);
    tcase_add_loop_test(tc, stand_in_file_is_named, 0, 3);
    tcase_add_test(tc, indexed_directory_opens);
    LOOP(tc, bad_index_is_refused, bad_indexes);
    tcase_add_test(tc, missing_shard_is_refused_before_any_is_read);
    tcase_add_test(tc, stray_file_and_wrong_total_are_warnings);
    tcase_add_test(tc, name_in_two_indexed_shards_is_refused);
    tcase_add_test(tc, directory_without_index_prefers_the_single_model);
    tcase_add_test(tc, directory_without_index_reads_every_file);
    tcase_add_test(tc, index_of_another_name_is_used_and_two_are_refused);
    tcase_add_test(tc, malformed_config_is_refused);
    tcase_add_test(tc, directory_without_tensors_is_refused);
    LOOP(tc, pieces_join_or_are_refused, pieces);
    tcase_add_test(tc, torch_hf_writer_output_equals_whole_tensors);
    tcase_add_test(tc, probe_recognises_what_it_should);
    tcase_add_loop_test(tc, real_checkpoint_opens, 0, 4);
    tcase_add_test(tc, mutated_header_never_crashes);
    tcase_add_test(tc, mutated_directory_never_crashes);
    return tc;
}

Suite *suite_safetensors(void)
{
    Suite *s = suite_create("safetensors");
    suite_add_tcase(s, reading());
    return s;
}
