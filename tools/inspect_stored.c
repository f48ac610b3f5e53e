/* What inspect counts: groups of tensors, and sizes as they are in the files. */
#include "inspect.h"

#include <stdio.h>
#include <string.h>

#include "derive.h"
#include "wquant.h"

uint64_t ckpt_inspect_elements(int rank, const int64_t *dims)
{
    uint64_t n = 1;
    for (int d = 0; d < rank; d++)
        n *= (uint64_t)dims[d];
    return n;
}

uint64_t ckpt_inspect_bytes(const ckpt_tensor *t)
{
    uint64_t bytes = 0;
    const int64_t n = (int64_t)ckpt_inspect_elements(t->rank, t->dims);
    return ckpt_dtype_bytes(t->dtype, n, &bytes) ? bytes : 0;
}

/* ---- groups ----------------------------------------------------------------------------------- */

ckpt_status ckpt_inspect_add(ckpt_inspect_groups *list, const char *name, uint64_t elements,
                             uint64_t bytes, ckpt_err *err)
{
    size_t i = 0;
    while (i < list->n && strcmp(list->items[i].name, name) != 0)
        i++;
    if (i == list->n) {
        void *items = list->items;
        ckpt_status status = ckpt_grow(&items, &list->cap, list->n + 1, sizeof *list->items, err);
        list->items = items;
        if (status != CKPT_OK)
            return status;
        list->items[list->n++] = (ckpt_inspect_group){.name = name};
    }
    list->items[i].tensors++;
    list->items[i].elements += elements;
    list->items[i].bytes += bytes;
    return CKPT_OK;
}

void ckpt_inspect_print_groups(ckpt_tool *tool, const char *title, const ckpt_inspect_groups *list)
{
    ckpt_arena *arena = &tool->arena;
    ckpt_table table = {.align = "lrrr"};
    ckpt_table_cell(&table, title);
    ckpt_table_cell(&table, "TENSORS");
    ckpt_table_cell(&table, "ELEMENTS");
    ckpt_table_cell(&table, "BYTES");
    for (size_t i = 0; i < list->n; i++) {
        ckpt_table_cell(&table, ckpt_clean(arena, list->items[i].name));
        ckpt_table_cell(&table, ckpt_count(arena, list->items[i].tensors));
        ckpt_table_cell(&table, ckpt_count(arena, list->items[i].elements));
        ckpt_table_cell(&table, ckpt_human(arena, list->items[i].bytes));
    }
    putchar('\n');
    ckpt_table_print(&table, stdout, 0, true, tool->color);
    ckpt_table_release(&table);
}

void ckpt_inspect_json_groups(ckpt_jw *w, const char *key, const ckpt_inspect_groups *list)
{
    ckpt_jw_open(w, key, '{');
    for (size_t i = 0; i < list->n; i++) {
        ckpt_jw_open(w, list->items[i].name, '{');
        ckpt_jw_u64(w, "tensors", list->items[i].tensors);
        ckpt_jw_u64(w, "elements", list->items[i].elements);
        ckpt_jw_u64(w, "bytes", list->items[i].bytes);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, '}');
}

/* ---- as the files hold them ------------------------------------------------------------------- */

ckpt_status ckpt_inspect_stored(ckpt_arena *arena, const ckpt_source *src, const ckpt_tensor **out,
                                ckpt_err *err)
{
    *out = src->tensors;
    if (src->n_packed == 0)
        return CKPT_OK;
    ckpt_tensor *all = ckpt_arena_array(arena, src->n_tensors, sizeof *all);
    int64_t *dims = ckpt_arena_array(arena, 2 * src->n_packed, sizeof *dims);
    if (all == NULL || dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    memcpy(all, src->tensors, src->n_tensors * sizeof *all);
    for (size_t i = 0; i < src->n_packed; i++, dims += 2) {
        const ckpt_derived *d = src->packed[i];
        const int64_t at = ckpt_source_find(src, d->tensor.name);
        if (at < 0)
            return ckpt_fail(err, CKPT_E_INTERNAL, "packed tensor '%s' is gone", d->tensor.name);
        dims[0] = d->rows;
        dims[1] = d->kind == CKPT_DERIVE_NVFP4 ? d->cols / 2 : d->cols;
        all[at].dims = dims;
        all[at].dtype = d->kind == CKPT_DERIVE_NVFP4 ? CKPT_U8 : CKPT_F8_E4M3;
    }
    *out = all;
    return CKPT_OK;
}

const char *ckpt_inspect_format(const struct ckpt_derived *d)
{
    if (d == NULL)
        return NULL;
    return d->kind == CKPT_DERIVE_NVFP4    ? ckpt_wquant_name(CKPT_WQUANT_NVFP4)
           : d->kind == CKPT_DERIVE_MXFP8  ? ckpt_wquant_name(CKPT_WQUANT_MXFP8)
           : d->kind == CKPT_DERIVE_BLOCKS ? ckpt_wquant_name(CKPT_WQUANT_FP8_BLOCK)
                                           : NULL;
}
