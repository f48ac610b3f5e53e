/* ckpt verify: is a checkpoint whole, is it what its manifest says, does it equal another? */
#include "numbers.h"
#include "tool.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct verify_opts {
    bool hash, files, write, values, strict, duplicates, forward, force, allow_unknown,
        allow_unknown_objects;
    const char *against, *roundtrip, *signature;
    int64_t iteration;
} verify_opts;

#define AT(field) offsetof(verify_opts, field)
static const ckpt_opt rows[] = {
    {"hash", CKPT_OPT_FLAG, AT(hash), NULL, "recompute every digest and compare with the manifest",
     0, 0},
    {"files", CKPT_OPT_FLAG, AT(files), NULL, "also the serial SHA-256 of every file", 0, 0},
    {"write", CKPT_OPT_FLAG, AT(write), NULL, "compute everything and write the manifest", 0, 0},
    {"force", CKPT_OPT_FLAG, AT(force), NULL, "with --write: replace a manifest that disagrees", 0,
     0},
    {"against", CKPT_OPT_STRING, AT(against), "MANIFEST|PATH",
     "compare tensors and configuration with another checkpoint", 0, 0},
    {"values", CKPT_OPT_FLAG, AT(values), NULL, "look for NaN and infinities", 0, 0},
    {"duplicates", CKPT_OPT_FLAG, AT(duplicates), NULL, "list distinct tensors of equal content", 0,
     0},
    {"strict", CKPT_OPT_FLAG, AT(strict), NULL, "warnings are failures", 0, 0},
    {"iteration", CKPT_OPT_INT, AT(iteration), "N", "iteration of a save root (default: newest)", 0,
     INT64_MAX},
    {"allow-unknown", CKPT_OPT_FLAG, AT(allow_unknown), NULL,
     "accept tensors the model does not have", 0, 0},
    {"allow-unknown-objects", CKPT_OPT_FLAG, AT(allow_unknown_objects), NULL,
     "accept pickled objects of unknown classes, unread", 0, 0},
    {"roundtrip", CKPT_OPT_STRING, AT(roundtrip), "LAYOUT[,MESH]", "not built yet", 0, 0},
    {"forward", CKPT_OPT_FLAG, AT(forward), NULL, "not built yet", 0, 0},
    {"signature", CKPT_OPT_STRING, AT(signature), "KEY", "not built yet", 0, 0},
    {NULL, CKPT_OPT_FLAG, 0, NULL, NULL, 0, 0},
};
#undef AT

typedef struct lines {
    const char **items;
    size_t n, cap;
} lines;

typedef struct verification {
    ckpt_tool *tool;
    const verify_opts *o;
    const char *path;
    ckpt_source src;
    ckpt_model model;
    ckpt_manifest manifest;
    bool has_manifest, compared; /* compared: digests with the manifest */
    ckpt_tensor_hash *tensors; /* NULL: not computed */
    ckpt_file_hash *files;     /* NULL: not computed */
    uint8_t root[CKPT_SHA256_LEN];
    bool *bad; /* per model tensor: digest differs from the manifest */
    lines problems, warnings, duplicates;
    bool failed_memory;
} verification;

/* ---- findings -------------------------------------------------------------------------------- */

static void CKPT_PRINTF(3, 0) add_line(verification *v, lines *list, const char *fmt, va_list ap)
{
    ckpt_buf b = {0};
    ckpt_buf_vprintf(&b, fmt, ap);
    char *text = b.data != NULL && !b.failed
                     ? ckpt_arena_strdup(&v->tool->arena, (const char *)b.data)
                     : NULL;
    void *items = list->items;
    if (text == NULL ||
        ckpt_grow(&items, &list->cap, list->n + 1, sizeof *list->items, NULL) != CKPT_OK) {
        v->failed_memory = true;
    } else {
        list->items = items;
        list->items[list->n++] = ckpt_tool_clean(v->tool, text);
    }
    ckpt_buf_release(&b);
}

static void CKPT_PRINTF(2, 3) problem(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->problems, fmt, ap);
    va_end(ap);
}

static void CKPT_PRINTF(2, 3) warning(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->warnings, fmt, ap);
    va_end(ap);
}

static void CKPT_PRINTF(2, 3) duplicate(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->duplicates, fmt, ap);
    va_end(ap);
}

/* ---- structure ------------------------------------------------------------------------------- */

static char *file_path(verification *v, const ckpt_manifest_file *f)
{
    if (ckpt_manifest_single(&v->src))
        return ckpt_arena_strdup(&v->tool->arena, v->src.path);
    return ckpt_path_join(&v->tool->arena, v->src.root, f->name);
}

static void check_manifest_files(verification *v)
{
    for (size_t i = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        struct stat st;
        char *path = file_path(v, f);
        if (path == NULL)
            v->failed_memory = true;
        else if (stat(path, &st) != 0)
            problem(v, "%s: in the manifest but missing", f->name);
        else if ((uint64_t)st.st_size != f->size)
            problem(v, "%s: %llu bytes, the manifest says %llu", f->name,
                    (unsigned long long)st.st_size, (unsigned long long)f->size);
    }
}

static bool looks_like_data(const char *name)
{
    static const char *const suffixes[] = {".safetensors", ".distcp", ".bin", ".pt", ".pth"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        size_t m = strlen(suffixes[i]);
        if (n > m && strcmp(name + n - m, suffixes[i]) == 0)
            return true;
    }
    return false;
}

static bool is_mentioned(const ckpt_source *src, const char *name)
{
    for (size_t i = 0; i < src->n_warnings; i++)
        if (strstr(src->warnings[i], name) != NULL)
            return true;
    return false;
}

/* Data files that nothing refers to: remains of an older or interrupted save. */
static ckpt_status check_stale(verification *v, ckpt_err *err)
{
    char **names = NULL;
    size_t n = 0;
    if (ckpt_manifest_single(&v->src))
        return CKPT_OK;
    ckpt_status status = ckpt_list_dir(v->src.root, &v->tool->arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        bool used = v->has_manifest && ckpt_manifest_find_file(&v->manifest, names[i]) >= 0;
        for (size_t f = 0; !used && f < v->src.n_files; f++)
            used = strcmp(v->src.files[f].name, names[i]) == 0;
        if (!used && looks_like_data(names[i]) && !is_mentioned(&v->src, names[i]))
            warning(v, "%s: stale data file, part of nothing", names[i]);
    }
    return status;
}

static ckpt_status open_all(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_model_opts bind = {.allow_unknown = v->o->allow_unknown};
    CKPT_CHECK(ckpt_tool_open(v->tool, &v->src, v->path, v->o->iteration, err));
    if (!v->o->allow_unknown_objects)
        CKPT_CHECK(ckpt_tool_check_objects(&v->src, err));
    CKPT_CHECK(ckpt_tool_bind(v->tool, &v->model, &v->src, &bind, err));
    status = ckpt_manifest_load(&v->src, &v->manifest, &v->has_manifest, err);
    if (status != CKPT_OK && v->o->write && v->o->force) {
        warning(v, "%s: replaced", err->text);
        *err = (ckpt_err){0};
        v->has_manifest = false;
        status = CKPT_OK;
    }
done:
    return status;
}

static ckpt_status check_structure(verification *v, ckpt_err *err)
{
    for (size_t i = 0; i < v->src.n_warnings; i++)
        warning(v, "%s", v->src.warnings[i]);
    for (size_t i = 0; i < v->model.n_notes; i++)
        warning(v, "%s", v->model.notes[i]);
    if (v->has_manifest)
        check_manifest_files(v);
    return check_stale(v, err);
}

/* ---- digests --------------------------------------------------------------------------------- */

static ckpt_status compute_digests(verification *v, bool whole_files, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_bar bar;
    ckpt_arena *arena = &v->tool->arena;
    v->tensors = ckpt_arena_array(arena, v->model.n_tensors + 1, sizeof *v->tensors);
    v->files = ckpt_arena_array(arena, v->src.n_files + 1, sizeof *v->files);
    v->bad = ckpt_arena_array(arena, v->model.n_tensors + 1, sizeof *v->bad);
    if (v->tensors == NULL || v->files == NULL || v->bad == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_bar_start(&bar, "hash", v->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(v->tool, &bar);
    status = ckpt_stream_digest(&v->model, &opts, arena, v->tensors, v->root, err);
    if (status == CKPT_OK)
        status = ckpt_stream_files(&v->model, whole_files, &opts, arena, v->files, err);
    ckpt_bar_stop(&bar);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, v->path);
    return status;
}

/* Source files that hold bytes [lo, hi) of a tensor. */
static void mark_files(const ckpt_gather *g, uint64_t lo, uint64_t hi, bool *used, size_t n_files)
{
    uint64_t elem = (uint64_t)ckpt_dtype_get(g->from)->bits / 8;
    for (size_t i = 0; i < g->n_copies; i++) {
        const ckpt_copy *c = &g->copies[i];
        if (c->dst < hi && c->last + (elem > 0 ? elem : 1) > lo && c->file < n_files)
            used[c->file] = true;
    }
}

/* Of the files that hold the damaged range, the ones whose own digest is wrong; all of them if the
 * manifest cannot tell. */
static ckpt_status name_files(verification *v, const bool *used, ckpt_buf *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf all = {0};
    bool known = true;
    for (size_t i = 0; i < v->src.n_files; i++) {
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size;
        if (!used[i])
            continue;
        const char *name = v->src.files[i].name;
        ckpt_buf_printf(&all, "%s%s", all.len > 0 ? ", " : "", name);
        int64_t at = ckpt_manifest_find_file(&v->manifest, name);
        if (at < 0 || !v->manifest.files[at].has_sha256) {
            known = false;
            continue;
        }
        CKPT_CHECK(ckpt_tool_file_digest(v->src.files[i].path, digest, &size, err));
        if (memcmp(digest, v->manifest.files[at].sha256, sizeof digest) != 0)
            ckpt_buf_printf(out, "%s%s", out->len > 0 ? ", " : "", name);
    }
    if ((out->len == 0 || !known) && all.data != NULL) {
        ckpt_buf_clear(out);
        ckpt_buf_puts(out, (const char *)all.data);
    }
done:
    ckpt_buf_release(&all);
    return status;
}

static ckpt_status report_leaf(verification *v, const ckpt_canon *t, const ckpt_gather *g,
                               int64_t leaf, ckpt_err *err)
{
    ckpt_arena scratch = {0};
    ckpt_buf files = {0};
    uint64_t lo = leaf < 0 ? 0 : (uint64_t)leaf * CKPT_LEAF_BYTES;
    uint64_t hi = leaf < 0 || lo + CKPT_LEAF_BYTES > t->bytes ? t->bytes : lo + CKPT_LEAF_BYTES;
    bool *used = ckpt_arena_array(&scratch, v->src.n_files + 1, sizeof *used);
    ckpt_status status = used != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
    if (status == CKPT_OK) {
        mark_files(g, lo, hi, used, v->src.n_files);
        status = name_files(v, used, &files, err);
    }
    if (status == CKPT_OK) {
        const char *stored = v->src.tensors[t->stored].name;
        bool named = strcmp(stored, t->name) != 0;
        ckpt_buf where = {0};
        if (leaf >= 0)
            ckpt_buf_printf(&where, "leaf %lld, ", (long long)leaf);
        problem(v, "%s: tensor '%s'%s%s%s: %sbytes [%llu..%llu) of the tensor differ from the "
                   "manifest",
                files.data != NULL && files.len > 0 ? (const char *)files.data : "?", t->name,
                named ? " (stored as '" : "", named ? stored : "", named ? "')" : "",
                where.data != NULL ? (const char *)where.data : "", (unsigned long long)lo,
                (unsigned long long)hi);
        ckpt_buf_release(&where);
    }
    ckpt_buf_release(&files);
    ckpt_arena_free(&scratch);
    return status;
}

/* Every leaf that differs; one whose manifest kept no leaves is a single leaf or unknown. */
static ckpt_status report_tensor(verification *v, size_t i, const ckpt_manifest_tensor *m,
                                 ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena scratch = {0};
    ckpt_gather gather = {0};
    const ckpt_canon *t = &v->model.tensors[i];
    const ckpt_tensor_hash *h = &v->tensors[i];
    CKPT_CHECK(ckpt_plan_canon(&v->model, i, &scratch, &gather, err));
    if (m->hash.leaves == NULL || m->hash.n_leaves != h->n_leaves) {
        CKPT_CHECK(report_leaf(v, t, &gather, h->n_leaves == 1 ? 0 : -1, err));
        goto done;
    }
    for (uint64_t k = 0; k < h->n_leaves; k++)
        if (memcmp(m->hash.leaves + k * CKPT_SHA256_LEN, h->leaves + k * CKPT_SHA256_LEN,
                   CKPT_SHA256_LEN) != 0)
            CKPT_CHECK(report_leaf(v, t, &gather, (int64_t)k, err));
done:
    ckpt_arena_free(&scratch);
    return status;
}

static bool same_shape(const ckpt_canon *t, const ckpt_manifest_tensor *m)
{
    if (t->dtype != m->dtype || t->rank != m->rank)
        return false;
    for (int d = 0; d < t->rank; d++)
        if (t->dims[d] != m->dims[d])
            return false;
    return true;
}

static void shape_problem(verification *v, const ckpt_canon *t, const ckpt_manifest_tensor *m,
                          const char *whose)
{
    ckpt_arena scratch = {0};
    problem(v, "tensor '%s': %s %s, %s has %s %s", t->name, ckpt_dtype_get(t->dtype)->name,
            ckpt_shape(&scratch, t->rank, t->dims), whose, ckpt_dtype_get(m->dtype)->name,
            ckpt_shape(&scratch, m->rank, m->dims));
    ckpt_arena_free(&scratch);
}

static ckpt_status compare_tensors(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < v->model.n_tensors; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        int64_t at = ckpt_manifest_find_tensor(&v->manifest, t->name);
        const ckpt_manifest_tensor *m = at >= 0 ? &v->manifest.tensors[at] : NULL;
        if (m != NULL && same_shape(t, m) &&
            memcmp(m->hash.digest, v->tensors[i].digest, CKPT_SHA256_LEN) == 0)
            continue;
        v->bad[i] = true;
        if (m == NULL)
            problem(v, "tensor '%s': not in the manifest", t->name);
        else if (!same_shape(t, m))
            shape_problem(v, t, m, "the manifest");
        else
            CKPT_CHECK(report_tensor(v, i, m, err));
    }
    for (size_t i = 0; i < v->manifest.n_tensors; i++)
        if (ckpt_model_find(&v->model, v->manifest.tensors[i].name) < 0)
            problem(v, "tensor '%s': in the manifest but missing", v->manifest.tensors[i].name);
done:
    return status;
}

/* Files that the container does not read (tokenizer, index, tracker): whole digests. */
static ckpt_status compare_other_file(verification *v, const ckpt_manifest_file *f, ckpt_err *err)
{
    uint8_t digest[CKPT_SHA256_LEN];
    uint64_t size = 0;
    char *path = file_path(v, f);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    if (!f->has_sha256 || !ckpt_exists(path))
        return CKPT_OK; /* reported by check_manifest_files */
    ckpt_status status = ckpt_tool_file_digest(path, digest, &size, err);
    if (status == CKPT_OK && memcmp(digest, f->sha256, sizeof digest) != 0)
        problem(v, "%s: sha256 differs from the manifest", f->name);
    return status;
}

static int64_t source_file(const verification *v, const char *name)
{
    if (ckpt_manifest_single(&v->src))
        return v->src.n_files > 0 ? 0 : -1;
    for (size_t i = 0; i < v->src.n_files; i++)
        if (strcmp(v->src.files[i].name, name) == 0)
            return (int64_t)i;
    return -1;
}

static ckpt_status compare_files(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        int64_t at = source_file(v, f->name);
        if (at < 0) {
            CKPT_CHECK(compare_other_file(v, f, err));
            continue;
        }
        const ckpt_file_hash *h = &v->files[at];
        if (h->size != f->size)
            continue; /* reported */
        if (f->has_rest && memcmp(h->rest, f->rest, CKPT_SHA256_LEN) != 0)
            problem(v, "%s: bytes outside tensor data differ from the manifest (header, padding or "
                       "objects)", f->name);
        if (v->o->files && f->has_sha256 && memcmp(h->sha256, f->sha256, CKPT_SHA256_LEN) != 0)
            problem(v, "%s: sha256 differs from the manifest", f->name);
    }
done:
    return status;
}

/* partial: one side has no stored configuration and knows only what tensor shapes tell, so that
 * only keys of both are compared. */
static ckpt_status compare_config(verification *v, const ckpt_json *other, bool partial,
                                  const char *whose, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint8_t a[CKPT_SHA256_LEN], b[CKPT_SHA256_LEN];
    const ckpt_json *own = v->model.layout != NULL ? v->model.config : NULL;
    if (own == NULL || other == NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_config_digest(own, a, err));
    CKPT_CHECK(ckpt_config_digest(other, b, err));
    if (memcmp(a, b, sizeof a) == 0)
        goto done;
    for (const ckpt_json *c = ckpt_json_child(own); c != NULL; c = ckpt_json_next(c))
        if ((!partial || ckpt_json_get(other, ckpt_json_key(c)) != NULL) &&
            !ckpt_json_equal(c, ckpt_json_get(other, ckpt_json_key(c))))
            problem(v, "configuration: '%s' differs from %s", ckpt_json_key(c), whose);
    for (const ckpt_json *c = ckpt_json_child(other); !partial && c != NULL; c = ckpt_json_next(c))
        if (ckpt_json_get(own, ckpt_json_key(c)) == NULL)
            problem(v, "configuration: '%s' is only in %s", ckpt_json_key(c), whose);
done:
    return status;
}

static ckpt_status compare_manifest(verification *v, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(compare_tensors(v, err));
    CKPT_CHECK(compare_files(v, err));
    CKPT_CHECK(compare_config(v, v->manifest.config, v->src.config == NULL, "the manifest", err));
    v->compared = true;
done:
    return status;
}

/* ---- a checkpoint that does not open ---------------------------------------------------------- */

/* The directory or file whose manifest would describe `path`. NULL: none there. */
static char *find_manifest(verification *v)
{
    ckpt_arena *arena = &v->tool->arena;
    char *path = ckpt_is_dir(v->path)
                     ? ckpt_path_join(arena, v->path, CKPT_MANIFEST_NAME)
                     : ckpt_arena_printf(arena, "%s%s", v->path, CKPT_MANIFEST_SUFFIX);
    if (path != NULL && ckpt_exists(path))
        return path;
    char **names = NULL;
    size_t n = 0;
    if (!ckpt_is_dir(v->path) || ckpt_list_dir(v->path, arena, &names, &n, NULL) != CKPT_OK)
        return NULL;
    for (size_t i = n; i-- > 0;) { /* the newest iteration of a save root sorts last */
        char *dir = strncmp(names[i], "iter_", 5) == 0 || strcmp(names[i], "release") == 0
                        ? ckpt_path_join(arena, v->path, names[i])
                        : NULL;
        path = dir != NULL ? ckpt_path_join(arena, dir, CKPT_MANIFEST_NAME) : NULL;
        if (path != NULL && ckpt_exists(path))
            return path;
    }
    return NULL;
}

/* A flipped byte in a header can make a file unreadable. When every file still has its size, the
 * manifest says which one was altered: that is a failed verification, not an unknown format.
 * *explained tells whether a difference was found. */
static ckpt_status explain_failure(verification *v, const ckpt_err *open_error, bool *explained,
                                   ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_manifest m = {0};
    char *path = find_manifest(v);
    *explained = false;
    if (path == NULL || ckpt_manifest_read(path, &m, NULL) != CKPT_OK)
        return CKPT_OK;
    size_t keep = (size_t)(ckpt_basename(path) - path);
    char *dir = ckpt_arena_strndup(&v->tool->arena, path, keep > 1 ? keep - 1 : keep);
    bool single = !ckpt_is_dir(v->path);
    for (size_t i = 0; i < m.n_files && dir != NULL; i++) {
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size = 0;
        struct stat st;
        const char *file = single      ? v->path
                           : keep == 0 ? m.files[i].name
                                       : ckpt_path_join(&v->tool->arena, dir, m.files[i].name);
        if (file == NULL || stat(file, &st) != 0 || (uint64_t)st.st_size != m.files[i].size) {
            *explained = false; /* missing or cut: malformed input, exit 3 */
            v->problems.n = 0;
            goto done;
        }
        CKPT_CHECK(ckpt_tool_file_digest(file, digest, &size, err));
        if (m.files[i].has_sha256 && memcmp(digest, m.files[i].sha256, sizeof digest) != 0) {
            *explained = true;
            problem(v, "%s: sha256 differs from the manifest", m.files[i].name);
        }
    }
    if (*explained)
        problem(v, "%s", open_error->text);
done:
    ckpt_manifest_release(&m);
    return status;
}

/* ---- further checks -------------------------------------------------------------------------- */

static void compare_against(verification *v, const ckpt_manifest *other)
{
    for (size_t i = 0; i < v->model.n_tensors; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        int64_t at = ckpt_manifest_find_tensor(other, t->name);
        if (at < 0)
            problem(v, "tensor '%s': not in %s", t->name, v->o->against);
        else if (!same_shape(t, &other->tensors[at]))
            shape_problem(v, t, &other->tensors[at], v->o->against);
        else if (memcmp(other->tensors[at].hash.digest, v->tensors[i].digest, CKPT_SHA256_LEN) != 0)
            problem(v, "tensor '%s': values differ from %s", t->name, v->o->against);
    }
    for (size_t i = 0; i < other->n_tensors; i++)
        if (ckpt_model_find(&v->model, other->tensors[i].name) < 0)
            problem(v, "tensor '%s': only in %s", other->tensors[i].name, v->o->against);
}

/* The other side as a manifest: one that was given, or computed from a checkpoint. */
static ckpt_status digest_other(verification *v, ckpt_source *src, ckpt_model *model,
                                ckpt_manifest *other, ckpt_err *err)
{
    ckpt_status status;
    ckpt_bar bar;
    ckpt_model_opts bind = {.allow_unknown = true};
    uint8_t root[CKPT_SHA256_LEN];
    CKPT_CHECK(ckpt_tool_open(v->tool, src, v->o->against, -1, err));
    CKPT_CHECK(ckpt_tool_bind(v->tool, model, src, &bind, err));
    ckpt_tensor_hash *hashes =
        ckpt_arena_array(&v->tool->arena, model->n_tensors + 1, sizeof *hashes);
    ckpt_file_hash *files = ckpt_arena_array(&v->tool->arena, src->n_files + 1, sizeof *files);
    if (hashes == NULL || files == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_bar_start(&bar, "against", v->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(v->tool, &bar);
    status = ckpt_stream_digest(model, &opts, &v->tool->arena, hashes, root, err);
    ckpt_bar_stop(&bar);
    if (status == CKPT_OK)
        status = ckpt_manifest_of_model(other, model, hashes, files, root, err);
done:
    return status;
}

static ckpt_status check_against(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_manifest other = {0};
    ckpt_source src = {0};
    ckpt_model model = {0};
    size_t n = strlen(v->o->against);
    bool json = n > 5 && strcmp(v->o->against + n - 5, ".json") == 0;
    if (json && !ckpt_is_dir(v->o->against) &&
        ckpt_manifest_read(v->o->against, &other, NULL) == CKPT_OK)
        status = CKPT_OK;
    else
        status = digest_other(v, &src, &model, &other, err);
    if (status == CKPT_OK) {
        compare_against(v, &other);
        bool partial = v->src.config == NULL || (model.src != NULL && src.config == NULL);
        status = compare_config(v, other.config, partial, v->o->against, err);
    }
    ckpt_manifest_release(&other);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}

typedef struct scan {
    ckpt_stats *stats;
    const ckpt_model *model;
} scan;

static ckpt_status scan_block(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                              const uint8_t *b, size_t n, ckpt_err *err)
{
    scan *s = self;
    (void)lo;
    (void)b;
    (void)err;
    ckpt_stats_feed(&s->stats[tensor], s->model->tensors[tensor].dtype, a, n);
    return CKPT_OK;
}

static ckpt_status check_values(verification *v, ckpt_err *err)
{
    ckpt_bar bar;
    size_t n = v->model.n_tensors;
    ckpt_arena *arena = &v->tool->arena;
    scan s = {ckpt_arena_array(arena, n + 1, sizeof *s.stats), &v->model};
    bool *select = ckpt_arena_array(arena, n + 1, sizeof *select);
    if (s.stats == NULL || select == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        const ckpt_dtype_info *info = ckpt_dtype_get(v->model.tensors[i].dtype);
        ckpt_stats_init(&s.stats[i]);
        /* 4- and 6-bit formats have neither NaN nor infinity */
        select[i] = info->bits >= 8 &&
                    (info->kind == CKPT_KIND_FLOAT || info->kind == CKPT_KIND_COMPLEX);
    }
    ckpt_bar_start(&bar, "values", v->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(v->tool, &bar);
    ckpt_status status =
        ckpt_stream_visit(&v->model, NULL, NULL, select, &opts, scan_block, &s, err);
    ckpt_bar_stop(&bar);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        if (s.stats[i].first_bad >= 0)
            problem(v, "tensor '%s': %lld NaN, %lld infinite, first at %s", t->name,
                    (long long)s.stats[i].nan, (long long)s.stats[i].inf,
                    ckpt_tool_index(arena, t->rank, t->dims, s.stats[i].first_bad));
    }
    if (status != CKPT_OK)
        ckpt_tool_frame(err, v->path);
    return status;
}

typedef struct by_digest {
    const uint8_t *digest;
    const char *name;
} by_digest;

static int digest_order(const void *a, const void *b)
{
    const by_digest *x = a, *y = b;
    int c = memcmp(x->digest, y->digest, CKPT_SHA256_LEN);
    return c != 0 ? c : strcmp(x->name, y->name);
}

static ckpt_status find_duplicates(verification *v, ckpt_err *err)
{
    size_t n = v->model.n_tensors;
    by_digest *all = ckpt_arena_array(&v->tool->arena, n + 1, sizeof *all);
    if (all == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++)
        all[i] = (by_digest){v->tensors[i].digest, v->model.tensors[i].name};
    qsort(all, n, sizeof *all, digest_order);
    for (size_t i = 0, next; i < n; i = next) {
        ckpt_buf b = {0};
        for (next = i; next < n && memcmp(all[next].digest, all[i].digest, CKPT_SHA256_LEN) == 0;
             next++)
            ckpt_buf_printf(&b, "%s%s", next > i ? " = " : "", all[next].name);
        if (next - i > 1 && b.data != NULL)
            duplicate(v, "%s", (const char *)b.data);
        ckpt_buf_release(&b);
    }
    return CKPT_OK;
}

static ckpt_status write_manifest(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_manifest m = {0};
    ckpt_buf text = {0};
    char *path = ckpt_manifest_path(&v->src, &v->tool->arena);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_manifest_of_model(&m, &v->model, v->tensors, v->files, v->root, err));
    m.created = ckpt_manifest_created(&v->src, &m.arena);
    if (v->has_manifest) { /* what was carried along stays */
        m.foreign = ckpt_json_dup(v->manifest.foreign);
        m.lossy = v->manifest.lossy;
        m.n_lossy = v->manifest.n_lossy;
        m.has_source_root = v->manifest.has_source_root;
        memcpy(m.source_root, v->manifest.source_root, CKPT_SHA256_LEN);
    }
    for (size_t i = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size = 0;
        char *file = file_path(v, f);
        if (source_file(v, f->name) >= 0 || file == NULL || !ckpt_exists(file))
            continue;
        CKPT_CHECK(ckpt_tool_file_digest(file, digest, &size, err));
        CKPT_CHECK(ckpt_manifest_add_file(&m, f->name, size, digest, err));
    }
    CKPT_CHECK(ckpt_manifest_print(&m, &text, err));
    CKPT_CHECK(ckpt_tool_write_file(path, text.data, text.len, err));
    if (ckpt_tool_text(v->tool))
        printf("wrote %s\n", ckpt_tool_clean(v->tool, path));
done:
    ckpt_buf_release(&text);
    ckpt_manifest_release(&m);
    return status;
}

/* ---- result ---------------------------------------------------------------------------------- */

static bool failed(const verification *v)
{
    return v->problems.n > 0 || (v->o->strict && (v->warnings.n > 0 || v->duplicates.n > 0));
}

static void json_tensors(verification *v, ckpt_jw *w)
{
    ckpt_jw_open(w, "tensors", '[');
    for (size_t i = 0; v->tensors != NULL && i < v->model.n_tensors; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", t->name);
        ckpt_jw_string(w, "dtype", ckpt_dtype_get(t->dtype)->name);
        ckpt_jw_dims(w, "shape", t->rank, t->dims);
        ckpt_jw_hex(w, "digest", v->tensors[i].digest);
        ckpt_jw_bool(w, "ok", !v->bad[i]);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static void json_files(verification *v, ckpt_jw *w)
{
    bool whole = v->o->files || v->o->write;
    ckpt_jw_open(w, "files", '[');
    for (size_t i = 0; v->files != NULL && i < v->src.n_files; i++) {
        const ckpt_file_hash *h = &v->files[i];
        int64_t at = ckpt_manifest_find_file(&v->manifest, v->src.files[i].name);
        const ckpt_manifest_file *f = at >= 0 ? &v->manifest.files[at] : NULL;
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", v->src.files[i].name);
        ckpt_jw_u64(w, "size", h->size);
        ckpt_jw_hex(w, "rest", h->rest);
        if (whole)
            ckpt_jw_hex(w, "sha256", h->sha256);
        if (f != NULL && f->has_rest)
            ckpt_jw_bool(w, "ok", memcmp(f->rest, h->rest, CKPT_SHA256_LEN) == 0 &&
                                      (!whole || !f->has_sha256 ||
                                       memcmp(f->sha256, h->sha256, CKPT_SHA256_LEN) == 0));
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static void write_json(verification *v)
{
    ckpt_jw *w = &v->tool->json;
    if (v->src.container != NULL) {
        ckpt_jw_string(w, "container", v->src.container->name);
        ckpt_jw_string(w, "layout", v->model.layout != NULL ? v->model.layout->name : NULL);
    }
    if (v->tensors != NULL) {
        ckpt_jw_hex(w, "root", v->root);
        ckpt_jw_bool(w, "manifest", v->has_manifest);
        json_tensors(v, w);
        json_files(v, w);
    }
    ckpt_jw_lines(w, "problems", v->problems.items, v->problems.n);
    ckpt_jw_lines(w, "warnings", v->warnings.items, v->warnings.n);
    if (v->o->duplicates)
        ckpt_jw_lines(w, "duplicates", v->duplicates.items, v->duplicates.n);
}

static void print_lines(const verification *v, FILE *out, ckpt_paint paint, const char *kind,
                        const lines *list)
{
    bool c = out == stdout && v->tool->color;
    for (size_t i = 0; i < list->n; i++)
        fprintf(out, "%s%s%s%s\n", ckpt_paint_on(c, paint), kind, ckpt_paint_off(c),
                list->items[i]);
}

static void print_text(verification *v)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    bool c = v->tool->color;
    if (v->tool->g.quiet)
        return;
    print_lines(v, stdout, CKPT_RED, "failed: ", &v->problems);
    print_lines(v, stdout, CKPT_YELLOW, "warning: ", &v->warnings);
    if (v->o->duplicates)
        print_lines(v, stdout, CKPT_YELLOW, "duplicate: ", &v->duplicates);
    if (v->tensors != NULL) {
        ckpt_hex(v->root, hex);
        printf("root %s\n", hex);
    }
    if (failed(v)) {
        printf("%sFAILED%s: %zu problems, %zu warnings\n", ckpt_paint_on(c, CKPT_RED),
               ckpt_paint_off(c), v->problems.n, v->warnings.n);
        return;
    }
    printf("%sok%s: %zu tensors, %zu files", ckpt_paint_on(c, CKPT_GREEN), ckpt_paint_off(c),
           v->src.n_tensors, v->src.n_files);
    if (v->compared)
        printf(", all digests match the manifest");
    printf("\n");
}

/* ---- the command ----------------------------------------------------------------------------- */

static ckpt_status check_options(const verify_opts *o, ckpt_err *err)
{
    const char *missing = o->roundtrip != NULL   ? "--roundtrip"
                          : o->forward           ? "--forward"
                          : o->signature != NULL ? "--signature"
                                                 : NULL;
    if (missing != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: not built yet", missing);
    return CKPT_OK;
}

static ckpt_status check_hashes(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const verify_opts *o = v->o;
    bool compare = v->has_manifest && (o->hash || o->files || (o->write && !o->force));
    if (!o->hash && !o->files && !o->write && o->against == NULL && !o->duplicates)
        return CKPT_OK;
    CKPT_CHECK(compute_digests(v, o->files || o->write, err));
    if (compare)
        CKPT_CHECK(compare_manifest(v, err));
    if (!v->has_manifest && (o->hash || o->files) && !o->write && o->against == NULL)
        problem(v, "no manifest to compare with; --write makes one");
    if (o->against != NULL)
        CKPT_CHECK(check_against(v, err));
    if (o->duplicates)
        CKPT_CHECK(find_duplicates(v, err));
done:
    return status;
}

static ckpt_status verify(verification *v, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_options(v->o, err));
    status = open_all(v, err);
    if (status != CKPT_OK && status != CKPT_E_IO && status != CKPT_E_INTERRUPTED &&
        (v->o->hash || v->o->files)) {
        ckpt_err open_error = *err;
        bool explained = false;
        if (explain_failure(v, &open_error, &explained, err) == CKPT_OK && explained) {
            *err = (ckpt_err){0};
            return CKPT_OK;
        }
        *err = open_error;
    }
    if (status != CKPT_OK)
        goto done;
    CKPT_CHECK(check_structure(v, err));
    CKPT_CHECK(check_hashes(v, err));
    if (v->o->values)
        CKPT_CHECK(check_values(v, err));
    if (v->o->write && v->problems.n > 0 && !v->o->force)
        problem(v, "manifest not written; --force replaces it");
    else if (v->o->write)
        CKPT_CHECK(write_manifest(v, err));
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    verification v = {.tool = tool, .o = opts, .path = tool->operands.items[0]};
    ckpt_status status = verify(&v, err);
    if (status == CKPT_OK && v.failed_memory)
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK) {
        if (tool->g.json)
            write_json(&v);
        else
            print_text(&v);
        if (failed(&v))
            status = CKPT_E_MISMATCH;
    }
    if (status == CKPT_E_MISMATCH && tool->g.quiet && err->text[0] == '\0')
        (void)ckpt_fail(err, CKPT_E_MISMATCH, "%s: %s", v.path,
                        v.problems.n > 0 ? v.problems.items[0] : "warnings under --strict");
    free(v.problems.items);
    free(v.warnings.items);
    free(v.duplicates.items);
    ckpt_manifest_release(&v.manifest);
    ckpt_model_release(&v.model);
    ckpt_source_close(&v.src);
    return status;
}

static void defaults(void *opts)
{
    ((verify_opts *)opts)->iteration = -1;
}

const ckpt_command ckpt_cmd_verify = {
    .name = "verify",
    .synopsis = "PATH",
    .what = "check structure, digests and values; compare with a manifest or another checkpoint",
    .opts = rows,
    .opts_size = sizeof(verify_opts),
    .min_operands = 1,
    .max_operands = 1,
    .writes = true,
    .defaults = defaults,
    .run = run,
    .notes = "The manifest is ckpt.manifest.json beside the data, or FILE.ckpt.manifest.json.\n"
             "--hash without one prints the root and exits 1: nothing was proved.\n",
};
