/* Attention: checks, padded head dims, arguments of the kernels. */
#include "attention_launch.cuh"
#include "wgmma.cuh"

namespace kda
{

/* Of attention_bf16.cu and attention_f32.cu. */
template <> ckpt_status attend_forward<bf16>(const att_call *, int, int, ckpt_err *);
template <> ckpt_status attend_backward<bf16>(const att_call *, int, int, ckpt_err *);
template <> ckpt_status attend_forward<float>(const att_call *, int, int, ckpt_err *);
template <> ckpt_status attend_backward<float>(const att_call *, int, int, ckpt_err *);

namespace
{

bool has_groups(const ckpt_cuda *c)
{
    return c->type == CKPT_CUDA_BF16 && has_warpgroups();
}
bool by_group(const ckpt_cuda *c, const ckpt_cuda_attention *a)
{
    return a->kind == CKPT_CUDA_ATTEND_GROUP || (a->kind == CKPT_CUDA_ATTEND_BEST && has_groups(c));
}

ckpt_status check(const ckpt_cuda *c, const ckpt_cuda_attention *a, const ckpt_cuda_seq *seq,
                  ckpt_err *err)
{
    if (a->N < 1 || a->G < 1 || a->N % a->G != 0 || a->DK < 1 || a->DV < 1)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "attention on CUDA: %lld query heads, %lld key heads, head dims %lld and "
                         "%lld",
                         (long long)a->N, (long long)a->G, (long long)a->DK, (long long)a->DV);
    if (a->DK > CKPT_CUDA_HEAD_MAX || a->DV > CKPT_CUDA_HEAD_MAX || a->N > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "attention on CUDA: %lld heads of dims %lld and %lld, expected at most %d",
                         (long long)a->N, (long long)a->DK, (long long)a->DV, CKPT_CUDA_HEAD_MAX);
    if (seq->n < 0 || seq->tokens < 0 || (a->parts && (a->n_parts < 0 || a->rows < 0)))
        return ckpt_fail(
            err, CKPT_E_USAGE,
            "attention on CUDA: %lld tokens of %lld sequences, %lld rows of %lld parts",
            (long long)seq->tokens, (long long)seq->n, (long long)a->rows, (long long)a->n_parts);
    if (seq->tokens > INT32_MAX || seq->n > INT32_MAX || a->rows > INT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "attention on CUDA: sizes above 2^31");
    if (a->kind == CKPT_CUDA_ATTEND_GROUP && !has_groups(c))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "attention on CUDA: kernels of sm_90 for bf16, on another card or type");
    return ready("attention", c, 0, err);
}

att_call call_of(const ckpt_cuda *c, const ckpt_cuda_attention *a, const ckpt_cuda_seq *seq)
{
    att_call r = {};
    att_args &p = r.p;
    const int whole = c->type == CKPT_CUDA_BF16 ? 8 : 4;
    const double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)a->DK);
    p.N = a->N, p.G = a->G, p.DK = a->DK, p.DV = a->DV;
    p.n_seq = seq->n, p.n_parts = a->parts ? a->n_parts : seq->n, p.cu = seq->cu;
    p.parts = a->parts;
    p.scale = (float)scale, p.scale2 = (float)(scale * (double)LOG2E);
    p.wide_k = a->DK % whole == 0, p.wide_v = a->DV % whole == 0;
    p.even_k = a->DK % 2 == 0, p.even_v = a->DV % 2 == 0;
    r.rows = a->parts ? a->rows : seq->tokens, r.tokens = seq->tokens;
    r.stream = stream_of(c->stream);
    return r;
}
/* The next larger dims there is a kernel for. */
void pad(const ckpt_cuda_attention *a, int *dk, int *dv)
{
    *dv = a->DV <= 64 && a->DK <= 64 ? 64 : a->DV <= 128 && a->DK <= 192 ? 128 : 256;
    *dk = *dv != 128 ? *dv : a->DK <= 128 ? 128 : 192;
}

} // namespace
} // namespace kda

using namespace kda;

size_t ckpt_cuda_attention_work(int64_t rows, int64_t N)
{
    return rows > 0 && N > 0 ? (size_t)rows * (size_t)N * sizeof(float) : 0;
}

ckpt_status ckpt_cuda_attend(const ckpt_cuda *c, const ckpt_cuda_attention *a,
                             const ckpt_cuda_seq *seq, const void *q, const void *k, const void *v,
                             void *o, float *lse, ckpt_err *err)
{
    int dk, dv;
    const ckpt_status status = check(c, a, seq, err);
    if (status != CKPT_OK)
        return status;
    att_call r = call_of(c, a, seq);
    if (r.rows == 0)
        return CKPT_OK;
    r.p.q = q, r.p.k = k, r.p.v = v, r.p.out = o, r.p.out_lse = lse;
    pad(a, &dk, &dv);
    if (by_group(c, a))
        return attend_forward_wg(&r, dk, dv, err);
    return c->type == CKPT_CUDA_BF16 ? attend_forward<bf16>(&r, dk, dv, err)
                                     : attend_forward<float>(&r, dk, dv, err);
}

ckpt_status ckpt_cuda_attend_bwd(const ckpt_cuda *c, const ckpt_cuda_attention *a,
                                 const ckpt_cuda_seq *seq, const void *q, const void *k,
                                 const void *v, const void *o, const float *lse, const void *d_o,
                                 void *dq, void *dk, void *dv, ckpt_err *err)
{
    int pk, pv;
    const ckpt_status status = check(c, a, seq, err);
    if (status != CKPT_OK)
        return status;
    att_call r = call_of(c, a, seq);
    const size_t need = ckpt_cuda_attention_work(r.rows, a->N);
    if (c->bytes < need)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "attention backward on CUDA: workspace of %zu bytes, needs %zu for %lld "
                         "rows of %lld heads",
                         c->bytes, need, (long long)r.rows, (long long)a->N);
    r.p.q = q, r.p.k = k, r.p.v = v, r.p.o = o, r.p.lse = lse, r.p.d_o = d_o;
    r.p.D = (const float *)c->work, r.p.dq = dq, r.p.dk = dk, r.p.dv = dv;
    pad(a, &pk, &pv);
    if (by_group(c, a)) {
        const ckpt_status dots = dots_of<bf16>(&r, err);
        return dots == CKPT_OK ? attend_backward_wg(&r, pk, pv, err) : dots;
    }
    return c->type == CKPT_CUDA_BF16 ? attend_backward<bf16>(&r, pk, pv, err)
                                     : attend_backward<float>(&r, pk, pv, err);
}
