/* Megatron's legacy per-rank checkpoints, shared by mp_rank*.c only. */
#ifndef CKPT_MP_RANK_H
#define CKPT_MP_RANK_H

#include "pickle.h"
#include "source.h"

#define CKPT_MP_FILE "model_optim_rng.pt"

/* One rank directory of a mesh: mp_rank_TT[_PPP][_EEE]. */
typedef struct ckpt_mp_dir {
    const char *name;
    int tp, pp, ep, etp;
} ckpt_mp_dir;

/* The directories of a mesh, in order of pp, ep, tp; in the arena. Errors: CKPT_E_UNSUPPORTED two
 * ranks that hold different experts would share a directory (ETP unlike TP). */
ckpt_status ckpt_mp_dirs(const ckpt_mesh *mesh, ckpt_arena *arena, ckpt_mp_dir **dirs, size_t *n,
                         ckpt_err *err) CKPT_MUST_USE;

/* How decoder layers are dealt out to model chunks. A chunk is one virtual stage of one stage:
 * number c = virtual * pp + stage, in the order in which data passes through them. */
typedef struct ckpt_mp_stages {
    int pp, vpp;
    int64_t *first; /* pp * vpp + 1 entries: first layer of chunk c */
} ckpt_mp_stages;
/* layers in equal parts, or as a hybrid pattern's '|' cut them. Errors: CKPT_E_USAGE. */
ckpt_status ckpt_mp_stages_of(const ckpt_json *args, const ckpt_mesh *mesh, int64_t layers,
                              ckpt_arena *arena, ckpt_mp_stages *out, ckpt_err *err) CKPT_MUST_USE;

/* A training state as torch.save of a one-element list, made of the members of the first rank's
 * dictionary that hold neither model, optimizer, RNG nor tensors. */
ckpt_status ckpt_mp_common(ckpt_source *src, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;

ckpt_status ckpt_mp_open(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_mp_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

#endif
