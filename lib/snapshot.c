/* A checkpoint in memory: see snapshot.h. Nothing is matched or checked again here: the base model
 * was bound from a whole checkpoint, and every tensor keeps its row, block and flags. */
#include "snapshot.h"

#include "checked.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define POPULATE_PIECE ((uint64_t)64 << 20) /* some 40 ms, which a copy may have to wait */
#define OBJECTS_LIMIT ((uint64_t)64 << 20)  /* bytes, all together */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a snapshot");
}

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    const ckpt_snapshot *s = src->self;
    uint64_t size = file == 0 ? s->bytes : s->object_bytes;
    if (file > 1 || offset > size || n > size - offset)
        return ckpt_fail(err, CKPT_E_INTERNAL, "snapshot: %zu bytes at %llu of %llu", n,
                         (unsigned long long)offset, (unsigned long long)size);
    if (n > 0)
        memcpy(buf, (file == 0 ? s->data : s->objects) + offset, n);
    return CKPT_OK;
}

/* Rows beyond the true vocabulary: the target keeps as many as the base has, so they are part of the
 * stored tensor here too, and zero. */
static bool padded_rows(const ckpt_model *base, const ckpt_canon *c)
{
    const ckpt_axis *a = c->map.axis;
    if (c->row == NULL || c->map.n != 2 || c->derived != NULL || c->rank != 2)
        return false;
    const ckpt_tensor *t = &base->src->tensors[c->stored];
    return t->rank == 2 && a[0].dim == 0 && a[0].lo == 0 && a[0].len == c->dims[0] &&
           a[0].size == t->dims[0] && a[0].len < a[0].size && a[1].len == a[1].size;
}

/* The canonical tensor as it lies in the buffer: whole, or the first rows of a padded one. */
static ckpt_status place(ckpt_snapshot *s, const ckpt_model *base, const ckpt_canon *c,
                         ckpt_canon *out, ckpt_tensor *t, ckpt_err *err)
{
    ckpt_arena *arena = &s->model.arena;
    bool padded = padded_rows(base, c);
    size_t rank = (size_t)c->rank;
    t->rank = c->rank;
    t->dims = padded ? base->src->tensors[c->stored].dims : c->dims;
    int64_t *lo = ckpt_arena_array(arena, rank + 1, sizeof *lo);
    t->chunks = ckpt_arena_array(arena, 1, sizeof *t->chunks);
    if (lo == NULL || t->chunks == NULL)
        return no_memory(err);
    t->chunks[0] = (ckpt_chunk){.lo = lo, .len = t->dims};
    t->n_chunks = 1;
    if (padded)
        return CKPT_OK;
    ckpt_axis *axis = ckpt_arena_array(arena, rank + 1, sizeof *axis);
    if (axis == NULL)
        return no_memory(err);
    for (int d = 0; d < c->rank; d++)
        axis[d] = (ckpt_axis){.size = c->dims[d], .len = c->dims[d], .dim = d};
    out->map = (ckpt_map){axis, c->rank};
    return CKPT_OK;
}

static ckpt_status name_state(ckpt_snapshot *s, const char *word, ckpt_canon *c, ckpt_err *err)
{
    ckpt_arena *arena = &s->model.arena;
    ckpt_state *state = ckpt_arena_alloc(arena, sizeof *state);
    const char *spelled = ckpt_state_spell(arena, NULL, word, "", false);
    c->param = c->name;
    c->name = ckpt_arena_printf(arena, "optimizer.%s.%s", word, c->param);
    if (state == NULL || spelled == NULL || c->name == NULL)
        return no_memory(err);
    *state = (ckpt_state){.name = word, .before = spelled, .after = "", .tag = "optim=reshardable"};
    c->state = state;
    return CKPT_OK;
}

/* Tensor i of the list, at the end of the buffer so far. */
static ckpt_status add(ckpt_snapshot *s, const ckpt_model *base, size_t i, ckpt_err *err)
{
    ckpt_snapshot_tensor *entry = &s->tensors[i];
    ckpt_canon *c = &s->model.tensors[i];
    ckpt_tensor *t = &s->src.tensors[i];
    int64_t numel;
    *c = base->tensors[entry->param];
    c->dtype = t->dtype = entry->dtype;
    c->derived = NULL;
    c->shift = 0; /* values in memory are canonical */
    c->param = c->name;
    ckpt_status status = place(s, base, &base->tensors[entry->param], c, t, err);
    if (status == CKPT_OK && entry->state != NULL)
        status = name_state(s, entry->state, c, err);
    if (status != CKPT_OK)
        return status;
    t->name = c->name;
    if (!ckpt_numel(c->rank, c->dims, &numel) || !ckpt_dtype_bytes(c->dtype, numel, &c->bytes) ||
        !ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &entry->bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor %s: size overflows", c->name);
    entry->offset = t->chunks[0].offset = s->bytes;
    if (entry->bytes > UINT64_MAX - 64 - s->bytes)
        return no_memory(err);
    s->bytes = (s->bytes + entry->bytes + 63) & ~(uint64_t)63;
    return CKPT_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_canon *)a)->name, ((const ckpt_canon *)b)->name);
}

static int by_stored_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

/* What a model says beside its tensors. */
static ckpt_status describe(ckpt_snapshot *s, const ckpt_model *base, ckpt_err *err)
{
    ckpt_model *m = &s->model;
    const ckpt_source *from = base->src;
    m->layout = base->layout;
    m->syms = base->syms;
    m->n_blocks = base->n_blocks;
    m->n_main = base->n_main;
    m->tags = base->tags;
    m->mesh = base->mesh;
    m->config = ckpt_json_dup(base->config);
    s->src.container = from->container;
    s->src.path = from->path;
    s->src.is_dir = from->is_dir;
    s->src.root = from->root;
    s->src.config_kind = from->config_kind;
    s->src.config = ckpt_json_dup(from->config);
    s->src.metadata = ckpt_json_dup(from->metadata);
    if ((base->config != NULL && m->config == NULL) ||
        (from->config != NULL && s->src.config == NULL) ||
        (from->metadata != NULL && s->src.metadata == NULL))
        return no_memory(err);
    if (base->n_fp8 > 0 || base->n_packed > 0) /* they are blocks of bytes no more */
        ckpt_json_delete(s->src.config, "quantization_config");
    return CKPT_OK;
}

/* Objects of the base, read into one buffer; those beyond the limit are left out. */
static ckpt_status take_objects(ckpt_snapshot *s, ckpt_source *from, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &s->model.arena;
    uint64_t total = 0, at = 0;
    s->src.objects = ckpt_arena_array(arena, from->n_objects + 1, sizeof *s->src.objects);
    if (s->src.objects == NULL)
        return no_memory(err);
    for (size_t i = 0; i < from->n_objects; i++) {
        const ckpt_object *o = &from->objects[i];
        if (o->length > OBJECTS_LIMIT || total + o->length > OBJECTS_LIMIT || o->name[0] == '.')
            continue;
        total += o->length;
        s->src.objects[s->src.n_objects++] = *o;
    }
    s->objects = malloc((size_t)total + 1);
    if (s->objects == NULL)
        return no_memory(err);
    for (size_t i = 0; i < s->src.n_objects; i++) {
        ckpt_object *o = &s->src.objects[i];
        CKPT_TRY(
            ckpt_source_read(from, o->file, s->objects + at, (size_t)o->length, o->offset, err),
            "object '%s'", o->name);
        o->name = ckpt_arena_strdup(arena, o->name);
        if (o->name == NULL)
            return no_memory(err);
        o->file = 1;
        o->offset = at;
        at += o->length;
    }
    s->object_bytes = total;
done:
    return status;
}

bool ckpt_snapshot_populate(const ckpt_snapshot *s, uint64_t *at)
{
#ifdef MADV_POPULATE_WRITE /* Linux 5.14 */
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE),
                    first = ((uintptr_t)s->data + page - 1) / page * page,
                    last = ((uintptr_t)s->data + s->bytes) / page * page;
    if (s->data == NULL || last <= first || *at >= last - first)
        return false;
    const uint64_t n = ckpt_min_u64(POPULATE_PIECE, last - first - *at);
    const int failed = madvise((void *)(first + *at), (size_t)n, MADV_POPULATE_WRITE);
    *at += n;
    return failed == 0;
#else
    (void)s;
    (void)at;
    return false;
#endif
}

ckpt_status ckpt_snapshot_open(ckpt_snapshot *s, const ckpt_model *base,
                               const ckpt_snapshot_tensor *tensors, size_t n, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *s = (ckpt_snapshot){.n = n, .src = {.iteration = -1}};
    s->model.src = &s->src;
    s->src.self = s;
    s->src.read_at = read_memory;
    s->model.tensors = calloc(n + 1, sizeof *s->model.tensors);
    s->tensors = ckpt_arena_array(&s->model.arena, n + 1, sizeof *s->tensors);
    s->src.tensors = ckpt_arena_array(&s->model.arena, n + 1, sizeof *s->src.tensors);
    s->src.files = ckpt_arena_array(&s->model.arena, 2, sizeof *s->src.files);
    if (s->model.tensors == NULL || s->tensors == NULL || s->src.tensors == NULL ||
        s->src.files == NULL) {
        status = no_memory(err);
        goto done;
    }
    memcpy(s->tensors, tensors, n * sizeof *tensors);
    CKPT_CHECK(describe(s, base, err));
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(add(s, base, i, err));
    s->model.n_tensors = s->src.n_tensors = n;
    qsort(s->model.tensors, n, sizeof *s->model.tensors, by_name);
    qsort(s->src.tensors, n, sizeof *s->src.tensors, by_stored_name);
    for (size_t i = 0; i < n; i++)
        s->model.tensors[i].stored = (uint32_t)i;
    CKPT_CHECK(take_objects(s, base->src, err));
    s->src.files[0] = (ckpt_file){
        .name = "memory", .path = "memory", .size = s->bytes, .fd = -1, .is_data = true};
    s->src.files[1] = (ckpt_file){
        .name = "objects", .path = "objects", .size = s->object_bytes, .fd = -1, .is_data = true};
    s->src.n_files = s->src.n_virtual = 2;
    s->data = s->bytes < SIZE_MAX ? calloc(1, (size_t)s->bytes + 1) : NULL;
    if (s->data == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a snapshot of %llu bytes",
                           (unsigned long long)s->bytes);
done:
    if (status != CKPT_OK)
        ckpt_snapshot_close(s);
    return status;
}

static void free_data(ckpt_snapshot *s)
{
    if (s->mapped > 0)
        (void)munmap(s->data, s->mapped);
    else
        free(s->data);
    s->data = NULL;
    s->shared = NULL;
    s->mapped = 0;
}

/* Shared memory is a file to the limit of files' sizes, whatever the files of a checkpoint are. */
static ckpt_status no_shared(size_t size, int error, ckpt_err *err)
{
    struct rlimit limit;
    if (error != EFBIG || getrlimit(RLIMIT_FSIZE, &limit) != 0)
        return ckpt_fail_errno(err, error, "memory of %zu bytes that ranks share for a snapshot",
                               size);
    return ckpt_fail(
        err, CKPT_E_IO,
        "memory of %zu bytes that ranks share for a snapshot is more than a file may "
        "have here, %llu bytes (ulimit -f): raise that limit (ulimit -f unlimited), or "
        "start the ranks with mpirun instead of --launch",
        size, (unsigned long long)limit.rlim_cur);
}

ckpt_status ckpt_snapshot_share(ckpt_snapshot *s, int fd, size_t numbers, bool first, ckpt_err *err)
{
    const size_t size =
        (size_t)s->bytes + numbers * sizeof *s->shared; /* bytes: a multiple of 64 */
    free_data(s);
    if (first && (ftruncate(fd, 0) != 0 || ftruncate(fd, (off_t)size) != 0))
        return no_shared(size, errno, err);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a snapshot of %llu bytes",
                         (unsigned long long)s->bytes);
    s->data = p;
    s->shared = (int64_t *)(void *)(s->data + s->bytes);
    s->mapped = size;
    return CKPT_OK;
}

void ckpt_snapshot_close(ckpt_snapshot *s)
{
    free_data(s);
    free(s->objects);
    ckpt_json_free(s->src.config);
    ckpt_json_free(s->src.metadata);
    ckpt_model_release(&s->model);
    *s = (ckpt_snapshot){0};
}
