/* See sandbox.h. The filter, in the order of its instructions:
 *
 *   another architecture's calls (i386, x32)       EPERM
 *   open, openat with a flag that writes           EPERM
 *   ioctl that types into the terminal             EPERM
 *   each number of denied[]                        EPERM
 *   openat2, whose flags lie in memory             ENOSYS, so that callers fall back to openat
 *   anything else                                  allowed
 *
 * A list of what is denied, not of what is allowed: threads, sanitizers and every libc's ways of doing
 * the same differ. kill stays, it ends the child that reads HDF5. */
#include "sandbox.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __x86_64__
#define NATIVE AUDIT_ARCH_X86_64
#define X32_FIRST 0x40000000u
#else
#define NATIVE AUDIT_ARCH_AARCH64
#endif
/* LeakSanitizer stops its own threads by ptrace. */
#if defined(__SANITIZE_ADDRESS__)
#define TRACES 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TRACES 1
#endif
#endif

#define WRITES ((unsigned)(O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

/* clang-format off */
static const unsigned denied[] = {
#ifdef SYS_open /* the calls before those that end in -at */
    SYS_creat, SYS_rename, SYS_unlink, SYS_mkdir, SYS_rmdir, SYS_link, SYS_symlink, SYS_mknod,
    SYS_chmod, SYS_chown, SYS_lchown, SYS_utime, SYS_utimes, SYS_futimesat,
#endif
    SYS_renameat, SYS_renameat2, SYS_unlinkat, SYS_mkdirat, SYS_linkat, SYS_symlinkat, SYS_mknodat,
    SYS_truncate, SYS_fchmod, SYS_fchmodat, SYS_fchown, SYS_fchownat, SYS_utimensat,
    SYS_setxattr, SYS_lsetxattr, SYS_fsetxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr,
    SYS_socket, SYS_socketpair, SYS_execve, SYS_execveat, SYS_io_uring_setup, SYS_open_by_handle_at,
    SYS_process_vm_readv, SYS_process_vm_writev, SYS_rt_sigqueueinfo, SYS_rt_tgsigqueueinfo,
    SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_keyctl, SYS_add_key, SYS_request_key,
    SYS_mount, SYS_umount2, SYS_chroot, SYS_pivot_root, SYS_unshare, SYS_setns,
#ifndef TRACES
    SYS_ptrace,
#endif
};
/* clang-format on */

enum { N_DENIED = sizeof denied / sizeof denied[0] };

bool ckpt_sandbox_available(void)
{
    unsigned action = SECCOMP_RET_ERRNO;
    return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

bool ckpt_sandbox_enter(void)
{
    struct sock_filter code[2 * N_DENIED + 32];
    unsigned short n = 0;
#define PUT(op, k, yes, no)                                                                        \
    (code[n++] = (struct sock_filter){(unsigned short)(op), (yes), (no), (unsigned)(k)})
#define LOAD(what) PUT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, what), 0, 0)
#define RETURN(k) PUT(BPF_RET | BPF_K, k, 0, 0)
#define DENY(e) RETURN(SECCOMP_RET_ERRNO | (e))
/* the next instruction if the value is (has bits of) k, else the one after it */
#define IF(test, k) PUT(BPF_JMP | (test) | BPF_K, k, 0, 1)
/* of call `nr`, its argument decides: its low half, both machines being little-endian */
#define ARGUMENT(nr, which, test, k)                                                               \
    (PUT(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 4), LOAD(args[which]), IF(test, k), DENY(EPERM),        \
     RETURN(SECCOMP_RET_ALLOW))
    LOAD(arch);
    PUT(BPF_JMP | BPF_JEQ | BPF_K, NATIVE, 1, 0);
    DENY(EPERM);
    LOAD(nr);
#ifdef X32_FIRST
    IF(BPF_JGE, X32_FIRST);
    DENY(EPERM);
#endif
#ifdef SYS_open
    ARGUMENT(SYS_open, 1, BPF_JSET, WRITES);
#endif
    ARGUMENT(SYS_openat, 2, BPF_JSET, WRITES);
    ARGUMENT(SYS_ioctl, 1, BPF_JEQ, TIOCSTI);
    for (size_t i = 0; i < N_DENIED; i++) {
        IF(BPF_JEQ, denied[i]);
        DENY(EPERM);
    }
#ifdef SYS_openat2
    IF(BPF_JEQ, SYS_openat2);
    DENY(ENOSYS);
#endif
    RETURN(SECCOMP_RET_ALLOW);
    struct sock_fprog program = {n, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                   SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program) == 0;
}
#else
bool ckpt_sandbox_available(void)
{
    return false;
}

bool ckpt_sandbox_enter(void)
{
    return false;
}
#endif
