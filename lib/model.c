/* Binding a source to a layout: which row each stored tensor matches, what kind every block is, how
 * large every symbol is, and whether the result is a whole model. */
#include "checked.h"
#include "gather.h"
#include "model_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_EXPERTS 65536 /* bounds what a hostile shape can make us allocate */

/* Split "blocks.{…}.KIND.…" of a row; block from the stored-side index. */
static void canon_place(const ckpt_row *row, int64_t l, int *block, int *kind)
{
    *block = -1;
    *kind = CKPT_NO_KIND;
    if (strncmp(row->canon, "blocks.{", 8) != 0)
        return;
    const char *close = strchr(row->canon, '}');
    if (close == NULL || close[1] != '.')
        return;
    const char *word = close + 2;
    *kind = ckpt_kind_of(word, strcspn(word, "."));
    int64_t mul = row->canon[8] == '2' ? 2 : 1;
    int64_t add = close[-2] == '+' ? close[-1] - '0' : 0;
    int64_t at = l * mul + add;
    *block = at >= 0 && at < (1 << 24) ? (int)at : -1;
}

static bool star_match(const char *pattern, const char *name)
{
    const char *star = strchr(pattern, '*');
    if (star == NULL)
        return strcmp(pattern, name) == 0;
    size_t head = (size_t)(star - pattern), tail = strlen(star + 1), n = strlen(name);
    return n >= head + tail && memcmp(pattern, name, head) == 0 &&
           memcmp(star + 1, name + n - tail, tail) == 0;
}

static bool is_ignored(const ckpt_layout *layout, const char *name)
{
    for (const char *const *p = layout->ignored; p != NULL && *p != NULL; p++)
        if (star_match(*p, name))
            return true;
    return false;
}

/* Rows by the hash of their stored pattern with every index and every run of digits as one '#', so
 * that a name meets only the few rows it can match. */
#define ROW_BUCKETS 256
typedef struct row_index {
    int32_t head[ROW_BUCKETS]; /* row, or -1 */
    int32_t *next;
} row_index;

static uint32_t shape_hash(const char *s)
{
    uint32_t h = 2166136261u;
    while (*s != '\0') {
        char c = *s;
        if (c == '{') {
            c = '#';
            s += strcspn(s, "}");
            s += *s == '}';
        } else if (c >= '0' && c <= '9') {
            c = '#';
            s += strspn(s, "0123456789");
        } else {
            s++;
        }
        h = (h ^ (uint8_t)c) * 16777619u;
    }
    return h % ROW_BUCKETS;
}

/* Rows keep their order within a bucket. */
static ckpt_status index_rows(const ckpt_layout *layout, row_index *x, ckpt_err *err)
{
    x->next = malloc((layout->n_rows + 1) * sizeof *x->next);
    if (x->next == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int i = 0; i < ROW_BUCKETS; i++)
        x->head[i] = -1;
    for (size_t r = layout->n_rows; r-- > 0;) {
        uint32_t h = shape_hash(layout->rows[r].stored);
        x->next[r] = x->head[h];
        x->head[h] = (int32_t)r;
    }
    return CKPT_OK;
}

static bool row_fits(const ckpt_row *row, const ckpt_tensor *t, int64_t *l, int64_t *e)
{
    return ckpt_pattern_match(row->stored, t->name, l, e) && ckpt_view_rank(row->view) == t->rank;
}

/* ---- detection --------------------------------------------------------------------------------- */

static ckpt_status count_matches(const ckpt_binder *b, const ckpt_layout *layout, size_t *out,
                                 ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    size_t hits = 0;
    row_index x;
    ckpt_status status = index_rows(layout, &x, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < src->n_tensors; i++) {
        int64_t l, e;
        if (ckpt_bind_is_state(b, i))
            continue;
        bool hit = is_ignored(layout, src->tensors[i].name);
        int32_t r = x.head[shape_hash(src->tensors[i].name)];
        for (; !hit && r >= 0; r = x.next[r])
            hit = row_fits(&layout->rows[r], &src->tensors[i], &l, &e);
        hits += hit;
    }
    free(x.next);
    *out = hits;
    return CKPT_OK;
}

/* The layout whose rows explain most tensors; one that claims the configuration wins over others.
 * At least half must match: below that the checkpoint is of no known family. */
static ckpt_status detect(ckpt_binder *b, ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    const ckpt_layout *best = NULL, *rival = NULL;
    size_t best_hits = 0;
    int best_claim = -1;
    if (b->opts->layout != NULL) {
        b->layout = b->opts->layout;
        return CKPT_OK;
    }
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        const ckpt_layout *layout = ckpt_layouts[i];
        if (b->opts->layout_group != NULL && strcmp(layout->group, b->opts->layout_group) != 0)
            continue;
        int claim = layout->claims != NULL && src->config_kind == layout->config_kind
                        ? layout->claims(src->config)
                        : 0;
        if (claim < 0)
            continue;
        size_t hits;
        ckpt_status status = count_matches(b, layout, &hits, err);
        if (status != CKPT_OK)
            return status;
        if (hits == 0 || hits * 2 < src->n_tensors - b->n_states)
            continue;
        if (claim > best_claim || (claim == best_claim && hits > best_hits)) {
            best = layout;
            best_hits = hits;
            best_claim = claim;
            rival = NULL;
        } else if (claim == best_claim && hits == best_hits) {
            rival = layout;
        }
    }
    if (rival != NULL && !b->opts->lenient)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "layouts %s and %s both fit", best->name,
                         rival->name);
    b->layout = best;
    return CKPT_OK;
}

/* ---- matching ---------------------------------------------------------------------------------- */

static ckpt_status grow_blocks(ckpt_binder *b, int block, ckpt_err *err)
{
    if ((size_t)block < b->n_blocks)
        return CKPT_OK;
    size_t need = (size_t)block + 1;
    if (need > 4 * b->m->src->n_tensors + 64)
        return ckpt_fail(err, CKPT_E_FORMAT, "layer index %d is beyond the number of tensors",
                         block);
    void *mask = b->block_mask;
    ckpt_status status = ckpt_grow(&mask, &b->cap_blocks, need, sizeof *b->block_mask, err);
    b->block_mask = mask;
    if (status != CKPT_OK)
        return status;
    for (size_t i = b->n_blocks; i < need; i++)
        b->block_mask[i] = UINT32_MAX;
    b->n_blocks = need;
    return CKPT_OK;
}

static ckpt_status add_match(ckpt_binder *b, ckpt_match m, ckpt_err *err)
{
    void *p = b->matches;
    ckpt_status status = ckpt_grow(&p, &b->cap_matches, b->n_matches + 1, sizeof *b->matches, err);
    b->matches = p;
    if (status == CKPT_OK)
        b->matches[b->n_matches++] = m;
    return status;
}

/* All candidate rows of every tensor, and per block the kinds that all its tensors allow. */
static ckpt_status match_all(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = b->m->src;
    row_index x = {.next = NULL};
    CKPT_CHECK(index_rows(b->layout, &x, err));
    for (size_t t = 0; t < src->n_tensors; t++) {
        uint32_t mask = 0;
        int mask_block = -1;
        size_t before = b->n_matches;
        if (ckpt_bind_is_state(b, t)) {
            b->matched[t] = true;
            continue;
        }
        for (int32_t r = x.head[shape_hash(src->tensors[t].name)]; r >= 0; r = x.next[r]) {
            ckpt_match m = {.tensor = (uint32_t)t, .row = (uint32_t)r};
            if (!row_fits(&b->layout->rows[r], &src->tensors[t], &m.l, &m.e))
                continue;
            canon_place(&b->layout->rows[r], m.l, &m.block, &m.kind);
            CKPT_TRY(add_match(b, m, err), "tensor '%s'", src->tensors[t].name);
            if (m.block >= 0 && m.kind != CKPT_NO_KIND) {
                mask |= (uint32_t)1 << m.kind;
                mask_block = m.block;
            }
        }
        b->matched[t] = b->n_matches > before;
        if (mask_block >= 0) {
            CKPT_TRY(grow_blocks(b, mask_block, err), "tensor '%s'", src->tensors[t].name);
            uint32_t *have = &b->block_mask[mask_block];
            if ((*have & mask) == 0 && !b->opts->lenient) {
                status =
                    ckpt_fail(err, CKPT_E_FORMAT,
                              "tensor '%s' does not belong with the other tensors of its layer",
                              src->tensors[t].name);
                goto done;
            }
            *have = (*have & mask) != 0 ? *have & mask : *have;
        }
    }
done:
    free(x.next);
    return status;
}

/* Settle the kind of each block, from its tensors, else from the configured pattern. */
static ckpt_status settle_kinds(ckpt_binder *b, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(b->m->config, "pattern"));
    size_t n_pattern = pattern != NULL ? strlen(pattern) : 0;
    b->block_kind = calloc(b->n_blocks + 1, sizeof *b->block_kind);
    if (b->block_kind == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for blocks");
    for (size_t i = 0; i < b->n_blocks; i++) {
        uint32_t mask = b->block_mask[i];
        int kind = CKPT_NO_KIND;
        for (int k = 0; k < CKPT_N_KINDS; k++)
            if (mask != UINT32_MAX && (mask >> k & 1) != 0 &&
                (kind == CKPT_NO_KIND || (i < n_pattern && ckpt_kinds[k].letter == pattern[i])))
                kind = k;
        b->block_kind[i] = kind;
        if (kind == CKPT_NO_KIND || i >= n_pattern || ckpt_kinds[kind].letter == pattern[i])
            continue;
        if (!b->opts->lenient)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "block %zu is %s by its tensors but '%c' by the configuration", i,
                             ckpt_kinds[kind].name, pattern[i]);
        ckpt_status status = ckpt_bind_note(b, err,
                                            "block %zu is %s by its tensors but '%c' by the "
                                            "configuration",
                                            i, ckpt_kinds[kind].name, pattern[i]);
        if (status != CKPT_OK)
            return status;
    }
    size_t kept = 0;
    for (size_t i = 0; i < b->n_matches; i++) {
        const ckpt_match *m = &b->matches[i];
        if (m->block < 0 || m->kind == CKPT_NO_KIND || b->block_kind[m->block] == m->kind)
            b->matches[kept++] = *m;
    }
    b->n_matches = kept;
    return CKPT_OK;
}

/* ---- unknown tensors --------------------------------------------------------------------------- */

/* A cheap similarity: length of the common prefix plus common suffix. */
static size_t likeness(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b), head = 0, tail = 0;
    while (head < na && head < nb && a[head] == b[head])
        head++;
    while (tail < na - head && tail < nb - head && a[na - 1 - tail] == b[nb - 1 - tail])
        tail++;
    return head + tail;
}

static const char *nearest_known(ckpt_binder *b, const char *name)
{
    size_t best = 0;
    const char *text = NULL;
    for (size_t r = 0; r < b->layout->n_rows; r++) {
        size_t like = likeness(b->layout->rows[r].stored, name);
        if (like > best) {
            best = like;
            text = b->layout->rows[r].stored;
        }
    }
    return text;
}

/* A known name with the wrong number of dimensions is no unknown tensor. */
static ckpt_status check_rank(ckpt_binder *b, const ckpt_tensor *t, ckpt_err *err)
{
    for (size_t r = 0; r < b->layout->n_rows; r++) {
        int64_t l, e;
        const ckpt_row *row = &b->layout->rows[r];
        if (ckpt_pattern_match(row->stored, t->name, &l, &e))
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %d dimensions, expected %d", t->name,
                             t->rank, ckpt_view_rank(row->view));
    }
    return CKPT_OK;
}

static ckpt_status report_unknown(ckpt_binder *b, ckpt_err *err)
{
    for (size_t i = 0; i < b->n_unknown; i++) {
        ckpt_status bad = check_rank(b, &b->m->src->tensors[b->unknown[i]], err);
        if (bad != CKPT_OK)
            return bad;
    }
    ckpt_buf text = {0};
    for (size_t i = 0; i < b->n_unknown && i < 8; i++) {
        const char *name = b->m->src->tensors[b->unknown[i]].name;
        const char *near = nearest_known(b, name);
        ckpt_buf_printf(&text, "%s'%s'", i > 0 ? ", " : "", name);
        if (near != NULL)
            ckpt_buf_printf(&text, " (nearest known: %s)", near);
    }
    if (b->n_unknown > 8)
        ckpt_buf_printf(&text, " and %zu more", b->n_unknown - 8);
    ckpt_status status =
        ckpt_fail(err, CKPT_E_UNSUPPORTED, "%zu tensor%s not in this model (layout %s): %s",
                  b->n_unknown, b->n_unknown == 1 ? "" : "s", b->layout->name,
                  text.data != NULL ? (const char *)text.data : "");
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status push_name(const char ***list, size_t *n, size_t *cap, const char *name,
                             ckpt_err *err)
{
    void *p = *list;
    ckpt_status status = ckpt_grow(&p, cap, *n + 1, sizeof **list, err);
    *list = p;
    if (status == CKPT_OK)
        (*list)[(*n)++] = name;
    return status;
}

/* Sort out tensors that no row explains: ignored by the layout, or unknown. */
static ckpt_status collect_unknown(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_model *m = b->m;
    for (size_t t = 0; t < m->src->n_tensors; t++) {
        if (b->matched[t])
            continue;
        if (is_ignored(b->layout, m->src->tensors[t].name)) {
            CKPT_CHECK(push_name(&m->ignored, &m->n_ignored, &b->cap_ignored,
                                 m->src->tensors[t].name, err));
            b->matched[t] = true;
            continue;
        }
        void *p = b->unknown;
        status = ckpt_grow(&p, &b->cap_unknown, b->n_unknown + 1, sizeof *b->unknown, err);
        b->unknown = p;
        if (status != CKPT_OK)
            goto done;
        b->unknown[b->n_unknown++] = (uint32_t)t;
    }
done:
    return status;
}

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
        .extra = true
    };
    int64_t numel;
    if (!ckpt_numel(t->rank, t->dims, &numel) || !ckpt_dtype_bytes(t->dtype, numel, &c.bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': size overflows", t->name);
    ckpt_status status = push_name(&b->m->extras, &b->m->n_extras, &b->cap_extras, t->name, err);
    return status == CKPT_OK ? ckpt_bind_push(b, &c, err) : status;
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
            int64_t l, e;
            int block, kind;
            if (!row_fits(&other->rows[r], t, &l, &e) ||
                strpbrk(other->rows[r].view, "=[<") != NULL)
                continue;
            canon_place(&other->rows[r], l, &block, &kind);
            if (block >= 0 && (size_t)block < b->n_blocks && kind != CKPT_NO_KIND &&
                b->block_kind[block] != kind)
                continue;
            found = ckpt_pattern_format(&b->m->arena, other->rows[r].canon, l, e);
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
    int64_t b, e;
    for (size_t i = 0; i < layout->n_schema; i++)
        if (ckpt_pattern_match(layout->schema[i].canon, canon, &b, &e))
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

static void see_tag(ckpt_binder *b, const char *tag)
{
    for (int i = 0; i < b->n_tags; i++)
        if (strcmp(b->tags[i], tag) == 0)
            return;
    if (b->n_tags < (int)(sizeof b->tags / sizeof b->tags[0]))
        b->tags[b->n_tags++] = tag;
}

static ckpt_status build_one(ckpt_binder *b, const ckpt_match *m, int64_t e, ckpt_err *err)
{
    const ckpt_row *row = &b->layout->rows[m->row];
    const ckpt_tensor *t = &b->m->src->tensors[m->tensor];
    ckpt_view_out view;
    ckpt_view_in in = {
        .view = row->view, .e = e, .rank = t->rank, .dims = t->dims, .syms = &b->m->syms};
    ckpt_status status = ckpt_view_build(&in, &b->m->arena, &view, err);
    if (status != CKPT_OK)
        return status;
    ckpt_canon c = {
        .dtype = t->dtype, .stored = m->tensor, .map = view.map, .row = row, .block = m->block};
    c.name = ckpt_pattern_format(&b->m->arena, row->canon, m->l, e);
    if (c.name == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    const ckpt_schema_row *schema = schema_of(b->layout, c.name);
    c.flags = schema != NULL ? schema->flags : 0;
    status = canon_dims(b, &c, schema, &view, err);
    if (row->tag != NULL)
        see_tag(b, row->tag);
    return status == CKPT_OK ? ckpt_bind_push(b, &c, err) : status;
}

/* Bind sizes from one tensor per row until nothing new comes; then build everything. */
static ckpt_status build_all(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = b->m->src;
    bool *done_row = calloc(b->layout->n_rows + 1, sizeof *done_row);
    if (done_row == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int pass = 0; pass < 4; pass++)
        for (size_t i = 0; i < b->n_matches; i++) {
            const ckpt_match *m = &b->matches[i];
            const ckpt_tensor *t = &src->tensors[m->tensor];
            ckpt_view_out view;
            ckpt_view_in in = {.view = b->layout->rows[m->row].view,
                               .e = m->e,
                               .rank = t->rank,
                               .dims = t->dims,
                               .syms = &b->m->syms,
                               .bind_only = true};
            if (done_row[m->row])
                continue;
            CKPT_TRY(ckpt_view_build(&in, &b->m->arena, &view, err), "tensor '%s'", t->name);
            done_row[m->row] = view.complete;
        }
    for (size_t i = 0; i < b->n_matches; i++) {
        const ckpt_match *m = &b->matches[i];
        const char *symbol;
        size_t len;
        int64_t first = m->e, last = m->e + 1, experts = ckpt_sym_get(&b->m->syms, "E", 1);
        if (m->e >= 0 && experts > 0 && m->e >= experts && !b->opts->lenient) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': expert %lld, the model has %lld",
                               src->tensors[m->tensor].name, (long long)m->e, (long long)experts);
            goto done;
        }
        if (m->e < 0 && ckpt_view_expands(b->layout->rows[m->row].view, &symbol, &len)) {
            first = 0;
            if (!ckpt_expr_eval(&b->m->syms, symbol, len, &last) || last > MAX_EXPERTS) {
                status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%s': size %.*s not determined",
                                   src->tensors[m->tensor].name, (int)len, symbol);
                goto done;
            }
        }
        for (int64_t e = first; e < last; e++)
            CKPT_TRY(build_one(b, m, e, err), "tensor '%s'", src->tensors[m->tensor].name);
    }
done:
    free(done_row);
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
    /* an empty configuration says as little as none: a Megatron directory made from bare tensors */
    if (ckpt_json_child(m->src->config) != NULL && b->layout->config_read != NULL &&
        b->layout->config_kind == m->src->config_kind) {
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
    CKPT_CHECK(match_all(b, err));
    CKPT_CHECK(collect_unknown(b, err));
    if (b->n_unknown > 0 && !b->opts->allow_unknown && !b->opts->lenient) {
        status = report_unknown(b, err);
        goto done;
    }
    CKPT_CHECK(settle_kinds(b, err));
    CKPT_CHECK(build_all(b, err));
    CKPT_CHECK(push_unknown(b, err));
    CKPT_CHECK(ckpt_bind_states(b, err));
    CKPT_CHECK(sort_tensors(b, err));
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
    CKPT_CHECK(ckpt_bind_find_states(&b, err));
    CKPT_CHECK(detect(&b, err));
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
    free(b.refs);
    if (status != CKPT_OK)
        ckpt_model_release(model);
    return status;
}

void ckpt_model_release(ckpt_model *model)
{
    free(model->tensors);
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
