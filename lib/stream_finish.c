/* Before and after the executor's run: the leaves of all results, their digests and roots. */
#include "job.h"

#include <stdlib.h>
#include <string.h>

/* Result indices in the order in which their target tensors are written. */
static int write_order(const void *a, const void *b)
{
    const ckpt_result_tensor *x = *(const ckpt_result_tensor *const *)a;
    const ckpt_result_tensor *y = *(const ckpt_result_tensor *const *)b;
    if (x->out_tensor != y->out_tensor)
        return x->out_tensor < y->out_tensor ? -1 : 1;
    return x < y ? -1 : x > y;
}

static ckpt_status list_twins(ckpt_written *written, ckpt_leaf_list *leaves, ckpt_arena *arena,
                              ckpt_tensor_hash *twins, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < written->n_twins; i++) {
        const ckpt_twin *t = &written->twins[i];
        if (t->result < 0)
            CKPT_CHECK(ckpt_add_leaves(leaves, &t->a, written, arena, &twins[2 * i], err));
        CKPT_CHECK(ckpt_add_leaves(leaves, &t->b, written, arena, &twins[2 * i + 1], err));
    }
done:
    return status;
}

ckpt_status ckpt_list_results(ckpt_plan *plan, ckpt_written *written, ckpt_leaf_list *leaves,
                              ckpt_arena *arena, ckpt_tensor_hash *hashes,
                              ckpt_tensor_hash *originals, ckpt_tensor_hash *twins, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    /* Decoded bytes do not come through the window, but from the source itself. */
    bool decoded = plan->in_place && plan->model->src->n_virtual > 0;
    const ckpt_result_tensor **order = malloc((plan->n_results + 1) * sizeof *order);
    if (order == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < plan->n_results; i++)
        order[i] = &plan->results[i];
    qsort(order, plan->n_results, sizeof *order, write_order);
    for (size_t i = 0; i < plan->n_results; i++) {
        size_t at = (size_t)(order[i] - plan->results);
        CKPT_CHECK(ckpt_add_leaves(leaves, &written->results[at], decoded ? NULL : written, arena,
                                   &hashes[at], err));
        if (plan->results[at].changed)
            CKPT_CHECK(ckpt_add_leaves(leaves, &plan->results[at].original, NULL, arena,
                                       &originals[at], err));
    }
    CKPT_CHECK(list_twins(written, leaves, arena, twins, err));
done:
    free(order);
    return status;
}

void ckpt_pace_originals(ckpt_leaf_list *list)
{
    size_t first = 0; /* of the result's leaves, which come just before */
    for (size_t i = 0, next; i < list->n; i = next) {
        const ckpt_leaf *leaf = &list->leaves[i];
        for (next = i + 1; next < list->n && list->leaves[next].gather == leaf->gather;)
            next++;
        for (size_t k = i; k < next && leaf->written == NULL; k++)
            list->leaves[k].due =
                i > first ? list->leaves[first + (k - i) * (i - first) / (next - i)].due : 0;
        first = i;
    }
}

/* ---- after the run ----------------------------------------------------------------------------- */

/* Tensor digests, the root of what was written, and the root of what it was made from: of the whole
 * source model as it was. When tensors were left out or folded their digests are not known, and
 * there is no source root: the root of a part would pass for that of the whole. */
ckpt_status ckpt_finish_results(const ckpt_plan *plan, ckpt_sha256 *sha,
                                ckpt_tensor_hash *originals, ckpt_convert_result *out,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char **names = malloc((plan->n_results + 1) * sizeof *names);
    if (names == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    size_t n = 0;
    for (size_t i = 0; i < plan->n_results; i++) {
        const ckpt_result_tensor *r = &plan->results[i];
        ckpt_tensor_hash *h = &out->tensors[i];
        ckpt_tensor_digest(sha, r->dtype, r->rank, r->dims, h->leaves, h->n_leaves, h->digest);
        names[i] = r->name;
    }
    CKPT_CHECK(ckpt_finish_root(out->tensors, names, plan->n_results, out->root, err));
    for (size_t i = 0; i < plan->n_results; i++)
        n += plan->results[i].model_tensor >= 0;
    out->has_source_root = n == plan->model->n_tensors;
    n = 0;
    for (size_t i = 0; out->has_source_root && i < plan->n_results; i++) {
        const ckpt_result_tensor *r = &plan->results[i];
        if (r->model_tensor < 0)
            continue;
        ckpt_tensor_hash *o = &originals[i];
        if (r->changed)
            ckpt_tensor_digest(sha, r->original.from, r->rank, r->dims, o->leaves, o->n_leaves,
                               o->digest);
        else
            *o = out->tensors[i];
        names[n] = r->name;
        originals[n++] = *o;
    }
    if (out->has_source_root)
        CKPT_CHECK(ckpt_finish_root(originals, names, n, out->source_root, err));
done:
    free(names);
    return status;
}

ckpt_status ckpt_compare_twins(const ckpt_written *written, const ckpt_tensor_hash *hashes,
                               const ckpt_tensor_hash *twins, ckpt_err *err)
{
    for (size_t i = 0; i < written->n_twins; i++) {
        const ckpt_twin *t = &written->twins[i];
        const ckpt_tensor_hash *a = t->result >= 0 ? &hashes[t->result] : &twins[2 * i];
        const ckpt_tensor_hash *b = &twins[2 * i + 1];
        if (a->n_leaves != b->n_leaves ||
            memcmp(a->leaves, b->leaves, (size_t)a->n_leaves * CKPT_SHA256_LEN) != 0)
            return ckpt_fail(
                err, CKPT_E_IO,
                "tensor '%s' is written twice, and its values changed between the two: "
                "the source changed while it was being read",
                t->name);
    }
    return CKPT_OK;
}
