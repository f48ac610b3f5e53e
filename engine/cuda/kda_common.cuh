/* What the KDA kernels share: arguments, the chunk grid, loads, decays. */
#ifndef CKPT_CUDA_KDA_COMMON_CUH
#define CKPT_CUDA_KDA_COMMON_CUH

#include "tile.cuh"

namespace kda
{

constexpr int C = 64;      /* tokens of a chunk */
constexpr int LC = C + 8;  /* row stride of a C x C tile: rows start in different banks */
constexpr int LF = C + 4;  /* the same for f32 tiles */
constexpr int VS = 32;     /* columns of the state in one block of a scan */
constexpr int LV = VS + 8; /* row stride of a VS wide tile */

/* A chunk of one sequence; rows beyond len are read as q = k = v = beta = g = 0 and change nothing. */
struct chunk_at {
    int64_t start;
    int32_t len, seq;
};

/* Everything a kernel is told. Arrays of a chunk are [chunk][head][rows][columns], dense. */
struct args {
    const void *q, *k, *v, *g, *d_o;
    const void *kb; /* [T, H, D] E: what erases, in place of beta k; NULL: beta k */
    const float *beta, *state0, *d_state;
    void *o, *dq, *dk, *dv; /* dq, dk [T, H, D], one for each head of v */
    void *dkb;              /* with kb, of which dk is then free */
    float *dg, *dbeta, *state, *d_state0;
    unsigned char *image;  /* of each chunk: what a step of the scans reads (struct image) */
    void *U;               /* [D / VS][C][LV] E; becomes V_new where backward needs it */
    void *T;               /* [C, C] E, or NULL */
    void *S, *dS, *dV;     /* [D, D] E state before, gradient of the state after; [C, D] f32 */
    const chunk_at *table; /* NULL: every sequence has seq_len tokens */
    const int *first;      /* [N + 1] first chunk of each sequence, with table */
    int64_t seq_len;
    int per_seq, H; /* chunks of a sequence without table */
    int HQ, G;      /* heads of q and k; heads of v that share one */
    float scale;
    /* Segments of a sequence, when there are several: the affine map [D, 2 D] of each, S_ext beside M, what
     * each adds to the gradient of its first state, its first state and the gradient of its last [D, D]. */
    float *compose, *d_compose, *begin, *d_end;
    int segs, heads;         /* heads: of all sequences */
    int forward;             /* blocks of a scan that run forward */
    int stages, back_stages; /* buffers of a scan */
    bool g_bf16, resident;   /* resident: shared memory holds all operands of the gradient kernel */
};

/* The part of a chunk that all columns of the state share, as it lies in shared memory: padded rows, so
 * that one bulk copy brings it. The scan that makes no o needs the first part only. */
template <class E, int D> struct image {
    static constexpr int LD = D + 16 / (int)sizeof(E);
    static constexpr int tile = C * LD * (int)sizeof(E);
    static constexpr int Kr = tile, decay = 2 * tile, Qg = decay + D * 4, Aqk = Qg + tile;
    static constexpr int first = Qg, bytes = Aqk + C * LC * (int)sizeof(E);
};
template <class E, int D> constexpr int columns = D / VS *C *LV; /* elements of U of a chunk */

/* Element of q and k: [T, HQ, D]. */
template <int D> DEV int64_t key_at(const args &p, const chunk_at &c, int h)
{
    return (c.start * p.HQ + (p.G == 1 ? h : h / p.G)) * D;
}
DEV float beta_at(const args &p, const chunk_at &c, int h, int r)
{
    if (r >= c.len)
        return 0.f;
    return p.kb ? 1.f : p.beta[(c.start + r) * p.H + h];
}

DEV chunk_at find_chunk(const args &p, int c)
{
    if (p.table)
        return p.table[c];
    chunk_at r;
    r.seq = c / p.per_seq;
    const int64_t at = (int64_t)(c % p.per_seq) * C;
    r.start = r.seq * p.seq_len + at;
    r.len = (int)(p.seq_len - at < C ? p.seq_len - at : C);
    return r;
}

/* f(row, first of 16 bytes of columns) over a tile of w columns; each group of THREADS threads its own. */
template <class E, int THREADS, class F> DEV void each16(int rows, int w, const F &f)
{
    const int per = w / vec<E>::n, n = rows * per, tid = (int)threadIdx.x % THREADS;
#pragma unroll
    for (int i = 0; i < n; i += THREADS)
        if (n % THREADS == 0 || i + tid < n)
            f((i + tid) / per, (i + tid) % per * vec<E>::n);
}
/* Rows of w elements from global (row stride gs) to shared memory (row stride ls), asynchronously. */
template <class E, int THREADS>
DEV void fetch(E *to, int ls, const E *from, int gs, int rows, int w, int valid)
{
    each16<E, THREADS>(rows, w, [&](int r, int c) {
        copy_async(to + r * ls + c, from + (int64_t)(r < valid ? r : 0) * gs + c, r < valid);
    });
}
/* The way back, at once. */
template <class E, int THREADS>
DEV void flush(E *to, int gs, const E *from, int ls, int rows, int w)
{
    each16<E, THREADS>(rows, w, [&](int r, int c) {
        store16(to + (int64_t)r * gs + c, load16(from + r * ls + c));
    });
}

/* n rows of a column from row r0 on, of which the last that exists is `last` >= 0; zeros beyond. */
template <int N, class F>
DEV void column(float (&x)[N], const F *from, int stride, int r0, int last)
{
    if (r0 + N - 1 <= last) {
        from += (int64_t)r0 * stride;
#pragma unroll
        for (int r = 0; r < N; r++)
            x[r] = to_f(from[(int64_t)r * stride]);
        return;
    }
#pragma unroll
    for (int r = 0; r < N; r++)
        x[r] = to_f(from[(int64_t)(r0 + r < last ? r0 + r : last) * stride]);
#pragma unroll
    for (int r = 0; r < N; r++)
        x[r] = r0 + r <= last ? x[r] : 0.f;
}

/* G [C][ld] = inclusive cumulative sum of g over the chunk's tokens, log2 units. part: scratch of
 * THREADS floats. The caller synchronises afterwards. */
template <int D, int THREADS>
DEV void cumulate(const args &p, const chunk_at &c, int h, float *G, int ld, float *part)
{
    constexpr int P = THREADS / D, R = C / P;
    const int d = (int)threadIdx.x % D, r0 = (int)threadIdx.x / D * R;
    const int64_t at = (c.start * p.H + h) * D + d;
    float x[R], sum = 0;
    if (p.g_bf16)
        column(x, (const bf16 *)p.g + at, p.H * D, r0, c.len - 1);
    else
        column(x, (const float *)p.g + at, p.H * D, r0, c.len - 1);
#pragma unroll
    for (int r = 0; r < R; r++) {
        sum += x[r];
        x[r] = sum;
    }
    part[threadIdx.x] = sum;
    sync_block();
    float before = 0;
    for (int i = 0; i < (int)threadIdx.x / D; i++)
        before += part[i * D + d];
#pragma unroll
    for (int r = 0; r < R; r++)
        G[(r0 + r) * ld + d] = (before + x[r]) * LOG2E;
}

} // namespace kda

#endif
