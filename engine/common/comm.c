/* Collectives over a backend's exchange of bytes. An allreduce is a reduce-scatter and an allgather:
 * rank r sums its piece over ranks 0, 1, ... in that order. */
#include "comm.h"

#include "checked.h"
#include "codec.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define PIECE ((int64_t)1 << 20) /* elements reduced at a time: bounds the scratch */
#define DEVICE_PIECE ((int64_t)1 << 25)
#define SMALL 256 /* elements up to which everybody sums everything: one exchange */

typedef struct plan {
    const void *send[CKPT_COMM_MAX];
    void *recv[CKPT_COMM_MAX];
    uint64_t send_n[CKPT_COMM_MAX], recv_n[CKPT_COMM_MAX];
} plan;

static ckpt_status exchange(const ckpt_comm *c, const plan *p, ckpt_err *err)
{
    char msg[400] = "";
    if (c->ops == NULL) {
        if (p->send_n[0] > 0 && p->recv[0] != p->send[0])
            memmove(p->recv[0], p->send[0], p->send_n[0]);
        return CKPT_OK;
    }
    if (!c->ops->exchange(c->self, p->send, p->send_n, p->recv, p->recv_n, msg, sizeof msg))
        return ckpt_fail(err, CKPT_E_IO, "rank %d of %d: %s", c->rank, c->size, msg);
    return CKPT_OK;
}

/* The tables of an exchange; freed by the caller. */
static plan *new_plan(const ckpt_comm *c, ckpt_err *err, ckpt_status *status)
{
    plan *p = NULL;
    *status = CKPT_OK;
    if (c->size < 1 || c->size > CKPT_COMM_MAX)
        *status =
            ckpt_fail(err, CKPT_E_UNSUPPORTED, "%d ranks, at most %d", c->size, CKPT_COMM_MAX);
    else if ((p = calloc(1, sizeof *p)) == NULL)
        *status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for an exchange");
    return p;
}

static ckpt_status grow_scratch(ckpt_comm *c, uint64_t bytes, ckpt_err *err)
{
    if (bytes <= c->cap)
        return CKPT_OK;
    free(c->scratch);
    c->cap = 0;
    c->scratch = malloc(bytes);
    if (c->scratch == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for an exchange of %llu bytes",
                         (unsigned long long)bytes);
    c->cap = bytes;
    return CKPT_OK;
}

static bool on_device(const ckpt_comm *c, const void *x)
{
    return c->ops != NULL && c->ops->on_device != NULL && c->ops->on_device(c->self, x);
}

/* Room for one reduction in memory of the kind of x; *room stays the communicator's. */
static ckpt_status find_room(ckpt_comm *c, const void *x, uint64_t bytes, void **room,
                             ckpt_err *err)
{
    char msg[400] = "";
    if (!on_device(c, x)) {
        ckpt_status status = grow_scratch(c, bytes, err);
        *room = c->scratch;
        return status;
    }
    *room = c->ops->room(c->self, bytes, msg, sizeof msg);
    return *room != NULL ? CKPT_OK
                         : ckpt_fail(err, CKPT_E_NOMEM, "rank %d of %d: %s", c->rank, c->size, msg);
}

static size_t size_of(ckpt_comm_type type)
{
    return type == CKPT_COMM_F32 ? 4 : type == CKPT_COMM_BF16 ? 2 : 8;
}

static double larger(double a, double b)
{
    return a != a || b != b ? a + b : a > b ? a : b;
}

static double element(ckpt_comm_type type, const void *x, int64_t i)
{
    if (type == CKPT_COMM_F64)
        return ((const double *)x)[i];
    if (type == CKPT_COMM_F32)
        return (double)((const float *)x)[i];
    return (double)ckpt_f32_of((uint32_t)((const uint16_t *)x)[i] << 16);
}

/* out[i] = x[0][i] + x[1][i] + ...; x holds `ranks` pieces of n. out may be the first of them. */
static void combine_host(ckpt_comm_type type, ckpt_comm_op op, const void *x, int ranks, int64_t n,
                         void *out)
{
    for (int64_t i = 0; i < n; i++) {
        if (type == CKPT_COMM_I64) {
            const int64_t *v = x;
            int64_t s = v[i];
            for (int64_t r = 1; r < ranks; r++)
                s = op == CKPT_COMM_SUM ? (int64_t)((uint64_t)s + (uint64_t)v[r * n + i])
                                        : ckpt_max_i64(s, v[r * n + i]);
            ((int64_t *)out)[i] = s;
            continue;
        }
        double s = element(type, x, i);
        for (int64_t r = 1; r < ranks; r++) {
            double v = element(type, x, r * n + i);
            s = op == CKPT_COMM_SUM ? s + v : larger(s, v);
        }
        if (type == CKPT_COMM_F64)
            ((double *)out)[i] = s;
        else if (type == CKPT_COMM_F32)
            ((float *)out)[i] = (float)s;
        else
            ((uint16_t *)out)[i] = /* a NaN is quiet after a sum, so its upper half is one too */
                (uint16_t)(ckpt_f32_bits(ckpt_bf16_round((float)s)) >> 16);
    }
}

static ckpt_status combine(const ckpt_comm *c, ckpt_comm_type type, ckpt_comm_op op, const void *x,
                           int64_t n, void *out, ckpt_err *err)
{
    char msg[400] = "";
    if (n == 0)
        return CKPT_OK;
    if (!on_device(c, x))
        combine_host(type, op, x, c->size, n, out);
    else if (!c->ops->combine(c->self, (int)type, (int)op, x, c->size, n, out, msg, sizeof msg))
        return ckpt_fail(err, CKPT_E_IO, "rank %d of %d: %s", c->rank, c->size, msg);
    return CKPT_OK;
}

/* Piece of every rank: at[r] .. at[r + 1] in elements, into this rank's piece of the result. */
static ckpt_status reduce_pieces(ckpt_comm *c, plan *p, ckpt_comm_type type, ckpt_comm_op op,
                                 const char *x, const int64_t *at, void *out, ckpt_err *err)
{
    const size_t elem = size_of(type);
    const int64_t mine = at[c->rank + 1] - at[c->rank];
    void *room = NULL;
    ckpt_status status = find_room(c, x, (uint64_t)mine * (uint64_t)c->size * elem, &room, err);
    if (status != CKPT_OK)
        return status;
    for (int r = 0; r < c->size; r++) {
        p->send[r] = x + (uint64_t)at[r] * elem;
        p->send_n[r] = (uint64_t)(at[r + 1] - at[r]) * elem;
        p->recv[r] = (char *)room + (uint64_t)r * (uint64_t)mine * elem;
        p->recv_n[r] = (uint64_t)mine * elem;
    }
    status = exchange(c, p, err);
    return status == CKPT_OK ? combine(c, type, op, room, mine, out, err) : status;
}

static ckpt_status gather_pieces(const ckpt_comm *c, plan *p, size_t elem, const void *x,
                                 const int64_t *counts, void *out, ckpt_err *err)
{
    uint64_t at = 0;
    for (int r = 0; r < c->size; r++) {
        p->send[r] = x;
        p->send_n[r] = (uint64_t)counts[c->rank] * elem;
        p->recv[r] = (char *)out + at;
        p->recv_n[r] = (uint64_t)counts[r] * elem;
        at += p->recv_n[r];
    }
    return exchange(c, p, err);
}

static ckpt_status reduce_small(ckpt_comm *c, plan *p, ckpt_comm_type type, ckpt_comm_op op,
                                void *x, int64_t n, ckpt_err *err)
{
    int64_t *counts = malloc((size_t)c->size * sizeof *counts);
    if (counts == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for an exchange");
    for (int r = 0; r < c->size; r++)
        counts[r] = n;
    void *room = NULL;
    ckpt_status status =
        find_room(c, x, (uint64_t)n * (uint64_t)c->size * size_of(type), &room, err);
    if (status == CKPT_OK)
        status = gather_pieces(c, p, size_of(type), x, counts, room, err);
    if (status == CKPT_OK)
        status = combine(c, type, op, room, n, x, err);
    free(counts);
    return status;
}

ckpt_status ckpt_comm_allreduce(ckpt_comm *c, ckpt_comm_type type, ckpt_comm_op op, void *x,
                                int64_t n, ckpt_err *err)
{
    ckpt_status status;
    if (c->size == 1)
        return CKPT_OK;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    int64_t *at = malloc(((size_t)c->size * 2 + 1) * sizeof *at);
    if (at == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for an exchange");
        goto done;
    }
    if (n <= SMALL) {
        status = reduce_small(c, p, type, op, x, n, err);
        goto done;
    }
    int64_t *counts = at + c->size + 1, most = on_device(c, x) ? DEVICE_PIECE : PIECE;
    for (int64_t lo = 0; lo < n; lo += most) {
        int64_t len = ckpt_min_i64(most, n - lo);
        char *piece = (char *)x + (uint64_t)lo * size_of(type);
        for (int r = 0; r <= c->size; r++)
            at[r] = ckpt_part_at(len, c->size, r);
        for (int r = 0; r < c->size; r++)
            counts[r] = at[r + 1] - at[r];
        char *own = piece + (uint64_t)at[c->rank] * size_of(type);
        CKPT_CHECK(reduce_pieces(c, p, type, op, piece, at, own, err));
        CKPT_CHECK(gather_pieces(c, p, size_of(type), own, counts, piece, err));
    }
done:
    free(at);
    free(p);
    return status;
}

ckpt_status ckpt_comm_reduce_scatter(ckpt_comm *c, ckpt_comm_type type, const void *x,
                                     const int64_t *counts, void *out, ckpt_err *err)
{
    ckpt_status status;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    int64_t *at = malloc(((size_t)c->size + 1) * sizeof *at);
    if (at == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for an exchange");
        goto done;
    }
    at[0] = 0;
    for (int r = 0; r < c->size; r++)
        at[r + 1] = at[r] + counts[r];
    status = reduce_pieces(c, p, type, CKPT_COMM_SUM, x, at, out, err);
done:
    free(at);
    free(p);
    return status;
}

ckpt_status ckpt_comm_allgather(ckpt_comm *c, size_t elem, const void *x, const int64_t *counts,
                                void *out, ckpt_err *err)
{
    ckpt_status status;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    status = gather_pieces(c, p, elem, x, counts, out, err);
    free(p);
    return status;
}

ckpt_status ckpt_comm_alltoall(ckpt_comm *c, size_t elem, const void *send,
                               const int64_t *send_counts, void *recv, const int64_t *recv_counts,
                               ckpt_err *err)
{
    ckpt_status status;
    uint64_t from = 0, to = 0;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    for (int r = 0; r < c->size; r++) {
        p->send[r] = (const char *)send + from;
        p->recv[r] = (char *)recv + to;
        p->send_n[r] = (uint64_t)send_counts[r] * elem;
        p->recv_n[r] = (uint64_t)recv_counts[r] * elem;
        from += p->send_n[r];
        to += p->recv_n[r];
    }
    status = exchange(c, p, err);
    free(p);
    return status;
}

ckpt_status ckpt_comm_broadcast(ckpt_comm *c, void *x, size_t bytes, int root, ckpt_err *err)
{
    ckpt_status status;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    for (int r = 0; r < c->size && c->rank == root; r++) {
        p->send[r] = x;
        p->send_n[r] = r == root ? 0 : bytes;
    }
    p->recv[root] = x;
    p->recv_n[root] = c->rank == root ? 0 : bytes;
    status = exchange(c, p, err);
    free(p);
    return status;
}

ckpt_status ckpt_comm_pass(ckpt_comm *c, int from, int to, const void *send, void *recv,
                           size_t bytes, ckpt_err *err)
{
    ckpt_status status;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    if (c->rank == from) {
        p->send[to] = send;
        p->send_n[to] = bytes;
    }
    if (c->rank == to) {
        p->recv[from] = recv;
        p->recv_n[from] = bytes;
    }
    status = exchange(c, p, err);
    free(p);
    return status;
}

ckpt_status ckpt_comm_ring(ckpt_comm *c, const void *send, void *recv, size_t bytes, ckpt_err *err)
{
    ckpt_status status;
    int to = (c->rank + 1) % c->size, from = (c->rank + c->size - 1) % c->size;
    plan *p = new_plan(c, err, &status);
    if (p == NULL)
        return status;
    p->send[to] = send;
    p->send_n[to] = bytes;
    p->recv[from] = recv;
    p->recv_n[from] = bytes;
    status = exchange(c, p, err);
    free(p);
    return status;
}

ckpt_status ckpt_comm_barrier(ckpt_comm *c, ckpt_err *err)
{
    int64_t one = 1;
    return ckpt_comm_allreduce(c, CKPT_COMM_I64, CKPT_COMM_SUM, &one, 1, err);
}

ckpt_status ckpt_comm_split(const ckpt_comm *c, int color, ckpt_comm *out, ckpt_err *err)
{
    char msg[400] = "";
    *out = ckpt_comm_alone();
    if (c->ops == NULL)
        return CKPT_OK;
    if (!c->ops->split(c->self, color, &out->self, &out->rank, &out->size, msg, sizeof msg))
        return ckpt_fail(err, CKPT_E_IO, "rank %d of %d: %s", c->rank, c->size, msg);
    out->ops = c->ops;
    return CKPT_OK;
}

void ckpt_comm_abort(const ckpt_comm *c, int code)
{
    if (c->ops != NULL)
        c->ops->stop(c->self, code);
}

void ckpt_comm_release(ckpt_comm *c)
{
    if (c->ops != NULL)
        c->ops->free(c->self);
    free(c->scratch);
    *c = ckpt_comm_alone();
}

ckpt_status ckpt_comm_load(ckpt_comm *out, const char *path, ckpt_err *err)
{
    char msg[400] = "";
    *out = ckpt_comm_alone();
    /* Global: MPI libraries load parts of themselves that look for their symbols. Never closed. */
    void *so = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (so == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "several ranks need --launch N or the MPI part of ckpt, which does not "
                         "load (%s); install "
                         "libopenmpi-dev and openmpi-bin and build ckpt again",
                         dlerror());
    const ckpt_comm_plugin *plugin = dlsym(so, "ckpt_comm_plugin_v2");
    if (plugin == NULL || plugin->version != CKPT_COMM_PLUGIN_VERSION)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: of another version of ckpt", path);
    if (!plugin->open(&out->self, &out->rank, &out->size, msg, sizeof msg))
        return ckpt_fail(err, CKPT_E_IO, "%s: %s", plugin->name, msg);
    if (out->size > CKPT_COMM_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%d ranks, at most %d", out->size, CKPT_COMM_MAX);
    out->ops = &plugin->ops;
    return CKPT_OK;
}
