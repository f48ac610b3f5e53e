/* Programs and own operations that `ckpt bench` times, one at a time, each in a process of its own. */
#include "bench.h"
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

bool bench_has_program(const char *name)
{
    const char *path = getenv("PATH");
    char file[4096];
    if (strcmp(name, "ckpt") == 0)
        return true;
    if (strchr(name, '/') != NULL)
        return access(name, X_OK) == 0;
    while (path != NULL && *path != '\0') {
        size_t n = strcspn(path, ":");
        int len = snprintf(file, sizeof file, "%.*s/%s", (int)n, path, name);
        if (len > 0 && (size_t)len < sizeof file && access(file, X_OK) == 0)
            return true;
        path += n + (path[n] == ':');
    }
    return false;
}

static int start(const char *const *argv, const char *errors, pid_t *pid)
{
    posix_spawn_file_actions_t files;
    char **args = (char **)(uintptr_t)argv; /* posix_spawn does not write to them */
    int rc = posix_spawn_file_actions_init(&files);
    if (rc != 0)
        return rc;
    rc = posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (rc == 0)
        rc = posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    if (rc == 0)
        rc = posix_spawn_file_actions_addopen(&files, STDERR_FILENO, errors,
                                              O_WRONLY | O_CREAT | O_TRUNC, 0600);
    /* resolved in the child, which is this program until then */
    const char *program = strcmp(argv[0], "ckpt") == 0 ? "/proc/self/exe" : argv[0];
    if (rc == 0)
        rc = posix_spawnp(pid, program, &files, NULL, args, environ);
    posix_spawn_file_actions_destroy(&files);
    return rc;
}

static ckpt_status complain(const char *const *argv, const char *errors, int how, ckpt_err *err)
{
    char line[400] = "";
    FILE *f = fopen(errors, "re");
    if (f != NULL) {
        if (fgets(line, sizeof line, f) == NULL)
            line[0] = '\0';
        fclose(f);
    }
    line[strcspn(line, "\n")] = '\0';
    ckpt_status status = ckpt_check_interrupted(err);
    if (status != CKPT_OK)
        return status;
    return ckpt_fail(err, CKPT_E_MISMATCH, "%s%s%s: exit %d%s%s", argv[0],
                     argv[1] != NULL ? " " : "", argv[1] != NULL ? argv[1] : "",
                     WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how),
                     line[0] != '\0' ? ": " : "", line);
}

static double seconds(struct timeval t)
{
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

/* ---- operations -------------------------------------------------------------------------------- */

/* What the process of an operation tells the one that waits for it. */
typedef struct told {
    ckpt_status status;
    bench_run run;
    char text[sizeof((ckpt_err *)NULL)->text];
} told;

const bench_op *bench_op_find(const char *name)
{
    const bench_op *const tables[] = {bench_memory_ops, bench_disk_ops, bench_engine_ops};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const bench_op *op = tables[i]; op->name != NULL; op++)
            if (strcmp(op->name, name) == 0)
                return op;
    return NULL;
}

static void tell(int fd, const char *const *words)
{
    told t = {.status = CKPT_OK};
    ckpt_err err = {0};
    size_t n = 0;
    while (words[n] != NULL)
        n++;
    t.status = bench_op_find(words[0])->run(words, n, &t.run, &err);
    memcpy(t.text, err.text, sizeof t.text);
    ssize_t wrote = write(fd, &t, sizeof t);
    _exit(wrote == (ssize_t)sizeof t ? 0 : 1);
}

/* By fork: what a spawned program is seen to hold begins with this process, which so stays small. */
static ckpt_status start_op(const char *const *words, pid_t *pid, int *from, ckpt_err *err)
{
    int fds[2];
    const bench_op *op = bench_op_find(words[0]);
    size_t n = 0;
    while (words[n] != NULL)
        n++;
    if (op == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "there is no operation '%s'", words[0]);
    if (n != op->words)
        return ckpt_fail(err, CKPT_E_USAGE, "'%s': expected %zu words after it, found %zu",
                         words[0], op->words - 1, n - 1);
    if (pipe(fds) != 0)
        return ckpt_fail_errno(err, errno, "pipe");
    fflush(NULL); /* or both would write what is buffered */
    *pid = fork();
    if (*pid == 0) {
        close(fds[0]);
        tell(fds[1], words);
    }
    close(fds[1]);
    *from = fds[0];
    if (*pid > 0)
        return CKPT_OK;
    close(fds[0]);
    return ckpt_fail_errno(err, errno, "fork");
}

static ckpt_status wait_for(pid_t pid, const char *name, bench_run *out, int *how, ckpt_err *err)
{
    struct rusage usage;
    while (wait4(pid, how, 0, &usage) < 0)
        if (errno != EINTR)
            return ckpt_fail_errno(err, errno, "waiting for %s", name);
    out->cpu = seconds(usage.ru_utime) + seconds(usage.ru_stime);
    out->peak = (uint64_t)usage.ru_maxrss * 1024;
    return CKPT_OK;
}

static ckpt_status run_op(const char *const *words, bench_run *out, ckpt_err *err)
{
    told t = {.status = CKPT_OK};
    pid_t pid = -1;
    int from = -1, how = 0;
    size_t have = 0;
    ckpt_status status = start_op(words, &pid, &from, err);
    if (status != CKPT_OK)
        return status;
    while (have < sizeof t) {
        ssize_t k = read(from, (char *)&t + have, sizeof t - have);
        if (k == 0 || (k < 0 && errno != EINTR))
            break;
        have += k > 0 ? (size_t)k : 0;
    }
    close(from);
    status = wait_for(pid, words[0], out, &how, err);
    if (status == CKPT_OK && (how != 0 || have != sizeof t))
        status = ckpt_check_interrupted(err) != CKPT_OK
                     ? CKPT_E_INTERRUPTED
                     : ckpt_fail(err, CKPT_E_MISMATCH, "%s: ended before its time", words[0]);
    if (status != CKPT_OK)
        return status;
    t.text[sizeof t.text - 1] = t.run.note[sizeof t.run.note - 1] = '\0';
    out->seconds = t.run.seconds;
    memcpy(out->note, t.run.note, sizeof out->note);
    return t.status == CKPT_OK ? CKPT_OK : ckpt_fail(err, t.status, "%s: %s", words[0], t.text);
}

/* ---- runs -------------------------------------------------------------------------------------- */

ckpt_status bench_child(const char *const *argv, const char *errors, bench_run *out, ckpt_err *err)
{
    struct timespec begin;
    pid_t pid;
    int how = 0;
    *out = (bench_run){.seconds = 0};
    if (argv[0][0] == '@')
        return run_op(argv, out, err);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int rc = start(argv, errors, &pid);
    if (rc != 0)
        return ckpt_fail_errno(err, rc, "%s", argv[0]);
    ckpt_status status = wait_for(pid, argv[0], out, &how, err);
    out->seconds = ckpt_seconds_since(&begin);
    if (status != CKPT_OK)
        return status;
    return how == 0 ? CKPT_OK : complain(argv, errors, how, err);
}

static int by_seconds(const void *a, const void *b)
{
    double x = ((const bench_run *)a)->seconds, y = ((const bench_run *)b)->seconds;
    return (x > y) - (x < y);
}

bench_stat bench_median(bench_run *runs, size_t n)
{
    bench_stat s = {0};
    memcpy(s.note, runs[n - 1].note, sizeof s.note);
    qsort(runs, n, sizeof *runs, by_seconds);
    for (size_t i = 0; i < n; i++) {
        s.cpu = runs[i].cpu > s.cpu ? runs[i].cpu : s.cpu;
        s.peak = runs[i].peak > s.peak ? runs[i].peak : s.peak;
    }
    s.min = runs[0].seconds;
    s.max = runs[n - 1].seconds;
    s.median = n % 2 ? runs[n / 2].seconds : (runs[n / 2 - 1].seconds + runs[n / 2].seconds) / 2;
    return s;
}
