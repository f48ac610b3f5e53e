/* Between model_match.c (names), model.c (sizes) and model_check.c (is the result a whole model?). */
#ifndef CKPT_MODEL_INTERNAL_H
#define CKPT_MODEL_INTERNAL_H

#include "model.h"

/* Index of a kind by name, or CKPT_NO_KIND. */
int ckpt_kind_of(const char *name, size_t n);

/* One candidate reading of a stored tensor. */
typedef struct ckpt_match {
    uint32_t tensor, row;
    ckpt_index at;
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
    size_t cap_tensors, cap_copies, cap_notes, cap_ignored, cap_extras;
    size_t stacked;      /* blocks that stacked tensors account for */
    const char *choices; /* that follow from the configuration */
    bool configured;     /* there was one */
    const char *tags[16];
    int n_tags;
    ckpt_state_ref *refs; /* per stored tensor: optimizer state, see model_optim.c */
    size_t n_states;
    const char *state_tag;
    uint32_t *scale_of; /* stored tensor that scales the blocks of a stored one, or CKPT_NO_SCALE */
} ckpt_binder;

/* Append a canonical tensor to the model; a stored tensor whole as an extra one. */
ckpt_status ckpt_bind_push(ckpt_binder *b, const ckpt_canon *c, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_bind_whole(ckpt_binder *b, uint32_t tensor, const char *name,
                            ckpt_err *err) CKPT_MUST_USE;

/* model_match.c, in this order */
ckpt_status ckpt_bind_detect(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Candidate rows of every stored tensor and the kinds each block allows. */
ckpt_status ckpt_bind_match(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Sort out tensors that no row explains: ignored by the layout, or unknown. */
ckpt_status ckpt_bind_unknown(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Refuse the unknown ones, by name. */
ckpt_status ckpt_bind_refuse(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Settle the kind of each block, from its tensors, else from the configured pattern. */
ckpt_status ckpt_bind_kinds(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Stored name and number of dimensions. */
bool ckpt_row_fits(const ckpt_row *row, const ckpt_tensor *t, ckpt_index *at);
ckpt_status ckpt_push_name(const char ***list, size_t *n, size_t *cap, const char *name,
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
/* model_fp8.c: block-quantised weights; before unknown tensors are sorted out, and once canonical
 * tensors are built. */
#define CKPT_NO_SCALE UINT32_MAX
ckpt_status ckpt_bind_scales(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_bind_dequantised(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Every block has what the layout requires of its kind. */
ckpt_status ckpt_bind_complete(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
/* Blocks against the configured pattern, head against the tied flag; gives the pattern seen. */
ckpt_status ckpt_bind_config(ckpt_binder *b, char **pattern_out, ckpt_err *err) CKPT_MUST_USE;
/* Complete the canonical configuration from sizes and pattern, and validate it. */
ckpt_status ckpt_bind_finish(ckpt_binder *b, const char *pattern, ckpt_err *err) CKPT_MUST_USE;
/* Depths of multi-token prediction that are configured but not stored leave the configuration. */
ckpt_status ckpt_bind_depths_stored(ckpt_binder *b, ckpt_err *err) CKPT_MUST_USE;
void ckpt_mesh_from_args(ckpt_model *m);
void ckpt_mesh_from_chunks(ckpt_model *m);

#endif
