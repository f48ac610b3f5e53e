/* The kernels of one element type and their launches, in order. */
#ifndef CKPT_CUDA_KDA_LAUNCH_CUH
#define CKPT_CUDA_KDA_LAUNCH_CUH

#include "kda_grad.cuh"
#include "kda_prep.cuh"
#include "kda_run.cuh"
#include "kda_scan.cuh"

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

template <class E, int D> struct runner {
    const plan &how;
    args p;

    ckpt_status prepare(ckpt_err *err) const
    {
        return launch("prep", how.safe ? prep<E, D, true> : prep<E, D, false>, how.tiles,
                      PREP_THREADS, p.kb ? prep_memory<E, D>::bytes_kb : prep_memory<E, D>::bytes,
                      p, how.stream, err);
    }
    /* One scan, of which `forward` blocks go forward and `back` blocks go back. */
    template <int W, scan_mode MODE> ckpt_status serial(int columns, bool back, ckpt_err *err) const
    {
        typedef scan_memory<E, D, W, MODE == OUT> F;
        typedef scan_memory<E, D, W, true> B;
        auto *kernel = scan<E, D, W, MODE>;
        int limit = 0;
        const ckpt_status status = room(kernel, 0, &limit, err);
        if (status != CKPT_OK)
            return status;
        args with = p;
        with.stages = F::stages(limit);
        with.back_stages = B::stages(limit);
        const int64_t pieces = how.N * p.H * p.segs;
        const int64_t forward = pieces * (columns / (VS * W)),
                      all = forward + (back ? pieces * (D / (VS * W)) : 0);
        with.forward = (int)forward;
        const int f = F::bytes(with.stages), b = back ? B::bytes(with.back_stages) : 0;
        return launch(MODE == COMPOSE ? "compose" : "scan", kernel, all, F::TH, f > b ? f : b, with,
                      how.stream, err);
    }
    /* Wide blocks read a chunk for more columns: better as soon as narrow ones do not all run at once, one a
     * multiprocessor. Narrow blocks that go both ways share one, two by two. */
    bool wide(int64_t narrow, scan_mode mode) const
    {
        return sizeof(E) == 2 && narrow > (mode == KEEP ? 2 : 1) * (int64_t)how.units;
    }
    template <scan_mode MODE> ckpt_status scans(int columns, bool back, ckpt_err *err) const
    {
        const int64_t narrow = how.N * p.H * p.segs * ((columns + (back ? D : 0)) / VS);
        if constexpr (sizeof(E) == 2)
            if (wide(narrow, MODE))
                return serial<2, MODE>(columns, back, err);
        return serial<1, MODE>(columns, back, err);
    }
    ckpt_status states(ckpt_err *err) const
    {
        if (p.segs == 1)
            return CKPT_OK;
        ckpt_status status = scans<COMPOSE>(2 * D, how.back, err);
        if (status == CKPT_OK)
            status = launch("merge", merge<D>, (how.back ? 2 : 1) * p.heads * (D / MERGE_COLUMNS),
                            GROUP, D * MERGE_COLUMNS * 4, p, how.stream, err);
        return status;
    }
    ckpt_status forward(ckpt_err *err) const
    {
        ckpt_status status = how.tiles > 0 ? prepare(err) : CKPT_OK;
        if (status == CKPT_OK && how.N > 0)
            status = states(err);
        if (status == CKPT_OK && how.N > 0)
            status = scans<OUT>(D, false, err);
        return status;
    }
    ckpt_status backward(ckpt_err *err)
    {
        ckpt_status status = how.tiles > 0 ? prepare(err) : CKPT_OK;
        if (status == CKPT_OK && how.N > 0)
            status = states(err);
        if (status == CKPT_OK && how.N > 0)
            status = scans<KEEP>(D, true, err);
        if (status != CKPT_OK || how.tiles == 0)
            return status;
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
