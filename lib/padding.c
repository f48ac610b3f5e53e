/* What embedding and head hold beyond their rows and beside each other.
 *
 * Rows beyond the true vocabulary. They are no part of the canonical tensor: dropped on the way out,
 * zero on the way in; what a source holds there is looked at so that dropping it is never silent. */
#include "checked.h"
#include "gather.h"
#include "plan_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool ckpt_pad_map(const ckpt_row *row, const ckpt_map *map, ckpt_arena *arena, ckpt_map *out)
{
    if (row == NULL || strchr(row->view, '<') == NULL)
        return false;
    ckpt_axis *axis = ckpt_arena_memdup(arena, map->axis, (size_t)map->n * sizeof *axis);
    for (int i = 0; axis != NULL && i < map->n; i++)
        if (axis[i].lo == 0 && axis[i].len < axis[i].size) {
            axis[i].lo = axis[i].len;
            axis[i].len = axis[i].size - axis[i].lo;
            *out = (ckpt_map){axis, map->n};
            return true;
        }
    return false;
}

typedef struct pad_scan {
    uint64_t nonzero;
    double max_abs;
} pad_scan;

static void scan_block(pad_scan *s, ckpt_dtype dtype, const uint8_t *data, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double v = ckpt_dtype_load(dtype, data, i);
        if (v == 0)
            continue;
        s->nonzero++;
        if (!(fabs(v) <= s->max_abs)) /* a NaN stays */
            s->max_abs = fabs(v);
    }
}

static ckpt_status scan_padding(ckpt_planner *p, const ckpt_canon *c, const ckpt_map *pad,
                                pad_scan *out, ckpt_err *err)
{
    enum { BLOCK = 64 * 1024, SCRATCH = 64 * 1024 };
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    ckpt_canon rows = *c;
    ckpt_gather gather;
    uint8_t *buf = malloc(BLOCK + SCRATCH);
    ckpt_scratch scratch = {buf != NULL ? buf + BLOCK : NULL, SCRATCH};
    uint64_t elem = (uint64_t)ckpt_dtype_get(c->dtype)->bits / 8;
    int64_t volume = 1;
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    rows.map = *pad;
    for (int i = 0; i < pad->n; i++)
        volume *= pad->axis[i].len;
    rows.bytes = (uint64_t)volume * elem;
    CKPT_CHECK(ckpt_gather_canon(p->model->src, &rows, &arena, &gather, err));
    for (uint64_t lo = 0; lo < rows.bytes; lo += BLOCK) {
        size_t n = (size_t)ckpt_min_u64(BLOCK, rows.bytes - lo);
        CKPT_CHECK(ckpt_gather_run(p->model->src, &gather, lo, n, buf, &scratch, err));
        scan_block(out, c->dtype, buf, (int64_t)(n / elem));
    }
done:
    free(buf);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_plan_padding(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < p->n_items; i++) {
        const ckpt_canon *c = &p->items[i].canon;
        ckpt_map pad;
        pad_scan scan = {0};
        if (p->items[i].dropped || !ckpt_pad_map(c->row, &c->map, &p->plan->arena, &pad))
            continue;
        const char *stored = ckpt_canon_tensor(p->model->src, c)->name;
        CKPT_TRY(scan_padding(p, c, &pad, &scan, err), "tensor '%s': padding", stored);
        if (scan.nonzero > 0)
            CKPT_CHECK(WARN(p, err,
                            "'%s': padding rows %lld to %lld hold %llu non-zero values (max abs "
                            "%.9g); they are dropped",
                            stored, (long long)c->dims[0],
                            (long long)ckpt_canon_tensor(p->model->src, c)->dims[0] - 1,
                            (unsigned long long)scan.nonzero, scan.max_abs));
    }
done:
    return status;
}

ckpt_status ckpt_canon_equal(ckpt_source *src, const ckpt_canon *a, const ckpt_canon *b, bool *same,
                             ckpt_err *err)
{
    enum { BLOCK = 64 * 1024, SCRATCH = 64 * 1024 };
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    ckpt_gather ga, gb;
    uint8_t *buf = malloc(2 * BLOCK + SCRATCH);
    ckpt_scratch scratch = {buf != NULL ? buf + 2 * BLOCK : NULL, SCRATCH};
    *same = a->bytes == b->bytes && a->dtype == b->dtype;
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_gather_canon(src, a, &arena, &ga, err));
    CKPT_CHECK(ckpt_gather_canon(src, b, &arena, &gb, err));
    for (uint64_t lo = 0; *same && lo < a->bytes; lo += BLOCK) {
        size_t n = (size_t)ckpt_min_u64(BLOCK, a->bytes - lo);
        CKPT_CHECK(ckpt_gather_run(src, &ga, lo, n, buf, &scratch, err));
        CKPT_CHECK(ckpt_gather_run(src, &gb, lo, n, buf + BLOCK, &scratch, err));
        *same = memcmp(buf, buf + BLOCK, n) == 0;
    }
done:
    free(buf);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_model_tied(const ckpt_model *m, ckpt_tied *out, ckpt_err *err)
{
    int64_t embed = ckpt_model_find(m, "embed.weight"), head = ckpt_model_find(m, "head.weight");
    bool tied = false, same;
    *out = CKPT_TIED_NO_QUESTION;
    if (embed < 0 || head < 0 || !ckpt_json_bool(ckpt_json_get(m->config, "tied"), &tied) || !tied)
        return CKPT_OK;
    ckpt_status status =
        ckpt_canon_equal(m->src, &m->tensors[embed], &m->tensors[head], &same, err);
    *out = same ? CKPT_TIED_EQUAL : CKPT_TIED_DIFFERS;
    return status;
}

static bool planned(const ckpt_planner *p, const char *name)
{
    for (size_t i = 0; i < p->n_items; i++)
        if (strcmp(p->items[i].canon.name, name) == 0)
            return true;
    return false;
}

ckpt_status ckpt_plan_tied(ckpt_planner *p, ckpt_err *err)
{
    ckpt_tied tied = CKPT_TIED_NO_QUESTION;
    if (!planned(p, "embed.weight") || !planned(p, "head.weight"))
        return CKPT_OK;
    ckpt_status status = ckpt_model_tied(p->model, &tied, err);
    if (status == CKPT_OK && tied == CKPT_TIED_DIFFERS)
        return ckpt_fail(err, CKPT_E_MISMATCH,
                         "the configuration ties the head to the embedding, but head.weight "
                         "differs from embed.weight: --exclude one, or correct the configuration");
    if (status == CKPT_OK && tied == CKPT_TIED_EQUAL)
        return WARN(p, err, "tied, but head.weight is stored as well; it equals embed.weight");
    return status;
}
