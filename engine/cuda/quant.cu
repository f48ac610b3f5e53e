/* Launchers of the quantised KDA prefill: checks, the division of memory, which head size runs.
 *
 * Forward: [find_peaks] -> interact -> [approximate] -> solve -> [bake] -> walk -> output, the first with NVFP4
 * at an interaction. Backward: back_walk -> back_products -> solve_back -> interact_back -> [fold].
 * Kept, in floats a chunk and head: 64 (5 D + 128) + D^2 + D. */
#include "quant.h"

#include "kda_run.cuh"
#include "quant_run.cuh"

#include <cmath>

using namespace kda;

namespace
{

struct problem {
    int64_t chunks, steps, items, rows, tokens, D;
    bool uniform, shared;
};

ckpt_status measure_sequences(const ckpt_cuda_quant *d, problem *s, ckpt_err *err)
{
    s->uniform = true;
    if (d->N > 0 && d->cu[0] != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "quantised KDA: sequence offsets do not start at 0");
    for (int64_t n = 0; n < d->N; n++) {
        const int64_t len = d->cu[n + 1] - d->cu[n], chunks = (len + C - 1) / C;
        if (len < 0)
            return ckpt_fail(err, CKPT_E_USAGE,
                             "quantised KDA: offset %lld of sequence %lld is before its start %lld",
                             (long long)d->cu[n + 1], (long long)n, (long long)d->cu[n]);
        if (len == 0)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "quantised KDA: sequence %lld of the packed ones is empty",
                             (long long)n);
        s->chunks += chunks;
        s->steps = chunks > s->steps ? chunks : s->steps;
        s->uniform = s->uniform && len == d->cu[1];
    }
    s->tokens = d->N > 0 ? d->cu[d->N] : 0;
    return CKPT_OK;
}

ckpt_status measure(const ckpt_cuda *c, const ckpt_cuda_quant *d, problem *s, ckpt_err *err)
{
    *s = problem{};
    if (d->H < 1 || d->HV < 1 || d->HV > 65536 || d->HV % d->H != 0 || d->K < 1 || d->V < 1 ||
        d->N < 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "quantised KDA: %lld value heads of %lld for %lld key heads of %lld",
                         (long long)d->HV, (long long)d->V, (long long)d->H, (long long)d->K);
    if (d->K > 128 || d->V > 128)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "quantised KDA: head size %lld on CUDA, which has up to 128",
                         (long long)(d->K > d->V ? d->K : d->V));
    if (c->type != CKPT_CUDA_F32 && c->type != CKPT_CUDA_BF16)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "quantised KDA: type %d on CUDA, which has f32 and bf16", (int)c->type);
    const int64_t tile = d->policy->block_v;
    if (d->policy->kind[CKPT_HANDLE_STATE] != CKPT_QUANT_OFF && tile != 16 && tile != 32 &&
        tile != 64 && tile != 128)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "quantised KDA: block_v is %lld, expected 16, 32, 64 or 128",
                         (long long)tile);
    const ckpt_status status = measure_sequences(d, s, err);
    if (status != CKPT_OK)
        return status;
    if (s->chunks > (int64_t)1 << 24 || s->chunks * d->HV > (int64_t)1 << 27)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "quantised KDA: %lld chunks of %lld heads are more than one call takes",
                         (long long)s->chunks, (long long)d->HV);
    s->D = d->K > 64 || d->V > 64 ? 128 : 64;
    s->items = s->chunks * d->HV;
    s->rows = d->N * d->HV;
    s->shared = d->H != d->HV;
    return CKPT_OK;
}

float *take(arena *a, int64_t items, int64_t rows, int64_t columns)
{
    return (float *)a->take((size_t)(items * rows * columns) * sizeof(float));
}

void divide_saved(const problem &s, const ckpt_cuda_quant *d, arena *a, quant::qargs *p)
{
    p->prefix = take(a, s.items, C, s.D);
    p->qg = take(a, s.items, C, s.D);
    p->wk = take(a, s.items, C, s.D);
    p->u = take(a, s.items, C, s.D);
    p->w = take(a, s.items, C, s.D);
    p->inverse = take(a, s.items, C, C);
    p->scores = take(a, s.items, C, C);
    p->states = take(a, s.items, s.D, s.D);
    p->s_scale = take(a, s.items, 1, s.D);
    p->peaks = (uint32_t *)take(a, 1, s.steps + 1 + quant::PEAK_STEPS, quant::STEP_PEAKS);
    if (!s.uniform) {
        p->table = (const chunk_at *)a->take((size_t)s.chunks * sizeof(chunk_at));
        p->first = (const int *)a->take((size_t)(d->N + 1) * sizeof(int));
    }
}

void divide_back(const problem &s, const ckpt_cuda_quant *d, arena *a, quant::qargs *p)
{
    p->ds = take(a, s.items, s.D, s.D);
    p->du = take(a, s.items, C, s.D);
    p->dw = take(a, s.items, C, s.D);
    p->dqg = take(a, s.items, C, s.D);
    p->dwk = take(a, s.items, C, s.D);
    p->dbv = take(a, s.items, C, s.D);
    p->dbkg = take(a, s.items, C, s.D);
    p->dscores = take(a, s.items, C, C);
    p->dlower = take(a, s.items, C, C);
    p->dlast = take(a, s.items, 1, s.D);
    if (s.shared) {
        p->dq_heads = take(a, s.tokens, d->HV, d->K);
        p->dk_heads = take(a, s.tokens, d->HV, d->K);
    }
}

quant::qargs begin(const ckpt_cuda *c, const ckpt_cuda_quant *d, const problem &s,
                   const ckpt_cuda_delta_in *in)
{
    quant::qargs p = {};
    p.q = in->q;
    p.k = in->k;
    p.v = in->v;
    p.g = in->g;
    p.beta = (const float *)in->erase;
    p.state0 = in->state0;
    p.H = (int)d->HV;
    p.HQ = (int)d->H;
    p.G = (int)(d->HV / d->H);
    p.K = (int)d->K;
    p.V = (int)d->V;
    p.seq_len = d->N > 0 ? d->cu[1] : 0;
    p.per_seq = s.uniform ? (int)((p.seq_len + C - 1) / C) : 0;
    p.scale = (float)(d->scale != 0 ? d->scale : 1 / std::sqrt((double)d->K));
    p.chunks = (int)s.chunks;
    p.steps = (int)s.steps;
    p.half = c->type == CKPT_CUDA_BF16;
    p.shared = s.shared;
    p.errors = d->errors;
    p.how = *d->policy;
    for (int64_t &block : p.how.block) /* beyond the reduction all are one */
        block = block < 1 << 20 ? block : 1 << 20;
    for (const ckpt_quant_kind &kind : p.how.kind)
        p.fp4 = p.fp4 || kind == CKPT_QUANT_NVFP4;
    return p;
}

quant::plan plan_of(const ckpt_cuda *c, const ckpt_cuda_quant *d, const problem &s)
{
    return quant::plan{s.items, s.rows, s.tokens * d->H * d->K, stream_of(c->stream)};
}

} // namespace

extern "C" ckpt_status ckpt_cuda_quant_bytes(const ckpt_cuda *c, const ckpt_cuda_quant *d,
                                             size_t *saved, size_t *backward, ckpt_err *err)
{
    problem s;
    const ckpt_status status = measure(c, d, &s, err);
    if (status != CKPT_OK)
        return status;
    quant::qargs p = {};
    arena kept = {}, back = {};
    divide_saved(s, d, &kept, &p);
    divide_back(s, d, &back, &p);
    *saved = kept.used;
    *backward = back.used;
    return CKPT_OK;
}

extern "C" ckpt_status ckpt_cuda_quant_fwd(const ckpt_cuda *c, const ckpt_cuda_quant *d,
                                           const ckpt_cuda_delta_in *in, void *o, float *state,
                                           void *saved, ckpt_err *err)
{
    problem s;
    ckpt_status status = measure(c, d, &s, err);
    if (status != CKPT_OK || s.items == 0)
        return status;
    quant::qargs p = begin(c, d, s, in);
    const quant::plan how = plan_of(c, d, s);
    arena a = {(unsigned char *)saved, 0};
    divide_saved(s, d, &a, &p);
    p.o = o;
    p.state = state;
    if (!s.uniform) {
        upload_table(d->N, d->cu, p, how.stream);
        status = checked("copying the chunk table", err);
        if (status != CKPT_OK)
            return status;
    }
    return s.D == 64 ? quant::forward_64(how, p, err) : quant::forward_128(how, p, err);
}

extern "C" ckpt_status ckpt_cuda_quant_bwd(const ckpt_cuda *c, const ckpt_cuda_quant *d,
                                           const ckpt_cuda_delta_in *in, const void *saved,
                                           const void *d_o, const float *d_state,
                                           const ckpt_cuda_delta_grad *grad, ckpt_err *err)
{
    problem s;
    const ckpt_status status = measure(c, d, &s, err);
    if (status != CKPT_OK || s.items == 0)
        return status;
    quant::qargs p = begin(c, d, s, in);
    const quant::plan how = plan_of(c, d, s);
    arena kept = {(unsigned char *)saved, 0}, a = {(unsigned char *)c->work, 0};
    divide_saved(s, d, &kept, &p);
    divide_back(s, d, &a, &p);
    if (c->bytes < a.used)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "quantised KDA on CUDA: workspace of %zu bytes, needs %zu", c->bytes,
                         a.used);
    p.d_o = d_o;
    p.d_state = d_state;
    p.dq = grad->q;
    p.dk = grad->k;
    p.dv = grad->v;
    p.dg = (float *)grad->g;
    p.dbeta = (float *)grad->erase;
    p.d_state0 = grad->state0;
    return s.D == 64 ? quant::backward_64(how, p, err) : quant::backward_128(how, p, err);
}
