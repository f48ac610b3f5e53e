/* The f32 form of the prefill, by the tests and arrays of test_engine_quant.c. */
#define CKPT_REAL 32
#define SUITE_NAME "engine_quant32"
#define SUITE suite_engine_quant32
#include "test_engine_quant.c"
