/* verify --forward: run the model on the engine and print what comes out; with --against or
 * --reference compare it with another checkpoint's or a peer's numbers.
 *
 * Tokens: of the reference (input_ids [B, S], optional labels [B, S]), of --tokens (decimal numbers, one
 * sequence a line), else two fixed sequences. Without labels the loss is the mean over shifted ids. A
 * reference holds gradients under the stored names of the checkpoint's own layout, so that binding it
 * like the checkpoint gives them their canonical names.
 *
 * Ranks (mpirun) run one batch together: heads are cut over tp, sequences over cp, experts over ep. Rank 0
 * then has all logits and gradients, compares and tells; what it found is what every rank found. */
#include "device.h"
#include "network.h"
#include "quant_policy.h"
#include "ranks.h"
#include "verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"

#define FIXED_SEQUENCES 2
#define FIXED_TOKENS 64
#define MAX_TOKENS ((int64_t)1 << 24)
#define LOGITS_RTOL 2e-5
#define GRAD_RTOL 2e-4
#define MTP_COEF 0.1 /* Megatron's mtp_loss_scaling_factor */

typedef struct tokens {
    ckpt_eng_seq seq;
    int64_t *cu;
    int32_t *ids, *labels;
    int64_t n;
} tokens;

/* A network with the results of its one pass. */
typedef struct passed {
    ENG(network) net;
    ckpt_eng e;
    ENG(run) run;
    float *logits; /* [T, V] */
    float *grads;  /* of a device's network or of all ranks, here; else NULL */
    const ckpt_eng_networks *networks;
    ckpt_policy policy;
    ckpt_quant_report report;
} passed;

/* Squared differences and what they are relative to. */
typedef struct distance {
    double diff2, ref2, most;
    bool same; /* bit for bit */
} distance;

static double relative(const distance *d)
{
    if (d->diff2 == 0)
        return 0;
    return d->ref2 > 0 ? sqrt(d->diff2 / d->ref2) : INFINITY;
}

static distance measure(const float *a, const float *b, int64_t n)
{
    distance d = {.same = memcmp(a, b, (size_t)n * sizeof *a) == 0};
    for (int64_t i = 0; i < n; i++) {
        double x = (double)a[i] - (double)b[i];
        d.diff2 += x * x;
        d.ref2 += (double)b[i] * (double)b[i];
        d.most = fmax(d.most, fabs(x));
    }
    return d;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static void tokens_free(tokens *t)
{
    free(t->cu);
    free(t->ids);
    free(t->labels);
}

/* Room for n tokens in `sequences`; cu is left to the caller. */
static ckpt_status tokens_alloc(tokens *t, int64_t sequences, int64_t n, ckpt_err *err)
{
    if (n < 1 || n > MAX_TOKENS || sequences < 1 || sequences > n)
        return ckpt_fail(err, CKPT_E_FORMAT, "%lld sequences of %lld tokens, expected 1 to %lld",
                         (long long)sequences, (long long)n, (long long)MAX_TOKENS);
    t->n = n;
    t->cu = calloc((size_t)sequences + 1, sizeof *t->cu);
    t->ids = calloc((size_t)n, sizeof *t->ids);
    t->labels = calloc((size_t)n, sizeof *t->labels);
    t->seq = (ckpt_eng_seq){sequences, t->cu};
    if (t->cu == NULL || t->ids == NULL || t->labels == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld tokens", (long long)n);
    return CKPT_OK;
}

static void shift_labels(tokens *t)
{
    for (int64_t s = 0; s < t->seq.n; s++)
        for (int64_t i = t->cu[s]; i < t->cu[s + 1]; i++)
            t->labels[i] = i + 1 < t->cu[s + 1] ? t->ids[i + 1] : -1;
}

static ckpt_status fixed_tokens(tokens *t, int64_t vocabulary, ckpt_err *err)
{
    uint64_t state = 0;
    ckpt_status status = tokens_alloc(t, FIXED_SEQUENCES, FIXED_SEQUENCES * FIXED_TOKENS, err);
    if (status != CKPT_OK)
        return status;
    for (int64_t s = 0; s <= FIXED_SEQUENCES; s++)
        t->cu[s] = s * FIXED_TOKENS;
    for (int64_t i = 0; i < t->n; i++)
        t->ids[i] = (int32_t)(ckpt_tool_draw(&state) % (uint64_t)vocabulary);
    shift_labels(t);
    return CKPT_OK;
}

static ckpt_status parse_tokens(tokens *t, char *text, ckpt_err *err)
{
    int64_t n = 0, rows = 0;
    for (char *p = text; *p != '\0';) { /* count */
        bool any = false;
        for (; *p != '\0' && *p != '\n'; p++)
            if (strchr(" \t\r", *p) == NULL && (p == text || strchr(" \t\r\n", p[-1]) != NULL)) {
                n++;
                any = true;
            }
        rows += any;
        p += *p == '\n';
    }
    if (n > 0 && n == rows)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%lld token%s, none followed by another on its line: nothing to predict; "
                         "expected a line of at least 2",
                         (long long)n, n == 1 ? "" : "s");
    ckpt_status status = tokens_alloc(t, rows, n, err);
    if (status != CKPT_OK)
        return status;
    int64_t at = 0, line = 0;
    for (char *p = text; *p != '\0';) {
        while (*p == ' ' || *p == '\t' || *p == '\r')
            p++;
        if (*p == '\n' || *p == '\0') {
            if (at > t->cu[line])
                t->cu[++line] = at;
            p += *p == '\n';
            continue;
        }
        char *end;
        long long v = strtoll(p, &end, 10);
        if (end == p || strchr(" \t\r\n", *end) == NULL || v < 0 || v > INT32_MAX)
            return ckpt_fail(err, CKPT_E_FORMAT, "token %lld: found '%.20s', expected a number",
                             (long long)at, p);
        t->ids[at++] = (int32_t)v;
        p = end;
    }
    if (at > t->cu[line])
        t->cu[++line] = at;
    shift_labels(t);
    return CKPT_OK;
}

static ckpt_status file_tokens(tokens *t, const char *path, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_status status = ckpt_read_file(path, (size_t)64 << 20, &text, err);
    if (status == CKPT_OK)
        ckpt_buf_putc(&text, '\0');
    if (status == CKPT_OK && text.failed)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading tokens");
    if (status == CKPT_OK)
        status = parse_tokens(t, (char *)text.data, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, path);
    ckpt_buf_release(&text);
    return status;
}

/* An integer tensor of the reference into 32-bit ids. */
static ckpt_status read_ids(const ckpt_source *ref, const char *name, int64_t n, int32_t *out,
                            ckpt_err *err)
{
    int64_t at = ckpt_source_find(ref, name);
    ckpt_source *src = (ckpt_source *)(uintptr_t)ref;
    const ckpt_tensor *t = &ref->tensors[at];
    int64_t numel;
    size_t size = (size_t)ckpt_dtype_get(t->dtype)->bits / 8;
    if ((t->dtype != CKPT_I64 && t->dtype != CKPT_I32) || t->n_chunks != 1 ||
        !ckpt_numel(t->rank, t->dims, &numel) || numel != n)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': expected I64 or I32 of %lld elements",
                         name, (long long)n);
    uint8_t *buf = malloc((size_t)n * size + 1);
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %lld ids", (long long)n);
    ckpt_status status =
        ckpt_source_read(src, t->chunks[0].file, buf, (size_t)n * size, t->chunks[0].offset, err);
    for (int64_t i = 0; status == CKPT_OK && i < n; i++) {
        double id = ckpt_dtype_load(t->dtype, buf, i);
        if (fabs(id) > INT32_MAX)
            status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': element %lld is %.0f", name,
                               (long long)i, id);
        else
            out[i] = (int32_t)id;
    }
    free(buf);
    return status;
}

static ckpt_status reference_tokens(tokens *t, const ckpt_source *ref, ckpt_err *err)
{
    int64_t at = ckpt_source_find(ref, "input_ids");
    ckpt_status status;
    if (at < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no tensor 'input_ids'");
    const ckpt_tensor *ids = &ref->tensors[at];
    int64_t b = ids->rank == 2 ? ids->dims[0] : 1;
    int64_t s = ids->rank == 2 ? ids->dims[1] : ids->rank == 1 ? ids->dims[0] : 0;
    if (b > MAX_TOKENS || s > MAX_TOKENS)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor 'input_ids': too large");
    CKPT_CHECK(tokens_alloc(t, b, b * s, err));
    for (int64_t i = 0; i <= b; i++)
        t->cu[i] = i * s;
    CKPT_CHECK(read_ids(ref, "input_ids", t->n, t->ids, err));
    if (ckpt_source_find(ref, "labels") >= 0)
        CKPT_CHECK(read_ids(ref, "labels", t->n, t->labels, err));
    else
        shift_labels(t);
done:
    return status;
}

/* ---- running --------------------------------------------------------------------------------- */

/* The policy of a checkpoint; --policy and --approximate-solve are for PATH alone. */
static ckpt_status choose_policy(verification *v, const ckpt_model *model, const ckpt_manifest *m,
                                 passed *out, ckpt_err *err)
{
    const bool own = model == &v->model;
    ckpt_policy_choice choice;
    ckpt_status status =
        ckpt_policy_choose(&out->policy, model, m, own ? v->o->policy : NULL, &choice, err);
    for (size_t i = 0; i < out->policy.n && own && v->o->solve > 0; i++)
        out->policy.modules[i].q.solve_factors = (int)v->o->solve;
    if (status == CKPT_OK && own && v->o->solve > 0 && !out->policy.enabled)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "--approximate-solve without a quantisation policy: no inverse is made");
    if (status == CKPT_OK && own)
        ckpt_policy_hint(v->tool, &out->policy, v->o->policy);
    return status;
}

/* From the device to where they are compared. */
static ckpt_status bring_gradients(passed *p, ckpt_err *err)
{
    const size_t bytes = (size_t)p->net.n_elements * sizeof *p->grads;
    p->grads = malloc(bytes + 1);
    if (p->grads == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for gradients");
    for (size_t i = 0; i < p->net.n_params; i++)
        if (p->net.params[i].grad != NULL)
            p->net.params[i].grad = p->grads + p->net.params[i].at;
    return ckpt_eng_get(&p->e, p->grads, p->net.grads, bytes, err);
}

/* Elements of the whole parameter, of which this process may have a part. */
static int64_t whole_of(const ENG(param) * p)
{
    int64_t n = 0;
    return ckpt_numel(p->box.rank, p->box.dims, &n) ? n : 0;
}

/* Of the parts that ranks have, complete after a sum, the whole on rank 0. */
static ckpt_status gather_gradients(passed *p, const ckpt_model *model, ckpt_err *err)
{
    const bool lead = p->e.par->world->rank == 0;
    int64_t all = 0;
    ckpt_status status;
    CKPT_CHECK(p->networks->sum_grads(&p->e, &p->net, err));
    for (size_t i = 0; i < p->net.n_params; i++)
        all += ckpt_canon_trains(p->net.params[i].name) ? whole_of(&p->net.params[i]) : 0;
    p->grads = lead ? malloc((size_t)all * sizeof *p->grads + 1) : NULL;
    if (lead && p->grads == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for gradients");
    for (size_t i = 0, at = 0; i < p->net.n_params; i++) {
        ENG(param) *q = &p->net.params[i];
        if (!ckpt_canon_trains(q->name))
            continue;
        float *whole = lead ? p->grads + at : NULL;
        CKPT_CHECK(p->networks->gather(&p->e, &p->net, model, i, q->grad, whole, err));
        q->grad = whole;
        q->n = whole_of(q);
        at += (size_t)q->n;
    }
done:
    return status;
}

static ckpt_status run_model(verification *v, const ckpt_model *model, const ckpt_manifest *m,
                             const tokens *t, passed *out, ckpt_err *err)
{
    ckpt_eng_spec_opts opts = {
        .latent_eps = v->o->latent_eps, .policy = &out->policy, .quant_report = &out->report};
    ENG(batch) batch = {&t->seq, t->ids, t->labels};
    ckpt_status status = choose_policy(v, model, m, out, err);
    if (status != CKPT_OK)
        return status;
    ckpt_eng_init(&out->e, (int)v->tool->g.threads);
    out->e.device = v->tool->device;
    out->e.par = v->tool->ranks != NULL ? &v->tool->ranks->par : NULL;
    out->networks = ckpt_eng_networks_of(&out->e, v->o->dtype == 1);
    CKPT_CHECK(out->networks->open(&out->net, &out->e, model, &opts, true, err));
    out->logits = malloc((size_t)t->n * (size_t)out->net.spec.V * sizeof *out->logits);
    if (out->logits == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for logits");
    out->run = (ENG(run)){.backward = true,
                          .recompute = v->o->recompute,
                          .mtp_coef = v->o->mtp_coef >= 0 ? v->o->mtp_coef : MTP_COEF,
                          .logits = out->logits};
    CKPT_CHECK(out->networks->run(&out->e, &out->net, &batch, &out->run, err));
    if (v->tool->g.verbose)
        ckpt_tool_note(v->tool, "engine: %s for activations, %s each for parameters and gradients",
                       ckpt_human(&v->tool->arena, out->e.peak),
                       ckpt_human(&v->tool->arena, (uint64_t)out->net.n_elements * sizeof(float)));
    CKPT_CHECK(ckpt_eng_reserve(&out->e, out->e.peak, err));
    CKPT_CHECK(out->networks->run(&out->e, &out->net, &batch, &out->run, err));
    if (out->e.par != NULL)
        status = gather_gradients(out, model, err);
    else if (out->e.device != NULL)
        status = bring_gradients(out, err);
done:
    return status;
}

static void passed_free(passed *p)
{
    if (p->networks != NULL)
        p->networks->close(&p->net);
    free(p->grads);
    ckpt_policy_release(&p->policy);
    ckpt_eng_release(&p->e);
    free(p->logits);
    p->logits = NULL;
}

/* Without its loss, multi-token prediction is no part of the model. */
static bool has_gradient(const passed *r, const ENG(param) * p)
{
    bool mtp = strncmp(p->name, "mtp.", 4) == 0;
    long long block = -1;
    if (!mtp && sscanf(p->name, "blocks.%lld.", &block) == 1)
        mtp = block >= r->net.spec.main_blocks;
    return p->grad != NULL && !(mtp && r->run.mtp_coef == 0);
}

static double grad_norm(const ENG(param) * p)
{
    double sum = 0;
    for (int64_t i = 0; i < p->n; i++)
        sum += (double)p->grad[i] * (double)p->grad[i];
    return sqrt(sum);
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Mean Kullback-Leibler divergence of b's predictions from a's, and how often the best token agrees. */
static void compare_predictions(const float *a, const float *b, int64_t T, int64_t V, double *kl,
                                double *agree)
{
    double sum = 0;
    int64_t same = 0;
    for (int64_t t = 0; t < T; t++) {
        const float *x = a + t * V, *y = b + t * V;
        int64_t bx = 0, by = 0;
        double lx = 0, ly = 0;
        for (int64_t i = 1; i < V; i++) {
            bx = x[i] > x[bx] ? i : bx;
            by = y[i] > y[by] ? i : by;
        }
        for (int64_t i = 0; i < V; i++) {
            lx += exp((double)x[i] - (double)x[bx]);
            ly += exp((double)y[i] - (double)y[by]);
        }
        lx = log(lx) + (double)x[bx];
        ly = log(ly) + (double)y[by];
        for (int64_t i = 0; i < V; i++)
            sum += exp((double)x[i] - lx) * (((double)x[i] - lx) - ((double)y[i] - ly));
        same += bx == by;
    }
    *kl = sum / (double)T;
    *agree = (double)same / (double)T;
}

/* What a comparison found, for text and --json. */
typedef struct comparison {
    distance logits;
    double kl, agree, worst, rtol, grad_rtol;
    const char *worst_name;
    bool grads_same, has_predictions;
} comparison;

static void add_grad(verification *v, comparison *c, const char *name, const float *a,
                     const float *b, int64_t n)
{
    distance d = measure(a, b, n);
    double r = relative(&d);
    c->grads_same = c->grads_same && d.same;
    if (!(r <= c->worst) || c->worst_name == NULL) {
        c->worst = r;
        c->worst_name = name;
    }
    if (!(r <= c->grad_rtol))
        ckpt_verify_problem(v, "gradient of %s: relative RMS %.3g, allowed %.3g", name, r,
                            c->grad_rtol);
}

static void judge_logits(verification *v, const comparison *c)
{
    double r = relative(&c->logits);
    if (!(r <= c->rtol))
        ckpt_verify_problem(v, "logits: relative RMS %.3g, allowed %.3g", r, c->rtol);
}

static void show_comparison(verification *v, const comparison *c, const char *with)
{
    ckpt_jw *w = &v->tool->json;
    double r = relative(&c->logits);
    if (v->tool->g.json) {
        ckpt_jw_open(w, "errors", '{');
        ckpt_jw_bool(w, "identical", c->logits.same && c->grads_same);
        ckpt_jw_real(w, "logits_max_abs", c->logits.most);
        ckpt_jw_real(w, "logits_rel_rms", r);
        if (c->has_predictions) {
            ckpt_jw_real(w, "kl", c->kl);
            ckpt_jw_real(w, "top1_agreement", c->agree);
        }
        ckpt_jw_string(w, "worst_gradient", c->worst_name);
        ckpt_jw_real(w, "worst_gradient_rel_rms", c->worst);
        ckpt_jw_close(w, '}');
    }
    if (!ckpt_tool_text(v->tool))
        return;
    if (c->logits.same && c->grads_same) {
        printf("against %s: logits and gradients bit-identical\n", with);
        return;
    }
    printf("against %s: logits max abs %.3g, relative RMS %.3g", with, c->logits.most, r);
    if (c->has_predictions)
        printf(", KL %.3g, top-1 agreement %.4f", c->kl, c->agree);
    printf("; worst gradient %s, relative RMS %.3g\n",
           c->worst_name != NULL ? c->worst_name : "none", c->worst);
}

static ckpt_status compare_checkpoint(verification *v, const passed *a, const tokens *t,
                                      ckpt_err *err)
{
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_manifest manifest = {0};
    bool has_manifest = false;
    passed b = {0};
    ckpt_status status;
    ckpt_model_opts bind = {.allow_unknown = v->o->allow_unknown};
    comparison c = {.grads_same = true,
                    .has_predictions = true,
                    .rtol = v->o->rtol >= 0 ? v->o->rtol : 0,
                    .grad_rtol = v->o->grad_rtol >= 0 ? v->o->grad_rtol : 0};
    CKPT_CHECK(ckpt_tool_open(v->tool, &src, v->o->against, -1, err));
    CKPT_CHECK(ckpt_tool_bind(v->tool, &model, &src, &bind, err));
    CKPT_TRY(ckpt_manifest_load(&src, &manifest, &has_manifest, err), "%s", v->o->against);
    status = run_model(v, &model, has_manifest ? &manifest : NULL, t, &b, err);
    if (status != CKPT_OK) {
        ckpt_tool_frame(err, v->o->against);
        goto done;
    }
    if (!ckpt_ranks_lead(v->tool->ranks))
        goto done;
    if (b.net.spec.V != a->net.spec.V) {
        ckpt_verify_problem(v, "%lld logits a token, %s has %lld", (long long)a->net.spec.V,
                            v->o->against, (long long)b.net.spec.V);
        goto done;
    }
    c.logits = measure(a->logits, b.logits, t->n * a->net.spec.V);
    compare_predictions(b.logits, a->logits, t->n, a->net.spec.V, &c.kl, &c.agree);
    judge_logits(v, &c);
    for (size_t i = 0; i < a->net.n_params; i++) {
        const ENG(param) *p = &a->net.params[i], *q = ENG(network_param)(&b.net, p->name);
        if (q == NULL || q->n != p->n)
            ckpt_verify_warning(v, "gradient of %s: not a parameter of %s", p->name, v->o->against);
        else if (has_gradient(a, p))
            add_grad(v, &c, p->name, p->grad, q->grad, p->n);
    }
    show_comparison(v, &c, v->o->against);
done:
    passed_free(&b);
    ckpt_manifest_release(&manifest);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}

/* Leave the gradients alone, under the names of the parameters, and lend the reference the
 * checkpoint's configuration. Names keep their order. */
static void keep_gradients(ckpt_source *ref, const ckpt_source *like)
{
    size_t kept = 0;
    for (size_t i = 0; i < ref->n_tensors; i++)
        if (strncmp(ref->tensors[i].name, "grad.", 5) == 0) {
            ref->tensors[kept] = ref->tensors[i];
            ref->tensors[kept++].name += 5;
        }
    ref->n_tensors = kept;
    ckpt_json_free(ref->config);
    ref->config = ckpt_json_dup(like->config);
    ref->config_kind = like->config_kind;
}

/* A whole float tensor into out. */
static ckpt_status read_floats(const ckpt_model *m, size_t tensor, int64_t n, float *out,
                               ckpt_err *err)
{
    const ckpt_canon *c = &m->tensors[tensor];
    int64_t numel;
    if (c->dtype != CKPT_F32 || !ckpt_numel(c->rank, c->dims, &numel) || numel != n)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': expected F32 of %lld elements", c->name,
                         (long long)n);
    return ckpt_model_read(m, tensor, 0, (size_t)n * sizeof *out, out, err);
}

static ckpt_status compare_logits(verification *v, const ckpt_source *ref, const passed *a,
                                  const tokens *t, comparison *c, ckpt_err *err)
{
    int64_t n = t->n * a->net.spec.V, at = ckpt_source_find(ref, "logits");
    ckpt_source *src = (ckpt_source *)(uintptr_t)ref;
    ckpt_status status = CKPT_OK;
    if (at < 0 || ref->tensors[at].dtype != CKPT_F32 || ref->tensors[at].n_chunks != 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "no F32 tensor 'logits'");
    int64_t numel = 0;
    if (!ckpt_numel(ref->tensors[at].rank, ref->tensors[at].dims, &numel) || numel != n)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor 'logits': %lld elements, expected %lld",
                         (long long)numel, (long long)n);
    float *logits = malloc((size_t)n * sizeof *logits + 1);
    if (logits == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for logits");
    CKPT_CHECK(ckpt_source_read(src, ref->tensors[at].chunks[0].file, logits,
                                (size_t)n * sizeof *logits, ref->tensors[at].chunks[0].offset,
                                err));
    c->logits = measure(a->logits, logits, n);
    judge_logits(v, c);
done:
    free(logits);
    return status;
}

/* transformers never trains the padding token's embedding: that row is no part of the comparison. */
static void skip_padding_row(const verification *v, const ENG(param) * p, int64_t H, float *want)
{
    int64_t pad = -1;
    if (strcmp(p->name, "embed.weight") != 0 || v->src.config_kind != CKPT_CONFIG_HF ||
        !ckpt_json_int(ckpt_json_get(v->src.config, "pad_token_id"), &pad) || pad < 0 ||
        pad >= p->n / H)
        return;
    memcpy(want + pad * H, p->grad + pad * H, (size_t)H * sizeof *want);
}

static ckpt_status compare_gradients(verification *v, const ckpt_model *ref, const passed *a,
                                     comparison *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < a->net.n_params; i++) {
        const ENG(param) *p = &a->net.params[i];
        int64_t at = ckpt_model_find(ref, p->name);
        if (!has_gradient(a, p))
            continue;
        if (at < 0) {
            ckpt_verify_problem(v, "gradient of %s: not in the reference", p->name);
            continue;
        }
        float *want = malloc((size_t)p->n * sizeof *want + 1);
        if (want == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a gradient");
        status = read_floats(ref, (size_t)at, p->n, want, err);
        if (status == CKPT_OK) {
            skip_padding_row(v, p, a->net.spec.H, want);
            add_grad(v, c, p->name, p->grad, want, p->n);
        }
        free(want);
        if (status != CKPT_OK)
            return status;
    }
    return status;
}

static ckpt_status compare_reference(verification *v, ckpt_source *ref, const passed *a,
                                     const tokens *t, ckpt_err *err)
{
    ckpt_model model = {0};
    ckpt_model_opts bind = {.layout = v->model.layout, .lenient = true};
    ckpt_status status;
    comparison c = {.grads_same = true,
                    .rtol = v->o->rtol >= 0 ? v->o->rtol : LOGITS_RTOL,
                    .grad_rtol = v->o->grad_rtol >= 0 ? v->o->grad_rtol : GRAD_RTOL};
    CKPT_TRY(compare_logits(v, ref, a, t, &c, err), "%s", v->o->reference);
    keep_gradients(ref, &v->src);
    if (ref->n_tensors > 0) {
        CKPT_TRY(ckpt_model_bind(&model, ref, &bind, err), "%s", v->o->reference);
        CKPT_TRY(compare_gradients(v, &model, a, &c, err), "%s", v->o->reference);
    }
    show_comparison(v, &c, v->o->reference);
done:
    ckpt_model_release(&model);
    return status;
}

/* ---- result ---------------------------------------------------------------------------------- */

static void show_policy(verification *v, const passed *p)
{
    const ckpt_quant_report *r = &p->report;
    ckpt_jw *w = &v->tool->json;
    if (!v->tool->g.json) {
        printf("quantisation policy %s\n", ckpt_policy_summary(&v->tool->arena, &p->policy));
        if (v->o->solve > 0)
            printf("approximate inverse, %lld factors: largest error %.3g, residual %.3g\n",
                   (long long)v->o->solve, r->inverse_error, r->inverse_residual);
        return;
    }
    ckpt_policy_json(w, &p->policy);
    if (v->o->solve > 0) {
        ckpt_jw_real(w, "inverse_error", r->inverse_error);
        ckpt_jw_real(w, "inverse_residual", r->inverse_residual);
    }
}

static ckpt_status show_run(verification *v, const passed *p, const tokens *t, ckpt_err *err)
{
    uint8_t digest[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_sha256 sha = {0};
    double all = 0;
    ckpt_status status = ckpt_sha256_init(&sha, err);
    if (status != CKPT_OK)
        return status;
    ckpt_sha256_update(&sha, p->logits, (size_t)t->n * (size_t)p->net.spec.V * sizeof(float));
    ckpt_sha256_final(&sha, digest);
    ckpt_sha256_release(&sha);
    ckpt_hex(digest, hex);
    ckpt_jw *w = &v->tool->json;
    if (v->tool->g.json) {
        ckpt_jw_real(w, "loss", p->run.loss);
        if (p->net.spec.mtp_layers > 0)
            ckpt_jw_real(w, "mtp_loss", p->run.mtp_loss);
        ckpt_jw_string(w, "logits_digest", hex);
        ckpt_jw_u64(w, "tokens", (uint64_t)t->n);
        if (p->policy.enabled)
            show_policy(v, p);
        ckpt_jw_open(w, "grad_norms", '{');
    } else if (ckpt_tool_text(v->tool)) {
        printf("%lld tokens in %lld sequences: loss %.8f, logits sha256 %s\n", (long long)t->n,
               (long long)t->seq.n, p->run.loss, hex);
        if (p->net.spec.mtp_layers > 0)
            printf("multi-token prediction: loss %.8f with its share %g\n", p->run.mtp_loss,
                   p->run.mtp_coef);
        if (p->policy.enabled)
            show_policy(v, p);
    }
    for (size_t i = 0; i < p->net.n_params; i++) {
        if (!has_gradient(p, &p->net.params[i]))
            continue;
        double norm = grad_norm(&p->net.params[i]);
        all += norm * norm;
        if (!isfinite(norm))
            ckpt_verify_problem(v, "gradient of %s is not finite", p->net.params[i].name);
        if (v->tool->g.json)
            ckpt_jw_real(w, p->net.params[i].name, norm);
        else if (ckpt_tool_text(v->tool))
            printf("  %12.6g  %s\n", norm, ckpt_tool_clean(v->tool, p->net.params[i].name));
    }
    if (v->tool->g.json) {
        ckpt_jw_close(w, '}');
        ckpt_jw_real(w, "grad_norm", sqrt(all));
    } else if (ckpt_tool_text(v->tool)) {
        printf("gradient norm %.8g\n", sqrt(all));
    }
    return CKPT_OK;
}

/* Rank 0's findings: the others have none of their own. */
static ckpt_status agree(verification *v, ckpt_err *err)
{
    const char *text = v->problems.n > 0 ? v->problems.items[0] : NULL;
    ckpt_status status = ckpt_ranks_tell(v->tool, &text, err);
    if (status == CKPT_OK && text != NULL && !ckpt_ranks_lead(v->tool->ranks))
        ckpt_verify_problem(v, "%s", text);
    return status;
}

ckpt_status ckpt_verify_forward(verification *v, ckpt_err *err)
{
    ckpt_source ref = {0};
    tokens t = {0};
    passed p = {0};
    int64_t V = 0;
    ckpt_status status = CKPT_OK;
    if (v->o->reference != NULL) {
        CKPT_CHECK(ckpt_tool_open(v->tool, &ref, v->o->reference, -1, err));
        status = reference_tokens(&t, &ref, err);
        if (status != CKPT_OK)
            ckpt_tool_frame(err, v->o->reference);
    } else if (v->o->tokens != NULL) {
        status = file_tokens(&t, v->o->tokens, err);
    } else {
        (void)ckpt_json_int(ckpt_json_get(v->model.config, "vocab_size"), &V);
        status = fixed_tokens(&t, V > 0 ? V : 1, err);
    }
    CKPT_CHECK(status);
    status = run_model(v, &v->model, v->has_manifest ? &v->manifest : NULL, &t, &p, err);
    if (status != CKPT_OK) {
        ckpt_tool_frame(err, v->path);
        goto done;
    }
    const bool lead = ckpt_ranks_lead(v->tool->ranks);
    if (lead)
        CKPT_CHECK(show_run(v, &p, &t, err));
    if (v->o->reference != NULL && lead)
        status = compare_reference(v, &ref, &p, &t, err);
    else if (v->o->against != NULL)
        status = compare_checkpoint(v, &p, &t, err);
    CKPT_CHECK(status);
    status = agree(v, err);
done:
    passed_free(&p);
    tokens_free(&t);
    ckpt_source_close(&ref);
    return status;
}
