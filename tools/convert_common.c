/* The common state of a Megatron target. */
#include "convert.h"
#include "dcp.h"
#include "mp_rank.h"

#include <string.h>

/* The source's common state with the target's args. */
static ckpt_status common_state(ckpt_source *src, const ckpt_json *args, ckpt_buf *out,
                                ckpt_err *err)
{
    ckpt_buf carried = {0};
    if (src->container != &ckpt_mp_rank)
        return ckpt_dcp_common_with_args(src, args, out, err);
    ckpt_status status = ckpt_mp_common(src, &carried, err);
    if (status == CKPT_OK)
        status = ckpt_dcp_repack_bytes(carried.data, carried.len, true, args, out, err);
    ckpt_buf_release(&carried);
    return status;
}

static bool has_common(const ckpt_container *container)
{
    return ckpt_carries_objects(container, &ckpt_torch_dist) || container == &ckpt_mp_rank;
}

ckpt_status ckpt_convert_common(ckpt_source *src, const ckpt_container *to, ckpt_plan *plan,
                                ckpt_buf *common, ckpt_err *err)
{
    ckpt_out *out = &plan->out;
    if (out->config_kind != CKPT_CONFIG_MEGATRON || src->common == NULL || !has_common(to) ||
        !has_common(src->container))
        return CKPT_OK;
    ckpt_out_object *at = NULL;
    for (size_t i = 0; i < out->n_objects && at == NULL; i++)
        if (strcmp(out->objects[i].name, CKPT_DCP_COMMON_OBJECT) == 0)
            at = &out->objects[i];
    if (at != NULL && ckpt_json_equal(plan->config, src->config))
        return CKPT_OK; /* carried byte for byte */
    ckpt_status status = common_state(src, plan->config, common, err);
    if (status != CKPT_OK)
        return status;
    if (at == NULL) {
        ckpt_out_object *grown = ckpt_arena_array(&plan->arena, out->n_objects + 1, sizeof *grown);
        if (grown == NULL)
            return ckpt_tool_no_memory(err);
        if (out->n_objects > 0)
            memcpy(grown, out->objects, out->n_objects * sizeof *grown);
        out->objects = grown;
        at = &grown[out->n_objects++];
        at->name = CKPT_DCP_COMMON_OBJECT;
    }
    at->data = common->data;
    at->length = common->len;
    return CKPT_OK;
}
