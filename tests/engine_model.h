/* Whole models of the fixtures on the engine, in the suites' type: open, one pass, close. Include after
 * engine_test.h's requirements are met (CKPT_REAL defined); brings that header along. */
#ifndef CKPT_ENGINE_MODEL_H
#define CKPT_ENGINE_MODEL_H

#include "engine_test.h"
#include "network.h"

typedef struct model_run {
    ckpt_source src;
    ckpt_model model;
    ckpt_eng e;
    ENG(network) net;
    ENG(run) run;
    int64_t T;
    real *logits; /* [T, V] */
} model_run;

static inline void model_open(model_run *m, const char *path, double latent_eps)
{
    const ckpt_eng_spec_opts opts = {.latent_eps = latent_eps};
    const ckpt_model_opts bind = {0};
    *m = (model_run){0};
    ckpt_eng_init(&m->e, 2);
    OK(ckpt_source_open(&m->src, path, NULL, &error));
    OK(ckpt_model_bind(&m->model, &m->src, &bind, &error));
    OK(ENG(network_open)(&m->net, &m->e, &m->model, &opts, true, &error));
}

static inline void model_close(model_run *m)
{
    ENG(network_close)(&m->net);
    ckpt_eng_release(&m->e);
    ckpt_model_release(&m->model);
    ckpt_source_close(&m->src);
}

/* Forward and, when run.backward is set, backward into zeroed gradients. Set m->run first. */
static inline void model_pass(model_run *m, const ENG(batch) * batch)
{
    m->T = ckpt_eng_tokens(batch->seq);
    ckpt_eng_release(&m->e);
    if (m->logits == NULL)
        m->logits = zeros(m->T * m->net.spec.V);
    m->run.logits = m->logits;
    OK(ENG(network_zero_grads)(&m->net, &error));
    OK(ENG(network_run)(&m->e, &m->net, batch, &m->run, &error));
    OK(ckpt_eng_reserve(&m->e, m->e.peak, &error));
    OK(ENG(network_run)(&m->e, &m->net, batch, &m->run, &error));
}

/* Tokens of a reference file: input_ids [B, S] and labels, shifted ids where it has none. */
typedef struct model_tokens {
    ckpt_eng_seq seq;
    int64_t *cu;
    int32_t *ids, *labels;
} model_tokens;

static inline int32_t *model_ids(const ckpt_source *ref, const char *name, int64_t n)
{
    const ckpt_tensor *t = &ref->tensors[ckpt_source_find(ref, name)];
    const size_t size = ckpt_dtype_get(t->dtype)->bits / 8;
    uint8_t *raw = ckpt_arena_alloc(&memory, (size_t)n * size);
    int32_t *ids = ckpt_arena_array(&memory, (size_t)n, sizeof *ids);
    OK(ckpt_source_read((ckpt_source *)(uintptr_t)ref, t->chunks[0].file, raw, (size_t)n * size,
                        t->chunks[0].offset, &error));
    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)ckpt_dtype_load(t->dtype, raw, i);
    return ids;
}

static inline model_tokens model_batch(int64_t B, int64_t S, int32_t *ids, int32_t *labels)
{
    model_tokens t = {.ids = ids, .labels = labels};
    t.cu = ckpt_arena_array(&memory, (size_t)B + 1, sizeof *t.cu);
    for (int64_t i = 0; i <= B; i++)
        t.cu[i] = i * S;
    t.seq = (ckpt_eng_seq){B, t.cu};
    if (labels == NULL) {
        t.labels = ckpt_arena_array(&memory, (size_t)(B * S), sizeof *t.labels);
        for (int64_t i = 0; i < B * S; i++)
            t.labels[i] = (i + 1) % S != 0 ? ids[i + 1] : -1;
    }
    return t;
}

static inline model_tokens model_reference_tokens(const char *path)
{
    ckpt_source ref;
    OK(ckpt_source_open(&ref, path, NULL, &error));
    const ckpt_tensor *ids = &ref.tensors[ckpt_source_find(&ref, "input_ids")];
    const int64_t B = ids->dims[0], S = ids->dims[1];
    const bool labelled = ckpt_source_find(&ref, "labels") >= 0;
    model_tokens t = model_batch(B, S, model_ids(&ref, "input_ids", B * S),
                                 labelled ? model_ids(&ref, "labels", B * S) : NULL);
    ckpt_source_close(&ref);
    return t;
}

/* B sequences of S tokens below V, from the suite's random numbers. */
static inline model_tokens model_random_tokens(int64_t B, int64_t S, int64_t V)
{
    int32_t *ids = ckpt_arena_array(&memory, (size_t)(B * S), sizeof *ids);
    for (int64_t i = 0; i < B * S; i++)
        ids[i] = (int32_t)number(0, (double)V);
    return model_batch(B, S, ids, NULL);
}

#endif
