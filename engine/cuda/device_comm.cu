/* Collectives over memory of a device: see device_comm.h. The kernel: a thread an element, which reads one of
 * every rank's piece in order; traffic is (ranks + 1) elements. */
#include "device_comm.h"

#include "device_comm.cuh"
#include "nccl_api.h"
#include "ops_common.cuh"

#include <atomic>
#include <dlfcn.h>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

namespace kda
{
namespace
{

/* ---- sums ----------------------------------------------------------------------------------- */

DEV double wide(double x)
{
    return x;
}
DEV double wide(float x)
{
    return (double)x;
}
DEV double wide(bf16 x)
{
    return (double)to_f(x);
}
DEV void narrow(double x, double *out)
{
    *out = x;
}
DEV void narrow(double x, float *out)
{
    *out = (float)x;
}
DEV void narrow(double x, bf16 *out)
{
    *out = cast<bf16>((float)x);
}

template <class T>
KERNEL(THREADS, 1)
combine_ranks(const T *x, int ranks, int64_t n, bool largest, T *out)
{
    const int64_t i = index_of();
    if (i >= n)
        return;
    double s = wide(x[i]);
    for (int64_t r = 1; r < ranks; r++) {
        const double v = wide(x[r * n + i]);
        s = !largest ? s + v : s != s || v != v ? s + v : s > v ? s : v;
    }
    narrow(s, &out[i]);
}
KERNEL(THREADS, 1)
combine_whole(const int64_t *x, int ranks, int64_t n, bool largest, int64_t *out)
{
    const int64_t i = index_of();
    if (i >= n)
        return;
    int64_t s = x[i];
    for (int64_t r = 1; r < ranks; r++) {
        const int64_t v = x[r * n + i];
        s = !largest ? (int64_t)((uint64_t)s + (uint64_t)v) : s > v ? s : v;
    }
    out[i] = s;
}

/* ---- a run ---------------------------------------------------------------------------------- */

struct world {
    ckpt_comm host; /* of the whole run */
    nccl_api api;
    void *comm;    /* NCCL's, or null: through pinned memory */
    bool aborted;  /* it is gone already */
    char way[160]; /* ckpt_cuda_comm_way */
    int device;
    device_stream stream;
    double limit;
    void *pinned, *room;
    size_t pinned_n, room_n;
    int users; /* ends */
    /* The watch: the watcher alone decides and never calls the driver, which lets nobody in while a thread waits
     * inside it for the device, as a copy to pageable memory does behind an exchange that will not end. The marker
     * follows the stream for it. */
    pthread_t watcher, marker;
    bool watches, watched, marks;             /* an event; threads */
    std::atomic<bool> leave, claimed, failed; /* claimed: somebody writes `why` */
    std::atomic<double> entered;          /* when the call into NCCL that runs now began, 0: none */
    std::atomic<double> since;            /* when `event` was recorded, 0: it is free */
    std::atomic<uint64_t> issued, marked; /* exchanges; those that `event` follows */
    device_event event;
    char why[300]; /* once failed */
};

struct end {
    world *w;
    const ckpt_comm_ops *ops; /* of the host's communicator */
    void *self;
    int rank, size;
    int *members; /* ranks of the run */
};

double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool say(char *msg, size_t cap, const char *what, const char *words)
{
    snprintf(msg, cap, "%s: %s", what, words);
    return false;
}

/* ---- watching ------------------------------------------------------------------------------- */

/* The first reason stays. */
void fail_with(world *w, const char *words)
{
    if (w->claimed.exchange(true)) {
        while (!w->failed) /* it is being written */
            sched_yield();
        return;
    }
    snprintf(w->why, sizeof w->why, "%s", words);
    w->failed = true;
}

/* Why the run cannot go on, into said [cap]; false while it can. */
bool has_ended(world *w, char *said, size_t cap)
{
    const char *words = w->host.ops->why ? w->host.ops->why(w->host.self) : nullptr;
    const double entered = w->entered, since = w->since, t = now();
    int error = NCCL_OK;
    if (w->failed)
        return true;
    if (words) {
        snprintf(said, cap, "%s", words);
        return true;
    }
    if (w->api.async_error(w->comm, &error) != NCCL_OK ||
        (error != NCCL_OK && error != NCCL_IN_PROGRESS)) {
        const char *last = w->api.last_error ? w->api.last_error(w->comm) : nullptr;
        snprintf(said, cap, "NCCL: %s%s%.150s", w->api.text(error), last && *last ? ": " : "",
                 last && *last ? last : "");
        return true;
    }
    if ((entered > 0 && t - entered > w->limit) || (since > 0 && t - since > w->limit)) {
        snprintf(said, cap, "no answer from another rank's GPU for %g seconds", w->limit);
        return true;
    }
    return false;
}

const timespec WATCH_NAP = {0, 100000000}, MARK_NAP = {0, 20000000};

/* `event` follows the latest exchange. */
void mark(world *w)
{
    const uint64_t latest = w->issued;
    if (record_event(&w->event, w->stream)) {
        w->marked = latest;
        w->since = now();
    }
}

void *follow(void *arg)
{
    world *w = (world *)arg;
    (void)use_device(w->device);
    while (!w->leave) {
        nanosleep(&MARK_NAP, nullptr);
        if (w->since == 0 || !event_done(&w->event))
            continue;
        w->since = 0;
        if (w->marked != w->issued) /* more began meanwhile, which no event follows yet */
            mark(w);
    }
    return nullptr;
}

void *watch(void *arg)
{
    world *w = (world *)arg;
    char said[300] = "";
    (void)use_device(w->device); /* for ncclCommAbort */
    while (!w->leave) {
        nanosleep(&WATCH_NAP, nullptr);
        if (!has_ended(w, said, sizeof said))
            continue;
        fail_with(w, said);
        /* One that is only passing through NCCL is given the time to. */
        for (int k = 0; k < 50 && w->entered > 0; k++)
            nanosleep(&MARK_NAP, nullptr);
        w->aborted = true;
        (void)w->api.give_up(w->comm);
        return nullptr;
    }
    return nullptr;
}

/* Between enter and leave NCCL is used: never begun once the watch has failed. */
bool enter(world *w, char *msg, size_t cap)
{
    w->entered = now();
    if (!w->failed)
        return true;
    w->entered = 0;
    snprintf(msg, cap, "%s", w->why);
    return false;
}
bool leave(world *w, int result, const char *what, char *msg, size_t cap)
{
    w->entered = 0;
    if (w->failed) {
        snprintf(msg, cap, "%s", w->why);
        return false;
    }
    if (result == NCCL_OK)
        return true;
    char words[200];
    say(words, sizeof words, what, w->api.text(result));
    fail_with(w, words); /* nothing goes through it any more; the watch aborts it */
    snprintf(msg, cap, "%s", w->why);
    return false;
}

/* ---- an exchange ---------------------------------------------------------------------------- */

/* Of all pieces of an exchange: they lie on the device. */
bool moves_device(const end *e, const void *const *send, const uint64_t *send_n, void *const *recv,
                  const uint64_t *recv_n)
{
    for (int r = 0; r < e->size; r++)
        if (send_n[r] > 0 || recv_n[r] > 0)
            return of_device(send_n[r] > 0 ? send[r] : recv[r]);
    return false;
}

bool through_nccl(end *e, const void *const *send, const uint64_t *send_n, void *const *recv,
                  const uint64_t *recv_n, char *msg, size_t cap)
{
    world *w = e->w;
    const nccl_api *a = &w->api;
    void *stream = (void *)(uintptr_t)w->stream;
    if (!enter(w, msg, cap))
        return false;
    int result = a->group_start();
    for (int i = 1; i < e->size && result == NCCL_OK; i++) {
        const int r = (e->rank + i) % e->size, peer = e->members[r];
        if (send_n[r] > 0)
            result = a->send(send[r], (size_t)send_n[r], NCCL_BYTES, peer, w->comm, stream);
        if (recv_n[r] > 0 && result == NCCL_OK)
            result = a->recv(recv[r], (size_t)recv_n[r], NCCL_BYTES, peer, w->comm, stream);
    }
    const int ended = a->group_end();
    if (!leave(w, result == NCCL_OK ? ended : result, "NCCL", msg, cap))
        return false;
    w->issued++;
    if (w->since == 0)
        mark(w);
    return true;
}

bool grow(void **p, size_t *have, uint64_t want, bool pinned, world *w, char *msg, size_t cap)
{
    if (want <= *have)
        return true;
    const char *bad = wait_for(w->stream); /* what still uses the old one */
    give_memory(*p, pinned);
    *p = nullptr;
    *have = 0;
    want += want / 4;
    if (!bad)
        bad = take_memory(p, (size_t)want, pinned);
    if (bad)
        return say(msg, cap, pinned ? "pinned memory" : "memory of the device", bad);
    *have = (size_t)want;
    return true;
}

/* Pieces side by side, multiples of 16 bytes. */
uint64_t place_of(const uint64_t *n, int size, uint64_t at, uint64_t *places)
{
    for (int r = 0; r < size; r++) {
        places[r] = at;
        at += (n[r] + 15) / 16 * 16;
    }
    return at;
}

bool through_host(end *e, const void *const *send, const uint64_t *send_n, void *const *recv,
                  const uint64_t *recv_n, char *msg, size_t cap)
{
    world *w = e->w;
    const size_t n = (size_t)e->size;
    uint64_t *places = new (std::nothrow) uint64_t[4 * n];
    const void **from = new (std::nothrow) const void *[n];
    void **to = new (std::nothrow) void *[n];
    const char *bad = places && from && to ? nullptr : "out of memory";
    bool ok = false;
    if (!bad) {
        uint64_t *out = places, *in = places + n, *sizes = places + 2 * n, *want = places + 3 * n;
        for (int r = 0; r < e->size; r++) { /* the own piece is copied on the device */
            sizes[r] = r == e->rank ? 0 : send_n[r];
            want[r] = r == e->rank ? 0 : recv_n[r];
        }
        const uint64_t all = place_of(want, e->size, place_of(sizes, e->size, 0, out), in);
        if (grow(&w->pinned, &w->pinned_n, all, true, w, msg, cap)) {
            char *base = (char *)w->pinned;
            for (int r = 0; r < e->size; r++) {
                from[r] = base + out[r];
                to[r] = base + in[r];
                if (sizes[r] > 0 && !bad)
                    bad = copy_bytes(base + out[r], send[r], (size_t)sizes[r], w->stream);
            }
            if (!bad)
                bad = wait_for(w->stream);
            ok = !bad && e->ops->exchange(e->self, from, sizes, to, want, msg, cap);
            for (int r = 0; r < e->size && ok && !bad; r++)
                if (want[r] > 0)
                    bad = copy_bytes(recv[r], to[r], (size_t)want[r], w->stream);
        }
    }
    delete[] places;
    delete[] from;
    delete[] to;
    return bad ? say(msg, cap, "memory of the device", bad) : ok;
}

bool exchange(void *self, const void *const *send, const uint64_t *send_n, void *const *recv,
              const uint64_t *recv_n, char *msg, size_t cap)
{
    end *e = (end *)self;
    const int me = e->rank;
    if (e->w->failed) {
        snprintf(msg, cap, "%s", e->w->why);
        return false;
    }
    if (!moves_device(e, send, send_n, recv, recv_n))
        return e->ops->exchange(e->self, send, send_n, recv, recv_n, msg, cap);
    if (send_n[me] != recv_n[me]) {
        snprintf(msg, cap, "%llu bytes to itself, %llu expected", (unsigned long long)send_n[me],
                 (unsigned long long)recv_n[me]);
        return false;
    }
    if (send_n[me] > 0 && recv[me] != send[me]) {
        const char *bad = copy_bytes(recv[me], send[me], (size_t)send_n[me], e->w->stream);
        if (bad)
            return say(msg, cap, "memory of the device", bad);
    }
    return e->w->comm ? through_nccl(e, send, send_n, recv, recv_n, msg, cap)
                      : through_host(e, send, send_n, recv, recv_n, msg, cap);
}

bool on_device(void *self, const void *p)
{
    (void)self;
    return p && of_device(p);
}

void *room(void *self, uint64_t bytes, char *msg, size_t cap)
{
    world *w = ((end *)self)->w;
    return grow(&w->room, &w->room_n, bytes ? bytes : 1, false, w, msg, cap) ? w->room : nullptr;
}

bool combine(void *self, int type, int op, const void *x, int ranks, int64_t n, void *out,
             char *msg, size_t cap)
{
    world *w = ((end *)self)->w;
    const int64_t blocks = ceil_div(n, THREADS);
    const bool largest = op == CKPT_COMM_MAX_OF;
    ckpt_err err = {};
    if (grid_fits("a sum over ranks", blocks, &err) != CKPT_OK) {
        snprintf(msg, cap, "%s", err.text);
        return false;
    }
    switch (type) {
    case CKPT_COMM_F32:
        LAUNCH(combine_ranks<float>, blocks, THREADS, 0, w->stream, (const float *)x, ranks, n,
               largest, (float *)out);
        break;
    case CKPT_COMM_F64:
        LAUNCH(combine_ranks<double>, blocks, THREADS, 0, w->stream, (const double *)x, ranks, n,
               largest, (double *)out);
        break;
    case CKPT_COMM_BF16:
        LAUNCH(combine_ranks<bf16>, blocks, THREADS, 0, w->stream, (const bf16 *)x, ranks, n,
               largest, (bf16 *)out);
        break;
    default:
        LAUNCH(combine_whole, blocks, THREADS, 0, w->stream, (const int64_t *)x, ranks, n, largest,
               (int64_t *)out);
    }
    if (launched("a sum over ranks", &err) == CKPT_OK)
        return true;
    snprintf(msg, cap, "%s", err.text);
    return false;
}

/* ---- ends ----------------------------------------------------------------------------------- */

/* One value of every member of a group of the host's. */
bool tell(const ckpt_comm_ops *ops, void *self, int size, const void *mine, size_t bytes, void *all,
          char *msg, size_t cap)
{
    const size_t n = (size_t)size;
    const void **send = new (std::nothrow) const void *[n];
    void **recv = new (std::nothrow) void *[n];
    uint64_t *lengths = new (std::nothrow) uint64_t[n];
    bool ok = send && recv && lengths;
    if (!ok)
        snprintf(msg, cap, "out of memory for an exchange");
    for (size_t r = 0; r < n && ok; r++) {
        send[r] = mine;
        recv[r] = (char *)all + r * bytes;
        lengths[r] = bytes;
    }
    ok = ok && ops->exchange(self, send, lengths, recv, lengths, msg, cap);
    delete[] send;
    delete[] recv;
    delete[] lengths;
    return ok;
}

end *new_end(world *w, const ckpt_comm_ops *ops, void *self, int rank, int size)
{
    end *e = new (std::nothrow) end();
    if (!e)
        return nullptr;
    *e = {w, ops, self, rank, size, new (std::nothrow) int[(size_t)size]};
    if (!e->members) {
        delete e;
        return nullptr;
    }
    w->users++;
    return e;
}

bool split(void *self, int color, void **out, int *rank, int *size, char *msg, size_t cap)
{
    end *e = (end *)self;
    void *child = nullptr;
    const int mine = e->members[e->rank];
    if (!e->ops->split(e->self, color, &child, rank, size, msg, cap))
        return false;
    end *made = new_end(e->w, e->ops, child, *rank, *size);
    if (!made)
        snprintf(msg, cap, "out of memory for a group of %d", *size);
    if (made && tell(e->ops, child, *size, &mine, sizeof mine, made->members, msg, cap)) {
        *out = made;
        return true;
    }
    e->ops->free(child);
    if (made) {
        made->w->users--;
        delete[] made->members;
        delete made;
    }
    return false;
}

void end_watch(world *w)
{
    w->leave = true;
    if (w->watched)
        pthread_join(w->watcher, nullptr);
    if (w->marks)
        pthread_join(w->marker, nullptr);
    if (w->watches)
        close_event(&w->event);
    w->watched = w->marks = w->watches = false;
}

void close_world(world *w)
{
    end_watch(w);
    if (w->comm && !w->aborted)
        (void)w->api.destroy(w->comm);
    give_memory(w->pinned, true);
    give_memory(w->room, false);
    delete w;
}

void stop(void *self, int code)
{
    end *e = (end *)self;
    world *w = e->w;
    end_watch(w);
    if (w->comm && !w->aborted) { /* destroying would wait for ranks that fail */
        fail_with(w, "this rank stopped");
        (void)w->api.give_up(w->comm);
        w->aborted = true;
    }
    e->ops->stop(e->self, code);
}

void free_end(void *self)
{
    end *e = (end *)self;
    world *w = e->w;
    if (e->self == w->host.self)
        end_watch(w); /* which asks the host's */
    if (--w->users == 0)
        close_world(w);
    e->ops->free(e->self);
    delete[] e->members;
    delete e;
}

const char *why(void *self)
{
    end *e = (end *)self;
    if (e->w->failed)
        return e->w->why;
    return e->ops->why ? e->ops->why(e->self) : nullptr;
}

const ckpt_comm_ops table = {exchange, split, stop, free_end, why, on_device, room, combine};

/* ---- opening -------------------------------------------------------------------------------- */

/* NULL, or what is missing. Once opened NCCL stays. */
const char *load_nccl(const char *path, nccl_api *a)
{
    static const char *const names[] = {
        "ncclGetVersion", "ncclGetUniqueId",       "ncclCommInitRank",   "ncclCommDestroy",
        "ncclCommAbort",  "ncclCommGetAsyncError", "ncclGetErrorString", "ncclGetLastError",
        "ncclGroupStart", "ncclGroupEnd",          "ncclSend",           "ncclRecv"};
    void *found[sizeof names / sizeof *names];
    static_assert(sizeof found == sizeof *a, "a pointer a name");
    void *so = dlopen(path ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!so)
        return "NCCL is not there";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        found[i] = dlsym(so, names[i]);
        if (!found[i] && strcmp(names[i], "ncclGetLastError") != 0)
            return "NCCL lacks functions";
    }
    memcpy(a, found, sizeof found);
    int version = 0;
    return a->version(&version) == NCCL_OK && version >= NCCL_LEAST ? nullptr : "NCCL is too old";
}

/* What ranks tell each other first. */
struct card {
    char host[64], device[64];
    int have; /* NCCL */
};

/* Which way memory of the device moves, equal on all ranks: words if not through NCCL. */
const char *judge(const card *all, int size)
{
    int have = 0;
    for (int r = 0; r < size; r++)
        have += all[r].have;
    if (have == 0)
        return "NCCL is not there, or not wanted";
    if (have < size)
        return "NCCL is there on some ranks only";
    for (int r = 0; r < size; r++)
        for (int s = 0; s < r; s++)
            if (!strcmp(all[r].host, all[s].host) && !strcmp(all[r].device, all[s].device))
                return "several ranks share a GPU";
    return nullptr;
}

/* NCCL's start waits for all ranks, in a thread of its own, so that a rank that died meanwhile is noticed;
 * the thread is then left to the end of the process. */
struct start {
    nccl_api api;
    nccl_id id;
    int size, rank, device, result;
    void *comm;
    std::atomic<int> state; /* 0 runs, 1 done, 2 nobody waits any more */
};
void *start_nccl(void *arg)
{
    start *s = (start *)arg;
    (void)use_device(s->device);
    s->result = s->api.init(&s->comm, s->size, s->id, s->rank);
    int running = 0;
    if (!s->state.compare_exchange_strong(running, 1))
        delete s;
    return nullptr;
}

bool open_nccl(world *w, const nccl_id *id, char *msg, size_t cap)
{
    const timespec nap = {0, 1000000};
    const ckpt_comm *c = &w->host;
    start *s = new (std::nothrow) start();
    pthread_t thread;
    if (!s || (s->api = w->api, s->id = *id, s->size = c->size, s->rank = c->rank,
               s->device = w->device, pthread_create(&thread, nullptr, start_nccl, s)) != 0) {
        delete s;
        return say(msg, cap, "NCCL", "no thread to start it");
    }
    (void)pthread_detach(thread);
    for (const double begin = now(); s->state == 0; nanosleep(&nap, nullptr)) {
        const char *words = c->ops->why ? c->ops->why(c->self) : nullptr;
        if (!words && now() - begin > w->limit)
            words = "it did not start in time";
        int running = 0;
        if (words && s->state.compare_exchange_strong(running, 2))
            return say(msg, cap, "NCCL", words);
    }
    w->comm = s->comm;
    const int result = s->result;
    delete s;
    if (result != NCCL_OK) {
        const char *last = w->api.last_error ? w->api.last_error(nullptr) : nullptr;
        snprintf(msg, cap, "NCCL: %s%s%.200s", w->api.text(result), last && *last ? ": " : "",
                 last && *last ? last : "");
        w->comm = nullptr;
        return false;
    }
    return true;
}

bool meet(world *w, const ckpt_cuda_comm_opts *o, char *msg, size_t cap)
{
    const ckpt_comm *c = &w->host;
    card mine = {};
    int version = 0;
    nccl_id id = {};
    const char *none = o->stage ? "not wanted" : load_nccl(o->library, &w->api);
    const char *bad = use_device(w->device);
    if (!bad)
        bad = name_device(w->device, mine.device, sizeof mine.device);
    if (bad)
        return say(msg, cap, "the GPU", bad);
    (void)gethostname(mine.host, sizeof mine.host - 1);
    mine.have = !none;
    card *all = new (std::nothrow) card[(size_t)c->size];
    if (!all || !tell(c->ops, c->self, c->size, &mine, sizeof mine, all, msg, cap)) {
        if (!all)
            snprintf(msg, cap, "out of memory for %d ranks", c->size);
        delete[] all;
        return false;
    }
    const char *other = judge(all, c->size);
    delete[] all;
    if (other) {
        snprintf(w->way, sizeof w->way, "through pinned memory (%s)", none ? none : other);
        return true;
    }
    (void)w->api.version(&version);
    snprintf(w->way, sizeof w->way, "NCCL %d.%d.%d", version / 10000, version / 100 % 100,
             version % 100);
    nccl_id *ids = new (std::nothrow) nccl_id[(size_t)c->size];
    int result = c->rank == 0 ? w->api.unique_id(&id) : NCCL_OK;
    bool ok = ids && tell(c->ops, c->self, c->size, &id, sizeof id, ids, msg, cap);
    if (ok)
        id = ids[0];
    else if (!ids)
        snprintf(msg, cap, "out of memory for %d ranks", c->size);
    delete[] ids;
    if (result != NCCL_OK)
        return say(msg, cap, "NCCL", w->api.text(result));
    return ok && open_nccl(w, &id, msg, cap);
}

bool open_all(world *w, const ckpt_cuda_comm_opts *o, char *msg, size_t cap)
{
    if (!meet(w, o, msg, cap))
        return false;
    if (!w->comm)
        return true;
    const char *bad = open_event(&w->event);
    if (bad)
        return say(msg, cap, "an event of the GPU", bad);
    w->watches = true;
    w->watched = pthread_create(&w->watcher, nullptr, watch, w) == 0;
    w->marks = w->watched && pthread_create(&w->marker, nullptr, follow, w) == 0;
    return w->marks || say(msg, cap, "NCCL", "no threads to watch it");
}

} // namespace
} // namespace kda

extern "C" ckpt_status ckpt_cuda_comm_open(ckpt_comm *host, const ckpt_cuda_comm_opts *o,
                                           ckpt_comm *out, ckpt_err *err)
{
    using namespace kda;
    char msg[400] = "";
    if (!host->ops)
        return ckpt_fail(err, CKPT_E_USAGE, "one rank alone needs no communication");
    world *w = new (std::nothrow) world();
    if (!w)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", host->size);
    w->host = *host;
    w->device = o->device;
    w->stream = stream_of(o->stream);
    w->limit = o->limit > 0 ? o->limit : 600;
    end *e = new_end(w, host->ops, host->self, host->rank, host->size);
    if (!e || !open_all(w, o, msg, sizeof msg)) {
        if (e)
            delete[] e->members;
        delete e;
        close_world(w);
        return ckpt_fail(err, e ? CKPT_E_IO : CKPT_E_NOMEM, "rank %d of %d: %s", host->rank,
                         host->size, e ? msg : "out of memory");
    }
    for (int r = 0; r < host->size; r++)
        e->members[r] = r;
    *out = ckpt_comm{};
    out->rank = host->rank;
    out->size = host->size;
    out->ops = &table;
    out->self = e;
    host->ops = nullptr;
    host->self = nullptr;
    return CKPT_OK;
}

extern "C" const char *ckpt_cuda_comm_way(const ckpt_comm *c)
{
    return c->ops == &kda::table ? ((const kda::end *)c->self)->w->way : "host memory";
}

#ifdef CKPT_CUDA_EMULATE
/* For tests: does memory count as the device's? */
extern "C" void ckpt_cuda_comm_pretend(bool device)
{
    kda::emulated_device_memory = device;
}
/* For tests: this thread is inside the driver, or leaves it. */
extern "C" void ckpt_cuda_comm_hold(bool driver)
{
    kda::emulated_driver = driver ? (uintptr_t)pthread_self() : 0;
}
#endif
