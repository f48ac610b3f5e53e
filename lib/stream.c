/* Reading jobs of the executor: digests of a model, visits. */
#include "cache.h"
#include "checked.h"
#include "gather.h"
#include "job.h"

#include <stdlib.h>
#include <string.h>

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
