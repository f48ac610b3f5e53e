/* ckpt formats: what this build reads and writes, from the tables that do it. The text is Markdown
 * and stands in README.md between two marks; a test compares them. */
#include "model.h"
#include "tool.h"

#include <string.h>

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

static void print_text(void)
{
    printf("| container | read | write | what |\n|---|---|---|---|\n");
    for (const ckpt_container *const *c = ckpt_containers; *c != NULL; c++)
        printf("| `%s` | yes | %s | %s |\n", (*c)->name, (*c)->layout != NULL ? "yes" : "no",
               (*c)->what);
    printf("\n| layout |");
    for (int k = 0; k < N_COLUMNS; k++)
        printf(" %s |", column_name(k));
    printf("\n|---|");
    for (int k = 0; k < N_COLUMNS; k++)
        printf("---|");
    printf("\n");
    for (const ckpt_layout *const *l = ckpt_layouts; *l != NULL; l++) {
        printf("| `%s` |", (*l)->name);
        for (int k = 0; k < N_COLUMNS; k++)
            printf(" %s |", has_column(*l, k) ? "yes" : "–");
        printf("\n");
    }
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
    (void)err;
    if (ckpt_tool_text(tool))
        print_text();
    if (tool->g.json)
        write_json(&tool->json);
    return CKPT_OK;
}

const ckpt_command ckpt_cmd_formats = {
    .name = "formats",
    .synopsis = "",
    .what = "list containers and layouts",
    .opts = rows,
    .opts_size = 1, /* it has none of its own */
    .run = run,
};
