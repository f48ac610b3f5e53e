/* Experts on several ranks, on a device: the twin of engine/moe_ep.c, which says what goes where. How many
 * rows of every expert come is told through the host, which waits for the routing; rows themselves and
 * their weights stay on the device. What the order of the received rows is made of is kept there too, as
 * the arena is, and how many went and came is read back once by the backward. */
#include "moe_internal.h"

#include <stdlib.h>
#include <string.h>

#include "context.h"

/* What one pass knows of the rows, in this process's memory. */
typedef struct traffic {
    int64_t *sent, *received; /* [ep] rows to and from every rank */
    int64_t *scaled;          /* [2 ep] */
    int64_t n;                /* rows that arrive */
} traffic;

static ckpt_status traffic_open(const ckpt_eng *e, const ENG(moe_saved) * s, traffic *t,
                                ckpt_err *err)
{
    size_t ep = (size_t)e->par->ep;
    *t = (traffic){.sent = calloc(4 * ep, sizeof *t->sent), .n = s->rows};
    if (t->sent == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu ranks", ep);
    t->received = t->sent + ep;
    t->scaled = t->received + ep;
    return CKPT_OK;
}

/* Order of what arrives: by rank and then by expert; wanted by expert, ranks ascending inside one.
 * in [ep, own]: rows of each. first [own + 1], row, slot [n]. */
static void order_rows(const traffic *t, int ep, int64_t own, const int64_t *in, int64_t *first,
                       int32_t *row_of, int32_t *slot_of)
{
    int64_t row = 0;
    for (int64_t i = 0; i < own; i++) {
        int64_t before = 0; /* received rows of lower ranks */
        first[i] = row;
        for (int r = 0; r < ep; r++) {
            int64_t at = before;
            for (int64_t k = 0; k < i; k++)
                at += in[r * own + k];
            for (int64_t k = 0; k < in[r * own + i]; k++, row++) {
                slot_of[row] = (int32_t)(at + k);
                row_of[at + k] = (int32_t)row;
            }
            before += t->received[r];
        }
    }
    first[own] = row;
}

/* Put that order, and how many rows move, on the device. */
static ckpt_status put_order(ckpt_eng *e, const traffic *t, int64_t own, const int64_t *in,
                             const ENG(moe_saved) * s, ckpt_err *err)
{
    const size_t n = (size_t)t->n, ep = (size_t)e->par->ep;
    int64_t *first = malloc((size_t)(own + 1) * sizeof *first);
    int32_t *rows = malloc(2 * n * sizeof *rows + 1), *slots = rows + n;
    ckpt_status status;
    if (first == NULL || rows == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu rows of experts", n);
        goto done;
    }
    order_rows(t, e->par->ep, own, in, first, rows, slots);
    CKPT_CHECK(ckpt_eng_put(e, s->first_in, first, (size_t)(own + 1) * sizeof *first, err));
    CKPT_CHECK(ckpt_eng_put(e, s->row_in, rows, n * sizeof *rows, err));
    CKPT_CHECK(ckpt_eng_put(e, s->slot_in, slots, n * sizeof *slots, err));
    CKPT_CHECK(ckpt_eng_put(e, s->sent, t->sent, 2 * ep * sizeof *t->sent, err));
done:
    free(first);
    free(rows);
    return status;
}

/* Tell every rank how many rows of each of its experts come, and order what arrives. */
static ckpt_status meet(ckpt_eng *e, const ckpt_eng_moe *m, const ENG(moe_saved) * s, traffic *t,
                        ckpt_err *err)
{
    int ep = e->par->ep;
    const ckpt_eng_range own = ckpt_moe_own(e, m);
    int64_t *first = malloc((size_t)(2 * m->E + 1 + own.n * ep + 2 * ep + 1) * sizeof *first);
    ckpt_status status;
    if (first == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld experts", (long long)m->E);
    int64_t *out = first + m->E + 1, *in = out + m->E, *out_n = in + own.n * ep, *in_n = out_n + ep;
    CKPT_CHECK(ckpt_eng_get(e, first, s->first, (size_t)(m->E + 1) * sizeof *first, err));
    for (int64_t i = 0; i < m->E; i++)
        out[i] = first[i + 1] - first[i];
    for (int r = 0; r < ep; r++) {
        int64_t lo = ckpt_part_at(m->E, ep, r), hi = ckpt_part_at(m->E, ep, r + 1);
        out_n[r] = hi - lo;
        in_n[r] = own.n;
        t->sent[r] = first[hi] - first[lo];
    }
    CKPT_CHECK(ckpt_comm_alltoall(&e->par->experts, sizeof *out, out, out_n, in, in_n, err));
    t->n = 0;
    for (int r = 0; r < ep; r++) {
        t->received[r] = 0;
        for (int64_t i = 0; i < own.n; i++)
            t->received[r] += in[r * own.n + i];
        t->n += t->received[r];
    }
    if (t->n > s->rows) {
        status =
            ckpt_fail(err, CKPT_E_UNSUPPORTED,
                      "moe: %lld rows arrive, at most %lld: data-parallel ranks of one group of "
                      "experts need batches of one size",
                      (long long)t->n, (long long)s->rows);
        goto done;
    }
    status = put_order(e, t, own.n, in, s, err);
done:
    free(first);
    return status;
}

/* What the forward told, once more. */
static ckpt_status remember(ckpt_eng *e, const ENG(moe_saved) * s, traffic *t, ckpt_err *err)
{
    size_t ep = (size_t)e->par->ep;
    ckpt_status status = ckpt_eng_get(e, t->sent, s->sent, 2 * ep * sizeof *t->sent, err);
    t->n = 0;
    for (size_t r = 0; r < ep; r++)
        t->n += t->received[r];
    return status;
}

/* Rows of `bytes` bytes to the ranks of their experts, or back. */
static ckpt_status move(ckpt_eng *e, const traffic *t, size_t bytes, bool there, const void *from,
                        void *to, ckpt_err *err)
{
    int ep = e->par->ep;
    int64_t *out = t->scaled, *in = t->scaled + ep;
    for (int r = 0; r < ep; r++) {
        out[r] = (there ? t->sent[r] : t->received[r]) * (int64_t)bytes;
        in[r] = (there ? t->received[r] : t->sent[r]) * (int64_t)bytes;
    }
    return ckpt_comm_alltoall(&e->par->experts, 1, from, out, to, in, err);
}

/* to[i] = from[index[i]], f32. */
static ckpt_status pick(const ckpt_eng *e, int64_t n, const int32_t *index, const wreal *from,
                        wreal *to, ckpt_err *err)
{
    ckpt_cuda c = plain(e);
    c.type = CKPT_CUDA_F32;
    return api_of(e)->dispatch(&c, n, 1, 1, index, from, to, err);
}

ckpt_status ENG(moe_ep)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T, const ENG(moe_params) * p,
                        const real *x, bool add, real *y, const ENG(moe_saved) * s, ckpt_err *err)
{
    const int64_t rows = T * m->top_k;
    const ckpt_eng_moe part = ckpt_moe_own_part(e, m);
    const ENG(moe_saved) in = ENG(moe_received)(s);
    const ckpt_cuda c = plain(e);
    const size_t mark = ckpt_eng_mark(e), wide = (size_t)m->H * sizeof(real);
    traffic t;
    ckpt_status status;
    real *send = ckpt_eng_take(e, rows * m->H, sizeof *send);
    wreal *weight = ckpt_eng_take(e, rows, sizeof *weight);
    real *x_in = ckpt_eng_take(e, s->rows * m->H, sizeof *x_in);
    real *y_in = ckpt_eng_take(e, s->rows * m->H, sizeof *y_in);
    CKPT_CHECK(traffic_open(e, s, &t, err));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        CKPT_CHECK(meet(e, m, s, &t, err));
        CKPT_CHECK(api_of(e)->dispatch(&c, rows, m->H, m->top_k, s->slot_of, x, send, err));
        CKPT_CHECK(pick(e, rows, s->slot_of, s->weight, weight, err));
        CKPT_CHECK(move(e, &t, wide, true, send, x_in, err));
        CKPT_CHECK(move(e, &t, sizeof *weight, true, weight, s->weight_in, err));
    }
    if (part.E > 0)
        CKPT_CHECK(ENG(moe_rows)(e, &part, t.n, p, x_in, false, y_in, &in, err));
    if (!e->dry) {
        CKPT_CHECK(move(e, &t, wide, false, y_in, send, err));
        CKPT_CHECK(api_of(e)->combine(&c, T, m->H, m->top_k, s->row_of, send, add, y, err));
    }
done:
    free(t.sent);
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(moe_ep_bwd)(ckpt_eng *e, const ckpt_eng_moe *m, int64_t T,
                            const ENG(moe_params) * p, const ENG(moe_saved) * s, const real *dy,
                            bool add, real *dx, wreal *dweight, const ENG(moe_params) * g,
                            ckpt_err *err)
{
    const int64_t rows = T * m->top_k;
    const ckpt_eng_moe part = ckpt_moe_own_part(e, m);
    const ENG(moe_saved) in = ENG(moe_received)(s);
    const ckpt_cuda c = plain(e);
    const size_t mark = ckpt_eng_mark(e), wide = (size_t)m->H * sizeof(real);
    traffic t;
    ckpt_status status;
    real *send = ckpt_eng_take(e, rows * m->H, sizeof *send);
    wreal *weight = ckpt_eng_take(e, rows, sizeof *weight);
    real *dy_in = ckpt_eng_take(e, s->rows * m->H, sizeof *dy_in);
    real *dx_in = ckpt_eng_take(e, s->rows * m->H, sizeof *dx_in);
    wreal *dweight_in = ckpt_eng_take(e, s->rows, sizeof *dweight_in);
    CKPT_CHECK(traffic_open(e, s, &t, err));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (!e->dry) {
        CKPT_CHECK(remember(e, s, &t, err));
        CKPT_CHECK(api_of(e)->dispatch(&c, rows, m->H, m->top_k, s->slot_of, dy, send, err));
        CKPT_CHECK(move(e, &t, wide, true, send, dy_in, err));
    }
    if (part.E > 0)
        CKPT_CHECK(
            ENG(moe_rows_bwd)(e, &part, t.n, p, &in, dy_in, false, dx_in, dweight_in, g, err));
    if (!e->dry) {
        CKPT_CHECK(move(e, &t, wide, false, dx_in, send, err));
        CKPT_CHECK(move(e, &t, sizeof *weight, false, dweight_in, weight, err));
        CKPT_CHECK(pick(e, rows, s->row_of, weight, dweight, err));
        CKPT_CHECK(api_of(e)->combine(&c, T, m->H, m->top_k, s->row_of, send, add, dx, err));
    }
done:
    free(t.sent);
    ckpt_eng_drop(e, mark);
    return status;
}
