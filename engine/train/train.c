/* The training loop: see train.h. */
#include "train.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "beside.h"
#include "checked.h"
#include "device/context.h"
#include "graph.h"
#include "resume.h"
#include "spread.h"

/* ---- opening --------------------------------------------------------------------------------- */

static ckpt_status no_memory(const ckpt_trainer *t, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for training %lld parameters",
                     (long long)t->net.n_elements);
}

/* Room for n elements in place of what *room was. */
static ckpt_status renew(const ckpt_trainer *t, int64_t n, float **room, ckpt_err *err)
{
    free(*room);
    *room = malloc((size_t)n * sizeof **room + 1);
    return *room != NULL ? CKPT_OK : no_memory(t, err);
}

/* n elements of a device's memory in such room. */
static ckpt_status bring(const ckpt_trainer *t, int64_t n, const float *x, float **room,
                         ckpt_err *err)
{
    ckpt_status status = renew(t, n, room, err);
    return status != CKPT_OK ? status : ckpt_eng_get(&t->e, *room, x, (size_t)n * sizeof *x, err);
}

static ckpt_status check_config(const ckpt_train_config *c, ckpt_err *err)
{
    int64_t tokens;
    if (c->batch < 1 || c->micro < 1 || c->seq_len < 1)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "batch %lld, micro-batch %lld, sequence %lld: all must be at least 1",
                         (long long)c->batch, (long long)c->micro, (long long)c->seq_len);
    if (c->par != NULL && (c->micro > c->batch / c->par->dp || c->batch % (c->micro * c->par->dp)))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "a batch of %lld is not divisible by micro-batch %lld on each of %d "
                         "data-parallel ranks: expected a multiple of %lld",
                         (long long)c->batch, (long long)c->micro, c->par->dp,
                         (long long)c->micro * c->par->dp);
    if (c->batch % c->micro != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "a batch of %lld is not divisible by micro-batch %lld",
                         (long long)c->batch, (long long)c->micro);
    if (!ckpt_mul_i64(c->micro, c->seq_len, &tokens) || tokens > (int64_t)1 << 28)
        return ckpt_fail(err, CKPT_E_USAGE, "a micro-batch of %lld sequences of %lld tokens",
                         (long long)c->micro, (long long)c->seq_len);
    return CKPT_OK;
}

/* How a parameter is kept. */
static ckpt_status choose_dtype(const ckpt_trainer *t, const ENG(param) * p, bool *bf16,
                                ckpt_err *err)
{
    const ckpt_canon *c = &t->base->tensors[p->tensor];
    *bf16 = false;
    if (t->config.dtype == CKPT_TRAIN_F32)
        return CKPT_OK;
    if (t->config.dtype == CKPT_TRAIN_BF16) {
        *bf16 = (c->flags & CKPT_SCHEMA_KEEP_F32) == 0;
        return CKPT_OK;
    }
    *bf16 = c->dtype == CKPT_BF16;
    if (c->dtype == CKPT_F32 || *bf16)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "tensor %s: %s is no type to train in; --dtype f32 or bf16 chooses one",
                     c->name, ckpt_dtype_get(c->dtype)->name);
}

static ckpt_status make_slots(ckpt_trainer *t, const ckpt_optim_config *optim, ckpt_err *err)
{
    size_t n = t->net.n_params;
    bool any = false;
    t->slots = calloc(n + 1, sizeof *t->slots);
    t->is_bf16 = calloc(n + 1, sizeof *t->is_bf16);
    if (t->slots == NULL || t->is_bf16 == NULL)
        return no_memory(t, err);
    for (size_t i = 0; i < n; i++) {
        const ENG(param) *p = &t->net.params[i];
        const ckpt_canon *c = &t->base->tensors[p->tensor];
        ckpt_optim_slot_set(&t->slots[i], optim, p->name, c->rank, c->dims, p->flags,
                            p->grad == NULL && p->n > 0, p->at);
        t->slots[i].n = p->n;
        ckpt_status status = choose_dtype(t, p, &t->is_bf16[i], err);
        if (status != CKPT_OK)
            return status;
        any = any || t->is_bf16[i];
    }
    t->optim = (ckpt_optim){.config = *optim, .slots = t->slots, .n_slots = n};
    t->saves_master = any;
    float **flats[] = {&t->m, &t->v, &t->master};
    for (int i = 0; i < (any ? 3 : 2); i++) {
        void *p = NULL;
        ckpt_status status = ckpt_eng_memory_new(&t->e, t->net.n_elements, sizeof(float), &p, err);
        if (status != CKPT_OK)
            return status;
        *flats[i] = p;
    }
    return CKPT_OK;
}

/* Are products of a device bf16 ones? Those of weights that are kept so. */
static bool keeps_bf16(const ckpt_model *base, const ckpt_train_config *c)
{
    int64_t embed = ckpt_model_find(base, "embed.weight");
    if (c->dtype != CKPT_TRAIN_KEEP)
        return c->dtype == CKPT_TRAIN_BF16;
    return embed >= 0 && base->tensors[embed].dtype == CKPT_BF16;
}

/* The engine's values of the masters, on a device: neighbours of one kind together. */
static ckpt_status round_on_device(ckpt_trainer *t, ckpt_err *err)
{
    const ckpt_cuda c = plain(&t->e);
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; t->master != NULL && i < t->net.n_params && status == CKPT_OK;) {
        const bool bf16 = t->is_bf16[i];
        int64_t at = t->slots[i].at, end = at;
        for (; i < t->net.n_params && t->is_bf16[i] == bf16; i++)
            end = t->slots[i].at + t->slots[i].n;
        float *to = t->net.data + at, *from = t->master + at;
        status = bf16 ? api_of(&t->e)->round_bf16(&c, end - at, from, to, err)
                      : ckpt_eng_move(&t->e, to, from, (size_t)(end - at) * sizeof *to, err);
    }
    return status != CKPT_OK ? status : t->networks->refresh(&t->e, &t->net, err);
}

/* The engine's values of the masters. */
ckpt_status ckpt_trainer_round(ckpt_trainer *t, ckpt_err *err)
{
    if (t->e.device != NULL)
        return round_on_device(t, err);
    for (size_t i = 0; t->master != NULL && i < t->net.n_params; i++) {
        const ENG(param) *p = &t->net.params[i];
        const float *master = t->master + t->slots[i].at;
        if (t->is_bf16[i])
            ckpt_optim_round_bf16(&t->e, p->n, master, p->x, NULL);
        else
            memcpy(p->x, master, (size_t)p->n * sizeof *p->x);
    }
    return CKPT_OK;
}

static ckpt_status make_batch(ckpt_trainer *t, ckpt_err *err)
{
    size_t tokens = (size_t)(t->config.micro * t->config.seq_len);
    const ckpt_eng_spec *s = &t->net.spec;
    t->ids = calloc(tokens + 1, sizeof *t->ids);
    t->labels = calloc(tokens + 1, sizeof *t->labels);
    t->cu = calloc(tokens + 2, sizeof *t->cu);
    for (int64_t b = 0; b < s->n_blocks; b++)
        if (s->blocks[b].kind == CKPT_ENG_MOE && s->blocks[b].u.moe.E > t->experts)
            t->experts = s->blocks[b].u.moe.E;
    t->n_counts = s->n_blocks * t->experts;
    if (t->experts > 0)
        t->counts = calloc(2 * (size_t)t->n_counts + 1, sizeof *t->counts);
    return t->ids != NULL && t->labels != NULL && t->cu != NULL &&
                   (t->experts == 0 || t->counts != NULL)
               ? CKPT_OK
               : no_memory(t, err);
}

static ckpt_status run_micro(ckpt_trainer *t, const ckpt_eng_seq *seq, ENG(run) * run,
                             ckpt_err *err)
{
    ENG(batch) batch = {seq, t->ids, t->labels};
    *run = (ENG(run)){.backward = true,
                      .recompute = t->config.recompute,
                      .mtp_coef = t->config.mtp_coef,
                      .expert_counts = t->experts > 0 ? t->counts + t->n_counts : NULL};
    return t->networks->run(&t->e, &t->net, &batch, run, err);
}

static ckpt_status norm_of(ckpt_trainer *t, double *norm, ckpt_err *err)
{
    if (t->e.par != NULL)
        return ckpt_spread_norm(t, norm, err);
    return ckpt_optim_norm(&t->e, &t->optim, t->net.grads, norm, err);
}

static ckpt_status step_all(ckpt_trainer *t, const ckpt_optim_step *step, float *w, ckpt_err *err)
{
    if (t->e.par != NULL)
        return ckpt_spread_step(t, step, w, err);
    return ckpt_optim_step_all(&t->e, &t->optim, step, w, t->m, t->v, t->net.grads, err);
}

/* Aux-loss-free balancing, once a step, by `counts` where the biases are. */
static ckpt_status balance(ckpt_trainer *t, const int64_t *counts, ckpt_err *err)
{
    double rate = t->optim.config.bias_rate;
    ckpt_status status = CKPT_OK;
    for (int64_t b = 0; rate != 0 && t->experts > 0 && b < t->net.spec.n_blocks; b++) {
        const ENG(block) *k = &t->net.blocks[b];
        if (k->spec.kind != CKPT_ENG_MOE || k->p.moe.router_bias == NULL)
            continue;
        const int64_t E = k->spec.u.moe.E;
        float *bias = k->p.moe.router_bias;
        if (t->master != NULL)
            bias = t->master + (bias - t->net.data);
        if (t->e.device == NULL) {
            ckpt_optim_router_bias(E, counts + b * E, rate, bias);
            continue;
        }
        const ckpt_cuda c = plain(&t->e);
        CKPT_CHECK(api_of(&t->e)->router_bias(&c, E, counts + b * E, rate, bias, err));
    }
done:
    return status;
}

typedef struct settle_job {
    ckpt_trainer *t;
    const int64_t *counts;
} settle_job;

static ckpt_status queue_settle(void *self, ckpt_err *err)
{
    const settle_job *j = self;
    ckpt_status status = balance(j->t, j->counts, err);
    return status != CKPT_OK ? status : ckpt_trainer_round(j->t, err);
}

/* After the optimizer: routers' biases, and the engine's values of the masters. */
static ckpt_status settle(ckpt_trainer *t, ckpt_err *err)
{
    static const char name[] = "settling";
    const ckpt_eng_graph_key key = {.piece = name};
    const size_t mark = ckpt_eng_mark(&t->e), bytes = (size_t)t->n_counts * sizeof *t->counts;
    settle_job j = {t, t->counts};
    int64_t *there = t->e.device != NULL ? ckpt_eng_take(&t->e, t->n_counts, sizeof *there) : NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(&t->e, err));
    if (t->e.dry)
        goto done;
    if (there != NULL && bytes > 0) {
        CKPT_CHECK(ckpt_eng_put(&t->e, there, t->counts, bytes, err));
        j.counts = there;
    }
    CKPT_CHECK(ckpt_eng_graph_run(&t->e, &key, queue_settle, &j, err));
done:
    ckpt_eng_drop(&t->e, mark);
    return status;
}

/* One dry run of everything that a step does says how much memory it needs. */
static ckpt_status reserve(ckpt_trainer *t, ckpt_err *err)
{
    ENG(run) run;
    ckpt_optim_step step = {.grad_scale = 1, .t = 1};
    ckpt_status status;
    double norm;
    for (int64_t i = 0; i <= t->config.micro; i++)
        t->cu[i] = i * t->config.seq_len;
    ckpt_eng_seq seq = {t->config.micro, t->cu};
    CKPT_CHECK(run_micro(t, &seq, &run, err));
    CKPT_CHECK(norm_of(t, &norm, err));
    CKPT_CHECK(step_all(t, &step, t->net.data, err));
    CKPT_CHECK(settle(t, err));
    CKPT_CHECK(ckpt_eng_reserve(&t->e, t->e.peak, err));
done:
    return status;
}

ckpt_status ckpt_trainer_open(ckpt_trainer *t, const ckpt_model *base,
                              const ckpt_train_config *config, const ckpt_optim_config *optim,
                              const ckpt_schedule *schedule, ckpt_data *data, ckpt_err *err)
{
    ckpt_status status;
    *t = (ckpt_trainer){
        .config = *config, .schedule = *schedule, .data = data, .base = base, .fresh = true};
    ckpt_eng_init(&t->e, config->threads);
    t->e.par = config->par;
    t->e.device = config->device;
    t->networks = ckpt_eng_networks_of(&t->e, keeps_bf16(base, config));
    if (config->device != NULL && config->par == NULL && !config->no_graphs) {
        t->graphs = calloc(1, sizeof *t->graphs);
        t->e.graphs = t->graphs;
    }
    CKPT_CHECK(check_config(config, err));
    CKPT_CHECK(ckpt_optim_config_check(optim, err));
    CKPT_CHECK(ckpt_schedule_check(schedule, err));
    CKPT_CHECK(t->networks->open(&t->net, &t->e, base, &config->spec, true, err));
    CKPT_CHECK(make_slots(t, optim, err));
    if (t->e.par != NULL)
        CKPT_CHECK(ckpt_spread_open(t, err));
    CKPT_CHECK(make_batch(t, err));
    CKPT_CHECK(reserve(t, err));
    CKPT_CHECK(ckpt_beside_open(t, err));
    if (t->master != NULL) {
        CKPT_CHECK(ckpt_eng_move(&t->e, t->master, t->net.data,
                                 (size_t)t->net.n_elements * sizeof *t->master, err));
        status = ckpt_trainer_round(t, err);
    }
done:
    if (status != CKPT_OK)
        ckpt_trainer_close(t);
    return status;
}

void ckpt_trainer_close(ckpt_trainer *t)
{
    ckpt_beside_close(t);
    if (t->graphs != NULL) {
        const ckpt_status ended = t->e.device->api->wait(&t->e.device->card, NULL);
        (void)ended; /* what failed was a step's, which said so */
        ckpt_eng_graphs_close(&t->e, t->graphs);
        free(t->graphs);
    }
    free(t->runs);
    free(t->slots);
    free(t->is_bf16);
    ckpt_eng_memory_free(&t->e, t->master);
    ckpt_eng_memory_free(&t->e, t->m);
    ckpt_eng_memory_free(&t->e, t->v);
    free(t->ids);
    free(t->labels);
    free(t->cu);
    free(t->counts);
    if (t->networks != NULL)
        t->networks->close(&t->net);
    ckpt_eng_release(&t->e);
    *t = (ckpt_trainer){0};
}

/* ---- stepping -------------------------------------------------------------------------------- */

/* Samples of this data-parallel rank. What one rank cannot read ends the step on all, with its words. */
static ckpt_status read_samples(ckpt_trainer *t, int64_t first, ckpt_eng_seq *seq, ckpt_err *err)
{
    ckpt_eng_par *par = t->config.par;
    struct {
        int64_t status;
        char text[CKPT_ERR_MAX];
    } said = {0};
    ckpt_err why = {0};
    ckpt_status status = ckpt_data_batch(t->data, first, 1, t->config.micro, t->ids, t->labels,
                                         t->cu, &seq->n, &why);
    said.status = (int64_t)status;
    snprintf(said.text, sizeof said.text, "%s", status != CKPT_OK ? why.text : "");
    if (par != NULL && par->dp > 1) { /* else all ranks read the same */
        ckpt_comm *w = par->world;
        int64_t bad = status != CKPT_OK ? w->size - w->rank : 0; /* the lowest rank speaks */
        CKPT_CHECK(ckpt_comm_allreduce(w, CKPT_COMM_I64, CKPT_COMM_MAX_OF, &bad, 1, err));
        if (bad > 0)
            CKPT_CHECK(ckpt_comm_broadcast(w, &said, sizeof said, w->size - (int)bad, err));
    }
    status = said.status == CKPT_OK ? CKPT_OK
                                    : ckpt_fail(err, (ckpt_status)said.status, "%s", said.text);
done:
    return status;
}

/* Gradients of all micro-batches, added up. */
static ckpt_status scale_grads(ckpt_trainer *t, float scale, ckpt_err *err)
{
    if (t->e.device != NULL) {
        const ckpt_cuda c = plain(&t->e);
        return api_of(&t->e)->scale(&c, t->net.n_elements, scale, t->net.grads, err);
    }
    for (int64_t k = 0; k < t->net.n_elements; k++)
        t->net.grads[k] *= scale;
    return CKPT_OK;
}

static ckpt_status accumulate(ckpt_trainer *t, ckpt_train_report *r, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_train_config *c = &t->config;
    int64_t dp = c->par != NULL ? c->par->dp : 1, d = c->par != NULL ? c->par->d : 0;
    int64_t rounds = c->batch / (c->micro * dp);
    for (int64_t i = 0; i < rounds; i++) {
        ENG(run) run;
        ckpt_eng_seq seq = {.cu = t->cu};
        CKPT_CHECK(read_samples(t, t->state.samples + (i * dp + d) * c->micro, &seq, err));
        CKPT_CHECK(run_micro(t, &seq, &run, err));
        r->loss += run.loss / (double)rounds;
        r->mtp_loss += run.mtp_loss / (double)rounds;
        r->aux_loss += run.aux_loss / (double)rounds;
        r->z_loss += run.z_loss / (double)rounds;
        for (int64_t k = 0; k < t->n_counts; k++)
            t->counts[k] += t->counts[t->n_counts + k];
    }
    if (rounds > 1)
        status = scale_grads(t, (float)(1.0 / (double)rounds), err);
done:
    return status;
}

/* Where ranks add their gradients; losses and expert counts are already those of all. */
static ckpt_status reduce(ckpt_trainer *t, ckpt_err *err)
{
    return ENG(network_sum_grads)(&t->e, &t->net, err);
}

static bool bad_element(const ckpt_optim_slot *s, const char *state, const float *x, int64_t n,
                        ckpt_train_bad *out)
{
    for (int64_t j = 0; j < n; j++)
        if (!isfinite(x[j])) {
            *out = (ckpt_train_bad){s->name, state, j, isnan(x[j])};
            return true;
        }
    return false;
}

bool ckpt_trainer_bad(const ckpt_trainer *t, ckpt_train_bad *out)
{
    const struct {
        const float *flat;
        const char *state;
    } kinds[] = {
        {t->net.data, NULL        },
        {t->master,   "master"    },
        {t->m,        "exp_avg"   },
        {t->v,        "exp_avg_sq"}
    };
    float *here = NULL; /* a parameter's share of a device's */
    bool found = false;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (size_t i = 0; kinds[k].flat != NULL && i < t->net.n_params && !found; i++) {
            const ckpt_optim_slot *s = &t->slots[i];
            const float *x = kinds[k].flat + s->at;
            const char *state = kinds[k].flat == t->m && s->muon ? "momentum" : kinds[k].state;
            if (t->e.device != NULL) {
                if (bring(t, t->net.params[i].n, x, &here, NULL) != CKPT_OK)
                    break; /* nothing is known of it; a step will say */
                x = here;
            }
            found = bad_element(s, state, x, t->net.params[i].n, out);
        }
    free(here);
    return found;
}

/* A value that is stored is the cause, a loss or a block's output only where it shows. */
static ckpt_status blame_stored(const ckpt_trainer *t, ckpt_err *err)
{
    ckpt_train_bad bad;
    if (!ckpt_trainer_bad(t, &bad))
        return CKPT_E_MISMATCH;
    return ckpt_fail(err, CKPT_E_MISMATCH, "tensor %s: %s%selement %lld is %s", bad.tensor,
                     bad.state != NULL ? bad.state : "", bad.state != NULL ? ", " : "",
                     (long long)bad.at, bad.nan ? "nan" : "infinite");
}

static ckpt_status refuse_bad(ckpt_trainer *t, const ckpt_train_report *r, ckpt_err *err)
{
    int64_t bad;
    ckpt_status status = ckpt_spread_find_bad(t, &bad, err);
    if (status != CKPT_OK)
        return status;
    double shown = isfinite(r->loss) ? r->grad_norm : r->loss;
    return ckpt_fail(err, CKPT_E_MISMATCH, "%s is %s, first in the gradient of %s",
                     isfinite(r->loss) ? "the gradient norm" : "the loss",
                     isnan(shown) ? "nan" : "infinite", /* printf gives nan a sign */
                     bad >= 0 ? t->slots[bad].name : "no tensor");
}

static ckpt_status update(ckpt_trainer *t, ckpt_train_report *r, ckpt_err *err)
{
    ckpt_optim_step step = {.t = t->state.updates + 1};
    step.grad_scale = ckpt_optim_clip(r->grad_norm, t->optim.config.max_norm);
    step.lr = r->lr = ckpt_schedule_lr(&t->schedule, t->state.samples);
    step.wd = r->wd = ckpt_schedule_wd(&t->schedule, t->state.samples);
    r->clipped = step.grad_scale < 1;
    float *w = t->master != NULL ? t->master : t->net.data;
    ckpt_beside_wait(t);
    ckpt_status status = step_all(t, &step, w, err);
    return status != CKPT_OK ? status : settle(t, err);
}

double ckpt_trainer_flops(const ckpt_trainer *t)
{
    const ckpt_train_config *c = &t->config;
    double s = (double)c->seq_len;
    return 3 * ckpt_eng_spec_flops(&t->net.spec, c->batch * c->seq_len, (double)c->batch * s * s);
}

ckpt_status ckpt_trainer_step(ckpt_trainer *t, ckpt_train_report *report, ckpt_err *err)
{
    ckpt_status status;
    *report = (ckpt_train_report){0};
    CKPT_CHECK(t->networks->zero_grads(&t->net, err));
    if (t->counts != NULL)
        memset(t->counts, 0, (size_t)t->n_counts * sizeof *t->counts);
    CKPT_CHECK(accumulate(t, report, err));
    CKPT_CHECK(reduce(t, err));
    CKPT_CHECK(norm_of(t, &report->grad_norm, err));
    if (!isfinite(report->loss) || !isfinite(report->grad_norm)) {
        status = refuse_bad(t, report, err);
        goto done;
    }
    CKPT_CHECK(update(t, report, err));
    t->fresh = false;
    t->state.step++;
    t->state.updates++;
    t->state.samples += t->config.batch;
    t->state.tokens += t->config.batch * t->config.seq_len;
    t->state.flops += ckpt_trainer_flops(t);
done:
    if (status == CKPT_E_MISMATCH)
        status = blame_stored(t, err);
    if (status != CKPT_OK && status != CKPT_E_INTERRUPTED)
        ckpt_err_frame(err, "step %lld", (long long)t->state.step + 1);
    return status;
}

/* ---- saving ---------------------------------------------------------------------------------- */

ckpt_status ckpt_trainer_tensors(const ckpt_trainer *t, ckpt_snapshot_tensor **list, size_t *n,
                                 ckpt_err *err)
{
    ckpt_snapshot_tensor *out = calloc(4 * t->net.n_params + 1, sizeof *out);
    *n = 0;
    *list = out;
    if (out == NULL)
        return no_memory(t, err);
    for (size_t i = 0; i < t->net.n_params; i++) {
        const ckpt_optim_slot *slot = &t->slots[i];
        ckpt_snapshot_tensor p = {.param = t->net.params[i].tensor,
                                  .dtype = t->is_bf16[i] ? CKPT_BF16 : CKPT_F32};
        out[(*n)++] = p;
        p.dtype = CKPT_F32;
        bool master =
            t->saves_master && (!t->fresh || ckpt_trainer_state_at(t, "master", slot->name) >= 0);
        if (master && !(slot->frozen && !t->is_bf16[i])) {
            p.state = "master";
            out[(*n)++] = p;
        }
        if (slot->frozen || t->fresh)
            continue;
        p.state = slot->muon ? "momentum" : "exp_avg";
        out[(*n)++] = p;
        if (!slot->muon) {
            p.state = "exp_avg_sq";
            out[(*n)++] = p;
        }
    }
    return CKPT_OK;
}

/* Parameter of a tensor of the base; the list is short against what is copied. */
static size_t param_of(const ckpt_trainer *t, size_t tensor)
{
    size_t lo = 0, hi = t->net.n_params;
    while (lo < hi) { /* params are in the order of the base's tensors */
        size_t mid = lo + (hi - lo) / 2;
        if (t->net.params[mid].tensor < tensor)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The flat buffer that a tensor of a checkpoint lies in; *state: a moment. */
static const float *flat_of(const ckpt_trainer *t, const ckpt_snapshot_tensor *e, bool *state)
{
    *state = e->state != NULL && strcmp(e->state, "master") != 0;
    if (e->state == NULL)
        return t->net.data;
    if (!*state)
        return t->master != NULL ? t->master : t->net.data;
    return strcmp(e->state, "exp_avg_sq") == 0 ? t->v : t->m;
}

/* What this rank keeps of a tensor, to where it lies in the whole. */
static ckpt_status place(ckpt_trainer *t, const ckpt_snapshot_tensor *e, uint8_t *data,
                         float **room, ckpt_err *err)
{
    const size_t i = param_of(t, e->param);
    bool state;
    int64_t lo, hi;
    const float *from = flat_of(t, e, &state) + t->slots[i].at;
    ckpt_spread_owned(t, i, &lo, &hi);
    from += lo;
    if (t->e.device != NULL && hi > lo) {
        ckpt_status status = bring(t, hi - lo, from, room, err);
        if (status != CKPT_OK)
            return status;
        from = *room;
    }
    ckpt_spread_put(t, i, lo, hi - lo, from, e->dtype == CKPT_BF16, data + e->offset);
    return CKPT_OK;
}

ckpt_status ckpt_trainer_copy(ckpt_trainer *t, const ckpt_snapshot_tensor *list, size_t n,
                              uint8_t *data, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    float *whole = NULL;
    for (size_t k = 0; k < n; k++) {
        size_t i = param_of(t, list[k].param);
        bool state;
        if (t->e.par != NULL && t->config.places) {
            CKPT_CHECK(place(t, &list[k], data, &whole, err));
            continue;
        }
        int64_t numel = t->net.params[i].n;
        const float *flat = flat_of(t, &list[k], &state), *from = flat + t->slots[i].at;
        if (t->e.par != NULL) {
            (void)ckpt_numel(t->net.params[i].box.rank, t->net.params[i].box.dims, &numel);
            if (data != NULL)
                CKPT_CHECK(renew(t, numel, &whole, err));
            CKPT_CHECK(ckpt_spread_gather(t, i, flat, state, whole, err));
            from = whole;
        }
        if (data == NULL)
            continue;
        uint8_t *out = data + list[k].offset;
        const bool there = t->e.device != NULL && t->e.par == NULL; /* gathered ones are here */
        if (there && list[k].dtype == CKPT_BF16) {
            CKPT_CHECK(bring(t, numel, from, &whole, err));
            from = whole;
        } else if (there) {
            CKPT_CHECK(ckpt_eng_get(&t->e, out, from, (size_t)numel * sizeof *from, err));
            continue;
        }
        if (list[k].dtype == CKPT_BF16)
            ckpt_optim_round_bf16(&t->e, numel, from, NULL, (uint16_t *)(void *)out);
        else
            memcpy(out, from, (size_t)numel * sizeof *from);
    }
done:
    free(whole);
    return status;
}

ckpt_status ckpt_trainer_copy_beside(ckpt_trainer *t, const ckpt_snapshot_tensor *list, size_t n,
                                     uint8_t *data, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t k = 0; k < n && status == CKPT_OK; k++) {
        const size_t i = param_of(t, list[k].param);
        bool state;
        const float *from = flat_of(t, &list[k], &state) + t->slots[i].at;
        status =
            ckpt_beside_bring(t, i, from, list[k].dtype == CKPT_BF16, data + list[k].offset, err);
    }
    ckpt_beside_end(t);
    return status;
}
