/* Causal softmax attention, blocked, with the log-sum-exp kept for the backward.
 *
 * Forward: an item is a block of query rows of one head of one part of a sequence. It walks the key blocks up to
 * its diagonal with a running maximum m, sum l and accumulator: a new maximum rescales both.
 * Backward: an item is one key head of one sequence with all the query heads that read it, so dq, dk
 * and dv have one writer each. P is recomputed from lse; dS = P (dP - D), D = sum_c dO O.
 * Source: mla-moe-math.md section 2.7. */
#include "attn.h"

#include <math.h>

#include "checked.h"
#include "kernels/kernels.h"
#include "real_math.h"

#define BLOCK_Q 64
#define BLOCK_K 128

typedef struct job {
    const ckpt_eng_attention *a;
    const ckpt_eng_seq *seq;
    const real *q, *k, *v, *d_o;
    real *o, *lse, *dq, *dk, *dv;
    const ckpt_eng_part *parts; /* of all queries: one a sequence */
    int64_t n_parts;
    const int64_t *first; /* first item of every part (forward), first part of every sequence */
    real *scratch;
    int64_t per_worker; /* elements */
    real scale;
    const ENG(kernels) * kernels;
} job;

static real scale_of(const ckpt_eng_attention *a)
{
    return (real)(a->scale != 0 ? a->scale : 1 / sqrt((double)a->DK));
}

static ckpt_status check(const ckpt_eng_attention *a, const ckpt_eng_seq *seq, ckpt_err *err)
{
    if (a->N < 1 || a->G < 1 || a->N % a->G != 0 || a->DK < 1 || a->DV < 1)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "attention: %lld query heads, %lld key heads, head dims %lld and %lld",
                         (long long)a->N, (long long)a->G, (long long)a->DK, (long long)a->DV);
    ckpt_status status = ckpt_eng_seq_check(seq, err);
    int64_t row = 0, s = 0, lo = 0; /* the next part begins there or later */
    for (int64_t i = 0; a->parts && status == CKPT_OK && i < a->n_parts; i++) {
        const ckpt_eng_part *p = &a->parts[i];
        lo = p->seq == s ? lo : 0;
        if (p->seq < s || p->seq >= seq->n || p->lo < lo || p->n < 0 || p->row != row ||
            p->n > seq->cu[p->seq + 1] - seq->cu[p->seq] - p->lo)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "attention: part %lld: %lld queries from token %lld of sequence %lld",
                             (long long)i, (long long)p->n, (long long)p->lo, (long long)p->seq);
        s = p->seq;
        lo = p->lo + p->n;
        row += p->n;
    }
    return status;
}

/* Takes the parts where the caller names none. */
static void choose_parts(ckpt_eng *e, job *j)
{
    const ckpt_eng_seq *seq = j->seq;
    j->parts = j->a->parts;
    j->n_parts = j->a->n_parts;
    if (j->parts != NULL)
        return;
    ckpt_eng_part *all = ckpt_eng_take(e, seq->n, sizeof *all);
    for (int64_t s = 0; all && !e->dry && s < seq->n; s++)
        all[s] = (ckpt_eng_part){s, 0, seq->cu[s + 1] - seq->cu[s], seq->cu[s]};
    j->parts = all;
    j->n_parts = seq->n;
}

/* One block of scores against a row's running maximum: s becomes the weights; the row's sum and
 * accumulator are brought to the new maximum. `n` of `width` columns are allowed. */
static void weigh_row(const ENG(kernels) * kernels, real *s, int64_t n, int64_t width, real *m,
                      real *l, real *acc, int64_t dv)
{
    real top = kernels->maximum(n, *m, s);
    real keep = *l > 0 ? EXP(*m - top) : 0;
    real sum = kernels->exp_sum(n, top, s, s);
    for (int64_t j = n > 0 ? n : 0; j < width; j++)
        s[j] = 0;
    if (keep != 1)
        for (int64_t c = 0; c < dv; c++)
            acc[c] *= keep;
    *l = *l * keep + sum;
    *m = top;
}

static void forward_block(const job *j, const ckpt_eng_part *part, int64_t head, int64_t block,
                          real *scratch)
{
    const ckpt_eng_attention *a = j->a;
    int64_t base = j->seq->cu[part->seq], at = block * BLOCK_Q, g = head / (a->N / a->G);
    int64_t i0 = part->lo + at, nq = ckpt_min_i64(BLOCK_Q, part->n - at);
    int64_t ldq = a->N * a->DK, ldk = a->G * a->DK, ldv = a->G * a->DV, ldo = a->N * a->DV;
    int64_t row = part->row + at;
    const real *q = j->q + row * ldq + head * a->DK;
    real *s = scratch, *acc = s + BLOCK_Q * BLOCK_K, m[BLOCK_Q], l[BLOCK_Q];
    for (int64_t r = 0; r < nq; r++) {
        m[r] = (real)-INFINITY;
        l[r] = 0;
    }
    for (int64_t i = 0; i < nq * a->DV; i++)
        acc[i] = 0;
    for (int64_t j0 = 0; j0 < i0 + nq; j0 += BLOCK_K) {
        int64_t nk = ckpt_min_i64(BLOCK_K, i0 + nq - j0);
        const real *k = j->k + (base + j0) * ldk + g * a->DK,
                   *v = j->v + (base + j0) * ldv + g * a->DV;
        ENG(gemm)(false, true, nq, nk, a->DK, j->scale, q, ldq, k, ldk, 0, s, BLOCK_K);
        for (int64_t r = 0; r < nq; r++) {
            int64_t n = ckpt_min_i64(nk, i0 + r - j0 + 1);
            if (n > 0)
                weigh_row(j->kernels, s + r * BLOCK_K, n, nk, &m[r], &l[r], acc + r * a->DV, a->DV);
            else
                for (int64_t c = 0; c < nk; c++)
                    s[r * BLOCK_K + c] = 0;
        }
        ENG(gemm)(false, false, nq, a->DV, nk, 1, s, BLOCK_K, v, ldv, 1, acc, a->DV);
    }
    for (int64_t r = 0; r < nq; r++) {
        real *o = j->o + (row + r) * ldo + head * a->DV, inv = 1 / l[r];
        for (int64_t c = 0; c < a->DV; c++)
            o[c] = acc[r * a->DV + c] * inv;
        j->lse[(row + r) * a->N + head] = m[r] + LOG(l[r]);
    }
}

/* Items of a part: heads x blocks, the long blocks first. */
static void forward_item(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    int64_t lo = 0, hi = j->n_parts;
    while (hi - lo > 1) {
        int64_t mid = lo + (hi - lo) / 2;
        if (j->first[mid] <= item)
            lo = mid;
        else
            hi = mid;
    }
    int64_t at = item - j->first[lo], blocks = (j->first[lo + 1] - j->first[lo]) / j->a->N;
    forward_block(j, &j->parts[lo], at % j->a->N, blocks - 1 - at / j->a->N,
                  j->scratch + worker * j->per_worker);
}

ckpt_status ENG(attention)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                           const real *q, const real *k, const real *v, real *o, real *lse,
                           ckpt_err *err)
{
    job j = {.a = a, .seq = seq, .q = q, .k = k, .v = v, .o = o, .lse = lse};
    ckpt_status status = check(a, seq, err);
    if (status != CKPT_OK)
        return status;
    size_t mark = ckpt_eng_mark(e);
    choose_parts(e, &j);
    int64_t *first = ckpt_eng_take(e, j.n_parts + 1, sizeof *first);
    j.per_worker = BLOCK_Q * (BLOCK_K + a->DV);
    j.scratch = ckpt_eng_take(e, e->threads * j.per_worker, sizeof(real));
    j.scale = scale_of(a);
    j.kernels = ENG(kernels_for)(e->isa);
    status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        first[0] = 0;
        for (int64_t n = 0; n < j.n_parts; n++)
            first[n + 1] = first[n] + (j.parts[n].n + BLOCK_Q - 1) / BLOCK_Q * a->N;
        j.first = first;
        ckpt_eng_parallel(e, first[j.n_parts], forward_item, &j);
    }
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct block_pair {
    int64_t base, i0, nq, j0, nk, head, g; /* tokens of the sequence, heads */
    int64_t row;                           /* of query i0 */
    real *p, *dp;                          /* [BLOCK_Q, BLOCK_K] */
    real *dk, *dv;                         /* [BLOCK_K, DK], [BLOCK_K, DV] */
} block_pair;

/* p = exp(s - lse) and ds = p (dp - D) scale, both zero above the diagonal. */
static void softmax_grad(const job *j, const block_pair *b)
{
    const ckpt_eng_attention *a = j->a;
    for (int64_t r = 0; r < b->nq; r++) {
        int64_t t = b->row + r;
        int64_t n = ckpt_min_i64(b->nk, b->i0 + r - b->j0 + 1);
        const real *o = j->o + (t * a->N + b->head) * a->DV;
        const real *d_o = j->d_o + (t * a->N + b->head) * a->DV;
        real lse = j->lse[t * a->N + b->head], d = j->kernels->dot(a->DV, o, d_o);
        real *p = b->p + r * BLOCK_K, *dp = b->dp + r * BLOCK_K;
        n = n > 0 ? n : 0;
        j->kernels->softmax_bwd(n, lse, d, j->scale, p, dp);
        for (int64_t c = n; c < b->nk; c++)
            p[c] = dp[c] = 0;
    }
}

static void backward_pair(const job *j, const block_pair *b)
{
    const ckpt_eng_attention *a = j->a;
    int64_t ldq = a->N * a->DK, ldk = a->G * a->DK, ldv = a->G * a->DV, ldo = a->N * a->DV;
    const real *q = j->q + b->row * ldq + b->head * a->DK;
    const real *k = j->k + (b->base + b->j0) * ldk + b->g * a->DK;
    const real *v = j->v + (b->base + b->j0) * ldv + b->g * a->DV;
    const real *d_o = j->d_o + b->row * ldo + b->head * a->DV;
    real *dq = j->dq + b->row * ldq + b->head * a->DK;
    ENG(gemm)(false, true, b->nq, b->nk, a->DK, j->scale, q, ldq, k, ldk, 0, b->p, BLOCK_K);
    ENG(gemm)(false, true, b->nq, b->nk, a->DV, 1, d_o, ldo, v, ldv, 0, b->dp, BLOCK_K);
    softmax_grad(j, b);
    ENG(gemm)(true, false, b->nk, a->DV, b->nq, 1, b->p, BLOCK_K, d_o, ldo, 1, b->dv, a->DV);
    ENG(gemm)(false, false, b->nq, a->DK, b->nk, 1, b->dp, BLOCK_K, k, ldk, 1, dq, ldq);
    ENG(gemm)(true, false, b->nk, a->DK, b->nq, 1, b->dp, BLOCK_K, q, ldq, 1, b->dk, a->DK);
}

static void clear_rows(real *x, int64_t rows, int64_t n, int64_t ld)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < n; c++)
            x[r * ld + c] = 0;
}

static void copy_rows(const real *from, int64_t rows, int64_t n, real *to, int64_t ld)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < n; c++)
            to[r * ld + c] = from[r * n + c];
}

/* All queries of a part from key j0 on, against that block of keys. */
static void backward_part(const job *j, block_pair *b, const ckpt_eng_part *part)
{
    for (int64_t at = ckpt_max_i64(b->j0 - part->lo, 0) / BLOCK_Q * BLOCK_Q; at < part->n;
         at += BLOCK_Q) {
        b->i0 = part->lo + at;
        b->row = part->row + at;
        b->nq = ckpt_min_i64(BLOCK_Q, part->n - at);
        backward_pair(j, b);
    }
}

static void backward_item(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const ckpt_eng_attention *a = j->a;
    int64_t seq = item / a->G, share = a->N / a->G, len = j->seq->cu[seq + 1] - j->seq->cu[seq];
    block_pair b = {.base = j->seq->cu[seq], .g = item % a->G};
    b.p = j->scratch + worker * j->per_worker;
    b.dp = b.p + BLOCK_Q * BLOCK_K;
    b.dk = b.dp + BLOCK_Q * BLOCK_K;
    b.dv = b.dk + BLOCK_K * a->DK;
    const ckpt_eng_part *from = j->parts + j->first[seq], *to = j->parts + j->first[seq + 1];
    for (const ckpt_eng_part *p = from; p < to; p++)
        clear_rows(j->dq + (p->row * a->N + b.g * share) * a->DK, p->n, share * a->DK,
                   a->N * a->DK);
    for (b.j0 = 0; b.j0 < len; b.j0 += BLOCK_K) {
        b.nk = ckpt_min_i64(BLOCK_K, len - b.j0);
        clear_rows(b.dk, b.nk, a->DK, a->DK);
        clear_rows(b.dv, b.nk, a->DV, a->DV);
        for (b.head = b.g * share; b.head < (b.g + 1) * share; b.head++)
            for (const ckpt_eng_part *p = from; p < to; p++)
                backward_part(j, &b, p);
        copy_rows(b.dk, b.nk, a->DK, j->dk + ((b.base + b.j0) * a->G + b.g) * a->DK, a->G * a->DK);
        copy_rows(b.dv, b.nk, a->DV, j->dv + ((b.base + b.j0) * a->G + b.g) * a->DV, a->G * a->DV);
    }
}

ckpt_status ENG(attention_bwd)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, const real *o,
                               const real *lse, const real *d_o, real *dq, real *dk, real *dv,
                               ckpt_err *err)
{
    job j = {.a = a,
             .seq = seq,
             .q = q,
             .k = k,
             .v = v,
             .d_o = d_o,
             .o = (real *)(uintptr_t)o,
             .lse = (real *)(uintptr_t)lse,
             .dq = dq,
             .dk = dk,
             .dv = dv};
    ckpt_status status = check(a, seq, err);
    if (status != CKPT_OK)
        return status;
    size_t mark = ckpt_eng_mark(e);
    choose_parts(e, &j);
    int64_t *first = ckpt_eng_take(e, seq->n + 1, sizeof *first);
    j.per_worker = 2 * BLOCK_Q * BLOCK_K + BLOCK_K * (a->DK + a->DV);
    j.scratch = ckpt_eng_take(e, e->threads * j.per_worker, sizeof(real));
    j.scale = scale_of(a);
    j.kernels = ENG(kernels_for)(e->isa);
    status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        int64_t i = 0;
        for (int64_t s = 0; s < seq->n; s++) {
            first[s] = i;
            while (i < j.n_parts && j.parts[i].seq == s)
                i++;
        }
        first[seq->n] = i;
        j.first = first;
        ckpt_eng_parallel(e, seq->n * a->G, backward_item, &j);
    }
    ckpt_eng_drop(e, mark);
    return status;
}
