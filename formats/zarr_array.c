/* One zarr v2 array without compression, as Megatron-Core's zarr strategy writes it:
 *
 *   NAME/.zarray   JSON: zarr_format 2, shape, chunks, dtype, order "C" or "F", compressor null,
 *                  filters null, fill_value
 *   NAME/I.J...    chunk (I, J, ...) of the grid, always a whole chunk: one that reaches past the
 *                  end of the array is padded
 *
 * dtype is numpy's ("<f4", "|u1") or, after Megatron's edit of .zarray, "bfloat16": zarr itself
 * knows no such type. A 0-d array has the one chunk "0". A chunk that is absent would read as
 * fill_value; Megatron writes every chunk, so here it is a loss. Source: zarr v2 specification;
 * megatron/core/dist_checkpointing/strategies/zarr.py of core_r0.15.0. */
#include "zarr.h"

#include "checked.h"
#include "io.h"

#include <stdio.h>
#include <string.h>

#define JSON_LIMIT ((uint64_t)1 << 20)

typedef struct array {
    ckpt_source *src;
    const char *name;
    ckpt_tensor *t;
    int64_t chunk[CKPT_MAX_RANK], grid[CKPT_MAX_RANK], stride[CKPT_MAX_RANK];
    uint64_t bytes; /* of every chunk file */
    bool strided;   /* chunks are not row-major */
    ckpt_err *err;
} array;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- .zarray --------------------------------------------------------------------------------- */

static ckpt_status take_dims(array *a, const ckpt_json *json, const char *key, int64_t least,
                             int64_t *out, int *rank)
{
    const ckpt_json *list = ckpt_json_get(json, key);
    int n = ckpt_json_is_array(list) ? ckpt_json_size(list) : -1;
    if (n < 0)
        return ckpt_fail(a->err, CKPT_E_FORMAT, "no list '%s'", key);
    if (n > CKPT_MAX_RANK)
        return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "%s: %d dimensions, at most %d", key, n,
                         CKPT_MAX_RANK);
    const ckpt_json *item = ckpt_json_child(list);
    for (int i = 0; i < n; i++, item = ckpt_json_next(item))
        if (!ckpt_json_int(item, &out[i]) || out[i] < least)
            return ckpt_fail(a->err, CKPT_E_FORMAT,
                             "%s: element %d is not an integer of %lld or more", key, i,
                             (long long)least);
    *rank = n;
    return CKPT_OK;
}

static ckpt_status take_dtype(array *a, const ckpt_json *json)
{
    static const struct {
        char text[4];
        ckpt_dtype dtype;
    } rows[] = {
        {"b1",  CKPT_BOOL},
        {"u1",  CKPT_U8  },
        {"i1",  CKPT_I8  },
        {"i2",  CKPT_I16 },
        {"i4",  CKPT_I32 },
        {"i8",  CKPT_I64 },
        {"u2",  CKPT_U16 },
        {"u4",  CKPT_U32 },
        {"u8",  CKPT_U64 },
        {"f2",  CKPT_F16 },
        {"f4",  CKPT_F32 },
        {"f8",  CKPT_F64 },
        {"c8",  CKPT_C64 },
        {"c16", CKPT_C128},
    };
    const char *text = ckpt_json_string(ckpt_json_get(json, "dtype"));
    if (!text)
        return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "dtype is not a plain one");
    if (strcmp(text, "bfloat16") == 0) {
        a->t->dtype = CKPT_BF16;
        return CKPT_OK;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (text[0] != '\0' && strchr("<>|", text[0]) && strcmp(text + 1, rows[i].text) == 0) {
            a->t->dtype = rows[i].dtype;
            a->t->big_endian = text[0] == '>';
            return CKPT_OK;
        }
    return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "dtype '%s'", text);
}

/* A member that must be null; an object is shown by its id. */
static ckpt_status must_be_null(array *a, const ckpt_json *json, const char *key)
{
    const ckpt_json *value = ckpt_json_get(json, key);
    if (!value || ckpt_json_is_null(value))
        return CKPT_OK;
    const char *id = ckpt_json_string(ckpt_json_get(value, "id"));
    return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "%s%s%s, expected null", key, id ? " " : "",
                     id ? id : "");
}

static ckpt_status take_order(array *a, const ckpt_json *json)
{
    const char *order = ckpt_json_string(ckpt_json_get(json, "order"));
    const char *separator = ckpt_json_string(ckpt_json_get(json, "dimension_separator"));
    int64_t version, step = 1;
    int rank = a->t->rank;
    if (!ckpt_json_int(ckpt_json_get(json, "zarr_format"), &version) || version != 2)
        return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "zarr_format is not 2");
    if (separator && strcmp(separator, ".") != 0)
        return ckpt_fail(a->err, CKPT_E_UNSUPPORTED, "dimension_separator '%s', expected '.'",
                         separator);
    if (!order || (strcmp(order, "C") != 0 && strcmp(order, "F") != 0))
        return ckpt_fail(a->err, CKPT_E_FORMAT, "order is neither 'C' nor 'F'");
    a->strided = order[0] == 'F' && rank > 1;
    for (int i = 0; i < rank; i++) {
        int axis = order[0] == 'F' ? i : rank - 1 - i;
        a->stride[axis] = step;
        if (!ckpt_mul_i64(step, a->chunk[axis], &step))
            return ckpt_fail(a->err, CKPT_E_FORMAT, "elements of a chunk overflow");
    }
    return ckpt_dtype_bytes(a->t->dtype, step, &a->bytes)
               ? CKPT_OK
               : ckpt_fail(a->err, CKPT_E_FORMAT, "bytes of a chunk overflow");
}

static ckpt_status read_description(array *a)
{
    ckpt_err *err = a->err;
    ckpt_arena *arena = &a->src->arena;
    ckpt_buf text = {0};
    ckpt_json *json = NULL;
    ckpt_status status;
    int rank;
    int64_t dims[CKPT_MAX_RANK];
    const char *dir = ckpt_path_join(arena, a->src->root, a->name);
    const char *path = dir ? ckpt_path_join(arena, dir, ".zarray") : NULL;
    const char *shown = ckpt_path_join(arena, a->name, ".zarray");
    if (!path || !shown)
        return no_memory(err);
    CKPT_CHECK(ckpt_source_add_file(a->src, shown, path, false, NULL, err));
    CKPT_CHECK(ckpt_read_file(path, JSON_LIMIT, &text, err));
    CKPT_CHECK(ckpt_json_parse(text.data ? (const char *)text.data : "", text.len, &json, err));
    CKPT_CHECK(take_dims(a, json, "shape", 0, dims, &a->t->rank));
    CKPT_CHECK(take_dims(a, json, "chunks", 1, a->chunk, &rank));
    if (rank != a->t->rank) {
        status =
            ckpt_fail(err, CKPT_E_FORMAT, "%d chunk extents for %d dimensions", rank, a->t->rank);
        goto done;
    }
    CKPT_CHECK(take_dtype(a, json));
    CKPT_CHECK(must_be_null(a, json, "compressor"));
    CKPT_CHECK(must_be_null(a, json, "filters"));
    CKPT_CHECK(take_order(a, json));
    a->t->dims = ckpt_arena_memdup(arena, dims, (size_t)rank * sizeof *dims);
    if (!a->t->dims)
        status = no_memory(err);
done:
    ckpt_json_free(json);
    ckpt_buf_release(&text);
    return status;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* "1.0.2" of a grid position; "0" without axes. */
static void chunk_name(const array *a, const int64_t *at, char *out, size_t size)
{
    size_t used = 0;
    snprintf(out, size, "0");
    for (int i = 0; i < a->t->rank && used + 24 < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%lld", i ? "." : "", (long long)at[i]);
}

static ckpt_status add_chunk(array *a, const int64_t *at)
{
    ckpt_arena *arena = &a->src->arena;
    char part[CKPT_MAX_RANK * 24];
    int rank = a->t->rank;
    chunk_name(a, at, part, sizeof part);
    const char *name = ckpt_path_join(arena, a->name, part);
    const char *path = name ? ckpt_path_join(arena, a->src->root, name) : NULL;
    int64_t *box = ckpt_arena_array(arena, 3 * (size_t)rank + 1, sizeof *box);
    uint32_t file;
    if (!path || !box)
        return no_memory(a->err);
    if (!ckpt_exists(path))
        return ckpt_fail(a->err, CKPT_E_FORMAT, "chunk '%s' is missing", part);
    /* Not opened: a large run has more chunks than a process may hold descriptors. */
    ckpt_status status = ckpt_source_add_file(a->src, name, path, false, &file, a->err);
    if (status != CKPT_OK)
        return status;
    a->src->files[file].is_data = true;
    if (a->src->files[file].size != a->bytes)
        return ckpt_fail(a->err, CKPT_E_FORMAT, "chunk '%s' has %llu bytes, expected %llu", part,
                         (unsigned long long)a->src->files[file].size,
                         (unsigned long long)a->bytes);
    ckpt_chunk *c = &a->t->chunks[a->t->n_chunks++];
    *c = (ckpt_chunk){.lo = box, .len = box + rank, .file = file};
    bool padded = false;
    for (int i = 0; i < rank; i++) {
        box[i] = at[i] * a->chunk[i];
        box[rank + i] = ckpt_min_i64(a->chunk[i], a->t->dims[i] - box[i]);
        box[2 * rank + i] = a->stride[i];
        padded = padded || box[rank + i] != a->chunk[i];
    }
    if (a->strided || padded)
        c->stride = box + 2 * rank;
    return CKPT_OK;
}

/* Positions of the grid, refused when the directory cannot hold so many files. */
static ckpt_status count_chunks(array *a, int64_t *count)
{
    ckpt_arena scratch = {0};
    char **names;
    size_t n = 0;
    const char *dir = ckpt_path_join(&scratch, a->src->root, a->name);
    ckpt_status status = dir ? ckpt_list_dir(dir, &scratch, &names, &n, a->err) : no_memory(a->err);
    *count = 1;
    for (int i = 0; i < a->t->rank && status == CKPT_OK; i++) {
        int64_t dim = a->t->dims[i];
        a->grid[i] = dim / a->chunk[i] + (dim % a->chunk[i] != 0);
        if (!ckpt_mul_i64(*count, a->grid[i], count))
            status = ckpt_fail(a->err, CKPT_E_FORMAT, "number of chunks overflows");
    }
    if (status == CKPT_OK && *count > 0 && (uint64_t)*count > n)
        status = ckpt_fail(a->err, CKPT_E_FORMAT, "%lld chunks, the directory has %zu files",
                           (long long)*count, n);
    ckpt_arena_free(&scratch);
    return status;
}

ckpt_status ckpt_zarr_array(ckpt_source *src, const char *name, ckpt_tensor *tensor, ckpt_err *err)
{
    array a = {.src = src, .name = name, .t = tensor, .err = err};
    int64_t at[CKPT_MAX_RANK] = {0}, count;
    ckpt_status status;
    *tensor = (ckpt_tensor){.name = name};
    CKPT_TRY(read_description(&a), ".zarray");
    CKPT_CHECK(count_chunks(&a, &count));
    tensor->chunks = ckpt_arena_array(&src->arena, (size_t)count + 1, sizeof *tensor->chunks);
    if (!tensor->chunks)
        return no_memory(err);
    for (int64_t i = 0; i < count; i++) {
        CKPT_CHECK(add_chunk(&a, at));
        for (int axis = tensor->rank; axis-- > 0;) {
            if (++at[axis] < a.grid[axis])
                break;
            at[axis] = 0;
        }
    }
done:
    return status;
}
