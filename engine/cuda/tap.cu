/* Copies beside the work (tap.h). In the emulator a copy happens when it is taken, the latest moment. */
#include "tap.h"

#include "runtime.cuh"

#include <stdlib.h>
#include <string.h>

struct ckpt_cuda_tap {
    ckpt_cuda_card card;
    int begun, taken; /* turns: buffer turn % 2 */
    size_t bytes;
    void *buffer[2];
#ifdef CKPT_CUDA_EMULATE
    const void *from[2];
    size_t wanted[2];
#else
    int device;
    cudaStream_t stream;
    cudaEvent_t marked, here[2];
#endif
};

namespace
{

#ifdef CKPT_CUDA_EMULATE

ckpt_status open_parts(ckpt_cuda_tap *t, ckpt_err *err)
{
    for (int i = 0; i < 2; i++)
        if ((t->buffer[i] = malloc(t->bytes + 1)) == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a tap");
    return CKPT_OK;
}
void close_parts(ckpt_cuda_tap *t)
{
    for (int i = 0; i < 2; i++)
        free(t->buffer[i]);
}
ckpt_status mark(ckpt_cuda_tap *, ckpt_err *)
{
    return CKPT_OK;
}
ckpt_status start(ckpt_cuda_tap *t, int i, const void *from, size_t bytes, ckpt_err *)
{
    t->from[i] = from;
    t->wanted[i] = bytes;
    return CKPT_OK;
}
ckpt_status arrive(ckpt_cuda_tap *t, int i, ckpt_err *)
{
    memcpy(t->buffer[i], t->from[i], t->wanted[i]);
    return CKPT_OK;
}

#else

ckpt_status done(cudaError_t e, ckpt_err *err)
{
    if (e == cudaSuccess)
        return CKPT_OK;
    (void)cudaGetLastError(); /* it would be found once more by the next launch */
    return ckpt_fail(err, e == cudaErrorMemoryAllocation ? CKPT_E_NOMEM : CKPT_E_IO,
                     "CUDA: copy from the device beside its work: %s", cudaGetErrorString(e));
}
ckpt_status open_parts(ckpt_cuda_tap *t, ckpt_err *err)
{
    cudaError_t e = cudaGetDevice(&t->device);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&t->marked, cudaEventDisableTiming);
    for (int i = 0; i < 2 && e == cudaSuccess; i++) {
        e = cudaMallocHost(&t->buffer[i], t->bytes);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&t->here[i], cudaEventDisableTiming);
    }
    return done(e, err);
}
void close_parts(ckpt_cuda_tap *t)
{
    if (t->stream != NULL) {
        (void)cudaStreamSynchronize(t->stream);
        (void)cudaStreamDestroy(t->stream);
    }
    if (t->marked != NULL)
        (void)cudaEventDestroy(t->marked);
    for (int i = 0; i < 2; i++) {
        if (t->here[i] != NULL)
            (void)cudaEventDestroy(t->here[i]);
        if (t->buffer[i] != NULL)
            (void)cudaFreeHost(t->buffer[i]);
    }
}
ckpt_status mark(ckpt_cuda_tap *t, ckpt_err *err)
{
    cudaError_t e = cudaEventRecord(t->marked, (cudaStream_t)t->card.stream);
    if (e == cudaSuccess)
        e = cudaStreamWaitEvent(t->stream, t->marked, 0);
    return done(e, err);
}
ckpt_status start(ckpt_cuda_tap *t, int i, const void *from, size_t bytes, ckpt_err *err)
{
    cudaError_t e = cudaSetDevice(t->device); /* the thread may be new */
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(t->buffer[i], from, bytes, cudaMemcpyDeviceToHost, t->stream);
    if (e == cudaSuccess)
        e = cudaEventRecord(t->here[i], t->stream);
    return done(e, err);
}
ckpt_status arrive(ckpt_cuda_tap *t, int i, ckpt_err *err)
{
    return done(cudaEventSynchronize(t->here[i]), err);
}

#endif

} // namespace

ckpt_status ckpt_cuda_tap_open(const ckpt_cuda_card *card, size_t bytes, ckpt_cuda_tap **out,
                               ckpt_err *err)
{
    ckpt_cuda_tap *t = (ckpt_cuda_tap *)calloc(1, sizeof *t);
    *out = NULL;
    if (t == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a tap");
    t->card = *card;
    t->bytes = bytes;
    const ckpt_status status = open_parts(t, err);
    if (status != CKPT_OK)
        ckpt_cuda_tap_close(t);
    else
        *out = t;
    return status;
}
void ckpt_cuda_tap_close(ckpt_cuda_tap *t)
{
    if (t != NULL)
        close_parts(t);
    free(t);
}
ckpt_status ckpt_cuda_tap_mark(ckpt_cuda_tap *t, ckpt_err *err)
{
    t->begun = t->taken = 0; /* what a failed copy had begun is nobody's */
    return mark(t, err);
}
ckpt_status ckpt_cuda_tap_start(ckpt_cuda_tap *t, const void *from, size_t bytes, ckpt_err *err)
{
    if (bytes > t->bytes || t->begun - t->taken >= 2)
        return ckpt_fail(err, CKPT_E_INTERNAL, "a tap of %zu bytes: %zu, %d begun", t->bytes, bytes,
                         t->begun - t->taken);
    return start(t, t->begun++ % 2, from, bytes, err);
}
ckpt_status ckpt_cuda_tap_take(ckpt_cuda_tap *t, const void **buffer, ckpt_err *err)
{
    const int i = t->taken % 2;
    *buffer = t->buffer[i];
    if (t->taken == t->begun)
        return ckpt_fail(err, CKPT_E_INTERNAL, "a tap: nothing was begun");
    t->taken++;
    return arrive(t, i, err);
}
