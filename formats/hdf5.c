/* HDF5 files: one dataset per tensor.
 *
 * Written form (hdf5_write.c). One file, superblock 3, HDF5 1.10 format (readable by HDF5 1.10 and
 * later, h5py, h5dump):
 *
 *   /NAME                dataset of each tensor, its name verbatim; a '/' in it makes groups
 *     type               F64 F32 F16: IEEE floats; I8..I64 U8..U64: integers; C64 C128 C32: compound of
 *                        two floats "r", "i" and BOOL: enumeration FALSE, TRUE, both as h5py writes
 *                        them; BF16: uint16 and F8_*: uint8, the value's bits; F6_*, F4: uint8, one
 *                        axis, the packed bytes. Little-endian.
 *     @dtype             safetensors name of the dtype ("BF16"), a fixed-length string
 *     @shape             only F6_*, F4: extents in elements, int64
 *     @sha256            SHA-256 of the row-major little-endian bytes, lower-case hex:
 *                        hashlib.sha256(d[()].tobytes()) in h5py
 *     storage            chunks of whole rows of at most 1 MiB where a row is not larger, with
 *                        Fletcher-32 and, on request, shuffle and deflate before it. Scalars are
 *                        compact (in the object header), tensors without elements contiguous.
 *   @config.json, @megatron_args.json   the configuration, of the one kind or the other
 *   @ckpt.manifest.json  the manifest, without "files": a file cannot hold its own digest
 *   @ckpt.root           root digest, hex
 *   @ckpt.metadata.json  safetensors __metadata__ or the like: an object of strings
 *   @ckpt.iteration      int64, absent if unknown
 *   @ckpt.hdf5.version   1
 *
 * Read: also nested groups (the path is the name), contiguous and compact datasets, big-endian ones,
 * the floats of HDF5 2.0 (bfloat16, FP8), any chunk shape, and any order of the filters shuffle,
 * deflate, fletcher32. Other string attributes of the root group become metadata. A soft link to a
 * dataset is a second tensor. Strings, compounds, references and the like are named in a warning and
 * left out. What would open another file (external links and storage, virtual datasets, plugins) is
 * refused. Chunks that were never written are refused: a checkpoint has no default values.
 *
 * libhdf5 is neither thread-safe nor safe against damaged files. A child process therefore describes
 * the file (hdf5_scan.c): if the library crashes there or never ends, that is an error message here.
 * The bytes themselves are read and decoded without it, by all threads (hdf5_chunks.c).
 *
 * Specification: HDF5 File Format Specification Version 3.0, The HDF Group. */
#include "hdf5_file.h"

#include "checked.h"
#include "io.h"
#include "le.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define INFLATE_MAX ((uint64_t)1040) /* deflate makes at most 1032 bytes of one */
#define ITERATION_MAX (INT64_C(1) << 53)

static const uint8_t signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};

/* Position in a description. */
typedef struct reader {
    const uint8_t *p, *end;
    bool bad;
} reader;

typedef struct opening {
    ckpt_source *src;
    ckpt_hdf5_file *file;
    reader r;
    size_t tensors_cap, virtuals_cap;
    struct alias {
        const char *name, *target;
    } * links;
    size_t n_links, links_cap;
    ckpt_tensor *tensors;
    size_t n_tensors;
    const char **undecoded; /* names, sorted at the end: a link may lead to one */
    size_t n_undecoded, undecoded_cap;
} opening;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory opening HDF5");
}

static int score_of(const ckpt_probe *probe)
{
    if (probe->is_dir)
        return 0;
    if (probe->head_len >= sizeof signature &&
        memcmp(probe->head, signature, sizeof signature) == 0)
        return 2;
    size_t n = strlen(probe->path);
    return (n > 3 && strcmp(probe->path + n - 3, ".h5") == 0) ||
           (n > 5 && strcmp(probe->path + n - 5, ".hdf5") == 0);
}

/* ---- records --------------------------------------------------------------------------------------- */

static uint64_t take_u64(reader *r)
{
    uint64_t v = 0;
    if ((size_t)(r->end - r->p) < sizeof v) {
        r->bad = true;
        return 0;
    }
    v = ckpt_get_u64(r->p);
    r->p += sizeof v;
    return v;
}

static const uint8_t *take_bytes(reader *r, size_t *n)
{
    uint64_t len = take_u64(r);
    const uint8_t *p = r->p;
    *n = 0;
    if (r->bad || len > (uint64_t)(r->end - r->p)) {
        r->bad = true;
        return p;
    }
    *n = (size_t)len;
    r->p += len;
    return p;
}

/* A copy in the source's arena, NUL-terminated; NULL when memory is exhausted. */
static char *take_text(opening *o, size_t *len)
{
    size_t n;
    const uint8_t *p = take_bytes(&o->r, &n);
    if (len != NULL)
        *len = n;
    return ckpt_arena_strndup(&o->src->arena, (const char *)p, n);
}

static ckpt_status take_fail(opening *o, ckpt_err *err)
{
    uint64_t code = take_u64(&o->r);
    size_t n;
    const uint8_t *text = take_bytes(&o->r, &n);
    bool known = code == CKPT_E_FORMAT || code == CKPT_E_UNSUPPORTED || code == CKPT_E_NOMEM;
    return ckpt_fail(err, known ? (ckpt_status)code : CKPT_E_FORMAT, "%.*s", (int)n,
                     (const char *)text);
}

/* ---- attributes of the root group ------------------------------------------------------------------ */

static ckpt_status take_config(ckpt_source *src, const char *name, const char *text, size_t n,
                               ckpt_config_kind kind, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *config = NULL;
    CKPT_TRY(ckpt_json_parse(text, n, &config, err), "attribute '%s'", name);
    if (!ckpt_json_is_object(config)) {
        ckpt_json_free(config);
        return ckpt_fail(err, CKPT_E_FORMAT, "attribute '%s': expected a JSON object", name);
    }
    if (src->config != NULL) { /* as in a directory, config.json counts */
        bool keep = src->config_kind == CKPT_CONFIG_HF;
        ckpt_json_free(keep ? config : src->config);
        if (keep)
            return CKPT_OK;
    }
    src->config = config;
    src->config_kind = kind;
done:
    return status;
}

static ckpt_status add_metadata(ckpt_source *src, const char *key, const char *value, ckpt_err *err)
{
    if (src->metadata == NULL)
        src->metadata = ckpt_json_new_object();
    if (src->metadata == NULL || !ckpt_json_set(src->metadata, key, ckpt_json_new_string(value)))
        return no_memory(err);
    return CKPT_OK;
}

static ckpt_status take_metadata(ckpt_source *src, const char *text, size_t n, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *doc = NULL;
    CKPT_TRY(ckpt_json_parse(text, n, &doc, err), "attribute '%s'", CKPT_HDF5_METADATA);
    for (const ckpt_json *c = ckpt_json_child(doc); c != NULL; c = ckpt_json_next(c)) {
        if (!ckpt_json_is_object(doc) || ckpt_json_string(c) == NULL) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "attribute '%s': expected an object of strings",
                               CKPT_HDF5_METADATA);
            goto done;
        }
        CKPT_CHECK(add_metadata(src, ckpt_json_key(c), ckpt_json_string(c), err));
    }
done:
    ckpt_json_free(doc);
    return status;
}

static bool is_utf8(const char *s)
{
    for (size_t i = 0, n = strlen(s), len; i < n; i += len)
        if ((len = ckpt_utf8_len(s + i, n - i)) == 0)
            return false;
    return true;
}

static ckpt_status take_attr(opening *o, ckpt_err *err)
{
    ckpt_source *src = o->src;
    size_t n = 0;
    const char *name = take_text(o, NULL), *text = take_text(o, &n);
    if (name == NULL || text == NULL)
        return no_memory(err);
    if (strcmp(name, CKPT_HDF5_CONFIG) == 0)
        return take_config(src, name, text, n, CKPT_CONFIG_HF, err);
    if (strcmp(name, CKPT_HDF5_ARGS) == 0)
        return take_config(src, name, text, n, CKPT_CONFIG_MEGATRON, err);
    if (strcmp(name, CKPT_HDF5_METADATA) == 0)
        return take_metadata(src, text, n, err);
    if (strcmp(name, CKPT_HDF5_MANIFEST) == 0) {
        src->manifest = text;
        src->manifest_len = n;
        return CKPT_OK;
    }
    if (strcmp(name, CKPT_HDF5_ROOT) == 0 || !is_utf8(name) || !is_utf8(text))
        return CKPT_OK;
    return add_metadata(src, name, text, err);
}

static ckpt_status take_number(opening *o, ckpt_err *err)
{
    const char *name = take_text(o, NULL);
    int64_t value = (int64_t)take_u64(&o->r);
    if (name == NULL)
        return no_memory(err);
    if (strcmp(name, CKPT_HDF5_ITERATION) == 0 && value >= 0 && value <= ITERATION_MAX)
        o->src->iteration = value;
    if (strcmp(name, CKPT_HDF5_VERSION) == 0 && value != 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is %" PRId64 ", expected 1",
                         CKPT_HDF5_VERSION, value);
    return CKPT_OK;
}

/* ---- datasets -------------------------------------------------------------------------------------- */

/* The chunk of a tensor that is stored in one piece. */
static ckpt_status whole_chunk(opening *o, ckpt_tensor *t, uint32_t file, uint64_t offset,
                               ckpt_err *err)
{
    ckpt_arena *arena = &o->src->arena;
    int64_t *lo = ckpt_arena_array(arena, (size_t)t->rank + 1, sizeof *lo);
    t->chunks = ckpt_arena_array(arena, 1, sizeof *t->chunks);
    if (lo == NULL || t->chunks == NULL)
        return no_memory(err);
    t->chunks[0] = (ckpt_chunk){.lo = lo, .len = t->dims, .offset = offset, .file = file};
    t->n_chunks = 1;
    return CKPT_OK;
}

static ckpt_status add_virtual(opening *o, ckpt_hdf5_virtual v, uint64_t *base, ckpt_err *err)
{
    ckpt_hdf5_file *f = o->file;
    void *table = f->virtuals;
    ckpt_status status = ckpt_grow(&table, &o->virtuals_cap, f->n_virtuals + 1, sizeof v, err);
    f->virtuals = table;
    if (status != CKPT_OK)
        return status;
    *base = v.base = f->virtual_bytes;
    if (!ckpt_add_u64(f->virtual_bytes, v.bytes, &f->virtual_bytes) || f->virtual_bytes > INT64_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "more than 2^63 bytes");
    if (v.chunks != NULL && v.chunk_bytes > f->chunk_max)
        f->chunk_max = (size_t)v.chunk_bytes;
    f->virtuals[f->n_virtuals++] = v;
    return CKPT_OK;
}

static ckpt_status take_pipeline(opening *o, ckpt_hdf5_pipeline *p, ckpt_err *err)
{
    uint64_t n = take_u64(&o->r);
    *p = (ckpt_hdf5_pipeline){0};
    for (uint64_t i = 0; i < n && i < CKPT_HDF5_MAX_FILTERS && !o->r.bad; i++) {
        uint64_t kind = take_u64(&o->r), value = take_u64(&o->r);
        if (kind > CKPT_HDF5_FLETCHER32 || (kind == CKPT_HDF5_SHUFFLE && value == 0))
            return ckpt_fail(err, CKPT_E_FORMAT, "unknown filter");
        p->filter[p->n].kind = (ckpt_hdf5_filter_kind)kind;
        p->filter[p->n++].value = (uint32_t)value;
    }
    return CKPT_OK;
}

/* Refuse what cannot decode, before anything is allocated for it. */
static ckpt_status check_stored(const opening *o, const ckpt_hdf5_pipeline *p,
                                const ckpt_hdf5_chunk *c, uint64_t want, ckpt_err *err)
{
    uint64_t size = o->src->files[0].size;
    bool deflated = false;
    uint64_t sums = 0;
    if (c->offset > size || c->size > size - c->offset)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "chunk of %" PRIu32 " bytes at offset %" PRIu64 " past end %" PRIu64,
                         c->size, c->offset, size);
    for (int i = 0; i < p->n; i++) {
        if (c->mask >> i & 1)
            continue;
        deflated = deflated || p->filter[i].kind == CKPT_HDF5_DEFLATE;
        sums += p->filter[i].kind == CKPT_HDF5_FLETCHER32 ? 4 : 0;
    }
    if (deflated ? want / INFLATE_MAX > c->size : c->size != want + sums)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "chunk of %" PRIu32 " stored bytes cannot hold %" PRIu64, c->size, want);
    return CKPT_OK;
}

/* True if chunks follow each other in row-major order, so that the tensor's bytes are one range:
 * extents 1, ..., 1, any, whole, ..., whole. */
static bool is_rows(const ckpt_tensor *t, const uint64_t *chunk, int *axis)
{
    int a = 0;
    while (a < t->rank - 1 && chunk[a] == 1)
        a++;
    *axis = a;
    for (int b = a + 1; b < t->rank; b++)
        if (chunk[b] != (uint64_t)t->dims[b])
            return false;
    return true;
}

/* One virtual range, in which chunks follow each other as they do in the grid. */
static ckpt_status add_rows(opening *o, ckpt_tensor *t, ckpt_hdf5_virtual v, const uint64_t *chunk,
                            int axis, ckpt_err *err)
{
    uint64_t inner = v.chunk_bytes / chunk[axis], base, dim = (uint64_t)t->dims[axis];
    v.block = dim * inner; /* below the tensor's bytes, which did not overflow */
    v.per_block = (dim - 1) / chunk[axis] + 1;
    ckpt_status status = add_virtual(o, v, &base, err);
    return status == CKPT_OK ? whole_chunk(o, t, 1, base, err) : status;
}

/* A tile of the tensor per chunk, each in its own piece of the virtual range, its padding included. */
static ckpt_status add_tiles(opening *o, ckpt_tensor *t, ckpt_hdf5_virtual v, const uint64_t *chunk,
                             uint64_t n, ckpt_err *err)
{
    ckpt_arena *arena = &o->src->arena;
    size_t rank = (size_t)t->rank;
    uint64_t base, grid[CKPT_MAX_RANK] = {0};
    v.block = v.chunk_bytes;
    v.per_block = 1;
    if (!ckpt_mul_u64(n, v.chunk_bytes, &v.bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "its chunks overflow");
    ckpt_status status = add_virtual(o, v, &base, err);
    if (status != CKPT_OK)
        return status;
    int64_t *stride = ckpt_arena_array(arena, rank, sizeof *stride);
    int64_t *boxes = ckpt_arena_array(arena, 2 * rank * (size_t)n, sizeof *boxes);
    t->chunks = ckpt_arena_array(arena, (size_t)n, sizeof *t->chunks);
    if (stride == NULL || boxes == NULL || t->chunks == NULL)
        return no_memory(err);
    t->n_chunks = (size_t)n;
    for (int a = t->rank - 1; a >= 0; a--)
        stride[a] = a == t->rank - 1 ? 1 : stride[a + 1] * (int64_t)chunk[a + 1];
    for (uint64_t i = 0; i < n; i++) {
        int64_t *lo = boxes + 2 * rank * i, *len = lo + rank;
        for (int a = 0; a < t->rank; a++) {
            lo[a] = (int64_t)(grid[a] * chunk[a]);
            len[a] = ckpt_min_i64((int64_t)chunk[a], t->dims[a] - lo[a]);
        }
        t->chunks[i] = (ckpt_chunk){
            .lo = lo, .len = len, .stride = stride, .offset = base + i * v.chunk_bytes, .file = 1};
        for (int a = t->rank - 1; a >= 0; a--) {
            if (++grid[a] * chunk[a] < (uint64_t)t->dims[a])
                break;
            grid[a] = 0;
        }
    }
    return CKPT_OK;
}

static ckpt_status take_chunked(opening *o, ckpt_tensor *t, uint64_t bytes, uint64_t elem,
                                ckpt_err *err)
{
    uint64_t chunk[CKPT_MAX_RANK], n = 1;
    ckpt_hdf5_virtual v = {.name = t->name, .bytes = bytes, .chunk_bytes = elem};
    ckpt_status status;
    size_t len;
    int axis;
    for (int a = 0; a < t->rank; a++) {
        chunk[a] = take_u64(&o->r);
        if (chunk[a] == 0 || t->dims[a] == 0 ||
            !ckpt_mul_u64(n, ((uint64_t)t->dims[a] - 1) / chunk[a] + 1, &n) ||
            !ckpt_mul_u64(v.chunk_bytes, chunk[a], &v.chunk_bytes))
            return ckpt_fail(err, CKPT_E_FORMAT, "its chunks overflow");
    }
    CKPT_CHECK(take_pipeline(o, &v.pipeline, err));
    if (v.chunk_bytes > CKPT_HDF5_CHUNK_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "chunks of %" PRIu64 " bytes, at most %" PRIu64 " are read", v.chunk_bytes,
                         CKPT_HDF5_CHUNK_MAX);
    const uint8_t *table = take_bytes(&o->r, &len);
    if (o->r.bad || len / sizeof *v.chunks != n || len % sizeof *v.chunks != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "its chunks cannot be listed");
    v.chunks = ckpt_arena_memdup(&o->src->arena, table, len);
    if (v.chunks == NULL)
        return no_memory(err);
    for (uint64_t i = 0; i < n; i++)
        CKPT_TRY(check_stored(o, &v.pipeline, &v.chunks[i], v.chunk_bytes, err), "chunk %" PRIu64,
                 i);
    status = is_rows(t, chunk, &axis) ? add_rows(o, t, v, chunk, axis, err)
                                      : add_tiles(o, t, v, chunk, n, err);
done:
    return status;
}

static ckpt_status take_inline(opening *o, ckpt_tensor *t, uint64_t bytes, ckpt_err *err)
{
    size_t n;
    uint64_t base;
    const uint8_t *data = take_bytes(&o->r, &n);
    if (o->r.bad || n != bytes)
        return ckpt_fail(err, CKPT_E_FORMAT, "%zu bytes, its shape needs %" PRIu64, n, bytes);
    ckpt_hdf5_virtual v = {.name = t->name,
                           .bytes = bytes,
                           .inline_bytes = ckpt_arena_memdup(&o->src->arena, data, n)};
    if (v.inline_bytes == NULL)
        return no_memory(err);
    ckpt_status status = add_virtual(o, v, &base, err);
    return status == CKPT_OK ? whole_chunk(o, t, 1, base, err) : status;
}

/* Where the bytes lie; t has the stored type and extents. */
static ckpt_status take_place(opening *o, ckpt_tensor *t, ckpt_err *err)
{
    int64_t numel;
    uint64_t bytes;
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "its shape overflows");
    switch (take_u64(&o->r)) {
    case CKPT_HDF5_NOWHERE:
        return CKPT_OK;
    case CKPT_HDF5_INLINE:
        return take_inline(o, t, bytes, err);
    case CKPT_HDF5_DIRECT:
        return whole_chunk(o, t, 0, take_u64(&o->r), err);
    case CKPT_HDF5_CHUNKED:
        return take_chunked(o, t, bytes, (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8, err);
    default:
        o->r.bad = true;
        return CKPT_OK;
    }
}

/* Packed elements: the stored bytes are one axis, the attribute has the true extents. */
static ckpt_status unpack_shape(opening *o, ckpt_tensor *t, ckpt_dtype dtype, const int64_t *shape,
                                int rank, ckpt_err *err)
{
    int64_t numel;
    uint64_t bytes;
    if (rank < 0 || t->rank != 1 || !ckpt_numel(rank, shape, &numel) ||
        !ckpt_dtype_bytes(dtype, numel, &bytes) || bytes != (uint64_t)t->dims[0])
        return ckpt_fail(
            err, CKPT_E_FORMAT,
            "dtype %s needs one axis of packed bytes and an attribute 'shape' that fits",
            ckpt_dtype_get(dtype)->name);
    t->dtype = dtype;
    t->rank = rank;
    t->dims = ckpt_arena_memdup(&o->src->arena, shape, (size_t)rank * sizeof *shape + 1);
    if (t->dims == NULL)
        return no_memory(err);
    return t->n_chunks > 0 ? whole_chunk(o, t, t->chunks[0].file, t->chunks[0].offset, err)
                           : CKPT_OK;
}

/* What the attribute "dtype" makes of the stored type. */
static ckpt_status apply_dtype(opening *o, ckpt_tensor *t, bool opaque, const char *text,
                               const int64_t *shape, int rank, ckpt_err *err)
{
    ckpt_dtype dtype;
    const ckpt_dtype_info *stored = ckpt_dtype_get(t->dtype);
    if (!ckpt_dtype_from_name(text, strlen(text), &dtype) && !ckpt_dtype_from_torch(text, &dtype)) {
        if (opaque)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "opaque, with unknown dtype '%s'", text);
        return CKPT_OK; /* somebody else's attribute */
    }
    const ckpt_dtype_info *meant = ckpt_dtype_get(dtype);
    if (dtype == t->dtype)
        return CKPT_OK;
    bool bits = stored->kind == CKPT_KIND_UINT; /* carries any bits */
    if (bits && meant->bits < 8 && stored->bits == 8)
        return unpack_shape(o, t, dtype, shape, rank, err);
    if (!bits || meant->bits != stored->bits)
        return ckpt_fail(err, CKPT_E_FORMAT, "attribute 'dtype' says %s, its elements are %s",
                         meant->name, stored->name);
    t->dtype = dtype;
    return CKPT_OK;
}

static ckpt_status take_dataset(opening *o, ckpt_err *err)
{
    ckpt_arena *arena = &o->src->arena;
    ckpt_status status = CKPT_OK;
    ckpt_tensor t = {.name = take_text(o, NULL)};
    size_t n, shape_n;
    uint64_t dtype = take_u64(&o->r);
    t.big_endian = take_u64(&o->r) != 0;
    bool opaque = take_u64(&o->r) != 0;
    const char *text = take_text(o, NULL);
    const uint8_t *dims = take_bytes(&o->r, &n);
    bool has_shape = take_u64(&o->r) != 0;
    int64_t shape[CKPT_MAX_RANK + 1] = {0};
    const uint8_t *shape_bytes = take_bytes(&o->r, &shape_n);
    if (o->r.bad || dtype >= CKPT_DTYPE_COUNT || n > sizeof shape || shape_n > sizeof shape) {
        o->r.bad = true;
        return CKPT_OK;
    }
    t.dtype = (ckpt_dtype)dtype;
    t.rank = (int)(n / sizeof shape[0]);
    t.dims = ckpt_arena_memdup(arena, dims, n + 1);
    if (t.name == NULL || text == NULL || t.dims == NULL)
        return no_memory(err);
    memcpy(shape, shape_bytes, shape_n);
    int rank = has_shape ? (int)(shape_n / sizeof shape[0]) : -1;
    CKPT_TRY(take_place(o, &t, err), "dataset '%.300s'", t.name);
    CKPT_TRY(apply_dtype(o, &t, opaque, text, shape, rank, err), "dataset '%.300s'", t.name);
    void *table = o->tensors;
    status = ckpt_grow(&table, &o->tensors_cap, o->n_tensors + 1, sizeof t, err);
    o->tensors = table;
    if (status == CKPT_OK)
        o->tensors[o->n_tensors++] = t;
done:
    return status;
}

/* ---- links ----------------------------------------------------------------------------------------- */

static ckpt_status take_link(opening *o, ckpt_err *err)
{
    struct alias link = {take_text(o, NULL), NULL};
    void *table = o->links;
    link.target = take_text(o, NULL);
    if (link.name == NULL || link.target == NULL)
        return no_memory(err);
    ckpt_status status = ckpt_grow(&table, &o->links_cap, o->n_links + 1, sizeof link, err);
    o->links = table;
    if (status == CKPT_OK)
        o->links[o->n_links++] = link;
    return status;
}

static ckpt_status take_undecoded(opening *o, ckpt_err *err)
{
    const char *name = take_text(o, NULL), *kind = take_text(o, NULL);
    void *table = o->undecoded;
    if (name == NULL || kind == NULL)
        return no_memory(err);
    ckpt_status status = ckpt_grow(&table, &o->undecoded_cap, o->n_undecoded + 1, sizeof name, err);
    o->undecoded = table;
    if (status != CKPT_OK)
        return status;
    o->undecoded[o->n_undecoded++] = name;
    return ckpt_source_warn(o->src, err, "'%s': %s tensor is not decoded", name, kind);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Soft links to datasets become tensors with the same bytes. */
static ckpt_status resolve_links(opening *o, ckpt_err *err)
{
    ckpt_source *src = o->src;
    ckpt_status status = CKPT_OK;
    size_t n = o->n_tensors;
    src->tensors = ckpt_arena_array(&src->arena, n + o->n_links, sizeof *src->tensors);
    if (src->tensors == NULL)
        return no_memory(err);
    if (n > 0) {
        memcpy(src->tensors, o->tensors, n * sizeof *src->tensors);
        qsort(src->tensors, n, sizeof *src->tensors, by_name);
    }
    src->n_tensors = n;
    if (o->n_undecoded > 1)
        qsort(o->undecoded, o->n_undecoded, sizeof *o->undecoded, by_text);
    for (size_t i = 0; i < o->n_links; i++) {
        const struct alias *link = &o->links[i];
        ckpt_tensor key = {.name = link->target};
        const ckpt_tensor *hit = n > 0 ? bsearch(&key, src->tensors, n, sizeof key, by_name) : NULL;
        const char *target = link->target;
        if (hit == NULL && o->n_undecoded > 0 &&
            bsearch(&target, o->undecoded, o->n_undecoded, sizeof target, by_text) != NULL) {
            CKPT_CHECK(
                ckpt_source_warn(src, err, "'%s': linked tensor is not decoded", link->name));
            continue;
        }
        if (hit == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "soft link '%.300s' leads to '%.300s', which is no dataset of this "
                             "file",
                             link->name, link->target);
        ckpt_tensor t = *hit;
        t.name = link->name;
        if (t.n_chunks > 0) { /* own table: checking sorts it */
            t.chunks = ckpt_arena_memdup(&src->arena, t.chunks, t.n_chunks * sizeof *t.chunks);
            if (t.chunks == NULL)
                return no_memory(err);
        }
        src->tensors[src->n_tensors++] = t;
    }
done:
    return status;
}

/* ---- open ------------------------------------------------------------------------------------------ */

static ckpt_status take_warning(opening *o, ckpt_err *err)
{
    const char *name = take_text(o, NULL), *text = take_text(o, NULL);
    if (name == NULL || text == NULL)
        return no_memory(err);
    return ckpt_source_warn(o->src, err, "'%s' %s", name, text);
}

static ckpt_status take_records(opening *o, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    while (status == CKPT_OK && !o->r.bad && o->r.p < o->r.end) {
        switch (*o->r.p++) {
        case CKPT_HDF5_R_END:
            return CKPT_OK;
        case CKPT_HDF5_R_FAIL:
            return take_fail(o, err);
        case CKPT_HDF5_R_ATTR:
            status = take_attr(o, err);
            break;
        case CKPT_HDF5_R_NUMBER:
            status = take_number(o, err);
            break;
        case CKPT_HDF5_R_UNDECODED:
            status = take_undecoded(o, err);
            break;
        case CKPT_HDF5_R_LINK:
            status = take_link(o, err);
            break;
        case CKPT_HDF5_R_WARN:
            status = take_warning(o, err);
            break;
        case CKPT_HDF5_R_DATASET:
            status = take_dataset(o, err);
            break;
        default:
            o->r.bad = true;
        }
    }
    if (status != CKPT_OK)
        return status;
    return ckpt_fail(err, CKPT_E_FORMAT, "libhdf5 gave up reading its structure: damaged");
}

/* The file that stands for decoded bytes. */
static ckpt_status add_virtual_file(opening *o, const char *name, ckpt_err *err)
{
    ckpt_source *src = o->src;
    uint32_t index;
    if (o->file->n_virtuals == 0)
        return CKPT_OK;
    ckpt_status status = ckpt_source_add_file(src, name, src->path, false, &index, err);
    if (status != CKPT_OK)
        return status;
    src->files[index].size = o->file->virtual_bytes;
    src->n_virtual = 1;
    src->read_at = ckpt_hdf5_read_at;
    o->file->cache = ckpt_hdf5_cache_new();
    return o->file->cache != NULL ? CKPT_OK : no_memory(err);
}

static void close_hdf5(ckpt_source *src)
{
    ckpt_hdf5_file *f = src->self;
    ckpt_hdf5_cache_free(f->cache);
    free(f->virtuals);
    free(f);
}

static ckpt_status open_hdf5(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    opening o = {.src = src, .file = calloc(1, sizeof *o.file)};
    const char *name = ckpt_basename(src->path);
    (void)opts;
    if (o.file == NULL)
        return no_memory(err);
    src->self = o.file;
    src->close = close_hdf5;
    CKPT_CHECK(ckpt_source_add_file(src, name, src->path, true, NULL, err));
    CKPT_CHECK(ckpt_hdf5_describe_file(src->path, &text, err));
    o.r = (reader){.p = text.data, .end = text.data + text.len};
    CKPT_CHECK(take_records(&o, err));
    CKPT_CHECK(resolve_links(&o, err));
    CKPT_CHECK(add_virtual_file(&o, name, err));
done:
    free(o.tensors);
    free(o.links);
    free(o.undecoded);
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status probe_hdf5(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    (void)err;
    *score = score_of(probe);
    return CKPT_OK;
}

const ckpt_container ckpt_hdf5 = {
    .name = "hdf5",
    .what = "HDF5 file, one dataset per tensor",
    .probe = probe_hdf5,
    .open = open_hdf5,
    .layout = ckpt_hdf5_layout,
};
