/* The program: signals, help, the one error line. */
#include "command.h"
#include "engine.h"
#include "ranks.h"
#include "sandbox.h"
#include "wrap.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* ---- signals --------------------------------------------------------------------------------- */

static volatile sig_atomic_t unwinds; /* the running command removes its own output */
static char last_words[64];           /* of a command that does not unwind */
static size_t n_last_words;

static void on_signal(int signal)
{
    (void)signal;
    if (__atomic_load_n(&ckpt_tool_ending, __ATOMIC_RELAXED) == CKPT_ENDS_LATER &&
        __atomic_exchange_n(&ckpt_tool_asked, 1, __ATOMIC_RELAXED) == 0)
        return;
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

static void print_buf(ckpt_buf *b, FILE *out)
{
    if (b->data != NULL && !b->failed)
        fwrite(b->data, 1, b->len, out);
    ckpt_buf_release(b);
}

static void program_help(FILE *out)
{
    const int columns = ckpt_text_width(fileno(out));
    static const char end[] =
        "\nckpt COMMAND --help tells its options, ckpt --version what was built in:\n"
        "  ckpt convert kimi/ mg/ --to torch_dist --layout megatron --tp 2\n"
        "of an option given again with another value the last counts, which is told\n"
        "exit: 0 ok, 1 differs, 2 usage, 3 malformed, 4 refused, 5 I/O, 130 interrupted\n";
    ckpt_buf b = {0};
    ckpt_buf_puts(&b, "usage: ckpt COMMAND ...\n");
    ckpt_wrap_notes(&b, "Read, convert, reshard and verify model checkpoints.\n\ncommands:\n",
                    columns);
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        const ckpt_command *c = ckpt_commands[i];
        ckpt_buf_printf(&b, "  %-10s ", c->name);
        ckpt_wrap(&b, c->what, strlen(c->what), 13, 13, "", columns);
        ckpt_buf_puts(&b, c->run == NULL ? " (not built yet)\n" : "\n");
    }
    ckpt_wrap_notes(&b, end, columns);
    print_buf(&b, out);
}

/* all: also what does not fit into the terminal. */
static void print_help(const ckpt_command *command, bool all)
{
    ckpt_buf b = {0};
    const bool whole = all || !isatty(STDOUT_FILENO);
    ckpt_command_help(command, ckpt_text_width(STDOUT_FILENO),
                      whole ? INT_MAX : ckpt_terminal_height(STDOUT_FILENO), &b);
    print_buf(&b, stdout);
}

/* ---- running --------------------------------------------------------------------------------- */

static void finish_json(ckpt_tool *tool, ckpt_status status, const ckpt_err *err)
{
    ckpt_command_end_json(tool, status, err);
    if (!tool->json.buf.failed)
        fwrite(tool->json.buf.data, 1, tool->json.buf.len, stdout);
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

/* Before the first byte of a checkpoint is looked at. */
static void ready(ckpt_tool *tool, const void *opts)
{
    const ckpt_command *c = tool->command;
    bool sandboxed = c->only_reads != NULL && c->only_reads(opts) && !tool->g.no_sandbox;
    tool->color = want_color(tool->g.color);
    tool->progress = isatty(STDERR_FILENO) && !tool->g.quiet;
    raise_file_limit();
    install_signals(tool->command);
    if (sandboxed && !ckpt_sandbox_enter() && tool->g.verbose)
        ckpt_tool_note(tool, "this kernel offers no sandbox");
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
        finish_json(tool, status, err);
    status = flush_stdout(status, err);
    bool failed = status != CKPT_OK && err->text[0] != '\0';
    if (failed && ckpt_ranks_before_error(tool, status))
        fprintf(stderr, "ckpt: %s: %s\n", tool->command->name, err->text);
    ckpt_ranks_leave(tool, failed, ckpt_exit_code(status));
    ckpt_tool_leave_device(tool); /* whose stream ranks used */
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
        finish_json(tool, CKPT_E_USAGE, err);
    tool->command = NULL;
    ckpt_buf_release(&tool->json.buf);
    return finish_plain(CKPT_E_USAGE, err);
}

/* What the Makefile found, which parts lie where they would be loaded from, what this machine has. */
static void print_version(ckpt_tool *tool)
{
    static const struct {
        const char *what, *file;
    } parts[] = {
        {"MPI",           "libckpt_mpi.so" },
        {"CUDA and NCCL", "libckpt_cuda.so"}
    };
    static const char *const simd[] = {"baseline", "AVX2 and FMA", "AVX-512"};
    printf("ckpt %s\n", CKPT_VERSION);
    printf("built with %s\n", CKPT_FEATURES);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const char *path = ckpt_tool_part(&tool->arena, parts[i].file);
        bool there = path != NULL && access(path, F_OK) == 0;
        printf("%s: %s%s\n", parts[i].what, there ? path : "no ", there ? "" : parts[i].file);
    }
    printf("sandbox: %s\n",
           ckpt_sandbox_available() ? "seccomp" : "none, this kernel has no seccomp filters");
    printf("this processor: %s kernels, SHA-256 %s\n", simd[ckpt_eng_detect()],
           ckpt_sha256_stream_wide(CKPT_SHA256_LANES) ? "in sixteen lanes"
           : ckpt_sha256_stream_available()           ? "by SHA instructions"
                                                      : "by OpenSSL");
}

/* ckpt help [COMMAND] */
static int help(int argc, char **argv)
{
    ckpt_err err = {0};
    ckpt_status status = CKPT_OK;
    const ckpt_command *command = argc > 0 ? ckpt_command_find(argv[0], &err) : NULL;
    if (argc == 0)
        program_help(stdout);
    else if (argc > 1)
        status = ckpt_fail(&err, CKPT_E_USAGE, "unexpected operand '%s'; usage: ckpt help COMMAND",
                           argv[1]);
    else if (command == NULL)
        status = CKPT_E_USAGE;
    else
        print_help(command, true);
    return finish_plain(status, &err);
}

int main(int argc, char **argv)
{
    ckpt_err err = {0};
    /* Should it be loaded (svd.c): this program divides the work itself, and a thread that could not be
     * started (ulimit -v) would be waited for. */
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 0);
    ckpt_tool tool = {.g = {.memory = (uint64_t)1 << 30}};
    ckpt_status status;
    if (argc < 2) {
        program_help(stderr);
        return ckpt_exit_code(CKPT_E_USAGE);
    }
    if (strcmp(argv[1], "--version") == 0) {
        print_version(&tool);
        ckpt_arena_free(&tool.arena);
        return finish_plain(CKPT_OK, &err);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return help(0, NULL);
    if (strcmp(argv[1], "help") == 0)
        return help(argc - 2, argv + 2);
    tool.g.json = asks_for_json(argc - 2, argv + 2);
    tool.command = ckpt_command_find(argv[1], &err);
    if (tool.command == NULL)
        return no_such_command(&tool, argv[1], &err);
    if (tool.command->run != NULL) {
        status = ckpt_command_run(&tool, argc - 2, argv + 2, ready, &err);
        if (tool.g.help && status == CKPT_OK)
            print_help(tool.command, false);
    } else if (asks_for_help(argc - 2, argv + 2)) {
        tool.g.help = true;
        print_help(tool.command, false);
        status = CKPT_OK;
    } else {
        status = ckpt_fail(&err, CKPT_E_UNSUPPORTED, "not built yet");
    }
    return finish(&tool, status, &err);
}
