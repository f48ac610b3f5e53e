/* HDF5, writing: the filters against libhdf5's own, and what is written read back. */
#include "hdf5_test.h"

Suite *suite_hdf5_write(void);

/* ---- filters ----------------------------------------------------------------------------------- */

static const size_t lengths[] = {1, 2, 3, 4, 7, 8, 719, 720, 721, 722, 723, 1440, 4097, 100000};

/* One chunk of bytes written by libhdf5 through its own filters, as it lies in the file. */
static size_t library_chunk(const uint8_t *data, size_t n, size_t elem, bool shuffle, int level,
                            uint8_t *out, uint32_t *mask)
{
    hsize_t dim = n / elem, size = 0, zero = 0;
    hid_t f = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t p = H5Pcreate(H5P_DATASET_CREATE), s = H5Screate_simple(1, &dim, NULL);
    hid_t type = elem == 4 ? H5T_STD_U32LE : H5T_STD_U8LE;
    H5Pset_chunk(p, 1, &dim);
    if (shuffle)
        H5Pset_shuffle(p);
    if (level > 0)
        H5Pset_deflate(p, (unsigned)level);
    H5Pset_fletcher32(p);
    hid_t d = H5Dcreate2(f, "d", type, s, H5P_DEFAULT, p, H5P_DEFAULT);
    ck_assert_int_ge(H5Dwrite(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    H5Fflush(f, H5F_SCOPE_LOCAL);
    ck_assert_int_ge(H5Dget_chunk_storage_size(d, &zero, &size), 0);
    ck_assert_int_ge(H5Dread_chunk(d, H5P_DEFAULT, &zero, mask, out), 0);
    H5Dclose(d);
    H5Sclose(s);
    H5Pclose(p);
    H5Fclose(f);
    return (size_t)size;
}

static ckpt_hdf5_pipeline pipeline(bool shuffle, int level, size_t elem)
{
    ckpt_hdf5_pipeline p = {0};
    if (shuffle) {
        p.filter[p.n].kind = CKPT_HDF5_SHUFFLE;
        p.filter[p.n++].value = (uint32_t)elem;
    }
    if (level > 0) {
        p.filter[p.n].kind = CKPT_HDF5_DEFLATE;
        p.filter[p.n++].value = (uint32_t)level;
    }
    p.filter[p.n++].kind = CKPT_HDF5_FLETCHER32;
    return p;
}

START_TEST(filters_equal_those_of_the_library)
{
    size_t elem = lengths[_i] % 4 == 0 ? 4 : 1, n = lengths[_i];
    for (int kind = 0; kind < 4; kind++) {
        bool shuffle = kind & 1;
        int level = kind & 2 ? 6 : 0;
        uint8_t *data = malloc(n), *back = malloc(n), *theirs = malloc(2 * n + 64);
        uint8_t *a = malloc(n + 64), *b = malloc(n + 64);
        ckpt_encoded ours;
        uint32_t mask = 0;
        fill(data, n, 7);
        for (size_t i = 0; i < n; i++) /* compressible, if there is enough of it */
            data[i] &= 3;
        ckpt_hdf5_pipeline p = pipeline(shuffle, level, elem);
        ck_assert_int_eq(ckpt_hdf5_encode(&p, data, n, a, b, &ours, NULL), CKPT_OK);
        size_t stored = library_chunk(data, n, elem, shuffle, level, theirs, &mask);
        if (stored < n + 4 || level == 0) {
            ck_assert_uint_eq(ours.len, stored);
            ck_assert_uint_eq(ours.mask, mask);
            ck_assert_mem_eq(ours.data, theirs, stored);
        } else { /* the library lets deflate grow a chunk a little */
            ck_assert_uint_eq(ours.len, n + 4);
            ck_assert_uint_eq(ours.mask, shuffle ? 2 : 1);
        }
        ck_assert_int_eq(ckpt_hdf5_decode(&p, mask, theirs, stored, back, n, NULL), CKPT_OK);
        ck_assert_mem_eq(back, data, n);
        for (size_t i = 0; i < stored; i += 1 + stored / 50) { /* any damaged byte is noticed */
            theirs[i] ^= 0x10;
            ck_assert_int_eq(ckpt_hdf5_decode(&p, mask, theirs, stored, back, n, NULL),
                             CKPT_E_FORMAT);
            theirs[i] ^= 0x10;
        }
        free(data);
        free(back);
        free(theirs);
        free(a);
        free(b);
    }
}
END_TEST

START_TEST(decode_of_another_length_is_refused)
{
    uint8_t data[1000] = {0}, a[1100], b[1100], out[1100];
    ckpt_err err = {0};
    ckpt_encoded e;
    ckpt_hdf5_pipeline p = pipeline(true, 6, 4);
    ck_assert_int_eq(ckpt_hdf5_encode(&p, data, 1000, a, b, &e, &err), CKPT_OK);
    ck_assert_uint_lt(e.len, 100);
    ck_assert_int_eq(ckpt_hdf5_decode(&p, 0, e.data, e.len, out, 900, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "holds more than"));
    ck_assert_int_eq(ckpt_hdf5_decode(&p, 0, e.data, e.len, out, 1001, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "decodes to 1000 bytes, expected 1001"));
    ck_assert_int_eq(ckpt_hdf5_decode(&p, 0, e.data, 3, out, 1000, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "too short"));
}
END_TEST

/* ---- writing ------------------------------------------------------------------------------------ */

typedef struct shape_row {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    int64_t dims[4];
} shape_row;

static const shape_row shapes[] = {
    {"scalar",    CKPT_F32,     0, {0}             },
    {"empty",     CKPT_F32,     2, {0, 3}          },
    {"one",       CKPT_BF16,    1, {1}             },
    {"chunk",     CKPT_U8,      1, {1 << 20}       },
    {"chunk+1",   CKPT_U8,      1, {(1 << 20) + 1} },
    {"chunk-1",   CKPT_U8,      1, {(1 << 20) - 1} },
    {"wide rows", CKPT_F32,     2, {3, 600000}     },
    {"odd rows",  CKPT_F16,     2, {1031, 1021}    },
    {"deep",      CKPT_F32,     4, {3, 2, 700, 301}},
    {"a/b/c",     CKPT_I64,     2, {5, 7}          },
    {"bool",      CKPT_BOOL,    1, {100}           },
    {"c64",       CKPT_C64,     1, {10}            },
    {"c32",       CKPT_C32,     1, {10}            },
    {"c128",      CKPT_C128,    2, {2, 3}          },
    {"f8",        CKPT_F8_E8M0, 2, {9, 11}         },
    {"f4",        CKPT_F4,      2, {9, 10}         },
    {"f6",        CKPT_F6_E2M3, 2, {3, 4}          },
    {"\xc3\xa9",  CKPT_U16,     1, {3}             },
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct target {
    ckpt_out out;
    ckpt_sink sink;
    ckpt_arena arena;
    uint8_t *data[N_SHAPES];
    size_t bytes[N_SHAPES];
} target;

static void plan_all(target *t, int level)
{
    ckpt_err err = {0};
    *t = (target){
        .out = {.n_tensors = N_SHAPES, .world = 1, .deflate = level, .iteration = 42}
    };
    t->out.tensors = ckpt_arena_array(&t->arena, N_SHAPES, sizeof *t->out.tensors);
    for (size_t i = 0; i < N_SHAPES; i++) {
        const shape_row *s = &shapes[i];
        int64_t numel;
        uint64_t bytes;
        ckpt_out_chunk *c = ckpt_arena_alloc(&t->arena, sizeof *c);
        *c =
            (ckpt_out_chunk){.lo = ckpt_arena_array(&t->arena, 4, sizeof(int64_t)), .len = s->dims};
        t->out.tensors[i] = (ckpt_out_tensor){.name = s->name,
                                              .dims = s->dims,
                                              .chunks = c,
                                              .n_chunks = 1,
                                              .dtype = s->dtype,
                                              .rank = s->rank};
        ck_assert(ckpt_numel(s->rank, s->dims, &numel));
        ck_assert(ckpt_dtype_bytes(s->dtype, numel, &bytes));
        t->bytes[i] = (size_t)bytes;
        t->data[i] = ckpt_arena_alloc(&t->arena, t->bytes[i] + 1);
        fill(t->data[i], t->bytes[i], i);
        for (size_t k = 0; k < t->bytes[i]; k++)
            t->data[i][k] &= s->dtype == CKPT_BOOL ? 1 : 15;
    }
    ck_assert_msg(ckpt_hdf5.layout(&t->out, &t->sink, &err) == CKPT_OK, "%s", err.text);
}

/* Write all parts as the executor does, counting the bytes of each tensor. */
static void write_all(target *t)
{
    const ckpt_serial *calls = t->sink.serial;
    ckpt_err err = {0};
    uint64_t at[N_SHAPES] = {0};
    size_t part_max, room_max;
    uint8_t sha[N_SHAPES * CKPT_SHA256_LEN] = {0};
    calls->sizes(&t->sink, &part_max, &room_max);
    ck_assert_uint_le(part_max, (size_t)1 << 20);
    uint8_t *room = malloc(room_max);
    ck_assert_msg(calls->open(&t->sink, path, &err) == CKPT_OK, "%s", err.text);
    for (uint64_t i = 0; i < calls->n_parts(&t->sink); i++) {
        ckpt_part part;
        ckpt_encoded e;
        calls->part(&t->sink, i, &part);
        ck_assert_uint_lt(part.tensor, N_SHAPES);
        ck_assert_uint_le(part.len, part_max);
        ck_assert_uint_gt(part.len, 0);
        ck_assert_uint_eq(part.lo, at[part.tensor]); /* in order, touching */
        at[part.tensor] += part.len;
        ck_assert_int_eq(calls->encode(&t->sink, i, t->data[part.tensor] + part.lo, room, &e, &err),
                         CKPT_OK);
        ck_assert_msg(calls->put(&t->sink, i, &e, &err) == CKPT_OK, "%s", err.text);
    }
    for (size_t i = 0; i < N_SHAPES; i++)
        ck_assert_uint_eq(at[i], t->bytes[i]);
    ck_assert_int_eq(calls->finish(&t->sink, sha, &err), CKPT_OK);
    ck_assert_int_eq(calls->seal(&t->sink, path, "00ff", "{\"x\":1}", 7, &err), CKPT_OK);
    free(room);
}

START_TEST(written_file_reads_back_equal)
{
    target t;
    ckpt_source src;
    plan_all(&t, _i == 0 ? 0 : 1 + 4 * _i);
    write_all(&t);
    open_ok(&src);
    ck_assert_int_eq(src.iteration, 42);
    ck_assert_uint_eq(src.manifest_len, 7);
    ck_assert_str_eq(src.manifest, "{\"x\":1}");
    ck_assert_uint_eq(ckpt_source_n_real(&src), 1);
    ck_assert_uint_eq(src.n_tensors, N_SHAPES);
    for (size_t i = 0; i < N_SHAPES; i++) {
        int64_t at = ckpt_source_find(&src, shapes[i].name);
        ck_assert_msg(at >= 0, "%s", shapes[i].name);
        const ckpt_tensor *x = &src.tensors[at];
        ck_assert_int_eq(x->dtype, shapes[i].dtype);
        ck_assert_int_eq(x->rank, shapes[i].rank);
        for (int a = 0; a < x->rank; a++)
            ck_assert_int_eq(x->dims[a], shapes[i].dims[a]);
        if (t.bytes[i] == 0)
            continue;
        ck_assert_uint_eq(x->n_chunks, 1);
        uint8_t *got = malloc(t.bytes[i]);
        ck_assert_int_eq(
            ckpt_source_read(&src, x->chunks[0].file, got, t.bytes[i], x->chunks[0].offset, NULL),
            CKPT_OK);
        ck_assert_msg(memcmp(got, t.data[i], t.bytes[i]) == 0, "%s", shapes[i].name);
        free(got);
    }
    ckpt_source_close(&src);
    ckpt_arena_free(&t.sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(given_up_file_can_be_made_again)
{
    target t;
    ckpt_err err = {0};
    plan_all(&t, 0);
    ck_assert_int_eq(t.sink.serial->open(&t.sink, path, &err), CKPT_OK);
    t.sink.serial->give_up(&t.sink);
    ck_assert_int_eq(t.sink.serial->open(&t.sink, path, &err), CKPT_E_IO); /* is there */
    t.sink.serial->give_up(&t.sink);
    ck_assert_int_eq(unlink(path), 0);
    write_all(&t);
    ckpt_arena_free(&t.sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

static const struct {
    const char *names[2], *message;
} bad_names[] = {
    {{"a", "a/b"},     "tensors 'a' and 'a/b'"      },
    {{"a/b/c", "a/b"}, "tensors 'a/b' and 'a/b/c'"  },
    {{"", "x"},        "HDF5 cannot store this name"},
    {{"/x", "x"},      "HDF5 cannot store this name"},
    {{"x/", "y"},      "HDF5 cannot store this name"},
    {{"a//b", "y"},    "HDF5 cannot store this name"},
    {{"a/./b", "y"},   "HDF5 cannot store this name"},
    {{".", "y"},       "HDF5 cannot store this name"},
    {{"\xff", "y"},    "HDF5 cannot store this name"},
};

START_TEST(name_that_is_no_path_is_refused)
{
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    int64_t zero[1] = {0}, two[1] = {2};
    ckpt_out_chunk chunk = {.lo = zero, .len = two};
    ckpt_out_tensor t[2] = {
        {.dims = two, .chunks = &chunk, .n_chunks = 1, .rank = 1}
    };
    t[1] = t[0];
    t[0].name = bad_names[_i].names[0];
    t[1].name = bad_names[_i].names[1];
    ckpt_out out = {.tensors = t, .n_tensors = 2, .world = 1};
    ck_assert_int_eq(ckpt_hdf5.layout(&out, &sink, &err), CKPT_E_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, bad_names[_i].message) != NULL, "%s", err.text);
    ckpt_arena_free(&sink.arena);
}
END_TEST

Suite *suite_hdf5_write(void)
{
    Suite *s = suite_create("hdf5_write");
    TCase *t = tcase_create("filters");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, setup, teardown);
    LOOP(t, filters_equal_those_of_the_library, lengths);
    tcase_add_test(t, decode_of_another_length_is_refused);
    suite_add_tcase(s, t);
    t = tcase_create("write");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_loop_test(t, written_file_reads_back_equal, 0, 3);
    tcase_add_test(t, given_up_file_can_be_made_again);
    LOOP(t, name_that_is_no_path_is_refused, bad_names);
    suite_add_tcase(s, t);
    return s;
}
