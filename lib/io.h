/* Positional file I/O that is complete or an error, and the commit protocol of product
 * specification section 5: temporary sibling, fsync files, directory fsync, atomic rename. */
#ifndef CKPT_IO_H
#define CKPT_IO_H

#include "arena.h"

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Set by a program's SIGINT/SIGTERM handler. Long loops look at it and return CKPT_E_INTERRUPTED;
 * the ordinary error path then removes what was half written. */
extern atomic_int ckpt_interrupted; /* lock-free, so that a handler may; threads read it */
/* CKPT_E_INTERRUPTED if it is set. */
ckpt_status ckpt_check_interrupted(ckpt_err *err) CKPT_MUST_USE;

/* Open for reading. Errors: CKPT_E_IO naming the path. A directory, FIFO or device is refused. */
ckpt_status ckpt_open_read(const char *path, int *fd, uint64_t *size, ckpt_err *err) CKPT_MUST_USE;
/* Read exactly n bytes at offset. A short file is CKPT_E_IO "unexpected end of file". */
ckpt_status ckpt_pread_full(int fd, void *buf, size_t n, uint64_t offset,
                            ckpt_err *err) CKPT_MUST_USE;
/* The same into n <= CKPT_IOV_MAX pieces of memory, which follow one another in the file. */
#define CKPT_IOV_MAX 1024
ckpt_status ckpt_preadv_full(int fd, const struct iovec *into, int n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_pwrite_full(int fd, const void *buf, size_t n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;
/* Whole small file, NUL-terminated in *out (not counted), refused above `limit` (CKPT_E_FORMAT). */
ckpt_status ckpt_read_file(const char *path, uint64_t limit, ckpt_buf *out,
                           ckpt_err *err) CKPT_MUST_USE;

/* fsync, again after EINTR. 0, or -1 with errno; file systems without it (EINVAL) count as done. */
int ckpt_sync_fd(int fd);

/* False only if there is nothing: a path that cannot be looked at exists, and opening it says why
 * not. */
bool ckpt_exists(const char *path);
/* False also if it cannot be looked at: where an answer changes what is done, ask ckpt_look. */
bool ckpt_is_dir(const char *path);
typedef enum ckpt_entry { CKPT_ENTRY_NONE, CKPT_ENTRY_FILE, CKPT_ENTRY_DIR } ckpt_entry;
/* What is at a path, links followed; FILE is anything but a directory. Only ENOENT and ENOTDIR mean
 * NONE: any other failure to look is CKPT_E_IO, never absence. */
ckpt_status ckpt_look(const char *path, ckpt_entry *what, ckpt_err *err) CKPT_MUST_USE;
/* For attempts that may fail: CKPT_OK if something was merely not understood, and `status` with its
 * text in *err if it could not be read (CKPT_E_IO, CKPT_E_NOMEM, CKPT_E_INTERRUPTED). */
ckpt_status ckpt_only_faults(ckpt_status status, const ckpt_err *text, ckpt_err *err) CKPT_MUST_USE;
/* Names in a directory except "." and "..", sorted bytewise, in the arena. */
ckpt_status ckpt_list_dir(const char *path, ckpt_arena *arena, char ***names, size_t *n,
                          ckpt_err *err) CKPT_MUST_USE;
/* dir + "/" + name; `name` alone if dir is empty. */
char *ckpt_path_join(ckpt_arena *arena, const char *dir, const char *name);
const char *ckpt_basename(const char *path);
/* True if name is safe to join below a directory: relative, no empty, "." or ".." component,
 * no NUL or backslash. Slashes are allowed only if `allow_slash`. */
bool ckpt_name_is_safe(const char *name, bool allow_slash);

/* An output being built beside its final place. */
typedef struct ckpt_commit {
    char *final_path;    /* as named by the user, without trailing slashes */
    char *temp_path;     /* sibling: .NAME.ckpt-tmp.PID */
    const char *scratch; /* borrowed: a file that is removed just before the rename, or NULL */
    bool is_dir, force, active;
} ckpt_commit;

/* Prepare. Errors: final path exists and !force, or is the root, the working directory or above it
 * (CKPT_E_USAGE); parent missing or not writable (CKPT_E_IO). Creates the temporary directory, or
 * nothing yet when !is_dir (the caller creates temp_path as a file). */
ckpt_status ckpt_commit_begin(ckpt_commit *commit, const char *final_path, bool is_dir, bool force,
                              ckpt_err *err) CKPT_MUST_USE;
/* Write one small file below the temporary directory (subdirectories are created), fsynced. When
 * !is_dir, name is NULL and the file is temp_path itself. */
ckpt_status ckpt_commit_write(ckpt_commit *commit, const char *name, const void *p, size_t n,
                              ckpt_err *err) CKPT_MUST_USE;
/* fsync all files and directories, rename into place (an existing target is exchanged, then
 * removed), fsync the parent. If it fails before the rename the target is untouched and abort
 * cleans up; if only the last fsync fails, a replaced target is kept at temp_path. */
ckpt_status ckpt_commit_finish(ckpt_commit *commit, ckpt_err *err) CKPT_MUST_USE;
/* Sibling directories that other runs for the same final path made or are making, in the arena. */
ckpt_status ckpt_commit_leftovers(const ckpt_commit *commit, ckpt_arena *arena, char ***dirs,
                                  size_t *n, ckpt_err *err) CKPT_MUST_USE;
/* Refuse (CKPT_E_UNSUPPORTED) if a live process is making the same output; *dead names the file or
 * directory that one which is gone has left, in the arena, or is NULL. For single files: those of
 * directories have a journal, which is locked (journal.h). */
ckpt_status ckpt_commit_rivals(const ckpt_commit *commit, ckpt_arena *arena, const char **dead,
                               ckpt_err *err) CKPT_MUST_USE;
/* The process that the name of a temporary tells, if it is another one and runs. */
bool ckpt_commit_is_live(const char *temp_path);
/* Leave the temporary output where it is, for a later run to continue. */
void ckpt_commit_keep(ckpt_commit *commit);
/* Remove the temporary output and release; safe at any time, also after finish, and on a zeroed
 * structure. Keeps errno. */
void ckpt_commit_abort(ckpt_commit *commit);
/* The same where an error is on its way: *err gets a frame that names what could not be removed. */
void ckpt_commit_discard(ckpt_commit *commit, ckpt_err *err);

/* mkdir -p below an existing base. */
ckpt_status ckpt_mkdirs(const char *path, ckpt_err *err) CKPT_MUST_USE;
/* rm -r that never follows symbolic links. Best effort. */
void ckpt_remove_tree(const char *path);

#endif
