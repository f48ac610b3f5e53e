/* A new model from a configuration, for `ckpt train --init`. */
#ifndef CKPT_TOOL_TRAIN_INIT_H
#define CKPT_TOOL_TRAIN_INIT_H

#include "model.h"

/* Build the checkpoint that a Hugging Face configuration describes in memory, F32, and bind it.
 * path: the configuration, or a directory with a config.json. Values: engine/train/init.h; FLA's rules for
 * a model that its configuration says is FLA's, Megatron's for all others. src and model are released by
 * the caller as if they had been opened, also after an error; src must be zeroed.
 * Errors: CKPT_E_IO, CKPT_E_FORMAT (no JSON, a field is missing: named), CKPT_E_UNSUPPORTED (no
 * layout is known for it), CKPT_E_NOMEM. */
ckpt_status ckpt_train_init(ckpt_source *src, ckpt_model *model, const char *path, uint64_t seed,
                            int threads, ckpt_err *err) CKPT_MUST_USE;

#endif
