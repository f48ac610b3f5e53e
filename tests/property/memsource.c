/* See memsource.h. File i holds tensor i, row-major from offset 0; chunks are windows into it. */
#include "memsource.h"

#include <stdlib.h>
#include <string.h>

static ckpt_status read_at(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                           ckpt_err *err)
{
    (void)err;
    const synth_model *m = src->self;
    synth_fill(&m->tensors[file], offset, buf, n);
    return CKPT_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

/* Split one axis in two at a random place; chunk k covers [lo, lo + len) of it. */
static bool make_chunks(ckpt_source *src, const synth_tensor *t, uint32_t file, synth_rng *rng,
                        ckpt_tensor *out)
{
    int rank = t->rank, axis = rank > 0 ? (int)synth_below(rng, (uint64_t)rank) : -1;
    bool split = axis >= 0 && t->dims[axis] > 1 && synth_coin(rng);
    size_t n = split ? 2 : 1;
    out->chunks = ckpt_arena_array(&src->arena, n, sizeof *out->chunks);
    int64_t *stride = ckpt_arena_array(&src->arena, (size_t)rank + 1, sizeof *stride);
    if (out->chunks == NULL || stride == NULL)
        return false;
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        stride[i] = step;
        step *= t->dims[i];
    }
    int64_t cut = split ? 1 + (int64_t)synth_below(rng, (uint64_t)t->dims[axis] - 1) : 0;
    for (size_t k = 0; k < n; k++) {
        int64_t *lo = ckpt_arena_array(&src->arena, (size_t)rank + 1, sizeof *lo);
        int64_t *len = ckpt_arena_array(&src->arena, (size_t)rank + 1, sizeof *len);
        if (lo == NULL || len == NULL)
            return false;
        for (int i = 0; i < rank; i++)
            len[i] = t->dims[i];
        if (split) {
            lo[axis] = k == 0 ? 0 : cut;
            len[axis] = k == 0 ? cut : t->dims[axis] - cut;
        }
        ckpt_chunk *chunk = &out->chunks[k];
        chunk->lo = lo;
        chunk->len = len;
        chunk->stride = split || synth_coin(rng) ? stride : NULL;
        chunk->offset = split ? (uint64_t)(lo[axis] * stride[axis]) * synth_itemsize(t->dtype) : 0;
        chunk->file = file;
    }
    out->n_chunks = n;
    return true;
}

static ckpt_status add_tensor(ckpt_source *src, const synth_model *m, uint32_t i, synth_rng *rng,
                              ckpt_err *err)
{
    const synth_tensor *t = &m->tensors[i];
    ckpt_tensor *out = &src->tensors[i];
    src->files[i] =
        (ckpt_file){.name = t->name, .path = t->name, .size = t->bytes, .fd = -1, .is_data = true};
    out->name = t->name;
    out->dims = t->dims;
    out->rank = t->rank;
    if (!ckpt_dtype_from_name(t->dtype, strlen(t->dtype), &out->dtype))
        return ckpt_fail(err, CKPT_E_INTERNAL, "dtype %s", t->dtype);
    if (!make_chunks(src, t, i, rng, out))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    return ckpt_tensor_check(src, out, err);
}

ckpt_status memsource_open(ckpt_source *src, const synth_model *m, synth_rng *rng, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    union {
        const synth_model *in;
        void *out;
    } self = {m}; /* read only, through a handle that is not const */
    memset(src, 0, sizeof *src);
    src->container = ckpt_container_find("safetensors");
    src->path = src->root = "memory";
    src->iteration = -1;
    src->read_at = read_at;
    src->self = self.out;
    src->files = ckpt_arena_array(&src->arena, m->n, sizeof *src->files);
    src->tensors = ckpt_arena_array(&src->arena, m->n, sizeof *src->tensors);
    if (src->files == NULL || src->tensors == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    src->n_files = m->n;
    src->n_tensors = m->n;
    for (uint32_t i = 0; i < m->n; i++)
        CKPT_TRY(add_tensor(src, m, i, rng, err), "tensor '%s'", m->tensors[i].name);
    qsort(src->tensors, src->n_tensors, sizeof *src->tensors, by_name);
    if (m->config != NULL) {
        CKPT_TRY(ckpt_json_parse(m->config, strlen(m->config), &src->config, err), "config");
        src->config_kind = m->kind == SYNTH_HF ? CKPT_CONFIG_HF : CKPT_CONFIG_MEGATRON;
    }
done:
    return status;
}
