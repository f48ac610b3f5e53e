/* ckpt count: how many tensors a checkpoint has. */
#include "tool.h"

static const ckpt_opt rows[] = {
    {NULL, CKPT_OPT_FLAG, 0, NULL, NULL, 0, 0}
};

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    ckpt_source src = {0};
    (void)opts;
    ckpt_status status = ckpt_tool_open(tool, &src, tool->operands.items[0], -1, err);
    if (status != CKPT_OK)
        return status;
    if (tool->g.json)
        ckpt_jw_u64(&tool->json, "tensors", src.n_tensors);
    else
        printf("%zu\n", src.n_tensors);
    ckpt_source_close(&src);
    return CKPT_OK;
}

const ckpt_command ckpt_cmd_count = {
    .name = "count",
    .synopsis = "PATH",
    .what = "count tensors",
    .opts = rows,
    .opts_size = 1,
    .min_operands = 1,
    .max_operands = 1,
    .run = run,
};
