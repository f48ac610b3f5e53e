/* The reader's state, shared by mp_rank_read.c and mp_rank_state.c. */
#ifndef CKPT_MP_RANK_READ_H
#define CKPT_MP_RANK_READ_H

#include "mp_rank.h"
#include "rank_join.h"
#include "rank_names.h"
#include "torch_save.h"

#define CKPT_MP_PREFIX "mp_rank_"
#define CKPT_MP_MAX_CHUNKS 4096     /* virtual stages of a rank */
#define CKPT_MP_MAX_EXPERTS 1000000 /* of a layer */

/* A box whose layer is still numbered inside its model chunk. */
typedef struct ckpt_mp_box {
    ckpt_piece piece;
    const char *head, *tail; /* of the stored name, around the layer number */
    int64_t layer;           /* -1: none */
    int chunk;
    bool state; /* of the optimizer */
} ckpt_mp_box;

/* One opened rank. */
typedef struct ckpt_mp_file {
    const ckpt_mp_dir *dir;
    ckpt_arena *arena; /* until the next rank */
    ckpt_pt pt;
    uint32_t file;
} ckpt_mp_file;

/* One parameter of it, or a state tensor of the optimizer for that parameter. */
typedef struct ckpt_mp_param {
    const char *name;   /* as the rank calls the parameter */
    const char *prefix; /* of the stored name: "" or "optimizer.state.exp_avg." */
    const ckpt_pkl *dict;
    const ckpt_mp_dir *dir;
    ckpt_pt_tensor t;
    uint32_t file;
    int chunk;
    bool state;
    /* set by ckpt_mp_add */
    ckpt_rank_place place;
    const ckpt_rank_rule *rule;
    const char *stored; /* rest of its stored name */
    int64_t expert, ways, way;
} ckpt_mp_param;

typedef struct ckpt_mp_reader {
    ckpt_source *src;
    const char *dir; /* holds the rank directories */
    char **names;    /* its listing */
    size_t n_names;
    ckpt_mesh mesh;
    ckpt_mp_dir *dirs;
    size_t n_dirs;
    int vpp;
    int64_t *counts; /* layers of every model chunk, -1 unknown */
    int64_t experts, local_experts;
    bool gated, tied, hybrid;
    size_t n_extra; /* _extra_state that is not None */
    ckpt_mp_box *boxes;
    size_t n_boxes, cap_boxes;
} ckpt_mp_reader;

/* Place one parameter: its boxes wait in r->boxes. */
ckpt_status ckpt_mp_add(ckpt_mp_reader *r, ckpt_mp_param *p, ckpt_err *err) CKPT_MUST_USE;
/* Model chunk v of a rank's dictionary, NULL if there is none. */
const ckpt_pkl *ckpt_mp_model(const ckpt_pkl *root, int v);
/* Optimizer state inside the rank's dictionary, or the reason why it is not read. */
ckpt_status ckpt_mp_optimizer(ckpt_mp_reader *r, const ckpt_mp_file *f,
                              ckpt_err *err) CKPT_MUST_USE;
/* The rank's dictionary without its models, for display. NULL: out of memory. */
ckpt_json *ckpt_mp_display(const ckpt_pkl *root, ckpt_arena *arena);

#endif
