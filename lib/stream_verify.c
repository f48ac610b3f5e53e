/* Digests of the files of a source: of what belongs to no tensor, and, in one pass over all bytes, of
 * whole files together with those of the tensors. That pass is a run of the executor
 * (stream_convert.c) whose output is the source itself: its pieces go through turnstiles and window, and
 * are written nowhere. */
#include "checked.h"
#include "derive.h"
#include "job.h"
#include "spans.h"

#include <stdlib.h>
#include <string.h>

/* ---- bytes of tensors -------------------------------------------------------------------------- */

/* Runs of one gather; a computed tensor covers what it is computed from. */
static ckpt_status cover_gather(ckpt_spans *covered, const ckpt_gather *g, ckpt_err *err)
{
    int bits = ckpt_dtype_get(g->from)->bits;
    for (size_t k = 0; k < g->n_copies; k++) {
        const ckpt_copy *copy = &g->copies[k];
        ckpt_status status;
        if (copy->derived == NULL)
            status = ckpt_copy_src_runs(copy, bits % 8 == 0 ? bits / 8 : 1, ckpt_spans_add,
                                        &covered[copy->file], err);
        else if ((status = cover_gather(covered, &copy->derived->a, err)) == CKPT_OK &&
                 (status = cover_gather(covered, &copy->derived->b, err)) == CKPT_OK)
            status = cover_gather(covered, &copy->derived->g, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Bytes of canonical tensors in every file. */
static ckpt_status cover_files(const ckpt_model *model, ckpt_spans **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    size_t n = model->n_tensors, files = model->src->n_files;
    ckpt_spans *covered = *out = calloc(files + 1, sizeof *covered);
    if (covered == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < n + model->n_copies; i++) {
        const ckpt_canon *c = i < n ? &model->tensors[i] : &model->copies[i - n];
        ckpt_gather g;
        CKPT_CHECK(ckpt_gather_canon(model->src, c, &arena, &g, err));
        CKPT_CHECK(cover_gather(covered, &g, err));
    }
    for (size_t i = 0; i < files; i++)
        ckpt_spans_settle(&covered[i]);
done:
    ckpt_arena_free(&arena);
    return status;
}

static void free_covered(ckpt_spans *covered, size_t n)
{
    for (size_t i = 0; covered != NULL && i < n; i++)
        free(covered[i].span);
    free(covered);
}

/* ---- what is no tensor ------------------------------------------------------------------------- */

typedef struct rest_job {
    const ckpt_model *model;
    const ckpt_spans *covered; /* per file */
    ckpt_file_hash *out;
    const ckpt_share *share;
    const int *owner; /* of each file; NULL: all are this process's */
} rest_job;

typedef struct rest_feed {
    ckpt_worker *w;
    ckpt_sha256_stream s;
    uint32_t file;
} rest_feed;

static ckpt_status feed_range(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    rest_feed *f = self;
    const rest_job *r = f->w->job->self;
    while (len > 0) {
        size_t n = (size_t)ckpt_min_u64(len, f->w->job->piece);
        ckpt_status status =
            ckpt_source_read_real(r->model->src, f->file, f->w->buf, n, offset, err);
        if (status != CKPT_OK)
            return status;
        ckpt_sha256_stream_update2(&f->s, f->w->buf, n, NULL, NULL, 0);
        offset += n;
        len -= n;
        if (ckpt_interrupted)
            return ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted");
    }
    return CKPT_OK;
}

static ckpt_status rest_item(ckpt_worker *w, size_t index, ckpt_err *err)
{
    const rest_job *r = w->job->self;
    rest_feed f = {.w = w, .file = (uint32_t)index};
    uint64_t size = r->model->src->files[index].size;
    if (r->owner != NULL && r->owner[index] != r->share->rank)
        return CKPT_OK;
    r->out[index].size = size;
    ckpt_sha256_stream_init(&f.s);
    ckpt_status status = ckpt_spans_gaps(&r->covered[index], 0, size, feed_range, &f, err);
    if (status == CKPT_OK)
        ckpt_sha256_stream_final(&f.s, r->out[index].rest);
    return status;
}

ckpt_status ckpt_stream_rest(const ckpt_model *model, const ckpt_stream_opts *opts,
                             ckpt_file_hash *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t real = ckpt_source_n_real(model->src);
    const ckpt_share *share = opts != NULL ? opts->share : NULL;
    uint64_t total = 0, at = 0;
    int *owner = ckpt_share_alone(share) ? NULL : calloc(real + 1, sizeof *owner);
    ckpt_spans *covered = NULL;
    rest_job r = {.model = model, .out = out, .share = share, .owner = owner};
    ckpt_job j = {.run = rest_item, .self = &r, .n_items = real};
    if (owner == NULL && !ckpt_share_alone(share))
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < real; i++)
        total += model->src->files[i].size;
    for (size_t i = 0; owner != NULL && i < real; at += model->src->files[i++].size)
        owner[i] = ckpt_share_of(share, at, model->src->files[i].size, total);
    if (status == CKPT_OK)
        status = cover_files(model, &covered, err);
    r.covered = covered;
    if (status == CKPT_OK)
        status = ckpt_job_open(&j, opts, err);
    if (status == CKPT_OK)
        status = ckpt_job_run(&j);
    CKPT_CHECK(ckpt_share_agree(share, status, err));
    if (owner != NULL)
        CKPT_CHECK(ckpt_share_table(share, out, real, sizeof *out, owner, err));
done:
    ckpt_job_close(&j);
    free_covered(covered, model->src->n_files);
    free(owner);
    return status;
}

/* ---- everything in one pass -------------------------------------------------------------------- */

/* A file's segments: what belongs to tensors, and what does not. */
static ckpt_status list_segs(ckpt_plan *plan, size_t f, const ckpt_spans *covered, ckpt_err *err)
{
    ckpt_out_file *file = &plan->sink.files[f];
    uint64_t at = 0;
    file->segs = ckpt_arena_array(&plan->arena, 2 * covered->n + 1, sizeof *file->segs);
    if (file->segs == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i <= covered->n; i++) {
        uint64_t next = i < covered->n ? covered->span[i][0] : file->size;
        uint64_t end = i < covered->n ? covered->span[i][1] : file->size;
        if (next > at)
            file->segs[file->n_segs++] =
                (ckpt_seg){.offset = at, .len = next - at, .kind = CKPT_SEG_SOURCE, .copy = true};
        if (end > next)
            file->segs[file->n_segs++] =
                (ckpt_seg){.offset = next, .len = end - next, .kind = CKPT_SEG_SOURCE};
        at = end;
    }
    return CKPT_OK;
}

static ckpt_status list_files(ckpt_plan *plan, const ckpt_spans *covered, ckpt_err *err)
{
    const ckpt_source *src = plan->model->src;
    ckpt_sink *sink = &plan->sink;
    ckpt_status status = CKPT_OK;
    sink->n_files = ckpt_source_n_real(src);
    sink->files = ckpt_arena_array(&plan->arena, sink->n_files, sizeof *sink->files);
    if (sink->files == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f++) {
        sink->files[f] = (ckpt_out_file){
            .name = src->files[f].name, .size = src->files[f].size, .is_data = covered[f].n > 0};
        CKPT_CHECK(list_segs(plan, f, &covered[f], err));
        plan->total_bytes += src->files[f].size;
    }
done:
    return status;
}

static ckpt_status list_tensors(ckpt_plan *plan, size_t lo, size_t hi, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_model *model = plan->model;
    plan->n_results = hi - lo;
    plan->results = ckpt_arena_array(&plan->arena, plan->n_results, sizeof *plan->results);
    if (plan->results == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < plan->n_results; i++) {
        const ckpt_canon *c = &model->tensors[lo + i];
        ckpt_result_tensor *r = &plan->results[i];
        *r = (ckpt_result_tensor){.name = c->name,
                                  .dtype = c->dtype,
                                  .rank = c->rank,
                                  .dims = c->dims,
                                  .model_tensor = (int64_t)(lo + i)};
        CKPT_CHECK(ckpt_plan_canon(model, lo + i, &plan->arena, &r->gather, err));
    }
done:
    return status;
}

ckpt_status ckpt_stream_verify(const ckpt_model *model, size_t lo, size_t hi,
                               const ckpt_stream_opts *opts, ckpt_arena *arena,
                               ckpt_tensor_hash *tensors, ckpt_file_hash *files,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status;
    ckpt_stream_opts few = *opts;
    ckpt_model same = *model;
    ckpt_plan plan = {.model = &same, .in_place = true};
    ckpt_convert_result result = {0};
    ckpt_spans *covered = NULL;
    /* Nobody waits for a write: more workers than processors only drive each other out of the caches. */
    if (few.threads == 0)
        few.threads = ckpt_job_cores(opts) < 2 ? 2 : ckpt_job_cores(opts);
    CKPT_CHECK(cover_files(model, &covered, err));
    CKPT_CHECK(list_files(&plan, covered, err));
    CKPT_CHECK(list_tensors(&plan, lo, hi, err));
    CKPT_CHECK(ckpt_stream_convert(&plan, NULL, &few, arena, &result, err));
    memcpy(tensors, result.tensors, plan.n_results * sizeof *tensors);
    memcpy(files, result.files, plan.sink.n_files * sizeof *files);
    if (root != NULL)
        memcpy(root, result.root, CKPT_SHA256_LEN);
done:
    free_covered(covered, model->src->n_files);
    ckpt_arena_free(&plan.arena);
    return status;
}
