/* Products: cuBLASLt or own tiles (gemm_tiles.cuh), dense and by expert.
 *
 * Dense: a block a tile of C. By expert, rows: a block finds its tile among the experts' rows by adding up
 * their tiles in shared memory, so the grid is what n rows need at most, ceil(n / tile) + E row tiles.
 * cuBLAS's grouped form wants the sizes on the host, which a step without synchronisation has not.
 * By expert, weights: a block a tile of one expert's gradient, k its rows.
 * Tiles of bf16 are multiplied by warpgroups where the card has them (gemm_wg.cuh), else by warps. */
#include "gemm_wg.cuh"

#include <new>
#include <stdio.h>

namespace kda
{
namespace
{

struct group_args {
    ckpt_cuda_product p; /* of one expert, without what the block finds */
    int64_t E, tiles_n, tiles;
    const int64_t *first;    /* NULL: p is the whole product */
    const void *const *each; /* w, or dw */
    bool weights;            /* dw: p.m, p.n are the sizes of every expert, its rows are k */
};

/* Of find_piece: experts, and the first row of a tile. */
struct expert_rows {
    static DEV int64_t rows(const group_args &g, int64_t i)
    {
        return g.first[i + 1] - g.first[i];
    }
    static DEV int64_t place(const group_args &g, int64_t i, int64_t n, int tile)
    {
        return g.first[i] + n * tile;
    }
};
DEV const void *plus(const void *p, ckpt_cuda_type t, int64_t elements)
{
    return (const char *)p + elements * (t == CKPT_CUDA_BF16 ? 2 : 4);
}
/* This block's product and tile; false when it has none. The same in all its threads. */
DEV bool find(const group_args &g, int tile, int columns, int64_t *s, ckpt_cuda_product *p,
              int64_t *m0, int64_t *n0)
{
    *p = g.p;
    *n0 = (int64_t)blockIdx.x % g.tiles_n * columns;
    *m0 = (int64_t)blockIdx.x / g.tiles_n * tile;
    if (!g.first)
        return true;
    if (g.weights) {
        const int64_t i = (int64_t)blockIdx.x / g.tiles, at = (int64_t)blockIdx.x % g.tiles;
        *n0 = at % g.tiles_n * columns;
        *m0 = at / g.tiles_n * tile;
        p->k = g.first[i + 1] - g.first[i];
        p->a = plus(p->a, p->a_type, g.first[i] * p->lda);
        p->b = plus(p->b, p->b_type, g.first[i] * p->ldb);
        p->c = (void *)g.each[i];
        return p->c && p->k > 0;
    }
    int64_t row;
    const int64_t i = find_piece<THREADS, expert_rows>(g, g.E, *m0 / tile, tile, s, &row);
    if (i < 0)
        return false;
    p->m = g.first[i + 1] - row;
    p->a = plus(p->a, p->a_type, row * p->lda);
    p->c = (void *)plus(p->c, p->c_type, row * p->ldc);
    p->b = g.each[i];
    *m0 = 0;
    return true;
}

template <int N> KERNEL(N, 2) plain_products(group_args g)
{
    SHARED_MEMORY(memory);
    ckpt_cuda_product p;
    int64_t m0, n0;
    if (find(g, PT, PT, (int64_t *)memory, &p, &m0, &n0))
        plain_tile(p, m0, n0, (float *)memory);
}
template <bool TA, bool TB, class EC> KERNEL(THREADS, 2) mma_products(group_args g)
{
    SHARED_MEMORY(memory);
    ckpt_cuda_product p;
    int64_t m0, n0;
    if (find(g, MM, MM, (int64_t *)memory, &p, &m0, &n0))
        mma_tile<TA, TB, EC>(p, m0, n0, (bf16 *)memory);
}
template <bool TA, bool TB, class EC, int N> KERNEL(THREADS, 1) wg_products(group_args g)
{
#ifdef CKPT_CUDA_HAS_WGMMA
    SHARED_MEMORY(memory);
    ckpt_cuda_product p;
    int64_t m0, n0;
    if (find(g, wg_product<N>::rows, N, (int64_t *)memory, &p, &m0, &n0))
        wg_tile<TA, TB, EC, N>(p, m0, n0, (bf16 *)align_panels(memory));
#endif
}

/* c [m, n] = or += bias, for a library that does not take it. */
template <class E> KERNEL(THREADS, 1) fill_bias(ckpt_cuda_product p)
{
    for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
        E *c = (E *)p.c + (int64_t)blockIdx.x * p.ldc + i;
        *c = cast<E>((p.add ? to_f(*c) : 0.f) + p.bias[i]);
    }
}
/* Partial sums of columns over a piece of the rows: a thread a column. */
template <class E>
KERNEL(THREADS, 1)
row_sums(const E *x, int64_t rows, int64_t n, int64_t ld, int64_t piece, int64_t bands, float *out)
{
    const int64_t part = blockIdx.x / bands, lo = part * piece;
    const int64_t col = ((int64_t)blockIdx.x % bands) * THREADS + threadIdx.x;
    const int64_t hi = lo + piece < rows ? lo + piece : rows;
    float sum = 0;
    if (col >= n)
        return;
    for (int64_t r = lo; r < hi; r++)
        sum += to_f(x[r * ld + col]);
    out[part * n + col] = sum;
}

/* ---- choosing ------------------------------------------------------------------------------- */

bool aligned(const void *p, int64_t ld)
{
    return (uintptr_t)p % 16 == 0 && ld % 8 == 0;
}
/* Forms of mma_tile and wg_tile: x w^T, dy w, dy^T x. */
bool has_mma(const ckpt_cuda_product *p)
{
    const int64_t a = p->ta ? p->m : p->k, b = p->tb ? p->k : p->n;
    return p->a_type == CKPT_CUDA_BF16 && p->b_type == CKPT_CUDA_BF16 && !(p->ta && p->tb) &&
           p->c_type == (p->ta ? CKPT_CUDA_F32 : CKPT_CUDA_BF16) && aligned(p->a, p->lda) &&
           aligned(p->b, p->ldb) && (uintptr_t)p->c % 8 == 0 && p->ldc % 2 == 0 && p->n % 2 == 0 &&
           a % 8 == 0 && b % 8 == 0;
}

template <class K>
ckpt_status start_tiles(K *kernel, int bytes, const ckpt_cuda *c, int64_t blocks,
                        const group_args &g, ckpt_err *err)
{
    const ckpt_status status = shared_fits("a product", kernel, bytes, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH(kernel, blocks, THREADS, bytes, stream_of(c->stream), g);
    return launched("a product", err);
}
/* columns: of a tile by warpgroups, 0: by warps. */
template <bool TA, bool TB, class EC>
ckpt_status start_form(int columns, const ckpt_cuda *c, int64_t blocks, const group_args &g,
                       ckpt_err *err)
{
    if (columns == 256)
        return start_tiles(wg_products<TA, TB, EC, 256>, wg_product<256>::bytes, c, blocks, g, err);
    if (columns == 128)
        return start_tiles(wg_products<TA, TB, EC, 128>, wg_product<128>::bytes, c, blocks, g, err);
    return start_tiles(mma_products<TA, TB, EC>, MMA_BYTES, c, blocks, g, err);
}
/* Row tiles that n rows of all experts need at most, or of one product. */
int64_t row_tiles(const group_args &g, int tile, int64_t n)
{
    if (g.first && !g.weights)
        return tiles_of(n, g.E, tile);
    return ceil_div(g.p.m, tile);
}
ckpt_status start_own(const ckpt_cuda *c, group_args g, int64_t n, ckpt_err *err)
{
    const bool mma = has_mma(&g.p);
    const int columns = !mma || !c->gemm || !c->gemm->groups ? 0 : g.p.n > 128 ? 256 : 128;
    const int tile = mma ? MM : PT;
    static_assert(MM == wg_product<256>::rows, "one count of row tiles");
    g.tiles_n = ceil_div(g.p.n, columns ? columns : tile);
    const int64_t rows = row_tiles(g, tile, n);
    if (rows > INT32_MAX || g.tiles_n > INT32_MAX)
        return grid_fits("a product", INT64_MAX, err);
    g.tiles = rows * g.tiles_n;
    const int64_t blocks = g.tiles * (g.weights ? g.E : 1);
    const ckpt_status status = grid_fits("a product", blocks, err);
    if (status != CKPT_OK || blocks == 0)
        return status;
    if (mma && g.p.ta)
        return start_form<true, false, float>(columns, c, blocks, g, err);
    if (mma && g.p.tb)
        return start_form<false, true, bf16>(columns, c, blocks, g, err);
    if (mma)
        return start_form<false, false, bf16>(columns, c, blocks, g, err);
    return start_tiles(plain_products<THREADS>, PLAIN_BYTES, c, blocks, g, err);
}

#ifdef CKPT_CUDA_EMULATE
void plain_group(const group_args &g)
{
    for (int64_t i = 0; i < g.E; i++) {
        const int64_t lo = g.first[i], n = g.first[i + 1] - lo;
        ckpt_cuda_product p = g.p;
        p.a = plus(p.a, p.a_type, lo * p.lda);
        (g.weights ? p.k : p.m) = n;
        if (g.weights) {
            p.b = plus(p.b, p.b_type, lo * p.ldb);
            p.c = (void *)g.each[i];
        } else {
            p.b = g.each[i];
            p.c = (void *)plus(p.c, p.c_type, lo * p.ldc);
        }
        if (p.c && n > 0)
            plain_loops(&p);
    }
}
bool plain(const ckpt_cuda *c)
{
    return !c->gemm || c->gemm->kind == CKPT_CUDA_PRODUCTS_PLAIN;
}
#endif

ckpt_status check(const ckpt_cuda_product *p, ckpt_err *err)
{
    const int64_t a = p->ta ? p->m : p->k, b = p->tb ? p->k : p->n;
    if (p->m < 0 || p->n < 0 || p->k < 0 || p->lda < a || p->ldb < b || p->ldc < p->n)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "a product on CUDA: %lld x %lld x %lld with strides %lld, %lld and %lld",
                         (long long)p->m, (long long)p->n, (long long)p->k, (long long)p->lda,
                         (long long)p->ldb, (long long)p->ldc);
    const ckpt_cuda_type types[] = {p->a_type, p->b_type, p->c_type};
    for (ckpt_cuda_type t : types)
        if (t != CKPT_CUDA_F32 && t != CKPT_CUDA_BF16)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "a product on CUDA: type %d, which has f32 and bf16", (int)t);
    return CKPT_OK;
}

/* By the library, as asked or with the bias beforehand. *done is false when it has neither; p is then
 * what is left to do. */
ckpt_status try_library(const ckpt_cuda *c, ckpt_cuda_product *p, bool *done, ckpt_err *err)
{
    ckpt_cuda_lt *lt = c->gemm->lt;
    bool able = false;
    *done = false;
    if (p->a_type != p->b_type)
        return CKPT_OK;
    ckpt_status status = lt_plan(lt, p, &able, err);
    if (status == CKPT_OK && able)
        status = lt_run(lt, p, stream_of(c->stream), done, err);
    if (status != CKPT_OK || *done || !p->bias)
        return status;
    ckpt_cuda_product bare = *p;
    bare.bias = NULL;
    bare.add = true;
    status = lt_plan(lt, &bare, &able, err);
    if (status != CKPT_OK || !able)
        return status;
    if (p->c_type == CKPT_CUDA_BF16)
        LAUNCH(fill_bias<bf16>, p->m, THREADS, 0, stream_of(c->stream), *p);
    else
        LAUNCH(fill_bias<float>, p->m, THREADS, 0, stream_of(c->stream), *p);
    status = launched("bias", err);
    if (status != CKPT_OK)
        return status;
    *p = bare;
    return lt_run(lt, p, stream_of(c->stream), done, err);
}

} // namespace

#ifdef CKPT_CUDA_EMULATE
void plain_loops(const ckpt_cuda_product *p)
{
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            float sum = 0;
            for (int64_t k = 0; k < p->k; k++)
                sum += element(p->a, p->a_type, p->ta ? k * p->lda + i : i * p->lda + k) *
                       element(p->b, p->b_type, p->tb ? j * p->ldb + k : k * p->ldb + j);
            sum += p->bias ? p->bias[j] : 0.f;
            const int64_t at = i * p->ldc + j;
            put_element(p->c, p->c_type, at, sum + (p->add ? element(p->c, p->c_type, at) : 0.f));
        }
}
#endif

} // namespace kda

using namespace kda;

ckpt_status ckpt_cuda_gemm_open(ckpt_cuda_gemm **to, ckpt_cuda_products kind, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *to = NULL;
    if (kind != CKPT_CUDA_PRODUCTS_BEST && kind != CKPT_CUDA_PRODUCTS_OWN &&
        kind != CKPT_CUDA_PRODUCTS_WARP && kind != CKPT_CUDA_PRODUCTS_PLAIN &&
        kind != CKPT_CUDA_PRODUCTS_RULES)
        return ckpt_fail(err, CKPT_E_USAGE, "products on CUDA: kind %d", (int)kind);
#ifdef CKPT_CUDA_EMULATE
    if (kind == CKPT_CUDA_PRODUCTS_BEST)
        kind = CKPT_CUDA_PRODUCTS_PLAIN;
#else
    if (kind == CKPT_CUDA_PRODUCTS_PLAIN || kind == CKPT_CUDA_PRODUCTS_RULES)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "products on CUDA: loops are the emulator's");
#endif
    ckpt_cuda_gemm *g = new (std::nothrow) ckpt_cuda_gemm();
    if (!g)
        return ckpt_fail(err, CKPT_E_NOMEM, "products on CUDA: no memory");
    g->kind = kind;
    if (kind == CKPT_CUDA_PRODUCTS_BEST || kind == CKPT_CUDA_PRODUCTS_RULES)
        status = lt_open(&g->lt, g->name, sizeof g->name, err);
    g->groups = kind != CKPT_CUDA_PRODUCTS_WARP && has_warpgroups();
    if (!g->lt) {
        g->kind = kind == CKPT_CUDA_PRODUCTS_PLAIN ? kind : CKPT_CUDA_PRODUCTS_OWN;
        (void)snprintf(g->name, sizeof g->name, "%s",
                       g->kind == CKPT_CUDA_PRODUCTS_PLAIN ? "plain loops"
                       : g->groups                         ? "own kernels, by warpgroups"
                                                           : "own kernels");
    }
    if (status == CKPT_OK)
        *to = g;
    else
        delete g;
    return status;
}
void ckpt_cuda_gemm_close(ckpt_cuda_gemm *g)
{
    if (g)
        lt_close(g->lt);
    delete g;
}
const char *ckpt_cuda_gemm_name(const ckpt_cuda_gemm *g)
{
    return g->name;
}

ckpt_status ckpt_cuda_matmul(const ckpt_cuda *c, const ckpt_cuda_product *p, ckpt_err *err)
{
    bool done = false;
    ckpt_status status = check(p, err);
    if (status != CKPT_OK || p->m == 0 || p->n == 0)
        return status;
#ifdef CKPT_CUDA_EMULATE
    if (plain(c)) {
        const ckpt_cuda_product own = *p;
        emu::perform([=] { plain_loops(&own); });
        return CKPT_OK;
    }
#endif
    group_args g = {};
    g.p = *p;
    if (c->gemm && c->gemm->lt && p->k > 0)
        status = try_library(c, &g.p, &done, err);
    if (status != CKPT_OK || done)
        return status;
    return start_own(c, g, p->m, err);
}

ckpt_status ckpt_cuda_linear(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                             const void *x, int64_t ldx, const void *w, const float *bias, bool add,
                             void *y, int64_t ldy, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.tb = true, p.add = add, p.m = T, p.n = n_out, p.k = n_in;
    p.a = x, p.lda = ldx, p.b = w, p.ldb = n_in, p.bias = bias, p.c = y, p.ldc = ldy;
    p.a_type = p.b_type = p.c_type = c->type;
    return ckpt_cuda_matmul(c, &p, err);
}
ckpt_status ckpt_cuda_linear_dx(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                                const void *dy, int64_t lddy, const void *w, bool add, void *dx,
                                int64_t lddx, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.add = add, p.m = T, p.n = n_in, p.k = n_out;
    p.a = dy, p.lda = lddy, p.b = w, p.ldb = n_in, p.c = dx, p.ldc = lddx;
    p.a_type = p.b_type = p.c_type = c->type;
    return ckpt_cuda_matmul(c, &p, err);
}
ckpt_status ckpt_cuda_linear_dw(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                                const void *dy, int64_t lddy, const void *x, int64_t ldx, float *dw,
                                float *dbias, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.ta = p.add = true, p.m = n_out, p.n = n_in, p.k = T;
    p.a = dy, p.lda = lddy, p.b = x, p.ldb = ldx, p.c = dw, p.ldc = n_in;
    p.a_type = p.b_type = c->type;
    ckpt_status status = ready("linear backward", c, dbias ? n_out : 0, err);
    if (status == CKPT_OK)
        status = check(&p, err);
    if (status == CKPT_OK && dw && T > 0)
        status = ckpt_cuda_matmul(c, &p, err);
    if (status != CKPT_OK || !dbias || T == 0 || n_out == 0)
        return status;
    const device_stream stream = stream_of(c->stream);
    const int64_t piece = piece_of(T, 16), parts = ceil_div(T, piece);
    const int64_t bands = ceil_div(n_out, THREADS);
    float *partial = (float *)c->work;
    status = grid_fits("linear backward", parts * bands, err);
    if (status != CKPT_OK)
        return status;
    LAUNCH_OF(c, row_sums, parts * bands, THREADS, 0, (const T_ *)dy, T, n_out, lddy, piece, bands,
              partial);
    status = launched("linear backward", err);
    return status == CKPT_OK ? sum_columns(stream, partial, parts, n_out, n_out, true, dbias, err)
                             : status;
}

/* ---- by expert ------------------------------------------------------------------------------ */

static ckpt_status experts(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                           ckpt_cuda_product p, const void *const *each, bool weights,
                           ckpt_err *err)
{
    group_args g = {};
    g.p = p, g.E = E, g.first = first, g.each = each, g.weights = weights;
    g.p.a_type = g.p.b_type = c->type;
    g.p.c_type = weights ? CKPT_CUDA_F32 : c->type;
    ckpt_status status = check(&g.p, err);
    if (status == CKPT_OK && (E < 1 || n < 0))
        status = ckpt_fail(err, CKPT_E_USAGE, "experts on CUDA: %lld rows of %lld experts",
                           (long long)n, (long long)E);
    if (status != CKPT_OK || n == 0 || p.n == 0 || (weights && p.m == 0))
        return status;
#ifdef CKPT_CUDA_EMULATE
    if (plain(c)) {
        emu::perform([=] { plain_group(g); });
        return CKPT_OK;
    }
#endif
    return start_own(c, g, n, err);
}

ckpt_status ckpt_cuda_experts(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                              int64_t n_in, int64_t n_out, const void *x, const void *const *w,
                              bool add, void *y, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.tb = true, p.add = add, p.m = n, p.n = n_out, p.k = n_in;
    p.a = x, p.lda = n_in, p.ldb = n_in, p.c = y, p.ldc = n_out;
    return experts(c, E, n, first, p, w, false, err);
}
ckpt_status ckpt_cuda_experts_dx(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                                 int64_t n_in, int64_t n_out, const void *dy, const void *const *w,
                                 bool add, void *dx, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.add = add, p.m = n, p.n = n_in, p.k = n_out;
    p.a = dy, p.lda = n_out, p.ldb = n_in, p.c = dx, p.ldc = n_in;
    return experts(c, E, n, first, p, w, false, err);
}
ckpt_status ckpt_cuda_experts_dw(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                                 int64_t n_in, int64_t n_out, const void *dy, const void *x,
                                 float *const *dw, ckpt_err *err)
{
    ckpt_cuda_product p = {};
    p.ta = p.add = true, p.m = n_out, p.n = n_in;
    p.a = dy, p.lda = n_out, p.b = x, p.ldb = n_in, p.ldc = n_in;
    return experts(c, E, n, first, p, (const void *const *)dw, true, err);
}
