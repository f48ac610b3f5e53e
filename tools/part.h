/* One file of a checkpoint of many: the manifest of its directory says what should be in it. */
#ifndef CKPT_PART_H
#define CKPT_PART_H

#include "tool.h"

/* If src is one file that has no manifest of its own, and the manifest of its directory lists it: read that
 * manifest, cut down to the file and to the tensors found in it, and bind what is there into the empty model
 * under the manifest's names. *found: it is so; else model and m stay empty. *all: tensors that the manifest
 * lists. A configuration beside the file becomes src's where it has none. Both are the caller's to release,
 * after errors too. Errors: CKPT_E_FORMAT damaged manifest; of binding; CKPT_E_IO; CKPT_E_NOMEM. */
ckpt_status ckpt_part_bind(ckpt_tool *tool, ckpt_source *src, ckpt_model *model, ckpt_manifest *m,
                           size_t *all, bool *found, ckpt_err *err) CKPT_MUST_USE;

#endif
