/* A micro-batch whose tokens are cut over context-parallel ranks (chunkwise): what linear attention passes
 * from rank to rank, and keys and values for softmax attention.
 *
 * Rank c has consecutive tokens of the batch, so a sequence may begin on one rank and end on another.
 * Linear attention: the rows that the convolutions need of the tokens before, then the state, go
 * from rank to rank where a sequence does; their gradients come back the other way. Softmax attention: all
 * ranks gather the keys and values of the batch, and each sums what it contributes to their gradients.
 *
 * The queries of consecutive tokens would be uneven work: of one long sequence the last of cp ranks would
 * have (2 cp - 1) / cp of the mean. So queries go to other ranks for the core of attention, zigzag: every
 * sequence is cut into 2 cp pieces (of lengths that differ by one at most, some empty), and pieces k and
 * 2 cp - 1 - k, together about a share of its query-key pairs, go to one rank: the one that has the fewest
 * pairs so far, the lowest of those. Of one sequence that is rank k; short packed ones spread. Results
 * come back, so that tokens stay consecutive outside. A rank's rows are in the order of tokens.
 * Source: kda-math.md section 5.3, mla-moe-math.md section 2.9. */
#ifndef CKPT_ENGINE_CUT_H
#define CKPT_ENGINE_CUT_H

#include "attn.h"
#include "blocks.h"
#include "par.h"

struct ckpt_eng_cut {
    const ckpt_eng_seq *whole; /* all tokens */
    ckpt_eng_seq own;          /* this rank's parts of sequences, none empty */
    int64_t lo, n;             /* this rank's tokens */
    int64_t *at;               /* [cp + 1]: first token of every rank */
    bool *link;                /* [cp + 1]: rank i goes on with the sequence that i - 1 ends with */
    int64_t *counts;           /* [2 cp]: scratch */
    /* Softmax attention: queries that this rank works on, and what moves. */
    ckpt_eng_part *parts; /* none empty, no neighbours */
    int64_t n_parts, rows;
    int64_t pairs;     /* query-key pairs of those rows */
    int64_t *out, *in; /* [cp] rows: of its tokens that rank i works on; of i's tokens to work on */
    int64_t *order;    /* [n] its tokens (from lo), those that rank 0 works on first */
};

/* Fill in, while e is dry too. Errors: CKPT_E_USAGE, fewer tokens than ranks. */
ckpt_status ckpt_eng_cut_of(const ckpt_eng *e, const ckpt_eng_seq *whole, ckpt_eng_cut *out,
                            ckpt_err *err) CKPT_MUST_USE;
void ckpt_eng_cut_free(ckpt_eng_cut *c); /* or of zeros */

/* Make known where the operations are what of it they read, after bring_seq of c->own (move.h). On a
 * device: arena memory. */
ckpt_status ENG(bring_cut)(ckpt_eng *e, const ckpt_eng_cut *c, ckpt_err *err) CKPT_MUST_USE;

/* Several rows of the sequence at a rank's border, one after the other in `x` [n]: wait for the rank
 * before, let `make` fill `next` [n] from it, hand that on. With `back` the same against the order.
 * Where no sequence goes on, x is zeros. */
typedef void (*ENG(cut_fn))(void *self, const real *x, real *next);
ckpt_status ENG(cut_pass)(ckpt_eng *e, int64_t n, bool back, real *x, real *next, ENG(cut_fn) make,
                          void *self, ckpt_err *err) CKPT_MUST_USE;
/* The two halves of it, around what a rank does in between. */
ckpt_status ENG(cut_receive)(ckpt_eng *e, int64_t n, bool back, real *x,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(cut_send)(ckpt_eng *e, int64_t n, bool back, const real *next,
                          ckpt_err *err) CKPT_MUST_USE;

/* attention and attention_bwd (attn.h) of blocks: of `seq`, or with a cut of this rank's queries against
 * the whole batch's keys and values. k, v, dk, dv are this rank's. */
ckpt_status ENG(attention_cut)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, real *o, wreal *lse,
                               ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(attention_cut_bwd)(ckpt_eng *e, const ckpt_eng_attention *a,
                                   const ckpt_eng_seq *seq, const real *q, const real *k,
                                   const real *v, const real *o, const wreal *lse, const real *d_o,
                                   real *dq, real *dk, real *dv, ckpt_err *err) CKPT_MUST_USE;

/* Keys and values of the whole batch from this rank's, into arena memory. */
ckpt_status ENG(gather_keys)(ckpt_eng *e, const ckpt_eng_attention *a, const real *k, const real *v,
                             real **all_k, real **all_v, ckpt_err *err) CKPT_MUST_USE;

static inline ckpt_eng_cut *ckpt_eng_cut_in(const ckpt_eng *e)
{
    return e->par != NULL ? e->par->cut : NULL;
}

/* Tokens of every rank times width. */
static inline const int64_t *ckpt_cut_counts(const ckpt_eng *e, int64_t width)
{
    ckpt_eng_cut *c = e->par->cut;
    for (int i = 0; i < e->par->cp; i++)
        c->counts[i] = (c->at[i + 1] - c->at[i]) * width;
    return c->counts;
}

/* Rows of every rank times width; which: of two such lists that are in use at a time. */
static inline const int64_t *ckpt_cut_scaled(const ckpt_eng *e, const int64_t *rows, int64_t width,
                                             int which)
{
    int64_t *to = e->par->cut->counts + which * e->par->cp;
    for (int i = 0; i < e->par->cp; i++)
        to[i] = rows[i] * width;
    return to;
}

#endif
