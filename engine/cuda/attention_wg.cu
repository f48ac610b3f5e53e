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
template <int DK, int DV> ckpt_status backward_wg(const att_call *a, ckpt_err *err)
{
    typedef wg_shape<DK, DV> F;
    const int64_t keys = tiles_of(a->tokens, a->p.n_seq, F::rows);
    const int64_t queries = tiles_of(a->rows, a->p.n_parts, F::rows);
    ckpt_status status = CKPT_OK;
    if (a->rows > 0)
        status = start(attend_dq_wg<DK, DV>, queries, a->p.N, F::threads, F::dq_bytes, a, err);
    if (status != CKPT_OK || keys == 0)
        return status;
    if constexpr (F::split) {
        status = start(attend_dkv_wg<DK, DV, true, false>, keys, a->p.G, F::threads, F::kv_bytes, a,
                       err);
        if (status == CKPT_OK)
            status = start(attend_dkv_wg<DK, DV, false, true>, keys, a->p.G, F::threads,
                           F::kv_bytes, a, err);
    } else {
        status =
            start(attend_dkv_wg<DK, DV, true, true>, keys, a->p.G, F::threads, F::kv_bytes, a, err);
    }
    return status;
}

} // namespace

ckpt_status attend_forward_wg(const att_call *a, int dk, int dv, ckpt_err *err)
{
    if (dk == 64 && dv == 64)
        return forward_wg<64, 64>(a, err);
    if (dk == 128)
        return forward_wg<128, 128>(a, err);
    if (dk == 192)
        return forward_wg<192, 128>(a, err);
    return forward_wg<256, 256>(a, err);
}
ckpt_status attend_backward_wg(const att_call *a, int dk, int dv, ckpt_err *err)
{
    if (dk == 64 && dv == 64)
        return backward_wg<64, 64>(a, err);
    if (dk == 128)
        return backward_wg<128, 128>(a, err);
    if (dk == 192)
        return backward_wg<192, 128>(a, err);
    return backward_wg<256, 256>(a, err);
}

} // namespace kda
