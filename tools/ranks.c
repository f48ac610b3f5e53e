/* Joining and leaving a run of several ranks (ranks.h). */
#include "ranks.h"

#include "command.h"
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "io.h"

#define PART "libckpt_mpi.so"

/* Ranks that mpirun started, as Open MPI, MPICH and others' process managers say; 1 if none did. */
static int64_t started_ranks(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                                        "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *v = getenv(names[i]);
        long long n = v != NULL ? strtoll(v, NULL, 10) : 0;
        if (n >= 1)
            return n;
    }
    return 1;
}

bool ckpt_ranks_started(void)
{
    return started_ranks() > 1;
}

bool ckpt_ranks_first(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *v = getenv(names[i]);
        if (v != NULL)
            return strtoll(v, NULL, 10) == 0;
    }
    return true;
}

ckpt_status ckpt_ranks_allowed(const ckpt_command *command, ckpt_err *err)
{
    const struct timespec wait = {.tv_sec = 5};
    char names[120] = "";
    size_t n = 0;
    if (command->divides || !ckpt_ranks_started())
        return CKPT_OK;
    for (size_t i = 0; ckpt_commands[i] != NULL; i++)
        if (ckpt_commands[i]->divides && n < sizeof names)
            n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n > 0 ? ", " : "",
                                  ckpt_commands[i]->name);
    if (!ckpt_ranks_first())
        (void)nanosleep(&wait, NULL);
    return ckpt_fail(err, CKPT_E_USAGE,
                     "started by mpirun on %lld ranks, of which each would do all of the work; "
                     "those that divide it: %s",
                     (long long)started_ranks(), names);
}

/* The sizes that are not given follow from the ranks there are. */
static ckpt_status check_sizes(const ckpt_ranks *r, const ckpt_rank_opts *o, ckpt_err *err)
{
    int64_t tp = o->tp > 0 ? o->tp : 1, cp = o->cp > 0 ? o->cp : 1;
    int64_t dp = o->dp > 0 ? o->dp : r->world.size / (tp * cp);
    int64_t want = tp * cp * (dp > 0 ? dp : 1);
    char launch[40] = ""; /* more than it takes are for mpirun alone */
    if (want <= CKPT_COMM_HOST_MAX)
        (void)snprintf(launch, sizeof launch, " or --launch %lld", (long long)want);
    if (want > r->world.size || (o->dp > 0 && want != r->world.size))
        return ckpt_fail(
            err, CKPT_E_USAGE,
            "tp %lld x cp %lld x dp %lld need %lld ranks, there %s %d; start them with "
            "mpirun -np %lld%s",
            (long long)tp, (long long)cp, (long long)(dp > 0 ? dp : 1), (long long)want,
            r->world.size == 1 ? "is" : "are", r->world.size, (long long)want, launch);
    return CKPT_OK;
}

/* The run's communicator moves the memory of this rank's card too. */
static ckpt_status wrap(ckpt_tool *tool, ckpt_err *err)
{
    ckpt_ranks *r = tool->ranks;
    const ckpt_eng_device *d = tool->device;
    const ckpt_cuda_comm_opts opts = {.device = d->number, .stream = d->card.stream};
    ckpt_comm wrapped;
    ckpt_status status = d->api->comm_open(&r->world, &opts, &wrapped, err);
    if (status != CKPT_OK)
        return status;
    r->world = wrapped;
    if (tool->g.verbose)
        ckpt_tool_note(tool, "%d ranks: memory of their cards moves by %s", wrapped.size,
                       d->api->comm_way(&wrapped));
    return CKPT_OK;
}

ckpt_status ckpt_ranks_join(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_err *err)
{
    ckpt_ranks *r = tool->ranks;
    ckpt_status status = CKPT_OK;
    if (r == NULL)
        return CKPT_OK;
    int tp = o->tp > 0 ? (int)o->tp : 1, cp = o->cp > 0 ? (int)o->cp : 1;
    if (tool->device != NULL && r->world.size > 1)
        status = wrap(tool, err);
    if (status != CKPT_OK)
        return status;
    return ckpt_eng_par_open(
        &r->par, &r->world, tp, cp, o->dp > 0 ? (int)o->dp : r->world.size / (tp * cp),
        o->ep > 0 ? (int)o->ep : 1, (ckpt_eng_cp_mode)(o->cp_mode > 0 ? o->cp_mode : 0), err);
}

/* Rank among those of one host, as the process managers say; else by the order of all. */
static int local_rank(const ckpt_ranks *r)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                        "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"};
    for (size_t i = 0; r->launched.host == NULL && i < sizeof names / sizeof *names; i++) {
        const char *v = getenv(names[i]);
        if (v != NULL)
            return (int)strtol(v, NULL, 10);
    }
    return r->world.rank;
}

static ckpt_status open_world(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_ranks *r,
                              ckpt_err *err)
{
    if (o->launch > 0) {
        ckpt_status status = ckpt_launch_ranks(tool, (int)o->launch, &o->saves, &r->launched, err);
        if (status != CKPT_OK)
            return status;
        status = ckpt_comm_host_join(r->launched.saves, r->launched.rank, &r->saves, err);
        return status == CKPT_OK
                   ? ckpt_comm_host_join(r->launched.host, r->launched.rank, &r->world, err)
                   : status;
    }
    char *path = ckpt_tool_part(&tool->arena, PART);
    return path == NULL ? ckpt_tool_no_memory(err) : ckpt_comm_load(&r->world, path, err);
}

/* Join the world: on ranks other than 0 nothing is printed from here on. */
static ckpt_status load(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_err *err)
{
    ckpt_ranks *r = calloc(1, sizeof *r);
    if (r == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_status status = open_world(tool, o, r, err);
    if (status != CKPT_OK) {
        free(r);
        return status;
    }
    tool->ranks = r;
    r->local = local_rank(r);
    if (r->world.rank != 0) {
        tool->g.quiet = true;
        tool->g.verbose = tool->progress = false;
        if (freopen("/dev/null", "w", stdout) == NULL)
            return ckpt_fail(err, CKPT_E_IO, "rank %d: /dev/null", r->world.rank);
    }
    return CKPT_OK;
}

static ckpt_status refuse_both(int64_t launch, ckpt_err *err)
{
    if (launch < 1 || started_ranks() == 1)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_USAGE, "--launch %lld: mpirun has started ranks already",
                     (long long)launch);
}

ckpt_status ckpt_ranks_open(ckpt_tool *tool, const ckpt_rank_opts *o, ckpt_ranks **out,
                            ckpt_err *err)
{
    *out = NULL;
    ckpt_status status = refuse_both(o->launch, err);
    if (status != CKPT_OK)
        return status;
    if (started_ranks() == 1 && o->launch < 1 && o->tp <= 1 && o->cp <= 1 && o->dp <= 1 &&
        o->ep <= 1)
        return CKPT_OK;
    status = load(tool, o, err);
    if (status != CKPT_OK)
        return status;
    *out = tool->ranks;
    return check_sizes(tool->ranks, o, err);
}

const char *ckpt_ranks_dead(const ckpt_ranks *r)
{
    const ckpt_comm_ops *ops = r != NULL ? r->world.ops : NULL;
    return ops != NULL && ops->why != NULL ? ops->why(r->world.self) : NULL;
}

/* ---- dividing work by bytes -------------------------------------------------------------------- */

static ckpt_status gather_bytes(void *self, const void *mine, const int64_t *counts, void *all,
                                ckpt_err *err)
{
    return ckpt_comm_allgather(self, 1, mine, counts, all, err);
}

static ckpt_share share_over(ckpt_comm *c)
{
    return (ckpt_share){.rank = c->rank, .size = c->size, .allgather = gather_bytes, .self = c};
}

ckpt_status ckpt_ranks_divide(ckpt_tool *tool, int64_t launch, ckpt_err *err)
{
    ckpt_status status = refuse_both(launch, err);
    if (status != CKPT_OK || (!ckpt_ranks_started() && launch < 1))
        return status;
    const ckpt_rank_opts opts = {.launch = launch};
    status = load(tool, &opts, err);
    if (status != CKPT_OK)
        return status;
    ckpt_ranks *r = tool->ranks;
    r->share = share_over(&r->world);
    tool->share = &r->share;
    return CKPT_OK;
}

bool ckpt_ranks_save_together(ckpt_ranks *r)
{
    if (r == NULL || r->saves.size < 2 || r->launched.snapshots[0] < 0 ||
        r->launched.snapshots[1] < 0)
        return false;
    r->share = share_over(&r->world);
    r->save_share = share_over(&r->saves);
    return true;
}

ckpt_status ckpt_ranks_tell(ckpt_tool *tool, const char **text, ckpt_err *err)
{
    if (tool->ranks == NULL)
        return CKPT_OK;
    const ckpt_share all = share_over(&tool->ranks->world);
    return ckpt_share_tell(&all, &tool->arena, text, err);
}

/* ---- the end ----------------------------------------------------------------------------------- */

bool ckpt_ranks_before_error(ckpt_tool *tool, ckpt_status status)
{
    const struct timespec wait = {.tv_sec = status == CKPT_E_USAGE ? 60 : 5};
    ckpt_ranks *r = tool->ranks;
    if (r != NULL && r->launched.host != NULL) {
        if (!ckpt_launch_speaks(&r->launched, status))
            return false;
    } else if (!ckpt_ranks_lead(r) && nanosleep(&wait, NULL) != 0) {
        return false; /* SIGTERM: rank 0 failed too */
    }
    if (!ckpt_ranks_lead(r))
        fprintf(stderr, "ckpt: rank %d of %d failed:\n", r->world.rank, r->world.size);
    return true;
}

void ckpt_ranks_leave(ckpt_tool *tool, bool failed, int code)
{
    ckpt_ranks *r = tool->ranks;
    tool->ranks = NULL;
    tool->share = NULL;
    if (r == NULL)
        return;
    /* Its output says what differs: the parent has nothing to add to that exit code. */
    if (!failed && code != 0 && r->launched.host != NULL && ckpt_ranks_lead(r))
        (void)ckpt_comm_host_speak(r->launched.host);
    if (failed && r->world.size > 1) {
        fflush(NULL);
        ckpt_comm_abort(&r->saves, code);
        ckpt_comm_abort(&r->world, code);
    }
    if (r->par.world != NULL)
        ckpt_eng_par_close(&r->par);
    ckpt_comm_release(&r->saves);
    ckpt_comm_release(&r->world);
    free(r);
}
