/* The bytes that an executor is writing and those it has just written, for whoever hashes them.
 *
 * Slots of one size. A work item (numbered in the order in which items are handed out) takes one, fills
 * it, and lets it go when its bytes are in their file; they stay readable until the slot is needed
 * again, oldest first. Items get slots in their order. Nobody waits while holding a pin, and an item
 * waits only for items before it, so the earliest one can always go on. */
#ifndef CKPT_WINDOW_H
#define CKPT_WINDOW_H

#include "err.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum ckpt_slot_state {
    CKPT_SLOT_FREE,
    CKPT_SLOT_TAKEN,
    CKPT_SLOT_FILLED,
    CKPT_SLOT_WRITTEN
} ckpt_slot_state;

#define CKPT_WINDOW_TURNS 16

/* [at, at + len) of files first to first + n - 1, `step` bytes apart in data. */
typedef struct ckpt_slot {
    uint8_t *data;
    uint64_t at, len, step;
    uint64_t seq; /* of the item that took it */
    uint32_t first, n;
    int pins; /* readers */
    ckpt_slot_state state;
} ckpt_slot;

typedef struct ckpt_window {
    ckpt_slot *slots;
    size_t n;
    uint8_t *filled;  /* per item */
    uint64_t n_items; /* that take a slot */
    uint64_t prefix;  /* items before it are all filled */
    const atomic_bool *stop;
    pthread_mutex_t lock;
    pthread_cond_t moved;                   /* prefix, past what somebody waits for */
    uint64_t awaited;                       /* the earliest such item */
    uint64_t next;                          /* item whose turn it is to get a slot */
    pthread_cond_t turn[CKPT_WINDOW_TURNS]; /* of items by their number: only the next is woken */
    bool open;
} ckpt_window;

/* memory: n * slot_bytes. stop: set, followed by ckpt_window_wake, when the run is to end. */
ckpt_status ckpt_window_open(ckpt_window *w, uint8_t *memory, size_t n, uint64_t slot_bytes,
                             uint64_t n_items, const atomic_bool *stop,
                             ckpt_err *err) CKPT_MUST_USE;
void ckpt_window_close(ckpt_window *w); /* also a zeroed one */
void ckpt_window_wake(ckpt_window *w);

/* A slot for item `want->seq`, with the place in the files that `want` says (data apart); waits for
 * one. NULL: the run was stopped, and somebody else reports why. */
ckpt_slot *ckpt_window_take(ckpt_window *w, const ckpt_slot *want);
void ckpt_window_filled(ckpt_window *w, ckpt_slot *s);  /* readable */
void ckpt_window_written(ckpt_window *w, ckpt_slot *s); /* may be reused */
/* Wait until all items up to `seq` are filled; false: the run was stopped. */
bool ckpt_window_wait(ckpt_window *w, uint64_t seq);

/* Byte `offset` of a file, *n bytes from there on being in one piece; NULL: not here (any more), so it
 * was written. Until unpinned it stays. */
const uint8_t *ckpt_window_pin(ckpt_window *w, uint32_t file, uint64_t offset, uint64_t *n,
                               ckpt_slot **pin);
void ckpt_window_unpin(ckpt_window *w, ckpt_slot *pin);
/* Pin the slots of items [first, last], all filled once, if every one is still here. */
bool ckpt_window_hold(ckpt_window *w, uint64_t first, uint64_t last);
void ckpt_window_let_go(ckpt_window *w, uint64_t first, uint64_t last);

#endif
