/* SHA-256 (FIPS 180-4), RFC 6962 Merkle trees, and the digests of the product specification,
 * section 4:
 *   tensor = SHA256("ckpt.tensor.v1\0" || dtype name || "\0" || rank u32 || dims u64... || M),
 *            little-endian, M the Merkle tree hash over 1 MiB leaves of the tensor's bytes;
 *   root   = Merkle tree hash over the leaves  name || "\0" || tensor digest, sorted by name.
 *
 * OpenSSL's EVP is the reference and the fallback. Paired leaves and streams use the interleaved
 * SHA-NI kernel where cpuid offers it. */
#include "hash.h"

#include "le.h"
#include "sha256_ni.h"

#include <assert.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* ---- choice of implementation, once per process ---- */

static struct {
    EVP_MD *md; /* fetched once: a fetch per digest costs more than a small digest */
    ckpt_sha256_blocks_fn *blocks;
    ckpt_sha256_blocks2_fn *blocks2; /* NULL: one after the other */
} impl;
static pthread_once_t impl_once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
static bool cpu_has_sha(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return false;
    bool sse = (c >> 9 & 1) && (c >> 19 & 1); /* SSSE3, SSE4.1 */
    return sse && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

static void choose_kernels(void)
{
    if (!cpu_has_sha())
        return;
    impl.blocks = ckpt_sha256_blocks_ni;
    /* The builtin also asks the operating system whether it saves the wide registers. */
    impl.blocks2 = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
                       ? ckpt_sha256_blocks2_evex
                       : ckpt_sha256_blocks2_ni;
}
#else
static void choose_kernels(void)
{
}
#endif

static void impl_init(void)
{
    impl.md = EVP_MD_fetch(NULL, "SHA2-256", NULL);
    impl.blocks = ckpt_sha256_blocks_portable;
    choose_kernels();
}

/* ---- EVP ---- */

ckpt_status ckpt_sha256_init(ckpt_sha256 *ctx, ckpt_err *err)
{
    *ctx = (ckpt_sha256){0};
    pthread_once(&impl_once, impl_init);
    if (!impl.md)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "OpenSSL offers no SHA-256");
    EVP_MD_CTX *evp = EVP_MD_CTX_new();
    if (!evp)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a SHA-256 context");
    if (EVP_DigestInit_ex2(evp, impl.md, NULL) != 1) {
        EVP_MD_CTX_free(evp);
        return ckpt_fail(err, CKPT_E_INTERNAL, "OpenSSL could not start SHA-256");
    }
    ctx->evp = evp;
    return CKPT_OK;
}

void ckpt_sha256_update(ckpt_sha256 *ctx, const void *p, size_t n)
{
    if (n > 0 && EVP_DigestUpdate(ctx->evp, p, n) != 1)
        ctx->failed = true;
}

void ckpt_sha256_final(ckpt_sha256 *ctx, uint8_t out[CKPT_SHA256_LEN])
{
    if (EVP_DigestFinal_ex(ctx->evp, out, NULL) != 1 || ctx->failed)
        memset(out, 0, CKPT_SHA256_LEN);
    ctx->failed = EVP_DigestInit_ex2(ctx->evp, NULL, NULL) != 1;
}

void ckpt_sha256_release(ckpt_sha256 *ctx)
{
    EVP_MD_CTX_free(ctx->evp);
    *ctx = (ckpt_sha256){0};
}

/* ---- two streams ---- */

static const uint32_t initial_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static void compress(ckpt_sha256_stream *s, const uint8_t *p, size_t blocks)
{
    if (blocks > 0)
        impl.blocks(s->h, p, blocks);
}

static void compress2(ckpt_sha256_stream *a, const uint8_t *pa, ckpt_sha256_stream *b,
                      const uint8_t *pb, size_t blocks)
{
    if (blocks > 0 && impl.blocks2) {
        impl.blocks2(a->h, pa, b->h, pb, blocks);
    } else {
        compress(a, pa, blocks);
        compress(b, pb, blocks);
    }
}

bool ckpt_sha256_stream_available(void)
{
    pthread_once(&impl_once, impl_init);
    return impl.blocks2 != NULL;
}

void ckpt_sha256_stream_init(ckpt_sha256_stream *s)
{
    pthread_once(&impl_once, impl_init);
    *s = (ckpt_sha256_stream){0};
    memcpy(s->h, initial_state, sizeof s->h);
}

/* Input of one stream on its way through update2. */
typedef struct input {
    ckpt_sha256_stream *s;
    const uint8_t *p;
    size_t n;
} input;

/* Move bytes into the partial block; true if it is now whole and must be compressed. */
static bool top_up(input *in)
{
    ckpt_sha256_stream *s = in->s;
    if (in->n == 0 || s->fill == 0)
        return false;
    size_t k = sizeof s->block - s->fill;
    if (k > in->n)
        k = in->n;
    memcpy(s->block + s->fill, in->p, k);
    s->fill += k;
    in->p += k;
    in->n -= k;
    if (s->fill < sizeof s->block)
        return false;
    s->fill = 0;
    return true;
}

/* Whole blocks of one stream, then keep the rest. */
static void finish_update(input *in)
{
    ckpt_sha256_stream *s = in->s;
    if (in->n == 0)
        return;
    size_t blocks = in->n / 64, rest = in->n % 64;
    compress(s, in->p, blocks);
    if (rest > 0) {
        memcpy(s->block, in->p + 64 * blocks, rest);
        s->fill = rest;
    }
}

void ckpt_sha256_stream_update2(ckpt_sha256_stream *a, const void *pa, size_t na,
                                ckpt_sha256_stream *b, const void *pb, size_t nb)
{
    assert(a != b);
    input x = {a, pa, na}, y = {b, pb, nb};
    if (na > 0)
        a->total += na;
    if (nb > 0)
        b->total += nb;
    bool xa = top_up(&x), yb = top_up(&y);
    if (xa && yb)
        compress2(a, a->block, b, b->block, 1);
    else if (xa)
        compress(a, a->block, 1);
    else if (yb)
        compress(b, b->block, 1);

    size_t both = (x.n < y.n ? x.n : y.n) / 64;
    if (both > 0) {
        compress2(a, x.p, b, y.p, both);
        x.p += 64 * both;
        x.n -= 64 * both;
        y.p += 64 * both;
        y.n -= 64 * both;
    }
    finish_update(&x);
    finish_update(&y);
}

/* Append the padding: 0x80, zeros, and the length in bits, in one block or two. */
static size_t pad(const ckpt_sha256_stream *s, uint8_t tail[128])
{
    size_t blocks = s->fill < 56 ? 1 : 2;
    memset(tail, 0, 128);
    memcpy(tail, s->block, s->fill);
    tail[s->fill] = 0x80;
    ckpt_put_u64(tail + 64 * blocks - 8, __builtin_bswap64(s->total * 8));
    return blocks;
}

static void put_state(const ckpt_sha256_stream *s, uint8_t out[CKPT_SHA256_LEN])
{
    for (size_t i = 0; i < 8; i++)
        ckpt_put_u32(out + 4 * i, __builtin_bswap32(s->h[i]));
}

void ckpt_sha256_stream_final(ckpt_sha256_stream *s, uint8_t out[CKPT_SHA256_LEN])
{
    uint8_t tail[128];
    compress(s, tail, pad(s, tail));
    put_state(s, out);
    ckpt_sha256_stream_init(s);
}

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void expand(uint32_t w[64], const uint8_t *p)
{
    for (int t = 0; t < 16; t++)
        w[t] = __builtin_bswap32(ckpt_get_u32(p + 4 * t));
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
}

void ckpt_sha256_blocks_portable(uint32_t h[8], const uint8_t *p, size_t blocks)
{
    for (; blocks > 0; blocks--, p += 64) {
        uint32_t w[64], v[8];
        expand(w, p);
        memcpy(v, h, sizeof v);
        for (int t = 0; t < 64; t++) {
            uint32_t a = v[0], e = v[4];
            uint32_t t1 = v[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) +
                          ((e & v[5]) ^ (~e & v[6])) + round_constants[t] + w[t];
            uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) +
                          ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
            memmove(v + 1, v, 7 * sizeof v[0]);
            v[4] += t1;
            v[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++)
            h[i] += v[i];
    }
}

/* ---- Merkle trees ---- */

void ckpt_merkle_leaf(ckpt_sha256 *ctx, const void *p, size_t n, uint8_t out[CKPT_SHA256_LEN])
{
    static const uint8_t prefix = 0x00;
    ckpt_sha256_update(ctx, &prefix, 1);
    ckpt_sha256_update(ctx, p, n);
    ckpt_sha256_final(ctx, out);
}

void ckpt_merkle_leaf2(ckpt_sha256 *ctx, const void *a, size_t na, uint8_t out_a[CKPT_SHA256_LEN],
                       const void *b, size_t nb, uint8_t out_b[CKPT_SHA256_LEN])
{
    if (!impl.blocks2) {
        ckpt_merkle_leaf(ctx, a, na, out_a);
        ckpt_merkle_leaf(ctx, b, nb, out_b);
        return;
    }
    /* The prefix byte starts the first block, which update2 completes from the data; the rest is
     * read in place, one byte off its alignment. */
    ckpt_sha256_stream x, y;
    ckpt_sha256_stream_init(&x);
    ckpt_sha256_stream_init(&y);
    x.fill = y.fill = 1;
    x.total = y.total = 1;
    ckpt_sha256_stream_update2(&x, a, na, &y, b, nb);
    uint8_t tail_x[128], tail_y[128];
    size_t nx = pad(&x, tail_x), ny = pad(&y, tail_y);
    if (nx == ny) {
        compress2(&x, tail_x, &y, tail_y, nx);
    } else {
        compress(&x, tail_x, nx);
        compress(&y, tail_y, ny);
    }
    put_state(&x, out_a);
    put_state(&y, out_b);
}

/* The complete subtrees of the leaves so far, largest first: one per set bit of count. Splitting
 * at the largest power of two below n, as RFC 6962 does, is joining these from the right. */
typedef struct merkle {
    uint8_t node[64][CKPT_SHA256_LEN];
    int depth;
    uint64_t count;
} merkle;

static void merkle_join(ckpt_sha256 *ctx, merkle *m)
{
    static const uint8_t prefix = 0x01;
    m->depth--;
    ckpt_sha256_update(ctx, &prefix, 1);
    ckpt_sha256_update(ctx, m->node[m->depth - 1], CKPT_SHA256_LEN);
    ckpt_sha256_update(ctx, m->node[m->depth], CKPT_SHA256_LEN);
    ckpt_sha256_final(ctx, m->node[m->depth - 1]);
}

static void merkle_push(ckpt_sha256 *ctx, merkle *m, const uint8_t leaf[CKPT_SHA256_LEN])
{
    memcpy(m->node[m->depth++], leaf, CKPT_SHA256_LEN);
    m->count++;
    for (uint64_t c = m->count; (c & 1) == 0; c >>= 1)
        merkle_join(ctx, m);
}

static void merkle_final(ckpt_sha256 *ctx, merkle *m, uint8_t out[CKPT_SHA256_LEN])
{
    if (m->count == 0) {
        ckpt_sha256_final(ctx, out);
        return;
    }
    while (m->depth > 1)
        merkle_join(ctx, m);
    memcpy(out, m->node[0], CKPT_SHA256_LEN);
}

void ckpt_merkle_root(ckpt_sha256 *ctx, const uint8_t *leaves, size_t n,
                      uint8_t out[CKPT_SHA256_LEN])
{
    merkle m;
    m.depth = 0;
    m.count = 0;
    for (size_t i = 0; i < n; i++)
        merkle_push(ctx, &m, leaves + i * CKPT_SHA256_LEN);
    merkle_final(ctx, &m, out);
}

/* ---- digests ---- */

void ckpt_tensor_digest(ckpt_sha256 *ctx, ckpt_dtype dtype, int rank, const int64_t *dims,
                        const uint8_t *leaves, size_t n, uint8_t out[CKPT_SHA256_LEN])
{
    static const char domain[] = "ckpt.tensor.v1"; /* its NUL is hashed too, as the name's is */
    uint8_t root[CKPT_SHA256_LEN], word[8];
    ckpt_merkle_root(ctx, leaves, n, root);
    const char *name = ckpt_dtype_get(dtype)->name;
    ckpt_sha256_update(ctx, domain, sizeof domain);
    ckpt_sha256_update(ctx, name, strlen(name) + 1);
    ckpt_put_u32(word, (uint32_t)rank);
    ckpt_sha256_update(ctx, word, 4);
    for (int i = 0; i < rank; i++) {
        ckpt_put_u64(word, (uint64_t)dims[i]);
        ckpt_sha256_update(ctx, word, 8);
    }
    ckpt_sha256_update(ctx, root, sizeof root);
    ckpt_sha256_final(ctx, out);
}

static void root_leaf(ckpt_sha256 *ctx, const char *name, const uint8_t *digest,
                      uint8_t out[CKPT_SHA256_LEN])
{
    static const uint8_t prefix = 0x00;
    ckpt_sha256_update(ctx, &prefix, 1);
    ckpt_sha256_update(ctx, name, strlen(name) + 1);
    ckpt_sha256_update(ctx, digest, CKPT_SHA256_LEN);
    ckpt_sha256_final(ctx, out);
}

ckpt_status ckpt_root_digest(const char *const *names, const uint8_t *digests, size_t n,
                             uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_sha256 ctx;
    merkle m;
    m.depth = 0;
    m.count = 0;
    ckpt_status status = ckpt_sha256_init(&ctx, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < n; i++) {
        int order = i == 0 ? -1 : strcmp(names[i - 1], names[i]); /* compares unsigned bytes */
        if (order == 0)
            status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s' occurs twice", names[i]);
        else if (order > 0)
            status = ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%s' before '%s' in the root digest",
                               names[i - 1], names[i]);
        if (status != CKPT_OK)
            goto done;
        uint8_t leaf[CKPT_SHA256_LEN];
        root_leaf(&ctx, names[i], digests + i * CKPT_SHA256_LEN, leaf);
        merkle_push(&ctx, &m, leaf);
    }
    merkle_final(&ctx, &m, out);
done:
    ckpt_sha256_release(&ctx);
    return status;
}

void ckpt_hex(const uint8_t digest[CKPT_SHA256_LEN], char out[2 * CKPT_SHA256_LEN + 1])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < CKPT_SHA256_LEN; i++) {
        out[2 * i] = digits[digest[i] >> 4];
        out[2 * i + 1] = digits[digest[i] & 15];
    }
    out[2 * CKPT_SHA256_LEN] = '\0';
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool ckpt_unhex(const char *hex, uint8_t out[CKPT_SHA256_LEN])
{
    for (size_t i = 0; i < CKPT_SHA256_LEN; i++) {
        int high = hex_value(hex[2 * i]);
        int low = high < 0 ? -1 : hex_value(hex[2 * i + 1]); /* never reads past a NUL */
        if (low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return hex[2 * CKPT_SHA256_LEN] == '\0';
}
