/* Programs that `ckpt bench` times, one at a time. */
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

ckpt_status bench_child(const char *const *argv, const char *errors, bench_run *out, ckpt_err *err)
{
    struct timespec begin;
    struct rusage usage;
    pid_t pid;
    int how = 0;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int rc = start(argv, errors, &pid);
    if (rc != 0)
        return ckpt_fail_errno(err, rc, "%s", argv[0]);
    while (wait4(pid, &how, 0, &usage) < 0)
        if (errno != EINTR)
            return ckpt_fail_errno(err, errno, "waiting for %s", argv[0]);
    out->seconds = ckpt_seconds_since(&begin);
    out->cpu = seconds(usage.ru_utime) + seconds(usage.ru_stime);
    out->peak = (uint64_t)usage.ru_maxrss * 1024;
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
