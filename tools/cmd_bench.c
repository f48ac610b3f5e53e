/* ckpt bench: what this program costs here beside what would be run instead, and what this machine can do.
 *
 * A case is a JSON object; a file of them is an array (--cases). Members: name; subject and baseline,
 * each the words of a command, "ckpt" being this program, or of an operation of it, which begins with '@'
 * (bench_memory.c, bench_disk.c, bench_engine.c); beside, a word for the baseline. Optional: target, the
 * ratio that is aimed at; memory, the same of peak memory; limit, MiB that the subject may take at its
 * peak; cold, true to drop all files from the page cache before every run; needs, a program, and probe, a
 * command, without (the success of) which the case is skipped; prepare and check, commands that run once,
 * before and after. In all words {src} is a safetensors file of --size, {part} one of a quarter, {wide} one
 * of f32 and half the size (both at least 256 MiB if --size is), {small} one of tensors of 4 KiB and an
 * eighth of the size, {tiny} one tensor, {out} an empty directory, made anew before
 * each run, {dir} one that stays, {here} the directory of the case file, {python} $PYTHON or python3.
 *
 * The result is checked first; memory is settled where --size is 1 GiB or more; then subject and baseline
 * alternate, --pairs times. The ratio is that of medians, above 1 if the subject is faster. Ratios are
 * what is kept (--history) and compared (--against): they hold on a machine that is busy or another,
 * where rates do not. */
#include "bench.h"
#include "io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PAIRS = 100 };
#define FILE_MAX ((uint64_t)64 << 20) /* of cases and histories, bytes */

typedef struct bench_opts {
    uint64_t size;
    int64_t pairs;
    double slack;
    const char *dir, *cases, *history, *against;
    ckpt_strings only;
} bench_opts;

#define AT(field) offsetof(bench_opts, field)
/* clang-format off */
static const ckpt_opt rows[] = {
    {"size",    CKPT_OPT_SIZE,   AT(size),    "SIZE", "of the source that is made (default 256MiB)",             0, 0},
    {"dir",     CKPT_OPT_STRING, AT(dir),     "DIR",  "where to make it (default TMPDIR or /tmp)",               0, 0},
    {"pairs",   CKPT_OPT_INT,    AT(pairs),   "N",    "runs of each command (default 5)",                        1, MAX_PAIRS},
    {"only",    CKPT_OPT_LIST,   AT(only),    "GLOB", "cases, or rates (machine: ...), whose name matches; repeatable",                    0, 0},
    {"cases",   CKPT_OPT_STRING, AT(cases),   "FILE", "more cases; they are commands: run only files you trust", 0, 0},
    {"history", CKPT_OPT_STRING, AT(history), "FILE", "append the results, a line of JSON",                      0, 0},
    {"against", CKPT_OPT_STRING, AT(against), "FILE", "fail if a ratio is worse than in FILE's last line",       0, 0},
    {"slack",   CKPT_OPT_REAL,   AT(slack),   "P",    "by more than P per cent (default 25)",                    0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,           NULL,   NULL,                                                      0, 0},
};
/* clang-format on */
#undef AT

/* ---- history ------------------------------------------------------------------------------------ */

static ckpt_status append(const bench *b, const char *path, ckpt_err *err)
{
    ckpt_jw w = {0};
    ckpt_jw_open(&w, NULL, '{');
    bench_json(b, &w);
    ckpt_jw_close(&w, '}');
    ckpt_buf_putc(&w.buf, '\n');
    ckpt_status status = CKPT_OK;
    FILE *f = w.buf.failed ? NULL : fopen(path, "ae");
    if (w.buf.failed)
        status = ckpt_tool_no_memory(err);
    else if (f == NULL || fwrite(w.buf.data, 1, w.buf.len, f) != w.buf.len)
        status = ckpt_fail_errno(err, errno, "%s", path);
    if (f != NULL && fclose(f) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s", path);
    ckpt_buf_release(&w.buf);
    return status;
}

static ckpt_status read_last(const char *path, ckpt_json **out, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status;
    CKPT_CHECK(ckpt_read_file(path, FILE_MAX, &text, err));
    const char *s = (const char *)text.data;
    size_t end = text.len;
    while (end > 0 && s[end - 1] == '\n')
        end--;
    size_t begin = end;
    while (begin > 0 && s[begin - 1] != '\n')
        begin--;
    CKPT_TRY(ckpt_json_parse(s + begin, end - begin, out, err), "%s: last line", path);
    if (!ckpt_json_is_array(ckpt_json_get(*out, "cases")))
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: last line: no array 'cases'", path);
done:
    ckpt_buf_release(&text);
    return status;
}

static bool is_worse(const bench_case *c, double was, double slack)
{
    return c->ratio < was * (1 - slack / 100);
}

/* Ratios that were measured then, are measured now, and are worse by more than the slack; also at a
 * second attempt, because somebody else's burst may fall on the subject alone. */
static ckpt_status compare(bench *b, const ckpt_json *then, double slack, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (const ckpt_json *j = ckpt_json_child(ckpt_json_get(then, "cases")); j != NULL;
         j = ckpt_json_next(j)) {
        const char *name = ckpt_json_string(ckpt_json_get(j, "name"));
        double was;
        size_t i = 0;
        while (i < b->n && (name == NULL || strcmp(b->cases[i].name, name) != 0))
            i++;
        if (!ckpt_json_double(ckpt_json_get(j, "ratio"), &was) || i == b->n)
            continue;
        bench_case *c = &b->cases[i];
        if (c->skipped != NULL)
            ckpt_tool_warn(b->tool, "%s: not compared: %s", c->name, c->skipped);
        if (c->skipped != NULL || !is_worse(c, was, slack))
            continue;
        CKPT_TRY(bench_run_case(b, c, err), "case '%s'", c->name);
        bench_show_case(b, c);
        if (!is_worse(c, was, slack))
            continue;
        const char *line = ckpt_arena_printf(&b->tool->arena, "%s: ratio %.2f, was %.2f beside %s",
                                             c->name, c->ratio, was, c->beside);
        if (line == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(ckpt_strings_push(&b->worse, line, err));
    }
done:
    return status;
}

/* ---- the command -------------------------------------------------------------------------------- */

static ckpt_status make_dir(bench *b, const bench_opts *o, ckpt_err *err)
{
    ckpt_arena *arena = &b->tool->arena;
    const char *tmp = getenv("TMPDIR");
    const char *base = o->dir != NULL ? o->dir : tmp != NULL && *tmp != '\0' ? tmp : "/tmp";
    char *dir = ckpt_arena_printf(arena, "%s/ckpt-bench.XXXXXX", base);
    if (dir == NULL)
        return ckpt_tool_no_memory(err);
    if (mkdtemp(dir) == NULL)
        return ckpt_fail_errno(err, errno, "%s", base);
    b->dir = dir;
    b->out = ckpt_path_join(arena, dir, "out");
    b->errors = ckpt_path_join(arena, dir, "errors");
    size_t n = o->cases != NULL ? (size_t)(ckpt_basename(o->cases) - o->cases) : 0;
    b->here = n > 0 ? ckpt_arena_strndup(arena, o->cases, n - 1) : ".";
    return b->here != NULL && b->out != NULL && b->errors != NULL ? CKPT_OK
                                                                  : ckpt_tool_no_memory(err);
}

static ckpt_status read_cases(bench *b, const bench_opts *o, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    CKPT_CHECK(bench_add_own(b, err));
    if (o->cases != NULL) {
        CKPT_CHECK(ckpt_read_file(o->cases, FILE_MAX, &text, err));
        CKPT_TRY(bench_add_file(b, (const char *)text.data, text.len, err), "%s", o->cases);
    }
    if (b->n == 0 && !bench_machine_wanted(b))
        status = ckpt_fail(err, CKPT_E_USAGE, "--only '%s' matches no case", b->only.items[0]);
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status measure(bench *b, const bench_opts *o, ckpt_json *then, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(make_dir(b, o, err));
    CKPT_CHECK(read_cases(b, o, err));
    CKPT_CHECK(bench_machine(b, err));
    bench_show_machine(b);
    for (size_t i = 0; i < b->n; i++) {
        CKPT_TRY(bench_run_case(b, &b->cases[i], err), "case '%s'", b->cases[i].name);
        bench_show_case(b, &b->cases[i]);
    }
    bench_show_summary(b);
    if (then != NULL)
        CKPT_CHECK(compare(b, then, o->slack, err));
    if (o->history != NULL)
        CKPT_CHECK(append(b, o->history, err));
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    const bench_opts *o = opts;
    ckpt_status status = CKPT_OK;
    char started[32];
    time_t now = time(NULL);
    struct tm utc;
    ckpt_json *then = NULL;
    bench b = {
        .tool = tool, .size = o->size, .pairs = o->pairs, .only = o->only, .started = started};
    if (gmtime_r(&now, &utc) == NULL || strftime(started, sizeof started, "%FT%TZ", &utc) == 0)
        started[0] = '\0';
    if (o->slack >= 100)
        status = ckpt_fail(err, CKPT_E_USAGE, "--slack %g: expected less than 100", o->slack);
    if (status == CKPT_OK && o->against != NULL)
        status = read_last(o->against, &then, err);
    if (status == CKPT_OK)
        status = measure(&b, o, then, err);
    if (b.dir != NULL)
        ckpt_remove_tree(b.dir);
    if (status == CKPT_OK && tool->g.json) {
        bench_json(&b, &tool->json);
        ckpt_jw_lines(&tool->json, "worse", b.worse.items, b.worse.n);
    }
    for (size_t i = 0; status == CKPT_OK && ckpt_tool_text(tool) && i < b.worse.n; i++)
        printf("WORSE %s\n", b.worse.items[i]);
    if (status == CKPT_OK && b.worse.n > 0)
        status = CKPT_E_MISMATCH;
    ckpt_strings_release(&b.worse);
    ckpt_json_free(then);
    free(b.cases);
    return status;
}

static void defaults(void *opts)
{
    bench_opts *o = opts;
    o->size = (uint64_t)256 << 20;
    o->pairs = 5;
    o->slack = 25;
}

const ckpt_command ckpt_cmd_bench = {
    .name = "bench",
    .synopsis = "",
    .what =
        "measure convert, verify and the engine here beside cp, sha256sum, the FMA peak and others",
    .opts = rows,
    .opts_size = sizeof(bench_opts),
    .writes = true,
    .defaults = defaults,
    .run = run,
    .examples = "  ckpt bench --size 2GiB --dir /fast --history bench.jsonl\n"
                "  ckpt bench --against bench.jsonl --slack 25\n",
    .notes =
        "Commands alternate; ratios of medians above 1 mean that ckpt is faster. What is not\n"
        "installed is skipped by name. A cold case drops its files from the page cache before\n"
        "every run; 'aimed at' is the ratio of the specification.\n",
};
