/* Heat maps of `ckpt report`: a layer a row, a module a column, shade by order of magnitude. */
#include "report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SHADES 8
#define CELL 18.0
#define LAYERS_MAX 512
#define MODULES_MAX 200

typedef struct place {
    int64_t layer; /* -1: outside blocks */
    const char *module;
    const report_cell *cell;
    double value;
    size_t column;
} place;

typedef struct heat {
    place *places;
    size_t n;
    const char **modules;
    size_t n_modules;
    int64_t *layers;
    size_t n_layers;
    double lo, hi; /* log10 of the values above 0 */
    bool any;
} heat;

/* "blocks.3.moe.experts.2.up.weight" -> 3, "moe.experts.up". */
static bool split(ckpt_arena *arena, const char *name, place *p)
{
    const char *rest = name;
    p->layer = -1;
    if (strncmp(name, "optimizer.", 10) == 0 && strstr(name, "blocks.") != NULL)
        rest = strstr(name, "blocks.");
    if (strncmp(rest, "blocks.", 7) == 0 && rest[7] >= '0' && rest[7] <= '9') {
        char *end;
        p->layer = strtoll(rest + 7, &end, 10);
        rest = *end == '.' ? end + 1 : end;
    }
    ckpt_buf b = {0};
    for (const char *s = rest; *s != '\0';) {
        size_t n = strcspn(s, ".");
        bool number = n > 0 && strspn(s, "0123456789") >= n;
        if (!number)
            ckpt_buf_printf(&b, "%s%.*s", b.len > 0 ? "." : "", (int)(n < 200 ? n : 200), s);
        s += n + (s[n] == '.');
    }
    size_t len = b.len;
    if (len > 7 && memcmp(b.data + len - 7, ".weight", 7) == 0)
        len -= 7;
    p->module =
        b.failed ? NULL : ckpt_arena_strndup(arena, b.data != NULL ? (char *)b.data : "", len);
    ckpt_buf_release(&b);
    return p->module != NULL;
}

static int by_module(const void *a, const void *b)
{
    const place *p = a, *q = b;
    int order = strcmp(p->module, q->module);
    return order != 0 ? order : (p->layer > q->layer) - (p->layer < q->layer);
}

static int by_layer(const void *a, const void *b)
{
    int64_t p = *(const int64_t *)a, q = *(const int64_t *)b;
    return (p > q) - (p < q);
}

/* Worse of two: a mark, then the larger. */
static double worse(double a, double b)
{
    if (isnan(a) || isnan(b))
        return NAN;
    return a > b ? a : b;
}

static ckpt_status arrange(heat *h, ckpt_arena *arena, const report_cell *cells, size_t n,
                           ckpt_err *err)
{
    h->places = ckpt_arena_array(arena, n + 1, sizeof *h->places);
    h->modules = ckpt_arena_array(arena, n + 1, sizeof *h->modules);
    h->layers = ckpt_arena_array(arena, n + 1, sizeof *h->layers);
    if (h->places == NULL || h->modules == NULL || h->layers == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++) {
        place p = {.cell = &cells[i], .value = cells[i].value};
        if (!split(arena, cells[i].name, &p))
            return ckpt_tool_no_memory(err);
        h->places[i] = p;
        h->layers[i] = p.layer;
        if (p.value > 0 && isfinite(p.value)) {
            double v = log10(p.value);
            h->lo = h->any ? fmin(h->lo, v) : v;
            h->hi = h->any ? fmax(h->hi, v) : v;
            h->any = true;
        }
    }
    qsort(h->places, n, sizeof *h->places, by_module);
    qsort(h->layers, n, sizeof *h->layers, by_layer);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || h->layers[i] != h->layers[h->n_layers - 1])
            h->layers[h->n_layers++] = h->layers[i];
        place *p = &h->places[i];
        if (h->n > 0 && strcmp(h->places[h->n - 1].module, p->module) == 0 &&
            h->places[h->n - 1].layer == p->layer) { /* experts share a cell */
            place *q = &h->places[h->n - 1];
            if (isnan(p->value) || p->value > q->value)
                q->cell = p->cell;
            q->value = worse(q->value, p->value);
            continue;
        }
        if (h->n_modules == 0 || strcmp(h->modules[h->n_modules - 1], p->module) != 0)
            h->modules[h->n_modules++] = p->module;
        h->places[h->n] = *p;
        h->places[h->n++].column = h->n_modules - 1;
    }
    return CKPT_OK;
}

static int shade(const heat *h, double v)
{
    if (!(v > 0))
        return 0;
    if (!isfinite(v))
        return SHADES;
    double part = h->hi > h->lo ? (log10(v) - h->lo) / (h->hi - h->lo) : 1;
    return 1 + (int)(part * (SHADES - 1) + 0.5);
}

static size_t row_of(const heat *h, int64_t layer)
{
    size_t lo = 0, hi = h->n_layers;
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (h->layers[mid] <= layer)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void cell(ckpt_buf *out, const heat *h, const place *p, double left, double top)
{
    double x = left + (double)p->column * CELL, y = top + (double)row_of(h, p->layer) * CELL;
    ckpt_buf_printf(out,
                    "<rect class=\"h%d%s\" x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" "
                    "rx=\"2\"><title>",
                    isnan(p->value) ? 0 : shade(h, p->value), isnan(p->value) ? " mark" : "", x + 1,
                    y + 1, CELL - 2, CELL - 2);
    ckpt_html(out, p->cell->name);
    ckpt_buf_puts(out, ": ");
    ckpt_html(out, p->cell->what);
    ckpt_buf_puts(out, "</title></rect>\n");
}

static void scale(ckpt_buf *out, const heat *h, const char *unit)
{
    char lo[32], hi[32];
    ckpt_short_number(pow(10, h->lo), lo);
    ckpt_short_number(pow(10, h->hi), hi);
    ckpt_buf_puts(out, "<p class=\"dim\">");
    ckpt_html(out, unit);
    if (h->any)
        ckpt_buf_printf(out, ": from %s (light) to %s, by order of magnitude; empty: equal", lo,
                        hi);
    ckpt_buf_puts(out, "; framed: differs in kind. A column of experts shows the worst.</p>\n");
}

ckpt_status ckpt_heat(ckpt_buf *out, ckpt_arena *arena, const char *title, const char *unit,
                      const report_cell *cells, size_t n, ckpt_err *err)
{
    heat h = {0};
    ckpt_status status = n > 0 ? arrange(&h, arena, cells, n, err) : CKPT_OK;
    if (status != CKPT_OK || n == 0)
        return status;
    size_t rows = h.n_layers < LAYERS_MAX ? h.n_layers : LAYERS_MAX;
    size_t columns = h.n_modules < MODULES_MAX ? h.n_modules : MODULES_MAX;
    size_t longest = 0;
    for (size_t i = 0; i < columns; i++)
        longest = strlen(h.modules[i]) > longest ? strlen(h.modules[i]) : longest;
    double left = 46, top = 8, foot = 6.0 * (double)(longest < 40 ? longest : 40) * 0.87 + 14;
    double width = left + CELL * (double)columns + 20, height = top + CELL * (double)rows + foot;
    ckpt_buf_puts(out, "<figure>\n<h3>");
    ckpt_html(out, title);
    ckpt_buf_puts(out, "</h3>\n");
    scale(out, &h, unit);
    ckpt_buf_printf(out,
                    "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"heat map\">"
                    "<svg width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" role=\"img\" "
                    "aria-label=\"",
                    width, height, width, height);
    ckpt_html(out, title);
    ckpt_buf_puts(out, "\">\n");
    for (size_t r = 0; r < rows; r++) {
        ckpt_buf_printf(out, "<text class=\"dim\" x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">",
                        left - 5, top + ((double)r + 0.7) * CELL);
        if (h.layers[r] < 0)
            ckpt_buf_puts(out, "model</text>\n");
        else
            ckpt_buf_printf(out, "%lld</text>\n", (long long)h.layers[r]);
    }
    for (size_t c = 0; c < columns; c++) {
        double x = left + ((double)c + 0.65) * CELL, y = top + CELL * (double)rows + 10;
        ckpt_buf_printf(out,
                        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\" transform=\"rotate(-60 "
                        "%.0f %.0f)\">",
                        x, y, x, y);
        ckpt_html(out, h.modules[c]);
        ckpt_buf_puts(out, "</text>\n");
    }
    for (size_t i = 0; i < h.n; i++)
        if (h.places[i].column < columns && row_of(&h, h.places[i].layer) < rows)
            cell(out, &h, &h.places[i], left, top);
    ckpt_buf_puts(out, "</svg></div>\n");
    if (rows < h.n_layers || columns < h.n_modules)
        ckpt_buf_printf(out, "<p>The first %zu of %zu layers and %zu of %zu modules.</p>\n", rows,
                        h.n_layers, columns, h.n_modules);
    ckpt_buf_puts(out, "</figure>\n");
    return CKPT_OK;
}
