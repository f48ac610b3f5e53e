/* The filters of HDF5 that are read and written, without libhdf5, so that chunks are decoded and
 * encoded by all threads at once and damage is an error of ours.
 *
 * Source: HDF5 File Format Specification 3.0, "Data Storage - Filter Pipeline", and its source code:
 * H5Zshuffle.c (byte j of element i moves to j * n + i; what is left of a whole element stays at the
 * end), H5Zdeflate.c (a zlib stream), H5Zfletcher32.c (Fletcher-32 of 16-bit big-endian words, an odd
 * last byte padded with zero; appended as u32 little-endian). */
#include "hdf5_file.h"

#include "le.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define FLETCHER_BYTES ((size_t)4)

uint32_t ckpt_hdf5_fletcher32(const uint8_t *p, size_t n)
{
    enum { WORDS = 360 }; /* before the sums of 16-bit words could overflow 32 bits */
    uint32_t a = 0, b = 0;
    for (size_t words = n / 2; words > 0;) {
        size_t now = words > WORDS ? WORDS : words;
        words -= now;
        for (; now > 0; now--, p += 2) {
            a += (uint32_t)p[0] << 8 | p[1];
            b += a;
        }
        a = (a & 0xffff) + (a >> 16);
        b = (b & 0xffff) + (b >> 16);
    }
    if (n % 2 != 0) {
        a += (uint32_t)*p << 8;
        b += a;
        a = (a & 0xffff) + (a >> 16);
        b = (b & 0xffff) + (b >> 16);
    }
    a = (a & 0xffff) + (a >> 16);
    b = (b & 0xffff) + (b >> 16);
    return b << 16 | a;
}

static void shuffle(const uint8_t *in, size_t n, size_t elem, uint8_t *out)
{
    size_t count = n / elem;
    for (size_t j = 0; j < elem; j++)
        for (size_t i = 0; i < count; i++)
            out[j * count + i] = in[i * elem + j];
    memcpy(out + count * elem, in + count * elem, n - count * elem);
}

static void unshuffle(const uint8_t *in, size_t n, size_t elem, uint8_t *out)
{
    size_t count = n / elem;
    for (size_t j = 0; j < elem; j++)
        for (size_t i = 0; i < count; i++)
            out[i * elem + j] = in[j * count + i];
    memcpy(out + count * elem, in + count * elem, n - count * elem);
}

/* ---- encoding --------------------------------------------------------------------------------- */

size_t ckpt_hdf5_bound(const ckpt_hdf5_pipeline *p, size_t n)
{
    return n + FLETCHER_BYTES * (size_t)p->n;
}

ckpt_status ckpt_hdf5_encode(const ckpt_hdf5_pipeline *p, const uint8_t *raw, size_t n, uint8_t *a,
                             uint8_t *b, ckpt_encoded *out, ckpt_err *err)
{
    const uint8_t *now = raw;
    uint8_t *next = a;
    uint32_t mask = 0;
    for (int i = 0; i < p->n; i++) {
        uLongf len = (uLongf)n;
        switch (p->filter[i].kind) {
        case CKPT_HDF5_SHUFFLE:
            shuffle(now, n, p->filter[i].value, next);
            break;
        case CKPT_HDF5_DEFLATE: {
            int rc = compress2(next, &len, now, (uLong)n, (int)p->filter[i].value);
            if (rc == Z_MEM_ERROR)
                return ckpt_fail(err, CKPT_E_NOMEM, "out of memory while compressing");
            if (rc != Z_OK || len >= n) { /* no room: it would grow */
                mask |= (uint32_t)1 << i;
                continue;
            }
            n = len;
            break;
        }
        case CKPT_HDF5_FLETCHER32:
            memcpy(next, now, n);
            ckpt_put_u32(next + n, ckpt_hdf5_fletcher32(now, n));
            n += FLETCHER_BYTES;
            break;
        }
        now = next;
        next = now == a ? b : a;
    }
    *out = (ckpt_encoded){.data = now, .len = n, .mask = mask};
    return CKPT_OK;
}

/* ---- decoding --------------------------------------------------------------------------------- */

static ckpt_status check_fletcher(const uint8_t *p, size_t *n, ckpt_err *err)
{
    if (*n < FLETCHER_BYTES)
        return ckpt_fail(err, CKPT_E_FORMAT, "%zu bytes are too short for a Fletcher-32 checksum",
                         *n);
    *n -= FLETCHER_BYTES;
    uint32_t stated = ckpt_get_u32(p + *n), sum = ckpt_hdf5_fletcher32(p, *n);
    /* Versions before 1.6.3 swapped the bytes of each half. */
    uint32_t swapped = (sum & 0x00ff00ff) << 8 | (sum >> 8 & 0x00ff00ff);
    if (stated != sum && stated != swapped)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "Fletcher-32 checksum is %08" PRIx32 ", the data gives %08" PRIx32, stated,
                         sum);
    return CKPT_OK;
}

static ckpt_status inflate_all(const uint8_t *in, size_t n, uint8_t *out, size_t cap, size_t *len,
                               ckpt_err *err)
{
    uLongf room = (uLongf)cap;
    uLong used = (uLong)n;
    int rc = uncompress2(out, &room, in, &used);
    if (rc == Z_MEM_ERROR)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory while decompressing");
    if (rc == Z_BUF_ERROR && room == cap)
        return ckpt_fail(err, CKPT_E_FORMAT, "compressed data holds more than %zu bytes", cap);
    if (rc != Z_OK)
        return ckpt_fail(err, CKPT_E_FORMAT, "compressed data is damaged");
    *len = room;
    return CKPT_OK;
}

ckpt_status ckpt_hdf5_decode(const ckpt_hdf5_pipeline *p, uint32_t mask, const uint8_t *stored,
                             size_t n, uint8_t *out, size_t want, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t cap = ckpt_hdf5_bound(p, want);
    uint8_t *room = p->n > 0 ? malloc(2 * cap + 1) : NULL;
    const uint8_t *now = stored;
    if (p->n > 0 && room == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a chunk of %zu bytes", want);
    uint8_t *next = room;
    for (int i = p->n - 1; i >= 0; i--) {
        if (mask >> i & 1)
            continue;
        if (p->filter[i].kind == CKPT_HDF5_FLETCHER32) {
            CKPT_CHECK(check_fletcher(now, &n, err));
            continue;
        }
        if (p->filter[i].kind == CKPT_HDF5_DEFLATE) {
            CKPT_CHECK(inflate_all(now, n, next, cap, &n, err));
        } else {
            if (n > cap) {
                status =
                    ckpt_fail(err, CKPT_E_FORMAT, "stored as %zu bytes, expected %zu", n, want);
                goto done;
            }
            unshuffle(now, n, p->filter[i].value, next);
        }
        now = next;
        next = now == room ? room + cap : room;
    }
    if (n != want)
        status = ckpt_fail(err, CKPT_E_FORMAT, "decodes to %zu bytes, expected %zu", n, want);
    else
        memcpy(out, now, want);
done:
    free(room);
    return status;
}
