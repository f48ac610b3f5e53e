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
    real *states;        /* [CHUNKS, Kp, Vp] at the start of each chunk */
    real *lam;           /* [Kp, Vp] gradient of the state after the chunk */
    real *xo;            /* [2C, Vp] -dX, then dO */
    real *dd;            /* [C, Vp] gradient of d, then dX */
    real *xot;           /* [Vp, 2C] xo transposed */
    real *dt;            /* [Vp, C] d transposed */
    real *score;         /* [2C, C] dL, then dAqk */
    real *kqt, *krt;     /* [Kp, 2C], [Kp, C] gradients of kq and kr, transposed */
    real *dq, *dkb, *dk; /* [C, Kp] of the scaled q, of kb, of k */
    real *dkr;           /* [C, Kp] share of dk that came through kr */
    real *dg;            /* [C, Kp] of G, then of g */
    real *dstate;        /* [Kp] rowsum(lam * S) */
} back;

static void back_take(back *b, int64_t Kp, int64_t Vp, real **at)
{
    b->states = k_take(at, CHUNKS * Kp * Vp);
    b->lam = k_take(at, Kp * Vp);
    b->xo = k_take(at, 2 * C * Vp);
    b->dd = k_take(at, C * Vp);
    b->xot = k_take(at, 2 * C * Vp);
    b->dt = k_take(at, C * Vp);
    b->score = k_take(at, 2 * C * C);
    b->kqt = k_take(at, 2 * C * Kp);
    b->krt = k_take(at, C * Kp);
    real **rows[] = {&b->dq, &b->dkb, &b->dk, &b->dkr, &b->dg};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = k_take(at, C * Kp);
    b->dstate = k_take(at, Kp);
}

int64_t ENGK(delta_chunk_scratch)(int64_t K, int64_t V)
{
    int64_t Kp = k_pad(K), Vp = k_pad(V);
    return CHUNKS * chunk_size(Kp, Vp) + chunk_work_size(Kp, Vp) + (CHUNKS + 1) * Kp * Vp +
           6 * C * Vp + 2 * C * C + 8 * C * Kp + Kp;
}

/* dd = Aqk^T dO + Kr lam, then dX by substitution from the last token; -dX goes before dO in xo. */
static void solve_back(const chunk_work *w, const chunk *c, back *b)
{
    const int64_t Kp = w->Kp, Vp = w->Vp;
    const real *d_o = b->xo + C * Vp;
    k_matmul(&(k_mm){.m = C,
                     .n = Vp,
                     .k = Kp,
                     .a = c->kr,
                     .ra = Kp,
                     .ca = 1,
                     .b = b->lam,
                     .ldb = Vp,
                     .c = b->dd,
                     .ldc = Vp});
    for (int64_t v = 0; v < Vp; v += VL)
        for (int64_t i = C - 1; i >= 0; i--) {
            vec x = v_load(b->dd + i * Vp + v), y = v_load(d_o + i * Vp + v) * c->att[i * C + i];
            for (int64_t j = i + 1; j < C; j++) {
                y += v_load(d_o + j * Vp + v) * c->att[j * C + i];
                x -= v_load(b->dd + j * Vp + v) * c->low[j * C + i];
            }
            x += y;
            v_store(b->dd + i * Vp + v, x);
            v_store(b->xo + i * Vp + v, -x);
        }
}

/* to [n, rows] = from [rows, n] transposed, rows of `to` have ldt elements. */
static void transpose(int64_t rows, int64_t n, const real *from, int64_t ldf, real *to, int64_t ldt)
{
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < rows; i++)
            to[j * ldt + i] = from[i * ldf + j];
}

/* Everything that contracts over V: score gradients, gradients of kq and kr, rowsum(lam * S). */
static void contract_values(const chunk_work *w, const chunk *c, const real *state, back *b)
{
    const int64_t Kp = w->Kp, Vp = w->Vp;
    transpose(2 * C, Vp, b->xo, Vp, b->xot, 2 * C);
    transpose(C, Vp, c->d, Vp, b->dt, C);
    k_matmul(&(k_mm){.m = 2 * C,
                     .n = C,
                     .k = Vp,
                     .a = b->xo,
                     .ra = Vp,
                     .ca = 1,
                     .b = b->dt,
                     .ldb = C,
                     .c = b->score,
                     .ldc = C});
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = i; j < C; j++) {
            b->score[i * C + j] = 0;
            if (j > i)
                b->score[(C + i) * C + j] = 0;
        }
    k_matmul(&(k_mm){.m = Kp,
                     .n = 2 * C,
                     .k = Vp,
                     .a = state,
                     .ra = Vp,
                     .ca = 1,
                     .b = b->xot,
                     .ldb = 2 * C,
                     .c = b->kqt,
                     .ldc = 2 * C});
    k_matmul(&(k_mm){.m = Kp,
                     .n = C,
                     .k = Vp,
                     .a = b->lam,
                     .ra = Vp,
                     .ca = 1,
                     .b = b->dt,
                     .ldb = C,
                     .c = b->krt,
                     .ldc = C});
    for (int64_t k = 0; k < Kp; k++) {
        vec sum = {0};
        for (int64_t v = 0; v < Vp; v += VL)
            sum += v_load(b->lam + k * Vp + v) * v_load(state + k * Vp + v);
        real total = 0;
        for (int l = 0; l < VL; l++)
            total += sum[l];
        b->dstate[k] = total;
    }
}

/* dq_i += sum_{j<=i} dAqk[i,j] k_j e^(G_i-G_j), dkb_i the same with dL: one vector of channels. */
static void pairs_down(const chunk *c, const back *b, int64_t Kp, int64_t d)
{
    vec r[C];
    for (int64_t i = 0; i < C; i++) {
        const real *low = b->score + i * C, *att = b->score + (C + i) * C;
        const vec a = v_load(c->a + i * Kp + d);
        vec dq = {0}, dkb = {0};
        for (int64_t j = 0; j < i; j++) {
            r[j] *= a;
            dq += r[j] * att[j];
            dkb += r[j] * low[j];
        }
        r[i] = v_load(c->k + i * Kp + d);
        dq += r[i] * att[i];
        v_store(b->dq + i * Kp + d, v_load(b->dq + i * Kp + d) + dq);
        v_store(b->dkb + i * Kp + d, v_load(b->dkb + i * Kp + d) + dkb);
    }
}

/* dk_j += sum_{i>=j} dAqk[i,j] q_i e^(G_i-G_j) + sum_{i>j} dL[i,j] kb_i e^(G_i-G_j). */
static void pairs_up(const chunk *c, const back *b, int64_t Kp, int64_t d)
{
    vec q[C], kb[C];
    for (int64_t j = C - 1; j >= 0; j--) {
        vec dk = {0};
        if (j + 1 < C) {
            const vec a = v_load(c->a + (j + 1) * Kp + d);
            for (int64_t i = j + 1; i < C; i++) {
                q[i] *= a;
                kb[i] *= a;
                dk += q[i] * b->score[(C + i) * C + j] + kb[i] * b->score[i * C + j];
            }
        }
        q[j] = v_load(c->q + j * Kp + d);
        kb[j] = v_load(c->kb + j * Kp + d);
        dk += q[j] * b->score[(C + j) * C + j];
        v_store(b->dk + j * Kp + d, v_load(b->dk + j * Kp + d) + dk);
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
    transpose(Kp, C, b->kqt, 2 * C, b->dkb, Kp);
    transpose(Kp, C, b->kqt + C, 2 * C, b->dq, Kp);
    transpose(Kp, C, b->krt, C, b->dkr, Kp);
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
    SIMD for (int64_t d = 0; d < K; d++)
    {
        real key = dk[d] + (t->e_scalar ? e[0] : e[d]) * dkb[d], query = scale * dq[d];
        oq[d] = t->first ? query : oq[d] + query;
        ok[d] = t->first ? key : ok[d] + key;
    }
}

/* Returns the value's share of the gradient of a scalar erase gate. */
static real store_values(const ENG(delta_task) * t, int64_t at, const real *dx)
{
    const int64_t V = t->V;
    const real *v = t->v + at * t->ldv;
    real *dv = t->dv + at * t->ldv, sum = 0;
    if (t->write) {
        const real *w = t->write + at * t->ldv;
        real *dw = t->dwrite + at * t->ldv;
        SIMD for (int64_t d = 0; d < V; d++)
        {
            dv[d] = w[d] * dx[d];
            dw[d] = v[d] * dx[d];
        }
        return 0;
    }
    const real beta = t->erase[at * t->lde];
    _Pragma("omp simd reduction(+ : sum)") for (int64_t d = 0; d < V; d++)
    {
        dv[d] = beta * dx[d];
        sum += v[d] * dx[d];
    }
    return sum;
}

static void chunk_back(const ENG(delta_task) * t, int64_t at, const chunk_work *w, const chunk *c,
                       const real *state, back *b)
{
    const int64_t Kp = w->Kp, Vp = w->Vp, n = t->T - at < C ? t->T - at : C;
    real *d_o = b->xo + C * Vp;
    memset(d_o, 0, sizeof(real) * (size_t)(C * Vp));
    for (int64_t i = 0; i < n; i++)
        memcpy(d_o + i * Vp, t->d_o + (at + i) * t->ldv, sizeof(real) * (size_t)t->V);
    solve_back(w, c, b);
    contract_values(w, c, state, b);
    key_gradients(w, c, t->g_scalar, b);
    for (int64_t i = 0; i < n; i++) {
        real share = store_values(t, at + i, b->dd + i * Vp);
        store_keys(t, at + i, i, Kp, b, share);
    }
    /* lam = Diag(e^G_C) lam + (q e^G)^T dO - (kb e^G)^T dX */
    k_matmul(&(k_mm){.m = Kp,
                     .n = Vp,
                     .k = 2 * C,
                     .a = c->kq,
                     .ra = 1,
                     .ca = Kp,
                     .b = b->xo,
                     .ldb = Vp,
                     .c = b->lam,
                     .ldc = Vp,
                     .add = true,
                     .scale = c->eg + (C - 1) * Kp});
}

void ENGK(delta_chunk_bwd)(const ENG(delta_task) * t, real *scratch)
{
    const int64_t Kp = k_pad(t->K), Vp = k_pad(t->V), size = Kp * Vp;
    chunk_work w;
    chunk c[CHUNKS];
    back b;
    chunk_work_take(&w, Kp, Vp, &scratch);
    for (int i = 0; i < CHUNKS; i++)
        chunk_take(&c[i], Kp, Vp, &scratch);
    back_take(&b, Kp, Vp, &scratch);
    ENGK(state_load)(t, t->d_state, Vp, Kp, b.lam);
    for (int64_t seg = (t->T + CKPT_ENG_SEGMENT_LEN - 1) / CKPT_ENG_SEGMENT_LEN - 1; seg >= 0;
         seg--) {
        const int64_t lo = seg * CKPT_ENG_SEGMENT_LEN, left = (t->T - lo + C - 1) / C;
        const int64_t n = left < CHUNKS ? left : CHUNKS;
        ENGK(state_load)(t, t->saved + seg * t->K * t->V, Vp, Kp, b.states);
        for (int64_t i = 0; i < n; i++) {
            ENGK(chunk_load)(t, lo + i * C, &w, &c[i]);
            ENGK(chunk_solve)(&w, &c[i], b.states + i * size);
            if (i + 1 < n)
                ENGK(chunk_update)(&w, &c[i], b.states + i * size, b.states + (i + 1) * size);
        }
        for (int64_t i = n - 1; i >= 0; i--)
            chunk_back(t, lo + i * C, &w, &c[i], b.states + i * size, &b);
    }
    if (t->dstate0)
        ENGK(state_store)(t, b.lam, Vp, t->dstate0);
}
