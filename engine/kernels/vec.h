/* Vectors of the widest registers of the instruction set, through the compiler's vector extension.
 * VL lanes; loads and stores are of aligned rows of scratch. */
#ifndef CKPT_ENGINE_KERNEL_VEC_H
#define CKPT_ENGINE_KERNEL_VEC_H

#include "real.h"

#include <stdint.h>

#if defined(__AVX512F__)
#define VB 64
#elif defined(__AVX__)
#define VB 32
#else
#define VB 16
#endif
#define VL (VB / (CKPT_REAL / 8))

typedef real vec __attribute__((vector_size(VB)));

#define K_INLINE static inline __attribute__((always_inline))

K_INLINE vec v_load(const real *p)
{
    return *(const vec *)(const void *)p;
}

K_INLINE void v_store(real *p, vec v)
{
    *(vec *)(void *)p = v;
}

#endif
