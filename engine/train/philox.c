/* Philox4x32-10, and what is made of it (philox.h). */
#include "philox.h"

#include <math.h>

#define ROUNDS 10
#define FEISTEL_ROUNDS 8

void ckpt_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t x0 = counter[0], x1 = counter[1], x2 = counter[2], x3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int r = 0; r < ROUNDS; r++) {
        const uint64_t a = (uint64_t)0xD2511F53U * x0, b = (uint64_t)0xCD9E8D57U * x2;
        const uint32_t y0 = (uint32_t)(b >> 32) ^ x1 ^ k0, y2 = (uint32_t)(a >> 32) ^ x3 ^ k1;
        x1 = (uint32_t)b;
        x3 = (uint32_t)a;
        x0 = y0;
        x2 = y2;
        k0 += 0x9E3779B9U;
        k1 += 0xBB67AE85U;
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}

/* Counter: 48 bits of i, 16 bits of use, 64 bits of the stream. */
void ckpt_philox_block(const ckpt_philox_stream *s, uint64_t i, uint32_t out[4])
{
    const uint32_t counter[4] = {(uint32_t)i, (uint32_t)(i >> 32 & 0xFFFF) | s->use << 16,
                                 (uint32_t)s->stream, (uint32_t)(s->stream >> 32)};
    const uint32_t key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)};
    ckpt_philox(counter, key, out);
}

/* In [0, 1): the upper 53 of 64 bits. */
static double unit(uint32_t lo, uint32_t hi)
{
    const uint64_t bits = (uint64_t)hi << 32 | lo;
    return (double)(bits >> 11) * 0x1p-53;
}

double ckpt_philox_uniform(const ckpt_philox_stream *s, uint64_t i)
{
    uint32_t w[4];
    ckpt_philox_block(s, i / 2, w);
    return i % 2 == 0 ? unit(w[0], w[1]) : unit(w[2], w[3]);
}

double ckpt_philox_normal(const ckpt_philox_stream *s, uint64_t i)
{
    uint32_t w[4];
    ckpt_philox_block(s, i / 2, w);
    /* 1 - u is in (0, 1], so that the logarithm is finite. */
    const double radius = sqrt(-2 * log(1 - unit(w[0], w[1])));
    const double angle = 6.283185307179586476925 * unit(w[2], w[3]);
    return radius * (i % 2 == 0 ? cos(angle) : sin(angle));
}

/* One pass of the network over values of 2 * half bits. */
static uint64_t feistel(const ckpt_philox_stream *s, unsigned half, uint64_t x)
{
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t r = 0; r < FEISTEL_ROUNDS; r++) {
        uint32_t w[4];
        ckpt_philox_block(s, right << 4 | r, w);
        const uint64_t next = (left ^ ((uint64_t)w[1] << 32 | w[0])) & mask;
        left = right;
        right = next;
    }
    return left << half | right;
}

uint64_t ckpt_philox_permute(uint64_t seed, uint32_t use, uint64_t epoch, uint64_t n, uint64_t i)
{
    const ckpt_philox_stream s = {.seed = seed, .stream = epoch, .use = use};
    unsigned half = 1;
    if (i >= n || n > (uint64_t)1 << 62)
        return i;
    while (half < 31 && (uint64_t)1 << 2 * half < n)
        half++;
    do {
        i = feistel(&s, half, i);
    } while (i >= n);
    return i;
}
