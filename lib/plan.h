/* Plans: where every destination byte comes from.
 *
 * The unit is a gather: one contiguous destination (a chunk to write, or a canonical tensor to
 * hash) described by strided copies from source files. Copies come from intersecting boxes: the
 * destination's view, the source's view, and the source's chunks. Coverage is proved when the plan
 * is built: every destination byte is written exactly once or is declared padding. */
#ifndef CKPT_PLAN_H
#define CKPT_PLAN_H

#include "model.h"

/* Nested loops, outermost first in destination order. Strides and offsets in bytes; the element
 * itself (element size bytes) is the innermost, implicit loop. */
typedef struct ckpt_loop {
    int64_t n, src, dst;
} ckpt_loop;

typedef struct ckpt_copy {
    const ckpt_loop *loop;
    uint64_t src;  /* byte in the file of the first element */
    uint64_t dst;  /* byte in the destination, in source-dtype elements */
    uint64_t last; /* dst of the last element: dst + sum (n-1)*dst stride */
    uint32_t file;
    int n_loops;
    const struct ckpt_derived *derived; /* what a copy from CKPT_DERIVED_FILE is computed from */
} ckpt_copy;

typedef struct ckpt_gather {
    const char *name;  /* of the tensor, for progress; may be NULL */
    ckpt_copy *copies; /* sorted by dst */
    size_t n_copies;
    uint64_t bytes;      /* of the destination in the source dtype */
    uint64_t pad;        /* bytes of it that are zero fill */
    ckpt_dtype from, to; /* to != from: cast while gathering */
    bool swap;           /* source is big-endian */
    /* Added to every value, rounded to the element type each time: before the cast, after it, and
     * then once more (what re-reading a shifted tensor gives). All 0: none. */
    int8_t add_from, add_to, add_back;
} ckpt_gather;

/* Elements arrive with the bytes that they have in the file. */
static inline bool ckpt_gather_keeps_bytes(const ckpt_gather *g)
{
    return !g->swap && g->to == g->from && g->add_from == 0 && g->add_to == 0 && g->add_back == 0;
}

/* Gather of a canonical tensor, row-major. */
ckpt_status ckpt_plan_canon(const ckpt_model *model, size_t tensor, ckpt_arena *arena,
                            ckpt_gather *out, ckpt_err *err) CKPT_MUST_USE;

/* Gather of the part [lo, lo + len) of a canonical tensor (an index range of every axis), row-major. */
ckpt_status ckpt_plan_box(const ckpt_model *model, size_t tensor, const int64_t *lo,
                          const int64_t *len, ckpt_arena *arena, ckpt_gather *out,
                          ckpt_err *err) CKPT_MUST_USE;

/* Scratch needed by ckpt_gather_run for n destination bytes. */
typedef struct ckpt_scratch {
    uint8_t *buf; /* cap bytes, used when casting */
    size_t cap;
} ckpt_scratch;

/* Produce destination bytes [lo, lo+n) (in the `to` dtype) into out. Thread-safe. */
ckpt_status ckpt_gather_run(ckpt_source *src, const ckpt_gather *g, uint64_t lo, size_t n,
                            uint8_t *out, ckpt_scratch *scratch, ckpt_err *err) CKPT_MUST_USE;

/* ---- conversion ----------------------------------------------------------------------------- */

typedef enum ckpt_cast_policy { CKPT_CAST_KEEP, CKPT_CAST_TO } ckpt_cast_policy;

struct ckpt_plan;

typedef struct ckpt_convert_opts {
    const struct ckpt_container *container; /* target */
    const ckpt_layout *layout;              /* target; NULL = keep the source's */
    ckpt_mesh mesh;
    bool sharded;     /* container cuts tensors over the mesh (torch_dist) */
    const char *tags; /* user choices, comma-separated, or NULL */
    const char *const *include, *const *exclude; /* globs on canonical or stored names */
    size_t n_include, n_exclude;
    const char *const *rename; /* FROM=TO pairs on target stored names (exact or one '*') */
    size_t n_rename;
    ckpt_cast_policy cast;
    ckpt_dtype dtype;
    bool dtype_force; /* cast the keep-list too */
    bool allow_unknown, allow_unknown_objects, approximate;
    bool fold_f, fold_g;    /* --kda-f-lora-rank none, --kda-gate-lora-rank none */
    int64_t f_rank, g_rank; /* > 0: requested rank (equal: no-op; else an SVD), 0: keep */
    uint64_t max_shard_bytes;
    bool single_file, bare;
    int deflate;                     /* see ckpt_out */
    const char *quant_policy;        /* stored text (policy.h) for the target's metadata, or NULL */
    const ckpt_json *foreign_config; /* an earlier configuration of the target's kind, or NULL */
    bool has_groups; /* before_layout adds the common state that the optimizer's states need */
    /* Called when plan->config and plan->out.objects are settled, before files are laid out: may
     * replace objects (a rewritten common state). NULL = nothing. */
    ckpt_status (*before_layout)(void *self, struct ckpt_plan *plan, ckpt_err *err);
    void *self;
} ckpt_convert_opts;

/* One canonical tensor of the result: its digest is over what is written. */
typedef struct ckpt_result_tensor {
    const char *name;
    const char *stored; /* target stored name */
    ckpt_dtype dtype;
    int rank;
    const int64_t *dims;
    ckpt_gather gather;   /* canonical row-major bytes in the written dtype */
    bool changed;         /* the values are not the source's: cast, rounded */
    ckpt_gather original; /* as in the source, if changed; else identical to gather */
    uint32_t out_tensor;  /* index in out.tensors of the tensor that holds it */
    ckpt_map map;         /* its box in that tensor */
    int shift;            /* stored minus canonical value there */
    int64_t model_tensor; /* index in the source model, -1 for a derived one */
    int replaces;         /* tensors of the source model that it stands for */
    bool carried; /* whole and under its own name: no row of the target's layout is for it */
} ckpt_result_tensor;

typedef struct ckpt_plan {
    ckpt_model *model;
    ckpt_arena arena;
    ckpt_out out;
    ckpt_sink sink;
    ckpt_gather **chunks;        /* [tensor][chunk] */
    ckpt_result_tensor *results; /* sorted by canonical name */
    size_t n_results;
    ckpt_result_tensor
        *repeats; /* written again elsewhere: name is that of the result they equal */
    size_t n_repeats;
    /* How the output lies in the source of its own gathers: NULL, `map` above says it; else the tensor
     * of `out` that a file of model->src holds from its first byte to its last, -1: none. */
    const int64_t *image;
    /* Nothing is written: the sink's files are those of model->src, whose bytes lie where they are. */
    bool in_place;
    const char **lossy; /* one line each: what was approximated */
    size_t n_lossy;
    const char **dropped; /* one line each: what is left out and why */
    size_t n_dropped;
    const char **warnings; /* one line each: legal, but the user should know */
    size_t n_warnings;
    const char **not_cast; /* tensors --dtype left alone, with the reason */
    size_t n_not_cast;
    ckpt_json *config; /* target's stored configuration */
    ckpt_json *canon_config;
    ckpt_json *metadata; /* carried safetensors __metadata__ */
    uint64_t payload_bytes, total_bytes;
    /* Canonical tensors of the source that are not in the result: left out by the user's patterns
     * or with their parameter, and states whose parameter changes by more than an exact transform. */
    size_t n_left_out, n_reset;
    struct ckpt_factor *factors; /* to be computed by ckpt_factor_run before anything is read */
    int factor_fd;               /* their values; closed on release if factors is not NULL */
    size_t n_states;             /* optimizer tensors among the results */
} ckpt_plan;

/* Build the whole plan; nothing is created on disk. Errors name the tensor: CKPT_E_UNSUPPORTED
 * (the target has no slot, lossy step without --approximate, unknown object), CKPT_E_USAGE
 * (indivisible by the mesh), CKPT_E_FORMAT (coverage of the source). */
ckpt_status ckpt_plan_convert(ckpt_plan *plan, ckpt_model *model, const ckpt_convert_opts *opts,
                              ckpt_err *err) CKPT_MUST_USE;
void ckpt_plan_release(ckpt_plan *plan);

#endif
