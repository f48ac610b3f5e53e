/* Communication between the ranks of a run: one interface, several backends.
 *
 * A backend moves bytes and knows nothing else: `exchange` sends a piece to every rank and receives
 * one from each. Everything with arithmetic is built on it here, so that sums are taken in rank order,
 * in double precision, and rounded once: results are equal on every rank and in every run. Backends:
 * none (size 1), threads of one process (ckpt_comm_threads, for tests), processes of one host over shared
 * memory (comm_host.h), MPI (a shared object that is loaded when it is asked for: engine/mpi/plugin.c). One of these may be wrapped to move memory of a
 * device too (cuda/device_comm.h): then every function here takes pointers of either kind, all ranks of the
 * same kind, and with those of a device it does not wait for the result, which is there in the order of
 * the device's stream.
 *
 * All ranks of a communicator call the same function in the same order with fitting sizes. A rank that
 * stops calls ckpt_comm_abort, which makes the others fail instead of wait. A communicator belongs to
 * one thread. Counts are elements. Errors: CKPT_E_IO (the backend's words), CKPT_E_NOMEM. */
#ifndef CKPT_ENGINE_COMM_H
#define CKPT_ENGINE_COMM_H

#include "err.h"

#include <stddef.h>
#include <stdint.h>

typedef struct ckpt_comm_ops {
    /* send_n[r] bytes at send[r] to rank r, recv_n[r] bytes from it, for all ranks, the own included.
     * Messages between two ranks keep their order; a size 0 is no message. */
    bool (*exchange)(void *self, const void *const *send, const uint64_t *send_n, void *const *recv,
                     const uint64_t *recv_n, char *msg, size_t cap);
    /* The ranks that give one colour become a communicator, in their old order. */
    bool (*split)(void *self, int color, void **out, int *rank, int *size, char *msg, size_t cap);
    void (*stop)(void *self, int code);
    void (*free)(void *self); /* of the first one opened: ends the backend */
    /* NULL or: words why the run ended ("rank 1 of 4 was killed ..."), NULL while it goes on. For any
     * thread. */
    const char *(*why)(void *self);
    /* Of a device's backend, else NULL: is p memory of the device; room there for one reduction; the sum
     * or maximum of `ranks` pieces of n in rank order, in double precision, rounded once (out may be the
     * first piece). */
    bool (*on_device)(void *self, const void *p);
    void *(*room)(void *self, uint64_t bytes, char *msg, size_t cap);
    bool (*combine)(void *self, int type, int op, const void *x, int ranks, int64_t n, void *out,
                    char *msg, size_t cap);
} ckpt_comm_ops;

typedef struct ckpt_comm {
    int rank, size;           /* zero-initialised it is the only rank of one: ckpt_comm_alone */
    const ckpt_comm_ops *ops; /* NULL: one process */
    void *self;
    void *scratch;
    size_t cap;
} ckpt_comm;

/* What the shared object exports as `ckpt_comm_plugin`. */
#define CKPT_COMM_PLUGIN_VERSION 2
typedef struct ckpt_comm_plugin {
    int version;
    const char *name;
    bool (*open)(void **self, int *rank, int *size, char *msg, size_t cap);
    ckpt_comm_ops ops;
} ckpt_comm_plugin;

#define CKPT_COMM_MAX 4096 /* ranks */

typedef enum ckpt_comm_type {
    CKPT_COMM_F32,
    CKPT_COMM_F64,
    CKPT_COMM_I64,
    CKPT_COMM_BF16
} ckpt_comm_type;
typedef enum ckpt_comm_op { CKPT_COMM_SUM, CKPT_COMM_MAX_OF } ckpt_comm_op;

static inline ckpt_comm ckpt_comm_alone(void)
{
    const ckpt_comm c = {0, 1, NULL, NULL, NULL, 0};
    return c;
}
/* One communicator a rank, for `size` threads of this process. */
ckpt_status ckpt_comm_threads(ckpt_comm *out, int size, ckpt_err *err) CKPT_MUST_USE;
/* Load the shared object `path` and join the run it belongs to. Errors: CKPT_E_UNSUPPORTED: there is no
 * such file, it does not load (named, with what to install) or is of another version. */
ckpt_status ckpt_comm_load(ckpt_comm *out, const char *path, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_comm_split(const ckpt_comm *c, int color, ckpt_comm *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* End the whole run: other ranks' calls fail, or they are ended with exit status `code`. */
void ckpt_comm_abort(const ckpt_comm *c, int code);
void ckpt_comm_release(ckpt_comm *c);

/* x [n] becomes the sum (or maximum; NaN if one is NaN) over ranks, the same bits everywhere. */
ckpt_status ckpt_comm_allreduce(ckpt_comm *c, ckpt_comm_type type, ckpt_comm_op op, void *x,
                                int64_t n, ckpt_err *err) CKPT_MUST_USE;
/* x [sum of counts]; out [counts[rank]]: this rank's piece of the sum over ranks. */
ckpt_status ckpt_comm_reduce_scatter(ckpt_comm *c, ckpt_comm_type type, const void *x,
                                     const int64_t *counts, void *out, ckpt_err *err) CKPT_MUST_USE;
/* x [counts[rank]] of every rank, one after the other, into out. elem: bytes. x may be its own place
 * in out. */
ckpt_status ckpt_comm_allgather(ckpt_comm *c, size_t elem, const void *x, const int64_t *counts,
                                void *out, ckpt_err *err) CKPT_MUST_USE;
/* send: pieces for rank 0, 1, ... one after the other; recv likewise. */
ckpt_status ckpt_comm_alltoall(ckpt_comm *c, size_t elem, const void *send,
                               const int64_t *send_counts, void *recv, const int64_t *recv_counts,
                               ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_comm_broadcast(ckpt_comm *c, void *x, size_t bytes, int root,
                                ckpt_err *err) CKPT_MUST_USE;
/* Rank `from` sends `bytes` at send to rank `to`, which has them in recv; others only take part. */
ckpt_status ckpt_comm_pass(ckpt_comm *c, int from, int to, const void *send, void *recv,
                           size_t bytes, ckpt_err *err) CKPT_MUST_USE;
/* Every rank to the next, the last to rank 0; send and recv do not overlap. */
ckpt_status ckpt_comm_ring(ckpt_comm *c, const void *send, void *recv, size_t bytes,
                           ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_comm_barrier(ckpt_comm *c, ckpt_err *err) CKPT_MUST_USE;

/* First of the n things that part i of `parts` has; parts differ by one at most, and part parts is n. */
static inline int64_t ckpt_part_at(int64_t n, int64_t parts, int64_t i)
{
    return n / parts * i + n % parts * i / parts;
}

#endif
