/* JSON: what is refused and where, exact numbers, building, printing. */
#include "json.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_json(void);

#define TEXT(s) s, sizeof(s) - 1

static const struct {
    const char *text;
    size_t n;
    const char *message; /* part of it */
} bad[] = {
    {TEXT(""),                                                                      "offset 0: expected a value, found end of text"     },
    {TEXT("  \n"),                                                                  "offset 3: expected a value"                        },
    {TEXT("version 2"),                                                             "offset 0: expected a value, found 'v'"             },
    {TEXT("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"),
     "Git LFS pointer, not the file itself (oid sha256:4d7a, size 9): fetch it with 'git lfs "
     "pull'"                                                                                                                            },
    {TEXT("\n<HTML>"),                                                              "HTML page saved as a checkpoint's file"            },
    {TEXT("{} x"),                                                                  "offset 3: expected end of text, found 'x'"         },
    {TEXT("1 2"),                                                                   "offset 2: expected end of text"                    },
    {TEXT("[1]\0"),                                                                 "offset 3: expected end of text, found byte 0x00"   },
    {TEXT("01"),                                                                    "offset 0: number with a leading zero"              },
    {TEXT("-00"),                                                                   "offset 0: number with a leading zero"              },
    {TEXT("[1.]"),                                                                  "offset 3: expected a digit, found ']'"             },
    {TEXT("[.5]"),                                                                  "offset 1: expected a value, found '.'"             },
    {TEXT("+1"),                                                                    "offset 0: expected a value, found '+'"             },
    {TEXT("-"),                                                                     "offset 1: expected a digit, found end of text"     },
    {TEXT("1e"),                                                                    "offset 2: expected a digit"                        },
    {TEXT("1e+"),                                                                   "offset 3: expected a digit"                        },
    {TEXT("0x10"),                                                                  "offset 1: expected end of text, found 'x'"         },
    {TEXT("NaN"),                                                                   "offset 0: NaN and Infinity are not JSON"           },
    {TEXT("[Infinity]"),                                                            "offset 1: NaN and Infinity are not JSON"           },
    {TEXT("-Infinity"),                                                             "offset 1: expected a digit, found 'I'"             },
    {TEXT("1e309"),                                                                 "offset 0: number out of range"                     },
    {TEXT("[-0.5e309]"),                                                            "offset 1: number out of range"                     },
    {TEXT("[9007199254740993]"),                                                    "offset 1: integer 9007199254740993 is not exact"   },
    {TEXT("-18446744073709551615"),                                                 "integer -18446744073709551615 is not exact"        },
    {TEXT("1000000000000000000000000000000000000000000000000000000000000000"),
     "offset 0: number longer than 63 characters"                                                                                       },
    {TEXT("tru"),                                                                   "offset 0: expected a value, found 't'"             },
    {TEXT("truex"),                                                                 "offset 4: expected end of text"                    },
    {TEXT("'a'"),                                                                   "offset 0: expected a value, found '''"             },
    {TEXT("\"abc"),                                                                 "offset 0: string without end"                      },
    {TEXT("\"a\nb\""),                                                              "offset 2: control character in a string"           },
    {TEXT("\"a\0b\""),                                                              "offset 2: control character in a string"           },
    {TEXT("\"\\u0000\""),                                                           "offset 1: \\u0000 in a string"                     },
    {TEXT("\"\\ud800\""),                                                           "offset 1: lone surrogate"                          },
    {TEXT("\"\\ud800\\u0041\""),                                                    "offset 1: lone surrogate"                          },
    {TEXT("\"\\udc00\""),                                                           "offset 1: lone surrogate"                          },
    {TEXT("\"\\ud800\\u"),                                                          "offset 1: lone surrogate"                          },
    {TEXT("\"\\u12"),                                                               "offset 1: \\u needs four hexadecimal digits"       },
    {TEXT("\"\\u12g4\""),                                                           "offset 1: \\u needs four hexadecimal digits"       },
    {TEXT("\"\\x41\""),                                                             "offset 2: expected an escape, found 'x'"           },
    {TEXT("\"\\"),                                                                  "offset 2: expected an escape, found end of text"   },
    {TEXT("\"\xff\""),                                                              "offset 1: invalid UTF-8"                           },
    {TEXT("\"\xc0\xaf\""),                                                          "offset 1: invalid UTF-8"                           },
    {TEXT("\"\xed\xa0\x80\""),                                                      "offset 1: invalid UTF-8"                           },
    {TEXT("\"\xe2\x82\""),                                                          "offset 1: invalid UTF-8"                           },
    {TEXT("\xef\xbb\xbf{}"),                                                        "offset 0: byte order mark"                         },
    {TEXT("[1,]"),                                                                  "offset 3: expected a value, found ']'"             },
    {TEXT("[,1]"),                                                                  "offset 1: expected a value, found ','"             },
    {TEXT("[1 2]"),                                                                 "offset 3: expected ',' or ']', found '2'"          },
    {TEXT("[1"),                                                                    "offset 2: expected ',' or ']', found end of text"  },
    {TEXT("["),                                                                     "offset 1: expected a value, found end of text"     },
    {TEXT("[1}"),                                                                   "offset 2: expected ',' or ']', found '}'"          },
    {TEXT("]"),                                                                     "offset 0: expected a value, found ']'"             },
    {TEXT("{"),                                                                     "offset 1: expected a string key, found end of text"},
    {TEXT("{\"a\":1,}"),                                                            "offset 7: expected a string key, found '}'"        },
    {TEXT("{a:1}"),                                                                 "offset 1: expected a string key, found 'a'"        },
    {TEXT("{\"a\" 1}"),                                                             "offset 5: expected ':', found '1'"                 },
    {TEXT("{\"a\":}"),                                                              "offset 5: expected a value, found '}'"             },
    {TEXT("{\"a\":1 \"b\":2}"),                                                     "offset 7: expected ',' or '}', found '\"'"         },
    {TEXT("{1:2}"),                                                                 "offset 1: expected a string key, found '1'"        },
    {TEXT("/* c */ 1"),                                                             "offset 0: expected a value, found '/'"             },
    {TEXT("{\"a\":1,\"b\":2,\"a\":3}"),                                             "duplicate key 'a'"                                 },
    {TEXT("{\"a\":1,\"\\u0061\":3}"),                                               "duplicate key 'a'"                                 },
    {TEXT("[{\"x\":{\"\":1,\"\":2}}]"),                                             "duplicate key ''"                                  },
};

START_TEST(json_malformed_text_is_refused_with_its_offset)
{
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    /* A copy without a terminator shows reads past the end under ASan. */
    char *copy = malloc(bad[_i].n + 1);
    memcpy(copy, bad[_i].text, bad[_i].n);
    char *tight = bad[_i].n == 0 ? copy : realloc(copy, bad[_i].n);
    ck_assert_msg(ckpt_json_parse(tight, bad[_i].n, &j, &err) == CKPT_E_FORMAT, "accepted %s",
                  bad[_i].text);
    ck_assert_ptr_null(j);
    ck_assert_msg(strstr(err.text, bad[_i].message) != NULL, "'%s' lacks '%s'", err.text,
                  bad[_i].message);
    free(tight);
}
END_TEST

static const struct {
    const char *text, *compact; /* NULL: unchanged */
} good[] = {
    {"{}",                                                         NULL     },
    {"[]",                                                         NULL     },
    {" [ 1 , 2 ] \r\n\t",                                          "[1,2]"  },
    {"{\"a\":[{},[],{\"b\":null}],\"A\":true,\"c\":false}",        NULL     },
    {"0",                                                          NULL     },
    {"-0",                                                         "-0"     },
    {"-0.0",                                                       "-0.0"   },
    {"1.0",                                                        "1.0"    },
    {"10000.0",                                                    "10000.0"},
    {"1e4",                                                        "10000.0"},
    {"1E-2",                                                       "0.01"   },
    {"0.1",                                                        NULL     },
    {"1e-06",                                                      NULL     },
    {"1e22",                                                       "1e+22"  },
    {"0.5e308",                                                    "5e+307" },
    {"0.3333333333333333",                                         NULL     },
    {"5e-324",                                                     NULL     },
    {"1.7976931348623157e+308",                                    NULL     },
    {"9007199254740992",                                           NULL     },
    {"9007199254740994",                                           NULL     },
    {"-9007199254740992",                                          NULL     },
    {"1000000000000000019884624838656",                            NULL     }, /* int(1e30), tokenizer configs */
    {"\"\\u00e9\\ud83d\\ude00\\/\\b\\f\\n\\r\\t\\\"\\\\\\u0001\"",
     "\"\xc3\xa9\xf0\x9f\x98\x80/\\b\\f\\n\\r\\t\\\"\\\\\\u0001\""          },
    {"\"\x7f\xc2\x80\"",                                           NULL     },
    {"{\"\":1}",                                                   NULL     },
    {"null",                                                       NULL     },
};

START_TEST(json_valid_text_prints_back)
{
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    ckpt_buf out = {0};
    ck_assert_msg(ckpt_json_parse(good[_i].text, strlen(good[_i].text), &j, &err) == CKPT_OK,
                  "%s: %s", good[_i].text, err.text);
    ck_assert(ckpt_json_print(j, 0, false, &out));
    ck_assert_str_eq((char *)out.data, good[_i].compact ? good[_i].compact : good[_i].text);
    ckpt_json_free(j);
    ckpt_buf_release(&out);
}
END_TEST

static ckpt_json *parse(const char *text)
{
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    ck_assert_msg(ckpt_json_parse(text, strlen(text), &j, &err) == CKPT_OK, "%s", err.text);
    return j;
}

START_TEST(json_depth_128_is_the_limit)
{
    char text[2 * 129 + 1];
    for (int depth = 127; depth <= 129; depth++) {
        ckpt_err err = {0};
        ckpt_json *j = NULL;
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        ckpt_status status = ckpt_json_parse(text, 2 * (size_t)depth, &j, &err);
        ck_assert_int_eq(status, depth <= 128 ? CKPT_OK : CKPT_E_FORMAT);
        if (depth > 128)
            ck_assert_str_eq(err.text, "JSON offset 128: nested deeper than 128 levels");
        ckpt_json_free(j);
    }
    size_t n = 1u << 20;
    char *deep = malloc(n);
    memset(deep, '[', n);
    ckpt_json *j = NULL;
    ck_assert_int_eq(ckpt_json_parse(deep, n, &j, NULL), CKPT_E_FORMAT);
    free(deep);
}
END_TEST

START_TEST(json_many_keys_are_checked_quickly)
{
    for (int duplicate = 0; duplicate < 2; duplicate++) {
        ckpt_buf text = {0};
        ckpt_buf_putc(&text, '{');
        for (unsigned i = 0; i < 300000; i++) /* a permutation: keys do not ascend */
            ckpt_buf_printf(&text, "%s\"%06u\":%u", i ? "," : "", i * 7919u % 300007u, i);
        ckpt_buf_printf(&text, "%s}", duplicate ? ",\"007919\":0" : "");
        ckpt_json *j = NULL;
        ckpt_err err = {0};
        ckpt_status status = ckpt_json_parse((char *)text.data, text.len, &j, &err);
        ck_assert_int_eq(status, duplicate ? CKPT_E_FORMAT : CKPT_OK);
        if (duplicate)
            ck_assert_str_eq(err.text, "JSON: duplicate key '007919'");
        else
            ck_assert_int_eq(ckpt_json_size(j), 300000);
        ckpt_json_free(j);
        ckpt_buf_release(&text);
    }
}
END_TEST

START_TEST(json_lookup_is_exact)
{
    ckpt_json *j = parse("{\"Key\":1,\"key\":{\"a\":{\"b\":7}},\"key.x\":2,\"l\":[1,\"s\",true]}");
    int64_t v;
    bool b;
    ck_assert(ckpt_json_int(ckpt_json_get(j, "Key"), &v) && v == 1);
    ck_assert_ptr_null(ckpt_json_get(j, "KEY"));
    ck_assert_ptr_null(ckpt_json_get(j, "ke"));
    ck_assert(ckpt_json_int(ckpt_json_path(j, "key.a.b"), &v) && v == 7);
    ck_assert_ptr_null(ckpt_json_path(j, "key.x"));
    ck_assert_ptr_null(ckpt_json_path(j, "key.a.b.c"));
    ck_assert_ptr_null(ckpt_json_get(NULL, "x"));
    ckpt_json *c = ckpt_json_child(ckpt_json_get(j, "l"));
    ck_assert_ptr_null(ckpt_json_key(c));
    c = ckpt_json_next(c);
    ck_assert_str_eq(ckpt_json_string(c), "s");
    ck_assert(!ckpt_json_int(c, &v));
    c = ckpt_json_next(c);
    ck_assert(ckpt_json_bool(c, &b) && b);
    ck_assert_ptr_null(ckpt_json_next(c));
    ck_assert_ptr_null(ckpt_json_child(c));
    ck_assert_int_eq(ckpt_json_size(j), 4);
    ckpt_json_free(j);
    ck_assert(!ckpt_json_is_object(NULL) && !ckpt_json_is_number(NULL) && !ckpt_json_is_null(NULL));
}
END_TEST

START_TEST(json_integers_are_exact)
{
    static const struct {
        const char *text;
        bool ok;
        int64_t v;
    } rows[] = {
        {"2147483648",        true,  2147483648       },
        {"9007199254740992",  true,  INT64_C(1) << 53 },
        {"-9007199254740991", true,  -9007199254740991},
        {"9007199254740994",  false, 0                },
        {"1.0",               true,  1                },
        {"1.5",               false, 0                },
        {"1e3",               true,  1000             },
        {"true",              false, 0                },
        {"\"1\"",             false, 0                },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_json *j = parse(rows[i].text);
        int64_t v = 0;
        ck_assert_msg(ckpt_json_int(j, &v) == rows[i].ok, "%s", rows[i].text);
        ck_assert_int_eq(v, rows[i].v);
        ckpt_json_free(j);
    }
    static const int64_t made[] = {INT64_MIN, INT64_MAX, (INT64_C(1) << 53) + 1, 0, -1};
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        ckpt_json *j = ckpt_json_new_int(made[i]), *copy = ckpt_json_dup(j);
        int64_t v;
        char want[32];
        ckpt_buf out = {0};
        ck_assert(ckpt_json_is_number(j) && !ckpt_json_is_float(j));
        ck_assert(ckpt_json_int(copy, &v) && v == made[i]);
        ck_assert(ckpt_json_print(j, 0, false, &out));
        (void)snprintf(want, sizeof want, "%lld", (long long)made[i]);
        ck_assert_str_eq((char *)out.data, want);
        ck_assert(ckpt_json_equal(j, copy));
        ckpt_json_free(j);
        ckpt_json_free(copy);
        ckpt_buf_release(&out);
    }
}
END_TEST

START_TEST(json_floats_are_marked_in_document_order)
{
    ckpt_json *j = parse("{\"a\":[1,1.0,[2e0,{\"b\":3}],4],\"c\":5.5,\"d\":6}");
    ckpt_json *a = ckpt_json_child(ckpt_json_get(j, "a"));
    ck_assert(!ckpt_json_is_float(a));
    a = ckpt_json_next(a);
    ck_assert(ckpt_json_is_float(a));
    a = ckpt_json_next(a);
    ck_assert(ckpt_json_is_float(ckpt_json_child(a)));
    ck_assert(!ckpt_json_is_float(ckpt_json_get(ckpt_json_next(ckpt_json_child(a)), "b")));
    ck_assert(!ckpt_json_is_float(ckpt_json_next(a)));
    ck_assert(ckpt_json_is_float(ckpt_json_get(j, "c")));
    ck_assert(!ckpt_json_is_float(ckpt_json_get(j, "d")));
    ckpt_json *copy = ckpt_json_dup(j);
    ck_assert(ckpt_json_is_float(ckpt_json_get(copy, "c")));
    ckpt_json_free(copy);
    ckpt_json_free(j);
}
END_TEST

START_TEST(json_build_replaces_and_keeps_order)
{
    ckpt_json *j = ckpt_json_new_object(), *l = ckpt_json_new_array();
    ckpt_buf out = {0};
    ck_assert(ckpt_json_set(j, "b", ckpt_json_new_int(1)));
    ck_assert(ckpt_json_set(j, "a", ckpt_json_new_string("x\xff")));
    ck_assert(ckpt_json_set(j, "b", ckpt_json_new_double(2)));
    ck_assert(ckpt_json_set(j, "c", l));
    ck_assert(ckpt_json_push(l, ckpt_json_new_bool(true)));
    ck_assert(ckpt_json_push(l, ckpt_json_new_null()));
    ck_assert(ckpt_json_push(l, ckpt_json_new_double(NAN)));
    ck_assert(ckpt_json_add(j, "aa", ckpt_json_new_object()));
    ck_assert(ckpt_json_set(j, "c2", ckpt_json_new_int(3)));
    ckpt_json_delete(j, "c2");
    ckpt_json_delete(j, "absent");
    ck_assert(!ckpt_json_set(l, "k", ckpt_json_new_int(1)));
    ck_assert(!ckpt_json_push(j, ckpt_json_new_int(1)));
    ck_assert(!ckpt_json_set(j, "n", NULL));
    ck_assert(ckpt_json_print(j, 0, false, &out));
    ck_assert_str_eq((char *)out.data,
                     "{\"b\":2.0,\"a\":\"x\\ufffd\",\"c\":[true,null,null],\"aa\":{}}");
    ckpt_buf_clear(&out);
    ck_assert(ckpt_json_print(j, 2, true, &out));
    ck_assert_str_eq((char *)out.data, "{\n  \"a\": \"x\\ufffd\",\n  \"aa\": {},\n  \"b\": 2.0,\n"
                                       "  \"c\": [\n    true,\n    null,\n    null\n  ]\n}");
    ckpt_json_free(j);
    ckpt_buf_release(&out);
}
END_TEST

START_TEST(json_build_many_ascending_keys_is_fast)
{
    ckpt_json *j = ckpt_json_new_object();
    char key[16];
    for (unsigned i = 0; i < 200000; i++) {
        (void)snprintf(key, sizeof key, "%06u", i);
        ck_assert(ckpt_json_set(j, key, ckpt_json_new_int(i)));
    }
    ck_assert_int_eq(ckpt_json_size(j), 200000);
    ck_assert(ckpt_json_set(j, "000005", ckpt_json_new_int(-1)));
    ck_assert_int_eq(ckpt_json_size(j), 200000);
    ckpt_json_free(j);
}
END_TEST

START_TEST(json_equal_ignores_object_order_only)
{
    static const struct {
        const char *a, *b;
        bool same;
    } rows[] = {
        {"{\"a\":1,\"b\":[1,2]}", "{\"b\":[1,2],\"a\":1}", true },
        {"{\"a\":1}",             "{\"a\":1,\"b\":1}",     false},
        {"[1,2]",                 "[2,1]",                 false},
        {"[1]",                   "[1,1]",                 false},
        {"1",                     "1.0",                   true },
        {"1.0",                   "1.0000000000000002",    false},
        {"\"a\"",                 "\"A\"",                 false},
        {"true",                  "false",                 false},
        {"null",                  "false",                 false},
        {"{}",                    "[]",                    false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_json *a = parse(rows[i].a), *b = parse(rows[i].b);
        ck_assert_msg(ckpt_json_equal(a, b) == rows[i].same, "%s %s", rows[i].a, rows[i].b);
        ck_assert_msg(ckpt_json_equal(b, a) == rows[i].same, "%s %s", rows[i].b, rows[i].a);
        ckpt_json_free(a);
        ckpt_json_free(b);
    }
    ck_assert(ckpt_json_equal(NULL, NULL));
}
END_TEST

START_TEST(json_random_doubles_survive_printing)
{
    uint64_t x = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        double d, back;
        uint64_t bits = i % 16 == 0 ? x & 0x800fffffffffffffu : x; /* some subnormals */
        memcpy(&d, &bits, sizeof d);
        if (!isfinite(d))
            continue;
        ckpt_json *j = ckpt_json_new_double(d), *k = NULL;
        ckpt_buf out = {0};
        ck_assert(ckpt_json_print(j, 0, false, &out));
        ck_assert_int_eq(ckpt_json_parse((char *)out.data, out.len, &k, NULL), CKPT_OK);
        ck_assert(ckpt_json_double(k, &back) && memcmp(&d, &back, sizeof d) == 0);
        ck_assert(ckpt_json_is_float(k));
        ckpt_json_free(j);
        ckpt_json_free(k);
        ckpt_buf_release(&out);
    }
}
END_TEST

Suite *suite_json(void)
{
    Suite *s = suite_create("json");
    TCase *t = tcase_create("json");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, json_malformed_text_is_refused_with_its_offset, 0,
                        (int)(sizeof bad / sizeof bad[0]));
    tcase_add_loop_test(t, json_valid_text_prints_back, 0, (int)(sizeof good / sizeof good[0]));
    tcase_add_test(t, json_depth_128_is_the_limit);
    tcase_add_test(t, json_many_keys_are_checked_quickly);
    tcase_add_test(t, json_lookup_is_exact);
    tcase_add_test(t, json_integers_are_exact);
    tcase_add_test(t, json_floats_are_marked_in_document_order);
    tcase_add_test(t, json_build_replaces_and_keeps_order);
    tcase_add_test(t, json_build_many_ascending_keys_is_fast);
    tcase_add_test(t, json_equal_ignores_object_order_only);
    tcase_add_test(t, json_random_doubles_survive_printing);
    suite_add_tcase(s, t);
    return s;
}
