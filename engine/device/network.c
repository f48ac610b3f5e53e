/* Parameters of a network in the memory of a device: network_load.c's part. load.h brings them. `data` is
 * f32; where products read bf16, `matrices` holds the same elements rounded. */
#include "network_internal.h"

#include <stdlib.h>

#include "context.h"
#include "load.h"

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

/* What is stored in bf16, and as the values that the engine takes, is widened on the device. */
static bool widens(const ckpt_gather *g)
{
    return g->from == CKPT_BF16 && g->add_from == 0 && g->add_to == 0 && g->add_back == 0 &&
           sizeof(wreal) == sizeof(float);
}

static ckpt_status read_all(ENG(network) * m, const ckpt_eng *e, const ckpt_model *src,
                            ckpt_arena *arena, ckpt_err *err)
{
    ckpt_gather *gathers = ckpt_arena_array(arena, m->n_params + 1, sizeof *gathers);
    ckpt_eng_load_item *items = ckpt_arena_array(arena, m->n_params + 1, sizeof *items);
    ckpt_status status;
    if (gathers == NULL || items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading parameters");
    CKPT_CHECK(ENG(network_plan)(m, src, arena, gathers, err));
    for (size_t i = 0; i < m->n_params; i++) {
        const ENG(param) *p = &m->params[i];
        const bool widen = widens(&gathers[i]);
        if (widen)
            gathers[i].to = CKPT_BF16;
        items[i] = (ckpt_eng_load_item){.name = p->name,
                                        .gather = &gathers[i],
                                        .bytes = (uint64_t)p->n * (widen ? 2 : sizeof(wreal)),
                                        .to = m->data + p->at,
                                        .widen = widen};
    }
    status = ckpt_eng_load(e, src->src, items, m->n_params, NULL, err);
done:
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
    ckpt_status status;
    CKPT_CHECK(read_all(m, e, src, &arena, err));
    CKPT_CHECK(ENG(network_refresh)(e, m, err));
    status = make_tables(m, e, err);
done:
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
