/* The training loop: one network, its optimizer, its schedule, its data, and where it stands.
 *
 *   ckpt_trainer_open     parameters of a bound checkpoint, room for gradients and optimizer state
 *   ckpt_trainer_load     optimizer state of the same checkpoint (or none: a fresh optimizer)
 *   ckpt_trainer_step     one global batch: batch / micro accumulations, reduction, clipping, update
 *   ckpt_trainer_tensors  what a checkpoint of this moment consists of
 *   ckpt_trainer_copy     their values, into memory that outlives the step
 *
 * One step. Gradients of micro-batches are added in order, micro-batch i holding samples
 * i*micro .. of the step's samples; the sum is divided by their number (the mean over samples, as
 * every sample has as many labels). On several ranks a micro-batch is that of all data-parallel ranks
 * together, each holding `micro` consecutive samples. Then reduce() - the one place where ranks would add theirs -, the
 * global norm, clipping, and the optimizer on the flat buffer. A step either happens whole or, when
 * loss or gradient are not finite, not at all: the error names the step and the first bad tensor.
 *
 * Resume. The next step is a function of parameters (masters included), optimizer state, the numbers in
 * ckpt_train_state, the configuration and the data files; nothing else is remembered. So saving these and
 * loading them again continues bit for bit.
 *
 * Device. With config.device parameters, gradients and optimizer state are there, and what crosses is
 * tokens, results, the norm, the experts' counts and checkpoints. Weights kept in bf16 are then multiplied in
 * bf16 (real.h); with weights in f32 all is f32. On one device the pieces of a step - forward and backward of
 * a micro-batch, the norm, the optimizer, the routers' biases with the rounding of masters - are captured when
 * they come for the second time and launched as CUDA graphs from then on (graph.h). Between them the host
 * brings tokens, offsets, rotary tables, the step's scalars and the experts' counts, fetches results and the
 * norm, and decides whether the step happens.
 *
 * Types. The engine computes in f32. A parameter whose dtype is BF16 has an f32 master that is stepped,
 * and the engine computes with the master rounded to bf16; others are stepped as they are. */
#ifndef CKPT_TRAIN_H
#define CKPT_TRAIN_H

#include "data.h"
#include "device.h"
#include "network.h"
#include "optim.h"
#include "schedule.h"
#include "snapshot.h"

typedef struct ckpt_train_config {
    int64_t batch, micro; /* samples a step, and at once on a data-parallel rank: dp * micro
                             divides batch */
    int64_t seq_len;      /* tokens a sample */
    double mtp_coef;      /* of the loss of multi-token prediction; 0 = none */
    bool recompute;       /* activations */
    int dtype;            /* ckpt_train_dtype */
    int threads;          /* 0 = all cores */
    ckpt_eng_spec_opts spec;
    ckpt_eng_par *par; /* the ranks of the run, borrowed; NULL: one process */
    ckpt_eng_device
        *device;    /* where it is computed, borrowed; NULL: here. Of several ranks each has
                                one, and par's communicators move its memory */
    bool no_graphs; /* a device's steps are launched kernel by kernel */
    bool places;    /* several ranks: their snapshots are one memory (ckpt_trainer_copy) */
} ckpt_train_config;

/* Neighbours in the flat buffer that the same ranks hold (spread.h). */
typedef struct ckpt_train_span {
    int64_t lo, hi;
    ckpt_comm *comm;
} ckpt_train_span;

enum ckpt_train_dtype {
    CKPT_TRAIN_KEEP, /* every parameter as the checkpoint stores it: F32, or BF16 with a master */
    CKPT_TRAIN_F32,
    CKPT_TRAIN_BF16 /* but for those that the schema keeps in f32 */
};

/* Where training stands: what a checkpoint says beside its tensors. */
typedef struct ckpt_train_state {
    int64_t step, samples, tokens; /* taken so far */
    int64_t updates;               /* of the optimizer: its bias correction */
    double flops;
} ckpt_train_state;

/* What one step did. */
typedef struct ckpt_train_report {
    double loss, mtp_loss, aux_loss, z_loss; /* means over the micro-batches */
    double grad_norm;                        /* before clipping */
    double lr, wd;
    bool clipped;
} ckpt_train_report;

typedef struct ckpt_trainer {
    ckpt_train_config config;
    ckpt_train_state state;
    ckpt_eng e;
    const ckpt_eng_networks *networks; /* whose functions run net */
    ENG(network) net;
    ckpt_optim optim;
    ckpt_optim_slot *slots; /* one a parameter, in the order of net.params */
    bool *is_bf16;          /* one a parameter */
    ckpt_schedule schedule;
    ckpt_data *data;        /* borrowed */
    const ckpt_model *base; /* borrowed */
    float *master;          /* flat, of every parameter; NULL: net.data is what is stepped */
    float *m, *v;           /* flat */
    bool saves_master;      /* they belong to a checkpoint, bf16 or not */
    bool fresh;             /* no optimizer state yet: none is saved */
    int32_t *ids, *labels;
    int64_t *cu, *counts; /* counts: [n_blocks, E] of the step, NULL without experts to balance */
    int64_t n_counts, experts;
    struct ckpt_beside *beside;     /* copies while steps run (beside.h), or NULL */
    struct ckpt_eng_graphs *graphs; /* of one device (graph.h); NULL: none */
    ckpt_train_span *runs;          /* several ranks */
    size_t n_runs;
} ckpt_trainer;

/* base must be bound and outlive the trainer. optim, schedule and data are taken as they are (checked).
 * Errors: CKPT_E_USAGE a configuration that does not fit together, CKPT_E_UNSUPPORTED what the engine
 * does not run or a dtype that is not trained, and those of network_open. */
ckpt_status ckpt_trainer_open(ckpt_trainer *t, const ckpt_model *base,
                              const ckpt_train_config *config, const ckpt_optim_config *optim,
                              const ckpt_schedule *schedule, ckpt_data *data,
                              ckpt_err *err) CKPT_MUST_USE;
void ckpt_trainer_close(ckpt_trainer *t);

/* Take masters and moments from the base checkpoint. *found: there are moments; without any the
 * optimizer starts anew. Errors: CKPT_E_FORMAT a parameter without the state that its optimizer needs
 * while others have it (named), CKPT_E_UNSUPPORTED states of another optimizer. */
ckpt_status ckpt_trainer_load(ckpt_trainer *t, bool *found, ckpt_err *err) CKPT_MUST_USE;

/* Errors: CKPT_E_MISMATCH loss or gradient not finite (nothing was changed); CKPT_E_FORMAT a token
 * outside the vocabulary; CKPT_E_INTERRUPTED; CKPT_E_IO reading data. */
ckpt_status ckpt_trainer_step(ckpt_trainer *t, ckpt_train_report *report,
                              ckpt_err *err) CKPT_MUST_USE;
/* A stored value that is not finite: the element of that number of `tensor` (canonical name), or of its
 * optimizer state. */
typedef struct ckpt_train_bad {
    const char *tensor, *state; /* state NULL: the parameter itself */
    int64_t at;                 /* element, of this rank's part */
    bool nan;                   /* else infinite */
} ckpt_train_bad;
/* The first one among what this rank holds of parameters, masters, moments. False: all are finite. */
bool ckpt_trainer_bad(const ckpt_trainer *t, ckpt_train_bad *out);
/* Floating-point operations of one step: three forwards of its batch. */
double ckpt_trainer_flops(const ckpt_trainer *t);

/* Tensors of a checkpoint, in a malloc'd list. */
ckpt_status ckpt_trainer_tensors(const ckpt_trainer *t, ckpt_snapshot_tensor **list, size_t *n,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Copy their values to `data`, each at its offset in the list of the snapshot that was opened with it.
 * Several ranks: all call it. With config.places `data` is the same memory on all of them; each copies what it
 * keeps of the optimizer state, and as much of the weights, and nothing crosses ranks: all is there once all have
 * returned. Without it data is NULL on ranks other than 0, which need no offsets; what crosses ranks and is kept
 * at a time is one tensor. */
ckpt_status ckpt_trainer_copy(ckpt_trainer *t, const ckpt_snapshot_tensor *list, size_t n,
                              uint8_t *data, ckpt_err *err) CKPT_MUST_USE;
/* Where t->beside is set - a device, and what is copied does not cross ranks -, the same while the next step runs: `begin` by the
 * trainer's thread, then copy_beside by another one, always, with the values of the moment of begin. The
 * step waits for its end before it changes what is copied. */
ckpt_status ckpt_trainer_copy_begin(ckpt_trainer *t, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_trainer_copy_beside(ckpt_trainer *t, const ckpt_snapshot_tensor *list, size_t n,
                                     uint8_t *data, ckpt_err *err) CKPT_MUST_USE;
/* Is a step waiting for a copy? From any thread. */
bool ckpt_trainer_waits(const ckpt_trainer *t);

#endif
