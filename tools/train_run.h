/* Parts of `ckpt train`: options, where a run stands, its checkpoints, what it says. */
#ifndef CKPT_TOOL_TRAIN_H
#define CKPT_TOOL_TRAIN_H

#include "quant_policy.h"
#include "ranks.h"
#include "train/train.h"
#include "train_save.h"

#include <time.h>

#define CKPT_TRAIN_SEED 1234
#define CKPT_RUN_NAME 32 /* characters */

/* Not given: -1 for numbers and choices, false, NULL. What is not given comes from the checkpoint that
 * is resumed, else from the defaults. */
typedef struct ckpt_train_opts {
    ckpt_strings data, save_format;
    const char *init, *resume, *save, *metrics, *windows, *policy;
    int data_type, labels, optimizer, lr_style, wsd_style, dtype, muon_scale, muon_set;
    int device; /* ckpt_tool_device */
    int64_t steps, batch, micro, seq_len, seed, save_every, keep, log_every, iteration;
    int64_t lr_warmup, lr_decay, lr_wsd, muon_steps;
    double lr, min_lr, init_lr, weight_decay, beta1, beta2, eps, clip, momentum, muon_extra;
    double mtp_coef, aux_coef, z_coef, bias_rate, latent_eps, peak_tflops;
    ckpt_rank_opts mesh;
    bool decay_all, no_shuffle, nesterov, recompute, change, approximate, reset_optimizer,
        allow_unknown, fallback, force;
} ckpt_train_opts;

typedef struct ckpt_train_run {
    ckpt_tool *tool;
    ckpt_train_opts *o;
    ckpt_source src;
    ckpt_model base;
    ckpt_manifest old; /* of the base */
    bool has_old, from_config;
    bool goes_on;                 /* in the directory that the base is from */
    char name[CKPT_RUN_NAME + 1]; /* of the run (train_guard.c) */
    const char *from;             /* PATH of the base */
    const ckpt_json *stored;      /* the base's "training", or NULL */
    bool schedule_given;          /* the command line says something of learning rate or decay */
    ckpt_policy policy;           /* of quantisation: --policy, else the base's */
    bool keeps_policy;            /* checkpoints carry it */
    ckpt_strings changed;         /* options that differ from the stored ones, a phrase each */
    ckpt_schedule schedule;
    ckpt_data *data;
    uint8_t data_digest[CKPT_SHA256_LEN];
    int64_t *starts;
    int64_t n_starts;
    ckpt_trainer trainer;
    bool open;  /* trainer */
    bool found; /* optimizer state in the base */
    ckpt_saver saver;
    ckpt_save_crew crew;
    bool saving, together; /* together: of crew */
    ckpt_ranks *ranks;     /* NULL: one process */
    int64_t saved_step;    /* newest step handed to the saver, -1 none */
    char *last_path;       /* newest checkpoint that is in place, or NULL */
    uint8_t root[CKPT_SHA256_LEN];
    char *failed;         /* why the newest save failed, NULL if it did not */
    int64_t failed_step;  /* which that is */
    bool ending;          /* the last checkpoint is being saved */
    ckpt_status bad_data; /* why the newest step could not read its samples, or CKPT_OK */
    FILE *metrics;
    const char *metrics_path;
    int metrics_errno; /* why a line of it could not be written, or 0 */
    struct timespec start;
    int64_t first_step;
    double seconds; /* in steps */
    double stall;   /* in saves */
    size_t n_saves;
    double worst_stall;
    ckpt_train_report report; /* of the newest step */
    ckpt_train_bad bad;       /* of the base; tensor NULL: all of it is finite */
    bool drawn;
} ckpt_train_run;

/* ---- train_opts.c: the table ------------------------------------------------------------------ */

extern const ckpt_opt ckpt_train_rows[];
void ckpt_train_defaults(void *opts);
/* Fill in what was not given: from the stored options, then from Megatron's args, then from the
 * defaults. Given ones that differ from the stored are listed in run->changed. */
ckpt_status ckpt_train_resolve(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* The options that the trajectory depends on, as a new object. NULL: out of memory. */
ckpt_json *ckpt_train_options_json(const ckpt_train_opts *o);
ckpt_train_config ckpt_train_config_of(const ckpt_train_run *run);
ckpt_optim_config ckpt_train_optim_of(const ckpt_train_opts *o);

/* ---- train_effects.c -------------------------------------------------------------------------- */

/* Once the trainer is open. Errors: CKPT_E_USAGE an option on the command line that does nothing here. */
ckpt_status ckpt_train_effects(const ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;

/* ---- train_state.c: where a run stands --------------------------------------------------------- */

/* From the options, or the checkpoint's own where those were not given. */
ckpt_status ckpt_train_schedule(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* Step, samples, tokens of the base: its "training", or Megatron's common state. */
ckpt_status ckpt_train_restore(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* The manifest's "training" of this moment, Megatron's common state and args. New objects. */
ckpt_status ckpt_train_describe(const ckpt_train_run *run, ckpt_json **training, ckpt_json **common,
                                ckpt_json **args, ckpt_err *err) CKPT_MUST_USE;
/* The base's option by Megatron's name for it, or NULL. */
const ckpt_json *ckpt_train_arg(const ckpt_train_run *run, const char *name);

/* ---- train_base.c: the checkpoint to go on from ------------------------------------------------- */

/* Fill src, base and old from --resume, or with --fallback from the newest good checkpoint before it.
 * Errors: CKPT_E_MISMATCH data or manifest differ; CKPT_E_FORMAT and others of opening; each names the
 * newest good one before it. */
ckpt_status ckpt_train_open_base(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;

/* ---- train_guard.c: whose a directory is -------------------------------------------------------- */

/* Sets goes_on. CKPT_E_USAGE: --save DIR holds checkpoints of another run, without --force. */
ckpt_status ckpt_train_check_save(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* The newest checkpoint that trackers in a save directory name, of one format or several; NULL: none. */
const char *ckpt_train_last_saved(ckpt_arena *arena, const char *dir);
/* Name the run; after ckpt_train_restore. */
ckpt_status ckpt_train_identify(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* Rename another run's metrics out of the way. */
ckpt_status ckpt_train_metrics_aside(ckpt_train_run *run, const char *path,
                                     ckpt_err *err) CKPT_MUST_USE;

/* ---- train_report.c: what it says -------------------------------------------------------------- */

ckpt_status ckpt_train_metrics_open(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
/* Errors: CKPT_E_IO a line could not be written (a warning said so at the time). */
ckpt_status ckpt_train_metrics_close(ckpt_train_run *run, ckpt_err *err) CKPT_MUST_USE;
void ckpt_train_report_step(ckpt_train_run *run, double seconds, double stall);
/* What the run could go on from: the newest checkpoint it saved, else the one it came from; or NULL. */
const char *ckpt_train_newest(const ckpt_train_run *run);
/* told: a failure is for the metrics alone. */
void ckpt_train_report_save(ckpt_train_run *run, const ckpt_save_event *event, bool told);
void ckpt_train_erase(ckpt_train_run *run); /* the live line */
void ckpt_train_summary(ckpt_train_run *run);

#endif
