/* The first half of a plan: which canonical tensors go, under which target rows, in which dtype. */
#include "checked.h"
#include "derive.h"
#include "gather.h"
#include "plan_internal.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- selection --------------------------------------------------------------------------------- */

static bool any_glob(const char *const *globs, size_t n, const char *a, const char *b)
{
    for (size_t i = 0; i < n; i++)
        if (fnmatch(globs[i], a, 0) == 0 || fnmatch(globs[i], b, 0) == 0)
            return true;
    return false;
}

ckpt_status ckpt_plan_push(ckpt_planner *p, const ckpt_canon *c, int64_t index, ckpt_err *err)
{
    void *items = p->items;
    ckpt_status status = ckpt_grow(&items, &p->cap_items, p->n_items + 1, sizeof *p->items, err);
    p->items = items;
    if (status != CKPT_OK)
        return status;
    ckpt_item *it = &p->items[p->n_items++];
    *it = (ckpt_item){.canon = *c, .model_tensor = index, .replaces = 1, .dtype = c->dtype};
    if (c->param == NULL)
        it->canon.param = c->name;
    return CKPT_OK;
}

bool ckpt_plan_selected(const ckpt_planner *p, const ckpt_canon *c)
{
    const ckpt_convert_opts *o = p->opts;
    const char *stored = p->model->src->tensors[c->stored].name;
    return (o->n_include == 0 || any_glob(o->include, o->n_include, c->name, stored)) &&
           !any_glob(o->exclude, o->n_exclude, c->name, stored);
}

ckpt_status ckpt_plan_select(ckpt_planner *p, ckpt_err *err)
{
    size_t left_out = 0, states = 0;
    for (size_t i = 0; i < p->model->n_tensors; i++) {
        const ckpt_canon *c = &p->model->tensors[i];
        if (c->state != NULL)
            continue;
        if (!ckpt_plan_selected(p, c)) {
            left_out++;
            states += c->extra && ckpt_is_optimizer(p->model->src, c->name);
            continue;
        }
        ckpt_status status = ckpt_plan_push(p, c, (int64_t)i, err);
        if (status != CKPT_OK)
            return status;
    }
    if (p->n_items == 0 && p->model->n_tensors > 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--include and --exclude leave no tensor");
    ckpt_status status = CKPT_OK;
    p->plan->n_left_out += left_out;
    if (left_out > states)
        status = DROPPED(p, err, "%zu tensor%s left out by --include/--exclude", left_out - states,
                         left_out - states == 1 ? "" : "s");
    if (status == CKPT_OK && states > 0)
        status = DROPPED(p, err, "%zu optimizer tensor%s left out by --include/--exclude", states,
                         states == 1 ? "" : "s");
    return status;
}

/* ---- low-rank projections ---------------------------------------------------------------------- */

static ckpt_item *find_item(ckpt_planner *p, const char *name)
{
    for (size_t i = 0; i < p->n_items; i++)
        if (!p->items[i].dropped && strcmp(p->items[i].canon.name, name) == 0)
            return &p->items[i];
    return NULL;
}

/* X_b of X_a, item `index`, and the name of their product X. */
static ckpt_status find_partner(ckpt_planner *p, size_t index, ckpt_item **b, const char **name,
                                ckpt_err *err)
{
    ckpt_arena *arena = &p->plan->arena;
    const char *a = p->items[index].canon.name;
    int stem = (int)(strlen(a) - strlen("_a.weight"));
    const char *b_name = ckpt_arena_printf(arena, "%.*s_b.weight", stem, a);
    *name = ckpt_arena_printf(arena, "%.*s.weight", stem, a);
    if (b_name == NULL || *name == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *b = find_item(p, b_name);
    if (*b == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' has no partner '%s'", a, b_name);
    return CKPT_OK;
}

/* Replace X_a and X_b of one block by X = X_b . X_a. */
static ckpt_status fold_one(ckpt_planner *p, size_t index, char which, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_canon a = p->items[index].canon;
    const char *name;
    ckpt_item *b;
    CKPT_CHECK(find_partner(p, index, &b, &name, err));
    const char *bias = ckpt_arena_printf(
        arena, "%.*s.bias", (int)(strlen(b->canon.name) - strlen(".weight")), b->canon.name);
    if (bias == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (find_item(p, bias) != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' has a bias and cannot be folded",
                         b->canon.name);
    ckpt_derived *d;
    CKPT_TRY(ckpt_derive_fold(p->model, &a, &b->canon, name, arena, &d, err), "'%s'", name);
    ckpt_canon full = {.name = name,
                       .dims = d->tensor.dims,
                       .rank = 2,
                       .dtype = a.dtype,
                       .block = a.block,
                       .flags = a.flags,
                       .derived = d};
    ckpt_axis *axis = ckpt_arena_array(arena, 2, sizeof *axis);
    if (axis == NULL || !ckpt_dtype_bytes(a.dtype, d->rows * d->cols, &full.bytes))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int i = 0; i < 2; i++)
        axis[i] = (ckpt_axis){.size = full.dims[i], .len = full.dims[i], .dim = i};
    full.map = (ckpt_map){axis, 2};
    p->items[index].dropped = true;
    b->dropped = true;
    CKPT_CHECK(LOSSY(p, err,
                     "%s = %c_b . %c_a: rank %lld folded to a full matrix, summed in double, "
                     "rounded once to %s",
                     name, which, which, (long long)d->inner, ckpt_dtype_get(a.dtype)->name));
    CKPT_CHECK(ckpt_plan_push(p, &full, -1, err));
    p->items[p->n_items - 1].replaces = 2;
done:
    return status;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* A low-rank gate whose X_a is item `index`: fold it, or give it another rank. */
static ckpt_status settle_low(ckpt_planner *p, size_t index, char which, int64_t want,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_canon *c = &p->items[index].canon;
    if (want > 0 && c->dims[0] == want)
        return CKPT_OK;
    if (want > 0) {
        ckpt_item *b;
        const char *name;
        CKPT_CHECK(find_partner(p, index, &b, &name, err));
        status = ckpt_plan_rerank(p, index, (size_t)(b - p->items), name, want, err);
        goto done;
    }
    if (!p->opts->approximate)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'%s': folding rank %lld to a full matrix is not exact and cannot be "
                         "undone; --approximate permits it",
                         c->name, (long long)c->dims[0]);
    p->folded = true;
    status = fold_one(p, index, which, err);
done:
    return status;
}

/* One of the two gates: which = 'f' (decay) or 'g' (output). */
static ckpt_status settle_rank(ckpt_planner *p, char which, bool fold, int64_t want, ckpt_err *err)
{
    char low_tail[24], full_tail[24];
    const char *key = which == 'f' ? "kda_f_rank" : "kda_gate_rank";
    snprintf(low_tail, sizeof low_tail, ".kda.%c_a.weight", which);
    snprintf(full_tail, sizeof full_tail, ".kda.%c.weight", which);
    if (!fold && want == 0)
        return CKPT_OK;
    size_t n = p->n_items;
    bool folded = p->folded;
    p->folded = false;
    for (size_t i = 0; i < n; i++) {
        const ckpt_canon *c = &p->items[i].canon;
        ckpt_status status = CKPT_OK;
        if (p->items[i].dropped)
            continue;
        if (want > 0 && ends_with(c->name, full_tail))
            status = ckpt_plan_split(p, i, want, err);
        else if (ends_with(c->name, low_tail))
            status = settle_low(p, i, which, want, err);
        if (status != CKPT_OK)
            return status;
    }
    if (fold)
        ckpt_json_delete(p->plan->canon_config, key);
    else if (p->folded && (!ckpt_json_set(p->plan->canon_config, key, ckpt_json_new_int(want)) ||
                           !ckpt_sym_set(&p->syms, which == 'f' ? "RF" : "RG", want)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    p->folded |= folded;
    return CKPT_OK;
}

/* kda=fused needs both gates full rank in every block; a mixture has no Megatron form. */
static ckpt_status shape_choices(ckpt_planner *p, ckpt_err *err)
{
    const char *low = NULL;
    const char *full_f = NULL, *low_f = NULL, *full_g = NULL, *low_g = NULL;
    for (size_t i = 0; i < p->n_items; i++) {
        const char *name = p->items[i].canon.name;
        if (p->items[i].dropped)
            continue;
        if (ends_with(name, ".kda.f_a.weight"))
            low = low_f = name;
        else if (ends_with(name, ".kda.g_a.weight"))
            low = low_g = name;
        else if (ends_with(name, ".kda.f.weight"))
            full_f = name;
        else if (ends_with(name, ".kda.g.weight"))
            full_g = name;
    }
    if (full_f != NULL && low_f != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is low rank but '%s' is not", low_f,
                         full_f);
    if (full_g != NULL && low_g != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is low rank but '%s' is not", low_g,
                         full_g);
    p->shape_tags = low != NULL ? "kda=split" : "kda=fused";
    return CKPT_OK;
}

ckpt_status ckpt_plan_ranks(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(settle_rank(p, 'f', p->opts->fold_f, p->opts->f_rank, err));
    CKPT_CHECK(settle_rank(p, 'g', p->opts->fold_g, p->opts->g_rank, err));
    CKPT_CHECK(shape_choices(p, err));
done:
    return status;
}

/* ---- casts ------------------------------------------------------------------------------------- */

ckpt_status ckpt_plan_dtypes(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (p->opts->cast != CKPT_CAST_TO)
        return CKPT_OK;
    for (size_t i = 0; i < p->n_items; i++) {
        ckpt_item *it = &p->items[i];
        const ckpt_dtype_info *info = ckpt_dtype_get(it->canon.dtype);
        if (it->dropped || it->canon.dtype == p->opts->dtype)
            continue;
        if (it->canon.state != NULL)
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (optimizer state)", it->canon.name));
        else if (info->kind != CKPT_KIND_FLOAT)
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (%s)", it->canon.name,
                                info->kind == CKPT_KIND_BOOL      ? "bool"
                                : info->kind == CKPT_KIND_COMPLEX ? "complex"
                                                                  : "integer"));
        else if (!ckpt_dtype_castable(it->canon.dtype, p->opts->dtype))
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (%s)", it->canon.name, info->name));
        else if ((it->canon.flags & CKPT_SCHEMA_KEEP_F32) != 0 && !p->opts->dtype_force)
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (kept %s; --dtype-force overrides)",
                                it->canon.name, info->name));
        else
            it->dtype = p->opts->dtype;
    }
done:
    return status;
}
