/* ckpt gate: run a declared matrix of compatibility cases (gate.h) and say what failed. */
#include "convert.h"
#include "gate.h"
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define JOBS_MAX 64
#define MEMORY_LEAST ((uint64_t)16 << 20) /* of a step, bytes */

typedef struct gate_opts {
    const char *junit, *sarif, *cache, *scratch;
    bool github, list, keep;
    ckpt_strings only;
    int64_t jobs;
} gate_opts;

/* clang-format off */
#define AT(field) offsetof(gate_opts, field)
static const ckpt_opt rows[] = {
    {"junit",   CKPT_OPT_STRING, AT(junit),   "FILE", "also write the results as JUnit XML", 0, 0},
    {"sarif",   CKPT_OPT_STRING, AT(sarif),   "FILE", "also write the failures as SARIF 2.1.0", 0, 0},
    {"github",  CKPT_OPT_FLAG,   AT(github),  NULL,   "failures as annotations of GitHub; a table in its step summary", 0, 0},
    {"cache",   CKPT_OPT_STRING, AT(cache),   "DIR",  "skip checks that this program passed on these bytes before", 0, 0},
    {"only",    CKPT_OPT_LIST,   AT(only),    "GLOB", "only cases whose name matches; repeatable", 0, 0},
    {"list",    CKPT_OPT_FLAG,   AT(list),    NULL,   "print the cases and their checks, run none", 0, 0},
    {"jobs",    CKPT_OPT_INT,    AT(jobs),    "N",    "cases at once; they share --threads and --memory (default: threads)", 1, JOBS_MAX},
    {"scratch", CKPT_OPT_STRING, AT(scratch), "DIR",  "where outputs are made (default TMPDIR, or /tmp)", 0, 0},
    {"keep",    CKPT_OPT_FLAG,   AT(keep),    NULL,   "leave there what failed", 0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,           NULL,   NULL, 0, 0},
};
#undef AT
/* clang-format on */

/* ---- workers --------------------------------------------------------------------------------- */

/* One pass over all sources, or over all units. */
typedef struct pass {
    gate *g;
    size_t n;
    bool sources;
    const bool *needed; /* of the sources */
    pthread_mutex_t lock;
    ckpt_status status; /* of the first that could not be run, under lock */
    ckpt_err *err;
} pass;

static void *work(void *self)
{
    pass *p = self;
    for (;;) {
        ckpt_err err = {0};
        size_t i = atomic_fetch_add(&p->g->next, 1);
        if (i >= p->n)
            return NULL;
        ckpt_status status = CKPT_OK;
        if (!p->sources)
            status = ckpt_gate_unit(p->g, &p->g->units[i], i, &err);
        else if (p->needed[i])
            status = ckpt_gate_look(p->g, &p->g->sources[i], &err);
        size_t done = atomic_fetch_add(&p->g->done, 1) + 1;
        pthread_mutex_lock(&p->lock);
        if (p->g->tool->progress)
            fprintf(stderr, "\r\033[K%s %zu of %zu", p->sources ? "sources" : "cases", done, p->n);
        if (status != CKPT_OK && p->status == CKPT_OK) {
            p->status = status;
            *p->err = err;
            atomic_store(&p->g->next, p->n);
        }
        pthread_mutex_unlock(&p->lock);
    }
}

static ckpt_status run_pass(gate *g, bool sources, const bool *needed, ckpt_err *err)
{
    pthread_t threads[JOBS_MAX];
    pass p = {.g = g,
              .n = sources ? g->n_sources : g->n_units,
              .sources = sources,
              .needed = needed,
              .status = CKPT_OK,
              .err = err};
    int started = 0;
    if (pthread_mutex_init(&p.lock, NULL) != 0)
        return ckpt_tool_no_memory(err);
    atomic_store(&g->next, 0);
    atomic_store(&g->done, 0);
    while (started + 1 < g->jobs && (size_t)started + 1 < p.n &&
           pthread_create(&threads[started], NULL, work, &p) == 0)
        started++;
    work(&p); /* this thread is one of them */
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&p.lock);
    if (g->tool->progress)
        fprintf(stderr, "\r\033[K");
    return p.status;
}

/* Sources of units that need to know what they hold. */
static ckpt_status look_at_sources(gate *g, ckpt_err *err)
{
    bool *needed = ckpt_arena_array(&g->arena, g->n_sources + 1, sizeof *needed);
    if (needed == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < g->n_units; i++)
        if (!g->units[i].row->want[GATE_REFUSE])
            needed[g->units[i].source - g->sources] = true;
    return run_pass(g, true, needed, err);
}

/* ---- setting up ------------------------------------------------------------------------------ */

static ckpt_status make_scratch(gate *g, const gate_opts *o, ckpt_err *err)
{
    const char *base = o->scratch != NULL ? o->scratch : getenv("TMPDIR");
    char *dir = ckpt_arena_printf(&g->arena, "%s/ckpt-gate.XXXXXX",
                                  base != NULL && *base != '\0' ? base : "/tmp");
    if (dir == NULL)
        return ckpt_tool_no_memory(err);
    if (mkdtemp(dir) == NULL)
        return ckpt_fail_errno(err, errno, "%s", dir);
    g->work = dir;
    return CKPT_OK;
}

static ckpt_status make_cache(gate *g, const gate_opts *o, ckpt_err *err)
{
    uint8_t digest[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1];
    uint64_t size;
    if (o->cache == NULL)
        return CKPT_OK;
    if (mkdir(o->cache, 0777) != 0 && errno != EEXIST)
        return ckpt_fail_errno(err, errno, "%s", o->cache);
    ckpt_status status = ckpt_tool_file_digest("/proc/self/exe", digest, &size, err);
    if (status != CKPT_OK)
        return status;
    ckpt_hex(digest, hex);
    g->build = ckpt_arena_strdup(&g->arena, hex);
    g->cache = o->cache;
    return g->build != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

static void share_resources(gate *g, const gate_opts *o)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = g->tool->g.threads > 0 ? (int)g->tool->g.threads : cores > 0 ? (int)cores : 1;
    size_t most = g->n_units > g->n_sources ? g->n_units : g->n_sources;
    int64_t jobs = o->jobs > 0 ? o->jobs : threads;
    if (jobs > JOBS_MAX)
        jobs = JOBS_MAX;
    if ((size_t)jobs > most)
        jobs = most > 0 ? (int64_t)most : 1;
    g->jobs = (int)jobs;
    g->threads = threads / g->jobs > 0 ? threads / g->jobs : 1;
    g->memory = g->tool->g.memory / (uint64_t)g->jobs;
    if (g->memory < MEMORY_LEAST)
        g->memory = MEMORY_LEAST;
}

/* ---- results --------------------------------------------------------------------------------- */

static ckpt_status write_report(gate *g, const char *path,
                                void (*print)(const gate *g, ckpt_buf *out), ckpt_err *err)
{
    ckpt_buf out = {0};
    if (path == NULL)
        return CKPT_OK;
    print(g, &out);
    ckpt_status status =
        out.failed ? ckpt_tool_no_memory(err) : ckpt_tool_write_file(path, out.data, out.len, err);
    ckpt_buf_release(&out);
    return status;
}

/* Before any case runs: what could not be written at the end. */
static ckpt_status check_reports(const gate_opts *o, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *paths[] = {o->junit, o->sarif, o->github ? getenv("GITHUB_STEP_SUMMARY") : NULL};
    if (o->junit != NULL && o->sarif != NULL && strcmp(o->junit, o->sarif) == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "options '--junit' and '--sarif' name one file, %s",
                         o->junit);
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (paths[i] != NULL && *paths[i] != '\0')
            CKPT_TRY(ckpt_convert_target(paths[i], true, err), "a report");
done:
    return status;
}

/* GitHub names a file to which a step may add Markdown. */
static ckpt_status step_summary(gate *g, ckpt_err *err)
{
    const char *path = getenv("GITHUB_STEP_SUMMARY");
    ckpt_buf out = {0};
    ckpt_status status = CKPT_OK;
    if (path == NULL || *path == '\0')
        return CKPT_OK;
    ckpt_gate_markdown(g, &out);
    FILE *f = fopen(path, "a");
    if (f == NULL)
        status = ckpt_fail_errno(err, errno, "%s", path);
    else if (out.failed)
        status = ckpt_tool_no_memory(err);
    else if (fwrite(out.data, 1, out.len, f) != out.len)
        status = ckpt_fail_errno(err, errno, "%s", path);
    if (f != NULL && fclose(f) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s", path);
    ckpt_buf_release(&out);
    return status;
}

static ckpt_status report(gate *g, const gate_opts *o, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_tool_text(g->tool))
        ckpt_gate_text(g);
    if (g->tool->g.json)
        ckpt_gate_json(g);
    else if (o->github)
        ckpt_gate_github(g);
    CKPT_CHECK(write_report(g, o->junit, ckpt_gate_junit, err));
    CKPT_CHECK(write_report(g, o->sarif, ckpt_gate_sarif, err));
    if (o->github)
        CKPT_CHECK(step_summary(g, err));
done:
    return status;
}

static void list_units(gate *g)
{
    for (size_t i = 0; i < g->n_units && ckpt_tool_text(g->tool); i++) {
        const gate_unit *u = &g->units[i];
        printf("%s:", ckpt_tool_clean(g->tool, u->name));
        for (size_t k = 0; k < u->n_results; k++)
            printf(" %s", ckpt_gate_check_names[u->results[k].check]);
        printf("\n");
    }
    ckpt_jw *w = &g->tool->json;
    if (!g->tool->g.json)
        return;
    ckpt_jw_open(w, "cases", '[');
    for (size_t i = 0; i < g->n_units; i++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", g->units[i].name);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

/* ---- the command ----------------------------------------------------------------------------- */

static const char *runs_nothing(const void *context)
{
    const gate_opts *o = context;
    return o->list ? "--list runs nothing" : NULL;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    static const ckpt_effect effects[] = {
        {"junit",  runs_nothing},
        {"sarif",  runs_nothing},
        {"github", runs_nothing},
        {"cache",  runs_nothing},
        {"keep",   runs_nothing},
        {NULL,     NULL        },
    };
    const gate_opts *o = opts;
    gate g = {.tool = tool, .path = tool->operands.items[0], .keep = o->keep};
    struct timespec began;
    ckpt_status status;
    clock_gettime(CLOCK_MONOTONIC, &began);
    CKPT_CHECK(ckpt_tool_effects(tool, effects, o, err));
    CKPT_CHECK(ckpt_gate_read(&g, &o->only, err));
    if (o->list) {
        list_units(&g);
        goto done;
    }
    CKPT_CHECK(check_reports(o, err));
    CKPT_CHECK(make_cache(&g, o, err));
    CKPT_CHECK(make_scratch(&g, o, err));
    share_resources(&g, o);
    CKPT_CHECK(look_at_sources(&g, err));
    CKPT_CHECK(run_pass(&g, false, NULL, err));
    g.seconds = ckpt_seconds_since(&began);
    CKPT_CHECK(report(&g, o, err));
    if (ckpt_gate_failures(&g) > 0)
        status = CKPT_E_MISMATCH;
done:
    if (g.work != NULL && (!g.keep || status != CKPT_E_MISMATCH))
        ckpt_remove_tree(g.work);
    else if (g.work != NULL)
        ckpt_tool_note(tool, "%s: outputs of what failed", g.work);
    ckpt_gate_release(&g);
    return status;
}

const ckpt_command ckpt_cmd_gate = {
    .name = "gate",
    .synopsis = "FILE",
    .what = "run a matrix of compatibility cases",
    .opts = rows,
    .opts_size = sizeof(gate_opts),
    .min_operands = 1,
    .max_operands = 1,
    .writes = true,
    .run = run,
    .examples = "  ckpt gate gate.json --junit gate.xml --cache .ckpt-gate-cache\n",
    .notes =
        "FILE declares sources (with pinned roots), targets and cases in JSON:\n"
        "  {\"gate\": 1,\n"
        "   \"sources\": {\"last\": {\"path\": \"run/iter_1000\", \"root\": \"14f7...\"}},\n"
        "   \"targets\": {\"hf\": {\"to\": \"safetensors\", \"layout\": \"hf\"},\n"
        "               \"mg\": {\"to\": \"torch_dist\", \"mesh\": [{\"tp\": 2}, {\"tp\": 4}]}},\n"
        "   \"commands\": {\"peer\": [\"python3\", \"load.py\", \"{path}\"]},\n"
        "   \"cases\": [{\"source\": \"*\", \"target\": [\"hf\", \"mg\"], \"load\": \"peer\",\n"
        "              \"checks\": [\"structure\", \"hash\", \"roundtrip\", \"forward\", "
        "\"gradients\"]}]}\n"
        "A case may also say resume {data, steps: [K, N]}, refuse {exit, message}, rtol, "
        "grad_rtol,\n"
        "root, strict, timeout. Commands are run: use no FILE that you would not run.\n",
};
