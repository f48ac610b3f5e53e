/* Ranks with a GPU: wraps a communicator of host memory (../comm.h: processes of one host, MPI) into one
 * that moves memory of the device as well. Each function of comm.h then takes either kind.
 *
 * Host memory goes the way it went. Device memory goes through NCCL, one communicator for all groups of a
 * run: every piece of an exchange is an ncclSend or ncclRecv to the member's rank in the run, all of one
 * exchange in one group call, in the given stream. Sums are taken by a kernel in rank order, in double
 * precision, rounded once: the bits of the host's (NCCL's own reductions have no order that it promises).
 * An allreduce moves 2 (N-1)/N of its bytes per rank, as NCCL's ring does.
 *
 * Two ranks on one GPU, which NCCL refuses, or no NCCL: pinned host memory and the host's communicator.
 *
 * NCCL is opened when a run begins (libnccl.so.2 by dlopen), so nothing links it. A thread watches, which
 * never enters the driver: an error that NCCL reports (ncclCommGetAsyncError), a rank that died (comm.h's
 * `why`) and an exchange that nobody answers for `limit` seconds end in ncclCommAbort, which ends kernels
 * that wait; every call after that
 * fails with the reason. */
#ifndef CKPT_CUDA_DEVICE_COMM_H
#define CKPT_CUDA_DEVICE_COMM_H

#ifdef __cplusplus
extern "C" {
#endif

#include "comm.h"

#pragma GCC visibility push(default)

typedef struct ckpt_cuda_comm_opts {
    int device;          /* of this rank; is made current */
    void *stream;        /* a cudaStream_t */
    const char *library; /* NCCL's; NULL: libnccl.so.2 */
    double limit;        /* seconds; 0: 600 */
    bool stage;          /* not through NCCL */
} ckpt_cuda_comm_opts;

/* All ranks of *host call it. On success *host belongs to *out, which is released in its place; otherwise
 * it is as it was. Errors: CKPT_E_UNSUPPORTED NCCL is there on some ranks only or too old; CKPT_E_IO;
 * CKPT_E_NOMEM. */
ckpt_status ckpt_cuda_comm_open(ckpt_comm *host, const ckpt_cuda_comm_opts *o, ckpt_comm *out,
                                ckpt_err *err) CKPT_MUST_USE;
/* "NCCL 2.28.9", or how else memory of the device moves, and why. */
const char *ckpt_cuda_comm_way(const ckpt_comm *c);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
