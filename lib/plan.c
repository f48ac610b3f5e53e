/* From a bound source model and options to files, segments and gathers. */
#include "checked.h"
#include "gather.h"
#include "plan_internal.h"
#include "policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Any real tensor is smaller. An empty one may claim anything, but JSON must be able to say it. */
#define EXTENT_MAX (INT64_C(1) << 48)
#define OBJECT_IN_MEMORY ((uint64_t)16 << 20)  /* bytes, one object */
#define OBJECTS_IN_MEMORY ((uint64_t)64 << 20) /* bytes, all of them */

ckpt_status ckpt_plan_line(ckpt_plan *plan, const char ***list, size_t *n, size_t *cap,
                           ckpt_err *err, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    void *p = *list;
    ckpt_status status = ckpt_grow(&p, cap, *n + 1, sizeof **list, err);
    *list = p;
    if (status != CKPT_OK)
        return status;
    const char *kept = ckpt_arena_strdup(&plan->arena, text);
    if (kept == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    (*list)[(*n)++] = kept;
    return CKPT_OK;
}

/* ---- out tensors ------------------------------------------------------------------------------- */

static int item_order(const void *a, const void *b)
{
    const ckpt_item *x = a, *y = b;
    if (x->dropped != y->dropped)
        return x->dropped ? 1 : -1;
    int c = x->dropped ? 0 : strcmp(x->stored, y->stored);
    return c != 0 ? c : strcmp(x->canon.name, y->canon.name);
}

static bool same_view(const ckpt_item *a, const ckpt_item *b)
{
    if (a->map.n != b->map.n || a->rank != b->rank || a->shift != b->shift ||
        a->canon.shift != b->canon.shift)
        return false;
    for (int i = 0; i < a->map.n; i++)
        if (a->map.axis[i].size != b->map.axis[i].size ||
            a->map.axis[i].dim != b->map.axis[i].dim || a->map.axis[i].cut != b->map.axis[i].cut)
            return false;
    return true;
}

/* Prove that the boxes of items [first, last) and the padding tile the target tensor. */
static ckpt_status check_tiling(ckpt_planner *p, size_t first, size_t last, const ckpt_map *pad,
                                ckpt_err *err)
{
    const ckpt_item *it = &p->items[first];
    int n = it->map.n;
    size_t count = last - first + (pad != NULL);
    if (n > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "view of '%s' has too many axes", it->stored);
    int64_t *numbers = calloc((count * 2 + 1) * (size_t)(n + 1), sizeof *numbers);
    ckpt_chunk *chunks = calloc(count, sizeof *chunks);
    ckpt_status status = CKPT_OK;
    if (numbers == NULL || chunks == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    int64_t *sizes = numbers;
    for (int i = 0; i < n; i++)
        sizes[i] = it->map.axis[i].size;
    for (size_t k = 0; k < count; k++) {
        const ckpt_map *map = k < last - first ? &p->items[first + k].map : pad;
        int64_t *lo = numbers + (1 + 2 * k) * (size_t)(n + 1), *len = lo + n + 1;
        for (int i = 0; i < n; i++) {
            lo[i] = map->axis[i].lo;
            len[i] = map->axis[i].len;
        }
        chunks[k] = (ckpt_chunk){.lo = lo, .len = len};
    }
    ckpt_file file = {.name = "", .path = "", .size = INT64_MAX};
    ckpt_source fake = {.files = &file, .n_files = 1};
    ckpt_tensor t = {.name = it->stored,
                     .dims = sizes,
                     .chunks = chunks,
                     .n_chunks = count,
                     .dtype = CKPT_U8,
                     .rank = n};
    status = ckpt_tensor_check(&fake, &t, err);
    if (status == CKPT_E_FORMAT && it->canon.state != NULL)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "tensor '%s' holds the state of several parameters, and some of them "
                           "(frozen ones?) have none; --optimizer drop leaves it out",
                           it->stored);
    else if (status == CKPT_E_FORMAT)
        status = err != NULL ? (err->code = CKPT_E_UNSUPPORTED) : CKPT_E_UNSUPPORTED;
done:
    free(numbers);
    free(chunks);
    return status;
}

static int stage_of(const ckpt_planner *p, const ckpt_canon *c)
{
    const ckpt_mesh *mesh = &p->opts->mesh;
    if (c->block >= 0)
        return ckpt_mesh_stage(mesh, c->block, p->model->n_main);
    bool tail = strncmp(c->param, "final_norm.", 11) == 0 || strncmp(c->param, "head.", 5) == 0;
    return tail ? mesh->pp - 1 : 0;
}

/* Stored rows [lo, hi) of axis 0 that an item's box touches. */
typedef struct reach {
    int64_t lo, hi;
    size_t item;
} reach;

static int reach_order(const void *a, const void *b)
{
    const reach *x = a, *y = b;
    if (x->lo != y->lo)
        return x->lo < y->lo ? -1 : 1;
    return x->item < y->item ? -1 : x->item > y->item;
}

static reach reach_of(const ckpt_item *it, size_t index)
{
    reach r = {.hi = 1, .item = index};
    int64_t inner = 1;
    for (int i = it->map.n - 1; i >= 0; i--) {
        const ckpt_axis *a = &it->map.axis[i];
        if (a->dim != 0)
            continue;
        r.lo += a->lo * inner;
        r.hi += (a->lo + a->len - 1) * inner;
        inner *= a->size;
    }
    return r;
}

/* A stacked tensor has thousands of items and of chunks: each chunk looks only at the items that
 * reach its rows. Sorted by lo; *widest is the longest reach. */
static reach *sort_items(const ckpt_planner *p, size_t first, size_t last, int64_t *widest)
{
    reach *r = malloc((last - first + 1) * sizeof *r);
    *widest = 1;
    for (size_t k = first; r != NULL && k < last; k++) {
        r[k - first] = reach_of(&p->items[k], k);
        *widest = ckpt_max_i64(*widest, r[k - first].hi - r[k - first].lo);
    }
    if (r != NULL)
        qsort(r, last - first, sizeof *r, reach_order);
    return r;
}

static size_t first_reaching(const reach *r, size_t n, int64_t lo)
{
    size_t a = 0, b = n;
    while (a < b) {
        size_t mid = a + (b - a) / 2;
        if (r[mid].lo < lo)
            a = mid + 1;
        else
            b = mid;
    }
    return a;
}

/* Copies of one chunk from the items that reach it; *covered receives their bytes. */
static ckpt_status gather_chunk(ckpt_planner *p, ckpt_dst *dst, const reach *r, size_t n,
                                int64_t widest, ckpt_copies *copies, uint64_t *covered,
                                ckpt_err *err)
{
    int64_t lo = dst->rank > 0 ? dst->lo[0] : 0, hi = dst->rank > 0 ? lo + dst->len[0] : 1;
    *covered = 0;
    for (size_t i = first_reaching(r, n, lo - widest + 1); i < n && r[i].lo < hi; i++) {
        uint64_t part;
        const ckpt_item *it = &p->items[r[i].item];
        if (r[i].hi <= lo)
            continue;
        dst->map = &it->map;
        ckpt_status status =
            ckpt_gather_add(p->model->src, &it->canon, dst, &p->plan->arena, copies, &part, err);
        if (status != CKPT_OK)
            return status;
        *covered += part;
    }
    return CKPT_OK;
}

/* What happens to values between source and target of an item. */
static ckpt_gather value_ops(const ckpt_planner *p, const ckpt_item *it)
{
    ckpt_gather g = {.from = it->canon.dtype,
                     .to = it->dtype,
                     .swap = ckpt_canon_tensor(p->model->src, &it->canon)->big_endian};
    if (it->canon.shift != it->shift || g.from != g.to) {
        g.add_from = (int8_t)-it->canon.shift;
        g.add_to = (int8_t)it->shift;
    }
    return g;
}

static ckpt_status build_chunk(ckpt_planner *p, const ckpt_out_tensor *t, size_t c, ckpt_gather *g,
                               const ckpt_item *it, const reach *r, size_t n, int64_t widest,
                               const ckpt_map *pad, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_copies copies = {0};
    int64_t numel, pad_volume = 0;
    uint64_t covered = 0, pad_bytes = 0;
    *g = value_ops(p, it);
    if (!ckpt_numel(t->rank, t->chunks[c].len, &numel) ||
        !ckpt_dtype_bytes(it->canon.dtype, numel, &g->bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s elements cannot be cut here",
                         ckpt_dtype_get(it->canon.dtype)->name);
    ckpt_dst dst = {
        .rank = t->rank, .dims = t->dims, .lo = t->chunks[c].lo, .len = t->chunks[c].len};
    CKPT_CHECK(gather_chunk(p, &dst, r, n, widest, &copies, &covered, err));
    if (pad != NULL) {
        dst.map = pad;
        CKPT_CHECK(ckpt_box_volume(pad, &dst, &pad_volume, err));
        (void)ckpt_dtype_bytes(it->canon.dtype, pad_volume, &pad_bytes);
    }
    g->pad = pad_bytes;
    if (covered + pad_bytes != g->bytes)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%llu of %llu bytes of a chunk have a source",
                           (unsigned long long)covered, (unsigned long long)(g->bytes - pad_bytes));
    else
        status = ckpt_gather_seal(&copies, &p->plan->arena, g, err);
done:
    free(copies.copies);
    return status;
}

/* Fill the gathers of one out tensor's chunks from items [first, last). */
static ckpt_status build_chunks(ckpt_planner *p, ckpt_out_tensor *t, ckpt_gather *gathers,
                                size_t first, size_t last, const ckpt_map *pad, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t widest;
    reach *r = sort_items(p, first, last, &widest);
    if (r == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t c = 0; c < t->n_chunks; c++)
        CKPT_TRY(
            build_chunk(p, t, c, &gathers[c], &p->items[first], r, last - first, widest, pad, err),
            "tensor '%s'", t->name);
done:
    free(r);
    return status;
}

/* The container's own way of cutting. */
static ckpt_status cut_by_container(ckpt_planner *p, ckpt_out_tensor *t, bool *done, ckpt_err *err)
{
    int axis = -1;
    int64_t ways = 1;
    size_t rank = (size_t)t->rank;
    ckpt_status status = p->opts->container->cut(p->plan->config, &p->opts->mesh, t->name, t->rank,
                                                 t->dims, &axis, &ways, err);
    *done = axis != -2;
    if (status != CKPT_OK || !*done)
        return status;
    if (axis < 0)
        ways = 1;
    else if (t->dims[axis] % ways != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "extent %lld of axis %d is not divisible by %lld",
                         (long long)t->dims[axis], axis, (long long)ways);
    t->chunks = ckpt_arena_array(&p->plan->arena, (size_t)ways, sizeof *t->chunks);
    int64_t *box = ckpt_arena_array(&p->plan->arena, (size_t)ways * 2 * rank + 1, sizeof *box);
    if (t->chunks == NULL || box == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    t->n_chunks = (size_t)ways;
    for (size_t i = 0; i < t->n_chunks; i++) {
        int64_t *lo = box + i * 2 * rank, *len = lo + rank;
        memcpy(len, t->dims, rank * sizeof *len);
        if (axis >= 0) {
            len[axis] = t->dims[axis] / ways;
            lo[axis] = len[axis] * (int64_t)i;
        }
        t->chunks[i] = (ckpt_out_chunk){.lo = lo, .len = len};
    }
    return CKPT_OK;
}

/* Items [first, last) share a target stored name: make the out tensor and its chunks. */
static ckpt_status build_out(ckpt_planner *p, size_t first, size_t last, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    ckpt_item *it = &p->items[first];
    bool scalar = it->canon.state != NULL && it->canon.state->scalar;
    for (int d = 0; d < it->rank; d++)
        if (it->dims[d] > EXTENT_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%s': extent %lld on axis %d",
                             it->stored, (long long)it->dims[d], d);
    for (size_t k = first; k < last; k++) {
        const ckpt_item *other = &p->items[k];
        const ckpt_tensor *a = ckpt_canon_tensor(p->model->src, &it->canon);
        const ckpt_tensor *b = ckpt_canon_tensor(p->model->src, &other->canon);
        if (!same_view(it, other) || (other->row == NULL && k != first && !scalar))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' and '%s' would both become '%s'",
                             a->name, b->name, it->stored);
        if (other->canon.dtype != it->canon.dtype || other->dtype != it->dtype ||
            a->big_endian != b->big_endian)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' is %s but '%s' is %s: they share target tensor '%s'", a->name,
                             ckpt_dtype_get(it->canon.dtype)->name, b->name,
                             ckpt_dtype_get(other->canon.dtype)->name, it->stored);
        p->items[k].out = (uint32_t)plan->out.n_tensors;
    }
    if (scalar) {
        CKPT_CHECK(ckpt_plan_same_scalar(p, first, last, err));
        last = first + 1; /* writes for all */
    }
    ckpt_map pad_box,
        *pad = ckpt_pad_map(it->row, &it->map, &plan->arena, &pad_box) ? &pad_box : NULL;
    ckpt_out_tensor *t = &plan->out.tensors[plan->out.n_tensors];
    *t = (ckpt_out_tensor){
        .name = it->stored, .dims = it->dims, .dtype = it->dtype, .rank = it->rank};
    t->optimizer = it->canon.state != NULL ||
                   (it->canon.extra && ckpt_is_optimizer(p->model->src, it->canon.name));
    CKPT_CHECK(check_tiling(p, first, last, pad, err));
    const ckpt_mesh *mesh = p->opts->sharded && it->row != NULL ? &p->opts->mesh : NULL;
    int stage = p->opts->sharded ? stage_of(p, &it->canon) : 0;
    bool inside = false;
    bool cut = false;
    if (p->opts->container->cut != NULL)
        status = cut_by_container(p, t, &cut, err);
    if (!cut && status == CKPT_OK)
        status = ckpt_shard_cut(mesh, stage, it->rank, it->dims, &it->map, &plan->arena, &t->chunks,
                                &t->n_chunks, &inside, err);
    CKPT_TRY(status, "tensor '%s'", it->stored);
    if (inside && !p->warned_heads) {
        p->warned_heads = true;
        CKPT_CHECK(WARN(p, err,
                        "TP %d exceeds the heads of '%s': stored cut inside heads or whole; "
                        "Megatron-Core loads it at any size but cannot run the model at TP %d",
                        mesh->tp, it->stored, mesh->tp));
    }
    ckpt_gather *gathers = ckpt_arena_array(&plan->arena, t->n_chunks, sizeof *gathers);
    if (gathers == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    plan->chunks[plan->out.n_tensors] = gathers;
    CKPT_CHECK(build_chunks(p, t, gathers, first, last, pad, err));
    for (size_t c = 0; c < t->n_chunks; c++) {
        int64_t numel;
        uint64_t bytes = 0;
        if (ckpt_numel(t->rank, t->chunks[c].len, &numel))
            (void)ckpt_dtype_bytes(t->dtype, numel, &bytes);
        plan->payload_bytes += bytes;
    }
    plan->out.n_tensors++;
done:
    return status;
}

static ckpt_status build_outs(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    if (p->n_items > 0)
        qsort(p->items, p->n_items, sizeof *p->items, item_order);
    while (p->n_items > 0 && p->items[p->n_items - 1].dropped)
        p->n_items--;
    plan->out.tensors = ckpt_arena_array(&plan->arena, p->n_items, sizeof *plan->out.tensors);
    plan->chunks = ckpt_arena_array(&plan->arena, p->n_items, sizeof *plan->chunks);
    if (plan->out.tensors == NULL || plan->chunks == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0, next; i < p->n_items; i = next) {
        for (next = i + 1; next < p->n_items; next++)
            if (strcmp(p->items[next].stored, p->items[i].stored) != 0)
                break;
        CKPT_CHECK(build_out(p, i, next, err));
    }
done:
    return status;
}

/* ---- results ----------------------------------------------------------------------------------- */

static int result_order(const void *a, const void *b)
{
    return strcmp(((const ckpt_result_tensor *)a)->name, ((const ckpt_result_tensor *)b)->name);
}

static ckpt_status build_results(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    plan->results = ckpt_arena_array(&plan->arena, p->n_items, sizeof *plan->results);
    plan->repeats = ckpt_arena_array(&plan->arena, p->n_items, sizeof *plan->repeats);
    if (plan->results == NULL || plan->repeats == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < p->n_items; i++) {
        const ckpt_item *it = &p->items[i];
        ckpt_result_tensor *r =
            it->copy ? &plan->repeats[plan->n_repeats++] : &plan->results[plan->n_results++];
        *r = (ckpt_result_tensor){.name = it->canon.name,
                                  .stored = it->stored,
                                  .dtype = it->dtype,
                                  .rank = it->canon.rank,
                                  .dims = it->canon.dims,
                                  .out_tensor = it->out,
                                  .map = it->map,
                                  .shift = it->shift,
                                  .model_tensor = it->model_tensor,
                                  .replaces = it->replaces,
                                  .carried = it->row == NULL && it->canon.state == NULL};
        if (it->copy)
            continue;
        CKPT_CHECK(ckpt_gather_canon(p->model->src, &it->canon, &plan->arena, &r->gather, err));
        r->changed = it->dtype != it->canon.dtype || it->lossy_shift;
        if (r->changed)
            r->original = r->gather;
        r->gather.to = it->dtype;
        if (it->lossy_shift) { /* what re-reading the target will give */
            r->gather.add_to = (int8_t)it->shift;
            r->gather.add_back = (int8_t)-it->shift;
        }
    }
    if (plan->n_results > 0)
        qsort(plan->results, plan->n_results, sizeof *plan->results, result_order);
done:
    return status;
}

/* ---- configuration and objects ----------------------------------------------------------------- */

/* The configuration names the dtype of the weights: of the embedding unless cast. A configuration
 * that is carried unchanged keeps what it says. */
static ckpt_status say_dtype(ckpt_planner *p, ckpt_err *err)
{
    int64_t embed = ckpt_model_find(p->model, "embed.weight");
    bool cast = p->opts->cast == CKPT_CAST_TO;
    if (p->plan->config == NULL || (p->same_layout && !p->folded && !cast) || (!cast && embed < 0))
        return CKPT_OK;
    ckpt_dtype dtype = cast ? p->opts->dtype : p->model->tensors[embed].dtype;
    return ckpt_config_set_dtype(p->plan->config, p->plan->out.config_kind,
                                 ckpt_dtype_get(dtype)->torch, err);
}

/* --approximate: a configuration that the target can say, where the model's own it cannot. */
static ckpt_status approach(ckpt_planner *p, ckpt_err *err)
{
    const char *line = NULL;
    ckpt_status status = CKPT_OK;
    if (!p->opts->approximate || p->same_layout || p->layout == NULL ||
        p->layout->config_write == NULL || p->plan->canon_config == NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_config_approach(p->plan->canon_config, p->layout->config_kind, &p->plan->arena,
                                    &line, err));
    if (line != NULL)
        CKPT_CHECK(LOSSY(p, err, "%s", line));
done:
    return status;
}

static ckpt_status settle_config(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    const ckpt_source *src = p->model->src;
    bool as_it_is = p->same_layout && !p->folded && !p->opts->container->mesh_in_config;
    if (p->layout == NULL || as_it_is) {
        plan->config = ckpt_json_dup(src->config);
        plan->out.config_kind = src->config_kind;
        if (src->config != NULL && plan->config == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        if ((p->model->n_fp8 > 0 && !p->model->fp8_raw) || p->model->n_packed > 0)
            ckpt_json_delete(plan->config, "quantization_config");
    } else if (p->layout->config_write != NULL) {
        const ckpt_json *foreign = p->same_layout ? src->config : p->opts->foreign_config;
        CKPT_TRY(p->layout->config_write(plan->canon_config, foreign, &p->opts->mesh, &plan->config,
                                         err),
                 "layout %s: configuration", p->layout->name);
        plan->out.config_kind = p->layout->config_kind;
    }
    if (p->layout != NULL && plan->config == NULL)
        plan->out.config_kind = p->layout->config_kind;
    CKPT_CHECK(say_dtype(p, err));
    plan->out.config = plan->config;
done:
    return status;
}

/* Rows of the padded vocabulary: what the source has if it is of this layout and divisible, else
 * what the target configuration says, else the true rows. */
static ckpt_status settle_vocab(ckpt_planner *p, ckpt_err *err)
{
    int64_t embed = ckpt_model_find(p->model, "embed.weight");
    if (p->same_layout && embed >= 0) {
        const ckpt_canon *c = &p->model->tensors[embed];
        int64_t rows = p->model->src->tensors[c->stored].dims[0];
        if (rows % p->opts->mesh.tp == 0 || !p->opts->sharded) {
            (void)ckpt_sym_set(&p->syms, "VP", rows);
            return CKPT_OK;
        }
        int64_t m = 128, unit;
        (void)ckpt_json_int(ckpt_json_get(p->plan->config, "make_vocab_size_divisible_by"), &m);
        unit = (m > 0 && m < INT32_MAX ? m : 128) * p->opts->mesh.tp;
        int64_t v = c->dims[0];
        (void)ckpt_sym_set(&p->syms, "VP", (v + unit - 1) / unit * unit);
        return CKPT_OK;
    }
    return ckpt_config_padded_vocab(p->plan->config, &p->syms, err);
}

/* Choices of the target layout that follow from configurations, and L, the layers of its stack. */
static ckpt_status settle_choices(ckpt_planner *p, ckpt_err *err)
{
    ckpt_buf canon = {0}, written = {0};
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    if (p->layout == NULL)
        return CKPT_OK;
    if (p->layout->choices != NULL)
        p->layout->choices(p->plan->canon_config, &canon);
    if (p->layout->choices_written != NULL && p->plan->config != NULL)
        p->layout->choices_written(p->plan->config, &written);
    p->config_tags = ckpt_arena_strndup(arena, (char *)canon.data, canon.len);
    p->written_tags = ckpt_arena_strndup(arena, (char *)written.data, written.len);
    int a_layer = p->layout->blocks_per_layer > 0 ? p->layout->blocks_per_layer : 1;
    if (canon.failed || written.failed || p->config_tags == NULL || p->written_tags == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    else if (p->model->n_main >= a_layer &&
             !ckpt_sym_set(&p->syms, "L", p->model->n_main / a_layer))
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many size symbols");
    else if (p->model->n_main > 0 && !ckpt_sym_set(&p->syms, "P", p->model->n_main))
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many size symbols");
    ckpt_buf_release(&canon);
    ckpt_buf_release(&written);
    return status;
}

/* Small objects are held in memory: containers may need to look at them (common state). */
static ckpt_status carry_objects(ckpt_planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t loaded = 0;
    ckpt_plan *plan = p->plan;
    const ckpt_source *src = p->model->src;
    bool carry = strcmp(p->opts->container->name, "torch_dist") == 0 && p->same_layout &&
                 ckpt_carries_objects(src->container, p->opts->container);
    for (size_t i = 0; i < src->n_objects; i++)
        if (src->objects[i].unknown_global != NULL && !p->opts->allow_unknown_objects)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "object '%s' uses unknown class %s; --allow-unknown-objects carries "
                             "its bytes through",
                             src->objects[i].name, src->objects[i].unknown_global);
    if (!carry) {
        if (src->n_objects == 0)
            return CKPT_OK;
        return DROPPED(p, err, "%zu object%s of the source (%s%s): no place in the target",
                       src->n_objects, src->n_objects == 1 ? "" : "s", src->objects[0].name,
                       src->n_objects > 1 ? ", …" : "");
    }
    plan->out.objects = ckpt_arena_array(&plan->arena, src->n_objects, sizeof *plan->out.objects);
    if (plan->out.objects == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        bool keep;
        if (o->name[0] == '.')
            continue; /* a container's own file that was only listed to flag it */
        CKPT_CHECK(ckpt_plan_keep_object(p, o->name, &keep, err));
        if (!keep)
            continue;
        ckpt_out_object *out = &plan->out.objects[plan->out.n_objects++];
        *out = (ckpt_out_object){
            .name = o->name, .src_file = o->file, .src_offset = o->offset, .length = o->length};
        if (o->length > OBJECT_IN_MEMORY || loaded + o->length > OBJECTS_IN_MEMORY)
            continue;
        uint8_t *data = ckpt_arena_alloc(&plan->arena, (size_t)o->length + 1);
        if (data == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        CKPT_TRY(ckpt_source_read(p->model->src, o->file, data, (size_t)o->length, o->offset, err),
                 "object '%s'", o->name);
        out->data = data;
        loaded += o->length;
    }
done:
    return status;
}

static bool layout_cuts(const ckpt_layout *layout)
{
    for (size_t r = 0; layout != NULL && r < layout->n_rows; r++)
        if (strchr(layout->rows[r].view, '@') != NULL)
            return true;
    return false;
}

static ckpt_status check_mesh(ckpt_planner *p, ckpt_err *err)
{
    const ckpt_mesh *mesh = &p->opts->mesh;
    if (ckpt_mesh_world(mesh) == 1)
        return CKPT_OK;
    if (!p->opts->sharded)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "container %s is not sharded: --tp, --pp, --ep, --etp "
                         "and --cp need --to torch_dist, mp_rank or ranks",
                         p->opts->container->name);
    if (!p->opts->container->own_cuts && !layout_cuts(p->layout))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "layout %s does not say how tensors are cut: a mesh needs --layout "
                         "megatron",
                         p->layout != NULL ? p->layout->name : "(none)");
    int a_layer = p->layout->blocks_per_layer > 0 ? p->layout->blocks_per_layer : 1;
    return ckpt_mesh_check_blocks(mesh, p->model->n_main / a_layer,
                                  a_layer > 1 ? "layers" : "blocks", err);
}

/* A quantisation policy is no user's key: it goes along everywhere. */
static ckpt_status put_policy(ckpt_planner *p, ckpt_json *kept, ckpt_err *err)
{
    const char *text = p->opts->quant_policy;
    char digest[2 * CKPT_SHA256_LEN + 1];
    if (text == NULL)
        return CKPT_OK;
    ckpt_policy_digest(text, digest);
    if (!ckpt_json_set(kept, CKPT_POLICY_KEY, ckpt_json_new_string(text)) ||
        !ckpt_json_set(kept, CKPT_POLICY_DIGEST_KEY, ckpt_json_new_string(digest)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    return CKPT_OK;
}

/* Users' keys of safetensors __metadata__ stay with safetensors; elsewhere they have no place. What
 * describes the file they came from (format, sharding) is not theirs. */
static ckpt_status carry_metadata(ckpt_planner *p, ckpt_err *err)
{
    ckpt_plan *plan = p->plan;
    const ckpt_source *src = p->model->src;
    bool keeps = src->container == p->opts->container;
    ckpt_json *kept = ckpt_json_new_object();
    plan->metadata = kept;
    if (kept == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (const ckpt_json *c = ckpt_json_child(src->metadata); c != NULL; c = ckpt_json_next(c)) {
        const char *key = ckpt_json_key(c);
        if (strcmp(key, "format") == 0 || strncmp(key, "DCP_", 4) == 0 ||
            strcmp(key, CKPT_POLICY_KEY) == 0 || strcmp(key, CKPT_POLICY_DIGEST_KEY) == 0)
            continue;
        ckpt_status status = CKPT_OK;
        if (!keeps)
            status = DROPPED(p, err, "metadata '%s' of the source has no place in %s", key,
                             p->opts->container->name);
        else if (!ckpt_json_set(kept, key, ckpt_json_dup(c)))
            status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        if (status != CKPT_OK)
            return status;
    }
    ckpt_status status = put_policy(p, kept, err);
    if (status == CKPT_OK && ckpt_json_child(kept) != NULL)
        plan->out.metadata = kept;
    return status;
}

ckpt_status ckpt_plan_convert(ckpt_plan *plan, ckpt_model *model, const ckpt_convert_opts *opts,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *plan = (ckpt_plan){.model = model};
    ckpt_planner p = {.plan = plan,
                      .model = model,
                      .opts = opts,
                      .syms = model->syms,
                      .layout = opts->layout != NULL ? opts->layout : model->layout};
    p.same_layout = p.layout == model->layout;
    plan->canon_config = ckpt_json_dup(model->config);
    if (plan->canon_config == NULL && model->config != NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    if (p.layout != NULL && model->layout == NULL) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "the source is of no known family, so it cannot become layout %s",
                           p.layout->name);
        goto done;
    }
    CKPT_CHECK(check_mesh(&p, err));
    CKPT_CHECK(ckpt_plan_select(&p, err));
    CKPT_CHECK(ckpt_plan_ranks(&p, err));
    CKPT_CHECK(ckpt_plan_tied(&p, err));
    CKPT_CHECK(ckpt_plan_padding(&p, err));
    CKPT_CHECK(ckpt_plan_check_copies(&p, err));
    CKPT_CHECK(ckpt_plan_states(&p, err));
    if (model->n_fp8 > 0 && !model->fp8_raw)
        CKPT_CHECK(WARN(&p, err,
                        "%zu F8_E4M3 tensors become BF16: product with their scales rounded once; "
                        "the way back is not exact and is not offered",
                        model->n_fp8));
    if (model->n_packed > 0)
        CKPT_CHECK(
            WARN(&p, err,
                 "%zu NVFP4 or MXFP8 tensors become BF16: product with their scales rounded once",
                 model->n_packed));
    CKPT_CHECK(approach(&p, err));
    CKPT_CHECK(settle_config(&p, err));
    CKPT_CHECK(settle_vocab(&p, err));
    CKPT_CHECK(settle_choices(&p, err));
    CKPT_CHECK(ckpt_plan_place(&p, err));
    CKPT_CHECK(ckpt_plan_add_copies(&p, err));
    CKPT_CHECK(ckpt_plan_dtypes(&p, err));
    CKPT_CHECK(ckpt_plan_shifts(&p, err));
    CKPT_CHECK(build_outs(&p, err));
    CKPT_CHECK(build_results(&p, err));
    CKPT_CHECK(carry_objects(&p, err));
    CKPT_CHECK(carry_metadata(&p, err));
    plan->out.world = opts->sharded ? ckpt_mesh_world(&opts->mesh) : 1;
    plan->out.mesh = opts->sharded ? opts->mesh : (ckpt_mesh){1, 1, 1, 1, 1, 1};
    plan->out.max_shard_bytes = opts->max_shard_bytes;
    plan->out.single_file = opts->single_file;
    plan->out.bare = opts->bare;
    plan->out.deflate = opts->deflate;
    plan->out.iteration = model->src->iteration;
    if (opts->before_layout != NULL)
        CKPT_CHECK(opts->before_layout(opts->self, plan, err));
    CKPT_CHECK(opts->container->layout(&plan->out, &plan->sink, err));
    for (size_t f = 0; f < plan->sink.n_files; f++)
        plan->total_bytes += plan->sink.files[f].size;
done:
    free(p.items);
    if (status != CKPT_OK)
        ckpt_plan_release(plan);
    return status;
}

void ckpt_plan_release(ckpt_plan *plan)
{
    ckpt_plan_close_factors(plan);
    free(plan->lossy);
    free(plan->dropped);
    free(plan->not_cast);
    free(plan->warnings);
    ckpt_json_free(plan->config);
    ckpt_json_free(plan->canon_config);
    ckpt_json_free(plan->metadata);
    ckpt_arena_free(&plan->sink.arena);
    ckpt_arena_free(&plan->arena);
    *plan = (ckpt_plan){0};
}
