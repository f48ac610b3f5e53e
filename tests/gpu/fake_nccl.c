/* The functions of NCCL that engine/cuda/device_comm.cu uses, over Unix sockets and memory of the host, so
 * that the emulator's ranks go the way a card's do. As with NCCL a group call waits for its peers, and one
 * whose peer is gone waits until it is aborted. A peer's end shows as an asynchronous error.
 *
 * FAKE_NCCL_FAIL=n: the n-th group call of this process fails. FAKE_NCCL_LATE=n: it waits and an error
 * shows meanwhile. FAKE_NCCL_DEAF=n: it waits and nothing shows. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX 16
#define OPS 256
enum { OK = 0, SYSTEM = 2, INTERNAL = 3, REMOTE = 6 };

typedef struct id {
    char bytes[128];
} id;

typedef struct comm {
    int size, rank, fds[MAX];
    atomic_int aborted, error;
    char dir[100];
} comm;

typedef struct op {
    comm *c;
    char *p;
    size_t left;
    int peer, out;
} op;

static _Thread_local op ops[OPS];
static _Thread_local int n_ops, depth;
static atomic_int groups;

EXPORT int ncclGetVersion(int *v);
EXPORT int ncclGetVersion(int *v)
{
    *v = 22809;
    return OK;
}

EXPORT int ncclGetUniqueId(id *out);
EXPORT int ncclGetUniqueId(id *out)
{
    memset(out, 0, sizeof *out);
    const char *tmp = getenv("TMPDIR");
    snprintf(out->bytes, sizeof out->bytes, "%.60s/fake_nccl.XXXXXX", tmp != NULL ? tmp : "/tmp");
    return mkdtemp(out->bytes) != NULL ? OK : SYSTEM;
}

static struct sockaddr_un address(const comm *c, int rank)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%.90s/%d", c->dir, rank);
    return a;
}

static int meet(comm *c)
{
    struct sockaddr_un mine = address(c, c->rank);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&mine, sizeof mine) != 0 ||
        listen(listener, MAX) != 0)
        return SYSTEM;
    for (int r = 0; r < c->rank; r++) {
        struct sockaddr_un other = address(c, r);
        const struct timespec nap = {.tv_nsec = 2000000};
        c->fds[r] = socket(AF_UNIX, SOCK_STREAM, 0);
        while (connect(c->fds[r], (struct sockaddr *)&other, sizeof other) != 0)
            nanosleep(&nap, NULL);
        if (write(c->fds[r], &c->rank, sizeof c->rank) != sizeof c->rank)
            return SYSTEM;
    }
    for (int i = c->rank + 1; i < c->size; i++) {
        int fd = accept(listener, NULL, NULL), r = -1;
        if (fd < 0 || read(fd, &r, sizeof r) != sizeof r || r < 0 || r >= c->size)
            return SYSTEM;
        c->fds[r] = fd;
    }
    for (int r = 0; r < c->size; r++)
        if (r != c->rank)
            (void)fcntl(c->fds[r], F_SETFL, O_NONBLOCK);
    (void)close(listener);
    (void)unlink(mine.sun_path);
    (void)rmdir(c->dir); /* the last one can */
    return OK;
}

EXPORT int ncclCommInitRank(void **out, int size, id key, int rank);
EXPORT int ncclCommInitRank(void **out, int size, id key, int rank)
{
    comm *c = calloc(1, sizeof *c);
    if (c == NULL || size > MAX)
        return INTERNAL;
    c->size = size;
    c->rank = rank;
    snprintf(c->dir, sizeof c->dir, "%.99s", key.bytes);
    *out = c;
    return meet(c);
}

static void close_all(comm *c)
{
    for (int r = 0; r < c->size; r++)
        if (r != c->rank)
            (void)close(c->fds[r]);
}

EXPORT int ncclCommDestroy(comm *c);
EXPORT int ncclCommDestroy(comm *c)
{
    close_all(c);
    free(c);
    return OK;
}

/* A call that waits may still look at c, which therefore stays. */
EXPORT int ncclCommAbort(comm *c);
EXPORT int ncclCommAbort(comm *c)
{
    atomic_store(&c->aborted, 1);
    return OK;
}

EXPORT int ncclCommGetAsyncError(comm *c, int *error);
EXPORT int ncclCommGetAsyncError(comm *c, int *error)
{
    *error = atomic_load(&c->error);
    return OK;
}

EXPORT const char *ncclGetErrorString(int e);
EXPORT const char *ncclGetErrorString(int e)
{
    return e == OK ? "no error" : e == REMOTE ? "remote process exited" : "unhandled system error";
}

EXPORT const char *ncclGetLastError(const comm *c);
EXPORT const char *ncclGetLastError(const comm *c)
{
    (void)c;
    return "the fake's words";
}

static int add(comm *c, void *p, size_t n, int peer, int out)
{
    if (depth == 0 || n_ops == OPS || peer < 0 || peer >= c->size || peer == c->rank)
        return INTERNAL;
    ops[n_ops++] = (op){c, p, n, peer, out};
    return OK;
}

EXPORT int ncclSend(const void *p, size_t n, int type, int peer, comm *c, void *stream);
EXPORT int ncclSend(const void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    (void)stream;
    return type == 1 ? add(c, (void *)(size_t)p, n, peer, 1) : INTERNAL;
}

EXPORT int ncclRecv(void *p, size_t n, int type, int peer, comm *c, void *stream);
EXPORT int ncclRecv(void *p, size_t n, int type, int peer, comm *c, void *stream)
{
    (void)stream;
    return type == 1 ? add(c, p, n, peer, 0) : INTERNAL;
}

/* The first of what is left for a peer and a direction moves. 1: something is left. */
static int move(void)
{
    int left = 0;
    for (int i = 0; i < n_ops; i++) {
        op *o = &ops[i];
        int first = o->left > 0;
        for (int k = 0; k < i && first; k++)
            first = ops[k].left == 0 || ops[k].peer != o->peer || ops[k].out != o->out;
        left = left || o->left > 0;
        if (!first)
            continue;
        int fd = o->c->fds[o->peer];
        ssize_t n = o->out ? send(fd, o->p, o->left, MSG_NOSIGNAL) : recv(fd, o->p, o->left, 0);
        if (n > 0) {
            o->p += n;
            o->left -= (size_t)n;
        } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            atomic_store(&o->c->error, REMOTE);
        }
    }
    return left;
}

static int asked(const char *name, int now)
{
    const char *v = getenv(name);
    return v != NULL && atoi(v) == now;
}

EXPORT int ncclGroupStart(void);
EXPORT int ncclGroupStart(void)
{
    depth++;
    return OK;
}

EXPORT int ncclGroupEnd(void);
EXPORT int ncclGroupEnd(void)
{
    const struct timespec nap = {.tv_nsec = 200000};
    int now = atomic_fetch_add(&groups, 1) + 1, result = OK, n = n_ops;
    int late = asked("FAKE_NCCL_LATE", now), deaf = asked("FAKE_NCCL_DEAF", now);
    depth--;
    if (asked("FAKE_NCCL_FAIL", now))
        result = SYSTEM;
    if (late && n > 0)
        atomic_store(&ops[0].c->error, SYSTEM);
    while (result == OK && n > 0 && (late || deaf || move())) {
        if (atomic_load(&ops[0].c->aborted) != 0)
            result = INTERNAL;
        nanosleep(&nap, NULL);
    }
    n_ops = 0;
    return result;
}
