/* The common state of a Megatron target. */
#include "convert.h"
#include "dcp.h"
#include "json.h"
#include "model_space.h"
#include "mp_rank.h"
#include "policy.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS "optimizer.distributed.dp_group_idx_"
#define KIND "param_state_sharding_type"
#define RESHARDABLE "fully_reshardable"

/* Where the states of fully_sharded_model_space became fully_reshardable ones, each optimizer says so. */
static ckpt_status model_space_edits(const ckpt_source *src, ckpt_arena *arena,
                                     ckpt_dcp_edit *edits, size_t *n, ckpt_err *err)
{
    const ckpt_json *optimizer = ckpt_json_get(src->common, "optimizer");
    if (ckpt_is_model_space(optimizer) && *n + 2 <= 64)
        edits[(*n)++] = (ckpt_dcp_edit){.path = "optimizer." KIND, .text = RESHARDABLE};
    for (ckpt_json *j = ckpt_json_child(optimizer); j != NULL; j = ckpt_json_next(j)) {
        if (!ckpt_is_model_space(j) || *n + 2 > 64)
            continue;
        char *path = ckpt_arena_printf(arena, "optimizer.%s." KIND, ckpt_json_key(j));
        if (path == NULL)
            return ckpt_tool_no_memory(err);
        edits[(*n)++] = (ckpt_dcp_edit){.path = path, .text = RESHARDABLE};
    }
    return CKPT_OK;
}

/* Where dp_reshardable buckets were given back, param_groups and gradient scaler move from objects of
 * one model-parallel rank (all have the same) into the common state's "optimizer" member, by number
 * where optimizers are chained. Source: DistributedOptimizer.sharded_state_dict. */
static ckpt_status find_edits(const ckpt_source *src, ckpt_arena *arena, ckpt_dcp_edit *edits,
                              size_t *n, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    static const char *const members[] = {"optimizer", "grad_scaler"};
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        const char *at = strstr(o->name, BUCKETS "0.");
        if (at == NULL)
            continue;
        /* "chained_3." before it, or nothing */
        int number = at != o->name ? atoi(o->name + strlen("chained_")) : -1;
        const char *where =
            number < 0 ? "optimizer" : ckpt_arena_printf(arena, "optimizer.%d", number);
        at += sizeof BUCKETS "0." - 1;
        for (size_t k = 0; k < 2; k++) {
            size_t len = strlen(members[k]);
            if (strncmp(at, members[k], len) != 0 || at[len] != '/' || *n + 3 > 64)
                continue;
            char *path = ckpt_arena_printf(arena, "%s.%s", where, members[k]);
            char *kind = ckpt_arena_printf(arena, "%s." KIND, where);
            if (path == NULL || kind == NULL)
                return ckpt_tool_no_memory(err);
            edits[(*n)++] = (ckpt_dcp_edit){.path = path, .object = o};
            if (k == 0)
                edits[(*n)++] = (ckpt_dcp_edit){.path = kind, .text = RESHARDABLE};
        }
    }
    CKPT_CHECK(model_space_edits(src, arena, edits, n, err));
    if (*n > 0)
        edits[(*n)++] = (ckpt_dcp_edit){.path = "content_metadata.distrib_optim_sharding_type",
                                        .text = RESHARDABLE};
done:
    return status;
}

ckpt_out_object *ckpt_convert_find_object(const ckpt_plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->out.n_objects; i++)
        if (strcmp(plan->out.objects[i].name, name) == 0)
            return &plan->out.objects[i];
    return NULL;
}

ckpt_out_object *ckpt_convert_add_object(ckpt_plan *plan, const char *name)
{
    ckpt_out *out = &plan->out;
    ckpt_out_object *grown = ckpt_arena_array(&plan->arena, out->n_objects + 1, sizeof *grown);
    if (grown == NULL)
        return NULL;
    if (out->n_objects > 0)
        memcpy(grown, out->objects, out->n_objects * sizeof *grown);
    out->objects = grown;
    grown[out->n_objects] = (ckpt_out_object){.name = name};
    return &grown[out->n_objects++];
}

ckpt_status ckpt_convert_set_common(ckpt_plan *plan, const ckpt_buf *common, ckpt_err *err)
{
    ckpt_out_object *at = ckpt_convert_find_object(plan, CKPT_DCP_COMMON_OBJECT);
    if (at == NULL)
        at = ckpt_convert_add_object(plan, CKPT_DCP_COMMON_OBJECT);
    if (at == NULL)
        return ckpt_tool_no_memory(err);
    at->data = common->data;
    at->length = common->len;
    return CKPT_OK;
}

/* The source's common state with the target's args, and the other changes. */
static ckpt_status common_state(ckpt_source *src, const ckpt_dcp_changes *changes, ckpt_buf *out,
                                ckpt_err *err)
{
    ckpt_buf carried = {0};
    if (src->container != &ckpt_mp_rank)
        return ckpt_dcp_common_changed(src, changes, out, err);
    ckpt_status status = ckpt_mp_common(src, &carried, err);
    if (status == CKPT_OK)
        status = ckpt_dcp_repack_bytes(carried.data, carried.len, true, changes->args, out, err);
    ckpt_buf_release(&carried);
    return status;
}

bool ckpt_has_common(const ckpt_container *container)
{
    return ckpt_carries_objects(container, &ckpt_torch_dist) || container == &ckpt_mp_rank;
}

ckpt_status ckpt_convert_common_bytes(ckpt_source *src, const ckpt_json *args, ckpt_buf *out,
                                      ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_dcp_edit edits[65];
    ckpt_dcp_changes changes = {.args = args, .edits = edits};
    ckpt_status status = find_edits(src, &arena, edits, &changes.n_edits, err);
    if (status == CKPT_OK)
        status = common_state(src, &changes, out, err);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_convert_common(ckpt_source *src, const ckpt_container *to, ckpt_plan *plan,
                                ckpt_buf *common, ckpt_err *err)
{
    ckpt_out *out = &plan->out;
    ckpt_dcp_edit edits[65];
    ckpt_dcp_changes changes = {.args = plan->config, .edits = edits};
    if (out->config_kind != CKPT_CONFIG_MEGATRON || src->common == NULL || !ckpt_has_common(to) ||
        !ckpt_has_common(src->container))
        return CKPT_OK;
    ckpt_status status = find_edits(src, &plan->arena, edits, &changes.n_edits, err);
    if (status != CKPT_OK)
        return status;
    if (ckpt_convert_find_object(plan, CKPT_DCP_COMMON_OBJECT) != NULL && changes.n_edits == 0 &&
        ckpt_json_equal(plan->config, src->config))
        return CKPT_OK; /* carried byte for byte */
    status = common_state(src, &changes, common, err);
    return status == CKPT_OK ? ckpt_convert_set_common(plan, common, err) : status;
}

ckpt_status ckpt_convert_policy(const ckpt_container *to, ckpt_plan *plan, const char *text,
                                ckpt_buf *common, ckpt_err *err)
{
    ckpt_out *out = &plan->out;
    const ckpt_dcp_edit edit = {.path = CKPT_POLICY_KEY, .text = text};
    const ckpt_dcp_changes changes = {.edits = &edit, .n_edits = 1};
    ckpt_buf before = {0}, after = {0};
    ckpt_status status = CKPT_OK;
    if (text == NULL || out->config_kind != CKPT_CONFIG_MEGATRON || !ckpt_has_common(to))
        return CKPT_OK;
    const ckpt_out_object *at = ckpt_convert_find_object(plan, CKPT_DCP_COMMON_OBJECT);
    const char *has = ckpt_json_string(ckpt_json_get(plan->model->src->common, CKPT_POLICY_KEY));
    if (at != NULL && at->data != NULL && has != NULL && strcmp(has, text) == 0)
        return CKPT_OK; /* carried as it is */
    if (at != NULL && at->data != NULL)
        ckpt_buf_append(&before, at->data, at->length);
    else
        CKPT_CHECK(ckpt_dcp_new_common(out->config, out->iteration,
                                       to == &ckpt_torch_dist ? ckpt_dcp_sharding_type(out) : NULL,
                                       true, &before, err));
    if (before.failed) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    CKPT_CHECK(ckpt_dcp_common_edit(before.data, before.len, &changes, &after, err));
    ckpt_buf_release(common); /* its bytes, if it had any, are the edited ones */
    *common = after;
    after = (ckpt_buf){0};
    status = ckpt_convert_set_common(plan, common, err);
done:
    ckpt_buf_release(&before);
    ckpt_buf_release(&after);
    return status;
}
