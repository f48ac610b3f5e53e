#include "render.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* ---- text ------------------------------------------------------------------------------------ */

static bool is_printable(const char *s, size_t len)
{
    unsigned char c = (unsigned char)s[0];
    if (len == 0)
        return false;
    if (len == 1)
        return c >= 0x20 && c != 0x7f;
    /* U+0080..U+009F are control characters of their own */
    return !(len == 2 && c == 0xc2 && (unsigned char)s[1] < 0xa0);
}

const char *ckpt_clean(ckpt_arena *arena, const char *s)
{
    size_t n = strlen(s);
    bool clean = true;
    for (size_t i = 0; i < n && clean; i++)
        clean = (unsigned char)s[i] >= 0x20 && (unsigned char)s[i] < 0x7f;
    if (clean)
        return s;
    ckpt_buf b = {0};
    for (size_t i = 0; i < n;) {
        size_t len = ckpt_utf8_len(s + i, n - i);
        if (is_printable(s + i, len)) {
            ckpt_buf_append(&b, s + i, len);
            i += len;
        } else {
            ckpt_buf_printf(&b, "\\x%02x", (unsigned char)s[i]);
            i++;
        }
    }
    char *copy = b.failed ? NULL : ckpt_arena_strndup(arena, (const char *)b.data, b.len);
    ckpt_buf_release(&b);
    return copy != NULL ? copy : "?";
}

static const char *or_mark(const char *s)
{
    return s != NULL ? s : "?";
}

const char *ckpt_human(ckpt_arena *arena, uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 999.5 && u + 1 < sizeof units / sizeof units[0]) {
        v /= 1000;
        u++;
    }
    int digits = u == 0 || v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2;
    return or_mark(ckpt_arena_printf(arena, "%.*f %s", digits, v, units[u]));
}

const char *ckpt_count(ckpt_arena *arena, uint64_t n)
{
    char digits[24], out[32];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    int o = 0;
    for (int i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0)
            out[o++] = ',';
        out[o++] = digits[i];
    }
    out[o] = '\0';
    return or_mark(ckpt_arena_strdup(arena, out));
}

const char *ckpt_shape(ckpt_arena *arena, int rank, const int64_t *dims)
{
    char text[CKPT_MAX_RANK * 22 + 4];
    size_t n = 0;
    text[n++] = '[';
    for (int i = 0; i < rank; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%lld", i > 0 ? ", " : "",
                              (long long)dims[i]);
    text[n++] = ']';
    return or_mark(ckpt_arena_strndup(arena, text, n));
}

void ckpt_real_text(double v, char out[32])
{
    if (isnan(v)) {
        memcpy(out, "nan", 4);
        return;
    }
    if (isinf(v)) {
        memcpy(out, v < 0 ? "-inf" : "inf", v < 0 ? 5 : 4);
        return;
    }
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, v);
        if (strtod(out, NULL) == v)
            return;
    }
}

const char *ckpt_paint_on(bool colour, ckpt_paint paint)
{
    static const char *const codes[] = {"",         "\033[1m",  "\033[2m",
                                        "\033[31m", "\033[32m", "\033[33m"};
    return colour ? codes[paint] : "";
}

const char *ckpt_paint_off(bool colour)
{
    return colour ? "\033[0m" : "";
}

/* ---- tables ---------------------------------------------------------------------------------- */

void ckpt_table_cell(ckpt_table *table, const char *text)
{
    void *cells = table->cells;
    if (ckpt_grow(&cells, &table->cap, table->n_cells + 1, sizeof *table->cells, NULL) != CKPT_OK) {
        table->failed = true;
        return;
    }
    table->cells = cells;
    table->cells[table->n_cells++] = text;
}

/* Columns a terminal needs: code points, which is right for the names we print. */
static int width_of(const char *s)
{
    int n = 0;
    for (; *s != '\0'; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static int width_of_all(const int *width, size_t n, int indent)
{
    int all = indent + 2 * ((int)n - 1);
    for (size_t c = 0; c < n; c++)
        all += width[c];
    return all;
}

/* On a terminal a table that is too wide gives up first a last column that is 'o', then the middle of
 * its cells: the widest column, which holds names, is cut to what is left, but not below 16. Elsewhere
 * nothing is ever cut. Columns that are shown. */
static size_t fit(int *width, const char *align, int indent, int room)
{
    size_t n = strlen(align);
    if (room > 0 && n > 1 && align[n - 1] == 'o' && width_of_all(width, n, indent) > room)
        n--;
    int all = width_of_all(width, n, indent);
    while (room > 0 && all > room) {
        size_t widest = 0;
        for (size_t c = 1; c < n; c++)
            widest = width[c] > width[widest] ? c : widest;
        int less = all - room < width[widest] - 16 ? all - room : width[widest] - 16;
        if (less <= 0)
            break;
        /* two wide columns share the loss */
        less = less > 8 ? 8 : less;
        width[widest] -= less;
        all -= less;
    }
    return n;
}

/* The cell, its middle replaced where it is wider than the column. */
static void print_cell(FILE *out, const char *cell, int width)
{
    int w = width_of(cell), keep = width - 3, head = keep / 3;
    if (w <= width) {
        fputs(cell, out);
        return;
    }
    const char *s = cell;
    for (int i = 0; i < head; i++) {
        fputc(*s++, out);
        while (((unsigned char)*s & 0xc0) == 0x80)
            fputc(*s++, out);
    }
    fputs("...", out);
    const char *e = cell + strlen(cell);
    for (int i = 0; i < keep - head; i++)
        do
            e--;
        while (((unsigned char)*e & 0xc0) == 0x80);
    fputs(e, out);
}

/* A width in a format costs more than all else that is printed of a million rows. */
static void put_blanks(FILE *out, int n)
{
    for (; n > 0; n--)
        putc_unlocked(' ', out);
}

void ckpt_table_print(const ckpt_table *table, FILE *out, int indent, bool header, bool colour)
{
    enum { MAX_COLUMNS = 16 };
    int width[MAX_COLUMNS] = {0};
    size_t n = strlen(table->align);
    if (n == 0 || n > MAX_COLUMNS)
        return;
    size_t rows = table->n_cells / n;
    for (size_t i = 0; i < rows * n; i++) {
        int w = width_of(table->cells[i]);
        if (w > width[i % n])
            width[i % n] = w;
    }
    size_t shown = fit(width, table->align, indent, ckpt_terminal_width(fileno(out)));
    for (size_t r = 0; r < rows; r++) {
        bool head = header && r == 0;
        put_blanks(out, indent);
        fputs(ckpt_paint_on(colour && head, CKPT_BOLD), out);
        for (size_t c = 0; c < shown; c++) {
            const char *cell = table->cells[r * n + c];
            int pad = width[c] > width_of(cell) ? width[c] - width_of(cell) : 0;
            bool right = table->align[c] == 'r';
            put_blanks(out, right ? pad : 0);
            print_cell(out, cell, width[c]);
            put_blanks(out, c + 1 == shown ? 0 : right ? 2 : pad + 2);
        }
        fputs(ckpt_paint_off(colour && head), out);
        putc('\n', out);
    }
}

void ckpt_table_release(ckpt_table *table)
{
    free(table->cells);
    table->cells = NULL;
    table->n_cells = table->cap = 0;
}

/* ---- progress -------------------------------------------------------------------------------- */

static double seconds_between(const struct timespec *a, const struct timespec *b)
{
    return (double)(b->tv_sec - a->tv_sec) + (double)(b->tv_nsec - a->tv_nsec) * 1e-9;
}

double ckpt_seconds_since(const struct timespec *start)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return seconds_between(start, &now);
}

int ckpt_text_width(int fd)
{
    struct winsize size;
    const char *columns = getenv("COLUMNS");
    long n = columns != NULL ? strtol(columns, NULL, 10) : 0;
    if (n < 20 && isatty(fd) && ioctl(fd, TIOCGWINSZ, &size) == 0)
        n = size.ws_col;
    return n >= 20 && n < 10000 ? (int)n : 80;
}

int ckpt_terminal_width(int fd)
{
    return isatty(fd) ? ckpt_text_width(fd) : 0;
}

int ckpt_terminal_height(int fd)
{
    struct winsize size;
    return isatty(fd) && ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 ? size.ws_row : 24;
}

/* The end of a name tells tensors apart: what is too long loses its beginning. */
static const char *tail(const char *name, size_t room, const char **dots)
{
    size_t n = strlen(name);
    *dots = n > room ? "..." : "";
    if (n <= room)
        return name;
    const char *s = name + n - (room > 3 ? room - 3 : 0);
    while (((unsigned char)*s & 0xc0) == 0x80)
        s++;
    return s;
}

static void bar_tick(void *self, uint64_t done, uint64_t total, const char *now_at)
{
    enum { CELLS = 20 };
    ckpt_bar *bar = self;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double elapsed = seconds_between(&bar->start, &now);
    if (elapsed < 0.3 || (bar->drawn && seconds_between(&bar->last, &now) < 0.1))
        return;
    char cells[CELLS + 1];
    double part = total > 0 ? (double)done / (double)total : 1;
    double rate = (double)done / elapsed;
    int width = ckpt_terminal_width(STDERR_FILENO), n = width < 90 ? CELLS / 3 : CELLS;
    int full = (int)(part * n);
    for (int i = 0; i < n; i++)
        cells[i] = i < full ? '#' : '.';
    cells[n] = '\0';
    ckpt_arena scratch = {0};
    ckpt_buf b = {0};
    ckpt_buf_printf(&b, "%s [%s] %3.0f%%  %s of %s  %s/s", bar->label, cells, part * 100,
                    ckpt_human(&scratch, done), ckpt_human(&scratch, total),
                    ckpt_human(&scratch, (uint64_t)rate));
    if (done > 0 && done < total) {
        double left = (double)(total - done) / rate;
        ckpt_buf_printf(&b, "  ETA %d:%02d", (int)(left / 60), (int)left % 60);
    }
    if (now_at != NULL && !b.failed && (size_t)width > b.len + 12) {
        const char *dots, *name = ckpt_clean(&scratch, now_at);
        name = tail(name, (size_t)width - b.len - 3, &dots);
        ckpt_buf_printf(&b, "  %s%s", dots, name);
    }
    if (b.data != NULL)
        fprintf(stderr, "\r\033[K%.*s", width > 1 ? width - 1 : 79, (const char *)b.data);
    ckpt_buf_release(&b);
    ckpt_arena_free(&scratch);
    fflush(stderr);
    bar->last = now;
    bar->drawn = true;
}

void ckpt_bar_start(ckpt_bar *bar, const char *label, bool on)
{
    memset(bar, 0, sizeof *bar);
    bar->label = label;
    bar->on = on;
    bar->progress.self = bar;
    bar->progress.tick = bar_tick;
    clock_gettime(CLOCK_MONOTONIC, &bar->start);
}

void ckpt_bar_stop(ckpt_bar *bar)
{
    if (bar->drawn)
        fputs("\r\033[K", stderr);
    bar->drawn = false;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void put_key(ckpt_jw *w, const char *key)
{
    if (w->comma)
        ckpt_buf_putc(&w->buf, ',');
    if (key != NULL) {
        ckpt_json_quote(&w->buf, key, strlen(key));
        ckpt_buf_putc(&w->buf, ':');
    }
    w->comma = true;
}

void ckpt_jw_open(ckpt_jw *w, const char *key, char bracket)
{
    put_key(w, key);
    ckpt_buf_putc(&w->buf, bracket);
    w->comma = false;
    w->depth++;
}

void ckpt_jw_close(ckpt_jw *w, char bracket)
{
    ckpt_buf_putc(&w->buf, bracket);
    w->comma = true;
    w->depth--;
}

void ckpt_jw_string(ckpt_jw *w, const char *key, const char *s)
{
    put_key(w, key);
    if (s != NULL)
        ckpt_json_quote(&w->buf, s, strlen(s));
    else
        ckpt_buf_puts(&w->buf, "null");
}

void ckpt_jw_int(ckpt_jw *w, const char *key, int64_t v)
{
    put_key(w, key);
    ckpt_buf_printf(&w->buf, "%lld", (long long)v);
}

void ckpt_jw_u64(ckpt_jw *w, const char *key, uint64_t v)
{
    put_key(w, key);
    ckpt_buf_printf(&w->buf, "%llu", (unsigned long long)v);
}

void ckpt_jw_real(ckpt_jw *w, const char *key, double v)
{
    char text[32];
    ckpt_real_text(v, text);
    put_key(w, key);
    ckpt_buf_printf(&w->buf, isfinite(v) ? "%s" : "\"%s\"", text);
}

void ckpt_jw_bool(ckpt_jw *w, const char *key, bool v)
{
    put_key(w, key);
    ckpt_buf_puts(&w->buf, v ? "true" : "false");
}

void ckpt_jw_hex(ckpt_jw *w, const char *key, const uint8_t digest[CKPT_SHA256_LEN])
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_hex(digest, hex);
    ckpt_jw_string(w, key, hex);
}

void ckpt_jw_dims(ckpt_jw *w, const char *key, int rank, const int64_t *dims)
{
    ckpt_jw_open(w, key, '[');
    for (int i = 0; i < rank; i++)
        ckpt_jw_int(w, NULL, dims[i]);
    ckpt_jw_close(w, ']');
}

void ckpt_jw_json(ckpt_jw *w, const char *key, const ckpt_json *j)
{
    put_key(w, key);
    if (j == NULL)
        ckpt_buf_puts(&w->buf, "null");
    else if (!ckpt_json_print(j, 0, false, &w->buf))
        w->buf.failed = true;
}

void ckpt_jw_lines(ckpt_jw *w, const char *key, const char *const *lines, size_t n)
{
    ckpt_jw_open(w, key, '[');
    for (size_t i = 0; i < n; i++)
        ckpt_jw_string(w, NULL, lines[i]);
    ckpt_jw_close(w, ']');
}
