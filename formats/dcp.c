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

const ckpt_container ckpt_torch_dist = {
    .name = "torch_dist",
    .what = "PyTorch distributed checkpoint directory, plain or Megatron-Core torch_dist",
    .probe = ckpt_dcp_probe,
    .sharded = true,
    .open = ckpt_dcp_open,
    .layout = ckpt_dcp_layout,
};

/* Whether dir/name is there, or dir/other if that is not NULL. */
static ckpt_status exists_in(ckpt_arena *arena, const char *dir, const char *name,
                             const char *other, bool *there, ckpt_err *err)
{
    const char *const names[] = {name, other};
    *there = false;
    for (size_t i = 0; i < 2 && names[i] && !*there; i++) {
        ckpt_entry what;
        const char *path = ckpt_path_join(arena, dir, names[i]);
        if (!path)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        ckpt_status status = ckpt_look(path, &what, err);
        if (status != CKPT_OK)
            return status;
        *there = what != CKPT_ENTRY_NONE;
    }
    return CKPT_OK;
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

static ckpt_status backend_is_zarr(ckpt_arena *arena, const char *dir, bool *zarr, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    ckpt_json *json = NULL;
    ckpt_entry what;
    *zarr = false;
    const char *path = ckpt_path_join(arena, dir, "metadata.json");
    if (!path)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_look(path, &what, err));
    if (what != CKPT_ENTRY_FILE)
        goto done;
    CKPT_CHECK(ckpt_read_file(path, 1 << 20, &text, err));
    CKPT_CHECK(ckpt_json_parse(text.data ? (const char *)text.data : "", text.len, &json, err));
    const char *backend = ckpt_json_string(ckpt_json_get(json, "sharded_backend"));
    *zarr = backend && strcmp(backend, "zarr") == 0;
done:
    ckpt_json_free(json);
    ckpt_buf_release(&text);
    return status;
}

ckpt_status ckpt_dcp_is_zarr(ckpt_arena *arena, const char *dir, bool *zarr, ckpt_err *err)
{
    ckpt_err text;
    return ckpt_only_faults(backend_is_zarr(arena, dir, zarr, &text), &text, err);
}

ckpt_status ckpt_dcp_probe_zarr(ckpt_arena *arena, const char *path, bool *zarr, ckpt_err *err)
{
    ckpt_dcp_place place;
    ckpt_err text;
    *zarr = false;
    ckpt_status status = ckpt_dcp_locate(arena, path, -1, &place, &text);
    if (status != CKPT_OK)
        return ckpt_only_faults(status, &text, err);
    return ckpt_dcp_is_zarr(arena, place.dir, zarr, err);
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

static ckpt_status probe_root(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    bool legacy = false, zarr = false;
    int found = listed(probe, CKPT_DCP_TRACKER) ? 1 : 0;
    for (size_t i = 0; i < probe->n_names && found < 2; i++) {
        bool there, ranks = false;
        if (ckpt_dcp_iteration_of(probe->names[i]) == -2)
            continue;
        const char *dir = ckpt_path_join(&scratch, probe->path, probe->names[i]);
        if (!dir) {
            status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            goto done;
        }
        CKPT_CHECK(exists_in(&scratch, dir, ".metadata", "metadata.json", &there, err));
        if (there)
            found = 2;
        else
            CKPT_CHECK(exists_in(&scratch, dir, "mp_rank_00", "mp_rank_00_000", &ranks, err));
        legacy |= ranks;
    }
    if (found > 0 && !legacy)
        CKPT_CHECK(ckpt_dcp_probe_zarr(&scratch, probe->path, &zarr, err));
    *score = zarr || (found < 2 && legacy) ? 0 : found;
done:
    ckpt_arena_free(&scratch);
    return status;
}

ckpt_status ckpt_dcp_probe(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    if (!probe->is_dir)
        return CKPT_OK;
    if (listed(probe, ".metadata"))
        *score = 2;
    else if (listed(probe, "metadata.json"))
        *score = listed_prefix(probe, "__0_") ? 2 : listed_prefix(probe, "mp_rank_") ? 0 : 1;
    else if (listed(probe, "__0.metadata"))
        *score = 1;
    else
        return probe_root(probe, score, err);
    return CKPT_OK;
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

/* Which file makes the directory incomplete, or NULL; *json: metadata.json is there. A torch_dcp save has no metadata.json, so
 * its absence counts only beside a common.pt; the common-state object is checked after parsing. */
static ckpt_status missing_file(ckpt_arena *arena, const char *dir, const char **missing,
                                bool *json, ckpt_err *err)
{
    ckpt_status status;
    bool there, zarr, common = false;
    *missing = NULL;
    CKPT_CHECK(exists_in(arena, dir, "metadata.json", NULL, json, err));
    CKPT_CHECK(exists_in(arena, dir, ".metadata", NULL, &there, err));
    if (!there) {
        CKPT_CHECK(ckpt_dcp_is_zarr(arena, dir, &zarr, err));
        *missing = zarr ? NULL : ".metadata";
        goto done;
    }
    if (!*json)
        CKPT_CHECK(exists_in(arena, dir, CKPT_DCP_COMMON_FILE, NULL, &common, err));
    if (common)
        *missing = "metadata.json";
done:
    return status;
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
    ckpt_status status;
    ckpt_entry what;
    bool ranks, json;
    const char *missing;
    CKPT_CHECK(ckpt_look(dir, &what, err));
    if (what != CKPT_ENTRY_DIR)
        return ckpt_fail(err, absent, "%s: neither directory '%s' nor file '%s.h5' is there", who,
                         name, name);
    CKPT_CHECK(exists_in(arena, dir, "mp_rank_00", "mp_rank_00_000", &ranks, err));
    if (ranks)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: '%s' is a Megatron per-rank checkpoint (mp_rank_XX), expected "
                         "torch_dist",
                         who, name);
    CKPT_CHECK(missing_file(arena, dir, &missing, &json, err));
    if (missing && !(strcmp(missing, ".metadata") == 0 && json))
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: '%s' is incomplete: no %s", who, name, missing);
    place->dir = dir;
    place->from_dir = iteration;
    place->in_root = true;
done:
    return status;
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
        const char *missing;
        bool json;
        status = missing_file(arena, dir, &missing, &json, err);
        if (status != CKPT_OK)
            return status;
        if (missing)
            continue;
        int rank = json ? 2 : 1;
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
    ckpt_status status;
    bool there;
    CKPT_CHECK(exists_in(arena, path, ".metadata", "metadata.json", &there, err));
    if (there) {
        place->from_dir = iteration_of_path(arena, path);
        if (iteration >= 0 && place->from_dir != -2 && place->from_dir != iteration)
            return ckpt_fail(err, CKPT_E_USAGE, "is iteration %lld, not the requested %lld",
                             (long long)place->from_dir, (long long)iteration);
        return CKPT_OK;
    }
    CKPT_CHECK(exists_in(arena, path, "__0.metadata", NULL, &there, err));
    if (there)
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
    CKPT_CHECK(exists_in(arena, path, CKPT_DCP_TRACKER, NULL, &there, err));
    if (!there)
        return take_newest(arena, path, place, err);
    CKPT_CHECK(ckpt_dcp_read_tracker(tracker, &place->from_tracker, err));
    char who[80];
    if (place->from_tracker < 0)
        snprintf(who, sizeof who, "'release' named by %s", CKPT_DCP_TRACKER);
    else
        snprintf(who, sizeof who, "iteration %lld named by %s", (long long)place->from_tracker,
                 CKPT_DCP_TRACKER);
    status = take_iteration(arena, path, place->from_tracker, who, CKPT_E_FORMAT, place, err);
done:
    return status;
}
