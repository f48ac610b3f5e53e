#include "window.h"

#include <stdlib.h>

ckpt_status ckpt_window_open(ckpt_window *w, uint8_t *memory, size_t n, uint64_t slot_bytes,
                             uint64_t n_items, const atomic_bool *stop, ckpt_err *err)
{
    *w = (ckpt_window){.n = n, .n_items = n_items, .stop = stop};
    w->slots = calloc(n + 1, sizeof *w->slots);
    w->filled = n_items < SIZE_MAX ? calloc((size_t)n_items + 1, 1) : NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->moved, NULL);
    for (size_t i = 0; i < CKPT_WINDOW_TURNS; i++)
        pthread_cond_init(&w->turn[i], NULL);
    w->awaited = UINT64_MAX;
    w->open = true;
    if (w->slots == NULL || w->filled == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu buffers", n);
    for (size_t i = 0; i < n; i++)
        w->slots[i].data = memory + i * slot_bytes;
    return CKPT_OK;
}

void ckpt_window_close(ckpt_window *w)
{
    if (!w->open)
        return;
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->moved);
    for (size_t i = 0; i < CKPT_WINDOW_TURNS; i++)
        pthread_cond_destroy(&w->turn[i]);
    free(w->slots);
    free(w->filled);
    *w = (ckpt_window){0};
}

void ckpt_window_wake(ckpt_window *w)
{
    if (!w->open)
        return;
    pthread_mutex_lock(&w->lock);
    pthread_cond_broadcast(&w->moved);
    for (size_t i = 0; i < CKPT_WINDOW_TURNS; i++)
        pthread_cond_broadcast(&w->turn[i]);
    pthread_mutex_unlock(&w->lock);
}

/* A slot may be had by whose turn it is. */
static void wake_next(ckpt_window *w)
{
    pthread_cond_broadcast(&w->turn[w->next % CKPT_WINDOW_TURNS]);
}

/* The free slot, or the one whose bytes are the oldest of those that nobody needs. */
static ckpt_slot *reusable(ckpt_window *w)
{
    ckpt_slot *best = NULL;
    for (size_t i = 0; i < w->n; i++) {
        ckpt_slot *s = &w->slots[i];
        if (s->state == CKPT_SLOT_FREE)
            return s;
        if (s->state == CKPT_SLOT_WRITTEN && s->pins == 0 && (best == NULL || s->seq < best->seq))
            best = s;
    }
    return best;
}

ckpt_slot *ckpt_window_take(ckpt_window *w, const ckpt_slot *want)
{
    ckpt_slot *s = NULL;
    pthread_mutex_lock(&w->lock);
    while (!atomic_load(w->stop) && (want->seq != w->next || (s = reusable(w)) == NULL))
        pthread_cond_wait(&w->turn[want->seq % CKPT_WINDOW_TURNS], &w->lock);
    if (s != NULL) {
        w->next++;
        wake_next(w);
        uint8_t *data = s->data;
        *s = *want;
        s->data = data;
        s->pins = 0;
        s->state = CKPT_SLOT_TAKEN;
    }
    pthread_mutex_unlock(&w->lock);
    return s;
}

void ckpt_window_filled(ckpt_window *w, ckpt_slot *s)
{
    pthread_mutex_lock(&w->lock);
    s->state = CKPT_SLOT_FILLED;
    w->filled[s->seq] = 1;
    uint64_t before = w->prefix;
    while (w->prefix < w->n_items && w->filled[w->prefix])
        w->prefix++;
    if (w->prefix != before && (w->prefix > w->awaited || w->prefix == w->n_items)) {
        w->awaited = UINT64_MAX; /* who still waits says so again */
        pthread_cond_broadcast(&w->moved);
    }
    pthread_mutex_unlock(&w->lock);
}

void ckpt_window_written(ckpt_window *w, ckpt_slot *s)
{
    pthread_mutex_lock(&w->lock);
    s->state = CKPT_SLOT_WRITTEN;
    if (s->pins == 0)
        wake_next(w);
    pthread_mutex_unlock(&w->lock);
}

bool ckpt_window_wait(ckpt_window *w, uint64_t seq)
{
    pthread_mutex_lock(&w->lock);
    while (w->prefix <= seq && w->prefix < w->n_items && !atomic_load(w->stop)) {
        w->awaited = seq < w->awaited ? seq : w->awaited;
        pthread_cond_wait(&w->moved, &w->lock);
    }
    bool there = w->prefix > seq || w->prefix >= w->n_items;
    pthread_mutex_unlock(&w->lock);
    return there;
}

static bool readable(const ckpt_slot *s)
{
    return s->state == CKPT_SLOT_FILLED || s->state == CKPT_SLOT_WRITTEN;
}

const uint8_t *ckpt_window_pin(ckpt_window *w, uint32_t file, uint64_t offset, uint64_t *n,
                               ckpt_slot **pin)
{
    const uint8_t *found = NULL;
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->n && found == NULL; i++) {
        ckpt_slot *s = &w->slots[i];
        if (!readable(s) || file < s->first || file - s->first >= s->n || offset < s->at ||
            offset - s->at >= s->len)
            continue;
        found = s->data + (file - s->first) * s->step + (offset - s->at);
        *n = s->len - (offset - s->at);
        s->pins++;
        *pin = s;
    }
    pthread_mutex_unlock(&w->lock);
    return found;
}

static void unpin(ckpt_window *w, ckpt_slot *s)
{
    if (--s->pins == 0 && s->state == CKPT_SLOT_WRITTEN)
        wake_next(w);
}

void ckpt_window_unpin(ckpt_window *w, ckpt_slot *pin)
{
    pthread_mutex_lock(&w->lock);
    unpin(w, pin);
    pthread_mutex_unlock(&w->lock);
}

static bool in_range(const ckpt_slot *s, uint64_t first, uint64_t last)
{
    return readable(s) && s->seq >= first && s->seq <= last;
}

bool ckpt_window_hold(ckpt_window *w, uint64_t first, uint64_t last)
{
    uint64_t here = 0;
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->n; i++)
        here += in_range(&w->slots[i], first, last);
    bool all = here == last - first + 1;
    for (size_t i = 0; i < w->n && all; i++)
        w->slots[i].pins += in_range(&w->slots[i], first, last);
    pthread_mutex_unlock(&w->lock);
    return all;
}

void ckpt_window_let_go(ckpt_window *w, uint64_t first, uint64_t last)
{
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->n; i++)
        if (in_range(&w->slots[i], first, last))
            unpin(w, &w->slots[i]);
    pthread_mutex_unlock(&w->lock);
}
