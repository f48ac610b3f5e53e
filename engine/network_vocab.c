/* Embedding, head and loss whose vocabulary rows are cut over the tensor-parallel group, and what a run
 * reports of all ranks together. Source: mla-moe-math.md section 5. */
#include "network_internal.h"

#include "checked.h"

ckpt_status ENG(vocab_embed)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                             const int32_t *ids, real *x, ckpt_err *err)
{
    int64_t H = m->spec.H, n = where->cp_n;
    const int32_t *mine = e->dry ? ids : ids + where->cp_lo;
    size_t mark = ckpt_eng_mark(e);
    bool cut = e->par->tp > 1;
    ckpt_status status;
    real *part = cut ? ckpt_eng_take(e, n * H, sizeof *part) : x;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(
        ENG(embed_part)(e, n, m->spec.V, m->vocab.lo, m->vocab.n, H, mine, m->embed, part, err));
    if (cut)
        CKPT_CHECK(ENG(tokens_scatter)(e, &e->par->tensor, where->over_tp, part, x, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(vocab_embed_bwd)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                                 const int32_t *ids, const real *dx, ckpt_err *err)
{
    int64_t H = m->spec.H, n = where->cp_n;
    const int32_t *mine = e->dry ? ids : ids + where->cp_lo;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    if (e->par->tp > 1) {
        real *all = ckpt_eng_take(e, n * H, sizeof *all);
        CKPT_CHECK(ckpt_eng_check(e, err));
        CKPT_CHECK(ENG(tokens_gather)(e, &e->par->tensor, where->over_tp, dx, all, err));
        dx = all;
    }
    status =
        ENG(embed_part_bwd)(e, n, m->spec.V, m->vocab.lo, m->vocab.n, H, mine, dx, m->dembed, err);
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* All logits on every rank: each brings its tokens and columns, and zeros elsewhere. */
static ckpt_status spread_logits(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                                 const real *z, wreal *logits, ckpt_err *err)
{
    int64_t V = m->spec.V, n = m->vocab.n, at = where->cp_lo * V + m->vocab.lo;
    size_t mark = ckpt_eng_mark(e);
    real *all = ckpt_eng_take(e, where->T * V, sizeof *all);
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(zero)(e, where->T * V, all, err));
    CKPT_CHECK(ENG(copy_columns)(e, where->cp_n, n, z, n, e->dry ? all : all + at, V, err));
    if (!e->dry)
        CKPT_CHECK(
            ckpt_comm_allreduce(&e->par->model, COMM_REAL, CKPT_COMM_SUM, all, where->T * V, err));
    status = ENG(fetch)(e, where->T * V, all, logits, err);
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* Loss and dlogits (or NULL) of z. */
static ckpt_status loss_of(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                           const real *z, const int32_t *labels, double share, real *dz,
                           ckpt_eng_result *loss, ckpt_err *err)
{
    int64_t T = where->cp_n;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    wreal *weight = ckpt_eng_take(e, ckpt_max_i64(T, where->T), sizeof *weight);
    wreal *each = ckpt_eng_take(e, T, sizeof *each);
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(ENG(loss_weights)(e, where->T, labels, share, weight, &loss[1], err));
    if (!e->dry) {
        CKPT_CHECK(
            ckpt_comm_allreduce(&e->par->data, CKPT_COMM_I64, CKPT_COMM_SUM, &loss[1], 1, err));
        labels += where->cp_lo;
    }
    CKPT_CHECK(ENG(share_weights)(e, T, share, &loss[1], weight, err));
    CKPT_CHECK(ENG(xent_part)(e, &e->par->tensor, T, m->spec.V, m->vocab.lo, m->vocab.n, z, labels,
                              weight, each, dz, err));
    if (e->par->t == 0) /* its group's tokens once */
        CKPT_CHECK(ENG(mean_loss)(e, T, each, &loss[1], &loss[0], err));
    else
        CKPT_CHECK(ENG(clear_results)(e, 1, loss, err));
    if (!e->dry)
        status = ckpt_comm_allreduce(e->par->world, CKPT_COMM_F64, CKPT_COMM_SUM, &loss[0], 1, err);
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(vocab_loss)(ckpt_eng *e, const ENG(network) * m, const ENG(tokens) * where,
                            const real *h, const int32_t *labels, double share, wreal *logits,
                            real *dh, ckpt_eng_result *loss, ckpt_err *err)
{
    int64_t H = m->spec.H, n = m->vocab.n, T = where->cp_n;
    bool cut = e->par->tp > 1;
    size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *z = ckpt_eng_take(e, T * n, sizeof *z);
    real *all = cut ? ckpt_eng_take(e, T * H, sizeof *all) : NULL;
    real *dall = cut && dh ? ckpt_eng_take(e, T * H, sizeof *dall) : dh;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (cut) {
        CKPT_CHECK(ENG(tokens_gather)(e, &e->par->tensor, where->over_tp, h, all, err));
        h = all;
    }
    CKPT_CHECK(ENG(linear)(e, T, H, n, h, H, m->head, NULL, false, z, n, err));
    if (logits != NULL)
        CKPT_CHECK(spread_logits(e, m, where, z, logits, err));
    if (labels == NULL)
        goto done;
    CKPT_CHECK(loss_of(e, m, where, z, labels, share, dh ? z : NULL, loss, err));
    if (dh == NULL)
        goto done;
    CKPT_CHECK(ENG(linear_dw)(e, T, H, n, z, n, h, H, m->dhead, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, H, n, z, n, m->head, false, dall, H, err));
    if (cut)
        CKPT_CHECK(ENG(tokens_scatter)(e, &e->par->tensor, where->over_tp, dall, dh, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(sum_side_losses)(ckpt_eng *e, const ENG(network) * m, ENG(run) * run, ckpt_err *err)
{
    double sums[2] = {run->aux_loss, run->z_loss};
    ckpt_status status =
        ckpt_comm_allreduce(e->par->world, CKPT_COMM_F64, CKPT_COMM_SUM, sums, 2, err);
    run->aux_loss = sums[0] / e->par->dp;
    run->z_loss = sums[1] / e->par->dp;
    for (int64_t i = 0; status == CKPT_OK && run->expert_counts && i < m->spec.n_blocks; i++) {
        const ckpt_eng_moe *b = &m->spec.blocks[i].u.moe;
        if (m->spec.blocks[i].kind == CKPT_ENG_MOE)
            status = ckpt_comm_allreduce(e->par->world, CKPT_COMM_I64, CKPT_COMM_SUM,
                                         run->expert_counts + i * b->E, b->E, err);
    }
    return status;
}
