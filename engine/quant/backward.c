/* Backward of the materialised KDA prefill, straight through every rounding: first the chunks of every
 * sequence from the last to the first, a row (sequence, head) a task; then every chunk and head by
 * itself, where the operands of the interactions are made and rounded again rather than kept; at last
 * the heads that share a query and key are added. */
#include "internal.h"

#include "checked.h"

#include <string.h>

/* Gradients between the two passes, [chunk * HV + head, ...]. */
typedef struct backward {
    ENG(quant_job) j;
    const ENG(delta_grad) * grad;
    const real *d_o, *d_state;
    real *du, *dw;   /* [64, V], [64, K] */
    real *dqg, *dwk; /* [64, K] */
    real *dscores;   /* [64, 64] */
    real *dlast;     /* [K] */
    real *ds;        /* [N * HV, K, V] */
    real *dq, *dk;   /* [T, HV, K] */
} backward;

/* ---- the chunks, backwards -------------------------------------------------------------------- */

static void load_do(const backward *b, const quant_chunk *c, int64_t hv, real *d_o)
{
    const int64_t V = b->j.V;
    memset(d_o, 0, (size_t)(CH * V) * sizeof *d_o);
    for (int64_t i = 0; i < c->len; i++)
        memcpy(d_o + i * V, b->d_o + ((c->t0 + i) * b->j.HV + hv) * V, (size_t)V * sizeof *d_o);
}

/* ds, the gradient of the state after the chunk, becomes that of the state before it. at: CH * V + K. */
static void chunk_back(const backward *b, int64_t item, real *ds, real *at)
{
    const ENG(quant_job) *j = &b->j;
    const ENG(quant_saved) *s = j->s;
    const quant_chunk *c = &j->table[item / j->HV];
    const int64_t K = j->K, V = j->V;
    const real *state = s->state + item * K * V;
    real *d_o = at, *last = at + CH * V, *dlast = b->dlast + item * K;
    real *du = b->du + item * CH * V, *dw = b->dw + item * CH * K;
    load_do(b, c, item % j->HV, d_o);
    ENG(quant_exp)(j->q, false, K, s->prefix + (item + 1) * CH * K - K, last);
    /* state_update: dwk [64, K] = write_r^T ds^T, dU = write_l^T ds */
    ENG(gemm)
    (true, true, CH, K, V, 1, s->write_r + item * V * CH, CH, ds, V, 0, b->dwk + item * CH * K, K);
    ENG(gemm)(true, false, CH, V, K, 1, s->write_l + item * K * CH, CH, ds, V, 0, du, V);
    for (int64_t k = 0; k < K; k++) {
        real sum = 0;
        for (int64_t d = 0; d < V; d++) {
            sum += ds[k * V + d] * state[k * V + d];
            ds[k * V + d] *= last[k];
        }
        dlast[k] = sum;
    }
    /* output_value, output_state */
    ENG(gemm)
    (false, false, CH, CH, V, 1, d_o, V, s->local_r + item * V * CH, CH, 0,
     b->dscores + item * CH * CH, CH);
    ENG(gemm)(true, false, CH, V, CH, 1, s->local_l + item * CH * CH, CH, d_o, V, 1, du, V);
    ENG(gemm)
    (false, false, CH, K, V, 1, d_o, V, s->memory_r + item * V * K, K, 0, b->dqg + item * CH * K,
     K);
    ENG(gemm)(true, false, K, V, CH, 1, s->memory_l + item * CH * K, K, d_o, V, 1, ds, V);
    /* state_read */
    ENG(gemm)(false, false, CH, K, V, -1, du, V, s->read_r + item * V * K, K, 0, dw, K);
    ENG(gemm)(true, false, K, V, CH, -1, s->read_l + item * CH * K, K, du, V, 1, ds, V);
}

static void row_back(void *arg, int64_t row, int worker)
{
    const backward *b = arg;
    const ENG(quant_job) *j = &b->j;
    const int64_t n = row / j->HV, hv = row % j->HV, len = j->K * j->V;
    const unsigned csr = quant_keep_subnormals();
    real *ds = b->ds + row * len, *at = j->scratch + worker * j->scratch_len;
    if (b->d_state != NULL)
        memcpy(ds, b->d_state + row * len, (size_t)len * sizeof *ds);
    else
        memset(ds, 0, (size_t)len * sizeof *ds);
    for (int64_t c = j->first[n + 1]; c-- > j->first[n];)
        chunk_back(b, c * j->HV + hv, ds, at);
    if (b->grad->state0 != NULL)
        memcpy(b->grad->state0 + row * len, ds, (size_t)len * sizeof *ds);
    quant_restore(csr);
}

/* ---- a chunk by itself ------------------------------------------------------------------------ */

/* Room of one task, all [64, .] but the first. */
typedef struct room {
    ENG(quant_rows) r;
    real *gate, *gate_exact, *end, *end_exact, *dprefix, *dk, *dbk, *dqs, *dbkg; /* [64, K] */
    real *dbv;                                                                   /* [64, V] */
    real *dinv, *dlower;                                                         /* [64, 64] */
    real *row;                                                                   /* [8, K] */
    real *last_exact;                                                            /* [K] */
} room;

static int64_t room_len(int64_t K, int64_t V)
{
    return QUANT_ROWS_LEN(K, V) + 9 * CH * K + CH * V + 2 * CH * CH + 9 * K;
}

static room room_at(int64_t K, int64_t V, real *at)
{
    room m;
    real **wide[] = {&m.gate, &m.gate_exact, &m.end, &m.end_exact, &m.dprefix,
                     &m.dk,   &m.dbk,        &m.dqs, &m.dbkg};
    at += QUANT_ROWS_LEN(K, V);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++, at += CH * K)
        *wide[i] = at;
    m.dbv = at;
    m.dinv = at + CH * V;
    m.dlower = m.dinv + CH * CH;
    m.row = m.dlower + CH * CH;
    m.last_exact = m.row + 8 * K;
    return m;
}

static void exponentials(const ENG(quant_job) * j, const real *g, room *m)
{
    const int64_t K = j->K;
    const real *last = g + (CH - 1) * K;
    ENG(quant_exp)(j->q, true, CH * K, g, m->gate_exact);
    ENG(quant_exp)(j->q, false, CH * K, g, m->gate);
    ENG(quant_exp)(j->q, true, K, last, m->last_exact);
    for (int64_t i = 0; i < CH; i++)
        for (int64_t d = 0; d < K; d++)
            m->end_exact[i * K + d] = last[d] - g[i * K + d];
    memcpy(m->end, m->end_exact, (size_t)(CH * K) * sizeof *m->end);
    ENG(quant_exp)(j->q, true, CH * K, m->end_exact, m->end_exact);
    ENG(quant_exp)(j->q, false, CH * K, m->end, m->end);
}

/* u = A bv and W = A bkg to their operands, A to L: dL = -tril_-1(A^T dA A^T). */
static void solve_back(const backward *b, int64_t item, room *m)
{
    const ENG(quant_saved) *s = b->j.s;
    const int64_t K = b->j.K, V = b->j.V;
    const real *du = b->du + item * CH * V, *dw = b->dw + item * CH * K;
    const real *inverse = s->inverse + item * CH * CH;
    real *tmp = m->dlower;
    ENG(gemm)(true, false, CH, V, CH, 1, s->u_l + item * CH * CH, CH, du, V, 0, m->dbv, V);
    ENG(gemm)(true, false, CH, K, CH, 1, s->w_l + item * CH * CH, CH, dw, K, 0, m->dbkg, K);
    ENG(gemm)(false, false, CH, CH, V, 1, du, V, s->u_r + item * V * CH, CH, 0, m->dinv, CH);
    ENG(gemm)(false, false, CH, CH, K, 1, dw, K, s->w_r + item * K * CH, CH, 1, m->dinv, CH);
    for (int64_t i = 0; i < CH; i++)
        for (int64_t k = i + 1; k < CH; k++)
            m->dinv[i * CH + k] = 0;
    ENG(gemm)(true, false, CH, CH, CH, 1, inverse, CH, m->dinv, CH, 0, tmp, CH);
    ENG(gemm)(false, true, CH, CH, CH, -1, tmp, CH, inverse, CH, 0, m->dinv, CH);
    memcpy(m->dlower, m->dinv, CH * CH * sizeof *m->dlower);
}

/* One pair i, k <= i of both interactions. y: gradients of L_ik (0 on the diagonal) and P_ik; lhs: the
 * quantised left operands; e: exp(G_i - G_k). */
typedef struct pairing {
    real y[2];
    const real *lhs[2], *rhs[2];
    real *dlhs[2];
} pairing;

static void pair_back(const pairing *p, int64_t K, const real *exact, const real *rounded,
                      const real *key, real *dkey, real *dg_i, real *dg_k)
{
    for (int64_t d = 0; d < K; d++) {
        const real dright = p->y[0] * p->lhs[0][d] + p->y[1] * p->lhs[1][d];
        p->dlhs[0][d] += p->y[0] * p->rhs[0][d];
        p->dlhs[1][d] += p->y[1] * p->rhs[1][d];
        dkey[d] += dright * rounded[d];
        const real ddiff = dright * key[d] * exact[d];
        dg_i[d] += ddiff;
        dg_k[d] -= ddiff;
    }
}

static void interact_back(const backward *b, int64_t item, const quant_chunk *c, room *m)
{
    const ENG(quant_job) *j = &b->j;
    const ckpt_quant *q = j->q;
    const int64_t K = j->K;
    const real *g = j->s->prefix + item * CH * K, *dscores = b->dscores + item * CH * CH;
    const ckpt_quant_kind key_r = q->kind[CKPT_HANDLE_KEY_INTERACTION_RHS],
                          score_r = q->kind[CKPT_HANDLE_OUTPUT_SCORE_RHS];
    real *lk = m->row, *lq = m->row + K, *right = m->row + 2 * K, *rk = m->row + 3 * K;
    real *rq = key_r == score_r ? rk : m->row + 4 * K, *exact = m->row + 5 * K;
    real *rounded = m->row + 6 * K;
    for (int64_t i = 0; i < c->len; i++) {
        const float *global = j->s->tiles + i / TILE;
        pairing p = {
            .lhs = {lk,             lq            },
              .rhs = {rk,             rq            },
              .dlhs = {m->dbk + i * K, m->dqs + i * K}
        };
        ENG(quant_qdq)
        (q->kind[CKPT_HANDLE_KEY_INTERACTION_LHS], global[0], 1, K, m->r.bk + i * K, lk);
        ENG(quant_qdq)
        (q->kind[CKPT_HANDLE_OUTPUT_SCORE_LHS], global[2 * N_TILES], 1, K, m->r.qs + i * K, lq);
        for (int64_t k = 0; k <= i; k++) {
            for (int64_t d = 0; d < K; d++)
                exact[d] = g[i * K + d] - g[k * K + d];
            ENG(quant_exp)(q, true, K, exact, exact);
            memcpy(rounded, exact, (size_t)K * sizeof *exact);
            ENG(quant_boundary)(q->rounding[CKPT_BOUNDARY_GATE_EXP], K, rounded);
            for (int64_t d = 0; d < K; d++)
                right[d] = m->r.k[k * K + d] * rounded[d];
            ENG(quant_qdq)(key_r, global[N_TILES], 1, K, right, rk);
            if (rq != rk)
                ENG(quant_qdq)(score_r, global[3 * N_TILES], 1, K, right, rq);
            p.y[0] = k < i ? m->dlower[i * CH + k] : 0;
            p.y[1] = dscores[i * CH + k];
            pair_back(&p, K, exact, rounded, m->r.k + k * K, m->dk + k * K, m->dprefix + i * K,
                      m->dprefix + k * K);
        }
    }
}

/* What is left of every element: products with beta, scale and gates. */
static void rows_back(const backward *b, int64_t item, room *m)
{
    const int64_t K = b->j.K;
    const real *dqg = b->dqg + item * CH * K, *dwk = b->dwk + item * CH * K;
    real *last = m->dprefix + (CH - 1) * K;
    for (int64_t i = 0; i < CH; i++) {
        const real beta = m->r.beta[i];
        for (int64_t d = 0; d < K; d++) {
            const int64_t x = i * K + d;
            const real dend = dwk[x] * m->r.k[x] * m->end_exact[x];
            m->dk[x] += m->dbk[x] * beta + m->dbkg[x] * beta * m->gate[x] + dwk[x] * m->end[x];
            m->dprefix[x] += (dqg[x] * m->r.qs[x] + m->dbkg[x] * m->r.bk[x]) * m->gate_exact[x];
            m->dprefix[x] -= dend;
            last[d] += dend;
            m->dqs[x] += dqg[x] * m->gate[x]; /* of kappa q */
        }
    }
    for (int64_t d = 0; d < K; d++)
        last[d] += b->dlast[item * K + d] * m->last_exact[d];
}

static void store(const backward *b, const quant_chunk *c, int64_t hv, const room *m)
{
    const ENG(quant_job) *j = &b->j;
    const int64_t K = j->K, V = j->V;
    for (int64_t d = 0; d < K; d++) { /* the sums of g, from the end */
        real sum = 0;
        for (int64_t i = CH; i-- > 0;) {
            sum += m->dprefix[i * K + d];
            if (i < c->len)
                b->grad->g[((c->t0 + i) * j->HV + hv) * K + d] = sum;
        }
    }
    for (int64_t i = 0; i < c->len; i++) {
        const int64_t row = (c->t0 + i) * j->HV + hv;
        const real beta = m->r.beta[i];
        real dbeta = 0, *dq = b->dq + row * K;
        memcpy(b->dk + row * K, m->dk + i * K, (size_t)K * sizeof(real));
        for (int64_t d = 0; d < K; d++) {
            const int64_t x = i * K + d;
            dq[d] = m->dqs[x] * j->scale;
            dbeta += m->dbk[x] * m->r.k[x] + m->dbkg[x] * m->r.k[x] * m->gate[x];
        }
        for (int64_t d = 0; d < V; d++) {
            dbeta += m->dbv[i * V + d] * m->r.v[i * V + d];
            b->grad->v[row * V + d] = m->dbv[i * V + d] * beta;
        }
        b->grad->erase[row] = dbeta;
    }
}

static void item_back(void *arg, int64_t item, int worker)
{
    const backward *b = arg;
    const ENG(quant_job) *j = &b->j;
    const quant_chunk *c = &j->table[item / j->HV];
    const int64_t K = j->K, V = j->V;
    const unsigned csr = quant_keep_subnormals();
    real *at = j->scratch + worker * j->scratch_len;
    room m = room_at(K, V, at);
    ENG(quant_load)(j, c, item % j->HV, at, &m.r);
    exponentials(j, j->s->prefix + item * CH * K, &m);
    memset(m.dprefix, 0, (size_t)(4 * CH * K) * sizeof *m.dprefix); /* dk, dbk, dqs follow it */
    solve_back(b, item, &m);
    interact_back(b, item, c, &m);
    rows_back(b, item, &m);
    store(b, c, item % j->HV, &m);
    quant_restore(csr);
}

/* Value heads of one query and key head, in order. */
static void fold_token(void *arg, int64_t t, int worker)
{
    const backward *b = arg;
    const int64_t K = b->j.K, H = b->j.d->H, group = b->j.HV / H;
    (void)worker;
    for (int64_t h = 0; h < H; h++) {
        real *dq = b->grad->q + (t * H + h) * K, *dk = b->grad->k + (t * H + h) * K;
        for (int64_t d = 0; d < K; d++) {
            real sq = 0, sk = 0;
            for (int64_t i = 0; i < group; i++) {
                const int64_t x = (t * b->j.HV + h * group + i) * K + d;
                sq += b->dq[x];
                sk += b->dk[x];
            }
            dq[d] = sq;
            dk[d] = sk;
        }
    }
}

ckpt_status ENG(kda_quant_bwd)(ckpt_eng *e, const ckpt_quant *q, const ckpt_eng_delta *d,
                               const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                               const ENG(quant_saved) * saved, const real *d_o, const real *d_state,
                               const ENG(delta_grad) * grad, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    const int64_t K = d->K, V = d->V, T = ckpt_eng_tokens(seq);
    backward b = {
        .j = {.q = q, .d = d, .seq = seq, .in = in, .s = saved},
        .grad = grad,
        .d_o = d_o,
        .d_state = d_state
    };
    ckpt_status status;
    CKPT_CHECK(ENG(quant_check)(q, d, seq, err));
    CKPT_CHECK(ENG(quant_begin)(e, &b.j, ckpt_max_i64(room_len(K, V), CH * V + K), err));
    const int64_t items = b.j.chunks * d->HV;
    b.du = ckpt_eng_take(e, items * CH * V, sizeof(real));
    b.dw = ckpt_eng_take(e, items * CH * K, sizeof(real));
    b.dqg = ckpt_eng_take(e, items * CH * K, sizeof(real));
    b.dwk = ckpt_eng_take(e, items * CH * K, sizeof(real));
    b.dscores = ckpt_eng_take(e, items * CH * CH, sizeof(real));
    b.dlast = ckpt_eng_take(e, items * K, sizeof(real));
    b.ds = ckpt_eng_take(e, seq->n * d->HV * K * V, sizeof(real));
    b.dq = ckpt_eng_take(e, T * d->HV * K, sizeof(real));
    b.dk = ckpt_eng_take(e, T * d->HV * K, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    ckpt_eng_parallel(e, seq->n * d->HV, row_back, &b);
    ckpt_eng_parallel(e, items, item_back, &b);
    ckpt_eng_parallel(e, T, fold_token, &b);
done:
    ckpt_eng_drop(e, mark);
    return status;
}
