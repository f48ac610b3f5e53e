/* The container "mp_rank": Megatron-LM's --ckpt-format torch.
 *
 *   SAVE_ROOT/latest_checkpointed_iteration.txt        "20" or "release"
 *   SAVE_ROOT/iter_0000020/ | release/
 *       mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt      torch.save of one rank's dictionary
 *
 * TT is the tensor-parallel rank, PPP the pipeline stage if there are several, EEE the expert-parallel
 * rank if there are several, so one number after TT may be either: args decide. Every file holds args,
 * checkpoint_version, iteration, schedulers, rng_state and the rank's parameters under model, or
 * model0, model1, ... with virtual stages. Source: megatron-dist-ckpt.md sections 1.1 and 1.2. */
#include "mp_rank.h"

#include "dcp.h"
#include "io.h"
#include "rank_names.h"
#include "shard.h"

#include <stdio.h>
#include <string.h>

#define PREFIX "mp_rank_"

static bool is_rank_dir(const char *name)
{
    return strncmp(name, PREFIX, sizeof PREFIX - 1) == 0 && name[sizeof PREFIX - 1] >= '0' &&
           name[sizeof PREFIX - 1] <= '9';
}

/* ---- probe ------------------------------------------------------------------------------------ */

static ckpt_status holds_ranks(ckpt_arena *arena, const char *dir, const char *name, bool *held,
                               ckpt_err *err)
{
    static const char *const firsts[] = {"mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"};
    const char *path = ckpt_path_join(arena, dir, name);
    *held = false;
    for (size_t i = 0; i < sizeof firsts / sizeof firsts[0] && !*held; i++) {
        ckpt_entry what;
        const char *rank = path != NULL ? ckpt_path_join(arena, path, firsts[i]) : NULL;
        if (rank == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        ckpt_status status = ckpt_look(rank, &what, err);
        if (status != CKPT_OK)
            return status;
        *held = what == CKPT_ENTRY_DIR;
    }
    return CKPT_OK;
}

static ckpt_status probe(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    bool found = false;
    /* metadata.json makes it torch_dist for Megatron itself */
    for (size_t i = 0; i < probe->n_names; i++)
        if (strcmp(probe->names[i], ".metadata") == 0)
            return CKPT_OK;
    for (size_t i = 0; i < probe->n_names && !found; i++) {
        const char *name = probe->names[i];
        if (is_rank_dir(name))
            found = true;
        else if (ckpt_dcp_iteration_of(name) != -2)
            CKPT_CHECK(holds_ranks(&scratch, probe->path, name, &found, err));
    }
    *score = found ? 2 : 0;
done:
    ckpt_arena_free(&scratch);
    return status;
}

/* ---- mesh ------------------------------------------------------------------------------------- */

static const char *dir_name(ckpt_arena *arena, const ckpt_mesh *mesh, const ckpt_mp_dir *d)
{
    char pp[16] = "", ep[16] = "";
    if (mesh->pp > 1)
        snprintf(pp, sizeof pp, "_%03d", d->pp);
    if (mesh->ep > 1)
        snprintf(ep, sizeof ep, "_%03d", d->ep);
    return ckpt_arena_printf(arena, PREFIX "%02d%s%s", d->tp, pp, ep);
}

ckpt_status ckpt_mp_dirs(const ckpt_mesh *mesh, ckpt_arena *arena, ckpt_mp_dir **dirs, size_t *n,
                         ckpt_err *err)
{
    int ranks = ckpt_mesh_stage_ranks(mesh);
    size_t cells = (size_t)mesh->tp * (size_t)mesh->ep, used = 0;
    int *etp = ckpt_arena_array(arena, cells, sizeof *etp); /* 1 + ETP rank of (ep, tp) */
    if (etp == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int r = 0; r < ranks; r++) {
        ckpt_coord c = ckpt_mesh_coord(mesh, r);
        int *cell = &etp[c.ep * mesh->tp + c.tp];
        if (*cell != 0 && *cell != c.etp + 1)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "mp_rank with TP %d, EP %d and ETP %d: ranks with different experts "
                             "would share a directory",
                             mesh->tp, mesh->ep, mesh->etp);
        used += *cell == 0;
        *cell = c.etp + 1;
    }
    ckpt_mp_dir *list = ckpt_arena_array(arena, used * (size_t)mesh->pp, sizeof *list);
    if (list == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *n = 0;
    for (int pp = 0; pp < mesh->pp; pp++)
        for (size_t i = 0; i < cells; i++) {
            if (etp[i] == 0)
                continue;
            ckpt_mp_dir *d = &list[(*n)++];
            *d = (ckpt_mp_dir){.tp = (int)(i % (size_t)mesh->tp),
                               .pp = pp,
                               .ep = (int)(i / (size_t)mesh->tp),
                               .etp = etp[i] - 1};
            d->name = dir_name(arena, mesh, d);
            if (d->name == NULL)
                return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        }
    *dirs = list;
    return CKPT_OK;
}

/* ---- stages ----------------------------------------------------------------------------------- */

/* Layers between the '|' of a hybrid pattern, which ends at '/'. false: no '|' in it. */
static bool pattern_cuts(const char *pattern, int chunks, int64_t *first, bool *fits)
{
    int c = 0;
    int64_t layer = 0;
    if (pattern == NULL || memchr(pattern, '|', strcspn(pattern, "/")) == NULL)
        return false;
    *fits = true;
    for (const char *p = pattern; *p != '\0' && *p != '/'; p++) {
        if (*p != '|') {
            layer++;
            continue;
        }
        if (++c < chunks)
            first[c] = layer;
    }
    first[chunks] = layer;
    *fits = c + 1 == chunks;
    return true;
}

ckpt_status ckpt_mp_stages_of(const ckpt_json *args, const ckpt_mesh *mesh, int64_t layers,
                              ckpt_arena *arena, ckpt_mp_stages *out, ckpt_err *err)
{
    int64_t vpp = 1;
    bool fits;
    if (!ckpt_rank_arg(args, "virtual_pipeline_model_parallel_size", &vpp) || vpp < 1 ||
        mesh->pp == 1 || vpp > layers)
        vpp = 1;
    int chunks = mesh->pp * (int)vpp;
    *out = (ckpt_mp_stages){.pp = mesh->pp, .vpp = (int)vpp};
    out->first = ckpt_arena_array(arena, (size_t)chunks + 1, sizeof *out->first);
    if (out->first == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    const char *pattern = ckpt_json_string(ckpt_json_get(args, "hybrid_layer_pattern"));
    if (pattern == NULL)
        pattern = ckpt_json_string(ckpt_json_get(args, "hybrid_override_pattern"));
    if (chunks > 1 && pattern_cuts(pattern, chunks, out->first, &fits)) {
        if (fits && out->first[chunks] == layers)
            return CKPT_OK;
        return ckpt_fail(err, CKPT_E_USAGE,
                         "hybrid pattern '%.200s' does not cut %lld layers into %d parts", pattern,
                         (long long)layers, chunks);
    }
    if (layers % chunks != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%lld layers are not divisible by PP %d%s",
                         (long long)layers, mesh->pp, vpp > 1 ? " and its virtual stages" : "");
    for (int c = 0; c <= chunks; c++)
        out->first[c] = layers / chunks * c;
    return CKPT_OK;
}

/* Layouts keep MLA's down projections whole, as Transformer Engine's modules do on every rank. The
 * local ones are column-parallel. */
static ckpt_status cut_tensor(const ckpt_json *config, const ckpt_mesh *mesh, const char *name,
                              int rank, const int64_t *dims, int *axis, int64_t *ways,
                              ckpt_err *err)
{
    ckpt_rank_place place;
    const char *part, *impl = ckpt_json_string(ckpt_json_get(config, "transformer_impl"));
    (void)rank;
    (void)dims;
    (void)err;
    *axis = -2;
    *ways = mesh->tp;
    if (impl == NULL || strcmp(impl, "local") != 0 || !ckpt_rank_split(name, &place))
        return CKPT_OK;
    if (place.layer < 0 && strncmp(name, "decoder.layers.", 15) == 0)
        return CKPT_OK; /* stacked: axis 0 counts layers */
    const ckpt_rank_rule *rule = ckpt_rank_by_stored(place.rest, false, &part);
    if (rule != NULL && rule->cut == CKPT_RANK_SIZED && strstr(rule->memory, "_down_proj.") != NULL)
        *axis = 0;
    return CKPT_OK;
}

const ckpt_container ckpt_mp_rank = {
    .name = "mp_rank",
    .what = "Megatron per-rank checkpoint (mp_rank_XX/model_optim_rng.pt)",
    .sharded = true,
    .mesh_in_config = true,
    .probe = probe,
    .open = ckpt_mp_open,
    .cut = cut_tensor,
    .layout = ckpt_mp_layout,
};
