/* Before and after a conversion: are source and destination apart, and is what was written what
 * was planned? */
#include "convert.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Of deflate: beyond it weights hardly shrink for the time it takes. */
#define DEFAULT_LEVEL 4

/* ---- source and destination ------------------------------------------------------------------ */

/* Canonical path of something that may not exist yet: its parent's, plus the last name. */
static bool resolve(const char *path, char out[PATH_MAX])
{
    char copy[PATH_MAX], parent[PATH_MAX];
    size_t n = strlen(path);
    if (realpath(path, out) != NULL)
        return true;
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n >= sizeof copy)
        return false;
    memcpy(copy, path, n);
    copy[n] = '\0';
    char *slash = strrchr(copy, '/');
    const char *name = slash != NULL ? slash + 1 : copy;
    const char *dir = slash == NULL ? "." : slash == copy ? "/" : copy;
    if (slash != NULL && slash != copy)
        *slash = '\0';
    if (realpath(dir, parent) == NULL)
        return false;
    int len = snprintf(out, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, name);
    return len > 0 && len < PATH_MAX;
}

static bool is_inside(const char *path, const char *dir)
{
    size_t n = strlen(dir);
    if (strcmp(dir, "/") == 0)
        return true;
    return strncmp(path, dir, n) == 0 && path[n] == '/';
}

static bool same_file(const char *a, const char *b)
{
    struct stat sa, sb;
    return stat(a, &sa) == 0 && stat(b, &sb) == 0 && sa.st_dev == sb.st_dev &&
           sa.st_ino == sb.st_ino;
}

ckpt_status ckpt_convert_apart(const char *src, const char *dst, ckpt_err *err)
{
    char rs[PATH_MAX], rd[PATH_MAX];
    if (same_file(src, dst))
        return ckpt_fail(err, CKPT_E_USAGE, "%s: source and destination are the same", dst);
    if (!resolve(src, rs) || !resolve(dst, rd))
        return CKPT_OK; /* opening either says why */
    if (strcmp(rs, rd) == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: source and destination are the same", dst);
    if (is_inside(rd, rs))
        return ckpt_fail(err, CKPT_E_USAGE, "%s: the destination lies inside the source", dst);
    if (is_inside(rs, rd))
        return ckpt_fail(err, CKPT_E_USAGE, "%s: the source lies inside the destination", dst);
    return CKPT_OK;
}

ckpt_status ckpt_convert_apart_files(const ckpt_source *src, const char *dst, ckpt_err *err)
{
    char rd[PATH_MAX], rf[PATH_MAX];
    if (!resolve(dst, rd))
        return CKPT_OK;
    for (size_t i = 0; i < src->n_files; i++) {
        const char *path = src->files[i].path;
        if (same_file(path, dst))
            return ckpt_fail(err, CKPT_E_USAGE, "%s: the destination is the source's file %s", dst,
                             src->files[i].name);
        if (realpath(path, rf) != NULL && is_inside(rf, rd))
            return ckpt_fail(err, CKPT_E_USAGE,
                             "%s: the source's file %s lies inside the "
                             "destination",
                             dst, src->files[i].name);
    }
    return CKPT_OK;
}

static size_t stars(const char *s, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += s[i] == '*';
    return count;
}

ckpt_status ckpt_convert_check_rename(const char *rule, ckpt_err *err)
{
    const char *eq = strchr(rule, '=');
    if (eq == NULL || eq == rule || eq[1] == '\0')
        return ckpt_fail(err, CKPT_E_USAGE, "--rename '%s' is not FROM=TO", rule);
    size_t from = stars(rule, (size_t)(eq - rule)), to = stars(eq + 1, strlen(eq + 1));
    if (from > 1 || to > 1)
        return ckpt_fail(err, CKPT_E_USAGE, "--rename '%s': more than one '*' on a side", rule);
    if (to > from)
        return ckpt_fail(err, CKPT_E_USAGE, "--rename '%s': TO has a '*' and FROM has none", rule);
    return CKPT_OK;
}

ckpt_status ckpt_convert_target(const char *dst, bool force, ckpt_err *err)
{
    char parent[PATH_MAX];
    struct stat st;
    const char *base = ckpt_basename(dst);
    size_t n = (size_t)(base - dst);
    if (!force && lstat(dst, &st) == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: exists; --force replaces it", dst);
    if (!force && errno != ENOENT && errno != ENOTDIR)
        return ckpt_fail_errno(err, errno, "%s", dst);
    if (n >= sizeof parent)
        return ckpt_fail_errno(err, ENAMETOOLONG, "%s", dst);
    while (n > 1 && dst[n - 1] == '/')
        n--;
    memcpy(parent, n > 0 ? dst : ".", n > 0 ? n : 1);
    parent[n > 0 ? n : 1] = '\0';
    if (stat(parent, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", parent);
    if (!S_ISDIR(st.st_mode))
        return ckpt_fail_errno(err, ENOTDIR, "%s", parent);
    if (access(parent, W_OK | X_OK) != 0)
        return ckpt_fail_errno(err, errno, "%s", parent);
    return CKPT_OK;
}

static bool ends_in(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

/* Names of single files, and the container that writes them. */
static const struct {
    const char *suffix, *container;
} file_names[] = {
    {".safetensors", "safetensors"},
    {".pt",          "torch"      },
    {".pth",         "torch"      },
    {".h5",          "hdf5"       },
    {".hdf5",        "hdf5"       },
    {".bin",         "torch"      },
};

const char *ckpt_convert_named(const char *dst)
{
    for (size_t i = 0; i < sizeof file_names / sizeof file_names[0]; i++)
        if (ends_in(dst, file_names[i].suffix))
            return file_names[i].container;
    return NULL;
}

ckpt_status ckpt_convert_compression(const char *text, const ckpt_container *container, int *level,
                                     ckpt_err *err)
{
    static const char word[] = "shuffle-deflate";
    *level = 0;
    if (text == NULL || strcmp(text, "none") == 0)
        return CKPT_OK;
    const char *rest = text + strnlen(text, sizeof word - 1);
    bool has_level = rest[0] == ':' && rest[1] >= '1' && rest[1] <= '9' && rest[2] == '\0';
    if (strncmp(text, word, sizeof word - 1) != 0 || (*rest != '\0' && !has_level))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "--compress '%s' is neither none nor shuffle-deflate[:1-9]", text);
    if (strcmp(container->name, "hdf5") != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--compress: container %s is not compressed",
                         container->name);
    *level = has_level ? rest[1] - '0' : DEFAULT_LEVEL;
    return CKPT_OK;
}

/* ---- the source and its manifest --------------------------------------------------------------- */

static void name_field(ckpt_buf *b, size_t *n, const char *key)
{
    enum { SHOWN = 4 };
    if (*n < SHOWN)
        ckpt_buf_printf(b, "%s'%s'", *n > 0 ? ", " : "", key);
    else if (*n == SHOWN)
        ckpt_buf_puts(b, ", …");
    ++*n;
}

ckpt_status ckpt_convert_check_config(const ckpt_model *model, const ckpt_manifest *old,
                                      ckpt_err *err)
{
    ckpt_status status;
    size_t n = 0;
    ckpt_buf fields = {0};
    uint8_t a[CKPT_SHA256_LEN], b[CKPT_SHA256_LEN];
    const ckpt_json *own = model->config, *stated = old->config;
    if (model->layout == NULL || model->src->config == NULL || own == NULL || stated == NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_config_digest(own, a, err));
    CKPT_CHECK(ckpt_config_digest(stated, b, err));
    if (memcmp(a, b, sizeof a) == 0)
        goto done;
    for (const ckpt_json *c = ckpt_json_child(own); c != NULL; c = ckpt_json_next(c))
        if (!ckpt_json_equal(c, ckpt_json_get(stated, ckpt_json_key(c))))
            name_field(&fields, &n, ckpt_json_key(c));
    for (const ckpt_json *c = ckpt_json_child(stated); c != NULL; c = ckpt_json_next(c))
        if (ckpt_json_get(own, ckpt_json_key(c)) == NULL)
            name_field(&fields, &n, ckpt_json_key(c));
    status = ckpt_fail(err, CKPT_E_MISMATCH,
                       "%s: the configuration contradicts the source's manifest in %s; --force "
                       "converts it anyway",
                       model->src->path, fields.data != NULL ? (const char *)fields.data : "?");
done:
    ckpt_buf_release(&fields);
    return status;
}

static ckpt_status replica_differs(void *self, const ckpt_replica *r, ckpt_err *err)
{
    const ckpt_source *src = self;
    if (ckpt_source_find(src, r->name) < 0) /* taken out with the optimizer */
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_MISMATCH,
                     "%s: tensor '%s': the copy in %s differs from that in %s; --force takes the "
                     "latter",
                     src->path, r->name, src->files[r->other.file].name,
                     src->files[r->first.file].name);
}

ckpt_status ckpt_convert_check_replicas(ckpt_source *src, bool force, ckpt_err *err)
{
    ckpt_status status = force ? CKPT_OK : ckpt_replicas_compare(src, replica_differs, src, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, src->path);
    return status;
}

/* ---- after writing --------------------------------------------------------------------------- */

static ckpt_status compare_tensor(const ckpt_tensor *t, const ckpt_out_tensor *o, ckpt_err *err)
{
    bool same = t->dtype == o->dtype && t->rank == o->rank;
    for (int d = 0; same && d < t->rank; d++)
        same = t->dims[d] == o->dims[d];
    if (same)
        return CKPT_OK;
    ckpt_arena scratch = {0};
    ckpt_status status =
        ckpt_fail(err, CKPT_E_INTERNAL, "written tensor '%s' reads back as %s %s, planned %s %s",
                  o->name, ckpt_dtype_get(t->dtype)->name, ckpt_shape(&scratch, t->rank, t->dims),
                  ckpt_dtype_get(o->dtype)->name, ckpt_shape(&scratch, o->rank, o->dims));
    ckpt_arena_free(&scratch);
    return status;
}

ckpt_status ckpt_convert_reopen(ckpt_tool *tool, const ckpt_plan *plan,
                                const ckpt_container *container, const char *path, ckpt_err *err)
{
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_open_opts opts = {.iteration = -1, .container = container->name};
    (void)tool;
    CKPT_TRY(ckpt_source_open(&src, path, &opts, err), "checking what was written");
    for (size_t i = 0; i < plan->out.n_tensors; i++) {
        int64_t at = ckpt_source_find(&src, plan->out.tensors[i].name);
        if (at < 0) {
            status =
                ckpt_fail(err, CKPT_E_INTERNAL, "planned tensor '%s' is not in what was written",
                          plan->out.tensors[i].name);
            goto done;
        }
        CKPT_CHECK(compare_tensor(&src.tensors[at], &plan->out.tensors[i], err));
    }
    if (src.n_tensors != plan->out.n_tensors)
        status = ckpt_fail(err, CKPT_E_INTERNAL, "%zu tensors were written, %zu planned",
                           src.n_tensors, plan->out.n_tensors);
done:
    ckpt_source_close(&src);
    return status;
}

static ckpt_status compare_files(const ckpt_manifest *m, const char *path, const char *dir,
                                 ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    const char *base = dir == NULL    ? path
                       : *dir != '\0' ? ckpt_path_join(&scratch, path, dir)
                                      : path;
    for (size_t i = 0; i < m->n_files && base != NULL; i++) {
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size = 0;
        const char *file = dir == NULL ? path : ckpt_path_join(&scratch, base, m->files[i].name);
        if (file == NULL) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
        CKPT_CHECK(ckpt_tool_file_digest(file, digest, &size, err));
        if (size != m->files[i].size || memcmp(digest, m->files[i].sha256, sizeof digest) != 0) {
            status = ckpt_fail(err, CKPT_E_IO, "%s: reads back differently from what was written",
                               m->files[i].name);
            goto done;
        }
    }
done:
    ckpt_arena_free(&scratch);
    return status;
}

static ckpt_status compare_tensors(ckpt_tool *tool, const ckpt_manifest *m, const ckpt_model *model,
                                   ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_bar bar;
    ckpt_tensor_hash *hashes = ckpt_arena_array(&tool->arena, model->n_tensors + 1, sizeof *hashes);
    if (hashes == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_bar_start(&bar, "verify", tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(tool, &bar);
    status = ckpt_stream_digest(model, &opts, &tool->arena, hashes, NULL, err);
    ckpt_bar_stop(&bar);
    for (size_t i = 0; status == CKPT_OK && i < model->n_tensors; i++) {
        int64_t at = ckpt_manifest_find_tensor(m, model->tensors[i].name);
        if (at < 0 || memcmp(m->tensors[at].hash.digest, hashes[i].digest, CKPT_SHA256_LEN) != 0)
            status = ckpt_fail(err, CKPT_E_IO, "tensor '%s' reads back differently",
                               model->tensors[i].name);
    }
    if (status == CKPT_OK && model->n_tensors != m->n_tensors)
        status = ckpt_fail(err, CKPT_E_INTERNAL, "%zu tensors read back, %zu written",
                           model->n_tensors, m->n_tensors);
    return status;
}

ckpt_status ckpt_convert_reread(ckpt_tool *tool, const ckpt_manifest *m,
                                const ckpt_container *container, const ckpt_layout *layout,
                                const char *path, const char *dir, bool filtered, ckpt_err *err)
{
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_open_opts opts = {.iteration = -1, .container = container->name};
    ckpt_model_opts bind = {
        .layout = layout, .allow_unknown = true, .fp8_raw = ckpt_tool_is_fp8(m)};
    if (layout == NULL)
        bind.layout_group = ""; /* no layout's: names stay as stored */
    CKPT_CHECK(compare_files(m, path, dir, err));
    if (filtered)
        goto done;
    CKPT_TRY(ckpt_source_open(&src, path, &opts, err), "checking what was written");
    CKPT_TRY(ckpt_model_bind(&model, &src, &bind, err), "checking what was written");
    CKPT_CHECK(compare_tensors(tool, m, &model, err));
done:
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}
