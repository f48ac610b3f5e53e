/* Chunk (WY) form of the delta rule, forward (kda-math.md section 3), chunks of 16 tokens.
 *
 * With (I + L) d = vw - (kb e^G) S the triangular system is solved for d directly, by substitution; T,
 * W and U are never formed. Pairwise decays e^(G_i - G_j) are products of the decays of tokens j+1..i,
 * built up row by row: no exponent of a positive number occurs, nothing overflows whatever the decay,
 * and one exponential a token and channel is all there is. In the scores tokens are the lanes of a
 * vector, elsewhere channels are. */
#include "delta_chunk.h"

#include "math.h"

#include <string.h>

#define SIMD _Pragma("omp simd")

static void load_keys(const ENG(delta_task) * t, int64_t first, int64_t i, int64_t Kp, chunk *c)
{
    const int64_t K = t->K, at = first + i;
    const real *q = t->q + at * t->ldk, *k = t->k + at * t->ldk, *g = t->g + at * t->ldg,
               *e = t->erase + at * t->lde;
    real *cq = c->q + i * Kp, *ck = c->k + i * Kp, *cb = c->kb + i * Kp, *ca = c->a + i * Kp;
    const real scale = t->scale;
    SIMD for (int64_t d = 0; d < K; d++)
    {
        cq[d] = scale * q[d];
        ck[d] = k[d];
    }
    if (t->e_scalar) {
        SIMD for (int64_t d = 0; d < K; d++) cb[d] = e[0] * k[d];
    } else {
        SIMD for (int64_t d = 0; d < K; d++) cb[d] = e[d] * k[d];
    }
    if (t->g_scalar) {
        const real a = k_exp(g[0]);
        SIMD for (int64_t d = 0; d < K; d++) ca[d] = a;
    } else {
        SIMD for (int64_t d = 0; d < K; d++) ca[d] = k_exp(g[d]);
    }
    for (int64_t d = K; d < Kp; d++) {
        cq[d] = ck[d] = cb[d] = 0;
        ca[d] = 1;
    }
}

static void load_value(const ENG(delta_task) * t, int64_t first, int64_t i, int64_t Vp, chunk *c)
{
    const int64_t V = t->V, at = first + i;
    const real *v = t->v + at * t->ldv;
    real *out = c->vw + i * Vp;
    if (t->write) {
        const real *w = t->write + at * t->ldv;
        SIMD for (int64_t d = 0; d < V; d++) out[d] = w[d] * v[d];
    } else {
        const real beta = t->erase[at * t->lde];
        SIMD for (int64_t d = 0; d < V; d++) out[d] = beta * v[d];
    }
    for (int64_t d = V; d < Vp; d++)
        out[d] = 0;
}

/* e^G, e^(G_C - G) and the three operands they scale. */
static void decays(int64_t Kp, chunk *c)
{
    const int64_t end = (C - 1) * Kp;
    memcpy(c->eg, c->a, sizeof(real) * (size_t)Kp);
    for (int64_t j = Kp; j < C * Kp; j += VL)
        v_store(c->eg + j, v_load(c->eg + j - Kp) * v_load(c->a + j));
    for (int64_t j = 0; j < Kp; j++)
        c->last[end + j] = 1;
    for (int64_t j = end - VL; j >= 0; j -= VL)
        v_store(c->last + j, v_load(c->last + j + Kp) * v_load(c->a + j + Kp));
    for (int64_t j = 0; j < C * Kp; j += VL) {
        vec e = v_load(c->eg + j);
        v_store(c->kq + j, v_load(c->kb + j) * e);
        v_store(c->kq + C * Kp + j, v_load(c->q + j) * e);
        v_store(c->kr + j, v_load(c->k + j) * v_load(c->last + j));
    }
}

/* One row of the scores for the tokens of one vector. r[d] holds k_j e^(G_i - G_j) in lane j. */
static void score_row(const chunk *c, const chunk_work *w, int64_t i, int64_t block, bool enter,
                      vec *low, vec *att)
{
    const int64_t Kp = w->Kp;
    const real *a = c->a + i * Kp, *kb = c->kb + i * Kp, *q = c->q + i * Kp;
    vec l0 = {0}, l1 = {0}, a0 = {0}, a1 = {0}, one = {0};
    if (enter)
        one[i - block] = 1; /* token i's own key enters after the decay of row i */
    for (int64_t d = 0; d < Kp; d += 2) {
        vec r0 = v_load(w->r + d * VL) * a[d], r1 = v_load(w->r + (d + 1) * VL) * a[d + 1];
        if (enter) {
            r0 += v_load(w->kt + d * C + block) * one;
            r1 += v_load(w->kt + (d + 1) * C + block) * one;
        }
        v_store(w->r + d * VL, r0);
        v_store(w->r + (d + 1) * VL, r1);
        l0 += r0 * kb[d];
        a0 += r0 * q[d];
        l1 += r1 * kb[d + 1];
        a1 += r1 * q[d + 1];
    }
    *low = l0 + l1;
    *att = a0 + a1;
}

static void scores(chunk_work *w, const chunk *c)
{
    memset(c->low, 0, sizeof(real) * C * C);
    memset(c->att, 0, sizeof(real) * C * C);
    for (int64_t i = 0; i < C; i++)
        for (int64_t d = 0; d < w->Kp; d++)
            w->kt[d * C + i] = c->k[i * w->Kp + d];
    for (int64_t block = 0; block < C; block += VL) {
        memset(w->r, 0, sizeof(real) * (size_t)(w->Kp * VL));
        for (int64_t i = block; i < C; i++) {
            vec low, att;
            score_row(c, w, i, block, i < block + VL, &low, &att);
            v_store(c->low + i * C + block, low);
            v_store(c->att + i * C + block, att);
        }
    }
    /* Lanes above the diagonal are zero except where 0 * NaN was, and L's diagonal is not part of it. */
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = i; j < C; j++) {
            c->low[i * C + j] = 0;
            if (j > i)
                c->att[i * C + j] = 0;
        }
}

void ENGK(chunk_load)(const ENG(delta_task) * t, int64_t first, chunk_work *w, chunk *c)
{
    const int64_t Kp = w->Kp, Vp = w->Vp, n = t->T - first < C ? t->T - first : C;
    for (int64_t i = 0; i < n; i++) {
        load_keys(t, first, i, Kp, c);
        load_value(t, first, i, Vp, c);
    }
    real *zero[] = {c->q, c->k, c->kb};
    for (size_t z = 0; z < sizeof zero / sizeof *zero; z++)
        memset(zero[z] + n * Kp, 0, sizeof(real) * (size_t)((C - n) * Kp));
    for (int64_t j = n * Kp; j < C * Kp; j++)
        c->a[j] = 1;
    memset(c->vw + n * Vp, 0, sizeof(real) * (size_t)((C - n) * Vp));
    decays(Kp, c);
    scores(w, c);
}

/* x = (kb e^G ; q e^G) S, then d of (I + L) d = vw - x[0..C-1]. */
void ENGK(chunk_solve)(const chunk_work *w, const chunk *c, const real *state)
{
    const int64_t Kp = w->Kp, Vp = w->Vp;
    k_matmul(&(k_mm){.m = 2 * C,
                     .n = Vp,
                     .k = Kp,
                     .a = c->kq,
                     .ra = Kp,
                     .ca = 1,
                     .b = state,
                     .ldb = Vp,
                     .c = w->x,
                     .ldc = Vp});
    for (int64_t v = 0; v < Vp; v += VL)
        for (int64_t i = 0; i < C; i++) {
            vec d0 = v_load(c->vw + i * Vp + v) - v_load(w->x + i * Vp + v), d1 = {0};
            const real *low = c->low + i * C;
            int64_t j = 0;
            for (; j + 1 < i; j += 2) {
                d0 -= v_load(c->d + j * Vp + v) * low[j];
                d1 -= v_load(c->d + (j + 1) * Vp + v) * low[j + 1];
            }
            if (j < i)
                d0 -= v_load(c->d + j * Vp + v) * low[j];
            v_store(c->d + i * Vp + v, d0 + d1);
        }
}

/* S' = Diag(e^G_C) S + Kr^T d. from may be to. */
void ENGK(chunk_update)(const chunk_work *w, const chunk *c, const real *from, real *to)
{
    const int64_t Kp = w->Kp, Vp = w->Vp;
    if (from != to)
        memcpy(to, from, sizeof(real) * (size_t)(Kp * Vp));
    k_matmul(&(k_mm){.m = Kp,
                     .n = Vp,
                     .k = C,
                     .a = c->kr,
                     .ra = 1,
                     .ca = Kp,
                     .b = c->d,
                     .ldb = Vp,
                     .c = to,
                     .ldc = Vp,
                     .add = true,
                     .scale = c->eg + (C - 1) * Kp});
}

void ENGK(state_load)(const ENG(delta_task) * t, const real *from, int64_t Vp, int64_t Kp,
                      real *state)
{
    memset(state, 0, sizeof(real) * (size_t)(Kp * Vp));
    for (int64_t k = 0; from && k < t->K; k++)
        memcpy(state + k * Vp, from + k * t->V, sizeof(real) * (size_t)t->V);
}

void ENGK(state_store)(const ENG(delta_task) * t, const real *state, int64_t Vp, real *to)
{
    for (int64_t k = 0; k < t->K; k++)
        memcpy(to + k * t->V, state + k * Vp, sizeof(real) * (size_t)t->V);
}

/* o = q e^G S + Aqk d. Only the lower triangle is multiplied, so that a NaN stays causal. */
static void output(const ENG(delta_task) * t, int64_t at, const chunk_work *w, const chunk *c)
{
    const int64_t Vp = w->Vp;
    real *o = w->x + C * Vp;
    for (int64_t v = 0; v < Vp; v += VL)
        for (int64_t i = 0; i < C; i++) {
            const real *att = c->att + i * C;
            vec x = v_load(o + i * Vp + v), y = {0};
            for (int64_t j = 0; j < i; j += 2) {
                x += v_load(c->d + j * Vp + v) * att[j];
                if (j + 1 < i)
                    y += v_load(c->d + (j + 1) * Vp + v) * att[j + 1];
            }
            v_store(o + i * Vp + v, x + y + v_load(c->d + i * Vp + v) * att[i]);
        }
    for (int64_t i = 0; i < C && at + i < t->T; i++)
        memcpy(t->o + (at + i) * t->ldv, o + i * Vp, sizeof(real) * (size_t)t->V);
}

void ENGK(delta_chunk)(const ENG(delta_task) * t, real *scratch)
{
    const int64_t Kp = k_pad(t->K), Vp = k_pad(t->V);
    chunk_work w;
    chunk c;
    chunk_work_take(&w, Kp, Vp, &scratch);
    chunk_take(&c, Kp, Vp, &scratch);
    real *state = k_take(&scratch, Kp * Vp);
    ENGK(state_load)(t, t->state0, Vp, Kp, state);
    for (int64_t at = 0; at < t->T; at += C) {
        if (t->saved && at % CKPT_ENG_SEGMENT_LEN == 0)
            ENGK(state_store)(t, state, Vp, t->saved + at / CKPT_ENG_SEGMENT_LEN * t->K * t->V);
        ENGK(chunk_load)(t, at, &w, &c);
        ENGK(chunk_solve)(&w, &c, state);
        output(t, at, &w, &c);
        ENGK(chunk_update)(&w, &c, state, state);
    }
    if (t->state)
        ENGK(state_store)(t, state, Vp, t->state);
}
