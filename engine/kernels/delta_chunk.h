/* Scratch and shared parts of the chunk form, for its forward and backward (delta_chunk*.c).
 *
 * Everything that has channels of the value lies in panels of PANEL channels, one after the other, each
 * with all its rows: element (row, v) of an array of n rows is at [v / PANEL][row][v % PANEL]. The columns
 * of the state are independent of each other, so a chunk goes through one panel of the state after the
 * other: 16 KB (K = 128, f32), one stream, which stay in the first-level cache beside the chunk's
 * operands; rows of the whole state, a power of two apart, would fall on a quarter of its sets. */
#ifndef CKPT_ENGINE_KERNEL_DELTA_CHUNK_H
#define CKPT_ENGINE_KERNEL_DELTA_CHUNK_H

#include "kernels.h"
#include "mm.h"

#define C CKPT_ENG_CHUNK_LEN
#define CHUNKS (CKPT_ENG_SEGMENT_LEN / C) /* in a segment */
#define PANEL (2 * VL)

static inline int64_t k_pad(int64_t n)
{
    return (n + 15) / 16 * 16;
}

static inline int64_t v_pad(int64_t n)
{
    return (n + PANEL - 1) / PANEL * PANEL;
}

/* One chunk; rows of Kp elements are of a token. Tokens beyond the sequence and channels beyond the head
 * are such that they change nothing: q = k = v = 0, decay 1. */
typedef struct chunk {
    real *q;      /* [C, Kp] times the scale */
    real *k, *kb; /* [C, Kp] key, erase key */
    real *a;      /* [C, Kp] exp(g) */
    real *eg;     /* [C, Kp] product of a up to and with the token: e^G_i */
    real *last;   /* [C, Kp] product of a over later tokens: e^(G_C - G_i); NULL: not wanted */
    real *kq;     /* [2C, Kp] kb e^G, then q e^G */
    real *kr;     /* [C, Kp] k e^(G_C - G_i) */
    real *low;    /* [C, C] L, strictly lower, zeros above */
    real *att;    /* [C, C] Aqk, lower, zeros above */
    real *d;      /* [C, Vp] in panels: V_new */
} chunk;

typedef struct chunk_work {
    int64_t Kp, Vp;
    k_feed feed;
    real *kt;   /* [Kp, C] keys, transposed */
    real *vw;   /* [C, Vp] in panels: values to write */
    real *x;    /* [2C, PANEL] product of kq and a panel of the state */
    real *pad;  /* [4, Kp] a token's rows where they need padding */
    real *ones; /* [Kp] */
} chunk_work;

static inline real *k_take(real **at, int64_t n)
{
    real *p = *at;
    *at += (n + 15) / 16 * 16;
    return p;
}

static inline void chunk_take(chunk *c, int64_t Kp, int64_t Vp, bool last, real **at)
{
    real **rows[] = {&c->q, &c->k, &c->kb, &c->a, &c->kr, &c->eg};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = k_take(at, C * Kp);
    c->last = last ? k_take(at, C * Kp) : NULL;
    c->kq = k_take(at, 2 * C * Kp);
    c->d = k_take(at, C * Vp);
    c->low = k_take(at, C * C);
    c->att = k_take(at, C * C);
}

static inline int64_t chunk_size(int64_t Kp, int64_t Vp)
{
    return 9 * C * Kp + C * Vp + 2 * C * C;
}

static inline void chunk_work_take(chunk_work *w, int64_t Kp, int64_t Vp, real **at)
{
    w->Kp = Kp;
    w->Vp = Vp;
    k_feed_clear(&w->feed);
    w->kt = k_take(at, C * Kp);
    w->vw = k_take(at, C * Vp);
    w->x = k_take(at, 2 * C * PANEL);
    w->pad = k_take(at, 4 * Kp);
    w->ones = k_take(at, Kp);
    for (int64_t d = 0; d < Kp; d++)
        w->ones[d] = 1;
}

static inline int64_t chunk_work_size(int64_t Kp, int64_t Vp)
{
    return (C + 5) * Kp + C * Vp + 2 * C * PANEL;
}

/* Rows of inputs of tokens [lo, hi) of heads that lie side by side, and with `o` those to write. */
static inline void feed_inputs(const ENG(delta_task) * t, int64_t heads, int64_t lo, int64_t hi,
                               bool o, k_feed *f)
{
    const ENG(delta_task) *last = t + heads - 1;
    const int64_t nk = last->q - t->q + t->K, nv = last->v - t->v + t->V;
    for (int64_t i = lo; i < hi && i < t->T; i++) {
        k_feed_add(f, t->q + i * t->ldk, nk);
        k_feed_add(f, t->k + i * t->ldk, nk);
        k_feed_add(f, t->g + i * t->ldg, last->g - t->g + (t->g_scalar ? 1 : t->K));
        k_feed_add(f, t->v + i * t->ldv, nv);
        if (!t->e_scalar)
            k_feed_add(f, t->erase + i * t->lde, last->erase - t->erase + t->K);
        if (t->write)
            k_feed_add(f, t->write + i * t->ldv, nv);
        if (o)
            k_feed_add(f, t->o + i * t->ldv, nv);
    }
}

/* Row i, from token-major channels x [V], of an array of n rows in panels; the end becomes zero. */
static inline void panel_row_load(const real *x, int64_t V, int64_t n, int64_t i, real *to)
{
    int64_t v = 0;
    for (to += i * PANEL; v + PANEL <= V; v += PANEL, to += n * PANEL) {
        v_store(to, load_any(x + v));
        v_store(to + VL, load_any(x + v + VL));
    }
    if (v < V)
        for (int64_t j = 0; j < PANEL; j++)
            to[j] = v + j < V ? x[v + j] : 0;
}

static inline void panel_row_store(const real *from, int64_t n, int64_t i, int64_t V, real *x)
{
    int64_t v = 0;
    for (from += i * PANEL; v + PANEL <= V; v += PANEL, from += n * PANEL) {
        store_any(x + v, v_load(from));
        store_any(x + v + VL, v_load(from + VL));
    }
    for (int64_t j = 0; v + j < V; j++)
        x[v + j] = from[j];
}

/* delta_chunk.c */
void ENGK(chunk_load)(const ENG(delta_task) * t, int64_t first, chunk_work *w, chunk *c);
/* x = kb e^G S, then d of (I + L) d = vw - x, and S' = Diag(e^G_C) S + Kr^T d unless `to` is NULL. With
 * `o`, an array like d, also q e^G S + Aqk d. S may be `to`. What w->feed lists is asked for meanwhile. */
void ENGK(chunk_run)(chunk_work *w, const chunk *c, const real *state, real *to, real *o);
/* The state in panels, [Kp, Vp], from [K, V] (NULL = zeros) and back. */
void ENGK(state_load)(const ENG(delta_task) * t, const real *from, int64_t Kp, int64_t Vp,
                      real *state);
void ENGK(state_store)(const ENG(delta_task) * t, const real *state, int64_t Kp, real *to);

#endif
