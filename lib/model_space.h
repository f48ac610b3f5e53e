/* Optimizer states in the form fully_sharded_model_space, which Megatron-Core wrote up to 0.15, as
 * fully_reshardable ones: the form that 0.15 and later read. */
#ifndef CKPT_MODEL_SPACE_H
#define CKPT_MODEL_SPACE_H

#include "source.h"

/* Whether an optimizer's part of the common state ("optimizer", or one of several chained ones in it)
 * says that its states are stored so. */
bool ckpt_is_model_space(const ckpt_json *optimizer);
/* Whether that of the source, or of one of its chained optimizers, does. */
bool ckpt_model_space_found(const ckpt_source *src);
/* Rename the tensors of such states to what fully_reshardable calls them. Their values and shapes are
 * the same: both hold the f32 master copy and the moments in the parameter's shape once the flattened
 * ranges are boxes again, which the container has done. Errors: CKPT_E_FORMAT both names exist. */
ckpt_status ckpt_model_space_rename(ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;

#endif
