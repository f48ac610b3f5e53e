/* Training on several ranks (engine/par.h): the optimizer's work and state are cut over the ranks that
 * hold the same parameters.
 *
 * Neighbouring parameters that the same R ranks hold are a run of the flat buffer; rank r of those R steps
 * part r of it with AdamW and then all gather the weights. So moments exist once among the ranks (memory
 * for the other parts is reserved and never touched). A matrix under Muon belongs to one of the R
 * replicas: its tensor-parallel group gathers the whole direction, every rank of it orthogonalises, takes
 * its own part and sends it to the other replicas. Weights after a step are the same bits on every rank
 * that holds them.
 *
 * On a device (train.h) gradients, weights and moments stay there and move between ranks by its
 * communicator (cuda/device_comm.h). */
#ifndef CKPT_TRAIN_SPREAD_H
#define CKPT_TRAIN_SPREAD_H

#include "train.h"

/* Runs and owners. Nothing to release but t->runs (free). */
ckpt_status ckpt_spread_open(ckpt_trainer *t, ckpt_err *err) CKPT_MUST_USE;
/* L2 norm of the gradient of the whole model. */
ckpt_status ckpt_spread_norm(ckpt_trainer *t, double *norm, ckpt_err *err) CKPT_MUST_USE;
/* First parameter whose gradient is not finite on any rank, or -1. */
ckpt_status ckpt_spread_find_bad(ckpt_trainer *t, int64_t *bad, ckpt_err *err) CKPT_MUST_USE;
/* w: the flat buffer that is stepped. While t->e is dry: only the sizes. */
ckpt_status ckpt_spread_step(ckpt_trainer *t, const ckpt_optim_step *step, float *w,
                             ckpt_err *err) CKPT_MUST_USE;
/* Does this rank keep element k of slot i's moments? [*lo, *hi) of the slot. */
void ckpt_spread_owned(const ckpt_trainer *t, size_t i, int64_t *lo, int64_t *hi);
/* n elements from `first` on of this rank's part of slot i, to where they lie in the whole tensor: f32, or
 * rounded to bf16. From any thread. */
void ckpt_spread_put(const ckpt_trainer *t, size_t i, int64_t first, int64_t n, const float *from,
                     bool bf16, void *whole);
/* The whole of slot i out of a flat buffer, on rank 0 (out NULL elsewhere). `state`: a moment, which
 * its owners have; else every holder has it. All ranks call it. */
ckpt_status ckpt_spread_gather(ckpt_trainer *t, size_t i, const float *flat, bool state, float *out,
                               ckpt_err *err) CKPT_MUST_USE;

#endif
