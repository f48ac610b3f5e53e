/* Products and attention on a card.
 *
 *   attn_gpu check [small]   every case against f64, attention twice with equal bits, both types
 *   attn_gpu group [small]   the same of attention by wgmma
 *   attn_gpu times [group]   medians of forward and backward, TFLOP/s, at T 8192; group: of attention by
 *                            wgmma only
 *   attn_gpu once            one call of some, for a profiler
 */
#include "attn_case.h"
#include "gemm_case.h"

#include "card_memory.h"
#include "card_time.h"

static ckpt_err err;

/* ---- parity ----------------------------------------------------------------------------------- */

static int report(const char *what, ops_run *o)
{
    printf("%-4s %-22s worst relative RMS: f32 run %.2e, bf16 run %.2e; %s\n",
           o->c.type == CKPT_CUDA_F32 ? "f32" : "bf16", what, o->worst[0], o->worst[1],
           o->said[0] ? o->said : "within its limits");
    fflush(stdout);
    const bool bad = o->said[0];
    ops_close(o);
    return bad;
}
static int check_products(ckpt_cuda_type type, ckpt_cuda_products kind, bool small)
{
    ops_run o;
    ops_open(&o, type, 0);
    ops_did(&o, "open", ckpt_cuda_gemm_open(&o.c.gemm, kind, &err), &err);
    ckpt_cuda_gemm *const g = o.c.gemm;
    if (g) {
        gemm_all(&o);
        if (!small) {
            gemm_linear(&o, 1000, 576, 1152, true);
            gemm_linear(&o, 257, 1024, 40, false);
            gemm_experts(&o, 7, (const int64_t[]){0, 300, 300, 301, 557, 600, 601, 901}, 256, 384,
                         false, true);
        }
        char name[64];
        (void)snprintf(name, sizeof name, "%s", ckpt_cuda_gemm_name(g));
        const int bad = report(name, &o);
        ckpt_cuda_gemm_close(g);
        return bad;
    }
    return report("products", &o);
}
/* clang-format off */
static const attn_case large[] = {
    {.N = 2, .G = 2, .DK = 192, .DV = 128, .n = 1, .cu = {0, 1000}},
    {.N = 4, .G = 2, .DK = 128, .DV = 128, .n = 4, .cu = {0, 1, 513, 641, 1100}},
    {.N = 4, .G = 1, .DK = 64, .DV = 64, .n = 2, .cu = {0, 700, 1031}},
    {.N = 2, .G = 1, .DK = 256, .DV = 256, .n = 1, .cu = {0, 517}},
    {.N = 2, .G = 1, .DK = 96, .DV = 80, .n = 1, .cu = {0, 640}},
    {.N = 2, .G = 1, .DK = 192, .DV = 128, .n = 1, .cu = {0, 1024}, .n_parts = 2,
     .parts = {{0, 128, 128, 0}, {0, 768, 128, 128}}},
};
/* clang-format on */
static int check_attention(ckpt_cuda_type type, ckpt_cuda_attend_kind kind, bool small)
{
    ops_run o;
    ops_open(&o, type, 0);
    for (size_t i = 0; i < sizeof attn_cases / sizeof *attn_cases; i++)
        attn_run(&o, &attn_cases[i], kind, !small);
    for (size_t i = 0; !small && i < sizeof large / sizeof *large; i++)
        attn_run(&o, &large[i], kind, true);
    return report(kind == CKPT_CUDA_ATTEND_GROUP ? "attention, wgmma" : "attention", &o);
}
static int check(bool small)
{
    int bad = 0;
    for (int type = 0; type < 2; type++) {
        const ckpt_cuda_type t = type ? CKPT_CUDA_BF16 : CKPT_CUDA_F32;
        bad += check_attention(t, CKPT_CUDA_ATTEND_WARP, small);
        bad += check_products(t, CKPT_CUDA_PRODUCTS_OWN, small);
        bad += check_products(t, CKPT_CUDA_PRODUCTS_WARP, small);
        bad += check_products(t, CKPT_CUDA_PRODUCTS_BEST, small);
    }
    printf("%d problems\n", bad);
    return bad != 0;
}

/* ---- times ------------------------------------------------------------------------------------ */

enum { T = 8192, EXPERTS = 64, TOP = 8, HIDDEN = 2304, INNER = 1024, ROWS = T * TOP };
static void *x[8]; /* arrays as large as any use asks */
static float *lse;
static ckpt_cuda cuda;
static bool once;

static void *random_array(size_t bytes)
{
    enum { BLOCK = 1 << 20 };
    static uint16_t block[BLOCK / 2];
    char *dev = dev_alloc(bytes + BLOCK);
    for (int i = 0; i < BLOCK / 2; i++)
        block[i] =
            (uint16_t)(0x3f00 | (int)kda_number(0, 255) | (kda_number(0, 1) < 0.5 ? 0x8000 : 0));
    for (size_t at = 0; dev && at < bytes; at += BLOCK)
        dev_put(dev + at, block, BLOCK);
    return dev;
}
static int show(const char *name, ckpt_status (*run)(void *), void *arg, double flop)
{
    if (once) {
        const ckpt_status status = run(arg);
        if (status != CKPT_OK)
            printf("%s: %s\n", name, err.text);
        return status != CKPT_OK;
    }
    const float ms = card_median(run, arg);
    if (ms < 0) {
        printf("%s: %s\n", name, err.text);
        return 1;
    }
    printf("%-44s %8.4f ms %7.1f TFLOP/s\n", name, (double)ms, flop / (double)ms * 1e-9);
    fflush(stdout);
    return dev_wait() ? 0 : 1;
}

typedef struct attend_job {
    ckpt_cuda_attention a;
    ckpt_cuda_seq seq;
} attend_job;

static ckpt_status forward(void *arg)
{
    const attend_job *j = arg;
    return ckpt_cuda_attend(&cuda, &j->a, &j->seq, x[0], x[1], x[2], x[3], lse, &err);
}
static ckpt_status backward(void *arg)
{
    const attend_job *j = arg;
    return ckpt_cuda_attend_bwd(&cuda, &j->a, &j->seq, x[0], x[1], x[2], x[3], lse, x[4], x[5],
                                x[6], x[7], &err);
}
/* FLOP of the causal half: scores and output forward; scores again, dP, dV, dQ, dK backward. */
static ckpt_cuda_attend_kind kind; /* of the kernels that are timed */
static int time_attention(int64_t N, int64_t G, int64_t DK, int64_t DV, int64_t t, int64_t n)
{
    attend_job j = {0};
    j.a = (ckpt_cuda_attention){.N = N, .G = G, .DK = DK, .DV = DV, .kind = kind};
    j.seq = (ckpt_cuda_seq){.n = n, .tokens = t};
    int64_t cu[64] = {0};
    for (int64_t i = 0; i < n; i++)
        cu[i + 1] = t * (i + 1) / n;
    void *dev = dev_alloc(sizeof cu);
    dev_put(dev, cu, sizeof cu);
    j.seq.cu = dev;
    const double pairs = (double)t * (double)t / 2 / (double)n * (double)N * 2;
    char name[96];
    (void)snprintf(name, sizeof name, "[%lld x %lld, %lld/%lld, %lld/%lld] forward", (long long)n,
                   (long long)(t / n), (long long)N, (long long)G, (long long)DK, (long long)DV);
    int bad = show(name, forward, &j, pairs * (double)(DK + DV));
    (void)snprintf(name, sizeof name, "[%lld x %lld, %lld/%lld, %lld/%lld] backward", (long long)n,
                   (long long)(t / n), (long long)N, (long long)G, (long long)DK, (long long)DV);
    bad += show(name, backward, &j, pairs * (double)(3 * DK + 2 * DV));
    dev_free(dev);
    return bad;
}

typedef struct linear_job {
    int64_t n_in, n_out;
} linear_job;
static ckpt_status linear(void *arg)
{
    const linear_job *j = arg;
    return ckpt_cuda_linear(&cuda, T, j->n_in, j->n_out, x[0], j->n_in, x[1], NULL, false, x[2],
                            j->n_out, &err);
}
static ckpt_status linear_dx(void *arg)
{
    const linear_job *j = arg;
    return ckpt_cuda_linear_dx(&cuda, T, j->n_in, j->n_out, x[2], j->n_out, x[1], false, x[3],
                               j->n_in, &err);
}
static ckpt_status linear_dw(void *arg)
{
    const linear_job *j = arg;
    return ckpt_cuda_linear_dw(&cuda, T, j->n_in, j->n_out, x[2], j->n_out, x[0], j->n_in, x[4],
                               NULL, &err);
}
static int time_linear(int64_t n_in, int64_t n_out)
{
    linear_job j = {n_in, n_out};
    const double flop = 2.0 * T * (double)n_in * (double)n_out;
    char name[96];
    int bad = 0;
    (void)snprintf(name, sizeof name, "%lld -> %lld", (long long)n_in, (long long)n_out);
    bad += show(name, linear, &j, flop);
    (void)snprintf(name, sizeof name, "%lld -> %lld dx", (long long)n_in, (long long)n_out);
    bad += show(name, linear_dx, &j, flop);
    (void)snprintf(name, sizeof name, "%lld -> %lld dw", (long long)n_in, (long long)n_out);
    return bad + show(name, linear_dw, &j, flop);
}

typedef struct expert_job {
    void *first, *w, *dw;
} expert_job;
static ckpt_status experts(void *arg)
{
    const expert_job *j = arg;
    return ckpt_cuda_experts(&cuda, EXPERTS, ROWS, j->first, HIDDEN, INNER, x[0], j->w, false, x[3],
                             &err);
}
static ckpt_status experts_dx(void *arg)
{
    const expert_job *j = arg;
    return ckpt_cuda_experts_dx(&cuda, EXPERTS, ROWS, j->first, HIDDEN, INNER, x[3], j->w, false,
                                x[0], &err);
}
static ckpt_status experts_dw(void *arg)
{
    const expert_job *j = arg;
    return ckpt_cuda_experts_dw(&cuda, EXPERTS, ROWS, j->first, HIDDEN, INNER, x[3], x[0], j->dw,
                                &err);
}
/* 65,536 rows of 64 experts, of sizes 1 : 3. */
static int time_experts(void)
{
    int64_t first[EXPERTS + 1] = {0};
    void *w[EXPERTS], *dw[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        first[i + 1] = first[i] + ROWS / EXPERTS / 2 + (i % 2) * ROWS / EXPERTS;
        w[i] = (char *)x[6] + (size_t)i * HIDDEN * INNER * 2;
        dw[i] = (char *)x[6] + (size_t)i * HIDDEN * INNER * 4;
    }
    expert_job j = {dev_alloc(sizeof first), dev_alloc(sizeof w), dev_alloc(sizeof dw)};
    dev_put(j.first, first, sizeof first);
    dev_put(j.w, w, sizeof w);
    dev_put(j.dw, dw, sizeof dw);
    const double flop = 2.0 * ROWS * HIDDEN * INNER;
    return show("experts 64, 65536 x 2304 -> 1024", experts, &j, flop) +
           show("experts dx", experts_dx, &j, flop) + show("experts dw", experts_dw, &j, flop);
}

static int time_kind(ckpt_cuda_attend_kind which)
{
    int bad = 0;
    kind = which;
    cuda.type = CKPT_CUDA_BF16;
    printf("attention, bf16, %s: [sequences x tokens, query/key heads, dims of q/v]\n",
           which == CKPT_CUDA_ATTEND_GROUP ? "wgmma" : "mma.sync");
    bad += time_attention(32, 32, 192, 128, T, 1);
    bad += time_attention(32, 8, 128, 128, T, 1);
    if (once)
        return bad;
    bad += time_attention(32, 32, 128, 128, T, 1);
    bad += time_attention(32, 32, 64, 64, T, 1);
    bad += time_attention(16, 4, 256, 256, T, 1);
    bad += time_attention(32, 32, 192, 128, T, 8);
    bad += time_attention(16, 16, 192, 128, 1024, 1);
    return bad;
}
static int time_products(void)
{
    int bad = 0;
    if (ckpt_cuda_gemm_open(&cuda.gemm, CKPT_CUDA_PRODUCTS_BEST, &err) != CKPT_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    printf("products, bf16, %d tokens: %s\n", T, ckpt_cuda_gemm_name(cuda.gemm));
    bad += time_linear(2304, 4096);
    bad += time_linear(4096, 2304);
    bad += time_linear(2304, 9216);
    bad += time_linear(9216, 2304);
    bad += time_linear(2304, 576);
    bad += time_experts();
    ckpt_cuda_gemm *const lt = cuda.gemm;
    static const ckpt_cuda_products own[] = {CKPT_CUDA_PRODUCTS_WARP, CKPT_CUDA_PRODUCTS_OWN};
    for (int i = 0; i < 2; i++) {
        bad += ckpt_cuda_gemm_open(&cuda.gemm, own[i], &err) != CKPT_OK;
        printf("products, bf16: %s\n", ckpt_cuda_gemm_name(cuda.gemm));
        bad += time_linear(2304, 4096) + time_linear(2304, 576) + time_experts();
        ckpt_cuda_gemm_close(cuda.gemm);
    }
    cuda.gemm = lt;
    cuda.type = CKPT_CUDA_F32;
    printf("f32: attention, products\n");
    kind = CKPT_CUDA_ATTEND_BEST;
    bad += time_attention(8, 8, 192, 128, 2048, 1);
    bad += time_linear(2304, 4096);
    ckpt_cuda_gemm_close(lt);
    cuda.gemm = NULL;
    return bad;
}

/* wgmma last: what it might break comes after nothing. */
static int times(bool group)
{
    const size_t bytes = (size_t)EXPERTS * HIDDEN * INNER * 4; /* the largest: dw */
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = random_array(bytes);
    lse = dev_alloc((size_t)T * 64 * 4);
    cuda = (ckpt_cuda){.type = CKPT_CUDA_BF16, .bytes = (size_t)64 << 20};
    cuda.work = dev_alloc(cuda.bytes);
    int bad = group ? 0 : time_kind(CKPT_CUDA_ATTEND_WARP) + time_products();
    bad += time_kind(CKPT_CUDA_ATTEND_GROUP);
    return bad != 0;
}

int main(int argc, char **argv)
{
    if (argc >= 2 && strcmp(argv[1], "check") == 0)
        return check(argc > 2 && strcmp(argv[2], "small") == 0);
    if (argc >= 2 && strcmp(argv[1], "group") == 0)
        return check_attention(CKPT_CUDA_BF16, CKPT_CUDA_ATTEND_GROUP, argc > 2);
    const bool only = argc == 3 && strcmp(argv[2], "group") == 0;
    if ((argc == 2 || only) && strcmp(argv[1], "times") == 0)
        return times(only);
    if (argc == 2 && strcmp(argv[1], "once") == 0) {
        once = true;
        return times(false);
    }
    fprintf(stderr, "usage: attn_gpu check [small] | group [small] | times [group] | once\n");
    return 2;
}
