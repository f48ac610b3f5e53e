/* Running gathers: windows of a destination, and the byte runs that copies touch. */
#include "checked.h"
#include "derive.h"
#include "gather.h"
#include "io.h"
#include "spans.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

/* Measured on a Xeon of 2023: rows of 1152 bytes take as long either way, 4 KiB 7.9 GB/s straight
 * and 6.1 by way of a buffer; a buffer of 256 KiB, which the second level holds, 5 % less than 1 MiB. */
#define ROW_MIN 2048
#define STAGE_MAX ((uint64_t)256 << 10)
#define ROWS_MAX (CKPT_IOV_MAX / 2)
#define GAP_MAX 16 /* a row in so many rows' bytes; else rows are read one by one */

/* ---- running a gather -------------------------------------------------------------------------- */

typedef struct runner {
    ckpt_source *src;
    const ckpt_gather *g;
    uint32_t file;
    const ckpt_derived *derived;
    int elem;
    uint64_t lo, hi; /* destination window */
    uint8_t *out;    /* byte lo of the destination */
    uint8_t *stage;
    uint64_t stage_cap;
    ckpt_err *err;
} runner;

static ckpt_status read_file(runner *r, void *buf, size_t n, uint64_t offset, ckpt_err *err)
{
    if (r->file >= CKPT_DERIVED_FILE)
        return ckpt_derived_read(r->src, r->derived, buf, n, offset, err);
    return ckpt_source_read(r->src, r->file, buf, n, offset, err);
}

/* Source bytes from the first to the last element of loops[0..n), and the bytes wanted of them. */
static void extent(const ckpt_loop *loop, int n, int elem, uint64_t *span, uint64_t *useful)
{
    *span = (uint64_t)elem;
    *useful = (uint64_t)elem;
    for (int k = 0; k < n; k++) {
        *span += (uint64_t)((loop[k].n - 1) * loop[k].src);
        *useful *= (uint64_t)loop[k].n;
    }
}

static uint64_t dst_span(const ckpt_loop *loop, int n, int elem)
{
    uint64_t span = (uint64_t)elem;
    for (int k = 0; k < n; k++)
        span += (uint64_t)((loop[k].n - 1) * loop[k].dst);
    return span;
}

/* Memory to memory, n of the outermost loop. Depth = number of loops. */
static void scatter(const ckpt_loop *loop, int n_loops, int64_t n, int elem, const uint8_t *from,
                    uint8_t *to)
{
    if (n_loops == 1 && loop[0].src == elem && loop[0].dst == elem) {
        memcpy(to, from, (size_t)(n * elem));
        return;
    }
    for (int64_t i = 0; i < n; i++, from += loop[0].src, to += loop[0].dst) {
        if (n_loops > 1)
            scatter(loop + 1, n_loops - 1, loop[1].n, elem, from, to);
        else
            memcpy(to, from, (size_t)elem);
    }
}

/* Rows of at least ROW_MIN bytes, straight to their places: n of loop[0], whose gaps in the file go to
 * the staging buffer, where nobody looks at them. */
static ckpt_status read_rows(runner *r, const ckpt_loop *loop, int64_t n, uint64_t src,
                             uint64_t dst)
{
    struct iovec into[2 * ROWS_MAX];
    const size_t row = (size_t)(loop[1].n * r->elem), gap = (size_t)loop[0].src - row;
    for (int64_t i = 0, now; i < n; i += now) {
        int pieces = 0;
        now = ckpt_min_i64(n - i, ROWS_MAX);
        for (int64_t k = 0; k < now; k++) {
            uint8_t *to = r->out + (dst + (uint64_t)((i + k) * loop[0].dst) - r->lo);
            into[pieces++] = (struct iovec){to, row};
            if (gap > 0 && k + 1 < now)
                into[pieces++] = (struct iovec){r->stage, gap};
        }
        ckpt_status status = ckpt_source_readv(r->src, r->file, into, pieces,
                                               src + (uint64_t)(i * loop[0].src), r->err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static bool has_rows(const runner *r, const ckpt_loop *loop, int n_loops, int64_t n)
{
    if (n_loops != 2 || n < 2 || loop[1].src != r->elem || loop[1].dst != r->elem)
        return false;
    int64_t row = loop[1].n * r->elem;
    return row >= ROW_MIN && loop[0].src >= row && loop[0].src <= GAP_MAX * row &&
           (uint64_t)(loop[0].src - row) <= r->stage_cap && ckpt_source_vectored(r->src, r->file);
}

/* A piece wholly inside the window: n indices of loop[0] (n_loops >= 1). Long rows are read by one call
 * to their places, others in whole source spans through the staging buffer when at least a sixteenth of
 * them is wanted: one system call then serves many small pieces. */
static ckpt_status run_full(runner *r, const ckpt_loop *loop, int n_loops, int64_t n, uint64_t src,
                            uint64_t dst)
{
    if (n_loops == 1 && loop[0].src == r->elem && loop[0].dst == r->elem)
        return read_file(r, r->out + (dst - r->lo), (size_t)(n * r->elem), src, r->err);
    if (has_rows(r, loop, n_loops, n))
        return read_rows(r, loop, n, src, dst);
    uint64_t inner_span, inner_useful;
    extent(loop + 1, n_loops - 1, r->elem, &inner_span, &inner_useful);
    int64_t batch = 0;
    uint64_t cap = ckpt_min_u64(r->stage_cap, STAGE_MAX);
    if (inner_span <= r->stage_cap && loop[0].src > 0)
        batch = (int64_t)((ckpt_max_u64(cap, inner_span) - inner_span) / (uint64_t)loop[0].src) + 1;
    else if (inner_span <= r->stage_cap)
        batch = n;
    batch = ckpt_min_i64(batch, n);
    uint64_t span = inner_span + (uint64_t)((batch > 0 ? batch - 1 : 0) * loop[0].src);
    if (batch > 0 && (uint64_t)batch * inner_useful * 16 >= span) {
        for (int64_t i = 0; i < n; i += batch) {
            int64_t now = ckpt_min_i64(batch, n - i);
            uint64_t at = src + (uint64_t)(i * loop[0].src);
            ckpt_status status =
                read_file(r, r->stage, (size_t)(inner_span + (uint64_t)((now - 1) * loop[0].src)),
                          at, r->err);
            if (status != CKPT_OK)
                return status;
            scatter(loop, n_loops, now, r->elem, r->stage,
                    r->out + (dst + (uint64_t)(i * loop[0].dst) - r->lo));
        }
        return CKPT_OK;
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t s = src + (uint64_t)(i * loop[0].src), d = dst + (uint64_t)(i * loop[0].dst);
        ckpt_status status = n_loops > 1
                                 ? run_full(r, loop + 1, n_loops - 1, loop[1].n, s, d)
                                 : read_file(r, r->out + (d - r->lo), (size_t)r->elem, s, r->err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* The part of loops at (src, dst) that falls into the window. */
static ckpt_status run_part(runner *r, const ckpt_loop *loop, int n_loops, uint64_t src,
                            uint64_t dst)
{
    if (n_loops == 0) { /* one element, possibly straddling an edge of the window */
        uint64_t a = ckpt_max_u64(dst, r->lo), b = ckpt_min_u64(dst + (uint64_t)r->elem, r->hi);
        if (a >= b)
            return CKPT_OK;
        return read_file(r, r->out + (a - r->lo), (size_t)(b - a), src + (a - dst), r->err);
    }
    if (n_loops == 1 && loop[0].src == r->elem && loop[0].dst == r->elem) {
        uint64_t a = ckpt_max_u64(dst, r->lo);
        uint64_t b = ckpt_min_u64(dst + (uint64_t)(loop[0].n * r->elem), r->hi);
        if (a >= b)
            return CKPT_OK;
        return read_file(r, r->out + (a - r->lo), (size_t)(b - a), src + (a - dst), r->err);
    }
    uint64_t inner = dst_span(loop + 1, n_loops - 1, r->elem), step = (uint64_t)loop[0].dst;
    uint64_t n = (uint64_t)loop[0].n;
    /* indices that touch the window: [first, last); wholly inside: [full, full_end) */
    uint64_t first = dst + inner > r->lo ? 0 : (r->lo - dst - inner) / step + 1;
    uint64_t last = dst >= r->hi ? 0 : ckpt_min_u64((r->hi - dst - 1) / step + 1, n);
    uint64_t full = dst >= r->lo ? 0 : (r->lo - dst + step - 1) / step;
    uint64_t full_end = dst + inner > r->hi ? 0 : ckpt_min_u64((r->hi - dst - inner) / step + 1, n);
    if (full < first)
        full = first;
    for (uint64_t i = first; i < last;) {
        uint64_t s = src + i * (uint64_t)loop[0].src, d = dst + i * step;
        ckpt_status status;
        if (i >= full && i < full_end) {
            status = run_full(r, loop, n_loops, (int64_t)(full_end - i), s, d);
            i = full_end;
        } else {
            status = run_part(r, loop + 1, n_loops - 1, s, d);
            i++;
        }
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Width of the unit that a byte swap reverses. */
static int swap_unit(ckpt_dtype dtype, int elem)
{
    return ckpt_dtype_get(dtype)->kind == CKPT_KIND_COMPLEX ? elem / 2 : elem;
}

static void swap_bytes(uint8_t *p, size_t n, int unit)
{
    for (size_t i = 0; i + (size_t)unit <= n; i += (size_t)unit)
        for (int a = 0, b = unit - 1; a < b; a++, b--) {
            uint8_t t = p[i + (size_t)a];
            p[i + (size_t)a] = p[i + (size_t)b];
            p[i + (size_t)b] = t;
        }
}

/* Raw window: no swap, no cast. */
static ckpt_status run_window(ckpt_source *src, const ckpt_gather *g, uint64_t lo, size_t n,
                              uint8_t *out, uint8_t *stage, size_t stage_cap, ckpt_err *err)
{
    int bits = ckpt_dtype_get(g->from)->bits;
    runner r = {.src = src,
                .g = g,
                .elem = bits % 8 == 0 ? bits / 8 : 1,
                .lo = lo,
                .hi = lo + n,
                .out = out,
                .stage = stage,
                .stage_cap = stage_cap,
                .err = err};
    if (g->pad > 0)
        memset(out, 0, n);
    for (size_t i = 0; i < g->n_copies; i++) {
        const ckpt_copy *c = &g->copies[i];
        if (c->dst >= r.hi)
            break;
        if (c->last + (uint64_t)r.elem <= lo)
            continue;
        r.file = c->file;
        r.derived = c->derived;
        ckpt_status status = run_part(&r, c->loop, c->n_loops, c->src, c->dst);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* x + add in single precision (double for F64), rounded back to the type. */
static void add_values(ckpt_dtype dtype, uint8_t *p, size_t n, int add)
{
    enum { STEP = 256 };
    size_t elem = (size_t)ckpt_dtype_get(dtype)->bits / 8;
    if (add == 0)
        return;
    for (size_t i = 0; i < n; i += STEP, p += STEP * elem) {
        size_t now = n - i < STEP ? n - i : STEP;
        if (dtype == CKPT_F64) {
            double wide[STEP];
            memcpy(wide, p, now * sizeof wide[0]);
            for (size_t k = 0; k < now; k++)
                wide[k] += add;
            memcpy(p, wide, now * sizeof wide[0]);
            continue;
        }
        float value[STEP];
        if (dtype == CKPT_F32)
            memcpy(value, p, now * sizeof value[0]);
        else
            ckpt_dtype_cast(CKPT_F32, value, dtype, p, now);
        for (size_t k = 0; k < now; k++)
            value[k] += (float)add;
        if (dtype == CKPT_F32)
            memcpy(p, value, now * sizeof value[0]);
        else
            ckpt_dtype_cast(dtype, p, CKPT_F32, value, now);
    }
}

ckpt_status ckpt_gather_run(ckpt_source *src, const ckpt_gather *g, uint64_t lo, size_t n,
                            uint8_t *out, ckpt_scratch *scratch, ckpt_err *err)
{
    size_t half = scratch->cap / 2 / 64 * 64;
    if (ckpt_gather_keeps_bytes(g))
        return run_window(src, g, lo, n, out, scratch->buf, scratch->cap, err);
    size_t from = (size_t)ckpt_dtype_get(g->from)->bits / 8;
    size_t to = (size_t)ckpt_dtype_get(g->to)->bits / 8;
    size_t wide = from > to ? from : to;
    uint8_t *raw = scratch->buf + half;
    size_t step = half / 2 / wide; /* elements a round: raw and cast share the upper half */
    uint8_t *cast = raw + step * wide;
    for (size_t done = 0; done < n;) {
        uint64_t first = (lo + done) / to, skip = (lo + done) % to;
        uint64_t want = (skip + (n - done) + to - 1) / to;
        size_t count = (size_t)ckpt_min_u64(want, step);
        ckpt_status status =
            run_window(src, g, first * from, count * from, raw, scratch->buf, half, err);
        if (status != CKPT_OK)
            return status;
        if (g->swap)
            swap_bytes(raw, count * from, swap_unit(g->from, (int)from));
        add_values(g->from, raw, count, g->add_from);
        uint8_t *result = raw;
        if (g->to != g->from) { /* whole elements go straight to where they belong */
            result = skip == 0 && count * to <= n - done ? out + done : cast;
            ckpt_dtype_cast(g->to, result, g->from, raw, count);
        }
        add_values(g->to, result, count, g->add_to);
        add_values(g->to, result, count, g->add_back);
        size_t take = (size_t)ckpt_min_u64(count * to - skip, n - done);
        if (result != out + done)
            memcpy(out + done, result + skip, take);
        done += take;
    }
    return CKPT_OK;
}

/* ---- runs -------------------------------------------------------------------------------------- */

static ckpt_status src_runs(const ckpt_loop *loop, int n, uint64_t run, uint64_t at, ckpt_run_fn fn,
                            void *self, ckpt_err *err)
{
    if (n == 0)
        return fn(self, at, run, err);
    for (int64_t i = 0; i < loop[0].n; i++) {
        ckpt_status status =
            src_runs(loop + 1, n - 1, run, at + (uint64_t)(i * loop[0].src), fn, self, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static int by_src_stride(const void *a, const void *b)
{
    const ckpt_loop *x = a, *y = b;
    return x->src < y->src ? 1 : x->src > y->src ? -1 : 0;
}

ckpt_status ckpt_copy_src_runs(const ckpt_copy *copy, int elem, ckpt_run_fn fn, void *self,
                               ckpt_err *err)
{
    ckpt_loop loop[CKPT_MAX_LOOPS];
    int n = copy->n_loops;
    if (n > 0)
        memcpy(loop, copy->loop, (size_t)n * sizeof loop[0]);
    qsort(loop, (size_t)n, sizeof loop[0], by_src_stride);
    uint64_t run = (uint64_t)elem;
    while (n > 0 && loop[n - 1].src == (int64_t)run)
        run *= (uint64_t)loop[--n].n;
    return src_runs(loop, n, run, copy->src, fn, self, err);
}

typedef struct run_list {
    ckpt_spans spans;
    uint64_t lo, hi;
} run_list;

static ckpt_status collect_run(run_list *list, uint64_t at, uint64_t len, ckpt_err *err)
{
    uint64_t a = ckpt_max_u64(at, list->lo), b = ckpt_min_u64(at + len, list->hi);
    if (a >= b)
        return CKPT_OK;
    return ckpt_spans_add(&list->spans, a, b - a, err);
}

static ckpt_status dst_runs(run_list *list, const ckpt_loop *loop, int n, uint64_t run, uint64_t at,
                            ckpt_err *err)
{
    if (n == 0)
        return collect_run(list, at, run, err);
    for (int64_t i = 0; i < loop[0].n; i++) {
        ckpt_status status =
            dst_runs(list, loop + 1, n - 1, run, at + (uint64_t)(i * loop[0].dst), err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

ckpt_status ckpt_gather_holes(const ckpt_gather *g, uint64_t lo, uint64_t n, ckpt_run_fn fn,
                              void *self, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    run_list list = {.lo = lo, .hi = lo + n};
    int bits = ckpt_dtype_get(g->from)->bits;
    if (g->pad == 0)
        return CKPT_OK;
    for (size_t i = 0; i < g->n_copies; i++) {
        const ckpt_copy *c = &g->copies[i];
        uint64_t run = (uint64_t)(bits / 8);
        int k = c->n_loops;
        while (k > 0 && c->loop[k - 1].dst == (int64_t)run)
            run *= (uint64_t)c->loop[--k].n;
        CKPT_CHECK(dst_runs(&list, c->loop, k, run, c->dst, err));
    }
    ckpt_spans_settle(&list.spans);
    status = ckpt_spans_gaps(&list.spans, lo, lo + n, fn, self, err);
done:
    free(list.spans.span);
    return status;
}
