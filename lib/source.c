/* Source helpers: file tables, lookup, and the proof that chunks tile their tensor.
 *
 * Tiling. Boxes cover a region exactly once iff the sum of their indicator functions is the
 * region's. An indicator of [lo, hi) is the product over axes of H(x - lo) - H(x - hi), H the unit
 * step; the products of steps at distinct corners are linearly independent, so replacing each
 * H(x_a - c) by a variable r_a(c) turns the statement into an identity of polynomials of degree
 * rank. It is evaluated at random values modulo 2^61 - 1: one linear pass, any tiling, and a wrong
 * sum agrees by chance with probability at most 16/2^61 (Schwartz-Zippel). A failed identity is
 * certain; bisecting the cuts of one axis after the other then finds the first bad cell. */
#include "source.h"

#include "cache.h"
#include "checked.h"
#include "hole.h"
#include "io.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_WARNINGS 1000
#define HEAD_BYTES 1024

/* ---- stand-ins ------------------------------------------------------------------------------ */

/* Value of the line "key value" in an LFS pointer; its length, or 0. */
static size_t lfs_field(const char *text, const char *key, const char **value)
{
    const char *line = strstr(text, key);
    if (line == NULL)
        return 0;
    *value = line + strlen(key);
    return strcspn(*value, "\r\n");
}

static bool starts_with_nocase(const char *text, const char *prefix)
{
    return strncasecmp(text, prefix, strlen(prefix)) == 0;
}

ckpt_status ckpt_refuse_stand_in(const uint8_t *head, size_t n, uint64_t size, ckpt_err *err)
{
    char text[HEAD_BYTES + 1];
    if (n > HEAD_BYTES)
        n = HEAD_BYTES;
    memcpy(text, head, n);
    text[n] = '\0';
    if (strncmp(text, "version https://git-lfs.github.com/spec/", 40) == 0 && size <= HEAD_BYTES) {
        const char *oid = "", *bytes = "";
        size_t oid_n = lfs_field(text, "\noid ", &oid),
               bytes_n = lfs_field(text, "\nsize ", &bytes);
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "Git LFS pointer, not the file itself (oid %.*s, size %.*s): fetch it "
                         "with 'git lfs pull'",
                         oid_n == 0 ? 7 : (int)oid_n, oid_n == 0 ? "missing" : oid,
                         bytes_n == 0 ? 7 : (int)bytes_n, bytes_n == 0 ? "missing" : bytes);
    }
    const char *p = text;
    if (strncmp(p, "\xef\xbb\xbf", 3) == 0)
        p += 3;
    p += strspn(p, " \t\r\n");
    if (starts_with_nocase(p, "<!doctype html") || starts_with_nocase(p, "<html") ||
        starts_with_nocase(p, "<head") || starts_with_nocase(p, "<!--"))
        return ckpt_fail(err, CKPT_E_FORMAT, "HTML page saved as a checkpoint's file");
    if (starts_with_nocase(p, "<?xml"))
        return ckpt_fail(err, CKPT_E_FORMAT, "XML document saved as a checkpoint's file");
    return CKPT_OK;
}

/* ---- tables --------------------------------------------------------------------------------- */

/* Checkpoints of large jobs have a file per rank, more than the usual soft limit of 1024 open
 * files; the hard limit is there to be used by processes that need it. */
static ckpt_status open_data(const char *path, int *fd, uint64_t *size, ckpt_err *err)
{
    errno = 0;
    ckpt_status status = ckpt_open_read(path, fd, size, err);
    struct rlimit limit;
    if (status != CKPT_E_IO || errno != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
        limit.rlim_cur >= limit.rlim_max)
        return status;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return status;
    return ckpt_open_read(path, fd, size, err);
}

/* Arena tables double when they are full; lengths alone tell when (8, 16, 32, ...). */
static bool table_room(ckpt_arena *arena, void **table, size_t n, size_t elem)
{
    if (n != 0 && (n < 8 || (n & (n - 1)) != 0))
        return true;
    void *grown = ckpt_arena_array(arena, n == 0 ? 8 : 2 * n, elem);
    if (grown == NULL)
        return false;
    if (n != 0)
        memcpy(grown, *table, n * elem);
    *table = grown;
    return true;
}

/* Files of a source that are kept open; the rest of what the process may have is for others. */
static size_t descriptors(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return SIZE_MAX;
    return (size_t)limit.rlim_cur / 2;
}

ckpt_status ckpt_source_add_file(ckpt_source *src, const char *name, const char *path, bool open_it,
                                 uint32_t *index, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_file file = {.fd = -1};
    void *table = src->files;
    if (src->n_files >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: more than 2^32 files", path);
    struct stat st;
    if (open_it) {
        uint8_t head[HEAD_BYTES];
        CKPT_CHECK(open_data(path, &file.fd, &file.size, err));
        if (fstat(file.fd, &st) != 0) {
            status = ckpt_fail_errno(err, errno, "%s", path);
            goto done;
        }
        size_t n = file.size < sizeof head ? (size_t)file.size : sizeof head;
        CKPT_TRY(ckpt_pread_full(file.fd, head, n, 0, err), "%s", path);
        CKPT_TRY(ckpt_refuse_stand_in(head, n, file.size, err), "%s", path);
    } else {
        if (stat(path, &st) != 0)
            return ckpt_fail_errno(err, errno, "%s", path);
        file.size = S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
    }
    file.is_data = open_it;
    if (open_it && src->n_files >= descriptors()) {
        close(file.fd);
        file.fd = -1;
        file.on_demand = true;
    }
    file.sparse = ckpt_is_sparse(&st);
    file.dev = st.st_dev;
    file.ino = st.st_ino;
    file.mtime_s = st.st_mtim.tv_sec;
    file.mtime_ns = st.st_mtim.tv_nsec;
    file.ctime_s = st.st_ctim.tv_sec;
    file.ctime_ns = st.st_ctim.tv_nsec;
    file.name = ckpt_arena_strdup(&src->arena, name);
    file.path = ckpt_arena_strdup(&src->arena, path);
    if (file.name == NULL || file.path == NULL ||
        !table_room(&src->arena, &table, src->n_files, sizeof file)) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
        goto done;
    }
    src->files = table;
    src->files[src->n_files] = file;
    if (index != NULL)
        *index = (uint32_t)src->n_files;
    src->n_files++;
    file.fd = -1; /* now the table's */
done:
    if (file.fd >= 0)
        close(file.fd);
    return status;
}

/* The name must still lead to the same file; a directory counts by its identity alone. */
static ckpt_status file_unchanged(const ckpt_file *f, ckpt_err *err)
{
    struct stat st;
    if (f->ino == 0)
        return CKPT_OK;
    if (stat(f->path, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s: changed while it was being read", f->path);
    if (st.st_dev != f->dev || st.st_ino != f->ino)
        return ckpt_fail(err, CKPT_E_IO, "%s: changed while it was being read: another file now",
                         f->path);
    if (S_ISREG(st.st_mode) && (uint64_t)st.st_size != f->size)
        return ckpt_fail(err, CKPT_E_IO,
                         "%s: changed while it was being read: expected %" PRIu64
                         " bytes, found %lld",
                         f->path, f->size, (long long)st.st_size);
    if (S_ISREG(st.st_mode) &&
        (st.st_mtim.tv_sec != f->mtime_s || st.st_mtim.tv_nsec != f->mtime_ns ||
         st.st_ctim.tv_sec != f->ctime_s || st.st_ctim.tv_nsec != f->ctime_ns))
        return ckpt_fail(err, CKPT_E_IO, "%s: changed while it was being read: written to",
                         f->path);
    return CKPT_OK;
}

ckpt_status ckpt_source_unchanged(const ckpt_source *src, ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_source_n_real(src); i++) {
        ckpt_status status = file_unchanged(&src->files[i], err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

ckpt_status ckpt_source_warn(ckpt_source *src, ckpt_err *err, const char *fmt, ...)
{
    /* A damaged checkpoint can deserve one warning per tensor; nobody reads a million. */
    if (src->n_warnings > MAX_WARNINGS)
        return CKPT_OK;
    ckpt_err line = {0};
    ckpt_buf text = {0};
    void *table = src->warnings;
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&text, fmt, ap);
    va_end(ap);
    /* Through ckpt_fail because it makes one printable line. */
    (void)ckpt_fail(&line, CKPT_OK, "%s",
                    src->n_warnings == MAX_WARNINGS    ? "further warnings are not shown"
                    : text.failed || text.data == NULL ? ""
                                                       : (const char *)text.data);
    ckpt_buf_release(&text);
    char *copy = ckpt_arena_strdup(&src->arena, line.text);
    if (copy == NULL || !table_room(&src->arena, &table, src->n_warnings, sizeof(char *)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a warning");
    src->warnings = table;
    src->warnings[src->n_warnings++] = copy;
    return CKPT_OK;
}

ckpt_status ckpt_file_read(const ckpt_file *f, void *buf, size_t n, uint64_t offset, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int fd = f->fd, own = -1;
    uint64_t size;
    if (fd < 0 && !f->on_demand) /* a name in a list, or a file that read_at makes */
        return ckpt_fail(err, CKPT_E_INTERNAL, "not a file to read");
    if (fd < 0) {
        struct stat st;
        CKPT_CHECK(ckpt_open_read(f->path, &own, &size, err));
        fd = own;
        if (f->ino != 0 && (fstat(fd, &st) != 0 || st.st_dev != f->dev || st.st_ino != f->ino)) {
            status = ckpt_fail(err, CKPT_E_IO, "changed while it was being read: another file now");
            goto done;
        }
    }
    status = f->sparse ? ckpt_pread_holes(fd, buf, n, offset, err)
                       : ckpt_pread_full(fd, buf, n, offset, err);
done:
    if (own >= 0)
        close(own);
    return status;
}

static ckpt_status past_end(const ckpt_file *f, uint64_t n, uint64_t offset, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "%s: read of %" PRIu64 " bytes at offset %" PRIu64 " past end %" PRIu64,
                     f->path, n, offset, f->size);
}

ckpt_status ckpt_source_read(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err)
{
    if (file >= src->n_files)
        return ckpt_fail(err, CKPT_E_INTERNAL, "file %" PRIu32 " of %zu", file, src->n_files);
    const ckpt_file *f = &src->files[file];
    if (offset > f->size || n > f->size - offset)
        return past_end(f, n, offset, err);
    ckpt_status status = src->read_at != NULL ? src->read_at(src, file, buf, n, offset, err)
                                              : ckpt_file_read(f, buf, n, offset, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", f->path);
    else
        ckpt_cache_passed(src, file, offset + n);
    return status;
}

ckpt_status ckpt_source_read_real(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                  uint64_t offset, ckpt_err *err)
{
    if (src->read_at != NULL || file >= src->n_files || src->files[file].fd >= 0)
        return ckpt_source_read(src, file, buf, n, offset, err);
    ckpt_file f = src->files[file];
    f.on_demand = true;
    ckpt_status status = ckpt_file_read(&f, buf, n, offset, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", f.path);
    return status;
}

bool ckpt_source_vectored(const ckpt_source *src, uint32_t file)
{
    return src->read_at == NULL && file < src->n_files && src->files[file].fd >= 0 &&
           !src->files[file].sparse;
}

ckpt_status ckpt_source_readv(ckpt_source *src, uint32_t file, const struct iovec *into, int n,
                              uint64_t offset, ckpt_err *err)
{
    const ckpt_file *f = &src->files[file];
    uint64_t total = 0;
    for (int i = 0; i < n; i++)
        total += into[i].iov_len;
    if (offset > f->size || total > f->size - offset)
        return past_end(f, total, offset, err);
    ckpt_status status = ckpt_preadv_full(f->fd, into, n, offset, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", f->path);
    else
        ckpt_cache_passed(src, file, offset + total);
    return status;
}

int64_t ckpt_source_find(const ckpt_source *src, const char *name)
{
    size_t lo = 0, hi = src->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(src->tensors[mid].name, name);
        if (order == 0)
            return (int64_t)mid;
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return -1;
}

/* ---- tiling --------------------------------------------------------------------------------- */

typedef struct box {
    int64_t lo[CKPT_MAX_RANK], hi[CKPT_MAX_RANK];
} box;

#define BOX_TEXT (CKPT_MAX_RANK * 44)

static const char *box_text(char text[BOX_TEXT], int rank, const int64_t *lo, const int64_t *hi)
{
    size_t used = 0;
    text[used++] = '[';
    for (int a = 0; a < rank; a++)
        used += (size_t)snprintf(text + used, BOX_TEXT - used, "%s%" PRId64 ":%" PRId64,
                                 a == 0 ? "" : ",", lo[a], hi[a]);
    text[used++] = ']';
    text[used] = '\0';
    return text;
}

static void chunk_box(const ckpt_chunk *chunk, int rank, box *out)
{
    for (int a = 0; a < rank; a++) {
        out->lo[a] = chunk->lo[a];
        out->hi[a] = chunk->lo[a] + chunk->len[a];
    }
}

#define P61 ((UINT64_C(1) << 61) - 1)

static uint64_t mul61(uint64_t a, uint64_t b)
{
    unsigned __int128 p = (unsigned __int128)a * b;
    uint64_t r = (uint64_t)(p & P61) + (uint64_t)(p >> 61);
    return r >= P61 ? r - P61 : r;
}

static uint64_t add61(uint64_t a, uint64_t b)
{
    uint64_t r = a + b;
    return r >= P61 ? r - P61 : r;
}

static uint64_t sub61(uint64_t a, uint64_t b)
{
    return a >= b ? a - b : a + P61 - b;
}

typedef struct keys {
    uint64_t axis[CKPT_MAX_RANK][2];
} keys;

static void draw_keys(keys *k)
{
    if (getrandom(k, sizeof *k, GRND_NONBLOCK) == (ssize_t)sizeof *k)
        return;
    /* Early boot or a sandbox without the call: unpredictable enough for a checker. */
    struct timespec now = {0};
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t seed = (uint64_t)now.tv_nsec ^ ((uint64_t)now.tv_sec << 32) ^ (uintptr_t)k;
    for (int a = 0; a < CKPT_MAX_RANK; a++)
        for (int i = 0; i < 2; i++) {
            seed = (seed + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
            k->axis[a][i] = seed ^ (seed >> 29);
        }
}

/* r_a(c): two keyed rounds of the splitmix64 finaliser (Steele, Lea and Flood 2014). */
static uint64_t coordinate(const keys *k, int axis, int64_t c)
{
    uint64_t x = (uint64_t)c + k->axis[axis][0];
    for (int round = 0; round < 2; round++) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x = (x ^ (x >> 31)) + k->axis[axis][1];
    }
    return x % P61;
}

static uint64_t box_value(const keys *k, int rank, const box *b)
{
    uint64_t v = 1;
    for (int a = 0; a < rank; a++)
        v = mul61(v, sub61(coordinate(k, a, b->lo[a]), coordinate(k, a, b->hi[a])));
    return v;
}

/* The part of a chunk inside a region; false if there is none. */
static bool clip(const ckpt_chunk *chunk, int rank, const box *region, box *out)
{
    for (int a = 0; a < rank; a++) {
        out->lo[a] = ckpt_max_i64(chunk->lo[a], region->lo[a]);
        out->hi[a] = ckpt_min_i64(chunk->lo[a] + chunk->len[a], region->hi[a]);
        if (out->lo[a] >= out->hi[a])
            return false;
    }
    return true;
}

static bool tiles(const keys *k, const ckpt_tensor *t, const box *region)
{
    uint64_t sum = 0;
    box part;
    for (size_t i = 0; i < t->n_chunks; i++)
        if (clip(&t->chunks[i], t->rank, region, &part))
            sum = add61(sum, box_value(k, t->rank, &part));
    return sum == box_value(k, t->rank, region);
}

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Narrow a region that is not tiled to its first slab between neighbouring cuts of one axis that
 * is not tiled. */
static ckpt_status narrow(const keys *k, const ckpt_tensor *t, int axis, box *region, ckpt_err *err)
{
    size_t n = 2, first = 0, last;
    box part;
    int64_t *cuts = malloc((2 * t->n_chunks + 2) * sizeof *cuts);
    if (cuts == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu chunks", t->n_chunks);
    cuts[0] = region->lo[axis];
    cuts[1] = region->hi[axis];
    for (size_t i = 0; i < t->n_chunks; i++)
        if (clip(&t->chunks[i], t->rank, region, &part)) {
            cuts[n++] = part.lo[axis];
            cuts[n++] = part.hi[axis];
        }
    qsort(cuts, n, sizeof *cuts, compare_i64);
    last = 0;
    for (size_t i = 1; i < n; i++)
        if (cuts[i] != cuts[last])
            cuts[++last] = cuts[i];
    while (last - first > 1) {
        size_t mid = first + (last - first) / 2;
        region->lo[axis] = cuts[first];
        region->hi[axis] = cuts[mid];
        if (tiles(k, t, region))
            first = mid;
        else
            last = mid;
    }
    region->lo[axis] = cuts[first];
    region->hi[axis] = cuts[last];
    free(cuts);
    return CKPT_OK;
}

/* Grow an empty cell upwards, last axis first, as far as nothing is met: a readable hole. */
static void grow_hole(const ckpt_tensor *t, box *hole)
{
    box part;
    for (int a = t->rank - 1; a >= 0; a--) {
        int64_t end = t->dims[a];
        hole->hi[a] = end;
        for (size_t i = 0; i < t->n_chunks; i++)
            if (clip(&t->chunks[i], t->rank, hole, &part))
                end = ckpt_min_i64(end, part.lo[a]);
        hole->hi[a] = end;
    }
}

/* The chunks do not tile the tensor: say where. */
static ckpt_status report_defect(const keys *k, const ckpt_tensor *t, ckpt_err *err)
{
    char first[BOX_TEXT], second[BOX_TEXT];
    box region = {{0}, {0}}, part, other;
    const ckpt_chunk *hit[2] = {NULL, NULL};
    for (int a = 0; a < t->rank; a++)
        region.hi[a] = t->dims[a];
    for (int a = 0; a < t->rank; a++) {
        ckpt_status status = narrow(k, t, a, &region, err);
        if (status != CKPT_OK)
            return status;
    }
    /* No cut runs through the cell any more: every chunk holds all of it or nothing. */
    for (size_t i = 0; i < t->n_chunks && hit[1] == NULL; i++)
        if (clip(&t->chunks[i], t->rank, &region, &part))
            hit[hit[0] != NULL] = &t->chunks[i];
    if (hit[1] != NULL) {
        chunk_box(hit[0], t->rank, &part);
        chunk_box(hit[1], t->rank, &other);
        return ckpt_fail(err, CKPT_E_FORMAT, "chunks %s and %s overlap",
                         box_text(first, t->rank, part.lo, part.hi),
                         box_text(second, t->rank, other.lo, other.hi));
    }
    if (hit[0] == NULL) {
        grow_hole(t, &region);
        return ckpt_fail(err, CKPT_E_FORMAT, "elements %s missing",
                         box_text(first, t->rank, region.lo, region.hi));
    }
    return ckpt_fail(err, CKPT_E_FORMAT, "chunks do not cover it exactly once");
}

/* ---- checks of one tensor ------------------------------------------------------------------- */

/* Bytes from a chunk's offset to the end of its last element. */
static bool chunk_span(const ckpt_tensor *t, const ckpt_chunk *c, uint64_t *bytes)
{
    int64_t n = 1, step;
    if (c->stride == NULL)
        return ckpt_numel(t->rank, c->len, &n) && ckpt_dtype_bytes(t->dtype, n, bytes);
    if (ckpt_dtype_get(t->dtype)->bits % 8 != 0)
        return false;
    for (int a = 0; a < t->rank; a++)
        if (c->stride[a] < 0 || !ckpt_mul_i64(c->len[a] - 1, c->stride[a], &step) ||
            !ckpt_add_i64(n, step, &n))
            return false;
    return ckpt_dtype_bytes(t->dtype, n, bytes);
}

static bool in_bounds(const ckpt_tensor *t, const ckpt_chunk *c, bool *empty)
{
    *empty = false;
    for (int a = 0; a < t->rank; a++) {
        if (c->lo[a] < 0 || c->len[a] < 0 || c->lo[a] > t->dims[a] ||
            c->len[a] > t->dims[a] - c->lo[a])
            return false;
        if (c->len[a] == 0)
            *empty = true;
    }
    return true;
}

static ckpt_status check_chunk(const ckpt_source *src, const ckpt_tensor *t, const ckpt_chunk *c,
                               bool *empty, ckpt_err *err)
{
    char text[BOX_TEXT];
    box b = {{0}, {0}};
    uint64_t bytes, end;
    if (!in_bounds(t, c, empty)) {
        int a = 0; /* the sum lo + len may not exist, so show the two */
        while (c->lo[a] >= 0 && c->len[a] >= 0 && c->lo[a] <= t->dims[a] &&
               c->len[a] <= t->dims[a] - c->lo[a])
            a++;
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "chunk of %" PRId64 " at %" PRId64 " on axis %d outside extent %" PRId64,
                         c->len[a], c->lo[a], a, t->dims[a]);
    }
    if (*empty)
        return CKPT_OK;
    chunk_box(c, t->rank, &b);
    (void)box_text(text, t->rank, b.lo, b.hi);
    if (c->file >= src->n_files)
        return ckpt_fail(err, CKPT_E_FORMAT, "chunk %s: file %" PRIu32 " of %zu", text, c->file,
                         src->n_files);
    const ckpt_file *file = &src->files[c->file];
    if (!chunk_span(t, c, &bytes) || !ckpt_add_u64(c->offset, bytes, &end))
        return ckpt_fail(err, CKPT_E_FORMAT, "chunk %s: %s elements have no whole byte range", text,
                         ckpt_dtype_get(t->dtype)->name);
    if (end > file->size)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "chunk %s: bytes %" PRIu64 ":%" PRIu64 " past end %" PRIu64 " of %s", text,
                         c->offset, end, file->size, file->name);
    return CKPT_OK;
}

/* qsort has no context argument in C17, so the rank travels with every entry. */
typedef struct order {
    const int64_t *lo;
    size_t index;
    int rank;
} order;

static int compare_lo(const int64_t *a, const int64_t *b, int rank)
{
    for (int i = 0; i < rank; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

static int compare_order(const void *a, const void *b)
{
    const order *x = a, *y = b;
    int c = compare_lo(x->lo, y->lo, x->rank);
    return c != 0 ? c : (x->index > y->index) - (x->index < y->index);
}

static ckpt_status sort_chunks(ckpt_tensor *t, ckpt_err *err)
{
    size_t i = 1, n = t->n_chunks;
    while (i < n && compare_lo(t->chunks[i - 1].lo, t->chunks[i].lo, t->rank) <= 0)
        i++;
    if (i >= n)
        return CKPT_OK;
    order *list = calloc(n, sizeof *list);
    ckpt_chunk *sorted = calloc(n, sizeof *sorted);
    ckpt_status status = CKPT_OK;
    if (list == NULL || sorted == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu chunks", n);
        goto done;
    }
    for (i = 0; i < n; i++)
        list[i] = (order){t->chunks[i].lo, i, t->rank};
    qsort(list, n, sizeof *list, compare_order);
    for (i = 0; i < n; i++)
        sorted[i] = t->chunks[list[i].index];
    memcpy(t->chunks, sorted, n * sizeof *sorted);
done:
    free(list);
    free(sorted);
    return status;
}

static ckpt_status check_shape(const ckpt_tensor *t, ckpt_err *err)
{
    int64_t n;
    uint64_t bytes;
    if (t->rank < 0 || t->rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rank %d, expected at most %d", t->rank,
                         CKPT_MAX_RANK);
    for (int a = 0; a < t->rank; a++)
        if (t->dims[a] < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "negative extent %" PRId64 " on axis %d",
                             t->dims[a], a);
    if ((unsigned)t->dtype >= CKPT_DTYPE_COUNT)
        return ckpt_fail(err, CKPT_E_INTERNAL, "dtype %d", (int)t->dtype);
    if (!ckpt_numel(t->rank, t->dims, &n) || !ckpt_dtype_bytes(t->dtype, n, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "shape of %s elements has no byte size",
                         ckpt_dtype_get(t->dtype)->name);
    return CKPT_OK;
}

static ckpt_status check_chunks(const ckpt_source *src, ckpt_tensor *t, ckpt_err *err)
{
    ckpt_status status = check_shape(t, err);
    size_t kept = 0;
    int64_t numel = 0;
    box whole = {{0}, {0}};
    keys k;
    for (size_t i = 0; i < t->n_chunks && status == CKPT_OK; i++) {
        bool empty;
        status = check_chunk(src, t, &t->chunks[i], &empty, err);
        if (status == CKPT_OK && !empty)
            t->chunks[kept++] = t->chunks[i];
    }
    if (status != CKPT_OK)
        return status;
    t->n_chunks = kept;
    /* Chunks of an empty tensor are empty, so none is left. */
    if (!ckpt_numel(t->rank, t->dims, &numel) || numel == 0)
        return CKPT_OK;
    status = sort_chunks(t, err);
    if (status != CKPT_OK)
        return status;
    for (int a = 0; a < t->rank; a++)
        whole.hi[a] = t->dims[a];
    /* Almost every tensor is one chunk, which then must be the whole. */
    if (kept == 1 &&
        (t->rank == 0 || memcmp(t->chunks[0].len, t->dims, (size_t)t->rank * sizeof *t->dims) == 0))
        return CKPT_OK;
    draw_keys(&k);
    return tiles(&k, t, &whole) ? CKPT_OK : report_defect(&k, t, err);
}

ckpt_status ckpt_tensor_check(const ckpt_source *src, ckpt_tensor *tensor, ckpt_err *err)
{
    ckpt_status status = check_chunks(src, tensor, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "tensor '%.300s'", tensor->name);
    return status;
}
