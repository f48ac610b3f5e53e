/* Muon against torch.optim.Muon and emerging_optimizers 0.3 (tests/data/train.safetensors, written by
 * tests/peers/gen_train.py), against the same iteration in double on matrices of several tiles, and
 * against its promises: bits do not depend on threads or on what else is in a batch. */
#define CKPT_REAL 32
#include "engine_test.h"

#include "train/optim.h"

Suite *suite_train_muon(void);

static void open_golden(void)
{
    golden_set_up("tests/data/train.safetensors");
}

/* ---- peers ------------------------------------------------------------------------------------ */

typedef struct peer_case {
    const char *name;
    int64_t rows, cols;
    double momentum, wd;
    bool nesterov, bf16;
    ckpt_muon_set set;
    int steps;
    ckpt_muon_scale scale;
    double extra;
} peer_case;

#define TORCH(name, rows, cols)                                                                    \
    {                                                                                              \
        "torch_" name, rows, cols, 0.95, 0.1, true, true, CKPT_MUON_SIMPLE, 5,                     \
            CKPT_MUON_SHAPE_SCALING, 1                                                             \
    }
#define MEGATRON(name, rows, cols)                                                                 \
    {                                                                                              \
        "megatron_" name, rows, cols, 0.9, 0.01, false, true, CKPT_MUON_QUINTIC, 5,                \
            CKPT_MUON_SPECTRAL, 1                                                                  \
    }
#define EXACT(name, rows, cols)                                                                    \
    {                                                                                              \
        "exact_" name, rows, cols, 0.9, 0.1, true, false, CKPT_MUON_QUINTIC, 5,                    \
            CKPT_MUON_SPECTRAL, 1                                                                  \
    }
#define SET(name, set, steps)                                                                      \
    {                                                                                              \
        "set_" name, 8, 20, 0.9, 0.1, false, false, set, steps, CKPT_MUON_UNIT_RMS_NORM, 0.2       \
    }

static const peer_case peers[] = {
    TORCH("wide", 8, 20),
    TORCH("tall", 20, 8),
    TORCH("square", 13, 13),
    TORCH("row", 1, 9),
    MEGATRON("wide", 8, 20),
    MEGATRON("tall", 20, 8),
    MEGATRON("square", 13, 13),
    MEGATRON("row", 1, 9),
    EXACT("wide", 8, 20),
    EXACT("tall", 20, 8),
    EXACT("square", 13, 13),
    EXACT("row", 1, 9),
    SET("simple", CKPT_MUON_SIMPLE, 5),
    SET("polar_express", CKPT_MUON_POLAR_EXPRESS, 9),
    SET("cans", CKPT_MUON_CANS, 5),
    SET("aol", CKPT_MUON_AOL, 8),
    SET("deepseekv4", CKPT_MUON_DEEPSEEK_V4, 12),
    {"torch_match", 20, 8, 0.9, 0.1, false, true, CKPT_MUON_SIMPLE, 5, CKPT_MUON_SPECTRAL, 0.2},
};

/* The update of every step, (w after - decayed w before), against the peer's. In f32 the iteration
 * multiplies rounding by up to its slope at zero, 4^5 at most for directions that start small: 2^-24
 * * 1024 = 6e-5. In bf16, sums in another order flip roundings of 2^-9; five iterations around values
 * of order 1 leave a few of those, 1e-2. PyTorch rounds to bf16 before it normalises, so its matrix
 * enters up to 2^-8 larger or smaller, and the simple coefficients do not settle: 5e-2. */
START_TEST(muon_three_steps_follow_peer)
{
    const peer_case *c = &peers[_i];
    static const double rates[] = {1.0, 0.7, 2.0};
    const int64_t n = c->rows * c->cols, dims[] = {c->rows, c->cols};
    float *w = golden_of("muon", c->name, "w0", n), *m = zeros(n);
    const float *g = golden_of("muon", c->name, "g", 3 * n);
    const float *want_w = golden_of("muon", c->name, "w", 3 * n);
    const float *want_m = golden_of("muon", c->name, "m", 3 * n);
    ckpt_optim_slot slot;
    ckpt_optim o = {.config = ckpt_optim_defaults(CKPT_OPTIM_MUON), .slots = &slot, .n_slots = 1};
    o.config.momentum = c->momentum;
    o.config.nesterov = c->nesterov;
    o.config.muon_bf16 = c->bf16;
    o.config.set = c->set;
    o.config.steps = c->steps;
    o.config.scale = c->scale;
    o.config.extra = c->extra;
    ckpt_optim_slot_set(&slot, &o.config, "blocks.0.mlp.up.weight", 2, dims, 0, false, 0);
    ck_assert(slot.muon && slot.decay);
    const double limit = !c->bf16 ? 6e-5 : strncmp(c->name, "torch", 5) == 0 ? 5e-2 : 1e-2;
    float *ours = zeros(n), *theirs = zeros(n);
    for (int t = 0; t < 3; t++) {
        const ckpt_optim_step s = {.lr = rates[t], .wd = c->wd, .grad_scale = 1, .t = t + 1};
        const float *before = t == 0 ? copy_of(w, n) : want_w + (t - 1) * n;
        const float decay = (float)(1 - rates[t] * c->wd);
        memcpy(w, before, (size_t)n * sizeof *w);
        OK(ckpt_optim_muon(&engine, &o, &s, 0, 1, w, m, g + t * n, &error));
        for (int64_t i = 0; i < n; i++) {
            ours[i] = w[i] - before[i] * decay;
            theirs[i] = want_w[t * n + i] - before[i] * decay;
        }
        CLOSE("momentum", m, want_m + t * n, n, 2e-7);
        CLOSE("update", ours, theirs, n, limit);
    }
}
END_TEST

/* ---- the iteration in double ------------------------------------------------------------------ */

static const double quintic[5][3] = {
    {4.0848, -6.8946, 2.9270},
    {3.9505, -6.3029, 2.6377},
    {3.7418, -5.5913, 2.3037},
    {2.8769, -3.1427, 1.2046},
    {2.8366, -3.0525, 1.2012}
};

/* out [m, n] = a [m, k] b, b [k, n] or, transposed, [n, k]. */
static void multiply(int64_t m, int64_t n, int64_t k, const double *a, const double *b, bool tb,
                     double *out)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += a[i * k + p] * (tb ? b[j * k + p] : b[p * n + j]);
            out[i * n + j] = sum;
        }
}

static void orthogonalise_double(int64_t r, int64_t c, double *x)
{
    double *a = calloc((size_t)(r * r), sizeof *a), *b = calloc((size_t)(r * r), sizeof *b);
    double *y = calloc((size_t)(r * c), sizeof *y), norm = 0;
    for (int64_t i = 0; i < r * c; i++)
        norm += x[i] * x[i];
    for (int64_t i = 0; i < r * c; i++)
        x[i] /= sqrt(norm);
    for (int s = 0; s < 5; s++) {
        multiply(r, r, c, x, x, true, a);
        multiply(r, r, r, a, a, false, b);
        for (int64_t i = 0; i < r * r; i++)
            b[i] = quintic[s][1] * a[i] + quintic[s][2] * b[i];
        multiply(r, c, r, b, x, false, y);
        for (int64_t i = 0; i < r * c; i++)
            x[i] = quintic[s][0] * x[i] + y[i];
    }
    free(a);
    free(b);
    free(y);
}

static const int64_t shapes[][2] = {
    {193, 200},
    {200, 193},
    {192, 384},
    {1,   1  },
    {5,   300},
    {300, 5  }
};

START_TEST(orthogonalise_matches_double_on_several_tiles)
{
    const int64_t rows = shapes[_i][0], cols = shapes[_i][1], n = rows * cols;
    float *x = numbers(n, -1, 1), *want = zeros(n);
    double *ref = calloc((size_t)n, sizeof *ref);
    const bool turn = rows > cols;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            ref[turn ? j * rows + i : i * cols + j] = (double)x[i * cols + j];
    orthogonalise_double(turn ? cols : rows, turn ? rows : cols, ref);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            want[i * cols + j] = (float)ref[turn ? j * rows + i : i * cols + j];
    free(ref);
    const ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    const ckpt_muon_matrix matrix = {rows, cols, x};
    OK(ckpt_muon_orthogonalise(&engine, &c, &matrix, 1, &error));
    CLOSE("orthogonalised", x, want, n, 6e-5);
}
END_TEST

START_TEST(orthogonalise_batches_and_threads_give_the_same_bits)
{
    enum { N = 70 };
    const ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    ckpt_muon_matrix all[N];
    float *alone[N];
    for (int i = 0; i < N; i++) { /* more than one batch of 64, some empty */
        all[i].rows = i % 9 == 8 ? 0 : 1 + i * 7 % 40;
        all[i].cols = 1 + i * 11 % 50;
        if (i == 33) {
            all[i].rows = 250;
            all[i].cols = 210;
        }
        all[i].x = numbers(all[i].rows * all[i].cols, -1, 1);
        alone[i] = copy_of(all[i].x, all[i].rows * all[i].cols);
    }
    engine.threads = 3;
    ckpt_eng dry = engine;
    dry.dry = true;
    dry.peak = dry.used = 0;
    OK(ckpt_muon_orthogonalise(&dry, &c, all, N, &error));
    ck_assert_uint_gt(dry.peak, 0);
    OK(ckpt_eng_reserve(&engine, dry.peak, &error)); /* exactly what the plan said */
    OK(ckpt_muon_orthogonalise(&engine, &c, all, N, &error));
    engine.threads = 1;
    for (int i = 0; i < N; i++) {
        const ckpt_muon_matrix one = {all[i].rows, all[i].cols, alone[i]};
        OK(ckpt_muon_orthogonalise(&engine, &c, &one, 1, &error));
        ck_assert_msg(same_bits(alone[i], all[i].x, one.rows * one.cols), "matrix %d", i);
    }
}
END_TEST

START_TEST(orthogonalise_zero_stays_zero_and_nan_stays_nan)
{
    const ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    float *x = zeros(6);
    const ckpt_muon_matrix m = {2, 3, x};
    OK(ckpt_muon_orthogonalise(&engine, &c, &m, 1, &error));
    for (int i = 0; i < 6; i++)
        ck_assert(x[i] == 0);
    x[4] = NAN;
    OK(ckpt_muon_orthogonalise(&engine, &c, &m, 1, &error));
    ck_assert(isnan(x[0]) && isnan(x[5]));
    const ckpt_muon_matrix bad = {-1, 3, x};
    ck_assert_int_eq(ckpt_muon_orthogonalise(&engine, &c, &bad, 1, &error), CKPT_E_USAGE);
    ck_assert_str_eq(error.text, "muon: a matrix of -1 x 3");
}
END_TEST

START_TEST(orthogonalise_small_arena_is_an_error)
{
    const ckpt_optim_config c = ckpt_optim_defaults(CKPT_OPTIM_MUON);
    const ckpt_muon_matrix m = {20, 30, zeros(600)};
    OK(ckpt_eng_reserve(&engine, 1000, &error));
    ck_assert_int_eq(ckpt_muon_orthogonalise(&engine, &c, &m, 1, &error), CKPT_E_NOMEM);
}
END_TEST

/* ---- a whole step ----------------------------------------------------------------------------- */

START_TEST(muon_takes_matrices_and_leaves_the_rest_to_adamw)
{
    static const struct {
        const char *name;
        int rank;
        int64_t dims[3];
        bool frozen, muon;
    } params[] = {
        {"blocks.0.kda.A_log",         1, {4, 0, 0}, false, false},
        {"blocks.0.kda.conv_q.weight", 3, {8, 1, 4}, false, false},
        {"blocks.0.kda.q.weight",      2, {8, 6},    false, true },
        {"blocks.1.moe.router.bias",   1, {5},       true,  false},
        {"blocks.1.moe.router.weight", 2, {5, 6},    false, true },
        {"embed.weight",               2, {9, 6},    false, false},
        {"head.weight",                2, {9, 6},    false, false},
    };
    enum { N = sizeof params / sizeof *params };
    ckpt_optim_slot slots[N];
    ckpt_optim o = {.config = ckpt_optim_defaults(CKPT_OPTIM_MUON), .slots = slots, .n_slots = N};
    int64_t n = 0;
    for (int i = 0; i < N; i++) {
        ckpt_optim_slot_set(&slots[i], &o.config, params[i].name, params[i].rank, params[i].dims, 0,
                            params[i].frozen, n);
        ck_assert_msg(slots[i].muon == params[i].muon, "%s", params[i].name);
        n += slots[i].n;
    }
    float *w = numbers(n, -1, 1), *m = zeros(n), *v = zeros(n);
    const float *g = numbers(n, -1, 1), *before = copy_of(w, n);
    const ckpt_optim_step s = {.lr = 0.1, .wd = 0, .grad_scale = 1, .t = 1};
    OK(ckpt_optim_step_all(&engine, &o, &s, w, m, v, g, &error));
    for (int i = 0; i < N; i++)
        for (int64_t k = slots[i].at; k < slots[i].at + slots[i].n; k++) {
            ck_assert((w[k] != before[k]) == !slots[i].frozen);
            ck_assert((m[k] != 0) == !slots[i].frozen);
            ck_assert((v[k] != 0) == !(slots[i].frozen || slots[i].muon));
        }
    /* The first step of Adam is lr sign(g). */
    const int64_t k = slots[5].at;
    ck_assert_float_eq_tol(w[k], before[k] - (g[k] > 0 ? 0.1F : -0.1F), 1e-6F);
}
END_TEST

Suite *suite_train_muon(void)
{
    Suite *s = suite_create("train_muon");
    TCase *t = tcase_create("train_muon");
    tcase_add_checked_fixture(t, open_golden, golden_tear_down);
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, muon_three_steps_follow_peer, 0, (int)(sizeof peers / sizeof *peers));
    tcase_add_loop_test(t, orthogonalise_matches_double_on_several_tiles, 0,
                        (int)(sizeof shapes / sizeof *shapes));
    tcase_add_test(t, orthogonalise_batches_and_threads_give_the_same_bits);
    tcase_add_test(t, orthogonalise_zero_stays_zero_and_nan_stays_nan);
    tcase_add_test(t, orthogonalise_small_arena_is_an_error);
    tcase_add_test(t, muon_takes_matrices_and_leaves_the_rest_to_adamw);
    suite_add_tcase(s, t);
    return s;
}
