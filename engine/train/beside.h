/* Copying a trainer's tensors for a checkpoint while its next step runs, on a device.
 *
 * `begin`, by the trainer's thread, after a step; `copy`, by another thread, brings the values that were there
 * at `begin`. The next step's forward and backward write no parameter and no optimizer state, so they run
 * meanwhile; the optimizer waits (`wait`) until the copy has ended. Every begin has its copy: that is what
 * the wait is for. */
#ifndef CKPT_TRAIN_BESIDE_H
#define CKPT_TRAIN_BESIDE_H

#include "train.h"

/* Opens what `begin` and `copy` need; does nothing where they cannot be used: no device, ranks that gather
 * what they save. */
ckpt_status ckpt_beside_open(ckpt_trainer *t, ckpt_err *err) CKPT_MUST_USE;
/* Waits for a copy that was begun. */
void ckpt_beside_close(ckpt_trainer *t);
/* Until no copy is under way. */
void ckpt_beside_wait(ckpt_trainer *t);

/* What this rank keeps of slot i, whose part begins at `from` of the device, to where it lies in the whole
 * tensor in this process's memory: f32, or rounded to bf16. */
ckpt_status ckpt_beside_bring(ckpt_trainer *t, size_t i, const float *from, bool bf16, void *out,
                              ckpt_err *err) CKPT_MUST_USE;
/* A copy has ended, well or not. */
void ckpt_beside_end(ckpt_trainer *t);

#endif
