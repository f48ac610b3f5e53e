/* After --rename the output may read back under other canonical names than planned: a layout may no
 * longer recognise it, and then tensors are called what they are stored as. The manifest must list
 * the names that a reader will see. */
#include "convert.h"

#include <stdlib.h>
#include <string.h>

static int by_stored(const void *a, const void *b)
{
    const ckpt_result_tensor *x = *(const ckpt_result_tensor *const *)a;
    const ckpt_result_tensor *y = *(const ckpt_result_tensor *const *)b;
    int order = strcmp(x->stored, y->stored);
    return order != 0 ? order : (x > y) - (x < y);
}

/* Results in the order of the names they are stored under. */
typedef struct stored_index {
    const ckpt_result_tensor **at;
    size_t n;
} stored_index;

/* Where results of that stored name start. */
static size_t first_of(const stored_index *x, const char *stored)
{
    size_t lo = 0, hi = x->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(x->at[mid]->stored, stored) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool same_kind(const ckpt_result_tensor *r, const ckpt_canon *t)
{
    bool same = r->dtype == t->dtype && r->rank == t->rank;
    for (int d = 0; same && d < t->rank; d++)
        same = r->dims[d] == t->dims[d];
    return same;
}

/* The planned tensor that is read back as t: the only one in its stored tensor, or the one that
 * kept its name. NULL: cut or joined otherwise than planned, so its digest is not known. */
static const ckpt_result_tensor *planned(const stored_index *x, const ckpt_model *model,
                                         const ckpt_canon *t)
{
    const char *stored = model->src->tensors[t->stored].name;
    size_t lo = first_of(x, stored), hi = lo;
    while (hi < x->n && strcmp(x->at[hi]->stored, stored) == 0) {
        if (strcmp(x->at[hi]->name, t->name) == 0 && same_kind(x->at[hi], t))
            return x->at[hi];
        hi++;
    }
    return hi - lo == 1 && same_kind(x->at[lo], t) ? x->at[lo] : NULL;
}

static bool names_kept(const ckpt_plan *plan, const ckpt_model *model)
{
    bool kept = plan->n_results == model->n_tensors; /* both sorted by name */
    for (size_t i = 0; kept && i < model->n_tensors; i++)
        kept = strcmp(plan->results[i].name, model->tensors[i].name) == 0;
    return kept;
}

/* Digests known from the plan under the names of the model; false if one is not. */
static ckpt_status take_known(const ckpt_plan *plan, const ckpt_convert_result *result,
                              const ckpt_model *model, ckpt_tensor_hash *out, bool *known,
                              ckpt_err *err)
{
    stored_index x = {malloc((plan->n_results + 1) * sizeof *x.at), plan->n_results};
    if (x.at == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < x.n; i++)
        x.at[i] = &plan->results[i];
    qsort(x.at, x.n, sizeof *x.at, by_stored);
    *known = true;
    for (size_t i = 0; *known && i < model->n_tensors; i++) {
        const ckpt_result_tensor *r = planned(&x, model, &model->tensors[i]);
        *known = r != NULL;
        if (*known)
            out[i] = result->tensors[r - plan->results];
    }
    free(x.at);
    return CKPT_OK;
}

/* Read the output back. What was padding to the plan may be part of a tensor now, so the digests of
 * bytes outside tensors change as well. */
static ckpt_status read_digests(ckpt_tool *tool, ckpt_manifest *m, const ckpt_model *model,
                                ckpt_tensor_hash *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_bar bar;
    const ckpt_source *src = model->src;
    ckpt_file_hash *files = ckpt_arena_array(&tool->arena, src->n_files + 1, sizeof *files);
    if (files == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_bar_start(&bar, "digests", tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(tool, &bar);
    CKPT_CHECK(ckpt_stream_digest(model, &opts, &tool->arena, out, NULL, err));
    CKPT_CHECK(ckpt_stream_rest(model, &opts, files, err));
    size_t real = ckpt_source_n_real(src);
    bool single = m->n_files == 1 && real == 1; /* still under its temporary name */
    for (size_t f = 0; f < real; f++)
        for (size_t k = 0; k < m->n_files; k++)
            if (single || strcmp(m->files[k].name, src->files[f].name) == 0)
                memcpy(m->files[k].rest, files[f].rest, CKPT_SHA256_LEN);
done:
    ckpt_bar_stop(&bar);
    return status;
}

static ckpt_status relist(ckpt_manifest *m, const ckpt_model *model, const ckpt_tensor_hash *hashes,
                          ckpt_err *err)
{
    ckpt_status status;
    const char **names = ckpt_arena_array(&m->arena, model->n_tensors + 1, sizeof *names);
    uint8_t *all = ckpt_arena_alloc(&m->arena, (model->n_tensors + 1) * CKPT_SHA256_LEN);
    m->tensors = ckpt_arena_array(&m->arena, model->n_tensors + 1, sizeof *m->tensors);
    if (names == NULL || all == NULL || m->tensors == NULL)
        return ckpt_tool_no_memory(err);
    m->n_tensors = model->n_tensors;
    for (size_t i = 0; i < model->n_tensors; i++) {
        const ckpt_canon *t = &model->tensors[i];
        names[i] = ckpt_arena_strdup(&m->arena, t->name);
        const int64_t *dims =
            ckpt_arena_memdup(&m->arena, t->dims, (size_t)t->rank * sizeof t->dims[0]);
        if (names[i] == NULL || (dims == NULL && t->rank > 0))
            return ckpt_tool_no_memory(err);
        m->tensors[i] = (ckpt_manifest_tensor){names[i], t->dtype, t->rank, dims, hashes[i]};
        memcpy(all + i * CKPT_SHA256_LEN, hashes[i].digest, CKPT_SHA256_LEN);
    }
    CKPT_CHECK(ckpt_root_digest(names, all, model->n_tensors, m->root, err));
    m->layout = model->layout != NULL ? model->layout->name : NULL;
    m->family = model->layout != NULL ? model->layout->family : NULL;
    if (model->layout == NULL) {
        ckpt_json_free(m->config); /* says how a layout reads it */
        m->config = NULL;
    }
done:
    return status;
}

ckpt_status ckpt_convert_renamed(ckpt_tool *tool, ckpt_report *r, ckpt_manifest *m,
                                 const ckpt_plan *plan, const ckpt_convert_result *result,
                                 const ckpt_container *container, const char *path, bool *renamed,
                                 ckpt_err *err)
{
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_open_opts opts = {.iteration = -1, .container = container->name};
    ckpt_model_opts strict = {.allow_unknown = false}, lenient = {.lenient = true};
    ckpt_err why = {0};
    bool known = false;
    *renamed = false;
    CKPT_TRY(ckpt_source_open(&src, path, &opts, err), "checking what was written");
    if (ckpt_model_bind(&model, &src, &strict, &why) != CKPT_OK) {
        ckpt_model_release(&model);
        CKPT_TRY(ckpt_model_bind(&model, &src, &lenient, err), "checking what was written");
    }
    if (why.text[0] != '\0' && !names_kept(plan, &model))
        CKPT_CHECK(ckpt_report_warn(tool, r, err, "the renamed output: %s", why.text));
    if (names_kept(plan, &model))
        goto done;
    ckpt_tensor_hash *hashes = ckpt_arena_array(&tool->arena, model.n_tensors + 1, sizeof *hashes);
    if (hashes == NULL) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    CKPT_CHECK(take_known(plan, result, &model, hashes, &known, err));
    if (!known)
        CKPT_CHECK(read_digests(tool, m, &model, hashes, err));
    CKPT_CHECK(relist(m, &model, hashes, err));
    *renamed = true;
done:
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}
