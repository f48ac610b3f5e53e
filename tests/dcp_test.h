/* Helpers of the dcp suites: scratch directories, element access, a one-page executor for sinks, and
 * a builder of .metadata pickles that need not be sane. */
#ifndef CKPT_DCP_TEST_H
#define CKPT_DCP_TEST_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checked.h"
#include "crc.h"
#include "dcp.h"
#include "io.h"
#include "pickle.h"
#include "source.h"
#include "zip.h"

static char scratch[64];

static inline void scratch_make(void)
{
    snprintf(scratch, sizeof scratch, "/tmp/ckpt-dcp-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(scratch));
}

static inline void scratch_remove(void)
{
    ckpt_remove_tree(scratch);
}

/* scratch/name in a rotating buffer. */
static inline const char *in_scratch(const char *name)
{
    static char path[8][512];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, sizeof path[0], "%s%s%s", scratch, *name ? "/" : "", name);
    return p;
}

static inline void put_file(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    ck_assert_msg(f != NULL, "%s", path);
    ck_assert_uint_eq(fwrite(p, 1, n, f), n);
    ck_assert_int_eq(fclose(f), 0);
}

static inline void put_text(const char *path, const char *text)
{
    put_file(path, text, strlen(text));
}

static inline void get_file(const char *path, ckpt_buf *out)
{
    ckpt_err err = {0};
    ckpt_status status = ckpt_read_file(path, 1 << 28, out, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
}

static inline void copy_file(const char *from, const char *to)
{
    ckpt_buf data = {0};
    get_file(from, &data);
    put_file(to, data.len ? (const void *)data.data : "", data.len);
    ckpt_buf_release(&data);
}

static inline void make_dir(const char *path)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_mkdirs(path, &err) == CKPT_OK, "%s", err.text);
}

/* Copy the plain files of a directory. */
static inline void copy_dir(const char *from, const char *to)
{
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    char **names, a[1024], b[1024];
    size_t n;
    make_dir(to);
    ck_assert_msg(ckpt_list_dir(from, &arena, &names, &n, &err) == CKPT_OK, "%s", err.text);
    for (size_t i = 0; i < n; i++) {
        snprintf(a, sizeof a, "%s/%s", from, names[i]);
        snprintf(b, sizeof b, "%s/%s", to, names[i]);
        if (!ckpt_is_dir(a))
            copy_file(a, b);
    }
    ckpt_arena_free(&arena);
}

/* Open and demand a status; a failure must mention `message`, a success leaves src open. */
static inline void expect_open_at(ckpt_source *src, const char *path, int64_t iteration,
                                  ckpt_status want, const char *message)
{
    ckpt_err err = {0};
    ckpt_open_opts opts = {.iteration = iteration, .container = "torch_dist"};
    ckpt_status status = ckpt_source_open(src, path, &opts, &err);
    ck_assert_msg(status == want, "%s: status %d, expected %d: %s", path, (int)status, (int)want,
                  err.text);
    if (want != CKPT_OK)
        ck_assert_msg(strstr(err.text, message) != NULL, "'%s' lacks '%s'", err.text, message);
}

static inline void expect_open(ckpt_source *src, const char *path, ckpt_status want,
                               const char *message)
{
    expect_open_at(src, path, -1, want, message);
}

static inline void expect_warning(const ckpt_source *src, const char *text)
{
    for (size_t i = 0; i < src->n_warnings; i++)
        if (strstr(src->warnings[i], text) != NULL)
            return;
    ck_abort_msg("no warning '%s' among %zu", text, src->n_warnings);
}

static inline const ckpt_object *object(const ckpt_source *src, const char *name)
{
    for (size_t i = 0; i < src->n_objects; i++)
        if (strcmp(src->objects[i].name, name) == 0)
            return &src->objects[i];
    ck_abort_msg("no object %s", name);
    return NULL;
}

static inline void open_plain(ckpt_source *src, const char *path)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_source_open(src, path, NULL, &err) == CKPT_OK, "%s", err.text);
}

/* xorshift64*: repeatable bytes. */
static inline uint64_t rng(uint64_t *s)
{
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * UINT64_C(2685821657736338717);
}

static inline TCase *make_case(Suite *s, const char *name, double timeout)
{
    TCase *t = tcase_create(name);
    tcase_set_timeout(t, timeout);
    tcase_add_checked_fixture(t, scratch_make, scratch_remove);
    suite_add_tcase(s, t);
    return t;
}

#define COUNT(a) ((int)(sizeof(a) / sizeof(a)[0]))
#define ITER "iter_0000100"
#define MCORE CKPT_FIXTURES "/mcore/"

/* ---- elements ------------------------------------------------------------------------------- */

static inline size_t tensor_bytes(ckpt_dtype dtype, int rank, const int64_t *dims)
{
    int64_t n;
    uint64_t bytes;
    ck_assert(ckpt_numel(rank, dims, &n) && ckpt_dtype_bytes(dtype, n, &bytes));
    return (size_t)bytes;
}

/* Step a row-major odometer; false after the last. */
static inline bool step(int rank, const int64_t *len, int64_t *at)
{
    for (int a = rank; a-- > 0;) {
        if (++at[a] < len[a])
            return true;
        at[a] = 0;
    }
    return false;
}

/* Copy between a whole row-major tensor and a box of it with given strides (NULL: row-major), for
 * whole-byte elements; float4 is moved in pairs. to_box chooses the direction. */
static inline void copy_box(ckpt_dtype dtype, int rank, const int64_t *dims, const int64_t *lo,
                            const int64_t *len, const int64_t *stride, uint8_t *whole, uint8_t *box,
                            bool to_box)
{
    int64_t at[CKPT_MAX_RANK] = {0}, row[CKPT_MAX_RANK], d[CKPT_MAX_RANK], l[CKPT_MAX_RANK],
            o[CKPT_MAX_RANK];
    int pair = dtype == CKPT_F4 ? 2 : 1;
    size_t elem = pair == 2 ? 1 : (size_t)ckpt_dtype_get(dtype)->bits / 8;
    for (int a = 0; a < rank; a++) {
        int k = a == rank - 1 ? pair : 1;
        d[a] = dims[a] / k;
        l[a] = len[a] / k;
        o[a] = lo[a] / k;
        if (l[a] == 0)
            return;
    }
    for (int64_t a = rank, s = 1; a-- > 0; s *= l[a])
        row[a] = stride ? stride[a] : s;
    do {
        int64_t w = 0, b = 0;
        for (int a = 0; a < rank; a++) {
            w = w * d[a] + o[a] + at[a];
            b += at[a] * row[a];
        }
        if (to_box)
            memcpy(box + (size_t)b * elem, whole + (size_t)w * elem, elem);
        else
            memcpy(whole + (size_t)w * elem, box + (size_t)b * elem, elem);
    } while (step(rank, l, at));
}

/* Row-major bytes of a stored tensor. */
static inline uint8_t *read_tensor(ckpt_source *src, const ckpt_tensor *t, size_t *n)
{
    ckpt_err err = {0};
    *n = tensor_bytes(t->dtype, t->rank, t->dims);
    uint8_t *whole = calloc(1, *n + 1);
    for (size_t i = 0; i < t->n_chunks; i++) {
        const ckpt_chunk *c = &t->chunks[i];
        size_t elem = t->dtype == CKPT_F4 ? 1 : (size_t)ckpt_dtype_get(t->dtype)->bits / 8;
        size_t bytes = tensor_bytes(t->dtype, t->rank, c->len);
        if (c->stride) {
            int64_t last = 0;
            for (int a = 0; a < t->rank; a++)
                last += (c->len[a] - 1) * c->stride[a];
            bytes = ((size_t)last + 1) * elem;
        }
        uint8_t *box = calloc(1, bytes + 1);
        ckpt_status status = ckpt_source_read(src, c->file, box, bytes, c->offset, &err);
        ck_assert_msg(status == CKPT_OK, "%s: %s", t->name, err.text);
        copy_box(t->dtype, t->rank, t->dims, c->lo, c->len, c->stride, whole, box, false);
        free(box);
    }
    return whole;
}

/* Both sources hold the same tensors, bit for bit. */
static inline void expect_same_tensors(ckpt_source *a, ckpt_source *b)
{
    ck_assert_uint_eq(a->n_tensors, b->n_tensors);
    for (size_t i = 0; i < a->n_tensors; i++) {
        const ckpt_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        size_t nx, ny;
        ck_assert_str_eq(x->name, y->name);
        ck_assert_int_eq(x->dtype, y->dtype);
        ck_assert_int_eq(x->rank, y->rank);
        for (int k = 0; k < x->rank; k++)
            ck_assert_int_eq(x->dims[k], y->dims[k]);
        uint8_t *p = read_tensor(a, x, &nx), *q = read_tensor(b, y, &ny);
        ck_assert_uint_eq(nx, ny);
        ck_assert_msg(memcmp(p, q, nx) == 0, "%s differs", x->name);
        free(p);
        free(q);
    }
}

/* Open a directory over and over with a few bytes of one file changed, and read what opens. */
static inline void mutate_and_open(const char *dir, const char *name, int rounds, uint64_t seed)
{
    ckpt_buf data = {0};
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    get_file(path, &data);
    uint8_t *copy = malloc(data.len);
    for (int i = 0; i < rounds; i++) {
        ckpt_source src;
        ckpt_err err = {0};
        memcpy(copy, data.data, data.len);
        for (uint64_t k = rng(&seed) % 4 + 1; k > 0; k--) {
            uint8_t *p = &copy[rng(&seed) % data.len];
            uint64_t how = rng(&seed);
            *p = how % 3 == 0 ? (uint8_t)(how >> 8) : (uint8_t)(*p ^ (1u << (how >> 8) % 8));
        }
        put_file(path, copy, data.len);
        if (ckpt_source_open(&src, dir, NULL, &err) == CKPT_OK) {
            for (size_t t = 0; t < src.n_tensors; t++) {
                size_t n;
                free(read_tensor(&src, &src.tensors[t], &n));
            }
            ckpt_source_close(&src);
        } else {
            ck_assert_msg(err.code != CKPT_E_INTERNAL, "%s", err.text);
            ck_assert_uint_gt(strlen(err.text), 0);
        }
    }
    put_file(path, data.data, data.len);
    free(copy);
    ckpt_buf_release(&data);
}

/* ---- executor ------------------------------------------------------------------------------- */

/* Write every file of a sink below dir. whole[i] is tensor i, row-major; objects are in memory or
 * ranges of src. */
static inline void execute(const ckpt_out *out, const ckpt_sink *sink, const char *dir,
                           uint8_t *const *whole, ckpt_source *src)
{
    ckpt_err err = {0};
    for (uint32_t f = 0; f < sink->n_files; f++) {
        const ckpt_out_file *file = &sink->files[f];
        uint8_t *bytes = calloc(1, (size_t)file->size + 1);
        uint64_t at = 0;
        uint32_t crc = 0;
        for (size_t i = 0; i < file->n_segs; i++) {
            const ckpt_seg *s = &file->segs[i];
            ck_assert_uint_eq(s->offset, at);
            uint8_t *p = bytes + at;
            at += s->len;
            if (s->kind == CKPT_SEG_LITERAL) {
                ck_assert(sink->literal(sink, f, s, crc, p));
                continue;
            }
            if (s->kind == CKPT_SEG_CHUNK) {
                const ckpt_out_tensor *t = &out->tensors[s->a];
                const ckpt_out_chunk *c = &t->chunks[s->b];
                ck_assert_uint_eq(c->file, f);
                ck_assert_uint_eq(c->offset, s->offset);
                ck_assert_uint_eq(s->len, tensor_bytes(t->dtype, t->rank, c->len));
                copy_box(t->dtype, t->rank, t->dims, c->lo, c->len, NULL, whole[s->a], p, true);
            } else if (out->objects[s->a].data) {
                memcpy(p, out->objects[s->a].data, (size_t)s->len);
            } else {
                const ckpt_out_object *o = &out->objects[s->a];
                ck_assert(ckpt_source_read(src, o->src_file, p, (size_t)s->len, o->src_offset,
                                           &err) == CKPT_OK);
            }
            crc = s->crc ? ckpt_crc32(0, p, (size_t)s->len) : 0;
        }
        ck_assert_uint_eq(at, file->size);
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", dir, file->name);
        *strrchr(path, '/') = '\0';
        make_dir(path);
        snprintf(path, sizeof path, "%s/%s", dir, file->name);
        put_file(path, bytes, (size_t)file->size);
        free(bytes);
    }
}

/* ---- crafted .metadata ---------------------------------------------------------------------- */

#define META "torch.distributed.checkpoint.metadata"

typedef struct crafted {
    ckpt_buf state, storage; /* key, value, ... without the enclosing dict */
    ckpt_buf data;           /* of __0_0.distcp */
    ckpt_buf extra;          /* further key, value, ... of Metadata */
} crafted;

static inline void craft_object(ckpt_buf *b, const char *module, const char *name)
{
    ckpt_pkl_put_global(b, module, name);
    ckpt_buf_puts(b, ")\x81");
}

static inline void craft_tensor(crafted *c, const char *name, const char *dtype, int rank,
                                const int64_t *dims)
{
    ckpt_buf *b = &c->state;
    ckpt_pkl_put_str(b, name);
    craft_object(b, META, "TensorStorageMetadata");
    ckpt_buf_puts(b, "}(");
    if (dtype) {
        ckpt_pkl_put_str(b, "properties");
        craft_object(b, META, "TensorProperties");
        ckpt_buf_puts(b, "(");
        ckpt_pkl_put_global(b, "torch", dtype);
        ckpt_buf_puts(b, "tb");
    }
    ckpt_pkl_put_str(b, "size");
    ckpt_pkl_put_size(b, rank, dims);
    ckpt_pkl_put_str(b, "chunks");
    ckpt_buf_puts(b, "]("); /* chunks follow; close with craft_tensor_end */
}

static inline void craft_chunk(crafted *c, int rank, const int64_t *lo, const int64_t *len)
{
    craft_object(&c->state, META, "ChunkStorageMetadata");
    ckpt_buf_puts(&c->state, "}(");
    ckpt_pkl_put_str(&c->state, "offsets");
    ckpt_pkl_put_size(&c->state, rank, lo);
    ckpt_pkl_put_str(&c->state, "sizes");
    ckpt_pkl_put_size(&c->state, rank, len);
    ckpt_buf_puts(&c->state, "ub");
}

static inline void craft_tensor_end(crafted *c)
{
    ckpt_buf_puts(&c->state, "eub");
}

static inline void craft_bytes(crafted *c, const char *name)
{
    ckpt_pkl_put_str(&c->state, name);
    craft_object(&c->state, META, "BytesStorageMetadata");
}

/* A storage entry; rank -1: an object. transform may be NULL. */
static inline void craft_entry(crafted *c, const char *fqn, int rank, const int64_t *offset,
                               const char *path, int64_t at, int64_t length, const char *transform)
{
    ckpt_buf *b = &c->storage;
    craft_object(b, META, "MetadataIndex");
    ckpt_buf_puts(b, "}(");
    ckpt_pkl_put_str(b, "fqn");
    ckpt_pkl_put_str(b, fqn);
    ckpt_pkl_put_str(b, "index");
    ckpt_pkl_put_int(b, 77); /* a hint that is wrong must not matter */
    if (rank >= 0) {
        ckpt_pkl_put_str(b, "offset");
        ckpt_pkl_put_size(b, rank, offset);
    }
    ckpt_buf_puts(b, "ub");
    craft_object(b, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    ckpt_buf_puts(b, "}(");
    ckpt_pkl_put_str(b, "relative_path");
    ckpt_pkl_put_str(b, path);
    ckpt_pkl_put_str(b, "offset");
    ckpt_pkl_put_int(b, at);
    ckpt_pkl_put_str(b, "length");
    ckpt_pkl_put_int(b, length);
    if (transform) {
        ckpt_pkl_put_str(b, "transform_descriptors");
        ckpt_buf_puts(b, "](");
        ckpt_pkl_put_str(b, transform);
        ckpt_buf_puts(b, "e");
    }
    ckpt_buf_puts(b, "ub");
}

/* Append a tensor item of zeros; returns its offset, *length its size. */
static inline int64_t craft_item(crafted *c, ckpt_dtype dtype, int rank, const int64_t *dims,
                                 int64_t *length)
{
    size_t at = c->data.len, bytes = tensor_bytes(dtype, rank, dims);
    uint8_t *zero = calloc(1, bytes + 1);
    ckpt_zip_tensor_head(&c->data, dtype, rank, dims);
    ckpt_buf_append(&c->data, zero, bytes);
    ckpt_zip_tensor_tail(&c->data, dtype, rank, dims, ckpt_crc32(0, zero, bytes));
    free(zero);
    *length = (int64_t)(c->data.len - at);
    return (int64_t)at;
}

/* Write .metadata and __0_0.distcp into dir; releases c. */
static inline void craft_write(crafted *c, const char *dir)
{
    ckpt_buf b = {0};
    char path[1024];
    make_dir(dir);
    ckpt_pkl_begin(&b);
    craft_object(&b, META, "Metadata");
    ckpt_buf_puts(&b, "}(");
    ckpt_pkl_put_str(&b, "state_dict_metadata");
    ckpt_buf_puts(&b, "}(");
    ckpt_buf_append(&b, c->state.data, c->state.len);
    ckpt_buf_puts(&b, "u");
    ckpt_pkl_put_str(&b, "storage_data");
    ckpt_buf_puts(&b, "}(");
    ckpt_buf_append(&b, c->storage.data, c->storage.len);
    ckpt_buf_puts(&b, "u");
    ckpt_buf_append(&b, c->extra.data, c->extra.len);
    ckpt_buf_puts(&b, "ub");
    ckpt_pkl_end(&b);
    snprintf(path, sizeof path, "%s/.metadata", dir);
    put_file(path, b.data, b.len);
    snprintf(path, sizeof path, "%s/__0_0.distcp", dir);
    put_file(path, c->data.len ? (const void *)c->data.data : "", c->data.len);
    ckpt_buf_release(&b);
    ckpt_buf_release(&c->state);
    ckpt_buf_release(&c->storage);
    ckpt_buf_release(&c->data);
    ckpt_buf_release(&c->extra);
}

#endif
