/* From a bound source model and options to files, segments and gathers. */
#include "plan.h"
#include "checked.h"
#include "derive.h"
#include "gather.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OBJECT_IN_MEMORY ((uint64_t)16 << 20)  /* bytes, one object */
#define OBJECTS_IN_MEMORY ((uint64_t)64 << 20) /* bytes, all of them */

/* One canonical tensor on its way to the target. */
typedef struct item {
    ckpt_canon canon;     /* source side */
    int64_t model_tensor; /* -1: derived */
    const ckpt_row *row;  /* target row, NULL: whole under `stored` */
    const char *stored;   /* target stored name */
    ckpt_map map;         /* box in the target's view */
    int rank;             /* target stored shape */
    const int64_t *dims;
    ckpt_dtype dtype; /* written */
    uint32_t out;     /* out tensor */
    bool dropped;
} item;

typedef struct planner {
    ckpt_plan *plan;
    ckpt_model *model;
    const ckpt_convert_opts *opts;
    const ckpt_layout *layout; /* target, NULL if the source has none */
    bool same_layout, folded;
    ckpt_symtab syms;
    item *items;
    size_t n_items, cap_items;
    const char *shape_tags; /* choices that follow from the tensors: kda=fused or kda=split */
    bool warned_heads;
    size_t cap_lossy, cap_dropped, cap_not_cast, cap_warnings;
} planner;

static ckpt_status add_line(ckpt_plan *plan, const char ***list, size_t *n, size_t *cap,
                            ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(6, 7);
static ckpt_status add_line(ckpt_plan *plan, const char ***list, size_t *n, size_t *cap,
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
#define DROPPED(p, err, ...)                                                                       \
    add_line((p)->plan, &(p)->plan->dropped, &(p)->plan->n_dropped, &(p)->cap_dropped, err,        \
             __VA_ARGS__)
#define LOSSY(p, err, ...)                                                                         \
    add_line((p)->plan, &(p)->plan->lossy, &(p)->plan->n_lossy, &(p)->cap_lossy, err, __VA_ARGS__)
#define WARN(p, err, ...)                                                                          \
    add_line((p)->plan, &(p)->plan->warnings, &(p)->plan->n_warnings, &(p)->cap_warnings, err,     \
             __VA_ARGS__)
#define NOT_CAST(p, err, ...)                                                                      \
    add_line((p)->plan, &(p)->plan->not_cast, &(p)->plan->n_not_cast, &(p)->cap_not_cast, err,     \
             __VA_ARGS__)

/* ---- selection --------------------------------------------------------------------------------- */

static bool any_glob(const char *const *globs, size_t n, const char *a, const char *b)
{
    for (size_t i = 0; i < n; i++)
        if (fnmatch(globs[i], a, 0) == 0 || fnmatch(globs[i], b, 0) == 0)
            return true;
    return false;
}

static ckpt_status push_item(planner *p, const ckpt_canon *c, int64_t index, ckpt_err *err)
{
    void *items = p->items;
    ckpt_status status =
        ckpt_grow(&items, &p->cap_items, p->n_items + 1, sizeof *p->items, err);
    p->items = items;
    if (status == CKPT_OK)
        p->items[p->n_items++] = (item){.canon = *c, .model_tensor = index, .dtype = c->dtype};
    return status;
}

static ckpt_status select_items(planner *p, ckpt_err *err)
{
    const ckpt_convert_opts *o = p->opts;
    size_t left_out = 0;
    for (size_t i = 0; i < p->model->n_tensors; i++) {
        const ckpt_canon *c = &p->model->tensors[i];
        const char *stored = p->model->src->tensors[c->stored].name;
        if ((o->n_include > 0 && !any_glob(o->include, o->n_include, c->name, stored)) ||
            any_glob(o->exclude, o->n_exclude, c->name, stored)) {
            left_out++;
            continue;
        }
        ckpt_status status = push_item(p, c, (int64_t)i, err);
        if (status != CKPT_OK)
            return status;
    }
    if (p->n_items == 0 && p->model->n_tensors > 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--include and --exclude leave no tensor");
    if (left_out > 0)
        return DROPPED(p, err, "%zu tensors left out by --include/--exclude", left_out);
    return CKPT_OK;
}

/* ---- low-rank projections ---------------------------------------------------------------------- */

static item *find_item(planner *p, const char *name)
{
    for (size_t i = 0; i < p->n_items; i++)
        if (!p->items[i].dropped && strcmp(p->items[i].canon.name, name) == 0)
            return &p->items[i];
    return NULL;
}

/* Replace X_a and X_b of one block by X = X_b . X_a. */
static ckpt_status fold_one(planner *p, size_t index, char which, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_canon a = p->items[index].canon;
    int stem = (int)(strlen(a.name) - strlen("_a.weight"));
    const char *b_name = ckpt_arena_printf(arena, "%.*s_b.weight", stem, a.name);
    const char *name = ckpt_arena_printf(arena, "%.*s.weight", stem, a.name);
    const char *bias = ckpt_arena_printf(arena, "%.*s_b.bias", stem, a.name);
    if (b_name == NULL || name == NULL || bias == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    item *b = find_item(p, b_name);
    if (b == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' has no partner '%s'", a.name, b_name);
    if (find_item(p, bias) != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' has a bias and cannot be folded", b_name);
    ckpt_derived *d;
    CKPT_TRY(ckpt_derive_fold(p->model, &a, &b->canon, name, arena, &d, err), "'%s'", name);
    ckpt_canon full = {.name = name, .dims = d->tensor.dims, .rank = 2, .dtype = a.dtype,
                       .block = a.block, .flags = a.flags, .derived = d};
    ckpt_axis *axis = ckpt_arena_array(arena, 2, sizeof *axis);
    if (axis == NULL ||
        !ckpt_dtype_bytes(a.dtype, d->rows * d->cols, &full.bytes))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int i = 0; i < 2; i++)
        axis[i] = (ckpt_axis){.size = full.dims[i], .len = full.dims[i], .dim = i};
    full.map = (ckpt_map){axis, 2};
    p->items[index].dropped = true;
    b->dropped = true;
    CKPT_CHECK(LOSSY(p, err, "%s = %c_b . %c_a: rank %lld folded to a full matrix, summed in double, "
                     "rounded once to %s", name, which, which, (long long)d->inner,
                     ckpt_dtype_get(a.dtype)->name));
    CKPT_CHECK(push_item(p, &full, -1, err));
done:
    return status;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* One of the two gates: which = 'f' (decay) or 'g' (output). */
static ckpt_status settle_rank(planner *p, char which, bool fold, int64_t want, ckpt_err *err)
{
    char low_tail[24], full_tail[24];
    const char *option = which == 'f' ? "--kda-f-lora-rank" : "--kda-gate-lora-rank";
    snprintf(low_tail, sizeof low_tail, ".kda.%c_a.weight", which);
    snprintf(full_tail, sizeof full_tail, ".kda.%c.weight", which);
    if (!fold && want == 0)
        return CKPT_OK;
    size_t n = p->n_items;
    for (size_t i = 0; i < n; i++) {
        const ckpt_canon *c = &p->items[i].canon;
        if (want > 0 && ends_with(c->name, full_tail))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' is full rank: %s %lld needs a truncated SVD, which is not built "
                             "yet", c->name, option, (long long)want);
        if (p->items[i].dropped || !ends_with(c->name, low_tail))
            continue;
        if (want > 0 && c->dims[0] != want)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' has rank %lld: changing it to %lld is not built yet", c->name,
                             (long long)c->dims[0], (long long)want);
        if (want > 0)
            continue;
        if (!p->opts->approximate)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s': folding rank %lld to a full matrix is not exact and cannot be "
                             "undone; --approximate permits it", c->name, (long long)c->dims[0]);
        p->folded = true;
        ckpt_status status = fold_one(p, i, which, err);
        if (status != CKPT_OK)
            return status;
    }
    if (fold)
        ckpt_json_delete(p->plan->canon_config, which == 'f' ? "kda_f_rank" : "kda_gate_rank");
    return CKPT_OK;
}

/* kda=fused needs both gates full rank in every block; a mixture has no Megatron form. */
static ckpt_status shape_choices(planner *p, ckpt_err *err)
{
    const char *low = NULL;
    const char *full_f = NULL, *low_f = NULL, *full_g = NULL, *low_g = NULL;
    for (size_t i = 0; i < p->n_items; i++) {
        const char *name = p->items[i].canon.name;
        if (p->items[i].dropped)
            continue;
        if (ends_with(name, ".kda.f_a.weight"))
            low = low_f = name;
        else if (ends_with(name, ".kda.g_a.weight"))
            low = low_g = name;
        else if (ends_with(name, ".kda.f.weight"))
            full_f = name;
        else if (ends_with(name, ".kda.g.weight"))
            full_g = name;
    }
    if (full_f != NULL && low_f != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is low rank but '%s' is not", low_f,
                         full_f);
    if (full_g != NULL && low_g != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is low rank but '%s' is not", low_g,
                         full_g);
    p->shape_tags = low != NULL ? "kda=split" : "kda=fused";
    return CKPT_OK;
}

/* ---- target rows ------------------------------------------------------------------------------- */

/* Does `tags` (comma-separated) decide the group of `tag`? -1 no word, 0 another choice, 1 chosen. */
static int tag_verdict(const char *tags, const char *tag)
{
    size_t group = strcspn(tag, "=") + 1;
    for (const char *t = tags; t != NULL && *t != '\0';) {
        size_t n = strcspn(t, ",");
        if (n >= group && memcmp(t, tag, group) == 0)
            return n == strlen(tag) && memcmp(t, tag, n) == 0;
        t += n + (t[n] == ',');
    }
    return -1;
}

/* Words in order of authority: the tensors themselves, the user, the source if it has this very
 * layout, the layout's defaults; a group nobody mentions allows every row. */
static bool tag_chosen(const planner *p, const char *tag)
{
    const char *words[] = {p->shape_tags, p->opts->tags,
                           p->same_layout ? p->model->tags : NULL, p->layout->default_tags};
    if (tag == NULL)
        return true;
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        int verdict = tag_verdict(words[i], tag);
        if (verdict >= 0)
            return verdict == 1;
    }
    return true;
}

static const char *apply_renames(planner *p, const char *name)
{
    for (size_t i = 0; i < p->opts->n_rename; i++) {
        const char *rule = p->opts->rename[i], *eq = strchr(rule, '=');
        const char *star = eq != NULL ? memchr(rule, '*', (size_t)(eq - rule)) : NULL;
        if (eq == NULL)
            continue;
        size_t n = strlen(name), from = (size_t)(eq - rule);
        if (star == NULL) {
            if (n == from && memcmp(name, rule, n) == 0)
                return eq + 1;
            continue;
        }
        size_t head = (size_t)(star - rule), tail = from - head - 1;
        if (n < head + tail || memcmp(name, rule, head) != 0 ||
            memcmp(name + n - tail, star + 1, tail) != 0)
            continue;
        const char *to = eq + 1, *to_star = strchr(to, '*');
        if (to_star == NULL)
            return to;
        return ckpt_arena_printf(&p->plan->arena, "%.*s%.*s%s", (int)(to_star - to), to,
                                 (int)(n - head - tail), name + head, to_star + 1);
    }
    return name;
}

static ckpt_status place_row(planner *p, item *it, const ckpt_row *row, int64_t l, int64_t e,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    ckpt_view_out view;
    ckpt_view_in in = {.view = row->view, .e = e, .rank = it->canon.rank, .hint = it->canon.dims,
                       .syms = &p->syms};
    CKPT_TRY(ckpt_view_build(&in, arena, &view, err), "tensor '%s'", it->canon.name);
    it->row = row;
    it->map = view.map;
    it->rank = view.rank;
    it->dims = ckpt_arena_memdup(arena, view.dims, (size_t)view.rank * sizeof view.dims[0]);
    const char *stored = ckpt_pattern_format(arena, row->stored, l, e);
    it->stored = stored != NULL ? apply_renames(p, stored) : NULL;
    if (it->stored == NULL || it->dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    int64_t volume = 1, want = 1;
    for (int i = 0; i < it->map.n; i++)
        volume *= it->map.axis[i].len;
    for (int d = 0; d < it->canon.rank; d++)
        want *= it->canon.dims[d];
    if (volume != want)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s' has %lld elements, target '%s' takes %lld", it->canon.name,
                         (long long)want, it->stored, (long long)volume);
done:
    return status;
}

/* Keep a tensor whole under its own stored name. */
static ckpt_status place_whole(planner *p, item *it, ckpt_err *err)
{
    ckpt_arena *arena = &p->plan->arena;
    const ckpt_tensor *t = ckpt_canon_tensor(p->model->src, &it->canon);
    ckpt_axis *axis = ckpt_arena_array(arena, (size_t)it->canon.rank + 1, sizeof *axis);
    if (axis == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    it->rank = it->canon.rank;
    it->dims = it->canon.dims;
    for (int d = 0; d < it->rank; d++)
        axis[d] = (ckpt_axis){.size = it->dims[d], .len = it->dims[d], .dim = d};
    it->map = (ckpt_map){axis, it->rank};
    it->stored = apply_renames(p, t->name);
    return it->stored != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static ckpt_status place_one(planner *p, item *it, bool *placed, ckpt_err *err)
{
    *placed = true;
    if (p->layout == NULL)
        return place_whole(p, it, err);
    for (size_t r = 0; r < p->layout->n_rows; r++) {
        const ckpt_row *row = &p->layout->rows[r];
        int64_t l, e;
        if (tag_chosen(p, row->tag) &&
            ckpt_pattern_match_canon(row->canon, it->canon.name, &l, &e))
            return place_row(p, it, row, l, e, err);
    }
    /* No row for this spelling of the name; extras of the same layout stay what they are. */
    *placed = (it->canon.extra && p->same_layout) || p->opts->allow_unknown;
    return *placed ? place_whole(p, it, err) : CKPT_OK;
}

static ckpt_status place_items(planner *p, ckpt_err *err)
{
    ckpt_buf text = {0};
    size_t homeless = 0;
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < p->n_items; i++) {
        item *it = &p->items[i];
        bool placed;
        if (it->dropped)
            continue;
        CKPT_CHECK(place_one(p, it, &placed, err));
        if (placed)
            continue;
        if (homeless < 8)
            ckpt_buf_printf(&text, "%s'%s' (%s)", homeless > 0 ? ", " : "",
                            ckpt_canon_tensor(p->model->src, &it->canon)->name, it->canon.name);
        homeless++;
    }
    if (homeless > 8)
        ckpt_buf_printf(&text, " and %zu more", homeless - 8);
    if (homeless > 0)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "layout %s has no place for %s; --allow-unknown carries %s through",
                           p->layout->name, (const char *)text.data,
                           homeless == 1 ? "it" : "them");
done:
    ckpt_buf_release(&text);
    return status;
}

/* ---- casts ------------------------------------------------------------------------------------- */

static ckpt_status settle_dtypes(planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (p->opts->cast != CKPT_CAST_TO)
        return CKPT_OK;
    for (size_t i = 0; i < p->n_items; i++) {
        item *it = &p->items[i];
        const ckpt_dtype_info *info = ckpt_dtype_get(it->canon.dtype);
        if (it->dropped || it->canon.dtype == p->opts->dtype)
            continue;
        if (info->kind != CKPT_KIND_FLOAT)
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (%s)", it->canon.name,
                                info->kind == CKPT_KIND_BOOL      ? "bool"
                                : info->kind == CKPT_KIND_COMPLEX ? "complex"
                                                                  : "integer"));
        else if (!ckpt_dtype_castable(it->canon.dtype, p->opts->dtype))
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (%s)", it->canon.name, info->name));
        else if ((it->canon.flags & CKPT_SCHEMA_KEEP_F32) != 0 && !p->opts->dtype_force)
            CKPT_CHECK(NOT_CAST(p, err, "%s: not cast (kept %s; --dtype-force overrides)",
                                it->canon.name, info->name));
        else
            it->dtype = p->opts->dtype;
    }
done:
    return status;
}

/* ---- out tensors ------------------------------------------------------------------------------- */

static int item_order(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->dropped != y->dropped)
        return x->dropped ? 1 : -1;
    int c = x->dropped ? 0 : strcmp(x->stored, y->stored);
    return c != 0 ? c : strcmp(x->canon.name, y->canon.name);
}

static bool same_view(const item *a, const item *b)
{
    if (a->map.n != b->map.n || a->rank != b->rank)
        return false;
    for (int i = 0; i < a->map.n; i++)
        if (a->map.axis[i].size != b->map.axis[i].size ||
            a->map.axis[i].dim != b->map.axis[i].dim || a->map.axis[i].cut != b->map.axis[i].cut)
            return false;
    return true;
}

/* The part of a padded axis beyond the box, as a map; false if the view has no padding. */
static bool pad_map(const ckpt_row *row, const ckpt_map *map, ckpt_arena *arena, ckpt_map *out)
{
    if (row == NULL || strchr(row->view, '<') == NULL)
        return false;
    ckpt_axis *axis = ckpt_arena_memdup(arena, map->axis, (size_t)map->n * sizeof *axis);
    for (int i = 0; axis != NULL && i < map->n; i++)
        if (axis[i].lo == 0 && axis[i].len < axis[i].size && strchr(row->view, '<') != NULL) {
            axis[i].lo = axis[i].len;
            axis[i].len = axis[i].size - axis[i].lo;
            *out = (ckpt_map){axis, map->n};
            return true;
        }
    return false;
}

/* Prove that the boxes of items [first, last) and the padding tile the target tensor. */
static ckpt_status check_tiling(planner *p, size_t first, size_t last, const ckpt_map *pad,
                                ckpt_err *err)
{
    const item *it = &p->items[first];
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
    ckpt_tensor t = {.name = it->stored, .dims = sizes, .chunks = chunks, .n_chunks = count,
                     .dtype = CKPT_U8, .rank = n};
    status = ckpt_tensor_check(&fake, &t, err);
    if (status == CKPT_E_FORMAT)
        status = err != NULL ? (err->code = CKPT_E_UNSUPPORTED) : CKPT_E_UNSUPPORTED;
done:
    free(numbers);
    free(chunks);
    return status;
}

static int stage_of(const planner *p, const ckpt_canon *c)
{
    const ckpt_mesh *mesh = &p->opts->mesh;
    if (c->block >= 0)
        return ckpt_mesh_stage(mesh, c->block, p->model->n_blocks);
    bool tail = strncmp(c->name, "final_norm.", 11) == 0 || strncmp(c->name, "head.", 5) == 0;
    return tail ? mesh->pp - 1 : 0;
}

/* Fill the gathers of one out tensor's chunks from items [first, last). */
static ckpt_status build_chunks(planner *p, ckpt_out_tensor *t, ckpt_gather *gathers, size_t first,
                                size_t last, const ckpt_map *pad, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena *arena = &p->plan->arena;
    const item *it = &p->items[first];
    for (size_t c = 0; c < t->n_chunks; c++) {
        ckpt_copies copies = {0};
        ckpt_gather *g = &gathers[c];
        int64_t numel, pad_volume = 0;
        uint64_t covered = 0, part, pad_bytes = 0;
        const ckpt_tensor *from = ckpt_canon_tensor(p->model->src, &it->canon);
        *g = (ckpt_gather){.from = it->canon.dtype, .to = it->dtype, .swap = from->big_endian,
                           .derived = it->canon.derived};
        if (!ckpt_numel(t->rank, t->chunks[c].len, &numel) ||
            !ckpt_dtype_bytes(it->canon.dtype, numel, &g->bytes))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%s': %s elements cannot be cut here",
                             t->name, ckpt_dtype_get(it->canon.dtype)->name);
        ckpt_dst dst = {.rank = t->rank, .dims = t->dims, .lo = t->chunks[c].lo,
                        .len = t->chunks[c].len};
        for (size_t k = first; k < last; k++) {
            dst.map = &p->items[k].map;
            status = ckpt_gather_add(p->model->src, &p->items[k].canon, &dst, arena, &copies,
                                     &part, err);
            if (status != CKPT_OK) {
                free(copies.copies);
                ckpt_err_frame(err, "tensor '%s'", t->name);
                return status;
            }
            covered += part;
        }
        if (pad != NULL) {
            dst.map = pad;
            CKPT_CHECK(ckpt_box_volume(pad, &dst, &pad_volume, err));
            (void)ckpt_dtype_bytes(it->canon.dtype, pad_volume, &pad_bytes);
        }
        g->pad = pad_bytes;
        if (covered + pad_bytes != g->bytes) {
            free(copies.copies);
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "tensor '%s': %llu of %llu bytes of a chunk have a source", t->name,
                             (unsigned long long)covered,
                             (unsigned long long)(g->bytes - pad_bytes));
        }
        CKPT_CHECK(ckpt_gather_seal(&copies, arena, g, err));
    }
done:
    return status;
}

/* Items [first, last) share a target stored name: make the out tensor and its chunks. */
static ckpt_status build_out(planner *p, size_t first, size_t last, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    item *it = &p->items[first];
    for (size_t k = first; k < last; k++) {
        const item *other = &p->items[k];
        const ckpt_tensor *a = ckpt_canon_tensor(p->model->src, &it->canon);
        const ckpt_tensor *b = ckpt_canon_tensor(p->model->src, &other->canon);
        if (!same_view(it, other) || (other->row == NULL && k != first))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' and '%s' would both become '%s'",
                             a->name, b->name, it->stored);
        if (other->canon.dtype != it->canon.dtype || other->dtype != it->dtype ||
            a->big_endian != b->big_endian ||
            (other->canon.derived != NULL && other->canon.derived != it->canon.derived))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s' is %s but '%s' is %s: they share target tensor '%s'", a->name,
                             ckpt_dtype_get(it->canon.dtype)->name, b->name,
                             ckpt_dtype_get(other->canon.dtype)->name, it->stored);
        p->items[k].out = (uint32_t)plan->out.n_tensors;
    }
    ckpt_map pad_box, *pad = pad_map(it->row, &it->map, &plan->arena, &pad_box) ? &pad_box : NULL;
    ckpt_out_tensor *t = &plan->out.tensors[plan->out.n_tensors];
    *t = (ckpt_out_tensor){.name = it->stored, .dims = it->dims, .dtype = it->dtype,
                           .rank = it->rank};
    CKPT_CHECK(check_tiling(p, first, last, pad, err));
    const ckpt_mesh *mesh = p->opts->sharded && it->row != NULL ? &p->opts->mesh : NULL;
    int stage = p->opts->sharded ? stage_of(p, &it->canon) : 0;
    bool inside = false;
    CKPT_TRY(ckpt_shard_cut(mesh, stage, it->rank, it->dims, &it->map, &plan->arena, &t->chunks,
                            &t->n_chunks, &inside, err),
             "tensor '%s'", it->stored);
    if (inside && !p->warned_heads) {
        p->warned_heads = true;
        CKPT_CHECK(WARN(p, err, "TP %d exceeds the heads of '%s': stored cut inside heads or whole; "
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

static ckpt_status build_outs(planner *p, ckpt_err *err)
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

static ckpt_status build_results(planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    plan->results = ckpt_arena_array(&plan->arena, p->n_items, sizeof *plan->results);
    if (plan->results == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < p->n_items; i++) {
        const item *it = &p->items[i];
        ckpt_result_tensor *r = &plan->results[plan->n_results++];
        *r = (ckpt_result_tensor){.name = it->canon.name, .stored = it->stored, .dtype = it->dtype,
                                  .rank = it->canon.rank, .dims = it->canon.dims,
                                  .out_tensor = it->out, .model_tensor = it->model_tensor};
        CKPT_CHECK(ckpt_gather_canon(p->model->src, &it->canon, &plan->arena, &r->gather, err));
        if (it->dtype != it->canon.dtype) {
            r->original = r->gather;
            r->gather.to = it->dtype;
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
static ckpt_status say_dtype(planner *p, ckpt_err *err)
{
    int64_t embed = ckpt_model_find(p->model, "embed.weight");
    bool cast = p->opts->cast == CKPT_CAST_TO;
    if (p->plan->config == NULL || (p->same_layout && !p->folded && !cast) || (!cast && embed < 0))
        return CKPT_OK;
    ckpt_dtype dtype = cast ? p->opts->dtype : p->model->tensors[embed].dtype;
    return ckpt_config_set_dtype(p->plan->config, p->plan->out.config_kind,
                                 ckpt_dtype_get(dtype)->torch, err);
}

static ckpt_status settle_config(planner *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_plan *plan = p->plan;
    const ckpt_source *src = p->model->src;
    if (p->layout == NULL || (p->same_layout && !p->folded)) {
        plan->config = ckpt_json_dup(src->config);
        plan->out.config_kind = src->config_kind;
        if (src->config != NULL && plan->config == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    } else if (p->layout->config_write != NULL) {
        const ckpt_json *foreign = p->same_layout ? src->config : p->opts->foreign_config;
        CKPT_TRY(p->layout->config_write(plan->canon_config, foreign, &p->opts->mesh,
                                         &plan->config, err),
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
static ckpt_status settle_vocab(planner *p, ckpt_err *err)
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

/* Small objects are held in memory: containers may need to look at them (common state). */
static ckpt_status carry_objects(planner *p, ckpt_err *err)
{
    uint64_t loaded = 0;
    ckpt_plan *plan = p->plan;
    const ckpt_source *src = p->model->src;
    bool carry = strcmp(p->opts->container->name, "torch_dist") == 0 && p->same_layout &&
                 src->container == p->opts->container;
    for (size_t i = 0; i < src->n_objects; i++)
        if (src->objects[i].unknown_global != NULL && !p->opts->allow_unknown_objects)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "object '%s' uses unknown class %s; --allow-unknown-objects carries "
                             "its bytes through",
                             src->objects[i].name, src->objects[i].unknown_global);
    if (!carry) {
        if (src->n_objects == 0)
            return CKPT_OK;
        return DROPPED(p, err, "%zu objects of the source (%s%s) have no place in the target",
                       src->n_objects, src->objects[0].name, src->n_objects > 1 ? ", …" : "");
    }
    plan->out.objects = ckpt_arena_array(&plan->arena, src->n_objects, sizeof *plan->out.objects);
    if (plan->out.objects == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        ckpt_out_object *out = &plan->out.objects[plan->out.n_objects++];
        *out = (ckpt_out_object){
            .name = o->name, .src_file = o->file, .src_offset = o->offset, .length = o->length};
        if (o->length > OBJECT_IN_MEMORY || loaded + o->length > OBJECTS_IN_MEMORY)
            continue;
        uint8_t *data = ckpt_arena_alloc(&plan->arena, (size_t)o->length + 1);
        if (data == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        ckpt_status status = ckpt_source_read(p->model->src, o->file, data, (size_t)o->length,
                                              o->offset, err);
        if (status != CKPT_OK) {
            ckpt_err_frame(err, "object '%s'", o->name);
            return status;
        }
        out->data = data;
        loaded += o->length;
    }
    return CKPT_OK;
}

static bool layout_cuts(const ckpt_layout *layout)
{
    for (size_t r = 0; layout != NULL && r < layout->n_rows; r++)
        if (strchr(layout->rows[r].view, '@') != NULL)
            return true;
    return false;
}

static ckpt_status check_mesh(planner *p, ckpt_err *err)
{
    const ckpt_mesh *mesh = &p->opts->mesh;
    if (ckpt_mesh_world(mesh) == 1)
        return CKPT_OK;
    if (!p->opts->sharded)
        return ckpt_fail(err, CKPT_E_USAGE, "container %s is not sharded: --tp, --pp, --ep, --etp "
                                            "and --cp need --to torch_dist",
                         p->opts->container->name);
    if (!layout_cuts(p->layout))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "layout %s does not say how tensors are cut: a mesh needs --layout "
                         "megatron", p->layout != NULL ? p->layout->name : "(none)");
    return ckpt_mesh_check_blocks(mesh, p->model->n_blocks, err);
}

ckpt_status ckpt_plan_convert(ckpt_plan *plan, ckpt_model *model, const ckpt_convert_opts *opts,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    *plan = (ckpt_plan){.model = model};
    planner p = {.plan = plan, .model = model, .opts = opts, .syms = model->syms,
                 .layout = opts->layout != NULL ? opts->layout : model->layout};
    p.same_layout = p.layout == model->layout;
    plan->canon_config = ckpt_json_dup(model->config);
    if (p.layout != NULL && model->layout == NULL) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "the source is of no known family, so it cannot become layout %s",
                           p.layout->name);
        goto done;
    }
    CKPT_CHECK(check_mesh(&p, err));
    CKPT_CHECK(select_items(&p, err));
    CKPT_CHECK(settle_rank(&p, 'f', opts->fold_f, opts->f_rank, err));
    CKPT_CHECK(settle_rank(&p, 'g', opts->fold_g, opts->g_rank, err));
    CKPT_CHECK(shape_choices(&p, err));
    CKPT_CHECK(settle_config(&p, err));
    CKPT_CHECK(settle_vocab(&p, err));
    CKPT_CHECK(place_items(&p, err));
    CKPT_CHECK(settle_dtypes(&p, err));
    CKPT_CHECK(build_outs(&p, err));
    CKPT_CHECK(build_results(&p, err));
    CKPT_CHECK(carry_objects(&p, err));
    plan->out.world = opts->sharded ? ckpt_mesh_world(&opts->mesh) : 1;
    plan->out.max_shard_bytes = opts->max_shard_bytes;
    plan->out.single_file = opts->single_file;
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
    free(plan->lossy);
    free(plan->dropped);
    free(plan->not_cast);
    free(plan->warnings);
    ckpt_json_free(plan->config);
    ckpt_json_free(plan->canon_config);
    ckpt_arena_free(&plan->sink.arena);
    ckpt_arena_free(&plan->arena);
    *plan = (ckpt_plan){0};
}
