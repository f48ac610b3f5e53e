/* Copies beside steps (beside.h). */
#include "beside.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "spread.h"

#define PIECE ((int64_t)1 << 20) /* elements that a pinned buffer holds */

struct ckpt_beside {
    ckpt_cuda_tap *tap;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool copying, waited; /* under lock */
};

ckpt_status ckpt_beside_open(ckpt_trainer *t, ckpt_err *err)
{
    if (t->e.device == NULL || (t->e.par != NULL && !t->config.places))
        return CKPT_OK;
    struct ckpt_beside *b = calloc(1, sizeof *b);
    if (b == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for copies");
    const ckpt_cuda_plugin *api = t->e.device->api;
    ckpt_status status =
        api->tap_open(&t->e.device->card, (size_t)PIECE * sizeof(float), &b->tap, err);
    if (status == CKPT_OK && pthread_mutex_init(&b->lock, NULL) != 0)
        status = ckpt_fail(err, CKPT_E_NOMEM, "no lock for copies");
    if (status == CKPT_OK && pthread_cond_init(&b->changed, NULL) != 0) {
        pthread_mutex_destroy(&b->lock);
        status = ckpt_fail(err, CKPT_E_NOMEM, "no condition for copies");
    }
    if (status == CKPT_OK) {
        t->beside = b;
        return CKPT_OK;
    }
    api->tap_close(b->tap);
    free(b);
    return status;
}

void ckpt_beside_wait(ckpt_trainer *t)
{
    struct ckpt_beside *b = t->beside;
    if (b == NULL)
        return;
    pthread_mutex_lock(&b->lock);
    while (b->copying) {
        b->waited = true;
        pthread_cond_wait(&b->changed, &b->lock);
    }
    pthread_mutex_unlock(&b->lock);
}

bool ckpt_trainer_waits(const ckpt_trainer *t)
{
    struct ckpt_beside *b = t->beside;
    if (b == NULL)
        return false;
    pthread_mutex_lock(&b->lock);
    const bool waits = b->copying && b->waited;
    pthread_mutex_unlock(&b->lock);
    return waits;
}

void ckpt_beside_close(ckpt_trainer *t)
{
    struct ckpt_beside *b = t->beside;
    if (b == NULL)
        return;
    ckpt_beside_wait(t);
    t->e.device->api->tap_close(b->tap);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    free(b);
    t->beside = NULL;
}

ckpt_status ckpt_trainer_copy_begin(ckpt_trainer *t, ckpt_err *err)
{
    struct ckpt_beside *b = t->beside;
    if (b == NULL)
        return ckpt_fail(err, CKPT_E_INTERNAL, "a copy beside steps without a device of its own");
    ckpt_beside_wait(t);
    ckpt_status status = t->e.device->api->tap_mark(b->tap, err);
    if (status != CKPT_OK)
        return status;
    pthread_mutex_lock(&b->lock);
    b->copying = true;
    b->waited = false;
    pthread_mutex_unlock(&b->lock);
    return CKPT_OK;
}

void ckpt_beside_end(ckpt_trainer *t)
{
    struct ckpt_beside *b = t->beside;
    pthread_mutex_lock(&b->lock);
    b->copying = false;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

/* A piece from its pinned buffer, by all threads: one alone reads and writes memory at a tenth of what the
 * card sends, and at less where it meets pages for the first time. */
#define SHARE (PIECE / 8)
typedef struct piece_job {
    const ckpt_trainer *t;
    size_t i;
    const float *from;
    int64_t first, n; /* of this rank's part of slot i */
    bool bf16;
    void *out;
} piece_job;
static void put_share(void *arg, int64_t item, int worker)
{
    const piece_job *j = arg;
    const int64_t at = item * SHARE;
    (void)worker;
    ckpt_spread_put(j->t, j->i, j->first + at, ckpt_min_i64(SHARE, j->n - at), j->from + at,
                    j->bf16, j->out);
}

ckpt_status ckpt_beside_bring(ckpt_trainer *t, size_t i, const float *from, bool bf16, void *out,
                              ckpt_err *err)
{
    const ckpt_cuda_plugin *api = t->e.device->api;
    ckpt_cuda_tap *tap = t->beside->tap;
    ckpt_status status = CKPT_OK;
    int64_t begun = 0, lo, hi;
    ckpt_spread_owned(t, i, &lo, &hi);
    const int64_t n = hi - lo;
    for (int64_t at = 0; at < n; at += PIECE) {
        const void *buffer = NULL;
        const int64_t here = ckpt_min_i64(PIECE, n - at);
        while (begun < n && begun <= at + PIECE) { /* this piece and the one after it */
            const size_t bytes = (size_t)ckpt_min_i64(PIECE, n - begun) * sizeof *from;
            CKPT_CHECK(api->tap_start(tap, from + lo + begun, bytes, err));
            begun += PIECE;
        }
        CKPT_CHECK(api->tap_take(tap, &buffer, err));
        piece_job job = {t, i, buffer, lo + at, here, bf16, out};
        ckpt_eng_parallel(&t->e, (here + SHARE - 1) / SHARE, put_share, &job);
    }
done:
    return status;
}
