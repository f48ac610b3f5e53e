/* Every row of the conformance table of torch-formats.md section 5: what the reference accepts, we
 * accept, and what it refuses, we refuse, except where `deviation` says why not. */
#include "st_test.h"

Suite *suite_st_conformance(void);

#define I32(shape, a, b) "{\"test\":" T("I32", shape, a, b) "}"
#define BASIC I32("[2,2]", 0, 16)
#define BODY "\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]"
#define EXTRA(value) "{\"test\":{" BODY ",\"x\":" value "}}"
#define META(value) "{\"__metadata__\":" value "}"
#define OFFSETS(text) "{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":" text "}}"
#define DTYPE(text) "{\"test\":{\"dtype\":" text ",\"shape\":[2,2],\"data_offsets\":[0,16]}}"
#define OK_(count) CKPT_OK, count, NULL
#define BAD(message) CKPT_E_FORMAT, 0, message

typedef struct row {
    int number;
    const char *header;
    size_t len;  /* of header when it contains NUL, else 0 */
    size_t data; /* zero bytes behind it */
    ckpt_status want;
    size_t tensors;
    const char *message;
    const char *deviation; /* the reference says ok */
} row;

/* clang-format off */
static const row rows[] = {
    {10, "{}", 0, 0, OK_(0), NULL},
    {11, "{}      ", 0, 0, OK_(0), NULL},
    {12, "{}\r \t\n", 0, 0, OK_(0), NULL},
    {13, "\t\n{}\r ", 0, 0, OK_(0), NULL},
    {14, "\xef\xbb\xbf{}", 0, 0, BAD("header byte 0: expected '{', found byte 0xef"), NULL},
    {15, "{}\0\0", 4, 0, BAD("header byte 2: expected nothing but white space"), NULL},
    {16, "{}x", 0, 0, BAD("header byte 2: expected nothing but white space after '}', found x"), NULL},
    {16, "{}{}", 0, 0, BAD("found an object"), NULL},
    {17, "null", 0, 0, BAD("expected '{', found null"), NULL},
    {17, "[]", 0, 0, BAD("expected '{', found an array"), NULL},
    {17, "\"a\"", 0, 0, BAD("expected '{', found a string"), NULL},
    {18, BASIC, 0, 16, OK_(1), NULL},
    {19, BASIC, 0, 20, BAD("4 bytes after the last tensor: data ends at byte 16"), NULL},
    {20, BASIC, 0, 14, BAD("tensor 'test': offset 16 past end 14"), NULL},
    {21, BASIC, 0, 0, BAD("tensor 'test': offset 16 past end 0"), NULL},
    {22, I32("[]", 0, 4), 0, 4, OK_(1), NULL},
    {23, I32("[2,0]", 0, 0), 0, 0, OK_(1), NULL},
    {23, "{\"test\":{\"dtype\":\"I32\",\"shape\":[2, 0],\"data_offsets\":[0, 0]}}", 0, 0, OK_(1), NULL},
    {24, I32("[2,2]", 0, 4), 0, 4, BAD("tensor 'test': dtype I32 shape [2,2] needs 16 bytes, data_offsets give 4"), NULL},
    {25, I32("[2,18446744073709551614]", 0, 16), 0, 16, BAD("integer 18446744073709551614 is above the limit 9223372036854775807"), NULL},
    {26, I32("[2,9223372036854775807]", 0, 16), 0, 16, BAD("shape [2,9223372036854775807] overflows"), NULL},
    {27, I32("[0,18446744073709551615]", 0, 0), 0, 0, BAD("integer 18446744073709551615 is above the limit"), "dimensions are int64_t"},
    {27, I32("[0,9223372036854775807]", 0, 0), 0, 0, OK_(1), NULL},
    {28, I32("[18446744073709551615,2,0]", 0, 0), 0, 0, BAD("above the limit"), NULL},
    {28, I32("[9223372036854775807,2,0]", 0, 0), 0, 0, BAD("shape [9223372036854775807,2,0] overflows"), NULL},
    {29, I32("[18446744073709551616]", 0, 0), 0, 0, BAD("integer 18446744073709551616 is above the limit"), NULL},
    {30, I32("[-1]", 0, 0), 0, 0, BAD("expected an unsigned integer, found -1"), NULL},
    {31, I32("[-0]", 0, 0), 0, 0, BAD("expected an unsigned integer, found -0"), NULL},
    {32, I32("[2.0,2]", 0, 16), 0, 16, BAD("expected an unsigned integer, found 2.0"), NULL},
    {32, I32("[2e0,2]", 0, 16), 0, 16, BAD("expected an unsigned integer, found 2e0"), NULL},
    {33, I32("[02,2]", 0, 16), 0, 16, BAD("expected an unsigned integer, found 02"), NULL},
    {34, I32("[\"2\",2]", 0, 16), 0, 16, BAD("expected an unsigned integer, found a string"), NULL},
    {34, I32("[NaN]", 0, 16), 0, 16, BAD("expected an unsigned integer, found NaN"), NULL},
    {35, OFFSETS("[16,0]"), 0, 16, BAD("tensor 'test': data_offsets [16,0] end before they begin"), NULL},
    {36, OFFSETS("[4,20]"), 0, 20, BAD("tensor 'test': hole at byte 0: no tensor covers bytes 0 to 4"), NULL},
    {37, OFFSETS("[-16,0]"), 0, 16, BAD("data_offsets: header byte 53: expected an unsigned integer, found -16"), NULL},
    {38, OFFSETS("[0]"), 0, 16, BAD("expected a second offset, found ']'"), NULL},
    {38, OFFSETS("[0,16,16]"), 0, 16, BAD("expected ']' after two offsets, found ','"), NULL},
    {38, OFFSETS("null"), 0, 16, BAD("expected an array of two offsets, found null"), NULL},
    {38, OFFSETS("[]"), 0, 16, BAD("expected an unsigned integer, found ']'"), NULL},
    {39, "{\"test\":{\"shape\":[2,2],\"data_offsets\":[0,16]}}", 0, 16, BAD("tensor 'test': field 'dtype' is missing"), NULL},
    {39, "{\"test\":{\"dtype\":\"I32\",\"data_offsets\":[0,16]}}", 0, 16, BAD("tensor 'test': field 'shape' is missing"), NULL},
    {39, "{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2]}}", 0, 16, BAD("tensor 'test': field 'data_offsets' is missing"), NULL},
    {39, "{\"test\":{}}", 0, 0, BAD("tensor 'test': field 'dtype' is missing"), NULL},
    {40, EXTRA("1"), 0, 16, OK_(1), NULL},
    {40, EXTRA("[1,{\"a\":[true,false,null,-1.5e-3,\"s\"]},[],{}]"), 0, 16, OK_(1), NULL},
    {41, "{\"test\":{\"dtype\":\"I32\"," BODY "}}", 0, 16, BAD("tensor 'test': duplicate field 'dtype'"), NULL},
    {42, "{\"test\":{\"data_offsets\":[0,16],\"shape\":[2,2],\"dtype\":\"I32\"}}", 0, 16, OK_(1), NULL},
    {43, DTYPE("\"Q32\""), 0, 16, BAD("tensor 'test': dtype: unknown dtype 'Q32'"), NULL},
    {43, DTYPE("\"i32\""), 0, 16, BAD("unknown dtype 'i32'"), NULL},
    {43, DTYPE("15"), 0, 16, BAD("dtype: header byte 17: expected a string, found 15"), NULL},
    {44, DTYPE("{\"I32\":null}"), 0, 16, OK_(1), NULL},
    {44, DTYPE("{\"I32\":1}"), 0, 16, BAD("expected a dtype string, found 1"), NULL},
    {45, "{\"test\":[\"I32\",[2,2],[0,16]]}", 0, 16, OK_(1), NULL},
    {45, "{\"test\":[\"I32\",[2,2]]}", 0, 16, BAD("expected [dtype, shape, data_offsets], found ']'"), NULL},
    {45, "{\"test\":[\"I32\",[2,2],[0,16],1]}", 0, 16, BAD("expected [dtype, shape, data_offsets], found ','"), NULL},
    {46, OFFSETS("{\"0\":0,\"1\":16}"), 0, 16, BAD("expected an array of two offsets, found an object"), NULL},
    {47, "{\"test\":null}", 0, 16, BAD("expected a tensor description (object), found null"), NULL},
    {48, "{\"test\":{" BODY "},\"test\":{" BODY "}}", 0, 16, BAD("tensor 'test': duplicate name"), "duplicate names are refused"},
    {49, "{\"test\":{" BODY "},\"test\":" T("I32", "[2,2]", 16, 32) "}", 0, 32, BAD("tensor 'test': duplicate name"), NULL},
    {50, "{\"test\":{" BODY "},\"\\u0074est\":{" BODY "}}", 0, 16, BAD("tensor 'test': duplicate name"), "duplicate names are refused"},
    {51, "{\"a\":{" BODY "},\"b\":{" BODY "},\"c\":{" BODY "}}", 0, 16, BAD("tensor 'b': overlap at byte 0: tensor 'a' ends at byte 16"), NULL},
    {52, "{\"a\":{" BODY "},\"b\":" T("I32", "[2,2]", 8, 24) "}", 0, 24, BAD("tensor 'b': overlap at byte 8: tensor 'a' ends at byte 16"), NULL},
    {53, "{\"a\":{" BODY "},\"b\":" T("I32", "[2,2]", 20, 36) "}", 0, 36, BAD("tensor 'b': hole at byte 16: no tensor covers bytes 16 to 20"), NULL},
    {54, "{\"b\":" T("I32", "[2,2]", 16, 32) ",\"a\":{" BODY "}}", 0, 32, OK_(2), NULL},
    {55, "{\"a\":{" BODY "},\"e\":" T("F32", "[0]", 16, 16) ",\"b\":" T("I32", "[2,2]", 16, 32) "}", 0, 32, OK_(3), NULL},
    {55, "{\"a\":{" BODY "},\"b\":" T("I32", "[2,2]", 16, 32) ",\"e\":" T("F32", "[0]", 16, 16) "}", 0, 32, OK_(3), NULL},
    {56, "{\"a\":{" BODY "},\"e\":" T("F32", "[0]", 8, 8) "}", 0, 16, BAD("tensor 'e': overlap at byte 8"), NULL},
    {57, "{\"a\":" T("U8", "[1]", 0, 1) ",\"b\":" T("F32", "[1]", 1, 5) "}", 0, 5, OK_(2), NULL},
    {58, BASIC " ", 0, 16, OK_(1), NULL},
    {59, "{\"__metadata__\":{\"framework\":\"pt\"},\"test\":{" BODY "}}", 0, 16, OK_(1), NULL},
    {60, "{\"test\":{" BODY "},\"__metadata__\":{\"a\":\"b\"}}", 0, 16, OK_(1), NULL},
    {60, META("{}"), 0, 0, OK_(0), NULL},
    {60, META("null"), 0, 0, OK_(0), NULL},
    {61, META("[]"), 0, 0, BAD("__metadata__: header byte 16: expected an object of strings or null, found an array"), NULL},
    {61, META("{\"k\":1}"), 0, 0, BAD("__metadata__: key 'k': header byte 21: expected a string, found 1"), NULL},
    {61, META("{\"k\":null}"), 0, 0, BAD("key 'k': header byte 21: expected a string, found null"), NULL},
    {61, META("{\"k\":{}}"), 0, 0, BAD("key 'k': header byte 21: expected a string, found an object"), NULL},
    {62, META("{\"k\":\"a\",\"k\":\"b\"}"), 0, 0, OK_(0), NULL},
    {63, "{\"__metadata__\":{},\"__metadata__\":{}}", 0, 0, BAD("__metadata__: duplicate key"), NULL},
    {63, "{\"__metadata__\":null,\"\\u005f_metadata__\":null}", 0, 0, BAD("__metadata__: duplicate key"), NULL},
    {64, META(T("I32", "[2,2]", 0, 16)), 0, 16, BAD("__metadata__: key 'shape'"), NULL},
    {65, "{\"\":{" BODY "}}", 0, 16, OK_(1), NULL},
    {65, "{\"t\xc3\xa9\xf0\x9f\x98\x80\":{" BODY "}}", 0, 16, OK_(1), NULL},
    {65, "{\"t\\u0000x\":{" BODY "}}", 0, 16, BAD("tensor name 't...' contains a NUL character"), "names are C strings"},
    {66, "{\"te\nst\":{" BODY "}}", 0, 16, BAD("header byte 4: control character in a string"), NULL},
    {67, "{\"\\ud800\":{" BODY "}}", 0, 16, BAD("header byte 2: \\u escape is a lone surrogate"), NULL},
    {67, "{\"\\udc00\":{" BODY "}}", 0, 16, BAD("lone surrogate"), NULL},
    {67, "{\"\\ud83d\\u0041\":{" BODY "}}", 0, 16, BAD("lone surrogate"), NULL},
    {68, "{\"\\ud83d\\ude00\":{" BODY "}}", 0, 16, OK_(1), NULL},
    {69, "{\"\xed\xa0\x80\":{" BODY "}}", 0, 16, BAD("header byte 2: invalid UTF-8 (byte 0xed)"), NULL},
    {70, "{\"test\":{" BODY "},}", 0, 16, BAD("expected a string, found '}'"), NULL},
    {70, "{\"test\":{" BODY ",}}", 0, 16, BAD("expected a string, found '}'"), NULL},
    {70, I32("[2,2,]", 0, 16), 0, 16, BAD("expected an unsigned integer, found ']'"), NULL},
    {70, "{/* c */}", 0, 0, BAD("expected a string, found '/'"), NULL},
    {70, "{'test':{" BODY "}}", 0, 16, BAD("expected a string, found '''"), NULL},
    {71, "{\"test\":" T("F4", "[1,2]", 0, 1) "}", 0, 1, OK_(1), NULL},
    {72, "{\"test\":" T("F4", "[1,3]", 0, 2) "}", 0, 2, BAD("dtype F4 shape [1,3] is 12 bits, not a whole number of bytes"), NULL},
    {73, "{\"test\":" T("F4", "[1,2]", 0, 2) "}", 0, 2, BAD("dtype F4 shape [1,2] needs 1 bytes, data_offsets give 2"), NULL},
    {74, "{\"test\":" T("F4", "[]", 0, 1) "}", 0, 1, BAD("dtype F4 shape [] is 4 bits"), NULL},
    {74, "{\"test\":" T("F6_E2M3", "[2]", 0, 2) "}", 0, 2, BAD("dtype F6_E2M3 shape [2] is 12 bits"), NULL},
    {75, "{\"test\":" T("F6_E2M3", "[4]", 0, 3) "}", 0, 3, OK_(1), NULL},
    {76, "{\"test\":" T("F4", "[0]", 0, 0) "}", 0, 0, OK_(1), NULL},
    {79, EXTRA("1e999"), 0, 16, BAD("expected a number within the range of f64, found 1e999"), NULL},
    {79, EXTRA("0e999"), 0, 16, OK_(1), NULL},
    {80, "{\"test\":" T("C128", "[1]", 0, 16) "}", 0, 16, BAD("unknown dtype 'C128'"), NULL},
    {80, "{\"test\":" T("C32", "[1]", 0, 4) "}", 0, 4, BAD("unknown dtype 'C32'"), NULL},
};
/* clang-format on */

static void check_row(const row *r)
{
    ckpt_source src;
    put_st_n("t.safetensors", r->header, r->len != 0 ? r->len : strlen(r->header), r->data);
    expect_open(&src, in_scratch("t.safetensors"), r->want, r->message);
    if (r->want != CKPT_OK)
        return;
    ck_assert_msg(src.n_tensors == r->tensors, "row %d: %zu tensors", r->number, src.n_tensors);
    ckpt_source_close(&src);
}

START_TEST(header_row_has_expected_verdict)
{
    check_row(&rows[_i]);
}
END_TEST

/* Rows 1 to 9: files whose first eight bytes are the subject. */
static const struct {
    int number;
    const char *bytes;
    size_t n;
    const char *message;
} prefixes[] = {
    {1, "",                                                                0,  "empty file"                                                   },
    {2, "\0\0\0\0\0\0\0",                                                  7,  "file of 7 bytes is too short for the 8-byte header length"    },
    {3, "\0\0\0\0\0\0\0\0",                                                8,  "expected '{', found the end of the header"                    },
    {4, "\x3c\0\0\0\0\0\0\0",                                              8,  "header of 60 bytes ends past the end of the file (8 bytes)"   },
    {5, "\x3c\0\0\0\0\xff\xff\xff" BASIC "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 84,
     "header length 18446742974197923900 exceeds the limit of 100000000 bytes"                                                                },
    {6, "\0\xe1\xf5\x05\0\0\0\0{}",                                        10, "header of 100000000 bytes ends past the end"                  },
    {7, "\1\xe1\xf5\x05\0\0\0\0{}",                                        10,
     "header length 100000001 exceeds the limit of 100000000 bytes"                                                                           },
    {8, "\1\0\0\0\0\0\0\0\xff",                                            9,  "header byte 0: invalid UTF-8 (byte 0xff)"                     },
    {9, "\1\0\0\0\0\0\0\0{",                                               9,  "header byte 1: expected a string, found the end of the header"},
};

START_TEST(prefix_row_is_refused)
{
    put_file("t.safetensors", prefixes[_i].bytes, prefixes[_i].n);
    expect_refused(in_scratch("t.safetensors"), CKPT_E_FORMAT, prefixes[_i].message);
}
END_TEST

/* Row 77: payload bytes are not looked at. */
START_TEST(bool_byte_2_is_accepted)
{
    static const char header[] = "{\"test\":" T("BOOL", "[1]", 0, 1) "}";
    uint8_t bytes[8 + sizeof header];
    ckpt_source src;
    ckpt_put_u64(bytes, sizeof header - 1);
    memcpy(bytes + 8, header, sizeof header - 1);
    bytes[8 + sizeof header - 1] = 2;
    put_file("t.safetensors", bytes, sizeof bytes);
    expect_open(&src, in_scratch("t.safetensors"), CKPT_OK, NULL);
    ck_assert_int_eq(src.tensors[0].dtype, CKPT_BOOL);
    ckpt_source_close(&src);
}
END_TEST

/* Row 78, and the exact border that the reference has. */
static const struct {
    int depth;
    ckpt_status want;
} depths[] = {
    {120,    CKPT_OK      },
    {125,    CKPT_OK      },
    {126,    CKPT_E_FORMAT},
    {200,    CKPT_E_FORMAT},
    {100000, CKPT_E_FORMAT}
};

START_TEST(extra_field_nested_deep_has_expected_verdict)
{
    const char *open = _i % 2 == 0 ? "[" : "{\"a\":", *close = _i % 2 == 0 ? "]" : "}";
    ckpt_buf text = {0};
    ckpt_source src;
    ckpt_buf_puts(&text, "{\"test\":{" BODY ",\"x\":");
    for (int i = 0; i < depths[_i].depth; i++)
        ckpt_buf_puts(&text, open);
    ckpt_buf_puts(&text, "1");
    for (int i = 0; i < depths[_i].depth; i++)
        ckpt_buf_puts(&text, close);
    ckpt_buf_puts(&text, "}}");
    put_st_n("t.safetensors", (const char *)text.data, text.len, 16);
    expect_open(&src, in_scratch("t.safetensors"), depths[_i].want, "nested deeper than 127");
    if (depths[_i].want == CKPT_OK)
        ckpt_source_close(&src);
    ckpt_buf_release(&text);
}
END_TEST

/* Row 80. */
START_TEST(every_dtype_is_accepted)
{
    int seen = 0;
    for (int d = 0; d < CKPT_DTYPE_COUNT; d++) {
        const ckpt_dtype_info *info = ckpt_dtype_get((ckpt_dtype)d);
        char header[160];
        int n = info->bits == 6 ? 4 : 2;
        ckpt_source src;
        if (!info->safetensors)
            continue;
        snprintf(header, sizeof header,
                 "{\"test\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", info->name,
                 n, n * info->bits / 8);
        put_st("t.safetensors", header, (size_t)(n * info->bits / 8));
        expect_open(&src, in_scratch("t.safetensors"), CKPT_OK, NULL);
        ck_assert_int_eq(src.tensors[0].dtype, d);
        ckpt_source_close(&src);
        seen++;
    }
    ck_assert_int_eq(seen, 22);
}
END_TEST

START_TEST(table_covers_every_row_and_deviates_only_on_purpose)
{
    static const int elsewhere[] = {77, 78}, deviating[] = {27, 48, 50, 65};
    bool seen[81] = {false}, deviates[81] = {false}, expected[81] = {false};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        seen[rows[i].number] = true;
        deviates[rows[i].number] |= rows[i].deviation != NULL;
    }
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        seen[prefixes[i].number] = true;
    for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++)
        seen[elsewhere[i]] = true;
    for (size_t i = 0; i < sizeof deviating / sizeof *deviating; i++)
        expected[deviating[i]] = true;
    for (int i = 1; i <= 80; i++) {
        ck_assert_msg(seen[i], "row %d has no case", i);
        ck_assert_msg(deviates[i] == expected[i], "row %d deviates: %d", i, deviates[i]);
    }
}
END_TEST

Suite *suite_st_conformance(void)
{
    Suite *s = suite_create("st_conformance");
    TCase *tc = tcase_create("table");
    tcase_set_timeout(tc, 30);
    tcase_add_checked_fixture(tc, scratch_make, scratch_remove);
    tcase_add_loop_test(tc, header_row_has_expected_verdict, 0, (int)(sizeof rows / sizeof *rows));
    tcase_add_loop_test(tc, prefix_row_is_refused, 0, (int)(sizeof prefixes / sizeof *prefixes));
    tcase_add_test(tc, bool_byte_2_is_accepted);
    tcase_add_loop_test(tc, extra_field_nested_deep_has_expected_verdict, 0,
                        (int)(sizeof depths / sizeof *depths));
    tcase_add_test(tc, every_dtype_is_accepted);
    tcase_add_test(tc, table_covers_every_row_and_deviates_only_on_purpose);
    suite_add_tcase(s, tc);
    return s;
}
