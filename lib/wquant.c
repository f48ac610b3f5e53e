/* See wquant.h. This file has the numbers and the source in memory; wquant_plan.c what is built on them. */
#include "wquant.h"

#include "checked.h"
#include "job.h"
#include "qdq.h"
#include "wquant_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define UNIT_VALUES                                                                                \
    65536 /* values of whole rows that are quantised at once, where a row allows it */

/* A group of rows: as read, as dequantised, its codes and scales. */
typedef struct unit {
    int64_t rows;
    float *x, *y;
    uint8_t *codes;  /* one a byte */
    uint8_t *scales; /* as they are stored, of these rows */
    ckpt_scratch scratch;
} unit;

/* Rows quantised together: those that share scales, else as many as make a fair read. */
static int64_t unit_rows(const ckpt_wquant *q, const ckpt_wquant_tensor *t)
{
    if (q->kind == CKPT_WQUANT_FP8_BLOCK)
        return CKPT_FP8_BLOCK;
    return ckpt_max_i64(1, UNIT_VALUES / ckpt_max_i64(t->cols, 1));
}

/* Bytes of the scales of one unit's row of blocks. */
static int64_t scale_row(const ckpt_wquant *q, const ckpt_wquant_tensor *t)
{
    int64_t dims[2];
    ckpt_wquant_scales(q->kind, t->rows, t->cols, dims);
    return q->kind == CKPT_WQUANT_FP8_BLOCK ? dims[1] * (int64_t)sizeof(float) : dims[1];
}

static void unit_close(unit *u)
{
    free(u->x);
    free(u->y);
    free(u->codes);
    free(u->scales);
    free(u->scratch.buf);
    *u = (unit){0};
}

static ckpt_status unit_open(const ckpt_wquant *q, const ckpt_wquant_tensor *t, unit *u,
                             ckpt_err *err)
{
    size_t rows = (size_t)ckpt_min_i64(unit_rows(q, t), t->rows), n = rows * (size_t)t->cols;
    size_t scales = q->kind == CKPT_WQUANT_FP8_BLOCK ? 1 : rows;
    *u = (unit){.scratch = {.cap = 64 * 1024}};
    u->x = malloc(n * sizeof(float) + 1);
    u->y = malloc(n * sizeof(float) + 1);
    u->codes = malloc(n + 1);
    u->scales = malloc(scales * (size_t)scale_row(q, t) + 1);
    u->scratch.buf = malloc(u->scratch.cap);
    if (u->x != NULL && u->y != NULL && u->codes != NULL && u->scales != NULL &&
        u->scratch.buf != NULL)
        return CKPT_OK;
    unit_close(u);
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory quantising '%s'", t->name);
}

static ckpt_status unit_read(const ckpt_wquant *q, const ckpt_wquant_tensor *t, int64_t first,
                             unit *u, ckpt_err *err)
{
    ckpt_gather g = q->base->chunks[t->base][0];
    size_t row = (size_t)t->cols * sizeof(float);
    g.to = CKPT_F32;
    u->rows = ckpt_min_i64(unit_rows(q, t), t->rows - first);
    return ckpt_gather_run(q->base->model->src, &g, (uint64_t)first * row, (size_t)u->rows * row,
                           (uint8_t *)u->x, &u->scratch, err);
}

static void unit_quantise(const ckpt_wquant *q, const ckpt_wquant_tensor *t, unit *u)
{
    switch (q->kind) {
    case CKPT_WQUANT_FP8_BLOCK:
        ckpt_qdq_fp8_block(u->rows, t->cols, CKPT_FP8_BLOCK, CKPT_FP8_BLOCK, CKPT_FP8_DEEPSEEK,
                           u->x, u->y, u->codes, (float *)(void *)u->scales);
        break;
    case CKPT_WQUANT_NVFP4:
        ckpt_qdq_nvfp4(u->rows, t->cols, CKPT_NVFP4_STORE, t->amax, false, u->x, u->y, u->codes,
                       u->scales);
        break;
    case CKPT_WQUANT_MXFP8:
        ckpt_qdq_mxfp8(u->rows, t->cols, CKPT_MX_CEIL_DIV, false, u->x, u->y, u->codes, u->scales);
        break;
    case CKPT_WQUANT_NONE:
        break;
    }
}

/* Two codes a byte, in place; columns are even. */
static void pack(uint8_t *codes, size_t n)
{
    for (size_t i = 0; i < n / 2; i++)
        codes[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

/* ---- the source in memory ---------------------------------------------------------------------- */

/* Bytes [offset, offset + n) of the codes or of the scales of one matrix. */
static ckpt_status read_quantised(const ckpt_wquant *q, const ckpt_wquant_tensor *t, bool scales,
                                  uint8_t *out, size_t n, uint64_t offset, ckpt_err *err)
{
    ckpt_status status;
    unit u;
    int64_t per = unit_rows(q, t);
    bool fp8 = q->kind == CKPT_WQUANT_FP8_BLOCK;
    /* bytes of one unit, of which only the last may be shorter */
    uint64_t row =
        (uint64_t)(scales ? scale_row(q, t) : t->cols / (q->kind == CKPT_WQUANT_NVFP4 ? 2 : 1));
    uint64_t whole = scales && fp8 ? row : row * (uint64_t)per;
    CKPT_CHECK(unit_open(q, t, &u, err));
    while (n > 0) {
        uint64_t skip = offset % whole;
        CKPT_CHECK(unit_read(q, t, (int64_t)(offset / whole) * per, &u, err));
        unit_quantise(q, t, &u);
        if (q->kind == CKPT_WQUANT_NVFP4 && !scales)
            pack(u.codes, (size_t)(u.rows * t->cols));
        uint64_t have = scales && fp8 ? row : row * (uint64_t)u.rows;
        size_t take = (size_t)ckpt_min_u64(have - skip, n);
        memcpy(out, (scales ? u.scales : u.codes) + skip, take);
        out += take;
        offset += take;
        n -= take;
    }
done:
    unit_close(&u);
    return status;
}

static ckpt_status read_plain(const ckpt_wquant *q, uint32_t tensor, void *buf, size_t n,
                              uint64_t offset, ckpt_err *err)
{
    ckpt_scratch scratch = {.cap = 64 * 1024, .buf = malloc(64 * 1024)};
    if (scratch.buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    ckpt_status status = ckpt_gather_run(q->base->model->src, &q->base->chunks[tensor][0], offset,
                                         n, buf, &scratch, err);
    free(scratch.buf);
    return status;
}

ckpt_status ckpt_wquant_read(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err)
{
    const ckpt_wquant *q = src->self;
    size_t n_base = q->base->model->src->n_files;
    if (n == 0)
        return CKPT_OK;
    if (file < n_base)
        return ckpt_source_read(q->base->model->src, file, buf, n, offset, err);
    if (file >= src->n_files || offset > src->files[file].size ||
        n > src->files[file].size - offset)
        return ckpt_fail(err, CKPT_E_INTERNAL, "quantised source: %zu bytes at %llu of file %u", n,
                         (unsigned long long)offset, file);
    const ckpt_wquant_stored *s = &q->stored[file - n_base];
    switch (s->part) {
    case CKPT_WQUANT_PLAIN:
        return read_plain(q, s->base, buf, n, offset, err);
    case CKPT_WQUANT_CODES:
    case CKPT_WQUANT_SCALES:
        return read_quantised(q, &q->tensors[s->tensor], s->part == CKPT_WQUANT_SCALES, buf, n,
                              offset, err);
    case CKPT_WQUANT_GLOBAL:
        memcpy(buf, (const uint8_t *)&q->tensors[s->tensor].global + offset, n);
        return CKPT_OK;
    }
    return ckpt_fail(err, CKPT_E_INTERNAL, "quantised source: unknown part");
}

/* ---- errors ------------------------------------------------------------------------------------ */

typedef struct sums {
    double error, value;
} sums;

static void add_errors(const ckpt_wquant *q, ckpt_wquant_tensor *t, const unit *u, sums *s)
{
    uint8_t largest = q->kind == CKPT_WQUANT_NVFP4 ? 0x7 : 0x7e;
    uint8_t magnitude = q->kind == CKPT_WQUANT_NVFP4 ? 0x7 : 0x7f;
    for (int64_t i = 0; i < u->rows * t->cols; i++) {
        double x = (double)u->x[i], d = x - (double)u->y[i];
        s->error += d * d;
        s->value += x * x;
        t->max_abs = fabs(d) > t->max_abs ? fabs(d) : t->max_abs;
        t->saturated += (u->codes[i] & magnitude) == largest && fabsf(u->x[i]) > fabsf(u->y[i]);
    }
}

static ckpt_status not_finite(const ckpt_wquant *q, const ckpt_wquant_tensor *t, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "tensor '%s': holds a NaN or an infinity, which %s cannot say", t->name,
                     ckpt_wquant_name(q->kind));
}

/* Largest magnitude of the whole matrix, from which NVFP4's outer scale follows. */
static ckpt_status find_global(const ckpt_wquant *q, ckpt_wquant_tensor *t, unit *u, ckpt_err *err)
{
    for (int64_t r = 0; r < t->rows; r += unit_rows(q, t)) {
        ckpt_status status = unit_read(q, t, r, u, err);
        if (status != CKPT_OK)
            return status;
        float a = ckpt_amax(u->x, u->rows * t->cols);
        if (!isfinite(a))
            return not_finite(q, t, err);
        t->amax = a > t->amax ? a : t->amax;
    }
    float g = ckpt_over(t->amax, 2688.0f, false);
    t->global = g > 0 ? g : 1.0f;
    return CKPT_OK;
}

/* Tensors divided between processes. */
typedef struct measuring {
    ckpt_wquant *q;
    const ckpt_share *share;
    int *owner; /* by tensor; NULL: this process, all */
} measuring;

/* What is found out of a tensor, as it goes to the other processes. */
typedef struct found {
    float amax, global;
    double rel_rms, max_abs;
    uint64_t saturated;
} found;

static bool is_mine(const measuring *m, size_t tensor)
{
    return m->owner == NULL || m->owner[tensor] == m->share->rank;
}

static ckpt_status measure_item(ckpt_worker *w, size_t item, ckpt_err *err)
{
    const measuring *m = w->job->self;
    ckpt_wquant *q = m->q;
    if (!is_mine(m, item))
        return CKPT_OK;
    ckpt_wquant_tensor *t = &q->tensors[item];
    ckpt_status status;
    sums s = {0, 0};
    unit u = {0};
    CKPT_CHECK(unit_open(q, t, &u, err));
    if (q->kind == CKPT_WQUANT_NVFP4)
        CKPT_CHECK(find_global(q, t, &u, err));
    for (int64_t r = 0; r < t->rows; r += unit_rows(q, t)) {
        CKPT_CHECK(unit_read(q, t, r, &u, err));
        unit_quantise(q, t, &u);
        add_errors(q, t, &u, &s);
        ckpt_job_advance(w, (uint64_t)(u.rows * t->cols));
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    if (!isfinite(s.error) || !isfinite(s.value)) {
        status = not_finite(q, t, err);
        goto done;
    }
    t->rel_rms = s.value > 0 ? sqrt(s.error / s.value) : 0;
done:
    unit_close(&u);
    return status;
}

/* Which process measures which: by values. */
static ckpt_status divide(measuring *m, ckpt_err *err)
{
    const ckpt_wquant *q = m->q;
    uint64_t total = 0, at = 0;
    if (ckpt_share_alone(m->share))
        return CKPT_OK;
    m->owner = calloc(q->n + 1, sizeof *m->owner);
    if (m->owner == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu tensors", q->n);
    for (size_t i = 0; i < q->n; i++)
        total += (uint64_t)(q->tensors[i].rows * q->tensors[i].cols);
    for (size_t i = 0; i < q->n; i++) {
        const uint64_t values = (uint64_t)(q->tensors[i].rows * q->tensors[i].cols);
        m->owner[i] = ckpt_share_of(m->share, at, values, total);
        at += values;
    }
    return CKPT_OK;
}

/* All processes have what each found. */
static ckpt_status exchange(const measuring *m, ckpt_err *err)
{
    ckpt_wquant *q = m->q;
    if (m->owner == NULL)
        return CKPT_OK;
    found *all = calloc(q->n + 1, sizeof *all);
    if (all == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu tensors", q->n);
    for (size_t i = 0; i < q->n; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        all[i] = (found){t->amax, t->global, t->rel_rms, t->max_abs, t->saturated};
    }
    ckpt_status status = ckpt_share_table(m->share, all, q->n, sizeof *all, m->owner, err);
    for (size_t i = 0; i < q->n && status == CKPT_OK; i++) {
        ckpt_wquant_tensor *t = &q->tensors[i];
        t->amax = all[i].amax;
        t->global = all[i].global;
        t->rel_rms = all[i].rel_rms;
        t->max_abs = all[i].max_abs;
        t->saturated = all[i].saturated;
    }
    free(all);
    return status;
}

static ckpt_status measure_all(measuring *m, ckpt_job *j, const ckpt_stream_opts *opts,
                               ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(divide(m, err));
    for (size_t i = 0; i < m->q->n; i++)
        if (is_mine(m, i))
            j->total_bytes += (uint64_t)(m->q->tensors[i].rows * m->q->tensors[i].cols);
    CKPT_CHECK(ckpt_job_open(j, opts, err));
    CKPT_CHECK(ckpt_job_run(j));
done:
    return status;
}

ckpt_status ckpt_wquant_measure(ckpt_wquant *q, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    measuring m = {.q = q, .share = opts->share};
    ckpt_job j = {.run = measure_item, .self = &m, .n_items = q->n, .piece = 4096};
    CKPT_CHECK(ckpt_share_agree(m.share, measure_all(&m, &j, opts, err), err));
    status = exchange(&m, err);
done:
    ckpt_job_close(&j);
    free(m.owner);
    return status;
}
