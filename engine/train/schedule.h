/* Learning rate and weight decay as functions of consumed samples.
 *
 * The same numbers as megatron.core.optimizer_param_scheduler.OptimizerParamScheduler of
 * Megatron-Core 0.16, in the same order of double operations. Megatron counts *samples*: n grows by
 * the global batch after every step that was taken (not after skipped ones), and the step that begins
 * with n consumed samples uses rate(n); so the first step of a warm-up from 0 changes nothing.
 *
 *   n <= warmup, warmup > 0:  init + (max - init) n / warmup
 *   constant:                 max
 *   n > decay:                min
 *   inverse-square-root:      max(min, max sqrt(max(warmup, 1)) / sqrt(max(n, 1)))
 *   else min + k (max - min), r = (n - warmup) / (decay - warmup)
 *     linear 1 - r;  cosine (cos(pi r) + 1) / 2
 *     WSD: 1 until decay - wsd, then with q = (n - (decay - wsd)) / wsd: linear 1 - q; cosine;
 *     exponential 2 (1/2)^q - 1; minus_sqrt 1 - sqrt(q)
 *   weight decay: start + c (end - start) with x = n / wd_steps: linear x; cosine
 *     (cos(pi (1 - x)) + 1) / 2; beyond wd_steps, and constant: end. */
#ifndef CKPT_TRAIN_SCHEDULE_H
#define CKPT_TRAIN_SCHEDULE_H

#include "err.h"

#include <stdint.h>

typedef enum ckpt_lr_style {
    CKPT_LR_CONSTANT,
    CKPT_LR_LINEAR,
    CKPT_LR_COSINE,
    CKPT_LR_INVERSE_SQRT,
    CKPT_LR_WSD,
    CKPT_LR_STYLE_COUNT
} ckpt_lr_style;

typedef enum ckpt_wsd_style {
    CKPT_WSD_EXPONENTIAL,
    CKPT_WSD_LINEAR,
    CKPT_WSD_COSINE,
    CKPT_WSD_MINUS_SQRT,
    CKPT_WSD_STYLE_COUNT
} ckpt_wsd_style;

typedef enum ckpt_wd_style {
    CKPT_WD_CONSTANT,
    CKPT_WD_LINEAR,
    CKPT_WD_COSINE,
    CKPT_WD_STYLE_COUNT
} ckpt_wd_style;

/* Counts are samples. A checkpoint of Megatron keeps max_lr, min_lr, warmup, decay, style, start_wd,
 * end_wd, wd_style, wd_steps and n; init_lr, wsd and wsd_style come from the command line again. */
typedef struct ckpt_schedule {
    double init_lr, max_lr, min_lr;
    int64_t warmup, decay; /* lr_warmup_steps < lr_decay_steps */
    ckpt_lr_style style;
    int64_t wsd; /* wsd_decay_steps */
    ckpt_wsd_style wsd_style;
    double start_wd, end_wd;
    int64_t wd_steps; /* wd_incr_steps */
    ckpt_wd_style wd_style;
} ckpt_schedule;

/* Errors: CKPT_E_USAGE naming the field and its bounds: 0 <= min <= max, init <= max, all finite,
 * 0 <= warmup < decay, 0 < wsd <= decay for WSD, 0 <= start_wd <= end_wd (equal when constant),
 * wd_steps >= 0 (> 0 when it grows). */
ckpt_status ckpt_schedule_check(const ckpt_schedule *s, ckpt_err *err) CKPT_MUST_USE;
/* Of the step that begins with n consumed samples; the schedule has been checked. */
double ckpt_schedule_lr(const ckpt_schedule *s, int64_t n);
double ckpt_schedule_wd(const ckpt_schedule *s, int64_t n);

/* Turn counts given in steps into samples: each times the global batch. Errors: CKPT_E_USAGE when a
 * product does not fit. */
ckpt_status ckpt_schedule_from_steps(ckpt_schedule *s, int64_t global_batch,
                                     ckpt_err *err) CKPT_MUST_USE;

/* Spellings of Megatron: "inverse-square-root", "WSD", "minus_sqrt" ... NULL and false if unknown. */
const char *ckpt_lr_style_name(ckpt_lr_style style);
const char *ckpt_wsd_style_name(ckpt_wsd_style style);
const char *ckpt_wd_style_name(ckpt_wd_style style);
bool ckpt_lr_style_parse(const char *name, ckpt_lr_style *out);
bool ckpt_wsd_style_parse(const char *name, ckpt_wsd_style *out);
bool ckpt_wd_style_parse(const char *name, ckpt_wd_style *out);

#endif
