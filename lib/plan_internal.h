/* Between plan.c, plan_items.c and padding.c. */
#ifndef CKPT_PLAN_INTERNAL_H
#define CKPT_PLAN_INTERNAL_H

#include "plan.h"

/* One canonical tensor on its way to the target. */
typedef struct ckpt_item {
    ckpt_canon canon;     /* source side */
    int64_t model_tensor; /* -1: derived */
    int replaces;         /* tensors of the model that it stands for */
    const ckpt_row *row;  /* target row, NULL: whole under `stored` */
    const char *stored;   /* target stored name */
    ckpt_map map;         /* box in the target's view */
    int rank;             /* target stored shape */
    const int64_t *dims;
    ckpt_dtype dtype; /* written */
    uint32_t out;     /* out tensor */
    int shift;        /* stored minus canonical value in the target */
    bool lossy_shift; /* the shift does not round-trip */
    bool copy;        /* repeats a tensor that another item writes: not in the results */
    bool dropped;
} ckpt_item;

typedef struct ckpt_planner {
    ckpt_plan *plan;
    ckpt_model *model;
    const ckpt_convert_opts *opts;
    const ckpt_layout *layout; /* target, NULL if the source has none */
    bool same_layout, folded;
    ckpt_symtab syms;
    ckpt_item *items;
    size_t n_items, cap_items;
    const char *shape_tags;   /* choices that follow from the tensors: kda=fused or kda=split */
    const char *config_tags;  /* that follow from the canonical configuration */
    const char *written_tags; /* that follow from the configuration being written */
    bool warned_heads;
    size_t cap_lossy, cap_dropped, cap_not_cast, cap_warnings;
} ckpt_planner;

/* Append one printf-style line to a malloc'd list of the plan. */
ckpt_status ckpt_plan_line(ckpt_plan *plan, const char ***list, size_t *n, size_t *cap,
                           ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(6, 7);
#define DROPPED(p, err, ...)                                                                       \
    ckpt_plan_line((p)->plan, &(p)->plan->dropped, &(p)->plan->n_dropped, &(p)->cap_dropped, err,  \
                   __VA_ARGS__)
#define LOSSY(p, err, ...)                                                                         \
    ckpt_plan_line((p)->plan, &(p)->plan->lossy, &(p)->plan->n_lossy, &(p)->cap_lossy, err,        \
                   __VA_ARGS__)
#define WARN(p, err, ...)                                                                          \
    ckpt_plan_line((p)->plan, &(p)->plan->warnings, &(p)->plan->n_warnings, &(p)->cap_warnings,    \
                   err, __VA_ARGS__)
#define NOT_CAST(p, err, ...)                                                                      \
    ckpt_plan_line((p)->plan, &(p)->plan->not_cast, &(p)->plan->n_not_cast, &(p)->cap_not_cast,    \
                   err, __VA_ARGS__)

ckpt_status ckpt_plan_push(ckpt_planner *p, const ckpt_canon *c, int64_t index,
                           ckpt_err *err) CKPT_MUST_USE;
/* Whether --include and --exclude let a tensor of the model through. */
bool ckpt_plan_selected(const ckpt_planner *p, const ckpt_canon *c);

/* plan_items.c and plan_rows.c, in this order */
/* Tensors of the model that pass --include and --exclude. */
ckpt_status ckpt_plan_select(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Requested KDA ranks: folds, refusals; then the choices that follow from the tensors. */
ckpt_status ckpt_plan_ranks(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Row, stored name, shape and box of every tensor in the target. */
ckpt_status ckpt_plan_place(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* plan_factor.c: X becomes X_b . X_a of a rank; X is item `index`, or the product of two. */
ckpt_status ckpt_plan_split(ckpt_planner *p, size_t index, int64_t rank,
                            ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_plan_rerank(ckpt_planner *p, size_t low, size_t high, const char *name,
                             int64_t rank, ckpt_err *err) CKPT_MUST_USE;
void ckpt_plan_close_factors(ckpt_plan *plan);
/* plan_optim.c */
/* The optimizer state of the weights that are still there: exactly as they are, or not at all. */
ckpt_status ckpt_plan_states(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Target stored name of a state whose parameter's is `key`; NULL: out of memory. */
const char *ckpt_plan_state_name(ckpt_planner *p, const ckpt_item *it, const char *key);
/* Items [first, last) share one scalar of the target: all must be equal. */
ckpt_status ckpt_plan_same_scalar(ckpt_planner *p, size_t first, size_t last,
                                  ckpt_err *err) CKPT_MUST_USE;

/* Whether an object of the source still means something at the target's mesh; if not, says why. */
ckpt_status ckpt_plan_keep_object(ckpt_planner *p, const char *name, bool *keep,
                                  ckpt_err *err) CKPT_MUST_USE;

/* Written dtype of every tensor. */
ckpt_status ckpt_plan_dtypes(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Zero-centred norms: which of them lose bits by their shift (needs --approximate). */
ckpt_status ckpt_plan_shifts(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* plan_copies.c: copies in the source equal what they repeat (CKPT_E_MISMATCH). */
ckpt_status ckpt_plan_check_copies(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* After placing: items for the copies that the target wants, a line for those that it does not. */
ckpt_status ckpt_plan_add_copies(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Row, name, shape and box of one item, given the row's indices. */
ckpt_status ckpt_plan_place_row(ckpt_planner *p, ckpt_item *it, const ckpt_row *row,
                                const ckpt_index *at, ckpt_err *err) CKPT_MUST_USE;
/* -1 nobody decides, 0 another choice, 1 chosen. */
int ckpt_plan_tag(const ckpt_planner *p, const char *tag);
/* Do two canonical tensors of one source hold the same bytes? */
ckpt_status ckpt_canon_equal(ckpt_source *src, const ckpt_canon *a, const ckpt_canon *b, bool *same,
                             ckpt_err *err) CKPT_MUST_USE;

/* The part of a padded axis beyond the box, as a map; false if the view has no padding. */
bool ckpt_pad_map(const ckpt_row *row, const ckpt_map *map, ckpt_arena *arena, ckpt_map *out);
/* A configuration that says "tied" beside a head of its own: CKPT_E_MISMATCH if the two tensors
 * differ (which one is right is the user's choice), a warning if they are equal. */
ckpt_status ckpt_plan_tied(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;
/* Warn about padding rows of the source that hold something other than zero: they are dropped. */
ckpt_status ckpt_plan_padding(ckpt_planner *p, ckpt_err *err) CKPT_MUST_USE;

#endif
