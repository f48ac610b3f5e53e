/* What device_comm.cu asks of a device's memory; on the emulator all memory is the host's, and what was
 * allocated as the device's counts as that, or when a test says so all there is. Functions return NULL, or CUDA's words. */
#ifndef CKPT_CUDA_DEVICE_COMM_CUH
#define CKPT_CUDA_DEVICE_COMM_CUH

#include "memory.h"
#include "runtime.cuh"

#include <atomic>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace kda
{

#ifdef CKPT_CUDA_EMULATE

inline bool emulated_device_memory;
/* The driver's lock: while one thread holds it, calls of others wait, as they do for a thread that is inside a
 * call which waits for the device. */
inline std::atomic<uintptr_t> emulated_driver; /* who holds it, 0: nobody */
inline void emulated_driver_call()
{
    const timespec nap = {0, 1000000};
    for (uintptr_t who; (who = emulated_driver) != 0 && who != (uintptr_t)pthread_self();)
        nanosleep(&nap, nullptr);
}
struct device_event {
};
inline const char *use_device(int)
{
    return nullptr;
}
inline const char *name_device(int device, char *name, size_t cap)
{
    snprintf(name, cap, "emulated %d", device);
    return nullptr;
}
inline const char *take_memory(void **p, size_t n, bool pinned)
{
    if (!pinned)
        return ckpt_cuda_alloc(n, p, nullptr) == CKPT_OK ? nullptr : "out of memory";
    *p = malloc(n);
    return *p ? nullptr : "out of memory";
}
inline void give_memory(void *p, bool pinned)
{
    if (pinned)
        free(p);
    else
        ckpt_cuda_free(p);
}
inline const char *copy_bytes(void *to, const void *from, size_t n, device_stream)
{
    memmove(to, from, n);
    return nullptr;
}
inline const char *wait_for(device_stream)
{
    return nullptr;
}
inline bool of_device(const void *p)
{
    return emulated_device_memory || emulated_holds(p);
}
inline const char *open_event(device_event *)
{
    return nullptr;
}
inline void close_event(device_event *)
{
}
inline bool record_event(device_event *, device_stream)
{
    emulated_driver_call();
    return true;
}
inline bool event_done(device_event *)
{
    emulated_driver_call();
    return true;
}

#else

struct device_event {
    cudaEvent_t e;
};
inline const char *words_of(cudaError_t e)
{
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
inline const char *use_device(int device)
{
    return words_of(cudaSetDevice(device));
}
inline const char *name_device(int device, char *name, size_t cap)
{
    return words_of(cudaDeviceGetPCIBusId(name, (int)cap, device));
}
inline const char *take_memory(void **p, size_t n, bool pinned)
{
    return words_of(pinned ? cudaMallocHost(p, n) : cudaMalloc(p, n));
}
inline void give_memory(void *p, bool pinned)
{
    if (p)
        (void)(pinned ? cudaFreeHost(p) : cudaFree(p));
}
inline const char *copy_bytes(void *to, const void *from, size_t n, device_stream s)
{
    return words_of(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s));
}
inline const char *wait_for(device_stream s)
{
    return words_of(cudaStreamSynchronize(s));
}
inline bool of_device(const void *p)
{
    cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, p) == cudaSuccess)
        return a.type == cudaMemoryTypeDevice;
    (void)cudaGetLastError();
    return false;
}
inline const char *open_event(device_event *e)
{
    return words_of(cudaEventCreateWithFlags(&e->e, cudaEventDisableTiming));
}
inline void close_event(device_event *e)
{
    (void)cudaEventDestroy(e->e);
}
/* False while the stream is being captured: such an event tells nothing. */
inline bool record_event(device_event *e, device_stream s)
{
    cudaStreamCaptureStatus now;
    return cudaStreamIsCapturing(s, &now) == cudaSuccess && now == cudaStreamCaptureStatusNone &&
           cudaEventRecord(e->e, s) == cudaSuccess;
}
inline bool event_done(device_event *e)
{
    return cudaEventQuery(e->e) != cudaErrorNotReady;
}

#endif

} // namespace kda

#endif
