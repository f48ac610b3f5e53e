/* The checkpoint that `ckpt train --resume` goes on from: found, opened, and its digests compared with
 * its manifest before a step is taken, as one flipped bit would go into every later checkpoint. Several
 * ranks divide the tensors, and what one finds all find.
 *
 * SAVE_ROOT/latest_checkpointed_iteration.txt names the newest iteration. Without it, or with something
 * else in it, the newest that opens is taken, and a warning says so. One that is damaged is an error
 * that names the newest good one before it; --fallback takes that one. */
#include "train_run.h"
#include "verify.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "dcp.h"
#include "io.h"

/* ---- one checkpoint, whole or not at all ------------------------------------------------------- */

static void close_base(ckpt_train_run *run)
{
    ckpt_manifest_release(&run->old);
    ckpt_model_release(&run->base);
    ckpt_source_close(&run->src);
    run->has_old = false;
}

/* `verification` borrows the source and the model: nothing below grows either. */
static ckpt_status compare(ckpt_train_run *run, const ckpt_model *model, ckpt_err *err)
{
    verify_opts none = {.iteration = -1};
    verification v = {.tool = run->tool,
                      .o = &none,
                      .path = run->src.root,
                      .src = run->src,
                      .model = *model,
                      .manifest = run->old,
                      .has_manifest = true,
                      .rank = run->ranks != NULL ? run->ranks->world.rank : 0,
                      .ranks = run->ranks != NULL ? run->ranks->world.size : 1};
    ckpt_status status = ckpt_verify_compute(&v, false, err);
    if (status == CKPT_OK)
        status = ckpt_verify_manifest(&v, err);
    if (status == CKPT_OK && v.failed_memory)
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK && v.problems.n > 0)
        status =
            ckpt_fail(err, CKPT_E_MISMATCH, "%s: damaged: %s", run->src.root, v.problems.items[0]);
    free(v.problems.items);
    free(v.warnings.items);
    free(v.duplicates.items);
    return status;
}

static ckpt_status check_digests(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_model raw = {0};
    ckpt_model_opts opts = {.fp8_raw = true};
    if (!run->has_old || run->old.n_tensors == 0)
        return CKPT_OK;
    if (run->base.n_fp8 == 0 || !ckpt_tool_is_fp8(&run->old))
        return compare(run, &run->base, err);
    ckpt_status status = ckpt_tool_bind(run->tool, &raw, &run->src, &opts, err);
    if (status == CKPT_OK)
        status = compare(run, &raw, err);
    ckpt_model_release(&raw);
    return status;
}

/* What one rank found is what all found: each has looked at a part of the bytes. */
static ckpt_status agree(const ckpt_train_run *run, ckpt_status status, ckpt_err *err)
{
    struct {
        ckpt_status status;
        ckpt_err err;
    } said = {status, *err};
    if (run->ranks == NULL)
        return status;
    ckpt_comm *all = &run->ranks->world;
    ckpt_err why = {0};
    int64_t first =
        status != CKPT_OK ? all->size - all->rank : 0; /* the largest: the lowest rank */
    ckpt_status together =
        ckpt_comm_allreduce(all, CKPT_COMM_I64, CKPT_COMM_MAX_OF, &first, 1, &why);
    if (together == CKPT_OK && first > 0)
        together = ckpt_comm_broadcast(all, &said, sizeof said, all->size - (int)first, &why);
    if (together != CKPT_OK) {
        *err = status != CKPT_OK ? *err : why;
        return status != CKPT_OK ? status : together;
    }
    if (first > 0)
        *err = said.err;
    return said.status;
}

static ckpt_status open_at(ckpt_train_run *run, const char *path, int64_t iteration, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_tool_open(run->tool, &run->src, path, iteration, err));
    CKPT_CHECK(ckpt_tool_check_objects(&run->src, err));
    CKPT_CHECK(ckpt_tool_bind(run->tool, &run->base, &run->src, NULL, err));
    CKPT_CHECK(ckpt_manifest_load(&run->src, &run->old, &run->has_old, err));
    CKPT_CHECK(check_digests(run, err));
done:
    status = agree(run, status, err);
    if (status != CKPT_OK)
        close_base(run);
    return status;
}

/* ---- the others beside it ---------------------------------------------------------------------- */

typedef struct beside {
    int64_t n;
    const char *path;
} beside;

typedef struct place {
    const char *root; /* NULL: PATH is no save root and no iteration of one */
    beside *found;    /* newest first */
    size_t n_found;
    int64_t wanted;   /* the iteration that PATH means; INT64_MAX: unknown */
    const char *lost; /* why the tracker does not say, or NULL */
} place;

static int newest_first(const void *a, const void *b)
{
    const beside *x = a, *y = b;
    return (x->n < y->n) - (x->n > y->n);
}

static ckpt_status list_root(ckpt_train_run *run, place *p, const char *root, ckpt_err *err)
{
    ckpt_arena *arena = &run->tool->arena;
    char **names = NULL;
    size_t n = 0;
    ckpt_status status = ckpt_list_dir(root, arena, &names, &n, err);
    if (status != CKPT_OK)
        return status;
    p->found = ckpt_arena_array(arena, n + 1, sizeof *p->found);
    if (p->found == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        int64_t at = ckpt_train_iteration_of(names[i]);
        if (at < 0)
            continue;
        const char *path = ckpt_path_join(arena, root, names[i]);
        if (path == NULL)
            return ckpt_tool_no_memory(err);
        p->found[p->n_found++] = (beside){at, path};
    }
    if (p->n_found > 0)
        qsort(p->found, p->n_found, sizeof *p->found, newest_first);
    p->root = p->n_found > 0 ? root : NULL;
    return CKPT_OK;
}

/* What the tracker of a root says, into wanted or lost. */
static ckpt_status ask_tracker(ckpt_train_run *run, place *p, ckpt_err *err)
{
    ckpt_arena *arena = &run->tool->arena;
    ckpt_entry what;
    ckpt_err why = {0};
    char *path = ckpt_path_join(arena, p->root, CKPT_DCP_TRACKER);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_status status = ckpt_look(path, &what, err);
    if (status != CKPT_OK)
        return status;
    if (what == CKPT_ENTRY_NONE)
        p->lost = "no " CKPT_DCP_TRACKER;
    else if (ckpt_dcp_read_tracker(path, &p->wanted, &why) != CKPT_OK)
        p->lost = ckpt_arena_strdup(arena, why.text);
    if (what != CKPT_ENTRY_NONE && why.text[0] != '\0' && p->lost == NULL)
        return ckpt_tool_no_memory(err);
    if (p->lost != NULL)
        p->wanted = INT64_MAX;
    return CKPT_OK;
}

static ckpt_status find_place(ckpt_train_run *run, place *p, ckpt_err *err)
{
    const char *path = run->o->resume;
    ckpt_status status = CKPT_OK;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    char *own = ckpt_arena_strndup(&run->tool->arena, path, n);
    if (own == NULL)
        return ckpt_tool_no_memory(err);
    *p = (place){.wanted = INT64_MAX};
    int64_t at = ckpt_train_iteration_of(ckpt_basename(own));
    if (at >= 0) {
        size_t keep = (size_t)(ckpt_basename(own) - own);
        const char *root =
            keep == 0 ? "." : ckpt_arena_strndup(&run->tool->arena, own, keep > 1 ? keep - 1 : 1);
        if (root == NULL)
            return ckpt_tool_no_memory(err);
        p->wanted = at;
        return ckpt_is_dir(root) ? list_root(run, p, root, err) : CKPT_OK;
    }
    if (!ckpt_is_dir(own))
        return CKPT_OK;
    CKPT_CHECK(list_root(run, p, own, err));
    if (p->root != NULL && run->o->iteration >= 0)
        p->wanted = run->o->iteration;
    else if (p->root != NULL)
        status = ask_tracker(run, p, err);
done:
    return status;
}

/* ---- choosing ---------------------------------------------------------------------------------- */

/* Failures that say something about a checkpoint, not about this machine or the request. */
static bool is_damage(ckpt_status status)
{
    return status == CKPT_E_FORMAT || status == CKPT_E_MISMATCH || status == CKPT_E_IO ||
           status == CKPT_E_USAGE;
}

/* The newest before `below` that opens and is as its manifest says; *at its place in the list, n_found:
 * there is none. It stays open. */
static ckpt_status open_before(ckpt_train_run *run, const place *p, int64_t below, size_t *at,
                               ckpt_err *err)
{
    for (size_t i = 0; i < p->n_found; i++) {
        ckpt_err why = {0};
        if (p->found[i].n >= below)
            continue;
        ckpt_status status = open_at(run, p->found[i].path, -1, &why);
        *at = i;
        if (status == CKPT_OK)
            return CKPT_OK;
        if (!is_damage(status)) {
            *err = why;
            return status;
        }
    }
    *at = p->n_found;
    return CKPT_OK;
}

/* No tracker: the newest that opens. A damaged one is damage of what was asked for. */
static ckpt_status open_newest(ckpt_train_run *run, place *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < p->n_found; i++) {
        status = open_at(run, p->found[i].path, -1, err);
        p->wanted = p->found[i].n;
        if (status == CKPT_OK || status == CKPT_E_MISMATCH || !is_damage(status))
            break;
        ckpt_tool_warn(run->tool, "%s: passed over: %s", p->found[i].path, err->text);
    }
    if (status == CKPT_OK || status == CKPT_E_MISMATCH)
        ckpt_tool_warn(run->tool, "%s: %s: taking the newest complete iteration, %" PRId64, p->root,
                       p->lost, p->wanted);
    return status;
}

static ckpt_status go_back(ckpt_train_run *run, const place *p, ckpt_status why, ckpt_err *err)
{
    const ckpt_err first = *err;
    size_t at = 0;
    ckpt_status status = open_before(run, p, p->wanted, &at, err);
    if (status != CKPT_OK)
        return status;
    if (at == p->n_found)
        return ckpt_fail(err, why, "%s; %s has no good checkpoint before it", first.text, p->root);
    if (run->o->fallback) {
        ckpt_tool_warn(run->tool, "%s; falling back to %s", first.text, p->found[at].path);
        *err = (ckpt_err){0};
        return CKPT_OK;
    }
    close_base(run);
    return ckpt_fail(err, why,
                     "%s; the newest good one before it is %s: --fallback takes it (or --resume %s "
                     "--iteration %" PRId64 ")",
                     first.text, p->found[at].path, p->root, p->found[at].n);
}

ckpt_status ckpt_train_open_base(ckpt_train_run *run, ckpt_err *err)
{
    place p;
    ckpt_status status = find_place(run, &p, err);
    if (status != CKPT_OK)
        return status;
    if (p.lost != NULL) {
        ckpt_err whole = {0}; /* PATH may be a checkpoint itself, with iterations below it */
        status = open_at(run, run->o->resume, -1, &whole);
        if (status != CKPT_OK)
            status = open_newest(run, &p, err);
        else
            ckpt_tool_warn(run->tool, "%s: %s: taking %s", p.root, p.lost, run->src.root);
    } else {
        status = open_at(run, run->o->resume, run->o->iteration, err);
    }
    if (status != CKPT_OK && p.root != NULL && is_damage(status))
        status = go_back(run, &p, status, err);
    if (status == CKPT_OK)
        ckpt_tool_warnings(run->tool, &run->src);
    return status;
}
