/* Writing HDF5 files through libhdf5, in the form described in hdf5.c. Chunks are filtered by our
 * own code in all threads and put with H5Dwrite_chunk, one at a time; the library only keeps the
 * structure of the file. Nothing in it depends on time, threads or memory: no object times, one
 * format version whatever the library's default, datasets and chunks in a fixed order. */
#define _GNU_SOURCE /* memfd_create */
#include "hdf5_file.h"

#include "checked.h"
#include "hash.h"
#include "io.h"

#include <errno.h>
#include <hdf5.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK_BYTES ((uint64_t)1 << 20)
#define FORMAT_VERSION 1
#define HEX_CHARS ((size_t)(2 * CKPT_SHA256_LEN))

/* How a tensor is stored. */
typedef struct stored {
    uint64_t first; /* its first part */
    uint64_t bytes;
    int rank; /* of the dataset */
    int axis; /* that the chunks cut; axes before it have extent 1 in a chunk */
    hsize_t dims[CKPT_MAX_RANK], chunk[CKPT_MAX_RANK];
    uint64_t block, inner;    /* bytes below one index of the axes before `axis`, and of `axis` */
    uint64_t per_block, rows; /* chunks in a block; indices of `axis` in a chunk */
    ckpt_hdf5_pipeline pipeline;
} stored;

typedef struct writer {
    const ckpt_out *out;
    stored *stored; /* per tensor */
    uint64_t n_parts;
    size_t part_max;
    /* while a file is open */
    hid_t file, dataset;
    uint32_t current; /* tensor of `dataset` */
    int error;        /* errno of the first failed system call since listen() */
} writer;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory planning an HDF5 file");
}

/* ---- errors of the library ---------------------------------------------------------------------- */

static herr_t find_errno(unsigned n, const H5E_error2_t *e, void *self)
{
    int *found = self;
    const char *at = e->desc != NULL ? strstr(e->desc, "errno = ") : NULL;
    (void)n;
    if (at != NULL && *found == 0)
        *found = atoi(at + strlen("errno = "));
    return 0;
}

/* Called by the library where a call fails, before a later call clears its error stack. A failed
 * write is known only from the text in it. */
static herr_t note_error(hid_t stack, void *self)
{
    writer *w = self;
    return w->error == 0 ? H5Ewalk2(stack, H5E_WALK_UPWARD, find_errno, &w->error) : 0;
}

/* Before the first call of a thread: the stack and its handler may be the thread's own. The library
 * is asked not to end itself at exit, where it would crash on a file that it could not write. */
static void listen(writer *w)
{
    w->error = 0;
    (void)H5dont_atexit();
    (void)H5Eset_auto2(H5E_DEFAULT, note_error, w);
}

static ckpt_status library_error(const writer *w, ckpt_err *err, const char *what, const char *name)
{
    if (w->error != 0)
        return ckpt_fail_errno(err, w->error, "%s '%.300s'", what, name);
    return ckpt_fail(err, CKPT_E_IO, "%s '%.300s': libhdf5 could not write it", what, name);
}

/* ---- planning ----------------------------------------------------------------------------------- */

static bool is_packed(ckpt_dtype dtype)
{
    return ckpt_dtype_get(dtype)->bits % 8 != 0;
}

/* A name is a path: every part of it must be one that HDF5 takes as it is. */
static bool is_path(const char *name)
{
    for (const char *p = name;; p++) {
        size_t n = strcspn(p, "/");
        if (n == 0 || (n == 1 && p[0] == '.'))
            return false;
        p += n;
        if (*p == '\0')
            return true;
    }
}

static bool is_utf8(const char *s)
{
    for (size_t i = 0, n = strlen(s), len; i < n; i += len)
        if ((len = ckpt_utf8_len(s + i, n - i)) == 0)
            return false;
    return true;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* "a" cannot be a dataset and the group of "a/b". */
static ckpt_status check_groups(const ckpt_out *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char **names = malloc((out->n_tensors + 1) * sizeof *names);
    char *prefix = NULL;
    if (names == NULL)
        return no_memory(err);
    for (size_t i = 0; i < out->n_tensors; i++)
        names[i] = out->tensors[i].name;
    if (out->n_tensors > 1)
        qsort(names, out->n_tensors, sizeof *names, compare_names);
    for (size_t i = 0; i < out->n_tensors && status == CKPT_OK; i++) {
        if (strchr(names[i], '/') == NULL)
            continue;
        prefix = strdup(names[i]);
        if (prefix == NULL)
            status = no_memory(err);
        for (char *slash = prefix; status == CKPT_OK && slash != NULL;) {
            slash = strrchr(prefix, '/');
            if (slash == NULL)
                break;
            *slash = '\0';
            const char *key = prefix;
            if (bsearch(&key, names, out->n_tensors, sizeof *names, compare_names) != NULL)
                status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                                   "tensors '%.300s' and '%.300s': in HDF5 the first would have to "
                                   "be a group as well",
                                   prefix, names[i]);
        }
        free(prefix);
    }
    free(names);
    return status;
}

/* Cut along the outermost axis below which everything fits a chunk, into chunks of about equal
 * length. */
static void choose_chunks(stored *s, uint64_t elem)
{
    uint64_t inner = elem;
    s->axis = s->rank - 1;
    while (s->axis > 0 && inner * s->dims[s->axis] <= CHUNK_BYTES)
        inner *= s->dims[s->axis--];
    uint64_t most = CHUNK_BYTES / inner, dim = s->dims[s->axis];
    most = most > 0 ? most : 1;
    s->per_block = (dim - 1) / most + 1;
    s->rows = (dim - 1) / s->per_block + 1;
    s->per_block = (dim - 1) / s->rows + 1;
    s->inner = inner;
    s->block = inner * dim;
    for (int a = 0; a < s->rank; a++)
        s->chunk[a] = a < s->axis ? 1 : a == s->axis ? s->rows : s->dims[a];
}

static void choose_filters(stored *s, int level, uint64_t elem)
{
    ckpt_hdf5_pipeline *p = &s->pipeline;
    if (level > 0 && elem > 1) {
        p->filter[p->n].kind = CKPT_HDF5_SHUFFLE;
        p->filter[p->n++].value = (uint32_t)elem;
    }
    if (level > 0) {
        p->filter[p->n].kind = CKPT_HDF5_DEFLATE;
        p->filter[p->n++].value = (uint32_t)level;
    }
    p->filter[p->n++].kind = CKPT_HDF5_FLETCHER32;
}

static ckpt_status plan_tensor(writer *w, size_t i, ckpt_err *err)
{
    const ckpt_out_tensor *t = &w->out->tensors[i];
    stored *s = &w->stored[i];
    int64_t numel;
    uint64_t elem = is_packed(t->dtype) ? 1 : (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8;
    if (!is_utf8(t->name) || !is_path(t->name))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "HDF5 cannot store this name: empty parts and '.' between slashes mean "
                         "something else there");
    if (t->n_chunks != 1)
        return ckpt_fail(err, CKPT_E_INTERNAL, "expected one chunk for HDF5, found %zu",
                         t->n_chunks);
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &s->bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s elements do not fill a whole number of bytes, or too many",
                         ckpt_dtype_get(t->dtype)->name);
    s->first = w->n_parts;
    s->rank = is_packed(t->dtype) ? 1 : t->rank;
    for (int a = 0; a < s->rank; a++)
        s->dims[a] = is_packed(t->dtype) ? s->bytes : (uint64_t)t->dims[a];
    if (s->bytes == 0)
        return CKPT_OK;
    if (s->rank == 0) {
        w->n_parts++;
    } else {
        choose_chunks(s, elem);
        choose_filters(s, w->out->deflate, elem);
        w->n_parts += s->bytes / s->block * s->per_block;
    }
    uint64_t part = s->rank == 0 ? s->bytes : s->rows * s->inner;
    w->part_max = ckpt_max_u64(w->part_max, part);
    return CKPT_OK;
}

/* ---- parts ------------------------------------------------------------------------------------- */

static uint64_t n_parts(const ckpt_sink *sink)
{
    return ((const writer *)sink->self)->n_parts;
}

/* The tensor that a part belongs to: the last one that starts at or before it and has parts. */
static uint32_t tensor_of(const writer *w, uint64_t index)
{
    size_t lo = 0, hi = w->out->n_tensors;
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (w->stored[mid].first <= index)
            lo = mid;
        else
            hi = mid;
    }
    return (uint32_t)lo;
}

static void part_of(const ckpt_sink *sink, uint64_t index, ckpt_part *out)
{
    const writer *w = sink->self;
    uint32_t t = tensor_of(w, index);
    const stored *s = &w->stored[t];
    *out = (ckpt_part){.tensor = t, .len = (size_t)s->bytes};
    if (s->rank == 0)
        return;
    uint64_t at = index - s->first, in_block = at % s->per_block, size = s->rows * s->inner;
    out->lo = at / s->per_block * s->block + in_block * size;
    out->len = (size_t)ckpt_min_u64(size, s->block - in_block * size);
}

static void sizes(const ckpt_sink *sink, size_t *part, size_t *room)
{
    const writer *w = sink->self;
    ckpt_hdf5_pipeline most = {.n = CKPT_HDF5_MAX_FILTERS};
    *part = w->part_max;
    *room = w->part_max + 2 * ckpt_hdf5_bound(&most, w->part_max);
}

static ckpt_status encode(const ckpt_sink *sink, uint64_t index, const uint8_t *raw, uint8_t *room,
                          ckpt_encoded *out, ckpt_err *err)
{
    const writer *w = sink->self;
    ckpt_part part;
    part_of(sink, index, &part);
    const stored *s = &w->stored[part.tensor];
    if (s->rank == 0) {
        *out = (ckpt_encoded){.data = raw, .len = part.len};
        return CKPT_OK;
    }
    size_t whole = (size_t)(s->rows * s->inner), bound = ckpt_hdf5_bound(&s->pipeline, whole);
    if (part.len < whole) { /* a chunk is stored whole: what lies outside the extent is zero */
        memcpy(room, raw, part.len);
        memset(room + part.len, 0, whole - part.len);
        raw = room;
    }
    return ckpt_hdf5_encode(&s->pipeline, raw, whole, room + whole, room + whole + bound, out, err);
}

/* ---- attributes -------------------------------------------------------------------------------- */

/* Fixed-length UTF-8 string: readable without the global heap, and of a length known beforehand. */
static bool put_string(hid_t object, const char *name, const char *text, size_t n)
{
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR), attr = -1;
    bool ok = type >= 0 && space >= 0 && H5Tset_size(type, n > 0 ? n : 1) >= 0 &&
              H5Tset_strpad(type, H5T_STR_NULLPAD) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0;
    if (ok)
        attr = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    ok = ok && attr >= 0 && H5Awrite(attr, type, n > 0 ? text : "") >= 0;
    if (attr >= 0)
        ok = H5Aclose(attr) >= 0 && ok;
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    return ok;
}

static bool put_integers(hid_t object, const char *name, const int64_t *values, int n)
{
    hsize_t dim = (hsize_t)n;
    hid_t space = n == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &dim, NULL), attr = -1;
    if (space >= 0)
        attr = H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    bool ok = attr >= 0 && H5Awrite(attr, H5T_NATIVE_INT64, values) >= 0;
    if (attr >= 0)
        ok = H5Aclose(attr) >= 0 && ok;
    if (space >= 0)
        H5Sclose(space);
    return ok;
}

static bool put_json(hid_t object, const char *name, const ckpt_json *json, int indent)
{
    ckpt_buf text = {0};
    bool ok = ckpt_json_print(json, indent, false, &text) &&
              put_string(object, name, (const char *)text.data, text.len);
    ckpt_buf_release(&text);
    return ok;
}

/* ---- element types ------------------------------------------------------------------------------- */

static hid_t f16_type(void)
{
    hid_t t = H5Tcopy(H5T_IEEE_F32LE);
    if (t >= 0 && (H5Tset_fields(t, 15, 10, 5, 0, 10) < 0 || H5Tset_size(t, 2) < 0 ||
                   H5Tset_ebias(t, 15) < 0)) {
        H5Tclose(t);
        t = -1;
    }
    return t;
}

static hid_t bool_type(void)
{
    int8_t no = 0, yes = 1;
    hid_t t = H5Tenum_create(H5T_STD_I8LE);
    if (t >= 0 && (H5Tenum_insert(t, "FALSE", &no) < 0 || H5Tenum_insert(t, "TRUE", &yes) < 0)) {
        H5Tclose(t);
        t = -1;
    }
    return t;
}

/* Takes part. */
static hid_t complex_type(hid_t part)
{
    size_t size = part >= 0 ? H5Tget_size(part) : 0;
    hid_t t = part >= 0 ? H5Tcreate(H5T_COMPOUND, 2 * size) : -1;
    if (t >= 0 && (H5Tinsert(t, "r", 0, part) < 0 || H5Tinsert(t, "i", size, part) < 0)) {
        H5Tclose(t);
        t = -1;
    }
    if (part >= 0)
        H5Tclose(part);
    return t;
}

static hid_t type_of(ckpt_dtype dtype)
{
    const ckpt_dtype_info *info = ckpt_dtype_get(dtype);
    switch (dtype) {
    case CKPT_F64:
        return H5Tcopy(H5T_IEEE_F64LE);
    case CKPT_F32:
        return H5Tcopy(H5T_IEEE_F32LE);
    case CKPT_F16:
        return f16_type();
    case CKPT_BOOL:
        return bool_type();
    case CKPT_C128:
        return complex_type(H5Tcopy(H5T_IEEE_F64LE));
    case CKPT_C64:
        return complex_type(H5Tcopy(H5T_IEEE_F32LE));
    case CKPT_C32:
        return complex_type(f16_type());
    case CKPT_I64:
        return H5Tcopy(H5T_STD_I64LE);
    case CKPT_I32:
        return H5Tcopy(H5T_STD_I32LE);
    case CKPT_I16:
        return H5Tcopy(H5T_STD_I16LE);
    case CKPT_I8:
        return H5Tcopy(H5T_STD_I8LE);
    case CKPT_U64:
        return H5Tcopy(H5T_STD_U64LE);
    case CKPT_U32:
        return H5Tcopy(H5T_STD_U32LE);
    case CKPT_U16:
    case CKPT_BF16:
        return H5Tcopy(H5T_STD_U16LE);
    case CKPT_U8:
    case CKPT_F8_E5M2FNUZ:
    case CKPT_F8_E4M3FNUZ:
    case CKPT_F8_E8M0:
    case CKPT_F8_E4M3:
    case CKPT_F8_E5M2:
    case CKPT_F6_E3M2:
    case CKPT_F6_E2M3:
    case CKPT_F4:
        return H5Tcopy(H5T_STD_U8LE);
    case CKPT_DTYPE_COUNT:
        break;
    }
    (void)info;
    return -1;
}

/* ---- datasets ------------------------------------------------------------------------------------ */

/* How the dataset is stored. */
static hid_t storage_of(const stored *s)
{
    hid_t p = H5Pcreate(H5P_DATASET_CREATE);
    bool ok = p >= 0 && H5Pset_obj_track_times(p, false) >= 0 &&
              H5Pset_fill_time(p, H5D_FILL_TIME_NEVER) >= 0;
    if (s->bytes > 0 && s->rank == 0)
        ok = ok && H5Pset_layout(p, H5D_COMPACT) >= 0;
    else if (s->bytes > 0)
        ok = ok && H5Pset_chunk(p, s->rank, s->chunk) >= 0;
    for (int i = 0; i < s->pipeline.n; i++) {
        if (s->pipeline.filter[i].kind == CKPT_HDF5_SHUFFLE)
            ok = ok && H5Pset_shuffle(p) >= 0;
        else if (s->pipeline.filter[i].kind == CKPT_HDF5_DEFLATE)
            ok = ok && H5Pset_deflate(p, s->pipeline.filter[i].value) >= 0;
        else
            ok = ok && H5Pset_fletcher32(p) >= 0;
    }
    if (p >= 0 && !ok) {
        H5Pclose(p);
        p = -1;
    }
    return p;
}

/* Links with UTF-8 names, groups made on the way. */
static hid_t link_plist(void)
{
    hid_t p = H5Pcreate(H5P_LINK_CREATE);
    if (p >= 0 && (H5Pset_create_intermediate_group(p, 1) < 0 ||
                   H5Pset_char_encoding(p, H5T_CSET_UTF8) < 0)) {
        H5Pclose(p);
        p = -1;
    }
    return p;
}

/* The placeholder keeps the object header in one piece: the digest is known only at the end. */
static bool describe_dataset(hid_t dataset, const ckpt_out_tensor *t)
{
    static const char zeros[HEX_CHARS + 1] =
        "0000000000000000000000000000000000000000000000000000000000000000";
    const char *name = ckpt_dtype_get(t->dtype)->name;
    return put_string(dataset, CKPT_HDF5_DTYPE, name, strlen(name)) &&
           (!is_packed(t->dtype) || t->rank == 0 ||
            put_integers(dataset, CKPT_HDF5_SHAPE, t->dims, t->rank)) &&
           put_string(dataset, CKPT_HDF5_SHA256, zeros, HEX_CHARS);
}

static ckpt_status create_dataset(writer *w, size_t i, ckpt_err *err)
{
    const ckpt_out_tensor *t = &w->out->tensors[i];
    const stored *s = &w->stored[i];
    ckpt_status status = CKPT_OK;
    hid_t type = type_of(t->dtype), storage = storage_of(s), link = link_plist(), id = -1,
          space = s->rank == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(s->rank, s->dims, NULL);
    if (type >= 0 && storage >= 0 && link >= 0 && space >= 0)
        id = H5Dcreate2(w->file, t->name, type, space, link, storage, H5P_DEFAULT);
    if (id < 0 || !describe_dataset(id, t))
        status = library_error(w, err, "dataset", t->name);
    if (id >= 0 && H5Dclose(id) < 0 && status == CKPT_OK)
        status = library_error(w, err, "dataset", t->name);
    if (space >= 0)
        H5Sclose(space);
    if (link >= 0)
        H5Pclose(link);
    if (storage >= 0)
        H5Pclose(storage);
    if (type >= 0)
        H5Tclose(type);
    return status;
}

/* ---- the file ------------------------------------------------------------------------------------ */

/* One format, whatever versions the library knows: what 1.10 writes at its latest. */
static hid_t access_plist(void)
{
    hid_t p = H5Pcreate(H5P_FILE_ACCESS);
    if (p >= 0 && (H5Pset_libver_bounds(p, H5F_LIBVER_V110, H5F_LIBVER_V110) < 0 ||
                   H5Pset_file_locking(p, false, true) < 0 ||
                   H5Pset_fclose_degree(p, H5F_CLOSE_STRONG) < 0)) {
        H5Pclose(p);
        p = -1;
    }
    return p;
}

static hid_t create_file(const char *path)
{
    hid_t access = access_plist(), creation = H5Pcreate(H5P_FILE_CREATE), file = -1;
    /* Attributes of the root may be larger than an object header allows: none goes into it. */
    if (access >= 0 && creation >= 0 && H5Pset_attr_phase_change(creation, 0, 0) >= 0 &&
        H5Pset_obj_track_times(creation, false) >= 0)
        file = H5Fcreate(path, H5F_ACC_EXCL, creation, access);
    if (creation >= 0)
        H5Pclose(creation);
    if (access >= 0)
        H5Pclose(access);
    return file;
}

static bool describe_file(writer *w)
{
    const ckpt_out *out = w->out;
    int64_t version = FORMAT_VERSION;
    bool hf = out->config_kind != CKPT_CONFIG_MEGATRON, ok;
    ok = put_integers(w->file, CKPT_HDF5_VERSION, &version, 1);
    if (out->config != NULL)
        ok = ok && put_json(w->file, hf ? CKPT_HDF5_CONFIG : CKPT_HDF5_ARGS, out->config, 2);
    if (ckpt_json_child(out->metadata) != NULL)
        ok = ok && put_json(w->file, CKPT_HDF5_METADATA, out->metadata, 0);
    if (out->iteration >= 0)
        ok = ok && put_integers(w->file, CKPT_HDF5_ITERATION, &out->iteration, 1);
    return ok;
}

/* Close, or after a failure let go of, a file. A libhdf5 that cannot write what it still holds keeps
 * the file open and crashes when the process ends, so what it holds goes to memory then. */
static bool close_file(hid_t file, bool keep)
{
    void *handle = NULL;
    bool ok = keep && H5Fflush(file, H5F_SCOPE_LOCAL) >= 0;
    if (!ok && H5Fget_vfd_handle(file, H5P_DEFAULT, &handle) >= 0 && handle != NULL) {
        int memory = memfd_create("ckpt", MFD_CLOEXEC);
        if (memory >= 0) {
            (void)dup2(memory, *(const int *)handle);
            close(memory);
        }
    }
    return H5Fclose(file) >= 0 && ok;
}

static void give_up(ckpt_sink *sink)
{
    writer *w = sink->self;
    listen(w);
    if (w->dataset >= 0)
        (void)H5Dclose(w->dataset);
    if (w->file >= 0)
        (void)close_file(w->file, false);
    w->dataset = w->file = -1;
}

static ckpt_status open_sink(ckpt_sink *sink, const char *path, ckpt_err *err)
{
    writer *w = sink->self;
    ckpt_status status = CKPT_OK;
    listen(w);
    (void)H5PLset_loading_state(0);
    w->file = create_file(path);
    if (w->file < 0 || !describe_file(w))
        return library_error(w, err, "file", path);
    for (size_t i = 0; i < w->out->n_tensors; i++) {
        CKPT_CHECK(ckpt_check_interrupted(err));
        CKPT_CHECK(create_dataset(w, i, err));
    }
done:
    return status;
}

static ckpt_status select_dataset(writer *w, uint32_t tensor, ckpt_err *err)
{
    const char *name = w->out->tensors[tensor].name;
    if (w->dataset >= 0 && w->current == tensor)
        return CKPT_OK;
    if (w->dataset >= 0 && H5Dclose(w->dataset) < 0) {
        w->dataset = -1;
        return library_error(w, err, "dataset", w->out->tensors[w->current].name);
    }
    w->dataset = H5Dopen2(w->file, name, H5P_DEFAULT);
    w->current = tensor;
    return w->dataset >= 0 ? CKPT_OK : library_error(w, err, "dataset", name);
}

static ckpt_status put_part(ckpt_sink *sink, uint64_t index, const ckpt_encoded *part,
                            ckpt_err *err)
{
    writer *w = sink->self;
    hsize_t offset[CKPT_MAX_RANK];
    uint32_t tensor = tensor_of(w, index);
    const stored *s = &w->stored[tensor];
    listen(w);
    ckpt_status status = select_dataset(w, tensor, err);
    herr_t rc;
    if (status != CKPT_OK)
        return status;
    if (s->rank == 0) {
        hid_t type = H5Dget_type(w->dataset);
        rc = type >= 0 ? H5Dwrite(w->dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, part->data) : -1;
        if (type >= 0)
            H5Tclose(type);
    } else {
        uint64_t at = index - s->first, outer = at / s->per_block;
        for (int a = 0; a < s->rank; a++)
            offset[a] = 0;
        offset[s->axis] = at % s->per_block * s->rows;
        for (int a = s->axis - 1; a >= 0; a--) {
            offset[a] = outer % s->dims[a];
            outer /= s->dims[a];
        }
        rc = H5Dwrite_chunk(w->dataset, H5P_DEFAULT, part->mask, offset, part->len, part->data);
    }
    return rc >= 0 ? CKPT_OK : library_error(w, err, "dataset", w->out->tensors[tensor].name);
}

/* Not through H5Aopen_by_name: what libhdf5 1.10 opens with it cannot be written. */
static bool put_digest(hid_t file, const char *name, const uint8_t *sha256)
{
    char hex[HEX_CHARS + 1];
    ckpt_hex(sha256, hex);
    hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    hid_t attr = dataset >= 0 ? H5Aopen(dataset, CKPT_HDF5_SHA256, H5P_DEFAULT) : -1;
    hid_t type = attr >= 0 ? H5Aget_type(attr) : -1;
    bool ok = type >= 0 && H5Awrite(attr, type, hex) >= 0;
    if (type >= 0)
        H5Tclose(type);
    if (attr >= 0)
        ok = H5Aclose(attr) >= 0 && ok;
    if (dataset >= 0)
        ok = H5Dclose(dataset) >= 0 && ok;
    return ok;
}

static ckpt_status finish(ckpt_sink *sink, const uint8_t *sha256, ckpt_err *err)
{
    writer *w = sink->self;
    ckpt_status status = CKPT_OK;
    listen(w);
    for (size_t i = 0; i < w->out->n_tensors && status == CKPT_OK; i++)
        if (!put_digest(w->file, w->out->tensors[i].name, sha256 + i * CKPT_SHA256_LEN))
            status = library_error(w, err, "dataset", w->out->tensors[i].name);
    if (w->dataset >= 0 && H5Dclose(w->dataset) < 0 && status == CKPT_OK)
        status = library_error(w, err, "dataset", w->out->tensors[w->current].name);
    w->dataset = -1;
    if (!close_file(w->file, status == CKPT_OK) && status == CKPT_OK)
        status = library_error(w, err, "closing", "the file");
    w->file = -1;
    return status;
}

static ckpt_status seal(ckpt_sink *sink, const char *path, const char *root, const char *manifest,
                        size_t n, ckpt_err *err)
{
    writer *w = sink->self;
    listen(w);
    hid_t access = access_plist(), file = -1;
    ckpt_status status = CKPT_OK;
    if (access >= 0)
        file = H5Fopen(path, H5F_ACC_RDWR, access);
    if (file < 0 || !put_string(file, CKPT_HDF5_ROOT, root, strlen(root)) ||
        !put_string(file, CKPT_HDF5_MANIFEST, manifest, n))
        status = library_error(w, err, "manifest in", path);
    if (file >= 0 && !close_file(file, status == CKPT_OK) && status == CKPT_OK)
        status = library_error(w, err, "manifest in", path);
    if (access >= 0)
        H5Pclose(access);
    return status;
}

static const ckpt_serial calls = {
    .n_parts = n_parts,
    .part = part_of,
    .sizes = sizes,
    .encode = encode,
    .open = open_sink,
    .put = put_part,
    .finish = finish,
    .give_up = give_up,
    .seal = seal,
};

ckpt_status ckpt_hdf5_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    writer *w = ckpt_arena_alloc(&sink->arena, sizeof *w);
    ckpt_out_file *file = ckpt_arena_alloc(&sink->arena, sizeof *file);
    if (out->n_objects > 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "object '%.160s': HDF5 holds only tensors",
                         out->objects[0].name);
    if (out->n_tensors >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "more than 2^32 tensors");
    if (w == NULL || file == NULL)
        return no_memory(err);
    *w = (writer){.out = out, .file = -1, .dataset = -1};
    w->stored = ckpt_arena_array(&sink->arena, out->n_tensors, sizeof *w->stored);
    if (w->stored == NULL)
        return no_memory(err);
    *file = (ckpt_out_file){.name = "model.h5", .is_data = true};
    for (size_t i = 0; i < out->n_tensors; i++) {
        CKPT_TRY(plan_tensor(w, i, err), "tensor '%.160s'", out->tensors[i].name);
        file->size += w->stored[i].bytes; /* before compression, without structure */
    }
    CKPT_CHECK(check_groups(out, err));
    sink->serial = &calls;
    sink->self = w;
    sink->files = file;
    sink->n_files = 1;
    sink->manifest_dir = "";
done:
    return status;
}
