/* Softmax attention, rotary embedding and the attention blocks (grouped-query, MLA).
 * Conventions: engine.h. Source: mla-moe-math.md section 2. */
#ifndef CKPT_ENGINE_ATTN_H
#define CKPT_ENGINE_ATTN_H

#include "ops.h"

/* ---- rotary embedding (rope.c) -------------------------------------------------------------- */

typedef enum ckpt_eng_rope_kind {
    CKPT_ENG_ROPE_NONE,
    CKPT_ENG_ROPE_PLAIN,
    CKPT_ENG_ROPE_YARN,
    CKPT_ENG_ROPE_LLAMA3
} ckpt_eng_rope_kind;

typedef struct ckpt_eng_rope {
    ckpt_eng_rope_kind kind;
    bool interleaved; /* pairs (2i, 2i+1), results half-split (MLA); else pairs (i, i + dim/2) */
    int64_t dim;      /* rotated channels */
    double base, factor, original_max, beta_fast, beta_slow, mscale, mscale_all_dim;
    double low_freq_factor, high_freq_factor; /* llama3 */
} ckpt_eng_rope;

#define CKPT_ENG_ROPE_MAX 4096 /* channels */

/* freq [dim/2]: the angle of one position, rounded to the engine's type; scale of cos and sin, 1 without
 * YaRN. Builds for a CPU have it. Errors: CKPT_E_USAGE, the numbers of r do not fit together. */
ckpt_status ENG(rope_freqs)(const ckpt_eng_rope *r, real *freq, real *scale,
                            ckpt_err *err) CKPT_MUST_USE;
/* cos, sin [T, dim/2], scaled as YaRN says; positions restart with every sequence, at offset[n] (NULL
 * = 0). */
ckpt_status ENG(rope_table)(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                            const int64_t *offset, wreal *cos, wreal *sin,
                            ckpt_err *err) CKPT_MUST_USE;
/* Rotate the first r->dim of `dim` channels of x [T, heads, ..] in place; ldx, ldh strides of tokens
 * and heads. `inverse` is the backward. */
ckpt_status ENG(rope)(ckpt_eng *e, const ckpt_eng_rope *r, int64_t T, int64_t heads, real *x,
                      int64_t ldx, int64_t ldh, const wreal *cos, const wreal *sin, bool inverse,
                      ckpt_err *err) CKPT_MUST_USE;

/* ---- softmax attention (attention.c) -------------------------------------------------------- */

/* Queries that are there: n tokens of sequence `seq` from its token lo, rows `row` and on of q. */
typedef struct ckpt_eng_part {
    int64_t seq, lo, n, row;
} ckpt_eng_part;

/* Causal inside each sequence, blocked: no T x T array exists. Head h reads key head h / (N / G). */
typedef struct ckpt_eng_attention {
    int64_t N, G;   /* query heads, key/value heads */
    int64_t DK, DV; /* head dims of q and k, of v and o */
    double scale;   /* 0 = DK^-0.5 */
    /* Or NULL: queries of all tokens. Else only those of n_parts parts: q, o, lse, d_o, dq have their
     * rows, one part after the other; keys and values are those of all tokens. In the order of tokens,
     * none overlaps another. */
    const ckpt_eng_part *parts;
    int64_t n_parts;
} ckpt_eng_attention;

/* q [T, N, DK], k [T, G, DK], v [T, G, DV], o [T, N, DV]; lse [T, N]: log of the sum of exponents. */
ckpt_status ENG(attention)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                           const real *q, const real *k, const real *v, real *o, wreal *lse,
                           ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(attention_bwd)(ckpt_eng *e, const ckpt_eng_attention *a, const ckpt_eng_seq *seq,
                               const real *q, const real *k, const real *v, const real *o,
                               const wreal *lse, const real *d_o, real *dq, real *dk, real *dv,
                               ckpt_err *err) CKPT_MUST_USE;

/* ---- blocks (gqa.c, mla.c): calling sequence as in blocks.h --------------------------------- */

typedef enum ckpt_eng_gate {
    CKPT_ENG_GATE_NONE,
    CKPT_ENG_GATE_HEAD,
    CKPT_ENG_GATE_ELEMENT
} ckpt_eng_gate;

typedef struct ckpt_eng_gqa {
    int64_t H; /* hidden */
    ckpt_eng_attention attn;
    ckpt_eng_rope rope;
    bool gated, qk_norm,
        centered; /* elementwise output gate; norms of q and k; weights minus one */
    double eps;
} ckpt_eng_gqa;

typedef struct ENG(gqa_params) {
    real *q, *k, *v, *gate, *o;      /* weights; gate or NULL */
    wreal *q_bias, *k_bias, *v_bias; /* or NULL */
    wreal *q_norm, *k_norm;          /* [DK] or NULL */
} ENG(gqa_params);

typedef struct ckpt_eng_mla {
    int64_t H, N, RQ, RK, DN, DR, DV; /* RQ 0 = no query compression */
    ckpt_eng_rope rope;               /* kind NONE = NoPE layer: channels stay, unrotated */
    ckpt_eng_gate gate;
    bool latent_norm, centered;
    double eps, latent_eps;
    double scale; /* 0 = mscale(factor, mscale_all_dim)^2 / sqrt(DN + DR) */
} ckpt_eng_mla;

typedef struct ENG(mla_params) {
    real *q, *q_a, *q_b, *kv_a, *kv_b, *gate, *o;
    wreal *q_a_norm, *kv_a_norm;
} ENG(mla_params);

typedef struct ENG(rope_tables) {
    const wreal *cos,
        *sin; /* [T, dim/2] of ENG(rope_table); unused on a layer that does not rotate */
} ENG(rope_tables);

typedef struct ENG(gqa_saved) {
    real *q_raw, *k_raw; /* before norm and rotation; those arrays themselves without a norm */
    real *q, *k, *v;     /* [T, N, DK], [T, G, DK], [T, G, DV] */
    wreal *rq, *rk;      /* norm statistics [T, N], [T, G] */
    real *gate;          /* before the sigmoid [T, N, DV] */
    real *o;             /* [T, N, DV] */
    wreal *lse;          /* [T, N] */
} ENG(gqa_saved);

ckpt_status ENG(gqa_save)(ckpt_eng *e, const ckpt_eng_gqa *b, int64_t T, ENG(gqa_saved) * saved,
                          ckpt_err *err) CKPT_MUST_USE;
/* y [T, H] written, or added to when `add`. */
ckpt_status ENG(gqa)(ckpt_eng *e, const ckpt_eng_gqa *b, const ckpt_eng_seq *seq,
                     const ENG(gqa_params) * p, const ENG(rope_tables) * rope, const real *x,
                     bool add, real *y, const ENG(gqa_saved) * saved, ckpt_err *err) CKPT_MUST_USE;
/* dx written, or added to when `add`. */
ckpt_status ENG(gqa_bwd)(ckpt_eng *e, const ckpt_eng_gqa *b, const ckpt_eng_seq *seq,
                         const ENG(gqa_params) * p, const ENG(rope_tables) * rope,
                         const ENG(gqa_saved) * saved, const real *x, const real *dy, bool add,
                         real *dx, const ENG(gqa_params) * grads, ckpt_err *err) CKPT_MUST_USE;

typedef struct ENG(mla_saved) {
    real *q_a, *q_an; /* query latent, normed; q_an is q_a without a norm */
    real *kv_a;       /* [T, RK + DR] */
    real *c, *cn;     /* key latent [T, RK], normed */
    wreal *rq, *rc;   /* statistics of the norms */
    real *q, *k, *v;  /* [T, N, DN + DR] twice, [T, N, DV]; rotated */
    real *gate;       /* before the sigmoid [T, N] or [T, N, DV] */
    real *o;          /* [T, N, DV] */
    wreal *lse;       /* [T, N] */
} ENG(mla_saved);

ckpt_status ENG(mla_save)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, ENG(mla_saved) * saved,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(mla)(ckpt_eng *e, const ckpt_eng_mla *b, const ckpt_eng_seq *seq,
                     const ENG(mla_params) * p, const ENG(rope_tables) * rope, const real *x,
                     bool add, real *y, const ENG(mla_saved) * saved, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(mla_bwd)(ckpt_eng *e, const ckpt_eng_mla *b, const ckpt_eng_seq *seq,
                         const ENG(mla_params) * p, const ENG(rope_tables) * rope,
                         const ENG(mla_saved) * saved, const real *x, const real *dy, bool add,
                         real *dx, const ENG(mla_params) * grads, ckpt_err *err) CKPT_MUST_USE;

/* Decoding in latent space: one new token a sequence attends to its cached latents without expanding
 * them. cache [N_seq, room, RK + DR]: normed latents, then the rotated shared key; `len` tokens of
 * each sequence are there, and the new one's entry is written at index len. x [N_seq, H], rope tables
 * of the new tokens' positions. Equal to the expanded form up to rounding. */
ckpt_status ENG(mla_decode)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t n_seq, int64_t room,
                            const int64_t *len, const ENG(mla_params) * p,
                            const ENG(rope_tables) * rope, const real *x, real *cache, real *y,
                            ckpt_err *err) CKPT_MUST_USE;

#endif
