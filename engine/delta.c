/* Delta-rule recurrences: a task is some neighbouring query/key heads of a sequence; it runs the value heads
 * that share one in order, so that dq and dk are summed by one thread.
 *
 * Which form, where the caller leaves it: token by token for the forward of at most FEW tokens, whatever the
 * head and the gate, as a chunk of 16 costs the same however few of its tokens exist; chunks otherwise. A
 * token-head of K = V = 128 in f32 takes 1.0 us in chunks and 4.9 us by itself, its backward 2.5 and 50
 * (Xeon, 155 GFLOP/s a core); a chunk of one token takes 20 us. */
#include "kernels/kernels.h"

#include "checked.h"

#include <math.h>

#define SEG CKPT_ENG_SEGMENT_LEN
#define STATES (512 << 10) /* bytes: half of a second-level cache */
#define FEW 2              /* tokens */

typedef struct job {
    const ckpt_eng_delta *d;
    const ckpt_eng_seq *seq;
    const ENG(delta_in) * in;
    const ENG(delta_grad) * grad;     /* NULL in forward */
    ENG(delta_kernel) * kernel, *few; /* the latter for sequences of at most FEW tokens */
    real *o, *state, *saved, *scratch;
    const real *d_o, *d_state;
    int64_t scratch_len;
    int64_t keys, items;     /* key heads of a task, tasks of a sequence */
    int64_t heads;           /* value heads that a kernel runs together */
    ENG(delta_task) * tasks; /* [threads, heads] */
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
    const int64_t group = j->d->HV / j->d->H, n = item / j->items;
    const int64_t lo = item % j->items * j->keys * group,
                  hi = ckpt_min_i64(lo + j->keys * group, j->d->HV);
    ENG(delta_kernel) *kernel = j->seq->cu[n + 1] - j->seq->cu[n] <= FEW ? j->few : j->kernel;
    ENG(delta_task) *t = j->tasks + worker * j->heads;
    for (int64_t hv = lo; hv < hi; hv += j->heads) {
        const int64_t heads = ckpt_min_i64(j->heads, hi - hv);
        for (int64_t i = 0; i < heads; i++)
            fill_task(j, n, hv + i, t + i);
        kernel(t, heads, j->scratch + worker * j->scratch_len);
    }
}

/* Heads that go together: neighbours, so that what is read and written is wide, as many as have states of
 * STATES bytes, and not so many that a thread has none. It changes no result, as every head is computed
 * by itself. */
static void cut(job *j, int threads)
{
    const ckpt_eng_delta *d = j->d;
    const int64_t group = d->HV / d->H, all = j->seq->n * d->H,
                  near = STATES / (d->K * d->V * (int64_t)sizeof(real)),
                  share = j->seq->n > 1 ? all / (4 * threads) : all / threads;
    const int64_t keys = ckpt_min_i64(d->H, ckpt_min_i64(near / group, share));
    j->keys = ckpt_max_i64(1, keys);
    j->items = (d->H + j->keys - 1) / j->keys;
    j->heads = ckpt_max_i64(1, ckpt_min_i64(near, j->keys * group));
}

static ckpt_status start(ckpt_eng *e, job *j, ckpt_err *err)
{
    const ENG(kernels) *k = ENG(kernels_for)(e->isa);
    const bool step = j->d->form == CKPT_ENG_STEP;
    const size_t mark = ckpt_eng_mark(e);
    if (j->grad) {
        j->kernel = step ? k->delta_step_bwd : k->delta_chunk_bwd;
        j->few = j->kernel;
    } else {
        j->kernel = step ? k->delta_step : k->delta_chunk;
        j->few = k->delta_step;
    }
    cut(j, e->threads);
    j->tasks = ckpt_eng_take(e, j->heads * e->threads, sizeof *j->tasks);
    j->scratch_len = (k->delta_scratch(j->d->K, j->d->V, j->heads) + 15) / 16 * 16;
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
