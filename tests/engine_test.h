/* Helpers of the engine suites: numbers, comparison, arrays from safetensors files. Everything is
 * allocated from one arena that the fixture frees. Define CKPT_REAL before the include. */
#ifndef CKPT_ENGINE_TEST_H
#define CKPT_ENGINE_TEST_H

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "blocks.h"
#include "source.h"

static ckpt_arena memory;
static ckpt_eng engine;
static ckpt_err error;
static uint64_t random_state;

static inline void set_up(void)
{
    memory = (ckpt_arena){0};
    random_state = 1;
    ckpt_eng_init(&engine, 2);
    ck_assert_int_eq(ckpt_eng_reserve(&engine, (size_t)64 << 20, &error), CKPT_OK);
}

static inline void tear_down(void)
{
    ckpt_eng_release(&engine);
    ckpt_arena_free(&memory);
}

#define OK(call) ck_assert_msg((call) == CKPT_OK, "%s", error.text)

static inline real *zeros(int64_t n)
{
    real *p = ckpt_arena_array(&memory, (size_t)(n > 0 ? n : 1), sizeof(real));
    ck_assert_ptr_nonnull(p);
    return p;
}

static inline real *copy_of(const real *x, int64_t n)
{
    return memcpy(zeros(n), x, sizeof(real) * (size_t)n);
}

/* Uniform in [lo, hi). */
static inline double number(double lo, double hi)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return lo + (hi - lo) * ((double)(random_state >> 11) / (double)(1ull << 53));
}

static inline real *numbers(int64_t n, double lo, double hi)
{
    real *p = zeros(n);
    for (int64_t i = 0; i < n; i++)
        p[i] = (real)number(lo, hi);
    return p;
}

/* RMS(x - ref) / RMS(ref); infinite when a number is not finite. */
static inline double distance(const real *x, const real *ref, int64_t n)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)x[i] - (double)ref[i];
        if (!isfinite(d))
            return INFINITY;
        diff += d * d;
        size += (double)ref[i] * (double)ref[i];
    }
    return diff == 0 ? 0 : sqrt(diff) / fmax(sqrt(size), 1e-300);
}

#define CLOSE(what, x, ref, n, limit)                                                              \
    do {                                                                                           \
        double far_ = distance(x, ref, n);                                                         \
        ck_assert_msg(far_ <= (limit), "%s: relative RMS %.3g above %.3g", what, far_,             \
                      (double)(limit));                                                            \
    } while (0)

static inline bool same_bits(const real *a, const real *b, int64_t n)
{
    return memcmp(a, b, sizeof(real) * (size_t)n) == 0;
}

/* ---- arrays of a file ----------------------------------------------------------------------- */

static ckpt_source golden;

static inline void golden_open(const char *path)
{
    OK(ckpt_source_open(&golden, path, NULL, &error));
}

/* A fixture of a suite whose arrays lie in that file, and its end. */
static inline void golden_set_up(const char *path)
{
    set_up();
    golden_open(path);
}

static inline void golden_tear_down(void)
{
    ckpt_source_close(&golden);
    tear_down();
}

/* Array CASE/GROUP/NAME as real, n elements. */
static inline real *golden_array(const char *name, int64_t n)
{
    int64_t at = ckpt_source_find(&golden, name);
    ck_assert_msg(at >= 0, "no array '%s'", name);
    const ckpt_tensor *t = &golden.tensors[at];
    int64_t count = 1;
    for (int i = 0; i < t->rank; i++)
        count *= t->dims[i];
    ck_assert_msg(count == n, "'%s' has %lld elements, not %lld", name, (long long)count,
                  (long long)n);
    uint64_t bytes;
    ck_assert(ckpt_dtype_bytes(t->dtype, count, &bytes));
    void *raw = ckpt_arena_alloc(&memory, bytes + 1);
    ck_assert_uint_eq(t->n_chunks, 1);
    OK(ckpt_source_read(&golden, t->chunks[0].file, raw, bytes, t->chunks[0].offset, &error));
    real *out = zeros(n);
    ckpt_dtype_cast(CKPT_REAL == 32 ? CKPT_F32 : CKPT_F64, out, t->dtype, raw, (size_t)n);
    return out;
}

static inline real *golden_of(const char *scene, const char *group, const char *name, int64_t n)
{
    return golden_array(ckpt_arena_printf(&memory, "%s/%s/%s", scene, group, name), n);
}

#endif
