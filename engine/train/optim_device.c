/* The optimizer of arrays on a device (optim_device.h). */
#include "optim_device.h"

#include "checked.h"
#include "device/context.h"
#include "graph.h"

/* What changes from step to step, in the device's memory: captured kernels read it there. */
typedef struct kept {
    ckpt_adamw_scalars with, without; /* weight decay */
    float negative;                   /* -lr */
} kept;

static kept kept_of(const ckpt_optim *o, const ckpt_optim_step *s)
{
    return (kept){.with = ckpt_optim_scalars(&o->config, s, s->wd),
                  .without = ckpt_optim_scalars(&o->config, s, 0),
                  .negative = (float)-s->lr};
}

/* ---- norm ------------------------------------------------------------------------------------ */

typedef struct norm_job {
    ckpt_eng *e;
    const ckpt_optim *o;
    const float *g;
    int64_t chunks;
    double *sums, *root;
} norm_job;

static ckpt_status queue_norm(void *self, ckpt_err *err)
{
    const norm_job *j = self;
    const ckpt_cuda c = plain(j->e);
    double *out = j->sums;
    ckpt_status status;
    for (size_t i = 0; i < j->o->n_slots; i++) {
        const ckpt_optim_slot *s = &j->o->slots[i];
        if (s->frozen)
            continue;
        CKPT_CHECK(api_of(j->e)->sumsq(&c, s->n, j->g + s->at, out, err));
        out += ckpt_optim_chunks(0, 0, s->n);
    }
    status = api_of(j->e)->norm(&c, j->chunks, j->sums, j->root, err);
done:
    return status;
}

ckpt_status ckpt_optim_norm_device(ckpt_eng *e, const ckpt_optim *o, const float *g, double *norm,
                                   ckpt_err *err)
{
    static const char name[] = "norm";
    const ckpt_eng_graph_key key = {.piece = name, .n = {(int64_t)(intptr_t)g}};
    const size_t mark = ckpt_eng_mark(e);
    norm_job j = {.e = e, .o = o, .g = g};
    ckpt_status status;
    for (size_t i = 0; i < o->n_slots; i++)
        if (!o->slots[i].frozen)
            j.chunks += ckpt_optim_chunks(0, 0, o->slots[i].n);
    j.sums = ckpt_eng_take(e, j.chunks + 1, sizeof *j.sums);
    j.root = j.sums + j.chunks;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(ckpt_eng_graph_run(e, &key, queue_norm, &j, err));
    CKPT_CHECK(ckpt_eng_get(e, norm, j.root, sizeof *norm, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ckpt_optim_sumsq_device(ckpt_eng *e, const ckpt_optim *o, const size_t *list,
                                    size_t slots, const float *g, double *sums, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    const size_t mark = ckpt_eng_mark(e);
    int64_t chunks = 0;
    ckpt_status status;
    for (size_t i = 0; i < slots; i++)
        chunks += ckpt_optim_chunks(0, 0, o->slots[list[i]].n);
    double *there = ckpt_eng_take(e, chunks, sizeof *there), *out = there;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    for (size_t i = 0; i < slots; i++) {
        const ckpt_optim_slot *s = &o->slots[list[i]];
        CKPT_CHECK(api_of(e)->sumsq(&c, s->n, g + s->at, out, err));
        out += ckpt_optim_chunks(0, 0, s->n);
    }
    CKPT_CHECK(ckpt_eng_get(e, sums, there, (size_t)chunks * sizeof *sums, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- AdamW ----------------------------------------------------------------------------------- */

/* Neighbours with the same decay go together, with the zeros between them (network.h: at), which stay
 * zeros; elements are independent. there: *k is in the device's memory. */
static ckpt_status step_adamw(const ckpt_eng *e, const ckpt_optim *o, const kept *k, bool there,
                              int64_t lo, int64_t hi, float *w, float *m, float *v, const float *g,
                              ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < o->n_slots && status == CKPT_OK;) {
        const ckpt_optim_slot *first = &o->slots[i];
        const int64_t at = ckpt_max_i64(first->at, lo);
        int64_t end = at;
        if (first->frozen || first->muon || first->at >= hi || first->at + first->n <= lo) {
            i++;
            continue;
        }
        for (; i < o->n_slots && !o->slots[i].frozen && !o->slots[i].muon &&
               o->slots[i].decay == first->decay && o->slots[i].at < hi;
             i++)
            end = ckpt_min_i64(o->slots[i].at + o->slots[i].n, hi);
        const ckpt_adamw_scalars *with = first->decay ? &k->with : &k->without;
        status = (there ? api_of(e)->adamw_kept : api_of(e)->adamw)(
            &c, end - at, with, w + at, m + at, v + at, g + at, NULL, err);
    }
    return status;
}

ckpt_status ckpt_optim_adamw_device(const ckpt_eng *e, const ckpt_optim *o,
                                    const ckpt_optim_step *s, int64_t lo, int64_t hi, float *w,
                                    float *m, float *v, const float *g, ckpt_err *err)
{
    const kept now = kept_of(o, s);
    return step_adamw(e, o, &now, false, lo, hi, w, m, v, g, err);
}

/* ---- Muon ------------------------------------------------------------------------------------ */

/* One matrix, the shorter side as rows. */
typedef struct matrix {
    int64_t r, c;
    float *x, *y; /* [r, c]: X and the next X */
    float *a, *b; /* [r, r] */
} matrix;

static ckpt_status product(const ckpt_eng *e, bool tb, int64_t m, int64_t n, int64_t k,
                           const float *a, const float *b, float *to, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    const ckpt_cuda_product p = {.tb = tb,
                                 .m = m,
                                 .n = n,
                                 .k = k,
                                 .lda = k,
                                 .ldb = tb ? k : n,
                                 .ldc = n,
                                 .a = a,
                                 .b = b,
                                 .c = to};
    return api_of(e)->matmul(&c, &p, err);
}

/* A = X X^T, B = b A + c A^2, Y = a X + B X. */
static ckpt_status iterate(const ckpt_eng *e, const ckpt_optim_config *o, matrix *t, ckpt_err *err)
{
    const ckpt_cuda_plugin *api = api_of(e);
    const ckpt_cuda c = plain(e);
    const bool round = o->muon_bf16;
    ckpt_status status = CKPT_OK;
    for (int i = 0; i < o->steps; i++) {
        float k[3], *next = t->y;
        ckpt_muon_coefficients(o->set, i, k);
        CKPT_CHECK(product(e, true, t->r, t->r, t->c, t->x, t->x, t->a, err));
        if (round)
            CKPT_CHECK(api->round_bf16(&c, t->r * t->r, t->a, t->a, err));
        CKPT_CHECK(product(e, true, t->r, t->r, t->r, t->a, t->a, t->b, err));
        CKPT_CHECK(api->muon_mix(&c, t->r * t->r, k[1], t->a, k[2], round, t->b, err));
        CKPT_CHECK(product(e, false, t->r, t->c, t->r, t->b, t->x, next, err));
        CKPT_CHECK(api->muon_mix(&c, t->r * t->c, k[0], t->x, 1, round, next, err));
        t->y = t->x;
        t->x = next;
    }
done:
    return status;
}

ckpt_status ckpt_muon_direction_device(const ckpt_eng *e, const ckpt_optim_config *k,
                                       const ckpt_optim_step *s, int64_t n, const float *g,
                                       float *m, float *d, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    return api_of(e)->muon_direction(&c, n, (float)s->grad_scale, (float)(1 - k->momentum),
                                     k->nesterov, g, m, d, err);
}

ckpt_status ckpt_muon_orthogonalise_device(ckpt_eng *e, const ckpt_optim_config *k, int64_t rows,
                                           int64_t cols, float *x, ckpt_err *err)
{
    const ckpt_cuda_plugin *api = api_of(e);
    const ckpt_cuda c = plain(e);
    const int64_t n = rows * cols, chunks = ckpt_optim_chunks(0, 0, n);
    const bool turn = rows > cols;
    const size_t mark = ckpt_eng_mark(e);
    matrix t = {.r = ckpt_min_i64(rows, cols), .c = ckpt_max_i64(rows, cols)};
    ckpt_status status;
    double *sums = ckpt_eng_take(e, chunks + 1, sizeof *sums);
    t.x = ckpt_eng_take(e, n, sizeof *t.x);
    t.y = ckpt_eng_take(e, n, sizeof *t.y);
    t.a = ckpt_eng_take(e, t.r * t.r, sizeof *t.a);
    t.b = ckpt_eng_take(e, t.r * t.r, sizeof *t.b);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry || n == 0)
        goto done;
    CKPT_CHECK(api->sumsq(&c, n, x, sums, err));
    CKPT_CHECK(api->norm(&c, chunks, sums, sums + chunks, err));
    CKPT_CHECK(api->muon_load(&c, rows, cols, turn, k->muon_bf16, x, sums + chunks, t.x, err));
    CKPT_CHECK(iterate(e, k, &t, err));
    CKPT_CHECK(api->muon_load(&c, t.r, t.c, turn, false, t.x, NULL, x, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ckpt_muon_apply_device(const ckpt_eng *e, int64_t n, double lr, double wd,
                                   double factor, const float *x, float *w, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    return api_of(e)->muon_apply(&c, n, (float)(1 - lr * wd), (float)-lr, (float)factor, x, w, err);
}

ckpt_status ckpt_optim_copy_device(const ckpt_eng *e, int64_t rows, int64_t cols, const float *from,
                                   int64_t ld_from, float *to, int64_t ld_to, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    return api_of(e)->copy_columns(&c, rows, cols, from, ld_from, to, ld_to, err);
}

static ckpt_status step_matrix(ckpt_eng *e, const ckpt_optim *o, const kept *with,
                               const ckpt_optim_slot *slot, float *w, float *m, const float *g,
                               ckpt_err *err)
{
    const ckpt_optim_config *k = &o->config;
    const ckpt_cuda c = plain(e);
    const int64_t n = slot->n;
    const float factor = (float)ckpt_muon_factor(k, slot->rows, slot->cols);
    const float *decay = slot->decay ? &with->with.decay : &with->without.decay;
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    float *d = ckpt_eng_take(e, n, sizeof *d);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry && n > 0)
        CKPT_CHECK(api_of(e)->muon_direction_kept(&c, n, &with->with.scale,
                                                  (float)(1 - k->momentum), k->nesterov,
                                                  g + slot->at, m + slot->at, d, err));
    CKPT_CHECK(ckpt_muon_orthogonalise_device(e, k, slot->rows, slot->cols, d, err));
    if (!e->dry && n > 0)
        CKPT_CHECK(api_of(e)->muon_apply_kept(&c, n, decay, &with->negative, factor, d,
                                              w + slot->at, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- both ------------------------------------------------------------------------------------ */

typedef struct step_job {
    ckpt_eng *e;
    const ckpt_optim *o;
    const kept *k;
    float *w, *m, *v;
    const float *g;
} step_job;

static ckpt_status queue_step(void *self, ckpt_err *err)
{
    const step_job *j = self;
    const ckpt_optim *o = j->o;
    ckpt_status status =
        j->e->dry ? CKPT_OK
                  : step_adamw(j->e, o, j->k, true, 0, INT64_MAX, j->w, j->m, j->v, j->g, err);
    for (size_t i = 0; i < o->n_slots && status == CKPT_OK; i++)
        if (o->slots[i].muon)
            status = step_matrix(j->e, o, j->k, &o->slots[i], j->w, j->m, j->g, err);
    return status;
}

ckpt_status ckpt_optim_step_device(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                                   float *w, float *m, float *v, const float *g, ckpt_err *err)
{
    static const char name[] = "optimizer";
    const ckpt_eng_graph_key key = {.piece = name, .n = {(int64_t)(intptr_t)w}};
    const size_t mark = ckpt_eng_mark(e);
    const kept now = kept_of(o, s);
    kept *there = ckpt_eng_take(e, 1, sizeof *there);
    step_job j = {.e = e, .o = o, .k = there, .w = w, .m = m, .v = v, .g = g};
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry)
        CKPT_CHECK(ckpt_eng_put(e, there, &now, sizeof now, err));
    CKPT_CHECK(ckpt_eng_graph_run(e, &key, queue_step, &j, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
