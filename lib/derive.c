#include "derive.h"
#include "checked.h"
#include "derive_packed.h"
#include "factor.h"
#include "gather.h"

#include <stdlib.h>
#include <string.h>

ckpt_status ckpt_derive_fold(const ckpt_model *model, const ckpt_canon *a, const ckpt_canon *b,
                             const char *name, ckpt_arena *arena, ckpt_derived **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (a->rank != 2 || b->rank != 2 || a->dims[0] != b->dims[1] || a->dtype != b->dtype ||
        !ckpt_dtype_castable(a->dtype, CKPT_F64))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' and '%s' do not multiply", b->name,
                         a->name);
    ckpt_derived *d = ckpt_arena_alloc(arena, sizeof *d);
    int64_t *dims = ckpt_arena_array(arena, 4, sizeof *dims); /* dims, then zeros for lo */
    if (d == NULL || dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    d->rows = dims[0] = b->dims[0];
    d->cols = dims[1] = a->dims[1];
    d->inner = a->dims[0];
    d->chunk = (ckpt_chunk){.lo = dims + 2, .len = dims, .file = CKPT_DERIVED_FILE};
    d->tensor = (ckpt_tensor){.name = name,
                              .dims = dims,
                              .chunks = &d->chunk,
                              .n_chunks = 1,
                              .dtype = a->dtype,
                              .rank = 2};
    CKPT_CHECK(ckpt_gather_canon(model->src, a, arena, &d->a, err));
    CKPT_CHECK(ckpt_gather_canon(model->src, b, arena, &d->b, err));
    d->a.to = d->b.to = CKPT_F64;
    *out = d;
done:
    return status;
}

/* sum[c] = sum over k of b[k] * a[k, c], ascending k. */
static void fold_row(const double *b, const double *a, int64_t inner, int64_t cols, double *sum)
{
    memset(sum, 0, (size_t)cols * sizeof *sum);
    for (int64_t k = 0; k < inner; k++)
        for (int64_t c = 0; c < cols; c++)
            sum[c] += b[k] * a[k * cols + c];
}

static ckpt_status read_fold(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                             uint64_t offset, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t elem = (size_t)ckpt_dtype_get(d->tensor.dtype)->bits / 8;
    size_t row_bytes = (size_t)d->cols * elem, n_a = 0;
    uint8_t *out = buf;
    ckpt_scratch scratch = {.cap = 256 * 1024};
    if (!ckpt_mul_size((size_t)(d->inner * d->cols), sizeof(double), &n_a))
        return ckpt_fail(err, CKPT_E_NOMEM, "'%s' is too large to fold", d->tensor.name);
    double *a = malloc(n_a + 1), *b = malloc((size_t)d->inner * sizeof *b + 1);
    double *sum = malloc((size_t)d->cols * sizeof *sum + 1);
    uint8_t *row = malloc(row_bytes + 1);
    scratch.buf = malloc(scratch.cap);
    if (a == NULL || b == NULL || sum == NULL || row == NULL || scratch.buf == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory folding '%s'", d->tensor.name);
        goto done;
    }
    CKPT_CHECK(ckpt_gather_run(src, &d->a, 0, n_a, (uint8_t *)a, &scratch, err));
    while (n > 0) {
        uint64_t r = offset / row_bytes, skip = offset % row_bytes;
        size_t take = (size_t)ckpt_min_u64(row_bytes - skip, n);
        size_t b_bytes = (size_t)d->inner * sizeof *b;
        CKPT_CHECK(ckpt_gather_run(src, &d->b, r * b_bytes, b_bytes, (uint8_t *)b, &scratch, err));
        fold_row(b, a, d->inner, d->cols, sum);
        ckpt_dtype_cast(d->tensor.dtype, row, CKPT_F64, sum, (size_t)d->cols);
        memcpy(out, row + skip, take);
        out += take;
        offset += take;
        n -= take;
    }
done:
    free(a);
    free(b);
    free(sum);
    free(row);
    free(scratch.buf);
    return status;
}

/* ---- block-quantised weights ------------------------------------------------------------------- */

static int64_t blocks_of(int64_t extent)
{
    return extent / CKPT_FP8_BLOCK + (extent % CKPT_FP8_BLOCK != 0);
}

static ckpt_status check_blocks(const ckpt_tensor *w, const ckpt_tensor *s, ckpt_err *err)
{
    if (w->dtype != CKPT_F8_E4M3 || w->rank != 2)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s': %s of %d dimensions, expected F8_E4M3 of 2", w->name,
                         ckpt_dtype_get(w->dtype)->name, w->rank);
    if (s->dtype != CKPT_F32 || s->rank != 2)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %s of %d dimensions, expected F32 of 2",
                         s->name, ckpt_dtype_get(s->dtype)->name, s->rank);
    if (s->dims[0] != blocks_of(w->dims[0]) || s->dims[1] != blocks_of(w->dims[1]))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s': [%lld, %lld], expected [%lld, %lld]: blocks of 128 x 128 of "
                         "'%s' [%lld, %lld]",
                         s->name, (long long)s->dims[0], (long long)s->dims[1],
                         (long long)blocks_of(w->dims[0]), (long long)blocks_of(w->dims[1]),
                         w->name, (long long)w->dims[0], (long long)w->dims[1]);
    return CKPT_OK;
}

ckpt_status ckpt_gather_stored(const ckpt_source *src, const ckpt_tensor *t, ckpt_arena *arena,
                               ckpt_gather *out, ckpt_err *err)
{
    ckpt_axis axis[CKPT_MAX_RANK];
    ckpt_canon c = {
        .name = t->name,
        .dims = t->dims,
        .rank = t->rank,
        .dtype = t->dtype,
        .stored = (uint32_t)(t - src->tensors),
        .map = {axis, t->rank}
    };
    int64_t numel;
    for (int d = 0; d < t->rank; d++)
        axis[d] = (ckpt_axis){.size = t->dims[d], .len = t->dims[d], .dim = d};
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &c.bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': size overflows", t->name);
    return ckpt_gather_canon(src, &c, arena, out, err);
}

ckpt_status ckpt_derive_blocks(const ckpt_source *src, uint32_t weight, uint32_t scale,
                               ckpt_arena *arena, ckpt_derived **out, ckpt_err *err)
{
    const ckpt_tensor *w = &src->tensors[weight];
    ckpt_status status;
    CKPT_CHECK(check_blocks(w, &src->tensors[scale], err));
    ckpt_derived *d = ckpt_arena_alloc(arena, sizeof *d);
    int64_t *lo = ckpt_arena_array(arena, 2, sizeof *lo);
    if (d == NULL || lo == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    d->kind = CKPT_DERIVE_BLOCKS;
    d->rows = w->dims[0];
    d->cols = w->dims[1];
    d->chunk = (ckpt_chunk){.lo = lo, .len = w->dims, .file = CKPT_DERIVED_FILE};
    d->tensor = (ckpt_tensor){.name = w->name,
                              .dims = w->dims,
                              .chunks = &d->chunk,
                              .n_chunks = 1,
                              .dtype = CKPT_BF16,
                              .rank = 2};
    CKPT_CHECK(ckpt_gather_stored(src, &src->tensors[scale], arena, &d->a, err));
    CKPT_CHECK(ckpt_gather_stored(src, w, arena, &d->b, err));
    *out = d;
done:
    return status;
}

/* Multiply elements [at, at+n) (row-major) by the scales of their blocks; scale starts at the row of
 * blocks `band`. */
static void scale_values(const ckpt_derived *d, const float *scale, int64_t band, uint64_t at,
                         float *value, size_t n)
{
    const uint64_t cols = (uint64_t)d->cols;
    const uint64_t across = (uint64_t)blocks_of(d->cols);
    while (n > 0) {
        uint64_t r = at / cols, c = at % cols;
        uint64_t end = ckpt_min_u64(cols, (c / CKPT_FP8_BLOCK + 1) * CKPT_FP8_BLOCK);
        size_t take = (size_t)ckpt_min_u64(end - c, n);
        float s = scale[(r / CKPT_FP8_BLOCK - (uint64_t)band) * across + c / CKPT_FP8_BLOCK];
        for (size_t i = 0; i < take; i++)
            value[i] *= s;
        value += take;
        at += take;
        n -= take;
    }
}

enum { STEP = 32768 }; /* elements at a time */

/* Elements [at, at+n) as BF16; work holds STEP F8 values and STEP floats. */
static ckpt_status dequantise(ckpt_source *src, const ckpt_derived *d, const float *scale,
                              int64_t band, uint64_t at, size_t n, uint8_t *out, float *work,
                              ckpt_scratch *scratch, ckpt_err *err)
{
    uint8_t *raw = (uint8_t *)(work + STEP);
    while (n > 0) {
        size_t take = n < STEP ? n : STEP;
        ckpt_status status = ckpt_gather_run(src, &d->b, at, take, raw, scratch, err);
        if (status != CKPT_OK)
            return status;
        ckpt_dtype_cast(CKPT_F32, work, CKPT_F8_E4M3, raw, take);
        scale_values(d, scale, band, at, work, take);
        ckpt_dtype_cast(CKPT_BF16, out, CKPT_F32, work, take);
        out += 2 * take;
        at += take;
        n -= take;
    }
    return CKPT_OK;
}

/* Offsets need not be element-aligned: the first and last element are cut out of whole ones. */
static ckpt_status read_blocks(ckpt_source *src, const ckpt_derived *d, uint8_t *out, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_scratch scratch = {.cap = 64 * 1024};
    uint64_t first = offset / 2, last = (offset + n - 1) / 2;
    int64_t band = (int64_t)(first / (uint64_t)d->cols) / CKPT_FP8_BLOCK;
    int64_t bands = (int64_t)(last / (uint64_t)d->cols) / CKPT_FP8_BLOCK - band + 1;
    size_t row = (size_t)blocks_of(d->cols) * sizeof(float), all;
    uint8_t edge[2];
    if (!ckpt_mul_size(row, (size_t)bands, &all))
        return ckpt_fail(err, CKPT_E_NOMEM, "'%s' is too large to scale", d->tensor.name);
    float *scale = malloc(all), *work = malloc(STEP * (sizeof(float) + 1));
    scratch.buf = malloc(scratch.cap);
    if (scale == NULL || work == NULL || scratch.buf == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory scaling '%s'", d->tensor.name);
        goto done;
    }
    CKPT_CHECK(
        ckpt_gather_run(src, &d->a, (uint64_t)band * row, all, (uint8_t *)scale, &scratch, err));
    if (offset % 2 != 0) {
        CKPT_CHECK(dequantise(src, d, scale, band, first++, 1, edge, work, &scratch, err));
        *out++ = edge[1];
        n--;
    }
    CKPT_CHECK(dequantise(src, d, scale, band, first, n / 2, out, work, &scratch, err));
    if (n % 2 != 0) {
        CKPT_CHECK(dequantise(src, d, scale, band, last, 1, edge, work, &scratch, err));
        out[n - 1] = edge[0];
    }
done:
    free(scale);
    free(work);
    free(scratch.buf);
    return status;
}

ckpt_status ckpt_derived_read(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err)
{
    if (n == 0)
        return CKPT_OK;
    switch (d->kind) {
    case CKPT_DERIVE_FOLD:
        return read_fold(src, d, buf, n, offset, err);
    case CKPT_DERIVE_BLOCKS:
        return read_blocks(src, d, buf, n, offset, err);
    case CKPT_DERIVE_NVFP4:
    case CKPT_DERIVE_MXFP8:
        return ckpt_packed_read(src, d, buf, n, offset, err);
    case CKPT_DERIVE_FACTOR:
        return ckpt_factor_read(d, buf, n, offset, err);
    }
    return ckpt_fail(err, CKPT_E_INTERNAL, "'%s' is derived in an unknown way", d->tensor.name);
}
