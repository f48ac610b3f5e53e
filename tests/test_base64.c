#include "base64.h"

#include <check.h>
#include <string.h>

/* RFC 4648 section 10. */
static const struct {
    const char *bytes, *text;
} known[] = {
    {"",       ""        },
    {"f",      "Zg=="    },
    {"fo",     "Zm8="    },
    {"foo",    "Zm9v"    },
    {"foob",   "Zm9vYg=="},
    {"fooba",  "Zm9vYmE="},
    {"foobar", "Zm9vYmFy"},
};

START_TEST(base64_is_that_of_the_rfc)
{
    ckpt_buf text = {0}, bytes = {0};
    ckpt_base64_put(&text, (const uint8_t *)known[_i].bytes, strlen(known[_i].bytes));
    ck_assert_uint_eq(text.len, strlen(known[_i].text));
    ck_assert(text.len == 0 || memcmp(text.data, known[_i].text, text.len) == 0);
    ck_assert(ckpt_base64_get(&bytes, known[_i].text, strlen(known[_i].text)));
    ck_assert_uint_eq(bytes.len, strlen(known[_i].bytes));
    ck_assert(bytes.len == 0 || memcmp(bytes.data, known[_i].bytes, bytes.len) == 0);
    ckpt_buf_release(&text);
    ckpt_buf_release(&bytes);
}
END_TEST

START_TEST(base64_every_byte_comes_back)
{
    uint8_t all[512];
    for (size_t i = 0; i < sizeof all; i++)
        all[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t n = 0; n <= sizeof all; n++) {
        ckpt_buf text = {0}, bytes = {0};
        ckpt_base64_put(&text, all, n);
        ck_assert(ckpt_base64_get(&bytes, (const char *)text.data, text.len));
        ck_assert_uint_eq(bytes.len, n);
        ck_assert(n == 0 || memcmp(bytes.data, all, n) == 0);
        ckpt_buf_release(&text);
        ckpt_buf_release(&bytes);
    }
}
END_TEST

/* Not canonical: length, alphabet, padding inside, missing or too much, bits that are lost. */
static const char *const bad[] = {
    "Z", "Zg=", "Zg", "Zg==Zg==", "Z===", "====", "Zm9-", "Zm 9", "Zh==", "Zm9=", "Zm9v\n\n\n\n"};

START_TEST(base64_anything_else_is_refused)
{
    ckpt_buf bytes = {0};
    ck_assert(!ckpt_base64_get(&bytes, bad[_i], strlen(bad[_i])));
    ckpt_buf_release(&bytes);
}
END_TEST

Suite *suite_base64(void);
Suite *suite_base64(void)
{
    Suite *s = suite_create("base64");
    TCase *t = tcase_create("text");
    tcase_add_loop_test(t, base64_is_that_of_the_rfc, 0, (int)(sizeof known / sizeof known[0]));
    tcase_add_test(t, base64_every_byte_comes_back);
    tcase_add_loop_test(t, base64_anything_else_is_refused, 0, (int)(sizeof bad / sizeof bad[0]));
    suite_add_tcase(s, t);
    return s;
}
