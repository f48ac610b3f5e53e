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
#include "spec.h"
#include "moe.h"

typedef struct ENG(param) {
    const char *name; /* canonical */
    int64_t n;        /* elements */
    size_t tensor;    /* index in the checkpoint's model */
    unsigned flags;   /* CKPT_SCHEMA_* */
    real *x, *grad;   /* grad NULL: not trained (the router's correction bias) */
} ENG(param);

typedef union ENG(block_params) {
    ENG(linattn_params) linattn;
    ENG(mla_params) mla;
    ENG(gqa_params) gqa;
    ENG(mlp_params) mlp;
    ENG(moe_params) moe;
} ENG(block_params);

typedef struct ENG(block) {
    ckpt_eng_block spec;
    real *norm, *dnorm; /* [H] */
    ENG(block_params) p, g;
} ENG(block);

typedef struct ENG(mtp_depth) {
    real *enorm, *hnorm, *eh_proj, *norm, *denorm, *dhnorm, *deh_proj, *dnorm;
} ENG(mtp_depth);

typedef struct ENG(network) {
    ckpt_eng_spec spec;
    ENG(block) * blocks; /* spec.n_blocks */
    ENG(param) * params; /* sorted by name */
    size_t n_params;
    int64_t n_elements; /* of all parameters */
    real *embed, *head, *final_norm, *dembed, *dhead, *dfinal_norm;
    ENG(mtp_depth) * mtp; /* spec.mtp_layers */
    real *data, *grads;   /* n_elements each; grads NULL without gradients */
} ENG(network);

/* Build from a bound checkpoint and read its parameters, cast to the engine's type, on e's threads.
 * `gradients`: room for them too. */
ckpt_status ENG(network_open)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              const ckpt_eng_spec_opts *opts, bool gradients,
                              ckpt_err *err) CKPT_MUST_USE;
void ENG(network_close)(ENG(network) * m);
/* By canonical name, or NULL. */
const ENG(param) * ENG(network_param)(const ENG(network) * m, const char *name);
void ENG(network_zero_grads)(ENG(network) * m);

typedef struct ENG(batch) {
    const ckpt_eng_seq *seq;
    const int32_t *ids, *labels; /* [T]; labels NULL: no loss; label < 0: none for this token */
} ENG(batch);

typedef struct ENG(run) {
    bool backward;  /* gradients are added to */
    bool recompute; /* keep only block inputs from forward to backward; same bits, less memory */
    double mtp_coef;
    real *logits; /* out, [T, V]; or NULL: not wanted */
    double loss;  /* out: mean over labelled tokens */
    double mtp_loss, aux_loss, z_loss;
    int64_t *expert_counts; /* out or NULL: [n_blocks, E], tokens of every expert */
} ENG(run);

/* One forward, and backward when asked. While e is dry: only the sizes. Errors also name the first
 * block whose output is not finite (CKPT_E_MISMATCH). */
ckpt_status ENG(network_run)(ckpt_eng *e, const ENG(network) * m, const ENG(batch) * batch,
                             ENG(run) * run, ckpt_err *err) CKPT_MUST_USE;

#endif
