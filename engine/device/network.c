/* Parameters of a network in the memory of a device: network_load.c's part. They are read by all threads,
 * each through two pinned buffers of which one is filled while the other is on its way. `data` is f32;
 * where products read bf16, `matrices` holds the same elements rounded. */
#include "network_internal.h"

#include <stdlib.h>

#include "context.h"
#include "plan.h"

#define LOW (sizeof(real) != sizeof(wreal))

static ckpt_eng of_device(const ENG(network) * m)
{
    return (ckpt_eng){.device = m->device};
}

ckpt_status ENG(network_place)(ENG(network) * m, const ckpt_eng *e, bool gradients, ckpt_err *err)
{
    ckpt_status status;
    m->device = e->device;
    CKPT_CHECK(
        ckpt_eng_memory_new(e, m->n_elements, sizeof *m->data, (void **)(void *)&m->data, err));
    m->matrices = (real *)(void *)m->data;
    if (LOW)
        CKPT_CHECK(ckpt_eng_memory_new(e, m->n_elements, sizeof *m->matrices,
                                       (void **)(void *)&m->matrices, err));
    if (gradients)
        CKPT_CHECK(ckpt_eng_memory_new(e, m->n_elements, sizeof *m->grads,
                                       (void **)(void *)&m->grads, err));
    for (size_t i = 0; i < m->n_params; i++) {
        ENG(param) *p = &m->params[i];
        p->x = LOW && p->wide ? (real *)(void *)(m->data + p->at) : m->matrices + p->at;
        p->grad = NULL;
        if (gradients && p->n > 0 && ckpt_canon_trains(p->name))
            p->grad = (real *)(void *)(m->grads + p->at);
    }
done:
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

#define PIECE ((uint64_t)4 << 20)
#define SCRATCH ((uint64_t)1 << 20)

typedef struct load_job {
    const ENG(network) * m;
    const ckpt_model *src;
    ckpt_gather *gathers;
    ckpt_cuda_pipe **pipes; /* one a worker */
    uint8_t *scratch;
    ckpt_err *errs;
    ckpt_status *status;
} load_job;

static void load_param(void *arg, int64_t item, int worker)
{
    const load_job *j = arg;
    const ckpt_cuda_plugin *api = j->m->device->api;
    const ENG(param) *p = &j->m->params[item];
    ckpt_cuda_pipe *pipe = j->pipes[worker];
    ckpt_err *err = &j->errs[worker];
    ckpt_scratch scratch = {.buf = j->scratch + (uint64_t)worker * SCRATCH, .cap = SCRATCH};
    uint64_t bytes = (uint64_t)p->n * sizeof(wreal);
    for (uint64_t at = 0; at < bytes && j->status[worker] == CKPT_OK; at += PIECE) {
        size_t n = (size_t)ckpt_min_u64(PIECE, bytes - at);
        void *buffer = NULL;
        ckpt_status status = api->pipe_next(pipe, &buffer, err);
        if (status == CKPT_OK)
            status = ckpt_gather_run(j->src->src, &j->gathers[item], at, n, buffer, &scratch, err);
        if (status == CKPT_OK)
            status = api->pipe_send(pipe, (uint8_t *)(j->m->data + p->at) + at, n, err);
        if (status != CKPT_OK)
            ckpt_err_frame(err, "tensor %s", p->name);
        j->status[worker] = status;
    }
}

static ckpt_status read_all(ENG(network) * m, const ckpt_eng *e, load_job *j, ckpt_arena *arena,
                            ckpt_err *err)
{
    const ckpt_cuda_plugin *api = m->device->api;
    size_t threads = (size_t)e->threads;
    ckpt_status status;
    CKPT_CHECK(ENG(network_plan)(m, j->src, arena, j->gathers, err));
    for (size_t i = 0; i < threads; i++)
        CKPT_CHECK(api->pipe_open(&m->device->card, PIECE, &j->pipes[i], err));
    CKPT_CHECK(api->wait(&m->device->card, err)); /* zeros come before what is sent */
    ckpt_eng_parallel(e, (int64_t)m->n_params, load_param, j);
    for (size_t i = 0; i < threads; i++) {
        if (j->status[i] != CKPT_OK) {
            if (err != NULL)
                *err = j->errs[i];
            status = j->status[i];
            goto done;
        }
        CKPT_CHECK(api->pipe_wait(j->pipes[i], err));
    }
done:
    for (size_t i = 0; i < threads; i++)
        api->pipe_close(j->pipes[i]);
    return status;
}

/* Matrices of the experts that this rank holds, as arrays of pointers on the device. */
static ckpt_status table_of(const ckpt_eng *e, int64_t all, ENG(moe_params) * p, ckpt_err *err)
{
    const int64_t ep = e->par != NULL ? e->par->ep : 1, x = e->par != NULL ? e->par->x : 0;
    const int64_t lo = ckpt_part_at(all, ep, x), E = ckpt_part_at(all, ep, x + 1) - lo;
    real **rows = calloc(3 * (size_t)E + 1, sizeof *rows);
    ckpt_status status;
    if (rows == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld experts", (long long)E);
    for (int64_t i = 0; i < E; i++) {
        rows[i] = p->experts[lo + i].gate;
        rows[E + i] = p->experts[lo + i].up;
        rows[2 * E + i] = p->experts[lo + i].down;
    }
    CKPT_CHECK(ckpt_eng_memory_new(e, 3 * E, sizeof *rows, (void **)(void *)&p->table, err));
    CKPT_CHECK(ckpt_eng_put(e, p->table, rows, (size_t)(3 * E) * sizeof *rows, err));
done:
    free(rows);
    return status;
}

static ckpt_status make_tables(ENG(network) * m, const ckpt_eng *e, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (int64_t i = 0; i < m->spec.n_blocks; i++) {
        ENG(block) *k = &m->blocks[i];
        if (k->spec.kind != CKPT_ENG_MOE)
            continue;
        CKPT_CHECK(table_of(e, k->spec.u.moe.E, &k->p.moe, err));
        CKPT_CHECK(table_of(e, k->spec.u.moe.E, &k->g.moe, err));
    }
done:
    return status;
}

/* matrices = data, rounded: neighbours together. */
ckpt_status ENG(network_refresh)(const ckpt_eng *e, ENG(network) * m, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; LOW && i < m->n_params && status == CKPT_OK;) {
        int64_t at = m->params[i].at, end = at;
        bool wide = m->params[i].wide;
        for (; i < m->n_params && m->params[i].wide == wide; i++)
            end = m->params[i].at + m->params[i].n;
        if (!wide)
            status = api_of(e)->narrow(&c, end - at, m->data + at, m->matrices + at, err);
    }
    return status;
}

ckpt_status ENG(network_load)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              ckpt_err *err)
{
    ckpt_arena arena = {0};
    size_t threads = (size_t)e->threads;
    load_job j = {.m = m, .src = src};
    ckpt_status status;
    j.gathers = ckpt_arena_array(&arena, m->n_params + 1, sizeof *j.gathers);
    j.pipes = calloc(threads, sizeof(ckpt_cuda_pipe *));
    j.errs = calloc(threads, sizeof *j.errs);
    j.status = calloc(threads, sizeof *j.status);
    j.scratch = malloc(threads * SCRATCH);
    if (!j.gathers || !j.pipes || !j.errs || !j.status || !j.scratch) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading parameters");
        goto done;
    }
    CKPT_CHECK(read_all(m, e, &j, &arena, err));
    CKPT_CHECK(ENG(network_refresh)(e, m, err));
    status = make_tables(m, e, err);
done:
    free(j.pipes);
    free(j.errs);
    free(j.status);
    free(j.scratch);
    ckpt_arena_free(&arena);
    return status;
}

void ENG(network_close)(ENG(network) * m)
{
    if (m->device != NULL) {
        const ckpt_eng e = of_device(m);
        const ckpt_status ended = m->device->api->wait(&m->device->card, NULL);
        (void)ended; /* what failed was a run's, which said so */
        for (int64_t i = 0; m->blocks != NULL && i < m->spec.n_blocks; i++)
            if (m->blocks[i].spec.kind == CKPT_ENG_MOE) {
                ckpt_eng_memory_free(&e, m->blocks[i].p.moe.table);
                ckpt_eng_memory_free(&e, m->blocks[i].g.moe.table);
            }
        if ((void *)m->matrices != (void *)m->data)
            ckpt_eng_memory_free(&e, m->matrices);
        ckpt_eng_memory_free(&e, m->data);
        ckpt_eng_memory_free(&e, m->grads);
    }
    ckpt_eng_spec_close(&m->spec);
    *m = (ENG(network)){0};
}
