/* The attention kernels in bf16. */
#include "attention_launch.cuh"

namespace kda
{

template <> ckpt_status attend_forward<bf16>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    if (dk == 64 && dv == 64)
        return forward_of<bf16, 64, 64>(a, err);
    if (dk == 128)
        return forward_of<bf16, 128, 128>(a, err);
    if (dk == 192)
        return forward_of<bf16, 192, 128>(a, err);
    return forward_of<bf16, 256, 256>(a, err);
}
template <> ckpt_status attend_backward<bf16>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    const ckpt_status status = dots_of<bf16>(a, err);
    if (status != CKPT_OK)
        return status;
    if (dk == 64 && dv == 64)
        return backward_of<bf16, 64, 64>(a, err);
    if (dk == 128)
        return backward_of<bf16, 128, 128>(a, err);
    if (dk == 192)
        return backward_of<bf16, 192, 128>(a, err);
    return backward_of<bf16, 256, 256>(a, err);
}

} // namespace kda
