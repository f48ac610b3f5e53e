/* Panels of a matrix product: `width` lines of length k beside each other, out[q * width + r] = line r at q.
 *
 * The lines lie side by side in memory (rows are copied) or one after the other (they are transposed).
 * Transposing goes by squares of four lines times four numbers in registers, two of them at once where a
 * register holds eight floats: that is four loads, eight shuffles and 16-byte stores, on every instruction
 * set. Lines are taken a cache line at a time, all of them, so that lines whose distance is a multiple of
 * a page do not drive each other out of the cache. */
#ifndef CKPT_ENGINE_KERNEL_PACK_H
#define CKPT_ENGINE_KERNEL_PACK_H

#include "vec.h"

#include <string.h>

#define PACK_CHUNK (64 / (CKPT_REAL / 8)) /* numbers of a line taken at once: a cache line */
#define PACK_GROUP 4                      /* panels filled together from rows */
#define PACK_AHEAD 8                      /* rows fetched ahead */

#if CKPT_REAL == 32 || VB >= 32
/* Four numbers, and what is loaded at once of a line. */
typedef real quad __attribute__((vector_size(CKPT_REAL / 2)));
typedef real quad_any __attribute__((vector_size(CKPT_REAL / 2), aligned(CKPT_REAL / 8)));
#if CKPT_REAL == 32 && VB >= 32
#define PACK_STEP 8
typedef real some __attribute__((vector_size(32)));
typedef real some_any __attribute__((vector_size(32), aligned(4)));
#define PACK_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define PACK_HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define PACK_FRONT(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define PACK_BACK(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define PACK_STEP 4
typedef quad some;
typedef quad_any some_any;
#define PACK_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define PACK_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define PACK_FRONT(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define PACK_BACK(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#endif

K_INLINE some load_some(const real *p)
{
    return *(const some_any *)(const void *)p;
}

/* One number of each of four lines, for every square in x. */
K_INLINE void store_quads(some x, int64_t width, real *out)
{
#if PACK_STEP == 8
    *(quad_any *)(void *)out = __builtin_shufflevector(x, x, 0, 1, 2, 3);
    *(quad_any *)(void *)(out + 4 * width) = __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    (void)width;
    *(quad_any *)(void *)out = x;
#endif
}

/* PACK_CHUNK numbers of four lines. Where there are fewer lines, the last is read again: what is
 * written then, beyond the line `have`, is for the caller to write over. */
K_INLINE void pack_four(const real *x, int64_t ld, int64_t have, const int64_t width, real *out)
{
    const real *x1 = x + (have > 1 ? ld : 0), *x2 = x1 + (have > 2 ? ld : 0),
               *x3 = x2 + (have > 3 ? ld : 0);
    for (int64_t q = 0; q < PACK_CHUNK; q += PACK_STEP, out += PACK_STEP * width) {
        const some a = load_some(x + q), b = load_some(x1 + q), c = load_some(x2 + q),
                   d = load_some(x3 + q);
        const some ab = PACK_LOW(a, b), cd = PACK_LOW(c, d), AB = PACK_HIGH(a, b),
                   CD = PACK_HIGH(c, d);
        store_quads(PACK_FRONT(ab, cd), width, out);
        store_quads(PACK_BACK(ab, cd), width, out + width);
        store_quads(PACK_FRONT(AB, CD), width, out + 2 * width);
        store_quads(PACK_BACK(AB, CD), width, out + 3 * width);
    }
}
#else /* no register holds four doubles */
K_INLINE void pack_four(const real *x, int64_t ld, int64_t have, const int64_t width, real *out)
{
    for (int64_t r = 0; r < have && r < 4; r++)
        for (int64_t q = 0; q < PACK_CHUNK; q++)
            out[q * width + r] = x[r * ld + q];
}
#endif

/* Lines that lie one after the other. The groups of a chunk are written from the last to the first, so
 * that what spills over the width of one number is written over by the next; up to 3 numbers beyond the
 * panel's end are written. */
K_INLINE void pack_lines(const real *x, int64_t ld, int64_t k, const int64_t width, int64_t have,
                         real *out)
{
    int64_t q = 0;
    for (; q + PACK_CHUNK <= k; q += PACK_CHUNK)
        for (int64_t r = (have - 1) / 4 * 4; r >= 0; r -= 4)
            pack_four(x + r * ld + q, ld, have - r, width, out + q * width + r);
    for (; q < k; q++)
        for (int64_t r = 0; r < have; r++)
            out[q * width + r] = x[r * ld + q];
}

/* Lines that lie side by side, `ld` from one number of a line to the next: a row of several panels at a
 * time, so that of each page of memory that a row is in, whole cache lines are used. */
K_INLINE void pack_rows(const real *x, int64_t ld, int64_t k, const int64_t width, int64_t panels,
                        real *out)
{
    for (int64_t q = 0; q < k; q++, x += ld, out += width) {
        if (q + PACK_AHEAD < k)
            for (int64_t c = 0; c < panels * width; c += PACK_CHUNK)
                __builtin_prefetch(x + PACK_AHEAD * ld + c);
        for (int64_t g = 0; g < panels; g++)
            for (int64_t r = 0; r < width; r++)
                out[g * k * width + r] = x[g * width + r];
    }
}

/* A panel of which `have` lines exist; the others are zeros. */
K_INLINE void pack_part(bool side, const real *x, int64_t ld, int64_t k, const int64_t width,
                        int64_t have, real *out)
{
    memset(out, 0, sizeof(real) * (size_t)(k * width));
    if (!side)
        pack_lines(x, ld, k, width, have, out);
    else
        for (int64_t q = 0; q < k; q++)
            for (int64_t r = 0; r < have; r++)
                out[q * width + r] = x[q * ld + r];
}

/* n lines as panels, one after the other; only the last, where it lacks lines, if not `whole`. */
K_INLINE void pack_panels(bool side, bool whole, const real *x, int64_t ld, int64_t n, int64_t k,
                          const int64_t width, real *out)
{
    const int64_t step = side ? 1 : ld, full = n / width;
    int64_t g = whole ? 0 : full;
    for (; side && g + PACK_GROUP <= full; g += PACK_GROUP)
        pack_rows(x + g * width, ld, k, width, PACK_GROUP, out + g * k * width);
    for (; g < full; g++)
        if (side)
            pack_rows(x + g * width, ld, k, width, 1, out + g * k * width);
        else
            pack_lines(x + g * width * step, ld, k, width, width, out + g * k * width);
    if (n % width != 0)
        pack_part(side, x + full * width * step, ld, k, width, n % width, out + full * k * width);
}

#endif
