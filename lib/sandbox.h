/* What a process that only reads gives up before it looks at bytes it does not trust, so that a defect
 * in a parser is worth little: from then on the kernel refuses (EPERM) to open a file for writing, to
 * create, rename, remove or alter one, to make a socket, to start a program and to touch another
 * process. Files that are open, standard output among them, can be written to; files can be read
 * wherever the user may, since links of the user's own directories are followed (Hugging Face's cache
 * is made of them).
 *
 * By a seccomp filter (Linux 3.17; seccomp(2)), not by Landlock, whose rules reach one thread alone
 * while libraries start theirs before main. x86-64 and AArch64. */
#ifndef CKPT_SANDBOX_H
#define CKPT_SANDBOX_H

#include <stdbool.h>

/* Whether this kernel and machine have it. */
bool ckpt_sandbox_available(void);
/* Enter it, all threads and children to come included; there is no way back. False: not available, and
 * nothing has changed but that programs of other users can no longer be started as them. */
bool ckpt_sandbox_enter(void);

#endif
