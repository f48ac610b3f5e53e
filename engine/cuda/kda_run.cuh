/* Order of the kernels and their launches, for one element type. Included by the file of each type, so
 * that types compile side by side; kda.cu calls run_f32 and run_bf16. */
#ifndef CKPT_CUDA_KDA_RUN_CUH
#define CKPT_CUDA_KDA_RUN_CUH

#include "kda.h"

#include "kda_common.cuh"
#include "runtime.cuh"

namespace kda
{

struct plan {
    int64_t tiles, N; /* tiles: chunks x heads */
    int D, units;     /* units: multiprocessors of the card */
    bool back, safe;
    device_stream stream;
};
/* Workspace: pieces of 256 bytes, counted while base is NULL. */
struct arena {
    unsigned char *base;
    size_t used;
    void *take(size_t bytes)
    {
        void *p = base ? base + used : nullptr;
        used += (bytes + 255) / 256 * 256;
        return p;
    }
};
/* What delta.h adds to kda.h: fewer heads of q and k, an array in place of beta k. */
struct extra {
    int64_t HQ;
    const void *kb;
    void *dkb;
};
/* p.table and p.first, for sequences of unequal lengths. The copies are staged before it returns. */
void upload_table(int64_t N, const int64_t *cu, const args &p, device_stream stream);
ckpt_status forward(const ckpt_cuda_kda *d, const extra &x, const ckpt_cuda_kda_in *in, void *o,
                    float *state, void *work, device_stream stream, ckpt_err *err);
ckpt_status backward(const ckpt_cuda_kda *d, const extra &x, const ckpt_cuda_kda_in *in,
                     const void *d_o, const float *d_state, const ckpt_cuda_kda_grad *grad,
                     void *work, device_stream stream, ckpt_err *err);

ckpt_status run_f32(const plan &how, args p, ckpt_err *err);
ckpt_status run_bf16(const plan &how, args p, ckpt_err *err);

} // namespace kda

#endif
