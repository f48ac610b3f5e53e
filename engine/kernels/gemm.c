/* Matrix product on one thread: C = alpha op(A) op(B) + beta C.
 *
 * Own code rather than BLAS for two reasons: the sum in an element has one order whatever surrounds it,
 * and the instruction set is chosen by us (OpenBLAS 0.3.21 takes recent Xeons for a Pentium 4 and is
 * four times slower there).
 *
 * An element is the sum over blocks of kc of k, in order, of C = beta C + alpha s, where s sums a block
 * in order by fused multiply-adds (where the instruction set has them) and beta is 1 after the first
 * block. Nothing else of what follows touches a sum.
 *
 * Blocks of kc x nc of B and mc x kc of A are packed into panels of NR columns and MR rows (pack.h). A
 * register tile of MR x NR walks one panel of each: that of B stays in the first-level cache while the
 * panels of A pass by. What lies in rows as it is needed may be read in place.
 * Fewer than MR rows have register tiles of their own; where columns are missing, a
 * whole tile is computed from zeros in the panel and merged into C. */
#include "kernels.h"
#include "pack.h"

#define NR (2 * VL)
#if VB == 64
#define MR 12
#define GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define MR 6
#define GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif

/* A register tile: k numbers of A in columns at distance lda, of B in rows at distance ldb. */
typedef struct tile {
    int64_t k, lda, ldb, ldc;
    const real *a, *b;
    real alpha, beta;
    real *c;
} tile;

/* alpha s is rounded before it is added, so that whole tiles and those at the edge agree; compilers differ
 * in which of two products they fuse with a sum. */
K_INLINE vec times(vec s, real alpha)
{
    s *= alpha;
#if defined(__x86_64__)
    __asm__("" : "+v"(s));
#endif
    return s;
}

/* c [rows, NR] = beta c + alpha (panel of A) (panel of B). */
K_INLINE void micro(const tile *t, const int rows, const int64_t lda, const int64_t ldb)
{
    const int64_t ldc = t->ldc;
    const real *a = t->a, *b = t->b;
    real *c = t->c;
#define START(r) vec x##r = {0}, y##r = {0};
    GEMM_ROWS(START)
#define STEP(r)                                                                                    \
    if (r < rows) {                                                                                \
        x##r += b0 * at[r];                                                                        \
        y##r += b1 * at[r];                                                                        \
    }
#define NUMBER(p)                                                                                  \
    {                                                                                              \
        const real *at = a + (p)*lda;                                                              \
        const vec b0 = load_any(b + (p)*ldb), b1 = load_any(b + (p)*ldb + VL);                     \
        GEMM_ROWS(STEP)                                                                            \
    }
    int64_t p = 0;
    for (int r = 0; r < rows && p + 4 <= t->k; r++, p += 4, a += 4 * lda, b += 4 * ldb) {
        __builtin_prefetch(c + r * ldc, 1); /* a row at a time: few misses can be under way */
        __builtin_prefetch(c + r * ldc + NR - 1, 1);
        NUMBER(0)
        NUMBER(1)
        NUMBER(2)
        NUMBER(3)
    }
    for (; p + 4 <= t->k; p += 4, a += 4 * lda, b += 4 * ldb) {
        NUMBER(0)
        NUMBER(1)
        NUMBER(2)
        NUMBER(3)
    }
    for (; p < t->k; p++, a += lda, b += ldb)
        NUMBER(0)
    const real alpha = t->alpha, beta = t->beta;
    if (beta == 0) { /* C may hold anything */
#define STORE(r)                                                                                   \
    if (r < rows) {                                                                                \
        store_any(c + r * ldc, times(x##r, alpha));                                                \
        store_any(c + r * ldc + VL, times(y##r, alpha));                                           \
    }
        GEMM_ROWS(STORE)
    } else {
#define ADD(r)                                                                                     \
    if (r < rows) {                                                                                \
        store_any(c + r * ldc, load_any(c + r * ldc) * beta + times(x##r, alpha));                 \
        store_any(c + r * ldc + VL, load_any(c + r * ldc + VL) * beta + times(y##r, alpha));       \
    }
        GEMM_ROWS(ADD)
    }
}

#define MICRO(r)                                                                                   \
    static void micro##r(const tile *t)                                                            \
    {                                                                                              \
        if (r + 1 == MR && t->lda == MR && t->ldb == NR) /* both packed: constant distances */     \
            micro(t, r + 1, MR, NR);                                                               \
        else                                                                                       \
            micro(t, r + 1, t->lda, t->ldb);                                                       \
    }
GEMM_ROWS(MICRO)
#define ENTRY(r) micro##r,
static void (*const micro_of[MR])(const tile *t) = {GEMM_ROWS(ENTRY)};

/* Columns are missing: computed whole beside C, then the part that exists is merged. */
static void micro_edge(const tile *whole, int64_t rows, int64_t cols)
{
    _Alignas(64) real beside[MR * NR];
    tile t = *whole;
    t.beta = 0;
    t.c = beside;
    t.ldc = NR;
    micro_of[rows - 1](&t);
    for (int64_t r = 0; r < rows; r++) {
        real *c = whole->c + r * whole->ldc;
        const real *from = beside + r * NR;
        if (whole->beta == 0)
            for (int64_t s = 0; s < cols; s++)
                c[s] = from[s];
        else
            for (int64_t s = 0; s < cols; s++)
                c[s] = c[s] * whole->beta + from[s];
    }
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* One block of A and B: panels, and where in C they go. */
typedef struct block {
    const ENG(gemm_task) * t;
    int64_t i, j, p, m, n, k;
    real *pa, *pb;
    bool there_a, there_b; /* panels without missing lines are read in place */
} block;

/* Rows i .. i+m-1 as panels of MR rows: out[panel][k][MR]. */
static void pack_a(const block *b)
{
    const ENG(gemm_task) *t = b->t;
    const real *a = t->ta ? t->a + b->p * t->lda + b->i : t->a + b->i * t->lda + b->p;
    pack_panels(t->ta, !b->there_a, a, t->lda, b->m, b->k, MR, b->pa);
}

/* Columns j .. j+n-1 as panels of NR columns: out[panel][k][NR]. */
static void pack_b(const block *b)
{
    const ENG(gemm_task) *t = b->t;
    const real *from = t->tb ? t->b + b->j * t->ldb + b->p : t->b + b->p * t->ldb + b->j;
    pack_panels(!t->tb, !b->there_b, from, t->ldb, b->n, b->k, NR, b->pb);
}

static void run_block(const block *b)
{
    const ENG(gemm_task) *t = b->t;
    tile u = {.k = b->k, .ldc = t->ldc, .alpha = t->alpha, .beta = b->p == 0 ? t->beta : 1};
    for (int64_t j = 0; j < b->n; j += NR) {
        const int64_t cols = min64(NR, b->n - j);
        const bool in_place_b = b->there_b && cols == NR;
        u.b = in_place_b ? t->b + b->p * t->ldb + b->j + j : b->pb + j * b->k;
        u.ldb = in_place_b ? t->ldb : NR;
        for (int64_t i = 0; i < b->m; i += MR) {
            const int64_t rows = min64(MR, b->m - i);
            const bool in_place_a = b->there_a && rows == MR;
            u.a = in_place_a ? t->a + b->p * t->lda + b->i + i : b->pa + i * b->k;
            u.lda = in_place_a ? t->lda : MR;
            u.c = t->c + (b->i + i) * t->ldc + b->j + j;
            if (cols == NR)
                micro_of[rows - 1](&u);
            else
                micro_edge(&u, rows, cols);
        }
    }
}

/* Rows of an operand that are read in place: because they are near each other, or because each panel
 * is read at most twice. */
#define NEAR 131072 /* bytes */

static bool in_place(int64_t ld, int64_t k, int64_t other, int64_t width)
{
    return other <= 2 * width || ld * k <= NEAR / (int64_t)sizeof(real);
}

void ENGK(gemm)(const ENG(gemm_task) * t, real *scratch)
{
    const int64_t k = min64(t->kc, t->k);
    block b = {.t = t, .pa = scratch, .pb = scratch + (t->mc + MR) * t->kc / 16 * 16 + 16};
    b.there_a = t->ta && in_place(t->lda, k, t->n, NR);
    b.there_b = !t->tb && in_place(t->ldb, k, t->m, MR);
    for (b.j = 0; b.j < t->n; b.j += t->nc) {
        b.n = min64(t->nc, t->n - b.j);
        for (b.p = 0; b.p < t->k; b.p += t->kc) {
            b.k = min64(t->kc, t->k - b.p);
            pack_b(&b);
            for (b.i = 0; b.i < t->m; b.i += t->mc) {
                b.m = min64(t->mc, t->m - b.i);
                pack_a(&b);
                run_block(&b);
            }
        }
    }
}
