/* Between optim.c, muon.c and optim_device.c: the optimizer of arrays that are on a device. Meanings and
 * errors: optim.h. AdamW, the norm and Muon's elementwise parts give the CPU's bits of the same
 * gradients; Muon's products are the device's, in f32. */
#ifndef CKPT_TRAIN_OPTIM_DEVICE_H
#define CKPT_TRAIN_OPTIM_DEVICE_H

#include "elementwise.h"
#include "optim.h"

ckpt_status ckpt_optim_norm_device(ckpt_eng *e, const ckpt_optim *o, const float *g, double *norm,
                                   ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_optim_step_device(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                                   float *w, float *m, float *v, const float *g,
                                   ckpt_err *err) CKPT_MUST_USE;

/* Parts of it, for ranks that have a part of the work (spread.c); all arrays are on the device.
 * The sums of squares of `slots` slots that are listed, a double a chunk one after the other, in this
 * process's memory, with room for them all; while e is dry only the sizes. */
ckpt_status ckpt_optim_sumsq_device(ckpt_eng *e, const ckpt_optim *o, const size_t *list,
                                    size_t slots, const float *g, double *sums,
                                    ckpt_err *err) CKPT_MUST_USE;
/* AdamW on elements [lo, hi) of the flat buffers, which are given whole. lo is a multiple of
 * CKPT_ENG_ALIGN (network.h). */
ckpt_status ckpt_optim_adamw_device(const ckpt_eng *e, const ckpt_optim *o,
                                    const ckpt_optim_step *s, int64_t lo, int64_t hi, float *w,
                                    float *m, float *v, const float *g,
                                    ckpt_err *err) CKPT_MUST_USE;
/* The three parts of Muon (optim.h). */
ckpt_status ckpt_muon_direction_device(const ckpt_eng *e, const ckpt_optim_config *k,
                                       const ckpt_optim_step *s, int64_t n, const float *g,
                                       float *m, float *d, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_muon_orthogonalise_device(ckpt_eng *e, const ckpt_optim_config *k, int64_t rows,
                                           int64_t cols, float *x, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_muon_apply_device(const ckpt_eng *e, int64_t n, double lr, double wd,
                                   double factor, const float *x, float *w,
                                   ckpt_err *err) CKPT_MUST_USE;
/* Copy a row-major part [rows, cols] between arrays of a device with rows ld_from and ld_to apart. */
ckpt_status ckpt_optim_copy_device(const ckpt_eng *e, int64_t rows, int64_t cols, const float *from,
                                   int64_t ld_from, float *to, int64_t ld_to,
                                   ckpt_err *err) CKPT_MUST_USE;

/* What AdamW multiplies by in step s, with weight decay wd. */
ckpt_adamw_scalars ckpt_optim_scalars(const ckpt_optim_config *c, const ckpt_optim_step *s,
                                      double wd);
/* a, b, c of iteration `step`. */
void ckpt_muon_coefficients(ckpt_muon_set set, int step, float k[3]);

#endif
