/* Planning low-rank factors: X becomes X_b . X_a of a given rank. Source: product specification
 * section 3, "full -> low-rank R". */
#include "checked.h"
#include "factor.h"
#include "plan_internal.h"

#include <string.h>
#include <unistd.h>

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* A derived matrix as a canonical tensor, with the properties of the one it comes from. */
static ckpt_status push_derived(ckpt_planner *p, const ckpt_canon *from, const char *name,
                                const ckpt_derived *d, int replaces, ckpt_err *err)
{
    ckpt_canon c = {.name = name,
                    .dims = d->tensor.dims,
                    .rank = 2,
                    .dtype = d->tensor.dtype,
                    .block = from->block,
                    .flags = from->flags,
                    .derived = d};
    ckpt_axis *axis = ckpt_arena_array(&p->plan->arena, 2, sizeof *axis);
    if (axis == NULL || name == NULL || !ckpt_dtype_bytes(c.dtype, d->rows * d->cols, &c.bytes))
        return no_memory(err);
    for (int i = 0; i < 2; i++)
        axis[i] = (ckpt_axis){.size = c.dims[i], .len = c.dims[i], .dim = i};
    c.map = (ckpt_map){axis, 2};
    ckpt_status status = ckpt_plan_push(p, &c, -1, err);
    if (status == CKPT_OK)
        p->items[p->n_items - 1].replaces = replaces;
    return status;
}

static ckpt_status add_factor(ckpt_planner *p, ckpt_factor *f, const ckpt_canon *from,
                              const char *a, const char *b, int b_replaces, ckpt_err *err)
{
    ckpt_plan *plan = p->plan;
    ckpt_status status = CKPT_OK;
    f->line = plan->n_lossy - 1;
    if (plan->factors == NULL)
        plan->factor_fd = -1;
    f->next = plan->factors;
    plan->factors = f;
    p->folded = true;
    CKPT_CHECK(push_derived(p, from, a, &f->a, 1, err));
    CKPT_CHECK(push_derived(p, from, b, &f->b, b_replaces, err));
done:
    return status;
}

ckpt_status ckpt_plan_split(ckpt_planner *p, size_t index, int64_t rank, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_canon full = p->items[index].canon;
    int stem = (int)(strlen(full.name) - strlen(".weight"));
    const char *a = ckpt_arena_printf(arena, "%.*s_a.weight", stem, full.name);
    const char *b = ckpt_arena_printf(arena, "%.*s_b.weight", stem, full.name);
    ckpt_factor *f;
    if (a == NULL || b == NULL)
        return no_memory(err);
    if (!p->opts->approximate)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'%s' is full rank: cutting it to rank %lld is not exact; --approximate "
                         "permits it",
                         full.name, (long long)rank);
    CKPT_CHECK(ckpt_factor_prepare(p->model, &full, rank, arena, &f, err));
    CKPT_CHECK(LOSSY(p, err, "%s: rank %lld of %lld by truncated SVD, factors rounded to %s",
                     full.name, (long long)rank, (long long)ckpt_min_i64(f->rows, f->cols),
                     ckpt_dtype_get(full.dtype)->name));
    p->items[index].dropped = true;
    CKPT_CHECK(add_factor(p, f, &full, a, b, 0, err));
done:
    return status;
}

ckpt_status ckpt_plan_rerank(ckpt_planner *p, size_t low, size_t high, const char *name,
                             int64_t rank, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_canon a = p->items[low].canon, b = p->items[high].canon;
    ckpt_factor *f;
    if (!p->opts->approximate)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'%s' has rank %lld: changing it to %lld is not exact; --approximate "
                         "permits it",
                         a.name, (long long)a.dims[0], (long long)rank);
    CKPT_CHECK(ckpt_factor_product(p->model, &a, &b, name, rank, &p->plan->arena, &f, err));
    CKPT_CHECK(LOSSY(p, err,
                     "%s: rank %lld instead of %lld by truncated SVD of the product, factors "
                     "rounded to %s",
                     name, (long long)rank, (long long)a.dims[0], ckpt_dtype_get(a.dtype)->name));
    p->items[low].dropped = true;
    p->items[high].dropped = true;
    CKPT_CHECK(add_factor(p, f, &a, a.name, b.name, 1, err));
done:
    return status;
}

void ckpt_plan_close_factors(ckpt_plan *plan)
{
    if (plan->factors != NULL && plan->factor_fd >= 0)
        close(plan->factor_fd);
    plan->factors = NULL;
}
