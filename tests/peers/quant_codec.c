/* The codecs of lib/codec.h as functions of arrays, for quant_codec.py. */
#include "codec.h"

#include <stddef.h>

void codec_encode(int format, size_t n, const float *x, unsigned char *y);
void codec_decode(int format, size_t n, const unsigned char *x, float *y);
void codec_round(int format, size_t n, const float *x, float *y);

void codec_encode(int format, size_t n, const float *x, unsigned char *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (unsigned char)(format == 2 ? ckpt_e8m0_up(x[i])
                                           : ckpt_codec_encode(format == 0   ? CKPT_CODEC_E4M3_OVER
                                                               : format == 1 ? CKPT_CODEC_E5M2_OVER
                                                               : format == 3 ? CKPT_CODEC_E4M3
                                                                             : CKPT_CODEC_E5M2,
                                                               x[i]));
}

void codec_decode(int format, size_t n, const unsigned char *x, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = format == 2
                   ? (float)ckpt_e8m0_decode(x[i])
                   : ckpt_codec_decode(format == 0 ? CKPT_CODEC_E4M3 : CKPT_CODEC_E5M2, x[i]);
}

void codec_round(int format, size_t n, const float *x, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = format == 0   ? ckpt_f16_round(x[i])
               : format == 1 ? ckpt_bf16_round(x[i])
                             : ckpt_e4m3_snap(x[i]);
}
