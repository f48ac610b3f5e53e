/* The element type of the engine. Every engine source is compiled once with CKPT_REAL=32 and once with
 * CKPT_REAL=64; ENG(name) is the name for the type in use. Users choose the type by defining CKPT_REAL
 * before the first include; the default is float. Only one type can be used in a source file.
 *
 * The sources that are made of operations alone (tools/make/engine.mk) are compiled twice more, for arrays
 * of a device: 132 is f32 there, 116 is bf16, which is storage alone (uint16_t). `wreal` is what stays
 * f32 then: statistics, decays and gates, states, parameters of pointwise operations, routers. So do the
 * gradients of parameters, all of them; those of matrices travel in the fields of the matrices, as
 * `real *`, and are f32 arrays nevertheless. On a CPU wreal is real. */
#ifndef CKPT_ENGINE_REAL_H
#define CKPT_ENGINE_REAL_H

#include <stdint.h>

#ifndef CKPT_REAL
#define CKPT_REAL 32
#endif

#if CKPT_REAL == 32
typedef float real;
typedef float wreal;
#define ENG(name) ckpt_eng_##name##_f32
#elif CKPT_REAL == 64
typedef double real;
typedef double wreal;
#define ENG(name) ckpt_eng_##name##_f64
#elif CKPT_REAL == 132
typedef float real;
typedef float wreal;
#define ENG(name) ckpt_eng_##name##_d32
#elif CKPT_REAL == 116
typedef uint16_t real;
typedef float wreal;
#define ENG(name) ckpt_eng_##name##_d16
#else
#error "CKPT_REAL must be 32 or 64, or 132 or 116"
#endif

/* Are arrays on a device, which works behind the caller's back? */
#define CKPT_ON_DEVICE (CKPT_REAL > 100)

#endif
