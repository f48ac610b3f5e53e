/* Products of small matrices held in aligned scratch: C [m, n] = A B, or Diag(scale) C0 + A B.
 *
 * A is read by broadcast with any two strides, so it may be transposed, and its columns may lie in
 * blocks; rows of B and C are vectors: n a multiple of VL, ldb and ldc too. m is a multiple of 16. A
 * register tile of 8 rows (4 without AVX-512) and two vectors of columns, or of 16 (8) and one, sums
 * over k in order. Callers give strides as constants where they are, which the compiler then puts into
 * the addresses. */
#ifndef CKPT_ENGINE_KERNEL_MM_H
#define CKPT_ENGINE_KERNEL_MM_H

#include "feed.h"

typedef struct k_mm {
    int64_t m, n, k; /* k in a block */
    const real *a;
    int64_t ra, ca;         /* strides of A's rows and columns */
    int64_t blocks, ablock; /* of k columns each, and the stride between them; 0 blocks = 1 */
    const real *b;
    int64_t ldb;
    real *c;
    int64_t ldc;
    const real *from;  /* C0, ld as C, may be C; NULL: nothing is added */
    const real *scale; /* [m], with from */
    k_feed *feed;      /* or NULL: asked for more at every block of every tile of two vectors */
} k_mm;

#define MM_ROWS4(X) X(0) X(1) X(2) X(3)
#define MM_ROWS8(X) MM_ROWS4(X) X(4) X(5) X(6) X(7)
#define MM_ROWS16(X) MM_ROWS8(X) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#if VB == 64
#define MM_R2 8
#define MM_ROWS_2(X) MM_ROWS8(X)
#define MM_R1 16
#define MM_ROWS_1(X) MM_ROWS16(X)
#else
#define MM_R2 4
#define MM_ROWS_2(X) MM_ROWS4(X)
#define MM_R1 8
#define MM_ROWS_1(X) MM_ROWS8(X)
#endif

K_INLINE vec mm_start(const k_mm *p, int64_t i, int64_t j)
{
    return p->from ? v_load(p->from + i * p->ldc + j) * p->scale[i] : (vec){0};
}

/* Rows i .. i + MM_R2 - 1, two vectors of columns from j. */
K_SPECIAL void mm_tile2(const k_mm *p, int64_t i, int64_t j)
{
    const real *b = p->b + j;
#define START(r) vec x##r = mm_start(p, i + r, j), y##r = mm_start(p, i + r, j + VL);
    MM_ROWS_2(START)
    for (int64_t s = 0; s == 0 || s < p->blocks; s++) {
        const real *a = p->a + i * p->ra + s * p->ablock;
        if (p->feed)
            k_feed_some(p->feed);
        for (int64_t k = 0; k < p->k; k++, a += p->ca, b += p->ldb) {
            const vec b0 = v_load(b), b1 = v_load(b + VL);
#define STEP(r)                                                                                    \
    {                                                                                              \
        const vec e = v_all(a[r * p->ra]);                                                         \
        x##r += b0 * e;                                                                            \
        y##r += b1 * e;                                                                            \
    }
            MM_ROWS_2(STEP)
        }
    }
#define STORE(r)                                                                                   \
    v_store(p->c + (i + r) * p->ldc + j, x##r);                                                    \
    v_store(p->c + (i + r) * p->ldc + j + VL, y##r);
    MM_ROWS_2(STORE)
#undef START
#undef STEP
#undef STORE
}

/* Rows i .. i + MM_R1 - 1, one vector of columns from j. */
K_SPECIAL void mm_tile1(const k_mm *p, int64_t i, int64_t j)
{
    const real *b = p->b + j;
#define START(r) vec x##r = mm_start(p, i + r, j);
    MM_ROWS_1(START)
    for (int64_t s = 0; s == 0 || s < p->blocks; s++) {
        const real *a = p->a + i * p->ra + s * p->ablock;
        for (int64_t k = 0; k < p->k; k++, a += p->ca, b += p->ldb) {
            const vec b0 = v_load(b);
#define STEP(r) x##r += b0 * a[r * p->ra];
            MM_ROWS_1(STEP)
        }
    }
#define STORE(r) v_store(p->c + (i + r) * p->ldc + j, x##r);
    MM_ROWS_1(STORE)
#undef START
#undef STEP
#undef STORE
}

K_SPECIAL void k_matmul(const k_mm *p)
{
    int64_t j = 0;
    for (; j + 2 * VL <= p->n; j += 2 * VL)
        for (int64_t i = 0; i < p->m; i += MM_R2)
            mm_tile2(p, i, j);
    for (; j < p->n; j += VL)
        for (int64_t i = 0; i < p->m; i += MM_R1)
            mm_tile1(p, i, j);
}

#endif
