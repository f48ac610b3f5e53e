/* ckpt inspect: what a checkpoint is and what it holds. Reads headers only, unless --stats or
 * --head ask for values. */
#include "inspect.h"
#include "numbers.h"
#include "quant_policy.h"
#include "tool.h"

#include <stdlib.h>
#include <string.h>

#include "derive.h"

typedef struct inspect_opts {
    bool stats, tree, common;
    int64_t head, iteration, flops;
} inspect_opts;

#define AT(field) offsetof(inspect_opts, field)
/* clang-format off */
static const ckpt_opt rows[] = {
    {"stats",     CKPT_OPT_FLAG, AT(stats),     NULL, "min, max, mean, std, nan, inf, zero of every tensor (reads the data)", 0, 0},
    {"head",      CKPT_OPT_INT,  AT(head),      "N",  "first N values of every tensor", 0, 1 << 20},
    {"tree",      CKPT_OPT_FLAG, AT(tree),      NULL, "names as a tree", 0, 0},
    {"common",    CKPT_OPT_FLAG, AT(common),    NULL, "decoded common state, configuration and objects", 0, 0},
    {"flops",     CKPT_OPT_INT,  AT(flops),     "N",  "operations of a pass over a sequence of N tokens", 1, 1 << 30},
    {"iteration", CKPT_OPT_INT,  AT(iteration), "N",  "iteration of a save root (default: newest)", 0, INT64_MAX},
    {NULL,        CKPT_OPT_FLAG, 0,             NULL, NULL, 0, 0},
};
/* clang-format on */
#undef AT

typedef struct inspection {
    ckpt_tool *tool;
    const inspect_opts *opts;
    ckpt_source src;
    ckpt_model model;
    bool *stored;    /* selected stored tensors */
    bool *canon;     /* selected canonical tensors */
    uint32_t *first; /* per stored tensor: its canonical tensors are order[first[i]..first[i+1]) */
    uint32_t *order;
    size_t *seen; /* per file: stamp of the last tensor that was found in it */
    size_t stamp;
    ckpt_stats *stats; /* per canonical tensor, or NULL */
    ckpt_inspect_groups dtypes, stored_dtypes, modules;
    const ckpt_tensor *held; /* the source's tensors as the files hold them */
    uint64_t parameters, bytes, stored_bytes, n_selected;
    bool quantised;            /* some selected tensor stands for another */
    const char *contradiction; /* why no layout could be bound, or NULL */
    const char *unmatched;     /* the pattern that selects nothing, or NULL */
} inspection;

/* ---- selection and totals -------------------------------------------------------------------- */

static ckpt_status link_canon(inspection *in, ckpt_err *err)
{
    size_t n = in->src.n_tensors, m = in->model.n_tensors;
    ckpt_arena *arena = &in->tool->arena;
    in->stored = ckpt_arena_array(arena, n + 1, sizeof *in->stored);
    in->canon = ckpt_arena_array(arena, m + 1, sizeof *in->canon);
    in->first = ckpt_arena_array(arena, n + 2, sizeof *in->first);
    in->order = ckpt_arena_array(arena, m + 1, sizeof *in->order);
    in->seen = ckpt_arena_array(arena, in->src.n_files + 1, sizeof *in->seen);
    if (in->seen == NULL || in->stored == NULL || in->canon == NULL || in->first == NULL ||
        in->order == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < m; i++)
        in->first[in->model.tensors[i].stored + 2]++;
    for (size_t i = 2; i < n + 2; i++)
        in->first[i] += in->first[i - 1];
    for (size_t i = 0; i < m; i++)
        in->order[in->first[in->model.tensors[i].stored + 1]++] = (uint32_t)i;
    return CKPT_OK;
}

static void select_tensors(inspection *in, const char *pattern)
{
    for (size_t i = 0; i < in->src.n_tensors; i++)
        in->stored[i] = pattern == NULL || ckpt_glob(pattern, in->src.tensors[i].name);
    for (size_t i = 0; i < in->model.n_tensors; i++)
        if (pattern != NULL && ckpt_glob(pattern, in->model.tensors[i].name))
            in->stored[in->model.tensors[i].stored] = true;
    for (size_t i = 0; i < in->model.n_tensors; i++)
        in->canon[i] = in->stored[in->model.tensors[i].stored];
    for (size_t i = 0; i < in->src.n_tensors; i++)
        in->n_selected += in->stored[i];
    if (pattern != NULL && in->n_selected == 0)
        in->unmatched = ckpt_tool_no_match(in->tool, &in->model, "", pattern);
}

static ckpt_status add_dtype(ckpt_inspect_groups *list, const ckpt_tensor *t, ckpt_err *err)
{
    return ckpt_inspect_add(list, ckpt_dtype_get(t->dtype)->name,
                            ckpt_inspect_elements(t->rank, t->dims), ckpt_inspect_bytes(t), err);
}

/* How a stored weight is quantised, or NULL. */
static const char *format_of(const inspection *in, size_t i)
{
    const ckpt_derived *d = ckpt_packed_find(&in->src, in->src.tensors[i].name);
    if (d == NULL && in->first[i] < in->first[i + 1])
        d = in->model.tensors[in->order[in->first[i]]].derived;
    return ckpt_inspect_format(d);
}

static ckpt_status total(inspection *in, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < in->src.n_tensors; i++) {
        const ckpt_tensor *t = &in->src.tensors[i];
        if (!in->stored[i])
            continue;
        CKPT_CHECK(add_dtype(&in->dtypes, t, err));
        CKPT_CHECK(add_dtype(&in->stored_dtypes, &in->held[i], err));
        in->bytes += ckpt_inspect_bytes(t);
        in->stored_bytes += ckpt_inspect_bytes(&in->held[i]);
        in->quantised = in->quantised || format_of(in, i) != NULL;
    }
    const char *last_name = NULL;
    for (size_t i = 0; i < in->model.n_tensors; i++) {
        const ckpt_canon *t = &in->model.tensors[i];
        if (!in->canon[i])
            continue;
        const char *name =
            ckpt_tool_module(&in->tool->arena, t->name, in->model.layout != NULL && !t->extra);
        if (name == NULL)
            return ckpt_tool_no_memory(err);
        if (last_name != NULL && strcmp(last_name, name) == 0)
            name = last_name;
        last_name = name;
        CKPT_CHECK(ckpt_inspect_add(&in->modules, name, ckpt_inspect_elements(t->rank, t->dims),
                                    t->bytes, err));
        if (t->state == NULL)
            in->parameters += ckpt_inspect_elements(t->rank, t->dims);
    }
done:
    return status;
}

/* ---- values ---------------------------------------------------------------------------------- */

static ckpt_status feed_stats(void *self, size_t tensor, uint64_t lo, const uint8_t *a,
                              const uint8_t *b, size_t n, ckpt_err *err)
{
    inspection *in = self;
    (void)lo;
    (void)b;
    (void)err;
    ckpt_stats_feed(&in->stats[tensor], in->model.tensors[tensor].dtype, a, n);
    return CKPT_OK;
}

/* 6-bit elements straddle the executor's blocks: they are listed without statistics. */
static bool has_stats(ckpt_dtype dtype)
{
    return ckpt_dtype_get(dtype)->bits != 6;
}

static ckpt_status compute_stats(inspection *in, ckpt_err *err)
{
    ckpt_bar bar;
    size_t m = in->model.n_tensors;
    in->stats = ckpt_arena_array(&in->tool->arena, m + 1, sizeof *in->stats);
    bool *select = ckpt_arena_array(&in->tool->arena, m + 1, sizeof *select);
    if (in->stats == NULL || select == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < m; i++) {
        ckpt_stats_init(&in->stats[i]);
        select[i] = in->canon[i] && has_stats(in->model.tensors[i].dtype);
    }
    ckpt_bar_start(&bar, "stats", in->tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(in->tool, &bar);
    ckpt_status status =
        ckpt_stream_visit(&in->model, NULL, NULL, select, &opts, feed_stats, in, err);
    ckpt_bar_stop(&bar);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, in->src.path);
    return status;
}

/* First values of one canonical tensor as text; *n receives how many. */
static ckpt_status head_values(inspection *in, size_t tensor, double **values, size_t *n,
                               ckpt_err *err)
{
    ckpt_status status;
    const ckpt_canon *t = &in->model.tensors[tensor];
    int parts;
    ckpt_dtype dtype = ckpt_component(t->dtype, &parts);
    uint64_t elements = ckpt_inspect_elements(t->rank, t->dims);
    if (elements > (uint64_t)in->opts->head)
        elements = (uint64_t)in->opts->head;
    *n = (size_t)elements * (size_t)parts;
    size_t bytes = (*n * (size_t)ckpt_dtype_get(dtype)->bits + 7) / 8;
    uint8_t *raw = ckpt_arena_alloc(&in->tool->arena, bytes + 8);
    *values = ckpt_arena_array(&in->tool->arena, *n + 1, sizeof **values);
    if (raw == NULL || *values == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_TRY(ckpt_model_read(&in->model, tensor, 0, bytes, raw, err), "%s: tensor '%s'",
             in->src.path, t->name);
    ckpt_decode(dtype, raw, *n, *values);
done:
    return status;
}

/* ---- text ------------------------------------------------------------------------------------ */

static void field(inspection *in, const char *name, const char *value)
{
    bool c = in->tool->color;
    printf("%s%-11s%s %s\n", ckpt_paint_on(c, CKPT_BOLD), name, ckpt_paint_off(c), value);
}

/* Flat buckets of many parameters are shown as they are stored. */
static void print_buckets(inspection *in)
{
    size_t n = 0;
    for (size_t i = 0; i < in->src.n_tensors; i++) {
        ckpt_state_ref ref;
        ckpt_state_parse(&in->src, in->src.tensors[i].name, &ref);
        n += ref.kind == CKPT_STATE_BUCKET;
    }
    if (n > 0)
        printf("%s%-11s%s %zu tensor%s in flat buckets (dp_reshardable), which other commands give "
               "back to their parameters\n",
               ckpt_paint_on(in->tool->color, CKPT_BOLD), "optimizer",
               ckpt_paint_off(in->tool->color), n, ckpt_tool_plural(n));
}

static void print_summary(inspection *in)
{
    ckpt_arena *arena = &in->tool->arena;
    const ckpt_model *m = &in->model;
    field(in, "path", ckpt_clean(arena, in->src.path));
    field(in, "container", in->src.container->name);
    field(in, "layout", m->layout != NULL ? m->layout->name : "none recognised");
    if (m->layout != NULL)
        field(in, "family", m->layout->family);
    if (m->layout != NULL && m->tags != NULL && *m->tags != '\0')
        field(in, "choices", ckpt_clean(arena, m->tags));
    field(in, "mesh", ckpt_tool_mesh(arena, &m->mesh));
    const char *policy = ckpt_policy_shown(arena, &in->src);
    if (policy != NULL)
        field(in, "policy", policy);
    if (in->src.iteration >= 0)
        printf("%s%-11s%s %lld\n", ckpt_paint_on(in->tool->color, CKPT_BOLD), "iteration",
               ckpt_paint_off(in->tool->color), (long long)in->src.iteration);
    printf("%s%-11s%s %s stored", ckpt_paint_on(in->tool->color, CKPT_BOLD), "tensors",
           ckpt_paint_off(in->tool->color), ckpt_count(arena, in->n_selected));
    if (in->n_selected != in->src.n_tensors)
        printf(" of %s", ckpt_count(arena, in->src.n_tensors));
    size_t files = ckpt_source_n_real(&in->src);
    printf(", %s in %zu file%s; %zu object%s\n", ckpt_human(arena, in->stored_bytes), files,
           ckpt_tool_plural(files), in->src.n_objects, ckpt_tool_plural(in->src.n_objects));
    field(in, "parameters", ckpt_count(arena, in->parameters));
    print_buckets(in);
}

static const char *files_of(inspection *in, const ckpt_tensor *t)
{
    size_t others = 0;
    if (t->n_chunks == 0)
        return "-";
    uint32_t first = t->chunks[0].file;
    in->stamp++;
    in->seen[first] = in->stamp;
    for (size_t i = 1; i < t->n_chunks; i++) {
        others += in->seen[t->chunks[i].file] != in->stamp;
        in->seen[t->chunks[i].file] = in->stamp;
    }
    const char *name = ckpt_clean(&in->tool->arena, in->src.files[first].name);
    if (others == 0)
        return name;
    const char *text = ckpt_arena_printf(&in->tool->arena, "%s +%zu", name, others);
    return text != NULL ? text : "?";
}

static const char *shape_text(inspection *in, ckpt_dtype dtype, int rank, const int64_t *dims)
{
    const char *shape = ckpt_shape(&in->tool->arena, rank, dims);
    if (!ckpt_tool_packed(dtype))
        return shape;
    shape = ckpt_arena_printf(&in->tool->arena, "%s packed", shape);
    return shape != NULL ? shape : "?";
}

/* "nvfp4 of BF16 [64, 64]" of a quantised weight. */
static const char *meaning(inspection *in, size_t i)
{
    ckpt_arena *arena = &in->tool->arena;
    const ckpt_tensor *t = &in->src.tensors[i];
    const char *format = format_of(in, i);
    if (format == NULL)
        return "";
    const char *text =
        ckpt_arena_printf(arena, "%s of BF16 %s", format, ckpt_shape(arena, t->rank, t->dims));
    return text != NULL ? text : "?";
}

static ckpt_status print_table(inspection *in, ckpt_err *err)
{
    ckpt_arena *arena = &in->tool->arena;
    static const char *const header[] = {"NAME",  "DTYPE",      "SHAPE", "SHARDS",
                                         "BYTES", "STANDS FOR", "FILE"};
    enum { COLUMNS = sizeof header / sizeof header[0], MEANING = 5 };
    ckpt_table table = {.align = in->quantised ? "llrrrlo" : "llrrro"};
    for (int c = 0; c < COLUMNS; c++)
        if (c != MEANING || in->quantised)
            ckpt_table_cell(&table, header[c]);
    for (size_t i = 0; i < in->src.n_tensors; i++) {
        const ckpt_tensor *t = &in->held[i];
        if (!in->stored[i])
            continue;
        ckpt_table_cell(&table, ckpt_clean(arena, t->name));
        ckpt_table_cell(&table, ckpt_dtype_get(t->dtype)->name);
        ckpt_table_cell(&table, shape_text(in, t->dtype, t->rank, t->dims));
        ckpt_table_cell(&table, ckpt_count(arena, t->n_chunks));
        ckpt_table_cell(&table, ckpt_human(arena, ckpt_inspect_bytes(t)));
        if (in->quantised)
            ckpt_table_cell(&table, meaning(in, i));
        ckpt_table_cell(&table, files_of(in, t));
        for (uint32_t k = in->first[i]; in->tool->g.verbose && k < in->first[i + 1]; k++) {
            const char *name = in->model.tensors[in->order[k]].name;
            const char *line = ckpt_arena_printf(arena, "  = %s", ckpt_clean(arena, name));
            ckpt_table_cell(&table, line != NULL ? line : "?");
            for (int c = 1; c < COLUMNS - !in->quantised; c++)
                ckpt_table_cell(&table, "");
        }
    }
    ckpt_table_print(&table, stdout, 0, true, in->tool->color);
    bool failed = table.failed;
    ckpt_table_release(&table);
    return failed ? ckpt_tool_no_memory(err) : CKPT_OK;
}

static const char *real_cell(ckpt_arena *arena, double v)
{
    const char *text = ckpt_arena_printf(arena, "%.6g", v);
    return text != NULL ? text : "?";
}

/* The main table shows stored names: the canonical one follows where it is another. */
static const char *both_names(inspection *in, size_t canon)
{
    ckpt_arena *arena = &in->tool->arena;
    const ckpt_canon *t = &in->model.tensors[canon];
    const char *stored = in->src.tensors[t->stored].name;
    if (strcmp(stored, t->name) == 0)
        return ckpt_clean(arena, stored);
    const char *text = ckpt_arena_printf(arena, "%s = %s", stored, t->name);
    return text != NULL ? ckpt_clean(arena, text) : "?";
}

static void print_stats(inspection *in)
{
    ckpt_arena *arena = &in->tool->arena;
    ckpt_table table = {.align = "lrrrrrrr"};
    static const char *const header[] = {"NAME", "MIN", "MAX", "MEAN", "STD", "NAN", "INF", "ZERO"};
    for (size_t c = 0; c < sizeof header / sizeof header[0]; c++)
        ckpt_table_cell(&table, header[c]);
    for (size_t i = 0; i < in->model.n_tensors; i++) {
        const ckpt_stats *s = &in->stats[i];
        if (!in->canon[i])
            continue;
        ckpt_table_cell(&table, both_names(in, i));
        if (!has_stats(in->model.tensors[i].dtype) || s->n == 0) {
            for (int c = 1; c < 8; c++)
                ckpt_table_cell(&table, "-");
            continue;
        }
        ckpt_table_cell(&table, s->finite > 0 ? real_cell(arena, s->min) : "-");
        ckpt_table_cell(&table, s->finite > 0 ? real_cell(arena, s->max) : "-");
        ckpt_table_cell(&table, s->finite > 0 ? real_cell(arena, s->mean) : "-");
        ckpt_table_cell(&table, s->finite > 0 ? real_cell(arena, ckpt_stats_std(s)) : "-");
        ckpt_table_cell(&table, ckpt_count(arena, (uint64_t)s->nan));
        ckpt_table_cell(&table, ckpt_count(arena, (uint64_t)s->inf));
        ckpt_table_cell(&table, ckpt_count(arena, (uint64_t)s->zero));
    }
    putchar('\n');
    ckpt_table_print(&table, stdout, 0, true, in->tool->color);
    ckpt_table_release(&table);
}

static ckpt_status print_heads(inspection *in, ckpt_err *err)
{
    putchar('\n');
    for (size_t i = 0; i < in->model.n_tensors; i++) {
        double *values = NULL;
        size_t n = 0;
        if (!in->canon[i])
            continue;
        ckpt_status status = head_values(in, i, &values, &n, err);
        if (status != CKPT_OK)
            return status;
        printf("%s%s%s:", ckpt_paint_on(in->tool->color, CKPT_BOLD), both_names(in, i),
               ckpt_paint_off(in->tool->color));
        for (size_t k = 0; k < n; k++) {
            char text[32];
            ckpt_real_text(values[k], text);
            printf(" %s", text);
        }
        putchar('\n');
    }
    return CKPT_OK;
}

/* The names are sorted, so a subtree is a run: its size is found by looking ahead. */
static void print_branch(inspection *in, size_t i, size_t len, int depth, size_t from)
{
    const char *name = in->src.tensors[i].name;
    uint64_t tensors = 0, bytes = 0;
    for (size_t j = i; j < in->src.n_tensors; j++) {
        const char *other = in->src.tensors[j].name;
        if (strncmp(other, name, len) != 0)
            break;
        if (in->stored[j] && other[len] == '.') {
            tensors++;
            bytes += ckpt_inspect_bytes(&in->held[j]);
        }
    }
    ckpt_arena scratch = {0};
    char *part = ckpt_arena_strndup(&scratch, name + from, len - from);
    printf("%*s%s%s%s  (%llu, %s)\n", depth * 2, "", ckpt_paint_on(in->tool->color, CKPT_BOLD),
           part != NULL ? ckpt_clean(&scratch, part) : "?", ckpt_paint_off(in->tool->color),
           (unsigned long long)tensors, ckpt_human(&scratch, bytes));
    ckpt_arena_free(&scratch);
}

static size_t common_prefix(const char *a, const char *b)
{
    size_t n = 0, dot = 0;
    while (a[n] != '\0' && a[n] == b[n]) {
        n++;
        if (a[n - 1] == '.')
            dot = n;
    }
    return dot;
}

static void print_tree(inspection *in)
{
    enum { MAX_DEPTH = 64 }; /* deeper names print their rest as one leaf */
    const char *previous = "";
    putchar('\n');
    for (size_t i = 0; i < in->src.n_tensors; i++) {
        const ckpt_tensor *t = &in->held[i];
        if (!in->stored[i])
            continue;
        size_t shared = common_prefix(t->name, previous), at = 0;
        int depth = 0;
        for (;;) {
            size_t len = strcspn(t->name + at, ".");
            if (t->name[at + len] == '\0' || depth == MAX_DEPTH)
                break;
            if (at + len + 1 > shared)
                print_branch(in, i, at + len, depth, at);
            at += len + 1;
            depth++;
        }
        printf("%*s%s  %s %s\n", depth * 2, "", ckpt_tool_clean(in->tool, t->name + at),
               ckpt_dtype_get(t->dtype)->name, shape_text(in, t->dtype, t->rank, t->dims));
        previous = t->name;
    }
}

static ckpt_status print_json_block(inspection *in, const char *title, const ckpt_json *j,
                                    ckpt_err *err)
{
    ckpt_buf b = {0};
    if (j == NULL)
        return CKPT_OK;
    bool ok = ckpt_json_print(j, 2, false, &b);
    printf("\n%s%s%s\n", ckpt_paint_on(in->tool->color, CKPT_BOLD), title,
           ckpt_paint_off(in->tool->color));
    if (ok && b.data != NULL)
        printf("%s\n", (const char *)b.data);
    ckpt_buf_release(&b);
    return ok ? CKPT_OK : ckpt_tool_no_memory(err);
}

static void print_objects(inspection *in)
{
    bool c = in->tool->color;
    if (in->src.n_objects == 0)
        return;
    printf("\n%sobjects%s\n", ckpt_paint_on(c, CKPT_BOLD), ckpt_paint_off(c));
    for (size_t i = 0; i < in->src.n_objects; i++) {
        const ckpt_object *o = &in->src.objects[i];
        printf("%s  %llu bytes  %s", ckpt_tool_clean(in->tool, o->name),
               (unsigned long long)o->length,
               ckpt_tool_clean(in->tool, in->src.files[o->file].name));
        if (o->text != NULL)
            printf("  %s", ckpt_tool_clean(in->tool, o->text));
        if (o->unknown_global != NULL)
            printf("  %s[inert: unknown global %s]%s", ckpt_paint_on(c, CKPT_YELLOW),
                   ckpt_tool_clean(in->tool, o->unknown_global), ckpt_paint_off(c));
        putchar('\n');
    }
}

static ckpt_status print_common(inspection *in, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(print_json_block(in, "common state", in->src.common, err));
    if (in->src.common == NULL || in->src.config_kind != CKPT_CONFIG_MEGATRON)
        CKPT_CHECK(print_json_block(in, "stored configuration", in->src.config, err));
    CKPT_CHECK(print_json_block(in, "container metadata", in->src.metadata, err));
    print_objects(in);
done:
    return status;
}

static void print_flags(inspection *in)
{
    if (in->unmatched != NULL)
        ckpt_tool_warn(in->tool, "%s: %s", in->src.path, in->unmatched);
    for (size_t i = 0; i < in->src.n_objects; i++) {
        const ckpt_object *o = &in->src.objects[i];
        if (o->unknown_global != NULL)
            ckpt_tool_warn(in->tool, "%s: object '%s': unknown global %s, shown inert",
                           in->src.path, o->name, o->unknown_global);
    }
    if (in->contradiction != NULL)
        ckpt_tool_warn(in->tool, "%s", in->contradiction);
    for (size_t i = 0; i < in->model.n_notes; i++)
        ckpt_tool_warn(in->tool, "%s: %s", in->src.path, in->model.notes[i]);
}

static ckpt_status print_text(inspection *in, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_tool_warnings(in->tool, &in->src);
    print_flags(in);
    print_summary(in);
    if (in->opts->tree) {
        print_tree(in);
    } else if (in->n_selected > 0) {
        putchar('\n');
        CKPT_CHECK(print_table(in, err));
    }
    if (in->stats != NULL)
        print_stats(in);
    if (in->opts->head > 0)
        CKPT_CHECK(print_heads(in, err));
    if (in->n_selected > 0) {
        ckpt_inspect_print_groups(in->tool, "DTYPE", &in->stored_dtypes);
        ckpt_inspect_print_groups(in->tool, "MODULE", &in->modules);
    }
    if (in->model.layout != NULL)
        CKPT_CHECK(print_json_block(in, "configuration", in->model.config, err));
    if (in->opts->common)
        CKPT_CHECK(print_common(in, err));
done:
    return status;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static ckpt_status json_values(inspection *in, size_t tensor, ckpt_jw *w, ckpt_err *err)
{
    if (in->stats != NULL && has_stats(in->model.tensors[tensor].dtype)) {
        const ckpt_stats *s = &in->stats[tensor];
        ckpt_jw_open(w, "stats", '{');
        if (s->finite > 0) {
            ckpt_jw_real(w, "min", s->min);
            ckpt_jw_real(w, "max", s->max);
            ckpt_jw_real(w, "mean", s->mean);
            ckpt_jw_real(w, "std", ckpt_stats_std(s));
        }
        ckpt_jw_int(w, "nan", s->nan);
        ckpt_jw_int(w, "inf", s->inf);
        ckpt_jw_int(w, "zero", s->zero);
        ckpt_jw_close(w, '}');
    }
    if (in->opts->head > 0) {
        double *values = NULL;
        size_t n = 0;
        ckpt_status status = head_values(in, tensor, &values, &n, err);
        if (status != CKPT_OK)
            return status;
        ckpt_jw_open(w, "head", '[');
        for (size_t k = 0; k < n; k++)
            ckpt_jw_real(w, NULL, values[k]);
        ckpt_jw_close(w, ']');
    }
    return CKPT_OK;
}

/* Of a quantised weight, whose dtype, shape and bytes are those of the BF16 it stands for where it is packed. */
static void json_stored(inspection *in, size_t i, ckpt_jw *w)
{
    const char *format = format_of(in, i);
    const ckpt_tensor *t = &in->held[i];
    if (format == NULL)
        return;
    ckpt_jw_open(w, "stored", '{');
    ckpt_jw_string(w, "format", format);
    ckpt_jw_string(w, "dtype", ckpt_dtype_get(t->dtype)->name);
    ckpt_jw_dims(w, "shape", t->rank, t->dims);
    ckpt_jw_u64(w, "bytes", ckpt_inspect_bytes(t));
    ckpt_jw_close(w, '}');
}

static ckpt_status json_tensor(inspection *in, size_t i, ckpt_jw *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_tensor *t = &in->src.tensors[i];
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "name", t->name);
    ckpt_jw_string(w, "dtype", ckpt_dtype_get(t->dtype)->name);
    ckpt_jw_dims(w, "shape", t->rank, t->dims);
    if (ckpt_tool_packed(t->dtype))
        ckpt_jw_bool(w, "packed", true);
    ckpt_jw_u64(w, "shards", t->n_chunks);
    ckpt_jw_u64(w, "bytes", ckpt_inspect_bytes(t));
    json_stored(in, i, w);
    ckpt_jw_string(w, "file", t->n_chunks > 0 ? in->src.files[t->chunks[0].file].name : NULL);
    ckpt_jw_open(w, "canonical", '[');
    for (uint32_t k = in->first[i]; k < in->first[i + 1]; k++) {
        const ckpt_canon *c = &in->model.tensors[in->order[k]];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", c->name);
        ckpt_jw_dims(w, "shape", c->rank, c->dims);
        if (c->extra && in->model.layout != NULL)
            ckpt_jw_bool(w, "extra", true);
        CKPT_CHECK(json_values(in, in->order[k], w, err));
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_close(w, '}');
done:
    return status;
}

static void json_objects(const ckpt_source *src, ckpt_jw *w)
{
    ckpt_jw_open(w, "objects", '[');
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", o->name);
        ckpt_jw_u64(w, "bytes", o->length);
        ckpt_jw_string(w, "file", src->files[o->file].name);
        ckpt_jw_string(w, "text", o->text);
        ckpt_jw_string(w, "unknown_global", o->unknown_global);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static ckpt_status write_json(inspection *in, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_jw *w = &in->tool->json;
    const ckpt_model *m = &in->model;
    ckpt_jw_string(w, "container", in->src.container->name);
    ckpt_jw_string(w, "layout", m->layout != NULL ? m->layout->name : NULL);
    ckpt_jw_string(w, "family", m->layout != NULL ? m->layout->family : NULL);
    ckpt_jw_string(w, "choices", m->tags);
    ckpt_tool_json_mesh(w, &m->mesh);
    if (in->src.iteration >= 0)
        ckpt_jw_int(w, "iteration", in->src.iteration);
    else
        ckpt_jw_string(w, "iteration", NULL);
    ckpt_jw_u64(w, "parameters", in->parameters);
    ckpt_jw_u64(w, "bytes", in->bytes);
    ckpt_jw_u64(w, "stored_bytes", in->stored_bytes);
    ckpt_jw_open(w, "tensors", '[');
    for (size_t i = 0; i < in->src.n_tensors; i++)
        if (in->stored[i])
            CKPT_CHECK(json_tensor(in, i, w, err));
    ckpt_jw_close(w, ']');
    ckpt_jw_open(w, "totals", '{');
    ckpt_inspect_json_groups(w, "dtype", &in->dtypes);
    ckpt_inspect_json_groups(w, "stored_dtype", &in->stored_dtypes);
    ckpt_inspect_json_groups(w, "module", &in->modules);
    ckpt_jw_close(w, '}');
    ckpt_jw_json(w, "config", m->layout != NULL ? m->config : NULL);
    ckpt_jw_json(w, "stored_config", in->src.config);
    json_objects(&in->src, w);
    if (in->opts->common) {
        ckpt_jw_json(w, "common", in->src.common);
        ckpt_jw_json(w, "metadata", in->src.metadata);
    }
    ckpt_jw_open(w, "warnings", '[');
    for (size_t i = 0; i < in->src.n_warnings; i++)
        ckpt_jw_string(w, NULL, in->src.warnings[i]);
    if (in->unmatched != NULL)
        ckpt_jw_string(w, NULL, in->unmatched);
    ckpt_jw_close(w, ']');
    ckpt_jw_lines(w, "notes", m->notes, m->n_notes);
    if (in->contradiction != NULL)
        ckpt_jw_string(w, "contradiction", in->contradiction);
    if (w->buf.failed)
        status = ckpt_tool_no_memory(err);
done:
    return status;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* A checkpoint that contradicts its own model is still worth looking at: as plain tensors. */
static ckpt_status bind(inspection *in, ckpt_err *err)
{
    ckpt_model_opts opts = {.lenient = true, .allow_unknown = true, .keep_buckets = true};
    ckpt_status status = ckpt_tool_bind(in->tool, &in->model, &in->src, &opts, err);
    if (status != CKPT_E_FORMAT && status != CKPT_E_UNSUPPORTED && status != CKPT_E_MISMATCH)
        return status;
    in->contradiction = ckpt_arena_strdup(&in->tool->arena, err->text);
    *err = (ckpt_err){0};
    opts.layout_group = "";
    return ckpt_tool_bind(in->tool, &in->model, &in->src, &opts, err);
}

static const char *no_iteration(const void *context)
{
    const inspection *in = context;
    return ckpt_no_iteration(&in->src, in->opts->iteration);
}

static const char *no_tree(const void *context)
{
    const inspection *in = context;
    return in->tool->g.json ? "--json lists tensors by name" : NULL;
}

static ckpt_status inspect(inspection *in, ckpt_err *err)
{
    static const ckpt_effect effects[] = {
        {"iteration", no_iteration},
        {"tree",      no_tree     },
        {NULL,        NULL        },
    };
    ckpt_status status;
    const ckpt_strings *operands = &in->tool->operands;
    CKPT_CHECK(ckpt_tool_open(in->tool, &in->src, operands->items[0], in->opts->iteration, err));
    CKPT_CHECK(ckpt_tool_effects(in->tool, effects, in, err));
    CKPT_CHECK(bind(in, err));
    CKPT_CHECK(link_canon(in, err));
    CKPT_CHECK(ckpt_inspect_stored(&in->tool->arena, &in->src, &in->held, err));
    select_tensors(in, operands->n > 1 ? operands->items[1] : NULL);
    CKPT_CHECK(total(in, err));
    if (in->opts->stats)
        CKPT_CHECK(compute_stats(in, err));
    if (in->tool->g.json)
        status = write_json(in, err);
    else if (!in->tool->g.quiet)
        status = print_text(in, err);
    if (status == CKPT_OK && in->opts->flops > 0)
        status = ckpt_inspect_flops(in->tool, &in->model, in->opts->flops, err);
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    inspection in = {.tool = tool, .opts = opts};
    tool->tells_manifest = true;
    ckpt_status status = inspect(&in, err);
    free(in.dtypes.items);
    free(in.stored_dtypes.items);
    free(in.modules.items);
    ckpt_model_release(&in.model);
    ckpt_source_close(&in.src);
    return status;
}

static void defaults(void *opts)
{
    ((inspect_opts *)opts)->iteration = -1;
}

const ckpt_command ckpt_cmd_inspect = {
    .name = "inspect",
    .synopsis = "PATH [TENSOR-GLOB]",
    .what = "show container, layout, tensors, totals and configuration",
    .opts = rows,
    .opts_size = sizeof(inspect_opts),
    .min_operands = 1,
    .max_operands = 2,
    .only_reads = ckpt_tool_only_reads,
    .defaults = defaults,
    .run = run,
    .notes = "The glob is matched against stored and canonical names. --verbose lists the\n"
             "canonical tensors that each stored tensor holds. Quantised weights are shown as\n"
             "they are stored, beside what other commands read of them (in --json: 'stored').\n",
    .examples = "  ckpt inspect run/ 'blocks.0.*' --stats\n",
};
