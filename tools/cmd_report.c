/* ckpt report: one self-contained HTML page from metrics and from the documents of --json (report.h). */
#include "io.h"
#include "report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INPUT_MAX ((uint64_t)1 << 30)
#define RUNS_MAX 6

typedef struct report_opts {
    const char *out, *title;
    bool force;
} report_opts;

/* clang-format off */
#define AT(field) offsetof(report_opts, field)
static const ckpt_opt rows[] = {
    {"out",   CKPT_OPT_STRING, AT(out),   "FILE", "the page (default ckpt-report.html)", 0, 0},
    {"title", CKPT_OPT_STRING, AT(title), "TEXT", "its heading", 0, 0},
    {"force", CKPT_OPT_FLAG,   AT(force), NULL,   "replace a file that exists", 0, 0},
    {NULL,    CKPT_OPT_FLAG,   0,         NULL,   NULL, 0, 0},
};
#undef AT
/* clang-format on */

/* ---- input ----------------------------------------------------------------------------------- */

static ckpt_status add_line(report_input *in, const char *s, size_t n, size_t number, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *j = NULL;
    void *lines = in->lines;
    CKPT_TRY(ckpt_json_parse(s, n, &j, err), "%s: line %zu", in->path, number);
    status = ckpt_grow(&lines, &in->cap, in->n_lines + 1, sizeof(ckpt_json *), err);
    in->lines = lines;
    if (status != CKPT_OK) {
        ckpt_json_free(j);
        return status;
    }
    if (!ckpt_json_is_object(j)) {
        ckpt_json_free(j);
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: line %zu: expected an object", in->path, number);
    }
    in->lines[in->n_lines++] = j;
done:
    return status;
}

/* A line each; the last may have been cut off by a crash. */
static ckpt_status read_lines(report_input *in, const ckpt_buf *text, ckpt_err *err)
{
    const char *s = (const char *)text->data, *end = s + text->len;
    size_t number = 0;
    while (s < end) {
        size_t n = strcspn(s, "\n");
        bool whole = s + n < end;
        number++;
        if (n > 0) {
            ckpt_status status = add_line(in, s, n, number, err);
            if (status == CKPT_E_FORMAT && !whole && in->n_lines > 0)
                *err = (ckpt_err){0};
            else if (status != CKPT_OK)
                return status;
        }
        s += n + whole;
    }
    if (in->n_lines == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: empty", in->path);
    return CKPT_OK;
}

/* Its parent and itself: run-a/metrics.jsonl and run-b/metrics.jsonl differ in that. */
static const char *short_name(const char *path)
{
    const char *name = ckpt_basename(path);
    if (name - path < 2)
        return name;
    const char *p = name - 1;
    while (p > path && p[-1] != '/')
        p--;
    return p;
}

static ckpt_status read_input(ckpt_tool *tool, report_input *in, const char *path, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status;
    ckpt_entry what;
    in->path = path;
    CKPT_CHECK(ckpt_look(path, &what, err));
    if (what == CKPT_ENTRY_DIR)
        in->path = ckpt_path_join(&tool->arena, path, "metrics.jsonl");
    if (in->path == NULL)
        return ckpt_tool_no_memory(err);
    in->name = short_name(in->path);
    CKPT_CHECK(ckpt_read_file(in->path, INPUT_MAX, &text, err));
    if (ckpt_json_parse((const char *)text.data, text.len, &in->doc, NULL) == CKPT_OK) {
        if (ckpt_json_get(in->doc, "command") != NULL)
            goto done;
        ckpt_json_free(in->doc); /* one line of metrics */
    }
    in->doc = NULL;
    status = read_lines(in, &text, err);
done:
    ckpt_buf_release(&text);
    return status;
}

/* ---- training -------------------------------------------------------------------------------- */

static ckpt_status fill_series(ckpt_tool *tool, report_series *s, const report_input *in,
                               const char *key, ckpt_err *err)
{
    *s = (report_series){.name = in->name};
    s->step = ckpt_arena_array(&tool->arena, in->n_lines + 1, sizeof *s->step);
    s->y = ckpt_arena_array(&tool->arena, in->n_lines + 1, sizeof *s->y);
    if (s->step == NULL || s->y == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < in->n_lines; i++) {
        double step, y;
        const ckpt_json *value = ckpt_json_get(in->lines[i], key);
        if (ckpt_json_get(in->lines[i], "event") != NULL || value == NULL ||
            !ckpt_json_double(ckpt_json_get(in->lines[i], "step"), &step))
            continue;
        if (!ckpt_json_double(value, &y))
            y = NAN;
        s->step[s->n] = step;
        s->y[s->n++] = y;
    }
    return CKPT_OK;
}

static void saves_and_starts(ckpt_buf *out, const report_input *in)
{
    for (size_t i = 0; i < in->n_lines; i++) {
        const char *event = ckpt_json_string(ckpt_json_get(in->lines[i], "event"));
        const char *from = ckpt_json_string(ckpt_json_get(in->lines[i], "from"));
        double step = 0;
        (void)ckpt_json_double(ckpt_json_get(in->lines[i], "step"), &step);
        if (event == NULL || strcmp(event, "start") != 0)
            continue;
        ckpt_buf_puts(out, "<li>");
        ckpt_html(out, in->name);
        ckpt_buf_printf(out, " begins at step %.0f", step);
        if (from != NULL) {
            ckpt_buf_puts(out, " from <code>");
            ckpt_html(out, from);
            ckpt_buf_puts(out, "</code>");
        }
        ckpt_buf_puts(out, "</li>\n");
    }
}

static ckpt_status training(ckpt_tool *tool, ckpt_buf *out, const report_input *ins, size_t n,
                            ckpt_err *err)
{
    static const struct {
        const char *key, *title;
        bool log;
    } charts[] = {
        {"loss",              "Loss",                    false},
        {"grad_norm",         "Gradient norm",           true },
        {"lr",                "Learning rate",           false},
        {"tokens_per_second", "Tokens per second",       false},
        {"mfu",               "Model FLOPs utilisation", false},
        {"aux_loss",          "Balancing loss",          false},
    };
    report_series series[RUNS_MAX];
    size_t runs = 0;
    for (size_t i = 0; i < n; i++)
        runs += ins[i].doc == NULL;
    if (runs == 0)
        return CKPT_OK;
    if (runs > RUNS_MAX)
        return ckpt_fail(err, CKPT_E_USAGE, "%zu runs; at most %d fit into one picture", runs,
                         RUNS_MAX);
    ckpt_buf_puts(out, "<section>\n<h2>Training</h2>\n<ul>\n");
    for (size_t i = 0; i < n; i++)
        saves_and_starts(out, &ins[i]);
    ckpt_buf_puts(out, "</ul>\n<div class=\"grid\">\n");
    for (size_t c = 0; c < sizeof charts / sizeof charts[0]; c++) {
        size_t used = 0;
        for (size_t i = 0; i < n; i++) {
            if (ins[i].doc != NULL)
                continue;
            ckpt_status status = fill_series(tool, &series[used++], &ins[i], charts[c].key, err);
            if (status != CKPT_OK)
                return status;
        }
        ckpt_chart(out, charts[c].title, series, used, charts[c].log);
    }
    ckpt_buf_puts(out, "</div>\n</section>\n");
    return CKPT_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static ckpt_status draw(ckpt_tool *tool, const report_opts *o, report_input *ins, ckpt_buf *out,
                        ckpt_err *err)
{
    ckpt_status status;
    size_t n = tool->operands.n;
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(read_input(tool, &ins[i], tool->operands.items[i], err));
    ckpt_page_begin(out, o->title != NULL ? o->title : "Checkpoint report");
    CKPT_CHECK(training(tool, out, ins, n, err));
    for (size_t i = 0; i < n; i++)
        if (ins[i].doc != NULL)
            CKPT_CHECK(ckpt_report_doc(out, &tool->arena, &ins[i], err));
    ckpt_page_end(out);
    if (out->failed)
        status = ckpt_tool_no_memory(err);
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    const report_opts *o = opts;
    const char *path = o->out != NULL ? o->out : "ckpt-report.html";
    report_input *ins = ckpt_arena_array(&tool->arena, tool->operands.n + 1, sizeof *ins);
    ckpt_buf out = {0};
    ckpt_status status;
    if (ins == NULL)
        return ckpt_tool_no_memory(err);
    if (!o->force && ckpt_exists(path))
        return ckpt_fail(err, CKPT_E_USAGE, "%s: exists already (--force replaces it)", path);
    CKPT_CHECK(draw(tool, o, ins, &out, err));
    CKPT_CHECK(ckpt_tool_write_file(path, out.data, out.len, err));
    if (ckpt_tool_text(tool))
        printf("%s: %s\n", ckpt_tool_clean(tool, path), ckpt_human(&tool->arena, out.len));
    if (tool->g.json) {
        ckpt_jw_string(&tool->json, "page", path);
        ckpt_jw_u64(&tool->json, "bytes", out.len);
    }
done:
    for (size_t i = 0; i < tool->operands.n; i++) {
        ckpt_json_free(ins[i].doc);
        for (size_t k = 0; k < ins[i].n_lines; k++)
            ckpt_json_free(ins[i].lines[k]);
        free(ins[i].lines);
    }
    ckpt_buf_release(&out);
    return status;
}

const ckpt_command ckpt_cmd_report = {
    .name = "report",
    .synopsis = "FILE...",
    .what = "draw results as HTML",
    .opts = rows,
    .opts_size = sizeof(report_opts),
    .min_operands = 1,
    .max_operands = 64,
    .writes = true,
    .run = run,
    .notes = "FILE is a run's metrics.jsonl (or its directory), several overlaid; or what diff,\n"
             "verify, convert --dry-run (the shard map), study or gate wrote with --json.\n"
             "The page needs no network and no script.\n",
    .examples = "  ckpt diff a/ b/ --json > drift.json; ckpt report run/ resumed/ drift.json\n",
};
