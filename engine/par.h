/* A run over several ranks: its groups, which part of every parameter a rank holds, and which tokens.
 *
 * Order of ranks (Megatron's): tp fastest, then cp, then dp. A data-parallel rank runs a micro-batch of
 * its own; its tp * cp ranks all know all of that micro-batch's tokens. Between blocks a rank holds the
 * activations of its own tokens alone (sequence parallelism): the tokens are cut over cp and each part
 * over tp, in parts that differ by one at most, so nothing has to divide. Around a block:
 *
 *   normed input --allgather--> [tokens, H] --block with own heads--> partial sums --reduce-scatter-->
 *
 * over tp; with headwise context parallelism over tp and cp, where a cp rank runs a part of the heads
 * that its weights have. So every rank computes a part of the sum that each gradient is: a gradient
 * is complete after one sum over the ranks that hold the same part of the parameter.
 *
 * Experts are cut over ep, which divides the number of ranks: ep consecutive ranks hold all experts,
 * each one whole. Routers, latent down-projections, low-rank down-projections, norms and shared experts
 * are whole on every rank. Key heads fewer than tp are held by several ranks. */
#ifndef CKPT_ENGINE_PAR_H
#define CKPT_ENGINE_PAR_H

#include "comm.h"
#include "spec.h"

typedef enum ckpt_eng_cp_mode {
    CKPT_ENG_CP_HEADS, /* every rank has the whole sequence for a part of the heads */
    CKPT_ENG_CP_CHUNKS /* every rank has all heads for a part of the sequence: states, convolution
                          histories, keys and values move, and queries, so that the work of
                          causal attention is even (zigzag: cut.h) */
} ckpt_eng_cp_mode;

typedef struct ckpt_eng_cut ckpt_eng_cut; /* cut.h */

typedef struct ckpt_eng_par {
    int tp, cp, dp, ep; /* sizes */
    int t, c, d, x;     /* own coordinates; x that of ep */
    ckpt_eng_cp_mode cp_mode;
    ckpt_comm *world;     /* borrowed */
    ckpt_comm tensor;     /* same c, d */
    ckpt_comm context;    /* same t, d */
    ckpt_comm data;       /* same t, c: data-parallel copies */
    ckpt_comm model;      /* same d: one micro-batch; rank c * tp + t */
    ckpt_comm replicas;   /* same t: hold the same parts of parameters cut over tp */
    ckpt_comm experts;    /* hold all experts together */
    ckpt_comm expert_dup; /* same x: hold the same experts */
    int64_t *counts;      /* [tp + tp * cp]: of the micro-batch that runs now (network_par.c) */
    ckpt_eng_cut *cut;    /* chunkwise: of the micro-batch that runs now; else NULL */
} ckpt_eng_par;

/* Sizes at least 1; tp * cp * dp must be the size of world and ep divide it: CKPT_E_USAGE. */
ckpt_status ckpt_eng_par_open(ckpt_eng_par *p, ckpt_comm *world, int tp, int cp, int dp, int ep,
                              ckpt_eng_cp_mode mode, ckpt_err *err) CKPT_MUST_USE;
void ckpt_eng_par_close(ckpt_eng_par *p);

/* Who has the same part of a parameter. */
typedef enum ckpt_eng_held {
    CKPT_ENG_HELD_ALL,    /* every rank */
    CKPT_ENG_HELD_TENSOR, /* those with the same t */
    CKPT_ENG_HELD_KEYS,   /* key heads that several t share */
    CKPT_ENG_HELD_EXPERT  /* those with the same x */
} ckpt_eng_held;

typedef struct ckpt_eng_box {
    int rank;
    int64_t dims[CKPT_MAX_RANK]; /* of the whole parameter */
    int64_t lo[CKPT_MAX_RANK], len[CKPT_MAX_RANK];
    int64_t n; /* elements of the part; 0: this rank has none of it */
    ckpt_eng_held held;
} ckpt_eng_box;

typedef struct ckpt_eng_range {
    int64_t lo, n;
} ckpt_eng_range;

/* Part `i` of `parts` of a block's heads (inner size, for an MLP). Query and key ranges are those of
 * grouped-query attention, whose key heads repeat where there are fewer than parts; elsewhere `keys` are
 * the key heads of linear attention, or equal. Errors: CKPT_E_USAGE, more parts than heads. */
typedef struct ckpt_eng_heads {
    ckpt_eng_range queries, keys;
    bool shared; /* key heads are held by several parts */
} ckpt_eng_heads;
ckpt_status ckpt_eng_heads_of(const ckpt_eng_block *b, int64_t parts, int64_t i,
                              ckpt_eng_heads *out, ckpt_err *err) CKPT_MUST_USE;
/* The block as it is with those heads alone. */
ckpt_eng_block ckpt_eng_with_heads(const ckpt_eng_block *b, const ckpt_eng_heads *h);

/* Which part of the parameter `name` (canonical) of a model rank t, x of p holds. p NULL: all of it.
 * Errors: CKPT_E_USAGE as above, block named; CKPT_E_FORMAT: dims do not fit the heads. */
ckpt_status ckpt_eng_box_of(const ckpt_eng_spec *s, const ckpt_canon *c, const ckpt_eng_par *p,
                            int t, int x, ckpt_eng_box *out, ckpt_err *err) CKPT_MUST_USE;

/* Tokens of rank (c, t) among T: consecutive, in parts over cp and then over tp. */
ckpt_eng_range ckpt_eng_tokens_of(const ckpt_eng_par *p, int64_t T, int c, int t);

#endif
