/* LD_PRELOAD shim that makes calls of the C library fail, for tests/fault/sweep.c.
 *
 * Calls made after main() starts are numbered from 0. FAULT_MODE says which are and what happens:
 *   io     files and directories; call FAULT_AT fails as FAULT_KIND says: an errno by number,
 *          "short" (a transfer of half the bytes, at least one), or "flip" (a read gets another
 *          first byte than the file has, as if it were written to meanwhile; FAULT_NAME=read)
 *   oom    malloc, calloc, realloc, aligned_alloc, posix_memalign, mmap: call FAULT_AT finds no
 *          memory
 *   kill   as io, but SIGKILL instead of call FAULT_AT
 *   power  as kill, and everything below FAULT_ROOT that was not synced is lost first: data of
 *          files becomes zeros; FAULT_LOSE=entries also loses names in subdirectories;
 *          FAULT_LOSE=rename undoes a rename in FAULT_ROOT that no fsync of it followed
 * FAULT_STICKY=1: every later call of the same name fails as well (a disk stays full).
 * FAULT_TRACE=1: the stack of the failing call goes to stderr, for addr2line.
 * FAULT_NAME=NAME: the call is left alone unless it has this name.
 * FAULT_LOG=FILE: instead of failing, write one line a call: number and name (io, kill, power) or
 * number, hash of the stack and the library that asked (oom).
 * FAULT_FDS=FILE: when main() has returned, append one line: descriptors that it left open. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_TRACKED 4096

enum { OFF, IO, OOM, KILL, POWER };
enum { SHORT = -1, FLIP = -2 };

static int mode, kind, log_fd = -1;
static long fail_at = -1, count;
static pid_t main_pid;
static const char *fail_name;
static bool sticky, active, lose_entries, lose_rename, trace;
static char sticky_name[32];
static const char *root_dir;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside; /* calls of the shim itself are not counted */

/* What a power cut would lose. */
typedef struct inode {
    dev_t dev;
    ino_t ino;
} inode;
static struct {
    inode file;
} dirty[MAX_TRACKED];
static struct {
    inode dir;
    char name[NAME_MAX + 1];
} entries[MAX_TRACKED];
static size_t n_dirty, n_entries;
static char renamed_from[PATH_MAX], renamed_to[PATH_MAX];
static bool renamed, exchanged;

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name)
{
    inside++;
    void *p = dlsym(RTLD_NEXT, name);
    inside--;
    return p;
}

/* ---- power loss --------------------------------------------------------------------------------- */

static bool same(inode a, const struct stat *st)
{
    return a.dev == st->st_dev && a.ino == st->st_ino;
}

static void mark_dirty(int fd)
{
    struct stat st;
    if (mode != POWER || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        return;
    for (size_t i = 0; i < n_dirty; i++)
        if (same(dirty[i].file, &st))
            return;
    if (n_dirty < MAX_TRACKED)
        dirty[n_dirty++].file = (inode){st.st_dev, st.st_ino};
}

static void mark_synced(int fd)
{
    struct stat st;
    char path[PATH_MAX];
    if (mode != POWER || fstat(fd, &st) != 0)
        return;
    for (size_t i = 0; i < n_dirty; i++)
        if (same(dirty[i].file, &st))
            dirty[i--] = dirty[--n_dirty];
    for (size_t i = 0; i < n_entries; i++)
        if (same(entries[i].dir, &st))
            entries[i--] = entries[--n_entries];
    if (root_dir != NULL && realpath(root_dir, path) != NULL) {
        struct stat top;
        if (stat(path, &top) == 0 && top.st_dev == st.st_dev && top.st_ino == st.st_ino)
            renamed = false;
    }
}

/* A name that appeared in the directory of `path`, relative to `at`. */
static void mark_entry(int at, const char *path)
{
    char dir[PATH_MAX];
    struct stat st;
    if (mode != POWER || n_entries == MAX_TRACKED)
        return;
    const char *slash = strrchr(path, '/');
    size_t n = slash == NULL ? 0 : (size_t)(slash - path);
    snprintf(dir, sizeof dir, "%.*s", n == 0 ? 1 : (int)n, n == 0 ? "." : path);
    if (fstatat(at, dir, &st, 0) != 0)
        return;
    entries[n_entries].dir = (inode){st.st_dev, st.st_ino};
    snprintf(entries[n_entries++].name, NAME_MAX + 1, "%s", slash == NULL ? path : slash + 1);
}

static void lose_in(const char *dir, int depth)
{
    struct stat at, st;
    DIR *d = opendir(dir);
    const struct dirent *e;
    if (d == NULL || stat(dir, &at) != 0 || depth > 16)
        return;
    while ((e = readdir(d)) != NULL) {
        char path[PATH_MAX];
        bool lost = false;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= (int)sizeof path ||
            lstat(path, &st) != 0)
            continue;
        /* Names in the root itself are taken to be there: the worst case for a commit. */
        for (size_t i = 0; lose_entries && depth > 0 && i < n_entries; i++)
            lost |= same(entries[i].dir, &at) && strcmp(entries[i].name, e->d_name) == 0;
        if (S_ISDIR(st.st_mode)) {
            lose_in(path, depth + 1);
            if (lost)
                rmdir(path);
        } else if (lost) {
            unlink(path);
        } else if (S_ISREG(st.st_mode)) {
            for (size_t i = 0; i < n_dirty; i++)
                if (same(dirty[i].file, &st) && truncate(path, 0) == 0)
                    (void)!truncate(path, st.st_size);
        }
    }
    closedir(d);
}

static void power_cut(void)
{
    if (lose_rename && renamed)
        syscall(SYS_renameat2, AT_FDCWD, renamed_to, AT_FDCWD, renamed_from, exchanged ? 2 : 1);
    if (root_dir != NULL)
        lose_in(root_dir, 0);
}

/* ---- counting ----------------------------------------------------------------------------------- */

static void log_line(long at, const char *name)
{
    char text[96];
    if (mode == OOM) {
        void *stack[12];
        uint64_t hash = 14695981039346656037u;
        int n = backtrace(stack, 12);
        for (int i = 2; i < n; i++)
            hash = (hash ^ (uint64_t)(uintptr_t)stack[i]) * 1099511628211u;
        Dl_info who;
        const char *lib = n > 3 && dladdr(stack[3], &who) != 0 ? strrchr(who.dli_fname, '/') : NULL;
        n = snprintf(text, sizeof text, "%ld %012llx%.18s\n", at, (unsigned long long)hash >> 16,
                     lib != NULL ? lib : "/");
        (void)!syscall(SYS_write, log_fd, text, n);
        return;
    }
    int n = snprintf(text, sizeof text, "%ld %s\n", at, name);
    (void)!syscall(SYS_write, log_fd, text, n);
}

/* True if this call has to fail; errno is then set. */
static bool hit(const char *name, bool memory)
{
    bool now = false;
    if (!active || inside > 0 || memory != (mode == OOM))
        return false;
    if ((mode == KILL || mode == POWER) && getpid() != main_pid)
        return false;
    inside++;
    pthread_mutex_lock(&lock);
    long at = count++;
    if (log_fd >= 0)
        log_line(at, name);
    else if (at == fail_at || (sticky && sticky_name[0] != '\0' && strcmp(sticky_name, name) == 0))
        now = true;
    if (now && trace) {
        void *stack[32];
        backtrace_symbols_fd(stack, backtrace(stack, 32), 2);
    }
    /* Numbers may shift between runs: another call than the one meant is let through. */
    if (now && at == fail_at && fail_name != NULL && mode != OOM && strcmp(fail_name, name) != 0)
        now = false;
    if (now && (mode == KILL || mode == POWER)) {
        if (mode == POWER)
            power_cut();
        kill(getpid(), SIGKILL);
    }
    if (now)
        snprintf(sticky_name, sizeof sticky_name, "%s", name);
    pthread_mutex_unlock(&lock);
    inside--;
    if (now)
        errno = memory ? ENOMEM : kind < 0 ? 0 : kind;
    return now;
}

/* ---- start -------------------------------------------------------------------------------------- */

/* Of the first thousand, which no run of these tests comes near to. */
static int open_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 1000; fd++)
        n += syscall(SYS_fcntl, fd, F_GETFD) != -1;
    return n;
}

static void tell_left(const char *path, int before)
{
    char line[16];
    int n = snprintf(line, sizeof line, "%d\n", open_descriptors() - before);
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (fd < 0 || syscall(SYS_write, fd, line, n) != n)
        _exit(99);
}

static int (*real_main)(int, char **, char **);

static int started(int argc, char **argv, char **env)
{
    static const char *const names[] = {"", "io", "oom", "kill", "power"};
    const char *m = getenv("FAULT_MODE"), *at = getenv("FAULT_AT"), *k = getenv("FAULT_KIND"),
               *log = getenv("FAULT_LOG"), *s = getenv("FAULT_STICKY"),
               *lose = getenv("FAULT_LOSE"), *fds = getenv("FAULT_FDS");
    int before = open_descriptors(), code;
    for (int i = IO; m != NULL && i <= POWER; i++)
        if (strcmp(m, names[i]) == 0)
            mode = i;
    root_dir = getenv("FAULT_ROOT");
    fail_name = getenv("FAULT_NAME");
    main_pid = getpid();
    fail_at = at != NULL ? atol(at) : -1;
    kind = k == NULL                 ? EIO
           : strcmp(k, "short") == 0 ? SHORT
           : strcmp(k, "flip") == 0  ? FLIP
                                     : atoi(k);
    trace = getenv("FAULT_TRACE") != NULL;
    sticky = s != NULL && *s == '1';
    lose_entries = lose != NULL && strcmp(lose, "entries") == 0;
    lose_rename = lose != NULL && strcmp(lose, "rename") == 0;
    if (log != NULL)
        log_fd =
            (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    void *warm[2]; /* loads the unwinder now */
    (void)backtrace(warm, 2);
    active = mode != OFF;
    code = real_main(argc, argv, env);
    active = false;
    if (fds != NULL)
        tell_left(fds, before + (log_fd >= 0));
    return code;
}

EXPORT int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv,
                             void (*init)(void), void (*fini)(void), void (*rtld)(void), void *end)
{
    int (*start)(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void),
                 void (*)(void), void *) =
        (int (*)(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void),
                 void (*)(void), void *))real("__libc_start_main");
    real_main = main;
    return start(started, argc, argv, init, fini, rtld, end);
}

/* ---- files -------------------------------------------------------------------------------------- */

static int do_open(int at, const char *path, int flags, mode_t perm)
{
    bool creates = (flags & O_CREAT) != 0;
    if (hit(creates ? "create" : "open", false))
        return -1;
    bool was = creates && faccessat(at, path, F_OK, 0) == 0;
    int fd = (int)syscall(SYS_openat, at, path, flags, perm);
    if (active && fd >= 0 && creates && !was)
        mark_entry(at, path);
    if (active && fd >= 0 && (flags & O_TRUNC) != 0)
        mark_dirty(fd);
    return fd;
}

static mode_t perm_of(int flags, va_list ap)
{
    return (flags & O_CREAT) != 0 ? (mode_t)va_arg(ap, int) : 0;
}

#define OPENS(NAME)                                                                                \
    EXPORT int NAME(const char *path, int flags, ...)                                              \
    {                                                                                              \
        va_list ap;                                                                                \
        va_start(ap, flags);                                                                       \
        mode_t perm = perm_of(flags, ap);                                                          \
        va_end(ap);                                                                                \
        return do_open(AT_FDCWD, path, flags, perm);                                               \
    }
#define OPENATS(NAME)                                                                              \
    EXPORT int NAME(int at, const char *path, int flags, ...)                                      \
    {                                                                                              \
        va_list ap;                                                                                \
        va_start(ap, flags);                                                                       \
        mode_t perm = perm_of(flags, ap);                                                          \
        va_end(ap);                                                                                \
        return do_open(at, path, flags, perm);                                                     \
    }
OPENS(open)
OPENS(open64)
OPENATS(openat)
OPENATS(openat64)

static size_t half(size_t n)
{
    return n > 1 ? n / 2 : n;
}

static ssize_t transfer(const char *name, long call, int fd, void *p, size_t n, off_t offset)
{
    struct stat st;
    bool writes = call == SYS_write || call == SYS_pwrite64;
    bool file = !active || (syscall(SYS_fstat, fd, &st) == 0 && !S_ISFIFO(st.st_mode));
    if (file && hit(name, false)) { /* a pipe between processes has no disk that fails */
        if (kind == FLIP) {
            ssize_t got = syscall(call, fd, p, n, offset);
            if (got > 0 && !writes)
                *(unsigned char *)p ^= 1;
            return got;
        }
        if (kind != SHORT)
            return -1;
        n = half(n);
    }
    if (active && writes)
        mark_dirty(fd);
    return syscall(call, fd, p, n, offset);
}

EXPORT ssize_t read(int fd, void *p, size_t n)
{
    return transfer("read", SYS_read, fd, p, n, 0);
}
EXPORT ssize_t write(int fd, const void *p, size_t n)
{
    return transfer("write", SYS_write, fd, (void *)(uintptr_t)p, n, 0);
}
EXPORT ssize_t pread(int fd, void *p, size_t n, off_t offset)
{
    return transfer("read", SYS_pread64, fd, p, n, offset);
}
EXPORT ssize_t pread64(int fd, void *p, size_t n, off_t offset)
{
    return transfer("read", SYS_pread64, fd, p, n, offset);
}
EXPORT ssize_t pwrite(int fd, const void *p, size_t n, off_t offset)
{
    return transfer("write", SYS_pwrite64, fd, (void *)(uintptr_t)p, n, offset);
}
EXPORT ssize_t pwrite64(int fd, const void *p, size_t n, off_t offset)
{
    return transfer("write", SYS_pwrite64, fd, (void *)(uintptr_t)p, n, offset);
}

static int sync_as(const char *name, long call, int fd)
{
    if (hit(name, false))
        return -1;
    int r = (int)syscall(call, fd);
    if (active && r == 0)
        mark_synced(fd);
    return r;
}
EXPORT int fsync(int fd)
{
    return sync_as("fsync", SYS_fsync, fd);
}
EXPORT int fdatasync(int fd)
{
    return sync_as("fsync", SYS_fdatasync, fd);
}

EXPORT int posix_fallocate64(int fd, off_t offset, off_t n)
{
    if (hit("fallocate", false))
        return errno;
    if (active)
        mark_dirty(fd);
    return REAL(posix_fallocate64)(fd, offset, n);
}
EXPORT int ftruncate64(int fd, off_t n)
{
    if (hit("ftruncate", false))
        return -1;
    if (active)
        mark_dirty(fd);
    return (int)syscall(SYS_ftruncate, fd, n);
}
/* The descriptor is closed even if close() reports an error, as on Linux. */
EXPORT int close(int fd)
{
    bool fails = hit("close", false);
    int r = (int)syscall(SYS_close, fd);
    if (fails)
        errno = kind;
    return fails ? -1 : r;
}
EXPORT int flock(int fd, int operation)
{
    return hit("flock", false) ? -1 : (int)syscall(SYS_flock, fd, operation);
}

/* ---- directories -------------------------------------------------------------------------------- */

static void note_rename(const char *from, const char *to, bool exchange)
{
    char top[PATH_MAX], parent[PATH_MAX], dir[PATH_MAX];
    const char *slash = strrchr(to, '/');
    size_t n = slash == NULL ? 0 : (size_t)(slash - to);
    if (mode != POWER || root_dir == NULL || realpath(root_dir, top) == NULL)
        return;
    snprintf(dir, sizeof dir, "%.*s", n == 0 ? 1 : (int)n, n == 0 ? "." : to);
    if (realpath(dir, parent) == NULL || strcmp(top, parent) != 0) {
        mark_entry(AT_FDCWD, to);
        return;
    }
    renamed = true;
    exchanged = exchange;
    snprintf(renamed_from, sizeof renamed_from, "%s", from);
    snprintf(renamed_to, sizeof renamed_to, "%s", to);
}

EXPORT int rename(const char *from, const char *to)
{
    if (hit("rename", false))
        return -1;
    int r = (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (active && r == 0)
        note_rename(from, to, false);
    return r;
}
/* The program calls renameat2 through syscall(); nothing else does after main. */
EXPORT long syscall(long number, ...)
{
    long a[6];
    va_list ap;
    va_start(ap, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(ap, long);
    va_end(ap);
    if (active && inside == 0 && number == SYS_renameat2 && a[4] != 0) {
        if (hit("rename", false))
            return -1;
        long r = REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
        if (r == 0)
            note_rename((const char *)a[1], (const char *)a[3], a[4] == 2);
        return r;
    }
    static long (*next)(long, ...);
    if (next == NULL)
        next = (long (*)(long, ...))real("syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
EXPORT int mkdir(const char *path, mode_t perm)
{
    if (hit("mkdir", false))
        return -1;
    int r = (int)syscall(SYS_mkdirat, AT_FDCWD, path, perm);
    if (active && r == 0)
        mark_entry(AT_FDCWD, path);
    return r;
}
EXPORT int unlink(const char *path)
{
    return hit("unlink", false) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
EXPORT int unlinkat(int at, const char *path, int flags)
{
    return hit("unlink", false) ? -1 : (int)syscall(SYS_unlinkat, at, path, flags);
}
EXPORT int rmdir(const char *path)
{
    return hit("unlink", false) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}
EXPORT DIR *opendir(const char *path)
{
    if (hit("opendir", false))
        return NULL;
    inside++;
    DIR *d = REAL(opendir)(path);
    inside--;
    return d;
}
EXPORT struct dirent64 *readdir64(DIR *d)
{
    if (hit("readdir", false))
        return NULL;
    return REAL(readdir64)(d);
}

/* ---- status ------------------------------------------------------------------------------------- */

EXPORT int stat64(const char *path, struct stat64 *st)
{
    return hit("stat", false) ? -1 : REAL(stat64)(path, st);
}
EXPORT int lstat64(const char *path, struct stat64 *st)
{
    return hit("stat", false) ? -1 : REAL(lstat64)(path, st);
}
EXPORT int fstat64(int fd, struct stat64 *st)
{
    return hit("fstat", false) ? -1 : REAL(fstat64)(fd, st);
}
EXPORT int fstatat64(int at, const char *path, struct stat64 *st, int flags)
{
    return hit("stat", false) ? -1 : REAL(fstatat64)(at, path, st, flags);
}
EXPORT int access(const char *path, int how)
{
    return hit("access", false) ? -1 : (int)syscall(SYS_faccessat, AT_FDCWD, path, how, 0);
}

/* ---- memory ------------------------------------------------------------------------------------- */

EXPORT void *malloc(size_t n)
{
    return hit("malloc", true) ? NULL : __libc_malloc(n);
}
EXPORT void *calloc(size_t n, size_t size)
{
    return hit("calloc", true) ? NULL : __libc_calloc(n, size);
}
EXPORT void *realloc(void *p, size_t n)
{
    return hit("realloc", true) ? NULL : __libc_realloc(p, n);
}
EXPORT void *aligned_alloc(size_t align, size_t n)
{
    return hit("aligned_alloc", true) ? NULL : __libc_memalign(align, n);
}
EXPORT int posix_memalign(void **p, size_t align, size_t n)
{
    void *got = hit("posix_memalign", true) ? NULL : __libc_memalign(align, n);
    if (got == NULL)
        return ENOMEM;
    *p = got;
    return 0;
}
EXPORT void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    if (hit("mmap", true))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}
EXPORT void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return mmap64(at, n, prot, flags, fd, offset);
}
