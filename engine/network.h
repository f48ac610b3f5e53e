/* A whole model on the engine: a stack of residual blocks of any kinds, built from the canonical
 * schema and configuration of a checkpoint, whatever its container, layout and mesh.
 *
 * Parameters keep their canonical names and shapes. The head shares the embedding's parameter when
 * the model is tied. What the engine cannot run (Mamba-2 blocks, unknown tensors) is CKPT_E_UNSUPPORTED
 * by name; a configuration or tensor that does not fit is CKPT_E_FORMAT. */
#ifndef CKPT_ENGINE_NETWORK_H
#define CKPT_ENGINE_NETWORK_H

#include "attn.h"
#include "blocks.h"
#include "moe.h"
#include "par.h"
#include "spec.h"

#define CKPT_ENG_ALIGN 64 /* elements: wide loads of either type */

typedef struct ENG(param) {
    const char *name; /* canonical */
    int64_t n;        /* elements that this rank holds: box.n; 0 = none of it */
    ckpt_eng_box box; /* of one process: the whole tensor */
    size_t tensor;    /* index in the checkpoint's model */
    unsigned flags;   /* CKPT_SCHEMA_* */
    bool wide;        /* x is a wreal array */
    int64_t at;       /* first element in data, grads; on a device a multiple of CKPT_ENG_ALIGN,
                         with zeros before it */
    real *x, *grad;   /* grad NULL: not trained (the router's correction bias), or n is 0 */
} ENG(param);

typedef union ENG(block_params) {
    ENG(linattn_params) linattn;
    ENG(mla_params) mla;
    ENG(gqa_params) gqa;
    ENG(mlp_params) mlp;
    ENG(moe_params) moe;
} ENG(block_params);

typedef struct ENG(block) {
    ckpt_eng_block spec; /* with the heads that this rank holds */
    wreal *norm, *dnorm; /* [H] */
    ENG(block_params) p, g;
} ENG(block);

typedef struct ENG(mtp_depth) {
    wreal *enorm, *hnorm, *norm, *denorm, *dhnorm, *dnorm;
    real *eh_proj, *deh_proj;
} ENG(mtp_depth);

typedef struct ENG(network) {
    ckpt_eng_spec spec;
    ENG(block) * blocks; /* spec.n_blocks */
    ENG(param) * params; /* sorted by name */
    size_t n_params;
    int64_t n_elements; /* of all parameters, as far as this rank holds them */
    real *embed, *head, *dembed, *dhead;
    wreal *final_norm, *dfinal_norm;
    ENG(mtp_depth) * mtp; /* spec.mtp_layers */
    wreal *data, *grads;  /* n_elements each; grads NULL without gradients */
    real *matrices; /* bf16 on a device: those of data that products read, rounded; else data */
    struct ckpt_eng_device *device; /* whose memory the arrays are in; NULL: this process's */
    ckpt_eng_range vocab;           /* rows of embedding and head that this rank holds */
    ckpt_comm keys;                 /* ranks that hold the same key heads, where they are shared */
} ENG(network);

/* Build from a bound checkpoint and read its parameters, cast to the engine's type, on e's threads.
 * `gradients`: room for them too. With e->par only this rank's parts are read. */
ckpt_status ENG(network_open)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              const ckpt_eng_spec_opts *opts, bool gradients,
                              ckpt_err *err) CKPT_MUST_USE;
void ENG(network_close)(ENG(network) * m);
/* By canonical name, or NULL. */
const ENG(param) * ENG(network_param)(const ENG(network) * m, const char *name);
ckpt_status ENG(network_zero_grads)(ENG(network) * m, ckpt_err *err) CKPT_MUST_USE;

/* With e->par (else nothing happens): complete the gradients, each the sum over the ranks that hold the
 * same part. After the last micro-batch of a step. */
ckpt_status ENG(network_sum_grads)(ckpt_eng *e, ENG(network) * m, ckpt_err *err) CKPT_MUST_USE;
/* Ranks that hold the same part of p. NULL in one process. */
ckpt_comm *ENG(network_holders)(const ckpt_eng *e, ENG(network) * m, const ENG(param) * p);
/* Of the ranks that hold the same part, is this the first? Sums over all parts take it alone. */
bool ENG(network_first)(const ckpt_eng *e, ENG(network) * m, const ENG(param) * p);
/* The whole of parameter p, row-major, into `out` on rank 0 of the run (elsewhere NULL); `from` is this
 * rank's part (p->x, p->grad or a moment), [p->n]. All ranks call it. out takes the product of
 * box.dims; a rank sends what it is the first to hold. */
ckpt_status ENG(network_gather)(ckpt_eng *e, ENG(network) * m, const ckpt_model *src,
                                const ENG(param) * p, const wreal *from, wreal *out,
                                ckpt_err *err) CKPT_MUST_USE;

/* With e->par: the micro-batch of this data-parallel rank, the same on its tp * cp ranks. */
typedef struct ENG(batch) {
    const ckpt_eng_seq *seq;
    const int32_t *ids, *labels; /* [T]; labels NULL: no loss; label < 0: none for this token */
} ENG(batch);

typedef struct ENG(run) {
    bool backward;  /* gradients are added to */
    bool recompute; /* keep only block inputs from forward to backward; same bits, less memory */
    double mtp_coef;
    wreal *logits; /* out, [T, V]; or NULL: not wanted */
    double loss;   /* out: mean over labelled tokens, of all data-parallel ranks together */
    double mtp_loss, aux_loss, z_loss;
    int64_t *expert_counts; /* out or NULL: [n_blocks, E], tokens of every expert */
} ENG(run);

/* One forward, and backward when asked. While e is dry: only the sizes. Errors also name the first
 * block whose output is not finite (CKPT_E_MISMATCH). */
ckpt_status ENG(network_run)(ckpt_eng *e, const ENG(network) * m, const ENG(batch) * batch,
                             ENG(run) * run, ckpt_err *err) CKPT_MUST_USE;

#endif
