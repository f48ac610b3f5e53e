/* Memory of a CUDA device and the order of what happens to it: one stream for the work, others for
 * copies from this process (pipes), so that reading a checkpoint overlaps with sending it.
 *
 * Errors: CKPT_E_UNSUPPORTED: no card, no driver, or a driver older than the runtime; CKPT_E_NOMEM;
 * CKPT_E_IO: a copy or something that ran before it failed. */
#ifndef CKPT_CUDA_MEMORY_H
#define CKPT_CUDA_MEMORY_H

#include "gemm.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* How many cards there are; 0 is no error. Errors: CKPT_E_UNSUPPORTED no driver, or one that is too old. */
ckpt_status ckpt_cuda_cards(int *n, ckpt_err *err) CKPT_MUST_USE;

/* The card's stream and the products' library. name [cap] or NULL: what it is called. */
typedef struct ckpt_cuda_card {
    void *stream; /* cudaStream_t */
    ckpt_cuda_gemm *gemm;
} ckpt_cuda_card;
ckpt_status ckpt_cuda_open(ckpt_cuda_card *card, int number, char *name, size_t cap,
                           ckpt_err *err) CKPT_MUST_USE;
void ckpt_cuda_close(ckpt_cuda_card *card);

/* 256-byte aligned; of 0 bytes: a pointer that must not be read. */
ckpt_status ckpt_cuda_alloc(size_t bytes, void **out, ckpt_err *err) CKPT_MUST_USE;
void ckpt_cuda_free(void *p); /* NULL is allowed */

/* In the order of the stream's work. `put` may return before `from`, of any memory, is read to its end
 * on the device, but not before it may be written over; `get` waits. */
ckpt_status ckpt_cuda_put(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_get(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_copy(const ckpt_cuda_card *card, void *to, const void *from, size_t bytes,
                           ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_cuda_zero(const ckpt_cuda_card *card, void *p, size_t bytes,
                           ckpt_err *err) CKPT_MUST_USE;
/* Until all that was asked for has happened; of a pipe: ckpt_cuda_pipe_wait. */
ckpt_status ckpt_cuda_wait(const ckpt_cuda_card *card, ckpt_err *err) CKPT_MUST_USE;

/* A pipe: two buffers of pinned memory that take turns, each sent while the other is filled, in a stream
 * of its own; of one thread, which need not be the one that opened it. Memory is taken as buffers are
 * first used: pinning takes as long as sending, and so goes on in all threads at once. */
typedef struct ckpt_cuda_pipe ckpt_cuda_pipe;
ckpt_status ckpt_cuda_pipe_open(const ckpt_cuda_card *card, size_t bytes, ckpt_cuda_pipe **out,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_cuda_pipe_close(ckpt_cuda_pipe *p); /* waits; NULL is allowed */
/* A buffer to fill, once what it held has gone. */
ckpt_status ckpt_cuda_pipe_next(ckpt_cuda_pipe *p, void **buffer, ckpt_err *err) CKPT_MUST_USE;
/* Send its first bytes. */
ckpt_status ckpt_cuda_pipe_send(ckpt_cuda_pipe *p, void *to, size_t bytes,
                                ckpt_err *err) CKPT_MUST_USE;
/* Send its first n bf16 numbers, which become f32 on the device. */
ckpt_status ckpt_cuda_pipe_widen(ckpt_cuda_pipe *p, float *to, int64_t n,
                                 ckpt_err *err) CKPT_MUST_USE;
/* All of it has arrived. */
ckpt_status ckpt_cuda_pipe_wait(ckpt_cuda_pipe *p, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
