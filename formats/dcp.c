/* torch_dist container: recognising a checkpoint directory and finding the iteration to read.
 *
 *   SAVE_ROOT/latest_checkpointed_iteration.txt    "100" or "release"
 *   SAVE_ROOT/iter_0000100/ | release/             one checkpoint
 *       .metadata        pickled DCP Metadata
 *       __R_N.distcp     items
 *       metadata.json    Megatron only: {"sharded_backend":"torch_dist",...}, written last
 *       common.pt        Megatron-Core up to 0.18
 * A plain DCP directory is the inner part alone. Source: megatron-dist-ckpt.md section 1. */
#include "dcp.h"

#include "io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const ckpt_container ckpt_torch_dist = {
    .name = "torch_dist",
    .what = "PyTorch distributed checkpoint directory, plain or Megatron-Core torch_dist",
    .probe = ckpt_dcp_probe,
    .sharded = true,
    .open = ckpt_dcp_open,
    .layout = ckpt_dcp_layout,
};

static bool exists_in(ckpt_arena *arena, const char *dir, const char *name)
{
    const char *path = ckpt_path_join(arena, dir, name);
    struct stat st; /* a probe: what cannot be looked at is nothing to go by */
    return path && stat(path, &st) == 0;
}

int64_t ckpt_dcp_iteration_of(const char *name)
{
    if (strcmp(name, "release") == 0)
        return -1;
    if (strncmp(name, "iter_", 5) != 0)
        return -2;
    const char *p = name + 5;
    int64_t n = 0;
    size_t digits = 0;
    for (; p[digits] >= '0' && p[digits] <= '9' && digits < 18; digits++)
        n = n * 10 + (p[digits] - '0');
    return digits > 0 && p[digits] == '\0' ? n : -2;
}

/* Last component of a path, ignoring trailing slashes. */
static int64_t iteration_of_path(ckpt_arena *arena, const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *copy = ckpt_arena_strndup(arena, path, n);
    return copy ? ckpt_dcp_iteration_of(ckpt_basename(copy)) : -2;
}

bool ckpt_dcp_is_zarr(ckpt_arena *arena, const char *dir)
{
    ckpt_buf text = {0};
    ckpt_json *json = NULL;
    ckpt_err err;
    bool zarr = false;
    const char *path = ckpt_path_join(arena, dir, "metadata.json");
    if (path && ckpt_read_file(path, 1 << 20, &text, &err) == CKPT_OK && text.data &&
        ckpt_json_parse((const char *)text.data, text.len, &json, &err) == CKPT_OK) {
        const char *backend = ckpt_json_string(ckpt_json_get(json, "sharded_backend"));
        zarr = backend && strcmp(backend, "zarr") == 0;
    }
    ckpt_json_free(json);
    ckpt_buf_release(&text);
    return zarr;
}

/* ---- probe --------------------------------------------------------------------------------- */

static bool listed(const ckpt_probe *probe, const char *name)
{
    for (size_t i = 0; i < probe->n_names; i++)
        if (strcmp(probe->names[i], name) == 0)
            return true;
    return false;
}

static bool listed_prefix(const ckpt_probe *probe, const char *prefix)
{
    for (size_t i = 0; i < probe->n_names; i++)
        if (strncmp(probe->names[i], prefix, strlen(prefix)) == 0)
            return true;
    return false;
}

static int probe_root(const ckpt_probe *probe)
{
    ckpt_arena scratch = {0};
    bool legacy = false;
    int score = listed(probe, CKPT_DCP_TRACKER) ? 1 : 0;
    for (size_t i = 0; i < probe->n_names && score < 2; i++) {
        if (ckpt_dcp_iteration_of(probe->names[i]) == -2)
            continue;
        const char *dir = ckpt_path_join(&scratch, probe->path, probe->names[i]);
        if (!dir)
            break;
        if (exists_in(&scratch, dir, ".metadata") || exists_in(&scratch, dir, "metadata.json"))
            score = 2;
        else if (exists_in(&scratch, dir, "mp_rank_00") ||
                 exists_in(&scratch, dir, "mp_rank_00_000"))
            legacy = true;
    }
    ckpt_dcp_place place;
    ckpt_err err;
    if (score > 0 && !legacy &&
        ckpt_dcp_locate(&scratch, probe->path, -1, &place, &err) == CKPT_OK &&
        ckpt_dcp_is_zarr(&scratch, place.dir))
        score = 0;
    ckpt_arena_free(&scratch);
    return score < 2 && legacy ? 0 : score;
}

int ckpt_dcp_probe(const ckpt_probe *probe)
{
    if (!probe->is_dir)
        return 0;
    if (listed(probe, ".metadata"))
        return 2;
    if (listed(probe, "metadata.json"))
        return listed_prefix(probe, "__0_") ? 2 : listed_prefix(probe, "mp_rank_") ? 0 : 1;
    if (listed(probe, "__0.metadata"))
        return 1;
    return probe_root(probe);
}

/* ---- locating ------------------------------------------------------------------------------ */

ckpt_status ckpt_dcp_read_tracker(const char *path, int64_t *iteration, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status = ckpt_read_file(path, 4096, &text, err);
    if (status == CKPT_OK) {
        const char *p = text.data ? (const char *)text.data : "";
        size_t n = text.len;
        while (n > 0 && strchr(" \t\r\n", p[n - 1]) && p[n - 1] != '\0')
            n--;
        while (n > 0 && strchr(" \t\r\n", *p) && *p != '\0') {
            p++;
            n--;
        }
        char name[32];
        int64_t found = -2;
        if (n == 7 && memcmp(p, "release", 7) == 0)
            found = -1;
        else if (n > 0 && n <= 18) {
            int len = snprintf(name, sizeof name, "iter_%.*s", (int)n, p);
            found = len > 0 ? ckpt_dcp_iteration_of(name) : -2;
        }
        *iteration = found;
        if (found == -2)
            status = ckpt_fail(err, CKPT_E_FORMAT, "holds '%.*s', expected a number or 'release'",
                               (int)(n > 40 ? 40 : n), p);
    }
    ckpt_buf_release(&text);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", ckpt_basename(path));
    return status;
}

static const char *iteration_dir(ckpt_arena *arena, int64_t iteration)
{
    return iteration < 0 ? "release"
                         : ckpt_arena_printf(arena, "iter_%07lld", (long long)iteration);
}

/* Which file makes the directory incomplete, or NULL. A torch_dcp save has no metadata.json, so
 * its absence counts only beside a common.pt; the common-state object is checked after parsing. */
static const char *missing_file(ckpt_arena *arena, const char *dir)
{
    if (!exists_in(arena, dir, ".metadata"))
        return ckpt_dcp_is_zarr(arena, dir) ? NULL : ".metadata";
    if (exists_in(arena, dir, CKPT_DCP_COMMON_FILE) && !exists_in(arena, dir, "metadata.json"))
        return "metadata.json";
    return NULL;
}

/* Use ROOT/<iteration directory>; `who` says who asked for it. */
static ckpt_status take_iteration(ckpt_arena *arena, const char *root, int64_t iteration,
                                  const char *who, ckpt_status absent, ckpt_dcp_place *place,
                                  ckpt_err *err)
{
    const char *name = iteration_dir(arena, iteration);
    const char *dir = name ? ckpt_path_join(arena, root, name) : NULL;
    if (!dir)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (!ckpt_is_dir(dir))
        return ckpt_fail(err, absent, "%s: directory '%s' does not exist", who, name);
    if (exists_in(arena, dir, "mp_rank_00") || exists_in(arena, dir, "mp_rank_00_000"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: '%s' is a Megatron per-rank checkpoint (mp_rank_XX), expected "
                         "torch_dist",
                         who, name);
    const char *missing = missing_file(arena, dir);
    if (missing && !(strcmp(missing, ".metadata") == 0 && exists_in(arena, dir, "metadata.json")))
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: '%s' is incomplete: no %s", who, name, missing);
    place->dir = dir;
    place->from_dir = iteration;
    place->in_root = true;
    return CKPT_OK;
}

/* No tracker: the newest iter_* that has both metadata files, else the newest with .metadata, else
 * release. */
static ckpt_status take_newest(ckpt_arena *arena, const char *root, ckpt_dcp_place *place,
                               ckpt_err *err)
{
    char **names;
    size_t n;
    ckpt_status status = ckpt_list_dir(root, arena, &names, &n, err);
    if (status != CKPT_OK)
        return status;
    int64_t best = -2;
    int best_rank = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t iteration = ckpt_dcp_iteration_of(names[i]);
        if (iteration == -2)
            continue;
        const char *dir = ckpt_path_join(arena, root, names[i]);
        if (!dir)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        if (missing_file(arena, dir))
            continue;
        int rank = exists_in(arena, dir, "metadata.json") ? 2 : 1;
        if (rank > best_rank || (rank == best_rank && iteration > best)) {
            best = iteration;
            best_rank = rank;
            place->dir = dir;
        }
    }
    if (best_rank == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no .metadata, no %s and no complete iter_* directory",
                         CKPT_DCP_TRACKER);
    place->from_dir = best;
    place->in_root = true;
    return CKPT_OK;
}

ckpt_status ckpt_dcp_locate(ckpt_arena *arena, const char *path, int64_t iteration,
                            ckpt_dcp_place *place, ckpt_err *err)
{
    *place = (ckpt_dcp_place){.dir = path, .from_tracker = -2, .from_dir = -2};
    if (exists_in(arena, path, ".metadata") || exists_in(arena, path, "metadata.json")) {
        place->from_dir = iteration_of_path(arena, path);
        if (iteration >= 0 && place->from_dir != -2 && place->from_dir != iteration)
            return ckpt_fail(err, CKPT_E_USAGE, "is iteration %lld, not the requested %lld",
                             (long long)place->from_dir, (long long)iteration);
        return CKPT_OK;
    }
    if (exists_in(arena, path, "__0.metadata"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "rank-local metadata (__0.metadata), expected one .metadata");
    if (iteration >= 0) {
        char who[64];
        snprintf(who, sizeof who, "requested iteration %lld", (long long)iteration);
        return take_iteration(arena, path, iteration, who, CKPT_E_USAGE, place, err);
    }
    const char *tracker = ckpt_path_join(arena, path, CKPT_DCP_TRACKER);
    if (!tracker)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (!ckpt_exists(tracker))
        return take_newest(arena, path, place, err);
    ckpt_status status = ckpt_dcp_read_tracker(tracker, &place->from_tracker, err);
    if (status != CKPT_OK)
        return status;
    char who[80];
    if (place->from_tracker < 0)
        snprintf(who, sizeof who, "'release' named by %s", CKPT_DCP_TRACKER);
    else
        snprintf(who, sizeof who, "iteration %lld named by %s", (long long)place->from_tracker,
                 CKPT_DCP_TRACKER);
    return take_iteration(arena, path, place->from_tracker, who, CKPT_E_FORMAT, place, err);
}
