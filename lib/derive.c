#include "derive.h"
#include "checked.h"
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

ckpt_status ckpt_derived_read(ckpt_source *src, const ckpt_derived *d, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t elem = (size_t)ckpt_dtype_get(d->tensor.dtype)->bits / 8;
    size_t row_bytes = (size_t)d->cols * elem, n_a = 0;
    uint8_t *out = buf;
    ckpt_scratch scratch = {.cap = 256 * 1024};
    if (d->factor != NULL)
        return ckpt_factor_read(d, buf, n, offset, err);
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
