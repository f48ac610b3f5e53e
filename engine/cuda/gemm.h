/* Matrix products on a CUDA device: projections and their gradients, twins of ops.h's linear, and the
 * same for the rows of experts. Conventions (types, alignment, stream, errors) are those of ops.h: E is
 * the type of the context.
 *
 * Products of equal types run in cuBLASLt when the context has a ckpt_cuda_gemm that found it: the first
 * algorithm its heuristics name for a shape, kept for later calls, with a fixed workspace, and partial
 * sums of a split product in f32 in that workspace, in order. f32 products are f32 throughout, no TF32.
 * Other products, what the library has no algorithm for, and all without cuBLASLt, run in kernels of gemm.cu with the same sums in f32.
 *
 * Determinism: no atomics; equal calls on equal cards with one version of cuBLASLt give equal bits.
 * After the first call of a shape nothing is allocated, so later ones can be captured into a graph.
 * A ckpt_cuda_gemm is for one thread at a time, and one stream at a time: its workspace is one. */
#ifndef CKPT_CUDA_GEMM_H
#define CKPT_CUDA_GEMM_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

typedef enum ckpt_cuda_products {
    CKPT_CUDA_PRODUCTS_BEST, /* cuBLASLt if the library is there, else the kernels of gemm.cu */
    CKPT_CUDA_PRODUCTS_OWN,  /* those kernels; bf16 by wgmma on sm_90, */
    CKPT_CUDA_PRODUCTS_WARP, /* by mma.sync on any card */
    CKPT_CUDA_PRODUCTS_PLAIN, /* three loops on the CPU; the emulator's BEST, unsupported elsewhere */
    CKPT_CUDA_PRODUCTS_RULES /* the emulator's alone: BEST with those loops for the library */
} ckpt_cuda_products;

/* What products keep between calls: the library, its algorithms, its workspace on the device.
 * Errors: CKPT_E_UNSUPPORTED for what this build has not, CKPT_E_IO when the library or the card
 * fails, CKPT_E_NOMEM. */
ckpt_status ckpt_cuda_gemm_open(ckpt_cuda_gemm **g, ckpt_cuda_products kind,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_cuda_gemm_close(ckpt_cuda_gemm *g); /* NULL is allowed */
/* "cuBLASLt 130100", "own kernels", "plain loops": for reports. */
const char *ckpt_cuda_gemm_name(const ckpt_cuda_gemm *g);

/* C [m, n] = or += op(A) op(B) + bias. op(A) is A [m, k], or the transpose of A [k, m] with ta; op(B) is
 * B [k, n], or the transpose of B [n, k] with tb. ld* are row strides in elements of what is stored.
 * bias [n] f32 or NULL: added in f32 where the library can, else rounded to C's type first. */
typedef struct ckpt_cuda_product {
    bool ta, tb, add;
    int64_t m, n, k, lda, ldb, ldc;
    ckpt_cuda_type a_type, b_type, c_type;
    const void *a, *b;
    const float *bias;
    void *c;
} ckpt_cuda_product;

/* Mixed types are allowed. k = 0 gives zeros, C itself with add, and the bias. */
ckpt_status ckpt_cuda_matmul(const ckpt_cuda *c, const ckpt_cuda_product *p,
                             ckpt_err *err) CKPT_MUST_USE;

/* y [T, n_out] = or += x [T, n_in] w^T + bias. x, y, w [n_out, n_in] E; bias [n_out] or NULL. */
ckpt_status ckpt_cuda_linear(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                             const void *x, int64_t ldx, const void *w, const float *bias, bool add,
                             void *y, int64_t ldy, ckpt_err *err) CKPT_MUST_USE;
/* dx [T, n_in] = or += dy w. */
ckpt_status ckpt_cuda_linear_dx(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                                const void *dy, int64_t lddy, const void *w, bool add, void *dx,
                                int64_t lddx, ckpt_err *err) CKPT_MUST_USE;
/* dw [n_out, n_in] f32 or NULL += dy^T x; dbias [n_out] or NULL += sum of dy over tokens. work: n_out
 * columns with dbias. */
ckpt_status ckpt_cuda_linear_dw(const ckpt_cuda *c, int64_t T, int64_t n_in, int64_t n_out,
                                const void *dy, int64_t lddy, const void *x, int64_t ldx, float *dw,
                                float *dbias, ckpt_err *err) CKPT_MUST_USE;

/* ---- rows of experts ------------------------------------------------------------------------ */

/* n rows in expert order, as ckpt_cuda_order gives them: those of expert i are first[i] ..
 * first[i + 1] - 1. first and the arrays of E pointers w, dw are on the device, so no size is waited
 * for: the grid is as large as any distribution of n rows needs, and blocks without work leave.
 * Rows beyond first[E] are neither read nor written.
 *
 * y [n, n_out] = or += x [n, n_in] w_i^T of the row's expert, w_i [n_out, n_in] E. */
ckpt_status ckpt_cuda_experts(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                              int64_t n_in, int64_t n_out, const void *x, const void *const *w,
                              bool add, void *y, ckpt_err *err) CKPT_MUST_USE;
/* dx [n, n_in] = or += dy w_i. */
ckpt_status ckpt_cuda_experts_dx(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                                 int64_t n_in, int64_t n_out, const void *dy, const void *const *w,
                                 bool add, void *dx, ckpt_err *err) CKPT_MUST_USE;
/* dw_i [n_out, n_in] f32 += dy^T x over the expert's rows; a NULL dw_i is left out. */
ckpt_status ckpt_cuda_experts_dw(const ckpt_cuda *c, int64_t E, int64_t n, const int64_t *first,
                                 int64_t n_in, int64_t n_out, const void *dy, const void *x,
                                 float *const *dw, ckpt_err *err) CKPT_MUST_USE;

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
