/* Captured work (graph.h). The emulator keeps what its launches and copies would have done. */
#include "graph.h"

#include "runtime.cuh"

#include <new>

struct ckpt_cuda_graph {
    int64_t size;
#ifdef CKPT_CUDA_EMULATE
    emu::work_list work;
#else
    cudaGraphExec_t run;
#endif
};

namespace
{

#ifdef CKPT_CUDA_EMULATE

ckpt_status begin(const ckpt_cuda_card *, ckpt_err *err)
{
    if (emu::captured)
        return ckpt_fail(err, CKPT_E_INTERNAL, "CUDA: a capture inside a capture");
    emu::captured = new emu::work_list();
    return CKPT_OK;
}
ckpt_status end(const ckpt_cuda_card *, ckpt_cuda_graph *g, ckpt_err *)
{
    emu::work_list *work = emu::captured;
    emu::captured = NULL;
    if (g && work) {
        g->work.swap(*work);
        g->size = (int64_t)g->work.size();
    }
    delete work;
    return CKPT_OK;
}
ckpt_status launch(const ckpt_cuda_card *, const ckpt_cuda_graph *g, ckpt_err *)
{
    for (const std::function<void()> &work : g->work)
        work();
    return CKPT_OK;
}
void release(ckpt_cuda_graph *)
{
}

#else

ckpt_status done(cudaError_t e, const char *what, ckpt_err *err)
{
    if (e == cudaSuccess)
        return CKPT_OK;
    (void)cudaGetLastError(); /* it would be found once more by the next launch */
    return ckpt_fail(err, CKPT_E_IO, "CUDA: %s: %s", what, cudaGetErrorString(e));
}
cudaStream_t stream(const ckpt_cuda_card *card)
{
    return (cudaStream_t)card->stream;
}
/* Other threads (readers, the saver) may go on asking for memory and copies. */
ckpt_status begin(const ckpt_cuda_card *card, ckpt_err *err)
{
    return done(cudaStreamBeginCapture(stream(card), cudaStreamCaptureModeThreadLocal),
                "beginning a capture", err);
}
ckpt_status end(const ckpt_cuda_card *card, ckpt_cuda_graph *g, ckpt_err *err)
{
    cudaGraph_t what = NULL;
    size_t nodes = 0;
    cudaError_t e = cudaStreamEndCapture(stream(card), &what);
    if (e == cudaSuccess && g)
        e = cudaGraphGetNodes(what, NULL, &nodes);
    if (e == cudaSuccess && g)
        e = cudaGraphInstantiateWithFlags(&g->run, what, 0);
    if (what)
        (void)cudaGraphDestroy(what);
    if (g)
        g->size = (int64_t)nodes;
    return done(e, "capturing", err);
}
ckpt_status launch(const ckpt_cuda_card *card, const ckpt_cuda_graph *g, ckpt_err *err)
{
    return done(cudaGraphLaunch(g->run, stream(card)), "launching a graph", err);
}
void release(ckpt_cuda_graph *g)
{
    if (g->run)
        (void)cudaGraphExecDestroy(g->run);
}

#endif

} // namespace

ckpt_status ckpt_cuda_capture_begin(const ckpt_cuda_card *card, ckpt_err *err)
{
    return begin(card, err);
}
ckpt_status ckpt_cuda_capture_end(const ckpt_cuda_card *card, ckpt_cuda_graph **out, ckpt_err *err)
{
    ckpt_cuda_graph *g = out ? new (std::nothrow) ckpt_cuda_graph() : NULL;
    ckpt_status status = end(card, g, err);
    if (out && !g && status == CKPT_OK)
        status = ckpt_fail(err, CKPT_E_NOMEM, "CUDA: no memory for a graph");
    if (status != CKPT_OK) {
        ckpt_cuda_graph_free(g);
        g = NULL;
    }
    if (out)
        *out = g;
    return status;
}
ckpt_status ckpt_cuda_graph_launch(const ckpt_cuda_card *card, ckpt_cuda_graph *g, ckpt_err *err)
{
    return launch(card, g, err);
}
int64_t ckpt_cuda_graph_size(const ckpt_cuda_graph *g)
{
    return g->size;
}
void ckpt_cuda_graph_free(ckpt_cuda_graph *g)
{
    if (g) {
        release(g);
        delete g;
    }
}
