/* Elementary functions of the element type, for loops that are not kernels. */
#ifndef CKPT_ENGINE_REAL_MATH_H
#define CKPT_ENGINE_REAL_MATH_H

#include "real.h"

#include <math.h>

#if CKPT_REAL == 32
#define EXP expf
#define LOG logf
#else
#define EXP exp
#define LOG log
#endif

static inline real ENG(logistic)(real x)
{
    return 1 / (1 + EXP(-x));
}

#endif
