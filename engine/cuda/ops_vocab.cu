/* Embedding and cross entropy.
 *
 * Lookup: a block a token. Its gradient: the block of an id's first token finds all of the id's tokens
 * by scanning the ids, 8192 at a time, and adds their rows in token order: no atomics, T^2 / 2 reads of
 * ids from the caches. Cross entropy: a block a token, one reading for the maximum and the rescaled sum
 * together, one for the gradient, which a cached row does not take from memory again.
 * Formulas: engine/embed.c, engine/xent.c. */
#include "ops_common.cuh"

namespace kda
{
namespace
{

constexpr int VV = 8, SCAN = THREADS * 32, XENT_THREADS = 1024;

struct embed_args {
    int64_t T, lo, n, H;
    const int32_t *ids;
    const void *from;
    void *to;
    bool wide;
};

template <class E> KERNEL(THREADS, 1) lookup(embed_args p)
{
    const int64_t t = blockIdx.x, row = p.ids[t] - p.lo;
    const bool here = row >= 0 && row < p.n;
    for (int64_t at = (int64_t)threadIdx.x * VV; at < p.H; at += THREADS * VV) {
        float x[VV];
        get((const E *)p.from + (here ? row * p.H : 0), at, here ? p.H : 0, p.wide, x);
        put((E *)p.to + t * p.H, at, p.H, p.wide, x);
    }
}

/* Add the rows whose bits are set to the table's row. some: which words of bits are not 0. */
template <class E>
DEV void add_rows(const embed_args &p, int64_t base, const uint32_t *bits, const uint32_t *some,
                  float *to)
{
    for (int64_t at = (int64_t)threadIdx.x * VV; at < p.H; at += THREADS * VV) {
        float sum[VV];
        get((const float *)to, at, p.H, p.wide, sum);
        for (int w = 0; w < THREADS; w++) {
            if (!(some[w / 32] >> w % 32)) {
                w |= 31;
                continue;
            }
            for (int b = 0; b < 32 && bits[w] >> b; b++) {
                float x[VV];
                if (!(bits[w] >> b & 1))
                    continue;
                get((const E *)p.from + (base + w * 32 + b) * p.H, at, p.H, p.wide, x);
#pragma unroll
                for (int i = 0; i < VV; i++)
                    sum[i] += x[i];
            }
        }
        put(to, at, p.H, p.wide, sum);
    }
}

template <class E> KERNEL(THREADS, 1) lookup_back(embed_args p)
{
    SHARED_MEMORY(memory);
    uint32_t *bits = (uint32_t *)memory, *some = bits + THREADS;
    float *s = (float *)(some + 8);
    const int64_t t = blockIdx.x;
    const int32_t id = p.ids[t];
    const int64_t row = id - p.lo;
    if (row < 0 || row >= p.n)
        return;
    float earlier = 0;
    for (int64_t i = threadIdx.x; i < t; i += THREADS)
        earlier += p.ids[i] == id ? 1.f : 0.f;
    if (group_sum<THREADS>(earlier, s) != 0.f)
        return;
    for (int64_t base = t; base < p.T; base += SCAN) {
        const int64_t first = base + (int64_t)threadIdx.x * 32;
        uint32_t mine = 0;
        for (int i = 0; i < 32 && first + i < p.T; i++)
            mine |= (uint32_t)(p.ids[first + i] == id) << i;
        bits[threadIdx.x] = mine;
        sync_block();
        if (threadIdx.x < 8) {
            uint32_t any = 0;
            for (int i = 0; i < 32; i++)
                any |= (uint32_t)(bits[threadIdx.x * 32 + i] != 0) << i;
            some[threadIdx.x] = any;
        }
        sync_block();
        add_rows<E>(p, base, bits, some, (float *)p.to + row * p.H);
        sync_block();
    }
}

struct xent_args {
    int64_t V;
    const void *logits;
    const int32_t *labels;
    const float *weight;
    float *loss;
    void *dlogits;
    bool wide;
};

/* A maximum and a sum of exponents relative to it. A NaN goes into the sum. */
DEV void join(float &top, float &sum, float other_top, float other_sum)
{
    const float high = other_top > top ? other_top : top;
    if (high == -INFINITY)
        return;
    sum = sum * exp_of(top - high) + other_sum * exp_of(other_top - high);
    top = high;
}

template <class E> KERNEL(XENT_THREADS, 1) xent(xent_args p)
{
    SHARED_MEMORY(memory);
    float *s = (float *)memory;
    const int64_t t = blockIdx.x;
    const int32_t label = p.labels[t];
    const E *z = (const E *)p.logits + t * p.V;
    E *d = p.dlogits ? (E *)p.dlogits + t * p.V : NULL;
    const int64_t step = (int64_t)XENT_THREADS * VV, at0 = (int64_t)threadIdx.x * VV;
    float top = -INFINITY, sum = 0, x[VV];
    if (label < 0) {
        if (threadIdx.x == 0)
            p.loss[t] = 0;
#pragma unroll
        for (int i = 0; i < VV; i++)
            x[i] = 0;
        for (int64_t at = at0; d && at < p.V; at += step)
            put(d, at, p.V, p.wide, x);
        return;
    }
    for (int64_t at = at0; at < p.V; at += step) {
        float high = -INFINITY, part = 0;
        get(z, at, p.V, p.wide, x);
#pragma unroll
        for (int i = 0; i < VV; i++) {
            x[i] = at + i < p.V ? x[i] : -INFINITY;
            high = x[i] > high ? x[i] : high;
        }
#pragma unroll
        for (int i = 0; i < VV; i++) /* NaN or infinity less infinity: NaN, as it must be */
            part += x[i] == -INFINITY ? 0.f : exp_of(x[i] - high);
        if (part != part)
            sum = part;
        join(top, sum, high, part);
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other_top = shuffle_xor(top, mask), other_sum = shuffle_xor(sum, mask);
        if (other_sum != other_sum)
            sum = other_sum;
        join(top, sum, other_top, other_sum);
    }
    if (lane() == 0) {
        s[threadIdx.x / 32] = top;
        s[32 + threadIdx.x / 32] = sum;
    }
    const float at_label = to_f(z[label]);
    sync_block();
    top = -INFINITY, sum = 0;
    for (int i = 0; i < XENT_THREADS / 32; i++) {
        if (s[32 + i] != s[32 + i])
            sum = s[32 + i];
        join(top, sum, s[i], s[32 + i]);
    }
    if (threadIdx.x == 0)
        p.loss[t] = logf(sum) - (at_label - top);
    const float w = d ? p.weight[t] : 0.f, scale = w / sum;
    for (int64_t at = at0; d && at < p.V; at += step) {
        get(z, at, p.V, p.wide, x);
#pragma unroll
        for (int i = 0; i < VV; i++)
            x[i] = exp_of(x[i] - top) * scale - (at + i == label ? w : 0.f);
        put(d, at, p.V, p.wide, x);
    }
}

ckpt_status check_embed(const char *what, const ckpt_cuda *c, int64_t T, int64_t n, int64_t H,
                        ckpt_err *err)
{
    if (T < 0 || n < 0 || H < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s on CUDA: %lld tokens, %lld rows of %lld", what,
                         (long long)T, (long long)n, (long long)H);
    const ckpt_status status = ready(what, c, 0, err);
    return status != CKPT_OK ? status : grid_fits(what, T, err);
}

} // namespace
} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_embed(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n, int64_t H,
                            const int32_t *ids, const void *table, void *y, ckpt_err *err)
{
    const ckpt_status status = check_embed("embedding", c, T, n, H, err);
    if (status != CKPT_OK || T == 0 || H == 0)
        return status;
    const embed_args p = {T, lo, n, H, ids, table, y, H % VV == 0};
    LAUNCH_OF(c, lookup, T, THREADS, 0, p);
    return launched("embedding", err);
}

ckpt_status ckpt_cuda_embed_bwd(const ckpt_cuda *c, int64_t T, int64_t lo, int64_t n, int64_t H,
                                const int32_t *ids, const void *dy, float *dtable, ckpt_err *err)
{
    const ckpt_status status = check_embed("embedding backward", c, T, n, H, err);
    if (status != CKPT_OK || T == 0 || H == 0)
        return status;
    const embed_args p = {T, lo, n, H, ids, dy, dtable, H % VV == 0};
    const size_t bytes = (THREADS + 8 + 8) * sizeof(uint32_t);
    LAUNCH_OF(c, lookup_back, T, THREADS, bytes, p);
    return launched("embedding backward", err);
}

ckpt_status ckpt_cuda_xent(const ckpt_cuda *c, int64_t T, int64_t V, const void *logits,
                           const int32_t *labels, const float *weight, float *loss, void *dlogits,
                           ckpt_err *err)
{
    if (T < 0 || V <= 0)
        return ckpt_fail(err, CKPT_E_USAGE, "cross entropy on CUDA: %lld tokens, vocabulary %lld",
                         (long long)T, (long long)V);
    ckpt_status status = ready("cross entropy", c, 0, err);
    if (status == CKPT_OK)
        status = grid_fits("cross entropy", T, err);
    if (status != CKPT_OK || T == 0)
        return status;
    const xent_args p = {V, logits, labels, weight, loss, dlogits, V % VV == 0};
    LAUNCH_OF(c, xent, T, XENT_THREADS, 256, p);
    return launched("cross entropy", err);
}
