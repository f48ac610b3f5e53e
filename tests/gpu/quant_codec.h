/* Between quant_codec.cu and quant_gpu.c. */
#ifndef CKPT_TEST_GPU_QUANT_CODEC_H
#define CKPT_TEST_GPU_QUANT_CODEC_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CODEC_INPUTS (131072 + (1 << 21)) /* every bf16, every fp16, random */

enum {
    CODEC_E4M3,
    CODEC_E5M2,
    CODEC_E2M1,
    CODEC_E8M0,
    CODEC_F16,
    CODEC_BF16,
    CODEC_E4M3_SNAP,
    CODEC_KINDS
};

/* Numbers that differ: from CUDA's conversion, from codec.h on the host; codes of 256 that decode to
 * another number. */
typedef struct codec_counts {
    int64_t cuda[CODEC_KINDS], host[CODEC_KINDS], decodes;
} codec_counts;

/* device: kernels on the card, else everything on the host, with CUDA's host conversions. False: CUDA failed. */
bool ckpt_test_codecs(bool device, codec_counts *c);

#ifdef __cplusplus
}
#endif

#endif
