/* What `ckpt gate` found, in the forms that people and pipelines read: text, JSON, JUnit XML (the
 * form of Jenkins' and GitLab's readers), SARIF 2.1.0, GitHub's workflow commands, Markdown. */
#include "gate.h"

#include <string.h>

bool ckpt_gate_passed(const gate_unit *u)
{
    for (size_t i = 0; i < u->n_results; i++)
        if (!u->results[i].ok)
            return false;
    return true;
}

size_t ckpt_gate_failures(const gate *g)
{
    size_t n = 0;
    for (size_t i = 0; i < g->n_units; i++)
        for (size_t k = 0; k < g->units[i].n_results; k++)
            n += !g->units[i].results[k].ok;
    return n;
}

static size_t count_checks(const gate *g, size_t *cached)
{
    size_t n = 0;
    *cached = 0;
    for (size_t i = 0; i < g->n_units; i++) {
        n += g->units[i].n_results;
        for (size_t k = 0; k < g->units[i].n_results; k++)
            *cached += g->units[i].results[k].cached;
    }
    return n;
}

/* "load mcore" for a command, else the name of the check. */
static const char *label(const gate_result *r, char *room, size_t n)
{
    if (r->load == NULL)
        return ckpt_gate_check_names[r->check];
    snprintf(room, n, "load %s", r->load->name);
    return room;
}

static const char *reason(const gate_result *r)
{
    return r->message != NULL ? r->message : "failed";
}

/* ---- text ------------------------------------------------------------------------------------ */

static void text_unit(const gate *g, const gate_unit *u, int width)
{
    bool c = g->tool->color, ok = ckpt_gate_passed(u);
    size_t cached = 0;
    char room[160];
    printf("%s%s%s  %-*s ", ckpt_paint_on(c, ok ? CKPT_GREEN : CKPT_RED), ok ? "ok  " : "FAIL",
           ckpt_paint_off(c), width, ckpt_tool_clean(g->tool, u->name));
    for (size_t i = 0; i < u->n_results; i++) {
        const gate_result *r = &u->results[i];
        cached += r->cached;
        printf(" %s%s%s", ckpt_paint_on(c && !r->ok, CKPT_RED),
               ckpt_tool_clean(g->tool, label(r, room, sizeof room)), ckpt_paint_off(c && !r->ok));
    }
    if (cached == u->n_results)
        printf("  (cached)\n");
    else
        printf("  %.1f s\n", u->seconds);
    for (size_t i = 0; i < u->n_results; i++)
        if (!u->results[i].ok)
            printf("        %s: %s\n",
                   ckpt_tool_clean(g->tool, label(&u->results[i], room, sizeof room)),
                   ckpt_tool_clean(g->tool, reason(&u->results[i])));
}

void ckpt_gate_text(const gate *g)
{
    size_t failed = ckpt_gate_failures(g), cached, n = count_checks(g, &cached);
    int width = 0;
    for (size_t i = 0; i < g->n_units; i++) {
        size_t w = strlen(ckpt_tool_clean(g->tool, g->units[i].name));
        width = w < 60 && (int)w > width ? (int)w : width;
    }
    for (size_t i = 0; i < g->n_units; i++)
        text_unit(g, &g->units[i], width);
    printf("%zu case%s, %zu check%s: %zu passed", g->n_units, ckpt_tool_plural(g->n_units), n,
           ckpt_tool_plural(n), n - failed);
    if (cached > 0)
        printf(" (%zu cached)", cached);
    printf(", %zu failed in %.1f s\n", failed, g->seconds);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void json_sources(const gate *g, ckpt_jw *w)
{
    ckpt_jw_open(w, "sources", '[');
    for (size_t i = 0; i < g->n_sources; i++) {
        const gate_source *s = &g->sources[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", s->name);
        ckpt_jw_string(w, "path", s->path);
        ckpt_jw_string(w, "pinned", s->root);
        ckpt_jw_string(w, "root", s->found_root);
        ckpt_jw_string(w, "problem", s->problem);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

void ckpt_gate_json(const gate *g)
{
    ckpt_jw *w = &g->tool->json;
    size_t failed = ckpt_gate_failures(g), cached, n = count_checks(g, &cached);
    json_sources(g, w);
    ckpt_jw_open(w, "cases", '[');
    for (size_t i = 0; i < g->n_units; i++) {
        const gate_unit *u = &g->units[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", u->name);
        ckpt_jw_string(w, "source", u->source->name);
        ckpt_jw_string(w, "target", u->target != NULL ? u->target->name : NULL);
        ckpt_jw_bool(w, "ok", ckpt_gate_passed(u));
        ckpt_jw_real(w, "seconds", u->seconds);
        ckpt_jw_open(w, "checks", '[');
        for (size_t k = 0; k < u->n_results; k++) {
            const gate_result *r = &u->results[k];
            ckpt_jw_open(w, NULL, '{');
            ckpt_jw_string(w, "check", ckpt_gate_check_names[r->check]);
            if (r->load != NULL)
                ckpt_jw_string(w, "command", r->load->name);
            ckpt_jw_bool(w, "ok", r->ok);
            ckpt_jw_bool(w, "cached", r->cached);
            ckpt_jw_real(w, "seconds", r->seconds);
            ckpt_jw_string(w, "message", r->ok ? NULL : reason(r));
            ckpt_jw_close(w, '}');
        }
        ckpt_jw_close(w, ']');
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_u64(w, "passed", n - failed);
    ckpt_jw_u64(w, "failed", failed);
    ckpt_jw_u64(w, "cached", cached);
    ckpt_jw_real(w, "seconds", g->seconds);
}

/* ---- JUnit ----------------------------------------------------------------------------------- */

/* XML 1.0 has no control characters, not even escaped, and no U+FFFE, U+FFFF. */
static void xml(ckpt_buf *out, const char *s)
{
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (ckpt_tool_markup(out, c))
            continue;
        if (c < 0x20 || c == 0x7f)
            ckpt_buf_putc(out, '?');
        else if (c == 0xef && (unsigned char)s[1] == 0xbf && (unsigned char)s[2] >= 0xbe) {
            ckpt_buf_putc(out, '?');
            s += 2;
        } else
            ckpt_buf_putc(out, c);
    }
}

static void attribute(ckpt_buf *out, const char *name, const char *value)
{
    ckpt_buf_printf(out, " %s=\"", name);
    xml(out, value);
    ckpt_buf_putc(out, '"');
}

static void junit_case(const gate *g, const gate_unit *u, const gate_result *r, ckpt_buf *out)
{
    char room[160];
    ckpt_buf_puts(out, "    <testcase");
    attribute(out, "classname", ckpt_tool_clean(g->tool, u->name));
    attribute(out, "name", ckpt_tool_clean(g->tool, label(r, room, sizeof room)));
    ckpt_buf_printf(out, " time=\"%.3f\"", r->seconds);
    if (r->ok) {
        ckpt_buf_puts(out, "/>\n");
        return;
    }
    ckpt_buf_puts(out, ">\n      <failure");
    attribute(out, "type", ckpt_gate_check_names[r->check]);
    attribute(out, "message", ckpt_tool_clean(g->tool, reason(r)));
    ckpt_buf_puts(out, "/>\n    </testcase>\n");
}

void ckpt_gate_junit(const gate *g, ckpt_buf *out)
{
    size_t failed = ckpt_gate_failures(g), cached, n = count_checks(g, &cached);
    ckpt_buf_puts(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite");
    attribute(out, "name", ckpt_tool_clean(g->tool, g->path));
    ckpt_buf_printf(out,
                    " tests=\"%zu\" failures=\"%zu\" errors=\"0\" skipped=\"0\" time=\"%.3f\">\n",
                    n, failed, g->seconds);
    for (size_t i = 0; i < g->n_units; i++)
        for (size_t k = 0; k < g->units[i].n_results; k++)
            junit_case(g, &g->units[i], &g->units[i].results[k], out);
    ckpt_buf_puts(out, "  </testsuite>\n</testsuites>\n");
}

/* ---- SARIF ----------------------------------------------------------------------------------- */

/* A path as a URI reference: relative ones stay so, which is what a repository's viewer wants. */
static void put_uri(ckpt_buf *out, const char *path)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                "0123456789-._~/";
    if (path[0] == '/')
        ckpt_buf_puts(out, "file://");
    else
        while (strncmp(path, "./", 2) == 0)
            path += 2;
    for (; *path != '\0'; path++)
        if (strchr(plain, *path) != NULL)
            ckpt_buf_putc(out, *path);
        else
            ckpt_buf_printf(out, "%%%02X", (unsigned char)*path);
}

static void sarif_rules(ckpt_jw *w)
{
    static const char *const what[GATE_N_CHECKS] = {
        "The checkpoint converts into the target.",
        "The checkpoint is whole: coverage, indexes, configuration, sizes.",
        "All digests agree and the root is the expected one.",
        "Converted to the target and back, nothing has changed.",
        "Forward results are those of the source or of the reference.",
        "Gradients are those of the source or of the reference.",
        "Training stopped and resumed equals training at once.",
        "A command of the peer loads the checkpoint.",
        "The checkpoint is refused as it must be.",
    };
    ckpt_jw_open(w, "rules", '[');
    for (int k = 0; k < GATE_N_CHECKS; k++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "id", ckpt_gate_check_names[k]);
        ckpt_jw_open(w, "shortDescription", '{');
        ckpt_jw_string(w, "text", what[k]);
        ckpt_jw_close(w, '}');
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static void sarif_result(const gate *g, const gate_unit *u, const gate_result *r, const char *uri,
                         ckpt_jw *w)
{
    ckpt_buf text = {0};
    char room[160];
    ckpt_buf_printf(&text, "%s: %s: %s", u->name, label(r, room, sizeof room), reason(r));
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "ruleId", ckpt_gate_check_names[r->check]);
    ckpt_jw_int(w, "ruleIndex", (int64_t)r->check);
    ckpt_jw_string(w, "level", "error");
    ckpt_jw_open(w, "message", '{');
    ckpt_jw_string(w, "text",
                   text.failed ? "failed" : ckpt_tool_clean(g->tool, (const char *)text.data));
    ckpt_jw_close(w, '}');
    ckpt_jw_open(w, "locations", '[');
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_open(w, "physicalLocation", '{');
    ckpt_jw_open(w, "artifactLocation", '{');
    ckpt_jw_string(w, "uri", uri);
    ckpt_jw_close(w, '}');
    ckpt_jw_open(w, "region", '{');
    ckpt_jw_int(w, "startLine", u->source->line);
    ckpt_jw_close(w, '}');
    ckpt_jw_close(w, '}');
    ckpt_jw_close(w, '}');
    ckpt_jw_close(w, ']');
    ckpt_jw_open(w, "partialFingerprints", '{');
    ckpt_buf_clear(&text);
    ckpt_buf_printf(&text, "%s/%s", u->name, label(r, room, sizeof room));
    ckpt_jw_string(w, "case/v1", text.failed ? "?" : (const char *)text.data);
    ckpt_jw_close(w, '}');
    ckpt_jw_close(w, '}');
    ckpt_buf_release(&text);
}

void ckpt_gate_sarif(const gate *g, ckpt_buf *out)
{
    ckpt_jw w = {0};
    ckpt_buf uri = {0};
    put_uri(&uri, g->path);
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_string(&w, "$schema", "https://json.schemastore.org/sarif-2.1.0.json");
    ckpt_jw_string(&w, "version", "2.1.0");
    ckpt_jw_open(&w, "runs", '[');
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_open(&w, "tool", '{');
    ckpt_jw_open(&w, "driver", '{');
    ckpt_jw_string(&w, "name", "ckpt gate");
    ckpt_jw_string(&w, "version", CKPT_VERSION);
    sarif_rules(&w);
    ckpt_jw_close(&w, '}');
    ckpt_jw_close(&w, '}');
    ckpt_jw_open(&w, "results", '[');
    for (size_t i = 0; i < g->n_units; i++)
        for (size_t k = 0; k < g->units[i].n_results; k++)
            if (!g->units[i].results[k].ok)
                sarif_result(g, &g->units[i], &g->units[i].results[k],
                             uri.failed ? "" : (const char *)uri.data, &w);
    ckpt_jw_close(&w, ']');
    ckpt_jw_close(&w, '}');
    ckpt_jw_close(&w, ']');
    ckpt_jw_close(&w, '}');
    ckpt_buf_putc(&w.buf, '\n');
    ckpt_buf_append(out, w.buf.data, w.buf.len);
    out->failed |= w.buf.failed || uri.failed;
    ckpt_buf_release(&w.buf);
    ckpt_buf_release(&uri);
}

/* ---- GitHub ---------------------------------------------------------------------------------- */

/* The escapes of workflow commands; a property also escapes ':' and ','. */
static void github_put(const char *s, bool property)
{
    for (; *s != '\0'; s++) {
        if (*s == '%' || *s == '\r' || *s == '\n' || (property && (*s == ':' || *s == ',')))
            printf("%%%02X", (unsigned char)*s);
        else
            putchar(*s);
    }
}

void ckpt_gate_github(const gate *g)
{
    char room[160];
    for (size_t i = 0; i < g->n_units; i++) {
        const gate_unit *u = &g->units[i];
        for (size_t k = 0; k < u->n_results; k++) {
            if (u->results[k].ok)
                continue;
            printf("::error file=");
            github_put(g->path, true);
            printf(",line=%d,title=", u->source->line);
            github_put(ckpt_tool_clean(g->tool, u->name), true);
            printf("::");
            github_put(ckpt_tool_clean(g->tool, label(&u->results[k], room, sizeof room)), false);
            printf(": ");
            github_put(ckpt_tool_clean(g->tool, reason(&u->results[k])), false);
            putchar('\n');
        }
    }
}

static void markdown_cell(ckpt_buf *out, const char *s)
{
    for (; *s != '\0'; s++) {
        if (strchr("|\\`*_<>[]", *s) != NULL)
            ckpt_buf_putc(out, '\\');
        ckpt_buf_putc(out, *s);
    }
}

void ckpt_gate_markdown(const gate *g, ckpt_buf *out)
{
    size_t failed = ckpt_gate_failures(g), cached, n = count_checks(g, &cached);
    char room[160];
    ckpt_buf_printf(out, "### ckpt gate: %zu of %zu checks passed\n\n", n - failed, n);
    ckpt_buf_puts(out, "| | case | checks | s |\n|---|---|---|---|\n");
    for (size_t i = 0; i < g->n_units; i++) {
        const gate_unit *u = &g->units[i];
        ckpt_buf_printf(out, "| %s | ", ckpt_gate_passed(u) ? "ok" : "**FAIL**");
        markdown_cell(out, ckpt_tool_clean(g->tool, u->name));
        ckpt_buf_puts(out, " | ");
        for (size_t k = 0; k < u->n_results; k++) {
            const gate_result *r = &u->results[k];
            ckpt_buf_puts(out, k > 0 ? ", " : "");
            markdown_cell(out, ckpt_tool_clean(g->tool, label(r, room, sizeof room)));
            if (!r->ok) {
                ckpt_buf_puts(out, ": **");
                markdown_cell(out, ckpt_tool_clean(g->tool, reason(r)));
                ckpt_buf_puts(out, "**");
            }
        }
        ckpt_buf_printf(out, " | %.1f |\n", u->seconds);
    }
}
