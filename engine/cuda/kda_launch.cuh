/* The kernels of one element type and their launches, in order. */
#ifndef CKPT_CUDA_KDA_LAUNCH_CUH
#define CKPT_CUDA_KDA_LAUNCH_CUH

#include "kda_grad.cuh"
#include "kda_grad16.cuh"
#include "kda_prep.cuh"
#include "kda_run.cuh"
#include "kda_scan.cuh"

#include <stdlib.h>
#include <string.h>

namespace kda
{
namespace
{

template <class K>
ckpt_status launch(const char *name, K *kernel, int64_t grid, int threads, int bytes, const args &p,
                   device_stream stream, ckpt_err *err)
{
    int limit = 0;
    ckpt_status status = room(kernel, bytes, &limit, err);
    if (status != CKPT_OK)
        return status;
    if (bytes > limit)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "kda: %s needs %d bytes of shared memory in a block, the card has %d",
                         name, bytes, limit);
    LAUNCH(kernel, grid, threads, (size_t)bytes, stream, p);
    return checked(name, err);
}

/* An older version, by name in the environment. */
inline bool variant(const char *name)
{
    const char *s = getenv("CKPT_KDA");
    return s && strstr(s, name);
}

template <class E, int D> struct runner {
    const plan &how;
    args p;

    ckpt_status prepare(ckpt_err *err) const
    {
        return launch("prep", how.safe ? prep<E, D, true> : prep<E, D, false>, how.tiles,
                      PREP_THREADS, p.kb ? prep_memory<E, D>::bytes_kb : prep_memory<E, D>::bytes,
                      p, how.stream, err);
    }
    template <class K> ckpt_status serial(const char *name, K *kernel, ckpt_err *err) const
    {
        typedef scan_memory<E, D> M;
        int limit = 0;
        const ckpt_status status = room(kernel, 0, &limit, err);
        if (status != CKPT_OK)
            return status;
        args with = p;
        with.stages = M::most > 1 && M::bytes(M::most) > limit ? M::most - 1 : M::most;
        return launch(name, kernel, how.N * p.H * (D / VS), SCAN_THREADS, M::bytes(with.stages),
                      with, how.stream, err);
    }
    ckpt_status forward(ckpt_err *err) const
    {
        ckpt_status status = how.tiles > 0 ? prepare(err) : CKPT_OK;
        if (status == CKPT_OK && how.N > 0)
            status = serial("scan", scan<E, D, false>, err);
        return status;
    }
    ckpt_status backward(ckpt_err *err)
    {
        ckpt_status status = CKPT_OK;
        if (how.tiles > 0) {
            status = prepare(err);
            if (status == CKPT_OK)
                status = serial("scan", scan<E, D, true>, err);
        }
        if (status == CKPT_OK && how.N > 0)
            status = serial("scan_back", scan_back<E, D>, err);
        if (status != CKPT_OK || how.tiles == 0)
            return status;
        if constexpr (sizeof(E) == 2)
            if (how.safe && !variant("grads"))
                return launch("grads", grads_by_columns<D>, how.tiles, grad16_memory<D>::THREADS,
                              grad16_memory<D>::bytes + (p.kb ? grad16_memory<D>::kb_tile : 0), p,
                              how.stream, err);
        auto *kernel = how.safe ? grads<E, D, true> : grads<E, D, false>;
        int limit = 0;
        status = room(kernel, 0, &limit, err);
        if (status != CKPT_OK)
            return status;
        typedef grad_memory<E, D> M;
        const int kb = p.kb ? M::kb_tile : 0;
        p.resident = M::bytes + kb <= limit;
        return launch("grads", kernel, how.tiles, GRAD_THREADS,
                      (p.resident ? M::bytes : M::bytes_shared) + kb, p, how.stream, err);
    }
    ckpt_status run(ckpt_err *err)
    {
        return how.back ? backward(err) : forward(err);
    }
};

} // namespace

template <class E> ckpt_status run_type(const plan &how, const args &p, ckpt_err *err)
{
    return how.D == 64 ? runner<E, 64>{how, p}.run(err) : runner<E, 128>{how, p}.run(err);
}

} // namespace kda

#endif
