/* verify --roundtrip LAYOUT[,tp=N,...]: there and back without writing anything. A leg is the plan of a
 * conversion whose result is read as a source: each chunk that convert would write is a file without bytes,
 * made by the plan's gather when something reads it. The second leg starts from the first, knowing what
 * would be stored there and no more; its tensors and digests must be those of PATH. */
#include "sidecar.h"
#include "verify.h"

#include <stdlib.h>
#include <string.h>

typedef struct leg {
    ckpt_source *from;
    ckpt_plan plan;
    const ckpt_gather **chunk; /* of each file of src */
    ckpt_source src;
    ckpt_model model;
} leg;

/* ---- what is asked --------------------------------------------------------------------------- */

typedef struct ways {
    const char *group;
    ckpt_mesh mesh;
} ways;

static ckpt_status parse(const verification *v, ways *w, ckpt_err *err)
{
    static const char *const groups[] = {"hf", "megatron", "fla"};
    int *const sizes[] = {&w->mesh.tp, &w->mesh.pp, &w->mesh.ep, &w->mesh.etp, &w->mesh.cp};
    enum { N_AXES = 5 };
    static const char *const axes[N_AXES] = {"tp", "pp", "ep", "etp", "cp"};
    bool given[N_AXES] = {false};
    const char *text = v->o->roundtrip, *end = text + strcspn(text, ",");
    *w = (ways){
        .mesh = {.tp = 1, .pp = 1, .ep = 1, .cp = 1, .dp = 1}
    };
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        if (strlen(groups[i]) == (size_t)(end - text) &&
            strncmp(text, groups[i], (size_t)(end - text)) == 0)
            w->group = groups[i];
    if (w->group == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "--roundtrip %s: expected hf, megatron or fla first",
                         ckpt_tool_clean(v->tool, text));
    while (*end == ',') {
        const char *name = end + 1, *value = name + strcspn(name, "=,");
        char *after = NULL;
        size_t axis = 0;
        while (axis < N_AXES && (strlen(axes[axis]) != (size_t)(value - name) ||
                                 strncmp(name, axes[axis], (size_t)(value - name)) != 0))
            axis++;
        long n = *value == '=' ? strtol(value + 1, &after, 10) : 0;
        if (axis == N_AXES || after == value + 1 || n < 1 || n > 65536 ||
            (*after != ',' && *after != '\0'))
            return ckpt_fail(err, CKPT_E_USAGE,
                             "--roundtrip %s: expected tp=N, pp=N, ep=N, etp=N or cp=N after the "
                             "layout, N from 1 to 65536",
                             ckpt_tool_clean(v->tool, text));
        if (given[axis])
            return ckpt_fail(err, CKPT_E_USAGE, "--roundtrip %s: %.*s twice",
                             ckpt_tool_clean(v->tool, text), (int)(value - name), name);
        given[axis] = true;
        *sizes[axis] = (int)n;
        end = after;
    }
    return ckpt_mesh_resolve(&w->mesh, err);
}

ckpt_status ckpt_verify_ways(const verification *v, ckpt_err *err)
{
    ways w;
    return parse(v, &w, err);
}

/* ---- a conversion's result as a source -------------------------------------------------------- */

static ckpt_status read_chunk(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                              ckpt_err *err)
{
    const leg *l = src->self;
    _Alignas(64) uint8_t room[64 * 1024];
    ckpt_scratch scratch = {.buf = room, .cap = sizeof room};
    return ckpt_gather_run(l->from, l->chunk[file], offset, n, buf, &scratch, err);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static ckpt_status expose(leg *l, ckpt_err *err)
{
    const ckpt_out *out = &l->plan.out;
    ckpt_source *s = &l->src;
    size_t n = 0;
    for (size_t i = 0; i < out->n_tensors; i++)
        n += out->tensors[i].n_chunks;
    if (n > UINT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%zu chunks", n);
    s->tensors = ckpt_arena_array(&s->arena, out->n_tensors + 1, sizeof *s->tensors);
    s->files = ckpt_arena_array(&s->arena, n + 1, sizeof *s->files);
    l->chunk = ckpt_arena_array(&s->arena, n + 1, sizeof(ckpt_gather *));
    if (s->tensors == NULL || s->files == NULL || l->chunk == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < out->n_tensors; i++) {
        const ckpt_out_tensor *t = &out->tensors[i];
        ckpt_chunk *chunks = ckpt_arena_array(&s->arena, t->n_chunks + 1, sizeof *chunks);
        if (chunks == NULL)
            return ckpt_tool_no_memory(err);
        for (size_t c = 0; c < t->n_chunks; c++) {
            const ckpt_gather *g = &l->plan.chunks[i][c];
            const unsigned from = (unsigned)ckpt_dtype_get(g->from)->bits,
                           to = (unsigned)ckpt_dtype_get(g->to)->bits;
            const uint64_t bytes = from == to ? g->bytes : g->bytes * 8 / from * to / 8;
            chunks[c] = (ckpt_chunk){
                .lo = t->chunks[c].lo, .len = t->chunks[c].len, .file = (uint32_t)s->n_files};
            l->chunk[s->n_files] = g;
            s->files[s->n_files++] = (ckpt_file){
                .name = t->name, .path = t->name, .size = bytes, .fd = -1, .is_data = true};
        }
        s->tensors[s->n_tensors++] = (ckpt_tensor){.name = t->name,
                                                   .dims = t->dims,
                                                   .rank = t->rank,
                                                   .dtype = t->dtype,
                                                   .chunks = chunks,
                                                   .n_chunks = t->n_chunks};
    }
    qsort(s->tensors, s->n_tensors, sizeof *s->tensors, by_name);
    s->n_virtual = s->n_files;
    s->container = out->config_kind == CKPT_CONFIG_MEGATRON ? &ckpt_torch_dist : &ckpt_safetensors;
    s->config = l->plan.config;
    s->config_kind = out->config_kind;
    s->metadata = l->plan.metadata;
    s->iteration = -1;
    s->is_dir = true;
    s->read_at = read_chunk;
    s->self = l;
    return CKPT_OK;
}

static ckpt_status go(leg *l, const char *path, ckpt_model *model, const ckpt_convert_opts *opts,
                      ckpt_err *err)
{
    ckpt_status status;
    ckpt_model_opts bind = {.allow_unknown = true};
    l->from = model->src;
    l->src.path = l->src.root = path;
    CKPT_CHECK(ckpt_plan_convert(&l->plan, model, opts, err));
    CKPT_CHECK(expose(l, err));
    CKPT_CHECK(ckpt_model_bind(&l->model, &l->src, &bind, err));
done:
    return status;
}

static void release(leg *l)
{
    ckpt_model_release(&l->model);
    ckpt_arena_free(&l->src.arena);
    ckpt_plan_release(&l->plan);
}

/* ---- there and back --------------------------------------------------------------------------- */

static ckpt_convert_opts options(bool megatron, const ckpt_mesh *mesh)
{
    const ckpt_container *c = megatron ? &ckpt_torch_dist : &ckpt_safetensors;
    return (ckpt_convert_opts){
        .container = c, .sharded = c->sharded, .mesh = *mesh, .has_groups = true};
}

static ckpt_status there(verification *v, const ways *w, leg *l, ckpt_err *err)
{
    const ckpt_manifest *old = v->has_manifest ? &v->manifest : NULL;
    const ckpt_layout *own = v->model.layout;
    ckpt_convert_opts o = options(strcmp(w->group, "megatron") == 0, &w->mesh);
    o.allow_unknown = v->o->allow_unknown;
    o.allow_unknown_objects =
        true; /* they are carried, or have no place; tensors are what is compared */
    if (own == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no known model family, so it has no layout %s",
                         w->group);
    o.foreign_config = ckpt_foreign_config(old, w->group);
    o.tags = ckpt_foreign_tags(old, w->group);
    if (strcmp(own->group, w->group) != 0) {
        o.layout = ckpt_layout_for(&v->model, o.foreign_config, &o.mesh, w->group);
        if (o.layout == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "family %s has no layout %s", own->family,
                             w->group);
    } else if (o.foreign_config == NULL)
        o.foreign_config = v->src.config;
    return go(l, v->path, &v->model, &o, err);
}

static ckpt_status back(verification *v, leg *first, leg *l, ckpt_err *err)
{
    const ckpt_layout *own = v->model.layout;
    ckpt_convert_opts o = options(v->src.config_kind == CKPT_CONFIG_MEGATRON, &v->model.mesh);
    o.allow_unknown = v->o->allow_unknown;
    o.mesh.dp = 1;
    o.foreign_config = v->src.config; /* a conversion carries it in the manifest, tags as well */
    o.tags = v->model.tags;
    if (first->model.layout != own)
        o.layout = own;
    return go(l, v->path, &first->model, &o, err);
}

/* ---- equality --------------------------------------------------------------------------------- */

static bool same_shape(int rank, const int64_t *a, int other, const int64_t *b)
{
    return rank == other && (rank == 0 || memcmp(a, b, (size_t)rank * sizeof *a) == 0);
}

static bool is_ignored(const verification *v, const char *stored)
{
    for (size_t i = 0; i < v->model.n_ignored; i++)
        if (strcmp(v->model.ignored[i], stored) == 0)
            return true;
    return false;
}

/* What is stored: names, types and shapes. */
static void compare_stored(verification *v, const ckpt_source *end)
{
    for (size_t i = 0; i < v->src.n_tensors; i++) {
        const ckpt_tensor *t = &v->src.tensors[i];
        const int64_t at = ckpt_source_find(end, t->name);
        if (at < 0 && !is_ignored(v, t->name))
            ckpt_verify_problem(v, "tensor '%s': does not come back", t->name);
        else if (at >= 0 && end->tensors[at].dtype != t->dtype)
            ckpt_verify_problem(v, "tensor '%s': comes back as %s, is %s", t->name,
                                ckpt_dtype_get(end->tensors[at].dtype)->name,
                                ckpt_dtype_get(t->dtype)->name);
        else if (at >= 0 &&
                 !same_shape(t->rank, t->dims, end->tensors[at].rank, end->tensors[at].dims))
            ckpt_verify_problem(v, "tensor '%s': comes back with another shape", t->name);
    }
    for (size_t i = 0; i < end->n_tensors; i++)
        if (ckpt_source_find(&v->src, end->tensors[i].name) < 0)
            ckpt_verify_problem(v, "tensor '%s': comes back, and was not there",
                                end->tensors[i].name);
}

static ckpt_status compare_values(verification *v, leg *end, ckpt_err *err)
{
    const ckpt_model *m = &end->model;
    ckpt_status status = CKPT_OK;
    ckpt_bar bar;
    ckpt_tensor_hash *hashes = ckpt_arena_array(&v->tool->arena, m->n_tensors + 1, sizeof *hashes);
    if (hashes == NULL)
        return ckpt_tool_no_memory(err);
    if (v->tensors == NULL)
        CKPT_CHECK(ckpt_verify_compute(v, false, err));
    ckpt_bar_start(&bar, "there and back", v->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(v->tool, &bar);
    status = ckpt_stream_digest(m, &opts, &v->tool->arena, hashes, NULL, err);
    ckpt_bar_stop(&bar);
    if (status != CKPT_OK)
        goto done;
    for (size_t i = 0; i < v->model.n_tensors; i++) {
        const char *name = v->model.tensors[i].name;
        const int64_t at = ckpt_model_find(m, name);
        if (at >= 0 && memcmp(hashes[at].digest, v->tensors[i].digest, CKPT_SHA256_LEN) == 0)
            continue;
        v->bad[i] = true;
        ckpt_verify_problem(v,
                            at < 0 ? "tensor '%s': is lost on the way there and back"
                                   : "tensor '%s': comes back with other values",
                            name);
    }
done:
    return status;
}

ckpt_status ckpt_verify_roundtrip(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ways w;
    leg *legs = calloc(2, sizeof *legs);
    if (legs == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(parse(v, &w, err));
    CKPT_TRY(there(v, &w, &legs[0], err), "there");
    CKPT_TRY(back(v, &legs[0], &legs[1], err), "back");
    compare_stored(v, &legs[1].src);
    CKPT_CHECK(compare_values(v, &legs[1], err));
    v->through = legs[0].model.layout != NULL ? legs[0].model.layout->name : "?";
done:
    release(&legs[1]);
    release(&legs[0]);
    free(legs);
    return status;
}
