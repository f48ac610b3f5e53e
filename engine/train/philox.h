/* Philox4x32-10: a counter-based random generator. Every number is a pure function of a key and a
 * counter, so streams need no state, no order and no memory.
 *
 *   round:  (x0, x1, x2, x3) <- (hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0))
 *   M0 = 0xD2511F53, M1 = 0xCD9E8D57; between rounds k0 += 0x9E3779B9, k1 += 0xBB67AE85; 10 rounds.
 *
 * Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; known
 * answers of the authors' Random123 in tests/test_philox.c. */
#ifndef CKPT_TRAIN_PHILOX_H
#define CKPT_TRAIN_PHILOX_H

#include <stdint.h>

/* What a counter's fourth word is for, so that uses of one seed never share numbers. */
enum {
    CKPT_PHILOX_INIT = 1,  /* initial values of parameters (init.h) */
    CKPT_PHILOX_ORDER = 2, /* order of samples (data.h) */
    CKPT_PHILOX_DOCS = 3   /* order of documents */
};

void ckpt_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* A stream: numbers 0, 1, 2, ... of (seed, use, stream). use < 2^16. */
typedef struct ckpt_philox_stream {
    uint64_t seed, stream;
    uint32_t use;
} ckpt_philox_stream;

/* The four words of block `i` of a stream, i < 2^48. */
void ckpt_philox_block(const ckpt_philox_stream *s, uint64_t i, uint32_t out[4]);
/* Number i of a stream, uniform in [0, 1), a multiple of 2^-53. One block holds two of them. */
double ckpt_philox_uniform(const ckpt_philox_stream *s, uint64_t i);
/* Number i of a stream, from the standard normal distribution (Box-Muller in double; numbers 2j and
 * 2j+1 are the cosine and the sine of one pair). At most 8.6 in size. */
double ckpt_philox_normal(const ckpt_philox_stream *s, uint64_t i);

/* Where position i (0 <= i < n) goes in permutation number `epoch` of `seed`: a bijection of 0 .. n-1,
 * in constant memory and time. A balanced Feistel network of 8 rounds over the next even number of
 * bits, whose round function is one Philox block; values outside 0 .. n-1 are walked on (fewer than
 * four steps on average). n in 1 .. 2^62; i outside gives i. */
uint64_t ckpt_philox_permute(uint64_t seed, uint32_t use, uint64_t epoch, uint64_t n, uint64_t i);

#endif
