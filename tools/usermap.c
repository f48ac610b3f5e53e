#include "usermap.h"

#include "io.h"

#include <string.h>

#define MAP_LIMIT ((uint64_t)64 << 20)

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static ckpt_status text_member(ckpt_usermap *map, const ckpt_json *object, const char *key,
                               bool required, const char **out, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(object, key);
    *out = NULL;
    if (j == NULL && !required)
        return CKPT_OK;
    if (!ckpt_json_is_string(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not a string", key);
    *out = ckpt_arena_strdup(&map->arena, ckpt_json_string(j));
    return *out != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status read_rows(ckpt_usermap *map, const ckpt_json *rows, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int n = ckpt_json_is_array(rows) ? ckpt_json_size(rows) : 0;
    if (n == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'rows' is not an array of at least one row");
    ckpt_row *table = ckpt_arena_array(&map->arena, (size_t)n, sizeof *table);
    if (table == NULL)
        return no_memory(err);
    for (const ckpt_json *c = ckpt_json_child(rows); c != NULL; c = ckpt_json_next(c)) {
        ckpt_row *row = &table[map->layout.n_rows];
        CKPT_TRY(text_member(map, c, "canon", true, &row->canon, err), "row %zu",
                 map->layout.n_rows);
        CKPT_TRY(text_member(map, c, "stored", true, &row->stored, err), "row '%s'", row->canon);
        CKPT_TRY(text_member(map, c, "view", true, &row->view, err), "row '%s'", row->canon);
        CKPT_TRY(text_member(map, c, "tag", false, &row->tag, err), "row '%s'", row->canon);
        map->layout.n_rows++;
    }
    map->layout.rows = table;
done:
    return status;
}

static ckpt_status read_ignored(ckpt_usermap *map, const ckpt_json *list, ckpt_err *err)
{
    if (list == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_array(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "'ignored' is not an array");
    size_t n = 0;
    const char **names =
        ckpt_arena_array(&map->arena, (size_t)ckpt_json_size(list) + 1, sizeof *names);
    if (names == NULL)
        return no_memory(err);
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        if (!ckpt_json_is_string(c))
            return ckpt_fail(err, CKPT_E_FORMAT, "'ignored' holds something that is not a string");
        names[n] = ckpt_arena_strdup(&map->arena, ckpt_json_string(c));
        if (names[n++] == NULL)
            return no_memory(err);
    }
    map->layout.ignored = names;
    return CKPT_OK;
}

/* ---- schema of a family of its own ----------------------------------------------------------- */

/* Append the canonical extent of one factor, "A", "2=0", "R+2[0:R]" or "V<VP", to a product. */
static ckpt_status add_factor(ckpt_buf *dims, bool *any, const char *text, size_t n, ckpt_err *err)
{
    size_t len = n;
    for (size_t i = 0; i < n; i++)
        if (text[i] == '@')
            len = len < i ? len : i;
    size_t expr = 0;
    while (expr < len && strchr("=[<", text[expr]) == NULL)
        expr++;
    if (len == 0 || (expr < len && text[expr] == '='))
        return CKPT_OK;
    if (expr < len && text[expr] == '[') {
        if (len < expr + 5 || strncmp(text + expr, "[0:", 3) != 0 || text[len - 1] != ']')
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "range '%.*s' does not start at 0, so the shape of a free table does "
                             "not follow",
                             (int)n, text);
        text += expr + 3;
        expr = len - expr - 4;
    }
    if (memchr(text, '+', expr) != NULL && *any)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "sum '%.*s' inside a product", (int)expr, text);
    if (*any)
        ckpt_buf_putc(dims, '*');
    ckpt_buf_append(dims, text, expr);
    *any = memchr(text, '+', expr) == NULL;
    return CKPT_OK;
}

/* "NK@tp A | H" -> "NK*A,H". */
static ckpt_status dims_of_view(ckpt_usermap *map, const char *view, const char **out,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf dims = {0};
    for (const char *p = view; *p != '\0' && *p != ';';) {
        size_t end = strcspn(p, "|;"), start = dims.len;
        bool any = false;
        for (size_t i = 0; i < end;) {
            size_t n = strcspn(p + i, " |");
            n = n < end - i ? n : end - i;
            CKPT_CHECK(add_factor(&dims, &any, p + i, n, err));
            i += n + (i + n < end);
        }
        p += end + (p[end] == '|');
        if (dims.len > start && *p != '\0' && *p != ';')
            ckpt_buf_putc(&dims, ',');
    }
    if (dims.len > 0 && dims.data[dims.len - 1] == ',')
        dims.len--;
    if (dims.len == 0)
        ckpt_buf_putc(&dims, '1');
    *out = dims.failed ? NULL : ckpt_arena_strndup(&map->arena, (const char *)dims.data, dims.len);
    if (*out == NULL)
        status = no_memory(err);
done:
    ckpt_buf_release(&dims);
    return status;
}

/* Canonical names write the block index as {b} in schemas, whatever a row computes it from. */
static const char *schema_name(ckpt_usermap *map, const char *canon)
{
    ckpt_buf b = {0};
    for (const char *p = canon; *p != '\0'; p++) {
        size_t n = *p == '{' ? strcspn(p, "}") : 0;
        if (n > 0 && p[n] == '}' && memchr(p, 'l', n) != NULL) {
            ckpt_buf_puts(&b, "{b}");
            p += n;
        } else {
            ckpt_buf_putc(&b, *p);
        }
    }
    char *copy = b.failed ? NULL : ckpt_arena_strndup(&map->arena, (const char *)b.data, b.len);
    ckpt_buf_release(&b);
    return copy;
}

static ckpt_status free_schema(ckpt_usermap *map, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_layout *l = &map->layout;
    ckpt_schema_row *schema = ckpt_arena_array(&map->arena, l->n_rows, sizeof *schema);
    if (schema == NULL)
        return no_memory(err);
    l->family = l->name;
    l->n_schema = 0;
    for (size_t i = 0; i < l->n_rows; i++) {
        ckpt_schema_row row = {.canon = schema_name(map, l->rows[i].canon), .what = "user"};
        bool seen = false;
        if (row.canon == NULL)
            return no_memory(err);
        for (size_t k = 0; k < l->n_schema && !seen; k++)
            seen = strcmp(schema[k].canon, row.canon) == 0;
        if (seen)
            continue;
        CKPT_TRY(dims_of_view(map, l->rows[i].view, &row.dims, err), "row '%s'", row.canon);
        schema[l->n_schema++] = row;
    }
    l->schema = schema;
done:
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

static ckpt_status borrow(ckpt_usermap *map, const char *like, ckpt_err *err)
{
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        const ckpt_layout *known = ckpt_layouts[i];
        if (strcmp(known->name, like) != 0)
            continue;
        map->layout.config_kind = known->config_kind;
        map->layout.config_read = known->config_read;
        map->layout.config_write = known->config_write;
        map->layout.default_tags = known->default_tags;
        map->layout.blocks_per_layer = known->blocks_per_layer;
        map->layout.choices = known->choices;
        map->layout.choices_written = known->choices_written;
        map->layout.group = known->group;
        return CKPT_OK;
    }
    return ckpt_fail(err, CKPT_E_FORMAT, "'like' names no known layout: '%s'", like);
}

static ckpt_status settle_family(ckpt_usermap *map, ckpt_err *err)
{
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        map->layout.family = ckpt_layouts[i]->family;
        map->layout.schema = ckpt_layouts[i]->schema;
        map->layout.n_schema = ckpt_layouts[i]->n_schema;
        if (ckpt_layout_check(&map->layout, NULL) == CKPT_OK)
            return CKPT_OK;
    }
    ckpt_status status = free_schema(map, err);
    return status == CKPT_OK ? ckpt_layout_check(&map->layout, err) : status;
}

static ckpt_status read_table(ckpt_usermap *map, const ckpt_json *doc, ckpt_err *err)
{
    ckpt_status status;
    const char *side = NULL, *like = NULL;
    CKPT_CHECK(text_member(map, doc, "name", true, &map->layout.name, err));
    map->layout.group = "user";
    CKPT_CHECK(text_member(map, doc, "side", false, &side, err));
    if (side != NULL && strcmp(side, "source") != 0 && strcmp(side, "target") != 0) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "'side' is '%s', expected source or target", side);
        goto done;
    }
    map->source = side != NULL && strcmp(side, "source") == 0;
    CKPT_CHECK(text_member(map, doc, "like", false, &like, err));
    if (like != NULL)
        CKPT_CHECK(borrow(map, like, err));
    CKPT_CHECK(read_rows(map, ckpt_json_get(doc, "rows"), err));
    CKPT_CHECK(read_ignored(map, ckpt_json_get(doc, "ignored"), err));
    CKPT_CHECK(settle_family(map, err));
done:
    return status;
}

ckpt_status ckpt_usermap_load(ckpt_usermap *map, const char *path, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    ckpt_json *doc = NULL;
    memset(map, 0, sizeof *map);
    CKPT_CHECK(ckpt_read_file(path, MAP_LIMIT, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &doc, err), "%s", path);
    CKPT_TRY(read_table(map, doc, err), "%s", path);
done:
    ckpt_json_free(doc);
    ckpt_buf_release(&text);
    return status;
}

void ckpt_usermap_release(ckpt_usermap *map)
{
    ckpt_arena_free(&map->arena);
    memset(map, 0, sizeof *map);
}
