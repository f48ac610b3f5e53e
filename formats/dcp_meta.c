/* DCP .metadata: one bare pickle (protocol 2 to 5) of torch.distributed.checkpoint.metadata
 * Metadata:
 *   state_dict_metadata  {fqn: TensorStorageMetadata | BytesStorageMetadata}
 *   storage_data         {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}
 * Classes are recognised by name alone, because modules moved between releases and Megatron uses
 * its own subclass. Every field may be absent; storage_meta and all_local_plans are not looked
 * at, of planner_data only where the model's tensors lie, and of Megatron's mcore_data only the shapes of flattened tensors (dcp_flat.c). MetadataIndex.index is a hint and is ignored.
 * Source: torch-formats.md section 1. */
#include "dcp_meta.h"

#include "checked.h"
#include "io.h"
#include "pickle.h"
#include "pickle_policy.h"

#include <stdio.h>
#include <string.h>

/* A good hash at half load never probes this far; input that makes it do so is hostile. */
#define PROBE_LIMIT 1024

typedef struct index_table {
    uint32_t *slots; /* item number + 1; 0 empty */
    uint64_t mask;
} index_table;

/* (fqn, offset) of an entry, needed only until chunks have found theirs. */
typedef struct entry_key {
    const char *fqn;
    const int64_t *offset; /* as torch counts */
    uint32_t len;          /* of fqn, bytes */
    int rank;              /* -1: an object, no offset */
} entry_key;

typedef struct reader {
    ckpt_arena *keep, *scratch;
    ckpt_dcp_meta *meta;
    entry_key *keys; /* by entry */
    index_table entries, names, paths;
    uint32_t next_entry;      /* the one behind that found last */
    ckpt_pkl *last_path_node; /* memoised paths repeat as one node */
    uint32_t last_path;
    const char **seen;     /* names in metadata order, for duplicate detection */
    uint32_t *seen_tensor; /* which tensor that is, + 1; 0: an object */
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

static uint64_t hash_text(const char *s, size_t n)
{
    uint64_t h = UINT64_C(0x2545f4914f6cdd1d) ^ n, word;
    for (; n >= 8; n -= 8, s += 8) {
        memcpy(&word, s, 8);
        h = mix(h, word);
    }
    word = 0;
    memcpy(&word, s, n);
    return mix(h, word);
}

static uint64_t hash_key(const entry_key *k)
{
    uint64_t h = mix(hash_text(k->fqn, k->len), (uint64_t)(k->rank + 1));
    for (int i = 0; i < k->rank; i++)
        h = mix(h, (uint64_t)k->offset[i]);
    return h ^ (h >> 32);
}

static uint64_t hash_name(const char *name)
{
    return hash_key(&(entry_key){.fqn = name, .len = (uint32_t)strlen(name), .rank = -1});
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

static bool same_entry(const reader *r, uint32_t item, const void *key)
{
    const entry_key *a = &r->keys[item], *b = key;
    return a->rank == b->rank && a->len == b->len &&
           (a->rank <= 0 || memcmp(a->offset, b->offset, (size_t)a->rank * 8) == 0) &&
           (a->fqn == b->fqn || memcmp(a->fqn, b->fqn, a->len) == 0);
}

static bool same_name(const reader *r, uint32_t item, const void *key)
{
    return strcmp(r->seen[item], key) == 0;
}

static bool same_path(const reader *r, uint32_t item, const void *key)
{
    return strcmp(r->meta->paths[item], key) == 0;
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
    if (node->len == 0 || node->len > CKPT_DCP_NAME_LIMIT || !valid_utf8(node->str, node->len))
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "%s '%.100s' is empty, too long, holds NUL or is not UTF-8", what,
                         node->str);
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

/* torch.Size, tuple or list of at most CKPT_MAX_RANK non-negative ints. */
static ckpt_status size_of(const reader *r, const ckpt_pkl *node, const char *what, int64_t *out,
                           int *rank)
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
    for (size_t i = 0; i < node->n_items; i++)
        if (!ckpt_pkl_int(node->items[i], &out[i]) || out[i] < 0)
            return ckpt_fail(r->err, CKPT_E_FORMAT, "%s: element %zu is not a non-negative integer",
                             what, i);
    *rank = (int)node->n_items;
    return CKPT_OK;
}

static ckpt_status size_in(const reader *r, ckpt_arena *arena, const ckpt_pkl *node,
                           const char *what, int64_t **out, int *rank)
{
    int64_t dims[CKPT_MAX_RANK];
    ckpt_status status = size_of(r, node, what, dims, rank);
    if (status != CKPT_OK)
        return status;
    *out = ckpt_arena_memdup(arena, dims, (size_t)*rank * sizeof *dims);
    return *out || *rank == 0 ? CKPT_OK : no_memory(r);
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
    uint32_t *slot = table_find(r, &r->paths, hash_name(path), same_path, path);
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

/* The name is only compared here; those that matter are checked in state_dict_metadata. */
static ckpt_status parse_entry(reader *r, const ckpt_pkl *node, ckpt_pkl *info, entry_key *key,
                               ckpt_dcp_entry *e)
{
    if (!ckpt_pkl_is_object(node, NULL, "MetadataIndex"))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "key is not a MetadataIndex");
    ckpt_err *err = r->err;
    ckpt_status status = CKPT_OK;
    const ckpt_pkl *fqn = ckpt_pkl_get(node, "fqn");
    key->fqn = e->fqn = ckpt_pkl_str(fqn);
    if (!key->fqn || fqn->len >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "fqn is not a string");
    key->len = (uint32_t)fqn->len;
    key->rank = -1;
    ckpt_pkl *offset = ckpt_pkl_get(node, "offset");
    if (!is_none(offset)) {
        int64_t *dims = NULL;
        CKPT_TRY(size_in(r, r->scratch, offset, "offset", &dims, &key->rank), "'%s'", e->fqn);
        key->offset = dims;
    }
    CKPT_TRY(parse_info(r, info, e), "'%s'", e->fqn);
done:
    return status;
}

/* Enter all keys. The table of a million is larger than the caches, so the slots are asked for some
 * turns ahead. */
static ckpt_status index_entries(reader *r, const uint64_t *hashes)
{
    enum { AHEAD = 16 };
    size_t n = r->meta->n_entries;
    for (size_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            __builtin_prefetch(&r->entries.slots[hashes[i + AHEAD] & r->entries.mask], 1);
        uint32_t *slot = table_find(r, &r->entries, hashes[i], same_entry, &r->keys[i]);
        if (!slot)
            return too_many_collisions(r);
        if (*slot)
            return ckpt_fail(r->err, CKPT_E_FORMAT, "'%s' appears twice at one offset",
                             r->meta->entries[i].fqn);
        *slot = (uint32_t)(i + 1);
    }
    return CKPT_OK;
}

static ckpt_status parse_storage(reader *r, const ckpt_pkl *node)
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
    r->keys = ckpt_arena_array(r->scratch, n + 1, sizeof *r->keys);
    uint64_t *hashes = ckpt_arena_array(r->scratch, n + 1, sizeof *hashes);
    if (!meta->entries || !meta->paths || !r->keys || !hashes ||
        !table_init(&r->entries, r->scratch, n) || !table_init(&r->paths, r->scratch, n))
        return no_memory(r);
    for (size_t i = 0; i < n; i++) {
        ckpt_dcp_entry *e = &meta->entries[i];
        ckpt_status status = parse_entry(r, pairs[2 * i], pairs[2 * i + 1], &r->keys[i], e);
        if (status != CKPT_OK)
            return status;
        hashes[i] = hash_key(&r->keys[i]);
    }
    meta->n_entries = n;
    return index_entries(r, hashes);
}

/* Entry of a key, marked used, or CKPT_DCP_NO_ENTRY. */
static ckpt_status find_entry(reader *r, const entry_key *key, const char *kept, uint32_t *out)
{
    /* Writers list both tables in one order, so the entry behind the last one is mostly the one. */
    if (r->next_entry < r->meta->n_entries && same_entry(r, r->next_entry, key)) {
        *out = r->next_entry;
    } else {
        uint32_t *slot = table_find(r, &r->entries, hash_key(key), same_entry, key);
        if (!slot)
            return too_many_collisions(r);
        *out = *slot ? *slot - 1 : CKPT_DCP_NO_ENTRY;
    }
    if (*out != CKPT_DCP_NO_ENTRY) {
        r->next_entry = *out + 1;
        r->meta->entries[*out].used = true;
        r->meta->entries[*out].fqn = kept;
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

/* key: the tensor's name as stored, so that a memoised one is found by its address. */
static ckpt_status parse_piece(reader *r, const ckpt_dcp_tensor *t, entry_key *key,
                               const ckpt_pkl *node, ckpt_dcp_piece *piece)
{
    if (!ckpt_pkl_is_object(node, NULL, "ChunkStorageMetadata"))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "is not a ChunkStorageMetadata");
    int64_t lo[CKPT_MAX_RANK], len[CKPT_MAX_RANK];
    int lo_rank, len_rank;
    ckpt_status status;
    CKPT_CHECK(size_of(r, ckpt_pkl_get(node, "offsets"), "offsets", lo, &lo_rank));
    CKPT_CHECK(size_of(r, ckpt_pkl_get(node, "sizes"), "sizes", len, &len_rank));
    if (lo_rank != t->rank || len_rank != t->rank)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "has %d offsets and %d sizes, tensor has %d dims",
                         lo_rank, len_rank, t->rank);
    memcpy(piece->lo, lo, (size_t)t->rank * sizeof *lo);
    memcpy(piece->len, len, (size_t)t->rank * sizeof *len);
    key->offset = lo;
    CKPT_CHECK(find_entry(r, key, t->name, &piece->entry));
    if (piece->entry == CKPT_DCP_NO_ENTRY && !is_empty(t->rank, len)) {
        char at[128];
        format_box(at, sizeof at, t->rank, lo);
        return ckpt_fail(r->err, CKPT_E_FORMAT, "at [%s] has no storage entry", at);
    }
done:
    return status;
}

static ckpt_status parse_pieces(reader *r, ckpt_dcp_tensor *t, entry_key *key,
                                const ckpt_pkl *chunks)
{
    size_t n = chunks->n_items, rank = (size_t)t->rank;
    ckpt_err *err = r->err;
    ckpt_status status = CKPT_OK;
    if (chunks->kind != CKPT_PKL_LIST && chunks->kind != CKPT_PKL_TUPLE)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "chunks is not a list");
    int64_t *boxes = ckpt_arena_array(r->keep, 2 * rank * n + 1, sizeof *boxes);
    t->pieces = ckpt_arena_array(r->keep, n + 1, sizeof *t->pieces);
    if (!boxes || !t->pieces)
        return no_memory(r);
    key->rank = t->rank;
    for (size_t i = 0; i < n; i++) {
        t->pieces[i].lo = boxes + 2 * rank * i;
        t->pieces[i].len = boxes + 2 * rank * i + rank;
        CKPT_TRY(parse_piece(r, t, key, chunks->items[i], &t->pieces[i]), "chunk %zu", i);
        t->n_pieces++;
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

static ckpt_status parse_tensor(reader *r, const ckpt_pkl *node, entry_key *key, ckpt_dcp_tensor *t)
{
    ckpt_status status;
    int64_t numel;
    CKPT_CHECK(parse_dtype(r, ckpt_pkl_get(node, "properties"), t));
    CKPT_CHECK(size_in(r, r->keep, ckpt_pkl_get(node, "size"), "size", &t->dims, &t->rank));
    if (!is_empty(t->rank, t->dims) && !ckpt_numel(t->rank, t->dims, &numel))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "number of elements overflows");
    const ckpt_pkl *chunks = ckpt_pkl_get(node, "chunks");
    if (!is_none(chunks))
        CKPT_CHECK(parse_pieces(r, t, key, chunks));
    if (t->has_dtype && t->dtype == CKPT_F4)
        CKPT_CHECK(unpack_pairs(r, t));
done:
    return status;
}

static ckpt_status parse_named(reader *r, const ckpt_pkl *key_node, const ckpt_pkl *node)
{
    ckpt_err *err = r->err;
    const char *text;
    ckpt_status status = name_of(r, key_node, "state_dict_metadata key", &text);
    if (status != CKPT_OK)
        return status;
    const char *name = ckpt_arena_strndup(r->keep, text, key_node->len);
    if (!name)
        return no_memory(r);
    uint32_t *slot = table_find(r, &r->names, hash_name(name), same_name, name);
    if (!slot)
        return too_many_collisions(r);
    if (*slot)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "'%s' appears twice", name);
    r->seen[r->n_seen++] = name;
    *slot = (uint32_t)r->n_seen;

    ckpt_dcp_meta *meta = r->meta;
    entry_key key = {.fqn = text, .len = (uint32_t)key_node->len, .rank = -1};
    if (ckpt_pkl_is_object(node, NULL, "TensorStorageMetadata")) {
        ckpt_dcp_tensor *t = &meta->tensors[meta->n_tensors++];
        t->name = name;
        r->seen_tensor[r->n_seen - 1] = (uint32_t)meta->n_tensors;
        CKPT_TRY(parse_tensor(r, node, &key, t), "tensor '%s'", name);
    } else if (ckpt_pkl_is_object(node, NULL, "BytesStorageMetadata")) {
        ckpt_dcp_bytes *b = &meta->objects[meta->n_objects++];
        b->name = name;
        CKPT_CHECK(find_entry(r, &key, name, &b->entry));
        if (b->entry == CKPT_DCP_NO_ENTRY)
            status = ckpt_fail(r->err, CKPT_E_FORMAT, "object '%s' has no storage entry", name);
    } else {
        status = ckpt_fail(r->err, CKPT_E_FORMAT,
                           "'%s' is neither TensorStorageMetadata nor BytesStorageMetadata", name);
    }
done:
    return status;
}

static ckpt_status parse_state(reader *r, const ckpt_pkl *node)
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
    r->seen = ckpt_arena_array(r->scratch, n + 1, sizeof *r->seen);
    r->seen_tensor = ckpt_arena_array(r->scratch, n + 1, sizeof *r->seen_tensor);
    if (!r->meta->tensors || !r->meta->objects || !r->seen || !r->seen_tensor ||
        !table_init(&r->names, r->scratch, n))
        return no_memory(r);
    for (size_t i = 0; i < n; i++) {
        ckpt_status status = parse_named(r, pairs[2 * i], pairs[2 * i + 1]);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* ---- mcore_data --------------------------------------------------------------------------- */

/* One {name: {"nd_reformulated_orig_global_shape": Size}}; most tensors have an empty dict. */
static ckpt_status parse_reformed(reader *r, const ckpt_pkl *key, const ckpt_pkl *node)
{
    const ckpt_pkl *shape = ckpt_pkl_get(node, "nd_reformulated_orig_global_shape");
    const char *name;
    int64_t *dims = NULL;
    if (is_none(shape))
        return CKPT_OK;
    ckpt_err *err = r->err;
    ckpt_status status = name_of(r, key, "key", &name);
    if (status != CKPT_OK)
        return status;
    uint32_t *slot = table_find(r, &r->names, hash_name(name), same_name, name);
    if (!slot)
        return too_many_collisions(r);
    /* What is not stored needs no shape. */
    if (*slot == 0)
        return CKPT_OK;
    if (r->seen_tensor[*slot - 1] == 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "'%s' is an object and has a shape", name);
    ckpt_dcp_tensor *t = &r->meta->tensors[r->seen_tensor[*slot - 1] - 1];
    CKPT_TRY(size_in(r, r->keep, shape, "nd_reformulated_orig_global_shape", &dims, &t->flat_rank),
             "tensor '%s'", name);
    static const int64_t none;
    t->flat = dims ? dims : &none;
    CKPT_TRY(ckpt_dcp_flat_check(t, err), "tensor '%s'", name);
done:
    return status;
}

static ckpt_status parse_mcore(reader *r, const ckpt_pkl *node)
{
    ckpt_pkl *const *pairs;
    size_t n;
    if (is_none(node))
        return CKPT_OK;
    if (!ckpt_pkl_pairs(node, &pairs, &n))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "not a dict");
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i + 1 < n && status == CKPT_OK; i += 2)
        status = parse_reformed(r, pairs[i], pairs[i + 1]);
    return status;
}

/* PyTorch from 2.9 on drops the mcore_data of Megatron-Core 0.13. An optimizer state has the shape of
 * its parameter, so "optimizer.state.KIND.KEY" with one axis more than KEY, whose blocks and chunks
 * fit, is a flattened one. */
static ckpt_status find_shapes(reader *r)
{
    static const char prefix[] = "optimizer.state.";
    for (size_t i = 0; i < r->meta->n_tensors; i++) {
        ckpt_dcp_tensor *t = &r->meta->tensors[i];
        const char *key = strncmp(t->name, prefix, sizeof prefix - 1) == 0
                              ? strchr(t->name + sizeof prefix - 1, '.')
                              : NULL;
        if (t->flat || !key || key[1] == '\0')
            continue;
        uint32_t *slot = table_find(r, &r->names, hash_name(key + 1), same_name, key + 1);
        if (!slot)
            return too_many_collisions(r);
        if (*slot == 0 || r->seen_tensor[*slot - 1] == 0)
            continue;
        const ckpt_dcp_tensor *of = &r->meta->tensors[r->seen_tensor[*slot - 1] - 1];
        ckpt_dcp_tensor as = *t;
        as.flat = of->dims;
        as.flat_rank = of->rank;
        if (of->flat || of->rank == 0 || ckpt_dcp_flat_check(&as, NULL) != CKPT_OK)
            continue;
        *t = as;
        r->meta->n_shapes_found++;
    }
    return CKPT_OK;
}

/* ---- planner_data ------------------------------------------------------------------------- */

#define MODEL "model."

static bool in_model(const ckpt_dcp_tensor *t)
{
    return strncmp(t->name, MODEL, sizeof MODEL - 1) == 0 && t->name[sizeof MODEL - 1] != '\0';
}

/* Megatron-FSDP's own state dict, as fsdp_dtensor stores it, has "module." before every name, once for
 * each object wrapped around the model. Characters of them that all tensors of the model share. */
static size_t wrappers(const reader *r)
{
    static const char module[] = "module.";
    size_t cut = 0, n = sizeof module - 1;
    for (;; cut += n)
        for (size_t i = 0; i < r->meta->n_tensors; i++) {
            const ckpt_dcp_tensor *t = &r->meta->tensors[i];
            const char *name = t->name + sizeof MODEL - 1 + cut;
            if (in_model(t) && (strncmp(name, module, n) != 0 || name[n] == '\0'))
                return cut;
        }
}

/* {fqn: path}. dcp.save({"model": model.state_dict(), ...}) gives ("model", "layers.0.weight") for
 * "model.layers.0.weight", dcp.save(model.state_dict()) the name alone: only the path tells which
 * "model." is the state dict's and which the parameter's own. */
static ckpt_status strip_model(reader *r, const ckpt_pkl *node)
{
    ckpt_pkl *const *pairs;
    size_t n, under = 0, inside = 0;
    if (is_none(node) || !ckpt_pkl_pairs(node, &pairs, &n))
        return CKPT_OK;
    for (size_t i = 0; i < r->meta->n_tensors; i++)
        inside += in_model(&r->meta->tensors[i]);
    for (size_t i = 0; i + 1 < n; i += 2) {
        const ckpt_pkl *path = pairs[i + 1];
        const char *name = ckpt_pkl_str(pairs[i]), *top;
        if (!name || path->kind != CKPT_PKL_TUPLE || path->n_items < 2 ||
            !(top = ckpt_pkl_str(path->items[0])) || strcmp(top, "model") != 0 ||
            strncmp(name, MODEL, sizeof MODEL - 1) != 0)
            continue;
        uint32_t *slot = table_find(r, &r->names, hash_name(name), same_name, name);
        if (!slot)
            return too_many_collisions(r);
        under += *slot != 0 && r->seen_tensor[*slot - 1] != 0;
    }
    if (inside == 0 || under != inside)
        return CKPT_OK;
    size_t cut = sizeof MODEL - 1 + wrappers(r);
    for (size_t i = 0; i < r->meta->n_tensors; i++)
        if (in_model(&r->meta->tensors[i])) {
            r->meta->prefix = ckpt_arena_strndup(r->keep, r->meta->tensors[i].name, cut);
            r->meta->tensors[i].name += cut;
        }
    return r->meta->prefix != NULL ? CKPT_OK : no_memory(r);
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
    ckpt_arena scratch = {0};
    reader r = {.keep = arena, .scratch = &scratch, .meta = meta, .err = err};
    ckpt_pkl *root = NULL;
    ckpt_status status;
    uint32_t n_nodes = 0;
    CKPT_CHECK(ckpt_pkl_parse(bytes, n, &scratch, NULL, &root, NULL, &n_nodes, err));
    const char *unknown = ckpt_pkl_unknown_global(root, n_nodes, &scratch, err);
    if (unknown) {
        meta->unknown_global = ckpt_arena_strdup(arena, unknown);
        if (!meta->unknown_global) {
            status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            goto done;
        }
    }
    if (!ckpt_pkl_is_object(root, NULL, "Metadata") &&
        !ckpt_pkl_is_object(root, NULL, "MCoreMetadata")) {
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "holds no torch.distributed.checkpoint.metadata.Metadata");
        goto done;
    }
    CKPT_TRY(parse_storage(&r, ckpt_pkl_get(root, "storage_data")), "storage_data");
    CKPT_CHECK(parse_state(&r, ckpt_pkl_get(root, "state_dict_metadata")));
    CKPT_TRY(parse_mcore(&r, ckpt_pkl_get(root, "mcore_data")), "mcore_data");
    CKPT_CHECK(find_shapes(&r));
    CKPT_CHECK(strip_model(&r, ckpt_pkl_get(root, "planner_data")));
    CKPT_CHECK(keep_unused_names(&r));
    status = ckpt_pkl_take_policy(root, &meta->policy, err);
done:
    ckpt_arena_free(&scratch);
    return status;
}
