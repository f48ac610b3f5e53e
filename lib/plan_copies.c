/* Tensors that a checkpoint stores twice: multi-token prediction layers of Hugging Face repeat the
 * embedding and the head. Not part of the canonical model: checked against what they repeat, left
 * out, and written again where the target's choices ask for them. */
#include "plan_internal.h"

#include <stdio.h>
#include <string.h>

ckpt_status ckpt_model_copy_equal(const ckpt_model *model, size_t copy, bool *equal, ckpt_err *err)
{
    const ckpt_canon *c = &model->copies[copy];
    int64_t i = ckpt_model_find(model, c->name);
    if (i < 0)
        return ckpt_fail(err, CKPT_E_INTERNAL, "'%s' is not there", c->name);
    return ckpt_canon_equal(model->src, c, &model->tensors[i], equal, err);
}

ckpt_status ckpt_plan_check_copies(ckpt_planner *p, ckpt_err *err)
{
    const ckpt_model *m = p->model;
    for (size_t i = 0; i < m->n_copies; i++) {
        bool equal;
        ckpt_status status = ckpt_model_copy_equal(m, i, &equal, err);
        if (status != CKPT_OK)
            return status;
        if (!equal)
            return ckpt_fail(
                err, CKPT_E_MISMATCH, "'%s' must repeat '%s' (%s), but differs from it",
                m->src->tensors[m->copies[i].stored].name,
                m->src->tensors[m->tensors[ckpt_model_find(m, m->copies[i].name)].stored].name,
                m->copies[i].name);
    }
    return CKPT_OK;
}

/* The item that a copy row repeats, or NULL. */
static const ckpt_item *repeated(const ckpt_planner *p, const ckpt_row *row)
{
    for (const char *t = ckpt_row_copy_of(row); *t != '\0';) {
        size_t n = strcspn(t, "|");
        for (size_t i = 0; i < p->n_items; i++) {
            const ckpt_item *it = &p->items[i];
            if (!it->dropped && it->canon.state == NULL && strlen(it->canon.name) == n &&
                memcmp(it->canon.name, t, n) == 0)
                return it;
        }
        t += n + (t[n] == '|');
    }
    return NULL;
}

/* "mtp.{2l}.embed=…" of the depth that starts at this block. */
static ckpt_status add_copy(ckpt_planner *p, const ckpt_row *row, int64_t block, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_index at;
    char name[256];
    const char *tail = strchr(row->canon, '}');
    const ckpt_item *whole = repeated(p, row);
    if (tail == NULL || whole == NULL)
        return CKPT_OK;
    snprintf(name, sizeof name, "mtp.%lld%s", (long long)block, tail + 1);
    if (!ckpt_pattern_match(row->canon, name, &p->syms, &at))
        return CKPT_OK;
    const ckpt_canon canon = whole->canon;
    CKPT_CHECK(ckpt_plan_push(p, &canon, -1, err));
    ckpt_item *it = &p->items[p->n_items - 1];
    it->copy = true;
    CKPT_CHECK(ckpt_plan_place_row(p, it, row, &at, err));
    it->canon.block = (int)block; /* of the pipeline stage that stores it */
done:
    return status;
}

static bool written_back(const ckpt_planner *p, const char *stored)
{
    for (size_t i = 0; i < p->n_items; i++)
        if (p->items[i].copy && strcmp(p->items[i].stored, stored) == 0)
            return true;
    return false;
}

ckpt_status ckpt_plan_add_copies(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_model *m = p->model;
    int64_t depths = 0, blocks = 0;
    (void)ckpt_json_int(ckpt_json_get(p->plan->canon_config, "mtp_layers"), &depths);
    (void)ckpt_json_int(ckpt_json_get(p->plan->canon_config, "mtp_blocks"), &blocks);
    for (size_t r = 0; p->layout != NULL && depths > 0 && r < p->layout->n_rows; r++) {
        const ckpt_row *row = &p->layout->rows[r];
        if (ckpt_row_copy_of(row) == NULL || ckpt_plan_tag(p, row->tag) != 1)
            continue;
        for (int64_t d = 0; d < depths; d++)
            CKPT_CHECK(add_copy(p, row, m->n_main + blocks / depths * d, err));
    }
    for (size_t i = 0; i < m->n_copies; i++) {
        const char *stored = m->src->tensors[m->copies[i].stored].name;
        if (!written_back(p, stored))
            CKPT_CHECK(DROPPED(p, err, "'%s' repeats %s, which has one place in the target", stored,
                               m->copies[i].name));
    }
done:
    return status;
}
