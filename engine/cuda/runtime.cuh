/* What launchers ask of the CUDA runtime; tests/gpu/emulate.h takes its place on a CPU. */
#ifndef CKPT_CUDA_RUNTIME_CUH
#define CKPT_CUDA_RUNTIME_CUH

#include "kda.h"

#ifdef CKPT_CUDA_EMULATE
#include CKPT_CUDA_EMULATE
#else
#include "intrinsics.cuh"
#endif

namespace kda
{

#ifdef CKPT_CUDA_EMULATE
typedef int device_stream;
/* Is p in what ckpt_cuda_alloc gave (memory.cu)? */
bool emulated_holds(const void *p);
inline ckpt_status checked(const char *, ckpt_err *)
{
    return CKPT_OK;
}
template <class K> ckpt_status room(K *, int, int *limit, ckpt_err *)
{
    *limit = emulated_shared_memory;
    return CKPT_OK;
}
inline int multiprocessors()
{
    return emulated_multiprocessors;
}
inline void upload(void *to, const void *from, size_t bytes, device_stream)
{
    std::memcpy(to, from, bytes);
}
inline device_stream stream_of(void *)
{
    return 0;
}
#else
typedef cudaStream_t device_stream;
inline ckpt_status checked(const char *what, ckpt_err *err)
{
    const cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess)
        return ckpt_fail(err, CKPT_E_IO, "kda: %s: %s", what, cudaGetErrorString(e));
    return CKPT_OK;
}
/* Let a kernel use `bytes` of dynamic shared memory, if the card has them: *limit is what it has. */
template <class K> ckpt_status room(K *kernel, int bytes, int *limit, ckpt_err *err)
{
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess && bytes <= *limit)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes);
    if (e != cudaSuccess)
        return ckpt_fail(err, CKPT_E_IO, "kda: shared memory: %s", cudaGetErrorString(e));
    return CKPT_OK;
}
/* Of the current card; 1 when it does not say. */
inline int multiprocessors()
{
    int device = 0, n = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 1;
    return n;
}
inline void upload(void *to, const void *from, size_t bytes, device_stream s)
{
    (void)cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s);
}
inline device_stream stream_of(void *s)
{
    return (device_stream)s;
}
#endif

} // namespace kda

#endif
