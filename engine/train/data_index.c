/* Megatron's index of a token file (layout in data.h). Nothing in it is believed: counts are held
 * against the file's size before anything is allocated, every sequence against the data file. */
#include "data_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checked.h"
#include "hash.h"
#include "io.h"
#include "le.h"

#define HEADER 34
#define PIECE 4096 /* numbers read at a time */

static const char magic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};

typedef struct reader {
    const char *path;
    int fd;
    uint64_t at, size;
    ckpt_sha256_stream hash;
} reader;

/* The next n bytes, which are part of the digest. */
static ckpt_status read_bytes(reader *r, void *out, size_t n, ckpt_err *err)
{
    ckpt_status status = ckpt_pread_full(r->fd, out, n, r->at, err);
    if (status != CKPT_OK)
        return status;
    r->at += n;
    ckpt_sha256_stream_update2(&r->hash, out, n, NULL, NULL, 0);
    return CKPT_OK;
}

/* Codes of megatron.core.datasets.indexed_dataset.DType. */
static ckpt_status token_type(int code, ckpt_token_type *out, ckpt_err *err)
{
    static const ckpt_token_type types[] = {
        [1] = CKPT_TOKEN_U8,  [2] = CKPT_TOKEN_I8,  [3] = CKPT_TOKEN_I16,
        [4] = CKPT_TOKEN_I32, [5] = CKPT_TOKEN_I64, [8] = CKPT_TOKEN_U16};
    if (code == 6 || code == 7)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "its type is float%d: these are no tokens",
                         code == 6 ? 64 : 32);
    if (code < 1 || code > 8)
        return ckpt_fail(err, CKPT_E_FORMAT, "token type %d, expected 1 to 8", code);
    *out = types[code];
    return CKPT_OK;
}

/* Header; the counts fit the file when this returns. */
static ckpt_status read_header(reader *r, ckpt_data_file *f, ckpt_err *err)
{
    uint8_t h[HEADER];
    if (r->size < HEADER)
        return ckpt_fail(err, CKPT_E_FORMAT, "%llu bytes, an index has at least %d",
                         (unsigned long long)r->size, HEADER);
    ckpt_status status = read_bytes(r, h, sizeof h, err);
    if (status != CKPT_OK)
        return status;
    if (memcmp(h, magic, sizeof magic) != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no index: it does not begin with MMIDIDX");
    if (ckpt_get_u64(h + 9) != 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "version %llu of the index, expected 1",
                         (unsigned long long)ckpt_get_u64(h + 9));
    status = token_type(h[17], &f->type, err);
    if (status != CKPT_OK)
        return status;
    const uint64_t seqs = ckpt_get_u64(h + 18), docs = ckpt_get_u64(h + 26);
    uint64_t a, b, need;
    if (!ckpt_mul_u64(seqs, 12, &a) || !ckpt_mul_u64(docs, 8, &b) || !ckpt_add_u64(a, b, &need) ||
        !ckpt_add_u64(need, HEADER, &need) || (r->size != need && r->size != need + seqs))
        return ckpt_fail(
            err, CKPT_E_FORMAT, "%llu bytes do not hold %llu sequences and %llu document ends",
            (unsigned long long)r->size, (unsigned long long)seqs, (unsigned long long)docs);
    if (docs == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no document ends, expected at least the first 0");
    f->n_seq = (int64_t)seqs;
    f->n_docs = (int64_t)docs;
    return CKPT_OK;
}

/* Lengths to tokens before every sequence. */
static ckpt_status read_lengths(reader *r, ckpt_data_file *f, ckpt_err *err)
{
    uint8_t bytes[PIECE * 4];
    int64_t total = 0;
    for (int64_t i = 0; i < f->n_seq;) {
        const int64_t n = ckpt_min_i64(PIECE, f->n_seq - i);
        ckpt_status status = read_bytes(r, bytes, (size_t)n * 4, err);
        if (status != CKPT_OK)
            return status;
        for (int64_t k = 0; k < n; k++, i++) {
            const int32_t length = (int32_t)ckpt_get_u32(bytes + k * 4);
            if (length < 0)
                return ckpt_fail(err, CKPT_E_FORMAT, "sequence %lld has length %d", (long long)i,
                                 length);
            f->start[i] = total;
            total += length; /* at most 2^31 * 2^60 / 12 sequences of a file: fits */
        }
    }
    f->start[f->n_seq] = total;
    f->tokens = total;
    return CKPT_OK;
}

static ckpt_status read_pointers(reader *r, ckpt_data_file *f, ckpt_err *err)
{
    const int64_t width = ckpt_token_width(f->type);
    for (int64_t i = 0; i < f->n_seq;) {
        const int64_t n = ckpt_min_i64(PIECE, f->n_seq - i);
        ckpt_status status = read_bytes(r, f->pointer + i, (size_t)n * 8, err);
        if (status != CKPT_OK)
            return status;
        for (const int64_t end = i + n; i < end; i++) {
            const int64_t length = f->start[i + 1] - f->start[i];
            int64_t last;
            if (f->pointer[i] < 0 || !ckpt_add_i64(f->pointer[i], length * width, &last) ||
                (uint64_t)last > f->bytes)
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "sequence %lld: %lld tokens of %lld bytes at offset %lld, but %s "
                                 "has %llu bytes",
                                 (long long)i, (long long)length, (long long)width,
                                 (long long)f->pointer[i], f->path, (unsigned long long)f->bytes);
        }
    }
    return CKPT_OK;
}

/* Document ends, in sequences, to tokens before every document. */
static ckpt_status read_documents(reader *r, ckpt_data_file *f, ckpt_err *err)
{
    int64_t before = 0;
    for (int64_t i = 0; i < f->n_docs;) {
        const int64_t n = ckpt_min_i64(PIECE, f->n_docs - i);
        ckpt_status status = read_bytes(r, f->docs + i, (size_t)n * 8, err);
        if (status != CKPT_OK)
            return status;
        for (const int64_t end = i + n; i < end; i++) {
            const int64_t seq = f->docs[i];
            if (seq < before || seq > f->n_seq || (i == 0 && seq != 0))
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "document end %lld is sequence %lld, expected %lld to %lld",
                                 (long long)i, (long long)seq, (long long)before,
                                 (long long)(i == 0 ? 0 : f->n_seq));
            before = seq;
            f->docs[i] = f->start[seq];
        }
    }
    return CKPT_OK;
}

static ckpt_status read_modes(reader *r, ckpt_err *err)
{
    uint8_t bytes[PIECE];
    ckpt_status status = CKPT_OK;
    while (status == CKPT_OK && r->at < r->size)
        status = read_bytes(r, bytes, (size_t)ckpt_min_u64(sizeof bytes, r->size - r->at), err);
    return status;
}

static ckpt_status read_index(reader *r, ckpt_data_file *f, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(read_header(r, f, err));
    f->start = malloc(((size_t)f->n_seq + 1) * sizeof *f->start);
    f->pointer = malloc(((size_t)f->n_seq + 1) * sizeof *f->pointer);
    f->docs = malloc((size_t)f->n_docs * sizeof *f->docs);
    if (f->start == NULL || f->pointer == NULL || f->docs == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(read_lengths(r, f, err));
    CKPT_CHECK(read_pointers(r, f, err));
    CKPT_CHECK(read_documents(r, f, err));
    CKPT_CHECK(read_modes(r, err));
    ckpt_sha256_stream_final(&r->hash, f->index_digest);
done:
    return status;
}

ckpt_status ckpt_data_index_open(ckpt_data_file *f, const char *idx, ckpt_err *err)
{
    ckpt_status status;
    reader r = {.path = idx, .fd = -1};
    ckpt_sha256_stream_init(&r.hash);
    CKPT_CHECK(ckpt_open_read(f->path, &f->fd, &f->bytes, err));
    CKPT_CHECK(ckpt_open_read(idx, &r.fd, &r.size, err));
    CKPT_TRY(read_index(&r, f, err), "%s", idx);
done:
    if (r.fd >= 0)
        close(r.fd);
    return status;
}
