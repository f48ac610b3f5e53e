/* Optimizer state of a model. A state tensor has no row of its own: it is stored as its parameter is
 * (same shape, same fusing, same cuts), so every canonical tensor in the parameter has a state with
 * the parameter's box in it. One number for a whole parameter (step) is given to each of its
 * canonical tensors. Source: megatron-dist-ckpt.md section 5. */
#include "checked.h"
#include "model_internal.h"
#include "model_space.h"
#include "rescue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ckpt_status rescue(ckpt_binder *b, ckpt_err *err)
{
    ckpt_err why = {0};
    ckpt_status status = ckpt_rescue(b->m->src, &why);
    if (status == CKPT_OK)
        return ckpt_bind_note(b, err,
                              "dp_reshardable optimizer buckets are given back to their parameters "
                              "(fully_reshardable)");
    if (b->opts->lenient && status != CKPT_E_IO)
        return ckpt_bind_note(b, err, "optimizer state stays in buckets: %s", why.text);
    return ckpt_fail(err, status, "optimizer state (--optimizer drop leaves it out): %s", why.text);
}

static ckpt_status from_model_space(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = ckpt_model_space_rename(b->m->src, err);
    if (status != CKPT_OK)
        return status;
    return ckpt_bind_note(b, err,
                          "optimizer states of fully_sharded_model_space are taken as "
                          "fully_reshardable ones");
}

ckpt_status ckpt_bind_find_states(ckpt_binder *b, ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    if (!b->opts->keep_buckets && ckpt_model_space_found(src)) {
        ckpt_status status = from_model_space(b, err);
        if (status != CKPT_OK)
            return status;
    }
    if (!b->opts->keep_buckets && ckpt_rescue_needed(src)) {
        ckpt_status status = rescue(b, err);
        if (status != CKPT_OK)
            return status;
    }
    b->refs = calloc(src->n_tensors + 1, sizeof *b->refs);
    if (b->refs == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < src->n_tensors; i++) {
        ckpt_state_parse(src, src->tensors[i].name, &b->refs[i]);
        b->n_states += ckpt_bind_is_state(b, i);
    }
    return CKPT_OK;
}

/* ---- what cannot be a parameter's state -------------------------------------------------------- */

static ckpt_status refuse(ckpt_binder *b, size_t t, ckpt_err *err)
{
    const char *name = b->m->src->tensors[t].name;
    const ckpt_state_ref *ref = &b->refs[t];
    switch (ref->kind) {
    case CKPT_STATE_ORPHAN:
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s': optimizer state of a parameter that is not stored", name);
    case CKPT_STATE_NUMBERED:
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor '%s': optimizer state by parameter number, and which parameter "
                         "that is is not stored; --optimizer drop leaves it out",
                         name);
    case CKPT_STATE_BUCKET:
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor '%s': a flat bucket of many parameters (dp_reshardable); "
                         "--optimizer drop leaves it out",
                         name);
    case CKPT_STATE_NONE:
    case CKPT_STATE_OF:
    case CKPT_STATE_OTHER:
        break;
    }
    return CKPT_OK;
}

/* Lenient binding shows such tensors under their stored names. */
static ckpt_status settle_odd(ckpt_binder *b, size_t t, ckpt_err *err)
{
    ckpt_err why = {0};
    if (b->opts->keep_buckets && b->refs[t].kind == CKPT_STATE_BUCKET)
        return ckpt_bind_whole(b, (uint32_t)t, b->m->src->tensors[t].name, err);
    ckpt_status status = refuse(b, t, &why);
    if (status == CKPT_OK)
        return CKPT_OK;
    if (!b->opts->lenient)
        return refuse(b, t, err);
    status = ckpt_bind_note(b, err, "%s", why.text);
    return status == CKPT_OK ? ckpt_bind_whole(b, (uint32_t)t, b->m->src->tensors[t].name, err)
                             : status;
}

/* ---- states of parameters ---------------------------------------------------------------------- */

static bool same_dims(const ckpt_tensor *a, const ckpt_tensor *b)
{
    if (a->rank != b->rank)
        return false;
    for (int d = 0; d < a->rank; d++)
        if (a->dims[d] != b->dims[d])
            return false;
    return true;
}

/* Whole elements of the state's box as its bytes. */
static ckpt_status state_bytes(const ckpt_tensor *t, ckpt_canon *c, ckpt_err *err)
{
    int64_t volume = 1;
    bool fits = true;
    for (int i = 0; i < c->map.n; i++)
        fits = fits && ckpt_mul_i64(volume, c->map.axis[i].len, &volume);
    if (!fits || !ckpt_dtype_bytes(t->dtype, volume, &c->bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %s elements do not fill whole bytes",
                         t->name, ckpt_dtype_get(t->dtype)->name);
    return CKPT_OK;
}

/* A scalar is seen whole: as many axes as dimensions, each of size one. */
static ckpt_status scalar_map(ckpt_binder *b, const ckpt_tensor *t, ckpt_canon *c, ckpt_err *err)
{
    ckpt_axis *axis = ckpt_arena_array(&b->m->arena, (size_t)t->rank + 1, sizeof *axis);
    if (axis == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int d = 0; d < t->rank; d++)
        axis[d] = (ckpt_axis){.size = 1, .len = 1, .dim = d};
    c->map = (ckpt_map){axis, t->rank};
    c->dims = t->dims;
    c->rank = t->rank;
    c->row = NULL;
    return CKPT_OK;
}

static ckpt_status push_state(ckpt_binder *b, uint32_t t, const ckpt_state *state,
                              const ckpt_canon *param, ckpt_err *err)
{
    const ckpt_tensor *tensor = &b->m->src->tensors[t];
    ckpt_canon c = *param;
    c.name = ckpt_arena_printf(&b->m->arena, "optimizer.%s.%s", state->name, param->name);
    if (c.name == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    c.param = param->name;
    c.state = state;
    c.stored = t;
    c.dtype = tensor->dtype;
    c.derived = NULL;
    c.shift = strcmp(state->name, "master") == 0 ? c.shift : 0; /* moments are not values */
    ckpt_status status = state->scalar ? scalar_map(b, tensor, &c, err) : CKPT_OK;
    if (status == CKPT_OK)
        status = state_bytes(tensor, &c, err);
    return status == CKPT_OK ? ckpt_bind_push(b, &c, err) : status;
}

/* The spelling of the whole: a name that only one form has decides over names that several have. */
static void see_form(ckpt_binder *b, const char *tag)
{
    static const char *const order[] = {"optim=reshardable", "optim=model_space", "optim=chained"};
    int have = -1, new = -1;
    for (int i = 0; i < 3; i++) {
        have = b->state_tag != NULL && strcmp(b->state_tag, order[i]) == 0 ? i : have;
        new = strcmp(tag, order[i]) == 0 ? i : new;
    }
    if (b->state_tag == NULL || (have >= 0 && new > have))
        b->state_tag = tag;
}

static ckpt_status make_state(ckpt_binder *b, uint32_t t, ckpt_state **out, ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    const ckpt_state_ref *ref = &b->refs[t];
    const ckpt_tensor *tensor = &src->tensors[t], *param = &src->tensors[ref->param];
    ckpt_state *state = ckpt_arena_alloc(&b->m->arena, sizeof *state);
    int64_t numel = 0;
    if (state == NULL || !ckpt_state_make(&b->m->arena, tensor->name, ref, state))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    bool one = ckpt_numel(tensor->rank, tensor->dims, &numel) && numel == 1 && tensor->rank <= 1;
    bool equal = same_dims(tensor, param);
    state->scalar = one && (!equal || strcmp(state->name, "step") == 0);
    if (!equal && !state->scalar)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s': optimizer state of another shape than its parameter '%s'",
                         tensor->name, param->name);
    see_form(b, state->tag);
    *out = state;
    return CKPT_OK;
}

/* Canonical tensors by the stored tensor that holds them: heads, and links through the list. */
typedef struct by_stored {
    int64_t *head, *next;
} by_stored;

static ckpt_status index_stored(ckpt_binder *b, by_stored *x, ckpt_err *err)
{
    const ckpt_model *m = b->m;
    x->head = malloc((m->src->n_tensors + 1) * sizeof *x->head);
    x->next = malloc((m->n_tensors + 1) * sizeof *x->next);
    if (x->head == NULL || x->next == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < m->src->n_tensors; i++)
        x->head[i] = -1;
    for (size_t i = m->n_tensors; i-- > 0;) {
        x->next[i] = x->head[m->tensors[i].stored];
        x->head[m->tensors[i].stored] = (int64_t)i;
    }
    return CKPT_OK;
}

/* ---- completeness ------------------------------------------------------------------------------ */

enum { SEEN_ANY = 1, SEEN_AVG = 2, SEEN_SQ = 4, SEEN_OTHER = 8 };

static unsigned seen_bit(const char *word)
{
    if (strcmp(word, "exp_avg") == 0)
        return SEEN_ANY | SEEN_AVG;
    if (strcmp(word, "exp_avg_sq") == 0)
        return SEEN_ANY | SEEN_SQ;
    bool neutral = strcmp(word, "master") == 0 || strcmp(word, "step") == 0;
    return neutral ? SEEN_ANY : SEEN_ANY | SEEN_OTHER;
}

bool ckpt_canon_trains(const char *name)
{
    static const char bias[] = ".router.bias";
    size_t n = strlen(name), k = sizeof bias - 1;
    return n < k || strcmp(name + n - k, bias) != 0;
}

/* Adam's moments come together; other optimizers pair exp_avg with something else. */
static ckpt_status check_pair(ckpt_binder *b, size_t param, unsigned seen, ckpt_err *err)
{
    unsigned adam = seen & (SEEN_AVG | SEEN_SQ);
    if (adam == 0 || adam == (SEEN_AVG | SEEN_SQ) || (seen & SEEN_OTHER) != 0)
        return CKPT_OK;
    const char *name = b->m->src->tensors[param].name;
    const char *have = adam == SEEN_AVG ? "exp_avg" : "exp_avg_sq";
    const char *lack = adam == SEEN_AVG ? "exp_avg_sq" : "exp_avg";
    if (b->opts->lenient)
        return ckpt_bind_note(b, err, "'%s': optimizer state %s is stored, %s is missing", name,
                              have, lack);
    return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': optimizer state %s is stored, %s is missing",
                     name, have, lack);
}

static ckpt_status check_states(ckpt_binder *b, const by_stored *x, const uint8_t *seen,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = b->m->src;
    size_t bare = 0, params = 0;
    const char *first = NULL;
    for (size_t t = 0; t < src->n_tensors;
         t++) { /* which parameters are in a bucket is not known */
        if (b->refs[t].kind == CKPT_STATE_BUCKET)
            return CKPT_OK;
        if (x->head[t] < 0 || ckpt_bind_is_state(b, t))
            continue;
        if (seen[t] == 0 && !ckpt_canon_trains(b->m->tensors[x->head[t]].name))
            continue;
        params++;
        CKPT_CHECK(check_pair(b, t, seen[t], err));
        if (seen[t] != 0)
            continue;
        first = bare++ == 0 ? src->tensors[t].name : first;
    }
    if (bare > 0)
        status = ckpt_bind_note(b, err, "%zu of %zu tensors have no optimizer state (%s%s)", bare,
                                params, first, bare > 1 ? ", …" : "");
done:
    return status;
}

/* ---- all of it --------------------------------------------------------------------------------- */

ckpt_status ckpt_bind_states(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = b->m->src;
    by_stored x = {0};
    uint8_t *seen = NULL;
    if (b->n_states == 0)
        return CKPT_OK;
    seen = calloc(src->n_tensors + 1, 1);
    if (seen == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(index_stored(b, &x, err));
    for (size_t t = 0; t < src->n_tensors; t++) {
        const ckpt_state_ref *ref = &b->refs[t];
        ckpt_state *state = NULL;
        if (ref->kind != CKPT_STATE_OF) {
            CKPT_CHECK(settle_odd(b, t, err));
            continue;
        }
        CKPT_CHECK(make_state(b, (uint32_t)t, &state, err));
        if (x.head[ref->param] < 0)
            CKPT_CHECK(ckpt_bind_note(b, err, "'%s': left out, as its parameter is",
                                      src->tensors[t].name));
        seen[ref->param] |= (uint8_t)seen_bit(state->name);
        for (int64_t i = x.head[ref->param]; i >= 0; i = x.next[i]) {
            const ckpt_canon param = b->m->tensors[i];
            CKPT_CHECK(push_state(b, (uint32_t)t, state, &param, err));
        }
    }
    CKPT_CHECK(check_states(b, &x, seen, err));
done:
    free(x.head);
    free(x.next);
    free(seen);
    return status;
}
