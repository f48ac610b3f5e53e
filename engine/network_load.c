/* Parameters of a network in the memory of this process: where they lie, and reading them. */
#include "network_internal.h"

#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "plan.h"

ckpt_status ENG(network_place)(ENG(network) * m, const ckpt_eng *e, bool gradients, ckpt_err *err)
{
    size_t bytes;
    (void)e;
    if (m->n_elements < 0 || !ckpt_mul_size((size_t)m->n_elements, sizeof(real), &bytes))
        return ckpt_fail(err, CKPT_E_NOMEM, "parameters of %lld elements",
                         (long long)m->n_elements);
    m->data = malloc(bytes + 1);
    m->grads = gradients ? calloc((size_t)m->n_elements + 1, sizeof(real)) : NULL;
    if (m->data == NULL || (gradients && m->grads == NULL))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld parameters",
                         (long long)m->n_elements);
    ckpt_large_pages(m->data, bytes);
    if (gradients)
        ckpt_large_pages(m->grads, bytes);
    m->matrices = m->data;
    for (size_t i = 0; i < m->n_params; i++) {
        ENG(param) *p = &m->params[i];
        p->x = m->data + p->at;
        p->grad = gradients && p->n > 0 && ckpt_canon_trains(p->name) ? m->grads + p->at : NULL;
    }
    return CKPT_OK;
}

#define PIECE ((uint64_t)1 << 20)

typedef struct load_job {
    const ENG(network) * m;
    const ckpt_model *src;
    ckpt_gather *gathers;
    uint8_t *scratch; /* PIECE a worker */
    ckpt_err *errs;   /* one a worker */
    ckpt_status *status;
} load_job;

static void load_param(void *arg, int64_t item, int worker)
{
    const load_job *j = arg;
    const ENG(param) *p = &j->m->params[item];
    ckpt_scratch scratch = {.buf = j->scratch + (uint64_t)worker * PIECE, .cap = PIECE};
    uint64_t bytes = (uint64_t)p->n * sizeof(real);
    for (uint64_t at = 0; at < bytes && j->status[worker] == CKPT_OK; at += PIECE) {
        size_t n = (size_t)ckpt_min_u64(PIECE, bytes - at);
        j->status[worker] = ckpt_gather_run(j->src->src, &j->gathers[item], at, n,
                                            (uint8_t *)p->x + at, &scratch, &j->errs[worker]);
        if (j->status[worker] != CKPT_OK)
            ckpt_err_frame(&j->errs[worker], "tensor %s", p->name);
    }
}

ckpt_status ENG(network_load)(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                              ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_status status = CKPT_OK;
    size_t threads = (size_t)e->threads;
    load_job j = {.m = m, .src = src};
    j.gathers = ckpt_arena_array(&arena, m->n_params + 1, sizeof *j.gathers);
    j.errs = ckpt_arena_array(&arena, threads, sizeof *j.errs);
    j.status = ckpt_arena_array(&arena, threads, sizeof *j.status);
    j.scratch = malloc(threads * PIECE);
    if (!j.gathers || !j.errs || !j.status || !j.scratch) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading parameters");
        goto done;
    }
    memset(j.errs, 0, threads * sizeof *j.errs);
    memset(j.status, 0, threads * sizeof *j.status);
    CKPT_CHECK(ENG(network_plan)(m, src, &arena, j.gathers, err));
    ckpt_eng_parallel(e, (int64_t)m->n_params, load_param, &j);
    for (size_t i = 0; i < threads && status == CKPT_OK; i++)
        if (j.status[i] != CKPT_OK) {
            status = j.status[i];
            if (err != NULL)
                *err = j.errs[i];
        }
done:
    free(j.scratch);
    ckpt_arena_free(&arena);
    return status;
}

void ENG(network_close)(ENG(network) * m)
{
    free(m->data);
    free(m->grads);
    ckpt_comm_release(&m->keys);
    ckpt_eng_spec_close(&m->spec);
    *m = (ENG(network)){0};
}

/* Products read `data` itself. */
ckpt_status ENG(network_refresh)(const ckpt_eng *e, ENG(network) * m, ckpt_err *err)
{
    (void)e;
    (void)m;
    (void)err;
    return CKPT_OK;
}
