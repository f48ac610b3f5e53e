/* Zip reader and writer: archives of torch, of Python's zipfile, and hostile ones. */
#include "zip_build.h"

#include "io.h"
#include "pickle.h"
#include "zip.h"

Suite *suite_zip(void);

#define B(s) s, sizeof(s) - 1

static ckpt_status open_bytes(memory_source *m, const ckpt_buf *b, ckpt_zip *zip, ckpt_err *err)
{
    memory_open(m, b->data, b->len);
    memset(err, 0, sizeof *err);
    return ckpt_zip_open(&m->src, 0, 0, b->len, &m->src.arena, zip, err);
}

static void expect_entry(memory_source *m, const ckpt_zip *zip, const char *name, const void *want,
                         size_t n)
{
    ckpt_buf b = {0};
    ckpt_err err = {0};
    const ckpt_zip_entry *e = ckpt_zip_find(zip, name);
    ck_assert_msg(e != NULL, "no entry %s", name);
    ck_assert_msg(ckpt_zip_read(&m->src, 0, 0, e, 1 << 20, &b, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(b.len, n);
    ck_assert_mem_eq(b.data, want, n);
    ckpt_buf_release(&b);
}

static void refuse(const ckpt_buf *b, ckpt_status status, const char *text)
{
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_status got = open_bytes(&m, b, &zip, &err);
    ck_assert_msg(got == status, "status %d, '%s'", got, err.text);
    ck_assert_msg(strstr(err.text, text), "'%s' lacks '%s'", err.text, text);
    memory_close(&m);
}

static const zip_part plain[] = {
    {.name = "r/data.pkl", .data = "\x80\x02N.", .n = 4},
    {.name = "r/data/0",   .data = "abcdefgh",   .n = 8},
    {.name = "r/data/10",  .data = "",           .n = 0},
    {.name = "r/version",  .data = "3\n",        .n = 2}
};

/* ---- reading ---------------------------------------------------------------------------------- */

START_TEST(zip_plain_archive_reads)
{
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0};
    zip_build(&b, plain, 4);
    ck_assert_msg(open_bytes(&m, &b, &zip, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(zip.root, "r");
    ck_assert_uint_eq(zip.n_entries, 4);
    expect_entry(&m, &zip, "data/0", "abcdefgh", 8);
    expect_entry(&m, &zip, "data/10", "", 0);
    expect_entry(&m, &zip, "version", "3\n", 2);
    ck_assert_ptr_null(ckpt_zip_find(&zip, "data/1"));
    ck_assert_ptr_null(ckpt_zip_find(&zip, ""));
    ck_assert_ptr_null(ckpt_zip_find(&zip, "data.pkl2"));
    memory_close(&m);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_embedded_archive_reads_relative_to_its_base)
{
    memory_source m;
    ckpt_zip zip;
    ckpt_err err = {0};
    ckpt_buf b = {0};
    ckpt_buf_puts(&b, "before");
    ckpt_buf inner = {0};
    zip_build(&inner, plain, 4);
    ckpt_buf_append(&b, inner.data, inner.len);
    ckpt_buf_puts(&b, "after");
    memory_open(&m, b.data, b.len);
    ck_assert_msg(ckpt_zip_open(&m.src, 0, 6, inner.len, &m.src.arena, &zip, &err) == CKPT_OK, "%s",
                  err.text);
    const ckpt_zip_entry *e = ckpt_zip_find(&zip, "data/0");
    ck_assert_mem_eq(b.data + 6 + e->offset, "abcdefgh", 8);
    ck_assert_int_eq(ckpt_zip_open(&m.src, 0, 6, b.len, &m.src.arena, &zip, &err), CKPT_E_FORMAT);
    ck_assert_int_eq(ckpt_zip_open(&m.src, 0, UINT64_MAX, 2, &m.src.arena, &zip, &err),
                     CKPT_E_FORMAT);
    memory_close(&m);
    ckpt_buf_release(&inner);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_deflated_entry_inflates)
{
    static uint8_t data[300000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * i >> 7);
    const zip_part parts[] = {
        {.name = "r/data.pkl", .data = data, .n = sizeof data, .deflate = true}
    };
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0};
    zip_build(&b, parts, 1);
    ck_assert_msg(open_bytes(&m, &b, &zip, &err) == CKPT_OK, "%s", err.text);
    expect_entry(&m, &zip, "data.pkl", data, sizeof data);
    memory_close(&m);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_trailing_junk_is_accepted_and_leading_junk_refused)
{
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0}, lead = {0};
    zip_build(&b, plain, 4);
    ckpt_buf_append(&lead, "junk", 4);
    ckpt_buf_append(&lead, b.data, b.len);
    for (int i = 0; i < 1000; i++)
        ckpt_buf_puts(&b, "junk after the end record ");
    ck_assert_msg(open_bytes(&m, &b, &zip, &err) == CKPT_OK, "%s", err.text);
    memory_close(&m);
    refuse(&lead, CKPT_E_FORMAT, "no central record");
    ckpt_buf_release(&b);
    ckpt_buf_release(&lead);
}
END_TEST

START_TEST(zip_crc_zero_means_not_computed)
{
    zip_part parts[] = {
        {.name = "r/data.pkl", .data = "\x80\x02N.", .n = 4, .crc = 1}
    };
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0}, out = {0};
    zip_build(&b, parts, 1);
    ck_assert_int_eq(open_bytes(&m, &b, &zip, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, 100, &out, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "CRC-32"));
    zip.entries[0].crc = 0;
    ckpt_buf_clear(&out);
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, 100, &out, &err), CKPT_OK);
    memory_close(&m);
    ckpt_buf_release(&out);
    ckpt_buf_release(&b);
}
END_TEST

/* ---- refusals --------------------------------------------------------------------------------- */

typedef struct lie {
    zip_part parts[3];
    size_t n;
    ckpt_status status;
    const char *text;
} lie;

#define FIRST                                                                                      \
    {                                                                                              \
        .name = "r/a", .data = "abcd", .n = 4                                                      \
    }

/* clang-format off */
static const lie lies[] = {
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .local = 10}}, 2, CKPT_E_FORMAT, "no local header of it at 10"},
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .local = 0x7fffffff}}, 2, CKPT_E_FORMAT, "local header at 2147483647"},
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .usize = 0x7fffffff, .csize = 0x7fffffff}}, 2, CKPT_E_FORMAT, "run into the directory"},
    {{{.name = "r/a", .data = "abcd", .n = 4, .usize = 40, .csize = 40}, {.name = "r/b", .data = "efgh", .n = 4}}, 2, CKPT_E_FORMAT, "overlaps"},
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .usize = 3}}, 2, CKPT_E_FORMAT, "sizes 3 and 4"},
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .usize = 0xffffffff}}, 2, CKPT_E_FORMAT, "bad zip64 field"},
    {{FIRST, FIRST}, 2, CKPT_E_FORMAT, "occurs twice"},
    {{FIRST, {.name = "r/b", .data = "efgh", .n = 4, .flags = 0x0801}}, 2, CKPT_E_UNSUPPORTED, "is encrypted"},
    {{{.name = "a", .data = "abcd", .n = 4}}, 1, CKPT_E_FORMAT, "has no root folder"},
};
/* clang-format on */

START_TEST(zip_lying_directory_is_refused)
{
    ckpt_buf b = {0};
    zip_build(&b, lies[_i].parts, lies[_i].n);
    refuse(&b, lies[_i].status, lies[_i].text);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_lying_end_record_is_refused)
{
    ckpt_buf b = {0};
    zip_build(&b, plain, 4);
    size_t end = b.len - 22;
    uint32_t cd_size = ckpt_get_u32(b.data + end + 12), cd = ckpt_get_u32(b.data + end + 16);
    ckpt_put_u16(b.data + end + 10, 3);
    refuse(&b, CKPT_E_FORMAT, "3 entries fill");
    ckpt_put_u16(b.data + end + 10, 5);
    refuse(&b, CKPT_E_FORMAT, "5 entries in a central directory of");
    ckpt_put_u16(b.data + end + 10, 60000);
    refuse(&b, CKPT_E_FORMAT, "60000 entries in a central directory of");
    ckpt_put_u16(b.data + end + 10, 0);
    refuse(&b, CKPT_E_FORMAT, "0 entries");
    ckpt_put_u16(b.data + end + 10, 4);
    ckpt_put_u32(b.data + end + 12, cd_size + 1);
    refuse(&b, CKPT_E_FORMAT, "central directory of");
    ckpt_put_u32(b.data + end + 12, cd_size);
    ckpt_put_u32(b.data + end + 16, 0xfffffff0);
    refuse(&b, CKPT_E_FORMAT, "central directory of");
    ckpt_put_u32(b.data + end + 16, cd - 1);
    refuse(&b, CKPT_E_FORMAT, "no central record");
    ckpt_put_u32(b.data + end + 16, cd);
    b.data[end] = 'X';
    refuse(&b, CKPT_E_FORMAT, "no end record");
    ckpt_buf_clear(&b);
    refuse(&b, CKPT_E_FORMAT, "no end record");
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_lying_zip64_record_is_refused)
{
    static const struct {
        size_t field; /* of the zip64 end record */
        uint64_t value;
        const char *text;
    } rows[] = {
        {32, UINT64_MAX,        "entries in a central directory"                 },
        {32, (uint64_t)1 << 40, "entries in a central directory"                 },
        {40, UINT64_MAX,        "central directory of 18446744073709551615 bytes"},
        {48, UINT64_MAX,        "central directory of"                           },
        {48, UINT64_MAX - 10,   "central directory of"                           },
        {0,  0,                 "no zip64 end record"                            },
        {64, UINT64_MAX,        "zip64 end record at 18446744073709551615"       }, /* in the locator */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_buf b = {0};
        ckpt_zip_object(&b, (const uint8_t *)"\x80\x02N.", 4);
        size_t end64 = b.len - 22 - 20 - 56;
        ck_assert_mem_eq(b.data + end64, "PK\6\6", 4);
        ckpt_put_u64(b.data + end64 + rows[i].field, rows[i].value);
        refuse(&b, CKPT_E_FORMAT, rows[i].text);
        ckpt_buf_release(&b);
    }
}
END_TEST

START_TEST(zip_bomb_is_refused_by_the_limit)
{
    /* 1 GiB of zeros, deflated to about a megabyte. */
    size_t n = (size_t)1 << 30;
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0}, out = {0}, packed = {0};
    z_stream z = {0};
    uint8_t chunk[4096], zeros[4096] = {0};
    ck_assert_int_eq(deflateInit2(&z, 9, Z_DEFLATED, -MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
    int rc = Z_OK;
    for (size_t given = 0; rc != Z_STREAM_END;) {
        if (z.avail_in == 0 && given < n) {
            z.next_in = zeros;
            z.avail_in = sizeof zeros;
            given += sizeof zeros;
        }
        z.next_out = chunk;
        z.avail_out = sizeof chunk;
        rc = deflate(&z, given < n || z.avail_in ? Z_NO_FLUSH : Z_FINISH);
        ckpt_buf_append(&packed, chunk, sizeof chunk - z.avail_out);
    }
    deflateEnd(&z);
    const zip_part parts[] = {
        {.name = "r/data.pkl",
         .data = packed.data,
         .n = packed.len,
         .method = 8,
         .usize = (uint32_t)n}
    };
    zip_build(&b, parts, 1);
    ck_assert_msg(open_bytes(&m, &b, &zip, &err) == CKPT_OK, "%s", err.text);
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, (uint64_t)512 << 20, &out, &err),
                     CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "1073741824 bytes, limit 536870912"));
    ck_assert_uint_eq(out.cap, 0);
    /* Claiming less than it holds, or more than deflate can make, does not help either. */
    zip.entries[0].size = 1000;
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, 1 << 20, &out, &err), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "bad deflate stream"));
    zip.entries[0].size = UINT64_MAX / 2;
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, UINT64_MAX, &out, &err),
                     CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "deflated to"));
    memory_close(&m);
    ckpt_buf_release(&out);
    ckpt_buf_release(&packed);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_unknown_method_is_unsupported_when_read)
{
    zip_part parts[] = {
        {.name = "r/a", .data = "abcd", .n = 4, .method = 12}
    };
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_buf b = {0}, out = {0};
    zip_build(&b, parts, 1);
    ck_assert_int_eq(open_bytes(&m, &b, &zip, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, 100, &out, &err), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "compression method 12"));
    memory_close(&m);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_mutation_never_crashes)
{
    ckpt_buf b = {0}, m = {0};
    uint64_t rng = 88172645463325252u;
    if (_i == 0)
        zip_build(&b, plain, 4);
    else
        ckpt_zip_object(&b, (const uint8_t *)"\x80\x02N.", 4);
    for (int round = 0; round < 20000; round++) {
        memory_source source;
        ckpt_zip zip;
        ckpt_err err;
        ckpt_buf_clear(&m);
        ckpt_buf_append(&m, b.data, b.len);
        for (int k = 0; k < 1 + round % 3; k++) {
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            size_t at = (rng >> 20) % m.len;
            m.data[at] = rng % 3 == 0 ? 0xff : rng % 3 == 1 ? 0 : (uint8_t)(rng >> 8);
        }
        if (open_bytes(&source, &m, &zip, &err) == CKPT_OK)
            for (size_t i = 0; i < zip.n_entries; i++) {
                ckpt_buf out = {0};
                ckpt_status status =
                    ckpt_zip_read(&source.src, 0, 0, &zip.entries[i], 1 << 16, &out, &err);
                ck_assert_int_ne(status, CKPT_E_IO);
                ckpt_buf_release(&out);
            }
        memory_close(&source);
    }
    ckpt_buf_release(&b);
    ckpt_buf_release(&m);
}
END_TEST

/* ---- writing ---------------------------------------------------------------------------------- */

/* The first item of a DCP file written by torch 2.11 whose data.pkl is `80 02 5d 71 00 4e 61 2e`:
 * ours must have the same records, less the three optional ones, at the same kind of offsets. */
START_TEST(zip_object_matches_torch_record_for_record)
{
    static const uint8_t pickle[] = "\x80\x02]q\0Na.";
    ckpt_buf file = {0}, ours = {0};
    memory_source a, b;
    ckpt_zip theirs, mine;
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_read_file(CKPT_FIXTURES "/mcore/legacy_tp1/iter_0000100/__0_0.distcp",
                                    1 << 26, &file, &err),
                     CKPT_OK);
    ckpt_zip_object(&ours, pickle, sizeof pickle - 1);
    memory_open(&a, file.data, 1261);
    ck_assert_msg(ckpt_zip_open(&a.src, 0, 0, 1261, &a.src.arena, &theirs, &err) == CKPT_OK, "%s",
                  err.text);
    ck_assert_int_eq(open_bytes(&b, &ours, &mine, &err), CKPT_OK);
    ck_assert_str_eq(theirs.root, "archive");
    ck_assert_str_eq(mine.root, "archive");
    expect_entry(&a, &theirs, "data.pkl", pickle, sizeof pickle - 1);
    for (size_t i = 0; i < mine.n_entries; i++) {
        const ckpt_zip_entry *m = &mine.entries[i], *t = ckpt_zip_find(&theirs, m->name + 8);
        ck_assert_ptr_nonnull(t);
        ck_assert_uint_eq(m->crc, t->crc);
        ck_assert_uint_eq(m->size, t->size);
        ck_assert_uint_eq(m->offset % 64, 0);
        ck_assert_uint_eq(t->offset % 64, 0);
        /* Payload and data descriptor. */
        ck_assert_mem_eq(ours.data + m->offset, file.data + t->offset, m->size + 16);
    }
    /* The first record starts at 0 in both, so header, padding, payload, descriptor are equal. */
    ck_assert_mem_eq(ours.data, file.data, 64 + 8 + 16);
    memory_close(&a);
    memory_close(&b);
    ckpt_buf_release(&file);
    ckpt_buf_release(&ours);
}
END_TEST

static const struct {
    ckpt_dtype dtype;
    int rank;
    int64_t dims[4];
    uint64_t bytes;
    const char *rebuild;
} tensors[] = {
    {CKPT_F32,     2, {2, 4},    32, "_rebuild_tensor_v2"},
    {CKPT_BF16,    1, {5},       10, "_rebuild_tensor_v2"},
    {CKPT_F8_E4M3, 2, {3, 3},    9,  "_rebuild_tensor_v3"},
    {CKPT_I64,     0, {0},       8,  "_rebuild_tensor_v2"},
    {CKPT_BOOL,    3, {1, 2, 3}, 6,  "_rebuild_tensor_v2"},
    {CKPT_C64,     1, {2},       16, "_rebuild_tensor_v2"},
    {CKPT_F32,     3, {2, 0, 5}, 0,  "_rebuild_tensor_v2"},
    {CKPT_U16,     1, {3},       6,  "_rebuild_tensor_v3"},
    {CKPT_F4,      2, {3, 4},    6,  "_rebuild_tensor_v3"},
};

START_TEST(zip_tensor_item_reads_back)
{
    const int64_t *dims = tensors[_i].dims;
    size_t n = (size_t)tensors[_i].bytes;
    uint8_t payload[64];
    for (size_t i = 0; i < n; i++)
        payload[i] = (uint8_t)(i * 37 + 1);
    uint32_t crc = (uint32_t)crc32_z(0, payload, n);
    ckpt_buf b = {0}, pickle = {0};
    memory_source m;
    ckpt_zip zip;
    ckpt_err err;
    ckpt_zip_tensor_head(&b, tensors[_i].dtype, tensors[_i].rank, dims);
    ck_assert_uint_eq(b.len % 64, 0);
    size_t at = b.len;
    ckpt_buf_append(&b, payload, n);
    ckpt_zip_tensor_tail(&b, tensors[_i].dtype, tensors[_i].rank, dims, crc);
    ck_assert(!b.failed);
    ck_assert_msg(open_bytes(&m, &b, &zip, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(zip.n_entries, 4);
    ck_assert_uint_eq(ckpt_zip_find(&zip, "data/0")->offset, at);
    expect_entry(&m, &zip, "data/0", payload, n);
    expect_entry(&m, &zip, "byteorder", "little", 6);
    expect_entry(&m, &zip, "version", "3\n", 2);
    ck_assert_int_eq(ckpt_zip_read(&m.src, 0, 0, zip.entries, 4096, &pickle, &err), CKPT_OK);
    ck_assert_ptr_nonnull(strstr((const char *)pickle.data + 3, tensors[_i].rebuild));
    ckpt_buf_release(&pickle);
    memory_close(&m);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(zip_tensor_pickle_is_the_documented_example)
{
    static const char want[] =
        "\x80\x02"
        "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
        "0X\3\0\0\0cpuK\10tQK\0(K\2K\4t(K\4K\1t\x89"
        "ccollections\nOrderedDict\n)RtR.";
    ckpt_buf b = {0};
    ckpt_zip_tensor_head(&b, CKPT_F32, 2, (const int64_t[]){2, 4});
    ck_assert_uint_gt(b.len, 64 + sizeof want);
    ck_assert_mem_eq(b.data + 64, want, sizeof want - 1);
    ckpt_buf_release(&b);
}
END_TEST

/* A payload past 4 GiB exists only as numbers: the tail must carry zip64 fields. */
START_TEST(zip_tensor_tail_past_4_gib_uses_zip64)
{
    const int64_t dims[] = {70000, 70000};
    const uint64_t bytes = (uint64_t)70000 * 70000 * 2;
    ckpt_buf head = {0}, tail = {0};
    ckpt_zip_tensor_head(&head, CKPT_F16, 2, dims);
    ckpt_zip_tensor_tail(&tail, CKPT_F16, 2, dims, 0x12345678);
    ck_assert(!head.failed && !tail.failed);
    ck_assert_uint_eq(head.len % 64, 0);
    /* Descriptor of 24 bytes. */
    ck_assert_mem_eq(tail.data, "PK\7\10", 4);
    ck_assert_uint_eq(ckpt_get_u32(tail.data + 4), 0x12345678);
    ck_assert_uint_eq(ckpt_get_u64(tail.data + 8), bytes);
    ck_assert_uint_eq(ckpt_get_u64(tail.data + 16), bytes);
    /* Header of 'version', whose own offset needs a zip64 field first in its extra data. */
    const uint8_t *local = tail.data + 24;
    ck_assert_mem_eq(local, "PK\3\4", 4);
    const uint8_t *extra = local + 30 + strlen("archive/version");
    ck_assert_uint_eq(ckpt_get_u16(extra), 1);
    ck_assert_uint_eq(ckpt_get_u16(extra + 2), 8);
    ck_assert_uint_eq(ckpt_get_u64(extra + 4), head.len + bytes + 24);
    uint64_t payload = head.len + bytes + 24 + 30 + 15 + ckpt_get_u16(local + 28);
    ck_assert_uint_eq(payload % 64, 0);
    ckpt_buf_release(&head);
    ckpt_buf_release(&tail);
}
END_TEST

START_TEST(zip_tensor_torch_cannot_hold_sets_failed)
{
    static const struct {
        ckpt_dtype dtype;
        int rank;
        int64_t dims[2];
    } rows[] = {
        {CKPT_F6_E2M3, 1, {4}               },
        {CKPT_F4,      2, {4, 3}            },
        {CKPT_F4,      0, {0}               },
        {CKPT_F64,     2, {INT64_MAX / 2, 4}},
        {CKPT_F64,     1, {INT64_MAX / 4}   },
        {CKPT_F32,     1, {-1}              },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_buf b = {0}, tail = {0};
        ckpt_zip_tensor_head(&b, rows[i].dtype, rows[i].rank, rows[i].dims);
        ckpt_zip_tensor_tail(&tail, rows[i].dtype, rows[i].rank, rows[i].dims, 0);
        ck_assert_msg(b.failed && tail.failed, "row %zu", i);
        ckpt_buf_release(&b);
        ckpt_buf_release(&tail);
    }
}
END_TEST

#define LOOP(t, test, table) tcase_add_loop_test(t, test, 0, (int)(sizeof table / sizeof *table))

Suite *suite_zip(void)
{
    Suite *s = suite_create("zip");
    TCase *t = tcase_create("read");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, zip_plain_archive_reads);
    tcase_add_test(t, zip_embedded_archive_reads_relative_to_its_base);
    tcase_add_test(t, zip_deflated_entry_inflates);
    tcase_add_test(t, zip_trailing_junk_is_accepted_and_leading_junk_refused);
    tcase_add_test(t, zip_crc_zero_means_not_computed);
    LOOP(t, zip_lying_directory_is_refused, lies);
    tcase_add_test(t, zip_lying_end_record_is_refused);
    tcase_add_test(t, zip_lying_zip64_record_is_refused);
    tcase_add_test(t, zip_bomb_is_refused_by_the_limit);
    tcase_add_test(t, zip_unknown_method_is_unsupported_when_read);
    tcase_add_loop_test(t, zip_mutation_never_crashes, 0, 2);
    suite_add_tcase(s, t);

    t = tcase_create("write");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, zip_object_matches_torch_record_for_record);
    LOOP(t, zip_tensor_item_reads_back, tensors);
    tcase_add_test(t, zip_tensor_pickle_is_the_documented_example);
    tcase_add_test(t, zip_tensor_tail_past_4_gib_uses_zip64);
    tcase_add_test(t, zip_tensor_torch_cannot_hold_sets_failed);
    suite_add_tcase(s, t);
    return s;
}
