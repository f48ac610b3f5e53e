/* What `ckpt report` shows of a quantisation study: how far every policy is from the plain model, as an
 * interval of the loss a token in nats beside the margin that was asked for, and its cost. */
#include "report.h"

#include <math.h>
#include <string.h>

#define WIDTH 360.0
#define EDGE 12.0
#define ROW 34.0
#define FOOT 24.0
#define POLICIES_MAX 200

typedef struct interval {
    const char *name;
    double middle, low, high; /* nats a token above plain; low and high NaN: no interval */
    bool within;
} interval;

/* Element i of an array that holds [before, after]; NaN if there is none. */
static double pair_of(const ckpt_json *j, const char *key, int i)
{
    const ckpt_json *m = ckpt_json_child(ckpt_json_get(j, key));
    double v;
    if (m != NULL && i > 0)
        m = ckpt_json_next(m);
    return ckpt_json_double(m, &v) ? v : NAN;
}

static double scale_of(const interval *v, size_t n, double margin)
{
    double most = margin > 0 ? margin * 1.15 : 0;
    for (size_t i = 0; i < n; i++) {
        const double ends[] = {v[i].middle, v[i].low, v[i].high};
        for (size_t k = 0; k < 3; k++)
            if (isfinite(ends[k]))
                most = fmax(most, fabs(ends[k]) * 1.05);
    }
    return most > 0 ? most : 1;
}

static double at(double v, double most)
{
    return WIDTH / 2 + v / most * (WIDTH / 2 - EDGE);
}

static void tick(ckpt_buf *out, double v, double most, double height)
{
    char text[32];
    ckpt_short_number(v, text);
    ckpt_buf_printf(
        out,
        "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%.1f\"/>"
        "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s%s</text>\n",
        at(v, most), at(v, most), height - FOOT, at(v, most), height - 8, v > 0 ? "+" : "", text);
}

static void bar(ckpt_buf *out, const interval *v, double most, double y)
{
    char middle[32], low[32], high[32];
    ckpt_short_number(v->middle, middle);
    ckpt_short_number(v->low, low);
    ckpt_short_number(v->high, high);
    ckpt_buf_printf(out, "<text x=\"%.0f\" y=\"%.1f\">", EDGE, y + 12);
    ckpt_html(out, v->name);
    ckpt_buf_puts(out, "</text>\n");
    if (!isfinite(v->middle)) {
        ckpt_buf_printf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"dim\">not finite</text>\n",
                        WIDTH / 2, y + 26);
        return;
    }
    ckpt_buf_puts(out, "<g><title>");
    ckpt_html(out, v->name);
    ckpt_buf_printf(out, ": %s", middle);
    if (isfinite(v->low) && isfinite(v->high))
        ckpt_buf_printf(out,
                        ", from %s to %s</title><line class=\"l s0\" x1=\"%.1f\" x2=\"%.1f\" "
                        "y1=\"%.1f\" y2=\"%.1f\"/>",
                        low, high, at(v->low, most), at(v->high, most), y + 22, y + 22);
    else
        ckpt_buf_puts(out, "</title>");
    ckpt_buf_printf(out, "<circle class=\"f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/></g>\n",
                    v->within ? 0 : 1, at(v->middle, most), y + 22);
}

static void intervals(ckpt_buf *out, const char *title, const interval *v, size_t n, double margin)
{
    double most = scale_of(v, n, margin), height = ROW * (double)n + FOOT;
    ckpt_buf_printf(out,
                    "<figure>\n<h3>%s</h3>\n<p class=\"dim\">nats a token above plain, and the "
                    "margin</p>\n<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" "
                    "aria-label=\"%s: loss above plain of %zu policies\">\n",
                    title, WIDTH, height, title, n);
    tick(out, 0, most, height);
    if (margin > 0)
        tick(out, margin, most, height);
    for (size_t i = 0; i < n; i++)
        bar(out, &v[i], most, ROW * (double)i);
    ckpt_buf_puts(out, "</svg>\n<ul class=\"key\"><li><b class=\"b0\"></b>within the margin</li>"
                       "<li><b class=\"b1\"></b>outside</li></ul>\n</figure>\n");
}

static void number(ckpt_buf *out, double v)
{
    char text[32];
    ckpt_short_number(v, text);
    ckpt_buf_printf(out, "<td class=\"n\">%s</td>", text);
}

static double real_of(const ckpt_json *j, const char *key)
{
    double v;
    return ckpt_json_double(ckpt_json_get(j, key), &v) ? v : NAN;
}

static void costs(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *variants)
{
    ckpt_buf_puts(out, "<h3>Numbers</h3>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
                       "aria-label=\"policies\"><table><thead><tr><th>policy</th><th>digest</th>"
                       "<th class=\"n\">perplexity before</th><th class=\"n\">after</th>"
                       "<th class=\"n\">above plain before</th><th class=\"n\">after</th>"
                       "<th class=\"n\">forward s</th><th class=\"n\">step s</th>"
                       "<th class=\"n\">memory</th></tr></thead><tbody>\n");
    for (const ckpt_json *v = ckpt_json_child(variants); v != NULL; v = ckpt_json_next(v)) {
        const char *name = ckpt_json_string(ckpt_json_get(v, "name"));
        const char *digest = ckpt_json_string(ckpt_json_get(v, "policy_digest"));
        double memory = real_of(v, "memory");
        ckpt_buf_puts(out, "<tr><td>");
        ckpt_html(out, name != NULL ? name : "?");
        ckpt_buf_puts(out, "</td><td><code>");
        ckpt_html(out,
                  digest != NULL ? ckpt_arena_strndup(arena, digest, strnlen(digest, 12)) : "");
        ckpt_buf_puts(out, "</code></td>");
        number(out, real_of(v, "ppl_before"));
        number(out, real_of(v, "ppl_after"));
        number(out, pair_of(v, "nll_above_plain", 0));
        number(out, pair_of(v, "nll_above_plain", 1));
        number(out, real_of(v, "forward_seconds"));
        number(out, real_of(v, "step_seconds"));
        ckpt_buf_printf(out, "<td class=\"n\">%s</td></tr>\n",
                        memory >= 0 && memory < 0x1p63 ? ckpt_human(arena, (uint64_t)memory) : "");
    }
    ckpt_buf_puts(out, "</tbody></table></div>\n");
}

ckpt_status ckpt_report_study(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc, ckpt_err *err)
{
    static const char *const titles[] = {"As it is", "After the steps"};
    const ckpt_json *variants = ckpt_json_get(doc, "variants");
    double margin = real_of(doc, "margin");
    size_t all = (size_t)ckpt_json_size(variants);
    interval *rows = ckpt_arena_array(arena, all + 1, sizeof *rows);
    if (rows == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_buf_printf(
        out,
        "<p>Evaluated: %.0f blocks of %.0f tokens. Trained: steps %.0f, batch %.0f, learning "
        "rate %g. Seed %.0f.</p>\n<div class=\"grid\">\n",
        real_of(doc, "blocks"), real_of(doc, "seq_len"), real_of(doc, "steps"),
        real_of(doc, "batch"), real_of(doc, "lr"), real_of(doc, "seed"));
    for (int k = 0; k < 2; k++) {
        size_t n = 0;
        for (const ckpt_json *v = ckpt_json_child(variants); v != NULL && n < POLICIES_MAX;
             v = ckpt_json_next(v)) {
            const char *name = ckpt_json_string(ckpt_json_get(v, "name"));
            interval *r = &rows[n++];
            *r = (interval){.name = name != NULL ? name : "?",
                            .middle = pair_of(v, "nll_above_plain", k),
                            .low = pair_of(v, "low", k),
                            .high = pair_of(v, "high", k)};
            double high = isfinite(r->high) ? r->high : r->middle;
            r->within = !(margin > 0) || high <= margin;
        }
        intervals(out, titles[k], rows, n, margin);
    }
    ckpt_buf_puts(out, "</div>\n");
    costs(out, arena, variants);
    return CKPT_OK;
}
