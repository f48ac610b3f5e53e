/* Forward of the materialised KDA prefill. Four passes over chunks and heads, each a parallel call, so
 * that NVFP4's one scale a call can be found between them:
 *   peaks      prefix sums; with NVFP4 at an interaction, the largest operands of each tile of rows
 *   interact   L and P, the inverse
 *   solve      u and W
 *   walk       the chunks of every sequence in order, in two halves (before and after U is known)
 * What is kept for backward is laid out in kda_quant.h; u and W lie in read_l's and a temporary's place. */
#include "internal.h"

#include "checked.h"

#include <string.h>

/* ---- common to forward and backward ------------------------------------------------------------- */

ckpt_status ENG(quant_check)(const ckpt_quant *q, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                             ckpt_err *err)
{
    if (d->H <= 0 || d->HV <= 0 || d->HV % d->H != 0 || d->K <= 0 || d->V <= 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "quantised KDA: %lld value heads of %lld for %lld key heads of %lld",
                         (long long)d->HV, (long long)d->V, (long long)d->H, (long long)d->K);
    if (d->K > 1024 || d->V > 1024)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "quantised KDA: head size %lld above 1024",
                         (long long)ckpt_max_i64(d->K, d->V));
    if (d->rule != CKPT_ENG_KDA)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "quantised KDA: the rule is not KDA's");
    if (q->block_v <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "quantised KDA: block_v is %lld",
                         (long long)q->block_v);
    ckpt_status status = ckpt_eng_seq_check(seq, err);
    for (int64_t n = 0; status == CKPT_OK && n < seq->n; n++)
        if (seq->cu[n] == seq->cu[n + 1])
            status =
                ckpt_fail(err, CKPT_E_UNSUPPORTED,
                          "quantised KDA: sequence %lld of the packed ones is empty", (long long)n);
    return status;
}

static int64_t chunks_of(const ckpt_eng_seq *seq, int64_t n)
{
    return (seq->cu[n + 1] - seq->cu[n] + CH - 1) / CH;
}

static int64_t all_chunks(const ckpt_eng_seq *seq)
{
    int64_t sum = 0;
    for (int64_t n = 0; n < seq->n; n++)
        sum += chunks_of(seq, n);
    return sum;
}

ckpt_status ENG(quant_begin)(ckpt_eng *e, ENG(quant_job) * j, int64_t scratch_len, ckpt_err *err)
{
    const ckpt_eng_seq *seq = j->seq;
    j->K = j->d->K;
    j->V = j->d->V;
    j->HV = j->d->HV;
    j->chunks = all_chunks(seq);
    j->scale = (real)(j->d->scale != 0 ? j->d->scale : 1 / sqrt((double)j->K));
    quant_chunk *table = ckpt_eng_take(e, j->chunks, sizeof *table);
    int64_t *first = ckpt_eng_take(e, seq->n + 1, sizeof *first), at = 0;
    j->scratch_len = (scratch_len + 15) / 16 * 16;
    j->scratch = ckpt_eng_take(e, j->scratch_len * e->threads, sizeof(real));
    j->table = table;
    j->first = first;
    ckpt_status status = ckpt_eng_check(e, err);
    if (status != CKPT_OK || e->dry)
        return status;
    for (int64_t n = 0; n < seq->n; n++) {
        first[n] = at;
        for (int64_t c = 0; c < chunks_of(seq, n); c++, at++) {
            const int64_t t0 = seq->cu[n] + c * CH;
            table[at] = (quant_chunk){n, c, t0, ckpt_min_i64(CH, seq->cu[n + 1] - t0)};
        }
    }
    first[seq->n] = at;
    return CKPT_OK;
}

void ENG(quant_load)(const ENG(quant_job) * j, const quant_chunk *c, int64_t hv, real *at,
                     ENG(quant_rows) * r)
{
    const int64_t K = j->K, V = j->V, h = hv / (j->HV / j->d->H);
    *r = (ENG(quant_rows)){.k = at, .bk = at + CH * K, .qs = at + 2 * CH * K};
    r->v = at + 3 * CH * K;
    r->bv = r->v + CH * V;
    memset(at, 0, (size_t)QUANT_ROWS_LEN(K, V) * sizeof *at);
    for (int64_t i = 0; i < c->len; i++) {
        const int64_t t = c->t0 + i;
        const real *k = j->in->k + (t * j->d->H + h) * K, *q = j->in->q + (t * j->d->H + h) * K;
        const real *v = j->in->v + (t * j->HV + hv) * V, b = j->in->erase[t * j->HV + hv];
        r->beta[i] = b;
        for (int64_t d = 0; d < K; d++) {
            r->k[i * K + d] = k[d];
            r->bk[i * K + d] = b * k[d];
            r->qs[i * K + d] = q[d] * j->scale;
        }
        for (int64_t d = 0; d < V; d++) {
            r->v[i * V + d] = v[d];
            r->bv[i * V + d] = b * v[d];
        }
    }
}

static bool same_kind(const ckpt_quant *q, ckpt_quant_handle a, ckpt_quant_handle b)
{
    return q->kind[a] == q->kind[b];
}

static real *take(ckpt_eng *e, int64_t items, int64_t rows, int64_t cols)
{
    return ckpt_eng_take(e, items * rows * cols, sizeof(real));
}

ckpt_status ENG(kda_quant_save)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                                const ckpt_eng_seq *seq, ENG(quant_saved) * s, ckpt_err *err)
{
    ckpt_status status = ENG(quant_check)(q, d, seq, err);
    int64_t items = 0;
    if (status != CKPT_OK)
        return status;
    if (!ckpt_mul_i64(all_chunks(seq), d->HV, &items) || items > INT64_MAX >> 24)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "quantised KDA: too many tokens");
    const int64_t K = d->K, V = d->V;
    s->prefix = take(e, items, CH, K);
    s->inverse = take(e, items, CH, CH);
    s->u_l = take(e, items, CH, CH);
    s->w_l = same_kind(q, CKPT_HANDLE_WY_VALUE_LHS, CKPT_HANDLE_WY_KEY_LHS)
                 ? s->u_l
                 : take(e, items, CH, CH);
    s->u_r = take(e, items, V, CH);
    s->w_r = take(e, items, K, CH);
    s->read_l = take(e, items, CH, K);
    s->read_r = take(e, items, V, K);
    s->memory_l = take(e, items, CH, K);
    s->memory_r = same_kind(q, CKPT_HANDLE_STATE_READ_RHS, CKPT_HANDLE_OUTPUT_STATE_RHS)
                      ? s->read_r
                      : take(e, items, V, K);
    s->local_l = take(e, items, CH, CH);
    s->local_r = take(e, items, V, CH);
    s->write_l = take(e, items, K, CH);
    s->write_r = same_kind(q, CKPT_HANDLE_OUTPUT_VALUE_RHS, CKPT_HANDLE_STATE_UPDATE_RHS)
                     ? s->local_r
                     : take(e, items, V, CH);
    s->state = take(e, items, K, V);
    s->tiles = ckpt_eng_take(e, 4 * N_TILES, sizeof *s->tiles);
    return ckpt_eng_check(e, err);
}

/* ---- the passes ------------------------------------------------------------------------------- */

/* Largest magnitudes that NVFP4 needs of a chunk and head. */
typedef struct peaks {
    float tile[3][N_TILES];   /* beta k, kappa q, k exp(G_i - G_j) */
    float inverse, bv, bkg;   /* of the solve */
    float w, qg, scores, wk;  /* of its step of the walk */
    float u;                  /* U, in the second half of the step */
    double inverse_errors[2]; /* of the approximation */
} peaks;

typedef struct forward {
    ENG(quant_job) j;
    peaks *peaks;      /* [chunks * HV] */
    float *state_peak; /* [N * HV] of the current states */
    real *u;           /* [chunks * HV, 64, V] */
    real *current;     /* [N, HV, K, V] */
    real *o;
    float global[CKPT_HANDLE_COUNT]; /* of the call at hand, outside interactions */
    int64_t step;
} forward;

static bool nvfp4_in(const ckpt_quant *q, ckpt_quant_stage where)
{
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        if (ckpt_quant_stage_of(h) == where && q->kind[h] == CKPT_QUANT_NVFP4)
            return true;
    return false;
}

/* k_j exp(G_i - G_j) of one pair, rounded as gate_exp says. */
static void pair(const ENG(quant_job) * j, const real *gi, const real *gj, const real *k, real *out)
{
    for (int64_t d = 0; d < j->K; d++)
        out[d] = gi[d] - gj[d];
    ENG(quant_exp)(j->q, false, j->K, out, out);
    for (int64_t d = 0; d < j->K; d++)
        out[d] *= k[d];
}

static void prefix_sums(const ENG(quant_job) * j, const quant_chunk *c, int64_t hv, real *g)
{
    const int64_t K = j->K;
    for (int64_t d = 0; d < K; d++) {
        real sum = 0;
        for (int64_t i = 0; i < CH; i++) {
            if (i < c->len)
                sum += j->in->g[((c->t0 + i) * j->HV + hv) * K + d];
            g[i * K + d] = sum;
        }
    }
    ENG(quant_boundary)(j->q->rounding[CKPT_BOUNDARY_GATE_PREFIX], CH * K, g);
}

/* Rows beyond the tokens count: their keys decay to the last sum. */
static void find_tile_peaks(const ENG(quant_job) * j, const quant_chunk *c, const real *g,
                            const ENG(quant_rows) * r, real *row, peaks *p)
{
    const int64_t K = j->K;
    for (int64_t i = 0; i < CH; i++) {
        float *most[3] = {&p->tile[0][i / TILE], &p->tile[1][i / TILE], &p->tile[2][i / TILE]};
        float m = ENG(quant_peak)(r->bk + i * K, K), n = ENG(quant_peak)(r->qs + i * K, K);
        *most[0] = m > *most[0] ? m : *most[0];
        *most[1] = n > *most[1] ? n : *most[1];
        for (int64_t k = 0; k <= i && k < c->len; k++) {
            pair(j, g + i * K, g + k * K, r->k + k * K, row);
            m = ENG(quant_peak)(row, K);
            *most[2] = m > *most[2] ? m : *most[2];
        }
    }
}

static void peaks_item(void *arg, int64_t item, int worker)
{
    const forward *f = arg;
    const ENG(quant_job) *j = &f->j;
    const quant_chunk *c = &j->table[item / j->HV];
    real *at = j->scratch + worker * j->scratch_len, *g = j->s->prefix + item * CH * j->K;
    const unsigned csr = quant_keep_subnormals();
    f->peaks[item] = (peaks){.u = 0};
    prefix_sums(j, c, item % j->HV, g);
    if (nvfp4_in(j->q, CKPT_QUANT_IN_TILES)) {
        ENG(quant_rows) r;
        ENG(quant_load)(j, c, item % j->HV, at, &r);
        find_tile_peaks(j, c, g, &r, at + QUANT_ROWS_LEN(j->K, j->V), &f->peaks[item]);
    }
    quant_restore(csr);
}

/* Rows of L and P: both products of a row read the same keys. */
static void interact_rows(const ENG(quant_job) * j, const quant_chunk *c, const real *g,
                          const ENG(quant_rows) * r, real *row, real *lower, real *scores)
{
    const ckpt_quant *q = j->q;
    const int64_t K = j->K;
    const ckpt_quant_kind key_r = q->kind[CKPT_HANDLE_KEY_INTERACTION_RHS],
                          score_r = q->kind[CKPT_HANDLE_OUTPUT_SCORE_RHS];
    real *lk = row + K, *lq = row + 2 * K, *rk = row + 3 * K,
         *rq = key_r == score_r ? rk : row + 4 * K;
    memset(lower, 0, CH * CH * sizeof *lower);
    memset(scores, 0, CH * CH * sizeof *scores);
    for (int64_t i = 0; i < c->len; i++) {
        const float *global = j->s->tiles + i / TILE;
        ENG(quant_qdq)
        (q->kind[CKPT_HANDLE_KEY_INTERACTION_LHS], global[0], 1, K, r->bk + i * K, lk);
        ENG(quant_qdq)
        (q->kind[CKPT_HANDLE_OUTPUT_SCORE_LHS], global[2 * N_TILES], 1, K, r->qs + i * K, lq);
        for (int64_t k = 0; k <= i; k++) {
            pair(j, g + i * K, g + k * K, r->k + k * K, row);
            ENG(quant_qdq)(key_r, global[N_TILES], 1, K, row, rk);
            if (rq != rk)
                ENG(quant_qdq)(score_r, global[3 * N_TILES], 1, K, row, rq);
            if (k < i)
                lower[i * CH + k] = ENG(quant_dot)(q, CKPT_SITE_KEY_INTERACTION, K, lk, rk);
            scores[i * CH + k] = ENG(quant_dot)(q, CKPT_SITE_OUTPUT_SCORE, K, lq, rq);
        }
    }
}

/* y_i = x_i exp(G_i), or with the sign turned x_i exp(G_last - G_i), the exponentials rounded. */
static void decay_rows(const ENG(quant_job) * j, bool to_end, const real *g, const real *x, real *y)
{
    const int64_t K = j->K;
    const real *last = g + (CH - 1) * K;
    for (int64_t i = 0; i < CH; i++) {
        for (int64_t d = 0; d < K; d++)
            y[i * K + d] = to_end ? last[d] - g[i * K + d] : g[i * K + d];
        ENG(quant_exp)(j->q, false, K, y + i * K, y + i * K);
        for (int64_t d = 0; d < K; d++)
            y[i * K + d] *= x[i * K + d];
    }
}

static int64_t row_room(int64_t K)
{
    return (5 * K + 15) / 16 * 16;
}

/* Room for doubles behind reals: everything before it is a multiple of 16 of them, 64 bytes. */
static int64_t interact_room(int64_t K, int64_t V)
{
    return QUANT_ROWS_LEN(K, V) + row_room(K) + CH * CH + CH * K +
           5 * CH * CH * (int64_t)(sizeof(double) / sizeof(real));
}

static void interact_item(void *arg, int64_t item, int worker)
{
    const forward *f = arg;
    const ENG(quant_job) *j = &f->j;
    const ENG(quant_saved) *s = j->s;
    const quant_chunk *c = &j->table[item / j->HV];
    const int64_t K = j->K, V = j->V;
    peaks *p = &f->peaks[item];
    real *at = j->scratch + worker * j->scratch_len, *row = at + QUANT_ROWS_LEN(K, V);
    real *lower = row + row_room(K), *tmp = lower + CH * CH;
    real *g = s->prefix + item * CH * K, *scores = s->local_l + item * CH * CH;
    real *inverse = s->inverse + item * CH * CH;
    const unsigned csr = quant_keep_subnormals();
    ENG(quant_rows) r;
    ENG(quant_load)(j, c, item % j->HV, at, &r);
    interact_rows(j, c, g, &r, row, lower, scores);
    ENG(quant_inverse)
    (j->q->solve_factors, c->len, lower, inverse, (double *)(void *)(tmp + CH * K),
     p->inverse_errors);
    /* Operands of the passes to come, in their places, not rounded yet. */
    ENG(quant_transpose)(CH, V, r.bv, s->u_r + item * V * CH);
    decay_rows(j, false, g, r.bk, tmp);
    ENG(quant_transpose)(CH, K, tmp, s->w_r + item * K * CH);
    decay_rows(j, false, g, r.qs, s->memory_l + item * CH * K);
    decay_rows(j, true, g, r.k, tmp);
    ENG(quant_transpose)(CH, K, tmp, s->write_l + item * K * CH);
    p->inverse = ENG(quant_peak)(inverse, CH * CH);
    p->scores = ENG(quant_peak)(scores, CH * CH);
    p->bv = ENG(quant_peak)(r.bv, CH * V);
    p->bkg = ENG(quant_peak)(s->w_r + item * K * CH, K * CH);
    p->qg = ENG(quant_peak)(s->memory_l + item * CH * K, CH * K);
    p->wk = ENG(quant_peak)(s->write_l + item * K * CH, K * CH);
    quant_restore(csr);
}

static void qdq(const forward *f, ckpt_quant_handle h, int64_t rows, int64_t width, const real *x,
                real *y)
{
    ENG(quant_qdq)(f->j.q->kind[h], f->global[h], rows, width, x, y);
}

static void solve_item(void *arg, int64_t item, int worker)
{
    const forward *f = arg;
    const ENG(quant_job) *j = &f->j;
    const ENG(quant_saved) *s = j->s;
    const int64_t K = j->K, V = j->V;
    real *tmp = j->scratch + worker * j->scratch_len, *w = s->read_l + item * CH * K;
    real *u_l = s->u_l + item * CH * CH, *w_l = s->w_l + item * CH * CH;
    real *u_r = s->u_r + item * V * CH, *w_r = s->w_r + item * K * CH;
    const real *inverse = s->inverse + item * CH * CH;
    const unsigned csr = quant_keep_subnormals();
    qdq(f, CKPT_HANDLE_WY_VALUE_LHS, CH, CH, inverse, u_l);
    if (w_l != u_l)
        qdq(f, CKPT_HANDLE_WY_KEY_LHS, CH, CH, inverse, w_l);
    qdq(f, CKPT_HANDLE_WY_VALUE_RHS, V, CH, u_r, u_r);
    qdq(f, CKPT_HANDLE_WY_KEY_RHS, K, CH, w_r, w_r);
    ENG(quant_product)(j->q, CKPT_SITE_WY_VALUE, CH, V, CH, u_l, u_r, f->u + item * CH * V, tmp);
    ENG(quant_product)(j->q, CKPT_SITE_WY_KEY, CH, K, CH, w_l, w_r, w, tmp);
    f->peaks[item].w = ENG(quant_peak)(w, CH * K);
    quant_restore(csr);
}

/* ---- the walk --------------------------------------------------------------------------------- */

/* S into the places of both operands that it is, and U. */
static void step_read(forward *f, int64_t item, int64_t row, real *at)
{
    const ENG(quant_job) *j = &f->j;
    const ENG(quant_saved) *s = j->s;
    const int64_t K = j->K, V = j->V;
    const real *state = f->current + row * K * V;
    real *read = at, *tmp = at + CH * V, *u = f->u + item * CH * V;
    real *w = s->read_l + item * CH * K;
    real *read_r = s->read_r + item * V * K, *memory_r = s->memory_r + item * V * K;
    memcpy(s->state + item * K * V, state, (size_t)(K * V) * sizeof *state);
    ENG(quant_transpose)(K, V, state, read_r);
    if (memory_r != read_r)
        qdq(f, CKPT_HANDLE_OUTPUT_STATE_RHS, V, K, read_r, memory_r);
    qdq(f, CKPT_HANDLE_STATE_READ_RHS, V, K, read_r, read_r);
    qdq(f, CKPT_HANDLE_W, CH, K, w, w);
    ENG(quant_product)(j->q, CKPT_SITE_STATE_READ, CH, V, K, w, read_r, read, tmp);
    for (int64_t i = 0; i < CH * V; i++)
        u[i] -= read[i];
    ENG(quant_boundary)(j->q->rounding[CKPT_BOUNDARY_VALUE_RESIDUAL], CH * V, u);
    f->peaks[item].u = ENG(quant_peak)(u, CH * V);
}

static void step_output(const forward *f, int64_t item, real *at)
{
    const ENG(quant_job) *j = &f->j;
    const ENG(quant_saved) *s = j->s;
    const quant_chunk *c = &j->table[item / j->HV];
    const int64_t K = j->K, V = j->V, hv = item % j->HV;
    real *memory = at, *local = at + CH * V, *tmp = at + 2 * CH * V;
    real *qg = s->memory_l + item * CH * K, *scores = s->local_l + item * CH * CH;
    qdq(f, CKPT_HANDLE_OUTPUT_STATE_LHS, CH, K, qg, qg);
    qdq(f, CKPT_HANDLE_OUTPUT_VALUE_LHS, CH, CH, scores, scores);
    ENG(quant_product)
    (j->q, CKPT_SITE_OUTPUT_STATE, CH, V, K, qg, s->memory_r + item * V * K, memory, tmp);
    ENG(quant_product)
    (j->q, CKPT_SITE_OUTPUT_VALUE, CH, V, CH, scores, s->local_r + item * V * CH, local, tmp);
    for (int64_t i = 0; i < c->len; i++) {
        real *o = f->o + ((c->t0 + i) * j->HV + hv) * V;
        for (int64_t d = 0; d < V; d++)
            o[d] = memory[i * V + d] + local[i * V + d];
        ENG(quant_boundary)(j->q->rounding[CKPT_BOUNDARY_OUTPUT_ADD], V, o);
    }
}

static void step_write(forward *f, int64_t item, int64_t row, real *at)
{
    const ENG(quant_job) *j = &f->j;
    const ENG(quant_saved) *s = j->s;
    const ckpt_quant *q = j->q;
    const int64_t K = j->K, V = j->V;
    real *write = at, *tmp = at + K * V, *last = tmp + K * V, *state = f->current + row * K * V;
    real *wk = s->write_l + item * K * CH;
    qdq(f, CKPT_HANDLE_STATE_UPDATE_LHS, K, CH, wk, wk);
    ENG(quant_product)
    (q, CKPT_SITE_STATE_UPDATE, K, V, CH, wk, s->write_r + item * V * CH, write, tmp);
    ENG(quant_exp)(q, false, K, s->prefix + (item + 1) * CH * K - K, last);
    for (int64_t k = 0; k < K; k++)
        for (int64_t d = 0; d < V; d++)
            state[k * V + d] *= last[k];
    ENG(quant_boundary)(q->rounding[CKPT_BOUNDARY_STATE_DECAY], K * V, state);
    for (int64_t i = 0; i < K * V; i++)
        state[i] += write[i];
    ENG(quant_boundary)(q->rounding[CKPT_BOUNDARY_STATE_ADD], K * V, state);
    ENG(quant_state)(q, K, V, state);
    f->state_peak[row] = ENG(quant_peak)(state, K * V);
}

static void step_rest(forward *f, int64_t item, int64_t row, real *at)
{
    const ENG(quant_saved) *s = f->j.s;
    const int64_t V = f->j.V;
    real *local_r = s->local_r + item * V * CH, *write_r = s->write_r + item * V * CH;
    ENG(quant_transpose)(CH, V, f->u + item * CH * V, local_r);
    if (write_r != local_r)
        qdq(f, CKPT_HANDLE_STATE_UPDATE_RHS, V, CH, local_r, write_r);
    qdq(f, CKPT_HANDLE_OUTPUT_VALUE_RHS, V, CH, local_r, local_r);
    step_output(f, item, at);
    step_write(f, item, row, at);
}

static int64_t walk_room(int64_t K, int64_t V)
{
    return ckpt_max_i64(3 * CH * V, 2 * K * V + K) + CH * (K + V);
}

/* Items of the walk are rows (sequence, head). */
static void start_item(void *arg, int64_t row, int worker)
{
    forward *f = arg;
    const ENG(quant_job) *j = &f->j;
    const int64_t n = j->K * j->V;
    const unsigned csr = quant_keep_subnormals();
    real *state = f->current + row * n;
    (void)worker;
    if (j->in->state0 == NULL)
        memset(state, 0, (size_t)n * sizeof *state);
    else
        memcpy(state, j->in->state0 + row * n, (size_t)n * sizeof *state);
    ENG(quant_state)(j->q, j->K, j->V, state);
    f->state_peak[row] = ENG(quant_peak)(state, n);
    quant_restore(csr);
}

static int64_t item_at(const ENG(quant_job) * j, int64_t row, int64_t step)
{
    const int64_t n = row / j->HV, chunk = j->first[n] + step;
    return chunk < j->first[n + 1] ? chunk * j->HV + row % j->HV : -1;
}

static void read_item(void *arg, int64_t row, int worker)
{
    forward *f = arg;
    const int64_t item = item_at(&f->j, row, f->step);
    const unsigned csr = quant_keep_subnormals();
    if (item >= 0)
        step_read(f, item, row, f->j.scratch + worker * f->j.scratch_len);
    quant_restore(csr);
}

static void rest_item(void *arg, int64_t row, int worker)
{
    forward *f = arg;
    const int64_t item = item_at(&f->j, row, f->step);
    const unsigned csr = quant_keep_subnormals();
    if (item >= 0)
        step_rest(f, item, row, f->j.scratch + worker * f->j.scratch_len);
    quant_restore(csr);
}

/* Without NVFP4 in the walk nothing is shared between rows. */
static void walk_item(void *arg, int64_t row, int worker)
{
    forward *f = arg;
    const unsigned csr = quant_keep_subnormals();
    real *at = f->j.scratch + worker * f->j.scratch_len;
    int64_t item;
    for (int64_t step = 0; (item = item_at(&f->j, row, step)) >= 0; step++) {
        step_read(f, item, row, at);
        step_rest(f, item, row, at);
    }
    quant_restore(csr);
}

/* ---- scales of whole calls -------------------------------------------------------------------- */

static float larger(float a, float b)
{
    return a > b ? a : b;
}

/* offset: of a float in peaks. */
static float peak_at(const forward *f, int64_t item, size_t offset)
{
    return *(const float *)(const void *)((const char *)&f->peaks[item] + offset);
}

static float over_items(const forward *f, size_t offset)
{
    float most = 0;
    for (int64_t i = 0; i < f->j.chunks * f->j.HV; i++)
        most = larger(peak_at(f, i, offset), most);
    return ckpt_nvfp4_global(most, true);
}

static float over_states(const forward *f)
{
    float most = 0;
    for (int64_t i = 0; i < f->j.seq->n * f->j.HV; i++)
        most = larger(f->state_peak[i], most);
    return ckpt_nvfp4_global(most, true);
}

static float over_step(const forward *f, size_t offset)
{
    float most = 0;
    for (int64_t i = 0; i < f->j.seq->n * f->j.HV; i++) {
        const int64_t item = item_at(&f->j, i, f->step);
        most = item < 0 ? most : larger(peak_at(f, item, offset), most);
    }
    return ckpt_nvfp4_global(most, true);
}

static void set_tiles(const forward *f)
{
    /* beta k and kappa q on the left, the same keys on the right */
    static const int source[4] = {0, 2, 1, 2};
    for (int side = 0; side < 4; side++)
        for (size_t t = 0; t < N_TILES; t++)
            f->j.s->tiles[side * N_TILES + (int)t] = over_items(
                f, offsetof(peaks, tile) + ((size_t)source[side] * N_TILES + t) * sizeof(float));
}

static void set_solve(forward *f)
{
    f->global[CKPT_HANDLE_WY_VALUE_LHS] = f->global[CKPT_HANDLE_WY_KEY_LHS] =
        over_items(f, offsetof(peaks, inverse));
    f->global[CKPT_HANDLE_WY_VALUE_RHS] = over_items(f, offsetof(peaks, bv));
    f->global[CKPT_HANDLE_WY_KEY_RHS] = over_items(f, offsetof(peaks, bkg));
}

/* States of sequences that have ended still count: they are part of the call's tensor. */
static void set_read(forward *f)
{
    f->global[CKPT_HANDLE_W] = over_step(f, offsetof(peaks, w));
    f->global[CKPT_HANDLE_STATE_READ_RHS] = f->global[CKPT_HANDLE_OUTPUT_STATE_RHS] =
        over_states(f);
}

static void set_rest(forward *f)
{
    f->global[CKPT_HANDLE_OUTPUT_STATE_LHS] = over_step(f, offsetof(peaks, qg));
    f->global[CKPT_HANDLE_OUTPUT_VALUE_LHS] = over_step(f, offsetof(peaks, scores));
    f->global[CKPT_HANDLE_STATE_UPDATE_LHS] = over_step(f, offsetof(peaks, wk));
    f->global[CKPT_HANDLE_OUTPUT_VALUE_RHS] = f->global[CKPT_HANDLE_STATE_UPDATE_RHS] =
        over_step(f, offsetof(peaks, u));
}

/* ---- the whole -------------------------------------------------------------------------------- */

static int64_t most_steps(const ENG(quant_job) * j)
{
    int64_t most = 0;
    for (int64_t n = 0; n < j->seq->n; n++)
        most = ckpt_max_i64(most, j->first[n + 1] - j->first[n]);
    return most;
}

static void walk(const ckpt_eng *e, forward *f)
{
    const int64_t rows = f->j.seq->n * f->j.HV, steps = most_steps(&f->j);
    ckpt_eng_parallel(e, rows, start_item, f);
    if (!nvfp4_in(f->j.q, CKPT_QUANT_IN_WALK)) {
        ckpt_eng_parallel(e, rows, walk_item, f);
        return;
    }
    for (f->step = 0; f->step < steps; f->step++) {
        set_read(f);
        ckpt_eng_parallel(e, rows, read_item, f);
        set_rest(f);
        ckpt_eng_parallel(e, rows, rest_item, f);
    }
}

static void report_on(const forward *f, ckpt_quant_report *r)
{
    const int64_t items = f->j.chunks * f->j.HV;
    ckpt_quant_count(f->j.q, f->j.seq, r);
    for (int64_t i = 0; i < items; i++)
        ckpt_quant_worst(f->peaks[i].inverse_errors, r);
}

ckpt_status ENG(kda_quant)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                           const ckpt_eng_seq *seq, const ENG(delta_in) * in, real *o, real *state,
                           const ENG(quant_saved) * saved, ckpt_quant_report *report, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    const int64_t states = seq->n * d->HV;
    forward f = {
        .j = {.q = q, .d = d, .seq = seq, .in = in, .s = saved},
          .o = o
    };
    ckpt_status status;
    CKPT_CHECK(ENG(quant_check)(q, d, seq, err));
    CKPT_CHECK(ENG(quant_begin)(
        e, &f.j, ckpt_max_i64(interact_room(d->K, d->V), walk_room(d->K, d->V)), err));
    f.peaks = ckpt_eng_take(e, f.j.chunks * d->HV, sizeof *f.peaks);
    f.state_peak = ckpt_eng_take(e, states, sizeof *f.state_peak);
    f.u = take(e, f.j.chunks * d->HV, CH, d->V);
    f.current = state != NULL ? state : take(e, states, d->K, d->V);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    ckpt_eng_parallel(e, f.j.chunks * d->HV, peaks_item, &f);
    set_tiles(&f);
    ckpt_eng_parallel(e, f.j.chunks * d->HV, interact_item, &f);
    set_solve(&f);
    ckpt_eng_parallel(e, f.j.chunks * d->HV, solve_item, &f);
    walk(e, &f);
    if (report != NULL)
        report_on(&f, report);
done:
    ckpt_eng_drop(e, mark);
    return status;
}
