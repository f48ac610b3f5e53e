/* Between model.c (matching) and model_check.c (is the result a whole model?). */
#ifndef CKPT_MODEL_INTERNAL_H
#define CKPT_MODEL_INTERNAL_H

#include "model.h"

/* Index of a kind by name, or CKPT_NO_KIND. */
int ckpt_kind_of(const char *name, size_t n);

/* One candidate reading of a stored tensor. */
typedef struct ckpt_match {
    uint32_t tensor, row;
    int64_t l, e;
    int block, kind; /* -1, CKPT_NO_KIND outside blocks */
} ckpt_match;

typedef struct ckpt_binder {
    ckpt_model *m;
    const ckpt_model_opts *opts;
    const ckpt_layout *layout;
    ckpt_match *matches;
    size_t n_matches, cap_matches;
    uint32_t *block_mask; /* candidate kinds per block */
    size_t n_blocks, cap_blocks;
    int *block_kind;
    bool *matched; /* per stored tensor */
    uint32_t *unknown;
    size_t n_unknown, cap_unknown;
    size_t cap_tensors, cap_notes, cap_ignored, cap_extras;
    const char *tags[16];
    int n_tags;
    ckpt_state_ref *refs; /* per stored tensor: optimizer state, see model_optim.c */
    size_t n_states;
    const char *state_tag;
} ckpt_binder;

/* Append a canonical tensor to the model; a stored tensor whole as an extra one. */
ckpt_status ckpt_bind_push(ckpt_binder *b, const ckpt_canon *c, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_bind_whole(ckpt_binder *b, uint32_t tensor, const char *name,
                            ckpt_err *err) CKPT_MUST_USE;

/* Append a printf-style note to the model. */
ckpt_status ckpt_bind_note(ckpt_binder *b, ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(3, 4);
/* model_optim.c: find the source's optimizer state (no layout has rows for it), and, once all weights
 * are built, add it under its parameters' names. */
ckpt_status ckpt_bind_find_states(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_bind_states(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
static inline bool ckpt_bind_is_state(const ckpt_binder *b, size_t tensor)
{
    return b->refs != NULL && b->refs[tensor].kind != CKPT_STATE_NONE &&
           b->refs[tensor].kind != CKPT_STATE_OTHER;
}
/* Every block has what the layout requires of its kind. */
ckpt_status ckpt_bind_complete(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Blocks against the configured pattern, head against the tied flag; gives the pattern seen. */
ckpt_status ckpt_bind_config(ckpt_binder *b, char **pattern_out, ckpt_err *err) CKPT_MUST_USE;
/* Complete the canonical configuration from sizes and pattern, and validate it. */
ckpt_status ckpt_bind_finish(ckpt_binder *b, const char *pattern, ckpt_err *err) CKPT_MUST_USE;
void ckpt_mesh_from_args(ckpt_model *m);
void ckpt_mesh_from_chunks(ckpt_model *m);

#endif
