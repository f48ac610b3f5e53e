/* What a rank's dictionary holds besides the model: display, the common state, the optimizer. */
#include "mp_rank_read.h"

#include "dcp.h"
#include "pickle_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_model_key(const char *key)
{
    return strncmp(key, "model", 5) == 0 && key[5 + strspn(key + 5, "0123456789")] == '\0';
}

/* A dictionary with the members of root that keep() wants; nodes are shared with it. */
static ckpt_pkl *filtered(const ckpt_pkl *root, ckpt_arena *arena,
                          bool (*keep)(void *self, const char *key, const ckpt_pkl *value),
                          void *self)
{
    ckpt_pkl *const *pairs;
    size_t n;
    ckpt_pkl *dict = ckpt_arena_alloc(arena, sizeof *dict);
    if (dict == NULL || !ckpt_pkl_pairs(root, &pairs, &n))
        return NULL;
    *dict = (ckpt_pkl){.kind = CKPT_PKL_DICT, .id = root->id};
    dict->items = ckpt_arena_array(arena, n + 1, sizeof(ckpt_pkl *));
    if (dict->items == NULL)
        return NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *key = ckpt_pkl_str(pairs[i]);
        if (key == NULL || !keep(self, key, pairs[i + 1]))
            continue;
        dict->items[dict->n_items++] = pairs[i];
        dict->items[dict->n_items++] = pairs[i + 1];
    }
    return dict;
}

static bool keep_shown(void *self, const char *key, const ckpt_pkl *value)
{
    (void)self;
    (void)value;
    return !is_model_key(key);
}

ckpt_json *ckpt_mp_display(const ckpt_pkl *root, ckpt_arena *arena)
{
    ckpt_pkl *dict = filtered(root, arena, keep_shown, NULL);
    return dict != NULL ? ckpt_pkl_to_json(dict) : NULL;
}

/* ---- common state ----------------------------------------------------------------------------- */

typedef struct common_filter {
    uint32_t n_nodes;
    ckpt_err *err;
    ckpt_status status;
} common_filter;

static ckpt_status find_storage(void *context, const ckpt_pkl *p)
{
    bool *found = context;
    *found = *found || p->kind == CKPT_PKL_PERSID;
    return CKPT_OK;
}

static bool keep_common(void *self, const char *key, const ckpt_pkl *value)
{
    static const char *const per_rank[] = {"optimizer", "rng_state", "rerun_state_machine"};
    common_filter *f = self;
    bool tensors = false;
    for (size_t i = 0; i < sizeof per_rank / sizeof per_rank[0]; i++)
        if (strcmp(key, per_rank[i]) == 0)
            return false;
    if (is_model_key(key) || f->status != CKPT_OK)
        return false;
    f->status = ckpt_pkl_walk(value, f->n_nodes, find_storage, &tensors, f->err);
    return !tensors;
}

ckpt_status ckpt_mp_common(ckpt_source *src, ckpt_buf *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena arena = {0};
    ckpt_buf pickle = {0};
    ckpt_pt pt;
    CKPT_CHECK(ckpt_pt_open(src, 0, 0, src->files[0].size, &arena, &pt, err));
    common_filter f = {.n_nodes = pt.n_nodes, .err = err};
    ckpt_pkl *dict = filtered(pt.root, &arena, keep_common, &f);
    status = f.status != CKPT_OK ? f.status
             : dict == NULL      ? ckpt_fail(err, CKPT_E_NOMEM, "out of memory")
                                 : CKPT_OK;
    if (status != CKPT_OK)
        goto done;
    ckpt_pkl list = {.kind = CKPT_PKL_LIST, .id = pt.n_nodes, .items = &dict, .n_items = 1};
    ckpt_pkl_begin(&pickle);
    CKPT_CHECK(ckpt_pkl_put_node(&pickle, &list, pt.n_nodes + 1, err));
    ckpt_pkl_end(&pickle);
    if (!pickle.failed)
        ckpt_zip_object(out, pickle.data, pickle.len);
    if (pickle.failed || out->failed)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
done:
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", src->files[0].name);
    ckpt_buf_release(&pickle);
    ckpt_arena_free(&arena);
    return status;
}

/* ---- optimizer -------------------------------------------------------------------------------- */

/* State dictionaries number parameters and do not name them. The numbers follow from how
 * get_megatron_optimizer makes its groups: named_parameters of the model chunks in order, split by
 * weight decay (none for vectors and biases) and, with expert parallelism, experts apart. A rank's
 * state dict lists parameters in that order too. Taken as proved when every group has exactly as
 * many parameters as it should and every state has its parameter's shape. */
typedef struct parameter {
    ckpt_mp_param p;
    bool vector, expert, half;
} parameter;

typedef struct parameters {
    parameter *list;
    size_t n;
    ckpt_arena *arena;
    ckpt_err *err;
} parameters;

static ckpt_status fail(const parameters *ps, const char *why)
{
    return ckpt_fail(ps->err, CKPT_E_UNSUPPORTED, "%s", why);
}

static bool is_buffer(const char *name)
{
    static const char *const tails[] = {"._extra_state", ".router.expert_bias", ".router.qb_beta"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof tails / sizeof tails[0]; i++)
        if (n >= strlen(tails[i]) && strcmp(name + n - strlen(tails[i]), tails[i]) == 0)
            return true;
    return false;
}

static ckpt_status tensor_of(const parameters *ps, const ckpt_mp_file *f, const ckpt_pkl *node,
                             ckpt_pt_tensor *t)
{
    bool is_tensor;
    const char *what;
    ckpt_status status = ckpt_pt_tensor_of(&f->pt, node, f->arena, t, &is_tensor, &what, ps->err);
    if (status == CKPT_OK && !is_tensor)
        status = fail(ps, "a state that is no tensor");
    return status;
}

static ckpt_status add_parameters(ckpt_mp_reader *r, const ckpt_mp_file *f, const ckpt_pkl *dict,
                                  int chunk, parameters *ps)
{
    ckpt_status status = CKPT_OK;
    ckpt_pkl *const *pairs;
    size_t n;
    if (!ckpt_pkl_pairs(dict, &pairs, &n))
        return fail(ps, "no model");
    parameter *grown = ckpt_arena_array(ps->arena, ps->n + n / 2 + 1, sizeof *grown);
    if (grown == NULL)
        return ckpt_fail(ps->err, CKPT_E_NOMEM, "out of memory");
    if (ps->n > 0)
        memcpy(grown, ps->list, ps->n * sizeof *grown);
    ps->list = grown;
    for (size_t i = 0; i + 1 < n && status == CKPT_OK; i += 2) {
        const char *name = ckpt_pkl_str(pairs[i]);
        if (name == NULL || is_buffer(name))
            continue;
        parameter *q = &ps->list[ps->n++];
        q->p = (ckpt_mp_param){
            .name = name, .dict = dict, .dir = f->dir, .file = f->file, .chunk = chunk};
        status = tensor_of(ps, f, pairs[i + 1], &q->p.t);
        size_t len = strlen(name);
        q->vector = q->p.t.rank == 1 || (len > 5 && strcmp(name + len - 5, ".bias") == 0);
        q->half = q->p.t.dtype == CKPT_BF16 || q->p.t.dtype == CKPT_F16;
        q->expert = r->mesh.ep > 1 && strstr(name, ".mlp.experts.") != NULL;
    }
    return status;
}

/* A state tensor of a parameter goes where the parameter goes. */
static ckpt_status add_state(ckpt_mp_reader *r, const ckpt_mp_file *f, const parameters *ps,
                             const parameter *q, const char *state, const ckpt_pkl *node)
{
    ckpt_mp_param p = q->p;
    ckpt_status status = tensor_of(ps, f, node, &p.t);
    if (status != CKPT_OK)
        return status;
    if (p.t.rank != q->p.t.rank ||
        memcmp(p.t.dims, q->p.t.dims, (size_t)p.t.rank * sizeof *p.t.dims) != 0)
        return ckpt_fail(ps->err, CKPT_E_UNSUPPORTED,
                         "%s number by number does not have the shapes of the parameters ('%s')",
                         state, q->p.name);
    p.prefix = ckpt_arena_printf(&r->src->arena, "optimizer.state.%s.", state);
    p.state = true;
    return p.prefix != NULL ? ckpt_mp_add(r, &p, ps->err)
                            : ckpt_fail(ps->err, CKPT_E_NOMEM, "out of memory");
}

static const ckpt_pkl *state_of(const ckpt_pkl *state, int64_t number)
{
    ckpt_pkl *const *pairs;
    size_t n;
    int64_t key;
    if (!ckpt_pkl_pairs(state, &pairs, &n))
        return NULL;
    /* numbers ascend in what torch writes: look where one is expected before searching */
    if (number >= 0 && (size_t)number < n / 2 && ckpt_pkl_int(pairs[2 * number], &key) &&
        key == number)
        return pairs[2 * number + 1];
    for (size_t i = 0; i + 1 < n; i += 2)
        if (ckpt_pkl_int(pairs[i], &key) && key == number)
            return pairs[i + 1];
    return NULL;
}

static ckpt_status add_states(ckpt_mp_reader *r, const ckpt_mp_file *f, const parameters *ps,
                              const parameter *q, const ckpt_pkl *states)
{
    ckpt_status status = CKPT_OK;
    ckpt_pkl *const *pairs;
    size_t n;
    if (states == NULL || !ckpt_pkl_pairs(states, &pairs, &n))
        return ckpt_fail(ps->err, CKPT_E_UNSUPPORTED, "'%s' has no state", q->p.name);
    for (size_t i = 0; i + 1 < n && status == CKPT_OK; i += 2) {
        const char *key = ckpt_pkl_str(pairs[i]);
        if (key != NULL && strcmp(key, "step") != 0)
            status = add_state(r, f, ps, q, key, pairs[i + 1]);
    }
    return status;
}

typedef struct group {
    const ckpt_pkl *params, *masters;
    bool expert, decay;
} group;

static ckpt_status read_group(const parameters *ps, const ckpt_pkl *node, group *g)
{
    const ckpt_pkl *mult = ckpt_pkl_get(node, "wd_mult");
    const ckpt_pkl *expert = ckpt_pkl_get(node, "is_expert_parallel");
    const ckpt_pkl *decoupled = ckpt_pkl_get(node, "is_decoupled_lr");
    *g = (group){.params = ckpt_pkl_get(node, "params")};
    if (mult == NULL || g->params == NULL || g->params->kind != CKPT_PKL_LIST)
        return fail(ps, "a parameter group without params or wd_mult");
    if (decoupled != NULL && decoupled->kind == CKPT_PKL_BOOL && decoupled->b)
        return fail(ps, "parameter groups with a decoupled learning rate");
    g->decay = mult->kind == CKPT_PKL_FLOAT ? mult->f != 0 : mult->i != 0;
    g->expert = expert != NULL && expert->kind == CKPT_PKL_BOOL && expert->b;
    return CKPT_OK;
}

static ckpt_status add_group(ckpt_mp_reader *r, const ckpt_mp_file *f, const parameters *ps,
                             const group *g, const ckpt_pkl *state)
{
    ckpt_status status = CKPT_OK;
    size_t at = 0, halves = 0;
    for (size_t i = 0; i < ps->n && status == CKPT_OK; i++) {
        const parameter *q = &ps->list[i];
        int64_t number;
        if (q->vector == g->decay || q->expert != g->expert)
            continue;
        if (at == g->params->n_items || !ckpt_pkl_int(g->params->items[at], &number))
            return ckpt_fail(ps->err, CKPT_E_UNSUPPORTED,
                             "a group of %zu parameters is too small for the model's",
                             g->params->n_items);
        at++;
        status = add_states(r, f, ps, q, state_of(state, number));
        if (status != CKPT_OK || g->masters == NULL || !q->half)
            continue;
        if (halves == g->masters->n_items)
            return fail(ps, "fewer master weights than parameters");
        status = add_state(r, f, ps, q, "fp32_param", g->masters->items[halves++]);
    }
    if (status == CKPT_OK && at != g->params->n_items)
        return ckpt_fail(ps->err, CKPT_E_UNSUPPORTED,
                         "a group of %zu parameters, the model has %zu of its kind",
                         g->params->n_items, at);
    return status;
}

/* One optimizer: torch's own state dict, inside Megatron's if there are master weights. */
static ckpt_status add_optimizer(ckpt_mp_reader *r, const ckpt_mp_file *f, const parameters *ps,
                                 const ckpt_pkl *optimizer, bool seen[4])
{
    ckpt_status status = CKPT_OK;
    const ckpt_pkl *inner = ckpt_pkl_get(optimizer, "optimizer");
    const ckpt_pkl *masters = ckpt_pkl_get(optimizer, "fp32_from_fp16_params");
    if (inner == NULL)
        inner = optimizer;
    const ckpt_pkl *state = ckpt_pkl_get(inner, "state");
    const ckpt_pkl *groups = ckpt_pkl_get(inner, "param_groups");
    if (state == NULL || groups == NULL || groups->kind != CKPT_PKL_LIST)
        return fail(ps, "neither state nor param_groups");
    if (masters != NULL && (masters->kind != CKPT_PKL_LIST || masters->n_items != groups->n_items))
        return fail(ps, "master weights of another number of groups");
    for (size_t i = 0; i < groups->n_items && status == CKPT_OK; i++) {
        group g;
        status = read_group(ps, groups->items[i], &g);
        if (status != CKPT_OK)
            break;
        bool *again = &seen[g.expert * 2 + g.decay];
        if (*again)
            return fail(ps, "two parameter groups of one kind");
        *again = true;
        g.masters = masters != NULL ? masters->items[i] : NULL;
        if (g.masters != NULL && g.masters->kind != CKPT_PKL_LIST)
            return fail(ps, "master weights that are no list");
        status = add_group(r, f, ps, &g, state);
    }
    return status;
}

static ckpt_status add_optimizers(ckpt_mp_reader *r, const ckpt_mp_file *f,
                                  const ckpt_pkl *optimizer, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    parameters ps = {.arena = f->arena, .err = err};
    bool seen[4] = {false};
    for (int v = 0; v < r->vpp && status == CKPT_OK; v++)
        status =
            add_parameters(r, f, ckpt_mp_model(f->pt.root, v), v * r->mesh.pp + f->dir->pp, &ps);
    if (status != CKPT_OK)
        return status;
    if (optimizer->kind != CKPT_PKL_LIST) /* else chained: dense parameters and experts */
        return add_optimizer(r, f, &ps, optimizer, seen);
    for (size_t i = 0; i < optimizer->n_items && status == CKPT_OK; i++)
        status = add_optimizer(r, f, &ps, optimizer->items[i], seen);
    return status;
}

ckpt_status ckpt_mp_optimizer(ckpt_mp_reader *r, const ckpt_mp_file *f, ckpt_err *err)
{
    const ckpt_pkl *optimizer = ckpt_pkl_get(f->pt.root, "optimizer");
    ckpt_err why = {0};
    if (optimizer == NULL || optimizer->kind == CKPT_PKL_NONE || r->src->no_optimizer != NULL)
        return CKPT_OK;
    ckpt_status status = add_optimizers(r, f, optimizer, &why);
    if (status == CKPT_OK)
        return CKPT_OK;
    if (status == CKPT_E_NOMEM || status == CKPT_E_IO || status == CKPT_E_INTERRUPTED)
        return ckpt_fail(err, status, "optimizer: %s", why.text);
    r->src->no_optimizer = ckpt_arena_printf(
        &r->src->arena, "%s: optimizer state cannot be matched with the parameters: %s",
        f->dir->name, why.text);
    return r->src->no_optimizer != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}
