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

/* Tiles of `size` that n rows in `items` pieces have at most. */
inline int64_t tiles_of(int64_t n, int64_t items, int64_t size)
{
    return n / size + (n < items ? n : items);
}
template <class K>
ckpt_status start(K *kernel, int64_t tiles, int64_t heads, int threads, int bytes,
                  const att_call *a, ckpt_err *err)
{
    int limit;
    if (tiles > INT32_MAX / heads)
        return grid_fits("attention", INT64_MAX, err);
    const ckpt_status status = room(kernel, bytes, &limit, err);
    if (status != CKPT_OK)
        return status;
    if (limit < bytes)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "attention on CUDA: %d bytes of shared memory, the card has %d", bytes,
                         limit);
    LAUNCH(kernel, tiles * heads, threads, (size_t)bytes, a->stream, a->p);
    return launched("attention", err);
}

template <class E, int DK, int DV> ckpt_status forward_of(const att_call *a, ckpt_err *err)
{
    typedef fwd_of<E, DK, DV> F;
    return start(attend<E, DK, DV>, tiles_of(a->rows, a->p.n_parts, F::rows), a->p.N, F::threads,
                 F::bytes, a, err);
}
template <class E, int DK, int DV> ckpt_status backward_of(const att_call *a, ckpt_err *err)
{
    typedef bwd_of<E, DK, DV> F;
    const int64_t keys = tiles_of(a->tokens, a->p.n_seq, F::rows);
    const int64_t queries = tiles_of(a->rows, a->p.n_parts, F::rows);
    ckpt_status status = CKPT_OK;
    if (a->rows > 0)
        status = start(attend_dq<E, DK, DV>, queries, a->p.N, F::threads, F::dq_bytes, a, err);
    if (status != CKPT_OK || keys == 0)
        return status;
    if constexpr (F::split) {
        status = start(attend_dkv<E, DK, DV, true, false>, keys, a->p.G, F::threads, F::kv_bytes, a,
                       err);
        if (status == CKPT_OK)
            status = start(attend_dkv<E, DK, DV, false, true>, keys, a->p.G, F::threads,
                           F::kv_bytes, a, err);
    } else {
        status =
            start(attend_dkv<E, DK, DV, true, true>, keys, a->p.G, F::threads, F::kv_bytes, a, err);
    }
    return status;
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
