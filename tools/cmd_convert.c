/* ckpt convert: another container, layout, mesh or dtype of the same checkpoint. Order of events:
 * options, paths, headers, plan (or refusal), temporary output, check, manifest, rename. */
#include "conversion.h"
#include "quant_policy.h"
#include "ranks.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TO_DEFAULT, TO_SAFETENSORS, TO_TORCH_DIST, TO_TORCH, TO_HDF5, TO_MP_RANK, TO_RANKS };
static const char *const to_names[] = {NULL,   "safetensors", "torch_dist",      "torch",
                                       "hdf5", "mp_rank",     "rank_safetensors"};
enum { LAYOUT_KEEP, LAYOUT_HF, LAYOUT_MEGATRON, LAYOUT_FLA };
static const char *const group_names[] = {NULL, "hf", "megatron", "fla"};
enum { DTYPE_KEEP, DTYPE_QUANTISED = 4 }; /* choices from there on: ckpt_wquant_kind 1, … */
enum { OPTIMIZER_KEEP, OPTIMIZER_DROP };
#define UNDECODED " tensor is not decoded" /* how containers warn of one */

#define AT(field) offsetof(convert_opts, field)
static const ckpt_opt rows[] = {
    {"to",                    CKPT_OPT_CHOICE, AT(to),                    "keep|safetensors|torch_dist|torch|hdf5|mp_rank|ranks",
     "container (default: by DST's ending, else the source's)",                                                                                                                 0, 0    },
    {"layout",                CKPT_OPT_CHOICE, AT(layout),                "keep|hf|megatron|fla",
     "names and fusing of tensors (default keep)",                                                                                                                              0, 0    },
    {"tp",                    CKPT_OPT_INT,    AT(tp),                    "N",                                                    "tensor-parallel size of a sharded output",   1, 65536},
    {"pp",                    CKPT_OPT_INT,    AT(pp),                    "N",                                                    "pipeline-parallel size",                     1, 65536},
    {"ep",                    CKPT_OPT_INT,    AT(ep),                    "N",                                                    "expert-parallel size",                       1, 65536},
    {"etp",                   CKPT_OPT_INT,    AT(etp),                   "N",                                                    "expert tensor-parallel size (default: tp)",  1, 65536},
    {"cp",                    CKPT_OPT_INT,    AT(cp),                    "N",                                                    "context-parallel size",                      1, 65536},
    {"kda-f-lora-rank",       CKPT_OPT_RANK,   AT(f_rank),                "R|none",
     "rank of KDA's decay projection, by SVD; none folds it (both: --approximate)",                                                                                             0, 0    },
    {"kda-gate-lora-rank",    CKPT_OPT_RANK,   AT(g_rank),                "R|none",
     "rank of KDA's output gate, by SVD; none folds it (both: --approximate)",                                                                                                  0, 0    },
    {"norms",                 CKPT_OPT_CHOICE, AT(norms),                 "keep|fused|separate",
     "Megatron: norms fused into the following linear layer or separate",                                                                                                       0, 0    },
    {"dtype",                 CKPT_OPT_CHOICE, AT(dtype),                 "keep|bf16|f16|f32|fp8-block128|nvfp4|mxfp8",
     "cast floating tensors, except those that training keeps in f32; or quantise projections",                                                                                 0,
     0                                                                                                                                                                                  },
    {"dtype-force",           CKPT_OPT_FLAG,   AT(dtype_force),           NULL,                                                   "cast those as well",                         0, 0    },
    {"max-shard-size",        CKPT_OPT_SIZE,   AT(max_shard),             "SIZE",                                                 "largest weight file (default 5GB)",          0,
     0                                                                                                                                                                                  },
    {"compress",              CKPT_OPT_STRING, AT(compress),              "none|shuffle-deflate[:1-9]",
     "of an hdf5 output (default none; level 4 if not given)",                                                                                                                  0, 0    },
    {"optimizer",             CKPT_OPT_CHOICE, AT(optimizer),             "keep|drop",
     "optimizer state: taken along with its parameters (default), or left out",                                                                                                 0, 0    },
    {"include",               CKPT_OPT_LIST,   AT(include),               "GLOB",
     "only tensors whose stored or canonical name matches; repeatable",                                                                                                         0, 0    },
    {"exclude",               CKPT_OPT_LIST,   AT(exclude),               "GLOB",                                                 "leave matching tensors out; repeatable",     0, 0    },
    {"rename",                CKPT_OPT_LIST,   AT(rename),                "FROM=TO",
     "rename an output tensor; one '*' on each side; repeatable",                                                                                                               0, 0    },
    {"map",                   CKPT_OPT_STRING, AT(map),                   "FILE",                                                 "layout table in JSON",                       0, 0    },
    {"iteration",             CKPT_OPT_INT,    AT(iteration),             "N",                                                    "iteration of a save root (default: newest)", 0,
     INT64_MAX                                                                                                                                                                          },
    {"approximate",           CKPT_OPT_FLAG,   AT(approximate),           NULL,                                                   "permit lossy steps; each is reported",       0,
     0                                                                                                                                                                                  },
    {"allow-unknown",         CKPT_OPT_FLAG,   AT(allow_unknown),         NULL,
     "carry tensors the model does not have, unchanged",                                                                                                                        0, 0    },
    {"allow-unknown-objects", CKPT_OPT_FLAG,   AT(allow_unknown_objects), NULL,
     "carry pickled objects of unknown classes, unread",                                                                                                                        0, 0    },
    {"dry-run",               CKPT_OPT_FLAG,   AT(dry_run),               NULL,                                                   "print the plan, write nothing",              0, 0    },
    {"force",                 CKPT_OPT_FLAG,   AT(force),                 NULL,
     "replace an existing DST after success; convert a source that contradicts its manifest, or "
     "whose manifest is damaged",                                                                                                                                               0, 0    },
    {"resume",                CKPT_OPT_FLAG,   AT(resume),                NULL,
     "continue what a killed run left; if this one fails, leave that too",                                                                                                      0, 0    },
    {"verify",                CKPT_OPT_FLAG,   AT(verify),                NULL,
     "read the output back, and the source once more, and compare digests",                                                                                                     0, 0    },
    {NULL,                    CKPT_OPT_FLAG,   0,                         NULL,                                                   NULL,                                         0, 0    },
};
#undef AT

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

/* ---- source ---------------------------------------------------------------------------------- */

static ckpt_status check_options(const conversion *c, ckpt_err *err)
{
    const convert_opts *o = c->o;
    for (size_t i = 0; i < o->rename.n; i++) {
        ckpt_status status = ckpt_convert_check_rename(o->rename.items[i], err);
        if (status != CKPT_OK)
            return status;
    }
    const char *named = ckpt_convert_named(c->dst_path);
    if (named != NULL && o->to != TO_DEFAULT && strcmp(named, to_names[o->to]) != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: --to %s, and the name is that of a %s file",
                         c->dst_path, to_names[o->to], named);
    ckpt_entry there;
    ckpt_status status = ckpt_look(c->dst_path, &there, err);
    if (status != CKPT_OK)
        return status;
    if (o->to == TO_HDF5 && there == CKPT_ENTRY_DIR)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%s: --to hdf5 writes one file, and this is a directory", c->dst_path);
    return ckpt_convert_target(c->dst_path, o->force, err);
}

/* F8 blocks and their scales stay what they are where neither layout nor type changes. */
static bool keeps_fp8(const conversion *c)
{
    const char *group = group_names[c->o->layout];
    bool own_table = c->o->map != NULL && !c->map.source;
    return c->model.n_fp8 > 0 && c->o->dtype == 0 && !own_table &&
           (c->o->layout == LAYOUT_KEEP ||
            (group != NULL && strcmp(group, c->model.layout->group) == 0));
}

static ckpt_status open_source(conversion *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_model_opts bind = {.allow_unknown = c->o->allow_unknown};
    if (c->o->map != NULL)
        CKPT_TRY(ckpt_usermap_load(&c->map, c->o->map, err), "--map");
    if (c->o->map != NULL && !c->map.source && c->o->layout != LAYOUT_KEEP) {
        status = ckpt_fail(err, CKPT_E_USAGE, "--map describes the target, so --layout %s cannot",
                           group_names[c->o->layout]);
        goto done;
    }
    if (c->map.source)
        bind.layout = &c->map.layout;
    CKPT_CHECK(ckpt_tool_open(c->tool, &c->src, c->src_path, c->o->iteration, err));
    CKPT_CHECK(ckpt_report_source(c->tool, &c->report, &c->src, err));
    CKPT_CHECK(ckpt_convert_apart_files(&c->src, c->dst_path, err));
    if (!c->o->allow_unknown_objects)
        CKPT_CHECK(ckpt_tool_check_objects(&c->src, err));
    if (c->o->optimizer == OPTIMIZER_DROP)
        CKPT_CHECK(ckpt_convert_drop_optimizer(c->tool, &c->src, &c->removed, err));
    else if (c->src.no_optimizer != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: %s; --optimizer drop leaves it out",
                         c->src_path, c->src.no_optimizer);
    CKPT_CHECK(ckpt_tool_bind(c->tool, &c->model, &c->src, &bind, err));
    if (keeps_fp8(c)) {
        ckpt_model_release(&c->model);
        bind.fp8_raw = true;
        CKPT_CHECK(ckpt_tool_bind(c->tool, &c->model, &c->src, &bind, err));
    }
    /* It may hold objects that are nowhere else. */
    ckpt_err why = {0};
    ckpt_status read = ckpt_manifest_load(&c->src, &c->old, &c->has_old, &why);
    if (read != CKPT_OK && !c->o->force)
        return ckpt_fail(err, read,
                         "%s; what it keeps beside the tensors (objects, digests) would be lost: "
                         "--force converts without it",
                         why.text);
    if (read != CKPT_OK) {
        CKPT_CHECK(ckpt_report_warn(c->tool, &c->report, err, "%s: ignored", why.text));
        c->has_old = false;
    }
    if (c->has_old && !c->o->force)
        CKPT_CHECK(ckpt_convert_check_config(&c->model, &c->old, err));
    const char *odd = c->has_old ? ckpt_tool_odd_layout(&c->tool->arena, &c->model, &c->old) : NULL;
    if (odd != NULL)
        CKPT_CHECK(ckpt_report_warn(c->tool, &c->report, err,
                                    "%s: the manifest contradicts the tensors: %s", c->src_path,
                                    odd));
done:
    return status;
}

/* ---- target ---------------------------------------------------------------------------------- */

static ckpt_status choose_container(conversion *c, ckpt_err *err)
{
    const char *named = ckpt_convert_named(c->dst_path);
    c->container = c->src.container;
    if (c->o->to != TO_DEFAULT)
        c->container = ckpt_container_find(to_names[c->o->to]);
    else if (named != NULL)
        c->container = ckpt_container_find(named);
    if (c->container == NULL || c->container->layout == NULL)
        return ckpt_fail(
            err, CKPT_E_UNSUPPORTED,
            "%s: container %s is not written by this version; choose --to safetensors, "
            "torch_dist, mp_rank, ranks, torch or hdf5",
            c->dst_path, c->container != NULL ? c->container->name : to_names[c->o->to]);
    c->plan_opts.container = c->container;
    c->plan_opts.sharded = c->container->sharded;
    bool is_named = named != NULL && strcmp(c->container->name, named) == 0;
    bool hdf5 = strcmp(c->container->name, "hdf5") == 0;
    if (hdf5 && c->o->to == TO_DEFAULT && !is_named)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%s: the source is one HDF5 file: choose --to, or a name ending in .h5",
                         c->dst_path);
    c->plan_opts.single_file = hdf5 || is_named;
    c->plan_opts.max_shard_bytes = c->plan_opts.single_file ? 0 : c->o->max_shard;
    return ckpt_convert_compression(c->o->compress, c->container, &c->plan_opts.deflate, err);
}

static ckpt_status choose_layout(conversion *c, ckpt_err *err)
{
    const char *group = group_names[c->o->layout];
    c->layout = c->model.layout;
    if (c->o->map != NULL && !c->map.source)
        c->layout = &c->map.layout;
    bool own_table = c->layout == &c->map.layout;
    if (group == NULL || (c->layout != NULL && !own_table && strcmp(c->layout->group, group) == 0))
        return CKPT_OK;
    if (c->model.layout == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: no known model family, so it cannot become layout %s; --layout keep "
                         "changes only the container",
                         c->src_path, group);
    c->layout = ckpt_layout_for(&c->model, ckpt_foreign_config(c->has_old ? &c->old : NULL, group),
                                &c->plan_opts.mesh, group);
    if (c->layout == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: family %s has no layout %s", c->src_path,
                         c->model.layout->family, group);
    return CKPT_OK;
}

/* Sizes not asked for are 1, unless none is: then a Megatron checkpoint keeps its own. */
static ckpt_status choose_mesh(conversion *c, ckpt_err *err)
{
    const convert_opts *o = c->o;
    bool asked = o->tp > 0 || o->pp > 0 || o->ep > 0 || o->etp > 0 || o->cp > 0;
    ckpt_mesh *mesh = &c->plan_opts.mesh;
    *mesh = (ckpt_mesh){.tp = o->tp > 0 ? (int)o->tp : 1,
                        .pp = o->pp > 0 ? (int)o->pp : 1,
                        .ep = o->ep > 0 ? (int)o->ep : 1,
                        .etp = (int)o->etp,
                        .cp = o->cp > 0 ? (int)o->cp : 1,
                        .dp = 1};
    bool keeps = c->src.config_kind == CKPT_CONFIG_MEGATRON && c->plan_opts.sharded &&
                 (c->o->layout == LAYOUT_KEEP || c->o->layout == LAYOUT_MEGATRON);
    if (!asked && keeps && c->o->map == NULL) {
        *mesh = c->model.mesh;
        mesh->dp = 1;
    }
    ckpt_status status = ckpt_mesh_resolve(mesh, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, c->dst_path);
    return status;
}

static void choose_values(conversion *c)
{
    static const ckpt_dtype dtypes[] = {CKPT_F32, CKPT_BF16, CKPT_F16, CKPT_F32};
    static const char *const norms[] = {NULL, "latent_norms=fused,mlp_norms=fused",
                                        "latent_norms=separate,mlp_norms=separate"};
    const convert_opts *o = c->o;
    ckpt_convert_opts *p = &c->plan_opts;
    p->layout = c->layout == c->model.layout ? NULL : c->layout;
    /* what the user says goes first: the first word on a group decides */
    const char *group = c->layout != NULL ? c->layout->group : "";
    const char *carried = ckpt_foreign_tags(c->has_old ? &c->old : NULL, group);
    p->tags = norms[o->norms] == NULL || carried == NULL
                  ? (norms[o->norms] != NULL ? norms[o->norms] : carried)
                  : ckpt_arena_printf(&c->tool->arena, "%s,%s", norms[o->norms], carried);
    p->include = o->include.items;
    p->n_include = o->include.n;
    p->exclude = o->exclude.items;
    p->n_exclude = o->exclude.n;
    p->rename = o->rename.items;
    p->n_rename = o->rename.n;
    bool cast = o->dtype > DTYPE_KEEP && o->dtype < DTYPE_QUANTISED;
    p->cast = cast ? CKPT_CAST_TO : CKPT_CAST_KEEP;
    p->dtype = dtypes[cast ? o->dtype : DTYPE_KEEP];
    p->dtype_force = o->dtype_force;
    p->allow_unknown = o->allow_unknown;
    p->allow_unknown_objects = o->allow_unknown_objects;
    p->approximate = o->approximate;
    p->fold_f = o->f_rank < 0;
    p->fold_g = o->g_rank < 0;
    p->f_rank = o->f_rank > 0 ? o->f_rank : 0;
    p->g_rank = o->g_rank > 0 ? o->g_rank : 0;
    p->foreign_config = ckpt_foreign_config(c->has_old ? &c->old : NULL, group);
    if (p->foreign_config == NULL && c->model.layout != NULL &&
        strcmp(c->model.layout->group, group) == 0)
        p->foreign_config = c->src.config;
}

static ckpt_status before_layout(void *self, ckpt_plan *plan, ckpt_err *err)
{
    conversion *c = self;
    ckpt_status status = ckpt_convert_common(&c->src, c->container, plan, &c->common, err);
    if (status != CKPT_OK)
        return status;
    status = ckpt_objects_restore(c->tool, &c->objects, &c->report, plan, c->container,
                                  c->has_old ? &c->old : NULL, &c->common, err);
    if (status != CKPT_OK)
        return status;
    return ckpt_convert_policy(c->container, plan, c->plan_opts.quant_policy, &c->common, err);
}

static ckpt_status check_effects(const conversion *c, ckpt_err *err)
{
    const convert_opts *o = c->o;
    const ckpt_convert_facts facts = {.src = &c->src,
                                      .model = &c->model,
                                      .container = c->container,
                                      .layout = c->layout,
                                      .iteration = o->iteration,
                                      .ep = o->ep,
                                      .etp = o->etp,
                                      .cp = o->cp,
                                      .single_file = c->plan_opts.single_file,
                                      .casts = c->plan_opts.cast == CKPT_CAST_TO,
                                      .dry_run = o->dry_run};
    return ckpt_convert_effects(c->tool, &facts, err);
}

/* A pattern that is misspelt is told so, where nothing is left. */
static ckpt_status check_selection(const conversion *c, ckpt_err *err)
{
    size_t n = 0;
    if (c->o->include.n == 0)
        return CKPT_OK;
    for (size_t i = 0; i < c->model.n_tensors; i++)
        n += ckpt_tool_selected(&c->model, i, &c->o->include, &c->o->exclude);
    return n > 0 || c->model.n_tensors == 0
               ? CKPT_OK
               : ckpt_fail(err, CKPT_E_USAGE, "%s: --include and --exclude leave no tensor%s",
                           c->src_path, ckpt_tool_meant(c->tool, &c->model, &c->o->include));
}

static ckpt_status make_plan(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(choose_container(c, err));
    CKPT_CHECK(choose_mesh(c, err));
    CKPT_CHECK(choose_layout(c, err));
    choose_values(c);
    c->plan_opts.has_groups = ckpt_objects_have_common(c->has_old ? &c->old : NULL);
    CKPT_CHECK(
        ckpt_policy_stored(&c->src, c->has_old ? &c->old : NULL, &c->plan_opts.quant_policy, err));
    c->plan_opts.before_layout = before_layout;
    c->plan_opts.self = c;
    CKPT_CHECK(check_effects(c, err));
    CKPT_CHECK(check_selection(c, err));
    if (c->o->dtype < DTYPE_QUANTISED) {
        status = ckpt_plan_convert(&c->plan, &c->model, &c->plan_opts, err);
    } else {
        status = ckpt_plan_convert(&c->base, &c->model, &c->plan_opts, err);
        if (status == CKPT_OK)
            status =
                ckpt_wquant_open(&c->quant, (ckpt_wquant_kind)(c->o->dtype - DTYPE_QUANTISED + 1),
                                 &c->base, &c->plan_opts, &c->plan, err);
    }
    if (status != CKPT_OK)
        ckpt_tool_frame(err, c->src_path);
done:
    return status;
}

static ckpt_status drop_optimizer_line(conversion *c, ckpt_err *err)
{
    const char *line =
        ckpt_arena_printf(&c->tool->arena, "%zu optimizer tensor%s (%s%s)", c->removed.n,
                          plural(c->removed.n), c->removed.items[0], c->removed.n > 1 ? ", …" : "");
    return line != NULL ? ckpt_strings_push(&c->report.dropped, line, err)
                        : ckpt_tool_no_memory(err);
}

static ckpt_status report_plan(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    const char *target = c->layout != NULL && c->layout != c->model.layout
                             ? ckpt_arena_printf(&c->tool->arena, "layout %s", c->layout->name)
                             : ckpt_arena_printf(&c->tool->arena, "%s", c->container->name);
    if (target == NULL)
        return ckpt_tool_no_memory(err);
    if (c->removed.n > 0)
        CKPT_CHECK(drop_optimizer_line(c, err));
    CKPT_CHECK(ckpt_objects_keep(&c->objects, &c->plan, c->container, c->removed.n == 0, err));
    CKPT_CHECK(ckpt_report_plan(c->tool, &c->report, &c->plan,
                                ckpt_json_get(c->objects.kept, "items"), target, err));
    CKPT_CHECK(ckpt_report_patterns(c->tool, &c->report, &c->plan, &c->plan_opts, &c->removed,
                                    c->layout == c->model.layout && c->o->norms == 0, err));
    ckpt_report_show(c->tool, &c->report, &c->plan);
    for (size_t i = 0; i < c->model.n_notes; i++)
        ckpt_tool_note(c->tool, "note: %s", c->model.notes[i]);
done:
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* A damaged source must not turn into an intact-looking result. Comparable only when every tensor
 * of the source took part as stored. */
static ckpt_status check_source_root(const conversion *c, ckpt_err *err)
{
    if (!c->has_old || c->o->force || !c->result.has_source_root ||
        c->plan.n_results != c->old.n_tensors)
        return CKPT_OK;
    if (memcmp(c->result.source_root, c->old.root, CKPT_SHA256_LEN) == 0)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_MISMATCH,
                     "%s: the tensors contradict the source's manifest; `ckpt verify --hash` names "
                     "them, --force converts them anyway",
                     c->src_path);
}

/* The executor knows the source's root when it read all of it; else the source's own manifest may,
 * if it lists every tensor. */
static void settle_source_root(conversion *c)
{
    ckpt_convert_result *r = &c->result;
    bool whole = c->report.undecoded == 0;
    r->has_source_root = r->has_source_root && whole && c->removed.n == 0;
    if (r->has_source_root || !whole || !c->has_old ||
        c->old.n_tensors != c->model.n_tensors + c->removed.n)
        return;
    for (size_t i = 0; i < c->model.n_tensors; i++)
        if (ckpt_manifest_find_tensor(&c->old, c->model.tensors[i].name) < 0)
            return;
    memcpy(r->source_root, c->old.root, CKPT_SHA256_LEN);
    r->has_source_root = true;
}

/* A single file whose own manifest and configuration are inside. */
static bool holds_config(const conversion *c)
{
    return c->plan.sink.serial != NULL;
}

static ckpt_status fill_manifest(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    const ckpt_layout *from = c->model.layout;
    static const char *const kinds[] = {NULL, "hf", "megatron"};
    const char *single = c->plan_opts.single_file ? ckpt_basename(c->dst_path) : NULL;
    const char *from_group = from != NULL ? from->group : kinds[c->src.config_kind];
    const char *to_group = c->layout != NULL ? c->layout->group : kinds[c->plan.out.config_kind];
    ckpt_manifest *m = &c->manifest;
    CKPT_CHECK(ckpt_manifest_of_plan(m, &c->plan, &c->result, single, err));
    m->layout = c->layout != NULL ? c->layout->name : NULL;
    m->family = c->layout != NULL ? c->layout->family : NULL;
    m->container = c->container->name;
    m->lossy = c->report.lossy.items;
    m->n_lossy = c->report.lossy.n;
    m->has_source_root = c->result.has_source_root;
    m->mesh = c->plan_opts.mesh;
    CKPT_CHECK(ckpt_manifest_created(&c->src, &m->arena, &m->created, err));
    CKPT_CHECK(ckpt_foreign_carry(m, c->has_old ? &c->old : NULL, &c->model, from_group,
                                  c->plan_opts.single_file && !holds_config(c) ? NULL : to_group,
                                  err));
    m->quant_policy = c->plan_opts.quant_policy;
    CKPT_CHECK(ckpt_objects_store(&c->objects, m, err));
done:
    return status;
}

static ckpt_status write_sidecars(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    if (c->plan_opts.single_file && !holds_config(c))
        return CKPT_OK;
    CKPT_CHECK(ckpt_sidecars_collect(&c->sidecars, &c->src, c->has_old ? &c->old : NULL, err));
    if (holds_config(c))
        return ckpt_sidecars_carry(&c->sidecars, &c->manifest, err);
    CKPT_CHECK(ckpt_sidecars_write(&c->sidecars, &c->commit, &c->plan.sink,
                                   c->plan.out.config_kind == CKPT_CONFIG_MEGATRON, &c->manifest,
                                   err));
done:
    return status;
}

static ckpt_status check_written(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    const char *dir = c->plan.sink.manifest_dir != NULL ? c->plan.sink.manifest_dir : "";
    bool filtered = c->o->rename.n > 0 || c->o->include.n > 0 || c->o->exclude.n > 0;
    CKPT_CHECK(ckpt_convert_reopen(c->tool, &c->plan, c->container, c->commit.temp_path, err));
    if (c->o->rename.n > 0 && c->o->map == NULL) {
        CKPT_CHECK(ckpt_convert_renamed(c->tool, &c->report, &c->manifest, &c->plan, &c->result,
                                        c->container, c->commit.temp_path, &c->renamed, err));
        memcpy(c->result.root, c->manifest.root, CKPT_SHA256_LEN);
    }
    CKPT_CHECK(ckpt_convert_seal(&c->plan, &c->manifest, &c->result, c->commit.temp_path, err));
    if (c->o->verify)
        CKPT_CHECK(ckpt_convert_reread(c->tool, &c->manifest, c->container, c->layout,
                                       c->commit.temp_path, c->plan_opts.single_file ? NULL : dir,
                                       filtered, err));
done:
    return status;
}

/* The manifest of a directory is its last file; that of a single file follows it, and one that
 * describes an older file of this name must not outlive it. */
static ckpt_status publish(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    char *path = NULL;
    CKPT_CHECK(ckpt_manifest_print(&c->manifest, &c->text, err));
    if (c->plan_opts.single_file) {
        path = ckpt_arena_printf(&c->tool->arena, "%s%s", c->dst_path, CKPT_MANIFEST_SUFFIX);
        if (path == NULL)
            return ckpt_tool_no_memory(err);
        c->commit.scratch = path;
        CKPT_CHECK(ckpt_commit_finish(&c->commit, err));
        CKPT_CHECK(ckpt_tool_write_file(path, c->text.data, c->text.len, err));
        goto done;
    }
    path = ckpt_path_join(&c->tool->arena,
                          c->plan.sink.manifest_dir != NULL ? c->plan.sink.manifest_dir : "",
                          CKPT_MANIFEST_NAME);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_commit_write(&c->commit, path, c->text.data, c->text.len, err));
    CKPT_CHECK(ckpt_commit_finish(&c->commit, err));
done:
    return status;
}

/* The temporary output, made by rank 0; the others write into it. */
static ckpt_status begin_output(conversion *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_ranks_lead(c->tool->ranks)) {
        if (!c->plan_opts.single_file)
            CKPT_CHECK(ckpt_journal_prepare(&c->journal, &c->plan, err));
        else if (c->o->resume)
            ckpt_tool_note(c->tool,
                           "note: --resume: a single file is one unit and is written anew");
        CKPT_CHECK(ckpt_commit_begin(&c->commit, c->dst_path, !c->plan_opts.single_file,
                                     c->o->force, err));
        CKPT_CHECK(ckpt_convert_journal(c->tool, &c->journal, &c->commit, c->o->resume, err));
    }
done:
    return status;
}

static ckpt_status write_data(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    ckpt_bar bar;
    const char *path;
    CKPT_CHECK(ckpt_share_agree(c->tool->share, begin_output(c, err), err));
    path = c->commit.temp_path;
    CKPT_CHECK(ckpt_ranks_tell(c->tool, &path, err));
    if (!c->plan_opts.single_file)
        CKPT_CHECK(ckpt_journal_join(&c->journal, &c->plan, path, c->tool->share, err));
    ckpt_bar_start(&bar, "convert", c->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(c->tool, &bar);
    opts.journal = c->journal.active ? &c->journal : NULL;
    status =
        c->quant.kind != CKPT_WQUANT_NONE ? ckpt_wquant_measure(&c->quant, &opts, err) : CKPT_OK;
    if (status == CKPT_OK)
        status = ckpt_stream_convert(&c->plan, path, &opts, &c->tool->arena, &c->result, err);
    ckpt_bar_stop(&bar);
done:
    return status;
}

/* What rank 0 does alone once all bytes are there. */
static ckpt_status complete_output(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_source_root(c, err));
    settle_source_root(c);
    CKPT_CHECK(fill_manifest(c, err));
    CKPT_CHECK(write_sidecars(c, err));
    CKPT_CHECK(check_written(c, err));
    CKPT_CHECK(ckpt_source_unchanged(&c->src, err));
    CKPT_CHECK(ckpt_check_interrupted(err));
    CKPT_CHECK(publish(c, err));
done:
    return status;
}

static ckpt_status write_output(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    struct timespec start;
    const ckpt_share *share = c->tool->share;
    clock_gettime(CLOCK_MONOTONIC, &start);
    CKPT_CHECK(write_data(c, err));
    if (c->o->verify)
        CKPT_CHECK(ckpt_convert_read_again(c, err));
    c->tool->share = NULL; /* from here on rank 0 works alone */
    status = ckpt_ranks_lead(c->tool->ranks) ? complete_output(c, err) : CKPT_OK;
    CKPT_CHECK(ckpt_share_agree(share, status, err));
    c->seconds = ckpt_seconds_since(&start);
done:
    return status;
}

/* ---- the command ----------------------------------------------------------------------------- */

static ckpt_status convert(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_convert_apart(c->src_path, c->dst_path, err));
    CKPT_CHECK(ckpt_ranks_divide(c->tool, 0, err));
    CKPT_CHECK(check_options(c, err));
    CKPT_CHECK(open_source(c, err));
    CKPT_CHECK(make_plan(c, err));
    if (!c->o->dry_run)
        CKPT_CHECK(ckpt_convert_factors(c->tool, &c->plan, c->src_path, c->dst_path, err));
    CKPT_CHECK(report_plan(c, err));
    if (c->o->dry_run) {
        if (ckpt_tool_text(c->tool))
            ckpt_convert_show(c->tool, &c->plan);
    } else {
        CKPT_CHECK(ckpt_convert_check_part(c, err));
        CKPT_CHECK(ckpt_convert_check_replicas(&c->src, c->o->force, err));
        CKPT_CHECK(write_output(c, err));
        if (ckpt_tool_text(c->tool))
            ckpt_convert_summary(c);
    }
    if (c->tool->g.json)
        ckpt_convert_json(c);
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    conversion c = {.tool = tool, .o = opts, .src_path = tool->operands.items[0]};
    size_t n = strlen(tool->operands.items[1]);
    while (n > 1 && tool->operands.items[1][n - 1] == '/')
        n--;
    c.dst_path = ckpt_arena_strndup(&tool->arena, tool->operands.items[1], n);
    ckpt_status status = c.dst_path != NULL ? convert(&c, err) : ckpt_tool_no_memory(err);
    if (c.o->resume && !c.source_changed)
        ckpt_convert_keep(tool, &c.journal, &c.commit, status);
    ckpt_commit_discard(&c.commit, err);
    ckpt_journal_release(&c.journal);
    ckpt_buf_release(&c.text);
    ckpt_manifest_release(&c.manifest);
    ckpt_sidecars_release(&c.sidecars);
    ckpt_objects_release(&c.objects);
    ckpt_plan_release(&c.plan);
    ckpt_wquant_release(&c.quant);
    ckpt_plan_release(&c.base);
    ckpt_buf_release(&c.common);
    ckpt_model_release(&c.model);
    ckpt_manifest_release(&c.old);
    ckpt_source_close(&c.src);
    ckpt_usermap_release(&c.map);
    ckpt_report_release(&c.report);
    ckpt_strings_release(&c.removed);
    return status;
}

static void defaults(void *opts)
{
    convert_opts *o = opts;
    o->iteration = -1;
    o->max_shard = 5000000000U;
}

const ckpt_command ckpt_cmd_convert = {
    .name = "convert",
    .synopsis = "SRC DST",
    .what = "write a checkpoint in another container, layout, mesh or dtype",
    .opts = rows,
    .opts_size = sizeof(convert_opts),
    .min_operands = 2,
    .max_operands = 2,
    .divides = true,
    .writes = true,
    .defaults = defaults,
    .run = run,
    .examples = "  ckpt convert kimi/ mg/ --to torch_dist --layout megatron --tp 2 --ep 2\n"
                "  ckpt convert mg/ mg4/ --to torch_dist --tp 4 --verify\n"
                "  ckpt convert mg4/ hf/ --to safetensors --layout hf --dtype bf16\n"
                "  ckpt convert run/ weights.safetensors --optimizer drop\n",
    .notes =
        "DST ending in .safetensors, .h5, .hdf5, or in .pt, .pth or .bin (torch), is one file\n"
        "with its manifest at DST.ckpt.manifest.json (HDF5: also inside); otherwise DST is a\n"
        "directory. Mesh sizes that are not given are 1; if none is given, a Megatron checkpoint\n"
        "that stays one keeps its own.\n",
};
