/* The attention kernels on warpgroup products: bf16 on sm_90a. */
#include "attention_launch.cuh"
#include "attention_wg.cuh"

namespace kda
{
namespace
{

template <int DK, int DV> ckpt_status forward_wg(const att_call *a, ckpt_err *err)
{
    typedef wg_shape<DK, DV> F;
    return start(attend_wg<DK, DV>, tiles_of(a->rows, a->p.n_parts, F::rows), a->p.N, F::threads,
                 F::fwd_bytes, a, err);
}
template <int DK, int DV> struct wg_kernels : wg_shape<DK, DV> {
    static auto dq()
    {
        return attend_dq_wg<DK, DV>;
    }
    template <bool WITH_K, bool WITH_V> static auto dkv()
    {
        return attend_dkv_wg<DK, DV, WITH_K, WITH_V>;
    }
};

} // namespace

ckpt_status attend_forward_wg(const att_call *a, int dk, int dv, ckpt_err *err)
{
    return with_dims(dk, dv, [&](auto d) { return forward_wg<d.DK, d.DV>(a, err); });
}
ckpt_status attend_backward_wg(const att_call *a, int dk, int dv, ckpt_err *err)
{
    return with_dims(dk, dv,
                     [&](auto d) { return start_backward<wg_kernels<d.DK, d.DV>>(a, err); });
}

} // namespace kda
