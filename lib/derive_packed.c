/* Weights in NVFP4 and MXFP8 as ModelOpt's Hugging Face export stores them, dequantised while they are
 * read (derive.h has types and shapes):
 *
 *   NVFP4  X.weight U8 [R, C/2], X.weight_scale F8_E4M3 [R, C/16], X.weight_scale_2 F32 []
 *   MXFP8  X.weight F8_E4M3 [R, C], X.weight_scale U8 or F8_E8M0 [R, C/32]
 *
 * X.input_scale, which ModelOpt adds for activations, stays what it is: a tensor of its own. */
#include "derive_packed.h"

#include "checked.h"
#include "codec.h"
#include "gather.h"

#include <stdlib.h>
#include <string.h>

#define WEIGHT ".weight"

/* ---- finding them ------------------------------------------------------------------------------ */

/* A tensor of the name with `suffix` behind it, or NULL. */
static const ckpt_tensor *beside(const ckpt_source *src, const char *name, const char *suffix,
                                 ckpt_arena *scratch)
{
    const char *full = ckpt_arena_printf(scratch, "%s%s", name, suffix);
    int64_t at = full != NULL ? ckpt_source_find(src, full) : -1;
    return at >= 0 ? &src->tensors[at] : NULL;
}

typedef struct triple {
    const ckpt_tensor *weight, *scale, *scale2;
    ckpt_derive_kind kind;
    int64_t block, cols;
} triple;

/* Which of the two a weight is by the types beside it; false: neither. */
static bool recognise(const ckpt_source *src, const ckpt_tensor *w, ckpt_arena *scratch,
                      triple *out)
{
    size_t n = strlen(w->name), m = sizeof WEIGHT - 1;
    if (w->rank != 2 || n <= m || strcmp(w->name + n - m, WEIGHT) != 0 ||
        (w->dtype != CKPT_U8 && w->dtype != CKPT_F8_E4M3))
        return false;
    *out = (triple){.weight = w, .scale = beside(src, w->name, "_scale", scratch)};
    if (out->scale == NULL)
        return false;
    if (w->dtype == CKPT_U8) {
        out->scale2 = beside(src, w->name, "_scale_2", scratch);
        out->kind = CKPT_DERIVE_NVFP4;
        out->block = CKPT_NVFP4_BLOCK;
        return out->scale->dtype == CKPT_F8_E4M3 && out->scale2 != NULL &&
               ckpt_mul_i64(w->dims[1], 2, &out->cols);
    }
    out->kind = CKPT_DERIVE_MXFP8;
    out->block = CKPT_MXFP8_BLOCK;
    out->cols = w->dims[1];
    return out->scale->dtype == CKPT_U8 || out->scale->dtype == CKPT_F8_E8M0;
}

static ckpt_status check(const triple *t, ckpt_err *err)
{
    const ckpt_tensor *s = t->scale, *g = t->scale2;
    int64_t numel = 0;
    if (t->cols % t->block != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s': %lld columns, expected a multiple of %lld", t->weight->name,
                         (long long)t->cols, (long long)t->block);
    if (s->rank != 2 || s->dims[0] != t->weight->dims[0] || s->dims[1] != t->cols / t->block)
        return ckpt_fail(
            err, CKPT_E_FORMAT,
            "tensor '%s': %d dimensions of [%lld, %lld], expected [%lld, %lld]: one scale "
            "for %lld columns of '%s'",
            s->name, s->rank, (long long)(s->rank > 0 ? s->dims[0] : 1),
            (long long)(s->rank > 1 ? s->dims[1] : 1), (long long)t->weight->dims[0],
            (long long)(t->cols / t->block), (long long)t->block, t->weight->name);
    if (g != NULL && (g->dtype != CKPT_F32 || !ckpt_numel(g->rank, g->dims, &numel) || numel != 1))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %s of %lld elements, expected F32 of 1",
                         g->name, ckpt_dtype_get(g->dtype)->name, (long long)numel);
    return CKPT_OK;
}

static ckpt_status make(ckpt_source *src, const triple *t, ckpt_derived **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &src->arena;
    ckpt_derived *d = ckpt_arena_alloc(arena, sizeof *d);
    int64_t *dims = ckpt_arena_array(arena, 4, sizeof *dims); /* dims, then zeros for lo */
    if (d == NULL || dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    d->kind = t->kind;
    d->rows = dims[0] = t->weight->dims[0];
    d->cols = dims[1] = t->cols;
    d->scale = t->scale->name;
    d->scale2 = t->scale2 != NULL ? t->scale2->name : NULL;
    d->chunk = (ckpt_chunk){.lo = dims + 2, .len = dims, .file = CKPT_DERIVED_FILE};
    d->tensor = (ckpt_tensor){.name = t->weight->name,
                              .dims = dims,
                              .chunks = &d->chunk,
                              .n_chunks = 1,
                              .dtype = CKPT_BF16,
                              .rank = 2};
    CKPT_CHECK(ckpt_gather_stored(src, t->scale, arena, &d->a, err));
    CKPT_CHECK(ckpt_gather_stored(src, t->weight, arena, &d->b, err));
    if (t->scale2 != NULL)
        CKPT_CHECK(ckpt_gather_stored(src, t->scale2, arena, &d->g, err));
    *out = d;
done:
    return status;
}

ckpt_status ckpt_derive_packed(ckpt_source *src, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    if (src->unpacked)
        return CKPT_OK;
    for (size_t i = 0; i < src->n_tensors; i++) {
        triple t;
        if (!recognise(src, &src->tensors[i], &scratch, &t))
            continue;
        CKPT_CHECK(check(&t, err));
        if (src->packed == NULL)
            src->packed = ckpt_arena_array(&src->arena, src->n_tensors, sizeof(ckpt_derived *));
        if (src->packed == NULL) {
            status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            goto done;
        }
        CKPT_CHECK(make(src, &t, &src->packed[src->n_packed], err));
        src->n_packed++;
    }
    for (size_t i = 0; i < src->n_packed;
         i++) { /* only now: all were looked at as they are stored */
        const ckpt_derived *d = src->packed[i];
        ckpt_tensor *w = &src->tensors[ckpt_source_find(src, d->tensor.name)];
        w->dims = d->tensor.dims;
        w->dtype = d->tensor.dtype;
    }
    src->unpacked = true;
done:
    if (status != CKPT_OK)
        src->n_packed = 0;
    ckpt_arena_free(&scratch);
    return status;
}

const ckpt_derived *ckpt_packed_find(const ckpt_source *src, const char *name)
{
    size_t lo = 0, hi = src->n_packed;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(src->packed[mid]->tensor.name, name);
        if (order == 0)
            return src->packed[mid];
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

/* ---- reading ----------------------------------------------------------------------------------- */

enum { STEP = 8192 }; /* elements at a time, whole blocks of both */

typedef struct work {
    float value[STEP];
    uint16_t rounded[STEP];
    uint8_t code[STEP], scale[STEP / CKPT_NVFP4_BLOCK];
} work;

/* Elements [at, at + n), whole blocks, into w->rounded. */
static ckpt_status dequantise(ckpt_source *src, const ckpt_derived *d, float global, uint64_t at,
                              size_t n, work *w, ckpt_scratch *scratch, ckpt_err *err)
{
    bool four = d->kind == CKPT_DERIVE_NVFP4;
    uint64_t block = four ? CKPT_NVFP4_BLOCK : CKPT_MXFP8_BLOCK;
    uint64_t an_byte = four ? 2 : 1;
    ckpt_status status;
    CKPT_CHECK(ckpt_gather_run(src, &d->b, at / an_byte, n / an_byte, w->code, scratch, err));
    CKPT_CHECK(ckpt_gather_run(src, &d->a, at / block, n / block, w->scale, scratch, err));
    for (size_t i = 0; i < n; i++) {
        uint8_t s = w->scale[i / block];
        if (four) {
            uint32_t code = w->code[i / 2] >> (i % 2 * 4) & 15u;
            float step = ckpt_codec_decode(CKPT_CODEC_E4M3, s) * global;
            w->value[i] = ckpt_codec_decode(CKPT_CODEC_E2M1, code) * step;
        } else {
            double v = (double)ckpt_codec_decode(CKPT_CODEC_E4M3, w->code[i]);
            w->value[i] = (float)(v * ckpt_e8m0_decode(s));
        }
    }
    ckpt_dtype_cast(CKPT_BF16, w->rounded, CKPT_F32, w->value, n);
done:
    return status;
}

ckpt_status ckpt_packed_read(ckpt_source *src, const ckpt_derived *d, uint8_t *out, size_t n,
                             uint64_t offset, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_scratch scratch = {.cap = 16 * 1024};
    uint64_t total = (uint64_t)d->rows * (uint64_t)d->cols;
    uint64_t block = d->kind == CKPT_DERIVE_NVFP4 ? CKPT_NVFP4_BLOCK : CKPT_MXFP8_BLOCK;
    float global = 1;
    work *w = malloc(sizeof *w);
    scratch.buf = malloc(scratch.cap);
    if (w == NULL || scratch.buf == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory scaling '%s'", d->tensor.name);
        goto done;
    }
    if (d->kind == CKPT_DERIVE_NVFP4)
        CKPT_CHECK(
            ckpt_gather_run(src, &d->g, 0, sizeof global, (uint8_t *)&global, &scratch, err));
    while (n > 0) {
        uint64_t at = offset / 2 / block * block, skip = offset - 2 * at;
        size_t some = (size_t)ckpt_min_u64(STEP, total - at);
        size_t need = (size_t)(((skip + n + 1) / 2 + block - 1) / block * block);
        some = some < need ? some : need;
        CKPT_CHECK(dequantise(src, d, global, at, some, w, &scratch, err));
        size_t take = (size_t)ckpt_min_u64(2 * some - skip, n);
        memcpy(out, (const uint8_t *)w->rounded + skip, take);
        out += take;
        offset += take;
        n -= take;
    }
done:
    free(w);
    free(scratch.buf);
    return status;
}
