/* The output files of the executor: created, written piece by piece, synced when they are whole, read
 * back. Large ones are written past the page cache. Where the file system can share blocks between
 * files, a range that comes unchanged out of a source file at the same place within a block is shared
 * instead of written: it is read from the output afterwards, so that what is digested is what is there
 * whatever happens to the source. */
#define _GNU_SOURCE /* O_DIRECT */
#include "checked.h"
#include "hole.h"
#include "stream_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIRECT_MIN ((uint64_t)1 << 20) /* files from this size on are written with O_DIRECT */
#define OPEN_MAX_FILES 64 /* more are closed after they are created, until their turn */
#define CLONE_MIN ((uint64_t)256 << 10) /* bytes: less is not worth a system call */

/* ---- writing ------------------------------------------------------------------------------------ */

size_t ckpt_stream_seg(const ckpt_out_file *file, uint64_t offset)
{
    size_t lo = 0, hi = file->n_segs;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (file->segs[mid].offset + file->segs[mid].len <= offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool ckpt_stream_is_done(const ckpt_stream_job *c, size_t f)
{
    return c->journal != NULL && c->journal->files[f].done;
}

static bool is_mine(const ckpt_stream_job *c, size_t f)
{
    return c->owner == NULL || c->owner[f] == c->share->rank;
}

ckpt_journal_entry ckpt_stream_file_digests(const ckpt_stream_file *of)
{
    ckpt_journal_entry e = {.done = true};
    ckpt_sha256_stream whole = of->whole, rest = of->rest;
    ckpt_sha256_stream_final(&whole, e.sha256);
    ckpt_sha256_stream_final(&rest, e.rest);
    return e;
}

/* All bytes of a file are written. */
static ckpt_status finish_file(ckpt_stream_job *c, uint32_t f, ckpt_err *err)
{
    ckpt_stream_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    if (c->plan->in_place)
        return CKPT_OK;
    if (ckpt_sync_fd(of->fd) != 0)
        status = ckpt_fail_errno(err, errno, "%s: fsync", of->path);
    if (of->direct_fd >= 0)
        close(of->direct_fd);
    of->direct_fd = -1;
    if (close(of->fd) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s: close", of->path);
    of->fd = -1;
    if (status == CKPT_OK && c->journal != NULL) {
        ckpt_journal_entry e = ckpt_stream_file_digests(of);
        status = ckpt_journal_done(c->journal, f, &e, err);
    }
    return status;
}

static int open_direct(const char *path, uint64_t size, bool sparse)
{
    return size >= DIRECT_MIN && !sparse ? open(path, O_WRONLY | O_DIRECT | O_CLOEXEC) : -1;
}

/* A file that was closed after it had been created is opened by its first piece. */
static ckpt_status ensure_open(ckpt_stream_job *c, uint32_t f, ckpt_err *err)
{
    ckpt_stream_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    if (c->plan->sink.n_files <= OPEN_MAX_FILES)
        return CKPT_OK;
    pthread_mutex_lock(&c->open_lock);
    if (of->fd < 0) {
        of->direct_fd = open_direct(of->path, c->plan->sink.files[f].size, c->sparse);
        of->fd = open(of->path, O_WRONLY | O_CLOEXEC);
        if (of->fd < 0)
            status = ckpt_fail_errno(err, errno, "%s", of->path);
    }
    pthread_mutex_unlock(&c->open_lock);
    return status;
}

/* Buffered, without pages that are zero. */
static ckpt_status write_around_holes(const ckpt_stream_file *of, const uint8_t *buf, uint64_t lo,
                                      uint64_t hi, ckpt_err *err)
{
    uint64_t from = lo; /* [from, at) is to be written */
    for (uint64_t at = lo, end; at <= hi; at = end) {
        end = at < hi ? ckpt_min_u64((at / CKPT_PAGE + 1) * CKPT_PAGE, hi) : hi + 1;
        bool hole = at == hi || ckpt_all_zero(buf + (at - lo), (size_t)(end - at));
        if (!hole)
            continue;
        ckpt_status status =
            from < at ? ckpt_pwrite_full(of->fd, buf + (from - lo), (size_t)(at - from), from, err)
                      : CKPT_OK;
        if (status != CKPT_OK)
            return status;
        from = end;
    }
    return CKPT_OK;
}

/* n more bytes were written, or went into the digest. */
ckpt_status ckpt_stream_count(ckpt_stream_job *c, uint32_t f, uint64_t n, ckpt_err *err)
{
    uint64_t all = 2 * c->plan->sink.files[f].size;
    return atomic_fetch_add(&c->files[f].done, n) + n == all ? finish_file(c, f, err) : CKPT_OK;
}

static ckpt_status write_range(ckpt_stream_job *c, uint32_t f, const uint8_t *buf, uint64_t lo,
                               uint64_t hi, ckpt_err *err)
{
    const ckpt_stream_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    uint64_t n = hi - lo, direct = of->direct_fd >= 0 ? n / CKPT_PAGE * CKPT_PAGE : 0;
    if (direct > 0 && pwrite(of->direct_fd, buf, direct, (off_t)lo) != (ssize_t)direct)
        direct = 0; /* the file system has second thoughts: buffered does everything */
    if (c->sparse)
        CKPT_TRY(write_around_holes(of, buf, lo, hi, err), "%s", of->path);
    else if (n > direct)
        CKPT_TRY(ckpt_pwrite_full(of->fd, buf + direct, (size_t)(n - direct), lo + direct, err),
                 "%s", of->path);
done:
    return status;
}

ckpt_status ckpt_stream_write(ckpt_stream_job *c, uint32_t f, const uint8_t *buf, uint64_t lo,
                              uint64_t hi, const ckpt_range *shared, ckpt_err *err)
{
    ckpt_status status;
    bool some = shared->lo < shared->hi;
    if (c->plan->in_place)
        return ckpt_stream_count(c, f, hi - lo, err);
    CKPT_CHECK(ensure_open(c, f, err));
    CKPT_CHECK(write_range(c, f, buf, lo, some ? shared->lo : hi, err));
    if (some)
        CKPT_CHECK(write_range(c, f, buf + (shared->hi - lo), shared->hi, hi, err));
    status = ckpt_stream_count(c, f, hi - lo, err);
done:
    return status;
}

/* ---- sharing blocks ----------------------------------------------------------------------------- */

/* Does the chunk consist of the bytes of one place of a plain file? */
static bool is_plain(const ckpt_source *src, const ckpt_gather *g)
{
    int bits = ckpt_dtype_get(g->from)->bits;
    return ckpt_gather_keeps_bytes(g) && g->n_copies == 1 && g->pad == 0 && bits % 8 == 0 &&
           g->copies[0].n_loops == 1 && g->copies[0].loop[0].src == bits / 8 &&
           g->copies[0].loop[0].dst == bits / 8 && g->copies[0].dst == 0 &&
           ckpt_source_vectored(src, g->copies[0].file);
}

/* The blocks within [lo, hi) that lie at the same place within a block of the source: from `at` on. */
static bool same_blocks(const ckpt_stream_job *c, const ckpt_seg *seg, uint64_t lo, uint64_t hi,
                        ckpt_range *out, uint64_t *at)
{
    const ckpt_gather *g;
    if (seg->kind != CKPT_SEG_CHUNK || hi - lo < CLONE_MIN ||
        !is_plain(c->plan->model->src, g = &c->plan->chunks[seg->a][seg->b]))
        return false;
    out->lo = (lo + CKPT_PAGE - 1) / CKPT_PAGE * CKPT_PAGE;
    out->hi = hi / CKPT_PAGE * CKPT_PAGE;
    *at = g->copies[0].src + (out->lo - seg->offset);
    return *at % CKPT_PAGE == 0 && out->lo < out->hi;
}

ckpt_status ckpt_stream_share(ckpt_stream_job *c, uint32_t f, uint64_t lo, uint64_t hi,
                              ckpt_range *shared, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    const ckpt_source *src = c->plan->model->src;
    *shared = (ckpt_range){0};
    if (c->sparse || atomic_load(&c->no_sharing))
        return CKPT_OK;
    for (size_t s = ckpt_stream_seg(file, lo); s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        ckpt_range blocks;
        uint64_t at;
        if (!same_blocks(c, seg, ckpt_max_u64(seg->offset, lo),
                         ckpt_min_u64(seg->offset + seg->len, hi), &blocks, &at))
            continue;
        ckpt_status status = ensure_open(c, f, err);
        if (status != CKPT_OK)
            return status;
        struct file_clone_range range = {
            .src_fd = src->files[c->plan->chunks[seg->a][seg->b].copies[0].file].fd,
            .src_offset = at,
            .src_length = blocks.hi - blocks.lo,
            .dest_offset = blocks.lo};
        if (ioctl(c->files[f].fd, FICLONERANGE, &range) == 0)
            *shared = blocks;
        else /* most file systems cannot, and none can with another one */
            atomic_store(&c->no_sharing, true);
        return CKPT_OK;
    }
    return CKPT_OK;
}

/* ---- files -------------------------------------------------------------------------------------- */

/* What was written is read back, by one that has left the window or by whom it was not for. */
ckpt_status ckpt_stream_read_back(void *self, uint32_t f, void *buf, size_t n, uint64_t offset,
                                  ckpt_err *err)
{
    ckpt_stream_job *c = self;
    ckpt_stream_file *of = &c->files[f];
    bool keep = c->plan->sink.n_files <= OPEN_MAX_FILES;
    ckpt_status status = CKPT_OK;
    int fd = -1;
    if (c->plan->in_place)
        return ckpt_source_read(c->plan->model->src, f, buf, n, offset, err);
    pthread_mutex_lock(&c->open_lock);
    if (of->read_fd >= 0)
        fd = of->read_fd;
    else if ((fd = open(of->path, O_RDONLY | O_CLOEXEC)) >= 0 && keep)
        of->read_fd = fd;
    pthread_mutex_unlock(&c->open_lock);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s", of->path);
    CKPT_TRY(ckpt_pread_full(fd, buf, n, offset, err), "%s", of->path);
done:
    if (!keep)
        close(fd);
    return status;
}

/* Its path, and the directories that lead there. */
static ckpt_status name_file(const ckpt_stream_job *c, size_t f, ckpt_err *err)
{
    const char *name = c->plan->sink.files[f].name;
    char *path = c->plan->out.single_file ? ckpt_arena_strdup(c->arena, c->dir)
                                          : ckpt_path_join(c->arena, c->dir, name);
    if (path == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    c->files[f].path = path;
    return CKPT_OK;
}

static ckpt_status open_file(const ckpt_stream_job *c, size_t f, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_out_file *file = &c->plan->sink.files[f];
    ckpt_stream_file *of = &c->files[f];
    bool sparse = c->sparse;
    char *path = of->path;
    char *slash = strrchr(path, '/');
    if (!c->plan->out.single_file && slash != NULL) {
        *slash = '\0';
        CKPT_CHECK(ckpt_mkdirs(path, err));
        *slash = '/';
    }
    of->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (of->fd < 0)
        return ckpt_fail_errno(err, errno, "%s: create", path);
    if (sparse && ftruncate(of->fd, (off_t)file->size) != 0)
        return ckpt_fail_errno(err, errno, "%s: %llu bytes", path, (unsigned long long)file->size);
    int rc = file->size > 0 && !sparse ? posix_fallocate(of->fd, 0, (off_t)file->size) : 0;
    if (rc == ENOSPC || rc == EFBIG || rc == EDQUOT)
        return ckpt_fail_errno(err, rc, "%s: %llu bytes", path, (unsigned long long)file->size);
    if (file->size == 0 && ckpt_sync_fd(of->fd) != 0) /* no piece will come by */
        return ckpt_fail_errno(err, errno, "%s: fsync", path);
    if (file->size == 0 || c->plan->sink.n_files > OPEN_MAX_FILES) {
        int rc_close = close(of->fd);
        of->fd = -1;
        if (rc_close != 0)
            return ckpt_fail_errno(err, errno, "%s: close", path);
        return CKPT_OK;
    }
    of->direct_fd = open_direct(path, file->size, sparse);
done:
    return status;
}

ckpt_status ckpt_stream_open_files(ckpt_stream_job *c, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    c->files = calloc(sink->n_files + 1, sizeof *c->files);
    if (c->files == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f++) {
        c->files[f].fd = c->files[f].direct_fd = c->files[f].read_fd = -1;
        ckpt_sha256_stream_init(&c->files[f].whole);
        ckpt_sha256_stream_init(&c->files[f].rest);
    }
    for (size_t f = 0; f < sink->n_files && !c->plan->in_place; f++) {
        ckpt_status status = name_file(c, f, err);
        if (status == CKPT_OK && !ckpt_stream_is_done(c, f) && is_mine(c, f))
            status = open_file(c, f, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

void ckpt_stream_close_files(ckpt_stream_job *c)
{
    for (size_t f = 0; c->files != NULL && f < c->plan->sink.n_files; f++) {
        if (c->files[f].fd >= 0)
            close(c->files[f].fd);
        if (c->files[f].direct_fd >= 0)
            close(c->files[f].direct_fd);
        if (c->files[f].read_fd >= 0)
            close(c->files[f].read_fd);
    }
    free(c->files);
}
