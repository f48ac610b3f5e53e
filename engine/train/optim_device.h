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

/* What AdamW multiplies by in step s, with weight decay wd. */
ckpt_adamw_scalars ckpt_optim_scalars(const ckpt_optim_config *c, const ckpt_optim_step *s,
                                      double wd);
/* a, b, c of iteration `step`. */
void ckpt_muon_coefficients(ckpt_muon_set set, int step, float k[3]);

#endif
