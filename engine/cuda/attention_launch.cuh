/* Launches of the attention kernels of one element type; attention.cu chooses the type and the padded
 * dims. Compiled in one file a type. */
#ifndef CKPT_CUDA_ATTENTION_LAUNCH_CUH
#define CKPT_CUDA_ATTENTION_LAUNCH_CUH

#include "attention_bwd.cuh"
#include "attention_fwd.cuh"

namespace kda
{

struct att_call {
    att_args p;
    int64_t rows, tokens; /* of queries, of keys */
    device_stream stream;
};

/* dk, dv: the padded head dims. */
ckpt_status attend_forward_wg(const att_call *a, int dk, int dv, ckpt_err *err);
ckpt_status attend_backward_wg(const att_call *a, int dk, int dv, ckpt_err *err);
template <class E> ckpt_status attend_forward(const att_call *a, int dk, int dv, ckpt_err *err);
template <class E> ckpt_status attend_backward(const att_call *a, int dk, int dv, ckpt_err *err);

/* f(dims<DK, DV>) of the padded head dims of bf16. */
template <int K, int V> struct dims {
    static constexpr int DK = K, DV = V;
};
template <class F> ckpt_status with_dims(int dk, int dv, const F &f)
{
    if (dk == 64 && dv == 64)
        return f(dims<64, 64>());
    if (dk == 128)
        return f(dims<128, 128>());
    if (dk == 192)
        return f(dims<192, 128>());
    return f(dims<256, 256>());
}
template <class K>
ckpt_status start(K *kernel, int64_t tiles, int64_t heads, int threads, int bytes,
                  const att_call *a, ckpt_err *err)
{
    if (tiles > INT32_MAX / heads)
        return grid_fits("attention", INT64_MAX, err);
    const ckpt_status status = shared_fits("attention", kernel, bytes, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH(kernel, tiles * heads, threads, (size_t)bytes, a->stream, a->p);
    return launched("attention", err);
}

template <class E, int DK, int DV> ckpt_status forward_of(const att_call *a, ckpt_err *err)
{
    typedef fwd_of<E, DK, DV> F;
    return start(attend<E, DK, DV>, tiles_of(a->rows, a->p.n_parts, F::rows), a->p.N, F::threads,
                 F::bytes, a, err);
}
/* F: sizes, and the kernels dq() and dkv<dk too, dv too>(). */
template <class F> ckpt_status start_backward(const att_call *a, ckpt_err *err)
{
    const int64_t keys = tiles_of(a->tokens, a->p.n_seq, F::rows);
    const int64_t queries = tiles_of(a->rows, a->p.n_parts, F::rows);
    ckpt_status status = CKPT_OK;
    if (a->rows > 0)
        status = start(F::dq(), queries, a->p.N, F::threads, F::dq_bytes, a, err);
    if (status != CKPT_OK || keys == 0)
        return status;
    if constexpr (F::split) {
        status =
            start(F::template dkv<true, false>(), keys, a->p.G, F::threads, F::kv_bytes, a, err);
        if (status == CKPT_OK)
            status = start(F::template dkv<false, true>(), keys, a->p.G, F::threads, F::kv_bytes, a,
                           err);
    } else {
        status =
            start(F::template dkv<true, true>(), keys, a->p.G, F::threads, F::kv_bytes, a, err);
    }
    return status;
}
template <class E, int DK, int DV> struct bwd_kernels : bwd_of<E, DK, DV> {
    static auto dq()
    {
        return attend_dq<E, DK, DV>;
    }
    template <bool WITH_K, bool WITH_V> static auto dkv()
    {
        return attend_dkv<E, DK, DV, WITH_K, WITH_V>;
    }
};
template <class E, int DK, int DV> ckpt_status backward_of(const att_call *a, ckpt_err *err)
{
    return start_backward<bwd_kernels<E, DK, DV>>(a, err);
}
template <class E> ckpt_status dots_of(const att_call *a, ckpt_err *err)
{
    const int64_t n = a->rows * a->p.N, blocks = ceil_div(n, THREADS / 32);
    const ckpt_status status = grid_fits("attention backward", blocks, err);
    if (status != CKPT_OK || n == 0)
        return status;
    LAUNCH(attend_dots<E>, blocks, THREADS, 0, a->stream, a->p, n, (float *)a->p.D);
    return launched("attention backward", err);
}

} // namespace kda

#endif
