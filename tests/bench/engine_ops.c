/* Times of engine operations on this machine, f32.
 *
 *   engine_ops [--threads N] [--repeat N] [--tokens T] [--heads H] [--dim D] [--cpu 1]
 *
 * --cpu 1 counts processor time instead of the clock's: with one thread, on a machine that is busy.
 * Prints one line an operation: best and median milliseconds, and for projections the share of what
 * one plain sgemm call of the same shape reaches. tests/bench/kda_op.py is the same operator in PyTorch. */
#define CKPT_REAL 32
#include "ops.h"
#include "train/optim.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct bench {
    ckpt_eng e;
    ckpt_err err;
    int repeat;
    clockid_t clock;
    int64_t T, H, D;
} bench;

static double now(const bench *b)
{
    struct timespec t;
    clock_gettime(b->clock, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static float *numbers(int64_t n, float lo, float hi)
{
    static uint64_t state = 1;
    float *p = malloc(sizeof *p * (size_t)n);
    if (!p)
        exit(5);
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        p[i] = lo + (hi - lo) * (float)((double)(state >> 11) / (double)(1ull << 53));
    }
    return p;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Best of `repeat` runs, after one that is not counted. */
static double report(const char *name, bench *b, ckpt_status (*fn)(bench *, void *), void *arg)
{
    double *times = calloc((size_t)b->repeat, sizeof *times);
    if (!times || fn(b, arg) != CKPT_OK) {
        fprintf(stderr, "engine_ops: %s: %s\n", name, b->err.text);
        exit(1);
    }
    for (int i = 0; i < b->repeat; i++) {
        double start = now(b);
        (void)!fn(b, arg);
        times[i] = now(b) - start;
    }
    qsort(times, (size_t)b->repeat, sizeof *times, by_value);
    double best = times[0];
    printf("%-28s best %9.3f ms  median %9.3f ms\n", name, best, times[b->repeat / 2]);
    free(times);
    return best;
}

/* ---- recurrence ----------------------------------------------------------------------------- */

typedef struct kda {
    ckpt_eng_delta d;
    ckpt_eng_seq seq;
    ENG(delta_in) in;
    ENG(delta_grad) g;
    float *o, *saved, *d_o;
} kda;

static ckpt_status forward(bench *b, void *arg)
{
    kda *k = arg;
    return ENG(delta)(&b->e, &k->d, &k->seq, &k->in, k->o, NULL, k->saved, &b->err);
}

static ckpt_status backward(bench *b, void *arg)
{
    kda *k = arg;
    return ENG(delta_bwd)(&b->e, &k->d, &k->seq, &k->in, k->saved, k->d_o, NULL, &k->g, &b->err);
}

static void bench_kda(bench *b)
{
    const int64_t n = b->T * b->H * b->D, cu[] = {0, b->T};
    kda k = {
        .d = {.rule = CKPT_ENG_KDA, .H = b->H, .HV = b->H, .K = b->D, .V = b->D},
          .seq = {1,           cu          }
    };
    const float unit = 1.7f / (float)b->D;
    k.in = (ENG(delta_in)){.q = numbers(n, -unit, unit),
                           .k = numbers(n, -unit, unit),
                           .v = numbers(n, -1, 1),
                           .g = numbers(n, -1, 0),
                           .erase = numbers(b->T * b->H, 0, 1)};
    k.g = (ENG(delta_grad)){.q = numbers(n, 0, 0),
                            .k = numbers(n, 0, 0),
                            .v = numbers(n, 0, 0),
                            .g = numbers(n, 0, 0),
                            .erase = numbers(b->T * b->H, 0, 0)};
    k.o = numbers(n, 0, 0);
    k.d_o = numbers(n, -1, 1);
    k.saved = numbers(ENG(delta_saved_len)(&k.d, &k.seq), 0, 0);
    static const char *const names[] = {"chunk", "step"};
    for (int form = 0; form < 2; form++) {
        char name[64];
        k.d.form = (ckpt_eng_form)form;
        snprintf(name, sizeof name, "kda %s forward", names[form]);
        report(name, b, forward, &k);
        snprintf(name, sizeof name, "kda %s backward", names[form]);
        report(name, b, backward, &k);
    }
}

/* ---- projections ---------------------------------------------------------------------------- */

typedef struct gemm {
    int64_t m, n, k;
    float *x, *w, *y;
} gemm;

static ckpt_status plain(bench *b, void *arg)
{
    gemm *g = arg;
    (void)b;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)g->m, (int)g->n, (int)g->k, 1, g->x,
                (int)g->k, g->w, (int)g->k, 0, g->y, (int)g->n);
    return CKPT_OK;
}

static ckpt_status engine_linear(bench *b, void *arg)
{
    gemm *g = arg;
    return ENG(linear)(&b->e, g->m, g->k, g->n, g->x, g->k, g->w, NULL, false, g->y, g->n, &b->err);
}

static ckpt_status engine_dx(bench *b, void *arg)
{
    gemm *g = arg;
    return ENG(linear_dx)(&b->e, g->m, g->k, g->n, g->y, g->n, g->w, false, g->x, g->k, &b->err);
}

static ckpt_status engine_dw(bench *b, void *arg)
{
    gemm *g = arg;
    return ENG(linear_dw)(&b->e, g->m, g->k, g->n, g->y, g->n, g->x, g->k, g->w, NULL, &b->err);
}

static void bench_linear(bench *b, int64_t n_in, int64_t n_out)
{
    gemm g = {b->T,
              n_out,
              n_in,
              numbers(b->T * n_in, -1, 1),
              numbers(n_in * n_out, -1, 1),
              numbers(b->T * n_out, -1, 1)};
    char name[64];
    openblas_set_num_threads(b->e.threads);
    snprintf(name, sizeof name, "sgemm %d x %d x %d", (int)g.m, (int)g.n, (int)g.k);
    double peak = report(name, b, plain, &g);
    openblas_set_num_threads(1);
    double own = report("linear", b, engine_linear, &g);
    double dx = report("linear_dx", b, engine_dx, &g), dw = report("linear_dw", b, engine_dw, &g);
    printf("share of sgemm: linear %.2f, dx %.2f, dw %.2f\n", peak / own, peak / dx, peak / dw);
}

/* ---- optimizer ------------------------------------------------------------------------------ */

typedef struct optimizer {
    ckpt_optim o;
    ckpt_optim_slot slot;
    float *w, *m, *v, *g;
    double norm;
} optimizer;

static const ckpt_optim_step one_step = {.lr = 1e-4, .wd = 0.1, .grad_scale = 0.5, .t = 10};

static ckpt_status adamw(bench *b, void *arg)
{
    optimizer *p = arg;
    ckpt_optim_adamw(&b->e, &p->o, &one_step, 0, p->slot.n, p->w, p->m, p->v, p->g);
    return CKPT_OK;
}

static ckpt_status norm(bench *b, void *arg)
{
    optimizer *p = arg;
    return ckpt_optim_norm(&b->e, &p->o, p->g, &p->norm, &b->err);
}

static ckpt_status muon(bench *b, void *arg)
{
    optimizer *p = arg;
    return ckpt_optim_muon(&b->e, &p->o, &one_step, 0, 1, p->w, p->m, p->g, &b->err);
}

/* AdamW reads four arrays and writes three; Newton-Schulz does per iteration two products of r x r x c
 * and one of r x r x r, of which the symmetric ones need half. */
static void bench_optimizer(bench *b, ckpt_optim_kind kind, int64_t rows, int64_t cols)
{
    const int64_t n = rows * cols, dims[] = {rows, cols};
    optimizer p = {
        .o = {.config = ckpt_optim_defaults(kind), .n_slots = 1},
        .w = numbers(n, -1, 1),
        .m = numbers(n, -1, 1)
    };
    p.v = numbers(n, 0, 1);
    p.g = numbers(n, -1, 1);
    p.o.slots = &p.slot;
    ckpt_optim_slot_set(&p.slot, &p.o.config, "blocks.0.mlp.up.weight", 2, dims, 0, false, 0);
    if (kind == CKPT_OPTIM_ADAMW) {
        double ms = report("adamw", b, adamw, &p), all = report("gradient norm", b, norm, &p);
        printf("adamw %.1f GB/s, norm %.1f GB/s (%.0f M elements)\n", 28e-6 * (double)n / ms,
               4e-6 * (double)n / all, 1e-6 * (double)n);
        return;
    }
    const double r = (double)(rows < cols ? rows : cols), c = (double)(rows < cols ? cols : rows);
    double ms = report("muon", b, muon, &p);
    printf("muon %d x %d: %.1f GFLOP/s\n", (int)rows, (int)cols,
           5e-6 * (r * r * c + r * r * r + 2 * r * r * c) / ms);
}

int main(int argc, char **argv)
{
    bench b = {.clock = CLOCK_MONOTONIC, .repeat = 15, .T = 1024, .H = 4, .D = 64};
    int threads = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        long v = strtol(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--threads") == 0)
            threads = (int)v;
        else if (strcmp(argv[i], "--repeat") == 0 && v > 0)
            b.repeat = (int)v;
        else if (strcmp(argv[i], "--tokens") == 0 && v > 0)
            b.T = v;
        else if (strcmp(argv[i], "--heads") == 0 && v > 0)
            b.H = v;
        else if (strcmp(argv[i], "--dim") == 0 && v > 0)
            b.D = v;
        else if (strcmp(argv[i], "--cpu") == 0)
            b.clock = v ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
        else
            return 2;
    }
    ckpt_eng_init(&b.e, threads);
    if (ckpt_eng_reserve(&b.e, (size_t)256 << 20, &b.err) != CKPT_OK)
        return 5;
    printf("threads %d, isa %d, T %d, heads %d x %d\n", b.e.threads, (int)b.e.isa, (int)b.T,
           (int)b.H, (int)b.D);
    bench_kda(&b);
    bench_linear(&b, 512, 1536);
    bench_optimizer(&b, CKPT_OPTIM_ADAMW, 4096, 4096);
    bench_optimizer(&b, CKPT_OPTIM_MUON, 1024, 2048);
    ckpt_eng_release(&b.e);
    return 0;
}
