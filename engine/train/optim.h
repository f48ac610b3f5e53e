/* The optimizer: AdamW, Muon, gradient clipping, bf16 parameters with f32 master weights, and the
 * routers' bias update. Sources: mla-moe-math.md section 8; torch.optim.AdamW and torch.optim.Muon of
 * PyTorch 2.11; megatron.core.optimizer 0.16 with emerging_optimizers 0.3.
 *
 * Buffers. Parameters of a model lie one after the other in a flat buffer of f32 (network.h: `data`,
 * `grads`); slots say where. Beside it there are flat buffers of the same length for the state: m
 * (exp_avg; momentum of parameters under Muon) and v (exp_avg_sq; not touched under Muon). With bf16
 * parameters the flat buffer that is stepped is the f32 master.
 *
 * Determinism. AdamW is elementwise and compiled without contraction: its bits depend on no thread
 * count, no instruction set and no cut of the buffer, so a rank that owns elements [lo, hi) gets what
 * one process gets. The gradient norm is a sum in double over chunks of CKPT_OPTIM_CHUNK elements
 * of every parameter, inside a chunk in 32 interleaved lanes, in a fixed order. Muon works on whole
 * matrices with the engine's products: equal at any thread count on one kind of CPU.
 *
 * Subnormal results are flushed to zero on x86, as everywhere in the engine. */
#ifndef CKPT_TRAIN_OPTIM_H
#define CKPT_TRAIN_OPTIM_H

#include "engine.h"

typedef enum ckpt_optim_kind { CKPT_OPTIM_ADAMW, CKPT_OPTIM_MUON } ckpt_optim_kind;

typedef enum ckpt_muon_scale {
    CKPT_MUON_SPECTRAL,      /* sqrt(max(rows, cols)) */
    CKPT_MUON_SHAPE_SCALING, /* sqrt(max(1, rows / cols)) */
    CKPT_MUON_UNIT_RMS_NORM, /* sqrt(rows / cols) */
    CKPT_MUON_SCALE_COUNT
} ckpt_muon_scale;

/* Coefficients (a, b, c) of the iteration. simple, quintic and aol start again after their last row,
 * the others repeat it. */
typedef enum ckpt_muon_set {
    CKPT_MUON_QUINTIC,
    CKPT_MUON_SIMPLE,
    CKPT_MUON_POLAR_EXPRESS,
    CKPT_MUON_CANS,
    CKPT_MUON_AOL,
    CKPT_MUON_DEEPSEEK_V4,
    CKPT_MUON_SET_COUNT
} ckpt_muon_set;

typedef struct ckpt_optim_config {
    ckpt_optim_kind kind;
    double beta1, beta2, eps;
    bool decay_all; /* weight decay on every parameter, whatever the schema says */
    /* Muon */
    double momentum;
    bool nesterov;
    ckpt_muon_set set;
    int steps; /* of the iteration, 1 .. 99 */
    ckpt_muon_scale scale;
    double extra;     /* factor on the scale: 0.2 makes updates as large as AdamW's */
    bool muon_bf16;   /* iterate in bf16 with f32 sums, as Megatron does by default ("medium") */
    double max_norm;  /* gradient clipping; 0 = none */
    double bias_rate; /* routers' correction bias; 0 = never moved */
} ckpt_optim_config;

/* Megatron's defaults: AdamW 0.9 0.999 1e-8; Muon 0.9, no Nesterov, quintic, 5 steps, spectral, 1;
 * norm 1.0; bias rate 1e-3. */
ckpt_optim_config ckpt_optim_defaults(ckpt_optim_kind kind);
/* Errors: CKPT_E_USAGE naming the field, what it is and what it may be. */
ckpt_status ckpt_optim_config_check(const ckpt_optim_config *c, ckpt_err *err) CKPT_MUST_USE;

/* "quintic" ... and "spectral" ...: spellings of emerging_optimizers. */
bool ckpt_muon_set_parse(const char *name, ckpt_muon_set *out);
bool ckpt_muon_scale_parse(const char *name, ckpt_muon_scale *out);
const char *ckpt_muon_set_name(ckpt_muon_set set);
const char *ckpt_muon_scale_name(ckpt_muon_scale scale);

/* ---- slots ------------------------------------------------------------------------------------ */

/* One parameter. */
typedef struct ckpt_optim_slot {
    const char *name;   /* canonical; borrowed */
    int64_t at, n;      /* first element in the flat buffer, elements */
    int64_t rows, cols; /* of a parameter under Muon, else 0 */
    bool decay, muon;
    bool frozen; /* has no gradient: routers' bias */
    size_t run;  /* several ranks: index in the trainer's runs (spread.h) */
} ckpt_optim_slot;

/* Fill a slot. flags: CKPT_SCHEMA_*. No weight decay where the schema says so, on parameters with one
 * dimension and on names that end in "bias". Under CKPT_OPTIM_MUON a parameter with two dimensions is
 * orthogonalised unless it is the embedding or the head. */
void ckpt_optim_slot_set(ckpt_optim_slot *slot, const ckpt_optim_config *c, const char *name,
                         int rank, const int64_t *dims, unsigned flags, bool frozen, int64_t at);

typedef struct ckpt_optim {
    ckpt_optim_config config;
    const ckpt_optim_slot *slots; /* ascending, disjoint */
    size_t n_slots;
} ckpt_optim;

/* What changes from step to step. */
typedef struct ckpt_optim_step {
    double lr, wd;     /* schedule.h */
    double grad_scale; /* every gradient is multiplied by it, rounded to f32: clipping (1 = none) */
    int64_t t;         /* this step's number, from 1: bias correction */
} ckpt_optim_step;

/* ---- clipping --------------------------------------------------------------------------------- */

#define CKPT_OPTIM_CHUNK 16384

/* Sums of squares of g[lo, hi), which must lie in one parameter, a double a chunk into out
 * (ckpt_optim_chunks of them). Chunks begin at multiples of CKPT_OPTIM_CHUNK from the parameter's
 * first element, which is base (<= lo); a range that begins and ends at chunk borders gives the same
 * numbers as the whole parameter. g[0] is element lo. */
int64_t ckpt_optim_chunks(int64_t base, int64_t lo, int64_t hi);
void ckpt_optim_sumsq(const ckpt_eng *e, int64_t base, int64_t lo, int64_t hi, const float *g,
                      double *out);
/* L2 norm of the gradient of all slots that are not frozen, g being the whole flat buffer. */
ckpt_status ckpt_optim_norm(ckpt_eng *e, const ckpt_optim *o, const float *g, double *norm,
                            ckpt_err *err) CKPT_MUST_USE;
/* Sum of chunk sums in order: what ckpt_optim_norm takes the root of. */
double ckpt_optim_sum(const double *chunks, int64_t n);
/* min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0; NaN stays NaN. */
double ckpt_optim_clip(double norm, double max_norm);
/* First slot whose gradient has a NaN or infinity, or -1. */
int64_t ckpt_optim_find_bad(const ckpt_eng *e, const ckpt_optim *o, const float *g);

/* ---- stepping --------------------------------------------------------------------------------- */

/* AdamW on the elements [lo, hi) of all slots that are neither frozen nor under Muon:
 *   g' = g grad_scale;  m += (1-beta1)(g' - m);  v = beta2 v + (1-beta2) g'^2
 *   w = w (1 - lr wd) - lr/(1-beta1^t) m / (sqrt(v)/sqrt(1-beta2^t) + eps)
 * Every array begins with element lo. */
void ckpt_optim_adamw(const ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s, int64_t lo,
                      int64_t hi, float *w, float *m, float *v, const float *g);

/* Muon on slots [first, last) that are under it, arrays being the whole flat buffers:
 *   w *= 1 - lr wd;  m += (1-momentum)(g' - m);  d = m, or with Nesterov (1-momentum) g' + momentum m
 *   w -= lr scale extra NS(d)
 * Matrices are independent, so ranks may share them out by slots. NS: transposed if rows > cols;
 * X = d / max(|d|, 1e-7); every iteration A = X X^T, X <- a X + (b A + c A^2) X.
 * Scratch comes from e's arena. Errors: CKPT_E_NOMEM. */
ckpt_status ckpt_optim_muon(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                            size_t first, size_t last, float *w, float *m, const float *g,
                            ckpt_err *err) CKPT_MUST_USE;

/* Both, on everything. While e is dry: only the sizes. */
ckpt_status ckpt_optim_step_all(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                                float *w, float *m, float *v, const float *g,
                                ckpt_err *err) CKPT_MUST_USE;

/* The three parts of Muon, for matrices that are not whole on this rank: direction and apply are
 * elementwise, so they run on a shard; the caller gathers d, orthogonalises it and takes its part. */
/* m += (1-momentum)(g grad_scale - m); d as above. d may be g's array. */
void ckpt_muon_direction(const ckpt_eng *e, const ckpt_optim_config *c, const ckpt_optim_step *s,
                         int64_t n, const float *g, float *m, float *d);
/* A matrix of the batch: x [rows, cols], replaced by NS(x). */
typedef struct ckpt_muon_matrix {
    int64_t rows, cols;
    float *x;
} ckpt_muon_matrix;
/* Matrices [rows, cols] of one call share their rounds of work; how they are put together has no
 * influence on the result. rows, cols >= 0. */
ckpt_status ckpt_muon_orthogonalise(ckpt_eng *e, const ckpt_optim_config *c,
                                    const ckpt_muon_matrix *matrices, size_t n,
                                    ckpt_err *err) CKPT_MUST_USE;
/* Scale of a whole matrix, `extra` included. */
double ckpt_muon_factor(const ckpt_optim_config *c, int64_t rows, int64_t cols);
/* w = w (1 - lr wd) - lr factor x; wd already 0 for a parameter without decay. */
void ckpt_muon_apply(const ckpt_eng *e, int64_t n, double lr, double wd, double factor,
                     const float *x, float *w);

/* ---- bf16 -------------------------------------------------------------------------------------- */

/* Round the master to bf16, to nearest even, NaN stays NaN: x (f32 values of bf16 numbers, what the
 * engine computes with) and bits (what is stored), each or NULL. x may be master. */
void ckpt_optim_round_bf16(const ckpt_eng *e, int64_t n, const float *master, float *x,
                           uint16_t *bits);

/* ---- routers ----------------------------------------------------------------------------------- */

/* Auxiliary-loss-free balancing, once a global batch: bias[i] += rate sign(mean(counts) - counts[i]).
 * counts [E]: tokens every expert got, summed over the whole global batch; sign(0) = 0. The mean is
 * compared exactly, so order and number of ranks do not matter. Source: mla-moe-math.md section 4.1. */
void ckpt_optim_router_bias(int64_t E, const int64_t *counts, double rate, float *bias);

#endif
