/* Truncated singular value decomposition in double precision. */
#ifndef CKPT_SVD_H
#define CKPT_SVD_H

#include "err.h"

#include <stdint.h>

/* CKPT_E_UNSUPPORTED: OpenBLAS, which is loaded by the first call, is not there. */
ckpt_status ckpt_svd_ready(ckpt_err *err) CKPT_MUST_USE;

/* Bytes that ckpt_svd_factor needs besides its arguments; UINT64_MAX if the matrix is beyond LAPACK's
 * 32-bit sizes, or nothing is ready. */
uint64_t ckpt_svd_bytes(int64_t rows, int64_t cols);

/* W ~ B . A with balanced factors: W = U S V^T, A = sqrt(S) V^T, B = U sqrt(S), the `rank` largest
 * singular values kept (1 <= rank <= min(rows, cols)). Of every pair of singular vectors the largest
 * entry of U (the first of equals) is made positive, so that the result is a function of W alone;
 * calls run on one BLAS thread for the same reason.
 * w [rows, cols] is destroyed; a [rank, cols], b [rows, rank], all row-major. *tail: the relative
 * Frobenius error of the truncation itself, sqrt(sum of the squares left out / sum of all).
 * Errors: CKPT_E_UNSUPPORTED no OpenBLAS, W is not finite, too large, or LAPACK does not converge; CKPT_E_NOMEM.
 * Source: LAPACK dgesdd; Eckart-Young. */
ckpt_status ckpt_svd_factor(double *w, int64_t rows, int64_t cols, int64_t rank, double *a,
                            double *b, double *tail, ckpt_err *err) CKPT_MUST_USE;

/* sqrt(sum((W - B . A)^2) / sum(W^2)), 0 for W = 0; w is overwritten with the difference. */
double ckpt_svd_error(double *w, int64_t rows, int64_t cols, int64_t rank, const double *a,
                      const double *b);

/* Between these, BLAS uses one thread in every thread of the process. Returns what to give back. */
int ckpt_svd_begin(void);
void ckpt_svd_end(int before);

#endif
