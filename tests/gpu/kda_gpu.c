/* The KDA kernels on a card.
 *
 *   kda_gpu check             every case against the f64 recurrence, twice, the bits equal
 *   kda_gpu check small|tiny  fewer and shorter, run once without a reference, under a sanitizer: tiny is
 *                             one case of each kernel, for racecheck
 *   kda_gpu time T H D [general] [f32]   medians of forward and backward, workspace
 *   kda_gpu dump DIR [weak]   inputs and f64 results of one case for another program (tests/gpu/fla_kda.py)
 */
#include "kda_case.h"

#include "card_memory.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <unistd.h>

static ckpt_err err;

static bool both(const kda_case *c, kda_run *r)
{
    if (kda_forward(c, r, NULL, &err) != CKPT_OK || kda_backward(c, r, NULL, &err) != CKPT_OK) {
        printf("%s\n", err.text);
        return false;
    }
    return dev_wait();
}

static bool same_bits_again(const kda_case *c, kda_run *r)
{
    bool same = true;
    double *before[KDA_ARRAYS];
    for (int i = 0; i < KDA_ARRAYS; i++) {
        kda_array *a = &r->out[i];
        before[i] = malloc((size_t)(a->n + 1) * sizeof(double));
        memcpy(before[i], a->got, (size_t)a->n * sizeof(double));
        kda_poison(a);
    }
    same = both(c, r);
    for (int i = 0; i < KDA_ARRAYS; i++) {
        kda_get(&r->out[i]);
        if (memcmp(before[i], r->out[i].got, (size_t)r->out[i].n * sizeof(double)) != 0) {
            printf(" %s differs", kda_names[i]);
            same = false;
        }
        free(before[i]);
    }
    return same;
}

static int check(const kda_case *c, bool reference)
{
    kda_run r;
    int bad = 0;
    static const char *const rule[] = {"KDA", "GDN", "GDN2"};
    printf("%-4s %s D %3d H %2d %-7s %-6s T %5lld in %d:",
           c->type == CKPT_CUDA_F32 ? "f32" : "bf16", rule[c->rule], c->D, c->H,
           c->safe ? "safe" : "general", c->states ? "states" : "", (long long)c->cu[c->N], c->N);
    if (kda_make(c, &r, &err) != CKPT_OK) {
        printf(" %s\n", err.text);
        return 1;
    }
    if (reference && kda_reference(c, &r, 0, &err) != CKPT_OK) {
        printf(" %s\n", err.text);
        return 1;
    }
    bad = !both(c, &r);
    for (int i = 0; i < KDA_ARRAYS && reference; i++) {
        kda_get(&r.out[i]);
        const double d = kda_distance(&r.out[i]);
        const bool fits = d <= kda_limit(c, i);
        printf(" %s %.1e%s", kda_names[i], d, fits ? "" : " ABOVE");
        bad += !fits;
    }
    if (reference)
        bad += !same_bits_again(c, &r);
    printf("\n");
    fflush(stdout);
    kda_free(&r);
    return bad;
}

/* What delta.h copies, and sequences cut into segments. */
static int check_rules(bool small, int *cases)
{
    static const kda_case rules[] = {
        {.rule = CKPT_CUDA_RULE_GDN, .H = 2,  .HV = 4,      .D = 128,     .g_low = -1},
        {                          .rule = CKPT_CUDA_RULE_GDN2,                    .H = 2, .HV = 2,     .D = 128, .safe = true, .g_low = -5},
        {                          .rule = CKPT_CUDA_RULE_GDN2,                    .H = 1, .HV = 2,      .D = 96,  .g_low = -2           },
        { .rule = CKPT_CUDA_RULE_KDA,                   .H = 1,                   .HV = 2,     .K = 48,  .V = 112,            .g_low = -4},
        { .rule = CKPT_CUDA_RULE_KDA,                   .H = 1,                   .HV = 3, .D = 64,  .safe = true,            .g_low = -5},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (int type = 0; type < 3; type++) {
            kda_case c = rules[i];
            c.type = type ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
            c.gates = type == 2 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
            c.delta = c.states = true;
            c.N = 2;
            c.cu[1] = 66;
            c.cu[2] = small ? 83 : 400;
            bad += check(&c, !small);
            ++*cases;
        }
    for (int segments = 2; segments < 12; segments += 3)
        for (int D = 64; D <= 128; D += 64) {
            kda_case c = {.type = CKPT_CUDA_BF16, .D = D, .H = 2, .g_low = -0.02, .N = 2};
            c.safe = c.states = true;
            c.segments = segments;
            c.cu[1] = 40;
            c.cu[2] = small ? 300 : 1500;
            bad += check(&c, !small);
            ++*cases;
        }
    return bad;
}

/* One of each kernel: both types and gates, a rule that delta.h spreads, segments. Two chunks and a part. */
static int check_tiny(void)
{
    int bad = 0, cases = 0;
    for (int i = 0; i < 6; i++) {
        kda_case c = {
            .D = 128, .H = 1, .g_low = -5, .N = 2, .cu = {0, 65, 70}
        };
        c.type = i % 2 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
        c.safe = i / 2 != 1;
        c.states = true;
        if (i == 4) {
            c.rule = CKPT_CUDA_RULE_GDN2;
            c.type = CKPT_CUDA_BF16;
            c.HV = 2;
            c.delta = true;
            c.gates = CKPT_CUDA_BF16;
        } else if (i == 5) {
            c.segments = 2;
            c.cu[2] = 200;
        }
        bad += check(&c, false);
        cases++;
    }
    printf("%d cases, %d problems\n", cases, bad);
    return bad != 0;
}
static int check_all(bool small)
{
    static const int64_t lengths[] = {1, 15, 63, 64, 65, 127, 129, 200, 1000};
    int bad = 0, cases = 0;
    for (int type = 0; type < 2; type++)
        for (int D = 64; D <= 128; D += 64)
            for (int safe = 0; safe < 2; safe++) {
                kda_case c = {.type = (ckpt_cuda_type)type, .safe = safe, .D = D, .g_high = 0};
                c.g_low = safe ? -5 : -12;
                c.states = true;
                c.H = 2;
                c.N = 6;
                memcpy(c.cu, (int64_t[]){0, 0, 65, 66, 66, 129, small ? 140 : 700},
                       7 * sizeof *c.cu);
                bad += check(&c, !small);
                cases++;
                if (small)
                    continue;
                c.N = 0;
                bad += check(&c, true);
                for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                    c.N = 1 + (int)(i % 2);
                    c.H = 1 + (int)(i % 3);
                    c.states = i % 2;
                    c.g_low = i % 3 == 0 ? -0.01 : c.g_low;
                    c.share = i % 3 == 0 ? 0.7 : 0;
                    c.cu[1] = lengths[i];
                    c.cu[2] = 2 * lengths[i];
                    bad += check(&c, true);
                    cases++;
                }
            }
    bad += check_rules(small, &cases);
    printf("%d cases, %d problems\n", cases, bad);
    return bad != 0 || cases == 0;
}

static int compare(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}
static float median_ms(const kda_case *c, kda_run *r, bool back)
{
    enum { N = 50, WARM = 10 };
    float ms[N];
    cudaEvent_t a, b;
    (void)cudaEventCreate(&a);
    (void)cudaEventCreate(&b);
    for (int i = -WARM; i < N; i++) {
        (void)cudaEventRecord(a, NULL);
        if ((back ? kda_backward : kda_forward)(c, r, NULL, &err) != CKPT_OK)
            printf("%s\n", err.text);
        (void)cudaEventRecord(b, NULL);
        (void)cudaEventSynchronize(b);
        if (i >= 0)
            (void)cudaEventElapsedTime(&ms[i], a, b);
    }
    qsort(ms, N, sizeof *ms, compare);
    (void)dev_wait();
    return ms[N / 2];
}
static int time_one(int64_t T, int H, int D, bool general, bool f32)
{
    kda_case c = {
        .type = f32 ? CKPT_CUDA_F32 : CKPT_CUDA_BF16,
        .safe = !general,
        .H = H,
        .D = D,
        .g_low = general ? -8 : -5,
        .N = 1,
        .cu = {0, T}
    };
    kda_run r;
    if (kda_make(&c, &r, &err) != CKPT_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    for (int again = 0; again < 2; again++) {
        const float fwd = median_ms(&c, &r, false), bwd = median_ms(&c, &r, true);
        printf("%s %s [1,%lld,%d,%d]: forward %.4f ms, backward %.4f ms, work %.0f / %.0f MiB\n",
               f32 ? "f32" : "bf16", general ? "general" : "safe", (long long)T, H, D, fwd, bwd,
               (double)r.forward / 1048576, (double)r.backward / 1048576);
    }
    kda_free(&r);
    return 0;
}

static void write_array(const char *dir, const char *name, const kda_array *a)
{
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (f) {
        (void)fwrite(a->x, sizeof(double), (size_t)a->n, f);
        (void)fclose(f);
    }
}
static int dump(const char *dir, bool weak)
{
    kda_case c = {
        .type = CKPT_CUDA_BF16,
        .safe = true,
        .states = true,
        .H = 32,
        .D = 128,
        .g_low = weak ? -0.01 : -5,
        .share = weak ? 0.7 : 0,
        .N = 1,
        .cu = {0, 1024}
    };
    kda_run r;
    if (kda_make(&c, &r, &err) != CKPT_OK || kda_reference(&c, &r, 0, &err) != CKPT_OK ||
        !both(&c, &r)) {
        printf("%s\n", err.text);
        return 1;
    }
    const kda_array *in[] = {&r.q, &r.k, &r.v, &r.g, &r.beta, &r.state0, &r.d_o, &r.d_state};
    static const char *const names[] = {"q", "k", "v", "g", "beta", "state0", "d_o", "d_state"};
    for (size_t i = 0; i < sizeof in / sizeof *in; i++)
        write_array(dir, names[i], in[i]);
    for (int i = 0; i < KDA_ARRAYS; i++) {
        kda_get(&r.out[i]);
        write_array(dir, kda_names[i], &r.out[i]);
        printf(" %s %.2e", kda_names[i], kda_distance(&r.out[i]));
    }
    printf("   ckpt, T 1024, H 32, D 128, bf16 safe%s\n", weak ? ", weak decay, shared keys" : "");
    kda_free(&r);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "check") == 0)
        return check_all(false);
    if (argc == 3 && strcmp(argv[1], "check") == 0 && strcmp(argv[2], "tiny") == 0)
        return check_tiny();
    if (argc == 3 && strcmp(argv[1], "check") == 0 && strcmp(argv[2], "small") == 0)
        return check_all(true);
    if (argc >= 5 && strcmp(argv[1], "time") == 0) {
        bool general = false, f32 = false;
        for (int i = 5; i < argc; i++) {
            general = general || strcmp(argv[i], "general") == 0;
            f32 = f32 || strcmp(argv[i], "f32") == 0;
        }
        return time_one(atoll(argv[2]), atoi(argv[3]), atoi(argv[4]), general, f32);
    }
    if (argc >= 3 && strcmp(argv[1], "dump") == 0)
        return dump(argv[2], argc > 3);
    fprintf(stderr,
            "usage: kda_gpu check [small | tiny] | time T H D [general] [f32] | dump DIR [weak]\n");
    return 2;
}
