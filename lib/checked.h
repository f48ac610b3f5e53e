/* Overflow-checked arithmetic. Every function returns false when the exact result does not fit;
 * the output is then unspecified. Any product or sum involving file data goes through these. */
#ifndef CKPT_CHECKED_H
#define CKPT_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool ckpt_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool ckpt_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool ckpt_add_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool ckpt_mul_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool ckpt_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* Product of rank non-negative dims, as elements. A zero anywhere gives 0 even if the rest
 * overflows only after it in left-to-right order, as the safetensors reference does. */
static inline bool ckpt_numel(int rank, const int64_t *dims, int64_t *out)
{
    int64_t n = 1;
    for (int i = 0; i < rank; i++)
        if (dims[i] < 0 || !ckpt_mul_i64(n, dims[i], &n))
            return false;
    *out = n;
    return true;
}

static inline uint64_t ckpt_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t ckpt_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline int64_t ckpt_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t ckpt_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
