/* Files and items written by torch.save.
 *
 * Zip (torch >= 1.6): ROOT/data.pkl, ROOT/byteorder, ROOT/data/KEY, ROOT/version (decimal 1-10);
 * a persistent id is the tuple ('storage', class, key, location, numel).
 *
 * Legacy stream: pickles of the magic number 0x1950a86a20f9469cfc6c, of 1001, of a dict with system
 * information, of the object, of the list of storage keys; then per key i64 element count and raw
 * bytes, both little-endian whatever the dict says. Persistent ids have a sixth element, None or
 * (view key, offset, numel). The element size is that of the class in the first id with that key.
 *
 * Source: torch/serialization.py; torch-formats.md section 3. */
#include "torch_save.h"

#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "le.h"
#include "pickle_internal.h"

#define PICKLE_MAX ((uint64_t)1 << 29) /* bytes of one data.pkl */
#define LEGACY_WINDOW ((uint64_t)1 << 18)
#define LEGACY_PICKLES 5
#define KEY_MAX 200
/* A tensor may repeat the elements of its storage (expand(), stride 0). Written out they are all there:
 * beyond these, one that repeats them more often is there to fill disks. As for zip entries (zip.c). */
#define EXPANDED_BYTES ((uint64_t)1 << 24)
#define EXPANDED_RATIO 200

static const uint8_t legacy_magic[15] = {0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46,
                                         0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e};

/* One storage of a legacy stream. */
typedef struct storage {
    const char *key;
    uint32_t first_id;     /* node of the first persistent id, which defines the element size */
    uint64_t offset, size; /* absolute bytes; size of one element until the table is read */
    bool placed;
} storage;

typedef struct item {
    ckpt_source *src;
    uint32_t file;
    uint64_t base, length;
    ckpt_arena *arena;
    ckpt_err *err;
    ckpt_zip zip;
    storage *storages; /* legacy: sorted by key */
    size_t n_storages, cap_storages;
} item;

/* ---- persistent ids --------------------------------------------------------------------------- */

typedef struct storage_id {
    const char *key, *cls;
    int64_t numel;
    const ckpt_pkl *view;
} storage_id;

static bool read_id(const ckpt_pkl *persid, storage_id *id)
{
    const ckpt_pkl *tuple = persid && persid->kind == CKPT_PKL_PERSID ? persid->items[0] : NULL;
    const ckpt_pkl *key = ckpt_pkl_arg(tuple, 2), *cls = ckpt_pkl_arg(tuple, 1);
    const char *kind = ckpt_pkl_str(ckpt_pkl_arg(tuple, 0));
    if (!kind || strcmp(kind, "storage") != 0 || !cls || cls->kind != CKPT_PKL_GLOBAL ||
        !ckpt_pkl_str(key) || key->len == 0 || key->len > KEY_MAX || strlen(key->str) != key->len ||
        !ckpt_pkl_int(ckpt_pkl_arg(tuple, 4), &id->numel) || id->numel < 0)
        return false;
    id->key = key->str;
    id->cls = cls->name;
    id->view = ckpt_pkl_arg(tuple, 5);
    return true;
}

/* Bytes of one element of a storage class, 0 if unknown. */
static uint64_t storage_itemsize(const char *cls)
{
    static const struct {
        const char *name;
        uint64_t size;
    } others[] = {
        {"UntypedStorage",  1},
        {"QInt8Storage",    1},
        {"QUInt8Storage",   1},
        {"QInt32Storage",   4},
        {"QUInt4x2Storage", 1},
        {"QUInt2x4Storage", 1}
    };
    ckpt_dtype dtype;
    if (ckpt_dtype_from_storage(cls, &dtype))
        return (uint64_t)ckpt_dtype_get(dtype)->bits / 8;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(others[i].name, cls) == 0)
            return others[i].size;
    return 0;
}

/* ---- zip -------------------------------------------------------------------------------------- */

static ckpt_status read_small(item *it, const ckpt_zip_entry *entry, char out[16])
{
    ckpt_buf b = {0};
    ckpt_status status = ckpt_zip_read(it->src, it->file, it->base, entry, 15, &b, it->err);
    if (status == CKPT_OK) {
        memcpy(out, b.data, b.len);
        out[b.len] = 0;
    }
    ckpt_buf_release(&b);
    return status;
}

static ckpt_status check_records(item *it, ckpt_pt *pt)
{
    char text[16];
    const ckpt_zip_entry *version = ckpt_zip_find(&it->zip, "version");
    const ckpt_zip_entry *order = ckpt_zip_find(&it->zip, "byteorder");
    if (!version)
        version = ckpt_zip_find(&it->zip, ".data/version");
    if (ckpt_zip_find(&it->zip, "constants.pkl"))
        return ckpt_fail(it->err, CKPT_E_UNSUPPORTED, "TorchScript archive (constants.pkl)");
    if (!version)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "no record '%s/version'", it->zip.root);
    ckpt_status status = read_small(it, version, text);
    if (status != CKPT_OK)
        return status;
    char *end;
    long v = strtol(text, &end, 10);
    if (end == text || (*end && *end != '\n') || v < 1 || v > 10)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "version '%s', expected 1 to 10", text);
    if (!order)
        return CKPT_OK;
    status = read_small(it, order, text);
    if (status != CKPT_OK)
        return status;
    pt->big_endian = strcmp(text, "big") == 0;
    if (!pt->big_endian && strcmp(text, "little") != 0)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "byteorder '%s', expected little or big", text);
    return CKPT_OK;
}

static ckpt_status check_stored(item *it)
{
    size_t skip = strlen(it->zip.root) + 1;
    for (size_t i = 0; i < it->zip.n_entries; i++) {
        const ckpt_zip_entry *e = &it->zip.entries[i];
        if (strlen(e->name) > skip && strncmp(e->name + skip, "data/", 5) == 0 && e->method != 0)
            return ckpt_fail(it->err, CKPT_E_UNSUPPORTED,
                             "record '%s' is compressed (method %u): save it again without",
                             e->name, e->method);
    }
    return CKPT_OK;
}

static ckpt_status open_zip(item *it, ckpt_pt *pt)
{
    ckpt_buf b = {0};
    ckpt_status status =
        ckpt_zip_open(it->src, it->file, it->base, it->length, it->arena, &it->zip, it->err);
    if (status != CKPT_OK)
        return status;
    const ckpt_zip_entry *pickle = ckpt_zip_find(&it->zip, "data.pkl");
    if (!pickle)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "zip archive without '%s/data.pkl'", it->zip.root);
    status = check_records(it, pt);
    if (status == CKPT_OK)
        status = check_stored(it);
    if (status == CKPT_OK)
        status = ckpt_zip_read(it->src, it->file, it->base, pickle, PICKLE_MAX, &b, it->err);
    if (status == CKPT_OK) {
        pt->pickle_offset = it->base + pickle->offset;
        pt->pickle_length = pickle->csize;
        status =
            ckpt_pkl_parse(b.data, b.len, it->arena, NULL, &pt->root, NULL, &pt->n_nodes, it->err);
        if (status != CKPT_OK)
            ckpt_err_frame(it->err, "%s", pickle->name);
    }
    ckpt_buf_release(&b);
    return status;
}

/* ---- legacy stream ---------------------------------------------------------------------------- */

/* Offsets of the pickles at the start of a window, in a scratch arena. */
static ckpt_status scan_pickles(const uint8_t *p, size_t n, uint64_t ends[LEGACY_PICKLES],
                                ckpt_err *err)
{
    size_t at = 0;
    for (int i = 0; i < LEGACY_PICKLES; i++) {
        ckpt_arena scratch = {0};
        ckpt_pkl *root;
        size_t used = 0;
        int64_t version;
        ckpt_status status =
            ckpt_pkl_parse(p + at, n - at, &scratch, NULL, &root, &used, NULL, err);
        if (status == CKPT_OK && i == 1 && (!ckpt_pkl_int(root, &version) || version != 1001))
            status = ckpt_fail(err, CKPT_E_FORMAT, "legacy stream of a protocol other than 1001");
        ckpt_arena_free(&scratch);
        if (status != CKPT_OK)
            return status;
        at += used;
        ends[i] = at;
    }
    return CKPT_OK;
}

/* The pickles have no stated length and the payload follows them: widen a window until they fit. */
static ckpt_status read_pickles(item *it, ckpt_buf *b, uint64_t ends[LEGACY_PICKLES])
{
    ckpt_status status = CKPT_E_FORMAT;
    uint64_t limit = ckpt_min_u64(it->length, PICKLE_MAX);
    for (uint64_t n = ckpt_min_u64(LEGACY_WINDOW, limit); status != CKPT_OK;
         n = ckpt_min_u64(n * 4, limit)) {
        ckpt_buf_clear(b);
        uint8_t *p = ckpt_buf_extend(b, (size_t)n);
        if (!p)
            return ckpt_fail(it->err, CKPT_E_NOMEM, "out of memory for %llu bytes",
                             (unsigned long long)n);
        status = ckpt_source_read(it->src, it->file, p, (size_t)n, it->base, it->err);
        if (status != CKPT_OK)
            return status;
        status = scan_pickles(p, (size_t)n, ends, it->err);
        if (status != CKPT_OK && n == limit)
            return status;
    }
    return CKPT_OK;
}

static int by_key(const void *a, const void *b)
{
    const storage *x = a, *y = b;
    int c = strcmp(x->key, y->key);
    return c != 0 ? c : x->first_id < y->first_id ? -1 : x->first_id > y->first_id;
}

static storage *find_storage(const item *it, const char *key)
{
    size_t lo = 0, hi = it->n_storages;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(key, it->storages[mid].key);
        if (c == 0)
            return &it->storages[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* ckpt_pkl_walk callback: note every storage id. */
static ckpt_status note_storage(void *context, const ckpt_pkl *p)
{
    item *it = context;
    storage_id id;
    if (p->kind != CKPT_PKL_PERSID || !read_id(p, &id))
        return CKPT_OK;
    uint64_t size = storage_itemsize(id.cls);
    if (size == 0)
        return ckpt_fail(it->err, CKPT_E_UNSUPPORTED, "storage '%s' of class '%s'", id.key, id.cls);
    ckpt_status status = ckpt_grow((void **)&it->storages, &it->cap_storages, it->n_storages + 1,
                                   sizeof *it->storages, it->err);
    if (status == CKPT_OK)
        it->storages[it->n_storages++] = (storage){.key = id.key, .first_id = p->id, .size = size};
    return status;
}

static void merge_storages(item *it)
{
    size_t kept = 0;
    if (it->n_storages)
        qsort(it->storages, it->n_storages, sizeof *it->storages, by_key);
    for (size_t i = 0; i < it->n_storages; i++)
        if (kept == 0 || strcmp(it->storages[kept - 1].key, it->storages[i].key) != 0)
            it->storages[kept++] = it->storages[i];
    it->n_storages = kept;
}

/* One element count and its payload at *at (relative to the item). */
static ckpt_status place_storage(item *it, const ckpt_pkl *key, uint64_t *at)
{
    uint8_t count[8];
    const char *name = ckpt_pkl_str(key);
    storage *s = name ? find_storage(it, name) : NULL;
    if (!s || s->placed)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "storage key '%s' is %s", name ? name : "?",
                         s ? "listed twice" : "listed but not used");
    if (*at > it->length || it->length - *at < sizeof count)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "storage '%s' at %llu past the end %llu", name,
                         (unsigned long long)*at, (unsigned long long)it->length);
    ckpt_status status =
        ckpt_source_read(it->src, it->file, count, sizeof count, it->base + *at, it->err);
    if (status != CKPT_OK)
        return status;
    *at += sizeof count;
    uint64_t n = ckpt_get_u64(count);
    if (!ckpt_mul_u64(n, s->size, &s->size) || s->size > it->length - *at)
        return ckpt_fail(
            it->err, CKPT_E_FORMAT, "storage '%s': %llu elements at %llu past the end %llu", name,
            (unsigned long long)n, (unsigned long long)*at, (unsigned long long)it->length);
    s->offset = it->base + *at;
    s->placed = true;
    *at += s->size;
    return CKPT_OK;
}

static ckpt_status read_table(item *it, ckpt_pt *pt, const ckpt_pkl *keys, uint64_t at)
{
    ckpt_status status = ckpt_pkl_walk(pt->root, pt->n_nodes, note_storage, it, it->err);
    if (status != CKPT_OK)
        return status;
    merge_storages(it);
    if (keys->kind != CKPT_PKL_LIST)
        return ckpt_fail(it->err, CKPT_E_FORMAT, "storage keys are not a list");
    for (size_t i = 0; status == CKPT_OK && i < keys->n_items; i++)
        status = place_storage(it, keys->items[i], &at);
    return status;
}

static ckpt_status open_legacy(item *it, ckpt_pt *pt)
{
    ckpt_err *err = it->err;
    ckpt_buf b = {0};
    uint64_t ends[LEGACY_PICKLES] = {0};
    ckpt_pkl *keys;
    size_t n, start, n_keys;
    pt->legacy = true;
    ckpt_status status;
    CKPT_CHECK(read_pickles(it, &b, ends));
    start = (size_t)ends[2];
    n = (size_t)(ends[3] - ends[2]);
    n_keys = (size_t)(ends[4] - ends[3]);
    pt->pickle_offset = it->base + start;
    pt->pickle_length = n;
    CKPT_TRY(
        ckpt_pkl_parse(b.data + start, n, it->arena, NULL, &pt->root, NULL, &pt->n_nodes, it->err),
        "legacy stream");
    CKPT_TRY(ckpt_pkl_parse(b.data + ends[3], n_keys, it->arena, NULL, &keys, NULL, NULL, it->err),
             "legacy stream");
    CKPT_TRY(read_table(it, pt, keys, ends[4]), "legacy stream");
    if (it->n_storages) {
        storage *kept = ckpt_arena_memdup(it->arena, it->storages, it->n_storages * sizeof *kept);
        if (!kept)
            status = ckpt_fail(it->err, CKPT_E_NOMEM, "out of memory");
        free(it->storages);
        it->storages = kept;
    }
done:
    ckpt_buf_release(&b);
    return status;
}

/* ---- open ------------------------------------------------------------------------------------- */

static bool is_tar(const uint8_t *head, size_t n)
{
    return n >= 262 && memcmp(head + 257, "ustar", 5) == 0;
}

ckpt_status ckpt_pt_open(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                         ckpt_arena *arena, ckpt_pt *pt, ckpt_err *err)
{
    uint8_t head[512] = {0};
    size_t n = (size_t)ckpt_min_u64(length, sizeof head);
    uint64_t end;
    *pt = (ckpt_pt){0};
    if (!ckpt_add_u64(base, length, &end) || end > src->files[file].size)
        return ckpt_fail(err, CKPT_E_FORMAT, "%llu bytes at %llu past the end of '%s' (%llu bytes)",
                         (unsigned long long)length, (unsigned long long)base,
                         src->files[file].name, (unsigned long long)src->files[file].size);
    item *it = ckpt_arena_alloc(arena, sizeof *it);
    if (!it)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *it = (item){
        .src = src, .file = file, .base = base, .length = length, .arena = arena, .err = err};
    pt->self = it;
    ckpt_status status = ckpt_source_read(src, file, head, n, base, err);
    if (status != CKPT_OK)
        return status;
    if (n >= 4 && memcmp(head, "PK\3\4", 4) == 0)
        status = open_zip(it, pt);
    else if (n >= sizeof legacy_magic && memcmp(head, legacy_magic, sizeof legacy_magic) == 0)
        status = open_legacy(it, pt);
    else if (is_tar(head, n))
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "tar file of PyTorch before 0.1.10");
    else
        status = ckpt_fail(err, CKPT_E_FORMAT, "neither a torch.save archive nor a legacy stream");
    if (status != CKPT_OK && pt->legacy) {
        free(it->storages);
        it->storages = NULL;
    }
    it->err = NULL;
    return status;
}

/* ---- tensors ---------------------------------------------------------------------------------- */

/* A tuple of non-negative integers, or torch.Size of one. */
static bool read_extents(const ckpt_pkl *p, int rank, int64_t *out)
{
    for (int i = 0; i < rank; i++)
        if (!ckpt_pkl_int(ckpt_pkl_arg(p, (size_t)i), &out[i]) || out[i] < 0)
            return false;
    return true;
}

static const ckpt_pkl *tuple_of(const ckpt_pkl *p)
{
    return ckpt_pkl_is_object(p, "torch", "Size") ? ckpt_pkl_arg(p, 0) : p;
}

/* Bytes [*lo, *hi) of the file that hold the storage. */
static ckpt_status find_bytes(const item *it, const ckpt_pt *pt, const storage_id *id, uint64_t *lo,
                              uint64_t *hi, ckpt_err *err)
{
    char name[KEY_MAX + 8];
    if (pt->legacy) {
        const storage *s = find_storage(it, id->key);
        if (!s || !s->placed)
            return ckpt_fail(err, CKPT_E_FORMAT, "storage '%s' is not in the file", id->key);
        *lo = s->offset;
        *hi = s->offset + s->size;
        return CKPT_OK;
    }
    snprintf(name, sizeof name, "data/%s", id->key);
    const ckpt_zip_entry *e = ckpt_zip_find(&it->zip, name);
    if (!e)
        return ckpt_fail(err, CKPT_E_FORMAT, "no record '%s/%s'", it->zip.root, name);
    *lo = it->base + e->offset;
    *hi = *lo + e->size;
    return CKPT_OK;
}

/* Narrow to the view of a legacy id: (key, offset, numel) in elements of the storage class. */
static ckpt_status apply_view(const storage_id *id, uint64_t unit, uint64_t *lo, uint64_t *hi,
                              int64_t *numel, ckpt_err *err)
{
    int64_t offset, n;
    if (!id->view || id->view->kind == CKPT_PKL_NONE)
        return CKPT_OK;
    uint64_t total = (*hi - *lo) / unit;
    if (!ckpt_pkl_int(ckpt_pkl_arg(id->view, 1), &offset) ||
        !ckpt_pkl_int(ckpt_pkl_arg(id->view, 2), &n) || offset < 0 || n < 0 ||
        (uint64_t)offset > total || (uint64_t)n > total - (uint64_t)offset)
        return ckpt_fail(err, CKPT_E_FORMAT, "storage '%s': view past its %llu elements", id->key,
                         (unsigned long long)total);
    *lo += (uint64_t)offset * unit;
    *hi = *lo + (uint64_t)n * unit;
    *numel = n;
    return CKPT_OK;
}

typedef struct shape {
    int rank;
    int64_t dims[CKPT_MAX_RANK], stride[CKPT_MAX_RANK], offset, numel;
} shape;

static ckpt_status read_shape(const ckpt_pkl_tensor *t, shape *s, ckpt_err *err)
{
    const ckpt_pkl *size = tuple_of(t->size), *stride = tuple_of(t->stride);
    if (!size || !stride || size->kind != CKPT_PKL_TUPLE || stride->kind != CKPT_PKL_TUPLE ||
        size->n_items != stride->n_items)
        return ckpt_fail(err, CKPT_E_FORMAT, "size and stride are not tuples of equal length");
    if (size->n_items > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rank %zu, at most %d", size->n_items,
                         CKPT_MAX_RANK);
    s->rank = (int)size->n_items;
    if (!read_extents(size, s->rank, s->dims) || !read_extents(stride, s->rank, s->stride))
        return ckpt_fail(err, CKPT_E_FORMAT, "size or stride holds a negative or other value");
    if (!ckpt_pkl_int(t->offset, &s->offset) || s->offset < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "storage offset is negative or not an integer");
    if (!ckpt_numel(s->rank, s->dims, &s->numel))
        return ckpt_fail(err, CKPT_E_FORMAT, "element count overflows");
    return CKPT_OK;
}

/* offset + sum((size - 1) * stride), the last element touched. False on overflow. */
static bool last_element(const shape *s, int64_t *last)
{
    int64_t step;
    *last = s->offset;
    for (int i = 0; i < s->rank; i++)
        if (!ckpt_mul_i64(s->dims[i] - 1, s->stride[i], &step) || !ckpt_add_i64(*last, step, last))
            return false;
    return true;
}

/* Pairs to elements. Only views whose pairs stay whole along the last axis are elements at all. */
static bool unpack_f4(shape *s)
{
    if (s->rank == 0)
        return false;
    int last = s->rank - 1;
    if (s->dims[last] > 1 && s->stride[last] != 1 && s->numel > 0)
        return false;
    for (int i = 0; i < last; i++)
        if (!ckpt_mul_i64(s->stride[i], 2, &s->stride[i]))
            return false;
    s->stride[last] = 1;
    return ckpt_mul_i64(s->dims[last], 2, &s->dims[last]) &&
           ckpt_numel(s->rank, s->dims, &s->numel);
}

static bool row_major(const shape *s)
{
    int64_t step = 1;
    if (s->numel == 0)
        return true;
    for (int i = s->rank; i-- > 0; step *= s->dims[i])
        if (s->dims[i] != 1 && s->stride[i] != step)
            return false;
    return true;
}

/* Where the elements lie: the storage's bytes, checked against what the pickle says of them. */
static ckpt_status place(const item *it, const ckpt_pt *pt, const ckpt_pkl_tensor *t,
                         const shape *s, ckpt_pt_tensor *out, ckpt_err *err)
{
    storage_id id = {0};
    uint64_t lo = 0, hi = 0, bits = (uint64_t)ckpt_dtype_get(t->dtype)->bits;
    uint64_t itemsize = bits < 8 ? 1 : bits / 8;
    int64_t last;
    if (!read_id(t->storage, &id))
        return ckpt_fail(err, CKPT_E_FORMAT, "ill-formed storage id");
    uint64_t unit = storage_itemsize(id.cls);
    if (unit == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "storage '%s' of class '%s'", id.key, id.cls);
    ckpt_status status = find_bytes(it, pt, &id, &lo, &hi, err);
    if (status != CKPT_OK)
        return status;
    if ((uint64_t)id.numel != (hi - lo) / unit)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "storage '%s': %lld elements of %llu bytes, but its record has %llu bytes",
                         id.key, (long long)id.numel, (unsigned long long)unit,
                         (unsigned long long)(hi - lo));
    status = apply_view(&id, unit, &lo, &hi, &id.numel, err);
    if (status != CKPT_OK)
        return status;
    uint64_t count = (uint64_t)id.numel * unit / itemsize;
    if (s->numel > 0 && (!last_element(s, &last) || (uint64_t)last >= count))
        return ckpt_fail(err, CKPT_E_FORMAT, "view past the end of storage '%s' of %llu elements",
                         id.key, (unsigned long long)count);
    if ((uint64_t)s->numel / EXPANDED_RATIO > count &&
        (uint64_t)s->numel > EXPANDED_BYTES * 8 / bits)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%lld elements expanded from the %llu of storage '%s': more than %d to 1",
                         (long long)s->numel, (unsigned long long)count, id.key, EXPANDED_RATIO);
    out->offset = s->numel > 0 ? lo + (uint64_t)s->offset * itemsize : lo;
    out->storage_end = hi;
    return CKPT_OK;
}

ckpt_status ckpt_pt_tensor_of(const ckpt_pt *pt, const ckpt_pkl *node, ckpt_arena *arena,
                              ckpt_pt_tensor *out, bool *is_tensor, const char **what,
                              ckpt_err *err)
{
    ckpt_pkl_tensor t;
    shape s;
    *is_tensor = false;
    *what = NULL;
    if (!ckpt_pkl_tensor_like(node, &t))
        return CKPT_OK;
    *what = t.what;
    if (t.what)
        return CKPT_OK;
    *out = (ckpt_pt_tensor){.dtype = t.dtype, .big_endian = pt->big_endian};
    ckpt_status status = read_shape(&t, &s, err);
    if (status == CKPT_OK)
        status = place(pt->self, pt, &t, &s, out, err);
    if (status != CKPT_OK)
        return status;
    if (ckpt_dtype_get(t.dtype)->bits == 4 && !unpack_f4(&s)) {
        *what = "view that splits pairs of 4-bit elements";
        return CKPT_OK;
    }
    size_t bytes = (size_t)s.rank * sizeof *s.dims;
    out->rank = s.rank;
    out->dims = ckpt_arena_memdup(arena, s.dims, bytes);
    out->stride = row_major(&s) ? NULL : ckpt_arena_memdup(arena, s.stride, bytes);
    if (!out->dims || (!out->stride && !row_major(&s)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *is_tensor = true;
    return CKPT_OK;
}
