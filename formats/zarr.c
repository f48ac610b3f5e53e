/* zarr container: a Megatron-Core checkpoint written with --ckpt-format zarr (up to 0.15).
 *
 *   DIR/metadata.json           {"sharded_backend":"zarr","sharded_backend_version":1,...}
 *   DIR/common.pt               torch.save of the common state
 *   DIR/KEY/.zarray, 0.0 ...    one tensor (zarr_array.c)
 *   DIR/KEY/shard_O_S.pt        one object: torch.save of the bare value, where torch_dist has a
 *                               list of one. An old bug cut the last component of S off.
 *   DIR/KEY.sync/               locks of concurrent writers
 *
 * Chunk files are opened for each read. Objects are presented as torch_dist holds them, so that
 * they can be carried there: behind every .pt file stands a virtual one with the value in a list.
 * Source: megatron-dist-ckpt.md section 1.4; strategies/zarr.py and common.py of core_r0.15.0. */
#include "zarr.h"

#include "dcp.h"
#include "dcp_internal.h"
#include "io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OBJECT_LIMIT ((uint64_t)64 << 20) /* bytes of one object */
#define OBJECTS_LIMIT ((uint64_t)512 << 20)

typedef struct opening {
    ckpt_source *src;
    char **names; /* of the directory */
    size_t n_names, cap_tensors, cap_objects;
    uint32_t *object_file; /* by object: its .pt */
    size_t cap_files;
    void *tensors, *objects;
    ckpt_err *err;
} opening;

/* Wrapped objects, by virtual file. */
typedef struct zarr_self {
    ckpt_buf *blobs;
    size_t n_blobs;
} zarr_self;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static bool has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), k = strlen(suffix);
    return n > k && strcmp(s + n - k, suffix) == 0;
}

/* ---- reading bytes --------------------------------------------------------------------------- */

static ckpt_status read_at(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                           ckpt_err *err)
{
    const zarr_self *self = src->self;
    const ckpt_file *f = &src->files[file];
    size_t real = ckpt_source_n_real(src);
    if (file >= real) {
        if (n)
            memcpy(buf, self->blobs[file - real].data + offset, n);
        return CKPT_OK;
    }
    if (f->fd >= 0)
        return ckpt_pread_full(f->fd, buf, n, offset, err);
    int fd;
    uint64_t size;
    ckpt_status status = ckpt_open_read(f->path, &fd, &size, err);
    if (status != CKPT_OK)
        return status;
    status = ckpt_pread_full(fd, buf, n, offset, err);
    close(fd);
    return status;
}

static void close_zarr(ckpt_source *src)
{
    zarr_self *self = src->self;
    for (size_t i = 0; self && i < self->n_blobs; i++)
        ckpt_buf_release(&self->blobs[i]);
}

/* ---- objects --------------------------------------------------------------------------------- */

static size_t components(const char *s, size_t n)
{
    size_t count = n > 0;
    for (size_t i = 0; i < n; i++)
        count += s[i] == '.';
    return count;
}

/* KEY/shard_O_S of a file name. A cut S is completed by what the names of the directory say about
 * the last axis: its largest offset. */
static const char *object_name(ckpt_arena *arena, const char *key, const char *file,
                               char *const *names, size_t n)
{
    const char *offset = file + strlen("shard_"), *shape = strchr(offset, '_');
    size_t len = strlen(file) - strlen(".pt");
    if (!shape || components(shape + 1, (size_t)(file + len - shape - 1)) + 1 !=
                      components(offset, (size_t)(shape - offset)))
        return ckpt_arena_printf(arena, "%s/%.*s", key, (int)len, file);
    long largest = 0;
    for (size_t i = 0; i < n; i++) {
        const char *end = strncmp(names[i], "shard_", 6) == 0 ? strchr(names[i] + 6, '_') : NULL;
        const char *last = end;
        while (last && last > names[i] + 6 && last[-1] != '.')
            last--;
        unsigned v;
        if (last && sscanf(last, "%9u_", &v) == 1 && (long)v > largest)
            largest = (long)v;
    }
    return ckpt_arena_printf(arena, "%s/%.*s.%ld", key, (int)len, file, largest + 1);
}

static ckpt_status add_object(opening *o, const char *key, const char *file, char *const *names,
                              size_t n)
{
    ckpt_source *src = o->src;
    ckpt_arena *arena = &src->arena;
    const char *shown = ckpt_path_join(arena, key, file);
    const char *path = shown ? ckpt_path_join(arena, src->root, shown) : NULL;
    const char *name = object_name(arena, key, file, names, n);
    uint32_t index;
    if (!path || !name)
        return no_memory(o->err);
    ckpt_status status = ckpt_source_add_file(src, shown, path, false, &index, o->err);
    if (status != CKPT_OK)
        return status;
    if (src->files[index].size > OBJECT_LIMIT)
        return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "%s: object of %llu bytes, limit %llu", shown,
                         (unsigned long long)src->files[index].size,
                         (unsigned long long)OBJECT_LIMIT);
    src->files[index].is_data = true;
    status =
        ckpt_grow(&o->objects, &o->cap_objects, src->n_objects + 1, sizeof(ckpt_object), o->err);
    void *table = o->object_file;
    if (status == CKPT_OK)
        status =
            ckpt_grow(&table, &o->cap_files, src->n_objects + 1, sizeof *o->object_file, o->err);
    o->object_file = table;
    if (status != CKPT_OK)
        return status;
    o->object_file[src->n_objects] = index;
    ((ckpt_object *)o->objects)[src->n_objects++] = (ckpt_object){.name = name};
    return CKPT_OK;
}

/* Put the value of each object into a list, as a file behind all real ones. */
static ckpt_status wrap_objects(opening *o)
{
    ckpt_source *src = o->src;
    zarr_self *self = src->self;
    ckpt_status status = CKPT_OK;
    ckpt_err *err = o->err;
    uint64_t total = 0;
    size_t n = src->n_objects;
    self->blobs = ckpt_arena_array(&src->arena, n + 1, sizeof *self->blobs);
    if (!self->blobs)
        return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        const char *name = src->files[o->object_file[i]].name;
        const char *path = src->files[o->object_file[i]].path;
        ckpt_object *object = &src->objects[i];
        ckpt_buf *blob = &self->blobs[i];
        uint64_t size = src->files[o->object_file[i]].size;
        self->n_blobs = i + 1;
        CKPT_TRY(ckpt_dcp_wrap_object(src, o->object_file[i], size, blob, err), "%s", name);
        total += blob->len;
        if (total > OBJECTS_LIMIT) {
            status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "objects of more than %llu bytes",
                               (unsigned long long)OBJECTS_LIMIT);
            goto done;
        }
        CKPT_CHECK(ckpt_source_add_file(src, name, path, false, &object->file, err));
        src->files[object->file].size = object->length = blob->len;
        src->n_virtual++;
    }
    for (size_t i = 0; i < n; i++)
        CKPT_TRY(ckpt_dcp_describe_object(src, &src->objects[i], err), "object '%s'",
                 src->objects[i].name);
done:
    return status;
}

/* ---- the directory --------------------------------------------------------------------------- */

static ckpt_status add_tensor(opening *o, const char *key)
{
    ckpt_status status =
        ckpt_grow(&o->tensors, &o->cap_tensors, o->src->n_tensors + 1, sizeof(ckpt_tensor), o->err);
    if (status != CKPT_OK)
        return status;
    ckpt_tensor *t = (ckpt_tensor *)o->tensors + o->src->n_tensors;
    status = ckpt_zarr_array(o->src, key, t, o->err);
    if (status != CKPT_OK)
        ckpt_err_frame(o->err, "tensor '%s'", key);
    else
        o->src->n_tensors++;
    return status;
}

static ckpt_status add_directory(opening *o, const char *key)
{
    ckpt_arena scratch = {0};
    char **names = NULL;
    size_t n = 0, known = 0;
    ckpt_entry what = CKPT_ENTRY_NONE;
    const char *dir = ckpt_path_join(&scratch, o->src->root, key);
    ckpt_status status = dir ? ckpt_check_interrupted(o->err) : no_memory(o->err);
    if (status == CKPT_OK)
        status = ckpt_look(dir, &what, o->err);
    if (status == CKPT_OK && what == CKPT_ENTRY_DIR && !has_suffix(key, ".sync")) {
        status = ckpt_list_dir(dir, &scratch, &names, &n, o->err);
        for (size_t i = 0; status == CKPT_OK && i < n; i++) {
            if (strcmp(names[i], ".zarray") == 0)
                status = add_tensor(o, key);
            else if (strncmp(names[i], "shard_", 6) == 0 && has_suffix(names[i], ".pt"))
                status = add_object(o, key, names[i], names, n);
            else
                continue;
            known++;
        }
        if (status == CKPT_OK && known == 0 && strcmp(key, "tokenizer") != 0)
            status = ckpt_source_warn(o->src, o->err,
                                      "directory '%s' holds neither an array nor objects", key);
    }
    ckpt_arena_free(&scratch);
    return status;
}

/* Move a table that grew on the heap into the arena. */
static bool keep(ckpt_arena *arena, void **table, size_t n, size_t size, void *out)
{
    void *copy = ckpt_arena_array(arena, n + 1, size);
    if (copy && n)
        memcpy(copy, *table, n * size);
    free(*table);
    *table = NULL;
    memcpy(out, &copy, sizeof copy);
    return copy != NULL;
}

static ckpt_status add_all(opening *o)
{
    ckpt_source *src = o->src;
    ckpt_status status;
    CKPT_CHECK(ckpt_list_dir(src->root, &src->arena, &o->names, &o->n_names, o->err));
    for (size_t i = 0; i < o->n_names; i++)
        CKPT_CHECK(add_directory(o, o->names[i]));
done:;
    bool tensors =
             keep(&src->arena, &o->tensors, src->n_tensors, sizeof *src->tensors, &src->tensors),
         objects =
             keep(&src->arena, &o->objects, src->n_objects, sizeof *src->objects, &src->objects);
    return status == CKPT_OK && !(tensors && objects) ? no_memory(o->err) : status;
}

static ckpt_status open_place(opening *o, const ckpt_dcp_place *place, int64_t iteration)
{
    ckpt_source *src = o->src;
    ckpt_err *err = o->err;
    bool present;
    uint32_t index;
    ckpt_status status;
    CKPT_CHECK(ckpt_dcp_add_if_present(src, "metadata.json", false, &present, &index, err));
    if (!present) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no metadata.json: the save did not complete");
        goto done;
    }
    CKPT_CHECK(ckpt_dcp_check_backend(src, "zarr", err));
    CKPT_CHECK(ckpt_dcp_add_if_present(src, CKPT_DCP_COMMON_FILE, true, &present, &index, err));
    if (!present) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no " CKPT_DCP_COMMON_FILE);
        goto done;
    }
    CKPT_TRY(ckpt_dcp_read_common(src, index, 0, src->files[index].size, err),
             CKPT_DCP_COMMON_FILE);
    src->config_kind = CKPT_CONFIG_MEGATRON;
    CKPT_CHECK(add_all(o));
    if (src->n_tensors == 0) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no array (a directory with .zarray)");
        goto done;
    }
    CKPT_CHECK(wrap_objects(o));
    CKPT_CHECK(ckpt_dcp_settle_iteration(src, place, iteration, err));
done:
    return status;
}

static ckpt_status open_zarr(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    int64_t iteration = opts ? opts->iteration : -1;
    opening o = {.src = src, .err = err};
    ckpt_dcp_place place;
    zarr_self *self = ckpt_arena_alloc(&src->arena, sizeof *self);
    if (!self)
        return no_memory(err);
    ckpt_status status = ckpt_dcp_locate(&src->arena, src->path, iteration, &place, err);
    if (status != CKPT_OK)
        return status;
    src->root = place.dir;
    src->self = self;
    src->read_at = read_at;
    src->close = close_zarr;
    status = open_place(&o, &place, iteration);
    if (status != CKPT_OK && place.in_root)
        ckpt_err_frame(err, "%s", ckpt_basename(place.dir));
    free(o.object_file);
    return status;
}

static ckpt_status probe_zarr(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    ckpt_arena scratch = {0};
    bool zarr = false;
    ckpt_status status =
        probe->is_dir ? ckpt_dcp_probe_zarr(&scratch, probe->path, &zarr, err) : CKPT_OK;
    *score = zarr ? 2 : 0;
    ckpt_arena_free(&scratch);
    return status;
}

const ckpt_container ckpt_zarr = {
    .name = "zarr",
    .what = "Megatron-Core zarr checkpoint (up to 0.15)",
    .objects = "torch_dist",
    .probe = probe_zarr,
    .open = open_zarr,
};
