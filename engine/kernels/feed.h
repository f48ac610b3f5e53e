/* Rows of memory asked for while a product runs that does not need them.
 *
 * The rows of one head are H K elements apart, usually in pages of their own, so the machine foresees none
 * of them, and a core keeps only some 16 requests in flight: asked for all at once they would stop it, so
 * the tiles of a product (mm.h) ask for a few lines each. This changes when bytes move and no result. */
#ifndef CKPT_ENGINE_KERNEL_FEED_H
#define CKPT_ENGINE_KERNEL_FEED_H

#include "vec.h"

#define K_FEED_ROWS (8 * 16) /* seven arrays, 16 tokens */
#define K_FEED_LINE 64       /* bytes */

typedef struct k_feed {
    const char *row[K_FEED_ROWS];
    int64_t bytes[K_FEED_ROWS];
    int64_t rows, lines; /* in all */
    int64_t at, off;     /* next: row, byte in it */
    int64_t step;        /* lines a call asks for */
} k_feed;

/* Empties the list. */
static inline void k_feed_clear(k_feed *f)
{
    f->rows = f->lines = f->at = f->off = f->step = 0;
}

static inline void k_feed_add(k_feed *f, const real *x, int64_t n)
{
    if (!x || f->rows == K_FEED_ROWS)
        return;
    f->row[f->rows] = (const char *)x;
    f->bytes[f->rows++] = n * (int64_t)sizeof(real);
    f->lines += (n * (int64_t)sizeof(real) + K_FEED_LINE - 1) / K_FEED_LINE;
}

/* The list is through after `calls` calls of k_feed_some. */
static inline void k_feed_start(k_feed *f, int64_t calls)
{
    f->step = (f->lines + calls - 1) / calls;
}

/* Inlined, because a function that only prefetches has no effect a compiler knows of. */
K_INLINE void k_feed_some(k_feed *f)
{
    for (int64_t i = 0; i < f->step && f->at < f->rows; i++) {
        __builtin_prefetch(f->row[f->at] + f->off, 0, 2);
        f->off += K_FEED_LINE;
        if (f->off >= f->bytes[f->at]) {
            f->off = 0;
            f->at++;
        }
    }
}

#endif
