/* Names of stored optimizer state, and what they say.
 *
 *   optimizer.state.S.KEY               Megatron: S = param exp_avg exp_avg_sq (fully_reshardable), or
 *                                       fp32_param … momentum_buffer (fully_sharded_model_space, and
 *                                       the mixed-precision and FP32 optimizers); also how ckpt
 *                                       itself stores states beside Hugging Face tensors
 *   chained_C.optimizer.state.S.KEY     the same under one of several chained optimizers
 *   optim.state.KEY.S                   torch.distributed.checkpoint of {"model":…, "optim":…}
 *   optimizer.state.KEY.S, opt.…, optimizer_state_dict.…, state.KEY.S
 *                                       the same under other outer names
 *   OUTER.state.…, OUTER.param_groups…  torch.optim's own state dict, or what FSDP makes of it; OUTER
 *                                       ends in a word for an optimizer (opt, optim, optimizer, …), or
 *                                       OUTER.param_groups is among the objects
 *
 * KEY is the stored name of the parameter (which may itself lie under an outer "model."). Which of
 * the forms a name has is decided by the parameter that exists, never by guessing. Source:
 * megatron-dist-ckpt.md section 5; torch.distributed.checkpoint.state_dict of PyTorch 2.11. */
#ifndef CKPT_OPTIM_NAMES_H
#define CKPT_OPTIM_NAMES_H

#include "source.h"

/* One stored state tensor, seen from its parameter. */
typedef struct ckpt_state {
    const char *name;           /* canonical: exp_avg exp_avg_sq master momentum step … */
    const char *before, *after; /* stored name = before + KEY + after */
    const char *tag;            /* "optim=FORM" */
    bool scalar;                /* one number for the whole parameter, such as step */
} ckpt_state;

typedef enum ckpt_state_kind {
    CKPT_STATE_NONE,     /* no optimizer state */
    CKPT_STATE_OF,       /* of a stored parameter */
    CKPT_STATE_ORPHAN,   /* of a parameter that is not stored */
    CKPT_STATE_NUMBERED, /* of parameter number n: torch.optim's own state dict */
    CKPT_STATE_BUCKET,   /* dp_reshardable: a flat bucket of many parameters */
    CKPT_STATE_OTHER     /* under an optimizer's name, but no state of a parameter */
} ckpt_state_kind;

typedef struct ckpt_state_ref {
    ckpt_state_kind kind;
    size_t key, key_len;     /* of KEY in the name */
    size_t state, state_len; /* of S in the name */
    int64_t param;           /* index of the parameter's tensor, or -1 */
    const char *tag;
} ckpt_state_ref;

/* What the name of a stored tensor says. The source must be sorted. */
void ckpt_state_parse(const ckpt_source *src, const char *name, ckpt_state_ref *out);
/* True for the names of tensors and objects that belong to an optimizer, whatever they mean. */
bool ckpt_is_optimizer(const ckpt_source *src, const char *name);
/* Canonical word of S, n characters, in the arena; NULL: out of memory. */
const char *ckpt_state_word(ckpt_arena *arena, const char *s, size_t n);
/* Fill `out` (strings in the arena) for a name parsed as CKPT_STATE_OF; false: out of memory. */
bool ckpt_state_make(ckpt_arena *arena, const char *name, const ckpt_state_ref *ref,
                     ckpt_state *out);
/* Stored name of the state of KEY in the form that `tags` chose ("optim=FORM" among others), else
 * fully_reshardable's. expert: the parameter is one of experts, for chained forms. NULL: out of
 * memory. */
const char *ckpt_state_spell(ckpt_arena *arena, const char *tags, const char *state,
                             const char *key, bool expert);
/* Megatron's distrib_optim_sharding_type of a form ("optim=FORM"), or NULL if it has none. */
const char *ckpt_state_sharding_type(const char *tag);

#endif
