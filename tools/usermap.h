/* A layout table given by the user as JSON:
 *
 * {"name": "mine", "like": "hf:kimi_linear", "side": "target",
 *  "rows": [{"canon": "blocks.{2l}.kda.q.weight", "stored": "h.{l}.q", "view": "NK@tp A | H"}],
 *  "ignored": ["*.inv_freq"]}
 *
 * "like" (optional) names a known layout whose configuration rules are used. "side" (optional)
 * says whether the table describes what is written (target, the default) or what is read (source).
 * The canonical names must all belong to one known family, or all to none: then the table is a
 * family of its own, whose tensor shapes follow from the views. */
#ifndef CKPT_USERMAP_H
#define CKPT_USERMAP_H

#include "layout.h"

typedef struct ckpt_usermap {
    ckpt_layout layout;
    bool source; /* describes the source */
    ckpt_arena arena;
} ckpt_usermap;

ckpt_status ckpt_usermap_load(ckpt_usermap *map, const char *path, ckpt_err *err) CKPT_MUST_USE;
void ckpt_usermap_release(ckpt_usermap *map);

#endif
