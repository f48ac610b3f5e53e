/* Optimizer state and rank-bound objects in a plan. A state goes wherever its parameter goes, by
 * the same boxes; where the parameter is computed anew (a fold, a truncation) its moments describe
 * nothing any more and are left out. Source: product specification section 3, Moments. */
#include "gather.h"
#include "plan_internal.h"
#include "rescue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ABSENT, PLANNED, REPLACED }; /* a parameter in the plan */

static ckpt_status parameters(const ckpt_planner *p, uint8_t **out, ckpt_err *err)
{
    uint8_t *fate = calloc(p->model->n_tensors + 1, 1);
    if (fate == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < p->n_items; i++)
        if (p->items[i].model_tensor >= 0)
            fate[p->items[i].model_tensor] = p->items[i].dropped ? REPLACED : PLANNED;
    *out = fate;
    return CKPT_OK;
}

typedef struct tally {
    size_t left_out, reset;
    const char *first_reset;
} tally;

static ckpt_status report(ckpt_planner *p, const tally *n, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    p->plan->n_left_out += n->left_out;
    p->plan->n_reset = n->reset;
    if (n->left_out > 0)
        CKPT_CHECK(DROPPED(p, err, "%zu optimizer tensor%s left out by --include/--exclude",
                           n->left_out, n->left_out == 1 ? "" : "s"));
    if (p->plan->n_states > 0 && !p->opts->has_groups && !p->same_layout && p->layout != NULL &&
        p->layout->config_kind == CKPT_CONFIG_MEGATRON)
        CKPT_CHECK(WARN(p, err,
                        "Megatron-Core takes the step and param_groups of an optimizer from its "
                        "common state, where this source puts none: it reads these states only "
                        "once they are added there"));
    if (n->reset > 0)
        CKPT_CHECK(
            DROPPED(p, err, "%zu optimizer tensor%s reset: the parameter is computed anew (%s%s)",
                    n->reset, n->reset == 1 ? "" : "s", n->first_reset, n->reset > 1 ? ", …" : ""));
done:
    return status;
}

ckpt_status ckpt_plan_states(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_model *m = p->model;
    uint8_t *fate = NULL;
    tally n = {0};
    CKPT_CHECK(parameters(p, &fate, err));
    for (size_t i = 0; i < m->n_tensors; i++) {
        const ckpt_canon *c = &m->tensors[i];
        if (c->state == NULL)
            continue;
        int64_t param = ckpt_model_find(m, c->param);
        int was = param >= 0 ? fate[param] : ABSENT;
        if (!ckpt_plan_selected(p, c) || was == ABSENT) {
            n.left_out++;
        } else if (was == REPLACED) {
            n.first_reset = n.reset++ == 0 ? c->name : n.first_reset;
        } else {
            CKPT_CHECK(ckpt_plan_push(p, c, (int64_t)i, err));
            p->plan->n_states++;
        }
    }
    CKPT_CHECK(report(p, &n, err));
done:
    free(fate);
    return status;
}

/* ---- names ------------------------------------------------------------------------------------- */

const char *ckpt_plan_state_name(ckpt_planner *p, const ckpt_item *it, const char *key)
{
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_state *s = it->canon.state;
    if (p->same_layout)
        return ckpt_arena_printf(arena, "%s%s%s", s->before, key, s->after);
    bool expert = strstr(it->canon.param, ".experts.") != NULL;
    return ckpt_state_spell(arena, p->opts->tags, s->name, key, expert);
}

/* ---- scalars ----------------------------------------------------------------------------------- */

static ckpt_status read_scalar(const ckpt_planner *p, const ckpt_item *it, uint8_t out[16],
                               ckpt_err *err)
{
    memset(out, 0, 16);
    if (it->model_tensor < 0 || it->canon.bytes > 16)
        return ckpt_fail(err, CKPT_E_INTERNAL, "'%s' is no scalar", it->canon.name);
    return ckpt_model_read(p->model, (size_t)it->model_tensor, 0, (size_t)it->canon.bytes, out,
                           err);
}

ckpt_status ckpt_plan_same_scalar(ckpt_planner *p, size_t first, size_t last, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint8_t a[16], b[16];
    for (size_t k = first + 1; k < last; k++) {
        const ckpt_item *x = &p->items[first], *y = &p->items[k];
        if (x->canon.stored == y->canon.stored)
            continue;
        CKPT_CHECK(read_scalar(p, x, a, err));
        CKPT_CHECK(read_scalar(p, y, b, err));
        if (memcmp(a, b, sizeof a) != 0)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' and '%s' differ, but share target tensor '%s'; --exclude "
                             "'optimizer.%s.*' leaves them out",
                             x->canon.name, y->canon.name, x->stored, x->canon.state->name);
    }
done:
    return status;
}

/* ---- objects ----------------------------------------------------------------------------------- */

/* Random number generators are one a (pipeline, tensor) rank, and Megatron-Core loads them only at
 * equal sizes: rng_state/shard_{pp}.{tp}_{PP}.{TP}. The rerun state machine's is one a rank. */
ckpt_status ckpt_plan_keep_object(ckpt_planner *p, const char *name, bool *keep, ckpt_err *err)
{
    static const char rng[] = "rng_state/shard_", rerun[] = "rerun_state_machine_state/shard_";
    const ckpt_mesh *from = &p->model->mesh, *to = &p->opts->mesh;
    *keep = true;
    if (strstr(name, "optimizer.distributed.dp_group_idx_") != NULL)
        *keep = ckpt_rescue_needed(p->model->src); /* else about buckets that are no more */
    else if (strncmp(name, rng, sizeof rng - 1) == 0) {
        int at_pp, at_tp, pp = from->pp, tp = from->tp;
        (void)sscanf(name + sizeof rng - 1, "%9d.%9d_%9d.%9d", &at_pp, &at_tp, &pp, &tp);
        *keep = pp == to->pp && tp == to->tp;
        if (!*keep)
            return DROPPED(p, err, "%s: random state of TP %d, PP %d means nothing at TP %d, PP %d",
                           name, tp, pp, to->tp, to->pp);
    } else if (strncmp(name, rerun, sizeof rerun - 1) == 0) {
        *keep =
            from->tp == to->tp && from->pp == to->pp && from->ep == to->ep && from->cp == to->cp;
        if (!*keep)
            return DROPPED(p, err,
                           "%s: state of one rank of another mesh (TP %d, PP %d, EP %d, CP %d)",
                           name, from->tp, from->pp, from->ep, from->cp);
    }
    return CKPT_OK;
}
