/* What `ckpt bench` found: the table, and the members of its document and history. */
#include "bench.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MIB 1048576.0

static double memory_ratio(const bench_case *c)
{
    return c->own.peak > 0 ? (double)c->other.peak / (double)c->own.peak : 0;
}

bool bench_memory_fits(const bench_case *c)
{
    return (c->memory <= 0 || memory_ratio(c) >= c->memory) &&
           (c->limit <= 0 || (double)c->own.peak <= c->limit * MIB);
}

static void show_runs(const char *name, const bench_stat *s)
{
    const bool brief = s->median < 0.1;
    const double unit = brief ? 1e3 : 1;
    printf("    %-50s %9.3f %-2s (%.3f..%.3f)  %.2f s of processors, %.0f MiB", name,
           unit * s->median, brief ? "ms" : "s", unit * s->min, unit * s->max, s->cpu,
           (double)s->peak / MIB);
    printf("%s%s\n", s->note[0] != '\0' ? ", " : "", s->note);
}

void bench_show_case(const bench *b, const bench_case *c)
{
    if (!ckpt_tool_text(b->tool))
        return;
    if (c->skipped != NULL) {
        printf("%-54s skipped, %s\n", c->name, c->skipped);
        return;
    }
    printf("%-54s ratio %.2f", c->name, c->ratio);
    if (c->target > 0)
        printf(", aimed at %g%s", c->target, c->ratio < c->target ? ": below" : "");
    if (c->memory > 0)
        printf("; memory ratio %.1f, aimed at %g%s", memory_ratio(c), c->memory,
               memory_ratio(c) < c->memory ? ": below" : "");
    if (c->limit > 0 && !bench_memory_fits(c))
        printf("; memory above %g MiB", c->limit);
    putchar('\n');
    show_runs("ckpt", &c->own);
    show_runs(c->beside, &c->other);
}

/* memcpy's rate, the first if it was wanted; 0: unknown. */
static double of_memcpy(const bench *b, const bench_rate *r)
{
    const bool known = b->n_rates > 0 && strcmp(b->rates[0].name, "memcpy") == 0;
    return known && strcmp(r->unit, "GB/s") == 0 ? r->value / b->rates[0].value : 0;
}

void bench_show_machine(const bench *b)
{
    if (!ckpt_tool_text(b->tool))
        return;
    for (size_t i = 0; i < b->n_rates; i++) {
        const bench_rate *r = &b->rates[i];
        printf("machine: %-14s %8.2f %s", r->name, r->value, r->unit);
        if (of_memcpy(b, r) > 0)
            printf(", %.2f of memcpy", of_memcpy(b, r));
        printf(" (%s)\n", r->what);
    }
}

void bench_show_summary(const bench *b)
{
    size_t aimed = 0, reached = 0, skipped = 0;
    for (size_t i = 0; i < b->n; i++) {
        const bench_case *c = &b->cases[i];
        skipped += c->skipped != NULL;
        if (c->skipped != NULL || (c->target <= 0 && c->memory <= 0 && c->limit <= 0))
            continue;
        aimed++;
        reached += c->ratio >= c->target && bench_memory_fits(c);
    }
    if (ckpt_tool_text(b->tool))
        printf("%zu cases: %zu of the %zu with aims reach them, %zu skipped\n", b->n, reached,
               aimed, skipped);
}

static void write_stat(ckpt_jw *w, const char *key, const bench_stat *s)
{
    ckpt_jw_open(w, key, '{');
    ckpt_jw_real(w, "median", s->median);
    ckpt_jw_real(w, "min", s->min);
    ckpt_jw_real(w, "max", s->max);
    ckpt_jw_real(w, "cpu", s->cpu);
    ckpt_jw_u64(w, "peak_memory", s->peak);
    if (s->note[0] != '\0')
        ckpt_jw_string(w, "note", s->note);
    ckpt_jw_close(w, '}');
}

static void write_case(ckpt_jw *w, const bench_case *c)
{
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "name", c->name);
    ckpt_jw_string(w, "beside", c->beside);
    ckpt_jw_string(w, "skipped", c->skipped);
    if (c->skipped == NULL) {
        ckpt_jw_real(w, "ratio", c->ratio);
        ckpt_jw_real(w, "target", c->target);
        ckpt_jw_real(w, "memory_ratio", memory_ratio(c));
        if (c->memory > 0)
            ckpt_jw_real(w, "memory_target", c->memory);
        if (c->limit > 0)
            ckpt_jw_real(w, "memory_limit_mib", c->limit);
        ckpt_jw_bool(w, "cold", c->cold);
        write_stat(w, "subject", &c->own);
        write_stat(w, "baseline", &c->other);
    }
    ckpt_jw_close(w, '}');
}

void bench_json(const bench *b, ckpt_jw *w)
{
    ckpt_jw_string(w, "date", b->started);
    ckpt_jw_u64(w, "size", b->size);
    ckpt_jw_int(w, "pairs", b->pairs);
    ckpt_jw_int(w, "processors", sysconf(_SC_NPROCESSORS_ONLN));
    ckpt_jw_open(w, "machine", '[');
    for (size_t i = 0; i < b->n_rates; i++) {
        const bench_rate *r = &b->rates[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", r->name);
        ckpt_jw_string(w, "what", r->what);
        ckpt_jw_string(w, "unit", r->unit);
        ckpt_jw_real(w, "value", r->value);
        if (of_memcpy(b, r) > 0)
            ckpt_jw_real(w, "of_memcpy", of_memcpy(b, r));
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_open(w, "cases", '[');
    for (size_t i = 0; i < b->n; i++)
        write_case(w, &b->cases[i]);
    ckpt_jw_close(w, ']');
}
