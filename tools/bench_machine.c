/* What this machine does per second: the denominators of ratios that hold on other machines too. */
#include "bench.h"

#include <stdio.h>
#include <string.h>

enum { RUNS = 3 };

/* An operation and its words, "{dir}" and "{src}" among them, and what it does in the unit's 10^9;
 * 0: as many bytes as the source has. */
typedef struct row {
    const char *name, *what, *unit, *words[4];
    double work;
} row;

/* clang-format off */
static const row rows[] = {
    {"memcpy",       "from and to memory, one thread",             "GB/s",    {"@memcpy", "64MiB"},                  0.067108864},
    {"sha256",       "one stream, as a file's digest",             "GB/s",    {"@sha256", "64MiB"},                  0.067108864},
    {"leaves",       "sixteen streams, as tensors'",               "GB/s",    {"@leaves", "64MiB"},                  0.067108864},
    {"cast",         "f32 to bf16, bytes of f32, one thread",      "GB/s",    {"@cast", "64MiB"},                    0.067108864},
    {"gather",       "pieces of 1152 bytes of cached files, one thread", "GB/s", {"@gather", "{dir}", "1152", "64MiB"}, 0.067108864},
    {"read",         "a cached file",                              "GB/s",    {"@read", "{src}"},                    0},
    {"write",        "32 MiB written and synced",                  "GB/s",    {"@write", "{dir}", "32MiB"},          0.033554432},
    {"direct read",  "a file past the page cache",                 "GB/s",    {"@direct-read", "{src}"},             0},
    {"direct write", "64 MiB past the page cache, synced",         "GB/s",    {"@direct-write", "{dir}", "64MiB"},   0.067108864},
    {"FMA, one",     "f32 multiply and add in registers",          "GFLOP/s", {"@fma", "10000000000", "1"},          10},
    {"FMA, all",     "the same on all threads",                    "GFLOP/s", {"@fma", "10000000000", "all"},        10},
};
/* clang-format on */
enum { ROWS = sizeof rows / sizeof *rows };

static ckpt_status measure(bench *b, const row *r, const char *src, double *value, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *words[5] = {NULL};
    bench_run runs[RUNS];
    uint64_t size = 0;
    for (int i = 0; i < 4 && r->words[i] != NULL; i++)
        words[i] = strcmp(r->words[i], "{dir}") == 0   ? b->dir
                   : strcmp(r->words[i], "{src}") == 0 ? src
                                                       : r->words[i];
    CKPT_CHECK(bench_amount(src, &size, err));
    for (int i = 0; i < RUNS; i++)
        CKPT_CHECK(bench_child(words, b->errors, &runs[i], err));
    const double work = r->work > 0 ? r->work : (double)size / 1e9;
    *value = work / bench_median(runs, RUNS).median;
done:
    return status;
}

static bool wanted(const bench *b, const row *r)
{
    char name[64];
    (void)snprintf(name, sizeof name, "machine: %s", r->name);
    return b->only.n == 0 || ckpt_glob_any(&b->only, name);
}

bool bench_machine_wanted(const bench *b)
{
    for (int i = 0; i < ROWS; i++)
        if (wanted(b, &rows[i]))
            return true;
    return false;
}

ckpt_status bench_machine(bench *b, ckpt_err *err)
{
    ckpt_status status;
    const bench_case source = {
        .subject = (const char *const[]){bench_source_path(b, 0), NULL}
    };
    bench_rate *rates = ckpt_arena_array(&b->tool->arena, ROWS, sizeof *rates);
    if (rates == NULL || source.subject[0] == NULL)
        return ckpt_tool_no_memory(err);
    b->rates = rates;
    b->n_rates = 0;
    if (bench_machine_wanted(b))
        CKPT_CHECK(bench_make_sources(b, &source, err));
    for (int i = 0; i < ROWS; i++) {
        ckpt_err why = {0};
        if (!wanted(b, &rows[i]))
            continue;
        bench_rate *r = &rates[b->n_rates];
        *r = (bench_rate){rows[i].name, rows[i].what, rows[i].unit, 0};
        status = measure(b, &rows[i], source.subject[0], &r->value, &why);
        if (status == CKPT_OK)
            b->n_rates++;
        else if (status != CKPT_E_UNSUPPORTED)
            return ckpt_fail(err, status, "%s: %s", rows[i].name, why.text);
        else
            ckpt_tool_warn(b->tool, "%s: %s", rows[i].name, why.text);
    }
    status = CKPT_OK;
done:
    return status;
}
