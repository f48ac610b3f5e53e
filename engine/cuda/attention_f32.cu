/* The attention kernels in f32, for parity: 128 channels run as (192, 128). */
#include "attention_launch.cuh"

namespace kda
{

template <> ckpt_status attend_forward<float>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    if (dk == 64 && dv == 64)
        return forward_of<float, 64, 64>(a, err);
    if (dk <= 192 && dv <= 128)
        return forward_of<float, 192, 128>(a, err);
    return forward_of<float, 256, 256>(a, err);
}
template <> ckpt_status attend_backward<float>(const att_call *a, int dk, int dv, ckpt_err *err)
{
    const ckpt_status status = dots_of<float>(a, err);
    if (status != CKPT_OK)
        return status;
    if (dk == 64 && dv == 64)
        return backward_of<float, 64, 64>(a, err);
    if (dk <= 192 && dv <= 128)
        return backward_of<float, 192, 128>(a, err);
    return backward_of<float, 256, 256>(a, err);
}

} // namespace kda
