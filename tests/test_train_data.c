/* Token data: files that Megatron-Core's IndexedDatasetBuilder wrote (tests/data/indexed, by
 * tests/peers/gen_train.py), samples as its helpers.build_sample_idx packs them, order, documents,
 * and hostile indexes. */
#define CKPT_REAL 64
#include "engine_test.h"

#include <unistd.h>

#include "io.h"
#include "le.h"
#include "train/data.h"

Suite *suite_train_data(void);

static char dir[64];

static void open_golden(void)
{
    golden_set_up("tests/data/train.safetensors");
    memcpy(dir, "/tmp/ckpt-data.XXXXXX", sizeof "/tmp/ckpt-data.XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
}

static void close_golden(void)
{
    golden_tear_down();
    ckpt_remove_tree(dir);
}

static const char *put_file(const char *name, const void *p, size_t n)
{
    const char *path = ckpt_arena_printf(&memory, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(p, 1, n, f), n);
    fclose(f);
    return path;
}

static ckpt_data *open_one(const char *path, const ckpt_data_opts *o)
{
    ckpt_data *d;
    OK(ckpt_data_open(&d, &path, 1, o, &error));
    return d;
}

static void refuse(const char *path, const ckpt_data_opts *o, ckpt_status code, const char *message)
{
    ckpt_data *d;
    ck_assert_int_eq(ckpt_data_open(&d, &path, 1, o, &error), code);
    ck_assert_ptr_null(d);
    ck_assert_msg(strstr(error.text, message) != NULL, "'%s' is not in '%s'", message, error.text);
}

/* ---- indexed ---------------------------------------------------------------------------------- */

#define TOKENS 60
static const char *const prefixes[] = {"uint8", "uint16", "int32", "int64"};

START_TEST(indexed_tokens_are_megatrons)
{
    const double *want = golden_array("data/tokens", TOKENS);
    const ckpt_data_opts o = {.seq_len = 7, .vocab = 250};
    static const char *const ends[] = {"", ".idx", ".bin"};
    for (int k = 0; k < 3; k++) {
        ckpt_data *d = open_one(
            ckpt_arena_printf(&memory, "tests/data/indexed/%s%s", prefixes[_i], ends[k]), &o);
        ck_assert_int_eq(ckpt_data_kind_of(d), CKPT_DATA_INDEXED);
        ck_assert_int_eq(ckpt_data_tokens(d), TOKENS);
        int32_t got[TOKENS];
        for (int64_t at = 0; at <= TOKENS; at++)
            for (int64_t n = 0; n <= TOKENS - at; n += 1 + n / 3) {
                OK(ckpt_data_read(d, at, n, got, &error));
                for (int64_t i = 0; i < n; i++)
                    ck_assert_int_eq(got[i], (int32_t)want[at + i]);
            }
        ck_assert_int_eq(ckpt_data_read(d, TOKENS, 1, got, &error), CKPT_E_USAGE);
        ckpt_data_close(d);
    }
}
END_TEST

START_TEST(indexed_samples_begin_where_megatron_packs_them)
{
    const double *start = golden_array("pack/start", 9),
                 *tokens = golden_array("data/tokens", TOKENS);
    const ckpt_data_opts o = {.seq_len = 7};
    ckpt_data *d = open_one("tests/data/indexed/uint16", &o);
    ck_assert_int_eq(ckpt_data_epoch_samples(d), 8);
    int32_t ids[7], labels[7];
    int64_t cu[8], n_seq;
    for (int64_t i = 0; i < 8; i++) {
        ck_assert_int_eq(ckpt_data_start(d, i), (int64_t)start[i]);
        OK(ckpt_data_batch(d, i, 1, 1, ids, labels, cu, &n_seq, &error));
        ck_assert(n_seq == 1 && cu[0] == 0 && cu[1] == 7);
        for (int k = 0; k < 7; k++) {
            ck_assert_int_eq(ids[k], (int32_t)tokens[(int64_t)start[i] + k]);
            ck_assert_int_eq(labels[k], (int32_t)tokens[(int64_t)start[i] + k + 1]);
        }
    }
    ck_assert_int_eq(ckpt_data_start(d, 8), 0); /* the next epoch */
    ckpt_data_close(d);
}
END_TEST

START_TEST(indexed_documents_split_sequences)
{
    const double *docs = golden_array("data/documents", 6);
    const ckpt_data_opts o = {.seq_len = 59, .split = true, .eod = -1};
    ckpt_data *d = open_one("tests/data/indexed/uint8", &o);
    int32_t ids[59], labels[59];
    int64_t cu[60], n_seq;
    OK(ckpt_data_batch(d, 0, 1, 1, ids, labels, cu, &n_seq, &error));
    /* documents of 6, 13, 0, 10 and 31 tokens */
    static const int64_t want[] = {0, 6, 19, 29, 59};
    ck_assert_int_eq(n_seq, 4);
    for (int i = 0; i <= 4; i++)
        ck_assert_int_eq(cu[i], want[i]);
    ck_assert(docs[1] == 6 && docs[2] == 19 && docs[3] == 19 && docs[4] == 29);
    for (int i = 0; i < 59; i++)
        ck_assert((labels[i] == -1) == (i == 5 || i == 18 || i == 28));
    ckpt_data_close(d);
}
END_TEST

typedef struct edit {
    const char *what;
    size_t at, n; /* bytes of the index to replace; at = SIZE_MAX: cut to n */
    uint8_t with[8];
    ckpt_status code;
    const char *message;
} edit;

/* The index of uint16: 34 bytes, lengths of 6 sequences at 34 (5 1 13 2 0 8 31: seven), pointers at 62,
 * documents at 118: 0 2 3 3 6 7. */
static const edit edits[] = {
    {"empty",             SIZE_MAX, 0,   {0},          CKPT_E_FORMAT,      "0 bytes, an index has at least 34"               },
    {"header only",       SIZE_MAX, 34,  {0},          CKPT_E_FORMAT,      "34 bytes do not hold 7 sequences and 6"          },
    {"truncated",         SIZE_MAX, 165, {0},          CKPT_E_FORMAT,      "165 bytes do not hold"                           },
    {"magic",             0,        1,   {'m'},        CKPT_E_FORMAT,      "does not begin with MMIDIDX"                     },
    {"version",           9,        1,   {2},          CKPT_E_UNSUPPORTED, "version 2 of the index, expected 1"              },
    {"type 0",            17,       1,   {0},          CKPT_E_FORMAT,      "token type 0, expected 1 to 8"                   },
    {"type 9",            17,       1,   {9},          CKPT_E_FORMAT,      "token type 9, expected 1 to 8"                   },
    {"float",             17,       1,   {6},          CKPT_E_UNSUPPORTED, "float64: these are no tokens"                    },
    {"wide",              17,       1,   {5},          CKPT_E_FORMAT,      "uint16.bin has 120 bytes"                        },
    {"2^63 sequences",    25,       1,   {0x80},       CKPT_E_FORMAT,      "do not hold 9223372036854775815 sequences"       },
    {"product wraps",
     18,                            8,
     {0xAB, 0xAA, 0xAA, 0xAA, 0xAA, 0xAA, 0xAA, 0x0A},
     CKPT_E_FORMAT,                                                        "do not hold"                                     },
    {"documents",
     26,                            8,
     {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF},
     CKPT_E_FORMAT,                                                        "do not hold 7 sequences and 18446744073709551615"},
    {"negative length",   37,       1,   {0x80},       CKPT_E_FORMAT,      "sequence 0 has length -2147483643"               },
    {"long sequence",     61,       1,   {0x7F},       CKPT_E_FORMAT,      "sequence 6: 2130706463 tokens of 2 bytes at"     },
    {"negative pointer",  69,       1,   {0x80},       CKPT_E_FORMAT,      "at offset -9223372036854775808"                  },
    {"far pointer",       117,      1,   {0x7F},       CKPT_E_FORMAT,      "sequence 6: 31 tokens of 2 bytes at offset"      },
    {"first document",    118,      1,   {1},          CKPT_E_FORMAT,      "document end 0 is sequence 1, expected 0 to 0"   },
    {"document back",     142,      1,   {1},          CKPT_E_FORMAT,      "document end 3 is sequence 1, expected 3 to 7"   },
    {"document beyond",
     158,                           1,
     {8},
     CKPT_E_FORMAT,                                                        "document end 5 is sequence 8, expected 6 to 7"   },
    {"document negative", 133,      1,   {0x80},       CKPT_E_FORMAT,      "document end 1 is sequence -"                    },
};

static uint8_t *read_whole(const char *path, size_t *n)
{
    uint8_t *p = ckpt_arena_alloc(&memory, 4096);
    FILE *f = fopen(path, "rb");
    ck_assert_ptr_nonnull(f);
    *n = fread(p, 1, 4096, f);
    fclose(f);
    return p;
}

START_TEST(index_that_lies_is_refused)
{
    const edit *e = &edits[_i];
    const ckpt_data_opts o = {.seq_len = 7};
    size_t n, n_bin;
    uint8_t *idx = read_whole("tests/data/indexed/uint16.idx", &n);
    const uint8_t *bin = read_whole("tests/data/indexed/uint16.bin", &n_bin);
    ck_assert_uint_eq(n, 166);
    if (e->at == SIZE_MAX)
        n = e->n;
    else
        memcpy(idx + e->at, e->with, e->n);
    put_file("uint16.bin", bin, n_bin);
    refuse(put_file("uint16.idx", idx, n), &o, e->code, e->message);
    ck_assert_msg(strstr(error.text, "uint16.idx: ") != NULL, "%s", error.text);
}
END_TEST

/* Every byte of the index set to several values: an error or tokens, never a fault (sanitizers). */
START_TEST(index_any_byte_changed_is_an_error_or_readable)
{
    size_t n, n_bin;
    uint8_t *idx = read_whole("tests/data/indexed/uint16.idx", &n);
    const uint8_t *bin = read_whole("tests/data/indexed/uint16.bin", &n_bin);
    static const uint8_t values[] = {0, 1, 2, 0x7F, 0x80, 0xFF};
    const ckpt_data_opts o = {.seq_len = 7, .split = true, .eod = -1};
    int opened = 0, refused = 0;
    put_file("x.bin", bin, n_bin);
    for (size_t at = 0; at < n; at++)
        for (size_t v = 0; v < sizeof values; v++) {
            const uint8_t kept = idx[at];
            idx[at] = values[v];
            const char *path = put_file("x.idx", idx, n);
            idx[at] = kept;
            ckpt_data *d;
            if (ckpt_data_open(&d, &path, 1, &o, &error) != CKPT_OK) {
                ck_assert_ptr_null(d);
                refused++;
                continue;
            }
            int32_t ids[14], labels[14];
            int64_t cu[15], n_seq;
            for (int64_t i = 0; i < ckpt_data_epoch_samples(d) && i < 40; i++) {
                const ckpt_status status =
                    ckpt_data_batch(d, i, 1, 2, ids, labels, cu, &n_seq, &error);
                if (status != CKPT_OK) /* read as signed, half of the tokens are negative */
                    ck_assert(status == CKPT_E_FORMAT && idx[17] == 8 && at == 17);
                else
                    ck_assert(n_seq >= 2 && cu[n_seq] == 14);
            }
            ckpt_data_close(d);
            opened++;
        }
    ck_assert_msg(opened > 50 && refused > 300, "%d opened, %d refused", opened, refused);
}
END_TEST

/* ---- raw -------------------------------------------------------------------------------------- */

START_TEST(raw_kinds_and_several_files_make_one_stream)
{
    const uint8_t bytes[] = {1, 2, 3, 4, 5, 250};
    uint8_t wide[24];
    for (uint32_t i = 0; i < 6; i++)
        ckpt_put_u32(wide + 4 * i, i == 5 ? 70000 : i);
    const char *a = put_file("a", bytes, sizeof bytes), *w = put_file("w.bin", wide, sizeof wide);
    const char *both[] = {a, a, a};
    ckpt_data_opts o = {.seq_len = 2};
    ckpt_data *d;
    int32_t got[18];
    OK(ckpt_data_open(&d, both, 3, &o, &error));
    ck_assert_int_eq(ckpt_data_tokens(d), 18);
    OK(ckpt_data_read(d, 4, 9, got, &error));
    static const int32_t want[] = {5, 250, 1, 2, 3, 4, 5, 250, 1};
    ck_assert(memcmp(got, want, sizeof want) == 0);
    ckpt_data_close(d);
    o.kind = CKPT_DATA_U32;
    d = open_one(w, &o);
    OK(ckpt_data_read(d, 4, 2, got, &error));
    ck_assert(got[0] == 4 && got[1] == 70000);
    ckpt_data_close(d);
    o.kind = CKPT_DATA_U16;
    d = open_one(w, &o);
    ck_assert_int_eq(ckpt_data_tokens(d), 12);
    OK(ckpt_data_read(d, 10, 2, got, &error));
    ck_assert(got[0] == 70000 % 65536 && got[1] == 1);
    ckpt_data_close(d);
}
END_TEST

START_TEST(raw_bad_files_and_options_are_refused)
{
    const uint8_t bytes[] = {1, 2, 3, 0xFF, 0xFF, 0xFF, 0xFF};
    const char *odd = put_file("odd.bin", bytes, 7), *four = put_file("four", bytes + 3, 4);
    ckpt_data_opts o = {.seq_len = 2};
    refuse(odd, &o, CKPT_E_USAGE, "say whether its tokens are u16 or u32");
    o.kind = CKPT_DATA_U16;
    refuse(odd, &o, CKPT_E_FORMAT, "7 bytes are no whole number of 2-byte tokens");
    o.kind = CKPT_DATA_BYTES;
    o.seq_len = 7;
    refuse(odd, &o, CKPT_E_USAGE, "7 tokens in all, but one sample of sequence length 7 takes 8");
    o.seq_len = 0;
    refuse(odd, &o, CKPT_E_USAGE, "sequences of 0 tokens");
    o.seq_len = 2;
    refuse("no/such/file", &o, CKPT_E_IO, "no/such/file");
    refuse(dir, &o, CKPT_E_IO, dir);
    const int64_t starts[] = {0, 5};
    o.starts = starts;
    o.n_starts = 2;
    refuse(odd, &o, CKPT_E_USAGE, "start 1 is 5, expected 0 to 4");
    ckpt_data *d;
    o = (ckpt_data_opts){.seq_len = 1};
    ck_assert_int_eq(ckpt_data_open(&d, NULL, 0, &o, &error), CKPT_E_USAGE);
    const char *mixed[] = {four, "tests/data/indexed/uint8"};
    ck_assert_int_eq(ckpt_data_open(&d, mixed, 2, &o, &error), CKPT_E_USAGE);
    ck_assert_msg(strstr(error.text, "must be of one kind") != NULL, "%s", error.text);
    int32_t got[4];
    o.kind = CKPT_DATA_BYTES;
    o.vocab = 255;
    d = open_one(four, &o);
    ck_assert_int_eq(ckpt_data_read(d, 1, 1, got, &error), CKPT_E_FORMAT);
    ck_assert_msg(strstr(error.text, "four: token 1 is 255, expected 0 to less than 255") != NULL,
                  "%s", error.text);
    ckpt_data_close(d);
}
END_TEST

START_TEST(raw_truncated_while_open_is_an_io_error)
{
    const uint8_t bytes[64] = {0};
    const char *path = put_file("shrinks", bytes, sizeof bytes);
    const ckpt_data_opts o = {.seq_len = 4};
    ckpt_data *d = open_one(path, &o);
    ck_assert_int_eq(truncate(path, 10), 0);
    int32_t got[32];
    ck_assert_int_eq(ckpt_data_read(d, 0, 32, got, &error), CKPT_E_IO);
    ck_assert_msg(strstr(error.text, "shrinks") != NULL, "%s", error.text);
    ckpt_data_close(d);
}
END_TEST

/* ---- order ------------------------------------------------------------------------------------ */

START_TEST(order_every_sample_once_an_epoch_whatever_the_ranks)
{
    uint8_t bytes[1001];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i % 251);
    const char *path = put_file("order", bytes, sizeof bytes);
    const ckpt_data_opts o = {.seq_len = 10, .seed = 5, .shuffle = true};
    ckpt_data *d = open_one(path, &o);
    ck_assert_int_eq(ckpt_data_epoch_samples(d), 100);
    int seen[2][100] = {{0}}, moved = 0, differ = 0;
    for (int64_t i = 0; i < 200; i++) {
        const int64_t at = ckpt_data_start(d, i);
        ck_assert(at % 10 == 0 && at / 10 < 100);
        seen[i / 100][at / 10]++;
        moved += at / 10 != i % 100;
        differ += i >= 100 && at != ckpt_data_start(d, i - 100);
    }
    for (int i = 0; i < 100; i++)
        ck_assert(seen[0][i] == 1 && seen[1][i] == 1);
    ck_assert(moved > 180 && differ > 85);
    /* Rank r of 3 takes every third: the same samples as one process. */
    int32_t all[60], labels[60], mine[20], mine_labels[20];
    int64_t cu[61], n_seq;
    OK(ckpt_data_batch(d, 97, 1, 6, all, labels, cu, &n_seq, &error));
    ck_assert_int_eq(n_seq, 6);
    for (int64_t r = 0; r < 3; r++) {
        OK(ckpt_data_batch(d, 97 + r, 3, 2, mine, mine_labels, cu, &n_seq, &error));
        for (int k = 0; k < 2; k++)
            ck_assert(memcmp(mine + 10 * k, all + 10 * (r + 3 * k), 40) == 0 &&
                      memcmp(mine_labels + 10 * k, labels + 10 * (r + 3 * k), 40) == 0);
    }
    ckpt_data_close(d);
}
END_TEST

START_TEST(order_starts_and_inner_labels)
{
    const uint8_t bytes[] = {9, 8, 7, 6, 5};
    const char *path = put_file("starts", bytes, sizeof bytes);
    const int64_t starts[] = {2, 0};
    const ckpt_data_opts o = {
        .seq_len = 3, .inner_labels = true, .starts = starts, .n_starts = 2, .eod = -1};
    ckpt_data *d = open_one(path, &o);
    int32_t ids[9], labels[9];
    int64_t cu[10], n_seq;
    OK(ckpt_data_batch(d, 0, 1, 3, ids, labels, cu, &n_seq, &error));
    static const int32_t want[] = {7, 6, 5, 9, 8, 7, 7, 6, 5};
    static const int32_t want_labels[] = {6, 5, -1, 8, 7, -1, 6, 5, -1};
    ck_assert(memcmp(ids, want, sizeof want) == 0);
    ck_assert(memcmp(labels, want_labels, sizeof want_labels) == 0);
    ckpt_data_close(d);
}
END_TEST

START_TEST(order_end_of_document_tokens_and_files_split)
{
    const uint8_t bytes[] = {5, 0, 6, 7, 0, 0};
    const char *path = put_file("eod", bytes, sizeof bytes);
    const char *twice[] = {path, path};
    const ckpt_data_opts o = {.seq_len = 11, .split = true, .eod = 0};
    ckpt_data *d;
    OK(ckpt_data_open(&d, twice, 2, &o, &error));
    int32_t ids[11], labels[11];
    int64_t cu[12], n_seq;
    OK(ckpt_data_batch(d, 0, 1, 1, ids, labels, cu, &n_seq, &error));
    static const int64_t want[] = {0, 2, 5, 6, 8, 11};
    ck_assert_int_eq(n_seq, 5);
    ck_assert(memcmp(cu, want, sizeof want) == 0);
    static const int32_t want_labels[] = {0, -1, 7, 0, -1, -1, 0, -1, 7, 0, -1};
    ck_assert(memcmp(labels, want_labels, sizeof want_labels) == 0);
    ckpt_data_close(d);
}
END_TEST

START_TEST(order_digest_tells_sources_and_orders_apart)
{
    const uint8_t bytes[] = {5, 0, 6, 7, 0, 0};
    const char *path = put_file("digest", bytes, sizeof bytes);
    ckpt_data_opts o = {.seq_len = 2, .seed = 1};
    uint8_t h[6][32];
    ckpt_data *d = open_one(path, &o);
    OK(ckpt_data_digest(d, h[0], &error));
    OK(ckpt_data_digest(d, h[1], &error));
    ck_assert(memcmp(h[0], h[1], 32) == 0);
    ckpt_data_close(d);
    for (int i = 1; i < 6; i++) {
        o = (ckpt_data_opts){.seq_len = i == 1 ? 3 : 2,
                             .seed = i == 2 ? 2 : 1,
                             .shuffle = i == 3,
                             .kind = i == 4 ? CKPT_DATA_U16 : CKPT_DATA_BYTES};
        d = open_one(i == 5 ? "tests/data/indexed/uint8.bin" : path, &o);
        OK(ckpt_data_digest(d, h[i], &error));
        ckpt_data_close(d);
        for (int j = 0; j < i; j++)
            ck_assert_msg(memcmp(h[i], h[j], 32) != 0, "%d and %d", i, j);
    }
}
END_TEST

Suite *suite_train_data(void)
{
    Suite *s = suite_create("train_data");
    TCase *t = tcase_create("train_data");
    tcase_add_checked_fixture(t, open_golden, close_golden);
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, indexed_tokens_are_megatrons, 0, 4);
    tcase_add_test(t, indexed_samples_begin_where_megatron_packs_them);
    tcase_add_test(t, indexed_documents_split_sequences);
    tcase_add_loop_test(t, index_that_lies_is_refused, 0, (int)(sizeof edits / sizeof *edits));
    tcase_add_test(t, index_any_byte_changed_is_an_error_or_readable);
    tcase_add_test(t, raw_kinds_and_several_files_make_one_stream);
    tcase_add_test(t, raw_bad_files_and_options_are_refused);
    tcase_add_test(t, raw_truncated_while_open_is_an_io_error);
    tcase_add_test(t, order_every_sample_once_an_epoch_whatever_the_ranks);
    tcase_add_test(t, order_starts_and_inner_labels);
    tcase_add_test(t, order_end_of_document_tokens_and_files_split);
    tcase_add_test(t, order_digest_tells_sources_and_orders_apart);
    suite_add_tcase(s, t);
    return s;
}
