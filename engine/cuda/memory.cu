/* Memory, streams and copies (memory.h). In the emulator what is allocated here counts as the device's, and
 * nothing is ever still on its way; CKPT_EMULATED_CARDS says how many cards it is (8). */
#include "memory.h"

#include "move.h"
#include "runtime.cuh"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ckpt_cuda_pipe {
    ckpt_cuda_card card;
    size_t bytes;
    int turn;                    /* the buffer that is filled now */
    void *buffer[2], *staged[2]; /* staged: on the device, of what is widened there */
#ifndef CKPT_CUDA_EMULATE
    int number; /* of the card: a thread starts on card 0 */
    cudaStream_t stream;
    cudaEvent_t gone[2];
#endif
};

#ifdef CKPT_CUDA_EMULATE

ckpt_status ckpt_cuda_cards(int *n, ckpt_err *)
{
    const char *v = getenv("CKPT_EMULATED_CARDS");
    *n = v != NULL ? atoi(v) : 8;
    return CKPT_OK;
}

static ckpt_status open_card(ckpt_cuda_card *, int number, char *name, size_t cap, ckpt_err *err)
{
    int cards = 0;
    ckpt_status status = ckpt_cuda_cards(&cards, err);
    if (status != CKPT_OK || number < 0 || number >= cards)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no card %d: the emulator is %d", number, cards);
    if (name != NULL)
        snprintf(name, cap, "emulated on the CPU");
    return CKPT_OK;
}
static void close_card(ckpt_cuda_card *)
{
}

namespace
{
struct block {
    const char *at;
    size_t bytes;
};
block *blocks; /* what counts as the device's */
size_t n_blocks, cap_blocks;
pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

bool note_block(void *p, size_t bytes)
{
    pthread_mutex_lock(&blocks_lock);
    if (n_blocks == cap_blocks) {
        block *more = (block *)realloc(blocks, (2 * cap_blocks + 16) * sizeof *more);
        blocks = more != NULL ? more : blocks;
        cap_blocks = more != NULL ? 2 * cap_blocks + 16 : cap_blocks;
    }
    const bool room = n_blocks < cap_blocks;
    if (room)
        blocks[n_blocks++] = block{(const char *)p, bytes};
    pthread_mutex_unlock(&blocks_lock);
    return room;
}
void forget_block(const void *p)
{
    pthread_mutex_lock(&blocks_lock);
    for (size_t i = 0; i < n_blocks; i++)
        if (blocks[i].at == p)
            blocks[i--] = blocks[--n_blocks];
    if (n_blocks == 0) {
        free(blocks);
        blocks = NULL;
        cap_blocks = 0;
    }
    pthread_mutex_unlock(&blocks_lock);
}
} // namespace

bool kda::emulated_holds(const void *p)
{
    bool found = false;
    pthread_mutex_lock(&blocks_lock);
    for (size_t i = 0; i < n_blocks && !found; i++)
        found = (const char *)p >= blocks[i].at && (const char *)p < blocks[i].at + blocks[i].bytes;
    pthread_mutex_unlock(&blocks_lock);
    return found;
}

ckpt_status ckpt_cuda_alloc(size_t bytes, void **out, ckpt_err *err)
{
    *out = bytes < SIZE_MAX - 512 ? aligned_alloc(256, (bytes + 256) / 256 * 256) : NULL;
    if (*out == NULL || !note_block(*out, bytes + 1)) {
        free(*out);
        *out = NULL;
        return ckpt_fail(err, CKPT_E_NOMEM, "CUDA: %zu bytes of the device's memory", bytes);
    }
    memset(*out, 0xff, bytes); /* NaN: a card's memory holds anything */
    return CKPT_OK;
}
void ckpt_cuda_free(void *p)
{
    if (p != NULL)
        forget_block(p);
    free(p);
}

static bool capturing(const ckpt_cuda_card *)
{
    return emu::captured != NULL;
}
static ckpt_status put_bytes(const ckpt_cuda_card *, void *to, const void *from, size_t bytes,
                             ckpt_err *)
{
    if (bytes > 0)
        memcpy(to, from, bytes);
    return CKPT_OK;
}
static ckpt_status get_bytes(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                             ckpt_err *err)
{
    return put_bytes(card, to, from, bytes, err);
}
ckpt_status ckpt_cuda_copy(const ckpt_cuda_card *, void *to, const void *from, size_t bytes,
                           ckpt_err *)
{
    if (bytes > 0)
        emu::perform([=] { memmove(to, from, bytes); });
    return CKPT_OK;
}
ckpt_status ckpt_cuda_zero(const ckpt_cuda_card *, void *p, size_t bytes, ckpt_err *)
{
    if (bytes > 0)
        emu::perform([=] { memset(p, 0, bytes); });
    return CKPT_OK;
}
static ckpt_status wait_all(const ckpt_cuda_card *, ckpt_err *)
{
    return CKPT_OK;
}

static ckpt_status open_pipe(ckpt_cuda_pipe *, ckpt_err *)
{
    return CKPT_OK;
}
static void close_pipe(ckpt_cuda_pipe *)
{
}
static ckpt_status enter(ckpt_cuda_pipe *, ckpt_err *)
{
    return CKPT_OK;
}
static ckpt_status open_buffer(ckpt_cuda_pipe *p, int i, ckpt_err *err)
{
    p->buffer[i] = malloc(p->bytes + 1); /* this process's, as pinned memory is */
    return p->buffer[i] != NULL ? CKPT_OK
                                : ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a pipe");
}
static void close_buffer(ckpt_cuda_pipe *p, int i)
{
    free(p->buffer[i]);
}
static ckpt_status wait_buffer(ckpt_cuda_pipe *, int, ckpt_err *)
{
    return CKPT_OK;
}
static ckpt_status send_buffer(ckpt_cuda_pipe *p, int i, void *to, size_t bytes, ckpt_err *err)
{
    return ckpt_cuda_put(&p->card, to, p->buffer[i], bytes, err);
}
static ckpt_status mark_buffer(ckpt_cuda_pipe *, int, ckpt_err *)
{
    return CKPT_OK;
}
static void *stream_of(const ckpt_cuda_pipe *p)
{
    return p->card.stream;
}
static pthread_mutex_t one_kernel = PTHREAD_MUTEX_INITIALIZER; /* its registers are the process's */
static void kernel_begin(void)
{
    pthread_mutex_lock(&one_kernel);
}
static void kernel_end(void)
{
    pthread_mutex_unlock(&one_kernel);
}

#else

static ckpt_status done(cudaError_t e, const char *what, ckpt_err *err)
{
    if (e == cudaSuccess)
        return CKPT_OK;
    (void)cudaGetLastError(); /* it would be found once more by the next launch */
    return ckpt_fail(err, e == cudaErrorMemoryAllocation ? CKPT_E_NOMEM : CKPT_E_IO, "CUDA: %s: %s",
                     what, cudaGetErrorString(e));
}

ckpt_status ckpt_cuda_cards(int *n, ckpt_err *err)
{
    *n = 0;
    const cudaError_t e = cudaGetDeviceCount(n);
    if (e == cudaSuccess || e == cudaErrorNoDevice) {
        (void)cudaGetLastError();
        return CKPT_OK;
    }
    (void)cudaGetLastError();
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no CUDA card: %s", cudaGetErrorString(e));
}

static ckpt_status open_card(ckpt_cuda_card *card, int number, char *name, size_t cap,
                             ckpt_err *err)
{
    int cards = 0;
    const ckpt_status status = ckpt_cuda_cards(&cards, err);
    if (status != CKPT_OK || cards < 1)
        return status != CKPT_OK
                   ? status
                   : ckpt_fail(err, CKPT_E_UNSUPPORTED, "no CUDA card: none is there");
    if (number < 0 || number >= cards)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no CUDA card %d: there %s %d", number,
                         cards == 1 ? "is" : "are", cards);
    cudaDeviceProp what;
    cudaError_t e = cudaSetDevice(number);
    if (e == cudaSuccess)
        e = cudaGetDeviceProperties(&what, number);
    if (e == cudaSuccess && what.major < 8)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "CUDA card %d, %s, has compute capability %d.%d; 8.0 is needed", number,
                         what.name, what.major, what.minor);
    if (e == cudaSuccess && name != NULL)
        snprintf(name, cap, "%s", what.name);
    cudaStream_t s = NULL;
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    card->stream = s;
    return done(e, "a stream", err);
}
static void close_card(ckpt_cuda_card *card)
{
    if (card->stream != NULL)
        (void)cudaStreamDestroy((cudaStream_t)card->stream);
}

ckpt_status ckpt_cuda_alloc(size_t bytes, void **out, ckpt_err *err)
{
    *out = NULL;
    const cudaError_t e = cudaMalloc(out, bytes > 0 ? bytes : 256);
    if (e == cudaSuccess)
        return CKPT_OK;
    (void)cudaGetLastError();
    return ckpt_fail(err, CKPT_E_NOMEM, "CUDA: %zu bytes of the device's memory: %s", bytes,
                     cudaGetErrorString(e));
}
void ckpt_cuda_free(void *p)
{
    (void)cudaFree(p);
}

static cudaStream_t work(const ckpt_cuda_card *card)
{
    return (cudaStream_t)card->stream;
}
static bool capturing(const ckpt_cuda_card *card)
{
    cudaStreamCaptureStatus now = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(work(card), &now) == cudaSuccess &&
           now != cudaStreamCaptureStatusNone;
}
/* From pageable memory the runtime copies to its own pinned buffer before it returns. */
static ckpt_status put_bytes(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                             ckpt_err *err)
{
    return done(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, work(card)),
                "copy to the device", err);
}
static ckpt_status get_bytes(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                             ckpt_err *err)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, work(card));
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(work(card));
    return done(e, "copy from the device", err);
}
ckpt_status ckpt_cuda_copy(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                           ckpt_err *err)
{
    return done(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, work(card)), "copy",
                err);
}
ckpt_status ckpt_cuda_zero(const ckpt_cuda_card *card, void *p, size_t bytes, ckpt_err *err)
{
    return done(cudaMemsetAsync(p, 0, bytes, work(card)), "zeros", err);
}
static ckpt_status wait_all(const ckpt_cuda_card *card, ckpt_err *err)
{
    return done(cudaStreamSynchronize(work(card)), "work on the device", err);
}

static ckpt_status open_pipe(ckpt_cuda_pipe *p, ckpt_err *err)
{
    cudaError_t e = cudaGetDevice(&p->number);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&p->gone[i], cudaEventDisableTiming);
    return done(e, "a stream of copies", err);
}
static void close_pipe(ckpt_cuda_pipe *p)
{
    for (int i = 0; i < 2; i++)
        if (p->gone[i] != NULL)
            (void)cudaEventDestroy(p->gone[i]);
    if (p->stream != NULL)
        (void)cudaStreamDestroy(p->stream);
}
static ckpt_status enter(ckpt_cuda_pipe *p, ckpt_err *err)
{
    return done(cudaSetDevice(p->number), "the card of a pipe", err);
}
static ckpt_status open_buffer(ckpt_cuda_pipe *p, int i, ckpt_err *err)
{
    return done(cudaMallocHost(&p->buffer[i], p->bytes), "pinned memory", err);
}
static void close_buffer(ckpt_cuda_pipe *p, int i)
{
    if (p->buffer[i] != NULL)
        (void)cudaFreeHost(p->buffer[i]);
}
static ckpt_status wait_buffer(ckpt_cuda_pipe *p, int i, ckpt_err *err)
{
    return p->gone[i] == NULL ? CKPT_OK
                              : done(cudaEventSynchronize(p->gone[i]), "copy to the device", err);
}
static ckpt_status send_buffer(ckpt_cuda_pipe *p, int i, void *to, size_t bytes, ckpt_err *err)
{
    return done(cudaMemcpyAsync(to, p->buffer[i], bytes, cudaMemcpyHostToDevice, p->stream),
                "copy to the device", err);
}
static ckpt_status mark_buffer(ckpt_cuda_pipe *p, int i, ckpt_err *err)
{
    return done(cudaEventRecord(p->gone[i], p->stream), "copy to the device", err);
}
static void *stream_of(const ckpt_cuda_pipe *p)
{
    return p->stream;
}
static void kernel_begin(void)
{
}
static void kernel_end(void)
{
}

#endif

/* A graph would keep the address in this process's memory, and nothing can be waited for in one. */
static ckpt_status outside(const ckpt_cuda_card *card, const char *what, ckpt_err *err)
{
    if (!capturing(card))
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_INTERNAL, "CUDA: %s while work is captured", what);
}
ckpt_status ckpt_cuda_put(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                          ckpt_err *err)
{
    const ckpt_status status = outside(card, "a copy to the device", err);
    return status != CKPT_OK ? status : put_bytes(card, to, from, bytes, err);
}
ckpt_status ckpt_cuda_get(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                          ckpt_err *err)
{
    const ckpt_status status = outside(card, "a copy from the device", err);
    return status != CKPT_OK ? status : get_bytes(card, to, from, bytes, err);
}
ckpt_status ckpt_cuda_wait(const ckpt_cuda_card *card, ckpt_err *err)
{
    const ckpt_status status = outside(card, "a wait", err);
    return status != CKPT_OK ? status : wait_all(card, err);
}

ckpt_status ckpt_cuda_open(ckpt_cuda_card *card, int number, char *name, size_t cap, ckpt_err *err)
{
    *card = {};
    ckpt_status status = open_card(card, number, name, cap, err);
    if (status == CKPT_OK)
        status = ckpt_cuda_gemm_open(&card->gemm, CKPT_CUDA_PRODUCTS_BEST, err);
    if (status != CKPT_OK)
        ckpt_cuda_close(card);
    return status;
}
void ckpt_cuda_close(ckpt_cuda_card *card)
{
    ckpt_cuda_gemm_close(card->gemm);
    close_card(card);
    *card = {};
}

ckpt_status ckpt_cuda_pipe_open(const ckpt_cuda_card *card, size_t bytes, ckpt_cuda_pipe **out,
                                ckpt_err *err)
{
    ckpt_cuda_pipe *p = (ckpt_cuda_pipe *)calloc(1, sizeof *p);
    *out = NULL;
    if (p == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a pipe");
    p->card = *card;
    p->bytes = bytes;
    const ckpt_status status = open_pipe(p, err);
    if (status == CKPT_OK)
        *out = p;
    else
        ckpt_cuda_pipe_close(p);
    return status;
}
void ckpt_cuda_pipe_close(ckpt_cuda_pipe *p)
{
    if (p == NULL)
        return;
    for (int i = 0; i < 2; i++) {
        const ckpt_status gone = wait_buffer(p, i, NULL);
        (void)gone; /* a failure is the next wait's to tell */
        close_buffer(p, i);
        ckpt_cuda_free(p->staged[i]);
    }
    close_pipe(p);
    free(p);
}
ckpt_status ckpt_cuda_pipe_next(ckpt_cuda_pipe *p, void **buffer, ckpt_err *err)
{
    const int i = p->turn;
    ckpt_status status = enter(p, err);
    if (status == CKPT_OK)
        status = p->buffer[i] == NULL ? open_buffer(p, i, err) : wait_buffer(p, i, err);
    *buffer = p->buffer[i];
    return status;
}
ckpt_status ckpt_cuda_pipe_send(ckpt_cuda_pipe *p, void *to, size_t bytes, ckpt_err *err)
{
    const int i = p->turn;
    p->turn = 1 - i;
    const ckpt_status status = send_buffer(p, i, to, bytes, err);
    return status != CKPT_OK ? status : mark_buffer(p, i, err);
}
ckpt_status ckpt_cuda_pipe_widen(ckpt_cuda_pipe *p, float *to, int64_t n, ckpt_err *err)
{
    const int i = p->turn;
    const ckpt_cuda c = {CKPT_CUDA_BF16, stream_of(p), NULL, 0, NULL};
    p->turn = 1 - i;
    if (n < 0 || (size_t)n > p->bytes / 2)
        return ckpt_fail(err, CKPT_E_USAGE, "CUDA: %lld numbers from a pipe of %zu bytes",
                         (long long)n, p->bytes);
    ckpt_status status = CKPT_OK;
    if (p->staged[i] == NULL)
        status = ckpt_cuda_alloc(p->bytes, &p->staged[i], err);
    if (status == CKPT_OK)
        status = send_buffer(p, i, p->staged[i], (size_t)n * 2, err);
    kernel_begin();
    if (status == CKPT_OK)
        status = ckpt_cuda_widen(&c, n, p->staged[i], to, err);
    kernel_end();
    return status != CKPT_OK ? status : mark_buffer(p, i, err);
}
ckpt_status ckpt_cuda_pipe_wait(ckpt_cuda_pipe *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (int i = 0; i < 2 && status == CKPT_OK; i++)
        status = wait_buffer(p, i, err);
    return status;
}
