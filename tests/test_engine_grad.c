/* Central differences of fourth order against the backward of every operation and block, f64. */
#define CKPT_REAL 64
#include "engine_scene.h"

/* ---- single operations ---------------------------------------------------------------------- */

#define ROWS 21 /* more than one block of rows */
#define N 7

static void rms_forward(scene *s)
{
    const real *w = s->variant == 2 ? NULL : s->in[1].x;
    OK(ENG(rmsnorm)(&engine, ROWS, N, s->in[0].x, w, s->variant == 1, 1e-3, s->out, NULL, &error));
}

static void rms_backward(scene *s)
{
    const bool none = s->variant == 2;
    real *rstd = zeros(ROWS), *y = zeros(ROWS * N);
    OK(ENG(rmsnorm)(&engine, ROWS, N, s->in[0].x, none ? NULL : s->in[1].x, s->variant == 1, 1e-3,
                    y, rstd, &error));
    OK(ENG(rmsnorm_bwd)(&engine, ROWS, N, s->in[0].x, none ? NULL : s->in[1].x, s->variant == 1,
                        rstd, s->d_out, true, s->in[0].grad, none ? NULL : s->in[1].grad, &error));
}

static void gated_forward(scene *s)
{
    OK(ENG(gated_rmsnorm)(&engine, ROWS, N, s->in[0].x, s->in[1].x, s->in[2].x,
                          s->variant ? CKPT_ENG_SILU : CKPT_ENG_SIGMOID, 1e-3, s->out, NULL,
                          &error));
}

static void gated_backward(scene *s)
{
    const ckpt_eng_act act = s->variant ? CKPT_ENG_SILU : CKPT_ENG_SIGMOID;
    real *rstd = zeros(ROWS), *y = zeros(ROWS * N);
    OK(ENG(gated_rmsnorm)(&engine, ROWS, N, s->in[0].x, s->in[1].x, s->in[2].x, act, 1e-3, y, rstd,
                          &error));
    OK(ENG(gated_rmsnorm_bwd)(&engine, ROWS, N, s->in[0].x, s->in[1].x, s->in[2].x, act, rstd,
                              s->d_out, s->in[0].grad, s->in[1].grad, s->in[2].grad, &error));
}

static void l2_forward(scene *s)
{
    OK(ENG(l2norm)(&engine, ROWS, N, s->in[0].x, 1e-2, s->out, zeros(ROWS), &error));
}

static void l2_backward(scene *s)
{
    real *r = zeros(ROWS), *y = zeros(ROWS * N);
    OK(ENG(l2norm)(&engine, ROWS, N, s->in[0].x, 1e-2, y, r, &error));
    OK(ENG(l2norm_bwd)(&engine, ROWS, N, y, r, s->d_out, s->in[0].grad, &error));
}

static void make_norm(scene *s, int kind, int variant)
{
    s->variant = variant;
    add_input(s, "x", ROWS * N, -2, 2);
    if (kind == 1)
        add_input(s, "z", ROWS * N, -2, 2);
    if (kind == 1 || (kind == 0 && variant != 2))
        add_input(s, "w", N, -1, 1);
    add_output(s, ROWS * N);
    s->forward = kind == 0 ? rms_forward : kind == 1 ? gated_forward : l2_forward;
    s->backward = kind == 0 ? rms_backward : kind == 1 ? gated_backward : l2_backward;
}

#define CHANNELS 66 /* two blocks of channels */
#define TOKENS 12
static const int64_t conv_cu[] = {0, 1, 1, 7, TOKENS};
static const ckpt_eng_seq conv_seq = {4, conv_cu};
#define CONV_W 4
#define HISTORY (4 * (CONV_W - 1) * CHANNELS)

static void conv_forward(scene *s)
{
    const bool all = s->variant == 1;
    OK(ENG(conv)(&engine, &conv_seq, CHANNELS, CONV_W, s->in[0].x, s->in[1].x,
                 all ? s->in[2].x : NULL, all ? s->in[3].x : NULL, s->out, NULL, &error));
}

static void conv_backward(scene *s)
{
    const bool all = s->variant == 1;
    OK(ENG(conv_bwd)(&engine, &conv_seq, CHANNELS, CONV_W, s->in[0].x, s->in[1].x,
                     all ? s->in[2].x : NULL, all ? s->in[3].x : NULL, s->d_out, s->in[0].grad,
                     s->in[1].grad, all ? s->in[2].grad : NULL, all ? s->in[3].grad : NULL,
                     &error));
}

static void make_conv(scene *s, int variant)
{
    s->variant = variant;
    add_input(s, "x", TOKENS * CHANNELS, -2, 2);
    add_input(s, "w", CHANNELS * CONV_W, -1, 1);
    if (variant == 1) {
        add_input(s, "bias", CHANNELS, -1, 1);
        add_input(s, "history", HISTORY, -1, 1);
    }
    add_output(s, TOKENS * CHANNELS);
    s->forward = conv_forward;
    s->backward = conv_backward;
}

#define HEADS 3
#define KEY 5

static void gate_forward(scene *s)
{
    OK(ENG(gate)(&engine, TOKENS, HEADS, KEY, s->in[0].x, s->in[1].x, s->in[2].x,
                 s->variant ? -5 : 0, s->out, &error));
}

static void gate_backward(scene *s)
{
    OK(ENG(gate_bwd)(&engine, TOKENS, HEADS, KEY, s->in[0].x, s->in[1].x, s->in[2].x,
                     s->variant ? -5 : 0, s->d_out, s->in[0].grad, s->in[1].grad, s->in[2].grad,
                     &error));
}

static void make_gate(scene *s, int variant)
{
    s->variant = variant;
    add_input(s, "raw", TOKENS * HEADS * KEY, -3, 3);
    add_input(s, "A_log", HEADS, -1, 1);
    add_input(s, "dt_bias", HEADS * KEY, -1, 1);
    add_output(s, TOKENS * HEADS * KEY);
    s->forward = gate_forward;
    s->backward = gate_backward;
}

static void sigmoid_forward(scene *s)
{
    OK(ENG(sigmoid)(&engine, ROWS, s->variant + 1, s->in[0].x, s->out, &error));
}

static void sigmoid_backward(scene *s)
{
    real *y = zeros(ROWS);
    OK(ENG(sigmoid)(&engine, ROWS, s->variant + 1, s->in[0].x, y, &error));
    OK(ENG(sigmoid_bwd)(&engine, ROWS, s->variant + 1, y, s->d_out, s->in[0].grad, &error));
}

static void relu2_forward(scene *s)
{
    OK(ENG(relu2)(&engine, ROWS, s->in[0].x, s->out, &error));
}

static void relu2_backward(scene *s)
{
    OK(ENG(relu2_bwd)(&engine, ROWS, s->in[0].x, s->d_out, s->in[0].grad, &error));
}

static void make_pointwise(scene *s, int kind)
{
    s->variant = kind;
    add_input(s, "x", ROWS, -3, 3);
    for (int i = 0; i < ROWS; i++) /* away from the kink of relu2 */
        s->in[0].x[i] += s->in[0].x[i] < 0 ? -0.01 : 0.01;
    add_output(s, ROWS);
    s->forward = kind < 2 ? sigmoid_forward : relu2_forward;
    s->backward = kind < 2 ? sigmoid_backward : relu2_backward;
}

static void swiglu_forward(scene *s)
{
    OK(ENG(swiglu)(&engine, ROWS, N, s->in[0].x, s->in[1].x, N, s->variant, s->out, N, &error));
}

static void swiglu_backward(scene *s)
{
    OK(ENG(swiglu_bwd)(&engine, ROWS, N, s->in[0].x, s->in[1].x, N, s->variant, s->d_out, N,
                       s->in[0].grad, s->in[1].grad, &error));
}

static void make_swiglu(scene *s, int clamp)
{
    s->variant = clamp;
    add_input(s, "gate", ROWS * N, -2, 2);
    add_input(s, "up", ROWS * N, -2, 2);
    for (int v = 0; v < 2; v++)
        for (int i = 0; i < ROWS * N; i++) /* away from the kinks at +-clamp */
            if (fabs(fabs(s->in[v].x[i]) - 1) < 0.01)
                s->in[v].x[i] = 0.5;
    add_output(s, ROWS * N);
    s->forward = swiglu_forward;
    s->backward = swiglu_backward;
}

static void linear_forward(scene *s)
{
    OK(ENG(linear)(&engine, ROWS, N, 5, s->in[0].x, N, s->in[1].x, s->in[2].x, false, s->out, 5,
                   &error));
}

static void linear_backward(scene *s)
{
    OK(ENG(linear_dx)(&engine, ROWS, N, 5, s->d_out, 5, s->in[1].x, false, s->in[0].grad, N,
                      &error));
    OK(ENG(linear_dw)(&engine, ROWS, N, 5, s->d_out, 5, s->in[0].x, N, s->in[1].grad, s->in[2].grad,
                      &error));
}

static void make_linear(scene *s)
{
    add_input(s, "x", ROWS * N, -1, 1);
    add_input(s, "w", 5 * N, -1, 1);
    add_input(s, "bias", 5, -1, 1);
    add_output(s, ROWS * 5);
    s->forward = linear_forward;
    s->backward = linear_backward;
}

/* ---- recurrences ---------------------------------------------------------------------------- */

static const int64_t delta_cu[] = {0, 18, 19};
static const ckpt_eng_seq delta_seq = {2, delta_cu};
#define DT 19
#define DV 3

/* variant = rule + 3 * form; two value heads share one key head. */
static ckpt_eng_delta delta_dims(const scene *s)
{
    return (ckpt_eng_delta){.rule = (ckpt_eng_rule)(s->variant % 3),
                            .form = (ckpt_eng_form)(s->variant / 3),
                            .H = 1,
                            .HV = 2,
                            .K = KEY,
                            .V = DV};
}

static ENG(delta_in) delta_ins(const scene *s)
{
    return (ENG(delta_in)){.q = s->in[0].x,
                           .k = s->in[1].x,
                           .v = s->in[2].x,
                           .g = s->in[3].x,
                           .erase = s->in[4].x,
                           .state0 = s->in[5].x,
                           .write = s->n_in > 6 ? s->in[6].x : NULL};
}

static void delta_forward(scene *s)
{
    const ckpt_eng_delta d = delta_dims(s);
    const ENG(delta_in) in = delta_ins(s);
    OK(ENG(delta)(&engine, &d, &delta_seq, &in, s->out, s->extra, NULL, &error));
}

static void delta_backward(scene *s)
{
    const ckpt_eng_delta d = delta_dims(s);
    const ENG(delta_in) in = delta_ins(s);
    const ENG(delta_grad) g = {.q = s->in[0].grad,
                               .k = s->in[1].grad,
                               .v = s->in[2].grad,
                               .g = s->in[3].grad,
                               .erase = s->in[4].grad,
                               .state0 = s->in[5].grad,
                               .write = s->n_in > 6 ? s->in[6].grad : NULL};
    real *saved = zeros(ENG(delta_saved_len)(&d, &delta_seq)), *o = zeros(s->n_out);
    OK(ENG(delta)(&engine, &d, &delta_seq, &in, o, NULL, saved, &error));
    OK(ENG(delta_bwd)(&engine, &d, &delta_seq, &in, saved, s->d_out, s->d_extra, &g, &error));
}

static void make_delta(scene *s, int variant)
{
    s->variant = variant;
    const int rule = variant % 3;
    add_input(s, "q", DT * KEY, -1, 1);
    add_input(s, "k", DT * KEY, -0.5, 0.5);
    add_input(s, "v", DT * 2 * DV, -1, 1);
    add_input(s, "g", DT * 2 * (rule == CKPT_ENG_GDN ? 1 : KEY), -1, 0);
    add_input(s, "erase", DT * 2 * (rule == CKPT_ENG_GDN2 ? KEY : 1), 0.1, 1);
    add_input(s, "state0", 2 * 2 * KEY * DV, -1, 1);
    if (rule == CKPT_ENG_GDN2)
        add_input(s, "write", DT * 2 * DV, 0.1, 1);
    add_output(s, DT * 2 * DV);
    s->n_extra = 2 * 2 * KEY * DV;
    s->extra = zeros(s->n_extra);
    s->d_extra = numbers(s->n_extra, -1, 1);
    s->forward = delta_forward;
    s->backward = delta_backward;
}

/* ---- blocks --------------------------------------------------------------------------------- */

static ckpt_eng_mlp mlp_dims(const scene *s)
{
    return (ckpt_eng_mlp){.H = N, .F = 9, .gated = s->variant == 0};
}

static ENG(mlp_params) mlp_params(const scene *s, bool grad)
{
    real *p[3];
    for (int i = 0; i < 3; i++)
        p[i] = i + 1 < s->n_in ? (grad ? s->in[i + 1].grad : s->in[i + 1].x) : NULL;
    return (ENG(mlp_params)){.up = p[0], .down = p[1], .gate = p[2]};
}

static void mlp_forward(scene *s)
{
    const ckpt_eng_mlp m = mlp_dims(s);
    const ENG(mlp_params) p = mlp_params(s, false);
    ENG(mlp_saved) saved;
    const size_t mark = ckpt_eng_mark(&engine);
    OK(ENG(mlp_save)(&engine, &m, ROWS, &saved, &error));
    OK(ENG(mlp)(&engine, &m, ROWS, &p, s->in[0].x, false, s->out, &saved, &error));
    ckpt_eng_drop(&engine, mark);
}

static void mlp_backward(scene *s)
{
    const ckpt_eng_mlp m = mlp_dims(s);
    const ENG(mlp_params) p = mlp_params(s, false), g = mlp_params(s, true);
    ENG(mlp_saved) saved;
    const size_t mark = ckpt_eng_mark(&engine);
    OK(ENG(mlp_save)(&engine, &m, ROWS, &saved, &error));
    OK(ENG(mlp)(&engine, &m, ROWS, &p, s->in[0].x, false, zeros(s->n_out), &saved, &error));
    OK(ENG(mlp_bwd)(&engine, &m, ROWS, &p, &saved, s->in[0].x, s->d_out, false, s->in[0].grad, &g,
                    &error));
    ckpt_eng_drop(&engine, mark);
}

static void make_mlp(scene *s, int variant)
{
    s->variant = variant;
    add_input(s, "x", ROWS * N, 0.5, 1.5);
    add_input(s, "up", 9 * N, 0.2, 1);
    for (int i = 0; i < 9 * N; i++) /* every row of one sign: no sum near the kink of relu2 */
        s->in[1].x[i] *= i / N % 3 == 0 ? -1 : 1;
    add_input(s, "down", 9 * N, -1, 1);
    if (variant == 0)
        add_input(s, "gate", 9 * N, -1, 1);
    add_output(s, ROWS * N);
    s->forward = mlp_forward;
    s->backward = mlp_backward;
}

/* KDA with low ranks, bias and doubled beta; GDN2 and GDN at full rank; GDN2 with gates of key heads. */
#define LD 6
#define LT 19
static int64_t linattn_heads(const scene *s)
{
    return s->variant == 3 ? 2 : 1;
}

static ckpt_eng_linattn linattn_dims(const scene *s)
{
    static const ckpt_eng_rule rules[] = {CKPT_ENG_KDA, CKPT_ENG_GDN2, CKPT_ENG_GDN, CKPT_ENG_GDN2};
    const bool gdn = s->variant != 0;
    return (ckpt_eng_linattn){
        .delta = {.rule = rules[s->variant],
                  .H = linattn_heads(s),
                  .HV = 2 * linattn_heads(s),
                  .K = KEY,
                  .V = DV},
        .key_gates = s->variant == 3,
        .D = LD,
        .W = 3,
        .f_rank = gdn ? 0 : 2,
        .z_rank = gdn ? 0 : 3,
        .bound = gdn ? 0 : -5,
        .erase_scale = gdn ? 0 : 2,
        .act = gdn ? CKPT_ENG_SILU : CKPT_ENG_SIGMOID,
        .eps = 1e-3,
        .l2_eps = 1e-2
    };
}

static ENG(linattn_params) linattn_params(const scene *s, bool grad)
{
    ENG(linattn_params) p = {0};
    const struct {
        const char *name;
        real **at;
    } all[] = {
        {"q",       &p.q      },
        {"k",       &p.k      },
        {"v",       &p.v      },
        {"conv_q",  &p.conv_q },
        {"conv_k",  &p.conv_k },
        {"conv_v",  &p.conv_v },
        {"f",       &p.f      },
        {"f_a",     &p.f_a    },
        {"f_b",     &p.f_b    },
        {"z",       &p.z      },
        {"z_a",     &p.z_a    },
        {"z_b",     &p.z_b    },
        {"z_bias",  &p.z_bias },
        {"erase",   &p.erase  },
        {"write",   &p.write  },
        {"A_log",   &p.A_log  },
        {"dt_bias", &p.dt_bias},
        {"norm",    &p.norm   },
        {"out",     &p.out    }
    };
    for (int i = 1; i < s->n_in; i++)
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            if (strcmp(all[k].name, s->in[i].name) == 0)
                *all[k].at = grad ? s->in[i].grad : s->in[i].x;
    return p;
}

static void linattn_run(scene *s, bool back)
{
    const ckpt_eng_linattn b = linattn_dims(s);
    const ENG(linattn_params) p = linattn_params(s, false), g = linattn_params(s, true);
    ENG(linattn_saved) saved;
    const size_t mark = ckpt_eng_mark(&engine);
    OK(ENG(linattn_save)(&engine, &b, &delta_seq, &saved, &error));
    OK(ENG(linattn)(&engine, &b, &delta_seq, &p, s->in[0].x, false, s->out, NULL, &saved, &error));
    if (back)
        OK(ENG(linattn_bwd)(&engine, &b, &delta_seq, &p, &saved, s->in[0].x, s->d_out, true,
                            s->in[0].grad, &g, &error));
    ckpt_eng_drop(&engine, mark);
}

static void linattn_forward(scene *s)
{
    linattn_run(s, false);
}

static void linattn_backward(scene *s)
{
    linattn_run(s, true);
}

static void make_linattn(scene *s, int variant)
{
    s->variant = variant;
    const int64_t H = linattn_heads(s), QK = H * KEY, VD = 2 * H * DV;
    const int64_t gates = variant == 3 ? H : 2 * H,
                  HK = variant == 2 ? gates : gates * KEY; /* GDN: one decay a head */
    add_input(s, "x", LT * LD, -1, 1);
    add_input(s, "q", QK * LD, -1, 1);
    add_input(s, "k", QK * LD, -1, 1);
    add_input(s, "v", VD * LD, -1, 1);
    add_input(s, "conv_q", QK * 3, -1, 1);
    add_input(s, "conv_k", QK * 3, -1, 1);
    add_input(s, "conv_v", VD * 3, -1, 1);
    if (variant != 0) {
        add_input(s, "f", HK * LD, -1, 1);
        add_input(s, "z", VD * LD, -1, 1);
        add_input(s, "erase", HK * LD, -1, 1);
        if (variant != 2)
            add_input(s, "write", VD * LD, -1, 1);
    } else {
        add_input(s, "f_a", 2 * LD, -1, 1);
        add_input(s, "f_b", HK * 2, -1, 1);
        add_input(s, "z_a", 3 * LD, -1, 1);
        add_input(s, "z_b", VD * 3, -1, 1);
        add_input(s, "z_bias", VD, -1, 1);
        add_input(s, "erase", 2 * LD, -1, 1);
    }
    add_input(s, "A_log", gates, -1, 1);
    add_input(s, "dt_bias", HK, -1, 1);
    add_input(s, "norm", DV, 0.5, 1.5);
    add_input(s, "out", LD * VD, -1, 1);
    add_output(s, LT * LD);
    s->forward = linattn_forward;
    s->backward = linattn_backward;
}

/* ---- layouts of KDA ------------------------------------------------------------------------- */

/* W [n, D] = b [n, r] a [r, D]. */
static real *fold(const real *a, const real *b, int64_t r, int64_t n)
{
    real *w = zeros(n * LD);
    ENG(gemm)(false, false, n, LD, r, 1, b, r, a, LD, 0, w, LD);
    return w;
}

/* What the factors' gradients are, given that of their product: da = b^T dw, db = dw a^T. */
static void check_factors(const char *what, const real *a, const real *b, const real *dw, int64_t r,
                          int64_t n, const real *da, const real *db)
{
    real *want_a = zeros(r * LD), *want_b = zeros(n * r);
    ENG(gemm)(true, false, r, LD, n, 1, b, r, dw, LD, 0, want_a, LD);
    ENG(gemm)(false, true, n, r, LD, 1, dw, LD, a, LD, 0, want_b, r);
    CLOSE(what, da, want_a, r * LD, 1e-12); /* another order of the same sums */
    CLOSE(what, db, want_b, n * r, 1e-12);
}

typedef struct kda_run {
    ckpt_eng_linattn b;
    ENG(linattn_params) p, g;
    real *y, *dx;
} kda_run;

static void kda_execute(kda_run *r, const scene *s)
{
    ENG(linattn_saved) saved;
    r->y = zeros(s->n_out);
    r->dx = zeros(s->in[0].n);
    OK(ENG(linattn_save)(&engine, &r->b, &delta_seq, &saved, &error));
    OK(ENG(linattn)(&engine, &r->b, &delta_seq, &r->p, s->in[0].x, false, r->y, NULL, &saved,
                    &error));
    OK(ENG(linattn_bwd)(&engine, &r->b, &delta_seq, &r->p, &saved, s->in[0].x, s->d_out, false,
                        r->dx, &r->g, &error));
}

/* Loop index: 1 the decay, 2 the output gate, 3 both, made of full matrices from their factors. */
START_TEST(kda_of_factors_is_kda_of_their_product)
{
    enum { RF = 2, RZ = 3, NF = 2 * KEY, NZ = 2 * DV };
    scene s = {0}, other = {0};
    make_linattn(&s, 0);
    make_linattn(&other, 0);
    kda_run low = {linattn_dims(&s), linattn_params(&s, false), linattn_params(&s, true), NULL,
                   NULL};
    kda_run full = {low.b, low.p, linattn_params(&other, true), NULL, NULL};
    if (_i & 1) {
        full.b.f_rank = 0;
        full.p.f = fold(low.p.f_a, low.p.f_b, RF, NF);
        full.g.f = zeros(NF * LD);
    }
    if (_i & 2) {
        full.b.z_rank = 0;
        full.p.z = fold(low.p.z_a, low.p.z_b, RZ, NZ);
        full.g.z = zeros(NZ * LD);
    }
    kda_execute(&low, &s);
    kda_execute(&full, &s);
    CLOSE("y", low.y, full.y, s.n_out, 1e-12);
    CLOSE("dx", low.dx, full.dx, s.in[0].n, 1e-12);
    CLOSE("dA_log", low.g.A_log, full.g.A_log, 2, 1e-12);
    CLOSE("dq", low.g.q, full.g.q, KEY * LD, 1e-12);
    if (_i & 1)
        check_factors("decay", low.p.f_a, low.p.f_b, full.g.f, RF, NF, low.g.f_a, low.g.f_b);
    if (_i & 2)
        check_factors("gate", low.p.z_a, low.p.z_b, full.g.z, RZ, NZ, low.g.z_a, low.g.z_b);
}
END_TEST

/* Every one of H heads of n numbers twice. */
static real *twice(const real *x, int64_t H, int64_t n)
{
    real *y = zeros(2 * H * n);
    for (int64_t i = 0; i < 2 * H; i++)
        memcpy(y + i * n, x + i / 2 * n, (size_t)n * sizeof *y);
    return y;
}

static real *sum_of_two(const real *x, int64_t H, int64_t n)
{
    real *y = zeros(H * n);
    for (int64_t i = 0; i < 2 * H * n; i++)
        y[i / (2 * n) * n + i % n] += x[i];
    return y;
}

/* Gates of key heads in the chunk form are those of value heads that are equal in a group, token by
 * token; their gradients are the sums. */
START_TEST(gates_of_key_heads_are_equal_ones_of_value_heads)
{
    enum { H = 2, NG = H * KEY };
    scene s = {0}, other = {0};
    make_linattn(&s, 3);
    make_linattn(&other, 3);
    kda_run keys = {linattn_dims(&s), linattn_params(&s, false), linattn_params(&s, true), NULL,
                    NULL};
    kda_run values = {keys.b, keys.p, linattn_params(&other, true), NULL, NULL};
    ck_assert_int_eq(keys.b.delta.form, CKPT_ENG_CHUNK);
    values.b.key_gates = false;
    values.b.delta.form = CKPT_ENG_STEP;
    values.p.f = twice(keys.p.f, H, KEY * LD);
    values.p.erase = twice(keys.p.erase, H, KEY * LD);
    values.p.A_log = twice(keys.p.A_log, H, 1);
    values.p.dt_bias = twice(keys.p.dt_bias, H, KEY);
    values.g.f = zeros(2 * NG * LD);
    values.g.erase = zeros(2 * NG * LD);
    values.g.A_log = zeros(2 * H);
    values.g.dt_bias = zeros(2 * NG);
    kda_execute(&keys, &s);
    kda_execute(&values, &s);
    CLOSE("y", keys.y, values.y, s.n_out, 1e-12);
    CLOSE("dx", keys.dx, values.dx, s.in[0].n, 1e-12);
    CLOSE("df", keys.g.f, sum_of_two(values.g.f, H, KEY * LD), NG * LD, 1e-12);
    CLOSE("db", keys.g.erase, sum_of_two(values.g.erase, H, KEY * LD), NG * LD, 1e-12);
    CLOSE("dA_log", keys.g.A_log, sum_of_two(values.g.A_log, H, 1), H, 1e-12);
    CLOSE("ddt_bias", keys.g.dt_bias, sum_of_two(values.g.dt_bias, H, KEY), NG, 1e-12);
    CLOSE("dq", keys.g.q, values.g.q, NG * LD, 1e-12);
}
END_TEST

/* ---- tests ---------------------------------------------------------------------------------- */

START_TEST(norm_backward_is_the_derivative)
{
    static const int kinds[][2] = {
        {0, 0},
        {0, 1},
        {0, 2},
        {1, 0},
        {1, 1},
        {2, 0}
    };
    scene s = {0};
    make_norm(&s, kinds[_i][0], kinds[_i][1]);
    check_scene(&s);
}
END_TEST

START_TEST(conv_backward_is_the_derivative)
{
    scene s = {0};
    make_conv(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(gate_backward_is_the_derivative)
{
    scene s = {0};
    make_gate(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(pointwise_backward_is_the_derivative)
{
    scene s = {0};
    make_pointwise(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(swiglu_backward_is_the_derivative)
{
    scene s = {0};
    make_swiglu(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(linear_backward_is_the_derivative)
{
    scene s = {0};
    make_linear(&s);
    check_scene(&s);
}
END_TEST

START_TEST(delta_backward_is_the_derivative)
{
    scene s = {0};
    make_delta(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(mlp_backward_is_the_derivative)
{
    scene s = {0};
    make_mlp(&s, _i);
    check_scene(&s);
}
END_TEST

START_TEST(linattn_backward_is_the_derivative)
{
    scene s = {0};
    make_linattn(&s, _i);
    check_scene(&s);
}
END_TEST

Suite *suite_engine_grad(void);
Suite *suite_engine_grad(void)
{
    Suite *s = suite_create("engine_grad");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, norm_backward_is_the_derivative, 0, 6);
    tcase_add_loop_test(tc, conv_backward_is_the_derivative, 0, 2);
    tcase_add_loop_test(tc, gate_backward_is_the_derivative, 0, 2);
    tcase_add_loop_test(tc, pointwise_backward_is_the_derivative, 0, 3);
    tcase_add_loop_test(tc, swiglu_backward_is_the_derivative, 0, 2);
    tcase_add_test(tc, linear_backward_is_the_derivative);
    tcase_add_loop_test(tc, delta_backward_is_the_derivative, 0, 6);
    tcase_add_loop_test(tc, mlp_backward_is_the_derivative, 0, 2);
    tcase_add_loop_test(tc, linattn_backward_is_the_derivative, 0, 4);
    tcase_add_test(tc, gates_of_key_heads_are_equal_ones_of_value_heads);
    tcase_add_loop_test(tc, kda_of_factors_is_kda_of_their_product, 1, 4);
    suite_add_tcase(s, tc);
    return s;
}
