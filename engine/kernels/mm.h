/* Products of small matrices held in aligned scratch: C [m, n] (=, +=, scaled +=) A B.
 *
 * A is read by broadcast with any two strides, so it may be transposed; rows of B and C are vectors:
 * n a multiple of 16, ldb and ldc too. m is a multiple of 8. A register tile of MR rows and up to two
 * vectors of columns sums over k in order. */
#ifndef CKPT_ENGINE_KERNEL_MM_H
#define CKPT_ENGINE_KERNEL_MM_H

#include "vec.h"

typedef struct k_mm {
    int64_t m, n, k;
    const real *a;
    int64_t ra, ca; /* strides of A's rows and columns */
    const real *b;
    int64_t ldb;
    real *c;
    int64_t ldc;
    bool add;          /* C is added to */
    const real *scale; /* or NULL: row i of C is multiplied by scale[i] first (with add) */
} k_mm;

#if VB == 64
#define MM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define MR 8
#else
#define MM_ROWS(X) X(0) X(1) X(2) X(3)
#define MR 4
#endif

K_INLINE vec mm_start(const k_mm *p, int64_t i, int64_t j)
{
    if (!p->add)
        return (vec){0};
    vec c = v_load(p->c + i * p->ldc + j);
    return p->scale ? c * p->scale[i] : c;
}

/* Rows i .. i+MR-1, two vectors of columns from j. */
K_INLINE void mm_tile2(const k_mm *p, int64_t i, int64_t j)
{
    const real *a = p->a + i * p->ra, *b = p->b + j;
#define START(r) vec x##r = mm_start(p, i + r, j), y##r = mm_start(p, i + r, j + VL);
    MM_ROWS(START)
    for (int64_t k = 0; k < p->k; k++, a += p->ca, b += p->ldb) {
        const vec b0 = v_load(b), b1 = v_load(b + VL);
#define STEP(r)                                                                                    \
    x##r += b0 * a[r * p->ra];                                                                     \
    y##r += b1 * a[r * p->ra];
        MM_ROWS(STEP)
    }
#define STORE(r)                                                                                   \
    v_store(p->c + (i + r) * p->ldc + j, x##r);                                                    \
    v_store(p->c + (i + r) * p->ldc + j + VL, y##r);
    MM_ROWS(STORE)
#undef START
#undef STEP
#undef STORE
}

K_INLINE void mm_tile1(const k_mm *p, int64_t i, int64_t j)
{
    const real *a = p->a + i * p->ra, *b = p->b + j;
#define START(r) vec x##r = mm_start(p, i + r, j);
    MM_ROWS(START)
    for (int64_t k = 0; k < p->k; k++, a += p->ca, b += p->ldb) {
        const vec b0 = v_load(b);
#define STEP(r) x##r += b0 * a[r * p->ra];
        MM_ROWS(STEP)
    }
#define STORE(r) v_store(p->c + (i + r) * p->ldc + j, x##r);
    MM_ROWS(STORE)
#undef START
#undef STEP
#undef STORE
}

static inline void k_matmul(const k_mm *p)
{
    int64_t j = 0;
    for (; j + 2 * VL <= p->n; j += 2 * VL)
        for (int64_t i = 0; i < p->m; i += MR)
            mm_tile2(p, i, j);
    for (; j < p->n; j += VL)
        for (int64_t i = 0; i < p->m; i += MR)
            mm_tile1(p, i, j);
}

#endif
