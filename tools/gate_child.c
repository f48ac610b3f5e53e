/* Running one step of `ckpt gate` as a process of its own (gate.h). Output goes to files of the
 * scratch directory rather than pipes, so that a step that writes a lot never waits for a reader. */
#include "gate.h"
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OUTPUT_MAX ((uint64_t)256 << 20) /* of a step that is read back, bytes */
#define LINE_MAX_BYTES 600               /* of a line for people */

extern char **environ;

/* ---- process --------------------------------------------------------------------------------- */

static int prepare(posix_spawn_file_actions_t *files, posix_spawnattr_t *attr, const char *out,
                   const char *errors)
{
    sigset_t dfl;
    int rc = posix_spawn_file_actions_addopen(files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (rc == 0)
        rc = posix_spawn_file_actions_addopen(files, STDOUT_FILENO, out,
                                              O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (rc == 0)
        rc = posix_spawn_file_actions_addopen(files, STDERR_FILENO, errors,
                                              O_WRONLY | O_CREAT | O_TRUNC, 0600);
    sigemptyset(&dfl);
    sigaddset(&dfl, SIGPIPE);
    sigaddset(&dfl, SIGXFSZ);
    if (rc == 0)
        rc = posix_spawnattr_setsigdefault(attr, &dfl);
    if (rc == 0) /* a group of its own: it and what it starts are killed together */
        rc = posix_spawnattr_setpgroup(attr, 0);
    if (rc == 0)
        rc = posix_spawnattr_setflags(attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    return rc;
}

static int start(const char *const *argv, const char *out, const char *errors, pid_t *pid)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    int rc = posix_spawn_file_actions_init(&files);
    if (rc != 0)
        return rc;
    rc = posix_spawnattr_init(&attr);
    if (rc == 0) {
        char **args = (char **)(uintptr_t)argv; /* posix_spawn does not write to them */
        rc = prepare(&files, &attr, out, errors);
        if (rc == 0)
            rc = posix_spawnp(pid, argv[0], &files, &attr, args, environ);
        posix_spawnattr_destroy(&attr);
    }
    posix_spawn_file_actions_destroy(&files);
    return rc;
}

static void kill_group(pid_t pid, int *how)
{
    struct timespec moment = {.tv_nsec = 10000000};
    kill(-pid, SIGTERM); /* a conversion then removes what it wrote */
    for (int i = 0; i < 300; i++) {
        if (waitpid(pid, how, WNOHANG) != 0) {
            kill(-pid, SIGKILL);
            return;
        }
        nanosleep(&moment, NULL);
    }
    kill(-pid, SIGKILL);
    while (waitpid(pid, how, 0) < 0 && errno == EINTR)
        continue;
}

/* Wait; looks at the clock and at interrupts, so it polls. */
static ckpt_status wait_for(pid_t pid, int64_t timeout, gate_child *out, ckpt_err *err)
{
    struct timespec began, pause = {.tv_nsec = 1000000};
    int how = 0;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (;;) {
        pid_t done = waitpid(pid, &how, WNOHANG);
        if (done == pid)
            break;
        if (done < 0 && errno != EINTR)
            return ckpt_fail_errno(err, errno, "waiting for a step");
        if (ckpt_interrupted) {
            kill_group(pid, &how);
            return ckpt_check_interrupted(err);
        }
        if (ckpt_seconds_since(&began) > (double)timeout) {
            out->timed_out = true;
            kill_group(pid, &how);
            break;
        }
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 20000000)
            pause.tv_nsec += pause.tv_nsec / 4;
    }
    out->exit = WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
    return CKPT_OK;
}

/* ---- what it said ---------------------------------------------------------------------------- */

/* The last line of a text that is not blank, cleaned for a terminal; NULL if there is none. */
static const char *last_line(ckpt_arena *arena, const ckpt_buf *b)
{
    const char *s = (const char *)b->data;
    size_t end = b->len, begin;
    while (end > 0 && (s[end - 1] == '\n' || s[end - 1] == '\r' || s[end - 1] == ' '))
        end--;
    for (begin = end; begin > 0 && s[begin - 1] != '\n'; begin--)
        continue;
    if (end == begin)
        return NULL;
    size_t n = end - begin < LINE_MAX_BYTES ? end - begin : LINE_MAX_BYTES;
    const char *line = ckpt_arena_strndup(arena, s + begin, n);
    return line != NULL ? ckpt_clean(arena, line) : NULL;
}

static const char *from_document(ckpt_arena *arena, const ckpt_json *doc)
{
    const char *text = ckpt_json_string(ckpt_json_path(doc, "error.message"));
    const ckpt_json *problems = ckpt_json_get(doc, "problems");
    if (text == NULL && ckpt_json_size(problems) > 0)
        text = ckpt_json_string(ckpt_json_child(problems));
    if (text == NULL)
        return NULL;
    int more = ckpt_json_size(problems) - 1;
    const char *line = more > 0 ? ckpt_arena_printf(arena, "%s (and %d more)", text, more)
                                : ckpt_arena_strdup(arena, text);
    return line != NULL ? ckpt_clean(arena, line) : NULL;
}

static ckpt_status listen(ckpt_arena *arena, const char *out_path, const char *err_path,
                          int64_t timeout, gate_child *out, ckpt_err *err)
{
    ckpt_buf said = {0}, complained = {0};
    ckpt_err ignored = {0};
    ckpt_status status;
    CKPT_CHECK(ckpt_read_file(out_path, OUTPUT_MAX, &said, err));
    CKPT_CHECK(ckpt_read_file(err_path, OUTPUT_MAX, &complained, err));
    if (said.len > 0 && said.data[0] == '{' &&
        ckpt_json_parse((const char *)said.data, said.len, &out->doc, &ignored) != CKPT_OK)
        out->doc = NULL; /* a load command may print what it likes */
    if (out->timed_out)
        out->why = ckpt_arena_printf(arena, "still running after %lld s", (long long)timeout);
    else if (out->doc != NULL)
        out->why = from_document(arena, out->doc);
    if (out->why == NULL)
        out->why = last_line(arena, &complained);
    if (out->why == NULL && out->doc == NULL)
        out->why = last_line(arena, &said);
    if (out->why == NULL)
        out->why = ckpt_arena_printf(arena, "exit %d", out->exit);
    else if (out->exit > 128 && !out->timed_out)
        out->why = ckpt_arena_printf(arena, "killed by signal %d: %s", out->exit - 128, out->why);
    if (out->why == NULL)
        status = ckpt_tool_no_memory(err);
done:
    ckpt_buf_release(&said);
    ckpt_buf_release(&complained);
    return status;
}

ckpt_status ckpt_gate_spawn(gate *g, ckpt_arena *arena, const char *const *argv, int64_t timeout,
                            gate_child *out, ckpt_err *err)
{
    ckpt_status status;
    pid_t pid = 0;
    int number = atomic_fetch_add(&g->serial, 1);
    *out = (gate_child){0};
    char *out_path = ckpt_arena_printf(arena, "%s/step-%d.out", g->work, number);
    char *err_path = ckpt_arena_printf(arena, "%s/step-%d.err", g->work, number);
    if (out_path == NULL || err_path == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_check_interrupted(err));
    int rc = start(argv, out_path, err_path, &pid);
    if (rc != 0)
        status = ckpt_fail_errno(err, rc, "%s", argv[0]);
    else
        status = wait_for(pid, timeout, out, err);
    if (status == CKPT_OK)
        status = listen(arena, out_path, err_path, timeout, out, err);
done:
    unlink(out_path);
    unlink(err_path);
    return status;
}

ckpt_status ckpt_gate_self(gate *g, ckpt_arena *arena, const ckpt_strings *args, int64_t timeout,
                           gate_child *out, ckpt_err *err)
{
    const char **argv = ckpt_arena_array(arena, args->n + 8, sizeof *argv);
    const char *threads = ckpt_arena_printf(arena, "%d", g->threads);
    const char *memory = ckpt_arena_printf(arena, "%llu", (unsigned long long)g->memory);
    size_t n = 0;
    if (argv == NULL || threads == NULL || memory == NULL)
        return ckpt_tool_no_memory(err);
    argv[n++] = "/proc/self/exe"; /* resolved in the child, which is this program until then */
    for (size_t i = 0; i < args->n; i++)
        argv[n++] = args->items[i];
    argv[n++] = "--json";
    argv[n++] = "--threads";
    argv[n++] = threads;
    argv[n++] = "--memory";
    argv[n++] = memory;
    return ckpt_gate_spawn(g, arena, argv, timeout, out, err);
}

void ckpt_gate_child_release(gate_child *child)
{
    ckpt_json_free(child->doc);
    child->doc = NULL;
}
