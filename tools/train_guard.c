/* Whose a save directory is: one directory holds one run.
 *
 * A run has a name, the member "run" of the manifest's "training" (train_state.c): 32 hexadecimal
 * digits of SHA-256 over what determines it,
 *   options as sorted JSON, data digest, first step, configuration as sorted JSON, root of the base's
 *   manifest if it has one, else the base's path,
 * a zero byte after each. A run that goes on in its own directory keeps its name; --keep removes only
 * checkpoints that bear it. */
#include "train_run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dcp.h"
#include "io.h"

/* ---- the name of a run ------------------------------------------------------------------------- */

static void add_part(ckpt_sha256_stream *sha, const void *p, size_t n)
{
    ckpt_sha256_stream_update2(sha, p, n, NULL, NULL, 0);
    ckpt_sha256_stream_update2(sha, "", 1, NULL, NULL, 0);
}

static bool add_json(ckpt_sha256_stream *sha, const ckpt_json *j)
{
    ckpt_buf text = {0};
    bool ok = j == NULL || (ckpt_json_print(j, 0, true, &text) && !text.failed);
    if (ok)
        add_part(sha, text.data != NULL ? (const void *)text.data : "", text.len);
    ckpt_buf_release(&text);
    return ok;
}

static bool is_run_name(const char *s)
{
    return s != NULL && strlen(s) == CKPT_RUN_NAME &&
           strspn(s, "0123456789abcdef") == CKPT_RUN_NAME;
}

ckpt_status ckpt_train_identify(ckpt_train_run *run, ckpt_err *err)
{
    const char *was = ckpt_json_string(ckpt_json_get(run->stored, "run"));
    if (run->goes_on && is_run_name(was)) {
        memcpy(run->name, was, CKPT_RUN_NAME + 1);
        return CKPT_OK;
    }
    ckpt_sha256_stream sha;
    uint8_t digest[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1], step[24];
    ckpt_json *options = ckpt_train_options_json(run->o);
    int n = snprintf(step, sizeof step, "%lld", (long long)run->first_step);
    ckpt_sha256_stream_init(&sha);
    bool ok = options != NULL && add_json(&sha, options);
    ckpt_json_free(options);
    add_part(&sha, run->data_digest, sizeof run->data_digest);
    add_part(&sha, step, (size_t)n);
    ok = ok && add_json(&sha, run->base.config);
    if (run->has_old)
        add_part(&sha, run->old.root, sizeof run->old.root);
    else
        add_part(&sha, run->from, strlen(run->from));
    if (!ok)
        return ckpt_tool_no_memory(err);
    ckpt_sha256_stream_final(&sha, digest);
    ckpt_hex(digest, hex);
    memcpy(run->name, hex, CKPT_RUN_NAME);
    run->name[CKPT_RUN_NAME] = '\0';
    return CKPT_OK;
}

/* ---- the directory ----------------------------------------------------------------------------- */

/* Is the base one of the checkpoints in --save DIR? */
static ckpt_status is_inside(ckpt_train_run *run, bool *inside, ckpt_err *err)
{
    *inside = false;
    if (run->from_config || !ckpt_is_dir(run->o->save))
        return CKPT_OK;
    char *dir = realpath(run->o->save, NULL);
    char *base = realpath(run->src.is_dir ? run->src.root : run->src.path, NULL);
    ckpt_status status = dir == NULL    ? ckpt_fail_errno(err, errno, "%s", run->o->save)
                         : base == NULL ? ckpt_fail_errno(err, errno, "%s", run->src.path)
                                        : CKPT_OK;
    size_t n = dir != NULL ? strlen(dir) : 0;
    if (status == CKPT_OK)
        *inside = strncmp(base, dir, n) == 0 && (base[n] == '/' || strcmp(dir, "/") == 0);
    free(dir);
    free(base);
    return status;
}

/* First checkpoint or tracker in a directory, sorted by name; *found NULL: none. With `below`, also in
 * the directories of formats below it. */
static ckpt_status find_saved(ckpt_arena *arena, const char *dir, bool below, const char **found,
                              ckpt_err *err)
{
    char **names = NULL;
    size_t n = 0;
    ckpt_status status = ckpt_list_dir(dir, arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n && *found == NULL; i++) {
        const char *path = ckpt_path_join(arena, dir, names[i]);
        if (path == NULL)
            return ckpt_tool_no_memory(err);
        if (ckpt_train_iteration_of(names[i]) >= 0 || strcmp(names[i], CKPT_DCP_TRACKER) == 0)
            *found = path;
        for (size_t k = 0; below && *found == NULL && ckpt_containers[k] != NULL; k++) {
            size_t len = strlen(ckpt_containers[k]->name);
            if (strncmp(names[i], ckpt_containers[k]->name, len) == 0 &&
                (names[i][len] == '\0' || names[i][len] == '-') && ckpt_is_dir(path)) {
                status = find_saved(arena, path, false, found, err);
                break;
            }
        }
    }
    return status;
}

ckpt_status ckpt_train_check_save(ckpt_train_run *run, ckpt_err *err)
{
    const ckpt_train_opts *o = run->o;
    const char *found = NULL;
    ckpt_entry what;
    bool inside;
    if (o->save == NULL)
        return CKPT_OK;
    ckpt_status status = is_inside(run, &inside, err);
    if (status == CKPT_OK)
        status = ckpt_look(o->save, &what, err);
    if (status != CKPT_OK)
        return status;
    run->goes_on = inside && !o->reset_optimizer;
    if (run->goes_on || o->force || what != CKPT_ENTRY_DIR || !ckpt_ranks_lead(run->ranks))
        return CKPT_OK;
    status = find_saved(&run->tool->arena, o->save, true, &found, err);
    if (status == CKPT_OK && found != NULL)
        status = ckpt_fail(err, CKPT_E_USAGE,
                           "--save %s holds checkpoints of another run (%s): --resume %.*s goes on "
                           "with that one, --force saves among them",
                           o->save, found, (int)(ckpt_basename(found) - found - 1), found);
    return status;
}

/* What the tracker of one root names, if it is newer than *step. */
static const char *named_by_tracker(ckpt_arena *arena, const char *root, int64_t *step)
{
    int64_t at = -1;
    ckpt_entry what;
    const char *tracker = ckpt_path_join(arena, root, CKPT_DCP_TRACKER);
    if (tracker == NULL || ckpt_dcp_read_tracker(tracker, &at, NULL) != CKPT_OK || at <= *step)
        return NULL;
    for (int file = 0; file < 2; file++) {
        const char *path = ckpt_arena_printf(arena, "%s/iter_%07lld%s", root, (long long)at,
                                             file != 0 ? ".h5" : "");
        if (path != NULL && ckpt_look(path, &what, NULL) == CKPT_OK && what != CKPT_ENTRY_NONE) {
            *step = at;
            return path;
        }
    }
    return NULL;
}

const char *ckpt_train_last_saved(ckpt_arena *arena, const char *dir)
{
    int64_t step = -1;
    const char *last = named_by_tracker(arena, dir, &step);
    for (size_t k = 0; ckpt_containers[k] != NULL; k++) {
        for (int i = 1; i <= CKPT_SAVE_FORMATS; i++) {
            const char *name = ckpt_containers[k]->name;
            const char *root = i == 1 ? ckpt_path_join(arena, dir, name)
                                      : ckpt_arena_printf(arena, "%s/%s-%d", dir, name, i);
            const char *found = root != NULL ? named_by_tracker(arena, root, &step) : NULL;
            last = found != NULL ? found : last;
        }
    }
    return last;
}

/* ---- its metrics ------------------------------------------------------------------------------- */

ckpt_status ckpt_train_metrics_aside(ckpt_train_run *run, const char *path, ckpt_err *err)
{
    ckpt_arena *arena = &run->tool->arena;
    ckpt_entry what;
    if (run->goes_on)
        return CKPT_OK;
    ckpt_status status = ckpt_look(path, &what, err);
    if (status != CKPT_OK || what != CKPT_ENTRY_FILE)
        return status;
    for (int i = 1; i < 10000; i++) {
        char *to = ckpt_arena_printf(arena, "%s/metrics.%d.jsonl", run->o->save, i);
        if (to == NULL)
            return ckpt_tool_no_memory(err);
        status = ckpt_look(to, &what, err);
        if (status != CKPT_OK)
            return status;
        if (what != CKPT_ENTRY_NONE)
            continue;
        if (rename(path, to) != 0)
            return ckpt_fail_errno(err, errno, "%s", path);
        ckpt_tool_note(run->tool, "%s: of another run, now %s", path, to);
        return CKPT_OK;
    }
    return ckpt_fail(err, CKPT_E_USAGE, "%s: of another run, and no free name for it", path);
}
