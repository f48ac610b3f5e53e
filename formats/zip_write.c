/* Zip writer, byte for byte in the manner of torch's PyTorchStreamWriter over miniz
 * (caffe2/serialize/inline_container.cc): torch-formats.md section 3.
 *
 * local header  sizes and CRC 0, flags 0x0808, or 0x0800 for an empty payload
 * local extra   [zip64: usize and csize 0 if size >= 2^32-1, header offset if >= 2^32-1]
 *               'FB', u16 n, n * 'Z', so that the payload starts at a multiple of 64
 * payload
 * descriptor    unless empty: 50 4b 07 08, crc, csize, usize; 8-byte sizes where zip64 is present
 * central records with true values, zip64 end record, locator, end record */
#include "zip.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

#include "checked.h"
#include "le.h"
#include "pickle.h"

#define ALIGN 64
#define BIG ((uint64_t)UINT32_MAX)
#define ROOT CKPT_ZIP_ROOT

typedef ckpt_zip_record record;

static void put16(ckpt_buf *b, unsigned v)
{
    uint8_t p[2];
    ckpt_put_u16(p, (uint16_t)v);
    ckpt_buf_append(b, p, sizeof p);
}

static void put32(ckpt_buf *b, uint32_t v)
{
    uint8_t p[4];
    ckpt_put_u32(p, v);
    ckpt_buf_append(b, p, sizeof p);
}

static void put64(ckpt_buf *b, uint64_t v)
{
    uint8_t p[8];
    ckpt_put_u64(p, v);
    ckpt_buf_append(b, p, sizeof p);
}

static uint32_t clip32(uint64_t v)
{
    return v < BIG ? (uint32_t)v : UINT32_MAX;
}

static bool is_zip64(const record *r)
{
    return r->size >= BIG || r->header >= BIG;
}

/* Flags, method 0, time 0, date 0. */
static void put_common(ckpt_buf *b, const record *r)
{
    put16(b, r->size ? 0x0808 : 0x0800);
    put16(b, 0);
    put32(b, 0);
}

void ckpt_zip_put_local(ckpt_buf *b, const record *r)
{
    static const char fill[ALIGN] =
        "ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ"
        "Z";
    unsigned zip64 = (r->size >= BIG ? 16U : 0) + (r->header >= BIG ? 8U : 0);
    size_t name = strlen(r->name);
    uint64_t start = r->header + 30 + name + 4 + (zip64 ? 4 + zip64 : 0);
    unsigned pad = (unsigned)(-start % ALIGN);
    ckpt_buf_append(b, "PK\3\4", 4);
    put16(b, 0);
    put_common(b, r);
    put32(b, 0);
    put64(b, 0);
    put16(b, (unsigned)name);
    put16(b, (zip64 ? 4 + zip64 : 0) + 4 + pad);
    ckpt_buf_puts(b, r->name);
    if (zip64) {
        put16(b, 1);
        put16(b, zip64);
        if (r->size >= BIG) {
            put64(b, r->size);
            put64(b, 0);
        }
        if (r->header >= BIG)
            put64(b, r->header);
    }
    ckpt_buf_append(b, "FB", 2);
    put16(b, pad);
    ckpt_buf_append(b, fill, pad);
}

void ckpt_zip_put_descriptor(ckpt_buf *b, const record *r)
{
    if (r->size == 0)
        return;
    ckpt_buf_append(b, "PK\7\10", 4);
    put32(b, r->crc);
    for (int i = 0; i < 2; i++) {
        if (is_zip64(r))
            put64(b, r->size);
        else
            put32(b, (uint32_t)r->size);
    }
}

void ckpt_zip_put_central(ckpt_buf *b, const record *r)
{
    unsigned zip64 = (r->size >= BIG ? 16U : 0) + (r->header >= BIG ? 8U : 0);
    ckpt_buf_append(b, "PK\1\2", 4);
    put32(b, 0);
    put_common(b, r);
    put32(b, r->crc);
    put32(b, clip32(r->size));
    put32(b, clip32(r->size));
    put16(b, (unsigned)strlen(r->name));
    put16(b, zip64 ? 4 + zip64 : 0);
    put16(b, 0);
    put64(b, 0);
    put32(b, clip32(r->header));
    ckpt_buf_puts(b, r->name);
    if (!zip64)
        return;
    put16(b, 1);
    put16(b, zip64);
    if (r->size >= BIG) {
        put64(b, r->size);
        put64(b, r->size);
    }
    if (r->header >= BIG)
        put64(b, r->header);
}

void ckpt_zip_put_end(ckpt_buf *b, uint64_t n, uint64_t size, uint64_t at)
{
    unsigned few = n < UINT16_MAX ? (unsigned)n : UINT16_MAX;
    ckpt_buf_append(b, "PK\6\6", 4);
    put64(b, 44);
    put16(b, 0x031e);
    put16(b, 45);
    put64(b, 0);
    put64(b, n);
    put64(b, n);
    put64(b, size);
    put64(b, at);
    ckpt_buf_append(b, "PK\6\7", 4);
    put32(b, 0);
    put64(b, at + size);
    put32(b, 1);
    ckpt_buf_append(b, "PK\5\6", 4);
    put32(b, 0);
    put16(b, few);
    put16(b, few);
    put32(b, clip32(size));
    put32(b, clip32(at));
    put16(b, 0);
}

/* Central directory and end records; `at` is the offset they start at. */
static void put_directory(ckpt_buf *b, const record *records, size_t n, uint64_t at)
{
    size_t start = b->len;
    for (size_t i = 0; i < n; i++)
        ckpt_zip_put_central(b, &records[i]);
    ckpt_zip_put_end(b, n, b->len - start, at);
}

void ckpt_zip_put_record(ckpt_buf *b, uint64_t at, record *r, const void *payload, size_t n)
{
    r->header = at;
    r->size = n;
    r->crc = (uint32_t)crc32_z(0, payload, n);
    ckpt_zip_put_local(b, r);
    ckpt_buf_append(b, payload, n);
    ckpt_zip_put_descriptor(b, r);
}

static void put_dims(ckpt_buf *b, int rank, const int64_t *dims)
{
    ckpt_buf_putc(b, '(');
    for (int i = 0; i < rank; i++)
        ckpt_pkl_put_int(b, dims[i]);
    ckpt_buf_putc(b, 't');
}

/* torch's contiguous strides: an extent of 0 counts as 1. False on overflow. */
static bool strides_of(int rank, const int64_t *dims, int64_t *stride)
{
    int64_t step = 1;
    for (int i = rank; i-- > 0;) {
        stride[i] = step;
        if (dims[i] > 1 && !ckpt_mul_i64(step, dims[i], &step))
            return false;
    }
    return true;
}

bool ckpt_zip_put_tensor(ckpt_buf *b, ckpt_dtype dtype, int rank, const int64_t *dims, uint64_t key)
{
    const ckpt_dtype_info *info = ckpt_dtype_get(dtype);
    int64_t shape[CKPT_MAX_RANK], stride[CKPT_MAX_RANK], numel;
    uint64_t bytes;
    char text[24];
    if (!info->torch || rank < 0 || rank > CKPT_MAX_RANK)
        return false;
    for (int i = 0; i < rank; i++)
        shape[i] = dims[i];
    /* torch counts pairs of F4 elements along the last axis. */
    if (info->bits == 4 && (rank == 0 || shape[rank - 1] % 2))
        return false;
    if (info->bits == 4)
        shape[rank - 1] /= 2;
    if (!ckpt_numel(rank, dims, &numel) || !ckpt_dtype_bytes(dtype, numel, &bytes) ||
        bytes > INT64_MAX / 2 || !strides_of(rank, shape, stride))
        return false;
    bool typed = info->storage != NULL && info->bits >= 8;
    ckpt_pkl_put_global(b, "torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    ckpt_buf_puts(b, "((");
    ckpt_pkl_put_str(b, "storage");
    ckpt_pkl_put_global(b, typed ? "torch" : "torch.storage",
                        typed ? info->storage : "UntypedStorage");
    snprintf(text, sizeof text, "%" PRIu64, key);
    ckpt_pkl_put_str(b, text);
    ckpt_pkl_put_str(b, "cpu");
    ckpt_pkl_put_int(b, (int64_t)(typed ? bytes / ((uint64_t)info->bits / 8) : bytes));
    ckpt_buf_puts(b, "tQ");
    ckpt_pkl_put_int(b, 0);
    put_dims(b, rank, shape);
    put_dims(b, rank, stride);
    ckpt_pkl_put_bool(b, false);
    ckpt_pkl_put_global(b, "collections", "OrderedDict");
    ckpt_buf_puts(b, ")R");
    if (!typed)
        ckpt_pkl_put_global(b, "torch", info->torch);
    ckpt_buf_puts(b, "tR");
    return true;
}

/* Everything up to the payload; fills records[0..2] for data.pkl, byteorder, data/0. */
static void put_head(ckpt_buf *b, ckpt_dtype dtype, int rank, const int64_t *dims,
                     record records[4])
{
    int64_t numel;
    uint64_t bytes = 0;
    ckpt_buf pickle = {0};
    size_t base = b->len;
    ckpt_pkl_begin(&pickle);
    if (!ckpt_zip_put_tensor(&pickle, dtype, rank, dims, 0) || !ckpt_numel(rank, dims, &numel) ||
        !ckpt_dtype_bytes(dtype, numel, &bytes)) {
        ckpt_buf_release(&pickle);
        b->failed = true;
        return;
    }
    ckpt_pkl_end(&pickle);
    records[0].name = ROOT "/data.pkl";
    ckpt_zip_put_record(b, b->len - base, &records[0], pickle.data, pickle.len);
    records[1].name = ROOT "/byteorder";
    ckpt_zip_put_record(b, b->len - base, &records[1], "little", 6);
    records[2] = (record){.name = ROOT "/data/0", .size = bytes, .header = b->len - base};
    ckpt_zip_put_local(b, &records[2]);
    b->failed |= pickle.failed;
    ckpt_buf_release(&pickle);
}

void ckpt_zip_tensor_head(ckpt_buf *out, ckpt_dtype dtype, int rank, const int64_t *dims)
{
    record records[4] = {0};
    put_head(out, dtype, rank, dims, records);
}

void ckpt_zip_tensor_tail(ckpt_buf *out, ckpt_dtype dtype, int rank, const int64_t *dims,
                          uint32_t payload_crc)
{
    record records[4] = {0};
    ckpt_buf head = {0};
    put_head(&head, dtype, rank, dims, records);
    out->failed |= head.failed;
    if (!head.failed) {
        size_t start = out->len;
        uint64_t at = head.len + records[2].size;
        records[2].crc = payload_crc;
        ckpt_zip_put_descriptor(out, &records[2]);
        records[3] = (record){.name = ROOT "/version",
                              .size = 2,
                              .header = at + (out->len - start),
                              .crc = (uint32_t)crc32_z(0, (const uint8_t *)"3\n", 2)};
        ckpt_zip_put_local(out, &records[3]);
        ckpt_buf_puts(out, "3\n");
        ckpt_zip_put_descriptor(out, &records[3]);
        put_directory(out, records, 4, at + (out->len - start));
    }
    ckpt_buf_release(&head);
}

void ckpt_zip_object(ckpt_buf *out, const uint8_t *pickle, size_t n)
{
    record records[3] = {
        {.name = ROOT "/data.pkl"}, {.name = ROOT "/byteorder"}, {.name = ROOT "/version"}};
    size_t base = out->len;
    ckpt_zip_put_record(out, out->len - base, &records[0], pickle, n);
    ckpt_zip_put_record(out, out->len - base, &records[1], "little", 6);
    ckpt_zip_put_record(out, out->len - base, &records[2], "3\n", 2);
    put_directory(out, records, 3, out->len - base);
}
