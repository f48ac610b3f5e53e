/* Line charts of `ckpt report`, as SVG in a box of 360 by 220 units, which a phone shows at its size. */
#include "report.h"

#include <math.h>

#define WIDTH 360.0
#define HEIGHT 220.0
#define LEFT 54.0
#define RIGHT 8.0
#define TOP 8.0
#define BOTTOM 26.0
#define COLUMNS 500 /* of a line with more points */
#define SERIES 6
#define ROWS 12 /* of the table below */

typedef struct frame {
    double x0, x1, y0, y1; /* data at the edges; y in log10 if log */
    bool log;
} frame;

static double at_x(const frame *f, double x)
{
    return LEFT + (x - f->x0) / (f->x1 - f->x0) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const frame *f, double y)
{
    double v = f->log ? log10(y) : y;
    return HEIGHT - BOTTOM - (v - f->y0) / (f->y1 - f->y0) * (HEIGHT - TOP - BOTTOM);
}

static bool find_frame(frame *f, const report_series *series, size_t n, bool log)
{
    bool any = false, positive = true;
    double lo = 0, hi = 0;
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < series[s].n; i++) {
            double x = series[s].step[i], y = series[s].y[i];
            if (!isfinite(y))
                continue;
            f->x0 = any ? fmin(f->x0, x) : x;
            f->x1 = any ? fmax(f->x1, x) : x;
            lo = any ? fmin(lo, y) : y;
            hi = any ? fmax(hi, y) : y;
            positive &= y > 0;
            any = true;
        }
    f->log = log && positive && hi > 4 * lo;
    f->y0 = f->log ? log10(lo) : lo;
    f->y1 = f->log ? log10(hi) : hi;
    double pad = f->y1 > f->y0 ? (f->y1 - f->y0) * 0.04 : fabs(f->y0) * 0.1 + 1e-12;
    f->y0 -= pad;
    f->y1 += pad;
    if (f->x1 <= f->x0)
        f->x1 = f->x0 + 1;
    return any;
}

/* 1, 2 or 5 times a power of ten, so that about four fit. */
static double nice_step(double range)
{
    double p = pow(10, floor(log10(range / 4))), m = range / 4 / p;
    return p * (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10);
}

static void grid_line(ckpt_buf *out, const frame *f, double value)
{
    char text[32];
    double y = at_y(f, value);
    ckpt_short_number(value, text);
    ckpt_buf_printf(out,
                    "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>"
                    "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                    LEFT, WIDTH - RIGHT, y, y, LEFT - 5, y + 4, text);
}

/* Powers of ten, and between few of them also 2 and 5 times each. */
static void log_lines(ckpt_buf *out, const frame *f)
{
    static const double between[] = {1, 2, 5};
    size_t each = f->y1 - f->y0 < 2.5 ? 3 : 1;
    double step = fmax(1, nice_step(f->y1 - f->y0));
    const int first = (int)floor(f->y0 / step);
    for (int k = first; k * step <= f->y1; k++)
        for (size_t i = 0; i < each; i++) {
            double exponent = k * step + log10(between[i]);
            if (exponent >= f->y0 && exponent <= f->y1)
                grid_line(out, f, between[i] * pow(10, k * step));
        }
}

/* Multiples of step from lo to hi. */
static int lines(double lo, double hi, double step)
{
    const double n = floor(hi / step) - ceil(lo / step) + 1;
    return n > 0 ? (int)fmin(n, 1000) : 0;
}

static void axes(ckpt_buf *out, const frame *f)
{
    double step = nice_step(f->y1 - f->y0);
    if (f->log)
        log_lines(out, f);
    else
        for (int k = 0, n = lines(f->y0, f->y1, step); k < n; k++)
            grid_line(out, f, (ceil(f->y0 / step) + k) * step);
    step = fmax(1, nice_step(f->x1 - f->x0));
    for (int k = 0, n = lines(f->x0, f->x1, step); k < n; k++) {
        const double v = (ceil(f->x0 / step) + k) * step;
        ckpt_buf_printf(
            out, "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.0f</text>\n",
            fmin(at_x(f, v), WIDTH - 14), HEIGHT - 8, v);
    }
}

static void point(ckpt_buf *out, const frame *f, double x, double y, bool *pen)
{
    ckpt_buf_printf(out, "%c%.1f %.1f", *pen ? 'L' : 'M', at_x(f, x), at_y(f, y));
    *pen = true;
}

/* Lowest and highest of every column keep spikes that a sample would lose. */
static void path(ckpt_buf *out, const frame *f, const report_series *s)
{
    size_t width = s->n > 2 * (size_t)COLUMNS ? s->n / COLUMNS : 1;
    bool pen = false;
    for (size_t i = 0; i < s->n; i += width) {
        size_t lo = i, hi = i, end = i + width < s->n ? i + width : s->n;
        bool finite = true;
        for (size_t k = i; k < end; k++) {
            finite &= isfinite(s->y[k]) != 0;
            if (s->y[k] < s->y[lo])
                lo = k;
            if (s->y[k] > s->y[hi])
                hi = k;
        }
        if (!finite) { /* a gap */
            pen = false;
            continue;
        }
        point(out, f, s->step[lo < hi ? lo : hi], s->y[lo < hi ? lo : hi], &pen);
        if (lo != hi)
            point(out, f, s->step[lo < hi ? hi : lo], s->y[lo < hi ? hi : lo], &pen);
    }
}

static void numbers(ckpt_buf *out, const char *title, const report_series *series, size_t n)
{
    ckpt_buf_puts(out, "<details><summary>Numbers of ");
    ckpt_html(out, title);
    ckpt_buf_puts(out,
                  "</summary><div class=\"scroll\" tabindex=\"0\" role=\"region\" "
                  "aria-label=\"numbers\"><table><thead><tr><th>run</th><th class=\"n\">step</th>"
                  "<th class=\"n\">value</th></tr></thead><tbody>\n");
    for (size_t s = 0; s < n; s++) {
        size_t rows = series[s].n < ROWS ? series[s].n : ROWS;
        for (size_t r = 0; r < rows; r++) {
            size_t i = rows > 1 ? r * (series[s].n - 1) / (rows - 1) : 0;
            char text[32];
            ckpt_short_number(series[s].y[i], text);
            ckpt_buf_puts(out, "<tr><td>");
            ckpt_html(out, series[s].name);
            ckpt_buf_printf(out, "</td><td class=\"n\">%.0f</td><td class=\"n\">%s</td></tr>\n",
                            series[s].step[i], text);
        }
    }
    ckpt_buf_puts(out, "</tbody></table></div></details>\n");
}

static void key(ckpt_buf *out, const report_series *series, size_t n)
{
    ckpt_buf_puts(out, "<ul class=\"key\">");
    for (size_t s = 0; s < n; s++) {
        ckpt_buf_printf(out, "<li><b class=\"b%zu\"></b>", s % SERIES);
        ckpt_html(out, series[s].name);
        ckpt_buf_puts(out, "</li>");
    }
    ckpt_buf_puts(out, "</ul>\n");
}

void ckpt_chart(ckpt_buf *out, const char *title, const report_series *series, size_t n, bool log)
{
    frame f = {0};
    if (!find_frame(&f, series, n, log))
        return;
    ckpt_buf_puts(out, "<figure>\n<h3>");
    ckpt_html(out, title);
    ckpt_buf_printf(out, "%s</h3>\n<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"",
                    f.log ? " <span class=\"dim\">(logarithmic)</span>" : "", WIDTH, HEIGHT);
    ckpt_html(out, title);
    ckpt_buf_printf(out, " over steps %.0f to %.0f\">\n", f.x0, f.x1);
    axes(out, &f);
    for (size_t s = 0; s < n; s++) {
        /* a later run lies over an earlier one: that one is broad and pale, so that equal lines show
         * both */
        ckpt_buf_printf(out, "<path class=\"l s%zu%s\" d=\"", s % SERIES,
                        s == 0 && n > 1 ? " u" : "");
        path(out, &f, &series[s]);
        ckpt_buf_puts(out, "\"/>\n");
    }
    ckpt_buf_puts(out, "</svg>\n");
    key(out, series, n);
    numbers(out, title, series, n);
    ckpt_buf_puts(out, "</figure>\n");
}
