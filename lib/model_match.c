/* Matching: which rows each stored tensor can be, what kind every block is, what no row explains. */
#include "checked.h"
#include "derive.h"
#include "model_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STACK_MAX                                                                                  \
    4096 /* layers of one stacked tensor; bounds what a hostile shape can make us do */

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

bool ckpt_row_fits(const ckpt_row *row, const ckpt_tensor *t, ckpt_index *at)
{
    return ckpt_pattern_match(row->stored, t->name, NULL, at) &&
           ckpt_view_rank(row->view) == t->rank;
}

/* Block and kind of "blocks.{…}.KIND.…" and "mtp.{…}.…". False if its index has no value yet, or
 * none at all. */
static bool canon_place(const ckpt_binder *b, const ckpt_row *row, const ckpt_index *at, int *block,
                        int *kind)
{
    int64_t v;
    *block = -1;
    *kind = CKPT_NO_KIND;
    if (strncmp(row->canon, "blocks.{", 8) != 0 && strncmp(row->canon, "mtp.{", 5) != 0)
        return true;
    const char *word = strchr(row->canon, '}');
    if (word == NULL || !ckpt_pattern_first(row->canon, &b->m->syms, at, &v) || v < 0 ||
        v >= (1 << 24))
        return false;
    *block = (int)v;
    if (row->canon[0] == 'b' && word[1] == '.')
        *kind = ckpt_kind_of(word + 2, strcspn(word + 2, "."));
    return true;
}

/* ---- detection --------------------------------------------------------------------------------- */

static ckpt_status count_matches(const ckpt_binder *b, const ckpt_layout *layout, size_t *out,
                                 ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    size_t hits = 0;
    ckpt_row_index x;
    ckpt_status status = ckpt_row_index_build(&x, layout, false, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < src->n_tensors; i++) {
        ckpt_index at;
        if (ckpt_bind_is_state(b, i))
            continue;
        bool hit = is_ignored(layout, src->tensors[i].name);
        int32_t r = ckpt_row_index_first(&x, src->tensors[i].name);
        for (; !hit && r >= 0; r = x.next[r])
            hit = ckpt_row_fits(&layout->rows[r], &src->tensors[i], &at);
        hits += hit;
    }
    ckpt_row_index_free(&x);
    *out = hits;
    return CKPT_OK;
}

/* Blocks below the last one that no tensor belongs to: the wrong one of two layouts with the same
 * names leaves every other block empty. */
static ckpt_status count_holes(const ckpt_binder *b, const ckpt_layout *layout, size_t *out,
                               ckpt_err *err)
{
    enum { LIMIT = 65536 };
    const ckpt_source *src = b->m->src;
    size_t n = 0;
    ckpt_row_index x;
    bool *seen = calloc(LIMIT, sizeof *seen);
    if (seen == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    ckpt_status status = ckpt_row_index_build(&x, layout, false, err);
    if (status != CKPT_OK)
        goto done;
    for (size_t i = 0; i < src->n_tensors; i++)
        for (int32_t r = ckpt_row_index_first(&x, src->tensors[i].name); r >= 0; r = x.next[r]) {
            ckpt_index at;
            int64_t block;
            if (strncmp(layout->rows[r].canon, "blocks.{", 8) != 0 ||
                !ckpt_row_fits(&layout->rows[r], &src->tensors[i], &at) ||
                !ckpt_pattern_first(layout->rows[r].canon, NULL, &at, &block) || block >= LIMIT)
                continue;
            seen[block] = true;
            n = (size_t)block >= n ? (size_t)block + 1 : n;
        }
    *out = 0;
    for (size_t i = 0; i < n; i++)
        *out += !seen[i];
    ckpt_row_index_free(&x);
done:
    free(seen);
    return status;
}

/* The layout whose rows explain most tensors; one that claims the configuration wins over others.
 * At least half must match: below that the checkpoint is of no known family. */
ckpt_status ckpt_bind_detect(ckpt_binder *b, ckpt_err *err)
{
    const ckpt_source *src = b->m->src;
    const ckpt_layout *best = NULL, *rival = NULL;
    size_t best_hits = 0;
    int best_claim = -1;
    size_t scales = 0; /* of packed weights: no row is for them */
    for (size_t i = 0; i < src->n_packed; i++)
        scales += src->packed[i]->scale2 != NULL ? 2 : 1;
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
        if (hits == 0 || hits * 2 < src->n_tensors - b->n_states - scales)
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
    size_t holes = 0, rival_holes = 0;
    if (rival != NULL) {
        ckpt_status status = count_holes(b, best, &holes, err);
        if (status == CKPT_OK)
            status = count_holes(b, rival, &rival_holes, err);
        if (status != CKPT_OK)
            return status;
        best = rival_holes < holes ? rival : best;
    }
    if (rival == NULL || holes != rival_holes) {
        b->layout = best;
        return CKPT_OK;
    }
    if (!b->opts->lenient)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "layouts %s and %s both fit", best->name,
                         rival->name);
    /* to show one of them would be a guess */
    return ckpt_bind_note(b, err, "layouts %s and %s both fit: names are as stored", best->name,
                          rival->name);
}

/* ---- matching ---------------------------------------------------------------------------------- */

static ckpt_status grow_blocks(ckpt_binder *b, int block, ckpt_err *err)
{
    if ((size_t)block < b->n_blocks)
        return CKPT_OK;
    size_t need = (size_t)block + 1;
    if (need > 4 * b->m->src->n_tensors + 64 + b->stacked)
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

/* A stacked tensor is as many matches of each row as it has layers, layer by layer. */
static ckpt_status add_stack(ckpt_binder *b, size_t first, ckpt_err *err)
{
    size_t n = b->n_matches - first;
    const ckpt_tensor *t = &b->m->src->tensors[b->matches[first].tensor];
    int64_t layers = 0;
    for (size_t i = first; i < b->n_matches; i++) {
        int dim = ckpt_view_stack(b->layout->rows[b->matches[i].row].view);
        if (dim < 0 || (i > first && t->dims[dim] != layers))
            return CKPT_OK;
        layers = t->dims[dim];
    }
    if (layers < 1 || layers > STACK_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "%lld layers, expected 1 to %d", (long long)layers,
                         STACK_MAX);
    b->stacked = b->stacked > 2 * (size_t)layers ? b->stacked : 2 * (size_t)layers;
    for (size_t i = first; i < b->n_matches; i++)
        b->matches[i].at.l = 0;
    for (int64_t l = 1; l < layers; l++)
        for (size_t i = 0; i < n; i++) {
            ckpt_match m = b->matches[first + i];
            m.at.l = l;
            ckpt_status status = add_match(b, m, err);
            if (status != CKPT_OK)
                return status;
        }
    return CKPT_OK;
}

/* All candidate rows of every tensor. */
static ckpt_status match_rows(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = b->m->src;
    ckpt_row_index x = {.next = NULL};
    CKPT_CHECK(ckpt_row_index_build(&x, b->layout, false, err));
    for (size_t t = 0; t < src->n_tensors; t++) {
        size_t before = b->n_matches;
        if (ckpt_bind_is_state(b, t)) {
            b->matched[t] = true;
            continue;
        }
        for (int32_t r = ckpt_row_index_first(&x, src->tensors[t].name); r >= 0; r = x.next[r]) {
            ckpt_match m = {.tensor = (uint32_t)t, .row = (uint32_t)r};
            if (ckpt_tag_verdict(b->choices, b->layout->rows[r].tag) != 0 &&
                ckpt_row_fits(&b->layout->rows[r], &src->tensors[t], &m.at))
                CKPT_TRY(add_match(b, m, err), "tensor '%s'", src->tensors[t].name);
        }
        b->matched[t] = b->n_matches > before;
        if (b->matched[t])
            CKPT_TRY(add_stack(b, before, err), "tensor '%s'", src->tensors[t].name);
    }
done:
    ckpt_row_index_free(&x);
    return status;
}

/* Blocks before multi-token prediction, and blocks of one depth, where no configuration says so:
 * the first block of a depth that is named by itself, else one more than the last block. */
static ckpt_status bind_depths(ckpt_binder *b, ckpt_err *err)
{
    ckpt_symtab *syms = &b->m->syms;
    int64_t first = INT64_MAX, last = -1, within = -1;
    for (size_t i = 0; i < b->n_matches; i++) {
        const ckpt_match *m = &b->matches[i];
        int block, kind;
        within = m->at.j > within ? m->at.j : within;
        if (!canon_place(b, &b->layout->rows[m->row], &m->at, &block, &kind) || block < 0)
            continue;
        if (b->layout->rows[m->row].canon[0] == 'm' && block < first)
            first = block;
        if (kind != CKPT_NO_KIND && block > last)
            last = block;
    }
    int64_t main_blocks = first < INT64_MAX ? first : last + 1;
    if (ckpt_sym_get(syms, "P", 1) == 0 && main_blocks > 0 && !ckpt_sym_set(syms, "P", main_blocks))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many size symbols");
    if (ckpt_sym_get(syms, "Q", 1) == 0 && within >= 0 && !ckpt_sym_set(syms, "Q", within + 1))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many size symbols");
    return CKPT_OK;
}

/* Kinds that all tensors of a block allow, given those that one tensor allows. */
static ckpt_status narrow_block(ckpt_binder *b, int block, uint32_t mask, const char *name,
                                ckpt_err *err)
{
    ckpt_status status = grow_blocks(b, block, err);
    if (status != CKPT_OK)
        return status;
    uint32_t *have = &b->block_mask[block];
    if ((*have & mask) == 0 && !b->opts->lenient)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "tensor '%s' does not belong with the other tensors of its layer", name);
    *have = (*have & mask) != 0 ? *have & mask : *have;
    return CKPT_OK;
}

/* Block and kind of every match; those without a place go. */
static ckpt_status place_all(ckpt_binder *b, ckpt_err *err)
{
    size_t kept = 0;
    for (size_t i = 0, next; i < b->n_matches; i = next) {
        uint32_t tensor = b->matches[i].tensor, mask = 0;
        const char *name = b->m->src->tensors[tensor].name;
        int64_t l = b->matches[i].at.l;
        int mask_block = -1;
        size_t before = kept;
        for (next = i;
             next < b->n_matches && b->matches[next].tensor == tensor && b->matches[next].at.l == l;
             next++) {
            ckpt_match m = b->matches[next];
            if (!canon_place(b, &b->layout->rows[m.row], &m.at, &m.block, &m.kind))
                continue;
            b->matches[kept++] = m;
            if (m.kind == CKPT_NO_KIND)
                continue;
            mask |= (uint32_t)1 << m.kind;
            mask_block = m.block;
        }
        if (kept == before && !b->opts->lenient)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s' is outside the configured layers",
                             name);
        b->matched[tensor] = b->matched[tensor] && kept > before;
        ckpt_status status =
            mask_block >= 0 ? narrow_block(b, mask_block, mask, name, err) : CKPT_OK;
        if (status != CKPT_OK)
            return status;
    }
    b->n_matches = kept;
    return CKPT_OK;
}

ckpt_status ckpt_bind_match(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(match_rows(b, err));
    CKPT_CHECK(bind_depths(b, err));
    CKPT_CHECK(place_all(b, err));
done:
    return status;
}

/* Settle the kind of each block, from its tensors, else from the configured pattern. */
ckpt_status ckpt_bind_kinds(ckpt_binder *b, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(b->m->config, "pattern"));
    if (pattern == NULL) /* of a manifest */
        pattern = ckpt_json_string(ckpt_json_get(b->opts->config, "pattern"));
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
        ckpt_index at;
        const ckpt_row *row = &b->layout->rows[r];
        if (ckpt_pattern_match(row->stored, t->name, NULL, &at))
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': %d dimensions, expected %d", t->name,
                             t->rank, ckpt_view_rank(row->view));
    }
    return CKPT_OK;
}

ckpt_status ckpt_bind_refuse(ckpt_binder *b, ckpt_err *err)
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

ckpt_status ckpt_push_name(const char ***list, size_t *n, size_t *cap, const char *name,
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
ckpt_status ckpt_bind_unknown(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_model *m = b->m;
    for (size_t t = 0; t < m->src->n_tensors; t++) {
        if (b->matched[t])
            continue;
        if (is_ignored(b->layout, m->src->tensors[t].name)) {
            CKPT_CHECK(ckpt_push_name(&m->ignored, &m->n_ignored, &b->cap_ignored,
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
