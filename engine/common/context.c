/* Context: the arena of one plan, threads, packed sequences (engine.h). */
#include "engine.h"

#include "arena.h"
#include "checked.h"
#include "device.h"

#include <stdlib.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define ALIGN 64

/* Those this process may use. */
static int processors(void)
{
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 && n < 1 << 16 ? (int)n : 1;
#endif
}

void ckpt_eng_init(ckpt_eng *e, int threads)
{
    *e = (ckpt_eng){.dry = true, .isa = ckpt_eng_detect()};
    e->threads = threads > 0 ? threads : processors();
}

ckpt_status ckpt_eng_reserve(ckpt_eng *e, size_t bytes, ckpt_err *err)
{
    ckpt_eng_memory_free(e, e->base);
    e->base = NULL;
    e->cap = 0;
    if (bytes > SIZE_MAX - 2 * ALIGN)
        return ckpt_fail(err, CKPT_E_NOMEM, "engine: cannot allocate %zu bytes", bytes);
    size_t size = (bytes + ALIGN) / ALIGN * ALIGN;
    void *base = NULL;
    if (e->device != NULL) {
        ckpt_status status = e->device->api->alloc(size, &base, err);
        if (status != CKPT_OK)
            return status;
    } else if ((base = aligned_alloc(ALIGN, size)) == NULL) {
        return ckpt_fail(err, CKPT_E_NOMEM, "engine: cannot allocate %zu bytes", bytes);
    } else {
        ckpt_large_pages(base, size);
    }
    e->base = base;
    e->cap = size;
    e->used = e->peak = 0;
    e->dry = e->failed = false;
    return CKPT_OK;
}

void ckpt_eng_release(ckpt_eng *e)
{
    ckpt_eng_memory_free(e, e->base);
    *e = (ckpt_eng){.dry = true,
                    .threads = e->threads,
                    .isa = e->isa,
                    .par = e->par,
                    .device = e->device,
                    .graphs = e->graphs};
}

ckpt_eng_isa ckpt_eng_detect(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return v4 ? CKPT_ENG_V4 : v3 ? CKPT_ENG_V3 : CKPT_ENG_BASE;
#else
    return CKPT_ENG_BASE;
#endif
}

void *ckpt_eng_take(ckpt_eng *e, int64_t count, size_t size)
{
    size_t bytes, end;
    if (e->failed || count < 0 || !ckpt_mul_size((size_t)count, size, &bytes) ||
        bytes > SIZE_MAX / 2 || __builtin_add_overflow(e->used, bytes + ALIGN, &end)) {
        e->failed = true;
        return NULL;
    }
    end = end / ALIGN * ALIGN;
    if (!e->dry && end > e->cap) {
        e->failed = true;
        return NULL;
    }
    size_t start = e->used;
    e->used = end;
    if (end > e->peak)
        e->peak = end;
    /* A dry pointer is an address that nothing owns: arithmetic on it is harmless, use is a fault. */
    return e->dry ? (void *)(uintptr_t)(ALIGN + start) : (void *)(e->base + start);
}

ckpt_status ckpt_eng_check(const ckpt_eng *e, ckpt_err *err)
{
    if (!e->failed)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_NOMEM, "engine: the arena of %zu bytes is too small", e->cap);
}

size_t ckpt_eng_mark(const ckpt_eng *e)
{
    return e->used;
}

void ckpt_eng_drop(ckpt_eng *e, size_t mark)
{
    e->used = mark;
}

/* Flush subnormals to zero while an item runs: strong decays pass through that range, where x86 is a
 * hundred times slower, and values below 1e-38 are of no consequence next to rounding. */
static void run_item(ckpt_eng_fn fn, void *arg, int64_t item, int worker)
{
#if defined(__x86_64__)
    unsigned csr = _mm_getcsr();
    _mm_setcsr(csr | 0x8040); /* FTZ, DAZ */
    fn(arg, item, worker);
    _mm_setcsr(csr);
#else
    fn(arg, item, worker);
#endif
}

void ckpt_eng_parallel(const ckpt_eng *e, int64_t n, ckpt_eng_fn fn, void *arg)
{
    if (n <= 0)
        return;
#ifdef _OPENMP
    int threads = n < e->threads ? (int)n : e->threads;
    if (threads > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t i = 0; i < n; i++)
            run_item(fn, arg, i, omp_get_thread_num());
        return;
    }
#else
    (void)e;
#endif
    for (int64_t i = 0; i < n; i++)
        run_item(fn, arg, i, 0);
}

ckpt_status ckpt_eng_seq_check(const ckpt_eng_seq *seq, ckpt_err *err)
{
    if (seq->n < 0 || (seq->n > 0 && seq->cu[0] != 0))
        return ckpt_fail(err, CKPT_E_USAGE, "engine: sequence offsets do not start at 0");
    for (int64_t i = 0; i < seq->n; i++)
        if (seq->cu[i + 1] < seq->cu[i])
            return ckpt_fail(err, CKPT_E_USAGE,
                             "engine: offset %lld of sequence %lld is before its start %lld",
                             (long long)seq->cu[i + 1], (long long)i, (long long)seq->cu[i]);
    return CKPT_OK;
}
