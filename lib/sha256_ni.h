/* SHA-256 compression functions (FIPS 180-4, section 6.2.2): state and whole 64-byte blocks in,
 * state out. Internal to hash.c and its test; padding and digests are hash.c's. p may be unaligned.
 *
 * The *_ni functions exist on x86-64 only and need SHA, SSSE3 and SSE4.1 (*_evex: AVX-512VL too;
 * blocks16: AVX-512F and BW); the caller has checked cpuid. */
#ifndef CKPT_SHA256_NI_H
#define CKPT_SHA256_NI_H

#include <stddef.h>
#include <stdint.h>

typedef void ckpt_sha256_blocks_fn(uint32_t h[8], const uint8_t *p, size_t blocks);
/* Two independent streams, block by block side by side: one stream leaves the unit idle for most
 * of each round's latency. */
typedef void ckpt_sha256_blocks2_fn(uint32_t ha[8], const uint8_t *a, uint32_t hb[8],
                                    const uint8_t *b, size_t blocks);

/* OpenSSL's, everywhere (hash.c). */
ckpt_sha256_blocks_fn ckpt_sha256_blocks_openssl;

#if defined(__x86_64__)
extern const uint32_t ckpt_sha256_k[64]; /* round constants, 16-byte aligned */
ckpt_sha256_blocks_fn ckpt_sha256_blocks_ni;
ckpt_sha256_blocks2_fn ckpt_sha256_blocks2_ni, ckpt_sha256_blocks2_evex;
/* Sixteen streams. Lanes may share state or data: such lanes then write one result. */
void ckpt_sha256_blocks16(uint32_t *const h[16], const uint8_t *const p[16], size_t blocks);
#endif

#endif
