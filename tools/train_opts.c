/* Options of `ckpt train`: the table, and where their values come from. Options that the trajectory
 * depends on travel with every checkpoint under their names here. */
#include "train_run.h"

#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(ckpt_train_opts, field)
/* clang-format off */
const ckpt_opt ckpt_train_rows[] = {
    {"resume",          CKPT_OPT_STRING, AT(resume),      "PATH", "continue from a checkpoint (a save root: its newest); without optimizer state it starts anew", 0, 0},
    {"init",            CKPT_OPT_STRING, AT(init),        "CONFIG", "a new model from a config.json or a directory with one", 0, 0},
    {"iteration",       CKPT_OPT_INT,    AT(iteration),   "N", "iteration of a save root (default: newest)", 0, INT64_MAX},
    {"fallback",        CKPT_OPT_FLAG,   AT(fallback),    NULL, "if the checkpoint is damaged: take the newest good one before it", 0, 0},
    {"data",            CKPT_OPT_LIST,   AT(data),        "FILE", "tokens; several files follow each other; repeatable", 0, 0},
    {"data-type",       CKPT_OPT_CHOICE, AT(data_type),   "auto|bytes|u16|u32|indexed", "what the files are (default auto: Megatron's .bin/.idx, else bytes)", 0, 0},
    {"windows",         CKPT_OPT_STRING, AT(windows),     "FILE", "take samples at these token positions, in order (decimal numbers)", 0, 0},
    {"labels",          CKPT_OPT_CHOICE, AT(labels),      "next|inside", "the last token of a sample is labelled by the next one (default), or not", 0, 0},
    {"no-shuffle",      CKPT_OPT_FLAG,   AT(no_shuffle),  NULL, "take samples in the order of the files", 0, 0},
    {"seed",            CKPT_OPT_INT,    AT(seed),        "N", "of sample order and initial values (default 1234)", 0, INT64_MAX},
    {"steps",           CKPT_OPT_INT,    AT(steps),       "N", "train up to this step in all, resumed ones included", 0, INT64_MAX},
    {"batch",           CKPT_OPT_INT,    AT(batch),       "N", "samples a step (default 8)", 1, 1 << 24},
    {"micro-batch",     CKPT_OPT_INT,    AT(micro),       "N", "samples at once, on each of --dp ranks; gradients are accumulated (default: batch / dp)", 1, 1 << 24},
    {"seq-len",         CKPT_OPT_INT,    AT(seq_len),     "N", "tokens a sample (default 256)", 1, 1 << 24},
    {"optimizer",       CKPT_OPT_CHOICE, AT(optimizer),   "adamw|muon", "Muon moves matrices, AdamW the rest (default adamw)", 0, 0},
    {"lr",              CKPT_OPT_REAL,   AT(lr),          "X", "learning rate (default 3e-4)", 0, 0},
    {"min-lr",          CKPT_OPT_REAL,   AT(min_lr),      "X", "where the decay ends (default 0)", 0, 0},
    {"init-lr",         CKPT_OPT_REAL,   AT(init_lr),     "X", "where the warm-up begins (default 0)", 0, 0},
    {"lr-style",        CKPT_OPT_CHOICE, AT(lr_style),    "constant|linear|cosine|inverse-square-root|WSD", "decay (default constant)", 0, 0},
    {"lr-warmup",       CKPT_OPT_INT,    AT(lr_warmup),   "N", "steps of warm-up (default 0)", 0, INT32_MAX},
    {"lr-decay",        CKPT_OPT_INT,    AT(lr_decay),    "N", "step at which the decay ends (default: --steps)", 1, INT32_MAX},
    {"lr-wsd",          CKPT_OPT_INT,    AT(lr_wsd),      "N", "WSD: steps of its decay", 1, INT32_MAX},
    {"wsd-style",       CKPT_OPT_CHOICE, AT(wsd_style),   "exponential|linear|cosine|minus_sqrt", "WSD: form of its decay (default exponential)", 0, 0},
    {"weight-decay",    CKPT_OPT_REAL,   AT(weight_decay), "X", "decoupled; not on norms, biases, A_log, dt_bias (default 0.1)", 0, 0},
    {"decay-all",       CKPT_OPT_FLAG,   AT(decay_all),   NULL, "weight decay on every parameter", 0, 0},
    {"beta1",           CKPT_OPT_REAL,   AT(beta1),       "X", "AdamW (default 0.9)", 0, 0},
    {"beta2",           CKPT_OPT_REAL,   AT(beta2),       "X", "AdamW (default 0.95)", 0, 0},
    {"eps",             CKPT_OPT_REAL,   AT(eps),         "X", "AdamW (default 1e-8)", 0, 0},
    {"clip-grad",       CKPT_OPT_REAL,   AT(clip),        "X", "largest global gradient norm; 0: none (default 1)", 0, 0},
    {"momentum",        CKPT_OPT_REAL,   AT(momentum),    "X", "Muon (default 0.9)", 0, 0},
    {"nesterov",        CKPT_OPT_FLAG,   AT(nesterov),    NULL, "Muon: Nesterov's momentum", 0, 0},
    {"muon-steps",      CKPT_OPT_INT,    AT(muon_steps),  "N", "Newton-Schulz iterations (default 5)", 1, 99},
    {"muon-coefficients", CKPT_OPT_CHOICE, AT(muon_set),  "quintic|simple|polar_express|cans|aol|deepseekv4", "of the iteration (default quintic)", 0, 0},
    {"muon-scale",      CKPT_OPT_CHOICE, AT(muon_scale),  "spectral|shape_scaling|unit_rms_norm", "of an update (default spectral)", 0, 0},
    {"muon-extra",      CKPT_OPT_REAL,   AT(muon_extra),  "X", "factor on it; 0.2 is as large as AdamW's (default 1)", 0, 0},
    {"mtp-coef",        CKPT_OPT_REAL,   AT(mtp_coef),    "X", "weight of multi-token prediction's loss (default 0.1)", 0, 0},
    {"aux-coef",        CKPT_OPT_REAL,   AT(aux_coef),    "X", "weight of the routers' balancing loss (default 0)", 0, 0},
    {"z-coef",          CKPT_OPT_REAL,   AT(z_coef),      "X", "weight of the routers' z loss (default 0)", 0, 0},
    {"bias-rate",       CKPT_OPT_REAL,   AT(bias_rate),   "X", "step of the routers' correction bias (default 1e-3)", 0, 0},
    {"latent-eps",      CKPT_OPT_REAL,   AT(latent_eps),  "X", "epsilon of MLA's latent norms (default: the model's)", 0, 0},
    {"dtype",           CKPT_OPT_CHOICE, AT(dtype),       "keep|f32|bf16", "of the weights; bf16 ones have f32 masters (default keep)", 0, 0},
    {"recompute",       CKPT_OPT_FLAG,   AT(recompute),   NULL, "compute activations again in the backward: same bits, less memory", 0, 0},
    {"policy",          CKPT_OPT_STRING, AT(policy),      "FILE", "emulate quantisation in KDA blocks by these rules (default: those of the checkpoint)", 0, 0},
    {"device",          CKPT_OPT_CHOICE, AT(device),      "cpu|cuda", "where it is computed; on cuda weights kept in bf16 are multiplied so (default cpu)", 0, 0},
    {"launch",          CKPT_OPT_INT,    AT(mesh.launch), "N", "start N ranks on this host, without mpirun; they are --dp if nothing else is said", 1, CKPT_COMM_HOST_MAX},
    {"tp",              CKPT_OPT_INT,    AT(mesh.tp),     "N", "ranks that share the heads (--launch or mpirun -np starts them; default 1)", 1, 4096},
    {"cp",              CKPT_OPT_INT,    AT(mesh.cp),     "N", "ranks that share a sequence (default 1)", 1, 4096},
    {"dp",              CKPT_OPT_INT,    AT(mesh.dp),     "N", "ranks that share the batch (default: those that are left)", 1, 4096},
    {"ep",              CKPT_OPT_INT,    AT(mesh.ep),     "N", "ranks that share the experts; divides their number (default 1)", 1, 4096},
    {"cp-mode",         CKPT_OPT_CHOICE, AT(mesh.cp_mode), "heads|chunks", "how: each has some heads of the whole sequence (default), or all heads of a part", 0, 0},
    {"save",            CKPT_OPT_STRING, AT(save),        "DIR", "save checkpoints as DIR/iter_N", 0, 0},
    {"save-every",      CKPT_OPT_INT,    AT(save_every),  "N", "steps between them, in the background (default 0: only the last)", 0, INT64_MAX},
    {"save-format",     CKPT_OPT_LIST,   AT(save_format), "CONTAINER[:LAYOUT][:tp=N...]", "safetensors, torch_dist, torch or hdf5 (default: as the source); repeatable: then in DIR/CONTAINER", 0, 0},
    {"keep",            CKPT_OPT_INT,    AT(keep),        "N", "newest checkpoints of this run that stay (default: all)", 1, INT64_MAX},
    {"force",           CKPT_OPT_FLAG,   AT(force),       NULL, "save in a directory that holds checkpoints of another run", 0, 0},
    {"metrics",         CKPT_OPT_STRING, AT(metrics),     "FILE", "one JSON object a step (default DIR/metrics.jsonl with --save)", 0, 0},
    {"log-every",       CKPT_OPT_INT,    AT(log_every),   "N", "steps between lines on stdout (default 10)", 1, INT64_MAX},
    {"peak-tflops",     CKPT_OPT_REAL,   AT(peak_tflops), "X", "of this machine, for the utilisation in the metrics", 0, 0},
    {"change",          CKPT_OPT_FLAG,   AT(change),      NULL, "permit options or data other than those of the resumed run", 0, 0},
    {"reset-optimizer", CKPT_OPT_FLAG,   AT(reset_optimizer), NULL, "start the optimizer and the step count anew", 0, 0},
    {"approximate",     CKPT_OPT_FLAG,   AT(approximate), NULL, "permit lossy steps of a save format", 0, 0},
    {"allow-unknown",   CKPT_OPT_FLAG,   AT(allow_unknown), NULL, "carry tensors that a save format has no place for; such a save converts but does not train", 0, 0},
    {NULL,              CKPT_OPT_FLAG,   0,               NULL, NULL, 0, 0},
};
/* clang-format on */
#undef AT

/* Options that decide where training goes: value if nobody says one, and Megatron's name for it. */
typedef struct course {
    const char *name, *arg;
    double number; /* choices: the index; flags: 0 */
} course;

_Static_assert(CKPT_TRAIN_SEED == 1234, "the seed in the table below and in the help");
static const course courses[] = {
    {"data-type",         NULL,                          0   },
    {"windows",           NULL,                          0   },
    {"labels",            NULL,                          0   },
    {"no-shuffle",        NULL,                          0   },
    {"seed",              NULL,                          1234},
    {"batch",             "global_batch_size",           8   },
    {"micro-batch",       "micro_batch_size",            -1  }, /* the batch */
    {"seq-len",           "seq_length",                  256 },
    {"optimizer",         NULL,                          0   },
    {"lr",                "lr",                          3e-4},
    {"min-lr",            "min_lr",                      0   },
    {"init-lr",           "lr_warmup_init",              0   },
    {"lr-style",          NULL,                          0   },
    {"lr-warmup",         NULL,                          0   },
    {"lr-decay",          NULL,                          -1  }, /* the steps */
    {"lr-wsd",            NULL,                          -1  },
    {"wsd-style",         NULL,                          0   },
    {"weight-decay",      "weight_decay",                0.1 },
    {"decay-all",         NULL,                          0   },
    {"beta1",             "adam_beta1",                  0.9 },
    {"beta2",             "adam_beta2",                  0.95},
    {"eps",               "adam_eps",                    1e-8},
    {"clip-grad",         "clip_grad",                   1   },
    {"momentum",          "muon_momentum",               0.9 },
    {"nesterov",          NULL,                          0   },
    {"muon-steps",        "muon_num_ns_steps",           5   },
    {"muon-coefficients", NULL,                          0   },
    {"muon-scale",        NULL,                          0   },
    {"muon-extra",        NULL,                          1   },
    {"mtp-coef",          "mtp_loss_scaling_factor",     0.1 },
    {"aux-coef",          NULL,                          0   },
    {"z-coef",            NULL,                          0   },
    {"bias-rate",         "moe_router_bias_update_rate", 1e-3},
    {"latent-eps",        NULL,                          0   },
    {"dtype",             NULL,                          0   },
};
#define N_COURSES (sizeof courses / sizeof courses[0])

void ckpt_train_defaults(void *opts)
{
    ckpt_train_opts *o = opts;
    for (const ckpt_opt *r = ckpt_train_rows; r->name != NULL; r++) {
        void *at = (char *)o + r->offset;
        if (r->kind == CKPT_OPT_INT)
            *(int64_t *)at = -1;
        else if (r->kind == CKPT_OPT_CHOICE)
            *(int *)at = -1;
        else if (r->kind == CKPT_OPT_REAL)
            *(double *)at = -1;
    }
}

static const ckpt_opt *row_of(const char *name)
{
    const ckpt_opt *r = ckpt_train_rows;
    while (r->name != NULL && strcmp(r->name, name) != 0)
        r++;
    return r;
}

/* ---- values as JSON --------------------------------------------------------------------------- */

static const char *choice_word(const ckpt_opt *r, int index, char buf[32])
{
    const char *p = r->arg;
    for (int i = 0; i < index && *p != '\0'; i++)
        p += strcspn(p, "|") + (p[strcspn(p, "|")] == '|');
    size_t n = strcspn(p, "|");
    n = n < 31 ? n : 31;
    memcpy(buf, p, n);
    buf[n] = '\0';
    return buf;
}

static int choice_index(const ckpt_opt *r, const char *word)
{
    char buf[32];
    for (int i = 0; word != NULL && choice_word(r, i, buf)[0] != '\0'; i++)
        if (strcmp(buf, word) == 0)
            return i;
    return -1;
}

/* NULL: not set (or no memory, which *failed tells). */
static ckpt_json *value_of(const ckpt_train_opts *o, const ckpt_opt *r, bool *failed)
{
    const void *at = (const char *)o + r->offset;
    char buf[32];
    ckpt_json *j = NULL;
    if (r->kind == CKPT_OPT_INT && *(const int64_t *)at >= 0)
        j = ckpt_json_new_int(*(const int64_t *)at);
    else if (r->kind == CKPT_OPT_REAL && *(const double *)at >= 0)
        j = ckpt_json_new_double(*(const double *)at);
    else if (r->kind == CKPT_OPT_CHOICE && *(const int *)at >= 0)
        j = ckpt_json_new_string(choice_word(r, *(const int *)at, buf));
    else if (r->kind == CKPT_OPT_FLAG)
        j = ckpt_json_new_bool(*(const bool *)at);
    else if (r->kind == CKPT_OPT_STRING && *(const char *const *)at != NULL)
        j = ckpt_json_new_string(ckpt_basename(*(const char *const *)at));
    else
        return NULL;
    *failed = *failed || j == NULL;
    return j;
}

ckpt_json *ckpt_train_options_json(const ckpt_train_opts *o)
{
    ckpt_json *out = ckpt_json_new_object();
    bool failed = out == NULL;
    for (size_t i = 0; !failed && i < N_COURSES; i++) {
        ckpt_json *j = value_of(o, row_of(courses[i].name), &failed);
        if (j != NULL && !ckpt_json_set(out, courses[i].name, j))
            failed = true;
    }
    if (failed) {
        ckpt_json_free(out);
        return NULL;
    }
    return out;
}

static bool is_given(const ckpt_train_opts *o, const ckpt_opt *r)
{
    const void *at = (const char *)o + r->offset;
    if (r->kind == CKPT_OPT_INT)
        return *(const int64_t *)at >= 0;
    if (r->kind == CKPT_OPT_REAL)
        return *(const double *)at >= 0;
    if (r->kind == CKPT_OPT_CHOICE)
        return *(const int *)at >= 0;
    if (r->kind == CKPT_OPT_FLAG)
        return *(const bool *)at;
    return *(const char *const *)at != NULL;
}

/* A stored value, checked as the command line's would be. */
static ckpt_status take(ckpt_train_opts *o, const ckpt_opt *r, const ckpt_json *j, ckpt_err *err)
{
    void *at = (char *)o + r->offset;
    int64_t n = 0;
    double x = 0;
    bool ok = true, flag = false;
    if (r->kind == CKPT_OPT_INT && (ok = ckpt_json_int(j, &n) && n >= r->min && n <= r->max))
        *(int64_t *)at = n;
    else if (r->kind == CKPT_OPT_REAL && (ok = ckpt_json_double(j, &x) && x >= 0))
        *(double *)at = x;
    else if (r->kind == CKPT_OPT_CHOICE && (ok = choice_index(r, ckpt_json_string(j)) >= 0))
        *(int *)at = choice_index(r, ckpt_json_string(j));
    else if (r->kind == CKPT_OPT_FLAG && (ok = ckpt_json_bool(j, &flag)))
        *(bool *)at = flag;
    if (ok)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_FORMAT, "training option '%s' of the checkpoint is none", r->name);
}

static ckpt_status note_change(ckpt_train_run *run, const ckpt_opt *r, const ckpt_json *stored,
                               ckpt_err *err)
{
    bool failed = false;
    ckpt_buf text = {0};
    ckpt_json *now = value_of(run->o, r, &failed);
    ckpt_status status = CKPT_OK;
    if (failed)
        return ckpt_tool_no_memory(err);
    if (now != NULL && !ckpt_json_equal(now, stored)) {
        ckpt_buf_printf(&text, "--%s ", r->name);
        (void)ckpt_json_print(now, 0, false, &text);
        ckpt_buf_puts(&text, " was ");
        (void)ckpt_json_print(stored, 0, false, &text);
        const char *kept =
            text.failed ? NULL : ckpt_arena_strdup(&run->tool->arena, (const char *)text.data);
        status =
            kept != NULL ? ckpt_strings_push(&run->changed, kept, err) : ckpt_tool_no_memory(err);
    }
    ckpt_json_free(now);
    ckpt_buf_release(&text);
    return status;
}

static void set_number(ckpt_train_opts *o, const ckpt_opt *r, double x)
{
    void *at = (char *)o + r->offset;
    if (r->kind == CKPT_OPT_INT)
        *(int64_t *)at = (int64_t)x;
    else if (r->kind == CKPT_OPT_REAL)
        *(double *)at = x;
    else if (r->kind == CKPT_OPT_CHOICE)
        *(int *)at = (int)x;
}

ckpt_status ckpt_train_resolve(ckpt_train_run *run, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *stored = ckpt_json_get(run->stored, "options");
    for (size_t i = 0; i < N_COURSES; i++) {
        const ckpt_opt *r = row_of(courses[i].name);
        const ckpt_json *was = ckpt_json_get(stored, r->name);
        const ckpt_json *arg = courses[i].arg != NULL ? ckpt_train_arg(run, courses[i].arg) : NULL;
        bool given = is_given(run->o, r);
        if (given && was != NULL)
            CKPT_CHECK(note_change(run, r, was, err));
        else if (!given && was != NULL)
            CKPT_CHECK(take(run->o, r, was, err));
        else if (!given && (!ckpt_json_is_number(arg) || take(run->o, r, arg, NULL) != CKPT_OK))
            set_number(run->o, r, courses[i].number);
    }
    if (run->o->micro < 0 || (stored == NULL && run->o->batch % run->o->micro != 0 &&
                              ckpt_train_arg(run, "micro_batch_size") != NULL))
        run->o->micro = run->o->batch;
done:
    return status;
}

/* ---- as the engine takes them ----------------------------------------------------------------- */

ckpt_train_config ckpt_train_config_of(const ckpt_train_run *run)
{
    const ckpt_train_opts *o = run->o;
    ckpt_eng_par *par = run->ranks != NULL ? &run->ranks->par : NULL;
    const char *graphs = getenv("CKPT_CUDA_GRAPHS"); /* 0: launch by launch, to compare times */
    int64_t most = par != NULL && o->batch >= par->dp ? o->batch / par->dp : o->micro;
    return (ckpt_train_config){
        .batch = o->batch,
        .micro = o->micro < most ? o->micro : most,
        .par = par,
        .places = run->together,
        .device = run->tool->device,
        .no_graphs = graphs != NULL && strcmp(graphs, "0") == 0,
        .seq_len = o->seq_len,
        .mtp_coef = o->mtp_coef,
        .recompute = o->recompute,
        .dtype = o->dtype,
        .threads = (int)run->tool->g.threads,
        .spec = {.latent_eps = o->latent_eps,
                 .aux_coef = o->aux_coef,
                 .z_coef = o->z_coef,
                 .policy = &run->policy},
    };
}

ckpt_optim_config ckpt_train_optim_of(const ckpt_train_opts *o)
{
    ckpt_optim_config c =
        ckpt_optim_defaults(o->optimizer == 1 ? CKPT_OPTIM_MUON : CKPT_OPTIM_ADAMW);
    c.beta1 = o->beta1;
    c.beta2 = o->beta2;
    c.eps = o->eps;
    c.decay_all = o->decay_all;
    c.momentum = o->momentum;
    c.nesterov = o->nesterov;
    c.steps = (int)o->muon_steps;
    c.extra = o->muon_extra;
    c.max_norm = o->clip;
    c.bias_rate = o->bias_rate;
    c.set = (ckpt_muon_set)o->muon_set;
    c.scale = (ckpt_muon_scale)o->muon_scale;
    return c;
}
