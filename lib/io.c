/* Files: complete reads and writes, directories, and the commit protocol.
 *
 * Commit order: data files, then directories from the leaves up, then rename, then the parent
 * directory. rename() is atomic, but only data that was synced before it is certain to be there
 * after a crash. An existing target is exchanged (renameat2 RENAME_EXCHANGE), so that at every
 * moment the name leads to one complete checkpoint. */
#include "io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* From linux/fs.h, which cannot be included beside every libc header. */
#define RENAME_FLAG_NOREPLACE 1u
#define RENAME_FLAG_EXCHANGE 2u

#define IO_STEP ((size_t)1 << 30) /* Linux transfers at most 2^31 - 4096 bytes per call */
#define TREE_DEPTH 256            /* each level of a walk holds one descriptor */

atomic_int ckpt_interrupted;

ckpt_status ckpt_check_interrupted(ckpt_err *err)
{
    return ckpt_interrupted ? ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted") : CKPT_OK;
}

/* ---- files ---------------------------------------------------------------------------------- */

ckpt_status ckpt_open_read(const char *path, int *fd, uint64_t *size, ckpt_err *err)
{
    *fd = -1;
    *size = 0;
    /* O_NONBLOCK: opening a FIFO would otherwise wait for a writer. No effect on files. */
    int f = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (f < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    struct stat st;
    if (fstat(f, &st) != 0) {
        int saved = errno;
        close(f);
        return ckpt_fail_errno(err, saved, "%s", path);
    }
    if (!S_ISREG(st.st_mode)) {
        close(f);
        return ckpt_fail(err, CKPT_E_IO, "%s: expected a regular file, found a %s", path,
                         S_ISDIR(st.st_mode)    ? "directory"
                         : S_ISFIFO(st.st_mode) ? "FIFO"
                         : S_ISSOCK(st.st_mode) ? "socket"
                                                : "device");
    }
    *fd = f;
    *size = (uint64_t)st.st_size;
    return CKPT_OK;
}

static ckpt_status check_range(const char *what, size_t n, uint64_t offset, ckpt_err *err)
{
    if (offset > INT64_MAX || n > INT64_MAX - offset)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%s of %zu bytes at offset %" PRIu64 " is out of range", what, n, offset);
    return CKPT_OK;
}

ckpt_status ckpt_pread_full(int fd, void *buf, size_t n, uint64_t offset, ckpt_err *err)
{
    ckpt_status status = check_range("read", n, offset, err);
    size_t got = 0;
    while (status == CKPT_OK && got < n) {
        size_t step = n - got < IO_STEP ? n - got : IO_STEP;
        ssize_t r = pread(fd, (uint8_t *)buf + got, step, (off_t)(offset + got));
        if (r > 0)
            got += (size_t)r;
        else if (r == 0)
            return ckpt_fail(err, CKPT_E_IO,
                             "unexpected end of file: read of %zu bytes at offset %" PRIu64
                             " got %zu",
                             n, offset, got);
        else if (errno != EINTR)
            return ckpt_fail_errno(err, errno, "read of %zu bytes at offset %" PRIu64, n, offset);
        else
            status = ckpt_check_interrupted(err);
    }
    return status;
}

ckpt_status ckpt_preadv_full(int fd, const struct iovec *into, int n, uint64_t offset,
                             ckpt_err *err)
{
    size_t total = 0;
    for (int i = 0; i < n; i++)
        total += into[i].iov_len;
    ckpt_status status = check_range("read", total, offset, err);
    ssize_t r = status == CKPT_OK ? preadv(fd, into, n, (off_t)offset) : 0;
    size_t got = r > 0 ? (size_t)r : 0;
    for (int i = 0; i < n && status == CKPT_OK; i++) { /* what is missing, or says what is wrong */
        size_t have = into[i].iov_len < got ? into[i].iov_len : got;
        if (have < into[i].iov_len)
            status = ckpt_pread_full(fd, (uint8_t *)into[i].iov_base + have, into[i].iov_len - have,
                                     offset + have, err);
        got -= have;
        offset += into[i].iov_len;
    }
    return status;
}

ckpt_status ckpt_pwrite_full(int fd, const void *buf, size_t n, uint64_t offset, ckpt_err *err)
{
    ckpt_status status = check_range("write", n, offset, err);
    size_t done = 0;
    while (status == CKPT_OK && done < n) {
        size_t step = n - done < IO_STEP ? n - done : IO_STEP;
        ssize_t r = pwrite(fd, (const uint8_t *)buf + done, step, (off_t)(offset + done));
        if (r > 0)
            done += (size_t)r;
        else if (r == 0 || errno != EINTR)
            return ckpt_fail_errno(err, r == 0 ? ENOSPC : errno,
                                   "write of %zu bytes at offset %" PRIu64, n, offset);
        else
            status = ckpt_check_interrupted(err);
    }
    return status;
}

ckpt_status ckpt_read_file(const char *path, uint64_t limit, ckpt_buf *out, ckpt_err *err)
{
    int fd;
    uint64_t size;
    ckpt_status status = ckpt_open_read(path, &fd, &size, err);
    if (status != CKPT_OK)
        return status;
    ckpt_buf_clear(out);
    if (size > limit || size > SIZE_MAX / 4) {
        status =
            ckpt_fail(err, CKPT_E_FORMAT, "%s: expected at most %" PRIu64 " bytes, found %" PRIu64,
                      path, limit, size);
        goto done;
    }
    uint8_t *p = ckpt_buf_extend(out, (size_t)size);
    if (p == NULL) {
        status =
            ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory for %" PRIu64 " bytes", path, size);
        goto done;
    }
    CKPT_TRY(ckpt_pread_full(fd, p, (size_t)size, 0, err), "%s", path);
done:
    close(fd);
    return status;
}

bool ckpt_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool ckpt_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

ckpt_status ckpt_look(const char *path, ckpt_entry *what, ckpt_err *err)
{
    struct stat st;
    *what = CKPT_ENTRY_NONE;
    if (stat(path, &st) == 0)
        *what = S_ISDIR(st.st_mode) ? CKPT_ENTRY_DIR : CKPT_ENTRY_FILE;
    else if (errno != ENOENT && errno != ENOTDIR)
        return ckpt_fail_errno(err, errno, "%s", path);
    return CKPT_OK;
}

ckpt_status ckpt_only_faults(ckpt_status status, const ckpt_err *text, ckpt_err *err)
{
    if (status != CKPT_E_IO && status != CKPT_E_NOMEM && status != CKPT_E_INTERRUPTED)
        return CKPT_OK;
    if (err != NULL)
        *err = *text;
    return status;
}

/* ---- names and directories ------------------------------------------------------------------ */

static int compare_names(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

static bool is_dots(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

ckpt_status ckpt_list_dir(const char *path, ckpt_arena *arena, char ***names, size_t *n,
                          ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    void *list = NULL;
    size_t count = 0, cap = 0;
    *names = NULL;
    *n = 0;
    DIR *dir = opendir(path);
    if (dir == NULL)
        return ckpt_fail_errno(err, errno, "%s", path);
    for (;;) {
        errno = 0;
        const struct dirent *e = readdir(dir);
        if (e == NULL)
            break;
        if (is_dots(e->d_name))
            continue;
        CKPT_TRY(ckpt_grow(&list, &cap, count + 1, sizeof(char *), err), "%s", path);
        char *copy = ckpt_arena_strdup(arena, e->d_name);
        if (copy == NULL) {
            status = ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
            goto done;
        }
        ((char **)list)[count++] = copy;
    }
    if (errno != 0) {
        status = ckpt_fail_errno(err, errno, "%s", path);
        goto done;
    }
    if (count > 0)
        qsort(list, count, sizeof(char *), compare_names);
    *names = ckpt_arena_memdup(arena, list, count * sizeof(char *));
    if (*names == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
    else
        *n = count;
done:
    free(list);
    closedir(dir);
    return status;
}

char *ckpt_path_join(ckpt_arena *arena, const char *dir, const char *name)
{
    size_t n = strlen(dir);
    if (n == 0)
        return ckpt_arena_strdup(arena, name);
    return ckpt_arena_printf(arena, "%s%s%s", dir, dir[n - 1] == '/' ? "" : "/", name);
}

const char *ckpt_basename(const char *path)
{
    const char *base = path;
    for (const char *c = path; *c != '\0'; c++)
        if (*c == '/' && c[1] != '\0' && c[1] != '/')
            base = c + 1;
    return base;
}

bool ckpt_name_is_safe(const char *name, bool allow_slash)
{
    for (const char *part = name;; part++) {
        size_t n = strcspn(part, "/\\");
        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && memcmp(part, "..", 2) == 0))
            return false;
        part += n;
        if (*part == '\0')
            return true;
        if (*part == '\\' || !allow_slash)
            return false;
    }
}

ckpt_status ckpt_mkdirs(const char *path, ckpt_err *err)
{
    size_t n = strlen(path);
    char *copy = malloc(n + 1);
    if (copy == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
    memcpy(copy, path, n + 1);
    ckpt_status status = CKPT_OK;
    for (size_t i = 1; i <= n && status == CKPT_OK; i++) {
        if (copy[i] != '/' && copy[i] != '\0')
            continue;
        char kept = copy[i];
        copy[i] = '\0';
        if (mkdir(copy, 0777) != 0) {
            /* Besides EEXIST, read-only or foreign parents answer EROFS or EACCES for a directory
             * that is there already. */
            int saved = errno;
            if (!ckpt_is_dir(copy))
                status = ckpt_fail_errno(err, saved, "%s", copy);
        }
        copy[i] = kept;
    }
    free(copy);
    return status;
}

/* Directory `name` in `at` for a walk, never through a symbolic link. */
static DIR *open_dir_at(int at, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    DIR *dir = fdopendir(fd);
    if (dir == NULL)
        close(fd);
    return dir;
}

/* Recursion is bounded by TREE_DEPTH; what lies deeper stays. */
static void remove_at(int at, const char *name, int depth)
{
    if (unlinkat(at, name, 0) == 0 || (errno != EISDIR && errno != EPERM))
        return;
    DIR *dir = depth < TREE_DEPTH ? open_dir_at(at, name) : NULL;
    if (dir != NULL) {
        const struct dirent *e;
        while ((e = readdir(dir)) != NULL)
            if (!is_dots(e->d_name))
                remove_at(dirfd(dir), e->d_name, depth + 1);
        closedir(dir);
    }
    (void)unlinkat(at, name, AT_REMOVEDIR);
}

void ckpt_remove_tree(const char *path)
{
    int saved = errno;
    remove_at(AT_FDCWD, path, 0);
    errno = saved;
}

/* ---- commit --------------------------------------------------------------------------------- */

/* Some file systems have no fsync for directories or read-only parts and say EINVAL. */
int ckpt_sync_fd(int fd)
{
    int r;
    do
        r = fsync(fd);
    while (r != 0 && errno == EINTR && !ckpt_interrupted);
    return r != 0 && (errno == EINVAL || errno == ENOTSUP) ? 0 : r;
}

static ckpt_status sync_entry(int at, const char *name, int depth, ckpt_err *err);

static ckpt_status sync_dir(int at, const char *name, int depth, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    DIR *dir = depth < TREE_DEPTH ? open_dir_at(at, name) : NULL;
    if (dir == NULL)
        return ckpt_fail_errno(err, depth < TREE_DEPTH ? errno : ELOOP, "%s", name);
    const struct dirent *e;
    while (status == CKPT_OK && (errno = 0, e = readdir(dir)) != NULL)
        if (!is_dots(e->d_name))
            status = sync_entry(dirfd(dir), e->d_name, depth + 1, err);
    if (status == CKPT_OK && (errno != 0 || ckpt_sync_fd(dirfd(dir)) != 0))
        status = ckpt_fail_errno(err, errno, "fsync of %s", name);
    closedir(dir);
    return status;
}

static ckpt_status sync_entry(int at, const char *name, int depth, ckpt_err *err)
{
    ckpt_status status = ckpt_check_interrupted(err);
    struct stat st;
    if (status != CKPT_OK)
        return status;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return ckpt_fail_errno(err, errno, "%s", name);
    if (S_ISDIR(st.st_mode))
        return sync_dir(at, name, depth, err);
    if (!S_ISREG(st.st_mode))
        return CKPT_OK;
    int fd = openat(at, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s", name);
    if (ckpt_sync_fd(fd) != 0)
        status = ckpt_fail_errno(err, errno, "fsync of %s", name);
    close(fd);
    return status;
}

/* Length of the directory part of a path without trailing slashes; 0 means ".". */
static size_t parent_len(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
}

static char *parent_of(const char *path)
{
    size_t n = parent_len(path);
    char *parent = malloc(n + 2);
    if (parent != NULL) {
        memcpy(parent, n == 0 ? "." : path, n == 0 ? 1 : n);
        parent[n == 0 ? 1 : n] = '\0';
    }
    return parent;
}

static ckpt_status sync_parent(const char *path, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    char *parent = parent_of(path);
    if (parent == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || ckpt_sync_fd(fd) != 0)
        status = ckpt_fail_errno(err, errno, "fsync of %s", parent);
    if (fd >= 0)
        close(fd);
    free(parent);
    return status;
}

/* --force must not sweep away the working directory or one above it: CKPT_E_USAGE. */
static ckpt_status spare_cwd(const char *path, ckpt_err *err)
{
    char up[PATH_MAX];
    struct stat target, here, last = {0};
    if (stat(path, &target) != 0)
        return errno == ENOENT || errno == ENOTDIR ? CKPT_OK /* a dangling link */
                                                   : ckpt_fail_errno(err, errno, "%s", path);
    if (!S_ISDIR(target.st_mode))
        return CKPT_OK;
    (void)snprintf(up, sizeof up, ".");
    for (size_t n = 1;; n += 3) {
        if (stat(up, &here) != 0)
            return ckpt_fail_errno(err, errno, "%s", up);
        if (here.st_dev == target.st_dev && here.st_ino == target.st_ino)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "%s: will not replace a directory that contains the current one",
                             path);
        if ((here.st_dev == last.st_dev && here.st_ino == last.st_ino) || n + 4 > sizeof up)
            return CKPT_OK;
        last = here;
        memcpy(up + n, "/..", 4);
    }
}

/* The target must be replaceable and its parent writable, found before any work is done. */
static ckpt_status check_target(const ckpt_commit *commit, ckpt_err *err)
{
    const char *path = commit->final_path;
    size_t parent_n = parent_len(path);
    const char *base = path + parent_n + (parent_n > 0 && path[parent_n] == '/');
    struct stat st;
    if (base[0] == '\0' || is_dots(base))
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' cannot be an output name", path);
    if (lstat(path, &st) == 0) {
        if (!commit->force)
            return ckpt_fail(err, CKPT_E_USAGE, "%s: exists already (--force replaces it)", path);
        const bool link = S_ISLNK(st.st_mode);
        if (link && stat(path, &st) != 0 && errno != ENOENT && errno != ENOTDIR)
            return ckpt_fail_errno(err, errno, "%s", path);
        if (link && S_ISREG(st.st_mode)) /* as /dev/stdout may be */
            return ckpt_fail(err, CKPT_E_USAGE, "%s: is a link: name the file it leads to", path);
        if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode) && !S_ISLNK(st.st_mode))
            return ckpt_fail(err, CKPT_E_USAGE,
                             "%s: is neither a file nor a directory and will not be replaced",
                             path);
        ckpt_status spared = spare_cwd(path, err);
        if (spared != CKPT_OK)
            return spared;
    } else if (errno != ENOENT) {
        return ckpt_fail_errno(err, errno, "%s", path);
    }
    char *parent = parent_of(path);
    if (parent == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
    ckpt_status status = CKPT_OK;
    if (stat(parent, &st) != 0)
        status = ckpt_fail_errno(err, errno, "%s", parent);
    else if (!S_ISDIR(st.st_mode))
        status = ckpt_fail_errno(err, ENOTDIR, "%s", parent);
    else if (access(parent, W_OK | X_OK) != 0)
        status = ckpt_fail_errno(err, errno, "%s", parent);
    free(parent);
    return status;
}

/* Length of the part of the target's name that its temporaries carry: NAME_MAX is 255. */
static int shown_length(const char *base)
{
    return (int)(strlen(base) > 180 ? 180 : strlen(base));
}

ckpt_status ckpt_commit_leftovers(const ckpt_commit *commit, ckpt_arena *arena, char ***dirs,
                                  size_t *n, ckpt_err *err)
{
    const char *base = ckpt_basename(commit->final_path), *own = ckpt_basename(commit->temp_path);
    ckpt_status status = CKPT_OK;
    char **names = NULL, *parent = parent_of(commit->final_path);
    size_t n_names = 0;
    const char *prefix = ckpt_arena_printf(arena, ".%.*s.ckpt-tmp.", shown_length(base), base);
    *n = 0;
    if (parent == NULL || prefix == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(ckpt_list_dir(parent, arena, &names, &n_names, err));
    *dirs = names;
    for (size_t i = 0; i < n_names; i++) {
        if (strncmp(names[i], prefix, strlen(prefix)) != 0 || strcmp(names[i], own) == 0)
            continue;
        char *path = ckpt_path_join(arena, strcmp(parent, ".") == 0 ? "" : parent, names[i]);
        if (path == NULL) {
            status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            goto done;
        }
        (*dirs)[(*n)++] = path;
    }
done:
    free(parent);
    return status;
}

bool ckpt_commit_is_live(const char *temp_path)
{
    const char *pid = strstr(ckpt_basename(temp_path), ".ckpt-tmp.");
    long n = pid != NULL ? strtol(pid + sizeof ".ckpt-tmp." - 1, NULL, 10) : 0;
    return n > 0 && n <= INT32_MAX && n != (long)getpid() &&
           (kill((pid_t)n, 0) == 0 || errno != ESRCH);
}

ckpt_status ckpt_commit_rivals(const ckpt_commit *commit, ckpt_arena *arena, const char **dead,
                               ckpt_err *err)
{
    char **paths;
    size_t n;
    ckpt_status status = ckpt_commit_leftovers(commit, arena, &paths, &n, err);
    *dead = NULL;
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        if (ckpt_commit_is_live(paths[i]))
            status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: another run is writing it, in %s",
                               commit->final_path, paths[i]);
        *dead = paths[i];
    }
    return status;
}

void ckpt_commit_keep(ckpt_commit *commit)
{
    commit->active = false;
}

/* Claim a sibling name that nothing uses; a number follows if an earlier run left the plain one. */
static ckpt_status claim_temp(ckpt_commit *commit, const char *kind, char **out, ckpt_err *err)
{
    const char *path = commit->final_path;
    const char *base = ckpt_basename(path);
    size_t dir = (size_t)(base - path), cap = strlen(path) + 80;
    int shown = shown_length(base);
    char *temp = malloc(cap);
    if (temp == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", path);
    for (int attempt = 0; attempt < 1000; attempt++) {
        int n = snprintf(temp, cap, "%.*s.%.*s.ckpt-%s.%ld", (int)dir, path, shown, base, kind,
                         (long)getpid());
        if (attempt > 0)
            (void)snprintf(temp + n, cap - (size_t)n, ".%d", attempt);
        struct stat st;
        bool is_free =
            commit->is_dir ? mkdir(temp, 0777) == 0 : lstat(temp, &st) != 0 && errno == ENOENT;
        if (is_free) {
            *out = temp;
            return CKPT_OK;
        }
        if (commit->is_dir && errno != EEXIST)
            break;
    }
    ckpt_status status = ckpt_fail_errno(err, errno, "%s", temp);
    free(temp);
    return status;
}

ckpt_status ckpt_commit_begin(ckpt_commit *commit, const char *final_path, bool is_dir, bool force,
                              ckpt_err *err)
{
    *commit = (ckpt_commit){.is_dir = is_dir, .force = force};
    size_t n = strlen(final_path);
    while (n > 1 && final_path[n - 1] == '/')
        n--;
    commit->final_path = malloc(n + 1);
    if (commit->final_path == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", final_path);
    memcpy(commit->final_path, final_path, n);
    commit->final_path[n] = '\0';
    ckpt_status status = check_target(commit, err);
    if (status == CKPT_OK)
        status = claim_temp(commit, "tmp", &commit->temp_path, err);
    if (status == CKPT_OK)
        commit->active = true;
    else
        ckpt_commit_abort(commit);
    return status;
}

static ckpt_status write_file(const char *path, const void *p, size_t n, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    CKPT_TRY(ckpt_pwrite_full(fd, p, n, 0, err), "%s", path);
    if (ckpt_sync_fd(fd) != 0)
        status = ckpt_fail_errno(err, errno, "fsync of %s", path);
done:
    if (close(fd) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s", path);
    return status;
}

ckpt_status ckpt_commit_write(ckpt_commit *commit, const char *name, const void *p, size_t n,
                              ckpt_err *err)
{
    if (!commit->active || (name == NULL) == commit->is_dir)
        return ckpt_fail(err, CKPT_E_INTERNAL, "write to an output that is not open");
    if (name == NULL)
        return write_file(commit->temp_path, p, n, err);
    if (!ckpt_name_is_safe(name, true))
        return ckpt_fail(err, CKPT_E_FORMAT, "unsafe output name '%s'", name);
    ckpt_arena arena = {0};
    ckpt_status status = CKPT_OK;
    char *path = ckpt_path_join(&arena, commit->temp_path, name);
    char *dir = path == NULL ? NULL : ckpt_arena_strndup(&arena, path, parent_len(path));
    if (dir == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "%s: out of memory", name);
    if (status == CKPT_OK)
        status = ckpt_mkdirs(dir, err);
    if (status == CKPT_OK)
        status = write_file(path, p, n, err);
    ckpt_arena_free(&arena);
    return status;
}

/* glibc offers renameat2 only with _GNU_SOURCE, older libcs not at all. */
static int rename_flags(const char *from, const char *to, unsigned flags)
{
#ifdef SYS_renameat2
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags);
#else
    (void)from, (void)to, (void)flags;
    errno = ENOSYS;
    return -1;
#endif
}

static bool flags_unsupported(int error)
{
    return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM;
}

/* Without exchange: move the target aside, the new one in, and the old one back if that fails. */
static ckpt_status replace_aside(ckpt_commit *commit, ckpt_err *err)
{
    char *aside = NULL;
    ckpt_status status = claim_temp(commit, "old", &aside, err);
    if (status != CKPT_OK)
        return status;
    struct stat st;
    if (lstat(commit->final_path, &st) != 0) {
        status = ckpt_fail_errno(err, errno, "%s", commit->final_path);
        (void)rmdir(aside);
        free(aside);
        return status;
    }
    /* claim_temp made a directory when the new output is one; only a directory may replace it. */
    if (commit->is_dir && !S_ISDIR(st.st_mode))
        (void)rmdir(aside);
    if (rename(commit->final_path, aside) != 0) {
        status = ckpt_fail_errno(err, errno, "rename of %s to %s", commit->final_path, aside);
        (void)rmdir(aside);
    } else if (rename(commit->temp_path, commit->final_path) != 0) {
        status = ckpt_fail_errno(err, errno, "rename of %s to %s", commit->temp_path,
                                 commit->final_path);
        if (rename(aside, commit->final_path) != 0)
            ckpt_err_frame(err, "%s: the previous version is now %s", commit->final_path, aside);
    } else {
        /* From here on temp_path names the old version, as after an exchange. */
        free(commit->temp_path);
        commit->temp_path = aside;
        aside = NULL;
    }
    free(aside);
    return status;
}

/* Put the output in place. *replaced: temp_path now holds what was there before. */
static ckpt_status put_in_place(ckpt_commit *commit, bool *replaced, ckpt_err *err)
{
    const char *from = commit->temp_path, *to = commit->final_path;
    struct stat st;
    *replaced = false;
    bool there = commit->force && lstat(to, &st) == 0;
    if (commit->force && !there && errno != ENOENT && errno != ENOTDIR)
        return ckpt_fail_errno(err, errno, "%s", to);
    if (!there) {
        if (rename_flags(from, to, RENAME_FLAG_NOREPLACE) == 0)
            return CKPT_OK;
        if (errno == EEXIST)
            return ckpt_fail(err, CKPT_E_USAGE, "%s: appeared while it was being written", to);
        if (!flags_unsupported(errno))
            return ckpt_fail_errno(err, errno, "rename of %s to %s", from, to);
        if (lstat(to, &st) == 0)
            return ckpt_fail(err, CKPT_E_USAGE, "%s: appeared while it was being written", to);
    } else if (commit->is_dir || S_ISDIR(st.st_mode)) {
        if (rename_flags(from, to, RENAME_FLAG_EXCHANGE) == 0) {
            *replaced = true;
            return CKPT_OK;
        }
        if (!flags_unsupported(errno))
            return ckpt_fail_errno(err, errno, "exchange of %s and %s", from, to);
        ckpt_status status = replace_aside(commit, err);
        *replaced = status == CKPT_OK;
        return status;
    }
    if (rename(from, to) != 0)
        return ckpt_fail_errno(err, errno, "rename of %s to %s", from, to);
    return CKPT_OK;
}

ckpt_status ckpt_commit_finish(ckpt_commit *commit, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool replaced;
    if (!commit->active)
        return ckpt_fail(err, CKPT_E_INTERNAL, "commit of an output that is not open");
    CKPT_TRY(sync_entry(AT_FDCWD, commit->temp_path, 0, err), "%s", commit->final_path);
    CKPT_CHECK(ckpt_check_interrupted(err));
    if (commit->scratch != NULL && unlink(commit->scratch) != 0 && errno != ENOENT) {
        status = ckpt_fail_errno(err, errno, "%s", commit->scratch);
        goto done;
    }
    CKPT_CHECK(put_in_place(commit, &replaced, err));
    commit->active = false;
    status = sync_parent(commit->final_path, err);
    if (status == CKPT_OK && replaced) {
        ckpt_remove_tree(commit->temp_path);
        if (ckpt_exists(commit->temp_path))
            status = ckpt_fail(err, CKPT_E_IO,
                               "%s: written, but the previous version cannot be removed: %s",
                               commit->final_path, commit->temp_path);
    } else if (replaced)
        ckpt_err_frame(err, "%s: written, previous version kept as %s", commit->final_path,
                       commit->temp_path);
done:
    return status;
}

void ckpt_commit_abort(ckpt_commit *commit)
{
    ckpt_commit_discard(commit, NULL);
}

void ckpt_commit_discard(ckpt_commit *commit, ckpt_err *err)
{
    int saved = errno;
    struct stat st;
    if (commit->active) {
        ckpt_remove_tree(commit->temp_path);
        if (err != NULL && (lstat(commit->temp_path, &st) == 0 || errno != ENOENT))
            ckpt_err_frame(err, "%s cannot be removed", commit->temp_path);
    }
    free(commit->final_path);
    free(commit->temp_path);
    *commit = (ckpt_commit){0};
    errno = saved;
}
