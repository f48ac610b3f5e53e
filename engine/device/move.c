/* move.h on a device. */
#include "move.h"

#include "context.h"

#include <stdlib.h>

/* ---- arrays ---------------------------------------------------------------------------------- */

ckpt_status ENG(copy)(ckpt_eng *e, int64_t n, const real *from, real *to, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_eng_move(e, to, from, (size_t)n * sizeof *to, err);
}

ckpt_status ENG(zero)(ckpt_eng *e, int64_t n, real *x, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_eng_clear(e, x, (size_t)n * sizeof *x, err);
}

ckpt_status ENG(add)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->add(&c, n, x, y, err));
}

ckpt_status ENG(copy_columns)(ckpt_eng *e, int64_t rows, int64_t n, const real *from,
                              int64_t ld_from, real *to, int64_t ld_to, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->copy_columns(&c, rows, n, from, ld_from, to, ld_to, err));
}

ckpt_status ENG(zero_wide)(ckpt_eng *e, int64_t n, wreal *x, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_eng_clear(e, x, (size_t)n * sizeof *x, err);
}

ckpt_status ENG(add_columns)(ckpt_eng *e, int64_t rows, int64_t n, const wreal *from,
                             int64_t ld_from, wreal *to, int64_t ld_to, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->add_columns(&c, rows, n, from, ld_from, to, ld_to, err));
}

/* ---- heads ----------------------------------------------------------------------------------- */

ckpt_status ENG(repeat_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                              wreal *to, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->repeat_heads(&c, rows, G, n, from, to, err));
}

ckpt_status ENG(sum_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                           wreal *to, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->sum_heads(&c, rows, G, n, from, to, err));
}

ckpt_status ENG(first_heads)(ckpt_eng *e, int64_t rows, int64_t G, int64_t n, const wreal *from,
                             wreal *to, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->first_heads(&c, rows, G, n, from, to, err));
}

static ckpt_cuda_mla sizes_of(const ckpt_eng_mla *b)
{
    return (ckpt_cuda_mla){b->N, b->DN, b->DR, b->DV, b->RK};
}

ckpt_status ENG(split_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *kv,
                             const real *kv_a, real *k, real *v, ckpt_err *err)
{
    const ckpt_cuda_mla sizes = sizes_of(b);
    WITHOUT(e, api_of(e)->split_heads(&c, &sizes, T, kv, kv_a, k, v, err));
}

ckpt_status ENG(fold_heads)(ckpt_eng *e, const ckpt_eng_mla *b, int64_t T, const real *dk,
                            const real *dv, real *dkv, real *dkv_a, ckpt_err *err)
{
    const ckpt_cuda_mla sizes = sizes_of(b);
    WITHOUT(e, api_of(e)->fold_heads(&c, &sizes, T, dk, dv, dkv, dkv_a, err));
}

ckpt_status ENG(gate_heads)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                            const real *o, const real *g, real *y, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->gate_heads(&c, T, N, D, per, o, g, y, err));
}

ckpt_status ENG(gate_heads_bwd)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                                const real *o, const real *g, const real *dy, real *d_o, real *dg,
                                ckpt_err *err)
{
    WITHOUT(e, api_of(e)->gate_heads_bwd(&c, T, N, D, per, o, g, dy, d_o, dg, err));
}

/* ---- tokens and results ---------------------------------------------------------------------- */

ckpt_status ENG(bring_seq)(ckpt_eng *e, const ckpt_eng_seq *seq, ckpt_err *err)
{
    e->device->on_device = ckpt_eng_take(e, seq->n + 1, sizeof *seq->cu);
    e->device->cu = seq->cu;
    e->device->whole_cu = NULL;
    ckpt_status status = ckpt_eng_check(e, err);
    if (status != CKPT_OK || e->dry || seq->n == 0)
        return status;
    return ckpt_eng_put(e, e->device->on_device, seq->cu, (size_t)(seq->n + 1) * sizeof *seq->cu,
                        err);
}

ckpt_status ENG(bring_tokens)(ckpt_eng *e, int64_t T, int64_t V, bool ids, const int32_t *from,
                              const int32_t **to, ckpt_err *err)
{
    *to = NULL;
    if (from == NULL)
        return CKPT_OK;
    int32_t *x = ckpt_eng_take(e, T, sizeof *x);
    ckpt_status status = ckpt_eng_check(e, err);
    *to = x;
    if (status != CKPT_OK || e->dry)
        return status;
    for (int64_t t = 0; t < T; t++) {
        if (ids && (from[t] < 0 || from[t] >= V))
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: id %d, expected 0 to %lld",
                             (long long)t, from[t], (long long)(V - 1));
        if (from[t] >= V)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: label %d, expected below %lld",
                             (long long)t, from[t], (long long)V);
    }
    return ckpt_eng_put(e, x, from, (size_t)T * sizeof *x, err);
}

ckpt_status ENG(shift_tokens)(ckpt_eng *e, const ckpt_eng_seq *seq, int32_t last,
                              const int32_t *from, int32_t *to, ckpt_err *err)
{
    const ckpt_cuda c = plain(e);
    ckpt_cuda_seq s;
    if (e->dry)
        return CKPT_OK;
    ckpt_status status = seq_of(e, seq, &s, err);
    return status != CKPT_OK ? status : api_of(e)->shift_tokens(&c, &s, last, from, to, err);
}

ckpt_status ENG(loss_weights)(ckpt_eng *e, int64_t T, const int32_t *labels, double share,
                              wreal *weight, ckpt_eng_result *n, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->loss_weights(&c, T, labels, share, weight, &n->i, err));
}

ckpt_status ENG(share_weights)(ckpt_eng *e, int64_t T, double share, const ckpt_eng_result *n,
                               wreal *weight, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->share_weights(&c, T, share, &n->i, weight, err));
}

ckpt_status ENG(mean_loss)(ckpt_eng *e, int64_t T, const wreal *loss, const ckpt_eng_result *n,
                           ckpt_eng_result *out, ckpt_err *err)
{
    WITHOUT(e, api_of(e)->mean_loss(&c, T, loss, &n->i, &out->d, err));
}

ckpt_status ENG(watch)(ckpt_eng *e, int64_t n, const real *x, ckpt_eng_result *at, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    ckpt_cuda c;
    ckpt_status status = with_work(e, CKPT_CUDA_WATCH, &c, err);
    if (status == CKPT_OK && !e->dry)
        status = api_of(e)->watch(&c, n, x, &at->i, err);
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(clear_results)(ckpt_eng *e, int64_t n, ckpt_eng_result *x, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_eng_clear(e, x, (size_t)n * sizeof *x, err);
}

ckpt_status ENG(fetch_results)(ckpt_eng *e, int64_t n, const ckpt_eng_result *x,
                               ckpt_eng_result *to, ckpt_err *err)
{
    return e->dry ? CKPT_OK : ckpt_eng_get(e, to, x, (size_t)n * sizeof *x, err);
}

ckpt_status ENG(fetch)(ckpt_eng *e, int64_t n, const real *x, wreal *to, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    const ckpt_cuda c = plain(e);
    ckpt_status status = CKPT_OK;
    if (sizeof(real) == sizeof(wreal))
        return e->dry ? CKPT_OK : ckpt_eng_get(e, to, x, (size_t)n * sizeof *to, err);
    wreal *widened = ckpt_eng_take(e, n, sizeof *widened);
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(api_of(e)->widen(&c, n, x, widened, err));
    CKPT_CHECK(ckpt_eng_get(e, to, widened, (size_t)n * sizeof *to, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
