/* Times by CUDA events. */
#ifndef CKPT_TEST_GPU_CARD_TIME_H
#define CKPT_TEST_GPU_CARD_TIME_H

#include "err.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdlib.h>

static inline int card_compare(const void *x, const void *y)
{
    const float l = *(const float *)x, r = *(const float *)y;
    return l < r ? -1 : l > r;
}
/* Median of 30 calls after 5, in ms; negative when a call failed. */
static inline float card_median(ckpt_status (*run)(void *), void *arg)
{
    enum { N = 30, WARM = 5 };
    float ms[N];
    cudaEvent_t from, to;
    (void)cudaEventCreate(&from);
    (void)cudaEventCreate(&to);
    for (int i = -WARM; i < N; i++) {
        (void)cudaEventRecord(from, NULL);
        if (run(arg) != CKPT_OK)
            return -1;
        (void)cudaEventRecord(to, NULL);
        (void)cudaEventSynchronize(to);
        if (i >= 0)
            (void)cudaEventElapsedTime(&ms[i], from, to);
    }
    (void)cudaEventDestroy(from);
    (void)cudaEventDestroy(to);
    qsort(ms, N, sizeof *ms, card_compare);
    return ms[N / 2];
}

#endif
