/* Central differences of fourth order against the backward of an operation or block, f64: an operation
 * with its arrays, and the check. Define CKPT_REAL 64 before the include. */
#ifndef CKPT_TEST_ENGINE_SCENE_H
#define CKPT_TEST_ENGINE_SCENE_H

#include "engine_test.h"

#define STEP 1e-3
#define LIMIT                                                                                      \
    1e-8 /* error of the difference: STEP^4 times a fifth derivative, and rounding / STEP */

typedef struct input {
    const char *name;
    real *x, *grad;
    int64_t n;
} input;

/* An operation with its arrays. forward computes out from the inputs; backward fills the inputs' grad
 * from d_out. extra: a second output (a state), with its gradient. */
typedef struct scene {
    int variant;
    input in[20];
    int n_in;
    real *out, *d_out, *extra, *d_extra;
    int64_t n_out, n_extra;
    void (*forward)(struct scene *);
    void (*backward)(struct scene *);
} scene;

static inline real *add_input(scene *s, const char *name, int64_t n, double lo, double hi)
{
    input *in = &s->in[s->n_in++];
    *in = (input){name, numbers(n, lo, hi), zeros(n), n};
    return in->x;
}

static inline void add_output(scene *s, int64_t n)
{
    s->out = zeros(n);
    s->d_out = numbers(n, -1, 1);
    s->n_out = n;
}

static inline double objective(scene *s)
{
    double sum = 0;
    s->forward(s);
    for (int64_t i = 0; i < s->n_out; i++)
        sum += s->out[i] * s->d_out[i];
    for (int64_t i = 0; i < s->n_extra; i++)
        sum += s->extra[i] * s->d_extra[i];
    return sum;
}

static inline void check_direction(scene *s, const input *in, const real *dir)
{
    static const double at[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
    real *base = copy_of(in->x, in->n);
    double fd = 0, an = 0, norm = 0, len = 0;
    for (int p = 0; p < 4; p++) {
        for (int64_t i = 0; i < in->n; i++)
            in->x[i] = base[i] + at[p] * STEP * dir[i];
        fd += weight[p] * objective(s) / (12 * STEP);
    }
    memcpy(in->x, base, sizeof(real) * (size_t)in->n);
    for (int64_t i = 0; i < in->n; i++) {
        an += in->grad[i] * dir[i];
        norm += in->grad[i] * in->grad[i];
        len += dir[i] * dir[i];
    }
    double size = fmax(fmax(fabs(fd), fabs(an)), sqrt(norm / (double)in->n) * sqrt(len));
    ck_assert_msg(norm > 0, "gradient of %s is zero", in->name);
    ck_assert_msg(fabs(fd - an) <= LIMIT * size, "%s: difference %.12g, backward %.12g", in->name,
                  fd, an);
}

static inline void check_scene(scene *s)
{
    s->forward(s);
    s->backward(s);
    for (int v = 0; v < s->n_in; v++) {
        const input *in = &s->in[v];
        check_direction(s, in, numbers(in->n, -1, 1));
        for (int k = 0; k < 4; k++) {
            real *one = zeros(in->n);
            one[(int64_t)number(0, (double)in->n)] = 1;
            check_direction(s, in, one);
        }
    }
}

#endif
