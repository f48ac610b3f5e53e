/* inspect --flops: the operation count of megatron-dist-ckpt.md section 7 for this model. */
#include "spec.h"
#include "tool.h"

ckpt_status ckpt_inspect_flops(ckpt_tool *tool, const ckpt_model *model, int64_t tokens,
                               ckpt_err *err)
{
    ckpt_eng_spec spec;
    ckpt_status status = ckpt_eng_spec_open(&spec, model, NULL, err);
    if (status != CKPT_OK) {
        ckpt_err_frame(err, "--flops");
        return status;
    }
    double forward = ckpt_eng_spec_flops(&spec, tokens, (double)tokens * (double)tokens);
    ckpt_eng_spec_close(&spec);
    if (tool->g.json) {
        ckpt_jw_real(&tool->json, "flops_forward", forward);
        ckpt_jw_real(&tool->json, "flops_step", 3 * forward);
    } else if (ckpt_tool_text(tool)) {
        printf("\n%lld tokens: %.4g operations forward, %.4g a training step (%.4g a token)\n",
               (long long)tokens, forward, 3 * forward, 3 * forward / (double)tokens);
    }
    return CKPT_OK;
}
