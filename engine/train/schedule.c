/* Learning rate and weight decay over samples (schedule.h). */
#include "schedule.h"

#include <math.h>
#include <string.h>

#include "checked.h"

#define PI 3.14159265358979323846

static const char *const lr_names[] = {"constant", "linear", "cosine", "inverse-square-root",
                                       "WSD"};
static const char *const wsd_names[] = {"exponential", "linear", "cosine", "minus_sqrt"};
static const char *const wd_names[] = {"constant", "linear", "cosine"};
_Static_assert(sizeof lr_names / sizeof *lr_names == CKPT_LR_STYLE_COUNT, "a name a style");
_Static_assert(sizeof wsd_names / sizeof *wsd_names == CKPT_WSD_STYLE_COUNT, "a name a style");
_Static_assert(sizeof wd_names / sizeof *wd_names == CKPT_WD_STYLE_COUNT, "a name a style");

static int find(const char *const *names, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

const char *ckpt_lr_style_name(ckpt_lr_style style)
{
    return (unsigned)style < CKPT_LR_STYLE_COUNT ? lr_names[style] : NULL;
}

const char *ckpt_wsd_style_name(ckpt_wsd_style style)
{
    return (unsigned)style < CKPT_WSD_STYLE_COUNT ? wsd_names[style] : NULL;
}

const char *ckpt_wd_style_name(ckpt_wd_style style)
{
    return (unsigned)style < CKPT_WD_STYLE_COUNT ? wd_names[style] : NULL;
}

bool ckpt_lr_style_parse(const char *name, ckpt_lr_style *out)
{
    int i = find(lr_names, CKPT_LR_STYLE_COUNT, name);
    if (i >= 0)
        *out = (ckpt_lr_style)i;
    return i >= 0;
}

bool ckpt_wsd_style_parse(const char *name, ckpt_wsd_style *out)
{
    int i = find(wsd_names, CKPT_WSD_STYLE_COUNT, name);
    if (i >= 0)
        *out = (ckpt_wsd_style)i;
    return i >= 0;
}

bool ckpt_wd_style_parse(const char *name, ckpt_wd_style *out)
{
    int i = find(wd_names, CKPT_WD_STYLE_COUNT, name);
    if (i >= 0)
        *out = (ckpt_wd_style)i;
    return i >= 0;
}

static ckpt_status check_lr(const ckpt_schedule *s, ckpt_err *err)
{
    if (!isfinite(s->max_lr) || !isfinite(s->min_lr) || !isfinite(s->init_lr))
        return ckpt_fail(err, CKPT_E_USAGE, "schedule: a learning rate is not a finite number");
    if (s->min_lr < 0 || s->max_lr < s->min_lr)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: min_lr %g, expected 0 to the learning rate %g", s->min_lr,
                         s->max_lr);
    if (s->init_lr < 0 || s->init_lr > s->max_lr)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: init_lr %g, expected 0 to the learning rate %g", s->init_lr,
                         s->max_lr);
    if ((unsigned)s->style >= CKPT_LR_STYLE_COUNT || (unsigned)s->wsd_style >= CKPT_WSD_STYLE_COUNT)
        return ckpt_fail(err, CKPT_E_USAGE, "schedule: unknown decay style");
    if (s->decay <= 0)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: decay over %lld samples, expected at least 1",
                         (long long)s->decay);
    if (s->warmup < 0 || s->warmup >= s->decay)
        return ckpt_fail(
            err, CKPT_E_USAGE,
            "schedule: warm-up of %lld samples, expected 0 to less than the decay's %lld",
            (long long)s->warmup, (long long)s->decay);
    if (s->style == CKPT_LR_WSD && (s->wsd <= 0 || s->wsd > s->decay))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: WSD decay over %lld samples, expected 1 to the decay's %lld",
                         (long long)s->wsd, (long long)s->decay);
    return CKPT_OK;
}

ckpt_status ckpt_schedule_check(const ckpt_schedule *s, ckpt_err *err)
{
    ckpt_status status = check_lr(s, err);
    if (status != CKPT_OK)
        return status;
    if (!isfinite(s->start_wd) || !isfinite(s->end_wd) || s->start_wd < 0 ||
        s->end_wd < s->start_wd)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: weight decay from %g to %g, expected 0 <= start <= end",
                         s->start_wd, s->end_wd);
    if ((unsigned)s->wd_style >= CKPT_WD_STYLE_COUNT)
        return ckpt_fail(err, CKPT_E_USAGE, "schedule: unknown style of weight decay");
    if (s->wd_style == CKPT_WD_CONSTANT && s->start_wd < s->end_wd)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "schedule: constant weight decay, but it starts at %g and ends at %g",
                         s->start_wd, s->end_wd);
    if (s->wd_steps < (s->wd_style == CKPT_WD_CONSTANT ? 0 : 1))
        return ckpt_fail(err, CKPT_E_USAGE, "schedule: weight decay grows over %lld samples",
                         (long long)s->wd_steps);
    return CKPT_OK;
}

/* k of WSD. */
static double wsd_coefficient(const ckpt_schedule *s, int64_t n)
{
    const int64_t start = s->decay - s->wsd;
    if (n <= start)
        return 1;
    const double q = (double)(n - start) / (double)s->wsd;
    switch (s->wsd_style) {
    case CKPT_WSD_LINEAR:
        return 1 - q;
    case CKPT_WSD_COSINE:
        return 0.5 * (cos(PI * q) + 1);
    case CKPT_WSD_MINUS_SQRT:
        return 1 - sqrt(q);
    case CKPT_WSD_EXPONENTIAL:
    case CKPT_WSD_STYLE_COUNT:
        break;
    }
    return 2 * pow(0.5, q) - 1;
}

double ckpt_schedule_lr(const ckpt_schedule *s, int64_t n)
{
    if (s->warmup > 0 && n <= s->warmup)
        return s->init_lr + (s->max_lr - s->init_lr) * (double)n / (double)s->warmup;
    if (s->style == CKPT_LR_CONSTANT)
        return s->max_lr;
    if (n > s->decay)
        return s->min_lr;
    if (s->style == CKPT_LR_INVERSE_SQRT) {
        const double lr =
            s->max_lr * sqrt((double)ckpt_max_i64(s->warmup, 1)) / sqrt((double)ckpt_max_i64(n, 1));
        return lr > s->min_lr ? lr : s->min_lr;
    }
    const double r = (double)(n - s->warmup) / (double)(s->decay - s->warmup);
    double k = 1 - r;
    if (s->style == CKPT_LR_COSINE)
        k = 0.5 * (cos(PI * r) + 1);
    else if (s->style == CKPT_LR_WSD)
        k = wsd_coefficient(s, n);
    return s->min_lr + k * (s->max_lr - s->min_lr);
}

double ckpt_schedule_wd(const ckpt_schedule *s, int64_t n)
{
    if (n > s->wd_steps || s->wd_style == CKPT_WD_CONSTANT)
        return s->end_wd;
    const double x = (double)n / (double)s->wd_steps;
    const double c = s->wd_style == CKPT_WD_LINEAR ? x : 0.5 * (cos(PI * (1 - x)) + 1);
    return s->start_wd + c * (s->end_wd - s->start_wd);
}

ckpt_status ckpt_schedule_from_steps(ckpt_schedule *s, int64_t global_batch, ckpt_err *err)
{
    int64_t *const counts[] = {&s->warmup, &s->decay, &s->wsd, &s->wd_steps};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!ckpt_mul_i64(*counts[i], global_batch, counts[i]))
            return ckpt_fail(err, CKPT_E_USAGE, "schedule: more than 2^63 samples");
    return CKPT_OK;
}
