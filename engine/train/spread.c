/* The optimizer on several ranks: see spread.h. */
#include "spread.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "device.h"
#include "optim_device.h"

static ckpt_comm *holders(const ckpt_trainer *t, size_t i)
{
    ckpt_trainer *own = (ckpt_trainer *)(uintptr_t)t;
    return ENG(network_holders)(&own->e, &own->net, &own->net.params[i]);
}

ckpt_status ckpt_spread_open(ckpt_trainer *t, ckpt_err *err)
{
    size_t n = t->net.n_params;
    t->runs = calloc(n + 1, sizeof *t->runs);
    if (t->runs == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu parameters", n);
    for (size_t i = 0; i < n; i++) {
        ckpt_comm *c = holders(t, i);
        ckpt_train_span *last = t->n_runs > 0 ? &t->runs[t->n_runs - 1] : NULL;
        if (last == NULL || last->comm != c) {
            last = &t->runs[t->n_runs++];
            *last = (ckpt_train_span){t->slots[i].at, t->slots[i].at, c};
        }
        last->hi = t->slots[i].at + t->slots[i].n;
        t->slots[i].run = t->n_runs - 1;
    }
    return CKPT_OK;
}

/* The replica, of those that hold slot i, that steps it under Muon. */
static int muon_owner(const ckpt_trainer *t, size_t i)
{
    const ckpt_eng_par *par = t->e.par;
    int replicas = holders(t, i)->size;
    if (t->net.params[i].box.held == CKPT_ENG_HELD_KEYS)
        replicas = par->replicas.size;
    return (int)(i % (size_t)replicas);
}

/* Rank of the holders that has the weights of owner q. */
static int muon_root(const ckpt_trainer *t, size_t i)
{
    int q = muon_owner(t, i);
    if (t->net.params[i].box.held == CKPT_ENG_HELD_KEYS)
        q *= holders(t, i)->size / t->e.par->replicas.size;
    return q;
}

static bool owns_matrix(const ckpt_trainer *t, size_t i)
{
    const ckpt_comm *c =
        t->net.params[i].box.held == CKPT_ENG_HELD_KEYS ? &t->e.par->replicas : holders(t, i);
    return c->rank == muon_owner(t, i);
}

/* First element of part r of a run; on a device parts begin where vectors do. */
static int64_t part_at(const ckpt_trainer *t, const ckpt_train_span *run, int r)
{
    int64_t at = ckpt_part_at(run->hi - run->lo, run->comm->size, r);
    if (t->e.device != NULL && r < run->comm->size)
        at = at / CKPT_ENG_ALIGN * CKPT_ENG_ALIGN;
    return run->lo + at;
}

/* [*lo, *hi) of slot i's elements that rank r of its holders keeps the moments of. */
static void owned_by(const ckpt_trainer *t, size_t i, int r, int64_t *lo, int64_t *hi)
{
    const ckpt_optim_slot *s = &t->slots[i];
    const ckpt_train_span *run = &t->runs[s->run];
    if (s->muon) {
        *lo = 0;
        *hi = r == muon_root(t, i) ? s->n : 0;
        return;
    }
    int64_t a = part_at(t, run, r) - s->at, b = part_at(t, run, r + 1) - s->at;
    *lo = ckpt_min_i64(ckpt_max_i64(a, 0), s->n);
    *hi = ckpt_min_i64(ckpt_max_i64(b, 0), s->n);
}

void ckpt_spread_owned(const ckpt_trainer *t, size_t i, int64_t *lo, int64_t *hi)
{
    if (t->e.par == NULL) {
        *lo = 0;
        *hi = t->slots[i].n;
    } else if (t->slots[i].muon) {
        *lo = 0;
        *hi = owns_matrix(t, i) ? t->slots[i].n : 0;
    } else {
        owned_by(t, i, t->runs[t->slots[i].run].comm->rank, lo, hi);
    }
}

/* Chunk sums of the slots that are listed, one after the other in `sums`. */
static ckpt_status square_sums(ckpt_trainer *t, const size_t *list, size_t n, double *sums,
                               ckpt_err *err)
{
    if (t->e.device != NULL)
        return ckpt_optim_sumsq_device(&t->e, &t->optim, list, n, t->net.grads, sums, err);
    for (size_t i = 0; i < n && !t->e.dry; i++) {
        const ckpt_optim_slot *s = &t->slots[list[i]];
        ckpt_optim_sumsq(&t->e, 0, 0, s->n, t->net.grads + s->at, sums);
        sums += ckpt_optim_chunks(0, 0, s->n);
    }
    return CKPT_OK;
}

ckpt_status ckpt_spread_norm(ckpt_trainer *t, double *norm, ckpt_err *err)
{
    double sum = 0, *sums = NULL;
    size_t n = 0, *list = malloc((t->net.n_params + 1) * sizeof *list);
    int64_t chunks = 0;
    ckpt_status status;
    for (size_t i = 0; list != NULL && i < t->net.n_params; i++) {
        if (t->slots[i].frozen || !ENG(network_first)(&t->e, &t->net, &t->net.params[i]))
            continue;
        list[n++] = i;
        chunks += ckpt_optim_chunks(0, 0, t->slots[i].n);
    }
    sums = malloc((size_t)chunks * sizeof *sums + 1);
    if (list == NULL || sums == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a gradient norm");
        goto done;
    }
    CKPT_CHECK(square_sums(t, list, n, sums, err));
    const double *at = sums;
    for (size_t i = 0; i < n && !t->e.dry; i++) {
        int64_t k = ckpt_optim_chunks(0, 0, t->slots[list[i]].n);
        sum += ckpt_optim_sum(at, k);
        at += k;
    }
    if (!t->e.dry)
        status = ckpt_comm_allreduce(t->e.par->world, CKPT_COMM_F64, CKPT_COMM_SUM, &sum, 1, err);
    *norm = sqrt(sum);
done:
    free(list);
    free(sums);
    return status;
}

ckpt_status ckpt_spread_find_bad(ckpt_trainer *t, int64_t *bad, ckpt_err *err)
{
    int64_t n = (int64_t)t->net.n_params;
    *bad = ckpt_optim_find_bad(&t->e, &t->optim, t->net.grads);
    if (t->e.par == NULL)
        return CKPT_OK;
    int64_t first = *bad >= 0 ? n - *bad : 0; /* the largest is the first parameter */
    ckpt_status status =
        ckpt_comm_allreduce(t->e.par->world, CKPT_COMM_I64, CKPT_COMM_MAX_OF, &first, 1, err);
    *bad = first > 0 ? n - first : -1;
    return status;
}

/* ---- AdamW ----------------------------------------------------------------------------------- */

static ckpt_status step_run(ckpt_trainer *t, const ckpt_train_span *run,
                            const ckpt_optim_step *step, float *w, ckpt_err *err)
{
    int R = run->comm->size, r = run->comm->rank;
    int64_t lo = part_at(t, run, r), hi = part_at(t, run, r + 1);
    if (t->e.device != NULL) {
        ckpt_status status = ckpt_optim_adamw_device(&t->e, &t->optim, step, lo, hi, w, t->m, t->v,
                                                     t->net.grads, err);
        if (status != CKPT_OK)
            return status;
    } else {
        ckpt_optim_adamw(&t->e, &t->optim, step, lo, hi, w + lo, t->m + lo, t->v + lo,
                         t->net.grads + lo);
    }
    if (R == 1 || run->hi == run->lo)
        return CKPT_OK;
    int64_t *counts = malloc((size_t)R * sizeof *counts);
    if (counts == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", R);
    for (int k = 0; k < R; k++)
        counts[k] = part_at(t, run, k + 1) - part_at(t, run, k);
    ckpt_status status =
        ckpt_comm_allgather(run->comm, sizeof *w, w + lo, counts, w + run->lo, err);
    free(counts);
    return status;
}

/* ---- Muon ------------------------------------------------------------------------------------ */

/* Copy a row-major part of a matrix in or out. */
static ckpt_status copy_part(const ckpt_trainer *t, const ckpt_eng_box *b, float *whole,
                             float *part, bool in, ckpt_err *err)
{
    float *first = whole + b->lo[0] * b->dims[1] + b->lo[1];
    if (t->e.device != NULL && in)
        return ckpt_optim_copy_device(&t->e, b->len[0], b->len[1], part, b->len[1], first,
                                      b->dims[1], err);
    if (t->e.device != NULL)
        return ckpt_optim_copy_device(&t->e, b->len[0], b->len[1], first, b->dims[1], part,
                                      b->len[1], err);
    for (int64_t r = 0; r < b->len[0]; r++) {
        float *at = first + r * b->dims[1], *row = part + r * b->len[1];
        memcpy(in ? at : row, in ? row : at, (size_t)b->len[1] * sizeof *at);
    }
    return CKPT_OK;
}

/* Parts of the tensor-parallel group into the whole. While t->e is dry: only the sizes. */
static ckpt_status gather_matrix(ckpt_trainer *t, size_t i, float *part, float *whole,
                                 ckpt_err *err)
{
    ckpt_eng_par *par = t->e.par;
    const ckpt_canon *c = &t->base->tensors[t->net.params[i].tensor];
    ckpt_eng_box *boxes = calloc((size_t)par->tp, sizeof *boxes);
    int64_t *counts = calloc((size_t)par->tp, sizeof *counts), total = 0;
    size_t mark = ckpt_eng_mark(&t->e);
    ckpt_status status;
    if (boxes == NULL || counts == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", par->tp);
        goto done;
    }
    for (int r = 0; r < par->tp; r++) {
        CKPT_CHECK(ckpt_eng_box_of(&t->net.spec, c, par, r, par->x, &boxes[r], err));
        counts[r] = boxes[r].n;
        total += counts[r];
    }
    float *all = ckpt_eng_take(&t->e, total, sizeof *all);
    CKPT_CHECK(ckpt_eng_check(&t->e, err));
    if (t->e.dry)
        goto done;
    CKPT_CHECK(ckpt_comm_allgather(&par->tensor, sizeof *all, part, counts, all, err));
    for (int r = 0; r < par->tp; r++) {
        CKPT_CHECK(copy_part(t, &boxes[r], whole, all, true, err));
        all += counts[r];
    }
done:
    ckpt_eng_drop(&t->e, mark);
    free(boxes);
    free(counts);
    return status;
}

/* The three parts of Muon where the arrays are. */
static ckpt_status direction(ckpt_trainer *t, const ckpt_optim_step *step, const ckpt_optim_slot *s,
                             float *d, ckpt_err *err)
{
    const ckpt_optim_config *c = &t->optim.config;
    if (t->e.dry)
        return CKPT_OK;
    if (t->e.device != NULL)
        return ckpt_muon_direction_device(&t->e, c, step, s->n, t->net.grads + s->at, t->m + s->at,
                                          d, err);
    ckpt_muon_direction(&t->e, c, step, s->n, t->net.grads + s->at, t->m + s->at, d);
    return CKPT_OK;
}

static ckpt_status orthogonalise(ckpt_trainer *t, const ckpt_optim_slot *s, float *x, ckpt_err *err)
{
    const ckpt_muon_matrix matrix = {s->rows, s->cols, x};
    if (t->e.device != NULL)
        return ckpt_muon_orthogonalise_device(&t->e, &t->optim.config, s->rows, s->cols, x, err);
    return ckpt_muon_orthogonalise(&t->e, &t->optim.config, &matrix, 1, err);
}

static ckpt_status apply(ckpt_trainer *t, const ckpt_optim_step *step, const ckpt_optim_slot *s,
                         const float *d, float *w, ckpt_err *err)
{
    const double factor = ckpt_muon_factor(&t->optim.config, s->rows, s->cols);
    const double wd = s->decay ? step->wd : 0;
    if (t->e.dry)
        return CKPT_OK;
    if (t->e.device != NULL)
        return ckpt_muon_apply_device(&t->e, s->n, step->lr, wd, factor, d, w + s->at, err);
    ckpt_muon_apply(&t->e, s->n, step->lr, wd, factor, d, w + s->at);
    return CKPT_OK;
}

static ckpt_status step_matrix(ckpt_trainer *t, size_t i, const ckpt_optim_step *step, float *w,
                               ckpt_err *err)
{
    const ckpt_optim_slot *s = &t->slots[i];
    const ckpt_eng_box *box = &t->net.params[i].box;
    bool cut = box->held == CKPT_ENG_HELD_TENSOR || box->held == CKPT_ENG_HELD_KEYS;
    size_t mark = ckpt_eng_mark(&t->e);
    ckpt_status status = CKPT_OK;
    if (s->n == 0)
        return CKPT_OK;
    if (t->e.dry || owns_matrix(t, i)) {
        float *d = ckpt_eng_take(&t->e, s->n, sizeof *d);
        float *whole = cut ? ckpt_eng_take(&t->e, s->rows * s->cols, sizeof *whole) : d;
        CKPT_CHECK(ckpt_eng_check(&t->e, err));
        CKPT_CHECK(direction(t, step, s, d, err));
        if (cut)
            CKPT_CHECK(gather_matrix(t, i, d, whole, err));
        CKPT_CHECK(orthogonalise(t, s, whole, err));
        if (!t->e.dry && cut)
            CKPT_CHECK(copy_part(t, box, whole, d, false, err));
        CKPT_CHECK(apply(t, step, s, d, w, err));
    }
    if (!t->e.dry)
        status = ckpt_comm_broadcast(holders(t, i), w + s->at, (size_t)s->n * sizeof *w,
                                     muon_root(t, i), err);
done:
    ckpt_eng_drop(&t->e, mark);
    return status;
}

ckpt_status ckpt_spread_step(ckpt_trainer *t, const ckpt_optim_step *step, float *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t k = 0; k < t->n_runs && !t->e.dry; k++)
        CKPT_CHECK(step_run(t, &t->runs[k], step, w, err));
    for (size_t i = 0; i < t->net.n_params; i++)
        if (t->slots[i].muon)
            CKPT_CHECK(step_matrix(t, i, step, w, err));
done:
    return status;
}

/* ---- whole tensors --------------------------------------------------------------------------- */

/* This rank's part of slot i with the moments of all its owners. */
static ckpt_status collect(ckpt_trainer *t, size_t i, const float *flat, float *box, ckpt_err *err)
{
    ckpt_comm *c = holders(t, i);
    int64_t *counts = malloc((size_t)c->size * sizeof *counts), mine = 0;
    if (counts == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", c->size);
    for (int r = 0; r < c->size; r++) {
        int64_t lo, hi;
        owned_by(t, i, r, &lo, &hi);
        counts[r] = hi - lo;
        if (r == c->rank)
            mine = lo;
    }
    ckpt_status status =
        ckpt_comm_allgather(c, sizeof *flat, flat + t->slots[i].at + mine, counts, box, err);
    free(counts);
    return status;
}

ckpt_status ckpt_spread_gather(ckpt_trainer *t, size_t i, const float *flat, bool state, float *out,
                               ckpt_err *err)
{
    const ENG(param) *p = &t->net.params[i];
    const float *from = flat + t->slots[i].at;
    float *box = NULL;
    ckpt_status status = CKPT_OK;
    if (state && p->n > 0 && holders(t, i)->size > 1) {
        CKPT_TRY(ckpt_eng_memory_new(&t->e, p->n, sizeof *box, (void **)(void *)&box, err), "%s",
                 p->name);
        CKPT_CHECK(collect(t, i, flat, box, err));
        from = box;
    }
    status = ENG(network_gather)(&t->e, &t->net, t->base, p, from, out, err);
done:
    ckpt_eng_memory_free(&t->e, box);
    return status;
}

void ckpt_spread_put(const ckpt_trainer *t, size_t i, int64_t first, int64_t n, const float *from,
                     bool bf16, void *whole)
{
    const ckpt_eng_box *b = &t->net.params[i].box;
    int64_t run = 1, row = 1,
            skip = 0; /* elements: together in both; of a row of the whole; before */
    int d = b->rank;
    while (d > 0 && b->len[d - 1] == b->dims[d - 1])
        run *= b->dims[--d];
    if (d > 0) { /* the last dimension that is cut */
        d--;
        row = run * b->dims[d];
        skip = run * b->lo[d];
        run *= b->len[d];
    }
    for (int64_t here, p = first; p < first + n; p += here, from += here) {
        int64_t rest = p / run, to = 0, scale = 1;
        for (int k = d - 1; k >= 0; k--) {
            to += (b->lo[k] + rest % b->len[k]) * scale;
            rest /= b->len[k];
            scale *= b->dims[k];
        }
        to = to * row + skip + p % run;
        here = ckpt_min_i64(run - p % run, first + n - p);
        if (bf16)
            ckpt_optim_round_bf16(&t->e, here, from, NULL, (uint16_t *)whole + to);
        else
            memcpy((float *)whole + to, from, (size_t)here * sizeof *from);
    }
}
