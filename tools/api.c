/* The library's functions over one checkpoint (ckpt.h): opening, enumerating, reading, mapping,
 * digests, views. Commands are in api_run.c. */
#include "checked.h"
#include "dcp.h"
#include "manifest.h"
#include "sidecar.h"
#include "tool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SCRATCH ((size_t)256 * 1024) /* bytes, for casts while reading */

struct ckpt_view {
    ckpt_checkpoint *c;
    ckpt_plan plan;
    ckpt_mesh mesh;
    struct ckpt_view *next;
};

struct ckpt_checkpoint {
    ckpt_tool tool; /* options and an arena, as the commands have them */
    ckpt_source src;
    ckpt_model model;
    ckpt_manifest manifest;
    bool has_manifest;
    char *config;
    void **maps;              /* per file of src; NULL: not mapped */
    pthread_mutex_t lock;     /* of maps */
    ckpt_tensor_hash *hashes; /* NULL before ckpt_digest */
    uint8_t root[CKPT_SHA256_LEN];
    ckpt_view *views;
};

const char *ckpt_version(void)
{
    return CKPT_VERSION;
}

int ckpt_abi(void)
{
    return CKPT_ABI;
}

/* ---- opening --------------------------------------------------------------------------------- */

static ckpt_status print_config(ckpt_checkpoint *c, ckpt_err *err)
{
    ckpt_buf text = {0};
    if (c->model.config == NULL)
        return CKPT_OK;
    if (ckpt_json_print(c->model.config, 0, true, &text) && !text.failed)
        c->config = ckpt_arena_strdup(&c->tool.arena, (const char *)text.data);
    ckpt_buf_release(&text);
    return c->config != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

static ckpt_status open_all(ckpt_checkpoint *c, const char *path, const ckpt_open_options *o,
                            ckpt_err *err)
{
    ckpt_status status;
    ckpt_err ignored;
    ckpt_model_opts bind = {.allow_unknown = o->allow_unknown != 0};
    CKPT_CHECK(ckpt_tool_open(&c->tool, &c->src, path, o->iteration, err));
    CKPT_CHECK(ckpt_tool_bind(&c->tool, &c->model, &c->src, &bind, err));
    CKPT_CHECK(print_config(c, err));
    status = ckpt_manifest_load(&c->src, &c->manifest, &c->has_manifest, &ignored);
    if (status != CKPT_OK) { /* one that is damaged proves nothing, and reading needs none */
        status = ckpt_only_faults(status, &ignored, err);
        c->has_manifest = false;
    }
    c->maps = ckpt_arena_array(&c->tool.arena, c->src.n_files + 1, sizeof *c->maps);
    if (status == CKPT_OK && c->maps == NULL)
        status = ckpt_tool_no_memory(err);
done:
    return status;
}

ckpt_status ckpt_open(const char *path, const ckpt_open_options *options, ckpt_checkpoint **out,
                      ckpt_err *err)
{
    static const ckpt_command command = {.name = "libckpt"};
    ckpt_open_options o = {.iteration = -1};
    if (options != NULL)
        o = *options;
    *out = NULL;
    if (err != NULL)
        *err = (ckpt_err){0};
    if (path == NULL || *path == '\0' || o.threads < 0 || o.threads > 1024)
        return ckpt_fail(err, CKPT_E_USAGE, "ckpt_open: path or options");
    for (size_t i = 0; i < sizeof o.reserved / sizeof o.reserved[0]; i++)
        if (o.reserved[i] != 0)
            return ckpt_fail(err, CKPT_E_USAGE, "ckpt_open: a reserved member is not 0");
    ckpt_checkpoint *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ckpt_tool_no_memory(err);
    if (pthread_mutex_init(&c->lock, NULL) != 0) {
        free(c);
        return ckpt_tool_no_memory(err);
    }
    c->tool.command = &command;
    c->tool.g = (ckpt_globals){
        .quiet = true, .threads = o.threads, .memory = o.memory > 0 ? o.memory : (uint64_t)1 << 30};
    ckpt_err why = {0};
    ckpt_status status = open_all(c, path, &o, &why);
    if (status == CKPT_OK) {
        *out = c;
        return CKPT_OK;
    }
    if (err != NULL)
        *err = why;
    ckpt_close(c);
    return status;
}

void ckpt_close(ckpt_checkpoint *c)
{
    if (c == NULL)
        return;
    while (c->views != NULL)
        ckpt_view_close(c->views);
    for (size_t i = 0; c->maps != NULL && i < c->src.n_files; i++)
        if (c->maps[i] != NULL)
            munmap(c->maps[i], (size_t)c->src.files[i].size);
    ckpt_manifest_release(&c->manifest);
    ckpt_model_release(&c->model);
    ckpt_source_close(&c->src);
    ckpt_arena_free(&c->tool.arena);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* ---- describing ------------------------------------------------------------------------------ */

const char *ckpt_container_name(const ckpt_checkpoint *c)
{
    return c->src.container->name;
}

const char *ckpt_layout_name(const ckpt_checkpoint *c)
{
    return c->model.layout != NULL ? c->model.layout->name : NULL;
}

const char *ckpt_config(const ckpt_checkpoint *c)
{
    return c->config;
}

ckpt_mesh ckpt_stored_mesh(const ckpt_checkpoint *c)
{
    return c->model.mesh;
}

int64_t ckpt_iteration(const ckpt_checkpoint *c)
{
    return c->src.iteration;
}

size_t ckpt_tensor_count(const ckpt_checkpoint *c)
{
    return c->model.n_tensors;
}

void ckpt_tensor_at(const ckpt_checkpoint *c, size_t index, ckpt_tensor_info *out)
{
    *out = (ckpt_tensor_info){0};
    if (index >= c->model.n_tensors)
        return;
    const ckpt_canon *t = &c->model.tensors[index];
    *out = (ckpt_tensor_info){.name = t->name,
                              .stored = c->src.tensors[t->stored].name,
                              .dtype = ckpt_dtype_get(t->dtype)->name,
                              .shape = t->dims,
                              .bytes = t->bytes,
                              .rank = t->rank,
                              .optimizer = t->state != NULL};
}

int64_t ckpt_tensor_find(const ckpt_checkpoint *c, const char *name)
{
    return ckpt_model_find(&c->model, name);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The gather of a part, whose loops live in the arena. */
static ckpt_status plan_part(const ckpt_checkpoint *c, size_t index, const int64_t *lo,
                             const int64_t *len, ckpt_arena *arena, ckpt_gather *g, ckpt_err *err)
{
    if (index >= c->model.n_tensors || (lo == NULL) != (len == NULL))
        return ckpt_fail(err, CKPT_E_USAGE, "tensor %zu of %zu", index, c->model.n_tensors);
    const ckpt_canon *t = &c->model.tensors[index];
    if (lo == NULL)
        return ckpt_plan_canon(&c->model, index, arena, g, err);
    for (int i = 0; i < t->rank; i++)
        if (lo[i] < 0 || len[i] < 0 || len[i] > t->dims[i] || lo[i] > t->dims[i] - len[i])
            return ckpt_fail(err, CKPT_E_USAGE,
                             "tensor '%s': axis %d: %lld elements from %lld of %lld", t->name, i,
                             (long long)len[i], (long long)lo[i], (long long)t->dims[i]);
    return ckpt_plan_box(&c->model, index, lo, len, arena, g, err);
}

static ckpt_status read_gather(const ckpt_source *src, const ckpt_gather *g, const char *name,
                               uint64_t bytes, void *out, size_t n, ckpt_err *err)
{
    ckpt_scratch scratch = {.cap = SCRATCH};
    ckpt_source *source = (ckpt_source *)(uintptr_t)src; /* reading changes nothing that shows */
    if (bytes != n)
        return ckpt_fail(err, CKPT_E_USAGE, "tensor '%s': room for %zu bytes, the part has %llu",
                         name, n, (unsigned long long)bytes);
    if (n == 0)
        return CKPT_OK;
    scratch.buf = malloc(scratch.cap);
    if (scratch.buf == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_status status = ckpt_gather_run(source, g, 0, n, out, &scratch, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "tensor '%s'", name);
    free(scratch.buf);
    return status;
}

ckpt_status ckpt_read_part(const ckpt_checkpoint *c, size_t index, const int64_t *lo,
                           const int64_t *len, void *out, size_t n, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_gather g;
    ckpt_status status = plan_part(c, index, lo, len, &arena, &g, err);
    if (status == CKPT_OK)
        status = read_gather(&c->src, &g, c->model.tensors[index].name, g.bytes, out, n, err);
    ckpt_arena_free(&arena);
    return status;
}

/* ---- mapping --------------------------------------------------------------------------------- */

/* Whether the part is one run of bytes of a plain file, and where. */
static bool one_piece(const ckpt_checkpoint *c, const ckpt_gather *g, uint32_t *file, uint64_t *at)
{
    if (g->n_copies != 1 || g->pad > 0 || g->swap || g->from != g->to || g->add_from != 0 ||
        g->add_to != 0 || g->add_back != 0 || g->copies[0].derived != NULL)
        return false;
    const ckpt_copy *copy = &g->copies[0];
    if (copy->file >= ckpt_source_n_real(&c->src) || c->src.files[copy->file].fd < 0 ||
        copy->dst != 0)
        return false;
    for (int i = 0; i < copy->n_loops; i++) /* it fills the destination, so equal steps are dense */
        if (copy->loop[i].n > 1 && copy->loop[i].src != copy->loop[i].dst)
            return false;
    *file = copy->file;
    *at = copy->src;
    return true;
}

static ckpt_status map_file(ckpt_checkpoint *c, uint32_t file, const uint8_t **base, ckpt_err *err)
{
    const ckpt_file *f = &c->src.files[file];
    ckpt_status status = CKPT_OK;
    pthread_mutex_lock(&c->lock);
    if (c->maps[file] == NULL) {
        void *p = f->size <= SIZE_MAX / 2
                      ? mmap(NULL, (size_t)f->size, PROT_READ, MAP_SHARED, f->fd, 0)
                      : MAP_FAILED;
        if (p == MAP_FAILED)
            status = ckpt_fail(err, CKPT_E_IO, "%s: cannot be mapped", f->path);
        else
            c->maps[file] = p;
    }
    *base = c->maps[file];
    pthread_mutex_unlock(&c->lock);
    return status;
}

ckpt_status ckpt_map_part(ckpt_checkpoint *c, size_t index, const int64_t *lo, const int64_t *len,
                          const void **out, size_t *n, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_gather g;
    uint32_t file = 0;
    uint64_t at = 0;
    const uint8_t *base = NULL;
    ckpt_status status;
    CKPT_CHECK(plan_part(c, index, lo, len, &arena, &g, err));
    if (g.bytes == 0) {
        *out = "";
        *n = 0;
        goto done;
    }
    if (!one_piece(c, &g, &file, &at)) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%s': not in one piece in a file",
                           c->model.tensors[index].name);
        goto done;
    }
    CKPT_CHECK(map_file(c, file, &base, err));
    if (at > c->src.files[file].size || g.bytes > c->src.files[file].size - at) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': past the end of %s",
                           c->model.tensors[index].name, c->src.files[file].path);
        goto done;
    }
    *out = base + at;
    *n = (size_t)g.bytes;
done:
    ckpt_arena_free(&arena);
    return status;
}

/* ---- digests --------------------------------------------------------------------------------- */

ckpt_status ckpt_digest(ckpt_checkpoint *c, uint8_t root[32], ckpt_err *err)
{
    ckpt_stream_opts opts = ckpt_tool_stream(&c->tool, NULL);
    ckpt_status status = CKPT_OK;
    if (c->hashes == NULL) {
        ckpt_tensor_hash *hashes =
            ckpt_arena_array(&c->tool.arena, c->model.n_tensors + 1, sizeof *hashes);
        if (hashes == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(ckpt_stream_digest(&c->model, &opts, &c->tool.arena, hashes, c->root, err));
        CKPT_CHECK(ckpt_source_unchanged(&c->src, err));
        c->hashes = hashes;
    }
    memcpy(root, c->root, CKPT_SHA256_LEN);
done:
    return status;
}

ckpt_status ckpt_digest_of(const ckpt_checkpoint *c, size_t index, uint8_t out[32], ckpt_err *err)
{
    if (c->hashes == NULL || index >= c->model.n_tensors)
        return ckpt_fail(err, CKPT_E_USAGE, "tensor %zu of %zu, %s", index, c->model.n_tensors,
                         c->hashes == NULL ? "before ckpt_digest" : "no such");
    memcpy(out, c->hashes[index].digest, CKPT_SHA256_LEN);
    return CKPT_OK;
}

/* ---- views ----------------------------------------------------------------------------------- */

static ckpt_status choose_layout(const ckpt_checkpoint *c, const char *group, ckpt_convert_opts *o,
                                 ckpt_err *err)
{
    static const char *const groups[] = {"keep", "hf", "megatron", "fla"};
    const ckpt_manifest *old = c->has_manifest ? &c->manifest : NULL;
    const ckpt_layout *own = c->model.layout;
    bool known = false;
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        known |= group != NULL && strcmp(group, groups[i]) == 0;
    if (!known)
        return ckpt_fail(err, CKPT_E_USAGE, "layout '%s' is not one of keep, hf, megatron, fla",
                         group != NULL ? group : "");
    if (strcmp(group, "keep") == 0)
        group = own != NULL ? own->group : "";
    if (own != NULL && strcmp(own->group, group) != 0) {
        o->layout = ckpt_layout_for(&c->model, ckpt_foreign_config(old, group), &o->mesh, group);
        if (o->layout == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "family %s has no layout %s", own->family,
                             group);
    } else if (own == NULL && *group != '\0')
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no known model family, so it has no layout %s",
                         group);
    o->tags = ckpt_foreign_tags(old, group);
    o->foreign_config = ckpt_foreign_config(old, group);
    if (o->foreign_config == NULL && own != NULL && strcmp(own->group, group) == 0)
        o->foreign_config = c->src.config;
    return CKPT_OK;
}

ckpt_status ckpt_view_open(ckpt_checkpoint *c, const char *layout, const ckpt_mesh *mesh,
                           ckpt_view **out, ckpt_err *err)
{
    ckpt_convert_opts o = {
        .container = &ckpt_torch_dist,
        .sharded = true,
        .mesh = {.tp = 1, .pp = 1, .ep = 1, .cp = 1, .dp = 1},
        .cast = CKPT_CAST_KEEP,
        .allow_unknown = true,
        .allow_unknown_objects = true
    };
    ckpt_status status;
    *out = NULL;
    ckpt_view *v = calloc(1, sizeof *v);
    if (v == NULL)
        return ckpt_tool_no_memory(err);
    if (mesh != NULL)
        o.mesh = *mesh;
    CKPT_CHECK(ckpt_mesh_resolve(&o.mesh, err));
    CKPT_CHECK(choose_layout(c, layout, &o, err));
    v->c = c;
    v->mesh = o.mesh;
    CKPT_CHECK(ckpt_plan_convert(&v->plan, &c->model, &o, err));
    v->next = c->views;
    c->views = v;
    *out = v;
    return CKPT_OK;
done:
    ckpt_plan_release(&v->plan);
    free(v);
    return status;
}

void ckpt_view_close(ckpt_view *v)
{
    if (v == NULL)
        return;
    for (ckpt_view **p = &v->c->views; *p != NULL; p = &(*p)->next)
        if (*p == v) {
            *p = v->next;
            break;
        }
    ckpt_plan_release(&v->plan);
    free(v);
}

int ckpt_view_ranks(const ckpt_view *v)
{
    return ckpt_mesh_world(&v->mesh);
}

size_t ckpt_view_count(const ckpt_view *v)
{
    return v->plan.out.n_tensors;
}

void ckpt_view_tensor(const ckpt_view *v, size_t index, ckpt_tensor_info *out)
{
    *out = (ckpt_tensor_info){0};
    if (index >= v->plan.out.n_tensors)
        return;
    const ckpt_out_tensor *t = &v->plan.out.tensors[index];
    *out = (ckpt_tensor_info){.name = t->name,
                              .stored = t->name,
                              .dtype = ckpt_dtype_get(t->dtype)->name,
                              .shape = t->dims,
                              .rank = t->rank,
                              .optimizer = t->optimizer};
    for (size_t i = 0; i < t->n_chunks; i++) {
        ckpt_shard_info s;
        ckpt_shard(v, index, i, &s);
        out->bytes += s.bytes;
    }
}

size_t ckpt_shard_count(const ckpt_view *v, size_t index)
{
    return index < v->plan.out.n_tensors ? v->plan.out.tensors[index].n_chunks : 0;
}

void ckpt_shard(const ckpt_view *v, size_t index, size_t shard, ckpt_shard_info *out)
{
    *out = (ckpt_shard_info){0};
    if (shard >= ckpt_shard_count(v, index))
        return;
    const ckpt_out_tensor *t = &v->plan.out.tensors[index];
    const ckpt_out_chunk *chunk = &t->chunks[shard];
    int64_t numel = 0;
    *out = (ckpt_shard_info){.lo = chunk->lo, .len = chunk->len, .owner = chunk->owner};
    if (!ckpt_numel(t->rank, chunk->len, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &out->bytes))
        out->bytes = 0; /* the plan has checked it */
}

ckpt_status ckpt_shard_read(const ckpt_view *v, size_t index, size_t shard, void *out, size_t n,
                            ckpt_err *err)
{
    ckpt_shard_info s;
    if (shard >= ckpt_shard_count(v, index))
        return ckpt_fail(err, CKPT_E_USAGE, "tensor %zu of %zu: shard %zu of %zu", index,
                         v->plan.out.n_tensors, shard, ckpt_shard_count(v, index));
    ckpt_shard(v, index, shard, &s);
    return read_gather(&v->c->src, &v->plan.chunks[index][shard], v->plan.out.tensors[index].name,
                       s.bytes, out, n, err);
}
