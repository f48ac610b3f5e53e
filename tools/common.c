#include "tool.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- input ----------------------------------------------------------------------------------- */

void ckpt_tool_frame(ckpt_err *err, const char *path)
{
    if (strncmp(err->text, path, strlen(path)) != 0)
        ckpt_err_frame(err, "%s", path);
}

ckpt_status ckpt_tool_open(ckpt_tool *tool, ckpt_source *src, const char *path, int64_t iteration,
                           ckpt_err *err)
{
    ckpt_open_opts opts = {.iteration = iteration};
    (void)tool;
    ckpt_status status = ckpt_source_open(src, path, &opts, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, path);
    return status;
}

ckpt_status ckpt_tool_bind(ckpt_tool *tool, ckpt_model *model, ckpt_source *src,
                           const ckpt_model_opts *opts, ckpt_err *err)
{
    (void)tool;
    ckpt_status status = ckpt_model_bind(model, src, opts, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, src->path);
    return status;
}

ckpt_status ckpt_tool_check_objects(const ckpt_source *src, ckpt_err *err)
{
    ckpt_buf names = {0};
    size_t n = 0;
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        if (o->unknown_global == NULL)
            continue;
        if (n++ < 8)
            ckpt_buf_printf(&names, "%s'%s' (%s)", n > 1 ? ", " : "", o->name, o->unknown_global);
    }
    if (n > 8)
        ckpt_buf_printf(&names, " and %zu more", n - 8);
    ckpt_status status = CKPT_OK;
    if (n > 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "%s: pickled object outside the allow-list: %s; "
                           "--allow-unknown-objects carries its bytes",
                           src->path, names.data != NULL ? (const char *)names.data : "?");
    ckpt_buf_release(&names);
    return status;
}

ckpt_stream_opts ckpt_tool_stream(const ckpt_tool *tool, const ckpt_bar *bar)
{
    return (ckpt_stream_opts){.threads = (int)tool->g.threads,
                              .memory = tool->g.memory,
                              .progress = bar != NULL && bar->on ? &bar->progress : NULL};
}

/* ---- output ---------------------------------------------------------------------------------- */

static void CKPT_PRINTF(3, 0) say(ckpt_tool *tool, const char *kind, const char *fmt, va_list ap)
{
    ckpt_buf b = {0};
    ckpt_arena scratch = {0};
    ckpt_buf_vprintf(&b, fmt, ap);
    if (b.data != NULL)
        fprintf(stderr, "ckpt: %s: %s%s\n", tool->command->name, kind,
                ckpt_clean(&scratch, (const char *)b.data));
    ckpt_arena_free(&scratch);
    ckpt_buf_release(&b);
}

void ckpt_tool_warn(ckpt_tool *tool, const char *fmt, ...)
{
    va_list ap;
    if (tool->g.quiet)
        return;
    va_start(ap, fmt);
    say(tool, "warning: ", fmt, ap);
    va_end(ap);
}

void ckpt_tool_note(ckpt_tool *tool, const char *fmt, ...)
{
    va_list ap;
    if (tool->g.quiet)
        return;
    va_start(ap, fmt);
    say(tool, "", fmt, ap);
    va_end(ap);
}

bool ckpt_tool_text(const ckpt_tool *tool)
{
    return !tool->g.json && !tool->g.quiet;
}

void ckpt_tool_warnings(ckpt_tool *tool, const ckpt_source *src)
{
    for (size_t i = 0; i < src->n_warnings; i++)
        ckpt_tool_warn(tool, "%s: %s", src->path, src->warnings[i]);
}

const char *ckpt_tool_clean(ckpt_tool *tool, const char *s)
{
    return ckpt_clean(&tool->arena, s);
}

/* ---- small things ---------------------------------------------------------------------------- */

bool ckpt_glob(const char *pattern, const char *name)
{
    return strcmp(pattern, name) == 0 || fnmatch(pattern, name, 0) == 0;
}

bool ckpt_glob_any(const ckpt_strings *patterns, const char *name)
{
    for (size_t i = 0; i < patterns->n; i++)
        if (ckpt_glob(patterns->items[i], name))
            return true;
    return false;
}

bool ckpt_tool_selected(const ckpt_model *model, size_t tensor, const ckpt_strings *include,
                        const ckpt_strings *exclude)
{
    const ckpt_canon *t = &model->tensors[tensor];
    const char *stored = model->src->tensors[t->stored].name;
    if (include->n > 0 && !ckpt_glob_any(include, t->name) && !ckpt_glob_any(include, stored))
        return false;
    return !ckpt_glob_any(exclude, t->name) && !ckpt_glob_any(exclude, stored);
}

const char *ckpt_tool_mesh(ckpt_arena *arena, const ckpt_mesh *mesh)
{
    const struct {
        const char *name;
        int size;
    } axes[] = {
        {"tp",  mesh->tp },
        {"pp",  mesh->pp },
        {"ep",  mesh->ep },
        {"etp", mesh->etp},
        {"cp",  mesh->cp },
        {"dp",  mesh->dp }
    };
    char text[160] = "";
    size_t n = 0;
    for (size_t i = 0; i < sizeof axes / sizeof axes[0]; i++)
        if (axes[i].size > 1)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %d", n > 0 ? ", " : "",
                                  axes[i].name, axes[i].size);
    const char *copy = n > 0 ? ckpt_arena_strdup(arena, text) : "1";
    return copy != NULL ? copy : "?";
}

static int at_least_one(int n)
{
    return n > 0 ? n : 1;
}

void ckpt_tool_json_mesh(ckpt_jw *w, const ckpt_mesh *mesh)
{
    ckpt_jw_open(w, "mesh", '{');
    ckpt_jw_int(w, "tp", at_least_one(mesh->tp));
    ckpt_jw_int(w, "pp", at_least_one(mesh->pp));
    ckpt_jw_int(w, "ep", at_least_one(mesh->ep));
    ckpt_jw_int(w, "etp", at_least_one(mesh->etp));
    ckpt_jw_int(w, "cp", at_least_one(mesh->cp));
    ckpt_jw_close(w, '}');
}

ckpt_status ckpt_tool_no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

ckpt_status ckpt_tool_write_file(const char *path, const void *p, size_t n, ckpt_err *err)
{
    ckpt_status status;
    ckpt_commit commit = {0};
    CKPT_CHECK(ckpt_commit_begin(&commit, path, false, true, err));
    CKPT_CHECK(ckpt_commit_write(&commit, NULL, p, n, err));
    CKPT_CHECK(ckpt_commit_finish(&commit, err));
done:
    ckpt_commit_abort(&commit);
    return status;
}

ckpt_status ckpt_tool_file_digest(const char *path, uint8_t out[CKPT_SHA256_LEN], uint64_t *size,
                                  ckpt_err *err)
{
    enum { BLOCK = 1 << 20 };
    ckpt_status status;
    int fd = -1;
    ckpt_sha256 sha = {0};
    uint8_t *block = malloc(BLOCK);
    if (block == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_sha256_init(&sha, err));
    CKPT_CHECK(ckpt_open_read(path, &fd, size, err));
    for (uint64_t at = 0; at < *size;) {
        size_t n = *size - at < BLOCK ? (size_t)(*size - at) : BLOCK;
        CKPT_TRY(ckpt_check_interrupted(err), "%s", path);
        CKPT_TRY(ckpt_pread_full(fd, block, n, at, err), "%s", path);
        ckpt_sha256_update(&sha, block, n);
        at += n;
    }
    ckpt_sha256_final(&sha, out);
done:
    if (fd >= 0)
        close(fd);
    ckpt_sha256_release(&sha);
    free(block);
    return status;
}

const char *ckpt_tool_index(ckpt_arena *arena, int rank, const int64_t *dims, int64_t flat)
{
    int64_t index[CKPT_MAX_RANK];
    for (int d = rank - 1; d >= 0; d--) {
        index[d] = dims[d] > 0 ? flat % dims[d] : 0;
        flat = dims[d] > 0 ? flat / dims[d] : 0;
    }
    return ckpt_shape(arena, rank, index);
}

bool ckpt_tool_packed(ckpt_dtype dtype)
{
    return ckpt_dtype_get(dtype)->bits % 8 != 0;
}
