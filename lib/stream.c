/* Reading jobs of the executor: digests of a model, digests of files, visits. */
#include "cache.h"
#include "checked.h"
#include "derive.h"
#include "gather.h"
#include "hole.h"
#include "job.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- digesting a model ------------------------------------------------------------------------- */

typedef struct digest_job {
    ckpt_source *src;
    ckpt_leaf_list list;
} digest_job;

static ckpt_status digest_item(ckpt_worker *w, size_t item, ckpt_err *err)
{
    digest_job *d = w->job->self;
    return ckpt_hash_leaf_group(w, d->src, &d->list, item, err);
}

ckpt_status ckpt_stream_digest(const ckpt_model *model, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_tensor_hash *out,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    digest_job d = {.src = model->src};
    const ckpt_share *share = opts != NULL ? opts->share : NULL;
    ckpt_leaf_shares shares = {0};
    ckpt_job j = {.run = digest_item, .self = &d};
    size_t n = model->n_tensors;
    ckpt_gather *gathers = ckpt_arena_array(&scratch, n, sizeof *gathers);
    const char **names = ckpt_arena_array(&scratch, n, sizeof *names);
    ckpt_cache_stream(model->src, 0);
    if (gathers == NULL || names == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n && status == CKPT_OK; i++) {
        names[i] = model->tensors[i].name;
        status = ckpt_plan_canon(model, i, &scratch, &gathers[i], err);
        if (status == CKPT_OK)
            status = ckpt_add_leaves(&d.list, &gathers[i], NULL, arena, &out[i], err);
    }
    if (status == CKPT_OK)
        status = ckpt_leaves_divide(&d.list, share, &shares, err);
    if (status == CKPT_OK)
        status = ckpt_job_open(&j, opts, err);
    if (status == CKPT_OK) {
        j.n_items = ckpt_leaf_groups(&d.list);
        for (size_t i = 0; i < d.list.n; i++)
            j.total_bytes += d.list.leaves[i].bytes;
        status = ckpt_job_run(&j);
    }
    CKPT_CHECK(ckpt_share_agree(share, status, err));
    CKPT_CHECK(ckpt_leaves_collect(&shares, share, err));
    for (size_t i = 0; i < n; i++)
        ckpt_tensor_digest(&j.workers[0].sha, model->tensors[i].dtype, model->tensors[i].rank,
                           model->tensors[i].dims, out[i].leaves, out[i].n_leaves, out[i].digest);
    if (root != NULL)
        CKPT_CHECK(ckpt_finish_root(out, names, n, root, err));
done:
    ckpt_job_close(&j);
    ckpt_leaf_shares_free(&shares);
    free(d.list.leaves);
    ckpt_arena_free(&scratch);
    return status;
}

/* ---- file digests of a source ------------------------------------------------------------------ */

typedef struct span_list {
    uint64_t (*span)[2];
    size_t n, cap;
} span_list;

static ckpt_status add_span(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    span_list *list = self;
    if (list->n > 0 && list->span[list->n - 1][1] == offset) {
        list->span[list->n - 1][1] += len;
        return CKPT_OK;
    }
    void *p = list->span;
    ckpt_status status = ckpt_grow(&p, &list->cap, list->n + 1, sizeof *list->span, err);
    list->span = p;
    if (status == CKPT_OK) {
        list->span[list->n][0] = offset;
        list->span[list->n++][1] = offset + len;
    }
    return status;
}

static int span_order(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

typedef struct files_job {
    const ckpt_model *model;
    bool whole;
    span_list *covered; /* per file: bytes of canonical tensors */
    ckpt_file_hash *out;
    const ckpt_share *share;
    const int *owner; /* of each file; NULL: all are this process's */
} files_job;

/* Runs of one gather; a computed tensor covers what it is computed from. */
static ckpt_status cover_gather(files_job *f, const ckpt_gather *g, ckpt_err *err)
{
    int bits = ckpt_dtype_get(g->from)->bits;
    for (size_t k = 0; k < g->n_copies; k++) {
        const ckpt_copy *copy = &g->copies[k];
        ckpt_status status;
        if (copy->derived == NULL)
            status = ckpt_copy_src_runs(copy, bits % 8 == 0 ? bits / 8 : 1, add_span,
                                        &f->covered[copy->file], err);
        else if ((status = cover_gather(f, &copy->derived->a, err)) == CKPT_OK &&
                 (status = cover_gather(f, &copy->derived->b, err)) == CKPT_OK)
            status = cover_gather(f, &copy->derived->g, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status cover_files(files_job *f, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    size_t n = f->model->n_tensors;
    for (size_t i = 0; i < n + f->model->n_copies; i++) {
        const ckpt_canon *c = i < n ? &f->model->tensors[i] : &f->model->copies[i - n];
        ckpt_gather g;
        CKPT_CHECK(ckpt_gather_canon(f->model->src, c, &arena, &g, err));
        CKPT_CHECK(cover_gather(f, &g, err));
    }
    for (size_t i = 0; i < f->model->src->n_files; i++)
        if (f->covered[i].n > 1)
            qsort(f->covered[i].span, f->covered[i].n, sizeof *f->covered[i].span, span_order);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status feed_range(ckpt_worker *w, int fd, bool sparse, ckpt_sha256_stream *s,
                              uint64_t lo, uint64_t hi, ckpt_err *err)
{
    while (lo < hi) {
        size_t n = (size_t)ckpt_min_u64(hi - lo, w->job->piece);
        ckpt_status status = sparse ? ckpt_pread_holes(fd, w->buf, n, lo, err)
                                    : ckpt_pread_full(fd, w->buf, n, lo, err);
        if (status != CKPT_OK)
            return status;
        ckpt_sha256_stream_update2(s, w->buf, n, NULL, NULL, 0);
        lo += n;
        if (ckpt_interrupted)
            return ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted");
    }
    return CKPT_OK;
}

static ckpt_status file_item(ckpt_worker *w, size_t index, ckpt_err *err)
{
    files_job *f = w->job->self;
    const ckpt_file *file = &f->model->src->files[index];
    const span_list *covered = &f->covered[index];
    ckpt_status status = CKPT_OK;
    ckpt_sha256_stream s;
    uint64_t size = file->size, at = 0;
    int fd = file->fd, own = -1;
    if (f->owner != NULL && f->owner[index] != f->share->rank)
        return CKPT_OK;
    if (fd < 0) {
        CKPT_CHECK(ckpt_open_read(file->path, &own, &size, err));
        fd = own;
    }
    f->out[index].size = size;
    ckpt_sha256_stream_init(&s);
    for (size_t i = 0; i <= covered->n; i++) {
        uint64_t next = i < covered->n ? covered->span[i][0] : size;
        if (next > at)
            CKPT_TRY(feed_range(w, fd, file->sparse, &s, at, next, err), "%s", file->name);
        if (i < covered->n)
            at = ckpt_max_u64(at, covered->span[i][1]);
    }
    ckpt_sha256_stream_final(&s, f->out[index].rest);
    if (f->whole) {
        ckpt_sha256_stream_init(&s);
        CKPT_TRY(feed_range(w, fd, file->sparse, &s, 0, size, err), "%s", file->name);
        ckpt_sha256_stream_final(&s, f->out[index].sha256);
        ckpt_job_advance(w, size);
    }
done:
    if (own >= 0)
        close(own);
    return status;
}

static ckpt_status run_files(files_job *f, ckpt_job *j, size_t n, const ckpt_stream_opts *opts,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(cover_files(f, err));
    CKPT_CHECK(ckpt_job_open(j, opts, err));
    j->n_items = n;
    for (size_t i = 0; i < n; i++)
        if (f->owner == NULL || f->owner[i] == f->share->rank)
            j->total_bytes += f->model->src->files[i].size;
    CKPT_CHECK(ckpt_job_run(j));
done:
    return status;
}

ckpt_status ckpt_stream_files(const ckpt_model *model, bool whole, const ckpt_stream_opts *opts,
                              ckpt_arena *arena, ckpt_file_hash *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t n = model->src->n_files, real = ckpt_source_n_real(model->src);
    const ckpt_share *share = opts != NULL ? opts->share : NULL;
    uint64_t total = 0, at = 0;
    int *owner = ckpt_share_alone(share) ? NULL : calloc(n + 1, sizeof *owner);
    (void)arena;
    files_job f = {.model = model,
                   .whole = whole,
                   .out = out,
                   .share = share,
                   .owner = owner,
                   .covered = calloc(n + 1, sizeof *f.covered)};
    ckpt_job j = {.run = file_item, .self = &f};
    ckpt_cache_stream(model->src, 0);
    if (f.covered == NULL || (owner == NULL && !ckpt_share_alone(share)))
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < real; i++)
        total += model->src->files[i].size;
    for (size_t i = 0; owner != NULL && i < real; at += model->src->files[i++].size)
        owner[i] = ckpt_share_of(share, at, model->src->files[i].size, total);
    if (status == CKPT_OK)
        status = run_files(&f, &j, real, opts, err);
    CKPT_CHECK(ckpt_share_agree(share, status, err));
    if (owner != NULL)
        CKPT_CHECK(ckpt_share_table(share, out, real, sizeof *out, owner, err));
done:
    ckpt_job_close(&j);
    for (size_t i = 0; f.covered != NULL && i < n; i++)
        free(f.covered[i].span);
    free(f.covered);
    free(owner);
    return status;
}

/* ---- visiting ---------------------------------------------------------------------------------- */

typedef struct visit_job {
    const ckpt_model *a, *b;
    const int64_t *other;
    const bool *select;
    ckpt_gather *ga, *gb;
    ckpt_visit_fn fn;
    void *self;
} visit_job;

static ckpt_status visit_item(ckpt_worker *w, size_t i, ckpt_err *err)
{
    visit_job *v = w->job->self;
    if (v->select != NULL && !v->select[i])
        return CKPT_OK;
    if (v->b != NULL && v->other[i] < 0)
        return CKPT_OK;
    uint64_t bytes = v->ga[i].bytes;
    w->now = v->ga[i].name;
    size_t half = (size_t)(w->job->piece / 2 / 4096 * 4096);
    size_t step = v->b != NULL ? half : (size_t)w->job->piece;
    for (uint64_t lo = 0; lo < bytes; lo += step) {
        size_t n = (size_t)ckpt_min_u64(step, bytes - lo);
        uint8_t *second = v->b != NULL ? w->buf + half : NULL;
        ckpt_status status = ckpt_gather_run(v->a->src, &v->ga[i], lo, n, w->buf, &w->scratch, err);
        if (status == CKPT_OK && second != NULL)
            status = ckpt_gather_run(v->b->src, &v->gb[i], lo, n, second, &w->scratch, err);
        if (status == CKPT_OK)
            status = v->fn(v->self, i, lo, w->buf, second, n, err);
        if (status == CKPT_OK && ckpt_interrupted)
            status = ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted");
        if (status != CKPT_OK)
            return status;
        const bool enough = v->select != NULL && !v->select[i];
        ckpt_job_advance(w, enough ? bytes - lo : n);
        if (enough)
            break;
    }
    return CKPT_OK;
}

ckpt_status ckpt_stream_visit(const ckpt_model *model, const ckpt_model *other,
                              const int64_t *other_index, const bool *select,
                              const ckpt_stream_opts *opts, ckpt_visit_fn fn, void *self,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    size_t n = model->n_tensors;
    visit_job v = {
        .a = model, .b = other, .other = other_index, .select = select, .fn = fn, .self = self};
    ckpt_job j = {.run = visit_item, .self = &v, .n_items = n};
    v.ga = ckpt_arena_array(&arena, n, sizeof *v.ga);
    v.gb = ckpt_arena_array(&arena, n, sizeof *v.gb);
    ckpt_cache_stream(model->src, 0);
    if (other != NULL)
        ckpt_cache_stream(other->src, 0);
    if (v.ga == NULL || v.gb == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        if ((select != NULL && !select[i]) || (other != NULL && other_index[i] < 0))
            continue;
        CKPT_CHECK(ckpt_plan_canon(model, i, &arena, &v.ga[i], err));
        if (other != NULL)
            CKPT_CHECK(ckpt_plan_canon(other, (size_t)other_index[i], &arena, &v.gb[i], err));
        j.total_bytes += v.ga[i].bytes;
    }
    CKPT_CHECK(ckpt_job_open(&j, opts, err));
    CKPT_CHECK(ckpt_job_run(&j));
done:
    ckpt_job_close(&j);
    ckpt_arena_free(&arena);
    return status;
}
