/* What can and what cannot be done in the sandbox. Each test is a process of its own (Check forks). */
#include "sandbox.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFUSED(call)                                                                              \
    do {                                                                                           \
        errno = 0;                                                                                 \
        ck_assert_msg((call) == -1 && errno == EPERM, "%s: errno %d", #call, errno);               \
    } while (0)

static char mine[] = "/tmp/ckpt-sandbox.XXXXXX"; /* a file that is there before */

/* These run outside the sandbox, in the process that forks the tests. */
static void make(void)
{
    int fd = mkstemp(mine);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, "x", 1), 1);
    ck_assert_int_eq(close(fd), 0);
}

static void clean(void)
{
    ck_assert_int_eq(unlink(mine), 0);
}

/* False on a kernel without it, where nothing may change. */
static bool enter(void)
{
    bool there = ckpt_sandbox_available();
    ck_assert(ckpt_sandbox_enter() == there);
    return there;
}

static void nothing_is_written(void)
{
    REFUSED(open(mine, O_WRONLY));
    REFUSED(open(mine, O_RDWR));
    REFUSED(open(mine, O_RDONLY | O_TRUNC));
    REFUSED(open("new", O_WRONLY | O_CREAT, 0600));
    REFUSED(creat("new", 0600));
    REFUSED(rename(mine, "new"));
    REFUSED(renameat(AT_FDCWD, mine, AT_FDCWD, "new"));
    REFUSED(unlink(mine));
    REFUSED(unlinkat(AT_FDCWD, mine, 0));
    REFUSED(mkdir("new", 0700));
    REFUSED(rmdir("new"));
    REFUSED(link(mine, "new"));
    REFUSED(symlink(mine, "new"));
    REFUSED(truncate(mine, 0));
    REFUSED(chmod(mine, 0777));
    REFUSED(utimensat(AT_FDCWD, mine, NULL, 0));
}

START_TEST(sandbox_refuses_writes_sockets_programs)
{
    char *argv[] = {(char *)(uintptr_t) "true", NULL}, byte = '\n';
    if (!enter())
        return;
    nothing_is_written();
    REFUSED(socket(AF_INET, SOCK_STREAM, 0));
    REFUSED(socket(AF_INET, SOCK_DGRAM, 0));
    REFUSED(socket(AF_UNIX, SOCK_STREAM, 0));
    REFUSED(execv("/bin/true", argv));
    REFUSED(ioctl(STDIN_FILENO, TIOCSTI, &byte));
}
END_TEST

START_TEST(sandbox_lets_read_fork_and_write_to_what_is_open)
{
    int ends[2], status = -1;
    char byte = 0;
    bool there = enter();
    int fd = open(mine, O_RDONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(pread(fd, &byte, 1, 0), 1);
    ck_assert_int_eq(byte, 'x');
    ck_assert_int_eq(close(fd), 0);
    ck_assert_int_eq(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) /* and it is inherited */
        _exit((!there || (open(mine, O_WRONLY) == -1 && errno == EPERM)) &&
                      write(ends[1], "y", 1) == 1
                  ? 7
                  : 1);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    ck_assert_int_eq(read(ends[0], &byte, 1), 1);
}
END_TEST

static int go[2];

static void *late(void *result)
{
    char byte;
    errno = 0;
    *(int *)result = read(go[0], &byte, 1) == 1 && open(mine, O_WRONLY) == -1 ? errno : 0;
    return NULL;
}

START_TEST(sandbox_holds_threads_that_were_there_before)
{
    pthread_t thread;
    int met = 0;
    ck_assert_int_eq(pipe(go), 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, late, &met), 0);
    bool there = enter();
    ck_assert_int_eq(write(go[1], "", 1), 1);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(met, there ? EPERM : 0);
}
END_TEST

Suite *suite_sandbox(void)
{
    Suite *s = suite_create("sandbox");
    TCase *t = tcase_create("all");
    tcase_add_unchecked_fixture(t, make, clean);
    tcase_add_test(t, sandbox_refuses_writes_sockets_programs);
    tcase_add_test(t, sandbox_lets_read_fork_and_write_to_what_is_open);
    tcase_add_test(t, sandbox_holds_threads_that_were_there_before);
    suite_add_tcase(s, t);
    return s;
}
