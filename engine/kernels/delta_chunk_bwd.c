/* Chunk form of the delta rule, backward (kda-math.md section 4.2, without T, W and U).
 *
 * A segment of four chunks is recomputed from the state saved at its start, then taken backward. With
 * dX = (I + L)^-T dd, by substitution:  dvw = dX,  dL = -stril(dX d^T),  d(kb e^G) = -dX S^T.
 * What contracts over V against a state is computed transposed, tokens in lanes, so that only the small
 * token arrays are ever transposed. Pairwise decays are running products as in delta_chunk.c: over rows
 * downward for dq and dkb, over columns upward for dk. */
#include "delta_chunk.h"

#include <string.h>

#define SIMD _Pragma("omp simd")

typedef struct back {
    real *states;        /* [CHUNKS, Kp, Vp] at the start of each chunk, each in panels */
    real *lam;           /* [Kp, Vp] in panels: gradient of the state after the chunk */
    real *xo;            /* [2C, Vp] in panels: -dX, then dO */
    real *dd;            /* [C, PANEL] Kr lam */
    real *xot;           /* [Vp, 2C] xo transposed */
    real *dt;            /* [Vp, C] d transposed */
    real *score;         /* [2C, C] dL, then dAqk */
    real *kqt, *krt;     /* [Kp, 2C], [Kp, C] gradients of kq and kr, transposed */
    real *dq, *dkb, *dk; /* [C, Kp] of the scaled q, of kb, of k */
    real *dkr;           /* [C, Kp] share of dk that came through kr */
    real *dg;            /* [C, Kp] of G, then of g */
    real *dstate;        /* [Kp] rowsum(lam * S) */
    real *dx;            /* [Vp] -dX of one token */
} back;

static void back_take(back *b, int64_t Kp, int64_t Vp, real **at)
{
    b->states = k_take(at, CHUNKS * Kp * Vp);
    b->xo = k_take(at, 2 * C * Vp);
    b->dd = k_take(at, C * PANEL);
    b->xot = k_take(at, 2 * C * Vp);
    b->dt = k_take(at, C * Vp);
    b->score = k_take(at, 2 * C * C);
    b->kqt = k_take(at, 2 * C * Kp);
    b->krt = k_take(at, C * Kp);
    real **rows[] = {&b->dq, &b->dkb, &b->dk, &b->dkr, &b->dg};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = k_take(at, C * Kp);
    b->dstate = k_take(at, Kp);
    b->dx = k_take(at, Vp);
}

int64_t ENGK(delta_chunk_scratch)(int64_t K, int64_t V, int64_t heads)
{
    int64_t Kp = k_pad(K), Vp = v_pad(V);
    return CHUNKS * chunk_size(Kp, Vp) + chunk_work_size(Kp, Vp) + (CHUNKS + heads) * Kp * Vp +
           5 * C * Vp + C * PANEL + 2 * C * C + 8 * C * Kp + Kp + Vp + 16;
}

/* One vector of columns: dX by substitution from the last token of dd + Aqk^T dO; xo [2C, PANEL] holds dO
 * in its second half and gets -dX in the first. */
K_SPECIAL void solve_back(const real *low, const real *att, const real *dd, real *xo)
{
    vec r[C]; /* -dX */
    K_REGISTERS for (int i = C - 1; i >= 0; i--)
    {
        vec x = v_load(dd + i * PANEL), y = {0};
        K_REGISTERS for (int j = i; j < C; j++) y += v_load(xo + (C + j) * PANEL) * att[j * C + i];
        K_REGISTERS for (int j = C - 1; j > i; j--) x += r[j] * low[j * C + i];
        r[i] = -(x + y);
        v_store(xo + i * PANEL, r[i]);
    }
}

static void values_back(const chunk_work *w, const chunk *c, back *b)
{
    const int64_t Kp = w->Kp;
    for (int64_t p = 0; p < w->Vp / PANEL; p++) {
        real *xo = b->xo + p * 2 * C * PANEL;
        k_matmul(&(k_mm){.m = C,
                         .n = PANEL,
                         .k = Kp,
                         .a = c->kr,
                         .ra = Kp,
                         .ca = 1,
                         .b = b->lam + p * Kp * PANEL,
                         .ldb = PANEL,
                         .c = b->dd,
                         .ldc = PANEL});
        for (int64_t v = 0; v < PANEL; v += VL)
            solve_back(c->low, c->att, b->dd + v, xo + v);
        v_transpose(2 * C, PANEL, xo, PANEL, b->xot + p * PANEL * 2 * C, 2 * C);
        v_transpose(C, PANEL, c->d + p * C * PANEL, PANEL, b->dt + p * PANEL * C, C);
    }
}

/* out [m, n] = a [m, Vp] in panels of `rows` rows, times b [Vp, n]. */
K_SPECIAL void over_values(int64_t m, int64_t n, int64_t Vp, const real *a, int64_t rows,
                           const real *b, k_feed *feed, real *out)
{
    k_matmul(&(k_mm){.m = m,
                     .n = n,
                     .k = PANEL,
                     .a = a,
                     .ra = PANEL,
                     .ca = 1,
                     .blocks = Vp / PANEL,
                     .ablock = rows * PANEL,
                     .b = b,
                     .ldb = n,
                     .c = out,
                     .ldc = n,
                     .feed = feed});
}

static void score_gradients(int64_t Vp, back *b)
{
    over_values(2 * C, C, Vp, b->xo, 2 * C, b->dt, NULL, b->score);
    for (int64_t i = 0; i < C; i++)
        for (int64_t block = 0; block < C; block += VL) {
            const int64_t n = i - block;
            real *low = b->score + i * C + block, *att = low + C * C;
            v_store(low, v_only(v_first(n < 0 ? 0 : n < VL ? n : VL), v_load(low)));
            v_store(att, v_only(v_first(n < 0 ? 0 : n + 1 < VL ? n + 1 : VL), v_load(att)));
        }
}

/* What contracts over V against a state, and rowsum(lam * S): 16 channels of the key at a time, whose rows
 * of S and lam are read while they are near. */
static void state_gradients(int64_t Kp, int64_t Vp, const real *state, k_feed *feed, back *b)
{
    const int64_t panels = Vp / PANEL;
    for (int64_t k = 0; k < Kp; k += 16) {
        const real *s = state + k * PANEL, *l = b->lam + k * PANEL;
        over_values(16, 2 * C, Vp, s, Kp, b->xot, feed, b->kqt + k * 2 * C);
        over_values(16, C, Vp, l, Kp, b->dt, NULL, b->krt + k * C);
        for (int64_t i = 0; i < 16; i++) {
            vec x = {0}, y = {0};
            for (int64_t p = 0; p < panels; p++) {
                const int64_t at = (p * Kp + i) * PANEL;
                x += v_load(l + at) * v_load(s + at);
                y += v_load(l + at + VL) * v_load(s + at + VL);
            }
            real total = 0;
            x += y;
            for (int lane = 0; lane < VL; lane++)
                total += x[lane];
            b->dstate[k + i] = total;
        }
    }
}

/* dq_i += sum_{j<=i} dAqk[i,j] k_j e^(G_i-G_j), dkb_i the same with dL: one vector of channels. */
static void pairs_down(const chunk *c, const back *b, int64_t Kp, int64_t d)
{
    vec r[C];
    K_REGISTERS for (int i = 0; i < C; i++)
    {
        const real *low = b->score + i * C, *att = b->score + (C + i) * C;
        const vec a = v_load(c->a + i * Kp + d);
        vec dq = v_load(b->dq + i * Kp + d), dkb = v_load(b->dkb + i * Kp + d);
        K_REGISTERS for (int j = 0; j < i; j++)
        {
            r[j] *= a;
            dq += r[j] * att[j];
            dkb += r[j] * low[j];
        }
        r[i] = v_load(c->k + i * Kp + d);
        v_store(b->dq + i * Kp + d, dq + r[i] * att[i]);
        v_store(b->dkb + i * Kp + d, dkb);
    }
}

/* dk_j += sum_{i>=j} dAqk[i,j] q_i e^(G_i-G_j) + sum_{i>j} dL[i,j] kb_i e^(G_i-G_j), by Horner's rule in
 * the decays, for all j at once from the last token. */
static void pairs_up(const chunk *c, const back *b, int64_t Kp, int64_t d)
{
    vec dk[C];
    K_REGISTERS for (int i = C - 1; i >= 0; i--)
    {
        const real *low = b->score + i * C, *att = b->score + (C + i) * C;
        const vec q = v_load(c->q + i * Kp + d), kb = v_load(c->kb + i * Kp + d);
        const vec a = i + 1 < C ? v_load(c->a + (i + 1) * Kp + d) : (vec){0};
        K_REGISTERS for (int j = 0; j <= i; j++)
        {
            vec sum = q * att[j];
            if (j < i)
                sum += kb * low[j];
            dk[j] = i + 1 < C ? dk[j] * a + sum : sum;
        }
        v_store(b->dk + i * Kp + d, v_load(b->dk + i * Kp + d) + dk[i]);
    }
}

static double dot(int64_t n, const real *x, const real *y)
{
    vec sum = {0};
    double total = 0;
    for (int64_t i = 0; i < n; i += VL)
        sum += v_load(x + i) * v_load(y + i);
    for (int l = 0; l < VL; l++)
        total += (double)sum[l];
    return total;
}

/* dg of a decay that a token's channels share, to dg[i * Kp]. Token t's decay multiplies what comes from
 * the state before and goes to tokens i >= t, what tokens j < t leave in the state after, the pairs
 * j < t <= i, and the state itself: the sum of those. (q dq + kb dkb - k dk, summed from the end as
 * below, adds every pair's term at i and takes it away again at j, which leaves the rounding of both;
 * the gradients of A_log and dt_bias are small beside these terms and do not forgive that.) Called
 * before the pairs are added to dq and dkb; in double, a few hundred numbers a chunk. */
static void shared_decay(const chunk *c, int64_t Kp, back *b)
{
    double sum[C] = {0}, state = 0;
    for (int64_t i = 0; i < C; i++) {
        const real *dlow = b->score + i * C, *datt = b->score + (C + i) * C;
        double reach = 0;
        for (int64_t t = 1; t <= i; t++) {
            reach += (double)dlow[t - 1] * (double)c->low[i * C + t - 1] +
                     (double)datt[t - 1] * (double)c->att[i * C + t - 1];
            sum[t] += reach;
        }
    }
    for (int64_t t = 1; t < C; t++) {
        state += dot(Kp, c->k + (t - 1) * Kp, b->dkr + (t - 1) * Kp);
        sum[t] += state;
    }
    state = dot(Kp, c->eg + (C - 1) * Kp, b->dstate);
    for (int64_t t = C - 1; t >= 0; t--) {
        state += dot(Kp, c->q + t * Kp, b->dq + t * Kp) + dot(Kp, c->kb + t * Kp, b->dkb + t * Kp);
        b->dg[t * Kp] = (real)(sum[t] + state);
    }
}

/* dg of a decay of its own for every channel. */
static void channel_decay(const chunk *c, int64_t Kp, back *b)
{
    for (int64_t d = 0; d < Kp; d += VL) {
        vec sum = v_load(c->eg + (C - 1) * Kp + d) * v_load(b->dstate + d);
        for (int64_t i = 0; i < C; i++)
            sum += v_load(c->k + i * Kp + d) * v_load(b->dkr + i * Kp + d);
        for (int64_t i = C - 1; i >= 0; i--) {
            const int64_t at = i * Kp + d;
            sum += v_load(c->q + at) * v_load(b->dq + at) +
                   v_load(c->kb + at) * v_load(b->dkb + at) -
                   v_load(c->k + at) * v_load(b->dk + at);
            v_store(b->dg + at, sum);
        }
    }
}

/* Gradients with respect to the chunk's scaled q, kb, k and g. */
static void key_gradients(const chunk_work *w, const chunk *c, bool shared, back *b)
{
    const int64_t Kp = w->Kp;
    v_transpose(Kp, C, b->kqt, 2 * C, b->dkb, Kp);
    v_transpose(Kp, C, b->kqt + C, 2 * C, b->dq, Kp);
    v_transpose(Kp, C, b->krt, C, b->dkr, Kp);
    for (int64_t j = 0; j < C * Kp; j += VL) {
        const vec e = v_load(c->eg + j), kr = v_load(b->dkr + j) * v_load(c->last + j);
        v_store(b->dq + j, v_load(b->dq + j) * e);
        v_store(b->dkb + j, v_load(b->dkb + j) * e);
        v_store(b->dkr + j, kr);
        v_store(b->dk + j, kr);
    }
    if (shared)
        shared_decay(c, Kp, b);
    for (int64_t d = 0; d < Kp; d += VL) {
        pairs_down(c, b, Kp, d);
        pairs_up(c, b, Kp, d);
    }
    if (!shared)
        channel_decay(c, Kp, b);
}

/* Set, or added to. */
K_SPECIAL void keys_out(int64_t K, const real *dq, const real *dk, const real *dkb, const real *e,
                        bool e_scalar, real scale, bool first, real *oq, real *ok)
{
    const real e0 = e[0];
    if (first) {
        SIMD for (int64_t d = 0; d < K; d++)
        {
            oq[d] = scale * dq[d];
            ok[d] = dk[d] + (e_scalar ? e0 : e[d]) * dkb[d];
        }
    } else {
        SIMD for (int64_t d = 0; d < K; d++)
        {
            oq[d] += scale * dq[d];
            ok[d] += dk[d] + (e_scalar ? e0 : e[d]) * dkb[d];
        }
    }
}

/* Token i of the chunk, in terms of the inputs. */
static void store_keys(const ENG(delta_task) * t, int64_t at, int64_t i, int64_t Kp, const back *b,
                       real dvalue)
{
    const int64_t K = t->K;
    const real *k = t->k + at * t->ldk, *e = t->erase + at * t->lde, scale = t->scale;
    const real *dq = b->dq + i * Kp, *dk = b->dk + i * Kp, *dkb = b->dkb + i * Kp,
               *dg = b->dg + i * Kp;
    real *oq = t->dq + at * t->ldk, *ok = t->dk + at * t->ldk, *oe = t->derase + at * t->lde,
         *og = t->dg + at * t->ldg;
    real sum_e = dvalue;
    if (t->e_scalar) {
        _Pragma("omp simd reduction(+ : sum_e)") for (int64_t d = 0; d < K; d++) sum_e +=
            k[d] * dkb[d];
        oe[0] = sum_e;
    } else {
        SIMD for (int64_t d = 0; d < K; d++) oe[d] = k[d] * dkb[d];
    }
    if (t->g_scalar) {
        og[0] = dg[0];
    } else {
        SIMD for (int64_t d = 0; d < K; d++) og[d] = dg[d];
    }
    if (t->e_scalar)
        keys_out(K, dq, dk, dkb, e, true, scale, t->first, oq, ok);
    else
        keys_out(K, dq, dk, dkb, e, false, scale, t->first, oq, ok);
}

/* minus [V] is -dX. Returns the value's share of the gradient of a scalar erase gate. */
static real store_values(const ENG(delta_task) * t, int64_t at, const real *minus)
{
    const int64_t V = t->V;
    const real *v = t->v + at * t->ldv;
    real *dv = t->dv + at * t->ldv, sum = 0;
    if (t->write) {
        const real *w = t->write + at * t->ldv;
        real *dw = t->dwrite + at * t->ldv;
        SIMD for (int64_t d = 0; d < V; d++)
        {
            dv[d] = -(w[d] * minus[d]);
            dw[d] = -(v[d] * minus[d]);
        }
        return 0;
    }
    const real beta = t->erase[at * t->lde];
    _Pragma("omp simd reduction(+ : sum)") for (int64_t d = 0; d < V; d++)
    {
        dv[d] = -(beta * minus[d]);
        sum -= v[d] * minus[d];
    }
    return sum;
}

/* Rows of what backward of tokens [lo, hi) reads and writes beside its inputs. */
static void feed_gradients(const ENG(delta_task) * t, int64_t heads, int64_t lo, int64_t hi,
                           k_feed *f)
{
    const ENG(delta_task) *last = t + heads - 1;
    const int64_t nk = last->q - t->q + t->K, nv = last->v - t->v + t->V;
    for (int64_t i = lo; i < hi && i < t->T; i++) {
        k_feed_add(f, t->d_o + i * t->ldv, nv);
        k_feed_add(f, t->dq + i * t->ldk, nk);
        k_feed_add(f, t->dk + i * t->ldk, nk);
        k_feed_add(f, t->dv + i * t->ldv, nv);
        k_feed_add(f, t->dg + i * t->ldg, last->dg - t->dg + (t->g_scalar ? 1 : t->K));
        if (!t->e_scalar)
            k_feed_add(f, t->derase + i * t->lde, last->derase - t->derase + t->K);
        if (t->write)
            k_feed_add(f, t->dwrite + i * t->ldv, nv);
    }
}

static void chunk_back(const ENG(delta_task) * t, int64_t at, chunk_work *w, const chunk *c,
                       const real *state, back *b)
{
    const int64_t Kp = w->Kp, Vp = w->Vp, n = t->T - at < C ? t->T - at : C;
    for (int64_t i = 0; i < n; i++)
        panel_row_load(t->d_o + (at + i) * t->ldv, t->V, 2 * C, C + i, b->xo);
    for (int64_t p = 0; n < C && p < Vp / PANEL; p++)
        memset(b->xo + (p * 2 * C + C + n) * PANEL, 0, sizeof(real) * (size_t)((C - n) * PANEL));
    values_back(w, c, b);
    score_gradients(Vp, b);
    state_gradients(Kp, Vp, state, &w->feed, b);
    key_gradients(w, c, t->g_scalar, b);
    for (int64_t i = 0; i < n; i++) {
        panel_row_store(b->xo, 2 * C, i, t->V, b->dx);
        real share = store_values(t, at + i, b->dx);
        store_keys(t, at + i, i, Kp, b, share);
    }
    /* lam = Diag(e^G_C) lam + (q e^G)^T dO - (kb e^G)^T dX */
    for (int64_t p = 0; p < Vp / PANEL; p++) {
        real *lam = b->lam + p * Kp * PANEL;
        k_matmul(&(k_mm){.m = Kp,
                         .n = PANEL,
                         .k = 2 * C,
                         .a = c->kq,
                         .ra = 1,
                         .ca = Kp,
                         .b = b->xo + p * 2 * C * PANEL,
                         .ldb = PANEL,
                         .c = lam,
                         .ldc = PANEL,
                         .from = lam,
                         .scale = c->eg + (C - 1) * Kp});
    }
}

/* One segment of one head: tokens from lo. Of the head that comes after it, or NULL, the inputs are
 * fetched, from token `then`. */
static void segment_back(const ENG(delta_task) * t, int64_t lo, const ENG(delta_task) * next,
                         int64_t then, chunk_work *w, chunk *c, back *b)
{
    const int64_t left = (t->T - lo + C - 1) / C, n = left < CHUNKS ? left : CHUNKS;
    const int64_t size = w->Kp * w->Vp, panels = w->Vp / PANEL;
    ENGK(state_load)
    (t, t->saved + lo / CKPT_ENG_SEGMENT_LEN * t->K * t->V, w->Kp, w->Vp, b->states);
    for (int64_t i = 0; i < n; i++) {
        real *state = b->states + i * size, *after = i + 1 < n ? state + size : NULL;
        ENGK(chunk_load)(t, lo + i * C, w, &c[i]);
        k_feed_clear(&w->feed);
        feed_gradients(t, 1, lo + i * C, lo + (i + 1) * C, &w->feed);
        k_feed_start(&w->feed, panels * (C / MM_R2) * (w->Kp / 16));
        ENGK(chunk_run)(w, &c[i], state, after, NULL);
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        k_feed_clear(&w->feed);
        if (next)
            feed_inputs(next, 1, then + (n - 1 - i) * C, then + (n - i) * C, false, &w->feed);
        k_feed_start(&w->feed, w->Kp / MM_R2 * (2 * C / PANEL) * panels);
        chunk_back(t, lo + i * C, w, &c[i], b->states + i * size, b);
    }
}

void ENGK(delta_chunk_bwd)(const ENG(delta_task) * t, int64_t heads, real *scratch)
{
    const int64_t Kp = k_pad(t->K), Vp = v_pad(t->V), size = Kp * Vp;
    const int64_t seg = CKPT_ENG_SEGMENT_LEN;
    chunk_work w;
    chunk c[CHUNKS];
    back b;
    chunk_work_take(&w, Kp, Vp, &scratch);
    for (int i = 0; i < CHUNKS; i++)
        chunk_take(&c[i], Kp, Vp, true, &scratch);
    back_take(&b, Kp, Vp, &scratch);
    real *lam = k_take(&scratch, heads * size);
    for (int64_t h = 0; h < heads; h++)
        ENGK(state_load)(t + h, t[h].d_state, Kp, Vp, lam + h * size);
    for (int64_t lo = (t->T + seg - 1) / seg * seg - seg; lo >= 0; lo -= seg)
        for (int64_t h = 0; h < heads; h++) {
            const bool more = h + 1 < heads;
            b.lam = lam + h * size;
            segment_back(t + h, lo,
                         more     ? t + h + 1
                         : lo > 0 ? t
                                  : NULL,
                         more ? lo : lo - seg, &w, c, &b);
        }
    for (int64_t h = 0; h < heads; h++)
        if (t[h].dstate0)
            ENGK(state_store)(t + h, lam + h * size, Kp, t[h].dstate0);
}
