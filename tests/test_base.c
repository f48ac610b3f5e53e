/* Error chains, UTF-8, arena and byte buffer. */
#include "arena.h"

#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_base(void);

static const struct {
    const char *in, *out;
} texts[] = {
    {"plain",                                "plain"                               },
    {"a\nb\x1b[31m\x7f",                     "a\\x0ab\\x1b[31m\\x7f"               },
    {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
    {"\xc2\x9b",                             "\\xc2\\x9b"                          }, /* C1 control */
    {"\xff\xc0\x80",                         "\\xff\\xc0\\x80"                     }, /* never valid, overlong */
    {"\xed\xa0\x80",                         "\\xed\\xa0\\x80"                     }, /* surrogate */
    {"\xf4\x90\x80\x80",                     "\\xf4\\x90\\x80\\x80"                }, /* beyond U+10FFFF */
    {"\xe2\x82",                             "\\xe2\\x82"                          }, /* cut short */
};

START_TEST(err_hostile_text_is_one_printable_line)
{
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_fail(&err, CKPT_E_FORMAT, "%s", texts[_i].in), CKPT_E_FORMAT);
    ck_assert_str_eq(err.text, texts[_i].out);
    ck_assert_int_eq(err.code, CKPT_E_FORMAT);
}
END_TEST

START_TEST(err_frames_read_outermost_first)
{
    ckpt_err err = {0};
    (void)ckpt_fail(&err, CKPT_E_FORMAT, "offset %d past end %d", 128, 96);
    ckpt_err_frame(&err, "tensor '%s'", "x");
    ckpt_err_frame(&err, "convert");
    ck_assert_str_eq(err.text, "convert: tensor 'x': offset 128 past end 96");
    ck_assert_int_eq(err.code, CKPT_E_FORMAT);
    (void)ckpt_fail(&err, CKPT_E_IO, "again: %s", err.text);
    ck_assert_str_eq(err.text, "again: convert: tensor 'x': offset 128 past end 96");
    (void)ckpt_fail(NULL, CKPT_E_IO, "nobody listens");
    ckpt_err_frame(NULL, "nobody");
}
END_TEST

START_TEST(err_errno_names_the_reason)
{
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_fail_errno(&err, ENOSPC, "%s", "f"), CKPT_E_IO);
    ck_assert_str_eq(err.text, "f: No space left on device");
    ck_assert_int_eq(errno, ENOSPC);
    char name[3000];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    (void)ckpt_fail_errno(&err, EIO, "%s", name);
    ck_assert_ptr_nonnull(strstr(err.text, "...: Input/output error"));
}
END_TEST

START_TEST(err_long_chain_loses_its_tail_at_a_character)
{
    ckpt_err err = {0};
    char euro[3 * 1000 + 1];
    for (size_t i = 0; i < 1000; i++)
        memcpy(euro + 3 * i, "\xe2\x82\xac", 3);
    euro[3000] = '\0';
    (void)ckpt_fail(&err, CKPT_E_FORMAT, "%s", euro);
    ck_assert_str_eq(err.text + strlen(err.text) - 3, "...");
    for (int i = 0; i < 3; i++) {
        ckpt_err_frame(&err, "frame");
        ck_assert_int_eq(strncmp(err.text, "frame: ", 7), 0);
        ck_assert_uint_lt(strlen(err.text), CKPT_ERR_MAX);
        for (size_t at = 0, n = strlen(err.text), len; at < n; at += len)
            ck_assert_uint_ne(len = ckpt_utf8_len(err.text + at, n - at), 0);
    }
    for (int i = 0; i < 500; i++)
        ckpt_err_frame(&err, "f%d", i);
    ck_assert_int_eq(strncmp(err.text, "f499: f498: ", 12), 0);
}
END_TEST

START_TEST(err_codes_map_to_exit_codes)
{
    static const int want[][2] = {
        {CKPT_OK,            0  },
        {CKPT_E_MISMATCH,    1  },
        {CKPT_E_USAGE,       2  },
        {CKPT_E_FORMAT,      3  },
        {CKPT_E_UNSUPPORTED, 4  },
        {CKPT_E_IO,          5  },
        {CKPT_E_NOMEM,       5  },
        {CKPT_E_INTERRUPTED, 130},
        {CKPT_E_INTERNAL,    70 },
        {99,                 70 }
    };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        ck_assert_int_eq(ckpt_exit_code((ckpt_status)want[i][0]), want[i][1]);
    ck_assert_str_eq(ckpt_status_text(CKPT_E_IO), "input/output");
}
END_TEST

START_TEST(arena_blocks_are_zeroed_and_aligned)
{
    static const size_t sizes[] = {0, 1, 15, 16, 17, 4000, 4097, 100000, 5u << 20, 3, 1u << 22, 9};
    ckpt_arena arena = {0};
    for (size_t round = 0; round < 50; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] - (round > 2 ? 4 : 0); i++) {
            uint8_t *p = ckpt_arena_alloc(&arena, sizes[i]);
            ck_assert_ptr_nonnull(p);
            ck_assert_uint_eq((uintptr_t)p % 16, 0);
            for (size_t k = 0; k < sizes[i]; k += 997)
                ck_assert_uint_eq(p[k], 0);
            if (sizes[i] > 0)
                memset(p, 0xff, sizes[i]);
        }
    ck_assert_uint_gt(arena.total, 0);
    ckpt_arena_free(&arena);
    ck_assert_ptr_null(arena.head);
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(arena_overflowing_sizes_are_refused)
{
    ckpt_arena arena = {0};
    ck_assert_ptr_null(ckpt_arena_alloc(&arena, SIZE_MAX));
    ck_assert_ptr_null(ckpt_arena_array(&arena, SIZE_MAX / 2, 3));
    ck_assert_ptr_null(ckpt_arena_strndup(&arena, "x", SIZE_MAX));
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(arena_strings_are_copied)
{
    ckpt_arena arena = {0};
    ck_assert_str_eq(ckpt_arena_strdup(&arena, "abc"), "abc");
    ck_assert_str_eq(ckpt_arena_strndup(&arena, "abc", 2), "ab");
    ck_assert_str_eq(ckpt_arena_printf(&arena, "%d-%s", 7, "x"), "7-x");
    ck_assert_mem_eq(ckpt_arena_memdup(&arena, "a\0b", 3), "a\0b", 3);
    ck_assert_ptr_nonnull(ckpt_arena_memdup(&arena, NULL, 0));
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(buf_appends_stay_terminated)
{
    ckpt_buf buf = {0};
    ckpt_buf_append(&buf, NULL, 0);
    ck_assert_uint_eq(buf.data[0], 0);
    for (int i = 0; i < 1000; i++) {
        ckpt_buf_printf(&buf, "%03d", i);
        ckpt_buf_putc(&buf, ',');
        ck_assert_uint_eq(buf.data[buf.len], 0);
    }
    ck_assert_uint_eq(buf.len, 4000);
    ck_assert_str_eq((char *)buf.data + 3992, "998,999,");
    memset(ckpt_buf_extend(&buf, 64), 'x', 64);
    ck_assert_uint_eq(buf.data[4064], 0);
    ckpt_buf_clear(&buf);
    ckpt_buf_puts(&buf, "z");
    ck_assert_str_eq((char *)buf.data, "z");
    ckpt_buf_release(&buf);
    ck_assert_ptr_null(buf.data);
}
END_TEST

START_TEST(buf_impossible_growth_fails_once_and_keeps_contents)
{
    ckpt_buf buf = {0};
    ckpt_buf_puts(&buf, "kept");
    ck_assert_ptr_null(ckpt_buf_extend(&buf, SIZE_MAX - 2));
    ck_assert(buf.failed);
    ckpt_buf_puts(&buf, "lost");
    ck_assert_str_eq((char *)buf.data, "kept");
    ckpt_buf_release(&buf);
}
END_TEST

START_TEST(grow_doubles_and_refuses_overflow)
{
    void *p = NULL;
    size_t cap = 0;
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_grow(&p, &cap, 1, 8, &err), CKPT_OK);
    ck_assert_uint_ge(cap, 1);
    ck_assert_int_eq(ckpt_grow(&p, &cap, 1000, 8, &err), CKPT_OK);
    ck_assert_uint_ge(cap, 1000);
    size_t before = cap;
    ck_assert_int_eq(ckpt_grow(&p, &cap, SIZE_MAX, 8, &err), CKPT_E_NOMEM);
    ck_assert_int_eq(ckpt_grow(&p, &cap, SIZE_MAX / 4, 8, &err), CKPT_E_NOMEM);
    ck_assert_uint_eq(cap, before);
    free(p);
}
END_TEST

Suite *suite_base(void)
{
    Suite *s = suite_create("base");
    TCase *t = tcase_create("base");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, err_hostile_text_is_one_printable_line, 0,
                        (int)(sizeof texts / sizeof texts[0]));
    tcase_add_test(t, err_frames_read_outermost_first);
    tcase_add_test(t, err_errno_names_the_reason);
    tcase_add_test(t, err_long_chain_loses_its_tail_at_a_character);
    tcase_add_test(t, err_codes_map_to_exit_codes);
    tcase_add_test(t, arena_blocks_are_zeroed_and_aligned);
    tcase_add_test(t, arena_overflowing_sizes_are_refused);
    tcase_add_test(t, arena_strings_are_copied);
    tcase_add_test(t, buf_appends_stay_terminated);
    tcase_add_test(t, buf_impossible_growth_fails_once_and_keeps_contents);
    tcase_add_test(t, grow_doubles_and_refuses_overflow);
    suite_add_tcase(s, t);
    return s;
}
