/* Every known layout. Detection tries them all, so their order does not matter to it; where a target
 * is only named by its group, the first that can say the model is taken. */
#include "hybrid.h"

const ckpt_layout *const ckpt_layouts[] = {
    &ckpt_layout_hf_kimi_linear,  &ckpt_layout_hf_deepseek_v3,
    &ckpt_layout_hf_qwen3_next,   &ckpt_layout_hf_llama,
    &ckpt_layout_hf_qwen2,        &ckpt_layout_hf_qwen3,
    &ckpt_layout_hf_qwen3_moe,    &ckpt_layout_hf_bailing_hybrid,
    &ckpt_layout_hf_bailing_moe,  &ckpt_layout_hf_arcee_kda,
    &ckpt_layout_fla_kda,         &ckpt_layout_megatron_gpt,
    &ckpt_layout_megatron_hybrid, NULL,
};
