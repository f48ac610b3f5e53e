/* Ranks of a command that runs the engine: started by the program itself (--launch N, launch.h), or by
 * mpirun, and then the communication part is loaded, by mpirun's word or by the sizes asked for. */
#ifndef CKPT_TOOL_RANKS_H
#define CKPT_TOOL_RANKS_H

#include "launch.h"
#include "par.h"
#include "share.h"
#include "tool.h"

/* Sizes; below 1: not given. dp then takes the ranks that are left. */
typedef struct ckpt_rank_opts {
    int64_t tp, cp, dp, ep;
    int64_t launch; /* ranks to start here */
    int cp_mode;    /* ckpt_eng_cp_mode */
    ckpt_launch_saves saves;
} ckpt_rank_opts;

struct ckpt_ranks {
    ckpt_comm world;
    ckpt_eng_par par;
    ckpt_launch launched; /* host NULL: mpirun started them */
    int local;            /* rank among those of this host: which GPU */
    ckpt_share share;     /* of commands that divide their work by bytes, over world */
    ckpt_comm saves;      /* of ranks started here: the threads that save (train_save.h) */
    ckpt_share save_share;
};

/* Start or join the others. *out stays NULL in one process; else it belongs to the tool, which ends it with the
 * program. On ranks other than 0 nothing is printed from here on but errors of their own.
 * Errors: CKPT_E_UNSUPPORTED the communication part is missing, CKPT_E_USAGE sizes that do not fit. */
ckpt_status ckpt_ranks_open(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_ranks **out,
                            ckpt_err *err) CKPT_MUST_USE;
/* Then, with tool->device open or none: the groups of the run, whose communicators move the device's memory
 * too (NCCL; ranks that share a card: through the host). Nothing to do in one process. Errors: of
 * ckpt_eng_par_open and ckpt_cuda_comm_open. */
ckpt_status ckpt_ranks_join(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_err *err) CKPT_MUST_USE;
/* The same for a command that divides files and tensors instead of a model, on the ranks of mpirun or on
 * `launch` ranks that are started here: afterwards ckpt_tool_stream says so to the executor. Nothing happens
 * in one process (launch below 1). */
ckpt_status ckpt_ranks_divide(ckpt_tool *tool, int64_t launch, ckpt_err *err) CKPT_MUST_USE;
/* Whether mpirun or its like started this process. */
bool ckpt_ranks_started(void);
/* Whether this process is the one of mpirun's ranks that speaks, as its environment says; true without it. */
bool ckpt_ranks_first(void);
/* CKPT_E_USAGE if it did and the command does not divide its work: every rank would do all of it. Ranks
 * other than the first wait to be ended before they say so too. */
ckpt_status ckpt_ranks_allowed(const ckpt_command *command, ckpt_err *err) CKPT_MUST_USE;
/* Ranks started here, which can all map launched.snapshots: share and save_share are set then. */
bool ckpt_ranks_save_together(ckpt_ranks *r);
/* Rank 0's text to all, in the tool's arena. Every rank calls it; NULL stays NULL. */
ckpt_status ckpt_ranks_tell(ckpt_tool *tool, const char **text, ckpt_err *err) CKPT_MUST_USE;
static inline bool ckpt_ranks_lead(const ckpt_ranks *r)
{
    return r == NULL || r->world.rank == 0;
}
/* Words for a rank that died, or NULL: nothing that all ranks take part in can be done any more. */
const char *ckpt_ranks_dead(const ckpt_ranks *r);

/* Before an error is printed: one that all ranks have, as those of usage, is rank 0's to say, which then
 * ends the others. False: this rank is being ended, and says nothing. */
bool ckpt_ranks_before_error(ckpt_tool *tool, ckpt_status status);
/* The last thing: ends the other ranks too if this one failed. */
void ckpt_ranks_leave(ckpt_tool *tool, bool failed, int code);

#endif
