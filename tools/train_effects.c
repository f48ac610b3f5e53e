/* Options of `ckpt train` that would do nothing for this run. Values that come from the resumed
 * checkpoint are none of the command line's, and are not judged. One that asks for what is so already
 * (a coefficient of 0) is satisfied. */
#include "train_run.h"

#include <string.h>

static const char *muon(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->optimizer == 1 ? NULL : "the optimizer is AdamW; --optimizer muon chooses Muon";
}

static const char *wsd(const void *context)
{
    const ckpt_train_run *run = context;
    return run->schedule.style == CKPT_LR_WSD ? NULL : "--lr-style is not WSD";
}

static const char *init_lr(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->init_lr == 0 || run->schedule.warmup > 0 ? NULL : "there is no --lr-warmup";
}

static const char *min_lr(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->min_lr == 0 || run->schedule.style != CKPT_LR_CONSTANT
               ? NULL
               : "the learning rate is constant; --lr-style chooses a decay";
}

static const ckpt_eng_block *moe(const ckpt_train_run *run)
{
    const ckpt_eng_spec *s = &run->trainer.net.spec;
    for (int64_t b = 0; b < s->n_blocks; b++)
        if (s->blocks[b].kind == CKPT_ENG_MOE)
            return &s->blocks[b];
    return NULL;
}

static const char *aux(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->aux_coef == 0 || moe(run) != NULL ? NULL : "the model has no routers";
}

static const char *z(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->z_coef == 0 || moe(run) != NULL ? NULL : "the model has no routers";
}

static const char *bias_rate(const void *context)
{
    const ckpt_train_run *run = context;
    const ENG(network) *net = &run->trainer.net;
    for (size_t i = 0; i < net->n_params; i++)
        if (!ckpt_canon_trains(net->params[i].name))
            return NULL;
    return run->o->bias_rate == 0 ? NULL : "the model's routers have no correction bias";
}

static const char *mtp(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->mtp_coef == 0 || run->trainer.net.spec.mtp_layers > 0
               ? NULL
               : "the model has no multi-token prediction";
}

static const char *resumed(const void *context)
{
    const ckpt_train_run *run = context;
    return run->from_config ? "--init begins anew" : NULL;
}

static const char *iteration(const void *context)
{
    const ckpt_train_run *run = context;
    return run->from_config ? "--init begins anew"
                            : ckpt_no_iteration(&run->src, run->o->iteration);
}

static const char *saved(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->save == NULL ? "nothing is saved without --save DIR" : NULL;
}

static const char *peak(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->save == NULL && run->o->metrics == NULL ? "no metrics are written" : NULL;
}

static const char *shuffle(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->windows != NULL ? "--windows says the order" : NULL;
}

/* `--cp 1 --cp-mode M`, as a script says that goes through sizes, is how its one rank has it already. */
static const char *cp_mode(const void *context)
{
    const ckpt_train_run *run = context;
    return run->o->mesh.cp >= 1 ? NULL : "sequences are not cut; --cp N says on how many ranks";
}

ckpt_status ckpt_train_effects(const ckpt_train_run *run, ckpt_err *err)
{
    static const ckpt_effect rows[] = {
        {"momentum",          muon     },
        {"nesterov",          muon     },
        {"muon-steps",        muon     },
        {"muon-coefficients", muon     },
        {"muon-scale",        muon     },
        {"muon-extra",        muon     },
        {"lr-wsd",            wsd      },
        {"wsd-style",         wsd      },
        {"init-lr",           init_lr  },
        {"min-lr",            min_lr   },
        {"aux-coef",          aux      },
        {"z-coef",            z        },
        {"bias-rate",         bias_rate},
        {"mtp-coef",          mtp      },
        {"reset-optimizer",   resumed  },
        {"change",            resumed  },
        {"iteration",         iteration},
        {"approximate",       saved    },
        {"allow-unknown",     saved    },
        {"peak-tflops",       peak     },
        {"no-shuffle",        shuffle  },
        {"cp-mode",           cp_mode  },
        {NULL,                NULL     },
    };
    return ckpt_tool_effects(run->tool, rows, run, err);
}
