/* The child process that lets libhdf5 look at a file (hdf5_scan.c). If the library crashes on damage,
 * never ends, or fills memory, only the child goes. It sends its description through a pipe. */
#include "hdf5_file.h"

#include "io.h"
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define DESCRIPTION_MAX ((size_t)2 << 30)
#define SCAN_SECONDS 600                /* of processor time */
#define SCAN_MEMORY ((uint64_t)8 << 30) /* beyond what the process has */

static void limit(int what, uint64_t value)
{
    struct rlimit l;
    if (getrlimit(what, &l) != 0 || (l.rlim_cur != RLIM_INFINITY && l.rlim_cur < value))
        return;
    l.rlim_cur = value;
    (void)setrlimit(what, &l);
}

/* Address space in use, bytes; 0 if unknown. */
static uint64_t mapped_bytes(void)
{
    uint64_t pages = 0;
    char line[64] = "";
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, line, sizeof line - 1) : 0;
    if (n > 0)
        pages = strtoull(line, NULL, 10);
    if (fd >= 0)
        close(fd);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* In the child: describe the file into the pipe and end, leaving the parent's state alone: no exit
 * handlers, no buffers flushed, nothing on its streams should the library or malloc complain. */
static void child(const char *path, int fd)
{
    ckpt_buf out = {0};
    uint64_t mapped = mapped_bytes(), done = 0;
    int null = open("/dev/null", O_RDONLY); /* in the sandbox nothing else can be opened */
    if (null >= 0) {
        (void)dup2(null, STDOUT_FILENO);
        (void)dup2(null, STDERR_FILENO);
    }
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_CPU, SCAN_SECONDS);
    if (mapped > 0)
        limit(RLIMIT_AS, mapped + SCAN_MEMORY);
    (void)ckpt_sandbox_enter(); /* where there is none, the limits above are what there is */
    ckpt_hdf5_scan(path, &out);
    while (!out.failed && done < out.len) {
        ssize_t n = write(fd, out.data + done, out.len - done);
        if (n < 0 && errno != EINTR)
            break;
        done += n > 0 ? (uint64_t)n : 0;
    }
    _exit(0);
}

void ckpt_hdf5_unreadable(int why)
{
    _exit(why & 0xff); /* all of Linux' are below 256 */
}

static ckpt_status receive(int fd, ckpt_buf *out, ckpt_err *err)
{
    for (;;) {
        uint8_t block[65536];
        ssize_t n = read(fd, block, sizeof block);
        if (n < 0 && errno != EINTR)
            return ckpt_fail_errno(err, errno, "pipe");
        ckpt_status status = ckpt_check_interrupted(err);
        if (status != CKPT_OK)
            return status;
        if (n == 0)
            return CKPT_OK;
        if (n > 0)
            ckpt_buf_append(out, block, (size_t)n);
        if (out->failed)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory opening HDF5");
        if (out->len > DESCRIPTION_MAX)
            return ckpt_fail(err, CKPT_E_FORMAT, "describes itself in more than %zu bytes",
                             DESCRIPTION_MAX);
    }
}

/* What became of the child, whose description may or may not be whole. */
static ckpt_status reap(pid_t pid, ckpt_err *err)
{
    int how = 0;
    while (waitpid(pid, &how, 0) < 0)
        if (errno != EINTR) /* somebody else's handler took it: the description tells */
            return CKPT_OK;
    if (WIFSIGNALED(how) && WTERMSIG(how) == SIGXCPU)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "libhdf5 was still reading its structure after %d s: damaged",
                         SCAN_SECONDS);
    if (WIFSIGNALED(how))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "libhdf5 crashed (signal %d) reading its structure: damaged",
                         WTERMSIG(how));
    if (!WIFEXITED(how))
        return ckpt_fail(err, CKPT_E_FORMAT, "libhdf5 gave up reading its structure: damaged");
    if (WEXITSTATUS(how) != 0) /* the driver's errno */
        return ckpt_fail_errno(err, WEXITSTATUS(how), "read");
    return CKPT_OK;
}

ckpt_status ckpt_hdf5_describe_file(const char *path, ckpt_buf *out, ckpt_err *err)
{
    int pipe_fd[2];
    if (pipe(pipe_fd) != 0)
        return ckpt_fail_errno(err, errno, "pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(pipe_fd[0]);
        child(path, pipe_fd[1]);
    }
    int why = errno;
    close(pipe_fd[1]);
    ckpt_status status =
        pid < 0 ? ckpt_fail_errno(err, why, "fork") : receive(pipe_fd[0], out, err);
    close(pipe_fd[0]);
    if (pid < 0)
        return status;
    if (status != CKPT_OK)
        (void)kill(pid, SIGKILL);
    ckpt_status ended = reap(pid, status == CKPT_OK ? err : NULL);
    return status != CKPT_OK ? status : ended;
}
