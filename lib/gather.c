/* Box intersection: where the bytes of a destination box lie in a source.
 *
 * A canonical tensor is a box in the factored axes of its stored tensor, on both sides. Writing its
 * flat index in a common refinement of both axis lists gives nested loops whose destination and
 * source coordinates are linear in the loop indices. Cutting those loops to the destination chunk
 * and to each source chunk (ranges of mixed-radix coordinates: at most 2*axes-1 boxes a dimension)
 * leaves strided copies. Nothing here depends on what the axes mean. */
#include "gather.h"
#include "checked.h"
#include "derive.h"

#include <stdlib.h>
#include <string.h>

/* One side of the refinement: per loop the dimension it moves along and by how much. */
typedef struct side {
    int rank;
    int dim[CKPT_MAX_LOOPS];
    int64_t weight[CKPT_MAX_LOOPS];
    int64_t base[CKPT_MAX_RANK]; /* coordinate of the box's first element */
} side;

typedef struct loops {
    int n;
    int64_t lo[CKPT_MAX_LOOPS], len[CKPT_MAX_LOOPS]; /* current range of each loop */
    side dst, src;
} loops;

typedef struct walk {
    loops *l;
    const ckpt_dst *dst;
    int64_t dst_stride[CKPT_MAX_RANK]; /* elements, row-major over the destination box */
    const struct ckpt_derived *derived;
    const ckpt_tensor *tensor; /* source; NULL: only count */
    const ckpt_chunk *chunk;
    int64_t src_stride[CKPT_MAX_RANK];
    int64_t max_len0; /* longest chunk along axis 0 */
    int elem;         /* bytes */
    int64_t volume;   /* elements emitted */
    ckpt_arena *arena;
    ckpt_copies *out;
    ckpt_err *err;
} walk;

/* ---- common refinement ------------------------------------------------------------------------- */

/* Axes of a map from the innermost, with the weight each has inside its dimension. */
typedef struct axis_walk {
    const ckpt_map *map;
    int i;
    int64_t rest, weight; /* what is left of axis i, and the weight of its next index step */
    int64_t inner;        /* product of the axes inside the current dimension */
} axis_walk;

static void axis_enter(axis_walk *w, side *s)
{
    while (w->i >= 0) {
        const ckpt_axis *a = &w->map->axis[w->i];
        if (w->i == w->map->n - 1 || w->map->axis[w->i + 1].dim != a->dim)
            w->inner = 1;
        w->weight = w->inner;
        w->rest = a->len;
        w->inner *= a->size;
        s->base[a->dim] += a->lo * w->weight;
        if (a->len != 1)
            return;
        w->i--;
    }
}

static void axis_take(axis_walk *w, side *s, int64_t n)
{
    w->weight *= n;
    w->rest /= n;
    if (w->rest == 1) {
        w->i--;
        axis_enter(w, s);
    }
}

static int64_t gcd_i64(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

static ckpt_status refine(const ckpt_map *dst, const ckpt_map *src, loops *l, ckpt_err *err)
{
    axis_walk d = {.map = dst, .i = dst->n - 1, .inner = 1};
    axis_walk s = {.map = src, .i = src->n - 1, .inner = 1};
    axis_enter(&d, &l->dst);
    axis_enter(&s, &l->src);
    int n = 0;
    while (d.i >= 0 && s.i >= 0) {
        int64_t step = gcd_i64(d.rest, s.rest);
        if ((step == 1 && d.rest != 1 && s.rest != 1) || n == CKPT_MAX_LOOPS)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "source and target views share no common factors (%lld against %lld)",
                             (long long)d.rest, (long long)s.rest);
        l->dst.dim[n] = dst->axis[d.i].dim;
        l->dst.weight[n] = d.weight;
        l->src.dim[n] = src->axis[s.i].dim;
        l->src.weight[n] = s.weight;
        l->len[n++] = step;
        axis_take(&d, &l->dst, step);
        axis_take(&s, &l->src, step);
    }
    if (d.i >= 0 || s.i >= 0)
        return ckpt_fail(err, CKPT_E_INTERNAL, "source and target boxes differ in volume");
    l->n = n;
    /* Built innermost first; the rest of this file wants outermost first. */
    for (int i = 0, j = n - 1; i < j; i++, j--) {
        int64_t t;
        int k;
#define SWAP(tmp, a, b) (tmp = (a), (a) = (b), (b) = tmp)
        SWAP(t, l->len[i], l->len[j]);
        SWAP(k, l->dst.dim[i], l->dst.dim[j]);
        SWAP(t, l->dst.weight[i], l->dst.weight[j]);
        SWAP(k, l->src.dim[i], l->src.dim[j]);
        SWAP(t, l->src.weight[i], l->src.weight[j]);
#undef SWAP
    }
    return CKPT_OK;
}

/* Loops of the destination alone, for counting. */
static ckpt_status only_dst(const ckpt_map *map, loops *l, ckpt_err *err)
{
    axis_walk w = {.map = map, .i = map->n - 1, .inner = 1};
    int n = 0;
    axis_enter(&w, &l->dst);
    while (w.i >= 0) {
        if (n == CKPT_MAX_LOOPS)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "a view has more than %d axes",
                             CKPT_MAX_LOOPS);
        l->dst.dim[n] = map->axis[w.i].dim;
        l->dst.weight[n] = w.weight;
        l->len[n++] = w.rest;
        axis_take(&w, &l->dst, w.rest);
    }
    l->n = n;
    for (int i = 0, j = n - 1; i < j; i++, j--) {
        int64_t t = l->len[i];
        int k = l->dst.dim[i];
        l->len[i] = l->len[j];
        l->len[j] = t;
        l->dst.dim[i] = l->dst.dim[j];
        l->dst.dim[j] = k;
        t = l->dst.weight[i];
        l->dst.weight[i] = l->dst.weight[j];
        l->dst.weight[j] = t;
    }
    return CKPT_OK;
}

/* ---- cutting loops to a coordinate range ------------------------------------------------------- */

static ckpt_status cut_dst(walk *w, int dim);
static ckpt_status cut_src(walk *w, int dim);
static ckpt_status emit(walk *w);

static ckpt_status next_dim(walk *w, bool is_dst, int dim)
{
    return is_dst ? cut_dst(w, dim + 1) : cut_src(w, dim + 1);
}

/* Position of the loops at `from` and inside along a dimension: lowest coordinate and extent. */
static void dim_span(const loops *l, const side *s, int dim, int from, int64_t *low, int64_t *span)
{
    *low = 0;
    *span = 1;
    for (int k = from; k < l->n; k++)
        if (s->dim[k] == dim) {
            *low += l->lo[k] * s->weight[k];
            *span += (l->len[k] - 1) * s->weight[k];
        }
}

static int64_t floor_div(int64_t a, int64_t b)
{
    return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/* Restrict the loops of `dim` from loop k on so that the coordinate, counted from the current low
 * corner, lies in [lo, hi). Continues with the next dimension for every resulting box. Recursion
 * depth is bounded by the number of loops. */
static ckpt_status cut_range(walk *w, bool is_dst, int dim, int k, int64_t lo, int64_t hi)
{
    loops *l = w->l;
    const side *s = is_dst ? &l->dst : &l->src;
    while (k < l->n && s->dim[k] != dim)
        k++;
    if (k == l->n)
        return lo <= 0 && hi > 0 ? next_dim(w, is_dst, dim) : CKPT_OK;
    int64_t low, span, weight = s->weight[k], lo0 = l->lo[k], len0 = l->len[k];
    dim_span(l, s, dim, k, &low, &span);
    if (hi <= 0 || lo >= span)
        return CKPT_OK;
    if (lo <= 0 && hi >= span)
        return next_dim(w, is_dst, dim);
    span -= (len0 - 1) * weight; /* of the loops inside k */
    int64_t full_lo = ckpt_max_i64(floor_div(lo + weight - 1, weight), 0);
    int64_t full_hi = ckpt_min_i64(floor_div(hi - span, weight) + 1, len0);
    if (full_lo >= full_hi)
        full_lo = full_hi = ckpt_min_i64(ckpt_max_i64(floor_div(hi - 1, weight) + 1, 0), len0);
    ckpt_status status = CKPT_OK;
    if (full_lo < full_hi && hi - span >= 0) {
        l->lo[k] = lo0 + full_lo;
        l->len[k] = full_hi - full_lo;
        status = next_dim(w, is_dst, dim);
    }
    int64_t first = ckpt_max_i64(floor_div(lo - span, weight) + 1, 0);
    int64_t last = ckpt_min_i64(floor_div(hi - 1, weight), len0 - 1);
    for (int64_t i = first; status == CKPT_OK && i <= last; i++) {
        if (i >= full_lo && i < full_hi) {
            i = full_hi - 1;
            continue;
        }
        l->lo[k] = lo0 + i;
        l->len[k] = 1;
        status = cut_range(w, is_dst, dim, k + 1, lo - i * weight, hi - i * weight);
    }
    l->lo[k] = lo0;
    l->len[k] = len0;
    return status;
}

static ckpt_status each_chunk(walk *w);

static ckpt_status cut_dst(walk *w, int dim)
{
    if (dim == w->dst->rank)
        return w->tensor != NULL ? each_chunk(w) : emit(w);
    int64_t low, span;
    dim_span(w->l, &w->l->dst, dim, 0, &low, &span);
    low += w->l->dst.base[dim];
    return cut_range(w, true, dim, 0, w->dst->lo[dim] - low,
                     w->dst->lo[dim] + w->dst->len[dim] - low);
}

static ckpt_status cut_src(walk *w, int dim)
{
    if (dim == w->tensor->rank)
        return emit(w);
    int64_t low, span;
    dim_span(w->l, &w->l->src, dim, 0, &low, &span);
    low += w->l->src.base[dim];
    return cut_range(w, false, dim, 0, w->chunk->lo[dim] - low,
                     w->chunk->lo[dim] + w->chunk->len[dim] - low);
}

/* ---- source chunks ----------------------------------------------------------------------------- */

static void row_major(int rank, const int64_t *len, int64_t *stride)
{
    int64_t s = 1;
    for (int d = rank - 1; d >= 0; d--) {
        stride[d] = s;
        s *= len[d];
    }
}

/* First chunk whose axis-0 start can reach `at`; chunks are sorted by lo[0]. */
static size_t lower_chunk(const ckpt_tensor *t, int64_t at)
{
    size_t lo = 0, hi = t->n_chunks;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->chunks[mid].lo[0] < at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static ckpt_status each_chunk(walk *w)
{
    const ckpt_tensor *t = w->tensor;
    int64_t low[CKPT_MAX_RANK], span[CKPT_MAX_RANK];
    for (int d = 0; d < t->rank; d++) {
        dim_span(w->l, &w->l->src, d, 0, &low[d], &span[d]);
        low[d] += w->l->src.base[d];
    }
    size_t i = t->rank > 0 ? lower_chunk(t, low[0] - w->max_len0 + 1) : 0;
    for (; i < t->n_chunks; i++) {
        const ckpt_chunk *c = &t->chunks[i];
        if (t->rank > 0 && c->lo[0] >= low[0] + span[0])
            break;
        bool hit = true;
        for (int d = 0; d < t->rank && hit; d++)
            hit = c->lo[d] < low[d] + span[d] && low[d] < c->lo[d] + c->len[d];
        if (!hit)
            continue;
        w->chunk = c;
        if (c->stride != NULL)
            memcpy(w->src_stride, c->stride, (size_t)t->rank * sizeof c->stride[0]);
        else
            row_major(t->rank, c->len, w->src_stride);
        ckpt_status status = cut_src(w, 0);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* ---- emitting copies --------------------------------------------------------------------------- */

/* Byte position of the first element of the current loop box. */
static int64_t corner(const loops *l, const side *s, int rank, const int64_t *lo,
                      const int64_t *stride)
{
    int64_t at = 0;
    for (int d = 0; d < rank; d++)
        at += (s->base[d] - lo[d]) * stride[d];
    for (int k = 0; k < l->n; k++)
        at += l->lo[k] * s->weight[k] * stride[s->dim[k]];
    return at;
}

/* Loops with their byte strides, unit loops dropped and touching neighbours merged. */
static int merge_loops(const walk *w, ckpt_loop *out)
{
    const loops *l = w->l;
    int n = 0;
    for (int k = 0; k < l->n; k++) {
        if (l->len[k] == 1)
            continue;
        ckpt_loop now = {l->len[k], l->src.weight[k] * w->src_stride[l->src.dim[k]] * w->elem,
                         l->dst.weight[k] * w->dst_stride[l->dst.dim[k]] * w->elem};
        if (n > 0 && out[n - 1].src == now.n * now.src && out[n - 1].dst == now.n * now.dst) {
            now.n *= out[n - 1].n;
            n--;
        }
        out[n++] = now;
    }
    return n;
}

static ckpt_status emit(walk *w)
{
    int64_t volume = 1;
    for (int k = 0; k < w->l->n; k++)
        volume *= w->l->len[k];
    w->volume += volume;
    if (w->tensor == NULL)
        return CKPT_OK;
    ckpt_loop merged[CKPT_MAX_LOOPS];
    int n = merge_loops(w, merged);
    void *p = w->out->copies;
    ckpt_status status = ckpt_grow(&p, &w->out->cap, w->out->n + 1, sizeof *w->out->copies, w->err);
    w->out->copies = p;
    if (status != CKPT_OK)
        return status;
    ckpt_copy copy = {.n_loops = n, .file = w->chunk->file, .derived = w->derived};
    copy.loop = ckpt_arena_memdup(w->arena, merged, (size_t)n * sizeof merged[0]);
    if (copy.loop == NULL)
        return ckpt_fail(w->err, CKPT_E_NOMEM, "out of memory for a plan");
    copy.dst =
        (uint64_t)(corner(w->l, &w->l->dst, w->dst->rank, w->dst->lo, w->dst_stride) * w->elem);
    copy.src = w->chunk->offset +
               (uint64_t)(corner(w->l, &w->l->src, w->tensor->rank, w->chunk->lo, w->src_stride) *
                          w->elem);
    copy.last = copy.dst;
    for (int k = 0; k < n; k++)
        copy.last += (uint64_t)((merged[k].n - 1) * merged[k].dst);
    w->out->copies[w->out->n++] = copy;
    return CKPT_OK;
}

/* A box with an empty axis holds nothing. */
static bool map_is_empty(const ckpt_map *map)
{
    for (int i = 0; i < map->n; i++)
        if (map->axis[i].len == 0)
            return true;
    return false;
}

const ckpt_tensor *ckpt_canon_tensor(const ckpt_source *src, const ckpt_canon *c)
{
    return c->derived != NULL ? &c->derived->tensor : &src->tensors[c->stored];
}

ckpt_status ckpt_gather_add(const ckpt_source *src, const ckpt_canon *c, const ckpt_dst *dst,
                            ckpt_arena *arena, ckpt_copies *out, uint64_t *bytes, ckpt_err *err)
{
    const ckpt_tensor *t = ckpt_canon_tensor(src, c);
    int bits = ckpt_dtype_get(c->dtype)->bits;
    *bytes = 0;
    if (map_is_empty(&c->map) || map_is_empty(dst->map))
        return CKPT_OK;
    loops l = {0};
    walk w = {.l = &l,
              .dst = dst,
              .tensor = t,
              .elem = bits / 8,
              .arena = arena,
              .out = out,
              .err = err,
              .derived = c->derived};
    ckpt_map whole[2];
    ckpt_axis flat[2];
    ckpt_dst flat_dst;
    ckpt_tensor flat_tensor;
    ckpt_chunk flat_chunk;
    int64_t zero = 0, total = (int64_t)c->bytes;
    if (bits % 8 != 0) {
        /* Sub-byte elements move only as whole contiguous tensors: then they are plain bytes. */
        if (t->n_chunks != 1 || t->chunks[0].stride != NULL || dst->len[0] != dst->dims[0])
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s elements cannot be cut",
                             ckpt_dtype_get(c->dtype)->name);
        flat[0] = flat[1] = (ckpt_axis){.size = total, .len = total};
        whole[0] = (ckpt_map){&flat[0], 1};
        flat_dst =
            (ckpt_dst){.map = &whole[0], .rank = 1, .dims = &total, .lo = &zero, .len = &total};
        flat_chunk = (ckpt_chunk){
            .lo = &zero, .len = &total, .offset = t->chunks[0].offset, .file = t->chunks[0].file};
        flat_tensor = (ckpt_tensor){.name = t->name,
                                    .dims = &total,
                                    .chunks = &flat_chunk,
                                    .n_chunks = 1,
                                    .dtype = CKPT_U8,
                                    .rank = 1};
        w.dst = dst = &flat_dst;
        w.tensor = t = &flat_tensor;
        w.elem = 1;
    }
    l.dst.rank = dst->rank;
    l.src.rank = t->rank;
    row_major(dst->rank, dst->len, w.dst_stride);
    for (size_t i = 0; i < t->n_chunks && t->rank > 0; i++)
        w.max_len0 = ckpt_max_i64(w.max_len0, t->chunks[i].len[0]);
    ckpt_status status = refine(dst->map, bits % 8 != 0 ? &whole[0] : &c->map, &l, err);
    if (status == CKPT_OK)
        status = cut_dst(&w, 0);
    *bytes = (uint64_t)w.volume * (uint64_t)w.elem;
    return status;
}

ckpt_status ckpt_box_volume(const ckpt_map *map, const ckpt_dst *dst, int64_t *out, ckpt_err *err)
{
    loops l = {0};
    walk w = {.l = &l, .dst = dst, .elem = 1, .err = err};
    *out = 0;
    if (map_is_empty(map))
        return CKPT_OK;
    l.dst.rank = dst->rank;
    ckpt_status status = only_dst(map, &l, err);
    if (status == CKPT_OK)
        status = cut_dst(&w, 0);
    *out = w.volume;
    return status;
}

static int copy_order(const void *a, const void *b)
{
    const ckpt_copy *x = a, *y = b;
    if (x->dst != y->dst)
        return x->dst < y->dst ? -1 : 1;
    return x->last < y->last ? -1 : x->last > y->last;
}

ckpt_status ckpt_gather_seal(ckpt_copies *copies, ckpt_arena *arena, ckpt_gather *out,
                             ckpt_err *err)
{
    if (copies->n > 1)
        qsort(copies->copies, copies->n, sizeof *copies->copies, copy_order);
    out->n_copies = copies->n;
    out->copies = ckpt_arena_memdup(arena, copies->copies, copies->n * sizeof *copies->copies);
    free(copies->copies);
    *copies = (ckpt_copies){0};
    return out->copies != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* The copies of `bytes` bytes of a canonical tensor to where dst says; all of them must be there. */
static ckpt_status gather_to(const ckpt_source *src, const ckpt_canon *c, const ckpt_dst *dst,
                             uint64_t bytes, ckpt_arena *arena, ckpt_gather *out, ckpt_err *err)
{
    const ckpt_tensor *stored = ckpt_canon_tensor(src, c);
    ckpt_copies copies = {0};
    ckpt_status status;
    uint64_t covered;
    *out = (ckpt_gather){.name = c->name,
                         .bytes = bytes,
                         .from = c->dtype,
                         .to = c->dtype,
                         .swap = stored->big_endian,
                         .add_from = (int8_t)-c->shift};
    CKPT_TRY(ckpt_gather_add(src, c, dst, arena, &copies, &covered, err), "tensor '%s'",
             stored->name);
    if (covered != bytes) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %llu of %llu bytes are present",
                           stored->name, (unsigned long long)covered, (unsigned long long)bytes);
        goto done;
    }
    CKPT_CHECK(ckpt_gather_seal(&copies, arena, out, err));
done:
    free(copies.copies);
    return status;
}

ckpt_status ckpt_plan_canon(const ckpt_model *model, size_t tensor, ckpt_arena *arena,
                            ckpt_gather *out, ckpt_err *err)
{
    return ckpt_gather_canon(model->src, &model->tensors[tensor], arena, out, err);
}

ckpt_status ckpt_gather_canon(const ckpt_source *src, const ckpt_canon *c, ckpt_arena *arena,
                              ckpt_gather *out, ckpt_err *err)
{
    int64_t numel = 1, zero = 0;
    for (int i = 0; i < c->map.n; i++)
        numel *= c->map.axis[i].len;
    ckpt_axis axis = {.size = numel, .len = numel};
    ckpt_map map = {&axis, 1};
    ckpt_dst dst = {.map = &map, .rank = 1, .dims = &numel, .lo = &zero, .len = &numel};
    return gather_to(src, c, &dst, c->bytes, arena, out, err);
}

ckpt_status ckpt_plan_box(const ckpt_model *model, size_t tensor, const int64_t *lo,
                          const int64_t *len, ckpt_arena *arena, ckpt_gather *out, ckpt_err *err)
{
    const ckpt_canon *c = &model->tensors[tensor];
    ckpt_axis axes[CKPT_MAX_RANK];
    ckpt_map map = {axes, c->rank};
    ckpt_dst dst = {.map = &map, .rank = c->rank, .dims = c->dims, .lo = lo, .len = len};
    int64_t numel = 0;
    uint64_t bytes;
    for (int i = 0; i < c->rank; i++) {
        if (lo[i] < 0 || len[i] < 0 || lo[i] > c->dims[i] - len[i])
            return ckpt_fail(err, CKPT_E_INTERNAL, "tensor %s: part %lld + %lld of axis %d",
                             c->name, (long long)lo[i], (long long)len[i], i);
        axes[i] = (ckpt_axis){.size = c->dims[i], .len = c->dims[i], .dim = i};
    }
    if (!ckpt_numel(c->rank, len, &numel) || !ckpt_dtype_bytes(c->dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor %s: size overflows", c->name);
    return gather_to(model->src, c, &dst, bytes, arena, out, err);
}
