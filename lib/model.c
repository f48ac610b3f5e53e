/* Binding a source to a layout: canonical tensors from matched rows, sizes from shapes. */
#include "checked.h"
#include "derive.h"
#include "gather.h"
#include "model_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPAND_MAX 262144 /* tensors of one stored one: experts times layers */

/* ---- building canonical tensors ---------------------------------------------------------------- */

ckpt_status ckpt_bind_push(ckpt_binder *b, const ckpt_canon *c, ckpt_err *err)
{
    void *p = b->m->tensors;
    ckpt_status status =
        ckpt_grow(&p, &b->cap_tensors, b->m->n_tensors + 1, sizeof *b->m->tensors, err);
    b->m->tensors = p;
    if (status != CKPT_OK)
        return status;
    ckpt_canon *kept = &b->m->tensors[b->m->n_tensors++];
    *kept = *c;
    if (kept->param == NULL)
        kept->param = kept->name;
    return CKPT_OK;
}

ckpt_status ckpt_bind_whole(ckpt_binder *b, uint32_t tensor, const char *name, ckpt_err *err)
{
    const ckpt_tensor *t = &b->m->src->tensors[tensor];
    ckpt_axis *axis = ckpt_arena_array(&b->m->arena, (size_t)t->rank + 1, sizeof *axis);
    if (axis == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int d = 0; d < t->rank; d++)
        axis[d] = (ckpt_axis){.size = t->dims[d], .len = t->dims[d], .dim = d};
    ckpt_canon c = {
        .name = name,
        .dims = t->dims,
        .rank = t->rank,
        .dtype = t->dtype,
        .stored = tensor,
        .map = {axis, t->rank},
        .block = -1,
        .extra = true,
        .derived = ckpt_packed_find(b->m->src, t->name)
    };
    int64_t numel;
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &c.bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': size overflows", t->name);
    ckpt_status status =
        ckpt_push_name(&b->m->extras, &b->m->n_extras, &b->cap_extras, t->name, err);
    return status == CKPT_OK ? ckpt_bind_push(b, &c, err) : status;
}

/* Is a row's kind that of the block it names? */
static bool kind_allows(const ckpt_binder *b, const ckpt_row *row, const ckpt_index *at)
{
    int64_t block;
    const char *word = strchr(row->canon, '}');
    if (strncmp(row->canon, "blocks.{", 8) != 0 || word == NULL)
        return true;
    if (!ckpt_pattern_first(row->canon, &b->m->syms, at, &block) || word[1] != '.')
        return false;
    int kind = ckpt_kind_of(word + 2, strcspn(word + 2, "."));
    return block < 0 || (uint64_t)block >= b->n_blocks || kind == CKPT_NO_KIND ||
           b->block_kind[block] == kind;
}

/* A tensor that this layout does not have may still be known under the same family's other
 * layouts (carried through by an earlier convert): it then keeps its canonical name. */
static const char *foreign_name(ckpt_binder *b, const ckpt_tensor *t, ckpt_err *err)
{
    (void)err;
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        const ckpt_layout *other = ckpt_layouts[i];
        if (other == b->layout || strcmp(other->family, b->layout->family) != 0)
            continue;
        const char *found = NULL;
        size_t hits = 0;
        for (size_t r = 0; r < other->n_rows; r++) {
            ckpt_index at;
            const ckpt_row *row = &other->rows[r];
            if (!ckpt_row_fits(row, t, &at) || strpbrk(row->view, "=[<;") != NULL ||
                ckpt_row_copy_of(row) != NULL || ckpt_tag_verdict(b->choices, row->tag) == 0 ||
                !kind_allows(b, row, &at))
                continue;
            found = ckpt_pattern_format(&b->m->arena, row->canon, &b->m->syms, &at);
            hits++;
        }
        if (hits == 1)
            return found;
    }
    return t->name;
}

static ckpt_status push_unknown(ckpt_binder *b, ckpt_err *err)
{
    for (size_t i = 0; i < b->n_unknown; i++) {
        const ckpt_tensor *t = &b->m->src->tensors[b->unknown[i]];
        const char *name = foreign_name(b, t, err);
        ckpt_status status = ckpt_bind_whole(b, b->unknown[i], name, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static const ckpt_schema_row *schema_of(const ckpt_layout *layout, const char *canon)
{
    ckpt_index at;
    for (size_t i = 0; i < layout->n_schema; i++)
        if (ckpt_pattern_match(layout->schema[i].canon, canon, NULL, &at))
            return &layout->schema[i];
    return NULL;
}

/* Canonical dims from the schema where all sizes are known, else the box grouped by stored
 * dimension without indexed axes. Both must have the box's volume. */
static ckpt_status canon_dims(ckpt_binder *b, ckpt_canon *c, const ckpt_schema_row *schema,
                              const ckpt_view_out *view, ckpt_err *err)
{
    int64_t dims[CKPT_MAX_RANK], volume = 1, product = 1;
    int rank = 0;
    bool known = schema != NULL;
    for (int i = 0; i < view->map.n; i++)
        if (!ckpt_mul_i64(volume, view->map.axis[i].len, &volume))
            return ckpt_fail(err, CKPT_E_FORMAT, "size overflows");
    for (const char *p = known ? schema->dims : ""; known && *p != '\0';) {
        size_t n = strcspn(p, ",");
        known = rank < CKPT_MAX_RANK && ckpt_expr_eval(&b->m->syms, p, n, &dims[rank]);
        rank++;
        p += n + (p[n] == ',');
    }
    if (known) {
        if (!ckpt_numel(rank, dims, &product) || product != volume)
            return ckpt_fail(err, CKPT_E_FORMAT, "has %lld elements, '%s' needs %lld",
                             (long long)volume, schema->dims, (long long)product);
    } else {
        rank = 0;
        for (int d = 0; d < view->rank; d++) {
            int64_t extent = 1;
            bool fixed = false;
            for (int i = 0; i < view->map.n; i++) {
                const ckpt_axis *a = &view->map.axis[i];
                if (a->dim == d) {
                    extent *= a->len;
                    fixed = fixed || (a->len == 1 && a->size > 1);
                }
            }
            if (!(fixed && extent == 1))
                dims[rank++] = extent;
        }
    }
    c->rank = rank;
    c->dims = ckpt_arena_memdup(&b->m->arena, dims, (size_t)rank * sizeof dims[0]);
    if (c->dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (!ckpt_dtype_bytes(c->dtype, volume, &c->bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "%lld elements of %s do not fill whole bytes",
                         (long long)volume, ckpt_dtype_get(c->dtype)->name);
    return CKPT_OK;
}

static void see_one_tag(ckpt_binder *b, const char *tag, size_t n)
{
    for (int i = 0; i < b->n_tags; i++)
        if (strncmp(b->tags[i], tag, n) == 0 && b->tags[i][n] == '\0')
            return;
    const char *kept = ckpt_arena_strndup(&b->m->arena, tag, n);
    if (kept != NULL && b->n_tags < (int)(sizeof b->tags / sizeof b->tags[0]))
        b->tags[b->n_tags++] = kept;
}

/* Remember the choices that a row stands for, unless they follow from the configuration. */
static void see_tags(ckpt_binder *b, const char *tag)
{
    for (size_t n; tag != NULL && *tag != '\0'; tag += n + strspn(tag + n, " ")) {
        char one[64];
        n = strcspn(tag, " ");
        if (n >= sizeof one)
            continue;
        memcpy(one, tag, n);
        one[n] = '\0';
        if (ckpt_tag_verdict(b->choices, one) < 0)
            see_one_tag(b, tag, n);
    }
}

/* Canonical tensors have schema dimensions; a copy has those of the tensor it repeats. */
static ckpt_status push_copy(ckpt_binder *b, ckpt_canon *c, ckpt_err *err)
{
    int64_t numel = 1;
    const ckpt_tensor *t = &b->m->src->tensors[c->stored];
    c->dims = t->dims;
    c->rank = t->rank;
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &c->bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "size overflows");
    void *p = b->m->copies;
    ckpt_status status =
        ckpt_grow(&p, &b->cap_copies, b->m->n_copies + 1, sizeof *b->m->copies, err);
    b->m->copies = p;
    if (status == CKPT_OK)
        b->m->copies[b->m->n_copies++] = *c;
    return status;
}

static ckpt_status build_one(ckpt_binder *b, const ckpt_match *m, int64_t e, ckpt_err *err)
{
    const ckpt_row *row = &b->layout->rows[m->row];
    const ckpt_tensor *t = &b->m->src->tensors[m->tensor];
    const ckpt_index at = {m->at.l, m->at.j, e};
    ckpt_view_out view;
    ckpt_view_in in = {.view = row->view,
                       .e = e,
                       .l = at.l,
                       .rank = t->rank,
                       .dims = t->dims,
                       .syms = &b->m->syms};
    ckpt_status status = ckpt_view_build(&in, &b->m->arena, &view, err);
    if (status != CKPT_OK)
        return status;
    ckpt_canon c = {.dtype = t->dtype,
                    .stored = m->tensor,
                    .map = view.map,
                    .row = row,
                    .block = m->block,
                    .shift = ckpt_view_shift(row->view)};
    see_tags(b, row->tag);
    if (ckpt_row_copy_of(row) != NULL)
        return push_copy(b, &c, err);
    c.name = ckpt_pattern_format(&b->m->arena, row->canon, &b->m->syms, &at);
    if (c.name == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (c.shift != 0 && !ckpt_dtype_castable(t->dtype, CKPT_F32))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s values cannot be shifted",
                         ckpt_dtype_get(t->dtype)->name);
    const ckpt_schema_row *schema = schema_of(b->layout, c.name);
    c.flags = schema != NULL ? schema->flags : 0;
    status = canon_dims(b, &c, schema, &view, err);
    return status == CKPT_OK ? ckpt_bind_push(b, &c, err) : status;
}

/* Bind sizes from one tensor per row until nothing new comes. */
static ckpt_status bind_sizes(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool *done_row = calloc(b->layout->n_rows + 1, sizeof *done_row);
    if (done_row == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int pass = 0; pass < 4; pass++)
        for (size_t i = 0; i < b->n_matches; i++) {
            const ckpt_match *m = &b->matches[i];
            const ckpt_tensor *t = &b->m->src->tensors[m->tensor];
            ckpt_view_out view;
            ckpt_view_in in = {.view = b->layout->rows[m->row].view,
                               .e = m->at.e,
                               .l = m->at.l,
                               .rank = t->rank,
                               .dims = t->dims,
                               .syms = &b->m->syms,
                               .bind_only = true};
            if (done_row[m->row] || (i > 0 && m[-1].tensor == m->tensor && m[-1].row == m->row))
                continue;
            CKPT_TRY(ckpt_view_build(&in, &b->m->arena, &view, err), "tensor '%s'", t->name);
            done_row[m->row] = view.complete;
        }
done:
    free(done_row);
    return status;
}

/* Build all tensors that one match stands for: as many as there are experts if its view says so. */
static ckpt_status build_match(ckpt_binder *b, const ckpt_match *m, ckpt_err *err)
{
    const char *symbol;
    size_t len;
    const char *view = b->layout->rows[m->row].view;
    int64_t first = m->at.e, last = m->at.e + 1, experts = ckpt_sym_get(&b->m->syms, "E", 1);
    if (m->at.e >= 0 && experts > 0 && m->at.e >= experts && !b->opts->lenient)
        return ckpt_fail(err, CKPT_E_FORMAT, "expert %lld, the model has %lld", (long long)m->at.e,
                         (long long)experts);
    if (m->at.e < 0 && ckpt_view_expands(view, 'e', &symbol, &len)) {
        int64_t all;
        first = 0;
        if (!ckpt_expr_eval(&b->m->syms, symbol, len, &last) ||
            !ckpt_mul_i64(last, ckpt_max_i64(m->at.l + 1, 1), &all) || all > EXPAND_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "size %.*s not determined", (int)len, symbol);
    }
    for (int64_t e = first; e < last; e++) {
        ckpt_status status = build_one(b, m, e, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status build_all(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(bind_sizes(b, err));
    for (size_t i = 0; i < b->n_matches; i++)
        CKPT_TRY(build_match(b, &b->matches[i], err), "tensor '%s'",
                 b->m->src->tensors[b->matches[i].tensor].name);
done:
    return status;
}

static int canon_order(const void *a, const void *b)
{
    return strcmp(((const ckpt_canon *)a)->name, ((const ckpt_canon *)b)->name);
}

int64_t ckpt_model_find(const ckpt_model *model, const char *name)
{
    ckpt_canon key = {.name = name};
    const ckpt_canon *hit = model->n_tensors == 0 ? NULL
                                                  : bsearch(&key, model->tensors, model->n_tensors,
                                                            sizeof key, canon_order);
    return hit == NULL ? -1 : hit - model->tensors;
}

static ckpt_status sort_tensors(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    if (m->n_tensors > 0)
        qsort(m->tensors, m->n_tensors, sizeof *m->tensors, canon_order);
    for (size_t i = 1; i < m->n_tensors; i++)
        if (strcmp(m->tensors[i - 1].name, m->tensors[i].name) == 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensors '%s' and '%s' are both %s",
                             m->src->tensors[m->tensors[i - 1].stored].name,
                             m->src->tensors[m->tensors[i].stored].name, m->tensors[i].name);
    return CKPT_OK;
}

static ckpt_status join_tags(ckpt_binder *b, ckpt_err *err)
{
    ckpt_buf text = {0};
    for (int i = 0; i < b->n_tags; i++)
        ckpt_buf_printf(&text, "%s%s", i > 0 ? "," : "", b->tags[i]);
    if (b->state_tag != NULL)
        ckpt_buf_printf(&text, "%s%s", text.len > 0 ? "," : "", b->state_tag);
    b->m->tags =
        ckpt_arena_strndup(&b->m->arena, text.data != NULL ? (char *)text.data : "", text.len);
    bool failed = text.failed || b->m->tags == NULL;
    ckpt_buf_release(&text);
    return failed ? ckpt_fail(err, CKPT_E_NOMEM, "out of memory") : CKPT_OK;
}

/* What each copy repeats: the first of its alternatives that is there. */
static ckpt_status settle_copies(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    for (size_t i = 0; i < m->n_copies; i++) {
        ckpt_canon *c = &m->copies[i];
        const char *stored = m->src->tensors[c->stored].name;
        for (const char *p = ckpt_row_copy_of(c->row); *p != '\0' && c->name == NULL;) {
            size_t n = strcspn(p, "|");
            const char *name = ckpt_arena_strndup(&m->arena, p, n);
            if (name == NULL)
                return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            if (ckpt_model_find(m, name) >= 0)
                c->name = name;
            p += n + (p[n] == '|');
        }
        if (c->name == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s' repeats %s, which is missing", stored,
                             ckpt_row_copy_of(c->row));
    }
    return CKPT_OK;
}

static ckpt_status read_config(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    ckpt_status status = CKPT_OK;
    ckpt_buf text = {0};
    /* an empty configuration says as little as none: a Megatron directory made from bare tensors */
    b->configured = ckpt_json_child(m->src->config) != NULL && b->layout->config_read != NULL &&
                    b->layout->config_kind == m->src->config_kind;
    if (b->configured) {
        status = b->layout->config_read(m->src->config, m->config, err);
        if (status != CKPT_OK && !b->opts->lenient) {
            ckpt_err_frame(err, "configuration");
            goto done;
        }
        if (status != CKPT_OK)
            CKPT_CHECK(ckpt_bind_note(b, err, "configuration: %s",
                                      err != NULL ? err->text : "not readable"));
        CKPT_CHECK(ckpt_config_symbols(m->config, &m->syms, err));
    }
    /* sizes and choices only: what the tensors say of layers stays theirs */
    const ckpt_json *said = b->configured ? m->config : b->opts->config;
    if (!b->configured && said != NULL && ckpt_config_symbols(said, &m->syms, NULL) != CKPT_OK)
        m->syms = (ckpt_symtab){.n = 0};
    if (b->layout->choices != NULL)
        b->layout->choices(said != NULL ? said : m->config, &text);
    b->choices =
        ckpt_arena_strndup(&m->arena, text.data != NULL ? (char *)text.data : "", text.len);
    if (text.failed || b->choices == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status bind_layout(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    ckpt_status status = CKPT_OK;
    char *pattern = NULL;
    m->layout = b->layout;
    m->config = ckpt_json_new_object();
    b->matched = calloc(m->src->n_tensors + 1, sizeof *b->matched);
    if (m->config == NULL || b->matched == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(read_config(b, err));
    CKPT_CHECK(ckpt_bind_match(b, err));
    CKPT_CHECK(ckpt_bind_depths_stored(b, err));
    CKPT_CHECK(ckpt_bind_scales(b, err));
    CKPT_CHECK(ckpt_bind_unknown(b, err));
    if (b->n_unknown > 0 && !b->opts->allow_unknown && !b->opts->lenient) {
        status = ckpt_bind_refuse(b, err);
        goto done;
    }
    CKPT_CHECK(ckpt_bind_kinds(b, err));
    CKPT_CHECK(build_all(b, err));
    CKPT_CHECK(ckpt_bind_dequantised(b, err));
    CKPT_CHECK(push_unknown(b, err));
    CKPT_CHECK(ckpt_bind_states(b, err));
    CKPT_CHECK(sort_tensors(b, err));
    CKPT_CHECK(settle_copies(b, err));
    CKPT_CHECK(ckpt_bind_complete(b, err));
    CKPT_CHECK(ckpt_bind_config(b, &pattern, err));
    CKPT_CHECK(ckpt_bind_finish(b, pattern, err));
    CKPT_CHECK(join_tags(b, err));
    ckpt_mesh_from_chunks(m);
done:
    return status;
}

ckpt_status ckpt_model_bind(ckpt_model *model, ckpt_source *src, const ckpt_model_opts *opts,
                            ckpt_err *err)
{
    static const ckpt_model_opts defaults = {0};
    ckpt_status status = CKPT_OK;
    *model = (ckpt_model){.src = src};
    ckpt_binder b = {.m = model, .opts = opts != NULL ? opts : &defaults};
    ckpt_mesh_from_args(model);
    if (src->config_kind == CKPT_CONFIG_HF) /* before names and shapes are looked at */
        status = ckpt_derive_packed(src, err);
    if (status == CKPT_E_FORMAT && b.opts->lenient)
        status =
            ckpt_bind_note(&b, err, "%s", err != NULL ? err->text : "packed weights do not fit");
    CKPT_CHECK(status);
    CKPT_CHECK(ckpt_bind_find_states(&b, err));
    CKPT_CHECK(ckpt_bind_detect(&b, err));
    if (b.layout != NULL) {
        CKPT_CHECK(bind_layout(&b, err));
    } else {
        for (size_t t = 0; t < src->n_tensors; t++)
            CKPT_CHECK(ckpt_bind_whole(&b, (uint32_t)t, src->tensors[t].name, err));
        CKPT_CHECK(sort_tensors(&b, err));
    }
done:
    free(b.matches);
    free(b.block_mask);
    free(b.block_kind);
    free(b.matched);
    free(b.unknown);
    free(b.scale_of);
    free(b.refs);
    if (status != CKPT_OK)
        ckpt_model_release(model);
    return status;
}

void ckpt_model_release(ckpt_model *model)
{
    free(model->tensors);
    free(model->copies);
    free(model->notes);
    free(model->ignored);
    free(model->extras);
    ckpt_json_free(model->config);
    ckpt_arena_free(&model->arena);
    *model = (ckpt_model){0};
}

ckpt_status ckpt_model_read(const ckpt_model *model, size_t tensor, uint64_t lo, size_t n,
                            void *out, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_gather gather;
    ckpt_scratch scratch = {.cap = 256 * 1024};
    ckpt_status status = CKPT_OK;
    scratch.buf = malloc(scratch.cap);
    if (scratch.buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_plan_canon(model, tensor, &arena, &gather, err));
    CKPT_CHECK(ckpt_gather_run(model->src, &gather, lo, n, out, &scratch, err));
done:
    free(scratch.buf);
    ckpt_arena_free(&arena);
    return status;
}
