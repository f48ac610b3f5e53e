/* Continuing a conversion that was killed: the journal inside a temporary output directory.
 *
 *   .ckpt-journal   "ckpt-journal 1 PLAN\n", then a line per finished file:
 *                   "file INDEX SIZE SHA256 REST\n", digests as in ckpt_file_hash
 *
 * PLAN is a digest of everything the output is made from: the plan (files, segments, headers and
 * where every byte comes from) and the source's files (name, size, mtime). A line is written and
 * synced after its file was. Whoever writes holds a lock on the journal, which dies with the process,
 * so a journal that can be locked belongs to nobody. What it lists is believed only if the file still
 * has that digest. */
#ifndef CKPT_JOURNAL_H
#define CKPT_JOURNAL_H

#include "stream.h"

#include <pthread.h>

#define CKPT_JOURNAL_NAME ".ckpt-journal"

typedef struct ckpt_journal_entry {
    bool done;
    uint8_t sha256[CKPT_SHA256_LEN], rest[CKPT_SHA256_LEN];
} ckpt_journal_entry;

typedef struct ckpt_journal {
    bool active;
    int fd;
    const char *path;
    uint8_t plan[CKPT_SHA256_LEN];
    const ckpt_sink *sink;
    ckpt_journal_entry *files; /* by sink file; complete before the conversion starts */
    pthread_mutex_t lock;      /* for appending */
    size_t n_resumed;          /* files taken over from earlier runs */
    uint64_t resumed_bytes;
    const char **notes; /* a line each, on what earlier runs left behind */
    size_t n_notes, cap_notes;
    ckpt_arena arena;
} ckpt_journal;

/* Digest of a plan and of the state of its source's files. */
ckpt_status ckpt_plan_digest(const ckpt_plan *plan, uint8_t out[CKPT_SHA256_LEN],
                             ckpt_err *err) CKPT_MUST_USE;
/* Describe what is to be written: before the output is begun, so that no time passes between that and
 * the journal. */
ckpt_status ckpt_journal_prepare(ckpt_journal *j, const ckpt_plan *plan,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Start the journal of a directory output that was just begun. With `resume`, the verified files of
 * dead runs of the same plan for the same target are moved here first, and what else those left is
 * removed; other leftovers are only noted. The commit will remove the journal at its very end, so j
 * outlives it. opts: threads and memory for verifying. */
ckpt_status ckpt_journal_begin(ckpt_journal *j, ckpt_commit *commit, bool resume,
                               const ckpt_stream_opts *opts, ckpt_err *err) CKPT_MUST_USE;
/* Processes that write one output (share.h) keep one journal: rank 0, which has begun it, tells the others
 * what is done already, and they open it in `dir`. A line is one write at the file's end, and only rank 0
 * holds the lock. */
ckpt_status ckpt_journal_join(ckpt_journal *j, const ckpt_plan *plan, const char *dir,
                              const ckpt_share *share, ckpt_err *err) CKPT_MUST_USE;
/* File `index` is complete and synced. Thread-safe. */
ckpt_status ckpt_journal_done(ckpt_journal *j, size_t index, const ckpt_journal_entry *entry,
                              ckpt_err *err) CKPT_MUST_USE;
/* Files that are entered, by whichever process. */
size_t ckpt_journal_count(const ckpt_journal *j);
/* Close and free; leaves the journal itself alone. Safe on a zeroed structure. */
void ckpt_journal_release(ckpt_journal *j);

#endif
