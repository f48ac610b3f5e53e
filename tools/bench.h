/* Parts of `ckpt bench`: running programs with a clock, and what one thread of this machine does. */
#ifndef CKPT_BENCH_H
#define CKPT_BENCH_H

#include "tool.h"

/* One run of a program. */
typedef struct bench_run {
    double seconds, cpu; /* elapsed; of processors, user and system */
    uint64_t peak; /* resident memory, bytes: this program's own when it started it, at least */
} bench_run;

/* Median, smallest and largest of several; cpu and peak: the largest. */
typedef struct bench_stat {
    double median, min, max, cpu;
    uint64_t peak;
} bench_stat;

/* Run argv (NULL-terminated, found along PATH) to its end; "ckpt" is this program. Its output is
 * dropped, the first line it complains goes into the error. errors: a file for that.
 * Errors: CKPT_E_IO it cannot be started, CKPT_E_MISMATCH it does not exit with 0. */
ckpt_status bench_child(const char *const *argv, const char *errors, bench_run *out,
                        ckpt_err *err) CKPT_MUST_USE;
bool bench_has_program(const char *name);
/* n >= 1 runs, which are reordered. */
bench_stat bench_median(bench_run *runs, size_t n);

/* A rate of one thread. */
typedef struct bench_rate {
    const char *name, *what;
    double gbs; /* GB/s of payload */
} bench_rate;
enum { BENCH_RATES = 6 };
/* file: read for the rate of reading it; scratch: written and removed. The first rate is memcpy's.
 * Errors: CKPT_E_NOMEM, CKPT_E_IO. */
ckpt_status bench_machine(const char *file, const char *scratch, bench_rate out[BENCH_RATES],
                          ckpt_err *err) CKPT_MUST_USE;

/* A safetensors file of about `size` bytes at path: bf16 tensors of a published expert's shape,
 * 1024 x 2304, with values of a fixed seed. */
ckpt_status bench_source(const char *path, uint64_t size, ckpt_err *err) CKPT_MUST_USE;

#endif
