/* The few functions of NCCL that are used, with the types of nccl.h 2.x (BSD licence, NVIDIA): ABI that
 * has not changed since 2.7. Opened at run time. */
#ifndef CKPT_CUDA_NCCL_API_H
#define CKPT_CUDA_NCCL_API_H

#include <stddef.h>

enum { NCCL_OK = 0, NCCL_IN_PROGRESS = 7, NCCL_BYTES = 1 /* ncclUint8 */, NCCL_LEAST = 20700 };

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

typedef struct nccl_api {
    int (*version)(int *);
    int (*unique_id)(nccl_id *);
    int (*init)(void **comm, int size, nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*give_up)(void *comm); /* ncclCommAbort */
    int (*async_error)(void *comm, int *error);
    const char *(*text)(int error);
    const char *(*last_error)(void *comm); /* since 2.13; or NULL */
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *p, size_t n, int type, int peer, void *comm, void *stream);
    int (*recv)(void *p, size_t n, int type, int peer, void *comm, void *stream);
} nccl_api;

#endif
