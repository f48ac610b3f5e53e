/* The rest of ops_case.h: vocabulary, optimizer, rotation, mixture of experts. */
#ifndef CKPT_TEST_OPS_MORE_H
#define CKPT_TEST_OPS_MORE_H

#define CKPT_REAL 64
#include "attn.h"
#include "moe_internal.h"
#include "ops_case.h"
#include "train/optim.h"

static inline void *ops_ints(const int32_t *x, int64_t n)
{
    void *p = dev_alloc((size_t)n * 4 + 256);
    dev_put(p, x, (size_t)n * 4);
    return p;
}
static inline int32_t *ops_ids(int64_t n, int64_t lo, int64_t hi)
{
    int32_t *x = malloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = (int32_t)floor(kda_number((double)lo, (double)hi));
    return x;
}
static inline void ops_equal(ops_run *o, const char *what, const void *dev, const void *want,
                             size_t bytes)
{
    void *got = malloc(bytes + 1);
    dev_get(got, dev, bytes);
    if (memcmp(got, want, bytes) != 0 && !o->said[0])
        (void)snprintf(o->said, sizeof o->said, "%s: %zu bytes differ", what, bytes);
    free(got);
}

static inline void ops_embed(ops_run *o, int64_t T, int64_t V, int64_t lo, int64_t n, int64_t H)
{
    const ckpt_dtype E = OPS_E(o);
    ckpt_err err;
    int32_t *ids = ops_ids(T, 0, V);
    void *dids = ops_ints(ids, T);
    kda_array *table = ops_in(o, n * H, E, -1, 1), *dy = ops_in(o, T * H, E, -1, 1);
    kda_array *y = ops_out(o, T * H, E), *dt = ops_in(o, n * H, CKPT_F32, -1, 1);
    ops_did(o, "reference", ENG(embed_part)(&o->e, T, V, lo, n, H, ids, table->x, y->x, &err),
            &err);
    ops_did(o, "embed", ckpt_cuda_embed(&o->c, T, lo, n, H, dids, table->dev, y->dev, &err), &err);
    ops_did(o, "reference", ENG(embed_part_bwd)(&o->e, T, V, lo, n, H, ids, dy->x, dt->x, &err),
            &err);
    ops_did(o, "embed", ckpt_cuda_embed_bwd(&o->c, T, lo, n, H, dids, dy->dev, dt->dev, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "embed y", y);
    ops_same(o, "embed dtable", dt);
    dev_free(dids);
    free(ids);
    ops_clear(o);
}

static inline void ops_xent(ops_run *o, int64_t T, int64_t V, bool in_place)
{
    const ckpt_dtype E = OPS_E(o);
    ckpt_err err;
    int32_t *labels = ops_ids(T, 0, V);
    for (int64_t t = 2; t < T; t += 5)
        labels[t] = -1;
    void *dlabels = ops_ints(labels, T);
    kda_array *z = ops_in(o, T * V, E, -8, 8), *w = ops_in(o, T, CKPT_F32, 0, 1);
    for (int64_t i = 0; V > 1 && i < T * V; i += 7) /* masked, but not under a label */
        if (i % V != labels[i / V])
            z->x[i] = -INFINITY;
    kda_put(z);
    kda_array *loss = ops_out(o, T, CKPT_F32), *dz = ops_out(o, T * V, E);
    ops_did(o, "reference", ENG(xent)(&o->e, T, V, z->x, labels, w->x, loss->x, dz->x, &err), &err);
    ops_did(o, "xent", ckpt_cuda_xent(&o->c, T, V, z->dev, dlabels, NULL, loss->dev, NULL, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "xent loss alone", loss);
    if (in_place) {
        memcpy(z->x, dz->x, (size_t)(T * V) * sizeof(double));
        dz = z;
    }
    ops_did(o, "xent",
            ckpt_cuda_xent(&o->c, T, V, z->dev, dlabels, w->dev, loss->dev, dz->dev, &err), &err);
    (void)dev_wait();
    ops_same(o, "xent loss", loss);
    ops_same(o, "xent dlogits", dz);
    dev_free(dlabels);
    free(labels);
    ops_clear(o);
}

static inline void ops_rope(ops_run *o, int64_t T, int64_t heads, int64_t dim, bool interleaved)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t ldh = dim + 3, ldx = heads * ldh + 1;
    const ckpt_eng_rope r = {
        .kind = CKPT_ENG_ROPE_PLAIN, .interleaved = interleaved, .dim = dim, .base = 1e4};
    ckpt_err err;
    kda_array *c = ops_in(o, T * dim / 2, CKPT_F32, -1, 1),
              *s = ops_in(o, T * dim / 2, CKPT_F32, -1, 1);
    for (int inverse = 0; inverse < 2; inverse++) {
        kda_array *x = ops_in(o, T * ldx, E, -1, 1);
        ops_did(o, "reference",
                ENG(rope)(&o->e, &r, T, heads, x->x, ldx, ldh, c->x, s->x, inverse, &err), &err);
        ops_did(o, "rope",
                ckpt_cuda_rope(&o->c, dim, interleaved, T, heads, x->dev, ldx, ldh, c->dev, s->dev,
                               inverse, &err),
                &err);
        (void)dev_wait();
        ops_same(o, "rope", x);
    }
    ops_clear(o);
}

/* The same bits as the CPU: w, m, v, bf16 of w, chunk sums and the norm. */
/* Of the f32 build. */
ckpt_status ckpt_eng_rope_freqs_f32(const ckpt_eng_rope *r, float *freq, float *scale,
                                    ckpt_err *err);
ckpt_status ckpt_eng_rope_table_f32(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                                    const int64_t *offset, float *cos, float *sin, ckpt_err *err);

/* Tables of n sequences against the f32 engine's, whose angles are rounded as the device's: positions from
 * 0 and, `late`, from some 200,000 on. */
static inline void ops_rope_table(ops_run *o, const int64_t *cu, int64_t n, int64_t dim, bool late)
{
    const ckpt_eng_rope r = {.kind = CKPT_ENG_ROPE_YARN,
                             .dim = dim,
                             .base = 1e4,
                             .factor = 4,
                             .original_max = 64,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .mscale = 1,
                             .mscale_all_dim = 0.5};
    const int64_t T = cu[n], half = dim / 2;
    const ckpt_eng_seq seq = {n, cu};
    int64_t from[16];
    float *want[2], scale = 0;
    ckpt_err err;
    for (int64_t i = 0; i < n; i++)
        from[i] = 200003 * (i + 1);
    kda_array *freq = ops_in(o, half, CKPT_F32, 0, 1), *to[2];
    for (int i = 0; i < 2; i++) {
        to[i] = ops_out(o, T * half, CKPT_F32);
        want[i] = malloc((size_t)(T * half + 1) * sizeof *want[i]);
    }
    float *rounded = malloc((size_t)half * sizeof *rounded);
    ops_did(o, "reference", ckpt_eng_rope_freqs_f32(&r, rounded, &scale, &err), &err);
    ops_did(o, "reference",
            ckpt_eng_rope_table_f32(&o->e, &r, &seq, late ? from : NULL, want[0], want[1], &err),
            &err);
    for (int64_t i = 0; i < half; i++)
        freq->x[i] = (double)rounded[i];
    kda_put(freq);
    void *dcu = dev_alloc(256), *dfrom = dev_alloc(256);
    dev_put(dcu, cu, (size_t)(n + 1) * sizeof *cu);
    dev_put(dfrom, from, (size_t)n * sizeof *from);
    const ckpt_cuda_seq there = {.n = n, .tokens = T, .cu = dcu};
    ops_did(o, "rotary tables",
            ckpt_cuda_rope_table(&o->c, &there, late ? dfrom : NULL, half, freq->dev, scale,
                                 to[0]->dev, to[1]->dev, &err),
            &err);
    (void)dev_wait();
    for (int i = 0; i < 2; i++) {
        for (int64_t k = 0; k < T * half; k++)
            to[i]->x[k] = (double)want[i][k];
        ops_same(o, i ? "sine" : "cosine", to[i]);
        free(want[i]);
    }
    free(rounded);
    dev_free(dcu);
    dev_free(dfrom);
    ops_clear(o);
}

static inline void ops_optim(ops_run *o, int64_t n)
{
    const ckpt_adamw_scalars k = {.scale = 0.7F,
                                  .rise1 = 0.1F,
                                  .keep2 = 0.95F,
                                  .rise2 = 0.05F,
                                  .decay = 0.9999F,
                                  .root = 0.3F,
                                  .eps = 1e-8F,
                                  .negative = -0.003F};
    ckpt_err err;
    float *x[4];
    void *dev[4], *dbits = dev_alloc((size_t)n * 2 + 256);
    uint16_t *bits = malloc((size_t)n * 2 + 2);
    const int64_t chunks = ckpt_optim_chunks(0, 0, n);
    double *sums = malloc((size_t)chunks * 8 + 8), norm;
    void *dsums = dev_alloc((size_t)chunks * 8 + 256), *dnorm = dev_alloc(256);
    for (int a = 0; a < 4; a++) {
        x[a] = malloc((size_t)n * 4 + 4);
        for (int64_t i = 0; i < n; i++)
            x[a][i] = (float)kda_number(a == 2 ? 0 : -1, 1);
        dev[a] = dev_alloc((size_t)n * 4 + 256);
        dev_put(dev[a], x[a], (size_t)n * 4);
    }
    ckpt_elementwise_for(o->e.isa)->adamw(n, &k, x[0], x[1], x[2], x[3]);
    ckpt_optim_round_bf16(&o->e, n, x[0], NULL, bits);
    ops_did(o, "adamw", ckpt_cuda_adamw(&o->c, n, &k, dev[0], dev[1], dev[2], dev[3], dbits, &err),
            &err);
    if (n > 0)
        ckpt_optim_sumsq(&o->e, 0, 0, n, x[3], sums);
    norm = sqrt(ckpt_optim_sum(sums, chunks));
    ops_did(o, "sumsq", ckpt_cuda_sumsq(&o->c, n, dev[3], dsums, &err), &err);
    ops_did(o, "norm", ckpt_cuda_norm(&o->c, chunks, dsums, dnorm, &err), &err);
    (void)dev_wait();
    ops_equal(o, "adamw w", dev[0], x[0], (size_t)n * 4);
    ops_equal(o, "adamw m", dev[1], x[1], (size_t)n * 4);
    ops_equal(o, "adamw v", dev[2], x[2], (size_t)n * 4);
    ops_equal(o, "adamw bf16", dbits, bits, (size_t)n * 2);
    ops_equal(o, "chunk sums", dsums, sums, (size_t)chunks * 8);
    ops_equal(o, "norm", dnorm, &norm, 8);
    for (int a = 0; a < 4; a++) {
        free(x[a]);
        dev_free(dev[a]);
    }
    free(bits);
    free(sums);
    dev_free(dbits);
    dev_free(dsums);
    dev_free(dnorm);
}

/* The engine's router takes hidden states: with the identity as its weight they are the logits. */
static inline void ops_route(ops_run *o, const ckpt_cuda_route *r, int64_t T, bool bias, double aux,
                             double z, bool ties)
{
    const int64_t E = r->E, k = r->top_k, n = T * k;
    const ckpt_eng_moe m = {.H = E,
                            .E = E,
                            .FE = 1,
                            .top_k = k,
                            .groups = r->groups,
                            .group_top_k = r->group_top_k,
                            .group_best = r->group_best,
                            .softmax = r->softmax,
                            .normalize = r->normalize,
                            .scale = (double)r->scale,
                            .aux_coef = aux,
                            .z_coef = z};
    ckpt_err err;
    kda_array *logit = ops_in(o, T * E, CKPT_F32, -3, 3), *b = ops_in(o, E, CKPT_F32, -0.2, 0.2);
    for (int64_t i = 0; ties && i < T * E; i++)
        logit->x[i] = floor(logit->x[i]);
    kda_put(logit);
    kda_array *score = ops_out(o, T * E, CKPT_F32), *lse = ops_out(o, T, CKPT_F32);
    kda_array *weight = ops_out(o, n, CKPT_F32), *total = ops_out(o, T, CKPT_F32);
    kda_array *dw = ops_in(o, n, CKPT_F32, -1, 1), *dz = ops_out(o, T * E, CKPT_F32);
    kda_array *eye = ops_out(o, E * E, CKPT_F32), *copy = ops_out(o, T * E, CKPT_F32);
    for (int64_t i = 0; i < E; i++)
        eye->x[i * E + i] = 1;
    ENG(moe_params) p = {.router = eye->x, .router_bias = bias ? b->x : NULL}, g = {0};
    int32_t *ints = malloc((size_t)(3 * n) * 4 + 4);
    int64_t *first = malloc((size_t)(E + 1) * 8);
    double side[2];
    ENG(moe_saved)
    s = {.logit = copy->x,
         .score = score->x,
         .lse = lse->x,
         .chosen = ints,
         .weight = weight->x,
         .total = total->x,
         .first = first,
         .row_of = ints + n,
         .slot_of = ints + 2 * n};
    ops_did(o, "reference", ENG(route)(&o->e, &m, T, &p, logit->x, &s, side, NULL, &err), &err);
    ops_did(o, "reference",
            ENG(route_bwd)(&o->e, &m, T, &p, &s, logit->x, dw->x, 1, dz->x, &g, &err), &err);
    void *chosen = dev_alloc((size_t)n * 4 + 256), *row_of = dev_alloc((size_t)n * 4 + 256);
    void *slot_of = dev_alloc((size_t)n * 4 + 256), *dfirst = dev_alloc((size_t)(E + 1) * 8 + 256);
    ckpt_cuda_route plain = *r;
    plain.groups = 0;
    ops_work(o, E);
    /* how often each expert is among the best without bias and groups */
    ops_did(o, "route",
            ckpt_cuda_router(&o->c, &plain, T, logit->dev, NULL, score->dev, lse->dev, chosen,
                             weight->dev, total->dev, &err),
            &err);
    void *balance = dev_alloc((size_t)(E + 1) * 8 + 256);
    ops_did(o, "order", ckpt_cuda_order(&o->c, E, n, chosen, balance, row_of, slot_of, &err), &err);
    ops_did(o, "route",
            ckpt_cuda_router(&o->c, r, T, logit->dev, bias ? b->dev : NULL, score->dev, lse->dev,
                             chosen, weight->dev, total->dev, &err),
            &err);
    ops_did(o, "order", ckpt_cuda_order(&o->c, E, n, chosen, dfirst, row_of, slot_of, &err), &err);
    const double t2 = (double)T * (double)T;
    ops_did(o, "route",
            ckpt_cuda_router_bwd(&o->c, r, T, logit->dev, score->dev, lse->dev, chosen, total->dev,
                                 dw->dev, aux != 0 ? balance : NULL,
                                 aux * (double)E / ((double)k * t2), 2 * z / (double)T, dz->dev,
                                 &err),
            &err);
    (void)dev_wait();
    ops_same(o, "route score", score);
    ops_same(o, "route lse", lse);
    ops_equal(o, "route choice", chosen, ints, (size_t)n * 4);
    ops_same(o, "route weight", weight);
    ops_same(o, "route total", total);
    ops_equal(o, "order first", dfirst, first, (size_t)(E + 1) * 8);
    ops_equal(o, "order row_of", row_of, ints + n, (size_t)n * 4);
    ops_equal(o, "order slot_of", slot_of, ints + 2 * n, (size_t)n * 4);
    ops_same(o, "route dlogit", dz);
    dev_free(chosen);
    dev_free(row_of);
    dev_free(slot_of);
    dev_free(dfirst);
    dev_free(balance);
    free(ints);
    free(first);
    ops_clear(o);
}

static inline void ops_rows(ops_run *o, int64_t T, int64_t H, int64_t k)
{
    const ckpt_dtype E = OPS_E(o);
    const int64_t n = T * k;
    ckpt_err err;
    int32_t *row_of = malloc((size_t)n * 4 + 4), *slot_of = malloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) { /* a permutation: multiply by a number without its factors */
        row_of[i] = (int32_t)((i * 7919 + 3) % n);
        slot_of[row_of[i]] = (int32_t)i;
    }
    void *drow = ops_ints(row_of, n), *dslot = ops_ints(slot_of, n);
    kda_array *x = ops_in(o, T * H, E, -1, 1), *rows = ops_out(o, n * H, E);
    kda_array *out = ops_in(o, n * H, E, -1, 1), *y = ops_in(o, T * H, E, -1, 1),
              *y0 = ops_out(o, T * H, E);
    for (int64_t i = 0; i < n * H; i++)
        rows->x[i] = x->x[slot_of[i / H] / k * H + i % H];
    for (int64_t i = 0; i < T * H; i++) {
        double sum = 0;
        for (int64_t j = 0; j < k; j++)
            sum += out->x[row_of[i / H * k + j] * H + i % H];
        y0->x[i] = sum;
        y->x[i] += sum;
    }
    ops_did(o, "dispatch", ckpt_cuda_dispatch(&o->c, n, H, k, dslot, x->dev, rows->dev, &err),
            &err);
    ops_did(o, "combine", ckpt_cuda_combine(&o->c, T, H, k, drow, out->dev, true, y->dev, &err),
            &err);
    ops_did(o, "combine", ckpt_cuda_combine(&o->c, T, H, k, drow, out->dev, false, y0->dev, &err),
            &err);
    (void)dev_wait();
    ops_same(o, "dispatch", rows);
    ops_same(o, "combine", y0);
    ops_same(o, "combine added", y);
    dev_free(drow);
    dev_free(dslot);
    free(row_of);
    free(slot_of);
    ops_clear(o);
}

#endif
