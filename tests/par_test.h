/* Ranks as threads: run a function once a rank and fail the test if one of them failed. Check's
 * assertions may not be used in these threads; they return a message or NULL. */
#ifndef CKPT_PAR_TEST_H
#define CKPT_PAR_TEST_H

#include "comm_host.h"

#include <check.h>
#include <pthread.h>
#include <stdio.h>

#define PAR_RANKS 8

typedef struct par_rank {
    ckpt_comm comm;
    void *arg;
    bool (*fn)(struct par_rank *);
    ckpt_err err;
    bool ok;
    pthread_t thread;
} par_rank;

/* Which backend joins the threads: that of threads, or shared memory, which serves processes too. */
typedef enum par_backend { PAR_THREADS, PAR_HOST } par_backend;

/* Say what is wrong and return false. */
#define PAR_FAIL(r, ...) ((void)ckpt_fail(&(r)->err, CKPT_E_MISMATCH, __VA_ARGS__), false)

static void *par_main(void *arg)
{
    par_rank *r = arg;
    r->ok = r->fn(r);
    if (!r->ok)
        ckpt_comm_abort(&r->comm, 1);
    return NULL;
}

/* False if some rank failed. */
static inline bool par_try_on(par_backend backend, par_rank *ranks, int size,
                              bool (*fn)(par_rank *), void *arg)
{
    ckpt_comm ends[PAR_RANKS];
    ckpt_comm_host *host = NULL;
    ckpt_err err;
    bool ok = true;
    ck_assert_int_le(size, PAR_RANKS);
    if (backend == PAR_HOST)
        ck_assert_int_eq(ckpt_comm_host_new(&host, size, &err), CKPT_OK);
    else
        ck_assert_int_eq(ckpt_comm_threads(ends, size, &err), CKPT_OK);
    for (int i = 0; host != NULL && i < size; i++)
        ck_assert_int_eq(ckpt_comm_host_join(host, i, &ends[i], &err), CKPT_OK);
    for (int i = 0; i < size; i++) {
        ranks[i] = (par_rank){.comm = ends[i], .arg = arg, .fn = fn};
        ck_assert_int_eq(pthread_create(&ranks[i].thread, NULL, par_main, &ranks[i]), 0);
    }
    for (int i = 0; i < size; i++)
        pthread_join(ranks[i].thread, NULL);
    for (int i = 0; i < size; i++) {
        ok = ok && ranks[i].ok;
        ckpt_comm_release(&ranks[i].comm);
    }
    ckpt_comm_host_free(host);
    return ok;
}

static inline bool par_try(par_rank *ranks, int size, bool (*fn)(par_rank *), void *arg)
{
    return par_try_on(PAR_THREADS, ranks, size, fn, arg);
}

static inline void par_run_on(par_backend backend, int size, bool (*fn)(par_rank *), void *arg)
{
    static par_rank ranks[PAR_RANKS];
    if (par_try_on(backend, ranks, size, fn, arg))
        return;
    char text[3000] = "";
    size_t n = 0;
    for (int i = 0; i < size && n < sizeof text - 300; i++)
        if (!ranks[i].ok)
            n += (size_t)snprintf(text + n, sizeof text - n, "rank %d: %.250s; ", i,
                                  ranks[i].err.text);
    ck_abort_msg("%d ranks: %s", size, text);
}

static inline void par_run(int size, bool (*fn)(par_rank *), void *arg)
{
    par_run_on(PAR_THREADS, size, fn, arg);
}

#endif
