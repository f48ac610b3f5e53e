/* Ranks that are threads of one process, for tests. An exchange publishes pointers, waits for all, copies
 * from the others, and waits again so that nobody reuses what is still read. One lock serves all groups
 * of a run, so that an abort wakes every wait. */
#include "comm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct run {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    bool aborted;
    int users; /* ends that are not yet freed */
} run;

typedef struct post {
    const void *const *send;
    const uint64_t *send_n;
    int color;
    void *made; /* by a split */
} post;

typedef struct group {
    run *all;
    int size, arrived, users;
    uint64_t generation;
    post posts[];
} group;

typedef struct end {
    group *g;
    int rank;
} end;

/* False: the run was aborted. */
static bool wait_all(group *g)
{
    pthread_mutex_lock(&g->all->lock);
    uint64_t generation = g->generation;
    if (++g->arrived == g->size) {
        g->arrived = 0;
        g->generation++;
        pthread_cond_broadcast(&g->all->turn);
    }
    while (g->generation == generation && !g->all->aborted)
        pthread_cond_wait(&g->all->turn, &g->all->lock);
    bool ok = g->generation != generation;
    pthread_mutex_unlock(&g->all->lock);
    return ok;
}

static bool stopped(char *msg, size_t cap)
{
    snprintf(msg, cap, "another rank stopped");
    return false;
}

static bool exchange(void *self, const void *const *send, const uint64_t *send_n, void *const *recv,
                     const uint64_t *recv_n, char *msg, size_t cap)
{
    const end *e = self;
    group *g = e->g;
    bool fits = true;
    g->posts[e->rank].send = send;
    g->posts[e->rank].send_n = send_n;
    if (!wait_all(g))
        return stopped(msg, cap);
    for (int r = 0; r < g->size; r++) {
        const post *p = &g->posts[r];
        uint64_t n = p->send_n[e->rank];
        if (n != recv_n[r]) {
            snprintf(msg, cap, "rank %d sends %llu bytes, %llu are expected", r,
                     (unsigned long long)n, (unsigned long long)recv_n[r]);
            fits = false;
        } else if (n > 0 && recv[r] != p->send[e->rank]) {
            memmove(recv[r], p->send[e->rank], n);
        }
    }
    if (!wait_all(g))
        return stopped(msg, cap);
    return fits;
}

static group *new_group(run *all, int size)
{
    group *g = calloc(1, sizeof *g + (size_t)size * sizeof g->posts[0]);
    if (g != NULL) {
        g->all = all;
        g->size = g->users = size;
    }
    return g;
}

static bool split(void *self, int color, void **out, int *rank, int *size, char *msg, size_t cap)
{
    const end *e = self;
    group *g = e->g;
    int first = -1, n = 0, at = 0;
    end *made = calloc(1, sizeof *made);
    g->posts[e->rank].color = color;
    g->posts[e->rank].made = NULL;
    if (!wait_all(g)) {
        free(made);
        return stopped(msg, cap);
    }
    for (int r = 0; r < g->size; r++) {
        if (g->posts[r].color != color)
            continue;
        first = first < 0 ? r : first;
        at += r < e->rank;
        n++;
    }
    if (first == e->rank)
        g->posts[e->rank].made = new_group(g->all, n);
    bool ok = wait_all(g);
    group *child = ok ? g->posts[first].made : NULL;
    if (ok && child != NULL && made != NULL) {
        pthread_mutex_lock(&g->all->lock);
        g->all->users++;
        pthread_mutex_unlock(&g->all->lock);
        *made = (end){child, at};
        *out = made;
        *rank = at;
        *size = n;
        ok = wait_all(g); /* before posts are written again */
        return ok || stopped(msg, cap);
    }
    free(made);
    if (!ok)
        return stopped(msg, cap);
    snprintf(msg, cap, "out of memory for a group of %d", n);
    return false;
}

static void abort_run(void *self, int code)
{
    run *all = ((end *)self)->g->all;
    (void)code;
    pthread_mutex_lock(&all->lock);
    all->aborted = true;
    pthread_cond_broadcast(&all->turn);
    pthread_mutex_unlock(&all->lock);
}

static void free_end(void *self)
{
    end *e = self;
    group *g = e->g;
    run *all = g->all;
    pthread_mutex_lock(&all->lock);
    bool last_of_group = --g->users == 0, last = --all->users == 0;
    pthread_mutex_unlock(&all->lock);
    if (last_of_group)
        free(g);
    if (last) {
        pthread_mutex_destroy(&all->lock);
        pthread_cond_destroy(&all->turn);
        free(all);
    }
    free(e);
}

static const ckpt_comm_ops ops = {
    .exchange = exchange, .split = split, .stop = abort_run, .free = free_end};

ckpt_status ckpt_comm_threads(ckpt_comm *out, int size, ckpt_err *err)
{
    run *all = calloc(1, sizeof *all);
    group *g = size > 0 && size <= CKPT_COMM_MAX ? new_group(all, size) : NULL;
    bool ok = all != NULL && g != NULL;
    for (int r = 0; ok && r < size; r++) {
        end *e = calloc(1, sizeof *e);
        if (e == NULL) {
            while (r-- > 0)
                free(out[r].self);
            ok = false;
            break;
        }
        *e = (end){g, r};
        out[r] = (ckpt_comm){.rank = r, .size = size, .ops = &ops, .self = e};
    }
    if (!ok) {
        free(g);
        free(all);
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", size);
    }
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->turn, NULL);
    all->users = size;
    return CKPT_OK;
}
