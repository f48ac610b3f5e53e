/* The table of commands, and running one of them: for the program (ckpt.c) and the library (api.c). */
#include "command.h"

#include <stdlib.h>
#include <string.h>

#include "ranks.h"
#include "wrap.h"

/* clang-format off */
#define COMMANDS(X)        \
    X(ckpt_cmd_inspect)    \
    X(ckpt_cmd_convert)    \
    X(ckpt_cmd_verify)     \
    X(ckpt_cmd_diff)       \
    X(ckpt_cmd_formats)    \
    X(ckpt_cmd_train)      \
    X(ckpt_cmd_study)      \
    X(ckpt_cmd_gate)       \
    X(ckpt_cmd_gather)     \
    X(ckpt_cmd_sign)       \
    X(ckpt_cmd_completion) \
    X(ckpt_cmd_bench)      \
    X(ckpt_cmd_report)
#define DECLARED(name) extern const ckpt_command name;
#define LISTED(name) &name,
COMMANDS(DECLARED)
const ckpt_command *const ckpt_commands[] = {COMMANDS(LISTED) NULL};

const ckpt_opt ckpt_global_opts[] = {
    {"json",    CKPT_OPT_FLAG,   offsetof(ckpt_globals, json),    NULL,   "one JSON document on stdout",                0, 0},
    {"quiet",   CKPT_OPT_FLAG,   offsetof(ckpt_globals, quiet),   NULL,   "errors only",                                0, 0},
    {"verbose", CKPT_OPT_FLAG,   offsetof(ckpt_globals, verbose), NULL,   "more detail",                                0, 0},
    {"threads", CKPT_OPT_INT,    offsetof(ckpt_globals, threads), "N",    "worker threads (default: all cores)",        0, 1024},
    {"memory",  CKPT_OPT_SIZE,   offsetof(ckpt_globals, memory),  "SIZE", "budget for buffers (default 1GiB)",          0, 0},
    {"color",   CKPT_OPT_CHOICE, offsetof(ckpt_globals, color),   "auto|always|never", "colours on stdout (NO_COLOR is respected)", 0, 0},
    {"no-sandbox", CKPT_OPT_FLAG, offsetof(ckpt_globals, no_sandbox), NULL, "do without the sandbox of commands that only read", 0, 0},
    {"help",    CKPT_OPT_FLAG,   offsetof(ckpt_globals, help),    NULL,   "this text",                                  0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,                               NULL,   NULL,                                         0, 0},
};
/* clang-format on */

static size_t count_rows(const ckpt_opt *rows)
{
    size_t n = 0;
    while (rows[n].name != NULL)
        n++;
    return n;
}

/* What it is called like, and for. */
static void head(const ckpt_command *c, const char *between, int columns, ckpt_buf *b)
{
    ckpt_buf usage = {0};
    ckpt_buf_printf(&usage, "usage: ckpt %s [options] %s", c->name, c->synopsis);
    if (usage.data != NULL && !usage.failed)
        ckpt_wrap(b, (const char *)usage.data, usage.len, 0, 4, "", columns);
    ckpt_buf_release(&usage);
    ckpt_buf_printf(b, "\n%s", between);
    ckpt_wrap(b, c->what, strlen(c->what), 0, 2, "", columns);
    ckpt_buf_puts(b, "\n\n");
}

static void examples(const ckpt_command *c, int columns, ckpt_buf *b)
{
    if (c->examples == NULL)
        return;
    ckpt_buf_puts(b, "\nexamples:\n");
    ckpt_wrap_commands(b, c->examples, columns);
}

static void whole_help(const ckpt_command *command, int columns, ckpt_buf *b)
{
    ckpt_opt_table own = {.title = "options", .rows = command->opts};
    ckpt_opt_table global = {.title = "every command", .rows = ckpt_global_opts};
    head(command, "\n", columns, b);
    ckpt_opts_help(&own, SIZE_MAX, columns, b);
    ckpt_buf_putc(b, '\n');
    ckpt_opts_help(&global, SIZE_MAX, columns, b);
    if (command->notes != NULL) {
        ckpt_buf_putc(b, '\n');
        ckpt_wrap_notes(b, command->notes, columns);
    }
    examples(command, columns, b);
}

/* "TITLE: --a --b ...", wrapped. */
static void names(ckpt_buf *b, const char *title, const ckpt_opt *rows, int columns)
{
    size_t at = strlen(title) + 1;
    ckpt_buf_printf(b, "%s:", title);
    for (const ckpt_opt *o = rows; o->name != NULL; o++) {
        size_t n = strlen(o->name) + 3;
        if (at + n >= (size_t)columns) {
            ckpt_buf_puts(b, "\n ");
            at = 1;
        }
        ckpt_buf_printf(b, " --%s", o->name);
        at += n;
    }
    ckpt_buf_putc(b, '\n');
}

/* The first n options, the names of the others, and examples. */
static void brief_help(const ckpt_command *command, size_t n, int columns, ckpt_buf *b)
{
    ckpt_opt_table own = {.title = "options", .rows = command->opts};
    head(command, "", columns, b);
    ckpt_opts_help(&own, n, columns, b);
    if (command->opts[n].name != NULL)
        names(b, "more", command->opts + n, columns);
    names(b, "every command", ckpt_global_opts, columns);
    examples(command, columns, b);
    ckpt_buf_printf(b, "\nall of it: ckpt help %s\n", command->name);
}

static int rows_of(const ckpt_buf *b, int columns)
{
    int rows = 0, at = 0;
    for (size_t i = 0; i < b->len; i++) {
        at += b->data[i] != '\n';
        if (b->data[i] == '\n' || at > columns) {
            rows++;
            at = b->data[i] != '\n';
        }
    }
    return rows;
}

void ckpt_command_help(const ckpt_command *command, int columns, int rows, ckpt_buf *b)
{
    if (command->run == NULL) {
        ckpt_buf_printf(b, "usage: ckpt %s ...\n\n%s: not built yet\n", command->name,
                        command->what);
        return;
    }
    whole_help(command, columns, b);
    for (size_t n = count_rows(command->opts) + 1; rows_of(b, columns) >= rows && n > 0;) {
        b->len = 0;
        brief_help(command, --n, columns, b);
    }
}

/* ---- running --------------------------------------------------------------------------------- */

/* Names only what was asked for, so that the first line tells what to type instead. */
const ckpt_command *ckpt_command_find(const char *name, ckpt_err *err)
{
    const char *best = NULL;
    size_t best_distance = 3;
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        if (strcmp(ckpt_commands[i]->name, name) == 0)
            return ckpt_commands[i];
        size_t d = ckpt_distance(name, ckpt_commands[i]->name);
        if (d < best_distance) {
            best_distance = d;
            best = ckpt_commands[i]->name;
        }
    }
    if (name[0] == '-')
        (void)ckpt_fail(err, CKPT_E_USAGE,
                        "unknown option '%s'; options follow the command, see ckpt --help", name);
    else if (best != NULL)
        (void)ckpt_fail(err, CKPT_E_USAGE, "unknown command '%s'; did you mean '%s'?", name, best);
    else
        (void)ckpt_fail(err, CKPT_E_USAGE, "unknown command '%s'; see ckpt --help", name);
    return NULL;
}

void ckpt_command_begin_json(ckpt_tool *tool)
{
    ckpt_jw_open(&tool->json, NULL, '{');
    ckpt_jw_string(&tool->json, "command", tool->command->name);
    ckpt_jw_string(&tool->json, "version", CKPT_VERSION);
    ckpt_jw_string(&tool->json, "path", tool->operands.n > 0 ? tool->operands.items[0] : NULL);
}

void ckpt_command_end_json(ckpt_tool *tool, ckpt_status status, const ckpt_err *err)
{
    ckpt_jw *w = &tool->json;
    if (w->depth != 1 || w->buf.failed) { /* the command did not come to its end, or to a start */
        ckpt_buf_release(&w->buf);
        *w = (ckpt_jw){0};
        ckpt_command_begin_json(tool);
    }
    ckpt_jw_bool(w, "ok", status == CKPT_OK);
    if (err->text[0] != '\0') {
        ckpt_jw_open(w, "error", '{');
        ckpt_jw_string(w, "kind", ckpt_status_text(status));
        ckpt_jw_int(w, "exit", ckpt_exit_code(status));
        ckpt_jw_string(w, "message", err->text);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, '}');
    ckpt_buf_putc(&w->buf, '\n');
}

static ckpt_status check_operands(const ckpt_tool *tool, ckpt_err *err)
{
    const ckpt_command *c = tool->command;
    if (tool->operands.n < c->min_operands)
        return ckpt_fail(err, CKPT_E_USAGE, "missing operand; usage: ckpt %s %s", c->name,
                         c->synopsis);
    if (tool->operands.n > c->max_operands)
        return ckpt_fail(err, CKPT_E_USAGE, "unexpected operand '%s'; usage: ckpt %s %s",
                         tool->operands.items[c->max_operands], c->name, c->synopsis);
    for (size_t i = 0; i < tool->operands.n; i++)
        if (tool->operands.items[i][0] == '\0')
            return ckpt_fail(err, CKPT_E_USAGE, "empty operand");
    return CKPT_OK;
}

static void release_lists(const ckpt_command *command, void *opts)
{
    for (const ckpt_opt *o = command->opts; o->name != NULL; o++)
        if (o->kind == CKPT_OPT_LIST)
            ckpt_strings_release((ckpt_strings *)(void *)((char *)opts + o->offset));
}

ckpt_status ckpt_command_check(const ckpt_command *command, const ckpt_strings *words,
                               ckpt_err *err)
{
    ckpt_globals globals = {0};
    ckpt_strings operands = {0};
    void *opts = calloc(1, command->opts_size);
    ckpt_opt_table tables[] = {
        {"options",       command->opts,    opts,     NULL, NULL},
        {"every command", ckpt_global_opts, &globals, NULL, NULL}
    };
    if (opts == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_status status = ckpt_opts_parse(tables, 2, (int)words->n, (char **)(uintptr_t)words->items,
                                         &operands, NULL, err);
    if (status == CKPT_OK && operands.n > 0)
        status = ckpt_fail(err, CKPT_E_USAGE, "unexpected operand '%s'", operands.items[0]);
    ckpt_strings_release(&operands);
    release_lists(command, opts);
    free(opts);
    return status;
}

/* The rule for all commands: of an option that takes one value the last counts, and one that says something
 * else than before is told. Flags, lists and repetitions of the same are as they were meant. */
static void say_again(ckpt_tool *tool, const ckpt_opt_agains *again)
{
    for (size_t i = 0; i < again->n && ckpt_ranks_first(); i++)
        ckpt_tool_warn(tool, "--%s is given again: %s counts, not %s", again->items[i].name,
                       again->items[i].value, again->items[i].before);
}

ckpt_status ckpt_command_run(ckpt_tool *tool, int argc, char **argv,
                             void (*ready)(ckpt_tool *tool, const void *opts), ckpt_err *err)
{
    const ckpt_command *command = tool->command;
    ckpt_status status;
    const size_t n = count_rows(command->opts) + 1;
    ckpt_opt_agains again = {0};
    tool->given = ckpt_arena_array(&tool->arena, n, sizeof *tool->given);
    const char **values = ckpt_arena_array(&tool->arena, n, sizeof *values);
    const char **global =
        ckpt_arena_array(&tool->arena, count_rows(ckpt_global_opts) + 1, sizeof *global);
    void *opts = calloc(1, command->opts_size);
    if (opts == NULL || tool->given == NULL || values == NULL || global == NULL) {
        free(opts);
        return ckpt_tool_no_memory(err);
    }
    if (command->defaults != NULL)
        command->defaults(opts);
    ckpt_opt_table tables[] = {
        {"options",       command->opts,    opts,     tool->given, values},
        {"every command", ckpt_global_opts, &tool->g, NULL,        global}
    };
    CKPT_CHECK(ckpt_opts_parse(tables, 2, argc, argv, &tool->operands, &again, err));
    if (tool->g.help)
        goto done;
    if (tool->g.quiet && tool->g.verbose) {
        status = ckpt_fail(err, CKPT_E_USAGE, "--quiet and --verbose exclude each other");
        goto done;
    }
    if (tool->g.no_sandbox && command->only_reads == NULL) {
        status = ckpt_fail(err, CKPT_E_USAGE, "--no-sandbox has no effect: %s runs in none",
                           command->name);
        goto done;
    }
    CKPT_CHECK(check_operands(tool, err));
    CKPT_CHECK(ckpt_ranks_allowed(command, err));
    say_again(tool, &again);
    ready(tool, opts);
    if (tool->g.json)
        ckpt_command_begin_json(tool);
    status = command->run(tool, opts, err);
done:
    free(again.items);
    release_lists(command, opts);
    free(opts);
    return status;
}
