/* The program: the command table, global options, signals, and the one error line. */
#include "ranks.h"
#include "tool.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static const ckpt_command cmd_bench = {.name = "bench", .what = "measure this machine"};
static const ckpt_command cmd_report = {.name = "report", .what = "draw results as HTML"};

static const ckpt_command *const commands[] = {
    &ckpt_cmd_inspect, &ckpt_cmd_convert, &ckpt_cmd_verify, &ckpt_cmd_diff,
    &ckpt_cmd_formats, &ckpt_cmd_train,   &ckpt_cmd_study,  &ckpt_cmd_gate,
    &ckpt_cmd_sign,    &cmd_bench,        &cmd_report,
};

enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

/* clang-format off */
static const ckpt_opt global_opts[] = {
    {"json",    CKPT_OPT_FLAG,   offsetof(ckpt_globals, json),    NULL,   "one JSON document on stdout",                0, 0},
    {"quiet",   CKPT_OPT_FLAG,   offsetof(ckpt_globals, quiet),   NULL,   "errors only",                                0, 0},
    {"verbose", CKPT_OPT_FLAG,   offsetof(ckpt_globals, verbose), NULL,   "more detail",                                0, 0},
    {"threads", CKPT_OPT_INT,    offsetof(ckpt_globals, threads), "N",    "worker threads (default: all cores)",        0, 1024},
    {"memory",  CKPT_OPT_SIZE,   offsetof(ckpt_globals, memory),  "SIZE", "budget for buffers (default 1GiB)",          0, 0},
    {"color",   CKPT_OPT_CHOICE, offsetof(ckpt_globals, color),   "auto|always|never", "colours on stdout (NO_COLOR is respected)", 0, 0},
    {"help",    CKPT_OPT_FLAG,   offsetof(ckpt_globals, help),    NULL,   "this text",                                  0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,                               NULL,   NULL,                                         0, 0},
};
/* clang-format on */

/* ---- signals --------------------------------------------------------------------------------- */

static volatile sig_atomic_t unwinds; /* the running command removes its own output */
static char last_words[64];           /* of a command that does not unwind */
static size_t n_last_words;

static void on_signal(int signal)
{
    (void)signal;
    ckpt_interrupted = 1;
    if (unwinds)
        return;
    if (write(STDERR_FILENO, last_words, n_last_words) < 0) {
        /* nobody listens */
    }
    _exit(ckpt_exit_code(CKPT_E_INTERRUPTED));
}

static void install_signals(const ckpt_command *command)
{
    /* SIGUSR1 is what mpirun passes on to its ranks, and what Slurm sends ahead of a time limit. */
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    struct sigaction action = {0};
    unwinds = command->writes;
    /* on a terminal it follows a progress bar that has no line end yet */
    int n = snprintf(last_words, sizeof last_words, "%sckpt: %s: interrupted\n",
                     isatty(STDERR_FILENO) ? "\n" : "", command->name);
    n_last_words = n > 0 && (size_t)n < sizeof last_words ? (size_t)n : 0;
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        struct sigaction old;
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
    }
    /* A closed pipe or a file-size limit must not kill a conversion half-way: both come back as
     * errors of the call, and flush_stdout() deals with the first. */
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL);
}

/* Sharded checkpoints keep one descriptor per file open. */
static void raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* ---- help ------------------------------------------------------------------------------------ */

static void program_help(FILE *out)
{
    fprintf(out, "usage: ckpt COMMAND ...\n\n"
                 "Read, convert, reshard and verify model checkpoints.\n\ncommands:\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-10s %s%s\n", commands[i]->name, commands[i]->what,
                commands[i]->run == NULL ? " (not built yet)" : "");
    fprintf(out, "\n  ckpt help COMMAND     options of a command, as ckpt COMMAND --help\n"
                 "  ckpt --version        version\n\n"
                 "exit codes: 0 success, 1 differs or failed verification, 2 usage, 3 malformed "
                 "input,\n            4 unsupported or refused, 5 I/O, 130 interrupted\n");
}

static void command_help(const ckpt_command *command)
{
    if (command->run == NULL) {
        printf("usage: ckpt %s ...\n\n%s: not built yet\n", command->name, command->what);
        return;
    }
    ckpt_buf b = {0};
    ckpt_opt_table own = {"options", command->opts, NULL, NULL};
    ckpt_opt_table global = {"every command", global_opts, NULL, NULL};
    ckpt_buf_printf(&b, "usage: ckpt %s [options] %s\n\n%s\n\n", command->name, command->synopsis,
                    command->what);
    ckpt_opts_help(&own, &b);
    ckpt_buf_putc(&b, '\n');
    ckpt_opts_help(&global, &b);
    if (command->notes != NULL)
        ckpt_buf_printf(&b, "\n%s", command->notes);
    if (b.data != NULL)
        fputs((const char *)b.data, stdout);
    ckpt_buf_release(&b);
}

/* ---- running --------------------------------------------------------------------------------- */

/* Names only what was asked for, so that the first line tells what to type instead. */
static const ckpt_command *find_command(const char *name, ckpt_err *err)
{
    const char *best = NULL;
    size_t best_distance = 3;
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
        size_t d = ckpt_distance(name, commands[i]->name);
        if (d < best_distance) {
            best_distance = d;
            best = commands[i]->name;
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

static void begin_json(ckpt_tool *tool)
{
    ckpt_jw_open(&tool->json, NULL, '{');
    ckpt_jw_string(&tool->json, "command", tool->command->name);
    ckpt_jw_string(&tool->json, "version", CKPT_VERSION);
    ckpt_jw_string(&tool->json, "path", tool->operands.n > 0 ? tool->operands.items[0] : NULL);
}

static void end_json(ckpt_tool *tool, ckpt_status status, const ckpt_err *err)
{
    ckpt_jw *w = &tool->json;
    if (w->depth != 1 || w->buf.failed) { /* the command did not come to its end, or to a start */
        ckpt_buf_release(&w->buf);
        *w = (ckpt_jw){0};
        begin_json(tool);
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
    if (!w->buf.failed)
        fwrite(w->buf.data, 1, w->buf.len, stdout);
}

/* Lost output is a failure: `ckpt ... > full-disk` must not report success. */
static ckpt_status flush_stdout(ckpt_status status, ckpt_err *err)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    if (errno == 0) { /* a write before this one failed: trying once more says why */
        clearerr(stdout);
        if (putchar('\n') != EOF)
            (void)fflush(stdout);
    }
    if (errno == EPIPE) {
        signal(SIGPIPE, SIG_DFL);
        raise(SIGPIPE);
    }
    return status == CKPT_OK ? ckpt_fail_errno(err, errno != 0 ? errno : EIO, "standard output")
                             : status;
}

static bool want_color(int choice)
{
    const char *no_color = getenv("NO_COLOR");
    const char *term = getenv("TERM");
    if (choice != 0)
        return choice == 1;
    return isatty(STDOUT_FILENO) && (no_color == NULL || *no_color == '\0') && term != NULL &&
           strcmp(term, "dumb") != 0;
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

static size_t count_rows(const ckpt_opt *rows)
{
    size_t n = 0;
    while (rows[n].name != NULL)
        n++;
    return n;
}

static ckpt_status run_command(ckpt_tool *tool, int argc, char **argv, ckpt_err *err)
{
    const ckpt_command *command = tool->command;
    ckpt_status status;
    tool->given =
        ckpt_arena_array(&tool->arena, count_rows(command->opts) + 1, sizeof *tool->given);
    void *opts = calloc(1, command->opts_size);
    if (opts == NULL || tool->given == NULL) {
        free(opts);
        return ckpt_tool_no_memory(err);
    }
    if (command->defaults != NULL)
        command->defaults(opts);
    ckpt_opt_table tables[] = {
        {"options",       command->opts, opts,     tool->given},
        {"every command", global_opts,   &tool->g, NULL       }
    };
    CKPT_CHECK(ckpt_opts_parse(tables, 2, argc, argv, &tool->operands, err));
    if (tool->g.help) {
        command_help(command);
        goto done;
    }
    if (tool->g.quiet && tool->g.verbose) {
        status = ckpt_fail(err, CKPT_E_USAGE, "--quiet and --verbose exclude each other");
        goto done;
    }
    CKPT_CHECK(check_operands(tool, err));
    tool->color = want_color(tool->g.color);
    tool->progress = isatty(STDERR_FILENO) && !tool->g.quiet;
    raise_file_limit();
    install_signals(command);
    if (tool->g.json)
        begin_json(tool);
    status = command->run(tool, opts, err);
done:
    release_lists(command, opts);
    free(opts);
    return status;
}

/* --json asked for before the command line parsed to its end still gets a document. */
static bool asks_for_json(int argc, char **argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--json") == 0)
            return true;
    return false;
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    return false;
}

static int finish(ckpt_tool *tool, ckpt_status status, ckpt_err *err)
{
    if (tool->g.json && !tool->g.help)
        end_json(tool, status, err);
    status = flush_stdout(status, err);
    bool failed = status != CKPT_OK && err->text[0] != '\0';
    ckpt_tool_leave_device(tool);
    if (failed && ckpt_ranks_before_error(tool, status))
        fprintf(stderr, "ckpt: %s: %s\n", tool->command->name, err->text);
    ckpt_ranks_leave(tool, failed, ckpt_exit_code(status));
    ckpt_strings_release(&tool->operands);
    ckpt_buf_release(&tool->json.buf);
    ckpt_arena_free(&tool->arena);
    return ckpt_exit_code(status);
}

/* What is said before any command runs: versions, help. */
static int finish_plain(ckpt_status status, ckpt_err *err)
{
    status = flush_stdout(status, err);
    if (status != CKPT_OK)
        fprintf(stderr, "ckpt: %s\n", err->text);
    return ckpt_exit_code(status);
}

static int no_such_command(ckpt_tool *tool, const char *name, ckpt_err *err)
{
    const ckpt_command unknown = {.name = name};
    tool->command = &unknown;
    if (tool->g.json)
        end_json(tool, CKPT_E_USAGE, err);
    tool->command = NULL;
    ckpt_buf_release(&tool->json.buf);
    return finish_plain(CKPT_E_USAGE, err);
}

/* ckpt help [COMMAND] */
static int help(int argc, char **argv)
{
    ckpt_err err = {0};
    ckpt_status status = CKPT_OK;
    const ckpt_command *command = argc > 0 ? find_command(argv[0], &err) : NULL;
    if (argc == 0)
        program_help(stdout);
    else if (argc > 1)
        status = ckpt_fail(&err, CKPT_E_USAGE, "unexpected operand '%s'; usage: ckpt help COMMAND",
                           argv[1]);
    else if (command == NULL)
        status = CKPT_E_USAGE;
    else
        command_help(command);
    return finish_plain(status, &err);
}

int main(int argc, char **argv)
{
    ckpt_err err = {0};
    ckpt_tool tool = {.g = {.memory = (uint64_t)1 << 30}};
    ckpt_status status;
    if (argc < 2) {
        program_help(stderr);
        return ckpt_exit_code(CKPT_E_USAGE);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("ckpt %s\n", CKPT_VERSION);
        return finish_plain(CKPT_OK, &err);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return help(0, NULL);
    if (strcmp(argv[1], "help") == 0)
        return help(argc - 2, argv + 2);
    tool.g.json = asks_for_json(argc - 2, argv + 2);
    tool.command = find_command(argv[1], &err);
    if (tool.command == NULL)
        return no_such_command(&tool, argv[1], &err);
    if (tool.command->run != NULL) {
        status = run_command(&tool, argc - 2, argv + 2, &err);
    } else if (asks_for_help(argc - 2, argv + 2)) {
        tool.g.help = true;
        command_help(tool.command);
        status = CKPT_OK;
    } else {
        status = ckpt_fail(&err, CKPT_E_UNSUPPORTED, "not built yet");
    }
    return finish(&tool, status, &err);
}
