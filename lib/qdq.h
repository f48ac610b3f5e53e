/* Quantise and dequantise arrays of f32: every quantiser of quant-emulation.md section 2, on the codecs
 * of codec.h. y may be x. Codes are one a byte (E2M1 in the low four bits); `codes` and `scales` may be
 * NULL. Sizes are elements, all at least 0. Nothing is allocated and nothing fails; sizes and block
 * widths are the caller's to check (width > 0). A row is `width` consecutive elements. */
#ifndef CKPT_QDQ_H
#define CKPT_QDQ_H

#include "codec.h"

#include <stddef.h>

/* E4M3, one scale a row. scales [rows]: what elements are multiplied by; y = code / it. */
void ckpt_qdq_fp8_rows(int64_t rows, int64_t width, bool gpu, const float *x, float *y,
                       uint8_t *codes, float *scales);
/* E4M3, one scale for all n; amax < 0: the largest magnitude (dynamic), else given (static): beyond it
 * values clip. */
void ckpt_qdq_fp8_tensor(int64_t n, float amax, const float *x, float *y, uint8_t *codes,
                         float *scale);
/* States [n, K, V]: a scale for each [K, block_v] tile. scales [n, ceil(V / block_v)]. */
void ckpt_qdq_state(int64_t n, int64_t K, int64_t V, int64_t block_v, bool int8, bool gpu,
                    const float *x, float *y, float *scales);

typedef enum ckpt_nvfp4_profile {
    CKPT_NVFP4_TRITON, /* what runs on a GPU with Triton; conformance */
    CKPT_NVFP4_EXT,    /* the CUDA extension of ModelOpt */
    CKPT_NVFP4_STORE   /* codes for a checkpoint: scale codes within [2^-9, 448] */
} ckpt_nvfp4_profile;
/* Two levels: E2M1 elements, an E4M3 scale for every 16 of a row (the last may be shorter), one f32
 * scale. amax < 0: of x. scale_codes [rows, ceil(width / 16)]. */
void ckpt_qdq_nvfp4(int64_t rows, int64_t width, ckpt_nvfp4_profile profile, float amax, bool gpu,
                    const float *x, float *y, uint8_t *codes, uint8_t *scale_codes);

typedef enum ckpt_mx_mode {
    CKPT_MX_CEIL_DIV, /* 2^ceil(log2(amax / max)), the quotient rounded to f32: ModelOpt */
    CKPT_MX_CEIL_MUL, /* the same of amax * f32(1 / max): Transformer Engine */
    CKPT_MX_FLOOR     /* 2^(floor(log2 amax) - emax): OCP MX 1.0 */
} ckpt_mx_mode;
/* Blocks of 32 of a row with an E8M0 scale. scale_codes [rows, ceil(width / 32)]. */
void ckpt_qdq_mxfp8(int64_t rows, int64_t width, ckpt_mx_mode mode, bool e5m2, const float *x,
                    float *y, uint8_t *codes, uint8_t *scale_codes);

typedef enum ckpt_fp8_style {
    CKPT_FP8_DEEPSEEK, /* s = amax / 448, y = code * s */
    CKPT_FP8_TE,       /* m = 448 / amax, y = code * (1 / m) */
    CKPT_FP8_TE_POW2   /* m rounded down to a power of two */
} ckpt_fp8_style;
/* E4M3, one scale a block [br, bc] of the matrix [rows, cols]; edge blocks may be smaller. scales
 * [ceil(rows / br), ceil(cols / bc)]: what codes are multiplied by. */
void ckpt_qdq_fp8_block(int64_t rows, int64_t cols, int64_t br, int64_t bc, ckpt_fp8_style style,
                        const float *x, float *y, uint8_t *codes, float *scales);

/* Largest magnitude; NaN if there is one. */
float ckpt_amax(const float *x, int64_t n);

#endif
