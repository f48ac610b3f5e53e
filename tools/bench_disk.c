/* Operations of `ckpt bench` on files, one thread each, blocks of 4 MiB:
 *
 *   @read FILE             through the page cache
 *   @write DIR N           N bytes of a new file, then fsync
 *   @direct-read FILE      past the page cache (O_DIRECT)
 *   @direct-write DIR N    the same into a new file whose room is allocated first, then fsync
 *   @direct-copy FROM TO   both at once, the one by a thread of its own, then fsync
 *   @settle N              touch and free N bytes, or half of what is free, so that the host of a
 *                          virtual machine has backed them before anything is timed
 *
 * Also: dropping files from the page cache.
 * Where a file system has no O_DIRECT they are CKPT_E_UNSUPPORTED. */
#define _GNU_SOURCE /* O_DIRECT, mincore */
#include "bench.h"
#include "checked.h"
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK ((size_t)4 << 20)
#define ALIGN ((size_t)2 << 20) /* huge pages: direct reading into small ones is twice as slow */
#define SMALL ((uint64_t)1 << 20)
enum { SLOTS = 4, DEPTH_MAX = 16 };

static ckpt_status no_direct(ckpt_err *err, int errnum, const char *path)
{
    if (errnum == EINVAL || errnum == EOPNOTSUPP)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: its file system has no direct access", path);
    return ckpt_fail_errno(err, errnum, "%s", path);
}

static void *take_block(void)
{
    void *p = aligned_alloc(ALIGN, BLOCK);
    if (p != NULL) {
        (void)madvise(p, BLOCK, MADV_HUGEPAGE);
        memset(p, 1, BLOCK);
    }
    return p;
}

/* The end of a file is no multiple of a sector: as much as is there is read. */
static ckpt_status read_block(int fd, const char *path, void *buf, uint64_t at, size_t n,
                              ckpt_err *err)
{
    for (size_t have = 0; have < n;) {
        ssize_t k = pread(fd, (uint8_t *)buf + have, BLOCK - have, (off_t)(at + have));
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return no_direct(err, errno, path);
        if (k == 0)
            return ckpt_fail(err, CKPT_E_IO, "%s: unexpected end of file", path);
        have += (size_t)k;
    }
    return CKPT_OK;
}

static ckpt_status open_from(const char *path, int flags, int *fd, uint64_t *size, ckpt_err *err)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (*fd < 0)
        return no_direct(err, errno, path);
    if (fstat(*fd, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    *size = (uint64_t)st.st_size;
    return CKPT_OK;
}

static ckpt_status read_all(const char *path, int flags, bench_run *out, ckpt_err *err)
{
    ckpt_status status;
    int fd = -1;
    uint64_t size;
    void *buf = take_block();
    if (buf == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(open_from(path, flags, &fd, &size, err));
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (uint64_t at = 0; at < size; at += BLOCK)
        CKPT_CHECK(read_block(fd, path, buf, at, (size_t)ckpt_min_u64(BLOCK, size - at), err));
    out->seconds = ckpt_seconds_since(&start);
    (void)snprintf(out->note, sizeof out->note, "%.2f GB/s", (double)size / out->seconds / 1e9);
done:
    if (fd >= 0)
        close(fd);
    free(buf);
    return status;
}

static ckpt_status op_read(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return read_all(words[1], 0, out, err);
}

static ckpt_status op_direct_read(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return read_all(words[1], O_DIRECT, out, err);
}

/* ---- writing ----------------------------------------------------------------------------------- */

static ckpt_status write_block(int fd, const char *path, const void *buf, uint64_t at,
                               ckpt_err *err)
{
    for (size_t done = 0; done < BLOCK;) {
        ssize_t k = pwrite(fd, (const uint8_t *)buf + done, BLOCK - done, (off_t)(at + done));
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return no_direct(err, errno, path);
        done += (size_t)k;
    }
    return CKPT_OK;
}

static ckpt_status open_to(const char *path, int flags, uint64_t size, int *fd, ckpt_err *err)
{
    *fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | flags, 0600);
    if (*fd < 0)
        return no_direct(err, errno, path);
    int rc = flags != 0 ? posix_fallocate(*fd, 0, (off_t)size) : 0;
    return rc == 0 ? CKPT_OK : ckpt_fail_errno(err, rc, "%s", path);
}

static ckpt_status write_all(const char *const *words, int flags, bench_run *out, ckpt_err *err)
{
    ckpt_status status;
    char path[4096];
    int fd = -1, len = snprintf(path, sizeof path, "%s/written", words[1]);
    uint64_t size;
    void *buf = take_block();
    if (buf == NULL || len < 0 || (size_t)len >= sizeof path) {
        free(buf);
        return ckpt_tool_no_memory(err);
    }
    CKPT_CHECK(bench_amount(words[2], &size, err));
    size = (size + BLOCK - 1) / BLOCK * BLOCK;
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    CKPT_CHECK(open_to(path, flags, size, &fd, err));
    for (uint64_t at = 0; at < size; at += BLOCK)
        CKPT_CHECK(write_block(fd, path, buf, at, err));
    if (ckpt_sync_fd(fd) != 0) {
        status = ckpt_fail_errno(err, errno, "%s: fsync", path);
        goto done;
    }
    out->seconds = ckpt_seconds_since(&start);
    (void)snprintf(out->note, sizeof out->note, "%.2f GB/s", (double)size / out->seconds / 1e9);
done:
    if (fd >= 0) {
        close(fd);
        unlink(path);
    }
    free(buf);
    return status;
}

static ckpt_status op_write(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return write_all(words, 0, out, err);
}

static ckpt_status op_direct_write(const char *const *words, size_t n, bench_run *out,
                                   ckpt_err *err)
{
    (void)n;
    return write_all(words, O_DIRECT, out, err);
}

/* ---- reading and writing at once --------------------------------------------------------------- */

/* Block i goes through slot i % SLOTS. The reader fills slots in order, the writer empties them. */
typedef struct copying {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t size, read, written; /* bytes; blocks */
    int from;
    const char *path;
    void *slot[SLOTS];
    ckpt_status status; /* of the reader */
    bool stop;
    ckpt_err err;
} copying;

static void *reader(void *arg)
{
    copying *w = arg;
    const uint64_t blocks = (w->size + BLOCK - 1) / BLOCK;
    for (uint64_t i = 0; i < blocks; i++) {
        pthread_mutex_lock(&w->lock);
        while (i >= w->written + SLOTS && !w->stop)
            pthread_cond_wait(&w->moved, &w->lock);
        const bool stop = w->stop;
        pthread_mutex_unlock(&w->lock);
        if (stop)
            break;
        const size_t n = (size_t)ckpt_min_u64(BLOCK, w->size - i * BLOCK);
        ckpt_status status =
            read_block(w->from, w->path, w->slot[i % SLOTS], i * BLOCK, n, &w->err);
        pthread_mutex_lock(&w->lock);
        w->status = status;
        w->read = status == CKPT_OK ? i + 1 : w->read;
        pthread_cond_broadcast(&w->moved);
        pthread_mutex_unlock(&w->lock);
        if (status != CKPT_OK)
            break;
    }
    return NULL;
}

static ckpt_status writer(copying *w, int fd, const char *path, ckpt_err *err)
{
    const uint64_t blocks = (w->size + BLOCK - 1) / BLOCK;
    for (uint64_t i = 0; i < blocks; i++) {
        pthread_mutex_lock(&w->lock);
        while (i >= w->read && w->status == CKPT_OK)
            pthread_cond_wait(&w->moved, &w->lock);
        ckpt_status status = i < w->read ? CKPT_OK : w->status;
        pthread_mutex_unlock(&w->lock);
        if (status != CKPT_OK)
            return ckpt_fail(err, status, "%s", w->err.text);
        status = write_block(fd, path, w->slot[i % SLOTS], i * BLOCK, err);
        if (status != CKPT_OK)
            return status;
        pthread_mutex_lock(&w->lock);
        w->written = i + 1;
        pthread_cond_broadcast(&w->moved);
        pthread_mutex_unlock(&w->lock);
    }
    if (ftruncate(fd, (off_t)w->size) != 0 || ckpt_sync_fd(fd) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    return CKPT_OK;
}

static ckpt_status op_direct_copy(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    ckpt_status status;
    copying w = {.lock = PTHREAD_MUTEX_INITIALIZER,
                 .moved = PTHREAD_COND_INITIALIZER,
                 .from = -1,
                 .path = words[1]};
    int to = -1;
    pthread_t id;
    struct timespec start;
    (void)n;
    for (int i = 0; i < SLOTS; i++)
        if ((w.slot[i] = take_block()) == NULL) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
    clock_gettime(CLOCK_MONOTONIC, &start);
    CKPT_CHECK(open_from(words[1], O_DIRECT, &w.from, &w.size, err));
    CKPT_CHECK(open_to(words[2], O_DIRECT, w.size, &to, err));
    if (pthread_create(&id, NULL, reader, &w) != 0) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    status = writer(&w, to, words[2], err);
    pthread_mutex_lock(&w.lock);
    w.stop = true;
    pthread_cond_broadcast(&w.moved);
    pthread_mutex_unlock(&w.lock);
    pthread_join(id, NULL);
    out->seconds = ckpt_seconds_since(&start);
    (void)snprintf(out->note, sizeof out->note, "%.2f GB/s", (double)w.size / out->seconds / 1e9);
done:
    for (int i = 0; i < SLOTS; i++)
        free(w.slot[i]);
    if (w.from >= 0)
        close(w.from);
    if (to >= 0)
        close(to);
    return status;
}

/* ---- the state of the machine ------------------------------------------------------------------ */

static ckpt_status op_settle(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    const long pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    const uint64_t room = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page / 2 : 0;
    uint64_t bytes;
    struct timespec start;
    (void)n;
    ckpt_status status = bench_amount(words[1], &bytes, err);
    if (status != CKPT_OK || room == 0)
        return status;
    const size_t size = (size_t)ckpt_min_u64(bytes, room);
    clock_gettime(CLOCK_MONOTONIC, &start);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < size; i += (size_t)page)
        ((volatile uint8_t *)p)[i] = 1;
    munmap(p, size);
    out->seconds = ckpt_seconds_since(&start);
    return CKPT_OK;
}

const bench_op bench_disk_ops[] = {
    {"@read",         2, op_read        },
    {"@write",        3, op_write       },
    {"@direct-read",  2, op_direct_read },
    {"@direct-write", 3, op_direct_write},
    {"@direct-copy",  3, op_direct_copy },
    {"@settle",       2, op_settle      },
    {NULL,            0, NULL           },
};

/* Share of a file's pages that are in memory. */
static double resident(int fd, uint64_t size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size_t)((size + page - 1) / page);
    unsigned char *in = malloc(pages + 1);
    void *map = pages > 0 ? mmap(NULL, pages * page, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    size_t n = 0;
    if (map != MAP_FAILED && in != NULL && mincore(map, pages * page, in) == 0)
        for (size_t i = 0; i < pages; i++)
            n += in[i] & 1;
    if (map != MAP_FAILED)
        munmap(map, pages * page);
    free(in);
    return pages > 0 ? (double)n / (double)pages : 0;
}

static ckpt_status drop_file(const char *path, uint64_t size, double *kept, ckpt_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    ckpt_status status = CKPT_OK;
    int rc = ckpt_sync_fd(fd);
    if (rc != 0) {
        status = ckpt_fail_errno(err, errno, "%s: fsync", path);
    } else {
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* what it did is looked at */
        double share = size >= SMALL ? resident(fd, size) : 0;
        *kept = share > *kept ? share : *kept;
    }
    close(fd);
    return status;
}

static ckpt_status drop_below(const char *path, int depth, ckpt_arena *arena, double *kept,
                              ckpt_err *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    if (S_ISREG(st.st_mode))
        return drop_file(path, (uint64_t)st.st_size, kept, err);
    if (!S_ISDIR(st.st_mode) || depth == DEPTH_MAX)
        return CKPT_OK;
    char **list = NULL;
    size_t n = 0;
    ckpt_status status = ckpt_list_dir(path, arena, &list, &n, err);
    for (size_t i = 0; i < n && status == CKPT_OK; i++) {
        const char *below = ckpt_path_join(arena, path, list[i]);
        status = below != NULL ? drop_below(below, depth + 1, arena, kept, err)
                               : ckpt_tool_no_memory(err);
    }
    return status;
}

ckpt_status bench_drop_cache(const char *path, double *kept, ckpt_err *err)
{
    ckpt_arena arena = {0};
    *kept = 0;
    ckpt_status status = drop_below(path, 0, &arena, kept, err);
    ckpt_arena_free(&arena);
    return status;
}
