/* SHA-256 on the x86 SHA extensions, one stream and two interleaved.
 *
 * State layout required by sha256rnds2 (Intel SDM): one register holds words A B E F and one
 * C D G H, high to low. Each sha256rnds2 does two rounds; four rounds take one 4-word group of the
 * message schedule, W[i..i+3] in ascending lanes, plus its constants.
 *
 * The unit is bound by the latency of that chain, not by its throughput, so a second independent
 * stream costs little. Two of them need 18 live registers; the second variant is encoded with
 * AVX-512VL, which has 32 (only the sha instructions themselves are limited to the first 16).
 *
 * Per-function target attributes, so that nothing outside them uses these instructions. */
#include "sha256_ni.h"

#if defined(__x86_64__)
#include <immintrin.h>

const uint32_t ckpt_sha256_k[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

#define TARGET_NI __attribute__((target("sha,ssse3,sse4.1")))
#define TARGET_EVEX __attribute__((target("sha,ssse3,sse4.1,avx512f,avx512vl,avx512bw")))

/* All macros below work on the variables of their caller: for stream s, s##_abef, s##_cdgh, the
 * schedule s##_w0..w3, and `swap`, the byte order mask. */
#define STATE_IN(s, h)                                                                             \
    __m128i s##_lo = _mm_loadu_si128((const __m128i *)(const void *)(h));                          \
    __m128i s##_hi = _mm_loadu_si128((const __m128i *)(const void *)((h) + 4));                    \
    s##_lo = _mm_shuffle_epi32(s##_lo, 0xb1);                                                      \
    s##_hi = _mm_shuffle_epi32(s##_hi, 0x1b);                                                      \
    __m128i s##_abef = _mm_alignr_epi8(s##_lo, s##_hi, 8);                                         \
    __m128i s##_cdgh = _mm_blend_epi16(s##_hi, s##_lo, 0xf0);                                      \
    __m128i s##_w0, s##_w1, s##_w2, s##_w3

#define STATE_OUT(s, h)                                                                            \
    do {                                                                                           \
        s##_lo = _mm_shuffle_epi32(s##_abef, 0x1b);                                                \
        s##_hi = _mm_shuffle_epi32(s##_cdgh, 0xb1);                                                \
        _mm_storeu_si128((__m128i *)(void *)(h), _mm_blend_epi16(s##_lo, s##_hi, 0xf0));           \
        _mm_storeu_si128((__m128i *)(void *)((h) + 4), _mm_alignr_epi8(s##_hi, s##_lo, 8));        \
    } while (0)

#define LOAD(s, w, p, i)                                                                           \
    s##_##w =                                                                                      \
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)((p) + 16 * (i))), swap)

/* Words t..t+3 from the sixteen before them, t-16 in w0 .. t-4 in w3; they replace w0. */
#define EXTEND(s, w0, w1, w2, w3)                                                                  \
    s##_##w0 = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(s##_##w0, s##_##w1),        \
                                                  _mm_alignr_epi8(s##_##w3, s##_##w2, 4)),         \
                                    s##_##w3)

#define ROUNDS4(s, w, i)                                                                           \
    do {                                                                                           \
        __m128i m = _mm_add_epi32(                                                                 \
            s##_##w, _mm_load_si128((const __m128i *)(const void *)(ckpt_sha256_k + 4 * (i))));    \
        s##_cdgh = _mm_sha256rnds2_epu32(s##_cdgh, s##_abef, m);                                   \
        s##_abef = _mm_sha256rnds2_epu32(s##_abef, s##_cdgh, _mm_shuffle_epi32(m, 0x0e));          \
    } while (0)

#define FIRST1(w, i)                                                                               \
    LOAD(a, w, a, i);                                                                              \
    ROUNDS4(a, w, i)
#define NEXT1(w0, w1, w2, w3, i)                                                                   \
    EXTEND(a, w0, w1, w2, w3);                                                                     \
    ROUNDS4(a, w0, i)
#define FIRST2(w, i)                                                                               \
    LOAD(a, w, a, i);                                                                              \
    LOAD(b, w, b, i);                                                                              \
    ROUNDS4(a, w, i);                                                                              \
    ROUNDS4(b, w, i)
#define NEXT2(w0, w1, w2, w3, i)                                                                   \
    EXTEND(a, w0, w1, w2, w3);                                                                     \
    EXTEND(b, w0, w1, w2, w3);                                                                     \
    ROUNDS4(a, w0, i);                                                                             \
    ROUNDS4(b, w0, i)
#define SIXTEEN(NEXT, i)                                                                           \
    NEXT(w0, w1, w2, w3, i);                                                                       \
    NEXT(w1, w2, w3, w0, (i) + 1);                                                                 \
    NEXT(w2, w3, w0, w1, (i) + 2);                                                                 \
    NEXT(w3, w0, w1, w2, (i) + 3)
#define BLOCK(FIRST, NEXT)                                                                         \
    FIRST(w0, 0);                                                                                  \
    FIRST(w1, 1);                                                                                  \
    FIRST(w2, 2);                                                                                  \
    FIRST(w3, 3);                                                                                  \
    SIXTEEN(NEXT, 4);                                                                              \
    SIXTEEN(NEXT, 8);                                                                              \
    SIXTEEN(NEXT, 12)

TARGET_NI void ckpt_sha256_blocks_ni(uint32_t h[8], const uint8_t *a, size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    STATE_IN(a, h);
    for (; blocks > 0; blocks--, a += 64) {
        const __m128i abef = a_abef, cdgh = a_cdgh;
        BLOCK(FIRST1, NEXT1);
        a_abef = _mm_add_epi32(a_abef, abef);
        a_cdgh = _mm_add_epi32(a_cdgh, cdgh);
    }
    STATE_OUT(a, h);
}

#define BLOCKS2_BODY                                                                               \
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);                   \
    STATE_IN(a, ha);                                                                               \
    STATE_IN(b, hb);                                                                               \
    for (; blocks > 0; blocks--, a += 64, b += 64) {                                               \
        const __m128i abef = a_abef, cdgh = a_cdgh, abef2 = b_abef, cdgh2 = b_cdgh;                \
        BLOCK(FIRST2, NEXT2);                                                                      \
        a_abef = _mm_add_epi32(a_abef, abef);                                                      \
        a_cdgh = _mm_add_epi32(a_cdgh, cdgh);                                                      \
        b_abef = _mm_add_epi32(b_abef, abef2);                                                     \
        b_cdgh = _mm_add_epi32(b_cdgh, cdgh2);                                                     \
    }                                                                                              \
    STATE_OUT(a, ha);                                                                              \
    STATE_OUT(b, hb)

TARGET_NI void ckpt_sha256_blocks2_ni(uint32_t ha[8], const uint8_t *a, uint32_t hb[8],
                                      const uint8_t *b, size_t blocks)
{
    BLOCKS2_BODY;
}

TARGET_EVEX void ckpt_sha256_blocks2_evex(uint32_t ha[8], const uint8_t *a, uint32_t hb[8],
                                          const uint8_t *b, size_t blocks)
{
    BLOCKS2_BODY;
}
#endif
