/* Output gate and small copies shared by the attention blocks. */
#ifndef CKPT_ENGINE_ATTN_GATE_H
#define CKPT_ENGINE_ATTN_GATE_H

#include "attn.h"

/* y [T, N, D] = o * sigmoid(g); g [T, N, per] with per 1 (one a head) or D. */
void ENG(gate_heads)(const ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per, const real *o,
                     const real *g, real *y);
/* d_o = dy * sigmoid(g); dg (written). d_o may alias dy. */
void ENG(gate_heads_bwd)(const ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                         const real *o, const real *g, const real *dy, real *d_o, real *dg);
/* to[r, 0..n) = from[r, 0..n), rows `ld` apart. */
void ENG(copy_columns)(const ckpt_eng *e, int64_t rows, int64_t n, const real *from,
                       int64_t ld_from, real *to, int64_t ld_to);

#endif
