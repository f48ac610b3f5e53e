/* Between train_save.c (when) and train_write.c (what): one checkpoint of a training run. */
#ifndef CKPT_TRAIN_WRITE_H
#define CKPT_TRAIN_WRITE_H

#include "train_save.h"

struct ckpt_save_job {
    int state;  /* of the thread */
    int memory; /* with a crew: the file of the snapshot */
    ckpt_snapshot snapshot;
    bool open;
    ckpt_status (*copy)(void *self, const ckpt_snapshot *s, ckpt_err *err); /* the copier's */
    void *self;
    bool alone;   /* without a crew, or what is left of it */
    char *failed; /* why the copy failed, with a crew, which has to be told; or NULL */
    int64_t step;
    ckpt_json *training, *common, *args; /* own copies; common and args may be NULL */
};

/* Room for these tensors; n 0: those it has. With a crew all ranks call it. */
ckpt_status ckpt_write_prepare(ckpt_saver *s, ckpt_save_job *job,
                               const ckpt_snapshot_tensor *tensors, size_t n,
                               ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_write_state(ckpt_save_job *job, const ckpt_save_state *state,
                             ckpt_err *err) CKPT_MUST_USE;
/* Would this format hold it? Writes nothing. */
ckpt_status ckpt_write_check(ckpt_saver *s, ckpt_save_job *job, const ckpt_save_format *f,
                             ckpt_err *err) CKPT_MUST_USE;
/* The copy of this rank is in the snapshot. */
void ckpt_write_copied(const ckpt_saver *s, ckpt_save_job *job);
/* With a crew: until all ranks have copied. Errors: a copy that failed, CKPT_E_IO a rank that died before. */
ckpt_status ckpt_write_await(const ckpt_saver *s, ckpt_save_job *job, ckpt_err *err) CKPT_MUST_USE;
/* Write, commit, point the tracker at it, and remove what --keep does not want. Runs on the saver's
 * thread and touches nothing of the saver that changes. event: path, bytes and digest are
 * set. */
ckpt_status ckpt_write_checkpoint(ckpt_saver *s, ckpt_save_job *job, const ckpt_save_format *f,
                                  ckpt_save_event *event, ckpt_err *err) CKPT_MUST_USE;
/* Remove half-written and half-removed checkpoints of dead runs. */
ckpt_status ckpt_write_sweep(const char *root, ckpt_err *err) CKPT_MUST_USE;
void ckpt_write_release(ckpt_save_job *job);

#endif
