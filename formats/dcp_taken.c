/* The four classes that a .metadata has one object of for every chunk, read from their nodes, and taken
 * from a pickle while it is parsed. Fields (torch/distributed/checkpoint/metadata.py, filesystem.py):
 *   TensorStorageMetadata  properties (TensorProperties), size, chunks [ChunkStorageMetadata]
 *   ChunkStorageMetadata   offsets, sizes
 *   MetadataIndex          fqn, offset, index
 *   _StorageInfo           relative_path, offset, length, transform_descriptors
 * The state of TensorProperties is a tuple that begins with the dtype. */
#include "dcp_taken.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- values -------------------------------------------------------------------------------- */

/* torch.Size, tuple or list of at most CKPT_MAX_RANK non-negative ints. */
static ckpt_status size_of(const ckpt_pkl *node, const char *what, int64_t *out, int *rank,
                           ckpt_err *err)
{
    if (ckpt_pkl_is_object(node, "torch", "Size")) {
        const ckpt_pkl *args = node->args;
        if (args && args->kind == CKPT_PKL_TUPLE && args->n_items <= 1)
            node = args->n_items ? args->items[0] : args;
    }
    if (!node || (node->kind != CKPT_PKL_TUPLE && node->kind != CKPT_PKL_LIST))
        return ckpt_fail(err, CKPT_E_FORMAT, "%s is not a torch.Size", what);
    if (node->n_items > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s has %zu dimensions, at most %d", what,
                         node->n_items, CKPT_MAX_RANK);
    for (size_t i = 0; i < node->n_items; i++)
        if (!ckpt_pkl_int(node->items[i], &out[i]) || out[i] < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "%s: element %zu is not a non-negative integer",
                             what, i);
    *rank = (int)node->n_items;
    return CKPT_OK;
}

ckpt_status ckpt_dcp_size_in(ckpt_arena *arena, const ckpt_pkl *node, const char *what,
                             int64_t **out, int *rank, ckpt_err *err)
{
    int64_t dims[CKPT_MAX_RANK];
    ckpt_status status = size_of(node, what, dims, rank, err);
    if (status != CKPT_OK)
        return status;
    *out = ckpt_arena_memdup(arena, dims, (size_t)*rank * sizeof *dims);
    return *out || *rank == 0 ? CKPT_OK : no_memory(err);
}

/* "a/1, b/1" of a list of names; NULL for none. */
static ckpt_status transforms_of(ckpt_arena *arena, const ckpt_pkl *node, const char **out,
                                 ckpt_err *err)
{
    *out = NULL;
    if (ckpt_dcp_is_none(node))
        return CKPT_OK;
    if (node->kind != CKPT_PKL_LIST && node->kind != CKPT_PKL_TUPLE)
        return ckpt_fail(err, CKPT_E_FORMAT, "transform_descriptors is not a list");
    ckpt_buf text = {0};
    for (size_t i = 0; i < node->n_items && i < 8; i++) {
        const char *name = ckpt_pkl_str(node->items[i]);
        ckpt_buf_printf(&text, "%s%.80s", i ? ", " : "", name ? name : "(not a string)");
    }
    if (node->n_items)
        *out = ckpt_arena_strdup(arena, text.data ? (const char *)text.data : "");
    bool failed = text.failed || (node->n_items && !*out);
    ckpt_buf_release(&text);
    return failed ? no_memory(err) : CKPT_OK;
}

/* Bytes of an integer field that must be present and non-negative. */
static ckpt_status bytes_of(const ckpt_pkl *node, const char *what, uint64_t *out, ckpt_err *err)
{
    int64_t v;
    if (!ckpt_pkl_int(node, &v) || v < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%s is not a non-negative integer", what);
    *out = (uint64_t)v;
    return CKPT_OK;
}

static ckpt_status dtype_of(const ckpt_pkl *dtype, ckpt_dcp_taken_tensor *t, ckpt_err *err)
{
    if (ckpt_dcp_is_none(dtype))
        return CKPT_OK;
    if (dtype->kind != CKPT_PKL_GLOBAL || strcmp(dtype->str, "torch") != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "dtype is not a torch dtype");
    if (!ckpt_dtype_from_torch(dtype->name, &t->dtype))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "dtype torch.%s", dtype->name);
    t->has_dtype = true;
    return CKPT_OK;
}

static const ckpt_pkl *dtype_in(const ckpt_pkl *properties)
{
    const ckpt_pkl *state =
        properties && properties->kind == CKPT_PKL_OBJECT ? properties->state : NULL;
    if (state && state->kind == CKPT_PKL_TUPLE && state->n_items)
        return state->items[0];
    return state && state->kind == CKPT_PKL_DICT ? ckpt_pkl_get(state, "dtype") : NULL;
}

/* ---- classes ------------------------------------------------------------------------------- */

ckpt_status ckpt_dcp_chunk_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_chunk *out,
                                 ckpt_err *err)
{
    int64_t box[2 * CKPT_MAX_RANK];
    ckpt_status status;
    if (!ckpt_pkl_is_object(node, NULL, "ChunkStorageMetadata"))
        return ckpt_fail(err, CKPT_E_FORMAT, "is not a ChunkStorageMetadata");
    CKPT_CHECK(size_of(ckpt_pkl_get(node, "offsets"), "offsets", box, &out->lo_rank, err));
    CKPT_CHECK(
        size_of(ckpt_pkl_get(node, "sizes"), "sizes", box + out->lo_rank, &out->len_rank, err));
    out->lo = ckpt_arena_memdup(arena, box, (size_t)(out->lo_rank + out->len_rank) * sizeof *box);
    if (!out->lo)
        return no_memory(err);
    out->len = out->lo + out->lo_rank;
done:
    return status;
}

ckpt_status ckpt_dcp_tensor_parse(const ckpt_pkl *node, ckpt_arena *arena,
                                  ckpt_dcp_taken_tensor *out, ckpt_err *err)
{
    ckpt_status status;
    *out = (ckpt_dcp_taken_tensor){0};
    CKPT_CHECK(dtype_of(dtype_in(ckpt_pkl_get(node, "properties")), out, err));
    CKPT_CHECK(
        ckpt_dcp_size_in(arena, ckpt_pkl_get(node, "size"), "size", &out->dims, &out->rank, err));
    const ckpt_pkl *chunks = ckpt_pkl_get(node, "chunks");
    if (ckpt_dcp_is_none(chunks))
        return CKPT_OK;
    if (chunks->kind != CKPT_PKL_LIST && chunks->kind != CKPT_PKL_TUPLE)
        return ckpt_fail(err, CKPT_E_FORMAT, "chunks is not a list");
    out->chunks = chunks;
    out->n = chunks->n_items;
done:
    return status;
}

ckpt_status ckpt_dcp_index_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_index *out,
                                 ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *out = (ckpt_dcp_taken_index){.fqn = ckpt_pkl_get(node, "fqn"), .rank = -1};
    if (!ckpt_pkl_str(out->fqn) || out->fqn->len >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "fqn is not a string");
    const ckpt_pkl *offset = ckpt_pkl_get(node, "offset");
    int64_t *dims = NULL;
    if (!ckpt_dcp_is_none(offset))
        CKPT_TRY(ckpt_dcp_size_in(arena, offset, "offset", &dims, &out->rank, err), "'%s'",
                 out->fqn->str);
    out->offset = dims;
done:
    return status;
}

ckpt_status ckpt_dcp_info_parse(const ckpt_pkl *node, ckpt_arena *arena, ckpt_dcp_taken_info *out,
                                ckpt_err *err)
{
    ckpt_status status;
    *out = (ckpt_dcp_taken_info){.path = ckpt_pkl_get(node, "relative_path")};
    CKPT_CHECK(bytes_of(ckpt_pkl_get(node, "offset"), "offset", &out->at, err));
    CKPT_CHECK(bytes_of(ckpt_pkl_get(node, "length"), "length", &out->length, err));
    CKPT_CHECK(
        transforms_of(arena, ckpt_pkl_get(node, "transform_descriptors"), &out->transforms, err));
done:
    return status;
}

/* ---- taking -------------------------------------------------------------------------------- */

typedef enum taken_kind {
    TAKEN_CHUNK = 1,
    TAKEN_TENSOR,
    TAKEN_INDEX,
    TAKEN_INFO,
    KINDS
} taken_kind;

static int64_t wants(const char *name)
{
    static const char *const names[KINDS] = {
        [TAKEN_CHUNK] = "ChunkStorageMetadata",
        [TAKEN_TENSOR] = "TensorStorageMetadata",
        [TAKEN_INDEX] = "MetadataIndex",
        [TAKEN_INFO] = "_StorageInfo",
    };
    for (int kind = 1; kind < KINDS; kind++)
        if (strcmp(names[kind], name) == 0)
            return kind;
    return 0;
}

static const ckpt_pkl_field *field(const ckpt_pkl_field *fields, size_t n, const char *key)
{
    for (size_t i = n; i-- > 0;) /* the last of two wins */
        if (strcmp(fields[i].key->str, key) == 0)
            return &fields[i];
    return NULL;
}

/* A torch.Size of non-negative ints, said here or before. */
static bool size_field(const ckpt_pkl_field *f, int64_t *out, int *rank)
{
    if (f && f->kind == CKPT_PKL_FIELD_NODE)
        return size_of(f->node, "", out, rank, NULL) == CKPT_OK;
    if (!f || f->kind != CKPT_PKL_FIELD_SIZE)
        return false;
    static_assert(sizeof f->dims / sizeof *f->dims <= CKPT_MAX_RANK, "a box holds a size");
    *rank = f->rank;
    for (int i = 0; i < f->rank; i++) {
        if (f->dims[i] < 0)
            return false;
        out[i] = f->dims[i];
    }
    return true;
}

static bool bytes_field(const ckpt_pkl_field *f, uint64_t *out)
{
    if (!f || f->kind != CKPT_PKL_FIELD_INT || f->i < 0)
        return false;
    *out = (uint64_t)f->i;
    return true;
}

static bool none_field(const ckpt_pkl_field *f)
{
    return !f || f->kind == CKPT_PKL_FIELD_NONE;
}

static bool room(void **array, size_t *cap, size_t n, size_t size)
{
    return n < *cap || ckpt_grow(array, cap, n + 1, size, NULL) == CKPT_OK;
}

static bool take_chunk(ckpt_dcp_taken *t, const ckpt_pkl_field *fields, size_t n)
{
    int64_t box[2 * CKPT_MAX_RANK];
    ckpt_dcp_taken_chunk c;
    if (!room((void **)&t->chunks, &t->cap_chunks, t->n_chunks, sizeof *t->chunks) ||
        !size_field(field(fields, n, "offsets"), box, &c.lo_rank) ||
        !size_field(field(fields, n, "sizes"), box + c.lo_rank, &c.len_rank))
        return false;
    c.lo = ckpt_arena_memdup(t->keep, box, (size_t)(c.lo_rank + c.len_rank) * sizeof *box);
    c.len = c.lo ? c.lo + c.lo_rank : NULL;
    t->chunks[t->n_chunks++] = c;
    return c.lo != NULL;
}

/* Its chunks are those taken last, so that a range stands for the list. */
static bool take_tensor(ckpt_dcp_taken *t, const ckpt_pkl_field *fields, size_t n)
{
    const ckpt_pkl_field *properties = field(fields, n, "properties"),
                         *chunks = field(fields, n, "chunks");
    ckpt_dcp_taken_tensor out = {0};
    int64_t dims[CKPT_MAX_RANK];
    if (!room((void **)&t->tensors, &t->cap_tensors, t->n_tensors, sizeof *t->tensors) ||
        !properties || properties->kind != CKPT_PKL_FIELD_STATE || !chunks ||
        chunks->kind != CKPT_PKL_FIELD_TAKEN ||
        !size_field(field(fields, n, "size"), dims, &out.rank))
        return false;
    if (dtype_of(properties->node, &out, NULL) != CKPT_OK)
        return false;
    out.n = chunks->n;
    if (out.n > 0 && (chunks->i % KINDS != TAKEN_CHUNK || out.n > t->n_chunks ||
                      (size_t)(chunks->i / KINDS) + 1 != t->n_chunks))
        return false;
    out.first = t->n_chunks - out.n;
    out.dims = ckpt_arena_memdup(t->keep, dims, (size_t)out.rank * sizeof *dims);
    t->tensors[t->n_tensors++] = out;
    return out.dims != NULL;
}

static bool take_index(ckpt_dcp_taken *t, const ckpt_pkl_field *fields, size_t n)
{
    const ckpt_pkl_field *fqn = field(fields, n, "fqn"), *offset = field(fields, n, "offset");
    int64_t dims[CKPT_MAX_RANK], *kept = NULL;
    int rank = -1;
    if (!room((void **)&t->indexes, &t->cap_indexes, t->n_indexes, sizeof *t->indexes) || !fqn ||
        fqn->kind != CKPT_PKL_FIELD_NODE || !ckpt_pkl_str(fqn->node) ||
        fqn->node->len >= UINT32_MAX)
        return false;
    if (!none_field(offset) &&
        (!size_field(offset, dims, &rank) ||
         !(kept = ckpt_arena_memdup(t->scratch, dims, (size_t)rank * sizeof *dims))))
        return false;
    t->indexes[t->n_indexes++] =
        (ckpt_dcp_taken_index){.fqn = fqn->node, .offset = kept, .rank = rank};
    return true;
}

static bool take_info(ckpt_dcp_taken *t, const ckpt_pkl_field *fields, size_t n)
{
    const ckpt_pkl_field *path = field(fields, n, "relative_path");
    ckpt_dcp_taken_info out = {0};
    if (!room((void **)&t->infos, &t->cap_infos, t->n_infos, sizeof *t->infos) || !path ||
        path->kind != CKPT_PKL_FIELD_NODE || !ckpt_pkl_str(path->node) ||
        !bytes_field(field(fields, n, "offset"), &out.at) ||
        !bytes_field(field(fields, n, "length"), &out.length) ||
        !none_field(field(fields, n, "transform_descriptors")))
        return false;
    out.path = path->node;
    t->infos[t->n_infos++] = out;
    return true;
}

/* A number is position * KINDS + kind. */
static bool take(void *self, int64_t kind, const ckpt_pkl_field *fields, size_t n, int64_t *number)
{
    ckpt_dcp_taken *t = self;
    bool ok = kind == TAKEN_CHUNK    ? take_chunk(t, fields, n)
              : kind == TAKEN_TENSOR ? take_tensor(t, fields, n)
              : kind == TAKEN_INDEX  ? take_index(t, fields, n)
                                     : take_info(t, fields, n);
    size_t count = kind == TAKEN_CHUNK    ? t->n_chunks
                   : kind == TAKEN_TENSOR ? t->n_tensors
                   : kind == TAKEN_INDEX  ? t->n_indexes
                                          : t->n_infos;
    if (ok)
        *number = (int64_t)(count - 1) * KINDS + kind;
    return ok;
}

ckpt_pkl_taker ckpt_dcp_taker(ckpt_dcp_taken *t)
{
    return (ckpt_pkl_taker){.wants = wants, .take = take, .self = t};
}

void ckpt_dcp_taken_release(ckpt_dcp_taken *t)
{
    free(t->chunks);
    free(t->tensors);
    free(t->indexes);
    free(t->infos);
    *t = (ckpt_dcp_taken){.keep = t->keep, .scratch = t->scratch};
}

static bool is_taken(const ckpt_pkl *p, taken_kind kind, size_t *at)
{
    if (!p || p->kind != CKPT_PKL_TAKEN || p->i % KINDS != (int64_t)kind)
        return false;
    *at = (size_t)(p->i / KINDS);
    return true;
}

const ckpt_dcp_taken_chunk *ckpt_dcp_chunk_of(const ckpt_dcp_taken *t, const ckpt_pkl *p)
{
    size_t at;
    return is_taken(p, TAKEN_CHUNK, &at) ? &t->chunks[at] : NULL;
}

const ckpt_dcp_taken_tensor *ckpt_dcp_tensor_of(const ckpt_dcp_taken *t, const ckpt_pkl *p)
{
    size_t at;
    return is_taken(p, TAKEN_TENSOR, &at) ? &t->tensors[at] : NULL;
}

const ckpt_dcp_taken_index *ckpt_dcp_index_of(const ckpt_dcp_taken *t, const ckpt_pkl *p)
{
    size_t at;
    return is_taken(p, TAKEN_INDEX, &at) ? &t->indexes[at] : NULL;
}

const ckpt_dcp_taken_info *ckpt_dcp_info_of(const ckpt_dcp_taken *t, const ckpt_pkl *p)
{
    size_t at;
    return is_taken(p, TAKEN_INFO, &at) ? &t->infos[at] : NULL;
}
