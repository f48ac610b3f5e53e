/* ckpt bench: what this program costs here beside what would be run instead.
 *
 * A case is a JSON object; a file of them is an array (--cases). Members: name; subject and baseline,
 * each the words of a command, "ckpt" being this program; beside, a word for the baseline. Optional:
 * target, the ratio that is aimed at; needs, a program, and probe, a command, without (the success
 * of) which the case is skipped; prepare and check, commands that run once, before and after. In all
 * words {src} is a safetensors file of --size, {out} an empty directory, made anew before each run,
 * {dir} one that stays, {here} the directory of the case file, {python} $PYTHON or python3.
 *
 * Subject and baseline alternate, --pairs times; the ratio is that of medians, above 1 if the subject
 * is faster. Ratios are what is kept (--history) and compared (--against): they hold on a machine
 * that is busy or another, where rates do not. */
#include "bench.h"
#include "io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PAIRS = 100, MAX_WORDS = 64, MAX_CASES = 256 };
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
    {"only",    CKPT_OPT_LIST,   AT(only),    "GLOB", "cases whose name matches; repeatable",                    0, 0},
    {"cases",   CKPT_OPT_STRING, AT(cases),   "FILE", "more cases; they are commands: run only files you trust", 0, 0},
    {"history", CKPT_OPT_STRING, AT(history), "FILE", "append the results, a line of JSON",                      0, 0},
    {"against", CKPT_OPT_STRING, AT(against), "FILE", "fail if a ratio is worse than in FILE's last line",       0, 0},
    {"slack",   CKPT_OPT_REAL,   AT(slack),   "P",    "by more than P per cent (default 25)",                    0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,           NULL,   NULL,                                                      0, 0},
};
/* clang-format on */
#undef AT

static const char own_cases[] =
    "[{\"name\":\"convert to one file, both digests, durable\",\"target\":1.15,"
    "\"subject\":[\"ckpt\",\"convert\",\"--quiet\",\"{src}\",\"{out}/x.safetensors\"],"
    "\"beside\":\"cp + sync\",\"baseline\":[\"sh\",\"-c\","
    "\"cp \\\"$1\\\" \\\"$2\\\" && sync -f \\\"$2\\\"\",\"sh\",\"{src}\",\"{out}/x\"],"
    "\"check\":[\"ckpt\",\"diff\",\"--quiet\",\"{src}\",\"{out}/x.safetensors\"]},"
    "{\"name\":\"convert into shards, both digests, durable\",\"target\":1.15,"
    "\"subject\":[\"ckpt\",\"convert\",\"--quiet\",\"{src}\",\"{out}/"
    "x\",\"--max-shard-size\",\"64MiB\"],"
    "\"beside\":\"cp + sync\",\"baseline\":[\"sh\",\"-c\","
    "\"cp \\\"$1\\\" \\\"$2\\\" && sync -f \\\"$2\\\"\",\"sh\",\"{src}\",\"{out}/x\"],"
    "\"check\":[\"ckpt\",\"diff\",\"--quiet\",\"{src}\",\"{out}/x\"]},"
    "{\"name\":\"convert, the same\",\"target\":5,"
    "\"subject\":[\"ckpt\",\"convert\",\"--quiet\",\"{src}\",\"{out}/"
    "x\",\"--max-shard-size\",\"64MiB\"],"
    "\"beside\":\"sha256sum + cp + sync\",\"baseline\":[\"sh\",\"-c\","
    "\"sha256sum \\\"$1\\\" && cp \\\"$1\\\" \\\"$2\\\" && sync -f "
    "\\\"$2\\\"\",\"sh\",\"{src}\",\"{out}/x\"]},"
    "{\"name\":\"verify, tensor digests, cached\",\"target\":10,\"needs\":\"sha256sum\","
    "\"prepare\":[\"ckpt\",\"verify\",\"--quiet\",\"--hash\",\"--write\",\"--force\",\"{src}\"],"
    "\"subject\":[\"ckpt\",\"verify\",\"--quiet\",\"--hash\",\"{src}\"],"
    "\"beside\":\"sha256sum\",\"baseline\":[\"sha256sum\",\"{src}\"]},"
    "{\"name\":\"verify, tensor digests, cached (openssl)\",\"target\":2.7,\"needs\":\"openssl\","
    "\"subject\":[\"ckpt\",\"verify\",\"--quiet\",\"--hash\",\"{src}\"],"
    "\"beside\":\"openssl dgst\",\"baseline\":[\"openssl\",\"dgst\",\"-sha256\",\"{src}\"]},"
    "{\"name\":\"verify, tensor digests, cached (b3sum)\",\"needs\":\"b3sum\","
    "\"subject\":[\"ckpt\",\"verify\",\"--quiet\",\"--hash\",\"{src}\"],"
    "\"beside\":\"b3sum\",\"baseline\":[\"b3sum\",\"{src}\"]},"
    "{\"name\":\"start-up\",\"subject\":[\"ckpt\",\"--version\"],"
    "\"beside\":\"sh\",\"baseline\":[\"sh\",\"-c\",\":\"]}]";

typedef struct bench_case {
    const char *name, *beside, *needs;
    const char *const *subject, *const *baseline, *const *prepare, *const *check, *const *probe;
    double target; /* 0: none */
    double ratio;
    bench_stat own, other;
    const char *skipped; /* why, or NULL */
} bench_case;

typedef struct bench {
    ckpt_tool *tool;
    const bench_opts *o;
    const char *dir, *src, *out, *errors, *started;
    const char *here; /* directory of the case file */
    bench_case cases[MAX_CASES];
    size_t n;
    bench_rate rates[BENCH_RATES];
    ckpt_strings worse;
} bench;

/* ---- cases -------------------------------------------------------------------------------------- */

/* A word with its placeholders replaced. */
static const char *fill(bench *b, const char *word)
{
    static const char *const names[] = {"{src}", "{out}", "{dir}", "{here}", "{python}"};
    const char *python = getenv("PYTHON");
    const char *const values[] = {b->src, b->out, b->dir, b->here,
                                  python != NULL && *python != '\0' ? python : "python3"};
    enum { N = sizeof names / sizeof *names };
    ckpt_buf text = {0};
    while (*word != '\0') {
        int k = 0;
        while (k < N && strncmp(word, names[k], strlen(names[k])) != 0)
            k++;
        if (k < N) {
            ckpt_buf_puts(&text, values[k]);
            word += strlen(names[k]);
        } else {
            ckpt_buf_putc(&text, *word++);
        }
    }
    ckpt_buf_putc(&text, 0);
    const char *out =
        text.failed ? NULL : ckpt_arena_strdup(&b->tool->arena, (const char *)text.data);
    ckpt_buf_release(&text);
    return out;
}

/* An absent member leaves *out NULL. */
static ckpt_status read_words(bench *b, const ckpt_json *c, const char *key, bool required,
                              const char *const **out, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(c, key);
    int n = ckpt_json_size(list);
    if (list == NULL && !required)
        return CKPT_OK;
    if (!ckpt_json_is_array(list) || n < 1 || n > MAX_WORDS)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': expected an array of 1 to %d words", key,
                         MAX_WORDS);
    const char **words = ckpt_arena_array(&b->tool->arena, (size_t)n + 1, sizeof *words);
    if (words == NULL)
        return ckpt_tool_no_memory(err);
    n = 0;
    for (const ckpt_json *w = ckpt_json_child(list); w != NULL; w = ckpt_json_next(w)) {
        if (ckpt_json_string(w) == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s': word %d is not a string", key, n + 1);
        words[n] = fill(b, ckpt_json_string(w));
        if (words[n++] == NULL)
            return ckpt_tool_no_memory(err);
    }
    words[n] = NULL;
    *out = words;
    return CKPT_OK;
}

static ckpt_status read_case(bench *b, const ckpt_json *j, ckpt_err *err)
{
    static const char *const keys[] = {"name",    "subject", "baseline", "beside", "target",
                                       "prepare", "check",   "needs",    "probe"};
    ckpt_status status;
    bench_case c = {.name = ckpt_json_string(ckpt_json_get(j, "name")),
                    .beside = ckpt_json_string(ckpt_json_get(j, "beside")),
                    .needs = ckpt_json_string(ckpt_json_get(j, "needs"))};
    if (c.name == NULL || c.beside == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "a case needs 'name' and 'beside', which are texts");
    for (const ckpt_json *m = ckpt_json_child(j); m != NULL; m = ckpt_json_next(m)) {
        size_t k = 0;
        while (k < sizeof keys / sizeof *keys && strcmp(keys[k], ckpt_json_key(m)) != 0)
            k++;
        if (k == sizeof keys / sizeof *keys)
            return ckpt_fail(err, CKPT_E_FORMAT, "case '%s': unknown member '%s'", c.name,
                             ckpt_json_key(m));
    }
    if (b->o->only.n > 0 && !ckpt_glob_any(&b->o->only, c.name))
        return CKPT_OK;
    if (ckpt_json_get(j, "target") != NULL &&
        !ckpt_json_double(ckpt_json_get(j, "target"), &c.target))
        return ckpt_fail(err, CKPT_E_FORMAT, "case '%s': 'target' is not a number", c.name);
    CKPT_TRY(read_words(b, j, "subject", true, &c.subject, err), "case '%s'", c.name);
    CKPT_TRY(read_words(b, j, "baseline", true, &c.baseline, err), "case '%s'", c.name);
    CKPT_TRY(read_words(b, j, "prepare", false, &c.prepare, err), "case '%s'", c.name);
    CKPT_TRY(read_words(b, j, "check", false, &c.check, err), "case '%s'", c.name);
    CKPT_TRY(read_words(b, j, "probe", false, &c.probe, err), "case '%s'", c.name);
    if (b->n == MAX_CASES)
        return ckpt_fail(err, CKPT_E_FORMAT, "more than %d cases", MAX_CASES);
    c.name = ckpt_arena_strdup(&b->tool->arena, c.name);
    c.beside = ckpt_arena_strdup(&b->tool->arena, c.beside);
    c.needs = ckpt_arena_strdup(&b->tool->arena, c.needs != NULL ? c.needs : c.baseline[0]);
    if (c.name == NULL || c.beside == NULL || c.needs == NULL)
        return ckpt_tool_no_memory(err);
    b->cases[b->n++] = c;
done:
    return status;
}

static ckpt_status read_cases(bench *b, const char *text, size_t n, ckpt_err *err)
{
    ckpt_json *doc = NULL;
    ckpt_status status = ckpt_json_parse(text, n, &doc, err);
    if (status == CKPT_OK && !ckpt_json_is_array(doc))
        status = ckpt_fail(err, CKPT_E_FORMAT, "expected an array of cases");
    for (const ckpt_json *c = ckpt_json_child(doc); status == CKPT_OK && c != NULL;
         c = ckpt_json_next(c))
        status = read_case(b, c, err);
    ckpt_json_free(doc);
    return status;
}

/* ---- running ------------------------------------------------------------------------------------ */

static ckpt_status once(bench *b, const char *const *argv, bench_run *run, ckpt_err *err)
{
    ckpt_remove_tree(b->out);
    ckpt_status status = ckpt_mkdirs(b->out, err);
    return status == CKPT_OK ? bench_child(argv, b->errors, run, err) : status;
}

static ckpt_status run_case(bench *b, bench_case *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t pairs = (size_t)b->o->pairs;
    bench_run own[MAX_PAIRS], other[MAX_PAIRS], first;
    if (!bench_has_program(c->needs)) {
        c->skipped = ckpt_arena_printf(&b->tool->arena, "%s not found", c->needs);
        return c->skipped != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
    }
    if (c->probe != NULL) {
        ckpt_err why = {0};
        status = bench_child(c->probe, b->errors, &first, &why);
        if (status != CKPT_OK && status != CKPT_E_MISMATCH)
            return ckpt_fail(err, status, "%s", why.text);
        if (status == CKPT_E_MISMATCH) {
            c->skipped = ckpt_arena_strdup(&b->tool->arena, why.text);
            return c->skipped != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
        }
    }
    if (c->prepare != NULL)
        CKPT_CHECK(bench_child(c->prepare, b->errors, &first, err));
    CKPT_CHECK(once(b, c->subject, &first, err)); /* untimed: caches, and what is checked */
    if (c->check != NULL)
        CKPT_CHECK(bench_child(c->check, b->errors, &first, err));
    for (size_t i = 0; i < pairs; i++) {
        CKPT_CHECK(once(b, c->subject, &own[i], err));
        CKPT_CHECK(once(b, c->baseline, &other[i], err));
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    c->own = bench_median(own, pairs);
    c->other = bench_median(other, pairs);
    c->ratio = c->other.median / c->own.median;
done:
    return status;
}

/* ---- what was found ----------------------------------------------------------------------------- */

static void print_case(bench *b, const bench_case *c)
{
    if (!ckpt_tool_text(b->tool))
        return;
    if (c->skipped != NULL) {
        printf("%-48s skipped, %s\n", c->name, c->skipped);
        return;
    }
    char target[32] = "";
    if (c->target > 0)
        (void)snprintf(target, sizeof target, ", aimed at %g%s", c->target,
                       c->ratio < c->target ? ": below" : "");
    printf("%-48s %9.4f s  %s %.4f s  ratio %.2f%s\n", c->name, c->own.median, c->beside,
           c->other.median, c->ratio, target);
    if (b->tool->g.verbose)
        printf("    %.4f..%.4f s, %.2f s of processors, %s; %.4f..%.4f s, %.2f s, %s\n", c->own.min,
               c->own.max, c->own.cpu, ckpt_human(&b->tool->arena, c->own.peak), c->other.min,
               c->other.max, c->other.cpu, ckpt_human(&b->tool->arena, c->other.peak));
    fflush(stdout);
}

static void write_stat(ckpt_jw *w, const char *key, const bench_stat *s)
{
    ckpt_jw_open(w, key, '{');
    ckpt_jw_real(w, "median", s->median);
    ckpt_jw_real(w, "min", s->min);
    ckpt_jw_real(w, "max", s->max);
    ckpt_jw_real(w, "cpu", s->cpu);
    ckpt_jw_u64(w, "peak_memory", s->peak);
    ckpt_jw_close(w, '}');
}

static void write_json(const bench *b, ckpt_jw *w)
{
    ckpt_jw_string(w, "date", b->started);
    ckpt_jw_u64(w, "size", b->o->size);
    ckpt_jw_int(w, "pairs", b->o->pairs);
    ckpt_jw_int(w, "processors", sysconf(_SC_NPROCESSORS_ONLN));
    ckpt_jw_open(w, "machine", '[');
    for (int i = 0; i < BENCH_RATES; i++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", b->rates[i].name);
        ckpt_jw_string(w, "what", b->rates[i].what);
        ckpt_jw_real(w, "gb_per_s", b->rates[i].gbs);
        ckpt_jw_real(w, "of_memcpy", b->rates[i].gbs / b->rates[0].gbs);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_open(w, "cases", '[');
    for (size_t i = 0; i < b->n; i++) {
        const bench_case *c = &b->cases[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", c->name);
        ckpt_jw_string(w, "beside", c->beside);
        ckpt_jw_string(w, "skipped", c->skipped);
        if (c->skipped == NULL) {
            ckpt_jw_real(w, "ratio", c->ratio);
            ckpt_jw_real(w, "target", c->target);
            write_stat(w, "subject", &c->own);
            write_stat(w, "baseline", &c->other);
        }
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

/* ---- history ------------------------------------------------------------------------------------ */

static ckpt_status append(const bench *b, ckpt_err *err)
{
    ckpt_jw w = {0};
    ckpt_jw_open(&w, NULL, '{');
    write_json(b, &w);
    ckpt_jw_close(&w, '}');
    ckpt_buf_putc(&w.buf, '\n');
    ckpt_status status = CKPT_OK;
    FILE *f = w.buf.failed ? NULL : fopen(b->o->history, "ae");
    if (w.buf.failed)
        status = ckpt_tool_no_memory(err);
    else if (f == NULL || fwrite(w.buf.data, 1, w.buf.len, f) != w.buf.len)
        status = ckpt_fail_errno(err, errno, "%s", b->o->history);
    if (f != NULL && fclose(f) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s", b->o->history);
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

static bool is_worse(const bench *b, const bench_case *c, double was)
{
    return c->ratio < was * (1 - b->o->slack / 100);
}

/* Ratios that were measured then, are measured now, and are worse by more than the slack; also at a
 * second attempt, because somebody else's burst may fall on the subject alone. */
static ckpt_status compare(bench *b, const ckpt_json *then, ckpt_err *err)
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
        if (c->skipped != NULL || !is_worse(b, c, was))
            continue;
        CKPT_TRY(run_case(b, c, err), "case '%s'", c->name);
        print_case(b, c);
        if (!is_worse(b, c, was))
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

static ckpt_status make_dir(bench *b, ckpt_err *err)
{
    ckpt_arena *arena = &b->tool->arena;
    const char *tmp = getenv("TMPDIR");
    const char *base = b->o->dir != NULL ? b->o->dir : tmp != NULL && *tmp != '\0' ? tmp : "/tmp";
    char *dir = ckpt_arena_printf(arena, "%s/ckpt-bench.XXXXXX", base);
    if (dir == NULL)
        return ckpt_tool_no_memory(err);
    if (mkdtemp(dir) == NULL)
        return ckpt_fail_errno(err, errno, "%s", base);
    b->dir = dir;
    b->src = ckpt_path_join(arena, dir, "source.safetensors");
    b->out = ckpt_path_join(arena, dir, "out");
    b->errors = ckpt_path_join(arena, dir, "errors");
    size_t n = b->o->cases != NULL ? (size_t)(ckpt_basename(b->o->cases) - b->o->cases) : 0;
    b->here = n > 0 ? ckpt_arena_strndup(arena, b->o->cases, n - 1) : ".";
    return b->here != NULL && b->src != NULL && b->out != NULL && b->errors != NULL
               ? CKPT_OK
               : ckpt_tool_no_memory(err);
}

static ckpt_status measure(bench *b, ckpt_json *then, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    CKPT_CHECK(make_dir(b, err));
    CKPT_TRY(read_cases(b, own_cases, sizeof own_cases - 1, err), "own cases");
    if (b->o->cases != NULL) {
        CKPT_CHECK(ckpt_read_file(b->o->cases, FILE_MAX, &text, err));
        CKPT_TRY(read_cases(b, (const char *)text.data, text.len, err), "%s", b->o->cases);
    }
    if (b->n == 0) {
        status = ckpt_fail(err, CKPT_E_USAGE, "--only '%s' matches no case", b->o->only.items[0]);
        goto done;
    }
    CKPT_CHECK(bench_source(b->src, b->o->size, err));
    for (size_t i = 0; i < b->n; i++) {
        CKPT_TRY(run_case(b, &b->cases[i], err), "case '%s'", b->cases[i].name);
        print_case(b, &b->cases[i]);
    }
    CKPT_CHECK(
        bench_machine(b->src, ckpt_path_join(&b->tool->arena, b->dir, "scratch"), b->rates,
                      err)); /* last: what a child is seen to hold begins with this program */
    for (int i = 0; ckpt_tool_text(b->tool) && i < BENCH_RATES; i++)
        printf("one thread: %-8s %6.2f GB/s, %.2f of memcpy (%s)\n", b->rates[i].name,
               b->rates[i].gbs, b->rates[i].gbs / b->rates[0].gbs, b->rates[i].what);
    if (then != NULL)
        CKPT_CHECK(compare(b, then, err));
    if (b->o->history != NULL)
        CKPT_CHECK(append(b, err));
done:
    ckpt_buf_release(&text);
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
    bench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return ckpt_tool_no_memory(err);
    b->tool = tool;
    b->o = o;
    if (gmtime_r(&now, &utc) == NULL || strftime(started, sizeof started, "%FT%TZ", &utc) == 0)
        started[0] = '\0';
    b->started = started;
    if (o->slack >= 100)
        status = ckpt_fail(err, CKPT_E_USAGE, "--slack %g: expected less than 100", o->slack);
    if (status == CKPT_OK && o->against != NULL)
        status = read_last(o->against, &then, err);
    if (status == CKPT_OK)
        status = measure(b, then, err);
    if (b->dir != NULL)
        ckpt_remove_tree(b->dir);
    if (status == CKPT_OK && tool->g.json) {
        write_json(b, &tool->json);
        ckpt_jw_lines(&tool->json, "worse", b->worse.items, b->worse.n);
    }
    for (size_t i = 0; status == CKPT_OK && ckpt_tool_text(tool) && i < b->worse.n; i++)
        printf("WORSE %s\n", b->worse.items[i]);
    if (status == CKPT_OK && b->worse.n > 0)
        status = CKPT_E_MISMATCH;
    ckpt_strings_release(&b->worse);
    ckpt_json_free(then);
    free(b);
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
    .what = "measure convert and verify here beside cp, sha256sum and others",
    .opts = rows,
    .opts_size = sizeof(bench_opts),
    .writes = true,
    .defaults = defaults,
    .run = run,
    .examples = "  ckpt bench --size 2GiB --dir /fast --history bench.jsonl\n"
                "  ckpt bench --against bench.jsonl --slack 25\n",
    .notes = "Commands alternate; ratios of medians above 1 mean that ckpt is faster. What is not\n"
             "installed is skipped by name.\n",
};
