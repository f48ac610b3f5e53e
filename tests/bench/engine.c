/* Times the engine: what tests/bench/engine.sh sets beside PyTorch.
 *
 *   engbench model DIR TOKENS REPEATS [THREADS]      forward and backward of a checkpoint
 *   engbench kda TOKENS HEADS DIM REPEATS [THREADS]  the KDA recurrence alone
 *   engbench gemm N REPEATS [THREADS]                OpenBLAS against the engine's projections
 *
 * Prints medians in milliseconds. */
#include "network.h"
#include "source.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define MAX_REPEATS 100

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, order);
    return x[n / 2];
}

static void need(ckpt_status status, const ckpt_err *err)
{
    if (status == CKPT_OK)
        return;
    fprintf(stderr, "engbench: %s\n", err->text);
    exit(1);
}

static float *numbers(int64_t n, float scale, float shift)
{
    float *x = malloc((size_t)n * sizeof *x);
    uint64_t s = 1;
    for (int64_t i = 0; i < n; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        x[i] = scale * ((float)(s >> 40) / (float)(1 << 23) - 1) + shift;
    }
    return x;
}

static void bench_model(const char *dir, int64_t T, int repeats, int threads)
{
    ckpt_err err = {0};
    ckpt_source src;
    ckpt_model model;
    ckpt_eng e;
    ENG(network) net;
    ckpt_open_opts open = {.iteration = -1};
    int64_t cu[2] = {0, T};
    ckpt_eng_seq seq = {1, cu};
    int32_t *ids = malloc((size_t)T * 4), *labels = malloc((size_t)T * 4);
    double all[MAX_REPEATS], forward[MAX_REPEATS];
    ckpt_eng_init(&e, threads);
    need(ckpt_source_open(&src, dir, &open, &err), &err);
    need(ckpt_model_bind(&model, &src, NULL, &err), &err);
    need(ENG(network_open)(&net, &e, &model, NULL, true, &err), &err);
    for (int64_t t = 0; t < T; t++) {
        ids[t] = (int32_t)(t * 7919 % net.spec.V);
        labels[t] = (int32_t)((t + 1) * 7919 % net.spec.V);
    }
    ENG(batch) batch = {&seq, ids, labels};
    ENG(run) run = {.backward = true};
    need(ENG(network_run)(&e, &net, &batch, &run, &err), &err);
    need(ckpt_eng_reserve(&e, e.peak, &err), &err);
    for (int i = -1; i < repeats; i++) {
        run.backward = false;
        double a = now();
        need(ENG(network_run)(&e, &net, &batch, &run, &err), &err);
        double b = now();
        run.backward = true;
        need(ENG(network_run)(&e, &net, &batch, &run, &err), &err);
        double c = now();
        if (i >= 0) {
            forward[i] = b - a;
            all[i] = c - b;
        }
    }
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double flops = 3 * ckpt_eng_spec_flops(&net.spec, T, (double)T * (double)T);
    double ms = median(all, repeats);
    printf("forward %.2f ms, forward+backward %.2f ms, loss %.6f, %.1f GFLOP/s, peak RSS %ld MiB\n",
           median(forward, repeats), ms, run.loss, flops / ms * 1e-6, u.ru_maxrss / 1024);
    ENG(network_close)(&net);
    ckpt_eng_release(&e);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    free(ids);
    free(labels);
}

static void bench_kda(int64_t T, int64_t H, int64_t D, int repeats, int threads)
{
    ckpt_err err = {0};
    ckpt_eng e;
    int64_t cu[2] = {0, T}, n = T * H * D;
    ckpt_eng_seq seq = {1, cu};
    ckpt_eng_delta d = {.rule = CKPT_ENG_KDA, .H = H, .HV = H, .K = D, .V = D};
    float *q = numbers(n, 0.1f, 0), *k = numbers(n, 0.1f, 0), *v = numbers(n, 1, 0);
    float *g = numbers(n, 0.1f, -0.1f), *beta = numbers(T * H, 0.4f, 0.5f), *w = numbers(n, 1, 0);
    ENG(delta_in) in = {.q = q, .k = k, .v = v, .g = g, .erase = beta};
    float *o = malloc((size_t)n * 4), *saved = malloc((size_t)ENG(delta_saved_len)(&d, &seq) * 4);
    ENG(delta_grad)
    grad = {malloc((size_t)n * 4),
            malloc((size_t)n * 4),
            malloc((size_t)n * 4),
            malloc((size_t)n * 4),
            malloc((size_t)(T * H) * 4),
            NULL,
            NULL};
    double fwd[MAX_REPEATS], bwd[MAX_REPEATS];
    ckpt_eng_init(&e, threads);
    need(ENG(delta)(&e, &d, &seq, &in, o, NULL, saved, &err), &err);
    need(ENG(delta_bwd)(&e, &d, &seq, &in, saved, w, NULL, &grad, &err), &err);
    need(ckpt_eng_reserve(&e, e.peak, &err), &err);
    for (int i = -1; i < repeats; i++) {
        double a = now();
        need(ENG(delta)(&e, &d, &seq, &in, o, NULL, saved, &err), &err);
        double b = now();
        need(ENG(delta_bwd)(&e, &d, &seq, &in, saved, w, NULL, &grad, &err), &err);
        double c = now();
        if (i >= 0) {
            fwd[i] = b - a;
            bwd[i] = c - b;
        }
    }
    printf("forward %.3f ms, backward %.3f ms\n", median(fwd, repeats), median(bwd, repeats));
}

static void bench_gemm(int64_t n, int repeats, int threads)
{
    ckpt_err err = {0};
    ckpt_eng e;
    float *x = numbers(n * n, 1, 0), *w = numbers(n * n, 1, 0), *y = numbers(n * n, 1, 0);
    double ours[MAX_REPEATS], blas[MAX_REPEATS];
    ckpt_eng_init(&e, threads);
    need(ENG(linear)(&e, n, n, n, x, n, w, NULL, false, y, n, &err), &err);
    need(ckpt_eng_reserve(&e, e.peak, &err), &err);
    int real_threads = e.threads;
    for (int i = -1; i < repeats; i++) {
        openblas_set_num_threads(real_threads);
        double a = now();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)n, (int)n, 1, x, (int)n,
                    w, (int)n, 0, y, (int)n);
        double b = now();
        openblas_set_num_threads(1);
        double c = now();
        need(ENG(linear)(&e, n, n, n, x, n, w, NULL, false, y, n, &err), &err);
        double d = now();
        if (i >= 0) {
            blas[i] = b - a;
            ours[i] = d - c;
        }
    }
    double p = 2e-6 * (double)n * (double)n * (double)n, m = median(blas, repeats);
    double o = median(ours, repeats);
    printf("OpenBLAS %.1f GFLOP/s, engine %.1f GFLOP/s, share %.2f\n", p / m, p / o, m / o);
}

static int number(char **argv, int argc, int i, int otherwise)
{
    return i < argc ? atoi(argv[i]) : otherwise;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "model") == 0 && argc >= 5)
        bench_model(argv[2], atoll(argv[3]), number(argv, argc, 4, 5), number(argv, argc, 5, 0));
    else if (strcmp(what, "kda") == 0 && argc >= 6)
        bench_kda(atoll(argv[2]), atoll(argv[3]), atoll(argv[4]), number(argv, argc, 5, 5),
                  number(argv, argc, 6, 0));
    else if (strcmp(what, "gemm") == 0 && argc >= 4)
        bench_gemm(atoll(argv[2]), number(argv, argc, 3, 5), number(argv, argc, 4, 0));
    else {
        fprintf(stderr, "usage: engbench model DIR TOKENS REPEATS | kda TOKENS HEADS DIM REPEATS | "
                        "gemm N REPEATS  [THREADS]\n");
        return 2;
    }
    return 0;
}
