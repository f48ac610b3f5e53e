/* Finite differences against a block's backward: arrays with their gradients, a loss, central
 * differences of fourth order in double. Include after defining CKPT_REAL 64. */
#ifndef CKPT_TEST_ENGINE_FD_H
#define CKPT_TEST_ENGINE_FD_H

#include "ops.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct fd_array {
    const char *name;
    real *x, *grad;
    int64_t n;
} fd_array;

typedef struct fd {
    fd_array a[40];
    int n;
    uint64_t seed;
} fd;

static inline real fd_uniform(fd *f)
{
    f->seed = f->seed * 6364136223846793005u + 1442695040888963407u;
    return (real)((int64_t)(f->seed >> 11)) / (real)(1ull << 52) - 1;
}

/* n random numbers in [-scale, scale], with a zeroed gradient beside them. */
static inline real *fd_add(fd *f, const char *name, int64_t n, double scale)
{
    fd_array *a = &f->a[f->n++];
    ck_assert_int_le(f->n, 40);
    *a = (fd_array){.name = name, .n = n};
    a->x = malloc(sizeof(real) * (size_t)(n + 1));
    a->grad = calloc((size_t)(n + 1), sizeof(real));
    for (int64_t i = 0; i < n; i++)
        a->x[i] = fd_uniform(f) * (real)scale;
    return a->x;
}

static inline real *fd_grad(const fd *f, const real *x)
{
    for (int i = 0; i < f->n; i++)
        if (f->a[i].x == x)
            return f->a[i].grad;
    return NULL;
}

static inline void fd_free(fd *f)
{
    for (int i = 0; i < f->n; i++) {
        free(f->a[i].x);
        free(f->a[i].grad);
    }
}

/* Compare up to `samples` elements of every array; loss(self) reads the arrays. */
static inline void fd_check(fd *f, double (*loss)(void *self), void *self, int samples, double tol)
{
    const double h = 1e-3;
    for (int i = 0; i < f->n; i++) {
        fd_array *a = &f->a[i];
        double top = 0;
        for (int64_t k = 0; k < a->n; k++)
            top = fmax(top, fabs((double)a->grad[k]));
        ck_assert_msg(a->n == 0 || top > 0, "%s: no gradient at all", a->name);
        int64_t step = a->n > samples ? a->n / samples : 1;
        for (int64_t k = 0; k < a->n; k += step) {
            real keep = a->x[k];
            double v[4];
            static const double at[4] = {-2, -1, 1, 2};
            for (int s = 0; s < 4; s++) {
                a->x[k] = keep + (real)(at[s] * h);
                v[s] = loss(self);
            }
            a->x[k] = keep;
            double want = (v[0] - 8 * v[1] + 8 * v[2] - v[3]) / (12 * h);
            ck_assert_msg(fabs(want - (double)a->grad[k]) <= tol * (top + 1e-3),
                          "%s[%lld]: gradient %.12g, differences say %.12g", a->name, (long long)k,
                          (double)a->grad[k], want);
        }
    }
}

#endif
