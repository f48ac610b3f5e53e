/* The manifest: print and parse are inverse, its digests guard it, every damaged field is named. */
#include "manifest.h"

#include "arena.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

Suite *suite_manifest(void);

/* Two tensors, one of them of three leaves, and three files given out of order. */
static const int64_t dims_a[] = {2, 3};
static const int64_t dims_b[] = {600, 1024};

static void fill(ckpt_manifest *m, uint8_t leaves[3 * CKPT_SHA256_LEN])
{
    ckpt_err err = {0};
    ckpt_sha256 sha = {0};
    const uint8_t digest[CKPT_SHA256_LEN] = {1, 2, 3};
    memset(m, 0, sizeof *m);
    ck_assert_int_eq(ckpt_sha256_init(&sha, &err), CKPT_OK);
    m->tensors = ckpt_arena_array(&m->arena, 2, sizeof *m->tensors);
    for (int i = 0; i < 3 * CKPT_SHA256_LEN; i++)
        leaves[i] = (uint8_t)(i * 7);
    m->tensors[0] = (ckpt_manifest_tensor){
        "w", CKPT_F32, 2, dims_b, {.leaves = leaves, .n_leaves = 3}
    };
    m->tensors[1] = (ckpt_manifest_tensor){
        "a \"quoted\"\n", CKPT_BF16, 2, dims_a, {.leaves = leaves, .n_leaves = 1}
    };
    m->n_tensors = 2;
    uint8_t digests[2 * CKPT_SHA256_LEN];
    const char *names[] = {"a \"quoted\"\n", "w"};
    ckpt_tensor_digest(&sha, CKPT_F32, 2, dims_b, leaves, 3, m->tensors[0].hash.digest);
    ckpt_tensor_digest(&sha, CKPT_BF16, 2, dims_a, leaves, 1, m->tensors[1].hash.digest);
    memcpy(digests, m->tensors[1].hash.digest, CKPT_SHA256_LEN);
    memcpy(digests + CKPT_SHA256_LEN, m->tensors[0].hash.digest, CKPT_SHA256_LEN);
    ck_assert_int_eq(ckpt_root_digest(names, digests, 2, m->root, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_manifest_add_file(m, "z.bin", 7, digest, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_manifest_add_file(m, "dir/y", 0, digest, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_manifest_add_file(m, "a", 9, digest, &err), CKPT_OK);
    m->family = "hybrid";
    m->container = "safetensors";
    m->mesh = (ckpt_mesh){.tp = 2, .pp = 1, .ep = 4, .etp = 2, .cp = 1, .dp = 1};
    m->config = ckpt_json_new_object();
    ckpt_json_set(m->config, "norm_eps", ckpt_json_new_double(1e-5));
    ckpt_json_set(m->config, "hidden_size", ckpt_json_new_int(64));
    ckpt_sha256_release(&sha);
}

static void print(ckpt_manifest *m, ckpt_buf *text)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_manifest_print(m, text, &err) == CKPT_OK, "%s", err.text);
}

START_TEST(manifest_printed_and_parsed_is_the_same)
{
    uint8_t leaves[3 * CKPT_SHA256_LEN];
    ckpt_manifest m, back;
    ckpt_buf text = {0}, again = {0};
    ckpt_err err = {0};
    fill(&m, leaves);
    print(&m, &text);
    ck_assert_msg(ckpt_manifest_parse((const char *)text.data, text.len, &back, &err) == CKPT_OK,
                  "%s", err.text);
    ck_assert_uint_eq(back.n_files, 3);
    ck_assert_str_eq(back.files[0].name, "a");
    ck_assert_str_eq(back.files[1].name, "dir/y");
    ck_assert_int_eq(ckpt_manifest_find_file(&back, "z.bin"), 2);
    ck_assert_int_eq(ckpt_manifest_find_file(&back, "z"), -1);
    ck_assert_int_eq(ckpt_manifest_find_tensor(&back, "w"), 1);
    ck_assert_int_eq(ckpt_manifest_find_tensor(&back, "a \"quoted\"\n"), 0);
    ck_assert_uint_eq(back.tensors[1].hash.n_leaves, 3);
    ck_assert_ptr_null(back.tensors[0].hash.leaves);
    ck_assert_int_eq(back.mesh.ep, 4);
    ck_assert_ptr_null(back.layout);
    print(&back, &again);
    ck_assert_uint_eq(text.len, again.len);
    ck_assert_int_eq(memcmp(text.data, again.data, text.len), 0);
    ckpt_buf_release(&text);
    ckpt_buf_release(&again);
    ckpt_manifest_release(&m);
    ckpt_manifest_release(&back);
}
END_TEST

/* Replace the first `from` by `to` in the printed form; the message must contain `message`. */
static const struct {
    const char *from, *to, *message;
    ckpt_status status;
} edits[] = {
    {"\"manifest_version\":1", "\"manifest_version\":2",  "manifest_version 2, expected 1",
     CKPT_E_UNSUPPORTED                                                                                     },
    {"\"manifest_version\":1", "\"version\":1",           "not a ckpt manifest",               CKPT_E_FORMAT},
    {"\"size\":7",             "\"size\":-7",             "file 'z.bin': 'size'",              CKPT_E_FORMAT},
    {"\"size\":7",             "\"size\":7.5",            "file 'z.bin': 'size'",              CKPT_E_FORMAT},
    {"\"z.bin\"",              "\"../z\"",                "leaves the checkpoint's directory", CKPT_E_FORMAT},
    {"\"z.bin\"",              "\"/etc/z\"",              "leaves the checkpoint's directory", CKPT_E_FORMAT},
    {"\"z.bin\"",              "\"a\"",                   "duplicate",                         CKPT_E_FORMAT},
    {"\"BF16\"",               "\"BF17\"",                "unknown dtype 'BF17'",              CKPT_E_FORMAT},
    {"[600,1024]",             "[600,-1]",                "dimension 1",                       CKPT_E_FORMAT},
    {"[600,1024]",             "[600,1.5]",               "dimension 1",                       CKPT_E_FORMAT},
    {"[600,1024]",             "[9007199254740992,4096]", "overflow",                          CKPT_E_FORMAT},
    {"[600,1024]",             "7",                       "'shape'",                           CKPT_E_FORMAT},
    {"[600,1024]",             "[601,1024]",              "contradicts its leaves",            CKPT_E_FORMAT},
    {"[600,1024]",             "[6,1024]",                "3 leaves, expected 1",              CKPT_E_FORMAT},
    {"[2,3]",                  "[3,2]",                   "",                                  CKPT_OK      }, /* one leaf: only hashing the data can tell */
    {"\"root\":\"",            "\"root\":\"0",            "'root'",                            CKPT_E_FORMAT},
    {"\"rest\":\"01",          "\"rest\":\"0G",           "'rest'",                            CKPT_E_FORMAT},
    {"\"rest\":\"01",          "\"rest\":\"0A",           "'rest'",                            CKPT_E_FORMAT},
    {"\"tp\":2",               "\"tp\":0",                "mesh: 'tp'",                        CKPT_E_FORMAT},
    {"\"hidden_size\":64",     "\"hidden_size\":65",      "config_digest contradicts",         CKPT_E_FORMAT},
    {"\"lossy\":[]",           "\"lossy\":[1]",           "'lossy'",                           CKPT_E_FORMAT},
    {"\"lossy\":[]",           "\"lossy\":{}",            "'lossy'",                           CKPT_E_FORMAT},
    {"\"family\":\"hybrid\"",  "\"family\":3",            "'family'",                          CKPT_E_FORMAT},
    {"\"tensors\":{",          "\"tensor\":{",            "'files' and 'tensors'",             CKPT_E_FORMAT},
    {"]}\n",                   "]",                       "",                                  CKPT_E_FORMAT},
};

START_TEST(manifest_edited_is_refused)
{
    uint8_t leaves[3 * CKPT_SHA256_LEN];
    ckpt_manifest m, back;
    ckpt_buf text = {0}, edited = {0};
    ckpt_err err = {0};
    fill(&m, leaves);
    print(&m, &text);
    const char *at = strstr((const char *)text.data, edits[_i].from);
    ck_assert_msg(at != NULL, "'%s' is not in the manifest", edits[_i].from);
    size_t head = (size_t)(at - (const char *)text.data), skip = strlen(edits[_i].from);
    ckpt_buf_append(&edited, text.data, head);
    ckpt_buf_puts(&edited, edits[_i].to);
    ckpt_buf_puts(&edited, at + skip);
    ckpt_status status = ckpt_manifest_parse((const char *)edited.data, edited.len, &back, &err);
    ck_assert_msg(status == edits[_i].status, "%s -> %s: status %d: %s", edits[_i].from,
                  edits[_i].to, status, err.text);
    ck_assert_msg(status == CKPT_OK || strstr(err.text, edits[_i].message) != NULL,
                  "'%s' not in '%s'", edits[_i].message, err.text);
    ckpt_manifest_release(&back);
    ckpt_manifest_release(&m);
    ckpt_buf_release(&text);
    ckpt_buf_release(&edited);
}
END_TEST

START_TEST(manifest_any_flipped_digit_of_a_tensor_digest_is_refused)
{
    uint8_t leaves[3 * CKPT_SHA256_LEN];
    ckpt_manifest m, back;
    ckpt_buf text = {0};
    ckpt_err err = {0};
    fill(&m, leaves);
    print(&m, &text);
    char *digest = strstr((char *)text.data, "\"digest\":\"") + strlen("\"digest\":\"");
    for (int i = 0; i < 2 * CKPT_SHA256_LEN; i++) {
        char old = digest[i];
        digest[i] = old == '0' ? '1' : '0';
        ck_assert_int_eq(ckpt_manifest_parse((const char *)text.data, text.len, &back, &err),
                         CKPT_E_FORMAT);
        digest[i] = old;
    }
    ckpt_manifest_release(&m);
    ckpt_buf_release(&text);
}
END_TEST

START_TEST(manifest_truncated_anywhere_is_refused)
{
    uint8_t leaves[3 * CKPT_SHA256_LEN];
    ckpt_manifest m, back;
    ckpt_buf text = {0};
    ckpt_err err = {0};
    fill(&m, leaves);
    print(&m, &text);
    for (size_t n = 0; n + 2 < text.len; n++)
        ck_assert_int_eq(ckpt_manifest_parse((const char *)text.data, n, &back, &err),
                         CKPT_E_FORMAT);
    ckpt_manifest_release(&m);
    ckpt_buf_release(&text);
}
END_TEST

static const char *created_of(const ckpt_source *src, ckpt_arena *arena)
{
    const char *created;
    ck_assert_int_eq(ckpt_manifest_created(src, arena, &created, NULL), CKPT_OK);
    return created;
}

START_TEST(manifest_created_follows_source_date_epoch_and_mtime)
{
    ckpt_arena arena = {0};
    char path[] = "/tmp/ckpt-manifest-XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    const struct timespec times[2] = {{.tv_sec = 86400}, {.tv_sec = 86400}};
    ck_assert_int_eq(futimens(fd, times), 0);
    ckpt_file file = {.name = "f", .path = path};
    ckpt_source src = {.files = &file, .n_files = 1};
    unsetenv("SOURCE_DATE_EPOCH");
    ck_assert_str_eq(created_of(&src, &arena), "1970-01-02T00:00:00Z");
    setenv("SOURCE_DATE_EPOCH", "1700000000", 1);
    ck_assert_str_eq(created_of(&src, &arena), "2023-11-14T22:13:20Z");
    setenv("SOURCE_DATE_EPOCH", "yesterday", 1);
    ck_assert_str_eq(created_of(&src, &arena), "1970-01-02T00:00:00Z");
    file.path = "/nowhere/at/all";
    ck_assert_ptr_null(created_of(&src, &arena));
    char loop[sizeof path + 2];
    ckpt_err err = {0};
    const char *created;
    (void)snprintf(loop, sizeof loop, "%s.l", path);
    ck_assert_int_eq(symlink(loop, loop), 0);
    file.path = loop; /* is there, and cannot be looked at */
    ck_assert_int_eq(ckpt_manifest_created(&src, &arena, &created, &err), CKPT_E_IO);
    unlink(loop);
    ckpt_arena_free(&arena);
    close(fd);
    unlink(path);
}
END_TEST

START_TEST(manifest_path_depends_on_what_was_opened)
{
    ckpt_arena arena = {0};
    ckpt_source file = {.path = "x/m.safetensors", .root = "x"};
    ckpt_source index = {.path = "x/model.safetensors.index.json", .root = "x"};
    ckpt_source dir = {.path = "/", .is_dir = true, .root = "/iter_0000001"};
    ck_assert_str_eq(ckpt_manifest_path(&file, &arena), "x/m.safetensors.ckpt.manifest.json");
    ck_assert_str_eq(ckpt_manifest_path(&index, &arena), "x/ckpt.manifest.json");
    ck_assert_str_eq(ckpt_manifest_path(&dir, &arena), "/iter_0000001/ckpt.manifest.json");
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(manifest_absent_is_not_found)
{
    ckpt_manifest m;
    ckpt_err err = {0};
    bool found = true;
    ckpt_source src = {.path = "/nowhere/m.safetensors", .root = "/nowhere"};
    ck_assert_int_eq(ckpt_manifest_load(&src, &m, &found, &err), CKPT_OK);
    ck_assert(!found);
    ckpt_manifest_release(&m);
}
END_TEST

Suite *suite_manifest(void)
{
    Suite *s = suite_create("manifest");
    TCase *t = tcase_create("manifest");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, manifest_printed_and_parsed_is_the_same);
    tcase_add_loop_test(t, manifest_edited_is_refused, 0, sizeof edits / sizeof edits[0]);
    tcase_add_test(t, manifest_any_flipped_digit_of_a_tensor_digest_is_refused);
    tcase_add_test(t, manifest_truncated_anywhere_is_refused);
    tcase_add_test(t, manifest_created_follows_source_date_epoch_and_mtime);
    tcase_add_test(t, manifest_path_depends_on_what_was_opened);
    tcase_add_test(t, manifest_absent_is_not_found);
    suite_add_tcase(s, t);
    return s;
}
