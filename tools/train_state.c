/* Where a training run stands, read from a checkpoint and written beside the next one.
 *
 * The manifest's "training" member, which every conversion carries:
 *   {"version":1,"run":hex,"step":n,"samples":n,"tokens":n,"updates":n,"flops":x,
 *    "data":{"digest":hex,"files":[name...]},
 *    "options":{option:value...}     the options that the trajectory depends on (train_opts.c)
 *    "schedule":{"init_lr":x,"max_lr":x,"min_lr":x,"warmup":n,"decay":n,"style":s,"wsd":n,
 *      "wsd_style":s,"start_wd":x,"end_wd":x,"wd_steps":n,"wd_style":s}}     counts are samples
 * updates counts steps of the optimizer, whose bias correction needs it. Random numbers are functions of
 * the seed and the sample number, so there is no generator state.
 *
 * Of Megatron-LM's checkpoints the same comes from the common state: iteration, opt_param_scheduler,
 * args.consumed_train_samples, the step of the optimizer's param_groups; and is written there again.
 * Source: megatron-dist-ckpt.md sections 1.2 and 5. */
#include "train_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STATE_VERSION 1

/* The param_group of an optimizer's non-tensor state, chained ones included, that says most: one with
 * weight decay before one without. */
static const ckpt_json *find_group(const ckpt_json *j, int depth)
{
    const ckpt_json *best = NULL;
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL && depth < 6; c = ckpt_json_next(c)) {
        double wd = 0;
        bool group = ckpt_json_is_object(c) && ckpt_json_get(c, "betas") != NULL;
        const ckpt_json *hit = group ? c : NULL;
        if (!group && (ckpt_json_is_object(c) || ckpt_json_is_array(c)))
            hit = find_group(c, depth + 1);
        if (hit != NULL && ckpt_json_double(ckpt_json_get(hit, "weight_decay"), &wd) && wd > 0)
            return hit;
        best = best == NULL ? hit : best;
    }
    return best;
}

const ckpt_json *ckpt_train_arg(const ckpt_train_run *run, const char *name)
{
    static const char *const in_groups[][2] = {
        {"lr",           "lr"          },
        {"weight_decay", "weight_decay"},
        {"adam_eps",     "eps"         }
    };
    if (run->src.config_kind != CKPT_CONFIG_MEGATRON)
        return NULL;
    const ckpt_json *arg = ckpt_json_get(run->src.config, name);
    if (arg != NULL && !ckpt_json_is_null(arg))
        return arg;
    const ckpt_json *group = find_group(ckpt_json_get(run->src.common, "optimizer"), 0);
    const ckpt_json *beta = ckpt_json_child(ckpt_json_get(group, "betas"));
    if (strcmp(name, "adam_beta1") == 0)
        return beta;
    if (strcmp(name, "adam_beta2") == 0)
        return beta != NULL ? ckpt_json_next(beta) : NULL;
    for (size_t i = 0; i < sizeof in_groups / sizeof in_groups[0]; i++)
        if (strcmp(name, in_groups[i][0]) == 0)
            return ckpt_json_get(group, in_groups[i][1]);
    return NULL;
}

/* ---- JSON ------------------------------------------------------------------------------------- */

typedef struct maker {
    ckpt_json *at;
    bool failed;
} maker;

static maker make(void)
{
    ckpt_json *j = ckpt_json_new_object();
    return (maker){j, j == NULL};
}

static void put(maker *m, const char *key, ckpt_json *value)
{
    if (value == NULL || m->failed) {
        ckpt_json_free(value);
        m->failed = true;
        return;
    }
    m->failed = !ckpt_json_set(m->at, key, value);
}

static void put_int(maker *m, const char *key, int64_t v)
{
    put(m, key, ckpt_json_new_int(v));
}

static void put_real(maker *m, const char *key, double v)
{
    put(m, key, ckpt_json_new_double(v));
}

static void put_text(maker *m, const char *key, const char *s)
{
    put(m, key, ckpt_json_new_string(s));
}

static ckpt_json *finish(maker *m)
{
    if (!m->failed)
        return m->at;
    ckpt_json_free(m->at);
    return NULL;
}

/* ---- schedule --------------------------------------------------------------------------------- */

static ckpt_json *schedule_json(const ckpt_schedule *s)
{
    maker m = make();
    put_real(&m, "init_lr", s->init_lr);
    put_real(&m, "max_lr", s->max_lr);
    put_real(&m, "min_lr", s->min_lr);
    put_int(&m, "warmup", s->warmup);
    put_int(&m, "decay", s->decay);
    put_text(&m, "style", ckpt_lr_style_name(s->style));
    put_int(&m, "wsd", s->wsd);
    put_text(&m, "wsd_style", ckpt_wsd_style_name(s->wsd_style));
    put_real(&m, "start_wd", s->start_wd);
    put_real(&m, "end_wd", s->end_wd);
    put_int(&m, "wd_steps", s->wd_steps);
    put_text(&m, "wd_style", ckpt_wd_style_name(s->wd_style));
    return finish(&m);
}

/* Members of a stored schedule by our names or Megatron's. */
typedef struct names {
    const char *max_lr, *min_lr, *warmup, *decay, *style, *start_wd, *end_wd, *wd_style, *wd_steps;
} names;
static const names own_names = {"max_lr",   "min_lr", "warmup",   "decay",   "style",
                                "start_wd", "end_wd", "wd_style", "wd_steps"};
static const names megatron_names = {"max_lr",         "min_lr",         "lr_warmup_steps",
                                     "lr_decay_steps", "lr_decay_style", "start_wd",
                                     "end_wd",         "wd_incr_style",  "wd_incr_steps"};

static ckpt_status read_schedule(ckpt_schedule *s, const ckpt_json *j, const names *n,
                                 ckpt_err *err)
{
    const char *style = ckpt_json_string(ckpt_json_get(j, n->style));
    const char *wd_style = ckpt_json_string(ckpt_json_get(j, n->wd_style));
    const char *wsd_style = ckpt_json_string(ckpt_json_get(j, "wsd_style"));
    bool ok = ckpt_json_double(ckpt_json_get(j, n->max_lr), &s->max_lr) &&
              ckpt_json_double(ckpt_json_get(j, n->min_lr), &s->min_lr) &&
              ckpt_json_int(ckpt_json_get(j, n->warmup), &s->warmup) &&
              ckpt_json_int(ckpt_json_get(j, n->decay), &s->decay) &&
              ckpt_json_double(ckpt_json_get(j, n->start_wd), &s->start_wd) &&
              ckpt_json_double(ckpt_json_get(j, n->end_wd), &s->end_wd) &&
              ckpt_json_int(ckpt_json_get(j, n->wd_steps), &s->wd_steps) && style != NULL &&
              ckpt_lr_style_parse(style, &s->style) && wd_style != NULL &&
              ckpt_wd_style_parse(wd_style, &s->wd_style);
    if (wsd_style != NULL) /* ours only: Megatron does not store these three */
        ok = ok && ckpt_wsd_style_parse(wsd_style, &s->wsd_style) &&
             ckpt_json_int(ckpt_json_get(j, "wsd"), &s->wsd) &&
             ckpt_json_double(ckpt_json_get(j, "init_lr"), &s->init_lr);
    return ok ? CKPT_OK
              : ckpt_fail(err, CKPT_E_FORMAT,
                          "the manifest's learning-rate schedule is not readable; --lr-style and "
                          "--change begin one");
}

/* Megatron's. One without a style (a checkpoint without arguments, --no-save-optim) moves nothing: the rate
 * is constant, its numbers replace those of the options. */
static ckpt_status read_megatron(ckpt_train_run *run, const ckpt_json *j, ckpt_err *err)
{
    ckpt_schedule *s = &run->schedule;
    const ckpt_json *word = ckpt_json_get(j, megatron_names.style);
    const char *style = ckpt_json_string(word);
    ckpt_lr_style known;
    if (word == NULL || ckpt_json_is_null(word) || (style != NULL && strcmp(style, "none") == 0)) {
        double wd = s->start_wd;
        (void)ckpt_json_double(ckpt_json_get(j, megatron_names.max_lr), &s->max_lr);
        (void)ckpt_json_double(ckpt_json_get(j, megatron_names.start_wd), &wd);
        s->style = CKPT_LR_CONSTANT;
        s->start_wd = s->end_wd = wd;
        s->min_lr = s->min_lr <= s->max_lr ? s->min_lr : s->max_lr;
        s->init_lr = s->init_lr <= s->max_lr ? s->init_lr : s->max_lr;
        ckpt_tool_note(run->tool,
                       "%s: its learning-rate schedule has no style: constant at %g (--lr, "
                       "--lr-style say otherwise)",
                       run->from, s->max_lr);
        return CKPT_OK;
    }
    if (style == NULL || !ckpt_lr_style_parse(style, &known))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: opt_param_scheduler.%s is '%s', expected constant, linear, cosine, "
                         "inverse-square-root or WSD; --lr-style chooses one",
                         run->from, megatron_names.style, style != NULL ? style : "no text");
    if (read_schedule(s, j, &megatron_names, NULL) == CKPT_OK)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "%s: opt_param_scheduler lacks members of a schedule; --lr-style %s begins "
                     "one from the options",
                     run->from, style);
}

static ckpt_status times(int64_t steps, int64_t batch, int64_t *out, ckpt_err *err)
{
    if (steps <= INT64_MAX / batch) {
        *out = steps * batch;
        return CKPT_OK;
    }
    return ckpt_fail(err, CKPT_E_USAGE, "%lld steps of %lld samples are too many", (long long)steps,
                     (long long)batch);
}

static ckpt_status schedule_of_options(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_train_opts *o = run->o;
    ckpt_schedule *s = &run->schedule;
    ckpt_status status;
    if (o->lr_decay < 0)
        o->lr_decay = o->steps > o->lr_warmup ? o->steps : o->lr_warmup + 1;
    *s = (ckpt_schedule){.init_lr = o->init_lr,
                         .max_lr = o->lr,
                         .min_lr = o->min_lr,
                         .style = (ckpt_lr_style)o->lr_style,
                         .wsd_style = (ckpt_wsd_style)o->wsd_style,
                         .start_wd = o->weight_decay,
                         .end_wd = o->weight_decay,
                         .wd_style = CKPT_WD_CONSTANT};
    CKPT_CHECK(times(o->lr_warmup, o->batch, &s->warmup, err));
    CKPT_CHECK(times(o->lr_decay, o->batch, &s->decay, err));
    CKPT_CHECK(times(o->lr_wsd > 0 ? o->lr_wsd : 0, o->batch, &s->wsd, err));
done:
    return status;
}

/* Megatron's own schedule, unless the command line says another. */
static const ckpt_json *megatron_schedule(const ckpt_train_run *run)
{
    const ckpt_json *j = ckpt_json_get(run->src.common, "opt_param_scheduler");
    if (j == NULL)
        j = ckpt_json_get(run->src.common, "lr_scheduler");
    return run->src.config_kind == CKPT_CONFIG_MEGATRON && ckpt_json_is_object(j) &&
                   run->stored == NULL
               ? j
               : NULL;
}

ckpt_status ckpt_train_schedule(ckpt_train_run *run, ckpt_err *err)
{
    const ckpt_json *stored = ckpt_json_get(run->stored, "schedule");
    const ckpt_json *megatron = run->schedule_given ? NULL : megatron_schedule(run);
    ckpt_status status = schedule_of_options(run, err);
    if (status != CKPT_OK)
        return status;
    if (stored != NULL && run->changed.n == 0)
        status = read_schedule(&run->schedule, stored, &own_names, err);
    else if (megatron != NULL)
        status = read_megatron(run, megatron, err);
    return status == CKPT_OK ? ckpt_schedule_check(&run->schedule, err) : status;
}

/* ---- restoring -------------------------------------------------------------------------------- */

/* The step in the param_groups of an optimizer's non-tensor state, chained ones included; -1: none. */
static int64_t group_step(const ckpt_json *j, int depth)
{
    int64_t step;
    if (depth > 5)
        return -1;
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c)) {
        const ckpt_json *s = ckpt_json_is_object(c) ? ckpt_json_get(c, "step") : NULL;
        if (ckpt_json_int(s, &step) && step >= 0)
            return step;
        if ((ckpt_json_is_object(c) || ckpt_json_is_array(c)) &&
            (step = group_step(c, depth + 1)) >= 0)
            return step;
    }
    return -1;
}

/* PyTorch stores a step with every parameter: one optimizer steps all of them together. */
static ckpt_status stored_steps(const ckpt_train_run *run, int64_t *out, ckpt_err *err)
{
    for (size_t i = 0; i < run->base.n_tensors; i++) {
        const ckpt_canon *c = &run->base.tensors[i];
        uint8_t raw[16] = {0};
        if (c->state == NULL || strcmp(c->state->name, "step") != 0 || c->bytes > sizeof raw)
            continue;
        ckpt_status status = ckpt_model_read(&run->base, i, 0, (size_t)c->bytes, raw, err);
        if (status != CKPT_OK)
            return status;
        double v = ckpt_dtype_load(c->dtype, raw, 0);
        if (!(v >= 0 && v < 9e15) || v != floor(v) || (*out >= 0 && v != (double)*out))
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor %s: step %g, others have %lld", c->name, v,
                             (long long)*out);
        *out = (int64_t)v;
    }
    return CKPT_OK;
}

static ckpt_status restore_own(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_train_state *s = &run->trainer.state;
    const ckpt_json *j = run->stored;
    struct {
        const char *key;
        int64_t *value;
    } counts[] = {
        {"step",    &s->step   },
        {"samples", &s->samples},
        {"tokens",  &s->tokens },
        {"updates", &s->updates},
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (!ckpt_json_int(ckpt_json_get(j, counts[i].key), counts[i].value) ||
            *counts[i].value < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "the manifest's training state: '%s' is no count",
                             counts[i].key);
    if (!ckpt_json_double(ckpt_json_get(j, "flops"), &s->flops))
        return ckpt_fail(err, CKPT_E_FORMAT, "the manifest's training state: no 'flops'");
    return CKPT_OK;
}

static ckpt_status restore_foreign(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_train_state *s = &run->trainer.state;
    const ckpt_json *common = run->src.common;
    int64_t step = -1;
    if (run->src.config_kind == CKPT_CONFIG_MEGATRON && run->src.iteration > 0) {
        s->step = run->src.iteration;
        s->samples = s->step * run->o->batch;
        if (!ckpt_json_int(ckpt_train_arg(run, "consumed_train_samples"), &s->samples))
            (void)ckpt_json_int(ckpt_json_path(common, "opt_param_scheduler.num_steps"),
                                &s->samples);
        s->tokens = s->samples * run->o->seq_len;
        (void)ckpt_json_double(ckpt_json_get(common, "num_floating_point_operations_so_far"),
                               &s->flops);
    }
    if (s->samples < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%lld samples consumed", (long long)s->samples);
    if (!run->found)
        return CKPT_OK;
    ckpt_status status = stored_steps(run, &step, err);
    if (status != CKPT_OK)
        return status;
    if (step < 0)
        step = group_step(ckpt_json_get(common, "optimizer"), 0);
    if (step < 0)
        step = s->step > 0 ? s->step : -1;
    if (step < 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "there are moments, but nothing says after how many steps, which AdamW's "
                         "bias correction needs; --reset-optimizer starts it anew");
    s->updates = step;
    if (s->step == 0) { /* PyTorch's own: the optimizer's count is all there is */
        s->step = step;
        s->samples = step * run->o->batch;
        s->tokens = s->samples * run->o->seq_len;
    }
    return CKPT_OK;
}

ckpt_status ckpt_train_restore(ckpt_train_run *run, ckpt_err *err)
{
    int64_t version = 0;
    if (run->o->reset_optimizer || run->from_config)
        return CKPT_OK;
    if (run->stored == NULL)
        return restore_foreign(run, err);
    if (!ckpt_json_int(ckpt_json_get(run->stored, "version"), &version) || version != STATE_VERSION)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "training state of version %lld, expected %d",
                         (long long)version, STATE_VERSION);
    ckpt_status status = restore_own(run, err);
    if (status == CKPT_OK && !run->found && run->trainer.state.updates > 0)
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "the manifest says step %lld, but there is no optimizer state; "
                           "--reset-optimizer starts it anew",
                           (long long)run->trainer.state.step);
    return status;
}

/* ---- describing ------------------------------------------------------------------------------- */

static ckpt_json *data_json(const ckpt_train_run *run)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    maker m = make();
    ckpt_json *files = ckpt_json_new_array();
    ckpt_hex(run->data_digest, hex);
    put_text(&m, "digest", hex);
    for (size_t i = 0; i < run->o->data.n && files != NULL; i++) {
        ckpt_json *name = ckpt_json_new_string(ckpt_basename(run->o->data.items[i]));
        if (name == NULL || !ckpt_json_push(files, name)) {
            ckpt_json_free(files);
            files = NULL;
        }
    }
    put(&m, "files", files);
    return finish(&m);
}

static ckpt_json *training_json(const ckpt_train_run *run)
{
    const ckpt_train_state *s = &run->trainer.state;
    maker m = make();
    put_int(&m, "version", STATE_VERSION);
    put_text(&m, "run", run->name);
    put_int(&m, "step", s->step);
    put_int(&m, "samples", s->samples);
    put_int(&m, "tokens", s->tokens);
    put_int(&m, "updates", s->updates);
    put_real(&m, "flops", s->flops);
    put(&m, "data", data_json(run));
    put(&m, "options", ckpt_train_options_json(run->o));
    put(&m, "schedule", schedule_json(&run->schedule));
    return finish(&m);
}

/* OptimizerParamScheduler.state_dict() */
static ckpt_json *scheduler_json(const ckpt_train_run *run)
{
    const ckpt_schedule *s = &run->schedule;
    maker m = make();
    put_real(&m, "max_lr", s->max_lr);
    put_int(&m, "lr_warmup_steps", s->warmup);
    put_int(&m, "num_steps", run->trainer.state.samples);
    put_text(&m, "lr_decay_style", ckpt_lr_style_name(s->style));
    put_int(&m, "lr_decay_steps", s->decay);
    put_real(&m, "min_lr", s->min_lr);
    put_real(&m, "start_wd", s->start_wd);
    put_real(&m, "end_wd", s->end_wd);
    put_text(&m, "wd_incr_style", ckpt_wd_style_name(s->wd_style));
    put_int(&m, "wd_incr_steps", s->wd_steps);
    return finish(&m);
}

static bool replace(ckpt_json *object, const char *key, int64_t step, bool fraction)
{
    ckpt_json *now = fraction ? ckpt_json_new_double((double)step) : ckpt_json_new_int(step);
    return now != NULL && ckpt_json_set(object, key, now);
}

/* Set the step of every param_group below j, and the common_step of an optimizer whose parameters have
 * one each (a tensor there; PyTorch's Adam takes a number as well). */
static bool set_steps(ckpt_json *j, int64_t step, int depth)
{
    if (depth > 5)
        return true;
    const ckpt_json *own = ckpt_json_is_object(j) ? ckpt_json_get(j, "step") : NULL;
    if (own != NULL && !replace(j, "step", step, ckpt_json_is_float(own)))
        return false;
    if (ckpt_json_is_object(j) && ckpt_json_get(j, "common_step") != NULL &&
        !replace(j, "common_step", step, true))
        return false;
    for (ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c))
        if ((ckpt_json_is_object(c) || ckpt_json_is_array(c)) && !set_steps(c, step, depth + 1))
            return false;
    return true;
}

/* Values that have no form in JSON are shown as {"$kind":...}: such a state cannot be written again. */
static bool is_plain(const ckpt_json *j, int depth)
{
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c))
        if ((ckpt_json_key(c) != NULL && ckpt_json_key(c)[0] == '$') || depth > 20 ||
            ((ckpt_json_is_object(c) || ckpt_json_is_array(c)) && !is_plain(c, depth + 1)))
            return false;
    return true;
}

static ckpt_json *group_json(const ckpt_train_run *run, bool decay)
{
    const ckpt_train_opts *o = run->o;
    maker m = make();
    ckpt_json *betas = ckpt_json_new_array();
    bool ok = betas != NULL && ckpt_json_push(betas, ckpt_json_new_double(o->beta1)) &&
              ckpt_json_push(betas, ckpt_json_new_double(o->beta2));
    put_real(&m, "wd_mult", decay ? 1 : 0);
    put_real(&m, "lr_mult", 1);
    put(&m, "is_expert_parallel", ckpt_json_new_bool(false));
    put(&m, "is_decoupled_lr", ckpt_json_new_bool(false));
    put_real(&m, "max_lr", run->schedule.max_lr);
    put_real(&m, "min_lr", run->schedule.min_lr);
    put_real(&m, "lr", run->report.lr);
    put_real(&m, "weight_decay", decay ? o->weight_decay : 0);
    put_real(&m, "eps", o->eps);
    put_int(&m, "step", run->trainer.state.updates);
    put(&m, "betas", betas);
    m.failed = m.failed || !ok;
    return finish(&m);
}

/* The common state's "optimizer": the base's own with another step, or a new one. */
static ckpt_json *optimizer_json(const ckpt_train_run *run)
{
    const ckpt_json *own = ckpt_json_get(run->src.common, "optimizer");
    if (run->src.config_kind == CKPT_CONFIG_MEGATRON && find_group(own, 0) != NULL) {
        ckpt_json *copy = ckpt_json_dup(own);
        if (copy == NULL || !set_steps(copy, run->trainer.state.updates, 0)) {
            ckpt_json_free(copy);
            return NULL;
        }
        if (is_plain(copy, 0))
            return copy;
        ckpt_json_free(copy);
    }
    maker m = make(), inner = make();
    ckpt_json *groups = ckpt_json_new_array();
    bool ok = groups != NULL && ckpt_json_push(groups, group_json(run, true)) &&
              ckpt_json_push(groups, group_json(run, false));
    put(&inner, "param_groups", groups);
    inner.failed = inner.failed || !ok;
    put(&m, "optimizer", finish(&inner));
    put_text(&m, "param_state_sharding_type", "fully_reshardable");
    return finish(&m);
}

ckpt_status ckpt_train_describe(const ckpt_train_run *run, ckpt_json **training, ckpt_json **common,
                                ckpt_json **args, ckpt_err *err)
{
    const ckpt_train_state *s = &run->trainer.state;
    maker c = make(), a = make();
    put_int(&c, "iteration", s->step);
    put(&c, "num_floating_point_operations_so_far",
        s->flops < 9e18 ? ckpt_json_new_int((int64_t)s->flops) : ckpt_json_new_double(s->flops));
    put(&c, "opt_param_scheduler", scheduler_json(run));
    if (!run->trainer.fresh)
        put(&c, "optimizer", optimizer_json(run));
    put_int(&a, "iteration", s->step);
    put_int(&a, "consumed_train_samples", s->samples);
    put_int(&a, "skipped_train_samples", 0);
    put_int(&a, "consumed_valid_samples", 0);
    *training = training_json(run);
    *common = finish(&c);
    *args = finish(&a);
    return *training != NULL && *common != NULL && *args != NULL ? CKPT_OK
                                                                 : ckpt_tool_no_memory(err);
}
