/* Straight-through gradients of the quantised prefill are the derivatives of the prefill with its rounding errors
 * held fixed, as the oracle checks its own: the engine's forward pass is compiled here once more with every
 * rounding replaced by "add the error that it made the first time", which is smooth, and its central
 * differences along random directions are compared with what ENG(kda_quant_bwd) says. f64, one thread, so that
 * roundings come in the same order every time. */
#define CKPT_REAL 64
#include "engine_test.h"

#include "quant/internal.h"
#include "quant_policies.h"

Suite *suite_engine_ste(void);

/* ---- roundings that are remembered ---------------------------------------------------------------- */

/* The library's. */
static void (*const round_qdq)(ckpt_quant_kind, float, int64_t, int64_t, const real *,
                               real *) = ENG(quant_qdq);
static void (*const round_state)(const ckpt_quant *, int64_t, int64_t, real *) = ENG(quant_state);
static real (*const round_one)(ckpt_quant_dtype, real) = ENG(quant_round);
static real (*const multiply_one)(const ckpt_quant *, ckpt_quant_site, int64_t, const real *,
                                  const real *) = ENG(quant_dot);
static void (*const multiply)(const ckpt_quant *, ckpt_quant_site, int64_t, int64_t, int64_t,
                              const real *, const real *, real *, real *) = ENG(quant_product);
static void (*const exponentials)(const ckpt_quant *, bool, int64_t, const real *,
                                  real *) = ENG(quant_exp);

static const ckpt_quant exact; /* no schedule: sums are not rounded */
static struct {
    double *error;
    size_t n, cap, next;
    bool replay;
} kept;

/* y is x rounded; or, when replaying, receives x and the error of that time. */
static void keep_errors(int64_t n, const real *x, real *y)
{
    const size_t count = (size_t)n;
    if (!kept.replay && kept.n + count > kept.cap) {
        kept.cap = 2 * (kept.n + count);
        kept.error = realloc(kept.error, kept.cap * sizeof *kept.error);
        ck_assert_ptr_nonnull(kept.error);
    }
    if (kept.replay)
        ck_assert_uint_le(kept.next + count, kept.n);
    for (size_t i = 0; i < count; i++)
        if (kept.replay)
            y[i] = x[i] + kept.error[kept.next++];
        else
            kept.error[kept.n++] = y[i] - x[i];
}

static void frozen_qdq(ckpt_quant_kind kind, float global, int64_t rows, int64_t width,
                       const real *x, real *y)
{
    real *before = copy_of(x, rows * width);
    round_qdq(kind, global, rows, width, before, y);
    if (kind == CKPT_QUANT_FP8 || kind == CKPT_QUANT_NVFP4)
        keep_errors(rows * width, before, y);
}

static void frozen_state(const ckpt_quant *q, int64_t K, int64_t V, real *x)
{
    real *before = copy_of(x, K * V);
    round_state(q, K, V, x);
    if (q->kind[CKPT_HANDLE_STATE] != CKPT_QUANT_OFF)
        keep_errors(K * V, before, x);
}

static void frozen_boundary(ckpt_quant_dtype dtype, int64_t n, real *x)
{
    for (int64_t i = 0; i < n && dtype != CKPT_QUANT_NO_ROUNDING; i++) {
        const real before = x[i];
        x[i] = round_one(dtype, before);
        keep_errors(1, &before, &x[i]);
    }
}

static real frozen_dot(const ckpt_quant *q, ckpt_quant_site site, int64_t k, const real *a,
                       const real *b)
{
    const ckpt_quant_dtype dtype = q->accumulator[site];
    const int64_t block =
        dtype == CKPT_QUANT_NO_ROUNDING || q->block[site] > k ? k : q->block[site];
    real sum = 0;
    for (int64_t lo = 0; lo < k; lo += block) {
        sum += multiply_one(&exact, site, block < k - lo ? block : k - lo, a + lo, b + lo);
        frozen_boundary(dtype, 1, &sum);
    }
    return sum;
}

static void frozen_product(const ckpt_quant *q, ckpt_quant_site site, int64_t m, int64_t n,
                           int64_t k, const real *a, const real *b, real *c, real *tmp)
{
    if (q->accumulator[site] == CKPT_QUANT_NO_ROUNDING)
        multiply(&exact, site, m, n, k, a, b, c, tmp);
    else
        for (int64_t i = 0; i < m * n; i++)
            c[i] = frozen_dot(q, site, k, a + i / n * k, b + i % n * k);
}

static void frozen_exp(const ckpt_quant *q, bool as_it_is, int64_t n, const real *x, real *y)
{
    exponentials(q, true, n, x, y);
    if (!as_it_is)
        frozen_boundary(q->rounding[CKPT_BOUNDARY_GATE_EXP], n, y);
}

static ckpt_status frozen_check(const ckpt_quant *, const ckpt_eng_delta *, const ckpt_eng_seq *,
                                ckpt_err *);
static ckpt_status frozen_begin(ckpt_eng *, ENG(quant_job) *, int64_t, ckpt_err *);
static void frozen_load(const ENG(quant_job) *, const quant_chunk *, int64_t, real *,
                        ENG(quant_rows) *);
static ckpt_status frozen_save(ckpt_eng *, const ckpt_quant *, const ckpt_eng_delta *,
                               const ckpt_eng_seq *, ENG(quant_saved) *, ckpt_err *);
static ckpt_status frozen_kda(ckpt_eng *, const ckpt_quant *, const ckpt_eng_delta *,
                              const ckpt_eng_seq *, const ENG(delta_in) *, real *, real *,
                              const ENG(quant_saved) *, ckpt_quant_report *, ckpt_err *);

#define ckpt_eng_quant_qdq_f64 frozen_qdq
#define ckpt_eng_quant_state_f64 frozen_state
#define ckpt_eng_quant_boundary_f64 frozen_boundary
#define ckpt_eng_quant_dot_f64 frozen_dot
#define ckpt_eng_quant_product_f64 frozen_product
#define ckpt_eng_quant_exp_f64 frozen_exp
#define ckpt_eng_quant_check_f64 frozen_check
#define ckpt_eng_quant_begin_f64 frozen_begin
#define ckpt_eng_quant_load_f64 frozen_load
#define ckpt_eng_kda_quant_save_f64 frozen_save
#define ckpt_eng_kda_quant_f64 frozen_kda
#define memory part_of_state /* a local there, the arena here */
#include "../engine/quant/forward.c"
#undef memory
#undef ckpt_eng_kda_quant_save_f64
#undef ckpt_eng_kda_quant_f64

/* ---- differences ---------------------------------------------------------------------------------- */

enum { Q, KEY, VALUE, G, BETA, STATE0, INPUTS };

typedef struct scene {
    ckpt_eng_delta d;
    ckpt_eng_seq seq;
    int64_t n[INPUTS];
    real *in[INPUTS], *grad[INPUTS];
    real *o, *state, *d_o, *d_state;
} scene;

static scene make_scene(void)
{
    static const int64_t cu[] = {0, 3, 66};
    scene s = {
        .d = {.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = 16, .V = 16},
          .seq = {2,             cu           }
    };
    const int64_t T = cu[2], H = s.d.H, HV = s.d.HV, K = s.d.K, V = s.d.V;
    const int64_t n[INPUTS] = {T * H * K,  T * H * K, T * HV * V,
                               T * HV * K, T * HV,    2 * HV * K * V};
    const double lo[INPUTS] = {-0.4, -0.4, -1, -0.3, 0, -0.2},
                 hi[INPUTS] = {0.4, 0.4, 1, 0, 1, 0.2};
    for (int i = 0; i < INPUTS; i++) {
        s.n[i] = n[i];
        s.in[i] = numbers(n[i], lo[i], hi[i]);
        s.grad[i] = zeros(n[i]);
    }
    s.o = zeros(n[VALUE]);
    s.state = zeros(n[STATE0]);
    s.d_o = numbers(n[VALUE], -1, 1);
    s.d_state = numbers(n[STATE0], -1, 1);
    return s;
}

static ENG(delta_in) inputs_of(const scene *s)
{
    return (ENG(delta_in)){.q = s->in[Q],
                           .k = s->in[KEY],
                           .v = s->in[VALUE],
                           .g = s->in[G],
                           .erase = s->in[BETA],
                           .state0 = s->in[STATE0]};
}

/* What the gradients are of, the errors kept or put back. */
static double smooth(scene *s, const ckpt_quant *q, bool replay)
{
    const size_t mark = ckpt_eng_mark(&engine);
    const ENG(delta_in) in = inputs_of(s);
    ENG(quant_saved) saved;
    double sum = 0;
    kept.replay = replay;
    kept.next = 0;
    OK(frozen_save(&engine, q, &s->d, &s->seq, &saved, &error));
    OK(frozen_kda(&engine, q, &s->d, &s->seq, &in, s->o, s->state, &saved, NULL, &error));
    ck_assert(!replay || kept.next == kept.n); /* no rounding more or less */
    for (int64_t i = 0; i < s->n[VALUE]; i++)
        sum += s->o[i] * s->d_o[i];
    for (int64_t i = 0; i < s->n[STATE0]; i++)
        sum += s->state[i] * s->d_state[i];
    ckpt_eng_drop(&engine, mark);
    return sum;
}

static void gradients(scene *s, const ckpt_quant *q)
{
    const size_t mark = ckpt_eng_mark(&engine);
    const ENG(delta_in) in = inputs_of(s);
    const ENG(delta_grad) g = {.q = s->grad[Q],
                               .k = s->grad[KEY],
                               .v = s->grad[VALUE],
                               .g = s->grad[G],
                               .erase = s->grad[BETA],
                               .state0 = s->grad[STATE0]};
    ENG(quant_saved) saved;
    OK(ENG(kda_quant_save)(&engine, q, &s->d, &s->seq, &saved, &error));
    OK(ENG(kda_quant)(&engine, q, &s->d, &s->seq, &in, s->o, s->state, &saved, NULL, &error));
    OK(ENG(kda_quant_bwd)(&engine, q, &s->d, &s->seq, &in, &saved, s->d_o, s->d_state, &g, &error));
    ckpt_eng_drop(&engine, mark);
}

/* The oracle's five, the last with roundings of elements as there; and all kinds at once. */
static const char *const policies[] = {
    "off",   "fp8_operands", "nvfp4_operands", "fp16_accumulation", "fp8_with_state",
    "mixed", "approximate"};

static ckpt_quant policy_at(int i)
{
    ckpt_quant q = quant_policy(policies[i]);
    if (strcmp(policies[i], "fp8_with_state") == 0) {
        q.block_v = 16;
        q.rounding[CKPT_BOUNDARY_VALUE_RESIDUAL] = CKPT_QUANT_BF16;
        q.rounding[CKPT_BOUNDARY_GATE_EXP] = CKPT_QUANT_F16;
        q.rounding[CKPT_BOUNDARY_GATE_PREFIX] = CKPT_QUANT_F32;
    }
    return q;
}

START_TEST(straight_through_gradients_are_those_with_the_rounding_errors_fixed)
{
    static const char *const names[INPUTS] = {"q", "k", "v", "g", "beta", "s0"};
    const ckpt_quant q = policy_at(_i);
    const double h = 1e-5;
    scene s = make_scene();
    engine.threads = 1;
    gradients(&s, &q);
    const real *o = copy_of(s.o, s.n[VALUE]);
    (void)smooth(&s, &q, false);
    CLOSE("o of the same forward pass", s.o, o, s.n[VALUE], 1e-9);
    ck_assert((kept.n > 0) == (strcmp(policies[_i], "off") != 0 && q.solve_factors == 0));
    for (int i = 0; i < INPUTS; i++) {
        const real *at = copy_of(s.in[i], s.n[i]), *step = numbers(s.n[i], -1, 1);
        double value[2], want = 0;
        for (int side = 0; side < 2; side++) {
            for (int64_t k = 0; k < s.n[i]; k++)
                s.in[i][k] = at[k] + (side == 0 ? h : -h) * step[k];
            value[side] = smooth(&s, &q, true);
        }
        for (int64_t k = 0; k < s.n[i]; k++)
            want += s.grad[i][k] * step[k];
        memcpy(s.in[i], at, (size_t)s.n[i] * sizeof *at);
        const double slope = (value[0] - value[1]) / (2 * h), size = fmax(fabs(want), 1);
        ck_assert_msg(fabs(slope - want) <= 1e-6 * size, "%s: d%s along a direction: %.12g, %.12g",
                      policies[_i], names[i], want, slope);
    }
    free(kept.error);
}
END_TEST

Suite *suite_engine_ste(void)
{
    Suite *s = suite_create("engine_ste");
    TCase *t = tcase_create("differences");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_loop_test(t, straight_through_gradients_are_those_with_the_rounding_errors_fixed, 0,
                        (int)(sizeof policies / sizeof *policies));
    suite_add_tcase(s, t);
    return s;
}
