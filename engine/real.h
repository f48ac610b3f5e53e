/* The element type of the engine. Every engine source is compiled once with CKPT_REAL=32 and once with
 * CKPT_REAL=64; ENG(name) is the name for the type in use. Users choose the type by defining CKPT_REAL
 * before the first include; the default is float. Only one type can be used in a source file. */
#ifndef CKPT_ENGINE_REAL_H
#define CKPT_ENGINE_REAL_H

#ifndef CKPT_REAL
#define CKPT_REAL 32
#endif

#if CKPT_REAL == 32
typedef float real;
#define ENG(name) ckpt_eng_##name##_f32
#elif CKPT_REAL == 64
typedef double real;
#define ENG(name) ckpt_eng_##name##_f64
#else
#error "CKPT_REAL must be 32 or 64"
#endif

#endif
