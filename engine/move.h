/* What a model does beside its arithmetic: copies, sums and cuts of arrays, tokens that come in and
 * results that go out. On a CPU these are short loops; on a device (real.h) they are what crosses the
 * border. Conventions: engine.h; nothing happens while e is dry. */
#ifndef CKPT_ENGINE_MOVE_H
#define CKPT_ENGINE_MOVE_H

#include "attn.h"

/* ---- arrays --------------------------------------------------------------------------------- */

ckpt_status ENG(copy)(ckpt_eng *e, int64_t n, const real *from, real *to,
                      ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(zero)(ckpt_eng *e, int64_t n, real *x, ckpt_err *err) CKPT_MUST_USE;
/* y += x */
ckpt_status ENG(add)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err) CKPT_MUST_USE;
/* to[r, 0..n) = from[r, 0..n), rows `ld` apart. */
ckpt_status ENG(copy_columns)(ckpt_eng *e, int64_t rows, int64_t n, const real *from,
                              int64_t ld_from, real *to, int64_t ld_to,
                              ckpt_err *err) CKPT_MUST_USE;

/* The same of what stays f32; to[r, 0..n) += from[r, 0..n). */
ckpt_status ENG(zero_wide)(ckpt_eng *e, int64_t n, wreal *x, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(add_columns)(ckpt_eng *e, int64_t rows, int64_t n, const wreal *from,
                             int64_t ld_from, wreal *to, int64_t ld_to,
                             ckpt_err *err) CKPT_MUST_USE;

/* ---- heads ---------------------------------------------------------------------------------- */

/* from [rows, n] -> to [rows, G, n], each row G times; no overlap. */
ckpt_status ENG(repeat_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                              wreal *to, ckpt_err *err) CKPT_MUST_USE;
/* Its adjoint: to [rows, n] = sums over G in order. */
ckpt_status ENG(sum_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                           wreal *to, ckpt_err *err) CKPT_MUST_USE;
/* to [rows, n] = the first of each G. */
ckpt_status ENG(first_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                             wreal *to, ckpt_err *err) CKPT_MUST_USE;
/* MLA: kv [T, N, DN + DV] and the last DR of kv_a [T, RK + DR], for all heads, into k [T, N, DN + DR] and
 * v [T, N, DV]. */
ckpt_status ENG(split_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *kv,
                             const real *kv_a, real *k, real *v, ckpt_err *err) CKPT_MUST_USE;
/* Its adjoint: dk [T, N, DN + DR], dv [T, N, DV] into dkv [T, N, DN + DV] and, summed over heads, into the last
 * DR of dkv_a [T, RK + DR]. */
ckpt_status ENG(fold_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *dk,
                            const real *dv, real *dkv, real *dkv_a, ckpt_err *err) CKPT_MUST_USE;
/* y [T, N, D] = o * sigmoid(g); g [T, N, per] with per 1 (one a head) or D. */
ckpt_status ENG(gate_heads)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                            const real *o, const real *g, real *y, ckpt_err *err) CKPT_MUST_USE;
/* d_o = dy * sigmoid(g); dg (written). d_o may alias dy. */
ckpt_status ENG(gate_heads_bwd)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                                const real *o, const real *g, const real *dy, real *d_o, real *dg,
                                ckpt_err *err) CKPT_MUST_USE;

/* ---- tokens and results --------------------------------------------------------------------- */

/* A number that a run leaves for its caller, in the arena. */
typedef union ckpt_eng_result {
    int64_t i;
    double d;
} ckpt_eng_result;

/* Make the offsets of seq known where the operations are; until the next such call. On a device:
 * arena memory, so before everything else. */
ckpt_status ENG(bring_seq)(ckpt_eng *e, const ckpt_eng_seq *seq, ckpt_err *err) CKPT_MUST_USE;
/* *to = `from` [T], the caller's ids or labels (or NULL), as operations read them: itself, or a copy in
 * the arena. Errors on a device: CKPT_E_FORMAT, one is not below V (or, `ids`, negative); a CPU's
 * operations say so themselves. */
ckpt_status ENG(bring_tokens)(ckpt_eng *e, int64_t T, int64_t V, bool ids, const int32_t *from,
                              const int32_t **to, ckpt_err *err) CKPT_MUST_USE;
/* Every sequence moved one to the left, `last` in its last place. to may be from on a CPU alone. */
ckpt_status ENG(shift_tokens)(ckpt_eng *e, const ckpt_eng_seq *seq, int32_t last,
                              const int32_t *from, int32_t *to, ckpt_err *err) CKPT_MUST_USE;
/* weight [T] = share / n; 0 when n is. */
ckpt_status ENG(share_weights)(ckpt_eng *e, int64_t T, double share, const ckpt_eng_result *n,
                               wreal *weight, ckpt_err *err) CKPT_MUST_USE;
/* weight [T] = share / n, n the labelled tokens of labels [T]; 0 without any. */
ckpt_status ENG(loss_weights)(ckpt_eng *e, int64_t T, const int32_t *labels, double share,
                              wreal *weight, ckpt_eng_result *n, ckpt_err *err) CKPT_MUST_USE;
/* out->d = the sum of loss [T] in double, in order (a device: of 256 interleaved sums), over n->i. */
ckpt_status ENG(mean_loss)(ckpt_eng *e, int64_t T, const wreal *loss, const ckpt_eng_result *n,
                           ckpt_eng_result *out, ckpt_err *err) CKPT_MUST_USE;
/* at->i = 0 when x [n] is finite, else 2 i + 1 for an infinite x[i], 2 i + 2 for a NaN, of the first i. */
ckpt_status ENG(watch)(ckpt_eng *e, int64_t n, const real *x, ckpt_eng_result *at,
                       ckpt_err *err) CKPT_MUST_USE;
/* Zero n results; bring them, or an array, to the caller's memory, once all operations have run. */
ckpt_status ENG(clear_results)(ckpt_eng *e, int64_t n, ckpt_eng_result *x,
                               ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(fetch_results)(ckpt_eng *e, int64_t n, const ckpt_eng_result *x,
                               ckpt_eng_result *to, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(fetch)(ckpt_eng *e, int64_t n, const real *x, wreal *to,
                       ckpt_err *err) CKPT_MUST_USE;

#endif
