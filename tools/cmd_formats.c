/* ckpt formats: what this build reads and writes, from the tables that do it. The text is Markdown
 * and stands in README.md between two marks; a test compares them. A terminal that is too narrow for the
 * longest of its lines gets lists. */
#include "model.h"
#include "tool.h"

#include <string.h>
#include <unistd.h>

#include "wrap.h"

static const ckpt_opt rows[] = {
    {NULL, CKPT_OPT_FLAG, 0, NULL, NULL, 0, 0}
};

enum { N_COLUMNS = CKPT_N_KINDS + 1 }; /* the kinds of block, then multi-token prediction */

static const char *column_name(int column)
{
    return column < CKPT_N_KINDS ? ckpt_kinds[column].name : "mtp";
}

/* Whether a layout has rows for a kind of block. */
static bool has_column(const ckpt_layout *layout, int column)
{
    const char *name = column_name(column);
    size_t n = strlen(name);
    for (size_t i = 0; i < layout->n_rows; i++) {
        const char *canon = layout->rows[i].canon;
        const char *dot = strstr(canon, "}.");
        if (column == CKPT_N_KINDS ? strncmp(canon, "mtp.", 4) == 0
                                   : strncmp(canon, "blocks.", 7) == 0 && dot != NULL &&
                                         strncmp(dot + 2, name, n) == 0 && dot[2 + n] == '.')
            return true;
    }
    return false;
}

static void markdown(ckpt_buf *b)
{
    ckpt_buf_printf(b, "| container | read | write | what |\n|---|---|---|---|\n");
    for (const ckpt_container *const *c = ckpt_containers; *c != NULL; c++)
        ckpt_buf_printf(b, "| `%s` | yes | %s | %s |\n", (*c)->name,
                        (*c)->layout != NULL ? "yes" : "no", (*c)->what);
    ckpt_buf_printf(b, "\n| layout |");
    for (int k = 0; k < N_COLUMNS; k++)
        ckpt_buf_printf(b, " %s |", column_name(k));
    ckpt_buf_printf(b, "\n|---|");
    for (int k = 0; k < N_COLUMNS; k++)
        ckpt_buf_printf(b, "---|");
    ckpt_buf_printf(b, "\n");
    for (const ckpt_layout *const *l = ckpt_layouts; *l != NULL; l++) {
        ckpt_buf_printf(b, "| `%s` |", (*l)->name);
        for (int k = 0; k < N_COLUMNS; k++)
            ckpt_buf_printf(b, " %s |", has_column(*l, k) ? "yes" : "–");
        ckpt_buf_printf(b, "\n");
    }
}

static void narrow(ckpt_buf *b, int columns)
{
    ckpt_buf_puts(b, "containers (r: read, w: written):\n");
    for (const ckpt_container *const *c = ckpt_containers; *c != NULL; c++) {
        ckpt_buf_printf(b, "  %-17s%-3s", (*c)->name, (*c)->layout != NULL ? "rw" : "r");
        ckpt_wrap(b, (*c)->what, strlen((*c)->what), 22, 22, "", columns);
        ckpt_buf_putc(b, '\n');
    }
    ckpt_buf_puts(b, "\nlayouts, and the blocks they have:\n");
    for (const ckpt_layout *const *l = ckpt_layouts; *l != NULL; l++) {
        ckpt_buf_printf(b, "  %-18s", (*l)->name);
        size_t at = 20;
        for (int k = 0; k < N_COLUMNS; k++) {
            const size_t n = strlen(column_name(k)) + 1;
            if (!has_column(*l, k))
                continue;
            if (at + n >= (size_t)columns && at > 20) {
                ckpt_buf_printf(b, "\n%20s", "");
                at = 20;
            }
            ckpt_buf_printf(b, " %s", column_name(k));
            at += n;
        }
        ckpt_buf_putc(b, '\n');
    }
}

static size_t longest_line(const ckpt_buf *b)
{
    size_t longest = 0, at = 0;
    for (size_t i = 0; i < b->len; i++) {
        at = b->data[i] == '\n' ? 0 : at + 1;
        longest = at > longest ? at : longest;
    }
    return longest;
}

static ckpt_status print_text(ckpt_err *err)
{
    const int columns = ckpt_terminal_width(STDOUT_FILENO);
    ckpt_buf b = {0};
    markdown(&b);
    if (columns > 0 && longest_line(&b) > (size_t)columns) {
        ckpt_buf_clear(&b);
        narrow(&b, columns);
    }
    const bool failed = b.failed;
    if (!failed)
        fwrite(b.data, 1, b.len, stdout);
    ckpt_buf_release(&b);
    return failed ? ckpt_tool_no_memory(err) : CKPT_OK;
}

static void write_json(ckpt_jw *w)
{
    ckpt_jw_open(w, "containers", '[');
    for (const ckpt_container *const *c = ckpt_containers; *c != NULL; c++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", (*c)->name);
        ckpt_jw_string(w, "what", (*c)->what);
        ckpt_jw_bool(w, "read", true);
        ckpt_jw_bool(w, "write", (*c)->layout != NULL);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_open(w, "layouts", '[');
    for (const ckpt_layout *const *l = ckpt_layouts; *l != NULL; l++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", (*l)->name);
        ckpt_jw_string(w, "group", (*l)->group);
        ckpt_jw_string(w, "family", (*l)->family);
        ckpt_jw_open(w, "blocks", '[');
        for (int k = 0; k < N_COLUMNS; k++)
            if (has_column(*l, k))
                ckpt_jw_string(w, NULL, column_name(k));
        ckpt_jw_close(w, ']');
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    (void)opts;
    if (tool->g.json)
        write_json(&tool->json);
    return ckpt_tool_text(tool) ? print_text(err) : CKPT_OK;
}

const ckpt_command ckpt_cmd_formats = {
    .name = "formats",
    .synopsis = "",
    .what = "list containers and layouts",
    .opts = rows,
    .opts_size = 1, /* it has none of its own */
    .run = run,
};
