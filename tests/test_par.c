/* The network on several ranks, which are threads, against one process: loss, logits, every gradient,
 * side losses and expert counts, in double. Softmax attention whose queries are dealt out zigzag: its
 * results, and how even the ranks' work is. */
#define CKPT_REAL 64
#include "checked.h"
#include "cut.h"
#include "engine_test.h"
#include "network.h"
#include "par_test.h"

/* Sums are taken in another order: rounding of double through a few blocks. */
#define LIMIT 1e-12

typedef struct mesh {
    const char *model;
    int tp, cp, dp, ep;
    ckpt_eng_cp_mode mode;
} mesh;

/* clang-format off */
static const mesh meshes[] = {
    {"hf/kimi_linear_tiny",    1, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 1, 2, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 1, 2, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    2, 1, 2, 4, CKPT_ENG_CP_HEADS},
    {"hf/bailing_hybrid_tiny", 2, 2, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   1, 3, 1, 3, CKPT_ENG_CP_HEADS},
    {"hf/qwen3_next_mtp_tiny", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/qwen3_next_mtp_tiny", 1, 2, 2, 2, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   2, 2, 1, 4, CKPT_ENG_CP_HEADS},
    {"hf/deepseek_mtp_tiny",   3, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/llama_tiny_tied",     4, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/llama_tiny_tied",     2, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"hf/bailing_hybrid_tiny", 2, 1, 1, 2, CKPT_ENG_CP_HEADS},
    {"hf/kimi_linear_tiny",    1, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    2, 2, 1, 4, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/kimi_linear_tiny",    1, 2, 2, 2, CKPT_ENG_CP_CHUNKS},
    {"hf/qwen3_next_mtp_tiny", 1, 3, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/qwen3_next_mtp_tiny", 2, 4, 1, 2, CKPT_ENG_CP_CHUNKS},
    {"hf/deepseek_mtp_tiny",   1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"hf/llama_tiny_tied",     4, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    /* gates of key heads, two value heads to each */
    {"mcore/gpt_gdn2_grouped_tp2", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},
    {"mcore/gpt_gdn2_grouped_tp2", 1, 2, 1, 1, CKPT_ENG_CP_HEADS},
    {"mcore/gpt_gdn2_grouped_tp2", 2, 2, 1, 2, CKPT_ENG_CP_CHUNKS},
};
/* clang-format on */

typedef struct scene {
    const mesh *m;
    ckpt_source src;
    ckpt_model model;
    ckpt_eng e;
    ENG(network) one;
    ENG(run) run;
    int32_t *ids, *labels;
    real *logits;
    int64_t cu[8], n_seq, T;
    int64_t *counts;
} scene;

/* Sequences of a data-parallel rank, all of them for one process. */
static ENG(batch) batch_of(const scene *s, int dp, int d, ckpt_eng_seq *seq, int64_t cu[8])
{
    int64_t lo = ckpt_part_at(s->n_seq, dp, d), hi = ckpt_part_at(s->n_seq, dp, d + 1);
    for (int64_t i = lo; i <= hi; i++)
        cu[i - lo] = s->cu[i] - s->cu[lo];
    *seq = (ckpt_eng_seq){hi - lo, cu};
    return (ENG(batch)){seq, s->ids + s->cu[lo], s->labels + s->cu[lo]};
}

static ckpt_eng_spec_opts options(const mesh *m)
{
    /* Side losses are means over micro-batches: one process with all sequences has another value. */
    return (ckpt_eng_spec_opts){.aux_coef = m->dp == 1 ? 0.02 : 0, .z_coef = m->dp == 1 ? 0.01 : 0};
}

static bool run_once(ckpt_eng *e, const ENG(network) * m, const ENG(batch) * b, ENG(run) * r,
                     ckpt_err *err)
{
    return ENG(network_run)(e, m, b, r, err) == CKPT_OK &&
           ckpt_eng_reserve(e, e->peak, err) == CKPT_OK &&
           ENG(network_run)(e, m, b, r, err) == CKPT_OK;
}

static bool near(double a, double b)
{
    return fabs(a - b) <= LIMIT * fmax(1, fabs(b));
}

static bool check_grads(par_rank *r, scene *s, ckpt_eng *e, ENG(network) * net)
{
    for (size_t i = 0; i < net->n_params; i++) {
        const ENG(param) *p = &net->params[i], *q = &s->one.params[i];
        real *whole = e->par->world->rank == 0 ? malloc(sizeof(real) * (size_t)(q->n + 1)) : NULL;
        double far = 0;
        for (int64_t k = 0; whole && k < q->n; k++)
            whole[k] = NAN;
        bool ok = q->grad == NULL ||
                  ENG(network_gather)(e, net, &s->model, p, net->grads + (p->x - net->data), whole,
                                      &r->err) == CKPT_OK;
        if (ok && whole && q->grad)
            far = distance(whole, q->grad, q->n);
        free(whole);
        if (!ok)
            return false;
        if (far > LIMIT)
            return PAR_FAIL(r, "gradient of %s: relative RMS %.3g", p->name, far);
    }
    return true;
}

static bool check_run(par_rank *r, const scene *s, const ENG(run) * run, const ENG(batch) * b,
                      int64_t experts)
{
    int64_t T = ckpt_eng_tokens(b->seq), V = s->one.spec.V;
    if (!near(run->loss, s->run.loss) || !near(run->mtp_loss, s->run.mtp_loss) ||
        !near(run->aux_loss, s->run.aux_loss) || !near(run->z_loss, s->run.z_loss))
        return PAR_FAIL(
            r, "loss %.16g, %.16g, side losses %.16g, %.16g, not %.16g, %.16g, %.16g, %.16g",
            run->loss, run->mtp_loss, run->aux_loss, run->z_loss, s->run.loss, s->run.mtp_loss,
            s->run.aux_loss, s->run.z_loss);
    double far = distance(run->logits, s->logits + (b->ids - s->ids) * V, T * V);
    if (far > LIMIT)
        return PAR_FAIL(r, "logits: relative RMS %.3g", far);
    if (memcmp(run->expert_counts, s->counts, sizeof *s->counts * (size_t)experts) != 0)
        return PAR_FAIL(r, "expert counts differ");
    return true;
}

static bool one_rank(par_rank *r)
{
    scene *s = r->arg;
    ckpt_eng_par par = {0};
    ckpt_eng e;
    ENG(network) net = {0};
    ckpt_eng_seq seq;
    int64_t cu[8];
    ckpt_eng_spec_opts opts = options(s->m);
    ckpt_eng_init(&e, 1);
    e.par = &par;
    if (ckpt_eng_par_open(&par, &r->comm, s->m->tp, s->m->cp, s->m->dp, s->m->ep, s->m->mode,
                          &r->err) != CKPT_OK)
        return false;
    ENG(batch) b = batch_of(s, s->m->dp, par.d, &seq, cu);
    bool ok = ENG(network_open)(&net, &e, &s->model, &opts, true, &r->err) == CKPT_OK;
    int64_t experts = 0;
    for (int64_t i = 0; ok && i < net.spec.n_blocks; i++)
        if (net.spec.blocks[i].kind == CKPT_ENG_MOE)
            experts = net.spec.n_blocks * net.spec.blocks[i].u.moe.E;
    int64_t *counts = calloc((size_t)experts + 1, sizeof *counts);
    real *logits = malloc(sizeof(real) * (size_t)(s->T * s->one.spec.V));
    ENG(run)
    run = {.backward = true,
           .recompute = r->comm.size % 2 == 0,
           .mtp_coef = 0.3,
           .logits = logits,
           .expert_counts = counts};
    ok = ok && run_once(&e, &net, &b, &run, &r->err) &&
         ENG(network_sum_grads)(&e, &net, &r->err) == CKPT_OK && check_grads(r, s, &e, &net) &&
         check_run(r, s, &run, &b, experts);
    if (!ok)
        ckpt_comm_abort(&r->comm, 1);
    free(counts);
    free(logits);
    ENG(network_close)(&net);
    ckpt_eng_release(&e);
    ckpt_eng_par_close(&par);
    return ok;
}

static const int64_t long_ones[] = {21, 1, 34, 17}, short_ones[] = {1, 2, 9, 1};

static void scene_open(scene *s, const mesh *m, const int64_t *lengths)
{
    ckpt_model_opts bind = {0};
    ckpt_eng_spec_opts opts = options(m);
    *s = (scene){.m = m, .n_seq = 4};
    OK(ckpt_source_open(&s->src, ckpt_arena_printf(&memory, "%s/%s", CKPT_FIXTURES, m->model), NULL,
                        &error));
    OK(ckpt_model_bind(&s->model, &s->src, &bind, &error));
    ckpt_eng_init(&s->e, 1);
    OK(ENG(network_open)(&s->one, &s->e, &s->model, &opts, true, &error));
    for (int i = 0; i < 4; i++)
        s->cu[i + 1] = s->cu[i] + lengths[i];
    s->T = s->cu[4];
    s->ids = malloc(sizeof *s->ids * (size_t)s->T);
    s->labels = malloc(sizeof *s->labels * (size_t)s->T);
    for (int64_t t = 0; t < s->T; t++) {
        s->ids[t] = (int32_t)number(0, (double)s->one.spec.V);
        s->labels[t] = t % 7 == 3 ? -1 : (int32_t)number(0, (double)s->one.spec.V);
    }
    s->logits = malloc(sizeof(real) * (size_t)(s->T * s->one.spec.V));
    s->counts = calloc(1 << 16, sizeof *s->counts);
    ckpt_eng_seq seq;
    int64_t cu[8];
    ENG(batch) b = batch_of(s, 1, 0, &seq, cu);
    s->run = (ENG(run)){
        .backward = true, .mtp_coef = 0.3, .logits = s->logits, .expert_counts = s->counts};
    ck_assert_msg(run_once(&s->e, &s->one, &b, &s->run, &error), "%s", error.text);
}

static void scene_close(scene *s)
{
    ENG(network_close)(&s->one);
    ckpt_eng_release(&s->e);
    ckpt_model_release(&s->model);
    ckpt_source_close(&s->src);
    free(s->ids);
    free(s->labels);
    free(s->logits);
    free(s->counts);
}

START_TEST(ranks_compute_what_one_process_does)
{
    scene s;
    const mesh *m = &meshes[_i];
    scene_open(&s, m, long_ones);
    par_run(m->tp * m->cp * m->dp, one_rank, &s);
    scene_close(&s);
}
END_TEST

/* Fewer tokens a rank than a convolution is wide, sequences over three and more ranks, ranks of a tensor-
 * parallel group without tokens. */
START_TEST(short_sequences_run_over_many_ranks)
{
    static const mesh many[] = {
        {"hf/kimi_linear_tiny", 1, 4, 1, 1, CKPT_ENG_CP_CHUNKS},
        {"hf/kimi_linear_tiny", 1, 8, 1, 2, CKPT_ENG_CP_CHUNKS},
        {"hf/kimi_linear_tiny", 2, 4, 1, 4, CKPT_ENG_CP_CHUNKS},
        {"hf/llama_tiny_tied",  4, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    };
    scene s;
    const mesh *m = &many[_i];
    scene_open(&s, m, short_ones);
    par_run(m->tp * m->cp * m->dp, one_rank, &s);
    scene_close(&s);
}
END_TEST

static bool refused(par_rank *r)
{
    scene *s = r->arg;
    ckpt_eng_par par = {0};
    ckpt_eng e;
    ENG(network) net;
    ckpt_eng_init(&e, 1);
    e.par = &par;
    bool ok = ckpt_eng_par_open(&par, &r->comm, s->m->tp, s->m->cp, s->m->dp, s->m->ep, s->m->mode,
                                &r->err) == CKPT_OK &&
              ENG(network_open)(&net, &e, &s->model, NULL, true, &r->err) == CKPT_OK;
    ckpt_eng_par_close(&par);
    return ok;
}

START_TEST(meshes_that_do_not_fit_are_usage_errors)
{
    static const struct {
        mesh m;
        int ranks;
        const char *says;
    } bad[] = {
        {{"hf/kimi_linear_tiny", 3, 1, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "block 0: 2 heads of linear attention cannot be cut into 3 parts"},
        {{"hf/llama_tiny_tied", 3, 1, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "4 query heads with 2 key heads cannot be cut into 3 parts"      },
        {{"hf/kimi_linear_tiny", 2, 2, 1, 1, CKPT_ENG_CP_HEADS},
         3,                                                         "tp 2 x cp 2 x dp 1 do not make the 3 ranks"                     },
        {{"hf/kimi_linear_tiny", 1, 1, 3, 2, CKPT_ENG_CP_HEADS}, 3, "ep 2 does not divide the 3"                                     },
    };
    scene s;
    par_rank ranks[PAR_RANKS];
    scene_open(&s, &bad[_i].m, long_ones);
    ck_assert(!par_try(ranks, bad[_i].ranks, refused, &s));
    for (int i = 0; i < bad[_i].ranks; i++) {
        ck_assert_int_eq(ranks[i].err.code, CKPT_E_USAGE);
        ck_assert_msg(strstr(ranks[i].err.text, bad[_i].says) != NULL, "%s", ranks[i].err.text);
    }
    scene_close(&s);
}
END_TEST

/* ---- queries dealt out zigzag ---------------------------------------------------------------- */

typedef struct packing {
    int64_t n, len[8];
} packing;

/* Lengths around blocks of 64 queries and 128 keys, fewer than pieces, none at all. */
static const packing packings[] = {
    {1, {391}                         },
    {1, {8}                           },
    {8, {130, 0, 1, 257, 2, 64, 7, 12}},
    {5, {1, 1, 1, 1, 1}               },
    {6, {0, 3, 300, 0, 5, 0}          },
};

static ckpt_eng_seq packed(const packing *p, int64_t cu[9])
{
    cu[0] = 0;
    for (int64_t i = 0; i < p->n; i++)
        cu[i + 1] = cu[i] + p->len[i];
    return (ckpt_eng_seq){p->n, cu};
}

typedef struct dealt_case {
    ckpt_eng_attention a;
    ckpt_eng_seq seq;
    const real *q, *k, *v, *d_o;
    real *o, *lse, *dq, *dk, *dv; /* of one process */
} dealt_case;

static bool same(par_rank *r, const char *what, const real *x, const real *ref, int64_t n)
{
    double far = distance(x, ref, n);
    return far <= LIMIT || PAR_FAIL(r, "%s: relative RMS %.3g", what, far);
}

static bool attend(par_rank *r, const dealt_case *s, ckpt_eng *e, const ckpt_eng_cut *c, real *out)
{
    const ckpt_eng_attention *a = &s->a;
    int64_t nq = a->N * a->DK, nk = a->G * a->DK, nv = a->G * a->DV, no = a->N * a->DV;
    const real *q = s->q + c->lo * nq, *k = s->k + c->lo * nk, *v = s->v + c->lo * nv;
    real *o = out, *lse = o + c->n * no, *dq = lse + c->n * a->N, *dk = dq + c->n * nq,
         *dv = dk + c->n * nk;
    if (ENG(attention_cut)(e, a, &c->own, q, k, v, o, lse, &r->err) != CKPT_OK ||
        ENG(attention_cut_bwd)(e, a, &c->own, q, k, v, o, lse, s->d_o + c->lo * no, dq, dk, dv,
                               &r->err) != CKPT_OK)
        return false;
    return e->dry || (same(r, "o", o, s->o + c->lo * no, c->n * no) &&
                      same(r, "lse", lse, s->lse + c->lo * a->N, c->n * a->N) &&
                      same(r, "dq", dq, s->dq + c->lo * nq, c->n * nq) &&
                      same(r, "dk", dk, s->dk + c->lo * nk, c->n * nk) &&
                      same(r, "dv", dv, s->dv + c->lo * nv, c->n * nv));
}

static bool attend_on_one_rank(par_rank *r)
{
    const dealt_case *s = r->arg;
    const ckpt_eng_attention *a = &s->a;
    ckpt_eng_par par = {0};
    ckpt_eng_cut cut = {0};
    ckpt_eng e;
    ckpt_eng_init(&e, 1);
    e.par = &par;
    if (ckpt_eng_par_open(&par, &r->comm, 1, r->comm.size, 1, 1, CKPT_ENG_CP_CHUNKS, &r->err) !=
        CKPT_OK)
        return false;
    bool ok = ckpt_eng_cut_of(&e, &s->seq, &cut, &r->err) == CKPT_OK;
    par.cut = &cut;
    int64_t width = (a->N + a->G) * (a->DK + a->DV) + a->N * (a->DK + 1);
    real *out = calloc((size_t)(cut.n * width + 1), sizeof *out);
    ok = ok && attend(r, s, &e, &cut, out) && ckpt_eng_reserve(&e, e.peak, &r->err) == CKPT_OK &&
         attend(r, s, &e, &cut, out);
    if (!ok)
        ckpt_comm_abort(&r->comm, 1);
    free(out);
    ckpt_eng_cut_free(&cut);
    ckpt_eng_release(&e);
    ckpt_eng_par_close(&par);
    return ok;
}

START_TEST(attention_of_dealt_queries_is_that_of_one_process)
{
    static const ckpt_eng_attention shapes[] = {
        {.N = 4,  .G = 2,   .DK = 6, .DV = 5     },
        { .N = 3, .G = 3, .DK = 12, .DV = 8, .scale = 0.4}
    };
    for (int i = 0; i < 2; i++) {
        const ckpt_eng_attention *a = &shapes[i];
        int64_t cu[9];
        dealt_case s = {.a = *a, .seq = packed(&packings[_i], cu)};
        int64_t T = ckpt_eng_tokens(&s.seq);
        s.q = numbers(T * a->N * a->DK, -2, 2);
        s.k = numbers(T * a->G * a->DK, -2, 2);
        s.v = numbers(T * a->G * a->DV, -1, 1);
        s.d_o = numbers(T * a->N * a->DV, -1, 1);
        s.o = zeros(T * a->N * a->DV);
        s.lse = zeros(T * a->N);
        s.dq = zeros(T * a->N * a->DK);
        s.dk = zeros(T * a->G * a->DK);
        s.dv = zeros(T * a->G * a->DV);
        OK(ENG(attention)(&engine, a, &s.seq, s.q, s.k, s.v, s.o, s.lse, &error));
        OK(ENG(attention_bwd)(&engine, a, &s.seq, s.q, s.k, s.v, s.o, s.lse, s.d_o, s.dq, s.dk,
                              s.dv, &error));
        for (int ranks = 2; ranks <= 5; ranks++)
            par_run(ranks, attend_on_one_rank, &s);
    }
}
END_TEST

/* The cut of rank c of cp, which needs no other rank. */
static void cut_alone(const ckpt_eng_seq *seq, int cp, int c, ckpt_eng_cut *cut)
{
    ckpt_eng_par par = {.tp = 1, .cp = cp, .dp = 1, .ep = 1, .c = c};
    ckpt_eng e = engine;
    e.par = &par;
    OK(ckpt_eng_cut_of(&e, seq, cut, &error));
}

static int64_t pairs_of_parts(const ckpt_eng_cut *c)
{
    int64_t pairs = 0;
    for (int64_t i = 0; i < c->n_parts; i++)
        for (int64_t t = 0; t < c->parts[i].n; t++)
            pairs += c->parts[i].lo + t + 1;
    return pairs;
}

/* Every query on one rank; what a rank sends another is what that one expects. */
START_TEST(every_query_is_dealt_once)
{
    int64_t cu[9];
    ckpt_eng_seq seq = packed(&packings[_i], cu);
    int64_t T = ckpt_eng_tokens(&seq), *seen = calloc((size_t)T, sizeof *seen);
    for (int cp = 2; cp <= 5; cp++) {
        ckpt_eng_cut cuts[5];
        for (int c = 0; c < cp; c++) {
            int64_t row = 0;
            cut_alone(&seq, cp, c, &cuts[c]);
            for (int64_t i = 0; i < cuts[c].n_parts; i++) {
                const ckpt_eng_part *p = &cuts[c].parts[i];
                ck_assert_int_eq(p->row, row);
                row += p->n;
                for (int64_t t = 0; t < p->n; t++)
                    seen[seq.cu[p->seq] + p->lo + t]++;
            }
            ck_assert_int_eq(cuts[c].rows, row);
            ck_assert_int_eq(cuts[c].pairs, pairs_of_parts(&cuts[c]));
        }
        for (int64_t t = 0; t < T; t++)
            ck_assert_int_eq(seen[t], cp - 1);
        for (int a = 0; a < cp; a++)
            for (int b = 0; b < cp; b++)
                ck_assert_int_eq(cuts[a].out[b], cuts[b].in[a]);
        for (int c = 0; c < cp; c++)
            ckpt_eng_cut_free(&cuts[c]);
    }
    free(seen);
}
END_TEST

/* Most query-key pairs of a rank over the mean: of the ranks' own tokens, and as dealt out. */
static double unevenness(const ckpt_eng_seq *seq, int cp, bool dealt)
{
    double most = 0, sum = 0;
    for (int c = 0; c < cp; c++) {
        ckpt_eng_cut cut;
        int64_t pairs = 0;
        cut_alone(seq, cp, c, &cut);
        for (int64_t s = 0; s < seq->n; s++)
            for (int64_t t = ckpt_max_i64(seq->cu[s], cut.lo);
                 t < ckpt_min_i64(seq->cu[s + 1], cut.lo + cut.n); t++)
                pairs += t - seq->cu[s] + 1;
        double own = (double)(dealt ? pairs_of_parts(&cut) : pairs);
        most = fmax(most, own);
        sum += own;
        ckpt_eng_cut_free(&cut);
    }
    return most * cp / sum;
}

START_TEST(dealt_queries_are_even_work)
{
    static const int64_t one[] = {0, 4099};
    ckpt_eng_seq seq = {1, one};
    ck_assert_double_ge(unevenness(&seq, 4, false), 1.74);
    for (int cp = 2; cp <= 8;
         cp++) /* two pieces a token longer: 2 T pairs more than T^2 / (2 cp) */
        ck_assert_double_le(unevenness(&seq, cp, true), 1 + 4 * cp / 4099.0);
    /* A long one among short ones, and only short ones of fewer tokens than there are pieces. */
    static const packing mixed = {
        8, {17, 2000, 3, 901, 64, 1, 250, 40}
    };
    int64_t cu[9], many[1001] = {0};
    seq = packed(&mixed, cu);
    ck_assert_double_ge(unevenness(&seq, 4, false), 1.5);
    for (int cp = 2; cp <= 8; cp++)
        ck_assert_double_le(unevenness(&seq, cp, true), 1.01);
    for (int i = 0; i < 1000; i++)
        many[i + 1] = many[i] + 1 + i % 7;
    seq = (ckpt_eng_seq){1000, many};
    for (int cp = 2; cp <= 8; cp++)
        ck_assert_double_le(unevenness(&seq, cp, true), 1.02);
}
END_TEST

Suite *suite_par(void);
Suite *suite_par(void)
{
    Suite *s = suite_create("par");
    TCase *t = tcase_create("network");
    tcase_set_timeout(t, 120);
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_loop_test(t, ranks_compute_what_one_process_does, 0,
                        (int)(sizeof meshes / sizeof *meshes));
    tcase_add_loop_test(t, short_sequences_run_over_many_ranks, 0, 4);
    tcase_add_loop_test(t, meshes_that_do_not_fit_are_usage_errors, 0, 4);
    int n = (int)(sizeof packings / sizeof *packings);
    tcase_add_loop_test(t, attention_of_dealt_queries_is_that_of_one_process, 0, n);
    tcase_add_loop_test(t, every_query_is_dealt_once, 0, n);
    tcase_add_test(t, dealt_queries_are_even_work);
    suite_add_tcase(s, t);
    return s;
}
