/* The table of containers and the way in: look, choose, open, check.
 *
 * A new container is one row here. Choosing never guesses: one certain match wins, else one
 * possible match; anything else is refused with the reason. */
#include "source.h"

#include "dcp.h"
#include "io.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEAD_BYTES 1024

// clang-format off
#define CONTAINERS(X)        \
    X(ckpt_safetensors)      \
    X(ckpt_torch_dist)       \
    X(ckpt_torch_save)       \
    X(ckpt_hdf5)             \
    X(ckpt_mp_rank)          \
    X(ckpt_zarr)             \
    X(ckpt_rank_safetensors)
#define DECLARED(name) extern const ckpt_container name;
#define LISTED(name) &name,
CONTAINERS(DECLARED)
const ckpt_container *const ckpt_containers[] = {CONTAINERS(LISTED) NULL};
// clang-format on

const ckpt_container *ckpt_container_find(const char *name)
{
    for (size_t i = 0; ckpt_containers[i] != NULL; i++)
        if (strcmp(ckpt_containers[i]->name, name) == 0)
            return ckpt_containers[i];
    return NULL;
}

/* "safetensors, torch_dist, torch, hdf5", of those whose probe result is `level`, or of all if < 0. */
static void list_names(ckpt_buf *out, const int *levels, int level, const char *separator)
{
    bool first = true;
    for (size_t i = 0; ckpt_containers[i] != NULL; i++) {
        if (level >= 0 && levels[i] != level)
            continue;
        if (!first)
            ckpt_buf_puts(out, separator);
        ckpt_buf_puts(out, ckpt_containers[i]->name);
        first = false;
    }
}

static const char *buf_text(const ckpt_buf *buf)
{
    return buf->data == NULL ? "" : (const char *)buf->data;
}

/* ---- probe ---------------------------------------------------------------------------------- */

static ckpt_status probe_file(const char *path, ckpt_probe *probe, ckpt_err *err)
{
    int fd;
    uint8_t head[HEAD_BYTES];
    ckpt_status status = ckpt_open_read(path, &fd, &probe->size, err);
    if (status != CKPT_OK)
        return status;
    size_t n = probe->size < sizeof head ? (size_t)probe->size : sizeof head;
    CKPT_TRY(ckpt_pread_full(fd, head, n, 0, err), "%s", path);
    /* Before any container sees it: forcing one does not turn these into data. */
    CKPT_TRY(ckpt_refuse_stand_in(head, n, probe->size, err), "%s", path);
    if (n == 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: empty file", path);
    probe->head_len = n < sizeof probe->head ? n : sizeof probe->head;
    memcpy(probe->head, head, probe->head_len);
done:
    close(fd);
    return status;
}

static ckpt_status probe_path(const char *path, ckpt_arena *arena, ckpt_probe *probe, ckpt_err *err)
{
    struct stat st;
    *probe = (ckpt_probe){.path = path};
    if (stat(path, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    if (!S_ISDIR(st.st_mode))
        return probe_file(path, probe, err);
    probe->is_dir = true;
    ckpt_status status = ckpt_list_dir(path, arena, &probe->names, &probe->n_names, err);
    if (status == CKPT_OK && probe->n_names == 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: empty directory", path);
    return status;
}

/* "CONTAINER" or "CONTAINER-N", as training names the roots of several formats in one directory. */
static bool is_format_root(const char *name)
{
    for (size_t i = 0; ckpt_containers[i] != NULL; i++) {
        size_t n = strlen(ckpt_containers[i]->name);
        if (strncmp(name, ckpt_containers[i]->name, n) == 0 &&
            (name[n] == '\0' || (name[n] == '-' && name[n + 1] != '\0' &&
                                 strspn(name + n + 1, "0123456789") == strlen(name + n + 1))))
            return true;
    }
    return false;
}

/* A save root of several formats: what to open instead. False: it is none, and nothing is said. */
static bool names_formats(const ckpt_probe *probe, ckpt_err *err)
{
    ckpt_arena scratch = {0};
    ckpt_buf list = {0};
    size_t n = 0;
    for (size_t i = 0; probe->is_dir && i < probe->n_names; i++) {
        ckpt_entry what = CKPT_ENTRY_NONE;
        char *dir = is_format_root(probe->names[i])
                        ? ckpt_path_join(&scratch, probe->path, probe->names[i])
                        : NULL;
        char *tracker = dir != NULL ? ckpt_path_join(&scratch, dir, CKPT_DCP_TRACKER) : NULL;
        if (tracker != NULL && ckpt_look(tracker, &what, NULL) == CKPT_OK &&
            what == CKPT_ENTRY_FILE)
            ckpt_buf_printf(&list, "%s%s", n++ > 0 ? ", " : "", dir);
    }
    if (n > 0)
        (void)ckpt_fail(err, CKPT_E_USAGE,
                        "%s: saves of %zu format%s, a directory each: choose one of %s",
                        probe->path, n, n == 1 ? "" : "s", buf_text(&list));
    ckpt_buf_release(&list);
    ckpt_arena_free(&scratch);
    return n > 0;
}

static ckpt_status refuse_unknown(const ckpt_probe *probe, ckpt_err *err)
{
    ckpt_buf known = {0}, found = {0};
    if (names_formats(probe, err))
        return CKPT_E_USAGE;
    list_names(&known, NULL, -1, ", ");
    if (probe->is_dir) {
        for (size_t i = 0; i < probe->n_names && i < 4; i++)
            ckpt_buf_printf(&found, "%s%.80s", i == 0 ? "" : ", ", probe->names[i]);
        if (probe->n_names > 4)
            ckpt_buf_printf(&found, " and %zu more", probe->n_names - 4);
    } else {
        ckpt_buf_puts(&found, "bytes");
        for (size_t i = 0; i < probe->head_len && i < 8; i++)
            ckpt_buf_printf(&found, " %02x", probe->head[i]);
    }
    ckpt_status status = ckpt_fail(err, CKPT_E_FORMAT, "%s: expected a %s checkpoint, found %s",
                                   probe->path, buf_text(&known), buf_text(&found));
    ckpt_buf_release(&known);
    ckpt_buf_release(&found);
    return status;
}

static ckpt_status choose(const ckpt_probe *probe, const ckpt_container **out, ckpt_err *err)
{
    enum { ROWS = sizeof ckpt_containers / sizeof ckpt_containers[0] };
    int levels[ROWS] = {0}, best = 0, count = 0;
    for (size_t i = 0; ckpt_containers[i] != NULL; i++) {
        ckpt_status status = ckpt_containers[i]->probe(probe, &levels[i], err);
        if (status != CKPT_OK)
            return status;
        if (levels[i] > best) {
            best = levels[i];
            count = 0;
        }
        if (best > 0 && levels[i] == best) {
            *out = ckpt_containers[i];
            count++;
        }
    }
    if (count == 1)
        return CKPT_OK;
    if (count == 0)
        return refuse_unknown(probe, err);
    ckpt_buf names = {0};
    list_names(&names, levels, best, " and ");
    ckpt_status status =
        ckpt_fail(err, CKPT_E_USAGE, "%s: may be %s: keep each in a directory of its own",
                  probe->path, buf_text(&names));
    ckpt_buf_release(&names);
    return status;
}

static ckpt_status forced(const char *name, const ckpt_container **out, ckpt_err *err)
{
    *out = ckpt_container_find(name);
    if (*out != NULL)
        return CKPT_OK;
    ckpt_buf known = {0};
    list_names(&known, NULL, -1, ", ");
    ckpt_status status = ckpt_fail(err, CKPT_E_USAGE, "unknown container '%s', expected one of %s",
                                   name, buf_text(&known));
    ckpt_buf_release(&known);
    return status;
}

/* ---- after open ----------------------------------------------------------------------------- */

static int compare_tensors(const void *a, const void *b)
{
    const ckpt_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int compare_objects(const void *a, const void *b)
{
    const ckpt_object *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static ckpt_status check_name(const char *what, const char *name, const char *previous,
                              ckpt_err *err)
{
    for (size_t i = 0, n = strlen(name), len; i < n; i += len) {
        len = ckpt_utf8_len(name + i, n - i);
        if (len == 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "%s name '%.300s' is not UTF-8", what, name);
    }
    if (previous != NULL && strcmp(previous, name) == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%s '%.300s' is stored twice", what, name);
    return CKPT_OK;
}

static ckpt_status check_object(const ckpt_source *src, const ckpt_object *o, ckpt_err *err)
{
    if (o->file >= src->n_files)
        return ckpt_fail(err, CKPT_E_FORMAT, "object '%.300s': file %" PRIu32 " of %zu", o->name,
                         o->file, src->n_files);
    const ckpt_file *f = &src->files[o->file];
    if (o->offset > f->size || o->length > f->size - o->offset)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "object '%.300s': %" PRIu64 " bytes at offset %" PRIu64
                         " past end %" PRIu64 " of %s",
                         o->name, o->length, o->offset, f->size, f->name);
    return CKPT_OK;
}

static ckpt_status check_tables(ckpt_source *src, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (src->n_tensors > 0)
        qsort(src->tensors, src->n_tensors, sizeof *src->tensors, compare_tensors);
    if (src->n_objects > 0)
        qsort(src->objects, src->n_objects, sizeof *src->objects, compare_objects);
    for (size_t i = 0; i < src->n_tensors; i++) {
        ckpt_tensor *t = &src->tensors[i];
        CKPT_CHECK(ckpt_check_interrupted(err));
        CKPT_CHECK(check_name("tensor", t->name, i > 0 ? t[-1].name : NULL, err));
        CKPT_CHECK(ckpt_tensor_check(src, t, err));
    }
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        CKPT_CHECK(check_name("object", o->name, i > 0 ? o[-1].name : NULL, err));
        CKPT_CHECK(check_object(src, o, err));
    }
done:
    return status;
}

/* Name the path unless the message starts with it already (it may go on to a file below). */
static void frame_path(ckpt_err *err, const char *path)
{
    if (err == NULL)
        return;
    size_t n = strlen(path);
    /* A file without a directory was opened by one, ".": it is named as it was given. */
    if (strncmp(err->text, "./", 2) == 0 && strncmp(err->text + 2, path, n) == 0)
        memmove(err->text, err->text + 2, strlen(err->text + 2) + 1);
    bool named = strncmp(err->text, path, n) == 0 &&
                 (err->text[n] == ':' || err->text[n] == '/' || (n > 0 && path[n - 1] == '/'));
    if (!named)
        ckpt_err_frame(err, "%s", path);
}

/* ---- save roots ------------------------------------------------------------------------------- */

static bool listed(const ckpt_probe *probe, const char *name)
{
    for (size_t i = 0; i < probe->n_names; i++)
        if (strcmp(probe->names[i], name) == 0)
            return true;
    return false;
}

/* A directory with Megatron's tracker whose iteration is no Megatron directory: ROOT/iter_N of another
 * container, or the file ROOT/iter_N.h5. Containers of Megatron's find theirs themselves. *path is
 * replaced by what to open. */
static ckpt_status enter_root(const ckpt_probe *probe, const ckpt_open_opts *opts,
                              ckpt_arena *arena, const char **path, ckpt_err *err)
{
    static const char *const own[] = {".metadata", "metadata.json", "mp_rank_00", "mp_rank_00_000"};
    int64_t iteration = opts->iteration;
    ckpt_status status = CKPT_OK;
    ckpt_entry what;
    if (!probe->is_dir || opts->container != NULL ||
        (iteration < 0 && !listed(probe, CKPT_DCP_TRACKER)))
        return CKPT_OK;
    char *tracker = ckpt_path_join(arena, *path, CKPT_DCP_TRACKER);
    if (tracker == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (iteration < 0) {
        ckpt_err text;
        status = ckpt_dcp_read_tracker(tracker, &iteration, &text);
        if (status != CKPT_OK)
            return ckpt_only_faults(status, &text, err);
    }
    if (iteration < 0)
        return CKPT_OK;
    const char *at = ckpt_arena_printf(arena, "iter_%07" PRId64, iteration);
    char *dir = at != NULL ? ckpt_path_join(arena, *path, at) : NULL;
    char *file = dir != NULL ? ckpt_arena_printf(arena, "%s.h5", dir) : NULL;
    if (dir == NULL || file == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        char *name = ckpt_path_join(arena, dir, own[i]);
        if (name == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        CKPT_CHECK(ckpt_look(name, &what, err));
        if (what != CKPT_ENTRY_NONE)
            goto done;
    }
    CKPT_CHECK(ckpt_look(dir, &what, err));
    if (what == CKPT_ENTRY_DIR) {
        *path = dir;
        goto done;
    }
    CKPT_CHECK(ckpt_look(file, &what, err));
    if (what != CKPT_ENTRY_NONE)
        *path = file;
done:
    return status;
}

static int64_t iteration_of(const char *path)
{
    const char *name = ckpt_basename(path);
    int64_t n = -1;
    if (strncmp(name, "iter_", 5) != 0 || strspn(name + 5, "0123456789") < 1)
        return -1;
    return sscanf(name + 5, "%18" SCNd64, &n) == 1 ? n : -1;
}

/* A save root whose checkpoint did not open, or that does not say which is its newest: name the others
 * in it, for there is a way on. */
static void name_others(const ckpt_source *src, const ckpt_probe *probe, const char *path,
                        const ckpt_open_opts *opts, ckpt_err *err)
{
    enum { SHOWN = 5 };
    ckpt_arena scratch = {0};
    ckpt_buf list = {0};
    char **names = NULL;
    size_t n = 0, others = 0;
    const char *tried = src->root != NULL ? ckpt_basename(src->root) : "";
    if (err == NULL || !probe->is_dir || opts->container != NULL || iteration_of(path) >= 0 ||
        ckpt_list_dir(path, &scratch, &names, &n, NULL) != CKPT_OK)
        n = 0;
    for (size_t i = n; i-- > 0;) { /* the newest sorts last */
        int64_t at = iteration_of(names[i]);
        const char *suffix = names[i] + strlen(names[i]);
        bool manifest = suffix - names[i] > 5 && strcmp(suffix - 5, ".json") == 0;
        if (at < 0 || manifest || strcmp(names[i], tried) == 0 || at == opts->iteration)
            continue;
        if (others++ < SHOWN)
            ckpt_buf_printf(&list, "%s%" PRId64, others > 1 ? ", " : "", at);
    }
    if (others > 0 && !list.failed) {
        ckpt_err first = *err;
        (void)ckpt_fail(err, first.code, "%s; other iterations here, for --iteration N: %s%s",
                        first.text, (const char *)list.data, others > SHOWN ? ", ..." : "");
    }
    ckpt_buf_release(&list);
    ckpt_arena_free(&scratch);
}

/* What is at the path; of a save root, at its newest iteration, which *path then is. */
static ckpt_status find_container(ckpt_probe *probe, const ckpt_open_opts *opts, ckpt_arena *arena,
                                  const char **path, const ckpt_container **out, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(probe_path(*path, arena, probe, err));
    const char *inside = *path;
    CKPT_CHECK(enter_root(probe, opts, arena, &inside, err));
    if (inside != *path) {
        *path = inside;
        CKPT_CHECK(probe_path(*path, arena, probe, err));
    }
    CKPT_CHECK(opts->container != NULL ? forced(opts->container, out, err)
                                       : choose(probe, out, err));
done:
    return status;
}

ckpt_status ckpt_source_probe(const char *path, const ckpt_container **out, ckpt_err *err)
{
    static const ckpt_open_opts defaults = {.iteration = -1};
    ckpt_arena arena = {0};
    ckpt_probe probe = {0};
    const char *at = path;
    ckpt_status status = find_container(&probe, &defaults, &arena, &at, out, err);
    if (status != CKPT_OK)
        frame_path(err, path);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_source_open(ckpt_source *src, const char *path, const ckpt_open_opts *opts,
                             ckpt_err *err)
{
    static const ckpt_open_opts defaults = {.iteration = -1};
    ckpt_probe probe = {0};
    ckpt_status status = CKPT_OK;
    *src = (ckpt_source){.iteration = -1};
    if (opts == NULL)
        opts = &defaults;
    src->path = ckpt_arena_strdup(&src->arena, path);
    if (src->path == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(find_container(&probe, opts, &src->arena, &src->path, &src->container, err));
    src->is_dir = probe.is_dir;
    src->root = src->path;
    CKPT_CHECK(src->container->open(src, opts, err));
    if (src->iteration < 0)
        src->iteration = iteration_of(src->path);
    CKPT_CHECK(check_tables(src, err));
done:
    if (status != CKPT_OK) {
        frame_path(err, path);
        if (status == CKPT_E_FORMAT || status == CKPT_E_IO || status == CKPT_E_USAGE)
            name_others(src, &probe, path, opts, err);
        ckpt_source_close(src);
    }
    return status;
}

void ckpt_source_close(ckpt_source *src)
{
    if (src->close != NULL)
        src->close(src);
    for (size_t i = 0; i < src->n_files; i++)
        if (src->files[i].fd >= 0)
            close(src->files[i].fd);
    ckpt_json_free(src->config);
    ckpt_json_free(src->common);
    ckpt_json_free(src->metadata);
    ckpt_arena_free(&src->arena);
    *src = (ckpt_source){.iteration = -1};
}
