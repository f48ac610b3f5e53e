/* ckpt report: one HTML page of pictures from JSON that other commands wrote. The parts of the command.
 *
 * The page needs nothing beside itself: styles and SVG are inline, there is no script. Colours are
 * variables with a light and a dark set (prefers-color-scheme). Every picture has a title and
 * description for screen readers and its numbers in a table below it that opens by keyboard. */
#ifndef CKPT_REPORT_H
#define CKPT_REPORT_H

#include "tool.h"

/* One run's metrics: a line of metrics.jsonl that has a step is a point. */
typedef struct report_series {
    const char *name;
    double *step, *y; /* n each */
    size_t n;
} report_series;

typedef struct report_input {
    const char *path, *name; /* name: what tells it from the others */
    ckpt_json *doc;          /* the document of a command; NULL for metrics */
    ckpt_json **lines;       /* of metrics */
    size_t n_lines, cap;
} report_input;

/* ---- text (report_page.c) -------------------------------------------------------------------- */

void ckpt_html(ckpt_buf *out, const char *s); /* escaped, control characters shown as '?' */
void ckpt_page_begin(ckpt_buf *out, const char *title);
void ckpt_page_end(ckpt_buf *out);
/* A number as people write it: 4 digits. */
void ckpt_short_number(double v, char out[32]);

/* ---- pictures -------------------------------------------------------------------------------- */

/* report_chart.c: lines over steps, at most six series; one that has no finite value is left out.
 * Lines of many points are drawn as their extremes a column. log: a logarithmic scale if all are > 0. */
void ckpt_chart(ckpt_buf *out, const char *title, const report_series *series, size_t n, bool log);

/* report_heat.c: values of tensors, by layer (rows, from "blocks.N.") and module (columns, the rest of
 * the name; all experts are one column with the largest). value < 0: equal, drawn empty; NaN: differs
 * in kind (shape, dtype, absent), drawn marked. */
typedef struct report_cell {
    const char *name;
    double value;
    const char *what; /* for people */
} report_cell;
ckpt_status ckpt_heat(ckpt_buf *out, ckpt_arena *arena, const char *title, const char *unit,
                      const report_cell *cells, size_t n, ckpt_err *err) CKPT_MUST_USE;

/* report_doc.c: what a document of a command holds. Errors: CKPT_E_FORMAT it is none that is known. */
ckpt_status ckpt_report_doc(ckpt_buf *out, ckpt_arena *arena, const report_input *in,
                            ckpt_err *err) CKPT_MUST_USE;
/* report_study.c: the document of `ckpt study`. */
ckpt_status ckpt_report_study(ckpt_buf *out, ckpt_arena *arena, const ckpt_json *doc,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
