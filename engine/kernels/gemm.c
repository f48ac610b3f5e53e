/* Matrix product on one thread: C = alpha op(A) op(B) + beta C.
 *
 * Own code rather than BLAS for two reasons: the sum in an element has one order whatever surrounds it,
 * and the instruction set is chosen by us (OpenBLAS 0.3.21 takes recent Xeons for a Pentium 4 and is
 * four times slower there). Blocks of kc x nc of B and mc x kc of A are packed into panels of NR columns
 * and MR rows; a register tile of MR x NR sums over kc in order, and blocks of kc are added to C in
 * order. Edges are padded with zeros in the panels and computed in a full tile beside C. */
#include "kernels.h"
#include "vec.h"

#include <string.h>

#define NR (2 * VL)
#if VB == 64
#define MR 12
#define GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define MR 6
#define GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif

typedef real vec_any __attribute__((vector_size(VB), aligned(CKPT_REAL / 8)));

K_INLINE vec load_any(const real *p)
{
    return *(const vec_any *)(const void *)p;
}

K_INLINE void store_any(real *p, vec v)
{
    *(vec_any *)(void *)p = v;
}

/* c [MR, NR] (stride ldc) = beta c + alpha (panel of A) (panel of B). */
static void micro(int64_t k, const real *a, const real *b, real alpha, real beta, real *c,
                  int64_t ldc)
{
#define START(r) vec x##r = {0}, y##r = {0};
    GEMM_ROWS(START)
    for (int64_t p = 0; p < k; p++, a += MR, b += NR) {
        const vec b0 = v_load(b), b1 = v_load(b + VL);
#define STEP(r)                                                                                    \
    x##r += b0 * a[r];                                                                             \
    y##r += b1 * a[r];
        GEMM_ROWS(STEP)
    }
    if (beta == 0) { /* C may hold anything */
#define STORE(r)                                                                                   \
    store_any(c + r * ldc, x##r * alpha);                                                          \
    store_any(c + r * ldc + VL, y##r * alpha);
        GEMM_ROWS(STORE)
    } else {
#define ADD(r)                                                                                     \
    store_any(c + r * ldc, load_any(c + r * ldc) * beta + x##r * alpha);                           \
    store_any(c + r * ldc + VL, load_any(c + r * ldc + VL) * beta + y##r * alpha);
        GEMM_ROWS(ADD)
    }
}

/* A panel of `width` (MR or NR, of which `have` exist) lines of length k. The lines lie one after the
 * other in memory, or side by side. */
K_INLINE void pack_lines(const real *x, int64_t ld, int64_t k, int64_t width, int64_t have,
                         real *out)
{
    int64_t q = 0;
    for (; q + 16 <= k; q += 16) /* a cache line of each, so that what is written stays near */
        for (int64_t r = 0; r < have; r++)
            for (int64_t i = 0; i < 16; i++)
                out[(q + i) * width + r] = x[r * ld + q + i];
    for (; q < k; q++)
        for (int64_t r = 0; r < have; r++)
            out[q * width + r] = x[r * ld + q];
}

K_INLINE void pack_side(const real *x, int64_t ld, int64_t k, int64_t width, int64_t have,
                        real *out)
{
    for (int64_t q = 0; q < k; q++, x += ld, out += width)
        for (int64_t r = 0; r < have; r++)
            out[r] = x[r];
}

K_INLINE void pack_panel(bool side, const real *x, int64_t ld, int64_t k, const int64_t width,
                         int64_t have, real *out)
{
    if (have < width)
        memset(out, 0, sizeof(real) * (size_t)(k * width));
    if (side && have == width)
        pack_side(x, ld, k, width, width, out); /* a constant number: vector moves */
    else if (side)
        pack_side(x, ld, k, width, have, out);
    else
        pack_lines(x, ld, k, width, have, out);
}

/* Rows i .. i+m-1, columns p .. p+k-1 of op(A) as panels of MR rows: out[panel][k][MR]. */
static void pack_a(const ENG(gemm_task) * t, int64_t i, int64_t m, int64_t p, int64_t k, real *out)
{
    for (int64_t r = 0; r < m; r += MR, out += k * MR)
        pack_panel(t->ta, t->ta ? t->a + p * t->lda + i + r : t->a + (i + r) * t->lda + p, t->lda,
                   k, MR, m - r < MR ? m - r : MR, out);
}

/* Rows p .. p+k-1, columns j .. j+n-1 of op(B) as panels of NR columns: out[panel][k][NR]. */
static void pack_b(const ENG(gemm_task) * t, int64_t p, int64_t k, int64_t j, int64_t n, real *out)
{
    for (int64_t c = 0; c < n; c += NR, out += k * NR)
        pack_panel(!t->tb, t->tb ? t->b + (j + c) * t->ldb + p : t->b + p * t->ldb + j + c, t->ldb,
                   k, NR, n - c < NR ? n - c : NR, out);
}

/* A tile at the edge of C: computed whole, then the part that exists is merged. */
static void micro_edge(int64_t k, const real *a, const real *b, real alpha, real beta, real *c,
                       int64_t ldc, int64_t rows, int64_t cols)
{
    _Alignas(64) real tile[MR * NR];
    micro(k, a, b, alpha, 0, tile, NR);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = 0; s < cols; s++)
            c[r * ldc + s] = (beta == 0 ? 0 : beta * c[r * ldc + s]) + tile[r * NR + s];
}

static void block(const ENG(gemm_task) * t, int64_t m, int64_t n, int64_t k, const real *a,
                  const real *b, real beta, real *c)
{
    for (int64_t j = 0; j < n; j += NR, b += k * NR)
        for (int64_t i = 0; i < m; i += MR) {
            const int64_t rows = m - i < MR ? m - i : MR, cols = n - j < NR ? n - j : NR;
            real *at = c + i * t->ldc + j;
            if (rows == MR && cols == NR)
                micro(k, a + i * k, b, t->alpha, beta, at, t->ldc);
            else
                micro_edge(k, a + i * k, b, t->alpha, beta, at, t->ldc, rows, cols);
        }
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void ENGK(gemm)(const ENG(gemm_task) * t, real *scratch)
{
    real *pa = scratch, *pb = scratch + (t->mc + MR) * t->kc / 16 * 16 + 16;
    for (int64_t j = 0; j < t->n; j += t->nc) {
        const int64_t n = min64(t->nc, t->n - j);
        for (int64_t p = 0; p < t->k; p += t->kc) {
            const int64_t k = min64(t->kc, t->k - p);
            pack_b(t, p, k, j, n, pb);
            for (int64_t i = 0; i < t->m; i += t->mc) {
                const int64_t m = min64(t->mc, t->m - i);
                pack_a(t, i, m, p, k, pa);
                block(t, m, n, k, pa, pb, p == 0 ? t->beta : 1, t->c + i * t->ldc + j);
            }
        }
    }
}
