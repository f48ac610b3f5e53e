/* Ranks that this program starts itself, as processes of this host: --launch N. */
#ifndef CKPT_TOOL_LAUNCH_H
#define CKPT_TOOL_LAUNCH_H

#include "comm_host.h"
#include "tool.h"

#include <sys/types.h>

typedef struct ckpt_launch {
    ckpt_comm_host *host;
    ckpt_comm_host *saves; /* the same ranks, for the threads that save */
    int snapshots[2];      /* memory that all ranks can map, empty; -1: there is none */
    int rank;
    pid_t parent;
} ckpt_launch;

/* Where the ranks save, if they do, and how the newest complete checkpoint there is found: whoever lives can. */
typedef struct ckpt_launch_saves {
    const char *dir;                                         /* NULL: nothing is saved */
    const char *(*last)(ckpt_arena *arena, const char *dir); /* NULL: there is none */
} ckpt_launch_saves;

/* Fork `size` ranks, which return from here. The caller itself does not: it passes signals on (the first
 * SIGINT, SIGTERM or SIGUSR1 as SIGUSR1, on which all stop after the same step; later ones as SIGTERM),
 * tells the ranks of those that died, says so (and names the last checkpoint) if none of them can, and exits with their exit code.
 * Call it before anything starts threads or touches a GPU. Errors: CKPT_E_USAGE, CKPT_E_NOMEM, CKPT_E_IO. */
ckpt_status ckpt_launch_ranks(ckpt_tool *tool, int size, const ckpt_launch_saves *saves,
                              ckpt_launch *out, ckpt_err *err) CKPT_MUST_USE;
/* May this rank say what went wrong? One of them does, rank 0 if it lives; waits for that one if need be. */
bool ckpt_launch_speaks(const ckpt_launch *l, ckpt_status status);

#endif
