/* What of a trainer its loading needs: ckpt_trainer_load itself is declared in train.h. */
#ifndef CKPT_TRAIN_RESUME_H
#define CKPT_TRAIN_RESUME_H

#include "train.h"

/* Index of a parameter's state in the base, or -1. */
int64_t ckpt_trainer_state_at(const ckpt_trainer *t, const char *state, const char *param);
/* Weights = masters, rounded, and what products read of them. */
ckpt_status ckpt_trainer_round(ckpt_trainer *t, ckpt_err *err) CKPT_MUST_USE;

#endif
