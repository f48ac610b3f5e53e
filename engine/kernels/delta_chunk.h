/* Scratch and shared parts of the chunk form, for its forward and backward (delta_chunk*.c). */
#ifndef CKPT_ENGINE_KERNEL_DELTA_CHUNK_H
#define CKPT_ENGINE_KERNEL_DELTA_CHUNK_H

#include "kernels.h"
#include "mm.h"

#define C CKPT_ENG_CHUNK_LEN
#define CHUNKS (CKPT_ENG_SEGMENT_LEN / C) /* in a segment */

static inline int64_t k_pad(int64_t n)
{
    return (n + 15) / 16 * 16;
}

/* One chunk, token-major rows of Kp or Vp elements; tokens beyond the sequence and channels beyond
 * the head are such that they change nothing: q = k = v = 0, decay 1. */
typedef struct chunk {
    real *q;      /* [C, Kp] times the scale */
    real *k, *kb; /* [C, Kp] key, erase key */
    real *a;      /* [C, Kp] exp(g) */
    real *last;   /* [C, Kp] product of a over later tokens: e^(G_C - G_i) */
    real *eg;     /* [C, Kp] product of a up to and with the token: e^G_i */
    real *kq;     /* [2C, Kp] kb e^G, then q e^G */
    real *kr;     /* [C, Kp] k e^(G_C - G_i) */
    real *vw;     /* [C, Vp] value to write */
    real *low;    /* [C, C] L, strictly lower, zeros above */
    real *att;    /* [C, C] Aqk, lower, zeros above */
    real *d;      /* [C, Vp] V_new */
} chunk;

typedef struct chunk_work {
    int64_t Kp, Vp;
    real *kt; /* [Kp, C] keys, transposed */
    real *r;  /* [Kp, VL] */
    real *x;  /* [2C, Vp] */
} chunk_work;

static inline real *k_take(real **at, int64_t n)
{
    real *p = *at;
    *at += (n + 15) / 16 * 16;
    return p;
}

static inline void chunk_take(chunk *c, int64_t Kp, int64_t Vp, real **at)
{
    real **rows[] = {&c->q, &c->k, &c->kb, &c->a, &c->last, &c->eg, &c->kr};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = k_take(at, C * Kp);
    c->kq = k_take(at, 2 * C * Kp);
    c->vw = k_take(at, C * Vp);
    c->d = k_take(at, C * Vp);
    c->low = k_take(at, C * C);
    c->att = k_take(at, C * C);
}

static inline int64_t chunk_size(int64_t Kp, int64_t Vp)
{
    return 9 * C * Kp + 2 * C * Vp + 2 * C * C;
}

static inline void chunk_work_take(chunk_work *w, int64_t Kp, int64_t Vp, real **at)
{
    w->Kp = Kp;
    w->Vp = Vp;
    w->kt = k_take(at, C * Kp);
    w->r = k_take(at, VL * Kp);
    w->x = k_take(at, 2 * C * Vp);
}

static inline int64_t chunk_work_size(int64_t Kp, int64_t Vp)
{
    return (C + VL) * Kp + 2 * C * Vp;
}

/* delta_chunk.c */
void ENGK(chunk_load)(const ENG(delta_task) * t, int64_t first, chunk_work *w, chunk *c);
void ENGK(chunk_solve)(const chunk_work *w, const chunk *c, const real *state);
void ENGK(chunk_update)(const chunk_work *w, const chunk *c, const real *from, real *to);
void ENGK(state_load)(const ENG(delta_task) * t, const real *from, int64_t Vp, int64_t Kp,
                      real *state);
void ENGK(state_store)(const ENG(delta_task) * t, const real *state, int64_t Vp, real *to);

#endif
