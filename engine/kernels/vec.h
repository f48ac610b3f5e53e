/* Vectors of the widest registers of the instruction set, through the compiler's vector extension.
 * VL lanes; v_load and v_store are of aligned rows of scratch, load_any and store_any of any row. */
#ifndef CKPT_ENGINE_KERNEL_VEC_H
#define CKPT_ENGINE_KERNEL_VEC_H

#include "real.h"

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VB 64
#elif defined(__AVX__)
#define VB 32
#else
#define VB 16
#endif
#define VL (VB / (CKPT_REAL / 8))

typedef real vec __attribute__((vector_size(VB)));
typedef real vec_any __attribute__((vector_size(VB), aligned(CKPT_REAL / 8)));

#define K_INLINE static inline __attribute__((always_inline))

/* K_UNROLL: the few rounds of a loop become straight code. K_REGISTERS: those of a loop over registers do,
 * of which there must be 32, so that an array of vectors stays in them; with fewer it would only spill.
 * K_SPECIAL: a function that is compiled for the constants of every caller. Not so under a sanitizer, whose
 * checks of all that code take minutes to compile. */
#ifdef CKPT_ROLLED
#define K_UNROLL _Pragma("GCC unroll 1")
#define K_SPECIAL static __attribute__((noinline, unused))
#else
#define K_UNROLL _Pragma("GCC unroll 16")
#define K_SPECIAL K_INLINE
#endif
#if VB == 64
#define K_REGISTERS K_UNROLL
#else
#define K_REGISTERS
#endif

K_INLINE vec v_load(const real *p)
{
    return *(const vec *)(const void *)p;
}

K_INLINE void v_store(real *p, vec v)
{
    *(vec *)(void *)p = v;
}

K_INLINE vec load_any(const real *p)
{
    return *(const vec_any *)(const void *)p;
}

K_INLINE void store_any(real *p, vec v)
{
    *(vec_any *)(void *)p = v;
}

/* x in every lane (x - 0 is x, whatever it is). */
K_INLINE vec v_all(real x)
{
    return x - (vec){0};
}

/* The first n lanes, n in 0 .. VL, and what is done in those alone. Other lanes of x stay as they are,
 * or become zero, whatever they hold (NaN). */
#if VB == 64 && CKPT_REAL == 32
typedef __mmask16 v_lanes;
K_INLINE v_lanes v_first(int64_t n)
{
    return (__mmask16)((1u << n) - 1);
}
K_INLINE vec v_mul_in(v_lanes m, vec x, vec y)
{
    return (vec)_mm512_mask_mul_ps((__m512)x, m, (__m512)x, (__m512)y);
}
K_INLINE vec v_only(v_lanes m, vec x)
{
    return (vec)_mm512_maskz_mov_ps(m, (__m512)x);
}
#elif VB == 64
typedef __mmask8 v_lanes;
K_INLINE v_lanes v_first(int64_t n)
{
    return (__mmask8)((1u << n) - 1);
}
K_INLINE vec v_mul_in(v_lanes m, vec x, vec y)
{
    return (vec)_mm512_mask_mul_pd((__m512d)x, m, (__m512d)x, (__m512d)y);
}
K_INLINE vec v_only(v_lanes m, vec x)
{
    return (vec)_mm512_maskz_mov_pd(m, (__m512d)x);
}
#else
#if CKPT_REAL == 32
typedef int32_t v_int;
#else
typedef int64_t v_int;
#endif
typedef v_int v_lanes __attribute__((vector_size(VB)));
K_INLINE v_lanes v_first(int64_t n)
{
    v_lanes m;
    for (int l = 0; l < VL; l++)
        m[l] = l < n ? -1 : 0;
    return m;
}
K_INLINE vec v_mul_in(v_lanes m, vec x, vec y)
{
    return (vec)(((v_lanes)(x * y) & m) | ((v_lanes)x & ~m));
}
K_INLINE vec v_only(v_lanes m, vec x)
{
    return (vec)((v_lanes)x & m);
}
#endif

/* Lanes of x and y in turn, of their lower and their upper halves. */
#if VL == 16
#define V_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define V_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VL == 8
#define V_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define V_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif VL == 4
#define V_ZIP_LOW 0, 4, 1, 5
#define V_ZIP_HIGH 2, 6, 3, 7
#else
#define V_ZIP_LOW 0, 2
#define V_ZIP_HIGH 1, 3
#endif

/* One stage of a transposition: what was the highest bit of the row becomes the lowest of the column, and
 * that pushes the column's highest bit into the row. log2(VL) stages exchange row and column. */
K_INLINE void v_zip(const vec *x, vec *y)
{
    K_UNROLL for (int i = 0; i < VL / 2; i++)
    {
        y[2 * i] = __builtin_shufflevector(x[i], x[i + VL / 2], V_ZIP_LOW);
        y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + VL / 2], V_ZIP_HIGH);
    }
}

/* x [VL] is transposed. */
K_INLINE void v_transpose_block(vec *x)
{
    vec y[VL];
    v_zip(x, y);
#if VL >= 4
    v_zip(y, x);
#endif
#if VL >= 8
    v_zip(x, y);
#endif
#if VL >= 16
    v_zip(y, x);
#endif
#if VL == 8 || VL == 2
    K_UNROLL for (int r = 0; r < VL; r++) x[r] = y[r];
#endif
}

/* to [n, m] = from [m, n] transposed; m and n multiples of VL, rows aligned and ldf, ldt apart. */
static inline void v_transpose(int64_t m, int64_t n, const real *from, int64_t ldf, real *to,
                               int64_t ldt)
{
    for (int64_t i = 0; i < m; i += VL)
        for (int64_t j = 0; j < n; j += VL) {
            vec x[VL];
            K_UNROLL for (int r = 0; r < VL; r++) x[r] = v_load(from + (i + r) * ldf + j);
            v_transpose_block(x);
            K_UNROLL for (int r = 0; r < VL; r++) v_store(to + (j + r) * ldt + i, x[r]);
        }
}

#endif
