/* Between the network*.c. */
#ifndef CKPT_ENGINE_NETWORK_INTERNAL_H
#define CKPT_ENGINE_NETWORK_INTERNAL_H

#include "move.h"
#include "network.h"
#include "plan.h"

/* network_load.c: memory for the listed parameters, x and grad of each; then their values. `refresh`:
 * after data was changed, the matrices that products read. */
ckpt_status ENG(network_place)(ENG(network) * m, const ckpt_eng *e, bool gradients,
                               ckpt_err *err) CKPT_MUST_USE;
/* How each parameter is read and cast to wreal. Errors: CKPT_E_UNSUPPORTED, one is of a type that is not. */
ckpt_status ENG(network_plan)(const ENG(network) * m, const ckpt_model *src, ckpt_arena *arena,
                              ckpt_gather *gathers, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(network_load)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(network_refresh)(const ckpt_eng *e, ENG(network) * m, ckpt_err *err) CKPT_MUST_USE;

/* Several ranks: this one's rows of the vocabulary, and the group that shares its key heads. */
ckpt_status ENG(network_join)(ENG(network) * m, const ckpt_eng *e, ckpt_err *err) CKPT_MUST_USE;

/* How a micro-batch of T tokens lies on the ranks. Without ranks everything is T. */
typedef struct ENG(tokens) {
    int64_t T;           /* of the micro-batch */
    int64_t lo, n;       /* this rank's, between blocks */
    int64_t cp_lo, cp_n; /* those of its tensor-parallel group */
    int64_t *over_tp;    /* [tp] numbers of elements of a row of H, for allgather: par's */
    int64_t *over_model; /* [cp * tp] */
} ENG(tokens);
ENG(tokens) ENG(tokens_of)(const ckpt_eng *e, int64_t T, int64_t H);

/* What this rank runs of a block: all its heads, or with headwise context parallelism a part of them.
 * Weights cut by rows are pointers into the block's; the output projection, cut by columns, is a copy
 * from the arena, and so is its gradient. */
typedef struct ENG(share) {
    ckpt_eng_block spec;
    ENG(block_params) p, g;
    const real *whole; /* output projection [rows, columns] and this share's columns of it */
    real *part;
    wreal *dwhole, *dpart;
    int64_t rows, columns, lo, len;
} ENG(share);
/* Its description alone. */
ckpt_status ENG(share_spec)(const ckpt_eng *e, const ENG(block) * k, ckpt_eng_block *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* `gradients`: zeroed room for the output projection's too; share_add then adds it to the block's. */
ckpt_status ENG(share_of)(ckpt_eng *e, const ENG(block) * k, bool gradients, ENG(share) * out,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(share_add)(ckpt_eng *e, const ENG(share) * s, ckpt_err *err) CKPT_MUST_USE;

/* Gather the tokens of a group, x [own tokens, H] to [all, H]; and the way back, summed. While e is
 * dry nothing happens. */
ckpt_status ENG(tokens_gather)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *x,
                               real *all, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(tokens_scatter)(ckpt_eng *e, ckpt_comm *c, const int64_t *counts, const real *all,
                                real *x, ckpt_err *err) CKPT_MUST_USE;

/* network_vocab.c: embedding and head whose rows are cut over the tensor-parallel group. ids, labels
 * [where->T]; x, h, dx, dh [where->n, H]. */
ckpt_status ENG(vocab_embed)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                             const int32_t *ids, real *x, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(vocab_embed_bwd)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                                 const int32_t *ids, const real *dx, ckpt_err *err) CKPT_MUST_USE;
/* loss[0]: the mean over the labelled tokens of all data-parallel ranks, loss[1] their number; labels
 * NULL: logits alone. dh (or NULL: no backward) written, times `share`. logits [where->T, V] on every
 * rank, or NULL. */
ckpt_status ENG(vocab_loss)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                            const real *h, const int32_t *labels, double share, wreal *logits,
                            real *dh, ckpt_eng_result *loss, ckpt_err *err) CKPT_MUST_USE;
/* Side losses: sums over a micro-batch's ranks, means over micro-batches; expert counts: all. */
ckpt_status ENG(sum_side_losses)(ckpt_eng *e, const ENG(network) * m, ENG(run) * run,
                                 ckpt_err *err) CKPT_MUST_USE;

/* Types of real and wreal for collectives. */
#define COMM_OF(type)                                                                              \
    (sizeof(type) == 2 ? CKPT_COMM_BF16 : sizeof(type) == 4 ? CKPT_COMM_F32 : CKPT_COMM_F64)
#define COMM_REAL COMM_OF(real)
#define COMM_WREAL COMM_OF(wreal)

#endif
