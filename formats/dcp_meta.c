/* DCP .metadata: one bare pickle (protocol 2 to 5) of torch.distributed.checkpoint.metadata
 * Metadata:
 *   state_dict_metadata  {fqn: TensorStorageMetadata | BytesStorageMetadata}
 *   storage_data         {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}
 * Classes are recognised by name alone, because modules moved between releases and Megatron uses
 * its own subclass. Every field may be absent; planner_data, storage_meta, mcore_data and
 * all_local_plans are not looked at. MetadataIndex.index is a hint and is ignored.
 * Source: torch-formats.md section 1. */
#include "dcp_meta.h"

#include "checked.h"
#include "io.h"
#include "pickle.h"

#include <stdio.h>
#include <string.h>

/* A good hash at half load never probes this far; input that makes it do so is hostile. */
#define PROBE_LIMIT 1024

typedef struct index_table {
    uint32_t *slots; /* item number + 1; 0 empty */
    uint64_t mask;
} index_table;

typedef struct reader {
    ckpt_arena *keep;
    ckpt_dcp_meta *meta;
    index_table entries, names, paths;
    ckpt_pkl *last_path_node; /* memoised paths repeat as one node */
    uint32_t last_path;
    const char **seen; /* names in metadata order, for duplicate detection */
    size_t n_seen;
    ckpt_err *err;
} reader;

static ckpt_status no_memory(const reader *r)
{
    return ckpt_fail(r->err, CKPT_E_NOMEM, "out of memory");
}

/* ---- hash index ---------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 29);
}

static uint64_t hash_text(const char *s)
{
    size_t n = strlen(s);
    uint64_t h = UINT64_C(0x2545f4914f6cdd1d) ^ n, word;
    for (; n >= 8; n -= 8, s += 8) {
        memcpy(&word, s, 8);
        h = mix(h, word);
    }
    word = 0;
    memcpy(&word, s, n);
    return mix(h, word);
}

static uint64_t hash_key(const char *fqn, int rank, const int64_t *offset)
{
    uint64_t h = mix(hash_text(fqn), (uint64_t)(rank + 1));
    for (int i = 0; i < rank; i++)
        h = mix(h, (uint64_t)offset[i]);
    return h ^ (h >> 32);
}

static bool table_init(index_table *t, ckpt_arena *arena, size_t n)
{
    uint64_t size = 16;
    while (size < 2 * (uint64_t)n)
        size *= 2;
    t->mask = size - 1;
    t->slots = ckpt_arena_array(arena, (size_t)size, sizeof *t->slots);
    return t->slots != NULL;
}

typedef bool (*same_fn)(const reader *r, uint32_t item, const void *key);

/* Slot holding an equal item, or the empty slot to put it in; NULL after too many collisions. */
static uint32_t *table_find(const reader *r, const index_table *t, uint64_t hash, same_fn same,
                            const void *key)
{
    for (uint64_t i = 0; i < PROBE_LIMIT; i++) {
        uint32_t *slot = &t->slots[(hash + i) & t->mask];
        if (*slot == 0 || same(r, *slot - 1, key))
            return slot;
    }
    return NULL;
}

static bool same_text(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

static bool same_entry(const reader *r, uint32_t item, const void *key)
{
    const ckpt_dcp_entry *a = &r->meta->entries[item], *b = key;
    return a->rank == b->rank && same_text(a->fqn, b->fqn) &&
           (a->rank <= 0 || memcmp(a->offset, b->offset, (size_t)a->rank * 8) == 0);
}

static bool same_name(const reader *r, uint32_t item, const void *key)
{
    return same_text(r->seen[item], key);
}

static bool same_path(const reader *r, uint32_t item, const void *key)
{
    return same_text(r->meta->paths[item], key);
}

static ckpt_status too_many_collisions(const reader *r)
{
    return ckpt_fail(r->err, CKPT_E_FORMAT, "names crafted to collide");
}

/* ---- values -------------------------------------------------------------------------------- */

static bool valid_utf8(const char *s, size_t n)
{
    for (size_t i = 0, len; i < n; i += len)
        if (s[i] == '\0' || (len = ckpt_utf8_len(s + i, n - i)) == 0)
            return false;
    return true;
}

/* A name: non-empty UTF-8 text without NUL. */
static ckpt_status name_of(const reader *r, const ckpt_pkl *node, const char *what,
                           const char **out)
{
    *out = ckpt_pkl_str(node);
    if (!*out)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "%s is not a string", what);
    if (node->len == 0 || !valid_utf8(node->str, node->len))
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "%s '%.100s' is empty, holds NUL or is not UTF-8", what, node->str);
    return CKPT_OK;
}

static const ckpt_pkl *object_state(const ckpt_pkl *p)
{
    return p && p->kind == CKPT_PKL_OBJECT ? p->state : NULL;
}

static bool is_none(const ckpt_pkl *p)
{
    return !p || p->kind == CKPT_PKL_NONE;
}

/* torch.Size, tuple or list of non-negative ints. */
static ckpt_status size_of(const reader *r, const ckpt_pkl *node, const char *what,
                           int64_t **out, int *rank)
{
    if (ckpt_pkl_is_object(node, "torch", "Size")) {
        const ckpt_pkl *args = node->args;
        if (args && args->kind == CKPT_PKL_TUPLE && args->n_items <= 1)
            node = args->n_items ? args->items[0] : args;
    }
    if (!node || (node->kind != CKPT_PKL_TUPLE && node->kind != CKPT_PKL_LIST))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "%s is not a torch.Size", what);
    if (node->n_items > CKPT_MAX_RANK)
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "%s has %zu dimensions, at most %d", what,
                         node->n_items, CKPT_MAX_RANK);
    int64_t *dims = ckpt_arena_array(r->keep, node->n_items + 1, sizeof *dims);
    if (!dims)
        return no_memory(r);
    for (size_t i = 0; i < node->n_items; i++)
        if (!ckpt_pkl_int(node->items[i], &dims[i]) || dims[i] < 0)
            return ckpt_fail(r->err, CKPT_E_FORMAT, "%s: element %zu is not a non-negative integer",
                             what, i);
    *out = dims;
    *rank = (int)node->n_items;
    return CKPT_OK;
}

/* ---- storage_data -------------------------------------------------------------------------- */

static ckpt_status path_of(reader *r, ckpt_pkl *node, uint32_t *out)
{
    if (node && node == r->last_path_node) {
        *out = r->last_path;
        return CKPT_OK;
    }
    const char *path;
    ckpt_status status = name_of(r, node, "relative_path", &path);
    if (status != CKPT_OK)
        return status;
    if (!ckpt_name_is_safe(path, true))
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "relative_path '%s' is not a plain path below the checkpoint", path);
    uint32_t *slot = table_find(r, &r->paths, hash_key(path, -1, NULL), same_path, path);
    if (!slot)
        return too_many_collisions(r);
    if (*slot == 0) {
        const char *copy = ckpt_arena_strdup(r->keep, path);
        if (!copy)
            return no_memory(r);
        r->meta->paths[r->meta->n_paths++] = copy;
        *slot = (uint32_t)r->meta->n_paths;
    }
    r->last_path_node = node;
    r->last_path = *out = *slot - 1;
    return CKPT_OK;
}

/* "a/1, b/1" of a list of names; NULL for none. */
static ckpt_status transforms_of(const reader *r, const ckpt_pkl *node, const char **out)
{
    *out = NULL;
    if (is_none(node))
        return CKPT_OK;
    if (node->kind != CKPT_PKL_LIST && node->kind != CKPT_PKL_TUPLE)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "transform_descriptors is not a list");
    ckpt_buf text = {0};
    for (size_t i = 0; i < node->n_items && i < 8; i++) {
        const char *name = ckpt_pkl_str(node->items[i]);
        ckpt_buf_printf(&text, "%s%.80s", i ? ", " : "", name ? name : "(not a string)");
    }
    if (node->n_items)
        *out = ckpt_arena_strdup(r->keep, text.data ? (const char *)text.data : "");
    bool failed = text.failed || (node->n_items && !*out);
    ckpt_buf_release(&text);
    return failed ? no_memory(r) : CKPT_OK;
}

/* Bytes of an integer field that must be present and non-negative. */
static ckpt_status bytes_of(const reader *r, const ckpt_pkl *node, const char *what, uint64_t *out)
{
    int64_t v;
    if (!ckpt_pkl_int(node, &v) || v < 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "%s is not a non-negative integer", what);
    *out = (uint64_t)v;
    return CKPT_OK;
}

static ckpt_status parse_info(reader *r, ckpt_pkl *info, ckpt_dcp_entry *e)
{
    if (!ckpt_pkl_is_object(info, NULL, "_StorageInfo"))
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "storage is not a filesystem _StorageInfo");
    ckpt_status status;
    CKPT_CHECK(path_of(r, ckpt_pkl_get(info, "relative_path"), &e->path));
    CKPT_CHECK(bytes_of(r, ckpt_pkl_get(info, "offset"), "offset", &e->at));
    CKPT_CHECK(bytes_of(r, ckpt_pkl_get(info, "length"), "length", &e->length));
    CKPT_CHECK(transforms_of(r, ckpt_pkl_get(info, "transform_descriptors"), &e->transforms));
done:
    return status;
}

static ckpt_status parse_entry(reader *r, const ckpt_pkl *key, ckpt_pkl *info, ckpt_dcp_entry *e)
{
    if (!ckpt_pkl_is_object(key, NULL, "MetadataIndex"))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "key is not a MetadataIndex");
    ckpt_err *err = r->err;
    ckpt_status status = name_of(r, ckpt_pkl_get(key, "fqn"), "fqn", &e->fqn);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *offset = ckpt_pkl_get(key, "offset");
    e->rank = -1;
    if (!is_none(offset))
        CKPT_TRY(size_of(r, offset, "offset", &e->offset, &e->rank), "'%s'", e->fqn);
    CKPT_TRY(parse_info(r, info, e), "'%s'", e->fqn);
done:
    return status;
}

static ckpt_status parse_storage(reader *r, const ckpt_pkl *node, ckpt_arena *scratch)
{
    ckpt_pkl *const *pairs = NULL;
    size_t n = 0;
    if (!is_none(node) && !ckpt_pkl_pairs(node, &pairs, &n))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "not a dict");
    n /= 2;
    if (n >= UINT32_MAX / 4)
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "%zu entries", n);
    ckpt_dcp_meta *meta = r->meta;
    meta->entries = ckpt_arena_array(r->keep, n + 1, sizeof *meta->entries);
    meta->paths = ckpt_arena_array(r->keep, n + 1, sizeof *meta->paths);
    if (!meta->entries || !meta->paths || !table_init(&r->entries, scratch, n) ||
        !table_init(&r->paths, scratch, n))
        return no_memory(r);
    for (size_t i = 0; i < n; i++) {
        ckpt_dcp_entry *e = &meta->entries[i];
        ckpt_status status = parse_entry(r, pairs[2 * i], pairs[2 * i + 1], e);
        if (status != CKPT_OK)
            return status;
        uint32_t *slot =
            table_find(r, &r->entries, hash_key(e->fqn, e->rank, e->offset), same_entry, e);
        if (!slot)
            return too_many_collisions(r);
        if (*slot)
            return ckpt_fail(r->err, CKPT_E_FORMAT, "'%s' appears twice at one offset", e->fqn);
        meta->n_entries = i + 1;
        *slot = (uint32_t)meta->n_entries;
    }
    return CKPT_OK;
}

/* Entry of (fqn, offset), marked used, or CKPT_DCP_NO_ENTRY. */
static ckpt_status find_entry(reader *r, const char *fqn, int rank, int64_t *offset,
                              uint32_t *out)
{
    ckpt_dcp_entry key = {.fqn = fqn, .rank = rank, .offset = offset};
    uint32_t *slot = table_find(r, &r->entries, hash_key(fqn, rank, offset), same_entry, &key);
    if (!slot)
        return too_many_collisions(r);
    *out = *slot ? *slot - 1 : CKPT_DCP_NO_ENTRY;
    if (*slot) {
        r->meta->entries[*out].used = true;
        r->meta->entries[*out].fqn = fqn; /* the kept copy */
    }
    return CKPT_OK;
}

/* ---- state_dict_metadata ------------------------------------------------------------------- */

static ckpt_status parse_dtype(reader *r, const ckpt_pkl *properties, ckpt_dcp_tensor *t)
{
    const ckpt_pkl *state = object_state(properties), *dtype = NULL;
    if (state && state->kind == CKPT_PKL_TUPLE && state->n_items)
        dtype = state->items[0];
    else if (state && state->kind == CKPT_PKL_DICT)
        dtype = ckpt_pkl_get(state, "dtype");
    if (is_none(dtype))
        return CKPT_OK;
    if (dtype->kind != CKPT_PKL_GLOBAL || strcmp(dtype->str, "torch") != 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "dtype is not a torch dtype");
    if (!ckpt_dtype_from_torch(dtype->name, &t->dtype))
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "dtype torch.%s", dtype->name);
    t->has_dtype = true;
    return CKPT_OK;
}

static bool is_empty(int rank, const int64_t *len)
{
    for (int i = 0; i < rank; i++)
        if (len[i] == 0)
            return true;
    return false;
}

static void format_box(char *text, size_t size, int rank, const int64_t *v)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < rank && used + 24 < size; i++) {
        int n = snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)v[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

static ckpt_status parse_piece(reader *r, const ckpt_dcp_tensor *t, const ckpt_pkl *node,
                               ckpt_dcp_piece *piece)
{
    if (!ckpt_pkl_is_object(node, NULL, "ChunkStorageMetadata"))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "is not a ChunkStorageMetadata");
    int lo_rank, len_rank;
    ckpt_status status;
    CKPT_CHECK(size_of(r, ckpt_pkl_get(node, "offsets"), "offsets", &piece->lo, &lo_rank));
    CKPT_CHECK(size_of(r, ckpt_pkl_get(node, "sizes"), "sizes", &piece->len, &len_rank));
    if (lo_rank != t->rank || len_rank != t->rank)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "has %d offsets and %d sizes, tensor has %d dims",
                         lo_rank, len_rank, t->rank);
    CKPT_CHECK(find_entry(r, t->name, t->rank, piece->lo, &piece->entry));
    if (piece->entry == CKPT_DCP_NO_ENTRY && !is_empty(t->rank, piece->len)) {
        char at[128];
        format_box(at, sizeof at, t->rank, piece->lo);
        return ckpt_fail(r->err, CKPT_E_FORMAT, "at [%s] has no storage entry", at);
    }
done:
    return status;
}

/* torch.float4_e2m1fn_x2 counts pairs along the last axis; everything above counts elements. */
static ckpt_status unpack_pairs(const reader *r, ckpt_dcp_tensor *t)
{
    int last = t->rank - 1;
    bool ok = last >= 0 && ckpt_mul_i64(t->dims[last], 2, &t->dims[last]);
    for (size_t i = 0; ok && i < t->n_pieces; i++)
        ok = ckpt_mul_i64(t->pieces[i].lo[last], 2, &t->pieces[i].lo[last]) &&
             ckpt_mul_i64(t->pieces[i].len[last], 2, &t->pieces[i].len[last]);
    return ok ? CKPT_OK : ckpt_fail(r->err, CKPT_E_FORMAT, "no axis of float4 pairs");
}

static ckpt_status parse_tensor(reader *r, const ckpt_pkl *node, ckpt_dcp_tensor *t)
{
    ckpt_err *err = r->err;
    ckpt_status status;
    int64_t numel;
    CKPT_CHECK(parse_dtype(r, ckpt_pkl_get(node, "properties"), t));
    CKPT_CHECK(size_of(r, ckpt_pkl_get(node, "size"), "size", &t->dims, &t->rank));
    if (!is_empty(t->rank, t->dims) && !ckpt_numel(t->rank, t->dims, &numel))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "number of elements overflows");
    const ckpt_pkl *chunks = ckpt_pkl_get(node, "chunks");
    if (is_none(chunks))
        return CKPT_OK;
    if (chunks->kind != CKPT_PKL_LIST && chunks->kind != CKPT_PKL_TUPLE)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "chunks is not a list");
    t->pieces = ckpt_arena_array(r->keep, chunks->n_items + 1, sizeof *t->pieces);
    if (!t->pieces)
        return no_memory(r);
    for (size_t i = 0; i < chunks->n_items; i++) {
        CKPT_TRY(parse_piece(r, t, chunks->items[i], &t->pieces[i]), "chunk %zu", i);
        t->n_pieces++;
    }
    if (t->has_dtype && t->dtype == CKPT_F4)
        CKPT_CHECK(unpack_pairs(r, t));
done:
    return status;
}

static ckpt_status parse_named(reader *r, const ckpt_pkl *key, const ckpt_pkl *node)
{
    ckpt_err *err = r->err;
    const char *text;
    ckpt_status status = name_of(r, key, "state_dict_metadata key", &text);
    if (status != CKPT_OK)
        return status;
    const char *name = ckpt_arena_strndup(r->keep, text, key->len);
    if (!name)
        return no_memory(r);
    uint32_t *slot = table_find(r, &r->names, hash_key(name, -1, NULL), same_name, name);
    if (!slot)
        return too_many_collisions(r);
    if (*slot)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "'%s' appears twice", name);
    r->seen[r->n_seen++] = name;
    *slot = (uint32_t)r->n_seen;

    ckpt_dcp_meta *meta = r->meta;
    if (ckpt_pkl_is_object(node, NULL, "TensorStorageMetadata")) {
        ckpt_dcp_tensor *t = &meta->tensors[meta->n_tensors++];
        t->name = name;
        CKPT_TRY(parse_tensor(r, node, t), "tensor '%s'", name);
    } else if (ckpt_pkl_is_object(node, NULL, "BytesStorageMetadata")) {
        ckpt_dcp_bytes *b = &meta->objects[meta->n_objects++];
        b->name = name;
        CKPT_CHECK(find_entry(r, name, -1, NULL, &b->entry));
        if (b->entry == CKPT_DCP_NO_ENTRY)
            status = ckpt_fail(r->err, CKPT_E_FORMAT, "object '%s' has no storage entry", name);
    } else {
        status = ckpt_fail(r->err, CKPT_E_FORMAT,
                           "'%s' is neither TensorStorageMetadata nor BytesStorageMetadata", name);
    }
done:
    return status;
}

static ckpt_status parse_state(reader *r, const ckpt_pkl *node, ckpt_arena *scratch)
{
    ckpt_pkl *const *pairs;
    size_t n;
    if (!ckpt_pkl_pairs(node, &pairs, &n))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "state_dict_metadata is not a dict");
    n /= 2;
    if (n >= UINT32_MAX / 4)
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "%zu names", n);
    r->meta->tensors = ckpt_arena_array(r->keep, n + 1, sizeof *r->meta->tensors);
    r->meta->objects = ckpt_arena_array(r->keep, n + 1, sizeof *r->meta->objects);
    r->seen = ckpt_arena_array(scratch, n + 1, sizeof *r->seen);
    if (!r->meta->tensors || !r->meta->objects || !r->seen ||
        !table_init(&r->names, scratch, n))
        return no_memory(r);
    for (size_t i = 0; i < n; i++) {
        ckpt_status status = parse_named(r, pairs[2 * i], pairs[2 * i + 1]);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Entries that nothing refers to keep their name for messages: copy it out of the pickle. */
static ckpt_status keep_unused_names(reader *r)
{
    for (size_t i = 0; i < r->meta->n_entries; i++) {
        ckpt_dcp_entry *e = &r->meta->entries[i];
        if (!e->used && !(e->fqn = ckpt_arena_strdup(r->keep, e->fqn)))
            return no_memory(r);
    }
    return CKPT_OK;
}

ckpt_status ckpt_dcp_meta_parse(const uint8_t *bytes, size_t n, ckpt_arena *arena,
                                ckpt_dcp_meta *meta, ckpt_err *err)
{
    *meta = (ckpt_dcp_meta){0};
    reader r = {.keep = arena, .meta = meta, .err = err};
    ckpt_arena scratch = {0};
    ckpt_pkl *root = NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_pkl_parse(bytes, n, &scratch, NULL, &root, NULL, NULL, err));
    if (!ckpt_pkl_is_object(root, NULL, "Metadata") &&
        !ckpt_pkl_is_object(root, NULL, "MCoreMetadata")) {
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "holds no torch.distributed.checkpoint.metadata.Metadata");
        goto done;
    }
    CKPT_TRY(parse_storage(&r, ckpt_pkl_get(root, "storage_data"), &scratch), "storage_data");
    CKPT_CHECK(parse_state(&r, ckpt_pkl_get(root, "state_dict_metadata"), &scratch));
    CKPT_CHECK(keep_unused_names(&r));
done:
    ckpt_arena_free(&scratch);
    return status;
}
