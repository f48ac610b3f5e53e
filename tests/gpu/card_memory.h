/* Memory of a card (kda_case.h). */
#ifndef CKPT_TEST_GPU_CARD_MEMORY_H
#define CKPT_TEST_GPU_CARD_MEMORY_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>

static inline void *dev_alloc(size_t bytes)
{
    void *p = NULL;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}
static inline void dev_free(void *p)
{
    (void)cudaFree(p);
}
static inline void dev_put(void *to, const void *from, size_t bytes)
{
    (void)cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
}
static inline void dev_get(void *to, const void *from, size_t bytes)
{
    (void)cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
}
static inline bool dev_wait(void)
{
    const cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess)
        printf("CUDA: %s\n", cudaGetErrorString(e));
    return e == cudaSuccess;
}

#endif
