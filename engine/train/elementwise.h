/* Inner loops of the optimizer. Compiled without contraction and built of operations that IEEE 754
 * rounds correctly, so every instruction set gives the same bits; the widest that this machine has is
 * taken. Arrays do not overlap unless they are the same. */
#ifndef CKPT_TRAIN_ELEMENTWISE_H
#define CKPT_TRAIN_ELEMENTWISE_H

#include "engine.h"

/* Scalars of one AdamW step (optim.h), rounded to f32 as torch does. */
typedef struct ckpt_adamw_scalars {
    float scale;    /* of gradients */
    float rise1;    /* 1 - beta1 */
    float keep2;    /* beta2 */
    float rise2;    /* 1 - beta2 */
    float decay;    /* 1 - lr wd */
    float root;     /* sqrt(1 - beta2^t) */
    float eps;      /* added to the root */
    float negative; /* -lr / (1 - beta1^t) */
} ckpt_adamw_scalars;

typedef struct ckpt_elementwise {
    void (*adamw)(int64_t n, const ckpt_adamw_scalars *k, float *w, float *m, float *v,
                  const float *g);
    /* m += rise (g scale - m); d = m, or g scale + (1 - rise) (m - g scale). */
    void (*direction)(int64_t n, float scale, float rise, bool nesterov, const float *g, float *m,
                      float *d);
    /* w = w decay + negative (factor x) */
    void (*apply)(int64_t n, float decay, float negative, float factor, const float *x, float *w);
    /* In double, 32 lanes; n of any size. */
    double (*sumsq)(int64_t n, const float *x);
    /* y = bf16(x) as f32, bits or NULL. x may be y. */
    void (*round_bf16)(int64_t n, const float *x, float *y, uint16_t *bits);
} ckpt_elementwise;

const ckpt_elementwise *ckpt_elementwise_for(ckpt_eng_isa isa);

#endif
