/* Target rows of a plan: stored name, shape and box of every tensor, and shifts of zero-centred
 * norms. */
#include "checked.h"
#include "gather.h"
#include "plan_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Words in order of authority: the tensors themselves, the configuration, the user, the source if it
 * has this very layout, the configuration being written, the layout's defaults. Choices of one tag
 * may be decided by different words. */
int ckpt_plan_tag(const ckpt_planner *p, const char *tag)
{
    const char *words[] = {p->shape_tags,   p->config_tags,
                           p->opts->tags,   p->same_layout ? p->model->tags : NULL,
                           p->written_tags, p->layout->default_tags};
    return ckpt_tags_decide(words, sizeof words / sizeof words[0], tag);
}

static const char *apply_renames(ckpt_planner *p, const char *name)
{
    for (size_t i = 0; i < p->opts->n_rename; i++) {
        const char *rule = p->opts->rename[i], *eq = strchr(rule, '=');
        const char *star = eq != NULL ? memchr(rule, '*', (size_t)(eq - rule)) : NULL;
        if (eq == NULL)
            continue;
        size_t n = strlen(name), from = (size_t)(eq - rule);
        if (star == NULL) {
            if (n == from && memcmp(name, rule, n) == 0)
                return eq + 1;
            continue;
        }
        size_t head = (size_t)(star - rule), tail = from - head - 1;
        if (n < head + tail || memcmp(name, rule, head) != 0 ||
            memcmp(name + n - tail, star + 1, tail) != 0)
            continue;
        const char *to = eq + 1, *to_star = strchr(to, '*');
        if (to_star == NULL)
            return to;
        return ckpt_arena_printf(&p->plan->arena, "%.*s%.*s%s", (int)(to_star - to), to,
                                 (int)(n - head - tail), name + head, to_star + 1);
    }
    return name;
}

ckpt_status ckpt_plan_place_row(ckpt_planner *p, ckpt_item *it, const ckpt_row *row,
                                const ckpt_index *at, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    ckpt_view_out view;
    ckpt_view_in in = {.view = row->view,
                       .e = at->e,
                       .l = at->l,
                       .rank = it->canon.rank,
                       .hint = it->canon.dims,
                       .syms = &p->syms};
    if (it->canon.state != NULL && it->canon.state->scalar) {
        it->map = it->canon.map;
        it->rank = it->canon.rank;
        it->dims = it->canon.dims;
    } else {
        CKPT_TRY(ckpt_view_build(&in, arena, &view, err), "tensor '%s'", it->canon.name);
        it->row = row;
        it->map = view.map;
        it->rank = view.rank;
        it->dims = ckpt_arena_memdup(arena, view.dims, (size_t)view.rank * sizeof view.dims[0]);
    }
    if (it->canon.state == NULL || strcmp(it->canon.state->name, "master") == 0)
        it->shift = ckpt_view_shift(row->view);
    it->stored = ckpt_pattern_format(arena, row->stored, &p->syms, at);
    if (it->stored == NULL || it->dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (it->canon.state != NULL)
        it->stored = ckpt_plan_state_name(p, it, it->stored);
    it->stored = it->stored == NULL ? NULL : apply_renames(p, it->stored);
    if (it->stored == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    int64_t volume = 1, want = 1;
    for (int i = 0; i < it->map.n; i++)
        volume *= it->map.axis[i].len;
    for (int d = 0; d < it->canon.rank; d++)
        want *= it->canon.dims[d];
    if (volume != want)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s' has %lld elements, target '%s' takes %lld", it->canon.name,
                         (long long)want, it->stored, (long long)volume);
done:
    return status;
}

/* Keep a tensor whole under its own stored name. */
static ckpt_status place_whole(ckpt_planner *p, ckpt_item *it, ckpt_err *err)
{
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_tensor *t = ckpt_canon_tensor(p->model->src, &it->canon);
    ckpt_axis *axis = ckpt_arena_array(arena, (size_t)it->canon.rank + 1, sizeof *axis);
    if (axis == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    it->rank = it->canon.rank;
    it->dims = it->canon.dims;
    for (int d = 0; d < it->rank; d++)
        axis[d] = (ckpt_axis){.size = it->dims[d], .len = it->dims[d], .dim = d};
    it->map = (ckpt_map){axis, it->rank};
    it->stored = apply_renames(p, t->name);
    return it->stored != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static ckpt_status place_one(ckpt_planner *p, const ckpt_row_index *x, ckpt_item *it, bool *placed,
                             ckpt_err *err)
{
    *placed = true;
    if (p->layout == NULL)
        return place_whole(p, it, err);
    for (int32_t r = ckpt_row_index_first(x, it->canon.param); r >= 0; r = x->next[r]) {
        const ckpt_row *row = &p->layout->rows[r];
        ckpt_index at;
        if (ckpt_pattern_match(row->canon, it->canon.param, &p->syms, &at) &&
            ckpt_plan_tag(p, row->tag) != 0)
            return ckpt_plan_place_row(p, it, row, &at, err);
    }
    /* No row for this spelling of the name; extras of the same layout stay what they are. */
    *placed = (it->canon.extra && p->same_layout) || p->opts->allow_unknown;
    return *placed ? place_whole(p, it, err) : CKPT_OK;
}

ckpt_status ckpt_plan_place(ckpt_planner *p, ckpt_err *err)
{
    ckpt_buf text = {0};
    size_t homeless = 0;
    ckpt_status status = CKPT_OK;
    ckpt_row_index x = {.next = NULL};
    if (p->layout != NULL)
        CKPT_CHECK(ckpt_row_index_build(&x, p->layout, true, err));
    for (size_t i = 0; i < p->n_items; i++) {
        ckpt_item *it = &p->items[i];
        bool placed;
        if (it->dropped)
            continue;
        CKPT_CHECK(place_one(p, &x, it, &placed, err));
        if (placed)
            continue;
        if (homeless < 8)
            ckpt_buf_printf(&text, "%s'%s' (%s)", homeless > 0 ? ", " : "",
                            ckpt_canon_tensor(p->model->src, &it->canon)->name, it->canon.name);
        homeless++;
    }
    if (homeless > 8)
        ckpt_buf_printf(&text, " and %zu more", homeless - 8);
    if (homeless > 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "layout %s has no place for %s; --allow-unknown carries %s through",
                           p->layout->name, (const char *)text.data, homeless == 1 ? "it" : "them");
done:
    ckpt_row_index_free(&x);
    ckpt_buf_release(&text);
    return status;
}

/* ---- shifts ------------------------------------------------------------------------------------ */

/* Does undoing the shift give back every bit? Compares, in blocks, the values as they go in with
 * what re-reading the target gives. */
static ckpt_status shift_returns(const ckpt_planner *p, const ckpt_item *it, bool *exact,
                                 ckpt_err *err)
{
    enum { BLOCK = 16 * 1024, SCRATCH = 64 * 1024 };
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    ckpt_gather before, after;
    uint8_t *buf = malloc(2 * BLOCK + SCRATCH);
    ckpt_scratch scratch = {buf != NULL ? buf + 2 * BLOCK : NULL, SCRATCH};
    uint64_t bytes = 0;
    *exact = true;
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_gather_canon(p->model->src, &it->canon, &arena, &before, err));
    after = before;
    if (it->shift != 0) {
        before.to = after.to = it->dtype;
        after.add_to = (int8_t)it->shift;
        after.add_back = (int8_t)-it->shift;
    } else { /* the source is shifted: does its own value come back? */
        before.add_from = 0;
        after.add_to = (int8_t)it->canon.shift;
    }
    bytes = it->canon.bytes / ((uint64_t)ckpt_dtype_get(before.from)->bits / 8) *
            ((uint64_t)ckpt_dtype_get(before.to)->bits / 8);
    for (uint64_t lo = 0; *exact && lo < bytes; lo += BLOCK) {
        size_t n = (size_t)ckpt_min_u64(BLOCK, bytes - lo);
        CKPT_CHECK(ckpt_gather_run(p->model->src, &before, lo, n, buf, &scratch, err));
        CKPT_CHECK(ckpt_gather_run(p->model->src, &after, lo, n, buf + BLOCK, &scratch, err));
        *exact = memcmp(buf, buf + BLOCK, n) == 0;
    }
done:
    free(buf);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_plan_shifts(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < p->n_items; i++) {
        ckpt_item *it = &p->items[i];
        bool exact;
        if (it->dropped || (it->shift == it->canon.shift && it->dtype == it->canon.dtype) ||
            (it->shift == 0 && it->canon.shift == 0))
            continue;
        if (!ckpt_dtype_castable(it->canon.dtype, CKPT_F32))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s': %s values cannot be shifted by one",
                             it->canon.name, ckpt_dtype_get(it->canon.dtype)->name);
        CKPT_TRY(shift_returns(p, it, &exact, err), "'%s'", it->canon.name);
        if (exact)
            continue;
        if (!p->opts->approximate)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' is stored %s one on one side only, and rounding to %s loses "
                             "bits: --approximate permits it",
                             it->canon.name,
                             it->shift < 0 || it->canon.shift < 0 ? "minus" : "plus",
                             ckpt_dtype_get(it->dtype)->name);
        it->lossy_shift = it->shift != 0;
        CKPT_CHECK(LOSSY(p, err, "%s: shifted by one between zero-centred and plain, rounded to %s",
                         it->canon.name, ckpt_dtype_get(it->dtype)->name));
    }
done:
    return status;
}
