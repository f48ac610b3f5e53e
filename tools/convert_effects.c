/* Options of `ckpt convert` that would do nothing for this source and target. One that asks for what
 * is so already (--tp 1, a rank that the model has) is satisfied, not without effect. */
#include "convert.h"

#include <string.h>

static bool has_part(const ckpt_model *model, const char *part)
{
    for (size_t i = 0; i < model->n_tensors; i++)
        if (!model->tensors[i].extra && strstr(model->tensors[i].name, part) != NULL)
            return true;
    return false;
}

static bool is_megatron(const ckpt_convert_facts *f)
{
    return f->layout != NULL && strcmp(f->layout->group, "megatron") == 0;
}

static const char *shard_size(const void *context)
{
    static const char *const by_size[] = {"safetensors", "torch", "rank_safetensors"};
    const ckpt_convert_facts *f = context;
    if (f->single_file)
        return "the output is one file";
    for (size_t i = 0; i < sizeof by_size / sizeof by_size[0]; i++)
        if (strcmp(f->container->name, by_size[i]) == 0)
            return NULL;
    return "the output's files are those of its ranks";
}

static const char *iteration(const void *context)
{
    const ckpt_convert_facts *f = context;
    return ckpt_no_iteration(f->src, f->iteration);
}

static const char *kda_rank(const void *context)
{
    const ckpt_convert_facts *f = context;
    return has_part(f->model, ".kda.") ? NULL : "no KDA block is known in the source";
}

static const char *norms(const void *context)
{
    return is_megatron(context) ? NULL : "only Megatron's layouts have a choice";
}

static const char *dtype_force(const void *context)
{
    const ckpt_convert_facts *f = context;
    return f->casts ? NULL : "nothing is cast without --dtype bf16, f16 or f32";
}

static const char *ep(const void *context)
{
    const ckpt_convert_facts *f = context;
    return f->ep <= 1 || has_part(f->model, ".moe.") ? NULL : "no experts are known in the source";
}

static const char *etp(const void *context)
{
    const ckpt_convert_facts *f = context;
    return f->etp <= 1 || has_part(f->model, ".moe.") ? NULL : "no experts are known in the source";
}

static const char *cp(const void *context)
{
    const ckpt_convert_facts *f = context;
    return f->cp <= 1 || is_megatron(f) ? NULL
                                        : "weights are not cut by it, and only Megatron's "
                                          "arguments state it";
}

static const char *written(const void *context)
{
    const ckpt_convert_facts *f = context;
    return f->dry_run ? "--dry-run writes nothing" : NULL;
}

ckpt_status ckpt_convert_effects(const ckpt_tool *tool, const ckpt_convert_facts *facts,
                                 ckpt_err *err)
{
    static const ckpt_effect rows[] = {
        {"max-shard-size",     shard_size },
        {"iteration",          iteration  },
        {"kda-f-lora-rank",    kda_rank   },
        {"kda-gate-lora-rank", kda_rank   },
        {"norms",              norms      },
        {"dtype-force",        dtype_force},
        {"ep",                 ep         },
        {"etp",                etp        },
        {"cp",                 cp         },
        {"verify",             written    },
        {"resume",             written    },
        {NULL,                 NULL       },
    };
    return ckpt_tool_effects(tool, rows, facts, err);
}
