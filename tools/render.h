/* How results look: tables, colours, human sizes, the progress bar and JSON documents.
 * Text from input (tensor names, paths, values) passes ckpt_clean before it reaches a terminal. */
#ifndef CKPT_RENDER_H
#define CKPT_RENDER_H

#include "stream.h"

#include <stdio.h>
#include <time.h>

/* ---- text ------------------------------------------------------------------------------------ */

/* Printable copy: control characters and invalid UTF-8 become \xNN. "?" when out of memory. */
const char *ckpt_clean(ckpt_arena *arena, const char *s);
/* "1.23 GB" (decimal); exact below 1000 bytes. */
const char *ckpt_human(ckpt_arena *arena, uint64_t bytes);
/* "1,234,567". */
const char *ckpt_count(ckpt_arena *arena, uint64_t n);
/* "[2, 3]", "[]" for a scalar. */
const char *ckpt_shape(ckpt_arena *arena, int rank, const int64_t *dims);
/* Shortest text that reads back to the same double; nan, inf, -inf. */
void ckpt_real_text(double v, char out[32]);

typedef enum ckpt_paint {
    CKPT_PLAIN,
    CKPT_BOLD,
    CKPT_DIM,
    CKPT_RED,
    CKPT_GREEN,
    CKPT_YELLOW
} ckpt_paint;

/* Escape sequence that starts a paint, or "" when colours are off; and the one that ends it. */
const char *ckpt_paint_on(bool colour, ckpt_paint paint);
const char *ckpt_paint_off(bool colour);

/* Columns of the terminal behind a descriptor (COLUMNS overrides; 80 where nobody knows); 0 if it is
 * none. */
int ckpt_terminal_width(int fd);
/* The same for texts that are filled wherever they go, as help is: 80 if it is none. */
int ckpt_text_width(int fd);
int ckpt_terminal_height(int fd); /* rows; 24 where nobody knows */

/* ---- tables ---------------------------------------------------------------------------------- */

/* Cells are borrowed. Columns whose letter in `align` is 'r' are right-aligned; the last column is
 * never padded, and left out on a terminal without room if its letter is 'o'. Rows are printed by ckpt_table_print, under the header if there is one. */
typedef struct ckpt_table {
    const char *align; /* one letter a column */
    const char **cells;
    size_t n_cells, cap;
    bool failed;
} ckpt_table;

void ckpt_table_cell(ckpt_table *table, const char *text);
/* The first row is the header. indent: blanks before each row. */
void ckpt_table_print(const ckpt_table *table, FILE *out, int indent, bool header, bool colour);
void ckpt_table_release(ckpt_table *table);

/* ---- progress -------------------------------------------------------------------------------- */

typedef struct ckpt_bar {
    ckpt_progress progress; /* give &bar.progress to the executor */
    const char *label;
    struct timespec start, last;
    bool on, drawn;
} ckpt_bar;

void ckpt_bar_start(ckpt_bar *bar, const char *label, bool on);
/* Erase the bar. */
void ckpt_bar_stop(ckpt_bar *bar);
double ckpt_seconds_since(const struct timespec *start);

/* ---- JSON ------------------------------------------------------------------------------------ */

/* Streaming writer. key NULL inside arrays. Exhausted memory shows in buf.failed. */
typedef struct ckpt_jw {
    ckpt_buf buf;
    int depth;
    bool comma;
} ckpt_jw;

void ckpt_jw_open(ckpt_jw *w, const char *key, char bracket);    /* '{' or '[' */
void ckpt_jw_close(ckpt_jw *w, char bracket);                    /* '}' or ']' */
void ckpt_jw_string(ckpt_jw *w, const char *key, const char *s); /* NULL: null */
void ckpt_jw_int(ckpt_jw *w, const char *key, int64_t v);
void ckpt_jw_u64(ckpt_jw *w, const char *key, uint64_t v);
void ckpt_jw_real(ckpt_jw *w, const char *key, double v); /* non-finite: "nan", "inf", "-inf" */
void ckpt_jw_bool(ckpt_jw *w, const char *key, bool v);
void ckpt_jw_hex(ckpt_jw *w, const char *key, const uint8_t digest[CKPT_SHA256_LEN]);
void ckpt_jw_dims(ckpt_jw *w, const char *key, int rank, const int64_t *dims);
void ckpt_jw_json(ckpt_jw *w, const char *key, const ckpt_json *j); /* NULL: null */
void ckpt_jw_lines(ckpt_jw *w, const char *key, const char *const *lines, size_t n);

#endif
