/* AdamW, clipping, slots (optim.h). */
#include "optim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "device.h"
#include "elementwise.h"
#include "layout.h"
#include "optim_device.h"

#define PIECE (4 * CKPT_OPTIM_CHUNK) /* elements a thread takes at a time */

ckpt_optim_config ckpt_optim_defaults(ckpt_optim_kind kind)
{
    return (ckpt_optim_config){.kind = kind,
                               .beta1 = 0.9,
                               .beta2 = 0.999,
                               .eps = 1e-8,
                               .momentum = 0.9,
                               .set = CKPT_MUON_QUINTIC,
                               .steps = 5,
                               .scale = CKPT_MUON_SPECTRAL,
                               .extra = 1,
                               .max_norm = 1,
                               .bias_rate = 1e-3};
}

static ckpt_status within(const char *what, double x, double lo, double hi, ckpt_err *err)
{
    if (x >= lo && x < hi)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_USAGE, "optimizer: %s is %g, expected %g to less than %g", what, x,
                     lo, hi);
}

ckpt_status ckpt_optim_config_check(const ckpt_optim_config *c, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(within("beta1", c->beta1, 0, 1, err));
    CKPT_CHECK(within("beta2", c->beta2, 0, 1, err));
    CKPT_CHECK(within("eps", c->eps, 0, 1e30, err));
    CKPT_CHECK(within("momentum", c->momentum, 0, 1, err));
    CKPT_CHECK(within("the scale's factor", c->extra, 0, 1e30, err));
    CKPT_CHECK(within("the largest gradient norm", c->max_norm, 0, 1e300, err));
    CKPT_CHECK(within("the routers' bias rate", c->bias_rate, 0, 1e30, err));
    if (c->steps < 1 || c->steps > 99)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "optimizer: %d iterations of Newton-Schulz, expected 1 to 99", c->steps);
    if ((unsigned)c->kind > CKPT_OPTIM_MUON || (unsigned)c->set >= CKPT_MUON_SET_COUNT ||
        (unsigned)c->scale >= CKPT_MUON_SCALE_COUNT)
        return ckpt_fail(err, CKPT_E_USAGE, "optimizer: unknown kind, coefficients or scale");
done:
    return status;
}

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

void ckpt_optim_slot_set(ckpt_optim_slot *slot, const ckpt_optim_config *c, const char *name,
                         int rank, const int64_t *dims, unsigned flags, bool frozen, int64_t at)
{
    *slot = (ckpt_optim_slot){.name = name, .at = at, .frozen = frozen, .n = 1};
    for (int i = 0; i < rank; i++)
        slot->n *= dims[i];
    slot->decay =
        c->decay_all || (!(flags & CKPT_SCHEMA_NO_DECAY) && rank > 1 && !ends_in(name, "bias"));
    slot->muon = c->kind == CKPT_OPTIM_MUON && rank == 2 && !frozen &&
                 strcmp(name, "embed.weight") != 0 && strcmp(name, "head.weight") != 0;
    if (slot->muon) {
        slot->rows = dims[0];
        slot->cols = dims[1];
    }
}

/* ---- clipping --------------------------------------------------------------------------------- */

int64_t ckpt_optim_chunks(int64_t base, int64_t lo, int64_t hi)
{
    if (hi <= lo)
        return 0;
    return (hi - 1 - base) / CKPT_OPTIM_CHUNK - (lo - base) / CKPT_OPTIM_CHUNK + 1;
}

typedef struct sumsq_job {
    const ckpt_elementwise *k;
    int64_t base, lo, hi, first;
    const float *g;
    double *out;
} sumsq_job;

static void sumsq_chunk(void *arg, int64_t item, int worker)
{
    const sumsq_job *j = arg;
    (void)worker;
    const int64_t at = j->base + (j->first + item) * CKPT_OPTIM_CHUNK;
    const int64_t lo = ckpt_max_i64(at, j->lo), hi = ckpt_min_i64(at + CKPT_OPTIM_CHUNK, j->hi);
    j->out[item] = j->k->sumsq(hi - lo, j->g + (lo - j->lo));
}

void ckpt_optim_sumsq(const ckpt_eng *e, int64_t base, int64_t lo, int64_t hi, const float *g,
                      double *out)
{
    ckpt_eng_parallel(e, ckpt_optim_chunks(base, lo, hi), sumsq_chunk,
                      &(sumsq_job){.k = ckpt_elementwise_for(e->isa),
                                   .base = base,
                                   .lo = lo,
                                   .hi = hi,
                                   .first = (lo - base) / CKPT_OPTIM_CHUNK,
                                   .g = g,
                                   .out = out});
}

double ckpt_optim_sum(const double *chunks, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += chunks[i];
    return sum;
}

ckpt_status ckpt_optim_norm(ckpt_eng *e, const ckpt_optim *o, const float *g, double *norm,
                            ckpt_err *err)
{
    if (e->device != NULL)
        return ckpt_optim_norm_device(e, o, g, norm, err);
    const size_t mark = ckpt_eng_mark(e);
    int64_t chunks = 0;
    for (size_t i = 0; i < o->n_slots; i++)
        if (!o->slots[i].frozen)
            chunks += ckpt_optim_chunks(0, 0, o->slots[i].n);
    double *sums = ckpt_eng_take(e, chunks, sizeof *sums), *out = sums;
    ckpt_status status = ckpt_eng_check(e, err);
    if (status == CKPT_OK && !e->dry) {
        for (size_t i = 0; i < o->n_slots; i++) {
            const ckpt_optim_slot *s = &o->slots[i];
            if (s->frozen)
                continue;
            ckpt_optim_sumsq(e, s->at, s->at, s->at + s->n, g + s->at, out);
            out += ckpt_optim_chunks(0, 0, s->n);
        }
        *norm = sqrt(ckpt_optim_sum(sums, chunks));
    }
    ckpt_eng_drop(e, mark);
    return status;
}

double ckpt_optim_clip(double norm, double max_norm)
{
    if (max_norm <= 0)
        return 1;
    const double c = max_norm / (norm + 1e-6);
    return c > 1 ? 1 : c;
}

int64_t ckpt_optim_find_bad(const ckpt_eng *e, const ckpt_optim *o, const float *g)
{
    const ckpt_elementwise *k = ckpt_elementwise_for(e->isa);
    int64_t found = -1;
    float *here = NULL; /* a slot of a device's */
    for (size_t i = 0; i < o->n_slots && found < 0; i++) {
        const ckpt_optim_slot *s = &o->slots[i];
        const float *x = g + s->at;
        if (s->frozen)
            continue;
        if (e->device != NULL) {
            free(here);
            here = malloc((size_t)s->n * sizeof *here + 1);
            if (here == NULL || ckpt_eng_get(e, here, x, (size_t)s->n * sizeof *x, NULL) != CKPT_OK)
                break; /* the caller has an error already, without a name */
            x = here;
        }
        /* The square of any finite f32 is finite in double, and so is the sum of 2^63 of them. */
        if (!isfinite(k->sumsq(s->n, x)))
            found = (int64_t)i;
    }
    free(here);
    return found;
}

/* ---- AdamW ------------------------------------------------------------------------------------ */

typedef struct adamw_job {
    const ckpt_elementwise *k;
    const ckpt_optim *o;
    ckpt_adamw_scalars with, without; /* weight decay */
    int64_t lo, hi;
    float *w, *m, *v;
    const float *g;
} adamw_job;

/* First slot that ends after element `at`. */
static size_t find_slot(const ckpt_optim *o, int64_t at)
{
    size_t lo = 0, hi = o->n_slots;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (o->slots[mid].at + o->slots[mid].n <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static void adamw_piece(void *arg, int64_t item, int worker)
{
    const adamw_job *j = arg;
    (void)worker;
    const int64_t from = j->lo + item * PIECE, to = ckpt_min_i64(from + PIECE, j->hi);
    for (size_t i = find_slot(j->o, from); i < j->o->n_slots; i++) {
        const ckpt_optim_slot *s = &j->o->slots[i];
        if (s->at >= to)
            break;
        if (s->frozen || s->muon)
            continue;
        const int64_t lo = ckpt_max_i64(from, s->at) - j->lo;
        const int64_t hi = ckpt_min_i64(to, s->at + s->n) - j->lo;
        j->k->adamw(hi - lo, s->decay ? &j->with : &j->without, j->w + lo, j->m + lo, j->v + lo,
                    j->g + lo);
    }
}

ckpt_adamw_scalars ckpt_optim_scalars(const ckpt_optim_config *c, const ckpt_optim_step *s,
                                      double wd)
{
    const double t = (double)s->t;
    return (ckpt_adamw_scalars){.scale = (float)s->grad_scale,
                                .rise1 = (float)(1 - c->beta1),
                                .keep2 = (float)c->beta2,
                                .rise2 = (float)(1 - c->beta2),
                                .decay = (float)(1 - s->lr * wd),
                                .root = (float)sqrt(1 - pow(c->beta2, t)),
                                .eps = (float)c->eps,
                                .negative = (float)-(s->lr / (1 - pow(c->beta1, t)))};
}

void ckpt_optim_adamw(const ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s, int64_t lo,
                      int64_t hi, float *w, float *m, float *v, const float *g)
{
    if (e->dry || hi <= lo)
        return;
    ckpt_eng_parallel(e, (hi - lo - 1) / PIECE + 1, adamw_piece,
                      &(adamw_job){.k = ckpt_elementwise_for(e->isa),
                                   .o = o,
                                   .with = ckpt_optim_scalars(&o->config, s, s->wd),
                                   .without = ckpt_optim_scalars(&o->config, s, 0),
                                   .lo = lo,
                                   .hi = hi,
                                   .w = w,
                                   .m = m,
                                   .v = v,
                                   .g = g});
}

ckpt_status ckpt_optim_step_all(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                                float *w, float *m, float *v, const float *g, ckpt_err *err)
{
    if (o->n_slots == 0)
        return CKPT_OK;
    if (e->device != NULL)
        return ckpt_optim_step_device(e, o, s, w, m, v, g, err);
    const ckpt_optim_slot *last = &o->slots[o->n_slots - 1];
    const int64_t lo = o->slots[0].at;
    if (!e->dry)
        ckpt_optim_adamw(e, o, s, lo, last->at + last->n, w + lo, m + lo, v + lo, g + lo);
    return ckpt_optim_muon(e, o, s, 0, o->n_slots, w, m, g, err);
}

/* ---- bf16 ------------------------------------------------------------------------------------- */

typedef struct round_job {
    const ckpt_elementwise *k;
    int64_t n;
    const float *master;
    float *x;
    uint16_t *bits;
} round_job;

static void round_piece(void *arg, int64_t item, int worker)
{
    const round_job *j = arg;
    (void)worker;
    const int64_t lo = item * PIECE, n = ckpt_min_i64(PIECE, j->n - lo);
    j->k->round_bf16(n, j->master + lo, j->x ? j->x + lo : NULL, j->bits ? j->bits + lo : NULL);
}

void ckpt_optim_round_bf16(const ckpt_eng *e, int64_t n, const float *master, float *x,
                           uint16_t *bits)
{
    if (e->dry || n <= 0)
        return;
    ckpt_eng_parallel(
        e, (n - 1) / PIECE + 1, round_piece,
        &(round_job){
            .k = ckpt_elementwise_for(e->isa), .n = n, .master = master, .x = x, .bits = bits});
}

/* ---- routers ---------------------------------------------------------------------------------- */

void ckpt_optim_router_bias(int64_t E, const int64_t *counts, double rate, float *bias)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < E; i++)
        sum += counts[i];
    for (int64_t i = 0; i < E; i++) {
        const int64_t mean = sum / E, rest = sum % E;
        if (counts[i] < mean || (counts[i] == mean && rest > 0))
            bias[i] += (float)rate;
        else if (counts[i] > mean)
            bias[i] -= (float)rate;
    }
}
