/* The MPI backend of comm.h, a shared object of its own (libckpt_mpi.so), so that ckpt itself needs no
 * MPI to build or to run. It uses nothing of ckpt but the header.
 *
 * Pieces above 1 GiB are sent as several messages: MPI counts are int. */
#include "comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE ((uint64_t)1 << 30)

typedef struct end {
    MPI_Comm comm;
    int rank, size;
    bool first; /* the one opened: ends MPI */
    MPI_Request *requests;
    size_t cap;
} end;

static bool failed(int code, const char *what, char *msg, size_t cap)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (code == MPI_SUCCESS)
        return false;
    MPI_Error_string(code, text, &n);
    snprintf(msg, cap, "%s: %s", what, text);
    return true;
}

static size_t messages(const uint64_t *n, int size, int self)
{
    size_t sum = 0;
    for (int r = 0; r < size; r++)
        if (r != self)
            sum += (size_t)((n[r] + MESSAGE - 1) / MESSAGE);
    return sum;
}

static bool exchange(void *self, const void *const *send, const uint64_t *send_n, void *const *recv,
                     const uint64_t *recv_n, char *msg, size_t cap)
{
    end *e = self;
    size_t want = messages(send_n, e->size, e->rank) + messages(recv_n, e->size, e->rank), n = 0;
    if (want > e->cap) {
        MPI_Request *more = realloc(e->requests, want * sizeof(MPI_Request));
        if (more == NULL) {
            snprintf(msg, cap, "out of memory for %zu messages", want);
            return false;
        }
        e->requests = more;
        e->cap = want;
    }
    if (send_n[e->rank] != recv_n[e->rank]) {
        snprintf(msg, cap, "%llu bytes to itself, %llu expected",
                 (unsigned long long)send_n[e->rank], (unsigned long long)recv_n[e->rank]);
        return false;
    }
    for (int way = 0; way < 2; way++) /* receives are posted before anything is sent */
        for (int i = 1; i < e->size; i++) {
            int r = (e->rank + i) % e->size;
            uint64_t left = way == 0 ? recv_n[r] : send_n[r];
            char *to = recv[r];
            const char *from = send[r];
            for (uint64_t at = 0; at < left; at += MESSAGE) {
                int count = (int)(left - at < MESSAGE ? left - at : MESSAGE);
                int code =
                    way == 0
                        ? MPI_Irecv(to + at, count, MPI_BYTE, r, 0, e->comm, &e->requests[n++])
                        : MPI_Isend(from + at, count, MPI_BYTE, r, 0, e->comm, &e->requests[n++]);
                if (failed(code, "MPI", msg, cap))
                    return false;
            }
        }
    if (recv_n[e->rank] > 0 && recv[e->rank] != send[e->rank])
        memmove(recv[e->rank], send[e->rank], recv_n[e->rank]);
    return !failed(MPI_Waitall((int)n, e->requests, MPI_STATUSES_IGNORE), "MPI", msg, cap);
}

static end *adopt(MPI_Comm comm, bool first, int *rank, int *size, char *msg, size_t cap)
{
    end *e = calloc(1, sizeof *e);
    if (e == NULL) {
        snprintf(msg, cap, "out of memory");
        return NULL;
    }
    *e = (end){.comm = comm, .first = first};
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &e->rank);
    MPI_Comm_size(comm, &e->size);
    *rank = e->rank;
    *size = e->size;
    return e;
}

static bool split(void *self, int color, void **out, int *rank, int *size, char *msg, size_t cap)
{
    const end *e = self;
    MPI_Comm comm;
    if (failed(MPI_Comm_split(e->comm, color, e->rank, &comm), "MPI split", msg, cap))
        return false;
    *out = adopt(comm, false, rank, size, msg, cap);
    return *out != NULL;
}

static void abort_run(void *self, int code)
{
    (void)self;
    MPI_Abort(MPI_COMM_WORLD, code);
}

static void free_end(void *self)
{
    end *e = self;
    if (e->first)
        MPI_Finalize(); /* frees the others: MPI_Comm_free would wait for ranks that failed */
    free(e->requests);
    free(e);
}

static bool open_world(void **self, int *rank, int *size, char *msg, size_t cap)
{
    int provided = 0;
    if (failed(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI", msg, cap))
        return false;
    *self = adopt(MPI_COMM_WORLD, true, rank, size, msg, cap);
    return *self != NULL;
}

extern const ckpt_comm_plugin ckpt_comm_plugin_v2;
__attribute__((visibility("default"))) const ckpt_comm_plugin ckpt_comm_plugin_v2 = {
    .version = CKPT_COMM_PLUGIN_VERSION,
    .name = "MPI",
    .open = open_world,
    .ops = {.exchange = exchange, .split = split, .stop = abort_run, .free = free_end},
};
