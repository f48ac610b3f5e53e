/* Delta-rule recurrences: one task per sequence and query/key head, which runs the value heads that
 * share it in order, so that dq and dk are summed by one thread. */
#include "kernels/kernels.h"

#include "checked.h"

#include <math.h>

#define SEG CKPT_ENG_SEGMENT_LEN
#define STATES (512 << 10) /* bytes: half of a second-level cache */

typedef struct job {
    const ckpt_eng_delta *d;
    const ckpt_eng_seq *seq;
    const ENG(delta_in) * in;
    const ENG(delta_grad) * grad; /* NULL in forward */
    ENG(delta_kernel) * kernel;
    real *o, *state, *saved, *scratch;
    const real *d_o, *d_state;
    int64_t scratch_len;
    int64_t keys, items;     /* key heads of a task, tasks of a sequence */
    ENG(delta_task) * tasks; /* [threads, keys HV / H] */
} job;

static ckpt_status check(const ckpt_eng_delta *d, const ckpt_eng_seq *seq, ckpt_err *err)
{
    if (d->H <= 0 || d->HV <= 0 || d->HV % d->H != 0 || d->K <= 0 || d->V <= 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "delta rule: %lld value heads of %lld for %lld key heads of %lld",
                         (long long)d->HV, (long long)d->V, (long long)d->H, (long long)d->K);
    if (d->K > 1024 || d->V > 1024)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "delta rule: head size %lld above 1024",
                         (long long)ckpt_max_i64(d->K, d->V));
    return ckpt_eng_seq_check(seq, err);
}

static int64_t segments(int64_t tokens)
{
    return (tokens + SEG - 1) / SEG;
}

/* Segments of all sequences before n. */
static int64_t segments_before(const ckpt_eng_seq *seq, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += segments(seq->cu[i + 1] - seq->cu[i]);
    return sum;
}

int64_t ENG(delta_saved_len)(const ckpt_eng_delta *d, const ckpt_eng_seq *seq)
{
    int64_t n = segments_before(seq, seq->n);
    if (!ckpt_mul_i64(n, d->HV, &n) || !ckpt_mul_i64(n, d->K, &n) || !ckpt_mul_i64(n, d->V, &n))
        return INT64_MAX; /* which no arena holds */
    return n;
}

/* saved: sequence by sequence, within it head by head, [segments, K, V] each. */
static void fill_task(const job *j, int64_t n, int64_t hv, ENG(delta_task) * t)
{
    const ckpt_eng_delta *d = j->d;
    const ENG(delta_in) *in = j->in;
    const int64_t K = d->K, V = d->V, h = hv / (d->HV / d->H), t0 = j->seq->cu[n];
    const bool gdn = d->rule == CKPT_ENG_GDN, gdn2 = d->rule == CKPT_ENG_GDN2;
    *t = (ENG(delta_task)){.T = j->seq->cu[n + 1] - t0, .K = K, .V = V};
    t->ldk = d->H * K;
    t->ldv = d->HV * V;
    t->ldg = gdn ? d->HV : d->HV * K;
    t->lde = gdn2 ? d->HV * K : d->HV;
    t->g_scalar = gdn;
    t->e_scalar = !gdn2;
    t->first = hv % (d->HV / d->H) == 0;
    t->scale = (real)(d->scale != 0 ? d->scale : 1 / sqrt((double)K));
    const int64_t ok = t0 * t->ldk + h * K, ov = t0 * t->ldv + hv * V,
                  og = t0 * t->ldg + (gdn ? hv : hv * K), oe = t0 * t->lde + (gdn2 ? hv * K : hv),
                  os = (n * d->HV + hv) * K * V;
    t->q = in->q + ok;
    t->k = in->k + ok;
    t->v = in->v + ov;
    t->g = in->g + og;
    t->erase = in->erase + oe;
    t->write = gdn2 ? in->write + ov : NULL;
    t->state0 = in->state0 ? in->state0 + os : NULL;
    t->o = j->o ? j->o + ov : NULL;
    t->state = j->state ? j->state + os : NULL;
    if (j->saved)
        t->saved = j->saved + (segments_before(j->seq, n) * d->HV + hv * segments(t->T)) * K * V;
    if (!j->grad)
        return;
    t->d_o = j->d_o + ov;
    t->d_state = j->d_state ? j->d_state + os : NULL;
    t->dq = j->grad->q + ok;
    t->dk = j->grad->k + ok;
    t->dv = j->grad->v + ov;
    t->dg = j->grad->g + og;
    t->derase = j->grad->erase + oe;
    t->dwrite = gdn2 ? j->grad->write + ov : NULL;
    t->dstate0 = j->grad->state0 ? j->grad->state0 + os : NULL;
}

static void run(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    const int64_t group = j->d->HV / j->d->H, n = item / j->items, h = item % j->items * j->keys;
    const int64_t keys = j->d->H - h < j->keys ? j->d->H - h : j->keys;
    ENG(delta_task) *t = j->tasks + worker * j->keys * group;
    for (int64_t i = 0; i < keys * group; i++)
        fill_task(j, n, h * group + i, t + i);
    j->kernel(t, keys * group, j->scratch + worker * j->scratch_len);
}

/* Key heads of a task: neighbours, so that what is read and written is wide, as many as have states of
 * STATES bytes together, and not so many that a thread has none. It changes no result, as every head is
 * computed by itself. */
static int64_t keys_of_task(const job *j, int threads)
{
    const int64_t group = j->d->HV / j->d->H, all = j->seq->n * j->d->H;
    const int64_t near = STATES / (j->d->K * j->d->V * (int64_t)sizeof(real) * group);
    const int64_t share = j->seq->n > 1 ? all / (4 * threads) : all / threads;
    return ckpt_max_i64(1, ckpt_min_i64(j->d->H, ckpt_min_i64(near, share)));
}

static ckpt_status start(ckpt_eng *e, job *j, ckpt_err *err)
{
    const ENG(kernels) *k = ENG(kernels_for)(e->isa);
    const bool step = j->d->form == CKPT_ENG_STEP;
    const size_t mark = ckpt_eng_mark(e);
    if (j->grad)
        j->kernel = step ? k->delta_step_bwd : k->delta_chunk_bwd;
    else
        j->kernel = step ? k->delta_step : k->delta_chunk;
    j->keys = keys_of_task(j, e->threads);
    j->items = (j->d->H + j->keys - 1) / j->keys;
    const int64_t heads = j->keys * (j->d->HV / j->d->H);
    j->tasks = ckpt_eng_take(e, heads * e->threads, sizeof *j->tasks);
    j->scratch_len = (k->delta_scratch(j->d->K, j->d->V, heads) + 15) / 16 * 16;
    j->scratch = ckpt_eng_take(e, j->scratch_len * e->threads, sizeof(real));
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry)
        ckpt_eng_parallel(e, j->seq->n * j->items, run, j);
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(delta)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                       const ENG(delta_in) * in, real *o, real *state, real *saved, ckpt_err *err)
{
    ckpt_status status = check(d, seq, err);
    if (status != CKPT_OK)
        return status;
    return start(e, &(job){.d = d, .seq = seq, .in = in, .o = o, .state = state, .saved = saved},
                 err);
}

ckpt_status ENG(delta_bwd)(ckpt_eng *e, const ckpt_eng_delta *d, const ckpt_eng_seq *seq,
                           const ENG(delta_in) * in, const real *saved, const real *d_o,
                           const real *d_state, const ENG(delta_grad) * grad, ckpt_err *err)
{
    ckpt_status status = check(d, seq, err);
    if (status != CKPT_OK)
        return status;
    return start(e,
                 &(job){.d = d,
                        .seq = seq,
                        .in = in,
                        .saved = (real *)(uintptr_t)saved,
                        .d_o = d_o,
                        .d_state = d_state,
                        .grad = grad},
                 err);
}
