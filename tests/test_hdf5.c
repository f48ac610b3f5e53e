/* HDF5, reading: every form of storage against what libhdf5 wrote, and files that deceive or are
 * damaged. */
#include "hdf5_test.h"

Suite *suite_hdf5(void);

/* ---- reading ------------------------------------------------------------------------------------ */

/* Row-major bytes of a tensor, element by element through its chunks. */
static uint8_t *read_tensor(ckpt_source *src, const ckpt_tensor *t, size_t *n)
{
    int64_t numel, at[CKPT_MAX_RANK] = {0};
    uint64_t bytes;
    ck_assert(ckpt_numel(t->rank, t->dims, &numel));
    ck_assert(ckpt_dtype_bytes(t->dtype, numel, &bytes));
    uint8_t *out = calloc(1, bytes + 1);
    size_t elem = (size_t)ckpt_dtype_get(t->dtype)->bits / 8;
    *n = (size_t)bytes;
    for (size_t c = 0; c < t->n_chunks; c++) {
        const ckpt_chunk *k = &t->chunks[c];
        int64_t count = 1;
        for (int a = 0; a < t->rank; a++) {
            at[a] = 0;
            count *= k->len[a];
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t to = 0, from = 0;
            for (int a = 0; a < t->rank; a++) {
                to = to * t->dims[a] + k->lo[a] + at[a];
                from = k->stride != NULL ? from + at[a] * k->stride[a] : from * k->len[a] + at[a];
            }
            ckpt_err err = {0};
            ck_assert_msg(ckpt_source_read(src, k->file, out + (size_t)to * elem, elem,
                                           k->offset + (uint64_t)from * elem, &err) == CKPT_OK,
                          "%s", err.text);
            for (int a = t->rank - 1; a >= 0 && ++at[a] == k->len[a]; a--)
                at[a] = 0;
        }
    }
    return out;
}

typedef struct form {
    const char *name;
    int rank;
    hsize_t dims[3], chunk[3]; /* chunk[0] 0: contiguous; 1 on all axes and rank 0: compact */
    bool shuffle, fletcher, grows;
    int level;
} form;

static const form forms[] = {
    {"contiguous",  2, {5, 7},     {0},        false, false, false, 0},
    {"one chunk",   2, {5, 7},     {5, 7},     false, true,  false, 0},
    {"rows",        2, {50, 7},    {9, 7},     true,  true,  false, 4},
    {"raw rows",    2, {50, 7},    {9, 7},     false, false, false, 0},
    {"row pieces",  2, {5, 70},    {1, 16},    false, true,  false, 0},
    {"tiles",       2, {50, 70},   {16, 32},   true,  false, false, 9},
    {"raw tiles",   2, {50, 70},   {16, 32},   false, false, false, 0},
    {"large chunk", 1, {7},        {7},        true,  true,  false, 1},
    {"deep tiles",  3, {7, 9, 11}, {2, 4, 5},  true,  true,  false, 1},
    {"deep rows",   3, {7, 9, 11}, {1, 4, 11}, false, true,  false, 1},
    {"grows",       2, {50, 7},    {9, 7},     true,  false, true,  2},
    {"many",        1, {5000},     {3},        false, true,  false, 0},
    {"empty",       2, {0, 7},     {0},        false, false, false, 0},
    {"empty grows", 2, {0, 7},     {9, 7},     true,  false, true,  2},
};

static hid_t make(hid_t file, const form *f, hid_t type, const void *data)
{
    hsize_t most[3] = {H5S_UNLIMITED, f->dims[1], f->dims[2]};
    hid_t s = H5Screate_simple(f->rank, f->dims, f->grows ? most : NULL);
    hid_t p = H5Pcreate(H5P_DATASET_CREATE);
    if (f->chunk[0] > 0)
        H5Pset_chunk(p, f->rank, f->chunk);
    if (f->shuffle)
        H5Pset_shuffle(p);
    if (f->level > 0)
        H5Pset_deflate(p, (unsigned)f->level);
    if (f->fletcher)
        H5Pset_fletcher32(p);
    hid_t d = H5Dcreate2(file, f->name, type, s, H5P_DEFAULT, p, H5P_DEFAULT);
    if (data != NULL)
        ck_assert_int_ge(H5Dwrite(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    H5Pclose(p);
    H5Sclose(s);
    return d;
}

static hid_t create(bool latest, hsize_t user_block)
{
    hid_t access = H5Pcreate(H5P_FILE_ACCESS), creation = H5Pcreate(H5P_FILE_CREATE);
    if (latest)
        H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_userblock(creation, user_block);
    hid_t f = H5Fcreate(path, H5F_ACC_TRUNC, creation, access);
    ck_assert_int_ge(f, 0);
    H5Pclose(access);
    H5Pclose(creation);
    return f;
}

/* Every form, in the oldest and in the 1.10 format, without and with a user block. */
START_TEST(every_storage_reads_as_it_was_written)
{
    const form *f = &forms[_i];
    for (int variant = 0; variant < 4; variant++) {
        ckpt_source src;
        size_t n;
        size_t numel = f->dims[0] * (f->rank > 1 ? f->dims[1] : 1) * (f->rank > 2 ? f->dims[2] : 1);
        uint32_t *data = calloc(numel + 1, 4);
        fill((uint8_t *)data, numel * 4, (uint64_t)_i);
        hid_t file = create(variant & 1, variant & 2 ? 1024 : 0);
        H5Dclose(make(file, f, H5T_STD_U32LE, data));
        H5Fclose(file);
        open_ok(&src);
        ck_assert_uint_eq(src.n_tensors, 1);
        ck_assert_str_eq(src.tensors[0].name, f->name);
        ck_assert_int_eq(src.tensors[0].dtype, CKPT_U32);
        uint8_t *got = read_tensor(&src, &src.tensors[0], &n);
        ck_assert_uint_eq(n, numel * 4);
        ck_assert_mem_eq(got, data, n);
        ckpt_source_close(&src);
        free(got);
        free(data);
    }
}
END_TEST

/* ---- reading by many threads with little room ------------------------------------------------------ */

enum { SHARED_BYTES = 4 * 20000 };

typedef struct reading {
    ckpt_source *src;
    const uint8_t *want;
    uint64_t seed;
    bool ok;
} reading;

static void *read_at_random(void *arg)
{
    reading *r = arg;
    const ckpt_chunk *c = &r->src->tensors[0].chunks[0];
    uint8_t buf[3000];
    r->ok = true;
    for (int i = 0; i < 400 && r->ok; i++) {
        size_t n = rng(&r->seed) % sizeof buf, at = rng(&r->seed) % (SHARED_BYTES - n);
        r->ok = ckpt_source_read(r->src, c->file, buf, n, c->offset + at, NULL) == CKPT_OK &&
                memcmp(buf, r->want + at, n) == 0;
    }
    return NULL;
}

START_TEST(chunks_are_shared_by_threads)
{
    static const form f = {
        "a", 2, {200, 100},
          {7,   100},
          true, true, false, 1
    };
    static uint8_t data[SHARED_BYTES];
    ckpt_source src;
    pthread_t threads[8];
    reading r[8];
    fill(data, sizeof data, 3);
    hid_t file = create(true, 0);
    H5Dclose(make(file, &f, H5T_STD_U32LE, data));
    H5Fclose(file);
    open_ok(&src);
    src.cache_bytes = 1; /* the least number of slots: fewer than threads */
    for (size_t i = 0; i < 8; i++) {
        r[i] = (reading){.src = &src, .want = data, .seed = i};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, read_at_random, &r[i]), 0);
    }
    for (size_t i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
        ck_assert(r[i].ok);
    }
    ckpt_source_close(&src);
}
END_TEST

START_TEST(damaged_chunk_is_named_and_others_stay_readable)
{
    static const form f = {"a", 1, {4000}, {1000}, false, true, false, 0};
    static uint8_t data[16000];
    ckpt_source src;
    ckpt_err err = {0};
    uint8_t buf[16];
    fill(data, sizeof data, 3);
    hid_t file = create(true, 0);
    hid_t d = make(file, &f, H5T_STD_U32LE, data);
    hsize_t offset = 2000, size;
    unsigned mask;
    haddr_t at;
    H5Fflush(file, H5F_SCOPE_LOCAL);
    ck_assert_int_ge(H5Dget_chunk_info_by_coord(d, &offset, &mask, &at, &size), 0);
    H5Dclose(d);
    H5Fclose(file);
    int fd = open(path, O_RDWR);
    ck_assert_int_eq(pread(fd, buf, 1, (off_t)at + 77), 1);
    buf[0] ^= 1;
    ck_assert_int_eq(pwrite(fd, buf, 1, (off_t)at + 77), 1);
    close(fd);
    open_ok(&src);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(ckpt_source_read(&src, 1, buf, 16, 8000, &err), CKPT_E_FORMAT);
        ck_assert_ptr_nonnull(strstr(err.text, "dataset 'a': chunk 2 at offset"));
        ck_assert_ptr_nonnull(strstr(err.text, "Fletcher-32 checksum is"));
        ck_assert_int_eq(ckpt_source_read(&src, 1, buf, 16, 7984, &err), CKPT_OK);
        ck_assert_mem_eq(buf, data + 7984, 16);
    }
    ckpt_source_close(&src);
}
END_TEST

START_TEST(another_reading_decodes_anew)
{
    static const form f = {"a", 1, {4000}, {1000}, false, true, false, 0};
    static uint8_t data[16000];
    ckpt_source src;
    ckpt_err err = {0};
    uint8_t buf[16], byte;
    hsize_t offset = 2000, size;
    unsigned mask;
    haddr_t at;
    fill(data, sizeof data, 3);
    hid_t file = create(true, 0);
    hid_t d = make(file, &f, H5T_STD_U32LE, data);
    H5Fflush(file, H5F_SCOPE_LOCAL);
    ck_assert_int_ge(H5Dget_chunk_info_by_coord(d, &offset, &mask, &at, &size), 0);
    H5Dclose(d);
    H5Fclose(file);
    open_ok(&src);
    ck_assert_int_eq(ckpt_source_read(&src, 1, buf, 16, 8000, &err), CKPT_OK);
    int fd = open(path, O_RDWR);
    ck_assert_int_eq(pread(fd, &byte, 1, (off_t)at + 77), 1);
    byte ^= 1;
    ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)at + 77), 1);
    close(fd);
    ck_assert_int_eq(ckpt_source_read(&src, 1, buf, 16, 8000, &err), CKPT_OK); /* as decoded */
    ck_assert_mem_eq(buf, data + 8000, 16);
    src.reading++;
    ck_assert_int_eq(ckpt_source_read(&src, 1, buf, 16, 8000, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "dataset 'a': chunk 2 at offset"));
    ckpt_source_close(&src);
}
END_TEST

/* ---- files that deceive ---------------------------------------------------------------------------- */

static const form small = {
    "a", 2, {4, 4},
      {0},
      false, false, false, 0
};
static const form cut = {
    "a", 2, {4, 4},
      {2, 4},
      false, false, false, 0
};
static uint32_t numbers[16];

static void plain(hid_t f)
{
    H5Dclose(make(f, &small, H5T_STD_U32LE, numbers));
}
static void external_link(hid_t f)
{
    H5Lcreate_external("other.h5", "/a", f, "x", H5P_DEFAULT, H5P_DEFAULT);
}
static void external_storage(hid_t f)
{
    hsize_t dim = 4;
    hid_t p = H5Pcreate(H5P_DATASET_CREATE), s = H5Screate_simple(1, &dim, NULL);
    H5Pset_external(p, "/etc/passwd", 0, 4);
    H5Dclose(H5Dcreate2(f, "a", H5T_STD_U8LE, s, H5P_DEFAULT, p, H5P_DEFAULT));
    H5Pclose(p);
    H5Sclose(s);
}
static void virtual_dataset(hid_t f)
{
    hsize_t dim = 4;
    hid_t p = H5Pcreate(H5P_DATASET_CREATE), s = H5Screate_simple(1, &dim, NULL);
    H5Pset_virtual(p, s, "/etc/passwd", "a", s);
    H5Dclose(H5Dcreate2(f, "a", H5T_STD_U8LE, s, H5P_DEFAULT, p, H5P_DEFAULT));
    H5Pclose(p);
    H5Sclose(s);
}
static void other_filter(hid_t f)
{
    hsize_t dim = 16;
    hid_t p = H5Pcreate(H5P_DATASET_CREATE), s = H5Screate_simple(1, &dim, NULL);
    H5Pset_chunk(p, 1, &dim);
    H5Pset_nbit(p);
    hid_t d = H5Dcreate2(f, "a", H5T_STD_U32LE, s, H5P_DEFAULT, p, H5P_DEFAULT);
    H5Dwrite(d, H5T_STD_U32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers);
    H5Dclose(d);
    H5Pclose(p);
    H5Sclose(s);
}
static void cycle(hid_t f)
{
    H5Gclose(H5Gcreate2(f, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Lcreate_hard(f, "/", f, "g/loop", H5P_DEFAULT, H5P_DEFAULT);
}
static void twice(hid_t f)
{
    H5Gclose(H5Gcreate2(f, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Lcreate_hard(f, "/g", f, "h", H5P_DEFAULT, H5P_DEFAULT);
}
static void soft_cycle(hid_t f)
{
    H5Lcreate_soft("/y", f, "x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/x", f, "y", H5P_DEFAULT, H5P_DEFAULT);
}
static void deep(hid_t f)
{
    char text[256];
    hid_t p = H5Pcreate(H5P_LINK_CREATE);
    for (int i = 0; i < 200; i++)
        text[i] = i % 2 == 0 ? 'd' : '/';
    text[199] = '\0';
    H5Pset_create_intermediate_group(p, 1);
    H5Gclose(H5Gcreate2(f, text, p, H5P_DEFAULT, H5P_DEFAULT));
    H5Pclose(p);
}
static void never_written(hid_t f)
{
    H5Dclose(make(f, &small, H5T_STD_U32LE, NULL));
}
static void chunks_missing(hid_t f)
{
    hsize_t at[2] = {2, 0};
    hid_t d = make(f, &cut, H5T_STD_U32LE, NULL);
    H5Dwrite_chunk(d, H5P_DEFAULT, 0, at, 32, numbers);
    H5Dclose(d);
}
static void huge(hid_t f)
{
    static const form h = {
        "a", 2, {1ull << 40, 1 << 10},
          {1 << 10,    1 << 10},
          false, false, false, 0
    };
    H5Dclose(make(f, &h, H5T_STD_U32LE, NULL));
}
static void short_chunk(hid_t f)
{
    static const form s = {
        "a", 2, {4, 4},
          {2, 4},
          false, true, false, 0
    };
    hsize_t at[2] = {0, 0}, next[2] = {2, 0};
    hid_t d = make(f, &s, H5T_STD_U32LE, NULL);
    H5Dwrite_chunk(d, H5P_DEFAULT, 0, at, 36, numbers);
    H5Dwrite_chunk(d, H5P_DEFAULT, 0, next, 20, numbers);
    H5Dclose(d);
}
static void bomb(hid_t f)
{
    static const form b = {"a", 1, {1 << 25}, {1 << 25}, false, false, false, 9};
    hsize_t at = 0;
    hid_t d = make(f, &b, H5T_STD_U32LE, NULL);
    H5Dwrite_chunk(d, H5P_DEFAULT, 0, &at, 64, numbers);
    H5Dclose(d);
}
static void too_large_chunk(hid_t f)
{
    static const form b = {"a", 1, {1 << 28}, {1 << 28}, false, false, false, 9};
    hsize_t at = 0;
    hid_t d = make(f, &b, H5T_STD_U32LE, NULL);
    H5Dwrite_chunk(d, H5P_DEFAULT, 0, &at, 64, numbers);
    H5Dclose(d);
}
static void put_text(hid_t object, const char *name, const char *text)
{
    hid_t type = H5Tcopy(H5T_C_S1), s = H5Screate(H5S_SCALAR);
    H5Tset_size(type, strlen(text));
    hid_t a = H5Acreate2(object, name, type, s, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(a, type, text);
    H5Aclose(a);
    H5Sclose(s);
    H5Tclose(type);
}
static void with_dtype(hid_t f, const char *text)
{
    hid_t d = make(f, &small, H5T_STD_U32LE, numbers);
    put_text(d, "dtype", text);
    H5Dclose(d);
}
static void wrong_dtype(hid_t f)
{
    with_dtype(f, "BF16");
}
static void wrong_packing(hid_t f)
{
    hid_t d = make(f, &small, H5T_STD_U8LE, numbers);
    put_text(d, "dtype", "F4");
    H5Dclose(d);
}
static void bad_config(hid_t f)
{
    put_text(f, "config.json", "{\"a\":");
}
static void config_is_list(hid_t f)
{
    put_text(f, "config.json", "[1]");
}
static void many_attributes(hid_t f)
{
    for (int i = 0; i < 10001; i++) {
        char name[16];
        snprintf(name, sizeof name, "a%d", i);
        put_text(f, name, "x");
    }
}
static void other_version(hid_t f)
{
    hid_t s = H5Screate(H5S_SCALAR);
    int two = 2;
    hid_t a = H5Acreate2(f, CKPT_HDF5_VERSION, H5T_STD_I32LE, s, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(a, H5T_NATIVE_INT, &two);
    H5Aclose(a);
    H5Sclose(s);
}

static const struct {
    void (*make)(hid_t file);
    ckpt_status status;
    const char *message;
} hostile[] = {
    {external_link,    CKPT_E_UNSUPPORTED, "'x' is a link to another file, which is not followed"         },
    {external_storage, CKPT_E_UNSUPPORTED, "dataset 'a': its bytes are in other files"                    },
    {virtual_dataset,  CKPT_E_UNSUPPORTED, "dataset 'a': virtual dataset"                                 },
    {other_filter,     CKPT_E_UNSUPPORTED, "dataset 'a': filter 5 (nbit) is not decoded"                  },
    {cycle,            CKPT_E_FORMAT,      "group 'g/loop/' is linked more than once, or to itself"       },
    {twice,            CKPT_E_FORMAT,      "group 'h/' is linked more than once"                          },
    {soft_cycle,       CKPT_E_UNSUPPORTED, "soft link 'x' leads to 'y', which is no dataset"              },
    {deep,             CKPT_E_FORMAT,      "groups nested deeper than 64"                                 },
    {never_written,    CKPT_E_FORMAT,      "dataset 'a': its bytes were never written"                    },
    {chunks_missing,   CKPT_E_FORMAT,      "dataset 'a': 1 of 2 chunks are stored"                        },
    {huge,             CKPT_E_FORMAT,      "dataset 'a': 0 of 1073741824 chunks are stored"               },
    {short_chunk,      CKPT_E_FORMAT,      "dataset 'a': chunk 1: chunk of 20 stored bytes cannot hold 32"},
    {bomb,             CKPT_E_FORMAT,      "dataset 'a': chunk 0: chunk of 64 stored bytes cannot hold"   },
    {too_large_chunk,  CKPT_E_UNSUPPORTED, "dataset 'a': chunks of 1073741824 bytes, at most"             },
    {wrong_dtype,      CKPT_E_FORMAT,      "attribute 'dtype' says BF16, its elements are U32"            },
    {wrong_packing,    CKPT_E_FORMAT,      "dtype F4 needs one axis of packed bytes"                      },
    {bad_config,       CKPT_E_FORMAT,      "attribute 'config.json': JSON offset 5"                       },
    {config_is_list,   CKPT_E_FORMAT,      "attribute 'config.json': expected a JSON object"              },
    {many_attributes,  CKPT_E_FORMAT,      "10001 attributes on the root group, at most 10000"            },
    {other_version,    CKPT_E_UNSUPPORTED, "ckpt.hdf5.version is 2, expected 1"                           },
};

START_TEST(deceiving_file_is_refused_by_name)
{
    for (int latest = 0; latest < 2; latest++) {
        ckpt_source src;
        ckpt_err err = {0};
        hid_t f = create(latest, 0);
        hostile[_i].make(f);
        H5Fclose(f);
        ckpt_status status = ckpt_source_open(&src, path, NULL, &err);
        ck_assert_msg(status == hostile[_i].status, "%s: %s", ckpt_status_text(status), err.text);
        ck_assert_msg(strstr(err.text, hostile[_i].message) != NULL, "%s", err.text);
        ck_assert_msg(strncmp(err.text, path, strlen(path)) == 0, "%s", err.text);
    }
}
END_TEST

START_TEST(what_is_no_tensor_is_named_and_left_out)
{
    ckpt_source src;
    hid_t f = create(true, 0);
    plain(f);
    hid_t s = H5Screate(H5S_SCALAR), null = H5Screate(H5S_NULL), text = H5Tcopy(H5T_C_S1);
    hid_t pair = H5Tcreate(H5T_COMPOUND, 8);
    H5Tinsert(pair, "x", 0, H5T_STD_I32LE);
    H5Tinsert(pair, "y", 4, H5T_IEEE_F32LE);
    H5Dclose(H5Dcreate2(f, "text", text, s, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Dclose(H5Dcreate2(f, "pair", pair, s, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Dclose(H5Dcreate2(f, "null", H5T_STD_I8LE, null, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Tcommit2(f, "type", pair, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("text", f, "link", H5P_DEFAULT, H5P_DEFAULT);
    put_text(f, "note", "hello");
    H5Tclose(text);
    H5Tclose(pair);
    H5Sclose(s);
    H5Sclose(null);
    H5Fclose(f);
    static const char *const expected[] = {
        "'null': null tensor is not decoded", "'pair': compound tensor is not decoded",
        "'text': string tensor is not decoded", "'type' is a named type: left out",
        "'link': linked tensor is not decoded"};
    open_ok(&src);
    ck_assert_uint_eq(src.n_tensors, 1);
    ck_assert_uint_eq(src.n_warnings, 5);
    for (size_t i = 0; i < 5; i++)
        ck_assert_str_eq(src.warnings[i], expected[i]);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.metadata, "note")), "hello");
    ckpt_source_close(&src);
}
END_TEST

START_TEST(cut_file_is_refused)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf whole = {0};
    hid_t f = create(true, 0);
    plain(f);
    H5Fclose(f);
    ck_assert_int_eq(ckpt_read_file(path, 1 << 20, &whole, &err), CKPT_OK);
    for (size_t n = 8; n < whole.len; n += 37) {
        ck_assert_int_eq(truncate(path, 0), 0);
        int fd = open(path, O_WRONLY);
        ck_assert_int_eq(pwrite(fd, whole.data, n, 0), (ssize_t)n);
        close(fd);
        ck_assert_msg(ckpt_source_open(&src, path, NULL, &err) == CKPT_E_FORMAT, "%zu bytes", n);
    }
    ckpt_buf_release(&whole);
}
END_TEST

/* ---- damage ------------------------------------------------------------------------------------- */

static void everything(hid_t f)
{
    static uint32_t data[8192];
    fill((uint8_t *)data, sizeof data, 1);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        H5Dclose(make(f, &forms[i], H5T_STD_U32LE, data));
    H5Gclose(H5Gcreate2(f, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Lcreate_soft("/rows", f, "g/soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_hard(f, "/rows", f, "g/hard", H5P_DEFAULT, H5P_DEFAULT);
    put_text(f, "config.json", "{}");
}

/* Open and read all of it; nothing is known of the result but that it is one. */
static void try_file(void)
{
    ckpt_source src;
    ckpt_err err = {0};
    static uint8_t buf[4096];
    ckpt_status status = ckpt_source_open(&src, path, NULL, &err);
    if (status != CKPT_OK) {
        ck_assert_msg(status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED, "%s: %s",
                      ckpt_status_text(status), err.text);
        return;
    }
    for (uint32_t f = 0; f < src.n_files; f++)
        for (uint64_t at = 0; at < src.files[f].size && at < 400000; at += sizeof buf) {
            size_t n = (size_t)ckpt_min_u64(sizeof buf, src.files[f].size - at);
            status = ckpt_source_read(&src, f, buf, n, at, &err);
            ck_assert_msg(status == CKPT_OK || status == CKPT_E_FORMAT, "%s", err.text);
        }
    ckpt_source_close(&src);
}

/* CKPT_FUZZ=n: that many mutations of each file instead of the default. */
START_TEST(damaged_files_never_crash)
{
    ckpt_buf whole = {0};
    const char *asked = getenv("CKPT_FUZZ");
    int rounds = asked != NULL ? atoi(asked) : 100;
    uint64_t seed = (uint64_t)(17 + _i + rounds);
    hid_t f = create(_i, 0);
    everything(f);
    H5Fclose(f);
    ck_assert_int_eq(ckpt_read_file(path, 1 << 24, &whole, NULL), CKPT_OK);
    for (int r = 0; r < rounds; r++) {
        int fd = open(path, O_WRONLY);
        ck_assert_int_eq(pwrite(fd, whole.data, whole.len, 0), (ssize_t)whole.len);
        for (uint64_t k = 1 + rng(&seed) % 4; k > 0; k--) {
            static const uint64_t odd[] = {0, 1, 0xff, 0xffff, 0xffffffff, UINT64_MAX, 1ull << 40};
            uint8_t bytes[8];
            /* Structure is at the start and scattered: favour what is not noise. */
            uint64_t at = rng(&seed) % (rng(&seed) % 2 ? 8192 : whole.len - 8);
            size_t n = (size_t)1 << rng(&seed) % 4;
            ckpt_put_u64(bytes, rng(&seed) % 2 ? odd[rng(&seed) % 7] : rng(&seed));
            ck_assert_int_eq(pwrite(fd, bytes, n, (off_t)at), (ssize_t)n);
        }
        close(fd);
        try_file();
    }
    ckpt_buf_release(&whole);
}
END_TEST

Suite *suite_hdf5(void)
{
    Suite *s = suite_create("hdf5");
    TCase *t = tcase_create("read");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, setup, teardown);
    LOOP(t, every_storage_reads_as_it_was_written, forms);
    tcase_add_test(t, chunks_are_shared_by_threads);
    tcase_add_test(t, damaged_chunk_is_named_and_others_stay_readable);
    tcase_add_test(t, another_reading_decodes_anew);
    suite_add_tcase(s, t);
    t = tcase_create("hostile");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, setup, teardown);
    LOOP(t, deceiving_file_is_refused_by_name, hostile);
    tcase_add_test(t, what_is_no_tensor_is_named_and_left_out);
    tcase_add_test(t, cut_file_is_refused);
    suite_add_tcase(s, t);
    t = tcase_create("damage");
    tcase_set_timeout(t, getenv("CKPT_FUZZ") != NULL ? 3600 : 300);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_loop_test(t, damaged_files_never_crash, 0, 2);
    suite_add_tcase(s, t);
    return s;
}
