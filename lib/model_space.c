/* fully_sharded_model_space -> fully_reshardable.
 *
 *   [chained_C.]optimizer.state.fp32_param.KEY  ->  [chained_C.]optimizer.state.param.KEY
 *
 * exp_avg and exp_avg_sq are called the same. Only where the common state says that the form is this
 * one: the mixed-precision optimizer's states, which are not the distributed optimizer's, have the same
 * names and stay. Source: megatron-dist-ckpt.md section 5.1; DistributedOptimizer.sharded_state_dict of
 * megatron/core/optimizer/distrib_optimizer.py, core_r0.15.0. */
#include "model_space.h"

#include "json.h"

#include <stdlib.h>
#include <string.h>

#define STATE "optimizer.state."
#define OLD STATE "fp32_param."
#define NEW STATE "param."

bool ckpt_is_model_space(const ckpt_json *optimizer)
{
    const char *type = ckpt_json_string(ckpt_json_get(optimizer, "param_state_sharding_type"));
    return type != NULL && strcmp(type, "fully_sharded_model_space") == 0;
}

bool ckpt_model_space_found(const ckpt_source *src)
{
    const ckpt_json *optimizer = ckpt_json_get(src->common, "optimizer");
    bool found = ckpt_is_model_space(optimizer);
    for (ckpt_json *j = ckpt_json_child(optimizer); j != NULL && !found; j = ckpt_json_next(j))
        found = ckpt_is_model_space(j);
    return found;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

/* Where "optimizer.state.fp32_param." of the name is, or NULL. */
static const char *old_part(const char *name)
{
    const char *at = strstr(name, OLD);
    if (at == NULL || at == name)
        return at;
    size_t n = strncmp(name, "chained_", 8) == 0 ? strspn(name + 8, "0123456789") : 0;
    return n > 0 && name + 8 + n + 1 == at && at[-1] == '.' ? at : NULL;
}

ckpt_status ckpt_model_space_rename(ckpt_source *src, ckpt_err *err)
{
    for (size_t i = 0; i < src->n_tensors; i++) {
        ckpt_tensor *t = &src->tensors[i];
        const char *at = old_part(t->name);
        if (at == NULL)
            continue;
        t->name = ckpt_arena_printf(&src->arena, "%.*s" NEW "%s", (int)(at - t->name), t->name,
                                    at + strlen(OLD));
        if (t->name == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    }
    if (src->n_tensors > 1)
        qsort(src->tensors, src->n_tensors, sizeof *src->tensors, by_name);
    for (size_t i = 1; i < src->n_tensors; i++)
        if (strcmp(src->tensors[i - 1].name, src->tensors[i].name) == 0)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "tensor '%s': stored under fully_reshardable's name and "
                             "fully_sharded_model_space's",
                             src->tensors[i].name);
    return CKPT_OK;
}
