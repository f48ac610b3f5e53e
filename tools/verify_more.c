/* The further checks of `ckpt verify`: another checkpoint, values, duplicates; and --write. */
#include "numbers.h"
#include "verify.h"

#include <stdlib.h>
#include <string.h>

/* ---- further checks -------------------------------------------------------------------------- */

static void compare_against(verification *v, const ckpt_manifest *other)
{
    for (size_t i = 0; i < v->model.n_tensors; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        int64_t at = ckpt_manifest_find_tensor(other, t->name);
        v->bad[i] |=
            at < 0 || !ckpt_verify_same_shape(t, &other->tensors[at]) ||
            memcmp(other->tensors[at].hash.digest, v->tensors[i].digest, CKPT_SHA256_LEN) != 0;
        if (at < 0)
            ckpt_verify_problem(v, "tensor '%s': not in %s", t->name, v->o->against);
        else if (!ckpt_verify_same_shape(t, &other->tensors[at]))
            ckpt_verify_shape_problem(v, t, &other->tensors[at], v->o->against);
        else if (memcmp(other->tensors[at].hash.digest, v->tensors[i].digest, CKPT_SHA256_LEN) != 0)
            ckpt_verify_problem(v, "tensor '%s': values differ from %s", t->name, v->o->against);
    }
    for (size_t i = 0; i < other->n_tensors; i++)
        if (ckpt_model_find(&v->model, other->tensors[i].name) < 0)
            ckpt_verify_problem(v, "tensor '%s': only in %s", other->tensors[i].name,
                                v->o->against);
}

/* The other side as a manifest: one that was given, or computed from a checkpoint. */
static ckpt_status digest_other(verification *v, ckpt_source *src, ckpt_model *model,
                                ckpt_manifest *other, ckpt_err *err)
{
    ckpt_status status;
    ckpt_bar bar;
    ckpt_model_opts bind = {.allow_unknown = true};
    uint8_t root[CKPT_SHA256_LEN];
    bool as_like;
    CKPT_CHECK(ckpt_tool_open(v->tool, src, v->o->against, -1, err));
    v->tool->tells_manifest = true; /* the other's manifest takes no part */
    status = ckpt_tool_bind_like(v->tool, model, src, &bind, &v->model, &as_like, err);
    v->tool->tells_manifest = false;
    CKPT_CHECK(status);
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

/* What --against names, if that is a manifest and no checkpoint. */
static ckpt_status read_other(const verification *v, ckpt_manifest *other, bool *is_manifest,
                              ckpt_err *err)
{
    size_t n = strlen(v->o->against);
    ckpt_entry what;
    *is_manifest = false;
    if (n <= 5 || strcmp(v->o->against + n - 5, ".json") != 0)
        return CKPT_OK;
    ckpt_status status = ckpt_look(v->o->against, &what, err);
    if (status != CKPT_OK || what != CKPT_ENTRY_FILE)
        return status;
    ckpt_err text;
    status = ckpt_manifest_read(v->o->against, other, &text);
    *is_manifest = status == CKPT_OK;
    return ckpt_only_faults(status, &text, err);
}

ckpt_status ckpt_verify_look_at_other(verification *v, ckpt_err *err)
{
    ckpt_manifest other = {0};
    ckpt_source src = {0};
    ckpt_status status = CKPT_OK;
    bool manifest = false;
    if (v->o->against != NULL)
        status = read_other(v, &other, &manifest, err);
    if (v->o->against == NULL || manifest || status != CKPT_OK) {
        ckpt_manifest_release(&other);
        return status;
    }
    status = ckpt_tool_open(v->tool, &src, v->o->against, -1, err);
    ckpt_source_close(&src);
    return status;
}

/* F8 blocks have two forms: their values, which other layouts and types share, and the blocks and
 * scales as they are stored, which a manifest beside them lists. Two checkpoints are compared by
 * value, whichever of them stores blocks; a manifest only in its own form. */
static ckpt_status compare_in_form(verification *v, const ckpt_manifest *other, bool raw,
                                   ckpt_err *err)
{
    ckpt_status status;
    verification form = *v; /* with another model, and the digests of that */
    ckpt_model_opts bind = {.layout = v->model.layout,
                            .config = v->model.config,
                            .allow_unknown = true,
                            .fp8_raw = raw};
    form.model = (ckpt_model){0};
    if (raw && v->model.n_fp8 == 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s lists F8 blocks as they are stored, and %s stores none: compare with "
                         "the checkpoint itself",
                         v->o->against, v->path);
    if (v->model.n_fp8 == 0 || v->model.fp8_raw == raw) {
        compare_against(v, other);
        return CKPT_OK;
    }
    CKPT_CHECK(ckpt_tool_bind(v->tool, &form.model, &v->src, &bind, err));
    CKPT_CHECK(ckpt_verify_compute(&form, false, err));
    compare_against(&form, other);
    v->problems = form.problems;
    v->failed_memory = form.failed_memory;
    for (size_t i = 0; i < form.model.n_tensors; i++) {
        int64_t at = form.bad[i] ? ckpt_model_find(&v->model, form.model.tensors[i].name) : -1;
        if (at >= 0)
            v->bad[at] = true;
    }
done:
    ckpt_model_release(&form.model);
    return status;
}

ckpt_status ckpt_verify_against(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_manifest other = {0};
    ckpt_source src = {0};
    ckpt_model model = {0};
    bool manifest;
    status = read_other(v, &other, &manifest, err);
    if (status == CKPT_OK && !manifest)
        status = digest_other(v, &src, &model, &other, err);
    if (status == CKPT_OK)
        status = compare_in_form(v, &other, manifest && ckpt_tool_is_fp8(&other), err);
    if (status == CKPT_OK) {
        v->compared_other = true;
        bool partial = v->src.config == NULL || (model.src != NULL && src.config == NULL);
        status = ckpt_verify_config(v, other.config, partial, v->o->against, err);
    }
    ckpt_manifest_release(&other);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}

typedef struct scan {
    ckpt_stats *stats;
    uint64_t *filled; /* bytes up to the last that is not zero */
    const ckpt_model *model;
} scan;

static ckpt_status scan_block(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                              const uint8_t *b, size_t n, ckpt_err *err)
{
    scan *s = self;
    (void)b;
    (void)err;
    ckpt_stats_feed(&s->stats[tensor], s->model->tensors[tensor].dtype, a, n);
    while (n > 0 && a[n - 1] == 0)
        n--;
    if (n > 0)
        s->filled[tensor] = lo + n;
    return CKPT_OK;
}

/* Squared gradients are zero where nothing was trained; a whole end of them may also be data that
 * was never written. */
static void warn_tail(verification *v, const ckpt_canon *t, uint64_t filled)
{
    enum { PART = 16 }; /* of the tensor */
    uint64_t elem = (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8, tail = t->bytes - filled;
    if (t->state == NULL || strcmp(t->state->name, "exp_avg_sq") != 0 || tail < elem * PART ||
        tail < t->bytes / PART)
        return;
    ckpt_tool_warn(v->tool, "%s: the last %llu of %llu values of '%s' are zero", v->path,
                   (unsigned long long)(tail / elem), (unsigned long long)(t->bytes / elem),
                   t->name);
}

ckpt_status ckpt_verify_values(verification *v, ckpt_err *err)
{
    ckpt_bar bar;
    size_t n = v->model.n_tensors;
    ckpt_arena *arena = &v->tool->arena;
    scan s = {ckpt_arena_array(arena, n + 1, sizeof *s.stats),
              ckpt_arena_array(arena, n + 1, sizeof *s.filled), &v->model};
    bool *select = ckpt_arena_array(arena, n + 1, sizeof *select);
    if (s.stats == NULL || s.filled == NULL || select == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        const ckpt_dtype_info *info = ckpt_dtype_get(v->model.tensors[i].dtype);
        ckpt_stats_init(&s.stats[i]);
        /* 4- and 6-bit formats have neither NaN nor infinity */
        select[i] =
            info->bits >= 8 && (info->kind == CKPT_KIND_FLOAT || info->kind == CKPT_KIND_COMPLEX);
        v->n_finite += select[i];
    }
    ckpt_bar_start(&bar, "values", v->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(v->tool, &bar);
    ckpt_status status =
        ckpt_stream_visit(&v->model, NULL, NULL, select, &opts, scan_block, &s, err);
    ckpt_bar_stop(&bar);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        if (select[i])
            warn_tail(v, t, s.filled[i]);
        if (s.stats[i].first_bad >= 0 && v->bad != NULL)
            v->bad[i] = true;
        if (s.stats[i].first_bad >= 0)
            ckpt_verify_problem(v, "tensor '%s': %lld NaN, %lld infinite, first at %s", t->name,
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

ckpt_status ckpt_verify_duplicates(verification *v, ckpt_err *err)
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
            ckpt_verify_duplicate(v, "%s", (const char *)b.data);
        ckpt_buf_release(&b);
    }
    return CKPT_OK;
}

ckpt_status ckpt_verify_write(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_manifest m = {0};
    ckpt_buf text = {0};
    char *path = ckpt_manifest_path(&v->src, &v->tool->arena);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_manifest_of_model(&m, &v->model, v->tensors, v->files, v->root, err));
    CKPT_CHECK(ckpt_manifest_created(&v->src, &m.arena, &m.created, err));
    if (v->has_manifest) { /* what was carried along stays */
        m.foreign = ckpt_json_dup(v->manifest.foreign);
        m.lossy = v->manifest.lossy;
        m.n_lossy = v->manifest.n_lossy;
        m.has_source_root = v->manifest.has_source_root;
        memcpy(m.source_root, v->manifest.source_root, CKPT_SHA256_LEN);
    }
    for (size_t i = 0, next = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        uint8_t digest[CKPT_SHA256_LEN];
        uint64_t size = 0;
        char *file = ckpt_verify_path(v, f);
        if (ckpt_verify_source_file(v, f->name, &next) >= 0 || file == NULL || !ckpt_exists(file))
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
