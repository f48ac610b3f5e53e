/* torch.save files: the fixtures against what PyTorch reads from them, and files built to deceive. */
#include "zip_build.h"

#include <stdio.h>
#include <unistd.h>

#include "checked.h"
#include "hash.h"
#include "io.h"
#include "torch_save.h"

Suite *suite_torch_save(void);

#define B(s) s, sizeof(s) - 1
#define LOOP(t, test, table) tcase_add_loop_test(t, test, 0, (int)(sizeof table / sizeof *table))

static const ckpt_open_opts as_torch = {.iteration = -1, .container = "torch"};

/* ---- fixtures --------------------------------------------------------------------------------- */

typedef struct golden_row {
    const char *file, *name, *dtype;
    int rank;
    int64_t dims[4], stride[4];
    const char *sha256;
} golden_row;

#include "torch_golden.h"

static void open_ok(ckpt_source *src, const char *path)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_source_open(src, path, &as_torch, &err) == CKPT_OK, "%s", err.text);
}

static void open_fixture(ckpt_source *src, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, CKPT_FIXTURES "/torch/%s", name);
    open_ok(src, path);
}

static const ckpt_tensor *tensor(const ckpt_source *src, const char *name)
{
    int64_t i = ckpt_source_find(src, name);
    ck_assert_msg(i >= 0, "no tensor %s", name);
    return &src->tensors[i];
}

/* SHA-256 of the elements in row-major order, read one by one through the strides. */
static void hash_elements(ckpt_source *src, const ckpt_tensor *t, char hex[65])
{
    ckpt_sha256 ctx;
    ckpt_err err = {0};
    uint8_t digest[CKPT_SHA256_LEN], element[16];
    size_t size = (size_t)ckpt_dtype_get(t->dtype)->bits / 8;
    int64_t index[CKPT_MAX_RANK] = {0};
    ck_assert_int_eq(ckpt_sha256_init(&ctx, &err), CKPT_OK);
    bool more = t->n_chunks > 0;
    while (more) {
        int64_t at = 0, step = 1;
        for (int a = t->rank; a-- > 0; step *= t->dims[a])
            at += index[a] * (t->chunks[0].stride ? t->chunks[0].stride[a] : step);
        ck_assert_int_eq(ckpt_source_read(src, t->chunks[0].file, element, size,
                                          t->chunks[0].offset + (uint64_t)at * size, &err),
                         CKPT_OK);
        ckpt_sha256_update(&ctx, element, size);
        more = false;
        for (int a = t->rank; a-- > 0 && !more;) {
            more = ++index[a] < t->dims[a];
            if (!more)
                index[a] = 0;
        }
    }
    ckpt_sha256_final(&ctx, digest);
    ckpt_hex(digest, hex);
    ckpt_sha256_release(&ctx);
}

START_TEST(torch_fixture_tensor_equals_what_pytorch_reads)
{
    const golden_row *row = &golden[_i];
    ckpt_source src;
    char hex[2 * CKPT_SHA256_LEN + 1];
    open_fixture(&src, row->file);
    const ckpt_tensor *t = tensor(&src, row->name);
    ck_assert_str_eq(ckpt_dtype_get(t->dtype)->name, row->dtype);
    ck_assert_int_eq(t->rank, row->rank);
    int64_t step = 1;
    for (int i = row->rank; i-- > 0; step *= row->dims[i]) {
        ck_assert_int_eq(t->dims[i], row->dims[i]);
        if (t->n_chunks)
            ck_assert_int_eq(t->chunks[0].stride ? t->chunks[0].stride[i] : step, row->stride[i]);
    }
    hash_elements(&src, t, hex);
    ck_assert_str_eq(hex, row->sha256);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(torch_fixture_lists_exactly_the_golden_tensors)
{
    static const char *const files[] = {"torch_save_zip.pt", "torch_save_legacy.pt",
                                        "torch_save_proto4.pt", "state_dict.bin"};
    size_t expected = 0;
    ckpt_source src;
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++)
        expected += strcmp(golden[i].file, files[_i]) == 0;
    open_fixture(&src, files[_i]);
    ck_assert_uint_eq(src.n_tensors, expected);
    ck_assert_uint_eq(src.n_objects, 0);
    ck_assert_uint_eq(src.n_files, 1);
    ck_assert_ptr_nonnull(src.common);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(torch_undecoded_kinds_are_reported)
{
    ckpt_source src;
    open_fixture(&src, "torch_save_zip.pt");
    ck_assert_uint_eq(src.n_warnings, 2);
    ck_assert_ptr_nonnull(strstr(src.warnings[0], "'q': quantised tensor is not decoded"));
    ck_assert_ptr_nonnull(strstr(src.warnings[1], "'sparse': sparse tensor is not decoded"));
    ckpt_source_close(&src);
}
END_TEST

START_TEST(torch_common_shows_the_whole_object)
{
    static const struct {
        const char *path, *text;
    } rows[] = {
        {"bf16.$tensor",           "\"BF16 [3,3]\""                },
        {"q.$tensor",              "\"quantised\""                 },
        {"meta.iteration",         "100"                           },
        {"meta.args.params_dtype", "\"torch.bfloat16\""            },
        {"meta.args.lr",           "0.0001"                        },
        {"meta.args.big.$int",     "\"1180591620717411303424\""    },
        {"meta.dt.$datetime",      "\"2026-01-02T03:04:05.000000\""},
        {"meta.np.$ndarray",       "\"u4 [5]\""                    },
        {"meta.npf",               "2.5"                           },
        {"meta.npi",               "7"                             },
        {"meta.path",              "\"a/b\""                       },
        {"meta.float.$float",      "\"inf\""                       },
        {"meta.fs.$set",           "[3]"                           },
        {"meta.unicode",           "\"na\xc3\xafve \xe2\x9c\x93\"" },
    };
    static const char *const files[] = {"torch_save_zip.pt", "torch_save_proto4.pt"};
    ckpt_source src;
    open_fixture(&src, files[_i]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_buf text = {0};
        const ckpt_json *j = ckpt_json_path(src.common, rows[i].path);
        ck_assert_msg(j != NULL, "no %s", rows[i].path);
        ck_assert(ckpt_json_print(j, 0, false, &text));
        ck_assert_str_eq((const char *)text.data, rows[i].text);
        ckpt_buf_release(&text);
    }
    ckpt_source_close(&src);
}
END_TEST

/* ---- files built here ------------------------------------------------------------------------- */

static char path[64];

static void make_path(void)
{
    snprintf(path, sizeof path, "/tmp/ckpt-torch-XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    close(fd);
}

static void remove_path(void)
{
    unlink(path);
}

static void put_path(const ckpt_buf *b)
{
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(b->data, 1, b->len, f), b->len);
    ck_assert_int_eq(fclose(f), 0);
}

static const uint8_t payload[48] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

/* An archive with this data.pkl and one storage "0" of n bytes. */
static void put_archive(const void *pickle, size_t n_pickle, size_t n)
{
    const zip_part parts[] = {
        {.name = "a/data.pkl",  .data = pickle,   .n = n_pickle},
        {.name = "a/byteorder", .data = "little", .n = 6       },
        {.name = "a/data/0",    .data = payload,  .n = n       },
        {.name = "a/version",   .data = "3\n",    .n = 2       }
    };
    ckpt_buf b = {0};
    zip_build(&b, parts, 4);
    put_path(&b);
    ckpt_buf_release(&b);
}

#define STORAGE(cls, numel)                                                                        \
    "(U\7storagec" cls "\nU\1"                                                                     \
    "0U\3cpu" numel "tQ"
#define HOOKS                                                                                      \
    "\x89"                                                                                         \
    "ccollections\nOrderedDict\n)R"
#define V2(storage, offset, size, stride)                                                          \
    "ctorch._utils\n_rebuild_tensor_v2\n(" storage offset size stride HOOKS "tR"
#define F32x12 STORAGE("torch\nFloatStorage", "K\14")
#define GOOD V2(F32x12, "K\0", "K\3K\4\x86", "K\4K\1\x86")

typedef struct deceit {
    const char *pickle;
    size_t n;
    ckpt_status status;
    const char *text;
} deceit;

/* clang-format off */
static const deceit deceits[] = {
    {B(V2(STORAGE("torch\nFloatStorage", "K\13"), "K\0", "K\3\x85", "K\1\x85") "."), CKPT_E_FORMAT, "11 elements of 4 bytes, but its record has 48 bytes"},
    {B(V2(STORAGE("torch\nFloatStorage", "K\15"), "K\0", "K\3\x85", "K\1\x85") "."), CKPT_E_FORMAT, "13 elements of 4 bytes, but its record has 48 bytes"},
    {B(V2(STORAGE("torch\nDoubleStorage", "K\14"), "K\0", "K\3\x85", "K\1\x85") "."), CKPT_E_FORMAT, "12 elements of 8 bytes"},
    {B(V2(STORAGE("torch\nFloatStorage", "J\xff\xff\xff\xff"), "K\0", "K\3\x85", "K\1\x85") "."), CKPT_E_FORMAT, "ill-formed storage id"},
    {B(V2(F32x12, "K\0", "K\3K\5\x86", "K\5K\1\x86") "."), CKPT_E_FORMAT, "view past the end of storage '0' of 12 elements"},
    {B(V2(F32x12, "K\1", "K\3K\4\x86", "K\4K\1\x86") "."), CKPT_E_FORMAT, "view past the end"},
    {B(V2(F32x12, "K\14", "K\1\x85", "K\1\x85") "."), CKPT_E_FORMAT, "view past the end"},
    {B(V2(F32x12, "K\0", "K\2\x85", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85") "."), CKPT_E_FORMAT, "view past the end"},
    {B(V2(F32x12, "K\1", "K\2\x85", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85") "."), CKPT_E_FORMAT, "view past the end"},
    {B(V2(F32x12, "J\xff\xff\xff\xff", "K\1\x85", "K\1\x85") "."), CKPT_E_FORMAT, "storage offset is negative"},
    {B(V2(F32x12, "N", "K\1\x85", "K\1\x85") "."), CKPT_E_FORMAT, "storage offset is negative or not an integer"},
    {B(V2(F32x12, "K\0", "K\2\x85", "J\xff\xff\xff\xff\x85") "."), CKPT_E_FORMAT, "negative or other value"},
    {B(V2(F32x12, "K\0", "J\xfe\xff\xff\xff\x85", "K\1\x85") "."), CKPT_E_FORMAT, "negative or other value"},
    {B(V2(F32x12, "K\0", "K\3K\4\x86", "K\1\x85") "."), CKPT_E_FORMAT, "tuples of equal length"},
    {B(V2(F32x12, "K\0", "]", "K\1\x85") "."), CKPT_E_FORMAT, "tuples of equal length"},
    {B(V2(F32x12, "K\0", "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f""2\x86", "K\0K\0\x86") "."), CKPT_E_FORMAT, "element count overflows"},
    {B(V2(F32x12, "K\0", "(K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1t", "(K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1K\1t") "."), CKPT_E_UNSUPPORTED, "rank 17, at most 16"},
    {B(V2("(U\7storagectorch\nFloatStorage\nU\1""9U\3cpuK\14tQ", "K\0", "K\1\x85", "K\1\x85") "."), CKPT_E_FORMAT, "no record 'a/data/9'"},
    {B(V2("(U\7storagectorch\nFloatStorage\nU\4""../0U\3cpuK\14tQ", "K\0", "K\1\x85", "K\1\x85") "."), CKPT_E_FORMAT, "no record"},
    {B(V2("U\1""0Q", "K\0", "K\1\x85", "K\1\x85") "."), CKPT_OK, "storage-less tensor is not decoded"},
    {B("}X\0\0\0\0" GOOD "s."), CKPT_OK, NULL},
    {B("}X\3\0\0\0""a\0b" GOOD "s."), CKPT_E_FORMAT, "goes on after a NUL"},
    {B("}X\3\0\0\0\xed\xa0\x80" GOOD "s."), CKPT_E_FORMAT, "not UTF-8"},
    {B("}(U\3a.b" GOOD "U\1a}U\1b" GOOD "su."), CKPT_E_FORMAT, "stored twice"},
    {B("N"), CKPT_E_FORMAT, "a/data.pkl: pickle: no STOP"},
};
/* clang-format on */

START_TEST(torch_deceptive_pickle_is_refused)
{
    const deceit *row = &deceits[_i];
    ckpt_source src;
    ckpt_err err = {0};
    make_path();
    put_archive(row->pickle, row->n, sizeof payload);
    ckpt_status status = ckpt_source_open(&src, path, &as_torch, &err);
    ck_assert_msg(status == row->status, "status %d: %s", status, err.text);
    const char *text = status != CKPT_OK ? err.text : src.n_warnings ? src.warnings[0] : "";
    if (row->text)
        ck_assert_msg(strstr(text, row->text), "'%s' lacks '%s'", text, row->text);
    if (status == CKPT_OK)
        ckpt_source_close(&src);
    remove_path();
}
END_TEST

/* clang-format off */
static const struct {
    const char *pickle;
    size_t n;
    const char *names; /* of all tensors, sorted */
} shapes[] = {
    {B(GOOD "."), "tensor"},
    {B("](" GOOD GOOD "e."), "0 1"},
    {B("}(K\5" GOOD "U\1z](" GOOD "}U\1y" GOOD "seu."), "5 z.0 z.1.y"},
    {B("ccollections\nOrderedDict\n)RU\1w" GOOD "s."), "w"},
    {B("ccollections\nOrderedDict\n]](U\1w" GOOD "ea\x85R."), "w"},
    {B("cargparse\nNamespace\n)\x81}U\1w" GOOD "sb."), "w"},
    {B("}(U\1a" GOOD "q\1U\1bh\1u."), "a b"},                       /* shared: listed under each name */
    {B("}q\1(U\1a" GOOD "U\1bh\1u."), "a"},                         /* cycle */
    {B("}U\1pctorch._utils\n_rebuild_parameter\n" GOOD "\x88" "ccollections\nOrderedDict\n)R\x87Rs."), "p"},
    {B("}U\1pctorch._utils\n_rebuild_parameter_with_state\n(" GOOD "\x88" "ccollections\nOrderedDict\n)R}tRs."), "p"},
    {B("}U\1pctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch.nn.parameter\nParameter\n("
       F32x12 "K\0K\2\x85K\1\x85" HOOKS "t}U\4attrK\1stRs."), "p"},
    {B("c__builtin__\nset\n]" GOOD "a\x85R."), "args.0.0"},
    {B("}U\1v" V2(F32x12, "K\0", "K\5K\4\x86", "K\0K\1\x86") "s."), "v"},  /* stride 0 is an expanded view */
    {B("}U\1e" V2(F32x12, "K\14", "K\0\x85", "K\1\x85") "s."), "e"},        /* empty, offset at the end */
    {B("N."), ""},
};
/* clang-format on */

START_TEST(torch_names_follow_the_path)
{
    ckpt_source src;
    ckpt_buf names = {0};
    make_path();
    put_archive(shapes[_i].pickle, shapes[_i].n, sizeof payload);
    open_ok(&src, path);
    ckpt_buf_puts(&names, "");
    for (size_t i = 0; i < src.n_tensors; i++)
        ckpt_buf_printf(&names, "%s%s", i ? " " : "", src.tensors[i].name);
    ck_assert_str_eq(names.data ? (const char *)names.data : "", shapes[_i].names);
    ck_assert_uint_eq(src.n_objects, 0);
    ckpt_source_close(&src);
    ckpt_buf_release(&names);
    remove_path();
}
END_TEST

START_TEST(torch_subclass_and_meta_tensors_are_only_reported)
{
    static const char pickle[] =
        "}(U\1dctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
        "ctorch.distributed.tensor\nDTensor\n)}U\15_local_tensor" GOOD "stR"
        "U\1mctorch._utils\n_rebuild_meta_tensor_no_storage\n)R"
        "U\1nctorch._utils\n_rebuild_nested_tensor\n)R"
        "U\1cctorch._utils\n_rebuild_tensor_v2\n(" F32x12 "K\0K\2\x85K\1\x85" HOOKS
        "}U\4conj\x88stRu.";
    static const char *const kinds[] = {"'d': DTensor", "'m': meta", "'n': nested",
                                        "'c': conjugate view"};
    ckpt_source src;
    make_path();
    put_archive(B(pickle), sizeof payload);
    open_ok(&src, path);
    ck_assert_uint_eq(src.n_tensors, 0);
    ck_assert_uint_eq(src.n_warnings, 4);
    for (size_t i = 0; i < 4; i++)
        ck_assert_msg(strstr(src.warnings[i], kinds[i]), "%s", src.warnings[i]);
    ckpt_source_close(&src);
    remove_path();
}
END_TEST

START_TEST(torch_os_system_stays_inert_and_is_flagged)
{
    static const char pickle[] =
        "}(U\1w" GOOD "U\4evilcposix\nsystem\n(U\23touch /tmp/ckpt_pwntRu.";
    ckpt_source src;
    ckpt_buf text = {0};
    unlink("/tmp/ckpt_pwn");
    make_path();
    put_archive(B(pickle), sizeof payload);
    open_ok(&src, path);
    ck_assert_uint_eq(src.n_tensors, 1);
    ck_assert_uint_eq(src.n_objects, 1);
    ck_assert_str_eq(src.objects[0].name, "data.pkl");
    ck_assert_str_eq(src.objects[0].unknown_global, "posix.system");
    ck_assert_uint_eq(src.objects[0].length, sizeof pickle - 1);
    ck_assert(ckpt_json_print(ckpt_json_path(src.common, "evil"), 0, false, &text));
    ck_assert_str_eq((const char *)text.data,
                     "{\"$enum\":\"posix.system\",\"value\":\"touch /tmp/ckpt_pwn\"}");
    ck_assert(!ckpt_exists("/tmp/ckpt_pwn"));
    ckpt_buf_release(&text);
    ckpt_source_close(&src);
    remove_path();
}
END_TEST

START_TEST(torch_training_arguments_become_the_config)
{
    static const char pickle[] = "}(U\4argscargparse\nNamespace\n)\x81}U\13hidden_sizeK\100sb"
                                 "U\11iterationK\7U\5model}U\1w" GOOD "su.";
    ckpt_source src;
    int64_t hidden;
    make_path();
    put_archive(B(pickle), sizeof payload);
    open_ok(&src, path);
    ck_assert_int_eq(src.iteration, 7);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    ck_assert(ckpt_json_int(ckpt_json_get(src.config, "hidden_size"), &hidden));
    ck_assert_int_eq(hidden, 64);
    ck_assert_str_eq(src.tensors[0].name, "model.w");
    ckpt_source_close(&src);
    remove_path();
}
END_TEST

/* ---- records ---------------------------------------------------------------------------------- */

#define PICKLE(name_)                                                                              \
    {                                                                                              \
        .name = name_, .data = GOOD ".", .n = sizeof(GOOD ".") - 1                                 \
    }
#define DATA                                                                                       \
    {                                                                                              \
        .name = "a/data/0", .data = payload, .n = 48                                               \
    }
#define VERSION                                                                                    \
    {                                                                                              \
        .name = "a/version", .data = "3\n", .n = 2                                                 \
    }

static const struct {
    zip_part parts[5];
    size_t n;
    ckpt_status status;
    const char *text;
    bool big_endian;
} archives[] = {
    {{PICKLE("a/data.pkl"), DATA, VERSION},                                                    3, CKPT_OK,            NULL,                    false},
    {{PICKLE("a/data.pkl"), DATA, {.name = "a/.data/version", .data = "10", .n = 2}},
     3,                                                                                           CKPT_OK,
     NULL,                                                                                                                                     false},
    {{PICKLE("a/data.pkl"), DATA, VERSION, {.name = "a/byteorder", .data = "big", .n = 3}},
     4,                                                                                           CKPT_OK,
     NULL,                                                                                                                                     true },
    {{PICKLE("a/data.pkl"), DATA, VERSION, {.name = "a/byteorder", .data = "middle", .n = 6}},
     4,                                                                                           CKPT_E_FORMAT,
     "byteorder 'middle', expected little or big",                                                                                             false},
    {{PICKLE("a/data.pkl"), DATA},                                                             2, CKPT_E_FORMAT,      "no record 'a/version'", false},
    {{PICKLE("a/data.pkl"), DATA, {.name = "a/version", .data = "11\n", .n = 3}},
     3,                                                                                           CKPT_E_FORMAT,
     "expected 1 to 10",                                                                                                                       false},
    {{PICKLE("a/data.pkl"), DATA, {.name = "a/version", .data = "", .n = 0}},
     3,                                                                                           CKPT_E_FORMAT,
     "expected 1 to 10",                                                                                                                       false},
    {{PICKLE("a/other.pkl"), DATA, VERSION},                                                   3, CKPT_E_FORMAT,      "without 'a/data.pkl'",  false},
    {{PICKLE("a/data.pkl"), DATA, VERSION, {.name = "a/constants.pkl", .data = "N.", .n = 2}},
     4,                                                                                           CKPT_E_UNSUPPORTED,
     "TorchScript",                                                                                                                            false},
    {{PICKLE("a/data.pkl"),
      {.name = "a/data/0", .data = payload, .n = 48, .deflate = true},
      VERSION},
     3,                                                                                           CKPT_E_UNSUPPORTED,
     "record 'a/data/0' is compressed",                                                                                                        false},
    {{{.name = "a/data.pkl", .data = GOOD ".", .n = sizeof(GOOD ".") - 1, .deflate = true},
      DATA,
      VERSION},
     3,                                                                                           CKPT_OK,
     NULL,                                                                                                                                     false},
};

START_TEST(torch_records_are_checked)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf b = {0};
    make_path();
    zip_build(&b, archives[_i].parts, archives[_i].n);
    put_path(&b);
    ckpt_status status = ckpt_source_open(&src, path, &as_torch, &err);
    ck_assert_msg(status == archives[_i].status, "status %d: %s", status, err.text);
    if (archives[_i].text)
        ck_assert_msg(strstr(err.text, archives[_i].text), "%s", err.text);
    if (status == CKPT_OK) {
        ck_assert_uint_eq(src.n_tensors, 1);
        ck_assert_int_eq(src.tensors[0].big_endian, archives[_i].big_endian);
        ckpt_source_close(&src);
    }
    ckpt_buf_release(&b);
    remove_path();
}
END_TEST

START_TEST(torch_other_files_are_refused)
{
    static uint8_t tar[1024] = "sys_info";
    memcpy(tar + 257, "ustar", 5);
    const struct {
        const void *data;
        size_t n;
        ckpt_status status;
        const char *text;
    } rows[] = {
        {tar, sizeof tar,                                                                             CKPT_E_UNSUPPORTED, "tar file"},
        {B("\x80\x02}q\0.aaaaaaaaaaaaaaaa"),   CKPT_E_FORMAT,                                                        "neither a torch.save archive"                                                          },
        {B("PK\3\4aaaaaaaaaaaaaaaaaaaa"),   CKPT_E_FORMAT,                                                           "no end record"   },
        {B("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"),   CKPT_E_FORMAT,
         "no STOP"                        },
        {B("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e\x80\x02M\xea\x03.}.}.]."),
         CKPT_E_FORMAT, "protocol other than 1001"                                                                                                  },
    };
    make_path();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_source src;
        ckpt_err err = {0};
        ckpt_buf b = {0};
        ckpt_buf_append(&b, rows[i].data, rows[i].n);
        put_path(&b);
        ckpt_status status = ckpt_source_open(&src, path, &as_torch, &err);
        ck_assert_msg(status == rows[i].status, "row %zu: %d %s", i, status, err.text);
        ck_assert_msg(strstr(err.text, rows[i].text), "row %zu: %s", i, err.text);
        ckpt_buf_release(&b);
    }
    remove_path();
}
END_TEST

/* ---- legacy stream ---------------------------------------------------------------------------- */

#define LEGACY_HEAD                                                                                \
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e\x80\x02M\xe9\x03.}."
#define LEGACY_ID(cls, key, numel, view) "(U\7storagec" cls "\nU\1" key "U\3cpu" numel view "tQ"
#define LEGACY_T(id, offset) V2(id, offset, "K\2\x85", "K\1\x85")

/* clang-format off */
static const struct {
    const char *bytes;
    size_t n;
    ckpt_status status;
    const char *text;
    uint64_t offset; /* of the only tensor, from the end of the file */
} legacy[] = {
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\2\0\0\0\0\0\0\0abcdefgh"), CKPT_OK, NULL, 8},
    /* Python 2 listed the keys in any order; a view of elements 1 and 2 of 3. */
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nShortStorage", "7", "K\3", "U\1""8K\1K\2\x87"), "K\0") ".]U\1""7a.\3\0\0\0\0\0\0\0abcdef"), CKPT_OK, NULL, 4},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nShortStorage", "7", "K\3", "U\1""8K\2K\2\x87"), "K\0") ".]U\1""7a.\3\0\0\0\0\0\0\0abcdef"), CKPT_E_FORMAT, "view past its 3 elements", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\2\0\0\0\0\0\0\0abcdefg"), CKPT_E_FORMAT, "2 elements at", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\3\0\0\0\0\0\0\0abcdefghijkl"), CKPT_E_FORMAT, "2 elements of 4 bytes, but its record has 12 bytes", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\xff\xff\xff\xff\xff\xff\xff\xff""abcdefgh"), CKPT_E_FORMAT, "18446744073709551615 elements", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\2\0\0"), CKPT_E_FORMAT, "past the end", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]."), CKPT_E_FORMAT, "storage '7' is not in the file", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".]U\1""9a."), CKPT_E_FORMAT, "listed but not used", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".](U\1""7U\1""7e.\2\0\0\0\0\0\0\0abcdefgh\2\0\0\0\0\0\0\0abcdefgh"), CKPT_E_FORMAT, "listed twice", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nWeirdStorage", "7", "K\2", "N"), "K\0") ".]U\1""7a.\2\0\0\0\0\0\0\0abcdefgh"), CKPT_E_UNSUPPORTED, "of class 'WeirdStorage'", 0},
    {B(LEGACY_HEAD LEGACY_T(LEGACY_ID("torch\nFloatStorage", "7", "K\2", "N"), "K\0") ".N."), CKPT_E_FORMAT, "keys are not a list", 0},
};
/* clang-format on */

START_TEST(torch_legacy_storages_are_placed)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf b = {0};
    make_path();
    ckpt_buf_append(&b, legacy[_i].bytes, legacy[_i].n);
    put_path(&b);
    ckpt_status status = ckpt_source_open(&src, path, &as_torch, &err);
    ck_assert_msg(status == legacy[_i].status, "status %d: %s", status, err.text);
    if (status == CKPT_OK) {
        ck_assert_uint_eq(src.n_tensors, 1);
        ck_assert_uint_eq(src.tensors[0].chunks[0].offset, legacy[_i].n - legacy[_i].offset);
        ckpt_source_close(&src);
    } else {
        ck_assert_msg(strstr(err.text, legacy[_i].text), "%s", err.text);
    }
    ckpt_buf_release(&b);
    remove_path();
}
END_TEST

/* ---- hostile graphs --------------------------------------------------------------------------- */

START_TEST(torch_hostile_graph_is_refused_in_bounded_time)
{
    static const struct {
        const char *prefix, *unit;
        size_t n_unit, times;
        const char *text;
    } rows[] = {
        {"]",  "\x85",  1, 100000, "nested deeper than 256"},
        {GOOD, "2\x86", 2, 60,     "refer to each other"   },
    };
    make_path();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_source src;
        ckpt_err err = {0};
        ckpt_buf b = {0};
        /* GOOD holds NUL bytes: append it by its size. */
        if (i == 1)
            ckpt_buf_append(&b, GOOD, sizeof(GOOD) - 1);
        else
            ckpt_buf_puts(&b, rows[i].prefix);
        for (size_t k = 0; k < rows[i].times; k++)
            ckpt_buf_append(&b, rows[i].unit, rows[i].n_unit);
        ckpt_buf_putc(&b, '.');
        put_archive(b.data, b.len, sizeof payload);
        ck_assert_int_eq(ckpt_source_open(&src, path, &as_torch, &err), CKPT_E_FORMAT);
        ck_assert_msg(strstr(err.text, rows[i].text), "%s", err.text);
        ckpt_buf_release(&b);
    }
    remove_path();
}
END_TEST

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* A CRC of 0 is not checked, so that mutations reach the pickle parser. */
static void clear_pickle_crc(ckpt_buf *b)
{
    for (size_t i = 0; i + 46 < b->len; i++)
        if (memcmp(b->data + i, "PK\1\2", 4) == 0) {
            ckpt_put_u32(b->data + i + 16, 0);
            return;
        }
}

static const char *const mutated[] = {"torch_save_zip.pt", "torch_save_legacy.pt",
                                      "torch_save_proto4.pt", "state_dict.bin"};

START_TEST(torch_mutation_never_crashes)
{
    char name[256];
    ckpt_buf b = {0}, m = {0};
    ckpt_err err = {0};
    uint64_t rng = 0x2545f4914f6cdd1du + (uint64_t)_i;
    size_t accepted = 0;
    snprintf(name, sizeof name, CKPT_FIXTURES "/torch/%s", mutated[_i]);
    ck_assert_int_eq(ckpt_read_file(name, 1 << 20, &b, &err), CKPT_OK);
    clear_pickle_crc(&b);
    make_path();
    for (int round = 0; round < 5000; round++) {
        ckpt_source src;
        ckpt_buf_clear(&m);
        ckpt_buf_append(&m, b.data, b.len);
        /* Most of the time within the first pickle, where the structure is. */
        size_t span = round % 4 ? (m.len < 2700 ? m.len : 2700) : m.len;
        for (uint64_t k = 1 + next_random(&rng) % 4; k > 0; k--) {
            uint64_t r = next_random(&rng);
            m.data[(r >> 16) % span] = r % 4 == 0 ? 0xff : r % 4 == 1 ? 0 : (uint8_t)(r >> 8);
        }
        if (round % 50 == 0)
            m.len = next_random(&rng) % m.len;
        put_path(&m);
        ckpt_status status = ckpt_source_open(&src, path, &as_torch, &err);
        ck_assert_msg(status == CKPT_OK || status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED,
                      "round %d: %d %s", round, status, err.text);
        if (status != CKPT_OK)
            continue;
        accepted++;
        for (size_t i = 0; i < src.n_tensors; i++)
            if (ckpt_dtype_get(src.tensors[i].dtype)->bits >= 8) {
                char hex[2 * CKPT_SHA256_LEN + 1];
                int64_t numel;
                ck_assert(ckpt_numel(src.tensors[i].rank, src.tensors[i].dims, &numel));
                if (numel < 1000)
                    hash_elements(&src, &src.tensors[i], hex);
            }
        ckpt_source_close(&src);
    }
    ck_assert_uint_gt(accepted, 50);
    ckpt_buf_release(&b);
    ckpt_buf_release(&m);
    remove_path();
}
END_TEST

/* ---- suite ------------------------------------------------------------------------------------ */

Suite *suite_torch_save(void)
{
    Suite *s = suite_create("torch_save");
    TCase *t = tcase_create("fixtures");
    tcase_set_timeout(t, 30);
    LOOP(t, torch_fixture_tensor_equals_what_pytorch_reads, golden);
    tcase_add_loop_test(t, torch_fixture_lists_exactly_the_golden_tensors, 0, 4);
    tcase_add_test(t, torch_undecoded_kinds_are_reported);
    tcase_add_loop_test(t, torch_common_shows_the_whole_object, 0, 2);
    suite_add_tcase(s, t);

    t = tcase_create("built");
    tcase_set_timeout(t, 30);
    LOOP(t, torch_deceptive_pickle_is_refused, deceits);
    LOOP(t, torch_names_follow_the_path, shapes);
    tcase_add_test(t, torch_subclass_and_meta_tensors_are_only_reported);
    tcase_add_test(t, torch_os_system_stays_inert_and_is_flagged);
    tcase_add_test(t, torch_training_arguments_become_the_config);
    LOOP(t, torch_records_are_checked, archives);
    tcase_add_test(t, torch_other_files_are_refused);
    LOOP(t, torch_legacy_storages_are_placed, legacy);
    suite_add_tcase(s, t);

    t = tcase_create("hostile");
    tcase_set_timeout(t, 240);
    tcase_add_test(t, torch_hostile_graph_is_refused_in_bounded_time);
    LOOP(t, torch_mutation_never_crashes, mutated);
    suite_add_tcase(s, t);
    return s;
}
