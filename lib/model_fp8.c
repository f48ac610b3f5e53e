/* Block-quantised weights of Hugging Face checkpoints: X.weight in F8_E4M3 with the scales of its
 * 128 x 128 blocks in X.weight_scale_inv (conversion-maps.md section 9). A pair is one canonical
 * tensor in BF16 that is computed while it is read; asked for as stored (fp8_raw), the weight keeps
 * its type and the scale is carried under its own name. An F8_E4M3 weight without a scale, or the
 * reverse, is half a checkpoint. NVFP4 and MXFP8 weights (derive.h) are always dequantised. */
#include "checked.h"
#include "derive.h"
#include "model_internal.h"

#include <stdlib.h>
#include <string.h>

#define SUFFIX "_scale_inv"

/* Length of the name of the weight that `name` scales, 0 if it is no scale. */
static size_t weight_len(const char *name)
{
    size_t n = strlen(name), m = sizeof SUFFIX - 1;
    return n > m && strcmp(name + n - m, SUFFIX) == 0 ? n - m : 0;
}

/* An error, or a note where everything is shown as far as it goes. */
static ckpt_status refuse(ckpt_binder *b, ckpt_status status, ckpt_err *err)
{
    if (!b->opts->lenient || status == CKPT_E_NOMEM)
        return status;
    return ckpt_bind_note(b, err, "%s", err != NULL ? err->text : "F8 tensors without their scale");
}

static ckpt_status pair_scale(ckpt_binder *b, uint32_t scale, size_t len, ckpt_err *err)
{
    ckpt_model *m = b->m;
    const char *name = m->src->tensors[scale].name;
    const char *weight = ckpt_arena_strndup(&m->arena, name, len);
    if (weight == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    int64_t at = ckpt_source_find(m->src, weight);
    if (at < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "scale '%s' has no F8 tensor '%s'", name, weight);
    const ckpt_tensor *t = &m->src->tensors[at];
    if (t->dtype != CKPT_F8_E4M3)
        return ckpt_fail(err, CKPT_E_FORMAT, "scale '%s': '%s' is %s, expected F8_E4M3", name,
                         weight, ckpt_dtype_get(t->dtype)->name);
    if (!b->matched[at])
        return CKPT_OK; /* as unknown as its weight */
    b->matched[scale] = true;
    b->scale_of[at] = scale;
    m->n_fp8++;
    return CKPT_OK;
}

/* Scales of packed weights (derive.h) belong to them. */
static ckpt_status bind_packed(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    for (size_t i = 0; i < m->src->n_packed; i++) {
        const ckpt_derived *d = m->src->packed[i];
        int64_t weight = ckpt_source_find(m->src, d->tensor.name);
        int64_t scale = ckpt_source_find(m->src, d->scale);
        int64_t scale2 = d->scale2 != NULL ? ckpt_source_find(m->src, d->scale2) : scale;
        if (weight < 0 || scale < 0 || scale2 < 0)
            return ckpt_fail(err, CKPT_E_INTERNAL, "packed tensor '%s' is gone", d->tensor.name);
        if (!b->matched[weight])
            continue;
        b->matched[scale] = b->matched[scale2] = true;
        m->n_packed++;
    }
    return CKPT_OK;
}

ckpt_status ckpt_bind_scales(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    const ckpt_source *src = m->src;
    ckpt_status status = CKPT_OK;
    m->fp8_raw = b->opts->fp8_raw;
    if (b->layout->config_kind != CKPT_CONFIG_HF)
        return CKPT_OK;
    b->scale_of = malloc((src->n_tensors + 1) * sizeof *b->scale_of);
    if (b->scale_of == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < src->n_tensors; i++)
        b->scale_of[i] = CKPT_NO_SCALE;
    for (size_t i = 0; i < src->n_tensors; i++) {
        size_t len = b->matched[i] ? 0 : weight_len(src->tensors[i].name);
        status = len > 0 ? pair_scale(b, (uint32_t)i, len, err) : CKPT_OK;
        if (status != CKPT_OK)
            CKPT_CHECK(refuse(b, status, err));
    }
    for (size_t i = 0; i < src->n_tensors; i++) {
        const ckpt_tensor *t = &src->tensors[i];
        if (!b->matched[i] || t->dtype != CKPT_F8_E4M3 || b->scale_of[i] != CKPT_NO_SCALE)
            continue;
        status = ckpt_fail(err, CKPT_E_FORMAT, "F8 tensor '%s' has no scale ('%s" SUFFIX "')",
                           t->name, t->name);
        CKPT_CHECK(refuse(b, status, err));
    }
    CKPT_CHECK(bind_packed(b, err)); /* NVFP4's scales are F8 that nothing scales */
done:
    return status;
}

/* The computed form of one weight, made once for all canonical tensors that it holds. It is made for
 * raw use as well, since that checks both shapes. */
static ckpt_status dequantise(ckpt_binder *b, ckpt_canon *c, ckpt_derived **made, ckpt_err *err)
{
    ckpt_derived **d = &made[c->stored];
    ckpt_status status = CKPT_OK;
    uint64_t bytes = 0;
    int64_t numel;
    if (*d == NULL)
        status =
            ckpt_derive_blocks(b->m->src, c->stored, b->scale_of[c->stored], &b->m->arena, d, err);
    if (status != CKPT_OK || b->m->fp8_raw)
        return status;
    if (!ckpt_numel(c->rank, c->dims, &numel) ||
        !ckpt_dtype_bytes((*d)->tensor.dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': size overflows", c->name);
    c->derived = *d;
    c->dtype = (*d)->tensor.dtype;
    c->bytes = bytes;
    return CKPT_OK;
}

/* Scales beside raw weights: whole, and known, so they are not listed as extras. */
static ckpt_status carry_scales(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    for (size_t i = 0; i < m->src->n_tensors; i++) {
        uint32_t scale = b->scale_of[i];
        if (scale == CKPT_NO_SCALE)
            continue;
        ckpt_status status = ckpt_bind_whole(b, scale, m->src->tensors[scale].name, err);
        if (status != CKPT_OK)
            return status;
        m->n_extras--;
    }
    return CKPT_OK;
}

ckpt_status ckpt_bind_dequantised(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < m->n_tensors; i++)
        if (m->src->n_packed > 0 && m->tensors[i].derived == NULL)
            m->tensors[i].derived =
                ckpt_packed_find(m->src, m->src->tensors[m->tensors[i].stored].name);
    if (m->n_fp8 == 0)
        return CKPT_OK;
    ckpt_derived **made = calloc(m->src->n_tensors, sizeof *made);
    if (made == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < m->n_tensors; i++) {
        if (b->scale_of[m->tensors[i].stored] == CKPT_NO_SCALE)
            continue;
        status = dequantise(b, &m->tensors[i], made, err);
        if (status != CKPT_OK)
            CKPT_CHECK(refuse(b, status, err));
    }
    if (m->fp8_raw)
        status = carry_scales(b, err);
done:
    free(made);
    return status;
}
