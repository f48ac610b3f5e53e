/* The pointwise and row kernels on a card.
 *
 *   ops_gpu check            every operation against the engine's f64 twin, both types
 *   ops_gpu small f32|bf16   the same on small arrays, for a sanitizer
 *   ops_gpu time             medians and the share of the copy bandwidth at T 8192, hidden 2304, 32 x 128
 */
#include "ops_more.h"

#include "card_memory.h"
#include "card_time.h"

static ckpt_err err;
static ckpt_cuda cuda;

static int report(ops_run *o)
{
    printf("%s: worst relative RMS, f32 arrays %.2e, bf16 arrays %.2e; %s\n",
           o->c.type == CKPT_CUDA_F32 ? "f32 " : "bf16", o->worst[0], o->worst[1],
           o->said[0] ? o->said : "all within their limits, optimizer and choice bit-equal");
    fflush(stdout);
    const bool bad = o->said[0];
    ops_close(o);
    return bad;
}
static int check_type(ckpt_cuda_type type)
{
    const ckpt_cuda_route grouped = {256, 8, 8, 4, 2, false, true, 2.5F};
    const ckpt_cuda_route plain = {64, 6, 0, 0, 0, true, true, 1};
    const int64_t cu[] = {0, 0, 1, 4, 129, 129, 1000, 1001, 4099};
    static const int64_t sizes[][2] = {
        {1,     2   },
        {3,     7   },
        {1000,  128 },
        {16385, 128 },
        {1025,  127 },
        {100,   256 },
        {4097,  2304},
        {33,    4097},
        {5,     9000}
    };
    ops_run o;
    ops_open(&o, type, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int mode = 0; mode < OPS_NORMS; mode++)
            ops_norm(&o, sizes[i][0], sizes[i][1], mode);
    for (int W = 1; W <= 8; W++)
        ops_conv(&o, cu, 8, W % 2 ? 1023 : 1024, W, W % 3 > 0);
    for (int W = 1; W <= 5; W++)
        for (int K = 64; K <= 128; K *= 2)
            ops_conv_norm(&o, cu, 8, 1152 / K, K, W, W % 2 > 0);
    ops_conv_norm(&o, cu, 8, 15, 64, 4, true);
    ops_conv_norm(&o, cu, 8, 4, 256, 4, true);
    for (int b = 0; b < 2; b++) {
        ops_gate(&o, 1025, 32, 128, b ? -5 : 0);
        ops_gate(&o, 777, 5, 1, b ? -5 : 0);
    }
    ops_beta_relu(&o, 1000003, 2);
    ops_swiglu(&o, 257, 9216, 18432, 9216, 0);
    ops_swiglu(&o, 65, 1003, 1005, 1004, 1.5);
    ops_embed(&o, 8193, 300, 10, 200, 2304);
    ops_xent(&o, 65, 50001, true);
    ops_xent(&o, 65, 32768, false);
    for (int i = 0; i < 2; i++) {
        ops_rope(&o, 1025, 7, 64, i);
        ops_rope_table(&o, cu, 8, 64, i);
        ops_route(&o, i ? &grouped : &plain, 2049, i, 0.1, 0.1, !i);
    }
    ops_rows(&o, 1025, 2304, 8);
    ops_optim(&o, 3000001);
    return report(&o);
}
/* Every kernel once or twice, of few blocks: a sanitizer is up to a thousand times slower. */
static int check_small(ckpt_cuda_type type)
{
    const ckpt_cuda_route grouped = {16, 4, 4, 2, 2, false, true, 2.5F};
    const ckpt_cuda_route plain = {8, 2, 0, 0, 0, true, true, 1};
    const int64_t cu[] = {0, 1, 1, 36, 70};
    static const int64_t sizes[][2] = {
        {9,  128 },
        {17, 127 },
        {3,  2304},
        {2,  4097}
    };
    ops_run o;
    ops_open(&o, type, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int mode = 0; mode < OPS_NORMS; mode++)
            ops_norm(&o, sizes[i][0], sizes[i][1], mode);
    ops_conv(&o, cu, 4, 40, 4, true);
    ops_conv(&o, cu, 4, 33, 3, false);
    ops_conv_norm(&o, cu, 4, 2, 64, 4, true);
    ops_conv_norm(&o, cu, 4, 1, 128, 4, false);
    for (int b = 0; b < 2; b++) {
        ops_gate(&o, 33, 2, 128, b ? -5 : 0);
        ops_gate(&o, 17, 3, 1, b ? -5 : 0);
    }
    ops_beta_relu(&o, 1003, 2);
    ops_swiglu(&o, 5, 130, 132, 131, 1.5);
    ops_embed(&o, 70, 30, 5, 20, 72);
    ops_xent(&o, 5, 1001, true);
    ops_xent(&o, 5, 1024, false);
    for (int i = 0; i < 2; i++) {
        ops_rope(&o, 33, 3, 64, i);
        ops_rope_table(&o, cu, 4, 64, i);
        ops_route(&o, i ? &grouped : &plain, 65, i, 0.1, 0.1, !i);
    }
    ops_rows(&o, 33, 72, 4);
    ops_optim(&o, 20001);
    return report(&o);
}

/* ---- times ------------------------------------------------------------------------------------ */

enum {
    T = 8192,
    H = 2304,
    HEADS = 32,
    D = 128,
    C = HEADS * D,
    F = 9216,
    V = 163840,
    EXPERTS = 256,
    K = 8
};

/* Device memory that every operation shares, in bf16 elements of the largest array. */
static char *a, *b, *c, *d, *f;
static float *small, *small2, *w;
static int32_t *ids, *order_at;
static double copy_rate;

typedef ckpt_status op(void);

static ckpt_status call(void *run)
{
    return (*(op **)run)();
}
/* bytes: every array once. */
static float measure(const char *name, op *run, double bytes)
{
    const float ms = card_median(call, (void *)&run);
    if (ms < 0) {
        printf("%s: %s\n", name, err.text);
        return 0;
    }
    const double rate = bytes / ((double)ms * 1e-3);
    printf("%-28s %8.1f us %8.1f MB %6.2f TB/s", name, (double)ms * 1e3, bytes * 1e-6,
           rate * 1e-12);
    printf(copy_rate > 0 ? " %4.0f %% of copy\n" : "\n", rate / copy_rate * 100);
    fflush(stdout);
    (void)dev_wait();
    return ms;
}

#define OP(name, call)                                                                             \
    static ckpt_status name(void)                                                                  \
    {                                                                                              \
        return call;                                                                               \
    }
static ckpt_cuda_seq seq = {.n = 1, .tokens = T};
static const ckpt_cuda_route route = {EXPERTS, K, 8, 4, 2, false, true, 2.5F};
static const ckpt_adamw_scalars step = {1, 0.1F, 0.95F, 0.05F, 0.9999F, 0.3F, 1e-8F, -0.003F};
#define ADAM ((int64_t)100 << 20)

static ckpt_status copy(void)
{
    (void)cudaMemcpyAsync(b, a, (size_t)1 << 30, cudaMemcpyDeviceToDevice, NULL);
    return CKPT_OK;
}
OP(gated,
   ckpt_cuda_gated_rmsnorm(&cuda, (int64_t)T *HEADS, D, a, b, w, false, 1e-5, c, small, &err))
OP(gated_bwd, ckpt_cuda_gated_rmsnorm_bwd(&cuda, (int64_t)T *HEADS, D, a, b, w, false, small, c, d,
                                          f, small2, &err))
OP(conv, ckpt_cuda_conv(&cuda, &seq, C, 4, a, w, NULL, NULL, b, NULL, &err))
OP(conv_bwd,
   ckpt_cuda_conv_bwd(&cuda, &seq, C, 4, a, w, NULL, NULL, b, c, small2, NULL, NULL, &err))
OP(l2, ckpt_cuda_l2norm(&cuda, (int64_t)T *HEADS, D, a, 1e-6, b, small, &err))
OP(l2_bwd, ckpt_cuda_l2norm_bwd(&cuda, (int64_t)T *HEADS, D, a, small, b, c, &err))
OP(cn, ckpt_cuda_conv_norm(&cuda, &seq, C, 4, D, 1e-6, a, w, NULL, b, small, NULL, &err))
OP(cn_bwd,
   ckpt_cuda_conv_norm_bwd(&cuda, &seq, C, 4, D, a, w, NULL, b, small, c, d, small2, NULL, &err))
/* The same as two kernels each. */
static ckpt_status cn_two(void)
{
    const ckpt_status status = ckpt_cuda_conv(&cuda, &seq, C, 4, a, w, NULL, NULL, b, NULL, &err);
    return status != CKPT_OK
               ? status
               : ckpt_cuda_l2norm(&cuda, (int64_t)T * HEADS, D, b, 1e-6, b, small, &err);
}
static ckpt_status cn_two_bwd(void)
{
    const ckpt_status status =
        ckpt_cuda_l2norm_bwd(&cuda, (int64_t)T * HEADS, D, b, small, c, f, &err);
    return status != CKPT_OK ? status
                             : ckpt_cuda_conv_bwd(&cuda, &seq, C, 4, a, w, NULL, NULL, f, d, small2,
                                                  NULL, NULL, &err);
}
OP(gate_soft, ckpt_cuda_gate(&cuda, T, HEADS, D, a, w, w, 0, (float *)b, &err))
OP(gate_safe, ckpt_cuda_gate(&cuda, T, HEADS, D, a, w, w, -5, (float *)b, &err))
OP(gate_soft_bwd,
   ckpt_cuda_gate_bwd(&cuda, T, HEADS, D, a, w, w, 0, (float *)b, c, small, small2, &err))
OP(gate_safe_bwd,
   ckpt_cuda_gate_bwd(&cuda, T, HEADS, D, a, w, w, -5, (float *)b, c, small, small2, &err))
OP(rms, ckpt_cuda_rmsnorm(&cuda, T, H, a, w, false, 1e-5, b, small, &err))
OP(rms_bwd, ckpt_cuda_rmsnorm_bwd(&cuda, T, H, a, w, false, small, b, false, c, small2, &err))
OP(swiglu, ckpt_cuda_swiglu(&cuda, T, F, a, b, F, 0, c, F, &err))
OP(swiglu_bwd, ckpt_cuda_swiglu_bwd(&cuda, T, F, a, b, F, 0, c, F, d, f, &err))
OP(relu2, ckpt_cuda_relu2(&cuda, (int64_t)T *F, a, b, &err))
OP(xent, ckpt_cuda_xent(&cuda, T, V, a, ids, w, small, b, &err))
OP(embed, ckpt_cuda_embed(&cuda, T, 0, V, H, ids, a, b, &err))
OP(embed_bwd, ckpt_cuda_embed_bwd(&cuda, T, 0, V, H, ids, a, (float *)b, &err))
OP(adamw, ckpt_cuda_adamw(&cuda, ADAM, &step, (float *)a, (float *)b, (float *)c, (float *)d,
                          (uint16_t *)f, &err))
OP(sumsq, ckpt_cuda_sumsq(&cuda, ADAM, (float *)a, (double *)small, &err))
OP(norm, ckpt_cuda_norm(&cuda, ADAM / 16384, (double *)small, (double *)small2, &err))
OP(rope, ckpt_cuda_rope(&cuda, 64, true, T, HEADS, a, HEADS * 192, 192, w, w, false, &err))
OP(router, ckpt_cuda_router(&cuda, &route, T, (float *)a, w, (float *)b, small, order_at, small2,
                            (float *)c, &err))
OP(order, ckpt_cuda_order(&cuda, EXPERTS, (int64_t)T *K, order_at, (int64_t *)small, (int32_t *)b,
                          (int32_t *)c, &err))
OP(dispatch, ckpt_cuda_dispatch(&cuda, (int64_t)T *K, H, K, (int32_t *)c, a, d, &err))
OP(combine, ckpt_cuda_combine(&cuda, T, H, K, (int32_t *)b, d, false, a, &err))

static void *random_floats(int64_t n, double lo, double hi)
{
    float *x = malloc((size_t)n * 4);
    void *dev = dev_alloc((size_t)n * 4 + 256);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)kda_number(lo, hi);
    dev_put(dev, x, (size_t)n * 4);
    free(x);
    return dev;
}
/* Bytes whose pairs are bf16, and fours f32, of either sign and magnitude about one: 0x3f.. or 0xbf... */
static char *random_array(size_t bytes)
{
    enum { BLOCK = 1 << 20 };
    static uint16_t x[BLOCK / 2];
    char *dev = dev_alloc(bytes);
    for (int i = 0; i < BLOCK / 2; i++)
        x[i] = (uint16_t)(0x3f00 | (int)kda_number(0, 255) | (kda_number(0, 1) < 0.5 ? 0x8000 : 0));
    for (size_t at = 0; dev && at + BLOCK <= bytes; at += BLOCK)
        dev_put(dev + at, x, BLOCK);
    return dev;
}

static int time_all(void)
{
    const double n = (double)T * C * 2, h = (double)T * H * 2, g = (double)T * F * 2;
    const size_t most = (size_t)T * V * 2;
    const int64_t cu[2] = {0, T};
    char **arrays[] = {&a, &b, &c, &d, &f};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        *arrays[i] = random_array(most);
    cuda = (ckpt_cuda){.type = CKPT_CUDA_BF16, .bytes = ckpt_cuda_work(5 * C)};
    cuda.work = dev_alloc(cuda.bytes);
    small = random_floats(1 << 20, 0.5, 1);
    small2 = random_floats(1 << 20, 0.5, 1);
    w = random_floats(1 << 20, -1, 1);
    int32_t *host = ops_ids(T, 0, V);
    ids = ops_ints(host, T);
    free(host);
    order_at = dev_alloc((size_t)T * K * 4);
    void *dcu = dev_alloc(256);
    dev_put(dcu, cu, sizeof cu);
    seq.cu = dcu;
    const double gib = (double)(1 << 30);
    const float ms = measure("copy 1 GiB", copy, 2 * gib);
    copy_rate = 2 * gib / ((double)ms * 1e-3);
    measure("gated norm 32x128", gated, 3 * n);
    measure("gated norm backward", gated_bwd, 5 * n);
    measure("conv W 4, 4096 channels", conv, 2 * n);
    measure("conv backward", conv_bwd, 3 * n);
    measure("l2norm 32x128", l2, 2 * n);
    measure("l2norm backward", l2_bwd, 3 * n);
    measure("conv, norm: two kernels", cn_two, 2 * n);
    measure("conv, norm: one", cn, 2 * n);
    measure("backward: two kernels", cn_two_bwd, 3 * n);
    measure("backward: one", cn_bwd, 3 * n);
    measure("gate softplus, g f32", gate_soft, 3 * n);
    measure("gate safe, g f32", gate_safe, 3 * n);
    measure("gate softplus backward", gate_soft_bwd, 4 * n);
    measure("gate safe backward", gate_safe_bwd, 4 * n);
    measure("rmsnorm 2304", rms, 2 * h);
    measure("rmsnorm backward", rms_bwd, 3 * h);
    measure("swiglu 9216", swiglu, 3 * g);
    measure("swiglu backward", swiglu_bwd, 5 * g);
    measure("relu2 9216", relu2, 2 * g);
    measure("cross entropy 163840", xent, 2 * (double)most);
    measure("embedding 2304", embed, 2 * h);
    measure("embedding backward", embed_bwd, 5 * h);
    measure("adamw 105 M, bf16 copy", adamw, 30.0 * (double)ADAM);
    measure("sum of squares 105 M", sumsq, 4.0 * (double)ADAM);
    measure("norm of 6400 sums", norm, 51200);
    measure("rope 32x64 of 192", rope, 2.0 * T * HEADS * 64 * 2);
    measure("router 256, 8 groups", router, 8.0 * T * EXPERTS);
    measure("order of 65536 rows", order, 12.0 * T * K);
    measure("dispatch 8 x 2304", dispatch, h * (K + 1));
    measure("combine 8 x 2304", combine, h * (K + 1));
    return dev_wait() ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "check") == 0)
        return check_type(CKPT_CUDA_F32) + check_type(CKPT_CUDA_BF16) > 0;
    if (argc == 3 && strcmp(argv[1], "small") == 0 && strcmp(argv[2], "f32") == 0)
        return check_small(CKPT_CUDA_F32);
    if (argc == 3 && strcmp(argv[1], "small") == 0 && strcmp(argv[2], "bf16") == 0)
        return check_small(CKPT_CUDA_BF16);
    if (argc == 2 && strcmp(argv[1], "time") == 0)
        return time_all();
    fprintf(stderr, "usage: ops_gpu check | small f32|bf16 | time\n");
    return 2;
}
