/* Positional I/O, directory helpers and the commit protocol, on a fresh directory per test. */
#include "io.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

Suite *suite_io(void);

static char dir[64];

static void setup(void)
{
    snprintf(dir, sizeof dir, "/tmp/ckpt-io-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    ckpt_interrupted = 0;
}

static void teardown(void)
{
    ckpt_interrupted = 0;
    ckpt_remove_tree(dir);
    ck_assert(!ckpt_exists(dir));
}

/* Path below the test directory; a few stay valid at a time. */
static const char *at(const char *name)
{
    static char paths[8][512];
    static unsigned next;
    char *p = paths[next++ % 8];
    (void)snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void put(const char *name, const char *text)
{
    FILE *f = fopen(at(name), "w");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    fclose(f);
}

static void assert_text(const char *name, const char *want)
{
    ckpt_buf buf = {0};
    ckpt_err err = {0};
    ck_assert_msg(ckpt_read_file(at(name), 1000, &buf, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq((char *)buf.data, want);
    ckpt_buf_release(&buf);
}

static size_t entries(const char *name)
{
    ckpt_arena arena = {0};
    char **names;
    size_t n;
    ck_assert_int_eq(ckpt_list_dir(at(name), &arena, &names, &n, NULL), CKPT_OK);
    ckpt_arena_free(&arena);
    return n;
}

START_TEST(open_only_regular_files)
{
    static const char *const names[] = {"absent", "dir", "fifo", "loop", "file"};
    static const char *const wants[] = {"No such file", "found a directory", "found a FIFO",
                                        "symbolic link", NULL};
    ck_assert_int_eq(mkdir(at("dir"), 0777), 0);
    ck_assert_int_eq(mkfifo(at("fifo"), 0666), 0);
    ck_assert_int_eq(symlink("loop", at("loop")), 0);
    put("file", "12345");
    for (size_t i = 0; i < 5; i++) {
        int fd;
        uint64_t size;
        ckpt_err err = {0};
        ckpt_status status = ckpt_open_read(at(names[i]), &fd, &size, &err);
        if (wants[i] == NULL) {
            ck_assert_int_eq(status, CKPT_OK);
            ck_assert_uint_eq(size, 5);
            close(fd);
            continue;
        }
        ck_assert_int_eq(status, CKPT_E_IO);
        ck_assert_int_eq(fd, -1);
        ck_assert_msg(strstr(err.text, wants[i]) && strstr(err.text, at(names[i])), "%s", err.text);
    }
}
END_TEST

START_TEST(pread_short_file_is_an_error)
{
    int fd;
    uint64_t size;
    char buf[16];
    ckpt_err err = {0};
    put("file", "0123456789");
    ck_assert_int_eq(ckpt_open_read(at("file"), &fd, &size, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_pread_full(fd, buf, 4, 6, &err), CKPT_OK);
    ck_assert_mem_eq(buf, "6789", 4);
    ck_assert_int_eq(ckpt_pread_full(fd, buf, 0, 10, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_pread_full(fd, buf, 5, 6, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "unexpected end of file"));
    ck_assert_int_eq(ckpt_pread_full(fd, buf, 5, UINT64_MAX - 2, &err), CKPT_E_FORMAT);
    ck_assert_int_eq(ckpt_pwrite_full(fd, buf, 1, 0, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "Bad file descriptor"));
    close(fd);
}
END_TEST

START_TEST(pwrite_full_device_is_an_io_error)
{
    ckpt_err err = {0};
    int fd = open("/dev/full", O_WRONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ckpt_pwrite_full(fd, "x", 1, 0, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "No space left on device"));
    close(fd);
}
END_TEST

START_TEST(read_file_above_limit_is_refused)
{
    ckpt_buf buf = {0};
    ckpt_err err = {0};
    put("file", "0123456789");
    ck_assert_int_eq(ckpt_read_file(at("file"), 9, &buf, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "expected at most 9 bytes, found 10"));
    ck_assert_int_eq(ckpt_read_file(at("file"), 10, &buf, &err), CKPT_OK);
    ck_assert_str_eq((char *)buf.data, "0123456789");
    put("file", "");
    ck_assert_int_eq(ckpt_read_file(at("file"), 10, &buf, &err), CKPT_OK);
    ck_assert_uint_eq(buf.len, 0);
    ck_assert_str_eq((char *)buf.data, "");
    ckpt_buf_release(&buf);
}
END_TEST

START_TEST(list_dir_is_sorted_bytewise)
{
    static const char *const want[] = {".x", "B", "a", "b10", "b2"};
    ckpt_arena arena = {0};
    char **names;
    size_t n;
    ckpt_err err = {0};
    for (size_t i = 0; i < 5; i++)
        put(want[(i * 3 + 1) % 5], "");
    ck_assert_int_eq(ckpt_list_dir(dir, &arena, &names, &n, &err), CKPT_OK);
    ck_assert_uint_eq(n, 5);
    for (size_t i = 0; i < 5; i++)
        ck_assert_str_eq(names[i], want[i]);
    ck_assert_int_eq(ckpt_list_dir(at("a"), &arena, &names, &n, &err), CKPT_E_IO);
    ck_assert_int_eq(mkdir(at("empty"), 0777), 0);
    ck_assert_int_eq(ckpt_list_dir(at("empty"), &arena, &names, &n, &err), CKPT_OK);
    ck_assert_uint_eq(n, 0);
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(path_helpers_follow_their_contract)
{
    ckpt_arena arena = {0};
    ck_assert_str_eq(ckpt_path_join(&arena, "", "n"), "n");
    ck_assert_str_eq(ckpt_path_join(&arena, "d", "n"), "d/n");
    ck_assert_str_eq(ckpt_path_join(&arena, "d/", "n"), "d/n");
    ckpt_arena_free(&arena);
    ck_assert_str_eq(ckpt_basename("a/b"), "b");
    ck_assert_str_eq(ckpt_basename("b"), "b");
    ck_assert_str_eq(ckpt_basename("a/b/"), "b/");
    static const struct {
        const char *name;
        bool flat, nested;
    } rows[] = {
        {"a",      true,  true },
        {"a/b",    false, true },
        {"a.b..c", true,  true },
        {"...",    true,  true },
        {"",       false, false},
        {".",      false, false},
        {"..",     false, false},
        {"/a",     false, false},
        {"a/",     false, false},
        {"a//b",   false, false},
        {"a/../b", false, false},
        {"a/..",   false, false},
        {"./a",    false, false},
        {"a\\b",   false, false}
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ck_assert_msg(ckpt_name_is_safe(rows[i].name, false) == rows[i].flat, "%s", rows[i].name);
        ck_assert_msg(ckpt_name_is_safe(rows[i].name, true) == rows[i].nested, "%s", rows[i].name);
    }
}
END_TEST

START_TEST(look_tells_absence_from_failure)
{
    ckpt_err err = {0};
    ckpt_entry what;
    put("f", "");
    ck_assert_int_eq(ckpt_look(at("f"), &what, &err), CKPT_OK);
    ck_assert_int_eq(what, CKPT_ENTRY_FILE);
    ck_assert_int_eq(ckpt_look(at("."), &what, &err), CKPT_OK);
    ck_assert_int_eq(what, CKPT_ENTRY_DIR);
    ck_assert_int_eq(ckpt_look(at("absent"), &what, &err), CKPT_OK);
    ck_assert_int_eq(what, CKPT_ENTRY_NONE);
    ck_assert_int_eq(ckpt_look(at("f/below"), &what, &err), CKPT_OK);
    ck_assert_int_eq(what, CKPT_ENTRY_NONE);
    ck_assert_int_eq(symlink("loop", at("loop")), 0);
    ck_assert_int_eq(ckpt_look(at("loop"), &what, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "loop: Too many levels of symbolic links"));
}
END_TEST

START_TEST(only_faults_pass_on)
{
    ckpt_err text = {.code = CKPT_E_IO, .text = "disk"}, err = {0};
    ck_assert_int_eq(ckpt_only_faults(CKPT_OK, &text, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_only_faults(CKPT_E_FORMAT, &text, &err), CKPT_OK);
    ck_assert_str_eq(err.text, "");
    ck_assert_int_eq(ckpt_only_faults(CKPT_E_IO, &text, NULL), CKPT_E_IO);
    ck_assert_int_eq(ckpt_only_faults(CKPT_E_IO, &text, &err), CKPT_E_IO);
    ck_assert_str_eq(err.text, "disk");
}
END_TEST

START_TEST(mkdirs_makes_missing_levels)
{
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_mkdirs(at("a/b//c"), &err), CKPT_OK);
    ck_assert(ckpt_is_dir(at("a/b/c")));
    ck_assert_int_eq(ckpt_mkdirs(at("a/b/c/"), &err), CKPT_OK);
    put("file", "");
    ck_assert_int_eq(ckpt_mkdirs(at("file/x"), &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "file: File exists"));
}
END_TEST

START_TEST(remove_tree_does_not_follow_links)
{
    ck_assert_int_eq(ckpt_mkdirs(at("keep/sub"), NULL), CKPT_OK);
    put("keep/sub/f", "kept");
    ck_assert_int_eq(ckpt_mkdirs(at("gone/x/y"), NULL), CKPT_OK);
    ck_assert_int_eq(symlink("../../keep", at("gone/x/link")), 0);
    put("gone/x/y/f", "");
    ckpt_remove_tree(at("gone"));
    ck_assert(!ckpt_exists(at("gone")));
    ck_assert_int_eq(symlink("keep", at("top")), 0);
    ckpt_remove_tree(at("top"));
    ck_assert(!ckpt_exists(at("top")));
    assert_text("keep/sub/f", "kept");
    ckpt_remove_tree(at("absent"));
}
END_TEST

static void begin(ckpt_commit *c, const char *name, bool is_dir, bool force)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_commit_begin(c, at(name), is_dir, force, &err) == CKPT_OK, "%s", err.text);
}

START_TEST(commit_force_never_replaces_a_fifo)
{
    ckpt_commit c;
    ckpt_err err = {0};
    ck_assert_int_eq(mkfifo(at("pipe"), 0666), 0);
    ck_assert_int_eq(ckpt_commit_begin(&c, at("pipe"), true, true, &err), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "neither a file nor a directory"));
    ckpt_commit_abort(&c);
}
END_TEST

static void finish(ckpt_commit *c)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_commit_finish(c, &err) == CKPT_OK, "%s", err.text);
    ckpt_commit_abort(c);
    ckpt_commit_abort(c);
}

START_TEST(commit_directory_appears_only_when_finished)
{
    ckpt_commit c;
    begin(&c, "out//", true, false);
    ck_assert_str_eq(c.final_path, at("out"));
    ck_assert_ptr_nonnull(strstr(c.temp_path, "/.out.ckpt-tmp."));
    ck_assert_int_eq(ckpt_commit_write(&c, "a", "1", 1, NULL), CKPT_OK);
    ck_assert_int_eq(ckpt_commit_write(&c, "s/t/b", "22", 2, NULL), CKPT_OK);
    ck_assert_int_eq(ckpt_commit_write(&c, "a", "333", 3, NULL), CKPT_OK);
    ck_assert(!ckpt_exists(at("out")));
    finish(&c);
    assert_text("out/a", "333");
    assert_text("out/s/t/b", "22");
    ck_assert_uint_eq(entries(""), 1);
}
END_TEST

START_TEST(commit_unsafe_names_are_refused)
{
    static const char *const names[] = {"../x", "/x", "a/../../x", "", "."};
    ckpt_commit c;
    ckpt_err err = {0};
    begin(&c, "out", true, false);
    for (size_t i = 0; i < 5; i++)
        ck_assert_int_eq(ckpt_commit_write(&c, names[i], "", 0, &err), CKPT_E_FORMAT);
    ck_assert_int_eq(symlink("/tmp", at("link")), 0);
    ckpt_commit_abort(&c);
    ck_assert_uint_eq(entries(""), 1);
}
END_TEST

START_TEST(commit_file_is_renamed_into_place)
{
    ckpt_commit c;
    begin(&c, "f", false, false);
    ck_assert_int_eq(ckpt_commit_write(&c, NULL, "new", 3, NULL), CKPT_OK);
    finish(&c);
    assert_text("f", "new");
    begin(&c, "f", false, true);
    ck_assert_int_eq(ckpt_commit_write(&c, NULL, "newer", 5, NULL), CKPT_OK);
    assert_text("f", "new");
    finish(&c);
    assert_text("f", "newer");
    ck_assert_uint_eq(entries(""), 1);
}
END_TEST

/* Every kind of existing target with --force. */
START_TEST(commit_force_swaps_any_target)
{
    static const char *const kinds[] = {"file", "directory", "link", "dangling"};
    for (int as_dir = 0; as_dir < 2; as_dir++) {
        for (size_t i = 0; i < 4; i++) {
            ckpt_commit c;
            ckpt_err err = {0};
            ck_assert_int_eq(ckpt_mkdirs(at("elsewhere"), NULL), CKPT_OK);
            put("elsewhere/f", "mine");
            if (i == 0)
                put("out", "old");
            else if (i == 1)
                ck_assert_int_eq(ckpt_mkdirs(at("out/old/deep"), NULL), CKPT_OK);
            else
                ck_assert_int_eq(symlink(i == 2 ? "elsewhere" : "nowhere", at("out")), 0);
            ck_assert_int_eq(ckpt_commit_begin(&c, at("out"), as_dir, false, &err), CKPT_E_USAGE);
            ck_assert_ptr_nonnull(strstr(err.text, "exists already"));
            ckpt_commit_abort(&c);
            begin(&c, "out", as_dir, true);
            ck_assert_int_eq(ckpt_commit_write(&c, as_dir ? "n" : NULL, "new", 3, NULL), CKPT_OK);
            finish(&c);
            assert_text(as_dir ? "out/n" : "out", "new");
            struct stat st;
            ck_assert_int_eq(lstat(at("out"), &st), 0);
            ck_assert_msg(as_dir ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode), "%s", kinds[i]);
            assert_text("elsewhere/f", "mine");
            ck_assert_uint_eq(entries(""), 2);
            ckpt_remove_tree(at("out"));
        }
    }
}
END_TEST

START_TEST(commit_abort_leaves_the_target_alone)
{
    ckpt_commit c = {0};
    ckpt_commit_abort(&c);
    ck_assert_int_eq(mkdir(at("out"), 0777), 0);
    put("out/f", "old");
    begin(&c, "out", true, true);
    ck_assert_int_eq(ckpt_commit_write(&c, "f", "new", 3, NULL), CKPT_OK);
    ckpt_commit_abort(&c);
    assert_text("out/f", "old");
    ck_assert_uint_eq(entries(""), 1);
}
END_TEST

START_TEST(commit_target_that_appears_meanwhile_is_kept)
{
    for (int as_dir = 0; as_dir < 2; as_dir++) {
        ckpt_commit c;
        ckpt_err err = {0};
        begin(&c, "out", as_dir, false);
        ck_assert_int_eq(ckpt_commit_write(&c, as_dir ? "n" : NULL, "new", 3, NULL), CKPT_OK);
        put("out", "other");
        ck_assert_int_eq(ckpt_commit_finish(&c, &err), CKPT_E_USAGE);
        ck_assert_ptr_nonnull(strstr(err.text, "appeared while it was being written"));
        ckpt_commit_abort(&c);
        assert_text("out", "other");
        ck_assert_uint_eq(entries(""), 1);
        ck_assert_int_eq(unlink(at("out")), 0);
    }
}
END_TEST

START_TEST(commit_interrupted_leaves_nothing)
{
    ckpt_commit c;
    ckpt_err err = {0};
    begin(&c, "out", true, false);
    ck_assert_int_eq(ckpt_commit_write(&c, "f", "new", 3, NULL), CKPT_OK);
    ckpt_interrupted = 1;
    ck_assert_int_eq(ckpt_commit_finish(&c, &err), CKPT_E_INTERRUPTED);
    ckpt_commit_abort(&c);
    ck_assert_uint_eq(entries(""), 0);
}
END_TEST

START_TEST(commit_impossible_targets_are_refused)
{
    ckpt_commit c;
    ckpt_err err = {0};
    char here[512];
    ck_assert_int_eq(ckpt_commit_begin(&c, at("no/out"), true, false, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "/no: No such file or directory"));
    put("file", "");
    ck_assert_int_eq(ckpt_commit_begin(&c, at("file/out"), true, false, &err), CKPT_E_IO);
    ck_assert_ptr_nonnull(strstr(err.text, "Not a directory"));
    static const char *const never[] = {"/", "", ".", "..", "x/..", "x/."};
    for (size_t i = 0; i < 6; i++)
        ck_assert_int_eq(ckpt_commit_begin(&c, never[i], true, true, &err), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(getcwd(here, sizeof here));
    ck_assert_int_eq(ckpt_mkdirs(at("a/b"), NULL), CKPT_OK);
    char top[512];
    snprintf(top, sizeof top, "%s", at("a"));
    ck_assert_int_eq(chdir(at("a/b")), 0);
    ck_assert_int_eq(ckpt_commit_begin(&c, top, true, true, &err), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "contains the current one"));
    ck_assert_int_eq(ckpt_commit_begin(&c, "rel", true, true, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_commit_write(&c, "f", "x", 1, &err), CKPT_OK);
    finish(&c);
    ck_assert_int_eq(chdir(here), 0);
    assert_text("a/b/rel/f", "x");
}
END_TEST

START_TEST(commit_long_names_and_stale_temporaries_work)
{
    char name[256];
    ckpt_commit first, second;
    memset(name, 'n', 255);
    name[255] = '\0';
    begin(&first, name, true, false);
    begin(&second, name, true, false);
    ck_assert_str_ne(first.temp_path, second.temp_path);
    finish(&first);
    ckpt_commit_abort(&second);
    ck_assert(ckpt_is_dir(at(name)));
    ck_assert_uint_eq(entries(""), 1);
}
END_TEST

/* A write that hits the file size limit fails like a full disk. */
START_TEST(commit_failed_write_leaves_nothing)
{
    ckpt_commit c;
    ckpt_err err = {0};
    char big[8192] = {0};
    struct rlimit limit = {4096, 4096};
    ck_assert(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    begin(&c, "out", true, false);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    ck_assert_int_eq(ckpt_commit_write(&c, "f", big, sizeof big, &err), CKPT_E_IO);
    ck_assert_msg(strstr(err.text, "/f: ") && strstr(err.text, "File too large"), "%s", err.text);
    ckpt_commit_abort(&c);
    ck_assert_uint_eq(entries(""), 0);
}
END_TEST

START_TEST(commit_discard_names_what_stays)
{
    ckpt_commit c;
    ckpt_err err = {0};
    char want[512];
    begin(&c, "out", true, false);
    (void)ckpt_fail(&err, CKPT_E_IO, "disk");
    ck_assert_int_eq(symlink("loop", at("loop")), 0);
    free(c.temp_path);
    c.temp_path = strdup(at("loop/x")); /* out of reach, also for root */
    (void)snprintf(want, sizeof want, "%s cannot be removed: disk", c.temp_path);
    ckpt_commit_discard(&c, &err);
    ck_assert_str_eq(err.text, want);
    ck_assert_int_eq(err.code, CKPT_E_IO);
    err = (ckpt_err){0};
    begin(&c, "other", true, false);
    (void)ckpt_fail(&err, CKPT_E_IO, "disk");
    ckpt_commit_discard(&c, &err);
    ck_assert_str_eq(err.text, "disk");
}
END_TEST

Suite *suite_io(void)
{
    Suite *s = suite_create("io");
    TCase *t = tcase_create("io");
    tcase_set_timeout(t, 30);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, open_only_regular_files);
    tcase_add_test(t, pread_short_file_is_an_error);
    tcase_add_test(t, pwrite_full_device_is_an_io_error);
    tcase_add_test(t, read_file_above_limit_is_refused);
    tcase_add_test(t, list_dir_is_sorted_bytewise);
    tcase_add_test(t, path_helpers_follow_their_contract);
    tcase_add_test(t, look_tells_absence_from_failure);
    tcase_add_test(t, only_faults_pass_on);
    tcase_add_test(t, mkdirs_makes_missing_levels);
    tcase_add_test(t, remove_tree_does_not_follow_links);
    tcase_add_test(t, commit_directory_appears_only_when_finished);
    tcase_add_test(t, commit_unsafe_names_are_refused);
    tcase_add_test(t, commit_file_is_renamed_into_place);
    tcase_add_test(t, commit_force_swaps_any_target);
    tcase_add_test(t, commit_force_never_replaces_a_fifo);
    tcase_add_test(t, commit_abort_leaves_the_target_alone);
    tcase_add_test(t, commit_target_that_appears_meanwhile_is_kept);
    tcase_add_test(t, commit_interrupted_leaves_nothing);
    tcase_add_test(t, commit_impossible_targets_are_refused);
    tcase_add_test(t, commit_long_names_and_stale_temporaries_work);
    tcase_add_test(t, commit_failed_write_leaves_nothing);
    tcase_add_test(t, commit_discard_names_what_stays);
    suite_add_tcase(s, t);
    return s;
}
