/* What `ckpt report` shows of the documents of diff, verify, convert and gate (study: report_study.c). */
#include "report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORST 20         /* tensors in a table */
#define SHARD_TENSORS 12 /* pictures of a shard map */
#define FILES_MAX 4096

static const char *text_of(const ckpt_json *j, const char *key)
{
    const char *s = ckpt_json_string(ckpt_json_get(j, key));
    return s != NULL ? s : "";
}

/* A number, or the "nan", "inf", "-inf" that stand for one. */
static double real_of(const ckpt_json *j, const char *key, double otherwise)
{
    const ckpt_json *m = ckpt_json_get(j, key);
    const char *s = ckpt_json_string(m);
    double v;
    if (ckpt_json_double(m, &v))
        return v;
    return s != NULL ? strtod(s, NULL) : otherwise;
}

static void list(ckpt_buf *out, const char *title, const ckpt_json *lines, const char *kind)
{
    if (ckpt_json_size(lines) == 0)
        return;
    ckpt_buf_printf(out, "<h3 class=\"%s\">%s</h3>\n<ul>\n", kind, title);
    int shown = 0;
    for (const ckpt_json *l = ckpt_json_child(lines); l != NULL && shown < 200;
         l = ckpt_json_next(l), shown++) {
        const char *s = ckpt_json_string(l);
        ckpt_buf_puts(out, "<li>");
        ckpt_html(out, s != NULL ? s : "?");
        ckpt_buf_puts(out, "</li>\n");
    }
    ckpt_buf_puts(out, "</ul>\n");
    if (ckpt_json_size(lines) > shown)
        ckpt_buf_printf(out, "<p>and %d more</p>\n", ckpt_json_size(lines) - shown);
}

static void verdict(ckpt_buf *out, const ckpt_json *doc)
{
    bool ok = false;
    const char *why = ckpt_json_string(ckpt_json_path(doc, "error.message"));
    (void)ckpt_json_bool(ckpt_json_get(doc, "ok"), &ok);
    ckpt_buf_printf(out, "<p>Result: <strong class=\"%s\">%s</strong>", ok ? "good" : "bad",
                    ok ? "ok" : "not ok");
    if (why != NULL) {
        ckpt_buf_puts(out, ": ");
        ckpt_html(out, why);
    }
    ckpt_buf_puts(out, "</p>\n");
}

static void number_cell(ckpt_buf *out, double v)
{
    char text[32];
    ckpt_short_number(v, text);
    ckpt_buf_printf(out, "<td class=\"n\">%s</td>", isnan(v) ? "" : text);
}

/* ---- diff ------------------------------------------------------------------------------------ */

static int by_value(const void *a, const void *b)
{
    const report_cell *p = a, *q = b;
    double x = isnan(p->value) ? HUGE_VAL : p->value, y = isnan(q->value) ? HUGE_VAL : q->value;
    return x > y ? -1 : x < y ? 1 : strcmp(p->name, q->name);
}

static void worst_table(ckpt_buf *out, const report_cell *cells, size_t n, const char *unit)
{
    size_t rows = n < WORST ? n : WORST;
    ckpt_buf_printf(out,
                    "<h3>Worst %zu of %zu</h3>\n<div class=\"scroll\" tabindex=\"0\" "
                    "role=\"region\" aria-label=\"worst tensors\"><table><thead><tr><th>tensor</th>"
                    "<th class=\"n\">",
                    rows, n);
    ckpt_html(out, unit);
    ckpt_buf_puts(out, "</th><th>what</th></tr></thead><tbody>\n");
    for (size_t i = 0; i < rows; i++) {
        ckpt_buf_puts(out, "<tr><td><code>");
        ckpt_html(out, cells[i].name);
        ckpt_buf_puts(out, "</code></td>");
        number_cell(out, cells[i].value);
        ckpt_buf_puts(out, "<td>");
        ckpt_html(out, cells[i].what);
        ckpt_buf_puts(out, "</td></tr>\n");
    }
    ckpt_buf_puts(out, "</tbody></table></div>\n");
}

/* max_rel where values differ; NAN for a difference in kind; -1 for equal ones that are listed. */
static report_cell diff_cell(ckpt_arena *arena, const ckpt_json *d)
{
    const char *kind = text_of(d, "kind");
    report_cell c = {.name = text_of(d, "name"), .value = NAN, .what = kind};
    char abs[32], rms[32];
    if (strcmp(kind, "identical") == 0 || strcmp(kind, "same") == 0)
        c.value = -1;
    if (ckpt_json_get(d, "max_rel") == NULL)
        return c;
    c.value = real_of(d, "max_rel", NAN);
    ckpt_short_number(real_of(d, "max_abs", NAN), abs);
    ckpt_short_number(real_of(d, "rms", NAN), rms);
    const char *what =
        ckpt_arena_printf(arena, "%s: max abs %s, rms %s, %.3g %% changed, up to %.0f ulp", kind,
                          abs, rms, 100 * real_of(d, "fraction", 0), real_of(d, "max_ulp", 0));
    c.what = what != NULL ? what : kind;
    return c;
}

static ckpt_status diff_doc(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc, ckpt_err *err)
{
    const ckpt_json *list_of = ckpt_json_get(doc, "differences");
    size_t n = 0, all = (size_t)ckpt_json_size(list_of);
    report_cell *cells = ckpt_arena_array(arena, all + 1, sizeof *cells);
    if (cells == NULL)
        return ckpt_tool_no_memory(err);
    for (const ckpt_json *d = ckpt_json_child(list_of); d != NULL; d = ckpt_json_next(d))
        cells[n++] = diff_cell(arena, d);
    ckpt_buf_puts(out, "<p>");
    ckpt_html(out, text_of(doc, "path"));
    ckpt_buf_puts(out, " against ");
    ckpt_html(out, text_of(doc, "other"));
    ckpt_buf_printf(out, ": %.0f identical, %zu listed.</p>\n",
                    real_of(ckpt_json_get(doc, "counts"), "identical", 0), n);
    list(out, "Notes", ckpt_json_get(doc, "notes"), "dim");
    ckpt_status status = ckpt_heat(out, arena, "Drift by layer and module",
                                   "largest relative difference", cells, n, err);
    if (status == CKPT_OK && n > 0) {
        qsort(cells, n, sizeof *cells, by_value);
        worst_table(out, cells, n, "max rel");
    }
    return status;
}

/* ---- verify ---------------------------------------------------------------------------------- */

static ckpt_status gradients(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *norms,
                             ckpt_err *err)
{
    size_t n = 0, all = (size_t)ckpt_json_size(norms);
    report_cell *cells = ckpt_arena_array(arena, all + 1, sizeof *cells);
    if (cells == NULL)
        return ckpt_tool_no_memory(err);
    for (const ckpt_json *j = ckpt_json_child(norms); j != NULL; j = ckpt_json_next(j)) {
        char text[32];
        double v = NAN;
        (void)ckpt_json_double(j, &v);
        ckpt_short_number(v, text);
        cells[n].name = ckpt_json_key(j);
        cells[n].value = v;
        cells[n].what = ckpt_arena_strdup(arena, text);
        if (cells[n++].what == NULL)
            return ckpt_tool_no_memory(err);
    }
    return ckpt_heat(out, arena, "Gradients by layer and module", "norm of the gradient", cells, n,
                     err);
}

static void errors_table(ckpt_buf *out, const ckpt_json *errors)
{
    if (ckpt_json_size(errors) == 0)
        return;
    ckpt_buf_puts(out, "<h3>Against the other</h3>\n<table><tbody>\n");
    for (const ckpt_json *j = ckpt_json_child(errors); j != NULL; j = ckpt_json_next(j)) {
        double v;
        bool b;
        ckpt_buf_puts(out, "<tr><th>");
        ckpt_html(out, ckpt_json_key(j));
        ckpt_buf_puts(out, "</th>");
        if (ckpt_json_double(j, &v))
            number_cell(out, v);
        else {
            ckpt_buf_puts(out, "<td>");
            ckpt_html(out, ckpt_json_string(j) != NULL ? ckpt_json_string(j)
                           : ckpt_json_bool(j, &b)     ? (b ? "yes" : "no")
                                                       : "");
            ckpt_buf_puts(out, "</td>");
        }
        ckpt_buf_puts(out, "</tr>\n");
    }
    ckpt_buf_puts(out, "</tbody></table>\n");
}

static ckpt_status verify_doc(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc, ckpt_err *err)
{
    const ckpt_json *tensors = ckpt_json_get(doc, "tensors");
    size_t bad = 0;
    for (const ckpt_json *t = ckpt_json_child(tensors); t != NULL; t = ckpt_json_next(t)) {
        bool ok = true;
        bad += ckpt_json_bool(ckpt_json_get(t, "ok"), &ok) && !ok;
    }
    if (tensors != NULL)
        ckpt_buf_printf(out, "<p>%d tensors digested, %zu differ. Root <code>%s</code></p>\n",
                        ckpt_json_size(tensors), bad, text_of(doc, "root"));
    list(out, "Problems", ckpt_json_get(doc, "problems"), "bad");
    list(out, "Warnings", ckpt_json_get(doc, "warnings"), "dim");
    errors_table(out, ckpt_json_get(doc, "errors"));
    return gradients(out, arena, ckpt_json_get(doc, "grad_norms"), err);
}

/* ---- shard map ------------------------------------------------------------------------------- */

typedef struct names {
    const char **items;
    size_t n;
} names;

/* Which of the names, added if new; the same colour then everywhere. */
static size_t index_of(names *list_of, const char *name)
{
    for (size_t i = 0; i < list_of->n; i++)
        if (strcmp(list_of->items[i], name) == 0)
            return i;
    if (list_of->n < FILES_MAX)
        list_of->items[list_of->n++] = name;
    return list_of->n - 1;
}

/* One shard: a box from its first row to its last, and in it stripes of the files it comes from. */
static void shard_box(ckpt_buf *out, const ckpt_json *chunk, const char *file, double rows,
                      names *from)
{
    double lo = 0, len = 1, at = 0, total = 0;
    (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(chunk, "lo")), &lo);
    (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(chunk, "len")), &len);
    const ckpt_json *sources = ckpt_json_get(chunk, "sources");
    double x = 4 + lo / rows * 340, width = len / rows * 340;
    for (const ckpt_json *s = ckpt_json_child(sources); s != NULL; s = ckpt_json_next(s))
        total += real_of(s, "to", 0) - real_of(s, "from", 0);
    for (const ckpt_json *s = ckpt_json_child(sources); s != NULL && total > 0;
         s = ckpt_json_next(s)) {
        double part = (real_of(s, "to", 0) - real_of(s, "from", 0)) / total * width;
        const char *name = text_of(s, "file");
        ckpt_buf_printf(out,
                        "<rect class=\"f%zu\" opacity=\"0.75\" x=\"%.1f\" y=\"4\" width=\"%.1f\" "
                        "height=\"22\"><title>from ",
                        index_of(from, name) % 6, x + at, part);
        ckpt_html(out, name);
        ckpt_buf_puts(out, "</title></rect>");
        at += part;
    }
    ckpt_buf_printf(out,
                    "<rect fill=\"none\" stroke=\"currentColor\" x=\"%.1f\" y=\"4\" width=\"%.1f\" "
                    "height=\"22\"><title>rows %.0f to %.0f in ",
                    x, width, lo, lo + len);
    ckpt_html(out, file);
    ckpt_buf_puts(out, "</title></rect>\n");
    if (width > 36)
        ckpt_buf_printf(out, "<text x=\"%.1f\" y=\"40\" text-anchor=\"middle\">%.0f–%.0f</text>\n",
                        x + width / 2, lo, lo + len);
}

typedef struct shard {
    const char *tensor, *file;
    const ckpt_json *chunk;
} shard;

static int by_tensor(const void *a, const void *b)
{
    const shard *p = a, *q = b;
    double x = 0, y = 0;
    int order = strcmp(p->tensor, q->tensor);
    (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(p->chunk, "lo")), &x);
    (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(q->chunk, "lo")), &y);
    return order != 0 ? order : x < y ? -1 : x > y;
}

static double rows_of(const shard *s, size_t n)
{
    double most = 1;
    for (size_t i = 0; i < n; i++) {
        double lo = 0, len = 0;
        (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(s[i].chunk, "lo")), &lo);
        (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(s[i].chunk, "len")), &len);
        most = fmax(most, lo + len);
    }
    return most;
}

static void one_tensor(ckpt_buf *out, const shard *s, size_t n, names *from)
{
    double rows = rows_of(s, n);
    ckpt_buf_puts(out, "<figure>\n<h3><code>");
    ckpt_html(out, s->tensor);
    ckpt_buf_printf(out,
                    "</code></h3>\n<svg viewBox=\"0 0 348 46\" role=\"img\" aria-label=\"rows by "
                    "file\">\n");
    for (size_t i = 0; i < n; i++)
        shard_box(out, s[i].chunk, s[i].file, rows, from);
    ckpt_buf_puts(
        out, "</svg>\n<details><summary>Who holds what</summary>"
             "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"shards\"><table>"
             "<thead><tr><th>now in</th><th class=\"n\">rows</th><th>before in</th></tr></thead>"
             "<tbody>\n");
    for (size_t i = 0; i < n; i++) {
        double lo = 0, len = 0;
        const char *last = "";
        (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(s[i].chunk, "lo")), &lo);
        (void)ckpt_json_double(ckpt_json_child(ckpt_json_get(s[i].chunk, "len")), &len);
        ckpt_buf_puts(out, "<tr><td><code>");
        ckpt_html(out, s[i].file);
        ckpt_buf_printf(out, "</code></td><td class=\"n\">%.0f–%.0f</td><td>", lo, lo + len);
        for (const ckpt_json *j = ckpt_json_child(ckpt_json_get(s[i].chunk, "sources")); j != NULL;
             j = ckpt_json_next(j)) {
            if (strcmp(text_of(j, "file"), last) == 0)
                continue;
            last = text_of(j, "file");
            ckpt_buf_puts(out, "<code>");
            ckpt_html(out, last);
            ckpt_buf_puts(out, "</code> ");
        }
        ckpt_buf_puts(out, "</td></tr>\n");
    }
    ckpt_buf_puts(out, "</tbody></table></div></details>\n</figure>\n");
}

static void colours(ckpt_buf *out, const names *from)
{
    ckpt_buf_puts(out, "<p>A box is what one file holds now; its colour is the file that held it "
                       "before:</p>\n<ul class=\"key\">");
    for (size_t i = 0; i < from->n && i < 24; i++) {
        ckpt_buf_printf(out, "<li><b class=\"b%zu\"></b>", i % 6);
        ckpt_html(out, from->items[i]);
        ckpt_buf_puts(out, "</li>");
    }
    ckpt_buf_puts(out, "</ul>\n");
}

static ckpt_status shard_map(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc, ckpt_err *err)
{
    size_t n = 0, all = 0, drawn = 0;
    const ckpt_json *files = ckpt_json_get(doc, "files");
    for (const ckpt_json *f = ckpt_json_child(files); f != NULL; f = ckpt_json_next(f))
        all += (size_t)ckpt_json_size(ckpt_json_get(f, "chunks"));
    shard *shards = ckpt_arena_array(arena, all + 1, sizeof *shards);
    names from = {.items = ckpt_arena_array(arena, FILES_MAX, sizeof *from.items)};
    if (shards == NULL || from.items == NULL)
        return ckpt_tool_no_memory(err);
    for (const ckpt_json *f = ckpt_json_child(files); f != NULL; f = ckpt_json_next(f))
        for (const ckpt_json *c = ckpt_json_child(ckpt_json_get(f, "chunks")); c != NULL;
             c = ckpt_json_next(c))
            shards[n++] = (shard){text_of(c, "tensor"), text_of(f, "name"), c};
    qsort(shards, n, sizeof *shards, by_tensor);
    ckpt_buf pictures = {0};
    for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        while (end < n && strcmp(shards[end].tensor, shards[i].tensor) == 0)
            end++;
        if (drawn < SHARD_TENSORS && (end - i > 1 || n < 2 * SHARD_TENSORS)) {
            one_tensor(&pictures, &shards[i], end - i, &from);
            drawn++;
        }
        i = end;
    }
    colours(out, &from);
    ckpt_buf_printf(out,
                    "<p class=\"dim\">The first %zu tensors that are cut, along their first "
                    "axis.</p>\n<div class=\"grid\">\n",
                    drawn);
    ckpt_buf_append(out, pictures.data, pictures.len);
    ckpt_buf_puts(out, "</div>\n");
    out->failed |= pictures.failed;
    ckpt_buf_release(&pictures);
    return CKPT_OK;
}

static ckpt_status convert_doc(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc,
                               ckpt_err *err)
{
    bool dry = false;
    ckpt_buf_puts(out, "<p>");
    ckpt_html(out, text_of(doc, "path"));
    ckpt_buf_puts(out, " to ");
    ckpt_html(out, text_of(doc, "destination"));
    ckpt_buf_printf(out, ": %s", text_of(doc, "container"));
    if (*text_of(doc, "layout") != '\0')
        ckpt_buf_printf(out, ", %s", text_of(doc, "layout"));
    ckpt_buf_printf(out, ", %.0f tensors, %.0f bytes.</p>\n", real_of(doc, "tensors", 0),
                    real_of(doc, "bytes", 0));
    list(out, "Lossy steps", ckpt_json_get(doc, "lossy"), "bad");
    list(out, "Warnings", ckpt_json_get(doc, "warnings"), "dim");
    list(out, "Left out", ckpt_json_get(doc, "dropped"), "dim");
    if (!ckpt_json_bool(ckpt_json_get(doc, "dry_run"), &dry) || !dry) {
        ckpt_buf_puts(out, "<p class=\"dim\">The shard map is in the document of --dry-run.</p>\n");
        return CKPT_OK;
    }
    return shard_map(out, arena, doc, err);
}

/* ---- gate ------------------------------------------------------------------------------------ */

static void gate_doc(ckpt_buf *out, const ckpt_json *doc)
{
    ckpt_buf_printf(
        out,
        "<p>%.0f checks passed, %.0f failed, %.0f from the cache.</p>\n"
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"cases\"><table>"
        "<thead><tr><th></th><th>case</th><th>checks</th><th class=\"n\">s</th></tr>"
        "</thead><tbody>\n",
        real_of(doc, "passed", 0), real_of(doc, "failed", 0), real_of(doc, "cached", 0));
    for (const ckpt_json *c = ckpt_json_child(ckpt_json_get(doc, "cases")); c != NULL;
         c = ckpt_json_next(c)) {
        bool ok = false;
        (void)ckpt_json_bool(ckpt_json_get(c, "ok"), &ok);
        ckpt_buf_printf(out, "<tr><td class=\"%s\">%s</td><td>", ok ? "good" : "bad",
                        ok ? "ok" : "FAIL");
        ckpt_html(out, text_of(c, "name"));
        ckpt_buf_puts(out, "</td><td>");
        for (const ckpt_json *k = ckpt_json_child(ckpt_json_get(c, "checks")); k != NULL;
             k = ckpt_json_next(k)) {
            const char *why = text_of(k, "message");
            ckpt_html(out, text_of(k, "check"));
            if (*why != '\0') {
                ckpt_buf_puts(out, " <span class=\"bad\">");
                ckpt_html(out, why);
                ckpt_buf_puts(out, "</span>");
            }
            ckpt_buf_puts(out, ckpt_json_next(k) != NULL ? ", " : "");
        }
        ckpt_buf_puts(out, "</td>");
        number_cell(out, real_of(c, "seconds", 0));
        ckpt_buf_puts(out, "</tr>\n");
    }
    ckpt_buf_puts(out, "</tbody></table></div>\n");
}

ckpt_status ckpt_report_doc(ckpt_buf *out, ckpt_arena *arena, const report_input *in, ckpt_err *err)
{
    const char *command = text_of(in->doc, "command");
    ckpt_status status = CKPT_OK;
    ckpt_buf_puts(out, "<section>\n<h2>");
    ckpt_html(out, command);
    ckpt_buf_puts(out, ": ");
    ckpt_html(out, in->name);
    ckpt_buf_puts(out, "</h2>\n");
    verdict(out, in->doc);
    if (strcmp(command, "diff") == 0)
        status = diff_doc(out, arena, in->doc, err);
    else if (strcmp(command, "verify") == 0)
        status = verify_doc(out, arena, in->doc, err);
    else if (strcmp(command, "convert") == 0)
        status = convert_doc(out, arena, in->doc, err);
    else if (strcmp(command, "gate") == 0)
        gate_doc(out, in->doc);
    else if (strcmp(command, "study") == 0)
        status = ckpt_report_study(out, arena, in->doc, err);
    else
        status = ckpt_fail(
            err, CKPT_E_FORMAT,
            "%s: a document of '%s'; diff, verify, convert, gate, study and metrics are drawn",
            in->path, command);
    ckpt_buf_puts(out, "</section>\n");
    return status;
}
