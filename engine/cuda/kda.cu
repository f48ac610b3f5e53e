/* Launchers of the KDA kernels: checks, the division of the workspace, the order of the kernels.
 *
 * Forward: prep (a block a chunk and head) -> scan (a block a sequence, head and 32 state columns).
 * Backward: prep, scan that keeps states and V_new, scan_back, grads (a block a chunk and head).
 * Traffic at D = 128, bf16, in D-vectors of 2 bytes a token and head: prep reads 5, writes 4.5; scan
 * reads 3.5 + 3 x (parts of the state's columns, from L2), writes 1; kept states are 2 a token. */
#include "kda.h"

#include "kda_run.cuh"

#include <cmath>
#include <vector>

using namespace kda;

namespace
{

struct shape {
    int64_t chunks, tiles; /* tiles: chunks x heads */
    bool uniform;
    int size; /* bytes of an element */
    int segs, units;
};

/* Segments that a sequence is cut into: what the card still holds, if that makes the two passes pay and
 * leaves every segment eight chunks. */
int segments_of(const ckpt_cuda_kda *d, const shape &s)
{
    if (d->segments > 0)
        return d->segments;
    const int64_t blocks = d->N * d->H * (d->D / (2 * VS)), chunks = d->N > 0 ? s.chunks / d->N : 0;
    if (blocks == 0 || d->type != CKPT_CUDA_BF16)
        return 1;
    int64_t n = s.units / blocks;
    if (n > chunks / 8)
        n = chunks / 8;
    return n < 4 ? 1 : n > 64 ? 64 : (int)n;
}

ckpt_status measure(const ckpt_cuda_kda *d, shape *s, ckpt_err *err)
{
    *s = shape{};
    if (d->D != 64 && d->D != 128)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "kda: head dimension %lld on CUDA, which has 64 and 128", (long long)d->D);
    if (d->type != CKPT_CUDA_F32 && d->type != CKPT_CUDA_BF16)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "kda: type %d on CUDA, which has f32 and bf16",
                         (int)d->type);
    if (d->N < 0 || d->H < 1 || d->H > 65536)
        return ckpt_fail(err, CKPT_E_USAGE, "kda: %lld sequences of %lld heads", (long long)d->N,
                         (long long)d->H);
    if (d->g_bf16 && d->type != CKPT_CUDA_BF16)
        return ckpt_fail(err, CKPT_E_USAGE, "kda: decays in bf16 beside values in f32");
    if (d->segments < 0 || d->segments > 64)
        return ckpt_fail(err, CKPT_E_USAGE, "kda: %d segments, which can be 1 to 64", d->segments);
    if (d->N > 0 && d->cu[0] != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "kda: sequence offsets do not start at 0");
    s->size = d->type == CKPT_CUDA_BF16 ? 2 : 4;
    s->uniform = true;
    for (int64_t n = 0; n < d->N; n++) {
        const int64_t len = d->cu[n + 1] - d->cu[n];
        if (len < 0)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "kda: offset %lld of sequence %lld is before its start %lld",
                             (long long)d->cu[n + 1], (long long)n, (long long)d->cu[n]);
        s->chunks += (len + C - 1) / C;
        s->uniform = s->uniform && len == d->cu[1];
    }
    s->tiles = s->chunks * d->H;
    if (s->tiles > (int64_t)1 << 30 || d->N * d->H > (int64_t)1 << 28)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "kda: %lld chunks of %lld heads are more than one call takes",
                         (long long)s->chunks, (long long)d->H);
    s->units = multiprocessors();
    s->segs = segments_of(d, *s);
    return CKPT_OK;
}

size_t image_bytes(const ckpt_cuda_kda *d)
{
    if (d->type == CKPT_CUDA_BF16)
        return d->D == 64 ? image<bf16, 64>::bytes : image<bf16, 128>::bytes;
    return d->D == 64 ? image<float, 64>::bytes : image<float, 128>::bytes;
}

void divide(const ckpt_cuda_kda *d, const shape &s, bool back, arena *a, args *p)
{
    const size_t size = (size_t)s.size, tiles = (size_t)s.tiles, D = (size_t)d->D;
    const size_t rows = tiles * C * D * size, state = tiles * D * D * size;
    p->image = (unsigned char *)a->take(tiles * image_bytes(d));
    p->U = a->take(tiles * (D / VS * C * LV) * size);
    if (!s.uniform) {
        p->table = (const chunk_at *)a->take((size_t)s.chunks * sizeof(chunk_at));
        p->first = (const int *)a->take((size_t)(d->N + 1) * sizeof(int));
    }
    if (s.segs > 1) {
        const size_t piece = (size_t)(d->N * d->H * s.segs) * D * D * sizeof(float);
        p->compose = (float *)a->take(2 * piece);
        p->begin = (float *)a->take(piece);
        p->d_compose = back ? (float *)a->take(piece) : nullptr;
        p->d_end = back ? (float *)a->take(piece) : nullptr;
    }
    if (!back)
        return;
    p->T = a->take(tiles * C * C * size);
    p->S = a->take(state);
    p->dS = a->take(state);
    if (d->type == CKPT_CUDA_F32) /* bf16: dV_new lies in dv until grads writes that */
        p->dV = a->take(rows);
}

ckpt_status run(const ckpt_cuda_kda *d, const shape &s, const args &p, bool back,
                device_stream stream, ckpt_err *err)
{
    if (!s.uniform) {
        upload_table(d->N, d->cu, p, stream);
        const ckpt_status status = checked("copying the chunk table", err);
        if (status != CKPT_OK)
            return status;
    }
    const plan how = {s.tiles, d->N, (int)d->D, s.units, back, d->safe, stream};
    return d->type == CKPT_CUDA_BF16 ? run_bf16(how, p, err) : run_f32(how, p, err);
}

args begin(const ckpt_cuda_kda *d, const extra &x, const shape &s, const ckpt_cuda_kda_in *in)
{
    args p = {};
    p.q = in->q;
    p.k = in->k;
    p.v = in->v;
    p.g = in->g;
    p.beta = in->beta;
    p.state0 = in->state0;
    p.kb = x.kb;
    p.dkb = x.dkb;
    p.H = (int)d->H;
    p.HQ = (int)x.HQ;
    p.G = (int)(d->H / x.HQ);
    p.seq_len = d->N > 0 ? d->cu[1] : 0;
    p.per_seq = s.uniform ? (int)((p.seq_len + C - 1) / C) : 0;
    p.scale = (float)(d->scale != 0 ? d->scale : 1 / std::sqrt((double)d->D));
    p.g_bf16 = d->g_bf16;
    p.segs = s.segs;
    p.heads = (int)(d->N * d->H);
    return p;
}

} // namespace

/* Where every chunk is, when sequences differ in length. The copies are staged before they return. */
void kda::upload_table(int64_t N, const int64_t *cu, const args &p, device_stream stream)
{
    std::vector<chunk_at> table;
    std::vector<int> first;
    for (int64_t n = 0; n < N; n++) {
        first.push_back((int)table.size());
        for (int64_t at = cu[n]; at < cu[n + 1]; at += C) {
            const int64_t left = cu[n + 1] - at;
            table.push_back(chunk_at{at, (int32_t)(left < C ? left : C), (int32_t)n});
        }
    }
    first.push_back((int)table.size());
    upload((void *)p.table, table.data(), table.size() * sizeof table[0], stream);
    upload((void *)p.first, first.data(), first.size() * sizeof first[0], stream);
}

ckpt_status kda::forward(const ckpt_cuda_kda *d, const extra &x, const ckpt_cuda_kda_in *in,
                         void *o, float *state, void *work, device_stream stream, ckpt_err *err)
{
    shape s;
    const ckpt_status status = measure(d, &s, err);
    if (status != CKPT_OK)
        return status;
    args p = begin(d, x, s, in);
    arena a = {(unsigned char *)work, 0};
    divide(d, s, false, &a, &p);
    p.o = o;
    p.state = state;
    return run(d, s, p, false, stream, err);
}

ckpt_status kda::backward(const ckpt_cuda_kda *d, const extra &x, const ckpt_cuda_kda_in *in,
                          const void *d_o, const float *d_state, const ckpt_cuda_kda_grad *grad,
                          void *work, device_stream stream, ckpt_err *err)
{
    shape s;
    const ckpt_status status = measure(d, &s, err);
    if (status != CKPT_OK)
        return status;
    args p = begin(d, x, s, in);
    arena a = {(unsigned char *)work, 0};
    divide(d, s, true, &a, &p);
    p.d_o = d_o;
    p.d_state = d_state;
    p.dq = grad->q;
    p.dk = grad->k;
    p.dv = grad->v;
    p.dg = grad->g;
    p.dbeta = grad->beta;
    p.d_state0 = grad->state0;
    return run(d, s, p, true, stream, err);
}

extern "C" ckpt_status ckpt_cuda_kda_bytes(const ckpt_cuda_kda *d, size_t *forward,
                                           size_t *backward, ckpt_err *err)
{
    shape s;
    const ckpt_status status = measure(d, &s, err);
    if (status != CKPT_OK)
        return status;
    args p = {};
    arena fwd = {}, bwd = {};
    divide(d, s, false, &fwd, &p);
    divide(d, s, true, &bwd, &p);
    *forward = fwd.used;
    *backward = bwd.used;
    return CKPT_OK;
}

extern "C" ckpt_status ckpt_cuda_kda_fwd(const ckpt_cuda_kda *d, const ckpt_cuda_kda_in *in,
                                         void *o, float *state, void *work, void *stream,
                                         ckpt_err *err)
{
    return forward(d, extra{d->H, nullptr, nullptr}, in, o, state, work, stream_of(stream), err);
}

extern "C" ckpt_status ckpt_cuda_kda_bwd(const ckpt_cuda_kda *d, const ckpt_cuda_kda_in *in,
                                         const void *d_o, const float *d_state,
                                         const ckpt_cuda_kda_grad *grad, void *work, void *stream,
                                         ckpt_err *err)
{
    return backward(d, extra{d->H, nullptr, nullptr}, in, d_o, d_state, grad, work,
                    stream_of(stream), err);
}
