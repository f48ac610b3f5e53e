/* ckpt train: continue training a checkpoint, or begin. Order of events: options, the base, what the run
 * it belongs to was, data, network and optimizer state, the directory to save in; then steps. */
#include "train_init.h"
#include "train_run.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "io.h"

#define WINDOWS_LIMIT ((uint64_t)256 << 20)

/* ---- the base -------------------------------------------------------------------------------- */

static ckpt_status check_options(const ckpt_train_run *run, ckpt_err *err)
{
    const ckpt_train_opts *o = run->o;
    if ((o->resume == NULL) == (o->init == NULL))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "choose --resume PATH, to go on from a checkpoint, or --init CONFIG, for "
                         "a new model");
    if (o->fallback && o->resume == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "--fallback without --resume PATH");
    if (o->steps < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--steps N is missing");
    if (o->data.n == 0 && o->steps > 0)
        return ckpt_fail(err, CKPT_E_USAGE, "--data FILE is missing");
    if (o->save == NULL && (o->save_every > 0 || o->save_format.n > 0 || o->keep > 0))
        return ckpt_fail(err, CKPT_E_USAGE, "%s without --save DIR",
                         o->save_every > 0      ? "--save-every"
                         : o->save_format.n > 0 ? "--save-format"
                                                : "--keep");
    return CKPT_OK;
}

/* PyTorch's state dictionaries store a tied head a second time, its optimizer steps one tensor: with the
 * embedding's bits and no state of its own the head is the embedding, and leaves the model. */
static ckpt_status tie_head(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_model *m = &run->base;
    ckpt_tied tied = CKPT_TIED_NO_QUESTION;
    int64_t head = ckpt_model_find(m, "head.weight");
    if (head < 0 || ckpt_model_find(m, "optimizer.exp_avg.embed.weight") < 0 ||
        ckpt_model_find(m, "optimizer.exp_avg.head.weight") >= 0)
        return CKPT_OK;
    ckpt_status status = ckpt_model_tied(m, &tied, err);
    if (status != CKPT_OK || tied != CKPT_TIED_EQUAL)
        return status;
    memmove(&m->tensors[head], &m->tensors[head + 1],
            (m->n_tensors - (size_t)head - 1) * sizeof *m->tensors);
    m->n_tensors--;
    ckpt_tool_note(run->tool, "%s: head.weight repeats embed.weight and has no state: tied",
                   run->from);
    return CKPT_OK;
}

static ckpt_status open_base(ckpt_train_run *run, ckpt_err *err)
{
    if (run->o->init != NULL) {
        const uint64_t seed = run->o->seed >= 0 ? (uint64_t)run->o->seed : CKPT_TRAIN_SEED;
        run->from = run->o->init;
        run->from_config = true;
        return ckpt_train_init(&run->src, &run->base, run->from, seed, (int)run->tool->g.threads,
                               err);
    }
    run->from = run->o->resume;
    ckpt_status status = ckpt_train_open_base(run, err);
    if (status == CKPT_OK && !run->o->reset_optimizer)
        status = tie_head(run, err);
    if (status != CKPT_OK)
        return status;
    if (run->has_old && !run->o->reset_optimizer)
        run->stored = run->old.training;
    return CKPT_OK;
}

/* ---- what the run was -------------------------------------------------------------------------- */

/* Learning rate and decay: said on the command line, before anything is filled in. */
static bool gives_schedule(const ckpt_train_opts *o)
{
    return o->lr >= 0 || o->min_lr >= 0 || o->init_lr >= 0 || o->weight_decay >= 0 ||
           o->lr_style >= 0 || o->lr_warmup >= 0 || o->lr_decay >= 0 || o->lr_wsd >= 0;
}

static ckpt_status judge_changes(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_buf list = {0};
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < run->changed.n; i++)
        ckpt_buf_printf(&list, "%s%s", i > 0 ? ", " : "", run->changed.items[i]);
    const char *text = list.data != NULL ? (const char *)list.data : "?";
    if (run->changed.n > 0 && !run->o->change)
        status = ckpt_fail(err, CKPT_E_USAGE,
                           "%s: the run it belongs to had other options: %s; --change goes on with "
                           "these",
                           run->from, text);
    else if (run->changed.n > 0)
        ckpt_tool_note(run->tool, "changed: %s", text);
    ckpt_buf_release(&list);
    return status;
}

/* What the checkpoint carries, or other rules; a run that goes on with others says so. */
static ckpt_status open_policy(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_policy_choice choice;
    ckpt_status status = ckpt_policy_choose(
        &run->policy, &run->base, run->has_old ? &run->old : NULL, run->o->policy, &choice, err);
    if (status != CKPT_OK)
        return status;
    ckpt_policy_hint(run->tool, &run->policy, run->o->policy);
    run->keeps_policy = choice.stored || run->policy.enabled;
    if (choice.differs && run->stored != NULL)
        status = ckpt_strings_push(&run->changed, "--policy is not what it was", err);
    return status;
}

/* ---- data ------------------------------------------------------------------------------------- */

static ckpt_status parse_windows(ckpt_train_run *run, const char *text, ckpt_err *err)
{
    size_t cap = 0;
    void *starts = NULL;
    for (const char *p = text;;) {
        p += strspn(p, " \t\r\n,");
        if (*p == '\0')
            break;
        char *end;
        errno = 0;
        long long v = strtoll(p, &end, 10);
        if (end == p || v < 0 || errno != 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "position %lld: found '%.20s', expected a number",
                             (long long)run->n_starts, p);
        ckpt_status status =
            ckpt_grow(&starts, &cap, (size_t)run->n_starts + 1, sizeof *run->starts, err);
        run->starts = starts;
        if (status != CKPT_OK)
            return status;
        run->starts[run->n_starts++] = v;
        p = end;
    }
    return run->n_starts > 0 ? CKPT_OK : ckpt_fail(err, CKPT_E_FORMAT, "no positions");
}

/* Options that are part of the data's digest: named themselves, they need no second name. */
static bool names_order(const ckpt_strings *changed)
{
    static const char *const words[] = {"--seed ",       "--seq-len ", "--data-type ",
                                        "--no-shuffle ", "--labels ",  "--windows "};
    for (size_t i = 0; i < changed->n; i++)
        for (size_t k = 0; k < sizeof words / sizeof words[0]; k++)
            if (strncmp(changed->items[i], words[k], strlen(words[k])) == 0)
                return true;
    return false;
}

static ckpt_status open_data(ckpt_train_run *run, ckpt_err *err)
{
    const ckpt_train_opts *o = run->o;
    ckpt_status status = CKPT_OK;
    ckpt_buf text = {0};
    char hex[2 * CKPT_SHA256_LEN + 1];
    int64_t V = 0;
    (void)ckpt_json_int(ckpt_json_get(run->base.config, "vocab_size"), &V);
    if (o->data.n == 0)
        return CKPT_OK;
    if (o->windows != NULL) {
        CKPT_CHECK(ckpt_read_file(o->windows, WINDOWS_LIMIT, &text, err));
        CKPT_TRY(parse_windows(run, (const char *)text.data, err), "%s", o->windows);
    }
    ckpt_data_opts opts = {.kind = (ckpt_data_kind)o->data_type,
                           .seq_len = o->seq_len,
                           .seed = (uint64_t)o->seed,
                           .shuffle = !o->no_shuffle,
                           .vocab = V,
                           .eod = -1,
                           .inner_labels = o->labels == 1,
                           .starts = run->starts,
                           .n_starts = run->n_starts};
    CKPT_CHECK(ckpt_data_open(&run->data, o->data.items, o->data.n, &opts, err));
    CKPT_CHECK(ckpt_data_digest(run->data, run->data_digest, err));
    const char *was = ckpt_json_string(ckpt_json_path(run->stored, "data.digest"));
    ckpt_hex(run->data_digest, hex);
    if (was != NULL && strcmp(was, hex) != 0 && !names_order(&run->changed))
        CKPT_CHECK(ckpt_strings_push(&run->changed,
                                     o->windows != NULL ? "--data or --windows is not what it was"
                                                        : "--data is not what it was",
                                     err));
done:
    ckpt_buf_release(&text);
    return status;
}

/* ---- network and saver -------------------------------------------------------------------------- */

/* Of the model: a rank holds a part of it. */
static long long parameters(const ENG(network) * net)
{
    long long sum = 0;
    for (size_t i = 0; i < net->n_params; i++) {
        int64_t n = 0;
        (void)ckpt_numel(net->params[i].box.rank, net->params[i].box.dims, &n);
        sum += n;
    }
    return sum;
}

static void say_where(ckpt_train_run *run)
{
    const ckpt_train_state *s = &run->trainer.state;
    const char *rule = run->o->optimizer == 1 ? "Muon" : "AdamW";
    if (run->from_config)
        ckpt_tool_note(run->tool, "%s: a new model of %lld parameters, seed %lld; %s",
                       run->src.path, parameters(&run->trainer.net), (long long)run->o->seed, rule);
    else if (run->found)
        ckpt_tool_note(run->tool, "%s: at step %lld, %lld samples, with %s's state", run->src.path,
                       (long long)s->step, (long long)s->samples, rule);
    else
        ckpt_tool_note(run->tool, "%s: weights alone; %s starts anew%s%.0lld", run->src.path, rule,
                       s->step > 0 ? " at step " : "", (long long)s->step);
    if (run->policy.enabled)
        ckpt_tool_note(run->tool, "quantisation policy %s",
                       ckpt_policy_summary(&run->tool->arena, &run->policy));
}

/* A list of positions that is too short begins again, which may not be what was meant. */
static void warn_windows(const ckpt_train_run *run)
{
    const ckpt_train_opts *o = run->o;
    const ckpt_train_state *s = &run->trainer.state;
    int64_t steps = o->steps > s->step ? o->steps - s->step : 0, last = 0;
    if (o->windows != NULL && steps > 0 && ckpt_mul_i64(steps, o->batch, &last) &&
        ckpt_add_i64(last, s->samples, &last) && last > run->n_starts)
        ckpt_tool_warn(run->tool, "%s: %lld positions for %lld samples: they are taken again",
                       o->windows, (long long)run->n_starts, (long long)last);
}

static ckpt_status open_trainer(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_status status;
    ckpt_train_config config = ckpt_train_config_of(run);
    ckpt_optim_config optim = ckpt_train_optim_of(run->o);
    CKPT_CHECK(ckpt_trainer_open(&run->trainer, &run->base, &config, &optim, &run->schedule,
                                 run->data, err));
    run->open = true;
    run->trainer.e.stop = &ckpt_tool_asked;
    if (!run->o->reset_optimizer)
        CKPT_CHECK(ckpt_trainer_load(&run->trainer, &run->found, err));
    CKPT_CHECK(ckpt_train_restore(run, err));
    run->first_step = run->trainer.state.step;
    if (run->trainer.net.n_params > 0 && ckpt_trainer_bad(&run->trainer, &run->bad))
        ckpt_tool_warn(run->tool, "%s: %s%s%s holds %s", run->from,
                       run->bad.state != NULL ? run->bad.state : "tensor",
                       run->bad.state != NULL ? " of " : " ", run->bad.tensor,
                       run->bad.nan ? "NaN" : "Inf");
done:
    if (status != CKPT_OK && status != CKPT_E_USAGE)
        ckpt_tool_frame(err, run->from);
    return status;
}

static ckpt_status begin_copy(void *self, ckpt_err *err)
{
    return ckpt_trainer_copy_begin(&((ckpt_train_run *)self)->trainer, err);
}

static ckpt_status copy_tensors(void *self, const ckpt_snapshot *s, ckpt_err *err)
{
    ckpt_train_run *run = self;
    if (run->saver.begin != NULL) /* on another thread than the steps */
        return ckpt_trainer_copy_beside(&run->trainer, s->tensors, s->n, s->data, err);
    return ckpt_trainer_copy(&((ckpt_train_run *)self)->trainer, s->tensors, s->n, s->data, err);
}

static ckpt_status open_saver(ckpt_train_run *run, ckpt_err *err)
{
    static const ckpt_dtype dtypes[] = {CKPT_F32, CKPT_F32, CKPT_BF16};
    const ckpt_train_opts *o = run->o;
    ckpt_snapshot_tensor *list = NULL;
    size_t n = 0;
    ckpt_status status = CKPT_OK;
    ckpt_saver *s = &run->saver;
    if (o->save == NULL || !(run->together || ckpt_ranks_lead(run->ranks)))
        return CKPT_OK;
    *s = (ckpt_saver){.tool = run->tool,
                      .base = &run->base,
                      .old = run->has_old ? &run->old : NULL,
                      .dir = o->save,
                      .keep = o->keep > 0 ? o->keep : 0,
                      .run_name = run->name,
                      .quant_policy = run->keeps_policy ? run->policy.text : NULL,
                      .approximate = o->approximate,
                      .allow_unknown = o->allow_unknown,
                      .begin = run->trainer.beside != NULL ? begin_copy : NULL,
                      .crew = run->together ? &run->crew : NULL,
                      .config_dtype = dtypes[o->dtype],
                      .set_dtype = o->dtype != CKPT_TRAIN_KEEP,
                      .lock_fd = -1};
    run->saving = true;
    for (size_t i = 0; i < o->save_format.n; i++)
        CKPT_CHECK(ckpt_saver_format(s, o->save_format.items[i], err));
    if (o->save_format.n == 0)
        CKPT_CHECK(ckpt_saver_format(s, NULL, err));
    CKPT_CHECK(ckpt_trainer_tensors(&run->trainer, &list, &n, err));
    CKPT_CHECK(ckpt_saver_open(s, list, n, err));
done:
    free(list);
    return status;
}

/* ---- the loop --------------------------------------------------------------------------------- */

/* A save of one step that failed, in one format or in all of them. */
static void forget_failure(ckpt_train_run *run)
{
    free(run->failed);
    run->failed = NULL;
}

/* Whether a failed save was told already, or will be by the error that ends the run. */
static bool is_told(const ckpt_train_run *run, const ckpt_save_event *event)
{
    const int64_t last = run->ending ? run->trainer.state.step : run->o->steps;
    return event->step == last || (run->failed != NULL && run->failed_step == event->step &&
                                   strcmp(run->failed, event->error) == 0);
}

/* Report what the saver has finished. */
static void take_events(ckpt_train_run *run)
{
    ckpt_save_event event;
    while (run->saving && ckpt_saver_event(&run->saver, &event)) {
        bool told = event.error != NULL && is_told(run, &event);
        if (run->failed_step != event.step || event.error != NULL)
            forget_failure(run);
        if (event.error == NULL) {
            if (!ckpt_ranks_lead(run->ranks)) { /* it is in place when rank 0 says so */
                ckpt_save_event_free(&event);
                continue;
            }
            free(run->last_path);
            run->last_path = event.path != NULL ? strdup(event.path) : NULL;
            memcpy(run->root, event.digest, sizeof run->root);
        } else {
            run->failed = strdup(event.error);
            run->failed_step = event.step;
        }
        ckpt_train_report_save(run, &event, told);
        ckpt_save_event_free(&event);
    }
}

static ckpt_status save(ckpt_train_run *run, double *stall, ckpt_err *err)
{
    ckpt_status status;
    ckpt_snapshot_tensor *list = NULL;
    ckpt_json *training = NULL, *common = NULL, *args = NULL;
    size_t n = 0;
    double seconds = 0;
    CKPT_CHECK(ckpt_trainer_tensors(&run->trainer, &list, &n, err));
    if (!run->together && !ckpt_ranks_lead(run->ranks)) {
        status = ckpt_trainer_copy(&run->trainer, list, n, NULL, err);
        run->saved_step = run->trainer.state.step;
        goto done;
    }
    if (run->data != NULL) {
        CKPT_CHECK(ckpt_train_describe(run, &training, &common, &args, err));
    } else if (run->stored != NULL) { /* nothing was trained: it is what it was */
        training = ckpt_json_dup(run->stored);
        if (training == NULL) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
    }
    ckpt_save_state state = {run->trainer.state.step, training, common, args};
    CKPT_CHECK(ckpt_saver_save(&run->saver, list, n, &state, copy_tensors, run, &seconds, err));
    run->saved_step = state.step;
    run->n_saves++;
    run->stall += seconds;
    run->worst_stall = seconds > run->worst_stall ? seconds : run->worst_stall;
    *stall = seconds;
done:
    free(list);
    ckpt_json_free(training);
    ckpt_json_free(common);
    ckpt_json_free(args);
    return status;
}

/* The last checkpoint, waited for, tried once more where its save failed. A failure of this one is the
 * run's. */
static ckpt_status save_last(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    double stall;
    if (run->o->save == NULL)
        return CKPT_OK;
    run->ending = true;
    ckpt_saver_drain(&run->saver);
    take_events(run);
    bool again = run->saved_step != run->trainer.state.step || run->failed != NULL;
    if (run->ranks != NULL) /* rank 0 knows what failed */
        CKPT_CHECK(ckpt_comm_broadcast(&run->ranks->world, &again, sizeof again, 0, err));
    if (again) {
        forget_failure(run);
        CKPT_CHECK(save(run, &stall, err));
    }
    ckpt_saver_drain(&run->saver);
    take_events(run);
    const char *newest = ckpt_train_newest(run);
    if (run->failed != NULL)
        status = ckpt_fail(err, ckpt_interrupted ? CKPT_E_INTERRUPTED : CKPT_E_IO,
                           "saving step %lld failed: %s; %s%s", (long long)run->trainer.state.step,
                           run->failed,
                           newest != NULL ? "the newest checkpoint is " : "there is no checkpoint",
                           newest != NULL ? newest : "");
done:
    return status;
}

/* SIGINT or SIGTERM: on one rank is on all. What is being saved goes on. */
static ckpt_status check_interrupted(ckpt_train_run *run, ckpt_err *err)
{
    int64_t stop = ckpt_interrupted != 0 || __atomic_load_n(&ckpt_tool_asked, __ATOMIC_RELAXED);
    ckpt_status status = CKPT_OK;
    if (run->ranks != NULL)
        status =
            ckpt_comm_allreduce(&run->ranks->world, CKPT_COMM_I64, CKPT_COMM_MAX_OF, &stop, 1, err);
    return status == CKPT_OK && stop != 0 ? ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted")
                                          : status;
}

static ckpt_status train(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    double stall = 0;
    __atomic_store_n(&ckpt_tool_ending, CKPT_ENDS_LATER, __ATOMIC_RELAXED);
    while (run->trainer.state.step < run->o->steps) {
        struct timespec start;
        clock_gettime(CLOCK_MONOTONIC, &start);
        CKPT_CHECK(check_interrupted(run, err));
        status = ckpt_trainer_step(&run->trainer, &run->report, err);
        run->bad_data = status == CKPT_E_FORMAT || status == CKPT_E_IO ? status : CKPT_OK;
        CKPT_CHECK(status);
        double seconds = ckpt_seconds_since(&start);
        run->seconds += seconds;
        ckpt_train_report_step(run, seconds, stall);
        stall = 0;
        int64_t step = run->trainer.state.step;
        if (run->o->save != NULL && run->o->save_every > 0 && step % run->o->save_every == 0)
            CKPT_CHECK(save(run, &stall, err));
        take_events(run);
    }
done:
    return status;
}

/* SIGINT or SIGTERM: save what there is, say how to go on. */
static ckpt_status stop_early(ckpt_train_run *run, ckpt_err *err)
{
    if (run->o->save == NULL)
        return CKPT_E_INTERRUPTED;
    /* Ranks stop together: their own signal may come after another's, and must not stop the saving. */
    (void)signal(SIGUSR1, SIG_IGN);
    ckpt_interrupted = 0; /* once more interrupts the saving */
    ckpt_train_erase(run);
    *err = (ckpt_err){0};
    ckpt_status status = save_last(run, err);
    if (status == CKPT_OK)
        ckpt_tool_note(run->tool,
                       "interrupted after step %lld; saved %s; go on with: ckpt train --resume %s "
                       "--steps %lld ...",
                       (long long)run->trainer.state.step, run->last_path, run->last_path,
                       (long long)run->o->steps);
    return status;
}

/* Data that cannot be trained on, on one rank or on all: the steps before it are kept. */
static ckpt_status stop_data(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_err shown = *err, why = {0};
    ckpt_status code = run->bad_data;
    ckpt_train_erase(run);
    ckpt_status status = save_last(run, &why);
    if (status != CKPT_OK)
        ckpt_tool_warn(run->tool, "%s", why.text);
    if (!ckpt_ranks_lead(run->ranks))
        return code;
    const char *newest = ckpt_train_newest(run);
    *err = (ckpt_err){0};
    return ckpt_fail(err, code, "%s; %s%s", shown.text,
                     newest != NULL ? "the last checkpoint is " : "there is no checkpoint",
                     newest != NULL ? newest : "");
}

/* A rank died: nothing can be gathered any more; what is being written is finished. */
static ckpt_status stop_dead(ckpt_train_run *run, ckpt_status status, ckpt_err *err)
{
    if (!ckpt_ranks_lead(run->ranks))
        return status;
    if (run->saving) {
        ckpt_saver_drain(&run->saver);
        take_events(run);
    }
    ckpt_train_erase(run);
    const char *newest = ckpt_train_newest(run);
    *err = (ckpt_err){0};
    return ckpt_fail(err, status, "%s; %s%s", ckpt_ranks_dead(run->ranks),
                     newest != NULL ? "the last checkpoint is " : "there is no checkpoint",
                     newest != NULL ? newest : "");
}

/* Loss or gradient is not finite: nothing is saved, what is saved stays. */
static ckpt_status stop_bad(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_err shown = *err;
    if (run->saving) {
        ckpt_saver_drain(&run->saver);
        take_events(run);
    }
    ckpt_train_erase(run);
    const char *newest = ckpt_train_newest(run);
    ckpt_train_bad now;
    if (newest == NULL)
        return CKPT_E_MISMATCH;
    if (run->bad.tensor != NULL)
        return ckpt_fail(err, CKPT_E_MISMATCH,
                         "%s; no checkpoint of this run is good: %s itself holds %s in %s%stensor "
                         "%s",
                         shown.text, run->from, run->bad.nan ? "NaN" : "Inf",
                         run->bad.state != NULL ? run->bad.state : "",
                         run->bad.state != NULL ? " of " : "", run->bad.tensor);
    if (run->saved_step == run->trainer.state.step && ckpt_trainer_bad(&run->trainer, &now))
        return ckpt_fail(err, CKPT_E_MISMATCH, "%s; the newest checkpoint, %s, holds it too",
                         shown.text, newest);
    return ckpt_fail(err, CKPT_E_MISMATCH, "%s; the last good checkpoint is %s", shown.text,
                     newest);
}

static const char *dead(void *self)
{
    return ckpt_ranks_dead(self);
}

static void save_together(ckpt_train_run *run)
{
    ckpt_ranks *r = run->ranks;
    run->together = ckpt_ranks_save_together(r);
    if (run->together)
        run->crew = (ckpt_save_crew){&r->share, &r->save_share, r->launched.snapshots, dead, r};
}

static ckpt_status run_all(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_options(run, err));
    run->o->mesh.saves = (ckpt_launch_saves){run->o->save, ckpt_train_last_saved};
    /* Before a GPU is touched: processes are forked here. */
    CKPT_CHECK(ckpt_ranks_open(run->tool, &run->o->mesh, &run->ranks, err));
    CKPT_CHECK(ckpt_tool_device(run->tool, run->o->device, err));
    CKPT_CHECK(ckpt_ranks_join(run->tool, &run->o->mesh, err));
    save_together(run);
    run->schedule_given = gives_schedule(run->o);
    CKPT_CHECK(open_base(run, err));
    CKPT_CHECK(ckpt_train_check_save(run, err));
    CKPT_CHECK(ckpt_train_resolve(run, err));
    CKPT_CHECK(open_policy(run, err));
    CKPT_CHECK(open_data(run, err));
    CKPT_CHECK(judge_changes(run, err));
    CKPT_CHECK(ckpt_train_schedule(run, err));
    CKPT_CHECK(open_trainer(run, err));
    CKPT_CHECK(ckpt_train_effects(run, err));
    CKPT_CHECK(ckpt_train_identify(run, err));
    CKPT_CHECK(open_saver(run, err));
    if (ckpt_ranks_lead(run->ranks))
        CKPT_CHECK(ckpt_train_metrics_open(run, err));
    say_where(run);
    warn_windows(run);
    status = train(run, err);
    if (status == CKPT_E_INTERRUPTED)
        status = stop_early(run, err);
    else if (status != CKPT_OK && ckpt_ranks_dead(run->ranks) != NULL)
        status = stop_dead(run, status, err);
    else if (status == CKPT_E_MISMATCH)
        status = stop_bad(run, err);
    else if (run->bad_data != CKPT_OK)
        status = stop_data(run, err);
    else if (status == CKPT_OK)
        status = save_last(run, err);
    if (status == CKPT_OK)
        ckpt_train_summary(run);
    if (status == CKPT_OK)
        status = ckpt_train_metrics_close(run, err);
done:
    ckpt_train_erase(run);
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    ckpt_train_run r = {.tool = tool, .o = opts, .saved_step = -1, .saver = {.lock_fd = -1}};
    ckpt_status status = run_all(&r, err);
    if (r.saving)
        ckpt_saver_close(&r.saver);
    if (r.metrics != NULL)
        (void)fclose(r.metrics);
    if (r.open)
        ckpt_trainer_close(&r.trainer);
    ckpt_policy_release(&r.policy);
    ckpt_data_close(r.data);
    free(r.starts);
    free(r.last_path);
    free(r.failed);
    ckpt_strings_release(&r.changed);
    ckpt_manifest_release(&r.old);
    ckpt_model_release(&r.base);
    ckpt_source_close(&r.src);
    return status;
}

const ckpt_command ckpt_cmd_train = {
    .name = "train",
    .synopsis = "--resume PATH|--init CONFIG --data FILE --steps N",
    .what = "train a model, exactly resumable from any checkpoint it saves",
    .opts = ckpt_train_rows,
    .opts_size = sizeof(ckpt_train_opts),
    .min_operands = 0,
    .max_operands = 0,
    .divides = true,
    .writes = true,
    .defaults = ckpt_train_defaults,
    .run = run,
    .examples = "  ckpt train --resume mg4/ --data tokens.bin --steps 1000 --lr 3e-4 --save run/ "
                "--save-every 100\n"
                "  ckpt train --resume run/ --data tokens.bin --steps 2000\n",
    .notes =
        "N steps are k steps, save, resume and N - k steps, bit for bit, whatever container and\n"
        "layout the checkpoint went through meanwhile. Options that are not given come from the\n"
        "checkpoint; others than its own are refused without --change. Interrupted (SIGINT,\n"
        "SIGTERM) it saves and exits 0. Balancing losses (--aux-coef) are not linear in the\n"
        "samples: ranks of --dp equal one process only at as many samples per micro-batch.\n",
};
