/* The f32 engine against the float64 oracle: the same cases. */
#define CKPT_REAL 32
#define LIMIT (70 * 5.96e-8) /* 70 terms at 2^-24 each; measured up to 2.6e-6 */
#define SUITE_NAME "engine_oracle32"
#define SUITE suite_engine_oracle32
#include "test_engine_oracle.c"
