/* Digests of `ckpt verify --hash`: compute, compare with the manifest, name what is damaged. */
#include "verify.h"

#include <string.h>
#include <sys/stat.h>

/* ---- digests --------------------------------------------------------------------------------- */

/* The tensors that begin in this rank's part of all bytes. */
static void choose_part(verification *v)
{
    uint64_t total = 0, at = 0;
    v->lo = 0;
    v->hi = v->model.n_tensors;
    if (v->ranks < 2)
        return;
    for (size_t i = 0; i < v->model.n_tensors; i++)
        total += v->model.tensors[i].bytes;
    const uint64_t n = (uint64_t)v->ranks, r = (uint64_t)v->rank;
    const uint64_t first = total / n * r + total % n * r / n;
    const uint64_t last = total / n * (r + 1) + total % n * (r + 1) / n;
    v->hi = 0;
    for (size_t i = 0; i < v->model.n_tensors; i++) {
        v->lo += at < first;
        v->hi += at < last || v->rank + 1 == v->ranks;
        at += v->model.tensors[i].bytes;
    }
}

ckpt_status ckpt_verify_compute(verification *v, bool whole_files, ckpt_err *err)
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
    choose_part(v);
    uint8_t *root = v->ranks < 2 ? v->root : NULL;
    if (whole_files && v->rank == 0) {
        status = ckpt_stream_verify(&v->model, v->lo, v->hi, &opts, arena, v->tensors + v->lo,
                                    v->files, root, err);
    } else {
        ckpt_model mine = v->model;
        mine.tensors += v->lo;
        mine.n_tensors = v->hi - v->lo;
        status = ckpt_stream_digest(&mine, &opts, arena, v->tensors + v->lo, root, err);
        if (status == CKPT_OK && v->rank == 0)
            status = ckpt_stream_rest(&v->model, &opts, v->files, err);
    }
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
        ckpt_verify_problem(
            v,
            "%s: tensor '%s'%s%s%s: %sbytes [%llu..%llu) of the tensor differ from the "
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

bool ckpt_verify_same_shape(const ckpt_canon *t, const ckpt_manifest_tensor *m)
{
    if (t->dtype != m->dtype || t->rank != m->rank)
        return false;
    for (int d = 0; d < t->rank; d++)
        if (t->dims[d] != m->dims[d])
            return false;
    return true;
}

void ckpt_verify_shape_problem(verification *v, const ckpt_canon *t, const ckpt_manifest_tensor *m,
                               const char *whose)
{
    ckpt_arena scratch = {0};
    ckpt_verify_problem(v, "tensor '%s': %s %s, %s has %s %s", t->name,
                        ckpt_dtype_get(t->dtype)->name, ckpt_shape(&scratch, t->rank, t->dims),
                        whose, ckpt_dtype_get(m->dtype)->name,
                        ckpt_shape(&scratch, m->rank, m->dims));
    ckpt_arena_free(&scratch);
}

static ckpt_status compare_tensors(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = v->lo; i < v->hi; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        int64_t at = ckpt_manifest_find_tensor(&v->manifest, t->name);
        const ckpt_manifest_tensor *m = at >= 0 ? &v->manifest.tensors[at] : NULL;
        if (m != NULL && ckpt_verify_same_shape(t, m) &&
            memcmp(m->hash.digest, v->tensors[i].digest, CKPT_SHA256_LEN) == 0)
            continue;
        v->bad[i] = true;
        if (m == NULL)
            ckpt_verify_problem(v, "tensor '%s': not in the manifest", t->name);
        else if (!ckpt_verify_same_shape(t, m))
            ckpt_verify_shape_problem(v, t, m, "the manifest");
        else
            CKPT_CHECK(report_tensor(v, i, m, err));
    }
    for (size_t i = 0; i < v->manifest.n_tensors; i++)
        if (ckpt_model_find(&v->model, v->manifest.tensors[i].name) < 0)
            ckpt_verify_problem(v, "tensor '%s': in the manifest but missing",
                                v->manifest.tensors[i].name);
done:
    return status;
}

/* Files that the container does not read (tokenizer, index, tracker): whole digests. */
static ckpt_status compare_other_file(verification *v, const ckpt_manifest_file *f, ckpt_err *err)
{
    uint8_t digest[CKPT_SHA256_LEN];
    uint64_t size = 0;
    char *path = ckpt_verify_path(v, f);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    if (!f->has_sha256 || !ckpt_exists(path))
        return CKPT_OK; /* reported by check_manifest_files */
    ckpt_status status = ckpt_tool_file_digest(path, digest, &size, err);
    if (status == CKPT_OK && memcmp(digest, f->sha256, sizeof digest) != 0)
        ckpt_verify_problem(v, "%s: sha256 differs from the manifest", f->name);
    return status;
}

static ckpt_status compare_files(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t next = 0;
    for (size_t i = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        int64_t at = ckpt_verify_source_file(v, f->name, &next);
        if (at < 0) {
            CKPT_CHECK(compare_other_file(v, f, err));
            continue;
        }
        const ckpt_file_hash *h = &v->files[at];
        if (h->size != f->size)
            continue; /* reported */
        if (f->has_rest && memcmp(h->rest, f->rest, CKPT_SHA256_LEN) != 0)
            ckpt_verify_problem(
                v,
                "%s: bytes outside tensor data differ from the manifest (header, padding or "
                "objects)",
                f->name);
        if (v->o->files && f->has_sha256 && memcmp(h->sha256, f->sha256, CKPT_SHA256_LEN) != 0)
            ckpt_verify_problem(v, "%s: sha256 differs from the manifest", f->name);
    }
done:
    return status;
}

ckpt_status ckpt_verify_config(verification *v, const ckpt_json *other, bool partial,
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
        if ((!partial || (ckpt_json_get(other, ckpt_json_key(c)) != NULL &&
                          !ckpt_tool_key_is_guess(ckpt_json_key(c)))) &&
            !ckpt_json_equal(c, ckpt_json_get(other, ckpt_json_key(c))))
            ckpt_verify_problem(v, "configuration: '%s' differs from %s", ckpt_json_key(c), whose);
    for (const ckpt_json *c = ckpt_json_child(other); !partial && c != NULL; c = ckpt_json_next(c))
        if (ckpt_json_get(own, ckpt_json_key(c)) == NULL)
            ckpt_verify_problem(v, "configuration: '%s' is only in %s", ckpt_json_key(c), whose);
done:
    return status;
}

ckpt_status ckpt_verify_manifest(verification *v, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(compare_tensors(v, err));
    if (v->rank == 0)
        CKPT_CHECK(compare_files(v, err));
    CKPT_CHECK(
        ckpt_verify_config(v, v->manifest.config, v->src.config == NULL, "the manifest", err));
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

ckpt_status ckpt_verify_explain(verification *v, const ckpt_err *open_error, bool *explained,
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
            ckpt_verify_problem(v, "%s: sha256 differs from the manifest", m.files[i].name);
        }
    }
    if (*explained)
        ckpt_verify_problem(v, "%s", open_error->text);
done:
    ckpt_manifest_release(&m);
    return status;
}
