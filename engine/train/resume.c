/* Optimizer state of a checkpoint into a trainer. Everything is planned first; then a device's threads read all
 * states at once through pinned memory (load.h), while in this process's memory they are read one by one. */
#include "resume.h"

#include <stdio.h>
#include <stdlib.h>

#include "checked.h"
#include "load.h"
#include "plan.h"
#include "spread.h"

/* What a device is to read. */
typedef struct state_list {
    ckpt_arena arena;
    ckpt_eng_load_item *items;
    size_t n;
} state_list;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading optimizer state");
}

int64_t ckpt_trainer_state_at(const ckpt_trainer *t, const char *state, const char *param)
{
    char name[512];
    int n = snprintf(name, sizeof name, "optimizer.%s.%s", state, param);
    return n > 0 && (size_t)n < sizeof name ? ckpt_model_find(t->base, name) : -1;
}

/* What makes this rank's part of a state of parameter p, in f32. */
static ckpt_status plan_state(const ckpt_trainer *t, size_t tensor, const ENG(param) * p,
                              ckpt_arena *arena, ckpt_gather *out, ckpt_err *err)
{
    const ckpt_canon *c = &t->base->tensors[tensor];
    int64_t have = -1, n = -1;
    if (!ckpt_dtype_castable(c->dtype, CKPT_F32))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is no type of optimizer state",
                         ckpt_dtype_get(c->dtype)->name);
    if (!ckpt_numel(c->rank, c->dims, &have) || !ckpt_numel(p->box.rank, p->box.dims, &n) ||
        have != n || c->rank != p->box.rank)
        return ckpt_fail(err, CKPT_E_FORMAT, "%lld elements, the parameter has %lld",
                         (long long)have, (long long)n);
    ckpt_status status = ckpt_plan_box(t->base, tensor, p->box.lo, p->box.len, arena, out, err);
    out->to = CKPT_F32;
    return status;
}

/* Destination bytes [lo, hi) of a gather into `out`, which begins with byte 0. */
static ckpt_status read_here(const ckpt_trainer *t, const ckpt_gather *g, uint64_t lo, uint64_t hi,
                             uint8_t *out, ckpt_err *err)
{
    enum { SCRATCH = 1 << 16, PIECE = 1 << 20 };
    ckpt_scratch scratch = {.buf = malloc(SCRATCH), .cap = SCRATCH};
    ckpt_status status = scratch.buf != NULL ? CKPT_OK : no_memory(err);
    for (uint64_t at = lo; at < hi && status == CKPT_OK; at += PIECE)
        status = ckpt_gather_run(t->base->src, g, at, (size_t)ckpt_min_u64(PIECE, hi - at),
                                 out + at, &scratch, err);
    free(scratch.buf);
    return status;
}

/* Elements [lo, hi) of a state into `out`, which begins with element 0: now, or put on a device's list. */
static ckpt_status read_state(const ckpt_trainer *t, state_list *l, size_t tensor,
                              const ENG(param) * p, int64_t lo, int64_t hi, float *out,
                              ckpt_err *err)
{
    const char *name = t->base->tensors[tensor].name;
    const uint64_t from = (uint64_t)lo * sizeof *out, to = (uint64_t)hi * sizeof *out;
    ckpt_gather *g = ckpt_arena_alloc(&l->arena, sizeof *g);
    if (hi <= lo)
        return CKPT_OK;
    if (g == NULL)
        return no_memory(err);
    ckpt_status status = plan_state(t, tensor, p, &l->arena, g, err);
    if (status == CKPT_OK && t->e.device == NULL)
        status = read_here(t, g, from, to, (uint8_t *)out, err);
    else if (status == CKPT_OK)
        l->items[l->n++] = (ckpt_eng_load_item){
            .name = name, .gather = g, .from = from, .bytes = to - from, .to = out + lo};
    if (status != CKPT_OK)
        ckpt_err_frame(err, "tensor %s", name);
    return status;
}

/* What the list has so far. */
static ckpt_status read_list(const ckpt_trainer *t, state_list *l, ckpt_err *err)
{
    const size_t n = l->n;
    l->n = 0;
    return n == 0 ? CKPT_OK : ckpt_eng_load(&t->e, t->base->src, l->items, n, NULL, err);
}

/* Masters: what the stored weights were rounded from. Without one the weight itself is it. */
static ckpt_status load_masters(ckpt_trainer *t, state_list *l, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < t->net.n_params; i++) {
        const ENG(param) *p = &t->net.params[i];
        int64_t at = ckpt_trainer_state_at(t, "master", p->name);
        if (at < 0)
            continue;
        t->saves_master = true;
        float *flat = t->master != NULL ? t->master : t->net.data;
        CKPT_CHECK(read_state(t, l, (size_t)at, p, 0, p->n, flat + t->slots[i].at, err));
    }
    CKPT_CHECK(read_list(t, l, err));
    status = ckpt_trainer_round(t, err);
done:
    return status;
}

/* Into a flat buffer; on several ranks only what this one keeps. */
static ckpt_status read_moment(ckpt_trainer *t, state_list *l, size_t tensor, size_t i, float *flat,
                               ckpt_err *err)
{
    const ENG(param) *p = &t->net.params[i];
    int64_t lo, hi;
    ckpt_spread_owned(t, i, &lo, &hi);
    return read_state(t, l, tensor, p, lo, hi, flat + t->slots[i].at, err);
}

static const char *const words[] = {"exp_avg", "exp_avg_sq", "momentum"};

/* Moments of one parameter: all that its rule needs (1), none of any rule (0), or an error. */
static ckpt_status load_moments(ckpt_trainer *t, state_list *l, size_t i, bool *found,
                                ckpt_err *err)
{
    const ckpt_optim_slot *slot = &t->slots[i];
    int64_t at[3];
    ckpt_status status = CKPT_OK;
    for (int k = 0; k < 3; k++)
        at[k] = ckpt_trainer_state_at(t, words[k], slot->name);
    bool adam = at[0] >= 0 && at[1] >= 0, momentum = at[2] >= 0;
    *found = slot->muon ? momentum : adam;
    if (!*found && (adam || momentum))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor %s: the checkpoint holds %s for it, and %s needs %s", slot->name,
                         adam ? "Adam's moments" : "momentum", slot->muon ? "Muon" : "AdamW",
                         adam ? "momentum" : "Adam's moments");
    if (!*found)
        return CKPT_OK;
    CKPT_CHECK(read_moment(t, l, (size_t)at[slot->muon ? 2 : 0], i, t->m, err));
    if (!slot->muon)
        CKPT_CHECK(read_moment(t, l, (size_t)at[1], i, t->v, err));
done:
    return status;
}

ckpt_status ckpt_trainer_load(ckpt_trainer *t, bool *found, ckpt_err *err)
{
    ckpt_status status;
    const char *with = NULL, *without = NULL;
    state_list l = {0};
    l.items = ckpt_arena_array(&l.arena, 2 * t->net.n_params + 1, sizeof *l.items);
    if (l.items == NULL)
        return no_memory(err);
    CKPT_CHECK(load_masters(t, &l, err));
    for (size_t i = 0; i < t->net.n_params; i++) {
        bool has;
        if (t->slots[i].frozen)
            continue;
        CKPT_CHECK(load_moments(t, &l, i, &has, err));
        with = has ? t->slots[i].name : with;
        without = has ? without : t->slots[i].name;
    }
    if (with != NULL && without != NULL) {
        status =
            ckpt_fail(err, CKPT_E_FORMAT,
                      "tensor %s: no optimizer state, though others have it (%s)", without, with);
        goto done;
    }
    CKPT_CHECK(read_list(t, &l, err));
    *found = with != NULL;
    t->fresh = !*found;
done:
    ckpt_arena_free(&l.arena);
    return status;
}
