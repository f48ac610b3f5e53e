/* Recurrences beyond the oracle's cases, f64: step form = chunk form at every edge of the chunk and
 * segment grid, head sizes that fill no vector, packed sequences, chained states, threads, NaN. */
#define CKPT_REAL 64
#include "engine_test.h"

#define LIMIT 1e-12

typedef struct run {
    ckpt_eng_delta d;
    ckpt_eng_seq seq;
    ENG(delta_in) in;
    ENG(delta_grad) g;
    real *o, *state, *d_o, *d_state;
    int64_t nk, nv, ng, ne, ns; /* elements of q, v, g, erase, state */
} run;

static void size_run(run *r)
{
    const ckpt_eng_delta *d = &r->d;
    const int64_t T = ckpt_eng_tokens(&r->seq);
    r->nk = T * d->H * d->K;
    r->nv = T * d->HV * d->V;
    r->ng = T * d->HV * (d->rule == CKPT_ENG_GDN ? 1 : d->K);
    r->ne = T * d->HV * (d->rule == CKPT_ENG_GDN2 ? d->K : 1);
    r->ns = r->seq.n * d->HV * d->K * d->V;
}

/* Random inputs; keys of norm near one, decays from none to strong, erase gates in (0, 1). */
static run make_run(ckpt_eng_delta d, ckpt_eng_seq seq)
{
    run r = {.d = d, .seq = seq};
    const double unit = sqrt(3.0 / (double)d.K);
    size_run(&r);
    r.in = (ENG(delta_in)){.q = numbers(r.nk, -unit, unit),
                           .k = numbers(r.nk, -unit, unit),
                           .v = numbers(r.nv, -1, 1),
                           .g = numbers(r.ng, -3, 0),
                           .erase = numbers(r.ne, 0, 1),
                           .write = d.rule == CKPT_ENG_GDN2 ? numbers(r.nv, 0, 1) : NULL,
                           .state0 = numbers(r.ns, -1, 1)};
    r.d_o = numbers(r.nv, -1, 1);
    r.d_state = numbers(r.ns, -1, 1);
    return r;
}

static void execute(run *r)
{
    const bool gdn2 = r->d.rule == CKPT_ENG_GDN2;
    r->g = (ENG(delta_grad)){.q = zeros(r->nk),
                             .k = zeros(r->nk),
                             .v = zeros(r->nv),
                             .g = zeros(r->ng),
                             .erase = zeros(r->ne),
                             .write = gdn2 ? zeros(r->nv) : NULL,
                             .state0 = zeros(r->ns)};
    r->o = zeros(r->nv);
    r->state = zeros(r->ns);
    real *saved = zeros(ENG(delta_saved_len)(&r->d, &r->seq));
    OK(ENG(delta)(&engine, &r->d, &r->seq, &r->in, r->o, r->state, saved, &error));
    OK(ENG(delta_bwd)(&engine, &r->d, &r->seq, &r->in, saved, r->d_o, r->d_state, &r->g, &error));
}

#define ARRAYS 9
typedef struct array {
    const char *name;
    const real *x;
    int64_t n;
} array;

static void arrays_of(const run *r, array out[ARRAYS])
{
    const array all[ARRAYS] = {
        {"o",       r->o,        r->nv                 },
        {"state",   r->state,    r->ns                 },
        {"dq",      r->g.q,      r->nk                 },
        {"dk",      r->g.k,      r->nk                 },
        {"dv",      r->g.v,      r->nv                 },
        {"dg",      r->g.g,      r->ng                 },
        {"derase",  r->g.erase,  r->ne                 },
        {"dstate0", r->g.state0, r->ns                 },
        {"dwrite",  r->g.write,  r->g.write ? r->nv : 0}
    };
    memcpy(out, all, sizeof all);
}

static void compare(const run *a, const run *b, double limit)
{
    array x[ARRAYS], y[ARRAYS];
    arrays_of(a, x);
    arrays_of(b, y);
    for (int i = 0; i < ARRAYS; i++)
        CLOSE(x[i].name, x[i].x, y[i].x, y[i].n, limit);
}

static void compare_bits(const run *a, const run *b)
{
    array x[ARRAYS], y[ARRAYS];
    arrays_of(a, x);
    arrays_of(b, y);
    for (int i = 0; i < ARRAYS; i++)
        ck_assert_msg(x[i].n == 0 || same_bits(x[i].x, y[i].x, y[i].n), "%s differs", x[i].name);
}

static void compare_forms(run *r)
{
    run chunk = *r, step = *r;
    chunk.d.form = CKPT_ENG_CHUNK;
    step.d.form = CKPT_ENG_STEP;
    execute(&chunk);
    execute(&step);
    compare(&chunk, &step, LIMIT);
}

/* ---- grid of lengths and head sizes --------------------------------------------------------- */

static const int64_t lengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 130};
static const int64_t heads[][2] = {
    {60,  60 },
    {96,  96 },
    {112, 112},
    {1,   1  },
    {5,   33 },
    {40,  8  },
    {64,  192},
    {192, 24 },
    {128, 130}
};
#define N_LENGTHS ((int)(sizeof lengths / sizeof *lengths))
#define N_HEADS ((int)(sizeof heads / sizeof *heads))

START_TEST(chunk_equals_step_at_every_length)
{
    const ckpt_eng_rule rule = (ckpt_eng_rule)(_i / N_LENGTHS);
    const int64_t cu[] = {0, lengths[_i % N_LENGTHS]};
    run r = make_run((ckpt_eng_delta){.rule = rule, .H = 2, .HV = 2, .K = 8, .V = 8},
                     (ckpt_eng_seq){1, cu});
    compare_forms(&r);
}
END_TEST

START_TEST(chunk_equals_step_at_every_head_size)
{
    const int64_t cu[] = {0, 35}, *kv = heads[_i % N_HEADS];
    engine.isa = (ckpt_eng_isa)(_i / N_HEADS);
    if (engine.isa > ckpt_eng_detect())
        return;
    run r =
        make_run((ckpt_eng_delta){.rule = CKPT_ENG_KDA, .H = 1, .HV = 2, .K = kv[0], .V = kv[1]},
                 (ckpt_eng_seq){1, cu});
    compare_forms(&r);
}
END_TEST

START_TEST(one_token_and_empty_sequences_are_independent)
{
    const int64_t cu[] = {0, 1, 2, 2, 3, 4, 4};
    run r = make_run((ckpt_eng_delta){.rule = (ckpt_eng_rule)_i, .H = 1, .HV = 2, .K = 6, .V = 7},
                     (ckpt_eng_seq){6, cu});
    compare_forms(&r);
    r.d.form = CKPT_ENG_CHUNK;
    execute(&r);
    const int64_t one = 2 * 6 * 7; /* an empty sequence hands its state through */
    ck_assert(same_bits(r.state + 2 * one, r.in.state0 + 2 * one, one));
    ck_assert(same_bits(r.g.state0 + 5 * one, r.d_state + 5 * one, one));
}
END_TEST

START_TEST(no_tokens_hand_the_state_through)
{
    const int64_t cu[] = {0, 0};
    run r = make_run((ckpt_eng_delta){.rule = CKPT_ENG_KDA, .H = 1, .HV = 1, .K = 4, .V = 4},
                     (ckpt_eng_seq){1, cu});
    execute(&r);
    ck_assert(same_bits(r.state, r.in.state0, r.ns));
    ck_assert(same_bits(r.g.state0, r.d_state, r.ns));
}
END_TEST

/* ---- packing, chaining ---------------------------------------------------------------------- */

/* View of tokens [lo, hi) and sequence `n` of a packed run as a run of its own. */
static run part_of(const run *all, int64_t n, const int64_t cu[2])
{
    const ckpt_eng_delta *d = &all->d;
    const int64_t T = ckpt_eng_tokens(&all->seq), lo = all->seq.cu[n];
    run r = *all;
    r.seq = (ckpt_eng_seq){1, cu};
    size_run(&r);
    r.in.q += lo * (all->nk / T);
    r.in.k += lo * (all->nk / T);
    r.in.v += lo * (all->nv / T);
    r.in.g += lo * (all->ng / T);
    r.in.erase += lo * (all->ne / T);
    if (r.in.write)
        r.in.write += lo * (all->nv / T);
    r.in.state0 += n * d->HV * d->K * d->V;
    r.d_o += lo * (all->nv / T);
    r.d_state += n * d->HV * d->K * d->V;
    execute(&r);
    return r;
}

START_TEST(packed_sequences_equal_separate_runs)
{
    const int64_t cu[] = {0, 70, 89};
    run all = make_run((ckpt_eng_delta){.rule = (ckpt_eng_rule)(_i % 3),
                                        .form = (ckpt_eng_form)(_i / 3),
                                        .H = 2,
                                        .HV = 4,
                                        .K = 12,
                                        .V = 10},
                       (ckpt_eng_seq){2, cu});
    execute(&all);
    for (int64_t n = 0; n < 2; n++) {
        const int64_t own[] = {0, cu[n + 1] - cu[n]};
        run part = part_of(&all, n, own), view = all;
        const int64_t T = cu[2], lo = cu[n];
        view.o += lo * (all.nv / T);
        view.state += n * part.ns;
        view.g.q += lo * (all.nk / T);
        view.g.k += lo * (all.nk / T);
        view.g.v += lo * (all.nv / T);
        view.g.g += lo * (all.ng / T);
        view.g.erase += lo * (all.ne / T);
        if (view.g.write)
            view.g.write += lo * (all.nv / T);
        view.g.state0 += n * part.ns;
        view.seq = part.seq;
        size_run(&view);
        compare_bits(&part, &view);
    }
}
END_TEST

START_TEST(states_chain_across_calls)
{
    const int64_t cu[] = {0, 80}, first[] = {0, 37}, rest[] = {0, 43};
    run all = make_run(
        (ckpt_eng_delta){
            .rule = CKPT_ENG_KDA, .form = (ckpt_eng_form)_i, .H = 2, .HV = 2, .K = 9, .V = 7},
        (ckpt_eng_seq){1, cu});
    execute(&all);
    real *o = zeros(all.nv), *state = copy_of(all.in.state0, all.ns);
    ENG(delta_in) in = all.in;
    in.state0 = state; /* updated in place */
    ckpt_eng_seq seq = {1, first};
    OK(ENG(delta)(&engine, &all.d, &seq, &in, o, state, NULL, &error));
    const int64_t nk = 37 * 2 * 9, nv = 37 * 2 * 7;
    in = (ENG(delta_in)){.q = in.q + nk,
                         .k = in.k + nk,
                         .v = in.v + nv,
                         .g = in.g + nk,
                         .erase = in.erase + 37 * 2,
                         .state0 = state};
    seq.cu = rest;
    OK(ENG(delta)(&engine, &all.d, &seq, &in, o + nv, state, NULL, &error));
    CLOSE("o", o, all.o, all.nv, LIMIT);
    CLOSE("state", state, all.state, all.ns, LIMIT);
}
END_TEST

/* ---- heads, threads, numbers ---------------------------------------------------------------- */

START_TEST(heads_with_different_gates_do_not_mix)
{
    const int64_t cu[] = {0, 50}, K = 8, V = 8;
    run two = make_run((ckpt_eng_delta){.rule = CKPT_ENG_KDA, .H = 2, .HV = 2, .K = K, .V = V},
                       (ckpt_eng_seq){1, cu});
    execute(&two);
    for (int64_t h = 0; h < 2; h++) {
        run one = {.d = two.d, .seq = two.seq};
        one.d.H = one.d.HV = 1;
        size_run(&one);
        real *q = zeros(one.nk), *k = zeros(one.nk), *v = zeros(one.nv), *g = zeros(one.ng),
             *b = zeros(one.ne), *d_o = zeros(one.nv), *o = zeros(one.nv), *dg = zeros(one.ng);
        for (int64_t t = 0; t < 50; t++) {
            memcpy(q + t * K, two.in.q + (t * 2 + h) * K, sizeof(real) * (size_t)K);
            memcpy(k + t * K, two.in.k + (t * 2 + h) * K, sizeof(real) * (size_t)K);
            memcpy(g + t * K, two.in.g + (t * 2 + h) * K, sizeof(real) * (size_t)K);
            memcpy(dg + t * K, two.g.g + (t * 2 + h) * K, sizeof(real) * (size_t)K);
            memcpy(v + t * V, two.in.v + (t * 2 + h) * V, sizeof(real) * (size_t)V);
            memcpy(d_o + t * V, two.d_o + (t * 2 + h) * V, sizeof(real) * (size_t)V);
            memcpy(o + t * V, two.o + (t * 2 + h) * V, sizeof(real) * (size_t)V);
            b[t] = two.in.erase[t * 2 + h];
        }
        one.in = (ENG(delta_in)){
            .q = q, .k = k, .v = v, .g = g, .erase = b, .state0 = two.in.state0 + h * K * V};
        one.d_o = d_o;
        one.d_state = two.d_state + h * K * V;
        execute(&one);
        ck_assert(same_bits(one.o, o, one.nv));
        ck_assert(same_bits(one.g.g, dg, one.ng));
        ck_assert(same_bits(one.g.state0, two.g.state0 + h * K * V, one.ns));
    }
}
END_TEST

START_TEST(grouped_heads_equal_repeated_keys)
{
    const int64_t cu[] = {0, 40}, K = 8, V = 6, T = 40;
    run few = make_run((ckpt_eng_delta){.rule = CKPT_ENG_GDN, .H = 2, .HV = 6, .K = K, .V = V},
                       (ckpt_eng_seq){1, cu});
    execute(&few);
    run many = few;
    many.d.H = 6;
    size_run(&many);
    real *q = zeros(many.nk), *k = zeros(many.nk), *dq = zeros(few.nk), *dk = zeros(few.nk);
    for (int64_t i = 0; i < T * 6; i++) {
        memcpy(q + i * K, few.in.q + i / 3 * K, sizeof(real) * (size_t)K);
        memcpy(k + i * K, few.in.k + i / 3 * K, sizeof(real) * (size_t)K);
    }
    many.in.q = q;
    many.in.k = k;
    execute(&many);
    ck_assert(same_bits(many.o, few.o, few.nv));
    for (int64_t i = 0; i < T * 6; i++)
        for (int64_t d = 0; d < K; d++) {
            dq[i / 3 * K + d] += many.g.q[i * K + d];
            dk[i / 3 * K + d] += many.g.k[i * K + d];
        }
    CLOSE("dq", few.g.q, dq, few.nk, LIMIT);
    CLOSE("dk", few.g.k, dk, few.nk, LIMIT);
}
END_TEST

START_TEST(threads_do_not_change_a_bit)
{
    const int64_t cu[] = {0, 30, 31, 120};
    run one = make_run(
        (ckpt_eng_delta){
            .rule = CKPT_ENG_KDA, .form = (ckpt_eng_form)_i, .H = 2, .HV = 4, .K = 16, .V = 16},
        (ckpt_eng_seq){3, cu});
    run many = one;
    engine.threads = 1;
    execute(&one);
    engine.threads = 3;
    execute(&many);
    compare_bits(&one, &many);
}
END_TEST

/* A task takes neighbouring heads together, as many as their size and the threads allow (delta.c): all
 * heads at one thread, one at many; the last task has fewer. */
START_TEST(heads_of_a_task_do_not_change_a_bit)
{
    const int64_t cu[] = {0, 37, 38, 117}, one_sequence[] = {0, 83};
    run one = make_run(
        (ckpt_eng_delta){.rule = (ckpt_eng_rule)(_i % 3), .H = 5, .HV = 10, .K = 20, .V = 37},
        _i < 3 ? (ckpt_eng_seq){1, one_sequence} : (ckpt_eng_seq){3, cu});
    engine.threads = 1;
    execute(&one);
    for (int threads = 2; threads <= 6; threads += 2) {
        run many = one;
        engine.threads = threads;
        execute(&many);
        compare_bits(&one, &many);
    }
}
END_TEST

/* Heads so wide, by the bytes of a state, that each goes by itself, also those that share a key head. */
START_TEST(large_heads_in_tasks_equal_step_form)
{
    const int64_t cu[] = {0, 21};
    run r = make_run((ckpt_eng_delta){.rule = CKPT_ENG_KDA, .H = _i, .HV = 3, .K = 192, .V = 192},
                     (ckpt_eng_seq){1, cu});
    engine.threads = 1;
    compare_forms(&r);
}
END_TEST

/* Decays from none to far beyond what a float holds, mixed token by token and channel by channel. */
START_TEST(extreme_decays_are_finite_and_equal_step_form)
{
    static const double decay[] = {0, -1e-8, -0.5, -40, -90, -800, -1e5, -INFINITY};
    const int64_t cu[] = {0, 53};
    engine.isa = (ckpt_eng_isa)(_i % CKPT_ENG_ISA_COUNT);
    if (engine.isa > ckpt_eng_detect())
        return;
    run r = make_run(
        (ckpt_eng_delta){
            .rule = (ckpt_eng_rule)(_i / CKPT_ENG_ISA_COUNT), .H = 1, .HV = 2, .K = 18, .V = 40},
        (ckpt_eng_seq){1, cu});
    real *g = copy_of(r.in.g, r.ng);
    for (int64_t i = 0; i < r.ng; i++)
        if (i % 3 == 0)
            g[i] = (real)decay[i / 3 % 8];
    r.in.g = g;
    compare_forms(&r); /* an infinity or a NaN is at no distance from anything: CLOSE fails */
}
END_TEST

START_TEST(nan_reaches_what_depends_on_it_and_nothing_else)
{
    const int64_t cu[] = {0, 20, 40};
    run r = make_run(
        (ckpt_eng_delta){
            .rule = CKPT_ENG_KDA, .form = (ckpt_eng_form)_i, .H = 1, .HV = 1, .K = 4, .V = 4},
        (ckpt_eng_seq){2, cu});
    real *v = copy_of(r.in.v, r.nv);
    v[25 * 4 + 1] = NAN; /* second sequence, token 5 */
    r.in.v = v;
    execute(&r);
    for (int64_t t = 0; t < 40; t++)
        for (int64_t d = 0; d < 4; d++)
            ck_assert_msg(isnan(r.o[t * 4 + d]) == (t >= 25 && d == 1), "o[%d,%d] = %g", (int)t,
                          (int)d, r.o[t * 4 + d]);
}
END_TEST

START_TEST(bad_sizes_are_refused)
{
    const int64_t cu[] = {0, 4};
    const ckpt_eng_seq seq = {1, cu};
    const ENG(delta_in) in = {0};
    ckpt_eng_delta d = {.H = 2, .HV = 3, .K = 4, .V = 4};
    ck_assert_int_eq(ENG(delta)(&engine, &d, &seq, &in, NULL, NULL, NULL, &error), CKPT_E_USAGE);
    ck_assert_ptr_nonnull(strstr(error.text, "3 value heads"));
    d = (ckpt_eng_delta){.H = 1, .HV = 1, .K = 2000, .V = 4};
    ck_assert_int_eq(ENG(delta)(&engine, &d, &seq, &in, NULL, NULL, NULL, &error),
                     CKPT_E_UNSUPPORTED);
    ck_assert_int_eq(ENG(gate)(&engine, 1, 1, 1, NULL, NULL, NULL, 1, NULL, &error), CKPT_E_USAGE);
    ck_assert_int_eq(ENG(gate)(&engine, 1, 1, 1, NULL, NULL, NULL, NAN, NULL, &error),
                     CKPT_E_USAGE);
    ck_assert_int_eq(ENG(conv)(&engine, &seq, 1, 9, NULL, NULL, NULL, NULL, NULL, NULL, &error),
                     CKPT_E_UNSUPPORTED);
    ck_assert_int_eq(ENG(rmsnorm)(&engine, 1, 0, NULL, NULL, false, 1, NULL, NULL, &error),
                     CKPT_E_USAGE);
}
END_TEST

START_TEST(an_arena_that_is_too_small_is_an_error)
{
    const int64_t cu[] = {0, 4};
    run r = make_run((ckpt_eng_delta){.rule = CKPT_ENG_KDA, .H = 1, .HV = 1, .K = 4, .V = 4},
                     (ckpt_eng_seq){1, cu});
    OK(ckpt_eng_reserve(&engine, 64, &error));
    ck_assert_int_eq(ENG(delta)(&engine, &r.d, &r.seq, &r.in, zeros(r.nv), NULL, NULL, &error),
                     CKPT_E_NOMEM);
}
END_TEST

/* Convolution history: two calls that hand it on equal one call. */
START_TEST(conv_history_chains_across_calls)
{
    const int64_t C = 70, W = 4, all[] = {0, 9}, lens[] = {1, 2, 6};
    const ckpt_eng_seq whole = {1, all};
    real *x = numbers(9 * C, -1, 1), *w = numbers(C * W, -1, 1), *y = zeros(9 * C),
         *part = zeros(9 * C), *history = zeros((W - 1) * C);
    OK(ENG(conv)(&engine, &whole, C, W, x, w, NULL, NULL, y, NULL, &error));
    for (int64_t i = 0, at = 0; i < 3; at += lens[i++]) {
        const int64_t cu[] = {0, lens[i]};
        const ckpt_eng_seq seq = {1, cu};
        OK(ENG(conv)(&engine, &seq, C, W, x + at * C, w, NULL, history, part + at * C, history,
                     &error));
    }
    ck_assert(same_bits(part, y, 9 * C));
}
END_TEST

Suite *suite_engine_delta(void);
Suite *suite_engine_delta(void)
{
    Suite *s = suite_create("engine_delta");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_loop_test(tc, chunk_equals_step_at_every_length, 0, 3 * N_LENGTHS);
    tcase_add_loop_test(tc, chunk_equals_step_at_every_head_size, 0, CKPT_ENG_ISA_COUNT * N_HEADS);
    tcase_add_loop_test(tc, one_token_and_empty_sequences_are_independent, 0, 3);
    tcase_add_test(tc, no_tokens_hand_the_state_through);
    tcase_add_loop_test(tc, packed_sequences_equal_separate_runs, 0, 6);
    tcase_add_loop_test(tc, states_chain_across_calls, 0, 2);
    tcase_add_test(tc, heads_with_different_gates_do_not_mix);
    tcase_add_test(tc, grouped_heads_equal_repeated_keys);
    tcase_add_loop_test(tc, threads_do_not_change_a_bit, 0, 2);
    tcase_add_loop_test(tc, heads_of_a_task_do_not_change_a_bit, 0, 6);
    tcase_add_loop_test(tc, large_heads_in_tasks_equal_step_form, 1, 2);
    tcase_add_loop_test(tc, large_heads_in_tasks_equal_step_form, 3, 4);
    tcase_add_loop_test(tc, extreme_decays_are_finite_and_equal_step_form, 0,
                        3 * CKPT_ENG_ISA_COUNT);
    tcase_add_loop_test(tc, nan_reaches_what_depends_on_it_and_nothing_else, 0, 2);
    tcase_add_test(tc, bad_sizes_are_refused);
    tcase_add_test(tc, an_arena_that_is_too_small_is_an_error);
    tcase_add_test(tc, conv_history_chains_across_calls);
    suite_add_tcase(s, tc);
    return s;
}
