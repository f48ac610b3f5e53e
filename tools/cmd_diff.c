/* ckpt diff: what differs between two checkpoints, tensor by tensor, whatever their containers,
 * layouts and meshes. Equality is bitwise unless a tolerance is given. */
#include "numbers.h"
#include "tool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct diff_opts {
    bool objects;
    double atol, rtol;
    ckpt_strings include, exclude;
    int64_t limit;
} diff_opts;

#define AT(field) offsetof(diff_opts, field)
static const ckpt_opt rows[] = {
    {"objects", CKPT_OPT_FLAG, AT(objects), NULL,   "compare pickled objects byte by byte as well", 0,
     0                                                                                                  },
    {"atol",    CKPT_OPT_REAL, AT(atol),    "X",
     "equal when |a-b| <= atol + rtol*|b| (default 0: bitwise)",                                    0, 0},
    {"rtol",    CKPT_OPT_REAL, AT(rtol),    "X",    "relative part of the tolerance",               0, 0},
    {"include", CKPT_OPT_LIST, AT(include), "GLOB",
     "only tensors whose stored or canonical name matches; repeatable",                             0, 0},
    {"exclude", CKPT_OPT_LIST, AT(exclude), "GLOB", "leave matching tensors out; repeatable",       0, 0},
    {"limit",   CKPT_OPT_INT,  AT(limit),   "N",    "show at most N differences (default: all)",    0,
     INT64_MAX                                                                                          },
    {NULL,      CKPT_OPT_FLAG, 0,           NULL,   NULL,                                           0, 0},
};
#undef AT

typedef enum kind { SAME, WITHIN, ONLY_A, ONLY_B, SHAPE, DTYPE, VALUE, OBJECT, N_KINDS } kind;
static const char *const kind_names[N_KINDS] = {
    "identical", "within tolerance", "only in A", "only in B", "shape", "dtype", "value", "object"};
static const char *const kind_keys[N_KINDS] = {
    "identical", "within_tolerance", "only_a", "only_b", "shape", "dtype", "value", "object"};

typedef struct entry {
    const char *name;
    kind kind;
    int64_t a, b; /* indices in the models, -1 absent; unused for objects */
} entry;

typedef struct comparison {
    ckpt_tool *tool;
    const diff_opts *o;
    ckpt_source src[2];
    ckpt_model model[2];
    entry *entries;
    size_t n_entries, cap_entries;
    int64_t *other;    /* per tensor of A: pair in B whose bytes are compared, or -1 */
    bool *select;      /* per tensor of A */
    bool *unequal;     /* per tensor of A: some byte differs */
    int64_t *entry_of; /* per tensor of A */
    ckpt_delta *delta; /* per tensor of A */
    size_t count[N_KINDS];
    const char **notes;
    size_t n_notes, cap_notes;
} comparison;

static ckpt_status add_entry(comparison *c, entry e, ckpt_err *err)
{
    void *entries = c->entries;
    ckpt_status status =
        ckpt_grow(&entries, &c->cap_entries, c->n_entries + 1, sizeof *c->entries, err);
    c->entries = entries;
    if (status == CKPT_OK)
        c->entries[c->n_entries++] = e;
    return status;
}

static ckpt_status add_note(comparison *c, const char *text, ckpt_err *err)
{
    void *notes = c->notes;
    ckpt_status status = ckpt_grow(&notes, &c->cap_notes, c->n_notes + 1, sizeof *c->notes, err);
    c->notes = notes;
    if (status == CKPT_OK && text != NULL)
        c->notes[c->n_notes++] = text;
    return text != NULL ? status : ckpt_tool_no_memory(err);
}

/* ---- opening and pairing --------------------------------------------------------------------- */

static ckpt_status rebind_plain(comparison *c, int side, ckpt_err *err)
{
    ckpt_model_opts bind = {.layout_group = "", .allow_unknown = true, .lenient = true};
    ckpt_model_release(&c->model[side]);
    return ckpt_tool_bind(c->tool, &c->model[side], &c->src[side], &bind, err);
}

/* The same stored tensors need no canonical names. */
static bool same_stored_names(const comparison *c)
{
    const ckpt_source *a = &c->src[0], *b = &c->src[1];
    if (a->n_tensors != b->n_tensors)
        return false;
    for (size_t i = 0; i < a->n_tensors; i++)
        if (strcmp(a->tensors[i].name, b->tensors[i].name) != 0)
            return false;
    return true;
}

static ckpt_status note_partial(comparison *c, int side, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_model *m = &c->model[side];
    for (size_t i = 0; status == CKPT_OK && i < m->n_notes; i++)
        if (strncmp(m->notes[i], "partial: ", 9) == 0)
            status = add_note(
                c,
                ckpt_arena_printf(&c->tool->arena, "%s is %s", side == 0 ? "A" : "B", m->notes[i]),
                err);
    return status;
}

/* A side that states no configuration may be readable only as the other one is. */
static ckpt_status read_alike(comparison *c, int side, ckpt_err *err)
{
    bool as_like = false;
    const ckpt_model *like = &c->model[1 - side];
    ckpt_model_opts bind = {.allow_unknown = true, .lenient = true};
    if (c->model[side].layout != NULL || like->layout == NULL)
        return CKPT_OK;
    ckpt_model_release(&c->model[side]);
    ckpt_status status =
        ckpt_tool_bind_like(c->tool, &c->model[side], &c->src[side], &bind, like, &as_like, err);
    if (status != CKPT_OK || !as_like)
        return status;
    return add_note(
        c,
        ckpt_arena_printf(&c->tool->arena, "%s states no configuration: read as %s's, %s",
                          side == 0 ? "A" : "B", side == 0 ? "B" : "A", like->layout->name),
        err);
}

static ckpt_status open_both(comparison *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_model_opts bind = {.allow_unknown = true, .lenient = true};
    for (int s = 0; s < 2; s++) {
        CKPT_CHECK(ckpt_tool_open(c->tool, &c->src[s], c->tool->operands.items[s], -1, err));
        ckpt_tool_warnings(c->tool, &c->src[s]);
        CKPT_CHECK(ckpt_tool_bind(c->tool, &c->model[s], &c->src[s], &bind, err));
        CKPT_CHECK(note_partial(c, s, err));
    }
    for (int s = 0; s < 2; s++)
        CKPT_CHECK(read_alike(c, s, err));
    const ckpt_layout *a = c->model[0].layout, *b = c->model[1].layout;
    bool comparable = a != NULL && b != NULL && strcmp(a->family, b->family) == 0;
    if (!comparable && (a != NULL || b != NULL)) {
        if (a != NULL && b == NULL && !same_stored_names(c))
            CKPT_CHECK(add_note(c, "B has no known layout: names are compared as stored", err));
        else if (a == NULL && !same_stored_names(c))
            CKPT_CHECK(add_note(c, "A has no known layout: names are compared as stored", err));
        for (int s = 0; s < 2; s++)
            if (c->model[s].layout != NULL)
                CKPT_CHECK(rebind_plain(c, s, err));
    }
done:
    return status;
}

static kind compare_headers(const ckpt_canon *a, const ckpt_canon *b)
{
    bool same = a->rank == b->rank;
    for (int d = 0; same && d < a->rank; d++)
        same = a->dims[d] == b->dims[d];
    if (!same)
        return SHAPE;
    return a->dtype == b->dtype ? SAME : DTYPE;
}

static ckpt_status pair(comparison *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_model *a = &c->model[0], *b = &c->model[1];
    size_t i = 0, j = 0;
    while (i < a->n_tensors || j < b->n_tensors) {
        int order = i == a->n_tensors   ? 1
                    : j == b->n_tensors ? -1
                                        : strcmp(a->tensors[i].name, b->tensors[j].name);
        bool in_a = order <= 0 && ckpt_tool_selected(a, i, &c->o->include, &c->o->exclude);
        bool in_b = order >= 0 && ckpt_tool_selected(b, j, &c->o->include, &c->o->exclude);
        entry e = {order <= 0 ? a->tensors[i].name : b->tensors[j].name, SAME, -1, -1};
        if (order == 0 && (in_a || in_b)) {
            e.a = (int64_t)i;
            e.b = (int64_t)j;
            e.kind = compare_headers(&a->tensors[i], &b->tensors[j]);
            c->other[i] = e.kind == SAME ? e.b : -1;
            c->entry_of[i] = (int64_t)c->n_entries;
            CKPT_CHECK(add_entry(c, e, err));
        } else if (in_a) {
            e.a = (int64_t)i;
            e.kind = ONLY_A;
            CKPT_CHECK(add_entry(c, e, err));
        } else if (in_b) {
            e.b = (int64_t)j;
            e.kind = ONLY_B;
            CKPT_CHECK(add_entry(c, e, err));
        }
        i += order <= 0;
        j += order >= 0;
    }
done:
    return status;
}

/* A pattern that is misspelt must not pass for "nothing differs". */
static ckpt_status check_selection(const comparison *c, ckpt_err *err)
{
    const ckpt_strings *lists[] = {&c->o->include, &c->o->exclude};
    ckpt_buf b = {0};
    if (c->n_entries > 0 || lists[0]->n + lists[1]->n == 0)
        return CKPT_OK;
    for (int l = 0; l < 2; l++)
        for (size_t i = 0; i < lists[l]->n; i++)
            ckpt_buf_printf(&b, "%s%s '%s'", b.len > 0 ? ", " : "",
                            l == 0 ? "--include" : "--exclude", lists[l]->items[i]);
    ckpt_status status = ckpt_fail(err, CKPT_E_USAGE, "%s leave%s no tensor on either side%s",
                                   b.data != NULL ? (const char *)b.data : "?",
                                   lists[0]->n + lists[1]->n == 1 ? "s" : "",
                                   ckpt_tool_meant(c->tool, &c->model[0], lists[0]));
    ckpt_buf_release(&b);
    return status;
}

static ckpt_status allocate(comparison *c, ckpt_err *err)
{
    ckpt_arena *arena = &c->tool->arena;
    size_t n = c->model[0].n_tensors + 1;
    c->other = ckpt_arena_array(arena, n, sizeof *c->other);
    c->select = ckpt_arena_array(arena, n, sizeof *c->select);
    c->unequal = ckpt_arena_array(arena, n, sizeof *c->unequal);
    c->entry_of = ckpt_arena_array(arena, n, sizeof *c->entry_of);
    c->delta = ckpt_arena_array(arena, n, sizeof *c->delta);
    if (c->other == NULL || c->select == NULL || c->unequal == NULL || c->entry_of == NULL ||
        c->delta == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++)
        c->other[i] = c->entry_of[i] = -1;
    return CKPT_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */

static ckpt_status compare_bytes(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                                 const uint8_t *b, size_t n, ckpt_err *err)
{
    comparison *c = self;
    (void)lo;
    (void)err;
    c->unequal[tensor] = memcmp(a, b, n) != 0;
    c->select[tensor] = !c->unequal[tensor]; /* the rest of it is measured, not compared */
    return CKPT_OK;
}

static ckpt_status measure(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                           const uint8_t *b, size_t n, ckpt_err *err)
{
    comparison *c = self;
    (void)lo;
    (void)err;
    ckpt_delta_feed(&c->delta[tensor], c->model[0].tensors[tensor].dtype, a, b, n);
    return CKPT_OK;
}

static ckpt_status visit(comparison *c, const char *label, ckpt_visit_fn fn, ckpt_err *err)
{
    ckpt_bar bar;
    ckpt_bar_start(&bar, label, c->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(c->tool, &bar);
    ckpt_status status =
        ckpt_stream_visit(&c->model[0], &c->model[1], c->other, c->select, &opts, fn, c, err);
    ckpt_bar_stop(&bar);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, c->src[0].path);
    return status;
}

/* 6-bit elements straddle the blocks: their bytes are compared, their values not measured. */
static bool measurable(ckpt_dtype dtype)
{
    return ckpt_dtype_get(dtype)->bits != 6;
}

/* Bytes first, because most tensors are equal; numbers only for those that are not. */
static ckpt_status compare_values(comparison *c, ckpt_err *err)
{
    ckpt_status status;
    size_t n = c->model[0].n_tensors, unequal = 0;
    for (size_t i = 0; i < n; i++)
        c->select[i] = c->other[i] >= 0;
    CKPT_CHECK(visit(c, "diff", compare_bytes, err));
    for (size_t i = 0; i < n; i++) {
        c->select[i] = c->unequal[i] && measurable(c->model[0].tensors[i].dtype);
        ckpt_delta_init(&c->delta[i], c->o->atol, c->o->rtol);
        unequal += c->select[i];
    }
    if (unequal > 0)
        CKPT_CHECK(visit(c, "measure", measure, err));
    bool tolerant = c->o->atol > 0 || c->o->rtol > 0;
    for (size_t i = 0; i < n; i++) {
        if (!c->unequal[i])
            continue;
        bool within = tolerant && c->select[i] && c->delta[i].beyond == 0;
        c->entries[c->entry_of[i]].kind = within ? WITHIN : VALUE;
    }
done:
    return status;
}

/* ---- objects --------------------------------------------------------------------------------- */

static ckpt_status same_object(comparison *c, const ckpt_object *a, const ckpt_object *b,
                               bool *same, ckpt_err *err)
{
    enum { BLOCK = 64 * 1024 };
    ckpt_status status = CKPT_OK;
    uint8_t *buf = NULL;
    *same = a->length == b->length;
    if (!*same)
        return CKPT_OK;
    buf = malloc((size_t)2 * BLOCK);
    if (buf == NULL)
        return ckpt_tool_no_memory(err);
    for (uint64_t at = 0; at < a->length && *same; at += BLOCK) {
        size_t n = a->length - at < BLOCK ? (size_t)(a->length - at) : BLOCK;
        CKPT_CHECK(ckpt_source_read(&c->src[0], a->file, buf, n, a->offset + at, err));
        CKPT_CHECK(ckpt_source_read(&c->src[1], b->file, buf + BLOCK, n, b->offset + at, err));
        *same = memcmp(buf, buf + BLOCK, n) == 0;
    }
done:
    free(buf);
    return status;
}

static ckpt_status compare_objects(comparison *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *a = &c->src[0], *b = &c->src[1];
    size_t i = 0, j = 0;
    while (i < a->n_objects || j < b->n_objects) {
        int order = i == a->n_objects   ? 1
                    : j == b->n_objects ? -1
                                        : strcmp(a->objects[i].name, b->objects[j].name);
        entry e = {order <= 0 ? a->objects[i].name : b->objects[j].name, SAME, -1, -1};
        bool same = true;
        if (order == 0)
            CKPT_TRY(same_object(c, &a->objects[i], &b->objects[j], &same, err), "object '%s'",
                     e.name);
        e.kind = order < 0 ? ONLY_A : order > 0 ? ONLY_B : same ? SAME : OBJECT;
        CKPT_CHECK(add_entry(c, e, err));
        i += order <= 0;
        j += order >= 0;
    }
done:
    return status;
}

/* ---- configuration --------------------------------------------------------------------------- */

static ckpt_status note_config(comparison *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *a = c->model[0].config, *b = c->model[1].config;
    if (c->model[0].layout == NULL || c->model[1].layout == NULL || a == NULL || b == NULL)
        return CKPT_OK;
    /* without a stored configuration a side knows only what its tensor shapes tell */
    bool partial = c->src[0].config == NULL || c->src[1].config == NULL;
    for (const ckpt_json *j = ckpt_json_child(a); j != NULL; j = ckpt_json_next(j)) {
        const ckpt_json *k = ckpt_json_get(b, ckpt_json_key(j));
        if (!ckpt_json_equal(j, k) &&
            !(partial && (k == NULL || ckpt_tool_key_is_guess(ckpt_json_key(j)))))
            CKPT_CHECK(add_note(c,
                                ckpt_arena_printf(&c->tool->arena, "configuration: '%s' %s",
                                                  ckpt_json_key(j),
                                                  k == NULL ? "is only in A" : "differs"),
                                err));
    }
    for (const ckpt_json *j = ckpt_json_child(b); !partial && j != NULL; j = ckpt_json_next(j))
        if (ckpt_json_get(a, ckpt_json_key(j)) == NULL)
            CKPT_CHECK(
                add_note(c,
                         ckpt_arena_printf(&c->tool->arena, "configuration: '%s' is only in B",
                                           ckpt_json_key(j)),
                         err));
done:
    return status;
}

/* ---- output ---------------------------------------------------------------------------------- */

static const char *header_text(comparison *c, const ckpt_canon *t)
{
    const char *text = ckpt_arena_printf(&c->tool->arena, "%s %s", ckpt_dtype_get(t->dtype)->name,
                                         ckpt_shape(&c->tool->arena, t->rank, t->dims));
    return text != NULL ? text : "?";
}

static void print_delta(comparison *c, int64_t a)
{
    const ckpt_canon *t = &c->model[0].tensors[a];
    const ckpt_delta *d = &c->delta[a];
    char abs[32], rel[32], rms[32];
    if (!measurable(t->dtype)) {
        printf("bytes differ (%s)", ckpt_dtype_get(t->dtype)->name);
        return;
    }
    ckpt_real_text(d->max_abs, abs);
    snprintf(rel, sizeof rel, "%.3g", d->max_rel);
    snprintf(rms, sizeof rms, "%.3g", ckpt_delta_rms(d));
    printf("max abs %s, max rel %s, rms %s, max ulp %llu, first at %s, %.3g%% changed, "
           "cosine %.12g",
           abs, rel, rms, (unsigned long long)d->max_ulp,
           ckpt_tool_index(&c->tool->arena, t->rank, t->dims, d->first),
           100.0 * (double)d->changed / (double)d->n, ckpt_delta_cosine(d));
}

static void print_entry(comparison *c, const entry *e)
{
    bool color = c->tool->color;
    ckpt_paint paint = e->kind == WITHIN ? CKPT_YELLOW : e->kind == SAME ? CKPT_DIM : CKPT_RED;
    printf("%s%s%s: %s", ckpt_paint_on(color, paint), kind_names[e->kind], ckpt_paint_off(color),
           ckpt_tool_clean(c->tool, e->name));
    if (e->kind == SHAPE || e->kind == DTYPE)
        printf(": %s, %s", header_text(c, &c->model[0].tensors[e->a]),
               header_text(c, &c->model[1].tensors[e->b]));
    if (e->kind == VALUE || e->kind == WITHIN) {
        printf(": ");
        print_delta(c, e->a);
    }
    printf("\n");
}

static bool is_difference(const entry *e)
{
    return e->kind != SAME && e->kind != WITHIN;
}

static bool shown(const comparison *c, const entry *e)
{
    return e->kind != SAME || c->tool->g.verbose;
}

static void print_text(comparison *c)
{
    int64_t left = c->o->limit > 0 ? c->o->limit : INT64_MAX, hidden = 0;
    for (size_t i = 0; i < c->n_notes; i++)
        printf("note: %s\n", ckpt_tool_clean(c->tool, c->notes[i]));
    for (size_t i = 0; i < c->n_entries; i++) {
        if (!shown(c, &c->entries[i]))
            continue;
        if (left-- > 0)
            print_entry(c, &c->entries[i]);
        else
            hidden++;
    }
    if (hidden > 0)
        printf("... and %lld more; --limit 0 shows all\n", (long long)hidden);
    if (c->o->atol > 0 || c->o->rtol > 0)
        printf("tolerance: |a-b| <= %g + %g*|b|\n", c->o->atol, c->o->rtol);
    printf("%zu identical", c->count[SAME]);
    for (int k = 0; k < N_KINDS; k++) {
        const char *differ = c->count[k] == 1 ? "differs" : "differ";
        if (k == SAME || c->count[k] == 0)
            continue;
        printf(", %zu ", c->count[k]);
        if (k == OBJECT)
            printf("object%s %s", ckpt_tool_plural(c->count[k]), differ);
        else if (k == SHAPE || k == DTYPE || k == VALUE)
            printf("%s in %s", differ, kind_names[k]);
        else
            printf("%s", kind_names[k]);
    }
    printf("\n");
}

static void json_entry(comparison *c, const entry *e)
{
    ckpt_jw *w = &c->tool->json;
    const ckpt_canon *a = e->a >= 0 ? &c->model[0].tensors[e->a] : NULL;
    const ckpt_canon *b = e->b >= 0 ? &c->model[1].tensors[e->b] : NULL;
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "name", e->name);
    ckpt_jw_string(w, "kind", kind_keys[e->kind]);
    if (a != NULL) {
        ckpt_jw_string(w, "dtype_a", ckpt_dtype_get(a->dtype)->name);
        ckpt_jw_dims(w, "shape_a", a->rank, a->dims);
    }
    if (b != NULL) {
        ckpt_jw_string(w, "dtype_b", ckpt_dtype_get(b->dtype)->name);
        ckpt_jw_dims(w, "shape_b", b->rank, b->dims);
    }
    if ((e->kind == VALUE || e->kind == WITHIN) && measurable(a->dtype)) {
        const ckpt_delta *d = &c->delta[e->a];
        ckpt_jw_real(w, "max_abs", d->max_abs);
        ckpt_jw_real(w, "max_rel", d->max_rel);
        ckpt_jw_real(w, "rms", ckpt_delta_rms(d));
        ckpt_jw_u64(w, "max_ulp", d->max_ulp);
        ckpt_jw_int(w, "first", d->first);
        ckpt_jw_real(w, "fraction", (double)d->changed / (double)d->n);
        ckpt_jw_real(w, "cosine", ckpt_delta_cosine(d));
    }
    ckpt_jw_close(w, '}');
}

static void write_json(comparison *c)
{
    ckpt_jw *w = &c->tool->json;
    int64_t left = c->o->limit > 0 ? c->o->limit : INT64_MAX;
    ckpt_jw_string(w, "other", c->tool->operands.items[1]);
    ckpt_jw_real(w, "atol", c->o->atol);
    ckpt_jw_real(w, "rtol", c->o->rtol);
    ckpt_jw_open(w, "counts", '{');
    for (int k = 0; k < N_KINDS; k++)
        ckpt_jw_u64(w, kind_keys[k], c->count[k]);
    ckpt_jw_close(w, '}');
    ckpt_jw_open(w, "differences", '[');
    for (size_t i = 0; i < c->n_entries; i++)
        if (shown(c, &c->entries[i]) && left-- > 0)
            json_entry(c, &c->entries[i]);
    ckpt_jw_close(w, ']');
    ckpt_jw_lines(w, "notes", c->notes, c->n_notes);
}

/* ---- the command ----------------------------------------------------------------------------- */

static ckpt_status diff(comparison *c, bool *different, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(open_both(c, err));
    CKPT_CHECK(allocate(c, err));
    CKPT_CHECK(pair(c, err));
    CKPT_CHECK(check_selection(c, err));
    CKPT_CHECK(compare_values(c, err));
    if (c->o->objects)
        CKPT_CHECK(compare_objects(c, err));
    CKPT_CHECK(note_config(c, err));
    for (size_t i = 0; i < c->n_entries; i++) {
        c->count[c->entries[i].kind]++;
        *different |= is_difference(&c->entries[i]);
    }
    if (c->tool->g.json)
        write_json(c);
    else if (!c->tool->g.quiet)
        print_text(c);
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    comparison c = {.tool = tool, .o = opts};
    bool different = false;
    tool->tells_manifest = true;
    ckpt_status status = diff(&c, &different, err);
    if (status == CKPT_OK && different)
        status = CKPT_E_MISMATCH;
    free(c.entries);
    free(c.notes);
    for (int s = 0; s < 2; s++) {
        ckpt_model_release(&c.model[s]);
        ckpt_source_close(&c.src[s]);
    }
    return status;
}

const ckpt_command ckpt_cmd_diff = {
    .name = "diff",
    .synopsis = "A B",
    .what = "compare two checkpoints tensor by tensor",
    .opts = rows,
    .opts_size = sizeof(diff_opts),
    .min_operands = 2,
    .max_operands = 2,
    .only_reads = ckpt_tool_only_reads,
    .run = run,
    .examples = "  ckpt diff kimi/ mg/\n"
                "  ckpt diff a/ b/ --rtol 1e-3 --exclude 'optimizer*'\n",
    .notes = "Tensors pair by canonical name, so containers, layouts and meshes may differ.\n"
             "max rel is |a-b| / max(|a|,|b|); ulp counts representable values in between.\n"
             "Configuration differences are noted but do not change the exit code.\n",
};
