/* What a conversion tells the user: what is left out, approximated, not cast, and worth knowing.
 * Lists go to --json in full; on stderr long ones are summed up. */
#include "convert.h"
#include "dcp.h"

#include <stdlib.h>
#include <string.h>

#define UNDECODED " tensor is not decoded" /* how containers warn of one: "'q': quantised ..." */
#define NO_PLACE ": no place in the target"
#define NOT_CAST ": not cast ("
#define KEPT "kept "

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

ckpt_status ckpt_report_add(ckpt_tool *tool, ckpt_strings *list, ckpt_err *err, const char *fmt,
                            ...)
{
    ckpt_buf b = {0};
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&b, fmt, ap);
    va_end(ap);
    const char *text =
        b.failed ? NULL : ckpt_arena_strndup(&tool->arena, (const char *)b.data, b.len);
    ckpt_buf_release(&b);
    return text != NULL ? ckpt_strings_push(list, text, err) : ckpt_tool_no_memory(err);
}

ckpt_status ckpt_report_warn(ckpt_tool *tool, ckpt_report *r, ckpt_err *err, const char *fmt, ...)
{
    ckpt_buf b = {0};
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&b, fmt, ap);
    va_end(ap);
    ckpt_status status =
        ckpt_report_add(tool, &r->warnings, err, "%s", b.data != NULL ? (const char *)b.data : "?");
    ckpt_buf_release(&b);
    if (status == CKPT_OK)
        ckpt_tool_warn(tool, "%s", r->warnings.items[r->warnings.n - 1]);
    return status;
}

/* "a, b, c, …" */
static void name(ckpt_buf *b, size_t i, size_t shown, const char *text)
{
    if (i < shown)
        ckpt_buf_printf(b, "%s%s", i > 0 ? ", " : "", text);
    else if (i == shown)
        ckpt_buf_puts(b, ", …");
}

void ckpt_report_release(ckpt_report *r)
{
    ckpt_strings_release(&r->dropped);
    ckpt_strings_release(&r->kept);
    ckpt_strings_release(&r->warnings);
    ckpt_strings_release(&r->lossy);
}

/* ---- the source ------------------------------------------------------------------------------ */

/* A pickled tensor, decoded or not, in the rendering of pickle.h. */
static bool is_tensor(const ckpt_json *j)
{
    return ckpt_json_get(j, "$tensor") != NULL;
}

enum { ENTRY_DEPTH = 128 }; /* JSON is no deeper */

static bool leads_to_tensor(const ckpt_json *j, int depth)
{
    bool found = is_tensor(j);
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL && !found && depth < ENTRY_DEPTH;
         c = ckpt_json_next(c))
        found = leads_to_tensor(c, depth + 1);
    return found;
}

/* Names of entries that hold no tensor, as deep as it takes to tell them apart from those that do. */
static void name_entries(ckpt_buf *b, size_t *n, const ckpt_source *src, const ckpt_json *j,
                         const char *prefix, int depth)
{
    enum { SHOWN = 8 };
    ckpt_arena scratch = {0};
    size_t at = 0;
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c), at++) {
        const char *key = ckpt_json_key(c);
        const char *path = key != NULL ? ckpt_arena_printf(&scratch, "%s%s", prefix, key)
                                       : ckpt_arena_printf(&scratch, "%s%zu", prefix, at);
        bool config = src->config != NULL && path != NULL && strcmp(path, "args") == 0;
        if (path == NULL || config || is_tensor(c))
            continue;
        if (!leads_to_tensor(c, 0)) {
            name(b, (*n)++, SHOWN, path);
        } else if (depth < ENTRY_DEPTH) {
            const char *inner = ckpt_arena_printf(&scratch, "%s.", path);
            name_entries(b, n, src, c, inner != NULL ? inner : "", depth + 1);
        }
    }
    ckpt_arena_free(&scratch);
}

/* No container that is written holds what else a torch file has. */
static ckpt_status drop_entries(ckpt_tool *tool, ckpt_report *r, const ckpt_source *src,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf b = {0};
    size_t n = 0;
    if (strcmp(src->container->name, "torch") != 0 || src->common == NULL || is_tensor(src->common))
        return CKPT_OK;
    name_entries(&b, &n, src, src->common, "", 0);
    if (n > 0)
        status = ckpt_report_add(tool, &r->dropped, err, "%zu non-tensor entr%s (%s)", n,
                                 n == 1 ? "y" : "ies", b.data != NULL ? (const char *)b.data : "?");
    ckpt_buf_release(&b);
    return status;
}

ckpt_status ckpt_report_source(ckpt_tool *tool, ckpt_report *r, const ckpt_source *src,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < src->n_warnings; i++) {
        const char *text = src->warnings[i], *kind = strstr(text, "': ");
        if (!ends_with(text, UNDECODED) || kind == NULL) {
            ckpt_tool_warn(tool, "%s: %s", src->path, text);
            CKPT_CHECK(ckpt_strings_push(&r->warnings, text, err));
            continue;
        }
        r->undecoded++;
        int kind_len = (int)(strlen(kind + 3) - (sizeof UNDECODED - 1));
        CKPT_CHECK(ckpt_report_add(tool, &r->dropped, err, "%.*s' (%.*s, not decoded)",
                                   (int)(kind - text), text, kind_len, kind + 3));
    }
    CKPT_CHECK(drop_entries(tool, r, src, err));
done:
    return status;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* Objects that the target has no place for. The common state that became the configuration is not
 * lost, and Transformer Engine's states are many and all alike. */
static ckpt_status drop_objects(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                                const ckpt_json *kept, const char *target, ckpt_err *err)
{
    enum { SHOWN = 8 };
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = plan->model->src;
    ckpt_buf b = {0};
    size_t states = 0, others = 0;
    for (size_t i = 0; i < src->n_objects; i++) {
        const char *s = src->objects[i].name;
        bool in_common = strstr(s, "optimizer.distributed.dp_group_idx_") != NULL &&
                         ckpt_json_get(kept, CKPT_DCP_COMMON_OBJECT) != NULL;
        if (in_common || ckpt_json_get(kept, s) != NULL)
            continue;
        if (strstr(s, "_extra_state") != NULL)
            states++;
        else if (strcmp(s, CKPT_DCP_COMMON_OBJECT) != 0 || src->config == NULL)
            name(&b, others++, SHOWN, s);
    }
    if (states > 0)
        CKPT_CHECK(ckpt_report_add(
            tool, &r->dropped, err,
            "%zu _extra_state object%s: Transformer Engine state has no place in %s", states,
            plural(states), target));
    if (others > 0)
        CKPT_CHECK(ckpt_report_add(tool, &r->dropped, err, "%zu object%s without a place in %s: %s",
                                   others, plural(others), target,
                                   b.data != NULL ? (const char *)b.data : "?"));
done:
    ckpt_buf_release(&b);
    return status;
}

/* What follows "blocks.N.", for names that are alike in every block. */
static const char *within_block(const char *s)
{
    static const char prefix[] = "blocks.";
    if (strncmp(s, prefix, sizeof prefix - 1) != 0)
        return s;
    const char *dot = strchr(s + sizeof prefix - 1, '.');
    return dot != NULL ? dot + 1 : s;
}

static bool loses(ckpt_dtype from, ckpt_dtype to)
{
    const ckpt_dtype_info *a = ckpt_dtype_get(from), *b = ckpt_dtype_get(to);
    return a->man_bits > b->man_bits || a->exp_bits > b->exp_bits;
}

static ckpt_status lossy_casts(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t n[CKPT_DTYPE_COUNT] = {0};
    ckpt_dtype to = CKPT_F32; /* one for the whole plan */
    for (size_t i = 0; i < plan->n_results; i++) {
        const ckpt_gather *g = &plan->results[i].gather;
        if (g->from != g->to && loses(g->from, g->to)) {
            n[g->from]++;
            to = g->to;
        }
    }
    for (int d = 0; d < CKPT_DTYPE_COUNT; d++)
        if (n[d] > 0)
            CKPT_CHECK(ckpt_report_add(
                tool, &r->lossy, err, "cast %zu tensor%s %s -> %s, rounded to nearest even", n[d],
                plural(n[d]), ckpt_dtype_get((ckpt_dtype)d)->name, ckpt_dtype_get(to)->name));
done:
    return status;
}

static ckpt_status keep_objects(ckpt_tool *tool, ckpt_report *r, const ckpt_json *kept,
                                ckpt_err *err)
{
    enum { SHOWN = 4 };
    ckpt_status status = CKPT_OK;
    ckpt_buf b = {0};
    size_t n = 0;
    for (const ckpt_json *c = ckpt_json_child(kept); c != NULL; c = ckpt_json_next(c))
        name(&b, n++, SHOWN, ckpt_json_key(c));
    if (n > 0)
        status = ckpt_report_add(tool, &r->kept, err,
                                 "%zu object%s in the manifest, for the way back: %s", n, plural(n),
                                 b.data != NULL ? (const char *)b.data : "?");
    ckpt_buf_release(&b);
    return status;
}

ckpt_status ckpt_report_plan(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                             const ckpt_json *kept, const char *target, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(keep_objects(tool, r, kept, err));
    for (size_t i = 0; i < plan->n_dropped; i++) {
        if (ends_with(plan->dropped[i], NO_PLACE))
            CKPT_CHECK(drop_objects(tool, r, plan, kept, target, err));
        else
            CKPT_CHECK(ckpt_strings_push(&r->dropped, plan->dropped[i], err));
    }
    for (size_t i = 0; i < plan->n_lossy; i++)
        CKPT_CHECK(ckpt_strings_push(&r->lossy, plan->lossy[i], err));
    CKPT_CHECK(lossy_casts(tool, r, plan, err));
    for (size_t i = 0; i < plan->n_warnings; i++) {
        CKPT_CHECK(ckpt_report_warn(tool, r, err, "%s", plan->warnings[i]));
    }
done:
    return status;
}

/* ---- patterns -------------------------------------------------------------------------------- */

static bool glob_used(const ckpt_model *model, const ckpt_strings *removed, const char *pattern)
{
    bool used = false;
    for (size_t i = 0; i < model->n_tensors && !used; i++) {
        const ckpt_canon *t = &model->tensors[i];
        used =
            ckpt_glob(pattern, t->name) || ckpt_glob(pattern, model->src->tensors[t->stored].name);
    }
    for (size_t i = 0; i < removed->n && !used; i++)
        used = ckpt_glob(pattern, removed->items[i]);
    return used;
}

/* One side of a rename rule, n characters with at most one '*'. */
static bool side_matches(const char *side, size_t n, const char *text)
{
    const char *star = memchr(side, '*', n);
    size_t len = strlen(text);
    if (star == NULL)
        return len == n && memcmp(text, side, n) == 0;
    size_t head = (size_t)(star - side), tail = n - head - 1;
    return len >= head + tail && memcmp(text, side, head) == 0 &&
           memcmp(text + len - tail, star + 1, tail) == 0;
}

/* Where the layout changes, names before renaming are not known: then the right side decides. */
static bool rename_used(const ckpt_plan *plan, const char *rule, bool same_names)
{
    const char *eq = strchr(rule, '=');
    bool used = eq == NULL;
    for (size_t i = 0; i < plan->n_results && !used; i++) {
        const ckpt_result_tensor *t = &plan->results[i];
        if (same_names && t->model_tensor >= 0) {
            uint32_t stored = plan->model->tensors[t->model_tensor].stored;
            used = side_matches(rule, (size_t)(eq - rule), plan->model->src->tensors[stored].name);
        } else {
            used = side_matches(eq + 1, strlen(eq + 1), t->stored);
        }
    }
    return used;
}

ckpt_status ckpt_report_patterns(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                                 const ckpt_convert_opts *opts, const ckpt_strings *removed,
                                 bool same_names, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < opts->n_include + opts->n_exclude; i++) {
        bool in = i < opts->n_include;
        const char *pattern = in ? opts->include[i] : opts->exclude[i - opts->n_include];
        if (glob_used(plan->model, removed, pattern))
            continue;
        const char *text =
            ckpt_tool_no_match(tool, plan->model, in ? "--include " : "--exclude ", pattern);
        if (text == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(ckpt_report_warn(tool, r, err, "%s", text));
    }
    for (size_t i = 0; i < opts->n_rename; i++)
        if (!rename_used(plan, opts->rename[i], same_names))
            CKPT_CHECK(
                ckpt_report_warn(tool, r, err, "--rename '%s' matches no tensor", opts->rename[i]));
done:
    return status;
}

/* ---- on stderr ------------------------------------------------------------------------------- */

/* The reason of a line "NAME: not cast (REASON)"; NULL if it is none. */
static const char *reason_of(const char *line)
{
    const char *at = strstr(line, NOT_CAST);
    return at != NULL ? at + sizeof NOT_CAST - 1 : NULL;
}

static bool same_reason(const char *a, const char *b)
{
    const char *x = reason_of(a), *y = reason_of(b);
    return x != NULL && y != NULL && strcmp(x, y) == 0;
}

/* One line for all tensors that were not cast for the reason of lines[first]. */
static void show_not_cast(ckpt_tool *tool, const char *const *lines, size_t first, size_t n)
{
    enum { SHOWN = 3 };
    ckpt_buf b = {0};
    ckpt_arena scratch = {0};
    const char *why = reason_of(lines[first]), *seen[SHOWN];
    size_t count = 0, kinds = 0;
    for (size_t i = first; i < n; i++) {
        if (!same_reason(lines[first], lines[i]))
            continue;
        count++;
        const char *full = ckpt_arena_strndup(
            &scratch, lines[i], (size_t)(reason_of(lines[i]) - lines[i]) - (sizeof NOT_CAST - 1));
        const char *s = full != NULL ? within_block(full) : "?";
        bool known = kinds > SHOWN;
        for (size_t k = 0; k < kinds && k < SHOWN; k++)
            known = known || strcmp(seen[k], s) == 0;
        if (known)
            continue;
        if (kinds < SHOWN)
            seen[kinds] = s;
        name(&b, kinds++, SHOWN, s);
    }
    const char *names = b.data != NULL ? (const char *)b.data : "?";
    if (strncmp(why, KEPT, sizeof KEPT - 1) == 0)
        ckpt_tool_note(tool, "not cast: %zu tensor%s kept %.*s: %s (--dtype-force casts %s)", count,
                       plural(count), (int)strcspn(why + sizeof KEPT - 1, ";)"),
                       why + sizeof KEPT - 1, names, count == 1 ? "it" : "them");
    else
        ckpt_tool_note(tool, "not cast: %zu %.*s tensor%s: %s", count, (int)strcspn(why, ")"), why,
                       plural(count), names);
    ckpt_arena_free(&scratch);
    ckpt_buf_release(&b);
}

static void show_all_not_cast(ckpt_tool *tool, const ckpt_plan *plan)
{
    for (size_t i = 0; i < plan->n_not_cast; i++) {
        bool done = false;
        for (size_t k = 0; k < i && !done; k++)
            done = same_reason(plan->not_cast[k], plan->not_cast[i]);
        if (tool->g.verbose || reason_of(plan->not_cast[i]) == NULL)
            ckpt_tool_note(tool, "not cast: %s", plan->not_cast[i]);
        else if (!done)
            show_not_cast(tool, plan->not_cast, i, plan->n_not_cast);
    }
}

void ckpt_report_show(ckpt_tool *tool, const ckpt_report *r, const ckpt_plan *plan)
{
    for (size_t i = 0; i < r->dropped.n; i++)
        ckpt_tool_note(tool, "dropped: %s", r->dropped.items[i]);
    for (size_t i = 0; i < r->kept.n; i++)
        ckpt_tool_note(tool, "kept: %s", r->kept.items[i]);
    show_all_not_cast(tool, plan);
    for (size_t i = 0; i < r->lossy.n; i++)
        ckpt_tool_note(tool, "lossy: %s", r->lossy.items[i]);
}
