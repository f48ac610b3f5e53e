/* Is what a conversion reads what it should be? One file of a directory against the directory's manifest,
 * before; and, with --verify, the source against what was made of it, after. */
#include "conversion.h"
#include "part.h"

#include <stdlib.h>
#include <string.h>

/* A model of some of another's tensors, which it borrows but for the list. */
typedef struct subset {
    ckpt_model model;
    size_t *at; /* their indices in the other */
    ckpt_tensor_hash *hashes;
} subset;

static ckpt_status begin_subset(subset *s, const ckpt_model *of, ckpt_err *err)
{
    s->model = *of;
    s->model.n_tensors = 0;
    s->model.tensors = calloc(of->n_tensors + 1, sizeof *s->model.tensors);
    s->at = calloc(of->n_tensors + 1, sizeof *s->at);
    s->hashes = calloc(of->n_tensors + 1, sizeof *s->hashes);
    return s->model.tensors != NULL && s->at != NULL && s->hashes != NULL
               ? CKPT_OK
               : ckpt_tool_no_memory(err);
}

static void add_to_subset(subset *s, const ckpt_model *of, size_t i)
{
    s->at[s->model.n_tensors] = i;
    s->model.tensors[s->model.n_tensors++] = of->tensors[i];
}

static void release_subset(subset *s)
{
    free(s->model.tensors);
    free(s->at);
    free(s->hashes);
}

static ckpt_status digest_subset(ckpt_tool *tool, subset *s, uint8_t root[CKPT_SHA256_LEN],
                                 ckpt_err *err)
{
    ckpt_bar bar;
    ckpt_bar_start(&bar, "source", tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(tool, &bar);
    ckpt_status status = ckpt_stream_digest(&s->model, &opts, &tool->arena, s->hashes, root, err);
    ckpt_bar_stop(&bar);
    return status;
}

/* ---- one file of a directory ------------------------------------------------------------------- */

static ckpt_status compare_part(const conversion *c, const subset *s, const ckpt_manifest *m,
                                ckpt_err *err)
{
    for (size_t i = 0; i < s->model.n_tensors; i++) {
        const char *name = s->model.tensors[i].name;
        int64_t at = ckpt_manifest_find_tensor(m, name);
        if (at >= 0 &&
            memcmp(m->tensors[at].hash.digest, s->hashes[i].digest, CKPT_SHA256_LEN) == 0)
            continue;
        return ckpt_fail(err, CKPT_E_MISMATCH,
                         "%s: tensor '%s' %s; `ckpt verify --hash` names all that differ, --force "
                         "converts them anyway",
                         c->src_path, name,
                         at < 0 ? "is not in the manifest of its directory"
                                : "contradicts the manifest of its directory");
    }
    return CKPT_OK;
}

/* Through a source of its own: the conversion's has lost its optimizer, perhaps, and may not take over a
 * configuration that is not in the file. */
static ckpt_status open_part(conversion *c, ckpt_source *src, ckpt_model *model, ckpt_manifest *m,
                             bool *found, ckpt_err *err)
{
    size_t all;
    ckpt_status status = ckpt_tool_open(c->tool, src, c->src_path, -1, err);
    *found = false;
    if (status == CKPT_OK &&
        (status = ckpt_part_bind(c->tool, src, model, m, &all, found, err)) != CKPT_OK)
        ckpt_err_frame(err, "%s: the manifest of its directory (--force does without it)",
                       c->src_path);
    return status;
}

ckpt_status ckpt_convert_check_part(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_manifest m = {0};
    subset s = {0};
    bool found = false;
    if (c->o->force || !ckpt_manifest_single(&c->src))
        return CKPT_OK;
    status = open_part(c, &src, &model, &m, &found, err);
    if (status == CKPT_OK && found)
        status = begin_subset(&s, &model, err);
    CKPT_CHECK(ckpt_share_agree(c->tool->share, status, err));
    if (!found)
        goto done;
    for (size_t i = 0; i < model.n_tensors; i++) {
        int64_t at = ckpt_model_find(&c->model, model.tensors[i].name);
        if (at < 0 || ckpt_tool_selected(&c->model, (size_t)at, &c->o->include, &c->o->exclude))
            add_to_subset(&s, &model, i);
    }
    CKPT_CHECK(digest_subset(c->tool, &s, NULL, err));
    CKPT_CHECK(compare_part(c, &s, &m, err));
done:
    release_subset(&s);
    ckpt_manifest_release(&m);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}

/* ---- the source once more ---------------------------------------------------------------------- */

/* What was opened: a plan that quantises has a model of its own in between. */
static const ckpt_model *source_model(const conversion *c)
{
    return c->quant.kind != CKPT_WQUANT_NONE ? &c->model : c->plan.model;
}

static ckpt_status choose_again(const conversion *c, subset *s, size_t *result_of, ckpt_err *err)
{
    const ckpt_model *model = source_model(c);
    ckpt_status status = begin_subset(s, model, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; model == c->plan.model && i < c->plan.n_results; i++) {
        const ckpt_result_tensor *r = &c->plan.results[i];
        if (r->model_tensor >= 0 && !r->changed)
            result_of[r->model_tensor] = i + 1;
    }
    for (size_t i = 0; i < model->n_tensors; i++)
        if (c->result.has_source_root || result_of[i] > 0)
            add_to_subset(s, model, i);
    return CKPT_OK;
}

static ckpt_status source_changed(conversion *c, const char *name, const uint8_t *root,
                                  ckpt_err *err)
{
    char now[2 * CKPT_SHA256_LEN + 1], was[2 * CKPT_SHA256_LEN + 1];
    c->source_changed = true;
    if (name != NULL)
        return ckpt_fail(err, CKPT_E_IO,
                         "%s: the source changed while it was being read: tensor '%s' is not what "
                         "was written",
                         c->src_path, name);
    ckpt_hex(root, now);
    ckpt_hex(c->result.source_root, was);
    return ckpt_fail(err, CKPT_E_IO,
                     "%s: the source changed while it was being read: its root is now %s, what was "
                     "written has %s",
                     c->src_path, now, was);
}

ckpt_status ckpt_convert_read_again(conversion *c, ckpt_err *err)
{
    ckpt_status status;
    uint8_t root[CKPT_SHA256_LEN];
    subset s = {0};
    const ckpt_model *model = source_model(c);
    size_t *result_of = calloc(model->n_tensors + 1, sizeof *result_of);
    status = result_of != NULL ? choose_again(c, &s, result_of, err) : ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_share_agree(c->tool->share, status, err));
    model->src->reading++;
    CKPT_CHECK(digest_subset(c->tool, &s, root, err));
    if (c->result.has_source_root) {
        if (memcmp(root, c->result.source_root, sizeof root) != 0)
            status = source_changed(c, NULL, root, err);
        goto done;
    }
    for (size_t i = 0; status == CKPT_OK && i < s.model.n_tensors; i++)
        if (memcmp(s.hashes[i].digest, c->result.tensors[result_of[s.at[i]] - 1].digest,
                   CKPT_SHA256_LEN) != 0)
            status = source_changed(c, s.model.tensors[i].name, NULL, err);
done:
    release_subset(&s);
    free(result_of);
    return status;
}
