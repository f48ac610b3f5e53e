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
#include "dcp_taken.h"
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
    ckpt_dcp_taken taken; /* nothing, if the pickle was parsed into nodes */
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

static ckpt_status parse_info(reader *r, ckpt_pkl *node, ckpt_dcp_entry *e)
{
    const ckpt_dcp_taken_info *taken = ckpt_dcp_info_of(&r->taken, node);
    ckpt_dcp_taken_info info;
    if (!taken && !ckpt_pkl_is_object(node, NULL, "_StorageInfo"))
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "storage is not a filesystem _StorageInfo");
    ckpt_status status = CKPT_OK;
    if (!taken)
        CKPT_CHECK(ckpt_dcp_info_parse(node, r->keep, &info, r->err));
    else
        info = *taken;
    CKPT_CHECK(path_of(r, info.path, &e->path));
    e->at = info.at;
    e->length = info.length;
    e->transforms = info.transforms;
done:
    return status;
}

/* The name is only compared here; those that matter are checked in state_dict_metadata. */
static ckpt_status parse_entry(reader *r, const ckpt_pkl *node, ckpt_pkl *info, entry_key *key,
                               ckpt_dcp_entry *e)
{
    const ckpt_dcp_taken_index *taken = ckpt_dcp_index_of(&r->taken, node);
    ckpt_dcp_taken_index index;
    if (!taken && !ckpt_pkl_is_object(node, NULL, "MetadataIndex"))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "key is not a MetadataIndex");
    ckpt_err *err = r->err;
    ckpt_status status = CKPT_OK;
    if (!taken)
        CKPT_CHECK(ckpt_dcp_index_parse(node, r->scratch, &index, err));
    else
        index = *taken;
    key->fqn = e->fqn = index.fqn->str;
    key->len = (uint32_t)index.fqn->len;
    key->offset = index.offset;
    key->rank = index.rank;
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
    if (!ckpt_dcp_is_none(node) && !ckpt_pkl_pairs(node, &pairs, &n))
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
                               const ckpt_dcp_taken_chunk *chunk, ckpt_dcp_piece *piece)
{
    if (chunk->lo_rank != t->rank || chunk->len_rank != t->rank)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "has %d offsets and %d sizes, tensor has %d dims",
                         chunk->lo_rank, chunk->len_rank, t->rank);
    piece->lo = chunk->lo;
    piece->len = chunk->len;
    key->offset = chunk->lo;
    ckpt_status status = find_entry(r, key, t->name, &piece->entry);
    if (status != CKPT_OK || piece->entry != CKPT_DCP_NO_ENTRY || is_empty(t->rank, chunk->len))
        return status;
    char at[128];
    format_box(at, sizeof at, t->rank, chunk->lo);
    return ckpt_fail(r->err, CKPT_E_FORMAT, "at [%s] has no storage entry", at);
}

static ckpt_status parse_pieces(reader *r, ckpt_dcp_tensor *t, entry_key *key,
                                const ckpt_dcp_taken_tensor *from)
{
    ckpt_err *err = r->err;
    ckpt_status status = CKPT_OK;
    t->pieces = ckpt_arena_array(r->keep, from->n + 1, sizeof *t->pieces);
    if (!t->pieces)
        return no_memory(r);
    key->rank = t->rank;
    for (size_t i = 0; i < from->n; i++) {
        ckpt_dcp_taken_chunk chunk;
        const ckpt_dcp_taken_chunk *taken =
            from->chunks ? ckpt_dcp_chunk_of(&r->taken, from->chunks->items[i])
                         : &r->taken.chunks[from->first + i];
        if (taken)
            chunk = *taken;
        else
            CKPT_TRY(ckpt_dcp_chunk_parse(from->chunks->items[i], r->keep, &chunk, err),
                     "chunk %zu", i);
        CKPT_TRY(parse_piece(r, t, key, &chunk, &t->pieces[i]), "chunk %zu", i);
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
    const ckpt_dcp_taken_tensor *taken = ckpt_dcp_tensor_of(&r->taken, node);
    ckpt_dcp_taken_tensor from;
    ckpt_status status = CKPT_OK;
    int64_t numel;
    if (!taken)
        CKPT_CHECK(ckpt_dcp_tensor_parse(node, r->keep, &from, r->err));
    else
        from = *taken;
    t->dims = from.dims;
    t->rank = from.rank;
    t->dtype = from.dtype;
    t->has_dtype = from.has_dtype;
    if (!is_empty(t->rank, t->dims) && !ckpt_numel(t->rank, t->dims, &numel))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "number of elements overflows");
    CKPT_CHECK(parse_pieces(r, t, key, &from));
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
    if (ckpt_pkl_is_object(node, NULL, "TensorStorageMetadata") ||
        ckpt_dcp_tensor_of(&r->taken, node)) {
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
    if (ckpt_dcp_is_none(shape))
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
    CKPT_TRY(ckpt_dcp_size_in(r->keep, shape, "nd_reformulated_orig_global_shape", &dims,
                              &t->flat_rank, err),
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
    if (ckpt_dcp_is_none(node))
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
    if (ckpt_dcp_is_none(node) || !ckpt_pkl_pairs(node, &pairs, &n))
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

static ckpt_status parse_pickle(reader *r, const uint8_t *bytes, size_t n, bool nodes,
                                ckpt_pkl **root, uint32_t *n_nodes)
{
    ckpt_pkl_taker taker = ckpt_dcp_taker(&r->taken);
    if (!nodes &&
        ckpt_pkl_parse_taking(bytes, n, r->scratch, &taker, root, n_nodes, NULL) == CKPT_OK)
        return CKPT_OK;
    ckpt_dcp_taken_release(&r->taken);
    ckpt_arena_free(r->scratch);
    return ckpt_pkl_parse(bytes, n, r->scratch, NULL, root, NULL, n_nodes, r->err);
}

static ckpt_status meta_parse(const uint8_t *bytes, size_t n, bool nodes, ckpt_arena *arena,
                              ckpt_dcp_meta *meta, ckpt_err *err)
{
    *meta = (ckpt_dcp_meta){0};
    ckpt_arena scratch = {0};
    reader r = {.keep = arena, .scratch = &scratch, .meta = meta, .err = err};
    r.taken = (ckpt_dcp_taken){.keep = arena, .scratch = &scratch};
    ckpt_pkl *root = NULL;
    ckpt_status status;
    uint32_t n_nodes = 0;
    CKPT_CHECK(parse_pickle(&r, bytes, n, nodes, &root, &n_nodes));
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
    ckpt_dcp_taken_release(&r.taken);
    ckpt_arena_free(&scratch);
    return status;
}

ckpt_status ckpt_dcp_meta_parse(const uint8_t *bytes, size_t n, ckpt_arena *arena,
                                ckpt_dcp_meta *meta, ckpt_err *err)
{
    return meta_parse(bytes, n, false, arena, meta, err);
}

ckpt_status ckpt_dcp_meta_parse_nodes(const uint8_t *bytes, size_t n, ckpt_arena *arena,
                                      ckpt_dcp_meta *meta, ckpt_err *err)
{
    return meta_parse(bytes, n, true, arena, meta, err);
}
