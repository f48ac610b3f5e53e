/* Ranks of one host over shared memory: see comm_host.h. */
#include "comm_host.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define GROUP 0x9e3779b97f4a7c15u   /* between the numbers of two groups' messages */
#define RINGS ((uint64_t)256 << 20) /* bytes of all rings, at most, while one is above LEAST */
#define MOST ((uint64_t)1 << 20)
#define LEAST ((uint64_t)1 << 16)
#define NAP_NS 100000000 /* ns; a wake-up that is lost to a death costs no more than this */
#define SPINS 400        /* looks before a rank sleeps, where every rank has a core */

/* Bytes written and read since the start: their difference lies in the ring. */
typedef struct ring {
    _Alignas(LINE) atomic_uint_fast64_t written;
    _Alignas(LINE) atomic_uint_fast64_t read;
} ring;

typedef struct seat {
    _Alignas(LINE) atomic_uint bell; /* advanced when there may be something to do */
    atomic_uint asleep;
    atomic_int gone; /* 1: ended or died */
} seat;

struct ckpt_comm_host {
    int size;
    bool spin;
    size_t bytes;  /* of the mapping */
    uint64_t room; /* bytes of a ring, a power of two */
    atomic_int stopped;
    atomic_int dead; /* 0, 1: why is being written, 2: why is there */
    atomic_int spoken;
    char why[200];
    seat seats[CKPT_COMM_HOST_MAX];
    ring rings[]; /* [size * size]; the bytes of all follow */
};

typedef struct member {
    int rank;           /* of the run */
    uint64_t sent, got; /* messages of this group to and from it so far */
} member;

typedef struct end {
    ckpt_comm_host *h;
    int rank, size;
    uint64_t id, splits; /* of the group; splits so far */
    member members[];
} end;

/* ---- rings ------------------------------------------------------------------------------------ */

static ring *ring_of(ckpt_comm_host *h, int from, int to)
{
    return &h->rings[from * h->size + to];
}

static char *bytes_of(ckpt_comm_host *h, const ring *r)
{
    char *first = (char *)&h->rings[h->size * h->size];
    return first + (uint64_t)(r - h->rings) * h->room;
}

static void wake(seat *s)
{
    atomic_fetch_add(&s->bell, 1);
    if (atomic_load(&s->asleep) != 0)
        (void)syscall(SYS_futex, &s->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Where byte `at` of the stream lies, and how many of n bytes follow it before the ring begins again. */
static char *place(ckpt_comm_host *h, const ring *r, uint64_t at, uint64_t n, uint64_t *first)
{
    uint64_t lo = at & (h->room - 1);
    *first = n < h->room - lo ? n : h->room - lo;
    return bytes_of(h, r) + lo;
}

static uint64_t put(ckpt_comm_host *h, int from, int to, const void *p, uint64_t n)
{
    ring *r = ring_of(h, from, to);
    uint64_t w = atomic_load_explicit(&r->written, memory_order_relaxed);
    uint64_t first, left = h->room - (w - atomic_load_explicit(&r->read, memory_order_acquire));
    n = n < left ? n : left;
    if (n == 0)
        return 0;
    char *to_bytes = place(h, r, w, n, &first);
    memcpy(to_bytes, p, first);
    memcpy(bytes_of(h, r), (const char *)p + first, n - first);
    atomic_store_explicit(&r->written, w + n, memory_order_release);
    wake(&h->seats[to]);
    return n;
}

static uint64_t get(ckpt_comm_host *h, int from, int to, void *p, uint64_t n)
{
    ring *r = ring_of(h, from, to);
    uint64_t at = atomic_load_explicit(&r->read, memory_order_relaxed);
    uint64_t first, there = atomic_load_explicit(&r->written, memory_order_acquire) - at;
    n = n < there ? n : there;
    if (n == 0)
        return 0;
    const char *from_bytes = place(h, r, at, n, &first);
    memcpy(p, from_bytes, first);
    memcpy((char *)p + first, bytes_of(h, r), n - first);
    atomic_store_explicit(&r->read, at + n, memory_order_release);
    wake(&h->seats[from]);
    return n;
}

/* ---- waiting ---------------------------------------------------------------------------------- */

/* Why the run ended, or NULL. */
static const char *end_of(const ckpt_comm_host *h)
{
    const char *words = ckpt_comm_host_why(h);
    return words != NULL ? words : atomic_load(&h->stopped) != 0 ? "another rank stopped" : NULL;
}

static bool run_ended(const ckpt_comm_host *h, char *msg, size_t cap)
{
    const char *words = end_of(h);
    if (words != NULL)
        snprintf(msg, cap, "%s", words);
    return words != NULL;
}

/* Until the bell is not `seen` any more, or a moment has passed. */
static void sleep_on(const ckpt_comm_host *h, seat *s, unsigned seen)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    for (int i = 0; h->spin && i < SPINS; i++)
        if (atomic_load(&s->bell) != seen)
            return;
    atomic_store(&s->asleep, 1);
    if (atomic_load(&s->bell) == seen)
        (void)syscall(SYS_futex, &s->bell, FUTEX_WAIT, seen, &nap, NULL, 0);
    atomic_store(&s->asleep, 0);
}

/* ---- an exchange ------------------------------------------------------------------------------ */

typedef struct head {
    uint64_t what, bytes;
} head;

/* How far the messages with one other rank are, heads included. */
typedef struct way {
    uint64_t sent, got;
    head in;
} way;

static bool check_head(const end *e, int r, const head *in, const head *want, char *msg, size_t cap)
{
    if (in->what != want->what) {
        snprintf(msg, cap, "rank %d of the run is at another exchange than rank %d",
                 e->members[r].rank, e->members[e->rank].rank);
        return false;
    }
    if (in->bytes != want->bytes)
        snprintf(msg, cap, "rank %d sends %llu bytes, %llu are expected", r,
                 (unsigned long long)in->bytes, (unsigned long long)want->bytes);
    return in->bytes == want->bytes;
}

/* Move what can be moved to member r: true while something is left. *moved: something was. */
static bool push(const end *e, int r, const void *p, uint64_t n, way *w, bool *moved)
{
    const head out = {e->id * GROUP + e->members[r].sent, n};
    int me = e->members[e->rank].rank, to = e->members[r].rank;
    if (n == 0)
        return false;
    uint64_t before = w->sent;
    if (w->sent < sizeof out)
        w->sent += put(e->h, me, to, (const char *)&out + w->sent, sizeof out - w->sent);
    if (w->sent >= sizeof out) {
        uint64_t at = w->sent - sizeof out;
        w->sent += put(e->h, me, to, (const char *)p + at, n - at);
    }
    *moved = *moved || w->sent != before;
    return w->sent < n + sizeof out;
}

/* The same from member r. *bad: its message does not fit. */
static bool pull(const end *e, int r, void *p, uint64_t n, way *w, bool *moved, bool *bad,
                 char *msg, size_t cap)
{
    const head want = {e->id * GROUP + e->members[r].got, n};
    int me = e->members[e->rank].rank, from = e->members[r].rank;
    if (n == 0)
        return false;
    uint64_t before = w->got;
    if (w->got < sizeof w->in) {
        w->got += get(e->h, from, me, (char *)&w->in + w->got, sizeof w->in - w->got);
        if (w->got == sizeof w->in && !check_head(e, r, &w->in, &want, msg, cap)) {
            *bad = true;
            return false;
        }
    }
    if (w->got >= sizeof w->in) {
        uint64_t at = w->got - sizeof w->in;
        w->got += get(e->h, from, me, (char *)p + at, n - at);
    }
    *moved = *moved || w->got != before;
    return w->got < n + sizeof w->in;
}

static bool exchange_all(end *e, way *ways, const void *const *send, const uint64_t *send_n,
                         void *const *recv, const uint64_t *recv_n, char *msg, size_t cap)
{
    ckpt_comm_host *h = e->h;
    seat *mine = &h->seats[e->members[e->rank].rank];
    for (;;) {
        unsigned seen = atomic_load(&mine->bell);
        bool left = false, moved = false, bad = false;
        int gone = -1; /* a member that is left and will do nothing more */
        for (int i = 1; i < e->size; i++) {
            int r = (e->rank + i) % e->size;
            /* Looked at first: what it wrote before it went is there then. */
            bool ended = atomic_load(&h->seats[e->members[r].rank].gone) != 0, more;
            more = push(e, r, send[r], send_n[r], &ways[r], &moved);
            more |= pull(e, r, recv[r], recv_n[r], &ways[r], &moved, &bad, msg, cap);
            if (bad)
                return false;
            left = left || more;
            gone = more && ended ? r : gone;
        }
        if (!left)
            break;
        if (moved)
            continue;
        if (run_ended(h, msg, cap))
            return false;
        if (gone >= 0) {
            snprintf(msg, cap, "rank %d of %d ended before the others", e->members[gone].rank,
                     h->size);
            return false;
        }
        sleep_on(h, mine, seen);
    }
    for (int r = 0; r < e->size; r++) {
        e->members[r].sent += send_n[r] > 0;
        e->members[r].got += recv_n[r] > 0;
    }
    return true;
}

static bool exchange(void *self, const void *const *send, const uint64_t *send_n, void *const *recv,
                     const uint64_t *recv_n, char *msg, size_t cap)
{
    end *e = self;
    way ways[CKPT_COMM_HOST_MAX] = {{0}};
    if (run_ended(e->h, msg, cap))
        return false;
    if (send_n[e->rank] != recv_n[e->rank]) {
        snprintf(msg, cap, "%llu bytes to itself, %llu expected",
                 (unsigned long long)send_n[e->rank], (unsigned long long)recv_n[e->rank]);
        return false;
    }
    if (recv_n[e->rank] > 0 && recv[e->rank] != send[e->rank])
        memmove(recv[e->rank], send[e->rank], recv_n[e->rank]);
    return exchange_all(e, ways, send, send_n, recv, recv_n, msg, cap);
}

/* ---- groups ----------------------------------------------------------------------------------- */

static end *new_end(ckpt_comm_host *h, int size, char *msg, size_t cap)
{
    end *e = calloc(1, sizeof *e + (size_t)size * sizeof e->members[0]);
    if (e == NULL)
        snprintf(msg, cap, "out of memory for a group of %d", size);
    else
        e->h = h;
    return e;
}

/* Colours of all members. */
static bool tell_colors(end *e, int color, int *colors, char *msg, size_t cap)
{
    const void *send[CKPT_COMM_HOST_MAX];
    void *recv[CKPT_COMM_HOST_MAX];
    uint64_t n[CKPT_COMM_HOST_MAX];
    for (int r = 0; r < e->size; r++) {
        send[r] = &color;
        recv[r] = &colors[r];
        n[r] = sizeof color;
    }
    return exchange(e, send, n, recv, n, msg, cap);
}

static bool split(void *self, int color, void **out, int *rank, int *size, char *msg, size_t cap)
{
    end *e = self;
    int colors[CKPT_COMM_HOST_MAX] = {0};
    end *made = new_end(e->h, e->size, msg, cap);
    if (made == NULL || !tell_colors(e, color, colors, msg, cap)) {
        free(made);
        return false;
    }
    for (int r = 0; r < e->size; r++) {
        if (colors[r] != color)
            continue;
        if (r == e->rank)
            made->rank = made->size;
        made->members[made->size++].rank = e->members[r].rank;
    }
    /* Equal on all members; others have it with a chance of 2^-64, and then sizes still guard. */
    made->id = (e->id + ++e->splits) * 0xbf58476d1ce4e5b9u ^ ((uint64_t)(unsigned)color << 17);
    *out = made;
    *rank = made->rank;
    *size = made->size;
    return true;
}

static void stop(void *self, int code)
{
    ckpt_comm_host *h = ((end *)self)->h;
    (void)code;
    atomic_store(&h->stopped, 1);
    for (int r = 0; r < h->size; r++)
        wake(&h->seats[r]);
}

static const char *why(void *self)
{
    return end_of(((end *)self)->h);
}

static const ckpt_comm_ops ops = {
    .exchange = exchange, .split = split, .stop = stop, .free = free, .why = why};

/* ---- the run ---------------------------------------------------------------------------------- */

ckpt_status ckpt_comm_host_new(ckpt_comm_host **out, int size, ckpt_err *err)
{
    *out = NULL;
    if (size < 1 || size > CKPT_COMM_HOST_MAX)
        return ckpt_fail(err, CKPT_E_USAGE, "%d ranks on one host, at most %d", size,
                         CKPT_COMM_HOST_MAX);
    const uint64_t n = (uint64_t)size * (uint64_t)size;
    uint64_t room = MOST;
    while (room > LEAST && room * n > RINGS)
        room /= 2;
    size_t bytes = sizeof(ckpt_comm_host) + (size_t)(n * (sizeof(ring) + room));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks (%zu bytes shared)", size,
                         bytes);
    ckpt_comm_host *h = p; /* zero bytes are what every field begins with */
    h->size = size;
    h->bytes = bytes;
    h->room = room;
    h->spin = sysconf(_SC_NPROCESSORS_ONLN) >= size;
    *out = h;
    return CKPT_OK;
}

ckpt_status ckpt_comm_host_join(ckpt_comm_host *h, int rank, ckpt_comm *out, ckpt_err *err)
{
    char msg[100] = "";
    *out = ckpt_comm_alone();
    if (rank < 0 || rank >= h->size)
        return ckpt_fail(err, CKPT_E_USAGE, "rank %d of %d", rank, h->size);
    end *e = new_end(h, h->size, msg, sizeof msg);
    if (e == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s", msg);
    e->rank = rank;
    e->size = h->size;
    for (int r = 0; r < h->size; r++)
        e->members[r].rank = r;
    *out = (ckpt_comm){.rank = rank, .size = h->size, .ops = &ops, .self = e};
    return CKPT_OK;
}

void ckpt_comm_host_gone(ckpt_comm_host *h, int rank, const char *why)
{
    int none = 0;
    if (why != NULL && atomic_compare_exchange_strong(&h->dead, &none, 1)) {
        snprintf(h->why, sizeof h->why, "rank %d of %d %s", rank, h->size, why);
        atomic_store(&h->dead, 2);
    }
    atomic_store(&h->seats[rank].gone, 1);
    for (int r = 0; r < h->size; r++)
        wake(&h->seats[r]);
}

const char *ckpt_comm_host_why(const ckpt_comm_host *h)
{
    return atomic_load(&h->dead) == 2 ? h->why : NULL;
}

bool ckpt_comm_host_speak(ckpt_comm_host *h)
{
    return atomic_exchange(&h->spoken, 1) == 0;
}

void ckpt_comm_host_free(ckpt_comm_host *h)
{
    if (h != NULL)
        (void)munmap(h, h->bytes);
}
