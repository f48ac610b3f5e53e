/* The quantised KDA prefill on a card (tests/gpu/quant.sh).
 *
 *   quant_gpu codec              codec.h against CUDA's conversions: 256 codes, every bf16 and fp16, random
 *   quant_gpu check [small]      every case against the engine's f32 build, twice, the bits equal; in
 *                                brackets how far that build moves when its inputs do by a rounding; small:
 *                                short ones without a reference, for a sanitizer
 *   quant_gpu table T H D [MS]   the published table's form: [1,T,H,D], q, k, v in bf16, 3 warm-ups, 20
 *                                rounds of all policies in another order each, medians; MS: wall time of FLA
 *   quant_gpu once T H D POLICY  forward and backward once, for a profiler
 */
#define CKPT_REAL 32
#include "card_memory.h"
#include "quant_case.h"
#include "quant_codec.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <time.h>

static ckpt_err err;

static int codec(void)
{
    static const char *const names[CODEC_KINDS] = {"E4M3", "E5M2", "E2M1",     "E8M0",
                                                   "F16",  "BF16", "E4M3 snap"};
    codec_counts c;
    int64_t bad;
    if (!ckpt_test_codecs(true, &c)) {
        printf("codecs: CUDA failed: %s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    bad = c.decodes;
    printf("codecs: 256 codes of E4M3 and E5M2, 16 of E2M1: %lld decode otherwise than CUDA's\n",
           (long long)c.decodes);
    for (int k = 0; k < CODEC_KINDS; k++) {
        printf("codecs: %-9s of %d inputs: %lld differ from CUDA's conversion, %lld from the "
               "host's codec\n",
               names[k], CODEC_INPUTS, (long long)c.cuda[k], (long long)c.host[k]);
        bad += c.cuda[k] + c.host[k];
    }
    return bad != 0;
}

/* ---- parity ----------------------------------------------------------------------------------- */

static bool both(const quant_case *c, quant_run *r)
{
    if (quant_forward(c, r, &err) != CKPT_OK || quant_backward(c, r, &err) != CKPT_OK) {
        printf(" %s\n", err.text);
        return false;
    }
    return dev_wait();
}

static bool same_bits_again(const quant_case *c, quant_run *r)
{
    float *before[QC_OUT];
    bool same = true;
    for (int i = 0; i < QC_OUT; i++) {
        const size_t bytes = (size_t)r->out[i].n * sizeof(float);
        before[i] = malloc(bytes + 1);
        memcpy(before[i], r->out[i].got, bytes);
        quant_array_poison(&r->out[i]);
    }
    same = both(c, r);
    for (int i = 0; i < QC_OUT; i++) {
        quant_array_get(&r->out[i]);
        if (memcmp(before[i], r->out[i].got, (size_t)r->out[i].n * sizeof(float)) != 0) {
            printf(" %s differs again", quant_names[i]);
            same = false;
        }
        free(before[i]);
    }
    return same;
}

static double limit_of(const quant_case *c, int array)
{
    const quant_tolerance t = quant_tolerance_of(c->policy);
    const double limit = array < QC_DQ ? t.output : t.gradient;
    return limit < 1e-5 ? 3 * limit : limit; /* longer sequences than the oracle's */
}

/* How far rounding carries: the engine's answers to gates, betas and states one unit in the last place away,
 * as distances from its answer, the largest of three. A number that lies at the border of two codes falls to
 * either side of it, so two sums in another order differ by whole codes, and the state carries that on. */
static bool neighbours(const quant_case *c, quant_run *r, double far[QC_OUT])
{
    static const int moved[] = {QC_G, QC_BETA, QC_STATE0};
    float *answer[QC_OUT], *input[3];
    bool ok = true;
    for (int i = 0; i < QC_OUT; i++) {
        answer[i] = r->out[i].x;
        far[i] = 0;
    }
    for (int k = 0; k < 3; k++)
        input[k] = r->in[moved[k]].x;
    for (int n = 0; n < 3 && ok; n++) {
        for (int i = 0; i < QC_OUT; i++)
            r->out[i].x = calloc((size_t)r->out[i].n + 1, sizeof(float));
        for (int k = 0; k < 3; k++) {
            quant_array *a = &r->in[moved[k]];
            a->x = calloc((size_t)a->n + 1, sizeof(float));
            for (int64_t i = 0; i < a->n; i++)
                a->x[i] = nextafterf(input[k][i], quant_number(-1, 1) < 0 ? -INFINITY : INFINITY);
        }
        ok = quant_reference(c, r, 0, &err) == CKPT_OK;
        for (int i = 0; i < QC_OUT; i++) {
            far[i] = fmax(far[i], quant_distance(r->out[i].x, answer[i], r->out[i].n));
            free(r->out[i].x);
            r->out[i].x = answer[i];
        }
        for (int k = 0; k < 3; k++) {
            free(r->in[moved[k]].x);
            r->in[moved[k]].x = input[k];
        }
    }
    return ok;
}

/* The errors of the approximate inverse: those of the CPU, but for what another rounding of L changes. */
static bool inverse_differs(const quant_run *r, const ckpt_quant_report *want)
{
    double got[2];
    if (r->policy.solve_factors == 0)
        return false;
    quant_measured(r, got);
    const bool same = fabs(got[0] - want->inverse_error) <= 1e-4 * want->inverse_error + 1e-6 &&
                      fabs(got[1] - want->inverse_residual) <= 1e-4 * want->inverse_residual + 1e-6;
    printf(" inverse %.3g %.3g (the CPU's %.3g %.3g)%s", got[0], got[1], want->inverse_error,
           want->inverse_residual, same ? "" : " OTHERS");
    return !same;
}

static int check_case(const quant_case *c, bool reference)
{
    double near[QC_OUT] = {0};
    quant_run r;
    int bad = 0;
    printf("%-17s %s H %d/%d K %3d V %3d T %4lld in %d:", c->policy, c->half ? "bf16" : "f32 ",
           c->H, c->HV, c->K, c->V, (long long)c->cu[c->N], c->N);
    if (quant_open(c, &r, &err) != CKPT_OK) {
        printf(" %s\n", err.text);
        return 1;
    }
    quant_inputs(c, &r);
    quant_put(&r);
    quant_measure(&r);
    bad = !both(c, &r);
    if (reference && quant_reference(c, &r, 0, &err) != CKPT_OK) {
        printf(" %s\n", err.text);
        return 1;
    }
    const ckpt_quant_report report = r.report;
    if (reference && !neighbours(c, &r, near)) {
        printf(" %s\n", err.text);
        return 1;
    }
    if (reference)
        bad += inverse_differs(&r, &report);
    for (int i = 0; i < QC_OUT && reference; i++) {
        quant_array_get(&r.out[i]);
        const double far = quant_distance(r.out[i].got, r.out[i].x, r.out[i].n);
        const bool fits = far <= fmax(limit_of(c, i), 2 * near[i]) + (r.out[i].half ? 4e-3 : 0);
        printf(" %s %.1e (%.1e)%s", quant_names[i], far, near[i], fits ? "" : " ABOVE");
        bad += !fits;
    }
    if (reference)
        bad += !same_bits_again(c, &r);
    printf("\n");
    fflush(stdout);
    quant_close(&r);
    return bad;
}

static const char *const names[] = {
    "off",   "fp8_operands",   "nvfp4_operands", "fp16_accumulation", "rounded",
    "mixed", "fp8_with_state", "approximate",    "approximate_2",     "fp8_approximate"};

static int check(bool small)
{
    int bad = 0, cases = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int wide = 0; wide < 2; wide++)
            for (int packed = 0; packed < 2; packed++, cases++) {
                quant_case c = {.policy = names[i], .states = true, .H = 2, .HV = 2, .decay = 0.03};
                c.half = packed;
                c.K = c.V = wide ? 128 : 64;
                c.N = 1 + packed;
                c.cu[1] = small ? 130 : 1000;
                if (packed) {
                    c.HV = 4;
                    c.K -= 10;
                    c.V -= 24;
                    c.cu[1] = 65;
                    c.cu[2] = small ? 70 : 400;
                }
                if (strcmp(c.policy, "fp8_with_state") == 0 && wide)
                    c.block_v = packed ? 32 : 128;
                bad += check_case(&c, !small);
            }
    printf("%d cases, %d problems\n", cases, bad);
    return bad != 0;
}

/* ---- times ------------------------------------------------------------------------------------ */

enum { POLICIES = 7, WARM = 3, ROUNDS = 20 }; /* a prime: every step between policies meets all */
static const struct {
    const char *title, *policy;
} rows[POLICIES] = {
    {"exact matmul",               "off"              },
    {"FP8 operands",               "fp8_operands"     },
    {"NVFP4 operands",             "nvfp4_operands"   },
    {"FP16 accumulator, block 16", "fp16_accumulation"},
    {"FP8 operands + chunk state", "fp8_with_state"   },
    {"approximate inverse, 2",     "approximate_2"    },
    {"approximate inverse, 6",     "approximate"      },
};

static quant_case table_case(int T, int H, int D, const char *policy)
{
    return (quant_case){
        .policy = policy,
        .half = true,
        .states = true,
        .H = H,
        .HV = H,
        .K = D,
        .V = D,
        .N = 1,
        .cu = {0, T},
        .decay = 0.03,
    };
}

static double now_ms(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

typedef struct trial {
    float forward, backward, wall;
} trial;

static bool run_trial(const quant_case *c, quant_run *r, cudaEvent_t *at, trial *t)
{
    (void)cudaDeviceSynchronize();
    const double start = now_ms();
    (void)cudaEventRecord(at[0], NULL);
    ckpt_status status = quant_forward(c, r, &err);
    (void)cudaEventRecord(at[1], NULL);
    if (status == CKPT_OK)
        status = quant_backward(c, r, &err);
    (void)cudaEventRecord(at[2], NULL);
    if (status != CKPT_OK || !dev_wait()) {
        printf("%s: %s\n", c->policy, err.text);
        return false;
    }
    t->wall = (float)(now_ms() - start);
    (void)cudaEventElapsedTime(&t->forward, at[0], at[1]);
    (void)cudaEventElapsedTime(&t->backward, at[1], at[2]);
    return true;
}

static int compare(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}
static float median(const trial *t, size_t offset)
{
    float x[ROUNDS];
    for (int i = 0; i < ROUNDS; i++)
        memcpy(&x[i], (const char *)&t[i] + offset, sizeof x[i]);
    qsort(x, ROUNDS, sizeof *x, compare);
    return (x[ROUNDS / 2 - 1] + x[ROUNDS / 2]) / 2;
}
/* What the run took beside its inputs. */
static double extra_mib(const quant_run *r)
{
    double bytes = (double)r->saved_bytes + (double)r->c.bytes;
    for (int i = 0; i < QC_OUT; i++)
        bytes += (double)r->out[i].n * (r->out[i].half ? 2 : 4);
    return bytes / 1048576;
}

static int table(int T, int H, int D, double fla)
{
    static quant_case cases[POLICIES];
    static quant_run runs[POLICIES];
    static trial trials[POLICIES][ROUNDS];
    cudaEvent_t at[3];
    int bad = 0;
    for (int i = 0; i < 3; i++)
        (void)cudaEventCreate(&at[i]);
    for (int i = 0; i < POLICIES; i++) {
        cases[i] = table_case(T, H, D, rows[i].policy);
        if (quant_open(&cases[i], &runs[i], &err) != CKPT_OK) {
            printf("%s: %s\n", rows[i].title, err.text);
            return 1;
        }
        quant_inputs(&cases[i], &runs[i]);
        quant_put(&runs[i]);
    }
    for (int round = -WARM; round < ROUNDS && !bad; round++)
        for (int n = 0; n < POLICIES && !bad; n++) {
            const int i = (n * (1 + (round + WARM) % (POLICIES - 1)) + round + WARM) % POLICIES;
            trial t;
            bad = !run_trial(&cases[i], &runs[i], at, &t);
            if (round >= 0)
                trials[i][round] = t;
        }
    for (int i = 0; i < POLICIES && !bad; i++) {
        const float wall = median(trials[i], offsetof(trial, wall));
        printf("ckpt [1,%d,%d,%d] %-27s forward %8.4f ms, backward %8.4f ms, wall %8.4f ms, ", T, H,
               D, rows[i].title, (double)median(trials[i], offsetof(trial, forward)),
               (double)median(trials[i], offsetof(trial, backward)), (double)wall);
        if (fla > 0)
            printf("wall / FLA fused %6.3f, ", (double)wall / fla);
        printf("extra %.2f MiB\n", extra_mib(&runs[i]));
    }
    for (int i = 0; i < POLICIES; i++)
        quant_close(&runs[i]);
    return bad;
}

static int once(int T, int H, int D, const char *policy)
{
    const quant_case c = table_case(T, H, D, policy);
    quant_run r;
    if (quant_open(&c, &r, &err) != CKPT_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    quant_inputs(&c, &r);
    quant_put(&r);
    const bool ok = both(&c, &r);
    quant_close(&r);
    return !ok;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "codec") == 0)
        return codec();
    if (argc >= 2 && strcmp(argv[1], "check") == 0)
        return check(argc > 2 && strcmp(argv[2], "small") == 0);
    if (argc >= 5 && strcmp(argv[1], "table") == 0)
        return table(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), argc > 5 ? atof(argv[5]) : 0);
    if (argc == 6 && strcmp(argv[1], "once") == 0)
        return once(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), argv[5]);
    fprintf(stderr,
            "usage: quant_gpu codec | check [small] | table T H D [MS] | once T H D POLICY\n");
    return 2;
}
