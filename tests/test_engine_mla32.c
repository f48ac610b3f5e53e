/* The f32 engine against the float64 oracle of MLA and MoE: the same cases. */
#define CKPT_REAL 32
#define LIMIT 2e-6 /* up to 70 terms of 2^-24 each; measured 5.1e-7 */
#define SUITE_NAME "engine_mla32"
#define SUITE suite_engine_mla32
#include "test_engine_mla.c"
