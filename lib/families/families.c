/* Every known layout, a row each. Detection tries them all, so their order does not matter to it; where a
 * target is only named by its group, the first that can say the model is taken. */
#include "hybrid.h"

/* clang-format off */
#define LAYOUTS(X)                  \
    X(ckpt_layout_hf_kimi_linear)   \
    X(ckpt_layout_hf_deepseek_v3)   \
    X(ckpt_layout_hf_qwen3_next)    \
    X(ckpt_layout_hf_llama)         \
    X(ckpt_layout_hf_qwen2)         \
    X(ckpt_layout_hf_qwen3)         \
    X(ckpt_layout_hf_qwen3_moe)     \
    X(ckpt_layout_hf_bailing_hybrid)\
    X(ckpt_layout_hf_bailing_moe)   \
    X(ckpt_layout_hf_arcee_kda)     \
    X(ckpt_layout_fla_kda)          \
    X(ckpt_layout_megatron_gpt)     \
    X(ckpt_layout_megatron_hybrid)
#define DECLARED(name) extern const ckpt_layout name;
#define LISTED(name) &name,
LAYOUTS(DECLARED)
const ckpt_layout *const ckpt_layouts[] = {LAYOUTS(LISTED) NULL};
/* clang-format on */
