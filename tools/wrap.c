#include "wrap.h"

#include <stdint.h>
#include <string.h>

static bool is_blank(char c)
{
    return c == ' ' || c == '\n';
}

/* Of a text longer than `room` columns: how many bytes go there. 0: none, the next line has more room. */
static size_t cut_at(const char *text, size_t room, bool whole_line)
{
    for (size_t i = room + 1; i > 1; i--)
        if (is_blank(text[i - 1]))
            return i - 1;
    if (!whole_line)
        return 0;
    for (size_t i = room; i > 1; i--)
        if (text[i - 1] == '|' || text[i - 1] == ',' || text[i - 1] == '/')
            return i;
    while (room > 1 && ((unsigned char)text[room] & 0xc0) == 0x80)
        room--;
    return room;
}

static void put(ckpt_buf *out, const char *text, size_t n)
{
    size_t start = out->len;
    ckpt_buf_append(out, text, n);
    for (size_t i = start; i < out->len; i++)
        out->data[i] = out->data[i] == '\n' ? ' ' : out->data[i];
}

void ckpt_wrap(ckpt_buf *out, const char *text, size_t n, size_t at, size_t indent,
               const char *more, int columns)
{
    const size_t end = columns <= 0 ? SIZE_MAX : columns < 16 ? 15 : (size_t)columns - 1;
    const size_t extra = strlen(more);
    size_t blanks = 0;
    while (blanks < n && text[blanks] == ' ')
        blanks++;
    put(out, text, blanks);
    text += blanks;
    n -= blanks;
    at += blanks;
    indent = indent + extra + 8 <= end ? indent : 0;
    while (n > (at < end ? end - at : 0)) {
        size_t room = at + extra < end ? end - at - extra : 0;
        size_t cut = room > 0 ? cut_at(text, room, at <= indent) : 0;
        put(out, text, cut);
        ckpt_buf_printf(out, "%s\n%*s", more, (int)indent, "");
        for (; cut < n && is_blank(text[cut]);)
            cut++;
        text += cut;
        n -= cut;
        at = indent;
    }
    put(out, text, n);
}

/* Bytes of the paragraph, or the one line, that text begins with; *fits: none of its lines is too long. */
static size_t piece(const char *text, int columns, bool *fits)
{
    size_t n = 0;
    *fits = true;
    do {
        size_t len = strcspn(text + n, "\n");
        *fits = *fits && (columns <= 0 || len < (size_t)columns);
        n += len + (text[n + len] == '\n');
    } while (*text != ' ' && text[n] != '\0' && !is_blank(text[n]));
    return n;
}

void ckpt_wrap_notes(ckpt_buf *out, const char *text, int columns)
{
    while (*text != '\0') {
        bool fits;
        size_t n = piece(text, columns, &fits), blanks = strspn(text, " ");
        if (fits) {
            ckpt_buf_append(out, text, n);
        } else {
            ckpt_wrap(out, text, n - (text[n - 1] == '\n'), 0, blanks > 0 ? blanks + 2 : 0, "",
                      columns);
            ckpt_buf_putc(out, '\n');
        }
        text += n;
    }
}

void ckpt_wrap_commands(ckpt_buf *out, const char *text, int columns)
{
    while (*text != '\0') {
        size_t n = strcspn(text, "\n");
        ckpt_wrap(out, text, n, 0, 6, " \\", columns);
        ckpt_buf_putc(out, '\n');
        text += n + (text[n] == '\n');
    }
}
