#include "shard.h"
#include "tool.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CACHE_SHARE 3 /* of --memory, for what a source decodes */

/* ---- input ----------------------------------------------------------------------------------- */

void ckpt_tool_frame(ckpt_err *err, const char *path)
{
    if (strncmp(err->text, path, strlen(path)) != 0)
        ckpt_err_frame(err, "%s", path);
}

/* A .distcp file can pass for a torch file with one of its tensors in it. */
static ckpt_status refuse_part(ckpt_tool *tool, const char *path, ckpt_err *err)
{
    const char *name = ckpt_basename(path);
    size_t n = strlen(name), keep = (size_t)(name - path);
    bool metadata = strcmp(name, ".metadata") == 0;
    if (!metadata && (n < 7 || strcmp(name + n - 7, ".distcp") != 0))
        return CKPT_OK;
    const char *dir = keep == 0 ? "." : ckpt_arena_strndup(&tool->arena, path, keep);
    char *beside = dir != NULL ? ckpt_path_join(&tool->arena, dir, ".metadata") : NULL;
    if (beside == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_entry what;
    ckpt_status status = ckpt_look(path, &what, err);
    if (status != CKPT_OK || what != CKPT_ENTRY_FILE)
        return status;
    status = ckpt_look(beside, &what, err);
    if (status != CKPT_OK || what == CKPT_ENTRY_NONE)
        return status;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "%s: one file of a torch_dist checkpoint; open its directory, %s", path, dir);
}

ckpt_status ckpt_tool_open(ckpt_tool *tool, ckpt_source *src, const char *path, int64_t iteration,
                           ckpt_err *err)
{
    ckpt_open_opts opts = {.iteration = iteration};
    ckpt_status status = refuse_part(tool, path, err);
    if (status != CKPT_OK)
        return status;
    status = ckpt_source_open(src, path, &opts, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, path);
    src->cache_bytes = tool->g.memory / CACHE_SHARE;
    return status;
}

/* ---- what the manifest beside the data adds ---------------------------------------------------- */

static ckpt_status CKPT_PRINTF(3, 4)
    add_note(ckpt_model *model, ckpt_err *err, const char *fmt, ...)
{
    ckpt_buf b = {0};
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&b, fmt, ap);
    va_end(ap);
    size_t cap = model->n_notes;
    void *notes = model->notes;
    ckpt_status status = ckpt_grow(&notes, &cap, model->n_notes + 1, sizeof *model->notes, err);
    model->notes = notes;
    char *text = b.failed ? NULL : ckpt_arena_strndup(&model->arena, (const char *)b.data, b.len);
    ckpt_buf_release(&b);
    if (status == CKPT_OK && text == NULL)
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK)
        model->notes[model->n_notes++] = text;
    return status;
}

#define MISSING "missing tensor "

static bool is_missing(const char *note)
{
    return strncmp(note, MISSING, sizeof MISSING - 1) == 0;
}

static const ckpt_layout *layout_named(const char *name)
{
    for (size_t i = 0; name != NULL && ckpt_layouts[i] != NULL; i++)
        if (strcmp(ckpt_layouts[i]->name, name) == 0)
            return ckpt_layouts[i];
    return NULL;
}

static bool lists_exactly(const ckpt_manifest *m, const ckpt_model *model)
{
    if (m->n_tensors != model->n_tensors)
        return false;
    for (size_t i = 0; i < model->n_tensors; i++)
        if (ckpt_manifest_find_tensor(m, model->tensors[i].name) < 0)
            return false;
    return true;
}

/* Nothing but absence is forgiven: any other contradiction stays an error. */
static bool only_missing(const ckpt_model *model)
{
    for (size_t i = 0; i < model->n_notes; i++)
        if (!is_missing(model->notes[i]))
            return false;
    return true;
}

/* One note in place of one a missing tensor. */
static ckpt_status note_partial(ckpt_model *model, ckpt_err *err)
{
    enum { SHOWN = 4 };
    ckpt_status status;
    ckpt_buf b = {0};
    size_t n = 0, kept = 0;
    for (size_t i = 0; i < model->n_notes; i++) {
        if (!is_missing(model->notes[i])) {
            model->notes[kept++] = model->notes[i];
            continue;
        }
        if (n++ < SHOWN)
            ckpt_buf_printf(&b, "%s%s", n > 1 ? ", " : "", model->notes[i] + sizeof MISSING - 1);
    }
    model->n_notes = kept;
    if (n > SHOWN)
        ckpt_buf_printf(&b, " and more");
    if (n == 0) /* whole: the manifest had to say which of several layouts it is */
        return CKPT_OK;
    status = add_note(model, err, "partial: the manifest lists %zu tensor%s, missing %s",
                      model->n_tensors, ckpt_tool_plural(model->n_tensors),
                      b.data != NULL ? (const char *)b.data : "?");
    ckpt_buf_release(&b);
    return status;
}

bool ckpt_tool_is_fp8(const ckpt_manifest *m)
{
    for (size_t i = 0; i < m->n_tensors; i++)
        if (m->tensors[i].dtype == CKPT_F8_E4M3)
            return true;
    return false;
}

static bool is_whole(const ckpt_model *model)
{
    for (size_t i = 0; i < model->n_notes; i++)
        if (is_missing(model->notes[i]))
            return false;
    return model->layout != NULL;
}

/* What `convert --include` wrote lacks tensors on purpose. When the manifest lists exactly what is
 * there, that is not damage. *partial tells whether the model was bound in this way. */
static ckpt_status bind_partial(ckpt_model *out, ckpt_source *src, const ckpt_model_opts *opts,
                                const ckpt_manifest *m, bool *partial, ckpt_err *err)
{
    ckpt_model_opts bind = *opts;
    *partial = false;
    bind.layout = layout_named(m->layout);
    bind.lenient = true;
    if (bind.layout == NULL || ckpt_model_bind(out, src, &bind, NULL) != CKPT_OK)
        return CKPT_OK;
    *partial = lists_exactly(m, out) && (opts->lenient || only_missing(out)) &&
               (opts->lenient || opts->allow_unknown || out->n_extras == 0);
    if (*partial)
        return note_partial(out, err);
    ckpt_model_release(out);
    return CKPT_OK;
}

/* A source without a configuration of its own may fit several layouts: the manifest knows which one
 * was written. */
static bool bind_named(ckpt_model *model, ckpt_source *src, const ckpt_model_opts *opts,
                       const ckpt_manifest *m)
{
    ckpt_model other = {0};
    ckpt_model_opts bind = *opts;
    bind.layout = layout_named(m->layout);
    if (bind.layout == NULL || src->config != NULL ||
        ckpt_model_bind(&other, src, &bind, NULL) != CKPT_OK || !lists_exactly(m, &other)) {
        ckpt_model_release(&other);
        return false;
    }
    ckpt_model_release(model);
    *model = other;
    return true;
}

/* Resharding leaves the training arguments as they were, so the manifest knows better. */
static ckpt_status take_mesh(ckpt_model *model, const ckpt_manifest *m, ckpt_err *err)
{
    const ckpt_source *src = model->src;
    ckpt_status status = CKPT_OK;
    if (src->config_kind != CKPT_CONFIG_MEGATRON || m->container == NULL ||
        strcmp(m->container, src->container->name) != 0)
        return CKPT_OK;
    int64_t embed = ckpt_model_find(model, "embed.weight");
    size_t cuts = embed >= 0 ? src->tensors[model->tensors[embed].stored].n_chunks : 0;
    if (cuts > 0 && (int64_t)cuts != m->mesh.tp)
        status = add_note(model, err, "mesh: the manifest says tp %d, the embedding is cut in %zu",
                          m->mesh.tp, cuts);
    model->mesh = m->mesh;
    return status;
}

/* A table of the user's is no layout of the program's, and neither is what it wrote. */
const char *ckpt_tool_odd_layout(ckpt_arena *arena, const ckpt_model *model, const ckpt_manifest *m)
{
    if (m->layout == NULL || model->layout == NULL || strcmp(m->layout, model->layout->name) == 0 ||
        layout_named(m->layout) != NULL)
        return NULL;
    return ckpt_arena_printf(arena, "it says layout '%.80s', and the tensors are %s's", m->layout,
                             model->layout->name);
}

static const char *other_size(ckpt_arena *arena, const ckpt_model *model, const ckpt_manifest *m)
{
    const ckpt_source *src = model->src;
    for (size_t i = 0; i < ckpt_source_n_real(src); i++) {
        int64_t at = ckpt_manifest_find_file(m, src->files[i].name);
        if (at >= 0 && m->files[at].size != src->files[i].size)
            return ckpt_arena_printf(arena, "%s has %llu bytes, it says %llu", src->files[i].name,
                                     (unsigned long long)src->files[i].size,
                                     (unsigned long long)m->files[at].size);
    }
    return NULL;
}

static const char *other_tensor(ckpt_arena *arena, const ckpt_model *model, const ckpt_manifest *m)
{
    for (size_t i = 0; i < model->n_tensors && model->layout != NULL && !ckpt_tool_is_fp8(m); i++) {
        const ckpt_canon *t = &model->tensors[i];
        int64_t at = ckpt_manifest_find_tensor(m, t->name);
        const ckpt_manifest_tensor *said = at >= 0 ? &m->tensors[at] : NULL;
        if (said == NULL)
            return ckpt_arena_printf(arena, "it does not know tensor '%s'", t->name);
        if (said->dtype != t->dtype || said->rank != t->rank ||
            memcmp(said->dims, t->dims, (size_t)t->rank * sizeof *t->dims) != 0)
            return ckpt_arena_printf(
                arena, "tensor '%s' is %s %s, it says %s %s", t->name,
                ckpt_dtype_get(t->dtype)->name, ckpt_shape(arena, t->rank, t->dims),
                ckpt_dtype_get(said->dtype)->name, ckpt_shape(arena, said->rank, said->dims));
    }
    return NULL;
}

static const char *contradiction(ckpt_arena *arena, const ckpt_model *model, const ckpt_manifest *m)
{
    const char *text = ckpt_tool_odd_layout(arena, model, m);
    text = text != NULL ? text : other_size(arena, model, m);
    return text != NULL ? text : other_tensor(arena, model, m);
}

static void tell_manifest(ckpt_tool *tool, const ckpt_model *model, const ckpt_manifest *m,
                          bool found, const ckpt_err *why)
{
    ckpt_arena scratch = {0};
    const char *path = ckpt_manifest_path(model->src, &scratch);
    const char *text = found ? contradiction(&scratch, model, m) : NULL;
    if (why->text[0] != '\0')
        ckpt_tool_warn(tool, "%s; it is ignored", why->text);
    else if (text != NULL)
        ckpt_tool_warn(tool, "%s: contradicts what is there: %s; `ckpt verify` tells all",
                       path != NULL ? path : model->src->path, text);
    ckpt_arena_free(&scratch);
}

ckpt_status ckpt_tool_bind(ckpt_tool *tool, ckpt_model *model, ckpt_source *src,
                           const ckpt_model_opts *opts, ckpt_err *err)
{
    static const ckpt_model_opts defaults = {0};
    ckpt_manifest manifest = {0};
    bool found = false, partial = false;
    ckpt_err unreadable = {0};
    ckpt_model_opts with = opts != NULL ? *opts : defaults;
    opts = &with;
    /* a manifest that cannot be read is reported by the commands that compare with it */
    if (ckpt_manifest_load(src, &manifest, &found, &unreadable) != CKPT_OK)
        found = false;
    if (found && ckpt_json_child(src->config) == NULL)
        with.config = manifest.config;
    ckpt_status status = ckpt_model_bind(model, src, opts, err);
    bool free_choice = opts->layout == NULL && opts->layout_group == NULL;
    if (found && free_choice && status == CKPT_E_UNSUPPORTED &&
        bind_named(model, src, opts, &manifest)) {
        if (err != NULL)
            *err = (ckpt_err){0};
        status = CKPT_OK;
    }
    if (found && free_choice && status != CKPT_E_NOMEM && status != CKPT_E_IO &&
        status != CKPT_E_INTERRUPTED && (status != CKPT_OK || !is_whole(model))) {
        ckpt_model other = {0};
        ckpt_err why = {0};
        ckpt_status again = bind_partial(&other, src, opts, &manifest, &partial, &why);
        if (partial) {
            ckpt_model_release(model);
            *model = other;
            status = again;
            if (err != NULL)
                *err = why;
        }
    }
    if (found && status == CKPT_OK)
        status = take_mesh(model, &manifest, err);
    if (status == CKPT_OK && tool->tells_manifest && tool->manifest_told != src) {
        tell_manifest(tool, model, &manifest, found, &unreadable);
        tool->manifest_told = src;
    }
    ckpt_manifest_release(&manifest);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, src->path);
    return status;
}

ckpt_status ckpt_tool_bind_like(ckpt_tool *tool, ckpt_model *model, ckpt_source *src,
                                const ckpt_model_opts *opts, const ckpt_model *like, bool *as_like,
                                ckpt_err *err)
{
    ckpt_model other = {0};
    ckpt_model_opts with = {
        .layout = like->layout, .config = like->config, .allow_unknown = opts->allow_unknown};
    ckpt_status status = ckpt_tool_bind(tool, model, src, opts, err);
    bool open_question = status == CKPT_E_UNSUPPORTED || status == CKPT_E_FORMAT ||
                         (status == CKPT_OK && model->layout == NULL);
    *as_like = false;
    if (!open_question || like->layout == NULL || src->config != NULL)
        return status;
    if (ckpt_model_bind(&other, src, &with, NULL) != CKPT_OK) {
        ckpt_model_release(&other);
        return status;
    }
    ckpt_model_release(model);
    *model = other;
    *err = (ckpt_err){0};
    *as_like = true;
    return CKPT_OK;
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
                              .share = tool->share,
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

bool ckpt_tool_key_is_guess(const char *key)
{
    return strcmp(key, "tied") == 0;
}

/* "blocks.3.kda.q.weight" -> "kda"; "model.layers.3.mlp.up.weight" -> "model.layers.*.mlp". */
const char *ckpt_tool_module(ckpt_arena *arena, const char *name, bool canonical)
{
    char out[256];
    size_t n = 0;
    int parts = 0;
    if (canonical && strncmp(name, "blocks.", 7) == 0) {
        const char *kind = strchr(name + 7, '.');
        if (kind != NULL)
            return ckpt_arena_strndup(arena, kind + 1, strcspn(kind + 1, "."));
    }
    for (const char *p = name; *p != '\0' && parts < (canonical ? 1 : 4); parts++) {
        size_t len = strcspn(p, ".");
        bool number = len > 0 && strspn(p, "0123456789") == len;
        bool last = p[len] == '\0';
        if ((last && parts > 0) || n + len + 2 > sizeof out)
            break;
        if (n > 0)
            out[n++] = '.';
        memcpy(out + n, number ? "*" : p, number ? 1 : len);
        n += number ? 1 : len;
        p += len + !last;
    }
    return ckpt_arena_strndup(arena, out, n);
}

uint64_t ckpt_tool_draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

bool ckpt_tool_markup(ckpt_buf *out, unsigned char c)
{
    const char *name = c == '&'   ? "&amp;"
                       : c == '<' ? "&lt;"
                       : c == '>' ? "&gt;"
                       : c == '"' ? "&quot;"
                                  : NULL;
    if (name != NULL)
        ckpt_buf_puts(out, name);
    return name != NULL;
}

const char *ckpt_tool_plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

const char *ckpt_tool_mesh(ckpt_arena *arena, const ckpt_mesh *mesh)
{
    ckpt_mesh m = *mesh;
    char text[160] = "";
    size_t n = 0;
    for (int i = 0; i < CKPT_MESH_AXES; i++)
        if (*ckpt_mesh_size(&m, i) > 1)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %d", n > 0 ? ", " : "",
                                  ckpt_mesh_axes[i], *ckpt_mesh_size(&m, i));
    const char *copy = n > 0 ? ckpt_arena_strdup(arena, text) : "1";
    return copy != NULL ? copy : "?";
}

static const char *near_name(const ckpt_model *model, const char *pattern)
{
    const char *best = NULL;
    size_t nearest = strlen(pattern) / 4 + 2; /* farther is no likely misspelling */
    if (strpbrk(pattern, "*?[") != NULL || nearest > 12)
        return NULL;
    for (size_t i = 0; i < model->n_tensors; i++) {
        const char *const names[] = {model->tensors[i].name,
                                     model->src->tensors[model->tensors[i].stored].name};
        for (size_t k = 0; k < 2; k++) {
            size_t d = ckpt_distance(pattern, names[k]);
            if (d < nearest) {
                nearest = d;
                best = names[k];
            }
        }
    }
    return best;
}

const char *ckpt_tool_meant(ckpt_tool *tool, const ckpt_model *model, const ckpt_strings *patterns)
{
    const char *name = NULL;
    for (size_t i = 0; i < patterns->n && name == NULL; i++)
        name = near_name(model, patterns->items[i]);
    const char *text =
        name != NULL ? ckpt_arena_printf(&tool->arena, "; did you mean '%s'?", name) : NULL;
    return text != NULL ? text : "";
}

const char *ckpt_tool_no_match(ckpt_tool *tool, const ckpt_model *model, const char *option,
                               const char *pattern)
{
    const char *name = near_name(model, pattern);
    return ckpt_arena_printf(&tool->arena, "%s'%s' matches no tensor%s%s%s", option, pattern,
                             name != NULL ? "; did you mean '" : "", name != NULL ? name : "",
                             name != NULL ? "'?" : "");
}

void ckpt_tool_json_mesh(ckpt_jw *w, const ckpt_mesh *mesh)
{
    ckpt_mesh m = *mesh;
    ckpt_jw_open(w, "mesh", '{');
    for (int i = 0; i < CKPT_MESH_STORED; i++) {
        int size = *ckpt_mesh_size(&m, i);
        ckpt_jw_int(w, ckpt_mesh_axes[i], size > 0 ? size : 1);
    }
    ckpt_jw_close(w, '}');
}

volatile int ckpt_tool_ending, ckpt_tool_asked;

ckpt_status ckpt_tool_no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static ckpt_status put_file(const char *path, const void *p, size_t n, bool replace, ckpt_err *err)
{
    ckpt_status status;
    ckpt_commit commit = {0};
    CKPT_CHECK(ckpt_commit_begin(&commit, path, false, replace, err));
    CKPT_CHECK(ckpt_commit_write(&commit, NULL, p, n, err));
    CKPT_CHECK(ckpt_commit_finish(&commit, err));
done:
    ckpt_commit_discard(&commit, err);
    return status;
}

ckpt_status ckpt_tool_write_file(const char *path, const void *p, size_t n, ckpt_err *err)
{
    return put_file(path, p, n, true, err);
}

ckpt_status ckpt_tool_create_file(const char *path, const void *p, size_t n, ckpt_err *err)
{
    return put_file(path, p, n, false, err);
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
