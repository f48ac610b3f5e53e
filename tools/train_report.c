/* What `ckpt train` says: a live line on a terminal, lines on stdout, metrics.jsonl, the summary.
 *
 * metrics.jsonl, one object a line, appended to:
 *   {"step":n,"loss":x,"grad_norm":x,"lr":x,"wd":x,"samples":n,"tokens":n,"tokens_per_second":x,
 *    "seconds":x,"tflops":x[,"utilisation":x][,"mtp_loss":x][,"aux_loss":x][,"z_loss":x]
 *    [,"save_stall":x]}                          seconds of this step; save_stall of a save before it
 *   {"event":"start","step":n,"from":path}       of a run; a step that appears again replaces the older
 *   {"event":"save","step":n,"path":p,"bytes":n,"seconds":x,"root":hex}
 *   {"event":"save_failed","step":n,"error":text} */
#include "graph.h"
#include "train_run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void write_line(ckpt_train_run *run, ckpt_jw *w)
{
    ckpt_jw_close(w, '}');
    ckpt_buf_putc(&w->buf, '\n');
    if (run->metrics != NULL && !w->buf.failed) {
        errno = 0;
        bool whole = fwrite(w->buf.data, 1, w->buf.len, run->metrics) == w->buf.len;
        whole = fflush(run->metrics) == 0 && whole; /* a killed run leaves whole lines */
        if (!whole && run->metrics_errno == 0) {
            run->metrics_errno = errno != 0 ? errno : EIO;
            ckpt_train_erase(run);
            ckpt_tool_warn(run->tool, "%s: %s; training goes on, metrics are lost",
                           run->metrics_path, strerror(run->metrics_errno));
        }
        clearerr(run->metrics);
    }
    ckpt_buf_release(&w->buf);
}

ckpt_status ckpt_train_metrics_open(ckpt_train_run *run, ckpt_err *err)
{
    const char *path = run->o->metrics;
    ckpt_jw w = {0};
    if (path == NULL && run->o->save != NULL)
        path = ckpt_path_join(&run->tool->arena, run->o->save, "metrics.jsonl");
    if (path == NULL)
        return run->o->save != NULL ? ckpt_tool_no_memory(err) : CKPT_OK;
    run->metrics_path = path;
    if (run->o->metrics == NULL) {
        ckpt_status status = ckpt_train_metrics_aside(run, path, err);
        if (status != CKPT_OK)
            return status;
    }
    run->metrics = fopen(path, "ae");
    if (run->metrics == NULL)
        return ckpt_fail_errno(err, errno, "%s", path);
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_string(&w, "event", "start");
    ckpt_jw_int(&w, "step", run->trainer.state.step);
    ckpt_jw_string(&w, "from", run->from);
    write_line(run, &w);
    return CKPT_OK;
}

ckpt_status ckpt_train_metrics_close(ckpt_train_run *run, ckpt_err *err)
{
    errno = 0;
    if (run->metrics != NULL && fclose(run->metrics) != 0 && run->metrics_errno == 0)
        run->metrics_errno = errno != 0 ? errno : EIO;
    run->metrics = NULL;
    return run->metrics_errno == 0 ? CKPT_OK
                                   : ckpt_fail_errno(err, run->metrics_errno,
                                                     "%s: metrics were lost", run->metrics_path);
}

static double tokens_a_step(const ckpt_train_run *run)
{
    return (double)run->trainer.config.batch * (double)run->trainer.config.seq_len;
}

static void metrics_step(ckpt_train_run *run, double seconds, double stall)
{
    const ckpt_train_report *r = &run->report;
    const ckpt_train_state *s = &run->trainer.state;
    double tflops = seconds > 0 ? ckpt_trainer_flops(&run->trainer) / seconds / 1e12 : 0;
    ckpt_jw w = {0};
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_int(&w, "step", s->step);
    ckpt_jw_real(&w, "loss", r->loss);
    ckpt_jw_real(&w, "grad_norm", r->grad_norm);
    ckpt_jw_real(&w, "lr", r->lr);
    ckpt_jw_real(&w, "wd", r->wd);
    ckpt_jw_int(&w, "samples", s->samples);
    ckpt_jw_int(&w, "tokens", s->tokens);
    ckpt_jw_real(&w, "tokens_per_second", seconds > 0 ? tokens_a_step(run) / seconds : 0);
    ckpt_jw_real(&w, "seconds", seconds);
    ckpt_jw_real(&w, "tflops", tflops);
    if (run->o->peak_tflops > 0)
        ckpt_jw_real(&w, "utilisation", tflops / run->o->peak_tflops);
    if (r->mtp_loss != 0)
        ckpt_jw_real(&w, "mtp_loss", r->mtp_loss);
    if (r->aux_loss != 0)
        ckpt_jw_real(&w, "aux_loss", r->aux_loss);
    if (r->z_loss != 0)
        ckpt_jw_real(&w, "z_loss", r->z_loss);
    if (stall > 0)
        ckpt_jw_real(&w, "save_stall", stall);
    write_line(run, &w);
}

void ckpt_train_erase(ckpt_train_run *run)
{
    if (run->drawn)
        fputs("\r\033[K", stderr);
    run->drawn = false;
}

void ckpt_train_report_step(ckpt_train_run *run, double seconds, double stall)
{
    const ckpt_train_report *r = &run->report;
    int64_t step = run->trainer.state.step, steps = run->o->steps;
    double done = (double)(step - run->first_step);
    double rate = run->seconds > 0 ? tokens_a_step(run) * done / run->seconds : 0;
    long left = done > 0 ? (long)(run->seconds / done * (double)(steps - step)) : 0;
    int64_t every = run->o->log_every > 0 ? run->o->log_every : 10;
    metrics_step(run, seconds, stall);
    if (run->tool->progress && !run->tool->g.json) {
        fprintf(
            stderr,
            "\r\033[Kstep %lld/%lld  loss %.4f  lr %.3g  grad %.3g  %.0f tokens/s  ETA %ld:%02ld",
            (long long)step, (long long)steps, r->loss, r->lr, r->grad_norm, rate, left / 60,
            left % 60);
        run->drawn = true;
    }
    if (ckpt_tool_text(run->tool) && (step % every == 0 || step == steps)) {
        ckpt_train_erase(run);
        printf("step %lld: loss %.6f, gradient norm %.5g, lr %.4g, %.0f tokens/s\n",
               (long long)step, r->loss, r->grad_norm, r->lr, rate);
        fflush(stdout);
    }
}

const char *ckpt_train_newest(const ckpt_train_run *run)
{
    return run->last_path != NULL || run->from_config ? run->last_path : run->src.path;
}

void ckpt_train_report_save(ckpt_train_run *run, const ckpt_save_event *event, bool told)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_jw w = {0};
    ckpt_jw_open(&w, NULL, '{');
    ckpt_jw_string(&w, "event", event->error == NULL ? "save" : "save_failed");
    ckpt_jw_int(&w, "step", event->step);
    if (event->error == NULL) {
        ckpt_hex(event->digest, hex);
        ckpt_jw_string(&w, "path", event->path);
        ckpt_jw_u64(&w, "bytes", event->bytes);
        ckpt_jw_real(&w, "seconds", event->seconds);
        ckpt_jw_string(&w, "root", hex);
    } else {
        ckpt_jw_string(&w, "error", event->error);
    }
    write_line(run, &w);
    ckpt_train_erase(run);
    if (event->error != NULL && (told || ckpt_ranks_dead(run->ranks) != NULL))
        return; /* the run ends with words of its own */
    if (event->error != NULL)
        ckpt_tool_warn(
            run->tool, "saving step %lld failed: %s; %s%s", (long long)event->step, event->error,
            ckpt_train_newest(run) != NULL ? "the newest checkpoint is " : "",
            ckpt_train_newest(run) != NULL ? ckpt_train_newest(run) : "there is no checkpoint yet");
    else if (run->tool->g.verbose)
        ckpt_tool_note(run->tool, "saved %s: %s in %.2f s", event->path,
                       ckpt_human(&run->tool->arena, event->bytes), event->seconds);
}

static void summary_json(ckpt_train_run *run, double rate)
{
    const ckpt_train_state *s = &run->trainer.state;
    ckpt_jw *w = &run->tool->json;
    ckpt_jw_int(w, "step", s->step);
    ckpt_jw_int(w, "first_step", run->first_step);
    ckpt_jw_int(w, "samples", s->samples);
    ckpt_jw_int(w, "tokens", s->tokens);
    ckpt_jw_real(w, "flops", s->flops);
    if (s->step > run->first_step) {
        ckpt_jw_real(w, "loss", run->report.loss);
        ckpt_jw_real(w, "grad_norm", run->report.grad_norm);
    }
    ckpt_jw_real(w, "seconds", run->seconds);
    ckpt_jw_real(w, "tokens_per_second", rate);
    ckpt_jw_u64(w, "saves", run->n_saves);
    ckpt_jw_real(w, "save_stall", run->stall);
    ckpt_jw_real(w, "worst_save_stall", run->worst_stall);
    ckpt_jw_string(w, "saved", run->last_path);
    if (run->last_path != NULL)
        ckpt_jw_hex(w, "root", run->root);
    ckpt_jw_lines(w, "changed", run->changed.items, run->changed.n);
    if (run->keeps_policy)
        ckpt_policy_json(w, &run->policy);
}

/* What a device was asked for as a whole (engine/graph.h). */
static void say_graphs(const ckpt_train_run *run)
{
    const ckpt_eng_graphs *g = run->trainer.graphs;
    if (g == NULL || !run->tool->g.verbose)
        return;
    if (g->off)
        ckpt_tool_note(run->tool, "CUDA graphs are off: %s", g->why);
    else
        ckpt_tool_note(run->tool, "CUDA graphs: %lld of %lld kernels, launched %lld times",
                       (long long)g->captures, (long long)g->nodes, (long long)g->launches);
}

void ckpt_train_summary(ckpt_train_run *run)
{
    const ckpt_train_state *s = &run->trainer.state;
    char hex[2 * CKPT_SHA256_LEN + 1];
    double done = (double)(s->step - run->first_step);
    double rate = run->seconds > 0 ? tokens_a_step(run) * done / run->seconds : 0;
    ckpt_train_erase(run);
    say_graphs(run);
    if (run->tool->g.json)
        summary_json(run, rate);
    if (!ckpt_tool_text(run->tool))
        return;
    if (done > 0)
        printf("%.0f step%s to step %lld: loss %.6f, %lld tokens in all, %.0f tokens/s, %.2f s\n",
               done, ckpt_tool_plural((uint64_t)done), (long long)s->step, run->report.loss,
               (long long)s->tokens, rate, run->seconds);
    else
        printf("no step to take: the checkpoint is at step %lld\n", (long long)s->step);
    if (run->last_path == NULL)
        return;
    ckpt_hex(run->root, hex);
    printf("saved %s, root %s; training waited %.1f ms a save, %.1f ms at most\n",
           ckpt_tool_clean(run->tool, run->last_path), hex,
           run->n_saves > 0 ? run->stall / (double)run->n_saves * 1e3 : 0, run->worst_stall * 1e3);
}
