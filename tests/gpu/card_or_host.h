/* Memory for two_gpu.c: a card's, or with -DCKPT_EMULATED the emulator's. */
#ifndef CKPT_TEST_GPU_CARD_OR_HOST_H
#define CKPT_TEST_GPU_CARD_OR_HOST_H

#ifdef CKPT_EMULATED
#include "host_memory.h"
void ckpt_cuda_comm_pretend(bool device);
static inline void dev_pretend(void)
{
    ckpt_cuda_comm_pretend(true);
}
static inline void dev_clear(void *p, size_t bytes)
{
    memset(p, 0, bytes);
}
#else
#include "card_memory.h"
static inline void dev_pretend(void)
{
}
static inline void dev_clear(void *p, size_t bytes)
{
    (void)cudaMemset(p, 0, bytes);
}
#endif

#endif
