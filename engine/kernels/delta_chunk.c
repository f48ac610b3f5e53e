/* Chunk (WY) form of the delta rule, forward (kda-math.md section 3), chunks of 16 tokens.
 *
 * With (I + L) d = vw - (kb e^G) S the triangular system is solved for d directly, by substitution; T,
 * W and U are never formed. Pairwise decays e^(G_i - G_j) are products of the decays of tokens j+1..i,
 * built up row by row: no exponent of a positive number occurs, nothing overflows whatever the decay,
 * and one exponential a token and channel is all there is. In the scores tokens are the lanes of a
 * vector, elsewhere channels are.
 *
 * Of 6 K V + 20 C K operations a token the three products with the state are 6 K V at any C. 16 tokens are
 * what makes them products of matrices; more would only lengthen the scores. */
#include "delta_chunk.h"

#include "math.h"

#include <string.h>

#define SIMD _Pragma("omp simd")

/* One token's rows of inputs: [Kp] each. */
typedef struct token {
    const real *q, *k, *g, *erase; /* g and erase [1] where the task says they are scalars */
} token;

/* Pointers into the task's arrays, or to padded copies. */
static token token_at(const ENG(delta_task) * t, int64_t at, int64_t Kp, real *pad)
{
    token x = {.q = t->q + at * t->ldk,
               .k = t->k + at * t->ldk,
               .g = t->g + at * t->ldg,
               .erase = t->erase + at * t->lde};
    if (t->K == Kp)
        return x;
    const real **rows[] = {&x.q, &x.k, t->g_scalar ? NULL : &x.g, t->e_scalar ? NULL : &x.erase};
    for (int i = 0; i < 4; i++, pad += Kp)
        if (rows[i]) {
            memset(pad + t->K, 0, sizeof(real) * (size_t)(Kp - t->K));
            *rows[i] = memcpy(pad, *rows[i], sizeof(real) * (size_t)t->K);
        }
    return x;
}

/* Token i of the chunk: its keys, decay, and what e^G scales. Every combination of gates is one loop. */
K_SPECIAL void load_rows(const token *x, real scale, bool g_scalar, bool e_scalar, int64_t i,
                         const chunk_work *w, const chunk *c)
{
    const int64_t Kp = w->Kp;
    const real *q = x->q, *k = x->k, *g = x->g, *e = x->erase,
               *before = i > 0 ? c->eg + (i - 1) * Kp : w->ones;
    real *cq = c->q + i * Kp, *ck = c->k + i * Kp, *cb = c->kb + i * Kp, *ca = c->a + i * Kp,
         *eg = c->eg + i * Kp, *beg = c->kq + i * Kp, *qeg = c->kq + (C + i) * Kp;
    const real g0 = g_scalar ? k_exp(g[0]) : 0, e0 = e[0];
    SIMD for (int64_t d = 0; d < Kp; d++)
    {
        const real a = g_scalar ? g0 : k_exp(g[d]), b = (e_scalar ? e0 : e[d]) * k[d],
                   y = scale * q[d], all = before[d] * a;
        ca[d] = a;
        eg[d] = all;
        cq[d] = y;
        ck[d] = k[d];
        cb[d] = b;
        beg[d] = b * all;
        qeg[d] = y * all;
    }
}

static void load_token(const ENG(delta_task) * t, int64_t at, int64_t i, const chunk_work *w,
                       const chunk *c)
{
    const token x = token_at(t, at, w->Kp, w->pad);
    if (t->g_scalar)
        load_rows(&x, t->scale, true, true, i, w, c);
    else if (t->e_scalar)
        load_rows(&x, t->scale, false, true, i, w, c);
    else
        load_rows(&x, t->scale, false, false, i, w, c);
    const int64_t V = t->V;
    const real *v = t->v + at * t->ldv;
    panel_row_load(v, V, C, i, w->vw);
    real *out = w->vw + i * PANEL;
    for (int64_t p = 0; p < V; p += PANEL, out += C * PANEL) {
        const int64_t n = V - p < PANEL ? V - p : PANEL;
        const real beta = t->write ? 0 : x.erase[0];
        if (t->write) {
            const real *write = t->write + at * t->ldv + p;
            SIMD for (int64_t j = 0; j < n; j++) out[j] *= write[j];
        } else {
            SIMD for (int64_t j = 0; j < n; j++) out[j] *= beta;
        }
    }
}

/* Tokens n .. C-1 of the chunk do not exist. */
static void load_nothing(int64_t n, const chunk_work *w, const chunk *c)
{
    const int64_t Kp = w->Kp;
    const size_t left = sizeof(real) * (size_t)((C - n) * Kp);
    real *zero[] = {c->q + n * Kp, c->k + n * Kp, c->kb + n * Kp, c->kq + n * Kp,
                    c->kq + (C + n) * Kp};
    for (size_t z = 0; z < sizeof zero / sizeof *zero; z++)
        memset(zero[z], 0, left);
    for (int64_t j = n * Kp; j < C * Kp; j++) {
        c->a[j] = 1;
        c->eg[j] = c->eg[j - Kp];
    }
    for (int64_t p = 0; p < w->Vp * C; p += C * PANEL)
        memset(w->vw + p + n * PANEL, 0, sizeof(real) * (size_t)((C - n) * PANEL));
}

/* e^(G_C - G) and k times it. */
static void decays_after(int64_t Kp, const chunk *c)
{
    for (int64_t d = 0; d < Kp; d += VL) {
        vec last = v_all(1);
        for (int64_t j = (C - 1) * Kp + d; j >= 0; j -= Kp) {
            v_store(c->kr + j, v_load(c->k + j) * last);
            if (c->last)
                v_store(c->last + j, last);
            last *= v_load(c->a + j);
        }
    }
}

#define DB (VB == 64 ? 8 : 4) /* channels in registers */

/* Rows of the scores for tokens block .. block+VL-1 as lanes: sums over DB channels from d, set or added.
 * r holds k_j e^(G_i - G_j) in lane j < i, and k_j in the others: a key enters before any later decay. */
K_SPECIAL void score_block(const chunk *c, const real *kt, int64_t Kp, int64_t d, int64_t block,
                           bool add)
{
    vec r[DB];
    K_UNROLL for (int e = 0; e < DB; e++) r[e] = v_load(kt + e * C + block);
    for (int64_t i = block; i < C; i++) {
        const real *a = c->a + i * Kp + d, *kb = c->kb + i * Kp + d, *q = c->q + i * Kp + d;
        const v_lanes earlier = v_first(i - block < VL ? i - block : VL);
        vec low[2] = {{0}}, att[2] = {{0}};
        if (add) {
            low[0] = v_load(c->low + i * C + block);
            att[0] = v_load(c->att + i * C + block);
        }
        K_UNROLL for (int e = 0; e < DB; e++)
        {
            r[e] = v_mul_in(earlier, r[e], v_all(a[e]));
            low[e & 1] += r[e] * kb[e];
            att[e & 1] += r[e] * q[e];
        }
        v_store(c->low + i * C + block, low[0] + low[1]);
        v_store(c->att + i * C + block, att[0] + att[1]);
    }
}

static void scores(const chunk_work *w, const chunk *c)
{
    const int64_t Kp = w->Kp;
    v_transpose(C, Kp, c->k, Kp, w->kt, C);
    for (int64_t block = 0; block < C; block += VL) {
        score_block(c, w->kt, Kp, 0, block, false);
        for (int64_t d = DB; d < Kp; d += DB)
            score_block(c, w->kt + d * C, Kp, d, block, true);
    }
    /* Above the diagonal, and on that of L, is what r held there: not part of them. */
    for (int64_t i = 0; i < C; i++)
        for (int64_t block = 0; block < C; block += VL) {
            const int64_t n = i - block;
            real *low = c->low + i * C + block, *att = c->att + i * C + block;
            v_store(low, v_only(v_first(n < 0 ? 0 : n < VL ? n : VL), v_load(low)));
            v_store(att, v_only(v_first(n < 0 ? 0 : n + 1 < VL ? n + 1 : VL), v_load(att)));
        }
}

void ENGK(chunk_load)(const ENG(delta_task) * t, int64_t first, chunk_work *w, chunk *c)
{
    const int64_t n = t->T - first < C ? t->T - first : C;
    for (int64_t i = 0; i < n; i++)
        load_token(t, first + i, i, w, c);
    if (n < C)
        load_nothing(n, w, c);
    decays_after(w->Kp, c);
    scores(w, c);
}

/* x [rows, PANEL] = rows of kq times a panel of the state. */
K_INLINE void times_state(const real *kq, int64_t rows, int64_t Kp, const real *state, k_feed *feed,
                          real *x)
{
    k_matmul(&(k_mm){.m = rows,
                     .n = PANEL,
                     .k = 16,
                     .a = kq,
                     .ra = Kp,
                     .ca = 1,
                     .blocks = Kp / 16,
                     .ablock = 16,
                     .b = state,
                     .ldb = PANEL,
                     .c = x,
                     .ldc = PANEL,
                     .feed = feed});
}

static void add_to_state(const chunk *c, int64_t Kp, const real *d, const real *from, real *to)
{
    k_matmul(&(k_mm){.m = Kp,
                     .n = PANEL,
                     .k = C,
                     .a = c->kr,
                     .ra = 1,
                     .ca = Kp,
                     .b = d,
                     .ldb = PANEL,
                     .c = to,
                     .ldc = PANEL,
                     .from = from,
                     .scale = c->eg + (C - 1) * Kp});
}

/* One vector of columns: d by substitution, then o unless it is NULL. Only lower triangles are
 * multiplied, so that a NaN stays causal. */
K_SPECIAL void solve(const real *low, const real *att, const real *vw, const real *x, real *d,
                     real *o)
{
    vec r[C];
    K_REGISTERS for (int i = 0; i < C; i++)
    {
        vec sum = v_load(vw + i * PANEL) - v_load(x + i * PANEL);
        K_REGISTERS for (int j = 0; j < i; j++) sum -= r[j] * low[i * C + j];
        r[i] = sum;
        v_store(d + i * PANEL, sum);
    }
    if (!o)
        return;
    K_REGISTERS for (int i = 0; i < C; i++)
    {
        vec sum = v_load(x + (C + i) * PANEL);
        K_REGISTERS for (int j = 0; j <= i; j++) sum += r[j] * att[i * C + j];
        v_store(o + i * PANEL, sum);
    }
}

static void solve_only(const real *low, const real *vw, const real *x, real *d)
{
    for (int64_t v = 0; v < PANEL; v += VL)
        solve(low, NULL, vw + v, x + v, d + v, NULL);
}

static void solve_output(const chunk *c, const real *vw, const real *x, real *d, real *o)
{
    for (int64_t v = 0; v < PANEL; v += VL)
        solve(c->low, c->att, vw + v, x + v, d + v, o + v);
}

void ENGK(chunk_run)(chunk_work *w, const chunk *c, const real *state, real *to, real *o)
{
    const int64_t Kp = w->Kp, rows = C * PANEL, panels = w->Vp / PANEL, m = o ? 2 * C : C;
    for (int64_t p = 0; p < panels; p++) {
        const real *s = state + p * Kp * PANEL;
        real *d = c->d + p * rows;
        times_state(c->kq, m, Kp, s, &w->feed, w->x);
        if (o)
            solve_output(c, w->vw + p * rows, w->x, d, o + p * rows);
        else
            solve_only(c->low, w->vw + p * rows, w->x, d);
        if (to)
            add_to_state(c, Kp, d, s, to + p * Kp * PANEL);
    }
}

void ENGK(state_load)(const ENG(delta_task) * t, const real *from, int64_t Kp, int64_t Vp,
                      real *state)
{
    memset(state, 0, sizeof(real) * (size_t)(Kp * Vp));
    for (int64_t k = 0; from && k < t->K; k++)
        panel_row_load(from + k * t->V, t->V, Kp, k, state);
}

void ENGK(state_store)(const ENG(delta_task) * t, const real *state, int64_t Kp, real *to)
{
    for (int64_t k = 0; k < t->K; k++)
        panel_row_store(state, Kp, k, t->V, to + k * t->V);
}

/* Tokens at .. at+C-1 of one head. */
static void forward(const ENG(delta_task) * t, int64_t at, chunk_work *w, chunk *c, real *state,
                    real *o)
{
    if (t->saved && at % CKPT_ENG_SEGMENT_LEN == 0)
        ENGK(state_store)(t, state, w->Kp, t->saved + at / CKPT_ENG_SEGMENT_LEN * t->K * t->V);
    ENGK(chunk_load)(t, at, w, c);
    ENGK(chunk_run)(w, c, state, state, o);
    for (int64_t i = 0; i < C && at + i < t->T; i++)
        panel_row_store(o, C, i, t->V, t->o + (at + i) * t->ldv);
}

/* Chunk by chunk, and each chunk head by head: so rows are read and written that lie side by side. */
void ENGK(delta_chunk)(const ENG(delta_task) * t, int64_t heads, real *scratch)
{
    const int64_t Kp = k_pad(t->K), Vp = v_pad(t->V), size = Kp * Vp;
    const int64_t calls = heads * (Vp / PANEL) * (2 * C / MM_R2) * (Kp / 16);
    chunk_work w;
    chunk c;
    chunk_work_take(&w, Kp, Vp, &scratch);
    chunk_take(&c, Kp, Vp, false, &scratch);
    real *o = k_take(&scratch, C * Vp), *state = k_take(&scratch, heads * size);
    for (int64_t h = 0; h < heads; h++)
        ENGK(state_load)(t + h, t[h].state0, Kp, Vp, state + h * size);
    for (int64_t at = 0; at < t->T; at += C) {
        k_feed_clear(&w.feed);
        feed_inputs(t, heads, at + C, at + 2 * C, true, &w.feed);
        k_feed_start(&w.feed, calls);
        for (int64_t h = 0; h < heads; h++)
            forward(t + h, at, &w, &c, state + h * size, o);
    }
    for (int64_t h = 0; h < heads; h++)
        if (t[h].state)
            ENGK(state_store)(t + h, state + h * size, Kp, t[h].state);
}
