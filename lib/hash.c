/* SHA-256 (FIPS 180-4), RFC 6962 Merkle trees, and the digests of the product specification,
 * section 4:
 *   tensor = SHA256("ckpt.tensor.v1\0" || dtype name || "\0" || rank u32 || dims u64... || M),
 *            little-endian, M the Merkle tree hash over 1 MiB leaves of the tensor's bytes;
 *   root   = Merkle tree hash over the leaves  name || "\0" || tensor digest, sorted by name.
 *
 * OpenSSL's EVP is the reference of the tests, its block function the fallback; EVP itself allocates
 * at every start of a digest and, in 3.0, crashes when that fails. Streams run on the SHA-NI kernel, one or two at a time,
 * and on the sixteen-lane AVX-512 kernel where cpuid offers them. */
#include "hash.h"

#include "le.h"
#include "sha256_ni.h"

#include <assert.h>
#define OPENSSL_SUPPRESS_DEPRECATED /* SHA256_CTX, for its visible state */
#include <openssl/sha.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* ---- choice of implementation, once per process ---- */

static struct {
    ckpt_sha256_blocks_fn *blocks;
    ckpt_sha256_blocks2_fn *blocks2; /* NULL: one after the other */
    void (*blocks16)(uint32_t *const h[16], const uint8_t *const p[16],
                     size_t blocks); /* or NULL */
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
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        impl.blocks16 = ckpt_sha256_blocks16;
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

/* Where we have no kernel of our own: OpenSSL's, through the interface that shows the state. */
void ckpt_sha256_blocks_openssl(uint32_t h[8], const uint8_t *p, size_t blocks)
{
    SHA256_CTX c;
    SHA256_Init(&c);
    for (int i = 0; i < 8; i++)
        c.h[i] = h[i];
    SHA256_Update(&c, p, 64 * blocks);
    for (int i = 0; i < 8; i++)
        h[i] = c.h[i];
}

static void impl_init(void)
{
    impl.blocks = ckpt_sha256_blocks_openssl;
    choose_kernels();
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

/* Fewer streams than this run faster two by two on the SHA unit than in sixteen lanes. */
#define WIDE_MIN 10

/* Blocks that at least WIDE_MIN inputs have in full, through the sixteen-lane kernel. Idle lanes
 * repeat the data of a busy one into a state that is thrown away. */
static void run_wide(input *in, int count)
{
    for (;;) {
        uint32_t spare[8], *h[16];
        const uint8_t *p[16];
        int lane[16], busy = 0;
        size_t blocks = SIZE_MAX;
        for (int i = 0; i < count; i++)
            if (in[i].n >= 64) {
                blocks = in[i].n / 64 < blocks ? in[i].n / 64 : blocks;
                h[busy] = in[i].s->h;
                p[busy] = in[i].p;
                lane[busy++] = i;
            }
        if (busy < WIDE_MIN)
            return;
        memcpy(spare, initial_state, sizeof spare);
        for (int i = busy; i < 16; i++) {
            h[i] = spare;
            p[i] = p[0];
        }
        impl.blocks16(h, p, blocks);
        for (int i = 0; i < busy; i++) {
            in[lane[i]].p += 64 * blocks;
            in[lane[i]].n -= 64 * blocks;
        }
    }
}

bool ckpt_sha256_stream_wide(int count)
{
    pthread_once(&impl_once, impl_init);
    return impl.blocks16 != NULL && count >= WIDE_MIN;
}

/* Fastest of a few runs over PROBE blocks of 1, 2 or 16 streams, in nanoseconds of this thread. */
static double probe(int streams)
{
    enum { PROBE = 128, RUNS = 3 };
    static const uint8_t data[64 * PROBE];
    uint32_t state[16][8], *h[16];
    const uint8_t *p[16];
    double best = 0;
    for (int i = 0; i < 16; i++) {
        memcpy(state[i], initial_state, sizeof state[i]);
        h[i] = state[i];
        p[i] = data;
    }
    for (int run = 0; run < RUNS; run++) {
        struct timespec a, b;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
        if (streams == 16)
            impl.blocks16(h, p, PROBE);
        else if (streams == 2)
            impl.blocks2(h[0], data, h[1], data, PROBE);
        else
            impl.blocks(h[0], data, PROBE);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
        double ns = 1e9 * (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec);
        best = run == 0 || ns < best ? ns : best;
    }
    return best;
}

static pthread_once_t pairs_once = PTHREAD_ONCE_INIT;
static bool pairs_pay;

static void measure_pairs(void)
{
    pthread_once(&impl_once, impl_init);
    if (impl.blocks2 == NULL)
        return;
    double pair = probe(2), leaf = impl.blocks16 != NULL ? probe(16) / 16 : pair / 2;
    pairs_pay = pair < 0.95 * (probe(1) + leaf);
}

bool ckpt_sha256_stream_pairs(void)
{
    pthread_once(&pairs_once, measure_pairs);
    return pairs_pay;
}

void ckpt_sha256_stream_update_many(ckpt_sha256_stream *const *s, const void *const *p,
                                    const size_t *n, int count)
{
    input in[CKPT_SHA256_LANES];
    assert(count >= 0 && count <= CKPT_SHA256_LANES);
    if (impl.blocks16 != NULL && count >= WIDE_MIN) {
        for (int i = 0; i < count; i++) {
            in[i] = (input){s[i], p[i], n[i]};
            s[i]->total += n[i];
            if (top_up(&in[i]))
                compress(s[i], s[i]->block, 1);
        }
        run_wide(in, count);
        for (int i = 0; i < count; i++)
            finish_update(&in[i]);
        return;
    }
    for (int i = 0; i + 1 < count; i += 2)
        ckpt_sha256_stream_update2(s[i], p[i], n[i], s[i + 1], p[i + 1], n[i + 1]);
    if (count % 2 != 0)
        ckpt_sha256_stream_update2(s[count - 1], p[count - 1], n[count - 1], NULL, NULL, 0);
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

ckpt_status ckpt_sha256_init(ckpt_sha256 *ctx, ckpt_err *err)
{
    (void)err;
    ckpt_sha256_stream_init(&ctx->s);
    return CKPT_OK;
}

void ckpt_sha256_update(ckpt_sha256 *ctx, const void *p, size_t n)
{
    ckpt_sha256_stream_update2(&ctx->s, p, n, NULL, NULL, 0);
}

void ckpt_sha256_final(ckpt_sha256 *ctx, uint8_t out[CKPT_SHA256_LEN])
{
    ckpt_sha256_stream_final(&ctx->s, out);
}

void ckpt_sha256_release(ckpt_sha256 *ctx)
{
    *ctx = (ckpt_sha256){0};
}

/* ---- Merkle trees ---- */

void ckpt_merkle_leaf(ckpt_sha256 *ctx, const void *p, size_t n, uint8_t out[CKPT_SHA256_LEN])
{
    static const uint8_t prefix = 0x00;
    ckpt_sha256_update(ctx, &prefix, 1);
    ckpt_sha256_update(ctx, p, n);
    ckpt_sha256_final(ctx, out);
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
