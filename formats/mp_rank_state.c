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

ckpt_status ckpt_mp_optimizer(ckpt_mp_reader *r, const ckpt_mp_file *f, ckpt_err *err)
{
    const ckpt_pkl *optimizer = ckpt_pkl_get(f->pt.root, "optimizer");
    if (optimizer == NULL || r->src->no_optimizer != NULL)
        return CKPT_OK;
    r->src->no_optimizer = ckpt_arena_printf(
        &r->src->arena, "%s: optimizer state of the torch format is not read yet", f->dir->name);
    return r->src->no_optimizer != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}
