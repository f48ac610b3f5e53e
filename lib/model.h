/* A checkpoint seen through its layout: every canonical tensor, and where it lies. */
#ifndef CKPT_MODEL_H
#define CKPT_MODEL_H

#include "config.h"
#include "layout.h"
#include "optim_names.h"
#include "source.h"

/* Kinds of block, in the order of their bits, with their pattern letters. */
typedef struct ckpt_kind {
    const char *name;
    char letter;
} ckpt_kind;
#define CKPT_N_KINDS 8
#define CKPT_NO_KIND (-1)
extern const ckpt_kind ckpt_kinds[CKPT_N_KINDS];

typedef struct ckpt_canon {
    const char *name; /* canonical, or the stored name when `extra` */
    const int64_t *dims;
    int rank;
    ckpt_dtype dtype;
    uint64_t bytes;
    uint32_t stored; /* index into source->tensors */
    ckpt_map map;    /* box of the view of the stored tensor; row-major box order = tensor order */
    const ckpt_row *row;                /* NULL when extra */
    int block;                          /* -1 outside blocks */
    unsigned flags;                     /* CKPT_SCHEMA_* */
    const struct ckpt_derived *derived; /* computed from other tensors; NULL = stored */
    int shift;  /* stored value minus canonical value: -1 for a zero-centred norm, else 0 */
    bool extra; /* no row matched: passed through whole under its stored name */
    /* Optimizer state: name is "optimizer.STATE.PARAM", and map, block and row are the parameter's;
     * a scalar has no axes to cut and may serve several parameters. NULL = no state. */
    const ckpt_state *state;
    const char *param; /* canonical name of the parameter; of a weight its own name */
} ckpt_canon;

typedef struct ckpt_model {
    ckpt_source *src; /* borrowed */
    ckpt_arena arena;
    const ckpt_layout *layout; /* NULL: no family matched, every tensor is extra */
    ckpt_symtab syms;
    ckpt_json *config;   /* canonical; NULL when layout is NULL */
    ckpt_canon *tensors; /* sorted bytewise by name */
    size_t n_tensors;
    ckpt_canon *copies; /* stored tensors that repeat another; name is that one's canonical name.
                           Not part of tensors, digests or the root */
    size_t n_copies;
    size_t n_fp8; /* weights in F8 blocks that are dequantised while they are read (fp8_raw: not) */
    bool fp8_raw;
    size_t n_packed; /* weights in NVFP4 or MXFP8, dequantised while they are read */
    int n_blocks;    /* those of multi-token prediction included */
    int n_main;      /* those before them */
    const char
        *tags; /* comma-separated choices seen in the source ("mlp_norms=separate,kda=fused") */
    ckpt_mesh mesh;       /* as recognised from args and chunk grids; informational */
    const char **ignored; /* stored tensors left out by the layout's ignore list */
    size_t n_ignored;
    const char **extras; /* stored names of the tensors marked extra, sorted */
    size_t n_extras;
    const char **notes; /* e.g. "vocabulary padding: 192 rows, 3 non-zero (max abs 0.5)" is not
                           computed here; notes hold what binding saw */
    size_t n_notes;
} ckpt_model;

typedef struct ckpt_model_opts {
    const ckpt_layout *layout; /* force; NULL = detect */
    const ckpt_json *config;   /* canonical, of a manifest: gives sizes that shapes leave open where
                                  the source has no configuration; may be NULL */
    const char *layout_group;  /* restrict detection to a --layout group, or NULL */
    bool allow_unknown;        /* stored tensors without a row become extra instead of an error */
    bool fp8_raw;              /* F8 weights and their scales as they are stored, not dequantised */
    bool lenient;              /* inspect: unknown tensors, missing ones and config conflicts are
                                  collected as notes, never errors */
    bool keep_buckets;         /* inspect: flat optimizer buckets (rescue.h) are shown as stored */
} ckpt_model_opts;

/* Detect the layout, match every stored tensor, bind sizes, check shapes against the schema and the
 * configuration, and sort. The map of every canonical tensor is complete afterwards.
 * Errors: CKPT_E_FORMAT shape/config contradictions (tensor, found, expected); CKPT_E_UNSUPPORTED
 * unknown tensors (all listed, at most 8 named, with the nearest known name) or two layouts;
 * CKPT_E_FORMAT canonical tensors of a block that are absent ("missing tensor ..."). */
ckpt_status ckpt_model_bind(ckpt_model *model, ckpt_source *src, const ckpt_model_opts *opts,
                            ckpt_err *err) CKPT_MUST_USE;
void ckpt_model_release(ckpt_model *model);
/* False of a parameter that no optimizer moves, so that it has no state: the router's correction bias,
 * which balancing sets. name: canonical. */
bool ckpt_canon_trains(const char *name);
/* By canonical name, or -1. */
int64_t ckpt_model_find(const ckpt_model *model, const char *name);

/* Several layouts of one group may serve a family: the one that an earlier configuration of the
 * group (foreign, may be NULL) belongs to, else the first usual one for such models that can express
 * this one, else the first that can, else the one with places for most of it; NULL if the group has
 * none. */
const ckpt_layout *ckpt_layout_for(const ckpt_model *model, const ckpt_json *foreign,
                                   const ckpt_mesh *mesh, const char *group);

/* A model whose configuration ties the head to the embedding but that stores a head as well. Reads
 * both tensors unless their types already differ. */
typedef enum ckpt_tied {
    CKPT_TIED_NO_QUESTION, /* not tied, or only one of them stored */
    CKPT_TIED_EQUAL,
    CKPT_TIED_DIFFERS
} ckpt_tied;
ckpt_status ckpt_model_tied(const ckpt_model *model, ckpt_tied *out, ckpt_err *err) CKPT_MUST_USE;

/* Does copies[copy] hold the bytes of the tensor it repeats? Reads both. */
ckpt_status ckpt_model_copy_equal(const ckpt_model *model, size_t copy, bool *equal,
                                  ckpt_err *err) CKPT_MUST_USE;

/* Read [lo, lo+n) bytes of a canonical tensor's row-major bytes (after big-endian swap). n and lo
 * need not be element-aligned. Convenience over plan.h for small reads: inspect --head, tests. */
ckpt_status ckpt_model_read(const ckpt_model *model, size_t tensor, uint64_t lo, size_t n,
                            void *out, ckpt_err *err) CKPT_MUST_USE;

#endif
