/* Pieces of a step as graphs (graph.h). */
#include "graph.h"

#include <stdio.h>
#include <string.h>

#include "device.h"

/* The entry of a key at the arena's level; a new one while there is room, else NULL. */
static ckpt_eng_graph *find(const ckpt_eng *e, const ckpt_eng_graph_key *key, bool *is_new)
{
    ckpt_eng_graphs *g = e->graphs;
    *is_new = false;
    for (size_t i = 0; i < g->n; i++) {
        ckpt_eng_graph *k = &g->all[i];
        if (k->key.piece == key->piece && memcmp(k->key.n, key->n, sizeof key->n) == 0 &&
            k->level == e->used && k->base == e->base)
            return k;
    }
    if (g->n == CKPT_ENG_GRAPHS)
        return NULL;
    *is_new = true;
    g->all[g->n] = (ckpt_eng_graph){.key = *key, .level = e->used, .base = e->base};
    return &g->all[g->n++];
}

static ckpt_status plain_run(ckpt_eng *e, ckpt_eng_piece piece, void *self, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    const ckpt_status status = piece(self, err);
    ckpt_eng_drop(e, mark);
    return status;
}

/* k->graph = the piece. What fails here may be the capture's or the piece's own: the caller runs it plainly,
 * and the piece's own comes again. An interruption is handed on. */
static ckpt_status capture(ckpt_eng *e, ckpt_eng_graph *k, ckpt_eng_piece piece, void *self,
                           ckpt_err *err)
{
    ckpt_eng_graphs *g = e->graphs;
    const ckpt_cuda_plugin *api = e->device->api;
    const ckpt_cuda_card *card = &e->device->card;
    ckpt_status status = api->capture_begin(card, err);
    if (status != CKPT_OK)
        return status;
    g->capturing = true;
    status = plain_run(e, piece, self, err);
    g->capturing = false;
    if (status == CKPT_OK)
        return api->capture_end(card, &k->graph, err);
    const ckpt_status ended = api->capture_end(card, NULL, NULL);
    (void)ended; /* the piece's failure is the one to tell */
    return status;
}

ckpt_status ckpt_eng_graph_run(ckpt_eng *e, const ckpt_eng_graph_key *key, ckpt_eng_piece piece,
                               void *self, ckpt_err *err)
{
    ckpt_eng_graphs *g = e->graphs;
    bool is_new;
    if (g == NULL || e->device == NULL || e->dry || g->capturing)
        return plain_run(e, piece, self, err);
    ckpt_eng_graph *k = g->off ? NULL : find(e, key, &is_new);
    if (k != NULL && k->graph == NULL && !is_new) {
        ckpt_err why = {0};
        ckpt_status status = capture(e, k, piece, self, &why);
        if (status == CKPT_E_INTERRUPTED) {
            *err = why;
            return status;
        }
        if (status != CKPT_OK) {
            g->off = true;
            snprintf(g->why, sizeof g->why, "%s", why.text);
        } else {
            g->captures++;
            g->nodes += e->device->api->graph_size(k->graph);
        }
    }
    if (k == NULL || k->graph == NULL) {
        g->plain++;
        return plain_run(e, piece, self, err);
    }
    g->launches++;
    return e->device->api->graph_launch(&e->device->card, k->graph, err);
}

void ckpt_eng_graphs_close(const ckpt_eng *e, ckpt_eng_graphs *g)
{
    for (size_t i = 0; i < g->n; i++)
        if (g->all[i].graph != NULL)
            e->device->api->graph_free(g->all[i].graph);
    *g = (ckpt_eng_graphs){0};
}
