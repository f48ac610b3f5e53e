#include "written.h"

#include "checked.h"
#include "derive.h"
#include "gather.h"
#include "hash.h"

#include <stdlib.h>
#include <string.h>

/* ---- where tensors lie ------------------------------------------------------------------------- */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static int by_place(const void *a, const void *b)
{
    const ckpt_chunk *x = a, *y = b;
    return x->lo[0] != y->lo[0] ? (x->lo[0] < y->lo[0] ? -1 : 1) : 0;
}

/* The tensors that are written, their chunks nowhere yet. */
static ckpt_status list_tensors(ckpt_written *w, ckpt_err *err)
{
    const ckpt_out *out = &w->plan->out;
    w->src.tensors = ckpt_arena_array(&w->arena, out->n_tensors, sizeof *w->src.tensors);
    if (w->src.tensors == NULL)
        return no_memory(err);
    w->src.n_tensors = out->n_tensors;
    for (size_t i = 0; i < out->n_tensors; i++) {
        const ckpt_out_tensor *o = &out->tensors[i];
        ckpt_tensor *t = &w->src.tensors[i];
        *t = (ckpt_tensor){.name = o->name, .dims = o->dims, .dtype = o->dtype, .rank = o->rank};
        t->chunks = ckpt_arena_array(&w->arena, o->n_chunks, sizeof *t->chunks);
        if (t->chunks == NULL)
            return no_memory(err);
        t->n_chunks = o->n_chunks;
        for (size_t c = 0; c < o->n_chunks; c++)
            t->chunks[c] =
                (ckpt_chunk){.lo = o->chunks[c].lo, .len = o->chunks[c].len, .file = UINT32_MAX};
    }
    return CKPT_OK;
}

static ckpt_status place_segs(ckpt_written *w, uint32_t f, ckpt_err *err)
{
    const ckpt_out_file *file = &w->plan->sink.files[f];
    for (size_t s = 0; s < file->n_segs; s++) {
        const ckpt_seg *seg = &file->segs[s];
        if (seg->kind != CKPT_SEG_CHUNK || seg->copy)
            continue;
        ckpt_chunk *c = &w->src.tensors[seg->a].chunks[seg->b];
        if (c->file != UINT32_MAX)
            return ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%s': chunk %u has two places",
                             w->src.tensors[seg->a].name, (unsigned)seg->b);
        c->file = f;
        c->offset = seg->offset;
    }
    return CKPT_OK;
}

/* Chunks without elements go, for they are nowhere; the others in the order that gathers rely on. */
static void settle_chunks(ckpt_tensor *t)
{
    size_t n = 0;
    for (size_t c = 0; c < t->n_chunks; c++)
        if (t->chunks[c].file != UINT32_MAX)
            t->chunks[n++] = t->chunks[c];
    t->n_chunks = n;
    if (n > 1 && t->rank > 0)
        qsort(t->chunks, n, sizeof *t->chunks, by_place);
}

static ckpt_status place_chunks(ckpt_written *w, ckpt_err *err)
{
    const ckpt_sink *sink = &w->plan->sink;
    ckpt_status status = CKPT_OK;
    for (size_t f = 0; f < sink->n_files; f++)
        CKPT_CHECK(place_segs(w, (uint32_t)f, err));
    for (size_t i = 0; i < w->src.n_tensors; i++) {
        if (sink->serial != NULL)
            w->src.tensors[i].chunks[0].file = (uint32_t)i;
        settle_chunks(&w->src.tensors[i]);
    }
done:
    return status;
}

/* ---- reading ----------------------------------------------------------------------------------- */

/* The sink's file (a sink with calls: tensor) and offset behind those of this source; false: none. */
static bool translate(const ckpt_written *w, uint32_t *file, uint64_t *offset)
{
    const int64_t *image = w->plan->image;
    if (image == NULL)
        return true;
    if (*file >= w->src.n_files || image[*file] < 0)
        return false;
    const ckpt_tensor *t = &w->src.tensors[image[*file]];
    if (t->n_chunks != 1)
        return false;
    *file = t->chunks[0].file;
    *offset += t->chunks[0].offset;
    return true;
}

static ckpt_status read_written(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                uint64_t offset, ckpt_err *err)
{
    ckpt_written *w = src->self;
    uint8_t *out = buf;
    if (!translate(w, &file, &offset))
        return ckpt_fail(err, CKPT_E_INTERNAL, "file %u is not part of the output", (unsigned)file);
    while (n > 0) {
        ckpt_slot *pin;
        uint64_t have;
        const uint8_t *at = ckpt_window_pin(&w->window, file, offset, &have, &pin);
        if (at != NULL) {
            have = ckpt_min_u64(have, n);
            memcpy(out, at, (size_t)have);
            ckpt_window_unpin(&w->window, pin);
        } else { /* up to where the next piece begins, which may not be in the file yet */
            uint64_t step = w->step(w->self, file);
            have = step > 0 ? ckpt_min_u64(step - offset % step, n) : n;
            ckpt_status status = w->fetch(w->self, file, out, (size_t)have, offset, err);
            if (status != CKPT_OK)
                return status;
        }
        out += have;
        offset += have;
        n -= (size_t)have;
    }
    return CKPT_OK;
}

static ckpt_status list_files(ckpt_written *w, ckpt_err *err)
{
    const ckpt_sink *sink = &w->plan->sink;
    const ckpt_source *from = w->plan->model->src;
    if (w->plan->image != NULL || w->plan->in_place) {
        w->src.files = from->files;
        w->src.n_files = from->n_files;
        return CKPT_OK;
    }
    w->src.n_files = sink->serial != NULL ? w->src.n_tensors : sink->n_files;
    w->src.files = ckpt_arena_array(&w->arena, w->src.n_files, sizeof *w->src.files);
    if (w->src.files == NULL)
        return no_memory(err);
    for (size_t i = 0; i < w->src.n_files; i++) {
        const char *name = sink->serial != NULL ? w->src.tensors[i].name : sink->files[i].name;
        uint64_t size = sink->serial != NULL ? UINT64_MAX : sink->files[i].size;
        w->src.files[i] = (ckpt_file){.name = name, .path = name, .fd = -1, .size = size};
    }
    return CKPT_OK;
}

/* ---- gathers ----------------------------------------------------------------------------------- */

ckpt_status ckpt_written_canon(const ckpt_result_tensor *r, uint32_t stored, ckpt_canon *out,
                               ckpt_err *err)
{
    int64_t numel;
    *out = (ckpt_canon){.name = r->name,
                        .dims = r->dims,
                        .rank = r->rank,
                        .dtype = r->dtype,
                        .stored = stored,
                        .map = r->map,
                        .shift = r->shift};
    if (!ckpt_numel(r->rank, r->dims, &numel) || !ckpt_dtype_bytes(r->dtype, numel, &out->bytes))
        return ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%s': size overflows", r->name);
    return CKPT_OK;
}

static ckpt_status gather_result(ckpt_written *w, const ckpt_result_tensor *r, ckpt_gather *out,
                                 ckpt_err *err)
{
    ckpt_canon canon;
    if (w->plan->image != NULL || w->plan->in_place) {
        *out = r->gather;
        return CKPT_OK;
    }
    ckpt_status status = ckpt_written_canon(r, r->out_tensor, &canon, err);
    return status == CKPT_OK ? ckpt_gather_canon(&w->src, &canon, &w->arena, out, err) : status;
}

/* A chunk in one of its places. */
static ckpt_status gather_chunk(ckpt_written *w, const char *name, uint32_t file, uint64_t offset,
                                uint64_t bytes, ckpt_gather *out, ckpt_err *err)
{
    ckpt_loop *loop = ckpt_arena_alloc(&w->arena, sizeof *loop);
    ckpt_copy *copy = ckpt_arena_alloc(&w->arena, sizeof *copy);
    if (loop == NULL || copy == NULL)
        return no_memory(err);
    *loop = (ckpt_loop){.n = (int64_t)bytes, .src = 1, .dst = 1};
    *copy = (ckpt_copy){.loop = loop, .n_loops = 1, .src = offset, .last = bytes - 1, .file = file};
    *out = (ckpt_gather){.name = name,
                         .copies = copy,
                         .n_copies = 1,
                         .bytes = bytes,
                         .from = CKPT_U8,
                         .to = CKPT_U8};
    return CKPT_OK;
}

static int result_name(const void *key, const void *r)
{
    return strcmp(key, ((const ckpt_result_tensor *)r)->name);
}

/* A tensor that repeats another, unless it is written in another dtype. */
static ckpt_status add_repeat(ckpt_written *w, const ckpt_result_tensor *r, ckpt_err *err)
{
    const ckpt_plan *plan = w->plan;
    const ckpt_result_tensor *of =
        plan->n_results > 0
            ? bsearch(r->name, plan->results, plan->n_results, sizeof *r, result_name)
            : NULL;
    if (of == NULL || of->dtype != r->dtype)
        return CKPT_OK;
    ckpt_twin *t = &w->twins[w->n_twins++];
    t->name = r->stored;
    t->result = of - plan->results;
    t->repeat = r;
    return gather_result(w, r, &t->b, err);
}

static ckpt_status add_copy(ckpt_written *w, uint32_t f, const ckpt_seg *seg, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_out_tensor *o = &w->plan->out.tensors[seg->a];
    const ckpt_tensor *t = &w->src.tensors[seg->a];
    ckpt_twin *twin = &w->twins[w->n_twins];
    const ckpt_chunk *first = NULL;
    for (size_t c = 0; c < t->n_chunks && first == NULL; c++)
        if (t->chunks[c].lo == o->chunks[seg->b].lo)
            first = &t->chunks[c];
    if (first == NULL)
        return ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%s': chunk %u is only copied", t->name,
                         (unsigned)seg->b);
    *twin = (ckpt_twin){.name = t->name, .result = -1};
    CKPT_CHECK(gather_chunk(w, t->name, first->file, first->offset, seg->len, &twin->a, err));
    CKPT_CHECK(gather_chunk(w, t->name, f, seg->offset, seg->len, &twin->b, err));
    w->n_twins++;
done:
    return status;
}

static ckpt_status list_twins(ckpt_written *w, ckpt_err *err)
{
    const ckpt_plan *plan = w->plan;
    ckpt_status status = CKPT_OK;
    size_t n = plan->n_repeats;
    for (size_t f = 0; f < plan->sink.n_files; f++)
        for (size_t s = 0; s < plan->sink.files[f].n_segs; s++)
            n += plan->sink.files[f].segs[s].copy;
    w->twins = ckpt_arena_array(&w->arena, n, sizeof *w->twins);
    if (w->twins == NULL)
        return no_memory(err);
    for (size_t i = 0; i < plan->n_repeats; i++)
        CKPT_CHECK(add_repeat(w, &plan->repeats[i], err));
    for (size_t f = 0; f < plan->sink.n_files && plan->image == NULL && !plan->in_place; f++)
        for (size_t s = 0; s < plan->sink.files[f].n_segs; s++)
            if (plan->sink.files[f].segs[s].copy)
                CKPT_CHECK(add_copy(w, (uint32_t)f, &plan->sink.files[f].segs[s], err));
done:
    return status;
}

ckpt_status ckpt_written_open(ckpt_written *w, const ckpt_plan *plan, ckpt_err *err)
{
    ckpt_status status;
    *w = (ckpt_written){.plan = plan};
    w->src.read_at = read_written;
    w->src.self = w;
    CKPT_CHECK(list_tensors(w, err));
    CKPT_CHECK(place_chunks(w, err));
    CKPT_CHECK(list_files(w, err));
    w->results = ckpt_arena_array(&w->arena, plan->n_results, sizeof *w->results);
    if (w->results == NULL)
        return no_memory(err);
    for (size_t i = 0; i < plan->n_results; i++)
        CKPT_CHECK(gather_result(w, &plan->results[i], &w->results[i], err));
    CKPT_CHECK(list_twins(w, err));
done:
    return status;
}

void ckpt_written_close(ckpt_written *w)
{
    ckpt_window_close(&w->window);
    ckpt_arena_free(&w->arena);
}

/* ---- what leaves need -------------------------------------------------------------------------- */

/* Source bytes [*lo, *hi) that hold every element of the copy with a byte in [a, b) of the gather. */
static void reach(const ckpt_copy *c, uint64_t elem, uint64_t a, uint64_t b, uint64_t *lo,
                  uint64_t *hi)
{
    uint64_t dst = c->dst, src = c->src, last = 0, span = elem;
    for (int k = 0; k < c->n_loops; k++) {
        last += (uint64_t)((c->loop[k].n - 1) * c->loop[k].src);
        span += (uint64_t)((c->loop[k].n - 1) * c->loop[k].dst);
    }
    *lo = src;
    for (int k = 0; k < c->n_loops; k++) {
        const ckpt_loop *l = &c->loop[k];
        uint64_t step = (uint64_t)l->dst, n = (uint64_t)l->n;
        last -= (n - 1) * (uint64_t)l->src;
        span -= (n - 1) * step;
        uint64_t from = dst + span > a ? 0 : (a - dst - span) / step + 1;
        uint64_t to = dst >= b ? 0 : ckpt_min_u64((b - dst - 1) / step, n - 1);
        from = ckpt_min_u64(from, n - 1);
        *lo = src + from * (uint64_t)l->src;
        if (from < to) { /* several: their inner parts as a whole */
            *hi = src + to * (uint64_t)l->src + last + elem;
            return;
        }
        src = *lo;
        dst += from * step;
    }
    *hi = src + elem;
}

typedef struct needs {
    const ckpt_written *w;
    ckpt_need_fn need;
    void *self;
} needs;

static void need_range(const needs *n, uint64_t first, uint64_t last, uint32_t file, uint64_t lo,
                       uint64_t hi)
{
    uint64_t base = 0;
    if (!translate(n->w, &file, &base))
        return;
    for (uint64_t leaf = first; leaf <= last; leaf++)
        n->need(n->self, leaf, file, base + lo, base + hi);
}

/* Leaves [first, last] need everything that a gather reads. A computed tensor is computed from stored
 * ones, so this goes one level down. */
static void need_all(const needs *n, uint64_t first, uint64_t last, const ckpt_gather *g)
{
    uint64_t elem = ckpt_max_u64((uint64_t)ckpt_dtype_get(g->from)->bits / 8, 1);
    for (size_t i = 0; i < g->n_copies; i++) {
        uint64_t lo, hi;
        if (g->copies[i].derived != NULL)
            continue;
        reach(&g->copies[i], elem, 0, UINT64_MAX, &lo, &hi);
        need_range(n, first, last, g->copies[i].file, lo, hi);
    }
}

void ckpt_written_needs(const ckpt_written *w, const ckpt_gather *g, ckpt_need_fn need, void *self)
{
    const needs n = {w, need, self};
    uint64_t elem = ckpt_max_u64((uint64_t)ckpt_dtype_get(g->from)->bits / 8, 1);
    for (size_t i = 0; i < g->n_copies; i++) {
        const ckpt_copy *c = &g->copies[i];
        uint64_t first = c->dst / CKPT_LEAF_BYTES, last = (c->last + elem - 1) / CKPT_LEAF_BYTES;
        if (c->derived != NULL) {
            need_all(&n, first, last, &c->derived->a);
            need_all(&n, first, last, &c->derived->b);
            need_all(&n, first, last, &c->derived->g);
            continue;
        }
        for (uint64_t leaf = first; leaf <= last; leaf++) {
            uint64_t lo, hi, a = leaf * CKPT_LEAF_BYTES;
            reach(c, elem, a, a + CKPT_LEAF_BYTES, &lo, &hi);
            need_range(&n, leaf, leaf, c->file, lo, hi);
        }
    }
}

const uint8_t *ckpt_written_pin(ckpt_written *w, const ckpt_gather *g, uint64_t lo, size_t n,
                                ckpt_slot **pin)
{
    uint64_t elem = ckpt_max_u64((uint64_t)ckpt_dtype_get(g->from)->bits / 8, 1);
    size_t a = 0, b = g->n_copies;
    if (g->to != g->from || g->swap || g->add_from != 0 || g->add_to != 0 || g->add_back != 0)
        return NULL;
    while (b - a > 1) { /* the last copy that starts at or before lo */
        size_t mid = a + (b - a) / 2;
        if (g->copies[mid].dst <= lo)
            a = mid;
        else
            b = mid;
    }
    if (b == 0)
        return NULL;
    const ckpt_copy *c = &g->copies[a];
    bool plain = c->derived == NULL &&
                 (c->n_loops == 0 || (c->n_loops == 1 && c->loop[0].src == (int64_t)elem &&
                                      c->loop[0].dst == (int64_t)elem));
    if (!plain || c->dst > lo || n > c->last + elem - lo || lo >= c->last + elem)
        return NULL;
    uint32_t file = c->file;
    uint64_t offset = c->src + (lo - c->dst), have;
    if (!translate(w, &file, &offset))
        return NULL;
    const uint8_t *at = ckpt_window_pin(&w->window, file, offset, &have, pin);
    if (at != NULL && have < n) {
        ckpt_window_unpin(&w->window, *pin);
        *pin = NULL;
        at = NULL;
    }
    return at;
}
