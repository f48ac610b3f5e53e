/* Every known layout. Detection tries them all, so the order carries no meaning. */
#include "hybrid.h"

const ckpt_layout *const ckpt_layouts[] = {
    &ckpt_layout_hf_kimi_linear,
    &ckpt_layout_fla_kda,
    &ckpt_layout_megatron_hybrid,
    NULL,
};
