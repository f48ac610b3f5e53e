/* Of the command inspect: totals by name, and tensors as the files hold them. */
#ifndef CKPT_INSPECT_H
#define CKPT_INSPECT_H

#include "tool.h"

/* Elements and bytes per dtype or module. */
typedef struct ckpt_inspect_group {
    const char *name;
    uint64_t tensors, elements, bytes;
} ckpt_inspect_group;

typedef struct ckpt_inspect_groups {
    ckpt_inspect_group *items;
    size_t n, cap;
} ckpt_inspect_groups;

/* One more tensor of `name`, borrowed. */
ckpt_status ckpt_inspect_add(ckpt_inspect_groups *list, const char *name, uint64_t elements,
                             uint64_t bytes, ckpt_err *err) CKPT_MUST_USE;
void ckpt_inspect_print_groups(ckpt_tool *tool, const char *title, const ckpt_inspect_groups *list);
void ckpt_inspect_json_groups(ckpt_jw *w, const char *key, const ckpt_inspect_groups *list);

uint64_t ckpt_inspect_elements(int rank, const int64_t *dims);
/* 0 where they overflow. */
uint64_t ckpt_inspect_bytes(const ckpt_tensor *t);

/* The tensors of a source by their places in the files: packed weights, which src->tensors has as the BF16 they
 * stand for (derive.h), in their codes. src->tensors itself where there are none; only dtype, rank and dims
 * differ. */
ckpt_status ckpt_inspect_stored(ckpt_arena *arena, const ckpt_source *src, const ckpt_tensor **out,
                                ckpt_err *err) CKPT_MUST_USE;
/* "nvfp4", "mxfp8", "fp8-block128" of what computes a weight, or NULL: it is not quantised. */
const char *ckpt_inspect_format(const struct ckpt_derived *d);

#endif
