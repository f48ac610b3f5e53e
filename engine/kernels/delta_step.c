/* Delta rule token by token: the definition (kda-math.md sections 2 and 4.1), forward and backward.
 * Written to be read; the chunk form is checked against it. Backward keeps the states of one segment of
 * tokens, recomputed from the state saved at its start. */
#include "delta_chunk.h"
#include "math.h"

#include <string.h>

#define SEG CKPT_ENG_SEGMENT_LEN
#define SIMD _Pragma("omp simd")

/* One token as numbers: decay, erase key, value to write. */
typedef struct token {
    real *a, *kb, *vw; /* [K], [K], [V] */
    const real *q, *k;
} token;

static void load_token(const ENG(delta_task) * t, int64_t at, token *x)
{
    const real *g = t->g + at * t->ldg, *e = t->erase + at * t->lde, *v = t->v + at * t->ldv;
    x->q = t->q + at * t->ldk;
    x->k = t->k + at * t->ldk;
    for (int64_t d = 0; d < t->K; d++) {
        x->a[d] = k_exp(g[t->g_scalar ? 0 : d]);
        x->kb[d] = e[t->e_scalar ? 0 : d] * x->k[d];
    }
    for (int64_t d = 0; d < t->V; d++)
        x->vw[d] = (t->write ? t->write[at * t->ldv + d] : e[0]) * v[d];
}

/* delta = vw - St^T kb with St = Diag(a) S. */
static void erased(const ENG(delta_task) * t, const token *x, const real *state, real *delta)
{
    const int64_t V = t->V;
    memcpy(delta, x->vw, sizeof(real) * (size_t)V);
    for (int64_t k = 0; k < t->K; k++) {
        const real f = x->a[k] * x->kb[k], *s = state + k * V;
        SIMD for (int64_t v = 0; v < V; v++) delta[v] -= f * s[v];
    }
}

/* to = Diag(a) from + k delta^T. */
static void update(const ENG(delta_task) * t, const token *x, const real *delta, const real *from,
                   real *to)
{
    const int64_t V = t->V;
    for (int64_t k = 0; k < t->K; k++) {
        const real a = x->a[k], b = x->k[k], *s = from + k * V;
        real *r = to + k * V;
        SIMD for (int64_t v = 0; v < V; v++) r[v] = a * s[v] + b * delta[v];
    }
}

/* The state [K, V] from `from`, NULL = zeros. */
static void start(const ENG(delta_task) * t, const real *from, real *state)
{
    const size_t bytes = sizeof(real) * (size_t)(t->K * t->V);
    if (from)
        memcpy(state, from, bytes);
    else
        memset(state, 0, bytes);
}

static void forward(const ENG(delta_task) * t, real *scratch)
{
    const int64_t K = t->K, V = t->V;
    token x = {.a = k_take(&scratch, K), .kb = k_take(&scratch, K), .vw = k_take(&scratch, V)};
    real *delta = k_take(&scratch, V), *state = k_take(&scratch, K * V);
    start(t, t->state0, state);
    for (int64_t at = 0; at < t->T; at++) {
        if (t->saved && at % SEG == 0)
            memcpy(t->saved + at / SEG * K * V, state, sizeof(real) * (size_t)(K * V));
        load_token(t, at, &x);
        erased(t, &x, state, delta);
        update(t, &x, delta, state, state);
        real *o = t->o + at * t->ldv;
        memset(o, 0, sizeof(real) * (size_t)V);
        for (int64_t k = 0; k < K; k++) {
            const real f = t->scale * x.q[k], *s = state + k * V;
            SIMD for (int64_t v = 0; v < V; v++) o[v] += f * s[v];
        }
    }
    if (t->state)
        memcpy(t->state, state, sizeof(real) * (size_t)(K * V));
}

typedef struct adjoint {
    real *dq, *dk, *dkb, *dg; /* [K] of one token */
    real *ddelta;             /* [V] */
} adjoint;

/* The step adjoint: lam is the gradient of S_t on entry, of S_{t-1} on return. before, after: S_{t-1},
 * S_t. ddelta is also the gradient of vw. */
static void adjoint_token(const ENG(delta_task) * t, const token *x, const real *before,
                          const real *after, const real *delta, const real *d_o, real *lam,
                          const adjoint *g)
{
    const int64_t V = t->V;
    memset(g->ddelta, 0, sizeof(real) * (size_t)V);
    for (int64_t k = 0; k < t->K; k++) {
        const real *s = after + k * V, f = t->scale * x->q[k], key = x->k[k];
        real *l = lam + k * V, dq = 0, dk = 0;
        _Pragma("omp simd reduction(+ : dq, dk)") for (int64_t v = 0; v < V; v++)
        {
            dq += s[v] * d_o[v];
            l[v] += f * d_o[v];
            g->ddelta[v] += l[v] * key;
            dk += l[v] * delta[v];
        }
        g->dq[k] = t->scale * dq;
        g->dk[k] = dk;
    }
    for (int64_t k = 0; k < t->K; k++) {
        const real *s = before + k * V, a = x->a[k], kb = x->kb[k];
        real *l = lam + k * V, dkb = 0, dg = 0;
        _Pragma("omp simd reduction(+ : dkb, dg)") for (int64_t v = 0; v < V; v++)
        {
            dkb += s[v] * g->ddelta[v];
            l[v] -= kb * g->ddelta[v];
            dg += l[v] * s[v];
            l[v] *= a;
        }
        g->dkb[k] = -a * dkb;
        g->dg[k] = a * dg;
    }
}

/* Gradients of one token in terms of the inputs. */
static void store_token(const ENG(delta_task) * t, int64_t at, const adjoint *g)
{
    const real *k = t->k + at * t->ldk, *e = t->erase + at * t->lde, *v = t->v + at * t->ldv;
    real *dq = t->dq + at * t->ldk, *dk = t->dk + at * t->ldk, *dg = t->dg + at * t->ldg,
         *de = t->derase + at * t->lde, *dv = t->dv + at * t->ldv;
    real sum_g = 0, sum_e = 0;
    for (int64_t d = 0; d < t->K; d++) {
        real key = g->dk[d] + e[t->e_scalar ? 0 : d] * g->dkb[d];
        dq[d] = t->first ? g->dq[d] : dq[d] + g->dq[d];
        dk[d] = t->first ? key : dk[d] + key;
        sum_g += g->dg[d];
        sum_e += k[d] * g->dkb[d];
        if (!t->g_scalar)
            dg[d] = g->dg[d];
        if (!t->e_scalar)
            de[d] = k[d] * g->dkb[d];
    }
    for (int64_t d = 0; d < t->V; d++) {
        sum_e += v[d] * g->ddelta[d];
        dv[d] = (t->write ? t->write[at * t->ldv + d] : e[0]) * g->ddelta[d];
        if (t->write)
            t->dwrite[at * t->ldv + d] = v[d] * g->ddelta[d];
    }
    if (t->g_scalar)
        dg[0] = sum_g;
    if (t->e_scalar)
        de[0] = sum_e;
}

static void backward(const ENG(delta_task) * t, real *scratch)
{
    const int64_t K = t->K, V = t->V, size = K * V;
    token x = {.a = k_take(&scratch, K), .kb = k_take(&scratch, K), .vw = k_take(&scratch, V)};
    adjoint g = {.dq = k_take(&scratch, K),
                 .dk = k_take(&scratch, K),
                 .dkb = k_take(&scratch, K),
                 .dg = k_take(&scratch, K),
                 .ddelta = k_take(&scratch, V)};
    real *delta = k_take(&scratch, SEG * V), *lam = k_take(&scratch, size),
         *states = k_take(&scratch, (SEG + 1) * size);
    start(t, t->d_state, lam);
    for (int64_t seg = (t->T + SEG - 1) / SEG - 1; seg >= 0; seg--) {
        const int64_t lo = seg * SEG, n = t->T - lo < SEG ? t->T - lo : SEG;
        memcpy(states, t->saved + seg * size, sizeof(real) * (size_t)size);
        for (int64_t i = 0; i < n; i++) {
            load_token(t, lo + i, &x);
            erased(t, &x, states + i * size, delta + i * V);
            update(t, &x, delta + i * V, states + i * size, states + (i + 1) * size);
        }
        for (int64_t i = n - 1; i >= 0; i--) {
            load_token(t, lo + i, &x);
            adjoint_token(t, &x, states + i * size, states + (i + 1) * size, delta + i * V,
                          t->d_o + (lo + i) * t->ldv, lam, &g);
            store_token(t, lo + i, &g);
        }
    }
    if (t->dstate0)
        memcpy(t->dstate0, lam, sizeof(real) * (size_t)size);
}

int64_t ENGK(delta_step_scratch)(int64_t K, int64_t V)
{
    int64_t Kp = k_pad(K), Vp = k_pad(V);
    return 6 * Kp + (SEG + 2) * Vp + (SEG + 2) * (k_pad(K * V) + 16);
}

void ENGK(delta_step)(const ENG(delta_task) * t, int64_t heads, real *scratch)
{
    for (int64_t h = 0; h < heads; h++)
        forward(t + h, scratch);
}

void ENGK(delta_step_bwd)(const ENG(delta_task) * t, int64_t heads, real *scratch)
{
    for (int64_t h = 0; h < heads; h++)
        backward(t + h, scratch);
}
