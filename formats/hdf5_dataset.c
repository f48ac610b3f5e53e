/* Describing one dataset: element type, extent, and where its bytes lie. Runs in the child process
 * of hdf5.c. */
#include "hdf5_scan.h"

#include "checked.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Of a dataset. Without the driver the library needs quadratic time. */
#define MAX_CHUNKS (CKPT_HDF5_DRIVER ? (uint64_t)1 << 24 : (uint64_t)1 << 14)
#define MAX_INLINE ((uint64_t)1 << 17) /* a compact dataset is a message of at most 64 KiB */
#define MAX_TEXT 64

/* ---- records ----------------------------------------------------------------------------------- */

void ckpt_hdf5_put_u64(ckpt_hdf5_describe *d, uint64_t v)
{
    ckpt_buf_append(d->out, &v, sizeof v);
}

void ckpt_hdf5_put_bytes(ckpt_hdf5_describe *d, const void *p, size_t n)
{
    ckpt_hdf5_put_u64(d, n);
    ckpt_buf_append(d->out, p, n);
}

void ckpt_hdf5_put_text(ckpt_hdf5_describe *d, ckpt_hdf5_record kind, const char *name,
                        const char *text, size_t n)
{
    ckpt_buf_putc(d->out, (int)kind);
    ckpt_hdf5_put_bytes(d, name, strlen(name));
    ckpt_hdf5_put_bytes(d, text, n);
}

void ckpt_hdf5_put_number(ckpt_hdf5_describe *d, const char *name, int64_t value)
{
    ckpt_buf_putc(d->out, CKPT_HDF5_R_NUMBER);
    ckpt_hdf5_put_bytes(d, name, strlen(name));
    ckpt_hdf5_put_u64(d, (uint64_t)value);
}

void ckpt_hdf5_put_fail(ckpt_hdf5_describe *d, ckpt_status code, const char *text)
{
    if (d->failed)
        return;
    d->failed = true;
    ckpt_buf_clear(d->out);
    ckpt_buf_putc(d->out, CKPT_HDF5_R_FAIL);
    ckpt_hdf5_put_u64(d, (uint64_t)code);
    ckpt_hdf5_put_bytes(d, text, strlen(text));
}

void ckpt_hdf5_put_end(ckpt_hdf5_describe *d)
{
    ckpt_buf_putc(d->out, CKPT_HDF5_R_END);
}

static bool fail(ckpt_hdf5_describe *d, ckpt_status code, const char *name, const char *fmt, ...)
    CKPT_PRINTF(4, 5);
static bool fail(ckpt_hdf5_describe *d, ckpt_status code, const char *name, const char *fmt, ...)
{
    ckpt_buf text = {0};
    va_list ap;
    ckpt_buf_printf(&text, "dataset '%.300s': ", name);
    va_start(ap, fmt);
    ckpt_buf_vprintf(&text, fmt, ap);
    va_end(ap);
    ckpt_hdf5_put_fail(d, code, text.data != NULL ? (const char *)text.data : "");
    ckpt_buf_release(&text);
    return false;
}

/* ---- element types ------------------------------------------------------------------------------ */

typedef struct element {
    ckpt_dtype dtype; /* of a carrier: the unsigned integer of its size */
    bool big_endian;
    bool opaque;       /* means something only with the attribute "dtype" */
    const char *other; /* what it is if it is not decoded, or NULL */
} element;

typedef struct float_form {
    ckpt_dtype dtype;
    size_t size, exp_at, exp_bits, man_bits, bias;
} float_form;

static const float_form floats[] = {
    {CKPT_F64,     8, 52, 11, 52, 1023},
    {CKPT_F32,     4, 23, 8,  23, 127 },
    {CKPT_F16,     2, 10, 5,  10, 15  },
    {CKPT_BF16,    2, 7,  8,  7,  127 },
    {CKPT_F8_E5M2, 1, 2,  5,  2,  15  },
    {CKPT_F8_E4M3, 1, 3,  4,  3,  7   },
};

static bool byte_order(hid_t type, element *e)
{
    H5T_order_t order = H5Tget_order(type);
    e->big_endian = order == H5T_ORDER_BE && H5Tget_size(type) > 1;
    return order == H5T_ORDER_LE || order == H5T_ORDER_BE;
}

static void float_type(hid_t type, element *e)
{
    size_t sign, exp_at, exp_bits, man_at, man_bits;
    size_t size = H5Tget_size(type);
    e->other = "float of unknown form";
    if (!byte_order(type, e) ||
        H5Tget_fields(type, &sign, &exp_at, &exp_bits, &man_at, &man_bits) < 0 ||
        H5Tget_offset(type) != 0 || H5Tget_norm(type) != H5T_NORM_IMPLIED)
        return;
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        const float_form *f = &floats[i];
        if (size == f->size && sign == 8 * size - 1 && exp_at == f->exp_at &&
            exp_bits == f->exp_bits && man_at == 0 && man_bits == f->man_bits &&
            H5Tget_ebias(type) == f->bias) {
            e->dtype = f->dtype;
            e->other = NULL;
        }
    }
}

static void integer_type(hid_t type, element *e)
{
    static const ckpt_dtype ints[2][4] = {
        {CKPT_U8, CKPT_U16, CKPT_U32, CKPT_U64},
        {CKPT_I8, CKPT_I16, CKPT_I32, CKPT_I64}
    };
    size_t size = H5Tget_size(type);
    H5T_sign_t sign = H5Tget_sign(type);
    e->other = "integer of unknown form";
    if (!byte_order(type, e) || H5Tget_precision(type) != 8 * size || H5Tget_offset(type) != 0 ||
        (sign != H5T_SGN_NONE && sign != H5T_SGN_2))
        return;
    for (size_t k = 0; k < 4; k++)
        if (size == (size_t)1 << k) {
            e->dtype = ints[sign == H5T_SGN_2][k];
            e->other = NULL;
        }
}

static bool member_is(hid_t type, unsigned i, const char *a, const char *b)
{
    char *name = H5Tget_member_name(type, i);
    bool is = name != NULL && (strcmp(name, a) == 0 || strcmp(name, b) == 0);
    (void)H5free_memory(name);
    return is;
}

/* h5py writes numpy's bool as an enumeration. */
static void enum_type(hid_t type, element *e)
{
    int8_t no = -1, yes = -1;
    e->other = "enumeration";
    if (H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2 ||
        !member_is(type, 0, "FALSE", "false") || !member_is(type, 1, "TRUE", "true") ||
        H5Tget_member_value(type, 0, &no) < 0 || H5Tget_member_value(type, 1, &yes) < 0 ||
        no != 0 || yes != 1)
        return;
    e->dtype = CKPT_BOOL;
    e->other = NULL;
}

/* h5py writes complex numbers as a pair of floats r, i. */
static void compound_type(hid_t type, element *e)
{
    element part[2] = {{.other = "?"}, {.other = "?"}};
    size_t size = H5Tget_size(type);
    e->other = "compound";
    if (H5Tget_nmembers(type) != 2 || !member_is(type, 0, "r", "real") ||
        !member_is(type, 1, "i", "imag"))
        return;
    for (unsigned i = 0; i < 2; i++) {
        hid_t member = H5Tget_member_type(type, i);
        if (member < 0)
            return;
        if (H5Tget_class(member) == H5T_FLOAT && H5Tget_size(member) == size / 2 &&
            H5Tget_member_offset(type, i) == i * (size / 2))
            float_type(member, &part[i]);
        H5Tclose(member);
    }
    if (part[0].other != NULL || part[1].other != NULL || part[0].dtype != part[1].dtype ||
        part[0].big_endian != part[1].big_endian)
        return;
    e->big_endian = part[0].big_endian;
    e->other = NULL;
    if (part[0].dtype == CKPT_F64)
        e->dtype = CKPT_C128;
    else if (part[0].dtype == CKPT_F32)
        e->dtype = CKPT_C64;
    else if (part[0].dtype == CKPT_F16)
        e->dtype = CKPT_C32;
    else
        e->other = "compound";
}

static void opaque_type(hid_t type, element *e)
{
    size_t size = H5Tget_size(type);
    e->other = size == 1 || size == 2 ? NULL : "opaque";
    e->opaque = true;
    e->dtype = size == 2 ? CKPT_U16 : CKPT_U8;
}

static void element_of(hid_t type, element *e)
{
    *e = (element){.other = "unreadable"};
    switch (H5Tget_class(type)) {
    case H5T_INTEGER:
        integer_type(type, e);
        break;
    case H5T_FLOAT:
        float_type(type, e);
        break;
    case H5T_ENUM:
        enum_type(type, e);
        break;
    case H5T_COMPOUND:
        compound_type(type, e);
        break;
    case H5T_OPAQUE:
        opaque_type(type, e);
        break;
    case H5T_STRING:
        e->other = "string";
        break;
    case H5T_REFERENCE:
        e->other = "reference";
        break;
    case H5T_VLEN:
        e->other = "variable-length";
        break;
    case H5T_BITFIELD:
        e->other = "bit field";
        break;
    case H5T_ARRAY:
        e->other = "array-of-array";
        break;
    case H5T_TIME:
        e->other = "time";
        break;
    case H5T_NO_CLASS:
    case H5T_NCLASSES:
    default:
        break;
    }
}

/* ---- attributes -------------------------------------------------------------------------------- */

/* The string attribute "dtype", or "". */
static void dtype_attr(hid_t dataset, char text[MAX_TEXT + 1])
{
    text[0] = '\0';
    if (H5Aexists(dataset, CKPT_HDF5_DTYPE) <= 0)
        return;
    hid_t attr = H5Aopen(dataset, CKPT_HDF5_DTYPE, H5P_DEFAULT), type = H5Aget_type(attr),
          space = H5Aget_space(attr);
    char *own = NULL;
    if (H5Sget_simple_extent_npoints(space) != 1 || H5Tget_class(type) != H5T_STRING)
        goto done;
    if (H5Tis_variable_str(type) > 0) {
        if (H5Aread(attr, type, &own) >= 0 && own != NULL && strlen(own) <= MAX_TEXT)
            memcpy(text, own, strlen(own) + 1);
        (void)H5free_memory(own);
    } else if (H5Tget_size(type) <= MAX_TEXT) {
        memset(text, 0, MAX_TEXT + 1);
        if (H5Aread(attr, type, text) < 0)
            text[0] = '\0';
    }
done:
    (void)H5Sclose(space);
    (void)H5Tclose(type);
    (void)H5Aclose(attr);
}

/* The integer attribute "shape": rank, or -1 if there is none. */
static int shape_attr(hid_t dataset, int64_t shape[CKPT_MAX_RANK])
{
    int rank = -1;
    if (H5Aexists(dataset, CKPT_HDF5_SHAPE) <= 0)
        return -1;
    hid_t attr = H5Aopen(dataset, CKPT_HDF5_SHAPE, H5P_DEFAULT), type = H5Aget_type(attr),
          space = H5Aget_space(attr);
    hssize_t n = H5Sget_simple_extent_npoints(space);
    if (n >= 1 && n <= CKPT_MAX_RANK && H5Tget_class(type) == H5T_INTEGER &&
        H5Aread(attr, H5T_NATIVE_INT64, shape) >= 0)
        rank = (int)n;
    (void)H5Sclose(space);
    (void)H5Tclose(type);
    (void)H5Aclose(attr);
    return rank;
}

/* ---- where the bytes are ------------------------------------------------------------------------ */

typedef struct dataset {
    ckpt_hdf5_describe *d;
    const char *name;
    hid_t id, type, space, dcpl;
    element elem;
    int rank;
    int64_t dims[CKPT_MAX_RANK];
    uint64_t bytes;
} dataset;

static bool put_filters(dataset *t)
{
    static const struct {
        H5Z_filter_t id;
        ckpt_hdf5_filter_kind kind;
    } known[] = {
        {H5Z_FILTER_SHUFFLE,    CKPT_HDF5_SHUFFLE   },
        {H5Z_FILTER_DEFLATE,    CKPT_HDF5_DEFLATE   },
        {H5Z_FILTER_FLETCHER32, CKPT_HDF5_FLETCHER32},
    };
    int n = H5Pget_nfilters(t->dcpl);
    if (n < 0 || n > CKPT_HDF5_MAX_FILTERS)
        return fail(t->d, CKPT_E_UNSUPPORTED, t->name, "%d filters, at most %d are read", n,
                    CKPT_HDF5_MAX_FILTERS);
    ckpt_hdf5_put_u64(t->d, (uint64_t)n);
    for (int i = 0; i < n; i++) {
        unsigned values[16] = {0}, flags, config;
        size_t n_values = 16, k = 0;
        char name[32] = "";
        H5Z_filter_t id = H5Pget_filter2(t->dcpl, (unsigned)i, &flags, &n_values, values,
                                         sizeof name, name, &config);
        while (k < sizeof known / sizeof known[0] && known[k].id != id)
            k++;
        if (k == sizeof known / sizeof known[0])
            return fail(t->d, CKPT_E_UNSUPPORTED, t->name,
                        "filter %d (%.31s) is not decoded; known are shuffle, deflate, fletcher32",
                        (int)id, name[0] != '\0' ? name : "unnamed");
        uint32_t value = values[0];
        if (known[k].kind == CKPT_HDF5_SHUFFLE && (n_values < 1 || value == 0))
            value = (uint32_t)H5Tget_size(t->type);
        ckpt_hdf5_put_u64(t->d, (uint64_t)known[k].kind);
        ckpt_hdf5_put_u64(t->d, value);
    }
    return true;
}

/* All chunks in the row-major order of their grid. */
static bool put_chunk_table(dataset *t, const hsize_t *chunk, uint64_t n)
{
    hsize_t offset[CKPT_MAX_RANK] = {0};
    ckpt_hdf5_chunk place;
    ckpt_hdf5_put_u64(t->d, n * sizeof place);
    for (uint64_t i = 0; i < n; i++) {
        if (!ckpt_hdf5_locate(t->d, t->id, offset, &place))
            return fail(t->d, CKPT_E_FORMAT, t->name, "chunk %" PRIu64 " cannot be found", i);
        ckpt_buf_append(t->d->out, &place, sizeof place);
        for (int a = t->rank - 1; a >= 0; a--) {
            offset[a] += chunk[a];
            if (offset[a] < (uint64_t)t->dims[a])
                break;
            offset[a] = 0;
        }
    }
    return true;
}

static bool put_chunked(dataset *t)
{
    hsize_t chunk[CKPT_MAX_RANK], written = 0;
    uint64_t n = 1;
    if (t->rank < 1 || H5Pget_chunk(t->dcpl, t->rank, chunk) != t->rank)
        return fail(t->d, CKPT_E_FORMAT, t->name, "chunk sizes cannot be read");
    for (int a = 0; a < t->rank; a++) {
        uint64_t dim = (uint64_t)t->dims[a];
        if (chunk[a] == 0 || chunk[a] > UINT32_MAX)
            return fail(t->d, CKPT_E_FORMAT, t->name, "chunk of %" PRIu64 " on axis %d",
                        (uint64_t)chunk[a], a);
        if (!ckpt_mul_u64(n, (dim - 1) / chunk[a] + 1, &n))
            return fail(t->d, CKPT_E_FORMAT, t->name, "more than 2^64 chunks");
    }
    hid_t all = H5Dget_space(t->id);
    if (all < 0 || H5Dget_num_chunks(t->id, all, &written) < 0)
        return fail(t->d, CKPT_E_FORMAT, t->name, "its chunks cannot be counted");
    H5Sclose(all);
    if (written != n)
        return fail(t->d, CKPT_E_FORMAT, t->name,
                    "%" PRIu64 " of %" PRIu64 " chunks are stored: the others were never written",
                    (uint64_t)written, n);
    if (n > MAX_CHUNKS)
        return fail(t->d, CKPT_E_UNSUPPORTED, t->name,
                    "%" PRIu64 " chunks, at most %" PRIu64 " are read: repack it into larger ones",
                    n, MAX_CHUNKS);
    for (int a = 0; a < t->rank; a++)
        ckpt_hdf5_put_u64(t->d, chunk[a]);
    return put_filters(t) && put_chunk_table(t, chunk, n);
}

static bool put_contiguous(dataset *t)
{
    if (H5Pget_external_count(t->dcpl) != 0)
        return fail(t->d, CKPT_E_UNSUPPORTED, t->name,
                    "its bytes are in other files, which are not opened");
    haddr_t offset = H5Dget_offset(t->id);
    uint64_t size = H5Dget_storage_size(t->id);
    if (offset == HADDR_UNDEF)
        return fail(t->d, CKPT_E_FORMAT, t->name, "its bytes were never written");
    if (size != t->bytes)
        return fail(t->d, CKPT_E_FORMAT, t->name,
                    "%" PRIu64 " bytes stored, its shape needs %" PRIu64, size, t->bytes);
    ckpt_hdf5_put_u64(t->d, offset);
    return true;
}

static bool put_inline(dataset *t)
{
    if (t->bytes > MAX_INLINE)
        return fail(t->d, CKPT_E_FORMAT, t->name, "%" PRIu64 " bytes inside an object header",
                    t->bytes);
    uint8_t *data = calloc(1, (size_t)t->bytes + 1);
    bool ok = data != NULL && H5Dread(t->id, t->type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0;
    if (ok)
        ckpt_hdf5_put_bytes(t->d, data, (size_t)t->bytes);
    free(data);
    return ok || fail(t->d, CKPT_E_FORMAT, t->name, "cannot be read");
}

static bool put_place(dataset *t)
{
    H5D_layout_t layout = H5Pget_layout(t->dcpl);
    if (layout == H5D_VIRTUAL)
        return fail(t->d, CKPT_E_UNSUPPORTED, t->name,
                    "virtual dataset: its bytes are in other datasets or files");
    if (t->bytes == 0) {
        ckpt_hdf5_put_u64(t->d, CKPT_HDF5_NOWHERE);
        return true;
    }
    switch (layout) {
    case H5D_COMPACT:
        ckpt_hdf5_put_u64(t->d, CKPT_HDF5_INLINE);
        return put_inline(t);
    case H5D_CONTIGUOUS:
        ckpt_hdf5_put_u64(t->d, CKPT_HDF5_DIRECT);
        return put_contiguous(t);
    case H5D_CHUNKED:
        ckpt_hdf5_put_u64(t->d, CKPT_HDF5_CHUNKED);
        return put_chunked(t);
    case H5D_VIRTUAL:
    case H5D_LAYOUT_ERROR:
    case H5D_NLAYOUTS:
    default:
        return fail(t->d, CKPT_E_FORMAT, t->name, "unknown storage layout");
    }
}

/* ---- the record -------------------------------------------------------------------------------- */

static bool extent_of(dataset *t)
{
    hsize_t dims[H5S_MAX_RANK];
    int64_t numel;
    t->rank = H5Sget_simple_extent_ndims(t->space);
    if (t->rank < 0 || t->rank > H5S_MAX_RANK ||
        H5Sget_simple_extent_dims(t->space, dims, NULL) != t->rank)
        return fail(t->d, CKPT_E_FORMAT, t->name, "its shape cannot be read");
    if (t->rank > CKPT_MAX_RANK)
        return fail(t->d, CKPT_E_UNSUPPORTED, t->name, "rank %d, at most %d is read", t->rank,
                    CKPT_MAX_RANK);
    for (int a = 0; a < t->rank; a++) {
        if (dims[a] > INT64_MAX)
            return fail(t->d, CKPT_E_FORMAT, t->name, "extent %" PRIu64 " on axis %d",
                        (uint64_t)dims[a], a);
        t->dims[a] = (int64_t)dims[a];
    }
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->elem.dtype, numel, &t->bytes))
        return fail(t->d, CKPT_E_FORMAT, t->name, "its shape overflows");
    return true;
}

static bool put_record(dataset *t)
{
    char dtype[MAX_TEXT + 1];
    int64_t shape[CKPT_MAX_RANK];
    ckpt_hdf5_describe *d = t->d;
    H5S_class_t class = H5Sget_simple_extent_type(t->space);
    element_of(t->type, &t->elem);
    if (class == H5S_NULL)
        t->elem.other = "null";
    dtype_attr(t->id, dtype);
    if (t->elem.other == NULL && t->elem.opaque && dtype[0] == '\0')
        t->elem.other = "opaque";
    if (t->elem.other != NULL) {
        ckpt_hdf5_put_text(d, CKPT_HDF5_R_UNDECODED, t->name, t->elem.other, strlen(t->elem.other));
        return true;
    }
    if (!extent_of(t))
        return false;
    ckpt_buf_putc(d->out, CKPT_HDF5_R_DATASET);
    ckpt_hdf5_put_bytes(d, t->name, strlen(t->name));
    ckpt_hdf5_put_u64(d, (uint64_t)t->elem.dtype);
    ckpt_hdf5_put_u64(d, t->elem.big_endian);
    ckpt_hdf5_put_u64(d, t->elem.opaque);
    ckpt_hdf5_put_bytes(d, dtype, strlen(dtype));
    ckpt_hdf5_put_bytes(d, t->dims, (size_t)t->rank * sizeof t->dims[0]);
    int n = shape_attr(t->id, shape);
    ckpt_hdf5_put_u64(d, n >= 0);
    ckpt_hdf5_put_bytes(d, shape, n > 0 ? (size_t)n * sizeof shape[0] : 0);
    return put_place(t);
}

bool ckpt_hdf5_describe_dataset(ckpt_hdf5_describe *d, hid_t id, const char *name)
{
    dataset t = {.d = d, .name = name, .id = id};
    t.type = H5Dget_type(id);
    t.space = H5Dget_space(id);
    t.dcpl = H5Dget_create_plist(id);
    bool ok = t.type >= 0 && t.space >= 0 && t.dcpl >= 0;
    ok = ok ? put_record(&t) : fail(d, CKPT_E_FORMAT, name, "its header cannot be read");
    if (t.dcpl >= 0)
        H5Pclose(t.dcpl);
    if (t.space >= 0)
        H5Sclose(t.space);
    if (t.type >= 0)
        H5Tclose(t.type);
    return ok;
}
