/* SHA-256 streams and kernels against EVP, RFC 6962 vectors, tensor and root digests. */
#include "hash.h"
#include "sha256_ni.h"

#include <check.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_hash(void);

static uint64_t rng_state = 0x853c49e6748fea9bu;

static uint64_t rng(void)
{
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return rng_state * 2685821657736338717u;
}

static uint8_t *random_bytes(size_t n)
{
    uint8_t *p = malloc(n);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(rng() >> 56);
    return p;
}

/* The oracle: one-shot EVP over prefix (if >= 0) and data. */
static void evp(int prefix, const void *p, size_t n, uint8_t out[32])
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t byte = (uint8_t)prefix;
    ck_assert(EVP_DigestInit_ex(ctx, EVP_sha256(), NULL));
    if (prefix >= 0)
        ck_assert(EVP_DigestUpdate(ctx, &byte, 1));
    ck_assert(EVP_DigestUpdate(ctx, p, n));
    ck_assert(EVP_DigestFinal_ex(ctx, out, NULL));
    EVP_MD_CTX_free(ctx);
}

static ckpt_sha256 new_ctx(void)
{
    ckpt_sha256 ctx;
    ckpt_err err;
    ck_assert_int_eq(ckpt_sha256_init(&ctx, &err), CKPT_OK);
    return ctx;
}

static void check_hex(const uint8_t digest[32], const char *want)
{
    char hex[65];
    ckpt_hex(digest, hex);
    ck_assert_str_eq(hex, want);
}

/* ---- kernels ---- */

START_TEST(blocks_kernels_agree_with_evp)
{
    /* A message whose padding is written by hand, so that only the kernel is under test. */
    enum { BLOCKS = 9 };
    uint8_t *p = random_bytes(64 * BLOCKS + 1), want[32];
    size_t n = 64 * BLOCKS - 9;
    evp(-1, p + 1, n, want); /* + 1: unaligned */
    p[1 + n] = 0x80;
    for (int i = 0; i < 8; i++)
        p[1 + n + 1 + (size_t)i] = (uint8_t)((uint64_t)n * 8 >> (56 - 8 * i));
    ckpt_sha256_stream s;
    ckpt_sha256_stream_init(&s);
    uint32_t h[4][8];
    for (int i = 0; i < 4; i++)
        memcpy(h[i], s.h, sizeof h[i]);
    ckpt_sha256_blocks_openssl(h[0], p + 1, 4);
    ckpt_sha256_blocks_openssl(h[0], p + 1 + 256, BLOCKS - 4);
    int known = 1;
#if defined(__x86_64__)
    if (ckpt_sha256_stream_available()) {
        ckpt_sha256_blocks_ni(h[1], p + 1, BLOCKS);
        ckpt_sha256_blocks2_ni(h[2], p + 1, h[3], p + 1, BLOCKS);
        known = 4;
    }
#endif
    for (int i = 0; i < known; i++)
        for (size_t k = 0; k < 32; k++)
            ck_assert_uint_eq(h[i][k / 4] >> (24 - 8 * (k % 4)) & 255, want[k]);
    free(p);
}
END_TEST

/* ---- incremental EVP ---- */

START_TEST(sha256_final_leaves_the_context_reusable)
{
    ckpt_sha256 ctx = new_ctx();
    uint8_t out[32];
    for (int i = 0; i < 3; i++) {
        ckpt_sha256_update(&ctx, "a", 1);
        ckpt_sha256_update(&ctx, NULL, 0);
        ckpt_sha256_update(&ctx, "bc", 2);
        ckpt_sha256_final(&ctx, out);
        check_hex(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        ckpt_sha256_final(&ctx, out);
        check_hex(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
    ckpt_sha256_release(&ctx);
    ckpt_sha256_release(&ctx);
    ctx = new_ctx();
    ckpt_sha256_final(&ctx, out);
    check_hex(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    ckpt_sha256_release(&ctx);
}
END_TEST

/* ---- two streams ---- */

static void check_pair(const uint8_t *a, size_t na, const uint8_t *b, size_t nb)
{
    uint8_t want[2][32], got[32];
    ckpt_sha256_stream x, y;
    evp(-1, a, na, want[0]);
    evp(-1, b, nb, want[1]);
    ckpt_sha256_stream_init(&x);
    ckpt_sha256_stream_init(&y);
    ckpt_sha256_stream_update2(&x, a, na, &y, b, nb);
    ckpt_sha256_stream_final(&x, got);
    ck_assert_msg(memcmp(got, want[0], 32) == 0, "first of %zu, %zu", na, nb);
    ckpt_sha256_stream_final(&y, got);
    ck_assert_msg(memcmp(got, want[1], 32) == 0, "second of %zu, %zu", na, nb);
}

START_TEST(stream_every_short_length_equals_evp)
{
    uint8_t *p = random_bytes(1000);
    for (size_t n = 0; n <= 300; n++) {
        check_pair(p, n, p + 301, n);
        check_pair(p + 3, n, p + 400, 300 - n);
        check_pair(p, 128, p + 128, n);
        check_pair(p, n, p, n); /* the same data */
    }
    free(p);
}
END_TEST

START_TEST(stream_lengths_around_a_leaf_equal_evp)
{
    size_t mib = CKPT_LEAF_BYTES;
    uint8_t *p = random_bytes(2 * mib + 500);
    for (size_t d = 0; d < 140; d += d < 3 ? 1 : 31) {
        check_pair(p, mib - d, p + mib, mib + d);
        check_pair(p + d, mib, p + 1, d);
    }
    free(p);
}
END_TEST

START_TEST(stream_random_splits_equal_evp)
{
    enum { N = 20000 };
    uint8_t *p = random_bytes(N), want[2][32], got[32];
    for (int round = 0; round < 400; round++) {
        size_t na = rng() % N, nb = rng() % N, i = 0, j = 0;
        size_t step = round % 4 == 0 ? 70 : round % 4 == 1 ? 1000 : 5000;
        evp(-1, p, na, want[0]);
        evp(-1, p + N - nb, nb, want[1]);
        ckpt_sha256_stream x, y;
        ckpt_sha256_stream_init(&x);
        ckpt_sha256_stream_init(&y);
        while (i < na || j < nb) {
            size_t k = rng() % step, l = rng() % step;
            k = rng() % 5 == 0 ? 0 : k < na - i ? k : na - i;
            l = rng() % 5 == 0 ? 0 : l < nb - j ? l : nb - j;
            const uint8_t *pa = k == 0 ? NULL : p + i, *pb = l == 0 ? NULL : p + N - nb + j;
            if (round & 1) /* both orders */
                ckpt_sha256_stream_update2(&x, pa, k, &y, pb, l);
            else
                ckpt_sha256_stream_update2(&y, pb, l, &x, pa, k);
            i += k;
            j += l;
        }
        ckpt_sha256_stream_final(&x, got);
        ck_assert_mem_eq(got, want[0], 32);
        ckpt_sha256_stream_final(&y, got);
        ck_assert_mem_eq(got, want[1], 32);
    }
    free(p);
}
END_TEST

START_TEST(stream_alone_and_reused_equals_evp)
{
    uint8_t *p = random_bytes(5000), want[32], got[32];
    ckpt_sha256_stream s;
    ckpt_sha256_stream_init(&s);
    for (size_t n = 0; n < 5000; n += 137) {
        evp(-1, p, n, want);
        ckpt_sha256_stream_update2(&s, p, n / 3, NULL, NULL, 0);
        ckpt_sha256_stream_update2(&s, p + n / 3, n - n / 3, NULL, NULL, 0);
        ck_assert_uint_eq(s.total, n);
        ckpt_sha256_stream_final(&s, got); /* final starts the next */
        ck_assert_mem_eq(got, want, 32);
    }
    free(p);
}
END_TEST

/* Any number of lanes, ragged lengths, several rounds of updates. */
START_TEST(stream_many_lanes_equal_evp)
{
    enum { N = 40000 };
    uint8_t *data = random_bytes(N), want[32], got[32];
    for (int round = 0; round < 600; round++) {
        ckpt_sha256_stream streams[CKPT_SHA256_LANES], *s[CKPT_SHA256_LANES];
        const void *p[CKPT_SHA256_LANES];
        size_t n[CKPT_SHA256_LANES], start[CKPT_SHA256_LANES], total[CKPT_SHA256_LANES] = {0};
        int count = 1 + round % CKPT_SHA256_LANES, steps = (int)(rng() % 5);
        for (int i = 0; i < count; i++) {
            s[i] = &streams[i];
            ckpt_sha256_stream_init(s[i]);
            start[i] = rng() % (N / 4);
        }
        for (int k = 0; k < steps; k++) {
            for (int i = 0; i < count; i++) {
                p[i] = data + start[i] + total[i];
                n[i] = rng() % 9 == 0 ? 0 : rng() % (round % 2 ? 300 : 5000);
                total[i] += n[i];
            }
            ckpt_sha256_stream_update_many(s, p, n, count);
        }
        for (int i = 0; i < count; i++) {
            evp(-1, data + start[i], total[i], want);
            ckpt_sha256_stream_final(s[i], got);
            ck_assert_msg(memcmp(got, want, 32) == 0, "lane %d of %d, %zu bytes", i, count,
                          total[i]);
        }
    }
    free(data);
}
END_TEST

/* ---- RFC 6962 ---- */

/* The certificate-transparency project's reference tree: leaves and the root of the first 1..8. */
static const struct {
    const char *leaf;
    size_t n;
    const char *root;
} ct_rows[] = {
    {"",                                                                 0,  "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"},
    {"\x00",                                                             1,  "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"},
    {"\x10",                                                             1,  "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"},
    {"\x20\x21",                                                         2,  "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"},
    {"\x30\x31",                                                         2,  "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4"},
    {"\x40\x41\x42\x43",                                                 4,  "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef"},
    {"\x50\x51\x52\x53\x54\x55\x56\x57",                                 8,
     "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c"                                                                        },
    {"\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f", 16,
     "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"                                                                        },
};

START_TEST(merkle_root_matches_certificate_transparency_vectors)
{
    ckpt_sha256 ctx = new_ctx();
    uint8_t leaves[8][32], out[32];
    ckpt_merkle_root(&ctx, NULL, 0, out);
    check_hex(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    for (size_t i = 0; i < 8; i++) {
        ckpt_merkle_leaf(&ctx, ct_rows[i].leaf, ct_rows[i].n, leaves[i]);
        ckpt_merkle_root(&ctx, leaves[0], i + 1, out);
        check_hex(out, ct_rows[i].root);
    }
    ckpt_sha256_release(&ctx);
}
END_TEST

/* The definition, word for word: split at the largest power of two smaller than n. */
static void naive_root(const uint8_t *leaves, size_t n, uint8_t out[32])
{
    uint8_t pair[64];
    if (n == 1) {
        memcpy(out, leaves, 32);
        return;
    }
    size_t k = 1;
    while (2 * k < n)
        k *= 2;
    naive_root(leaves, k, pair);
    naive_root(leaves + 32 * k, n - k, pair + 32);
    evp(1, pair, sizeof pair, out);
}

START_TEST(merkle_root_equals_the_recursive_definition)
{
    ckpt_sha256 ctx = new_ctx();
    uint8_t *leaves = random_bytes(1025 * 32), *copy = malloc(1025 * 32), want[32], got[32];
    memcpy(copy, leaves, 1025 * 32);
    for (size_t n = 0; n <= 1025; n += n < 70 ? 1 : 191) {
        if (n == 0)
            evp(-1, "", 0, want);
        else
            naive_root(leaves, n, want);
        ckpt_merkle_root(&ctx, leaves, n, got);
        ck_assert_msg(memcmp(got, want, 32) == 0, "%zu leaves", n);
    }
    ck_assert_mem_eq(copy, leaves, 1025 * 32);
    ckpt_sha256_release(&ctx);
    free(leaves), free(copy);
}
END_TEST

/* ---- digests ---- */

START_TEST(leaf_count_covers_the_last_partial_leaf)
{
    ck_assert_uint_eq(ckpt_leaf_count(0), 0);
    ck_assert_uint_eq(ckpt_leaf_count(1), 1);
    ck_assert_uint_eq(ckpt_leaf_count(CKPT_LEAF_BYTES), 1);
    ck_assert_uint_eq(ckpt_leaf_count(CKPT_LEAF_BYTES + 1), 2);
    ck_assert_uint_eq(ckpt_leaf_count(UINT64_MAX), UINT64_C(1) << 44);
}
END_TEST

/* Goldens computed with Python's hashlib from the specification's formula. */
START_TEST(tensor_digest_matches_the_specification)
{
    ckpt_sha256 ctx = new_ctx();
    uint8_t data[24], leaf[32], out[32];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)i;
    ckpt_merkle_leaf(&ctx, data, sizeof data, leaf);
    const int64_t dims[] = {2, 3};
    ckpt_tensor_digest(&ctx, CKPT_F32, 2, dims, leaf, 1, out);
    check_hex(out, "5595d9c80598fb6b446ceacdfc3c95fc2565321b740f654d14bf4de42e4aad98");
    ckpt_tensor_digest(&ctx, CKPT_F32, 0, NULL, leaf, 1, out);
    check_hex(out, "272bf208301369d05ca8e30f672b40c0d6e028e2aa88bb4e3f2b3e393836ef16");
    const int64_t empty[] = {0, 5};
    ckpt_tensor_digest(&ctx, CKPT_F8_E4M3, 2, empty, NULL, 0, out);
    check_hex(out, "6239494473a30d8bdf24953132666ed183641d67a752e70f96e10e3f25db9b45");
    ckpt_sha256_release(&ctx);
}
END_TEST

START_TEST(tensor_digest_of_several_leaves_matches_the_specification)
{
    ckpt_sha256 ctx = new_ctx();
    size_t n = 2 * CKPT_LEAF_BYTES + 6;
    uint8_t *data = malloc(n), leaves[3][32], out[32];
    for (size_t i = 0; i < n; i++)
        data[i] = (uint8_t)(i * 7 + (i >> 8));
    ckpt_merkle_leaf(&ctx, data, CKPT_LEAF_BYTES, leaves[0]);
    ckpt_merkle_leaf(&ctx, data + CKPT_LEAF_BYTES, CKPT_LEAF_BYTES, leaves[1]);
    ckpt_merkle_leaf(&ctx, data + 2 * CKPT_LEAF_BYTES, 6, leaves[2]);
    const int64_t dims[] = {(int64_t)n / 2};
    ckpt_tensor_digest(&ctx, CKPT_BF16, 1, dims, leaves[0], 3, out);
    check_hex(out, "5ba438e2d0167a348cf1c0595d2995b40dcfc85112866bc125db98806feae08c");
    ckpt_sha256_release(&ctx);
    free(data);
}
END_TEST

START_TEST(root_digest_matches_the_specification)
{
    static const char *const names[] = {"", "a", "a.b", "b", "\xc3\xa9"};
    uint8_t digests[5 * 32], out[32];
    ckpt_err err;
    for (size_t i = 0; i < sizeof digests; i++)
        digests[i] = (uint8_t)(i * 3);
    ck_assert_int_eq(ckpt_root_digest(names, digests, 5, out, &err), CKPT_OK);
    check_hex(out, "166757e3f36a4c7977b26f223e12f3aac1630587b4980656ec9b35f5121138a5");
    ck_assert_int_eq(ckpt_root_digest(names, digests, 1, out, &err), CKPT_OK);
    check_hex(out, "7bc404e55c9c53330df5d5302f1a0fe6870b9ea19b27fff34d85e3eca5f1ebd8");
    ck_assert_int_eq(ckpt_root_digest(NULL, NULL, 0, out, &err), CKPT_OK);
    check_hex(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}
END_TEST

START_TEST(root_digest_twice_or_unsorted_is_refused)
{
    static const char *const twice[] = {"a", "b", "b"}, *const unsorted[] = {"b", "a"};
    uint8_t digests[3 * 32] = {0}, out[32];
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_root_digest(twice, digests, 3, out, &err), CKPT_E_FORMAT);
    ck_assert_str_eq(err.text, "tensor 'b' occurs twice");
    ck_assert_int_eq(ckpt_root_digest(unsorted, digests, 2, out, &err), CKPT_E_INTERNAL);
    ck_assert_str_eq(err.text, "tensor 'b' before 'a' in the root digest");
}
END_TEST

START_TEST(hex_round_trips_and_is_strict)
{
    uint8_t digest[32], back[32];
    char hex[65], bad[67];
    for (size_t i = 0; i < 32; i++)
        digest[i] = (uint8_t)(i * 37 + 9);
    ckpt_hex(digest, hex);
    ck_assert_uint_eq(strlen(hex), 64);
    ck_assert(ckpt_unhex(hex, back));
    ck_assert_mem_eq(back, digest, 32);
    for (size_t n = 0; n < 64; n++) { /* every truncation */
        memcpy(bad, hex, 65);
        bad[n] = '\0';
        ck_assert(!ckpt_unhex(bad, back));
    }
    memcpy(bad, hex, 64);
    memcpy(bad + 64, "0", 2);
    ck_assert(!ckpt_unhex(bad, back));
    static const char wrong[] = {'g', 'A', ' ', '/', ':', '`', '\xff'};
    for (size_t k = 0; k < sizeof wrong; k++) {
        memcpy(bad, hex, 65);
        bad[k * 9] = wrong[k];
        ck_assert(!ckpt_unhex(bad, back));
    }
}
END_TEST

Suite *suite_hash(void)
{
    Suite *suite = suite_create("hash");
    TCase *tc = tcase_create("hash");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, blocks_kernels_agree_with_evp);
    tcase_add_test(tc, sha256_final_leaves_the_context_reusable);
    tcase_add_test(tc, stream_every_short_length_equals_evp);
    tcase_add_test(tc, stream_lengths_around_a_leaf_equal_evp);
    tcase_add_test(tc, stream_random_splits_equal_evp);
    tcase_add_test(tc, stream_alone_and_reused_equals_evp);
    tcase_add_test(tc, stream_many_lanes_equal_evp);
    tcase_add_test(tc, merkle_root_matches_certificate_transparency_vectors);
    tcase_add_test(tc, merkle_root_equals_the_recursive_definition);
    tcase_add_test(tc, leaf_count_covers_the_last_partial_leaf);
    tcase_add_test(tc, tensor_digest_matches_the_specification);
    tcase_add_test(tc, tensor_digest_of_several_leaves_matches_the_specification);
    tcase_add_test(tc, root_digest_matches_the_specification);
    tcase_add_test(tc, root_digest_twice_or_unsorted_is_refused);
    tcase_add_test(tc, hex_round_trips_and_is_strict);
    suite_add_tcase(suite, tc);
    return suite;
}
