/* Flat optimizer buckets of Megatron-Core's dp_reshardable checkpoints, given back to their
 * parameters (fully_reshardable). See rescue.c for the layout and the proof. */
#ifndef CKPT_RESCUE_H
#define CKPT_RESCUE_H

#include "source.h"

/* True if the source holds such buckets. */
bool ckpt_rescue_needed(const ckpt_source *src);
/* Replace every bucket tensor by tensors optimizer.state.{param,exp_avg,exp_avg_sq,…}.KEY that
 * point into it. Reads all weights and master copies: their equality is the proof of the order.
 * Errors: CKPT_E_UNSUPPORTED the layout cannot be proved (bucket, element, reason); the source is
 * then unchanged. */
ckpt_status ckpt_rescue(ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;

#endif
