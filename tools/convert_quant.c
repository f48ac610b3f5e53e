/* What quantising cost: the worst, a line for each class of tensors, which share a name but for its numbers, and
 * tensor by tensor. */
#include "convert.h"

#include <stdio.h>
#include <string.h>

#define MAX_CLASSES 24 /* shown; the rest with --verbose */

typedef struct class
{
    const char *name; /* model.layers.*.mlp.experts.*.up_proj.weight */
    size_t n;
    double least, most; /* relative RMS */
    double max_abs;
    uint64_t saturated;
} class;

typedef struct classes {
    class *items; /* in the order of their first tensors */
    size_t n;
} classes;

/* The name with * for every part that is a number. */
static const char *class_of(ckpt_arena *arena, const char *name)
{
    char *out = ckpt_arena_strdup(arena, name);
    size_t at = 0;
    for (const char *part = name; out != NULL; part++) {
        const size_t n = strcspn(part, ".");
        const bool number = n > 0 && strspn(part, "0123456789") == n;
        memcpy(out + at, number ? "*" : part, number ? 1 : n);
        at += number ? 1 : n;
        part += n;
        out[at++] = *part;
        if (*part == '\0')
            break;
    }
    return out;
}

/* false: no memory. */
static bool find_classes(ckpt_arena *arena, const ckpt_wquant *q, classes *c)
{
    *c = (classes){.items = ckpt_arena_array(arena, q->n + 1, sizeof *c->items)};
    for (size_t i = 0; i < q->n && c->items != NULL; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        const char *name = class_of(arena, t->name);
        size_t k = 0;
        if (name == NULL)
            return false;
        while (k < c->n && strcmp(c->items[k].name, name) != 0)
            k++;
        class *at = &c->items[k];
        if (k == c->n)
            c->items[c->n++] = (class){.name = name, .least = t->rel_rms};
        at->n++;
        at->least = t->rel_rms < at->least ? t->rel_rms : at->least;
        at->most = t->rel_rms > at->most ? t->rel_rms : at->most;
        at->max_abs = t->max_abs > at->max_abs ? t->max_abs : at->max_abs;
        at->saturated += t->saturated;
    }
    return c->items != NULL;
}

/* Bytes of whole parts that all names begin with, the last dot included. */
static size_t common_parts(const classes *c)
{
    const char *first = c->n > 1 ? c->items[0].name : "";
    size_t shared = strlen(first), dot = 0;
    for (size_t i = 1; i < c->n; i++) {
        size_t n = 0;
        while (n < shared && c->items[i].name[n] == first[n])
            n++;
        shared = n;
    }
    for (size_t i = 0; i < shared; i++)
        dot = first[i] == '.' ? i + 1 : dot;
    return dot;
}

static void print_classes(ckpt_tool *tool, const classes *c)
{
    static const char *const header[] = {"TENSORS", "RELATIVE RMS", "MAX ABS", "SATURATED"};
    const size_t shown = tool->g.verbose || c->n <= MAX_CLASSES ? c->n : MAX_CLASSES;
    const size_t skip = common_parts(c);
    ckpt_arena *arena = &tool->arena;
    ckpt_table table = {.align = "lrrrr"};
    const char *in = skip > 0 ? ckpt_arena_strndup(arena, c->items[0].name, skip - 1) : NULL;
    if (in != NULL)
        in = ckpt_arena_printf(arena, "CLASS IN %s", ckpt_clean(arena, in));
    ckpt_table_cell(&table, in != NULL ? in : "CLASS");
    for (size_t i = 0; i < sizeof header / sizeof *header; i++)
        ckpt_table_cell(&table, header[i]);
    for (size_t i = 0; i < shown; i++) {
        const class *k = &c->items[i];
        const char *rms = k->least == k->most
                              ? ckpt_arena_printf(arena, "%.3g", k->most)
                              : ckpt_arena_printf(arena, "%.3g to %.3g", k->least, k->most);
        const char *abs = ckpt_arena_printf(arena, "%.3g", k->max_abs);
        ckpt_table_cell(&table, ckpt_clean(arena, k->name + skip));
        ckpt_table_cell(&table, ckpt_count(arena, k->n));
        ckpt_table_cell(&table, rms != NULL ? rms : "?");
        ckpt_table_cell(&table, abs != NULL ? abs : "?");
        ckpt_table_cell(&table, ckpt_count(arena, k->saturated));
    }
    ckpt_table_print(&table, stdout, 0, true, tool->color);
    ckpt_table_release(&table);
    if (shown < c->n)
        printf("%zu more classes with --verbose\n", c->n - shown);
}

typedef struct worst {
    const ckpt_wquant_tensor *rms, *abs;
    uint64_t saturated;
} worst;

static worst find_worst(const ckpt_wquant *q)
{
    worst w = {.rms = q->tensors, .abs = q->tensors};
    for (size_t i = 0; i < q->n; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        w.rms = t->rel_rms > w.rms->rel_rms ? t : w.rms;
        w.abs = t->max_abs > w.abs->max_abs ? t : w.abs;
        w.saturated += t->saturated;
    }
    return w;
}

void ckpt_convert_quantised(ckpt_tool *tool, const ckpt_wquant *q)
{
    worst w = find_worst(q);
    classes c;
    printf("%zu projection%s in %s, %zu matri%s kept; worst relative RMS error %.3g (%s), largest "
           "error %.3g (%s), %llu value%s saturated\n",
           q->n, ckpt_tool_plural(q->n), ckpt_wquant_name(q->kind), q->n_skipped,
           q->n_skipped == 1 ? "x" : "ces", w.rms->rel_rms, w.rms->name, w.abs->max_abs,
           w.abs->name, (unsigned long long)w.saturated, ckpt_tool_plural(w.saturated));
    if (find_classes(&tool->arena, q, &c))
        print_classes(tool, &c);
    for (size_t i = 0; i < q->n && tool->g.verbose; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        printf("  %-60s relative RMS %.3e  max abs %.3e  saturated %llu\n", t->name, t->rel_rms,
               t->max_abs, (unsigned long long)t->saturated);
    }
}

static void json_classes(ckpt_jw *w, const classes *c)
{
    ckpt_jw_open(w, "classes", '[');
    for (size_t i = 0; i < c->n; i++) {
        const class *k = &c->items[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", k->name);
        ckpt_jw_u64(w, "tensors", k->n);
        ckpt_jw_real(w, "least_rel_rms", k->least);
        ckpt_jw_real(w, "worst_rel_rms", k->most);
        ckpt_jw_real(w, "max_abs", k->max_abs);
        ckpt_jw_u64(w, "saturated", k->saturated);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

void ckpt_convert_quantised_json(ckpt_tool *tool, const ckpt_wquant *q)
{
    ckpt_jw *w = &tool->json;
    classes c;
    ckpt_jw_open(w, "quantised", '{');
    ckpt_jw_string(w, "format", ckpt_wquant_name(q->kind));
    ckpt_jw_lines(w, "kept", q->skipped, q->n_skipped);
    if (find_classes(&tool->arena, q, &c))
        json_classes(w, &c);
    ckpt_jw_open(w, "tensors", '[');
    for (size_t i = 0; i < q->n; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", t->name);
        ckpt_jw_real(w, "rel_rms", t->rel_rms);
        ckpt_jw_real(w, "max_abs", t->max_abs);
        ckpt_jw_u64(w, "saturated", t->saturated);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_close(w, '}');
}
