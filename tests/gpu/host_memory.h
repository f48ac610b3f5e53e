/* Memory of the emulated kernels: the machine's own (kda_case.h). */
#ifndef CKPT_TEST_GPU_HOST_MEMORY_H
#define CKPT_TEST_GPU_HOST_MEMORY_H

static inline void *dev_alloc(size_t bytes)
{
    return aligned_alloc(256, (bytes + 511) / 256 * 256);
}
static inline void dev_free(void *p)
{
    free(p);
}
static inline void dev_put(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
static inline void dev_get(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
static inline bool dev_wait(void)
{
    return true;
}

#endif
