/* SHA-256 and the digests of product specification section 4. Only hash.c includes OpenSSL. */
#ifndef CKPT_HASH_H
#define CKPT_HASH_H

#include "arena.h"
#include "dtype.h"

#define CKPT_SHA256_LEN 32
#define CKPT_LEAF_BYTES ((uint64_t)1 << 20) /* Merkle leaf, bytes */

/* One incremental SHA-256. A plain value: copy it, drop it; nothing is allocated and nothing fails. */
typedef struct ckpt_sha256_stream {
    uint32_t h[8];
    uint8_t block[64]; /* the first `fill` bytes wait for a whole block */
    size_t fill;
    uint64_t total; /* bytes so far */
} ckpt_sha256_stream;

typedef struct ckpt_sha256 {
    ckpt_sha256_stream s;
} ckpt_sha256;

/* The same with an interface that could fail. init may be called again after release. final resets
 * for reuse. */
ckpt_status ckpt_sha256_init(ckpt_sha256 *ctx, ckpt_err *err) CKPT_MUST_USE;
void ckpt_sha256_update(ckpt_sha256 *ctx, const void *p, size_t n);
void ckpt_sha256_final(ckpt_sha256 *ctx, uint8_t out[CKPT_SHA256_LEN]);
void ckpt_sha256_release(ckpt_sha256 *ctx);

/* Streams can be advanced together, two or sixteen at a time, for a file digest and its tensor
 * leaves in one pass. available() says whether they run on the processor's SHA instructions (else
 * on OpenSSL's block function). */
bool ckpt_sha256_stream_available(void);
void ckpt_sha256_stream_init(ckpt_sha256_stream *s);
/* Append pa[na] to a and pb[nb] to b, interleaved while both have whole blocks. b may be NULL if
 * nb is 0, pa or pb if its length is 0. a and b must differ; the data may be the same. */
void ckpt_sha256_stream_update2(ckpt_sha256_stream *a, const void *pa, size_t na,
                                ckpt_sha256_stream *b, const void *pb, size_t nb);
/* Up to CKPT_SHA256_LANES distinct streams together, stream i advancing by p[i][0 .. n[i]): sixteen
 * lanes of AVX-512 where the processor has it and enough streams have data, else two by two. */
#define CKPT_SHA256_LANES 16
void ckpt_sha256_stream_update_many(ckpt_sha256_stream *const *s, const void *const *p,
                                    const size_t *n, int count);
/* Whether that pays for `count` streams of equal length: the wide kernel is there and they fill it. */
bool ckpt_sha256_stream_wide(int count);
/* Whether a file digest and leaves run faster as two streams side by side than the file alone and
 * the leaves in sixteen lanes: measured once, in some 100 us, because processors differ (Zen 5 gains a
 * third, Granite Rapids loses as much). */
bool ckpt_sha256_stream_pairs(void);
/* Leaves s ready for a new message. */
void ckpt_sha256_stream_final(ckpt_sha256_stream *s, uint8_t out[CKPT_SHA256_LEN]);

/* RFC 6962 section 2.1: leaf = SHA256(0x00 || data), node = SHA256(0x01 || left || right),
 * the empty tree is SHA256(""). */
void ckpt_merkle_leaf(ckpt_sha256 *ctx, const void *p, size_t n, uint8_t out[CKPT_SHA256_LEN]);
/* Tree over n leaf hashes stored one after another (n * 32 bytes). Iterative: the largest power
 * of two splits; any n. `leaves` is not modified. */
void ckpt_merkle_root(ckpt_sha256 *ctx, const uint8_t *leaves, size_t n,
                      uint8_t out[CKPT_SHA256_LEN]);

/* Number of 1 MiB leaves of a tensor of `bytes` bytes (0 for an empty tensor). */
static inline uint64_t ckpt_leaf_count(uint64_t bytes)
{
    return bytes / CKPT_LEAF_BYTES + (bytes % CKPT_LEAF_BYTES != 0);
}

/* Tensor digest from its leaf hashes:
 * SHA256("ckpt.tensor.v1\0" || dtype name || "\0" || rank u32 || dims u64... || merkle root). */
void ckpt_tensor_digest(ckpt_sha256 *ctx, ckpt_dtype dtype, int rank, const int64_t *dims,
                        const uint8_t *leaves, size_t n, uint8_t out[CKPT_SHA256_LEN]);
/* Root over tensors: RFC 6962 tree of leaves name || "\0" || tensor digest, sorted by name bytes.
 * names and digests (n * 32) are given in that order already.
 * Errors: CKPT_E_FORMAT a name occurs twice; CKPT_E_INTERNAL not sorted. */
ckpt_status ckpt_root_digest(const char *const *names, const uint8_t *digests, size_t n,
                             uint8_t out[CKPT_SHA256_LEN], ckpt_err *err) CKPT_MUST_USE;

/* Lower-case hex, NUL-terminated, and its strict inverse (exactly 64 digits, lower case). */
void ckpt_hex(const uint8_t digest[CKPT_SHA256_LEN], char out[2 * CKPT_SHA256_LEN + 1]);
bool ckpt_unhex(const char *hex, uint8_t out[CKPT_SHA256_LEN]);

#endif
