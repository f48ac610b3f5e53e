/* Starting and watching ranks (launch.h). */
#define _GNU_SOURCE /* memfd_create */
#include "launch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "io.h"

#define GRACE                                                                                      \
    300 /* s from a failure until ranks that are still there are killed: one may be saving */

typedef struct watch {
    ckpt_tool *tool;
    ckpt_comm_host *host, *saves;
    const ckpt_launch_saves *where;
    pid_t pids[CKPT_COMM_HOST_MAX]; /* 0: not there any more */
    int size, alive, stops, code;
    bool failed;
    struct timespec when; /* of the failure */
} watch;

static void signal_all(const watch *w, int number)
{
    for (int r = 0; r < w->size; r++)
        if (w->pids[r] > 0)
            (void)kill(w->pids[r], number);
}

static void tell_gone(const watch *w, int rank, const char *why)
{
    ckpt_comm_host_gone(w->host, rank, why);
    ckpt_comm_host_gone(w->saves, rank, why);
}

/* A rank ended. */
static void judge(watch *w, int rank, int how)
{
    char why[120];
    w->pids[rank] = 0;
    w->alive--;
    /* "Differs" is a result: the others go on to theirs, and rank 0 tells it. */
    if (WIFEXITED(how) && WEXITSTATUS(how) <= ckpt_exit_code(CKPT_E_MISMATCH)) {
        tell_gone(w, rank, NULL);
        w->code = w->code == 0 ? WEXITSTATUS(how) : w->code;
        return;
    }
    if (WIFSIGNALED(how))
        snprintf(why, sizeof why, "was killed by signal %d (%s)", WTERMSIG(how),
                 strsignal(WTERMSIG(how)));
    else
        snprintf(why, sizeof why, "ended with exit status %d", WEXITSTATUS(how));
    tell_gone(w, rank, why);
    if (WIFEXITED(how) && w->code == 0)
        w->code = WEXITSTATUS(how);
    if (!w->failed)
        clock_gettime(CLOCK_MONOTONIC, &w->when);
    w->failed = true;
}

static void reap(watch *w)
{
    int how;
    pid_t pid;
    while ((pid = waitpid(-1, &how, WNOHANG)) > 0)
        for (int r = 0; r < w->size; r++)
            if (w->pids[r] == pid)
                judge(w, r, how);
}

/* Rank 0 is not there to do it. */
static void tell_dead(const watch *w, const char *why)
{
    ckpt_arena *arena = &w->tool->arena;
    const bool saves = w->where->dir != NULL;
    const char *last = saves ? w->where->last(arena, w->where->dir) : NULL;
    fprintf(stderr, "ckpt: %s: %s%s%s\n", w->tool->command->name, why,
            last != NULL ? "; the last checkpoint is "
            : saves      ? "; no checkpoint was saved"
                         : "",
            last != NULL ? ckpt_clean(arena, last) : "");
}

/* The parent, until all ranks have ended. */
static void watch_ranks(watch *w, const sigset_t *set)
{
    const struct timespec second = {.tv_sec = 1};
    while (w->alive > 0) {
        int number = sigtimedwait(set, NULL, &second);
        if (number > 0 && number != SIGCHLD)
            signal_all(w, w->stops++ == 0 ? SIGUSR1 : SIGTERM);
        reap(w);
        if (w->failed && ckpt_seconds_since(&w->when) > GRACE)
            signal_all(w, SIGKILL);
    }
    const char *why = ckpt_comm_host_why(w->host);
    if (why != NULL && ckpt_comm_host_speak(w->host))
        tell_dead(w, why);
    if (w->failed && w->code == 0)
        w->code = ckpt_exit_code(CKPT_E_IO);
}

/* What a child does first. */
static void become_rank(ckpt_tool *tool, int size, pid_t parent, const sigset_t *old)
{
    int64_t cores = (int64_t)sysconf(_SC_NPROCESSORS_ONLN);
    /* A process group of its own: a terminal's SIGINT comes once, from the parent. */
    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM); /* without it nobody tells of the dead: save and end */
    if (getppid() != parent)
        (void)raise(SIGTERM);
    (void)sigprocmask(SIG_SETMASK, old, NULL);
    if (tool->g.threads == 0)
        tool->g.threads = cores > size ? cores / size : 1;
}

ckpt_status ckpt_launch_ranks(ckpt_tool *tool, int size, const ckpt_launch_saves *saves,
                              ckpt_launch *out, ckpt_err *err)
{
    sigset_t set, old;
    struct sigaction hangup;
    watch w = {.tool = tool, .where = saves, .size = size};
    ckpt_launch made = {.parent = getpid()};
    ckpt_status status = ckpt_comm_host_new(&w.host, size, err);
    if (status != CKPT_OK)
        return status;
    status = ckpt_comm_host_new(&w.saves, size, err);
    if (status != CKPT_OK) {
        ckpt_comm_host_free(w.host);
        return status;
    }
    made.host = w.host;
    made.saves = w.saves;
    for (int i = 0; i < 2; i++)
        made.snapshots[i] = memfd_create("snapshot", MFD_CLOEXEC);
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGCHLD);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGTERM);
    if (sigaction(SIGHUP, NULL, &hangup) != 0 || hangup.sa_handler != SIG_IGN) /* not under nohup */
        (void)sigaddset(&set, SIGHUP);
    (void)sigaddset(&set, SIGUSR1);
    (void)sigprocmask(SIG_BLOCK, &set, &old);
    fflush(NULL); /* what is in a buffer would be written by every rank */
    for (int r = 0; r < size; r++) {
        w.pids[r] = fork();
        if (w.pids[r] == 0) {
            become_rank(tool, size, made.parent, &old);
            *out = made;
            out->rank = r;
            return CKPT_OK;
        }
        if (w.pids[r] < 0) {
            status = ckpt_fail_errno(err, errno, "starting rank %d of %d", r, size);
            w.pids[r] = 0;
            signal_all(&w, SIGKILL);
            while (waitpid(-1, NULL, 0) > 0)
                continue;
            (void)sigprocmask(SIG_SETMASK, &old, NULL);
            ckpt_comm_host_free(w.host);
            ckpt_comm_host_free(w.saves);
            return status;
        }
        w.alive++;
    }
    watch_ranks(&w, &set);
    fflush(NULL);
    _exit(w.code);
}

bool ckpt_launch_speaks(const ckpt_launch *l, ckpt_status status)
{
    const struct timespec nap = {.tv_nsec = 20000000};
    const double limit = status == CKPT_E_USAGE ? 60 : 5;
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (l->rank != 0 && ckpt_seconds_since(&start) < limit) {
        if (ckpt_comm_host_why(l->host) != NULL || ckpt_interrupted)
            return false; /* rank 0's to say, or the parent's */
        (void)nanosleep(&nap, NULL);
    }
    return ckpt_comm_host_speak(l->host);
}
