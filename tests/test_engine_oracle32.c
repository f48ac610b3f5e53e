/* The f32 engine against the float64 oracle: the same cases. */
#define CKPT_REAL 32
#define LIMIT                                                                                      \
    (114 * 5.96e-8) /* dA_log of a block sums T x K = 114 terms, 2^-24 each; measured 5e-6 */
#define SUITE_NAME "engine_oracle32"
#define SUITE suite_engine_oracle32
#include "test_engine_oracle.c"
