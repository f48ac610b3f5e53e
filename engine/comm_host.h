/* Ranks that are processes of one host, over memory that all of them map: what `ckpt train --launch N`
 * uses, so that several ranks need no MPI. The process that makes a run maps it and forks the ranks;
 * each joins; the one that waits for them tells of the dead, and every wait of the others ends then.
 *
 * Layout of the mapping: the state of the run, then size * size rings of bytes, that of sender s and
 * receiver r at [s * size + r]. A message is {u64 what, u64 bytes} and its bytes; `what` is the group and
 * the number of its message to that member, so that ranks that call different things are told so instead of reading each
 * other's data. A ring has one writer and one reader, who need no lock; a rank that can do nothing sleeps
 * on a counter of its own (a futex) that others advance. What a rank wrote before it died stays readable.
 *
 * Pages of a ring come into being when it is used. At most CKPT_COMM_HOST_MAX ranks. Linux only. */
#ifndef CKPT_ENGINE_COMM_HOST_H
#define CKPT_ENGINE_COMM_HOST_H

#include "comm.h"

#define CKPT_COMM_HOST_MAX 64

typedef struct ckpt_comm_host ckpt_comm_host;

/* Before the ranks are forked. Errors: CKPT_E_USAGE size below 1 or above the most, CKPT_E_NOMEM. */
ckpt_status ckpt_comm_host_new(ckpt_comm_host **out, int size, ckpt_err *err) CKPT_MUST_USE;
/* In the process (or thread) that is to be `rank`, once. The mapping must outlive *out. */
ckpt_status ckpt_comm_host_join(ckpt_comm_host *h, int rank, ckpt_comm *out,
                                ckpt_err *err) CKPT_MUST_USE;
/* Rank `rank` is gone. why: "was killed by signal 9 (Killed)": every call of the others fails with
 * "rank 1 of 4 " and these words. NULL: it ended well, and only who still waits for it fails. */
void ckpt_comm_host_gone(ckpt_comm_host *h, int rank, const char *why);
/* The words of the first that died, "rank 1 of 4 was ...", or NULL. */
const char *ckpt_comm_host_why(const ckpt_comm_host *h);
/* True for the first who asks: one rank of a run says what went wrong. */
bool ckpt_comm_host_speak(ckpt_comm_host *h);
void ckpt_comm_host_free(ckpt_comm_host *h);

#endif
