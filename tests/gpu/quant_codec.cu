/* codec.h on a card against CUDA's own conversions (cuda_fp8.h, cuda_fp4.h, cuda_fp16.h) and against
 * codec.h on the host: every code of the small formats, every bf16 and fp16 number, random bits of f32. */
#include "quant_codec.h"

#include "codec.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <stdlib.h>
#include <string.h>

#define BOTH static __host__ __device__

BOTH float half_of(__half_raw x)
{
    return __half2float(__half(x));
}

BOTH uint32_t bits(float x)
{
    return x != x ? 0x7fc00000u : ckpt_f32_bits(x);
}
/* What codec.h makes of x, of every codec one number; `theirs`: what CUDA makes of it. */
struct answers {
    uint32_t x[CODEC_KINDS];
};
BOTH answers ours(float x)
{
    answers a;
    a.x[CODEC_E4M3] = ckpt_codec_encode(CKPT_CODEC_E4M3, x);
    a.x[CODEC_E5M2] = ckpt_codec_encode(CKPT_CODEC_E5M2, x);
    a.x[CODEC_E2M1] = ckpt_codec_encode(CKPT_CODEC_E2M1, x);
    a.x[CODEC_E8M0] = ckpt_e8m0_up(x);
    a.x[CODEC_F16] = ckpt_f32_bits(ckpt_f16_round(x));
    a.x[CODEC_BF16] = ckpt_f32_bits(ckpt_bf16_round(x));
    a.x[CODEC_E4M3_SNAP] = bits(ckpt_e4m3_snap(x)); /* a card has one NaN */
    return a;
}
BOTH answers theirs(float x)
{
    const bool nan = x != x;
    answers a;
    a.x[CODEC_E4M3] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    a.x[CODEC_E5M2] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
    a.x[CODEC_E2M1] = __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
    a.x[CODEC_E8M0] = __nv_cvt_float_to_e8m0(fabsf(x), __NV_SATFINITE, cudaRoundPosInf);
    /* NaN stays the NaN it was: not CUDA's */
    a.x[CODEC_F16] = ckpt_f32_bits(nan ? x : __half2float(__float2half_rn(x)));
    a.x[CODEC_BF16] = ckpt_f32_bits(nan ? x : __bfloat162float(__float2bfloat16_rn(x)));
    a.x[CODEC_E4M3_SNAP] = bits(
        nan ? x : half_of(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)a.x[CODEC_E4M3], __NV_E4M3)));
    return a;
}
BOTH bool decodes(uint32_t c)
{
    const float e4 = half_of(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)c, __NV_E4M3));
    const float e5 = half_of(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)c, __NV_E5M2));
    const float e2 = half_of(__nv_cvt_fp4_to_halfraw((__nv_fp4_storage_t)(c & 15), __NV_E2M1));
    return bits(e4) == bits(ckpt_codec_decode(CKPT_CODEC_E4M3, c)) &&
           bits(e5) == bits(ckpt_codec_decode(CKPT_CODEC_E5M2, c)) &&
           bits(e2) == bits(ckpt_codec_decode(CKPT_CODEC_E2M1, c & 15));
}

/* Inputs in order: bf16, fp16, random. */
BOTH float input(int64_t i)
{
    if (i < 65536)
        return ckpt_f32_of((uint32_t)i << 16);
    if (i < 131072) {
        __half_raw h;
        h.x = (unsigned short)(i - 65536);
        return half_of(h);
    }
    uint32_t x = (uint32_t)i * 2654435761u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    /* a quarter of them where E4M3 and fp16 have their numbers */
    return ckpt_f32_of(i % 4 ? x : (x & 0x81ffffffu) | 0x3a000000u);
}

static __global__ void run(int64_t n, answers *a, answers *b, unsigned *wrong)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        a[i] = ours(input(i));
        b[i] = theirs(input(i));
    }
    if (i < 256 && !decodes((uint32_t)i))
        atomicAdd(wrong, 1u);
}

extern "C" bool ckpt_test_codecs(bool device, codec_counts *c)
{
    const int64_t n = CODEC_INPUTS;
    answers *mine = (answers *)malloc((size_t)n * sizeof *mine);
    answers *other = (answers *)malloc((size_t)n * sizeof *other);
    bool ok = mine && other;
    memset(c, 0, sizeof *c);
    if (ok && device) {
        answers *a = nullptr, *b = nullptr;
        unsigned *wrong = nullptr, count = 0;
        ok = cudaMalloc(&a, (size_t)n * sizeof *a) == cudaSuccess &&
             cudaMalloc(&b, (size_t)n * sizeof *b) == cudaSuccess &&
             cudaMalloc(&wrong, sizeof *wrong) == cudaSuccess &&
             cudaMemset(wrong, 0, sizeof *wrong) == cudaSuccess;
        if (ok)
            run<<<(unsigned)((n + 255) / 256), 256>>>(n, a, b, wrong);
        ok = ok &&
             cudaMemcpy(mine, a, (size_t)n * sizeof *a, cudaMemcpyDeviceToHost) == cudaSuccess &&
             cudaMemcpy(other, b, (size_t)n * sizeof *b, cudaMemcpyDeviceToHost) == cudaSuccess &&
             cudaMemcpy(&count, wrong, sizeof count, cudaMemcpyDeviceToHost) == cudaSuccess;
        c->decodes = count;
        cudaFree(a);
        cudaFree(b);
        cudaFree(wrong);
    }
    for (int64_t i = 0; ok && i < n; i++) {
        const answers host = ours(input(i));
        if (!device) {
            mine[i] = host;
            other[i] = theirs(input(i));
            c->decodes += i < 256 && !decodes((uint32_t)i);
        }
        for (int k = 0; k < CODEC_KINDS; k++) {
            c->cuda[k] += mine[i].x[k] != other[i].x[k];
            c->host[k] += mine[i].x[k] != host.x[k];
        }
    }
    free(mine);
    free(other);
    return ok;
}
