/* The attention kernels in bf16. */
#include "attention_launch.cuh"

namespace kda
{

template <> ckpt_status attend_forward<bf16>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    return with_dims(dk, dv, [&](auto d) { return forward_of<bf16, d.DK, d.DV>(a, err); });
}
template <> ckpt_status attend_backward<bf16>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    const ckpt_status status = dots_of<bf16>(a, err);
    if (status != CKPT_OK)
        return status;
    return with_dims(dk, dv, [&](auto d) { return backward_of<bf16, d.DK, d.DV>(a, err); });
}

} // namespace kda
