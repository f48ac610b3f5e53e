/* OpenBLAS is loaded when the first decomposition is wanted: what needs none neither waits for it nor
 * fails where it cannot start its threads. */
#include "svd.h"
#include "checked.h"

#include <cblas.h>
#include <dlfcn.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define LIBRARY "libopenblas.so.0"

/* LAPACK's own Fortran interface, which OpenBLAS holds: no further library. */
typedef void dgesdd_fn(const char *jobz, const int *m, const int *n, double *a, const int *lda,
                       double *s, double *u, const int *ldu, double *vt, const int *ldvt,
                       double *work, const int *lwork, int *iwork, int *info, size_t jobz_len);
typedef void dgemm_fn(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb,
                      blasint m, blasint n, blasint k, double alpha, const double *a, blasint lda,
                      const double *b, blasint ldb, double beta, double *c, blasint ldc);

static struct {
    pthread_once_t once;
    bool loaded;
    char why[200]; /* if not */
    dgesdd_fn *dgesdd;
    dgemm_fn *dgemm;
    int (*get_threads)(void);
    void (*set_threads)(int);
} blas = {.once = PTHREAD_ONCE_INIT};

/* ISO C has no cast from an object's address to a function's. */
static bool find(void *library, const char *name, void *function)
{
    void *at = dlsym(library, name);
    memcpy(function, &at, sizeof at);
    return at != NULL;
}

/* OpenBLAS asks for a buffer of 128 MiB a thread, over and over until it has it: where address space is limited
 * it must be there before. */
static bool has_room(void)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t mib = (size_t)1 << 20, need = ((size_t)(cores > 0 ? cores : 1) + 1) * 128 + 64;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return true;
    void *probe =
        mmap(NULL, need * mib, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (probe == MAP_FAILED) {
        snprintf(blas.why, sizeof blas.why,
                 "its buffers take %zu MiB of address space, and the limit (ulimit -v) leaves less",
                 need);
        return false;
    }
    (void)munmap(probe, need * mib);
    return true;
}

static void load(void)
{
    if (!has_room())
        return;
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    blas.loaded = library != NULL && find(library, "dgesdd_", &blas.dgesdd) &&
                  find(library, "cblas_dgemm", &blas.dgemm) &&
                  find(library, "openblas_get_num_threads", &blas.get_threads) &&
                  find(library, "openblas_set_num_threads", &blas.set_threads);
    const char *why = blas.loaded ? NULL : dlerror();
    for (size_t i = 0; why != NULL && why[i] != '\0' && i < sizeof blas.why - 1; i++)
        blas.why[i] = why[i] == '\n' ? ' ' : why[i];
}

static bool loaded(void)
{
    pthread_once(&blas.once, load);
    return blas.loaded;
}

ckpt_status ckpt_svd_ready(ckpt_err *err)
{
    if (loaded())
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "a singular value decomposition needs OpenBLAS: %s",
                     blas.why);
}

typedef struct sizes {
    int m, n, k;                /* of the column-major matrix W^T [cols, rows]; min(m, n) */
    size_t u, vt, s, work, all; /* doubles */
    size_t iwork;               /* ints */
} sizes;

static bool plan_sizes(int64_t rows, int64_t cols, sizes *z)
{
    double best = 0, none = 0;
    int info = 0, query = -1, dummy = 0;
    if (rows < 1 || cols < 1 || rows > INT_MAX / 16 || cols > INT_MAX / 16 || !loaded())
        return false;
    *z = (sizes){.m = (int)cols, .n = (int)rows, .k = (int)ckpt_min_i64(rows, cols)};
    blas.dgesdd("S", &z->m, &z->n, &none, &z->m, &none, &none, &z->m, &none, &z->k, &best, &query,
                &dummy, &info, 1);
    if (info != 0 || !(best >= 1) || best > INT_MAX)
        return false;
    size_t k = (size_t)z->k;
    z->work = (size_t)best;
    z->s = k;
    z->iwork = 8 * k;
    if (!ckpt_mul_size((size_t)z->m, k, &z->u) || !ckpt_mul_size(k, (size_t)z->n, &z->vt))
        return false;
    z->all = z->u + z->vt + z->s + z->work;
    return z->all < SIZE_MAX / 32;
}

uint64_t ckpt_svd_bytes(int64_t rows, int64_t cols)
{
    sizes z;
    return plan_sizes(rows, cols, &z) ? 8 * (uint64_t)z.all + 4 * (uint64_t)z.iwork : UINT64_MAX;
}

int ckpt_svd_begin(void)
{
    if (!loaded())
        return 0;
    int before = blas.get_threads();
    blas.set_threads(1);
    return before;
}

void ckpt_svd_end(int before)
{
    if (loaded())
        blas.set_threads(before);
}

static bool all_finite(const double *w, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(w[i]))
            return false;
    return true;
}

/* Sign of the entry of largest magnitude of the left vector `at`, one entry every `step`. */
static double sign_of(const double *at, int n, int step)
{
    double best = 0;
    for (int i = 0; i < n; i++)
        if (fabs(at[(size_t)i * (size_t)step]) > fabs(best))
            best = at[(size_t)i * (size_t)step];
    return best < 0 ? -1 : 1;
}

/* dgesdd decomposed W^T = u s vt, column-major: W's left vectors are the rows of vt [k, rows], its
 * right vectors the columns of u [cols, k]. */
static void balance(const sizes *z, const double *u, const double *s, const double *vt,
                    int64_t rank, double *a, double *b)
{
    for (int64_t r = 0; r < rank; r++) {
        double sign = sign_of(vt + r, z->n, z->k), root = sqrt(s[r]) * sign;
        for (int64_t c = 0; c < z->m; c++)
            a[r * z->m + c] = root * u[r * z->m + c];
        for (int64_t i = 0; i < z->n; i++)
            b[i * rank + r] = root * vt[i * z->k + r];
    }
}

static double norm2(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

ckpt_status ckpt_svd_factor(double *w, int64_t rows, int64_t cols, int64_t rank, double *a,
                            double *b, double *tail, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    sizes z;
    int info = 0;
    double *block = NULL;
    int *iwork = NULL, lwork;
    if (rank < 1 || rank > ckpt_min_i64(rows, cols))
        return ckpt_fail(err, CKPT_E_USAGE, "rank %lld of a matrix [%lld, %lld]", (long long)rank,
                         (long long)rows, (long long)cols);
    CKPT_CHECK(ckpt_svd_ready(err));
    if (!plan_sizes(rows, cols, &z))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "matrix [%lld, %lld] is too large for an SVD",
                         (long long)rows, (long long)cols);
    if (!all_finite(w, (size_t)(rows * cols)))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "has no SVD: it holds NaN or infinity");
    block = malloc(z.all * sizeof *block);
    iwork = malloc(z.iwork * sizeof *iwork);
    lwork = (int)z.work;
    if (block == NULL || iwork == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for the SVD of [%lld, %lld]",
                           (long long)rows, (long long)cols);
        goto done;
    }
    double *u = block, *vt = u + z.u, *s = vt + z.vt, *work = s + z.s;
    blas.dgesdd("S", &z.m, &z.n, w, &z.m, s, u, &z.m, vt, &z.k, work, &lwork, iwork, &info, 1);
    if (info != 0) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "SVD did not converge (dgesdd %d)", info);
        goto done;
    }
    balance(&z, u, s, vt, rank, a, b);
    double all = norm2(s, z.s);
    *tail = all > 0 ? sqrt(norm2(s + rank, z.s - (size_t)rank) / all) : 0;
done:
    free(block);
    free(iwork);
    return status;
}

double ckpt_svd_error(double *w, int64_t rows, int64_t cols, int64_t rank, const double *a,
                      const double *b)
{
    size_t n = (size_t)(rows * cols);
    double whole = norm2(w, n);
    if (whole == 0 || !loaded()) /* not so after a factorisation */
        return 0;
    blas.dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, (blasint)cols,
               (blasint)rank, -1, b, (blasint)rank, a, (blasint)cols, 1, w, (blasint)cols);
    return sqrt(norm2(w, n) / whole);
}
