/* The delta rules of delta.h: what kda.h does not take is copied into its form and back.
 *
 * One element a thread; rows are (token, head), D the padded head size. Copies of q, k, v, g and o are
 * one pass of their array each; dq and dk of value heads that share a key head are summed in order. */
#include "delta.h"

#include "kda_run.cuh"
#include "ops_common.cuh"

#include <math.h>

namespace kda
{
namespace
{

/* out [rows, n] = a b in the first `valid` columns, else 0. a [rows / ga, na], b [rows / gb, nb] or
 * NULL: ga rows of out share one of a; a row of one element serves all columns. */
struct mix {
    int64_t rows, n, valid, na, nb;
    int ga, gb;
    const void *a, *b;
    void *out;
};
template <class A, class B, class O> KERNEL(THREADS, 1) mixed(mix p)
{
    const int64_t i = index_of(), r = i / p.n, d = i % p.n;
    if (r >= p.rows)
        return;
    float x = 0;
    if (d < p.valid) {
        x = to_f(((const A *)p.a)[r / p.ga * p.na + (p.na == 1 ? 0 : d)]);
        if (p.b)
            x *= to_f(((const B *)p.b)[r / p.gb * p.nb + (p.nb == 1 ? 0 : d)]);
    }
    ((O *)p.out)[i] = cast<O>(x);
}

/* out [rows, n] = sum over its g rows of a [rows g, D], plus those of b e, b [rows g, D], e [rows g, n]. */
struct fold {
    int64_t rows, n, D;
    int g;
    const void *a, *b, *e;
    void *out;
};
template <class E, class F> KERNEL(THREADS, 1) folded(fold p)
{
    const int64_t i = index_of(), r = i / p.n, d = i % p.n;
    if (r >= p.rows)
        return;
    float x = 0;
    for (int64_t j = r * p.g; j < (r + 1) * p.g; j++) {
        x += to_f(((const E *)p.a)[j * p.D + d]);
        if (p.b)
            x += to_f(((const E *)p.b)[j * p.D + d]) * to_f(((const F *)p.e)[j * p.n + d]);
    }
    ((E *)p.out)[i] = cast<E>(x);
}

/* out [rows] = sum of the first n of a [rows, D], a warp a row. */
template <class F>
KERNEL(THREADS, 1)
summed(int64_t rows, int64_t n, int64_t D, const float *a, F *out)
{
    const int64_t r = warp_of();
    float x = 0;
    for (int64_t d = lane(); d < n && r < rows; d += 32)
        x += a[r * D + d];
    x = group_sum<32>(x, nullptr);
    if (lane() == 0 && r < rows)
        out[r] = cast<F>(x);
}

/* to [n, K1, V1] of from [n, K0, V0], zeros where there is none. */
KERNEL(THREADS, 1)
resized(int64_t n, int64_t K0, int64_t V0, int64_t K1, int64_t V1, const float *from, float *to)
{
    const int64_t i = index_of();
    const int64_t s = i / (K1 * V1), k = i / V1 % K1, v = i % V1;
    if (s < n)
        to[i] = k < K0 && v < V0 ? from[(s * K0 + k) * V0 + v] : 0.f;
}

/* What stands in for the arrays of a call; a member is NULL when the caller's own array serves. */
struct copies {
    void *q, *k, *v, *kb, *o, *d_o, *dq, *dk, *dv, *dkb;
    float *g, *beta, *dg, *dbeta, *state0, *state, *d_state, *d_state0;
    void *kda; /* workspace of kda.h */
    size_t used;
};

struct problem {
    const ckpt_cuda *c;
    const ckpt_cuda_delta *d;
    ckpt_cuda_kda kda;
    int64_t T;
    int group;
    bool pad, gdn, gdn2;
    bool as_f32;    /* gates need no conversion */
    int64_t nk, nv; /* elements of padded arrays of H and HV heads */
    size_t forward, backward;
};

ckpt_status understand(const ckpt_cuda *c, const ckpt_cuda_delta *d, problem *p, ckpt_err *err)
{
    *p = problem{};
    p->c = c;
    p->d = d;
    if (d->H < 1 || d->HV < 1 || d->HV % d->H != 0 || d->K < 1 || d->V < 1 || d->N < 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "delta rule on CUDA: %lld value heads of %lld for %lld key heads of %lld",
                         (long long)d->HV, (long long)d->V, (long long)d->H, (long long)d->K);
    if (d->K > 128 || d->V > 128)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "delta rule on CUDA: head size %lld above 128",
                         (long long)(d->K > d->V ? d->K : d->V));
    if ((unsigned)d->rule > CKPT_CUDA_RULE_GDN2)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "delta rule on CUDA: rule %d", (int)d->rule);
    if ((d->gates != CKPT_CUDA_F32 && d->gates != CKPT_CUDA_BF16) ||
        (d->gates == CKPT_CUDA_BF16 && c->type != CKPT_CUDA_BF16))
        return ckpt_fail(err, CKPT_E_USAGE, "delta rule on CUDA: gates of type %d beside %d",
                         (int)d->gates, (int)c->type);
    const int64_t D = d->K > 64 || d->V > 64 ? 128 : 64;
    p->kda = ckpt_cuda_kda{c->type, d->N, d->HV, D, d->cu, d->scale, d->safe, false, 0};
    if (d->scale == 0)
        p->kda.scale = 1 / sqrt((double)d->K);
    const ckpt_status status = ckpt_cuda_kda_bytes(&p->kda, &p->forward, &p->backward, err);
    if (status != CKPT_OK)
        return status;
    p->T = d->N > 0 ? d->cu[d->N] : 0;
    p->group = (int)(d->HV / d->H);
    p->pad = d->K != D || d->V != D;
    p->gdn = d->rule == CKPT_CUDA_RULE_GDN;
    p->gdn2 = d->rule == CKPT_CUDA_RULE_GDN2;
    p->as_f32 = d->gates == CKPT_CUDA_F32;
    p->nk = p->T * d->H * D;
    p->nv = p->T * d->HV * D;
    return CKPT_OK;
}

copies divide(const problem &p, bool back, void *work)
{
    const size_t E = p.c->type == CKPT_CUDA_BF16 ? 2 : 4;
    const int64_t states = p.d->N * p.d->HV * p.kda.D * p.kda.D, rows = p.T * p.d->HV;
    arena a = {(unsigned char *)work, 0};
    auto take = [&](bool wanted, int64_t n, size_t size) {
        return wanted ? a.take((size_t)n * size) : nullptr;
    };
    copies m = {};
    m.q = take(p.pad, p.nk, E);
    m.k = take(p.pad, p.nk, E);
    m.v = take(p.pad || p.gdn2, p.nv, E);
    m.kb = take(p.gdn2, p.nv, E);
    m.g = (float *)take(p.pad || p.gdn || !p.as_f32, p.nv, 4);
    m.beta = (float *)take(!p.as_f32 && !p.gdn2, rows, 4);
    m.state0 = (float *)take(p.pad, states, 4);
    if (!back) {
        m.o = take(p.pad, p.nv, E);
        m.state = (float *)take(p.pad, states, 4);
    } else {
        m.d_o = take(p.pad, p.nv, E);
        m.d_state = (float *)take(p.pad, states, 4);
        m.d_state0 = (float *)take(p.pad, states, 4);
        m.dq = take(p.pad || p.group > 1, p.nv, E);
        m.dk = take(p.pad || p.group > 1 || p.gdn2, p.nv, E);
        m.dv = take(p.pad || p.gdn2, p.nv, E);
        m.dkb = take(p.gdn2, p.nv, E);
        m.dg = (float *)take(p.pad || p.gdn || !p.as_f32, p.nv, 4);
        m.dbeta = (float *)take(!p.as_f32 && !p.gdn2, rows, 4);
    }
    m.kda = a.take(back ? p.backward : p.forward);
    m.used = a.used;
    return m;
}

template <class E, class F> struct form {
    const problem &p;
    const copies &m;
    const ckpt_cuda_delta_in *in;
    device_stream stream;
    int64_t D, rows, key_rows; /* rows: of v */

    form(const problem &problem, const copies &copies, const ckpt_cuda_delta_in *arrays)
        : p(problem), m(copies), in(arrays), stream(stream_of(problem.c->stream)), D(problem.kda.D),
          rows(problem.T * problem.d->HV), key_rows(problem.T * problem.d->H)
    {
    }
    template <class A, class B, class O>
    void set(O *out, int64_t n_rows, int64_t n, int64_t valid, const A *a, int64_t na,
             const B *b = nullptr, int64_t nb = 1, int ga = 1) const
    {
        const mix x = {n_rows, n, valid, na, nb, ga, 1, a, b, out};
        if (out && n_rows > 0)
            LAUNCH((mixed<A, B, O>), ceil_div(n_rows * n, THREADS), THREADS, 0, stream, x);
    }
    void resize(float *to, const float *from, bool out) const
    {
        const int64_t K = p.d->K, V = p.d->V, n = p.d->N * p.d->HV;
        const int64_t K0 = out ? D : K, V0 = out ? D : V, K1 = out ? K : D, V1 = out ? V : D;
        if (to && from && n > 0)
            LAUNCH(resized, ceil_div(n * K1 * V1, THREADS), THREADS, 0, stream, n, K0, V0, K1, V1,
                   from, to);
    }
    ckpt_cuda_kda_in inputs() const
    {
        const int64_t K = p.d->K, V = p.d->V;
        ckpt_cuda_kda_in to = {in->q, in->k, in->v, in->g, (const float *)in->erase, in->state0};
        set<E, E, E>((E *)m.q, key_rows, D, K, (const E *)in->q, K);
        set<E, E, E>((E *)m.k, key_rows, D, K, (const E *)in->k, K);
        set<E, F, E>((E *)m.v, rows, D, V, (const E *)in->v, V,
                     p.gdn2 ? (const F *)in->write : nullptr, V);
        set<E, F, E>((E *)m.kb, rows, D, K, (const E *)in->k, K, (const F *)in->erase, K, p.group);
        set<F, F, float>(m.g, rows, D, K, (const F *)in->g, p.gdn ? 1 : K);
        set<F, F, float>(m.beta, rows, 1, 1, (const F *)in->erase, 1);
        resize(m.state0, in->state0, false);
        to.q = m.q ? m.q : in->q;
        to.k = m.k ? m.k : in->k;
        to.v = m.v ? m.v : in->v;
        to.g = m.g ? m.g : in->g;
        to.beta = m.beta ? m.beta : to.beta;
        to.state0 = m.state0 && in->state0 ? m.state0 : in->state0;
        return to;
    }
    ckpt_status forward(void *o, float *state, ckpt_err *err) const
    {
        const ckpt_cuda_kda_in to = inputs();
        ckpt_status status = launched("delta rule", err);
        if (status == CKPT_OK)
            status = kda::forward(&p.kda, extra{p.d->H, m.kb, nullptr}, &to, m.o ? m.o : o,
                                  state && m.state ? m.state : state, m.kda, stream, err);
        if (status != CKPT_OK)
            return status;
        if (m.o)
            set<E, E, E>((E *)o, rows, p.d->V, p.d->V, (const E *)m.o, D);
        resize(state, m.state, true);
        return launched("delta rule", err);
    }
    void outputs(const ckpt_cuda_delta_grad *g) const
    {
        const int64_t K = p.d->K, V = p.d->V;
        if (m.dq)
            LAUNCH((folded<E, F>), ceil_div(key_rows * K, THREADS), THREADS, 0, stream,
                   (fold{key_rows, K, D, p.group, m.dq, nullptr, nullptr, g->q}));
        if (m.dk)
            LAUNCH((folded<E, F>), ceil_div(key_rows * K, THREADS), THREADS, 0, stream,
                   (fold{key_rows, K, D, p.group, m.dk, m.dkb, in->erase, g->k}));
        if (m.dv)
            set<E, F, E>((E *)g->v, rows, V, V, (const E *)m.dv, D,
                         p.gdn2 ? (const F *)in->write : nullptr, V);
        if (p.gdn2) {
            set<E, E, F>((F *)g->write, rows, V, V, (const E *)in->v, V, (const E *)m.dv, D);
            set<E, E, F>((F *)g->erase, rows, K, K, (const E *)in->k, K, (const E *)m.dkb, D,
                         p.group);
        }
        if (m.dbeta)
            set<float, float, F>((F *)g->erase, rows, 1, 1, m.dbeta, 1);
        if (p.gdn)
            LAUNCH((summed<F>), ceil_div(rows, THREADS / 32), THREADS, 0, stream, rows, K, D,
                   (const float *)m.dg, (F *)g->g);
        else if (m.dg)
            set<float, float, F>((F *)g->g, rows, K, K, m.dg, D);
    }
    ckpt_status backward(const void *d_o, const float *d_state, const ckpt_cuda_delta_grad *g,
                         ckpt_err *err) const
    {
        const ckpt_cuda_kda_in to = inputs();
        set<E, E, E>((E *)m.d_o, rows, D, p.d->V, (const E *)d_o, p.d->V);
        resize(m.d_state, d_state, false);
        const ckpt_cuda_kda_grad grad = {m.dq ? m.dq : g->q,
                                         m.dk ? m.dk : g->k,
                                         m.dv ? m.dv : g->v,
                                         m.dg ? m.dg : (float *)g->g,
                                         m.dbeta ? m.dbeta : (float *)g->erase,
                                         m.d_state0 && g->state0 ? m.d_state0 : g->state0};
        ckpt_status status = launched("delta rule backward", err);
        if (status == CKPT_OK)
            status = kda::backward(&p.kda, extra{p.d->H, m.kb, m.dkb}, &to, m.d_o ? m.d_o : d_o,
                                   m.d_state && d_state ? m.d_state : d_state, &grad, m.kda, stream,
                                   err);
        if (status != CKPT_OK)
            return status;
        if (p.T > 0)
            outputs(g);
        resize(g->state0, m.d_state0, true);
        return launched("delta rule backward", err);
    }
};

ckpt_status ready(const problem &p, const copies &need, ckpt_err *err)
{
    if (p.c->bytes < need.used)
        return ckpt_fail(err, CKPT_E_USAGE, "delta rule on CUDA: workspace of %zu bytes, needs %zu",
                         p.c->bytes, need.used);
    return CKPT_OK;
}

} // namespace
} // namespace kda

using namespace kda;

extern "C" ckpt_status ckpt_cuda_delta_bytes(const ckpt_cuda *c, const ckpt_cuda_delta *d,
                                             size_t *forward, size_t *backward, ckpt_err *err)
{
    problem p;
    const ckpt_status status = understand(c, d, &p, err);
    if (status != CKPT_OK)
        return status;
    *forward = divide(p, false, nullptr).used;
    *backward = divide(p, true, nullptr).used;
    return CKPT_OK;
}

extern "C" ckpt_status ckpt_cuda_delta_fwd(const ckpt_cuda *c, const ckpt_cuda_delta *d,
                                           const ckpt_cuda_delta_in *in, void *o, float *state,
                                           ckpt_err *err)
{
    problem p;
    ckpt_status status = understand(c, d, &p, err);
    if (status != CKPT_OK)
        return status;
    const copies m = divide(p, false, c->work);
    status = ready(p, m, err);
    if (status != CKPT_OK)
        return status;
    if (c->type == CKPT_CUDA_F32)
        return form<float, float>(p, m, in).forward(o, state, err);
    return p.as_f32 ? form<bf16, float>(p, m, in).forward(o, state, err)
                    : form<bf16, bf16>(p, m, in).forward(o, state, err);
}

extern "C" ckpt_status ckpt_cuda_delta_bwd(const ckpt_cuda *c, const ckpt_cuda_delta *d,
                                           const ckpt_cuda_delta_in *in, const void *d_o,
                                           const float *d_state, const ckpt_cuda_delta_grad *grad,
                                           ckpt_err *err)
{
    problem p;
    ckpt_status status = understand(c, d, &p, err);
    if (status != CKPT_OK)
        return status;
    const copies m = divide(p, true, c->work);
    status = ready(p, m, err);
    if (status != CKPT_OK)
        return status;
    if (c->type == CKPT_CUDA_F32)
        return form<float, float>(p, m, in).backward(d_o, d_state, grad, err);
    return p.as_f32 ? form<bf16, float>(p, m, in).backward(d_o, d_state, grad, err)
                    : form<bf16, bf16>(p, m, in).backward(d_o, d_state, grad, err);
}
