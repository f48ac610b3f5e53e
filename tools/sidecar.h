/* What travels beside the tensors: tokenizer and other small files of a Hugging Face directory, and
 * configurations of dialects that the target cannot hold. Both go either into files of the target or
 * into the manifest's "foreign" member, from where the way back restores them. */
#ifndef CKPT_SIDECAR_H
#define CKPT_SIDECAR_H

#include "manifest.h"

typedef struct ckpt_sidecar {
    const char *name;    /* without directories */
    const char *path;    /* file to copy, or NULL */
    const char *text;    /* contents when path is NULL */
    bool tokenizer;      /* Megatron keeps these under tokenizer/ */
    const uint8_t *data; /* contents, n bytes, when path and text are NULL */
    size_t n;
} ckpt_sidecar;

typedef struct ckpt_sidecars {
    ckpt_sidecar *items;
    size_t n;
    ckpt_arena arena;
} ckpt_sidecars;

/* Find the source's auxiliary files. old: its manifest, or NULL. */
ckpt_status ckpt_sidecars_collect(ckpt_sidecars *list, const ckpt_source *src,
                                  const ckpt_manifest *old, ckpt_err *err) CKPT_MUST_USE;
/* Read the files, so that the list outlives them. `limit` bytes in all: larger ones stay files. */
ckpt_status ckpt_sidecars_load(ckpt_sidecars *list, uint64_t limit, ckpt_err *err) CKPT_MUST_USE;
/* Put them into the output and list them in the manifest m, whose foreign member receives what has
 * no file of its own. megatron: the target's kind. Names that the plan writes itself are skipped. */
ckpt_status ckpt_sidecars_write(const ckpt_sidecars *list, ckpt_commit *commit,
                                const ckpt_sink *sink, bool megatron, ckpt_manifest *m,
                                ckpt_err *err) CKPT_MUST_USE;
/* All of them into the manifest: for a target that is one file. */
ckpt_status ckpt_sidecars_carry(const ckpt_sidecars *list, ckpt_manifest *m,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_sidecars_release(ckpt_sidecars *list);

/* Configuration of `group` carried in a manifest (which may be NULL), or NULL. */
const ckpt_json *ckpt_foreign_config(const ckpt_manifest *m, const char *group);
/* Choices of spelling that tensors of `group` had before ("dense_mlp=block_sparse_moe"), or NULL. */
const char *ckpt_foreign_tags(const ckpt_manifest *m, const char *group);
/* m->foreign = old foreign members, plus the source's configuration and choices of spelling under
 * its group, less the target's group, which says so itself; m->training = the old one's, if it
 * has none and the model has the optimizer state that it speaks of. source_group and target_group may be
 * NULL. */
ckpt_status ckpt_foreign_carry(ckpt_manifest *m, const ckpt_manifest *old, const ckpt_model *model,
                               const char *source_group, const char *target_group,
                               ckpt_err *err) CKPT_MUST_USE;

#endif
