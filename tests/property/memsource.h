/* A checkpoint source that lives nowhere: contents come from synth_fill on demand. Tensors are cut
 * into a random grid of strided chunks, so a plan has to put them together. */
#ifndef CKPT_TESTS_MEMSOURCE_H
#define CKPT_TESTS_MEMSOURCE_H

#include "model.h"
#include "synth.h"

/* src is zeroed first; m must outlive it. Close with ckpt_source_close. */
ckpt_status memsource_open(ckpt_source *src, const synth_model *m, synth_rng *rng,
                           ckpt_err *err) CKPT_MUST_USE;

#endif
