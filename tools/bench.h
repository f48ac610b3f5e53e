/* Parts of `ckpt bench`: cases, programs that are run with a clock, and what this machine can do. */
#ifndef CKPT_BENCH_H
#define CKPT_BENCH_H

#include "tool.h"

/* ---- one run ----------------------------------------------------------------------------------- */

/* One run of a program, or of an operation of this one. */
typedef struct bench_run {
    double seconds, cpu; /* elapsed; of processors, user and system */
    uint64_t peak; /* resident memory, bytes: this program's own when it started it, at least */
    char note[96]; /* what an operation says of itself, e.g. a rate */
} bench_run;

/* Median, smallest and largest of several; cpu and peak: the largest; note: the last run's. */
typedef struct bench_stat {
    double median, min, max, cpu;
    uint64_t peak;
    char note[96];
} bench_stat;

/* Run argv (NULL-terminated, found along PATH) to its end; "ckpt" is this program, and a word that
 * begins with '@' one of its operations (bench_op). Its output is dropped, the first line it complains
 * goes into the error. errors: a file for that.
 * Errors: CKPT_E_IO it cannot be started, CKPT_E_MISMATCH it does not exit with 0; of operations
 * CKPT_E_UNSUPPORTED what this machine lacks, CKPT_E_USAGE a word. */
ckpt_status bench_child(const char *const *argv, const char *errors, bench_run *out,
                        ckpt_err *err) CKPT_MUST_USE;
bool bench_has_program(const char *name);
/* n >= 1 runs, which are reordered. */
bench_stat bench_median(bench_run *runs, size_t n);

/* An operation: words[0] is its name, n words in all. out->seconds and out->note are its own to fill.
 * It runs in a process of its own: it may leave memory and threads behind. */
typedef ckpt_status bench_op_fn(const char *const *words, size_t n, bench_run *out, ckpt_err *err);
typedef struct bench_op {
    const char *name; /* with its '@' */
    size_t words;     /* it takes, itself included */
    bench_op_fn *run;
} bench_op;
extern const bench_op bench_memory_ops[], bench_disk_ops[],
    bench_engine_ops[]; /* end with name NULL */
/* By name, or NULL. */
const bench_op *bench_op_find(const char *name);
/* A count above 0, with the suffixes of a size. Errors: CKPT_E_USAGE. */
ckpt_status bench_amount(const char *word, uint64_t *out, ckpt_err *err) CKPT_MUST_USE;

/* Seconds of the processor for what one thread does, of the clock on the wall for several. */
double bench_clock(int threads);

/* ---- cases ------------------------------------------------------------------------------------- */

typedef struct bench_case {
    const char *name, *beside;
    const char *needs; /* a program without which it is skipped; NULL: the baseline's */
    const char *const *subject, *const *baseline, *const *prepare, *const *check, *const *probe;
    double target; /* ratio that is aimed at; 0: none */
    double memory; /* the same of peak memory, baseline's to subject's */
    double limit;  /* MiB of peak memory that the subject may take; 0: not judged */
    bool cold;     /* what it reads is dropped from the page cache before every run */
    /* found */
    double ratio;
    bench_stat own, other;
    const char *skipped; /* why, or NULL */
} bench_case;

/* Those that need no other language; n of them. */
extern const bench_case bench_cases[];
extern const size_t bench_n_cases;

typedef struct bench_rate bench_rate;
typedef struct bench {
    ckpt_tool *tool;
    uint64_t size;
    int64_t pairs;
    ckpt_strings only;
    const char *dir, *out, *errors, *started;
    const char *here; /* directory of the case file */
    bench_case *cases;
    size_t n, cap;
    bool made[8]; /* sources, by their place in bench_sources */
    const bench_rate *rates;
    size_t n_rates;
    ckpt_strings worse;
} bench;

/* bench_cases.c: append the cases whose names are wanted, their words filled in. here: directory of
 * the file that text is from. Errors: CKPT_E_FORMAT, CKPT_E_NOMEM. */
ckpt_status bench_add_own(bench *b, ckpt_err *err) CKPT_MUST_USE;
ckpt_status bench_add_file(bench *b, const char *text, size_t n, ckpt_err *err) CKPT_MUST_USE;
/* Path of source i; NULL: no memory. */
const char *bench_source_path(bench *b, size_t i);
/* Make the sources that a case's words name and that are not there yet. */
ckpt_status bench_make_sources(bench *b, const bench_case *c, ckpt_err *err) CKPT_MUST_USE;
/* Run a case: see cmd_bench.c. */
ckpt_status bench_run_case(bench *b, bench_case *c, ckpt_err *err) CKPT_MUST_USE;

/* ---- what the words name ----------------------------------------------------------------------- */

typedef struct bench_source {
    const char *word, *file; /* placeholder; name below the directory */
    ckpt_dtype dtype;
    int64_t rows, columns; /* of a tensor */
    uint64_t divide;       /* --size by this; 0: one tensor */
} bench_source;
enum { BENCH_SOURCES = 5 };
extern const bench_source bench_sources[BENCH_SOURCES];
/* Bytes of a source where --size is `size`. */
uint64_t bench_source_size(const bench_source *s, uint64_t size);
/* A safetensors file of about `size` bytes at path: tensors of the shape of s, values of a fixed seed. */
ckpt_status bench_write_source(const bench_source *s, const char *path, uint64_t size,
                               ckpt_err *err) CKPT_MUST_USE;

/* Drop every regular file at and below path from the page cache, synced before. *kept: the largest share
 * of one of 1 MiB or more that stayed, 0 to 1. Errors: CKPT_E_IO. */
ckpt_status bench_drop_cache(const char *path, double *kept, ckpt_err *err) CKPT_MUST_USE;

/* ---- the machine ------------------------------------------------------------------------------- */

struct bench_rate {
    const char *name, *what, *unit; /* unit: "GB/s" of payload, or "GFLOP/s" */
    double value;
};
/* Fill b->rates with those that are wanted under the name "machine: NAME" and that this machine can
 * show. Errors: CKPT_E_NOMEM, CKPT_E_IO. */
ckpt_status bench_machine(bench *b, ckpt_err *err) CKPT_MUST_USE;
bool bench_machine_wanted(const bench *b);

/* ---- bench_show.c ------------------------------------------------------------------------------ */

void bench_show_case(const bench *b, const bench_case *c);
void bench_show_machine(const bench *b);
/* How many cases reached what they aim at. */
void bench_show_summary(const bench *b);
/* Members of an open object. */
void bench_json(const bench *b, ckpt_jw *w);
/* Is the memory of a case as it is aimed at? */
bool bench_memory_fits(const bench_case *c);

#endif
