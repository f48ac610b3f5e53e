/* Initial values of parameters, for `train --init`.
 *
 * By canonical name (families/hybrid.c). std is the configuration's init_std (0.02 if absent), L the
 * number of blocks of the main stack:
 *   norms                     1, or 0 where the model's norms are stored minus one (the gated output
 *                             norms of KDA, GDN and Mamba never are)
 *   biases                    0, the routers' correction bias too
 *   A_log                     ln U(1, 16)
 *   dt_bias                   dt + ln(1 - e^-dt), dt = max(exp U(ln 1e-3, ln 1e-1), 1e-4): the inverse of
 *                             softplus. GDN and GDN2: 1, as Megatron does
 *   D of Mamba                1
 *   convolutions              U(-1/sqrt(W), 1/sqrt(W)), torch's Conv1d; normal(0, std) with conv_normal
 *   o, down                   normal(0, std / sqrt(L)) with `scaled` (Megatron: sqrt(2 layers) where a
 *                             layer is two blocks); else normal(0, std)
 *   all other matrices        normal(0, std)
 * Sources: kda-math.md section 1.2 (FLA layers/kda.py, Megatron kda.py, gdn.py), Megatron-Core 0.16
 * utils.init_method_normal, scaled_init_method_normal.
 *
 * Element i of a tensor is a pure function of (seed, canonical name, i), i being its row-major number
 * in the whole tensor: any part can be made anywhere, whatever the mesh, the threads and the order.
 * Values are computed in double and rounded to f32 once. */
#ifndef CKPT_TRAIN_INIT_H
#define CKPT_TRAIN_INIT_H

#include "engine.h"

typedef struct ckpt_init_config {
    uint64_t seed;
    double std;
    int64_t blocks;   /* L */
    bool scaled;      /* Megatron's default */
    bool conv_normal; /* FLA's models */
    bool centered;    /* norm_zero_centered */
    bool zero_A_log;  /* KDA's A_log 0: FLA with a safe gate */
} ckpt_init_config;

/* Elements lo .. hi-1 of one tensor into out (out[0] is element lo). dims: of the whole tensor.
 * Errors: CKPT_E_UNSUPPORTED for a canonical name that no rule covers, CKPT_E_USAGE for a range
 * outside the tensor. */
ckpt_status ckpt_init_range(const ckpt_eng *e, const ckpt_init_config *c, const char *name,
                            int rank, const int64_t *dims, int64_t lo, int64_t hi, float *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* The rule in words, for progress and tests: "normal(0, 0.02)", "ln U(1, 16)" ... NULL if none. */
const char *ckpt_init_rule(const ckpt_init_config *c, const char *name, int rank);

#endif
