/* The f32 products to the bit: the same cases. */
#define CKPT_REAL 32
#define SUITE_NAME "gemm32"
#define SUITE suite_gemm32
#include "test_gemm.c"
