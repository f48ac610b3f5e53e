/* Pieces of a training step that a device launches as a whole (cuda/graph.h).
 *
 * A piece is a function that queues work and waits for nothing: what it queues depends on its key and on
 * the arena's level alone, and the numbers it works on are in the device's memory before it runs. The first
 * time a key comes the piece runs as it is, which loads kernels and lets cuBLASLt choose; the second time it
 * is captured and launched; from then on its graph is launched and the function is not called. Bits are
 * those of a run without graphs.
 *
 * Without a device, while the context is dry, inside another piece, or with `graphs` NULL, the piece simply
 * runs. So it does after a capture that failed: graphs are then off for the rest of the run, and `why` says
 * so. More than CKPT_ENG_GRAPHS keys: those beyond run as they are. */
#ifndef CKPT_ENGINE_GRAPH_H
#define CKPT_ENGINE_GRAPH_H

#include "cuda/plugin.h"
#include "engine.h"

#define CKPT_ENG_GRAPHS 32
#define CKPT_ENG_GRAPH_KEY 12

/* What a piece depends on: its name (a constant's address), sizes and switches; the rest zero. */
typedef struct ckpt_eng_graph_key {
    const char *piece;
    int64_t n[CKPT_ENG_GRAPH_KEY];
} ckpt_eng_graph_key;

typedef struct ckpt_eng_graph {
    ckpt_eng_graph_key key;
    size_t level;           /* of the arena */
    const void *base;       /* of the arena */
    ckpt_cuda_graph *graph; /* NULL: seen once */
} ckpt_eng_graph;

/* A context's (ckpt_eng.graphs); zeroed at first. */
typedef struct ckpt_eng_graphs {
    ckpt_eng_graph all[CKPT_ENG_GRAPHS];
    size_t n;
    bool off, capturing;
    int64_t captures, launches, plain; /* pieces that ran as they are: `plain` */
    int64_t nodes;                     /* of the captured graphs */
    char why[CKPT_ERR_MAX];            /* graphs are off */
} ckpt_eng_graphs;

typedef ckpt_status (*ckpt_eng_piece)(void *self, ckpt_err *err);

/* Run piece(self). What it takes from the arena is given back. Errors: the piece's, a launch's. */
ckpt_status ckpt_eng_graph_run(ckpt_eng *e, const ckpt_eng_graph_key *key, ckpt_eng_piece piece,
                               void *self, ckpt_err *err) CKPT_MUST_USE;
/* After the device's work has ended. */
void ckpt_eng_graphs_close(const ckpt_eng *e, ckpt_eng_graphs *g);

#endif
