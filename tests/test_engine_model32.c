/* The f32 engine against float64 gradients of whole models: the same cases. */
#define CKPT_REAL 32
#define LIMIT(f32) (f32)
#define SUITE_NAME "engine_model32"
#define SUITE suite_engine_model32
#include "test_engine_model.c"
